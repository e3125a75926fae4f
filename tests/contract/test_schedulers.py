"""Tests all schedulers: deterministic scripts, quoting of hostile words, and recorded output."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import signal
import stat
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from each_case import each_case
from paceline.schedulers import SCHEDULERS, current_scheduler, load, mpi, slurm, submission
from paceline.schedulers.scheduler import Options
from paceline.schedulers.script import BatchRequest
from paceline.schedulers.slurm import parse_jobs
from paceline.spec.errors import PermanentConnectError, SettingError
from paceline.spec.hosts import Host

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "schedulers"
HOSTILE = ("a,b", "it's", '"q"', "$HOME", "a b", "64(x2)", "new\nline", "`id`", "\\", "ä", "")
HOSTS = (Host("n1", slots=2), Host("n2", "10.0.0.2", slots=2, user="ann", port=2222))
REQUEST = BatchRequest(
    name="my run",
    python="/opt/env/bin/python",
    verb=("run",),
    options=("-p", "2", "train.py", "--lr", "0.1"),
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


BATCHES = [name for name in SCHEDULERS if load(name).submit_options is not None]
STARTING = [name for name in SCHEDULERS if load(name).start_options is not None]
FOLLOWED = [name for name in SCHEDULERS if load(name).can_follow()]


def render(name: str, request: BatchRequest) -> str:
    """Renders a script; for Kubernetes, with mounts and no directives unless they are given."""
    if name == "kubernetes":
        directives = () if request.arguments == REQUEST.arguments else request.arguments
        mounts = request.mounts or ("project:/home/ann",)
        request = replace(request, arguments=directives, mounts=mounts)
    return load(name).render(request)


@each_case("name", SCHEDULERS)
def test_scheduler_metadata_is_complete(name: str) -> None:
    scheduler = load(name)
    assert scheduler.name == name
    assert scheduler.title
    assert scheduler.option.startswith("--")
    assert scheduler.start_options is not None or scheduler.submit_options is not None
    assert scheduler.can_follow() or scheduler.submit_options is None or scheduler.submit_command


@each_case("name", SCHEDULERS)
def test_rejects_unsupported_operations(name: str) -> None:
    """The error must be one of Paceline's."""
    scheduler = load(name)
    if scheduler.start_options is None:
        with pytest.raises(SettingError, match="starts no nodes"):
            scheduler.start(Options())
    if scheduler.submit_options is None:
        with pytest.raises(SettingError, match="takes no scripts"):
            scheduler.render(REQUEST)
    if not scheduler.can_follow():
        with pytest.raises(SettingError):
            scheduler.submit(Path("job"))
        with pytest.raises(SettingError):
            asyncio.run(scheduler.poll("7"))
        with pytest.raises(SettingError):
            scheduler.cancel("7")


def test_rejects_unknown_scheduler() -> None:
    with pytest.raises(SettingError, match="no scheduler `abacus`"):
        load("abacus")


@each_case("name", SCHEDULERS)
def test_no_allocation_if_variables_are_missing(name: str) -> None:
    assert load(name).allocation({}) is None
    assert current_scheduler({f"{name.upper()}_NOTHING": "1"}) is None


