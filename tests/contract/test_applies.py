"""Tests every option of the launching commands, with every scheduler, started now and submitted.

Each option must either change what would be started or written, or be refused with exit status 2.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import click
import pytest
from click.testing import CliRunner

from command_lines import overridden
from paceline.bench import saved_forecasts
from paceline.checks import runner
from paceline.cli import applicability, launch, program, trust
from paceline.cli.measure import probes
from paceline.cli.runs import attached, leave
from paceline.cli.settings_file import read_settings_file
from paceline.cli.verbs import evaluate
from paceline.cli.verbs.bench import scaling as scaling_verb
from paceline.launch import launcher
from paceline.remote import this_machine
from paceline.remote.login import connect_command
from paceline.remote.openssh import ssh_command
from paceline.rendezvous.manual import ManualTransport
from paceline.rendezvous.scheduled import ScheduledTransport
from paceline.schedulers import commands, mpi, submission
from paceline.schedulers.container import ContainerTransport, Probe, container_for
from paceline.schedulers.ssh import SshTransport
from paceline.spec.errors import SettingError
from paceline.spec.hosts import Cluster, Host
from paceline.spec.rundir import MODEL_CONFIG

HOSTS = (Host("n1"), Host("n2", "10.0.0.2"))
ALLOCATION = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
# launch mode → options that select it
MODE_OPTIONS: dict[str, tuple[str, ...]] = {
    "ssh": ("--via", "ssh", "-H", "n1,n2"),
    "local": ("--via", "local"),
    "mpi": ("--via", "mpi", "-H", "n1,n2"),
    "slurm": ("--via", "slurm"),
    "docker": ("--image", "i:1", "-H", "n1,n2"),
    "podman": ("--via", "podman", "--image", "i:1", "-H", "n1,n2"),
    "apptainer": ("--via", "apptainer", "--image", "i.sif", "-H", "n1,n2"),
    "rdzv": ("--rdzv", "127.0.0.1", "--nnodes", "2", "--node-rank", "0"),
    "slurm script": ("--via", "slurm", "--nnodes", "3", "--plan"),
    "pbs script": ("--via", "pbs", "--nnodes", "3"),
    "lsf script": ("--via", "lsf", "--nnodes", "3"),
    "kubernetes script": (
        *("--via", "kubernetes", "--nnodes", "3", "--image", "i:1"),
        *("--mount", "r:/r", "--run-dir", "/r/0"),
    ),
}
# command → words before and after the options
VERBS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "run": (("run",), ("job.py",)),
    "train": (("train",), ("image", "--steps", "1")),
    "evaluate": (("evaluate",), ("trained",)),
    "scaling": (("bench", "scaling"), ("job.py",)),
    "collectives": (("bench", "collectives", "--no-links"), ()),
    "forecast": (("forecast",), ("image",)),
}
# option → a value other than its default; "" for a switch
VALUES = {
    "hosts": "n1", "ssh_config": "config", "accept_new_host_keys": "", "nnodes": "1", "fastest": "",
    "nproc_per_node": "2", "env": "T_A=1", "unset": "T_B", "iface": "eth7", "python": "/other/py",
    "run_dir": "/r/7", "name": "other", "master_port": "5", "backend": "mpi", "ship": "never",
    "activate": "/opt/vars.sh",
    "bind": "none", "debug": "", "lease": "7", "grace": "3", "max_restarts": "2",
    "restart_window": "77", "wait_for_nodes": "33",
    "hang_timeout": "9", "check_level": "full", "keep_warm": "70",
    "show": "none", "screen": "lines", "notify": "true", "report": "", "plan_only": "",
    "as_json": "", "verbose": "", "via_arg": "-v",
    "mpiexec": "/m/mpiexec",
    "image": "other:2", "mount": "/m:/m", "shm_size": "2g", "rdzv_id": "other",
    "rdzv_key_file": "key",
    "rdzv_timeout": "77", "time_limit": "1:00:00", "partition": "p", "account": "a",
    "cpus_per_task": "3", "mem": "5G", "gres": "gpu:4",
    "gpus": "6", "gpus_per_node": "4", "constraint": "a100", "sbatch_arg": "--x=y",
    "setup_command": "module load x", "requeue": "", "array": "1-3", "detach": "", "keep": "",
    "supervisor": "n1", "keep_results": "30d", "follow_links": "", "encrypt": "",
}  # fmt: skip
# if that is refused: a manifest has no directives, and Kubernetes knows only labels
VALUE_OVERRIDES = {
    ("kubernetes script", "sbatch_arg"): "kind=JobSet",
    ("kubernetes script", "constraint"): "zone=a",
}
MODE_SELECTORS = {"via", "rdzv", "node_rank"}  # the options that select launch modes
COMPANIONS = {"as_json": ("--plan",), "verbose": ("--plan",), "supervisor": ("--detach",),
              "keep_results": ("--detach",)}  # fmt: skip


def launch_modes() -> dict[str, applicability.LaunchMode]:
    """Returns the launch modes by the names that this file uses."""
    return {
        f"{mode.scheduler.name}{' script' if mode.submits else ''}": mode
        for mode in applicability.launch_modes()
    }


class Intercepted(Exception):
    """Ends a command just before it would act."""


@dataclass
class Action:
    """Records as text what the command was about to do."""

    text: str = ""
    layouts: tuple[object, ...] = ()

    def is_done(self, *parts: object) -> NoReturn:
        self.text = "\n".join(map(str, [*parts, *self.layouts]))
        raise Intercepted


@pytest.fixture
def action(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Action:
    """Runs everything up to the first connection, and records what would follow."""
    result = Action()
    monkeypatch.delenv("PACELINE_OPT_REPORT", raising=False)

    def record_run(job: Any, cluster: Any, transport: Any, screen: Any, **kwargs: Any) -> NoReturn:
        places = {name: kwargs.get(name) for name in ("run_dir", "parent")}
        places = {k: v for k, v in places.items() if not kwargs.get("run_dir") or k == "run_dir"}
        host_names = [host.name for host in cluster.hosts]
        seen = [vars(screen).get(name) for name in ("_show", "_display")]
        result.is_done("run", job, host_names, render_commands(transport), seen,
                     sorted(places.items()), kwargs.get("inspect") is None,
                     kwargs.get("keep_warm_s"))  # fmt: skip

    def record_plan(ctx: Any, *_: Any) -> NoReturn:
        result.is_done("plan", ctx.params["as_json"], ctx.params["verbose"])

    async def record_check(*_: Any, **__: Any) -> NoReturn:
        result.is_done("examined")

    def record_submission(scheduler: Any, text: str, *_: object) -> NoReturn:
        result.is_done("submitted", text)

    real_ladder = scaling_verb.scaling.ladder

    def ladder(nodes: int, processes: int) -> Any:
        result.layouts = (nodes, processes)
        return real_ladder(nodes, processes)

    monkeypatch.setattr(scaling_verb.scaling, "ladder", ladder)
    monkeypatch.setattr(launcher, "run_job", record_run)
    monkeypatch.setattr(launch, "show_plan", record_plan)
    monkeypatch.setattr(saved_forecasts, "choose_fastest",
                        lambda job, cluster, run: (Cluster(cluster.hosts[:1]), "so"))  # fmt: skip
    monkeypatch.setattr(runner, "survey_hosts", record_check)
    monkeypatch.setattr(probes, "measure_links", lambda probing: ({}, {}))  # it tests links later
    monkeypatch.setattr(leave, "detach", lambda leaving, _: result.is_done(
        "left", leaving.supervisor, leaving.options["keep_results"]))  # fmt: skip
    monkeypatch.setattr(evaluate, "run_script", lambda *args: result.is_done("here", args))
    monkeypatch.setattr(submission, "submit_job", record_submission)
    monkeypatch.setattr(this_machine, "local_names", lambda: set[str]())
    monkeypatch.setattr(
        mpi, "find_mpi", lambda requested: mpi.Mpi("mpich", "4", requested or "mpiexec")
    )
    monkeypatch.setattr(commands.shutil, "which", lambda name, **_: f"/bin/{name}")
    monkeypatch.setattr("paceline.rundir.directory.fresh_path", lambda parent, name: parent / name)
    monkeypatch.setattr("time.strftime", lambda *_: "now")
    monkeypatch.setattr("secrets.token_hex", lambda size: "5a" * size)
    monkeypatch.delenv("PACELINE_OPT_REPORT", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text("")
    (tmp_path / "config").write_text("")
    (tmp_path / "key").write_text("0123456789abcdef" * 2)
    (tmp_path / "key").chmod(0o600)
    (tmp_path / "trained").joinpath(MODEL_CONFIG).parent.mkdir(parents=True)
    (tmp_path / "trained" / MODEL_CONFIG).write_text("{}")
    return result


def render_commands(transport: Any) -> object:
    """Returns the commands with which a transport starts its agents."""
    if isinstance(transport, ManualTransport):
        endpoint = transport._endpoint
        return endpoint, "made up" if endpoint.token else endpoint.key
    if isinstance(transport, ScheduledTransport):
        start = asyncio.run(transport._starter.start(HOSTS))
        folder = getattr(transport._starter, "_config", "")
        config = Path(folder).read_text() if folder else ""
        transport._starter.end()
        return [word.replace(folder or "\0", "CONFIG") for word in start.argv], config
    if isinstance(transport, ContainerTransport):
        probe = Probe("d", "", 0, 0, (), (), dri=False, nvidia=False)
        container = container_for(HOSTS[1], probe, transport._options, "run")
        wrapped = transport._engine.wrap(["agent"], container)
        return ssh_command(HOSTS[1], transport._options.ssh, wrapped)
    if isinstance(transport, SshTransport):
        return connect_command(HOSTS[1], "python3", transport._ssh)
    return type(transport).__name__


def call(action: Action, verb: str, mode_name: str, options: Sequence[str]) -> tuple[int, str, str]:
    """Returns the exit status, the output, and the recorded action."""
    before, after = VERBS[verb]
    action.text, action.layouts = "", ()
    env: dict[str, str | None] = dict.fromkeys(ALLOCATION)
    env |= ALLOCATION if mode_name == "slurm" else {}
    result = CliRunner(env=env).invoke(
        program, [*before, *overridden(MODE_OPTIONS[mode_name], options), *after]
    )
    if isinstance(result.exception, Intercepted):
        return 0, result.output, action.text
    status = getattr(result.exception, "exit_code", result.exit_code)
    printed = result.exception.render() if hasattr(result.exception, "render") else result.output
    assert result.exception is None or hasattr(result.exception, "render") or status == 2, printed
    return status, printed, result.output


def options_of(verb: str) -> list[click.Option]:
    args, _ = VERBS[verb]
    group: Any = program
    for word in args:
        if not word.startswith("-"):
            group = group.get_command(click.Context(group), word)
    return [
        p for p in group.params if isinstance(p, click.Option) and p.name in applicability.OPTIONS
    ]


def test_options_table_is_complete() -> None:
    """The tables contain no other entries."""
    assert {option.name for option in options_of("run")} == set(applicability.OPTIONS)
    assert set(VALUES) | MODE_SELECTORS == set(applicability.OPTIONS)
    assert set(MODE_OPTIONS) == set(launch_modes())
    assert set(VERBS) == set(applicability.VERBS)


@pytest.mark.parametrize("mode_name", MODE_OPTIONS)
@pytest.mark.parametrize("verb", VERBS)
def test_options_take_effect_or_are_rejected(action: Action, verb: str, mode_name: str) -> None:
    baseline = call(action, verb, mode_name, ())
    several = verb in ("scaling", "forecast")
    unsupported_modes: tuple[str, ...] = ("rdzv", "kubernetes script") if several else ()
    if verb == "collectives" and (mode_name == "rdzv" or mode_name.endswith(" script")):
        unsupported_modes = (mode_name,)
    if mode_name in unsupported_modes:
        assert baseline[0] == 2, (
            baseline
        )  # it needs several runs from one place, or cannot start here
        return
    assert baseline[0] == 0, baseline[1]
    for option in options_of(verb):
        name = option.name or ""
        if name in MODE_SELECTORS:
            continue
        flag = max(option.opts, key=len)
        if option.default is True and verb not in applicability.MEASURING:  # the default is on
            flag = option.secondary_opts[0]
        companions = () if verb in applicability.MEASURING else COMPANIONS.get(name, ())
        if name in ("supervisor", "keep_results") and (verb not in applicability.OPTIONS[name].verbs
                                     or not launch_modes()[mode_name].accepts(name)):  # fmt: skip
            companions = ()
        value = VALUE_OVERRIDES.get((mode_name, name), VALUES[name])
        args = [*companions, flag, *([value] if value else [])]
        if name == "detach" and mode_name == "slurm script":
            continue  # tested below: it takes effect after the submission
        if name == "plan_only" and (mode_name.endswith(" script") or several):
            continue  # these modes only print, except for Slurm's; and a series of runs has no plan
        if name == "as_json" and verb in applicability.MEASURING:
            continue  # it takes effect on the printed results
        if mode_name == "local" and name == "hosts":
            args = [flag, "localhost"]
        if mode_name == "local" and name == "supervisor":
            args = [*companions, flag, socket.gethostname()]
        if mode_name == "local" and name == "nnodes":
            args = [flag, "2"]
        before = call(action, verb, mode_name, companions) if companions else baseline
        status, printed, did = call(action, verb, mode_name, args)
        if (verb, mode_name, name) == ("forecast", "local", "nnodes"):
            assert "2 nodes were asked for" in printed  # the value is used: there is only one host
            continue
        refused = status == 2 and flag in printed
        option_rule = applicability.OPTIONS[name]
        launch_mode = launch_modes()[mode_name]
        is_supported = verb in option_rule.verbs_in(launch_mode) and (
            not option_rule.by_scheduler or launch_mode.accepts(name)
        )
        assert refused or (status == 0 and did != before[2]), (verb, mode_name, args, printed, did)
        assert refused is not is_supported, (verb, mode_name, args, printed)


def test_flux_error_suggests_host_list(action: Action) -> None:
    status, printed, _ = call(action, "run", "ssh", ("--via", "flux"))
    assert status == 2
    assert '-H "$(flux getattr hostlist)"' in printed


@pytest.mark.parametrize("mode_name", MODE_OPTIONS)
@pytest.mark.parametrize("verb", ["run", "scaling", "forecast", "collectives"])
def test_accepts_node_range_only_if_size_can_change(action: Action, verb: str,
                                                        mode_name: str) -> None:  # fmt: skip
    status, printed, _ = call(action, verb, mode_name, ("--nnodes", "1:2"))
    fixed = launch_modes()[mode_name].scheduler.fixed_size_reason
    is_supported = verb == "run" and not fixed and "script" not in mode_name
    assert (status == 0) is is_supported, printed
    if not is_supported and "range" in printed:
        assert "--nnodes 1:2 is a range, which cannot be combined with" in printed
        assert "remedy: --nnodes 2" in printed
    # a fixed range means the same with torchrun's colon
    assert call(action, verb, mode_name, ("--nnodes", "2:2"))[0] == call(
        action, verb, mode_name, ("--nnodes", "2"))[0]  # fmt: skip


@pytest.mark.parametrize("name", ["mem", "array", "via_arg", "shm_size", "ssh_config"])
def test_error_names_source(action: Action, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                               name: str) -> None:  # fmt: skip
    """Covers the environment and paceline.toml; the error names the place of the option."""
    (option,) = [option for option in options_of("run") if option.name == name]
    flag, value = max(option.opts, key=len), VALUES[name]
    variable = f"PACELINE_OPT_{flag[2:].replace('-', '_').upper()}"
    with monkeypatch.context() as patched:
        patched.setenv(variable, value or "1")
        status, printed, _ = call(action, "run", "local", ())
    assert status == 2
    assert f"{flag} ({variable}) does not apply to --via local" in printed
    text = "true" if not value else json.dumps([value] if option.multiple else value)
    path = tmp_path / "paceline.toml"
    path.write_text(f"[run]\n{flag[2:]} = {text}\n")
    trust.remember(path, read_settings_file(tmp_path))
    status, printed, _ = call(action, "run", "local", ())
    assert status == 2
    assert f"{flag} ([run] of paceline.toml) does not apply to --via local" in printed


def test_detach_does_not_follow_submitted_job(
    action: Action, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the option the command returns after the submission, without it the job is followed."""
    followed: list[str] = []

    async def follow(job: submission.SubmittedJob, *_: object) -> int:
        followed.append(job.job)
        return 0

    monkeypatch.setattr(submission, "submit_job",
                        lambda scheduler, *_: submission.SubmittedJob(scheduler, "7"))  # fmt: skip
    monkeypatch.setattr(submission, "follow", follow)
    args = ["run", "--via", "slurm", "--nnodes", "2"]
    assert CliRunner().invoke(program, [*args, "--detach", "job.py"]).exit_code == 0
    assert followed == []
    assert CliRunner().invoke(program, [*args, "job.py"]).exit_code == 0
    assert followed == ["7"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("run", "--no-torch", "--any-world", "job.py"), "--any-world needs"),
        (("run", "--no-torch", "--backend", "gloo", "job.py"), "--backend needs"),
        (("run", "--no-python", "--backend", "gloo", "hostname"), "--backend needs"),
        (("run", "--no-python", "--communication", "int8", "hostname"), "--communication needs"),
        (("run", "--no-torch", "--no-verify", "job.py"), "--no-verify needs"),
        (("run", "--no-python", "-m", "job"), "cannot be combined"),
        (("bench", "scaling", "--recipe", "-m", "image"), "cannot be combined"),
        (("env", "--json", "true"), "--json cannot be combined with COMMAND"),
        (("hosts", "n1", "--json", "--write", "plain"), "--json cannot be combined with --write"),
        (("setup", "-H", "n1", "--dry-run", "env"), "--dry-run cannot be combined with setup env"),
        (("setup", "-H", "n1", "--revoke", "--key", "k"), "--key cannot be combined with --revoke"),
        (("bench", "collectives", "--no-links", "--min-share", "0.5"), "--min-share cannot be"),
        (("bench", "collectives", "-i", "8", "-f", "2"), "--stepfactor cannot be combined with"),
        (("run", "--detach", "--keep", "job.py"), "--detach cannot be combined with --keep"),
        (
            ("run", "--detach", "--screen", "live", "job.py"),
            "--screen cannot be combined with --detach",
        ),
        (
            ("run", "--keep", "--keep-warm", "9", "job.py"),
            "--keep-warm cannot be combined with --keep",
        ),
        (("run", "--supervisor", "n1", "job.py"), "--supervisor does not apply to a run"),
        (
            ("run", "--keep-results", "9d", "-H", "n1", "x"),
            "--keep-results does not apply to a",
        ),
        (
            ("run", "--detach", "--keep-results", "9d", "-H", "localhost", "job.py"),
            "--keep-results cannot be combined with a supervisor on this machine",
        ),
    ],
)
def test_rejects_conflicting_options(action: Action, args: list[str], message: str) -> None:
    result = CliRunner(env=dict.fromkeys(ALLOCATION)).invoke(program, args)
    assert isinstance(result.exception, SettingError), result.output
    assert result.exception.exit_code == 2
    assert message in result.exception.message


