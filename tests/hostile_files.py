"""Creates hostile run directories and logs from seeds, so that each can be created again.

``python tests/hostile_files.py FIRST COUNT`` tries COUNT seeds with every command that reads run
directories and prints tracebacks, slow cases, and the peak memory.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.spec import rundir as names

TITLE = "\x1b]0;owned\x07"
CLIPBOARD = "\x1b]52;c;ZWNobyBvd25lZA==\x07"
TEXTS = [
    "", " ", "n1", "../../etc", "/", "a" * 5000, "\x00", "\ud800", "\u202egnp.exe", "\x9b31m",
    TITLE, CLIPBOARD, "\x1b[2J\x1b[H", "%s%n{0}{x}", "é" * 300, "\r\n", "-1", "1e999", "{where}",
    "ssh: " * 400, "Permission denied (" * 200, "0" * 4000,
]  # fmt: skip
NUMBERS = [0, -1, 1, 7, 9, 64, 999, 2**31, 2**63, -(2**63), 2**64, 10**4000, 0.5, 1e308, 1e-320,
           float("inf"), float("-inf"), float("nan")]  # fmt: skip

EVENTS: list[dict[str, Any]] = [
    {"time": 1.0, "event": "connected", "hosts": ["n1", "n2"]},
    {"time": 2.0, "host": "n1", "rank": 0, "event": "rank started", "pid": 12},
    {"time": 3.0, "host": "n2", "rank": 1, "event": "rank ended", "code": None, "signal": 9,
     "peak_bytes": 5, "memory": {"kills": 1, "limit": {"bytes": 5, "group": "/a"}, "kernel": ["x"]},
     "seen": {"state": "T", "stack": ['File "/a/b.py", line 3 in main']}},
    {"time": 4.0, "host": "n1", "rank": 0, "event": "rank ended", "code": 1, "signal": None},
]  # fmt: skip
FILES: dict[str, Any] = {
    names.RESULT: {
        "run_id": "ab", "exit_code": 1, "seconds": 2.5, "metrics": {"loss": 1.0},
        "interrupted": None,
        "first_failure": {"kind": "exception", "host": "n2", "rank": 1, "code": 1, "signal": None,
                          "headline": "ValueError: x",
                          "traceback": 'Traceback (most recent call last):\n  File "/a.py", '
                                       "line 1\nValueError: x\n"},
    },
    names.OWNER: {"host": os.uname().nodename, "pid": 1, "start": 2, "since": "2026-01-01"},
    names.PLAN: {"run_id": "ab", "attempt": 0, "nodes": [
        {"host": "n1", "workdir": "/home/a", "code": "shipped",
         "entry": {"kind": "script", "target": "/x/t.py", "args": []}}]},
    names.HOSTS: {"n1": {"cpus": 4}},
    names.FINDINGS: {"findings": [{"check": "disk", "outcome": "warn"}]},
    "batch.json": {"job": "12", "scheduler": "slurm"},
    names.METRICS: [{"step": 1, "split": "train", "loss": 2.0}, {"step": 2, "loss": 1.0}],
    names.EVENTS: EVENTS,
}  # fmt: skip
WORDS = [
    "Traceback (most recent call last):", '  File "/a/b.py", line 3, in main', "ValueError: boom",
    "RuntimeError: CUDA out of memory. Tried to allocate", "a@b: Permission denied (publickey).",
    "paceline: cannot", "  found:  this", "  remedy: that", "[n1/0] hello", "[rank1]: x", "step 12",
    "Root Cause (first observed failure):", "  host      : n1", "  rank      : 99999999999999999",
    "  exitcode  : -9 (pid: 1)", "loss = nan", "No space left on device: '/a'", TITLE, CLIPBOARD,
    "\u202e\u2066", "n1: Killed", "Timed out waiting 1800000ms for recv operation",
]  # fmt: skip


def strange(dice: random.Random, depth: int = 0) -> Any:
    """Returns a random JSON value, or one that only Python writes."""
    kind = dice.randrange(6 if depth < 4 else 4)
    if kind == 0:
        return dice.choice(TEXTS)
    if kind == 1:
        return dice.choice(NUMBERS)
    if kind == 2:
        return dice.choice([None, True, False])
    if kind == 3:
        return dice.choice([[], {}, [[]], {"": None}])
    if kind == 4:
        return [strange(dice, depth + 1) for _ in range(dice.randrange(5))]
    return {dice.choice(TEXTS): strange(dice, depth + 1) for _ in range(dice.randrange(5))}


def bent(dice: random.Random, value: Any) -> Any:
    """Returns the value with random parts, or all of it, replaced."""
    if dice.random() < 0.15:
        return strange(dice)
    if isinstance(value, dict):
        return {k: bent(dice, v) for k, v in value.items() if dice.random() > 0.05}
    if isinstance(value, list):
        return [bent(dice, v) for v in value for _ in range(dice.choice([1, 1, 1, 0, 2]))]
    return value


def text_of(dice: random.Random, name: str, value: Any) -> bytes:
    """Returns the content of a file, sometimes not JSON."""
    made = [json.dumps(one) for one in value] if isinstance(value, list) else [json.dumps(value)]
    data = "\n".join(made).encode() + b"\n"
    kind = dice.randrange(14)
    if kind == 0:
        return data[: dice.randrange(len(data) + 1)]
    if kind == 1:
        return dice.randbytes(dice.randrange(3000))
    if kind == 2:
        return b"[" * 200_000
    if kind == 3:
        return b'{"a":' * 100_000
    if kind == 4:
        return b"\xef\xbb\xbf" + data
    if kind == 5:
        return data.decode().encode("utf-16")
    if kind == 6:
        at = dice.randrange(len(data))
        return data[:at] + dice.randbytes(3) + data[at + 1 :]
    return data


def log_of(dice: random.Random) -> bytes:
    """Returns a random log of a rank."""
    lines = [dice.choice(WORDS) for _ in range(dice.randrange(40))]
    if dice.random() < 0.2:
        lines.append(dice.choice(WORDS) * dice.randrange(1, 20_000))
    if dice.random() < 0.05:
        lines += [dice.choice(WORDS)] * 30_000
    data = "\n".join(lines).encode("utf-8", "surrogatepass")
    return data + dice.randbytes(200) if dice.random() < 0.3 else data


def odd_file(dice: random.Random, path: Path, size: int = 1 << 36) -> None:
    """Creates an object in place of a file that must be neither followed nor waited for."""
    makers: list[Callable[[], object]] = [
        lambda: os.mkfifo(path), lambda: path.mkdir(), lambda: path.symlink_to("/dev/zero"),
        lambda: path.symlink_to(path), lambda: path.symlink_to("/etc/passwd"), lambda: None,
        lambda: path.symlink_to("/dev/tty"), lambda: huge(path, size),
    ]  # fmt: skip
    dice.choice(makers)()


def huge(path: Path, size: int = 1 << 36) -> None:
    with path.open("wb") as file:
        file.truncate(size)


def run_folder(seed: int, at: Path) -> Path:
    """Creates the run directory of a seed below ``at``."""
    dice = random.Random(seed)
    path = at / f"run-{seed}"
    path.mkdir()
    for name, value in FILES.items():
        if dice.random() < (0.5 if name in (names.OWNER, "batch.json") else 0.1):
            continue
        if dice.random() < 0.06:
            odd_file(dice, path / name)
        else:
            (path / name).write_bytes(text_of(dice, name, bent(dice, value)))
    logs = path / names.LOGS
    if dice.random() < 0.05:
        odd_file(dice, logs)
        return path
    for host, rank in [
        ("n1", "0"),
        ("n2", "1"),
        ("n2", dice.choice(["٣", "-1", "9" * 30, "agent"])),
    ]:
        (logs / host).mkdir(parents=True, exist_ok=True)
        file = logs / host / f"{rank}.log"
        if dice.random() < 0.08:
            odd_file(dice, file, 4 << 20)
        else:
            file.write_bytes(log_of(dice))
    return path


def call(*args: str) -> tuple[str, str]:
    """Runs a command; returns its output, and a traceback if it crashed."""
    from paceline.cli import program
    from paceline.spec.errors import PacelineError

    out, trouble = io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), ""
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            program.main(args=list(args), prog_name="paceline", standalone_mode=False)
        except PacelineError as error:
            out.write(error.render())
        except Exception:
            trouble = traceback.format_exc()
    out.flush()
    assert isinstance(out.buffer, io.BytesIO)
    return out.buffer.getvalue().decode(), trouble


def verbs(path: Path, seed: int) -> list[tuple[str, ...]]:
    """Returns the commands to try on a run directory."""
    logs = [str(file) for file in sorted(path.glob("logs/*/*.log")) if file.is_file()]
    of_log = [("explain", "--log", logs[seed % len(logs)])] if logs else []
    bundle = ("explain", str(path), "--bundle", str(path.parent / f"{path.name}.tar.gz"))
    explain = bundle if seed % 10 == 0 else ("explain", str(path))
    stop = [("stop", str(path))] if not runs(path) else []
    return [explain, ("status", str(path)), ("logs", str(path)), *of_log, *stop]


def runs(path: Path) -> bool:
    """Returns whether ``paceline stop`` would wait for a running launcher."""
    from paceline.cli.runs.state import read_state

    return read_state(path).word == "running"


def obeyed(text: str) -> str:
    """Returns the first character that controls a terminal, or an empty string."""
    found = re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]", text)
    return found[0] if found else ""


def main(first: int, count: int) -> None:
    calls, slowest = 0, (0.0, "")
    for seed in range(first, first + count):
        folder = Path(tempfile.mkdtemp(prefix="hostile-"))
        try:
            path = run_folder(seed, folder)
            for typed in verbs(path, seed):
                began = time.monotonic()
                said, trouble = call(*typed)
                took = time.monotonic() - began
                calls += 1
                slowest = max(slowest, (took, f"{seed} {typed[0]}"))
                if trouble or obeyed(said) or took > 5:
                    print(f"seed {seed}, {typed}: {took:.1f} s {obeyed(said)!r}\n{trouble}")
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"{calls} calls, slowest {slowest[0]:.1f} s ({slowest[1]}), at most {memory} MiB")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
