"""Do the hosts resolve each other's names to the right addresses?

Looks at: what each host's name resolves to on every other host.
Warns when: a name is unknown there, or means an address of another host. Paceline publishes
addresses, never names; plain torchrun and MPI publish names.
"""

from __future__ import annotations

from typing import Any

from paceline.checks.check import Check, ProbeSession, Survey, join_names, passed, warned
from paceline.setup import lines as hosts_file
from paceline.spec.finding import Finding
from paceline.spec.formatting import shell_text


async def probe(session: ProbeSession) -> dict[str, Any]:
    """Returns addresses by name, by asking host."""
    names = sorted({_host_name(session.survey, name) for name in session.channels})
    answers = await session.request_all("resolve", names=names)
    return {name: answer["names"] for name, answer in answers.items()}


def _host_name(survey: Survey, name: str) -> str:
    return str(survey.facts[name]["name"]["hostname"])


def evaluate(survey: Survey) -> list[Finding]:
    findings = [finding for target in survey.names for finding in _target_findings(survey, target)]
    message = "every host knows the others by name"
    return findings or [passed("resolution", survey.names, message)]


def _target_findings(survey: Survey, target: str) -> list[Finding]:
    hostname, own_addresses = _host_name(survey, target), set(survey.addresses(target))
    if sum(_host_name(survey, name) == hostname for name in survey.names) > 1:
        return []  # duplicate names are a finding of another check
    unresolved, findings = [], []
    for asker, answers in survey.evidence["resolution"].items():
        addresses = answers.get(hostname)
        if asker == target:
            continue
        if not addresses:
            unresolved.append(asker)
        elif not own_addresses & set(addresses):
            owner = [name for name in survey.names if addresses[0] in survey.addresses(name)]
            owner_text = f" (that is {owner[0]})" if owner else ""
            message = f"on {asker}, {hostname} means {addresses[0]}{owner_text}, not {target}"
            script = f"/[[:space:]]{hostname}\\b/s/^[^[:space:]]*/{survey.address(target)}/"
            is_root = survey.facts[asker]["user"]["uid"] == 0
            remedy = (
                f"On {asker}: {hosts_file.edit_command(script, is_root)}\n"
                f"(if `{shell_text(['getent', 'hosts', hostname])}` says the same afterwards, the "
                "name server is wrong)"
            )
            findings.append(warned("resolution", [asker, target], message, remedy))
    if unresolved:
        message = f"{join_names(unresolved)} cannot resolve {hostname}, the host name of {target}"
        entry = shell_text([f"{survey.address(target)} {hostname}"])
        line = f"echo {entry} | sudo tee -a /etc/hosts"
        remedy = "\n".join(f"On {name}: {line}" for name in unresolved)
        remedy += "\n(needed by mpirun and plain torchrun only)"
        findings.append(warned("resolution", [*unresolved, target], message, remedy))
    return findings


check = Check("resolution", "Names of others", evaluate, probe, needs_several_hosts=True)
