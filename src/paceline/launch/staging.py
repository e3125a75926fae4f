"""Everything a node needs before its ranks can start: folders, code, a warm fork server."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.launch import decide, outcome
from paceline.launch.fleet import Fleet, together
from paceline.launch.node import Node, Trouble
from paceline.launch.shipping import place_code, place_inputs, ship_tree, with_inputs
from paceline.rundir.directory import RunDirectory
from paceline.spec import rundir as names
from paceline.spec.errors import NodeError
from paceline.spec.job import Job
from paceline.transfer.checkpoints import send_checkpoints
from paceline.transfer.tree import Tree, project_root, read_parts, read_tree

# whether a job needs this installation's package: all of it, or these parts of it
Package = bool | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Supplies:
    """What may have to be shipped, read and hashed on the launching machine.

    Attributes:
        code: The job's code; ``None`` when no node can need it.
        package: This installation's ``paceline``; ``None`` unless the job needs it.
        inputs: Further folders by their path here.
    """

    code: Tree | None
    package: Tree | None
    inputs: dict[str, Tree]


def gather_supplies(job: Job, fleet: Fleet, package: Package) -> Supplies:
    """Reads what the nodes may need. Blocking: call it in a thread."""
    remote = any(not host.local for host in fleet.hosts)
    program = job.entry.kind == "binary" and job.ship.value == "auto"
    needs_code = remote and not program and not package
    return Supplies(
        code=read_tree(project_root(job)) if needs_code else None,
        package=package_tree(package) if package else None,
        inputs={i.path: read_parts(Path(i.path), i.parts) for i in job.inputs} if remote else {},
    )


def package_tree(parts: Package) -> Tree:
    """This installation's package, or parts of it, for interpreters that do not have it."""
    import paceline

    folder = Path(paceline.__file__).parent
    inner = read_tree(folder, () if isinstance(parts, bool) else parts)
    manifest = [[f"paceline/{entry[0]}", *entry[1:]] for entry in inner.manifest]
    return Tree(folder.parent, manifest, inner.digest)


async def stage(fleet: Fleet, job: Job, supplies: Supplies, directory: RunDirectory,
                run_id: str, token: str) -> dict[str, decide.Code]:  # fmt: skip
    """Readies every node that is not ready yet; says where the code is on each of them."""
    nodes = [node for node in fleet.nodes if not node.preparation]
    begun = [begin(node, job, supplies.package, directory, run_id, token) for node in nodes]
    placed = [place(node, job, supplies, run_id) for node in nodes]
    results = await together([*begun, *placed])
    if fleet.first in nodes and not fleet.first.shared_run_dir:
        await send_checkpoints(fleet.first.channel, fleet.first.run_folder, directory)
    return dict(zip((node.name for node in nodes), results[len(begun) :], strict=True))


async def begin(node: Node, job: Job, package: Tree | None, directory: RunDirectory,
                run_id: str, token: str) -> None:  # fmt: skip
    """Starts the node's fork server: its imports run beside all that is still to be found out."""
    await find_run_folder(node, directory)
    python = decide.python_of(job, node.host)
    env = {**early_env(job, node), **job.environment.all()}
    if package is not None and not (node.host.local and python == sys.executable):
        root = await ship_tree(node, package, "paceline", run_id)
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH")]))
    node.preparation = {
        "python": python,
        "preload": list(job.preload),
        "env": env,
        "unset": list(job.environment.unset),
        "token": token,
    }
    await node.prepare()


async def find_run_folder(node: Node, directory: RunDirectory) -> None:
    """The run directory itself where the node reads and writes it, else a folder of the node's."""
    about: dict[str, Any] = {
        "path": str(directory.path),
        "token_file": names.PROBE,
        "token": directory.token,
        "key": directory.key,
    }
    answer = await node.channel.request("run_folder", **about)
    if answer["shared"] and not directory.take_sign(node.channel.identity):
        answer = await node.channel.request("run_folder", **about, own=True)
    node.run_folder, node.shared_run_dir = answer["folder"], answer["shared"]


