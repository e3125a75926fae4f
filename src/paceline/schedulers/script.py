"""Renders batch scripts: the request, and the parts that all batch systems share. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.hosts.dialect import UnreadableError
from paceline.hosts.nodelist import expand_gpus
from paceline.spec.errors import SettingError
from paceline.spec.formatting import bash_line
from paceline.spec.python_code import DROP_CURRENT_FOLDER

OWNER_FILE = "owner.json"
SUBMITTED_VARIABLE = "PACELINE_SUBMITTED"  # set in all batch scripts
_PROGRAM = (
    "# the same as python -m paceline, but imports nothing from the current folder",
    f"paceline='{DROP_CURRENT_FOLDER}; from paceline.__main__ import main; main()'",
)


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """What a batch script runs, and with which resources.

    Attributes:
        name: Name of the job.
        python: Interpreter that runs ``paceline``.
        verb: Words of the command, as ``("bench", "scaling")``.
        folder: The verb's option for the run directory.
        options: Options and arguments of that command, as typed.
        workdir: Working directory.
        run_dir: Absolute run directory; the runs of an array are below it.
        nodes: Number of nodes.
        processes: Processes on each node; ``None`` lets the node decide.
        time, partition, account, mem, gres: As typed; empty for the site's default.
        gpus, gpus_per_node: GPUs of the whole job or of a node, as ``4`` or ``a100:4``.
        constraint: Features that the nodes must have, in the batch system's syntax.
        cpus_per_task: CPUs for each process; ``None`` for the site's default.
        arguments: Further directives, passed through.
        setup: Lines of shell before the job.
        requeue: Save a checkpoint before the time limit, and resume.
        lead_s: Seconds between that checkpoint and the limit.
        array: Index range of a job array; empty for none.
        image: Container image, if the scheduler needs one.
        mounts: Mounts of the container, ``SOURCE:TARGET[:ro]`` each.
        shm_size: Size of /dev/shm in the container, as ``8g``; empty for no limit.
        forwarded: Variables that the ranks get with their present values.
        secrets: Values for a script that stores secrets; empty in a plan.
    """

    name: str
    python: str
    verb: tuple[str, ...]
    options: tuple[str, ...]
    workdir: str
    run_dir: str
    nodes: int
    processes: int | None = None
    time: str = ""
    partition: str = ""
    account: str = ""
    mem: str = ""
    gres: str = ""
    gpus: str = ""
    gpus_per_node: str = ""
    constraint: str = ""
    cpus_per_task: int | None = None
    arguments: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    requeue: bool = False
    lead_s: int = 90
    array: str = ""
    image: str = ""
    mounts: tuple[str, ...] = ()
    shm_size: str = ""
    forwarded: tuple[str, ...] = ()
    folder: str = "--run-dir"
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)


def check_request(request: BatchRequest) -> None:
    """Raises SettingError for values that cannot be written into a directive."""
    single = (request.time, request.partition, request.account, request.mem, request.gres,
              request.array, request.shm_size)  # fmt: skip
    for value in (*single, *request.arguments):
        if re.search(r"[\n\r\0\"'`$\\;&|<>#]", value):
            raise SettingError(
                f"{value!r} cannot be used in a batch script",
                found="quotes, dollars, line breaks and the like have no place in a directive",
            )
    for value in single:
        if value.startswith("-") or re.search(r"\s", value):  # the scheduler would read options
            raise SettingError(
                f"{value!r} cannot be the value of one option of the scheduler",
                found="a blank, or a dash at its start",
                remedy="--sbatch-arg or --via-arg passes further options",
            )
    if re.search(r"[\x00-\x1f\x7f\"%^$`\\]", request.run_dir):
        raise SettingError(
            f"the run directory {request.run_dir!r} cannot be used in a batch script",
            remedy="Give a --run-dir of letters, digits, dashes, dots and blanks",
        )
    if not re.fullmatch(r"[\w.:@&|,()\[\]*!+=/-]*", request.constraint, re.ASCII):
        raise SettingError(
            f"--constraint {request.constraint} cannot be used in a batch script",
            found="names of features, joined by &, |, commas and brackets, can",
        )
    gpus_per_node(request)
    if request.nodes < 1:
        raise SettingError(f"a job cannot have {request.nodes} nodes", remedy="--nnodes N")


def gpus_per_node(request: BatchRequest) -> list[tuple[str, int]]:
    """Returns kinds of GPUs (empty for any) with their numbers on each node; empty for none.

    Raises SettingError if the request is unreadable, not divisible, or given by two options.
    """
    # ``gpu:2``, or ``nvidia.com/gpu:2`` on Kubernetes
    entries = [entry.partition(":") for entry in request.gres.split(",")]
    gres_gpus = [number or "1" for name, _, number in entries if name.rpartition("/")[2] == "gpu"]
    requests = {"--gres": ",".join(gres_gpus), "--gpus-per-node": request.gpus_per_node,
                "--gpus": request.gpus}  # fmt: skip
    given = [(flag, text) for flag, text in requests.items() if text]
    if not given:
        return []
    (flag, text), *conflicting = given
    if conflicting:
        raise SettingError(
            f"{flag} and {conflicting[0][0]} both say how many GPUs",
            remedy="Leave out one of the two",
        )
    try:
        gpus = expand_gpus(text)
    except UnreadableError as problem:
        raise SettingError(f"{flag} {text}", found=f"expected {problem.expected}") from None
    share = request.nodes if flag == "--gpus" else 1
    if any(number % share for _, number in gpus):
        raise SettingError(
            f"--gpus {text} cannot be divided equally among {request.nodes} nodes",
            remedy="--gpus-per-node says it for each node",
        )
    return [(kind, number // share) for kind, number in gpus]


def plain_gpus_per_node(request: BatchRequest) -> int:
    """Returns GPUs of each node, for batch systems without kinds of GPUs and other ``--gres``.

    Raises SettingError if more than a number of GPUs was requested.
    """
    gpus = gpus_per_node(request)
    if any(kind for kind, _ in gpus) or not re.fullmatch(r"(gpu:\d+)?", request.gres):
        requested = request.gpus_per_node or request.gpus
        subject = f"GPUs {requested}" if requested else f"--gres {request.gres}"
        raise SettingError(
            f"{subject} cannot be written for this batch system",
            found="a number of GPUs can: --gpus-per-node 2",
            remedy="--gpus-per-node N, and --sbatch-arg for what the site calls the rest",
        )
    return sum(number for _, number in gpus)


def processes_per_node(request: BatchRequest) -> int | None:
    """Returns the requested processes on each node, else one for each requested GPU."""
    if request.processes is not None:
        return request.processes
    return sum(number for _, number in gpus_per_node(request)) or None


def prologue(request: BatchRequest) -> list[str]:
    """Returns lines of bash before the job."""
    return [
        # the user's settings for the submission do not apply inside the batch
        f"export {SUBMITTED_VARIABLE}=1",
        f"cd {bash_line([request.workdir])} || exit",
        *request.setup,
        *_PROGRAM,
    ]


def run_dir_of(request: BatchRequest, index: str = "") -> str:
    """Returns the run directory as shell text; ``index``: variable with a task's number."""
    folder = shlex.quote(request.run_dir)
    return f'{folder}/"${index}"' if request.array else folder


def bash_script(mark: str, directives: Sequence[str], lines: Sequence[str]) -> str:
    """Returns a batch script: directives, each after ``mark``, then lines of bash."""
    head = ["#!/bin/bash", *(f"{mark} {directive}" for directive in directives), ""]
    return "\n".join([*head, *lines]) + "\n"


def job_command(request: BatchRequest, via: Sequence[str], run_dir: str) -> str:
    """Returns the line that runs the job, after :func:`prologue`.

    ``via`` selects the scheduler within the batch.
    """
    python, verb = bash_line([request.python]), bash_line(request.verb)
    options = bash_line([*via, *request.options])
    return f'{python} -c "$paceline" {verb} {request.folder} {run_dir} {options}'
