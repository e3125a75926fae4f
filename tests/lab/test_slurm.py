"""Tests real Slurm: allocations, batch jobs, time limits and lost nodes."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from every_transport import EveryTransport
from launches import SOURCE, TEST_LIMIT_S, TIMEOUT_S, Site, eventually
from slurmlab import Slurm, slurm_on
from transports import (
    IMAGE_RECIPE,
    Transport,
    check_secret_is_unseen,
    largest_difference,
    reference,
    site_in,
)

from terminals import on_terminal

pytestmark = [pytest.mark.lab, pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Site, Slurm]]:
    folder = tmp_path_factory.mktemp("slurm")
    site = site_in(new_lab, folder, hosts=3)
    with slurm_on(site.lab, folder / "slurm") as slurm:
        yield site, slurm


@pytest.fixture
def site(cluster: tuple[Site, Slurm]) -> Iterator[Site]:
    """Checks that Slurm has no job, step or process left after a test."""
    site, slurm = cluster
    yield site
    assert eventually(lambda: not slurm.left()), slurm.left()


@pytest.fixture
def slurm(cluster: tuple[Site, Slurm]) -> Slurm:
    return cluster[1]


@pytest.fixture
def in_allocation(site: Site, slurm: Slurm) -> Iterator[Transport]:
    """Types commands in an allocation of n1 and n2."""
    with slurm.allocation() as env:
        yield Transport(site, (), env=env)


@pytest.fixture
def batch(site: Site, slurm: Slurm) -> Transport:
    """Types commands on the login node."""
    options = ("--via", "slurm", "--nnodes", "2", "--sbatch-arg=--nodelist=n[1-2]", "--mem", "100")
    return Transport(site, options, env=slurm.env)


def slurm_job_id(err: str) -> str:
    match = re.search(r"Slurm job (\d+), run directory", err)
    assert match, err
    return match.group(1)


# --- inside an allocation


class TestSrun(EveryTransport):
    """Runs the tests of all transports in an allocation."""

    test_result_matches_ssh_run = None  # tested with a batch, which uses this, too
    test_rejects_intruders = None  # tested with a batch

    @pytest.fixture
    def transport(self, in_allocation: Transport) -> Transport:
        return in_allocation


def test_forwarded_secret_is_not_in_traffic(in_allocation: Transport) -> None:
    """srun passes the environment on in clear text, so it must not contain the secret."""
    check_secret_is_unseen(in_allocation)


def test_salloc_tasks_set_ranks_per_node(site: Site, slurm: Slurm) -> None:
    """Tasks per node become ranks per node; a step for one CPU does not bind the ranks to it."""
    prefix = ("salloc", "-N2", "--ntasks-per-node=2", "--mem=100", "--nodelist=n[1-2]")
    ended = Transport(site, (), prefix=prefix, env=slurm.env).run("--no-torch", "tell.py")
    assert ended.code == 0, ended.err
    assert [ended.said(rank)["place"]["PACELINE_HOST"] for rank in range(4)] == [
        "n1", "n1", "n2", "n2",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("slurm_options", "extra_args", "ranks"),
    [((), (), 2), (("--ntasks-per-node=2",), ("-p", "3"), 6)],
)
def test_nproc_option_overrides_slurm_tasks(
    site: Site,
    slurm: Slurm,
    slurm_options: tuple[str, ...],
    extra_args: tuple[str, ...],
    ranks: int,
) -> None:
    """Slurm's default is one task per node, and ``-p`` overrides the requested tasks."""
    prefix = ("salloc", "-N2", *slurm_options, "--mem=100", "--nodelist=n[1-2]")
    transport = Transport(site, (), prefix=prefix, env=slurm.env)
    ended = transport.run("--no-torch", *extra_args, "tell.py")
    assert ended.code == 0, ended.err
    assert ended.said(ranks - 1)["place"]["WORLD_SIZE"] == str(ranks)
    assert ("the allocation's tasks are fewer: n1 2, n2 2" in ended.err) is bool(slurm_options)


