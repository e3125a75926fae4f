"""Tests the command line of ``paceline run``: settings and their sources, hosts, the script."""

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

# --- values in paceline.toml


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
def test_rejects_invalid_file_values(key: str, value: object) -> None:
    with pytest.raises(SettingError, match=key):
        settings_file.convert_value(options.settings_registry()[key], key, value)


def test_asks_for_list_in_place_of_table() -> None:
    with pytest.raises(SettingError) as caught:
        settings_file.convert_value(options.settings_registry()["env"], "env", {"A": "1"})
    assert caught.value.remedy == 'Write a list: env = ["A=1", "B=2"]'


def test_converts_file_values() -> None:
    def convert(key: str, value: object) -> object:
        return settings_file.convert_value(options.settings_registry()[key], key, value)

    assert convert("lease", 20) == 20.0
    assert convert("env", "A=1") == ("A=1",)
    assert convert("env", ["A=1", "B=2"]) == ("A=1", "B=2")
    assert convert("accept-new-host-keys", True) is True
    assert convert("time", "1:00") == "1:00"


def test_settings_registry_is_cached() -> None:
    """A recipe looks up each of its options in the registry."""
    assert options.settings_registry() is options.settings_registry()


# --- --env


def test_env_option_sets_and_forwards_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("T_MINE", "of mine")
    public, forwarded = job_options.parse_env(("A=1", "B=", "C=x=y", "D=a b\n", "T_MINE"))
    assert public == {"A": "1", "B": "", "C": "x=y", "D": "a b\n"}
    assert forwarded == {"T_MINE": "of mine"}


@pytest.mark.parametrize("definition", ["", "=x", "A\0=1", "A B=1"])
def test_rejects_invalid_env_definitions(definition: str) -> None:
    with pytest.raises(SettingError, match="--env"):
        job_options.parse_env((definition,))


def test_rejects_forwarding_unset_variable() -> None:
    with pytest.raises(SettingError, match="T_NOWHERE"):
        job_options.parse_env(("T_NOWHERE",))


# --- the script


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "__init__.py").write_text("")
    (tmp_path / "train.py").write_text("")
    return tmp_path


def test_entry_kinds(folder: Path) -> None:
    def kind(name: str, module: bool = False, no_python: bool = False) -> str:
        return entry_of(name, ("x",), module=module, no_python=no_python).kind

    assert kind("train.py") == "script"
    assert kind("a.b", module=True) == "module"
    assert kind("hostname", no_python=True) == "binary"


@pytest.mark.parametrize(("name", "hint"), [("trian.py", "train.py"), ("hostname", "--no-python")])
def test_missing_script_error_has_hint(folder: Path, name: str, hint: str) -> None:
    with pytest.raises(SettingError) as caught:
        entry_of(name, (), module=False, no_python=False)
    assert hint in caught.value.remedy


def test_no_python_refuses_script_of_folder(folder: Path) -> None:
    with pytest.raises(SettingError) as caught:
        entry_of("train.py", ("--lr", "1"), no_python=True)
    assert caught.value.remedy.startswith("Leave it out: paceline run train.py --lr 1\n")
    assert entry_of("./train.py", (), no_python=True).kind == "binary"


def test_suggests_commas_between_hosts(folder: Path) -> None:
    with pytest.raises(SettingError) as caught:  # from ``-H n1 n2 train.py``
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
def test_rejects_interpreter_or_folder_as_script(
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
        ("train.ipynb", b"{}", "jupyter nbconvert --to script train.ipynb"),
    ],
)
def test_rejects_scripts_that_are_not_python(
    folder: Path, name: str, content: bytes, remedy: str
) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(SettingError) as caught:
        entry_of(name, ("--lr", "1"))
    assert (caught.value.remedy or "").endswith(remedy)
    assert entry_of(name, (), no_python=True).kind == "binary"


def test_finds_launcher_inside_program(folder: Path) -> None:
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
def test_mpirun_flags_get_suggestion(flag: str) -> None:
    completed = CliRunner().invoke(program, ["run", flag, "2", "train.py"])
    assert "Did you mean -p N, the ranks of each host?" in completed.output


