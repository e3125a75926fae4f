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
    "passed",
    "queued",
    "throttled",
    "stolen",
    "faults",
    "swapped",
    "read",
    "disk",
    "hot",
    "sent",
    "sending",
    "resent",
    "here",
    "there",
)
"""Since the last time, in seconds where nothing else is said.

``passed``: by the clock; ``queued``: its busiest thread could have run, but other threads had the
CPUs; ``throttled``: its control group had used up its quota; ``stolen``: the host's CPUs, together,
were taken by its hypervisor; ``faults``: pages that had to be read from a disk; ``swapped``: bytes
of the process that are in swap now; ``read``: bytes that it read from disks; ``disk``: something on
the host waited for a disk; ``hot``: a CPU was slowed down because of its heat; ``sent``: bytes on
its busiest connection; ``sending``: these bytes were on their way; ``resent``: bytes of them that
were sent again; ``here`` and ``there``: numbers that stand for the addresses of its two ends.
"""

_REFRESH = 20  # readings after which threads and connections are looked for again
_OFTEN = 2  # first readings after each of which they are: the first bytes go other ways
_BUSIEST = 8  # connections that are read: those on which most was sent since the last such time
_DEAR = 6e-4  # seconds: a file that takes longer to read is left alone
_TCP_INFO, _TCP_INFO_BYTES = 11, 232
_BYTES_ACKED, _BUSY, _WINDOW, _RESENT = 120, 168, 176, 208  # places in the kernel's tcp_info


class Vitals:
    """Of this process.

    Args:
        root: Of the file system; another one for tests.
        threads: How many threads compute.
    """

    def __init__(self, root: Path = Path("/"), threads: int = 1) -> None:
        self._root, self._threads = root, max(1, threads)
        self._files: dict[str, _File] = {}
        self._quota = [self._file(path) for path in _quota_files(root)]
        cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        heat = "sys/devices/system/cpu/cpu{}/thermal_throttle/core_throttle_total_time_ms"
        self._heat = [self._file(heat.format(cpu)) for cpu in cpus[:2]]
        self._tasks: list[_File] = []
        self._sockets: list[int] = []
        self._looks = 0
        self._before: dict[str, float] = {}
        self._links: dict[int, tuple[float, ...]] = {}
        self._sent: dict[int, float] = {}  # by connection, when they were last looked for
        self.read()

    def _file(self, path: str) -> _File:
        if path not in self._files:
            self._files[path] = _File(self._root / path)
        return self._files[path]

    def read(self) -> list[float]:
        """One number for each of :data:`VITALS`, since the last call."""
        if self._looks % _REFRESH == 0 or self._looks <= _OFTEN:
            self._refresh()
        self._looks += 1
        now = {
            "passed": time.perf_counter(),
            "throttled": _most(_throttled(file.text()) for file in self._quota),
            "stolen": _stolen(self._file("proc/stat").text()),
            "faults": float(resource.getrusage(resource.RUSAGE_SELF).ru_majflt),
            "read": _named(self._file("proc/self/io").text(), "read_bytes:"),
            "disk": _pressure(self._file("proc/pressure/io").text()),
            "hot": _most(_number(file.text()) / 1e3 for file in self._heat),
        }
        found = {name: one - self._before.get(name, math.nan) for name, one in now.items()}
        self._before = now
        found["queued"] = self._queued()
        found["swapped"] = 0.0
        if found["faults"] > 0:  # otherwise it does not matter
            found["swapped"] = 1024 * _named(self._file("proc/self/status").text(), "VmSwap:")
        found |= self._link()
        return [found.get(name, math.nan) for name in VITALS]

    def _refresh(self) -> None:
        """The threads that have computed most, and the connections."""
        path = "proc/self/schedstat"
        self._tasks = [self._file(path)]
        if self._threads > 1:
            with contextlib.suppress(OSError):
                tasks = sorted((self._root / "proc/self/task").iterdir())[:128]
                files = [_File(task / "schedstat") for task in tasks]
                files.sort(key=lambda file: -_number(file.text()))
                self._tasks += files[: self._threads]
        sent = _connections()
        busiest = sorted(sent, key=lambda one: -_more(sent[one], self._sent.get(one, 0.0)))
        if 0 < self._looks <= _OFTEN:  # all that a new one has sent was sent since the last reading
            new = sent.keys() - self._sent.keys()
            self._links |= dict.fromkeys(new, (0.0, 0.0, 0.0))
        self._sockets, self._sent = busiest[:_BUSIEST], sent

    def _queued(self) -> float:
        """The most of its computing threads."""
        found = []
        for file in self._tasks:
            words = file.text().split()
            since = float(words[1]) / 1e9 if len(words) > 1 else math.nan
            found.append(since - file.before)
            file.before = since
        return _most(found)

    def _link(self) -> dict[str, float]:
        """Of the connection on which most was sent."""
        best, name = (0.0, math.nan, math.nan), -1
        for descriptor in self._sockets:
            now = _tcp(descriptor)
            if now is None:
                continue
            before, self._links[descriptor] = self._links.get(descriptor), now
            if before is None or now[0] < before[0]:
                continue
            since = tuple(a - b for a, b in zip(now, before, strict=True))
            if since[0] > best[0]:
                best, name = (since[0], since[1], since[2]), descriptor
        if name < 0:
            return {}
        here, there = _ends(name)
        sent, sending, resent = best
        return {"sent": sent, "sending": sending, "resent": resent, "here": here, "there": there}


