"""Do all hosts have the same torch?

Looks at: ``torch/version.py`` of every host; without ``--quick`` also the loaded library.
Fails when: a host has no torch, or versions or builds differ. Warns when a declared NCCL version is
not the one that torch brings.
"""

from __future__ import annotations

from paceline.checks.check import Check, Survey, failed, passed, warned
from paceline.remote.agreement import outliers, torch_problem
from paceline.spec.finding import Finding


def evaluate(survey: Survey) -> list[Finding]:
    hosts = [host for host in survey.present if _has_requested_python(survey, host.name)]
    names = [host.name for host in hosts]
    if not hosts:
        return []
    versions = {name: (survey.facts[name].get("torch") or {}).get("version") for name in names}
    problem = torch_problem(hosts, survey.facts)
    if problem is not None:
        details = problem.found.replace("\n", ", ")
        culprits = [name for name in names if versions[name] is None] or outliers(versions)
        return [failed("torch", culprits, f"{problem.message}: {details}", problem.remedy)]
    return _nccl(survey, names) or [passed("torch", names, f"torch {versions[names[0]]}")]


def _has_requested_python(survey: Survey, name: str) -> bool:
    """Whether the requested interpreter exists; another one's torch does not matter."""
    interpreter = survey.interpreters[name]
    return survey.requirements.pythons.get(name, interpreter) == interpreter


def _nccl(survey: Survey, names: list[str]) -> list[Finding]:
    """Warns of an image's NCCL_VERSION that is not the version of the library torch loads."""
    findings = []
    for name in names:
        declared = (survey.facts[name].get("environment") or {}).get("NCCL_VERSION")
        if not declared or not survey.facts[name]["torch"].get("cuda"):
            continue
        packages = (survey.evidence.get("packages") or {}).get(name, {})
        nccl = {n: v for n, v in packages.items() if n.startswith("nvidia-nccl")}
        if nccl and not any(version in declared for version in nccl.values()):
            versions = ", ".join(f"{n} {v}" for n, v in nccl.items())
            message = f"{name} declares NCCL_VERSION={declared}, but torch loads {versions}"
            remedy = (
                "Go by the library that torch loads; the variable only names what the image was "
                "built with"
            )
            findings.append(warned("torch", [name], message, remedy))
    return findings


check = Check("torch", "torch", evaluate, needs_torch=True)
