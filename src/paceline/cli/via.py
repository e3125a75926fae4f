"""How the nodes are started: the options for it, and what they amount to."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from paceline.cli.applies import SUBMISSION, VERBS, Manner, given, spelling
from paceline.cli.flags import Duration, Seconds
from paceline.cli.torchrun import Aliased
from paceline.cli.verb import say
from paceline.hosts.lab import lab_name
from paceline.remote.openssh import SshOptions
from paceline.schedulers import BY_HAND, DEFAULT, FOR_IMAGES, SCHEDULERS, current_scheduler, load
from paceline.schedulers.scheduler import ContainerOptions, Options, Scheduler
from paceline.spec.errors import SettingError
from paceline.spec.job import Job

if TYPE_CHECKING:
    from paceline.remote.transport import Transport
    from paceline.rendezvous.endpoint import Endpoint
    from paceline.schedulers.script import BatchRequest


class SchedulerName(click.Choice[str]):
    """The name of a scheduler; one that was removed is refused with what replaces it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value == "flux":
            self.fail(
                'flux was removed: inside an allocation of Flux, start the nodes over SSH with'
                ' -H "$(flux getattr hostlist)"', param, ctx,
            )  # fmt: skip
        return super().convert(value, param, ctx)


VIA_OPTIONS = [
    click.option("--via", type=SchedulerName([name for name in SCHEDULERS if name != BY_HAND]),
                 help="What starts the nodes. Default: in an allocation its scheduler, else ssh."),
    click.option("--via-arg", multiple=True, metavar="FLAG",
                 help="One more word for the program that starts the nodes, passed through."),
    click.option("--mpiexec", metavar="PATH", help="Which mpiexec. Default: the one on PATH."),
    click.option("--image", metavar="IMAGE",
                 help="Container image; the same content is required on every host."),
    click.option("--mount", multiple=True, metavar="SOURCE:TARGET[:ro]",
                 help="Folder of the host (Kubernetes: or a claim) to be seen in the container."),
    click.option("--shm-size", default="8g", metavar="SIZE",
                 help="Size of /dev/shm in the container."),
    click.option("--rdzv", cls=Aliased, aliases=("--rdzv-endpoint",), metavar="HOST:PORT",
                 help="Type the same command on each node; they meet at this address."),
    click.option("--rdzv-id", metavar="NAME",
                 help="With --rdzv: its name, the same on each node. No secret."),
    click.option("--rdzv-key-file", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
                 help="With --rdzv: file with the key, the same on each node. Default: "
                 "PACELINE_RDZV_KEY, else the first node shows one and the others ask for it."),
    click.option("--node-rank", type=click.IntRange(0), metavar="K",
                 help="With --rdzv: this node's place. Default: 0 where HOST is this machine, "
                 "else in order of arrival."),
    click.option("--rdzv-timeout", type=Seconds(1.0), default=300.0, metavar="SECONDS",
                 help="How long to wait for the other nodes."),
    click.option("--time", "time_limit", metavar="H:MM:SS", help="Batch: time limit."),
    click.option("--partition", metavar="NAME", help="Batch: partition."),
    click.option("--account", metavar="NAME", help="Batch: account."),
    click.option("--cpus-per-task", type=click.IntRange(1), metavar="N",
                 help="Batch: CPUs for each process."),
    click.option("--mem", metavar="SIZE", help="Batch: memory a node."),
    click.option("--gres", metavar="LIST", help="Batch: accelerators a node, as gpu:2."),
    click.option("--gpus-per-node", metavar="[KIND:]N",
                 help="Batch: GPUs a node, as 2 or a100:2; without -p one process for each."),
    click.option("--gpus", metavar="[KIND:]N",
                 help="Batch: GPUs of the whole job, as v100:4, in equal shares."),
    click.option("--constraint", metavar="LIST",
                 help="Batch: features that the nodes must have."),
    click.option("--sbatch-arg", multiple=True, metavar="FLAG",
                 help="Batch: any other directive of the scheduler, passed through."),
    click.option("--setup-command", multiple=True, metavar="COMMAND",
                 help="Batch: line of the script before the job (module load …)."),
    click.option("--requeue/--no-requeue", default=False,
                 help="Batch: before the time limit, save a checkpoint and requeue the job, which"
                      " then resumes."),
    click.option("--array", metavar="RANGE", help="Batch: job array, one run for each index."),
    click.option("--detach", is_flag=True,
                 help="Start the run and leave it: it needs neither this command nor this machine"
                 " any more. A batch is submitted and not followed."),
    click.option("--keep", is_flag=True,
                 help="The same, and attach at once: a closed terminal or Ctrl-Z ends nothing."),
    click.option("--supervisor", metavar="HOST", show_default="the first",
                 help="With --detach or --keep: the host that watches the run."),
    click.option("--keep-results", type=Duration(1.0), default="7d", metavar="DURATION",
                 help="With --detach or --keep: how long results wait on the supervisor's host for"
                 " somebody who fetches them."),
]  # fmt: skip