def test_script_option_before_script_gets_hint() -> None:
    completed = CliRunner().invoke(program, ["run", "--epochs", "2", "train.py"])
    assert completed.exit_code == 2
    assert "An option of your script goes after its name." in completed.output


def test_module_and_program_exclude_each_other() -> None:
    with pytest.raises(SettingError):
        entry_of("x", (), module=True, no_python=True)


# --- this machine


def test_marks_local_host_by_name_or_address(monkeypatch: pytest.MonkeyPatch) -> None:
    local_addresses = [{"address": "127.0.0.1"}, {"address": "10.0.0.2"}]
    monkeypatch.setattr(this_machine, "local_names", lambda: {"n1", "localhost"})
    monkeypatch.setattr(this_machine, "addresses", lambda: local_addresses)
    by_name = this_machine.mark_local(Cluster((Host("n1"), Host("n3"))))
    assert [host.local for host in by_name.hosts] == [True, False]
    by_address = this_machine.mark_local(Cluster((Host("n3"), Host("10.0.0.2"))))
    assert [host.local for host in by_address.hosts] == [False, True]
    neither = this_machine.mark_local(Cluster((Host("n3"), Host("n4"))))
    assert [host.local for host in neither.hosts] == [False, False]


# --- the program


def test_help_lists_verbs_by_section() -> None:
    text = CliRunner().invoke(program, ["--help"]).output
    for verb in ("run", "train", "hosts", "lab"):
        assert f"\n  {verb} " in text
    titles = [line for line in text.splitlines() if line.endswith(":") and line[0] != " "]
    assert titles == [
        "Run:", "Watch a run:", "Understand:", "Prepare:", "Recipes and trained models:",
        "Options:",
    ]  # fmt: skip


def test_help_all_of_run_lists_options() -> None:
    completed = CliRunner().invoke(program, ["run", "--help-all"])
    assert completed.exit_code == 0
    for option in ("--hosts", "--nnodes", "--plan", "--lease", "--max-restarts", "--env"):
        assert option in completed.output


def test_unknown_verb_gets_suggestion() -> None:
    completed = CliRunner().invoke(program, ["rnu"])
    assert completed.exit_code == 2
    assert "Did you mean run?" in completed.output


