"""The command line of ``paceline run``: settings and their sources, hosts, the script."""

from __future__ import annotations

import datetime
import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from paceline import __main__ as entry_point
from paceline import cli
from paceline.cli import dispatch, job_options, options, program, settings_file
from paceline.launch.planning.entry import entry_of, inner_launcher, preload_of
from paceline.remote import this_machine
from paceline.spec.errors import SettingError
from paceline.spec.hosts import Cluster, Host
from paceline.spec.job import Entry

# --- what a value in the file may be


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ship", "sometimes"),
        ("nnodes", True),
        ("nnodes", 1.5),
        ("lease", float("inf")),
        ("lease", datetime.date(2026, 1, 1)),
        ("accept-new-host-keys", "yes"),
        ("accept-new-host-keys", 1),
        ("env", {"A": "1"}),
        ("env", [True]),
        ("env", [["A=1"]]),
        ("name", "a\nb"),
    ],
)
def test_a_value_that_cannot_be_is_refused(key: str, value: object) -> None:
    with pytest.raises(SettingError, match=key):
        settings_file.convert_value(options.settings_registry()[key], key, value)


def test_values_of_the_file() -> None:
    def taken(key: str, value: object) -> object:
        return settings_file.convert_value(options.settings_registry()[key], key, value)

    assert taken("lease", 20) == 20.0
    assert taken("env", "A=1") == ("A=1",)
    assert taken("env", ["A=1", "B=2"]) == ("A=1", "B=2")
    assert taken("accept-new-host-keys", True) is True
    assert taken("time", "1:00") == "1:00"


def test_options_are_made_once_per_process() -> None:
    """A recipe looks each of its options up among them."""
    assert options.settings_registry() is options.settings_registry()


# --- --env


def test_variables_with_values_and_forwarded_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("T_MINE", "of mine")
    public, forwarded = job_options.parse_env(("A=1", "B=", "C=x=y", "D=a b\n", "T_MINE"))
    assert public == {"A": "1", "B": "", "C": "x=y", "D": "a b\n"}
    assert forwarded == {"T_MINE": "of mine"}


@pytest.mark.parametrize("given", ["", "=x", "A\0=1", "A B=1"])
def test_what_names_no_variable(given: str) -> None:
    with pytest.raises(SettingError, match="--env"):
        job_options.parse_env((given,))


def test_a_variable_that_is_not_there() -> None:
    with pytest.raises(SettingError, match="T_NOWHERE"):
        job_options.parse_env(("T_NOWHERE",))


# --- the script


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "__init__.py").write_text("")
    (tmp_path / "train.py").write_text("")
    return tmp_path


def test_kinds_of_entries(folder: Path) -> None:
    def kind(name: str, module: bool = False, no_python: bool = False) -> str:
        return entry_of(name, ("x",), module=module, no_python=no_python).kind

    assert kind("train.py") == "script"
    assert kind("a.b", module=True) == "module"
    assert kind("hostname", no_python=True) == "binary"


@pytest.mark.parametrize(("name", "hint"), [("trian.py", "train.py"), ("hostname", "--no-python")])
def test_a_script_that_is_not_there(folder: Path, name: str, hint: str) -> None:
    with pytest.raises(SettingError) as caught:
        entry_of(name, (), module=False, no_python=False)
    assert hint in caught.value.remedy


def test_hosts_without_commas(folder: Path) -> None:
    with pytest.raises(SettingError) as caught:  # -H n1 n2 train.py
        entry_of("n2", ("train.py", "--lr", "1"))
    assert caught.value.remedy.endswith("-H HOST,n2 train.py")


