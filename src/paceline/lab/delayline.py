"""A cable with a delay, for kernels without ``netem``: two TAP devices and a forwarder.

What the host sends waits; what it receives does not, so the delay between any two hosts is
counted once each way. Frames keep the kernel's offload header and may be 64 KiB large, which
lets one process carry some Gbit/s.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import time
from collections import deque
from collections.abc import Iterator
from typing import NoReturn

from paceline.lab import kernel
from paceline.spec.errors import LabError

_TUNSETIFF = 0x400454CA
_TUNSETOFFLOAD = 0x400454D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_OFFLOADS = 0x01 | 0x02 | 0x04 | 0x08  # checksums, TSO over IPv4 and IPv6, ECN
_LARGEST = 65536 + 64
_QUEUE = 64 << 20  # bytes in flight on one cable: 10 Gbit/s for 50 ms


def lay(switch_end: str, host_end: str, host_network: int, delay: float) -> int:
    """Lays a cable between the calling process's network and a host's.

    Args:
        switch_end, host_end: Names of the interfaces to make.
        host_network: Descriptor of the host's network namespace.
        delay: Seconds that frames from the host wait.

    Returns:
        Process id of the forwarder. The interfaces live as long as it does.

    Raises:
        LabError: This machine has no TAP devices for us.
    """
    near = _tap(switch_end)
    with _network(host_network):
        far = _tap(host_end)
    forwarder = os.fork()
    if forwarder == 0:
        _forward_for_ever(near, far, delay)
    os.close(near)
    os.close(far)
    return forwarder


def _tap(name: str) -> int:
    try:
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise LabError(
            "--latency needs netem in the kernel or TAP devices",
            found=f"no netem here, and /dev/net/tun cannot be opened: {error.strerror}",
            remedy="run it as root, or give --latency up",
        ) from None
    flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    fcntl.ioctl(fd, _TUNSETOFFLOAD, _OFFLOADS)
    return fd


@contextlib.contextmanager
def _network(other: int) -> Iterator[None]:
    own = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    kernel.setns(other, kernel.CLONE_NEWNET)
    try:
        yield
    finally:
        kernel.setns(own, kernel.CLONE_NEWNET)
        os.close(own)


def _forward_for_ever(near: int, far: int, delay: float) -> NoReturn:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # goodbyes must still get through
    os.closerange(3, min(near, far))
    os.closerange(max(near, far) + 1, 4096)
    with contextlib.suppress(OSError):  # one end is gone: the host has ended
        Line(near, far, delay).run()
    os._exit(0)


class Line:
    """Moves frames between two descriptors; those from ``far`` arrive ``delay`` seconds later."""

    def __init__(self, near: int, far: int, delay: float) -> None:
        self._near, self._far, self._delay = near, far, delay
        self._waiting: deque[tuple[float, bytes]] = deque()
        self._held = 0

    def run(self) -> NoReturn:
        """Raises OSError when an end is gone."""
        ends = (self._near, self._far)
        while True:
            for fd in select.select(ends, (), (), self._patience())[0]:
                if fd == self._near:
                    _pass_on(self._near, self._far)
                else:
                    self._take_in()
            self._let_out(time.monotonic())

    def _patience(self) -> float | None:
        """Seconds until the next frame is due."""
        if not self._waiting:
            return None
        return max(0.0, self._waiting[0][0] - time.monotonic())

    def _take_in(self) -> None:
        due = time.monotonic() + self._delay
        for frame in _frames(self._far):
            if self._held < _QUEUE:  # a full cable drops, as a full queue anywhere does
                self._waiting.append((due, frame))
                self._held += len(frame)

    def _let_out(self, now: float) -> None:
        while self._waiting and self._waiting[0][0] <= now:
            frame = self._waiting.popleft()[1]
            self._held -= len(frame)
            _send(self._near, frame)


def _pass_on(source: int, target: int) -> None:
    for frame in _frames(source):
        _send(target, frame)


def _frames(fd: int) -> Iterator[bytes]:
    """What can be read at once, but no more than a handful: the other direction waits."""
    for _ in range(32):
        try:
            yield os.read(fd, _LARGEST)
        except BlockingIOError:
            return


def _send(fd: int, frame: bytes) -> None:
    # EIO: the interface is down; EAGAIN: its queue is full. Both lose frames on real cables too.
    with contextlib.suppress(BlockingIOError, InterruptedError):
        try:
            os.write(fd, frame)
        except OSError as error:
            if error.errno != 5:
                raise
