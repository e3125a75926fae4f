"""How a command is carried out: run here, submitted as a batch, or joined to another's run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from paceline.cli.applicability import LaunchMode, check_applicable, resolve_node_range
from paceline.cli.cluster import print_hosts, read_cluster, unknown_nodes
from paceline.hosts.lab import lab_name
from paceline.remote.openssh import SshOptions
from paceline.schedulers import BY_HAND, DEFAULT, FOR_IMAGES, current_scheduler, load
from paceline.schedulers.scheduler import ContainerOptions, Options, Scheduler
from paceline.spec.errors import SettingError
from paceline.spec.hosts import Cluster
from paceline.spec.job import Job
from paceline.spec.launchers import later_copy

if TYPE_CHECKING:
    from paceline.remote.transport import Transport
    from paceline.rendezvous.endpoint import Endpoint


Kind = Literal["run", "submit", "join"]


@dataclass(frozen=True, slots=True)
class Dispatch:
    """How a command is carried out: ``run`` here, ``submit`` a script or ``join`` another's run.

    Attributes:
        transport: For ``run``.
        endpoint: For ``join``: where the first node is.
    """

    kind: Kind
    scheduler: Scheduler
    transport: Transport | None = None
    endpoint: Endpoint | None = None

    def agree_on(self, job: Job) -> None:
        """Gives the transport what it must know of the job.

        Nodes on which the same command is typed have to mean the same. A scheduler's command
        passes its whole environment on in the clear: forwarded secrets must not be in it, for the
        agents get them through TLS.
        """
        if self.scheduler.is_direct:
            return
        from paceline.launch.planning.entry import entry_argv
        from paceline.rendezvous.manual import ManualTransport
        from paceline.rendezvous.scheduled import ScheduledTransport

        if isinstance(self.transport, ManualTransport):
            self.transport.command = entry_argv(job.entry, "python")
            self.transport.encrypts = job.encrypt.value
        elif isinstance(self.transport, ScheduledTransport):
            for name in job.environment.forwarded_secrets():
                os.environ.pop(name, None)


def launch_mode(params: Mapping[str, Any]) -> LaunchMode:
    """Returns how the command is carried out: by which scheduler, now or later."""
    scheduler = choose_scheduler(params)
    outside = scheduler.submit_options is not None and scheduler.allocation(os.environ) is None
    return LaunchMode(scheduler, submits=scheduler.start_options is None or outside)


def choose_scheduler(params: Mapping[str, Any]) -> Scheduler:
    """Returns the scheduler of the options; in an allocation, its own unless hosts are named."""
    if params["rdzv"]:
        return load(BY_HAND)
    if params["via"]:
        return load(params["via"])
    if params["image"]:
        return load(FOR_IMAGES)
    allocation = current_scheduler(os.environ)
    if allocation is not None and params["hosts"] in (None, allocation.name):
        return allocation
    return load(DEFAULT)


def check_rendezvous(params: Mapping[str, Any]) -> None:
    """Raises SettingError if ``--rdzv`` stands beside an option by which something starts nodes."""
    if params["rdzv"] and (params["hosts"] or not load(params["via"] or DEFAULT).is_direct):
        option = "--hosts" if params["hosts"] else "--via"
        raise SettingError(
            "--rdzv means that the command is typed on each node",
            found=f"with {option}, Paceline starts the nodes and makes the rendezvous itself",
            remedy=f"Leave out the --rdzv options; or leave out {option}, and type the command on"
            " each node",
        )


def resolve_dispatch(params: Mapping[str, Any]) -> Dispatch:
    """Decides how the command is carried out; SettingError if options contradict each other."""
    mode = launch_mode(params)
    if mode.submits:
        return Dispatch("submit", mode.scheduler)
    if mode.scheduler.needs_callback and lab_name(params["hosts"] or "") is not None:
        raise SettingError(
            f"{mode.scheduler.option} needs nodes that can call this machine, and the lab's cannot",
            found=f"-H {params['hosts']}: nothing outside a lab can be reached from its hosts",
            remedy=f"Type it on one of them: paceline lab shell n1, cd {Path.cwd()}, and the same "
            "with -H n1,n2; or leave out --via",
        )
    options = start_options(params)
    if options.endpoint is not None and not options.endpoint.first:
        return Dispatch("join", mode.scheduler, endpoint=options.endpoint)
    return Dispatch("run", mode.scheduler, mode.scheduler.start(options))


def require_transport(params: Mapping[str, Any], command: str) -> Transport:
    """Returns a transport for one of several runs; SettingError if it would be a batch."""
    transport = resolve_dispatch(params).transport
    if transport is None:
        raise SettingError(
            f"{command} runs here, not in a batch", remedy="In an allocation, type it again"
        )
    return transport


def ssh_options(params: Mapping[str, Any]) -> SshOptions:
    return SshOptions(params["ssh_config"], params.get("accept_new_host_keys", False))


def start_options(params: Mapping[str, Any]) -> Options:
    endpoint: Endpoint | None = None
    if params["rdzv"]:
        from paceline.rendezvous.endpoint import endpoint as meant

        endpoint = meant(params["rdzv"], params["rdzv_id"], params["rdzv_key_file"],
                         params["node_rank"], params["nnodes"], params["rdzv_timeout"])  # fmt: skip
    return Options(
        ssh=ssh_options(params),
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
    """Returns the folders that a container needs: project, run directory and current folder."""
    from paceline.transfer.tree import folder_root

    cwd = Path.cwd()
    run_dir = params["run_dir"]
    folders = [folder_root(cwd), *([run_dir.absolute()] if run_dir else [])]
    return tuple(dict.fromkeys(str(folder) for folder in folders))


def refuse_later_copy(params: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Refuses a job that another launcher started several times; the first process launches it.

    Each process would train the whole job, and all would write the same files.

    Raises:
        SettingError: This is not the first process, and the job is not for this machine alone.
    """
    copy = None if params["rdzv"] or params["hosts"] == "local" else later_copy(environ)
    if copy is not None:
        launcher, number = copy
        raise SettingError(
            f"{launcher} started this command {number} times, and once is enough",
            found="Paceline starts the ranks itself: each of these commands would train the whole "
            "job and overwrite the files of the others",
            remedy=f"Type `paceline` without {launcher} before it; for separate jobs on purpose, "
            "add -H local",
        )


def prepare(ctx: click.Context) -> tuple[Cluster, Dispatch]:
    """Reads the hosts and how they are started."""
    refuse_later_copy(ctx.params, os.environ)
    check_rendezvous(ctx.params)  # its remedy is better than that of a list of modes
    mode = launch_mode(ctx.params)
    check_applicable(ctx, mode)
    resolve_node_range(ctx, mode)
    dispatch, scheduler = resolve_dispatch(ctx.params), mode.scheduler
    if not scheduler.accepts_hosts:
        return unknown_nodes(ctx.params["nnodes"]), dispatch
    if dispatch.kind != "run":
        return read_cluster(ctx, None), dispatch
    source: str | None = ctx.params["hosts"]
    if scheduler.allocation(os.environ) is not None and source in (None, scheduler.name):
        source = scheduler.hosts(os.environ)
    cluster = read_cluster(ctx, source)
    print_hosts(ctx, cluster)
    return cluster, dispatch