@pytest.mark.parametrize(
    ("settings", "args", "stays_attached"),
    [
        ("detach = true", ("--keep",), True),
        ("keep = true", ("--detach",), False),
        ('detach = true\nscreen = "lines"', (), False),
        ('detach = true\nkeep-warm = "10m"', ("--keep-warm", "0"), False),
    ],
)
def test_command_line_overrides_file_for_detach(
    settings: str, args: tuple[str, ...], stays_attached: bool, action: Action, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / "paceline.toml").write_text(f"[run]\n{settings}\n")
    attached_runs: list[str] = []
    outcome = leave.DetachOutcome(None, Host("n1", local=True), run_id="1")
    monkeypatch.setattr(leave, "detach", lambda *_: outcome)
    monkeypatch.setattr(
        attached, "attach_to_run", lambda run, **_: attached_runs.append(str(run)) or 0
    )
    result = CliRunner(env=dict.fromkeys(ALLOCATION)).invoke(program, ["run", *args, "job.py"])
    assert result.exit_code == 0, result.output
    assert bool(attached_runs) is stays_attached
    assert ("attach: " in result.stderr) is not stays_attached


@pytest.mark.parametrize("hosts", ["lab", "lab:mine"])
def test_rejects_lab_hosts_with_mpi(action: Action, hosts: str) -> None:
    """MPI requires this: the error comes at once, not after waiting for a minute."""
    result = CliRunner(env=dict.fromkeys(ALLOCATION)).invoke(
        program, ["run", "-H", hosts, "--ssh-config", "config", "--via", "mpi", "job.py"]
    )
    assert isinstance(result.exception, SettingError), result.output
    assert "the lab's cannot" in result.exception.message
    assert "paceline lab shell n1" in str(result.exception.remedy)


