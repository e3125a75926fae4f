"""Batch scripts for PBS (OpenPBS, PBS Pro). Rendered and syntax-checked; not tried on a PBS."""

from __future__ import annotations

import re
import shlex

from paceline.launch.schedulers.batch import BatchRequest, command, processes_of


def render(request: BatchRequest) -> str:
    """The script; the nodes come from ``$PBS_NODEFILE`` and are reached over SSH."""
    lines = ["#!/bin/bash", *(f"#PBS {one}" for one in directives(request)), ""]
    lines += [f"cd {shlex.quote(request.workdir)} || exit", *request.setup]
    run_dir = shlex.quote(request.run_dir)
    if request.array:
        run_dir += '/"$PBS_ARRAY_INDEX"'
    return "\n".join([*lines, f"exec {command(request, ['-H', 'pbs'], run_dir)}"]) + "\n"


def directives(request: BatchRequest) -> list[str]:
    """What stands behind ``#PBS``."""
    processes = processes_of(request)
    chunk = [f"select={request.nodes}"]
    chunk += [f"ncpus={(request.cpus_per_task or 1) * (processes or 1)}"]
    chunk += [f"mpiprocs={processes}"] if processes else []
    chunk += [f"mem={request.mem}"] if request.mem else []
    if match := re.search(r"gpu(?::[\w.-]+)?:(\d+)", request.gres):
        chunk += [f"ngpus={match.group(1)}"]
    found = [f"-N {re.sub(r'[^A-Za-z0-9_.-]', '_', request.name)[:230]}"]
    found += [f"-l {':'.join(chunk)}", "-l place=scatter"]
    optional = {"-l walltime=": request.time, "-q ": request.partition, "-A ": request.account,
                "-J ": request.array}  # fmt: skip
    found += [f"{flag}{value}" for flag, value in optional.items() if value]
    found += ["-r y" if request.requeue else "-r n", "-j oe"]
    return [*found, f"-o {request.run_dir}/", *request.arguments]
