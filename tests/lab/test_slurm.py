"""Real Slurm: in an allocation, submitted from outside, over the time limit, with lost nodes."""

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
    """Slurm's state must be clean after a test: no job, no step, no process."""
    site, slurm = cluster
    yield site
    assert eventually(lambda: not slurm.left()), slurm.left()


@pytest.fixture
def slurm(cluster: tuple[Site, Slurm]) -> Slurm:
    return cluster[1]


@pytest.fixture
def inside(site: Site, slurm: Slurm) -> Iterator[Transport]:
    """Typed in an allocation of n1 and n2."""
    with slurm.allocation() as env:
        yield Transport(site, (), env=env)


@pytest.fixture
def batch(site: Site, slurm: Slurm) -> Transport:
    """Typed on the login node."""
    options = ("--via", "slurm", "--nnodes", "2", "--sbatch-arg=--nodelist=n[1-2]", "--mem", "100")
    return Transport(site, options, env=slurm.env)


def number_of(err: str) -> str:
    match = re.search(r"Slurm job (\d+), run directory", err)
    assert match, err
    return match.group(1)


# --- inside an allocation


class TestSrun(EveryTransport):
    """In an allocation."""

    test_same_parameters_and_files_as_over_ssh = None  # a batch trains in its allocation, too
    test_strangers_and_other_users_get_nothing = None  # as in a batch

    @pytest.fixture
    def transport(self, inside: Transport) -> Transport:
        return inside


def test_a_forwarded_secret_cannot_be_read_off_the_wire(inside: Transport) -> None:
    """srun passes the environment on in the clear: it must not have it."""
    check_secret_is_unseen(inside)


def test_salloc_around_the_command(site: Site, slurm: Slurm) -> None:
    """Tasks a node are ranks a node, and a step for one CPU does not bind the ranks to it."""
    prefix = ("salloc", "-N2", "--ntasks-per-node=2", "--mem=100", "--nodelist=n[1-2]")
    ended = Transport(site, (), prefix=prefix, env=slurm.env).run("--no-torch", "tell.py")
    assert ended.code == 0, ended.err
    assert [ended.said(rank)["place"]["PACELINE_HOST"] for rank in range(4)] == [
        "n1", "n1", "n2", "n2",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "typed", "ranks"),
    [((), (), 2), (("--ntasks-per-node=2",), ("-p", "3"), 6)],
)
def test_processes_are_typed_or_asked_of_slurm(
    site: Site, slurm: Slurm, asked: tuple[str, ...], typed: tuple[str, ...], ranks: int
) -> None:
    """One task a node is Slurm's default, and what was asked of Slurm yields to `-p`."""
    prefix = ("salloc", "-N2", *asked, "--mem=100", "--nodelist=n[1-2]")
    transport = Transport(site, (), prefix=prefix, env=slurm.env)
    ended = transport.run("--no-torch", *typed, "tell.py")
    assert ended.code == 0, ended.err
    assert ended.said(ranks - 1)["place"]["WORLD_SIZE"] == str(ranks)
    assert ("the allocation's tasks are fewer: n1 2, n2 2" in ended.err) is bool(asked)


def test_an_allocation_that_is_too_small(inside: Transport) -> None:
    ended = inside.run("--nnodes", "3", "tell.py")
    assert ended.code == 2
    assert "3 nodes were asked for" in ended.err
    assert "2 in Slurm" in ended.err


def test_an_allocation_that_is_over(site: Site, slurm: Slurm) -> None:
    with slurm.allocation() as env:
        pass
    ended = Transport(site, (), env=env).run("--no-torch", "tell.py")
    assert ended.code == 1
    assert "the allocation is over" in ended.err


# --- GPUs, as the guide of a site asks for them


# by the document's own commands; sizes of jobs are those of its nodes
ASKED = ("--cpus-per-task=16", "--mem=32GB", "--time=1:00:00")


