"""Slurm: node lists (``gpu-[01-04],login``) as text, or those of the allocation's variables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from paceline.hosts.address import check_address
from paceline.hosts.dialect import Dialect, Parsed, Reading, UnreadableError
from paceline.hosts.lines import bare, parse_lines, split_lines
from paceline.hosts.nodelist import compress, expand, expand_counts, expand_gpus
from paceline.spec.errors import HostsError
from paceline.spec.hosts import Cluster, Host

# A step's own list comes last: `paceline run` inside `srun` still means the whole allocation.
NODE_LISTS = ("SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_STEP_NODELIST")
TASKS = ("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE")
CPUS = "SLURM_JOB_CPUS_PER_NODE"
GPUS_A_NODE, GPUS, GPUS_HERE = "SLURM_GPUS_PER_NODE", "SLURM_GPUS", "SLURM_GPUS_ON_NODE"
_BRACKET = re.compile(r"\[[^\]:]*\]")  # with a colon inside it is an IPv6 address


def detect(reading: Reading) -> bool:
    """An allocation's variables, or a text with names in node-list brackets."""
    if not reading.text:
        return any(reading.environ.get(name) for name in NODE_LISTS)
    return any(_BRACKET.search(bare(line)) for line in split_lines(reading.text))


def parse(reading: Reading) -> Parsed:
    """The text's hosts, or the allocation's."""
    return parse_lines(reading) if reading.text else _allocation(reading.environ)


def write(cluster: Cluster) -> str:
    """The addresses as one node list, in rank order."""
    return compress(host.address for host in cluster.hosts) + "\n"


def _allocation(environ: Mapping[str, str]) -> Parsed:
    variable = next((name for name in NODE_LISTS if environ.get(name)), "")
    if not variable:
        raise HostsError(
            "the hosts of a Slurm allocation were asked for, and this is not one",
            found=f"none of {', '.join(NODE_LISTS)} is set",
            remedy="run this inside `salloc -N 2` or an `sbatch` script, or name a host file",
        )
    names = _names(variable, environ[variable])
    counted, slots = _slots(environ, len(names))
    gpus, told = _gpus(environ, len(names))
    hosts = tuple(
        Host(name, slots=n, slots_yield=n is not None, gpus=gpus)
        for name, n in zip(names, slots, strict=True)
    )
    notes = [f"hosts from ${variable}", *_slot_notes(environ, counted, gpus), *told]
    return Parsed(hosts, tuple(notes))


def _names(variable: str, value: str) -> list[str]:
    try:
        return list(dict.fromkeys(check_address(name) for name in expand(value.strip())))
    except UnreadableError as problem:
        raise _bad_variable(variable, value, problem.expected) from None


def _slots(environ: Mapping[str, str], nodes: int) -> tuple[str, Sequence[int | None]]:
    """The variable that gives the slots, and one number for each node.

    Nobody asked for one task a node: it is what Slurm says when nobody says anything.
    """
    for variable in TASKS:
        value = environ.get(variable, "")
        counts = _counts(variable, value) if value else []
        if len(counts) == nodes and (max(counts) > 1 or _asked_for_tasks(environ)):
            return variable, counts
    return "", [None] * nodes


def _asked_for_tasks(environ: Mapping[str, str]) -> bool:
    """Whether somebody gave ``--ntasks`` or ``--ntasks-per-node``; a step has one of its own."""
    in_a_step = bool(environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID"))
    return bool(
        environ.get("SLURM_NTASKS_PER_NODE") or (environ.get("SLURM_NTASKS") and not in_a_step)
    )


def _counts(variable: str, value: str) -> list[int]:
    try:
        return expand_counts(value)
    except UnreadableError as problem:
        raise _bad_variable(variable, value, problem.expected) from None


def _gpus(environ: Mapping[str, str], nodes: int) -> tuple[int | None, list[str]]:
    """GPUs of each node, and where that stands; ``None`` where they may differ from node to node.

    ``--gres`` leaves no variable but the number on the node where the shell is.
    """
    for variable, share in ((GPUS_A_NODE, 1), (GPUS, nodes), (GPUS_HERE, 1)):
        value = environ.get(variable, "")
        if not value:
            continue
        total = _total(variable, value)
        if total % share:
            return None, [f"{total} GPUs (${variable}) are no equal share for {nodes} nodes"]
        return total // share, [f"GPUs on each node: {total // share} (${variable}={value})"]
    return None, []


def _total(variable: str, value: str) -> int:
    try:
        return sum(number for _, number in expand_gpus(value))
    except UnreadableError as problem:
        raise _bad_variable(variable, value, problem.expected) from None


def _slot_notes(environ: Mapping[str, str], counted: str, gpus: int | None) -> list[str]:
    if counted:
        return [f"slots from ${counted} ({environ[counted]})"]
    if gpus:
        return []
    notes = ["nobody asked Slurm for a number of tasks on each node: slots are left open"]
    if environ.get(CPUS):
        notes.append(f"processors on each node: {environ[CPUS]} (${CPUS})")
    return notes


def _bad_variable(variable: str, value: str, expected: str) -> HostsError:
    return HostsError(
        f"${variable} cannot be read", found=value or "(empty)", remedy=f"expected {expected}"
    )


DIALECT = Dialect(
    name="slurm",
    title="Slurm node list",
    detect=detect,
    parse=parse,
    write=write,
    keeps=frozenset({"address"}),
    environment=True,
    colon="slots",
)
