"""Runs that go on without the command that started them: how verbs look at them, and ask them.

The launcher of such a run is on this machine, in another terminal, or it is a supervisor on some
host. A :class:`Way` leads to it. Where it is on another host, looking at it also brings the run's
folder here up to date, and once it is over everything comes home.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import getpass
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import click

from paceline.cli.launch import read_cluster
from paceline.cli.lost import ends_in_s
from paceline.cli.runs import asked, current_run, end, end_word, look_at, named_run
from paceline.cli.sources import setting
from paceline.cli.verb import say
from paceline.cli.via import ssh_of
from paceline.remote import this_machine
from paceline.remote.channel import AgentRefusal, LoginRefused, Silent
from paceline.remote.fanout import reach_all
from paceline.remote.openssh import SshOptions
from paceline.rundir import detached_file, records
from paceline.rundir.ownership import detached_of, owner_alive, owner_here, read_owner
from paceline.spec.command import shell_text
from paceline.spec.detached import DETACHED, About, Detached
from paceline.spec.errors import ConnectError, NodeError, PacelineError, SettingError
from paceline.spec.failure import Result
from paceline.spec.hosts import Host
from paceline.spec.rundir import DEFAULT_PARENT
from paceline.spec.settings import Source
from paceline.spec.terminal import for_reader
from paceline.transfer.follow import Follower, Forgotten, Standing, follow

LOOK_EVERY_S = 0.5
GOODBYE_S = 0.5
MORE_LOOKS = 3  # of who looks once only, at files that change every second
AGAIN_S = 2.0  # until the supervisor's host is dialled again


class Way(Protocol):
    """Leads to the launcher of one run, wherever that is.

    Attributes:
        path: The run's folder here.
        trouble: Why it cannot be asked at present; empty while it can.
    """

    path: Path
    trouble: str

    async def look(self) -> Standing:
        """How the run stands now; its files here are as new as that."""

    async def ask(self, wish: dict[str, Any]) -> dict[str, Any]:
        """What the launcher answers. PacelineError where it refuses, or cannot be asked."""

    async def home(self) -> None:
        """After the end: everything is here."""

    async def stop(self, *, now: bool) -> None:
        """Ends the run, with time to save or at once."""

    async def close(self) -> None:
        """The end of looking."""


class Here:
    """To a launcher on this machine."""

    trouble = ""

    def __init__(self, path: Path) -> None:
        self.path = path

    async def look(self) -> Standing:
        owner = read_owner(self.path)
        if owner is not None and owner_alive(owner):
            return Standing("running", None, news=True)
        return Standing("lost" if look_at(self.path).word == "lost" else "ended", None, news=True)

    async def ask(self, wish: dict[str, Any]) -> dict[str, Any]:
        owner = read_owner(self.path) or {}
        if not owner_here(owner):
            raise NodeError(
                f"the launcher of {self.path} runs on {owner.get('host')}",
                remedy=f"Type this there: ssh {owner.get('host')}",
            )
        try:
            return understood(await asyncio.to_thread(asked, self.path, owner, wish))
        except (TimeoutError, ValueError) as problem:
            raise NodeError("the launcher gave no answer", found=str(problem)) from None

    async def stop(self, *, now: bool) -> None:
        try:
            await self.ask({"do": "stop", "now": now})
        except NodeError:  # it does not listen
            end(look_at(self.path), now)

    async def home(self) -> None:
        """All of it is here already."""

    async def close(self) -> None:
        """Nothing was opened."""


class There:
    """To a supervisor on another host, over SSH; the connection is made again when it breaks."""

    def __init__(self, path: Path, detached: Detached) -> None:
        self.path, self.trouble = path, ""
        self._detached = detached
        self._follower: Follower | None = None
        self._standing: Standing | None = None
        self._again_at = 0.0

    async def look(self) -> Standing:
        """ConnectError where the host could never be asked; later the last known, and trouble.

        NodeError where it knows nothing of the run, or what it sends cannot be written here.
        """
        known, now = self._standing, time.monotonic()
        if known is not None and self._follower is None and now < self._again_at:
            return replace(known, news=False)
        try:
            if self._follower is None:
                self._follower = await follow(self.path, self._detached)
            self._standing = known = await self._follower.refresh()
            self.trouble = ""
        except Forgotten:  # another follower brought everything, and it was removed there
            if known is None and detached_of(self.path) is not None:
                raise
            about = known.about if known is not None else None
            self._standing = Standing("ended", about)
            return self._standing
        except (ConnectionError, ConnectError, Silent) as problem:
            await self.close()
            if known is None:
                raise self._cut_off(problem) from None
            self.trouble = str(problem).partition("\n")[0]
            self._again_at = time.monotonic() + AGAIN_S
            known = replace(known, news=False)
        return known

    @property
    def behind(self) -> bool:
        """Whether another look brings what the last could not."""
        return self._follower is not None and self._follower.behind

    async def ask(self, wish: dict[str, Any]) -> dict[str, Any]:
        if self._follower is None:
            raise NodeError(self.trouble or f"{self._detached.host} cannot be asked now")
        try:
            return understood(await self._follower.ask(wish))
        except (AgentRefusal, ValueError) as problem:
            raise NodeError(
                f"the supervisor on {self._detached.host} gave no answer", found=str(problem)
            ) from None
        except (ConnectionError, Silent) as problem:
            raise self._cut_off(problem) from None

    async def stop(self, *, now: bool) -> None:
        try:
            await self.ask({"do": "stop", "now": now})
        except NodeError:  # it does not listen
            if self._follower is None:
                raise
            try:
                await self._follower.signal(2 if now else 1)
            except (ConnectionError, Silent) as problem:
                raise self._cut_off(problem) from None

    async def home(self) -> None:
        """Everything comes; with its last follower the run's folder on the other host goes."""
        if self._follower is None or self._standing is None:
            raise ConnectError(f"{self._detached.host} cannot be asked now", found=self.trouble)
        is_whole = True
        if detached_of(self.path) is not None:  # else another follower has done it
            if self._standing.word == "lost":
                await self._ranks_ended()
            try:
                is_whole = await self._follower.finish(self._standing.word, _note)
            except (ConnectionError, Silent) as problem:
                raise self._cut_off(problem) from None
        about = self._standing.about
        with contextlib.suppress(NodeError, ConnectionError):
            await self._follower.discard(
                fetched=is_whole and about is not None and started_here(about, self.path)
            )

    async def _ranks_ended(self) -> None:
        """What ranks save until the lease is over lies in the folder that is about to go there."""
        wait_s = ends_in_s(self.path, time.time())
        if wait_s > 0:
            say(f"paceline: the run's supervisor is lost: its ranks have {wait_s:.0f} s to save"
                " something, which is waited for", err=True)  # fmt: skip
            await asyncio.sleep(wait_s)

    def _cut_off(self, problem: Exception) -> ConnectError:
        if isinstance(problem, ConnectError):
            return problem
        return ConnectError(
            f"the connection to {self._detached.host} is lost",
            found=str(problem),
            remedy=f"Type this again: what came is in {shell_text([str(self.path)])}",
        )

    async def close(self) -> None:
        follower, self._follower = self._follower, None
        if follower is not None:
            await follower.channel.close()


