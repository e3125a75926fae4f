"""From a job to its end: prepared, executed, brought home, in the body of :meth:`Launcher._run`."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.launch import decide, notify, prepare
from paceline.launch.allowance import STARTS
from paceline.launch.board import Waiting
from paceline.launch.collect import Results
from paceline.launch.control import Actions, Control
from paceline.launch.decide import Supplies
from paceline.launch.fleet import HURRY_S, Fleet, Node, first_of, together, within
from paceline.launch.interrupts import Interrupts, run
from paceline.launch.muster import Dialling, Muster
from paceline.launch.outset import Outset
from paceline.launch.prepare import Inspect, Package, Request, make_plan
from paceline.launch.recorder import Recorder
from paceline.launch.restart import Restarts
from paceline.launch.screen import Screen
from paceline.launch.summary import RunOutcome, is_resumable
from paceline.launch.supply import begin, fork_servers_up, send_copies, warm_up
from paceline.remote.transport import Transport
from paceline.rundir.directory import RunDirectory, fresh_path, short
from paceline.spec import rundir as names
from paceline.spec.errors import NodeError, PacelineError
from paceline.spec.events import Event, Home, at_home
from paceline.spec.failure import HERE, Failure, Recovery, Result
from paceline.spec.hosts import Cluster, Host
from paceline.spec.job import Job, secrets_among
from paceline.spec.plan import NodePlan, Plan
from paceline.transfer.checkpoints import send_checkpoints

if TYPE_CHECKING:
    from paceline.launch.attempt import Attempt

WHERE_S = 1.0  # between two tellings of where everybody is while nodes are waited for
LATE_S = 30.0  # for hosts that have answered to be able to start ranks, when all others are
SOON_S = 0.02  # the logins are under way by then, and leave time for other work
LATER = "paceline.launch.attempt"  # what running ranks need is imported meanwhile


class Launcher:
    """One run.

    Args:
        request: What to run, and where.
        screen: What the user sees.
        directory: The run directory.
        heard: Told what agents say.
    """

    def __init__(self, request: Request, screen: Screen, directory: RunDirectory,
                 heard: Callable[[Event], None]) -> None:  # fmt: skip
        self.plan: Plan | None = None  # the one that is executed, once there is one
        self.recorder = Recorder(directory, screen, request.job.debug.value)
        self.actions = Actions(request.run_id, self.recorder, screen.note)
        self._request = request
        self._heard = heard
        self._screen = screen
        self._directory = directory
        self._results = Results(directory, screen.note)
        self._token = os.urandom(16).hex()
        self._began = time.monotonic()
        self._nodes: Sequence[Node] = ()
        self._attempt: Attempt | None = None
        self._failure: Failure | None = None  # the last attempt's
        self._recoveries: list[Recovery] = []
        self._announced = self._closing = False
        self._missing: dict[str, str] = {}  # hosts that were not there at the start, and why
        self._later: list[Dialling] = []  # their calls, until the muster sees to them
        self._muster: Muster | None = None
        self._fleet: Fleet | None = None
        self._supplies = Supplies()
        self._waits: Waiting | None = None  # outside of an attempt
        self._telling: asyncio.Task[None] | None = None  # of that
        self.recorder.waits = self._waiting
        self._asked: set[asyncio.Task[None]] = set()  # schedulers, about lost nodes

    async def run(self) -> Result:
        """Everything, in order. PacelineError when the job could not be started."""
        task = asyncio.current_task()
        assert task is not None
        with Interrupts(lambda: self._interrupted(task)) as interrupts:
            status, self.actions.interrupts = 1, interrupts
            if threading.current_thread() is threading.main_thread():
                asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, self._save)
            try:
                async with Control(self.actions):
                    result = await self._run(interrupts)
                status = result.exit_code
                return result
            except asyncio.CancelledError:
                if not interrupts.received:
                    raise
                signum = interrupts.received[0]
                return Result(128 + signum, self._failure, interrupted=signum)
            finally:
                await self._request.transport.close(status)

    def _save(self) -> None:
        """SIGUSR2 means to a launcher what it means to ranks: save and go on."""

        async def save() -> None:
            try:
                await self.actions.save()  # which tells of it
            except PacelineError as error:
                self._screen.note(f"paceline: SIGUSR2: {error}")

        self._asked.add(asyncio.ensure_future(save()))

    async def _run(self, interrupts: Interrupts) -> Result:
        # while hosts are waited for, somebody may still edit what they get
        reading = None if self._request.waits else self._read_supplies(SOON_S)
        tries, lost = 0, None
        while True:
            if interrupts.received:  # while it was let go
                raise asyncio.CancelledError
            self._closing, tries = False, tries + 1
            fleet = await self._connect(lost)
            try:
                reading = reading or self._read_supplies()
                with prepare.lost_nodes_named(fleet):
                    try:
                        plan, supplies = await self._get_ready(fleet, reading)
                    except (ConnectionError, NodeError) as error:
                        lost = await self._lost_on_the_way(fleet, error, tries)
                        if lost is None:
                            raise
                        continue
                    result = await self.execute(plan, fleet, supplies, interrupts)
                    await self._results.clear(fleet)
                    return replace(result, recoveries=tuple(self._recoveries))
            finally:
                await self._let_go(fleet, interrupts)

    async def _lost_on_the_way(self, fleet: Fleet, error: Exception,
                               tries: int) -> NodeError | None:  # fmt: skip
        """The loss of a host before anything has begun, after which all begins once more.

        With that host, if it is there again, or without it; ``None`` where it does not.
        """
        request = self._request
        may = request.begins_again and request.transport.redials and request.planned is None
        if not may or tries >= STARTS:
            return None
        await fleet.doubts_settled()  # who cannot reach a host may say so before we know why
        node = next((node for node in fleet.everyone if node.lost), None)
        if node is None:
            return None
        lost = prepare.went_away(fleet, node, node.why or str(error))
        self._screen.note(f"paceline: {lost.message} ({lost.brief}); beginning again, before the"
                          f" first step ({tries} of {STARTS - 1})")  # fmt: skip
        return lost

    async def _let_go(self, fleet: Fleet, interrupts: Interrupts) -> None:
        self._closing = True
        for channel in await asyncio.gather(*(call.stop() for call in self._later)):
            if channel is not None:
                await channel.close()
        self._later.clear()
        at_once = len(interrupts.received) > 1
        keep_warm_s = None if at_once else self._request.keep_warm_s
        await fleet.close(hurry=bool(interrupts.received), keep_warm_s=keep_warm_s)
        for node in [*fleet.everyone, *fleet.gone]:
            self.recorder.agent_log(node)

    def _interrupted(self, task: asyncio.Task[Any]) -> None:
        """Before ranks run, a signal just ends everything; later the attempt deals with it."""
        watched = self._attempt is not None and self._attempt.watching
        if not watched and not self._closing:
            self._closing = True  # a second signal shall not reach into the closing
            task.cancel()

    # --- prepare -----------------------------------------------------------------------------

    async def _connect(self, lost: NodeError | None) -> Fleet:
        """Once more where a host was lost; where it cannot be done without, that is the error."""
        count = len(self._request.hosts)
        self._screen.starting("connecting", 0, count)
        try:
            fleet, self._missing = await prepare.connect(
                self._request, self._on_event, self._on_lost,
                lambda reached: self._screen.starting("connecting", reached, count),
                self._screen.note, lost is not None,
                self._later if self._request.transport.redials else None, self._wait,
            )  # fmt: skip
        except PacelineError:
            if lost is None:
                raise
            raise lost from None
        finally:
            self._wait(None)
        self._fleet, here = fleet, len(fleet.everyone)
        self._screen.starting("connecting", here, here)
        for node in fleet.everyone:
            if node.channel.fingerprint:
                self._screen.note(f"paceline: pinned {node.name}: {node.channel.fingerprint}")
        self._nodes = fleet.nodes
        self.recorder.event("connected", hosts=[node.name for node in fleet.everyone])
        if self._missing:
            who = ", ".join(f"{host} ({why or 'no answer'})" for host, why in self._missing.items())
            self._screen.note(f"paceline: beginning with {here} of {count} hosts, without {who}")
        return fleet

    def _waiting(self) -> Waiting | None:
        """Whether the job waits for nodes, now."""
        running = self._attempt
        return self._waits or (None if running is None else running.recoveries.waits)

    def _wait(self, waiting: Waiting | None) -> None:
        """Where everybody is is written down while nodes are waited for, as while ranks run."""
        if waiting is self._waits:
            return
        self._waits = waiting
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        if waiting is None:
            self.recorder.where()
        else:
            self._telling = asyncio.ensure_future(self._tell_where())

    async def _tell_where(self) -> None:
        while True:
            self.recorder.where()
            await asyncio.sleep(WHERE_S)

    def _read_supplies(self, soon_s: float = 0.0) -> asyncio.Future[Supplies]:
        """What the nodes may have to be sent, read in a thread of its own: it takes a while."""

        async def read() -> Supplies:
            await asyncio.sleep(soon_s)
            supplies = await asyncio.to_thread(prepare.read_and_keep, self._request)
            asyncio.get_running_loop().run_in_executor(None, importlib.import_module, LATER)
            return supplies

        reading = asyncio.ensure_future(read())
        # who fails before anybody asks for it has nothing to say of it
        reading.add_done_callback(lambda read: read.cancelled() or read.exception())
        return reading

    async def _get_ready(self, fleet: Fleet,
                         reading: asyncio.Future[Supplies]) -> tuple[Plan, Supplies]:  # fmt: skip
        """The plan, and on the nodes all that it sends to them."""
        plan, supplies = await self._prepare(fleet, reading)
        await self._supply(plan, fleet, supplies)
        return plan, supplies

    async def _prepare(self, fleet: Fleet,
                       supplies: asyncio.Future[Supplies]) -> tuple[Plan, Supplies]:  # fmt: skip
        """The plan; new nodes begin to import meanwhile, for that takes longest."""
        request = self._request
        notes = prepare.approve(request, fleet, self._inspect)
        planning = prepare.prepare(request, fleet, supplies, notes)
        warming = warm_up(fleet, request, supplies, self._directory, self._token)
        self._importing(fleet.nodes)
        plan, _ = await together([planning, warming])
        return plan, supplies.result()

    def _inspect(self, hosts: Sequence[Host], facts: Mapping[str, Any],
                 noise: Mapping[str, str]) -> list[str]:  # fmt: skip
        self._directory.write_json(names.HOSTS, dict(facts))
        inspect = self._request.inspect
        return inspect(hosts, facts, noise) if inspect is not None else []

    def _importing(self, nodes: Sequence[Node]) -> None:
        """How far the imports are, for who waits for them."""
        if preload := self._request.job.preload:
            done = sum(1 for node in nodes if node.loaded)
            module = preload[0].split(".")[0].rstrip("?")
            self._screen.starting(f"importing {module}", done, len(nodes))

    # --- execute -----------------------------------------------------------------------------

    async def execute(self, plan: Plan, fleet: Fleet, supplies: Supplies,
                      interrupts: Interrupts) -> Result:  # fmt: skip
        """Does what the plan says; after a failure again, all in step, as often as was allowed.

        Args:
            plan: What runs where.
            fleet: The nodes, in the plan's order; they have what the plan sends to them.
            supplies: What that was.
            interrupts: The user's signals.
        """
        job = self._request.job
        restarts = Restarts(self._request, fleet, self._screen.note, self._wait)
        self._supplies = supplies
        muster = self._muster = Muster(
            self._request.transport, fleet, lambda host: decide.python_of(job, host),
            lambda node: self._fit_out(node, fleet, supplies), self._came, self._screen.note,
        )  # fmt: skip
        self.recorder.called = muster.ways_back
        while self._later:
            muster.go_on(self._later.pop())
        starts = 0
        try:
            plan = await self._with_late_ones(plan, fleet, supplies)
            while True:
                starts, began, attempt = starts + 1, time.monotonic(), None
                outset: Outset | None = Outset(job, plan.world_size)
                never_ran: Exception | None = None
                try:
                    if starts > 1:
                        plan = await self._once_more(plan, fleet, supplies, restarts.counted)
                    result, attempt = await self._start(plan, fleet, restarts, interrupts)
                    outset = None if attempt.recoveries.done else attempt.outset
                except (ConnectionError, NodeError) as error:
                    if (lost := lost_between(fleet)) is None:
                        raise
                    result, never_ran = Result(1, lost), error if starts == 1 else None
                leaving = attempt.recoveries.leaving if attempt else []
                recalled = attempt is not None and attempt.recalled
                failure, brought = result.failure, False
                if attempt is not None and result.exit_code == 0 and self._goes_on_from_copies(
                    attempt, interrupts
                ):  # fmt: skip
                    await self._bring_home(fleet, interrupts)
                    failure, outset, brought = self._results.lacking(fleet), None, True
                self._failure = failure
                if brought and failure is not None and failure.kind != "lost":
                    break  # no other host could change that: the disk here is full
                if interrupts.received or (failure is None and not recalled):
                    break
                if attempt is not None and (why := attempt.recoveries.refused):
                    self._screen.note(f"paceline: not started again: {why}")
                    break
                if leaving and self._request.elastic:
                    await self._results.bring_home(fleet)
                ran_s = time.monotonic() - began
                on = failure is None or await restarts.allowed(failure, leaving, ran_s, outset)
                if on and await restarts.line_up(muster):
                    continue
                if never_ran is not None and not self._request.elastic:
                    raise never_ran
                break
        finally:
            await muster.close()
            self._screen.unwatch()
        if not brought:
            await self._bring_home(fleet, interrupts)
        if interrupts.received and failure is not None:
            signum = interrupts.received[0]
            return replace(result, exit_code=128 + signum, interrupted=signum)
        lacking = failure if brought else self._results.lacking(fleet)
        if result.exit_code == 0 and lacking is not None:
            self._failure = lacking
            return replace(result, exit_code=1, failure=lacking)
        return result

    def _goes_on_from_copies(self, attempt: Attempt, interrupts: Interrupts) -> bool:
        """Whether other hosts could make the results again if they are lost with rank 0's."""
        wanted = not (attempt.recalled or interrupts.received)
        return wanted and self._request.elastic and attempt.outset.session

    async def _bring_home(self, fleet: Fleet, interrupts: Interrupts) -> None:
        """The results; who has asked twice for the end does not wait for large ones."""
        bringing = self._results.bring_home(fleet)
        if len(interrupts.received) < 2:  # one that comes from now on ends this, too
            await bringing
        elif not await within(bringing, HURRY_S):
            self._screen.note("paceline: not all results came: the next start in this run directory"
                              " finds what lies on the hosts")  # fmt: skip

    async def _supply(self, plan: Plan, fleet: Fleet, supplies: Supplies) -> None:
        """Sends what the plan says is sent; tells of which folders here those are copies."""
        self._plan_is(plan)
        self._results.expect_from(fleet.first)
        parts = {part.host: part.copies for part in (*plan.nodes, *plan.spares)}
        wanted = [(node, parts[node.name]) for node in fleet.everyone]
        await send_copies(wanted, supplies, plan.run_id, self._screen.sending)
        for node in fleet.everyone:
            self._tell_homes(node, supplies)

    def _tell_homes(self, node: Node, supplies: Supplies) -> None:
        trees = {"code": supplies.code, "paceline": supplies.package}
        for name, tree in trees.items():
            if tree is None or name not in node.copies:
                continue
            place = (node.name, node.copies[name][0], str(tree.root))
            if place not in self._screen.homes:
                self._screen.homes.append(place)
                self.recorder.event("copied", node.name, copy=place[1], home=place[2])

    async def _fit_out(self, node: Node, fleet: Fleet, supplies: Supplies) -> None:
        """A node that came late: checked, sent what the others have, its fork server warm."""
        request = self._request
        self.recorder.event("connected", hosts=[node.name])
        await together([
            prepare.get_to_know(node, fleet, request, supplies),
            begin(node, request, supplies.package, self._directory, self._token),
        ])  # fmt: skip
        assert node.found is not None
        copies = decide.place_on(request.job, node.found, supplies, request.run_id).copies
        await send_copies([(node, copies)], supplies, request.run_id, self._screen.sending)
        self._tell_homes(node, supplies)
        await fork_servers_up(fleet, [node], request.job)

    def _came(self, node: Node) -> None:
        """A node could start ranks from now on: they start again with it, where it is wanted."""
        running = self._attempt
        if running is None:
            return
        if running.recoveries.open and running.recoveries.hosts < self._request.most:
            self._take_in(node, running)
            return
        if running.recoveries.spare_came():
            return
        if not running.recoveries.possible and len(running.plan.nodes) < self._request.most:
            running.recall()
        else:
            self._screen.note(f"paceline: {node.name} is here, as a spare")

    def _plan_is(self, plan: Plan) -> None:
        self.plan = plan
        self._directory.write_json(names.PLAN, plan.to_json())

    async def _with_late_ones(self, plan: Plan, fleet: Fleet, supplies: Supplies) -> Plan:
        """The plan with hosts, too, that have come while the others imported.

        Who has been reached by then is waited for: to come in later costs the others more.
        """
        request, muster = self._request, self._muster
        assert muster is not None
        if not muster.called:
            return plan
        with contextlib.suppress(ConnectionError, NodeError):  # which the start itself finds, too
            await fork_servers_up(fleet, fleet.nodes, request.job)

        def come() -> list[Node]:
            return [one for one in fleet.spares if one.name in self._missing and one.could_start]

        room = request.most - len(fleet.nodes)
        await muster.until(lambda: len(come()) >= room or not muster.reached, LATE_S)
        late = come()[:room]
        first = fleet.first.found
        if not late or first is None:
            return plan
        fleet.seat([*fleet.nodes, *late])
        self._nodes, port = fleet.nodes, plan.settings["master_port"]
        if first.network.address != plan.master_addr:
            asked = request.job.master_port
            port = await prepare.hold_port(fleet.first, first.network.address, asked)
        plan = replace(prepare.plan_of(request, fleet, supplies, port, ()), notes=plan.notes)
        self._plan_is(plan)
        names = ", ".join(node.name for node in late)
        self._screen.note(f"paceline: {names} came in time: beginning with {len(fleet.nodes)}"
                          " hosts")  # fmt: skip
        return plan

    async def _start(self, plan: Plan, fleet: Fleet, restarts: Restarts,
                     interrupts: Interrupts) -> tuple[Result, Attempt]:  # fmt: skip
        """One attempt, from warm fork servers to the end of the last rank."""
        from paceline.launch.attempt import Attempt

        job = self._request.job
        await fork_servers_up(fleet, fleet.nodes, job)
        if not self._announced:  # the first start may have come to nothing
            self._announced = True
            self._screen.started()
            self._announce(plan)
            logs = short(self._directory.path / names.LOGS)
            self._screen.watch(
                self.recorder.board, title=short(self._directory.path), logs=logs,
                seconds=time.monotonic() - self._began, wishes=self.actions,
            )  # fmt: skip
        attempt = self._attempt = Attempt(
            plan, job, fleet, interrupts, self._screen, self.recorder, restarts.allowance,
            self._stand_in, self._rejoin if self._request.transport.redials else None,
        )  # fmt: skip
        self.actions.runs(attempt)
        try:
            result = await attempt.run()
        finally:
            self._attempt = None
            self.actions.runs(None)
            self._recoveries += attempt.recoveries.done
        await first_of(asyncio.gather(*self._asked), interrupts.wait(2))
        if result.exit_code == 0 and (text := attempt.describe_independence()):
            self._screen.note(f"paceline: {text}")
        return result, attempt

    def _take_in(self, node: Node, running: Attempt) -> None:
        """A host that was late gets ranks in a running session."""
        request, fleet = self._request, self._fleet
        assert fleet is not None
        assert node.found is not None
        count = decide.processes_on(request.job, node.host, node.facts).value
        first = running.recoveries.next_slot
        part = decide.further_part(
            request.job, node.found, self._supplies, request.run_id, len(fleet.nodes),
            range(first, first + count),
        )  # fmt: skip
        fleet.seat([*fleet.nodes, node])
        running.recoveries.take_in(part)

    def _stand_in(self, lost: NodePlan) -> NodePlan | None:
        """A spare takes over the ranks of a lost host in a running session; that is dialled."""
        request, fleet, muster = self._request, self._fleet, self._muster
        assert fleet is not None
        spare = next((one for one in fleet.spares if one.could_start and one.found), None)
        if spare is None or spare.found is None or not request.elastic:
            return None
        if muster is not None:
            muster.call_again(fleet.named(lost.host))
        fleet.take_place(spare, lost.host)
        return decide.further_part(
            request.job, spare.found, self._supplies, request.run_id, lost.node_rank,
            [rank.rank for rank in lost.ranks],
        )  # fmt: skip

    async def _rejoin(self, host: str) -> None:
        """Has a lost host take part in the running job again, however long it takes."""
        assert self._fleet is not None
        assert self._muster is not None
        lost = self._fleet.named(host)
        self._fleet.take_place(await self._muster.bring(lost), host)

    async def _once_more(self, plan: Plan, fleet: Fleet, supplies: Supplies,
                         restarts: int) -> Plan:  # fmt: skip
        """The plan of a further attempt, on the nodes that the fleet has now."""
        first, asked = fleet.first, self._request.job.master_port
        assert first.found is not None
        port = await prepare.hold_port(first, first.found.network.address, asked)
        hosts = [part.host for part in plan.nodes]
        if hosts != [node.name for node in fleet.nodes]:
            found = prepare.plan_of(self._request, fleet, supplies, port, ())
            plan = replace(found, notes=plan.notes, attempt=plan.attempt)
        if self._results.first is not first:
            if not first.shared_run_dir:
                await send_checkpoints(first.channel, first.run_folder, self._directory)
            self._results.expect_from(first)
        plan = decide.next_attempt(plan, plan.attempt + 1, port, restarts)
        self._plan_is(plan)
        self._nodes = fleet.nodes
        return plan

    async def _tell_why(self, name: str) -> None:
        """What the scheduler knows of a lost node, in its own words."""
        for host in self._request.hosts:
            if host.name == name and (words := await self._request.transport.why(host)):
                self._screen.note(f"paceline: {words}")
                self.recorder.event("scheduler", name, words=words)

    def _announce(self, plan: Plan) -> None:
        ranks, hosts = plan.world_size, len(plan.nodes)
        where = plan.nodes[0].host if hosts == 1 else f"{hosts} hosts"
        self._screen.note(
            f"paceline: {ranks} rank{'s' * (ranks > 1)} on {where}, "
            f"run directory {short(self._directory.path)}"
        )
        for text in plan.notes:
            self._screen.note(f"paceline: note: {text}")

    # --- what agents say ---------------------------------------------------------------------

    def _on_event(self, node: Node, event: Event) -> None:
        if event.kind in ("imported", "import failed", "fork server died"):
            node.take_fork_server(event)
            self._importing(self._nodes)
            if event.kind == "import failed" and self._spare(node):
                self._screen.note(f"paceline: {node.name} is no spare: its imports failed")
        elif event.kind == "connection restored":
            what = f"the connection to {node.name} was lost"
            self._screen.note(f"paceline: {what}; dialled again after {event['seconds']:.1f} s")
        if self._attempt is not None:
            self._attempt.take(node, event)
            if event.kind == "regrouped" and self._fleet is not None:
                with contextlib.suppress(ConnectionError):  # a spare has just taken its place
                    first = self._fleet.named(self._attempt.recoveries.first_host)
                    self._results.expect_from(first)
        self._results.heard(node, event)
        self.actions.heard(event)
        self._heard(event)
        try:
            self.recorder.take(event)
        except NodeError as error:  # a run that leaves no trace is not worth its time
            if self._attempt is not None:
                headline = str(error)
                failure = Failure("record", HERE, None, time.monotonic(), headline=headline)
                self._attempt.fail(failure)

    def _on_lost(self, node: Node, why: str) -> None:
        if self._attempt is not None:
            self._attempt.node_lost(node, why)
            self._asked.add(asyncio.ensure_future(self._tell_why(node.name)))
        if self._muster is not None and self._spare(node):
            self._muster.call_again(node)
        self.recorder.event("lost", node.name, why=why)

    def _spare(self, node: Node) -> bool:
        return self._fleet is not None and any(node is spare for spare in self._fleet.spares)