def test_rejects_too_small_allocation(in_allocation: Transport) -> None:
    ended = in_allocation.run("--nnodes", "3", "tell.py")
    assert ended.code == 2
    assert "3 nodes were asked for" in ended.err
    assert "2 in Slurm" in ended.err


def test_reports_expired_allocation(site: Site, slurm: Slurm) -> None:
    with slurm.allocation() as env:
        pass
    ended = Transport(site, (), env=env).run("--no-torch", "tell.py")
    assert ended.code == 1
    assert "the allocation is over" in ended.err


# --- GPUs, as a site's guide requests them


# options of the guide's commands; they fit the guide's nodes
RESOURCE_OPTIONS = ("--cpus-per-task=16", "--mem=32GB", "--time=1:00:00")


@pytest.mark.parametrize(
    ("nodes", "slurm_options", "options", "ranks"),
    [
        ("-N1", "--gpus=v100:1", (), 1),
        ("-N2", "--gpus=v100:4", (), 4),
        ("-N2", "--gpus=v100:4", ("--nnodes", "1"), 2),
    ],
)
def test_ranks_follow_gpus_of_allocation(
    site: Site, slurm: Slurm, nodes: str, slurm_options: str, options: tuple[str, ...], ranks: int
) -> None:
    """Each GPU gets a rank, and a message says that torch sees none of the GPUs here."""
    prefix = (
        "salloc",
        nodes,
        *RESOURCE_OPTIONS,
        slurm_options,
        "--nodelist=n1" if nodes == "-N1" else "-wn[1-2]",
    )
    transport = Transport(site, (), prefix=prefix, env=slurm.env)
    script = """echo "{\\"ranks\\": $WORLD_SIZE, \\"gpus\\": $SLURM_GPUS_ON_NODE}" """
    ended = transport.run(*options, "--no-python", "sh", "-c", script)
    assert ended.code == 0, ended.err
    assert ended.said(ranks - 1) == {
        "ranks": ranks,
        "gpus": 1 if slurm_options == "--gpus=v100:1" else 2,
    }
    assert "torch sees no GPU on n1" in ended.err


def test_batch_requests_gpus(site: Site, slurm: Slurm) -> None:
    """GPUs are requested as in the guide; Slurm gives each node its share.

    The script's own arguments reach it even if they look like options of Paceline.
    """
    arguments = ["--time", "a 'b' $c", "--mem=3"]
    options = ("--via", "slurm", "--nnodes", "2", "--gpus", "v100:4", "--cpus-per-task", "8",
               "--mem", "32GB", "--time", "1:00:00", "--constraint", "v100")  # fmt: skip
    ended = Transport(site, options, env=slurm.env).run("--no-torch", "tell.py", *arguments)
    assert ended.code == 0, ended.err
    assert [bytes.fromhex(word).decode() for word in ended.said(0)["argv"]] == arguments
    state = slurm.job(slurm_job_id(ended.err))
    assert "TresPerNode=gres:gpu:v100:2" in state
    assert "Features=v100" in state
    assert ended.said(3)["place"]["WORLD_SIZE"] == "4"
    assert "torch sees no GPU on n" in ended.out


GUIDE_BATCH = """#!/bin/bash
#SBATCH -N2
#SBATCH --time=1:00:00
#SBATCH --cpus-per-task=16
#SBATCH --mem=32GB
#SBATCH --gpus=v100:4

cd {project}
time {python} -m paceline run --run-dir {runs} train.py --ddp --epochs 5
"""
PYTHON = f"env PYTHONPATH={SOURCE} OMP_NUM_THREADS=1 {sys.executable}"


def guide_project(site: Site) -> Path:
    """Returns a folder with a torch training script that has the guide's options."""
    folder = site.project / "guide"
    folder.mkdir(exist_ok=True)
    shutil.copy(Path(__file__).with_name("coming") / "train.py", folder)
    return folder


