"""Commands of schedulers: asked for words, submitting scripts, and what their failures mean."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path

from paceline.remote.link import ended
from paceline.rendezvous.started import Starter
from paceline.schedulers.scheduler import Scheduler
from paceline.spec.errors import ConnectError, GoneError, PacelineError, SettingError
from paceline.spec.hosts import Host

ASK_PATIENCE_S = 10.0
ALLOCATION_OVER = "the allocation is over"  # no step can be had in it any more


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


class StepStarter(Starter):
    """Has a command inside an allocation start one agent a node; a scheduler says how it does.

    Args:
        path: Of the command.
        arguments: The user's own words for it.
        job: The allocation's id.
    """

    command: str  # what people call it
    scheduler: str
    causes: Sequence[tuple[str, str, str]]
    """Pattern of the words, cause, and remedy, in which ``{count}`` and ``{job}`` are filled in."""
    final: Sequence[str] = (ALLOCATION_OVER,)  # causes that no further try can remove
    otherwise: str  # remedy when no pattern is found
    again, apart = True, False

    def __init__(self, path: str, arguments: Sequence[str], job: str) -> None:
        self._path, self._arguments, self._job = path, arguments, job

    @abstractmethod
    async def state_of(self, host: Host) -> str:
        """What the scheduler says of a node; empty when it says nothing."""

    def hopeless(self, words: str) -> bool:
        """The command ends by itself when it cannot start."""
        return False

    def end(self) -> None:
        """Nothing was made: what was started ends with its agents."""

    async def explain(self, hosts: Sequence[Host], missing: Sequence[Host], status: int | None,
                      words: str) -> PacelineError:  # fmt: skip
        """With what the scheduler says of the nodes that are missing."""
        lines = [words]
        for host in missing:
            if state := await self.state_of(host):
                lines.append(f"{host.name} is {state}")
        said = "\n".join(lines)
        cause, remedy = f"{self.command} did not start the agent", self.otherwise
        for pattern, found, advice in self.causes:
            if re.search(pattern, said):
                cause, remedy = found, advice
                break
        names = ", ".join(host.name for host in missing)
        ended = "is still waiting" if status is None else f"ended with status {status}"
        kind = GoneError if cause in self.final else ConnectError
        return kind(
            f"no agent on {len(missing)} of {len(hosts)} nodes of {self.scheduler}'s job "
            f"{self._job} ({names}): {cause}",
            found=f"{self.command} {ended}\n{tail(said)}".strip(),
            remedy=remedy.format(count=len(hosts), job=self._job),
            brief=f"{cause}: {_first_error(words) or f'{self.command} {ended}'}",
        )


def _first_error(words: str) -> str:
    """The first line of a program's words that says so; the last for none."""
    lines = tail(words).splitlines() or [""]
    return next((line for line in lines if "error" in line.lower()), lines[-1])
