"""``host:n`` with n being the SSH port: containers and tunnels on one address."""

from __future__ import annotations

from paceline.hosts.address import with_number
from paceline.hosts.dialect import Dialect, Reading
from paceline.hosts.lines import has_colon, parse_lines
from paceline.spec.hosts import Cluster, Host


def detect(reading: Reading) -> bool:
    """A line has a ``host:n`` in which n means an SSH port."""
    return has_colon(reading, "port")


def write(cluster: Cluster) -> str:
    """``[user@]address[:port] [slots=n]`` a line."""
    return "".join(f"{_line(host)}\n" for host in cluster.hosts)


def _line(host: Host) -> str:
    user = f"{host.user}@" if host.user else ""
    slots = "" if host.slots is None else f" slots={host.slots}"
    return f"{user}{with_number(host.address, host.port)}{slots}"


DIALECT = Dialect(
    name="port",
    title="host:port a line",
    detect=detect,
    parse=parse_lines,
    write=write,
    keeps=frozenset({"address", "user", "port", "slots"}),
    colon="port",
)
