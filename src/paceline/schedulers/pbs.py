"""Batch scripts for PBS (OpenPBS, PBS Pro). Rendered and syntax-checked; not tried on a PBS."""

from __future__ import annotations

import re

from paceline.schedulers.scheduler import LOGIN, SCRIPT, Scheduler
from paceline.schedulers.script import (
    BatchRequest,
    bash_script,
    check,
    command,
    gpus_of,
    processes_of,
    prologue,
    run_dir_of,
)

_VIA = ["-H", "pbs", "--via", "ssh"]


class Pbs(Scheduler):
    """The nodes come from ``$PBS_NODEFILE`` and are reached over SSH."""

    name, title = "pbs", "PBS"
    submitting = SCRIPT | LOGIN | {"check_level", "cpus_per_task"}
    hand_over = "qsub FILE"
    tried = False

    def render(self, request: BatchRequest) -> str:
        check(request)
        line = command(request, _VIA, run_dir_of(request, "PBS_ARRAY_INDEX"))
        lines = [*prologue(request), f"exec {line}"]
        return bash_script("#PBS", directives(request), lines)


def directives(request: BatchRequest) -> list[str]:
    """What stands behind ``#PBS``."""
    processes = processes_of(request)
    chunk = [f"select={request.nodes}"]
    chunk += [f"ncpus={(request.cpus_per_task or 1) * (processes or 1)}"]
    chunk += [f"mpiprocs={processes}"] if processes else []
    chunk += [f"mem={_size(request.mem)}"] if request.mem else []
    chunk += [f"ngpus={gpus}"] if (gpus := gpus_of(request)) else []
    found = [f"-N {re.sub(r'[^A-Za-z0-9_.-]', '_', request.name)[:230]}"]
    found += [f"-l {':'.join(chunk)}", "-l place=scatter"]
    optional = {"-l walltime=": request.time, "-q ": request.partition, "-A ": request.account,
                "-J ": request.array}  # fmt: skip
    found += [f"{flag}{value}" for flag, value in optional.items() if value]
    found += [f"-v {','.join(request.forwarded)}"] if request.forwarded else []
    found += ["-r n", "-j oe"]
    return [*found, f'-o "{request.run_dir}/"', *request.arguments]


def _size(text: str) -> str:
    """PBS writes ``16gb`` where people write ``16G``."""
    return re.sub(r"(?<=\d)([kmgtKMGT])$", lambda unit: unit.group(1).lower() + "b", text)


SCHEDULER = Pbs()
