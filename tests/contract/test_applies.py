"""Every option of the launching verbs, with every scheduler, now and later.

Each is either shown to act, by what would be started or written, or refused with exit status 2.
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

from overriding import overridden
from paceline.checks import runner
from paceline.cli import applicability, launch, program, trust
from paceline.cli.measure import forecasts, probes
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
# manner → options that lead to it
LEADING: dict[str, tuple[str, ...]] = {
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
# verb → the words before and after the options
VERBS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "run": (("run",), ("job.py",)),
    "train": (("train",), ("image", "--steps", "1")),
    "evaluate": (("evaluate",), ("trained",)),
    "scaling": (("bench", "scaling"), ("job.py",)),
    "collectives": (("bench", "collectives", "--no-links"), ()),
    "forecast": (("forecast",), ("image",)),
}
# option → one value that is not its default; "" for a switch
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
# where that would be refused: a manifest has no directives, and Kubernetes knows labels only
OTHERWISE = {
    ("kubernetes script", "sbatch_arg"): "kind=JobSet",
    ("kubernetes script", "constraint"): "zone=a",
}
LEADS = {"via", "rdzv", "node_rank"}  # the manners themselves are made of these
COMPANIONS = {"as_json": ("--plan",), "verbose": ("--plan",), "supervisor": ("--detach",),
              "keep_results": ("--detach",)}  # fmt: skip


def launch_modes() -> dict[str, applicability.LaunchMode]:
    """By the words of this file."""
    return {
        f"{one.scheduler.name}{' script' if one.submits else ''}": one
        for one in applicability.launch_modes()
    }


class Acted(Exception):
    """What would have been done."""


@dataclass
class Deed:
    """What the command was about to do, as text."""

    text: str = ""
    layouts: tuple[object, ...] = ()

    def is_done(self, *parts: object) -> NoReturn:
        self.text = "\n".join(map(str, [*parts, *self.layouts]))
        raise Acted


@pytest.fixture
def deed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Deed:
    """Everything up to the first connection is real; what follows is written down."""
    done = Deed()
    monkeypatch.delenv("PACELINE_OPT_REPORT", raising=False)

    def started(job: Any, cluster: Any, transport: Any, screen: Any, **more: Any) -> NoReturn:
        places = {name: more.get(name) for name in ("run_dir", "parent")}
        places = {k: v for k, v in places.items() if not more.get("run_dir") or k == "run_dir"}
        chosen = [host.name for host in cluster.hosts]
        seen = [vars(screen).get(name) for name in ("_show", "_display")]
        done.is_done("run", job, chosen, rendered(transport), seen,
                     sorted(places.items()), more.get("inspect") is None,
                     more.get("keep_warm_s"))  # fmt: skip

    def planned(ctx: Any, *_: Any) -> NoReturn:
        done.is_done("plan", ctx.params["as_json"], ctx.params["verbose"])

    async def examined(*_: Any, **__: Any) -> NoReturn:
        done.is_done("examined")

    def written(scheduler: Any, text: str, *_: object) -> NoReturn:
        done.is_done("submitted", text)

    real_ladder = scaling_verb.scaling.ladder

    def ladder(nodes: int, processes: int) -> Any:
        done.layouts = (nodes, processes)
        return real_ladder(nodes, processes)

    monkeypatch.setattr(scaling_verb.scaling, "ladder", ladder)
    monkeypatch.setattr(launcher, "run_job", started)
    monkeypatch.setattr(launch, "show_plan", planned)
    monkeypatch.setattr(forecasts, "choose_fastest",
                        lambda job, cluster, run: (Cluster(cluster.hosts[:1]), "so"))  # fmt: skip
    monkeypatch.setattr(runner, "survey_hosts", examined)
    monkeypatch.setattr(probes, "measure_links", lambda probing: ({}, {}))  # what it tries follows
    monkeypatch.setattr(leave, "detach", lambda leaving, _: done.is_done(
        "left", leaving.supervisor, leaving.options["keep_results"]))  # fmt: skip
    monkeypatch.setattr(evaluate, "run_script", lambda *words: done.is_done("here", words))
    monkeypatch.setattr(submission, "submit_job", written)
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
    return done


def rendered(transport: Any) -> object:
    """The commands by which a transport starts its agents."""
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


def call(deed: Deed, verb: str, manner: str, options: Sequence[str]) -> tuple[int, str, str]:
    """Exit status, what was said, and what was done."""
    before, after = VERBS[verb]
    deed.text, deed.layouts = "", ()
    env: dict[str, str | None] = dict.fromkeys(ALLOCATION)
    env |= ALLOCATION if manner == "slurm" else {}
    done = CliRunner(env=env).invoke(
        program, [*before, *overridden(LEADING[manner], options), *after]
    )
    if isinstance(done.exception, Acted):
        return 0, done.output, deed.text
    status = getattr(done.exception, "exit_code", done.exit_code)
    said = done.exception.render() if hasattr(done.exception, "render") else done.output
    assert done.exception is None or hasattr(done.exception, "render") or status == 2, said
    return status, said, done.output


def options_of(verb: str) -> list[click.Option]:
    words, _ = VERBS[verb]
    found: Any = program
    for word in words:
        if not word.startswith("-"):
            found = found.get_command(click.Context(found), word)
    return [
        p for p in found.params if isinstance(p, click.Option) and p.name in applicability.OPTIONS
    ]


def test_every_option_is_in_the_table() -> None:
    """And nothing else."""
    assert {option.name for option in options_of("run")} == set(applicability.OPTIONS)
    assert set(VALUES) | LEADS == set(applicability.OPTIONS)
    assert set(LEADING) == set(launch_modes())
    assert set(VERBS) == set(applicability.VERBS)


@pytest.mark.parametrize("manner", LEADING)
@pytest.mark.parametrize("verb", VERBS)
def test_no_option_is_accepted_and_ignored(deed: Deed, verb: str, manner: str) -> None:
    plain = call(deed, verb, manner, ())
    several = verb in ("scaling", "forecast")
    alone: tuple[str, ...] = ("rdzv", "kubernetes script") if several else ()
    if verb == "collectives" and (manner == "rdzv" or manner.endswith(" script")):
        alone = (manner,)
    if manner in alone:
        assert plain[0] == 2, plain  # many runs, started from one place, or not at all
        return
    assert plain[0] == 0, plain[1]
    for option in options_of(verb):
        name = option.name or ""
        if name in LEADS:
            continue
        flag = max(option.opts, key=len)
        if option.default is True and verb not in applicability.MEASURING:  # on as it is
            flag = option.secondary_opts[0]
        beside = () if verb in applicability.MEASURING else COMPANIONS.get(name, ())
        if name in ("supervisor", "keep_results") and (verb not in applicability.OPTIONS[name].verbs
                                     or not launch_modes()[manner].accepts(name)):  # fmt: skip
            beside = ()
        value = OTHERWISE.get((manner, name), VALUES[name])
        words = [*beside, flag, *([value] if value else [])]
        if name == "detach" and manner == "slurm script":
            continue  # shown below: it has to do with what follows the submission
        if name == "plan_only" and (manner.endswith(" script") or several):
            continue  # what these do at all, but for Slurm's, is to print; a ladder has no plan
        if name == "as_json" and verb in applicability.MEASURING:
            continue  # it has to do with how the figures are printed
        if manner == "local" and name == "hosts":
            words = [flag, "localhost"]
        if manner == "local" and name == "supervisor":
            words = [*beside, flag, socket.gethostname()]
        if manner == "local" and name == "nnodes":
            words = [flag, "2"]
        before = call(deed, verb, manner, beside) if beside else plain
        status, said, did = call(deed, verb, manner, words)
        if (verb, manner, name) == ("forecast", "local", "nnodes"):
            assert "2 nodes were asked for" in said  # its value is: there is one host
            continue
        refused = status == 2 and flag in said
        where = applicability.OPTIONS[name]
        how = launch_modes()[manner]
        fits = verb in where.verbs_in(how) and (not where.by_scheduler or how.accepts(name))
        assert refused or (status == 0 and did != before[2]), (verb, manner, words, said, did)
        assert refused is not fits, (verb, manner, words, said)


def test_flux_is_refused_with_what_to_type_instead(deed: Deed) -> None:
    status, said, _ = call(deed, "run", "ssh", ("--via", "flux"))
    assert status == 2
    assert '-H "$(flux getattr hostlist)"' in said


@pytest.mark.parametrize("manner", LEADING)
@pytest.mark.parametrize("verb", ["run", "scaling", "forecast", "collectives"])
def test_a_range_of_nodes_where_their_number_can_change(deed: Deed, verb: str,
                                                        manner: str) -> None:  # fmt: skip
    status, said, _ = call(deed, verb, manner, ("--nnodes", "1:2"))
    fixed = launch_modes()[manner].scheduler.fixed_size_reason
    fits = verb == "run" and not fixed and "script" not in manner
    assert (status == 0) is fits, said
    if not fits and "range" in said:
        assert "--nnodes 1:2 is a range, which cannot be combined with" in said
        assert "remedy: --nnodes 2" in said
    # what leaves no choice means the same with torchrun's colon
    assert call(deed, verb, manner, ("--nnodes", "2:2"))[0] == call(
        deed, verb, manner, ("--nnodes", "2"))[0]  # fmt: skip


@pytest.mark.parametrize("name", ["mem", "array", "via_arg", "shm_size", "ssh_config"])
def test_wherever_it_was_given(deed: Deed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                               name: str) -> None:  # fmt: skip
    """In the environment and in paceline.toml, too; the error says where it stands."""
    (option,) = [option for option in options_of("run") if option.name == name]
    flag, value = max(option.opts, key=len), VALUES[name]
    variable = f"PACELINE_OPT_{flag[2:].replace('-', '_').upper()}"
    with monkeypatch.context() as patched:
        patched.setenv(variable, value or "1")
        status, said, _ = call(deed, "run", "local", ())
    assert status == 2
    assert f"{flag} ({variable}) does not apply to --via local" in said
    text = "true" if not value else json.dumps([value] if option.multiple else value)
    path = tmp_path / "paceline.toml"
    path.write_text(f"[run]\n{flag[2:]} = {text}\n")
    trust.remember(path, read_settings_file(tmp_path))
    status, said, _ = call(deed, "run", "local", ())
    assert status == 2
    assert f"{flag} ([run] of paceline.toml) does not apply to --via local" in said


def test_detached(deed: Deed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Submitted and left; without the option it is followed."""
    followed: list[str] = []

    async def follow(job: submission.SubmittedJob, *_: object) -> int:
        followed.append(job.job)
        return 0

    monkeypatch.setattr(submission, "submit_job",
                        lambda scheduler, *_: submission.SubmittedJob(scheduler, "7"))  # fmt: skip
    monkeypatch.setattr(submission, "follow", follow)
    words = ["run", "--via", "slurm", "--nnodes", "2"]
    assert CliRunner().invoke(program, [*words, "--detach", "job.py"]).exit_code == 0
    assert followed == []
    assert CliRunner().invoke(program, [*words, "job.py"]).exit_code == 0
    assert followed == ["7"]


