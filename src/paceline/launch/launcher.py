"""From a job to its end: connect, check, decide, start, watch, bring home.

The order is the body of :meth:`Launcher.run`; everything that decides is pure and elsewhere
(``network``, ``planning``, ``outcome``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.cluster.channel import AgentRefusal, Event
from paceline.cluster.fanout import connect_all
from paceline.cluster.openssh import SshOptions
from paceline.launch import network, outcome, planning
from paceline.launch.code import Tree, project_root, read_tree
from paceline.launch.node import Node
from paceline.launch.outcome import Failure
from paceline.launch.rundir import RunDirectory, safe
from paceline.launch.screen import Screen
from paceline.launch.shipping import Fetcher, place_code, place_inputs, ship_tree, with_inputs
from paceline.spec import jobenv
from paceline.spec import rundir as names
from paceline.spec.errors import NodeError, PacelineError, SettingError
from paceline.spec.hosts import Host
from paceline.spec.job import Job
from paceline.spec.plan import NodePlan, Plan
from paceline.spec.settings import Setting, Source

PROBE_TIMEOUT_S = 3.0
FAILURE_GRACE_S = 3.0  # for the others, once one rank has failed
END_PATIENCE_S = 3.0  # after SIGKILL, until a node that does not answer is given up
OWN_FILES = {names.PLAN, names.EVENTS, names.METRICS, names.HOSTS, names.RESULT, names.LOGS,
             names.OWNER, names.FINDINGS, ".paceline-probe"}  # fmt: skip


@dataclass(slots=True)
class Attempt:
    """What was seen of one start of all nodes."""

    plan: Plan
    failures: list[Failure] = field(default_factory=list)
    joined: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    failed: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class Result:
    """How a job ended.

    Attributes:
        exit_code: 0, the first failing rank's status, or 128 + n after signal n.
        failure: The first failure, if any.
        interrupted: Number of the signal that the user sent, if any.
        others: Ranks that failed after the first.
    """

    exit_code: int
    failure: Failure | None = None
    interrupted: int | None = None
    others: int = 0


class Launcher:
    """One run.

    Args:
        job: What to run.
        hosts: Where; rank 0 on the first.
        ssh: How to log in.
        run_id: Names the run.
        screen: What the user sees.
        directory: The run directory; ``None`` when only a plan is wanted.
        package: Ship this installation's ``paceline`` to the nodes (recipes need it).
        notes: What was decided before.
    """

    def __init__(self, job: Job, hosts: Sequence[Host], ssh: SshOptions, run_id: str,
                 screen: Screen, directory: RunDirectory | None,
                 package: bool = False, notes: Sequence[str] = ()) -> None:  # fmt: skip
        self.job = job
        self.hosts = tuple(hosts)
        self.run_id = run_id
        self.nodes: list[Node] = []
        self.metrics: dict[str, Any] = {}
        self._ssh = ssh
        self._screen = screen
        self._directory = directory
        self._package = package
        self._notes = list(notes)
        self._networks: dict[str, network.NodeNetwork] = {}
        self._code: dict[str, planning.Code] = {}
        self._fetcher = Fetcher()
        self._attempt: Attempt | None = None
        self._signals: list[int] = []
        self._signalled = asyncio.Event()
        self._beats: list[asyncio.Task[None]] = []
        self._began = time.monotonic()
        self._token = os.urandom(16).hex()
        self._task: asyncio.Task[Any] | None = None

    # --- the order of things -----------------------------------------------------------------

    async def run(self) -> Result:
        """Everything, in order. PacelineError when the job could not be started."""
        async with self._in_charge():
            try:
                await self._connect()
                self._check_nodes()
                await self._settle_places(start=True)
                return await self._attempts()
            except asyncio.CancelledError:
                if not self._signals:
                    raise
                return Result(128 + self._signals[0], interrupted=self._signals[0])
            except ConnectionError as error:
                raise NodeError(
                    "a host went away before the job was started", found=str(error)
                ) from None

    async def plan(self) -> Plan:
        """Everything up to the plan, which is then let go."""
        async with self._in_charge():
            await self._connect()
            self._check_nodes()
            await self._settle_places(start=False)
            return await self._make_plan(0)

    async def _attempts(self) -> Result:
        """Starts all nodes; after a failure again, all in step, as often as was allowed."""
        for number in range(self.job.max_restarts.value + 1):
            plan = await self._make_plan(number)
            result = await self._execute(plan)
            await self._bring_home()
            last = number == self.job.max_restarts.value
            if not result.failure or last or any(node.lost for node in self.nodes):
                return result
            self._screen.note(
                f"paceline: {describe_failure(result.failure)}; starting all nodes again "
                f"({number + 1} of {self.job.max_restarts.value})"
            )
        raise AssertionError("unreachable")

    # --- signals, heartbeats, the end --------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _in_charge(self):  # type: ignore[no-untyped-def]
        """Signals are ours until the last connection is closed."""
        loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for signum in handled:
            loop.add_signal_handler(signum, self._on_signal, signum)
        try:
            yield
        finally:
            await self._close()
            for signum in handled:
                loop.remove_signal_handler(signum)

    def _on_signal(self, signum: int) -> None:
        """First: politely. Second: now. Before the job runs: just leave."""
        self._signals.append(signum)
        self._signalled.set()
        running = self._attempt is not None and any(node.running for node in self.nodes)
        if not running and self._task is not None:
            self._task.cancel()

    async def _close(self) -> None:
        for beat in self._beats:
            beat.cancel()
        await asyncio.gather(*self._beats, return_exceptions=True)
        await asyncio.gather(*(self._dismiss(node) for node in self.nodes))

    async def _dismiss(self, node: Node) -> None:
        if not node.lost:
            with contextlib.suppress(PacelineError, ConnectionError, asyncio.TimeoutError):
                await asyncio.wait_for(node.channel.request("bye"), 2.0)
        node.channel.on_event = lambda event: None
        await node.channel.close(0.0 if node.lost else 5.0)
        if self._directory is not None and node.channel.stderr:
            log = f"{names.LOGS}/{safe(node.name)}/agent.log"
            with contextlib.suppress(PacelineError):
                self._directory.append_bytes(log, node.channel.stderr.encode())

    async def _beat(self, node: Node) -> None:
        """Renews a node's lease; declares it lost when it falls silent for half of it."""
        lease = self.job.lease_s.value
        loop = asyncio.get_running_loop()
        pending: set[asyncio.Task[None]] = set()
        while not node.lost:
            renewal = asyncio.create_task(node.renew_lease(lease))
            pending.add(renewal)
            renewal.add_done_callback(pending.discard)
            renewal.add_done_callback(lambda task: task.cancelled() or task.exception())
            await asyncio.sleep(lease / 10)
            silent = loop.time() - node.channel.last_heard
            if silent > lease / 2:
                self._lose(node, f"no word from {node.name} for {silent:.1f} s "
                                 "(switched off, unplugged or frozen)")  # fmt: skip

    def _lose(self, node: Node, why: str) -> None:
        if node.lost:
            return
        node.lost = True
        self._record("lost", node.name, why=why)
        if node.ready is not None and not node.ready.done():
            node.ready.set_result(why)
        if self._attempt is not None and node.running:
            node.running = False
            self._fail(Failure("lost", node.name, None, time.monotonic(), headline=why))
        self._check_ended()

    # --- before the start --------------------------------------------------------------------

    async def _connect(self) -> None:
        pythons = [planning.python_of(self.job, host) for host in self.hosts]
        channels = await connect_all(self.hosts, pythons, self._ssh)
        self.nodes = [
            Node(host, channel) for host, channel in zip(self.hosts, channels, strict=True)
        ]
        for node in self.nodes:
            node.channel.on_event = self._on_event
            self._beats.append(asyncio.create_task(self._beat(node)))
            if node.channel.fingerprint:
                self._screen.note(f"paceline: pinned {node.name}: {node.channel.fingerprint}")
        self._record("connected", hosts=[node.name for node in self.nodes])

    def _check_nodes(self) -> None:
        facts = {node.name: node.facts for node in self.nodes}
        chosen = {node.name: node.channel.chosen_python for node in self.nodes}
        self._notes += planning.check_agreement(self.hosts, self.job, facts, chosen)
        for node in self.nodes:
            if node.channel.noise.strip():
                self._notes.append(f"the shell start-up files of {node.name} print text: ignored")
        if self._directory is not None:
            self._directory.write_json(names.HOSTS, facts)

    async def _settle_places(self, start: bool) -> None:
        """Network, code, folders and fork servers, all at once."""
        package = await asyncio.to_thread(_package_tree) if self._package and start else None
        tree = await asyncio.to_thread(self._tree)
        inputs = await asyncio.to_thread(self._inputs)
        work: list[Awaitable[Any]] = [self._find_networks()]
        if start:
            work += [self._begin_on(node, package) for node in self.nodes]
            work += [self._place(node, tree, inputs) for node in self.nodes]
        else:
            work += [self._would_place(node, tree) for node in self.nodes]
        await _all(work)

    def _tree(self) -> Tree | None:
        """The job's code, when a node may need it."""
        remote = any(not host.local for host in self.hosts)
        kind = self.job.entry.kind
        if not remote or (kind == "binary" and self.job.ship.value == "auto") or self._package:
            return None
        return read_tree(project_root(self.job))

    def _inputs(self) -> dict[str, Tree]:
        if all(host.local for host in self.hosts):
            return {path: Tree(Path(path), [], "") for path in self.job.inputs}
        return {path: read_tree(Path(path)) for path in self.job.inputs}

    async def _begin_on(self, node: Node, package: Tree | None) -> None:
        """Starts a node's fork server: its import of torch runs beside everything else."""
        folder = await node.channel.request(
            "run_folder", run_id=self.run_id, **self._probe_of_directory()
        )
        node.run_folder, node.shared_run_dir = folder["folder"], folder["shared"]
        env = {**self._early_env(node), **self.job.environment.all()}
        python = planning.python_of(self.job, node.host)
        if package is not None and not (node.host.local and python == sys.executable):
            root = await ship_tree(node, package, "paceline", self.run_id)
            env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH")]))
        node.ready = asyncio.get_running_loop().create_future()
        await node.channel.request(
            "prepare", python=python, preload=list(self.job.preload), env=env,
            unset=list(self.job.environment.unset), token=self._token,
        )  # fmt: skip

    def _early_env(self, node: Node) -> dict[str, str]:
        """What must be set before libraries are loaded; interface names follow with the ranks."""
        processes = planning.processes_on(self.job, node.host, node.facts).value
        settings = planning.node_env(self.job, node.facts, processes, None)
        return {name: setting.value for name, setting in settings.items()}

    def _probe_of_directory(self) -> dict[str, str]:
        assert self._directory is not None
        return {
            "path": str(self._directory.path),
            "token_file": self._directory.probe_file,
            "token": self._directory.token,
        }

    async def _place(self, node: Node, tree: Tree | None, inputs: dict[str, Tree]) -> None:
        code = await place_code(node, self.job, tree, self.run_id)
        places = await place_inputs(node, inputs, self.run_id)
        entry = with_inputs(code.entry, places)
        if tree is None and not node.host.local:
            workdir = await self._workdir_without_code(node, code.workdir)
            code = planning.Code("in place", workdir, entry)
        self._code[node.name] = planning.Code(code.how, code.workdir, entry)

    async def _workdir_without_code(self, node: Node, wanted: str) -> str:
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

    async def _would_place(self, node: Node, tree: Tree | None) -> None:
        how, workdir = "in place", node.host.workdir or self.job.workdir
        if tree is not None and not node.host.local:
            root = node.host.workdir or str(tree.root)
            answer = await node.channel.request("compare_tree", root=root, manifest=tree.manifest)
            equal = answer["exists"] and not (answer["missing"] or answer["different"])
            how = "verified equal" if equal and self.job.ship.value != "always" else "shipped"
            workdir = workdir if how == "verified equal" else f"(a copy of {tree.root})"
        self._code[node.name] = planning.Code(how, workdir, self.job.entry)

    async def _find_networks(self) -> None:
        """Lets the nodes try each other, and decides (see ``launch.network``)."""
        fixed = self.job.interface.value
        if len(self.nodes) == 1 and not fixed and not self.nodes[0].host.job_address:
            self._networks = {self.nodes[0].name: network.LOOPBACK}
            return
        facts = {node.name: node.facts for node in self.nodes}
        found, notes = network.candidates(self.hosts, facts, fixed)
        self._notes += notes
        if len(self.nodes) == 1:
            self._networks = {n: network.only_choice(c) for n, c in found.items()}
            return
        tried = await self._try_connections(found)
        self._networks, notes = network.decide(self.hosts, found, tried)
        self._notes += notes

    async def _try_connections(
        self, found: dict[str, list[network.Candidate]]
    ) -> dict[str, list[dict[str, Any]]]:
        by_name = {node.name: node for node in self.nodes}
        answers = await _all([
            node.channel.request("listen", addresses=[c.address for c in found[node.name]])
            for node in self.nodes
        ])  # fmt: skip
        ports = {node.name: a["ports"] for node, a in zip(self.nodes, answers, strict=True)}

        async def attempt(name: str, others: list[str]) -> list[dict[str, Any]]:
            targets = [
                {"host": other, "address": address, "port": port,
                 "identity": by_name[other].channel.identity}
                for other in others
                for address, port in ports[other].items()
            ]  # fmt: skip
            answer = await by_name[name].channel.request(
                "connect", targets=targets, timeout_s=PROBE_TIMEOUT_S
            )
            return list(answer["results"])

        pairs = network.pairs([node.name for node in self.nodes])
        results = await _all([attempt(name, others) for name, others in pairs.items()])
        await _all([node.channel.request("stop_listening") for node in self.nodes])
        return dict(zip(pairs, results, strict=True))

    async def _make_plan(self, number: int) -> Plan:
        """Holds a port on the first node and puts the plan together."""
        port = await self._hold_port()
        plan = planning.make_plan(
            self.job, self.run_id, number, self.hosts,
            {node.name: node.facts for node in self.nodes},
            self._networks, self._code, port, self._notes,
        )  # fmt: skip
        if self._directory is not None:
            self._directory.write_json(names.PLAN, plan.to_json())
        return plan

    async def _hold_port(self) -> Setting[int]:
        first, asked = self.nodes[0], self.job.master_port
        address = self._networks[first.name].address
        try:
            answer = await first.channel.request("reserve_port", address=address, port=asked.value)
        except AgentRefusal as refusal:
            raise _port_taken(first.name, address, asked, refusal) from None
        if asked.value:
            return asked
        return Setting(int(answer["port"]), Source.FOUND, f"free on {first.name}, held")

    # --- the job -----------------------------------------------------------------------------

    async def _execute(self, plan: Plan) -> Result:
        """Starts every node's part and waits for the end of the last."""
        attempt = self._attempt = Attempt(plan)
        await self._fork_servers_up()
        self._announce(plan)
        begun = time.monotonic()
        parts = list(zip(self.nodes, plan.nodes, strict=True))
        for node, _ in parts:
            node.running = True
        await _all([self._start(node, part, plan) for node, part in parts])
        self._record("started", attempt=plan.attempt, world_size=plan.world_size)
        result = await self._watch(attempt)
        self._screen.flush()
        self._record("ended", attempt=plan.attempt, exit_code=result.exit_code,
                     seconds=round(time.monotonic() - begun, 3))  # fmt: skip
        self._attempt = None
        if result.exit_code == 0 and plan.world_size > 1 and not attempt.joined:
            self._warn_never_joined(plan)
        return result

    async def _fork_servers_up(self) -> None:
        """Waits until torch is imported everywhere; refuses what really was loaded."""
        for node in self.nodes:
            if node.ready is not None and (problem := await node.ready):
                raise _import_failed(node, problem, self.job)
        wanted = self.job.backend
        for node in self.nodes:
            backends = node.loaded.get("backends")
            if wanted and backends is not None and wanted not in backends:
                raise _no_backend(node, wanted, backends)

    def _announce(self, plan: Plan) -> None:
        hosts = len(plan.nodes)
        where = f"{plan.world_size} rank{'s' * (plan.world_size > 1)} on " + (
            f"{hosts} hosts" if hosts > 1 else plan.nodes[0].host
        )
        assert self._directory is not None
        self._screen.note(f"paceline: {where}, run directory {_short(self._directory.path)}")
        for text in plan.notes:
            self._screen.note(f"paceline: note: {text}")

    def _warn_never_joined(self, plan: Plan) -> None:
        if self.job.entry.kind != "binary" and self.job.needs_torch:
            self._screen.note(
                f"paceline: warning: {plan.world_size} ranks ran, but none called "
                "init_process_group: they may have trained separate models"
            )

    async def _start(self, node: Node, part: NodePlan, plan: Plan) -> None:
        env = {name: setting.value for name, setting in part.env.items()}
        env[jobenv.RUN_DIR] = node.run_folder
        store = {"address": plan.master_addr, "port": plan.master_port}
        await node.channel.request(
            "start",
            entry={"kind": part.entry.kind, "target": part.entry.target,
                   "args": list(part.entry.args)},
            workdir=part.workdir,
            env={**env, **self.job.environment.all()},
            any_world=self.job.any_world,
            store=store if plan.agent_store and part.node_rank == 0 else None,
            ranks=[
                {"rank": rank.rank, "local_rank": rank.local_rank, "cpus": list(rank.cpus),
                 "env": plan.rank_env(part, rank)}
                for rank in part.ranks
            ],
        )  # fmt: skip

    async def _watch(self, attempt: Attempt) -> Result:
        """Until all ranks are over: the job's own end, a failure, or the user's signal."""
        await _first([attempt.ended.wait(), attempt.failed.wait(), self._signalled.wait()])
        if self._signals:
            return await self._stop_for_user(attempt)
        if attempt.failures:
            await _first([
                attempt.ended.wait(), self._signalled.wait(),
                asyncio.sleep(outcome.settle_time(attempt.failures)),
            ])  # fmt: skip
            if len(attempt.failures) == 1 and attempt.failures[0].echo:
                await _first([attempt.ended.wait(), asyncio.sleep(outcome.SETTLE_S)])
            known = list(attempt.failures)
            await self._stop_all(attempt, signal.SIGTERM, FAILURE_GRACE_S)
            return self._failed_result(known, attempt)
        return Result(0)

    def _failed_result(self, known: list[Failure], attempt: Attempt) -> Result:
        """Names the first failure; exits that we caused by stopping do not count."""
        complete = {(f.host, f.rank): f for f in outcome.merge(attempt.failures)}
        first = outcome.first(known)
        first = complete.get((first.host, first.rank), first)
        return Result(first.status, first, others=len(outcome.merge(known)) - 1)

    async def _stop_for_user(self, attempt: Attempt) -> Result:
        """Once: TERM and wait for the grace. Twice: KILL."""
        signum = self._signals[0]
        name = outcome.signal_name(signum)
        self._screen.note(f"paceline: {name}: stopping (again to stop at once)")
        self._signalled.clear()
        grace = self.job.grace_s.value
        stopping = asyncio.ensure_future(self._stop_all(attempt, signal.SIGTERM, grace))
        await _first([_wait(stopping), self._signalled.wait()])
        if not stopping.done():
            self._screen.note("paceline: stopping at once")
            await self._ask_all("kill")
            await stopping
        return Result(128 + signum, interrupted=signum)

    async def _stop_all(self, attempt: Attempt, signum: int, grace_s: float) -> None:
        """Ends every rank; returns when all nodes said so or none is left that could."""
        await self._ask_all("stop", signal=int(signum), grace_s=grace_s)
        if not await _within(attempt.ended.wait(), grace_s + END_PATIENCE_S):
            await self._ask_all("kill")
            await _within(attempt.ended.wait(), END_PATIENCE_S)

    async def _ask_all(self, op: str, **fields: Any) -> None:
        async def ask(node: Node) -> None:
            with contextlib.suppress(PacelineError, ConnectionError, asyncio.TimeoutError):
                await asyncio.wait_for(node.channel.request(op, **fields), END_PATIENCE_S)

        await asyncio.gather(*(ask(node) for node in self.nodes if not node.lost))

    # --- what agents say ---------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        node = next(node for node in self.nodes if node.name == event.host)
        handler = _EVENTS.get(event.message.get("event", ""))
        if handler is None:
            return
        try:
            handler(self, node, event)
        except PacelineError as error:  # the run directory cannot be written any more
            if self._attempt is not None and not self._attempt.failures:
                self._fail(Failure("lost", "this machine", None, time.monotonic(),
                                   headline=str(error)))  # fmt: skip

    def _output(self, node: Node, event: Event) -> None:
        rank, stream = event.message["rank"], event.message["stream"]
        if self._directory is not None:
            self._directory.append_bytes(self._directory.log_name(node.name, rank), event.blob)
        self._screen.output(node.name, rank, stream, event.blob)

    def _said(self, node: Node, event: Event) -> None:
        data, rank = event.message["data"], event.message["rank"]
        handler = _SAID.get(data.get("kind", ""))
        if handler is not None:
            handler(self, node, rank, data)

    def _said_event(self, node: Node, rank: int, data: dict[str, Any]) -> None:
        details = {k: v for k, v in data.items() if k not in ("kind", "event", "rank", "host")}
        if data.get("event") == "world joined" and self._attempt is not None:
            self._attempt.joined += 1
        self._record(str(data.get("event", "event")), node.name, rank, **details)

    def _said_metrics(self, node: Node, rank: int, data: dict[str, Any]) -> None:
        record = {k: v for k, v in data.items() if k != "kind"}
        self.metrics |= record
        if self._directory is not None:
            self._directory.append_line(names.METRICS, record)

    def _said_progress(self, node: Node, rank: int, data: dict[str, Any]) -> None:
        self._screen.progress(data)

    def _said_line(self, node: Node, rank: int, data: dict[str, Any]) -> None:
        self._screen.say(str(data.get("text", "")))

    def _said_exception(self, node: Node, rank: int, data: dict[str, Any]) -> None:
        self._screen.mute(node.name, rank)
        headline = f"{data['type']}: {data['message']}".strip().removesuffix(":")
        when = node.to_launcher_time(data["time"])
        self._record("exception", node.name, rank, headline=headline)
        self._fail(Failure("exception", node.name, rank, when, headline=headline,
                           traceback=data["traceback"]))  # fmt: skip

    def _exit(self, node: Node, event: Event) -> None:
        said = event.message
        code, signum = said["code"], said["signal"]
        self._record("rank ended", node.name, said["rank"], code=code, signal=signum)
        if code == 0:
            return
        kind: outcome.Kind = "signal" if signum is not None else "exit"
        self._fail(Failure(kind, node.name, said["rank"], node.to_launcher_time(said["time"]),
                           code, signum, outcome.describe_end(code, signum)))  # fmt: skip

    def _node_ended(self, node: Node, event: Event) -> None:
        node.running = False
        if event.message["leftover"]:
            self._record("leftovers killed", node.name, count=event.message["leftover"])
        self._check_ended()

    def _fork_server(self, node: Node, event: Event) -> None:
        said = event.message
        problem = ""
        if "failed" in said:
            problem = said["traceback"]
        elif "died" in said:
            problem = f"the fork server died ({said['died']})"
            if self._attempt is not None and node.running:
                when = node.to_launcher_time(said["time"])
                self._fail(Failure("forkserver", node.name, None, when, headline=problem))
        else:
            node.loaded = said["loaded"]
            self._record("imported", node.name, seconds=round(said["import_s"], 3), **node.loaded)
        if node.ready is not None and not node.ready.done():
            node.ready.set_result(problem)

    def _rank_started(self, node: Node, event: Event) -> None:
        self._record("rank started", node.name, event.message["rank"], pid=event.message["pid"])

    def _lost_event(self, node: Node, event: Event) -> None:
        words = event.message["stderr"].strip().splitlines()
        said = f": {words[-1]}" if words else ""
        self._lose(node, f"the connection to {node.name} ended{said}")

    def _file(self, node: Node, event: Event) -> None:
        self._fetcher.take(event)

    def _fail(self, failure: Failure) -> None:
        if self._attempt is not None:
            self._attempt.failures.append(failure)
            self._attempt.failed.set()

    def _check_ended(self) -> None:
        if self._attempt is not None and not any(node.running for node in self.nodes):
            self._attempt.ended.set()

    def _record(self, kind: str, host: str | None = None, rank: int | None = None,
                **details: Any) -> None:  # fmt: skip
        if self._directory is not None:
            with contextlib.suppress(NodeError):
                self._directory.event(kind, host, rank, **details)

    # --- after the end -----------------------------------------------------------------------

    async def _bring_home(self) -> None:
        """Fetches rank 0's run files, and what ranks wrote into shipped copies of the code."""
        assert self._directory is not None
        target = self._directory.path
        for at, node in enumerate(self.nodes):
            if node.lost:
                continue
            try:
                if at == 0 and not node.shared_run_dir:
                    await self._fetcher.fetch(node, node.run_folder, None, target, OWN_FILES)
                if "code" in node.copies:
                    root, manifest = node.copies["code"]
                    folder = target / "files" / safe(node.name)
                    came = await self._fetcher.fetch(node, root, manifest, folder)
                    if came:
                        self._screen.note(
                            f"paceline: {len(came)} new files of {node.name}: {_short(folder)}"
                        )
            except (PacelineError, ConnectionError, OSError) as error:
                self._screen.note(f"paceline: results of {node.name} did not come: {error}")


