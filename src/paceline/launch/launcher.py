"""From a job to its end. The order of things is the body of :meth:`Launcher.run`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.launch import again, decide, staging
from paceline.launch.attempt import Attempt
from paceline.launch.fleet import Fleet
from paceline.launch.interrupts import Interrupts
from paceline.launch.node import Node
from paceline.launch.reach import Networks, find_networks, hold_port
from paceline.launch.recorder import Recorder
from paceline.launch.screen import Screen
from paceline.launch.staging import Package
from paceline.remote.channel import Event
from paceline.remote.transport import Reached, Transport, nobody
from paceline.rundir.directory import RunDirectory, safe, short
from paceline.spec import rundir as names
from paceline.spec.errors import NodeError, PacelineError
from paceline.spec.failure import HERE, Failure, Result
from paceline.spec.hosts import Host
from paceline.spec.job import Job
from paceline.spec.plan import Plan
from paceline.transfer.checkpoints import CheckpointFetcher
from paceline.transfer.results import Fetcher

# hosts, facts by host, what start-up files printed by host -> notes for the user
Inspect = Callable[[Sequence[Host], Mapping[str, Any], Mapping[str, str]], list[str]]


class Launcher:
    """One run.

    Args:
        job: What to run.
        hosts: Where; rank 0 on the first.
        transport: How the agents are started and spoken to.
        run_id: Names the run.
        screen: What the user sees.
        directory: The run directory.
        package: Ship this installation's ``paceline`` to the nodes (recipes need it), or parts.
        notes: What was decided before and the user should know.
        inspect: Looks at the nodes' facts; returns further notes or raises PacelineError.
    """

    def __init__(self, job: Job, hosts: Sequence[Host], transport: Transport, run_id: str,
                 screen: Screen, directory: RunDirectory, package: Package = False,
                 notes: Sequence[str] = (), inspect: Inspect | None = None) -> None:  # fmt: skip
        self._job = job
        self._hosts = tuple(hosts)
        self._transport = transport
        self._run_id = run_id
        self._screen = screen
        self._directory = directory
        self._package = package
        self._notes = list(notes)
        self._inspect = inspect
        self._token = os.urandom(16).hex()
        self._fetcher = Fetcher(directory.path)
        self._attempt: Attempt | None = None
        self._checkpoints: CheckpointFetcher | None = None  # of rank 0, where they have to come
        self._all_home = False
        self._elsewhere: list[tuple[Node, str]] = []  # results that found no room in their place
        self._failure: Failure | None = None  # the last attempt's
        self._closing = False
        self._nodes: Sequence[Node] = ()
        self.ranks = 0  # of the plan, once there is one
        self.recorder = Recorder(directory, screen)

    async def run(self) -> Result:
        """Everything, in order. PacelineError when the job could not be started."""
        task = asyncio.current_task()
        assert task is not None
        with Interrupts(lambda: self._interrupted(task)) as interrupts:
            status = 1
            try:
                result = await self._run(interrupts)
                status = result.exit_code
                return result
            except asyncio.CancelledError:
                if not interrupts.received:
                    raise
                signum = interrupts.received[0]
                return Result(128 + signum, self._failure, interrupted=signum)
            finally:
                await self._transport.close(status)

    async def _run(self, interrupts: Interrupts) -> Result:
        fleet = await self._connect()
        try:
            self._notes += check_nodes(fleet, self._job)
            self._directory.write_json(names.HOSTS, fleet.facts())
            if self._inspect is not None:
                self._notes += self._inspect(fleet.hosts, fleet.facts(), noise_of(fleet))
            networks, code = await self._stage(fleet)
            return await self._attempts(fleet, interrupts, networks, code)
        except ConnectionError as error:
            lost = next((node for node in fleet.nodes if node.lost), fleet.first)
            raise staging.went_away(fleet, lost, lost.why or str(error)) from None
        finally:
            self._closing = True
            await fleet.close(hurry=bool(interrupts.received))
            for node in fleet.nodes:
                self.recorder.agent_log(node)

    def _interrupted(self, task: asyncio.Task[Any]) -> None:
        """Before ranks run, a signal just ends everything; later the attempt deals with it."""
        watched = self._attempt is not None and self._attempt.watching
        if not watched and not self._closing:
            self._closing = True  # a second signal shall not reach into the closing
            task.cancel()

    async def _connect(self) -> Fleet:
        count = len(self._hosts)
        self._screen.starting("connecting", 0, count)
        fleet = await connect(
            self._job, self._hosts, self._transport, self._on_event, self._on_lost,
            lambda reached: self._screen.starting("connecting", reached, count),
        )  # fmt: skip
        self._screen.starting("connecting", count, count)
        for node in fleet.nodes:
            if node.channel.fingerprint:
                self._screen.note(f"paceline: pinned {node.name}: {node.channel.fingerprint}")
        self._nodes = fleet.nodes
        self.recorder.event("connected", hosts=[node.name for node in fleet.nodes])
        return fleet

    async def _stage(self, fleet: Fleet) -> tuple[Networks, dict[str, decide.Code]]:
        """Network and places at once, for both take their time."""
        staged = asyncio.ensure_future(self._place(fleet))
        self._importing(fleet.nodes)
        try:
            networks, notes = await find_networks(fleet, self._job)
            self._notes += notes
            return networks, await staged
        finally:
            staged.cancel()
            await asyncio.gather(staged, return_exceptions=True)

    async def _place(self, fleet: Fleet) -> dict[str, decide.Code]:
        """Readies the nodes that are new; where the code is on each."""
        supplies = await asyncio.to_thread(staging.gather_supplies, self._job, fleet, self._package)
        places = await staging.stage(
            fleet, self._job, supplies, self._directory, self._run_id, self._token
        )
        self._know_paths(fleet, supplies)
        return places

    def _importing(self, nodes: Sequence[Node]) -> None:
        """How far the imports are, for who waits for them."""
        if self._job.preload:
            done = sum(1 for node in nodes if node.loaded)
            module = self._job.preload[0].split(".")[0].rstrip("?")
            self._screen.starting(f"importing {module}", done, len(nodes))

    def _know_paths(self, fleet: Fleet, supplies: staging.Supplies) -> None:
        """Which folders here the shipped copies are copies of."""
        trees = {"code": supplies.code, "paceline": supplies.package}
        for node in fleet.nodes:
            for name, tree in trees.items():
                if tree is None or name not in node.copies:
                    continue
                place = (node.name, node.copies[name][0], str(tree.root))
                if place not in self._screen.homes:
                    self._screen.homes.append(place)
                    self.recorder.event("copied", node.name, copy=place[1], home=place[2])

    async def _attempts(self, fleet: Fleet, interrupts: Interrupts, networks: Networks,
                        code: dict[str, decide.Code]) -> Result:  # fmt: skip
        """Starts all nodes; after a failure again, all in step, as often as was allowed."""
        allowed = self._job.max_restarts.value
        self._fetch_checkpoints_of(fleet.first)
        for number in range(allowed + 1):
            try:
                plan = await self._make_plan(number, fleet, networks, code)
                await staging.fork_servers_up(fleet, self._job)
                if number == 0:
                    self._screen.started()
                    self._announce(plan)
                result = await self._execute(plan, fleet, interrupts)
            except (ConnectionError, NodeError):
                if number == 0 or fleet.whole:
                    raise
                result = Result(1, lost_between(fleet))
            self._failure = failure = result.failure
            await self._bring_home(fleet)
            if failure is None or interrupts.received or number == allowed:
                break
            if why := await again.full_disk(fleet, failure):
                self._screen.note(f"paceline: {why}: the job is not started again")
                break
            what = failure.describe()
            if not fleet.whole:
                self._screen.note(f"paceline: {what}")
                if not (back := await self._whole_again(fleet, code)):
                    break
                networks, _ = await find_networks(fleet, self._job)
                what = f"{', '.join(back)} {'is' if len(back) == 1 else 'are'} back"
            self._screen.note(
                f"paceline: {what}; starting all nodes again, {number + 1} of {allowed}"
            )
        await self._clear(fleet.first)
        if interrupts.received and failure is not None:
            signum = interrupts.received[0]
            return replace(result, exit_code=128 + signum, interrupted=signum)
        return result

    async def _whole_again(self, fleet: Fleet, code: dict[str, decide.Code]) -> list[str]:
        """Has lost hosts join once more; names them when they did.

        ``code`` learns where theirs is.
        """
        try:
            back = await again.dial_lost(fleet, self._job, self._transport, self._screen.note)
            if not back:
                return []
            check_nodes(fleet, self._job)
            self.recorder.event("connected", hosts=back)
            code.update(await self._place(fleet))
        except (PacelineError, ConnectionError) as error:
            self._screen.note(f"paceline: not started again: {error}")
            return []
        self._fetch_checkpoints_of(fleet.first)
        return back

    def _fetch_checkpoints_of(self, node: Node) -> None:
        """As they are made, unless the node writes them into the run directory itself."""
        self._checkpoints = None if node.shared_run_dir else CheckpointFetcher(
            node.channel, node.run_folder, self._directory, self._fetcher)  # fmt: skip

    async def _make_plan(self, number: int, fleet: Fleet, networks: Networks,
                         code: dict[str, decide.Code]) -> Plan:  # fmt: skip
        port = await hold_port(fleet, networks, self._job.master_port)
        plan = decide.make_plan(
            self._job, self._run_id, number, fleet.hosts, fleet.facts(), networks, code, port,
            self._notes,
        )  # fmt: skip
        self._directory.write_json(names.PLAN, plan.to_json())
        self.ranks = plan.world_size
        return plan

    async def _execute(self, plan: Plan, fleet: Fleet, interrupts: Interrupts) -> Result:
        attempt = self._attempt = Attempt(
            plan, self._job, fleet, interrupts, self._screen, self.recorder
        )
        try:
            result = await attempt.run()
        finally:
            self._attempt = None
        if result.failure is not None and result.failure.kind == "lost":
            await self._tell_why(result.failure.host, fleet)
        if result.exit_code == 0 and plan.world_size > 1 and not attempt.joined:
            self._warn_never_joined(plan)
        return result

    async def _tell_why(self, name: str, fleet: Fleet) -> None:
        """What the scheduler knows of a lost node, in its own words."""
        for host in fleet.hosts:
            if host.name == name and (words := await self._transport.why(host)):
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

    def _warn_never_joined(self, plan: Plan) -> None:
        spawns = self._job.own_store  # processes of the script's own, which nobody counts
        if self._job.entry.kind != "binary" and self._job.needs_torch and not spawns:
            self._screen.note(
                f"paceline: warning: {plan.world_size} ranks ran, but none called "
                "init_process_group: they may have trained separate models"
            )

    # --- what agents say ---------------------------------------------------------------------

    def _on_event(self, node: Node, event: Event) -> None:
        kind = event.message.get("event")
        if kind == "forkserver":
            node.take_fork_server(event.message)
            self._importing(self._nodes)
        if self._attempt is not None:
            self._attempt.take(node, event)
        if folder := kept_elsewhere(event):
            self._elsewhere.append((node, folder))
        if self._checkpoints is not None and is_checkpoint(event):
            self._checkpoints.wanted()
        try:
            self.recorder.take(node, event)
        except NodeError as error:
            self._cannot_record(error)

    def _cannot_record(self, error: NodeError) -> None:
        """A full disk here ends the job: a run that leaves no trace is not worth its time."""
        if self._attempt is not None:
            self._attempt.fail(Failure("record", HERE, None, time.monotonic(), headline=str(error)))

    def _on_lost(self, node: Node, why: str) -> None:
        if self._attempt is not None:
            self._attempt.node_lost(node, why)
        self.recorder.event("lost", node.name, why=why)

    # --- after the end -----------------------------------------------------------------------

    async def _bring_home(self, fleet: Fleet) -> None:
        """Fetches rank 0's run files, and what ranks wrote into shipped copies of the code."""
        for node in fleet.nodes:
            if node.lost or node.running:  # one whose ranks could not be ended answers nothing
                continue
            try:
                await self._bring_from(node, rank_zero=node is fleet.first)
            except (PacelineError, ConnectionError, OSError) as error:
                self._screen.note(f"paceline: the results of {node.name} did not come: {error}")

    async def _clear(self, node: Node) -> None:
        """The node's own run folder has served; it stays there unless all of it came home."""
        if self._all_home and not node.lost:
            with contextlib.suppress(PacelineError, ConnectionError):
                await node.channel.request("discard_run_folder", key=self._directory.key)

    async def _bring_from(self, node: Node, rank_zero: bool) -> None:
        target = self._directory.path
        if rank_zero and self._checkpoints is not None:
            await self._checkpoints.finish()
            await self._checkpoints.sync()
            await self._fetcher.fetch(
                node.channel, node.run_folder, None, target, leave=names.is_ours
            )
            self._all_home = True
        for there in [where for who, where in self._elsewhere if who is node]:
            await self._fetcher.fetch(node.channel, there, None, target, leave=names.is_ours)
            self._screen.note(
                f"paceline: the model came home from {there} on {node.name}; remove it there"
            )
        if "code" in node.copies:
            root, manifest = node.copies["code"]
            folder = target / names.FETCHED / safe(node.name)
            came = await self._fetcher.fetch(node.channel, root, manifest, folder)
            if came:
                count = f"{len(came)} new file{'s' * (len(came) > 1)}"
                self._screen.note(f"paceline: {count} of {node.name}: {short(folder)}")


