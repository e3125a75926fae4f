"""Surveys the nodes for a plan: code, data, work folders and networks.

Nothing is sent or started here, so that ``--plan`` and a run make the same plan. Networks are
chosen in ``remote.network``.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Awaitable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.launch.nodes.fleet import Fleet, Node
from paceline.launch.planning import placement, planner
from paceline.launch.planning.placement import HostSurvey, Supplies
from paceline.launch.planning.request import Package, Request
from paceline.remote import connectivity, interfaces, network
from paceline.remote.channel import AgentRefusal
from paceline.remote.fanout import gather_all
from paceline.spec import version
from paceline.spec.errors import NodeError, PacelineError, SettingError
from paceline.spec.hosts import Host, Inspect
from paceline.spec.job import Job
from paceline.spec.plan import Plan
from paceline.spec.settings import Setting, Source
from paceline.transfer import data
from paceline.transfer.data import DataFolder, DataPlace
from paceline.transfer.tree import (
    CodeTooLarge,
    Tree,
    cache_files,
    is_no_project,
    names_code,
    project_root,
    read_code,
    read_parts,
)

Networks = dict[str, network.NodeNetwork]

# of the package, all that a script on paceline.train needs in a rank, and a recipe
OF_TRAIN = (
    *("__init__.py", "program.py", "progress.py", "py.typed", "spec", "train"),
    *("agent/__init__.py", "agent/reconnection.py", "agent/ranks/__init__.py"),
    *("agent/ranks/checksum.py", "agent/ranks/peer_filters.py", "agent/ranks/tunnels.py"),
)
OF_RECIPES = (*OF_TRAIN, "recipes")
PORT_RELEASE_S = 2.0  # for an unknown holder of a port, which may be ending
AGENT_EXIT_S = 5.0  # for an agent without launcher and its ranks to end


def approve(request: Request, fleet: Fleet, inspect: Inspect | None) -> list[str]:
    """Rejects nodes that cannot train together; returns the notes of the plan so far."""
    noise = {node.name: node.channel.noise for node in fleet.everyone}
    interpreters = {node.name: node.channel.agent_python for node in fleet.everyone}
    differences = planner.check_agreement(fleet.hosts, request.job, fleet.facts(), interpreters)
    noisy = [f"the shell start-up files of {name} print text: ignored"
             for name, text in noise.items() if text.strip()]  # fmt: skip
    inspected = inspect(fleet.hosts, fleet.facts(), noise) if inspect else []
    return [*request.notes, *differences, *noisy, *inspected]


async def prepare(request: Request, fleet: Fleet, supplies: Awaitable[Supplies],
                  notes: Sequence[str]) -> Plan:  # fmt: skip
    """Surveys the nodes and makes the plan, with further notes.

    Raises PacelineError if the job cannot run there, or not as it was planned.
    """
    job, planned = request.job, request.planned
    (networks, network_notes), read = await gather_all(
        [
            choose_networks(fleet, job, len(request.hosts)),
            _survey_files(fleet.everyone, job, supplies),
        ]
    )
    for node in fleet.everyone:
        assert node.survey is not None
        node.survey = replace(node.survey, network=networks[node.name])
    port_setting = planned.settings["master_port"] if planned else job.master_port
    port = await hold_port(fleet.first, networks[fleet.first.name].address, port_setting)
    plan = plan_of(request, fleet, read, port, [*notes, *network_notes])
    return planner.confirmed(planned, plan) if planned else plan


def plan_of(request: Request, fleet: Fleet, supplies: Supplies, port: Setting[int],
            notes: Sequence[str]) -> Plan:  # fmt: skip
    """Returns the plan for the surveyed nodes of the fleet."""
    surveyed, spares = ([node.survey for node in nodes if node.survey is not None]
                     for nodes in (fleet.nodes, fleet.spares))  # fmt: skip
    plan = planner.make_plan(request.job, request.run_id, surveyed, supplies, port, notes, spares)
    dialects = (*request.transport.dialects, *plan.dialects)
    return replace(plan, dialects=dialects, hosts=host_names(request, fleet.hosts))


def host_names(request: Request, connected: Sequence[Host]) -> tuple[str, ...]:
    """Returns the names of all hosts on which the job may run; empty if unknown."""
    if request.among:
        return request.among
    names, requested = tuple(h.name for h in connected), tuple(h.name for h in request.hosts)
    if set(requested).issuperset(names):
        return requested
    # The descriptions stand for places whose hosts were not known.
    return names if len(names) == len(requested) else ()


async def survey_newcomer(node: Node, fleet: Fleet, request: Request, supplies: Supplies) -> None:
    """Surveys a node that connected late; PacelineError if it cannot train with the others.

    Its addresses are probed from and to all other nodes, which keep theirs if possible.
    """
    async with fleet.probe_lock:  # probes share listeners
        while True:
            peers = [o for o in fleet.everyone if o is not node and o.survey and not o.lost]
            try:
                await _survey_with_peers(peers, node, request, supplies)
            except (ConnectionError, PacelineError):
                await fleet.silences_resolved()  # a silent peer may be lost
                if node.lost or not any(peer.lost for peer in peers):
                    raise
            else:
                return


async def _survey_with_peers(peers: Sequence[Node], node: Node, request: Request,
                      supplies: Supplies) -> None:  # fmt: skip
    """Surveys a node, and chooses the networks of all; NodeError if they cannot train together."""
    members = [*peers, node]
    hosts = [member.host for member in members]
    facts = {member.name: member.facts for member in members}
    interpreters = {member.name: member.channel.agent_python for member in members}
    planner.check_agreement(hosts, request.job, facts, interpreters)

    async def get_supplies() -> Supplies:
        return supplies

    candidates, _ = network.candidates(hosts, facts, request.job.interface.value)
    attempts, _ = await gather_all([
        connectivity.probe_addresses([member.channel for member in members], candidates),
        _survey_files([node], request.job, get_supplies()),
    ])  # fmt: skip
    unchanged = dict(candidates)
    for peer in peers:
        unchanged[peer.name] = [c for c in candidates[peer.name] if c.address == _address(peer)]
    if not peers:
        networks = {node.name: network.single_choice(candidates[node.name], fixed=False)}
    else:
        try:
            networks, _ = network.decide(hosts, unchanged, attempts)
        except NodeError:
            networks, _ = network.decide(hosts, candidates, attempts)
    for member in members:
        assert member.survey is not None
        member.survey = replace(member.survey, network=networks[member.name])


def _address(node: Node) -> str:
    return node.survey.network.address if node.survey else ""


@contextlib.contextmanager
def naming_lost_nodes(fleet: Fleet) -> Iterator[None]:
    """Turns the end of a connection before ranks run into an error that names the host."""
    try:
        yield
    except ConnectionError as error:
        lost = next((node for node in fleet.everyone if node.lost), fleet.first)
        raise startup_loss(fleet, lost, lost.loss_reason or str(error)) from None


def startup_loss(fleet: Fleet, node: Node, reason: str) -> NodeError:
    """Returns the error for a host that was lost before its ranks ran."""
    name = node.name
    if cause := fleet.launcher_fault(node):
        return NodeError(
            f"{cause}; that was while the nodes were starting",
            found=f"{name}: {reason}",
            remedy="Run again; --lease SECONDS is how long nodes wait for this launcher",
        )
    return NodeError(
        f"{name} went away while starting",
        found=reason,
        remedy=f"Check that {name} is on and can be reached (paceline check), and run again",
    )


# --- the code


def read_supplies(request: Request, outputs: Collection[str] = ()) -> Supplies:
    """Reads what the nodes may need. Blocking: call it in a thread.

    ``outputs``: files that the script wrote in earlier starts, which are no code.
    """
    if request.supplies is not None:
        return request.supplies
    job, package = request.job, request.package
    remote = any(not host.local for host in request.hosts)
    needs_code = remote and not package and _needs_code(job)
    needs_folder = remote and not package and job.entry.kind == "binary"
    return Supplies(
        code=_read_code(job, outputs) if needs_code else _no_code(job) if needs_folder else None,
        package=package_of(request),
        inputs={i.path: read_parts(Path(i.path), i.parts) for i in job.inputs} if remote else {},
        data=DataFolder(Path(job.data.path), socket.gethostname()) if job.data and remote else None,
    )


def _needs_code(job: Job) -> bool:
    """Whether hosts need the project: not for a program that has nothing to do with it."""
    if job.entry.kind == "binary" and job.ship.value == "auto":
        return names_code(job)
    return (job.entry.kind, job.ship.value) != ("function", "never")


def scripts_project(request: Request) -> Path | None:
    """The folder of the user's script; ``None`` for recipes, programs, and on other machines.

    Home folders are no projects: it would take long to list their files.
    """
    is_here = request.supplies is None and not request.package
    if not is_here or request.job.entry.kind not in ("script", "module"):
        return None
    root = project_root(request.job)
    return None if is_no_project(root) else root


def _read_code(job: Job, outputs: Collection[str]) -> Tree:
    """Reads the job's code; with ``--ship never``, code that is too large is not compared."""
    try:
        return read_code(job, outputs)
    except CodeTooLarge:
        if job.ship.value != "never":
            raise
        return Tree(project_root(job), [])