_EVENTS: dict[str, Callable[[Launcher, Node, Event], None]] = {
    "output": Launcher._output,
    "said": Launcher._said,
    "exit": Launcher._exit,
    "ended": Launcher._node_ended,
    "forkserver": Launcher._fork_server,
    "started": Launcher._rank_started,
    "lost": Launcher._lost_event,
    "file": Launcher._file,
}

_SAID: dict[str, Callable[[Launcher, Node, int, dict[str, Any]], None]] = {
    "event": Launcher._said_event,
    "metrics": Launcher._said_metrics,
    "progress": Launcher._said_progress,
    "say": Launcher._said_line,
    "exception": Launcher._said_exception,
}


def describe_failure(failure: Failure) -> str:
    """``rank 1 on n2: ValueError: boom``."""
    who = f"rank {failure.rank} on {failure.host}" if failure.rank is not None else failure.host
    return f"{who}: {failure.headline}"


def _package_tree() -> Tree:
    """This installation's package, for nodes that do not have it."""
    import paceline

    folder = Path(paceline.__file__).parent
    inner = read_tree(folder)
    manifest = [[f"paceline/{entry[0]}", *entry[1:]] for entry in inner.manifest]
    return Tree(folder.parent, manifest, inner.digest)


def _import_failed(node: Node, problem: str, job: Job) -> PacelineError:
    lines = problem.strip().splitlines()
    return NodeError(
        f"{node.name} cannot import {', '.join(job.preload)}",
        found="\n".join(lines[-8:]),
        remedy=f"On {node.name}: {planning.python_of(job, node.host)} -c 'import "
        f"{', '.join(job.preload)}'",
    )


