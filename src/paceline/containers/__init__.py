"""Container engines: one module each, pure. The agent runs in the container, its ranks with it.

A module has ``wrap(command, container) -> argv``, ``PROBE`` (shell text that says what the image
is on a host) and ``TRIED`` (whether it was ever run for real). A new engine is one file, one line
here, and one transport module under ``schedulers``.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

ENGINES: dict[str, str] = {
    "docker": "paceline.containers.docker",
    "podman": "paceline.containers.podman",
    "apptainer": "paceline.containers.apptainer",
}


@dataclass(frozen=True, slots=True)
class Container:
    """The container for one host's agent.

    Attributes:
        name: Its name there.
        image: Name of the image.
        workdir: Folder in which it begins; it exists there.
        mounts: ``SOURCE:TARGET[:ro]`` each.
        env: Variables that are no secret.
        uid, gid: Who runs in it: the user who logged in.
        groups: Further group ids, for devices.
        devices: Device folders that it sees.
        nvidia: Whether NVIDIA's devices are to be seen.
        shm_size: Size of its /dev/shm.
        arguments: Further flags, passed through.
    """

    name: str
    image: str
    workdir: str = "/"
    mounts: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    uid: int = 0
    gid: int = 0
    groups: tuple[int, ...] = ()
    devices: tuple[str, ...] = ()
    nvidia: bool = False
    shm_size: str = "8g"
    arguments: tuple[str, ...] = ()


class Engine(Protocol):
    """What a module of an engine has."""

    PROBE: str
    TRIED: bool

    def wrap(self, command: Sequence[str], container: Container) -> list[str]:
        """The command that runs ``command`` in the container, its standard streams passed on."""


def engine(name: str) -> Engine:
    """The module of an engine."""
    return cast(Engine, importlib.import_module(ENGINES[name]))


@dataclass(frozen=True, slots=True)
class Probe:
    """What a host says of an image and of itself.

    Attributes:
        digest: Of the image there; empty when it cannot be had.
        words: What the engine said instead.
        uid, gid: Of the user who logged in.
        groups: Group ids of ``render`` and ``video``.
        folders: Which of the wanted folders exist.
        dri, nvidia: Whether there are such devices.
    """

    digest: str
    words: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    folders: tuple[str, ...]
    dri: bool
    nvidia: bool


# ``$1`` is the image, the folders follow
_ABOUT_HOST = (
    'image="$1"; shift; echo "paceline-uid $(id -u)"; echo "paceline-gid $(id -g)"; '
    "for g in render video; do "
    'n=$(getent group "$g" | cut -d: -f3); [ -z "$n" ] || echo "paceline-group $n"; done; '
    "[ ! -d /dev/dri ] || echo paceline-dri; [ ! -e /dev/nvidiactl ] || echo paceline-nvidia; "
    'for f in "$@"; do [ ! -d "$f" ] || echo "paceline-folder $f"; done; '
)


def probe_command(name: str, image: str, folders: Sequence[str]) -> list[str]:
    """Asks a host for all that :class:`Probe` holds; one command, any login shell."""
    text = f"{_ABOUT_HOST}{engine(name).PROBE}"
    return ["/bin/sh", "-c", text, "paceline", image, *folders]


def parse_probe(text: str) -> Probe:
    """Reads what the probe's command printed, errors of the engine included."""
    found: dict[str, list[str]] = {}
    words = []
    for line in text.splitlines():
        match = re.match(r"paceline-(\w+) ?(.*)", line)
        if match:
            found.setdefault(match.group(1), []).append(match.group(2))
        else:
            words.append(line)
    return Probe(
        digest=found.get("digest", [""])[0],
        words="\n".join(words).strip(),
        uid=int(found.get("uid", ["0"])[0]),
        gid=int(found.get("gid", ["0"])[0]),
        groups=tuple(int(number) for number in found.get("group", [])),
        folders=tuple(found.get("folder", [])),
        dri="dri" in found,
        nvidia="nvidia" in found,
    )
