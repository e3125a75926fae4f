"""Does every host know the others by name, and rightly?

Looks at: what each host's name resolves to on every other host.
Warns when: a name is unknown there, or means an address that is not that host's. Paceline
publishes addresses, never names; torchrun by hand and MPI publish names.
"""

from __future__ import annotations

from typing import Any

from paceline.checks.check import Check, Probing, Scene, listed, passed, usable, warned
from paceline.setup import lines as hosts_file
from paceline.spec.finding import Finding


async def probe(probing: Probing) -> dict[str, Any]:
    """By asking host, addresses by name."""
    names = sorted({_host_name(probing.scene, name) for name in probing.channels})
    answers = await probing.each("resolve", names=names)
    return {name: answer["names"] for name, answer in answers.items()}


def _host_name(scene: Scene, name: str) -> str:
    return str(scene.facts[name]["name"]["hostname"])


def judge(scene: Scene) -> list[Finding]:
    found = [finding for target in scene.names for finding in _target(scene, target)]
    return found or [passed("resolution", scene.names, "every host knows the others by name")]


def _target(scene: Scene, target: str) -> list[Finding]:
    called, own = _host_name(scene, target), _addresses(scene, target)
    if sum(_host_name(scene, name) == called for name in scene.names) > 1:
        return []  # one name for several hosts is another check's finding
    ignorant, wrong = [], {}
    for asker, answers in scene.evidence["resolution"].items():
        addresses = answers.get(called)
        if asker == target:
            continue
        if not addresses:
            ignorant.append(asker)
        elif not own & set(addresses):
            wrong[asker] = addresses[0]
    line = f"echo '{scene.address(target)} {called}' | sudo tee -a /etc/hosts"
    found = []
    for asker, address in wrong.items():
        message = f"on {asker}, {called} means {address}{_whose(scene, address)}, not {target}"
        script = f"/[[:space:]]{called}\\b/s/^[^[:space:]]*/{scene.address(target)}/"
        remedy = (
            f"On {asker}: {hosts_file.edit_command(script)}\n"
            f"(if `getent hosts {called}` says the same afterwards, the name server is wrong)"
        )
        found.append(warned("resolution", [asker, target], message, remedy))
    if ignorant:
        message = f"{listed(ignorant)} cannot resolve {called}, the host name of {target}"
        found.append(
            warned(
                "resolution",
                [*ignorant, target],
                message,
                "\n".join(f"On {name}: {line}" for name in ignorant)
                + "\n(needed by mpirun and plain torchrun only)",
            )
        )
    return found


def _addresses(scene: Scene, name: str) -> set[str]:
    links = scene.facts[name]["interfaces"] or []
    return {a["address"] for link in links for a in link["addresses"] if usable(link, a)}


def _whose(scene: Scene, address: str) -> str:
    owner = [name for name in scene.names if address in _addresses(scene, name)]
    return f" (that is {owner[0]})" if owner else ""


check = Check("resolution", "Names of others", "quick", judge, probe, several=True)
