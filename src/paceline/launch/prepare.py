"""From a job to its plan: connects, looks at the nodes, has them try each other, and decides.

Nothing is sent or started in here but the agents, so ``--plan`` and a run come to the same value.
What follows from the nodes' tries of each other is decided in ``remote.network``.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.launch import decide, muster
from paceline.launch.decide import Found, Supplies
from paceline.launch.fleet import Fleet, Node, together
from paceline.launch.outset import trains
from paceline.remote import connectivity, interfaces, network
from paceline.remote.channel import AgentRefusal
from paceline.remote.transport import Reached, Transport, nobody
from paceline.spec.errors import NodeError, PacelineError, SettingError
from paceline.spec.events import Event
from paceline.spec.hosts import Host
from paceline.spec.job import Job
from paceline.spec.nodes import NodeRange, bounds
from paceline.spec.plan import Plan
from paceline.spec.settings import Setting, Source
from paceline.transfer import data
from paceline.transfer.data import DataPlace, Folder
from paceline.transfer.tree import Tree, keep, project_root, read_parts, read_tree

# hosts, facts by host, what start-up files printed by host -> notes for the user
Inspect = Callable[[Sequence[Host], Mapping[str, Any], Mapping[str, str]], list[str]]
# whether a job needs this installation's package: all of it, or these parts of it
Package = bool | tuple[str, ...]
Networks = dict[str, network.NodeNetwork]

# of the package, all that a recipe needs in a rank
OF_RECIPES = ("__init__.py", "program.py", "progress.py", "py.typed", "recipes", "spec", "train",
              "agent/__init__.py", "agent/peers.py")  # fmt: skip
DYING_S = 2.0  # who holds a port and cannot be named: the kernel is ending it, or a stranger
BACK_S = 30.0  # for a host that is needed and was lost before the first step
LEAVING_S = 5.0  # an agent without launcher and its ranks are gone by then


@dataclass(frozen=True, slots=True)
class Request:
    """What is to run, and where.

    Attributes:
        job: What to run.
        hosts: Where; rank 0 on the first.
        transport: How the agents are started and spoken to.
        package: Send this installation's ``paceline`` to the nodes (recipes need it), or parts.
        notes: What was decided before and the user should know.
        inspect: Looks at the nodes' facts; returns further notes or raises PacelineError.
        planned: Was made before and is to be executed, if the nodes are still what it says.
        keep_warm_s: How long the hosts stay ready for the next command after this one, at least,
            in seconds.
        supplies: What may have to be sent to the nodes, where that was read before.
        run_id: Names the run.
        among: Names of all hosts that were described, where ``hosts`` were chosen among them.
    """

    job: Job
    hosts: tuple[Host, ...]
    transport: Transport
    package: Package = False
    notes: tuple[str, ...] = ()
    inspect: Inspect | None = None
    planned: Plan | None = None
    keep_warm_s: float = 0.0
    supplies: Supplies | None = None
    run_id: str = field(default_factory=lambda: secrets.token_hex(6))
    among: tuple[str, ...] = ()

    @property
    def least(self) -> int:
        """Nodes without which the job does not run."""
        return bounds(self.job.nnodes.value, len(self.hosts))[0]

    @property
    def most(self) -> int:
        """Nodes that get ranks, at most."""
        return bounds(self.job.nnodes.value, len(self.hosts))[1]

    @property
    def elastic(self) -> bool:
        """Whether nodes may go and come while the job runs."""
        return isinstance(self.job.nnodes.value, NodeRange) and self.transport.redials

    @property
    def waits(self) -> bool:
        """Whether hosts that do not answer at the start are waited for."""
        asked = self.job.wait_for_nodes_s.source is not Source.DEFAULT
        return self.elastic or (asked and self.transport.redials)

    @property
    def patience_s(self) -> float:
        """For hosts that are needed, until the first step; who does not wait sees them come back.

        In seconds.
        """
        asked_s = self.job.wait_for_nodes_s.value
        return asked_s if self.waits else min(asked_s, BACK_S)

    def least_again(self, session: bool) -> int:
        """Nodes without which the job does not begin again, once some were lost."""
        return min(self.least, decide.least_nodes(self.job)) if session else self.least

    @property
    def begins_again(self) -> bool:
        """Whether a loss before the first step may be followed by another start.

        Who has written ``--max-restarts 0`` wants none.
        """
        allowed = self.job.max_restarts
        return allowed.value > 0 or allowed.source is Source.DEFAULT


async def connect(request: Request, on_event: Callable[[Node, Event], None],
                  on_lost: Callable[[Node, str], None], reached: Reached = nobody,
                  note: Callable[[str], None] | None = None, again: bool = False,
                  later: list[muster.Dialling] | None = None,
                  waits: muster.Waits = muster.unseen,
                  ) -> tuple[Fleet, dict[str, str]]:  # fmt: skip
    """Has an agent started on every host, or on enough of them where the job can do with fewer.

    Args:
        request: What is to run, and where.
        on_event, on_lost: Of the fleet.
        reached: Told how many hosts have an agent by now.
        note: Tells the user that hosts are waited for; ``None`` waits for none.
        again: Somebody was lost since the first time: also a session goes on with fewer then.
        later: Gets the calls of hosts that are not waited for, which go on; ``None`` ends them.
        waits: Told that too few are there and others are waited for.

    Returns:
        The nodes that are there, and why the others are not, by host.
    """
    job, hosts = request.job, request.hosts
    pythons = [decide.python_of(job, host) for host in hosts]
    missing: dict[str, str] = {}
    if request.waits or again:
        least = request.least_again(trains(job)) if again else request.least
        patience_s = request.patience_s if note else 0.0
        channels, missing = await muster.gather(
            request.transport,
            hosts,
            pythons,
            least,
            patience_s,
            note or _nobody,
            reached,
            later,
            waits,
        )
    else:
        channels = await request.transport.open(hosts, pythons, reached)
    fleet = Fleet(channels, job.lease_s.value, on_event, on_lost)
    fleet.seat(fleet.nodes[: request.most])
    return fleet, missing


def _nobody(text: str) -> None:
    """Is told what nobody waits for."""


def approve(request: Request, fleet: Fleet, inspect: Inspect | None) -> list[str]:
    """Refuses nodes that cannot train together; the notes of the plan so far."""
    noise = {node.name: node.channel.noise for node in fleet.everyone}
    notes = [*request.notes, *check_nodes(fleet, request.job)]
    return notes + (inspect(fleet.hosts, fleet.facts(), noise) if inspect else [])


def check_nodes(fleet: Fleet, job: Job) -> list[str]:
    """Refuses nodes that cannot train together; notes what merely differs."""
    chosen = {node.name: node.channel.chosen_python for node in fleet.everyone}
    notes = decide.check_agreement(fleet.hosts, job, fleet.facts(), chosen)
    noisy = [node.name for node in fleet.everyone if node.channel.noise.strip()]
    return notes + [f"the shell start-up files of {name} print text: ignored" for name in noisy]


async def prepare(request: Request, fleet: Fleet, supplies: Awaitable[Supplies],
                  notes: Sequence[str]) -> Plan:  # fmt: skip
    """Finds out what the plan depends on, and makes it.

    Args:
        request: What is to run.
        fleet: The connected nodes.
        supplies: What may have to be sent to them; it takes a while to read.
        notes: What was decided before.

    Raises:
        PacelineError: The job cannot run there, or not as it was planned.
    """
    job, planned = request.job, request.planned
    (networks, more), read = await together(
        [find_networks(fleet, job, len(request.hosts)), _look(fleet.everyone, job, supplies)]
    )
    for node in fleet.everyone:
        assert node.found is not None
        node.found = replace(node.found, network=networks[node.name])
    asked = planned.settings["master_port"] if planned else job.master_port
    port = await hold_port(fleet.first, networks[fleet.first.name].address, asked)
    plan = plan_of(request, fleet, read, port, [*notes, *more])
    return decide.confirmed(planned, plan) if planned else plan


def plan_of(request: Request, fleet: Fleet, supplies: Supplies, port: Setting[int],
            notes: Sequence[str], attempt: int = 0) -> Plan:  # fmt: skip
    """The plan for the fleet's nodes, of which all is known."""
    found, spares = ([node.found for node in nodes if node.found is not None]
                     for nodes in (fleet.nodes, fleet.spares))  # fmt: skip
    plan = decide.make_plan(
        request.job, request.run_id, found, supplies, port, notes, attempt, spares
    )
    dialects = (*request.transport.dialects, *plan.dialects)
    return replace(plan, dialects=dialects, hosts=names_of(request, fleet.hosts))