def _note(text: str) -> None:
    say(for_reader(text, sys.stderr), err=True)


def understood(answer: dict[str, Any] | None) -> dict[str, Any]:
    """A launcher's answer. PacelineError for a refusal, and where nobody listens."""
    if answer is None:
        raise NodeError("the run's launcher takes no wishes: it ends, or has not begun yet")
    if "error" in answer:
        error, found, remedy = (str(answer.get(name, "")) for name in ("error", "found", "remedy"))
        raise PacelineError(error, found=found, remedy=remedy)
    return answer


def started_here(about: About, path: Path) -> bool:
    """Whether the run was started on this machine, with that folder."""
    me = f"{getpass.getuser()}@{socket.gethostname()}"
    return about.launched_by == me and about.launched_in == str(path.absolute())


def way_to(path: Path) -> Way | None:
    """The way to a run's launcher; ``None`` where the run is over and all of it is here."""
    owner = read_owner(path)
    if owner is not None and owner_alive(owner):
        return Here(path)
    detached = detached_of(path)
    return None if detached is None else There(path, detached)


def up_to_date(path: Path) -> None:
    """Brings the folder of a run up to date that goes on, or has ended, on another host.

    ConnectError where that cannot be asked, NodeError where it no longer knows the run.
    """
    way = way_to(path)
    if isinstance(way, There):
        asyncio.run(_once(way))


async def _once(way: There) -> None:
    try:
        standing = await way.look()
        for _ in range(MORE_LOOKS):
            if standing.over or not way.behind:
                break
            standing = await way.look()
        if standing.over:
            await way.home()
    finally:
        await way.close()


def as_far_as_possible(path: Path) -> bool:
    """As :func:`up_to_date`; where that cannot be, says so, and what is here is looked at.

    Returns:
        Whether it is up to date.
    """
    try:
        up_to_date(path)
        return True
    except (PacelineError, ConnectionError) as problem:
        text = problem.render() if isinstance(problem, PacelineError) else f"paceline: {problem}"
        say(for_reader(text, sys.stderr), err=True)
        return False


