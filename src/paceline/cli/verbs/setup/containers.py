"""``paceline setup containers``: launcher and workers as containers that agree with each other."""

from __future__ import annotations

import os
from pathlib import Path

import click

from paceline.cli.job_options import parse_env
from paceline.cli.verb import Verb, say
from paceline.setup.container_set import (
    DEVICES,
    FIRST_PORT,
    MPIS,
    UID,
    ContainerSet,
    workers_of,
    write_set,
)
from paceline.spec.errors import SettingError


@click.command("containers", cls=Verb, context_settings={"allow_interspersed_args": False})
@click.option("--worker", "workers", multiple=True, required=True, metavar="ALIAS=ADDRESS",
              help="A worker and the address of its machine; can be repeated.")  # fmt: skip
@click.option("--launcher", default="", metavar="ADDRESS",
              help="Address of the launcher's machine, if its container is rank 0.")  # fmt: skip
@click.option("--image", required=True, help="Image with Python, torch and MPI.")
@click.option("--mpi", type=click.Choice(MPIS), default="mpich", help="The MPI in the image.")
@click.option("-p", "--nproc-per-node", "processes", type=click.IntRange(1), default=1,
              help="Ranks in each container.")  # fmt: skip
@click.option("--gpus", type=click.Choice(list(DEVICES)), default=None,
              help="GPUs that the containers see; NVIDIA's by its runtime (nvidia) or by CDI"
                   " (cdi).")  # fmt: skip
@click.option("--activate", multiple=True, metavar="FILE",
              help="Script in the image to source first (setvars.sh).")  # fmt: skip
@click.option("--env", "env", multiple=True, metavar="NAME[=VALUE]",
              help="Set a variable for the ranks; NAME alone takes your value.")  # fmt: skip
@click.option("--mount", "mounts", multiple=True, metavar="SOURCE:TARGET[:ro]",
              help="Folder of each machine to mount in its container.")  # fmt: skip
@click.option("--master-port", type=click.IntRange(1, 65535), default=29500,
              help="Port of the rendezvous store on the machine of rank 0.")  # fmt: skip
@click.option("--tag", default="paceline-mpi:1", help="Name of the image to build.")
@click.option("--port", type=click.IntRange(1024, 65000), default=FIRST_PORT,
              help="Port of the first worker's sshd; the others get the next ports.")  # fmt: skip
@click.option("--shm-size", default="8g", help="Size of /dev/shm.")
@click.option("--iface", default="", help="Network interface for MPI's and torch's traffic.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path),
              default=Path("paceline-containers"), help="Folder to write.")  # fmt: skip
@click.argument("command_words", metavar="[COMMAND]...", nargs=-1, type=click.UNPROCESSED)
def command(workers: tuple[str, ...], launcher: str, image: str, mpi: str, processes: int,
            gpus: str | None, activate: tuple[str, ...], env: tuple[str, ...],
            mounts: tuple[str, ...], master_port: int, tag: str, port: int, shm_size: str,
            iface: str, out: Path, command_words: tuple[str, ...]) -> None:  # fmt: skip
    """Write a Containerfile, keys, ssh and sshd configs, a Compose file and the commands.

    Keys are ed25519, with one host key per worker. Existing keys are kept.
    """
    public, forwarded = parse_env(env)
    container_set = ContainerSet(
        base=image,
        image=tag,
        workers=workers_of(parse_workers(workers), port),
        shm_size=shm_size,
        interface=iface,
        command=command_words or ("python", "train.py"),
        mpi=mpi,
        launcher=launcher,
        processes=processes,
        master_port=master_port,
        env={**public, **forwarded},
        activate=parse_scripts(activate),
        gpus=gpus or "",
        mounts=parse_mounts(mounts),
        uid=os.getuid() or UID,
        folder=out.resolve().name,
    )
    write_set(out, container_set)
    say((out / "commands.sh").read_text(encoding="utf-8"), nl=False)


def parse_workers(workers: tuple[str, ...]) -> dict[str, str]:
    """Alias → address. SettingError for what is neither."""
    addresses: dict[str, str] = {}
    for worker in workers:
        alias, equals, address = worker.partition("=")
        is_duplicate = alias in addresses or alias in ("launcher", "localhost")
        if not equals or not alias or not address or is_duplicate:
            raise SettingError(
                f"--worker {worker} cannot be", remedy="--worker ALIAS=ADDRESS, once each"
            )
        addresses[alias] = address
    return addresses


def parse_scripts(scripts: tuple[str, ...]) -> tuple[str, ...]:
    """Parses absolute paths in the image; SettingError for others."""
    for script in scripts:
        if not script.startswith("/"):
            raise SettingError(f"--activate {script} must be a path in the image, from / on")
    return scripts


def parse_mounts(mounts: tuple[str, ...]) -> tuple[str, ...]:
    """Parses ``SOURCE:TARGET[:ro]`` with absolute paths; SettingError for others."""
    for mount in mounts:
        source, _, target_and_mode = mount.partition(":")
        target, _, mode = target_and_mode.partition(":")
        if not source.startswith("/") or not target.startswith("/") or mode not in ("", "ro", "rw"):
            raise SettingError(f"--mount {mount} cannot be", remedy="--mount /SOURCE:/TARGET[:ro]")
    return mounts
