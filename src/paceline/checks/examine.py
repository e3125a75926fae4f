"""Runs the checks: log in, ask, judge, conclude.

The asking decides nothing; the judging and the conclusion do no I/O.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.checks import due
from paceline.checks.check import Check, Level, Probing, Scene, Wishes, unknown
from paceline.remote.channel import Channel
from paceline.remote.fanout import reach_all
from paceline.remote.network import LOOPBACK
from paceline.remote.openssh import SshOptions
from paceline.spec.errors import ConnectError, PacelineError
from paceline.spec.finding import Finding, Outcome
from paceline.spec.helptext import counted
from paceline.spec.hosts import Host

GOODBYE_S = 2.0

Progress = Callable[[str], None]


async def examine(hosts: Sequence[Host], ssh: SshOptions, wishes: Wishes, level: Level,
                  progress: Progress = lambda text: None,
                  only: Sequence[str] = ()) -> Scene:  # fmt: skip
    """Logs in to all hosts and asks those that let us in.

    Args:
        hosts: In rank order.
        ssh: How to log in.
        wishes: What the job would need.
        level: How much to ask.
        progress: Told what is being looked at.
        only: Probes of these checks alone; empty for all that are due.
    """
    progress(f"logging in to {len(hosts)} host{'s' * (len(hosts) > 1)}")
    pythons = [wishes.pythons[host.name] for host in hosts]
    outcomes = await reach_all(hosts, pythons, ssh)
    channels = {o.host.name: o for o in outcomes if isinstance(o, Channel)}
    refusals = {
        o.host.name: {
            "cause": o.refusal.cause,
            "found": o.refusal.found,
            "remedy": o.refusal.remedy,
        }
        for o in outcomes
        if not isinstance(o, Channel)
    }
    scene = Scene(
        hosts=tuple(hosts),
        refusals=refusals,
        facts={name: channel.facts for name, channel in channels.items()},
        chosen={name: channel.chosen_python for name, channel in channels.items()},
        noise={name: channel.noise for name, channel in channels.items()},
        wishes=wishes,
    )
    try:
        return await ask(channels, scene, level, progress, only)
    finally:
        await asyncio.gather(*(channel.close(GOODBYE_S) for channel in channels.values()))


def all_there(scene: Scene, remedy: str = "") -> None:
    """ConnectError that names the hosts that did not let us in, where there are some."""
    if away := scene.refusals:
        raise ConnectError(
            f"{counted(len(away), 'host')} cannot be reached: {', '.join(away)}",
            found="\n".join(f"{name}: {said['found']}" for name, said in away.items()),
            remedy=f"paceline check names the cause of each{remedy}",
        )


async def ask(channels: Mapping[str, Channel], scene: Scene, level: Level,
              progress: Progress = lambda text: None,
              only: Sequence[str] = ()) -> Scene:  # fmt: skip
    """The scene with the evidence of every probe that is due."""
    if not channels or level == "facts":
        return scene
    probing = Probing(channels, scene)
    if len(channels) == 1:
        probing.networks = dict.fromkeys(channels, LOOPBACK)
    for check in due(level):
        wanted = not only or check.id in only
        if wanted and check.probe is not None and applies(check, scene):
            progress(check.title.lower())
            await _ask_one(probing, check)
    return probing.scene


def applies(check: Check, scene: Scene) -> bool:
    """Whether the check makes sense for these hosts and this job."""
    if check.several and len(scene.names) < 2:
        return False
    return scene.wishes.needs_torch or not check.torch


async def _ask_one(probing: Probing, check: Check) -> None:
    assert check.probe is not None
    try:
        found = await check.probe(probing)
    except (PacelineError, ConnectionError, asyncio.TimeoutError, OSError) as error:
        failures = {**probing.scene.failures, check.id: _words(error)}
        probing.scene = replace(probing.scene, failures=failures)
        return
    scene = probing.scene.with_evidence(check.id, _plain(found))
    probing.scene = replace(scene, networks=dict(probing.networks))


def _words(error: Exception) -> str:
    if isinstance(error, PacelineError):
        return f"{error.message}: {error.found}" if error.found else error.message
    return str(error) or "no answer in time"


def _plain(found: Any) -> Any:
    """Without the numbers of the requests."""
    if isinstance(found, dict):
        return {key: _plain(value) for key, value in found.items() if key != "re"}
    return [_plain(value) for value in found] if isinstance(found, list) else found


def judge(scene: Scene, level: Level) -> list[Finding]:
    """Every finding, in the order of the registry. Pure."""
    found: list[Finding] = []
    for check in due(level):
        if check.id == "login" or (scene.names and applies(check, scene)):
            found += _judge_one(check, scene, level)
    return found


def _judge_one(check: Check, scene: Scene, level: Level) -> list[Finding]:
    if check.id in scene.failures:
        return [
            unknown(
                check.id,
                scene.names,
                f"{check.title.lower()} could not be checked: {scene.failures[check.id]}",
            )
        ]
    if check.probe is not None and check.id not in scene.evidence and level != "facts":
        return []
    return check.judge(scene)


SEVERITY: tuple[Outcome, ...] = ("fail", "unknown", "warn", "pass")


def exit_status(findings: Sequence[Finding]) -> int:
    """1 when something fails, 2 when something could not be checked, else 0."""
    outcomes = {finding.outcome for finding in findings}
    return 1 if "fail" in outcomes else 2 if "unknown" in outcomes else 0


def with_outcome(findings: Sequence[Finding], outcome: Outcome) -> list[Finding]:
    return [finding for finding in findings if finding.outcome == outcome]


def ranked(findings: Sequence[Finding]) -> list[Finding]:
    """What matters first: failures, what is unknown, warnings, then what is well."""
    return sorted(findings, key=lambda finding: SEVERITY.index(finding.outcome))


def conclusion(findings: Sequence[Finding]) -> str:
    """The first line: the gravest finding, or that all is well."""
    counts = {outcome: len(with_outcome(findings, outcome)) for outcome in SEVERITY}
    if not findings:
        return "nothing was checked"
    gravest = ranked(findings)[0]
    if gravest.outcome == "pass":
        return f"all is well: {counts['pass']} checks passed"
    label = {"fail": "will fail", "unknown": "could not be checked", "warn": "warning"}
    more = _and_more(counts, gravest.outcome)
    return f"{label[gravest.outcome]}: {gravest.message}{more}"


def _and_more(counts: dict[Outcome, int], gravest: Outcome) -> str:
    nouns: dict[Outcome, str] = {
        "fail": "failure",
        "unknown": "unknown",
        "warn": "warning",
        "pass": "pass",
    }
    left = {o: counts[o] - (o == gravest) for o in SEVERITY[:3]}
    parts = [f"{n} more {nouns[o]}{'s' * (n > 1)}" for o, n in left.items() if n]
    return f" (and {', '.join(parts)})" if parts else ""
