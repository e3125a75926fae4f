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

from paceline.cli.flags import (
    ACCEPT_NEW_HOST_KEYS,
    HOSTS_OF_RUNS,
    SSH_CONFIG,
    with_settings,
)
from paceline.cli.launch import read_cluster
from paceline.cli.runs import is_run, look_at
from paceline.cli.verb import Verb, say
from paceline.cli.via import ssh_of
from paceline.remote.openssh import SshOptions
from paceline.rundir import detached_file, records
from paceline.rundir.ownership import detached_of
from paceline.spec import rundir as names
from paceline.spec.command import shell_text
from paceline.spec.detached import DETACHED, Detached
from paceline.spec.figures import roughly
from paceline.spec.hosts import Host
from paceline.spec.rundir import DEFAULT_PARENT
from paceline.spec.terminal import clean, columns, for_reader

if TYPE_CHECKING:
    from paceline.cli.elsewhere import Found, Left

MORE_IS_BETTER = ("accuracy", "top1", "top5", "bleu", "chrf", "f1", "auc")
LESS_IS_BETTER = ("loss", "perplexity", "error")
NO_FIGURES = ("pace", "norms", "usage")  # splits of records that tell of the training's course
TRAINING = b'"split": "train"'  # in most lines of metrics.jsonl
LAST_BYTES = 16 << 10  # of metrics.jsonl: where a run is, and its loss without evaluations
WIDEST = {"run": 26, "state": 12, "hosts": 14, "best": 21}  # columns of characters
NARROWEST = {"hosts": 8, "run": 20, "state": 9, "best": 12}  # in this order, in a narrow terminal
LEAST_COMMAND = 24  # columns; with fewer it has a line of its own


