"""The hosts that are up and the faults that are in force: boots the ones, acts the others."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial, singledispatchmethod
from pathlib import Path
from typing import Any

from paceline.hosts.lab import Layout
from paceline.lab import control, delayline, faults, host, kernel, network, processes
from paceline.lab.plan import HostPlan, LabPlan
from paceline.spec.errors import LabError

_FREEZE_ROUNDS = 50


@dataclass
class Running:
    """A host that is up: its first process, its sshd, its namespaces (as descriptors)."""

    pid: int
    namespaces: list[int]
    pid_namespace: int
    sshd: int | None = None
    forwarder: int | None = None  # of its cable, when that is a delay line

    def namespace(self, kind: str) -> int:
        return self.namespaces[control.NAMESPACES.index(kind)]


@dataclass(frozen=True)
class Active:
    """A fault in force."""

    kind: str
    host: str
    arguments: tuple[str, ...]


class Engine:
    """Owns the hosts of a lab. Runs in the lab's first process only."""

    def __init__(self, plan: LabPlan, layout: Layout) -> None:
        self._plan = plan
        self._layout = layout
        self._running: dict[str, Running] = {}
        self._active: list[Active] = []
        self._delay = network.delay(plan)
        self._netem = self._delay > 0 and _kernel_has_netem()

    @property
    def delay(self) -> float:
        """Seconds for which a frame is on its way, one way."""
        return self._delay

    # --- hosts

    def boot(self, names: Sequence[str]) -> None:
        """Starts hosts side by side; raises OSError when one does not come up."""
        plans = [self._plan.host(name) for name in names]
        starting = {plan.name: self._start(plan) for plan in plans}
        try:
            for plan in plans:
                self._running[plan.name] = _running(starting[plan.name].pid)
            self._plug_in(plans)
            for started in starting.values():
                host.let_go(started)
        except OSError:
            for started in starting.values():
                host.raise_its_own(started)
            raise
        for name, started in starting.items():
            self._running[name].sshd = host.finish(started)

    def _start(self, plan: HostPlan) -> host.Starting:
        here = [argv for where, argv in self._link_commands(plan) if where == "host"]
        return host.start(self._plan, self._layout, plan, here)

    def _plug_in(self, plans: Sequence[HostPlan]) -> None:
        by_tap = self._delay > 0 and not self._netem
        for plan in plans if by_tap else ():
            up = self._running[plan.name]
            net = up.namespace("net")
            up.forwarder = delayline.lay(plan.name, plan.interface, net, self._delay)
        pids = {self._running[plan.name].pid: plan for plan in plans}
        host.batch(network.ports_batch(pids, cables=not by_tap))
        commands = [command for plan in plans for command in self._link_commands(plan)]
        host.batch([" ".join(argv[1:]) for where, argv in commands if where == "switch"], "tc")

    def _link_commands(self, plan: HostPlan) -> tuple[network.Placed, ...]:
        """What gives a host's link its speed and delay; all of it for ``tc``."""
        delay = network.delay_by_netem(plan, self._delay) if self._netem else ()
        return (*delay, *network.shape(self._plan, plan, self._netem))

    def reap(self) -> None:
        """Takes note of hosts and other children that have ended."""
        with contextlib.suppress(ChildProcessError):
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                for name, up in list(self._running.items()):
                    if up.pid == pid:
                        self._forget(name)
                    elif up.forwarder == pid:  # its number may be another's soon
                        up.forwarder = None

    def _forget(self, name: str) -> None:
        up = self._running.pop(name)
        for fd in up.namespaces:
            os.close(fd)
        if up.forwarder is not None:  # it keeps the host's network alive
            os.kill(up.forwarder, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(up.forwarder, 0)  # then its interfaces are gone, too
        for port in (name, network.dead_port(self._plan.host(name))):
            with contextlib.suppress(OSError):  # the kernel removes it too, but in its own time
                host.run(["ip", "link", "del", port])

    def end_hosts(self) -> None:
        """SIGKILL to every process of every host. Their networks and cables stay."""
        for up in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(up.pid, signal.SIGKILL)

    def namespaces(self, name: str) -> list[int]:
        """Descriptors of a host's namespaces; raises LabError when it is off."""
        return self._up(name).namespaces

    def _up(self, name: str) -> Running:
        self._plan.host(name)
        self.reap()
        if name not in self._running:
            raise LabError(f"{name} is powered off", remedy=f"paceline lab heal {name}")
        return self._running[name]

    def status(self) -> dict[str, Any]:
        """Hosts and active faults, ready for JSON.

        ``namespace`` is a host's PID namespace: process ids mean nothing outside the lab.
        """
        self.reap()
        running = {(p.namespace, p.inner) for p in processes.everything()}
        hosts = [self._host_status(plan.name, running) for plan in self._plan.hosts]
        return {"hosts": hosts, "faults": [asdict(active) for active in self._active]}

    def _host_status(self, name: str, running: set[tuple[int, int]]) -> dict[str, Any]:
        plan, up = self._plan.host(name), self._running.get(name)
        return {
            "name": name,
            "address": plan.address,
            "interface": plan.interface,
            "up": up is not None,
            "sshd": up is not None and (up.pid_namespace, up.sshd) in running,
            "namespace": up.pid_namespace if up else 0,
        }

    def _inside(self, up: Running) -> list[processes.Process]:
        return processes.of_host(processes.everything(), up.pid_namespace)

    # --- faults

    def strike(self, kind: str, name: str, arguments: Sequence[str]) -> dict[str, Any]:
        """Does a fault to a host."""
        target = self._target(name)
        fault = faults.find(kind, arguments)
        active = Active(kind, name, tuple(arguments))
        if self._same(active, fault):
            raise LabError(f"{kind} is in force on {name} already")
        self._up(name)
        self._act(name, fault.strike(target, arguments))
        if kind == "power-off":
            self._heal_the_dead(name)
        if fault.undo:
            self._active.append(active)
        return self.status()

    def _target(self, name: str) -> faults.Target:
        return faults.Target(self._plan, self._plan.host(name), self._netem)

    def _same(self, active: Active, fault: faults.Fault) -> list[Active]:
        if fault.once:
            return [a for a in self._active if (a.kind, a.host) == (active.kind, active.host)]
        return [other for other in self._active if other == active]

    def undo(self, kind: str, name: str, arguments: Sequence[str]) -> dict[str, Any]:
        """Ends faults of a kind on a host: those with these arguments, all without arguments."""
        self._plan.host(name)
        chosen = [
            active
            for active in self._active
            if (active.kind, active.host) == (kind, name)
            and (not arguments or active.arguments == tuple(arguments))
        ]
        if not chosen:
            raise LabError(f"{kind} is not in force on {name}")
        return self._end(chosen)

    def heal(self, name: str | None) -> dict[str, Any]:
        """Ends every fault of a host, or of all; starts hosts that are off. Never too often."""
        if name is not None:
            self._plan.host(name)
        self._end([active for active in self._active if name in (None, active.host)])
        self.reap()
        wanted = [plan.name for plan in self._plan.hosts if name in (None, plan.name)]
        self.boot([name for name in wanted if name not in self._running])
        return self.status()

    def _end(self, chosen: Sequence[Active]) -> dict[str, Any]:
        for active in reversed(chosen):
            self._act(active.host, self._steps_back(active))
            self._active.remove(active)
        return self.status()

    def _steps_back(self, active: Active) -> faults.Steps:
        fault = faults.FAULTS[active.kind]
        target = self._target(active.host)
        return fault.undo(target, active.arguments) if fault.undo else ()

    def _heal_the_dead(self, name: str) -> None:
        """The host's other faults end with it; what they left on the switch goes."""
        for active in [active for active in self._active if active.host == name]:
            steps = self._steps_back(active)
            for step in steps:
                if isinstance(step, faults.OnSwitch):
                    with contextlib.suppress(OSError):  # its port is gone already
                        self._do(step, name)
            self._active.remove(active)

    def _act(self, name: str, steps: faults.Steps) -> None:
        for step in steps:
            self._do(step, name)

    @singledispatchmethod
    def _do(self, step: faults.Step, name: str) -> None:
        raise NotImplementedError(step)

    @_do.register
    def _(self, step: faults.OnSwitch, name: str) -> None:
        host.run(list(step.argv), step.text)

    @_do.register
    def _(self, step: faults.OnHost, name: str) -> None:
        up = self._up(name)
        kinds = {"net": kernel.CLONE_NEWNET, "mnt": kernel.CLONE_NEWNS}
        host.run(list(step.argv), enter=partial(_enter, up, kinds))

    @_do.register
    def _(self, step: faults.Halt, name: str) -> None:
        up = self._up(name)
        os.kill(up.pid, signal.SIGKILL)
        os.waitpid(up.pid, 0)  # returns when every process of the host is gone
        self._forget(name)

    @_do.register
    def _(self, step: faults.Boot, name: str) -> None:
        self.boot([name])

    @_do.register
    def _(self, step: faults.Freeze, name: str) -> None:
        """Repeated until nothing runs: a process may fork while the others are being stopped."""
        up = self._up(name)
        for _ in range(_FREEZE_ROUNDS):
            moving = [process for process in self._inside(up) if process.state not in "Tt"]
            if not moving:
                return
            _signal(moving, signal.SIGSTOP)
            time.sleep(0.002)

    @_do.register
    def _(self, step: faults.Thaw, name: str) -> None:
        _signal(self._inside(self._up(name)), signal.SIGCONT)

    @_do.register
    def _(self, step: faults.Kill, name: str) -> None:
        up = self._up(name)
        victims = [p for p in self._inside(up) if p.pid != up.pid and _matches(step.what, p)]
        if not victims:
            raise LabError(f"no process on {name} is called {step.what!r}")
        _signal(victims, signal.SIGKILL)

    @_do.register
    def _(self, step: faults.Fill, name: str) -> None:
        mountinfo = Path(f"/proc/{self._up(name).pid}/mountinfo").read_text()
        self._on_disk(name, partial(fill, step.path, step.free, mountinfo))

    @_do.register
    def _(self, step: faults.Unfill, name: str) -> None:
        self._on_disk(name, partial(unfill, step.path))

    def _on_disk(self, name: str, work: Callable[[], None]) -> None:
        enter = partial(_enter, self._up(name), {"mnt": kernel.CLONE_NEWNS})
        done_by_child(enter, work)


def _running(pid: int) -> Running:
    up = Running(pid, control.namespaces_of(pid), 0)
    up.pid_namespace = os.fstat(up.namespace("pid")).st_ino
    return up


def _kernel_has_netem() -> bool:
    try:
        host.run(list(network.NETEM_PROBE))
    except OSError:
        return False
    host.run(list(network.NETEM_PROBE_UNDO))
    return True


def _enter(up: Running, kinds: dict[str, int]) -> None:
    for name, kind in kinds.items():
        kernel.setns(up.namespace(name), kind)


def _signal(victims: Sequence[processes.Process], number: signal.Signals) -> None:
    for process in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def _matches(what: str, process: processes.Process) -> bool:
    if what.isdigit():
        return process.inner == int(what)
    return re.search(what, process.command) is not None


# --- filling a host's disk, and emptying it again


_BALLAST = ".paceline-lab-ballast"
_LIMIT = 1 << 30  # bytes; a file system in memory is filled with real memory
_CHUNK = 1 << 20
_TMPFS = "tmpfs"


def fill(path: str, free: int, mountinfo: str) -> None:
    """Writes a file that leaves ``free`` bytes; refuses what is not the host's own.

    Args:
        mountinfo: /proc/PID/mountinfo of the host.
    """
    room = _room(path)
    kind = kind_of(os.stat(path).st_dev, mountinfo)  # noqa: PTH116
    if kind != _TMPFS or room > _LIMIT:
        raise LabError(
            f"{path} is not a disk that can be filled",
            found=f"{room >> 20} MiB are free there, on a file system of type {kind}",
            remedy=f"bring the lab up with a small disk there: --private {path}:64m",
        )
    _write_ballast(Path(path) / _BALLAST, max(0, room - free))


def _room(path: str) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def kind_of(device: int, mountinfo: str) -> str:
    """Type of the file system on a device, according to the text of a mountinfo file."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in mountinfo.splitlines():
        if line.split()[2] == wanted:
            return line.partition(" - ")[2].split()[0]
    return "unknown"


def _write_ballast(file: Path, size: int) -> None:
    with file.open("wb", buffering=0) as ballast:
        while size > 0:
            try:
                size -= ballast.write(bytes(min(size, _CHUNK)))
            except OSError:  # full is what we want
                return


def unfill(path: str) -> None:
    (Path(path) / _BALLAST).unlink(missing_ok=True)


def done_by_child(enter: Callable[[], None], work: Callable[[], None]) -> None:
    """Runs ``work`` in a child that called ``enter`` first; its error is raised here."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os._exit(_in_child(enter, work, write))
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    if os.waitpid(child, 0)[1]:
        message, found, remedy = said.split("\0")
        raise LabError(message, found=found, remedy=remedy)


def _in_child(enter: Callable[[], None], work: Callable[[], None], write: int) -> int:
    try:
        enter()
        work()
    except LabError as error:
        os.write(write, "\0".join((error.message, error.found, error.remedy)).encode())
        return 1
    except BaseException as error:
        os.write(write, f"it cannot be done\0{error}\0".encode())
        return 1
    return 0
