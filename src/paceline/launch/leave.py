"""Starts a run that goes on without this machine: what its supervisor's host gets, and who calls.

The launching machine logs in to each host once, as ever. On one of them it starts the supervisor
(``cli/supervise.py``: the same launcher, from a copy of this installation), on all of them a caller
(``agent/caller.py``) that leads the supervisor to that host's agent. All of them stay in their
logins until the ranks run, and end with them if that does not come to be; then they are told to
stay, the callers before the supervisor: if this machine goes away in between, it is all over.
"""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import importlib.util
import json
import random
import secrets
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from paceline.agent import caller
from paceline.launch.interrupts import Interrupts
from paceline.launch.jobs import request_of, secrets_of, write_result
from paceline.launch.nodes.survey import package_tree, read_and_keep
from paceline.launch.planning import planner
from paceline.launch.planning.request import Package, Request
from paceline.launch.terminal.screen import Screen
from paceline.remote import this_machine
from paceline.remote.agent_code import detach_source
from paceline.remote.channel import Channel, LoginError
from paceline.remote.fanout import refusal_error, use_pidfd_watcher
from paceline.remote.link import ProcessLink
from paceline.remote.login import MAX_ATTEMPTS, MAX_PARALLEL_LOGINS, Wrap, connect
from paceline.remote.openssh import (
    NO_ANSWER,
    UNEXPECTED_COMMAND,
    SshOptions,
    agent_command,
    classify,
    ssh_command,
)
from paceline.remote.transport import Transport
from paceline.rendezvous.listener import caller_command, caller_config
from paceline.rundir import detached_file
from paceline.rundir.directory import Redactor, RunDirectory, short
from paceline.spec import rundir as names
from paceline.spec.detached import DETACHED, RUN_FOLDER, SupervisorLocation
from paceline.spec.errors import ConnectError, NodeError, PacelineError, SettingError
from paceline.spec.failure import Result
from paceline.spec.hosts import Cluster, Host
from paceline.spec.job import Job, NodeRange
from paceline.spec.launchers import PROCESS_VARIABLES
from paceline.spec.serialization import to_jsonable
from paceline.spec.settings import Source
from paceline.transfer import data
from paceline.transfer.data import DataFolder
from paceline.transfer.files import send_tree
from paceline.transfer.follow import is_remote
from paceline.transfer.links import reject_outward
from paceline.transfer.results import Fetcher
from paceline.transfer.tree import Manifest, Tree, read_parts

MARK = b"\xf5PLleave "
CARRIED = ("click",)  # the libraries that a supervisor needs, of Python alone
CALL_S = 15.0  # for a caller to reach its supervisor
START_S = 30.0  # for a login to say the first word
ALL_S = 1.0  # for the refusals of others, once a host has refused
STAY_S = 15.0  # to be left alone
END_S = 20.0  # for a supervisor to end a job that was given up
NOT_A_FILE = ("__pycache__",)


class Containers(Protocol):
    """What starts containers with agents in them."""

    async def wrapping(self, hosts: Sequence[Host]) -> Wrap:
        """Looks at the hosts, and gives what puts an agent's command into the container of one."""

    def to_json(self) -> dict[str, Any]:
        """Returns what the supervisor needs to restart lost containers, as JSON."""