def _nobody(event: Event) -> None:
    """Is told what only the launcher wants to know."""


def lost_between(fleet: Fleet) -> Failure | None:
    """The loss of a node, or of its fork server, before the ranks of an attempt ran."""
    now = time.monotonic()
    for node in fleet.nodes:
        if node.lost and (ours := fleet.own_fault(node)):
            return Failure("launcher", HERE, None, now, headline=ours)
        if node.lost:
            return Failure("lost", node.name, None, now, headline=node.why)
    for node in fleet.nodes:
        if node.trouble is not None and node.fork_server_died:
            return Failure("forkserver", node.name, None, now, headline=node.trouble.text)
    return None


@dataclass(frozen=True, slots=True)
class Left:
    """What the launching machine has settled for a run that it leaves to a supervisor.

    Attributes:
        run_id: Names the run.
        supplies: What the nodes may have to be sent, as it was on the launching machine; ``None``
            where that is this machine.
        heard: Told what agents say.
    """

    run_id: str
    supplies: Supplies | None
    heard: Callable[[Event], None]


# --- the whole as a function ------------------------------------------------------------------


def secrets_of(job: Job, cluster: Cluster) -> tuple[str, ...]:
    """Values that no file of the run may show."""
    on_hosts = [value for host in cluster.hosts for value in secrets_among(host.env)]
    return (*job.environment.secrets(), *on_hosts, *notify.secrets_among(job.notify))


