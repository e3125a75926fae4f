"""Connections that break while both ends live: nothing of the job is lost, nothing comes twice."""

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
LONG_LEASE = ("--lease", str(2 * TIMEOUT_S))  # nobody here waits to its end
SIZE = 40 << 20  # bytes, so that some seconds pass on a link that is made slow
COPIES = """
import os
from pathlib import Path
content = Path("sent.bin").read_bytes()
Path(os.environ["RANK"] + ".bin").write_bytes(content[::-1])
"""


@pytest.fixture(scope="module")
def apart(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The hosts do not see the project."""
    folder = tmp_path_factory.mktemp("connections")
    return Site(new_lab(hosts=2), project_at(folder / "project"))


@pytest.fixture
def site(apart: Site) -> Iterator[Site]:
    yield apart
    apart.lab.heal()
    assert apart.leftovers() == ""


@contextlib.contextmanager
def now_and_then(
    act: Callable[[], object], times: int, within_s: float, seed: int
) -> Iterator[None]:
    """Does it so often, at random moments of the next seconds."""
    moments = sorted(random.Random(seed).uniform(0, within_s) for _ in range(times))
    over = threading.Event()
    begun = time.monotonic()

    def run() -> None:
        for moment in moments:
            if over.wait(max(0.0, begun + moment - time.monotonic())):
                return
            act()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def killer(site: Site) -> Callable[[], object]:
    """Kills a session, if there is one just now."""
    chosen = random.Random(4)
    return lambda: killed(site, chosen.choice(["n1", "n2"]))


def killed(site: Site, host: str) -> bool:
    """Whether there was one."""
    with contextlib.suppress(LabError):  # it is just being dialled again
        site.lab.fault("kill", host, SESSION)
        return True
    return False


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def events_of(launch: Launch) -> str:
    file = launch.directory / "events.jsonl"
    return file.read_text() if file.exists() else ""


def assert_all_said(ended: Ended, lines: int = LINES, width: int = 20) -> None:
    """What both ranks wrote, in their logs and on the screen."""
    assert ended.code == 0, ended.err
    for rank, host in ((0, "n1"), (1, "n2")):
        log = (ended.directory / "logs" / host / f"{rank}.log").read_text().splitlines()
        out = [line.split(f"{rank} out ")[1] for line in log if f"{rank} out " in line]
        assert out == [f"{number} {'x' * width}" for number in range(lines)]
        err = [line for line in log if f"{rank} err " in line]
        assert len(err) == len(range(0, lines, 7))
        assert len(log) == len(out) + len(err)
        assert ended.out.count(f"{rank} out ") == lines


def test_sessions_that_are_killed_at_any_moment(site: Site) -> None:
    with site.start("--no-torch", *LONG_LEASE, "count.py", str(LINES), str(PAUSE_S)) as launch:
        launch.wait_for("out 0 ", times=2)
        with now_and_then(killer(site), 20, LINES * PAUSE_S, seed=1):
            ended = launch.end(TEST_LIMIT_S)
    assert_all_said(ended)
    restored = ended.events("connection restored")
    print([event["seconds"] for event in restored])
    assert restored
    assert "was lost; dialled again after" in ended.err
    assert site.leftovers() == ""


def test_sessions_that_are_killed_while_files_travel(site: Site) -> None:
    """From the first login to the last goodbye."""
    content = random.Random(2).randbytes(SIZE)
    (site.project / "sent.bin").write_bytes(content)
    (site.project / "mirror.py").write_text(COPIES)
    for host in site.lab.names:
        site.lab.fault("slow", host, "100mbit")
    with site.start("--no-torch", *LONG_LEASE, "mirror.py") as launch:
        assert eventually(lambda: "connected" in events_of(launch))
        with now_and_then(killer(site), 60, 15.0, seed=3):
            coming = launch.directory / ".paceline-incoming"
            assert eventually(lambda: any(coming.glob("*"))), launch.err
            assert eventually(lambda: killed(site, "n1")), launch.err
            ended = launch.end(TEST_LIMIT_S)
    (site.project / "sent.bin").unlink()
    assert ended.code == 0, ended.err
    for came in (site.project / "0.bin", ended.directory / "files/n2/1.bin"):
        assert came.read_bytes() == content[::-1]
    assert ended.events("connection restored")
    assert site.leftovers() == ""


@pytest.mark.parametrize("seconds", [1.0, 3.0])
def test_packets_that_are_dropped_for_a_while(site: Site, seconds: float) -> None:
    lines = 900
    with site.start("--no-torch", *LONG_LEASE, "count.py", str(lines), str(PAUSE_S)) as launch:
        launch.wait_for("out 0 ", times=2)
        site.lab.fault("drop", "n2", "all")
        time.sleep(seconds)
        site.lab.heal()
        ended = launch.end(TEST_LIMIT_S)
    assert_all_said(ended, lines)


def test_ssh_is_killed_on_our_side(site: Site) -> None:
    with site.start("--no-torch", *LONG_LEASE, "count.py", "300", str(PAUSE_S)) as launch:
        launch.wait_for("out 9 ", times=2)
        for _ in range(2):
            for pid in children(launch.process.pid):
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.5)
        ended = launch.end(TEST_LIMIT_S)
    assert_all_said(ended, 300)
    assert len(ended.events("connection restored")) >= 2


def test_the_launcher_is_killed_while_it_dials(site: Site) -> None:
    with site.start("--no-torch", "count.py", "100000", str(PAUSE_S)) as launch:
        launch.wait_for("out 9 ", times=2)
        site.lab.fault("kill", "n1", SESSION)
        site.lab.fault("kill", "n2", SESSION)
        launch.kill()
        assert eventually(site.clean)


@pytest.mark.parametrize("what", ["launcher", "import select,sys;"])
def test_what_ends_at_once_also_does_so_on_another_login(site: Site, what: str) -> None:
    with site.start("--no-torch", *LONG_LEASE, "count.py", "100000", str(PAUSE_S)) as launch:
        launch.wait_for("out 9 ", times=2)
        site.lab.fault("kill", "n2", SESSION)
        assert eventually(lambda: "connection restored" in events_of(launch))
        if what == "launcher":
            launch.kill()
        else:
            site.lab.fault("kill", "n2", what)
            ended = launch.end(TEST_LIMIT_S)
            assert ended.code != 0
            assert "n2" in ended.err
            print(ended.err)
    assert site.leftovers() == ""
