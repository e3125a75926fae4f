"""Every way to start nodes and every batch form: deterministic, safe with hostile words, golden."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.schedulers import WAYS, mpi, slurm
from paceline.schedulers.batch import BATCHES, BatchRequest, render
from paceline.schedulers.options import Options
from paceline.schedulers.slurm_batch import parse_job, parse_submitted
from paceline.spec.errors import SettingError
from paceline.spec.hosts import Host

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "schedulers"
HOSTILE = ("a,b", "it's", '"q"', "$HOME", "a b", "64(x2)", "new\nline", "`id`", "\\", "ä", "")
HOSTS = (Host("n1", slots=2), Host("n2", "10.0.0.2", slots=2, user="ann", port=2222))
REQUEST = BatchRequest(
    name="my run",
    argv=("/opt/env/bin/python", "-m", "paceline", "run"),
    words=("-p", "2", "train.py", "--lr", "0.1"),
    workdir="/home/ann/my project",
    run_dir="/home/ann/my project/runs/1",
    nodes=2,
    processes=2,
    time="1:00:00",
    partition="gpu",
    account="lab",
    mem="16G",
    gres="gpu:2",
    cpus_per_task=8,
    arguments=("--qos=debug",),
    setup=("module load anaconda3", "source activate Env"),
    image="registry/image:1",
)


@pytest.mark.parametrize("name", WAYS)
def test_every_way_can_be_imported(name: str) -> None:
    module, line = WAYS[name]
    assert callable(importlib.import_module(module).transport)
    assert line


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_is_deterministic(name: str) -> None:
    assert render(name, REQUEST) == render(name, REQUEST)


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_is_as_recorded(name: str) -> None:
    """To accept a wanted change: delete the file and run this twice."""
    golden = FIXTURES / "golden" / f"{name}.txt"
    text = render(name, REQUEST)
    if not golden.exists():
        golden.write_text(text, encoding="utf-8")
        pytest.fail(f"recorded {golden}")
    assert text == golden.read_text(encoding="utf-8")


SHELL = [name for name in BATCHES if name != "kubernetes"]
VARIANTS = {
    "plain": REQUEST,
    "requeue": replace(REQUEST, requeue=True),
    "array": replace(REQUEST, array="1-4"),
    "both": replace(REQUEST, requeue=True, array="1-4"),
    "bare": BatchRequest("x", ("python", "-m", "paceline", "run"), ("t.py",), "/", "/r", 1),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", SHELL)
def test_a_script_is_good_shell(name: str, variant: str) -> None:
    done = subprocess.run(["bash", "-n"], input=render(name, VARIANTS[variant]), text=True,
                          capture_output=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", SHELL)
def test_hostile_words_reach_the_job(name: str, tmp_path: Path) -> None:
    """The script is run with a stand-in for Python that prints its arguments, NUL between them."""
    stand_in = tmp_path / "it's a $tand-in"
    stand_in.write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
    stand_in.chmod(0o755)
    request = replace(
        REQUEST, argv=(str(stand_in), "-m", "paceline", "run"), words=HOSTILE, setup=(),
        workdir=str(tmp_path), run_dir=str(tmp_path / "run"),
    )  # fmt: skip
    done = subprocess.run(["bash"], input=render(name, request), text=True, capture_output=True,
                          check=False, env={"LSB_MCPU_HOSTS": "n1 2 n2 2", "PATH": "/usr/bin:/bin"},
                          encoding="utf-8")  # fmt: skip
    words = done.stdout.split("\0")[:-1]
    assert tuple(words[-len(HOSTILE) :]) == HOSTILE, done.stderr


@pytest.mark.parametrize("name", SHELL)
@pytest.mark.parametrize("value", ["a\nb", "$(id)", "a;b", "`x`", "a'b"])
def test_hostile_directives_are_refused(name: str, value: str) -> None:
    with pytest.raises(SettingError, match="cannot stand in a batch script"):
        render(name, replace(REQUEST, partition=value))


@pytest.mark.parametrize("phase", ["set-up", "running"])
@pytest.mark.parametrize(("signum", "status"), [(signal.SIGUSR1, 143), (signal.SIGTERM, 143)])
def test_a_warned_batch_goes_back_into_the_queue(
    tmp_path: Path, phase: str, signum: int, status: int
) -> None:
    """Also while it still loads modules; cancelled, it does not come back."""
    said = tmp_path / "said"
    stand_ins = {
        "job": f"trap 'exit 143' TERM; echo running >> {said}; while :; do sleep 0.05; done",
        "scontrol": f'echo "$@" >> {said}',
    }
    for name, text in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    setup = f"echo set-up >> {said}; sleep 0.5"
    request = replace(REQUEST, argv=(str(tmp_path / "job"),), requeue=True, setup=(setup,),
                      workdir=str(tmp_path), run_dir=str(tmp_path))  # fmt: skip
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    with subprocess.Popen(["bash", "-c", render("slurm", request)], env=env,
                          stdout=subprocess.DEVNULL) as child:  # fmt: skip
        deadline = time.monotonic() + 10
        while phase not in (said.read_text() if said.exists() else ""):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        child.send_signal(signum)
        code = child.wait(10)
    warned = signum == signal.SIGUSR1
    assert ("requeue 7" in said.read_text()) is warned
    assert ("running" in said.read_text()) is (phase == "running")
    assert code == (1 if warned and phase == "set-up" else status)


INJECTED = "x\n#PBS -q stolen\n#BSUB -q stolen\n#SBATCH --partition=stolen"


@pytest.mark.parametrize("name", SHELL)
def test_no_word_becomes_a_directive(name: str) -> None:
    """Batch systems look for directives line by line, whatever the shell makes of the line."""
    request = replace(REQUEST, words=(INJECTED,), workdir=f"/w/{INJECTED}", name=INJECTED)
    lines = render(name, request).splitlines()
    assert [line for line in lines if line.startswith("#") and "stolen" in line.split()] == []
    assert [line for line in lines if re.match(r"#(PBS|BSUB|SBATCH) .*[= ]stolen$", line)] == []


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("folder", [INJECTED, 'a"b', "a%j", "a$(id)", "a`id`", "a^array_index^"])
def test_a_hostile_run_directory_is_refused(name: str, folder: str) -> None:
    with pytest.raises(SettingError, match=r"run directory .* cannot stand in a batch script"):
        render(name, replace(REQUEST, run_dir=f"/runs/{folder}"))


@pytest.mark.parametrize("name", ["pbs", "lsf", "kubernetes"])
@pytest.mark.parametrize("gres", ["gpu:v100:2", "gpu", "license:1", "gpu:2,tmpdir:1"])
def test_resources_that_cannot_be_written_are_refused(name: str, gres: str) -> None:
    with pytest.raises(SettingError, match="cannot be written for this batch system"):
        render(name, replace(REQUEST, gres=gres))


def as_kubernetes_reads(word: str) -> str:
    """What Kubernetes makes of a word of a command, by its documented rules."""
    known = {"JOB_COMPLETION_INDEX": "1", "PACELINE_RDZV_KEY": "secret"}

    def expand(match: re.Match[str]) -> str:
        if match.group() == "$$":
            return "$"
        return known.get(match.group(1), match.group())

    return re.sub(r"\$\$|\$\(([^)]*)\)", expand, word)


@pytest.mark.parametrize(
    "word", [*HOSTILE, "$(PACELINE_RDZV_KEY)", "$$(PACELINE_RDZV_KEY)", "$$$(X)", "a$", "$$"]
)
def test_words_reach_the_job_in_a_pod(word: str) -> None:
    request = replace(REQUEST, words=("train.py", word))
    _, jobset = (json.loads(text) for text in render("kubernetes", request).split("---\n"))
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    read = [as_kubernetes_reads(one) for one in pod["containers"][0]["command"]]
    assert read[-2:] == ["train.py", word]
    assert read[read.index("--node-rank") + 1] == "1"


def test_a_manifest_that_was_not_filled_in_starts_nothing() -> None:
    """The placeholder for the key is none."""
    secret = json.loads(render("kubernetes", REQUEST).split("---\n")[0])
    placeholder = secret["stringData"]["key"]
    assert not re.fullmatch(r"[0-9a-f]{32,}", placeholder)
    assert "openssl rand -hex 16" in placeholder


def test_a_secret_stands_in_no_manifest() -> None:
    with pytest.raises(SettingError, match="--env HF_TOKEN cannot be forwarded"):
        render("kubernetes", replace(REQUEST, forwarded=("HF_TOKEN",)))
    assert "#PBS -v HF_TOKEN\n" in render("pbs", replace(REQUEST, forwarded=("HF_TOKEN",)))


def test_a_manifest_is_valid() -> None:
    """The pod's part against the rules of Kubernetes that a schema would check."""
    documents = [json.loads(text) for text in render("kubernetes", REQUEST).split("---\n")]
    secret, jobset = documents
    assert secret["kind"] == "Secret"
    assert jobset["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", jobset["metadata"]["name"])
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert job["completions"] == job["parallelism"] == REQUEST.nodes
    (container,) = job["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {
        "memory": "16Gi", "cpu": "16", "nvidia.com/gpu": "2",
    }  # fmt: skip
    meeting = f"{jobset['metadata']['name']}-node-0-0.{jobset['metadata']['name']}:29400"
    assert container["command"][container["command"].index("--rdzv") + 1] == meeting
    assert all(isinstance(word, str) for word in container["command"])