def _no_code(job: Job) -> Tree | None:
    """Returns the project without files, for a program that needs none but may write some."""
    root = project_root(job)
    return None if is_no_project(root) else Tree(root, [])


def read_and_cache_supplies(request: Request, outputs: Collection[str] = ()) -> Supplies:
    """Reads the supplies and caches the code, so that later edits do not reach the nodes."""
    supplies = read_supplies(request, outputs)
    if supplies.code is None or supplies.code.copy is not None:
        return supplies
    return replace(supplies, code=cache_files(supplies.code))


def package_of(request: Request) -> Tree | None:
    """Returns what the nodes get of this installation's package. Blocking."""
    if request.supplies is not None:
        return request.supplies.package
    if not request.needs_package:
        return None
    if request.package is True:
        return package_tree(OF_RECIPES)
    # a script may import anything of it
    return package_tree(request.job.trains or request.package or OF_TRAIN)


def package_tree(parts: Package) -> Tree:
    """Returns this installation's package, or parts of it, whether git tracks it or ignores it."""
    folder = Path(version.__file__).parents[1]
    inner = read_parts(folder, () if isinstance(parts, bool) else parts)
    manifest = [[f"paceline/{entry[0]}", *entry[1:]] for entry in inner.manifest]
    return Tree(folder.parent, manifest)


