"""Recovery in place: feeds events to :class:`Members` and carries out its decisions.

:class:`RankCommands` sends the commands to agents and ranks.
"""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from paceline.launch.elastic.encryption import JobEncryption
from paceline.launch.elastic.members import Members
from paceline.launch.elastic.rank_events import EARLY_EXIT
from paceline.launch.elastic.rank_states import (
    Action,
    Dial,
    End,
    ExcludeHost,
    Fail,
    Kill,
    Prepare,
    Regroup,
    Start,
    Stop,
    Wait,
)
from paceline.launch.elastic.recovery_report import RecoveryReport, describe_exclusion, listed
from paceline.launch.nodes.connect import RELEASED_REDIAL_S, Reconnector
from paceline.launch.nodes.fleet import Fleet, Node, try_request
from paceline.launch.recorder import Recorder
from paceline.launch.terminal.run_state import NodeWait
from paceline.launch.terminal.screen import Screen
from paceline.spec import jobenv
from paceline.spec.errors import NodeError, PacelineError, PermanentConnectError
from paceline.spec.events import Event
from paceline.spec.failure import Failure, format_location, unreachable_peer
from paceline.spec.formatting import pluralize
from paceline.spec.job import Job
from paceline.spec.plan import NodePlan, Plan, entry_json

REPLY_TIMEOUT_S = 5.0
TICK_S = 0.1
MAX_PAUSE_S = 30.0  # between two starts of a fork server
PAUSE_S = 0.5  # after a failed action, before the next decision
SCHEDULER_SPREAD_S = 0.7  # in which a scheduler that ends a job notifies all its nodes
STUCK = "hung in a collective with a lost rank: it was ended"