def names_of(request: Request, there: Sequence[Host]) -> tuple[str, ...]:
    """Of all hosts on which the job may run; none where nobody knows them yet.

    Args:
        request: What is to run, and where.
        there: Hosts that are connected.
    """
    if request.among:
        return request.among
    came, meant = ([host.name for host in hosts] for hosts in (there, request.hosts))
    if set(meant).issuperset(came):
        return tuple(meant)
    # Nobody knew who would come: what is described stands for places.
    return tuple(came) if len(came) == len(meant) else ()


async def get_to_know(node: Node, fleet: Fleet, request: Request, supplies: Supplies) -> None:
    """Finds out about a node that came late what a plan needs to know of it.

    Its addresses are tried from and to all nodes that are there; they keep theirs where they can.

    Raises:
        PacelineError: It cannot train together with them.
    """
    async with fleet.trying:  # else one would end the listeners that another one's tries are for
        while True:
            others = [o for o in fleet.everyone if o is not node and o.found and not o.lost]
            try:
                await _try_with(others, node, request, supplies)
            except (ConnectionError, PacelineError):
                await fleet.doubts_settled()  # who does not answer may be lost in a moment
                if node.lost or not any(one.lost for one in others):
                    raise  # else it is tried with those that are left: it has begun to import
            else:
                return


