"""What bash, zsh and fish complete at TAB: the answers, and real shells that ask for them."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.shell_completion import CompletionItem

from each_case import each_case
from paceline.cli import program
from paceline.cli.completion import shells
from paceline.cli.completion.shells import SHELLS, VARIABLE
from paceline.cli.completion.suggestions import VALUES

TIMEOUT_S = 90.0
# parameters that take any text or number, which nobody can guess
FREE = {
    "account", "address", "array", "arguments", "at", "colon", "constraint", "folder", "gpus",
    "gpus_per_node", "gres", "hide", "image", "interface_names", "latency", "launcher",
    "master_addr", "maxbytes", "mem", "minbytes", "mount", "mounts", "name", "no_sshd",
    "partition", "path", "private", "pythons", "rate", "rdzv", "rdzv_id", "sbatch_arg", "server",
    "share", "shared", "shm_size", "stepbytes", "subnet", "tag", "time_limit", "user", "via_arg",
    "workers", "data", "options", "chosen",
}  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what there is to be suggested."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "home" / ".ssh").mkdir(parents=True)
    (tmp_path / "home" / ".ssh" / "config").write_text("Host far\n  User me\nHost *.org\n")
    (tmp_path / "hostfile").write_text("n1\nnode7 slots=4\n")
    (tmp_path / "paceline.toml").write_text("[hosts.special]\nslots = 2\n")
    (tmp_path / "my script.py").write_text("")
    (tmp_path / "config").write_text("")
    for name, host in (("digits-1", "n1"), ("digits-2", "n2")):
        (tmp_path / "runs" / name / "logs" / host).mkdir(parents=True)
        (tmp_path / "runs" / name / "events.jsonl").write_text("")
    os.utime(tmp_path / "runs" / "digits-1", (1, 1))
    return tmp_path


def asked(shell: str, line: str, **more: str) -> list[list[str]]:
    """What a shell is answered: kind, text and what stands beside it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"COMP_LINE": line, **more}.items():
            patch.setenv(name, value)
        said = SHELLS[shell](program, {}, "paceline", VARIABLE).complete()
    return [one.split("\t") for one in said.splitlines()]


def values(line: str) -> list[str]:
    return [one[1] for one in asked("zsh", line) if one[0] == "plain"]


@each_case(
    ("line", "wanted"),
    [
        ("paceline tr", ["train", "trust", "translate"]),
        ("paceline bench ", ["collectives", "scaling"]),
        ("paceline lab h", ["heal"]),
        ("paceline run --nproc", ["--nproc-per-node"]),
        ("A=1 paceline run --nproc", ["--nproc-per-node"]),
        ("paceline run --via s", ["ssh", "slurm"]),
        ("paceline run -H ", ["local", "special", "n1", "node7", "far"]),
        ("paceline run -H n1,", ["n1,special", "n1,node7", "n1,far"]),
        ("paceline run -H 'n1,", ["n1,special", "n1,node7", "n1,far"]),
        ("paceline hosts n", ["n1", "node7"]),
        ("paceline run -p ", ["auto", "gpu", "cpu"]),
        ("paceline run script.py --n", []),  # the script's own
        ("paceline run script.py --via ", []),
        ("paceline train i", ["image"]),
        ("paceline train image --schedule ",
         ["cosine", "linear", "inverse-sqrt", "constant", "step", "plateau", "stable"]),
        ("paceline train --schedule=i", []),  # of which recipe is not known yet
        ("paceline train -H n1 image --schedule=i", ["inverse-sqrt"]),
        ("paceline train text --sched", ["--schedule"]),
        ("paceline train image --track tensorboard w", ["wandb"]),
        ("paceline train image --no-nest", ["--no-nesterov"]),
        ("paceline train text --via l", ["local", "lsf"]),
        ("paceline forecast image --preset ", ["imagenet", "imagenet-example"]),
        ("paceline bench scaling --recipe t", ["text", "translation"]),
        ("paceline evaluate runs/digits-1 --dat", ["--data", "--data-dir"]),
        ("paceline evaluate ", ["runs/digits-2", "runs/digits-1"]),
        ("paceline logs ", ["digits-2", "digits-1"]),
        ("paceline logs runs/digits-1 --host ", ["n1"]),
        ("paceline logs --host ", ["n2"]),
        ("paceline lab fault p", ["power-off"]),
        ("paceline recipe copy te", ["text"]),
        ("paceline completion ", ["bash", "zsh", "fish"]),
        ("paceline hosts hostfile --write acc", ["accelerate"]),
        ("paceline nosuch ", []),
        ("paceline run --nosuch=", []),
    ],
)  # fmt: skip
def test_what_may_stand_next(place: Path, line: str, wanted: list[str]) -> None:
    assert values(line) == wanted


def test_a_broken_file_suggests_nothing(place: Path) -> None:
    """And says nothing: a line is being typed."""
    (place / "paceline.toml").write_text("[run\n")
    (place / "hostfile").write_bytes(b"\xff\xfe\0n1 slots=\n")
    os.mkfifo(place / "nodes")  # would be waited for
    assert values("paceline run -H ") == ["local", "far"]


