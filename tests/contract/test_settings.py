"""Tests every setting of every command, from each of three sources.

A setting of a command means the same on the command line, in the environment and in
``paceline.toml``; the source with precedence wins; default hosts are the same for every command.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.core import ParameterSource
from click.testing import CliRunner

from each_case import each_case
from paceline.cli import VERBS, options, program, settings_file, trust, variables
from paceline.cli.cluster import read_chosen_cluster, read_cluster
from paceline.cli.job_options import build_job
from paceline.cli.recipe_job import parse_recipe_options
from paceline.cli.settings import TABLES_ARE_HOSTS
from paceline.cli.verbs.trust import command as trust_command
from paceline.spec.errors import HostsError, PacelineError, SettingError
from paceline.spec.hosts import Host
from paceline.spec.job import Entry

# command → required arguments
ARGUMENTS = {"run": ["script.py"], "train": ["image"], "evaluate": ["here"],
             "bench scaling": ["script.py"], "setup env": ["--requirements", "script.py"],
             "setup sshd": ["status"]}  # fmt: skip
# settings with restricted values → two different values
VALUES: dict[str, tuple[Any, Any]] = {
    "ssh-config": ("one", "two"),
    "run-dir": ("runs/one", "runs/two"),
    "time": ("1:00", "2:00"),
    "nnodes": (2, 3),
    "nproc-per-node": (2, 3),
    "requeue": (True, False),
    "report": (False, True),
    "env": (["A=1", "B=2"], ["C=3"]),
}


def verbs(group: click.Group, prefix: str = "") -> Iterator[tuple[str, click.Command]]:
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        assert command is not None
        yield f"{prefix}{name}", command
        if isinstance(command, click.Group):
            yield from verbs(command, f"{name} ")


WITH_SETTINGS = {
    name: [p for p in command.params if isinstance(p, click.Option) and variables.is_setting(p)]
    for name, command in verbs(program)
}
CASES = [
    pytest.param(verb, option, id=f"{verb} {variables.key_of(option)}")
    for verb, options in WITH_SETTINGS.items()
    for option in options
]
HOST_VERBS = [
    verb
    for verb, options in WITH_SETTINGS.items()
    if any(variables.key_of(option) == "hosts" for option in options)
]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "PACELINE_LAB",
                     "PACELINE_OPT_REPORT"):  # fmt: skip
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    folder = tmp_path / "project"
    folder.mkdir()
    for name in ("script.py", "one", "two", "here"):
        (folder / name).write_text("")
    monkeypatch.chdir(folder)


def context_of(verb: str, *typed: str, **environment: str) -> click.Context:
    """Returns a command's context without calling its function."""
    group: click.Command = program
    words = verb.split()
    with click.Context(program) as parent:
        for part in words[:-1]:
            assert isinstance(group, click.Group)
            subcommand = group.get_command(parent, part)
            assert subcommand is not None
            group = subcommand
        assert isinstance(group, click.Group)
        command = group.get_command(parent, words[-1])
        assert command is not None
        with CliRunner().isolation(env=environment):
            return command.make_context(verb, [*typed, *ARGUMENTS.get(verb, [])])


def write_settings(text: str) -> None:
    path = Path("paceline.toml")
    path.write_text(text)
    trust.remember(path, settings_file.read_settings_file(Path.cwd()))


def values_of(option: click.Option) -> tuple[Any, Any]:
    key = variables.key_of(option)
    if key in VALUES:
        return VALUES[key]
    kind = option.type
    if isinstance(kind, click.types.BoolParamType):
        return (False, True) if option.default is True else (True, False)
    if isinstance(kind, click.Choice):
        first, second, *_ = sorted(kind.choices, key=lambda choice: choice == option.default)
        return first, second
    if isinstance(kind, click.types.IntParamType | click.types.FloatParamType):
        return 5, 6
    return "one", "two"