@pytest.mark.parametrize("node_rank", ["0", "1"])
def test_rejects_node_rank_without_rendezvous(action: Action, node_rank: str) -> None:
    """The value 0 is refused, too."""
    status, printed, _ = call(action, "run", "local", ["--node-rank", node_rank])
    assert status == 2
    assert "--node-rank does not apply to --via local" in printed


def test_rejects_json_without_plan(action: Action) -> None:
    status, printed, _ = call(action, "run", "local", ["--json"])
    assert status == 2
    assert "--json does not apply to a run" in printed


def test_submitted_job_ignores_submission_settings(
    action: Action, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options of the submission in the file and in variables have already taken effect."""
    (tmp_path / "paceline.toml").write_text('[run]\nmem = "5G"\nvia = "slurm"\n')
    monkeypatch.setenv("PACELINE_OPT_TIME", "1:00")
    assert call(action, "run", "slurm", ())[0] == 2
    monkeypatch.setenv("PACELINE_SUBMITTED", "1")
    assert call(action, "run", "slurm", ())[0] == 0
    assert call(action, "run", "slurm", ("--mem", "5G"))[0] == 2


def test_batch_recipe_gets_settings_from_file(action: Action, tmp_path: Path) -> None:
    (tmp_path / "paceline.toml").write_text("[train.image]\nlr = 0.5\n")
    args = ["train", *MODE_OPTIONS["kubernetes script"], "image", "--steps", "3"]
    manifest = CliRunner().invoke(program, args).stdout.split("---\n")[-1]
    pod = json.loads(manifest)["spec"]["template"]["spec"]
    job_command = pod["containers"][0]["command"]
    assert job_command[job_command.index("image") :] == ["image", "--lr=0.5", "--steps", "3"]


def test_batch_command_keeps_job_options(
    action: Action, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers command line, environment and file; options of the submission are left out."""
    (tmp_path / "paceline.toml").write_text('[run]\nlease = 7.0\npartition = "debug"\n')
    monkeypatch.setenv("PACELINE_OPT_GRACE", "3")
    args = ["--time", "1:00", "--name=--mem", "-p", "2", "--env", "A=x y", "--no-torch", "job.py",
             "--time", "3", "--detach"]  # fmt: skip
    before = ["run", *MODE_OPTIONS["slurm script"]]
    script = CliRunner().invoke(program, [*before, *args]).output.splitlines()
    (line,) = [line for line in script if line.startswith("exec ")]
    _, job_command = line.split("--run-dir ", 1)
    assert job_command.split(" ", 1)[1] == (
        "--via slurm --nproc-per-node=2 '--env=A=x y' --name=--mem --lease=7.0 --grace=3.0 "
        "--no-torch job.py --time 3 --detach"
    )


@pytest.mark.parametrize("via", ["mpi", "pbs"])
@pytest.mark.parametrize("flag", ["--detach", "--keep"])
def test_rejects_detach_and_keep_for_mpi_and_pbs(via: str, flag: str) -> None:
    refused = CliRunner().invoke(program, ["run", "--via", via, flag, "job.py"])
    assert isinstance(refused.exception, SettingError)
    assert refused.exception.exit_code == 2
    assert "this command has to keep running; a batch runs without" in refused.exception.remedy