def _no_backend(node: Node, wanted: str, backends: Sequence[str]) -> PacelineError:
    return NodeError(
        f"backend {wanted} was asked for, but torch on {node.name} was built without it",
        found=f"torch {node.loaded.get('torch')} there has: {', '.join(backends)}",
        remedy=f"--backend {backends[0] if backends else 'gloo'}, or install a torch with {wanted}",
    )


def _port_taken(
    name: str, address: str, asked: Setting[int], refusal: AgentRefusal
) -> PacelineError:
    holders = refusal.answer.get("holders") or []
    who = ", ".join(f"process {pid} ({command})" for pid, command in holders)
    return SettingError(
        f"port {asked.value} on {name} ({address}) was asked for ({asked.source.label})",
        found=f"{refusal.found}" + (f": held by {who}" if who else ""),
        remedy="Leave --master-port out to get a free one, or end that process",
        exit_code=1,
    )


def _short(path: Path) -> str:
    """A path as people type it from here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


async def _all(work: Sequence[Awaitable[Any]]) -> list[Any]:
    """All results; after the first failure the rest is cancelled and awaited."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def _first(work: Sequence[Awaitable[Any]]) -> None:
    """Returns when the first is done; the others are cancelled."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _wait(task: asyncio.Future[None]) -> None:
    await asyncio.shield(task)


async def _within(work: Awaitable[Any], seconds: float) -> bool:
    """True when it was done in time."""
    try:
        await asyncio.wait_for(asyncio.ensure_future(work), seconds)
    except asyncio.TimeoutError:
        return False
    return True
