"""Forecasts that were written: the fastest hosts by them, and a run compared with its own."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from paceline.rundir.records import (
    as_float,
    as_text,
    is_regular,
    objects_in,
    read_object,
    read_records,
)
from paceline.spec import rundir, schema
from paceline.spec.errors import PacelineError, SettingError
from paceline.spec.formatting import format_duration, pluralize
from paceline.spec.hosts import Cluster
from paceline.spec.job import Job
from paceline.spec.rundir import DEFAULT_PARENT, FORECAST
from paceline.spec.terminal import clean, wrap

FOLDER_PREFIX = "forecast-"  # begins the names of folders of forecasts


def find_forecasts(run: Path) -> tuple[list[Path], list[Path]]:
    """Folders in which forecasts may lie that were made before a run, and those that do."""
    folders = sorted({run.absolute().parent, Path(DEFAULT_PARENT).absolute()})
    name = f"{FOLDER_PREFIX}*/{FORECAST}"
    return folders, [path for folder in folders for path in folder.glob(name)]


_SCHEMA = schema.record(
    forecasts=schema.list_of(schema.record(
        hosts=schema.integer(1), names=schema.list_of(schema.text()), declined=schema.text(),
        limit=schema.text(), seconds=schema.number, low=schema.number, high=schema.number,
    )),
    model=schema.record(alone=schema.dict_of(schema.any_json)),
    command=schema.list_of(schema.any_json), ranks=schema.integer(1), weak=schema.boolean,
)  # fmt: skip
NOT_TIMED = ("data_dir", "log_every", "checkpoint_every", "keep", "checkpoint_copies")


@dataclass(frozen=True)
class SavedForecast:
    """A forecast.json, as far as runs are compared with it.

    Attributes:
        command: As of :func:`command_key`.
        weak: The batch of each host was fixed.
        ranks: On each host.
        processes: How ``-p`` named them, if it did.
        hosts: Names of those that there were.
        forecasts: One for each number of hosts.
    """

    path: Path
    command: list[str]
    weak: bool
    ranks: int
    processes: int | str | None
    hosts: frozenset[str]
    forecasts: tuple[dict[str, Any], ...]

    @classmethod
    def read(cls, path: Path) -> SavedForecast:
        """Reads a file with any content; SettingError if it is no forecast."""
        content = read_object(path) or {}
        is_valid = schema.matches(_SCHEMA, content) and len(content["command"]) >= 2
        if not is_valid or any(f["seconds"] <= 0 and not f["declined"]
                               for f in content["forecasts"]):  # fmt: skip
            raise SettingError(
                f"{path} is not a forecast", found="it is incomplete or damaged", remedy="Remove it"
            )
        kind, target, *args = content["command"]
        command, processes = {"kind": kind, "target": target, "args": args}, content.get("asked")
        return cls(
            path, command_key(command), content["weak"], content["ranks"],
            processes if isinstance(processes, int | str) else None,
            frozenset(content["model"]["alone"]), tuple(content["forecasts"]),
        )  # fmt: skip

    def of(self, command: Sequence[str],
           nodes: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:  # fmt: skip
        """Returns the forecast for these nodes of a plan; ``None`` for another command.

        Raises:
            SettingError: It was forecast for something else than these nodes.
        """
        if list(command) != self.command:
            return None
        forecast = next((f for f in self.forecasts if f["hosts"] == len(nodes)), None)
        names = {as_text(node.get("host")) for node in nodes}
        ranks = {len(node["ranks"]) if isinstance(node.get("ranks"), list) else 0 for node in nodes}
        if self.weak:
            problem = "it is of --weak: a larger batch on more hosts"
        elif forecast is None:
            problem = "it is of other numbers of hosts: --up-to goes further"
        elif forecast["declined"]:
            problem = f"nothing was forecast: {forecast['declined']}"
        elif ranks != {self.ranks}:
            problem = f"it is of {pluralize(self.ranks, 'rank')} on each host"
        elif missing := sorted(self.hosts.intersection(forecast["names"]) - names):
            problem = f"it is of other hosts: {', '.join(missing)}"
        else:
            return forecast
        raise SettingError(f"{self.path}: {problem}")


def command_key(entry: object) -> list[str]:
    """Returns a key by which the same command is recognised; empty if it has none.

    For a recipe it has the options that change a step: ``train`` writes ``--data-dir`` itself, and
    how often something is recorded or kept is no other training.
    """
    fields = entry if isinstance(entry, dict) else {}
    kind, target, args = fields.get("kind"), fields.get("target"), fields.get("args")
    arguments = [kind, target, *(args if isinstance(args, (list, tuple)) else ())]
    if not all(isinstance(argument, str) for argument in arguments):
        return []
    if kind != "module":
        return arguments
    from paceline.recipes import RECIPES  # a script does without
    from paceline.recipes.argv import parse, to_argv

    recipe = next((r for r in RECIPES.values() if target == r.module), None)
    excluded = ("-h", "--help", "--like")
    if recipe is None or any(argument.startswith(excluded) for argument in arguments[2:]):
        return arguments
    with contextlib.suppress(SettingError):
        ignored = {name: getattr(recipe.options(), name) for name in NOT_TIMED}
        options = replace(parse(recipe.options, arguments[2:], ""), **ignored)
        return [*arguments[:2], *to_argv(options)]
    return arguments


class SavedForecasts:
    """The forecasts made before a run; ``mismatches`` says why some of them do not fit."""

    def __init__(self, run: Path) -> None:
        self._folders, self._files = find_forecasts(run)
        self.mismatches: list[str] = []

    def __iter__(self) -> Iterator[SavedForecast]:
        """Yields those that can be read, the newest first."""

        def modified_at(path: Path) -> float:
            with contextlib.suppress(OSError):  # it is gone
                return path.stat().st_mtime
            return 0.0

        for path in sorted(filter(is_regular, self._files), key=modified_at, reverse=True):
            try:
                yield SavedForecast.read(path)
            except SettingError as error:
                self.mismatches.append(error.message)

    def error(self, message: str) -> SettingError:
        """Returns the error for a run that none of them fits."""
        searched = f"looked at {len(self._files)} in {', '.join(map(str, self._folders))}"
        return SettingError(
            message,
            found="\n".join([searched, *self.mismatches]),
            remedy="paceline forecast, with the same words, hosts and -p, in the same folder",
        )


def choose_fastest(job: Job, cluster: Cluster, run: Path) -> tuple[Cluster, str]:
    """Chooses the hosts with the shortest training in the newest forecast of the job's command.

    Forecasts are looked for beside the future run directory.

    Returns:
        The chosen hosts, in their order, and a line that says why these.

    Raises:
        SettingError: There is no such forecast, or it leaves no choice among these hosts.
    """
    if job.nnodes.value is not None:
        raise SettingError(
            "--fastest chooses how many hosts are taken, and so does --nnodes",
            remedy="Leave out one of the two",
        )
    all_names = tuple(host.name for host in cluster.hosts)
    names = set(all_names)
    command, saved_forecasts = command_key(asdict(job.entry)), SavedForecasts(run)
    for saved in saved_forecasts:
        if saved.command != command:
            continue
        processes, problem = job.nproc_per_node.value, ""
        candidates = [
            forecast
            for forecast in saved.forecasts
            if not forecast["declined"] and names.issuperset(forecast["names"])
        ]
        if saved.weak:
            problem = "it is of --weak: a larger batch on more hosts"
        elif processes not in (saved.processes, saved.ranks):
            problem = f"it is of {pluralize(saved.ranks, 'rank')} on each host"
        elif missing := sorted(names - saved.hosts):
            problem = f"nothing is known there of {', '.join(missing)}"
        elif candidates:
            fastest = min(candidates, key=lambda f: as_float(f.get("total")) or f["seconds"])
            hosts = tuple(host for host in cluster.hosts if host.name in fastest["names"])
            share = f"{len(hosts)} of {pluralize(len(names), 'host')}"
            host_names = ", ".join(host.name for host in hosts)
            duration = format_duration(fastest["seconds"])
            selected = replace(cluster, hosts=hosts, among=all_names)
            return selected, f"fastest by {saved.path}: {host_names} ({share}): {duration} a step"
        saved_forecasts.mismatches += [f"{saved.path}: {problem}"] if problem else []
    raise saved_forecasts.error("--fastest needs a forecast of this command on these hosts")


def compare_at_end(run: Path) -> str:
    """Compares a run that has ended with its forecast; empty if there is none."""
    with contextlib.suppress(PacelineError, OSError, ValueError):
        if find_forecasts(run)[1]:
            return wrap(f"paceline: {describe_comparison(save_comparison(run))}", 80)
    return ""


def save_comparison(run: Path) -> dict[str, Any]:
    """Writes a run's comparison with its forecast beside the run; raises as :func:`comparison`."""
    from paceline.rundir.directory import write_text

    result = comparison(run)
    write_text(run, rundir.FORECAST, json.dumps(result, indent=2) + "\n")
    return result


