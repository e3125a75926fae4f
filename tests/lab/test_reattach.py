"""Tests attaching to detached runs after the machine that started them has failed.

Runs are started on n1 and train on n2 and n3. n4 is another user's machine: it has a host file and
a key, but never had a run's folder.
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

LAUNCHING, WORKERS, OBSERVER = "n1", ("n2", "n3"), "n4"
TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def site(new_lab: Any) -> Iterator[Site]:
    """The jobs exist on n1 only, in its home."""
    lab = new_lab(hosts=4)
    site = Site(lab, project_at(lab.home(LAUNCHING) / "project"))
    yield site
    assert site.leftovers() == ""


class Client:
    """A folder in the home of a host, in which commands are typed."""

    def __init__(self, site: Site, host: str, folder: str) -> None:
        self._lab, self.host = site.lab, host
        self.path = site.lab.home(host) / folder
        self._inside = f"{site.lab.home_inside()}/{folder}"
        self._typed = 0
        self.path.mkdir(exist_ok=True)
        (self.path / "hostfile").write_text("\n".join(WORKERS) + "\n")

    @contextlib.contextmanager
    def typing(self, *arguments: str) -> Iterator[CliProcess]:
        """Starts ``paceline WORDS``; kills it at the end of the ``with`` block."""
        argv = [sys.executable, "-m", "paceline", *arguments]
        env = {"PYTHONPATH": str(SOURCE)}
        self._typed += 1
        out, err = (self.path / f"{self._typed}.{stream}" for stream in ("out", "err"))
        with out.open("w") as first, err.open("w") as second:
            process = self._lab.popen(
                self.host, argv, env=env, cwd=self._inside,
                stdin=subprocess.DEVNULL, stdout=first, stderr=second,
            )  # fmt: skip
        try:
            yield CliProcess(process, out, err)
        finally:
            process.kill()
            process.wait()

    def typed(self, *arguments: str, code: int = 0) -> str:
        """Runs ``paceline WORDS`` to its end, with the expected status; returns both outputs."""
        with self.typing(*arguments) as command:
            assert command.ended() == code, (arguments, command.said())
        return command.said()


@dataclass(frozen=True)
class CliProcess:
    """A running or finished command."""

    process: subprocess.Popen[bytes]
    out: Path
    err: Path

    def said(self) -> str:
        return self.out.read_text() + self.err.read_text()

    def ended(self) -> int:
        """Waits for the end; returns the exit status."""
        try:
            return self.process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.said()) from None


@pytest.fixture
def client(site: Site) -> Iterator[Client]:
    """The folder in which runs are started. Heals that machine's network afterwards."""
    yield Client(site, LAUNCHING, "project")
    site.lab.heal()


@pytest.fixture
def second_client(site: Site, tmp_path: Path) -> Client:
    """A new folder with a host file, on a machine on which no run was started."""
    return Client(site, OBSERVER, tmp_path.name)


def kill_launching_machine(site: Site) -> None:
    """Kills all processes of the machine that started a run, and unplugs its network."""
    for pid, _ in site.lab.processes(LAUNCHING):
        os.kill(pid, signal.SIGKILL)
    site.lab.fault("unplug", LAUNCHING)


def detached_folders(site: Site, host: str) -> list[Path]:
    """Returns the folders that detached runs have left on a host."""
    return sorted((site.lab.home(host) / ".cache/paceline/detached").glob("*"))


def test_second_machine_watches_and_stops_run(
    site: Site, client: Client, second_client: Client
) -> None:
    text = client.typed("run", "-H", "hostfile", "--detach", "--no-torch", "--run-dir", "runs/one",
                      "count.py", "9999", "0.1")  # fmt: skip
    assert "supervised on n2\n  attach:     paceline attach one\n" in text
    kill_launching_machine(site)
    assert "one @n2  running" in second_client.typed("runs", "-H", "hostfile")
    assert "supervisor: on n2" in second_client.typed("status", "-H", "hostfile")
    with second_client.typing("attach", "-H", "hostfile") as attached, \
            second_client.typing("logs", "-f", "-n", "1", "-H", "hostfile") as logs:  # fmt: skip
        for watcher in (attached, logs):
            assert eventually(lambda item=watcher: "/1] 1 out " in item.said(), TIMEOUT_S)  # type: ignore[misc]
            seen = watcher.said().count("/1] 1 out ")
            assert eventually(lambda item=watcher, n=seen: item.said().count("/1] 1 out ") > n + 9,
                              TIMEOUT_S), watcher.said()  # type: ignore[misc]  # fmt: skip
        assert "the run has not ended: its supervisor is on n2" in second_client.typed(
            "explain", code=2
        )
        second_client.typed("report", "one")
        assert (second_client.path / "runs/one/report.html").stat().st_size > 10_000
        assert "runs/one: stopped" in second_client.typed("stop", "-H", "hostfile")
        assert attached.ended() == 143, attached.said()
        assert logs.ended() == 0, logs.said()
    assert site.leftovers() == ""
    assert "stopped by SIGTERM" in attached.said()
    assert (
        json.loads((second_client.path / "runs/one/result.json").read_text())["interrupted"] == 15
    )
    rows = json.loads(second_client.typed("runs", "-H", "hostfile", "--json"))["runs"]
    assert [(row["run"], row["state"], row["here"]) for row in rows] == [("one", "stopped", True)]

    assert detached_folders(site, "n2")  # kept for the machine that started the run
    status_text = client.typed("status", code=1)
    assert "n2 since" in status_text
    assert "which cannot be asked now" in status_text
    site.lab.heal()
    assert "runs/one: stopped, exit status 143" in client.typed("status")
    assert "stopped by SIGTERM" in client.typed("explain")
    assert not detached_folders(site, "n2")
    assert site.leftovers() == ""


