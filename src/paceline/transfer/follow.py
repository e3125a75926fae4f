"""Mirrors a detached run's directory from the supervisor's host.

While it runs, appended bytes of logs, events and metrics and small files are fetched; at the end
all other files: checkpoints, the model, the ranks' files. The host is not trusted: names stay below
the folder and follow no link, and files that only the launching machine writes are not taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from paceline.agent.files import safe_paths
from paceline.agent.files.snapshot import BLOCK_BYTES, MAX_RESULTS
from paceline.remote.channel import AgentRefusal, Channel
from paceline.remote.fanout import connect_hosts
from paceline.remote.openssh import SshOptions
from paceline.rundir import detached_file, records, signed_model
from paceline.rundir.arrivals import Arrivals
from paceline.rundir.directory import write_text
from paceline.rundir.output_rules import is_python_code
from paceline.rundir.ownership import FETCHED_AT, LAST_STATUS
from paceline.spec import rundir as names
from paceline.spec.detached import DETACHED, DetachedRecord, SupervisorLocation
from paceline.spec.errors import ConnectError, NodeError
from paceline.spec.events import read_events
from paceline.spec.formatting import format_time, shell_text
from paceline.transfer.checkpoints import CheckpointFetcher
from paceline.transfer.detached_outputs import DetachedOutputs
from paceline.transfer.results import (
    RESULT_LIMIT,
    Fetcher,
    copy_command,
    room_problem,
    write_error,
)

MAX_SMALL_BYTES = 1 << 20  # larger files that do not grow are fetched at the end
MAX_PARALLEL = 8
OVERLAP_BYTES = 1 << 16  # at the beginning, and before the new bytes, that must match
_LOCAL_FILES = {
    DETACHED, names.OWNER, names.FORECAST, names.BATCH, names.REPORT, "index.html",
    names.OUTPUTS,  # says which local files may be sent and replaced
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunState:
    """The state of a run, according to its supervisor's host.

    Attributes:
        state: ``running``, ``ended``, or ``lost`` (its supervisor died without a result).
        has_changed: Whether any file was fetched.
    """

    state: str
    record: DetachedRecord | None
    has_changed: bool = False

    @property
    def is_over(self) -> bool:
        return self.state != "running"


def is_mirrored(path: str) -> bool:
    """Whether a run's file is copied from the supervisor's host, by its name alone."""
    top = safe_paths.fold_name(path.split("/")[0])
    is_local = top in _LOCAL_FILES or top.startswith(".") or names.is_backup(path)
    # no record of a run is code; other files get their place by rundir/arrivals.py
    is_record = names.is_launcher_file(path) and not path.startswith(f"{names.FETCHED}/")
    runs_code = is_record and is_python_code(path)
    return not (is_local or runs_code or names.is_fetched_separately(top))


class UnknownRun(NodeError):
    """A host has no such run: its results were fetched or have expired."""


class Follower:
    """Mirrors the run directory of a supervisor's host.

    Args:
        path: The local folder, private to this user; links in it are not followed.
        project: The project of the script on this machine, if the run was started here.

    Attributes:
        has_report: The run has a page, which is made here anew: that host could put anything in it.
        note: Shows a line to the user.
    """

    def __init__(
        self, channel: Channel, run_id: str, path: Path, project: Path | None = None
    ) -> None:
        self.note: Callable[[str], None] = lambda text: None
        self.channel, self.run_id, self._path = channel, run_id, path
        self.has_report = False
        self._afresh = True
        self._arrivals = Arrivals(path)
        self._root = ""
        self._missing: dict[str, tuple[str, int]] = {}  # files to retry: path → mark, size
        self._sizes: dict[str, int] = {}  # of the fetched files
        self._total_bytes = 0  # of these
        self._excess = ""  # why some files are not fetched
        self._inodes: dict[str, str] = {}  # remote inodes of verified growing files
        self._gate = asyncio.Semaphore(MAX_PARALLEL)
        self._journal_bytes = 0  # of the list of files that the script wrote
        self._outputs = DetachedOutputs(channel, run_id, path, project)

    @property
    def is_behind(self) -> bool:
        """Whether a file changed while it was read and is still outdated."""
        return bool(self._missing)

    async def refresh(self) -> RunState:
        """Fetches new and changed files.

        Raises:
            UnknownRun: There is no such run.
            NodeError: It cannot be written locally.
            ConnectionError, HostUnresponsive: The connection ended.
        """
        answer = await self.channel.request("run_changes", run_id=self.run_id, afresh=self._afresh)
        record = records.parse_json(answer["about"])
        detached = DetachedRecord.read(record) if isinstance(record, dict) else None
        if detached is None or detached.run_id != self.run_id:
            raise UnknownRun(
                f"{self.channel.host.name} has no run {self.run_id} any more",
                found="its results were fetched from there, or it was left for longer than"
                " they are kept",
            )
        afresh, self._afresh, self._root = self._afresh, False, str(answer["root"])
        files = {file["path"]: (file["mark"], file["size"]) for file in answer["files"]}
        self.has_report = self.has_report or names.REPORT in files
        self._journal_bytes = files.get(names.OUTPUTS, ("", self._journal_bytes))[1]
        changed = {**self._missing, **files}
        for path in answer["gone"]:
            changed.pop(path, None)
        for name in (names.RESULT, names.RANKS):  # the outcome of an earlier start
            if name in answer["gone"] or (afresh and name not in files):
                (self._path / name).unlink(missing_ok=True)
        self._missing = {}
        if afresh:
            self._sizes, self._total_bytes, self._excess = {}, 0, ""
        needed, fetches = 0, list[Coroutine[Any, Any, None]]()
        for path, (mark, size) in changed.items():
            is_small = names.is_growing(path) or size <= MAX_SMALL_BYTES
            if not is_mirrored(path) or safe_paths.refusal_reason(path) or not is_small:
                continue
            new_bytes = max(0, size - self._local_size(path))
            if self._fits(path, size, needed + new_bytes):
                needed += new_bytes
                fetches.append(self._fetch(path, mark, size))
        await self._run_limited(fetches)
        has_ended = detached.ended is not None
        state = "ended" if has_ended else "running"
        if answer["alive"] is False and not has_ended:
            state = "ended" if records.is_regular(self._path / names.RESULT) else "lost"
        return RunState(state, detached, bool(fetches))

    def _local_size(self, path: str) -> int:
        try:
            return (self._path / path).lstat().st_size
        except OSError:
            return 0

    def _fits(self, path: str, size: int, needed_bytes: int) -> bool:
        """Whether a file of this size is fetched; notes the first that is not, with the reason."""
        total = self._total_bytes - self._sizes.get(path, 0) + size
        problem = room_problem(self._path, needed_bytes)
        if total > RESULT_LIMIT or len(self._sizes) > MAX_RESULTS:
            problem = f"{total >> 20} MiB up to there, more than what is brought back"
        if not problem:
            self._sizes[path], self._total_bytes = size, total
        elif not self._excess:
            self._excess = f"{path}: {problem}"
            self.note(f"paceline: not all files of {self.channel.host.name} are fetched:"
                      f" {self._excess}")  # fmt: skip
        return not problem

    async def _run_limited(self, coroutines: list[Coroutine[Any, Any, None]]) -> None:
        async def limited(coroutine: Coroutine[Any, Any, None]) -> None:
            async with self._gate:
                await coroutine

        outcomes = await asyncio.gather(*map(limited, coroutines), return_exceptions=True)
        for problem in filter(None, outcomes):
            if isinstance(problem, OSError) and not isinstance(problem, ConnectionError):
                raise write_error(self.channel, self._root, self._path, problem)
            raise problem

    async def _fetch(self, path: str, mark: str, size: int) -> None:
        try:
            if names.is_growing(path):
                await self._append(path, mark, size)
            else:
                data = await self._read(path, 0, size, is_complete=True)
                await asyncio.to_thread(self._write_file, path, data)
        except AgentRefusal:  # it has changed meanwhile: retry with the next refresh
            self._missing[path] = mark, size

    async def _read(self, path: str, offset: int, count: int, is_complete: bool = False) -> bytes:
        _, data = await self.channel.request_with_blob(
            "read_part", run_id=self.run_id, path=path, offset=offset, count=count,
            whole=is_complete,
        )  # fmt: skip
        return data

    def _write_file(self, path: str, data: bytes) -> None:
        """Writes a complete file, without a sync: it can be fetched again.

        Leaves files of an earlier start to :meth:`finish`, which moves them if they differ, with a
        line, or replaces them if the run continues that start.
        """
        direct = names.is_launcher_file(path) and not path.startswith(f"{names.FETCHED}/")
        place = path if direct else self._arrivals.place(path, self.channel.host.name)
        if not direct and self._arrivals.is_earlier(place):
            return
        safe_paths.write_file(str(self._path), place, data, durable=False)
        if not direct:
            self._arrivals.record(place)

    async def _append(self, path: str, mark: str, size: int) -> None:
        """Fetches the bytes appended to a file, or all of it if the local part differs.

        Several followers may do so at the same time: each byte has a fixed position.
        """
        inode = mark.partition(".")[0]
        fd = self._open(path)
        try:
            offset = os.fstat(fd).st_size
            is_verified = self._inodes.get(path) == inode and offset <= size
            if offset > size or not (is_verified or await self._agrees(fd, path, offset)):
                fd, offset = self._replace(fd, path), 0
            self._inodes[path] = inode
            while offset < size:
                count = min(BLOCK_BYTES, size - offset)
                if room_problem(self._path, count):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path / path))
                data = await self._read(path, offset, count)
                os.pwrite(fd, data, offset)
                offset += len(data)
        finally:
            os.close(fd)

    def _open(self, path: str) -> int:
        return safe_paths.open_file(str(self._path), path, os.O_RDWR | os.O_CREAT)

    def _replace(self, fd: int, path: str) -> int:
        """Renames the file of an earlier start, opens an empty one and closes ``fd``."""
        with contextlib.suppress(FileNotFoundError):  # another follower was faster
            if os.path.samestat((self._path / path).lstat(), os.fstat(fd)):
                backup = names.backup_name(Path(path)).as_posix()
                safe_paths.rename(str(self._path), path, backup, durable=False)
        replacement = self._open(path)
        os.close(fd)
        return replacement

    async def _agrees(self, fd: int, path: str, size: int) -> bool:
        """Whether the first and the last bytes of a file's first ``size`` are equal on both sides.

        The same script often writes the same last lines, and as many bytes, in each start.
        """
        count = min(size, OVERLAP_BYTES)
        for offset in {0, size - count} if count else ():
            if await self._read(path, offset, count) != os.pread(fd, count, offset):
                return False
        return True

    async def sync_outputs(self, *, share: float = 1.0) -> None:
        """Fetches files that the script wrote and that were complete at the last refresh.

        Args:
            share: Part of the time in which files are transferred.
        """
        await self._outputs.sync(self._root, self._journal_bytes, self.note, share=share)

    async def finish(self, state: str = "ended",
                     note: Callable[[str], None] = lambda text: None) -> bool:  # fmt: skip
        """Fetches all remaining files after the end, and records that with the run's state.

        Returns False if some files were refused and stay there. Raises NodeError if results are too
        large or cannot be written.
        """
        self._afresh = True
        await self.refresh()
        await self._outputs.sync(self._root, self._journal_bytes, note, share=1.0, is_last=True)
        places = await asyncio.to_thread(self._outputs.known_places)
        fetcher = Fetcher(self._path, note)
        events = read_events(records.read_records(self._path / names.EVENTS))
        first_attempt = takewhile(lambda event: event.kind != "ended", events)
        fetcher.keeps_earlier = not any(event.kind == "resumed" for event in first_attempt)
        keep = [event["keep"] or 0 for event in events if event.kind == "keeps checkpoints"]
        checkpoints = CheckpointFetcher(
            self.channel, self._root, self._path, fetcher, keep=keep[-1] if keep else 0, note=note
        )
        checkpoints.resumes = not fetcher.keeps_earlier
        await checkpoints.sync()
        await fetcher.fetch(
            self.channel, self._root, None, self._path,
            skip=lambda path: path in places or path in _LOCAL_FILES or names.is_growing(path)
            or names.is_fetched_separately(path) or names.is_backup(path),
            rejection_reason=lambda path: "" if is_mirrored(path) else names.reserved_reason(path),
            supervisor=True,
        )  # fmt: skip
        await asyncio.to_thread(signed_model.sign_recorded, self._path)
        if self._excess:
            raise NodeError(
                f"not all results on {self.channel.host.name} are fetched", found=self._excess,
                remedy="Make room here, or copy them by hand to another disk: "
                + copy_command(self.channel, self._root),
            )  # fmt: skip
        if self._missing:
            files = ", ".join(sorted(self._missing)[:5])
            raise NodeError(f"{files} changed each time they were fetched")
        record = records.read_object(self._path / DETACHED) or {}
        record |= {FETCHED_AT: round(time.time(), 3), LAST_STATUS: state}
        text = json.dumps(record, indent=2) + "\n"
        await asyncio.to_thread(write_text, self._path, DETACHED, text)
        return not fetcher.incomplete_hosts

    async def ask(self, message: Mapping[str, Any]) -> dict[str, Any] | None:
        """The supervisor's reply to a message of ``launch/control.py``; ``None`` if it is gone."""
        answer = await self.channel.request("ask_run", run_id=self.run_id, wish=dict(message))
        if answer["answer"] is None:
            return None
        reply = records.parse_json(answer["answer"])
        return reply if isinstance(reply, dict) else {}

    async def signal(self, times: int) -> bool:
        """Sends SIGTERM to the supervisor; returns whether it was alive."""
        answer = await self.channel.request("signal_run", run_id=self.run_id, times=times)
        return bool(answer["sent"])

    async def discard(self, *, fetched: bool) -> bool:
        """Releases the run's folder on the host; returns whether it was removed.

        Args:
            fetched: Everything was fetched: the folder is removed with its last follower.
        """
        answer = await self.channel.request("discard_run", run_id=self.run_id, fetched=fetched)
        return bool(answer["gone"])


async def follow(path: Path, detached: SupervisorLocation) -> Follower:
    """Logs in to the supervisor's host of a run.

    Raises ConnectError with the run's last known state, or SettingError if this user has not
    written the location.
    """
    detached_file.require_authentic(path, detached)
    config = Path(detached.ssh_config) if detached.ssh_config else None
    host = detached.to_host()
    try:
        (channel,) = await connect_hosts([host], [detached.python], SshOptions(config))
    except ConnectError as error:
        detached_at = format_time(detached.since, "%Y-%m-%d %H:%M")
        raise ConnectError(
            f"the run is on {detached.host} since {detached_at}, which cannot be asked now",
            found=error.found,
            remedy=f"{error.remedy}\nwhat came before is in {shell_text([str(path)])}",
        ) from None
    project = None if detached.project is None else Path(detached.project)
    return Follower(channel, detached.run_id, path, project)
