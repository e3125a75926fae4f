"""Do all hosts have the same torch?

Looks at: ``torch/version.py`` of every host; without ``--quick`` the loaded library is asked, too.
Fails when: a host has none, or the versions or what they were built for differ. Warns when a
declared NCCL version is not the one that torch brings.
"""

from __future__ import annotations

from paceline.checks.check import Check, Scene, failed, passed, warned
from paceline.remote.agreement import odd_ones, torch_problem
from paceline.spec.finding import Finding


def judge(scene: Scene) -> list[Finding]:
    hosts = [host for host in scene.present if _has_its_python(scene, host.name)]
    names = [host.name for host in hosts]
    if not hosts:
        return []
    versions = {name: (scene.facts[name].get("torch") or {}).get("version") for name in names}
    problem = torch_problem(hosts, scene.facts)
    if problem is not None:
        found = problem.found.replace("\n", ", ")
        guilty = [name for name in names if versions[name] is None] or odd_ones(versions)
        return [failed("torch", guilty, f"{problem.message}: {found}", problem.remedy)]
    return _nccl(scene, names) or [passed("torch", names, f"torch {versions[names[0]]}")]


def _has_its_python(scene: Scene, name: str) -> bool:
    """Where the interpreter is missing, what another one has says nothing."""
    return scene.wishes.pythons.get(name, scene.chosen[name]) == scene.chosen[name]


def _nccl(scene: Scene, names: list[str]) -> list[Finding]:
    """An image's NCCL_VERSION says nothing about the library that torch loads."""
    found = []
    for name in names:
        environment = scene.facts[name].get("environment") or {}
        torch = scene.facts[name]["torch"]
        if torch.get("cuda") and (declared := environment.get("NCCL_VERSION")):
            loaded = (scene.evidence.get("packages") or {}).get(name, {})
            carried = {n: v for n, v in loaded.items() if n.startswith("nvidia-nccl")}
            if carried and not any(v in declared for v in carried.values()):
                is_ = ", ".join(f"{n} {v}" for n, v in carried.items())
                found.append(
                    warned(
                        "torch",
                        [name],
                        f"{name} declares NCCL_VERSION={declared}, but torch loads {is_}",
                        "Go by the library that torch loads; the variable only names what the "
                        "image was built with",
                    )
                )
    return found


check = Check("torch", "torch", "facts", judge, torch=True)