def test_kubernetes_needs_an_image() -> None:
    with pytest.raises(SettingError, match="needs an image"):
        render("kubernetes", replace(REQUEST, image=""))


# --- MPI


@pytest.mark.parametrize("file", sorted((FIXTURES / "mpi").glob("*.version.txt")), ids=str)
def test_an_mpi_is_recognised(file: Path) -> None:
    flavour, _, version = file.name.removesuffix(".version.txt").partition("-")
    assert mpi.parse_version(file.read_text()) == (flavour, version)


def test_what_is_no_mpi_is_not_recognised() -> None:
    assert mpi.parse_version("GNU bash, version 5.2.15(1)-release") is None


MPIS = {
    "intel": "mpiexec -bootstrap ssh -iface eth0 -hosts n1,10.0.0.2 -ppn 1 -n 2 -v",
    "mpich": "mpiexec -launcher ssh -iface eth0 -hosts n1,10.0.0.2 -ppn 1 -n 2 -v",
    "openmpi": "mpiexec --mca plm_rsh_agent ssh --mca plm_rsh_args '-F /c' "
    "--mca oob_tcp_if_include eth0 --mca btl_tcp_if_include eth0 --host n1:1,10.0.0.2:1 -np 2 "
    "--map-by ppr:1:node --bind-to none -x PACELINE_CALL_KEY -v",
}


