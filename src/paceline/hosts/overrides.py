"""What paceline.toml says about single hosts, laid over any description."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from paceline.hosts.address import canonical
from paceline.hosts.problems import nearest
from paceline.hosts.tables import BadTableError, host_tables, with_table
from paceline.spec.errors import HostsError
from paceline.spec.hosts import Cluster, Host
from paceline.spec.settings import TOML_NAME


def apply_overrides(cluster: Cluster, toml: Mapping[str, Any]) -> Cluster:
    """The cluster with the values of each ``[hosts.NAME]`` table over its host's own.

    A table belongs to the host of that name, else of that address. Tables for hosts that are
    not in the cluster change nothing; where one looks like a slip of the pen a note says so.

    Args:
        cluster: As described elsewhere.
        toml: The whole document of paceline.toml.

    Raises:
        HostsError: A table has an unknown key or an unusable value.
    """
    try:
        tables = host_tables(toml)
        hosts = tuple(_overridden(host, tables) for host in cluster.hosts)
    except BadTableError as problem:
        raise _error(problem) from None
    return replace(cluster, hosts=hosts, notes=(*cluster.notes, *_slips(cluster, tables)))


def _overridden(host: Host, tables: Mapping[str, Mapping[str, Any]]) -> Host:
    table = tables.get(host.name)
    if table is None:
        by_address = {canonical(name): table for name, table in tables.items()}
        table = by_address.get(canonical(host.address), {})
    return with_table(host, table)


def _slips(cluster: Cluster, tables: Mapping[str, Any]) -> list[str]:
    known = {canonical(text) for host in cluster.hosts for text in (host.name, host.address)}
    strange = [name for name in tables if canonical(name) not in known]
    open_names = [host.name for host in cluster.hosts if host.name not in tables]
    guesses = {name: _meant(name, open_names) for name in strange}
    return [
        f"[hosts.{name}] in {TOML_NAME} belongs to no host here; is `{guess}` meant?"
        for name, guess in guesses.items()
        if guess
    ]


def _meant(name: str, among: Collection[str]) -> str:
    """The host of which the name is a misspelling; none if it is a neighbour (n1, n2)."""
    digits = str.maketrans("", "", "0123456789")
    if any(name.translate(digits) == other.translate(digits) for other in among):
        return ""
    return nearest(name, among, cutoff=0.8)


def _error(problem: BadTableError) -> HostsError:
    where = f"{TOML_NAME}, [hosts.{problem.host}]"
    found = problem.key or f"[hosts.{problem.host}]"
    return HostsError(
        f"{where}: cannot be read", found=found, remedy=f"expected {problem.expected}"
    )
