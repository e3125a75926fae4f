"""A host of the lab: what it mounts, and its first process, until its last orphan is reaped."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NoReturn

from paceline.hosts.lab import Layout
from paceline.lab import files, kernel, network, processes
from paceline.lab.available import find, missing
from paceline.lab.files import home_inside, home_outside
from paceline.lab.plan import MARKER, HostPlan, LabPlan, PrivateFolder

# --- what it mounts: decided as a list (pure), then done


Kind = Literal["fresh", "folder", "file", "bind", "overlay"]

# Where every host has a file system of its own, in memory.
OWN_FOLDERS = {
    "/dev/shm": "mode=1777",  # noqa: S108 - a mount point, not a temporary file
    "/tmp": "mode=1777",  # noqa: S108
    "/var/tmp": "mode=1777",  # noqa: S108
    "/run": "mode=755",
    "/var/log": "mode=755",
}


@dataclass(frozen=True)
class Mount:
    """One step.

    Attributes:
        kind: ``fresh`` mounts a new file system of type ``source``; ``folder`` makes a folder
            (with the rights ``data``) and ``file`` a file holding ``source``, both on a file
            system made here; ``bind``
            shows the folder or file ``source``; ``overlay`` gives ``source`` a private upper
            layer in ``data``.
        target: Where.
        optional: A target that does not exist on this machine is left out.
    """

    kind: Kind
    target: str
    source: str = ""
    data: str = ""
    optional: bool = False


def host_mounts(plan: LabPlan, layout: Layout, host: HostPlan) -> tuple[Mount, ...]:
    """Every mount of ``host``, in order."""
    return (
        Mount("fresh", "/proc", "proc"),
        Mount("fresh", "/sys", "sysfs"),
        Mount("fresh", "/sys/fs/cgroup", "tmpfs", "mode=755", optional=True),
        Mount("fresh", "/dev/pts", "devpts", "newinstance,ptmxmode=0666,mode=620", optional=True),
        Mount("fresh", "/dev/mqueue", "mqueue", optional=True),
        *(Mount("fresh", path, "tmpfs", data, True) for path, data in OWN_FOLDERS.items()),
        Mount("folder", "/run/sshd"),
        Mount("folder", "/run/lock"),
        Mount("file", MARKER, plan.options.name),
        Mount("folder", home_inside(plan)),
        Mount("bind", home_inside(plan), str(home_outside(plan, layout, host.name))),
        Mount("folder", str(layout.root.parent), data="700"),
        *shared_again([str(layout.root), *plan.shared]),
        *_own_files(layout, host),
        *_private_folders(plan, layout, host),
        *_hidden(plan.options.hide),
    )


def shared_again(paths: Iterable[str]) -> Iterator[Mount]:
    """Binds that bring back what a host's own folders would hide."""
    for path in dict.fromkeys(paths):
        if _below_own(path):
            yield Mount("bind", path, path)


def _below_own(path: str) -> bool:
    parents = {str(parent) for parent in PurePosixPath(path).parents}
    return bool(parents & OWN_FOLDERS.keys())


def _own_files(layout: Layout, host: HostPlan) -> Iterator[Mount]:
    for name in ("hosts", "hostname", "machine-id", "passwd", "group", "shadow", "resolv.conf"):
        source = str(layout.etc(host.name) / name)
        yield Mount("bind", f"/etc/{name}", source, optional=True)
    boot_id = "/proc/sys/kernel/random/boot_id"
    yield Mount("bind", boot_id, str(layout.etc(host.name) / "boot_id"), optional=True)


def _private_folders(plan: LabPlan, layout: Layout, host: HostPlan) -> Iterator[Mount]:
    for index, folder in enumerate(plan.private):
        if folder.size:
            yield _sized(folder)
        else:
            disk = str(layout.disk(host.name, index))
            yield Mount("overlay", folder.path, folder.path, data=disk)


def _sized(folder: PrivateFolder) -> Mount:
    return Mount("fresh", folder.path, "tmpfs", f"size={folder.size},mode=1777")


def _hidden(paths: Iterable[str]) -> Iterator[Mount]:
    return (Mount("fresh", path, "tmpfs", "mode=755") for path in paths)


