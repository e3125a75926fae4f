"""Runs commands of schedulers: queries and submission of scripts."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from paceline.remote.link import run_process
from paceline.schedulers.scheduler import Scheduler
from paceline.spec.errors import SettingError

COMMAND_TIMEOUT_S = 10.0


async def command_output(*argv: str) -> str:
    """Returns the output of a command; empty if it is missing or does not end in time."""
    try:
        return (await run_process(argv, COMMAND_TIMEOUT_S)).stdout
    except (FileNotFoundError, asyncio.TimeoutError):
        return ""


def find_program(scheduler: Scheduler, name: str, remedy: str, found: str = "") -> str:
    """Returns the path of a scheduler's command. Raises SettingError if it is missing."""
    path = shutil.which(name)
    if path is None:
        raise SettingError(
            f"{scheduler.option} needs {name}", found=found or f"no {name} on PATH", remedy=remedy
        )
    return path


def run_submit_command(scheduler: Scheduler, argv: Sequence[str], script: Path, job_id: str) -> str:
    """Runs a command that submits a script; returns the job's id from its output.

    ``job_id``: regular expression whose first group is the id.
    """
    result = subprocess.run(list(argv), capture_output=True, text=True, check=False)
    if result.returncode:
        raise SettingError(
            f"{scheduler.title} refused the batch",
            found=result.stderr.strip() or result.stdout.strip(),
            remedy=f"Look at its directives: {script}",
            exit_code=1,
        )
    match = re.search(job_id, result.stdout, re.MULTILINE)
    if match is None:
        raise SettingError(f"{argv[0]} said something unexpected", found=result.stdout.strip())
    return match.group(1)


def last_lines(output: str, lines: int = 6) -> str:
    """Returns the last lines of a program's output, without blank and decorative ones."""
    informative = [line.strip() for line in output.splitlines() if line.strip(" -=\t|:")]
    return "\n".join(informative[-lines:])
