"""Hosts that share one home directory, as on most clusters, while each has its own project."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from launches import SOURCE, Site, project_at

pytestmark = pytest.mark.lab


@pytest.fixture(scope="module")
def site(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The hosts do not see the project, so the code is shipped, to one disk three times."""
    project = project_at(tmp_path_factory.mktemp("shared") / "project")
    for number in range(200):  # enough for the hosts to be at it at the same time
        (project / f"module{number}.py").write_text(f"NUMBER = {number}\n")
    site = Site(new_lab(hosts=3, shared_home=True), project)
    yield site
    assert site.leftovers() == ""


def kept(site: Site) -> list[str]:
    """What jobs have left below the cache of the hosts."""
    cache = site.lab.home("n1") / ".cache/paceline"
    return sorted(f"{path.parent.name}/{path.name}" for folder in ("jobs", "runs")
                  for path in (cache / folder).glob("*"))  # fmt: skip


def test_shipped_code_runs_start_after_start(site: Site) -> None:
    for _ in range(4):
        ended = site.run("--no-torch", "end.py", "write")
        assert ended.code == 0, ended.err
        for rank, host in enumerate(site.lab.names):
            came = {path.name for path in (ended.directory / "files" / host).rglob("*.txt")}
            assert came == {f"result-{rank}.txt"}  # its own, and nobody else's
    assert kept(site) == []


def test_a_training_starts_again_after_a_failure(site: Site) -> None:
    ended = site.run("--max-restarts", "1", "fail_once.py")
    assert ended.code == 0, ended.err
    assert kept(site) == []


def test_the_check_ships_its_package(site: Site) -> None:
    done = subprocess.run(site.argv(verb="check"), cwd=site.project, capture_output=True,
                          env={**os.environ, "PYTHONPATH": str(SOURCE)}, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
