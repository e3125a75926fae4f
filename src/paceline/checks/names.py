"""What does each host's own name resolve to there?

Looks at: what the host name resolves to on the host itself, and the line of /etc/hosts that
says so. Debian's installer maps it to 127.0.1.1; gloo and others publish the address, and
peers then talk to themselves.
Warns when: it is a loopback address, an address the host does not have or no other host reaches,
nothing at all, or when two hosts have one name. Paceline itself chooses by tried connections.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Any

from paceline.checks.check import Check, Survey, join_names, passed, warned
from paceline.remote.network import same_machine
from paceline.setup import lines as hosts_file
from paceline.spec.finding import Finding
from paceline.spec.formatting import shell_text

PACELINE_UNAFFECTED = "paceline sets each node's interface itself, other launchers do not"


def evaluate(survey: Survey) -> list[Finding]:
    if len(survey.names) < 2:
        return [passed("names", survey.names, "one host: its name is not needed")]
    findings = [*_unresolved(survey), *_loopback(survey), *_wrong_address(survey)]
    findings += _duplicate_names(survey)
    message = "each host's name is its own address there"
    return findings or [passed("names", survey.names, message)]


def _unresolved(survey: Survey) -> list[Finding]:
    findings = []
    for name in survey.names:
        facts = survey.facts[name]["name"]
        if not facts["resolves_to"]:
            timed_out = facts["resolves_to"] is None
            reason = "its name server does not answer" if timed_out else "it resolves to nothing"
            message = f"on {name}, the host name {facts['hostname']}: {reason}"
            message += f" ({PACELINE_UNAFFECTED})"
            findings.append(warned("names", [name], message, _add_line(survey, name)))
    return findings


def _loopback(survey: Survey) -> list[Finding]:
    """Returns one finding for all hosts, because one installer made the mistake."""
    addresses: dict[str, str] = {}
    for name in survey.names:
        for address in survey.facts[name]["name"]["resolves_to"] or []:
            if ipaddress.ip_address(address).is_loopback:
                addresses.setdefault(name, address)
    if not addresses:
        return []
    details = "; ".join(
        f"{name}: {address}{_line_text(survey, name, address)}"
        for name, address in addresses.items()
    )
    hosts = list(addresses)
    message = f"the own host name is a loopback address on {join_names(hosts)} ({details})"
    remedy = "\n".join(_replace_line(survey, name, address) for name, address in addresses.items())
    return [warned("names", hosts, f"{message}: {PACELINE_UNAFFECTED}", remedy)]


def _wrong_address(survey: Survey) -> list[Finding]:
    """Reports names that mean an address the host lacks, or that other hosts did not reach."""
    findings = []
    attempts = (survey.evidence.get("ports") or {}).get("tried", {})
    unreached = _unreached(attempts) if survey.networks else set()
    for name in survey.names:
        facts = survey.facts[name]["name"]
        links = survey.interfaces(name)
        interfaces = {a["address"]: link["name"] for link in links for a in link["addresses"]}
        for address in facts["resolves_to"] or []:
            is_own = address in interfaces
            if ipaddress.ip_address(address).is_loopback or (is_own and address not in unreached):
                continue
            place = f"{address} on {interfaces[address]}" if is_own else address
            reason = "other hosts do not reach" if is_own else "the host does not have"
            message = (
                f"on {name}, the host name {facts['hostname']} is {place}"
                f"{_line_text(survey, name, address)}, which {reason} ({PACELINE_UNAFFECTED})"
            )
            findings.append(warned("names", [name], message, _replace_line(survey, name, address)))
    return findings


def _unreached(attempts: Mapping[str, list[Mapping[str, Any]]]) -> set[str]:
    results = [outcome for outcomes in attempts.values() for outcome in outcomes]
    reached = {outcome["address"] for outcome in results if outcome["ok"]}
    return {outcome["address"] for outcome in results} - reached


def _hosts_line(survey: Survey, name: str, address: str) -> str:
    """Returns ``NUMBER: LINE`` of the host's /etc/hosts that has the address; empty for none."""
    lines: list[str] = survey.facts[name]["name"]["hosts_lines"]
    return next((line for line in lines if line.split(": ", 1)[1].split()[0] == address), "")


def _line_text(survey: Survey, name: str, address: str) -> str:
    line = _hosts_line(survey, name, address)
    return f", by line {line} of /etc/hosts" if line else ""


def _replace_line(survey: Survey, name: str, address: str) -> str:
    number, _, text = _hosts_line(survey, name, address).partition(": ")
    if not number:
        return _add_line(survey, name)
    entry = " ".join([survey.address(name), *hosts_file.host_names(text)])
    is_root = survey.facts[name]["user"]["uid"] == 0
    return f"On {name}: {hosts_file.edit_command(f'{number}s/.*/{entry}/', is_root)}"


def _add_line(survey: Survey, name: str) -> str:
    line = shell_text([f"{survey.address(name)} {survey.facts[name]['name']['hostname']}"])
    sudo = "" if survey.facts[name]["user"]["uid"] == 0 else "sudo "
    return f"On {name}: echo {line} | {sudo}tee -a /etc/hosts"


def _duplicate_names(survey: Survey) -> list[Finding]:
    hosts_of: dict[str, list[str]] = {}
    for name in survey.names:
        hosts_of.setdefault(survey.facts[name]["name"]["hostname"], []).append(name)
    findings = []
    for hostname, hosts in hosts_of.items():
        first, *others = hosts
        # one machine under two names is a finding of the check of the ports
        if others and not any(
            same_machine(survey.facts[first], survey.facts[name]) for name in others
        ):
            message = f"{join_names(hosts)} are all called {hostname}"
            message += ": NCCL may take them for one host"
            remedy = (
                "Give each its own name: sudo hostnamectl set-hostname NAME "
                f"(on {join_names(others)})"
            )
            findings.append(warned("names", hosts, message, remedy))
    return findings


check = Check("names", "Own names", evaluate)
