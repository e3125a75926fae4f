"""Slurm: submits jobs by sbatch, and starts agents by srun inside an allocation."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from paceline.remote.transport import Transport
from paceline.rendezvous.scheduled import ScheduledTransport, Start, Starter
from paceline.schedulers.commands import (
    command_output,
    find_program,
    last_lines,
    run_submit_command,
)
from paceline.schedulers.scheduler import (
    SCRIPT_OPTIONS,
    START_OPTIONS,
    JobState,
    Options,
    Scheduler,
    array_ranges,
    array_state,
)
from paceline.schedulers.script import (
    OWNER_FILE,
    BatchRequest,
    bash_script,
    check_request,
    gpus_per_node,
    job_command,
    processes_per_node,
    prologue,
    run_dir_of,
)
from paceline.spec.errors import ConnectError, PacelineError, PermanentConnectError, SettingError
from paceline.spec.hosts import Host
from paceline.spec.launchers import PROCESS_VARIABLES, SRUN_DIALECTS
from paceline.spec.rundir import RESULT

NODE_NAME_VARIABLES = ("SLURMD_NODENAME",)
RANK_VARIABLES = ("SLURM_NODEID", "SLURM_PROCID")
# Variables of a task of a step, which ranks must not see: the agent starts them, not Slurm.
STRIPPED_VARIABLES = (
    r"SLURM_(PROCID|LOCALID|NODEID|NTASKS|NPROCS|TASK|STEP|GTIDS|CPU_BIND|LAUNCH|SRUN|CPUS_PER_TASK"
    rf"|UMASK|PRIO_PROCESS|DISTRIBUTION)|{PROCESS_VARIABLES}"
)
# The allocation's settings for tasks must not apply to the step that starts our agents, nor its
# number of GPUs, which a step on some of its nodes cannot have.
_UNSET = (
    "SLURM_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_GPUS_PER_TASK", "SLURM_GPUS",
    "SLURM_GPU_BIND", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE",
    "SLURM_NTASKS_PER_SOCKET", "SLURM_NTASKS_PER_CORE",
    "SLURM_NTASKS_PER_GPU", "SLURM_CPU_BIND", "SLURM_DISTRIBUTION", "SLURM_HINT",
    "SLURM_EXPORT_ENV", "SLURM_EXACT", "SLURM_THREADS_PER_CORE", "SLURM_LABELIO",
    "SLURM_KILL_BAD_EXIT", "SLURM_MPI_TYPE", "SLURM_STEP_ID", "SLURM_STEPID",
)  # fmt: skip
JOB_ID_PATTERN = r"^(\d+)(?:;\S+)?\s*$"
# Slurm notices a dead node after SlurmdTimeout (300 s unless the site says otherwise), ends the job
# and requeues it by itself; asked earlier, it might choose the same node again.
REQUEUE_DELAY_S = 360
LOST_NODE_MARK = '"kind": "lost"'
# Slurm's final states; in every other state a job may still run.
FINAL_STATES = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "TIMEOUT", "REVOKED",
}  # fmt: skip
REQUEUED_STATES = {"NODE_FAIL", "PREEMPTED"}  # Slurm may be about to put it back
# Reasons for which a job waits until somebody changes it or the partition
PARTITION_LIMITS = {
    "PartitionNodeLimit": "the partition has fewer nodes, or some are down: see sinfo",
    "PartitionTimeLimit": "the partition does not allow that much time: see sinfo",
}


class Slurm(Scheduler):
    """Submits batches outside an allocation; inside one, starts a step with a task on each node."""

    name, title = "slurm", "Slurm"
    start_options = START_OPTIONS | {"via_arg", "wait_for_nodes"}
    needs_callback = True
    submit_options = SCRIPT_OPTIONS | {
        "via_arg", "constraint", "cpus_per_task", "requeue", "detach", "wait_for_nodes",
    }  # fmt: skip
    script = "job.sbatch"
    output = "slurm-{job}.out"
    history = "sacct -j {job}"

    def allocation(self, environ: Mapping[str, str]) -> str | None:
        node_list = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
        return environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID") if node_list else None

    def start(self, options: Options) -> Transport:
        """Returns a transport with an srun for each node, and another after its loss."""
        job = self.allocation(os.environ)
        if job is None:
            raise SettingError(
                "there is no Slurm allocation here",
                found="SLURM_JOB_ID is not set",
                remedy="salloc -N 2, then the same command; or --nnodes N to submit it as a batch",
            )
        srun = find_program(self, "srun", remedy="module load slurm")
        starter = SlurmStarter(srun, options.arguments, job)
        return ScheduledTransport(starter, options.interface, self.loss_reason, SRUN_DIALECTS)

    def render(self, request: BatchRequest) -> str:
        """Returns directives, the user's setup, and the command as typed."""
        check_request(request)
        run_dir = run_dir_of(request, "SLURM_ARRAY_TASK_ID")
        line = job_command(request, ["--via", "slurm"], run_dir)
        ending = _with_requeue(line, run_dir) if request.requeue else [f"exec {line}"]
        lines = [*(_TRAPS if request.requeue else ()), *prologue(request), *ending]
        return bash_script("#SBATCH", directives(request), lines)

    def submit(self, script: Path) -> str:
        """Submits by ``sbatch --parsable``, which prints ``12`` or ``12;cluster``."""
        remedy = "Type this on a login node of the cluster, or module load slurm"
        found = "no sbatch on PATH, and no Slurm allocation here"
        sbatch = find_program(self, "sbatch", remedy, found)
        return run_submit_command(self, [sbatch, "--parsable", str(script)], script, JOB_ID_PATTERN)

    async def poll(self, job: str) -> JobState | None:
        # Slurm shortens long lists of an array's tasks unless this is set
        scontrol = ("env", "SLURM_BITSTR_LEN=0", "scontrol")
        return parse_jobs(await command_output(*scontrol, "show", "job", "-o", job))

    def cancel(self, job: str, kill: bool = False) -> None:
        force = ["--signal=KILL", "--full"] if kill else []
        subprocess.run(["scancel", *force, job], capture_output=True, check=False)

    async def loss_reason(self, host: Host) -> str:
        state = await state_of_node(host)
        return f"Slurm says that {host.name} is {state}" if state else ""


