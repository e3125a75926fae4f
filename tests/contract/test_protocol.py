"""Everything an agent can say, and hostile variants of it: the node fails, nothing else does."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import io
import json
import random
import re
import resource
import struct
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from each_case import each_case
from paceline.agent import frames, server
from paceline.agent.frames import (
    MAGIC,
    MAX_ANSWER,
    MAX_HELLO,
    Decoder,
    FrameError,
    encode,
)
from paceline.agent.surveys import facts
from paceline.launch.elastic.attempt import Attempt
from paceline.launch.elastic.retry_policy import RetryPolicy
from paceline.launch.nodes.fleet import Node
from paceline.launch.planning import planner
from paceline.launch.recorder import Recorder
from paceline.launch.terminal.screen import Screen
from paceline.remote import protocol
from paceline.remote.channel import Channel, HostUnresponsive, LoginError, ProtocolViolation
from paceline.remote.network import candidates
from paceline.remote.protocol import ANSWERS, BOOT, EVENTS, Conversation
from paceline.rundir.directory import RunDirectory
from paceline.spec.errors import NodeError, PacelineError
from paceline.spec.events import KINDS, Event
from paceline.spec.hosts import Host
from paceline.spec.job import Entry, Job
from paceline.spec.schema import MAX_DIGITS, InvalidValue

AGENT = Path(server.__file__).parent
LONGEST_S = 5.0
MOST_MEMORY = 500 << 20
VARIANTS = 60  # of each message
HEX = "ab" * 32
KEY = "0123456789abcdef01234567"
ENTRY = ["d/f", HEX, 0o644, 3]
SEEN = {"state": "S", "stack": ['File "a.py", line 3 in f']}
DOES = {"pid": 3, "call": "write", "on": "pipe:[4]", "readers": [3]}
LOOKED = {"cpu_s": 0.5, "moved": 9, "sent": 5, "switches": 4, "calls": ["0 1 barrier"], **DOES,
          "unfinished": "", **SEEN,
          "children": [{"name": "yes", "stack": [], **DOES}]}  # fmt: skip
MEMORY = {"kills": 1, "limit": {"bytes": 5, "peak": None, "group": "/a"}, "kernel": ["x"]}

# by request: its fields, a right answer and the bytes that come with it
REQUESTS: dict[str, tuple[dict[str, Any], dict[str, Any], bytes]] = {
    "lease": ({"seconds": 10.0}, {"monotonic": 1.5, "time": 2.5}, b""),
    "prepare": ({}, {}, b""),
    "listen": ({"addresses": ["10.0.0.1"]}, {"ports": {"10.0.0.1": 77}, "errors": {}}, b""),
    "stop_listening": ({}, {}, b""),
    "connect": (
        {"targets": [{"host": "n2", "address": "10.0.0.2", "port": 7, "identity": "x"}]},
        {"results": [{"host": "n2", "address": "10.0.0.2", "port": 7, "ok": True, "rtt": 0.1,
                      "local_address": "10.0.0.1", "reached": "ab"}]}, b""),
    "reserve_port": ({"address": "10.0.0.1", "port": 0}, {"port": 29500}, b""),
    "start": ({"ranks": [{"rank": 0}]}, {}, b""),
    "add_ranks": ({"ranks": [{"rank": 0}]}, {}, b""),
    "tell_ranks": ({"line": {"control": "end", "why": "x"}}, {}, b""),
    "kill_ranks": ({"ranks": [0]}, {"killed": 1}, b""),
    "open_store": ({"address": "10.0.0.1", "addresses": ""}, {"port": 29500}, b""),
    "admit": ({"addresses": "10.0.0.1"}, {}, b""),
    "dump_stacks": ({}, {}, b""),
    "seen": ({}, {"ranks": [{"rank": 0, **LOOKED}]}, b""),
    "stop": ({"signal": 15}, {}, b""),
    "kill": ({}, {"killed": 2}, b""),
    "compare_tree": ({"manifest": [ENTRY]},
                     {"exists": True, "missing": ["d/f"], "different": []}, b""),
    "lacking_blobs": ({"manifest": [ENTRY]}, {"hashes": [HEX]}, b""),
    "put_blob": ({}, {}, b""),
    "put_blobs": ({}, {}, b""),
    "put_file": ({}, {}, b""),
    "place": ({}, {}, b""),
    "build_tree": ({"manifest": [ENTRY], "folder": "r", "name": "code"},
                   {"root": "/c/paceline/jobs/r/code", "damaged": []}, b""),
    "run_folder": ({"path": "/home/u/runs/1", "key": KEY},
                   {"shared": False, "folder": f"/c/paceline/runs/{KEY}"}, b""),
    "discard_run_folder": ({}, {}, b""),
    "keep_folder": ({}, {}, b""),
    "set_outputs_aside": ({}, {}, b""),
    "discard_uncollected": ({}, {}, b""),
    "forget_outputs": ({}, {}, b""),
    "put_output": ({}, {}, b""),
    "list_outputs": ({}, {"latest_us": 9, "files": [
        {"path": "out/w.pt", "size": 3, "mtime_us": 5, "age_s": 0.5, "state": "whole"}]}, b""),
    "hash_beginning": ({}, {"sha256": HEX}, b""),
    "look": ({"paths": ["/a"]},
             {"paths": [{"path": "/a", "exists": True, "file": False, "executable": True}]}, b""),
    "which": ({}, {"path": "/usr/bin/x"}, b""),
    "disk": ({"paths": ["/a"]},
             {"disks": [{"path": "/", "total": 5, "free": 3, "writable": True}]}, b""),
    "list_results": ({}, {"files": [{"path": "model/w", "size": 3}]}, b""),
    "read_block": ({"count": 3, "last": True}, {"sha256": HEX}, b"abc"),
    "detached_runs": (
        {}, {"runs": [{"run_id": "ab" * 6, "about": "{}", "alive": None, "result": "",
                       "where": "", "metrics": "{}"}]}, b"",
    ),
    "run_changes": (
        {"run_id": "ab" * 6, "afresh": True},
        {"about": "{}", "alive": True, "root": "/h/run", "gone": ["ranks.json"],
         "files": [{"path": "logs/n1/0.log", "mark": "1.2", "size": 3}]}, b"",
    ),
    "read_part": (
        {"run_id": "ab" * 6, "path": "a/b", "offset": 4, "count": 3, "whole": False}, {}, b"xyz",
    ),
    "ask_run": ({"run_id": "ab" * 6, "wish": {"do": "state"}}, {"answer": "{}"}, b""),
    "signal_run": ({"run_id": "ab" * 6, "times": 1}, {"sent": True}, b""),
    "discard_run": ({"run_id": "ab" * 6, "fetched": True}, {"gone": True}, b""),
    "data_folder": ({"key": KEY, "name": "d"},
                    {"marks": ["1 2 3"], "folder": f"/c/paceline/data/{KEY}/files/d",
                     "sign": f"/c/paceline/data/{KEY}/seen-ab", "free": 5}, b""),
    "list_data": ({}, {"files": [["a/b", 3, 4]], "last": True}, b""),
    "hash_data": ({"paths": ["a", "b"]}, {"hashes": [HEX, ""]}, b""),
    "settle_data": ({}, {}, b""),
    "put_data_files": ({}, {}, b""),
    "have_data": ({}, {"size": 3, "sha256": HEX}, b""),
    "put_data": ({}, {}, b""),
    "job_processes": ({}, {"pids": [3]}, b""),
    "stay": ({"key": "ab" * 32}, {"place": "paceline-" + "ab" * 16}, b""),
    "rest": ({"place": "paceline-" + "ab" * 16, "key": "ab" * 32, "seconds": 60.0}, {}, b""),
    "bye": ({}, {}, b""),
    "clock": ({}, {"time": 1.0, "monotonic": 2.0}, b""),
    "resolve": ({"names": ["n1", "n2"]}, {"names": {"n1": ["10.0.0.1"], "n2": None}}, b""),
    "open_ports": ({"ports": [5, 6]}, {"opened": [5], "taken": {
        "6": {"error": "in use", "holders": [[3, "python"]]}}}, b""),
    "half_open": ({}, {"peers": [[5, "10.0.0.1"]], "rejects": ["10.0.0.0"]}, b""),
    "sink": ({}, {"port": 5}, b""),
    "transfer": ({}, {"bytes": 5, "seconds": 0.5, "sent": 6, "pmtu": 1500, "rtt": 0.1,
                      "retransmitted": 0, "segments": 4}, b""),
    "counters": ({}, {"bytes": {"eth0": [1, 2]}}, b""),
    "leave_token": ({}, {"ok": False, "step": "write", "why": "no", "errno": 5}, b""),
    "see_tokens": ({"names": ["a"]}, {"exists": True, "seen": {"a": "x"}, "type": "nfs4"}, b""),
    "take_token": ({}, {}, b""),
    "digest_tree": ({}, {"exists": True, "files": 1, "bytes": 2, "digest": HEX}, b""),
    "token_processes": ({}, {"processes": [
        {"pid": 3, "run": "r", "owned": True, "age": 1.5, "command": "x",
         "warm": False}]}, b""),
    "execute": ({}, {"code": 0, "output": "x"}, b""),
    "gpus": ({}, {"missing": True}, b""),
    "unanswered": ({}, {"connections": [["10.0.0.2", 4711, 3]]}, b""),
    "hear": ({"address": "10.0.0.1", "seconds": 5.0}, {"port": 7}, b""),
    "packages": ({}, {"packages": {"torch": "2.13.0"}}, b""),
    "mpi": ({}, {"mpi": {"mpiexec": "/usr/bin/mpiexec.hydra", "setvars": "", "libfabric": "",
                         "missing_folders": {"FI_PROVIDER_PATH": "/opt/gone"}}}, b""),
    "vitals": ({"interfaces": ["eth0"]}, {"time": 1.5, "cpu": [3, 9], "memory": [8, 2],
                                          "links": {"eth0": [5, 6]}, "gpus": [0.5]}, b""),
}  # fmt: skip

TOLD: dict[str, list[dict[str, Any]]] = {
    "imported": [{"seconds": 1.5, "python": "3.11.2", "executable": "/p", "torch": "2.13.0",
                  "backends": ["gloo"]}],
    "import failed": [{"error": "ImportError: x", "traceback": "Traceback\n…"}],
    "fork server died": [{"status": -9, "time": 5.0, "memory": MEMORY}],
    "rank started": [{"rank": 0, "pid": 3}],
    "output": [{"rank": 0, "stream": "out"}],
    "said": [{"rank": 0, "data": data} for data in (
        {"kind": "event", "event": "checkpoint", "step": 5},
        {"kind": "event", "event": "world joined", "rank": 0},
        {"kind": "exception", "type": "E", "message": "m", "traceback": "t", "time": 3.0},
        {"kind": "progress", "step": 1, "steps": 2, "epoch": 1, "epochs": 2, "loss": 0.5,
         "samples_per_s": 10.0},
        {"kind": "metrics", "step": 1, "split": "train", "loss": 0.5},
        {"kind": "pace", "step": 1, "ranks_s": [[0.1] * 6], "rates": [12.5]},
        {"kind": "say", "text": "hello"},
        {"kind": "begin", "resumed": True},
        {"kind": "heartbeat", "step": 3, "phase": "forward"},
        {"kind": "event", "event": "recoverable", "able": False, "why": "its model is sharded"},
        {"kind": "event", "event": "interrupted", "step": 3, "error": "Connection reset"},
        {"kind": "event", "event": "newcomer ready"},
        {"kind": "event", "event": "session closed"},
        {"kind": "event", "event": "door closed", "why": "the script is in its second epochs"},
        {"kind": "event", "event": "regrouped", "generation": 1, "step": 3, "seconds": 0.1},
    )],
    "rank ended": [
        {"rank": 0, "code": 1, "signal": None, "time": 3.0, "peak_bytes": 5, "seen": SEEN},
        {"rank": 0, "code": None, "signal": 9, "time": 3.0, "peak_bytes": 5, "memory": MEMORY},
    ],
    "store ended": [{"time": 5.0}],
    "rank frozen": [{"rank": 0, "how": "disk", "seconds": 10.2, "on": "read /a (nfs4)", "pid": 9}],
    "rank thawed": [{"rank": 0}],
    "leftovers killed": [{"count": 1}],
    "stranger at the store": [{"address": "10.0.0.9"}],
    "stranger at the tunnels": [{"address": "10.0.0.9"}],
    "connection altered": [{"address": "10.0.0.9"}],
    "node ended": [{"time": 5.0}],
    "asked to end": [{"time": 5.0}],
    "leaving": [{"reason": "lease", "why": "it ran out", "time": 5.0}],
}  # fmt: skip


def hello(**more: Any) -> dict[str, Any]:
    about = {"event": "hello", "pid": 5, "identity": "ab" * 16, "chosen_python": "/usr/bin/python3"}
    return {**about, "facts": copy.deepcopy(FACTS), **more}


FACTS = json.loads(json.dumps(facts.gather()))


# --- the tables are those of the agent


def test_a_schema_takes_the_numbers_that_a_frame_takes() -> None:
    assert frames.MAX_DIGITS == MAX_DIGITS


def test_every_request_has_a_schema_and_an_example() -> None:
    assert set(server.OPERATIONS) == set(ANSWERS) == set(REQUESTS)


def test_every_event_has_a_schema_and_an_example() -> None:
    posted = {
        name
        for file in (
            "server.py",
            "supervision/job.py",
            "supervision/rank_process.py",
            "ranks/forkserver.py",
        )
        for name in re.findall(r'"event": "([^"]+)"|event="([^"]+)"', (AGENT / file).read_text())
        for name in name
        if name
    }
    assert posted == set(EVENTS) == {"hello", *TOLD}


# --- a channel to somebody who says what we like


class Said:
    """A link on which ``said`` was said; it goes on with silence, or ends."""

    def __init__(self, said: bytes, end: bool = True) -> None:
        self.reader, self.errors = asyncio.StreamReader(), asyncio.StreamReader()
        self.reader.feed_data(said)
        self.errors.feed_eof()
        if end:
            self.reader.feed_eof()
        self.status = None
        self.writer: Any = self
        self.transport = self

    def write(self, data: bytes) -> None:
        pass

    async def drain(self) -> None:
        pass

    def close(self) -> None:
        self.reader.feed_eof()

    abort = close

    async def end(self, timeout_s: float) -> None:
        self.close()


def within_bounds(work: Callable[[], Any]) -> Any:
    """Does it, and sees that it takes neither much CPU time nor much memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    begun = time.thread_time()
    result = work()
    assert time.thread_time() - begun < LONGEST_S * 3  # on a slow machine
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before < MOST_MEMORY
    return result