def to_arguments(option: click.Option, value: Any) -> list[str]:
    flag = f"--{variables.key_of(option)}"
    if isinstance(value, bool):
        return [flag] if value else list(option.secondary_opts)
    values = value if isinstance(value, list) else [value]
    return [f"{flag}={item}" for item in values]


def to_variable(value: Any) -> str:
    return " ".join(value) if isinstance(value, list) else str(value)


@each_case(("verb", "option"), CASES)
def test_sources_of_setting_are_equivalent(verb: str, option: click.Option) -> None:
    key, variable = variables.key_of(option), variables.variable_of(option)
    name = option.name or ""
    first, second = values_of(option)
    Path("paceline.toml").unlink(missing_ok=True)  # of the previous case
    typed = context_of(verb, *to_arguments(option, first))
    by_variable = context_of(verb, **{variable: to_variable(first)})
    write_settings(f"[run]\n{key} = {json.dumps(first)}\n")
    by_file = context_of(verb)
    assert typed.params[name] == by_variable.params[name] == by_file.params[name]
    assert typed.params[name] != option.get_default(typed)
    places = [ctx.get_parameter_source(name) for ctx in (typed, by_variable, by_file)]
    assert places == [ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT,
                       ParameterSource.DEFAULT_MAP]  # fmt: skip

    # the source with precedence wins
    env_context = context_of(verb, **{variable: to_variable(second)})
    assert env_context.get_parameter_source(name) is ParameterSource.ENVIRONMENT
    words = to_arguments(option, first)
    both = context_of(verb, *words, **{variable: to_variable(second)})
    assert both.params[name] == typed.params[name]


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("nnodes = 2", "[run]\nnnodes = …"),
        ("max_restarts = 2", "[run]\nmax_restarts = …"),
        ("nnode = 2", "Did you mean nnodes?"),
        ("[runs]\nnnodes = 2", "Did you mean run?"),
    ],
)
def test_rejects_unknown_top_level_keys(line: str, remedy: str) -> None:
    Path("paceline.toml").write_text(line)
    with pytest.raises(SettingError) as caught:
        context_of("run")
    assert caught.value.remedy == remedy
    assert ("a key" in caught.value.message) == (not line.startswith("["))


@pytest.mark.parametrize("verb", [verb for verb, options in WITH_SETTINGS.items() if options])
def test_rejects_unknown_keys_and_variables(verb: str) -> None:
    with pytest.raises(SettingError) as caught:
        context_of(verb, PACELINE_OPT_HOST="n1")
    assert "PACELINE_OPT_HOSTS" in caught.value.remedy
    Path("paceline.toml").write_text("[run]\nnnode = 2\n")
    with pytest.raises(SettingError) as caught:
        context_of(verb)
    assert "nnodes" in caught.value.remedy
    Path("paceline.toml").write_text("[rum]\nnnodes = 2\n")
    with pytest.raises(SettingError, match="rum"):
        context_of(verb)
    Path("paceline.toml").write_text("[train.imagee]\nepochs = 2\n")
    with pytest.raises(SettingError, match="Did you mean image"):
        context_of(verb)


@each_case("verb", [verb for verb, options in WITH_SETTINGS.items() if options])
def test_ignores_settings_of_foreign_verbs(verb: str) -> None:
    Path("paceline.toml").write_text(
        "[run]\nlease = 20.0\nno_torch = true\n[train.image]\nlr = 1\n"
    )
    context_of(verb, PACELINE_OPT_GRACE="9")


def test_key_spellings_are_equivalent() -> None:
    Path("paceline.toml").write_text("[run]\nmax_restarts = 2\n")
    assert context_of("run").params["max_restarts"] == 2
    Path("paceline.toml").write_text("[run]\nmax_restarts = 2\nmax-restarts = 3\n")
    with pytest.raises(SettingError, match="one key"):
        context_of("run")


def test_error_names_environment_variable() -> None:
    with pytest.raises(click.BadParameter) as caught:
        context_of("run", PACELINE_OPT_LEASE="long")
    assert "PACELINE_OPT_LEASE" in caught.value.format_message()