def request_of(job: Job, cluster: Cluster, transport: Transport, package: Package = False,
               inspect: Inspect | None = None, plan: Plan | None = None,
               keep_warm_s: float = 0.0, left: Left | None = None) -> Request:  # fmt: skip
    """A job on the hosts of a cluster that it asks for. SettingError when there are too few."""
    hosts = decide.choose_hosts(job, cluster)
    request = Request(job, hosts, transport, package, tuple(cluster.notes), inspect, plan,
                      keep_warm_s, among=cluster.among)  # fmt: skip
    if left is not None:
        return replace(request, run_id=left.run_id, supplies=left.supplies)
    return replace(request, run_id=plan.run_id) if plan else request


def plan_job(job: Job, cluster: Cluster, transport: Transport, package: Package = False,
             inspect: Inspect | None = None) -> Plan:  # fmt: skip
    """The plan that :func:`run_job` would execute."""
    return run(make_plan(request_of(job, cluster, transport, package, inspect)))


def run_job(job: Job, cluster: Cluster, transport: Transport, screen: Screen, *,
            run_dir: Path | None, parent: Path, package: Package = False,
            inspect: Inspect | None = None, plan: Plan | None = None,
            keep_warm_s: float = 0.0, left: Left | None = None) -> RunOutcome:  # fmt: skip
    """Runs a job to its end.

    Args:
        job: What to run.
        cluster: Where.
        transport: How the agents are started and spoken to.
        screen: What the user sees.
        run_dir: The run directory; ``None`` makes a fresh one below ``parent``.
        parent: Folder of run directories.
        package: Ship this installation's ``paceline`` to the nodes, or parts of it.
        inspect: Looks at the nodes' facts before anything is started.
        plan: Made by :func:`plan_job` of the same values: it is executed, or the job not started.
        keep_warm_s: How long the hosts stay ready for the next command of this user, in seconds.
        left: What a launching machine that is another one has settled.

    Raises:
        PacelineError: The job could not be started.
    """
    began = time.monotonic()
    path = (run_dir or fresh_path(parent, job.name)).absolute()
    request = request_of(job, cluster, transport, package, inspect, plan, keep_warm_s,
                         left)  # fmt: skip
    directory = RunDirectory(path, secrets_of(job, cluster), request.run_id)
    return _to_the_end(request, screen, directory, began, left)