def comparison(run: Path) -> dict[str, Any]:
    """Compares a run with the forecast for its command, hosts and ranks.

    Raises:
        SettingError: There is no such forecast, or the run has too few records.
    """
    plan = read_object(run / rundir.PLAN) or {}
    command = command_key(plan.get("entry"))
    nodes = objects_in(plan.get("nodes"))
    seconds = seconds_per_step(read_records(run / rundir.METRICS))
    if seconds is None:
        raise SettingError(
            f"{run} does not tell what a step took",
            found="it needs two records of the training in metrics.jsonl",
            remedy="a run of a recipe, or of a script that trains with paceline.train; with"
            " --log-every N records come more often",
        )
    saved_forecasts = SavedForecasts(run)
    for saved in saved_forecasts:
        try:
            forecast = saved.of(command, nodes)
        except SettingError as error:
            saved_forecasts.mismatches.append(error.message)
            continue
        if forecast is not None:
            return {
                "run": str(run),
                "forecast_by": str(saved.path),
                "hosts": len(nodes),
                "forecast": {name: forecast[name] for name in ("seconds", "low", "high", "limit")},
                "came": {"seconds": seconds},
            }
    hosts = pluralize(len(nodes), "host")
    raise saved_forecasts.error(f"there is no forecast of the command of {run} on {hosts}")


