"""Scripts for schedulers that start jobs later: what they are to run, and what all have in common.

Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.hosts.dialect import UnreadableError
from paceline.hosts.nodelist import expand_gpus
from paceline.spec.command import bash_line
from paceline.spec.errors import SettingError

OWNER_FILE = "owner.json"
SUBMITTED = "PACELINE_SUBMITTED"  # set in the batches that are written here


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """What a batch is to run, and with what.

    Attributes:
        name: Of the job.
        argv: ``paceline``'s command with its verb, without run directory and hosts.
        folder: The verb's option for its run directory.
        words: The rest of that command, as typed.
        workdir: Folder that it runs in.
        run_dir: Run directory, absolute; an array's runs lie below it.
        nodes: How many.
        processes: Processes a node, ``None`` leaves it to the node.
        time, partition, account, mem, gres: As the user wrote them; empty for the site's default.
        gpus, gpus_per_node: GPUs of the whole job or of a node, as ``4`` or ``a100:4``.
        constraint: Features that the nodes must have, in the words of the batch system.
        cpus_per_task: CPUs for each process, ``None`` for the site's default.
        arguments: Further directives, passed through.
        setup: Lines of shell before the job.
        requeue: Save a checkpoint before the time limit, and resume.
        lead_s: How long before the limit.
        array: Index range of a job array, empty for none.
        image: Container image, where the scheduler needs one.
        mounts: ``SOURCE:TARGET[:ro]`` each, to be seen in it.
        shm_size: Size of /dev/shm in it, as ``8g``; empty for no limit.
        forwarded: Variables whose value of now the ranks shall have.
        secrets: Values for a script that keeps them itself; empty when they are not to be shown.
    """

    name: str
    argv: tuple[str, ...]
    words: tuple[str, ...]
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


def check(request: BatchRequest) -> None:
    """A directive is one line: nothing with a line break or a quote can stand in it."""
    single = (request.time, request.partition, request.account, request.mem, request.gres,
              request.array, request.shm_size, *request.arguments)  # fmt: skip
    for value in single:
        if re.search(r"[\n\r\0\"'`$\\;&|<>#]", value):
            raise SettingError(
                f"{value!r} cannot stand in a batch script",
                found="quotes, dollars, line breaks and the like have no place in a directive",
            )
    if re.search(r"[\x00-\x1f\x7f\"%^$`\\]", request.run_dir):
        raise SettingError(
            f"the run directory {request.run_dir!r} cannot stand in a batch script",
            remedy="Give a --run-dir of letters, digits, dashes, dots and blanks",
        )
    if not re.fullmatch(r"[\w.:@&|,()\[\]*!+=/-]*", request.constraint, re.ASCII):
        raise SettingError(
            f"--constraint {request.constraint} cannot stand in a batch script",
            found="names of features, joined by &, |, commas and brackets, can",
        )
    gpus_on_each(request)
    if request.nodes < 1:
        raise SettingError(f"{request.nodes} nodes cannot be", remedy="--nnodes N")


def gpus_on_each(request: BatchRequest) -> list[tuple[str, int]]:
    """Kinds of GPUs (empty for any) with their numbers on each node; nothing for none.

    Raises:
        SettingError: They cannot be read or shared out, or are asked for in two ways.
    """
    wanted = [one for one in request.gres.split(",") if _is_gpu(one)]
    ways = {"--gres": ",".join(one.partition(":")[2] or "1" for one in wanted),
            "--gpus-per-node": request.gpus_per_node, "--gpus": request.gpus}  # fmt: skip
    asked = [(flag, text) for flag, text in ways.items() if text]
    if not asked:
        return []
    (flag, text), *others = asked
    if others:
        raise SettingError(
            f"{flag} and {others[0][0]} both say how many GPUs", remedy="Leave out one of the two"
        )
    try:
        found = expand_gpus(text)
    except UnreadableError as problem:
        raise SettingError(f"{flag} {text}", found=f"expected {problem.expected}") from None
    share = request.nodes if flag == "--gpus" else 1
    if any(number % share for _, number in found):
        raise SettingError(
            f"--gpus {text} is no equal share for {request.nodes} nodes",
            remedy="--gpus-per-node says it for each node",
        )
    return [(kind, number // share) for kind, number in found]


def _is_gpu(resource: str) -> bool:
    """Of an entry of ``--gres``: ``gpu:2``, and on Kubernetes ``nvidia.com/gpu:2``."""
    return resource.partition(":")[0].rpartition("/")[2] == "gpu"


def gpus_of(request: BatchRequest) -> int:
    """GPUs a node, for a batch system that knows no kinds of them and nothing else of ``--gres``.

    Raises:
        SettingError: Something else than a number of GPUs was asked for.
    """
    found = gpus_on_each(request)
    if any(kind for kind, _ in found) or not re.fullmatch(r"(gpu:\d+)?", request.gres):
        asked = request.gpus_per_node or request.gpus
        raise SettingError(
            f"{f'GPUs {asked}' if asked else f'--gres {request.gres}'} cannot be written for this"
            " batch system",
            found="a number of GPUs can: --gpus-per-node 2",
            remedy="--gpus-per-node N, and --sbatch-arg for what the site calls the rest",
        )
    return sum(number for _, number in found)


def processes_of(request: BatchRequest) -> int | None:
    """Processes a node: as asked, else one for each accelerator that was asked for."""
    if request.processes is not None:
        return request.processes
    return sum(number for _, number in gpus_on_each(request)) or None


def prologue(request: BatchRequest) -> list[str]:
    """Lines of bash before the job."""
    return [
        # what the user's variables and files say of the submission has had its effect
        f"export {SUBMITTED}=1",
        f"cd {bash_line([request.workdir])} || exit",
        *request.setup,
    ]


def run_dir_of(request: BatchRequest, index: str = "") -> str:
    """The run directory as shell text.

    Args:
        request: For its run directory.
        index: Variable with a task's number in an array, whose runs lie below it.
    """
    folder = shlex.quote(request.run_dir)
    return f'{folder}/"${index}"' if request.array else folder


def bash_script(mark: str, directives: Sequence[str], lines: Sequence[str]) -> str:
    """A batch: what the scheduler reads, each behind ``mark``, then what bash does."""
    head = ["#!/bin/bash", *(f"{mark} {one}" for one in directives), ""]
    return "\n".join([*head, *lines]) + "\n"


def command(request: BatchRequest, via: Sequence[str], run_dir: str) -> str:
    """The line that runs the job; ``run_dir`` is shell text already.

    Args:
        request: For the command and its words.
        via: Options that say how the nodes are started from within the batch.
        run_dir: Run directory.
    """
    head = bash_line(request.argv)
    rest = bash_line([*via, *request.words])
    return f"{head} {request.folder} {run_dir} {rest}"
