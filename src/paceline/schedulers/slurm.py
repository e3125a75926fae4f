"""Agents started by srun inside a Slurm allocation."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import Mapping, Sequence

from paceline.remote.transport import Transport
from paceline.rendezvous.started import Start, StartedTransport
from paceline.schedulers.mpi import tail
from paceline.schedulers.options import Options
from paceline.spec.errors import ConnectError, PacelineError, SettingError
from paceline.spec.hosts import Host
from paceline.spec.launched import PROCESS_VARIABLES

NAMES = ("SLURMD_NODENAME",)
PLACES = ("SLURM_NODEID", "SLURM_PROCID")
# What tells a process that it is one task of a step: ranks are our agent's, not Slurm's.
STRIP = (
    r"SLURM_(PROCID|LOCALID|NODEID|NTASKS|NPROCS|TASK|STEP|GTIDS|CPU_BIND|LAUNCH|SRUN|CPUS_PER_TASK"
    rf"|UMASK|PRIO_PROCESS|DISTRIBUTION)|{PROCESS_VARIABLES}"
)
# The allocation's wishes for its tasks must not shape the step that starts our agents.
_UNSET = (
    "SLURM_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_GPUS_PER_TASK", "SLURM_NTASKS",
    "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_NTASKS_PER_SOCKET", "SLURM_NTASKS_PER_CORE",
    "SLURM_NTASKS_PER_GPU", "SLURM_CPU_BIND", "SLURM_DISTRIBUTION", "SLURM_HINT",
    "SLURM_EXPORT_ENV", "SLURM_EXACT", "SLURM_THREADS_PER_CORE", "SLURM_LABELIO",
    "SLURM_KILL_BAD_EXIT", "SLURM_MPI_TYPE", "SLURM_STEP_ID", "SLURM_STEPID",
)  # fmt: skip


def allocation(environ: Mapping[str, str]) -> str | None:
    """The id of the allocation that we are in."""
    inside = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    return environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID") if inside else None


def command(srun: str, hosts: Sequence[Host], arguments: Sequence[str]) -> list[str]:
    """The srun call that starts one process on each host, with all CPUs; its command follows it."""
    count = len(hosts)
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
        "--kill-on-bad-exit=0",
        "--mpi=none",
        *arguments,
    ]


_CAUSES = (
    (
        r"Invalid job id|[Ee]xpired or invalid job|Job/step already completing|"
        r"Job has (already )?(expired|finished)|Unable to confirm allocation",
        "the allocation is over",
        "Ask for a new one: salloc -N {count}",
    ),
    (
        r"nodes are busy|Requested nodes are busy|Unable to create step|step creation",
        "Slurm does not let us start a step in this allocation",
        "See what holds it: squeue --steps --job={job}",
    ),
    (r"Node failure|DOWN|not responding", "a node does not answer Slurm", "sinfo -R"),
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


def explained(hosts: Sequence[Host], missing: Sequence[Host], status: int | None, words: str,
              job: str) -> PacelineError:  # fmt: skip
    """The error for nodes on which srun started no agent. Pure."""
    cause, remedy = "srun did not start the agent", f"Try: srun --jobid={job} hostname"
    for pattern, found, advice in _CAUSES:
        if re.search(pattern, words):
            cause, remedy = found, advice.format(count=len(hosts), job=job)
            break
    names = ", ".join(host.name for host in missing)
    ended = "is still waiting" if status is None else f"ended with status {status}"
    return ConnectError(
        f"no agent on {len(missing)} of {len(hosts)} nodes of Slurm's job {job} ({names}): {cause}",
        found=f"srun {ended}\n{tail(words)}".strip(),
        remedy=remedy,
    )


def parse_node(text: str) -> str:
    """State and reason from ``scontrol show node -o``: ``DOWN* (Not responding)``."""
    state = re.search(r"\bState=(\S+)", text)
    reason = re.search(r"\bReason=(.*?)(?: \[[^\]]*\])?\s*$", text, re.MULTILINE)
    if state is None:
        return ""
    why = f" ({reason.group(1).strip()})" if reason else ""
    return state.group(1) + why


async def ask(*argv: str, patience_s: float = 10.0) -> str:
    """What one of Slurm's commands says; empty when it cannot say anything."""
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
            await process.wait()
    return words.decode(errors="replace")


class SlurmScheduler:
    """One step of one task a node."""

    def __init__(self, options: Options, environ: Mapping[str, str]) -> None:
        self._arguments = options.arguments
        self._job = allocation(environ) or ""
        if not self._job:
            raise SettingError(
                "there is no Slurm allocation here",
                found="SLURM_JOB_ID is not set",
                remedy="salloc -N 2, then the same command; or --nnodes N to submit it as a batch",
            )
        srun = shutil.which("srun")
        if srun is None:
            raise SettingError(
                "--via slurm needs srun", found="no srun on PATH", remedy="module load slurm"
            )
        self._srun = srun

    async def start(self, hosts: Sequence[Host]) -> Start:
        """The srun call."""
        argv = command(self._srun, hosts, self._arguments)
        return Start(tuple(argv), dict.fromkeys(_UNSET), PLACES, STRIP, NAMES)

    async def explain(self, hosts: Sequence[Host], missing: Sequence[Host], status: int | None,
                      words: str) -> PacelineError:  # fmt: skip
        """With what Slurm says of the nodes that are missing."""
        lines = [words]
        for host in missing:
            if state := parse_node(await ask("scontrol", "show", "node", "-o", host.address)):
                lines.append(f"{host.name} is {state}")
        return explained(hosts, missing, status, "\n".join(lines), self._job)

    async def why(self, host: Host) -> str:
        """Slurm's word on the node."""
        state = parse_node(await ask("scontrol", "show", "node", "-o", host.address))
        return f"Slurm says that {host.name} is {state}" if state else ""

    def hopeless(self, words: str) -> bool:
        """srun ends by itself when it cannot start the step."""
        return False

    def end(self) -> None:
        """Nothing was made: the step ends with its agents."""


def transport(options: Options) -> Transport:
    return StartedTransport(SlurmScheduler(options, os.environ), options.interface)
