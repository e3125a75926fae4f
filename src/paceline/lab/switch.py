"""``switch STATE [--held]``: the process that owns a lab.

It is the first process of the PID namespace that contains every host, and it owns the network
between the hosts. When it ends, the kernel removes everything else.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from paceline.hosts.lab import Layout
from paceline.lab import available, files, host, kernel, network, processes
from paceline.lab.control import send_reply
from paceline.lab.engine import Engine
from paceline.lab.host import batch
from paceline.lab.plan import LabPlan
from paceline.spec.errors import LabError, PacelineError

_CLOSE_TIMEOUT_S = 0.5  # for the hosts' processes to close their connections


def main(argv: list[str]) -> int:
    """Starts the owner, waits until the lab is up, and prints ``{}`` or an error as JSON."""
    layout = Layout(Path(argv[0]))
    try:
        available.enter_namespaces()
    except OSError as error:
        print(json.dumps({"error": _error_fields(available.namespace_error(error))}))
        return 0
    ready, ready_write = os.pipe()
    recorded, recorded_write = os.pipe()
    owner = os.fork()
    if owner == 0:
        os.close(ready)
        os.close(recorded_write)
        os.read(recorded, 1)  # its start time is read from /proc, over which it mounts its own
        _run_owner(layout, ready_write, ends_with_stdin="--held" in argv)
    os.close(ready_write)
    files.write_owner(layout, owner)
    os.close(recorded_write)
    with os.fdopen(ready) as report:
        output = report.read()
    print(output or json.dumps({"error": {"message": "the lab's owner ended while starting"}}))
    return 0


def _run_owner(layout: Layout, ready: int, ends_with_stdin: bool) -> NoReturn:
    """Runs the owner; ``ends_with_stdin``: until standard input is closed."""
    os.setsid()
    _log_to(layout.owner_log)
    switch = None
    try:
        plan = files.read_plan(layout)
        _set_up_switch(plan, layout)
        switch = Switch(plan, layout, ends_with_stdin)
        switch.engine.boot([host.name for host in plan.hosts])
        os.write(ready, b"{}\n")
        os.close(ready)
        switch.serve()
    except BaseException as error:
        traceback.print_exc()
        with contextlib.suppress(OSError):  # closed after the start
            os.write(ready, json.dumps({"error": _error_fields(error)}).encode())
    finally:
        _shut_down(layout, switch.engine if switch else None)
        os._exit(0)


def _log_to(file: Path) -> None:
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def _set_up_switch(plan: LabPlan, layout: Layout) -> None:
    """Mounts /proc and /sys of the switch's namespaces, and a /run for its tools' locks."""
    host.apply_mounts([
        host.Mount("fresh", "/proc", "proc"),
        host.Mount("fresh", "/sys", "sysfs"),
        host.Mount("fresh", "/run", "tmpfs", "mode=755"),
        *host.rebind_mounts([str(layout.root), *plan.shared]),
    ])  # fmt: skip
    kernel.set_host_name("switch")
    batch(network.switch_batch(plan))


def _error_fields(error: BaseException) -> dict[str, str]:
    if isinstance(error, PacelineError):
        return {"message": error.message, "found": error.found, "remedy": error.remedy}
    if isinstance(error, OSError):
        return {"message": "the lab cannot do that", "found": str(error)}
    return {"message": "the lab's owner failed", "found": repr(error)}


def _shut_down(layout: Layout, engine: Engine | None) -> None:
    """Ends every process: by SIGTERM first, so that connections from outside are closed."""
    with contextlib.suppress(OSError):
        os.kill(-1, signal.SIGCONT)
        os.kill(-1, signal.SIGTERM)
        _reap_until(time.monotonic() + _CLOSE_TIMEOUT_S)
    if engine is not None:
        with contextlib.suppress(OSError):
            _close_connections(engine)
    with contextlib.suppress(OSError):
        os.kill(-1, signal.SIGKILL)
    files.remove(layout)


def _close_connections(engine: Engine) -> None:
    """Kills the hosts' processes and waits until connections from outside are closed.

    The links stay until then, because they carry the FINs that the kernel sends for the processes.
    Connections of a host that is off or unplugged are cut on this side.
    """
    engine.kill_hosts()
    deadline = time.monotonic() + _CLOSE_TIMEOUT_S + 2 * engine.delay
    while (num_open := processes.connected()) and time.monotonic() < deadline:
        time.sleep(0.01)
    if num_open:
        host.run(["ss", "--tcp", "--kill", "--no-header", "--numeric"])


def _reap_until(deadline: float) -> None:
    """Waits while hosts still have processes other than their first one."""
    while time.monotonic() < deadline and any(map(_children, _children("1"))):
        time.sleep(0.01)


def _children(pid: str) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return []


class Switch:
    """Serves requests until the lab is to end, and reaps hosts that end."""

    def __init__(self, plan: LabPlan, layout: Layout, ends_with_stdin: bool) -> None:
        self.engine = Engine(plan, layout)
        self._ends_with_stdin = ends_with_stdin
        self._is_stopping = False
        self._network = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        self._user = os.open("/proc/self/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(layout.control))
        self._listener.listen(64)
        self._wake, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._stop)

    def _stop(self, *_: object) -> None:
        self._is_stopping = True

    def serve(self) -> None:
        sources: list[Any] = [self._listener, self._wake, *([0] if self._ends_with_stdin else [])]
        while not self._is_stopping:
            ready = select.select(sources, [], [])[0]
            if 0 in ready and not os.read(0, 4096):
                return
            if self._wake in ready:
                os.read(self._wake, 4096)
                self.engine.reap()
            if self._listener in ready:
                self._handle_connection(self._listener.accept()[0])

    def _handle_connection(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, ValueError):
            connection.settimeout(5)
            request = json.loads(connection.makefile().readline())
            try:
                reply, fds = self._handle(request)
            except (PacelineError, OSError) as error:
                reply, fds = {"error": _error_fields(error)}, []
            send_reply(connection, reply, fds)
            sys.stdout.flush()

    def _handle(self, request: dict[str, Any]) -> tuple[Any, list[int]]:
        verb = request["do"]
        if verb == "network":
            return {}, [self._user, self._network]
        if verb == "enter":
            return {}, self.engine.namespaces(request["host"])
        if verb == "status":
            return self.engine.status(), []
        if verb in ("fault", "undo"):
            apply = self.engine.strike if verb == "fault" else self.engine.undo
            apply(request["kind"], request["host"], request["arguments"])
        elif verb == "heal":
            self.engine.heal(request["host"])
        elif verb == "down":
            self._is_stopping = True
        else:
            raise LabError(f"unknown request {verb!r}")
        return {}, []
