"""Files of a script on hosts that do not see the project: they come home, and go back to resume."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launches import Ended, Launch, Site, eventually, healed, on, paceline, project_at

pytestmark = pytest.mark.lab
LEASE = ("--lease", "4")


@pytest.fixture(scope="module")
def apart(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = tmp_path_factory.mktemp("apart")
    return Site(new_lab(hosts=2), project_at(folder / "project"))


@pytest.fixture
def site(apart: Site, tmp_path: Path) -> Iterator[Site]:
    """A fresh project for each test; faults are healed, and nothing runs afterwards."""
    apart.project = project_at(tmp_path / "project")
    yield from healed(apart)


def launch(site: Site, directory: Path, *words: str) -> Launch:
    argv = site.argv("--run-dir", str(directory), *LEASE, *words, hosts="n1,n2")
    return Launch(site, argv, directory)


def newest(site: Site) -> int:
    """The step of the newest checkpoint in the project here; 0 without any."""
    steps = [int(path.stem.split("_")[1]) for path in site.project.glob("out/ckpt_*.pt")]
    return max(steps, default=0)


def begins(text: str) -> dict[str, list[int]]:
    """By rank, the steps at which it began."""
    found: dict[str, list[int]] = {}
    for rank, step in re.findall(r"rank (\d) of \d from step (\d+)", text):
        found.setdefault(rank, []).append(int(step))
    return found


def assert_equal_end(ended: Ended, ranks: int = 2) -> None:
    assert ended.code == 0, ended.out + ended.err
    ends = re.findall(r"rank \d ends (\w+)", ended.out)
    assert len(ends) == ranks, ended.out
    assert len(set(ends)) == 1


def test_checkpoints_arrive_while_the_run_goes_on_and_a_killed_launcher_loses_none(
    site: Site,
) -> None:
    directory = site.fresh()
    words = ["resume_own.py", "400", "10", "0.05"]
    with launch(site, directory, *words) as job:
        job.until(lambda: newest(site) >= 30, "a checkpoint here")
        job.kill()
    home = newest(site)
    assert eventually(site.clean)
    with launch(site, directory, *words) as job:
        ended = job.end()
    assert_equal_end(ended)
    steps = begins(ended.out)
    assert steps["0"] == steps["1"]
    assert steps["0"][0] >= home > 0
    journal = [json.loads(line) for line in (directory / "outputs.jsonl").read_text().splitlines()]
    record = next(line for line in journal if line.get("path") == f"out/ckpt_{home}.pt")
    assert record["host"] == "n1"
    assert len(record["sha256"]) == 64
    log = (site.project / "out/log.txt").read_text().splitlines()
    assert log[-1] == "step 400"
    assert not list(directory.glob("files/*")), list(directory.glob("files/*/*"))
    assert "newest checkpoint of the script: " in ended.err
    assert "out/ckpt_400.pt" in ended.err


def test_a_job_that_loses_rank_0s_host_goes_on_from_the_newest_checkpoint_here(site: Site) -> None:
    """And takes the host in again only after the next checkpoint; all begin at the same step."""
    directory = site.fresh()
    words = ["--nnodes", "1:2", "resume_own.py", "600", "10", "0.05"]
    with launch(site, directory, *words) as job:
        job.until(lambda: newest(site) >= 30, "a checkpoint here")
        site.lab.fault("power-off", "n1")
        job.wait_for("rank 0 of 1 from step")
        site.lab.undo("power-off", "n1")
        job.until(lambda: "n1 is here; it gets ranks after the next checkpoint" in job.err, "n1")
        job.wait_for("rank 1 of 2 from step", times=2)
        ended = job.end()
    assert_equal_end(ended)
    steps = begins(ended.out)
    assert steps["0"][1] >= 30  # alone
    assert steps["0"][2] == steps["1"][1] > steps["0"][1]


def test_a_lost_host_and_files_that_the_user_changed_meanwhile(site: Site) -> None:
    """A file of the same name that was here, one that is edited here, and one that is removed."""
    subprocess.run(["git", "init", "-q"], cwd=site.project, check=True)
    (site.project / ".gitignore").write_text("out/\n")
    directory = site.fresh()
    words = ["resume_own.py", "300", "10", "0.05"]
    (site.project / "out").mkdir()
    (site.project / "out/ckpt_20.pt").write_bytes(b"mine")
    with launch(site, directory, *words) as job:
        job.until(lambda: newest(site) >= 40, "a checkpoint here")
        (site.project / "out/ckpt_10.pt").write_bytes(b"edited")
        site.lab.fault("power-off", "n2")
        ended = job.end()
    assert ended.code == 1
    assert "to resume, if the script loads its newest checkpoint: paceline run" in ended.err
    site.lab.undo("power-off", "n2")
    assert eventually(site.clean)
    home = newest(site)
    with launch(site, directory, *words) as job:
        ended = job.end()
    assert_equal_end(ended)
    assert begins(ended.out)["0"] == begins(ended.out)["1"]
    assert begins(ended.out)["0"][0] >= home
    assert (site.project / "out/ckpt_20.pt").read_bytes() == b"mine"
    assert (site.project / "out/ckpt_10.pt").read_bytes() == b"edited"
    assert list(directory.glob("files/n1/out/ckpt_20.pt"))


def test_rejoin_is_refused_where_no_node_can_come_back(site: Site) -> None:
    ended = site.run("--rejoin", "now", "resume_own.py", "1", "1", "0", hosts="n1,n2")
    assert ended.code == 2
    assert "--rejoin now needs --nnodes MIN:MAX" in ended.err


def test_files_of_a_detached_run_come_when_somebody_asks_and_go_back_to_resume(site: Site) -> None:
    """By ``status`` and ``attach``, while it runs, and to where the script wrote them."""
    directory = site.fresh()

    def detach(steps: int, pause: float) -> None:
        words = ["resume_own.py", str(steps), "10", str(pause)]
        options = ["--detach", "--run-dir", str(directory)]
        started = paceline("run", *on(site.lab), *options, *words, cwd=site.project)
        assert started.returncode == 0, started.stderr

    def look() -> bool:
        asked = paceline("status", str(directory), cwd=site.project)
        assert asked.returncode == 0, asked.stderr
        return newest(site) > 0

    detach(160, 0.1)
    assert eventually(look)
    (site.project / "out/ckpt_10.pt").write_bytes(b"edited")
    argv = [sys.executable, "-m", "paceline", "attach", str(directory)]
    come = newest(site)
    with Launch(site, argv, directory) as attached:
        attached.until(lambda: newest(site) > come, "a newer checkpoint here")
        ended = attached.end()
    assert ended.code == 0, ended.err
    assert (site.project / "out/ckpt_10.pt").read_bytes() == b"edited"
    assert newest(site) == 160
    assert "newest checkpoint of the script: out/ckpt_160.pt" in ended.err
    assert not list(directory.glob("files/*"))
    detach(170, 0.0)
    ended_well = paceline("attach", str(directory), cwd=site.project)
    assert ended_well.returncode == 0, ended_well.stderr
    logs = "".join(log.read_text() for log in directory.glob("logs/n*/?.log"))
    assert begins(logs)["0"][-1] == begins(logs)["1"][-1] == 160
    assert newest(site) == 170