@pytest.mark.parametrize(
    ("words", "message"),
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
def test_options_that_make_each_other_void(deed: Deed, words: list[str], message: str) -> None:
    done = CliRunner(env=dict.fromkeys(ALLOCATION)).invoke(program, words)
    assert isinstance(done.exception, SettingError), done.output
    assert done.exception.exit_code == 2
    assert message in done.exception.message


@pytest.mark.parametrize(
    ("settings", "words", "kept"),
    [
        ("detach = true", ("--keep",), True),
        ("keep = true", ("--detach",), False),
        ('detach = true\nscreen = "lines"', (), False),
        ('detach = true\nkeep-warm = "10m"', ("--keep-warm", "0"), False),
    ],
)
def test_what_is_typed_goes_before_the_file_where_a_run_is_left(
    settings: str, words: tuple[str, ...], kept: bool, deed: Deed, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / "paceline.toml").write_text(f"[run]\n{settings}\n")
    shown: list[str] = []
    outcome = leave.DetachOutcome(None, Host("n1", local=True), run_id="1")
    monkeypatch.setattr(leave, "detach", lambda *_: outcome)
    monkeypatch.setattr(attached, "attach_to_run", lambda run, **_: shown.append(str(run)) or 0)
    done = CliRunner(env=dict.fromkeys(ALLOCATION)).invoke(program, ["run", *words, "job.py"])
    assert done.exit_code == 0, done.output
    assert bool(shown) is kept
    assert ("attach: " in done.stderr) is not kept


@pytest.mark.parametrize("hosts", ["lab", "lab:mine"])
def test_hosts_of_a_lab_cannot_call_back(deed: Deed, hosts: str) -> None:
    """As MPI's have to: said at once, not after a minute of waiting."""
    done = CliRunner(env=dict.fromkeys(ALLOCATION)).invoke(
        program, ["run", "-H", hosts, "--ssh-config", "config", "--via", "mpi", "job.py"]
    )
    assert isinstance(done.exception, SettingError), done.output
    assert "the lab's cannot" in done.exception.message
    assert "paceline lab shell n1" in str(done.exception.remedy)


@pytest.mark.parametrize("place", ["0", "1"])
def test_a_place_among_nodes_is_for_those_that_meet(deed: Deed, place: str) -> None:
    """The first place is no less given than the others."""
    status, said, _ = call(deed, "run", "local", ["--node-rank", place])
    assert status == 2
    assert "--node-rank does not apply to --via local" in said


def test_json_is_for_a_plan(deed: Deed) -> None:
    status, said, _ = call(deed, "run", "local", ["--json"])
    assert status == 2
    assert "--json does not apply to a run" in said


def test_a_batch_does_not_stumble_over_its_own_submission(
    deed: Deed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the file and the variables say of the submission has had its effect before."""
    (tmp_path / "paceline.toml").write_text('[run]\nmem = "5G"\nvia = "slurm"\n')
    monkeypatch.setenv("PACELINE_OPT_TIME", "1:00")
    assert call(deed, "run", "slurm", ())[0] == 2
    monkeypatch.setenv("PACELINE_SUBMITTED", "1")
    assert call(deed, "run", "slurm", ())[0] == 0
    assert call(deed, "run", "slurm", ("--mem", "5G"))[0] == 2


def test_a_recipe_in_a_batch_is_told_what_the_file_says(deed: Deed, tmp_path: Path) -> None:
    (tmp_path / "paceline.toml").write_text("[train.image]\nlr = 0.5\n")
    words = ["train", *LEADING["kubernetes script"], "image", "--steps", "3"]
    whole = CliRunner().invoke(program, words).stdout.split("---\n")[-1]
    pod = json.loads(whole)["spec"]["template"]["spec"]
    told = pod["containers"][0]["command"]
    assert told[told.index("image") :] == ["image", "--lr=0.5", "--steps", "3"]


def test_the_job_in_a_batch_is_told_all_that_is_its_own(
    deed: Deed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the command line, the environment and the file; nothing of the submission."""
    (tmp_path / "paceline.toml").write_text('[run]\nlease = 7.0\npartition = "debug"\n')
    monkeypatch.setenv("PACELINE_OPT_GRACE", "3")
    words = ["--time", "1:00", "--name=--mem", "-p", "2", "--env", "A=x y", "--no-torch", "job.py",
             "--time", "3", "--detach"]  # fmt: skip
    before = ["run", *LEADING["slurm script"]]
    script = CliRunner().invoke(program, [*before, *words]).output.splitlines()
    (line,) = [line for line in script if line.startswith("exec ")]
    _, told = line.split("--run-dir ", 1)
    assert told.split(" ", 1)[1] == (
        "--via slurm --nproc-per-node=2 '--env=A=x y' --name=--mem --lease=7.0 --grace=3.0 "
        "--no-torch job.py --time 3 --detach"
    )


@pytest.mark.parametrize("via", ["mpi", "pbs"])
@pytest.mark.parametrize("flag", ["--detach", "--keep"])
def test_who_cannot_be_left_is_told_why(via: str, flag: str) -> None:
    refused = CliRunner().invoke(program, ["run", "--via", via, flag, "job.py"])
    assert isinstance(refused.exception, SettingError)
    assert refused.exception.exit_code == 2
    assert "this command has to keep running; a batch runs without" in refused.exception.remedy
