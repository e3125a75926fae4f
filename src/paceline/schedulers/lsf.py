"""Batch scripts for LSF. Rendered and syntax-checked; not tested on an LSF."""

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

# Converts LSF's "n1 2 n2 2" into a host file
_HOSTS = (
    "awk '{for (i = 1; i < NF; i += 2) print $i\" slots=\"$(i + 1)}' "
    '<<< "$LSB_MCPU_HOSTS" > {hosts}'
)


class Lsf(Scheduler):
    """The nodes come from ``$LSB_MCPU_HOSTS`` and are reached over SSH."""

    name, title = "lsf", "LSF"
    submit_options = SCRIPT_OPTIONS | SSH_OPTIONS | {"check_level"}
    submit_command = "bsub < FILE"
    is_tested = False

    def render(self, request: BatchRequest) -> str:
        check_request(request)
        run_dir = run_dir_of(request, "LSB_JOBINDEX")
        hosts = f"{run_dir}/lsf-hosts"
        # private, as Paceline makes it, whatever the umask of the job is
        preparation = [f"(umask 077; mkdir -p {run_dir}; {_HOSTS.replace('{hosts}', hosts)})"]
        job_line = job_command(request, ["--via", "ssh"], run_dir).replace(
            f"{request.folder} {run_dir}", f"{request.folder} {run_dir} -H {hosts}", 1
        )
        lines = [*prologue(request), *preparation, f"exec {job_line}"]
        return bash_script("#BSUB", directives(request), lines)


def directives(request: BatchRequest) -> list[str]:
    """Returns the ``#BSUB`` directives."""
    processes = processes_per_node(request) or 1
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", request.name)
    options = [f"-J {name}[{request.array}]" if request.array else f"-J {name}"]
    options += [f"-n {request.nodes * processes}", f'-R "span[ptile={processes}]"']
    optional = {"-W ": _hours(request.time), "-q ": request.partition, "-P ": request.account,
                "-M ": request.mem, "-gpu num=": plain_gpus_per_node(request) or ""}  # fmt: skip
    options += [f"{flag}{value}" for flag, value in optional.items() if value]
    return [*options, "-rn", f'-o "{request.run_dir}/lsf-%J.out"', *request.arguments]


def _hours(time: str) -> str:
    """Converts a time to LSF's hours and minutes: ``1:30:00`` is ``1:30``."""
    parts = time.split(":")
    return ":".join(parts[:2]) if len(parts) == 3 else time


SCHEDULER = Lsf()
