"""What a rank can see of its own process and host that may make it slow: cheap, and now and then.

Everything is a counter of the kernel, read as a difference from the last time. What a kernel,
container or machine does not tell is NaN.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import resource
import socket
import stat
import struct
import time
import weakref
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

VITALS = (
    "passed", "queued", "throttled", "stolen", "faults", "swapped", "read", "disk", "hot",
    "sent", "sending", "resent", "here", "there",
)  # fmt: skip
"""Since the last time, in seconds where nothing else is said.

``passed``: by the clock; ``queued``: its busiest thread could have run, but other threads had the
CPUs; ``throttled``: its control group had used up its quota; ``stolen``: the host's CPUs, together,
were taken by its hypervisor; ``faults``: pages that had to be read from a disk; ``swapped``: bytes
of the process that are in swap now; ``read``: bytes that it read from disks; ``disk``: something on
the host waited for a disk; ``hot``: a CPU was slowed down because of its heat; ``sent``: bytes on
its busiest connection; ``sending``: these bytes were on their way; ``resent``: bytes of them that
were sent again; ``here`` and ``there``: numbers that stand for the addresses of its two ends.
"""

_REFRESH_INTERVAL = 20  # readings after which threads and connections are looked for again
_INITIAL_REFRESHES = 2  # first readings after each of which they are: the first bytes go other ways
_MAX_CONNECTIONS = 8  # that are read: those on which most was sent since the last such time
_MAX_READ_S = 6e-4  # seconds: a file that takes longer to read is left alone
_TCP_INFO, _TCP_INFO_BYTES = 11, 232
_BYTES_ACKED, _BUSY, _WINDOW, _RESENT = 120, 168, 176, 208  # places in the kernel's tcp_info


class Vitals:
    """Reads counters of this process and host."""

    def __init__(self, root: Path = Path("/"), threads: int = 1) -> None:
        self._root, self._threads = root, max(1, threads)
        self._files: dict[str, _File] = {}
        self._quota = [self._file(path) for path in _quota_files(root)]
        cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        heat = "sys/devices/system/cpu/cpu{}/thermal_throttle/core_throttle_total_time_ms"
        self._heat = [self._file(heat.format(cpu)) for cpu in cpus[:2]]
        self._tasks: list[_File] = []
        self._sockets: list[int] = []
        self._num_reads = 0
        self._former_counters: dict[str, float] = {}
        self._links: dict[int, tuple[float, ...]] = {}
        self._sent: dict[int, float] = {}  # by connection, when they were last looked for
        self.read()

    def _file(self, path: str) -> _File:
        if path not in self._files:
            self._files[path] = _File(self._root / path)
        return self._files[path]

    def read(self) -> list[float]:
        """Returns one number for each of :data:`VITALS`, since the last call."""
        if self._num_reads % _REFRESH_INTERVAL == 0 or self._num_reads <= _INITIAL_REFRESHES:
            self._refresh()
        self._num_reads += 1
        counters = {
            "passed": time.perf_counter(),
            "throttled": _max_or_nan(_throttled(file.text()) for file in self._quota),
            "stolen": _stolen(self._file("proc/stat").text()),
            "faults": float(resource.getrusage(resource.RUSAGE_SELF).ru_majflt),
            "read": _value_of(self._file("proc/self/io").text(), "read_bytes:"),
            "disk": _pressure(self._file("proc/pressure/io").text()),
            "hot": _max_or_nan(_number(file.text()) / 1e3 for file in self._heat),
        }
        vitals = {
            name: value - self._former_counters.get(name, math.nan)
            for name, value in counters.items()
        }
        self._former_counters = counters
        vitals["queued"] = self._queued()
        vitals["swapped"] = 0.0
        if vitals["faults"] > 0:  # otherwise it does not matter
            vitals["swapped"] = 1024 * _value_of(self._file("proc/self/status").text(), "VmSwap:")
        vitals |= self._link()
        return [vitals.get(name, math.nan) for name in VITALS]

    def _refresh(self) -> None:
        path = "proc/self/schedstat"
        self._tasks = [self._file(path)]
        if self._threads > 1:
            with contextlib.suppress(OSError):
                tasks = sorted((self._root / "proc/self/task").iterdir())[:128]
                files = [_File(task / "schedstat") for task in tasks]
                files.sort(key=lambda file: -_number(file.text()))
                self._tasks += files[: self._threads]
        sent_bytes = _connections()
        increases = {fd: _increase(n, self._sent.get(fd, 0.0)) for fd, n in sent_bytes.items()}
        busiest = sorted(increases, key=lambda descriptor: -increases[descriptor])
        # All that a new connection has sent was sent since the last reading.
        if 0 < self._num_reads <= _INITIAL_REFRESHES:
            new_connections = sent_bytes.keys() - self._sent.keys()
            self._links |= dict.fromkeys(new_connections, (0.0, 0.0, 0.0))
        self._sockets, self._sent = busiest[:_MAX_CONNECTIONS], sent_bytes

    def _queued(self) -> float:
        queued_s = []
        for file in self._tasks:
            fields = file.text().split()
            total_s = float(fields[1]) / 1e9 if len(fields) > 1 else math.nan
            queued_s.append(total_s - file.former)
            file.former = total_s
        return _max_or_nan(queued_s)

    def _link(self) -> dict[str, float]:
        largest, busiest = (0.0, math.nan, math.nan), -1
        for descriptor in self._sockets:
            counters = _tcp(descriptor)
            if counters is None:
                continue
            former, self._links[descriptor] = self._links.get(descriptor), counters
            if former is None or counters[0] < former[0]:
                continue
            increases = tuple(a - b for a, b in zip(counters, former, strict=True))
            if increases[0] > largest[0]:
                largest, busiest = (increases[0], increases[1], increases[2]), descriptor
        if busiest < 0:
            return {}
        sender, receiver = _address_numbers(busiest)
        names = ("sent", "sending", "resent", "here", "there")
        return dict(zip(names, (*largest, sender, receiver), strict=True))


class _File:
    """A kernel file kept open; each read from its beginning is fresh."""

    def __init__(self, path: Path) -> None:
        self.former = math.nan
        self._descriptor = -1
        with contextlib.suppress(OSError):
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._descriptor)
            start = time.perf_counter()
            self.text(), self.text()
            if time.perf_counter() - start > 2 * _MAX_READ_S:
                self._descriptor = -1

    def text(self) -> str:
        if self._descriptor < 0:
            return ""
        try:
            return os.pread(self._descriptor, 2048, 0).decode(errors="replace")
        except OSError:
            return ""


def _quota_files(root: Path) -> list[str]:
    """``cpu.stat`` of this process's control group and of all around it, of either version."""
    paths = []
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            tops = [controllers, "cpu", "cpu,cpuacct"] if controllers else ["", "unified"]
            parts = [part for part in path.split("/") if part not in ("", "..")]
            for top in tops:
                for depth in range(len(parts), -1, -1):
                    folder = "/".join(["sys/fs/cgroup", *([top] if top else []), *parts[:depth]])
                    name = f"{folder}/cpu.stat"
                    if name not in paths and (root / name).is_file():
                        paths.append(name)
    return paths[:8]


