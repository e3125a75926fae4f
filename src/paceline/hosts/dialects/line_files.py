"""Host files with one or more hosts a line; they differ in what ``:n`` and ``key=value`` say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from paceline.hosts.address import with_number
from paceline.hosts.dialect import Dialect, Reading
from paceline.hosts.lines import (
    bare,
    has_colon,
    names_rendezvous,
    parse_lines,
    peek,
    split_lines,
)
from paceline.spec.hosts import Cluster, Host


def _writes(line: Callable[[Host], str]) -> Callable[[Cluster], str]:
    """Writes one line a host."""
    return lambda cluster: "".join(f"{line(host)}\n" for host in cluster.hosts)


def _user(host: Host) -> str:
    return f"{host.user}@" if host.user else ""


def _slots(host: Host) -> str:
    return "" if host.slots is None else f" slots={host.slots}"


def _has_only_rendezvous(reading: Reading) -> bool:
    """Whether only the first of several hosts has a ``:n``, which can only be a port."""
    return reading.colon in (None, "rendezvous") and names_rendezvous(peek(reading))


def _has_key(reading: Reading) -> bool:
    return any("=" in bare(line) for line in split_lines(reading.text))


def _has_several_on_a_line(reading: Reading) -> bool:
    lines = Counter(mention.line for mention in peek(reading))
    return max(lines.values(), default=0) > 1


PLAIN = Dialect(
    name="plain",
    title="one host a line",
    detect=lambda reading: bool(reading.text),  # whatever no other dialect recognises
    parse=parse_lines,
    write=_writes(lambda host: host.address),
    keeps=frozenset({"address"}),
)
SLOTS = Dialect(
    name="slots",
    title="host file of Open MPI or DeepSpeed",
    detect=_has_key,
    parse=parse_lines,
    write=_writes(lambda host: host.address + _slots(host)),
    keeps=frozenset({"address", "slots"}),
    colon="port",
)
COLON = Dialect(
    name="colon",
    title="machine file of MPICH or Intel MPI",
    detect=lambda reading: has_colon(reading, "slots"),
    parse=parse_lines,
    write=_writes(lambda host: with_number(host.address, host.slots)),
    keeps=frozenset({"address", "slots"}),
    colon="slots",
)
PORT = Dialect(
    name="port",
    title="host:port a line",
    detect=lambda reading: has_colon(reading, "port"),
    parse=parse_lines,
    write=_writes(lambda host: _user(host) + with_number(host.address, host.port) + _slots(host)),
    keeps=frozenset({"address", "user", "port", "slots"}),
    colon="port",
)
TLT = Dialect(
    name="tlt",
    title="host file of the Transfer Learning Tool",
    detect=_has_only_rendezvous,
    parse=parse_lines,
    write=PLAIN.write,  # no port: the tool has its own default, and rewrites files with one
    keeps=frozenset({"address"}),
    colon="rendezvous",
)
LIST = Dialect(
    name="list",
    title="comma list",
    detect=_has_several_on_a_line,
    parse=parse_lines,
    write=lambda cluster: (
        ",".join(_user(host) + with_number(host.address, host.slots) for host in cluster.hosts)
        + "\n"
    ),
    keeps=frozenset({"address", "user", "slots"}),
    colon="slots",
)
