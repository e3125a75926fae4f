"""Runs whose launcher died: what is known of them, and how to resume them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.rundir import records
from paceline.rundir.directory import short
from paceline.rundir.outputs import script_checkpoint
from paceline.rundir.ownership import lost, read_of_last_start, read_owner
from paceline.spec import rundir as names
from paceline.spec.formatting import DATE_TIME, format_duration, format_time, shell_text

LEASE_S = 10.0  # where the plan does not tell it
TAIL_BYTES = 1 << 16  # of events.jsonl, to find the last of them


@dataclass(frozen=True, slots=True)
class LostRun:
    """A run whose launcher has died.

    Attributes:
        what: ``launcher`` or ``supervisor``.
        since: Its last sign of life, in seconds since 1970; 0: not known.
        lease_s: For how long its nodes have let ranks go on from then, at most.
        checkpoint: Step of the newest checkpoint that is here.
        first_host: Rank 0's host: what was saved later lies there.
        saves: The script makes checkpoints, as far as is known.
        script_checkpoint: The newest checkpoint of the script's own that is here.
        again: What to type to go on; empty if that is not known.
        folder: Where to type it, if that is not the present one.
    """

    what: str
    host: str
    since: float
    lease_s: float
    checkpoint: int | None
    checkpoints: str
    first_host: str
    saves: bool
    script_checkpoint: str
    again: str
    folder: str


def read_lost_run(path: Path) -> LostRun:
    """Reads what the folder of a lost run shows of its end."""
    plan = records.read_object(path / names.PLAN) or {}
    supervisor, owner = lost(path), read_owner(path)
    role, host = "launcher", str((owner or {}).get("host", ""))
    if supervisor and owner is None:  # else it is of an earlier start
        role, host = "supervisor", supervisor.host
    versions = (names.parse_version(item.name) for item in names.checkpoints(path))
    checkpoint = next((version[1] for version in versions if version), None)
    first = next((node.get("host") for node in records.objects_in(plan.get("nodes"))), "")
    events = [*records.read_records(path / names.EVENTS, TAIL_BYTES)]
    saves = checkpoint is not None or any(item.get("event") == "checkpoint" for item in events)
    command, folder = _resume_command(path, plan)
    return LostRun(role, host, _last_sign_of_life(path, events), lease_s(plan), checkpoint,
                short(path.absolute() / names.CHECKPOINTS), records.as_text(first, 255), saves,
                script_checkpoint(path), command, folder)  # fmt: skip


def remaining_lease_s(path: Path, clock: float) -> float:
    """Returns for how many seconds the ranks of a lost run may still save.

    ``clock`` is now, in seconds since 1970; the clock of its hosts may be another.
    """
    duration_s = lease_s(records.read_object(path / names.PLAN) or {})
    alive_at = _last_sign_of_life(path, [*records.read_records(path / names.EVENTS, TAIL_BYTES)])
    return min(max(0.0, alive_at + duration_s - clock), duration_s)


def _last_sign_of_life(path: Path, events: list[dict[str, Any]]) -> float:
    """Returns when the launcher last wrote a file; it writes the state once a second."""
    ranks = read_of_last_start(path, names.RANKS) or {}
    times = (records.as_float(record.get("time")) for record in (ranks, *events[-1:]))
    return max((time for time in times if time), default=0.0)


def lease_s(plan: Mapping[str, Any]) -> float:
    lease = records.object_in(records.object_in(plan, "settings"), "lease_s")
    return records.as_float(lease.get("value")) or LEASE_S


def _resume_command(path: Path, plan: Mapping[str, Any]) -> tuple[str, str]:
    from paceline.cli.runs.run_end import resume_command

    command = records.object_in(plan, "typed")
    folder = records.as_text(command.get("folder"), 4096)
    try:
        arguments = shlex.split(records.as_text(command.get("command"), 1 << 16))
    except ValueError:  # it was too long to be read whole
        return "", ""
    # of a detached run, the plan comes from a host: only what starts a run is shown for pasting
    if arguments[:1] != ["paceline"] or arguments[1:2] not in (["run"], ["train"]):
        return "", ""
    is_other_folder = folder and Path(folder) != Path.cwd()
    run = path.absolute() if is_other_folder else Path(short(path.absolute()))
    words = _with_moved_folder(resume_command(arguments, str(run)), Path(folder), str(run))
    return shell_text(words), folder if is_other_folder else ""


def _with_moved_folder(words: Sequence[str], folder: Path, run: str) -> list[str]:
    """Names the run directory as it is now, if it was moved since the command was typed."""
    is_script = (word.endswith(".py") for word in words)  # what follows is for the script
    end = next((at for at, matches_script in enumerate(is_script) if matches_script), len(words))
    for at, word in enumerate(words[:end]):
        option, equals, value = word.partition("=")
        typed = value if equals else next(iter(words[at + 1 : at + 2]), "")
        if option == "--run-dir":
            if (folder / typed).expanduser().exists():
                break
            following = words[at + 1 :] if equals else words[at + 2 :]
            return [*words[:at], "--run-dir", run, *following]
    return [*words]


def describe_lost(run: LostRun, clock: float) -> list[str]:
    when = format_time(run.since, DATE_TIME)
    age = f" {format_duration(max(0.0, clock - run.since))} ago, at {when}" if run.since else ""
    host = f" on {run.host}" if run.host else ""
    ended = "have ended" if clock > run.since + run.lease_s else "end"
    lines = [
        f"its {run.what}{host} was killed, or its host went down{age} (its last sign of life)",
        f"the nodes {ended} their ranks: the lease was not renewed for {run.lease_s:g} s",
    ]
    later = f"; a later one would lie on {run.first_host}, where the next start finds it"
    later = later if run.first_host else ""
    if run.checkpoint is not None:
        lines.append(f"checkpoint: step {run.checkpoint}, in {run.checkpoints}{later}")
    elif run.script_checkpoint:
        lines.append(f"checkpoint of the script: {run.script_checkpoint}{later}")
    elif run.saves:
        lines.append(f"checkpoint: none is here{later}")
    else:
        lines.append(
            "checkpoint: none is recorded; a restart begins at step 0, unless the script finds its"
            " own in the project"
        )
    lines += _describe_resume(run.again, run.folder)
    if run.again and run.script_checkpoint and run.checkpoint is None:
        from paceline.cli.runs.run_end import older_checkpoint_note

        lines += older_checkpoint_note(shlex.split(run.again), run.script_checkpoint)
    return lines


def describe_resume(path: Path) -> list[str]:
    """Says how to resume a run that has checkpoints, as far as that is known."""
    if not any(names.checkpoints(path)):
        return []
    return _describe_resume(*_resume_command(path, records.read_object(path / names.PLAN) or {}))


def describe_abandon(path: Path) -> list[str]:
    """Says how to go on without the host of a detached run; empty if it has no checkpoint here."""
    resume = describe_resume(path)
    remove = shell_text(["rm", str(path / names.DETACHED)])
    return [f"if that host is gone for good: {remove}", *resume] if resume else []


def _describe_resume(command: str, folder: str) -> list[str]:
    place = f" (in {folder})" if folder else ""
    return [f"to resume{place}: {command}"] if command else []