def early_env(job: Job, node: Node) -> dict[str, str]:
    """What libraries read when they are loaded; interface names follow with the ranks."""
    processes = decide.processes_on(job, node.host, node.facts).value
    settings = decide.node_env(job, node.facts, processes, None)
    return {name: setting.value for name, setting in settings.items()}


async def place(node: Node, job: Job, supplies: Supplies, run_id: str) -> decide.Code:
    """Brings code and inputs to the node where they are not there already."""
    code = await place_code(node, job, supplies.code, run_id)
    places = await place_inputs(node, supplies.inputs, run_id)
    workdir = code.workdir
    tree = supplies.code
    travels = tree is not None and Path(job.workdir).is_relative_to(tree.root)
    if not travels and not node.host.local:
        workdir = await _workdir_without_code(node, workdir)
    return decide.Code(code.how, workdir, with_inputs(code.entry, places))


async def _workdir_without_code(node: Node, wanted: str) -> str:
    """Programs run in the same folder if it is there, else at home."""
    answer = await node.channel.request("look", paths=[wanted])
    if answer["paths"][0]["exists"]:
        return wanted
    if node.host.workdir:
        raise NodeError(
            f"{node.name} has no folder {wanted}",
            remedy=f"Create it there, or change workdir under [hosts.{node.name}]",
        )
    return str(node.facts["user"]["home"])


async def would_place(node: Node, job: Job, tree: Tree | None) -> decide.Code:
    """Where the code would be: for ``--plan``, which ships nothing."""
    workdir = node.host.workdir or job.workdir
    if tree is None or node.host.local:
        return decide.Code("in place", workdir, job.entry)
    root = node.host.workdir or str(tree.root)
    answer = await node.channel.request("compare_tree", root=root, manifest=tree.manifest)
    equal = answer["exists"] and not (answer["missing"] or answer["different"])
    if equal and job.ship.value != "always":
        return decide.Code("verified equal", workdir, job.entry)
    return decide.Code("shipped", f"(a copy of {tree.root})", job.entry)


async def fork_servers_up(fleet: Fleet, job: Job) -> None:
    """Waits for the imports everywhere; refuses nodes on which they failed or lack the backend.

    A fork server that died in an earlier attempt is replaced by a new one.
    """
    await together([node.prepare() for node in fleet.nodes if node.fork_server_died])
    for node in fleet.nodes:
        if node.ready is not None and (trouble := await node.ready):
            raise _no_fork_server(fleet, node, trouble, job)
    for node in fleet.nodes:
        backends = node.loaded.get("backends")
        if job.backend and backends is not None and job.backend not in backends:
            raise _no_backend(node, job.backend, backends)


def _no_fork_server(fleet: Fleet, node: Node, trouble: Trouble, job: Job) -> NodeError:
    if trouble.kind == "lost":
        return went_away(fleet, node, trouble.text)
    modules = ", ".join(job.preload)
    python = decide.python_of(job, node.host)
    if trouble.kind == "died":
        return NodeError(
            f"{node.name} could not start its ranks", found=f"{trouble.text} while starting"
        )
    return NodeError(
        f"{node.name} cannot import {modules}",
        found="\n".join(trouble.text.strip().splitlines()[-8:]),
        remedy=f"Look there: {python} -c 'import {modules}'",
    )


def went_away(fleet: Fleet, node: Node, why: str) -> NodeError:
    """A host was lost before its ranks ran: its own doing, unless this launcher was away."""
    name, away = node.name, fleet.absence
    if away is not None and away.seconds > fleet.lease_s / 2:
        return NodeError(
            f"{outcome.own_pause(away.seconds, fleet.lease_s)}, while the nodes were starting",
            found=f"{name}: {why}",
            remedy="Run again; --lease SECONDS is how long nodes wait for this launcher",
        )
    return NodeError(
        f"{name} went away while starting",
        found=why,
        remedy=f"See that {name} is on and can be reached (paceline check), and run again",
    )


def _no_backend(node: Node, wanted: str, backends: Sequence[str]) -> NodeError:
    return NodeError(
        f"backend {wanted} was asked for, but torch on {node.name} was built without it",
        found=f"torch {node.loaded.get('torch')} there has: {', '.join(backends)}",
        remedy=f"--backend {backends[0] if backends else 'gloo'}, or install a torch with {wanted}",
    )
