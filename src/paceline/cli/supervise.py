"""The process that watches a run which its user has left: the launcher, on one of the hosts.

It is started by :mod:`paceline.agent.detach` with the streams of the login, takes what it has to do
from standard input, and tells there what happens, one JSON object a line behind a mark, until it
is told to ``stay``: from then on it has no streams, and nothing of the launching machine is needed.
When its input ends before, the start was given up: the job is ended and nothing stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.agent.files import safe_paths
from paceline.cli.runs.run_end import run_to_end
from paceline.launch import failure_analysis
from paceline.launch.launcher import Takeover, secrets_of
from paceline.launch.planning.placement import Supplies
from paceline.launch.planning.planner import choose_hosts
from paceline.launch.terminal.screen import Screen
from paceline.remote import this_machine
from paceline.remote.channel import Channel
from paceline.rendezvous.callback import AgentStarter, CallbackTransport
from paceline.rendezvous.listener import Listener
from paceline.rundir.directory import Redactor, set_display_path
from paceline.spec import detached
from paceline.spec.detached import DetachedRecord
from paceline.spec.errors import PacelineError
from paceline.spec.events import Event
from paceline.spec.hosts import Cluster, Host
from paceline.spec.job import Job, Show
from paceline.spec.serialization import from_jsonable
from paceline.transfer.data import DataFolder
from paceline.transfer.detached_outputs import adopt_outputs
from paceline.transfer.tree import Tree

MARK = b"\xf5PLleave "
FOLDER_VARIABLE = "PACELINE_SUPERVISED"  # names the folder of the run; set in agent/detach.py
MIN_QUIET_S = 2.0  # without a failure since the last rank began
MAX_SCREEN_BYTES = 4 << 20  # of the ranks' output that is kept for the screen; the logs have all
LOG = "supervisor.log"  # its own errors
FETCH_TIMEOUT_S = 600.0  # for the launching machine to fetch what a start that failed has left


class LauncherLink:
    """The connection to the launching machine: our standard streams, until they are released.

    Args:
        needed: Descriptor of a pipe on which is said that the streams are needed no more.
        log: File that gets standard error from then on.
    """

    def __init__(self, needed: int, log: Path) -> None:
        os.set_inheritable(needed, False)
        self._needed, self._log = needed, log
        self._lock = threading.Lock()
        self._is_connected, self._is_over = True, False
        self._acknowledged = threading.Event()
        self.order: dict[str, Any] = json.loads(sys.stdin.buffer.readline())

    def listen(self, on_message: Callable[[Mapping[str, Any]], None]) -> None:
        threading.Thread(target=self._listen, args=(on_message,), name="line", daemon=True).start()

    def send(self, **fields: Any) -> None:
        with self._lock:
            if self._is_connected:
                with contextlib.suppress(OSError):
                    _write(1, MARK + json.dumps(fields).encode() + b"\n")

    def _listen(self, on_message: Callable[[Mapping[str, Any]], None]) -> None:
        """Handles the launching machine's messages until it says ``stay`` or ``done``.

        If its connection ends before, it has given the start up, and this process is ended.
        """
        for line in iter(sys.stdin.buffer.readline, b""):
            message = json.loads(line)
            if message["do"] == "stay" and self._release_streams():
                return
            if message["do"] == "done":
                break
            on_message(message)
        with self._lock:
            is_abandoned = not self._is_over
        self._acknowledged.set()
        if is_abandoned:
            os.kill(os.getpid(), signal.SIGTERM)

    def _release_streams(self) -> bool:
        """Lets the streams go, unless it is over: then somebody still has to hear of it."""
        with self._lock:
            if self._is_over:
                return False
            self._is_connected = False
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            log, null = os.open(self._log, flags, 0o600), os.open(os.devnull, os.O_RDWR)
            with contextlib.suppress(OSError):
                _write(1, MARK + b'{"left": true}\n')
            for fd, instead in ((0, null), (1, null), (2, log)):
                os.dup2(instead, fd)
            os.close(null)
            os.close(log)
            with contextlib.suppress(OSError):
                _write(self._needed, b"x")
            os.close(self._needed)
            return True

    def finish(self, **fields: Any) -> bool:
        """Says that the run is over and waits for the answer; False if nobody is connected."""
        with self._lock:
            self._is_over = self._is_connected
        if not self._is_over:
            return False
        self.send(**fields)
        self._acknowledged.wait(FETCH_TIMEOUT_S)
        return True


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


class TeeStream(io.TextIOBase):
    """A text stream that goes into a file, and to the launching machine while it is there.

    Both get whole lines, without secrets: others may fetch the file.
    """

    encoding = "utf-8"

    def __init__(self, file: Path, line: LauncherLink, err: bool, secrets: Sequence[str]) -> None:
        self._line, self._err, self.redactor = line, err, Redactor(secrets)
        self._partial = ""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(file, flags, 0o600)

    def write(self, text: str) -> int:
        complete, end, self._partial = (self._partial + text).rpartition("\n")
        if end:
            lines = self.redactor.text(complete) + end
            self.write_file(lines)
            self._line.send(text=lines, err=self._err)
        return len(text)

    def write_file(self, lines: str) -> None:
        """Writes to the file only; drops what does not fit on a full disk."""
        with contextlib.suppress(OSError):
            _write(self._fd, lines.encode(errors="replace"))

    def fileno(self) -> int:
        return self._fd


class TeeScreen(Screen):
    """Writes what an attached launcher would show, but only the beginning of the ranks' output."""

    def __init__(self, show: Show, out: TeeStream, err: TeeStream, line: LauncherLink) -> None:
        super().__init__(show, out, err)  # type: ignore[arg-type]
        self._line = line
        self._num_shown = 0

    def starting(self, part: str, done: int, of: int) -> None:
        self._line.send(starting=part, done=done, of=of)

    def output(self, host: str, rank: int, stream: str, data: bytes) -> None:
        previous, self._num_shown = self._num_shown, self._num_shown + len(data)
        if previous <= MAX_SCREEN_BYTES:
            super().output(host, rank, stream, data)
            if self._num_shown > MAX_SCREEN_BYTES:
                self.note("paceline: no more of the ranks' output is shown here; logs/ has all")


