"""``paceline setup env``: a Python environment on every host."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from paceline.cli.verb import Verb, say
from paceline.cli.verbs.setup.targets import cluster_hosts, host_options
from paceline.remote.openssh import SshOptions
from paceline.spec.errors import NodeError, PacelineError
from paceline.spec.hosts import Host


@click.command("env", cls=Verb)
@host_options
@click.option("--requirements", required=True, metavar="FILE",
              type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="Requirements or lock file.")  # fmt: skip
@click.option("--folder", default="~/.local/share/paceline/env", show_default=True,
              help="Folder of the environment on every host.")  # fmt: skip
@click.option(
    "--python",
    default="python3",
    show_default=True,
    help="Python that creates the environment, on every host.",
)
@click.option("--offline", is_flag=True, help="Send the wheels from this machine.")
@click.option("--activate", default="", metavar="LINE",
              help="Shell line to run before the interpreter starts, such as"
                   " `module load cuda`.")  # fmt: skip
@click.pass_context
def command(ctx: click.Context, /, requirements: Path, folder: str, python: str, offline: bool,
        activate: str, **_: object) -> None:  # fmt: skip
    """Make a Python environment on every host from one requirements file."""
    import asyncio

    from paceline.setup import environments

    hosts, ssh = cluster_hosts(ctx)
    spec = environments.EnvironmentSpec(requirements, folder, python, activate, offline)
    wheels = environments.download_wheels(requirements) if offline else None
    try:
        folders = asyncio.run(_make_environments(hosts, ssh, spec, wheels))
    finally:
        if wheels is not None:
            import shutil

            shutil.rmtree(wheels)
    say(_describe_use(folders, f"bin/python{'-activated' if activate else ''}"))


def _describe_use(folders: Mapping[str, str], program: str) -> str:
    """Says how a run uses the environments in these folders, by host."""
    if len(set(folders.values())) == 1:
        return f"use it: paceline run --python {next(iter(folders.values()))}/{program} …"
    lines = [f"  [hosts.{json.dumps(name)}]\n  python = {json.dumps(f'{folder}/{program}')}"
             for name, folder in folders.items()]  # fmt: skip
    return "\n".join(["use it: write these lines to paceline.toml, then type: paceline trust",
                      *lines])  # fmt: skip


async def _make_environments(hosts: Sequence[Host], ssh: SshOptions, spec: Any,
                             wheels: Path | None) -> dict[str, str]:  # fmt: skip
    """Makes the environments; returns their folders by host."""
    import asyncio

    from paceline.remote.fanout import connect_hosts
    from paceline.setup import environments

    channels = await connect_hosts(hosts, [spec.python] * len(hosts), ssh)
    try:
        makers = await environments.one_node_per_disk(channels, spec)
        for channel, maker in zip(channels, makers, strict=True):
            if channel is not maker:
                say(f"{channel.host.name}: {spec.folder} is on the same disk as that of"
                    f" {maker.host.name}")  # fmt: skip
        work = [_make_environment(maker, spec, wheels) for maker in dict.fromkeys(makers)]
        failed = [error for error in await asyncio.gather(*work) if error is not None]
    finally:
        await asyncio.gather(*(channel.close(5.0) for channel in channels))
    if failed:
        raise environments.combine_failures(failed)
    return {channel.host.name: environments.folder_on(channel, spec) for channel in channels}


async def _make_environment(channel: Any, spec: Any, wheels: Path | None) -> PacelineError | None:
    """Makes the environment on one node; returns an error, as the work on others goes on."""
    import asyncio

    from paceline.setup import environments

    try:
        say(await environments.make_environment(channel, spec, wheels))
    except PacelineError as error:
        return error
    except ConnectionError:
        problem = "the connection ended"
    except asyncio.TimeoutError:
        problem = "no answer in time"
    else:
        return None
    return NodeError(f"{channel.host.name}: {problem}", remedy="Type the same command again")