def test_training_finishes_without_launching_machine(
    site: Site, client: Client, second_client: Client
) -> None:
    client.typed("train", "image", "-H", "hostfile", "--detach", "--run-dir", "runs/two",
               "--epochs", "20")  # fmt: skip
    kill_launching_machine(site)
    (run_folder,) = detached_folders(site, "n2")
    kill_time = time.time()
    # by its name, as a fast host may have finished the run meanwhile
    with second_client.typing("attach", "-H", "hostfile", "two") as attached:
        assert attached.ended() == 0, attached.said()
    assert "paceline: finished: 2 ranks" in attached.said()
    record = json.loads((run_folder / "about.json").read_text())
    assert record["ended"] > kill_time
    assert site.leftovers() == ""
    site.lab.heal()
    assert "finished, exit status 0" in client.typed("status")
    assert "test accuracy" in client.typed("runs")
    for machine in (client, second_client):
        run = machine.path / "runs/two"
        assert json.loads((run / "result.json").read_text())["exit_code"] == 0
        assert list((run / "model").glob("*.safetensors")), [*run.rglob("*")]
        assert "test" in {json.loads(line)["split"] for line in (run / "metrics.jsonl").open()}
        assert (run / "report.html").stat().st_size > 10_000
    assert client.typed("logs").strip() == second_client.typed("logs").strip() != ""
    assert not detached_folders(site, "n2")


def test_run_is_lost_if_supervisor_host_dies(
    site: Site, client: Client, second_client: Client
) -> None:
    client.typed("run", "-H", "hostfile", "--detach", "--no-torch", "--run-dir", "runs/three",
               "--lease", "3", "count.py", "9999", "0.1")  # fmt: skip
    with client.typing("attach") as attached:
        assert eventually(lambda: "/1] 1 out " in attached.said(), TIMEOUT_S)
        site.lab.fault("power-off", "n2")
        assert eventually(lambda: not site.lab.processes("n3"), TIMEOUT_S)  # the lease has ended
        assert not site.lab.listeners("n3")
        assert "n2 could not be asked" in second_client.typed("runs", "-H", "hostfile")
        status_text = client.typed("status", code=1)
        assert "the run is on n2 since" in status_text
        assert "which cannot be asked now" in status_text
        site.lab.heal()
        assert attached.ended() == 1, attached.said()
    assert "runs/three: lost" in attached.said()
    assert "runs/three: lost" in client.typed("status")
    assert "the supervisor was killed or its host n2 restarted" in client.typed("explain")
    rows = json.loads(client.typed("runs", "--json"))["runs"]
    assert {row["run"]: row["state"] for row in rows}["three"] == "lost"
    assert " out " in client.typed("logs", "-n", "3")
    assert not detached_folders(site, "n2")
    assert site.leftovers() == ""


def test_finished_runs_are_fetched_or_pruned(
    site: Site, client: Client, second_client: Client
) -> None:
    for name in ("four", "five"):
        client.typed("run", "-H", "hostfile", "--detach", "--no-torch", "--run-dir", f"runs/{name}",
                   "count.py", "30", "0.1")  # fmt: skip
    folders = detached_folders(site, "n2")
    assert len(folders) == 2, folders
    has_ended = lambda item: json.loads((item / "about.json").read_text())["ended"] is not None  # noqa: E731
    assert eventually(lambda: all(map(has_ended, folders)), TIMEOUT_S)
    client.typed("status", "four")
    assert len(detached_folders(site, "n2")) == 1
    assert "removed from n2: five" in client.typed("runs", "--prune")
    assert (client.path / "runs/five/files/n3/counted-1.txt").is_file()
    assert not detached_folders(site, "n2")

    client.typed("run", "-H", "hostfile", "--detach", "--no-torch", "--run-dir", "runs/six",
               "count.py", "9999", "0.1")  # fmt: skip
    assert "six @n2" in second_client.typed(
        "runs", "-H", "hostfile", "--prune"
    )  # the run continues
    (run_folder,) = detached_folders(site, "n2")
    second_client.typed("stop", "-H", "hostfile")
    assert has_ended(run_folder)
    assert "removed from n2: six" in second_client.typed("runs", "-H", "hostfile", "--prune")
    assert not detached_folders(site, "n2")
    error_text = client.typed("status", "six", code=1)
    assert "n2 has no run" in error_text
