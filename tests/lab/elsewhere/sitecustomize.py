"""Removes what only Linux has from this Python, and names the system Darwin.

Only the ``paceline`` of ``test_launching_elsewhere.py`` has this module on its PYTHONPATH.
Processes that it starts (ssh, the lab's hosts) are unchanged.
"""

import contextlib
import ctypes
import os
import sys

_PROC = os.environ.get("TEST_PROC")  # path to this machine's real /proc; /proc itself is empty
_OF_LINUX = {
    "os": ("pidfd_open memfd_create eventfd eventfd_read eventfd_write sched_getaffinity "
           "sched_setaffinity unshare setns splice copy_file_range posix_fadvise getrandom "
           "sched_getscheduler sched_setscheduler O_TMPFILE O_PATH P_PIDFD O_DIRECT "
           "getxattr setxattr listxattr posix_fallocate prlimit pipe2 "
           "get_exec_path_cloexec waitid_pidfd sync_file_range"),
    "socket": ("AF_NETLINK AF_PACKET AF_VSOCK AF_ALG SOCK_CLOEXEC SOCK_NONBLOCK SO_PEERCRED "
               "SO_BINDTODEVICE SO_DOMAIN SO_PROTOCOL TCP_USER_TIMEOUT TCP_QUICKACK "
               "MSG_NOSIGNAL MSG_CMSG_CLOEXEC SO_MARK SO_PRIORITY"),
    "signal": "pidfd_send_signal sigtimedwait sigwaitinfo SIGSTKFLT SIGPWR SIGPOLL SIGRTMIN",
    "select": "epoll EPOLLIN EPOLLOUT EPOLLERR EPOLLHUP",
    "resource": "prlimit RLIMIT_MSGQUEUE RLIMIT_NICE RLIMIT_RTPRIO RLIMIT_SIGPENDING",
    "fcntl": "F_OFD_GETLK F_OFD_SETLK F_OFD_SETLKW F_SETPIPE_SZ F_ADD_SEALS F_NOTIFY",
    "time": "CLOCK_BOOTTIME CLOCK_TAI",
}  # fmt: skip
_SYMBOLS = {"prctl", "unshare", "setns", "mount", "umount2", "syscall", "signalfd", "inotify_init"}


def _take_away(module: str) -> None:
    for holder in (module, f"_{module}", "posix"):
        with contextlib.suppress(ImportError):
            held = __import__(holder)
            for name in _OF_LINUX[module].split():
                held.__dict__.pop(name, None)


def _without_symbols(library: ctypes.CDLL, name: str) -> object:
    if name in _SYMBOLS:
        raise AttributeError(f"dlsym({name}): symbol not found")
    return _getattr(library, name)


_getattr = ctypes.CDLL.__getattr__

if _PROC and "paceline" in sys.orig_argv:
    _take_away("select")  # before any module chooses an I/O multiplexer

    import platform

    import psutil  # must see the real kernel; psutil has its own code for each system

    psutil.PROCFS_PATH = _PROC
    for _module in _OF_LINUX:
        _take_away(_module)
    ctypes.CDLL.__getattr__ = _without_symbols  # type: ignore[method-assign]
    sys.platform = "darwin"
    _kernel = os.uname_result(("Darwin", os.uname().nodename, "24.0", "Darwin", "arm64"))
    os.uname = lambda: _kernel
    platform.system = lambda: "Darwin"
