"""Which process am I: the place in the job, read from the environment and nothing else."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.spec import jobenv
from paceline.spec.errors import JobError, SettingError


@dataclass(frozen=True, slots=True)
class World:
    """The place of this process in its job.

    Attributes:
        local_rank: Number of this process on its node.
        local_size: Number of processes on this node.
        host: The node's name, for people.
        joined: True when a process group has to be made: somebody launched this process as one
            of a world (also a world of one); False for a script started by hand.
        hosts: Names of all nodes on which the job may run, where its launcher tells them.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    host: str = "localhost"
    joined: bool = False
    hosts: tuple[str, ...] = ()


def read(environ: Mapping[str, str]) -> World:
    """The place of this process according to its launcher's variables; alone without them.

    Args:
        environ: The environment, in torchrun's terms (see ``launched.translated``).

    Raises:
        SettingError: A variable is missing or is no number in its range.
    """
    host = environ.get(jobenv.HOST) or socket.gethostname()
    if jobenv.RANK not in environ and jobenv.WORLD_SIZE not in environ:
        return World(host=host)
    size = _number(environ, jobenv.WORLD_SIZE, None, 1)
    rank = _number(environ, jobenv.RANK, None, 0)
    if rank >= size:
        raise SettingError(f"{jobenv.RANK}={rank} must be less than {jobenv.WORLD_SIZE}={size}")
    return World(
        rank=rank,
        size=size,
        local_rank=_number(environ, jobenv.LOCAL_RANK, 0, 0),
        local_size=_number(environ, jobenv.LOCAL_WORLD_SIZE, 1, 1),
        host=host,
        joined=True,
        hosts=tuple(filter(None, environ.get(jobenv.HOSTS, "").split(","))),
    )


def check_planned(world: World, environ: Mapping[str, str]) -> None:
    planned = environ.get(jobenv.PLANNED_WORLD)
    if planned and int(planned) != world.size:
        raise JobError(
            f"the plan has {planned} processes, but this process joined a world of {world.size}",
            found=f"rank {world.rank} on {world.host}",
            remedy="start every process through the launcher, none by hand",
        )


def _number(environ: Mapping[str, str], name: str, default: int | None, minimum: int) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal() or int(text) < minimum:
        raise SettingError(
            f"the variable {name} must be a whole number of at least {minimum}",
            found="it is not set" if text is None else f"{name}={text}",
            remedy="start the script with paceline run or torchrun, or unset RANK and WORLD_SIZE",
        )
    return int(text)
