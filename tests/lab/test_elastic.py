"""Tests plain torch scripts while nodes leave and join: node ranges, spares and restarts."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from launches import TEST_LIMIT_S, Ended, Launch, Site, eventually, healed, shared_site
from transports import PARTS, missing

pytestmark = pytest.mark.lab
LEASE = ("--lease", "5")
FRAMEWORKS = PARTS / "frameworks"


@pytest.fixture(scope="module")
def shared(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Site:
    return shared_site(new_lab, tmp_path_factory.mktemp("elastic"), hosts=3)


@pytest.fixture
def site(shared: Site) -> Iterator[Site]:
    """Heals all faults; checks that nothing runs or listens after a test."""
    for name in ("own.pt", "over"):
        (shared.project / name).unlink(missing_ok=True)
    yield from healed(shared)


def launch(site: Site, hosts: str, *args: str) -> Launch:
    directory = site.fresh()
    argv = site.argv("--run-dir", str(directory), *LEASE, *args, hosts=hosts)
    return Launch(site, argv, directory)


def script(site: Site, steps: int | str = "over", pause: float = 0.02) -> list[str]:
    return ["own_checkpoint.py", str(site.project), str(steps), str(pause)]


def finish(site: Site, job: Launch) -> Ended:
    """Lets the script end, and returns the launch's result."""
    (site.project / "over").touch()
    return job.end()


def interrupt(job: Launch) -> Ended:
    """Stops the job with Ctrl-C, and returns the launch's result."""
    job.signal(signal.SIGINT)
    ended = job.end()
    assert ended.code == 130, ended.err
    return ended


def rank_positions(text: str) -> list[str]:
    """Returns the rank and node numbers that each started rank was given."""
    return re.findall(r"began \S+ (.*), run", text)


def weights(text: str) -> list[str]:
    return re.findall(r"weights (\S+) after", text)


def test_starts_with_min_nodes_adds_late_node_survives_loss(site: Site) -> None:
    """Rank 0's host is lost: the other resumes from the script's checkpoint; the host returns."""
    site.lab.fault("power-off", "n2")
    single_node, both_nodes = "rank 0 of 1, node 0 of 1", "rank 1 of 2, node 1 of 2"
    with launch(site, "n1,n2", "--nnodes", "1:2", *script(site)) as job:
        job.wait_for(f"{single_node}, restart 0 of 0")
        assert "starting with 1 of 2 hosts, without n2 (" in job.err
        site.lab.undo("power-off", "n2")
        job.wait_for(f"{both_nodes}, restart 0 of 0")
        time.sleep(0.5)
        site.lab.fault("power-off", "n1")
        job.wait_for(f"{single_node}, restart 0 of 0", times=2)
        site.lab.undo("power-off", "n1")
        job.wait_for(f"{both_nodes}, restart 0 of 0", times=2)
        ended = finish(site, job)
    assert ended.code == 0, ended.err
    assert len(weights(ended.out)) == 1
    assert "n2 is here; starting all nodes again" in ended.err
    assert re.search(r"n1: .*; going on with n2; starting all nodes again\n", ended.err)
    assert "paceline: n1 is back; starting all nodes again\n" in ended.err
    assert rank_positions(ended.out)[-2:].count("rank 0 of 2, node 0 of 2, restart 0 of 0") == 1
    assert [part["host"] for part in ended.json("plan.json")["nodes"]] == ["n2", "n1"]


def test_spare_replaces_lost_node(site: Site) -> None:
    """The spare starts at once, because it has imported torch already."""
    with launch(site, "n1,n2,n3", "--nnodes", "2:2", *script(site)) as job:
        job.wait_for("from step 0", times=2)
        assert eventually(lambda: "forkserver" in str(site.processes().get("n3")))
        time.sleep(1)
        site.lab.fault("power-off", "n2")
        job.wait_for("[n3/1] from step")
        ended = finish(site, job)
    assert ended.code == 0, ended.err
    assert "going on with n1, n3; starting all nodes again" in ended.err


def test_names_host_whose_processes_were_killed(site: Site) -> None:
    """The other ranks fail at once, and the launcher dials the host for a while."""
    with launch(site, "n1,n2,n3", "--nnodes", "1:3", *script(site)) as job:
        job.wait_for("from step 0", times=3)
        site.lab.exec("n2", ["sh", "-c", "kill -9 -1"])
        job.wait_for("rank 1 of 2")
        ended = finish(site, job)
    assert ended.code == 0, ended.err
    assert re.search(r"n2: the connection to n2 ended.*; going on with n1, n3; start", ended.err)


def test_too_few_nodes_fail_after_waiting(site: Site) -> None:
    site.lab.fault("power-off", "n2")
    args = [*LEASE, "--nnodes", "2:3", "--wait-for-nodes", "4", *script(site, 5)]
    ended = site.run(*args, hosts="n1,n2")
    assert ended.code == 1
    assert "1 host can be reached, at least 2 are needed: n2 did not answer" in ended.err


def test_balance_weights_with_missing_host(site: Site) -> None:
    """The absent host belongs to the job, so its weight is valid, at the start and at a resume."""
    site.lab.fault("power-off", "n3")
    directory = site.fresh()
    options = ["--run-dir", str(directory), *LEASE, "--nnodes", "2:3", "-p", "1"]
    recipe = ["image", "--balance", "n1=3,n2=1,n3=1", "--global-batch", "80", "--epochs", "9999"]
    argv = site.argv(*options, *recipe, hosts="n1,n2,n3", verb="train")
    with Launch(site, argv, directory) as job:
        job.wait_for("shares of the global batch: n1 60, n2 20")
        site.lab.undo("power-off", "n3")
        job.wait_for("shares of the global batch: n1 48, n2 16, n3 16")
        ended = interrupt(job)
    assert "starting with 2 of 3 hosts, without n3 (" in ended.err
    site.lab.fault("power-off", "n2")
    with Launch(site, argv, directory) as job:
        job.wait_for("shares of the global batch: n1 60, n3 20")
        ended = interrupt(job)
    assert "resumed" in ended.out + ended.err


