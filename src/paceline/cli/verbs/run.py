"""``paceline run``: any script, module or program, on every host."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from paceline.cli.dispatch import prepare
from paceline.cli.job_options import build_job
from paceline.cli.launch import launch_job
from paceline.cli.options import run_options
from paceline.cli.settings import setting
from paceline.cli.verb import Verb, say
from paceline.launch.planning.entry import (
    COMPRESSION,
    entry_of,
    inner_launcher,
    local_rank_flag,
    mentions,
    opens_store,
    preload_of,
)
from paceline.spec.errors import SettingError
from paceline.spec.hosts import Cluster
from paceline.spec.job import Data, Entry, Job, NodeRange
from paceline.spec.jobenv import DATA_DIR
from paceline.spec.settings import Source

_PLACEMENT_FLAGS = ("--hosts", "--nnodes", "--nproc-per-node")


@click.command("run", cls=Verb, context_settings={"allow_interspersed_args": False})
@run_options
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(ctx: click.Context, /, script: str, args: tuple[str, ...], module: bool,
            no_python: bool, no_torch: bool, any_world: bool, communication: str,
            verify: bool, measure: bool, data: Path | None,
            pass_local_rank: bool, **_: object) -> None:  # fmt: skip
    """Run SCRIPT with ARGS on every host, like torchrun, with one command.

    Options for paceline come before SCRIPT. What follows is passed to the script.
    """
    cluster, dispatch = prepare(ctx)
    entry = entry_of(script, args, module=module, no_python=no_python)
    if entry.kind == "binary" and (launcher := inner_launcher(entry)):
        warning = (
            f"{shlex.join([script, *args])} starts {launcher} on every rank. Unless it has a"
            " rendezvous of its own, each starts a separate training. To train one model, start the"
            f" script of {launcher} itself: paceline run SCRIPT"
        )
        say(f"paceline: warning: {warning}", err=True)
    if pass_local_rank:
        entry = replace(entry, local_rank_flag=local_rank_flag(script))
    torch = not (no_torch or no_python)
    compresses = communication != "exact"
    torch_options = {
        "--any-world": any_world,
        "--backend": ctx.params["backend"],
        "--communication": compresses,
        "--no-verify": not verify,
        "--no-measure": not measure,
    }
    for flag in (flag for flag, value in torch_options.items() if value and not torch):
        raise SettingError(
            f"{flag} needs a Python script that uses torch",
            found="with --no-torch or --no-python nothing looks at torch",
            remedy="Leave it out",
        )
    job = build_job(
        ctx,
        entry,
        name=Path(script).stem or "run",
        preload=(*preload_of(entry), *([COMPRESSION] if compresses else ())) if torch else (),
        opens_store=opens_store(entry),
        needs_torch=torch,
        any_world=any_world,
        communication=setting(ctx, "communication"),
        verify=verify,
        measure=measure,
        data=data_of(data, entry.args, is_local=dispatch.kind != "join") if data else None,
        rejoin=setting(ctx, "rejoin"),
    )
    require_rejoin_applies(job)
    for note in filter(None, (data_note(job, cluster), misplaced_note(entry, cluster))):
        say(note, err=True)
    ctx.exit(launch_job(ctx, job, cluster, dispatch))


def require_rejoin_applies(job: Job) -> None:
    """Raises SettingError for ``--rejoin`` if no node can come back, or none interrupts."""
    if job.rejoin.source is Source.DEFAULT:
        return
    if not isinstance(job.nnodes.value, NodeRange):
        raise SettingError(
            f"--rejoin {job.rejoin.value} needs --nnodes MIN:MAX",
            found="the job has a fixed number of nodes: it does not go on without one",
            remedy="Add --nnodes 1:2 (from one to two nodes), or leave --rejoin out",
        )
    if job.trains:
        raise SettingError(
            f"--rejoin {job.rejoin.value} is for scripts that do not use paceline.train",
            found="a session takes a node in between two steps, without a restart",
            remedy="Leave it out",
        )


def data_of(folder: Path, args: Sequence[str], is_local: bool) -> Data:
    """Returns the data folder, and the arguments that are paths of it or in it.

    Args:
        is_local: It is sent from here: SettingError if there is none.
    """
    if is_local and not folder.is_dir():
        raise SettingError(
            f"--data {folder} is not a folder",
            found=f"{folder.absolute()} is a file" if folder.exists() else "nothing of that name",
            remedy="Name a folder of this machine; hosts that lack it get it",
        )
    root = os.path.abspath(folder)  # noqa: PTH100 - a link stays one
    values = {value for arg in args for value in (arg, arg.partition("=")[2])}
    subpaths = {value: _subpath(value, root) for value in sorted(values)}
    return Data(root, {value: path for value, path in subpaths.items() if path is not None})


def misplaced_note(entry: Entry, cluster: Cluster) -> str:
    """Says that an option for several processes went to a script that does not name it."""
    flags = (arg.partition("=")[0] for arg in entry.args)
    flag = next((flag for flag in flags if flag in _PLACEMENT_FLAGS), "")
    if not flag or entry.kind != "script" or not all(host.local for host in cluster.hosts):
        return ""
    if mentions(entry, flag) or mentions(entry, flag.strip("-").replace("-", "_")):
        return ""
    return (
        f"paceline: note: {flag} follows {entry.target}, so the script gets it, not Paceline;"
        f" Paceline's options go before the script: paceline run {flag} … {entry.target}"
    )


def data_note(job: Job, cluster: Cluster) -> str:
    """Says how the script finds its data, if none of its arguments does; else returns ``""``."""
    if job.data is None or job.data.words or mentions(job.entry, DATA_DIR):
        return ""
    if job.entry.kind != "script":  # the text of a module is not known
        return ""
    if all(host.local for host in cluster.hosts):
        return ""
    from paceline.rundir.directory import short

    path = short(Path(job.data.path))
    hint = "" if "/" in path else ", as a single word is no path"
    path = path if "/" in path else f"./{path}"
    return (
        f"paceline: no argument of the script names {path}{hint}; its path on a host is in"
        f" {DATA_DIR}"
    )


def _subpath(value: str, root: str) -> str | None:
    """Returns where a path lies below the folder, such as ``/train``; empty for the folder itself.

    ``None`` for any other path, a single word, or a result in the folder that does not exist yet.
    """
    path = os.path.abspath(value)  # noqa: PTH100 - a link stays one
    if "/" not in value or not f"{path}/".startswith(f"{root}/"):
        return None
    if not Path(path).exists():
        return "" if path == root else None
    # ".." behind a link leads elsewhere than the text says
    return path[len(root) :] if Path(value).exists() and Path(value).samefile(path) else None
