"""``paceline bench collectives``: bandwidth of every collective against the links' own rate."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from paceline.bench import bandwidth, link_rates
from paceline.bench.bandwidth import Row
from paceline.bench.link_rates import LinkRates
from paceline.cli.applies import refuse_beside
from paceline.cli.launch import F, job_of, launch_options, prepare
from paceline.cli.verb import Verb, say
from paceline.cli.via import Via
from paceline.remote import this_machine
from paceline.spec.errors import JobError, PacelineError, SettingError
from paceline.spec.helptext import counted
from paceline.spec.hosts import Cluster
from paceline.spec.job import Entry

if TYPE_CHECKING:
    from paceline.checks.check import Survey

MODULE = "paceline.bench.collectives_job"
RESULT = "collectives.json"
# the table; what the job says of itself; each host's wire
Measured = tuple[tuple[Row, ...], dict[str, Any], dict[str, float]]
# bits a second by (from, to); what is slow, in words, by host; iperf3's from, to and bits a second
Links = tuple[dict[tuple[str, str], float], dict[str, str], tuple[str, str, float] | None]


@dataclass(frozen=True, slots=True)
class Found:
    """What was measured.

    Attributes:
        rows: The table.
        about: backend, ranks, nodes, torch, devices.
        links: Bits a second between hosts, by (from, to); empty when not measured.
        slow: What is slow, host or way, in words; empty when nothing.
        ways: What the backend reaches between the hosts, and what each can do alone.
        wires: What each host's wire is good for, in bits a second, where it says so.
        iperf3: From, to, and bits a second by iperf3 of the slowest way; ``None`` without it.
    """

    rows: tuple[Row, ...]
    about: Mapping[str, Any]
    links: Mapping[tuple[str, str], float]
    slow: tuple[str, ...] = ()
    iperf3: tuple[str, str, float] | None = None
    ways: LinkRates = LinkRates()
    wires: Mapping[str, float] = field(default_factory=dict)


def count_option(*flags: str, least: int, default: int, help: str) -> Callable[[F], F]:
    """An option that is a whole number, with its default in the help."""
    return click.option(
        *flags, type=click.IntRange(least), default=default, show_default=True, help=help
    )


@click.command("collectives", cls=Verb)
@launch_options
@click.option("-b", "--minbytes", default="8", show_default=True, help="Smallest size.")
@click.option("-e", "--maxbytes", default="4M", show_default=True, help="Largest size.")
@click.option(
    "-f", "--stepfactor", type=int, default=8, show_default=True, help="From one size to the next."
)
@click.option("-i", "--stepbytes", default="0", help="Add this many bytes instead.")
@count_option("-n", "--iters", least=1, default=20, help="Timed calls of each size.")
@count_option("-w", "--warmup-iters", least=0, default=5, help="Calls before them.")
@count_option(
    "-c",
    "--verify",
    least=0,
    default=1,
    help="0: do not check the results (--check of nccl-tests).",
)
@click.option(
    "-d",
    "--datatype",
    type=click.Choice(list(bandwidth.TYPES)),
    default="float",
    show_default=True,
    help="Type of an element.",
)
@click.option(
    "-o",
    "--op",
    type=click.Choice(["sum", "max", "min"]),
    default="sum",
    show_default=True,
    help="Reduction.",
)
@click.option(
    "-a",
    "--average",
    type=click.IntRange(0, 3),
    default=3,
    show_default=True,
    help="Whose time counts: 0 rank 0's, 1 the mean, 2 the least, 3 the most.",
)
@click.option("-z", "--blocking", type=click.IntRange(0, 1), default=0,
              help="1: wait for each call before the next.")  # fmt: skip
@click.option("-g", "--ngpus", type=click.IntRange(1), metavar="N", help="The same as -p N.")
@click.option("-r", "--root", type=click.IntRange(0), default=0, help="Root of rooted ones.")
@click.option(
    "--collective",
    "chosen",
    multiple=True,
    metavar="NAME",
    type=click.Choice([*bandwidth.COLLECTIVES, "all_to_all", "all"]),
    help="Which; can be repeated. Default: all.",
)
@click.option("--min-busbw", type=float, metavar="GB/S", help="Fail when all_reduce stays below.")
@click.option(
    "--min-share",
    type=float,
    metavar="SHARE",
    help="Fail when all_reduce uses less than this share of the slowest link (0…1).",
)
@click.option("--no-links", is_flag=True, help="Measure neither the links nor the hosts.")
@click.option(
    "--picture",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.svg",
    help="Also draw the matrix of links as a heat map.",
)
@click.pass_context
def command(ctx: click.Context, /, **given: Any) -> None:
    """Measure collectives over all hosts, with nccl-tests' flags, table and factors.

    What is slow is named: a host, or the way between two. Results are compared with what TCP and
    the backend reach between the hosts, and with what wire and card are good for.

    Exit status: 1 when a value is wrong or a threshold is missed.
    """
    if given["no_links"]:
        refuse_beside(ctx, "--no-links", ("picture", "min_share"))
    if bandwidth.parse_size(given["stepbytes"]):
        refuse_beside(ctx, "--stepbytes", ("stepfactor",))
    take_ngpus(ctx, given["ngpus"])
    spec = spec_of(given, ctx.params["backend"])
    cluster, via = prepare(ctx)
    nothing: Links = ({}, {}, None)
    measured = nothing if given["no_links"] else measure_links(ctx, cluster, via)
    rows, about, wires = run(ctx, cluster, via, spec)
    said = about.pop("ways")
    own = LinkRates.from_json(said) if said else LinkRates()
    links, slow, second = measured
    words = (*dict.fromkeys(slow.values()), *link_rates.verdict(own, tuple(slow)))
    found = Found(rows, about, links, words, second, own, wires)
    if given["picture"] is not None:
        draw(given["picture"], found)
    problems = judge(found, given["min_busbw"], given["min_share"])
    if ctx.params["as_json"]:
        click.echo(json.dumps(to_json(found, problems), indent=2))
    else:
        show(found, problems)
    ctx.exit(1 if problems else 0)


def take_ngpus(ctx: click.Context, count: int | None) -> None:
    """nccl-tests' ``-g`` is ``-p``: a rank has one device."""
    if count is None:
        return
    refuse_beside(ctx, "-g", ("nproc_per_node",))
    ctx.params["nproc_per_node"] = count
    ctx.set_parameter_source("nproc_per_node", ParameterSource.COMMANDLINE)


