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
from paceline.spec.terminal import for_reader

# title → verb → (module of its command, one line for --help)
GROUPS: dict[str, Registry] = {
    "Run": {
        "run": ("paceline.cli.run", "Run a script, module or program on every host."),
        "train": ("paceline.cli.train", "Train a model with a built-in recipe."),
    },
    "Watch a run": {
        "runs": ("paceline.cli.overview", "List all runs, here and on hosts."),
        "status": ("paceline.cli.runs:status", "Say what has become of a run."),
        "logs": ("paceline.cli.logs", "Print or follow the logs of a run."),
        "attach": ("paceline.cli.attach", "Look at a run that goes on, from any terminal."),
        "stop": ("paceline.cli.runs:stop", "End a run from any terminal."),
    },
    "Understand": {
        "explain": ("paceline.cli.explain", "Say what went wrong in a run, or in any log."),
        "report": (
            "paceline.cli.report",
            "Show what happened in a run, or compare runs.",
        ),
        "forecast": ("paceline.cli.forecast", "Say how long a training takes on more hosts."),
        "bench": ("paceline.cli.bench", "Measure how a job speeds up, and other things."),
    },
    "Prepare": {
        "check": ("paceline.cli.check", "Find what would go wrong on the hosts, before it does."),
        "hosts": ("paceline.cli.hosts", "Show the hosts that a host file or list names."),
        "setup": ("paceline.cli.setup", "Prepare the hosts: keys, host keys, sshd, environment."),
        "warm": ("paceline.cli.warm", "Keep hosts ready, so that commands start at once."),
        "trust": ("paceline.cli.trust", "Let paceline.toml of this folder name programs."),
        "env": (
            "paceline.cli.env",
            "The place that a scheduler or MPI gave this process.",
        ),
        "completion": (
            "paceline.cli.completion",
            "Let bash, zsh or fish complete commands.",
        ),
        "lab": ("paceline.cli.lab", "A virtual cluster on this machine, with faults."),
    },
    "Recipes and trained models": {
        "list": ("paceline.cli.recipe:listing", "Recipes, models and data sets by name."),
        "recipe": ("paceline.cli.recipe", "Show or copy a built-in recipe's script."),
        "evaluate": ("paceline.cli.use:evaluate", "Evaluate a trained model."),
        "predict": ("paceline.cli.use:predict", "Classify images or texts with a trained model."),
        "translate": ("paceline.cli.use:translate", "Translate with a trained model."),
        "export": ("paceline.cli.use:export", "Write a trained model for other programs."),
        "benchmark": ("paceline.cli.use:benchmark", "Latency and throughput of a trained model."),
        "quantize": ("paceline.cli.use:quantize", "Write a trained model in 8 bits, for CPUs."),
    },
}
VERBS: Registry = {name: verb for group in GROUPS.values() for name, verb in group.items()}


class Verbs(Registered):
    """All verbs."""

    registry = VERBS

    def sections(self, ctx: click.Context) -> list[Section]:
        return [(title, [Row(name, line) for name, (_, line) in group.items()])
                for title, group in GROUPS.items()]  # fmt: skip

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """Ctrl-C has the same status before a verb runs, where click would say 1."""
        try:
            return super().make_context(*args, **extra)
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)

    def invoke(self, ctx: click.Context) -> Any:
        """Ctrl-C gives the status that a shell knows, 128 + SIGINT."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            ctx.exit(128 + signal.SIGINT)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            import difflib

            near = difflib.get_close_matches(args[0], VERBS, n=1)
            hint = f" Did you mean {near[0]}?" if near else f" There are: {', '.join(VERBS)}."
            ctx.fail(f"There is no command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)


@click.group(cls=Verbs)
@click.version_option(paceline.__version__, prog_name="paceline")
def program() -> None:
    """Take a PyTorch training job from one machine to all the machines you have."""


def main(argv: list[str] | None = None) -> None:
    """The program. Prints handled errors without traceback and exits with their status."""
    os.umask(os.umask(0o077) | 0o002)  # whatever the login's: others write none of our files
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # started with it closed, as by some daemons
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123
    if "_PACELINE_COMPLETE" in os.environ:  # a shell asks what may stand at its cursor
        from paceline.cli.completion import answer

        answer(program)
        return
    try:
        program.main(args=argv, prog_name="paceline")
    except PacelineError as error:
        _refuse(error)
    except FileNotFoundError as missing:
        if (explained := _explained(missing)) is None:
            raise
        _refuse(explained)
    finally:  # all is said; a further Ctrl-C while the interpreter ends shall not change the status
        with contextlib.suppress(ValueError):  # only a main thread may say so
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def _refuse(error: PacelineError) -> NoReturn:
    sys.stderr.write(for_reader(error.render(), sys.stderr) + "\n")
    sys.exit(error.exit_code)


def _explained(missing: FileNotFoundError) -> PacelineError | None:
    """The error if there is no ssh, or if the current folder was removed; else ``None``."""
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
