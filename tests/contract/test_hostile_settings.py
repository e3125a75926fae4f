"""What people type, set and write down, made hostile: a clear error of ours, or a right answer.

Every input is made from a seed, so that a failure can be repeated. The limits are generous: what is
forbidden is a traceback, a hang and a flood of memory.
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

LONGEST_S = 5.0  # of CPU time
MOST_KIB = 500 << 10
# pieces from which hostile words are made
NASTY = [
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
TOML = [
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
    """Neither a hang nor a flood of memory."""

    def __enter__(self) -> None:
        self._began, self._before = time.process_time(), _peak_kib()

    def __exit__(self, *_: object) -> None:
        assert time.process_time() - self._began < LONGEST_S
        assert _peak_kib() - self._before < MOST_KIB


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))


def ours(act: Callable[[], object], what: object) -> None:
    """Runs it; anything but an answer or an error of ours fails, and so does an unprintable one."""
    with Limits():
        try:
            act()
        except PacelineError as error:
            said = error.render()
            assert len(said) < 20_000, (what, len(said))
            assert "\x1b" not in said, (what, said)
            said.encode("utf-8", "backslashreplace")
        except click.ClickException as error:
            error.format_message().encode("utf-8", "backslashreplace")


def words(chance: random.Random, most: int = 4) -> str:
    return "".join(chance.choice(NASTY) for _ in range(chance.randint(1, most)))


@pytest.mark.parametrize("seed", range(8))
def test_inline_hosts(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(60):
        source = words(chance)
        ours(lambda: read_hosts(source, environ=os.environ, cwd=Path.cwd()), ascii(source))  # noqa: B023


@pytest.mark.parametrize("seed", range(8))
def test_host_files(seed: int, tmp_path: Path) -> None:
    chance = random.Random(100 + seed)
    path = tmp_path / "hostfile"
    for _ in range(60):
        lines = [words(chance) for _ in range(chance.randint(0, 6))]
        data = (
            chance.choice(["\n", "\r\n", "\r", "\x0b"]).join(lines).encode("utf-8", "surrogatepass")
        )
        if chance.random() < 0.2:
            data = chance.randbytes(chance.randint(0, 200))
        path.write_bytes(data)

        def read() -> None:
            cluster = read_hosts("hostfile", environ={}, cwd=tmp_path)
            write_hosts(cluster, "toml")

        ours(read, data)


@pytest.mark.parametrize("seed", range(6))
def test_variables(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ours and of schedulers; what a process can be given at all: no NUL."""
    chance = random.Random(200 + seed)
    ours_are = [variables.variable_of(option) for option in options.settings_registry().values()]
    theirs = ["SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE", "PBS_NODEFILE", "PET_NNODES",
              "MASTER_ADDR", "PET_MASTER_ADDR", "WORLD_SIZE", "GROUP_WORLD_SIZE",
              "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PACELINE_LAB"]  # fmt: skip
    for _ in range(30):
        given = {chance.choice([*ours_are, *theirs]): as_variable(words(chance, 2))
                 for _ in range(chance.randint(1, 3))}  # fmt: skip
        if chance.random() < 0.1:
            given[f"PACELINE_OPT_{chance.choice(['X', 'HOST', 'é'])}"] = "1"
        verb = chance.choice([["hosts"], ["hosts", "auto"], ["hosts", "slurm"], ["status"],
                              ["run", "no-such-script.py"], ["setup"]])  # fmt: skip
        with monkeypatch.context() as patched:
            for name, value in given.items():
                patched.setenv(name, value)
            call(verb, given)


def as_variable(text: str) -> str:
    """What a process can be given: no NUL, and of the surrogates those that stand for bytes."""
    return (
        text.replace("\0", "").encode("utf-8", "surrogatepass").decode("utf-8", "surrogateescape")
    )


def call(argv: list[str], what: object) -> None:
    """The verb as far as it comes without connecting."""
    with Limits():
        done = CliRunner().invoke(program, argv, prog_name="paceline")
    raised = done.exception
    assert raised is None or isinstance(raised, SystemExit | PacelineError), (ascii(what), raised)
    if isinstance(raised, PacelineError):
        raised.render().encode("utf-8", "backslashreplace")


@pytest.mark.parametrize("seed", range(9))
def test_settings_files(seed: int, tmp_path: Path) -> None:
    chance = random.Random(300 + seed)
    keys = [*options.settings_registry(), "nnode", "é", "a.b", '""', "hosts.n1", "max_restarts"]
    path = tmp_path / "paceline.toml"
    for _ in range(50):
        tables = []
        for table in chance.sample(["run", "hosts", 'hosts."n1"', "hosts.n2", "train.image", "x"],
                                   chance.randint(1, 3)):  # fmt: skip
            own = (
                ["address", "slots", "port", "python", "key", "user"] if "hosts" in table else keys
            )
            lines = [f"{chance.choice(own)} = {chance.choice(TOML)}"
                     for _ in range(chance.randint(0, 2))]  # fmt: skip
            tables.append("\n".join([f"[{table}]", *lines]))
        text = "\n".join(tables)
        if chance.random() < 0.15:
            text = chance.choice(TOML)
        path.write_bytes(text.encode("utf-8", "surrogatepass"))

        def read() -> None:
            toml = load_toml(path)
            apply_overrides(read_hosts("n1,n2", environ={}, cwd=tmp_path), toml)

        ours(read, text)
        ours(lambda: settings_file.read_settings_file(tmp_path), text)
        call(chance.choice([["hosts"], ["run", "none.py"], ["status"], ["trust"]]), text)


def test_a_settings_file_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "paceline.toml"
    path.mkdir()
    ours(lambda: settings_file.read_settings_file(tmp_path), "a folder")
    path.rmdir()
    path.write_bytes(b"a = 1\n" * (5 << 20))
    ours(lambda: settings_file.read_settings_file(tmp_path), "30 MB")
    path.unlink()
    os.mkfifo(path)
    ours(lambda: settings_file.read_settings_file(tmp_path), "a pipe")
    path.unlink()
    path.symlink_to(path)
    ours(lambda: settings_file.read_settings_file(tmp_path), "a link to itself")


@pytest.mark.parametrize(
    "text",
    [
        "Include a b\nHost n1\n  Port 22\n",
        "Include ~no-such-user/x\nHost n1\n  Port 22\n",
        f"Include {'x' * 300} {'y' * 5000} ** ../../../../../*\nHost n1\n  Port 22\n",
    ],
)
def test_configurations_that_include_each_other(text: str, tmp_path: Path) -> None:
    for name in ("a", "b", "config"):
        (tmp_path / name).write_text(text)
    ours(lambda: read_hosts("ssh-config:config", environ={}, cwd=tmp_path), text)