@dataclass(frozen=True, slots=True)
class Row:
    """One run.

    Attributes:
        run: Its folder below runs/, or its name on the host where it was left.
        state: ``running``, ``waiting`` (for nodes), ``finished``, ``failed``, ``stopped``,
            ``lost``, ``ended`` (how is not known), or a scheduler's word.
        exit_code: Once it has ended.
        started: In seconds since 1970; 0: not known.
        hosts: Their names.
        step, steps: Done, and of the whole training; ``None`` where not known.
        best: The best figure, as ``test accuracy 0.93``.
        command: As it was typed, as far as it is known.
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


def _options(command: Any) -> Any:
    return with_settings(command, [HOSTS_OF_RUNS, SSH_CONFIG, ACCEPT_NEW_HOST_KEYS])


@click.command("runs", cls=Verb)
@_options
@click.option("--json", "as_json", is_flag=True, help="Print them as JSON.")
@click.option("--prune", is_flag=True,
              help="Remove from hosts what is left there of runs that are over; what belongs to a"
              " run below runs/ is brought home before.")  # fmt: skip
@click.pass_context
def command(ctx: click.Context, /, as_json: bool, prune: bool, **_: object) -> None:
    """List the runs below runs/ and those that were left on hosts.

    Hosts are those of -H or of paceline.toml, and those that supervise runs of this folder.
    """
    parent = Path(DEFAULT_PARENT)
    here = [path for path in records.folders_in(parent) if is_run(path)]
    source = ctx.params["hosts"]
    cluster = read_cluster(ctx, source).hosts if source is not None else ()
    import asyncio

    found = asyncio.run(_ask(cluster, ssh_of(ctx.params), here))
    if prune:
        found = _prune(found, here, cluster, ssh_of(ctx.params))
    known = {left.about.run_id: left for left in found.runs}
    rows = [_of_folder(path, known) for path in here]
    ours = {row.run_id for row in rows}
    rows += [of_left(left) for left in found.runs if left.about.run_id not in ours]
    rows.sort(key=lambda row: row.started, reverse=True)
    if as_json:
        about = [asdict(row) for row in rows]
        unasked = [{"host": host, "why": why} for host, why in found.refused]
        click.echo(json.dumps({"runs": about, "not_asked": unasked}, indent=2))
    elif rows:
        say("\n".join(table(rows, time.time(), columns())))
    else:
        where = f" and on {len(cluster)} hosts" if cluster else ""
        say(f"paceline: no runs below {parent.absolute()}{where}", err=True)
    for host, why in found.refused:
        text = f"paceline: {host} could not be asked: {why}"
        say(for_reader(text, sys.stderr), err=True)


async def _ask(hosts: Sequence[Host], ssh: SshOptions, here: Iterable[Path]) -> Found:
    """What hosts tell: those that are named, and those that supervise runs of this folder."""
    import asyncio

    from paceline.cli.elsewhere import Found, left_on

    others: dict[str | None, dict[tuple[Any, ...], Host]] = {}
    foreign = list[tuple[str, str]]()
    known = {(host.address, host.user, host.port) for host in hosts}
    for path in here:
        away = detached_of(path)
        if away is not None and not detached_file.is_authentic(path):
            foreign.append((away.host, f"{path / DETACHED} was not written by you"))
        elif away is not None and (away.address, away.user, away.port) not in known:
            host = away.to_host()
            key = host.address, host.user, host.port
            others.setdefault(away.ssh_config, {})[key] = host
    asked = [left_on(hosts, ssh)] if hosts else []
    asked += [left_on([*group.values()], SshOptions(Path(config) if config else None))
              for config, group in others.items()]  # fmt: skip
    answers = await asyncio.gather(*asked)
    runs = {left.about.run_id: left for answer in answers for left in answer.runs}
    refused = dict(pair for answer in answers for pair in answer.refused)
    return Found(tuple(runs.values()), (*refused.items(), *foreign))


def _prune(found: Found, here: Sequence[Path], hosts: Sequence[Host], ssh: SshOptions) -> Found:
    """Brings home what belongs here, and removes what is over on the hosts that were asked."""
    import asyncio

    from paceline.cli.elsewhere import as_far_as_possible, left_on

    over = {left.about.run_id: left for left in found.runs if left.word != "running"}
    removed: dict[str, Left] = {}
    for path in here:
        away = detached_of(path)
        if away is not None and away.run_id in over:
            left = over.pop(away.run_id)
            as_far_as_possible(path)
            if detached_of(path) is None:  # else it could not come: it stays where it is
                removed[away.run_id] = left
    named = {(host.address, host.user, host.port) for host in hosts}
    gone = {run_id: left for run_id, left in over.items()
            if (left.host.address, left.host.user, left.host.port) in named}  # fmt: skip
    if gone:
        after = asyncio.run(left_on(hosts, ssh, discard=[*gone]))
        stay = {left.about.run_id for left in after.runs}  # somebody reads them
        unasked = {host for host, _ in after.refused}
        removed |= {run_id: left for run_id, left in gone.items()
                    if run_id not in stay and left.host.name not in unasked}  # fmt: skip
    for left in removed.values():
        say(clean(f"paceline: removed from {left.host.name}: {left.name}"), err=True)
    rest = tuple(left for left in found.runs if left.about.run_id not in removed)
    return replace(found, runs=rest)


# --- rows ---------------------------------------------------------------------------------------


def _of_folder(path: Path, left: Mapping[str, Left]) -> Row:
    """A run with a folder here; where it is on a host, as that tells."""
    state = look_at(path)
    away, plan = state.away, records.read_object(path / names.PLAN) or {}
    if away is not None and away.run_id in left:
        return replace(of_left(left[away.run_id]), run=path.name, here=True)
    word = "waiting" if state.waits else state.word
    nodes = plan.get("nodes")
    hosts = [records.as_text(one.get("host"), 255) for one in nodes if isinstance(one, dict)] if (
        isinstance(nodes, list)) else []  # fmt: skip
    recorded = _recorded(path / names.METRICS)
    step, steps = _steps(records.read_object(path / names.RANKS) or {}, recorded)
    known = Detached.read(records.read_object(path / DETACHED) or {})
    return Row(
        path.name, word, state.exit_code, _started(path), tuple(hosts), step, steps,
        best_of(recorded), _command(plan), "" if known is None else known.run_id,
        "" if away is None else away.host,
    )  # fmt: skip


def _recorded(path: Path) -> list[dict[str, Any]]:
    """All records of evaluations, and the last of all: there may be many runs with long records."""
    evaluations = records.read_records(path, but=TRAINING)
    return evaluations + records.read_records(path, LAST_BYTES)


def of_left(left: Left) -> Row:
    """A run that was left on a host."""
    about, word = left.about, left.word
    code = about.exit_code if about.ended is not None else None
    lines = (records.parse_json(line) for line in left.metrics.splitlines())
    recorded = [line for line in lines if isinstance(line, dict)]
    where = records.parse_json(left.where)
    where = where if isinstance(where, dict) else {}
    word = "waiting" if word == "running" and where.get("waits") else word
    step, steps = _steps(where, recorded)
    typed = shell_text(about.command) if about.command else ""
    return Row(left.name, word, code, about.started, about.hosts, step, steps, best_of(recorded),
               typed, about.run_id, left.host.name, here=False)  # fmt: skip


def _started(path: Path) -> float:
    """When a run began: by its first event, else by its folder."""
    first = next(iter(records.read_records(path / names.EVENTS, 1 << 12)), {})
    return records.as_float(first.get("time")) or path.lstat().st_mtime


def _command(plan: Mapping[str, Any]) -> str:
    """The command of a run, as its plan has it; else what its ranks run."""
    typed, entry = plan.get("typed"), plan.get("entry")
    if isinstance(typed, dict) and isinstance(typed.get("command"), str):
        return str(typed["command"])
    if not isinstance(entry, dict):
        return ""
    target, args = records.as_text(entry.get("target")), entry.get("args")
    if target.startswith("paceline.recipes."):
        return f"paceline train {target.rsplit('.', 1)[-1]}"
    given = [one for one in args if isinstance(one, str)] if isinstance(args, list) else []
    module = ["-m", target] if entry.get("kind") == "module" else [target.rsplit("/", 1)[-1]]
    return shell_text(["paceline", "run", *module, *given])


def _steps(where: Mapping[str, Any],
           recorded: Sequence[Mapping[str, Any]]) -> tuple[int | None, int | None]:  # fmt: skip
    """The last step, and how many there are to be."""
    told = where.get("progress")
    told = told if isinstance(told, dict) else {}
    done = [records.as_int(one.get("step")) for one in recorded[-20:]]
    step = max((one for one in [*done, records.as_int(told.get("step"))] if one is not None),
               default=None)  # fmt: skip
    return step, records.as_int(told.get("steps"))


def best_of(recorded: Iterable[Mapping[str, Any]]) -> str:
    """The best figure among records: of an evaluation, else the least loss of the training."""
    found: dict[tuple[str, str], list[float]] = {}
    for one in recorded:
        split = one.get("split")
        if not isinstance(split, str) or split in NO_FIGURES:
            continue
        for name in (*MORE_IS_BETTER, *LESS_IS_BETTER):
            value = one.get(name)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                found.setdefault((split, name), []).append(float(value))
    order = (*MORE_IS_BETTER, *LESS_IS_BETTER)
    for key in sorted(found, key=lambda key: (key[0] == "train", order.index(key[1]))):
        split, name = key
        best = (max if name in MORE_IS_BETTER else min)(found[key])
        return f"{split} {name} {best:.4g}"
    return ""


# --- the table ----------------------------------------------------------------------------------


def table(rows: Sequence[Row], now: float, width: int) -> list[str]:
    """Lines for people; where they are narrow, a run's command has a line of its own."""
    titles = ("run", "state", "age", "hosts", "step", "best")
    cells = [_cells(row, now) for row in rows]
    sizes = [min(WIDEST.get(title, 99), max(len(title), *(len(row[at]) for row in cells)))
             for at, title in enumerate(titles)]  # fmt: skip
    for title, least in NARROWEST.items():
        too_many = sum(sizes) + 2 * (len(sizes) - 1) - width
        at = titles.index(title)
        sizes[at] -= max(0, min(too_many, sizes[at] - least))
    left = width - sum(sizes) - 2 * len(sizes)
    beside = left >= LEAST_COMMAND
    lines = [(_line(titles, sizes) + ("  command" if beside else "")).rstrip()]
    for row, own in zip(rows, cells, strict=True):
        line, typed = _line(own, sizes), clean(row.command)
        if beside and typed:
            line = f"{line}  {_cut(typed, left)}"
        lines.append(line.rstrip()[:width])
        if not beside and typed:
            lines.append(f"    {_cut(typed, width - 4)}")
    return lines


def _cells(row: Row, now: float) -> tuple[str, ...]:
    state = f"{row.state} ({row.exit_code})" if row.state == "failed" and row.exit_code else (
        row.state)  # fmt: skip
    hosts = ", ".join(row.hosts) if len(row.hosts) <= 3 else f"{len(row.hosts)} hosts"
    step = "" if row.step is None else f"{row.step}/{row.steps}" if row.steps else f"{row.step}"
    run = row.run if row.here else f"{row.run} @{row.on}"
    age = roughly(now - row.started) if row.started else ""
    return tuple(map(clean, (run, state, age, hosts, step, row.best)))


def _line(cells: Sequence[str], sizes: Sequence[int]) -> str:
    padded = [f"{_cut(cell, size):{size}}" for cell, size in zip(cells, sizes, strict=True)]
    return "  ".join(padded)


def _cut(text: str, size: int) -> str:
    return text if len(text) <= size else f"{text[: size - 1]}…"