def test_remaining_ranks_keep_host_weights_after_loss(site: Site) -> None:
    with launch(site, "n1,n2,n3", "--nnodes", "2:3", "-p", "1", "weights.py") as job:
        job.wait_for("an epoch of 3", times=3)
        site.lab.fault("power-off", "n2")
        job.wait_for("an epoch of 2", times=2)
        job.wait_for("shares of the global batch: n1 60, n3 20")
        ended = interrupt(job)
    assert "starting all nodes again" not in ended.err


def test_node_ended_by_sigterm_is_removed(site: Site) -> None:
    """The node gets SIGTERM, as before a preemption: the script can save, and the job continues."""
    with launch(site, "n1,n2", "--nnodes", "1:2", *script(site)) as job:
        job.wait_for("from step 0", times=2)
        os.kill(site.pid("n2", "import select,sys;"), signal.SIGTERM)
        job.wait_for("rank 0 of 1")
        ended = finish(site, job)
    assert ended.code == 0, ended.err
    assert "n2: asked to end by SIGTERM" in ended.err
    assert "; going on with n1; starting all nodes again\n" in ended.err


def test_repeated_script_error_ends_job(site: Site) -> None:
    """The error repeats, so further restarts would be useless."""
    ended = site.run("--no-torch", "--max-restarts", "9", "end.py", "raise", "1", hosts="n1,n2")
    assert ended.code == 1
    assert ended.err.count("starting all nodes again") == 1
    assert "not started again: the same failure as before at end.py, line " in ended.err


def test_killed_rank_restarts_without_reimporting_torch(site: Site, capsys: Any) -> None:
    """Measures and shows the time from the kill to the first output of the restarted ranks."""
    kills, gaps = 2, []
    args = ["--max-restarts", str(kills), *script(site)]
    with launch(site, "n1,n2", *args) as job:
        for number in range(kills + 1):
            job.wait_for("from step", times=2 * (number + 1))
            if number == kills:
                break
            time.sleep(0.3)
            killed = time.time()
            os.kill(site.pid("n2", r"\[rank 1 of 2"), signal.SIGKILL)
            job.wait_for("began", times=2 * (number + 2))
            gaps.append(max(map(float, re.findall(r"began (\S+)", job.out)[-2:])) - killed)
        job.signal(signal.SIGINT)
        ended = job.end()
    assert ended.code == 130
    expected = [
        f"rank {rank} of 2, node {rank} of 2, restart {kills} of {kills}" for rank in (0, 1)
    ]
    assert sorted(rank_positions(ended.out)[-2:]) == expected
    with capsys.disabled():
        shown = ", ".join(f"{gap:.2f}" for gap in sorted(gaps))
        print(f"\nkill -9 to the first line of all ranks: {shown} s")
    assert len(ended.events("imported")) == 2


@pytest.mark.slow
def test_lightning_resumes_from_its_checkpoint_after_loss(site: Site) -> None:
    """A node is powered off: the others resume from the last checkpoint and finish the job."""
    if not FRAMEWORKS.is_dir():
        missing("lightning and transformers are not installed")
    options = ["--lease", "8", "--nnodes", "1:2"]
    env = ["--env", "HF_HUB_OFFLINE=1", "--env", f"PYTHONPATH={FRAMEWORKS}"]
    args = ["own_lightning.py", str(site.project), "60"]
    with launch(site, "n1,n2", *options, *env, *args) as job:
        job.wait_for("from step 0 of 2 ranks", times=2)
        assert eventually((site.project / "lightning" / "last.ckpt").exists), job.err
        site.lab.fault("power-off", "n2")
        ended = job.end(TEST_LIMIT_S)
    assert ended.code == 0, ended.out + ended.err
    assert "going on with n1; starting all nodes again\n" in ended.err
    assert re.findall(r"done .*", ended.out) == ["done 0 of 1 steps 60"]
    resumed = list(map(int, re.findall(r"from step (\d+)", ended.out)))
    assert resumed[-1] >= 10


def test_session_replaces_lost_hosts_without_restart(site: Site) -> None:
    """They join between two steps without a restart. These ranks only exchange messages."""
    site.lab.fault("power-off", "n2")
    args = ["--nnodes", "1:2", "--no-torch", "member.py", "300"]
    with launch(site, "n1,n2,n3", *args) as job:
        job.wait_for("[n3/1] began")
        site.lab.undo("power-off", "n2")
        assert eventually(lambda: "n2 is here, as a spare" in job.err), job.err
        site.lab.fault("power-off", "n3")
        assert eventually(lambda: "rank 1 on n2 is back" in job.err), job.err
        site.lab.fault("power-off", "n1")
        job.wait_for("[1]")
        site.lab.undo("power-off", "n3")  # n3 is no longer part of the job, and n1 stays off
        assert eventually(lambda: "rank 0 on n3 is back" in job.err), job.err
        ended = interrupt(job)
    assert "lost n3: " in ended.err
    assert "starting all nodes again" not in ended.err