@pytest.mark.parametrize(
    ("script", "args", "remedy"),
    [
        ("python", ("ddp.py", "--lr", "1"), "Leave it out: paceline run ddp.py "),
        ("/usr/bin/python3.11", ("-m", "pkg"), "Leave it out: paceline run -m pkg "),
        ("python", ("-u", "-W", "error", "a b.py"), "Leave it out: paceline run 'a b.py' "),
        ("python", ("-B", "-m", "pkg", "-u"), "Leave it out: paceline run -m pkg "),
        ("python", ("-c", "print()"), "Leave it out: paceline run SCRIPT "),
        ("python", ("-u",), "Leave it out: paceline run SCRIPT "),
        ("torchrun", ("-p", "2", "x.py", "--lr", "1"), "Leave it out: paceline run -p 2 x.py --lr"),
        (".", (), "Name a script in it: train.py"),
        ("empty", (), "Name a script"),
        ("/dev/null", (), "Save the script in a file"),
    ],
)
def test_a_script_that_is_none(
    folder: Path, script: str, args: tuple[str, ...], remedy: str
) -> None:
    (folder / "empty").mkdir()
    with pytest.raises(SettingError) as caught:
        entry_of(script, args)
    assert "empty/" not in caught.value.remedy
    assert (caught.value.remedy or "").startswith(remedy)


@pytest.mark.parametrize(
    ("name", "content", "remedy"),
    [
        ("run.sh", b"torchrun train.py\n", "paceline run --no-python bash run.sh --lr 1"),
        ("run", b"#!/usr/bin/env bash\n", "paceline run --no-python bash run --lr 1"),
        ("solver", b"\x7fELF\2\1\1", "paceline run --no-python ./solver --lr 1"),
    ],
)
def test_a_program_that_is_not_python(folder: Path, name: str, content: bytes, remedy: str) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(SettingError) as caught:
        entry_of(name, ("--lr", "1"))
    assert (caught.value.remedy or "").endswith(remedy)
    assert entry_of(name, (), no_python=True).kind == "binary"


def test_a_launcher_inside_a_program_is_recognised(folder: Path) -> None:
    def launcher(*command: str) -> str:
        return inner_launcher(Entry("binary", command[0], command[1:]))

    (folder / "run.sh").write_text(
        "# torchrun\nset -e\nexec torchrun --nproc_per_node=2 train.py\n"
    )
    (folder / "env.sh").write_text("# torchrun\npython train.py --log torchrun.log\n")
    assert launcher("bash", "run.sh") == launcher("./run.sh") == "torchrun"
    assert launcher("sh", "-c", "python -m torch.distributed.run a.py") == "torch.distributed.run"
    assert launcher("bash", "env.sh") == launcher("hostname") == ""


@pytest.mark.parametrize("flag", ["-n", "-np"])
def test_flags_of_mpirun_lead_to_ours(flag: str) -> None:
    done = CliRunner().invoke(program, ["run", flag, "2", "train.py"])
    assert "Did you mean -p N, the ranks of each host?" in done.output


def test_an_option_of_the_script_goes_after_its_name() -> None:
    done = CliRunner().invoke(program, ["run", "--epochs", "2", "train.py"])
    assert done.exit_code == 2
    assert "An option of your script goes after its name." in done.output


def test_module_and_program_exclude_each_other() -> None:
    with pytest.raises(SettingError):
        entry_of("x", (), module=True, no_python=True)


# --- this machine


def test_this_very_machine_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = [{"address": "127.0.0.1"}, {"address": "10.0.0.2"}]
    monkeypatch.setattr(this_machine, "local_names", lambda: {"n1", "localhost"})
    monkeypatch.setattr(this_machine, "addresses", lambda: mine)
    by_name = this_machine.mark_local(Cluster((Host("n1"), Host("n3"))))
    assert [host.local for host in by_name.hosts] == [True, False]
    by_address = this_machine.mark_local(Cluster((Host("n3"), Host("10.0.0.2"))))
    assert [host.local for host in by_address.hosts] == [False, True]
    neither = this_machine.mark_local(Cluster((Host("n3"), Host("n4"))))
    assert [host.local for host in neither.hosts] == [False, False]


# --- the program


def test_help_names_every_verb_without_importing_it() -> None:
    text = CliRunner().invoke(program, ["--help"]).output
    for verb in ("run", "train", "hosts", "lab"):
        assert f"\n  {verb} " in text
    titles = [line for line in text.splitlines() if line.endswith(":") and line[0] != " "]
    assert titles == [
        "Run:", "Watch a run:", "Understand:", "Prepare:", "Recipes and trained models:",
        "Options:",
    ]  # fmt: skip


def test_help_of_run_says_where_options_stand() -> None:
    done = CliRunner().invoke(program, ["run", "--help-all"])
    assert done.exit_code == 0
    for option in ("--hosts", "--nnodes", "--plan", "--lease", "--max-restarts", "--env"):
        assert option in done.output


