"""Gives nodes what they need before ranks start: run folder, fork server, files."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from paceline.agent.warm import FOLDER_PREFIX
from paceline.launch.nodes import survey
from paceline.launch.nodes.fleet import Fleet, ForkServerError, Node
from paceline.launch.nodes.survey import startup_loss
from paceline.launch.planning import placement, planner
from paceline.launch.planning.placement import Supplies
from paceline.launch.planning.request import Request
from paceline.launch.recorder import Recorder
from paceline.launch.terminal.screen import Screen
from paceline.remote import agreement
from paceline.remote.channel import AgentRefusal
from paceline.remote.fanout import gather_all
from paceline.rundir.directory import RunDirectory
from paceline.spec import rundir as names
from paceline.spec.errors import NodeError
from paceline.spec.job import Job
from paceline.spec.plan import Copy, Plan
from paceline.transfer import data
from paceline.transfer.checkpoints import send_checkpoints
from paceline.transfer.data import DataFolder, Progress
from paceline.transfer.files import is_out_of_space, job_folder, send_blocks, send_tree
from paceline.transfer.tree import Tree

T = TypeVar("T")


class OutputProvider(Protocol):
    """Gives nodes the files that the script has written."""

    async def provide(self, node: Node) -> None:
        """Gives a new node the files of earlier starts."""


class Provisioner:
    """Gives nodes what the ranks of a job need: a run folder, a fork server, code, inputs and data.

    Attributes:
        supplies: What may have to be sent to nodes; empty until it has been read.
    """

    def __init__(self, request: Request, directory: RunDirectory, screen: Screen,
                 recorder: Recorder, outputs: OutputProvider) -> None:  # fmt: skip
        self.supplies = Supplies()
        self._request, self._directory = request, directory
        self._screen, self._recorder, self._outputs = screen, recorder, outputs
        self._token = os.urandom(16).hex()

    async def start_fork_servers(self, fleet: Fleet) -> None:
        """Starts fork servers on new nodes while the code is read and the plan is made."""
        request, nodes = self._request, [node for node in fleet.everyone if not node.preparation]
        package = await asyncio.to_thread(survey.package_of, request)
        await gather_all([prepare_node(node, request, package, self._directory, self._token)
                          for node in nodes])  # fmt: skip
        if fleet.first in nodes:
            await self.send_checkpoints(fleet.first)

    async def send_checkpoints(self, first: Node) -> None:
        """Sends the checkpoints of the run directory to the node of rank 0, unless it sees them."""
        if not first.shared_run_dir:
            await send_checkpoints(
                first.channel, first.run_folder, self._directory, self._screen.note
            )

    async def send(self, plan: Plan, fleet: Fleet) -> None:
        """Sends all nodes the copies of the plan."""
        copies = {part.host: part.copies for part in (*plan.nodes, *plan.spares)}
        await self._send([(node, copies[node.name]) for node in fleet.everyone])

    async def provision(self, node: Node, fleet: Fleet) -> None:
        """Surveys a late node and gives it all that the others have. PacelineError if it cannot."""
        request = self._request
        self._recorder.event("connected", hosts=[node.name], late=True)
        await gather_all([
            survey.survey_newcomer(node, fleet, request, self.supplies),
            prepare_node(node, request, self.supplies.package, self._directory, self._token),
        ])  # fmt: skip
        assert node.survey is not None
        place = placement.place_on(request.job, node.survey, self.supplies, request.run_id)
        await self._send([(node, place.copies)])
        await fork_servers_up(fleet, [node], request.job)

    async def _send(self, copies: Sequence[tuple[Node, Sequence[Copy]]]) -> None:
        supplies = self.supplies
        await send_copies(copies, supplies, self._request, self._screen.sending)
        inputs = ((f"input{number}", tree) for number, tree in enumerate(supplies.inputs.values()))
        trees = {"code": supplies.code, "paceline": supplies.package, **dict(inputs)}
        for node, _ in copies:
            for name, tree in trees.items():
                if tree is None or name not in node.copies:
                    continue
                for target, source in tree.sources(node.copies[name][0]):
                    copy = (node.name, target, source)
                    if copy not in self._screen.shipped_copies:
                        self._screen.shipped_copies.append(copy)
                        self._recorder.event("copied", node.name, copy=target, home=source)
        await gather_all([self._outputs.provide(node) for node, _ in copies])


async def prepare_node(node: Node, request: Request, package: Tree | None, directory: RunDirectory,
                       token: str) -> None:  # fmt: skip
    """Starts the node's fork server."""
    await choose_run_folder(node, directory)
    if request.job.entry.kind == "function" and not node.shared_run_dir:
        path = directory.path / names.CALL
        await send_blocks(node.channel, path, "put_file", key=directory.key, path=names.CALL)
    await start_fork_server(node, request, package, token)


