"""``host slots=n``: the host file of Open MPI and DeepSpeed."""

from __future__ import annotations

from paceline.hosts.dialect import Dialect, Reading
from paceline.hosts.lines import bare, parse_lines, split_lines
from paceline.spec.hosts import Cluster, Host


def detect(reading: Reading) -> bool:
    """A line has a ``key=value``."""
    return any("=" in bare(line) for line in split_lines(reading.text))


def write(cluster: Cluster) -> str:
    """``address slots=n``; without ``slots`` where the number is not known."""
    return "".join(f"{_line(host)}\n" for host in cluster.hosts)


def _line(host: Host) -> str:
    return host.address if host.slots is None else f"{host.address} slots={host.slots}"


DIALECT = Dialect(
    name="slots",
    title="host file of Open MPI or DeepSpeed",
    detect=detect,
    parse=parse_lines,
    write=write,
    keeps=frozenset({"address", "slots"}),
    colon="port",
)