# --- batches: pure


def directives(request: BatchRequest) -> list[str]:
    """Returns the ``#SBATCH`` directives."""
    pattern = "%A_%a" if request.array else "%j"
    output = f"{request.run_dir}/slurm-{pattern}.out"
    options = [f"--job-name={_name(request.name)}", f"--nodes={request.nodes}"]
    processes = processes_per_node(request)
    optional = {
        "--ntasks-per-node": processes,
        "--cpus-per-task": request.cpus_per_task,
        "--time": request.time,
        "--partition": request.partition,
        "--account": request.account,
        "--mem": request.mem,
        "--gres": request.gres,
        "--gpus-per-node": _gpus(request),
        "--constraint": request.constraint,
        "--array": request.array,
    }
    options += [f"{name}={value}" for name, value in optional.items() if value]
    requeue = ["--requeue", f"--signal=B:USR1@{request.lead_s}"]
    options += [f'--output="{output}"', "--open-mode=append"]
    options += requeue if request.requeue else ["--no-requeue"]
    return [*options, *request.arguments]


def _gpus(request: BatchRequest) -> str:
    """Returns GPUs of each node; Slurm might divide the job's total unequally."""
    if not request.gpus and not request.gpus_per_node:
        return ""
    gpus = gpus_per_node(request)
    return ",".join(f"{kind}:{number}" if kind else str(number) for kind, number in gpus)


def _name(name: str) -> str:
    return re.sub(r"[^\w.+-]", "_", name) or "paceline"


# Slurm signals the batch's shell before the limit, perhaps while it still loads modules.
_TRAPS = (
    "limit= child=",
    'stop() { if [ "$child" ]; then kill -TERM "$child" 2>/dev/null',
    '  elif [ -z "$limit" ]; then exit 143; fi; }',
    "trap 'limit=1; stop' USR1",
    "trap stop TERM",
)


