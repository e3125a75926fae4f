"""A host of the lab: its mounts, and its first process, which reaps orphans."""

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
from paceline.lab.available import LAB_NAMESPACES, find_tool, missing_tool
from paceline.lab.files import home_inside, home_outside
from paceline.lab.plan import MARKER, HostPlan, LabPlan

# --- mounts: planned as a list (pure), then applied


Kind = Literal["fresh", "folder", "file", "bind", "overlay"]

# Every host has its own file systems in memory here.
TMPFS_FOLDERS = {
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
        kind: ``fresh`` mounts a new file system of type ``source``. ``folder`` makes a folder with
            the rights ``data``, and ``file`` a file with the content ``source``, both on a new
            file system. ``bind`` mounts the folder or file ``source``. ``overlay`` gives
            ``source`` a private upper layer in ``data``.
        target: The mount point.
        optional: Skip a target that does not exist on this machine.
    """

    kind: Kind
    target: str
    source: str = ""
    data: str = ""
    optional: bool = False


def host_mounts(plan: LabPlan, layout: Layout, host: HostPlan) -> tuple[Mount, ...]:
    return (
        Mount("fresh", "/proc", "proc"),
        Mount("fresh", "/sys", "sysfs"),
        Mount("fresh", "/sys/fs/cgroup", "tmpfs", "mode=755", optional=True),
        Mount("fresh", "/dev/pts", "devpts", "newinstance,ptmxmode=0666,mode=620", optional=True),
        Mount("fresh", "/dev/mqueue", "mqueue", optional=True),
        *(Mount("fresh", path, "tmpfs", data, True) for path, data in TMPFS_FOLDERS.items()),
        Mount("folder", "/run/sshd"),
        Mount("folder", "/run/lock"),
        Mount("file", MARKER, plan.options.name),
        Mount("folder", home_inside(plan)),
        Mount("bind", home_inside(plan), str(home_outside(plan, layout, host.name))),
        Mount("folder", str(layout.root.parent), data="700"),
        *rebind_mounts([str(layout.root), *plan.shared]),
        *_etc_mounts(layout, host),
        *_private_folders(plan, layout, host),
        *(Mount("fresh", path, "tmpfs", "mode=755") for path in plan.options.hide),
    )


def rebind_mounts(paths: Iterable[str]) -> Iterator[Mount]:
    """Binds of paths that a host's own file systems would hide."""
    for path in dict.fromkeys(paths):
        if _is_below_tmpfs(path):
            yield Mount("bind", path, path)


def _is_below_tmpfs(path: str) -> bool:
    parents = {str(parent) for parent in PurePosixPath(path).parents}
    return bool(parents & TMPFS_FOLDERS.keys())


def _etc_mounts(layout: Layout, host: HostPlan) -> Iterator[Mount]:
    for name in ("hosts", "hostname", "machine-id", "passwd", "group", "shadow", "resolv.conf"):
        source = str(layout.etc(host.name) / name)
        yield Mount("bind", f"/etc/{name}", source, optional=True)
    boot_id = "/proc/sys/kernel/random/boot_id"
    yield Mount("bind", boot_id, str(layout.etc(host.name) / "boot_id"), optional=True)


def _private_folders(plan: LabPlan, layout: Layout, host: HostPlan) -> Iterator[Mount]:
    for index, folder in enumerate(plan.private):
        if folder.size:
            yield Mount("fresh", folder.path, "tmpfs", f"size={folder.size},mode=1777")
        else:
            disk = str(layout.disk(host.name, index))
            yield Mount("overlay", folder.path, folder.path, data=disk)


def apply_mounts(mounts: Iterable[Mount]) -> None:
    """Applies the mounts in the calling process's namespace. Raises OSError."""
    steps = list(mounts)
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    # opened before a mount covers them
    paths = {step.source for step in steps if step.kind in ("bind", "overlay")}
    sources = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in paths}
    for step in steps:
        if not (step.optional and not Path(step.target).exists()):
            _mount(step, sources)
    for fd in sources.values():
        os.close(fd)


def _mount(step: Mount, sources: dict[str, int]) -> None:
    if step.kind == "folder":
        Path(step.target).mkdir(parents=True, exist_ok=True)
        Path(step.target).chmod(int(step.data or "755", 8))
    elif step.kind == "file":
        Path(step.target).write_text(step.source)
    elif step.kind == "fresh":
        _make_target(step.target, folder=True)
        flags = kernel.MS_NOSUID
        if step.source in ("proc", "sysfs"):
            flags |= kernel.MS_NODEV | kernel.MS_NOEXEC
        kernel.mount(step.source, step.target, step.source, flags, step.data)
    else:
        handle = f"/proc/self/fd/{sources[step.source]}"
        _make_target(step.target, folder=Path(handle).is_dir())
        if step.kind == "bind":
            kernel.mount(handle, step.target, flags=kernel.MS_BIND | kernel.MS_REC)
        else:
            _overlay(handle, step)


def _make_target(target: str, folder: bool) -> None:
    """Makes a missing mount point, but never on the machine's disk."""
    path = Path(target)
    if path.exists() or not _is_below_tmpfs(target):
        return
    if folder:
        path.mkdir(parents=True)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def _overlay(lower: str, step: Mount) -> None:
    for layer in ("upper", "work"):
        Path(step.data, layer).mkdir(parents=True, exist_ok=True)
    upper, attributes = Path(step.data, "upper"), os.stat(lower)  # noqa: PTH116 - follows the handle
    if os.geteuid() == 0:
        os.chown(upper, attributes.st_uid, attributes.st_gid)
    upper.chmod(stat.S_IMODE(attributes.st_mode))
    data = f"lowerdir={lower},upperdir={step.data}/upper,workdir={step.data}/work"
    if os.geteuid() != 0:  # without root, trusted attributes are not available
        data += ",userxattr"
    kernel.mount("overlay", step.target, "overlay", data=data)