@pytest.mark.parametrize("name", STARTING)
def test_loss_reason_is_empty_if_commands_are_missing(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also if the scheduler's commands are missing."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert asyncio.run(load(name).loss_reason(Host("no-such-host"))) == ""


@pytest.fixture
def commands_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Creates stand-ins for a scheduler's commands, by name, with output and exit status."""

    def made(status: int = 0, **printed: str) -> None:
        for name, text in printed.items():
            (tmp_path / name).write_text(f"#!/bin/sh\necho \"$@\" >> {tmp_path}/asked\n"
                                         f"cat <<'EOF'\n{text}\nEOF\nexit {status}\n")  # fmt: skip
            (tmp_path / name).chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return made


# scheduler → the commands that it runs, their output for a submitted job, and for an unknown state
COMMAND_OUTPUTS: dict[str, tuple[tuple[str, ...], dict[str, str], str]] = {
    "slurm": (("sbatch", "scontrol", "scancel"), {"sbatch": "12;cluster"}, "unknown-word.job.txt"),
}


def test_command_outputs_cover_followed_schedulers() -> None:
    assert set(COMMAND_OUTPUTS) == set(FOLLOWED)


@pytest.mark.parametrize("name", FOLLOWED)
def test_submits_and_records_script(
    name: str, commands_of: Callable[..., None], tmp_path: Path
) -> None:
    commands, printed, _ = COMMAND_OUTPUTS[name]
    commands_of(**{command: printed.get(command, "") for command in commands})
    scheduler = load(name)
    job = submission.submit_job(scheduler, "the script", tmp_path / "run")
    assert re.fullmatch(scheduler.job_id, job.job)
    assert (tmp_path / "run" / scheduler.script).read_text() == "the script"
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700  # it will contain logs
    assert job.outputs == (tmp_path / "run" / scheduler.output.replace("{job}", job.job),)
    result = submission.read_submission(tmp_path / "run")
    assert result is not None
    assert (result.scheduler, result.job) == (scheduler, job.job)


def test_recalls_submitting_arguments(commands_of: Callable[..., None], tmp_path: Path) -> None:
    """Not the command in the script; another job in the same directory has its own."""
    commands, printed, _ = COMMAND_OUTPUTS["slurm"]
    commands_of(**{command: printed.get(command, "") for command in commands})
    command_line = "paceline run --via slurm --nnodes 2 'my train.py'"
    job = submission.submit_job(load("slurm"), "the script", tmp_path, typed=command_line).job
    environment = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": job}
    words = ("paceline", "run", "--via", "slurm", "--nnodes", "2", "my train.py")
    assert submission.submitting_arguments(tmp_path, environment) == words
    assert (
        submission.submitting_arguments(tmp_path, environment | {"SLURM_JOB_ID": f"{job}1"}) == ()
    )
    assert (
        submission.submitting_arguments(tmp_path, {})
        == submission.submitting_arguments(tmp_path / "x", environment)
        == ()
    )


@pytest.mark.parametrize("name", FOLLOWED)
def test_rejected_submission_shows_scheduler_message(
    name: str, commands_of: Callable[..., None], tmp_path: Path
) -> None:
    commands_of(**dict.fromkeys(COMMAND_OUTPUTS[name][0], "no such queue"), status=1)
    with pytest.raises(SettingError) as caught:
        load(name).submit(tmp_path / "job")
    assert "refused the batch" in caught.value.message
    assert caught.value.found == "no such queue"
    assert caught.value.exit_code == 1
    commands_of(**dict.fromkeys(COMMAND_OUTPUTS[name][0], "welcome to the cluster"))
    with pytest.raises(SettingError, match="said something unexpected"):
        load(name).submit(tmp_path / "job")


@pytest.mark.parametrize("name", FOLLOWED)
def test_cancelling_unknown_job_is_no_error(
    name: str, commands_of: Callable[..., None], tmp_path: Path
) -> None:
    """The second cancellation finds no job, which is not an error."""
    commands_of(**dict.fromkeys(COMMAND_OUTPUTS[name][0], "invalid job id"), status=1)
    load(name).cancel("12")
    load(name).cancel("12", kill=True)
    assert (tmp_path / "asked").read_text().count("12") == 2
    assert asyncio.run(load(name).poll("12")) is None


@pytest.mark.parametrize("name", FOLLOWED)
def test_preserves_unknown_job_state(name: str, commands_of: Callable[..., None]) -> None:
    commands, _, file = COMMAND_OUTPUTS[name]
    text = (FIXTURES / name / file).read_text().rstrip()
    commands_of(**dict.fromkeys(commands, text))
    state = asyncio.run(load(name).poll("12"))
    assert state is not None
    assert state.state == "TELEPORTED"
    assert not state.is_over
    assert state.exit_code != 0


@pytest.mark.parametrize("name", [*SCHEDULERS, "no-such-scheduler"])
@pytest.mark.parametrize(
    "job", ["", "-f", "--all", "7; rm -rf /", "a\nb", 7.5, None, ["7"], "7" * 60]
)
def test_ignores_hostile_job_record(name: str, job: object, tmp_path: Path) -> None:
    """Values in a file of the run directory become arguments of the scheduler's command."""
    record = {"scheduler": name, "job": job, "output": "../../etc/passwd"}
    (tmp_path / submission.BATCH).write_text(json.dumps(record))
    result = submission.read_submission(tmp_path)
    assert result is None or re.fullmatch(r"\w[\w.+\[\]-]*", result.job)
    assert result is None or result.outputs == ()


# Words that only a scheduler's own module may contain. Exceptions are the list of schedulers, its
# dialect of host lists, the variables of its tasks, and messages of people and programs.
SCHEDULER_TERMS = {
    "slurm": r"slurm|sbatch|srun|scontrol|scancel|squeue|sinfo|sacct|salloc",
    "pbs": r"qsub|qdel|qstat",
    "lsf": r"bsub|bkill|bjobs|LSB_",
    "kubernetes": r"kubectl|jobset",
}
ALLOWED_FILES = {
    "schedulers/__init__.py": 'its line in the list: "slurm",',
    "hosts/": "dialects of host lists, and their names",
    "spec/launchers.py": "variables by which a task knows its place",
    "cli/verbs/hosts.py": "names of dialects in the help",
    "cli/options.py": "the same",
    "cli/__init__.py": "the same",
    "spec/terminal.py": "commands that people paste",
    "explain/": "what programs write into logs",
    "remote/openssh.py": "words with which a compute node refuses a login",
}


@pytest.mark.parametrize("name", SCHEDULER_TERMS)
def test_scheduler_terms_stay_in_scheduler_module(name: str) -> None:
    """``--sbatch-arg`` is excepted: it is an option of all schedulers that take scripts."""
    source = Path(slurm.__file__).parents[1]
    offenders = []
    for file in sorted(source.rglob("*.py")):
        location = str(file.relative_to(source))
        if location == f"schedulers/{name}.py" or location.startswith(tuple(ALLOWED_FILES)):
            continue
        text = re.sub(r"sbatch[-_]arg", "", file.read_text())
        offenders += [location for _ in re.finditer(SCHEDULER_TERMS[name], text, re.IGNORECASE)]
    assert offenders == []
    listed = (source / "schedulers" / "__init__.py").read_text()
    assert len(re.findall(name, listed)) == 1


@pytest.mark.parametrize("name", BATCHES)
def test_batch_script_is_deterministic(name: str) -> None:
    assert render(name, REQUEST) == render(name, REQUEST)


@pytest.mark.parametrize("name", BATCHES)
def test_batch_script_matches_golden_file(name: str) -> None:
    """To accept a change, delete the file and run this test twice."""
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
    "bare": BatchRequest("x", "python", ("run",), ("t.py",), "/", "/r", 1),
}


