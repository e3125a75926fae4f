"""``paceline setup containers``: launcher and workers as containers that agree with each other."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import click

from paceline.cli.verb import Verb, say
from paceline.setup.container_set import (
    FIRST_PORT,
    HOST_KEY,
    KEY,
    UID,
    ContainerSet,
    Keys,
    Worker,
    files,
    folder_of,
    workers_of,
)
from paceline.spec.errors import NodeError, SettingError


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
    made = ContainerSet(
        image, tag, workers_of(parse_workers(workers), port), shm_size, iface,
        command_words or ("python", "train.py"), os.getuid() or UID,
    )  # fmt: skip
    keys = make_keys(out, made.workers)
    for name, text in files(made, keys).items():
        write(out / name, text)
    (out / "workload").mkdir(exist_ok=True)
    if os.getuid() == 0:
        give_to(made.uid, out)
    say((out / "commands.sh").read_text(encoding="utf-8"), nl=False)


def give_to(uid: int, out: Path) -> None:
    """What root has written belongs to the user in the containers, who has to read it."""
    for folder in [*out.glob("ssh_*"), out / "workload"]:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, uid, -1)


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


def make_keys(out: Path, workers: tuple[Worker, ...]) -> Keys:
    """Makes what is not there yet; private halves never leave their folder."""
    identity = _key(out / "ssh_launcher" / KEY, "paceline launcher")
    hosts = {
        worker.alias: " ".join(_key(out / folder_of(worker) / HOST_KEY, worker.alias).split()[:2])
        for worker in workers
    }
    return Keys(identity, hosts)


def _key(path: Path, comment: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not path.exists():
        argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NodeError("ssh-keygen failed", found=done.stderr.strip())
    return path.with_suffix(".pub").read_text(encoding="utf-8").strip()


def write(path: Path, text: str) -> None:
    """Readable by the owner only where ssh insists on it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    if path.parent.name.startswith("ssh_"):
        path.chmod(0o600)