# The last task of an array has the array's id as its own, which stands for all tasks.
_THIS_JOB = "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"


def _with_requeue(line: str, run_dir: str) -> list[str]:
    """Returns lines that stop the job before the time limit and requeue it."""
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
        f'  scontrol requeue "{_THIS_JOB}"',
        f"elif grep -qs '{LOST_NODE_MARK}' {run_dir}/{RESULT}; then",
        '  echo "paceline: a node was lost: Slurm puts the job back once it has noticed"',
        f"  sleep {REQUEUE_DELAY_S} & wait $!",
        f'  scontrol requeue "{_THIS_JOB}"',
        "fi",
        'exit "$status"',
    ]


def parse_jobs(text: str) -> JobState | None:
    """Parses ``scontrol show job -o``; ``None`` for an unknown job.

    A job array has a line for each task that has begun, and one for all that have not.
    """
    lines = [dict(re.findall(r"(?<!\S)([A-Za-z:/]+)=(\S*)", line)) for line in text.splitlines()]
    jobs = [(fields.get("ArrayTaskId", ""), _job_state(fields))
            for fields in lines if "JobState" in fields]  # fmt: skip
    tasks = {i: state for array, state in jobs for part in array_ranges(array) for i in part}
    if tasks:
        return array_state(tasks)
    return jobs[0][1] if jobs else None


def _job_state(fields: Mapping[str, str]) -> JobState:
    state, reason = fields["JobState"], fields.get("Reason", "None")
    code, _, signal = fields.get("ExitCode", "0:0").partition(":")
    failed = 128 + int(signal) if int(signal or 0) else int(code)
    if state == "PENDING" and reason in PARTITION_LIMITS:
        reason += ": " + PARTITION_LIMITS[reason]
    return JobState(
        state=state,
        reason="" if reason == "None" else reason,
        is_over=state in FINAL_STATES,
        exit_code=failed or (0 if state == "COMPLETED" else 1),
        may_return=state in REQUEUED_STATES,
        is_transient=state == "COMPLETING",
        queued_s=_wait_s(fields.get("SubmitTime", ""), fields.get("StartTime", "")),
    )


def _wait_s(submit_time: str, start_time: str) -> float | None:
    """Returns seconds between two of Slurm's times; ``None`` if one is unknown."""
    try:
        wait = datetime.fromisoformat(start_time) - datetime.fromisoformat(submit_time)
        return wait.total_seconds()
    except ValueError:  # ``Unknown``
        return None


# --- agents inside an allocation


def step(srun: str, hosts: Sequence[Host], arguments: Sequence[str]) -> list[str]:
    """Returns the srun call that starts one process on each host with all CPUs and GPUs.

    Without a number, a step would request as many GPUs as the job has, even on fewer nodes.
    """
    count = len(hosts)
    gpus = [f"--gpus-per-node={hosts[0].gpus}"] if hosts[0].gpus else []
    return [
        srun,
        f"--nodes={count}",
        f"--ntasks={count}",
        "--ntasks-per-node=1",
        "--nodelist=" + ",".join(host.address for host in hosts),
        "--overlap",  # an interactive step (`srun --pty bash`) may hold the allocation's resources
        "--cpu-bind=none",
        "--input=none",
        "--export=ALL",
        # the end of one agent must not end the others; the launcher decides
        "--kill-on-bad-exit=0",
        "--no-kill",
        "--wait=0",
        "--mpi=none",
        *gpus,
        *arguments,
    ]


