"""Tests completion with TAB in bash, zsh and fish: the answers, and real shells that use them."""

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
# parameters that take any text or number, without suggestions
FREE_TEXT = {
    "account", "address", "array", "arguments", "at", "colon", "constraint", "folder", "gpus",
    "gpus_per_node", "gres", "hide", "image", "interface_names", "latency", "launcher",
    "master_addr", "maxbytes", "mem", "minbytes", "mount", "mounts", "name", "no_sshd",
    "partition", "path", "private", "pythons", "rate", "rdzv", "rdzv_id", "sbatch_arg", "server",
    "share", "shared", "shm_size", "stepbytes", "subnet", "tag", "time_limit", "user", "via_arg",
    "workers", "data", "options", "chosen",
}  # fmt: skip


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Creates a folder with names to suggest."""
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


def completions(shell: str, line: str, **variables: str) -> list[list[str]]:
    """Returns the answer for a shell: kind, text and description of each suggestion."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"COMP_LINE": line, **variables}.items():
            patch.setenv(name, value)
        reply = SHELLS[shell](program, {}, "paceline", VARIABLE).complete()
    return [entry.split("\t") for entry in reply.splitlines()]


def values(line: str) -> list[str]:
    return [entry[1] for entry in completions("zsh", line) if entry[0] == "plain"]


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
        ("paceline run script.py --n", []),  # options of the script
        ("paceline run script.py --via ", []),
        ("paceline train i", ["image"]),
        ("paceline train image --schedule ",
         ["cosine", "linear", "inverse-sqrt", "constant", "step", "plateau", "stable"]),
        ("paceline train --schedule=i", []),  # the recipe is not known yet
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
def test_suggests_values(workspace: Path, line: str, wanted: list[str]) -> None:
    assert values(line) == wanted


def test_ignores_broken_files(workspace: Path) -> None:
    """No error is printed while a line is being typed."""
    (workspace / "paceline.toml").write_text("[run\n")
    (workspace / "hostfile").write_bytes(b"\xff\xfe\0n1 slots=\n")
    os.mkfifo(workspace / "nodes")  # reading it would block
    assert values("paceline run -H ") == ["local", "far"]


def test_covers_text_parameters() -> None:
    """Every parameter that takes text has suggestions or is listed as free."""
    uncovered = []
    for words, command in commands(program):
        for param in command.params:
            guessed = isinstance(param.type, (click.Choice, click.Path, click.types.FloatRange,
                                              click.types.IntRange)) or param.type.name not in (
                "text", "command or address")  # fmt: skip
            known = {param.name, f"{command.name} {param.name}"} & {*VALUES, *FREE_TEXT}
            hidden = isinstance(param, click.Option) and (param.hidden or param.is_flag)
            if not (guessed or known or hidden):
                uncovered.append(f"{words} {param.name}")
    assert uncovered == []


def commands(command: click.Command, path: str = "") -> Iterator[tuple[str, click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        ctx = click.Context(command)
        for name in command.list_commands(ctx):
            subcommand = command.get_command(ctx, name)
            assert subcommand is not None
            yield from commands(subcommand, f"{path} {name}")


@pytest.mark.parametrize(
    ("head", "input_text", "value", "inserted"),
    [
        ("", "n", "n1", "n1"),
        ("", "lab:de", "lab:demo", "demo"),
        ("", "me@n1,me@n", "me@n1,me@n2", "n2"),
        ("--hosts=", "", "lab:demo", "lab:demo"),
        ("--hosts=", "lab:", "lab:demo", "demo"),
        ("", "my", "my run", "'my run'"),
    ],
)
def test_bash_replaces_text_after_word_break(
    head: str, input_text: str, value: str, inserted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMP_WORDBREAKS", " \t\n\"'@><=;|&(:")
    shell = shells.Bash(program, {}, "paceline", VARIABLE)
    assert shell.answer(CompletionItem(value), head, input_text) == f"plain\t{inserted}"


# --- real shells


class Terminal:
    """A shell on its own terminal."""

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
        """Waits for new output that matches; fails on a timeout."""
        deadline = time.monotonic() + TIMEOUT_S
        while (match := re.search(pattern, self.shown)) is None:
            assert time.monotonic() < deadline, f"{pattern} is not in {self.shown[-3000:]!r}"
            if select.select([self._fd], [], [], 0.1)[0]:
                self.shown += os.read(self._fd, 65536).decode(errors="replace")
        self.shown = self.shown[match.end() :]
        return match

    def close(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.close(self._fd)
        os.waitpid(self.pid, 0)


SHELL_ARGV = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}
ENABLE_COMPLETION = {
    "bash": 'eval "$(paceline completion bash)"',
    "zsh": 'bindkey -e; eval "$(paceline completion zsh)"',
    "fish": "paceline completion fish | source",
}


@pytest.fixture(params=list(SHELL_ARGV))
def terminal(
    request: pytest.FixtureRequest, workspace: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Terminal]:
    shell = request.param
    if shutil.which(shell) is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"no {shell} here")
    programs = tmp_path_factory.mktemp("bin")
    paceline = programs / "paceline"
    paceline.write_text(f'#!/bin/sh\nexec {sys.executable} -m paceline "$@"\n')
    paceline.chmod(0o755)
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "TERM": "xterm", "PS1": "$ "}
    terminal = Terminal(SHELL_ARGV[shell], env, workspace)
    try:
        terminal.type(f"{ENABLE_COMPLETION[shell]}; printf 'rea%s\\n' dy\r")
        terminal.wait_for("ready")
        yield terminal
    finally:
        terminal.close()


def test_completes_in_real_shell(terminal: Terminal) -> None:
    for input_text, wanted in (
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
        terminal.type(f"{input_text}\t")
        # a command inserted before the line prints each of its words
        terminal.type("\x01printf 'GO''T<%s>' \x05; echo EN''D\r")
        reply = terminal.wait_for(r"(?s)((?:GOT<[^>]*>)+)END")
        words = re.findall(r"GOT<([^>]*)>", reply[1].replace("\r", "").replace("\n", ""))
        assert words == ["paceline", *wanted], terminal.shown


def test_command_prints_completion_script() -> None:
    for shell in SHELLS:
        result = subprocess.run(
            [sys.executable, "-m", "paceline", "completion", shell],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert result.stdout == SHELLS[shell].source_template.lstrip("\n")
