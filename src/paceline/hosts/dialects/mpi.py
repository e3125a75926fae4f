"""MPI's variables, which have the size of the job and the process's rank, but not the hosts.

Hosts are known in two cases only: a variable names mpirun's host file, or all processes are on
this machine.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.hosts.dialect import Dialect, FileReference, Parsed, Reading
from paceline.spec.errors import HostsError
from paceline.spec.hosts import Host

HOST_FILES = {
    "I_MPI_HYDRA_HOST_FILE": "colon",
    "HYDRA_HOST_FILE": "colon",
    "OMPI_MCA_orte_default_hostfile": "slots",
    "PRTE_MCA_prte_default_hostfile": "slots",
}
SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE")


def detect(reading: Reading) -> bool:
    """Whether variables of a process started by mpirun, or of its host file, are set."""
    return not reading.text and any(reading.environ.get(v) for v in (*HOST_FILES, *SIZES))


def parse(reading: Reading) -> Parsed:
    """Returns the host file named by a variable, or this machine if it runs all processes."""
    environ = reading.environ
    for variable, dialect in HOST_FILES.items():
        if environ.get(variable):
            note = f"host file from ${variable}"
            return Parsed(notes=(note,), reference=FileReference(environ[variable], dialect))
    size, local = _number(environ, SIZES), _number(environ, LOCAL_SIZES)
    if size is not None and size == local:
        note = f"all {size} processes of the MPI job are on this machine"
        return Parsed((Host(reading.hostname, slots=size, local=True),), (note,))
    raise _unknown_hosts(environ, size, local)


def _number(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    values = [environ[name] for name in names if environ.get(name, "").isdecimal()]
    return int(values[0]) if values and int(values[0]) > 0 else None


def _unknown_hosts(environ: Mapping[str, str], size: int | None, local: int | None) -> HostsError:
    variables = [f"{name}={environ[name]}" for name in (*SIZES, *LOCAL_SIZES) if name in environ]
    if size is None:
        report = "none of " + ", ".join((*SIZES, *HOST_FILES)) + " is set to something usable"
    else:
        here = "how many are here is not said" if local is None else f"{local} of them here"
        report = f"{', '.join(variables)}: {size} processes, {here}"
    return HostsError(
        "MPI's variables tell the size of a job and a process's rank, not the names of its hosts",
        found=report,
        remedy="name the host file that mpirun was given, such as `-H hosts.txt`",
    )


DIALECT = Dialect(
    name="mpi", title="variables of an MPI job", detect=detect, parse=parse, is_environment=True
)