async def _try_with(others: Sequence[Node], node: Node, request: Request,
                    supplies: Supplies) -> None:  # fmt: skip
    every = [*others, node]
    hosts, facts = [one.host for one in every], {one.name: one.facts for one in every}
    chosen = {one.name: one.channel.chosen_python for one in every}
    decide.check_agreement(hosts, request.job, facts, chosen)

    async def known() -> Supplies:
        return supplies

    found, _ = network.candidates(hosts, facts, request.job.interface.value)
    tried, _ = await together([
        connectivity.try_addresses([one.channel for one in every], found, together),
        _look([node], request.job, known()),
    ])  # fmt: skip
    kept = {
        one.name: [c for c in found[one.name] if one is node or c.address == _address(one)]
        for one in every
    }
    if not others:
        networks = {node.name: network.only_choice(found[node.name], fixed=False)}
    else:
        try:
            networks, _ = network.decide(hosts, kept, tried)
        except NodeError:
            networks, _ = network.decide(hosts, found, tried)
    for one in every:
        assert one.found is not None
        one.found = replace(one.found, network=networks[one.name])


def _address(node: Node) -> str:
    return node.found.network.address if node.found else ""


async def make_plan(request: Request) -> Plan:
    """What a run would execute; the nodes are let go."""
    fleet, missing = await connect(request, lambda node, event: None, lambda node, why: None)
    try:
        with lost_nodes_named(fleet):
            notes = approve(request, fleet, request.inspect)
            notes += [f"{host} is missing: {why or 'no answer'}" for host, why in missing.items()]
            supplies = asyncio.to_thread(read_supplies, request)
            return await prepare(request, fleet, supplies, notes)
    finally:
        await fleet.close()
        await request.transport.close(0)


