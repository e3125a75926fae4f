"""Can we log in to every host?

Looks at: the outcome of every login, made at once, sorted by cause.
Fails when: a host refuses or does not answer. The remedy depends on the cause: name, route,
port, host key, key, user, permissions, login shell, Python.
"""

from __future__ import annotations

import re

from paceline.checks.check import Check, Survey, failed, join_names, passed
from paceline.remote.openssh import CAUSES
from paceline.spec.finding import Finding


def evaluate(survey: Survey) -> list[Finding]:
    findings = [
        failed(
            "login",
            [host.name],
            f"cannot log in to {host.name}: {refusal['cause']}: {_line(refusal['cause'], refusal['found'])}",
            refusal["remedy"],
        )
        for host in survey.hosts
        if (refusal := survey.refusals.get(host.name))
    ]
    if survey.names:
        findings.append(passed("login", survey.names, f"logged in to {join_names(survey.names)}"))
    return findings


def _line(cause: str, text: str) -> str:
    """The line of ssh's words by which the cause was known, else the last."""
    pattern = next((cause_rule.pattern for cause_rule in CAUSES if cause_rule.name == cause), "$^")
    lines = [line for line in text.splitlines() if line.strip()]
    matching = [line for line in lines if re.search(pattern, line)]
    return (matching or lines or ["no word"])[-1]


check = Check("login", "Login", "facts", evaluate)
