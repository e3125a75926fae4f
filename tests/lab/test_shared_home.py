"""Tests hosts that share one home, as on most clusters, while each has its own project."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launches import Site, eventually, paceline, project_at

pytestmark = pytest.mark.lab


@pytest.fixture(scope="module")
def site(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The hosts do not see the project, so that the code is sent three times to one disk."""
    project = project_at(tmp_path_factory.mktemp("shared") / "project")
    for number in range(200):  # enough files for the hosts to write at the same time
        (project / f"module{number}.py").write_text(f"NUMBER = {number}\n")
    site = Site(new_lab(hosts=3, shared_home=True), project)
    yield site
    assert site.leftovers() == ""


def leftover_folders(site: Site) -> list[str]:
    """Returns what jobs have left in the hosts' cache."""
    cache = site.lab.home("n1") / ".cache/paceline"
    return sorted(f"{path.parent.name}/{path.name}" for folder in ("jobs", "runs")
                  for path in (cache / folder).glob("*"))  # fmt: skip


def run_paceline(site: Site, *args: str) -> subprocess.CompletedProcess[str]:
    return paceline(*args, "--ssh-config", str(site.lab.ssh_config), cwd=site.project)


def test_shipped_code_runs_repeatedly(site: Site) -> None:
    for _ in range(4):
        ended = site.run("--no-torch", "end.py", "write")
        assert ended.code == 0, ended.err
        (site.project / "result-0.txt").unlink()  # rank 0's file is where it wrote it
        for rank, host in enumerate(site.lab.names[1:], 1):
            files = {path.name for path in (ended.directory / "files" / host).rglob("*.txt")}
            assert files == {f"result-{rank}.txt"}  # only the rank's own file
    assert leftover_folders(site) == []


def test_training_restarts_on_failure(site: Site) -> None:
    ended = site.run("--max-restarts", "1", "fail_once.py")
    assert ended.code == 0, ended.err
    assert leftover_folders(site) == []


def test_data_are_sent_only_in_first_run(site: Site, tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    (photos / "cats").mkdir(parents=True)
    for number in range(20):
        (photos / "cats" / f"{number}.png").write_bytes(b"%d" % number)
    (photos / "big.tar").write_bytes(bytes(3 << 20))
    (tmp_path / "see.py").write_text(
        "import os, pathlib\nroot = pathlib.Path(os.environ['PACELINE_DATA_DIR'])\n"
        "print(sum(path.stat().st_size for path in root.rglob('*') if path.is_file()))\n"
    )
    for sent in (True, False):
        ended = site.run("--no-torch", "--data", str(photos), "see.py", cwd=tmp_path)
        assert ended.code == 0, ended.err
        assert [ended.lines(rank) for rank in range(3)] == [[str((3 << 20) + 30)]] * 3
        assert ("sending data: 0 of 4 MiB" in ended.err) == sent
    assert leftover_folders(site) == []


def test_attach_fetches_detached_run(site: Site) -> None:
    detached = site.run("--detach", "--no-torch", "end.py", "write")
    assert detached.code == 0, detached.err
    attached = run_paceline(site, "attach", str(detached.directory))
    assert attached.returncode == 0, attached.stderr
    result = json.loads((detached.directory / "result.json").read_text())
    assert result["exit_code"] == 0
    assert (site.project / "result-0.txt").exists()  # rank 0's file is where it wrote it
    for rank, host in enumerate(site.lab.names[1:], 1):
        assert list((detached.directory / "files" / host).glob("*.txt")) == [
            detached.directory / "files" / host / f"result-{rank}.txt"
        ]
    assert eventually(lambda: leftover_folders(site) == [])
    assert list((site.lab.home("n1") / ".cache/paceline/detached").iterdir()) == []


def test_check_ships_package(site: Site) -> None:
    completed = run_paceline(site, "check", "-H", str(site.lab.hostfile))
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert leftover_folders(site) == []


def test_worker_sshd_per_host(site: Site) -> None:
    for word, expected in (("start", "sshd listens on port 12345"), ("stop", "sshd stopped")):
        completed = run_paceline(site, "setup", "sshd", word, "-H", str(site.lab.hostfile))
        assert (completed.returncode, completed.stdout.count(expected)) == (0, 3), (
            completed.stdout + completed.stderr
        )
