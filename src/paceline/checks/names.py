"""What does each host's own name mean there?

Looks at: what the host name resolves to on the host itself, and the line of /etc/hosts that
says so. Debian's installer maps it to 127.0.1.1; gloo and others publish what it finds, and
peers then talk to themselves.
Warns when: it is a loopback address, an address the host does not have or no other host reaches,
nothing at all, or when two hosts have one name. Paceline itself chooses by tried connections.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Mapping
from typing import Any

from paceline.checks.check import Check, Survey, join_names, passed, warned
from paceline.remote.network import same_machine
from paceline.setup import lines as hosts_file
from paceline.spec.finding import Finding

PACELINE_UNAFFECTED = "paceline sets each node's interface itself, other launchers do not"


def evaluate(survey: Survey) -> list[Finding]:
    if len(survey.names) < 2:
        return [passed("names", survey.names, "one host: its name is not needed")]
    found = [
        *_unresolved(survey),
        *_loopback(survey),
        *_wrong_address(survey),
        *_duplicate_names(survey),
    ]
    return found or [passed("names", survey.names, "each host's name is its own address there")]


def _unresolved(survey: Survey) -> list[Finding]:
    findings = []
    for name in survey.names:
        name_facts = survey.facts[name]["name"]
        if not name_facts["resolves_to"]:
            timed_out = name_facts["resolves_to"] is None
            reason = "its name server does not answer" if timed_out else "it resolves to nothing"
            message = f"on {name}, the host name {name_facts['hostname']}: {reason} ({PACELINE_UNAFFECTED})"
            findings.append(warned("names", [name], message, _add_line(survey, name)))
    return findings


def _loopback(survey: Survey) -> list[Finding]:
    """One finding for all hosts: it is one mistake, made by one installer."""
    addresses: dict[str, str] = {}
    for name in survey.names:
        for address in survey.facts[name]["name"]["resolves_to"] or []:
            if ipaddress.ip_address(address).is_loopback:
                addresses.setdefault(name, address)
    if not addresses:
        return []
    details = "; ".join(
        f"{name}: {address}{_hosts_line_text(survey.facts[name]['name']['hosts_lines'], [address])}"
        for name, address in addresses.items()
    )
    remedy = "\n".join(
        _replace_line(survey, name, [address]) for name, address in addresses.items()
    )
    message = (
        f"the own host name is a loopback address on {join_names(list(addresses))} ({details})"
    )
    return [warned("names", list(addresses), f"{message}: {PACELINE_UNAFFECTED}", remedy)]


def _wrong_address(survey: Survey) -> list[Finding]:
    """The name means an address that the host lacks, or that others tried in vain."""
    findings = []
    attempts = (survey.evidence.get("ports") or {}).get("tried", {})
    unreached = _unreached(attempts) if survey.networks else set()
    for name in survey.names:
        name_facts = survey.facts[name]["name"]
        interfaces = _interfaces(survey, name)
        for address in name_facts["resolves_to"] or []:
            loopback = ipaddress.ip_address(address).is_loopback
            if loopback or (address in interfaces and address not in unreached):
                continue
            hosts_line = _hosts_line_text(name_facts["hosts_lines"], [address])
            place = f"{address} on {interfaces[address]}" if address in interfaces else address
            reason = (
                "other hosts do not reach" if address in interfaces else "the host does not have"
            )
            message = (
                f"on {name}, the host name {name_facts['hostname']} is {place}{hosts_line}, which {reason} "
                f"({PACELINE_UNAFFECTED})"
            )
            findings.append(
                warned("names", [name], message, _replace_line(survey, name, [address]))
            )
    return findings


def _unreached(attempts: Mapping[str, list[Mapping[str, Any]]]) -> set[str]:
    results = [outcome for outcomes in attempts.values() for outcome in outcomes]
    answered = {outcome["address"] for outcome in results if outcome["ok"]}
    return {outcome["address"] for outcome in results} - answered


def _interfaces(survey: Survey, name: str) -> dict[str, str]:
    """Interface by address."""
    links = survey.facts[name]["interfaces"] or []
    return {a["address"]: link["name"] for link in links for a in link["addresses"]}


def _hosts_line_text(lines: list[str], addresses: list[str]) -> str:
    matches = [line for line in lines if line.split(": ", 1)[1].split()[0] in addresses]
    return f", by line {matches[0]} of /etc/hosts" if matches else ""


def _replace_line(survey: Survey, name: str, addresses: list[str]) -> str:
    """Replaces the address in the guilty line."""
    matches = [
        line
        for line in survey.facts[name]["name"]["hosts_lines"]
        if line.split(": ", 1)[1].split()[0] in addresses
    ]
    if not matches:
        return _add_line(survey, name)
    number, _, text = matches[0].partition(": ")
    entry = " ".join([survey.address(name), *hosts_file.plain_names(text)])
    return f"On {name}: {hosts_file.edit_command(f'{number}s/.*/{entry}/')}"


def _add_line(survey: Survey, name: str) -> str:
    line = f"{survey.address(name)} {survey.facts[name]['name']['hostname']}"
    return f"On {name}: echo '{line}' | sudo tee -a /etc/hosts"


def _duplicate_names(survey: Survey) -> list[Finding]:
    hostnames = {name: survey.facts[name]["name"]["hostname"] for name in survey.names}
    repeated = [hostname for hostname, count in Counter(hostnames.values()).items() if count > 1]
    machines = {name: survey.facts[name] for name in survey.names}
    return [
        warned(
            "names",
            [name for name in hostnames if hostnames[name] == hostname],
            f"{join_names([name for name in hostnames if hostnames[name] == hostname])} are all called {hostname}: "
            "NCCL may take them for one host",
            f"Give each its own name: sudo hostnamectl set-hostname NAME "
            f"(on {join_names([name for name in hostnames if hostnames[name] == hostname][1:])})",
        )
        for hostname in repeated
        if not _is_same_machine(
            [machines[name] for name in hostnames if hostnames[name] == hostname]
        )
    ]


def _is_same_machine(facts: list[Mapping[str, Any]]) -> bool:
    """The check of the ports says so: another name for it would not help."""
    return any(same_machine(facts[0], second) for second in facts[1:])


check = Check("names", "Own names", "facts", evaluate)