async def _survey_files(nodes: Sequence[Node], job: Job, supplies: Awaitable[Supplies]) -> Supplies:
    """Surveys code, work folder and data of each node; returns the supplies."""
    read = await asyncio.shield(supplies)

    async def inspect(node: Node) -> None:
        difference, has_workdir = await gather_all(
            [_compare(node, job, read.code), _has_workdir(node, job, read.code)]
        )
        place = await _locate_data(node, job, read.data)
        node.survey = HostSurvey(
            node.host, node.facts, network.LOOPBACK, difference, has_workdir, place
        )

    await gather_all([inspect(node) for node in nodes])
    return read


async def _locate_data(node: Node, job: Job, folder: DataFolder | None) -> DataPlace | None:
    if folder is None or node.host.local:
        return None
    try:
        return await data.locate(node.channel, folder, needs_copy=job.ship.value == "always")
    except AgentRefusal as refusal:
        raise NodeError(
            f"{node.name} cannot look for the data in {folder.root}", found=refusal.found
        ) from None
    except OSError as error:
        raise data.unreadable(folder, error) from None


async def _compare(node: Node, job: Job, tree: Tree | None) -> Mapping[str, Any] | None:
    is_compared = job.ship.value != "always" and not placement.needs_no_code(job, tree)
    if tree is None or node.host.local or not is_compared:
        return None
    root = placement.code_root(node.host, tree)
    difference = await node.channel.request("compare_tree", root=root, manifest=tree.manifest)
    if difference["exists"] and await _changed_equally(node, tree, root, difference):
        return {**difference, "missing": [], "different": []}
    return difference


