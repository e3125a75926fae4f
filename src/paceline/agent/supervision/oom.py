"""Reads the traces of the kernel's OOM killer, which show whether it killed a rank.

Limits and counters of this process's control group (version 1 and 2) and of its parents, and the
kernel log where it may be read. Formats: cgroups(7), kernel's admin-guide/cgroup-v2, printk.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

from .processes import read_text

ROOT = Path("/sys/fs/cgroup")
MIN_UNLIMITED_BYTES = 1 << 60
RECENT_S = 10.0
KILL_RECORD = re.compile(r"Killed process (\d+) \(([^)]*)\)|oom-kill:|oom_reaper")


def group_folders() -> Iterator[Path]:
    """Returns the folders of the memory control group and its parents, nearest first."""
    for line in read_text("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            base = ROOT / "memory"
        elif not controllers and (ROOT / "cgroup.controllers").exists():
            base = ROOT
        else:
            continue
        folder = base / path.lstrip("/")
        while folder == base or base in folder.parents:
            if folder.is_dir():
                yield folder
            folder = folder.parent


def count_kills() -> Optional[int]:
    """Counts kills for memory in this control group and its parents; ``None`` if unknown."""
    kills = []
    for folder in group_folders():
        for name in ("memory.events", "memory.oom_control"):
            match = re.search(r"^oom_kill (\d+)", read_text(folder / name), re.MULTILINE)
            if match:
                kills.append(int(match.group(1)))
    return sum(kills) if kills else None


def tightest_limit() -> Optional[Dict[str, Any]]:
    """Returns the smallest memory limit: ``bytes``, ``peak`` (bytes or ``None``), ``group``."""
    limits = []
    for folder in group_folders():
        max_bytes = _number(folder, "memory.max", "memory.limit_in_bytes")
        if max_bytes is not None and max_bytes < MIN_UNLIMITED_BYTES:
            peak = _number(folder, "memory.peak", "memory.max_usage_in_bytes")
            limits.append({"bytes": max_bytes, "peak": peak, "group": str(folder)})
    return min(limits, key=lambda limit: int(limit["bytes"] or 0), default=None)


def _number(folder: Path, *names: str) -> Optional[int]:
    for name in names:
        text = read_text(folder / name).strip()
        if text.isdigit():
            return int(text)
    return None


def kernel_lines(start_s: float) -> List[str]:
    """Returns lines of the kernel log about killed processes since a time (seconds since boot).

    The list is empty if the log cannot be read.
    """
    lines: List[str] = []
    with contextlib.suppress(OSError):
        fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
        try:
            while True:
                record = os.read(fd, 8192).decode(errors="replace")
                lines += _oom_lines(record, start_s)
        except (BlockingIOError, BrokenPipeError):
            pass
        finally:
            os.close(fd)
    return lines[-5:]


def _oom_lines(record: str, start_s: float) -> List[str]:
    """``6,1234,5678901,-;text``: priority, number, microseconds since boot."""
    head, _, text = record.partition(";")
    fields = head.split(",")
    if len(fields) < 3 or not fields[2].isdigit() or int(fields[2]) / 1e6 < start_s:
        return []
    line = text.splitlines()[0] if text else ""
    return [line] if KILL_RECORD.search(line) else []


def evidence(count_before: Optional[int]) -> Dict[str, Any]:
    """Returns what is known just after a rank was killed, and kills since ``count_before``."""
    count = count_kills()
    num_kills = None if count is None or count_before is None else count - count_before
    recent = kernel_lines(time.clock_gettime(time.CLOCK_BOOTTIME) - RECENT_S)
    return {"kills": num_kills, "limit": tightest_limit(), "kernel": recent}