# Causes that no further srun in this allocation can remove. Slurm takes a node that it has declared
# down out of the allocations that live on.
ALLOCATION_ENDED = "the allocation is over"
NODE_NOT_IN_ALLOCATION = "the allocation has not, or no longer, such a node"
_CAUSES = (
    (
        r"Invalid job id|[Ee]xpired or invalid job|Job/step already completing|"
        r"Job has (already )?(expired|finished)|Unable to confirm allocation",
        ALLOCATION_ENDED,
        "Ask for a new one: salloc -N {count}",
    ),
    (
        r"Requested node configuration is not available",
        NODE_NOT_IN_ALLOCATION,
        "See which nodes it has: squeue --job={job}; salloc and sbatch keep the others when one"
        " fails with --no-kill",
    ),
    (
        r"nodes are busy|Requested nodes are busy|Unable to create step|step creation",
        "Slurm does not let us start a step in this allocation",
        "See what holds it: squeue --steps --job={job}",
    ),
    (
        r"Node failure|DOWN|not responding|Task launch .* failed",
        "a node does not answer Slurm",
        "sinfo -R",
    ),
    (
        r"Unable to contact slurm controller|Connection refused",
        "Slurm's controller does not answer",
        "scontrol ping",
    ),
    (
        r"paceline-call: \S+: ",
        "srun started the agent, but it could not call back",
        "Let the nodes connect to this machine (firewall?), or --iface for another network",
    ),
)


def parse_node(text: str) -> str:
    """Parses state and reason of ``scontrol show node -o``: ``DOWN* (Not responding)``."""
    state = re.search(r"\bState=(\S+)", text)
    reason = re.search(r"\bReason=(.*?)(?: \[[^\]]*\])?\s*$", text, re.MULTILINE)
    if state is None:
        return ""
    suffix = f" ({reason.group(1).strip()})" if reason else ""
    return state.group(1) + suffix


async def state_of_node(host: Host) -> str:
    return parse_node(await command_output("scontrol", "show", "node", "-o", host.address))


class SlurmStarter(Starter):
    """Starts agents by an srun for each node inside an allocation.

    Slurm ends a step of several nodes on all of them, in spite of ``--no-kill``, when one that had
    lost its power is back and its slurmd does not know the step any more.

    ``job`` is the allocation's id, ``arguments`` are further flags for srun.
    """

    starts_each_host = True

    def __init__(self, path: str, arguments: Sequence[str], job: str) -> None:
        self._path, self._arguments, self._job = path, arguments, job

    async def start(self, hosts: Sequence[Host]) -> Start:
        """Returns the srun call."""
        argv = step(self._path, hosts, self._arguments)
        unset: dict[str, str | None] = dict.fromkeys(_UNSET)
        return Start(tuple(argv), unset, RANK_VARIABLES, STRIPPED_VARIABLES, NODE_NAME_VARIABLES)

    def hopeless(self, output: str) -> bool:
        """False: srun ends by itself when it cannot start."""
        return False

    def end(self) -> None:
        """Does nothing: a step ends with its agent."""

    async def explain(self, hosts: Sequence[Host], missing: Sequence[Host], status: int | None,
                      output: str) -> PacelineError:  # fmt: skip
        """The error for nodes without an agent, with what Slurm says of them."""
        states = [(host.name, await state_of_node(host)) for host in missing]
        report = "\n".join([output, *(f"{name} is {state}" for name, state in states if state)])
        cause, remedy = "srun did not start the agent", "Try: srun --jobid={job} hostname"
        for pattern, explanation, advice in _CAUSES:
            if re.search(pattern, report):
                cause, remedy = explanation, advice
                break
        names = ", ".join(host.name for host in missing)
        lines = last_lines(output).splitlines() or [""]
        first_error = next((line for line in lines if "error" in line.lower()), lines[-1])
        ending = "srun is still waiting" if status is None else f"srun ended with status {status}"
        is_permanent = cause in (ALLOCATION_ENDED, NODE_NOT_IN_ALLOCATION)
        error = PermanentConnectError if is_permanent else ConnectError
        return error(
            f"no agent on {len(missing)} of {len(hosts)} nodes of Slurm's job {self._job}"
            f" ({names}): {cause}",
            found=f"{ending}\n{last_lines(report)}".strip(),
            remedy=remedy.format(count=len(hosts), job=self._job),
            brief=f"{cause}: {first_error or ending}",
        )


SCHEDULER = Slurm()
