"""Tests detached runs: they need neither the command that started them nor its machine."""

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
import venv
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
    """Returns the folders that runs have left on their supervisor's host."""
    return sorted((site.lab.home(host) / ".cache/paceline/detached").glob("*"))


def folder_of(site: Site, host: str, run: Path) -> Path:
    """Returns a run's folder on its supervisor's host, as recorded in its local run directory."""
    location = json.loads((run / "detached.json").read_text())
    assert location["host"] == host
    assert (
        location["folder"]
        == f"{site.lab.home_inside()}/.cache/paceline/detached/{location['run_id']}"
    )
    return site.lab.home(host) / ".cache/paceline/detached" / location["run_id"]


def logins(site: Site, host: str) -> list[str]:
    return [line for _, line in site.lab.processes(host) if line.startswith("sshd: ")]


def ended(folder: Path) -> dict[str, Any]:
    """Waits for the run's end; returns the content of about.json."""
    record = lambda: json.loads((folder / "about.json").read_text())  # noqa: E731
    assert eventually(lambda: record()["ended"] is not None), (
        folder / "run/screen.txt"
    ).read_text()
    final: dict[str, Any] = record()
    return final


def test_detached_run_finishes_without_launcher(site: Site) -> None:
    arguments = ("--detach", "--no-torch", "--env", "T_TOKEN", "--max-restarts", "1")
    detached = site.run(*arguments, "member.py", "7", "fails", "1", env={"T_TOKEN": SECRET})
    assert detached.code == 0, detached.err
    assert "continues without this command, supervised on n1\n" in detached.err
    assert f"  attach:     paceline attach {detached.directory}\n" in detached.err
    folder = folder_of(site, "n1", detached.directory)
    record = json.loads((folder / "about.json").read_text())
    assert record["ended"] is None
    assert record["hosts"] == ["n1", "n2", "n3"]
    assert folder.stat().st_mode & 0o777 == 0o700
    # wait until all SSH sessions have ended: the launching machine has no connection to the lab
    for host in ("n1", "n2", "n3"):
        assert eventually(lambda host=host: not logins(site, host))  # type: ignore[misc]
        for _, line in site.lab.processes(host):
            assert SECRET not in line
    record = ended(folder)
    assert record["exit_code"] == 0
    result = json.loads((folder / "run/result.json").read_text())
    assert result["exit_code"] == 0
    assert result["recoveries"]["count"] == 1  # the failure of one rank was recovered
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


def test_sends_data_before_detaching(site: Site, tmp_path: Path) -> None:
    """Data are sent once from here to the supervisor's host, and from there to the other hosts."""
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "1.png").write_bytes(b"one")
    (site.project / "see.py").write_text(
        "import os, time, pathlib as p\nfile = p.Path(os.environ['PACELINE_DATA_DIR'], '1.png')\n"
        "look = lambda: print(file.read_text(), flush=True)\nlook(); time.sleep(3); look()\n"
    )
    arguments = ("--detach", "--keep-results", "9d", "--no-torch", "--data", str(photos), "see.py")
    detached = site.run(*arguments)
    assert detached.code == 0, detached.err
    assert (
        detached.err.count("sending data: 0 of 1 MiB") == 2
    )  # once to n1, and once from n1 to others
    (photos / "1.png").unlink()
    folder = folder_of(site, "n1", detached.directory)
    record = ended(folder)
    assert (record["exit_code"], record["keep_s"]) == (0, 9 * 86400)
    for rank in range(3):
        assert (folder / f"run/logs/n{rank + 1}/{rank}.log").read_text() == "one\none\n"
    assert site.leftovers() == ""


def test_concurrent_runs_with_different_supervisors(site: Site) -> None:
    arguments = ("--detach", "--no-torch", "count.py", "60", "0.1")
    first = site.run(*arguments)
    second = site.run("--supervisor", "n2", *arguments)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    there = [folder_of(site, "n1", first.directory), folder_of(site, "n2", second.directory)]
    assert [ended(folder)["exit_code"] for folder in there] == [0, 0]
    for folder in there:
        plan = json.loads((folder / "run/plan.json").read_text())
        assert {node["code"] for node in plan["nodes"]} == {"shipped"}
        assert "rank" not in (folder / "supervisor.log").read_text()
        logs = [folder / f"run/logs/n{rank + 1}/{rank}.log" for rank in range(3)]
        assert [log.read_text().count(" out ") for log in logs] == [60] * 3
        # files that ranks wrote beside the code have arrived in the run's folder there
        assert (folder / "run/files/n3/counted-2.txt").is_file()
    assert site.leftovers() == ""


