"""Runs, in forked worlds, trainings on hosts with separate disks that copy checkpoints."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked_worlds
import resume_worlds
import small_launcher
from resume_worlds import difference, events, hide, killer, made, resumed_at, training

from paceline.train.checkpoints.store import Store

HOSTS = "abcd"


def on_hosts(
    hosts: str, run: str, *, at_step: Callable[[int], None] = lambda step: None, **how: Any
) -> list[int]:
    """Trains with one rank on each host; a host's disk is a folder of its name."""

    def body() -> None:
        host = hosts[int(os.environ["RANK"])]
        os.environ["PACELINE_HOST"] = host
        for other in HOSTS.replace(host, ""):
            hide(made(f"{run}/{other}"))
        training(made(f"{run}/{host}"), at_step=at_step, **how)

    return forked_worlds.run(len(hosts), body)


def names(folder: Path) -> list[str]:
    return [one.path.name for one in Store(folder / "checkpoints").scan()[0]]


def until(there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not there():
        assert time.monotonic() < deadline, "what was waited for did not come"
        time.sleep(0.01)


def has(disk: int, path: str) -> bool:
    """Returns whether the folder behind a descriptor has this file."""
    with contextlib.suppress(FileNotFoundError):
        os.stat(path, dir_fd=disk)
        return True
    return False


def kill_when(step: int, copy: Path) -> Callable[[int], None]:
    """Returns a function that kills a copy's rank after a step, once it exists; others fail."""
    host = copy.parents[1].name

    def act(done: int) -> None:
        if done == step and os.environ["PACELINE_HOST"] == host:
            until((copy / "manifest.json").exists)
            killer(step, signal.SIGKILL)(done)

    return act


def lost_disk() -> dict[str, Any]:
    """Rank 0's host is lost with its disk; the other two resume from the copy that one has."""
    copy = made("lost/b") / "checkpoints/8"
    on_hosts("abc", "lost", every="2", at_step=kill_when(9, copy))
    there = [names(made(f"lost/{host}")) for host in "bc"]
    shutil.rmtree(made("lost/a"))
    assert not any(on_hosts("bc", "lost", every="3"))
    return {
        "there": there,
        "resumed": resumed_at(made("lost/b")),
        "then": names(made("lost/b"))[0],
        "difference": difference(made("lost/b"), made("whole")),
    }


def stood_in() -> list[str]:
    """Host b cannot store files; returns the hosts that have the copy."""
    (made("stand/b") / "checkpoints").write_text("no folder")
    copy = made("stand/c") / "checkpoints/4"
    on_hosts("abc", "stand", every="4", at_step=kill_when(5, copy))
    return [h for h in "bc" if (made(f"stand/{h}") / "checkpoints/4").exists()]


def begun_anew() -> dict[str, Any]:
    """An earlier training's copy on b is not resumed from after a new training has started."""
    copy = made("anew/b") / "checkpoints/8"
    on_hosts("ab", "anew", every="2", at_step=kill_when(9, copy))
    second = made("anew/b") / "checkpoints/2.2"
    on_hosts("ab", "anew", every="2", resume="never", at_step=kill_when(3, second))
    aside = [bool([*made(f"anew/{host}").glob("checkpoints-before-*")]) for host in "ab"]
    (made("anew/a") / "events.jsonl").unlink()
    assert not any(on_hosts("ab", "anew", every="never"))
    return {"aside": aside, "resumed": resumed_at(made("anew/a"))}


def one_disk() -> dict[str, Any]:
    """Both hosts see the same folder."""

    def body() -> None:
        os.environ["PACELINE_HOST"] = HOSTS[int(os.environ["RANK"])]
        os.environ["PACELINE_CHECKPOINT_COPIES"] = "1"
        training(made("shared/whole"), every="4")

    forked_worlds.run_ok(2, body)
    said = [one for one in events(made("shared/whole")) if "every host sees" in str(one)]
    return {
        "folders": sorted(one.name for one in made("shared").iterdir()),
        "warned": bool(said),
    }


def moved() -> dict[str, Any]:
    """Rank 0 and its disk are lost; the next rank 0 writes checkpoints, and they are copied."""
    # opened before the folders are hidden, so that rank 0 can still look into them
    disks = [os.open(made(f"moved/{host}"), os.O_RDONLY) for host in ("n1", "n2")]

    def act(done: int) -> None:
        if done == 8 and os.environ["PACELINE_HOST"] == "n0":
            until(lambda: any(has(disk, "checkpoints/6/manifest.json") for disk in disks))
            killer(8, signal.SIGKILL)(done)
        if done == 14 and os.environ["PACELINE_HOST"] == "n2":  # the host that receives copies now
            until(lambda: bool(names(made("moved/n2"))))
        time.sleep(0.1)

    def body() -> None:
        hosts, host = ("n0", "n1", "n2"), os.environ["PACELINE_HOST"]
        for other in hosts:
            if other != host:
                hide(made(f"moved/{other}"))
        folder = made(f"moved/{host}")
        os.environ["PACELINE_RUN_DIR"] = str(folder)
        training(folder, every="3", at_step=act)

    job = small_launcher.Job(body, 3, made("moved"), again=0).run()
    written = {one["step"] for _, _, one in job.said if one["event"] == "checkpoint"}
    return {
        "statuses": [job.statuses[slot] for slot in range(3)],
        "written": sorted(written),
        "there": [names(made(f"moved/{host}")) for host in ("n1", "n2")],
        "difference": difference(made("moved/n1"), made("whole")),
    }


def main() -> None:
    forked_worlds.run_ok(1, lambda: training(made("whole"), every="never"))
    scenarios = (lost_disk, stood_in, begun_anew, one_disk, moved)
    found = {scenario.__name__: scenario() for scenario in scenarios}
    (Path(sys.argv[1]) / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    assert resume_worlds.EPOCHS == 3
    main()