@pytest.mark.parametrize("flavour", MPIS)
def test_the_command_of_an_mpi(flavour: str) -> None:
    found = mpi.Mpi(flavour, "1", "mpiexec")
    options = Options(interface="eth0", arguments=("-v",))
    assert mpi.command(found, HOSTS, options, "/c") == shlex.split(MPIS[flavour])


@pytest.mark.parametrize("flavour", ["intel", "mpich"])
def test_hydra_calls_back_by_address(flavour: str) -> None:
    """By the interface that the hosts reach, unless the user says otherwise."""
    found = mpi.Mpi(flavour, "1", "mpiexec")

    def iface(*arguments: str, interface: str | None = None) -> list[str]:
        options = Options(interface=interface, arguments=arguments)
        words = mpi.command(found, HOSTS, options, "/c", "wlan7")
        return [words[at + 1] for at, word in enumerate(words) if word == "-iface"]

    assert iface() == ["wlan7"]
    assert iface(interface="eth0") == ["eth0"]
    assert iface("-iface", "ib0") == ["ib0"]
    assert iface("-localhost", "10.0.0.9") == []


@pytest.mark.parametrize(
    ("words", "cause", "remedy"),
    [
        (
            "HYDU_sock_connect (sock.c:111): unable to get host address for laptop\n"
            "main (pmip.c:149): unable to connect to server laptop at port 4 (firewalls?)",
            "name resolution failed",
            "an entry for laptop in its /etc/hosts",
        ),
        (
            "getaddrinfo returned error -3 (Temporary failure in name resolution)\n"
            "main (x.c:532): unable to connect to server vm at port 46803 (check for firewalls!)",
            "name resolution failed",
            "an entry for vm in its /etc/hosts",
        ),
        (
            "unable to connect from n2 to 10.0.0.1 (Connection refused)",
            "could not connect back",
            "ufw allow from 10.0.0.2",
        ),
        ("Segmentation fault", "did not start a program", "--via ssh"),
    ],
)
def test_the_words_of_an_mpi_decide(words: str, cause: str, remedy: str) -> None:
    refusal = mpi.failed_alone(HOSTS[1], words)
    assert cause in refusal.cause
    assert remedy in refusal.remedy
    assert refusal.found


