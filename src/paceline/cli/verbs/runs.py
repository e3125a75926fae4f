"""``paceline runs``: all runs, below runs/ and on hosts, one a row."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.cluster import read_chosen_cluster
from paceline.cli.dispatch import ssh_options
from paceline.cli.options import ACCEPT_NEW_HOST_KEYS, HOSTS_OF_RUNS, SSH_CONFIG, settings_options
from paceline.cli.runs.run_lookup import is_run
from paceline.cli.runs.state import last_started_at, read_state
from paceline.cli.verb import Verb, say
from paceline.remote.openssh import SshOptions
from paceline.rundir import detached_file, records
from paceline.rundir.ownership import detached_of, read_of_last_start
from paceline.schedulers.submission import read_submission
from paceline.spec import rundir as names
from paceline.spec.detached import DETACHED, SupervisorLocation
from paceline.spec.formatting import format_duration_short, shell_text
from paceline.spec.hosts import Host
from paceline.spec.rundir import DEFAULT_PARENT
from paceline.spec.terminal import clean, columns, format_for

if TYPE_CHECKING:
    from paceline.cli.runs.detached import DetachedRun, DetachedRuns


HIGHER_IS_BETTER = ("accuracy", "top1", "top5", "bleu", "chrf", "f1", "auc")
LOWER_IS_BETTER = ("loss", "perplexity", "error")
SPLITS_WITHOUT_METRICS = (
    "pace",
    "norms",
    "usage",
)  # splits of records that tell of the training's course
TRAINING = b'"split": "train"'  # in most lines of metrics.jsonl
TAIL_BYTES = 16 << 10  # of metrics.jsonl: where a run is, and its loss without evaluations
MAX_WIDTHS = {"run": 26, "state": 12, "hosts": 14, "best": 21}  # columns of characters
MIN_WIDTHS = {"hosts": 8, "run": 20, "state": 11, "best": 12}  # in this order, in a narrow terminal
MIN_COMMAND_WIDTH = 24  # columns; with fewer it has a line of its own


@dataclass(frozen=True, slots=True)
class Row:
    """One run.

    Attributes:
        run: Its folder below runs/, or its name on the host where it was left.
        state: ``running``, ``waiting`` (for nodes), ``finished``, ``failed``, ``stopped``,
            ``lost``, ``ended`` (how is not known), or a scheduler's word.
        started: In seconds since 1970; 0: not known.
        step, steps: Done, and of the whole training; ``None`` if not known.
        best: The best figure, as ``test accuracy 0.93``.
        run_id: As hosts know it; may be empty.
        on: The host that supervises it, or did; empty for one that is all here.
        here: It has a folder here.
    """

    run: str
    state: str
    exit_code: int | None = None
    started: float = 0.0
    hosts: tuple[str, ...] = ()
    step: int | None = None
    steps: int | None = None
    best: str = ""
    command: str = ""
    run_id: str = ""
    on: str = ""
    here: bool = True


@click.command("runs", cls=Verb)
@settings_options(HOSTS_OF_RUNS, SSH_CONFIG, ACCEPT_NEW_HOST_KEYS)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--prune", is_flag=True,
              help="Remove files of ended runs from the hosts. If a run has a folder below runs/"
                   " here, fetch its results into it first.")  # fmt: skip
@click.pass_context
def command(ctx: click.Context, /, as_json: bool, prune: bool, **_: object) -> None:
    """List the runs below runs/ and detached runs on hosts.

    The hosts are those of -H or of paceline.toml, and those that supervise detached runs which were
    started in this folder.
    """
    parent = Path(DEFAULT_PARENT)
    folders = [path for path in records.folders_in(parent) if is_run(path)]
    cluster = read_chosen_cluster(ctx).hosts if ctx.params["hosts"] is not None else ()
    import asyncio

    detached_runs = asyncio.run(_query_hosts(cluster, ssh_options(ctx.params), folders))
    if prune:
        detached_runs = _prune(detached_runs, folders, cluster, ssh_options(ctx.params))
    by_id = {run.info.run_id: run for run in detached_runs.runs}
    rows = [_row_of_folder(path, path.name, by_id) for path in folders]
    rows += [_row_of_folder(task, f"{path.name}/{task.name}", by_id)
             for path in folders if (job := read_submission(path))
             for task in job.task_folders().values()]  # fmt: skip
    local_ids = {row.run_id for row in rows}
    rows += [row_of_detached(run) for run in detached_runs.runs if run.info.run_id not in local_ids]
    rows.sort(key=lambda row: row.started, reverse=True)
    if as_json:
        listed = [asdict(row) for row in rows]
        unasked = [{"host": host, "why": reason} for host, reason in detached_runs.unreachable]
        click.echo(json.dumps({"runs": listed, "not_asked": unasked}, indent=2))
    elif rows:
        say("\n".join(table(rows, time.time(), columns())))
    else:
        place = f" and on {len(cluster)} hosts" if cluster else ""
        say(f"paceline: no runs below {parent.absolute()}{place}", err=True)
    for host, reason in detached_runs.unreachable:
        text = f"paceline: {host} could not be asked: {reason}"
        say(format_for(text, sys.stderr), err=True)


async def _query_hosts(
    hosts: Sequence[Host], ssh: SshOptions, folders: Iterable[Path]
) -> DetachedRuns:
    """Asks the named hosts, and those that supervise runs of this folder, for their runs."""
    import asyncio

    from paceline.cli.runs.detached import DetachedRuns, find_detached

    other_hosts: dict[str | None, dict[tuple[Any, ...], Host]] = {}
    foreign = list[tuple[str, str]]()
    named_hosts = {(host.address, host.user, host.port) for host in hosts}
    for path in folders:
        supervisor = detached_of(path)
        if supervisor is None:
            continue
        key = supervisor.address, supervisor.user, supervisor.port
        if not detached_file.is_authentic(path):
            foreign.append((supervisor.host, f"{path / DETACHED} was not written by you"))
        elif key not in named_hosts:
            other_hosts.setdefault(supervisor.ssh_config, {})[key] = supervisor.to_host()
    queries = [find_detached(hosts, ssh)] if hosts else []
    queries += [find_detached([*group.values()], SshOptions(Path(config) if config else None))
              for config, group in other_hosts.items()]  # fmt: skip
    answers = await asyncio.gather(*queries)
    runs = {run.info.run_id: run for answer in answers for run in answer.runs}
    unreachable = dict(pair for answer in answers for pair in answer.unreachable)
    return DetachedRuns(tuple(runs.values()), (*unreachable.items(), *foreign))


def _prune(
    detached_runs: DetachedRuns, folders: Sequence[Path], hosts: Sequence[Host], ssh: SshOptions
) -> DetachedRuns:
    """Brings home what belongs here, and removes what is over on the hosts that were asked."""
    import asyncio

    from paceline.cli.runs.detached import find_detached
    from paceline.cli.runs.sync import try_sync

    ended = {run.info.run_id: run for run in detached_runs.runs if run.state != "running"}
    removed: dict[str, DetachedRun] = {}
    for path in folders:
        supervisor = detached_of(path)
        if supervisor is not None and supervisor.run_id in ended:
            run = ended.pop(supervisor.run_id)
            try_sync(path)
            if detached_of(path) is None:  # else it could not come: it stays where it is
                removed[supervisor.run_id] = run
    named_hosts = {(host.address, host.user, host.port) for host in hosts}
    obsolete = {run_id: run for run_id, run in ended.items()
            if (run.host.address, run.host.user, run.host.port) in named_hosts}  # fmt: skip
    if obsolete:
        remaining = asyncio.run(find_detached(hosts, ssh, discard=[*obsolete]))
        stay = {run.info.run_id for run in remaining.runs}  # somebody reads them
        unasked = {host for host, _ in remaining.unreachable}
        removed |= {run_id: run for run_id, run in obsolete.items()
                    if run_id not in stay and run.host.name not in unasked}  # fmt: skip
    for run in removed.values():
        say(clean(f"paceline: removed from {run.host.name}: {run.name}"), err=True)
    runs = tuple(run for run in detached_runs.runs if run.info.run_id not in removed)
    return replace(detached_runs, runs=runs)


def _row_of_folder(path: Path, name: str, detached_runs: Mapping[str, DetachedRun]) -> Row:
    state = read_state(path)
    supervisor, plan = state.supervisor, records.read_object(path / names.PLAN) or {}
    if supervisor is not None and supervisor.run_id in detached_runs:
        return replace(row_of_detached(detached_runs[supervisor.run_id]), run=name, here=True)
    row_state = "waiting" if state.waiting else state.word
    hosts = [
        records.as_text(node.get("host"), 255) for node in records.objects_in(plan.get("nodes"))
    ]
    recorded = _recorded(path / names.METRICS)
    step, steps = _steps(read_of_last_start(path, names.RANKS) or {}, recorded)
    record = SupervisorLocation.read(records.read_object(path / DETACHED) or {})
    return Row(
        name, row_state, state.exit_code, last_started_at(path) or path.lstat().st_mtime,
        tuple(hosts), step, steps,
        best_metric(recorded), _command(plan), "" if record is None else record.run_id,
        "" if supervisor is None else supervisor.host,
    )  # fmt: skip


def _recorded(path: Path) -> list[dict[str, Any]]:
    """Reads all records of evaluations and the last record: there may be many long files."""
    evaluations = records.read_records(path, but=TRAINING)
    return evaluations + records.read_records(path, TAIL_BYTES)


def row_of_detached(run: DetachedRun) -> Row:
    info, state = run.info, run.state
    code = info.exit_code if info.ended is not None else None
    lines = (records.parse_json(line) for line in run.metrics.splitlines())
    recorded = [line for line in lines if isinstance(line, dict)]
    ranks = records.parse_json(run.ranks)
    ranks = ranks if isinstance(ranks, dict) else {}
    state = "waiting" if state == "running" and ranks.get("waits") else state
    step, steps = _steps(ranks, recorded)
    command = shell_text(info.command) if info.command else ""
    return Row(run.name, state, code, info.started, info.hosts, step, steps, best_metric(recorded),
               command, info.run_id, run.host.name, here=False)  # fmt: skip


def _command(plan: Mapping[str, Any]) -> str:
    typed, entry = records.object_in(plan, "typed").get("command"), records.object_in(plan, "entry")
    if isinstance(typed, str):
        return typed
    if not entry:
        return ""
    target, args = records.as_text(entry.get("target")), entry.get("args")
    if target.startswith("paceline.recipes."):
        return f"paceline train {target.rsplit('.', 1)[-1]}"
    arguments = [arg for arg in args if isinstance(arg, str)] if isinstance(args, list) else []
    module = ["-m", target] if entry.get("kind") == "module" else [target.rsplit("/", 1)[-1]]
    return shell_text(["paceline", "run", *module, *arguments])


def _steps(ranks: Mapping[str, Any],
           recorded: Sequence[Mapping[str, Any]]) -> tuple[int | None, int | None]:  # fmt: skip
    progress = records.object_in(ranks, "progress")
    candidates = [record.get("step") for record in (*recorded[-20:], progress)]
    steps = [step for step in map(records.as_int, candidates) if step is not None]
    return max(steps, default=None), records.as_int(progress.get("steps"))


def best_metric(recorded: Iterable[Mapping[str, Any]]) -> str:
    """Returns the best figure of evaluations, else the lowest loss of the training."""
    values: dict[tuple[str, str], list[float]] = {}
    for record in recorded:
        split = record.get("split")
        if not isinstance(split, str) or split in SPLITS_WITHOUT_METRICS:
            continue
        for name in (*HIGHER_IS_BETTER, *LOWER_IS_BETTER):
            value = record.get(name)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                values.setdefault((split, name), []).append(float(value))
    if not values:
        return ""
    order = (*HIGHER_IS_BETTER, *LOWER_IS_BETTER)
    split, name = min(values, key=lambda key: (key[0] == "train", order.index(key[1])))
    best = (max if name in HIGHER_IS_BETTER else min)(values[split, name])
    return f"{split} {name} {best:.4g}"


def table(rows: Sequence[Row], clock: float, width: int) -> list[str]:
    """Lines for people; where they are narrow, a run's command has a line of its own."""
    titles = ("run", "state", "age", "hosts", "step", "best")
    cells = [_cells(row, clock) for row in rows]
    sizes = [min(MAX_WIDTHS.get(title, 99), max(len(title), *(len(row[at]) for row in cells)))
             for at, title in enumerate(titles)]  # fmt: skip
    for title, minimum in MIN_WIDTHS.items():
        excess = sum(sizes) + 2 * (len(sizes) - 1) - width
        at = titles.index(title)
        sizes[at] -= max(0, min(excess, sizes[at] - minimum))
    command_width = width - sum(sizes) - 2 * len(sizes)
    is_inline = command_width >= MIN_COMMAND_WIDTH
    lines = [(_line(titles, sizes) + ("  command" if is_inline else "")).rstrip()]
    for row, cells_of_row in zip(rows, cells, strict=True):
        line, command = _line(cells_of_row, sizes), clean(row.command)
        if is_inline and command:
            line = f"{line}  {_truncate(command, command_width)}"
        lines.append(line.rstrip()[:width])
        if not is_inline and command:
            lines.append(f"    {_truncate(command, width - 4)}")
    return lines


def _cells(row: Row, clock: float) -> tuple[str, ...]:
    code = f" ({row.exit_code})" if row.state == "failed" and row.exit_code else ""
    hosts = ", ".join(row.hosts) if len(row.hosts) <= 3 else f"{len(row.hosts)} hosts"
    step = "" if row.step is None else f"{row.step}/{row.steps}" if row.steps else f"{row.step}"
    run = row.run if row.here else f"{row.run} @{row.on}"
    age = format_duration_short(clock - row.started) if row.started else ""
    return tuple(map(clean, (run, f"{row.state}{code}", age, hosts, step, row.best)))


def _line(cells: Sequence[str], sizes: Sequence[int]) -> str:
    padded = [f"{_truncate(cell, size):{size}}" for cell, size in zip(cells, sizes, strict=True)]
    return "  ".join(padded)


def _truncate(text: str, size: int) -> str:
    return text if len(text) <= size else f"{text[: size - 1]}…"
