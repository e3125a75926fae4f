"""Translates between other launchers' variables (mpirun, mpiexec, schedulers) and torchrun's."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.spec import jobenv
from paceline.spec.errors import SettingError

# Regular expression of variables that make a process part of an MPI job
PROCESS_VARIABLES = (
    r"PMI|PMIX_|OMPI_|OPAL_|ORTE_|PRTE_|HYD|MPIR_|MPI_LOCAL|MPIEXEC_|MV2_COMM|I_MPI_(HYDRA|PMI)"
)
_LOWEST_PORT, _PORTS = 20_000, 10_000  # below Linux's ephemeral range, which begins at 32768


@dataclass(frozen=True, slots=True)
class Dialect:
    """The variables in which a launcher passes a process its rank.

    Attributes:
        name: The launcher's name, for people.
        rank, size, local_rank, local_size: Names of variables; the local ones may be empty.
        job: Variables whose values together identify the job on the machine.
        counts: Variable with the tasks of each node (``2(x3),1``), without a local size.
        node: Variable with this node's index in that list.
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


def _comm_world(name: str, prefix: str, job: tuple[str, ...]) -> Dialect:
    world = f"{prefix}_COMM_WORLD"
    ranks = f"{world}_RANK", f"{world}_SIZE", f"{world}_LOCAL_RANK", f"{world}_LOCAL_SIZE"
    return Dialect(name, *ranks, job)


DIALECTS = (
    Dialect("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", ()),
    _comm_world("Open MPI", "OMPI", ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")),
    _comm_world("MVAPICH2", "MV2", ("MPISPAWN_ID", "SLURM_JOB_ID")),
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


# Dialects that are set beside torchrun's if these launchers start the nodes
MPI_DIALECTS = ("Open MPI", "MVAPICH2", "MPICH or Intel MPI")
SRUN_DIALECTS = ("srun",)
ONECCL = "oneCCL"
_SRUN_ONLY = {"SLURM_STEP_NUM_TASKS"}  # a size would make Lightning ask for srun itself


def foreign_variables(names: Sequence[str], place: Mapping[str, str]) -> dict[str, str]:
    """A rank's variables in other launchers' dialects, for scripts that read only those.

    None of them connects to a process manager (``PMI_FD``, ``PMI_PORT``, ``PMIX_*``): an MPI
    library then takes its process for a world of its own, which is correct here.

    Args:
        names: Names of :data:`DIALECTS`, or ``ONECCL``.
        place: torchrun's variables for the rank.
    """
    variables: dict[str, str] = {}
    for dialect in DIALECTS:
        if dialect.name in names:
            sources = {dialect.rank: jobenv.RANK, dialect.size: jobenv.WORLD_SIZE,
                       dialect.local_rank: jobenv.LOCAL_RANK,
                       dialect.local_size: jobenv.LOCAL_WORLD_SIZE,
                       dialect.node: jobenv.GROUP_RANK}  # fmt: skip
            variables |= {name: place[source] for name, source in sources.items() if name}
    if ONECCL in names:  # needs these unless Hydra or PMIx started it
        variables |= {"CCL_LOCAL_RANK": place[jobenv.LOCAL_RANK],
                      "CCL_LOCAL_SIZE": place[jobenv.LOCAL_WORLD_SIZE]}  # fmt: skip
    return {name: value for name, value in variables.items() if name not in _SRUN_ONLY}


def later_copy(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """The launcher that started this command several times, and their number.

    ``None`` in the first of these processes, which can do the work for all, and outside of them.
    """
    for dialect in DIALECTS:
        rank, size = environ.get(dialect.rank, ""), environ.get(dialect.size, "")
        # others set torchrun's RANK, too, such as an operator of Kubernetes for each pod
        is_started = dialect.name != "torchrun" or "TORCHELASTIC_RUN_ID" in environ
        if is_started and rank.isdigit() and size.isdigit() and int(rank) > 0:
            return dialect.name, int(size)
    return None


def torchrun_variables(environ: Mapping[str, str], parent: int) -> dict[str, str]:
    """torchrun's variables for this process; empty if no launcher started it.

    Args:
        parent: Id of the parent process; identifies the job if no variable does.

    Raises:
        SettingError: The ranks span machines and no variable says where to connect.
    """
    dialect = next((d for d in DIALECTS if d.rank in environ and d.size in environ), None)
    if dialect is None:
        return {}
    return {**_place(environ, dialect), **_rendezvous(environ, dialect, parent)}


def _place(environ: Mapping[str, str], dialect: Dialect) -> dict[str, str]:
    return {
        jobenv.RANK: environ[dialect.rank],
        jobenv.WORLD_SIZE: environ[dialect.size],
        jobenv.LOCAL_RANK: environ.get(dialect.local_rank, "0"),
        jobenv.LOCAL_WORLD_SIZE: environ.get(dialect.local_size) or _local_tasks(environ),
    }


def _local_tasks(environ: Mapping[str, str]) -> str:
    """Tasks on this node, from the list of the launcher or of a scheduler around it."""
    scheduler = next((dialect for dialect in DIALECTS if dialect.counts in environ), None)
    if scheduler is None:
        return "1"
    counts: list[str] = []
    for entry in environ[scheduler.counts].split(","):
        count, _, times = entry.partition("(x")
        counts += [count] * int(times.rstrip(")") or 1)
    node = int(environ.get(scheduler.node, "0"))
    return counts[min(node, len(counts) - 1)]


def _rendezvous(environ: Mapping[str, str], dialect: Dialect, parent: int) -> dict[str, str]:
    place = _place(environ, dialect)
    is_local = place[jobenv.WORLD_SIZE] == place[jobenv.LOCAL_WORLD_SIZE]
    lists = [environ.get(name, "") for dialect in DIALECTS for name in dialect.nodes]
    address = "127.0.0.1" if is_local else first_node(next(filter(None, lists), ""))
    marks = [environ[name] for name in dialect.job if name in environ]
    port = _port(marks or [str(parent)]) if marks or is_local else ""
    variables = {
        jobenv.MASTER_ADDR: environ.get(jobenv.MASTER_ADDR) or address,
        jobenv.MASTER_PORT: environ.get(jobenv.MASTER_PORT) or port,
    }
    if missing := [name for name, value in variables.items() if not value]:
        raise SettingError(
            f"{dialect.name} started these ranks on several machines, but not where they can meet",
            found=f"{' and '.join(missing)} not set",
            remedy="mpirun -x MASTER_ADDR=ADDRESS_OF_RANK_0 -x MASTER_PORT=29500 … (Open MPI), or"
            " mpiexec -genv MASTER_ADDR ADDRESS_OF_RANK_0 -genv MASTER_PORT 29500 …; elsewhere"
            " export both before the start",
        )
    return variables


def _port(marks: list[str]) -> str:
    """A port that every rank derives from the job's identity."""
    digest = hashlib.sha256("\0".join(marks).encode()).digest()
    return str(_LOWEST_PORT + int.from_bytes(digest[:4], "big") % _PORTS)


def first_node(nodes: str) -> str:
    """First host of a node list: ``a[03-07,9],b`` gives ``a03``."""
    match = re.match(r"([^,\[]*)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodes)
    return "".join(match.groups("")) if match else ""