def opened(said: bytes, end: bool = True) -> Channel | LoginError:
    async def go() -> Channel | LoginError:
        channel = Channel(Host("n2"), Said(said, end))  # type: ignore[arg-type]
        try:
            await channel.open()
        except LoginError as refused:
            return refused
        await channel.close()
        return channel

    result: Channel | LoginError = within_bounds(lambda: asyncio.run(go()))
    return result


HAVE = BOOT + b"have\n"
BOOTS = {
    "no words": BOOT + b"\n",
    "an unknown word": BOOT + b"rm -rf\n",
    "old without more": BOOT + b"old\n",
    "old with too little": BOOT + b"old 3.8\n",
    "system without more": BOOT + b"system\n",
    "bytes": BOOT + bytes(range(128, 256)) + b"\n",
    "an endless line": BOOT + b"x" * (8 << 20),
    "an endless banner": b"welcome\n" * (1 << 20),
    "a banner without an end of line": b"\0" * (8 << 20),
    "nothing": b"",
    "only noise": b"Welcome!\n",
}


@pytest.mark.parametrize("words", BOOTS)
def test_hostile_first_lines(words: str) -> None:
    refused = opened(BOOTS[words])
    assert isinstance(refused, LoginError)
    assert refused.refusal.details
    assert refused.refusal.remedy


