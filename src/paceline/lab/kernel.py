"""System calls that the standard library lacks on Python 3.10."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18

_PR_SET_PDEATHSIG = 1
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_RAISE = 2
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_CAPABILITY_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, call: str) -> int:
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")
    return result


def unshare(flags: int) -> None:
    """Moves the calling process into new namespaces; for a PID namespace, its children."""
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def setns(fd: int, kind: int = 0) -> None:
    """Enters the namespace behind ``fd``; ``kind`` is its CLONE_ flag or 0 for any."""
    _check(_libc.setns(ctypes.c_int(fd), ctypes.c_int(kind)), "setns")


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    """mount(2); raises OSError that names the target."""
    result = _libc.mount(
        source.encode(),
        target.encode(),
        kind.encode() or None,
        ctypes.c_ulong(flags),
        data.encode() or None,
    )
    _check(result, f"mount {kind or 'bind'} on {target}")


def set_host_name(name: str) -> None:
    raw = name.encode()
    _check(_libc.sethostname(raw, ctypes.c_size_t(len(raw))), "sethostname")


def die_with_parent() -> None:
    """Requests SIGKILL when the parent ends; a change of credentials cancels that."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def enter_user_namespace() -> None:
    """Enters a user namespace in which the caller keeps its ids and has every capability."""
    uid, gid = os.geteuid(), os.getegid()
    unshare(CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def preserve_capabilities() -> None:
    """Passes capabilities on to programs (ip, tc, iptables) that an ordinary user executes."""
    last_capability = int(Path("/proc/sys/kernel/cap_last_cap").read_text())
    _make_inheritable()
    for capability in range(last_capability + 1):
        _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, capability)


def drop_ambient_capabilities() -> None:
    """Undoes :func:`preserve_capabilities`, for what the caller executes next."""
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)


def _make_inheritable() -> None:
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; low half, then high half
    _check(_libc.capget(header, sets), "capget")
    sets[2], sets[5] = sets[1], sets[4]
    _check(_libc.capset(header, sets), "capset")


def _prctl(option: int, first: int = 0, second: int = 0) -> None:
    arguments = [ctypes.c_ulong(value) for value in (first, second, 0, 0)]
    _check(_libc.prctl(ctypes.c_int(option), *arguments), f"prctl {option}")
