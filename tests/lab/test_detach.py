"""Runs that are left: they need neither the command that started them nor its machine."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launches import SOURCE, TIMEOUT_S, Site, eventually, paceline, project_at
from transports import largest_difference

pytestmark = pytest.mark.lab
SECRET = "hunter2-0123456789-abcdef"


@pytest.fixture(scope="module")
def site(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The hosts do not see the project."""
    site = Site(new_lab(hosts=3), project_at(tmp_path_factory.mktemp("left") / "project"))
    yield site
    assert site.leftovers() == ""


def folders(site: Site, host: str) -> list[Path]:
    """What runs have left on their supervisor's host."""
    return sorted((site.lab.home(host) / ".cache/paceline/detached").glob("*"))


def folder_of(site: Site, host: str, run: Path) -> Path:
    """A run's folder on its supervisor's host, as its own folder leads there."""
    back = json.loads((run / "detached.json").read_text())
    assert back["host"] == host
    assert back["folder"] == f"{site.lab.home_inside()}/.cache/paceline/detached/{back['run_id']}"
    return site.lab.home(host) / ".cache/paceline/detached" / back["run_id"]


def logins(site: Site, host: str) -> list[str]:
    return [line for _, line in site.lab.processes(host) if line.startswith("sshd: ")]


def ended(folder: Path) -> dict[str, Any]:
    """What about.json says at the end."""
    about = lambda: json.loads((folder / "about.json").read_text())  # noqa: E731
    assert eventually(lambda: about()["ended"] is not None), (folder / "run/screen.txt").read_text()
    found: dict[str, Any] = about()
    return found


def test_a_run_goes_on_without_the_machine_that_started_it(site: Site) -> None:
    words = ("--detach", "--no-torch", "--env", "T_TOKEN", "--max-restarts", "1")
    left = site.run(*words, "member.py", "7", "fails", "1", env={"T_TOKEN": SECRET})
    assert left.code == 0, left.err
    assert "continues without this command, supervised on n1\n" in left.err
    assert f"  attach:     paceline attach {left.directory}\n" in left.err
    folder = folder_of(site, "n1", left.directory)
    about = json.loads((folder / "about.json").read_text())
    assert about["ended"] is None
    assert about["hosts"] == ["n1", "n2", "n3"]
    assert folder.stat().st_mode & 0o777 == 0o700
    # nobody logs in any more, and the folder's own machine hears nothing of the lab
    for host in ("n1", "n2", "n3"):
        assert eventually(lambda host=host: not logins(site, host))  # type: ignore[misc]
        for _, line in site.lab.processes(host):
            assert SECRET not in line
    about = ended(folder)
    assert about["exit_code"] == 0
    result = json.loads((folder / "run/result.json").read_text())
    assert result["exit_code"] == 0
    assert result["recoveries"]["count"] == 1  # a rank's failure on the way was made good
    screen = (folder / "run/screen.txt").read_text()
    assert "boom" in screen
    assert "paceline: finished: 3 ranks" in screen
    for file in filter(Path.is_file, folder.rglob("*")):
        assert SECRET.encode() not in file.read_bytes(), file
    assert sorted(path.name for path in folder.iterdir()) == [
        "about.json", "run", "supervisor.log"
    ]  # fmt: skip
    assert (folder / "supervisor.log").read_text() == ""
    assert site.leftovers() == ""


def test_data_are_in_their_places_before_it_is_left(site: Site, tmp_path: Path) -> None:
    """Sent once from here, to the supervisor's host, and from there to the others."""
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "1.png").write_bytes(b"one")
    (site.project / "see.py").write_text(
        "import os, time, pathlib as p\nfile = p.Path(os.environ['PACELINE_DATA_DIR'], '1.png')\n"
        "look = lambda: print(file.read_text(), flush=True)\nlook(); time.sleep(3); look()\n"
    )
    words = ("--detach", "--keep-results", "9d", "--no-torch", "--data", str(photos), "see.py")
    left = site.run(*words)
    assert left.code == 0, left.err
    assert left.err.count("sending data: 0 of 1 MiB") == 2  # to n1, and by it
    (photos / "1.png").unlink()
    folder = folder_of(site, "n1", left.directory)
    about = ended(folder)
    assert (about["exit_code"], about["keep_s"]) == (0, 9 * 86400)
    for rank in range(3):
        assert (folder / f"run/logs/n{rank + 1}/{rank}.log").read_text() == "one\none\n"
    assert site.leftovers() == ""