@pytest.mark.parametrize("noise", [b"", b"Welcome\n", b"x" * 300_000 + b"\n", MAGIC + b"\0" * 9])
def test_a_right_greeting_after_any_noise(noise: bytes) -> None:
    channel = opened(noise + HAVE + encode(hello()))
    assert isinstance(channel, Channel)
    assert channel.facts == FACTS
    assert len(channel.noise) <= 8192


def test_a_greeting_that_stops_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.remote.channel.HELLO_STALL_S", 1.0)
    for said in (encode(hello())[:-1], MAGIC + struct.pack(">II", MAX_HELLO, 5) + b"{"):
        refused = opened(HAVE + said, end=False)
        assert isinstance(refused, LoginError)
        assert "and then nothing" in refused.refusal.details


@pytest.mark.parametrize("said", [b"", MAGIC + struct.pack(">II", 99, 5) + b"{"])
def test_a_host_that_falls_silent_is_given_up(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no run's lease watches it, as in setup."""
    monkeypatch.setattr("paceline.remote.channel.POLL_S", 0.05)
    monkeypatch.setattr("paceline.remote.channel.SILENCE_TIMEOUT_S", 1.0)

    async def go() -> None:
        channel = Channel(Host("n2"), Said(HAVE + encode(hello()) + said, end=False))  # type: ignore[arg-type]
        await channel.open()
        with pytest.raises(HostUnresponsive, match="fell silent"):
            await channel.request("execute", argv=["true"], input="", timeout_s=60)
        await channel.close()

    asyncio.run(asyncio.wait_for(go(), 60))


# --- frames


def header(body: int, blob: int = 0) -> bytes:
    return MAGIC + struct.pack(">II", body, blob)


def framed(body: bytes, blob: bytes = b"") -> bytes:
    return header(len(body), len(blob)) + body + blob


BODIES = {
    "deep lists": b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep tables": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "many digits": b'{"a":' + b"9" * 1_000_000 + b"}",
    "no object": b"[1,2]",
    "no JSON": b"{" * 40,
    "a half": b'{"event": "hello"',
    "bad UTF-8": b'{"a": "\xff\xfe"}',
    "two objects": b"{}{}",
    "nothing": b"",
}


