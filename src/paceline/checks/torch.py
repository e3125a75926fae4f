"""Do all hosts have the same torch?

Looks at: ``torch/version.py`` of every host; ``--full`` asks the loaded library.
Fails when: a host has none, or the versions or what they were built for differ. Warns when a
declared NCCL version is not the one that torch brings.
"""

from __future__ import annotations

from paceline.checks.check import Check, failed, passed, warned
from paceline.checks.scene import Scene
from paceline.cluster.agreement import torch_problem
from paceline.spec.finding import Finding


def judge(scene: Scene) -> list[Finding]:
    problem = torch_problem(scene.present, scene.facts)
    if problem is not None:
        found = problem.found.replace("\n", ", ")
        return [failed("torch", scene.names, f"{problem.message}: {found}", problem.remedy)]
    torch = scene.facts[scene.names[0]]["torch"]
    return _nccl(scene) or [passed("torch", scene.names, f"torch {torch['version']}")]


def _nccl(scene: Scene) -> list[Finding]:
    """An image's NCCL_VERSION says nothing about the library that torch loads."""
    found = []
    for name in scene.names:
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