def apply_mounts(mounts: Iterable[Mount]) -> None:
    """Does the steps in the calling process's mount namespace. Raises OSError."""
    steps = list(mounts)
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    sources = _open_sources(steps)
    for step in steps:
        if not (step.optional and not Path(step.target).exists()):
            _mount(step, sources)
    for fd in sources.values():
        os.close(fd)


def _open_sources(steps: Iterable[Mount]) -> dict[str, int]:
    """Handles on everything to be shown elsewhere, from before anything covers it."""
    paths = {step.source for step in steps if step.kind in ("bind", "overlay")}
    return {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in paths}


def _mount(step: Mount, sources: dict[str, int]) -> None:
    if step.kind == "folder":
        Path(step.target).mkdir(parents=True, exist_ok=True)
        Path(step.target).chmod(int(step.data or "755", 8))
    elif step.kind == "file":
        Path(step.target).write_text(step.source)
    elif step.kind == "fresh":
        _make_target(step.target, folder=True)
        kernel.mount(step.source, step.target, step.source, _flags(step.source), step.data)
    else:
        handle = f"/proc/self/fd/{sources[step.source]}"
        _make_target(step.target, folder=Path(handle).is_dir())
        if step.kind == "bind":
            kernel.mount(handle, step.target, flags=kernel.MS_BIND | kernel.MS_REC)
        else:
            _overlay(handle, step)


def _flags(kind: str) -> int:
    if kind in ("proc", "sysfs"):
        return kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
    return kernel.MS_NOSUID


def _make_target(target: str, folder: bool) -> None:
    """A mount point, where the host's own file systems lack one; never on the machine's disk."""
    path = Path(target)
    if path.exists() or not _below_own(target):
        return
    if folder:
        path.mkdir(parents=True)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def _overlay(lower: str, step: Mount) -> None:
    for layer in ("upper", "work"):
        Path(step.data, layer).mkdir(parents=True, exist_ok=True)
    _dress(lower, Path(step.data, "upper"))
    data = f"lowerdir={lower},upperdir={step.data}/upper,workdir={step.data}/work"
    if os.geteuid() != 0:  # without root the layer's marks live in user attributes
        data += ",userxattr"
    kernel.mount("overlay", step.target, "overlay", data=data)


def _dress(lower: str, upper: Path) -> None:
    """The folder itself takes its owner and rights from the upper layer."""
    found = os.stat(lower)  # noqa: PTH116 - follows the handle
    if os.geteuid() == 0:
        os.chown(upper, found.st_uid, found.st_gid)
    upper.chmod(stat.S_IMODE(found.st_mode))


# --- its first process


_NAMESPACES = (
    kernel.CLONE_NEWNET
    | kernel.CLONE_NEWUTS
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWNS
)
_SSHD_DEADLINE = 20.0


@dataclass
class Starting:
    """A host on its way up: its namespaces exist, its network is not plugged in yet.

    Attributes:
        pid: Its first process, as the switch numbers it.
        go: Written to when the network is plugged in.
        report: Where the host says that it is up, or why not.
    """

    pid: int
    go: int
    report: int


Commands = Sequence[Sequence[str]]


def start(plan: LabPlan, layout: Layout, host: HostPlan, commands: Commands) -> Starting:
    """Forks a host. The caller plugs it in, then calls :func:`let_go` and :func:`finish`.

    Args:
        commands: What is to be run on the host when its network is up.
    """
    go_read, go = os.pipe()
    report, report_write = os.pipe()
    middle = os.fork()
    if middle == 0:
        begin = partial(_first_process, plan, layout, host, commands, go_read, report_write)
        _guarded(lambda: _fork_first(begin, report_write), report_write)
    os.close(go_read)
    os.close(report_write)
    os.waitpid(middle, 0)
    first = _read_line(report)
    return Starting(int(first["pid"]) if "pid" in first else _failed(first), go, report)


def let_go(starting: Starting) -> None:
    """Tells the host that its network is plugged in."""
    os.write(starting.go, b"1")
    os.close(starting.go)


def finish(starting: Starting) -> int | None:
    """Waits until the host is up.

    Returns:
        The process id of its sshd on the host, None without one.
    """
    answer = _read_line(starting.report)
    os.close(starting.report)
    if "error" in answer:
        _failed(answer)
    sshd: int | None = answer["sshd"]
    return sshd


def raise_its_own(starting: Starting) -> None:
    """Raises what a host that has ended says; others then fail to plug in what is not there."""
    if select.select([starting.report], [], [], 0)[0]:
        finish(starting)


