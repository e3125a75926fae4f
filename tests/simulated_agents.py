"""Simulates many agents that answer a launcher from within its own process.

They exchange the frames of the real stream with a real :class:`Channel`, but run nothing. This
measures the cost of a launch on the launching side without a machine for each host:

    python tests/simulated_agents.py HOSTS LINES WIDTH RUN_DIR
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paceline.agent.frames import MAX_JSON, Decoder, encode
from paceline.agent.multiplexing import Reassembler
from paceline.agent.surveys import facts
from paceline.launch.launcher import run_job
from paceline.launch.results.run_outcome import RunOutcome
from paceline.launch.terminal.screen import Screen
from paceline.remote.channel import Channel
from paceline.remote.transport import ConnectedCallback, ignore_count
from paceline.spec.hosts import Cluster, Host
from paceline.spec.job import Entry, Job

PIPE = 1 << 16  # bytes that a pipe holds before its writer has to wait
Message = dict[str, Any]


class Simulated:
    """A simulated agent, which is also the link to it.

    Args:
        host: The host that it simulates.
        number: Its number, from 0, which determines its address.
        about: Facts of this machine.
        lines: Number of lines that each rank writes.
        width: Characters per line.
    """

    def __init__(self, host: Host, number: int, about: Message, lines: int,
                 width: int) -> None:  # fmt: skip
        self.reader, self.errors = asyncio.StreamReader(), asyncio.StreamReader()
        self.errors.feed_eof()
        self.writer: Any = self  # has all methods of a writer that a channel uses
        self.transport: Any = self
        self.status: int | None = None
        self.address = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
        self.facts = {**about, "interfaces": [self._interface()]}
        self.identity = f"{number:032x}"
        self.differs = False  # whether its code differs from ours
        self.built: list[str] = []  # folders of received code
        self.started: list[Message] = []  # requests to start ranks
        self._python = host.python or "python3"
        self._decoder, self._joiner = Decoder(), Reassembler(MAX_JSON)
        self._heard = 0  # number of received frames
        self._lines, self._line = lines, b"x" * (width - 1) + b"\n"
        self._tasks: set[asyncio.Task[None]] = set()

    def _interface(self) -> Message:
        address = {"interface": "eth0", "address": self.address, "prefix": 8, "family": 4,
                   "scope": "global", "usable": True}  # fmt: skip
        return {"name": "eth0", "kind": "hardware", "state": "up", "mtu": 1500, "speed": 1000,
                "addresses": [address]}  # fmt: skip

    # --- the link

    def hello(self) -> None:
        self._say({"event": "hello", "pid": 1, "identity": self.identity,
                   "chosen_python": self._python, "facts": self.facts})  # fmt: skip

    def write(self, data: bytes) -> None:
        for message, blob in self._decoder.feed(data):
            self._heard += 1
            if "part" in message:
                for frame in self._joiner.add(message, blob):
                    self._answer(*(whole for whole, _ in Decoder().feed(frame)))
                self._say({})  # acknowledges the frame
            elif "op" in message:
                self._answer(message)

    def _answer(self, message: Message) -> None:
        answer = ANSWERS.get(message["op"], lambda agent, request: {})
        self._say({"re": message["id"], **answer(self, message)})

    def is_closing(self) -> bool:
        return False

    async def drain(self) -> None: ...

    def close(self) -> None:
        if not self.reader.at_eof():
            self.reader.feed_eof()

    abort = close

    async def end(self, timeout_s: float) -> None:
        self.close()

    def _say(self, message: Message, blob: bytes = b"") -> None:
        self.reader.feed_data(encode({**message, "heard": self._heard}, blob))

    # --- requests

    def prepare(self, request: Message) -> Message:
        ready = {"event": "imported", "seconds": 0.0, "python": "3.11.2",
                 "executable": self._python}  # fmt: skip
        asyncio.get_running_loop().call_soon(self._say, ready)
        return {}

    def start(self, request: Message) -> Message:
        self.started.append(request)
        task = asyncio.create_task(self._run([rank["rank"] for rank in request["ranks"]]))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return {}

    def build(self, request: Message) -> Message:
        root = f"{self.facts['user']['cache']}/jobs/{request['folder']}/{request['name']}"
        self.built.append(root)
        return {"root": root, "damaged": []}

    async def _run(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self._say({"event": "rank started", "rank": rank, "pid": 2})
        for _ in range(self._lines):
            for rank in ranks:
                self._say({"event": "output", "rank": rank, "stream": "out"}, self._line)
            while len(self.reader._buffer) > PIPE:  # type: ignore[attr-defined]
                await asyncio.sleep(0)
        for rank in ranks:
            self._say({"event": "rank ended", "rank": rank, "code": 0, "signal": None,
                       "time": time.monotonic(), "peak_bytes": 1 << 20})  # fmt: skip
        self._say({"event": "node ended", "time": time.monotonic()})


def _connect(agent: Simulated, request: Message) -> Message:
    return {"results": [
        {"host": target["host"], "address": target["address"], "port": target["port"],
         "ok": True, "reached": target["identity"], "local_address": agent.address, "rtt": 0.001}
        for target in request["targets"]
    ]}  # fmt: skip


ANSWERS: dict[str, Callable[[Simulated, Message], Message]] = {
    "lease": lambda agent, request: {"monotonic": time.monotonic(), "time": time.time()},
    "vitals": lambda agent, request: {
        "time": time.monotonic(),
        "cpu": [5, 10],
        "memory": [4, 1],
        "gpus": [],
        "links": {name: [0, 0] for name in request["interfaces"]},
    },
    "prepare": Simulated.prepare,
    "start": Simulated.start,
    "listen": lambda agent, request: {"ports": {agent.address: 4000}, "errors": {}},
    "connect": _connect,
    "reserve_port": lambda agent, request: {"port": 29400},
    "run_folder": lambda agent, request: {
        "shared": False,
        "folder": f"/home/user/.cache/paceline/runs/{request['key']}",
    },
    "list_results": lambda agent, request: {"files": []},
    "list_outputs": lambda agent, request: {"files": [], "latest_us": 0},
    "compare_tree": lambda agent, request: {
        "exists": True,
        "missing": [],
        "different": [entry[0] for entry in request["manifest"]] if agent.differs else [],
    },
    "lacking_blobs": lambda agent, request: {"hashes": []},
    "build_tree": Simulated.build,
    "look": lambda agent, request: {
        "paths": [
            {"path": path, "exists": True, "file": False, "executable": True}
            for path in request["paths"]
        ]
    },
}


class SimulatedTransport:
    """Opens channels to simulated agents."""

    def __init__(self, lines: int, width: int) -> None:
        self._lines, self._width = lines, width

    redials = False
    dialects: tuple[str, ...] = ()

    async def open(self, hosts: Sequence[Host], pythons: Sequence[str],
                   reached: ConnectedCallback = ignore_count) -> list[Channel]:  # fmt: skip
        about = facts.gather()
        channels = []
        for number, host in enumerate(hosts):
            agent = Simulated(host, number, about, self._lines, self._width)
            channel = Channel(host, agent)
            channel.listen()
            agent.hello()
            await channel._hello
            channels.append(channel)
            reached(len(channels))
        return channels

    async def close(self, exit_code: int) -> None: ...

    async def loss_reason(self, host: Host) -> str:
        return ""


class Nowhere(io.StringIO):
    """Discards all output."""

    def write(self, text: str) -> int:
        return len(text)


def launch(hosts: int, lines: int, run_dir: Path, width: int = 100) -> RunOutcome:
    """Runs a program on ``hosts`` simulated hosts, on which each rank writes ``lines`` lines."""
    job = Job("simulated", Entry("binary", "hostname"), str(run_dir.parent), "python3",
              preload=(), needs_torch=False)  # fmt: skip
    cluster = Cluster(tuple(Host(f"h{at}") for at in range(hosts)), "simulated")
    with contextlib.closing(Screen("all", Nowhere(), Nowhere())) as screen:
        return run_job(job, cluster, SimulatedTransport(lines, width), screen,
                       run_dir=run_dir, parent=run_dir.parent)  # fmt: skip


def main(hosts: int, lines: int, width: int, run_dir: Path) -> None:
    """Prints the seconds and the peak memory of this process in MiB."""
    begun = time.monotonic()
    outcome = launch(hosts, lines, run_dir, width)
    assert outcome.result.exit_code == 0, outcome
    assert len(list((run_dir / "logs").glob("*/*.log"))) >= hosts
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"seconds": time.monotonic() - begun, "mib": peak}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), Path(sys.argv[4]))