def test_batch_script_of_site_guide(site: Site, slurm: Slurm) -> None:
    """The guide's directives and its submit command; only the helper's line is Paceline's."""
    project, directory = guide_project(site), site.fresh()
    (project / "train.sh").write_text(
        GUIDE_BATCH.format(project=project, python=PYTHON, runs=directory)
    )
    line = "sbatch -N2 --cpus-per-task=16 --mem=32GB --gpus=v100:4 --output=output.txt train.sh"
    site.lab.exec("n1", line.split(), env=slurm.env, cwd=project, timeout=TIMEOUT_S, check=True)
    output = project / "output.txt"
    assert eventually(lambda: "real\t" in text_of(output)), text_of(output)
    assert json.loads((directory / "result.json").read_text())["exit_code"] == 0
    plan = json.loads((directory / "plan.json").read_text())
    assert plan["world_size"] == 4
    assert len(plan["nodes"]) == 2
    assert [f"trained as {rank} of 4" in text_of(output) for rank in range(4)] == [True] * 4


def test_trains_in_srun_shell(site: Site, slurm: Slurm) -> None:
    """Types ``srun … --gpus=v100:2 --pty bash``, and the guide's command in that shell."""
    project = guide_project(site)
    args = "srun -N1 --nodelist=n1 --cpus-per-task=16 --mem=32GB --gpus=v100:2 --time=1:00:00"
    argv = site.lab.command("n1", [*args.split(), "--pty", "bash", "--norc"])
    env = {**site.lab.environment("n1"), **slurm.env, "PWD": str(project)}
    with on_terminal(argv, project, columns=200, **env) as terminal:
        command = f"cd {project}; {PYTHON} -m paceline run --run-dir {site.fresh()} train.py --ddp"
        terminal.types(f"{command}; echo status $?; exit\n".encode())
        assert terminal.reads(b"status 0", TEST_LIMIT_S), terminal.said[-3000:]
        assert b"trained as 0 of 2" in terminal.said
        assert b"trained as 1 of 2" in terminal.said
        assert terminal.ends() == 0


def test_bench_scaling_runs_in_single_batch(site: Site, slurm: Slurm) -> None:
    """One command measures one process, one full node, all nodes, and all nodes full."""
    out = site.fresh()
    options = ("--via", "slurm", "--nnodes", "2", "--gpus", "v100:4", "--mem", "100", "--out")
    args = (*options, str(out), "--sbatch-arg=--nodelist=n[1-2]", "train.py")
    argv = [sys.executable, "-m", "paceline", "bench", "scaling", *args]
    completed = site.lab.exec("n1", argv, env={**slurm.env, "PYTHONPATH": str(SOURCE)},
                         cwd=site.project, timeout=2 * TEST_LIMIT_S)  # fmt: skip
    assert completed.returncode == 0, completed.stdout + completed.stderr
    rungs = json.loads((out / "scaling.json").read_text())
    assert [(r["nodes"], r["processes"]) for r in rungs] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert "one process: limited by" in completed.stdout
    assert "2 processes on each of 2 nodes: " in completed.stdout
    assert re.search(r"Slurm job \d+ waited \d+ s in the queue", completed.stdout)
    assert completed.stdout.count("torch sees no GPU on n1, n2") == 1
    assert "JobState=COMPLETED" in slurm.job(slurm_job_id(completed.stderr))


# --- batch jobs


class TestSbatch(EveryTransport):
    """Runs the tests of all transports with batch jobs."""

    test_interrupt_ends_unresponsive_ranks = None  # a test below also checks the job's state

    @pytest.fixture
    def transport(self, batch: Transport) -> Transport:
        return batch


def test_failed_batch_reports_rank_exit_status(batch: Transport, slurm: Slurm) -> None:
    """Slurm reports FAILED with the rank's exit status; the output is followed on the terminal."""
    ended = batch.run("--no-torch", "-p", "1", "end.py", "exit", "1")
    assert ended.code == 7, ended.err
    state = slurm.job(slurm_job_id(ended.err))
    assert "JobState=FAILED" in state
    assert "ExitCode=7:0" in state
    assert ended.out.count("failed first: rank 1 on n2: exit status 7") == 1, ended.out
    assert "failed first" not in ended.err
    assert (ended.directory / "logs" / "n2" / "1.log").exists()


