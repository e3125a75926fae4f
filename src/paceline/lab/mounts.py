"""What a host mounts: decided as a list (pure), then done."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from paceline.lab import kernel
from paceline.lab.layout import MARKER, Layout
from paceline.lab.options import HostPlan, LabPlan, PrivateFolder
from paceline.lab.texts import home_inside

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
        Mount("bind", home_inside(plan), str(layout.home(host.name))),
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


def apply(mounts: Iterable[Mount]) -> None:
    """Does the steps in the calling process's mount namespace. Raises OSError."""
    steps = list(mounts)
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    sources = _open_sources(steps)
    for step in steps:
        if not (step.optional and not Path(step.target).exists()):
            _do(step, sources)
    for fd in sources.values():
        os.close(fd)


def _open_sources(steps: Iterable[Mount]) -> dict[str, int]:
    """Handles on everything to be shown elsewhere, from before anything covers it."""
    paths = {step.source for step in steps if step.kind in ("bind", "overlay")}
    return {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in paths}


def _do(step: Mount, sources: dict[str, int]) -> None:
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
