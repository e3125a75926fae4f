"""Runs the checks: log in, ask, evaluate, conclude.

The asking decides nothing; the judging and the conclusion do no I/O.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.checks import checks_up_to
from paceline.checks.check import Check, Level, ProbeSession, Requirements, Survey, unknown
from paceline.remote.channel import Channel
from paceline.remote.fanout import reach_all
from paceline.remote.network import LOOPBACK
from paceline.remote.openssh import SshOptions
from paceline.spec.errors import ConnectError, PacelineError
from paceline.spec.finding import Finding, Outcome
from paceline.spec.helptext import counted
from paceline.spec.hosts import Host

CLOSE_TIMEOUT_S = 2.0

Progress = Callable[[str], None]


async def survey_hosts(hosts: Sequence[Host], ssh: SshOptions, requirements: Requirements, level: Level,
                  progress: Progress = lambda text: None,
                  only: Sequence[str] = ()) -> Survey:  # fmt: skip
    """Logs in to all hosts and asks those that let us in.

    Args:
        hosts: In rank order.
        ssh: How to log in.
        requirements: What the job would need.
        level: How much to ask.
        progress: Told what is being looked at.
        only: Probes of these checks alone; empty for all that are due.
    """
    progress(f"logging in to {len(hosts)} host{'s' * (len(hosts) > 1)}")
    pythons = [requirements.pythons[host.name] for host in hosts]
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
    survey = Survey(
        hosts=tuple(hosts),
        refusals=refusals,
        facts={name: channel.facts for name, channel in channels.items()},
        interpreters={name: channel.chosen_python for name, channel in channels.items()},
        shell_output={name: channel.noise for name, channel in channels.items()},
        requirements=requirements,
    )
    try:
        return await run_probes(channels, survey, level, progress, only)
    finally:
        await asyncio.gather(*(channel.close(CLOSE_TIMEOUT_S) for channel in channels.values()))


def require_all_reachable(survey: Survey, remedy: str = "") -> None:
    """ConnectError that names the hosts that did not let us in, where there are some."""
    if refusals := survey.refusals:
        raise ConnectError(
            f"{counted(len(refusals), 'host')} cannot be reached: {', '.join(refusals)}",
            found="\n".join(f"{name}: {refusal['found']}" for name, refusal in refusals.items()),
            remedy=f"paceline check names the cause of each{remedy}",
        )


async def run_probes(channels: Mapping[str, Channel], survey: Survey, level: Level,
              progress: Progress = lambda text: None,
              only: Sequence[str] = ()) -> Survey:  # fmt: skip
    """The survey with the evidence of every probe that is due."""
    if not channels or level == "facts":
        return survey
    session = ProbeSession(channels, survey)
    if len(channels) == 1:
        session.networks = dict.fromkeys(channels, LOOPBACK)
    for check in checks_up_to(level):
        is_selected = not only or check.id in only
        if is_selected and check.probe is not None and applies(check, survey):
            progress(check.title.lower())
            await _run_probe(session, check)
    return session.survey


def applies(check: Check, survey: Survey) -> bool:
    """Whether the check makes sense for these hosts and this job."""
    if check.needs_several_hosts and len(survey.names) < 2:
        return False
    return survey.requirements.needs_torch or not check.needs_torch


async def _run_probe(session: ProbeSession, check: Check) -> None:
    assert check.probe is not None
    try:
        result = await check.probe(session)
    except (PacelineError, ConnectionError, asyncio.TimeoutError, OSError) as error:
        failures = {**session.survey.failures, check.id: _error_text(error)}
        session.survey = replace(session.survey, failures=failures)
        return
    survey = session.survey.with_evidence(check.id, _without_request_ids(result))
    session.survey = replace(survey, networks=dict(session.networks))


def _error_text(error: Exception) -> str:
    if isinstance(error, PacelineError):
        return f"{error.message}: {error.found}" if error.found else error.message
    return str(error) or "no answer in time"


def _without_request_ids(result: Any) -> Any:
    """Without the numbers of the requests."""
    if isinstance(result, dict):
        return {key: _without_request_ids(item) for key, item in result.items() if key != "re"}
    return [_without_request_ids(item) for item in result] if isinstance(result, list) else result


def evaluate(survey: Survey, level: Level) -> list[Finding]:
    """Every finding, in the order of the registry. Pure."""
    findings: list[Finding] = []
    for check in checks_up_to(level):
        if check.id == "login" or (survey.names and applies(check, survey)):
            findings += _evaluate_check(check, survey, level)
    return findings


def _evaluate_check(check: Check, survey: Survey, level: Level) -> list[Finding]:
    if check.id in survey.failures:
        return [
            unknown(
                check.id,
                survey.names,
                f"{check.title.lower()} could not be checked: {survey.failures[check.id]}",
            )
        ]
    if check.probe is not None and check.id not in survey.evidence and level != "facts":
        return []
    return check.evaluate(survey)


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
    totals = {outcome: len(with_outcome(findings, outcome)) for outcome in SEVERITY}
    if not findings:
        return "nothing was checked"
    gravest = ranked(findings)[0]
    if gravest.outcome == "pass":
        return f"all is well: {totals['pass']} checks passed"
    label = {"fail": "will fail", "unknown": "could not be checked", "warn": "warning"}
    suffix = _remaining_text(totals, gravest.outcome)
    return f"{label[gravest.outcome]}: {gravest.message}{suffix}"


def _remaining_text(totals: dict[Outcome, int], gravest: Outcome) -> str:
    nouns: dict[Outcome, str] = {
        "fail": "failure",
        "unknown": "unknown",
        "warn": "warning",
        "pass": "pass",
    }
    remaining = {o: totals[o] - (o == gravest) for o in SEVERITY[:3]}
    parts = [f"{n} more {nouns[o]}{'s' * (n > 1)}" for o, n in remaining.items() if n]
    return f" (and {', '.join(parts)})" if parts else ""
