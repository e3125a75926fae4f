"""``paceline setup sshd``: an sshd of the user's own, without root."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from paceline.cli.verb import Verb, say
from paceline.cli.verbs.setup.targets import cluster_hosts, host_options, inherit_options
from paceline.remote.openssh import SshOptions
from paceline.spec.hosts import Host


@click.command("sshd", cls=Verb)
@host_options
@click.argument("action", type=click.Choice(["start", "stop", "status"]))
@click.option("--port", type=int, default=12345, help="Port to listen on.")
@click.option("--address", default="0.0.0.0", help="Address to listen on.")  # noqa: S104 - keys only
@click.option("--folder", type=click.Path(path_type=Path), help="Folder of its files.",
              show_default="~/.local/state/paceline/sshd/HOST")  # fmt: skip
@click.pass_context
def command(ctx: click.Context, /, action: str, port: int, address: str, folder: Path | None,
         **_: object) -> None:  # fmt: skip
    """Run your own sshd without root, on this machine or on the hosts of -H."""
    import asyncio

    from paceline.setup import worker_sshd

    argv = [action, "--port", str(port), "--address", address]
    argv += ["--folder", str(folder)] if folder else []
    inherit_options(ctx)
    if ctx.params["hosts"] is None:
        ctx.exit(worker_sshd.main(argv))
    hosts, ssh = cluster_hosts(ctx)
    ctx.exit(asyncio.run(_sshd_everywhere(hosts, ssh, argv, worker_sshd.script_text())))


async def _sshd_everywhere(hosts: Sequence[Host], ssh: SshOptions, argv: list[str],
                           script: str) -> int:  # fmt: skip
    import asyncio

    from paceline.setup.login import run_on_host

    answers = await asyncio.gather(
        *(run_on_host(h, ssh, ["python3", "-I", "-", *argv], script) for h in hosts)
    )
    for host, answer in zip(hosts, answers, strict=True):
        output = answer.refusal.details if answer.refusal else answer.output or answer.messages
        for line in output.strip().splitlines():
            say(f"{host.name}: {line}")
    return max(answer.status for answer in answers)
