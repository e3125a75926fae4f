"""Host files with one or more hosts a line; they differ in the meaning of ``:n``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from paceline.hosts.address import join_number
from paceline.hosts.dialect import Dialect, Reading
from paceline.hosts.lines import (
    has_colon,
    names_rendezvous,
    parse_lines,
    split_lines,
    strip_comment,
    try_read_mentions,
)
from paceline.spec.hosts import Cluster, Host


def _writes(line: Callable[[Host], str]) -> Callable[[Cluster], str]:
    """Returns a writer of one line for each host."""
    return lambda cluster: "".join(f"{line(host)}\n" for host in cluster.hosts)


def _user(host: Host) -> str:
    return f"{host.user}@" if host.user else ""


def _slots(host: Host) -> str:
    return "" if host.slots is None else f" slots={host.slots}"


def _has_only_rendezvous(reading: Reading) -> bool:
    """Whether only the first of several hosts has a ``:n``, which can only be a port."""
    return reading.colon in (None, "rendezvous") and names_rendezvous(try_read_mentions(reading))


def _has_key(reading: Reading) -> bool:
    return any("=" in strip_comment(line) for line in split_lines(reading.text))


def _has_several_on_a_line(reading: Reading) -> bool:
    lines = Counter(mention.line for mention in try_read_mentions(reading))
    return max(lines.values(), default=0) > 1


PLAIN = Dialect(
    name="plain",
    title="one host a line",
    detect=lambda reading: bool(reading.text),  # whatever no other dialect recognises
    parse=parse_lines,
    write=_writes(lambda host: host.address),
    preserved_fields=frozenset({"address"}),
)
SLOTS = Dialect(
    name="slots",
    title="host file of Open MPI or DeepSpeed",
    detect=_has_key,
    parse=parse_lines,
    write=_writes(lambda host: host.address + _slots(host)),
    preserved_fields=frozenset({"address", "slots"}),
    colon="port",
)
COLON = Dialect(
    name="colon",
    title="machine file of MPICH or Intel MPI",
    detect=lambda reading: has_colon(reading, "slots"),
    parse=parse_lines,
    write=_writes(lambda host: join_number(host.address, host.slots)),
    preserved_fields=frozenset({"address", "slots"}),
    colon="slots",
)
PORT = Dialect(
    name="port",
    title="host:port a line",
    detect=lambda reading: has_colon(reading, "port"),
    parse=parse_lines,
    write=_writes(lambda host: _user(host) + join_number(host.address, host.port) + _slots(host)),
    preserved_fields=frozenset({"address", "user", "port", "slots"}),
    colon="port",
)
TLT = Dialect(
    name="tlt",
    title="host file of the Transfer Learning Tool",
    detect=_has_only_rendezvous,
    parse=parse_lines,
    write=PLAIN.write,  # no port: the tool has its own default, and rewrites files with one
    preserved_fields=frozenset({"address"}),
    colon="rendezvous",
)
LIST = Dialect(
    name="list",
    title="comma list",
    detect=_has_several_on_a_line,
    parse=parse_lines,
    write=lambda cluster: (
        ",".join(_user(host) + join_number(host.address, host.slots) for host in cluster.hosts)
        + "\n"
    ),
    preserved_fields=frozenset({"address", "user", "slots"}),
    colon="slots",
)
