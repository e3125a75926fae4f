"""Tests hostile arguments, variables and files: each gives one of Paceline's errors or a result.

All inputs come from seeds, so that a failure can be repeated. The limits are generous: tracebacks,
hangs and excessive use of memory are failures.
"""

from __future__ import annotations

import os
import random
import resource
import time
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from paceline.cli import options, program, settings_file, variables
from paceline.hosts import apply_overrides, load_toml, read_hosts, write_hosts
from paceline.spec.errors import PacelineError

MAX_CPU_S = 5.0  # of CPU time
MAX_MEMORY_KIB = 500 << 10
# parts of hostile words
HOSTILE_PARTS = [
    "", " ", "\t", "\n", "\r", "\0", "\x1b[31m", "\x1b]0;x\x07", "\u202e", "\ud800", "\udcff",
    "\N{NO-BREAK SPACE}", "é", "日本", "🙂", "a" * 70, "a" * 5000, "." * 300,
    "-", "--", "-oProxyCommand=x",
    "@", "@@", ":", "::", "[", "]", "[]", "[[", "[1-", "[1-9999999]", "[0-9][0-9][0-9][0-9][0-9]",
    "[1-2][", "[01-99999999999999999999]", ",", ",,", ",,,,", "#", "=", "slots=", "slots=-1",
    "slots=99999999999999999999", "slots=1e9", "slots=٣", "n1", "n[1-3]", "me@n1", "n1:2", "n1:0",
    "n1:99999", "n1:22", "1.2.3.4", "256.1.1.1", "1.2.3", "fd00::1", "fd00::%eth0", "[fd00::1]:2",
    "::ffff:1.2.3.4", "0x7f.1", "%", "%s", "{}", "$(id)", "`id`", ";id", "|", "&", ">", "<",
    "'", '"',
    "\\", "/", "//", "../../..", "~", "~root", "lab", "lab:", "lab:x", "lab:" + "x" * 300, "slurm",
    "auto", "toml:", "slurm:", "accelerate:", "ssh-config:~/x", "toml:/dev/null", "local",
]  # fmt: skip
TOML_VALUES = [
    "1e400", "-1e400", "nan", "inf", "2026-01-01", "2026-01-01T00:00:00Z", "07:32:00", "true",
    "false", "0", "-1", "9" * 400, "0x" + "f" * 300, "0b1", "1_000", '""', '"n1"',
    '"' + "x" * 3000 + '"',
    '"\\u0000"', '"\\u001b[31m"', '"\\ud800"', "'''", '"""', "[]", "[[]]", "[1,[2]]", "{}", "{a=1}",
    "{a={b={c=1}}}", "[" * 40 + "]" * 40, "[" * 3000 + "]" * 3000, "{a=" * 1200 + "1" + "}" * 1200,
    '["A=1"]', '["=1"]', '["A"]', "[true]", "[1.5]", '"-oX"', '"n1,n2"', '"toml:paceline.toml"',
    "=",
    "# x", "\x00", "\ud800", "'a", "nnodes", "[run]", "[run.run]", "[[run]]", "[hosts.n1.n2]",
]  # fmt: skip


class Limits:
    """Fails if a block takes too much CPU time or memory."""

    def __enter__(self) -> None:
        self._began, self._before = time.process_time(), _peak_kib()

    def __exit__(self, *_: object) -> None:
        assert time.process_time() - self._began < MAX_CPU_S
        assert _peak_kib() - self._before < MAX_MEMORY_KIB


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))


def check_handled(act: Callable[[], object], case: object) -> None:
    """Calls a function that must succeed or raise a Paceline error with a printable message."""
    with Limits():
        try:
            act()
        except PacelineError as error:
            message = error.render()
            assert len(message) < 20_000, (case, len(message))
            assert "\x1b" not in message, (case, message)
            message.encode("utf-8", "backslashreplace")
        except click.ClickException as error:
            error.format_message().encode("utf-8", "backslashreplace")


def random_text(rng: random.Random, max_parts: int = 4) -> str:
    return "".join(rng.choice(HOSTILE_PARTS) for _ in range(rng.randint(1, max_parts)))


