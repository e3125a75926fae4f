"""Runs the checks: logs in, probes the nodes, evaluates the survey, draws the conclusion."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.checks import checks_up_to
from paceline.checks.check import Check, Level, ProbeSession, Requirements, Survey, unknown
from paceline.remote.channel import Channel
from paceline.remote.fanout import try_connect_hosts
from paceline.remote.network import LOOPBACK
from paceline.remote.openssh import SshOptions
from paceline.spec.errors import ConnectError, PacelineError
from paceline.spec.finding import Finding, Outcome
from paceline.spec.formatting import pluralize
from paceline.spec.hosts import Host

CLOSE_TIMEOUT_S = 2.0

Progress = Callable[[str], None]


async def survey_hosts(hosts: Sequence[Host], ssh: SshOptions, requirements: Requirements,
                       level: Level, progress: Progress = lambda text: None,
                       only: Sequence[str] = ()) -> Survey:  # fmt: skip
    """Logs in to all hosts and runs the probes on those that accept.

    Args:
        hosts: Hosts, in rank order.
        progress: Called with the title of each step.
        only: Run the probes of these checks only; empty for all of the level.
    """
    progress(f"logging in to {pluralize(len(hosts), 'host')}")
    pythons = [requirements.pythons[host.name] for host in hosts]
    outcomes = await try_connect_hosts(hosts, pythons, ssh)
    channels = {o.host.name: o for o in outcomes if isinstance(o, Channel)}
    refusals_by_host = {o.host.name: o.refusal for o in outcomes if not isinstance(o, Channel)}
    refusals = {
        name: {"cause": refusal.cause, "found": refusal.details, "remedy": refusal.remedy}
        for name, refusal in refusals_by_host.items()
    }
    survey = Survey(
        hosts=tuple(hosts),
        refusals=refusals,
        facts={name: channel.facts for name, channel in channels.items()},
        interpreters={name: channel.agent_python for name, channel in channels.items()},
        shell_output={name: channel.noise for name, channel in channels.items()},
        requirements=requirements,
    )
    try:
        return await run_probes(channels, survey, level, progress, only)
    finally:
        await asyncio.gather(*(channel.close(CLOSE_TIMEOUT_S) for channel in channels.values()))


def require_all_reachable(survey: Survey, remedy: str = "") -> None:
    """Raises ConnectError that names the hosts that refused the login, if any."""
    if refusals := survey.refusals:
        raise ConnectError(
            f"{pluralize(len(refusals), 'host')} cannot be reached: {', '.join(refusals)}",
            found="\n".join(f"{name}: {refusal['found']}" for name, refusal in refusals.items()),
            remedy=f"paceline check names the cause of each{remedy}",
        )


async def run_probes(channels: Mapping[str, Channel], survey: Survey, level: Level,
              progress: Progress = lambda text: None,
              only: Sequence[str] = ()) -> Survey:  # fmt: skip
    """Returns the survey with the evidence of every probe of the level."""
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
    """Whether the check applies to these hosts and this job."""
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
    """Removes request ids from the result of a probe."""
    if isinstance(result, dict):
        return {key: _without_request_ids(item) for key, item in result.items() if key != "re"}
    return [_without_request_ids(item) for item in result] if isinstance(result, list) else result


def evaluate(survey: Survey, level: Level) -> list[Finding]:
    """Returns all findings, in the order of the registry. Pure."""
    findings: list[Finding] = []
    for check in checks_up_to(level):
        if check.id == "login" or (survey.names and applies(check, survey)):
            findings += _evaluate_check(check, survey, level)
    return findings


def _evaluate_check(check: Check, survey: Survey, level: Level) -> list[Finding]:
    if check.id in survey.failures:
        message = f"{check.title.lower()} could not be checked: {survey.failures[check.id]}"
        return [unknown(check.id, survey.names, message)]
    if check.probe is not None and check.id not in survey.evidence and level != "facts":
        return []
    return check.evaluate(survey)


SEVERITY: tuple[Outcome, ...] = ("fail", "unknown", "warn", "pass")


def exit_status(findings: Sequence[Finding]) -> int:
    """Returns 1 if a check failed, 2 if one could not be made, else 0."""
    outcomes = {finding.outcome for finding in findings}
    return 1 if "fail" in outcomes else 2 if "unknown" in outcomes else 0


def ranked(findings: Sequence[Finding]) -> list[Finding]:
    """Sorts findings: failures, unknown, warnings, passes."""
    return sorted(findings, key=lambda finding: SEVERITY.index(finding.outcome))


def conclusion(findings: Sequence[Finding]) -> str:
    """Returns the first line of the report: the gravest finding, or that all is well."""
    if not findings:
        return "nothing was checked"
    gravest = ranked(findings)[0]
    counts = Counter(finding.outcome for finding in findings)
    if gravest.outcome == "pass":
        return f"all is well: {counts['pass']} checks passed"
    counts[gravest.outcome] -= 1
    nouns: dict[Outcome, str] = {"fail": "failure", "unknown": "unknown", "warn": "warning"}
    others = [f"{counts[outcome]} more {noun}{'s' * (counts[outcome] > 1)}"
              for outcome, noun in nouns.items() if counts[outcome]]  # fmt: skip
    labels = {"fail": "will fail", "unknown": "could not be checked", "warn": "warning"}
    suffix = f" (and {', '.join(others)})" if others else ""
    return f"{labels[gravest.outcome]}: {gravest.message}{suffix}"