def test_interrupted_batch_is_cancelled(batch: Transport, slurm: Slurm) -> None:
    """The ranks ignore the signal."""
    args = ("--no-torch", "-p", "1", "--grace", "1", "end.py", "ignore")
    with batch.started(*args) as (child, directory):
        assert batch.waits(directory, 2)
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=TEST_LIMIT_S)
    assert child.returncode == 128 + signal.SIGINT
    assert "JobState=CANCELLED" in slurm.job(slurm_job_id(err))


def test_reports_batch_rejected_by_slurm(site: Site, slurm: Slurm) -> None:
    options = ("--via", "slurm", "--nnodes", "2", "--partition", "nosuch")
    ended = Transport(site, options, env=slurm.env).run("tell.py")
    assert ended.code == 1
    assert "Slurm refused the batch" in ended.err
    assert "invalid partition specified" in ended.err


def test_time_limit_requeues_and_resumes_bit_exact(batch: Transport, slurm: Slurm) -> None:
    """In mid-epoch: it saves, is requeued, and ends with the bits of an uninterrupted run."""
    options = (*batch.options, "--requeue", "--time", "10", "--sbatch-arg=--signal=B:USR1@57")
    transport = Transport(batch.site, options, env=batch.env)
    batch.site.lab.fault("slow", "n2", "2mbit")
    with transport.started("-p", "2", *IMAGE_RECIPE, "--log-every", "1", verb="train") as (
        child,
        run_dir,
    ):
        assert eventually(lambda: bool(records(run_dir)))
        number = json.loads(text_of(run_dir / "batch.json"))["job"]
        # Slurm counts in minutes and checks every 30 s; on a slow link an epoch lasts longer
        slurm.tell("scontrol", "update", f"jobid={number}", "timelimit=1")
        assert eventually(lambda: "back into the queue" in output_of(run_dir), 200)
        batch.site.lab.heal()
        slurm.tell("scontrol", "update", f"jobid={number}", "timelimit=10")  # one limit is enough
        out, err = child.communicate(timeout=TEST_LIMIT_S)
    assert child.returncode == 0, (out, err)
    assert "Restarts=1 " in slurm.job(slurm_job_id(err))
    resumed = re.search(r"resumed after step (\d+)", out)
    assert resumed, out
    steps = [record["step"] for record in records(run_dir) if record["split"] == "train"]
    assert steps == list(range(1, max(steps) + 1))
    assert 0 < int(resumed.group(1)) < max(steps)
    assert largest_difference(run_dir, reference(batch.site)) == 0.0


def test_time_limit_at_startup_requeues(batch: Transport, slurm: Slurm) -> None:
    """Nothing is saved yet: the job is requeued nevertheless, and starts from the beginning.

    Limits during the set-up, before the launcher starts, are in tests/contract/test_schedulers.py.
    """
    options = (*batch.options, "--requeue", "--setup-command=echo in the set-up")
    transport = Transport(batch.site, options, env=batch.env)
    with transport.started("-p", "1", *IMAGE_RECIPE, "--steps", "2", verb="train") as (
        child,
        run_dir,
    ):
        assert eventually((run_dir / "events.jsonl").exists)
        assert "in the set-up" in output_of(run_dir)
        number = json.loads(text_of(run_dir / "batch.json"))["job"]
        slurm.tell("scancel", "--batch", "--signal=USR1", number)
        out, err = child.communicate(timeout=TEST_LIMIT_S)
    assert child.returncode == 0, (out, err)
    assert "back into the queue" in out
    assert "Restarts=1 " in slurm.job(number)
    assert [record["step"] for record in records(run_dir) if record["split"] == "train"][-1] == 2


