"""Descriptions that name only the first machine: torchrun's variables, Accelerate's YAML."""

from __future__ import annotations

from paceline.hosts.address import check_address
from paceline.hosts.dialect import UnreadableError
from paceline.spec.errors import HostsError
from paceline.spec.hosts import Host


def hosts_from_ends(
    label: str, first: str, here: str, rank: int | None, nodes: int, slots: int | None
) -> tuple[Host, ...]:
    """All hosts, as far as the address of node 0 and one's own node rank tell them.

    Args:
        label: How errors name the description.
        first: Address of node 0; may be empty.
        here: This machine's name.
        rank: This machine's node rank.
        nodes: Number of nodes.
        slots: Processes on each.

    Raises:
        HostsError: There are machines that nothing names.
    """
    if nodes == 1:
        return (Host(here, slots=slots, local=True),)
    if nodes == 2 and rank == 1 and first:
        return (Host(_checked(label, first), slots=slots), Host(here, slots=slots, local=True))
    unnamed = nodes - len({name for name in (first, here if rank else "") if name})
    raise HostsError(
        f"{label}: {unnamed} of {nodes} machines have no name in it",
        found=f"node 0: {first or 'not named'}; this machine: {here}, node rank {_said(rank)}",
        remedy="name all hosts: a host file or a list such as `-H n1,n2`",
    )


def _checked(label: str, address: str) -> str:
    try:
        return check_address(address)
    except UnreadableError as problem:
        raise HostsError(
            f"{label}: the address of node 0 cannot be read",
            found=address,
            remedy=f"expected {problem.expected}",
        ) from None


def _said(rank: int | None) -> str:
    return "not said" if rank is None else str(rank)