async def start_fork_server(node: Node, request: Request, package: Tree | None,
                            token: str) -> None:  # fmt: skip
    """Starts a fork server that imports what the job's ranks need.

    Args:
        package: What it gets of this installation's ``paceline``.
        token: Identifies processes of the job.
    """
    job, root = request.job, ""
    if package is not None and not await _has_package(node, job, package):
        root = await _send_package(node, package, request)
    python = planner.python_of(job, node.host)
    early, defaults = planner.early_env(job, node.host, node.facts)
    env = {**job.environment.variables(), **early}
    node.preparation = {
        "python": python,
        "activate": list(job.activate.value),
        "defaults": defaults,
        "preload": list(job.preload),
        "env": env,
        "package": root,
        "unset": list(job.environment.unset),
        "token": token,
    }
    try:
        await node.prepare()
    except AgentRefusal as refusal:
        if not refusal.answer.get("activating"):
            raise
        raise _not_activated(node, refusal, job) from None


async def _has_package(node: Node, job: Job, package: Tree) -> bool:
    """Whether a node's interpreter imports the same package, as from a shared disk."""
    if planner.python_of(job, node.host) != sys.executable:
        return False
    if node.host.local:
        return True
    # else this interpreter may have it from there, which the node's does not
    return "PYTHONPATH" not in os.environ and await _has_tree(node, str(package.root), package)


async def _has_tree(node: Node, root: str, tree: Tree) -> bool:
    difference = await node.channel.request("compare_tree", root=root, manifest=tree.manifest)
    return bool(difference["exists"] and not difference["missing"] + difference["different"])


async def _send_package(node: Node, package: Tree, request: Request) -> str:
    """Returns the folder of ``paceline`` on a node; sends it unless a warm fork server has it."""
    warm_slot = node.channel.warm_slot
    is_warm = warm_slot is not None and warm_slot.waiting is not None
    if warm_slot is None or not (is_warm or request.keep_warm_s):
        return await send_folder(node, package, "paceline", job_folder(request.run_id, node.name))
    name = f"{FOLDER_PREFIX}{warm_slot.name}"
    root = placement.copy_target(node.facts, name, "paceline")
    if is_warm and await _has_tree(node, root, package):
        return root
    return await send_folder(node, package, "paceline", name)


def _not_activated(node: Node, refusal: AgentRefusal, job: Job) -> NodeError:
    first = job.activate.value[0]
    return NodeError(
        f"{node.name}: --activate failed ({job.activate.source.label})",
        found=refusal.found,
        remedy="The file must exist on every host, or in its container. Look there: bash"
        f" -c '. {first} && env'",
    )


async def choose_run_folder(node: Node, directory: RunDirectory) -> None:
    """Sets the node's run folder: the run directory if it shares that, else one of its own."""
    options: dict[str, Any] = {
        "path": str(directory.path),
        "token_file": names.PROBE,
        "token": directory.probe_token,
        "key": directory.key,
    }
    answer = await node.channel.request("run_folder", **options)
    if answer["shared"] and not directory.pop_sign(node.channel.identity):
        answer = await node.channel.request("run_folder", **options, own=True)
    node.run_folder, node.shared_run_dir = answer["folder"], answer["shared"]