class RankCommands:
    """Sends commands to the hosts of one attempt and records which host has which ranks.

    The plan's ranks are the slots. ``run_dir`` is the run directory as the user names it. Agents
    prove to each other that they know the key of a closed store, which no rank gets.
    """

    def __init__(self, plan: Plan, job: Job, fleet: Fleet, run_dir: str) -> None:
        self.parts = {part.host: part for part in plan.nodes}
        self.hosts_of = {rank.rank: part.host for part in plan.nodes for rank in part.ranks}
        self._plan, self._job, self._fleet, self._run_dir = plan, job, fleet, run_dir
        self._encryption = JobEncryption() if job.encrypt.value else None
        self._store_key = secrets.token_hex() if plan.closed_store else None
        self._set_store(plan.master_addr, plan.master_port)

    def _set_store(self, address: str, port: int) -> None:
        key = {"key": self._store_key} if self._store_key else {}
        self._store: dict[str, Any] = {"address": address, "port": port, **key}

    @property
    def next_slot(self) -> int:
        """The slot number that the next new rank gets."""
        return max(self.hosts_of) + 1

    @property
    def addresses(self) -> dict[str, str]:
        """Maps each host with ranks to its address for the traffic of the job."""
        return {host: part.address for host, part in self.parts.items()}

    def host_at(self, address: str) -> str:
        """Returns the host with this address, or an empty string."""
        normalized = _normalize_ip(address)
        return next((host for host, part in self.parts.items()
                     if address and _normalize_ip(part.address) == normalized), "")  # fmt: skip

    def node(self, host: str) -> Node | None:
        """Returns the node of a host; ``None`` if another host has taken its place."""
        return next((node for node in self._fleet.nodes if node.name == host), None)

    def add(self, part: NodePlan) -> list[int]:
        """Adds the plan of a new host; returns the slots that no rank had before."""
        slots = [rank.rank for rank in part.ranks]
        added = [slot for slot in slots if slot not in self.hosts_of]
        self.parts[part.host] = part
        self.hosts_of.update(dict.fromkeys(slots, part.host))
        return added

    # --- starts ------------------------------------------------------------------------------

    async def prepare(self) -> None:
        """Prepares the first start. SettingError if connections cannot be encrypted here."""
        if self._encryption is not None:
            await self._encryption.prepare()

    async def start(self, node: Node, part: NodePlan) -> None:
        """Starts all ranks of a node for the first time, with the store on the first node."""
        opens_store = self._plan.agent_store and part.node_rank == 0
        request = self.start_request(node, part)
        await node.channel.request("start", opens_store=opens_store, **request)

    def start_request(self, node: Node, part: NodePlan) -> dict[str, Any]:
        """Returns the message with which the agent of a node starts its ranks."""
        env = {name: setting.value for name, setting in part.env.items()}
        env[jobenv.RUN_DIR] = node.run_folder
        env[jobenv.LAUNCHER_RUN_DIR] = self._run_dir
        env[jobenv.ADDRESSES] = self._admitted()
        encryption = self._encryption and self._encryption.settings(part.host, part.address)
        return {
            "store": self._store,
            "encryption": encryption,
            "entry": entry_json(part.entry),
            "workdir": part.workdir,
            "env": {**self._job.environment.variables(), **env},
            "any_world": self._job.any_world,
            "verify": self._job.verify,
            "measure": self._job.measure,
            "ranks": self._plan.ranks_json(part),
        }

    async def start_newcomers(self, node: Node, part: NodePlan, slots: Sequence[int]) -> None:
        """Forks ranks that will join the running ones."""
        request = self.start_request(node, part)
        size = str(self.next_slot)  # larger than any rank
        env = {jobenv.NEWCOMER: "1", jobenv.MASTER_ADDR: self._store["address"],
               jobenv.MASTER_PORT: str(self._store["port"]),
               jobenv.WORLD_SIZE: size, jobenv.PLANNED_WORLD: size}  # fmt: skip
        ranks = [
            {**spec, "env": {**spec["env"], **env}}
            for spec in request["ranks"]
            if spec["rank"] in slots
        ]
        await self._admit_newcomers()
        starting = node.channel.request("add_ranks", **{**request, "ranks": ranks})
        await asyncio.wait_for(starting, REPLY_TIMEOUT_S)
        node.running = True

    async def _admit_newcomers(self) -> None:
        """Makes the other hosts accept connections from hosts that came after their start."""
        addresses = self._admitted()
        hosts = [self.host_at(str(self._store["address"]))]
        if self._encryption is not None:
            hosts = [node.name for node in self._fleet.nodes if node.running]
        for host in hosts if addresses else ():
            if host:
                admitting = self._fleet.get(host).channel.request("admit", addresses=addresses)
                await asyncio.wait_for(admitting, REPLY_TIMEOUT_S)

    def _admitted(self) -> str:
        """Returns the source addresses of the job's current hosts."""
        extra = self._job.environment.variables().get(jobenv.ADDRESSES, "")
        chosen = {name: part.address for name, part in self.parts.items()}
        return self._fleet.addresses(extra, chosen)

    # --- ranks that run ----------------------------------------------------------------------

    async def request(self, host: str, op: str, **fields: Any) -> None:
        """Sends a request to an agent and ignores failures."""
        if (node := self.node(host)) is not None:
            await try_request(node, op, REPLY_TIMEOUT_S, **fields)

    async def open_store(self, host: str) -> None:
        """Opens a fresh rendezvous store on a host; raises what :meth:`Channel.request` does."""
        node, address = self._fleet.get(host), self.parts[host].address
        opening = node.channel.request("open_store", address=address, key=self._store_key,
                                       addresses=self._admitted())  # fmt: skip
        answer = await asyncio.wait_for(opening, REPLY_TIMEOUT_S)
        self._set_store(address, int(answer["port"]))

    def regroup_message(self, group: Regroup) -> dict[str, Any]:
        """Returns the message that describes the new group."""
        members = []
        for slot in group.members:
            host = self.hosts_of[slot]
            local = sorted(peer for peer in group.members if self.hosts_of[peer] == host)
            members.append({"slot": slot, "host": host, "local_rank": local.index(slot),
                            "local_size": len(local)})  # fmt: skip
        return {"control": "regroup", "generation": group.generation, "members": members,
                "store": self._store, "planned": group.planned, "holds": group.is_paused,
                "addresses": self._admitted()}  # fmt: skip