@pytest.mark.parametrize("seed", range(8))
def test_hostile_inline_hosts(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        source = random_text(rng)
        check_handled(lambda: read_hosts(source, environ=os.environ, cwd=Path.cwd()), ascii(source))  # noqa: B023


@pytest.mark.parametrize("seed", range(8))
def test_hostile_host_files(seed: int, tmp_path: Path) -> None:
    rng = random.Random(100 + seed)
    path = tmp_path / "hostfile"
    for _ in range(60):
        lines = [random_text(rng) for _ in range(rng.randint(0, 6))]
        data = rng.choice(["\n", "\r\n", "\r", "\x0b"]).join(lines).encode("utf-8", "surrogatepass")
        if rng.random() < 0.2:
            data = rng.randbytes(rng.randint(0, 200))
        path.write_bytes(data)

        def parse() -> None:
            cluster = read_hosts("hostfile", environ={}, cwd=tmp_path)
            write_hosts(cluster, "toml")

        check_handled(parse, data)


@pytest.mark.parametrize("seed", range(6))
def test_hostile_variables(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers variables of Paceline and of schedulers, with values that a process can get."""
    rng = random.Random(200 + seed)
    own_names = [variables.variable_of(option) for option in options.settings_registry().values()]
    foreign_names = ["SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE", "PBS_NODEFILE", "PET_NNODES",
              "MASTER_ADDR", "PET_MASTER_ADDR", "WORLD_SIZE", "GROUP_WORLD_SIZE",
              "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PACELINE_LAB"]  # fmt: skip
    for _ in range(30):
        environment = {rng.choice([*own_names, *foreign_names]): as_variable(random_text(rng, 2))
                 for _ in range(rng.randint(1, 3))}  # fmt: skip
        if rng.random() < 0.1:
            environment[f"PACELINE_OPT_{rng.choice(['X', 'HOST', 'é'])}"] = "1"
        verb = rng.choice([["hosts"], ["hosts", "auto"], ["hosts", "slurm"], ["status"],
                              ["run", "no-such-script.py"], ["setup"]])  # fmt: skip
        with monkeypatch.context() as patched:
            for name, value in environment.items():
                patched.setenv(name, value)
            call(verb, environment)


def as_variable(text: str) -> str:
    """Makes a text a possible variable: no NUL, and only surrogates that stand for bytes."""
    return (
        text.replace("\0", "").encode("utf-8", "surrogatepass").decode("utf-8", "surrogateescape")
    )


def call(argv: list[str], case: object) -> None:
    """Runs a command up to its first connection."""
    with Limits():
        result = CliRunner().invoke(program, argv, prog_name="paceline")
    raised = result.exception
    assert raised is None or isinstance(raised, SystemExit | PacelineError), (ascii(case), raised)
    if isinstance(raised, PacelineError):
        raised.render().encode("utf-8", "backslashreplace")


@pytest.mark.parametrize("seed", range(9))
def test_hostile_settings_files(seed: int, tmp_path: Path) -> None:
    rng = random.Random(300 + seed)
    keys = [*options.settings_registry(), "nnode", "é", "a.b", '""', "hosts.n1", "max_restarts"]
    path = tmp_path / "paceline.toml"
    for _ in range(50):
        tables = []
        for table in rng.sample(["run", "hosts", 'hosts."n1"', "hosts.n2", "train.image", "x"],
                                   rng.randint(1, 3)):  # fmt: skip
            table_keys = (
                ["address", "slots", "port", "python", "key", "user"] if "hosts" in table else keys
            )
            lines = [f"{rng.choice(table_keys)} = {rng.choice(TOML_VALUES)}"
                     for _ in range(rng.randint(0, 2))]  # fmt: skip
            tables.append("\n".join([f"[{table}]", *lines]))
        text = "\n".join(tables)
        if rng.random() < 0.15:
            text = rng.choice(TOML_VALUES)
        path.write_bytes(text.encode("utf-8", "surrogatepass"))

        def parse() -> None:
            toml = load_toml(path)
            apply_overrides(read_hosts("n1,n2", environ={}, cwd=tmp_path), toml)

        check_handled(parse, text)
        check_handled(lambda: settings_file.read_settings_file(tmp_path), text)
        call(rng.choice([["hosts"], ["run", "none.py"], ["status"], ["trust"]]), text)


def test_rejects_invalid_settings_file_types(tmp_path: Path) -> None:
    path = tmp_path / "paceline.toml"
    path.mkdir()
    check_handled(lambda: settings_file.read_settings_file(tmp_path), "a folder")
    path.rmdir()
    path.write_bytes(b"a = 1\n" * (5 << 20))
    check_handled(lambda: settings_file.read_settings_file(tmp_path), "30 MB")
    path.unlink()
    os.mkfifo(path)
    check_handled(lambda: settings_file.read_settings_file(tmp_path), "a pipe")
    path.unlink()
    path.symlink_to(path)
    check_handled(lambda: settings_file.read_settings_file(tmp_path), "a link to itself")


@pytest.mark.parametrize(
    "text",
    [
        "Include a b\nHost n1\n  Port 22\n",
        "Include ~no-such-user/x\nHost n1\n  Port 22\n",
        f"Include {'x' * 300} {'y' * 5000} ** ../../../../../*\nHost n1\n  Port 22\n",
    ],
)
def test_ssh_config_include_cycles(text: str, tmp_path: Path) -> None:
    for name in ("a", "b", "config"):
        (tmp_path / name).write_text(text)
    check_handled(lambda: read_hosts("ssh-config:config", environ={}, cwd=tmp_path), text)