Kind = Literal["run", "submit", "join"]


@dataclass(frozen=True, slots=True)
class Via:
    """How a command is to be carried out.

    Attributes:
        kind: ``run`` here with ``transport``; ``submit`` a script; ``join`` somebody else's run.
        scheduler: What starts the nodes.
        transport: For ``run``.
        endpoint: For ``join``: where the first node is.
    """

    kind: Kind
    scheduler: Scheduler
    transport: Transport | None = None
    endpoint: Endpoint | None = None

    def agree_on(self, job: Job) -> None:
        """What the transport must know of the job.

        Nodes on which the same command is typed have to mean the same. A scheduler's command
        passes its whole environment on in the clear: forwarded secrets must not be in it, for the
        agents get them through TLS.
        """
        if self.scheduler.is_direct:
            return
        from paceline.launch.entry import entry_argv
        from paceline.rendezvous.started import StartedTransport
        from paceline.rendezvous.typed import TypedTransport

        if isinstance(self.transport, TypedTransport):
            self.transport.words = entry_argv(job.entry, "python")
        elif isinstance(self.transport, StartedTransport):
            for name in job.environment.forwarded_secrets():
                os.environ.pop(name, None)


def manner_of(params: Mapping[str, Any], environ: Mapping[str, str]) -> Manner:
    """How the command is carried out: by which scheduler, now or later."""
    scheduler = scheduler_of(params, environ)
    outside = scheduler.submit_options is not None and scheduler.allocation(environ) is None
    return Manner(scheduler, submits=scheduler.start_options is None or outside)


def scheduler_of(params: Mapping[str, Any], environ: Mapping[str, str]) -> Scheduler:
    """The scheduler that the options mean; inside an allocation its own, unless hosts are named."""
    if params["rdzv"]:
        return load(BY_HAND)
    if params["via"]:
        return load(params["via"])
    if params["image"]:
        return load(FOR_IMAGES)
    around = current_scheduler(environ)
    if around is not None and params["hosts"] in (None, around.name):
        return around
    return load(DEFAULT)


def hosts_source(params: Mapping[str, Any], environ: Mapping[str, str]) -> str | None:
    """Where the hosts are described: in an allocation, the allocation."""
    source: str | None = params["hosts"]
    scheduler = scheduler_of(params, environ)
    ours = scheduler.allocation(environ) is not None and source in (None, scheduler.name)
    return scheduler.hosts(environ) if ours else source


