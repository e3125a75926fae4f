"""Slurm's node lists (``gpu-[01-04],login``), as text or from the allocation's variables."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from paceline.hosts.address import check_address
from paceline.hosts.dialect import Dialect, Parsed, Reading, UnreadableError
from paceline.hosts.lines import parse_lines, split_lines, strip_comment
from paceline.hosts.nodelist import compress, expand, expand_counts, expand_gpus
from paceline.spec.errors import HostsError
from paceline.spec.hosts import Cluster, Host

# A step's list comes last: `paceline run` inside `srun` still uses the whole allocation.
NODE_LISTS = ("SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_STEP_NODELIST")
TASKS = ("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE")
CPUS = "SLURM_JOB_CPUS_PER_NODE"
GPUS_PER_NODE, GPUS, GPUS_ON_NODE = "SLURM_GPUS_PER_NODE", "SLURM_GPUS", "SLURM_GPUS_ON_NODE"
_BRACKET = re.compile(r"\[[^\[\]:]*\]")  # with a colon inside it is an IPv6 address
T = TypeVar("T")


def detect(reading: Reading) -> bool:
    """Whether the allocation's variables are set, or a text has node-list brackets."""
    if not reading.text:
        return any(reading.environ.get(name) for name in NODE_LISTS)
    return any(_BRACKET.search(strip_comment(line)) for line in split_lines(reading.text))


def parse(reading: Reading) -> Parsed:
    """Returns the hosts of the text, or of the allocation."""
    return parse_lines(reading) if reading.text else _allocation(reading.environ)


def write(cluster: Cluster) -> str:
    """Writes the addresses as one node list, in rank order."""
    return compress(host.address for host in cluster.hosts) + "\n"


def _allocation(environ: Mapping[str, str]) -> Parsed:
    variable = next((name for name in NODE_LISTS if environ.get(name)), "")
    if not variable:
        raise HostsError(
            "the hosts of a Slurm allocation were asked for, and this is not one",
            found=f"none of {', '.join(NODE_LISTS)} is set",
            remedy="run this inside `salloc -N 2` or an `sbatch` script, or name a host file",
        )
    names = _read(variable, environ[variable], _names)
    slots_variable, slots = _slots(environ, len(names))
    gpus, gpu_notes = _gpus(environ, len(names))
    hosts = tuple(
        Host(name, slots=n, slots_yield=n is not None, gpus=gpus)
        for name, n in zip(names, slots, strict=True)
    )
    notes = [f"hosts from ${variable}", *_slot_notes(environ, slots_variable, gpus), *gpu_notes]
    return Parsed(hosts, tuple(notes))


def _names(value: str) -> list[str]:
    return list(dict.fromkeys(check_address(name) for name in expand(value.strip())))


def _slots(environ: Mapping[str, str], nodes: int) -> tuple[str, Sequence[int | None]]:
    """Returns the variable with the slots, and one number for each node.

    One task a node is ignored unless it was requested, because it is Slurm's default.
    """
    for variable in TASKS:
        value = environ.get(variable, "")
        counts = _read(variable, value, expand_counts) if value else []
        if len(counts) == nodes and (max(counts) > 1 or _has_requested_tasks(environ)):
            return variable, counts
    return "", [None] * nodes


def _has_requested_tasks(environ: Mapping[str, str]) -> bool:
    """Whether ``--ntasks`` or ``--ntasks-per-node`` was given; a step sets its own number."""
    is_step = bool(environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID"))
    num_tasks = "" if is_step else environ.get("SLURM_NTASKS")
    return bool(num_tasks or environ.get("SLURM_NTASKS_PER_NODE"))


def _gpus(environ: Mapping[str, str], nodes: int) -> tuple[int | None, list[str]]:
    """Returns GPUs of each node with notes; ``None`` if nodes may differ.

    With ``--gres``, only the number on the shell's own node is known.
    """
    for variable, share in ((GPUS_PER_NODE, 1), (GPUS, nodes), (GPUS_ON_NODE, 1)):
        value = environ.get(variable, "")
        if not value:
            continue
        total = sum(number for _, number in _read(variable, value, expand_gpus))
        if total % share:
            return None, [
                f"{total} GPUs (${variable}) cannot be divided equally among {nodes} nodes"
            ]
        return total // share, [f"GPUs on each node: {total // share} (${variable}={value})"]
    return None, []


def _slot_notes(environ: Mapping[str, str], slots_variable: str, gpus: int | None) -> list[str]:
    if slots_variable:
        return [f"slots from ${slots_variable} ({environ[slots_variable]})"]
    if gpus:
        return []
    notes = ["nobody asked Slurm for a number of tasks on each node: slots are left open"]
    if environ.get(CPUS):
        notes.append(f"processors on each node: {environ[CPUS]} (${CPUS})")
    return notes


def _read(variable: str, value: str, parse: Callable[[str], T]) -> T:
    """Parses the value of a variable; an error names the variable."""
    try:
        return parse(value)
    except UnreadableError as problem:
        raise HostsError(
            f"${variable} cannot be read", found=value, remedy=f"expected {problem.expected}"
        ) from None


DIALECT = Dialect(
    name="slurm",
    title="Slurm node list",
    detect=detect,
    parse=parse,
    write=write,
    preserved_fields=frozenset({"address"}),
    is_environment=True,
    colon="slots",
)