@contextlib.contextmanager
def kept_up_to_date(path: Path) -> Iterator[Callable[[], bool]]:
    """Keeps a run's folder up to date meanwhile; gives what says whether the run is over.

    PacelineError where that cannot be asked at first, or the results cannot come home at the end.
    """
    way = way_to(path)
    if not isinstance(way, There):
        yield lambda: look_at(path).over
        return
    keeper = _Keeper(way)
    keeper.start()
    try:
        yield keeper.over
    finally:
        keeper.end()


class _Keeper:
    """Looks in a thread of its own, until the run is over and all is here, or nobody wants it."""

    def __init__(self, way: There) -> None:
        self._way = way
        self._begun, self._ended = threading.Event(), threading.Event()
        self._problem: BaseException | None = None
        self._over = False
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)

    def start(self) -> None:
        """Returns when the folder is up to date for the first time."""
        self._thread.start()
        self._begun.wait()
        if self._problem is not None:
            raise self._problem

    def over(self) -> bool:
        """Whether the run is over, and all of it is here."""
        if self._problem is not None:
            raise self._problem
        return self._over

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._keep())
        except BaseException as problem:
            self._problem = problem
        finally:
            self._begun.set()

    async def _keep(self) -> None:
        try:
            while not self._ended.is_set():
                standing = await self._way.look()
                if standing.over and not self._way.trouble:
                    await self._way.home()
                    self._over = True
                    return
                self._begun.set()
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            await self._way.close()


# --- which run is meant --------------------------------------------------------------------------


def meant(ctx: click.Context, *, ended: bool = False) -> Path:
    """The folder here of the run that a verb is about, which may lie on a host that -H names.

    A run that has no folder here gets one.

    Args:
        ctx: Of a verb with the options of ``of_a_left_run``.
        ended: Where none is named and none is running, the newest is meant, as below runs/.

    Raises:
        SettingError: There is none, or several could be meant.
    """
    typed = setting(ctx, "hosts").source is Source.COMMAND_LINE
    if not typed:
        try:
            return current_run(ctx)
        except SettingError:
            if ctx.params["hosts"] is None or named_run(ctx) is None:
                raise
    cluster, ssh = read_cluster(ctx, ctx.params["hosts"]), ssh_of(ctx.params)
    found = asyncio.run(left_on(cluster.hosts, ssh))
    run = chosen(found, named_run(ctx), ended=ended)
    own = Path(run.about.run)
    if run.host.local and own.is_dir():
        return own
    return folder_here(run.about, leads_to(run, ssh), Path(DEFAULT_PARENT))


def chosen(found: Found, named: str | None, *, ended: bool = False) -> Left:
    """The run that is meant of those that were left on hosts; ``ended`` as for :func:`meant`.

    SettingError where none is, or several could be.
    """
    listed = [f"{one.name} on {one.host.name}: {one.word}" for one in found.runs]
    refused = [f"{host} could not be asked: {why}" for host, why in found.refused]
    if named is None:
        fitting = [one for one in found.runs if one.word == "running"]
        if not fitting and ended:
            fitting = sorted(found.runs, key=lambda one: one.about.started)[-1:]
        problem = "no run goes on on these hosts"
    else:
        wanted = Path(named).name
        fitting = [one for one in found.runs if wanted in (one.name, one.about.run_id)]
        problem = f"no run {named} was left on these hosts"
    if len(fitting) == 1:
        return fitting[0]
    remedy = "Name one of these behind the hosts" if listed else "paceline runs -H …"
    if fitting:
        problem = f"{len(fitting)} runs could be meant"
        listed = [f"{one.name} on {one.host.name} ({one.about.run_id})" for one in fitting]
        remedy = f"Name one of them: {fitting[0].about.run_id}"
    raise SettingError(problem, found="\n".join([*listed, *refused]), remedy=remedy)


# --- folders of runs that were started elsewhere ------------------------------------------------


def folder_here(about: About, detached: Detached, parent: Path) -> Path:
    """The folder of a run below ``parent``, made where it is not there.

    NodeError where it cannot be made.
    """
    try:
        with _alone_in(parent):
            return _folder_here(about, detached, parent)
    except OSError as error:
        raise NodeError(f"no folder can be made in {parent}", found=str(error)) from None