def output_of(directory: Path) -> str:
    return "".join(text_of(path) for path in directory.glob("slurm-*.out"))


def records(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text_of(directory / "metrics.jsonl").splitlines()]


def test_lost_node_reports_slurm_reason_and_recovers(batch: Transport, slurm: Slurm) -> None:
    """The node's state in Slurm is shown; the other node trains until Slurm stops the job.

    Then the job is requeued on other nodes. If little of the short training is left, the other node
    may finish it before.
    """
    options = ("--via", "slurm", "--nnodes", "2", "--requeue", "--mem", "100")
    transport = Transport(batch.site, options, env=batch.env)
    set_state(slurm, "n2", "drain")
    batch.site.lab.fault("slow", "n3", "20mbit")
    args = (
        "-p",
        "1",
        "--lease",
        "4",
        *IMAGE_RECIPE,
        "--log-every",
        "1",
        "--checkpoint-every",
        "2",
    )
    with transport.started(*args, verb="train") as (child, run_dir):
        assert eventually(lambda: len(records(run_dir)) > 5)
        set_state(slurm, "n2", "resume")
        set_state(slurm, "n3", "drain")
        assert "DRAIN" in slurm.tell("scontrol", "show", "node", "-o", "n3")
        batch.site.lab.fault("power-off", "n3")
        out, err = child.communicate(timeout=TEST_LIMIT_S)
    assert child.returncode == 0, (out, err)
    assert re.search(r"Slurm says that n3 is \S*DRAIN\S* \(disk\)", out), out
    if "PENDING (" in err:
        assert re.search(r"resumed after step [1-9]", out), out
        assert (run_dir / "logs" / "n2" / "1.log").exists()
    else:
        assert re.search(r"lost n3: .*Training went on with the other rank", out), out
    assert largest_difference(run_dir, reference(batch.site)) < 1e-10
    batch.site.lab.heal()
    slurm.start("n3")
    set_state(slurm, "n3", "resume")
    assert eventually(lambda: "State=IDLE" in slurm.tell("scontrol", "show", "node", "n3"))


def set_state(slurm: Slurm, node: str, state: str) -> None:
    slurm.tell("scontrol", "update", f"nodename={node}", f"state={state}", "reason=disk")


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_job_array_ends_with_its_last_task(batch: Transport, slurm: Slurm) -> None:
    """The second task fails at once, while the first still runs."""
    transport = Transport(batch.site, (*batch.options, "--array", "1-2"), env=batch.env)
    script = """[ "$SLURM_ARRAY_TASK_ID" = 1 ] || exit 7; sleep 5"""
    ended = transport.run("-p", "1", "--no-python", "sh", "-c", script)
    assert ended.code == 7, ended.err
    assert slurm.tell("squeue", "-h").strip() == ""
    results = [ended.directory / index / "result.json" for index in ("1", "2")]
    assert [json.loads(result.read_text())["exit_code"] for result in results] == [0, 7]
    assert re.search(
        r"1 of 2 tasks finished; failed: 2 \(exit status 7\): paceline explain \S+/2\n", ended.err
    )
    status = transport.verb("status", str(ended.directory))
    assert f"{ended.directory}/2: failed, exit status 7" in status


def test_status_logs_and_stop_from_second_terminal(batch: Transport, slurm: Slurm) -> None:
    options = (*batch.options, "--detach")
    ended = Transport(batch.site, options, env=batch.env).run(
        "--no-torch", "-p", "1", "end.py", "wait"
    )
    assert ended.code == 0, ended.err
    assert slurm.tell("squeue", "-h", "-o", "%i").split() == [slurm_job_id(ended.err)]
    assert batch.waits(ended.directory, 2), ended.err
    run = str(ended.directory)
    assert f"{run}: RUNNING" in batch.verb("status", run)
    assert "[n2/1] waiting" in batch.verb("logs", run)
    batch.verb("stop", run)
    assert f"{run}: CANCELLED" in batch.verb("status", run)
