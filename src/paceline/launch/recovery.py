"""Recovery in place: hears what ranks and nodes say, and does what ``members.py`` decides."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from paceline.launch.board import Waiting
from paceline.launch.fleet import Fleet, Node
from paceline.launch.members import (
    TOO_SOON,
    Action,
    Dial,
    End,
    Fail,
    Joined,
    Kill,
    LeftOut,
    Members,
    NotAgain,
    Prepare,
    Recovered,
    Regroup,
    SendAway,
    Start,
    Stop,
    Wait,
)
from paceline.launch.muster import TOO_LATE_S
from paceline.launch.recorder import Recorder
from paceline.launch.screen import Screen
from paceline.spec import jobenv
from paceline.spec.errors import GoneError, PacelineError
from paceline.spec.events import Event
from paceline.spec.failure import Failure, Recovery, place, silent_peer
from paceline.spec.helptext import counted
from paceline.spec.plan import NodePlan, Plan

TICK_S = 0.1
PATIENCE_S = 5.0  # for a node's answer
LONGEST_PAUSE_S = 30.0  # between two starts of a fork server
PAUSE_S = 0.5  # after something could not be done, before it is decided again
ALL_ASKED_S = 0.7  # a scheduler that ends a job asks all its nodes within so long
STUCK = "did not come out of a collective with a rank that is gone: it was ended"

StartRequest = Callable[[Node, NodePlan], dict[str, Any]]
Rejoin = Callable[[str], Awaitable[None]]
StandIn = Callable[[NodePlan], NodePlan | None]


class Recoveries:
    """Keeps the ranks of one attempt together.

    Args:
        plan: What runs where; its ranks are the slots.
        members: Decides.
        fleet: The nodes.
        start_request: What the ranks of a node are started with.
        stand_in: Has a spare take the place of a lost host's part in the fleet, with its own part;
            ``None`` when there is none.
        rejoin: Has a lost host take its place in the fleet again, with a warm fork server, however
            long it takes; GoneError when it cannot. ``None`` where nodes are started in a way that
            cannot be repeated.
        fail: Told of each failure that ends the attempt.
        screen, recorder: Where things are shown and written down.
    """

    def __init__(self, plan: Plan, members: Members, fleet: Fleet, start_request: StartRequest,
                 stand_in: StandIn, rejoin: Rejoin | None, fail: Callable[[Failure], None],
                 screen: Screen, recorder: Recorder) -> None:  # fmt: skip
        self.done: list[Recovery] = []
        self.gave_up: Failure | None = None  # too few nodes came back
        self.refused = ""  # why there is no use in starting again, if so
        self.first_host = plan.nodes[0].host  # of the rank that saves
        self._members = members
        self._fleet = fleet
        self._start_request = start_request
        self._stand_in, self._rejoin = stand_in, rejoin
        self._fail = fail
        self._screen, self._recorder = screen, recorder
        self.admitted: Callable[[], str] = lambda: ""  # from which the job's hosts connect
        self._parts = {part.host: part for part in plan.nodes}
        self._places = {rank.rank: part.host for part in plan.nodes for rank in part.ranks}
        self._store = {"address": plan.master_addr, "port": plan.master_port}
        self._mail: asyncio.Queue[Regroup | Start | Kill | End] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._starts: set[asyncio.Task[None]] = set()  # of newcomers, until the agent has answered
        self._closed = False
        self._broken: BaseException | None = None
        self._leaving: list[Node] = []
        self._waits: Waiting | None = None  # since too few nodes were left the last time
        self._fresh: set[int] = set()  # further ranks that did not train yet
        self._away: dict[str, asyncio.Task[None]] = {}  # hosts that are lost, and who dials them

    # --- what is asked -----------------------------------------------------------------------

    @property
    def possible(self) -> bool:
        """Whether what is lost now is recovered from."""
        return self._members.recovers

    @property
    def open(self) -> bool:
        """Whether further ranks can join those that train."""
        return self._members.recovers and self._members.open

    @property
    def pending(self) -> bool:
        """Whether ranks train, whatever nodes say of their ends."""
        return self._members.recovers and self._members.pending

    @property
    def hosts(self) -> int:
        """How many hosts have a part in the job, those that are lost for a while included."""
        return len(self._parts)

    @property
    def next_slot(self) -> int:
        """The number of a further rank."""
        return max(self._places) + 1

    @property
    def leaving(self) -> list[Node]:
        """Nodes that were asked to end, and whose place no other has taken."""
        return [node for node in self._leaving if self._fleet.has(node)]

    @property
    def finished(self) -> bool:
        """Whether the training is over, in order: what is lost now is missed by nobody."""
        return self._members.finished

    @property
    def addresses(self) -> dict[str, str]:
        """By host that has a part in the job, its address for the job's traffic."""
        return {host: part.address for host, part in self._parts.items()}

    def forming(self, limit_s: float) -> bool:
        """Whether a new group is being made or was just now: what stood before is no hang of it."""
        return self._members.recovers and self._members.forming(time.monotonic(), limit_s)

    def starting(self) -> list[tuple[int, str, float]]:
        """Newcomers that cannot join yet: slot, host and when each was started."""
        comes = self._members.recovers and not self._members.stopping
        return self._members.starting() if comes else []

    def outside(self) -> set[int]:
        """Newcomers that are in no group: nobody waits for them."""
        return self._members.outside

    @property
    def under_way(self) -> bool:
        """Whether ranks have no group in which they train at present: their silence is no hang."""
        return self._members.recovers and (self._members.waiting or not self._members.settled)

    @property
    def waits(self) -> Waiting | None:
        """That too few nodes are left, and the ranks wait for others; ``None`` when they do not."""
        return self._waits if self._members.recovers and self._members.waiting else None

    # --- what is told ------------------------------------------------------------------------

    def heard(self, event: Event) -> None:
        """What ranks, agents and the launcher itself say."""
        now, slot = time.monotonic(), event.rank
        if event.kind == "store ended":
            self._members.store_ended(event.host)
        elif slot is None:
            return
        elif event.kind == "recoverable":
            self._members.said_able(slot, bool(event["able"]))
        elif event.kind in ("heartbeat", "progress"):
            self._members.stepped(event["step"], now)
            return
        elif event.kind == "interrupted":
            self._members.stepped(event["step"])
            silent = self.host_at(silent_peer(str(event["error"] or "")))
            self._members.interrupted(slot, now, silent=silent, generation=event["generation"])
        elif event.kind == "stuck":
            self._members.hung(slot, STUCK)
        elif event.kind in ("rank frozen", "rank thawed"):
            self._members.frozen(slot, event["how"] == "stopped")
        elif event.kind == "gathered":
            self._members.gathered(event["generation"], now)
        elif event.kind == "world joined":
            self._members.formed(slot, event["world_size"])
        elif event.kind == "newcomer ready":
            self._members.ready(slot, now)
        elif event.kind == "session closed":
            self._members.session_closed(slot)
        elif event.kind == "door closed":
            self._members.closed(slot, str(event["why"]), now)
        elif event.kind == "regrouped":
            self._members.regrouped(slot, event["generation"], event["step"], now)
        elif event.kind == "rank ended" and event["code"] == 0:
            self._note_newcomer(slot, event.host, TOO_SOON)
            self._members.done(slot, now)
        else:
            return
        self.act()

    def takes(self, failure: Failure) -> bool:
        """Whether a failure is recovered from; it is then seen to."""
        now = time.monotonic()
        if self.finished:
            return True
        if not self.possible:
            return False
        if failure.rank is not None:
            self._note_newcomer(failure.rank, failure.host, failure.headline)
            self._members.rank_lost(failure.rank, failure, now)
        elif failure.kind == "forkserver":
            self._members.server_died(failure.host, failure, now)
        elif failure.kind in ("lost", "agent", "lease"):
            redials = self._rejoin is not None
            self._members.node_lost(failure.host, failure, now, redials=redials)
        else:
            return False
        self.act()
        return True

    def take_in(self, part: NodePlan) -> None:
        """A host that is new to the job can start ranks: they join when they are ready."""
        slots = [rank.rank for rank in part.ranks]
        self._fresh.update(slot for slot in slots if slot not in self._places)
        self._parts[part.host] = part
        self._places.update(dict.fromkeys(slots, part.host))
        self._members.came(part.host, slots, time.monotonic())
        self.act()

    def spare_came(self) -> bool:
        """Whether a spare that has come takes the place of a host that is lost and still away."""
        if not self.possible or self._members.stopping:
            return False
        for host, dialling in self._away.items():
            if self._replace(host):
                del self._away[host]
                dialling.cancel()  # it is called on, as a spare
                return True
        return False

    def _replace(self, host: str) -> bool:
        """Whether a spare has taken the place of a lost host; never where it could not join."""
        spare = self._stand_in(self._parts[host]) if self._members.open else None
        if spare is None:
            return False
        del self._parts[host]
        self.take_in(spare)
        return True

    def hung(self, rank: int, headline: str) -> bool:
        """Whether a rank that keeps the others waiting is replaced; it is then ended."""
        if not self.possible or self.finished:
            return False
        self._members.hung(rank, headline)
        self.act()
        return True

    def late(self, slot: int, host: str, seconds: float, where: str) -> None:
        """A newcomer stands still, and should have come to the training by now."""
        who = place(host, slot)
        text = f"{who}, started {seconds:.0f} s ago, has not come to the training: it {where}"
        self._screen.note(f"paceline: {text}")
        self._recorder.event("newcomer late", host, slot, text=text, why=where)

    def too_late(self, slot: int, host: str, seconds: float, where: str) -> None:
        """It has done so for too long, these seconds: it is ended, and started again if that is
        not its last try."""
        why = f"hung for longer than {seconds:.0f} s before it joined: {where}"
        self._note_newcomer(slot, host, why)
        self._screen.note(f"paceline: {place(host, slot)} is ended: it {why}")
        self._members.hung(slot, why)
        self.act()

    def astray(self, sides: Sequence[Sequence[int]], headline: str) -> bool:
        """Whether ranks that wait in different collectives go on without those that came later.

        Args:
            sides: The ranks that wait in the same one.
            headline: Why these are ended.
        """
        if not self.possible or self.finished or not self._members.astray(sides, headline):
            return False
        self.act()
        return True

    def deaf(self) -> bool:
        """Whether ranks that all wait for each other try that again in a new group."""
        if not self.possible or self.finished or not self._members.deaf(time.monotonic()):
            return False
        self.act()
        return True

    def part(self, lines: Sequence[tuple[str, str]], since: float) -> bool:
        """Whether the job goes on without one of the hosts of lines that let nothing through.

        Args:
            lines: Two hosts each.
            since: When the job gave its last sign.
        """
        if not self.possible or self.finished:
            return False
        if not self._members.apart(lines, since, time.monotonic()):
            return False
        self.act()
        return True

    def leaves(self, node: Node, asked: Failure) -> bool:
        """A node was asked to end, once or again; whether that is seen to.

        Where it is not the whole job, the others go on without it.
        """
        if any(one is node for one in self._leaving):
            return True
        self._leaving.append(node)
        seen_to = self.possible and not self._members.stopping
        if seen_to:
            self._begin(self._let_go(node, asked))
        return seen_to

    async def _let_go(self, node: Node, asked: Failure) -> None:
        await asyncio.sleep(ALL_ASKED_S)
        if self._members.stopping:
            return  # its ranks save, as all others do
        left = replace(asked, kind="lost", time=time.monotonic())
        if len(self.leaving) >= len(self._fleet.nodes) or not self.takes(left):
            self._fail(replace(left, kind=asked.kind))
        elif not node.lost:
            node.running = False
            await self._fleet.dismiss(node)

    # --- the loop ----------------------------------------------------------------------------

    async def run(self) -> None:
        """Until it is cancelled, or something fails that nobody had thought of."""
        self._begin(self._post())
        try:
            while True:
                self._fleet.watchful = self._members.recovers
                self._fleet.at_a_loss = self._members.at_a_loss
                self.act()
                await asyncio.sleep(TICK_S)
                if self._broken is not None:
                    raise self._broken
        finally:
            self._fleet.watchful = self._fleet.at_a_loss = False
            tasks = [*self._tasks]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def stop(self) -> None:
        """The ranks are asked to save and stop: nobody joins, and who is left stays together."""
        self._closed = True
        self._members.stop()
        self.act()

    async def close(self, patience_s: float) -> None:
        """Orders no more newcomers, and waits so long for the answers to those ordered."""
        self._closed = True
        if self._starts:
            await asyncio.wait(self._starts, timeout=patience_s)

    def act(self) -> None:
        """Does what is to be done now."""
        for action in self._members.decide(time.monotonic()):
            self._do(action)

    def _do(self, action: Action) -> None:
        if isinstance(action, (Regroup, Start, Kill, End)):
            if isinstance(action, Regroup):
                self._note_group(action)
            self._mail.put_nowait(action)
        elif isinstance(action, Prepare):
            self._begin(self._prepare(action.host))
        elif isinstance(action, Dial):
            self._away[action.host] = self._begin(self._dial(action.host, action.after_s))
        elif isinstance(action, SendAway):
            self._say(left_out(action, again=self._rejoin is not None))
            self._begin(self._send_away(action.host))
        elif isinstance(action, Fail):
            self.refused = action.why or self.refused
            for failure in action.failures:
                self._fail(failure)
        elif isinstance(action, Stop):
            self.gave_up = action.why
            self._fail(action.why)
        else:
            self._tell(action)

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._over)
        return task

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broken = self._broken or error

    # --- to the nodes ------------------------------------------------------------------------

    async def _post(self) -> None:
        """Sends what is decided in that order; nobody waits for a node's answer."""
        while True:
            action = await self._mail.get()
            if isinstance(action, Regroup):
                if action.store_host and not await self._open_store(action.store_host):
                    continue
                self._to_all(self._line(action))
            elif isinstance(action, End):
                self._to_all({"control": "end", "why": action.why})
            elif isinstance(action, Kill):
                self._ask(action.host, "kill_ranks", ranks=list(action.slots))
            elif not self._closed:
                starting = self._begin(self._start(action))
                self._starts.add(starting)
                starting.add_done_callback(self._starts.discard)
            await asyncio.sleep(0)

    def _to_all(self, line: dict[str, Any]) -> None:
        for node in self._fleet.nodes:
            if not node.lost and node.running:
                self._ask(node.name, "tell_ranks", line=line)

    def _ask(self, host: str, op: str, **fields: Any) -> None:
        async def ask() -> None:
            with contextlib.suppress(PacelineError, ConnectionError, asyncio.TimeoutError):
                node = self._fleet.named(host)
                await asyncio.wait_for(node.channel.request(op, **fields), PATIENCE_S)

        self._begin(ask())

    def _line(self, group: Regroup) -> dict[str, Any]:
        """What ranks are told of their new group; local ranks are counted within it."""
        sizes = Counter(self._places[slot] for slot in group.members)
        seen: Counter[str] = Counter()
        local = {}
        for slot in sorted(group.members):
            local[slot] = seen[self._places[slot]]
            seen[self._places[slot]] += 1
        members = [
            {"slot": slot, "host": host, "local_rank": local[slot], "local_size": sizes[host]}
            for slot in group.members
            for host in [self._places[slot]]
        ]
        return {"control": "regroup", "generation": group.generation, "members": members,
                "store": self._store, "planned": group.planned, "holds": group.holds,
                "addresses": self.admitted()}  # fmt: skip

    async def _open_store(self, host: str) -> bool:
        """A fresh store there; else it is decided again."""
        try:
            node, address = self._fleet.named(host), self._parts[host].address
            opening = node.channel.request("open_store", address=address,
                                           addresses=self.admitted())  # fmt: skip
            answer = await asyncio.wait_for(opening, PATIENCE_S)
        except (PacelineError, ConnectionError, asyncio.TimeoutError):
            await asyncio.sleep(PAUSE_S)
            self._members.store_ended(host)
            self.act()
            return False
        self._store = {"address": address, "port": int(answer["port"])}
        return True

    async def _start(self, action: Start) -> None:
        """Has newcomers forked."""
        node, part = self._node(action.host), self._parts.get(action.host)
        if node is None or part is None:
            return  # a spare has taken its ranks over
        request = self._start_request(node, part)
        size = str(self.next_slot)  # a rank's number has to be less
        env = {jobenv.NEWCOMER: "1", jobenv.MASTER_ADDR: self._store["address"],
               jobenv.MASTER_PORT: str(self._store["port"]),
               jobenv.WORLD_SIZE: size, jobenv.PLANNED_WORLD: size}  # fmt: skip
        ranks = [
            {**spec, "env": {**spec["env"], **env}}
            for spec in request["ranks"]
            if spec["rank"] in action.slots
        ]
        try:
            await self._admit()
            starting = node.channel.request("add_ranks", **{**request, "ranks": ranks})
            await asyncio.wait_for(starting, PATIENCE_S)
            node.running = True
        except (PacelineError, ConnectionError, asyncio.TimeoutError) as error:
            await asyncio.sleep(PAUSE_S)
            why = f"it could not be started: {str(error) or 'no answer'}"
            for slot in action.slots:
                self._note_newcomer(slot, action.host, why)
            self._members.start_failed(action.host, action.slots, time.monotonic(), why)
            self.act()

    async def _admit(self) -> None:
        """Has the store take connections from hosts that were not there when it was opened."""
        host, addresses = self.host_at(str(self._store["address"])), self.admitted()
        if host and addresses:
            admitting = self._fleet.named(host).channel.request("admit", addresses=addresses)
            await asyncio.wait_for(admitting, PATIENCE_S)

    async def _prepare(self, host: str) -> None:
        """Starts a fork server until one is up; says what stands in its way."""
        pause_s, told = PAUSE_S, ""
        while (node := self._node(host)) is not None and not node.lost:
            try:
                await asyncio.wait_for(node.prepare(), PATIENCE_S)
                assert node.ready is not None
                trouble = await node.ready
            except (PacelineError, ConnectionError, asyncio.TimeoutError) as error:
                why = str(error) or "no answer"
            else:
                if trouble is None:
                    self._members.server_up(host)
                    self.act()
                    return
                why = (trouble.text.strip() or trouble.kind).splitlines()[-1]
            if why != told and not node.lost:
                self._say(f"{host} cannot start ranks yet: {why}")
            told = why
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _send_away(self, host: str) -> None:
        if (node := self._node(host)) is not None and not node.lost:
            node.running = False
            await self._fleet.dismiss(node)

    async def _dial(self, host: str, after_s: float = 0.0) -> None:
        if self._replace(host):
            del self._away[host]
            return
        if self._rejoin is None:
            self._members.node_gone(host)
            return
        # whoever was sent home, and not lost, is dialled only after some time in any case
        await asyncio.sleep(max(0.0, after_s - TOO_LATE_S))
        try:
            await self._rejoin(host)
        except GoneError:  # as was said
            self._members.node_gone(host)
        else:
            del self._away[host]
            self._members.server_up(host)
        self.act()

    def host_at(self, address: str) -> str:
        """The host that has this address; empty when none does."""
        return next((host for host, part in self._parts.items()
                     if address and _same(part.address, address)), "")  # fmt: skip

    def _node(self, host: str) -> Node | None:
        """The node of a host; ``None`` when another host has taken its place."""
        return next((node for node in self._fleet.nodes if node.name == host), None)

    # --- to people ---------------------------------------------------------------------------

    def _note_group(self, group: Regroup) -> None:
        self.first_host = self._places[group.members[0]]
        self._recorder.event("regroup", generation=group.generation,
                             members=list(group.members), planned=group.planned)  # fmt: skip

    def _note_newcomer(self, slot: int, host: str, why: str) -> None:
        """What has become of one that has not joined: people hear of it when it is the last."""
        if self._members.comes(slot):
            self._recorder.event("newcomer lost", host, slot, why=why)

    def _tell(self, news: Wait | Recovered | Joined | LeftOut | NotAgain) -> None:
        if isinstance(news, Recovered):
            who = tuple(map(place, news.hosts, news.slots))
            why = "; ".join(lost_words(failure) for failure in news.losses) or "was lost"
            others = "the other rank" if news.others == 1 else f"the other {news.others} ranks"
            if not news.others:  # each was lost once, and given the state of one that was not
                others = "those that came for them"
            if news.last:
                do = "saves and stops" if news.others == 1 else "save and stop"
                self._say(f"{why}. After {news.seconds:.1f} s {others} {do}", news.seconds)
                return
            self.done.append(Recovery(who, why, round(news.seconds, 3)))
            for node in self._fleet.nodes:
                node.outlived = node.outlived or (node.lost and node.name in news.hosts)
            went_on = f"Training went on with {others} after {news.seconds:.1f} s"
            text = f"{why}. {went_on}; no step was lost"
            self._say(text, news.seconds)
        elif isinstance(news, Joined):
            names = [self._who(slot) for slot in news.slots]
            where = "here" if self._fresh.issuperset(news.slots) else "back"
            self._fresh.difference_update(news.slots)
            text = f"{listed(names)} {'is' if len(names) == 1 else 'are'} {where}"
            self._say(f"{text} after {news.seconds:.1f} s", news.seconds)
        elif isinstance(news, Wait):
            self._begin(self._tell_wait(news))
        elif isinstance(news, NotAgain):
            text = listed([self._who(slot) for slot in news.slots])
            verb = "is" if len(news.slots) == 1 else "are"
            self._say(f"{text} {verb} not started again: {news.why}")
        else:
            last = f" ({news.why.headline})" if news.why and news.why.headline else ""
            self._say(f"{self._who(news.slot)} could not join again{last}: left out")

    async def _tell_wait(self, news: Wait) -> None:
        self._waits = None
        await asyncio.sleep(PAUSE_S)
        if self._members.waiting:  # no spare has taken a place at once
            words = f"waiting for {listed(news.missing)}, with the training's state in memory"
            self._say(f"too few nodes are left: {words}")
            (least, patience_s), here = self._members.awaited, self.hosts - len(news.missing)
            text = f"{counted(here, 'node')} of at least {least}: {words}"
            self._waits = Waiting.now(text, patience_s)

    def _say(self, text: str, seconds: float | None = None) -> None:
        self._screen.note(f"paceline: {text}")
        took: dict[str, Any] = {} if seconds is None else {"seconds": round(seconds, 3)}
        self._recorder.event("recovery", text=text, **took)

    def _who(self, slot: int) -> str:
        return f"rank {slot} on {self._places[slot]}"


def left_out(action: SendAway, again: bool) -> str:
    """What people are told of a host that lives and is left out."""
    later = f", and it is tried again after {action.again_s:.0f} s" if again else ""
    return (f"{action.why} (paceline check tries each direction): {action.host} is left"
            f" out{later}")  # fmt: skip


def _same(one: str, other: str) -> bool:
    """Whether both are one address, however it is written."""
    try:
        return _plain_address(one) == _plain_address(other)
    except ValueError:
        return one == other


def _plain_address(text: str) -> str:
    address = ipaddress.ip_address(text.partition("%")[0])
    return str(getattr(address, "ipv4_mapped", None) or address)


def lost_words(failure: Failure) -> str:
    """``rank 1 on n2 was killed by SIGKILL``."""
    if failure.kind == "signal":
        verb = "was " if failure.headline.startswith("killed") else ""
        return f"{failure.where} {verb}{failure.headline}"
    if failure.kind in ("lost", "agent", "lease"):
        return f"lost {failure.host}: {failure.headline}"
    return failure.describe()


def listed(names: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``; of many the number."""
    if len(names) > 4:
        return f"{', '.join(names[:3])} and {len(names) - 3} more"
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
