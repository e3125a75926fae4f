"""torchrun's variables: they name the first machine, count the others, and name no third."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.hosts.dialect import Dialect, Parsed, Reading
from paceline.hosts.known_ends import hosts_from_ends
from paceline.spec.errors import HostsError

LABEL = "torchrun's variables"
MARK = "TORCHELASTIC_RUN_ID"  # set by torchrun only; the others are set by many launchers


def detect(reading: Reading) -> bool:
    """Variables that only torchrun sets."""
    return not reading.text and MARK in reading.environ


def parse(reading: Reading) -> Parsed:
    """This machine, or both of two; HostsError where machines stay unnamed."""
    environ = reading.environ
    nodes = _number(environ, "GROUP_WORLD_SIZE") or _quotient(environ)
    if not nodes:
        raise HostsError(
            "the hosts of a torchrun job were asked for, and this is not one",
            found="neither GROUP_WORLD_SIZE nor WORLD_SIZE with LOCAL_WORLD_SIZE is set",
            remedy="name the hosts: a host file or a list such as `-H n1,n2`",
        )
    first, rank = environ.get("MASTER_ADDR", ""), _number(environ, "GROUP_RANK")
    slots = _number(environ, "LOCAL_WORLD_SIZE") or None
    hosts = hosts_from_ends(LABEL, first, reading.here, rank, nodes, slots)
    return Parsed(hosts, ("node 0 from $MASTER_ADDR; node 1 is this machine",) if nodes > 1 else ())


def _number(environ: Mapping[str, str], name: str) -> int | None:
    value = environ.get(name, "")
    return int(value) if value.isdecimal() else None


def _quotient(environ: Mapping[str, str]) -> int:
    world, local = _number(environ, "WORLD_SIZE"), _number(environ, "LOCAL_WORLD_SIZE")
    return world // local if world and local and world % local == 0 else 0


DIALECT = Dialect(
    name="torchrun",
    title="variables of a torchrun job",
    detect=detect,
    parse=parse,
    environment=True,
)
