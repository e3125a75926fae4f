"""The command line: its verbs, each imported when it is called.

A new verb is one module with a ``command`` and one line in ``GROUPS``. Verbs that answer one
question share a module, in which each has its own name.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import Any, NoReturn

import click

import paceline
from paceline.cli.verb import Registered, Registry
from paceline.spec.errors import ConnectError, PacelineError, SettingError
from paceline.spec.helptext import Row, Section
from paceline.spec.terminal import format_for

# title → verb → (module of its command in verbs/, one line for --help)
GROUPS: dict[str, Registry] = {
    "Run": {
        "run": ("run", "Run a script, module or program on every host."),
        "train": ("train", "Train a model with a built-in recipe."),
    },
    "Watch a run": {
        "runs": ("runs", "List all runs, here and on hosts."),
        "status": ("status", "Show the state of a run."),
        "logs": ("logs", "Print or follow the logs of a run."),
        "attach": ("attach", "Watch a run from any terminal."),
        "stop": ("stop", "End a run from any terminal."),
    },
    "Understand": {
        "explain": ("explain", "Explain what went wrong in a run, or in any log."),
        "report": ("report", "Show what happened in a run, or compare runs."),
        "verify": ("verify", "Check that a run's model and checkpoints have not been changed."),
        "forecast": ("forecast", "Estimate how long a training takes on more hosts."),
        "bench": ("bench", "Measure scaling and collectives."),
    },
    "Prepare": {
        "check": ("check", "Find problems on the hosts before a run does."),
        "hosts": ("hosts", "Show the hosts that a host file or list names."),
        "setup": ("setup", "Prepare the hosts: keys, host keys, sshd, environment."),
        "warm": ("warm", "Keep hosts ready, so that commands start at once."),
        "trust": ("trust", "Trust the programs and logins that paceline.toml names here."),
        "env": ("env", "Set rank variables from those of MPI or a scheduler."),
        "completion": ("completion", "Print the completion script for bash, zsh or fish."),
        "lab": ("lab", "Run a virtual cluster on this machine."),
    },
    "Recipes and trained models": {
        "list": ("list", "List recipes, models and data sets."),
        "recipe": ("recipe", "Show or copy a built-in recipe's script."),
        "evaluate": ("evaluate", "Evaluate a trained model."),
        "predict": ("use:predict", "Classify images or texts with a trained model."),
        "translate": ("use:translate", "Translate with a trained model."),
        "generate": ("use:generate", "Write text with a trained language model."),
        "export": ("use:export", "Write a trained model for other programs."),
        "benchmark": ("use:benchmark", "Measure latency and throughput of a trained model."),
        "quantize": ("use:quantize", "Write a trained model with 8-bit weights, for CPUs."),
    },
}
VERBS: Registry = {name: verb for group in GROUPS.values() for name, verb in group.items()}


class Verbs(Registered):
    """All verbs."""

    registry = VERBS
    package = "paceline.cli.verbs"

    def sections(self, ctx: click.Context) -> list[Section]:
        return [(title, [Row(name, line) for name, (_, line) in group.items()])
                for title, group in GROUPS.items()]  # fmt: skip

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """Parses the arguments. Ctrl-C exits with 130, where click would exit with 1."""
        try:
            return super().make_context(*args, **extra)
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)

    def invoke(self, ctx: click.Context) -> Any:
        """Invokes the verb. Ctrl-C exits with the status that shells use, 128 + SIGINT."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            ctx.exit(128 + signal.SIGINT)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            import difflib

            matches = difflib.get_close_matches(args[0], VERBS, n=1)
            hint = f" Did you mean {matches[0]}?" if matches else f" There are: {', '.join(VERBS)}."
            ctx.fail(f"There is no command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)


@click.group(cls=Verbs)
@click.version_option(paceline.__version__, prog_name="paceline")
def program() -> None:
    """Run a PyTorch training job on all the machines you have."""


def main(argv: list[str] | None = None) -> None:
    """Runs the program. Prints handled errors without a traceback and exits with their status."""
    os.umask(os.umask(0o077) | 0o002)  # whatever the login's: others write none of our files
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # started with it closed, as by some daemons
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123
    if "_PACELINE_COMPLETE" in os.environ:  # a shell asks what may stand at its cursor
        from paceline.cli.completion.shells import answer_shell

        answer_shell(program)
        return
    try:
        program.main(args=argv, prog_name="paceline")
    except PacelineError as error:
        _exit_with(error)
    except FileNotFoundError as missing:
        if (explained := _explain_missing(missing)) is None:
            raise
        _exit_with(explained)
    finally:  # all is said; a further Ctrl-C while the interpreter ends shall not change the status
        with contextlib.suppress(ValueError):  # only a main thread may say so
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def _exit_with(error: PacelineError) -> NoReturn:
    sys.stderr.write(format_for(error.render(), sys.stderr) + "\n")
    sys.exit(error.exit_code)


def _explain_missing(missing: FileNotFoundError) -> PacelineError | None:
    """Returns the error if there is no ssh, or if the current folder was removed; else ``None``."""
    if missing.filename == "ssh":
        return ConnectError(
            "ssh is not installed on this machine",
            found=f"no program ssh in PATH={os.environ.get('PATH', '')}",
            remedy="Install OpenSSH's client: sudo apt install openssh-client "
            "(dnf install openssh-clients)",
        )
    try:
        os.getcwd()  # noqa: PTH109 - pathlib's calls this one
    except FileNotFoundError:
        was = os.environ.get("PWD", "")
        return SettingError(
            "the current folder was removed while this shell stood in it",
            found=f"{was} was the current folder" if was else "",
            remedy='Change to a folder that exists, such as: cd ~. If it was made anew: cd "$PWD"',
        )
    return None