async def _changed_equally(
    node: Node, tree: Tree, root: str, difference: Mapping[str, Any]
) -> bool:
    """Returns whether files that differ there have changed equally here since they were read.

    So it is in a shared folder in which a program writes its log. A file that changes during the
    comparison does not count.
    """
    differing, is_original = {*difference["different"], *difference["missing"]}, tree.copy is None
    if not (is_original and differing):
        return False
    current = await asyncio.to_thread(tree.current_entries, differing)
    if any(entry in tree.manifest for entry in current.values()):
        return False
    deleted = {path for path, entry in current.items() if entry is None}
    entries = [entry for entry in current.values() if entry is not None]
    comparison = await node.channel.request("compare_tree", root=root, manifest=entries)
    unequal = [*comparison["different"], *comparison["missing"]]
    updated = await asyncio.to_thread(tree.current_entries, unequal)
    return deleted <= {*difference["missing"]} and all(
        updated[path] != current[path] for path in unequal
    )


async def _has_workdir(node: Node, job: Job, tree: Tree | None) -> bool:
    workdir = placement.required_workdir(job, node.host, tree)
    if workdir is None:
        return True
    answer = await node.channel.request("look", paths=[workdir])
    return bool(answer["paths"][0]["exists"])


# --- the network


async def choose_networks(fleet: Fleet, job: Job, max_hosts: int) -> tuple[Networks, list[str]]:
    """Chooses address and interface of every node; returns them with notes on the choice.

    ``max_hosts`` is how many nodes there may be at any time.
    """
    uniform = [host for host in fleet.hosts if not host.env]
    for hosts in (uniform, *([host] for host in fleet.hosts if host.env)):
        if hosts:
            interfaces.validate_variables(hosts, fleet.facts(), planner.user_env(job, hosts[0]))
    only, interface = fleet.first, job.interface.value
    fixed = interface or only.host.interface or only.host.job_address
    if len(fleet.everyone) == 1 and not fixed and max_hosts == 1:  # and stays alone
        return {only.name: network.LOOPBACK}, []
    candidates, notes = network.candidates(fleet.hosts, fleet.facts(), interface)
    if len(fleet.everyone) == 1 and not candidates[only.name]:
        return {only.name: network.LOOPBACK}, []
    if len(fleet.everyone) == 1:
        return {only.name: network.single_choice(candidates[only.name], bool(fixed))}, notes
    channels = fleet.channels
    attempts = await connectivity.probe_addresses(channels, candidates)
    networks, decision_notes = network.decide(fleet.hosts, candidates, attempts)
    return networks, notes + decision_notes


async def hold_port(first: Node, address: str, setting: Setting[int]) -> Setting[int]:
    """Reserves a port for the store on the first node, held by its agent until then."""
    started_at = time.monotonic()
    while True:
        try:
            answer = await first.channel.request("reserve_port", address=address,
                                                 port=setting.value)  # fmt: skip
        except AgentRefusal as refusal:
            if time.monotonic() > started_at + _port_wait_s(refusal):
                raise _port_error(first.name, address, setting, refusal) from None
            await asyncio.sleep(0.2)
        else:
            break
    if setting.value:
        return setting
    return Setting(int(answer["port"]), Source.FOUND, f"free on {first.name}, held")


def _port_wait_s(refusal: AgentRefusal) -> float:
    """Returns for how many seconds to wait until a port that is in use may be free."""
    commands = [command for _, command in refusal.answer.get("holders") or []]
    if not commands:
        return PORT_RELEASE_S
    # An agent whose launcher was killed may be leaving.
    return AGENT_EXIT_S if any("/paceline/agent/" in command for command in commands) else 0.0


def _port_error(
    name: str, address: str, setting: Setting[int], refusal: AgentRefusal
) -> SettingError:
    holders = refusal.answer.get("holders") or []
    holder_names = ", ".join(f"process {pid} ({command})" for pid, command in holders)
    planned = setting.source is Source.FOUND
    reason = "was planned" if planned else f"was asked for ({setting.source.label})"
    return SettingError(
        f"port {setting.value} on {name} ({address}) {reason}",
        found=refusal.found + (f": held by {holder_names}" if holder_names else ""),
        remedy="Prepare again, for a free one"
        if planned
        else "Leave --master-port out to get a free one, or end that process",
        exit_code=1,
    )
