"""The hosts of a run and the links between them, with what was measured of these. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.report.page import Part, Picture, Table, Words
from paceline.report.record import Record, objects_in
from paceline.rundir.records import number, whole, words
from paceline.spec.figures import bit_rate
from paceline.spec.helptext import counted

HOSTS = 512  # in the table
MAPPED = 8  # hosts with a map; of more a matrix says more
MATRIX = 32

Rates = dict[tuple[str, str], float]


def machines(record: Record) -> list[Part]:
    """What is known of the hosts and links; nothing where that is nothing."""
    return [*_hosts(record), *_links(record)]


def _hosts(record: Record) -> Iterator[Part]:
    nodes = objects_in(record.plan.get("nodes"))
    parts = {words(node.get("host"), 255): node for node in nodes}
    named = list(dict.fromkeys([*parts, *map(str, record.hosts)]))
    rows = [_host(name, record.hosts.get(name), parts.get(name)) for name in named[:HOSTS]]
    if not rows:
        return
    cut = f", the first {HOSTS} of {len(named)}" if len(named) > HOSTS else ""
    titles = ["host", "ranks", "processor", "CPUs", "memory", "accelerators", "interface"]
    yield Table(titles, rows, f"Hosts{cut}", folded=False)


def _host(name: str, facts: Any, node: Mapping[str, Any] | None) -> list[str]:
    facts = facts if isinstance(facts, dict) else {}
    cpu, memory, devices = (_object(facts, one) for one in ("cpu", "memory", "devices"))
    cores = cpu.get("cores")
    count = len(cores) if isinstance(cores, list) else 0
    quota = number(cpu.get("quota"))
    cards = [words(one.get("name") or one.get("kind"), 100)
             for one in objects_in(devices.get("gpus"))]  # fmt: skip
    return [
        name[:255], ranks_of(node or {}), words(cpu.get("model"), 200),
        (f"{quota:g} of " if quota else "") + (str(count) if count else ""),
        f"{total / 2**30:.1f} GiB" if (total := number(memory.get("total"))) else "",
        _cards(cards), _interface(facts, words((node or {}).get("interface"), 100)),
    ]  # fmt: skip


def ranks_of(node: Mapping[str, Any]) -> str:
    """``rank 2`` or ``ranks 2 to 3``, by a plan's node."""
    found = [whole(one.get("rank")) for one in objects_in(node.get("ranks"))]
    ranks = sorted(rank for rank in found if rank is not None)
    if len(ranks) < 2:
        return f"rank {ranks[0]}" if ranks else ""
    return f"ranks {ranks[0]} to {ranks[-1]}"


def _object(facts: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = facts.get(name)
    return found if isinstance(found, dict) else {}


def _cards(cards: Sequence[str]) -> str:
    kinds = dict.fromkeys(card for card in cards if card)
    return ", ".join(f"{cards.count(card)} × {card}" for card in kinds)


def _interface(facts: Mapping[str, Any], name: str) -> str:
    """The interface with the speed that it says it has."""
    if not name:
        return ""
    for one in objects_in(facts.get("interfaces")):
        if one.get("name") == name and number(one.get("speed")) > 0:
            return f"{name}, {bit_rate(number(one.get('speed')) * 1e6)} by its own account"
    return name


def _links(record: Record) -> Iterator[Part]:
    measured, by = _measured(record)
    named = [words(node.get("host"), 255) for node in objects_in(record.plan.get("nodes"))]
    hosts = list(dict.fromkeys([*named, *(one for pair in measured for one in pair)]))
    if len(hosts) < 2:
        return
    if not measured:
        yield Words("Between these hosts nothing was measured before the run: --check full, or"
                    " paceline bench collectives, does." + _moved(record), "small")  # fmt: skip
        return
    middle = statistics.median(measured.values())
    slow = [f"{one} → {other} ({bit_rate(rate)})" for (one, other), rate in sorted(
        measured.items(), key=lambda item: item[1]) if rate < middle / 2]  # fmt: skip
    says = (
        f"{counted(len(measured), 'way')} between {counted(len(hosts), 'host')}, measured by {by}:"
        f" from {bit_rate(min(measured.values()))} to {bit_rate(max(measured.values()))}."
        + (f" Under half of the usual: {', '.join(slow[:8])}." if slow else "")
        + _moved(record)
    )
    rows = [
        [one, other, bit_rate(rate), f"{rate / 1e6:.1f}"] for (one, other), rate in measured.items()
    ]
    table = Table(["from", "to", "rate", "Mbit/s"], rows[:2000], "The numbers")
    shown = hosts[:MATRIX]
    devices = {words(node.get("host"), 255): words(node.get("devices"), 100)
               for node in objects_in(record.plan.get("nodes"))}  # fmt: skip
    data = {
        "hosts": [[name, devices.get(name, "")] for name in shown],
        "rates": [[shown.index(one), shown.index(other), rate, bit_rate(rate)]
                  for (one, other), rate in measured.items()
                  if one in shown and other in shown],
        "middle": middle,
    }  # fmt: skip
    kind = "map" if len(hosts) <= MAPPED else "matrix"
    yield Picture(kind, "Links, as measured", says, data, table,
                  height=320 if kind == "map" else min(760, 120 + 26 * len(shown)))  # fmt: skip


def _measured(record: Record) -> tuple[Rates, str]:
    """Bits a second from host to host, and who measured that."""
    found: Rates = {}
    for one in record.links:
        source, target = words(one.get("from"), 255), words(one.get("to"), 255)
        if source and target and (rate := number(one.get("bits_per_s"))) > 0:
            found[source, target] = rate
    if found:
        return found, "TCP before the run"
    ways = record.collectives.get("ways")
    rates = ways.get("rates") if isinstance(ways, dict) else None
    for row in rates[:10_000] if isinstance(rates, list) else []:
        if isinstance(row, list) and len(row) == 3 and row[0] != row[1]:
            source, target, rate = words(row[0], 255), words(row[1], 255), 8 * number(row[2])
            if source and target and rate > 0:
                found[source, target] = rate
    backend = words(record.collectives.get("backend"), 50)
    return found, f"the collectives over {backend}" if backend else "the collectives"


def _moved(record: Record) -> str:
    """What the training itself sent over the links, by its records."""
    parameters = next((event["parameters"] for event in record.events
                       if event.kind == "prepared" and event["parameters"]), 0)  # fmt: skip
    ranks = whole(record.plan.get("world_size")) or 0
    paces = [one for one in record.metrics if one.get("split") == "pace"]
    moving = [moved for one in paces if (moved := number(one.get("moving_s"))) > 0]
    if not (parameters and moving and ranks > 1):
        return ""
    sent = 2 * (ranks - 1) / ranks * 4 * parameters
    return (
        f" In each step of the training a rank sent about {sent / 1e6:.3g} MB of gradients (at 4"
        f" bytes each), for {1e3 * statistics.median(moving):.3g} ms of which nothing else went on."
    )