def test_a_verb_that_is_not_there() -> None:
    done = CliRunner().invoke(program, ["rnu"])
    assert done.exit_code == 2
    assert "Did you mean run?" in done.output


HEAVY = """
import sys
from paceline.cli import program
for argv in ({argv}):
    try:
        program.main(argv, standalone_mode=False)
    except SystemExit:
        pass
heavy = [m for m in ("torch", "numpy", "rich", "yaml") if m in sys.modules]
sys.exit(f"imported: {{heavy}}" if heavy else 0)
"""


def test_the_control_side_starts_without_torch_and_quickly() -> None:
    code = HEAVY.format(argv="['--help'], ['run', '--help'], ['--version'], ['env']")
    env = {**os.environ, "PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALNRANKS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env
    )
    assert done.returncode == 0, done.stderr


IMPORTED = """
import sys
before = set(sys.modules)  # an interpreter may come with a sitecustomize: Debian's does
from paceline.cli import program
try:
    program.main({argv}, standalone_mode=False)
except SystemExit:
    pass
finally:
    print(*sorted(set(sys.modules) - before), file=sys.stderr)
"""


@pytest.mark.parametrize(("argv", "most"), [(["--help"], 150), (["run", "--help"], 205)])
def test_help_imports_little(argv: list[str], most: int) -> None:
    """What is imported is what a start costs."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", IMPORTED.format(argv=argv)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    modules = done.stderr.split()
    plain = {name.split(".")[0] for name in modules if not name.startswith("_")}
    assert plain - set(sys.stdlib_module_names) == {"click", "paceline"}
    of_click = {"subprocess"} if sys.version_info < (3, 11) else set()  # by uuid, which it imports
    assert not ({"asyncio", "subprocess", "ssl"} - of_click) & plain
    assert len(modules) < most  # 93 and 131 on Python 3.11


@pytest.mark.parametrize("cause", [KeyboardInterrupt(), ValueError()])
def test_an_interrupt_while_a_class_is_made(
    monkeypatch: pytest.MonkeyPatch, cause: BaseException
) -> None:
    def interrupted() -> None:
        raise RuntimeError("Error calling __set_name__") from cause

    monkeypatch.setattr("paceline.cli.main", interrupted)
    is_interrupt = isinstance(cause, KeyboardInterrupt)
    with pytest.raises(SystemExit if is_interrupt else RuntimeError) as ended:
        entry_point.main()
    assert getattr(ended.value, "code", 130) == 130


# --- what a node imports before it forks


@pytest.mark.parametrize(
    ("text", "modules"),
    [
        ("import torch.distributed as dist", ("torch",)),
        ("# optim is not used here", ("torch",)),
        ("import optimism", ("torch",)),
        ("opt = torch.optim.SGD(p)", ("torch", "torch._dynamo?")),
        ("from torch import nn, optim", ("torch", "torch._dynamo?")),
        ('os.environ["OMP_NUM_THREADS"] = "4"\nimport torch.optim', ()),
        ("environ.setdefault('TORCH_DISTRIBUTED_DEBUG', 'INFO')", ()),
        ('os.environ["OMP_NUM_THREADS"] == "4"', ("torch",)),
        ('n = int(os.environ["OMP_NUM_THREADS"])', ("torch",)),
        ('# os.environ["OMP_NUM_THREADS"] = "4"', ("torch",)),
        ('os.environ["TORCH_HOME"] = "x"', ("torch",)),
        (
            'os.environ["OMP_NUM_THREADS"] = "4"\nimport paceline.train',
            ("torch", "paceline.train?"),
        ),
        ("from paceline import train\noptim", ("torch", "paceline.train?")),
        ("if True:\n    import paceline.train", ("torch", "paceline.train?")),
        (
            "from paceline import train\nsession.prepare(net, compile=True)",
            ("torch", "paceline.train?", "torch._dynamo?"),
        ),
        ("from paceline import train\nre.compile('x')", ("torch", "paceline.train?")),
        ("from paceline import train\nif way == 'compile': ...", ("torch", "paceline.train?")),
        ('"""Has ``compile``\nand one shard."""\nimport paceline', ("torch", "paceline.train?")),
        ("from paceline import train\ncompile == 1", ("torch", "paceline.train?")),
        *(
            (f"from paceline import train\n{text}", ("torch", "paceline.train?", "torch._dynamo?"))
            for text in (
                "session.prepare(net, shard = True)",
                "@torch.compile\ndef f(): ...",
                "from torch import compile",
                "net.compile()",
                "fully_shard(net)",
                "from torch.distributed.fsdp import (fully_shard, x)",
            )
        ),
        (
            "from paceline import train\nre.compile('x'), torch.compile(net)",
            ("torch", "paceline.train?", "torch._dynamo?"),
        ),
    ],
)
def test_what_the_script_will_import(tmp_path: Path, text: str, modules: tuple[str, ...]) -> None:
    script = tmp_path / "script.py"
    script.write_text(text)
    entry = entry_of(str(script), (), module=False, no_python=False)
    assert preload_of(entry) == modules


def test_only_scripts_are_looked_into() -> None:
    assert preload_of(entry_of("a.module", (), module=True, no_python=False)) == ("torch",)


def test_the_name_of_a_rendezvous_has_an_ordinary_variable() -> None:
    run = program.get_command(click.Context(program), "run")
    assert run is not None
    (option,) = [p for p in run.params if p.name == "rdzv_id"]
    assert option.envvar == ["PACELINE_OPT_RDZV_ID"]


def test_ctrl_c_before_a_verb_runs_has_the_status_of_an_interrupt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(click.Group, "parse_args", interrupted)
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as ended:
            cli.main(["run"])
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.value.code == 130


def test_closed_outputs_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python finds them after ``>&-``."""
    seen = []
    monkeypatch.setattr(cli.program, "main", lambda **how: seen.append((sys.stdout, sys.stderr)))
    monkeypatch.setattr(cli.signal, "signal", lambda *how: None)
    monkeypatch.setattr(sys, "stdout", None)
    cli.main([])
    ((out, err),) = seen
    assert out is not None
    assert out.isatty() is False
    assert err is not None
    out.close()


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["run", "--data", "A", "--data", "B", "x.py"], "--data"),
        (["run", "-H", "a", "--hosts=b", "x.py"], "-H/--hosts"),
        (["train", "image", "--data", "digits", "--data", "dummy"], "--data"),
    ],
)
def test_a_second_value_is_refused_instead_of_dropping_the_first(
    words: list[str], flag: str
) -> None:
    with pytest.raises(SettingError, match=rf"^{flag} is given"):
        program.main(words, standalone_mode=False)


