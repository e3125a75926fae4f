"""A detached run's directory here, kept like the one on the supervisor's host.

While the run lasts, its files come as they grow: appended bytes of logs, events and metrics, small
files whole. At its end everything else comes: checkpoints, the model, what ranks wrote. What a host
sends is not believed: names stay below the folder and pass over no link, what only the launching
machine writes is never taken from there, and who reads the files expects anything in them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.agent import inside
from paceline.agent.snapshot import BLOCK
from paceline.remote.channel import AgentRefusal, Channel
from paceline.remote.fanout import connect_all
from paceline.remote.openssh import SshOptions
from paceline.rundir import detached_file, records
from paceline.rundir.arrivals import Arrivals
from paceline.rundir.ownership import FETCHED_AT, LAST_STATUS
from paceline.spec import rundir as names
from paceline.spec.command import shell_text
from paceline.spec.detached import DETACHED, SCREEN, About, Detached
from paceline.spec.errors import ConnectError, NodeError
from paceline.transfer.checkpoints import CheckpointFetcher
from paceline.transfer.results import Fetcher

WHOLE = 1 << 20  # bytes: larger files that do not grow come at the end
UNDER_WAY = 8
SEEN_AGAIN = 256  # bytes before the new ones that must be what is here
_GROWING = {names.EVENTS, names.METRICS, SCREEN}
_OURS = {DETACHED, names.OWNER, names.FORECAST, names.BATCH, "index.html"}


@dataclass(frozen=True, slots=True)
class Standing:
    """How a run stands, by what its supervisor's host says.

    Attributes:
        word: ``running``, ``ended``, or ``lost`` (its supervisor died without a word).
        about: What it is.
        news: Whether anything came.
    """

    word: str
    about: About | None
    news: bool = False

    @property
    def over(self) -> bool:
        return self.word != "running"


def grows(path: str) -> bool:
    """Whether bytes are only added to a file of a run directory."""
    top = path.split("/")[0]
    return path in _GROWING or top in (names.LOGS, names.DEBUG)


def foreign(path: str) -> bool:
    """Whether a file is to come from the supervisor's host, and not written only here."""
    top = inside.folded(path.split("/")[0])
    return top not in _OURS and not top.startswith(".")


class Forgotten(NodeError):
    """A host has nothing of a run: its results were fetched, or kept for long enough."""


