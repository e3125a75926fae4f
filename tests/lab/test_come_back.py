"""A run is left, the machine that started it is struck dead, and others come back to it.

n1 is the machine that starts runs, n2 and n3 train, n4 is somebody's other machine: it has a host
file and a key, and never had a folder of any run.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from launches import SOURCE, Site, eventually, project_at

pytestmark = pytest.mark.lab

LAUNCHING, WORKERS, OTHER = "n1", ("n2", "n3"), "n4"
TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def site(new_lab: Any) -> Iterator[Site]:
    """Jobs lie on n1 alone, in its home."""
    lab = new_lab(hosts=4)
    site = Site(lab, project_at(lab.home(LAUNCHING) / "project"))
    yield site
    assert site.leftovers() == ""


class Desk:
    """Where somebody types: a folder in the home of a host."""

    def __init__(self, site: Site, host: str, folder: str) -> None:
        self._lab, self.host = site.lab, host
        self.path = site.lab.home(host) / folder
        self._inside = f"{site.lab.home_inside()}/{folder}"
        self._typed = 0
        self.path.mkdir(exist_ok=True)
        (self.path / "hostfile").write_text("\n".join(WORKERS) + "\n")

    @contextlib.contextmanager
    def typing(self, *words: str) -> Iterator[Typed]:
        """``paceline WORDS``, under way; it is ended at the end of the ``with``."""
        argv = [sys.executable, "-m", "paceline", *words]
        env = {"PYTHONPATH": str(SOURCE)}
        self._typed += 1
        out, err = (self.path / f"{self._typed}.{stream}" for stream in ("out", "err"))
        with out.open("w") as first, err.open("w") as second:
            process = self._lab.popen(
                self.host, argv, env=env, cwd=self._inside,
                stdin=subprocess.DEVNULL, stdout=first, stderr=second,
            )  # fmt: skip
        try:
            yield Typed(process, out, err)
        finally:
            process.kill()
            process.wait()

    def typed(self, *words: str, code: int = 0) -> str:
        """The same to its end, which has to be that; all that it wrote."""
        with self.typing(*words) as under_way:
            assert under_way.ended() == code, (words, under_way.said())
        return under_way.said()


@dataclass(frozen=True)
class Typed:
    """A command under way, or over."""

    process: subprocess.Popen[bytes]
    out: Path
    err: Path

    def said(self) -> str:
        return self.out.read_text() + self.err.read_text()

    def ended(self) -> int:
        """Its exit status."""
        try:
            return self.process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.said()) from None


@pytest.fixture
def mine(site: Site) -> Iterator[Desk]:
    """Where runs are started. The network of that machine is whole again afterwards."""
    yield Desk(site, LAUNCHING, "project")
    site.lab.heal()


@pytest.fixture
def other(site: Site, tmp_path: Path) -> Desk:
    """Where nobody has started anything: a new folder with a host file."""
    return Desk(site, OTHER, tmp_path.name)


def strike_dead(site: Site) -> None:
    """The machine that started a run goes: its processes, and its network."""
    for pid, _ in site.lab.processes(LAUNCHING):
        os.kill(pid, signal.SIGKILL)
    site.lab.fault("unplug", LAUNCHING)


def left_on(site: Site, host: str) -> list[Path]:
    """What runs have left there."""
    return sorted((site.lab.home(host) / ".cache/paceline/detached").glob("*"))


def test_the_machine_that_started_a_run_dies_and_another_looks_at_it_and_ends_it(
    site: Site, mine: Desk, other: Desk
) -> None:
    left = mine.typed("run", "-H", "hostfile", "--detach", "--no-torch", "--run-dir", "runs/one",
                      "count.py", "9999", "0.1")  # fmt: skip
    assert "supervised on n2\n  attach:     paceline attach one\n" in left
    strike_dead(site)
    assert "one @n2  running" in other.typed("runs", "-H", "hostfile")
    assert "supervisor: on n2" in other.typed("status", "-H", "hostfile")
    with other.typing("attach", "-H", "hostfile") as attached, \
            other.typing("logs", "-f", "-n", "1", "-H", "hostfile") as logs:  # fmt: skip
        for looking in (attached, logs):
            assert eventually(lambda one=looking: "/1] 1 out " in one.said(), TIMEOUT_S)  # type: ignore[misc]
            seen = looking.said().count("/1] 1 out ")
            assert eventually(lambda one=looking, n=seen: one.said().count("/1] 1 out ") > n + 9,
                              TIMEOUT_S), looking.said()  # type: ignore[misc]  # fmt: skip
        assert "the run has not ended: its supervisor is on n2" in other.typed("explain", code=2)
        other.typed("report", "one")
        assert (other.path / "runs/one/report.html").stat().st_size > 10_000
        assert "runs/one: stopped" in other.typed("stop", "-H", "hostfile")
        assert attached.ended() == 143, attached.said()
        assert logs.ended() == 0, logs.said()
    assert site.leftovers() == ""
    assert "stopped by SIGTERM" in attached.said()
    assert json.loads((other.path / "runs/one/result.json").read_text())["interrupted"] == 15
    rows = json.loads(other.typed("runs", "-H", "hostfile", "--json"))["runs"]
    assert [(row["run"], row["state"], row["here"]) for row in rows] == [("one", "stopped", True)]

    assert left_on(site, "n2")  # for the machine that started it
    cut_off = mine.typed("status", code=1)
    assert "n2 since" in cut_off
    assert "which cannot be asked now" in cut_off
    site.lab.heal()
    assert "runs/one: stopped, exit status 143" in mine.typed("status")
    assert "stopped by SIGTERM" in mine.typed("explain")
    assert not left_on(site, "n2")
    assert site.leftovers() == ""


def test_a_recipe_trains_to_its_end_without_the_machine_that_started_it(
    site: Site, mine: Desk, other: Desk
) -> None:
    mine.typed("train", "image", "-H", "hostfile", "--detach", "--run-dir", "runs/two",
               "--epochs", "20")  # fmt: skip
    strike_dead(site)
    (there,) = left_on(site, "n2")
    struck = time.time()
    with other.typing("attach", "-H", "hostfile") as attached:
        assert attached.ended() == 0, attached.said()
    assert "paceline: finished: 2 ranks" in attached.said()
    about = json.loads((there / "about.json").read_text())
    assert about["ended"] > struck
    assert site.leftovers() == ""
    site.lab.heal()
    assert "finished, exit status 0" in mine.typed("status")
    assert "test accuracy" in mine.typed("runs")
    for desk in (mine, other):
        run = desk.path / "runs/two"
        assert json.loads((run / "result.json").read_text())["exit_code"] == 0
        assert list((run / "model").glob("*.safetensors")), [*run.rglob("*")]
        assert "test" in {json.loads(line)["split"] for line in (run / "metrics.jsonl").open()}
        assert (run / "report.html").stat().st_size > 10_000
    assert mine.typed("logs").strip() == other.typed("logs").strip() != ""
    assert not left_on(site, "n2")


def test_a_supervisors_host_that_dies_takes_the_run_with_it_and_says_so_once_it_is_back(
    site: Site, mine: Desk, other: Desk
) -> None:
    mine.typed("run", "-H", "hostfile", "--detach", "--no-torch", "--run-dir", "runs/three",
               "--lease", "3", "count.py", "9999", "0.1")  # fmt: skip
    with mine.typing("attach") as attached:
        assert eventually(lambda: "/1] 1 out " in attached.said(), TIMEOUT_S)
        site.lab.fault("power-off", "n2")
        assert eventually(lambda: not site.lab.processes("n3"), TIMEOUT_S)  # the lease
        assert not site.lab.listeners("n3")
        assert "n2 could not be asked" in other.typed("runs", "-H", "hostfile")
        cut_off = mine.typed("status", code=1)
        assert "the run is on n2 since" in cut_off
        assert "which cannot be asked now" in cut_off
        site.lab.heal()
        assert attached.ended() == 1, attached.said()
    assert "runs/three: lost" in attached.said()
    assert "runs/three: lost" in mine.typed("status")
    assert "the supervisor was killed or its host n2 restarted" in mine.typed("explain")
    rows = json.loads(mine.typed("runs", "--json"))["runs"]
    assert {row["run"]: row["state"] for row in rows}["three"] == "lost"
    assert " out " in mine.typed("logs", "-n", "3")
    assert not left_on(site, "n2")
    assert site.leftovers() == ""


def test_what_hosts_keep_of_runs_that_are_over_is_brought_home_or_removed(
    site: Site, mine: Desk, other: Desk
) -> None:
    for name in ("four", "five"):
        mine.typed("run", "-H", "hostfile", "--detach", "--no-torch", "--run-dir", f"runs/{name}",
                   "count.py", "30", "0.1")  # fmt: skip
    kept = left_on(site, "n2")
    assert len(kept) == 2, kept
    over = lambda one: json.loads((one / "about.json").read_text())["ended"] is not None  # noqa: E731
    assert eventually(lambda: all(map(over, kept)), TIMEOUT_S)
    mine.typed("status", "four")
    assert len(left_on(site, "n2")) == 1
    assert "removed from n2: five" in mine.typed("runs", "--prune")
    assert (mine.path / "runs/five/files/n3/counted-1.txt").is_file()
    assert not left_on(site, "n2")

    mine.typed("run", "-H", "hostfile", "--detach", "--no-torch", "--run-dir", "runs/six",
               "count.py", "9999", "0.1")  # fmt: skip
    assert "six @n2" in other.typed("runs", "-H", "hostfile", "--prune")  # it goes on
    (there,) = left_on(site, "n2")
    other.typed("stop", "-H", "hostfile")
    assert over(there)
    assert "removed from n2: six" in other.typed("runs", "-H", "hostfile", "--prune")
    assert not left_on(site, "n2")
    gone = mine.typed("status", "six", code=1)
    assert "n2 has no run" in gone
