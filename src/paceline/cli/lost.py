"""What is known of a run whose launcher ended without a word, and how it goes on."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.rundir import records
from paceline.rundir.directory import short
from paceline.rundir.ownership import lost, read_owner
from paceline.spec import rundir as names
from paceline.spec.command import shell_text
from paceline.spec.figures import lasting

LEASE_S = 10.0  # where the plan does not tell it
LAST_BYTES = 1 << 16  # of events.jsonl, to find the last of them


@dataclass(frozen=True, slots=True)
class Lost:
    """A run whose launcher has died.

    Attributes:
        what: ``launcher`` or ``supervisor``.
        host: Where it ran.
        since: Its last sign of life, in seconds since 1970; 0: not known.
        lease_s: For how long its nodes have let ranks go on from then, at most.
        checkpoint: Step of the newest checkpoint that is here.
        checkpoints: The folder of those.
        first_host: Rank 0's host: what was saved later lies there.
        saves: The script makes checkpoints, as far as is known.
        again: What to type to go on; empty where that is not known.
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
    again: str
    folder: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def over_at(self) -> float:
        """When the ranks have ended, in seconds since 1970."""
        return self.since + self.lease_s


def lost_run(path: Path) -> Lost:
    """What the folder of a lost run tells of its end."""
    plan = records.read_object(path / names.PLAN) or {}
    away, owner = lost(path), read_owner(path) or {}
    what, host = ("supervisor", away.host) if away else ("launcher", str(owner.get("host", "")))
    found = (names.version_of(one.name) for one in names.checkpoints(path))
    checkpoint = next((version[1] for version in found if version), None)
    nodes = plan.get("nodes")
    first = nodes[0].get("host") if isinstance(nodes, list) and nodes and (
        isinstance(nodes[0], dict)) else ""  # fmt: skip
    events = [*records.read_records(path / names.EVENTS, LAST_BYTES)]
    saves = checkpoint is not None or any(one.get("event") == "checkpoint" for one in events)
    again, folder = _again(path, plan)
    return Lost(what, host, _last_sign(path, events), lease_of(plan), checkpoint,
                short(path.absolute() / names.CHECKPOINTS), records.as_text(first, 255), saves,
                again, folder)  # fmt: skip


def ends_in_s(path: Path, now: float) -> float:
    """For how long the ranks of a run that has just been lost may still save something, in seconds.

    Args:
        path: Its folder here.
        now: Seconds since 1970; the clock of its hosts may be another.
    """
    lease_s = lease_of(records.read_object(path / names.PLAN) or {})
    since = _last_sign(path, [*records.read_records(path / names.EVENTS, LAST_BYTES)])
    return min(max(0.0, since + lease_s - now), lease_s)


def _last_sign(path: Path, events: list[dict[str, Any]]) -> float:
    """When it wrote something last: where everybody is, it has written once a second."""
    said = records.read_object(path / names.RANKS) or {}
    told = (records.as_float(one.get("time")) for one in (said, *events[-1:]))
    return max((time for time in told if time), default=0.0)


def lease_of(plan: Mapping[str, Any]) -> float:
    """Of a run, in seconds, by its plan."""
    settings = plan.get("settings")
    said = settings.get("lease_s") if isinstance(settings, dict) else None
    return (records.as_float(said.get("value")) if isinstance(said, dict) else None) or LEASE_S


def _again(path: Path, plan: Mapping[str, Any]) -> tuple[str, str]:
    """The command that was typed as it goes on in the same folder, and where it was typed."""
    from paceline.launch.summary import to_resume

    typed = plan.get("typed")
    typed = typed if isinstance(typed, dict) else {}
    folder = records.as_text(typed.get("folder"), 4096)
    try:
        words = shlex.split(records.as_text(typed.get("command"), 1 << 16))
    except ValueError:  # it was too long to be read whole
        return "", ""
    if not words:
        return "", ""
    elsewhere = folder and Path(folder) != Path.cwd()
    run = path.absolute() if elsewhere else Path(short(path.absolute()))
    return shell_text(to_resume(words, str(run))), folder if elsewhere else ""


def lines(run: Lost, now: float) -> list[str]:
    """The same for people.

    Args:
        run: Which.
        now: Seconds since 1970.
    """
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.since))
    since = f" {lasting(max(0.0, now - run.since))} ago, at {when}" if run.since else ""
    on = f" on {run.host}" if run.host else ""
    ended = "have ended" if now > run.over_at else "end"
    said = [
        f"its {run.what}{on} was killed, or its host went down{since} (its last sign of life)",
        f"the nodes {ended} their ranks: nobody renews the lease of {run.lease_s:g} s",
    ]
    later = f"; a later one would lie on {run.first_host}, where the next start finds it" if (
        run.first_host) else ""  # fmt: skip
    if run.checkpoint is not None:
        said.append(f"checkpoint: step {run.checkpoint}, in {run.checkpoints}{later}")
    elif run.saves:
        said.append(f"checkpoint: none is here{later}")
    else:
        said.append("checkpoint: none is known of, it begins anew")
    if run.again:
        where = f" (in {run.folder})" if run.folder else ""
        said.append(f"to resume{where}: {run.again}")
    return said
