"""Plain lines: one host name or address a line."""

from __future__ import annotations

from paceline.hosts.dialect import Dialect, Reading
from paceline.hosts.lines import parse_lines
from paceline.spec.hosts import Cluster


def detect(reading: Reading) -> bool:
    """Any text: what no other dialect recognises is read as plain lines, or refused as such."""
    return bool(reading.text)


def write(cluster: Cluster) -> str:
    """One address a line."""
    return "".join(f"{host.address}\n" for host in cluster.hosts)


DIALECT = Dialect(
    name="plain",
    title="one host a line",
    detect=detect,
    parse=parse_lines,
    write=write,
    keeps=frozenset({"address"}),
)
