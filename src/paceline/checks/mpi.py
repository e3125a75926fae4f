"""Do the hosts have the same MPI, oneAPI and libfabric?

Looks at: which mpiexec the login's PATH leads to, oneAPI's setvars.sh, libfabric, and the folders
that FI_PROVIDER_PATH, I_MPI_ROOT and CCL_ROOT name. A job that is not started by MPI needs none
of them.
Warns when: hosts differ (in libfabric only if all have an MPI), or a variable names a folder that
does not exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.checks.check import Check, ProbeSession, Survey, join_names, passed, warned
from paceline.spec.finding import Finding

# part → its name, and what needs it on all hosts
PARTS = {
    "mpiexec": ("mpiexec", "--via mpi needs the same MPI on all hosts; other ways need none"),
    "setvars": ("oneAPI's setvars.sh", "Needed for --activate and Intel's libraries only"),
    "libfabric": ("libfabric", "Needed by MPI and oneCCL only; an MPI may bring its own"),
}


async def probe(session: ProbeSession) -> dict[str, Any]:
    """Returns the path of each part (empty if missing) and missing folders, by host."""
    answers = await session.request_all("mpi")
    return {name: answer["mpi"] for name, answer in answers.items()}


def evaluate(survey: Survey) -> list[Finding]:
    hosts: Mapping[str, Mapping[str, Any]] = survey.evidence["mpi"]
    findings = []
    for name, parts in hosts.items():
        for variable, folder in parts["missing_folders"].items():
            message = f"{variable} on {name} names {folder}, which is not there"
            remedy = (
                f"On {name}: unset {variable} in the login's start-up files, or install what it "
                "names"
            )
            findings.append(warned("mpi", [name], message, remedy))
    all_have_mpi = all(parts["mpiexec"] for parts in hosts.values())
    for part, (title, need) in PARTS.items():
        paths = {name: str(parts[part]) for name, parts in hosts.items()}
        is_used = part != "libfabric" or all_have_mpi
        if is_used and len(set(paths.values())) > 1:
            listed = ", ".join(f"{name} {path or 'none'}" for name, path in paths.items())
            findings.append(warned("mpi", list(hosts), f"{title} differs: {listed}", need))
    return findings or [passed("mpi", survey.names, _inventory(next(iter(hosts.values()))))]


def _inventory(parts: Mapping[str, Any]) -> str:
    present = [f"{title} ({parts[part]})" for part, (title, _) in PARTS.items() if parts[part]]
    missing = [title for part, (title, _) in PARTS.items() if not parts[part]]
    text = join_names(present) if present else "no MPI, oneAPI or libfabric"
    if present and missing:
        text += f"; {join_names(missing)} not there and not needed"
    return text


check = Check("mpi", "MPI and oneAPI", evaluate, probe)
