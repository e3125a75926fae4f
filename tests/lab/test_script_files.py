"""Tests files of scripts on other hosts: they are fetched, and sent back for a resume."""

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
def isolated_site(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = tmp_path_factory.mktemp("apart")
    return Site(new_lab(hosts=2), project_at(folder / "project"))


@pytest.fixture
def site(isolated_site: Site, tmp_path: Path) -> Iterator[Site]:
    """A new project for each test; heals all faults and checks that nothing runs afterwards."""
    isolated_site.project = project_at(tmp_path / "project")
    yield from healed(isolated_site)


def launch(site: Site, directory: Path, *args: str) -> Launch:
    argv = site.argv("--run-dir", str(directory), *LEASE, *args, hosts="n1,n2")
    return Launch(site, argv, directory)


def last_checkpoint_step(site: Site) -> int:
    """Returns the step of the newest checkpoint in the local project; 0 if there is none."""
    steps = [int(path.stem.split("_")[1]) for path in site.project.glob("out/ckpt_*.pt")]
    return max(steps, default=0)


def start_steps(text: str) -> dict[str, list[int]]:
    """Returns for each rank the steps at which it started."""
    steps_by_rank: dict[str, list[int]] = {}
    for rank, step in re.findall(r"rank (\d) of \d from step (\d+)", text):
        steps_by_rank.setdefault(rank, []).append(int(step))
    return steps_by_rank


def assert_equal_end(ended: Ended, ranks: int = 2) -> None:
    assert ended.code == 0, ended.out + ended.err
    ends = re.findall(r"rank \d ends (\w+)", ended.out)
    assert len(ends) == ranks, ended.out
    assert len(set(ends)) == 1


def test_killed_launcher_resumes_from_fetched_checkpoint(
    site: Site,
) -> None:
    directory = site.fresh()
    args = ["resume_own.py", "400", "10", "0.05"]
    with launch(site, directory, *args) as job:
        job.until(lambda: last_checkpoint_step(site) >= 30, "a checkpoint here")
        job.kill()
    fetched_step = last_checkpoint_step(site)
    assert eventually(site.clean)
    with launch(site, directory, *args) as job:
        ended = job.end()
    assert_equal_end(ended)
    steps = start_steps(ended.out)
    assert steps["0"] == steps["1"]
    assert steps["0"][0] >= fetched_step > 0
    journal = [json.loads(line) for line in (directory / "outputs.jsonl").read_text().splitlines()]
    record = next(line for line in journal if line.get("path") == f"out/ckpt_{fetched_step}.pt")
    assert record["host"] == "n1"
    assert len(record["sha256"]) == 64
    log = (site.project / "out/log.txt").read_text().splitlines()
    assert log[-1] == "step 400"
    assert not list(directory.glob("files/*")), list(directory.glob("files/*/*"))
    assert "newest checkpoint of the script: " in ended.err
    assert "out/ckpt_400.pt" in ended.err


def test_loss_of_rank_0_host_resumes_from_fetched_checkpoint(site: Site) -> None:
    """The host joins again only after the next checkpoint; all ranks start at the same step."""
    directory = site.fresh()
    args = ["--nnodes", "1:2", "resume_own.py", "600", "10", "0.05"]
    with launch(site, directory, *args) as job:
        job.until(lambda: last_checkpoint_step(site) >= 30, "a checkpoint here")
        site.lab.fault("power-off", "n1")
        job.wait_for("rank 0 of 1 from step")
        site.lab.undo("power-off", "n1")
        job.until(lambda: "n1 is here; it gets ranks after the next checkpoint" in job.err, "n1")
        job.wait_for("rank 1 of 2 from step", times=2)
        ended = job.end()
    assert_equal_end(ended)
    steps = start_steps(ended.out)
    assert steps["0"][1] >= 30  # the only rank after the loss
    assert steps["0"][2] == steps["1"][1] > steps["0"][1]
    logged = (site.project / "out/log.txt").read_text().splitlines()
    assert {*logged} >= {f"step {step}" for step in range(10, steps["0"][1] + 1, 10)}


def test_resume_preserves_files_edited_by_user(site: Site) -> None:
    """One file existed here with the same name; one is edited here, and one is removed here."""
    subprocess.run(["git", "init", "-q"], cwd=site.project, check=True)
    (site.project / ".gitignore").write_text("out/\n")
    directory = site.fresh()
    args = ["resume_own.py", "300", "10", "0.05"]
    (site.project / "out").mkdir()
    (site.project / "out/ckpt_20.pt").write_bytes(b"mine")
    with launch(site, directory, *args) as job:
        job.until(lambda: last_checkpoint_step(site) >= 40, "a checkpoint here")
        (site.project / "out/ckpt_10.pt").write_bytes(b"edited")
        site.lab.fault("power-off", "n2")
        ended = job.end()
    assert ended.code == 1
    assert "to resume, if the script loads its newest checkpoint: paceline run" in ended.err
    site.lab.undo("power-off", "n2")
    assert eventually(site.clean)
    fetched_step = last_checkpoint_step(site)
    with launch(site, directory, *args) as job:
        ended = job.end()
    assert_equal_end(ended)
    assert start_steps(ended.out)["0"] == start_steps(ended.out)["1"]
    assert start_steps(ended.out)["0"][0] >= fetched_step
    assert (site.project / "out/ckpt_20.pt").read_bytes() == b"mine"
    assert (site.project / "out/ckpt_10.pt").read_bytes() == b"edited"
    assert list(directory.glob("files/n1/out/ckpt_20.pt"))


def test_rejoin_requires_node_range(site: Site) -> None:
    ended = site.run("--rejoin", "now", "resume_own.py", "1", "1", "0", hosts="n1,n2")
    assert ended.code == 2
    assert "--rejoin now needs --nnodes MIN:MAX" in ended.err


def test_status_and_attach_fetch_files_of_detached_run(site: Site) -> None:
    """``status`` and ``attach`` fetch them meanwhile, to the paths where the script wrote them."""
    directory = site.fresh()

    def detach(steps: int, pause: float) -> None:
        args = ["resume_own.py", str(steps), "10", str(pause)]
        options = ["--detach", "--run-dir", str(directory)]
        started = paceline("run", *on(site.lab), *options, *args, cwd=site.project)
        assert started.returncode == 0, started.stderr

    def has_fetched_checkpoint() -> bool:
        status = paceline("status", str(directory), cwd=site.project)
        assert status.returncode == 0, status.stderr
        return last_checkpoint_step(site) > 0

    detach(160, 0.1)
    assert eventually(has_fetched_checkpoint)
    (site.project / "out/ckpt_10.pt").write_bytes(b"edited")
    argv = [sys.executable, "-m", "paceline", "attach", str(directory)]
    previous_step = last_checkpoint_step(site)
    with Launch(site, argv, directory) as attached:
        attached.until(
            lambda: last_checkpoint_step(site) > previous_step, "a newer checkpoint here"
        )
        ended = attached.end()
    assert ended.code == 0, ended.err
    assert (site.project / "out/ckpt_10.pt").read_bytes() == b"edited"
    assert last_checkpoint_step(site) == 160
    assert "newest checkpoint of the script: out/ckpt_160.pt" in ended.err
    assert not list(directory.glob("files/*"))
    detach(170, 0.0)
    reattached = paceline("attach", str(directory), cwd=site.project)
    assert reattached.returncode == 0, reattached.stderr
    logs = "".join(log.read_text() for log in directory.glob("logs/n*/?.log"))
    assert start_steps(logs)["0"][-1] == start_steps(logs)["1"][-1] == 160
    assert last_checkpoint_step(site) == 170
