"""Flux: jobs by ``flux batch``, and agents by ``flux run`` inside an allocation.

Written from flux-core's documentation; not tried on a real one.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.remote.transport import Transport
from paceline.rendezvous.started import Start, StartedTransport
from paceline.schedulers.commands import ALLOCATION_OVER, StepStarter, ask, program, submitted
from paceline.schedulers.scheduler import NOW, SCRIPT, JobState, Options, Scheduler
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
from paceline.spec.errors import HostsError, SettingError
from paceline.spec.hosts import Host
from paceline.spec.launched import PROCESS_VARIABLES

PLACES = ("FLUX_TASK_RANK",)  # in the order of the allocation's nodes
# What tells a process that it is one task of a job: ranks are our agent's, not Flux's.
STRIP = rf"FLUX_(TASK_|JOB_|KVS_NAMESPACE|PMI_)|{PROCESS_VARIABLES}"
JOB_ID = r"ƒ?[0-9A-Za-z]+"  # F58, in ASCII where the locale has no ƒ
FORMAT = "{status}|{returncode}|{exception.note}"
OVER = {"COMPLETED", "FAILED", "CANCELED", "TIMEOUT"}  # every other word: it may still run
_LOAD = "Type this on a login node of the cluster, or module load flux"


class Flux(Scheduler):
    """Batches from outside; a job of one task a node inside the instance of an allocation."""

    name, title = "flux", "Flux"
    starting = NOW | {"via_arg"}
    calls_back = True
    fixed = "its first job has the nodes alone, so that none of them can be started again"
    submitting = (SCRIPT - {"mem", "array"}) | {"via_arg", "constraint", "cpus_per_task", "detach"}
    script = "job.flux"
    output = "flux.out"
    job_id = JOB_ID
    history = "flux jobs -a"
    tried = False

    def allocation(self, environ: Mapping[str, str]) -> str | None:
        """Of ``flux alloc`` or ``flux batch``; not the whole cluster's instance, nor a task."""
        inside = environ.get("FLUX_URI") and not environ.get("FLUX_JOB_ID")
        return environ.get("FLUX_ENCLOSING_ID") or None if inside else None

    def hosts(self, environ: Mapping[str, str]) -> str:
        """Flux tells them by a command, not by a variable."""
        flux = program(self, "flux", _LOAD)
        done = subprocess.run(
            [flux, "getattr", "hostlist"], capture_output=True, text=True, check=False, env=environ
        )
        if done.returncode or not done.stdout.strip():
            raise HostsError(
                "Flux does not say which nodes this allocation has",
                found=done.stderr.strip() or "flux getattr hostlist said nothing",
                remedy="Try: flux uptime",
            )
        return done.stdout.strip()

    def start(self, options: Options) -> Transport:
        """Of one flux run for all nodes."""
        job = self.allocation(os.environ)
        if job is None:
            raise SettingError(
                "there is no allocation of Flux here",
                found="FLUX_URI and FLUX_ENCLOSING_ID are not set",
                remedy="flux alloc -N 2, then the same command; or --nnodes N to submit it",
            )
        flux = program(self, "flux", _LOAD)
        starter = FluxStarter(flux, options.arguments, job)
        return StartedTransport(starter, options.interface, self.why)

    def render(self, request: BatchRequest) -> str:
        """Directives, the user's set-up, and the same command as typed."""
        check(request)
        if "{{" in request.run_dir:
            raise SettingError(
                f"the run directory {request.run_dir!r} cannot stand in a batch script",
                found="Flux fills in what stands between double braces",
            )
        derived = processes_of(request) if request.processes is None else None
        via = ["--via", "flux", *(["-p", str(derived)] if derived else [])]
        line = command(request, via, run_dir_of(request))
        return bash_script("# flux:", directives(request), [*prologue(request), f"exec {line}"])

    def submit(self, script: Path) -> str:
        """``flux batch`` prints the job's id and nothing else."""
        flux = program(self, "flux", _LOAD, "no flux on PATH, and no allocation of Flux here")
        return submitted(self, [flux, "batch", str(script)], script, rf"^({JOB_ID})$")

    async def poll(self, job: str) -> JobState | None:
        return parse_job(await ask("flux", "jobs", "--no-header", f"--format={FORMAT}", job))

    def cancel(self, job: str, kill: bool = False) -> None:
        verb = ["job", "kill", "--signal=SIGKILL"] if kill else ["cancel"]
        subprocess.run([self.name, *verb, job], capture_output=True, check=False)

    async def why(self, host: Host) -> str:
        state = await state_of_node(host)
        return f"Flux says that {host.name} is {state}" if state else ""


