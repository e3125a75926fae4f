"""``host:n``: the machine file of MPICH and Intel MPI, n being slots."""

from __future__ import annotations

from paceline.hosts.address import with_number
from paceline.hosts.dialect import Dialect, Reading
from paceline.hosts.lines import has_colon, parse_lines
from paceline.spec.hosts import Cluster


def detect(reading: Reading) -> bool:
    """A line has a ``host:n`` in which n means slots."""
    return has_colon(reading, "slots")


def write(cluster: Cluster) -> str:
    """``address:n``; without ``:n`` where the number is not known."""
    return "".join(f"{with_number(host.address, host.slots)}\n" for host in cluster.hosts)


DIALECT = Dialect(
    name="colon",
    title="machine file of MPICH or Intel MPI",
    detect=detect,
    parse=parse_lines,
    write=write,
    keeps=frozenset({"address", "slots"}),
    colon="slots",
)
