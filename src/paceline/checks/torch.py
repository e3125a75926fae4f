"""Do all hosts have the same torch?

Looks at: ``torch/version.py`` of every host; without ``--quick`` the loaded library is asked, too.
Fails when: a host has none, or the versions or what they were built for differ. Warns when a
declared NCCL version is not the one that torch brings.
"""

from __future__ import annotations

from paceline.checks.check import Check, Survey, failed, passed, warned
from paceline.remote.agreement import odd_ones, torch_problem
from paceline.spec.finding import Finding


def evaluate(survey: Survey) -> list[Finding]:
    hosts = [host for host in survey.present if _has_its_python(survey, host.name)]
    names = [host.name for host in hosts]
    if not hosts:
        return []
    versions = {name: (survey.facts[name].get("torch") or {}).get("version") for name in names}
    problem = torch_problem(hosts, survey.facts)
    if problem is not None:
        details = problem.found.replace("\n", ", ")
        culprits = [name for name in names if versions[name] is None] or odd_ones(versions)
        return [failed("torch", culprits, f"{problem.message}: {details}", problem.remedy)]
    return _nccl(survey, names) or [passed("torch", names, f"torch {versions[names[0]]}")]


def _has_its_python(survey: Survey, name: str) -> bool:
    """Where the interpreter is missing, what another one has says nothing."""
    return (
        survey.requirements.pythons.get(name, survey.interpreters[name])
        == survey.interpreters[name]
    )


def _nccl(survey: Survey, names: list[str]) -> list[Finding]:
    """An image's NCCL_VERSION says nothing about the library that torch loads."""
    findings = []
    for name in names:
        environment = survey.facts[name].get("environment") or {}
        torch = survey.facts[name]["torch"]
        if torch.get("cuda") and (declared := environment.get("NCCL_VERSION")):
            loaded = (survey.evidence.get("packages") or {}).get(name, {})
            nccl_packages = {n: v for n, v in loaded.items() if n.startswith("nvidia-nccl")}
            if nccl_packages and not any(v in declared for v in nccl_packages.values()):
                versions = ", ".join(f"{n} {v}" for n, v in nccl_packages.items())
                findings.append(
                    warned(
                        "torch",
                        [name],
                        f"{name} declares NCCL_VERSION={declared}, but torch loads {versions}",
                        "Go by the library that torch loads; the variable only names what the "
                        "image was built with",
                    )
                )
    return findings


check = Check("torch", "torch", "facts", evaluate, needs_torch=True)