class StartDetector:
    """Notices that the ranks run: they joined their group, or nothing went wrong for a while."""

    def __init__(self, lease_s: float, on_running: Callable[[], None]) -> None:
        self._lease_s, self._on_running = lease_s, on_running
        self._settling: asyncio.TimerHandle | None = None
        self._is_over = False

    def on_event(self, event: Event) -> None:
        if self._is_over:
            return
        if event.kind in ("world joined", "begin", "progress", "metrics"):
            self._set_running()
        elif event.kind == "rank started":
            self._wait(MIN_QUIET_S)
        elif failure_analysis.failure_of(event, self._lease_s) is not None:
            self._wait(None)

    def _wait(self, seconds: float | None) -> None:
        if self._settling is not None:
            self._settling.cancel()
        loop = asyncio.get_running_loop()
        self._settling = None if seconds is None else loop.call_later(seconds, self._set_running)

    def _set_running(self) -> None:
        self._wait(None)
        self._is_over = True
        self._on_running()


def main() -> int:
    """Runs the supervisor: its argument is a descriptor, and a variable names its folder."""
    safe_paths.tighten_umask()
    folder, needed = Path(os.environ.pop(FOLDER_VARIABLE)), int(sys.argv[1])
    line = LauncherLink(needed, folder / LOG)
    order = line.order
    job, cluster = from_jsonable(order["job"]), from_jsonable(order["cluster"])
    sys.argv = list(order["command"])  # what a run tells its user to type again
    is_launching_machine = order["run"] is not None  # on the launching machine
    run = Path(order["run"]) if is_launching_machine else folder / detached.RUN_FOLDER
    run.parent.mkdir(parents=True, exist_ok=True)
    run.mkdir(mode=0o700, exist_ok=True)
    if not is_launching_machine:
        os.chdir(folder)
        set_display_path(run, order["shown"])
        adopt_outputs(run, order["outputs"])
    record = DetachedRecord(
        order["run_id"], job.name, tuple(order["command"]),
        tuple(host.name for host in choose_hosts(job, cluster)), time.time(), order["launched_by"],
        order["launched_in"], socket.gethostname(), os.getpid(),
        float(this_machine.start_time(os.getpid()) or 0), str(run), order["keep_results"],
    )  # fmt: skip
    _write_record(folder, record)
    secrets = secrets_of(job, cluster)
    out, err = (TeeStream(run / detached.SCREEN, line, err, secrets) for err in (False, True))
    sys.stdout, sys.stderr = out, err
    problem: dict[str, Any] = {}
    try:
        code = _supervise(folder, run, line, job, cluster, out, err)
    except PacelineError as error:
        err.write_file(f"{err.redactor.text(error.render())}\n")  # who is there shows it himself
        parts = {"message": error.message, "found": error.found, "remedy": error.remedy}
        code, problem = error.exit_code, {"error": parts}
    for path in folder.iterdir():  # what was only needed while it ran
        if path.name not in (detached.RECORD_FILE, detached.RUN_FOLDER, LOG):
            shutil.rmtree(path, ignore_errors=True)
    _write_record(folder, replace(record, ended=time.time(), exit_code=code))
    if not line.finish(over=code, **problem) and is_launching_machine:
        shutil.rmtree(folder, ignore_errors=True)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    return code