def test_options_that_may_stand_twice(folder: Path) -> None:
    (folder / "x.py").write_text("")
    words = ["run", "--env", "A=1", "--env", "B=2", "--lease", "7", "--lease", "8", "--plan"]
    words += ["x.py", "--data", "A", "--data", "B"]
    assert CliRunner().invoke(program, words).exit_code == 0


def test_a_typed_option_still_wins_over_the_file(folder: Path) -> None:
    (folder / "paceline.toml").write_text("[train.image]\nepochs = 2\n")
    done = CliRunner().invoke(program, ["train", "image", "--epochs", "1", "--plan", "-v"])
    assert done.exit_code == 0
    assert "--epochs=1" in done.output


# --- started several times


SRUN = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "r"}


@pytest.mark.parametrize("environ", [SRUN, MPIRUN, TORCHRUN])
def test_a_copy_of_the_command_is_refused(environ: dict[str, str]) -> None:
    with pytest.raises(SettingError, match="started this command 2 times"):
        dispatch.refuse_later_copy({"rdzv": None, "hosts": None}, environ)


@pytest.mark.parametrize(
    ("hosts", "rdzv", "environ"),
    [
        (None, None, {**SRUN, "SLURM_PROCID": "0"}),  # also the shell of srun --pty
        (None, None, {"RANK": "1", "WORLD_SIZE": "2"}),  # a pod of a PyTorchJob
        (None, "n1:29400", SRUN),
        ("local", None, SRUN),
    ],
)
def test_copies_with_a_purpose(
    hosts: str | None, rdzv: str | None, environ: dict[str, str]
) -> None:
    dispatch.refuse_later_copy({"rdzv": rdzv, "hosts": hosts}, environ)
