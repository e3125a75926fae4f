"""Do the loaded libraries agree, and do collectives work between the hosts?

Looks at: what torch reports once it is loaded on every host (its version, what it was built for,
NCCL, backends), and a short job: every collective once, checked, and a megabyte all-reduced.
Fails when: loaded versions differ, a host cannot import torch, the job fails or a value is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.checks.check import Check, Survey, failed, join_names, passed, unknown
from paceline.spec.finding import Finding

MATCHED_LIBRARIES = ("torch", "cuda", "nccl")


def evaluate(survey: Survey) -> list[Finding]:
    result = survey.evidence.get("trial")
    if result is None:
        return []
    return [*_library_findings(result["loaded"]), _job_finding(survey, result)]


def _library_findings(loaded: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    for name in MATCHED_LIBRARIES:
        values = {host: str(libraries.get(name) or "none") for host, libraries in loaded.items()}
        if len(set(values.values())) > 1:
            summary = ", ".join(f"{host} {value}" for host, value in values.items())
            message = f"the loaded {name} differs between the hosts: {summary}"
            remedy = (
                "Install the same torch everywhere (paceline setup env --requirements FILE), "
                "and take foreign library folders out of LD_LIBRARY_PATH"
            )
            return [failed("trial", tuple(values), message, remedy)]
    if not loaded:
        return []
    first = next(iter(loaded.values()))
    summary = ", ".join(f"{name} {first[name]}" for name in MATCHED_LIBRARIES if first.get(name))
    return [passed("trial", tuple(loaded), f"loaded everywhere: {summary}")]


def _job_finding(survey: Survey, result: Mapping[str, Any]) -> Finding:
    if result.get("error"):
        hosts = tuple(result.get("hosts") or survey.names)
        remedy = result.get("remedy") or "paceline explain of that run says more"
        return failed("trial", hosts, f"a short job fails: {result['error']}", remedy)
    rows: Sequence[Mapping[str, Any]] = result["rows"]
    backend = result.get("backend")
    wrong = sorted({row["collective"] for row in rows if row["wrong"] > 0})
    if wrong:
        message = f"wrong values from {join_names(wrong)} over {backend}"
        remedy = (
            "Memory or network corrupt data: paceline bench collectives with two hosts at a "
            "time finds the one; look at its ECC counters and cables"
        )
        return failed("trial", survey.names, message, remedy)
    if not rows:
        return unknown("trial", survey.names, "the short job left no result")
    bandwidth = max(row["busbw"] for row in rows if row["collective"] == "all_reduce")
    message = (
        f"{len({row['collective'] for row in rows})} collectives right over {backend}, "
        f"all_reduce {bandwidth * 8:.2f} Gbit/s on the bus"
    )
    return passed("trial", survey.names, message)


check = Check("trial", "Collectives", evaluate, needs_several_hosts=True, needs_torch=True)
