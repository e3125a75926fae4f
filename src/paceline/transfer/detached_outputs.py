"""Copies files of a detached run's script between its supervisor's host and this machine.

While somebody is attached, they come to where the script wrote them; for the next start they go
back. The supervisor's journal says which files are complete. Its host is not trusted: the rules of
:class:`OutputStore` decide what arrives, and where.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.agent.files.snapshot import BLOCK_BYTES
from paceline.remote.channel import AgentRefusal, Channel
from paceline.rundir.arrivals import Arrivals
from paceline.rundir.detached_file import LineSeals
from paceline.rundir.earlier_outputs import EarlierOutputs
from paceline.rundir.output_rules import (
    WrittenFile,
    group_files,
    index_of,
    is_shard,
    order_of_arrival,
)
from paceline.rundir.outputs import MAX_JOURNAL_BYTES, Output, OutputJournal, OutputRecords
from paceline.rundir.ownership import detached_of
from paceline.spec.errors import NodeError
from paceline.spec.rundir import FETCHED, OUTPUTS
from paceline.transfer.output_folders import RUN_PREFIX, OutputFolder
from paceline.transfer.outputs import OutputStore
from paceline.transfer.tree import Tree

LOCK_RETRY_S = 0.2
EARLIER = f"{FETCHED}/earlier"  # in the supervisor's run directory: files of earlier starts


@dataclass(slots=True, eq=False)
class _SupervisorFolder(OutputFolder):
    """The run directory of a supervisor, with the place of each file in it."""

    places: Mapping[str, str] = field(default_factory=dict)

    def on_node(self, path: str) -> str:
        return self.places[path]


class DetachedOutputs:
    """Brings what the script of a detached run writes to this machine.

    Args:
        channel: To an agent on the supervisor's host.
        run: The run directory here.
        project: The project here; ``None`` on a machine that did not start the run.
        since: When the run started, if ``detached.json`` does not say it.
    """

    def __init__(self, channel: Channel, run_id: str, run: Path, project: Path | None, *,
                 since: float | None = None) -> None:  # fmt: skip
        self._channel, self._run_id, self._run = channel, run_id, run
        self._project = project if project is not None and project.is_dir() else None
        self._remote = OutputRecords()
        self._offset, self._partial = 0, b""
        self._arrived = dict[str, str]()  # SHA-256 of the version that is here, by path
        self._removed, self._noted = set[str](), set[str]()
        self._returned = list[Path]()  # to earlier runs, until a line names them
        self._since = since
        self._earlier: EarlierOutputs | None = None

    async def sync(self, root: str, journal_bytes: int, note: Callable[[str], None], *,
                   share: float, is_last: bool = False) -> None:  # fmt: skip
        """Fetches new versions of files, the newest first.

        Args:
            root: The supervisor's run directory.
            journal_bytes: Size of the journal there.
            note: Shows a line to the user.
            share: Part of the time in which files are transferred.
            is_last: The run is over: waits for another terminal that does the same, instead of
                leaving it to it, and names the files that did not arrive in the project.
        """
        await self._read_journal(min(journal_bytes, MAX_JOURNAL_BYTES))
        removed = {path for path, _ in self._remote.versions.values()} - self._remote.outputs.keys()
        is_here = all(map(self._is_here, self._remote.outputs.values()))
        if is_here and removed <= self._removed and not is_last:
            return
        while (lock := _try_lock(self._run)) is None:
            if not is_last:
                return
            await asyncio.sleep(LOCK_RETRY_S)
        try:
            store = OutputStore(self._run, note)
            store.noted, store.returned = self._noted, self._returned
            await asyncio.to_thread(self._set_project, store)
            replaced = {path for path in removed
                        if is_shard(path) and index_of(path) in self._remote.outputs}  # fmt: skip
            store.journal.remove(sorted(removed - replaced))
            await self._fetch(store, root, share)
            removed -= self._remove_replaced(store, replaced)
            self._removed = removed
            if is_last:
                self._note_kept_out(store)
        finally:
            os.close(lock)

    def _set_project(self, store: OutputStore) -> None:
        """Sets the project of a store, which replaces no file of a run that started later."""
        if self._earlier is None and self._project is not None:
            location = detached_of(self._run)
            since = self._since if location is None else location.since
            self._earlier = EarlierOutputs(self._run, self._project, since)
        store.set_code(self._project, [], self._earlier)

    def _remove_replaced(self, store: OutputStore, shards: Set[str]) -> set[str]:
        """Removes shards whose checkpoint has a new index here; returns those that stay for now."""
        left = set()
        for path in shards:
            index = store.journal.outputs.get(index_of(path))
            if index is not None and index.sha256 == self._remote.outputs[index.path].sha256:
                store.remove_shards([path], is_outside=bool(index.place))
            else:
                left.add(path)
        return left

    def _note_kept_out(self, store: OutputStore) -> None:
        """Names this run's files that did not arrive in the project, also in other terminals."""
        if self._project is not None:
            store.kept_out = {
                path: output.place for path, output in store.journal.outputs.items()
                if path in self._remote.outputs and output.place.startswith(f"{FETCHED}/")
            }  # fmt: skip
            store.note_kept_out()

    async def _read_journal(self, size: int) -> None:
        while self._offset < size:
            count = min(BLOCK_BYTES, size - self._offset)
            _, data = await self._channel.request_with_blob(
                "read_part", run_id=self._run_id, path=OUTPUTS, offset=self._offset, count=count,
                whole=False,
            )  # fmt: skip
            self._offset += count
            *lines, self._partial = (self._partial + data).split(b"\n")
            for line in lines:
                self._remote.read(line)

    def _is_here(self, output: Output) -> bool:
        return self._arrived.get(output.path) == output.sha256

    async def _fetch(self, store: OutputStore, root: str, share: float) -> None:
        outputs = {path: output for path, output in self._remote.outputs.items()
                   if store.travels(path)}  # fmt: skip
        self._arrived = {path: output.sha256 for path, output in store.journal.outputs.items()}
        self._arrived |= {path: output.sha256 for path, output in self._remote.outputs.items()
                          if path not in outputs}  # fmt: skip
        places = {path: output.place for path, output in outputs.items() if output.place}
        groups = group_files(WrittenFile(path, outputs[path].size, outputs[path].mtime_us)
                             for path in places)  # fmt: skip
        for unit in order_of_arrival(groups):
            group = groups[unit]
            expected = {file.path: outputs[file.path].sha256 for file in group}
            host = outputs[group[0].path].host
            is_here = all(self._is_here(outputs[file.path]) for file in group)
            if is_here or not store.has_room(host, unit, group):
                continue
            folder = _SupervisorFolder(self._channel.host.name, self._channel, root, places=places)
            try:
                hashes = await store.receive(folder, group, share)
            except (AgentRefusal, NodeError):  # a newer version replaces it just now
                continue
            if hashes == expected:
                await asyncio.to_thread(store.place_unit, host, group, hashes)
                self._arrived |= expected

    def known_places(self) -> set[str]:
        """Paths in the supervisor's run directory of versions that have arrived here."""
        local = set(OutputJournal(self._run, LineSeals(self._run)).versions.values())
        return {place for place, version in self._remote.versions.items() if version in local}