@pytest.mark.parametrize(
    ("nodes", "asked", "options", "ranks"),
    [
        ("-N1", "--gpus=v100:1", (), 1),
        ("-N2", "--gpus=v100:4", (), 4),
        ("-N2", "--gpus=v100:4", ("--nnodes", "1"), 2),
    ],
)
def test_ranks_by_the_gpus_of_an_allocation(
    site: Site, slurm: Slurm, nodes: str, asked: str, options: tuple[str, ...], ranks: int
) -> None:
    """One for each; that torch sees none of them here is said.

    For one node that is full see ``test_training_in_a_shell_of_srun``.
    """
    prefix = ("salloc", nodes, *ASKED, asked, "--nodelist=n1" if nodes == "-N1" else "-wn[1-2]")
    transport = Transport(site, (), prefix=prefix, env=slurm.env)
    tell = """echo "{\\"ranks\\": $WORLD_SIZE, \\"gpus\\": $SLURM_GPUS_ON_NODE}" """
    ended = transport.run(*options, "--no-python", "sh", "-c", tell)
    assert ended.code == 0, ended.err
    assert ended.said(ranks - 1) == {"ranks": ranks, "gpus": 1 if asked == "--gpus=v100:1" else 2}
    assert "torch sees no GPU on n1" in ended.err


def test_gpus_of_a_batch(site: Site, slurm: Slurm) -> None:
    """Asked for as by the document; Slurm gives each node its share of that kind.

    What the script gets stays its own, even if it looks like options of ours.
    """
    arguments = ["--time", "a 'b' $c", "--mem=3"]
    options = ("--via", "slurm", "--nnodes", "2", "--gpus", "v100:4", "--cpus-per-task", "8",
               "--mem", "32GB", "--time", "1:00:00", "--constraint", "v100")  # fmt: skip
    ended = Transport(site, options, env=slurm.env).run("--no-torch", "tell.py", *arguments)
    assert ended.code == 0, ended.err
    assert [bytes.fromhex(word).decode() for word in ended.said(0)["argv"]] == arguments
    state = slurm.job(number_of(ended.err))
    assert "TresPerNode=gres:gpu:v100:2" in state
    assert "Features=v100" in state
    assert ended.said(3)["place"]["WORLD_SIZE"] == "4"
    assert "torch sees no GPU on n" in ended.out


DOCUMENTS_BATCH = """#!/bin/bash
#SBATCH -N2
#SBATCH --time=1:00:00
#SBATCH --cpus-per-task=16
#SBATCH --mem=32GB
#SBATCH --gpus=v100:4

cd {project}
time {python} -m paceline run --run-dir {runs} train.py --ddp --epochs 5
"""
PYTHON = f"env PYTHONPATH={SOURCE} OMP_NUM_THREADS=1 {sys.executable}"


def guides_project(site: Site) -> Path:
    """A folder with a script that trains with torch and has the guide's options."""
    folder = site.project / "guide"
    folder.mkdir(exist_ok=True)
    shutil.copy(Path(__file__).with_name("coming") / "train.py", folder)
    return folder