async def send_copies(wanted: Sequence[tuple[Node, Sequence[Copy]]], supplies: Supplies,
                      request: Request, progress: Progress) -> None:  # fmt: skip
    """Sends each node its copies."""
    run_id = request.run_id

    async def send(node: Node, copy: Copy) -> None:
        is_code = copy.name == "code"
        tree = supplies.code if is_code else supplies.inputs[copy.source]
        assert tree is not None
        workdir = workdir_in(tree, request.job) if is_code else ""
        root = await send_folder(node, tree, copy.name, job_folder(run_id, node.name), workdir)
        if root != copy.target:
            raise NodeError(f"{node.name} built {copy.source} in another folder than announced",
                            found=f"{root} instead of {copy.target}")  # fmt: skip

    copies = [(node, copy) for node, parts in wanted for copy in parts]
    large = {path for path, tree in supplies.inputs.items() if tree.size > LARGE_INPUT_BYTES}
    small = [pair for pair in copies if pair[1].name != "data" and pair[1].source not in large]
    await gather_all([send(*pair) for pair in small])
    for pairs in await _split_by_disk([p for p in copies if p[1].source in large], run_id):
        await gather_all([send(*pair) for pair in pairs])
    if supplies.data is not None:
        wanting = [node for node, copy in copies if copy.name == "data"]
        await send_data(wanting, supplies.data, progress)


LARGE_INPUT_BYTES = 16 << 20  # larger inputs are sent once per disk


async def _split_by_disk(
    copies: Sequence[tuple[Node, Copy]], run_id: str
) -> tuple[list[tuple[Node, Copy]], list[tuple[Node, Copy]]]:
    """Returns the first copy for each disk, and those that will find it in their cache."""
    nodes = [node for node, _ in copies]
    signs = await asyncio.gather(*(
        send_tree(node.channel, [], Path, job_folder(run_id, node.name),
                  f"seen-{node.channel.identity}")
        for node in nodes
    ))  # fmt: skip
    return _split(copies, await _on_earlier_disk(nodes, signs))


_APPEARS_S = 2.0
_MAX_APPEAR_POLLS = 30  # a network disk may show a new name late


async def send_data(nodes: Sequence[Node], folder: DataFolder, progress: Progress) -> None:
    """Completes the nodes' copies of the data, once for each disk."""
    places = {node.name: node.survey.data for node in nodes if node.survey and node.survey.data}
    signs = [place.sign for place in places.values()]
    firsts, followers = _split(nodes, await _on_earlier_disk(nodes, signs))
    sent = data.count_sent(progress, sum(places[node.name].size for node in firsts))
    await gather_all([data.send(node.channel, folder, places[node.name], sent) for node in firsts])
    await gather_all([_appears(node, folder) for node in followers])


def _split(items: Sequence[T], duplicates: Sequence[bool]) -> tuple[list[T], list[T]]:
    """Returns the items that are no duplicates, and those that are."""
    pairs = [*zip(items, duplicates, strict=True)]
    return [item for item, dup in pairs if not dup], [item for item, dup in pairs if dup]


async def _on_earlier_disk(nodes: Sequence[Node], signs: Sequence[str]) -> list[bool]:
    """Returns for each node whether it shares the disk of an earlier one, by their marks."""

    async def sees_earlier(place: int, node: Node) -> bool:
        if not place:
            return False
        answer = await node.channel.request("look", paths=signs[:place])
        return any(path["exists"] for path in answer["paths"])

    return await asyncio.gather(*(sees_earlier(at, node) for at, node in enumerate(nodes)))


async def _appears(node: Node, folder: DataFolder) -> None:
    """Waits until a node sees what another one has written to their disk."""
    for _ in range(_MAX_APPEAR_POLLS):
        place = await data.locate(node.channel, folder, needs_copy=True)
        if not place.missing:
            return
        await asyncio.sleep(_APPEARS_S)
    raise NodeError(
        f"{node.name} does not see the data that another host has written to their disk",
        found=f"{place.folder} lacks {place.missing[0][0]} there",
        remedy="Give each host a cache of its own: XDG_CACHE_HOME",
    )


def workdir_in(tree: Tree, job: Job) -> str:
    """Returns the work folder's relative path in the code, which may have no files in it."""
    workdir = Path(job.workdir)
    path = workdir.relative_to(tree.root) if workdir.is_relative_to(tree.root) else Path()
    return path.as_posix() if path.parts else ""


