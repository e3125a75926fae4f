"""Batch scripts for LSF. Rendered and syntax-checked; not tried on an LSF."""

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

# LSF tells "n1 2 n2 2"; a host file says the same in a form that every launcher reads
_HOSTS = (
    "awk '{for (i = 1; i < NF; i += 2) print $i\" slots=\"$(i + 1)}' "
    '<<< "$LSB_MCPU_HOSTS" > {hosts}'
)


class Lsf(Scheduler):
    """The nodes come from ``$LSB_MCPU_HOSTS`` and are reached over SSH."""

    name, title = "lsf", "LSF"
    submitting = SCRIPT | LOGIN | {"check_level"}
    hand_over = "bsub < FILE"
    tried = False

    def render(self, request: BatchRequest) -> str:
        check(request)
        run_dir = run_dir_of(request, "LSB_JOBINDEX")
        hosts = f"{run_dir}/lsf-hosts"
        before = [f"mkdir -p {run_dir}", _HOSTS.replace("{hosts}", hosts)]
        line = command(request, ["--via", "ssh"], run_dir).replace(
            f"{request.folder} {run_dir}", f"{request.folder} {run_dir} -H {hosts}", 1
        )
        lines = [*prologue(request), *before, f"exec {line}"]
        return bash_script("#BSUB", directives(request), lines)


def directives(request: BatchRequest) -> list[str]:
    """What stands behind ``#BSUB``."""
    processes = processes_of(request) or 1
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", request.name)
    found = [f"-J {name}[{request.array}]" if request.array else f"-J {name}"]
    found += [f"-n {request.nodes * processes}", f'-R "span[ptile={processes}]"']
    optional = {"-W ": _hours(request.time), "-q ": request.partition, "-P ": request.account,
                "-M ": request.mem, "-gpu num=": gpus_of(request) or ""}  # fmt: skip
    found += [f"{flag}{value}" for flag, value in optional.items() if value]
    return [*found, "-rn", f'-o "{request.run_dir}/lsf-%J.out"', *request.arguments]


def _hours(time: str) -> str:
    """LSF counts hours and minutes: ``1:30:00`` is ``1:30``."""
    parts = time.split(":")
    return ":".join(parts[:2]) if len(parts) == 3 else time


SCHEDULER = Lsf()
