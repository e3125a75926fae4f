"""A comma list: ``n1,n2:4,user@n3``, as typed after ``-H``."""

from __future__ import annotations

from collections import Counter

from paceline.hosts.address import with_number
from paceline.hosts.dialect import Dialect, Reading
from paceline.hosts.lines import parse_lines, peek
from paceline.spec.hosts import Cluster, Host


def detect(reading: Reading) -> bool:
    """A line has several hosts."""
    lines = Counter(mention.line for mention in peek(reading))
    return max(lines.values(), default=0) > 1


def write(cluster: Cluster) -> str:
    """``[user@]address[:slots]``, joined by commas, on one line."""
    return ",".join(_item(host) for host in cluster.hosts) + "\n"


def _item(host: Host) -> str:
    user = f"{host.user}@" if host.user else ""
    return user + with_number(host.address, host.slots)


DIALECT = Dialect(
    name="list",
    title="comma list",
    detect=detect,
    parse=parse_lines,
    write=write,
    keeps=frozenset({"address", "user", "slots"}),
    colon="slots",
)
