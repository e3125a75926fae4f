"""The host file of Intel's Transfer Learning Tool: addresses, the first with the job's port."""

from __future__ import annotations

from paceline.hosts.dialect import Dialect, Reading
from paceline.hosts.lines import names_rendezvous, parse_lines, peek
from paceline.spec.hosts import Cluster


def detect(reading: Reading) -> bool:
    """Only the first of several hosts has a ``:n``, and n can only be a port."""
    return reading.colon in (None, "rendezvous") and names_rendezvous(peek(reading))


def write(cluster: Cluster) -> str:
    """One address a line. No port: the tool has its own default, and rewrites files with one."""
    return "".join(f"{host.address}\n" for host in cluster.hosts)


DIALECT = Dialect(
    name="tlt",
    title="host file of the Transfer Learning Tool",
    detect=detect,
    parse=parse_lines,
    write=write,
    keeps=frozenset({"address"}),
    colon="rendezvous",
)