def lost_between(fleet: Fleet) -> Failure:
    """The loss of a node before the ranks of a further attempt ran."""
    node = next(node for node in fleet.nodes if node.lost)
    return Failure("lost", node.name, None, time.monotonic(), headline=node.why)


async def connect(job: Job, hosts: Sequence[Host], transport: Transport,
                  on_event: Any, on_lost: Any, reached: Reached = nobody) -> Fleet:  # fmt: skip
    """Has an agent started on every host."""
    pythons = [decide.python_of(job, host) for host in hosts]
    channels = await transport.open(hosts, pythons, reached)
    return Fleet(channels, job.lease_s.value, on_event, on_lost)


def noise_of(fleet: Fleet) -> dict[str, str]:
    """By host, what stood outside the agent's frames."""
    return {node.name: node.channel.noise for node in fleet.nodes}


def check_nodes(fleet: Fleet, job: Job) -> list[str]:
    """Refuses nodes that cannot train together; notes what merely differs."""
    chosen = {node.name: node.channel.chosen_python for node in fleet.nodes}
    notes = decide.check_agreement(fleet.hosts, job, fleet.facts(), chosen)
    noisy = [node.name for node in fleet.nodes if node.channel.noise.strip()]
    return notes + [f"the shell start-up files of {name} print text: ignored" for name in noisy]