# --- hosts

JOB_VERBS = {"run", "train", "evaluate", "bench scaling", "bench collectives",
             "forecast"}  # fmt: skip


def test_verbs_with_hosts_option() -> None:
    remaining = {"hosts", "check", "runs", "attach", "status", "logs", "stop", "explain", "warm up",
              "setup", "setup sshd", "setup env", "setup hosts", "setup accelerate"}  # fmt: skip
    assert set(HOST_VERBS) == JOB_VERBS | remaining


@pytest.mark.parametrize("verb", HOST_VERBS)
def test_precedence_of_host_sources(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def hosts(*typed: str, **environment: str) -> Any:
        return context_of(verb, *typed, **environment).params["hosts"]

    assert hosts() is None
    write_settings("[hosts.n1]\n[hosts.n2]\n")
    assert hosts() == TABLES_ARE_HOSTS
    cluster = read_cluster(context_of(verb), TABLES_ARE_HOSTS)
    assert [host.name for host in cluster.hosts] == ["n1", "n2"]
    assert hosts("-H", "local") == "local"
    with monkeypatch.context() as patch:  # an allocation goes before tables
        patch.setenv("SLURM_JOB_ID", "1")
        patch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
        assert hosts() == (None if verb in JOB_VERBS else "slurm")
        if verb in JOB_VERBS:
            assert hosts("--via", "ssh") == "slurm"
    write_settings('[run]\nhosts = "n3,n4"\n[hosts.n1]\n')
    assert hosts() == "n3,n4"
    assert hosts(PACELINE_OPT_HOSTS="n5,n6") == "n5,n6"
    assert hosts("-H", "n7,n8", PACELINE_OPT_HOSTS="n5,n6") == "n7,n8"


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ('[run]\nhosts = "n1,n2"\n', "hosts: n1, n2 (paceline.toml)"),
        ('[run]\nhosts = "machines"\n', "hosts: n1, n2 (paceline.toml: machines)"),
        ("[hosts.n1]\n[hosts.n2]\n", "hosts: n1, n2 ([hosts] of paceline.toml)"),
    ],
)
def test_prints_source_of_hosts(text: str, note: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("machines").write_text("n1\nn2\n")
    write_settings(text)
    read_chosen_cluster(context_of("check"))
    assert capsys.readouterr().err == f"paceline: {note}\n"
    read_chosen_cluster(context_of("check", "-H", "n5,n6"))
    assert capsys.readouterr().err == ""
    read_chosen_cluster(context_of("check", PACELINE_OPT_HOSTS="n[3-9]"))


@pytest.mark.parametrize(
    ("option", "key"), [("python", "python"), ("iface", "interface"), ("iface", "job_address")]
)
def test_names_hosts_that_do_not_use_an_option(
    option: str, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is said about one host is stronger than what is said about all."""
    own = {"python": "/own", "interface": "eth7", "job_address": "10.0.0.1"}[key]
    line = f"--{option} /typed is not used on hosts with their own {key}: n1 ({own}); see"
    write_settings(f'[run]\n{option} = "/all"\n[hosts.n1]\n{key} = "{own}"\n')
    read_chosen_cluster(context_of("check", "-H", "n1,n2"))
    assert capsys.readouterr().err == ""
    read_chosen_cluster(context_of("check", "-H", "n1,n2", f"--{option}=/typed"))
    assert f"paceline: {line} [hosts.NAME] in paceline.toml\n" == capsys.readouterr().err
    if key != "job_address":
        read_chosen_cluster(context_of("check", "-H", "n1,n2", f"--{option}={own}"))
        assert capsys.readouterr().err == ""
    Path("machines.toml").write_text(f'[hosts.n1]\n{key} = "{own}"\n')
    write_settings("")
    CliRunner().invoke(trust_command, ["machines.toml"])
    read_chosen_cluster(context_of("check", "-H", "machines.toml", f"--{option}=/typed"))
    assert f"{line} machines.toml ([hosts.NAME] tables)" in capsys.readouterr().err


@pytest.mark.parametrize("typed", [("--rdzv", "h:1"), ("--via", "local"), ("--via", "slurm")])
def test_rdzv_and_via_override_hosts_of_file(typed: tuple[str, ...]) -> None:
    write_settings("[hosts.n1]\n")
    assert context_of("run", *typed).params["hosts"] is None
    write_settings('[run]\nhosts = "n1,n2"\n')  # nor are default hosts, with these options
    assert context_of("run", *typed).params["hosts"] is None
    assert context_of("run", "-H", "n1", *typed).params["hosts"] == "n1"  # refused later


@pytest.mark.parametrize("verb", sorted(set(HOST_VERBS)))
def test_lab_provides_ssh_config(verb: str, monkeypatch: pytest.MonkeyPatch,
                                       tmp_path: Path) -> None:  # fmt: skip
    from paceline.hosts import lab
    from paceline.hosts.lab import Layout

    monkeypatch.setattr(lab, "find_lab", lambda name, environ: Layout(tmp_path / (name or "up")))

    def config(*typed: str, **environment: str) -> Any:
        return context_of(verb, *typed, **environment).params["ssh_config"]

    write_settings('[run]\nhosts = "lab"\n')
    assert config() == tmp_path / "up" / "ssh_config"
    assert config("-H", "lab:mine") == tmp_path / "mine" / "ssh_config"
    assert config("-H", "lab:4") is None  # a host with the name lab and four slots
    assert config("-H", "lab", "--ssh-config", "one") == Path("one")
    assert config("-H", "lab", PACELINE_OPT_SSH_CONFIG="one") == tmp_path / "up" / "ssh_config"
    assert config(PACELINE_OPT_SSH_CONFIG="one") == Path("one")


def test_selects_lab(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from paceline.hosts import lab
    from paceline.hosts.lab import Layout, find_lab

    up: list[Layout] = []
    monkeypatch.setattr(lab, "list_labs", lambda: up)
    monkeypatch.setattr(lab, "is_running", lambda layout: True)
    with pytest.raises(HostsError, match="no lab is up"):
        find_lab("", {})
    up.append(Layout(tmp_path / "a"))
    assert find_lab("", {}) is up[0]
    up.append(Layout(tmp_path / "b"))
    assert find_lab("b", {}) is find_lab("", {"PACELINE_LAB": "b"}) is up[1]
    with pytest.raises(HostsError, match="-H lab:a"):
        find_lab("", {})
    with pytest.raises(HostsError, match="up are: a, b"):
        find_lab("c", {})
    up.append(Layout(tmp_path / "default"))  # `paceline lab fault` would use it, too
    assert find_lab("", {}) is up[2]


# --- trust


def settings_error(key: str, value: object, verb: str = "run") -> PacelineError:
    Path("paceline.toml").write_text(f"[run]\n{key} = {json.dumps(value)}\n")
    with pytest.raises(SettingError) as caught:
        context_of(verb)
    return caught.value


@each_case("key", sorted(trust.GUARDED))
def test_guarded_settings_require_trust(key: str) -> None:
    value = values_of(options.settings_registry()[key])[0]
    assert "paceline trust" in settings_error(key, value).remedy
    result = CliRunner().invoke(trust_command)
    assert result.exit_code == 0, result.output
    assert f"[run] {key} =" in result.output
    context_of("run")
    Path("paceline.toml").write_text(Path("paceline.toml").read_text() + "nnodes = 2\n")
    context_of("run")  # settings without guard may change
    CliRunner().invoke(trust_command, ["--revoke"])
    with pytest.raises(SettingError, match="not trusted"):
        context_of("run")


# settings allowed in an untrusted file: hosts, numbers and display
HARMLESS = """
account any-world array backend bind check communication constraint cpus-per-task debug detach
encrypt fastest gpus gpus-per-node grace gres hang-timeout iface json keep keep-results keep-warm
lease master-port max-restarts measure mem module name nnodes no-python no-torch node-rank
nproc-per-node partition pass-local-rank plan rdzv-id rdzv-timeout rejoin report requeue
restart-window screen ship shm-size show supervisor time unset verbose verify via wait-for-nodes
"""


def test_guarded_and_harmless_settings_are_complete() -> None:
    """This detects new settings. For hosts, the required trust depends on their source."""
    guarded = trust.GUARDED.keys() | trust.START_GUARDED.keys()
    harmless = {*HARMLESS.split()}
    assert options.settings_registry().keys() - {"hosts"} - harmless == guarded
    assert not harmless & guarded


def test_run_directory_requires_trust_to_start_run() -> None:
    Path("paceline.toml").write_text('[run]\nrun-dir = "runs/one"\n')
    ctx = context_of("run")  # other commands only read it
    with pytest.raises(SettingError, match="run-dir, which can replace the results"):
        build_job(ctx, Entry("script", "job.py"), "job")
    build_job(context_of("run", "--run-dir", "mine"), Entry("script", "job.py"), "job")
    CliRunner().invoke(trust_command)
    build_job(context_of("run"), Entry("script", "job.py"), "job")


def test_recipe_data_file_requires_trust() -> None:
    Path("private.csv").write_text("a,b\n")
    Path("paceline.toml").write_text('[train.text]\ndata = "private.csv"\nlr = 0.1\n')
    with pytest.raises(SettingError, match="data, which sends it to the hosts") as caught:
        parse_recipe_options(context_of("train"), "text", [])
    assert caught.value.found == '[train.text] data = "private.csv"'
    assert (
        parse_recipe_options(context_of("train"), "text", ["--data", "ag-news"]).data == "ag-news"
    )
    CliRunner().invoke(trust_command)
    assert parse_recipe_options(context_of("train"), "text", []).data == "private.csv"
    Path("paceline.toml").write_text('[train.text]\ndata = "ag-news"\n')  # the name of a data set
    assert parse_recipe_options(context_of("train"), "text", []).data == "ag-news"


def test_recipe_data_folder_requires_trust() -> None:
    Path("private").mkdir()
    Path("paceline.toml").write_text('[train.text]\ndata = "notes.csv"\ndata-dir = "private"\n')
    with pytest.raises(SettingError, match="data-dir, which reads data from it"):
        parse_recipe_options(context_of("train"), "text", [])


@pytest.mark.parametrize("key", ["model", "chat-template"])
def test_recipe_model_and_template_files_require_trust(key: str) -> None:
    Path("private").write_text("a key")
    Path("paceline.toml").write_text(f'[train.sft]\n{key} = "private"\n')
    typed = {"model": "user/model", "data": "user/data"}
    argv = [f"--{name}={value}" for name, value in typed.items() if name != key]
    with pytest.raises(SettingError, match=f"{key}, which sends it to the hosts"):
        parse_recipe_options(context_of("train"), "sft", argv)


def test_tracker_with_server_requires_trust() -> None:
    Path("paceline.toml").write_text('[train.image]\ntrack = "tensorboard"\n')
    assert parse_recipe_options(context_of("train"), "image", []).track == ("tensorboard",)
    Path("paceline.toml").write_text('[train.image]\ntrack = ["tensorboard", "wandb"]\n')
    with pytest.raises(SettingError, match="track, which sends your key"):
        parse_recipe_options(context_of("train"), "image", [])
    typed = parse_recipe_options(context_of("train"), "image", ["--track", "wandb"])
    assert typed.track == ("wandb",)
    CliRunner().invoke(trust_command)
    assert parse_recipe_options(context_of("train"), "image", []).track == ("tensorboard", "wandb")


def test_trust_shows_full_value() -> None:
    value = f"notify-send '{'x' * 300}'; touch evil"
    Path("paceline.toml").write_text(f'[run]\nnotify = "{value}"\n')
    assert value in CliRunner().invoke(trust_command).output
    Path("paceline.toml").write_text(f'[run]\nnotify = "{"x" * 3000}"\n')
    rejected = CliRunner().invoke(trust_command)
    assert isinstance(rejected.exception, SettingError)
    assert "too long to be looked at" in rejected.exception.message


def test_changed_setting_loses_trust() -> None:
    settings_error("mpiexec", "./good.sh")
    CliRunner().invoke(trust_command)
    context_of("run")
    settings_error("mpiexec", "./evil.sh")


def test_command_line_requires_no_trust() -> None:
    Path("paceline.toml").write_text('[run]\nmpiexec = "./evil.sh"\n')
    assert context_of("run", "--mpiexec", "mine").params["mpiexec"] == "mine"
    assert context_of("run", PACELINE_OPT_MPIEXEC="mine").params["mpiexec"] == "mine"
    context_of("check")  # it has no such option


@pytest.mark.parametrize("text", ['[hosts.n1]\npython = "/x"\n', '[run]\nhosts = "other"\n'])
def test_python_of_host_requires_trust(text: str) -> None:
    Path("other").write_text('[hosts.n1]\npython = "/x"\n')
    Path("paceline.toml").write_text(text)
    ctx = context_of("check")
    with pytest.raises(SettingError, match="Python of a host"):
        read_cluster(ctx, ctx.params["hosts"])
    typed = context_of("check", "-H", "other")
    if "run" in text:
        with pytest.raises(SettingError, match="other sets the Python of a host") as caught:
            read_cluster(typed, "other")
        assert "paceline trust other" in caught.value.remedy
        CliRunner().invoke(trust_command, ["other"])
        assert read_cluster(typed, "other").hosts == (Host("n1", python="/x"),)
    CliRunner().invoke(trust_command)
    ctx = context_of("check")
    assert read_cluster(ctx, ctx.params["hosts"]).hosts[0].python == "/x"


@pytest.mark.parametrize("source", ["d/paceline.toml", "toml:d/paceline.toml", "acc.yaml"])
def test_host_file_in_subfolder_requires_trust(source: str) -> None:
    Path("d").mkdir()
    Path("d/paceline.toml").write_text('[hosts.n1]\npython = "/x"\n')
    Path("acc.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\n"
        "deepspeed_config:\n  deepspeed_hostfile: d/paceline.toml\nnum_machines: 2\n"
    )
    with pytest.raises(SettingError, match=r"paceline.toml sets the Python of a host") as caught:
        read_cluster(context_of("check", "-H", source), source)
    assert "paceline trust d/paceline.toml" in caught.value.remedy
    CliRunner().invoke(trust_command, ["d/paceline.toml"])
    assert read_cluster(context_of("check", "-H", source), source).hosts[0].python == "/x"


@pytest.mark.parametrize("value", ["7", "2024-01-01"])
def test_rejects_non_string_recipe_paths(value: str) -> None:
    Path(value).mkdir()
    Path("paceline.toml").write_text(f"[train.text]\ndata = {value}\n")
    with pytest.raises(SettingError, match=r"\[train.text\] data"):
        parse_recipe_options(context_of("train"), "text", [])


def test_environment_of_host_requires_trust() -> None:
    Path("paceline.toml").write_text('[hosts.n1.env]\nLD_PRELOAD = "/x"\n')
    ctx = context_of("check")
    with pytest.raises(SettingError, match="environment of a host") as caught:
        read_cluster(ctx, "n1")
    assert "[hosts.n1] env" in caught.value.found
    CliRunner().invoke(trust_command)
    assert read_cluster(context_of("check"), "n1").hosts[0].env == {"LD_PRELOAD": "/x"}


@pytest.mark.parametrize(
    "source", ["ssh-config:~/.ssh/config", "../list", "link", "ssh-config:config", "acc"]
)
def test_hosts_of_file_outside_require_trust(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text("Host n1\n  User me\n")
    (tmp_path / "list").write_text("n1\n")
    Path("link").symlink_to("../list")
    Path("config").write_text("Host n0\nInclude ~/.ssh/config\n")
    Path("acc").write_text("num_machines: 2\ndeepspeed_config:\n  deepspeed_hostfile: ../list\n")
    Path("paceline.toml").write_text(f'[run]\nhosts = "{source}"\n')
    ctx = context_of("run")
    with pytest.raises(SettingError, match="names hosts by a file outside of this") as caught:
        read_cluster(ctx, ctx.params["hosts"])
    assert caught.value.found == f'[run] hosts = "{source}"'
    assert "paceline trust" in caught.value.remedy
    assert read_cluster(context_of("run", "-H", source), source).hosts  # typed
    CliRunner().invoke(trust_command)
    assert "n1" in [host.name for host in read_cluster(context_of("run"), source).hosts]


def test_lab_of_file_requires_trust(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from paceline.hosts import lab, source

    layout = lab.Layout(tmp_path / "at")
    layout.root.mkdir()
    layout.hostfile.write_text("n1\n")
    for module in (lab, source):
        monkeypatch.setattr(module, "find_lab", lambda name, environ: layout)
    Path("paceline.toml").write_text('[run]\nhosts = "lab:at"\n')
    with pytest.raises(SettingError, match="names a lab of yours"):
        read_cluster(context_of("run"), "lab:at")
    assert read_cluster(context_of("run", "-H", "lab:at"), "lab:at").hosts == (Host("n1"),)
    CliRunner().invoke(trust_command)
    assert read_cluster(context_of("run"), "lab:at").hosts == (Host("n1"),)


@pytest.mark.parametrize(
    "text",
    [
        '[run]\nhosts = "n1,me@n2"\n',
        '[run]\nhosts = "machines"\n',
        '[run]\nhosts = "slurm"\n',
        '[run]\nhosts = "n1,n2"\n[hosts.n1]\naddress = "10.0.0.3"\n',
        '[hosts.n1]\naddress = "10.0.0.3"\nuser = "me"\n[hosts.n2]\n',
    ],
)
def test_hosts_listed_in_folder_require_no_trust(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    Path("machines").write_text("n1\nn2\n")
    Path("paceline.toml").write_text(text)
    ctx = context_of("check")
    cluster = read_cluster(ctx, ctx.params["hosts"])
    assert [host.name for host in cluster.hosts] == ["n1", "n2"]


@pytest.mark.parametrize("login", ['address = "10.0.0.3"', 'user = "me"', "port = 2222",
                                   'key = "k"', 'address = "127.0.0.1"'])  # fmt: skip
def test_login_of_host_named_elsewhere_requires_trust(login: str) -> None:
    Path("paceline.toml").write_text(f"[hosts.n1]\n{login}\n[hosts.n2]\nslots = 2\n")
    typed = context_of("run", "-H", "n1,n2")
    with pytest.raises(SettingError, match="the login of a host that you named") as caught:
        read_cluster(typed, "n1,n2")
    assert caught.value.found == f"[hosts.n1] {login}"
    with pytest.raises(SettingError, match="the login of a host"):
        read_cluster(context_of("run", PACELINE_OPT_HOSTS="n1"), "n1")
    assert read_cluster(context_of("run", "-H", "n2"), "n2").hosts[0].slots == 2
    CliRunner().invoke(trust_command)
    assert read_cluster(typed, "n1,n2").hosts[0] != Host("n1")


def test_table_of_this_machine_requires_no_trust() -> None:
    import socket

    name = socket.gethostname().split(".")[0]
    Path("paceline.toml").write_text(f'[hosts."{name}"]\naddress = "127.0.0.1"\n')
    assert read_cluster(context_of("run", "-H", name), name).hosts[0].local


def test_prints_hosts_of_file_with_name_of_host(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("gpu1", "hostfile"):
        Path(name).write_text("10.0.0.3\n")
        read_chosen_cluster(context_of("check", "-H", name))
    assert capsys.readouterr().err == "paceline: hosts: 10.0.0.3 (the file gpu1)\n"


@pytest.mark.parametrize("pipe", ["k", "k.pub", "k-cert.pub"])
def test_rejects_pipe_as_key(pipe: str) -> None:
    import os

    Path("machines").write_text("n1 key=k\n")
    read_cluster(context_of("check", "-H", "machines"), "machines")
    os.mkfifo(pipe)
    with pytest.raises(HostsError, match="SSH key of n1 is not a file") as caught:
        read_cluster(context_of("check", "-H", "machines"), "machines")
    assert caught.value.found.startswith(f"{pipe} is a pipe")


@pytest.mark.parametrize("manipulation", ["of another user", "writable for all", "a planted link"])
def test_foreign_settings_file_sets_no_programs(
    manipulation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    path = Path("paceline.toml")
    path.write_text('[run]\nmpiexec = "./evil.sh"\nnnodes = 2\n')
    trust.remember(path, settings_file.read_settings_file(Path.cwd()))
    if manipulation == "writable for all":
        path.chmod(0o646)
    elif os.geteuid() == 0:
        if manipulation == "a planted link":
            path.rename("real.toml")
            path.symlink_to("real.toml")
        os.chown(path, 12345, 12345, follow_symlinks=False)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(SettingError, match="may not set mpiexec"):
        context_of("run")
    assert context_of("run", "--mpiexec", "mine").params["nnodes"] == 2  # other settings are used
    rejected = CliRunner().invoke(trust_command)
    assert isinstance(rejected.exception, SettingError)


def test_verbs_use_verb_class() -> None:
    from paceline.cli.verb import Verb

    for name, command in verbs(program):
        assert isinstance(command, Verb), name


def test_verb_names_match_modules() -> None:
    for name in VERBS:
        command = program.get_command(click.Context(program), name)
        assert command is not None
        assert command.name == name


def test_shared_recipe_options_use_run_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("mine.csv").write_text("a,b\n")
    settings = '[run]\ndata = "mine.csv"\ncommunication = "int8"\n'
    Path("paceline.toml").write_text(settings)
    with pytest.raises(SettingError, match="data, which sends a folder") as caught:
        parse_recipe_options(context_of("train"), "text", [])
    assert caught.value.found == '[run] data = "mine.csv"'
    CliRunner().invoke(trust_command)
    ctx = context_of("train")
    options = parse_recipe_options(ctx, "text", [])
    assert (options.data, options.communication) == ("mine.csv", "int8")
    assert {"--data=mine.csv", "--communication=int8"} <= set(ctx.params["options"])
    Path("paceline.toml").write_text(f'{settings}[train.text]\ndata = "ag-news"\n')
    assert parse_recipe_options(context_of("train"), "text", []).data == "ag-news"
    monkeypatch.setenv("PACELINE_OPT_DATA", "meals")
    assert parse_recipe_options(context_of("train"), "text", []).data == "meals"
    assert parse_recipe_options(context_of("train"), "text", ["--data", "dummy"]).data == "dummy"


@each_case(
    ("words", "keep", "is_kept"),
    [
        (["--keep", "5"], 5, False),
        (["--keep=0"], 0, False),
        (["--keep"], 3, True),
        (["--keep", "--keep", "2"], 2, True),
    ],
)
def test_number_after_keep_belongs_to_recipe(words: list[str], keep: int, is_kept: bool) -> None:
    ctx = context_of("train", *words)  # the name of a recipe follows
    options = parse_recipe_options(ctx, "text", ctx.params["options"])
    assert (options.keep, ctx.params["keep"]) == (keep, is_kept)
