"""``paceline bench collectives``: bandwidth of every collective against the links' own rate."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.bench import bandwidth, link_rates
from paceline.bench.bandwidth import Row
from paceline.bench.link_rates import LinkRates
from paceline.cli.applicability import reject_combination
from paceline.cli.dispatch import Dispatch, prepare, ssh_options
from paceline.cli.job_options import build_job
from paceline.cli.measure.survey import survey
from paceline.cli.options import launch_options
from paceline.cli.variables import F
from paceline.cli.verb import Verb, say
from paceline.spec.errors import JobError, PacelineError, SettingError
from paceline.spec.formatting import pluralize
from paceline.spec.hosts import Cluster
from paceline.spec.job import Entry
from paceline.spec.settings import Setting, Source

if TYPE_CHECKING:
    from paceline.checks.check import Survey


MODULE = "paceline.bench.collectives_job"
RESULT = "collectives.json"
# the table; what the job says of itself; each host's wire
JobResult = tuple[tuple[Row, ...], dict[str, Any], dict[str, float]]
# bits a second by (from, to); what is slow, in words, by host; iperf3's from, to and bits a second
LinkResult = tuple[dict[tuple[str, str], float], dict[str, str], tuple[str, str, float] | None]


@dataclass(frozen=True, slots=True)
class Measurements:
    """What was measured.

    Attributes:
        rows: The table.
        info: backend, ranks, nodes, torch, devices.
        links: Bits a second between hosts, by (from, to); empty when not measured.
        slow_messages: What is slow, host or way, in words.
        ways: What the backend reaches between the hosts, and what each can do alone.
        wires: What each host's wire is good for, in bits a second, where it says so.
        iperf3: From, to, and bits a second by iperf3 of the slowest way; ``None`` without it.
    """

    rows: tuple[Row, ...]
    info: Mapping[str, Any]
    links: Mapping[tuple[str, str], float]
    slow_messages: tuple[str, ...] = ()
    iperf3: tuple[str, str, float] | None = None
    ways: LinkRates = LinkRates()
    wires: Mapping[str, float] = field(default_factory=dict)


def count_option(*flags: str, minimum: int, default: int, help: str) -> Callable[[F], F]:
    """Makes an option with a whole number, with its default in the help."""
    return click.option(
        *flags, type=click.IntRange(minimum), default=default, show_default=True, help=help
    )


@click.command("collectives", cls=Verb)
@launch_options
@click.option("-b", "--minbytes", default="8", show_default=True, help="Smallest size.")
@click.option("-e", "--maxbytes", default="4M", show_default=True, help="Largest size.")
@click.option("-f", "--stepfactor", type=int, default=8, show_default=True,
              help="Factor from one size to the next.")  # fmt: skip
@click.option(
    "-i", "--stepbytes", default="0", help="Bytes from one size to the next, instead of a factor."
)
@count_option("-n", "--iters", minimum=1, default=20, help="Timed calls of each size.")
@count_option(
    "-w", "--warmup-iters", minimum=0, default=5, help="Untimed calls before the timed ones."
)
@count_option("-c", "--verify", minimum=0, default=1,
              help="0: do not check the results (--check of nccl-tests).")  # fmt: skip
@click.option("-d", "--datatype", type=click.Choice(list(bandwidth.TYPES)), default="float",
              show_default=True, help="Type of an element.")  # fmt: skip
@click.option("-o", "--op", type=click.Choice(["sum", "max", "min"]), default="sum",
              show_default=True, help="Reduction.")  # fmt: skip
@click.option("-a", "--average", type=click.IntRange(0, 3), default=3, show_default=True,
              help="Which time to report: 0 rank 0's, 1 the mean, 2 the shortest, 3 the"
                   " longest.")  # fmt: skip
@click.option("-z", "--blocking", type=click.IntRange(0, 1), default=0,
              help="1: wait for each call before the next.")  # fmt: skip
@click.option("-g", "--ngpus", type=click.IntRange(1), metavar="N", help="The same as -p N.")
@click.option(
    "-r", "--root", type=click.IntRange(0), default=0, help="Root of collectives that have one."
)
@click.option("--collective", "chosen", multiple=True, metavar="NAME",
              type=click.Choice([*bandwidth.COLLECTIVES, "all_to_all", "all"]),
              help="Collective to measure; can be repeated. Default: all. alltoall and all_to_all"
                   " are the same.")  # fmt: skip
@click.option(
    "--min-busbw", type=float, metavar="GB/S", help="Fail if all_reduce is slower than this."
)
@click.option("--min-share", type=float, metavar="SHARE",
              help="Fail if all_reduce uses less than this share of the slowest link"
                   " (0…1).")  # fmt: skip
@click.option("--no-links", is_flag=True, help="Do not measure the links and the hosts.")
@click.option("--picture", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.svg",
              help="Also draw the matrix of links as a heat map.")  # fmt: skip
@click.pass_context
def command(ctx: click.Context, /, **params: Any) -> None:
    """Measure collectives over all hosts, with nccl-tests' flags, table and factors.

    The output names slow hosts and links. It compares the results with the rates of TCP and of the
    backend between the hosts, and with the limits of interfaces and cards.

    Exit status: 1 if a result is wrong or a threshold is missed.
    """
    if params["no_links"]:
        reject_combination(ctx, "--no-links", ("picture", "min_share"))
    if bandwidth.parse_size(params["stepbytes"]):
        reject_combination(ctx, "--stepbytes", ("stepfactor",))
    if params["ngpus"] is not None:
        reject_combination(ctx, "-g", ("nproc_per_node",))
    spec = job_spec(params, ctx.params["backend"])
    cluster, dispatch = prepare(ctx)
    links, slow_hosts, iperf3 = measure_links(ctx, cluster, dispatch)
    rows, info, wires = run_collectives(ctx, cluster, dispatch, spec)
    rates = info.pop("ways")
    rates_between = LinkRates.from_json(rates) if rates else LinkRates()
    slow_messages = (
        *dict.fromkeys(slow_hosts.values()),
        *link_rates.verdict(rates_between, tuple(slow_hosts)),
    )
    measurements = Measurements(rows, info, links, slow_messages, iperf3, rates_between, wires)
    if params["picture"] is not None:
        draw(params["picture"], measurements)
    problems = find_problems(measurements, params["min_busbw"], params["min_share"])
    if ctx.params["as_json"]:
        click.echo(json.dumps(to_json(measurements, problems), indent=2))
    else:
        show(measurements, problems)
    ctx.exit(1 if problems else 0)


def job_spec(params: Mapping[str, Any], backend: str | None) -> dict[str, Any]:
    names = ["alltoall" if name == "all_to_all" else name for name in params["chosen"]]
    collectives = [name for name in names if name != "all"] or list(bandwidth.COLLECTIVES)
    sizes = bandwidth.sizes(
        bandwidth.parse_size(params["minbytes"]),
        bandwidth.parse_size(params["maxbytes"]),
        params["stepfactor"],
        bandwidth.parse_size(params["stepbytes"]),
    )
    return {
        "collectives": collectives,
        "sizes": sizes,
        "type": params["datatype"],
        "redop": params["op"],
        "root": params["root"],
        "iterations": params["iters"],
        "warmup": params["warmup_iters"],
        "check": params["verify"] > 0,
        "average": params["average"],
        "blocking": params["blocking"] > 0,
        "ways": not params["no_links"],
        "backend": backend or "auto",
    }


def measure_links(ctx: click.Context, cluster: Cluster, dispatch: Dispatch) -> LinkResult:
    """Measures the TCP rate of every pair over ssh, finds slow ones, and tries iperf3."""
    import asyncio

    from paceline.checks.link import bits_per_s
    from paceline.checks.link import evaluate as evaluate_link

    if (ctx.params["no_links"] or len(cluster.hosts) < 2
            or not dispatch.scheduler.is_direct):  # fmt: skip
        return {}, {}, None
    hosts = cluster.hosts[: ctx.params["nnodes"] or len(cluster.hosts)]
    link_survey = survey(ctx, hosts, "full", only=("ports", "link"))
    pairs = (link_survey.evidence.get("link") or {}).get("pairs", [])
    rates: dict[tuple[str, str], float] = {}
    for pair in (pair for pair in pairs if "bytes" in pair):  # some were measured several times
        link = (pair["source"], pair["target"])
        rates[link] = max(bits_per_s(pair), rates.get(link, 0.0))
    findings = evaluate_link(link_survey) if pairs else []
    wrong = [finding for finding in findings if finding.outcome != "pass"]
    messages = {host: finding.message for finding in wrong for host in finding.hosts}
    opinion = _second_opinion(link_survey, ssh_options(ctx.params), rates)
    return rates, messages, asyncio.run(opinion)


async def _second_opinion(survey: Survey, ssh: Any,
                          rates: Mapping[tuple[str, str], float]) -> Any:  # fmt: skip
    """Measures the slowest link with iperf3; ``None`` without links or iperf3, or if it fails."""
    if not rates:
        return None
    import asyncio

    from paceline.bench import iperf3
    from paceline.remote.fanout import connect_hosts

    source, target = min(rates, key=rates.__getitem__)
    by_name = {host.name: host for host in survey.present}
    hosts = [by_name[source], by_name[target]]
    channels = await connect_hosts(hosts, [survey.interpreters[host.name] for host in hosts], ssh)
    try:
        bits = await iperf3.measure(channels[0], channels[1], survey.networks[target].address)
    except (PacelineError, ConnectionError, asyncio.TimeoutError):
        return None
    finally:
        await asyncio.gather(*(channel.close(2.0) for channel in channels))
    return (source, target, bits) if bits else None


def run_collectives(ctx: click.Context, cluster: Cluster, dispatch: Dispatch,
                    spec: Mapping[str, Any]) -> JobResult:  # fmt: skip
    """Runs the job: the table, what it says of itself, and the wires; JobError when it fails."""
    from paceline.cli.runs.run_end import print_library_logs, report_failure
    from paceline.launch.launcher import run_job
    from paceline.launch.terminal.screen import Screen
    from paceline.rundir.records import read_object
    from paceline.spec import rundir as names

    if dispatch.transport is None:
        raise SettingError(
            "bench collectives runs here, not in a batch", remedy="In an allocation, type it again"
        )
    entry = Entry("module", MODULE, (json.dumps(spec),))
    job = build_job(ctx, entry, name="collectives")
    if ctx.params["ngpus"] is not None:  # nccl-tests' -g is -p: a rank has one device
        job = replace(job, nproc_per_node=Setting(ctx.params["ngpus"], Source.COMMAND_LINE))
    outcome = run_job(job, cluster, dispatch.transport, Screen("none"),
                      run_dir=ctx.params["run_dir"], parent=Path(names.DEFAULT_PARENT),
                      package=bandwidth.PARTS)  # fmt: skip
    if job.debug.value:
        print_library_logs(outcome.path)
    if outcome.result.exit_code:
        raise JobError(
            "the collectives failed",
            found=report_failure(outcome), exit_code=outcome.result.exit_code,
        )  # fmt: skip
    result = read_object(outcome.path / RESULT)
    if result is None:
        raise JobError("the collectives left no result", found=f"no file {outcome.path / RESULT}")
    rows = tuple(Row.from_json(row) for row in result.pop("rows"))
    plan, facts = (read_object(outcome.path / name) or {} for name in (names.PLAN, names.HOSTS))
    return rows, result, link_rates.nominal_rates(plan, facts) if plan else {}


def hosts_of(measurements: Measurements) -> list[str]:
    """Returns the hosts of the links in natural order: n2 before n10."""
    names = {name for pair in (*measurements.links, *measurements.ways.rates) for name in pair}
    return sorted(names, key=lambda name: [(len(w), w) for w in re.findall(r"\d+|\D+", name)])


def slowest(measurements: Measurements) -> float:
    return min(measurements.links.values(), default=0.0)


def find_problems(
    measurements: Measurements, min_busbw: float | None, min_share: float | None
) -> list[str]:
    """Describes what is wrong or too slow. Pure."""
    problems = [
        f"{row.collective} of {row.size} bytes: {row.wrong_values} wrong values"
        for row in measurements.rows
        if row.wrong_values
    ]
    bus_bandwidth = bandwidth.peak_bandwidth(measurements.rows, "all_reduce")
    if min_busbw is not None and bus_bandwidth < min_busbw:
        problems.append(
            f"all_reduce reaches {bus_bandwidth:.4f} GB/s, {min_busbw:g} were asked for"
        )
    share = bandwidth.share(bus_bandwidth, slowest(measurements))
    if min_share is not None and measurements.links and share < min_share:
        problems.append(
            f"all_reduce uses {share:.0%} of the slowest link, {min_share:.0%} were asked for"
        )
    return problems


_FASTER_THAN_TCP = (
    ", more than TCP reached alone on the slowest link: that measurement was disturbed, "
    "or the backend does not use TCP"
)


def conclusion(measurements: Measurements, problems: Sequence[str]) -> str:
    if problems:
        return f"failed: {problems[0]}"
    bus_bandwidth = bandwidth.peak_bandwidth(measurements.rows, "all_reduce")
    ranks, nodes = int(measurements.info["ranks"]), int(measurements.info["nodes"])
    location = f"{pluralize(ranks, 'rank')} on {pluralize(nodes, 'host')}"
    text = f"{measurements.info['backend']}, {location}"
    if bus_bandwidth:
        text += f": all_reduce {bus_bandwidth:.3f} GB/s on the bus"
    if bus_bandwidth and measurements.links and ranks == nodes:
        share = bandwidth.share(bus_bandwidth, slowest(measurements))
        text += f", {share:.0%} of the slowest link's TCP rate" if share <= 1 else _FASTER_THAN_TCP
    return text + "".join(f"; {message}" for message in measurements.slow_messages)


def show(measurements: Measurements, problems: Sequence[str]) -> None:
    from paceline.report import findings as report
    from paceline.spec.formatting import format_bit_rate

    say(conclusion(measurements, problems) + "\n")
    say("\n".join([*devices(measurements), *bandwidth.format_rows(measurements.rows)]))
    backend = measurements.info["backend"]
    backend_rates = {pair: 8 * rate for pair, rate in measurements.ways.rates.items()}
    for title, rates in (
        ("TCP between hosts", measurements.links),
        (f"{backend} between hosts (of a host to itself: between two ranks)", backend_rates),
    ):
        if rates:
            cells = {pair: format_bit_rate(bits) for pair, bits in rates.items()}
            matrix = report.matrix(hosts_of(measurements), cells)
            say("\n".join([title, *report.aligned(*matrix)]))
    for line in limits(measurements):
        say(line)
    if measurements.iperf3:
        source, target, bits = measurements.iperf3
        say(f"iperf3 from {source} to {target}: {format_bit_rate(bits)}")
    for problem in problems[1:]:
        say(problem)


def devices(measurements: Measurements) -> list[str]:
    """Lists the device of each rank, as nccl-tests does."""
    ranks = measurements.info.get("devices") or ()
    return ["# Using devices", *(
        f"#  Rank {index:>2} Group  0 Pid {rank['pid']:>6} on {rank['host']} "
        f"device {rank['device']:>2} {rank['name']}" for index, rank in enumerate(ranks)
    ), "#"]  # fmt: skip


def limits(measurements: Measurements) -> list[str]:
    """Compares the rates with the limits of each host's link and card."""
    lines = []
    for place in measurements.ways.hosts:
        parts = [f"copies {link_rates.format_rate(place.copy)} in memory"]
        if place.host in measurements.wires:
            parts.insert(0, f"wire {link_rates.format_rate(measurements.wires[place.host] / 8)}")
        if place.bus:
            of = ""
            if place.slot and (rate := link_rates.format_rate(link_rates.slot_rate(place.slot))):
                of = f" of {rate} ({place.slot})"
            parts.append(f"feeds its card {link_rates.format_rate(place.bus)}{of}")
        lines.append(f"{place.host}: {place.device}: {', '.join(parts)}")
    bus_bandwidth = bandwidth.peak_bandwidth(measurements.rows, "all_reduce")
    slowest_wire = min(measurements.wires.values(), default=0.0)
    if bus_bandwidth and slowest_wire and int(measurements.info["nodes"]) > 1:
        share = bandwidth.share(bus_bandwidth, slowest_wire)
        lines.append(f"all_reduce uses {share:.0%} of the slowest wire on the bus")
    return lines


def draw(path: Path, measurements: Measurements) -> None:
    from paceline.report.heatmap import svg
    from paceline.report.writer import write_text
    from paceline.spec.formatting import format_bit_rate

    names = hosts_of(measurements)
    labels = {pair: format_bit_rate(bits) for pair, bits in measurements.links.items()}
    picture = svg(names, measurements.links, labels, "TCP between hosts")
    write_text(picture, path, f"cannot write the picture {path}", "--picture FILE.svg")


def to_json(measurements: Measurements, problems: Sequence[str]) -> dict[str, Any]:
    return {
        "conclusion": conclusion(measurements, problems),
        "problems": list(problems),
        **measurements.info,
        "rows": [asdict(row) for row in measurements.rows],
        "links": [
            {"from": source, "to": target, "bits_per_s": bits}
            for (source, target), bits in measurements.links.items()
        ],
        "slow": list(measurements.slow_messages),
        "ways": measurements.ways.to_json(),
        "wires": dict(measurements.wires),
        "iperf3": dict(zip(("from", "to", "bits_per_s"), measurements.iperf3 or (), strict=False))
        or None,
    }