def _throttled(text: str) -> float:
    """Returns throttled seconds; version 2 has microseconds, version 1 nanoseconds."""
    micro = _value_of(text, "throttled_usec") / 1e6
    return _value_of(text, "throttled_time") / 1e9 if math.isnan(micro) else micro


def _stolen(text: str) -> float:
    fields = text.split("\n", 1)[0].split()
    return float(fields[8]) / os.sysconf("SC_CLK_TCK") if len(fields) > 8 else math.nan


def _pressure(text: str) -> float:
    first = text.split("\n", 1)[0]
    return _number(first.rpartition("total=")[2]) / 1e6 if first.startswith("some") else math.nan


def _value_of(text: str, name: str) -> float:
    start = text.find(name)
    return math.nan if start < 0 else _number(text[start + len(name) : start + len(name) + 40])


def _number(text: str) -> float:
    field = text.split(None, 1)[:1]
    return float(field[0]) if field and field[0].isdecimal() else math.nan


def _max_or_nan(numbers: Iterable[float]) -> float:
    values = [value for value in numbers if not math.isnan(value)]
    return max(values, default=math.nan)


def _connections() -> dict[int, float]:
    """Returns bytes acknowledged on each TCP connection of this process, by descriptor."""
    sent_bytes = {}
    with contextlib.suppress(OSError):
        for path in sorted(Path("/proc/self/fd").iterdir())[:1024]:
            descriptor = int(path.name)
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(os.fstat(descriptor).st_mode) and (counters := _tcp(descriptor)):
                    sent_bytes[descriptor] = counters[0]
    return sent_bytes


def _increase(current: float, former: float) -> float:
    """Returns the increase; all of it if the descriptor was another connection's."""
    return current - former if current >= former else current


def _tcp(descriptor: int) -> tuple[float, float, float] | None:
    """Returns bytes acknowledged, seconds in flight and bytes sent again of a connection."""
    content, length = ctypes.create_string_buffer(_TCP_INFO_BYTES), ctypes.c_uint(_TCP_INFO_BYTES)
    status = _getsockopt(descriptor, socket.IPPROTO_TCP, _TCP_INFO, content, ctypes.byref(length))
    if status != 0 or length.value < _RESENT + 8 or content.raw[0] != 1:  # established
        return None

    def at(place: int) -> int:
        return int(struct.unpack_from("=Q", content.raw, place)[0])

    seconds = (at(_BUSY) - at(_WINDOW)) / 1e6  # without those in which the receiver had no room
    return float(at(_BYTES_ACKED)), seconds, float(at(_RESENT))


def _library() -> Callable[..., int]:
    try:
        return ctypes.CDLL(None).getsockopt
    except (OSError, AttributeError, TypeError):
        return lambda *_: -1


_getsockopt = _library()


def _address_numbers(descriptor: int) -> tuple[float, float]:
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            addresses = connection.getsockname()[0], connection.getpeername()[0]
    except OSError:
        return math.nan, math.nan
    sender, receiver = (float(zlib.crc32(end.encode())) for end in addresses)
    return sender, receiver