def _to_the_end(request: Request, screen: Screen, directory: RunDirectory,
                began: float, left: Left | None) -> RunOutcome:  # fmt: skip
    """The run itself, and what it left. PacelineError, also in its files, when it never began."""
    run_id = request.run_id
    try:
        launcher = Launcher(request, screen, directory, left.heard if left else _nobody)
        try:
            result = run(launcher.run())
        except PacelineError as error:
            result = Result(error.exit_code, error=error.render())
            write_result(directory, run_id, result, began, {})
            raise
        result = _for_reader(result, screen.homes, directory)
        if result.failure is None and not directory.is_owned:
            headline = f"the run directory {directory.path} was removed while the run went on"
            removed = Failure("record", HERE, None, time.monotonic(), headline=headline)
            result = replace(result, exit_code=result.exit_code or 1, failure=removed)
        write_result(directory, run_id, result, began, launcher.recorder.metrics)
    finally:
        screen.close()
        directory.close()
    recorder = launcher.recorder
    seconds = time.monotonic() - began
    failure = result.failure
    told = failure is not None and failure.rank is not None and screen.before_eyes(
        failure.host, failure.rank)  # fmt: skip
    return RunOutcome(
        directory.path, result, recorder.events, recorder.metrics, seconds,
        directory.begins, is_resumable(result, recorder.events),
        launcher.plan.world_size if launcher.plan else 0, tuple(screen.homes), told,
    )  # fmt: skip


def _for_reader(result: Result, homes: Sequence[Home], directory: RunDirectory) -> Result:
    """The failure with the user's own paths, and without secrets."""
    failure = result.failure
    if failure is None:
        return result
    headline, traceback = (
        directory.redacted(at_home(homes, failure.host, text))
        for text in (failure.headline, failure.traceback)
    )
    return replace(result, failure=replace(failure, headline=headline, traceback=traceback))


def write_result(directory: RunDirectory, run_id: str, result: Result, began: float,
                 metrics: dict[str, Any]) -> None:  # fmt: skip
    """How the run ended, for ``result.json``; ``began`` by the monotonic clock."""
    about = {
        "run_id": run_id,
        "exit_code": result.exit_code,
        "seconds": round(time.monotonic() - began, 3),
        "metrics": metrics,
    }
    directory.free_reserve()
    directory.write_json(names.RESULT, {**about, **result.to_json()})
