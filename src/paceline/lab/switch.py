"""``switch STATE [--held]``: the process that owns a lab.

It is the first process of a PID namespace that holds every host, and the network between the
hosts is its own. When it ends, the kernel ends and removes everything else.
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
from paceline.lab.control import answer
from paceline.lab.engine import Engine
from paceline.lab.host import batch
from paceline.lab.plan import LabPlan
from paceline.spec.errors import LabError, PacelineError

_FAREWELL = 0.5  # seconds that the hosts' processes have to close their connections


def main(argv: list[str]) -> int:
    """Starts the owner and returns when the lab is up; prints ``{}`` or an error as JSON."""
    layout = Layout(Path(argv[0]))
    try:
        _leave_the_machine()
    except OSError as error:
        print(json.dumps({"error": _described(available.refused(error))}))
        return 0
    ready, ready_write = os.pipe()
    owner = os.fork()
    if owner == 0:
        os.close(ready)
        _own(layout, ready_write, held="--held" in argv)
    os.close(ready_write)
    files.write_owner(layout, owner)
    with os.fdopen(ready) as report:
        said = report.read()
    print(said or json.dumps({"error": {"message": "the lab's owner ended while starting"}}))
    return 0


def _leave_the_machine() -> None:
    if os.geteuid() != 0:
        kernel.new_user_namespace()
        kernel.keep_capabilities_over_exec()
    kernel.unshare(available.LAB_NAMESPACES)
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)


def _own(layout: Layout, ready: int, held: bool) -> NoReturn:
    """The owner's life. ``held``: it ends when standard input does."""
    os.setsid()
    _log_to(layout.owner_log)
    switch = None
    try:
        plan = files.read_plan(layout)
        _make_own_world(plan, layout)
        switch = Switch(plan, layout, held)
        switch.engine.boot([host.name for host in plan.hosts])
        os.write(ready, b"{}\n")
        os.close(ready)
        switch.serve()
    except BaseException as error:
        traceback.print_exc()
        with contextlib.suppress(OSError):  # after start-up nobody listens there
            os.write(ready, json.dumps({"error": _described(error)}).encode())
    finally:
        _take_down(layout, switch.engine if switch else None)
        os._exit(0)


def _log_to(file: Path) -> None:
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def _make_own_world(plan: LabPlan, layout: Layout) -> None:
    """The switch sees its own processes and interfaces, and has a /run for its tools' locks."""
    host.apply_mounts(
        (
            host.Mount("fresh", "/proc", "proc"),
            host.Mount("fresh", "/sys", "sysfs"),
            host.Mount("fresh", "/run", "tmpfs", "mode=755"),
            *host.shared_again([str(layout.root), *plan.shared]),
        )
    )
    kernel.set_host_name("switch")
    batch(network.switch_batch(plan))


def _described(error: BaseException) -> dict[str, str]:
    if isinstance(error, PacelineError):
        return {"message": error.message, "found": error.found, "remedy": error.remedy}
    if isinstance(error, OSError):
        return {"message": "the lab cannot do that", "found": str(error)}
    return {"message": "the lab's owner failed", "found": repr(error)}


def _take_down(layout: Layout, engine: Engine | None) -> None:
    """Ends every process, politely first: connections from outside are to see their end."""
    with contextlib.suppress(OSError):
        os.kill(-1, signal.SIGCONT)
        os.kill(-1, signal.SIGTERM)
        _reap_until(time.monotonic() + _FAREWELL)
    if engine is not None:
        with contextlib.suppress(OSError):
            _hang_up(engine)
    with contextlib.suppress(OSError):
        os.kill(-1, signal.SIGKILL)
    files.remove(layout)


def _hang_up(engine: Engine) -> None:
    """Ends the hosts, but not yet their cables: what is connected from outside lives no longer.

    The kernel says goodbye for processes that it ends, and a cable with a delay has to carry that.
    Where it does not arrive (the host is off or unplugged) the connection is cut on this side.
    """
    engine.end_hosts()
    deadline = time.monotonic() + _FAREWELL + 2 * engine.delay
    while (left := processes.connected()) and time.monotonic() < deadline:
        time.sleep(0.01)
    if left:
        host.run(["ss", "--tcp", "--kill", "--no-header", "--numeric"])


def _reap_until(deadline: float) -> None:
    """Waits while hosts still have processes besides their first one."""
    while time.monotonic() < deadline and any(map(_has_children, _own_children())):
        time.sleep(0.01)


def _own_children() -> list[str]:
    return Path("/proc/1/task/1/children").read_text().split()


def _has_children(pid: str) -> bool:
    with contextlib.suppress(OSError):
        return bool(Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return False


class Switch:
    """Waits for requests, for the end of hosts and for the end of the one who holds the lab."""

    def __init__(self, plan: LabPlan, layout: Layout, held: bool) -> None:
        self.engine = Engine(plan, layout)
        self._held = held
        self._done = False
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
        self._done = True

    def serve(self) -> None:
        """Returns when the lab is to end."""
        sources: list[Any] = [self._listener, self._wake, *([0] if self._held else [])]
        while not self._done:
            ready = select.select(sources, [], [])[0]
            if 0 in ready and not os.read(0, 4096):
                return
            if self._wake in ready:
                os.read(self._wake, 4096)
                self.engine.reap()
            if self._listener in ready:
                self._serve_one(self._listener.accept()[0])

    def _serve_one(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, ValueError):
            connection.settimeout(5)
            reply, fds = self._reply(json.loads(connection.makefile().readline()))
            answer(connection, reply, fds)
            sys.stdout.flush()

    def _reply(self, request: dict[str, Any]) -> tuple[Any, list[int]]:
        try:
            return self._do(request)
        except (PacelineError, OSError) as error:
            return {"error": _described(error)}, []

    def _do(self, request: dict[str, Any]) -> tuple[Any, list[int]]:
        verb = request["do"]
        if verb == "network":
            return {}, [self._user, self._network]
        if verb == "enter":
            return {}, self.engine.namespaces(request["host"])
        if verb == "status":
            return self.engine.status(), []
        if verb == "fault":
            return self.engine.strike(request["kind"], request["host"], request["arguments"]), []
        if verb == "undo":
            return self.engine.undo(request["kind"], request["host"], request["arguments"]), []
        if verb == "heal":
            return self.engine.heal(request["host"]), []
        if verb == "down":
            self._done = True
            return {}, []
        raise LabError(f"the lab does not understand {verb!r}")
