"""Tests lost connections between running processes: no output is lost or duplicated."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launches import TEST_LIMIT_S, TIMEOUT_S, Ended, Launch, Site, eventually, project_at

from paceline.spec.errors import LabError

pytestmark = pytest.mark.lab

LINES, PAUSE_S = 800, 0.01
SESSION = "sshd: .*notty"
LONG_LEASE = ("--lease", str(2 * TIMEOUT_S))  # longer than the tests wait
SIZE = 40 << 20  # bytes; takes some seconds on a slow link
COPIES = """
import os
from pathlib import Path
content = Path("sent.bin").read_bytes()
Path(os.environ["RANK"] + ".bin").write_bytes(content[::-1])
"""


@pytest.fixture(scope="module")
def unshared_site(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The hosts do not see the project."""
    folder = tmp_path_factory.mktemp("connections")
    return Site(new_lab(hosts=2), project_at(folder / "project"))


@pytest.fixture
def site(unshared_site: Site) -> Iterator[Site]:
    yield unshared_site
    unshared_site.lab.heal()
    assert unshared_site.leftovers() == ""


@contextlib.contextmanager
def at_random_times(
    act: Callable[[], object], times: int, within_s: float, seed: int
) -> Iterator[None]:
    """Calls a function several times, at random moments of the next seconds."""
    moments = sorted(random.Random(seed).uniform(0, within_s) for _ in range(times))
    finished = threading.Event()
    start_time = time.monotonic()

    def run() -> None:
        for moment in moments:
            if finished.wait(max(0.0, start_time + moment - time.monotonic())):
                return
            act()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()


def session_killer(site: Site) -> Callable[[], object]:
    """Returns a function that kills the SSH session of a random host, if it has one."""
    rng = random.Random(4)
    return lambda: kill_session(site, rng.choice(["n1", "n2"]))


def kill_session(site: Site, host: str) -> bool:
    """Kills a host's SSH session; returns whether there was one."""
    with contextlib.suppress(LabError):  # the session is just being reconnected
        site.lab.fault("kill", host, SESSION)
        return True
    return False


def children(pid: int) -> list[int]:
    return [
        int(pid_text) for pid_text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    ]


def events_of(launch: Launch) -> str:
    file = launch.directory / "events.jsonl"
    return file.read_text() if file.exists() else ""


def assert_complete_output(ended: Ended, lines: int = LINES, width: int = 20) -> None:
    """Checks that the logs and the screen have all lines of both ranks."""
    assert ended.code == 0, ended.err
    for rank, host in ((0, "n1"), (1, "n2")):
        log = (ended.directory / "logs" / host / f"{rank}.log").read_text().splitlines()
        out = [line.split(f"{rank} out ")[1] for line in log if f"{rank} out " in line]
        assert out == [f"{number} {'x' * width}" for number in range(lines)]
        err = [line for line in log if f"{rank} err " in line]
        assert len(err) == len(range(0, lines, 7))
        assert len(log) == len(out) + len(err)
        assert ended.out.count(f"{rank} out ") == lines


def test_survives_killed_sessions(site: Site) -> None:
    with site.start("--no-torch", *LONG_LEASE, "count.py", str(LINES), str(PAUSE_S)) as launch:
        launch.wait_for("out 0 ", times=2)
        with at_random_times(session_killer(site), 20, LINES * PAUSE_S, seed=1):
            ended = launch.end(TEST_LIMIT_S)
    assert_complete_output(ended)
    restored = ended.events("connection restored")
    print([event["seconds"] for event in restored])
    assert restored
    assert "was lost; dialled again after" in ended.err
    assert site.leftovers() == ""


def test_survives_killed_sessions_during_transfer(site: Site) -> None:
    """Kills sessions from the first login to the end of the run."""
    content = random.Random(2).randbytes(SIZE)
    (site.project / "sent.bin").write_bytes(content)
    (site.project / "mirror.py").write_text(COPIES)
    for host in site.lab.names:
        site.lab.fault("slow", host, "100mbit")
    with site.start("--no-torch", *LONG_LEASE, "mirror.py") as launch:
        assert eventually(lambda: "connected" in events_of(launch))
        with at_random_times(session_killer(site), 60, 15.0, seed=3):
            incoming = launch.directory / ".paceline-incoming"
            assert eventually(lambda: any(incoming.glob("*"))), launch.err
            assert eventually(lambda: kill_session(site, "n1")), launch.err
            ended = launch.end(TEST_LIMIT_S)
    (site.project / "sent.bin").unlink()
    assert ended.code == 0, ended.err
    for mirrored in (site.project / "0.bin", ended.directory / "files/n2/1.bin"):
        assert mirrored.read_bytes() == content[::-1]
    assert ended.events("connection restored")
    assert site.leftovers() == ""


@pytest.mark.parametrize("seconds", [1.0, 3.0])
def test_survives_dropped_packets(site: Site, seconds: float) -> None:
    lines = 900
    with site.start("--no-torch", *LONG_LEASE, "count.py", str(lines), str(PAUSE_S)) as launch:
        launch.wait_for("out 0 ", times=2)
        site.lab.fault("drop", "n2", "all")
        time.sleep(seconds)
        site.lab.heal()
        ended = launch.end(TEST_LIMIT_S)
    assert_complete_output(ended, lines)


def test_survives_killed_ssh_client(site: Site) -> None:
    with site.start("--no-torch", *LONG_LEASE, "count.py", "300", str(PAUSE_S)) as launch:
        launch.wait_for("out 9 ", times=2)
        for _ in range(2):
            for pid in children(launch.process.pid):
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.5)
        ended = launch.end(TEST_LIMIT_S)
    assert_complete_output(ended, 300)
    assert len(ended.events("connection restored")) >= 2


def test_ends_job_if_launcher_dies_while_reconnecting(site: Site) -> None:
    with site.start("--no-torch", "count.py", "100000", str(PAUSE_S)) as launch:
        launch.wait_for("out 9 ", times=2)
        site.lab.fault("kill", "n1", SESSION)
        site.lab.fault("kill", "n2", SESSION)
        launch.kill()
        assert eventually(site.clean)


@pytest.mark.parametrize("victim", ["launcher", "import select,sys;"])
def test_killed_launcher_or_agent_ends_job_after_reconnect(site: Site, victim: str) -> None:
    with site.start("--no-torch", *LONG_LEASE, "count.py", "100000", str(PAUSE_S)) as launch:
        launch.wait_for("out 9 ", times=2)
        site.lab.fault("kill", "n2", SESSION)
        assert eventually(lambda: "connection restored" in events_of(launch))
        if victim == "launcher":
            launch.kill()
        else:
            site.lab.fault("kill", "n2", victim)
            ended = launch.end(TEST_LIMIT_S)
            assert ended.code != 0
            assert "n2" in ended.err
            print(ended.err)
    assert site.leftovers() == ""
