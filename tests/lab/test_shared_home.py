"""Hosts that share one home directory, as on most clusters, while each has its own project."""

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


def typed(site: Site, *words: str) -> subprocess.CompletedProcess[str]:
    return paceline(*words, "--ssh-config", str(site.lab.ssh_config), cwd=site.project)


def test_shipped_code_runs_start_after_start(site: Site) -> None:
    for _ in range(4):
        ended = site.run("--no-torch", "end.py", "write")
        assert ended.code == 0, ended.err
        (site.project / "result-0.txt").unlink()  # rank 0's are where it wrote them
        for rank, host in enumerate(site.lab.names[1:], 1):
            came = {path.name for path in (ended.directory / "files" / host).rglob("*.txt")}
            assert came == {f"result-{rank}.txt"}  # its own, and nobody else's
    assert kept(site) == []


def test_a_training_starts_again_after_a_failure(site: Site) -> None:
    ended = site.run("--max-restarts", "1", "fail_once.py")
    assert ended.code == 0, ended.err
    assert kept(site) == []


def test_data_come_once_for_all_hosts(site: Site, tmp_path: Path) -> None:
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
    assert kept(site) == []


def test_a_detached_run_comes_home(site: Site) -> None:
    left = site.run("--detach", "--no-torch", "end.py", "write")
    assert left.code == 0, left.err
    home = typed(site, "attach", str(left.directory))
    assert home.returncode == 0, home.stderr
    result = json.loads((left.directory / "result.json").read_text())
    assert result["exit_code"] == 0
    assert (site.project / "result-0.txt").exists()  # rank 0's files come to their place
    for rank, host in enumerate(site.lab.names[1:], 1):
        assert list((left.directory / "files" / host).glob("*.txt")) == [
            left.directory / "files" / host / f"result-{rank}.txt"
        ]
    assert eventually(lambda: kept(site) == [])
    assert list((site.lab.home("n1") / ".cache/paceline/detached").iterdir()) == []


def test_the_check_ships_its_package(site: Site) -> None:
    done = typed(site, "check", "-H", str(site.lab.hostfile))
    assert done.returncode == 0, done.stdout + done.stderr
    assert kept(site) == []


def test_each_host_has_a_worker_sshd_of_its_own(site: Site) -> None:
    for word, expected in (("start", "sshd listens on port 12345"), ("stop", "sshd stopped")):
        done = typed(site, "setup", "sshd", word, "-H", str(site.lab.hostfile))
        assert (done.returncode, done.stdout.count(expected)) == (0, 3), done.stdout + done.stderr