def test_two_at_once_and_another_supervisor(site: Site) -> None:
    words = ("--detach", "--no-torch", "count.py", "60", "0.1")
    first = site.run(*words)
    second = site.run("--supervisor", "n2", *words)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    there = [folder_of(site, "n1", first.directory), folder_of(site, "n2", second.directory)]
    assert [ended(folder)["exit_code"] for folder in there] == [0, 0]
    for folder in there:
        plan = json.loads((folder / "run/plan.json").read_text())
        assert {node["code"] for node in plan["nodes"]} == {"shipped"}
        assert "rank" not in (folder / "supervisor.log").read_text()
        logs = [folder / f"run/logs/n{rank + 1}/{rank}.log" for rank in range(3)]
        assert [log.read_text().count(" out ") for log in logs] == [60] * 3
        # what ranks wrote beside the code has come to the run's folder there
        assert (folder / "run/files/n3/counted-2.txt").is_file()
    assert site.leftovers() == ""


def test_a_start_that_fails_is_that_of_a_run_that_is_attached(site: Site) -> None:
    (site.project / "broken.py").write_text("import nothing_of_that_name\n")
    before = [folders(site, host) for host in site.lab.names]
    left = site.run("--detach", "--no-torch", "broken.py")
    assert left.code == 1
    assert "ModuleNotFoundError: No module named 'nothing_of_that_name'" in left.err
    assert f'File "{site.project}/broken.py", line 1' in left.err
    assert left.json("result.json")["exit_code"] == 1
    assert (left.directory / "logs/n3/2.log").exists()
    assert not (left.directory / "detached.json").exists()

    site.lab.fault("unplug", "n3")
    try:
        unplugged = site.run("--detach", "--no-torch", "tell.py")
    finally:
        site.lab.heal()
    assert unplugged.code == 1
    assert "cannot log in to 1 of 3 hosts: n3" in unplugged.err
    assert "cannot log in" in unplugged.json("result.json")["error"]
    assert site.leftovers() == ""
    assert [folders(site, host) for host in site.lab.names] == before


def test_hosts_that_do_not_reach_the_supervisor(site: Site) -> None:
    site.lab.fault("drop", "n1", "all-ephemeral")
    try:
        left = site.run("--detach", "--no-torch", "tell.py")
    finally:
        site.lab.heal()
    assert left.code == 1
    assert "n2, n3 cannot reach the supervisor on n1" in left.err
    assert "--supervisor HOST" in left.err
    assert site.leftovers() == ""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_who_gives_the_start_up_leaves_nothing(site: Site, signum: int) -> None:
    before = folders(site, "n1")
    for host in site.lab.names:  # no rank begins before this has ended
        (site.lab.home(host) / "activate.sh").write_text("touch ~/activates; sleep 600\n")
    words = ("--detach", "--no-torch", "--activate", "~/activate.sh", "member.py", "40")
    began = site.lab.home("n3") / "activates"
    with site.start(*words) as launch:
        assert eventually(began.exists), launch.err
        assert len(folders(site, "n1")) > len(before)
        began.unlink()
        launch.signal(signum)
        launch.end()
    assert launch.process.returncode == (130 if signum == signal.SIGINT else -9), launch.err
    assert site.leftovers() == ""
    assert folders(site, "n1") == before


def test_a_node_that_is_lost_comes_back_only_where_it_can_be_dialled(site: Site) -> None:
    words = ("--detach", "--no-torch", "--nnodes", "1:3", "--lease", "4", "member.py", "9")
    left = site.run(*words)
    assert left.code == 0, left.err
    folder = folder_of(site, "n1", left.directory)
    site.lab.fault("power-off", "n3")
    try:
        assert ended(folder)["exit_code"] == 0
    finally:
        site.lab.heal()
    screen = (folder / "run/screen.txt").read_text()
    assert "n3" in screen
    assert "paceline: finished" in screen