def spec_of(given: Mapping[str, Any], backend: str | None) -> dict[str, Any]:
    """The job's one argument."""
    named = ["alltoall" if name == "all_to_all" else name for name in given["chosen"]]
    chosen = [name for name in named if name != "all"] or list(bandwidth.COLLECTIVES)
    sizes = bandwidth.sizes(
        bandwidth.parse_size(given["minbytes"]),
        bandwidth.parse_size(given["maxbytes"]),
        given["stepfactor"],
        bandwidth.parse_size(given["stepbytes"]),
    )
    return {
        "collectives": chosen,
        "sizes": sizes,
        "type": given["datatype"],
        "redop": given["op"],
        "root": given["root"],
        "iterations": given["iters"],
        "warmup": given["warmup_iters"],
        "check": given["verify"] > 0,
        "average": given["average"],
        "blocking": given["blocking"] > 0,
        "ways": not given["no_links"],
        "backend": backend or "auto",
    }


def measure_links(ctx: click.Context, cluster: Cluster, via: Via) -> Links:
    """The TCP rate of every pair, what is slow, and iperf3's word on the slowest way.

    Nothing for other ways than ssh.
    """
    import asyncio

    from paceline.checks.link import bits_per_s
    from paceline.checks.link import evaluate as evaluate_link
    from paceline.remote.openssh import SshOptions

    if len(cluster.hosts) < 2 or not via.scheduler.is_direct:
        return {}, {}, None
    ssh = SshOptions(ctx.params["ssh_config"], ctx.params["accept_new_host_keys"])
    survey = asyncio.run(_examine(ctx, cluster, ssh))
    pairs = (survey.evidence.get("link") or {}).get("pairs", [])
    rates: dict[tuple[str, str], float] = {}
    for pair in (pair for pair in pairs if "bytes" in pair):  # some were measured several times
        way = (pair["source"], pair["target"])
        rates[way] = max(bits_per_s(pair), rates.get(way, 0.0))
    slow = evaluate_link(survey) if pairs else []
    words = {host: one.message for one in slow if one.outcome != "pass" for host in one.hosts}
    second = asyncio.run(_second_opinion(survey, ssh, rates)) if rates else None
    return rates, words, second