# --- the first process


_SSHD_DEADLINE = 20.0


@dataclass
class Starting:
    """A host that is starting: its namespaces exist, its network is not connected yet.

    Attributes:
        pid: Its first process, in the switch's PID namespace.
        network_ready: Pipe to write to when the network is connected.
        report: Pipe from which to read that the host is up, or why not.
    """

    pid: int
    network_ready: int
    report: int


Commands = Sequence[Sequence[str]]


def start(plan: LabPlan, layout: Layout, host: HostPlan, commands: Commands) -> Starting:
    """Forks a host. The caller connects it, then calls :func:`release` and :func:`finish`.

    The ``commands`` are run on the host when its network is up.
    """
    ready_read, ready_write = os.pipe()
    report, report_write = os.pipe()
    intermediate = os.fork()
    if intermediate == 0:
        init = partial(_first_process, plan, layout, host, commands, ready_read, report_write)
        _guarded(lambda: _fork_first(init, report_write), report_write)
    os.close(ready_read)
    os.close(report_write)
    os.waitpid(intermediate, 0)
    return Starting(int(_read_message(report)["pid"]), ready_write, report)


def release(starting: Starting) -> None:
    """Tells the host that its network is connected."""
    os.write(starting.network_ready, b"1")
    os.close(starting.network_ready)


def finish(starting: Starting) -> None:
    """Waits until the host is up; raises OSError if it does not come up."""
    try:
        _read_message(starting.report)
    finally:
        os.close(starting.report)


def raise_reported_error(starting: Starting) -> None:
    if select.select([starting.report], [], [], 0)[0]:
        finish(starting)


def _read_message(fd: int) -> dict[str, Any]:
    """Reads a line of the host's report; raises OSError for an error."""
    data = b""
    while not data.endswith(b"\n"):
        byte = os.read(fd, 1)
        if not byte:
            raise OSError("the host ended while starting")
        data += byte
    message: dict[str, Any] = json.loads(data)
    if "error" in message:
        raise OSError(message["error"])
    return message


def _guarded(work: Callable[[], None], report: int) -> NoReturn:
    """Runs ``work`` in a forked child and exits."""
    try:
        work()
    except BaseException as error:
        _report(report, {"error": str(error)})
        os._exit(1)
    os._exit(0)


def _report(fd: int, message: dict[str, Any]) -> None:
    os.write(fd, json.dumps(message).encode() + b"\n")


def _fork_first(init: Callable[[], None], report: int) -> None:
    kernel.unshare(LAB_NAMESPACES)  # the next child is the first process of the PID namespace
    first = os.fork()
    if first:
        _report(report, {"pid": first})
    else:
        _guarded(init, report)


def _first_process(plan: LabPlan, layout: Layout, host: HostPlan, commands: Commands,
                   network_ready: int, report: int) -> None:  # fmt: skip
    _close_except(network_ready, report)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    kernel.set_host_name(host.name)
    apply_mounts(host_mounts(plan, layout, host))
    os.chdir("/")
    if not os.read(network_ready, 1):
        os._exit(1)
    batch(network.host_batch(plan, host))
    # without root, sshd could not listen on port 22 otherwise
    Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").write_text("0")
    for argv in commands:
        run(list(argv))
    if host.sshd:
        start_sshd(layout, host)
    _report(report, {"up": True})
    os.close(network_ready)
    os.close(report)
    _reap_forever()


def _close_except(*retained: int) -> None:
    for number in [int(entry.name) for entry in os.scandir("/proc/self/fd")]:
        if number > 2 and number not in retained:
            with contextlib.suppress(OSError):  # the listing's own descriptor is closed already
                os.close(number)


def start_sshd(layout: Layout, host: HostPlan) -> None:
    """Starts sshd and waits until it listens. Call it in the host's namespaces; raises OSError."""
    config, log = str(layout.sshd_config(host.name)), str(layout.sshd_log(host.name))
    program = find_tool("sshd") or "sshd"  # sshd requires its absolute path
    deadline = time.monotonic() + _SSHD_DEADLINE
    try:
        run([program, "-f", config, "-E", log], enter=kernel.drop_ambient_capabilities)
        while not any(address.endswith(":22") for address in processes.listeners(1)):
            if time.monotonic() > deadline:
                raise OSError("it does not listen on port 22")
            time.sleep(0.003)
    except OSError as error:
        log_text = Path(log).read_text().strip() if Path(log).exists() else "nothing"
        raise OSError(f"sshd does not start: {error}: {log_text}") from None


def _reap_forever() -> NoReturn:
    """Reaps children, and sleeps while there are none."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        try:
            os.wait()
        except ChildProcessError:
            signal.sigwait({signal.SIGCHLD})


def batch(lines: list[str], tool: str = "ip") -> None:
    """Runs all lines with one ``ip`` (or ``tc``); raises OSError with its output."""
    if lines:
        run([tool, "-batch", "-"], "\n".join(lines) + "\n")


def run(argv: list[str], text: str = "", enter: Callable[[], None] | None = None) -> str:
    """Runs a system tool and returns its output; raises OSError with it on failure."""
    try:
        result = subprocess.run(
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
        raise missing_tool(argv[0]) from None
    if result.returncode:
        raise OSError(f"{' '.join(argv)} failed: {(result.stderr or result.stdout).strip()}")
    return result.stdout