def test_who_is_left_of_a_host_that_supervised_saves_what_it_has(site: Site) -> None:
    """Nobody is there to tell the others to train on: each host saves to its own disk."""
    steps = "250"
    undisturbed = site.run("outlive.py", steps)
    assert undisturbed.code == 0, undisturbed.err
    left = site.run("--detach", "outlive.py", steps)
    assert left.code == 0, left.err
    said = folder_of(site, "n1", left.directory) / "run/logs/n1/0.log"
    assert eventually(lambda: said.exists() and "step 60\n" in said.read_text())
    site.lab.fault("power-off", "n1")
    try:
        assert eventually(lambda: not any("rank" in line for host in ("n2", "n3")
                                          for _, line in site.lab.processes(host)))  # fmt: skip
        manifests = ".cache/paceline/runs/*/checkpoints/*/manifest.json"
        kept = [int(one.parent.name) for host in ("n2", "n3")
                for one in site.lab.home(host).glob(manifests)]  # fmt: skip
    finally:
        site.lab.heal()
    last = max(
        int(line.split()[1]) for line in said.read_text().splitlines() if line.startswith("step ")
    )
    assert max(kept) >= last, kept
    assert max(kept) % 50, kept  # no checkpoint was due
    refused = site.run("--run-dir", str(left.directory), "outlive.py", steps)
    assert refused.code == 2
    assert f"paceline attach {left.directory}" in refused.err
    paceline("attach", "--lines", str(left.directory), cwd=site.project)
    ended = site.run("--run-dir", str(left.directory), "outlive.py", steps)
    assert ended.code == 0, ended.err
    assert left.events("resumed")[-1]["step"] == max(kept)
    assert largest_difference(undisturbed.directory, left.directory) < 1e-10


def test_a_model_that_is_lost_with_its_host_on_its_way_home_is_made_again(site: Site) -> None:
    """All ranks have ended well, and nobody else has it: the last steps are done once more."""
    large = ("--nnodes", "2:3", "outlive.py", "24", "0", "60000")
    with site.start(*large) as launch:
        launch.wait_for("] step 24\n")
        site.lab.fault("slow", "n1", "4mbit")
        events = launch.directory / "events.jsonl"
        assert eventually(lambda: events.read_text().count('"rank ended"') == 3)
        site.lab.fault("power-off", "n1")
        try:
            ended = launch.end()
        finally:
            site.lab.heal()
    assert ended.code == 0, ended.err
    assert "going on with n2, n3; starting all nodes again" in ended.err
    undisturbed = site.run(*large)
    assert largest_difference(undisturbed.directory, ended.directory) < 1e-10


def test_kept_it_is_watched_to_its_end(site: Site) -> None:
    kept = site.run("--keep", "--no-torch", "count.py", "20", "0.1")
    assert kept.code == 0, kept.err
    assert "paceline: finished: 3 ranks" in kept.err
    assert kept.json("result.json")["exit_code"] == 0
    assert (kept.directory / "logs/n3/2.log").read_text().count(" out ") == 20
    assert kept.json("detached.json")["run_id"] not in [one.name for one in folders(site, "n1")]
    assert site.leftovers() == ""