def test_nothing_is_forgotten() -> None:
    """Whatever takes a text has an answer, or is known to be anybody's guess."""
    left = []
    for words, command in commands(program):
        for param in command.params:
            guessed = isinstance(param.type, (click.Choice, click.Path, click.types.FloatRange,
                                              click.types.IntRange)) or param.type.name not in (
                "text", "command or address")  # fmt: skip
            known = {param.name, f"{command.name} {param.name}"} & {*VALUES, *FREE}
            hidden = isinstance(param, click.Option) and (param.hidden or param.is_flag)
            if not (guessed or known or hidden):
                left.append(f"{words} {param.name}")
    assert left == []


def commands(command: click.Command, path: str = "") -> Iterator[tuple[str, click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        ctx = click.Context(command)
        for name in command.list_commands(ctx):
            below = command.get_command(ctx, name)
            assert below is not None
            yield from commands(below, f"{path} {name}")


@pytest.mark.parametrize(
    ("head", "typed", "value", "inserted"),
    [
        ("", "n", "n1", "n1"),
        ("", "lab:de", "lab:demo", "demo"),
        ("", "me@n1,me@n", "me@n1,me@n2", "n2"),
        ("--hosts=", "", "lab:demo", "lab:demo"),
        ("--hosts=", "lab:", "lab:demo", "demo"),
        ("", "my", "my run", "'my run'"),
    ],
)
def test_bash_replaces_only_what_follows_a_break(
    head: str, typed: str, value: str, inserted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMP_WORDBREAKS", " \t\n\"'@><=;|&(:")
    shell = shells.Bash(program, {}, "paceline", VARIABLE)
    assert shell.answer(CompletionItem(value), head, typed) == f"plain\t{inserted}"


# --- real shells


class Terminal:
    """A shell on a terminal of its own."""

    def __init__(self, argv: list[str], env: dict[str, str], folder: Path) -> None:
        self.shown = ""
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            with contextlib.suppress(BaseException):
                os.chdir(folder)
                os.execvpe(argv[0], argv, env)
            os._exit(127)

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait_for(self, pattern: str) -> re.Match[str]:
        """What is shown from now on; fails when it does not come."""
        deadline = time.monotonic() + TIMEOUT_S
        while (found := re.search(pattern, self.shown)) is None:
            assert time.monotonic() < deadline, f"{pattern} is not in {self.shown[-3000:]!r}"
            if select.select([self._fd], [], [], 0.1)[0]:
                self.shown += os.read(self._fd, 65536).decode(errors="replace")
        self.shown = self.shown[found.end() :]
        return found

    def close(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.close(self._fd)
        os.waitpid(self.pid, 0)


START = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}
SWITCH_ON = {
    "bash": 'eval "$(paceline completion bash)"',
    "zsh": 'bindkey -e; eval "$(paceline completion zsh)"',
    "fish": "paceline completion fish | source",
}


@pytest.fixture(params=list(START))
def terminal(
    request: pytest.FixtureRequest, place: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Terminal]:
    shell = request.param
    if shutil.which(shell) is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"no {shell} here")
    programs = tmp_path_factory.mktemp("bin")
    paceline = programs / "paceline"
    paceline.write_text(f'#!/bin/sh\nexec {sys.executable} -m paceline "$@"\n')
    paceline.chmod(0o755)
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "TERM": "xterm", "PS1": "$ "}
    terminal = Terminal(START[shell], env, place)
    try:
        terminal.type(f"{SWITCH_ON[shell]}; printf 'rea%s\\n' dy\r")
        terminal.wait_for("ready")
        yield terminal
    finally:
        terminal.close()


def test_a_shell_completes(terminal: Terminal) -> None:
    for typed, wanted in (
        ("paceline transl", ["translate"]),
        ("paceline run --nproc-p", ["run", "--nproc-per-node"]),
        ("paceline run --via=sl", ["run", "--via=slurm"]),
        ("paceline run -H n1,nod", ["run", "-H", "n1,node7"]),
        ("paceline train image --schedule inv", ["train", "image", "--schedule", "inverse-sqrt"]),
        ("paceline logs digits-1 --ho", ["logs", "digits-1", "--host"]),
        ("paceline run my", ["run", "my script.py"]),
        ("paceline run --ssh-config=conf", ["run", "--ssh-config=config"]),
        ("paceline nosuch x", ["nosuch", "x"]),
    ):
        terminal.type(f"{typed}\t")
        # what stands there now is printed word by word, by a command that is put before it
        terminal.type("\x01printf 'GO''T<%s>' \x05; echo EN''D\r")
        said = terminal.wait_for(r"(?s)((?:GOT<[^>]*>)+)END")
        words = re.findall(r"GOT<([^>]*)>", said[1].replace("\r", "").replace("\n", ""))
        assert words == ["paceline", *wanted], terminal.shown


def test_the_verb_prints_it() -> None:
    for shell in SHELLS:
        done = subprocess.run(
            [sys.executable, "-m", "paceline", "completion", shell],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stdout == SHELLS[shell].source_template.lstrip("\n")