def _failed(answer: dict[str, Any]) -> NoReturn:
    raise OSError(answer["error"])


def _read_line(fd: int) -> dict[str, Any]:
    data = b""
    while not data.endswith(b"\n"):
        more = os.read(fd, 1)
        if not more:
            return {"error": "the host ended while starting"}
        data += more
    answer: dict[str, Any] = json.loads(data)
    return answer


def _guarded(work: Callable[[], None], report: int) -> NoReturn:
    """Runs ``work`` in a forked child, which never returns into the parent's code."""
    try:
        work()
    except BaseException as error:
        _say(report, {"error": str(error)})
        os._exit(1)
    os._exit(0)


def _say(fd: int, message: dict[str, Any]) -> None:
    os.write(fd, json.dumps(message).encode() + b"\n")


def _fork_first(begin: Callable[[], None], report: int) -> None:
    kernel.unshare(_NAMESPACES)  # a PID namespace begins with the next child
    first = os.fork()
    if first:
        _say(report, {"pid": first})
    else:
        _guarded(begin, report)


def _first_process(
    plan: LabPlan, layout: Layout, host: HostPlan, commands: Commands, go: int, report: int
) -> None:
    _close_all_but(go, report)
    _forget_signals()
    os.setsid()
    kernel.set_host_name(host.name)
    apply_mounts(host_mounts(plan, layout, host))
    os.chdir("/")
    if not os.read(go, 1):
        os._exit(1)
    _bring_up_network(plan, host)
    for argv in commands:
        run(list(argv))
    _say(report, {"sshd": _start_sshd(layout, host) if host.sshd else None})
    os.close(go)
    os.close(report)
    _reap_for_ever()


def _close_all_but(*kept: int) -> None:
    for number in [int(entry.name) for entry in os.scandir("/proc/self/fd")]:
        if number > 2 and number not in kept:
            with contextlib.suppress(OSError):  # the listing's own descriptor is closed already
                os.close(number)


def _forget_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def _bring_up_network(plan: LabPlan, host: HostPlan) -> None:
    batch(network.host_batch(plan, host))
    # Without root, sshd may not otherwise listen on 22.
    Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").write_text("0")


def _start_sshd(layout: Layout, host: HostPlan) -> int:
    config, log = str(layout.sshd_config(host.name)), str(layout.sshd_log(host.name))
    sshd = subprocess.Popen(
        [find("sshd") or "sshd", "-D", "-f", config, "-E", log],  # it wants its whole path
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={"PATH": files.USUAL_PATH},
        preexec_fn=kernel.drop_capabilities_on_exec,
        start_new_session=True,
    )
    _wait_for_port_22(sshd, log)
    pid = sshd.pid
    sshd.returncode = 0  # from here on the first process reaps it like any other
    return pid


def _wait_for_port_22(sshd: subprocess.Popen[bytes], log: str) -> None:
    deadline = time.monotonic() + _SSHD_DEADLINE
    while not any(at.endswith(":22") for at in processes.listeners(os.getpid())):
        if sshd.poll() is not None or time.monotonic() > deadline:
            said = Path(log).read_text().strip() if Path(log).exists() else "nothing"
            raise OSError(f"sshd does not start; it says: {said}")
        time.sleep(0.003)


def _reap_for_ever() -> NoReturn:
    """What a first process is for. Without children it sleeps until there is one."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        try:
            os.wait()
        except ChildProcessError:
            signal.sigwait({signal.SIGCHLD})


def batch(lines: list[str], tool: str = "ip") -> None:
    """Runs ``ip`` (or ``tc``) over all lines at once; raises OSError with what it says."""
    if lines:
        run([tool, "-batch", "-"], "\n".join(lines) + "\n")


def run(argv: list[str], text: str = "", enter: Callable[[], None] | None = None) -> str:
    """Runs a system tool and returns its output; raises OSError with what it says on failure."""
    try:
        done = subprocess.run(
            argv,
            input=text,
            capture_output=True,
            text=True,
            timeout=60,
            env={"PATH": files.USUAL_PATH},
            preexec_fn=enter,
            check=False,
        )
    except FileNotFoundError:
        raise missing(argv[0]) from None
    if done.returncode:
        raise OSError(f"{' '.join(argv)} failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout
