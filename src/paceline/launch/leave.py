"""Starts a detached run, which goes on without this machine.

The launching machine logs in to each host once. On one host it starts the supervisor
(``cli/supervise.py``: the same launcher, from a copy of this installation), on all hosts a caller
(``agent/caller.py``) that connects the supervisor to that host's agent. Until the ranks run, all of
them end with their logins. Then they are detached, the callers before the supervisor: if this
machine disappears in between, the run ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from paceline.agent import caller
from paceline.launch.installation import installation
from paceline.launch.interrupts import Interrupts
from paceline.launch.launcher import finished_result, request_of, secrets_of, write_result
from paceline.launch.nodes.survey import read_and_cache_supplies
from paceline.launch.planning import placement, planner
from paceline.launch.planning.request import Package, Request
from paceline.launch.terminal.screen import Screen
from paceline.remote import this_machine
from paceline.remote.agent_code import detach_source
from paceline.remote.channel import Channel, LoginError
from paceline.remote.fanout import refusal_error, use_pidfd_watcher
from paceline.remote.link import ProcessLink, spawn
from paceline.remote.login import MAX_ATTEMPTS, MAX_PARALLEL_LOGINS, Wrap, connect
from paceline.remote.openssh import (
    NO_ANSWER,
    UNEXPECTED_COMMAND,
    SshOptions,
    agent_command,
    classify,
    ssh_command,
)
from paceline.remote.protocol import FOLDER, PORT, SHA256
from paceline.remote.transport import Transport
from paceline.rendezvous.listener import caller_command, caller_config
from paceline.rundir import detached_file, earlier_outputs, signed_model
from paceline.rundir.directory import Redactor, RunDirectory, short
from paceline.rundir.outputs import Output, OutputJournal
from paceline.rundir.records import parse_json
from paceline.spec import rundir as names
from paceline.spec.detached import DETACHED, RUN_FOLDER, SupervisorLocation
from paceline.spec.errors import ConnectError, NodeError, PacelineError, SettingError
from paceline.spec.failure import Result
from paceline.spec.hosts import Cluster, Host
from paceline.spec.job import Job, NodeRange, mask_assignments
from paceline.spec.launchers import PROCESS_VARIABLES
from paceline.spec.schema import (
    SIZE,
    InvalidValue,
    Schema,
    boolean,
    integer,
    list_of,
    record,
    text,
    tuple_of,
)
from paceline.spec.serialization import to_jsonable
from paceline.spec.settings import Source
from paceline.transfer import data
from paceline.transfer.checkpoints import CheckpointFetcher, local_sizes
from paceline.transfer.data import DataFolder
from paceline.transfer.detached_outputs import DetachedOutputs, with_outputs
from paceline.transfer.files import send_tree
from paceline.transfer.follow import is_mirrored
from paceline.transfer.links import reject_outward
from paceline.transfer.results import Fetcher
from paceline.transfer.tree import Manifest, Tree, read_parts

MARK = b"\xf5PLleave "
MAX_MESSAGE_BYTES = 8 << 20
CALLER_TIMEOUT_S = 15.0  # for a caller to connect to its supervisor
FIRST_REPLY_S = 30.0  # for a login's first message
REFUSALS_S = 1.0  # to collect other refusals after the first
DETACH_TIMEOUT_S = 15.0  # for callers to detach
SUPERVISOR_GRACE_S = 20.0  # for a supervisor to end an abandoned job

_TEXT, _ADDRESSES = text(MAX_MESSAGE_BYTES), list_of(tuple_of(text(), PORT), 1000)
MESSAGES: dict[str, Schema] = {
    "refused": record({"found": _TEXT, "remedy": _TEXT}, refused=_TEXT),
    "listening": record({"certificate": SHA256}, listening=_ADDRESSES, folder=FOLDER),
    "starting": record(starting=text(), done=SIZE, of=SIZE),
    "text": record(text=_TEXT, err=boolean),
    "running": record(running=boolean),  # the ranks; after listening
    "left": record(left=boolean),  # it is detached; after running
    "over": record(
        {"error": record(message=_TEXT, found=_TEXT, remedy=_TEXT)}, over=integer(-1000, 1000)
    ),
}
"""The schema of a supervisor's messages, which are not trusted, by the field that names them."""


class SupervisorMessages:
    """Checks a supervisor's messages, and that none comes twice or too early."""

    def __init__(self) -> None:
        self._received = set[str]()

    def check(self, message: Mapping[str, Any]) -> None:
        """Raises InvalidValue if no supervisor sends the message now."""
        kind = next((name for name in MESSAGES if name in message), None)
        if kind is None:
            names = ", ".join([*message][:5])
            raise InvalidValue(f"a message of no known kind: {names:.200}")
        MESSAGES[kind](message, f"the message {kind}")
        if kind in self._received and kind not in ("starting", "text"):
            raise InvalidValue(f"the message {kind} twice")
        needed = {"running": "listening", "left": "running"}.get(kind)
        if needed is not None and needed not in self._received:
            raise InvalidValue(f"the message {kind} before {needed}")
        self._received.add(kind)


class Containers(Protocol):
    """Starts containers with agents in them."""

    async def wrapping(self, hosts: Sequence[Host]) -> Wrap:
        """Checks the hosts; returns a function that wraps an agent's command in a container."""

    def to_json(self) -> dict[str, Any]:
        """Returns what the supervisor needs to restart lost containers, as JSON."""


@dataclass(frozen=True)
class DetachedRun:
    """A run that is to go on without this machine.

    Attributes:
        job, cluster, transport, package: As for ``run_job``; the transport is not opened.
        supervisor: Name of the host that supervises the run; ``None`` for the first.
        run_dir: The run directory on this machine.
        command: The typed command, the program's name first.
        options: Further options of the supervisor: ``show``, ``check_level``, ``keep_results``.
        containers: Starts containers if agents run in them.
    """

    job: Job
    cluster: Cluster
    transport: Transport
    package: Package
    supervisor: str | None
    run_dir: Path
    command: tuple[str, ...]
    options: Mapping[str, Any]
    ssh: SshOptions
    containers: Containers | None = None


@dataclass(frozen=True, slots=True)
class DetachOutcome:
    """Result of starting a detached run.

    Attributes:
        exit_code: Exit status if the run is over already; ``None`` if it goes on.
    """

    exit_code: int | None
    host: Host
    run_id: str


def _modified_ns(path: Path) -> int:
    """When a file was last written, in nanoseconds since 1970; 0 if there is none."""
    with contextlib.suppress(OSError):
        return path.stat().st_mtime_ns
    return 0


def detach(run: DetachedRun, screen: Screen) -> DetachOutcome:
    """Starts the run; returns when its ranks run or it is over. After an error nothing is left."""
    return asyncio.run(_DetachedStart(run, screen).run())


class _DetachedStart:
    """Starts one detached run."""

    def __init__(self, run: DetachedRun, screen: Screen) -> None:
        self._detached, self._screen = run, screen
        self._key = secrets.token_bytes(32)
        self._request: Request = request_of(run.job, run.cluster, run.transport, run.package)
        hosts = self._request.hosts
        self._host = supervisor_among(hosts, run.supervisor)
        self._wrap: Wrap | None = None
        self._hosts_without_container: dict[str, str] = {}  # with the reason
        self._callers: dict[str, Login] = {}
        self._sent_manifest: Manifest = []
        self._project: Path | None = None
        self._started = time.time()
        self._outputs: list[Output] = []  # of earlier starts
        self._data: dict[str, str] | None = None  # where the supervisor finds the folder of --data
        self._caller_tasks: list[asyncio.Task[None]] = []
        self._gate = asyncio.Semaphore(MAX_PARALLEL_LOGINS)

    async def run(self) -> DetachOutcome:
        task = asyncio.current_task()
        assert task is not None
        with Interrupts(lambda: self._interrupted(task)) as self._interrupts:
            try:
                use_pidfd_watcher()
                code = await self._start()
            except asyncio.CancelledError:
                if not self._interrupts.received:
                    raise
                code = 128 + self._interrupts.received[0]
        return DetachOutcome(code, self._host, self._request.run_id)

    def _interrupted(self, task: asyncio.Task[Any]) -> None:
        if len(self._interrupts.received) == 1:  # a second signal must not interrupt the closing
            task.cancel()

    # --- the supervisor's host ------------------------------------------------------------------

    async def _start(self) -> int | None:
        """Starts the supervisor: here in the run directory, or on a host that gets all it needs."""
        if self._host.local:
            await self._check_containers()
            return await self._supervise(None, None, {})
        run, host, started_at = self._detached, self._host, time.monotonic()
        detached_file.ensure_key()
        secret, run_id = secrets_of(run.job, run.cluster), self._request.run_id
        directory = RunDirectory(run.run_dir, secret, run_id)
        earlier_result, plan = finished_result(directory.path), directory.path / names.PLAN
        planned_ns = _modified_ns(plan)
        for name in (DETACHED, names.RESULT):  # of an earlier run in this folder
            (directory.path / name).unlink(missing_ok=True)
        try:
            self._screen.starting("connecting", 0, 1)
            await self._check_containers()
            journal = OutputJournal(directory.path, detached_file.LineSeals(directory.path))
            supplies, channel = await asyncio.gather(
                asyncio.to_thread(read_and_cache_supplies, self._request, journal.outputs),
                self._log_in(host),
            )
            try:
                self._screen.starting("connecting", 1, 1)
                code = supplies.code
                if code is not None and code.copy is None:  # they are sent as outputs
                    paths = {str(entry[0]) for entry in code.manifest}
                    code = code.without(await asyncio.to_thread(
                        earlier_outputs.adopt, directory.path, code.root, journal, paths
                    ))  # fmt: skip
                trees = {"code": code, "package": supplies.package}
                for number, tree in enumerate(supplies.inputs.values()):
                    trees[f"input{number}"] = tree
                reply, places = await self._send(channel, directory, trees)
                if supplies.data is not None:
                    self._data = await self._send_data(channel, supplies.data)
                return await self._supervise(channel, directory, places, reply)
            finally:
                await channel.close(1.0)
        except PacelineError as error:
            is_refused = earlier_result is not None and _modified_ns(plan) == planned_ns
            if not is_refused and not (directory.path / names.RESULT).exists():
                result = Result(error.exit_code, error=error.render())
                write_result(directory, run_id, result, started_at, {})
            raise
        finally:
            has_left = any((directory.path / name).exists() for name in (DETACHED, names.RESULT))
            if earlier_result is not None and not has_left and _modified_ns(plan) == planned_ns:
                directory.write_json(names.RESULT, earlier_result)
            self._screen.started()
            directory.close()

    async def _check_containers(self) -> None:
        """Checks that hosts can start containers: each by itself if the run may go without some."""
        containers, hosts = self._detached.containers, self._request.hosts
        if containers is None:
            return
        if not self._tolerates_missing:
            self._wrap = await containers.wrapping(hosts)
            return
        checks = (containers.wrapping([host]) for host in hosts)
        results = await asyncio.gather(*checks, return_exceptions=True)
        wraps: dict[str, Wrap] = {}
        for host, result in zip(hosts, results, strict=True):
            if isinstance(result, PacelineError) and len(hosts) > 1:
                self._hosts_without_container[host.name] = result.brief
            elif isinstance(result, BaseException):
                raise result
            else:
                wraps[host.name] = result
        self._wrap = lambda host, agent: wraps[host.name](host, agent)

    def _python(self, host: Host) -> str:
        """Returns the interpreter on a host itself; the job's may be inside an image."""
        if self._detached.containers is not None:
            return this_machine.default_python()
        return planner.python_of(self._detached.job, host)

    async def _log_in(self, host: Host) -> Channel:
        try:
            return await connect(host, self._python(host), self._detached.ssh)
        except LoginError as refused:
            raise await refusal_error([refused], 1, self._detached.ssh) from None

    async def _send(
        self, channel: Channel, directory: RunDirectory, trees: Mapping[str, Tree | None]
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Sends the trees that the supervisor needs; returns their descriptions and folders.

        The folder's name differs from the job's own on that host, which the job's agent removes.
        """
        manifest, files = await asyncio.to_thread(installation)
        name = f"{self._request.run_id}-leaving"
        control = await send_tree(channel, manifest, files.__getitem__, name, "control")
        folders, descriptions = {"control": control}, dict[str, Any]()
        for kind, tree in trees.items():
            if tree is None:
                continue
            named_inputs = {source.path for source in self._detached.job.inputs if source.named}
            if not self._detached.job.follow_links and str(tree.root) not in named_inputs:
                reject_outward(tree.root, tree.outward)
            folder = "control" if kind == "package" else kind
            descriptions[kind] = {"root": str(tree.root), "manifest": tree.manifest, "in": folder}
            if kind != "package":
                folders[kind] = await send_tree(channel, tree.manifest, tree.file, name, kind)
        assert directory.key
        checkpoints = await asyncio.to_thread(local_sizes, directory.path / names.CHECKPOINTS)
        own_files = [names.KEY, names.METRICS, *(f"{names.CHECKPOINTS}/{p}" for p in checkpoints)]
        run = await asyncio.to_thread(read_parts, directory.path, own_files)
        code = trees["code"]
        self._project = None if code is None else code.root
        run, self._outputs = await asyncio.to_thread(with_outputs, run, code)
        self._sent_manifest = run.manifest
        folders[RUN_FOLDER] = await send_tree(channel, run.manifest, run.file, name, RUN_FOLDER)
        return descriptions, folders

    async def _send_data(self, channel: Channel, folder: DataFolder) -> dict[str, str]:
        """Sends the data to the supervisor's host, for itself and for the other hosts."""
        ship = self._detached.job.ship.value
        try:
            location = await data.locate(channel, folder, needs_copy=ship == "always")
        except OSError as error:
            raise data.unreadable(folder, error) from None
        if not location.in_place:
            placement.check_data(self._detached.job, self._host, location)
            sent = data.count_sent(self._screen.sending, location.size)
            await data.send(channel, folder, location, sent)
        return {"key": folder.key, "place": location.folder}

    # --- the start ------------------------------------------------------------------------------

    async def _supervise(self, channel: Channel | None, directory: RunDirectory | None,
                          folders: Mapping[str, str],
                          trees: Mapping[str, Any] | None = None) -> int | None:  # fmt: skip
        """Starts the supervisor and follows it; returns the exit status if the run is over."""
        run, host = self._detached, self._host
        python = self._python(host)
        start = {"run_id": self._request.run_id, "trees": dict(folders), "python": ""}
        if channel is None:
            python = start["python"] = sys.executable
        login = await Login.start(host, python, run.ssh, "supervisor", start)
        try:
            login.send(self._instructions(trees))
            code, folder = await self._follow_start(login, channel, directory)
            if code is None and directory is not None:
                self._write_location(directory, folder)
        finally:
            self._screen.started()
            for task in self._caller_tasks:
                task.cancel()
            await asyncio.gather(*self._caller_tasks, return_exceptions=True)
            await login.end(SUPERVISOR_GRACE_S)
            await asyncio.gather(*(called.end(3.0) for called in self._callers.values()))
        return code

    def _instructions(self, trees: Mapping[str, Any] | None) -> dict[str, Any]:
        """Returns the supervisor's instructions. They hold secrets, so no file may contain them."""
        run = self._detached
        redactor = Redactor(secrets_of(run.job, run.cluster))
        is_local = trees is None
        cluster = run.cluster
        if not is_local:  # to the supervisor's host, this machine is remote
            hosts = tuple(replace(host, local=False) for host in cluster.hosts)
            cluster = replace(cluster, hosts=hosts)
        return {
            "run_id": self._request.run_id,
            "key": self._key.hex(),
            "job": to_jsonable(run.job),
            "cluster": to_jsonable(cluster),
            "package": run.package,
            "supervisor": self._host.name,
            "containers": None if run.containers is None else run.containers.to_json(),
            "trees": None if is_local else dict(trees or {}),
            "data": self._data,
            "outputs": [asdict(output) for output in self._outputs],
            "run": str(run.run_dir.absolute()) if is_local else None,
            "shown": short(run.run_dir.absolute()),
            "command": [redactor.text(argument) for argument in mask_assignments(run.command)],
            "launched_by": this_machine.user_at_host(),
            "launched_in": str(run.run_dir.absolute()),
            **run.options,
        }

    async def _follow_start(self, login: Login, channel: Channel | None,
                             directory: RunDirectory | None) -> tuple[int | None, str]:  # fmt: skip
        """Follows the supervisor until it is detached (exit status ``None``) or the run is over."""
        folder, messages = "", SupervisorMessages()
        while True:
            report = await self._next_message(login)
            if report is None:
                raise self._supervisor_error(login)
            try:
                messages.check(report)
            except InvalidValue as problem:
                raise NodeError(
                    f"{self._host.name} sent what no supervisor of this version sends",
                    found=str(problem), remedy="Name another host: --supervisor HOST",
                ) from None  # fmt: skip
            if "refused" in report:
                raise NodeError(
                    f"{self._host.name} cannot supervise the run: {report['refused']}",
                    found=report.get("found", ""), remedy=report.get("remedy", ""),
                )  # fmt: skip
            if "listening" in report:
                folder = report["folder"]
                addresses = [(address, port) for address, port in report["listening"]]
                self._start_callers(login, addresses, report.get("certificate", ""))
            elif "starting" in report:
                self._screen.starting(report["starting"], report["done"], report["of"])
            elif "text" in report:
                self._screen.forward(report["text"], report["err"])
            elif "running" in report:
                await self._detach_callers()
                login.send({"do": "stay"})
            elif "left" in report:
                return None, folder
            elif "over" in report:
                if channel is not None and directory is not None and folder:
                    await self._fetch_results(channel, directory, f"{folder}/{RUN_FOLDER}")
                login.send({"do": "done"})
                if error := report.get("error"):
                    raise PacelineError(
                        error["message"], found=error["found"], remedy=error["remedy"],
                        exit_code=report["over"],
                    )  # fmt: skip
                return report["over"], folder

    async def _fetch_results(self, channel: Channel, directory: RunDirectory, root: str) -> None:
        """Fetches the files of a run that was over before it was detached."""
        note = self._screen.note
        fetcher = Fetcher(directory.path, note)
        outputs = DetachedOutputs(channel, self._request.run_id, directory.path, self._project,
                                  since=self._started)  # fmt: skip
        sizes = await fetcher.list_files(channel, root, None)
        await outputs.sync(root, sizes.get(names.OUTPUTS, 0), note, share=1.0, is_last=True)
        places = outputs.known_places()
        await CheckpointFetcher(channel, root, directory.path, fetcher, note=note).sync()
        await fetcher.fetch(channel, root, self._sent_manifest, directory.path,
                            skip=lambda path: path in places or not is_mirrored(path),
                            supervisor=True)  # fmt: skip
        await asyncio.to_thread(signed_model.sign_recorded, directory.path)

    async def _next_message(self, login: Login) -> dict[str, Any] | None:
        """Returns the supervisor's next message; raises if a caller fails first."""
        hearing = asyncio.ensure_future(login.receive())
        try:
            while not hearing.done():
                watched = [task for task in self._caller_tasks if not task.done()]
                await asyncio.wait([hearing, *watched], return_when=asyncio.FIRST_COMPLETED)
                await self._handle_caller_failures(login, hearing)
            return hearing.result()
        finally:
            hearing.cancel()

    def _supervisor_error(self, login: Login) -> PacelineError:
        stderr = login.stderr.strip()
        refusal = classify(stderr, login.status, self._host)
        details, remedy = refusal.details, refusal.remedy
        if refusal.cause in (NO_ANSWER, UNEXPECTED_COMMAND):
            details = "\n".join(stderr.splitlines()[-8:]) or "without a message"
            remedy = "Name another host: --supervisor HOST"
        text = f"the supervisor on {self._host.name} ended before the run began"
        return NodeError(text, found=details, remedy=remedy)

    def _write_location(self, directory: RunDirectory, folder: str) -> None:
        host, ssh = self._host, self._detached.ssh
        config = str(ssh.config.absolute()) if ssh.config else None
        location = SupervisorLocation(
            self._request.run_id, host.name, host.address, folder, time.time(), host.user,
            host.port, host.identity_file, self._python(host), config,
            None if self._project is None else str(self._project),
        )  # fmt: skip
        detached_file.write(directory.path, location)

    # --- the callers ----------------------------------------------------------------------------

    def _start_callers(self, login: Login, addresses: Sequence[tuple[str, int]],
                       certificate: str) -> None:  # fmt: skip
        local_agent = self._host.local and self._wrap is None  # it is a child of its supervisor
        for index, host in enumerate(self._request.hosts):
            if not (host.local and local_agent):
                watching = self._watch_caller(index, host, addresses, certificate)
                self._caller_tasks.append(asyncio.create_task(watching))

    async def _watch_caller(self, index: int, host: Host, addresses: Sequence[tuple[str, int]],
                            certificate: str) -> None:  # fmt: skip
        """Starts a caller and watches it; raises LoginError, or _CallerFailed when it ends."""
        if reason := self._hosts_without_container.get(host.name):
            raise _CallerFailed(host, reason)
        wrap, python = self._wrap, self._python(host)
        config = caller_config(
            addresses, certificate, [planner.python_of(self._detached.job, host)], [],
            PROCESS_VARIABLES, CALLER_TIMEOUT_S, {"index": index, "node": host.name},
            wrap=list if wrap is None else partial(wrap, host), is_single_use=wrap is not None,
        )  # fmt: skip
        start = {"argv": caller_command(config), "env": {caller.KEY_VARIABLE: self._key.hex()}}
        async with self._gate:
            login = await start_caller(host, python, self._detached.ssh, start)
        self._callers[host.name] = login
        if await login.receive() is None and "paceline-call:" in login.stderr:
            raise _CallerFailed(host, _caller_message(login.stderr))

    async def _handle_caller_failures(self, login: Login, hearing: asyncio.Future[Any]) -> None:
        """Tells the supervisor of failed callers if the run may go without them, else raises."""
        if not any(map(_task_error, self._caller_tasks)):
            return
        if not self._tolerates_missing:  # more refusals may follow: one error for all
            await asyncio.wait(self._caller_tasks, timeout=REFUSALS_S)
        problems = [*filter(None, map(_task_error, self._caller_tasks))]
        refusals = [error for error in problems if isinstance(error, LoginError)]
        failures = [error for error in problems if isinstance(error, _CallerFailed)]
        for error in problems:
            if not isinstance(error, (LoginError, _CallerFailed)):
                raise error
        if self._tolerates_missing:
            self._caller_tasks = [task for task in self._caller_tasks if _task_error(task) is None]
            reasons = {error.host.name: error.refusal.details for error in refusals}
            reasons |= {error.host.name: error.reason for error in failures}
            login.send({"do": "missing", "missing": reasons})
        elif refusals:
            raise await refusal_error(refusals, len(self._request.hosts), self._detached.ssh)
        else:
            raise ConnectError(
                f"{', '.join(error.host.name for error in failures)} cannot reach the supervisor on"
                f" {self._host.name}",
                found="\n".join(f"{error.host.name}: {error.reason}" for error in failures),
                remedy="Look for a firewall between them (a run takes any free TCP port), or name"
                " another host or interface: --supervisor HOST, --iface NAME",
            )

    @property
    def _tolerates_missing(self) -> bool:
        job = self._detached.job
        is_waiting = job.wait_for_nodes_s.source is not Source.DEFAULT
        return is_waiting or isinstance(job.nnodes.value, NodeRange)

    async def _detach_callers(self) -> None:
        """Detaches the callers. The supervisor notices those that fail."""
        for login in self._callers.values():
            login.detach()
        if self._caller_tasks:
            await asyncio.wait(self._caller_tasks, timeout=DETACH_TIMEOUT_S)


def supervisor_among(hosts: Sequence[Host], name: str | None) -> Host:
    """Returns the host of that name, or the first; SettingError if the job has no such host."""
    if name is None:
        return hosts[0]
    for host in hosts:
        if name in (host.name, host.address):
            return host
    raise SettingError(
        f"--supervisor {name}: that is none of the job's hosts",
        found=", ".join(host.name for host in hosts),
        remedy="Name one of these",
    )


class _CallerFailed(Exception):
    """A caller ended before it reached its supervisor."""

    def __init__(self, host: Host, reason: str) -> None:
        super().__init__(f"{host.name}: {reason}")
        self.host, self.reason = host, reason


def _task_error(task: asyncio.Task[None]) -> BaseException | None:
    return task.exception() if task.done() and not task.cancelled() else None


def _caller_message(stderr: str) -> str:
    """Returns the last lines that a caller printed."""
    lines = [line.removeprefix("paceline-call: ") for line in stderr.strip().splitlines()]
    return "\n".join(lines[-3:]) or "it ended without a message"


# --- logins


async def start_caller(host: Host, python: str, ssh: SshOptions, start: Mapping[str, Any]) -> Login:
    """Starts a caller on a host, with retries; raises LoginError when it cannot."""
    for attempt in range(1, MAX_ATTEMPTS + 1):
        login = await Login.start(host, python, ssh, "caller", start)
        try:
            report = await asyncio.wait_for(login.receive(), FIRST_REPLY_S)
        except asyncio.TimeoutError:
            report = None
        except BaseException:
            await login.end(0.0)
            raise
        if report is not None:
            return login
        await login.end(0.0)
        refusal = classify(login.stderr, login.status, host)
        if not refusal.is_transient or attempt == MAX_ATTEMPTS:
            raise LoginError(host, refusal)
        await asyncio.sleep(random.uniform(0.2, 0.6) * 2**attempt)  # noqa: S311 - jitter
    raise AssertionError("unreachable")


@dataclass
class Login:
    """A login with a program that may be detached from it."""

    host: Host
    _link: ProcessLink
    _stderr: bytearray = field(default_factory=bytearray)
    _stderr_task: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, host: Host, python: str, ssh: SshOptions, program: str,
                 start: Mapping[str, Any]) -> Login:  # fmt: skip
        """Starts ``caller`` or ``supervisor`` on a host, and sends the message ``start``.

        Uses no ssh on this machine. Does not wait for a reply.
        """
        remote = agent_command(python)
        command = remote if host.local else ssh_command(host, ssh, remote)
        login = cls(host, ProcessLink(await spawn(command, limit=MAX_MESSAGE_BYTES)))
        login._stderr_task = asyncio.create_task(login._read_stderr())
        text = json.dumps(start).encode()
        login._link.writer.write(detach_source(program) + b"%010d" % len(text) + text)
        return login

    async def _read_stderr(self) -> None:
        with contextlib.suppress(OSError):
            while data := await self._link.errors.read(1 << 16):
                self._stderr += data
                del self._stderr[: -(1 << 16)]

    @property
    def stderr(self) -> str:
        """The last 64 KiB of standard error."""
        return self._stderr.decode(errors="replace")

    @property
    def status(self) -> int | None:
        return self._link.status

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends one message."""
        with contextlib.suppress(OSError):
            self._link.writer.write(json.dumps(message).encode() + b"\n")

    def detach(self) -> None:
        """Tells a caller to detach."""
        with contextlib.suppress(OSError):
            self._link.writer.write(b"stay\n")

    async def receive(self) -> dict[str, Any] | None:
        """Returns the next message, empty if it is invalid; ``None`` at the end.

        Ignores what start-up files print.
        """
        while (line := await self._read_line()).endswith(b"\n"):
            _, mark, payload = line.partition(MARK)
            if mark:
                message = parse_json(payload.decode(errors="replace"))
                return message if isinstance(message, dict) else {}
        if self._stderr_task is not None:
            await asyncio.wait([self._stderr_task], timeout=0.5)
        await self._link.has_exited()
        return None

    async def _read_line(self) -> bytes:
        with contextlib.suppress(OSError, ValueError):  # ValueError: a line without an end
            return await self._link.reader.readline()
        return b""

    async def end(self, grace_s: float) -> None:
        """Ends the login; a program that is not detached gets ``grace_s`` to end in order."""
        await self._link.end(grace_s)
        if self._stderr_task is not None:
            self._stderr_task.cancel()
            await asyncio.gather(self._stderr_task, return_exceptions=True)