class _File:
    """A file of the kernel, kept open: read again from its beginning, it is new."""

    def __init__(self, path: Path) -> None:
        self.before = math.nan
        self._descriptor = -1
        with contextlib.suppress(OSError):
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._descriptor)
            begun = time.perf_counter()
            self.text(), self.text()
            if time.perf_counter() - begun > 2 * _DEAR:
                self._descriptor = -1

    def text(self) -> str:
        """Its beginning; nothing when there is no such file."""
        if self._descriptor < 0:
            return ""
        try:
            return os.pread(self._descriptor, 2048, 0).decode(errors="replace")
        except OSError:
            return ""


def _quota_files(root: Path) -> list[str]:
    """``cpu.stat`` of this process's control group and of all around it, of either version."""
    found = []
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            tops = [controllers, "cpu", "cpu,cpuacct"] if controllers else ["", "unified"]
            for top in tops:
                parts = [part for part in path.split("/") if part not in ("", "..")]
                for depth in range(len(parts), -1, -1):
                    where = "/".join(["sys/fs/cgroup", *([top] if top else []), *parts[:depth]])
                    name = f"{where}/cpu.stat"
                    if name not in found and (root / name).is_file():
                        found.append(name)
    return found[:8]


def _throttled(text: str) -> float:
    """Seconds; version 2 has microseconds, version 1 nanoseconds."""
    micro = _named(text, "throttled_usec") / 1e6
    return _named(text, "throttled_time") / 1e9 if math.isnan(micro) else micro


def _stolen(text: str) -> float:
    words = text.split("\n", 1)[0].split()
    return float(words[8]) / os.sysconf("SC_CLK_TCK") if len(words) > 8 else math.nan


def _pressure(text: str) -> float:
    """Seconds in which some task waited."""
    first = text.split("\n", 1)[0]
    return _number(first.rpartition("total=")[2]) / 1e6 if first.startswith("some") else math.nan


def _named(text: str, name: str) -> float:
    """The number behind a name."""
    start = text.find(name)
    return math.nan if start < 0 else _number(text[start + len(name) : start + len(name) + 40])


def _number(text: str) -> float:
    word = text.split(None, 1)[:1]
    return float(word[0]) if word and word[0].isdecimal() else math.nan


def _most(numbers: Iterable[float]) -> float:
    known = [one for one in numbers if not math.isnan(one)]
    return max(known, default=math.nan)


# -- connections ---------------------------------------------------------------------------


def _connections() -> dict[int, float]:
    """Bytes that have arrived on each TCP connection of this process, by descriptor."""
    found = {}
    with contextlib.suppress(OSError):
        for path in sorted(Path("/proc/self/fd").iterdir())[:1024]:
            descriptor = int(path.name)
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(os.fstat(descriptor).st_mode) and (one := _tcp(descriptor)):
                    found[descriptor] = one[0]
    return found


def _more(now: float, before: float) -> float:
    """Than before; all of it, where this descriptor was another connection's."""
    return now - before if now >= before else now


def _tcp(descriptor: int) -> tuple[float, float, float] | None:
    """Of a connection: bytes that have arrived, seconds with bytes on their way, bytes sent again.

    What the receiver had no room for was not on its way.
    """
    content, length = ctypes.create_string_buffer(_TCP_INFO_BYTES), ctypes.c_uint(_TCP_INFO_BYTES)
    asked = _getsockopt(descriptor, socket.IPPROTO_TCP, _TCP_INFO, content, ctypes.byref(length))
    if asked != 0 or length.value < _RESENT + 8 or content.raw[0] != 1:  # established
        return None

    def at(place: int) -> int:
        return int(struct.unpack_from("=Q", content.raw, place)[0])

    return float(at(_BYTES_ACKED)), (at(_BUSY) - at(_WINDOW)) / 1e6, float(at(_RESENT))


def _library() -> Callable[..., int]:
    try:
        return ctypes.CDLL(None).getsockopt
    except (OSError, AttributeError, TypeError):
        return lambda *_: -1


_getsockopt = _library()


def _ends(descriptor: int) -> tuple[float, float]:
    """Numbers for the addresses of both ends."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as one:
            ends = one.getsockname()[0], one.getpeername()[0]
    except OSError:
        return math.nan, math.nan
    here, there = (float(zlib.crc32(end.encode())) for end in ends)
    return here, there
