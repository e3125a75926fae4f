"""How the nodes are started: the options for it, and what they amount to."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from paceline.cli.flags import Seconds
from paceline.cli.torchrun import Aliased
from paceline.hosts.lab import lab_name
from paceline.remote.openssh import SshOptions
from paceline.schedulers import WAYS, ContainerOptions, Options
from paceline.schedulers.batch import BATCHES
from paceline.spec.errors import SettingError
from paceline.spec.job import Job

if TYPE_CHECKING:
    from paceline.remote.transport import Transport
    from paceline.rendezvous.endpoint import Endpoint

Kind = Literal["run", "submit", "join"]
CONTAINERS = ("docker", "podman", "apptainer")

VIA_OPTIONS = [
    click.option("--via", type=click.Choice([*WAYS, *(b for b in BATCHES if b not in WAYS)]),
                 help="What starts the nodes. Default: srun inside a Slurm allocation, else ssh."),
    click.option("--via-arg", multiple=True, metavar="FLAG",
                 help="One more word for mpiexec, srun or the container engine, passed through."),
    click.option("--mpiexec", metavar="PATH", help="Which mpiexec. Default: the one on PATH."),
    click.option("--image", metavar="IMAGE",
                 help="Container image; the same content is required on every host."),
    click.option("--mount", multiple=True, metavar="SOURCE:TARGET[:ro]",
                 help="Folder of the host to be seen in the container."),
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
    click.option("--time", "time_limit", metavar="H:MM:SS", help="Slurm: time limit."),
    click.option("--partition", metavar="NAME", help="Slurm: partition."),
    click.option("--account", metavar="NAME", help="Slurm: account."),
    click.option("--cpus-per-task", type=click.IntRange(1), metavar="N",
                 help="Slurm: CPUs for each process."),
    click.option("--mem", metavar="SIZE", help="Slurm: memory a node."),
    click.option("--gres", metavar="LIST", help="Slurm: accelerators a node, as gpu:2."),
    click.option("--sbatch-arg", multiple=True, metavar="FLAG",
                 help="Slurm: any other flag of sbatch, passed through."),
    click.option("--setup-command", multiple=True, metavar="COMMAND",
                 help="Slurm: line of the batch script before the job (module load …)."),
    click.option("--requeue/--no-requeue", default=False,
                 help="Slurm: before the time limit, save a checkpoint and requeue the job, which"
                      " then resumes."),
    click.option("--array", metavar="RANGE", help="Slurm: job array, one run for each index."),
    click.option("--detach", is_flag=True, help="Slurm: submit and leave; do not follow."),
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Way:
    """How a command is to be carried out.

    Attributes:
        kind: ``run`` here with ``transport``; ``submit`` a batch; ``join`` somebody else's run.
        name: Of the way.
        transport: For ``run``.
        endpoint: For ``join``: where the first node is.
    """

    kind: Kind
    name: str
    transport: Transport | None = None
    endpoint: Endpoint | None = None

    def agree_on(self, job: Job) -> None:
        """Nodes that meet by hand have to be there for the same thing."""
        from paceline.launch.view import entry_argv
        from paceline.rendezvous.typed import TypedTransport

        if isinstance(self.transport, TypedTransport):
            self.transport.words = entry_argv(job.entry, "python")


def allocation(environ: Mapping[str, str]) -> str | None:
    """The id of the Slurm allocation that we are in."""
    from paceline.schedulers.slurm import allocation  # its imports are no help text's

    return allocation(environ)


def manner_of(params: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    """How the command is carried out, as :mod:`paceline.cli.applies` names it."""
    name = name_of(params, environ)
    if params["rdzv"]:
        return "rdzv"
    if name == "slurm":
        return "srun" if allocation(environ) else "sbatch"
    return name


def name_of(params: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    """The way that the options mean; inside an allocation srun, unless hosts are named."""
    if params["via"]:
        return str(params["via"])
    if params["image"]:
        return "docker"
    if allocation(environ) and params["hosts"] in (None, "slurm") and not params["rdzv"]:
        return "slurm"
    return "ssh"


def hosts_source(params: Mapping[str, Any], environ: Mapping[str, str]) -> str | None:
    """Where the hosts are described: in an allocation, the allocation."""
    source: str | None = params["hosts"]
    inside = name_of(params, environ) == "slurm" and allocation(environ)
    return "slurm" if inside and source is None else source


def way_of(params: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Way:
    """What is to be done. SettingError where options contradict each other."""
    environ = os.environ if environ is None else environ
    name = name_of(params, environ)
    check_options(params, name)
    if params["rdzv"]:
        return _typed(params)
    if name in BATCHES and not (name == "slurm" and allocation(environ)):
        return Way("submit", name)
    from paceline.schedulers import transport

    return Way("run", name, transport(name, options_of(params)))


def _typed(params: Mapping[str, Any]) -> Way:
    from paceline.rendezvous.endpoint import endpoint
    from paceline.rendezvous.typed import TypedTransport

    where = endpoint(params["rdzv"], params["rdzv_id"], params["rdzv_key_file"],
                     params["node_rank"], params["nnodes"], params["rdzv_timeout"])  # fmt: skip
    if where.first:
        return Way("run", "rdzv", TypedTransport(where))
    return Way("join", "rdzv", endpoint=where)


def options_of(params: Mapping[str, Any]) -> Options:
    """The options that transports understand."""
    return Options(
        ssh=SshOptions(params["ssh_config"], params["accept_new_host_keys"]),
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
    )


def container_folders(params: Mapping[str, Any]) -> tuple[str, ...]:
    """What a container has to see: the project, the run directory, the folder we are in."""
    from paceline.transfer.tree import folder_root

    cwd = Path.cwd()
    run_dir = params["run_dir"]
    folders = [folder_root(cwd), *([run_dir.absolute()] if run_dir else [])]
    return tuple(dict.fromkeys(str(folder) for folder in folders))


def check_options(params: Mapping[str, Any], name: str) -> None:
    """Refuses what the chosen way needs and has not, and options that contradict each other."""
    if name in CONTAINERS and not params["image"] and not params["rdzv"]:
        raise SettingError(f"--via {name} needs an image", remedy="--image IMAGE")
    if name == "mpi" and lab_name(params["hosts"] or "") is not None:
        raise SettingError(
            "--via mpi needs nodes that can call this machine, and the lab's cannot",
            found=f"-H {params['hosts']}: nothing outside a lab can be reached from its hosts",
            remedy=f"Type it on one of them: paceline lab shell n1, cd {Path.cwd()}, and the same "
            "with -H n1,n2; or leave out --via",
        )
    if params["rdzv"] and (params["hosts"] or params["via"] not in (None, "ssh", "local")):
        raise SettingError(
            "--rdzv means that the command is typed on each node",
            found="-H or --via says that something else starts the nodes",
            remedy="Leave out --rdzv, or leave out the other",
        )
