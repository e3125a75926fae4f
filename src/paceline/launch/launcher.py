"""One run: connects the hosts, plans, hands over to the driver, collects the results, reports."""

from __future__ import annotations

import asyncio
import importlib
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.launch.control import Actions, Control
from paceline.launch.elastic.driver import ElasticDriver
from paceline.launch.elastic.retry_policy import MAX_STARTS
from paceline.launch.interrupts import Interrupts
from paceline.launch.nodes import survey
from paceline.launch.nodes.connect import connect
from paceline.launch.nodes.fleet import Fleet, together
from paceline.launch.nodes.provisioner import Provisioner
from paceline.launch.planning.planner import Supplies
from paceline.launch.planning.request import Request
from paceline.launch.recorder import Recorder
from paceline.launch.results.collector import Results
from paceline.launch.terminal.screen import Screen
from paceline.rundir.directory import RunDirectory, short
from paceline.spec import rundir as names
from paceline.spec.errors import NodeError, PacelineError
from paceline.spec.events import Event
from paceline.spec.failure import Result
from paceline.spec.hosts import Host
from paceline.spec.plan import Plan

READ_DELAY_S = 0.02  # the logins are under way by then, and leave time for other work
LATER = "paceline.launch.elastic.attempt"  # what running ranks need is imported meanwhile


