"""Runs commands of schedulers: to ask them something and to submit scripts."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from paceline.remote.link import ended
from paceline.schedulers.scheduler import Scheduler
from paceline.spec.errors import SettingError

ASK_PATIENCE_S = 10.0


async def ask(*argv: str, patience_s: float = ASK_PATIENCE_S) -> str:
    """What one of a scheduler's commands says; empty when it cannot say anything."""
    if shutil.which(argv[0]) is None:
        return ""
    process = await asyncio.create_subprocess_exec(
        *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        words, _ = await asyncio.wait_for(process.communicate(), patience_s)
    except asyncio.TimeoutError:
        return ""
    finally:
        if process.returncode is None:
            process.kill()
            await ended(process)
    return words.decode(errors="replace")


def program(scheduler: Scheduler, name: str, remedy: str, found: str = "") -> str:
    """The path of one of a scheduler's commands. SettingError when it is not here."""
    path = shutil.which(name)
    if path is None:
        raise SettingError(
            f"{scheduler.typed} needs {name}", found=found or f"no {name} on PATH", remedy=remedy
        )
    return path


def submitted(scheduler: Scheduler, argv: Sequence[str], script: Path, job_id: str) -> str:
    """Runs a command that submits a script; the job's id from what it prints.

    Args:
        scheduler: For its name.
        argv: The command.
        script: What it submits.
        job_id: Regular expression of a line, whose first group is the id.
    """
    done = subprocess.run(list(argv), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SettingError(
            f"{scheduler.title} refused the batch",
            found=done.stderr.strip() or done.stdout.strip(),
            remedy=f"Look at its directives: {script}",
            exit_code=1,
        )
    match = re.search(job_id, done.stdout, re.MULTILINE)
    if match is None:
        raise SettingError(f"{argv[0]} said something unexpected", found=done.stdout.strip())
    return match.group(1)


def tail(words: str, lines: int = 6) -> str:
    """The end of what a program said, without its decoration."""
    kept = [line.strip() for line in words.splitlines() if line.strip(" -=\t|:")]
    return "\n".join(kept[-lines:])