def _normalize_ip(text: str) -> str:
    """Returns one spelling of an IP address; any other text as it is."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return text
    return str(getattr(address, "ipv4_mapped", None) or address)


class RecoveryController:
    """Keeps the ranks of one attempt together: carries out what ``members`` decides.

    Calls ``fail`` with each failure that ends the attempt.

    Attributes:
        report: Reports to the user and counts the recoveries.
        abandon_reason: The loss after which too few hosts came back, if any.
        no_restart_reason: Why another attempt is useless; empty if unknown.
        first_host: Host of the rank that saves.
    """

    def __init__(self, commands: RankCommands, members: Members, fleet: Fleet,
                 reconnector: Reconnector, fail: Callable[[Failure], None],
                 screen: Screen, recorder: Recorder) -> None:  # fmt: skip
        self.abandon_reason: Failure | None = None
        self.no_restart_reason = ""
        self.first_host = next(iter(commands.parts))
        self._commands, self._members, self._fleet = commands, members, fleet
        self._reconnector, self._fail = reconnector, fail
        self._screen, self._recorder = screen, recorder
        self.report = RecoveryReport(commands.hosts_of, fleet, screen, recorder)
        self._orders: asyncio.Queue[Regroup | Start | Kill | End] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._starts: set[asyncio.Task[None]] = set()  # of newcomers, until the agent has answered
        self._is_closed = False
        self._error: BaseException | None = None
        self._departing: list[Node] = []
        self._waiting: NodeWait | None = None  # since too few hosts were left the last time
        self._dialling: dict[str, asyncio.Task[None]] = {}  # by lost host
        self._obstacle = ""  # why the ranks cannot go on without a lost one, until that was shown

    # --- state -------------------------------------------------------------------------------

    @property
    def can_recover(self) -> bool:
        """Whether a loss at this moment would be recovered from in place."""
        return self._members.can_recover

    @property
    def _recovers(self) -> bool:
        return self._members.can_recover and not self._members.is_finished

    @property
    def accepts_newcomers(self) -> bool:
        """Whether new ranks can join the running training."""
        return self._members.can_recover and self._members.accepts_newcomers

    @property
    def num_hosts(self) -> int:
        """Number of hosts with ranks, including hosts that are lost for the moment."""
        return len(self._commands.parts)

    def has_rank(self, host: str, rank: int | None) -> bool:
        """Whether no other host has the rank of an event; also for an event of no rank."""
        return rank is None or self._commands.hosts_of.get(rank, host) == host

    @property
    def departing_nodes(self) -> list[Node]:
        """Nodes that were asked to leave and have not been replaced."""
        return [node for node in self._departing if node in self._fleet.nodes]

    @property
    def waiting(self) -> NodeWait | None:
        """Hosts that the ranks wait for because too few are left; ``None`` if they do not wait."""
        is_waiting = self._members.can_recover and self._members.is_waiting
        return self._waiting if is_waiting else None

    # --- what happens ------------------------------------------------------------------------

    def on_event(self, event: Event) -> None:
        """Handles an event of a rank, an agent or the launcher."""
        slot, members = event.rank, self._members
        if event.kind == "store ended":
            members.store_ended(event.host)
        elif slot is None:
            return
        elif event.kind == "recoverable":
            members.set_recoverable(slot, bool(event["able"]))
            self._obstacle = "" if event["able"] else str(event["why"] or "")
        elif event.kind in ("heartbeat", "progress"):
            members.record_progress(event["step"])
            return
        elif event.kind == "interrupted":
            members.record_step(event["step"])
            host = self._commands.host_at(unreachable_peer(str(event["error"] or "")))
            members.interrupt_rank(slot, unreachable_host=host, generation=event["generation"])
        elif event.kind == "stuck":
            members.set_hung(slot, STUCK)
        elif event.kind in ("rank frozen", "rank thawed"):
            members.set_frozen(slot, event["how"] == "stopped")
        elif event.kind == "arrived":
            members.rank_arrived(slot)
        elif event.kind == "gathered":
            members.group_gathered(slot, event["generation"])
        elif event.kind == "world joined":
            members.group_connected(slot, event["world_size"])
        elif event.kind == "newcomer ready":
            members.newcomer_ready(slot)
        elif event.kind == "session closed":
            members.close_session(slot)
        elif event.kind == "door closed":
            members.close_admission(slot, str(event["why"]))
        elif event.kind == "regrouped":
            members.regrouped(slot, event["generation"], event["step"])
        elif event.kind == "rank ended" and event["code"] == 0:
            self._note_lost_newcomer(slot, event.host, EARLY_EXIT)
            members.rank_finished(slot)
        else:
            return
        self.act()

    def recover_from(self, failure: Failure) -> bool:
        """Starts recovering from a failure if that is possible; returns whether it is."""
        if self._members.is_finished:
            return True
        if not self.can_recover:
            self._show_obstacle(failure)
            return False
        if failure.rank is not None:
            self._note_lost_newcomer(failure.rank, failure.host, failure.headline)
            self._members.rank_lost(failure.rank, failure)
        elif failure.kind == "forkserver":
            self._members.server_died(failure.host, failure)
        elif failure.kind in ("lost", "agent", "lease"):
            redials = self._reconnector.redials
            self._members.node_lost(failure.host, failure, redials=redials)
        else:
            return False
        self.act()
        return True

    def _show_obstacle(self, failure: Failure) -> None:
        """Shows once why a loss, which is not the fault of the script, ends the ranks."""
        is_loss = failure.kind in ("signal", "lost", "forkserver", "agent", "lease")
        if is_loss and not failure.was_terminated and len(self._commands.hosts_of) > 1:
            if self._obstacle:
                message = f"the other ranks cannot go on without {failure.where}: {self._obstacle}"
                self._screen.note(f"paceline: {message}")
            self._obstacle = ""

    def add_ranks(self, node: Node) -> None:
        """Starts ranks on a spare node if it fits the others; they join when they are ready."""
        commands = self._commands
        try:
            part = self._reconnector.add(node, commands.next_slot, commands.parts)
        except NodeError as error:
            self._screen.note(f"paceline: {error.message}; keeping it as a spare. {error.remedy}")
        else:
            self._add_part(part)

    def _add_part(self, part: NodePlan) -> None:
        self.report.untrained.update(self._commands.add(part))
        slots = [rank.rank for rank in part.ranks]
        self._members.add_host(part.host, slots)
        self.act()

    def use_spare(self) -> bool:
        """Lets a spare take the place of a missing host if there is one; returns whether it did."""
        if not self.can_recover or self._members.is_stopping:
            return False
        for host, dialling in self._dialling.items():
            if self._replace_host(host):
                del self._dialling[host]
                dialling.cancel()  # it is dialled on, as a spare
                return True
        return False

    def _replace_host(self, host: str) -> bool:
        """Lets a spare replace a lost host if its ranks could join; returns whether it did."""
        parts = self._commands.parts
        part = (
            self._reconnector.replace(parts[host], parts)
            if self._members.accepts_newcomers
            else None
        )
        if part is None:
            return False
        del parts[host]
        self._add_part(part)
        return True

    def end_hung_rank(self, rank: int, headline: str) -> bool:
        """Kills a rank that the others wait for if it can be replaced; returns whether it can."""
        if not self._recovers:
            return False
        self._members.set_hung(rank, headline)
        self.act()
        return True

    def end_stalled_newcomer(self, slot: int, host: str, seconds: float, position: str) -> None:
        """Kills a new rank that has stalled for that many seconds; it may be started again."""
        reason = f"hung for longer than {seconds:.0f} s before it joined: {position}"
        self._note_lost_newcomer(slot, host, reason)
        self._screen.note(f"paceline: {format_location(host, slot)} is ended: it {reason}")
        self._members.set_hung(slot, reason)
        self.act()

    def end_strays(self, sides: Sequence[Sequence[int]], headline: str) -> bool:
        """Drops newer ranks that wait in another collective; returns whether it did."""
        return self._act_if(self._recovers and self._members.end_strays(sides, headline))

    def retry_group(self) -> bool:
        """Lets ranks that all wait for each other retry in a new group; returns whether it does."""
        return self._act_if(self._recovers and self._members.retry_group())

    def separate(self, pairs: Sequence[tuple[str, str]], progress_at: float) -> bool:
        """Drops one host of each pair that cannot reach each other; returns whether it did."""
        return self._act_if(self._recovers and self._members.separate(pairs, progress_at))

    def _act_if(self, has_changed: bool) -> bool:
        if has_changed:
            self.act()
        return has_changed

    def release(self, node: Node, notice: Failure) -> bool:
        """Continues without a node that was asked to leave if possible; returns whether it does."""
        if node in self._departing:
            return True
        self._departing.append(node)
        releases = self.can_recover and not self._members.is_stopping
        if releases:
            self._spawn(self._release(node, notice))
        return releases

    async def _release(self, node: Node, notice: Failure) -> None:
        await asyncio.sleep(SCHEDULER_SPREAD_S)
        if self._members.is_stopping:
            return
        lost = replace(notice, kind="lost", time=time.monotonic())
        is_entire_job = len(self.departing_nodes) >= len(self._fleet.nodes)
        if is_entire_job or not self.recover_from(lost):
            self._fail(replace(lost, kind=notice.kind))
        elif not node.lost:
            node.running = False
            await self._fleet.dismiss(node, notice.headline)

    # --- the loop ----------------------------------------------------------------------------

    async def run(self) -> None:
        """Decides and acts until cancelled; re-raises unexpected errors of actions."""
        self._spawn(self._send_orders())
        try:
            while True:
                self._fleet.watchful = self._members.can_recover
                self._fleet.awaits_loss = self._members.has_interrupted
                self.act()
                await asyncio.sleep(TICK_S)
                if self._error is not None:
                    raise self._error
        finally:
            self._fleet.watchful = self._fleet.awaits_loss = False
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def stop(self) -> None:
        """Notes that the ranks save and stop: no rank joins, and the current group is kept."""
        self._is_closed = True
        self._members.stop()
        self.act()

    async def close(self, timeout_s: float) -> None:
        """Starts no more new ranks and waits up to that long for pending replies."""
        self._is_closed = True
        if self._starts:
            await asyncio.wait(self._starts, timeout=timeout_s)

    def act(self) -> None:
        """Carries out the pending actions."""
        for action in self._members.decide():
            self._execute(action)

    def _execute(self, action: Action) -> None:
        if isinstance(action, (Regroup, Start, Kill, End)):
            if isinstance(action, Regroup):
                self.first_host = self._commands.hosts_of[action.members[0]]
                self._recorder.event("regroup", generation=action.generation,
                                     members=list(action.members),
                                     planned=action.planned)  # fmt: skip
            self._orders.put_nowait(action)
        elif isinstance(action, Prepare):
            self._spawn(self._start_fork_server(action.host))
        elif isinstance(action, Dial):
            self._dialling[action.host] = self._spawn(self._restore_host(action))
        elif isinstance(action, ExcludeHost):
            self.report.announce(describe_exclusion(action, self._reconnector.redials))
            self._spawn(self._dismiss(action.host, action.reason))
        elif isinstance(action, Fail):
            self.no_restart_reason = action.reason or self.no_restart_reason
            for failure in action.failures:
                self._fail(failure)
        elif isinstance(action, Stop):
            self.abandon_reason = action.loss
            self._fail(action.loss)
        elif isinstance(action, Wait):
            self._spawn(self._report_wait(action))
        else:
            self.report.announce_action(action)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)
        return task

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = self._error or error

    # --- commands ----------------------------------------------------------------------------

    async def _send_orders(self) -> None:
        """Sends decisions in their order without waiting for the replies of nodes."""
        commands = self._commands
        while True:
            action = await self._orders.get()
            if isinstance(action, Regroup):
                if not action.store_host or await self._open_store(action.store_host):
                    self._broadcast(commands.regroup_message(action))
            elif isinstance(action, End):
                self._broadcast({"control": "end", "why": action.reason})
            elif isinstance(action, Kill):
                self._spawn(commands.request(action.host, "kill_ranks", ranks=list(action.slots)))
            elif not self._is_closed:
                starting = self._spawn(self._start_newcomers(action))
                self._starts.add(starting)
                starting.add_done_callback(self._starts.discard)
            await asyncio.sleep(0)

    def _broadcast(self, line: dict[str, Any]) -> None:
        for node in self._fleet.nodes:
            if not node.lost and node.running:
                self._spawn(self._commands.request(node.name, "tell_ranks", line=line))

    async def _open_store(self, host: str) -> bool:
        """Opens a new rendezvous store on a host; if that fails, :class:`Members` decides again."""
        try:
            await self._commands.open_store(host)
        except (PacelineError, ConnectionError, asyncio.TimeoutError):
            await asyncio.sleep(PAUSE_S)
            self._members.store_ended(host)
            self.act()
            return False
        return True

    async def _start_newcomers(self, action: Start) -> None:
        node, part = self._commands.node(action.host), self._commands.parts.get(action.host)
        if node is None or part is None:
            return  # a spare has taken its ranks over
        try:
            await self._commands.start_newcomers(node, part, action.slots)
        except (PacelineError, ConnectionError, asyncio.TimeoutError) as error:
            await asyncio.sleep(PAUSE_S)
            reason = f"it could not be started: {str(error) or 'no answer'}"
            for slot in action.slots:
                self._note_lost_newcomer(slot, action.host, reason)
            self._members.start_failed(action.host, action.slots, reason)
            self.act()

    async def _start_fork_server(self, host: str) -> None:
        """Retries starting a fork server until one runs; reports what prevents it."""
        pause_s, reported = PAUSE_S, ""
        while (node := self._commands.node(host)) is not None and not node.lost:
            try:
                await asyncio.wait_for(node.prepare(), REPLY_TIMEOUT_S)
                assert node.ready is not None
                problem = await node.ready
            except (PacelineError, ConnectionError, asyncio.TimeoutError) as error:
                reason = str(error) or "no answer"
            else:
                if problem is None:
                    self._members.server_up(host)
                    self.act()
                    return
                reason = (problem.text.strip() or problem.kind).splitlines()[-1]
            if reason != reported and not node.lost:
                self.report.announce(f"{host} cannot start ranks yet: {reason}")
            reported = reason
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _dismiss(self, host: str, reason: str) -> None:
        if (node := self._commands.node(host)) is not None and not node.lost:
            node.running = False
            await self._fleet.dismiss(node, reason)

    async def _restore_host(self, action: Dial) -> None:
        """Fills the place of a lost host with a spare, or with the host itself once it is back."""
        host = action.host
        if self._replace_host(host):
            del self._dialling[host]
            return
        if not self._reconnector.redials:
            self._members.abandon_host(host)
            return
        # a host that was sent home, and not lost, is dialled only after some time in any case
        await asyncio.sleep(max(0.0, action.delay_s - RELEASED_REDIAL_S))
        try:
            await self._reconnector.reconnect(host)
        except PermanentConnectError:  # the user has been told
            self._members.abandon_host(host)
        else:
            del self._dialling[host]
            self._members.server_up(host)
        self.act()

    # --- messages ----------------------------------------------------------------------------

    def _note_lost_newcomer(self, slot: int, host: str, reason: str) -> None:
        """Records the failure of a new rank before it joined; shows the last one to the user."""
        if self._members.is_newcomer(slot):
            self._recorder.event("newcomer lost", host, slot, why=reason)

    async def _report_wait(self, news: Wait) -> None:
        self._waiting = None
        await asyncio.sleep(PAUSE_S)
        if self._members.is_waiting:  # no spare has taken a place at once
            text = f"waiting for {listed(news.missing)}, with the training's state in memory"
            self.report.announce(f"too few nodes are left: {text}")
            min_hosts, timeout_s = self._members.required_hosts
            num_available = pluralize(self.num_hosts - len(news.missing), "node")
            text = f"{num_available} of at least {min_hosts}: {text}"
            self._waiting = NodeWait.start(text, timeout_s)