def seconds_per_step(records: Sequence[Mapping[str, Any]]) -> float | None:
    """Seconds of a step, by the records of a training; its first one holds the start, too."""
    trained = [record for record in records if record.get("split") == "train"]
    steps = seconds = 0.0
    for previous, record in itertools.pairwise(trained):
        new_steps = as_float(record.get("step")) - as_float(previous.get("step"))
        samples, speed = as_float(record.get("samples")), as_float(record.get("samples_per_s"))
        if new_steps > 0 and samples > 0 and speed > 0:
            steps += new_steps
            seconds += samples / speed
    return seconds / steps if steps else None


def describe_comparison(comparison: Mapping[str, Any]) -> str:
    forecast, measured = comparison["forecast"], comparison["came"]["seconds"]
    deviation = measured / forecast["seconds"] - 1
    difference = f"{abs(deviation):.0%} {'longer' if deviation > 0 else 'shorter'}"
    is_within = forecast["low"] <= measured <= forecast["high"]
    return (
        f"a step was forecast to take {format_duration(forecast['seconds'])}"
        f" ({format_duration(forecast['low'])} … {format_duration(forecast['high'])}, limited by"
        f" {clean(forecast['limit'])}), and took {format_duration(measured)}: {difference},"
        f" {'inside' if is_within else 'outside'} the error bar"
    )