class Launcher:
    """One run.

    Args:
        request: What to run, and where.
        screen: What the user sees.
        directory: The run directory.
        heard: Told what agents say.

    Attributes:
        driver: Runs the attempts; has the plan.
        recorder: Writes down what happens.
    """

    def __init__(self, request: Request, screen: Screen, directory: RunDirectory,
                 heard: Callable[[Event], None]) -> None:  # fmt: skip
        self.recorder = Recorder(directory, screen, request.job.debug.value)
        self._actions = Actions(request.run_id, self.recorder, screen.note)
        self._request, self._screen, self._directory = request, screen, directory
        self._results = Results(directory, screen.note)
        self._provisioner = Provisioner(request, directory, screen, self.recorder)
        self.driver = ElasticDriver(request, self._provisioner, self._results, self._actions,
                                    screen, self.recorder, heard, self._announce)  # fmt: skip
        self._began = time.monotonic()
        self._is_closing = False
        self._saves: set[asyncio.Task[None]] = set()

    async def run(self) -> Result:
        """Everything, in order. PacelineError when the job could not be started."""
        task = asyncio.current_task()
        assert task is not None
        with Interrupts(lambda: self._interrupted(task)) as interrupts:
            status, self._actions.interrupts = 1, interrupts
            if threading.current_thread() is threading.main_thread():
                asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, self._save)
            try:
                async with Control(self._actions):
                    result = await self._run(interrupts)
                status = result.exit_code
                return result
            except asyncio.CancelledError:
                if not interrupts.received:
                    raise
                signum = interrupts.received[0]
                return Result(128 + signum, self.driver.failure, interrupted=signum)
            finally:
                await self._request.transport.close(status)

    def _save(self) -> None:
        """SIGUSR2 means to a launcher what it means to ranks: save and go on."""

        async def save() -> None:
            try:
                await self._actions.save()  # which tells of it
            except PacelineError as error:
                self._screen.note(f"paceline: SIGUSR2: {error}")

        self._saves.add(asyncio.ensure_future(save()))

    async def _run(self, interrupts: Interrupts) -> Result:
        # while hosts are waited for, the user may still edit what they get
        reading = None if self._request.awaits_hosts else self._read_supplies(READ_DELAY_S)
        number, lost = 0, None
        while True:
            if interrupts.received:  # while the fleet was let go
                raise asyncio.CancelledError
            self._is_closing, number = False, number + 1
            fleet = await self._connect(lost)
            try:
                reading = reading or self._read_supplies()
                with survey.naming_lost_nodes(fleet):
                    try:
                        plan = await self._get_ready(fleet, reading)
                    except (ConnectionError, NodeError) as error:
                        lost = await self._lost_before_plan(fleet, error, number)
                        if lost is None:
                            raise
                        continue
                    result = await self.execute(plan, fleet, interrupts)
                    await self._results.clear(fleet)
                    return replace(result, recoveries=tuple(self.driver.recoveries))
            finally:
                await self._let_go(fleet, interrupts)

    async def _lost_before_plan(self, fleet: Fleet, error: Exception,
                                number: int) -> NodeError | None:  # fmt: skip
        """The loss of a host before anything ran, after which all hosts are connected again.

        With that host, if it is there again, or without it; ``None`` if that is not done.
        """
        request, policy = self._request, self.driver.policy
        redials = request.transport.redials and request.planned is None
        if not redials or not policy.reconnects(number):
            return None
        await fleet.silences_resolved()  # who cannot reach a host may say so before we know why
        node = next((node for node in fleet.everyone if node.lost), None)
        if node is None:
            return None
        lost = survey.startup_loss(fleet, node, node.loss_reason or str(error))
        self._screen.note(f"paceline: {lost.message} ({lost.brief}); beginning again, before the"
                          f" first step ({number} of {MAX_STARTS - 1})")  # fmt: skip
        return lost

    async def _let_go(self, fleet: Fleet, interrupts: Interrupts) -> None:
        self._is_closing = True
        for channel in await asyncio.gather(*(call.stop() for call in self.driver.dialling)):
            if channel is not None:
                await channel.close()
        self.driver.dialling.clear()
        at_once = len(interrupts.received) > 1
        keep_warm_s = None if at_once else self._request.keep_warm_s
        await fleet.close(hurry=bool(interrupts.received), keep_warm_s=keep_warm_s)
        for node in [*fleet.everyone, *fleet.former]:
            self.recorder.agent_log(node.name, node.channel.stderr)

    def _interrupted(self, task: asyncio.Task[Any]) -> None:
        """Before ranks run, a signal just ends everything; later the attempt deals with it."""
        attempt = self.driver.attempt
        if not (attempt is not None and attempt.is_watching) and not self._is_closing:
            self._is_closing = True  # a second signal shall not reach into the closing
            task.cancel()

    # --- connect and plan --------------------------------------------------------------------

    async def _connect(self, lost: NodeError | None) -> Fleet:
        """Connects the hosts; ``lost``: the error, if this is once more and cannot be done."""
        request, driver, note = self._request, self.driver, self._screen.note
        count = len(request.hosts)
        self._screen.starting("connecting", 0, count)
        try:
            fleet, missing = await connect(
                request, driver.on_event, driver.on_lost,
                lambda reached: self._screen.starting("connecting", reached, count),
                note, lost is not None,
                driver.dialling if request.transport.redials else None, self.recorder.wait,
            )  # fmt: skip
        except PacelineError:
            if lost is None:
                raise
            raise lost from None
        finally:
            self.recorder.wait(None)
        driver.fleet, driver.missing, here = fleet, missing, len(fleet.everyone)
        self._screen.starting("connecting", here, here)
        for node in fleet.everyone:
            if node.channel.fingerprint:
                note(f"paceline: pinned {node.name}: {node.channel.fingerprint}")
        self.recorder.event("connected", hosts=[node.name for node in fleet.everyone])
        if missing:
            hosts = ", ".join(f"{host} ({why or 'no answer'})" for host, why in missing.items())
            note(f"paceline: beginning with {here} of {count} hosts, without {hosts}")
        return fleet

    def _read_supplies(self, delay_s: float = 0.0) -> asyncio.Future[Supplies]:
        """What the nodes may have to be sent, read in a thread: it takes a while."""

        async def read() -> Supplies:
            await asyncio.sleep(delay_s)
            supplies = await asyncio.to_thread(survey.read_and_keep, self._request)
            asyncio.get_running_loop().run_in_executor(None, importlib.import_module, LATER)
            return supplies

        reading = asyncio.ensure_future(read())
        # an error is reported by who needs the supplies, not by who never comes so far
        reading.add_done_callback(lambda read: read.cancelled() or read.exception())
        return reading

    async def _get_ready(self, fleet: Fleet, reading: asyncio.Future[Supplies]) -> Plan:
        """Makes the plan and sends the nodes what it says.

        New nodes begin to import meanwhile, for that takes longest.
        """
        notes = survey.approve(self._request, fleet, self._inspect)
        planning = survey.prepare(self._request, fleet, reading, notes)
        warming = self._provisioner.start_fork_servers(fleet, reading)
        self.driver.show_imports()
        plan: Plan
        plan, _ = await together([planning, warming])
        self._provisioner.supplies = reading.result()
        self.driver.set_plan(plan)
        self._results.expect_from(fleet.first)
        await self._provisioner.send(plan, fleet)
        return plan

    def _inspect(self, hosts: Sequence[Host], facts: Mapping[str, Any],
                 noise: Mapping[str, str]) -> list[str]:  # fmt: skip
        self._directory.write_json(names.HOSTS, dict(facts))
        inspect = self._request.inspect
        return inspect(hosts, facts, noise) if inspect is not None else []

    # --- execute -----------------------------------------------------------------------------

    async def execute(self, plan: Plan, fleet: Fleet, interrupts: Interrupts) -> Result:
        """Has the driver do what the plan says, and brings the results home.

        Args:
            plan: What runs where.
            fleet: The nodes, in the plan's order; they have what the plan sends to them.
            interrupts: The user's signals.
        """
        ending = await self.driver.run(plan, interrupts)
        if not ending.is_collected:
            await self._results.bring_home_unless_hurried(fleet, interrupts)
        result, failure = ending.result, ending.failure
        if interrupts.received and failure is not None:
            signum = interrupts.received[0]
            return replace(result, exit_code=128 + signum, interrupted=signum)
        lacking = failure if ending.is_collected else self._results.lacking(fleet)
        if result.exit_code == 0 and lacking is not None:
            self.driver.failure = lacking
            return replace(result, exit_code=1, failure=lacking)
        return result

    def _announce(self, plan: Plan) -> None:
        """Shows what starts, once all nodes can start ranks."""
        path, ranks, hosts = self._directory.path, plan.world_size, len(plan.nodes)
        where = plan.nodes[0].host if hosts == 1 else f"{hosts} hosts"
        self._screen.started()
        self._screen.note(
            f"paceline: {ranks} rank{'s' * (ranks > 1)} on {where}, run directory {short(path)}"
        )
        for text in plan.notes:
            self._screen.note(f"paceline: note: {text}")
        self._screen.watch(
            self.recorder.board, title=short(path), logs=short(path / names.LOGS),
            seconds=time.monotonic() - self._began, wishes=self._actions,
        )  # fmt: skip
