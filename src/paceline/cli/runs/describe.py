"""The state of a run as text."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.cli.runs.lost import describe_lost as lost_lines
from paceline.cli.runs.lost import describe_resume
from paceline.cli.runs.state import RunState
from paceline.rundir import records
from paceline.spec.failure import format_location
from paceline.spec.formatting import (
    DATE_TIME,
    format_bit_rate,
    format_duration,
    format_epoch,
    format_time,
)

MIN_SILENCE_S = 5.0  # of a rank that is told of: others say where they are each second
_MAX_LISTED = 4  # ranks in a line
_MAX_TASKS = 8  # of a job array


def describe_run(state: RunState) -> str:
    suffix = ", waits for nodes" if state.waiting else ""
    lines = [f"{_describe_end(state)}{suffix}"]
    if state.waiting:
        lines.append(f"  {state.waiting.description}")
    if state.job:
        lines.append(f"  {state.job.title}")
    if state.progress:
        lines.append(f"  {state.progress}")
    lines += [f"  {line}" for line in describe_tasks(state.tasks)]
    if state.owner and state.word == "running":
        owner = state.owner
        lines.append(
            f"  launcher: process {owner['pid']} on {owner['host']} since {owner['since']}"
        )
    if state.supervisor:
        start = format_time(state.supervisor.since, DATE_TIME)
        lines.append(f"  supervisor: on {state.supervisor.host} since {start}")
    if state.lost:
        lines += [f"  {line}" for line in lost_lines(state.lost, time.time())]
    if state.last_metrics:
        metrics = [(name, value) for name, value in state.last_metrics.items() if name != "time"]
        figures = ", ".join(_figure(name, value) for name, value in metrics[:6])
        lines.append(f"  last record{_record_time(state.last_metrics)}: {figures}")
    # while nodes are waited for, what has become of the ranks of the last start is no news
    ranks = [rank for rank in state.ranks if not (state.waiting and rank.get("trouble"))]
    lines += [f"  {line}" for line in [*describe_ranks(ranks), *describe_loads(state.hosts)]]
    if state.hang:
        reported = f" (reported at {format_time(state.hang_time)})" if state.hang_time else ""
        lines.append(f"  hangs: {state.hang}{reported}")
    if state.straggler:
        lines.append(f"  slow: {state.straggler}")
    if state.replica_difference not in state.failure:  # nor empty
        lines.append(f"  warning: {state.replica_difference}")
    if state.failure:
        lines.append(f"  failed first: {state.failure}")
    if state.word == "stopped":
        lines += [f"  {line}" for line in describe_resume(state.path)]
    return "\n".join(lines)


def _describe_end(state: RunState) -> str:
    ended = f", exit status {state.exit_code}" if state.exit_code is not None else ""
    return f"{state.path}: {state.word}{ended}"


def describe_tasks(tasks: Sequence[RunState]) -> list[str]:
    """Returns a line for each of the first tasks of a job array."""
    lines = [_describe_end(task) for task in tasks[:_MAX_TASKS]]
    return lines + ([f"and {len(tasks) - _MAX_TASKS} more"] if len(tasks) > _MAX_TASKS else [])


def _record_time(record: Mapping[str, Any]) -> str:
    """Formats when a record was written, by this machine's clock: `` (12:03:44)``."""
    at = records.as_float(record.get("time"))
    return f" ({format_time(at)})" if 0 < at < 1e11 else ""


def _figure(name: str, value: Any) -> str:
    if name == "epoch" and (epoch := records.as_int(value)) is not None:
        return format_epoch(epoch)
    return f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}"


def describe_ranks(ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines that say who is where; ranks that are at the same place share one."""
    groups: dict[tuple[int, str, bool], list[Mapping[str, Any]]] = {}
    for rank in ranks:
        step = -1 if rank.get("step") is None else rank["step"]
        ended = "ended" if rank.get("state") == "ended" else rank.get("trouble")
        key = (step, ended or rank["phase"], not ended and silence_s(rank) >= MIN_SILENCE_S)
        groups.setdefault(key, []).append(rank)
    lines = []
    for (step, phase, is_silent), group in sorted(groups.items()):
        names = [format_location(rank["host"], rank["rank"]) for rank in group[:_MAX_LISTED]]
        remainder = f" and {len(group) - len(names)} more" if len(group) > len(names) else ""
        if len(group) == len(ranks) > 1:
            names, remainder = [f"all {len(ranks)} ranks"], ""
        quiet = f", no word for {format_duration(min(map(silence_s, group)))}" if is_silent else ""
        position = "" if step < 0 else f"step {step}, "
        lines.append(f"{', '.join(names)}{remainder}: {position}{phase}{quiet}")
    return lines


def silence_s(rank: Mapping[str, Any]) -> float:
    """Seconds since a rank's last word; 0 of one that tells nothing."""
    return float(rank.get("silent_s") or 0.0)


def describe_loads(hosts: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    lost_first = sorted(hosts, key=lambda host: host.get("state") != "lost")
    for host in lost_first[:_MAX_LISTED]:
        used = [("CPU", host.get("cpu")), ("memory", host.get("memory"))]
        used += [(f"GPU {at}", load) for at, load in enumerate(host.get("gpus") or ())]
        moved = [("receives", host.get("in_bps")), ("sends", host.get("out_bps"))]
        parts = [f"{name} {part:.0%}" for name, part in used if part is not None]
        parts += [
            f"{direction} {format_bit_rate(rate)}" for direction, rate in moved if rate is not None
        ]
        text = ", ".join(parts)
        if host.get("state") == "lost":
            text = str(host.get("trouble") or "lost")
        if text:
            lines.append(f"{host['name']}: {text}")
    if lines and len(hosts) > _MAX_LISTED:
        lines.append(f"and {len(hosts) - _MAX_LISTED} more hosts: --json")
    return lines