async def send_folder(node: Node, tree: Tree, name: str, folder: str, workdir: str = "") -> str:
    """Builds a tree on a node from its cache and what is sent; returns its path there.

    Args:
        name: Of the tree in the job's folder.
        folder: Name of the job's folder in the node's cache, see :func:`job_folder`.
        workdir: Relative path of a folder in the tree that is made even if no file is in it.
    """
    try:
        root = await send_tree(node.channel, tree.manifest, tree.file, folder, name, workdir)
    except (AgentRefusal, FileNotFoundError) as refusal:
        if changed := await asyncio.to_thread(tree.changed):
            raise NodeError(
                f"the code in {tree.root} has changed since it was read for this run, and"
                f" {node.name} has no copy of the earlier version",
                found=", ".join(changed[:5]) + (" …" if len(changed) > 5 else ""),
                remedy="Run again; keep what other programs write out of the code's folder, or "
                "out of git's sight by .gitignore",
            ) from None
        if not isinstance(refusal, AgentRefusal):
            raise
        raise _transfer_error(node, tree, refusal) from None
    node.copies[name] = (root, tree.manifest)
    return root


def _transfer_error(node: Node, tree: Tree, refusal: AgentRefusal) -> NodeError:
    cache = str(node.facts["user"].get("cache") or "~/.cache/paceline")
    remedy = f"Look there: ssh {node.host.address} ls -ld {shlex.quote(cache)}"
    if is_out_of_space(refusal.found):
        remedy = f"Make room for {(tree.size >> 20) + 1} MiB in {cache} on {node.name}"
    return NodeError(
        f"{node.name} cannot take the files of {tree.root}",
        found=refusal.found,
        remedy=f"{remedy}\nOr set XDG_CACHE_HOME on {node.name} to a folder on another disk",
    )


async def fork_servers_up(fleet: Fleet, nodes: Sequence[Node], job: Job) -> None:
    """Waits for the imports; rejects nodes on which they failed or lack the backend.

    A fork server that died in an earlier attempt is replaced by a new one.
    """
    await gather_all([node.prepare() for node in nodes if node.fork_server_died])
    for node in nodes:
        if node.ready is not None and (error := await node.ready):
            raise _no_fork_server(fleet, node, error, job)
    for node in nodes:
        backends = node.loaded.get("backends")
        if job.backend and backends is not None and job.backend not in backends:
            raise _no_backend(node, job.backend, backends)


def _no_fork_server(fleet: Fleet, node: Node, error: ForkServerError, job: Job) -> NodeError:
    if error.kind == "lost":
        return startup_loss(fleet, node, error.text)
    modules = ", ".join(module for module in job.preload if not module.endswith("?"))
    python = planner.python_of(job, node.host)
    if error.kind == "died":
        text = f"{error.text} while starting"
        return NodeError(f"{node.name} could not start its ranks", found=text)
    output = "\n".join(error.text.strip().splitlines()[-8:])
    remedy = f"Look there: {python} -c 'import {modules}'"
    # what the parts of Paceline need that were sent
    if missing := re.search(r"No module named '(numpy|psutil|safetensors)\b", error.text):
        remedy = f"On {node.name}: {shlex.quote(python)} -m pip install {missing[1]}"
    pythons = {peer.name: str(peer.facts["python"]["version"]) for peer in fleet.nodes}
    for difference in agreement.differences("Python", pythons):  # built for another one
        output += f"\n{difference}"
    if variables := agreement.loader_variables(node.facts):
        output += f"\nthe login on {node.name} sets {variables}"
        remedy += "\nIf one of these variables is the cause, hide it from the job: --unset NAME"
    return NodeError(f"{node.name} cannot import {modules}", found=output, remedy=remedy)


def _no_backend(node: Node, backend: str, backends: Sequence[str]) -> NodeError:
    alternative = backends[0] if backends else "gloo"
    return NodeError(
        f"backend {backend} was asked for, but torch on {node.name} was built without it",
        found=f"torch {node.loaded.get('torch')} there has: {', '.join(backends)}",
        remedy=f"--backend {alternative}, or install a torch with {backend}",
    )