@dataclass(frozen=True)
class Leaving:
    """A run that is to go on by itself.

    Attributes:
        job, cluster, transport, package: What to run, and where, as ``run_job`` takes it; the
            transport is not opened.
        supervisor: Name of the host that watches it; ``None`` for the first.
        run_dir: The run's folder here.
        command: The words that were typed, the program's name first.
        options: What else the supervisor is told: ``show``, ``check_level`` and ``keep_results``.
        ssh: How to log in.
        containers: What they run in, where agents run in containers.
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
class Outcome:
    """What came of it.

    Attributes:
        exit_code: Of the run, where it is over already; ``None`` where it goes on.
        host: Who supervises it.
        local: That is this machine.
        run_id: Names the run.
    """

    exit_code: int | None
    host: Host
    local: bool
    run_id: str


def leave(leaving: Leaving, screen: Screen) -> Outcome:
    """Starts the run, and returns when its ranks run or it is over.

    Raises:
        PacelineError: It could not be started, as with a run that is not left; nothing of it is
            left on any host.
    """
    return asyncio.run(_Start(leaving, screen).run())


class _Start:
    """One run on its way to be left."""

    def __init__(self, leaving: Leaving, screen: Screen) -> None:
        self._leaving, self._screen = leaving, screen
        self._key = secrets.token_bytes(32)
        self._request: Request = request_of(
            leaving.job, leaving.cluster, leaving.transport, leaving.package
        )
        hosts = self._request.hosts
        self._host = supervisor_among(hosts, leaving.supervisor)
        self._wrap: Wrap | None = None
        self._lacking: dict[str, str] = {}  # hosts that can start no container, and why
        self._callers: dict[str, Login] = {}
        self._sent: Manifest = []
        self._data: dict[str, str] | None = None  # how the supervisor finds the folder of --data
        self._watching: list[asyncio.Task[None]] = []
        self._gate = asyncio.Semaphore(MAX_PARALLEL_LOGINS)

    async def run(self) -> Outcome:
        task = asyncio.current_task()
        assert task is not None
        with Interrupts(lambda: self._interrupted(task)) as self._interrupts:
            try:
                use_pidfd_watcher()
                code = await (self._here() if self._host.local else self._there())
            except asyncio.CancelledError:
                if not self._interrupts.received:
                    raise
                code = 128 + self._interrupts.received[0]
        return Outcome(code, self._host, self._host.local, self._request.run_id)

    def _interrupted(self, task: asyncio.Task[Any]) -> None:
        if len(self._interrupts.received) == 1:  # a second one shall not reach into the closing
            task.cancel()

    # --- the supervisor's host ------------------------------------------------------------------

    async def _here(self) -> int | None:
        """The supervisor is to run on this machine, in the run's folder itself."""
        await self._look_at_containers()
        return await self._supervised(None, None, {})

    async def _there(self) -> int | None:
        """The supervisor is to run on another machine: all that it needs goes there first."""
        leaving, host, began = self._leaving, self._host, time.monotonic()
        detached_file.ensure_key()
        secret, run_id = secrets_of(leaving.job, leaving.cluster), self._request.run_id
        directory = RunDirectory(leaving.run_dir, secret, run_id)
        for old in (DETACHED, names.RESULT):  # of an earlier run in this folder
            (directory.path / old).unlink(missing_ok=True)
        try:
            self._screen.starting("connecting", 0, 1)
            await self._look_at_containers()
            supplies, channel = await asyncio.gather(
                asyncio.to_thread(read_and_keep, self._request), self._logged_in(host)
            )
            try:
                self._screen.starting("connecting", 1, 1)
                trees = {"code": supplies.code, "package": supplies.package}
                for number, tree in enumerate(supplies.inputs.values()):
                    trees[f"input{number}"] = tree
                reply, places = await self._send(channel, directory, trees)
                if supplies.data is not None:
                    self._data = await self._send_data(channel, supplies.data)
                return await self._supervised(channel, directory, places, reply)
            finally:
                await channel.close(1.0)
        except PacelineError as error:
            if not (directory.path / names.RESULT).exists():
                result = Result(error.exit_code, error=error.render())
                write_result(directory, run_id, result, began, {})
            raise
        finally:
            self._screen.started()
            directory.close()

    async def _look_at_containers(self) -> None:
        """Where it may do with fewer hosts, each by itself: the others begin without it."""
        containers, hosts = self._leaving.containers, self._request.hosts
        if containers is None:
            return
        if not self._may_miss:
            self._wrap = await containers.wrapping(hosts)
            return
        looks = (containers.wrapping([host]) for host in hosts)
        results = await asyncio.gather(*looks, return_exceptions=True)
        wraps: dict[str, Wrap] = {}
        for host, result in zip(hosts, results, strict=True):
            if isinstance(result, PacelineError) and len(hosts) > 1:
                self._lacking[host.name] = result.brief
            elif isinstance(result, BaseException):
                raise result
            else:
                wraps[host.name] = result
        self._wrap = lambda host, agent: wraps[host.name](host, agent)

    def _python(self, host: Host) -> str:
        """The interpreter on a host itself, for what is no rank; the job's may be in an image."""
        if self._leaving.containers is not None:
            return this_machine.default_python()
        return planner.python_of(self._leaving.job, host)

    async def _logged_in(self, host: Host) -> Channel:
        try:
            return await connect(host, self._python(host), self._leaving.ssh)
        except LoginError as refused:
            raise await refusal_error([refused], 1, self._leaving.ssh) from None

    async def _send(
        self, channel: Channel, directory: RunDirectory, trees: Mapping[str, Tree | None]
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Sends what the supervisor needs; what it is told of it, and where it lies until then.

        The job's own agent there has a folder of that run, too, and removes it: this one has
        another name.
        """
        manifest, where = await asyncio.to_thread(installation)
        name = f"{self._request.run_id}-leaving"
        places = {"control": await send_tree(channel, manifest, where.__getitem__, name, "control")}
        about: dict[str, Any] = {}
        for called, tree in trees.items():
            if tree is None:
                continue
            named = {one.path for one in self._leaving.job.inputs if one.named}
            if not self._leaving.job.follow_links and str(tree.root) not in named:
                reject_outward(tree.root, tree.outward)
            about[called] = {"root": str(tree.root), "manifest": tree.manifest, "in": called}
            if called == "package":
                about[called]["in"] = "control"
            else:
                places[called] = await send_tree(channel, tree.manifest, tree.file, name, called)
        assert directory.key
        kept = [names.KEY, names.METRICS, names.CHECKPOINTS]
        run = await asyncio.to_thread(read_parts, directory.path, kept)
        self._sent = run.manifest
        places[RUN_FOLDER] = await send_tree(channel, run.manifest, run.file, name, RUN_FOLDER)
        return about, places

    async def _send_data(self, channel: Channel, folder: DataFolder) -> dict[str, str]:
        """Has the supervisor's host get the data, for itself and for the other hosts."""
        ship = self._leaving.job.ship.value
        try:
            place = await data.locate(channel, folder, needs_copy=ship == "always")
        except OSError as error:
            raise data.unreadable(folder, error) from None
        if ship == "never" and (place.missing or place.extra):
            raise planner.data_mismatch(str(folder.root), self._host, place)
        if not place.in_place:
            if not self._leaving.job.follow_links:
                reject_outward(folder.root, place.outward)
            done = 0

            def sent(count: int) -> None:
                nonlocal done
                done += count
                self._screen.sending(done, place.size)

            if place.size:
                self._screen.sending(0, place.size)
            await data.send(channel, folder, place, sent)
        return {"key": folder.key, "place": place.folder}

    # --- the start ------------------------------------------------------------------------------

    async def _supervised(self, channel: Channel | None, directory: RunDirectory | None,
                          places: Mapping[str, str],
                          trees: Mapping[str, Any] | None = None) -> int | None:  # fmt: skip
        """From the supervisor's first word to its last; its exit status where it is over."""
        leaving, host = self._leaving, self._host
        python = self._python(host)
        start = {"run_id": self._request.run_id, "trees": dict(places), "python": ""}
        if channel is None:
            python = start["python"] = sys.executable
        login = await Login.to(host, python, leaving.ssh, "supervisor", start)
        try:
            login.say(self._errand(trees))
            code, folder = await self._until_it_runs(login, channel, directory)
            if code is None and directory is not None:
                self._leads_back(directory, folder)
        finally:
            self._screen.started()
            for task in self._watching:
                task.cancel()
            await asyncio.gather(*self._watching, return_exceptions=True)
            await login.end(END_S)
            await asyncio.gather(*(one.end(3.0) for one in self._callers.values()))
        return code

    def _errand(self, trees: Mapping[str, Any] | None) -> dict[str, Any]:
        """What the supervisor is told to do. It holds secrets, and so stands in no file."""
        leaving = self._leaving
        hidden = Redactor(secrets_of(leaving.job, leaving.cluster))
        here = trees is None
        cluster = replace(leaving.cluster, hosts=tuple(
            host if here else _seen_from_elsewhere(host) for host in leaving.cluster.hosts
        ))  # fmt: skip
        return {
            "run_id": self._request.run_id,
            "key": self._key.hex(),
            "job": to_jsonable(leaving.job),
            "cluster": to_jsonable(cluster),
            "package": leaving.package,
            "supervisor": self._host.name,
            "containers": None if leaving.containers is None else leaving.containers.to_json(),
            "trees": None if here else dict(trees or {}),
            "data": self._data,
            "run": str(leaving.run_dir.absolute()) if here else None,
            "shown": short(leaving.run_dir.absolute()),
            "command": [hidden.text(word) for word in leaving.command],
            "launched_by": f"{getpass.getuser()}@{socket.gethostname()}",
            "launched_in": str(leaving.run_dir.absolute()),
            **leaving.options,
        }

    async def _until_it_runs(self, login: Login, channel: Channel | None,
                             directory: RunDirectory | None) -> tuple[int | None, str]:  # fmt: skip
        """Heeds the supervisor until it is left alone, or has nothing more to do."""
        folder = ""
        while True:
            report = await self._next(login)
            if report is None:
                raise self._no_supervisor(login)
            if "refused" in report:
                raise NodeError(
                    f"{self._host.name} cannot supervise the run: {report['refused']}",
                    found=report.get("found", ""), remedy=report.get("remedy", ""),
                )  # fmt: skip
            if "listening" in report:
                folder = str(report["folder"])
                self._have_all_call(login, [(str(a), int(p)) for a, p in report["listening"]])
            elif "starting" in report:
                self._screen.starting(report["starting"], report["done"], report["of"])
            elif "text" in report:
                self._screen.pass_on(report["text"], report["err"])
            elif "running" in report:
                await self._all_stay()
                login.say({"do": "stay"})
            elif "left" in report:
                return None, folder
            elif "over" in report:
                if channel is not None and directory is not None:
                    await self._bring_home(channel, directory, folder)
                login.say({"do": "done"})
                if error := report.get("error"):
                    raise PacelineError(
                        error["message"], found=error["found"], remedy=error["remedy"],
                        exit_code=report["over"],
                    )  # fmt: skip
                return int(report["over"]), folder

    async def _next(self, login: Login) -> dict[str, Any] | None:
        """The supervisor's next word, unless a caller fails before it."""
        hearing = asyncio.ensure_future(login.hear())
        try:
            while not hearing.done():
                watched = [task for task in self._watching if not task.done()]
                await asyncio.wait([hearing, *watched], return_when=asyncio.FIRST_COMPLETED)
                await self._see_failures(login, hearing)
            return hearing.result()
        finally:
            hearing.cancel()

    def _no_supervisor(self, login: Login) -> PacelineError:
        words = login.words.strip()
        refusal = classify(words, login.status, self._host)
        known = refusal.cause not in (NO_ANSWER, UNEXPECTED_COMMAND)
        return NodeError(
            f"the supervisor on {self._host.name} ended before the run began",
            found=refusal.details
            if known
            else "\n".join(words.splitlines()[-8:]) or "without a word",
            remedy=refusal.remedy if known else "Name another host: --supervisor HOST",
        )

    async def _bring_home(self, channel: Channel, directory: RunDirectory, folder: str) -> None:
        """What a run that ended at once has left, as an attached one would have left it here."""
        await Fetcher(directory.path, self._screen.note).fetch(
            channel, f"{folder}/{RUN_FOLDER}", self._sent, directory.path,
            skip=lambda path: not is_remote(path), supervisor=True,
        )  # fmt: skip

    def _leads_back(self, directory: RunDirectory, folder: str) -> None:
        host, ssh = self._host, self._leaving.ssh
        config = str(ssh.config.absolute()) if ssh.config else None
        back = SupervisorLocation(
            self._request.run_id, host.name, host.address, folder, time.time(), host.user,
            host.port, host.identity_file, self._python(host), config,
        )  # fmt: skip
        detached_file.write(directory.path, back)

    # --- who calls ------------------------------------------------------------------------------

    def _have_all_call(self, login: Login, addresses: Sequence[tuple[str, int]]) -> None:
        local_agent = self._host.local and self._wrap is None  # a child of its supervisor
        for place, host in enumerate(self._request.hosts):
            if not (host.local and local_agent):
                self._watching.append(asyncio.create_task(self._call(place, host, addresses)))

    async def _call(self, place: int, host: Host, addresses: Sequence[tuple[str, int]]) -> None:
        """Starts a caller and watches it. ConnectError when it ends, LoginError when refused."""
        if why := self._lacking.get(host.name):
            raise _Unheard(host, why)
        wrap, python = self._wrap, self._python(host)
        settings = {"index": place, "node": host.name}
        config = caller_config(
            addresses, [planner.python_of(self._leaving.job, host)], [], PROCESS_VARIABLES, CALL_S,
            settings, wrap=list if wrap is None else partial(wrap, host),
            is_single_use=wrap is not None,
        )  # fmt: skip
        start = {"argv": caller_command(config), "env": {caller.KEY_VARIABLE: self._key.hex()}}
        async with self._gate:
            login = await started(host, python, self._leaving.ssh, start)
        self._callers[host.name] = login
        if await login.hear() is None and "paceline-call:" in login.words:
            raise _Unheard(host, _called(login.words))

    async def _see_failures(self, login: Login, hearing: asyncio.Future[Any]) -> None:
        """What is wrong with callers: told to the supervisor where it may do with fewer."""
        if not any(map(_problem, self._watching)):
            return
        if not self._may_miss:  # others may be refused in the same moment: one error for all
            await asyncio.wait(self._watching, timeout=ALL_S)
        problems = [one for one in map(_problem, self._watching) if one is not None]
        refused = [one for one in problems if isinstance(one, LoginError)]
        unheard = [one for one in problems if isinstance(one, _Unheard)]
        if len(refused) + len(unheard) < len(problems):
            raise next(one for one in problems if not isinstance(one, (LoginError, _Unheard)))
        if self._may_miss:
            self._watching = [task for task in self._watching if _problem(task) is None]
            why = {one.host.name: one.refusal.details for one in refused}
            why |= {one.host.name: one.found for one in unheard}
            login.say({"do": "missing", "missing": why})
        elif refused:
            raise await refusal_error(refused, len(self._request.hosts), self._leaving.ssh)
        else:
            raise ConnectError(
                f"{', '.join(one.host.name for one in unheard)} cannot reach the supervisor on"
                f" {self._host.name}",
                found="\n".join(f"{one.host.name}: {one.found}" for one in unheard),
                remedy="Look for a firewall between them (a run takes any free TCP port), or name"
                " another host or interface: --supervisor HOST, --iface NAME",
            )

    @property
    def _may_miss(self) -> bool:
        job = self._leaving.job
        asked = job.wait_for_nodes_s.source is not Source.DEFAULT
        return asked or isinstance(job.nnodes.value, NodeRange)

    async def _all_stay(self) -> None:
        """Callers stay when their logins end. What becomes of others, the supervisor sees."""
        for login in self._callers.values():
            login.stay()
        if self._watching:
            await asyncio.wait(self._watching, timeout=STAY_S)


def supervisor_among(hosts: Sequence[Host], name: str | None) -> Host:
    """The host that is to supervise. SettingError for one that is not of the job."""
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


def _seen_from_elsewhere(host: Host) -> Host:
    """A host as a supervisor on another machine sees it: this machine is one like any other."""
    return replace(host, local=False)


class _Unheard(Exception):
    """A caller ended before its supervisor was there."""

    def __init__(self, host: Host, found: str) -> None:
        super().__init__(f"{host.name}: {found}")
        self.host, self.found = host, found


def _problem(task: asyncio.Task[None]) -> BaseException | None:
    return task.exception() if task.done() and not task.cancelled() else None


def _called(words: str) -> str:
    """What a caller said at its end."""
    lines = [line.removeprefix("paceline-call: ") for line in words.strip().splitlines()]
    return "\n".join(lines[-3:]) or "it ended without a word"


def installation() -> tuple[Manifest, dict[str, Path]]:
    """This very paceline with the libraries that a supervisor needs, and where its files lie."""
    tree = package_tree(True)
    manifest, where = list(tree.manifest), {}
    for entry in manifest:
        where[str(entry[0])] = tree.file(str(entry[0]))
    for name in CARRIED:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        folder = Path(spec.origin).parent
        library = read_parts(folder.parent, [folder.name])
        for entry in library.manifest:
            if not set(str(entry[0]).split("/")) & set(NOT_A_FILE):
                manifest.append(entry)
                where[str(entry[0])] = library.file(str(entry[0]))
    return manifest, where


# --- logins


async def started(host: Host, python: str, ssh: SshOptions, start: Mapping[str, Any]) -> Login:
    """A caller on a host; what may pass is tried again. LoginError when it cannot be had."""
    for attempt in range(1, MAX_ATTEMPTS + 1):
        login = await Login.to(host, python, ssh, "caller", start)
        try:
            report = await asyncio.wait_for(login.hear(), START_S)
        except asyncio.TimeoutError:
            report = None
        except BaseException:
            await login.end(0.0)
            raise
        if report is not None:
            return login
        await login.end(0.0)
        refusal = classify(login.words, login.status, host)
        if not refusal.is_transient or attempt == MAX_ATTEMPTS:
            raise LoginError(host, refusal)
        await asyncio.sleep(random.uniform(0.2, 0.6) * 2**attempt)  # noqa: S311 - jitter
    raise AssertionError("unreachable")


@dataclass
class Login:
    """A login in which something is started that may stay.

    Attributes:
        host: Where.
        left: It said that it stays.
    """

    host: Host
    _link: ProcessLink
    left: bool = False
    _heard: bytearray = field(default_factory=bytearray)
    _words: bytearray = field(default_factory=bytearray)
    _reading: asyncio.Task[None] | None = None

    @classmethod
    async def to(cls, host: Host, python: str, ssh: SshOptions, what: str,
                 start: Mapping[str, Any]) -> Login:  # fmt: skip
        """Logs in, without waiting for a word; on this machine without ssh.

        Args:
            host, python, ssh: Where, by which interpreter, and how.
            what: ``caller`` or ``supervisor``.
            start: What it is told first.
        """
        remote = agent_command(python)
        process = await asyncio.create_subprocess_exec(
            *(remote if host.local else ssh_command(host, ssh, remote)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for us, who end all of it in order
        )
        login = cls(host, ProcessLink(process))
        login._reading = asyncio.create_task(login._read_words())
        text = json.dumps(start).encode()
        login._link.writer.write(detach_source(what) + b"%010d" % len(text) + text)
        return login

    async def _read_words(self) -> None:
        with contextlib.suppress(OSError):
            while data := await self._link.errors.read(1 << 16):
                self._words += data
                del self._words[: -(1 << 16)]

    @property
    def words(self) -> str:
        """What came on standard error, the end of it."""
        return self._words.decode(errors="replace")

    @property
    def status(self) -> int | None:
        return self._link.status

    def say(self, words: Mapping[str, Any]) -> None:
        """One line, to whoever is there."""
        with contextlib.suppress(OSError):
            self._link.writer.write(json.dumps(words).encode() + b"\n")

    def stay(self) -> None:
        """Tells a caller that it may stay."""
        with contextlib.suppress(OSError):
            self._link.writer.write(b"stay\n")

    async def hear(self) -> dict[str, Any] | None:
        """The next word; ``None`` at the end. What start-up files print is passed over."""
        while True:
            while (end := self._heard.find(b"\n")) < 0:
                with contextlib.suppress(OSError):
                    if data := await self._link.reader.read(1 << 18):
                        self._heard += data
                        continue
                await self._last_words()
                return None
            line = bytes(self._heard[:end])
            del self._heard[: end + 1]
            _, mark, said = line.partition(MARK)
            if mark:
                found: dict[str, Any] = json.loads(said)
                self.left = self.left or "left" in found
                return found

    async def _last_words(self) -> None:
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=0.5)
        await self._link.has_exited()

    async def end(self, patience_s: float) -> None:
        """Ends the login; what did not stay has so many seconds to end in order."""
        await self._link.end(patience_s)
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
