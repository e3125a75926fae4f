"""Registry of the options that several verbs share, with one meaning and one text each."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from paceline.cli.torchrun import Aliased, torchrun_options
from paceline.cli.variables import F, as_settings, is_setting, key_of
from paceline.schedulers import BY_HAND, SCHEDULERS
from paceline.spec.formatting import parse_duration
from paceline.spec.job import NodeCount, NodeRange, parse_node_count, parse_processes
from paceline.spec.training.communication import SCRIPT_METHODS


class Number(click.FloatRange):
    """A finite number with a lower bound."""

    name = "number"
    problem = "is not a finite number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} {self.problem}", param, ctx)
        return number


class Seconds(Number):
    """A finite length of time."""

    name = "number of seconds"
    problem = "is not a duration"


class Duration(Seconds):
    """Seconds, or with units: ``90``, ``10m``, ``1h30m``."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(parse_duration(value), param, ctx)
        except (ValueError, TypeError, click.BadParameter):
            self.fail(f"{value!r} is not a duration: type 90, 10m or 1h30m", param, ctx)


class SecondsOrAuto(Seconds):
    name = "number of seconds, or auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value == "auto" else super().convert(value, param, ctx)


class Parsed(click.ParamType):  # type: ignore[type-arg]
    """A value that a function parses; the message of its ValueError is shown."""

    def __init__(self, name: str, parse: Callable[[Any], Any]) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _parse_nodes(value: Any) -> NodeCount:
    return value if isinstance(value, NodeRange) else parse_node_count(str(value))