# --- batches: pure


def directives(request: BatchRequest) -> list[str]:
    """What stands behind ``# flux:``. One slot is one node's share."""
    found = [
        f"--job-name={re.sub(r'[^A-Za-z0-9_.+-]', '_', request.name) or 'paceline'}",
        f"--nodes={request.nodes}",
        f"--nslots={request.nodes}",
    ]
    if request.cpus_per_task:
        found += [f"--cores-per-slot={request.cpus_per_task * (processes_of(request) or 1)}"]
    else:
        found += ["--exclusive"]
    optional = {
        "--gpus-per-slot": gpus_of(request) or "",
        "--time-limit": _duration(request.time),
        "--requires": shlex.quote(request.constraint) if request.constraint else "",
        "--queue": request.partition,
        "--bank": request.account,
    }
    found += [f"{flag}={value}" for flag, value in optional.items() if value]
    return [*found, f"--output={shlex.quote(f'{request.run_dir}/{Flux.output}')}",
            *request.arguments]  # fmt: skip


def _duration(time: str) -> str:
    """Flux counts in minutes, or in a number with a unit: ``1:30:00`` is ``5400s``."""
    match = re.fullmatch(r"(\d+):(\d+):(\d+)", time)
    if match is None:
        return time
    hours, minutes, seconds = map(int, match.groups())
    return f"{hours * 3600 + minutes * 60 + seconds}s"


def parse_job(text: str) -> JobState | None:
    """The state from a line of ``flux jobs``; ``None`` for a job that is not known."""
    word, found, rest = text.strip().partition("|")
    if not found:
        return None
    code, _, note = rest.partition("|")
    number = int(code) if re.fullmatch(r"-?\d{1,5}", code) else 1
    failed = 128 - number if -65 < number < 0 else abs(number)  # below zero: a signal's number
    return JobState(
        word=word,
        reason=note.strip(),
        over=word in OVER,
        exit_code=0 if word == "COMPLETED" else failed % 256 or 1,
        passing=word == "CLEANUP",
    )


# --- agents inside an allocation


def step(flux: str, hosts: Sequence[Host], arguments: Sequence[str]) -> list[str]:
    """The call that starts one process on each host, with all cores; its command follows it."""
    count = len(hosts)
    shell = ("cpu-affinity=off", "gpu-affinity=off", "pmi=off", "exit-timeout=none")
    return [
        flux,
        "run",
        f"--nodes={count}",
        f"--ntasks={count}",
        "--exclusive",
        "--requires=hosts:" + ",".join(host.address for host in hosts),
        *(f"--setopt={one}" for one in shell),
        *arguments,
    ]


_CAUSES = (
    (
        r"unsatisfiable|insufficient resources",
        "Flux has not these nodes, or they are down",
        "flux resource status",
    ),
    (
        r"Unable to connect to Flux|broker: .*(No such file|Connection refused)|lost connection",
        ALLOCATION_OVER,
        "Ask for a new one: flux alloc -N {count}",
    ),
    (
        r"paceline-call: \S+: ",
        "Flux started the agent, but it could not connect back",
        "Let the nodes connect to this machine (firewall?), or --iface for another network",
    ),
)


def parse_node(text: str) -> str:
    """State and reason from a line of ``flux resource status``: ``drained* (disk)``."""
    state, _, reason = text.strip().partition("|")
    return f"{state} ({reason.strip()})" if reason.strip() else state


async def state_of_node(host: Host) -> str:
    asked = ("resource", "status", "--no-header", "--format={state}|{reason}")
    said = await ask("flux", *asked, f"--include={host.address}")
    return parse_node(said.splitlines()[0]) if said.strip() else ""


class FluxStarter(StepStarter):
    """One job of one task a node."""

    command, scheduler = "flux run", "Flux"
    causes, otherwise = _CAUSES, "Try: flux run -N {count} hostname"
    apart = False
    again = False  # the first job has its nodes alone (--exclusive) until all its agents have ended

    async def start(self, hosts: Sequence[Host]) -> Start:
        """The call of flux run."""
        return Start(tuple(step(self._path, hosts, self._arguments)), {}, PLACES, STRIP)

    async def state_of(self, host: Host) -> str:
        return await state_of_node(host)


SCHEDULER = Flux()