async def _second_opinion(survey: Survey, ssh: Any,
                          rates: Mapping[tuple[str, str], float]) -> Any:  # fmt: skip
    """What iperf3 says of the slowest way; ``None`` where a host lacks it or it fails."""
    import asyncio

    from paceline.bench import iperf3
    from paceline.remote.fanout import connect_all

    source, target = min(rates, key=rates.__getitem__)
    by_name = {host.name: host for host in survey.present}
    hosts = [by_name[source], by_name[target]]
    channels = await connect_all(hosts, [survey.interpreters[host.name] for host in hosts], ssh)
    try:
        bits = await iperf3.measure(channels[0], channels[1], survey.networks[target].address)
    except (PacelineError, ConnectionError, asyncio.TimeoutError):
        return None
    finally:
        await asyncio.gather(*(channel.close(2.0) for channel in channels))
    return (source, target, bits) if bits else None


async def _examine(ctx: click.Context, cluster: Cluster, ssh: Any) -> Survey:
    from paceline.checks.check import Requirements
    from paceline.checks.runner import survey_hosts

    hosts = cluster.hosts[: ctx.params["nnodes"] or len(cluster.hosts)]
    python = ctx.params["python"] or this_machine.default_python()
    requirements = Requirements(
        pythons={host.name: host.python or python for host in hosts},
        workdirs={host.name: host.workdir or str(Path.cwd()) for host in hosts},
        interface=ctx.params["iface"],
    )
    return await survey_hosts(hosts, ssh, requirements, "full", only=("ports", "link"))


def run(ctx: click.Context, cluster: Cluster, via: Via,
        spec: Mapping[str, Any]) -> Measured:  # fmt: skip
    """Runs the job: the table, what it says of itself, and the wires; JobError when it fails."""
    from paceline.cli.launch import tell_libraries
    from paceline.launch.launcher import run_job
    from paceline.launch.screen import Screen
    from paceline.launch.summary import report_failure
    from paceline.rundir.records import read_object
    from paceline.spec import rundir as names

    if via.transport is None:
        raise SettingError(
            "bench collectives runs here, not in a batch", remedy="In an allocation, type it again"
        )
    entry = Entry("module", MODULE, (json.dumps(spec),))
    job = job_of(ctx, entry, name="collectives")
    outcome = run_job(
        job,
        cluster,
        via.transport,
        Screen("none"),
        run_dir=ctx.params["run_dir"],
        parent=Path(names.DEFAULT_PARENT),
        package=bandwidth.PARTS,
    )
    if job.debug.value:
        tell_libraries(outcome.path)
    if outcome.result.exit_code:
        raise JobError(
            "the collectives failed",
            found=report_failure(outcome),
            exit_code=outcome.result.exit_code,
        )
    about = json.loads((outcome.path / RESULT).read_text(encoding="utf-8"))
    rows = tuple(Row.from_json(row) for row in about.pop("rows"))
    plan, facts = (read_object(outcome.path / name) or {} for name in (names.PLAN, names.HOSTS))
    return rows, about, link_rates.nominal_rates(plan, facts) if plan else {}


def hosts_of(found: Found) -> list[str]:
    """The hosts of the links, in the order in which people count: n2 before n10."""
    names = {name for pair in (*found.links, *found.ways.rates) for name in pair}
    return sorted(names, key=lambda name: [(len(w), w) for w in re.findall(r"\d+|\D+", name)])


def slowest(found: Found) -> float:
    """Bits a second of the slowest link; 0 when none was measured."""
    return min(found.links.values(), default=0.0)


def judge(found: Found, min_busbw: float | None, min_share: float | None) -> list[str]:
    """What is wrong or too slow, in words. Pure."""
    problems = [
        f"{row.collective} of {row.size} bytes: {row.wrong_values} wrong values"
        for row in found.rows
        if row.wrong_values
    ]
    best = bandwidth.peak_bandwidth(found.rows, "all_reduce")
    if min_busbw is not None and best < min_busbw:
        problems.append(f"all_reduce reaches {best:.4f} GB/s, {min_busbw:g} were asked for")
    share = bandwidth.share(best, slowest(found))
    if min_share is not None and found.links and share < min_share:
        problems.append(
            f"all_reduce uses {share:.0%} of the slowest link, {min_share:.0%} were asked for"
        )
    return problems


_ABOVE_TCP = (
    ", more than TCP reached alone on the slowest link: that measurement was disturbed, "
    "or the backend does not use TCP"
)