def test_the_documents_own_batch(site: Site, slurm: Slurm) -> None:
    """Its directives and the line that submits it; only the line with the helper is ours."""
    project, directory = guides_project(site), site.fresh()
    (project / "train.sh").write_text(
        DOCUMENTS_BATCH.format(project=project, python=PYTHON, runs=directory)
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


def test_training_in_a_shell_of_srun(site: Site, slurm: Slurm) -> None:
    """``srun … --gpus=v100:2 --pty bash`` on a terminal, and the guide's command in that shell."""
    project = guides_project(site)
    words = "srun -N1 --nodelist=n1 --cpus-per-task=16 --mem=32GB --gpus=v100:2 --time=1:00:00"
    argv = site.lab.command("n1", [*words.split(), "--pty", "bash", "--norc"])
    env = {**site.lab.environment("n1"), **slurm.env, "PWD": str(project)}
    with on_terminal(argv, project, columns=200, **env) as terminal:
        command = f"cd {project}; {PYTHON} -m paceline run --run-dir {site.fresh()} train.py --ddp"
        terminal.types(f"{command}; echo status $?; exit\n".encode())
        assert terminal.reads(b"status 0", TEST_LIMIT_S), terminal.said[-3000:]
        assert b"trained as 0 of 2" in terminal.said
        assert b"trained as 1 of 2" in terminal.said
        assert terminal.ends() == 0


def test_the_four_rungs_in_one_batch(site: Site, slurm: Slurm) -> None:
    """One process, one node full, all nodes, all full: one command on the login node."""
    out = site.fresh()
    options = ("--via", "slurm", "--nnodes", "2", "--gpus", "v100:4", "--mem", "100", "--out")
    words = (*options, str(out), "--sbatch-arg=--nodelist=n[1-2]", "train.py")
    argv = [sys.executable, "-m", "paceline", "bench", "scaling", *words]
    done = site.lab.exec("n1", argv, env={**slurm.env, "PYTHONPATH": str(SOURCE)},
                         cwd=site.project, timeout=2 * TEST_LIMIT_S)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rungs = json.loads((out / "scaling.json").read_text())
    assert [(r["nodes"], r["processes"]) for r in rungs] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert "one process: limited by" in done.stdout
    assert "2 processes on each of 2 nodes: " in done.stdout
    assert re.search(r"Slurm job \d+ waited \d+ s in the queue", done.stdout)
    assert done.stdout.count("torch sees no GPU on n1, n2") == 1
    assert "JobState=COMPLETED" in slurm.job(number_of(done.stderr))


# --- submitted


class TestSbatch(EveryTransport):
    """From outside."""

    test_interrupted = None  # test_batch_interrupted looks at the job, too

    @pytest.fixture
    def transport(self, batch: Transport) -> Transport:
        return batch


def test_batch_that_fails(batch: Transport, slurm: Slurm) -> None:
    """FAILED in Slurm, with the rank's exit status; its output is followed to the terminal."""
    ended = batch.run("--no-torch", "-p", "1", "end.py", "exit", "1")
    assert ended.code == 7, ended.err
    state = slurm.job(number_of(ended.err))
    assert "JobState=FAILED" in state
    assert "ExitCode=7:0" in state
    assert ended.out.count("failed first: rank 1 on n2: exit status 7") == 1, ended.out
    assert "failed first" not in ended.err
    assert (ended.directory / "logs" / "n2" / "1.log").exists()


def test_batch_interrupted(batch: Transport, slurm: Slurm) -> None:
    """Ranks that do not listen."""
    words = ("--no-torch", "-p", "1", "--grace", "1", "end.py", "ignore")
    with batch.started(*words) as (child, directory):
        assert batch.waits(directory, 2)
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=TEST_LIMIT_S)
    assert child.returncode == 128 + signal.SIGINT
    assert "JobState=CANCELLED" in slurm.job(number_of(err))


def test_batch_refused(site: Site, slurm: Slurm) -> None:
    options = ("--via", "slurm", "--nnodes", "2", "--partition", "nosuch")
    ended = Transport(site, options, env=slurm.env).run("tell.py")
    assert ended.code == 1
    assert "Slurm refused the batch" in ended.err
    assert "invalid partition specified" in ended.err


def test_over_the_time_limit_and_back(batch: Transport, slurm: Slurm) -> None:
    """In mid-epoch: a checkpoint, back into the queue, and the same bits as never interrupted."""
    options = (*batch.options, "--requeue", "--time", "10", "--sbatch-arg=--signal=B:USR1@57")
    transport = Transport(batch.site, options, env=batch.env)
    batch.site.lab.fault("slow", "n2", "2mbit")
    with transport.started("-p", "2", *IMAGE_RECIPE, "--log-every", "1", verb="train") as (
        child,
        where,
    ):
        assert eventually(lambda: bool(records(where)))
        number = json.loads(text_of(where / "batch.json"))["job"]
        # Slurm counts in minutes and looks every 30 s; on a narrow link an epoch lasts longer
        slurm.tell("scontrol", "update", f"jobid={number}", "timelimit=1")
        assert eventually(lambda: "back into the queue" in output_of(where), 200)
        batch.site.lab.heal()
        slurm.tell("scontrol", "update", f"jobid={number}", "timelimit=10")  # once is enough
        out, err = child.communicate(timeout=TEST_LIMIT_S)
    assert child.returncode == 0, (out, err)
    assert "Restarts=1 " in slurm.job(number_of(err))
    found = re.search(r"resumed after step (\d+)", out)
    assert found, out
    steps = [record["step"] for record in records(where) if record["split"] == "train"]
    assert steps == list(range(1, max(steps) + 1))
    assert 0 < int(found.group(1)) < max(steps)
    assert largest_difference(where, reference(batch.site)) == 0.0