@each_case("variant", VARIANTS)
@each_case("name", SHELL)
def test_batch_script_is_valid_shell(name: str, variant: str) -> None:
    process = subprocess.run(["bash", "-n"], input=render(name, VARIANTS[variant]), text=True,
                          capture_output=True, check=False)  # fmt: skip
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize("name", SHELL)
def test_batch_script_passes_hostile_arguments(name: str, tmp_path: Path) -> None:
    """Runs the script with a stand-in for Python that prints its arguments, separated by NUL."""
    fake_python = tmp_path / "it's a $tand-in"
    fake_python.write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
    fake_python.chmod(0o755)
    request = replace(
        REQUEST, python=str(fake_python), options=HOSTILE, setup=(),
        workdir=str(tmp_path), run_dir=str(tmp_path / "run"),
    )  # fmt: skip
    process = subprocess.run(["bash"], input=render(name, request), text=True, capture_output=True,
                          check=False, env={"LSB_MCPU_HOSTS": "n1 2 n2 2", "PATH": "/usr/bin:/bin"},
                          encoding="utf-8")  # fmt: skip
    words = process.stdout.split("\0")[:-1]
    assert tuple(words[-len(HOSTILE) :]) == HOSTILE, process.stderr


def test_lsf_run_directory_is_private(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "1"
    request = replace(REQUEST, python="true", setup=(), workdir=str(tmp_path), run_dir=str(run_dir))
    env = {"LSB_MCPU_HOSTS": "n1 2 n2 2", "PATH": "/usr/bin:/bin"}
    subprocess.run(["bash"], input=render("lsf", request), text=True, check=True, env=env, umask=0)
    assert (run_dir / "lsf-hosts").read_text() == "n1 slots=2\nn2 slots=2\n"
    for path in (run_dir, run_dir.parent, run_dir / "lsf-hosts"):
        assert not path.stat().st_mode & 0o077, path


@each_case("name", SHELL)
@each_case("value", ["a\nb", "$(id)", "a;b", "`x`", "a'b"])
def test_rejects_hostile_directives(name: str, value: str) -> None:
    with pytest.raises(SettingError, match="cannot be used in a batch script"):
        render(name, replace(REQUEST, partition=value))


@pytest.mark.parametrize("phase", ["set-up", "running"])
@pytest.mark.parametrize(("signum", "status"), [(signal.SIGUSR1, 143), (signal.SIGTERM, 143)])
def test_requeues_job_after_warning_signal(
    tmp_path: Path, phase: str, signum: int, status: int
) -> None:
    """Also while modules are still loaded; a cancelled job is not queued again."""
    printed = tmp_path / "said"
    fake_programs = {
        "job": f"trap 'exit 143' TERM; echo running >> {printed}; while :; do sleep 0.05; done",
        "scontrol": f'echo "$@" >> {printed}',
    }
    for name, text in fake_programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    setup = f"echo set-up >> {printed}; sleep 0.5"
    request = replace(REQUEST, python=str(tmp_path / "job"), requeue=True, setup=(setup,),
                      workdir=str(tmp_path), run_dir=str(tmp_path))  # fmt: skip
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    with subprocess.Popen(["bash", "-c", render("slurm", request)], env=env,
                          stdout=subprocess.DEVNULL) as child:  # fmt: skip
        deadline = time.monotonic() + 60
        while phase not in (printed.read_text() if printed.exists() else ""):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        child.send_signal(signum)
        code = child.wait(60)
    warned = signum == signal.SIGUSR1
    assert ("requeue 7" in printed.read_text()) is warned
    assert ("running" in printed.read_text()) is (phase == "running")
    assert code == (1 if warned and phase == "set-up" else status)


INJECTED = "x\n#PBS -q stolen\n#BSUB -q stolen\n#SBATCH --partition=stolen"


@pytest.mark.parametrize("name", SHELL)
def test_arguments_do_not_become_directives(name: str) -> None:
    """Batch systems search each line for directives, whatever it means to the shell."""
    request = replace(REQUEST, options=(INJECTED,), workdir=f"/w/{INJECTED}", name=INJECTED)
    lines = render(name, request).splitlines()
    assert [line for line in lines if line.startswith("#") and "stolen" in line.split()] == []
    assert [line for line in lines if re.match(r"#(PBS|BSUB|SBATCH) .*[= ]stolen$", line)] == []


@each_case("name", BATCHES)
@each_case("folder", [INJECTED, 'a"b', "a%j", "a$(id)", "a`id`", "a^array_index^"])
def test_rejects_hostile_run_directory(name: str, folder: str) -> None:
    with pytest.raises(SettingError, match=r"run directory .* cannot be used in a batch script"):
        render(name, replace(REQUEST, run_dir=f"/runs/{folder}"))


@pytest.mark.parametrize("name", ["pbs", "lsf", "kubernetes"])
@pytest.mark.parametrize("gres", ["gpu:v100:2", "gpu", "license:1", "gpu:2,tmpdir:1"])
def test_rejects_unsupported_gres(name: str, gres: str) -> None:
    with pytest.raises(SettingError, match="cannot be written for this batch system"):
        render(name, replace(REQUEST, gres=gres))


GPUS = {  # options → request to Slurm, and processes per node
    "total": ({"gpus": "v100:4"}, "--gpus-per-node=v100:2", 2),
    "a node": ({"gpus_per_node": "a100:2"}, "--gpus-per-node=a100:2", 2),
    "kinds": ({"gpus_per_node": "a100:2,v100:1"}, "--gpus-per-node=a100:2,v100:1", 3),
    "one of a kind": ({"gpus_per_node": "a100"}, "--gpus-per-node=a100:1", 1),
    "gres": ({"gres": "gpu:v100:1"}, "--gres=gpu:v100:1", 1),
    "gres of kinds": ({"gres": "gpu:v100:1,gpu:a100:2,tmp:5"}, "gpu:a100:2,tmp:5", 3),
    "no GPUs": ({"gres": "tmp:5"}, "--gres=tmp:5", None),
}


@pytest.mark.parametrize("case", GPUS)
def test_gpu_options_set_processes_per_node(case: str) -> None:
    """A job's total is also requested per node, so that Slurm cannot divide it unequally."""
    asked, directive, processes = GPUS[case]
    request = replace(REQUEST, **{"gres": "", "processes": None, **asked})
    text = render("slurm", request)
    assert directive in text
    assert ("--ntasks-per-node=" in text) is (processes is not None)
    assert processes is None or f"--ntasks-per-node={processes}\n" in text
    assert "--gpus=" not in text
    assert "--ntasks-per-node=5\n" in render("slurm", replace(request, processes=5))


@each_case(
    ("asked", "message"),
    [
        ({"gpus": "5"}, "5 cannot be divided equally among 2 nodes"),
        ({"gpus": "v100:2,a100:1"}, "cannot be divided equally"),
        ({"gpus": "4", "gpus_per_node": "2"}, "--gpus-per-node and --gpus both say"),
        ({"gpus": "4", "gres": "gpu:2"}, "--gres and --gpus both say"),
        ({"gpus_per_node": "v100:many"}, "--gpus-per-node v100:many"),
        ({"gres": "gpu:v100:2:4"}, "--gres v100:2:4"),
        ({"constraint": "a100\n#SBATCH --uid=0"}, "cannot be used in a batch script"),
        ({"constraint": "`id`"}, "cannot be used in a batch script"),
        ({"partition": "p --export=ALL"}, "cannot be the value of one option"),
        ({"time": "--output=x"}, "cannot be the value of one option"),
    ],
)
def test_rejects_invalid_resource_requests(asked: dict[str, str], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        render("slurm", replace(REQUEST, **{"gres": "", **asked}))


def test_gpus_per_node_in_batch_scripts() -> None:
    for name in BATCHES:
        by_gres = render(name, replace(REQUEST, processes=None))
        per_node = replace(REQUEST, processes=None, gres="", gpus_per_node="2")
        text = render(name, per_node)
        assert text == render(name, replace(per_node, gpus_per_node="", gpus="4"))
        assert text == by_gres or name == "slurm"
        if name != "slurm":
            with pytest.raises(SettingError, match="GPUs a100:2 cannot be written"):
                render(name, replace(per_node, gpus_per_node="a100:2"))


def test_constraint_becomes_slurm_directive() -> None:
    request = replace(REQUEST, constraint="(v100|a100)&hdr")
    assert "\n#SBATCH --constraint=(v100|a100)&hdr\n" in render("slurm", request)


def expand_as_kubernetes(word: str) -> str:
    """Expands a word of a command by the documented rules of Kubernetes."""
    known = {"JOB_COMPLETION_INDEX": "1", "PACELINE_RDZV_KEY": "secret"}

    def expand(match: re.Match[str]) -> str:
        if match.group() == "$$":
            return "$"
        return known.get(match.group(1), match.group())

    return re.sub(r"\$\$|\$\(([^)]*)\)", expand, word)


@each_case(
    "word", [*HOSTILE, "$(PACELINE_RDZV_KEY)", "$$(PACELINE_RDZV_KEY)", "$$$(X)", "a$", "$$"]
)
def test_pod_passes_hostile_arguments(word: str) -> None:
    request = replace(REQUEST, options=("train.py", word))
    pod = pod_of(json.loads(render("kubernetes", request).split("---\n")[-1]))
    read = [expand_as_kubernetes(item) for item in pod["containers"][0]["command"]]
    assert read[-2:] == ["train.py", word]
    assert read[read.index("--node-rank") + 1] == "1"


def manifest(**changes: object) -> list[dict[str, Any]]:
    text = render("kubernetes", replace(REQUEST, **changes))
    return [json.loads(item) for item in text.split("---\n")]


def pod_of(job_document: dict[str, Any]) -> dict[str, Any]:
    """Returns the pod specification of a Job or a JobSet."""
    spec = job_document["spec"]
    if job_document["kind"] == "JobSet":
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    pod: dict[str, Any] = spec["template"]["spec"]
    return pod


SCHEMAS = {"Secret": "io.k8s.api.core.v1.Secret", "Service": "io.k8s.api.core.v1.Service",
           "Job": "io.k8s.api.batch.v1.Job", "JobSet": "JobSet"}  # fmt: skip
MANIFESTS: dict[str, dict[str, object]] = {
    "Job": {},
    "JobSet": {"arguments": ("kind=JobSet",)},
    "everything": {
        "forwarded": ("HF_TOKEN",), "secrets": {"HF_TOKEN": "hf_x"}, "shm_size": "8g",
        "mounts": ("project:/home/ann", "data:/data:ro", "/scratch:/scratch"), "gres": "rdma/hca:1",
        "gpus": "4", "constraint": "nvidia.com/gpu.product=A100,zone=a", "time": "1-00:00:00",
    },
    "nothing": {"mem": "", "gres": "", "cpus_per_task": None, "time": "", "setup": ()},
}  # fmt: skip


@cache
def validator(kind: str) -> Any:
    """Returns a validator for the API server's published schemas, which allow no other fields."""
    import jsonschema

    known = json.loads((FIXTURES / "kubernetes" / "schemas.json").read_text())
    return jsonschema.Draft202012Validator({**known, "$ref": f"#/$defs/{SCHEMAS[kind]}"})


def test_kubernetes_schemas_are_valid() -> None:
    made = validator("Job")
    made.check_schema(made.schema)


@pytest.mark.parametrize("case", MANIFESTS)
def test_manifest_matches_schema(case: str) -> None:
    documents = manifest(**MANIFESTS[case])
    kinds = [item["kind"] for item in documents]
    assert kinds == (["Secret", "JobSet"] if case == "JobSet" else ["Secret", "Service", "Job"])
    for document in documents:
        schema = validator(document["kind"])
        schema.validate(document)
        assert not schema.is_valid({**document, "specs": {}})
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", document["metadata"]["name"])


@pytest.mark.parametrize("kind", ["Job", "JobSet"])
def test_pods_use_address_of_first_pod(kind: str) -> None:
    """The first pod of a Job is NAME-0 in a service, that of a JobSet has two numbers."""
    *leading, job_document = manifest(**MANIFESTS[kind])
    name = job_document["metadata"]["name"]
    spec = (
        job_document["spec"]
        if kind == "Job"
        else job_document["spec"]["replicatedJobs"][0]["template"]["spec"]
    )
    assert spec["completions"] == spec["parallelism"] == REQUEST.nodes
    assert (spec["completionMode"], spec["backoffLimit"]) == ("Indexed", 0)
    assert spec["activeDeadlineSeconds"] == 3600
    command = pod_of(job_document)["containers"][0]["command"]
    first = f"{name}-0.{name}" if kind == "Job" else f"{name}-node-0-0.{name}"
    assert command[command.index("--rdzv") + 1] == f"{first}:29400"
    assert all(isinstance(word, str) for word in command)
    if kind == "Job":
        service = leading[1]
        assert service["metadata"]["name"] == name == pod_of(job_document)["subdomain"]
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["publishNotReadyAddresses"] is True
        labels = spec["template"]["metadata"]["labels"]
        assert service["spec"]["selector"].items() <= labels.items()


def test_pod_has_resources_and_volumes() -> None:
    pod = pod_of(manifest(**MANIFESTS["everything"])[-1])
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {
        "memory": "16Gi", "cpu": "16", "nvidia.com/gpu": "2", "rdma/hca": "1",
    }  # fmt: skip
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "A100", "zone": "a"}
    volumes = {item.pop("name"): item for item in pod["volumes"]}
    assert {item["mountPath"]: (volumes[item["name"]], item.get("readOnly", False))
            for item in container["volumeMounts"]} == {
        "/dev/shm": ({"emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}, False),
        "/home/ann": ({"persistentVolumeClaim": {"claimName": "project"}}, False),
        "/data": ({"persistentVolumeClaim": {"claimName": "data"}}, True),
        "/scratch": ({"hostPath": {"path": "/scratch", "type": "Directory"}}, False),
    }  # fmt: skip
    assert pod_of(manifest(gres="amd.com/gpu:2", processes=None)[-1])["containers"][0]["resources"][
        "limits"]["amd.com/gpu"] == "2"  # fmt: skip


def test_secrets_are_only_in_secret_object() -> None:
    """A manifest that is only printed lacks even these values, and its pods cannot start."""
    values = {"PACELINE_RDZV_KEY": "0123456789abcdef" * 2, "HF_TOKEN": "hf_of_mine"}
    for secret_values in (values, {}):
        secret, *remainder = manifest(forwarded=("HF_TOKEN",), secrets=secret_values)
        assert secret["stringData"].keys() == values.keys()
        assert not secret_values or secret["stringData"] == values
        assert not any(value in json.dumps(remainder) for value in values.values())
        (container,) = pod_of(remainder[-1])["containers"]
        for name in values:
            (variable,) = [item for item in container["env"] if item["name"] == name]
            assert variable["valueFrom"]["secretKeyRef"] == {
                "name": secret["metadata"]["name"], "key": name,
            }  # fmt: skip
    placeholder = secret["stringData"]["PACELINE_RDZV_KEY"]
    assert not re.fullmatch(r"[0-9a-f]{32,}", placeholder)
    assert "openssl rand -hex 16" in placeholder
    assert "#PBS -v HF_TOKEN\n" in render("pbs", replace(REQUEST, forwarded=("HF_TOKEN",)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image": ""}, "needs an image"),
        ({"mounts": ()}, "would be gone with its pods"),
        ({"mounts": ("project:/home/ann:ro",)}, "would be gone with its pods"),
        ({"mounts": ("project:/data",)}, "would be gone with its pods"),
        ({"mounts": ("project",)}, "--mount project cannot be written"),
        ({"mounts": ("Project:/home/ann",)}, "cannot be written"),
        ({"mounts": ("project:/",)}, "cannot be written"),
        ({"arguments": ("--qos=debug",)}, "--sbatch-arg --qos=debug cannot be written"),
        ({"constraint": "v100"}, "--constraint v100 cannot be written"),
        ({"gres": "", "gpus_per_node": "a100:2"}, "GPUs a100:2 cannot be written"),
        ({"time": "tomorrow"}, "--time tomorrow is not a time"),
    ],
)
def test_rejects_options_unsupported_by_manifest(changes: dict[str, Any], message: str) -> None:
    request = {"arguments": (), "mounts": ("project:/home/ann",), **changes}
    with pytest.raises(SettingError, match=message):
        load("kubernetes").render(replace(REQUEST, **request))


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("90", 5400), ("90:30", 5430), ("1:30:00", 5400), ("2-12", 216000), ("1-00:00:01", 86401)],
)
def test_converts_time_limit_to_seconds(time: str, seconds: int) -> None:
    assert manifest(time=time)[-1]["spec"]["activeDeadlineSeconds"] == seconds


def test_pod_runs_setup_commands_in_shell(tmp_path: Path) -> None:
    """These lines are shell code; the arguments after them are not."""
    request = {"setup": ("export A=$((40 + 2))",), "options": ("$A", "it's")}
    command = pod_of(manifest(**request)[-1])["containers"][0]["command"]
    (tmp_path / "paceline").write_text('#!/bin/sh\nprintf "%s\\n" "$A" "$@"\n')
    (tmp_path / "paceline").chmod(0o755)
    env = {"PATH": f"{tmp_path}:/bin:/usr/bin"}
    process = subprocess.run([expand_as_kubernetes(item) for item in command], env=env, text=True,
                          check=True, capture_output=True)  # fmt: skip
    printed = process.stdout.splitlines()
    assert printed[:2] == ["42", "run"]
    assert printed[-2:] == ["$A", "it's"]


# --- MPI


@pytest.mark.parametrize("file", sorted((FIXTURES / "mpi").glob("*.version.txt")), ids=str)
def test_recognizes_mpi_version(file: Path) -> None:
    flavour, _, version = file.name.removesuffix(".version.txt").partition("-")
    assert mpi.parse_version(file.read_text()) == (flavour, version)


def test_does_not_recognize_foreign_version_output() -> None:
    assert mpi.parse_version("GNU bash, version 5.2.15(1)-release") is None


MPIS = {
    "intel": "mpiexec -bootstrap ssh -iface eth0 -hosts n1,10.0.0.2 -ppn 1 -n 2 -v",
    "mpich": "mpiexec -launcher ssh -iface eth0 -hosts n1,10.0.0.2 -ppn 1 -n 2 -v",
    "openmpi": "mpiexec --mca plm_rsh_agent '/c/ssh : ssh' --mca plm_rsh_no_tree_spawn 1 "
    "--mca plm_rsh_args '-F /c/ssh_config' "
    "--mca orte_enable_recovery 1 --mca orte_abort_on_non_zero_status 0 "
    "--mca orte_keep_fqdn_hostnames 1 "
    "--mca oob_tcp_if_include eth0 --mca btl_tcp_if_include eth0 --host n1:1,10.0.0.2:1 -np 2 "
    "--map-by seq --bind-to none -v",
}


@pytest.mark.parametrize("flavour", MPIS)
def test_mpi_command_line(flavour: str) -> None:
    result = mpi.Mpi(flavour, "1", "mpiexec")
    options = Options(interface="eth0", arguments=("-v",))
    assert mpi.command(result, HOSTS, options, "/c") == shlex.split(MPIS[flavour])


def test_mpiexec_gets_key_only_if_ssh_cannot_carry_it() -> None:
    result = mpi.Mpi("openmpi", "1", "mpiexec")
    for arguments, gets_key in (("-v",), False), (("--mca", "plm", "slurm"), True):
        options = Options(arguments=arguments)
        assert mpi.uses_our_ssh(options) is not gets_key
        assert ("PACELINE_CALL_KEY" in mpi.command(result, HOSTS, options, "/c")) is gets_key


@pytest.mark.parametrize("flavour", ["intel", "mpich"])
def test_hydra_uses_reachable_interface(flavour: str) -> None:
    """Uses the interface that the hosts reach, unless the user selects another one."""
    result = mpi.Mpi(flavour, "1", "mpiexec")

    def iface(*arguments: str, interface: str | None = None) -> list[str]:
        options = Options(interface=interface, arguments=arguments)
        words = mpi.command(result, HOSTS, options, "/c", "wlan7")
        return [words[i + 1] for i, word in enumerate(words) if word == "-iface"]

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
def test_mpi_error_gives_cause_and_remedy(words: str, cause: str, remedy: str) -> None:
    refusal = mpi.launch_refusal(HOSTS[1], words)
    assert cause in refusal.cause
    assert remedy in refusal.remedy
    assert refusal.details


def test_firewall_remedy_uses_host_name_only_in_iptables() -> None:
    """ufw, firewalld and nft's sets require addresses."""
    remedy = mpi.launch_refusal(HOSTS[0], "connect: Connection refused").remedy
    assert remedy.splitlines()[-1] == "Here: sudo iptables -I INPUT -s n1 -j ACCEPT"


def test_mpi_ssh_config() -> None:
    text = mpi.ssh_config(HOSTS, Options().ssh)
    assert text.startswith("Host 10.0.0.2\n    User ann\n    Port 2222\nHost *\n")
    assert "BatchMode yes" in text
    assert "StrictHostKeyChecking yes" in text


# --- Slurm


def test_srun_command_line() -> None:
    words = slurm.step("srun", HOSTS, ("--mem=0",))
    assert words[:5] == ["srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1",
                         "--nodelist=n1,10.0.0.2"]  # fmt: skip
    assert words[-1] == "--mem=0"
    # the end of one agent, or a failed node, must not end others, even with a WaitTime
    assert {"--kill-on-bad-exit=0", "--no-kill", "--wait=0", "--overlap"} <= set(words)
    gpu_hosts = [replace(host, gpus=2) for host in HOSTS]
    assert slurm.step("srun", gpu_hosts, ())[-1] == "--gpus-per-node=2"


JOBS = {  # file → state, whether it is over, exit status
    "failed": ("FAILED", True, 7),
    "cancelled": ("CANCELLED", True, 128 + 15),
    "timeout": ("TIMEOUT", True, 1),
    "requeued": ("PENDING", False, 1),
    "unknown-word": ("TELEPORTED", False, 1),
}


@pytest.mark.parametrize("name", JOBS)
def test_parses_slurm_job(name: str) -> None:
    state = parse_jobs((FIXTURES / "slurm" / f"{name}.job.txt").read_text())
    assert state is not None
    assert (state.state, state.is_over, state.exit_code) == JOBS[name]


@pytest.mark.parametrize("reason", slurm.PARTITION_LIMITS)
def test_explains_partition_limits(reason: str) -> None:
    text = (FIXTURES / "slurm" / "requeued.job.txt").read_text()
    state = parse_jobs(text.replace("Reason=BeginTime", f"Reason={reason}"))
    assert state is not None
    assert state.describe().startswith(f"PENDING ({reason}: the partition ")
    assert state.describe().endswith(": see sinfo)")


def test_unknown_slurm_job_is_none() -> None:
    assert parse_jobs("slurm_load_jobs error: Invalid job id specified") is None


def test_parses_slurm_node() -> None:
    text = (FIXTURES / "slurm" / "drained.node.txt").read_text()
    assert slurm.parse_node(text) == "MIXED+DRAIN (disk)"
    assert slurm.parse_node("") == ""


@pytest.mark.parametrize("text", ["12\n", "12;cluster\n", "sbatch: a note\n12\n"])
def test_parses_sbatch_output(text: str) -> None:
    result = re.search(slurm.JOB_ID_PATTERN, text, re.MULTILINE)
    assert result is not None
    assert result.group(1) == "12"


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ("srun: error: Unable to confirm allocation for job 8: Invalid job id", "is over"),
        ("srun: error: Unable to create step for job 3: Memory required", "does not let us"),
        ("paceline-call: n2: 10.0.0.1 port 4: timed out", "could not call back"),
        ("something new", "srun did not start the agent"),
        # Slurm 22.05, node without power: until Slurm notices it, and afterwards
        (
            "srun: error: Task launch for StepId=1.1 failed on node n2: Communication connection"
            " failure\nsrun: error: Application launch failed: Communication connection failure"
            "\nsrun: Job step aborted",
            "does not answer Slurm",
        ),
        (
            "srun: error: Unable to create step for job 1: Requested node configuration is not"
            " available",
            "no longer, such a node",
        ),
        (
            "srun: error: Slurm job 1 has expired\nsrun: Check SLURM_JOB_ID environment variable."
            " Expired or invalid job 1",
            "is over",
        ),
    ],
)
def test_explains_srun_errors(
    words: str, cause: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Covers the short form, too; the class of the error says whether a retry is useless."""
    monkeypatch.setenv("PATH", str(tmp_path))
    starter = slurm.SlurmStarter("srun", (), "8")
    error = asyncio.run(starter.explain(HOSTS, HOSTS[1:], 1, words))
    assert cause in error.message
    assert error.brief.endswith(f": {words.splitlines()[0]}")
    assert cause in error.brief
    assert isinstance(error, PermanentConnectError) is ("is over" in cause or "no longer" in cause)
    assert "n2" in error.message
    assert words in error.found
    assert error.remedy