@contextlib.contextmanager
def _alone_in(parent: Path) -> Iterator[None]:
    """Of several commands that find no folder of a run at once, one makes it."""
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # a disk without locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _folder_here(about: About, detached: Detached, parent: Path) -> Path:
    from paceline.rundir.directory import fresh_path

    for path in records.folders_in(parent):
        said = Detached.read(records.read_object(path / DETACHED) or {})
        if said is not None and said.run_id == about.run_id:
            if detached_of(path) is not None and not detached_file.is_authentic(path):
                detached_file.write(path, detached)
            return path
    name = Path(about.launched_in).name
    path = parent / name
    if not name or name.startswith(".") or path.exists():
        path = fresh_path(parent, about.name or "run")
    path.mkdir(mode=0o700)
    detached_file.write(path, detached)
    return path


def stop_there(path: Path, now: bool, patience_s: float) -> bool:
    """Ends a run whose supervisor is on another host, and brings it home.

    Returns:
        False where it was over already.

    Raises:
        NodeError: It does not end in time.
    """
    detached = detached_of(path)
    assert detached is not None
    return asyncio.run(_stop(There(path, detached), now, patience_s))


async def _stop(way: There, now: bool, patience_s: float) -> bool:
    try:
        standing = await way.look()
        ran = not standing.over
        if ran:
            await way.stop(now=now)
        until = time.monotonic() + patience_s
        while not standing.over:
            if time.monotonic() > until:
                raise NodeError(f"{way.path} has not ended within {patience_s:.0f} s",
                                found=way.trouble, remedy="--now")  # fmt: skip
            await asyncio.sleep(LOOK_EVERY_S / 2)
            standing = await way.look()
        await way.home()
        return ran
    finally:
        await way.close()


# --- runs that were left on hosts ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Left:
    """A run in its supervisor's folder on a host.

    Attributes:
        host: Where.
        about: What it is.
        alive: Whether its supervisor lives; ``None``: on another host, which shares the folder.
        result, where, metrics: Its files of these names, the end of the last; may be empty.
    """

    host: Host
    about: About
    alive: bool | None
    result: str
    where: str
    metrics: str

    @property
    def word(self) -> str:
        """``running``, ``lost``, or how it ended (:func:`end_word`)."""
        if self.about.ended is not None or (self.alive is False and self.result):
            said = records.parse_json(self.result)
            result = Result.from_json(said if isinstance(said, dict) else {})
            return end_word(result, None if self.about.ended is None else self.about.exit_code)
        return "lost" if self.alive is False else "running"

    @property
    def name(self) -> str:
        """What its folder was called where it was started."""
        return Path(self.about.launched_in).name or self.about.name or self.about.run_id


@dataclass(frozen=True, slots=True)
class Found:
    """What some hosts tell of the runs that were left there.

    Attributes:
        runs: By host, the newest first.
        refused: Hosts that could not be asked, each with the reason.
    """

    runs: tuple[Left, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()


async def left_on(hosts: Sequence[Host], ssh: SshOptions, discard: Sequence[str] = ()) -> Found:
    """Asks hosts for the runs that were left there.

    Args:
        hosts: Each is logged in to, those that refuse are told.
        ssh: How.
        discard: Ids of runs that are removed there, if they are over.
    """
    pythons = [host.python or this_machine.default_python() for host in hosts]
    outcomes = await reach_all(hosts, pythons, ssh)
    refused = [(one.host.name, f"{one.refusal.cause}: {one.refusal.found}")
               for one in outcomes if isinstance(one, LoginRefused)]  # fmt: skip
    runs: list[Left] = []
    seen: set[str] = set()
    for channel in outcomes:
        if isinstance(channel, LoginRefused):
            continue
        try:
            for run_id in discard:
                await channel.request("discard_run", run_id=run_id, fetched=True)
            answer = await channel.request("detached_runs")
        except (NodeError, ConnectionError) as problem:
            refused.append((channel.host.name, str(problem).partition("\n")[0]))
            continue
        finally:
            await channel.close(GOODBYE_S)
        for one in answer["runs"]:
            said = records.parse_json(one["about"])
            about = About.read(said) if isinstance(said, dict) else None
            if about is not None and about.run_id == one["run_id"] not in seen:
                seen.add(about.run_id)
                runs.append(Left(channel.host, about, one["alive"], one["result"], one["where"],
                                 one["metrics"]))  # fmt: skip
    return Found(tuple(runs), tuple(refused))


def leads_to(run: Left, ssh: SshOptions) -> Detached:
    """What leads to a run from a machine that did not start it."""
    host, config = run.host, str(ssh.config.absolute()) if ssh.config else None
    return Detached(
        run.about.run_id, host.name, host.address, str(Path(run.about.run).parent),
        run.about.started, host.user, host.port, host.identity_file,
        host.python or this_machine.default_python(), config,
    )  # fmt: skip
