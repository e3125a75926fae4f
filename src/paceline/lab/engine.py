"""Boots the hosts of a lab and applies faults to them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from paceline.hosts.lab import Layout
from paceline.lab import control, delayline, faults, host, kernel, network, processes
from paceline.lab.plan import HostPlan, LabPlan
from paceline.spec.errors import LabError

_FREEZE_ROUNDS = 50
_ALL_NAMESPACES = {  # of a host; the lab has one user namespace
    "pid": kernel.CLONE_NEWPID,
    "net": kernel.CLONE_NEWNET,
    "ipc": kernel.CLONE_NEWIPC,
    "uts": kernel.CLONE_NEWUTS,
    "mnt": kernel.CLONE_NEWNS,
}


@dataclass
class Running:
    """A host that is up: its first process, descriptors of its namespaces."""

    pid: int
    namespaces: list[int]
    pid_namespace: int
    forwarder: int | None = None  # of its delay line, if it has one

    def namespace(self, kind: str) -> int:
        return self.namespaces[control.NAMESPACES.index(kind)]


@dataclass(frozen=True)
class ActiveFault:
    kind: str
    host: str
    arguments: tuple[str, ...]


class Engine:
    """Owns the hosts of a lab. Runs in the lab's first process only."""

    def __init__(self, plan: LabPlan, layout: Layout) -> None:
        self._plan = plan
        self._layout = layout
        self._running: dict[str, Running] = {}
        self._active: list[ActiveFault] = []
        self.delay = network.delay(plan)
        self._netem = self.delay > 0 and _kernel_has_netem()

    def boot(self, names: Sequence[str]) -> None:
        """Starts hosts in parallel; raises OSError if one does not come up."""
        plans = [self._plan.host(name) for name in names]
        starting = {plan.name: self._start(plan) for plan in plans}
        try:
            for plan in plans:
                self._running[plan.name] = _open_host(starting[plan.name].pid)
            self._connect(plans)
            for started in starting.values():
                host.release(started)
        except OSError:
            for started in starting.values():
                host.raise_reported_error(started)
            raise
        for started in starting.values():
            host.finish(started)

    def _start(self, plan: HostPlan) -> host.Starting:
        commands = [argv for where, argv in self._link_commands(plan) if where == "host"]
        return host.start(self._plan, self._layout, plan, commands)

    def _connect(self, plans: Sequence[HostPlan]) -> None:
        uses_taps = self.delay > 0 and not self._netem
        for plan in plans if uses_taps else ():
            running = self._running[plan.name]
            running.forwarder = delayline.lay_cable(
                plan.name, plan.interface, running.namespace("net"), self.delay
            )
        pids = {self._running[plan.name].pid: plan for plan in plans}
        host.batch(network.ports_batch(pids, cables=not uses_taps))
        commands = [command for plan in plans for command in self._link_commands(plan)]
        host.batch([" ".join(argv[1:]) for where, argv in commands if where == "switch"], "tc")

    def _link_commands(self, plan: HostPlan) -> tuple[network.PlacedCommand, ...]:
        """The ``tc`` commands for the rate and delay of a host's link."""
        delay = network.delay_by_netem(plan, self.delay) if self._netem else ()
        return (*delay, *network.shape(self._plan, plan, self._netem))

    def reap(self) -> None:
        """Reaps children and removes hosts that have ended."""
        with contextlib.suppress(ChildProcessError):
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                for name, running in list(self._running.items()):
                    if running.pid == pid:
                        self._remove(name)
                    elif running.forwarder == pid:  # its process id may be reused
                        running.forwarder = None

    def _remove(self, name: str) -> None:
        running = self._running.pop(name)
        for fd in running.namespaces:
            os.close(fd)
        if running.forwarder is not None:  # it holds the host's network namespace
            os.kill(running.forwarder, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(running.forwarder, 0)  # its interfaces are gone afterwards
        for port in (name, network.dead_port(self._plan.host(name))):
            with contextlib.suppress(OSError):  # the kernel removes it, too, but later
                host.run(["ip", "link", "del", port])

    def kill_hosts(self) -> None:
        """Sends SIGKILL to every process of every host; networks and links stay."""
        for running in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(running.pid, signal.SIGKILL)

    def namespaces(self, name: str) -> list[int]:
        """Descriptors of a host's namespaces; raises LabError if it is off."""
        return self._require_running(name).namespaces

    def _require_running(self, name: str) -> Running:
        self._plan.host(name)
        self.reap()
        if name not in self._running:
            raise LabError(f"{name} is powered off", remedy=f"paceline lab heal {name}")
        return self._running[name]

    def status(self) -> dict[str, Any]:
        """Hosts and active faults, ready for JSON.

        ``namespace`` identifies a host's PID namespace, because process ids differ outside the lab.
        """
        self.reap()
        outside = processes.processes_outside()
        hosts = []
        for plan in self._plan.hosts:
            running = self._running.get(plan.name)
            hosts.append({
                "name": plan.name,
                "address": plan.address,
                "interface": plan.interface,
                "up": running is not None,
                "sshd": running is not None and self._has_sshd(plan.name, outside),
                "namespace": running.pid_namespace if running else 0,
            })  # fmt: skip
        return {"hosts": hosts, "faults": [asdict(active) for active in self._active]}

    def _has_sshd(self, name: str, candidates: Sequence[processes.Process]) -> bool:
        """Whether the listener of a host's sshd is among processes."""
        config = str(self._layout.sshd_config(name))
        return any(config in process.command for process in candidates)

    def _processes_on(self, running: Running) -> list[processes.Process]:
        namespace = running.pid_namespace
        return processes.of_host(processes.processes_outside(namespace), namespace)

    def strike(self, kind: str, name: str, arguments: Sequence[str]) -> None:
        target = self._target(name)
        fault = faults.find_fault(kind, arguments)
        active = ActiveFault(kind, name, tuple(arguments))
        if any((other.kind, other.host) == (kind, name)
               and (fault.exclusive or other == active) for other in self._active):  # fmt: skip
            raise LabError(f"{kind} is already active on {name}")
        self._require_running(name)
        self._apply(name, fault.strike(target, arguments))
        if kind == "power-off":
            self._drop_faults(name)
        if fault.undo:
            self._active.append(active)

    def _target(self, name: str) -> faults.Target:
        return faults.Target(self._plan, self._plan.host(name), self._netem)

    def undo(self, kind: str, name: str, arguments: Sequence[str]) -> None:
        """Undoes faults of a kind on a host: with these arguments, or all without arguments."""
        self._plan.host(name)
        selected = [
            active
            for active in self._active
            if (active.kind, active.host) == (kind, name)
            and (not arguments or active.arguments == tuple(arguments))
        ]
        if not selected:
            raise LabError(f"{kind} is not active on {name}")
        self._undo_faults(selected)

    def heal(self, name: str | None) -> None:
        """Undoes every fault of a host, or of all hosts; starts what is off or has died.

        Idempotent.
        """
        if name is not None:
            self._plan.host(name)
        self._undo_faults([active for active in self._active if name in (None, active.host)])
        self.reap()
        names = [plan.name for plan in self._plan.hosts if name in (None, plan.name)]
        self.boot([name for name in names if name not in self._running])
        outside = processes.processes_outside()
        for plan in map(self._plan.host, names):
            if plan.sshd and not self._has_sshd(plan.name, outside):
                join = partial(_enter, self._running[plan.name], _ALL_NAMESPACES)
                run_in_child(join, partial(host.start_sshd, self._layout, plan))

    def _undo_faults(self, selected: Sequence[ActiveFault]) -> None:
        for active in reversed(selected):
            self._apply(active.host, self._undo_steps(active))
            self._active.remove(active)
        # else the next connection could fail at once, because the host did not answer before
        host.run(["ip", "neigh", "flush", "all"])

    def _undo_steps(self, active: ActiveFault) -> faults.Steps:
        fault = faults.FAULTS[active.kind]
        target = self._target(active.host)
        return fault.undo(target, active.arguments) if fault.undo else ()

    def _drop_faults(self, name: str) -> None:
        """Forgets the faults of a host that is off, and removes their state on the switch."""
        for active in [active for active in self._active if active.host == name]:
            for step in self._undo_steps(active):
                if isinstance(step, faults.OnSwitch):
                    with contextlib.suppress(OSError):  # its port is already gone
                        self._apply(name, (step,))
            self._active.remove(active)

    def _apply(self, name: str, steps: faults.Steps) -> None:
        for step in steps:
            if isinstance(step, faults.OnSwitch):
                host.run(list(step.argv), step.text)
            elif step is faults.Action.BOOT:
                self.boot([name])
            else:
                self._apply_on_host(name, step)

    def _apply_on_host(self, name: str, step: faults.Step) -> None:
        running = self._require_running(name)
        match step:
            case faults.OnHost(argv):
                kinds = {"net": kernel.CLONE_NEWNET, "mnt": kernel.CLONE_NEWNS}
                host.run(list(argv), enter=partial(_enter, running, kinds))
            case faults.Action.HALT:
                os.kill(running.pid, signal.SIGKILL)
                os.waitpid(running.pid, 0)  # until every process of the host is gone
                self._remove(name)
            case faults.Action.FREEZE:
                self._freeze(running)
            case faults.Action.THAW:
                _signal(self._processes_on(running), signal.SIGCONT)
            case faults.Kill(pattern):
                others = (p for p in self._processes_on(running) if p.pid != running.pid)
                victims = [process for process in others if _matches(pattern, process)]
                if not victims:
                    raise LabError(f"no process on {name} is called {pattern!r}")
                _signal(victims, signal.SIGKILL)
            case faults.Fill(path, free):
                mountinfo = Path(f"/proc/{running.pid}/mountinfo").read_text()
                in_mounts = partial(_enter, running, {"mnt": kernel.CLONE_NEWNS})
                run_in_child(in_mounts, partial(fill, path, free, mountinfo))

    def _freeze(self, running: Running) -> None:
        """Repeats until nothing runs, because a process may fork while others are stopped."""
        for _ in range(_FREEZE_ROUNDS):
            moving = [process for process in self._processes_on(running)
                      if process.state not in "Tt"]  # fmt: skip
            if not moving:
                return
            _signal(moving, signal.SIGSTOP)
            time.sleep(0.002)


def _open_host(pid: int) -> Running:
    running = Running(pid, control.namespaces_of(pid), 0)
    running.pid_namespace = os.fstat(running.namespace("pid")).st_ino
    return running


def _kernel_has_netem() -> bool:
    try:
        host.run(list(network.NETEM_PROBE))
    except OSError:
        return False
    host.run(list(network.NETEM_PROBE_UNDO))
    return True


def _enter(running: Running, kinds: dict[str, int]) -> None:
    for name, kind in kinds.items():
        kernel.setns(running.namespace(name), kind)


def _signal(victims: Sequence[processes.Process], number: signal.Signals) -> None:
    for process in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def _matches(pattern: str, process: processes.Process) -> bool:
    if pattern.isdigit():
        return process.inner == int(pattern)
    return re.search(pattern, process.command) is not None


# --- filling a host's disk


_MAX_FILL_BYTES = 1 << 30  # fills real memory
_CHUNK_BYTES = 1 << 20
_TMPFS = "tmpfs"


def fill(path: str, target_free: int, mountinfo: str) -> None:
    """Writes a file that leaves ``target_free`` bytes; refuses disks that are not the host's own.

    ``mountinfo`` is the text of /proc/PID/mountinfo of the host.
    """
    stats = os.statvfs(path)
    free_bytes = stats.f_bavail * stats.f_frsize
    kind = kind_of(os.stat(path).st_dev, mountinfo)  # noqa: PTH116
    if kind != _TMPFS or free_bytes > _MAX_FILL_BYTES:
        raise LabError(
            f"{path} is not a disk that can be filled",
            found=f"{free_bytes >> 20} MiB are free there, on a file system of type {kind}",
            remedy=f"bring the lab up with a small disk there: --private {path}:64m",
        )
    _write_ballast(Path(path) / faults.BALLAST, max(0, free_bytes - target_free))


def kind_of(device: int, mountinfo: str) -> str:
    """Type of the file system on a device, from the text of a mountinfo file."""
    device_number = f"{os.major(device)}:{os.minor(device)}"
    for line in mountinfo.splitlines():
        if line.split()[2] == device_number:
            return line.partition(" - ")[2].split()[0]
    return "unknown"


def _write_ballast(file: Path, size: int) -> None:
    with file.open("wb", buffering=0) as ballast:
        while size > 0:
            try:
                size -= ballast.write(bytes(min(size, _CHUNK_BYTES)))
            except OSError:  # full, as intended
                return


def run_in_child(enter: Callable[[], None], work: Callable[[], None]) -> None:
    """Runs ``enter`` and ``work`` in a child process; raises its error here."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os._exit(_in_child(enter, work, write))
    os.close(write)
    with os.fdopen(read) as pipe:
        output = pipe.read()
    if os.waitpid(child, 0)[1]:
        message, found, remedy = output.split("\0")
        raise LabError(message, found=found, remedy=remedy)


def _in_child(enter: Callable[[], None], work: Callable[[], None], write: int) -> int:
    try:
        enter()
        work()
    except BaseException as error:
        parts = ("it cannot be done", str(error), "")
        if isinstance(error, LabError):
            parts = (error.message, error.found, error.remedy)
        os.write(write, "\0".join(parts).encode())
        return 1
    return 0
