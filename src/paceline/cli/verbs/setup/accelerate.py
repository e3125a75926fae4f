"""``paceline setup accelerate``: each machine's configuration of Accelerate, found and written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.applicability import reject_combination
from paceline.cli.measure.survey import survey
from paceline.cli.options import IFACE, NPROC_PER_NODE, SETUP_HOSTS, SSH_CONFIG, settings_options
from paceline.cli.verb import Verb, say
from paceline.cli.verbs.setup.targets import cluster_hosts
from paceline.remote import this_machine
from paceline.remote.openssh import SshOptions
from paceline.setup import accelerate
from paceline.setup.accelerate import PRECISIONS
from paceline.spec.errors import ConnectError
from paceline.spec.formatting import pluralize
from paceline.spec.hosts import Host

if TYPE_CHECKING:
    from paceline.setup.accelerate import Machine


@click.command("accelerate", cls=Verb)
@settings_options(SETUP_HOSTS, SSH_CONFIG, NPROC_PER_NODE, IFACE)
@click.option("--port", type=click.IntRange(1024, 65535), default=29500, show_default=True,
              help="Port on which the first machine listens.")  # fmt: skip
@click.option("--mixed-precision", type=click.Choice(PRECISIONS), default="no", show_default=True,
              help="Accelerate's mixed_precision.")  # fmt: skip
@click.option(
    "--install", is_flag=True, help="Write the file on the hosts, where Accelerate looks for it."
)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path),
              default=Path("accelerate-config"), show_default=True,
              help="Folder to write here.")  # fmt: skip
@click.pass_context
def command(ctx: click.Context, /, **_: object) -> None:
    """Write each machine's YAML for `accelerate launch`: kind, rank, address, processes."""
    params = ctx.params
    if params["install"]:
        reject_combination(ctx, "--install", ("out",))
    from paceline.checks.runner import require_all_reachable
    from paceline.launch.planning.affinity import gpus_seen

    hosts, ssh = cluster_hosts(ctx)
    results = survey(ctx, hosts, "quick")
    require_all_reachable(results)
    machines = []
    for host in hosts:
        facts = results.facts[host.name]
        makers = [gpu["maker"] for gpu in gpus_seen(facts, facts.get("environment") or {})]
        network = results.networks.get(host.name)
        interface = network.interface if network else ""
        cpus = len((facts.get("cpu") or {}).get("available", ()))
        processes = params["nproc_per_node"]
        machines.append(accelerate.machine(host, makers, cpus, processes, interface))
    address = results.address(hosts[0].name)
    texts = accelerate.files(machines, address, params["port"], params["mixed_precision"])
    for line in _placed(machines, texts, ssh, params):
        say(line)


def _placed(machines: Sequence[Machine], texts: Mapping[str, str], ssh: SshOptions,
            params: Mapping[str, Any]) -> list[str]:  # fmt: skip
    """Puts the files where they belong; what was done and what to type."""
    kind = accelerate.distributed_type(machines)
    lines = [
        f"{kind}, {pluralize(len(machines), 'machine')}, {machines[0].processes} processes each"
    ]
    if params["install"]:
        import asyncio

        places = asyncio.run(_install(machines, texts, ssh))
        lines += [f"{name}: {place}" for name, place in places.items()]
        return lines + accelerate.commands(machines, dict.fromkeys(texts, ""))
    folder: Path = params["out"]
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    lines.append(f"wrote {folder}/HOST.yaml; --install puts them where Accelerate looks by itself")
    return lines + accelerate.commands(machines, {name: f"{name}.yaml" for name in texts})


async def _install(machines: Sequence[Machine], texts: Mapping[str, str],
                   ssh: SshOptions) -> dict[str, str]:  # fmt: skip
    """Writes the file on the hosts and returns its path by host; ConnectError if one fails."""
    import asyncio

    from paceline.setup.login import run_on_host

    async def write_on(host: Host) -> tuple[int, str, str]:
        program = accelerate.INSTALL.format(text=repr(texts[host.name]))
        if not host.local:
            answer = await run_on_host(host, ssh, [host.python or "python3", "-I", "-"], program)
            return answer.status, answer.output, answer.messages
        process = await asyncio.create_subprocess_exec(
            this_machine.default_python(), "-I", "-c", program,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await process.communicate()
        return process.returncode or 0, out.decode(), err.decode(errors="replace")

    placed: dict[str, str] = {}
    failed: dict[str, str] = {}
    results = await asyncio.gather(*(write_on(machine.host) for machine in machines))
    for machine, (status, out, err) in zip(machines, results, strict=True):
        # a login may print lines of its own before ours
        lines = (out if status == 0 else err).strip().splitlines() or [f"exit status {status}"]
        (failed if status else placed)[machine.host.name] = lines[-1]
    if failed:
        raise ConnectError(
            f"the file could not be written on {', '.join(failed)}",
            found="\n".join(f"{name}: {reason}" for name, reason in failed.items()),
            remedy="Without --install the files are written here, to be copied",
        )
    return placed