async def plan_only(job: Job, hosts: Sequence[Host], transport: Transport, run_id: str,
                    package: Package, notes: Sequence[str]) -> Plan:  # fmt: skip
    """Everything up to the plan, which is then let go: nothing is shipped or started."""
    fleet = await connect(job, hosts, transport, lambda node, event: None, lambda node, why: None)
    try:
        agreed = check_nodes(fleet, job)
        networks, found = await find_networks(fleet, job)
        supplies = await asyncio.to_thread(staging.gather_supplies, job, fleet, package)
        places = await fleet.each(lambda node: staging.would_place(node, job, supplies.code))
        code = dict(zip((node.name for node in fleet.nodes), places, strict=True))
        port = await hold_port(fleet, networks, job.master_port)
        return decide.make_plan(
            job, run_id, 0, fleet.hosts, fleet.facts(), networks, code, port,
            [*notes, *agreed, *found],
        )  # fmt: skip
    finally:
        await fleet.close()
        await transport.close(0)


def kept_elsewhere(event: Event) -> str:
    """The folder in which a rank kept the model, for its disk was full; empty when it did not."""
    data = event.message.get("data") or {}
    if event.message.get("event") == "said" and data.get("event") == "model kept elsewhere":
        return str(data.get("folder") or "")
    return ""


def is_checkpoint(event: Event) -> bool:
    """True when rank 0 says that it has written a checkpoint."""
    data = event.message.get("data") or {}
    return event.message.get("event") == "said" and data.get("event") == "checkpoint"
