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

from paceline.checks.check import Check, Scene, listed, passed, warned
from paceline.remote.network import same_machine
from paceline.setup import lines as hosts_file
from paceline.spec.finding import Finding

HARMLESS_HERE = "paceline sets each node's interface itself, other launchers do not"


def judge(scene: Scene) -> list[Finding]:
    if len(scene.names) < 2:
        return [passed("names", scene.names, "one host: its name is not needed")]
    found = [*_unknown(scene), *_loopback(scene), *_elsewhere(scene), *_same_names(scene)]
    return found or [passed("names", scene.names, "each host's name is its own address there")]


def _unknown(scene: Scene) -> list[Finding]:
    found = []
    for name in scene.names:
        about = scene.facts[name]["name"]
        if not about["resolves_to"]:
            slow = about["resolves_to"] is None
            why = "its name server does not answer" if slow else "it resolves to nothing"
            message = f"on {name}, the host name {about['hostname']}: {why} ({HARMLESS_HERE})"
            found.append(warned("names", [name], message, _add_line(scene, name)))
    return found


def _loopback(scene: Scene) -> list[Finding]:
    """One finding for all hosts: it is one mistake, made by one installer."""
    guilty: dict[str, str] = {}
    for name in scene.names:
        for address in scene.facts[name]["name"]["resolves_to"] or []:
            if ipaddress.ip_address(address).is_loopback:
                guilty.setdefault(name, address)
    if not guilty:
        return []
    told = "; ".join(
        f"{name}: {address}{_lines(scene.facts[name]['name']['hosts_lines'], [address])}"
        for name, address in guilty.items()
    )
    remedy = "\n".join(_mend(scene, name, [address]) for name, address in guilty.items())
    message = f"the own host name is a loopback address on {listed(list(guilty))} ({told})"
    return [warned("names", list(guilty), f"{message}: {HARMLESS_HERE}", remedy)]


def _elsewhere(scene: Scene) -> list[Finding]:
    """The name means an address that the host lacks, or that others tried in vain."""
    found = []
    tried = (scene.evidence.get("ports") or {}).get("tried", {})
    dead = _unreached(tried) if scene.networks else set()
    for name in scene.names:
        about = scene.facts[name]["name"]
        own = _own(scene, name)
        for address in about["resolves_to"] or []:
            loopback = ipaddress.ip_address(address).is_loopback
            if loopback or (address in own and address not in dead):
                continue
            where = _lines(about["hosts_lines"], [address])
            place = f"{address} on {own[address]}" if address in own else address
            why = "other hosts do not reach" if address in own else "the host does not have"
            message = (
                f"on {name}, the host name {about['hostname']} is {place}{where}, which {why} "
                f"({HARMLESS_HERE})"
            )
            found.append(warned("names", [name], message, _mend(scene, name, [address])))
    return found


def _unreached(tried: Mapping[str, list[Mapping[str, Any]]]) -> set[str]:
    results = [outcome for outcomes in tried.values() for outcome in outcomes]
    reached = {outcome["address"] for outcome in results if outcome["ok"]}
    return {outcome["address"] for outcome in results} - reached


def _own(scene: Scene, name: str) -> dict[str, str]:
    """Interface by address."""
    links = scene.facts[name]["interfaces"] or []
    return {a["address"]: link["name"] for link in links for a in link["addresses"]}


def _lines(lines: list[str], addresses: list[str]) -> str:
    guilty = [line for line in lines if line.split(": ", 1)[1].split()[0] in addresses]
    return f", by line {guilty[0]} of /etc/hosts" if guilty else ""


def _mend(scene: Scene, name: str, addresses: list[str]) -> str:
    """Replaces the address in the guilty line."""
    guilty = [
        line
        for line in scene.facts[name]["name"]["hosts_lines"]
        if line.split(": ", 1)[1].split()[0] in addresses
    ]
    if not guilty:
        return _add_line(scene, name)
    number, _, text = guilty[0].partition(": ")
    new = " ".join([scene.address(name), *hosts_file.plain_names(text)])
    return f"On {name}: {hosts_file.edit_command(f'{number}s/.*/{new}/')}"


def _add_line(scene: Scene, name: str) -> str:
    line = f"{scene.address(name)} {scene.facts[name]['name']['hostname']}"
    return f"On {name}: echo '{line}' | sudo tee -a /etc/hosts"


def _same_names(scene: Scene) -> list[Finding]:
    own = {name: scene.facts[name]["name"]["hostname"] for name in scene.names}
    repeated = [word for word, times in Counter(own.values()).items() if times > 1]
    machines = {name: scene.facts[name] for name in scene.names}
    return [
        warned(
            "names",
            [name for name in own if own[name] == word],
            f"{listed([name for name in own if own[name] == word])} are all called {word}: "
            "NCCL may take them for one host",
            f"Give each its own name: sudo hostnamectl set-hostname NAME "
            f"(on {listed([name for name in own if own[name] == word][1:])})",
        )
        for word in repeated
        if not _is_one_machine([machines[name] for name in own if own[name] == word])
    ]


def _is_one_machine(facts: list[Mapping[str, Any]]) -> bool:
    """The check of the ports says so: another name for it would not help."""
    return any(same_machine(facts[0], other) for other in facts[1:])


check = Check("names", "Own names", "facts", judge)
