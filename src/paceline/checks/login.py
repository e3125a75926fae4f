"""Can we log in to every host?

Looks at: the outcome of every login; all are made at once, and sorted by cause.
Fails when: a host refuses or does not answer. The remedy depends on the cause: name, route,
port, host key, key, user, permissions, login shell, Python.
"""

from __future__ import annotations

import re

from paceline.checks.check import Check, Survey, failed, join_names, passed
from paceline.remote.openssh import CAUSES
from paceline.spec.finding import Finding


def evaluate(survey: Survey) -> list[Finding]:
    findings = []
    for host in survey.hosts:
        if refusal := survey.refusals.get(host.name):
            cause = refusal["cause"]
            line = _decisive_line(cause, refusal["found"])
            message = f"cannot log in to {host.name}: {cause}: {line}"
            findings.append(failed("login", [host.name], message, refusal["remedy"]))
    if survey.names:
        findings.append(passed("login", survey.names, f"logged in to {join_names(survey.names)}"))
    return findings


def _decisive_line(cause: str, text: str) -> str:
    """Returns the line of ssh's output that shows the cause, else the last line."""
    pattern = next((rule.pattern for rule in CAUSES if rule.name == cause), "$^")
    lines = [line for line in text.splitlines() if line.strip()]
    matching = [line for line in lines if re.search(pattern, line)]
    return (matching or lines or ["no word"])[-1]


check = Check("login", "Login", evaluate)
