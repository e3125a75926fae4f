"""Batch scripts for Slurm: written, submitted, looked at, cancelled. Pure."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from paceline.schedulers.batch import (
    OWNER_FILE,
    BatchRequest,
    command,
    processes_of,
    prologue,
)
from paceline.spec.errors import SettingError
from paceline.spec.rundir import RESULT

# Slurm notices a dead node after SlurmdTimeout (300 s unless the site says otherwise), ends the job
# and requeues it by itself; asked earlier, it might choose the same node again.
NOTICE_S = 360
LOST = '"kind": "lost"'
# Slurm's words for a job that is over; every other word means that it may still run.
OVER = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "TIMEOUT", "REVOKED",
}  # fmt: skip


def render(request: BatchRequest) -> str:
    """The script: directives, the user's set-up, and the same command as typed."""
    lines = ["#!/bin/bash", *(f"#SBATCH {one}" for one in directives(request)), ""]
    lines += [*(_TRAPS if request.requeue else ()), *prologue(request)]
    run_dir = shlex.quote(request.run_dir)
    if request.array:
        run_dir += '/"$SLURM_ARRAY_TASK_ID"'
    line = command(request, ["--via", "slurm"], run_dir)
    if not request.requeue:
        return "\n".join([*lines, f"exec {line}"]) + "\n"
    return "\n".join([*lines, *_with_requeue(line, run_dir)]) + "\n"


def directives(request: BatchRequest) -> list[str]:
    """What stands behind ``#SBATCH``."""
    number = "%A_%a" if request.array else "%j"
    output = f"{request.run_dir}/slurm-{number}.out"
    found = [f"--job-name={_name(request.name)}", f"--nodes={request.nodes}"]
    processes = processes_of(request)
    optional = {
        "--ntasks-per-node": processes,
        "--cpus-per-task": request.cpus_per_task,
        "--time": request.time,
        "--partition": request.partition,
        "--account": request.account,
        "--mem": request.mem,
        "--gres": request.gres,
        "--array": request.array,
    }
    found += [f"{name}={value}" for name, value in optional.items() if value]
    found += [f'--output="{output}"', "--open-mode=append"]
    if request.requeue:
        found += ["--requeue", f"--signal=B:USR1@{request.lead_s}"]
    else:
        found += ["--no-requeue"]
    return [*found, *request.arguments]


def _name(name: str) -> str:
    return re.sub(r"[^\w.+-]", "_", name) or "paceline"


# Slurm warns the batch's shell before the limit, perhaps while it still loads modules.
_TRAPS = (
    "limit= child=",
    'stop() { if [ "$child" ]; then kill -TERM "$child" 2>/dev/null',
    '  elif [ -z "$limit" ]; then exit 143; fi; }',
    "trap 'limit=1; stop' USR1",
    "trap stop TERM",
)


def _with_requeue(line: str, run_dir: str) -> list[str]:
    """Warned of the limit the job stops, with a checkpoint if it is so far, and comes back."""
    return [
        f'[ "${{SLURM_RESTART_COUNT:-0}}" = 0 ] || rm -f {run_dir}/{OWNER_FILE}',
        "status=1",
        'if [ -z "$limit" ]; then',
        f"  {line} &",
        "  child=$!",
        '  [ -z "$limit" ] || stop',
        '  wait "$child"',
        "  status=$?",
        '  while kill -0 "$child" 2>/dev/null; do wait "$child"; status=$?; done',
        "fi",
        'if [ "$limit" ] && [ "$status" -ne 0 ]; then',
        '  echo "paceline: the time limit is near: back into the queue"',
        '  scontrol requeue "$SLURM_JOB_ID"',
        f"elif grep -qs '{LOST}' {run_dir}/{RESULT}; then",
        '  echo "paceline: a node was lost: Slurm puts the job back once it has noticed"',
        f"  sleep {NOTICE_S} & wait $!",
        '  scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        'exit "$status"',
    ]


def parse_submitted(text: str) -> str:
    """The job's id from what ``sbatch --parsable`` prints: ``12`` or ``12;cluster``."""
    match = re.search(r"^(\d+)(?:;\S+)?\s*$", text, re.MULTILINE)
    if match is None:
        raise SettingError("sbatch said something unexpected", found=text.strip())
    return match.group(1)


@dataclass(frozen=True, slots=True)
class JobState:
    """How Slurm sees a job.

    Attributes:
        word: Slurm's own word, kept as it is.
        reason: Slurm's reason, empty for none.
        code, signal: What the batch script ended with.
        restarts: How often it went back into the queue.
        nodes: Node list, as Slurm writes it.
    """

    word: str
    reason: str
    code: int
    signal: int
    restarts: int
    nodes: str

    @property
    def over(self) -> bool:
        return self.word in OVER

    @property
    def exit_code(self) -> int:
        """The job's exit status; never 0 for a job that did not complete."""
        if self.signal:
            return 128 + self.signal
        if self.code:
            return self.code
        return 0 if self.word == "COMPLETED" else 1

    def describe(self) -> str:
        return f"{self.word} ({self.reason})" if self.reason else self.word


def parse_job(text: str) -> JobState | None:
    """The state from a line of ``scontrol show job -o``; ``None`` for a job that is not known."""
    found = dict(re.findall(r"\b([A-Za-z:/]+)=(\S*)", text))
    if "JobState" not in found:
        return None
    code, _, signal = found.get("ExitCode", "0:0").partition(":")
    reason = found.get("Reason", "None")
    return JobState(
        word=found["JobState"],
        reason="" if reason == "None" else reason,
        code=int(code),
        signal=int(signal or 0),
        restarts=int(found.get("Restarts", "0")),
        nodes="" if found.get("NodeList", "(null)") == "(null)" else found["NodeList"],
    )