# --- for the next start ---------------------------------------------------------------------------


def with_outputs(run: Tree, code: Tree | None) -> tuple[Tree, list[Output]]:
    """Adds the outputs of earlier starts that are here to the files of a supervisor's run.

    Blocking. Also returns what its journal will say about them.

    Args:
        code: What hosts get of the project; ``None`` if they get nothing.
    """
    store = OutputStore(run.root, lambda text: None)
    if code is not None:
        store.set_code(code.root, code.manifest)
    manifest, files, outputs = [*run.manifest], dict[str, Path](), list[Output]()
    for prefix in ("", RUN_PREFIX):
        entries, paths = store.sendable(prefix)
        for entry in entries:
            path, sha256, mode, size = entry
            local, mtime_us = paths[str(path)]
            place = str(path).removeprefix(prefix) if prefix else f"{EARLIER}/{path}"
            manifest.append([place, sha256, mode, size])
            files[place] = local
            outputs.append(replace(
                store.journal.outputs[str(path)], size=int(str(size)), sha256=str(sha256),
                place=place, mtime_us=mtime_us, local_mtime_us=mtime_us,
            ))  # fmt: skip
    return replace(run, manifest=manifest, cached=files), outputs


def adopt_outputs(run: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Records the files that :func:`with_outputs` has added, in a supervisor's run directory."""
    outputs = [output for output in map(Output.read, lines) if output is not None]
    if not outputs:
        return
    arrivals = Arrivals(run)
    for output in outputs:
        os.utime(run / output.place, ns=(output.mtime_us * 1000,) * 2, follow_symlinks=False)
        arrivals.record(output.place)
    OutputJournal(run, LineSeals(run)).add(outputs)


def _try_lock(folder: Path) -> int | None:
    """Locks the folder until the returned descriptor is closed; ``None`` if another process has."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError:  # a disk without locks
        pass
    return fd