def _supervise(folder: Path, run: Path, line: LauncherLink, job: Job, cluster: Cluster,
               out: TeeStream, err: TeeStream) -> int:  # fmt: skip
    order = line.order
    hosts, loops = choose_hosts(job, cluster), list[asyncio.AbstractEventLoop]()

    def listening(listener: Listener) -> None:
        loops.append(asyncio.get_running_loop())
        certificate = {"certificate": listener.certificate} if listener.certificate else {}
        line.send(
            listening=[list(address) for address in listener.addresses], folder=str(folder),
            run=str(run), **certificate,
        )  # fmt: skip

    transport = CallbackTransport(
        hosts, bytes.fromhex(order["key"]), order["supervisor"], job.interface.value, listening,
        None if order["containers"] is None else _containers(order["containers"], hosts),
    )  # fmt: skip

    def on_message(message: Mapping[str, Any]) -> None:
        loops[0].call_soon_threadsafe(transport.cannot_call, message["missing"])

    line.listen(on_message)
    detector = StartDetector(job.lease_s.value, lambda: line.send(running=True))
    inspect = None
    if order["check_level"] != "none":
        from paceline.checks.preflight import inspector

        inspect = inspector(job, run)
    package = order["package"]
    return run_to_end(
        job,
        cluster,
        transport,
        TeeScreen(order["show"], out, err, line),
        run_dir=run,
        parent=run.parent,
        package=package if isinstance(package, bool) else tuple(package),
        inspect=inspect,
        detached=Takeover(order["run_id"], _supplies(folder, order), detector.on_event),
    )


def _containers(containers: Mapping[str, Any], hosts: Sequence[Host]) -> AgentStarter:
    """Starts containers anew on hosts of which the first one was lost."""
    from paceline.schedulers.container import ContainerTransport

    transport = ContainerTransport.from_json(containers, hosts)

    async def start(host: Host, python: str) -> Channel:
        (channel,) = await transport.open([host], [python])
        return channel

    return start


def _supplies(folder: Path, order: Mapping[str, Any]) -> Supplies | None:
    """Returns what was sent here for the hosts; ``None`` if it lies in its place."""
    if order["trees"] is None:
        return None
    trees = {
        name: Tree(Path(tree["root"]), tree["manifest"], folder / tree["in"])
        for name, tree in order["trees"].items()
    }
    inputs = {str(tree.root): tree for name, tree in trees.items() if name.startswith("input")}
    data = None
    if (sent := order["data"]) is not None:
        root = Path(order["job"]["data"]["path"])
        data = DataFolder(root, "", copy=(sent["key"], Path(sent["place"])))
    return Supplies(trees.get("code"), trees.get("package"), inputs, data)


def _write_record(folder: Path, record: DetachedRecord) -> None:
    temporary = folder / f".{detached.RECORD_FILE}"
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(record.to_json(), file, indent=2)
        file.write("\n")
    temporary.replace(folder / detached.RECORD_FILE)