IMPORT_CHECK = """
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


def test_cli_does_not_import_heavy_packages() -> None:
    code = IMPORT_CHECK.format(argv="['--help'], ['run', '--help'], ['--version'], ['env']")
    env = {**os.environ, "PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALNRANKS": "1"}
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env
    )
    assert completed.returncode == 0, completed.stderr


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


@pytest.mark.parametrize(("argv", "max_modules"), [(["--help"], 150), (["run", "--help"], 205)])
def test_help_limits_imports(argv: list[str], max_modules: int) -> None:
    """Most of the start time is spent on imports."""
    completed = subprocess.run(
        [sys.executable, "-I", "-c", IMPORTED.format(argv=argv)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    modules = completed.stderr.split()
    top_level = {name.split(".")[0] for name in modules if not name.startswith("_")}
    assert top_level - set(sys.stdlib_module_names) == {"click", "paceline"}
    of_click = {"subprocess"} if sys.version_info < (3, 11) else set()  # imported by uuid
    assert not ({"asyncio", "subprocess", "ssl"} - of_click) & top_level
    assert len(modules) < max_modules  # Python 3.11: 93 and 131


@pytest.mark.parametrize("cause", [KeyboardInterrupt(), ValueError()])
def test_interrupt_during_class_creation_exits_130(
    monkeypatch: pytest.MonkeyPatch, cause: BaseException
) -> None:
    def interrupted() -> None:
        raise RuntimeError("Error calling __set_name__") from cause

    monkeypatch.setattr("paceline.cli.main", interrupted)
    is_interrupt = isinstance(cause, KeyboardInterrupt)
    with pytest.raises(SystemExit if is_interrupt else RuntimeError) as exc_info:
        entry_point.main()
    assert getattr(exc_info.value, "code", 130) == 130


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
def test_preload_matches_script_imports(
    tmp_path: Path, text: str, modules: tuple[str, ...]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(text)
    entry = entry_of(str(script), (), module=False, no_python=False)
    assert preload_of(entry) == modules


def test_preload_matches_imports_of_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("package/go.py", "package/__main__.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("from paceline import train")
    for module in ("package", "package.go"):
        entry = entry_of(module, (), module=True, no_python=False)
        assert preload_of(entry) == ("torch", "paceline.train?")
    assert preload_of(entry_of("json", (), module=True, no_python=False)) == ("torch",)


@pytest.mark.parametrize("script", ["import model", "def main():\n    from model import deep"])
def test_preload_matches_imports_of_project_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for file, text in (("train.py", script), ("model/__init__.py", "from . import deep"),
                       ("model/deep.py", "import broken, paceline.train"), ("broken.py", "x = ("),
                       ("model/__main__.py", "from .deep import net")):  # fmt: skip
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    (tmp_path / "paceline").mkdir()  # such as a clone; Python would not import it
    for name, is_module in (("train.py", False), ("model", True)):
        entry = entry_of(name, (), module=is_module, no_python=False)
        assert preload_of(entry) == ("torch", "paceline.train?")


def test_module_entry_preloads_only_torch() -> None:
    assert preload_of(entry_of("a.module", (), module=True, no_python=False)) == ("torch",)


def test_rdzv_id_has_environment_variable() -> None:
    run = program.get_command(click.Context(program), "run")
    assert run is not None
    (option,) = [p for p in run.params if p.name == "rdzv_id"]
    assert option.envvar == ["PACELINE_OPT_RDZV_ID"]


def test_ctrl_c_during_parsing_exits_130(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(click.Group, "parse_args", interrupted)
    previous_handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as exc_info:
            cli.main(["run"])
    finally:
        signal.signal(signal.SIGINT, previous_handler)
    assert exc_info.value.code == 130


def test_closed_stdout_and_stderr_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the shell's ``>&-``, Python's stream is ``None``."""
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
    ("cli_args", "flag"),
    [
        (["run", "--data", "A", "--data", "B", "x.py"], "--data"),
        (["run", "-H", "a", "--hosts=b", "x.py"], "-H/--hosts"),
        (["train", "image", "--data", "digits", "--data", "dummy"], "--data"),
    ],
)
def test_rejects_repeated_option(cli_args: list[str], flag: str) -> None:
    with pytest.raises(SettingError, match=rf"^{flag} is given"):
        program.main(cli_args, standalone_mode=False)


def test_accepts_repeatable_options(folder: Path) -> None:
    (folder / "x.py").write_text("")
    cli_args = ["run", "--env", "A=1", "--env", "B=2", "--lease", "7", "--lease", "8", "--plan"]
    cli_args += ["x.py", "--data", "A", "--data", "B"]
    assert CliRunner().invoke(program, cli_args).exit_code == 0


def test_command_line_option_overrides_file(folder: Path) -> None:
    (folder / "paceline.toml").write_text("[train.image]\nepochs = 2\n")
    completed = CliRunner().invoke(program, ["train", "image", "--epochs", "1", "--plan", "-v"])
    assert completed.exit_code == 0
    assert "--epochs=1" in completed.output


# --- several copies of one command


SRUN = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "r"}


@pytest.mark.parametrize("environ", [SRUN, MPIRUN, TORCHRUN])
def test_rejects_copy_started_by_srun_or_mpirun(environ: dict[str, str]) -> None:
    with pytest.raises(SettingError, match="started this command 2 times"):
        dispatch.refuse_later_copy({"rdzv": None, "hosts": None}, environ)


@pytest.mark.parametrize(
    ("hosts", "rdzv", "environ"),
    [
        (None, None, {**SRUN, "SLURM_PROCID": "0"}),  # also a shell started by srun --pty
        (None, None, {"RANK": "1", "WORLD_SIZE": "2"}),  # a pod of a PyTorchJob
        (None, "n1:29400", SRUN),
        ("local", None, SRUN),
    ],
)
def test_accepts_intended_copies(
    hosts: str | None, rdzv: str | None, environ: dict[str, str]
) -> None:
    dispatch.refuse_later_copy({"rdzv": rdzv, "hosts": hosts}, environ)
