"""``paceline run``: any script, module or program, on every host."""

from __future__ import annotations

import os
import re
from pathlib import Path

import click

from paceline.agent.master import spawns_and_names_master
from paceline.cli.flags import NO_TORCH
from paceline.cli.launch import job_of, launch, launch_options, prepare
from paceline.cli.sources import as_settings
from paceline.cli.verb import Verb
from paceline.spec.errors import SettingError
from paceline.spec.job import Data, Entry


@click.command("run", cls=Verb, context_settings={"allow_interspersed_args": False})
@as_settings
@launch_options
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a Python module.")
@click.option("--no-python", is_flag=True, help="SCRIPT is a program of any kind.")
@NO_TORCH
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="A folder of data that hosts get where they lack it: only what"
    " changed is sent. Ranks find it as $PACELINE_DATA_DIR, or as an argument.",
)
@click.option("--any-world", is_flag=True, help="Accept a world other than the planned one.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(ctx: click.Context, /, script: str, args: tuple[str, ...], module: bool,
            no_python: bool, no_torch: bool, any_world: bool, data: Path | None,
            **_: object) -> None:  # fmt: skip
    """Run SCRIPT with ARGS on every host, as torchrun would, with one command typed here.

    Options for paceline stand before SCRIPT; all that follows it goes to the script untouched.
    """
    cluster, via = prepare(ctx)
    entry = entry_of(script, args, module=module, no_python=no_python)
    torch = not (no_torch or no_python)
    asked = {"--any-world": any_world, "--backend": ctx.params["backend"]}
    for flag in (flag for flag, value in asked.items() if value and not torch):
        raise SettingError(
            f"{flag} needs a Python script that uses torch",
            found="with --no-torch or --no-python nothing looks at torch",
            remedy="Leave it out",
        )
    job = job_of(
        ctx,
        entry,
        name=Path(script).stem or "run",
        preload=preload_of(entry) if torch else (),
        own_store=opens_store(entry),
        needs_torch=torch,
        any_world=any_world,
        data=data_of(data, here=via.kind != "join") if data else None,
    )
    ctx.exit(launch(ctx, job, cluster, via))


def entry_of(script: str, args: tuple[str, ...], *, module: bool, no_python: bool) -> Entry:
    """What every rank runs. SettingError when there is no such script."""
    if module and no_python:
        raise SettingError("--module and --no-python exclude each other")
    if no_python:
        return Entry("binary", script, args)
    if module:
        return Entry("module", script, args)
    path = Path(script)
    if not path.exists():
        raise SettingError(
            f"there is no script {script}",
            found=f"nothing at {path.absolute()}",
            remedy=_suggestion(path),
        )
    return Entry("script", script, args)


def data_of(folder: Path, here: bool) -> Data:
    """The folder, and the arguments that mean it: its paths, but no single word.

    Args:
        folder: As typed.
        here: It is sent from here: SettingError where there is none.
    """
    if here and not folder.is_dir():
        raise SettingError(
            f"--data {folder} is no folder",
            found=f"{folder.absolute()} is a file" if folder.exists() else "nothing of that name",
            remedy="Name a folder of this machine; hosts that lack it get it",
        )
    whole = os.path.abspath(folder)  # noqa: PTH100 - a link stays one
    words = {whole, whole + "/"}
    words |= {f"{folder}", f"{folder}/"} if "/" in f"{folder}" else {f"./{folder}", f"{folder}/"}
    return Data(whole, tuple(sorted(words)))


def opens_store(entry: Entry) -> bool:
    """Whether the script's text says that its processes may open a store of their own."""
    return _is_text(entry) and spawns_and_names_master(Path(entry.target).read_bytes())


def preload_of(entry: Entry) -> tuple[str, ...]:
    """What a node imports before it forks the ranks: what the script is seen to need.

    The first optimizer of a process makes torch import its compiler, which takes longer than the
    rest of torch's start; forked ranks inherit it.
    """
    text = Path(entry.target).read_bytes() if _is_text(entry) else b""
    if re.search(rb"^\s*(from|import)\s+paceline\b", text, re.MULTILINE):
        return ("torch", "paceline.train.preload?")
    if re.search(rb"^[^#\n]*\boptim\b", text, re.MULTILINE):
        return ("torch", "torch._dynamo?")
    return ("torch",)


def _is_text(entry: Entry) -> bool:
    return entry.kind == "script" and entry.target.endswith(".py") and Path(entry.target).is_file()


def _suggestion(path: Path) -> str:
    import difflib

    beside = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, beside, n=1)
    if near:
        return f"Did you mean {path.parent / near[0]}?"
    return "For a module add -m, for a program that is not Python --no-python"
