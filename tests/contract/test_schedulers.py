"""Every scheduler, by what all promise: deterministic scripts, safe with hostile words, golden."""

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
from paceline.schedulers.slurm import parse_job
from paceline.spec.errors import PermanentConnectError, SettingError
from paceline.spec.hosts import Host

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "schedulers"
HOSTILE = ("a,b", "it's", '"q"', "$HOME", "a b", "64(x2)", "new\nline", "`id`", "\\", "ä", "")
HOSTS = (Host("n1", slots=2), Host("n2", "10.0.0.2", slots=2, user="ann", port=2222))
REQUEST = BatchRequest(
    name="my run",
    argv=("/opt/env/bin/python", "-m", "paceline", "run"),
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
    """With what Kubernetes has instead of directives and shared disks, unless something is said."""
    if name == "kubernetes":
        directives = () if request.arguments == REQUEST.arguments else request.arguments
        mounts = request.mounts or ("project:/home/ann",)
        request = replace(request, arguments=directives, mounts=mounts)
    return load(name).render(request)


@each_case("name", SCHEDULERS)
def test_every_scheduler_says_what_it_is(name: str) -> None:
    scheduler = load(name)
    assert scheduler.name == name
    assert scheduler.title
    assert scheduler.option.startswith("--")
    assert scheduler.start_options is not None or scheduler.submit_options is not None
    assert scheduler.can_follow() or scheduler.submit_options is None or scheduler.submit_command


@each_case("name", SCHEDULERS)
def test_what_a_scheduler_lacks_it_refuses(name: str) -> None:
    """With an error for people, not with one of Python's."""
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


def test_there_is_no_scheduler_of_another_name() -> None:
    with pytest.raises(SettingError, match="no scheduler `abacus`"):
        load("abacus")


@each_case("name", SCHEDULERS)
def test_nobody_is_in_an_allocation_without_its_variables(name: str) -> None:
    assert load(name).allocation({}) is None
    assert current_scheduler({f"{name.upper()}_NOTHING": "1"}) is None


@pytest.mark.parametrize("name", STARTING)
def test_why_a_node_went_is_asked_without_an_error(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where the scheduler's commands are not here."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert asyncio.run(load(name).loss_reason(Host("no-such-host"))) == ""


@pytest.fixture
def commands_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Stand-ins for a scheduler's commands: name → what it prints, and its exit status."""

    def made(status: int = 0, **said: str) -> None:
        for name, text in said.items():
            (tmp_path / name).write_text(f"#!/bin/sh\necho \"$@\" >> {tmp_path}/asked\n"
                                         f"cat <<'EOF'\n{text}\nEOF\nexit {status}\n")  # fmt: skip
            (tmp_path / name).chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return made


# scheduler → the commands that it runs, what they say of a submitted job and of an unknown state
SAID: dict[str, tuple[tuple[str, ...], dict[str, str], str]] = {
    "slurm": (("sbatch", "scontrol", "scancel"), {"sbatch": "12;cluster"}, "unknown-word.job.txt"),
}


def test_every_scheduler_that_follows_jobs_has_its_words_here() -> None:
    assert set(SAID) == set(FOLLOWED)


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_script_is_submitted_and_recorded(
    name: str, commands_of: Callable[..., None], tmp_path: Path
) -> None:
    commands, said, _ = SAID[name]
    commands_of(**{command: said.get(command, "") for command in commands})
    scheduler = load(name)
    job = submission.submit_job(scheduler, "the script", tmp_path / "run")
    assert re.fullmatch(scheduler.job_id, job.job)
    assert (tmp_path / "run" / scheduler.script).read_text() == "the script"
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700  # its logs will lie there
    assert job.outputs == (tmp_path / "run" / scheduler.output.replace("{job}", job.job),)
    found = submission.read_submission(tmp_path / "run")
    assert found is not None
    assert (found.scheduler, found.job) == (scheduler, job.job)


def test_a_batch_says_how_to_resume_in_the_words_that_submitted_it(
    commands_of: Callable[..., None], tmp_path: Path
) -> None:
    """And not by the command inside it; another job in the same directory by its own."""
    commands, said, _ = SAID["slurm"]
    commands_of(**{command: said.get(command, "") for command in commands})
    typed = "paceline run --via slurm --nnodes 2 'my train.py'"
    job = submission.submit_job(load("slurm"), "the script", tmp_path, typed=typed).job
    inside = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": job}
    words = ("paceline", "run", "--via", "slurm", "--nnodes", "2", "my train.py")
    assert submission.submitting_arguments(tmp_path, inside) == words
    assert submission.submitting_arguments(tmp_path, inside | {"SLURM_JOB_ID": f"{job}1"}) == ()
    assert (
        submission.submitting_arguments(tmp_path, {})
        == submission.submitting_arguments(tmp_path / "x", inside)
        == ()
    )


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_refusal_is_the_schedulers_own(
    name: str, commands_of: Callable[..., None], tmp_path: Path
) -> None:
    commands_of(**dict.fromkeys(SAID[name][0], "no such queue"), status=1)
    with pytest.raises(SettingError) as caught:
        load(name).submit(tmp_path / "job")
    assert "refused the batch" in caught.value.message
    assert caught.value.found == "no such queue"
    assert caught.value.exit_code == 1
    commands_of(**dict.fromkeys(SAID[name][0], "welcome to the cluster"))
    with pytest.raises(SettingError, match="said something unexpected"):
        load(name).submit(tmp_path / "job")


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_job_is_cancelled_twice(
    name: str, commands_of: Callable[..., None], tmp_path: Path
) -> None:
    """The second time it is unknown, and that is no error."""
    commands_of(**dict.fromkeys(SAID[name][0], "invalid job id"), status=1)
    load(name).cancel("12")
    load(name).cancel("12", kill=True)
    assert (tmp_path / "asked").read_text().count("12") == 2
    assert asyncio.run(load(name).poll("12")) is None


@pytest.mark.parametrize("name", FOLLOWED)
def test_an_unknown_state_is_kept_as_said(name: str, commands_of: Callable[..., None]) -> None:
    commands, _, file = SAID[name]
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
def test_a_hostile_record_of_a_job_is_none(name: str, job: object, tmp_path: Path) -> None:
    """What stands in the file of a run directory becomes a word of the scheduler's command."""
    record = {"scheduler": name, "job": job, "output": "../../etc/passwd"}
    (tmp_path / submission.BATCH).write_text(json.dumps(record))
    found = submission.read_submission(tmp_path)
    assert found is None or re.fullmatch(r"\w[\w.+\[\]-]*", found.job)
    assert found is None or found.outputs == ()


# What only a scheduler's own file may know. Elsewhere its name stands in the list of schedulers, in
# its dialect of host lists, in the variables of its tasks, and in the words of people and programs.
OWN_WORDS = {
    "slurm": r"slurm|sbatch|srun|scontrol|scancel|squeue|sinfo|sacct|salloc",
    "pbs": r"qsub|qdel|qstat",
    "lsf": r"bsub|bkill|bjobs|LSB_",
    "kubernetes": r"kubectl|jobset",
}
ELSEWHERE = {
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


@pytest.mark.parametrize("name", OWN_WORDS)
def test_only_its_own_file_knows_a_scheduler(name: str) -> None:
    """``--sbatch-arg`` is an option of all that take scripts, called as people know it."""
    source = Path(slurm.__file__).parents[1]
    knowing = []
    for file in sorted(source.rglob("*.py")):
        where = str(file.relative_to(source))
        if where == f"schedulers/{name}.py" or where.startswith(tuple(ELSEWHERE)):
            continue
        text = re.sub(r"sbatch[-_]arg", "", file.read_text())
        knowing += [where for _ in re.finditer(OWN_WORDS[name], text, re.IGNORECASE)]
    assert knowing == []
    listed = (source / "schedulers" / "__init__.py").read_text()
    assert len(re.findall(name, listed)) == 1


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


@each_case("variant", VARIANTS)
@each_case("name", SHELL)
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
        REQUEST, argv=(str(stand_in), "-m", "paceline", "run"), options=HOSTILE, setup=(),
        workdir=str(tmp_path), run_dir=str(tmp_path / "run"),
    )  # fmt: skip
    done = subprocess.run(["bash"], input=render(name, request), text=True, capture_output=True,
                          check=False, env={"LSB_MCPU_HOSTS": "n1 2 n2 2", "PATH": "/usr/bin:/bin"},
                          encoding="utf-8")  # fmt: skip
    words = done.stdout.split("\0")[:-1]
    assert tuple(words[-len(HOSTILE) :]) == HOSTILE, done.stderr


@each_case("name", SHELL)
@each_case("value", ["a\nb", "$(id)", "a;b", "`x`", "a'b"])
def test_hostile_directives_are_refused(name: str, value: str) -> None:
    with pytest.raises(SettingError, match="cannot be used in a batch script"):
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
        deadline = time.monotonic() + 60
        while phase not in (said.read_text() if said.exists() else ""):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        child.send_signal(signum)
        code = child.wait(60)
    warned = signum == signal.SIGUSR1
    assert ("requeue 7" in said.read_text()) is warned
    assert ("running" in said.read_text()) is (phase == "running")
    assert code == (1 if warned and phase == "set-up" else status)


INJECTED = "x\n#PBS -q stolen\n#BSUB -q stolen\n#SBATCH --partition=stolen"


@pytest.mark.parametrize("name", SHELL)
def test_no_word_becomes_a_directive(name: str) -> None:
    """Batch systems look for directives line by line, whatever the shell makes of the line."""
    request = replace(REQUEST, options=(INJECTED,), workdir=f"/w/{INJECTED}", name=INJECTED)
    lines = render(name, request).splitlines()
    assert [line for line in lines if line.startswith("#") and "stolen" in line.split()] == []
    assert [line for line in lines if re.match(r"#(PBS|BSUB|SBATCH) .*[= ]stolen$", line)] == []


@each_case("name", BATCHES)
@each_case("folder", [INJECTED, 'a"b', "a%j", "a$(id)", "a`id`", "a^array_index^"])
def test_a_hostile_run_directory_is_refused(name: str, folder: str) -> None:
    with pytest.raises(SettingError, match=r"run directory .* cannot be used in a batch script"):
        render(name, replace(REQUEST, run_dir=f"/runs/{folder}"))


@pytest.mark.parametrize("name", ["pbs", "lsf", "kubernetes"])
@pytest.mark.parametrize("gres", ["gpu:v100:2", "gpu", "license:1", "gpu:2,tmpdir:1"])
def test_resources_that_cannot_be_written_are_refused(name: str, gres: str) -> None:
    with pytest.raises(SettingError, match="cannot be written for this batch system"):
        render(name, replace(REQUEST, gres=gres))


GPUS = {  # options → what Slurm is asked for, and processes a node
    "total": ({"gpus": "v100:4"}, "--gpus-per-node=v100:2", 2),
    "a node": ({"gpus_per_node": "a100:2"}, "--gpus-per-node=a100:2", 2),
    "kinds": ({"gpus_per_node": "a100:2,v100:1"}, "--gpus-per-node=a100:2,v100:1", 3),
    "one of a kind": ({"gpus_per_node": "a100"}, "--gpus-per-node=a100:1", 1),
    "gres": ({"gres": "gpu:v100:1"}, "--gres=gpu:v100:1", 1),
    "gres of kinds": ({"gres": "gpu:v100:1,gpu:a100:2,tmp:5"}, "gpu:a100:2,tmp:5", 3),
    "no GPUs": ({"gres": "tmp:5"}, "--gres=tmp:5", None),
}


@pytest.mark.parametrize("case", GPUS)
def test_gpus_are_shared_out_and_counted(case: str) -> None:
    """A job's total too is asked for by node, so that Slurm cannot share it out unequally."""
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
def test_wishes_that_cannot_be_are_refused(asked: dict[str, str], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        render("slurm", replace(REQUEST, **{"gres": "", **asked}))


def test_a_number_of_gpus_for_every_batch_system() -> None:
    for name in BATCHES:
        by_gres = render(name, replace(REQUEST, processes=None))
        each = replace(REQUEST, processes=None, gres="", gpus_per_node="2")
        text = render(name, each)
        assert text == render(name, replace(each, gpus_per_node="", gpus="4"))
        assert text == by_gres or name == "slurm"
        if name != "slurm":
            with pytest.raises(SettingError, match="GPUs a100:2 cannot be written"):
                render(name, replace(each, gpus_per_node="a100:2"))


def test_features_that_the_nodes_must_have() -> None:
    request = replace(REQUEST, constraint="(v100|a100)&hdr")
    assert "\n#SBATCH --constraint=(v100|a100)&hdr\n" in render("slurm", request)


def as_kubernetes_reads(word: str) -> str:
    """What Kubernetes makes of a word of a command, by its documented rules."""
    known = {"JOB_COMPLETION_INDEX": "1", "PACELINE_RDZV_KEY": "secret"}

    def expand(match: re.Match[str]) -> str:
        if match.group() == "$$":
            return "$"
        return known.get(match.group(1), match.group())

    return re.sub(r"\$\$|\$\(([^)]*)\)", expand, word)


@each_case(
    "word", [*HOSTILE, "$(PACELINE_RDZV_KEY)", "$$(PACELINE_RDZV_KEY)", "$$$(X)", "a$", "$$"]
)
def test_words_reach_the_job_in_a_pod(word: str) -> None:
    request = replace(REQUEST, options=("train.py", word))
    pod = pod_of(json.loads(render("kubernetes", request).split("---\n")[-1]))
    read = [as_kubernetes_reads(one) for one in pod["containers"][0]["command"]]
    assert read[-2:] == ["train.py", word]
    assert read[read.index("--node-rank") + 1] == "1"


def manifest(**changes: object) -> list[dict[str, Any]]:
    text = render("kubernetes", replace(REQUEST, **changes))
    return [json.loads(one) for one in text.split("---\n")]


def pod_of(whole: dict[str, Any]) -> dict[str, Any]:
    """The pods' description in a Job or a JobSet."""
    spec = whole["spec"]
    if whole["kind"] == "JobSet":
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
    """By the schemas that the servers publish, which know all fields and no others."""
    import jsonschema

    known = json.loads((FIXTURES / "kubernetes" / "schemas.json").read_text())
    return jsonschema.Draft202012Validator({**known, "$ref": f"#/$defs/{SCHEMAS[kind]}"})


def test_the_schemas_are_schemas() -> None:
    made = validator("Job")
    made.check_schema(made.schema)


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_manifest_is_valid(case: str) -> None:
    documents = manifest(**MANIFESTS[case])
    kinds = [one["kind"] for one in documents]
    assert kinds == (["Secret", "JobSet"] if case == "JobSet" else ["Secret", "Service", "Job"])
    for document in documents:
        schema = validator(document["kind"])
        schema.validate(document)
        assert not schema.is_valid({**document, "specs": {}})
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", document["metadata"]["name"])


@pytest.mark.parametrize("kind", ["Job", "JobSet"])
def test_pods_find_each_other(kind: str) -> None:
    """By the name of the first: a Job's pod is NAME-0 in a service, a JobSet's has two numbers."""
    *others, whole = manifest(**MANIFESTS[kind])
    name = whole["metadata"]["name"]
    spec = (
        whole["spec"] if kind == "Job" else whole["spec"]["replicatedJobs"][0]["template"]["spec"]
    )
    assert spec["completions"] == spec["parallelism"] == REQUEST.nodes
    assert (spec["completionMode"], spec["backoffLimit"]) == ("Indexed", 0)
    assert spec["activeDeadlineSeconds"] == 3600
    command = pod_of(whole)["containers"][0]["command"]
    first = f"{name}-0.{name}" if kind == "Job" else f"{name}-node-0-0.{name}"
    assert command[command.index("--rdzv") + 1] == f"{first}:29400"
    assert all(isinstance(word, str) for word in command)
    if kind == "Job":
        service = others[1]
        assert service["metadata"]["name"] == name == pod_of(whole)["subdomain"]
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["publishNotReadyAddresses"] is True
        labels = spec["template"]["metadata"]["labels"]
        assert service["spec"]["selector"].items() <= labels.items()


def test_what_a_pod_gets() -> None:
    pod = pod_of(manifest(**MANIFESTS["everything"])[-1])
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {
        "memory": "16Gi", "cpu": "16", "nvidia.com/gpu": "2", "rdma/hca": "1",
    }  # fmt: skip
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "A100", "zone": "a"}
    volumes = {one.pop("name"): one for one in pod["volumes"]}
    assert {one["mountPath"]: (volumes[one["name"]], one.get("readOnly", False))
            for one in container["volumeMounts"]} == {
        "/dev/shm": ({"emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}, False),
        "/home/ann": ({"persistentVolumeClaim": {"claimName": "project"}}, False),
        "/data": ({"persistentVolumeClaim": {"claimName": "data"}}, True),
        "/scratch": ({"hostPath": {"path": "/scratch", "type": "Directory"}}, False),
    }  # fmt: skip
    assert pod_of(manifest(gres="amd.com/gpu:2", processes=None)[-1])["containers"][0]["resources"][
        "limits"]["amd.com/gpu"] == "2"  # fmt: skip


def test_secrets_stand_in_the_secret_alone() -> None:
    """And not even there in a manifest that is only looked at: with it no pod starts."""
    values = {"PACELINE_RDZV_KEY": "0123456789abcdef" * 2, "HF_TOKEN": "hf_of_mine"}
    for given in (values, {}):
        secret, *rest = manifest(forwarded=("HF_TOKEN",), secrets=given)
        assert secret["stringData"].keys() == values.keys()
        assert not given or secret["stringData"] == values
        assert not any(value in json.dumps(rest) for value in values.values())
        (container,) = pod_of(rest[-1])["containers"]
        for name in values:
            (variable,) = [one for one in container["env"] if one["name"] == name]
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
def test_what_a_manifest_cannot_say_is_refused(changes: dict[str, Any], message: str) -> None:
    request = {"arguments": (), "mounts": ("project:/home/ann",), **changes}
    with pytest.raises(SettingError, match=message):
        load("kubernetes").render(replace(REQUEST, **request))


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("90", 5400), ("90:30", 5430), ("1:30:00", 5400), ("2-12", 216000), ("1-00:00:01", 86401)],
)
def test_a_time_limit_in_seconds(time: str, seconds: int) -> None:
    assert manifest(time=time)[-1]["spec"]["activeDeadlineSeconds"] == seconds


def test_lines_before_the_job_in_a_pod(tmp_path: Path) -> None:
    """They are shell, what follows them is not."""
    request = {"setup": ("export A=$((40 + 2))",), "options": ("$A", "it's"), "argv": ("run",)}
    command = pod_of(manifest(**request)[-1])["containers"][0]["command"]
    (tmp_path / "paceline").write_text('#!/bin/sh\nprintf "%s\\n" "$A" "$@"\n')
    (tmp_path / "paceline").chmod(0o755)
    env = {"PATH": f"{tmp_path}:/bin:/usr/bin"}
    done = subprocess.run([as_kubernetes_reads(one) for one in command], env=env, text=True,
                          check=True, capture_output=True)  # fmt: skip
    said = done.stdout.splitlines()
    assert said[:2] == ["42", "run"]
    assert said[-2:] == ["$A", "it's"]


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
    "openmpi": "mpiexec --mca plm_rsh_agent '/c/ssh : ssh' --mca plm_rsh_no_tree_spawn 1 "
    "--mca plm_rsh_args '-F /c/ssh_config' "
    "--mca orte_enable_recovery 1 --mca orte_abort_on_non_zero_status 0 "
    "--mca oob_tcp_if_include eth0 --mca btl_tcp_if_include eth0 --host n1:1,10.0.0.2:1 -np 2 "
    "--map-by ppr:1:node --bind-to none -v",
}


@pytest.mark.parametrize("flavour", MPIS)
def test_the_command_of_an_mpi(flavour: str) -> None:
    found = mpi.Mpi(flavour, "1", "mpiexec")
    options = Options(interface="eth0", arguments=("-v",))
    assert mpi.command(found, HOSTS, options, "/c") == shlex.split(MPIS[flavour])


def test_mpiexec_gets_the_key_only_if_its_logins_do_not_carry_it() -> None:
    found = mpi.Mpi("openmpi", "1", "mpiexec")
    for arguments, gets_key in (("-v",), False), (("--mca", "plm", "slurm"), True):
        options = Options(arguments=arguments)
        assert mpi.uses_our_ssh(options) is not gets_key
        assert ("PACELINE_CALL_KEY" in mpi.command(found, HOSTS, options, "/c")) is gets_key


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
    refusal = mpi.launch_refusal(HOSTS[1], words)
    assert cause in refusal.cause
    assert remedy in refusal.remedy
    assert refusal.details


def test_a_name_is_given_only_to_the_command_that_takes_one() -> None:
    """ufw, firewalld and nft's sets want addresses."""
    remedy = mpi.launch_refusal(HOSTS[0], "connect: Connection refused").remedy
    assert remedy.splitlines()[-1] == "Here: sudo iptables -I INPUT -s n1 -j ACCEPT"


def test_the_ssh_config_of_an_mpi() -> None:
    text = mpi.ssh_config(HOSTS, Options().ssh)
    assert text.startswith("Host 10.0.0.2\n    User ann\n    Port 2222\nHost *\n")
    assert "BatchMode yes" in text
    assert "StrictHostKeyChecking yes" in text


# --- Slurm


def test_the_command_of_srun() -> None:
    words = slurm.step("srun", HOSTS, ("--mem=0",))
    assert words[:5] == ["srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1",
                         "--nodelist=n1,10.0.0.2"]  # fmt: skip
    assert words[-1] == "--mem=0"
    # what becomes of one agent ends no other: a site's WaitTime would, and a node that fails
    assert {"--kill-on-bad-exit=0", "--no-kill", "--wait=0", "--overlap"} <= set(words)
    ours = [replace(host, gpus=2) for host in HOSTS]
    assert slurm.step("srun", ours, ())[-1] == "--gpus-per-node=2"


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
    assert (state.state, state.is_over, state.exit_code) == JOBS[name]


@pytest.mark.parametrize("reason", slurm.PARTITION_LIMITS)
def test_a_job_that_waits_for_a_larger_partition_says_where_to_look(reason: str) -> None:
    text = (FIXTURES / "slurm" / "requeued.job.txt").read_text()
    state = parse_job(text.replace("Reason=BeginTime", f"Reason={reason}"))
    assert state is not None
    assert state.describe().startswith(f"PENDING ({reason}: the partition ")
    assert state.describe().endswith(": see sinfo)")


def test_a_job_that_slurm_does_not_know() -> None:
    assert parse_job("slurm_load_jobs error: Invalid job id specified") is None


def test_a_node_of_slurm_is_read() -> None:
    text = (FIXTURES / "slurm" / "drained.node.txt").read_text()
    assert slurm.parse_node(text) == "MIXED+DRAIN (disk)"
    assert slurm.parse_node("") == ""


@pytest.mark.parametrize("text", ["12\n", "12;cluster\n", "sbatch: a note\n12\n"])
def test_a_submission_is_read(text: str) -> None:
    found = re.search(slurm.JOB_ID_PATTERN, text, re.MULTILINE)
    assert found is not None
    assert found.group(1) == "12"


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ("srun: error: Unable to confirm allocation for job 8: Invalid job id", "is over"),
        ("srun: error: Unable to create step for job 3: Memory required", "does not let us"),
        ("paceline-call: n2: 10.0.0.1 port 4: timed out", "could not call back"),
        ("something new", "srun did not start the agent"),
        # Slurm 22.05, a node without power: until Slurm notices, and ever after
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
def test_what_srun_says_is_explained(
    words: str, cause: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In short, too; where it is no use to ask again, that is said by the error's kind."""
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
