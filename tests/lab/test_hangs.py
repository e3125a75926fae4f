"""Tests which ranks, hosts and lines of code are named when a job hangs.

A plain torch script and a ``paceline.train`` session hang side by side in the same ways.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from launches import TIMEOUT_S, Launch, Site, eventually, healed, paceline, project_at

pytestmark = pytest.mark.lab

WAIT_RE = r" while rank 0 on n1, rank 2 on n3 wait for it in the backward pass \(hang\.py, line \d+"
AT_RE = r"hang\.py, line \d+"
STUCK_RE = rf"is stuck at {AT_RE}, in hang"
# report about rank 1, by kind of hang
HANG_PATTERNS = {
    "sleep": rf"rank 1 on n2 is stuck at {AT_RE}, in hang \(it sleeps\)" + WAIT_RE,
    "pipe": rf"rank 1 on n2 is stuck at {AT_RE}, in hang \(it writes to a full pipe that nobody "
    rf"else could read\)" + WAIT_RE,
    "child": rf"rank 1 on n2 is stuck at {AT_RE}, in hang \(its child, process \d+ \(yes\), "
    r"writes to a full pipe that only rank 1 on n2 could read\)" + WAIT_RE,
    "worker": rf"rank 1 on n2 waits for its data at {AT_RE}, in \w+: its data loader's worker, "
    rf"process \d+, is stuck at {AT_RE}, in __getitem__ \(it waits for a lock or a thread\)"
    + WAIT_RE,
    "extra": rf"rank 1 on n2 waits in all_reduce \({AT_RE}, in hang\), its call \d+ was all_reduce "
    rf"of \[7\] while rank 0 on n1, rank 2 on n3 wait in barrier \({AT_RE}, in misbehave\)",
}

# a plain script hangs only in ways that involve torch's own loader and all ranks
HANGS_BY_SCRIPT = {"plain": ("worker", "extra"), "session": tuple(HANG_PATTERNS)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hangs")


@pytest.fixture(scope="module")
def disk(folder: Path) -> Iterator[Path]:
    """A file system of its own, mounted before the hosts start."""
    image, mount = folder / "image", folder / "disk"
    image.touch()
    os.truncate(image, 8 << 20)
    mount.mkdir()
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(mount)], check=True)
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


@pytest.fixture(scope="module")
def shared(new_lab: Any, folder: Path, disk: Path) -> Site:
    project = project_at(folder / "project")
    return Site(new_lab(hosts=3, share=(str(folder), str(disk))), project)


@pytest.fixture
def site(shared: Site) -> Iterator[Site]:
    yield from healed(shared)


def run_verb(verb: str, launch: Launch) -> str:
    """Returns what a paceline command prints about a run."""
    return paceline(*verb.split(), str(launch.directory)).stdout


def status(launch: Launch) -> Any:
    return json.loads(run_verb("status --json", launch))


def is_reported(launch: Launch, pattern: str, times: int = 1) -> bool:
    """Waits for a message of the launcher; returns whether it came."""
    return eventually(lambda: len(re.findall(pattern, launch.err)) >= times, 2 * TIMEOUT_S)


def test_reports_line_and_reason_of_hang(site: Site) -> None:
    with ExitStack() as stack:
        launches = {
            kind: stack.enter_context(
                site.start("--nnodes", "3", "--hang-timeout", "0", "hang.py", kind, *hangs)
            )
            for kind, hangs in HANGS_BY_SCRIPT.items()
        }
        for hang, pattern in HANG_PATTERNS.items():
            hung = [
                (kind, launches[kind]) for kind, hangs in HANGS_BY_SCRIPT.items() if hang in hangs
            ]
            for kind, launch in hung:
                assert is_reported(launch, pattern), (kind, hang, launch.err, launch.out)
            if hang == "extra":
                break
            if hang == "sleep":
                # the state of the ranks is recorded about once a second, after the line is printed
                assert eventually(lambda: status(launches["session"])["hang"])
                current_status = status(launches["session"])
                host_phases = [(entry["host"], entry["phase"]) for entry in current_status["ranks"]]
                assert host_phases == [("n1", "train"), ("n2", "train"), ("n3", "train")]
                assert all(
                    entry["step"] <= 40 and entry["silent_s"] > 5
                    for entry in current_status["ranks"]
                )
                assert "rank 1 on n2 is stuck" in current_status["hang"]
            for kind, launch in hung:
                (launch.directory / hang).touch()
                times = HANGS_BY_SCRIPT[kind].index(hang) + 1
                assert is_reported(launch, "the job continues, after", times), (
                    kind,
                    hang,
                    launch.err,
                )
        for launch in launches.values():
            launch.signal(signal.SIGINT)
        for kind, launch in launches.items():
            ended = launch.end(2 * TIMEOUT_S)
            assert ended.code == 130
            assert re.search("paceline: it hung: rank 1 on n2 waits in all_reduce", ended.err), kind
            assert "the job hung: rank 1 on n2 waits in all_reduce" in run_verb("explain", launch)


def test_hang_timeout_ends_script_or_replaces_rank(site: Site) -> None:
    """A session after five times its slowest step (at least 30 s); a script only on request."""
    with ExitStack() as stack:
        args = {"plain": ("--hang-timeout", "8"), "session": ()}
        launches = {
            kind: stack.enter_context(
                site.start("--nnodes", "2", *options, "hang.py", kind, "sleep")
            )
            for kind, options in args.items()
        }
        ended = launches["plain"].end(2 * TIMEOUT_S)
        assert ended.code == 1
        assert re.search(
            rf"rank 1 on n2: hung for longer than --hang-timeout 8: {STUCK_RE}", ended.err
        )
        launch = launches["session"]
        replaced = (
            rf"rank 1 on n2 hung for longer than \d+ s: {STUCK_RE}.*Training went on with the"
        )
        assert is_reported(launch, rf"{replaced} other rank after \d+\.\d s; no step was lost"), (
            launch.err
        )
        launch.signal(signal.SIGINT)
        launch.end()


def test_stopped_rank_is_reported_frozen_then_continues(site: Site) -> None:
    with site.start("--nnodes", "2", "hang.py", "plain", "none") as launch:
        events = launch.directory / "events.jsonl"
        joined = lambda: events.exists() and events.read_text().count("world joined") == 2  # noqa: E731
        assert eventually(joined), launch.err
        lines = site.lab.processes("n2")
        rank = min(
            pid for pid, line in lines if "rank 1 of 2" in line
        )  # the data loader's worker has a higher process id
        os.kill(rank, signal.SIGSTOP)
        assert is_reported(launch, r"rank 1 on n2 is frozen: stopped by a signal for 3 s"), (
            launch.err
        )
        assert re.search(r"\(SIGSTOP\); on n2: kill -CONT \d+", launch.err)
        os.kill(rank, signal.SIGCONT)
        assert is_reported(launch, "paceline: the job continues, after"), launch.err
        launch.signal(signal.SIGINT)
        assert launch.end().code == 130


def test_names_rank_with_mismatched_tensor_shape(site: Site) -> None:
    with site.start("--nnodes", "3", "hang.py", "plain", "shape") as launch:
        ended = launch.end(2 * TIMEOUT_S)
    assert ended.code != 0
    assert re.search(
        rf"cause: ranks came to one collective with different tensors: rank \d on n\d .*"
        rf"all_reduce \({AT_RE}, in misbehave\) with .* on n\d .*all_reduce of \[\d+\]",
        ended.err,
    ), ended.err


def test_reports_rank_frozen_by_dead_disk(site: Site, disk: Path) -> None:
    """Writers to a frozen file system are in state D until it thaws, as with a dead disk."""
    args = ("--nnodes", "2", "--no-torch", "write_on.py", str(disk / "file"))
    with site.start(*args) as launch:
        launch.wait_for("writes", times=2)
        subprocess.run(["fsfreeze", "-f", str(disk)], check=True)
        try:
            pattern = r"rank 0 on n1 is frozen: it waits in the kernel for a disk that does not "
            pattern += r"answer for 1\d s: write \S+/disk/file \(ext4 of /dev/loop\d+ at \S+/disk"
            assert is_reported(launch, pattern), launch.err
        finally:
            subprocess.run(["fsfreeze", "-u", str(disk)], check=True)
        launch.signal(signal.SIGINT)
        launch.end()


def test_reports_child_processes_stuck_in_rendezvous(site: Site) -> None:
    location = r"process \d+ waits in init_process_group \(unmet\.py, line \d+, in work\)"
    with site.start("--nnodes", "2", "unmet.py") as launch:
        pattern = f"of rank 0 on n1, {location}; of rank 1 on n2, {location}"
        assert is_reported(launch, pattern), launch.err
        launch.signal(signal.SIGINT)
        launch.end()
        assert "Give each process that the script starts a rank of its own" in run_verb(
            "explain", launch
        )