@contextlib.contextmanager
def lost_nodes_named(fleet: Fleet) -> Iterator[None]:
    """Turns the end of a connection before ranks run into an error that names the host."""
    try:
        yield
    except ConnectionError as error:
        lost = next((node for node in fleet.everyone if node.lost), fleet.first)
        raise went_away(fleet, lost, lost.why or str(error)) from None


def went_away(fleet: Fleet, node: Node, why: str) -> NodeError:
    """A host was lost before its ranks ran: its own doing, unless it was this launcher's."""
    name = node.name
    if ours := fleet.own_fault(node):
        return NodeError(
            f"{ours}; that was while the nodes were starting",
            found=f"{name}: {why}",
            remedy="Run again; --lease SECONDS is how long nodes wait for this launcher",
        )
    return NodeError(
        f"{name} went away while starting",
        found=why,
        remedy=f"See that {name} is on and can be reached (paceline check), and run again",
    )


# --- the code


def read_supplies(request: Request) -> Supplies:
    """Reads what the nodes may need. Blocking: call it in a thread."""
    if request.supplies is not None:
        return request.supplies
    job, package = request.job, request.package
    remote = any(not host.local for host in request.hosts)
    program = (job.entry.kind, job.ship.value) in (("binary", "auto"), ("function", "never"))
    needs_code = remote and not program and not package
    return Supplies(
        code=read_tree(project_root(job)) if needs_code else None,
        package=package_tree(OF_RECIPES if package is True else package) if package else None,
        inputs={i.path: read_parts(Path(i.path), i.parts) for i in job.inputs} if remote else {},
        data=Folder(Path(job.data.path), socket.gethostname()) if job.data and remote else None,
    )


def read_and_keep(request: Request) -> Supplies:
    """The same for a run: whatever is edited from now on, all nodes get the code as it is now."""
    supplies = read_supplies(request)
    if supplies.code is None or supplies.code.copy is not None:
        return supplies
    return replace(supplies, code=keep(supplies.code))


def package_tree(parts: Package) -> Tree:
    """This installation's package, or parts of it, for interpreters that do not have it."""
    import paceline

    folder = Path(paceline.__file__).parent
    inner = read_tree(folder, () if isinstance(parts, bool) else parts)
    manifest = [[f"paceline/{entry[0]}", *entry[1:]] for entry in inner.manifest]
    return Tree(folder.parent, manifest)


async def _look(nodes: Sequence[Node], job: Job, supplies: Awaitable[Supplies]) -> Supplies:
    """What can be sent; notes of each node how the code differs there, and what else is there."""
    # who gives up waiting does not give up the reading
    read = await asyncio.shield(supplies)

    async def look(node: Node) -> None:
        differs = await _compare(node, job, read.code)
        there = await _has_workdir(node, job, read.code)
        place = await _find_data(node, job, read.data)
        node.found = Found(node.host, node.facts, network.LOOPBACK, differs, there, place)

    await together([look(node) for node in nodes])
    return read


async def _find_data(node: Node, job: Job, folder: Folder | None) -> DataPlace | None:
    if folder is None or node.host.local:
        return None
    try:
        node.data = await data.look(node.channel, folder, always=job.ship.value == "always")
    except AgentRefusal as refusal:
        raise NodeError(
            f"{node.name} cannot look for the data in {folder.root}", found=refusal.found
        ) from None
    except OSError as error:
        raise data.unreadable(folder, error) from None
    return node.data


async def _compare(node: Node, job: Job, tree: Tree | None) -> Mapping[str, Any] | None:
    if tree is None or node.host.local or job.ship.value == "always":
        return None
    root = decide.code_root(node.host, tree)
    found = await node.channel.request("compare_tree", root=root, manifest=tree.manifest)
    if found["exists"] and await _changed_alike(node, tree, root, found):
        return {**found, "missing": [], "different": []}
    return found


