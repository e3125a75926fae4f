"""``paceline env``: another launcher's variables in torchrun's terms."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import click

from paceline.cli.settings_file import read_settings_file
from paceline.cli.variables import RUN_TABLE
from paceline.cli.verb import Verb
from paceline.spec import jobenv
from paceline.spec.errors import SettingError
from paceline.spec.formatting import shell_text
from paceline.spec.launchers import DIALECTS, torchrun_variables
from paceline.spec.settings import TOML_NAME

ENCRYPT = "PACELINE_OPT_ENCRYPT"  # of other verbs: this one has no such option
NAMES = (
    jobenv.RANK, jobenv.LOCAL_RANK, jobenv.WORLD_SIZE, jobenv.LOCAL_WORLD_SIZE,
    jobenv.MASTER_ADDR, jobenv.MASTER_PORT,
)  # fmt: skip


@click.command("env", cls=Verb, context_settings={"allow_interspersed_args": False})
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--master-addr", metavar="ADDRESS",
              help="Address of rank 0, if the environment does not contain it.")  # fmt: skip
@click.option("--master-port", type=click.IntRange(1, 65535),
              help="Port of the rendezvous store on that host.")  # fmt: skip
@click.argument("command_words", metavar="[COMMAND]...", nargs=-1, type=click.UNPROCESSED)
def command(as_json: bool, master_addr: str | None, master_port: int | None,
            command_words: tuple[str, ...]) -> None:  # fmt: skip
    """Set RANK, WORLD_SIZE and so on from the variables of mpirun, mpiexec or a scheduler.

    Without COMMAND, print them for a shell: eval "$(paceline env)". With COMMAND, run it with them:
    mpirun -n 4 paceline env python train.py
    """
    if as_json and command_words:
        raise SettingError(
            "--json cannot be combined with COMMAND",
            found="the command gets them as its environment",
            remedy="Leave out one of them",
        )  # fmt: skip
    overrides = {jobenv.MASTER_ADDR: master_addr, jobenv.MASTER_PORT: master_port}
    environ = {**os.environ, **{name: str(value) for name, value in overrides.items() if value}}
    variables = read_place(environ, os.getppid(), Path.cwd())
    if command_words:
        exec_command(command_words, {**environ, **variables})
    if as_json:
        click.echo(json.dumps(variables))
        return
    for name, value in variables.items():
        click.echo(f"export {shell_text([f'{name}={value}'])}")


def read_place(environ: dict[str, str], parent: int, cwd: Path) -> dict[str, str]:
    """Returns the variables.

    SettingError if this process was not launched as one of several, or if the job is to be
    encrypted, which needs agents.

    ``cwd``: folder whose paceline.toml applies.
    """
    if setting := encrypt_setting(environ, cwd):
        raise SettingError(
            "the connections of these processes cannot be encrypted",
            found=f"{setting} is set, and another launcher has started them",
            remedy="paceline run --via mpi --encrypt SCRIPT, or remove the setting",
        )
    variables = torchrun_variables(environ, parent)
    if not variables:
        raise SettingError(
            "no launcher has set this process's rank",
            found=f"none of {', '.join(dialect.rank for dialect in DIALECTS)} is set",
            remedy="mpirun -n 4 paceline env python train.py",
        )
    return {name: variables[name] for name in NAMES if name in variables}


def encrypt_setting(environ: Mapping[str, str], cwd: Path) -> str:
    """Returns the setting that asks for encryption; empty if there is none."""
    if value := environ.get(ENCRYPT, "").lower():
        return "" if value in ("0", "false", "no", "off", "n", "f") else ENCRYPT
    table = read_settings_file(cwd).get(RUN_TABLE, {})
    return f"encrypt in [{RUN_TABLE}] of {TOML_NAME}" if table.get("encrypt") else ""


def exec_command(argv: tuple[str, ...], environ: dict[str, str]) -> None:
    try:
        os.execvpe(argv[0], list(argv), environ)  # noqa: S606 - no shell is the point
    except OSError as error:
        sys.stderr.write(f"paceline: {argv[0]}: {error.strerror}\n")
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)