class Follower:
    """Keeps a folder here like the run directory on a supervisor's host.

    Args:
        channel: To an agent there.
        run_id: Which run.
        path: The folder here: of this user alone, and no link in it is followed.
    """

    def __init__(self, channel: Channel, run_id: str, path: Path) -> None:
        self.channel, self.run_id, self._path = channel, run_id, path
        self._afresh = True
        self._arrivals = Arrivals(path)
        self._root = ""
        self._owed: dict[str, tuple[str, int]] = {}  # what did not come: path → mark, size
        self._same: dict[str, str] = {}  # what is here of growing files is theirs: path → inode
        self._gate = asyncio.Semaphore(UNDER_WAY)

    @property
    def behind(self) -> bool:
        """Whether a file has changed while it was read, and is here as it was before."""
        return bool(self._owed)

    async def refresh(self) -> Standing:
        """Brings what is new.

        Raises:
            Forgotten: There is no such run.
            NodeError: It cannot be written here.
            ConnectionError, Silent: The connection ended.
        """
        answer = await self.channel.request("run_changes", run_id=self.run_id, afresh=self._afresh)
        about = _about(answer["about"])
        if about is None or about.run_id != self.run_id:
            raise Forgotten(
                f"{self.channel.host.name} has no run {self.run_id} any more",
                found="its results were fetched from there, or it was left for longer than"
                " they are kept",
            )
        afresh, self._afresh, self._root = self._afresh, False, str(answer["root"])
        wanted = {one["path"]: (one["mark"], one["size"]) for one in answer["files"]}
        changed = {**self._owed, **wanted}
        for path in answer["gone"]:
            changed.pop(path, None)
        self._forget({*answer["gone"]}, {*wanted} if afresh else None)
        self._owed = {}
        due = [
            self._bring(path, mark, size)
            for path, (mark, size) in changed.items()
            if foreign(path) and not inside.why_refused(path) and (grows(path) or size <= WHOLE)
        ]
        await self._all(due)
        ended = about.ended is not None
        word = "ended" if ended else "running"
        if answer["alive"] is False and not ended:
            said = records.is_regular(self._path / names.RESULT)
            word = "ended" if said else "lost"
        return Standing(word, about, bool(due))

    def _forget(self, gone: set[str], there: set[str] | None) -> None:
        """Takes away what says how an earlier start of the run ended, once that is not so."""
        for name in (names.RESULT, names.RANKS):
            if name in gone or (there is not None and name not in there):
                (self._path / name).unlink(missing_ok=True)

    async def _all(self, work: list[Coroutine[Any, Any, None]]) -> None:
        async def one(task: Coroutine[Any, Any, None]) -> None:
            async with self._gate:
                await task

        outcomes = await asyncio.gather(*map(one, work), return_exceptions=True)
        for problem in filter(None, outcomes):
            if isinstance(problem, OSError) and not isinstance(problem, ConnectionError):
                raise NodeError(
                    f"cannot write what {self.channel.host.name} sends",
                    found=f"{problem.strerror} ({problem.filename or self._path})",
                    remedy="Make room there, or look at what is in the way",
                )
            raise problem

    async def _bring(self, path: str, mark: str, size: int) -> None:
        try:
            if grows(path):
                await self._append(path, mark, size)
            else:
                data = await self._read(path, 0, size, whole=True)
                await asyncio.to_thread(self._put, path, data)
        except AgentRefusal:  # it has changed meanwhile: the next time
            self._owed[path] = mark, size

    async def _read(self, path: str, offset: int, count: int, whole: bool = False) -> bytes:
        _, data = await self.channel.ask(
            "read_part", run_id=self.run_id, path=path, offset=offset, count=count, whole=whole
        )
        return data

    def _put(self, path: str, data: bytes) -> None:
        """A whole file: it can be had again, so it need not be on the disk already."""
        direct = names.is_ours(path) and not path.startswith(f"{names.FETCHED}/")
        place = path if direct else self._arrivals.place(path, self.channel.host.name)
        file = inside.Arriving(str(self._path), place, durable=False)
        try:
            file.add(0, data)
            file.finish()
        finally:
            file.drop()
        if not direct:
            self._arrivals.record(place)

    async def _append(self, path: str, mark: str, size: int) -> None:
        """Brings what was added to a file; all of it where what is here is not its beginning.

        Several followers of this machine may do so at once: each byte has its place.
        """
        inode = mark.partition(".")[0]
        fd = self._open(path)
        try:
            here = os.fstat(fd).st_size
            known = self._same.get(path) == inode and here <= size
            again = 0 if known else min(here, SEEN_AGAIN)
            if here > size or (again and not await self._agrees(fd, path, here, again)):
                fd, here = self._anew(fd, path), 0
            self._same[path] = inode
            while here < size:
                data = await self._read(path, here, min(BLOCK, size - here))
                os.pwrite(fd, data, here)
                here += len(data)
        finally:
            os.close(fd)

    def _open(self, path: str) -> int:
        return inside.open_file(str(self._path), path, os.O_RDWR | os.O_CREAT)

    def _anew(self, fd: int, path: str) -> int:
        """An empty file in the place of that of an earlier start, which is kept beside it."""
        file = self._path / path
        mine = os.fstat(fd).st_ino
        os.close(fd)
        if file.lstat().st_ino == mine:  # else another follower was quicker
            inside.rename(str(self._path), path, names.aside(Path(path)).as_posix(), durable=False)
        return self._open(path)

    async def _agrees(self, fd: int, path: str, here: int, count: int) -> bool:
        """Whether the end of what is here stands there, too."""
        there = await self._read(path, here - count, count)
        return there == os.pread(fd, count, here - count)

    async def finish(self, word: str = "ended",
                     note: Callable[[str], None] = lambda text: None) -> bool:  # fmt: skip
        """After the end: brings all that is not here yet, and notes that everything is.

        Args:
            word: How it stands: ``ended`` or ``lost``.
            note: Tells the user.

        Returns:
            False when something was refused and stays there.

        Raises:
            NodeError: It is too much, or cannot be written.
            ConnectionError: The connection ended.
        """
        self._afresh = True
        await self.refresh()
        fetcher = Fetcher(self._path, note)
        await CheckpointFetcher(self.channel, self._root, self._path, fetcher, note=note).sync()
        await fetcher.fetch(
            self.channel, self._root, None, self._path, leave=self._leaves,
            refuse=lambda path: "" if foreign(path) else names.why_reserved(path), supervisor=True,
        )  # fmt: skip
        if self._owed:
            raise NodeError(f"{', '.join(sorted(self._owed)[:5])} did not come as they are there")
        said = records.read_object(self._path / DETACHED) or {}
        text = json.dumps({**said, FETCHED_AT: round(time.time(), 3), LAST_STATUS: word}, indent=2)
        await asyncio.to_thread(inside.write_file, str(self._path), DETACHED, text.encode() + b"\n")
        with contextlib.suppress(OSError):  # another follower still has something on its way
            (self._path / inside.INCOMING).rmdir()
        return not fetcher.left_on

    def _leaves(self, path: str) -> bool:
        """What came already, in its own way, and what only the supervisor needs."""
        own = path in _OURS or names.is_brought_apart(path)
        return own or grows(path)

    async def ask(self, wish: Mapping[str, Any]) -> dict[str, Any] | None:
        """What the supervisor answers to a wish (see ``launch/control.py``); ``None``: it is gone.

        AgentRefusal when it does not answer in time.
        """
        answer = await self.channel.request("ask_run", run_id=self.run_id, wish=dict(wish))
        if answer["answer"] is None:
            return None
        said = json.loads(answer["answer"])
        return said if isinstance(said, dict) else {}

    async def signal(self, times: int) -> bool:
        """Sends SIGTERM to the supervisor; whether it lived."""
        answer = await self.channel.request("signal_run", run_id=self.run_id, times=times)
        return bool(answer["sent"])

    async def discard(self, *, fetched: bool) -> bool:
        """Lets the folder there go, as far as this follower is concerned; whether it is gone.

        Args:
            fetched: Everything is where the run was started: it goes with its last follower.
        """
        answer = await self.channel.request("discard_run", run_id=self.run_id, fetched=fetched)
        return bool(answer["gone"])


def _about(text: str) -> About | None:
    said = records.parse_json(text)
    return About.read(said) if isinstance(said, dict) else None


async def follow(path: Path, detached: Detached) -> Follower:
    """Logs in to the supervisor's host of a run.

    ConnectError where that cannot be had, with what is known of the run; SettingError where it was
    not this user who wrote that the run is there.
    """
    detached_file.require_authentic(path, detached)
    config = Path(detached.ssh_config) if detached.ssh_config else None
    host = detached.to_host()
    try:
        (channel,) = await connect_all([host], [detached.python], SshOptions(config))
    except ConnectError as error:
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(detached.since))
        raise ConnectError(
            f"the run is on {detached.host} since {since}, which cannot be asked now",
            found=error.found,
            remedy=f"{error.remedy}\nwhat came before is in {shell_text([str(path)])}",
        ) from None
    return Follower(channel, detached.run_id, path)