async def _changed_alike(node: Node, tree: Tree, root: str, found: Mapping[str, Any]) -> bool:
    """Whether what differs there has changed here in the same way since it was read.

    So it is in a folder that both see, where somebody takes notes, or a program writes its log:
    a file that changes while it is looked at is passed over.
    """
    differing, own = {*found["different"], *found["missing"]}, tree.copy is None
    if not (own and differing):
        return False
    now = await asyncio.to_thread(tree.as_now, differing)
    if any(entry in tree.manifest for entry in now.values()):
        return False
    gone = {path for path, entry in now.items() if entry is None}
    there = [entry for entry in now.values() if entry is not None]
    again = await node.channel.request("compare_tree", root=root, manifest=there)
    apart = [*again["different"], *again["missing"]]
    later = await asyncio.to_thread(tree.as_now, apart)
    return gone <= {*found["missing"]} and all(later[path] != now[path] for path in apart)


async def _has_workdir(node: Node, job: Job, tree: Tree | None) -> bool:
    wanted = decide.workdir_without_code(job, node.host, tree)
    if wanted is None:
        return True
    answer = await node.channel.request("look", paths=[wanted])
    return bool(answer["paths"][0]["exists"])


# --- the network


async def find_networks(fleet: Fleet, job: Job, hosts_in_all: int) -> tuple[Networks, list[str]]:
    """Address and interface of every node, and what the user should know about the choice.

    Args:
        fleet: The nodes that are there.
        job: What is asked for.
        hosts_in_all: How many there may be at any time.
    """
    alike = [host for host in fleet.hosts if not host.env]
    for hosts in (alike, *([host] for host in fleet.hosts if host.env)):
        if hosts:
            interfaces.refuse_absent(hosts, fleet.facts(), decide.given(job, hosts[0]))
    only, interface = fleet.first, job.interface.value
    fixed = interface or only.host.interface or only.host.job_address
    if len(fleet.everyone) == 1 and not fixed and hosts_in_all == 1:  # and stays alone
        return {only.name: network.LOOPBACK}, []
    found, notes = network.candidates(fleet.hosts, fleet.facts(), interface)
    if len(fleet.everyone) == 1 and not found[only.name]:
        return {only.name: network.LOOPBACK}, []
    if len(fleet.everyone) == 1:
        return {only.name: network.only_choice(found[only.name], bool(fixed))}, notes
    channels = fleet.channels
    tried = await connectivity.try_addresses(channels, found, together)
    networks, more = network.decide(fleet.hosts, found, tried)
    return networks, notes + more


async def hold_port(first: Node, address: str, asked: Setting[int]) -> Setting[int]:
    """A port for the store on the first node, held by its agent until the store takes it."""
    began = time.monotonic()
    while True:
        try:
            answer = await first.channel.request("reserve_port", address=address, port=asked.value)
        except AgentRefusal as refusal:
            if time.monotonic() > began + _patience_with(refusal):
                raise _port_taken(first.name, address, asked, refusal) from None
            await asyncio.sleep(0.2)
        else:
            break
    if asked.value:
        return asked
    return Setting(int(answer["port"]), Source.FOUND, f"free on {first.name}, held")


def _patience_with(refusal: AgentRefusal) -> float:
    """Seconds for which who holds a port may still be on the way out."""
    commands = [command for _, command in refusal.answer.get("holders") or []]
    if not commands:
        return DYING_S
    # perhaps a job of ours whose launcher was killed, and which is leaving
    return LEAVING_S if any("/paceline/agent/" in command for command in commands) else 0.0


def _port_taken(
    name: str, address: str, asked: Setting[int], refusal: AgentRefusal
) -> SettingError:
    holders = refusal.answer.get("holders") or []
    who = ", ".join(f"process {pid} ({command})" for pid, command in holders)
    planned = asked.source is Source.FOUND
    why = "was planned" if planned else f"was asked for ({asked.source.label})"
    return SettingError(
        f"port {asked.value} on {name} ({address}) {why}",
        found=refusal.found + (f": held by {who}" if who else ""),
        remedy="Prepare again, for a free one"
        if planned
        else "Leave --master-port out to get a free one, or end that process",
        exit_code=1,
    )