def test_failed_start_is_reported_to_launcher(site: Site) -> None:
    (site.project / "broken.py").write_text("import nothing_of_that_name\n")
    baseline = [folders(site, host) for host in site.lab.names]
    detached = site.run("--detach", "--no-torch", "broken.py")
    assert detached.code == 1
    assert "ModuleNotFoundError: No module named 'nothing_of_that_name'" in detached.err
    assert f'File "{site.project}/broken.py", line 1' in detached.err
    assert detached.json("result.json")["exit_code"] == 1
    assert (detached.directory / "logs/n3/2.log").exists()
    assert not (detached.directory / "detached.json").exists()

    site.lab.fault("unplug", "n3")
    try:
        unplugged = site.run("--detach", "--no-torch", "tell.py")
    finally:
        site.lab.heal()
    assert unplugged.code == 1
    assert "cannot log in to 1 of 3 hosts: n3" in unplugged.err
    assert "cannot log in" in unplugged.json("result.json")["error"]
    assert site.leftovers() == ""
    assert [folders(site, host) for host in site.lab.names] == baseline


def test_rejects_unreachable_supervisor(site: Site) -> None:
    site.lab.fault("drop", "n1", "all-ephemeral")
    try:
        detached = site.run("--detach", "--no-torch", "tell.py")
    finally:
        site.lab.heal()
    assert detached.code == 1
    assert "n2, n3 cannot reach the supervisor on n1" in detached.err
    assert "--supervisor HOST" in detached.err
    assert site.leftovers() == ""


def test_supervisor_needs_no_packages(site: Site) -> None:
    """Its host has only the standard library; what else it imports is sent there."""
    for host in site.lab.names:
        venv.create(site.lab.home(host) / "bare", clear=True)
    bare = ("--no-torch", "--python", f"{site.lab.home_inside()}/bare/bin/python")
    refused = [
        site.run(*bare, "--iface", "eth9", *detach, "tell.py") for detach in ((), ("--detach",))
    ]
    assert [ended.code for ended in refused] == [2, 2], refused[1].err
    for ended_start in refused:
        assert "eth9 was asked for, but n1 has no usable address on it\n" in ended_start.err
    assert "Traceback" not in refused[1].err

    (site.project / "late.py").write_text(
        "import os, time\ntime.sleep(5)\nif os.environ['RANK'] == '1':\n    import no_such\n"
    )
    detached = site.run("--detach", *bare, "--report", "late.py")
    assert detached.code == 0, detached.err
    folder = folder_of(site, "n1", detached.directory)
    assert ended(folder)["exit_code"] == 1
    screen = (folder / "run/screen.txt").read_text()
    assert "rank 1 on n2: Python has no module no_such" in screen
    assert "paceline/" not in screen  # no traceback of its own
    assert (folder / "run/report.html").exists()
    assert (folder / "supervisor.log").read_text() == ""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_cancelled_start_cleans_up(site: Site, signum: int) -> None:
    baseline = folders(site, "n1")
    for host in site.lab.names:  # keeps all ranks from starting
        (site.lab.home(host) / "activate.sh").write_text("touch ~/activates; sleep 600\n")
    arguments = ("--detach", "--no-torch", "--activate", "~/activate.sh", "member.py", "40")
    marker = site.lab.home("n3") / "activates"
    with site.start(*arguments) as launch:
        assert eventually(marker.exists), launch.err
        assert len(folders(site, "n1")) > len(baseline)
        marker.unlink()
        launch.signal(signum)
        launch.end()
    assert launch.process.returncode == (130 if signum == signal.SIGINT else -9), launch.err
    assert site.leftovers() == ""
    assert folders(site, "n1") == baseline