def test_a_name_is_given_only_to_the_command_that_takes_one() -> None:
    """ufw, firewalld and nft's sets want addresses."""
    remedy = mpi.failed_alone(HOSTS[0], "connect: Connection refused").remedy
    assert remedy.splitlines()[-1] == "Here: sudo iptables -I INPUT -s n1 -j ACCEPT"


def test_the_ssh_config_of_an_mpi() -> None:
    text = mpi.ssh_config(HOSTS, Options().ssh)
    assert text.startswith("Host 10.0.0.2\n    User ann\n    Port 2222\nHost *\n")
    assert "BatchMode yes" in text
    assert "StrictHostKeyChecking yes" in text


# --- Slurm


def test_the_command_of_srun() -> None:
    words = slurm.command("srun", HOSTS, ("--mem=0",))
    assert words[:5] == ["srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1",
                         "--nodelist=n1,10.0.0.2"]  # fmt: skip
    assert words[-1] == "--mem=0"


JOBS = {  # file → word, over, exit status
    "failed": ("FAILED", True, 7),
    "cancelled": ("CANCELLED", True, 128 + 15),
    "timeout": ("TIMEOUT", True, 1),
    "requeued": ("PENDING", False, 1),
    "unknown-word": ("TELEPORTED", False, 1),
}


@pytest.mark.parametrize("name", JOBS)
def test_a_job_of_slurm_is_read(name: str) -> None:
    state = parse_job((FIXTURES / "slurm" / f"{name}.job.txt").read_text())
    assert state is not None
    assert (state.word, state.over, state.exit_code) == JOBS[name]


def test_a_job_that_slurm_does_not_know() -> None:
    assert parse_job("slurm_load_jobs error: Invalid job id specified") is None


def test_a_node_of_slurm_is_read() -> None:
    text = (FIXTURES / "slurm" / "drained.node.txt").read_text()
    assert slurm.parse_node(text) == "MIXED+DRAIN (disk)"
    assert slurm.parse_node("") == ""


@pytest.mark.parametrize("text", ["12\n", "12;cluster\n", "sbatch: a note\n12\n"])
def test_a_submission_is_read(text: str) -> None:
    assert parse_submitted(text) == "12"


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ("srun: error: Unable to confirm allocation for job 8: Invalid job id", "is over"),
        ("srun: error: Unable to create step for job 3: Memory required", "does not let us"),
        ("paceline-call: n2: 10.0.0.1 port 4: timed out", "could not call back"),
        ("something new", "srun did not start the agent"),
    ],
)
def test_what_srun_says_is_explained(words: str, cause: str) -> None:
    error = slurm.explained(HOSTS, HOSTS[1:], 1, words, "8")
    assert cause in error.message
    assert "n2" in error.message
    assert words in error.found
    assert error.remedy