@pytest.mark.parametrize("body", BODIES)
def test_what_is_no_message_hides_none(body: str) -> None:
    decoder = Decoder()
    good = encode({"b": 1}, b"x")
    assert within_bounds(lambda: decoder.feed(framed(BODIES[body]) + good)) == [({"b": 1}, b"x")]


def test_numbers_that_json_does_not_have() -> None:
    for text in ("NaN", "Infinity", "-Infinity", "1e400", "-1e400", "1E+999"):
        ((message, _),) = Decoder().feed(framed(b'{"re": 1, "monotonic": ' + text.encode() + b"}"))
        conversation = Conversation()
        conversation.add_request(1, "lease", {})
        with pytest.raises(InvalidValue, match="finite"):
            conversation.answer({**message, "time": 1.0}, b"")


def test_frames_that_are_too_long_are_none() -> None:
    for long in (header(MAX_ANSWER + 1), header(10, 3 << 20), header(128 << 20), header(2**32 - 1)):
        decoder = Decoder(max_json=MAX_ANSWER, max_blob=2 << 20)
        assert decoder.feed(long + b"{" + encode({"b": 1})) == [({"b": 1}, b"")]


def test_costly_nonsense_ends_the_connection() -> None:
    decoder = Decoder(max_json=MAX_ANSWER)
    one = header(1 << 20) + b"{"
    with pytest.raises(FrameError):
        within_bounds(lambda: [decoder.feed(one * 1000) for _ in range(10_000)])