def test_detached_run_continues_after_lost_node(site: Site) -> None:
    arguments = ("--detach", "--no-torch", "--nnodes", "1:3", "--lease", "4", "member.py", "9")
    detached = site.run(*arguments)
    assert detached.code == 0, detached.err
    folder = folder_of(site, "n1", detached.directory)
    site.lab.fault("power-off", "n3")
    try:
        assert ended(folder)["exit_code"] == 0
    finally:
        site.lab.heal()
    screen = (folder / "run/screen.txt").read_text()
    assert "n3" in screen
    assert "paceline: finished" in screen


def test_hosts_save_checkpoint_if_supervisor_dies(site: Site) -> None:
    """No supervisor is left to coordinate a recovery: each host saves to its own disk."""
    steps = "250"
    reference = site.run("outlive.py", steps, hosts="n1")  # the result is the same on one host
    assert reference.code == 0, reference.err
    detached = site.run("--detach", "--encrypt", "outlive.py", steps)
    assert detached.code == 0, detached.err
    log_file = folder_of(site, "n1", detached.directory) / "run/logs/n1/0.log"
    assert eventually(lambda: log_file.exists() and "step 60\n" in log_file.read_text())
    site.lab.fault("power-off", "n1")
    try:
        assert eventually(lambda: not any("rank" in line for host in ("n2", "n3")
                                          for _, line in site.lab.processes(host)))  # fmt: skip
        manifests = ".cache/paceline/runs/*/checkpoints/*/manifest.json"
        kept = [int(entry.parent.name) for host in ("n2", "n3")
                for entry in site.lab.home(host).glob(manifests)]  # fmt: skip
    finally:
        site.lab.heal()
    final_step = max(
        int(line.split()[1])
        for line in log_file.read_text().splitlines()
        if line.startswith("step ")
    )
    assert max(kept) >= final_step, kept
    assert max(kept) % 50, kept  # not a step at which a checkpoint was due
    rejected = site.run("--run-dir", str(detached.directory), "outlive.py", steps)
    assert rejected.code == 2
    assert f"paceline attach {detached.directory}" in rejected.err
    paceline("attach", "--lines", str(detached.directory), cwd=site.project)
    ended = site.run("--run-dir", str(detached.directory), "outlive.py", steps)
    assert ended.code == 0, ended.err
    assert detached.events("resumed")[-1]["step"] == max(kept)
    assert largest_difference(reference.directory, detached.directory) < 1e-10


def test_repeats_final_steps_if_model_is_lost(site: Site) -> None:
    """All ranks have ended well, but no other host has the model: the last steps are repeated."""
    large = ("outlive.py", "24", "0", "60000")
    with site.start("--nnodes", "2:3", *large) as launch:
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
    reference = site.run(*large, hosts="n1")
    assert largest_difference(reference.directory, ended.directory) < 1e-10


def test_keep_stays_attached_until_end(site: Site) -> None:
    kept = site.run("--keep", "--no-torch", "count.py", "20", "0.1")
    assert kept.code == 0, kept.err
    assert "paceline: finished: 3 ranks" in kept.err
    assert kept.json("result.json")["exit_code"] == 0
    assert (kept.directory / "logs/n3/2.log").read_text().count(" out ") == 20
    assert kept.json("detached.json")["run_id"] not in [entry.name for entry in folders(site, "n1")]
    assert site.leftovers() == ""