class SchedulerName(click.Choice[str]):
    """The name of a scheduler; one that was removed is refused with what replaces it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value == "flux":
            self.fail(
                'flux was removed: inside an allocation of Flux, start the nodes over SSH with'
                ' -H "$(flux getattr hostlist)"', param, ctx,
            )  # fmt: skip
        return super().convert(value, param, ctx)


class Target(click.types.StringParamType):
    """A command of a shell, or an address; in the variable there is one a line, with its blanks."""

    name = "command or address"
    envvar_list_splitter = "\n"


HOSTS = click.option(
    "-H", "--hosts", metavar="SOURCE", show_default="this machine",
    help="Host file, comma list, lab, slurm, pbs, … (see `paceline hosts --help`).",
)  # fmt: skip
SETUP_HOSTS = click.option(
    "-H", "--hosts", metavar="SOURCE", help="Hosts to set up; see `paceline hosts --help`."
)
SSH_CONFIG = click.option(
    "--ssh-config", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="ssh config file to use instead of your own.",
)  # fmt: skip
ACCEPT_NEW_HOST_KEYS = click.option(
    "--accept-new-host-keys", is_flag=True,
    help="Accept the SSH keys of new hosts, show them and store them.",
)  # fmt: skip
NNODES = click.option(
    "--nnodes", type=Parsed("number of nodes", _parse_nodes), metavar="N|MIN:MAX",
    show_default="all",
    help="Use the first N hosts. MIN:MAX lets the job shrink and grow as nodes are lost and"
         " come back (`MIN:` has no maximum). Hosts beyond MAX are spares.",
)  # fmt: skip
FASTEST = click.option(
    "--fastest", is_flag=True,
    help="Use the hosts on which the newest `paceline forecast` of this command predicts the"
         " shortest training.",
)  # fmt: skip
WAIT_FOR_NODES = click.option(
    "--wait-for-nodes", type=Duration(0.0), default=600.0, metavar="DURATION",
    help="How long to wait for missing hosts that the job needs: 90 (seconds), 10m, 1h. Unless"
         " --nnodes is a range, a start waits only if you give this option.",
    show_default="10m",
)  # fmt: skip
NPROC_PER_NODE = click.option(
    "-p", "--nproc-per-node", type=Parsed("number of processes", parse_processes), metavar="N",
    help="Processes per node: a number, gpu (one per GPU), cpu (one per CPU), or auto (gpu, else"
         " cpu).",
    show_default="the host's slots, else one per GPU, else 1",
)  # fmt: skip
IFACE = click.option(
    "--iface", metavar="NAME", help="Network interface for the job's traffic.",
    show_default="the one that reaches the other nodes",
)  # fmt: skip
PYTHON = click.option("--python", metavar="PATH", help="Python interpreter to use on hosts"
                      " for which no `python` is set.",
                      show_default="paceline's own")  # fmt: skip
MASTER_PORT = click.option(
    "--master-port", type=click.IntRange(0, 65535), default=0, metavar="PORT",
    help="Port of the rendezvous store on the first host.", show_default="a free one",
)  # fmt: skip
ENV = click.option(
    "--env", "env", multiple=True, metavar="NAME[=VALUE]",
    help="Set a variable for every rank. NAME alone forwards your current value without"
         " recording it.",
)  # fmt: skip
ACTIVATE = click.option(
    "--activate", multiple=True, metavar="FILE",
    help="Source this script on each host before Python starts (setvars.sh, activate); ranks get"
         " its variables.",
)  # fmt: skip
UNSET = click.option(
    "--unset", multiple=True, metavar="NAME", help="Hide a variable from the ranks."
)
NO_TORCH = click.option("--no-torch", is_flag=True, help="The script does not use torch.")
RUN_DIR_OF = click.option(
    "--run-dir", type=click.Path(file_okay=False, path_type=Path),
    help="The run directory, instead of RUN.",
)  # fmt: skip
HOSTS_OF_RUNS = click.option(
    "-H", "--hosts", metavar="SOURCE",
    help="Also look for runs on these hosts; see `paceline hosts --help`.",
)  # fmt: skip
# of every verb that starts a job, in the order of the help
LAUNCH = [
    HOSTS,
    SSH_CONFIG,
    ACCEPT_NEW_HOST_KEYS,
    NNODES,
    FASTEST,
    WAIT_FOR_NODES,
    NPROC_PER_NODE,
    ENV,
    ACTIVATE,
    UNSET,
    IFACE,
    PYTHON,
    click.option("--run-dir", type=click.Path(file_okay=False, path_type=Path),
                 help="The run directory.", show_default="runs/NAME-DATE-TIME"),
    click.option("--name", help="Name of the run.", show_default="from the script"),
    MASTER_PORT,
    click.option("--backend", type=click.Choice(["gloo", "nccl", "xccl", "ccl", "mpi"]),
                 help="Refuse to start if torch lacks this backend. Recipes use it; your own script"
                      " has to select it itself."),
    click.option("--ship", type=click.Choice(["auto", "always", "never"]), default="auto",
                 help="When to copy the code to the hosts; auto: if it is missing or different"
                      " there."),
    click.option("--follow-links", is_flag=True, help="Also send the targets of symlinks that lead"
                                                      " out of the code or data folder (for code,"
                                                      " symlinks to files only)."),
    click.option("--bind", type=click.Choice(["auto", "none"]), default="auto",
                 help="auto binds each rank to its own cores, near its GPU."),
    click.option("--lease", type=Seconds(2.0), default=10.0, metavar="SECONDS",
                 help="Heartbeat timeout. A node that receives nothing from the launcher for 70 %"
                      " of this time lets its ranks save, and ends them before the time is over."),
    click.option("--grace", type=Seconds(0.0), default=8.0, metavar="SECONDS",
                 help="Time for the ranks to save and end when you stop the job."),
    click.option("--hang-timeout", type=SecondsOrAuto(0.0), default="auto", metavar="SECONDS",
                 help="End a job or rank that hangs for this long; 0 only reports hangs. auto ends"
                      " a script that uses paceline.train after five times its slowest step (at"
                      " least 30 seconds; 10 minutes in a new phase); it only reports hangs of"
                      " other scripts."),
    click.option("--max-restarts", type=click.IntRange(0), default=0, metavar="N",
                 help="After a failure, restart all nodes up to N times within --restart-window."
                      " An explicit 0 forbids most restarts before step 1, too."),
    click.option("--restart-window", type=Duration(0.0), default=3600.0, metavar="DURATION",
                 help="Failures older than this do not count for --max-restarts. 0: all count.",
                 show_default="1h"),
    click.option("--keep-warm", type=Duration(0.0), default=0.0, metavar="DURATION",
                 help="Keep the hosts ready for your next command for this long after the run, such"
                      " as 10m. See `paceline warm`.", show_default="off"),
    click.option("--encrypt", is_flag=True,
                 help="Encrypt store, gloo and Paceline's traffic (TLS 1.3), or refuse to start."),
    click.option("--debug", is_flag=True, help="Record debug output of NCCL, torch, gloo,"
                                               " libfabric, UCX, oneCCL and Intel MPI in files"
                                               " beside the logs, and summarise it."),
    click.option("--check", "check_level", type=click.Choice(["full", "quick", "none"]),
                 default="quick", help="What to check before the start. quick needs only the"
                                       " login; full is `paceline check`."),
    click.option("--show", type=click.Choice(["all", "rank0", "none"]), default="all",
                 help="Whose output is shown live. The logs are always complete."),
    click.option("--screen", type=click.Choice(["live", "lines"]), default="live",
                 help="live: on a terminal, an overview of all ranks and hosts, with keys;"
                      " lines: output as it comes."),
    click.option("--notify", type=Target(), multiple=True, metavar="COMMAND|URL",
                 help="When the run ends, run COMMAND with outcome and figures in its"
                      " environment (PACELINE_OUTCOME, …), or post them as JSON to URL."),
    click.option("--report/--no-report", default=True,
                 help="Write report.html into the run directory when the run ends."),
    click.option("--plan", "plan_only", is_flag=True,
                 help="Print what would run where, and exit."),
    click.option("-v", "--verbose", is_flag=True,
                 help="With --plan: also print all variables and the command of every rank."),
    click.option("--json", "as_json", is_flag=True,
                 help="Print JSON: the plan of --plan, or the measurements."),
]  # fmt: skip
VIA_OPTIONS = [
    click.option("--via", type=SchedulerName([name for name in SCHEDULERS if name != BY_HAND]),
                 help="What starts the nodes. Default: docker with --image, else the allocation's"
                      " scheduler, else ssh."),
    click.option("--via-arg", multiple=True, metavar="FLAG",
                 help="One more argument for the program that starts the nodes."),
    click.option("--mpiexec", metavar="PATH", help="mpiexec to use. Default: the one on PATH."),
    click.option("--image", metavar="IMAGE",
                 help="Container image; it must have the same content on every host."),
    click.option("--mount", multiple=True, metavar="SOURCE:TARGET[:ro]",
                 help="Folder of the host to mount in the container. On Kubernetes, SOURCE may"
                      " also be a persistent volume claim."),
    click.option("--shm-size", default="8g", metavar="SIZE",
                 help="Size of /dev/shm in the container."),
    click.option("--rdzv", cls=Aliased, aliases=("--rdzv-endpoint",), metavar="HOST:PORT",
                 help="Rendezvous address, if you type the same command on each node."),
    click.option("--rdzv-id", metavar="NAME",
                 help="With --rdzv: name of the rendezvous, the same on each node; not a secret."),
    click.option("--rdzv-key-file", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
                 help="With --rdzv: file with the key, the same on each node. Default: the variable"
                      " PACELINE_RDZV_KEY. Without both, the first node shows a key and the others"
                      " ask for it."),
    click.option("--node-rank", type=click.IntRange(0), metavar="K",
                 help="With --rdzv: rank of this node. Default: 0 if HOST is this machine,"
                      " otherwise by order of arrival."),
    click.option("--rdzv-timeout", type=Seconds(1.0), default=300.0, metavar="SECONDS",
                 help="How long to wait for the other nodes."),
    click.option("--time", "time_limit", metavar="H:MM:SS", help="Batch: time limit."),
    click.option("--partition", metavar="NAME", help="Batch: partition."),
    click.option("--account", metavar="NAME", help="Batch: account."),
    click.option("--cpus-per-task", type=click.IntRange(1), metavar="N",
                 help="Batch: CPUs per process."),
    click.option("--mem", metavar="SIZE", help="Batch: memory per node."),
    click.option("--gres", metavar="LIST", help="Batch: accelerators per node, such as gpu:2."),
    click.option("--gpus-per-node", metavar="[KIND:]N",
                 help="Batch: GPUs per node, such as 2 or a100:2; without -p, one process per"
                      " GPU."),
    click.option("--gpus", metavar="[KIND:]N",
                 help="Batch: GPUs of the whole job, such as v100:4, in equal shares."),
    click.option("--constraint", metavar="LIST",
                 help="Batch: features that the nodes must have."),
    click.option("--sbatch-arg", multiple=True, metavar="FLAG",
                 help="Batch: any other directive for the scheduler."),
    click.option("--setup-command", multiple=True, metavar="COMMAND",
                 help="Batch: line to run before the job (module load …)."),
    click.option("--requeue/--no-requeue", default=False,
                 help="Batch: before the time limit, save a checkpoint and requeue the job to"
                      " resume."),
    click.option("--array", metavar="RANGE", help="Batch: job array, one run per index."),
    click.option("--detach", is_flag=True,
                 help="Start the run and return. The run then needs neither this command nor this"
                      " machine. A batch job is only submitted."),
    click.option("--keep", is_flag=True,
                 help="Like --detach, but watch the run here. A closed terminal or Ctrl-Z does not"
                      " end the run."),
    click.option("--supervisor", metavar="HOST", show_default="the first",
                 help="With --detach or --keep: the host that supervises the run."),
    click.option("--keep-results", type=Duration(1.0), default="7d", metavar="DURATION",
                 help="With --detach or --keep: how long the supervisor's host keeps results"
                      " that nobody has fetched."),
]  # fmt: skip
# what only `run` takes, in the order of the help
RUN = [
    click.option("-m", "--module", is_flag=True, help="SCRIPT is a Python module."),
    click.option("--no-python", is_flag=True, help="SCRIPT is any program."),
    NO_TORCH,
    click.option("--data", type=click.Path(path_type=Path), metavar="FOLDER",
                 help="Data folder. Hosts that lack it get a copy; only changes are sent. Ranks"
                      " find its path in $PACELINE_DATA_DIR, or in their arguments."),
    click.option("--communication", type=click.Choice(["exact", *SCRIPT_METHODS]), default="exact",
                 help="How to send the gradients of SCRIPT's DDP; auto measures and chooses."),
    click.option("--measure/--no-measure", default=True,
                 help="Say at the end if sending gradients, or waiting for a slow rank, takes much"
                      " of SCRIPT's steps."),
    click.option("--verify/--no-verify", default=True,
                 help="Compare the ranks' models and batches in SCRIPT's"
                      " DistributedDataParallel. If models differ before the first step, the job"
                      " ends."),
    click.option("--pass-local-rank", is_flag=True,
                 help="Pass SCRIPT its local rank as --local_rank=N, or as --local-rank=N if SCRIPT"
                      " uses only that spelling. DeepSpeed and torch.distributed.launch do the"
                      " same."),
    click.option("--any-world", is_flag=True,
                 help="Accept a world size other than the planned one."),
    click.option("--rejoin", type=click.Choice(["after-save", "now", "never"]),
                 default="after-save",
                 help="With --nnodes MIN:MAX: when to restart the job to include a node that has"
                      " come back. after-save waits until rank 0 has saved a checkpoint."),
]  # fmt: skip


def add_options(command: F, options: Sequence[Callable[[F], F]]) -> F:
    for option in reversed(options):
        command = option(command)
    return command


def settings_options(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    """Returns a decorator that adds options which are settings, too."""

    def add(command: F) -> F:
        own_options = list(getattr(command, "__click_params__", []))
        return as_settings(add_options(command, options), exclude=own_options)

    return add


def run_lookup_options(command: F) -> F:
    """Adds what says which run is meant, that may have been started from another machine."""
    options = settings_options(RUN_DIR_OF, HOSTS_OF_RUNS, SSH_CONFIG, ACCEPT_NEW_HOST_KEYS)
    return click.argument("run", required=False)(options(command))


def launch_options(command: F) -> F:
    return torchrun_options(settings_options(*LAUNCH, *VIA_OPTIONS)(command))


def run_options(command: F) -> F:
    """Adds the options of ``paceline run``: all settings there are."""
    return as_settings(launch_options(add_options(command, RUN)))


@functools.cache
def settings_registry() -> Mapping[str, click.Option]:
    """Returns all settings by key: the options of ``paceline run``."""

    def run() -> None: ...

    params: list[click.Parameter] = run_options(run).__click_params__  # type: ignore[attr-defined]
    return {key_of(o): o for o in reversed(params) if isinstance(o, click.Option) and is_setting(o)}