@contextlib.contextmanager
def on_a_terminal(site: Site, argv: list[str]) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A command that is typed on a terminal of its own, and the other end of that."""
    ours, theirs = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(SOURCE), "TERM": "xterm"}
    process = subprocess.Popen(
        argv, env=env, cwd=site.project, stdin=theirs, stdout=theirs, stderr=theirs,
        start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(theirs)
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait()
        with contextlib.suppress(OSError):
            os.close(ours)


def shown_until(fd: int, text: bytes, patience: float = TIMEOUT_S) -> bytes:
    """What a terminal shows, until a text is there, it is closed, or it takes too long."""
    shown, until = b"", time.monotonic() + patience
    while text not in shown and select.select([fd], [], [], until - time.monotonic())[0]:
        try:
            shown += os.read(fd, 1 << 16)
        except OSError:
            break
    return shown


def test_kept_it_outlives_ctrl_z_and_the_closed_window(site: Site) -> None:
    run, paceline = site.fresh(), [sys.executable, "-m", "paceline"]
    words = ["--keep", "--screen", "lines", "--no-torch", "--run-dir", str(run)]
    with on_a_terminal(site, site.argv(*words, "count.py", "9999", "0.1")) as (kept, terminal):
        shown = shown_until(terminal, b"Ctrl-Z leaves it running")
        assert b"Ctrl-Z leaves it running" in shown, shown
        os.write(terminal, b"\x1a")
        shown = shown_until(terminal, b"to attach again: paceline attach")
        assert kept.wait(TIMEOUT_S) == 0, shown
    folder = folder_of(site, "n1", run)
    log = folder / "run/logs/n3/2.log"
    before = log.stat().st_size
    assert eventually(lambda: log.stat().st_size > before)
    with on_a_terminal(site, [*paceline, "attach", "--lines", str(run)]) as (again, terminal):
        assert b" out " in shown_until(terminal, b" out ")
        os.close(terminal)
        again.wait(TIMEOUT_S)
    before = log.stat().st_size
    assert eventually(lambda: log.stat().st_size > before)
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    stopped = subprocess.run([*paceline, "stop", str(run)], env=env, cwd=site.project, check=False,
                             capture_output=True, text=True, timeout=TIMEOUT_S)  # fmt: skip
    assert stopped.returncode == 0, stopped.stderr
    assert eventually(lambda: not folder.exists())  # who looked on from that window may be leaving
    assert site.leftovers() == ""


def test_a_flood_of_output_does_not_fill_the_supervisors_disk(site: Site) -> None:
    there = f"{site.lab.home_inside()}/.cache/paceline/detached"
    floods = "import os\nfor _ in range(4000): os.write(1, b'x' * 9999 + b'\\n')\n"
    (site.project / "floods.py").write_text(floods)
    mount = f"mkdir -p {there} && mount -t tmpfs -o size=24m,mode=700 none {there}"
    site.lab.exec("n1", ["sh", "-c", mount], check=True)
    try:
        left = site.run("--detach", "--no-torch", "floods.py")
        assert left.code == 0, left.err
        watched = paceline("attach", "--lines", str(left.directory), cwd=site.project)
        assert watched.returncode == 0, watched.stderr
        assert left.json("result.json")["exit_code"] == 0
        logs = left.directory.glob("logs/*/*.log")
        assert 5e6 < sum(log.stat().st_size for log in logs) < 24e6  # of 120 MB
        assert site.leftovers() == ""
    finally:
        site.lab.exec("n1", ["umount", "-l", there])


# --- on this machine


def test_on_this_machine_without_ssh(tmp_path: Path) -> None:
    home = tmp_path / "home of mine"
    home.mkdir()
    (tmp_path / "work.py").write_text(
        "import os, time\nprint('at', os.getcwd(), flush=True)\ntime.sleep(4)\n"
    )
    env = {**os.environ, "HOME": str(home), "PYTHONPATH": str(SOURCE)}
    env.pop("XDG_CACHE_HOME", None)
    argv = [sys.executable, "-m", "paceline", "run", "--detach", "--no-torch", "--run-dir",
            "runs/one", "work.py"]  # fmt: skip
    done = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True,
                          timeout=TIMEOUT_S, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "supervised on this machine\n  attach:     paceline attach one\n" in done.stderr
    run = tmp_path / "runs/one"
    assert not (run / "result.json").exists()
    assert eventually((run / "result.json").exists)
    assert json.loads((run / "result.json").read_text())["exit_code"] == 0
    kept = home / ".cache/paceline/detached"
    assert eventually(lambda: not list(kept.iterdir()))  # its results are at home
    assert f"at {tmp_path}" in (run / "screen.txt").read_text()
