"""Translations of other launchers' variables into torchrun's: mpirun, mpiexec and the schedulers.

Pure: from an environment to the place and to the address at which the ranks meet.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.spec import jobenv
from paceline.spec.errors import SettingError

# What tells a process that it is one of an MPI's: a regular expression of names
PROCESS_VARIABLES = (
    r"PMI|PMIX_|OMPI_|OPAL_|ORTE_|PRTE_|HYD|MPIR_|MPI_LOCAL|MPIEXEC_|MV2_COMM|I_MPI_(HYDRA|PMI)"
)
_LOWEST_PORT, _PORTS = 20_000, 10_000  # below Linux's ephemeral range, which begins at 32768


@dataclass(frozen=True, slots=True)
class Dialect:
    """The variables by which a launcher tells a process its place.

    Attributes:
        name: Of the launcher, for people.
        rank, size, local_rank, local_size: Names of variables; the local ones may be empty.
        job: Variables whose values together tell this job from others on the machine.
        counts: Variable with the tasks of each node (``2(x3),1``), where no local size is told.
        node: Variable with this node's place in that list.
        nodes: Variables with a node list (``a[03-07,9],b``), the first that is set wins.
    """

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    job: tuple[str, ...]
    counts: str = ""
    node: str = ""
    nodes: tuple[str, ...] = ()


DIALECTS = (
    Dialect("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", ()),
    Dialect(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    Dialect(
        "MVAPICH2",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
        ("MPISPAWN_ID", "SLURM_JOB_ID"),
    ),
    # A step of Slurm: inside a batch script but outside srun these are not set.
    Dialect(
        "srun",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "",
        ("SLURM_JOB_ID", "SLURM_STEP_ID"),
        "SLURM_STEP_TASKS_PER_NODE",
        "SLURM_NODEID",
        ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
    ),
    Dialect(
        "MPICH or Intel MPI",
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
        ("HYDRA_LAUNCHER_JOBID", "PMI_ID_SPACE"),
    ),
)


# Whose words ranks find beside torchrun's where these start the nodes
MPI_DIALECTS = ("Open MPI", "MVAPICH2", "MPICH or Intel MPI")
SRUN_DIALECTS = ("srun",)
ONECCL = "oneCCL"
_LEFT_TO_SRUN = {"SLURM_STEP_NUM_TASKS"}  # a size would make Lightning ask for srun itself


def in_words_of(names: Sequence[str], place: Mapping[str, str]) -> dict[str, str]:
    """A rank's place as other launchers tell it, for scripts that read only theirs.

    None of these variables connects a process to a process manager (``PMI_FD``, ``PMI_PORT``,
    ``PMIX_*``), without which an MPI library takes its process for a world of its own, as it must:
    the ranks here are no processes of an MPI.

    Args:
        names: Whose words: of :data:`DIALECTS`, or ``ONECCL``.
        place: torchrun's variables for the rank.
    """
    found: dict[str, str] = {}
    for one in DIALECTS:
        if one.name in names:
            own = {one.rank: jobenv.RANK, one.size: jobenv.WORLD_SIZE,
                   one.local_rank: jobenv.LOCAL_RANK, one.local_size: jobenv.LOCAL_WORLD_SIZE,
                   one.node: jobenv.GROUP_RANK}  # fmt: skip
            found |= {name: place[ours] for name, ours in own.items() if name}
    if ONECCL in names:  # which asks for these where neither Hydra nor PMIx has started it
        found |= {"CCL_LOCAL_RANK": place[jobenv.LOCAL_RANK],
                  "CCL_LOCAL_SIZE": place[jobenv.LOCAL_WORLD_SIZE]}  # fmt: skip
    return {name: value for name, value in found.items() if name not in _LEFT_TO_SRUN}


def translated(environ: Mapping[str, str], parent: int) -> dict[str, str]:
    """torchrun's variables for this process; empty when nobody launched it.

    Args:
        environ: The process's environment.
        parent: Id of the parent process, which tells jobs of one machine apart where the
            launcher's variables do not.

    Raises:
        SettingError: The ranks span machines and no variable says where they could meet.
    """
    dialect = next((one for one in DIALECTS if one.rank in environ and one.size in environ), None)
    if dialect is None:
        return {}
    return {**_place(environ, dialect), **_rendezvous(environ, dialect, parent)}


def _place(environ: Mapping[str, str], dialect: Dialect) -> dict[str, str]:
    sizes = environ.get(dialect.local_size) or _tasks_here(environ)
    return {
        jobenv.RANK: environ[dialect.rank],
        jobenv.WORLD_SIZE: environ[dialect.size],
        jobenv.LOCAL_RANK: environ.get(dialect.local_rank, "0"),
        jobenv.LOCAL_WORLD_SIZE: sizes,
    }


def _tasks_here(environ: Mapping[str, str]) -> str:
    """Tasks on this node, from the list of a scheduler, be it the launcher or around it."""
    around = next((one for one in DIALECTS if one.counts in environ), None)
    if around is None:
        return "1"
    counts: list[str] = []
    for entry in environ[around.counts].split(","):
        count, _, times = entry.partition("(x")
        counts += [count] * int(times.rstrip(")") or 1)
    node = int(environ.get(around.node, "0"))
    return counts[min(node, len(counts) - 1)]


def _rendezvous(environ: Mapping[str, str], dialect: Dialect, parent: int) -> dict[str, str]:
    place = _place(environ, dialect)
    here = place[jobenv.WORLD_SIZE] == place[jobenv.LOCAL_WORLD_SIZE]
    lists = [environ.get(name, "") for one in DIALECTS for name in one.nodes]
    address = "127.0.0.1" if here else first_node(next(filter(None, lists), ""))
    marks = [environ[name] for name in dialect.job if name in environ]
    port = _port(marks or [str(parent)]) if marks or here else ""
    found = {
        jobenv.MASTER_ADDR: environ.get(jobenv.MASTER_ADDR) or address,
        jobenv.MASTER_PORT: environ.get(jobenv.MASTER_PORT) or port,
    }
    missing = [name for name, value in found.items() if not value]
    if missing:
        raise _nowhere(dialect, missing)
    return found


def _nowhere(dialect: Dialect, missing: list[str]) -> SettingError:
    return SettingError(
        f"{dialect.name} started these ranks on several machines, but not where they can meet",
        found=f"{' and '.join(missing)} not set",
        remedy="mpirun -x MASTER_ADDR=ADDRESS_OF_RANK_0 -x MASTER_PORT=29500 … (Open MPI), or"
        " mpiexec -genv MASTER_ADDR ADDRESS_OF_RANK_0 -genv MASTER_PORT 29500 …; elsewhere export"
        " both before the start",
    )


def _port(marks: list[str]) -> str:
    """The same on every rank without talking: from what identifies the job."""
    digest = hashlib.sha256("\0".join(marks).encode()).digest()
    return str(_LOWEST_PORT + int.from_bytes(digest[:4], "big") % _PORTS)


def first_node(nodes: str) -> str:
    """First host of a node list: ``a[03-07,9],b`` gives ``a03``."""
    matched = re.match(r"([^,\[]*)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodes)
    prefix, number, suffix = matched.groups("") if matched else ("", "", "")
    return prefix + number + suffix
