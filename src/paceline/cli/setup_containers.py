"""``paceline setup containers``: launcher and workers as containers that agree with each other."""

from __future__ import annotations

from pathlib import Path

import click

from paceline.cli.verb import Verb, say
from paceline.setup.container_set import (
    FIRST_PORT,
    workers_of,
    written,
)
from paceline.spec.errors import SettingError


@click.command("containers", cls=Verb, context_settings={"allow_interspersed_args": False})
@click.option("--worker", "workers", multiple=True, required=True, metavar="ALIAS=ADDRESS",
              help="A worker and the machine that it runs on; repeat it.")  # fmt: skip
@click.option("--image", required=True, help="Image with Python, torch and MPI.")
@click.option("--tag", default="paceline-mpi:1", help="Name of the image that is built of it.")
@click.option("--port", type=click.IntRange(1024, 65000), default=FIRST_PORT,
              help="Port of the first worker's sshd; the next has the next.")  # fmt: skip
@click.option("--shm-size", default="8g", help="Size of /dev/shm.")
@click.option("--iface", default="", help="Network interface for MPI's traffic.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path),
              default=Path("paceline-containers"), help="Folder to write.")  # fmt: skip
@click.argument("command_words", metavar="[COMMAND]...", nargs=-1, type=click.UNPROCESSED)
def command(workers: tuple[str, ...], image: str, tag: str, port: int, shm_size: str, iface: str,
            out: Path, command_words: tuple[str, ...]) -> None:  # fmt: skip
    """Write a Containerfile, keys, ssh and sshd configs, a Compose file and the commands.

    Keys are ed25519, one host key a worker; a second call keeps those that are there.
    """
    words = command_words or ("python", "train.py")
    written(out, image, tag, workers_of(parse_workers(workers), port), shm_size, iface, words)
    say((out / "commands.sh").read_text(encoding="utf-8"), nl=False)


def parse_workers(given: tuple[str, ...]) -> dict[str, str]:
    """Alias → address. SettingError for what is neither."""
    found: dict[str, str] = {}
    for one in given:
        alias, equals, address = one.partition("=")
        if not equals or not alias or not address or alias in found or alias == "launcher":
            raise SettingError(
                f"--worker {one} cannot be", remedy="--worker ALIAS=ADDRESS, once each"
            )
        found[alias] = address
    return found
