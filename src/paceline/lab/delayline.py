"""A link with a delay, for kernels without ``netem``: two TAP devices and a forwarder process.

Only frames that the host sends are delayed, so each direction between two hosts has the delay once.
Frames keep the kernel's offload header and may have 64 KiB, so that one process carries some
Gbit/s.
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
_MAX_FRAME_BYTES = 65536 + 64
_MAX_QUEUE_BYTES = 64 << 20  # bytes in flight on one cable: 10 Gbit/s for 50 ms


def lay_cable(switch_end: str, host_end: str, host_network: int, delay: float) -> int:
    """Connects the calling process's network with a host's by two new interfaces.

    Args:
        host_network: Descriptor of the host's network namespace.
        delay: Of frames from the host, in seconds.

    Returns:
        Process id of the forwarder. The interfaces exist as long as it runs.

    Raises:
        LabError: This process may not open TAP devices.
    """
    switch_tap = _tap(switch_end)
    with _network(host_network):
        host_tap = _tap(host_end)
    forwarder = os.fork()
    if forwarder == 0:
        _run_forwarder(switch_tap, host_tap, delay)
    os.close(switch_tap)
    os.close(host_tap)
    return forwarder


def _tap(name: str) -> int:
    try:
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise LabError(
            "--latency needs netem in the kernel or TAP devices",
            found=f"no netem here, and /dev/net/tun cannot be opened: {error.strerror}",
            remedy="run it as root, or leave out --latency",
        ) from None
    flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    fcntl.ioctl(fd, _TUNSETOFFLOAD, _OFFLOADS)
    return fd


@contextlib.contextmanager
def _network(network: int) -> Iterator[None]:
    original = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    kernel.setns(network, kernel.CLONE_NEWNET)
    try:
        yield
    finally:
        kernel.setns(original, kernel.CLONE_NEWNET)
        os.close(original)


def _run_forwarder(switch_tap: int, host_tap: int, delay: float) -> NoReturn:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # until the last FIN is forwarded
    os.closerange(3, min(switch_tap, host_tap))
    os.closerange(max(switch_tap, host_tap) + 1, 4096)
    with contextlib.suppress(OSError):  # one interface is gone, because the host has ended
        DelayLine(switch_tap, host_tap, delay).run()
    os._exit(0)


class DelayLine:
    """Forwards frames between two TAP devices; those from the host are delayed."""

    def __init__(self, switch_tap: int, host_tap: int, delay: float) -> None:
        self._switch_tap, self._host_tap, self._delay = switch_tap, host_tap, delay
        self._waiting: deque[tuple[float, bytes]] = deque()
        self._queued_bytes = 0

    def run(self) -> NoReturn:
        """Raises OSError when an interface is gone."""
        ends = (self._switch_tap, self._host_tap)
        while True:
            timeout = None
            if self._waiting:  # until the next frame is due
                timeout = max(0.0, self._waiting[0][0] - time.monotonic())
            ready = select.select(ends, (), (), timeout)[0]
            if self._switch_tap in ready:
                for frame in _frames(self._switch_tap):
                    _send(self._host_tap, frame)
            if self._host_tap in ready:
                self._enqueue()
            self._dequeue(time.monotonic())

    def _enqueue(self) -> None:
        deadline = time.monotonic() + self._delay
        for frame in _frames(self._host_tap):
            if self._queued_bytes < _MAX_QUEUE_BYTES:  # else it is dropped, as by any full queue
                self._waiting.append((deadline, frame))
                self._queued_bytes += len(frame)

    def _dequeue(self, time_s: float) -> None:
        while self._waiting and self._waiting[0][0] <= time_s:
            frame = self._waiting.popleft()[1]
            self._queued_bytes -= len(frame)
            _send(self._switch_tap, frame)


def _frames(fd: int) -> Iterator[bytes]:
    """Reads available frames, at most 32, so that the other direction is served, too."""
    for _ in range(32):
        try:
            yield os.read(fd, _MAX_FRAME_BYTES)
        except BlockingIOError:
            return


def _send(fd: int, frame: bytes) -> None:
    # EIO: the interface is down; EAGAIN: its queue is full. Real links lose frames then, too.
    with contextlib.suppress(BlockingIOError, InterruptedError):
        try:
            os.write(fd, frame)
        except OSError as error:
            if error.errno != 5:
                raise
