"""Do the hosts have the same MPI, oneAPI and libfabric?

Looks at: which mpiexec the login's PATH leads to, oneAPI's setvars.sh, libfabric, and the folders
that FI_PROVIDER_PATH, I_MPI_ROOT and CCL_ROOT name. A job that is not started by MPI needs none
of them.
Warns when: hosts differ (in libfabric only if all have an MPI), or a variable names a folder that
is not there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.checks.check import Check, ProbeSession, Survey, join_names, passed, warned
from paceline.spec.finding import Finding

# what a host may have → its name, and what needs it on all hosts
PARTS = {
    "mpiexec": ("mpiexec", "--via mpi needs the same MPI on all hosts; other ways need none"),
    "setvars": ("oneAPI's setvars.sh", "Needed for --activate and Intel's libraries only"),
    "libfabric": ("libfabric", "Needed by MPI and oneCCL only; an MPI may bring its own"),
}


async def probe(session: ProbeSession) -> dict[str, Any]:
    """By host, the path of each part (empty: not there), and folders that variables misname."""
    answers = await session.request_all("mpi")
    return {name: answer["mpi"] for name, answer in answers.items()}


def evaluate(survey: Survey) -> list[Finding]:
    hosts: Mapping[str, Mapping[str, Any]] = survey.evidence["mpi"]
    findings = [
        warned(
            "mpi",
            [name],
            f"{variable} on {name} names {folder}, which is not there",
            f"On {name}: unset {variable} in the login's start-up files, or install what it names",
        )
        for name, parts in hosts.items()
        for variable, folder in parts["missing_folders"].items()
    ]
    for part, (title, need) in PARTS.items():
        places = {name: str(parts[part]) for name, parts in hosts.items()}
        if part == "libfabric" and not all(parts["mpiexec"] for parts in hosts.values()):
            continue  # nobody uses it
        if len(set(places.values())) > 1:
            paths_text = ", ".join(f"{name} {path or 'none'}" for name, path in places.items())
            findings.append(warned("mpi", list(hosts), f"{title} differs: {paths_text}", need))
    return findings or [passed("mpi", survey.names, _inventory(hosts))]


def _inventory(hosts: Mapping[str, Mapping[str, Any]]) -> str:
    parts = next(iter(hosts.values()))
    present = [f"{title} ({parts[part]})" for part, (title, _) in PARTS.items() if parts[part]]
    missing = [title for part, (title, _) in PARTS.items() if not parts[part]]
    text = join_names(present) if present else "no MPI, oneAPI or libfabric"
    return (
        f"{text}; {join_names(missing)} not there and not needed" if present and missing else text
    )


check = Check("mpi", "MPI and oneAPI", "full", evaluate, probe)
