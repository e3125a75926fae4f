"""Batch scripts for PBS (OpenPBS, PBS Pro). Rendered and syntax-checked; not tested on a PBS."""

from __future__ import annotations

import re

from paceline.schedulers.scheduler import SCRIPT_OPTIONS, SSH_OPTIONS, Scheduler
from paceline.schedulers.script import (
    BatchRequest,
    bash_script,
    check_request,
    job_command,
    plain_gpus_per_node,
    processes_per_node,
    prologue,
    run_dir_of,
)

_VIA = ["-H", "pbs", "--via", "ssh"]


class Pbs(Scheduler):
    """The nodes come from ``$PBS_NODEFILE`` and are reached over SSH."""

    name, title = "pbs", "PBS"
    submit_options = SCRIPT_OPTIONS | SSH_OPTIONS | {"check_level", "cpus_per_task"}
    submit_command = "qsub FILE"
    is_tested = False

    def render(self, request: BatchRequest) -> str:
        check_request(request)
        line = job_command(request, _VIA, run_dir_of(request, "PBS_ARRAY_INDEX"))
        lines = [*prologue(request), f"exec {line}"]
        return bash_script("#PBS", directives(request), lines)


def directives(request: BatchRequest) -> list[str]:
    """Returns the ``#PBS`` directives."""
    processes = processes_per_node(request)
    chunk = [f"select={request.nodes}"]
    chunk += [f"ncpus={(request.cpus_per_task or 1) * (processes or 1)}"]
    chunk += [f"mpiprocs={processes}"] if processes else []
    chunk += [f"mem={_size(request.mem)}"] if request.mem else []
    chunk += [f"ngpus={gpus}"] if (gpus := plain_gpus_per_node(request)) else []
    options = [f"-N {re.sub(r'[^A-Za-z0-9_.-]', '_', request.name)[:230]}"]
    options += [f"-l {':'.join(chunk)}", "-l place=scatter"]
    optional = {"-l walltime=": request.time, "-q ": request.partition, "-A ": request.account,
                "-J ": request.array}  # fmt: skip
    options += [f"{flag}{value}" for flag, value in optional.items() if value]
    options += [f"-v {','.join(request.forwarded)}"] if request.forwarded else []
    options += ["-r n", "-j oe"]
    return [*options, f'-o "{request.run_dir}/"', *request.arguments]


def _size(text: str) -> str:
    """Converts ``16G`` to PBS's ``16gb``."""
    return re.sub(r"(?<=\d)([kmgtKMGT])$", lambda unit: unit.group(1).lower() + "b", text)


SCHEDULER = Pbs()