@contextlib.contextmanager
def on_terminal(site: Site, argv: list[str]) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Runs a command on a new terminal; yields the process and the terminal's other end."""
    master_fd, terminal_fd = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(SOURCE), "TERM": "xterm"}
    process = subprocess.Popen(
        argv, env=env, cwd=site.project, stdin=terminal_fd, stdout=terminal_fd, stderr=terminal_fd,
        start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(terminal_fd)
    try:
        yield process, master_fd
    finally:
        process.kill()
        process.wait()
        with contextlib.suppress(OSError):
            os.close(master_fd)


def read_until(fd: int, text: bytes, patience: float = TIMEOUT_S) -> bytes:
    """Reads a terminal until a text appears, the terminal is closed, or the time is over."""
    output, deadline = b"", time.monotonic() + patience
    while text not in output and select.select([fd], [], [], deadline - time.monotonic())[0]:
        try:
            output += os.read(fd, 1 << 16)
        except OSError:
            break
    return output


def test_kept_run_survives_ctrl_z_and_closed_terminal(site: Site) -> None:
    run, paceline = site.fresh(), [sys.executable, "-m", "paceline"]
    arguments = ["--keep", "--screen", "lines", "--no-torch", "--run-dir", str(run)]
    with on_terminal(site, site.argv(*arguments, "count.py", "9999", "0.1")) as (kept, terminal):
        output = read_until(terminal, b"Ctrl-Z leaves it running")
        assert b"Ctrl-Z leaves it running" in output, output
        os.write(terminal, b"\x1a")
        output = read_until(terminal, b"to attach again: paceline attach")
        assert kept.wait(TIMEOUT_S) == 0, output
    folder = folder_of(site, "n1", run)
    log = folder / "run/logs/n3/2.log"
    baseline = log.stat().st_size
    assert eventually(lambda: log.stat().st_size > baseline)
    with on_terminal(site, [*paceline, "attach", "--lines", str(run)]) as (reattached, terminal):
        assert b" out " in read_until(terminal, b" out ")
        os.close(terminal)
        reattached.wait(TIMEOUT_S)
    baseline = log.stat().st_size
    assert eventually(lambda: log.stat().st_size > baseline)
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    stopped = subprocess.run([*paceline, "stop", str(run)], env=env, cwd=site.project, check=False,
                             capture_output=True, text=True, timeout=TIMEOUT_S)  # fmt: skip
    assert stopped.returncode == 0, stopped.stderr
    assert eventually(lambda: not folder.exists())  # the closed window's process may be exiting
    assert site.leftovers() == ""


def test_output_flood_does_not_fill_supervisor_disk(site: Site) -> None:
    there = f"{site.lab.home_inside()}/.cache/paceline/detached"
    floods = "import os\nfor _ in range(4000): os.write(1, b'x' * 9999 + b'\\n')\n"
    (site.project / "floods.py").write_text(floods)
    mount = f"mkdir -p {there} && mount -t tmpfs -o size=24m,mode=700 none {there}"
    site.lab.exec("n1", ["sh", "-c", mount], check=True)
    try:
        detached = site.run("--detach", "--no-torch", "floods.py")
        assert detached.code == 0, detached.err
        watched = paceline("attach", "--lines", str(detached.directory), cwd=site.project)
        assert watched.returncode == 0, watched.stderr
        assert detached.json("result.json")["exit_code"] == 0
        logs = detached.directory.glob("logs/*/*.log")
        assert 5e6 < sum(log.stat().st_size for log in logs) < 24e6  # the ranks printed 120 MB
        assert site.leftovers() == ""
    finally:
        site.lab.exec("n1", ["umount", "-l", there])


# --- runs on this machine


def test_detach_on_local_machine(tmp_path: Path) -> None:
    home = tmp_path / "home of mine"
    home.mkdir()
    (tmp_path / "work.py").write_text(
        "import os, time\nprint('at', os.getcwd(), flush=True)\ntime.sleep(4)\n"
    )
    env = {**os.environ, "HOME": str(home), "PYTHONPATH": str(SOURCE)}
    env.pop("XDG_CACHE_HOME", None)
    argv = [sys.executable, "-m", "paceline", "run", "--detach", "--no-torch", "--run-dir",
            "runs/one", "work.py"]  # fmt: skip
    completed = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True,
                          timeout=TIMEOUT_S, text=True, check=False)  # fmt: skip
    assert completed.returncode == 0, completed.stderr
    assert "supervised on this machine\n  attach:     paceline attach one\n" in completed.stderr
    run = tmp_path / "runs/one"
    assert not (run / "result.json").exists()
    assert eventually((run / "result.json").exists)
    assert json.loads((run / "result.json").read_text())["exit_code"] == 0
    kept = home / ".cache/paceline/detached"
    assert eventually(lambda: not list(kept.iterdir()))  # its results have been fetched
    assert f"at {tmp_path}" in (run / "screen.txt").read_text()
