"""Nobody hangs unseen: who did not come, on which host, in which line, and what the others do.

A script of torch's alone and one on ``paceline.train`` hang side by side in the same ways.
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

WAITS = r" while rank 0 on n1, rank 2 on n3 wait for it in the backward pass \(hang\.py, line \d+"
LINE = r"hang\.py, line \d+"
STILL = rf"is stuck at {LINE}, in hang"
# what is said of rank 1, by way
SAID = {
    "sleep": rf"rank 1 on n2 is stuck at {LINE}, in hang \(it sleeps\)" + WAITS,
    "pipe": rf"rank 1 on n2 is stuck at {LINE}, in hang \(it writes to a full pipe that nobody "
    rf"else could read\)" + WAITS,
    "child": rf"rank 1 on n2 is stuck at {LINE}, in hang \(its child, process \d+ \(yes\), "
    r"writes to a full pipe that only rank 1 on n2 could read\)" + WAITS,
    "worker": rf"rank 1 on n2 waits for its data at {LINE}, in \w+: its data loader's worker, "
    rf"process \d+, is stuck at {LINE}, in __getitem__ \(it waits for a lock or a thread\)" + WAITS,
    "extra": rf"rank 1 on n2 waits in all_reduce \({LINE}, in hang\), its call \d+ was all_reduce "
    rf"of \[7\] while rank 0 on n1, rank 2 on n3 wait in barrier \({LINE}, in misbehave\)",
}

# a plain script hangs in those ways in which torch's own loader and all ranks have a part
WAYS = {"plain": ("worker", "extra"), "session": tuple(SAID)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hangs")


@pytest.fixture(scope="module")
def disk(folder: Path) -> Iterator[Path]:
    """A file system of its own, there before the hosts are."""
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


def typed(verb: str, launch: Launch) -> str:
    """What a verb prints of a run."""
    return paceline(*verb.split(), str(launch.directory)).stdout


def status(launch: Launch) -> Any:
    return json.loads(typed("status --json", launch))


def saw(launch: Launch, said: str, times: int = 1) -> bool:
    """Whether it is told at last."""
    return eventually(lambda: len(re.findall(said, launch.err)) >= times, 2 * TIMEOUT_S)


def test_each_hang_is_named_with_its_line_and_its_reason(site: Site) -> None:
    with ExitStack() as stack:
        launches = {
            kind: stack.enter_context(
                site.start("--nnodes", "3", "--hang-timeout", "0", "hang.py", kind, *ways)
            )
            for kind, ways in WAYS.items()
        }
        for way, said in SAID.items():
            hung = [(kind, launches[kind]) for kind, ways in WAYS.items() if way in ways]
            for kind, launch in hung:
                assert saw(launch, said), (kind, way, launch.err, launch.out)
            if way == "extra":
                break
            if way == "sleep":
                # the state of the ranks is recorded about once a second, after the line is printed
                assert eventually(lambda: status(launches["session"])["hang"])
                now = status(launches["session"])
                where = [(one["host"], one["phase"]) for one in now["ranks"]]
                assert where == [("n1", "train"), ("n2", "train"), ("n3", "train")]
                assert all(one["step"] <= 40 and one["silent_s"] > 5 for one in now["ranks"])
                assert "rank 1 on n2 is stuck" in now["hang"]
            for kind, launch in hung:
                (launch.directory / way).touch()
                times = WAYS[kind].index(way) + 1
                assert saw(launch, "the job continues, after", times), (kind, way, launch.err)
        for launch in launches.values():
            launch.signal(signal.SIGINT)
        for kind, launch in launches.items():
            ended = launch.end(2 * TIMEOUT_S)
            assert ended.code == 130
            assert re.search("paceline: it hung: rank 1 on n2 waits in all_reduce", ended.err), kind
            assert "the job hung: rank 1 on n2 waits in all_reduce" in typed("explain", launch)


def test_a_hang_is_ended_where_it_was_asked_for_or_the_ranks_go_on(site: Site) -> None:
    """A session by itself, after five times its slowest step, at least 30 s; a script never is."""
    with ExitStack() as stack:
        words = {"plain": ("--hang-timeout", "8"), "session": ()}
        launches = {
            kind: stack.enter_context(
                site.start("--nnodes", "2", *options, "hang.py", kind, "sleep")
            )
            for kind, options in words.items()
        }
        ended = launches["plain"].end(2 * TIMEOUT_S)
        assert ended.code == 1
        assert re.search(
            rf"rank 1 on n2: hung for longer than --hang-timeout 8: {STILL}", ended.err
        )
        launch = launches["session"]
        replaced = rf"rank 1 on n2 hung for longer than \d+ s: {STILL}.*Training went on with the"
        assert saw(launch, rf"{replaced} other rank after \d+\.\d s; no step was lost"), launch.err
        launch.signal(signal.SIGINT)
        launch.end()


def test_a_stopped_rank_is_frozen_and_its_script_goes_on_with_it(site: Site) -> None:
    with site.start("--nnodes", "2", "hang.py", "plain", "none") as launch:
        events = launch.directory / "events.jsonl"
        joined = lambda: events.exists() and events.read_text().count("world joined") == 2  # noqa: E731
        assert eventually(joined), launch.err
        lines = site.lab.processes("n2")
        rank = min(
            pid for pid, line in lines if "rank 1 of 2" in line
        )  # its data's worker is later
        os.kill(rank, signal.SIGSTOP)
        assert saw(launch, r"rank 1 on n2 is frozen: stopped by a signal for 3 s"), launch.err
        assert re.search(r"\(SIGSTOP\); on n2: kill -CONT \d+", launch.err)
        os.kill(rank, signal.SIGCONT)
        assert saw(launch, "paceline: the job continues, after"), launch.err
        launch.signal(signal.SIGINT)
        assert launch.end().code == 130


def test_another_tensors_shape_names_who_came_with_it(site: Site) -> None:
    with site.start("--nnodes", "3", "hang.py", "plain", "shape") as launch:
        ended = launch.end(2 * TIMEOUT_S)
    assert ended.code != 0
    assert re.search(
        rf"cause: ranks came to one collective with different tensors: rank \d on n\d .*"
        rf"all_reduce \({LINE}, in misbehave\) with .* on n\d .*all_reduce of \[\d+\]",
        ended.err,
    ), ended.err


def test_a_disk_that_does_not_answer_is_told_from_a_slow_one(site: Site, disk: Path) -> None:
    """A frozen file system is a dead disk: whoever writes there is in state D until it thaws."""
    words = ("--nnodes", "2", "--no-torch", "write_on.py", str(disk / "file"))
    with site.start(*words) as launch:
        launch.wait_for("writes", times=2)
        subprocess.run(["fsfreeze", "-f", str(disk)], check=True)
        try:
            said = r"rank 0 on n1 is frozen: it waits in the kernel for a disk that does not "
            said += r"answer for 1\d s: write \S+/disk/file \(ext4 of /dev/loop\d+ at \S+/disk"
            assert saw(launch, said), launch.err
        finally:
            subprocess.run(["fsfreeze", "-u", str(disk)], check=True)
        launch.signal(signal.SIGINT)
        launch.end()


def test_processes_that_ranks_start_and_that_do_not_meet_are_named(site: Site) -> None:
    place = r"process \d+ waits in init_process_group \(unmet\.py, line \d+, in work\)"
    with site.start("--nnodes", "2", "unmet.py") as launch:
        said = f"of rank 0 on n1, {place}; of rank 1 on n2, {place}"
        assert saw(launch, said), launch.err
        launch.signal(signal.SIGINT)
        launch.end()
        assert "Give each process that the script starts a rank of its own" in typed(
            "explain", launch
        )
