"""torchrun's variables, which name the first host and count the others."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.hosts.address import check_address
from paceline.hosts.dialect import Dialect, Parsed, Reading, UnreadableError
from paceline.spec.errors import HostsError
from paceline.spec.hosts import Host

LABEL = "torchrun's variables"
MAX_LISTED = 4  # hosts in a remedy
MARK = "TORCHELASTIC_RUN_ID"  # set by torchrun only; the others are set by many launchers


def detect(reading: Reading) -> bool:
    """Whether a variable is set that only torchrun sets."""
    return not reading.text and MARK in reading.environ


def parse(reading: Reading) -> Parsed:
    """Returns this machine, or both of two; raises HostsError if hosts stay unnamed."""
    environ = reading.environ
    nodes = _number(environ, "GROUP_WORLD_SIZE") or _quotient(environ)
    if not nodes:
        raise HostsError(
            "the hosts of a torchrun job were asked for, and this is not one",
            found="neither GROUP_WORLD_SIZE nor WORLD_SIZE with LOCAL_WORLD_SIZE is set",
            remedy="name the hosts: a host file or a list such as `-H n1,n2`",
        )
    first_address, rank = environ.get("MASTER_ADDR", ""), _number(environ, "GROUP_RANK")
    slots = _number(environ, "LOCAL_WORLD_SIZE") or None
    hosts = derive_hosts(LABEL, first_address, reading.hostname, rank, nodes, slots)
    return Parsed(hosts, ("node 0 from $MASTER_ADDR; node 1 is this machine",) if nodes > 1 else ())


def _number(environ: Mapping[str, str], name: str) -> int | None:
    value = environ.get(name, "")
    return int(value) if value.isdecimal() else None


def _quotient(environ: Mapping[str, str]) -> int:
    world, local = _number(environ, "WORLD_SIZE"), _number(environ, "LOCAL_WORLD_SIZE")
    return world // local if world and local and world % local == 0 else 0


def derive_hosts(
    label: str, first_address: str, hostname: str, rank: int | None, nodes: int, slots: int | None
) -> tuple[Host, ...]:
    """Returns all hosts, derived from the address of node 0 and this machine's node rank.

    Args:
        label: Name of the description in errors.
        first_address: Of node 0; may be empty.
        hostname, rank: Name and node rank of this machine.
        nodes, slots: Number of nodes, and of processes on each.

    Raises:
        HostsError: Some hosts cannot be derived.
    """
    if nodes == 1:
        return (Host(hostname, slots=slots, local=True),)
    if nodes == 2 and rank == 1 and first_address:
        user, _, address = first_address.rpartition("@")
        head = Host(_checked(label, address), slots=slots, user=user or None)
        return (head, Host(hostname, slots=slots, local=True))
    unnamed = nodes - len({name for name in (first_address, hostname if rank else "") if name})
    raise HostsError(
        f"{label}: {unnamed} of {nodes} hosts have no name in it",
        found=f"node 0: {first_address or 'not named'}; this machine: {hostname}, "
        f"node rank {'not said' if rank is None else rank}",
        remedy=_naming_remedy(first_address, hostname, rank, nodes, slots),
    )


def _naming_remedy(
    first_address: str, hostname: str, rank: int | None, nodes: int, slots: int | None
) -> str:
    """Returns the list of hosts, with placeholders for unknown ones."""
    if nodes > MAX_LISTED:
        return "name all hosts: a host file or a list such as `-H n1,n2`"
    names_by_rank = {0: first_address, **({rank: hostname} if rank else {})}
    count = f":{slots}" if slots else ""
    hosts = ",".join(f"{names_by_rank.get(node) or f'NODE{node}'}{count}" for node in range(nodes))
    return f"name all hosts: a host file, or `-H {hosts}` with names in place of NODE…"


def _checked(label: str, address: str) -> str:
    try:
        return check_address(address)
    except UnreadableError as problem:
        raise HostsError(
            f"{label}: the address of node 0 cannot be read",
            found=address,
            remedy=f"expected {problem.expected}",
        ) from None


DIALECT = Dialect(
    name="torchrun",
    title="variables of a torchrun job",
    detect=detect,
    parse=parse,
    is_environment=True,
)