def test_a_time_limit_before_the_first_step(batch: Transport, slurm: Slurm) -> None:
    """Nothing was saved yet: it comes back all the same, and begins anew.

    In the set-up, before there is a launcher: tests/contract/test_schedulers.py.
    """
    options = (*batch.options, "--requeue", "--setup-command=echo in the set-up")
    transport = Transport(batch.site, options, env=batch.env)
    with transport.started("-p", "1", *IMAGE_RECIPE, "--steps", "2", verb="train") as (
        child,
        where,
    ):
        assert eventually((where / "events.jsonl").exists)
        assert "in the set-up" in output_of(where)
        number = json.loads(text_of(where / "batch.json"))["job"]
        slurm.tell("scancel", "--batch", "--signal=USR1", number)
        out, err = child.communicate(timeout=TEST_LIMIT_S)
    assert child.returncode == 0, (out, err)
    assert "back into the queue" in out
    assert "Restarts=1 " in slurm.job(number)
    assert [record["step"] for record in records(where) if record["split"] == "train"][-1] == 2


def output_of(directory: Path) -> str:
    return "".join(text_of(path) for path in directory.glob("slurm-*.out"))


def records(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text_of(directory / "metrics.jsonl").splitlines()]


def test_a_node_lost_while_running(batch: Transport, slurm: Slurm) -> None:
    """Slurm's own word for it is shown; the other node trains on until Slurm takes it back.

    Then the job comes back on other nodes. With what is left of a short training the other node may
    be through before.
    """
    options = ("--via", "slurm", "--nnodes", "2", "--requeue", "--mem", "100")
    transport = Transport(batch.site, options, env=batch.env)
    set_state(slurm, "n2", "drain")
    batch.site.lab.fault("slow", "n3", "20mbit")
    words = (
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
    with transport.started(*words, verb="train") as (child, where):
        assert eventually(lambda: len(records(where)) > 5)
        set_state(slurm, "n2", "resume")
        set_state(slurm, "n3", "drain")
        assert "DRAIN" in slurm.tell("scontrol", "show", "node", "-o", "n3")
        batch.site.lab.fault("power-off", "n3")
        out, err = child.communicate(timeout=TEST_LIMIT_S)
    assert child.returncode == 0, (out, err)
    assert re.search(r"Slurm says that n3 is \S*DRAIN\S* \(disk\)", out), out
    if "PENDING (" in err:
        assert re.search(r"resumed after step [1-9]", out), out
        assert (where / "logs" / "n2" / "1.log").exists()
    else:
        assert re.search(r"lost n3: .*Training went on with the other rank", out), out
    assert largest_difference(where, reference(batch.site)) < 1e-10
    batch.site.lab.heal()
    slurm.start("n3")
    set_state(slurm, "n3", "resume")
    assert eventually(lambda: "State=IDLE" in slurm.tell("scontrol", "show", "node", "n3"))


def set_state(slurm: Slurm, node: str, state: str) -> None:
    slurm.tell("scontrol", "update", f"nodename={node}", f"state={state}", "reason=disk")


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_an_array_of_runs(batch: Transport, slurm: Slurm) -> None:
    options = (*batch.options, "--array", "1-2", "--detach")
    ended = Transport(batch.site, options, env=batch.env).run("--no-torch", "-p", "1", "tell.py")
    assert ended.code == 0, ended.err
    results = [ended.directory / index / "result.json" for index in ("1", "2")]
    assert eventually(lambda: all(result.exists() for result in results))
    assert eventually(lambda: slurm.tell("squeue", "-h").strip() == "")


def test_looked_at_and_stopped_from_another_terminal(batch: Transport, slurm: Slurm) -> None:
    options = (*batch.options, "--detach")
    ended = Transport(batch.site, options, env=batch.env).run(
        "--no-torch", "-p", "1", "end.py", "wait"
    )
    assert ended.code == 0, ended.err
    assert slurm.tell("squeue", "-h", "-o", "%i").split() == [number_of(ended.err)]
    assert batch.waits(ended.directory, 2), ended.err
    run = str(ended.directory)
    assert f"{run}: RUNNING" in batch.verb("status", run)
    assert "[n2/1] waiting" in batch.verb("logs", run)
    batch.verb("stop", run)
    assert f"{run}: CANCELLED" in batch.verb("status", run)