def via_of(params: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Via:
    """What is to be done. SettingError where options contradict each other."""
    environ = os.environ if environ is None else environ
    if params["rdzv"] and (params["hosts"] or not load(params["via"] or DEFAULT).is_direct):
        raise SettingError(
            "--rdzv means that the command is typed on each node",
            found="-H or --via says that something else starts the nodes",
            remedy="Leave out --rdzv, or leave out the other",
        )
    manner = manner_of(params, environ)
    if manner.submits:
        return Via("submit", manner.scheduler)
    if manner.scheduler.needs_callback and lab_name(params["hosts"] or "") is not None:
        raise SettingError(
            f"{manner.scheduler.option} needs nodes that can call this machine, and the lab's "
            "cannot",
            found=f"-H {params['hosts']}: nothing outside a lab can be reached from its hosts",
            remedy=f"Type it on one of them: paceline lab shell n1, cd {Path.cwd()}, and the same "
            "with -H n1,n2; or leave out --via",
        )
    options = options_of(params)
    if options.endpoint is not None and not options.endpoint.first:
        return Via("join", manner.scheduler, endpoint=options.endpoint)
    return Via("run", manner.scheduler, manner.scheduler.start(options))


def transport_of(params: Mapping[str, Any], what: str) -> Transport:
    """For one run of a command that does several: none serves a second one.

    Args:
        params: Of the command.
        what: Its name, for people.

    Raises:
        SettingError: It would be a batch.
    """
    transport = via_of(params).transport
    if transport is None:
        raise SettingError(
            f"{what} runs here, not in a batch", remedy="In an allocation, type it again"
        )
    return transport


def ssh_of(params: Mapping[str, Any]) -> SshOptions:
    """How to log in."""
    return SshOptions(params["ssh_config"], params["accept_new_host_keys"])


def options_of(params: Mapping[str, Any]) -> Options:
    """The options that schedulers understand when they start nodes."""
    endpoint: Endpoint | None = None
    if params["rdzv"]:
        from paceline.rendezvous.endpoint import endpoint as meant

        endpoint = meant(params["rdzv"], params["rdzv_id"], params["rdzv_key_file"],
                         params["node_rank"], params["nnodes"], params["rdzv_timeout"])  # fmt: skip
    return Options(
        ssh=ssh_of(params),
        interface=params["iface"],
        arguments=tuple(params["via_arg"]),
        mpiexec=params["mpiexec"],
        container=ContainerOptions(
            image=params["image"] or "",
            mounts=tuple(params["mount"]),
            folders=container_folders(params) if params["image"] else (),
            shm_size=params["shm_size"],
            arguments=tuple(params["via_arg"]),
        ),
        endpoint=endpoint,
    )


def container_folders(params: Mapping[str, Any]) -> tuple[str, ...]:
    """What a container has to see: the project, the run directory, the folder we are in."""
    from paceline.transfer.tree import folder_root

    cwd = Path.cwd()
    run_dir = params["run_dir"]
    folders = [folder_root(cwd), *([run_dir.absolute()] if run_dir else [])]
    return tuple(dict.fromkeys(str(folder) for folder in folders))


# --- jobs that start later


def submit(ctx: click.Context, job: Job, directory: Path, scheduler: Scheduler,
           folder: str = "--run-dir") -> int:  # fmt: skip
    """Writes the script, and where that can be done submits and follows it.

    Args:
        ctx: The verb's context, with the common options.
        job: What the batch runs.
        directory: Where the script and the run go.
        scheduler: Which.
        folder: The verb's option for that directory.

    Returns:
        The job's exit status; 0 for one that is not followed.
    """
    import asyncio

    from paceline.schedulers import submission

    directory = directory.absolute()
    request = request_of(ctx, job, directory, folder)
    if scheduler.stores_secrets and not ctx.params["plan_only"]:
        request = replace(request, secrets=secrets_of(job))
    text = scheduler.render(request)
    if ctx.params["plan_only"] or not scheduler.can_follow():
        click.echo(text, nl=False)
        if not scheduler.is_tested:
            by_hand = (
                f"; submit it with {scheduler.submit_command}" if scheduler.submit_command else ""
            )
            if request.secrets:
                by_hand += ", and show it to nobody: it holds secrets (--plan leaves them out)"
            say(f"paceline: this form was not tried on a real {scheduler.name}{by_hand}", err=True)
        return 0
    array = bool(request.array)
    handed_in = submission.submit_job(scheduler, text, directory, array, job.typed)
    say(f"paceline: {handed_in.title}, run directory {directory}", err=True)
    if ctx.params["detach"]:
        return 0
    return asyncio.run(submission.follow(handed_in, lambda line: say(line, err=True)))


def request_of(ctx: click.Context, job: Job, directory: Path, folder: str) -> BatchRequest:
    """The batch that the options describe."""
    from paceline.schedulers.script import BatchRequest

    params = ctx.params
    if params["nnodes"] is None:
        raise SettingError("a batch needs the number of nodes", remedy="--nnodes N")
    return BatchRequest(
        name=job.name,
        argv=(job.python, "-m", "paceline", *VERBS[ctx.command.name or "run"].split()),
        folder=folder,
        options=words_inside(ctx),
        workdir=job.workdir,
        run_dir=str(directory),
        nodes=params["nnodes"],
        processes=params["nproc_per_node"] if isinstance(params["nproc_per_node"], int) else None,
        time=params["time_limit"] or "",
        partition=params["partition"] or "",
        account=params["account"] or "",
        mem=params["mem"] or "",
        gres=params["gres"] or "",
        gpus=params["gpus"] or "",
        gpus_per_node=params["gpus_per_node"] or "",
        constraint=params["constraint"] or "",
        cpus_per_task=params["cpus_per_task"],
        arguments=tuple(params["sbatch_arg"]),
        setup=tuple(params["setup_command"]),
        requeue=params["requeue"],
        array=params["array"] or "",
        image=params["image"] or "",
        mounts=tuple(params["mount"]),
        shm_size=params["shm_size"] if "shm_size" in given(ctx) else "",
        forwarded=tuple(job.environment.forwarded),
    )


def secrets_of(job: Job) -> dict[str, str]:
    """What a script has to hold that keeps secrets: a key made up for this run, and values."""
    import secrets

    from paceline.rendezvous.endpoint import KEY_VARIABLE, TOKEN_DIGITS

    made = secrets.token_hex(TOKEN_DIGITS // 2)
    return {KEY_VARIABLE: made, **job.environment.forwarded}


def words_inside(ctx: click.Context) -> tuple[str, ...]:
    """What was given for the job itself, as the command in the batch is told it.

    Written from the options' values, not from the words that were typed: a variable or a file of
    the launching machine may not be there when the batch runs.
    """
    asked = given(ctx, [param.name or "" for param in ctx.command.params])
    kept = asked.keys() - SUBMISSION - _USED
    words: list[str] = []
    for param in sorted(ctx.command.params, key=lambda one: isinstance(one, click.Argument)):
        value = ctx.params.get(param.name or "")
        if isinstance(param, click.Argument):
            words += map(str, value if isinstance(value, tuple) else [value])
        elif isinstance(param, click.Option) and param.name in kept:
            flag = spelling(param, value)
            values = value if isinstance(value, tuple) else [value]
            words += [flag] if param.is_flag else [f"{flag}={one}" for one in values]
    return tuple(words)


# Options that the submission has used up, besides those that are for submissions only.
_USED = {"via", "nnodes", "run_dir", "out", "plan_only"}
