"""Does every host know the others by name, and rightly?

Looks at: what each host's name resolves to on every other host.
Warns when: a name is unknown there, or means an address that is not that host's. Paceline
publishes addresses, never names; torchrun by hand and MPI publish names.
"""

from __future__ import annotations

from typing import Any

from paceline.checks.check import (
    Check,
    ProbeSession,
    Survey,
    is_routable,
    join_names,
    passed,
    warned,
)
from paceline.setup import lines as hosts_file
from paceline.spec.finding import Finding


async def probe(session: ProbeSession) -> dict[str, Any]:
    """By asking host, addresses by name."""
    names = sorted({_host_name(session.survey, name) for name in session.channels})
    answers = await session.request_all("resolve", names=names)
    return {name: answer["names"] for name, answer in answers.items()}


def _host_name(survey: Survey, name: str) -> str:
    return str(survey.facts[name]["name"]["hostname"])


def evaluate(survey: Survey) -> list[Finding]:
    findings = [finding for target in survey.names for finding in _target(survey, target)]
    return findings or [passed("resolution", survey.names, "every host knows the others by name")]


def _target(survey: Survey, target: str) -> list[Finding]:
    hostname, target_addresses = _host_name(survey, target), _addresses(survey, target)
    if sum(_host_name(survey, name) == hostname for name in survey.names) > 1:
        return []  # one name for several hosts is another check's finding
    unresolved, wrong = [], {}
    for asker, answers in survey.evidence["resolution"].items():
        addresses = answers.get(hostname)
        if asker == target:
            continue
        if not addresses:
            unresolved.append(asker)
        elif not target_addresses & set(addresses):
            wrong[asker] = addresses[0]
    line = f"echo '{survey.address(target)} {hostname}' | sudo tee -a /etc/hosts"
    findings = []
    for asker, address in wrong.items():
        message = (
            f"on {asker}, {hostname} means {address}{_owner_text(survey, address)}, not {target}"
        )
        script = f"/[[:space:]]{hostname}\\b/s/^[^[:space:]]*/{survey.address(target)}/"
        remedy = (
            f"On {asker}: {hosts_file.edit_command(script)}\n"
            f"(if `getent hosts {hostname}` says the same afterwards, the name server is wrong)"
        )
        findings.append(warned("resolution", [asker, target], message, remedy))
    if unresolved:
        message = f"{join_names(unresolved)} cannot resolve {hostname}, the host name of {target}"
        findings.append(
            warned(
                "resolution",
                [*unresolved, target],
                message,
                "\n".join(f"On {name}: {line}" for name in unresolved)
                + "\n(needed by mpirun and plain torchrun only)",
            )
        )
    return findings


def _addresses(survey: Survey, name: str) -> set[str]:
    links = survey.facts[name]["interfaces"] or []
    return {a["address"] for link in links for a in link["addresses"] if is_routable(link, a)}


def _owner_text(survey: Survey, address: str) -> str:
    owner = [name for name in survey.names if address in _addresses(survey, name)]
    return f" (that is {owner[0]})" if owner else ""


check = Check("resolution", "Names of others", "quick", evaluate, probe, needs_several_hosts=True)
