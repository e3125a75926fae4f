"""The report's section about a run's hosts and the measured links between them. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.report.page import Figure, Paragraph, Part, Table
from paceline.report.record import Record
from paceline.rundir.records import as_float, as_int, as_text, object_in, objects_in
from paceline.spec.formatting import format_bit_rate, pluralize

MAX_HOSTS = 512  # in the table
MAX_MAP_HOSTS = 8  # drawn as a map; more are drawn as a matrix
MAX_MATRIX_HOSTS = 32


def hosts_parts(record: Record) -> Iterator[Part]:
    nodes = dict(zip(record.planned_hosts, record.nodes, strict=True))
    hosts = list(dict.fromkeys([*nodes, *map(str, record.hosts)]))
    rows = [_host_row(host, object_in(record.hosts, host), nodes.get(host, {}))
            for host in hosts[:MAX_HOSTS]]  # fmt: skip
    if rows:
        note = f", the first {MAX_HOSTS} of {len(hosts)}" if len(hosts) > MAX_HOSTS else ""
        titles = ["host", "ranks", "processor", "CPUs", "memory", "accelerators", "interface"]
        yield Table(titles, rows, f"Hosts{note}", collapsed=False)


def _host_row(host: str, facts: Mapping[str, Any], node: Mapping[str, Any]) -> list[str]:
    cpu = object_in(facts, "cpu")
    cores = cpu.get("cores")
    count = len(cores) if isinstance(cores, list) else 0
    quota = as_float(cpu.get("quota"))
    memory_bytes = as_float(object_in(facts, "memory").get("total"))
    gpus = [as_text(gpu.get("name") or gpu.get("kind"), 100)
            for gpu in objects_in(object_in(facts, "devices").get("gpus"))]  # fmt: skip
    kinds = dict.fromkeys(filter(None, gpus))
    return [
        host[:255], ranks_of(node), as_text(cpu.get("model"), 200),
        (f"{quota:g} of " if quota else "") + (str(count) if count else ""),
        f"{memory_bytes / 2**30:.1f} GiB" if memory_bytes else "",
        ", ".join(f"{gpus.count(kind)} × {kind}" for kind in kinds),
        _describe_interface(facts, as_text(node.get("interface"), 100)),
    ]  # fmt: skip


def ranks_of(node: Mapping[str, Any]) -> str:
    """``rank 2`` or ``ranks 2 to 3``, from a plan's node."""
    values = [as_int(entry.get("rank")) for entry in objects_in(node.get("ranks"))]
    ranks = sorted(rank for rank in values if rank is not None)
    if len(ranks) < 2:
        return f"rank {ranks[0]}" if ranks else ""
    return f"ranks {ranks[0]} to {ranks[-1]}"


def _describe_interface(facts: Mapping[str, Any], name: str) -> str:
    for interface in objects_in(facts.get("interfaces")):
        speed = as_float(interface.get("speed"))
        if name and interface.get("name") == name and speed > 0:
            return f"{name}, {format_bit_rate(speed * 1e6)} by its own account"
    return name


def links_parts(record: Record) -> Iterator[Part]:
    measured, source = _measured_rates(record)
    measured_hosts = (host for pair in measured for host in pair)
    hosts = list(dict.fromkeys([*record.planned_hosts, *measured_hosts]))
    if len(hosts) < 2:
        return
    if not measured:
        yield Paragraph("Nothing was measured between these hosts before the run. To measure, use"
                        " --check full, or paceline bench collectives."
                        + _describe_traffic(record), "small")  # fmt: skip
        return
    median = statistics.median(measured.values())
    slow = [f"{sender} → {receiver} ({format_bit_rate(rate)})" for (sender, receiver), rate
            in sorted(measured.items(), key=lambda item: item[1]) if rate < median / 2]  # fmt: skip
    description = (
        f"{pluralize(len(measured), 'direction')} between {pluralize(len(hosts), 'host')},"
        f" measured by {source}: from {format_bit_rate(min(measured.values()))} to"
        f" {format_bit_rate(max(measured.values()))}."
        + (f" Under half of the median: {', '.join(slow[:8])}." if slow else "")
        + _describe_traffic(record)
    )
    rows = [[*pair, format_bit_rate(rate), f"{rate / 1e6:.1f}"] for pair, rate in measured.items()]
    table = Table(["from", "to", "rate", "Mbit/s"], rows[:2000], "The numbers")
    drawn = hosts[:MAX_MATRIX_HOSTS]
    devices = {host: as_text(node.get("devices"), 100)
               for host, node in zip(record.planned_hosts, record.nodes, strict=True)}  # fmt: skip
    data = {
        "hosts": [[host, devices.get(host, "")] for host in drawn],
        "rates": [[drawn.index(sender), drawn.index(receiver), rate, format_bit_rate(rate)]
                  for (sender, receiver), rate in measured.items()
                  if sender in drawn and receiver in drawn],
        "middle": median,
    }  # fmt: skip
    kind, height = "map", 320
    if len(hosts) > MAX_MAP_HOSTS:
        kind, height = "matrix", min(760, 120 + 26 * len(drawn))
    yield Figure(kind, "Links, as measured", description, data, table, height)


def _measured_rates(record: Record) -> tuple[dict[tuple[str, str], float], str]:
    triples = [(link.get("from"), link.get("to"), as_float(link.get("bits_per_s")))
               for link in record.links]  # fmt: skip
    if rates := _valid_rates(triples):
        return rates, "TCP before the run"
    rows = object_in(record.collectives, "ways").get("rates")
    triples = [(row[0], row[1], 8 * as_float(row[2]))
               for row in (rows[:10_000] if isinstance(rows, list) else [])
               if isinstance(row, list) and len(row) == 3 and row[0] != row[1]]  # fmt: skip
    backend = as_text(record.collectives.get("backend"), 50)
    return _valid_rates(triples), "the collectives" + f" over {backend}" * bool(backend)


def _valid_rates(triples: Sequence[tuple[Any, Any, float]]) -> dict[tuple[str, str], float]:
    return {
        (sender, receiver): rate
        for source, target, rate in triples
        if (sender := as_text(source, 255)) and (receiver := as_text(target, 255)) and rate > 0
    }


def _describe_traffic(record: Record) -> str:
    """What the training itself sent over the links."""
    parameters = next((event["parameters"] for event in record.events
                       if event.kind == "prepared" and event["parameters"]), 0)  # fmt: skip
    ranks = as_int(record.plan.get("world_size")) or 0
    exposed = [seconds for metric in record.metrics if metric.get("split") == "pace"
               and (seconds := as_float(metric.get("moving_s"))) > 0]  # fmt: skip
    if not (parameters and exposed and ranks > 1):
        return ""
    sent = 2 * (ranks - 1) / ranks * 4 * parameters
    return (
        f" In each step of the training a rank sent about {sent / 1e6:.3g} MB of gradients (at 4"
        f" bytes each), which took {1e3 * statistics.median(exposed):.3g} ms in which nothing else"
        " was done."
    )