def conclusion(found: Found, problems: Sequence[str]) -> str:
    """The first line."""
    if problems:
        return f"failed: {problems[0]}"
    best = bandwidth.peak_bandwidth(found.rows, "all_reduce")
    ranks, nodes = int(found.about["ranks"]), int(found.about["nodes"])
    where = f"{counted(ranks, 'rank')} on {counted(nodes, 'host')}"
    text = f"{found.about['backend']}, {where}"
    if best:
        text += f": all_reduce {best:.3f} GB/s on the bus"
    if best and found.links and int(found.about["ranks"]) == int(found.about["nodes"]):
        share = bandwidth.share(best, slowest(found))
        text += f", {share:.0%} of the slowest link's TCP rate" if share <= 1 else _ABOVE_TCP
    return text + "".join(f"; {words}" for words in found.slow)


def show(found: Found, problems: Sequence[str]) -> None:
    """Conclusion, table, matrix of links."""
    from paceline.report import findings as report
    from paceline.spec.figures import bit_rate

    say(conclusion(found, problems) + "\n")
    say("\n".join([*devices(found), *bandwidth.format_rows(found.rows)]))
    names = hosts_of(found)
    if found.links:
        cells = {pair: bit_rate(bits) for pair, bits in found.links.items()}
        say("TCP between hosts")
        say("\n".join(report.aligned(*report.matrix(names, cells, "from \\ to"))))
    if found.ways.rates:
        cells = {pair: bit_rate(8 * own) for pair, own in found.ways.rates.items()}
        say(f"{found.about['backend']} between hosts (of a host to itself: between two ranks)")
        say("\n".join(report.aligned(*report.matrix(names, cells, "from \\ to"))))
    for line in limits(found):
        say(line)
    if found.iperf3:
        source, target, bits = found.iperf3
        say(f"iperf3 from {source} to {target}: {bit_rate(bits)}")
    for problem in problems[1:]:
        say(problem)


def devices(found: Found) -> list[str]:
    """Who computes on what, as nccl-tests begins."""
    every = found.about.get("devices") or ()
    return ["# Using devices", *(
        f"#  Rank {at:>2} Group  0 Pid {one['pid']:>6} on {one['host']} device {one['device']:>2} "
        f"{one['name']}" for at, one in enumerate(every)
    ), "#"]  # fmt: skip


def limits(found: Found) -> list[str]:
    """What wire and card of each host are good for, beside what was reached."""
    lines = []
    for place in found.ways.hosts:
        parts = [f"copies {link_rates.format_rate(place.copy)} in memory"]
        if place.host in found.wires:
            parts.insert(0, f"wire {link_rates.format_rate(found.wires[place.host] / 8)}")
        if place.bus:
            good = link_rates.format_rate(link_rates.slot_rate(place.slot)) if place.slot else ""
            of = f" of {good} ({place.slot})" if good else ""
            parts.append(f"feeds its card {link_rates.format_rate(place.bus)}{of}")
        lines.append(f"{place.host}: {place.device}: {', '.join(parts)}")
    best = bandwidth.peak_bandwidth(found.rows, "all_reduce")
    least = min(found.wires.values(), default=0.0)
    if best and least and int(found.about["nodes"]) > 1:
        share = bandwidth.share(best, least)
        lines.append(f"all_reduce uses {share:.0%} of the slowest wire on the bus")
    return lines


def draw(path: Path, found: Found) -> None:
    """Writes the heat map."""
    from paceline.report.heatmap import svg
    from paceline.spec.figures import bit_rate

    names = hosts_of(found)
    labels = {pair: bit_rate(bits) for pair, bits in found.links.items()}
    path.write_text(svg(names, found.links, labels, "TCP between hosts"), encoding="utf-8")


def to_json(found: Found, problems: Sequence[str]) -> dict[str, Any]:
    """The object of ``--json``."""
    return {
        "conclusion": conclusion(found, problems),
        "problems": list(problems),
        **found.about,
        "rows": [asdict(row) for row in found.rows],
        "links": [
            {"from": source, "to": target, "bits_per_s": bits}
            for (source, target), bits in found.links.items()
        ],
        "slow": list(found.slow),
        "ways": found.ways.to_json(),
        "wires": dict(found.wires),
        "iperf3": dict(zip(("from", "to", "bits_per_s"), found.iperf3 or (), strict=False)) or None,
    }