def test_any_bytes_are_frames_or_noise() -> None:
    chosen = random.Random(5)
    good = encode(hello()) + encode({"re": 1}, b"blob")
    for _ in range(600):
        data = bytearray(good[: chosen.randrange(len(good) + 1)])
        for _ in range(chosen.randrange(8)):
            if data:
                data[chosen.randrange(len(data))] = chosen.randrange(256)
        decoder = Decoder(max_json=MAX_ANSWER)
        with contextlib.suppress(FrameError):
            decoder.feed(bytes(data) + chosen.randbytes(chosen.randrange(40)))
        assert len(decoder.noise) <= 8192


def test_the_largest_answer_takes_little_memory() -> None:
    body = b'{"a":[' + b"[]," * ((MAX_ANSWER - 20) // 3) + b"0]}"
    assert len(body) <= MAX_ANSWER
    within_bounds(lambda: Decoder(max_json=MAX_ANSWER).feed(framed(body)))


@pytest.mark.parametrize("first", ["re", "event"])
def test_only_answers_are_long(first: str) -> None:
    """Parsing holds the launcher's loop, on which the other hosts' leases depend."""
    body = b'{"%s":1,"a":[%s0]}' % (first.encode(), b"[]," * (frames.MAX_EVENT // 3))
    decoder = Decoder(max_json=MAX_ANSWER, max_event=frames.MAX_EVENT)
    if first == "re":
        assert len(decoder.feed(framed(body))) == 1
    else:
        with pytest.raises(FrameError, match="an event of 4 MiB"):
            decoder.feed(framed(body))


def test_frequent_answers_are_small() -> None:
    conversation = Conversation()
    conversation.add_request(1, "lease", {})
    answer = {"re": 1, "monotonic": 1.0, "time": 1.0, "other": [[] for _ in range(200_000)]}
    with pytest.raises(InvalidValue, match="8 MiB in memory"):
        conversation.answer(answer, b"")


# --- hostile variants

ABSURD: list[Any] = [
    None, True, -1, 0, 2**40, 2**63, 10**19, 1e400, float("nan"), -1e308, "", "../../../x", "/etc",
    "\udcff\udc80", "\0", "\x1b]0;x\a", "n9", "x" * 5000, "x" * 2_000_000, [], {}, [[]], {"a": {}},
    json.loads("[" * 200 + "]" * 200), [1] * 50_000, {"x" * 5000: 1},
]  # fmt: skip


def variants(message: Any, chosen: random.Random) -> Any:
    """The same with one value replaced, removed, doubled or added."""
    changed = copy.deepcopy(message)
    places = list(_places(changed))
    holder, name = chosen.choice(places) if places else (changed, "new")
    how = chosen.randrange(6)
    if how == 0 and isinstance(holder, dict):
        holder.pop(name, None)
    elif how == 1 and isinstance(holder, list):
        holder.append(holder[name])
    elif how == 2 and isinstance(holder, dict):
        holder[chosen.choice(["new", "../x", "\udcff"])] = chosen.choice(ABSURD)
    else:
        holder[name] = chosen.choice(ABSURD)
    return changed


def _places(value: Any) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for name, one in list(items):
        yield value, name
        if isinstance(one, (dict, list)):
            yield from _places(one)


def lie_in(hear: Callable[[], Any]) -> str:
    """What was called untrue, in few words; empty when nothing was."""
    try:
        hear()
    except InvalidValue as lie:
        return str(lie) if len(str(lie)) < 400 else pytest.fail("too many words")
    return ""


@each_case("op", REQUESTS)
def test_hostile_answers(op: str) -> None:
    """Refused as a whole, or exactly what may be said."""
    fields, answer, blob = REQUESTS[op]
    chosen = random.Random(op)

    def hear(said: Any, data: bytes = blob) -> None:
        conversation = Conversation()
        conversation.add_request(1, "start", {"ranks": [{"rank": 0}]})
        conversation.add_request(2, op, fields)
        conversation.answer({"re": 2, **said}, data)

    hear(answer)
    hear({"error": "no", "holders": [[3, "x"]]}, b"")
    for lie in ({"error": 5}, {"error": None}, {"error": "x", "holders": 3}):
        with pytest.raises(InvalidValue):
            hear(lie, b"")
    with pytest.raises(InvalidValue, match="bytes with the answer"):
        hear(answer, blob + b"x")
    if answer:
        lies = [lie_in(lambda: hear(variants(answer, chosen))) for _ in range(VARIANTS)]
        assert sum(map(bool, lies)) > VARIANTS / 4


@each_case(
    ("op", "lie"),
    [
        ("list_results", {"files": [{"path": "../../.bashrc", "size": 3}]}),
        ("list_results", {"files": [{"path": "/etc/passwd", "size": 3}]}),
        ("list_results", {"files": [{"path": "a", "size": 3}, {"path": "a", "size": 3}]}),
        ("list_results", {"files": [{"path": "a", "size": -3}]}),
        (
            "list_outputs",
            {
                "latest_us": 9,
                "files": [
                    {"path": "../a", "size": 3, "mtime_us": 5, "age_s": 0.5, "state": "whole"}
                ],
            },
        ),
        (
            "list_outputs",
            {
                "latest_us": 9,
                "files": [{"path": "a", "size": 3, "mtime_us": -5, "age_s": 0.5, "state": "whole"}],
            },
        ),
        ("run_folder", {"shared": True, "folder": "/etc"}),
        ("run_folder", {"shared": False, "folder": "/home/u/runs/1"}),
        ("run_folder", {"shared": False, "folder": f"/c/paceline/runs/{'0' * 24}"}),
        ("run_folder", {"shared": False, "folder": f"/c\n/paceline/runs/{KEY}"}),
        ("build_tree", {"root": "/etc", "damaged": []}),
        ("build_tree", {"root": "/c/paceline/jobs/r/code", "damaged": ["cd" * 32]}),
        ("lacking_blobs", {"hashes": ["cd" * 32]}),
        ("lacking_blobs", {"hashes": ["../../x"]}),
        ("compare_tree", {"exists": True, "missing": ["other"], "different": []}),
        ("listen", {"ports": {"10.9.9.9": 77}, "errors": {}}),
        ("listen", {"ports": {"10.0.0.1": 0}, "errors": {}}),
        ("connect", {"results": [{"host": "n3", "address": "10.0.0.2", "port": 7, "ok": True}]}),
        ("resolve", {"names": {"n3": ["10.0.0.1"]}}),
        ("open_ports", {"opened": [7], "taken": {}}),
        ("look", {"paths": [{"path": "/b", "exists": True, "file": True, "executable": True}]}),
        ("disk", {"disks": []}),
        ("read_block", {}),
        ("see_tokens", {"exists": True, "seen": {"b": "x"}, "type": "x"}),
        ("seen", {"ranks": [{"rank": 7, **LOOKED}]}),
        (
            "vitals",
            {"time": 1.5, "cpu": [3, 9], "memory": [8, 2], "links": {"eth1": [5, 6]}, "gpus": []},
        ),
    ],
)
def test_answers_to_what_was_not_asked(op: str, lie: dict[str, Any]) -> None:
    fields, _, blob = REQUESTS[op]
    conversation = Conversation()
    conversation.add_request(2, op, fields)
    with pytest.raises(InvalidValue):
        conversation.answer({"re": 2, **lie}, blob)


@pytest.mark.parametrize("number", [7, 0, -1, "1", None, [], {}, True, 1.0, 2**70])
def test_answers_to_nobody(number: Any) -> None:
    conversation = Conversation()
    conversation.add_request(2, "bye", {})
    with pytest.raises(InvalidValue):
        conversation.answer({"re": number}, b"")


def job() -> Job:
    return Job("job", Entry("script", "train.py"), "/work", "/p")


def test_hostile_greetings() -> None:
    """What passes as facts breaks nothing that plans with them."""
    chosen = random.Random(7)
    refused = 0
    for _ in range(400):
        said = hello(facts=variants(FACTS, chosen)) if chosen.random() < 0.8 else variants(
            hello(), chosen)  # fmt: skip
        if lie_in(lambda said=said: Conversation().event({"event": "hello", **said}, b"")):
            refused += 1
            continue
        hosts, told = [Host("n1"), Host("n2")], {"n1": FACTS, "n2": said["facts"]}
        with contextlib.suppress(PacelineError):
            planner.check_agreement(hosts, job(), told, {"n1": "/p", "n2": "/p"})
        with contextlib.suppress(PacelineError):
            candidates(hosts, told, None)
        with contextlib.suppress(PacelineError):
            ranks = planner.processes_on(job(), hosts[1], said["facts"]).value
            planner.node_env(job(), hosts[1], said["facts"], ranks, None)
        json.dumps(told)
    assert refused > 100


@each_case("name", FACTS)
def test_a_greeting_without_a_fact_is_none(name: str) -> None:
    """A fact that cannot be had is null; the verbs may look for each."""
    said = hello()
    del said["facts"][name]
    assert lie_in(lambda: Conversation().event({"event": "hello", **said}, b""))


@pytest.mark.parametrize("hard", ["9", None, [], 1.5])
def test_limits_that_are_none(hard: Any) -> None:
    said = hello()
    said["facts"]["limits"]["nofile_hard"] = hard
    assert lie_in(lambda: Conversation().event({"event": "hello", **said}, b""))


@pytest.mark.parametrize("count", [1000, 200_000])
def test_events_that_take_much_memory_are_refused(count: int) -> None:
    """A list of empty lists takes twenty times its text."""
    conversation = Conversation()
    conversation.event(hello(), b"")
    conversation.add_request(1, "start", {"ranks": [{"rank": 0}]})
    nested: list[Any] = [[] for _ in range(count)]
    report = {"event": "said", "rank": 0, "data": {"kind": "event", "event": "own", "a": nested}}
    assert conversation.event(report, b"") == (count == 1000)
    ended = {**TOLD["rank ended"][0], "event": "rank ended", "memory": {"a": nested}}
    refused = lie_in(lambda: conversation.event(ended, b""))
    assert bool(refused) == (count != 1000)


@pytest.mark.parametrize("count", [1, 1000])
def test_an_event_holds_few_fields_that_its_kind_does_not_have(count: int) -> None:
    other: list[Any] = [[] for _ in range(count)]
    report = {"kind": "checkpoint", "step": 3, "other": other}
    message = {"event": "said", "rank": 0, "data": report}
    fields = Event.from_message("n1", message).fields
    assert fields == ({"step": 3, "other": [[]]} if count == 1 else {"step": 3})
    metrics = {"event": "said", "rank": 0, "data": {"kind": "metrics", "step": 3, "loss": 0.5}}
    assert Event.from_message("n1", metrics).fields == {"step": 3, "loss": 0.5}


def test_hostile_events(tmp_path: Path) -> None:
    """What passes can be written down, shown and judged."""
    chosen = random.Random(11)
    directory = RunDirectory(tmp_path / "run")
    screen = Screen(out=io.StringIO(), err=io.StringIO())
    recorder = Recorder(directory, screen)
    before = set(below(tmp_path))
    asked = sum(len(some) for some in TOLD.values()) * VARIANTS

    async def go() -> int:
        channel = Channel(Host("n2"), Said(b""))  # type: ignore[arg-type]
        node = Node(channel.host, channel)
        fleet = SimpleNamespace(running=True, lease_s=10.0, nodes=[node], absence_s=0.0)
        refused = 0
        for kind, examples in TOLD.items():
            for example in examples:
                for _ in range(VARIANTS):
                    refused += hear(kind, variants(example, chosen), node, fleet)
        await channel.close()
        return refused

    def hear(kind: str, said: Any, node: Node, fleet: Any) -> int:
        conversation = Conversation()
        conversation.event(hello(), b"")
        conversation.add_request(1, "start", {"ranks": [{"rank": 0}]})
        message, blob = {"event": kind, **said}, b"x\n" if kind == "output" else b""
        try:
            if not conversation.event(message, blob):
                return 1
        except InvalidValue:
            return 1
        ranks = [SimpleNamespace(rank=0)]
        plan: Any = SimpleNamespace(master_addr="", master_port=0, closed_store=False, nodes=[
            SimpleNamespace(host="n2", address="10.0.0.2", ranks=ranks)
        ])  # fmt: skip
        interrupts: Any = None
        attempt: Any = Attempt(
            plan,
            job(),
            fleet,
            interrupts,
            screen,
            recorder,
            RetryPolicy(),
            Mock(),
        )
        event = Event.from_message("n2", message, blob)
        if kind in ("imported", "import failed", "fork server died"):
            node.on_fork_server_event(event)
        attempt.on_event(node, event)
        recorder.record(event)
        if event.recorded_fields is not None:
            assert recorder.events[-1].kind == event.kind
        return 0

    refused = within_bounds(lambda: asyncio.run(go()))
    assert asked / 4 < refused < asked
    screen.close()
    directory.close()
    fresh = set(below(tmp_path)) - before
    assert fresh <= {"run/events.jsonl", "run/metrics.jsonl", "run/logs/n2/0.log"} | {
        name for name in fresh if name.startswith("run/metrics-before")
    }


def below(root: Path) -> list[str]:
    return [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]


@pytest.mark.parametrize("kind", ["lost", "file", "", None, 5, [], {}, "\udcff"])
def test_events_that_no_agent_sends(kind: Any) -> None:
    conversation = Conversation()
    conversation.event(hello(), b"")
    with pytest.raises(InvalidValue, match="an event called"):
        conversation.event({"event": kind, "stderr": "x", "rank": "../../x"}, b"")


@each_case("rank", [1, -1, "../../../x", None, True, "0", 2**40])
@each_case("kind", ["output", "rank started", "said", "rank ended"])
def test_ranks_of_other_nodes(kind: str, rank: Any) -> None:
    conversation = Conversation()
    conversation.event(hello(), b"")
    conversation.add_request(1, "start", {"ranks": [{"rank": 0}]})
    with pytest.raises(InvalidValue):
        conversation.event({"event": kind, **TOLD[kind][0], "rank": rank}, b"")


def test_a_late_look_at_ranks_that_have_other_numbers_by_now() -> None:
    """It was asked before the next start, of other nodes."""
    conversation = Conversation()
    conversation.event(hello(), b"")
    conversation.add_request(1, "start", {"ranks": [{"rank": 1}]})
    conversation.add_request(2, "seen", {})
    conversation.add_request(3, "start", {"ranks": [{"rank": 0}]})
    assert conversation.answer({"re": 2, "ranks": [{"rank": 1, **LOOKED}]}, b"") == 2
    conversation.add_request(4, "seen", {})
    with pytest.raises(InvalidValue, match="rank 1, which does not run there"):
        conversation.answer({"re": 4, "ranks": [{"rank": 1, **LOOKED}]}, b"")


def test_what_a_program_says_wrongly_is_not_heard() -> None:
    conversation = Conversation()
    conversation.event(hello(), b"")
    conversation.add_request(1, "start", {"ranks": [{"rank": 0}]})
    wrong: list[Any] = [
        None, 5, "x", [], {"kind": "exception"}, {"kind": "say"}, {"kind": "say", "text": 5},
        {"kind": "progress", "step": float("inf")}, {"kind": "metrics", "step": "x"},
        {"kind": "event", "deep": json.loads("[" * 50 + "]" * 50)},
    ]  # fmt: skip
    for data in wrong:
        assert not conversation.event({"event": "said", "rank": 0, "data": data}, b"")
    # nor what only an agent or the launcher can know
    for name in (name for name, kind in KINDS.items() if kind.sender != "rank"):
        told = {"kind": "event", "event": name, "code": 0, "copy": "/a", "home": "/b"}
        assert not conversation.event({"event": "said", "rank": 0, "data": told}, b"")


# --- a lying node fails, alone


def test_a_lie_ends_the_connection_and_is_told() -> None:
    lies = [
        encode({"event": "output", "rank": 9, "stream": "out"}, b"x"),
        encode({"re": 77}),
        encode({"event": "lost", "stderr": "n1 is bad"}),
    ]

    async def go(lie: bytes) -> None:
        link = Said(HAVE + encode(hello()), end=False)
        channel = Channel(Host("n2"), link)  # type: ignore[arg-type]
        await channel.open()
        told: list[Any] = []
        channel.on_event = told.append
        waiting = asyncio.ensure_future(channel.request("lease", seconds=1.0))
        await asyncio.sleep(0)
        link.reader.feed_data(lie)
        with pytest.raises(ProtocolViolation, match="n2 sent what no agent") as caught:
            await asyncio.wait_for(waiting, 60)
        assert isinstance(caught.value, NodeError)
        (lost,) = told
        assert lost.kind == "connection ended"
        assert lost["trouble"] == channel.violation == caught.value.found
        await channel.close()

    for lie in lies:
        asyncio.run(go(lie))


def test_a_right_conversation_goes_on() -> None:
    async def go() -> None:
        link = Said(HAVE + encode(hello()), end=False)
        channel = Channel(Host("n2"), link)  # type: ignore[arg-type]
        await channel.open()
        waiting = asyncio.ensure_future(channel.request_with_blob("read_block", count=3, last=True))
        await asyncio.sleep(0)
        link.reader.feed_data(encode({"re": 1, "sha256": HEX}, b"abc"))
        assert await waiting == ({"re": 1, "sha256": HEX}, b"abc")
        assert not channel.lost.is_set()
        await channel.close()

    asyncio.run(go())
    known = protocol.BOOT_REPLIES
    assert protocol.parse_boot_line(b"old 3.8 /usr/bin/python3", known) == [
        "old",
        "3.8",
        "/usr/bin/python3",
    ]
