"""Copies files that a script writes below its project from rank 0's node, and to the other nodes.

``local_outputs.py`` says where they are put on this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path

from paceline.agent.files.safe_paths import IncomingFile
from paceline.agent.files.snapshot import hash_file
from paceline.remote.channel import AgentRefusal
from paceline.rundir.output_rules import (
    CheckpointNames,
    WrittenFile,
    checkpoint_names,
    group_files,
    head_of,
    index_of,
    is_checkpoint,
    is_index,
    is_log,
    is_of_other_rank,
    is_of_save,
    is_shard,
    matches_earlier,
    order_of_arrival,
    rank_in,
    series_of,
    split_growing_logs,
    superseded_units,
    unit_of,
    withheld_root,
)
from paceline.rundir.outputs import Output
from paceline.spec.errors import NodeError
from paceline.spec.formatting import format_size
from paceline.transfer.files import send_blocks
from paceline.transfer.local_outputs import MAX_NAMED, UNPLACED, LocalOutputs
from paceline.transfer.output_folders import (
    Beginning,
    Groups,
    OutputFolder,
    accompanying_logs,
    batch_of,
    fetch_slowly,
    grows,
    is_being_saved,
    is_due,
    is_final,
    is_new,
    latest_change_us,
    old_shards,
    shards_beside,
)
from paceline.transfer.results import RESULT_LIMIT, room_problem
from paceline.transfer.torch_files import has_state, is_intact, shards_in

CLOCK_SLACK_S = 2.0  # between the clocks of a disk and of this process
MAX_SKEW_US = 2_000_000  # between the clocks of two hosts
MAX_SAVE_US = 30_000_000  # between the ends of two ranks' shards of a save
MIN_GROWTH_S = 10.0  # for which the beginning of a log must not change before it is fetched
MIN_NOTED_BYTES = 64 << 20  # to send, of which a line tells


class OutputStore(LocalOutputs):
    """Copies the files that a script wrote in all runs of a run directory from and to nodes.

    Attributes:
        noted: Files and folders of which a line has said that there is no room for them.
        unfetched: Paths on rank 0's node whose present version is not here though its ranks have
            ended; ``None`` if that is unknown, as when its host was lost.
        has_succeeded: Whether the ranks have ended well: each has ended its last save.
    """

    def __init__(self, run: Path, note: Callable[[str], None]) -> None:
        super().__init__(run, note)
        self.noted = set[str]()
        self.unfetched: set[str] | None = set()
        self.has_succeeded = False
        self._is_receiving = asyncio.Lock()

    # --- from rank 0's node ------------------------------------------------------------------

    async def open_folder(self, folder: OutputFolder) -> None:
        """Notes the present time of a node's folder: files that change later are outputs."""
        folder.opened_at = time.monotonic()
        if folder.only_checkpoints:  # a list of all files would delay the start
            folder.since_us = self.journal.mark_local_start(time.time_ns() // 1000)
            return
        folder.since_us = await latest_change_us(folder.channel, folder.root)
        if folder.prefix:  # nothing but files of this run is in it
            folder.since_us = 0
            self._note_earlier_saves(folder, await self.list_files(folder))
        elif folder.is_local:  # a launcher that was killed may not have recorded the last ones
            later_us = folder.since_us + 1  # than all files of the user
            folder.since_us = min(self.journal.mark_local_start(later_us), later_us)
        if not folder.prefix:  # the latest files of the code may be as late
            sent = [file for file in await self.list_files(folder) if self._was_sent(file.path)]
            folder.fetched |= {file.path: file.version for file in sent}
            folder.earlier |= {file.path: file.version for file in sent if is_of_save(file.path)}

    async def list_files(self, folder: OutputFolder) -> list[WrittenFile]:
        """Lists the outputs in a node's folder that may travel while a run goes on.

        In the project of the user, files from before this start count only beside known outputs.
        """
        answer = await folder.channel.request("list_outputs", root=folder.root,
                                              since_us=folder.since_us)  # fmt: skip
        files = [WrittenFile(**{**entry, "path": folder.prefix + entry["path"]})
                 for entry in answer["files"]]  # fmt: skip
        folder.is_empty = not files
        age_s = time.monotonic() - folder.opened_at + CLOCK_SLACK_S
        known = {_parent(path) for path in self.journal.outputs}
        is_mixed = folder.is_local and not folder.prefix

        def may_be_the_scripts(file: WrittenFile) -> bool:
            """Whether a file of the user's project does not look like one that the user changed."""
            is_checkpoint_file = is_checkpoint(file.path, [file.path])
            is_recent = file.age_s < age_s or _parent(file.path) in known
            return is_recent and (is_checkpoint_file or not self._was_sent(file.path))

        def select() -> list[WrittenFile]:
            selected = [file for file in files if self.travels(file.path)
                        and (not is_mixed or may_be_the_scripts(file))]  # fmt: skip
            if not folder.only_checkpoints:
                return selected
            groups = group_files(selected).items()
            return [file for unit, group in groups if is_checkpoint(unit, map(_path, group))
                    for file in group]  # fmt: skip

        return await asyncio.to_thread(select)

    async def sync(self, folder: OutputFolder, *, share: float = 1.0, has_ended: bool = False,
                   has_succeeded: bool = False) -> None:  # fmt: skip
        """Fetches complete files that are new or have changed, the newest first.

        Args:
            share: Part of the time in which files are transferred.
            has_ended: No rank writes any more: only checkpoints may be incomplete.
            has_succeeded: The ranks have ended well: every file is complete.
        """
        async with self._receiving():
            await self._sync(folder, share, has_ended, has_succeeded)

    @contextlib.asynccontextmanager
    async def _receiving(self) -> AsyncIterator[None]:
        """Receives files of one folder at a time: two may have files of the same path."""
        async with self._is_receiving:
            try:
                yield
            finally:
                await asyncio.to_thread(shutil.rmtree, self._run / UNPLACED, ignore_errors=True)

    async def fetch_uncollected(self, folder: OutputFolder) -> tuple[list[str], bool]:
        """Fetches complete files that are newer than those of the same paths that have arrived.

        Returns:
            The paths of the fetched files, and whether no complete file is left on the node.
        """
        folder.is_uncollected = True
        async with self._receiving():
            files = await self.list_files(folder)
            for file in files:
                record = self.journal.outputs.get(file.path)
                is_known = record is not None and file.mtime_us <= record.mtime_us
                if is_known or self._is_outdated(file):
                    folder.fetched[file.path] = file.version
            self._note_earlier_saves(folder, files)
            old = dict(folder.fetched)
            await self._sync(folder, 1.0, has_ended=True, has_succeeded=False)
        groups = group_files(files)
        superseded = superseded_units(groups)
        names = self._names_after_failure()
        left = [unit for unit, group in groups.items() if is_new(folder, group)
                and _is_final(unit, group, False, unit in superseded, names)]  # fmt: skip
        return sorted(path for path, version in folder.fetched.items()
                      if old.get(path) != version), not left  # fmt: skip

    async def list_superseded(self, folder: OutputFolder) -> set[str]:
        """Lists files that have not arrived and may not be put into the project.

        These are files that may never be, and logs that are older than those of their paths that
        have arrived: a newer log of another host may lack their lines. (An older checkpoint would
        have been replaced by the script itself.) All files are noted in ``folder.seen``.
        """
        answer = await folder.channel.request("list_outputs", root=folder.root, since_us=0)

        def select() -> set[str]:
            known, arrived = self.journal.outputs, self.journal.arrived
            files = [WrittenFile(**entry) for entry in answer["files"]]
            folder.seen = {file.path for file in files}
            logs = {file.path for file in files if is_log(file.path) and file.path in known
                    and file.mtime_us <= known[file.path].mtime_us}  # fmt: skip
            return {file.path for file in files
                    if file.is_whole and (file.path, *file.version) not in arrived
                    and (file.path in logs or not self.travels(file.path))}  # fmt: skip

        return await asyncio.to_thread(select)

    def _note_earlier_saves(self, folder: OutputFolder, files: Iterable[WrittenFile]) -> None:
        """Notes shards and indexes no newer than the index that is here: they are of its save."""
        for file in filter(lambda file: is_of_save(file.path), files):
            index = self.journal.outputs.get(index_of(file.path))
            if index is not None and file.mtime_us <= index.mtime_us:
                folder.earlier[file.path] = file.version

    async def _sync(self, folder: OutputFolder, share: float, has_ended: bool,
                    has_succeeded: bool) -> None:  # fmt: skip
        done = set[str]()
        files = await self.list_files(folder)
        first = split_growing_logs(group_files(files)).keys()
        while True:
            self._record_removed(folder, files)
            # a hostile node may list what takes long to sort out, and may always have a new file
            groups, due = await asyncio.to_thread(
                self._due_units, folder, files, has_ended, has_succeeded
            )
            units = [unit for unit in due if unit not in done and (unit in first or not has_ended)]
            if not units:
                break
            old = old_shards(folder, files)
            folder.fetched |= {file.path: file.version for file in files if file.path in old}
            batch = {unit: [file for file in groups[unit] if file.path not in old]
                     for unit in batch_of(units, groups)}  # fmt: skip
            if not (has_ended or folder.is_local):
                await self._fetch_accompanying(folder, batch, share)
            if folder.is_local:
                fetched = batch
                await asyncio.to_thread(self._record_local, folder, batch)
            else:
                fetched = await self._fetch(folder, batch, share, has_ended)
                done |= batch.keys() if has_ended else batch.keys() - fetched.keys()
            for group in fetched.values():
                folder.fetched |= {file.path: file.version for file in group}
                folder.fetched_at |= dict.fromkeys(map(_path, group), time.monotonic())
            files = await self.list_files(folder)
        if not (has_ended or folder.is_local):
            await self._fetch_growing(folder, files, share)

    def _due_units(self, folder: OutputFolder, files: Sequence[WrittenFile], has_ended: bool,
                   has_succeeded: bool) -> tuple[Groups, list[str]]:  # fmt: skip
        """Returns the groups of a node's files, and those that are to be fetched now."""
        groups = split_growing_logs(group_files(files))
        superseded = superseded_units(groups)
        on_node = {file.path: file for file in files}
        known = {*self.journal.outputs, *on_node}
        names = self._names_after_failure() if has_ended and not has_succeeded else {}
        return groups, [
            unit for unit in order_of_arrival(groups)
            if is_new(folder, groups[unit])
            and (has_succeeded or not is_being_saved(folder, groups[unit]))
            and (_is_final(unit, groups[unit], has_succeeded, unit in superseded, names)
                 if has_ended else is_due(folder, unit, groups[unit], unit in superseded))
            and not _waits_for_rank_0(folder, groups[unit], known, on_node, has_ended)
        ]  # fmt: skip

    def _names_after_failure(self) -> CheckpointNames:
        """The names of files in the checkpoint folders that are here."""
        outputs = self.journal.outputs
        return checkpoint_names({path: output.mtime_us for path, output in outputs.items()})

    async def _fetch_accompanying(self, folder: OutputFolder, batch: Groups, share: float) -> None:
        """Fetches logs as they are now, if checkpoints come next whose lines they may have."""
        if any(is_checkpoint(unit, map(_path, group)) for unit, group in batch.items()):
            files = await self.list_files(folder)  # the last list may have met the checkpoint later
            if logs := accompanying_logs(folder, files, batch):
                await self._fetch_growing(folder, files, share, logs)

    async def _fetch_growing(self, folder: OutputFolder, files: Sequence[WrittenFile], share: float,
                             accompanying: Set[str] = frozenset()) -> None:  # fmt: skip
        """Fetches the beginnings of logs that change too often to count as complete.

        Only what a log was some time ago, and still begins with: a script that writes the file anew
        changes it. Logs that accompany a checkpoint are fetched at once, as they are now.
        """
        growing = {file.path: file for file in files
                   if file.path in accompanying or grows(folder, file)}  # fmt: skip
        groups = split_growing_logs(group_files(files))
        for path in folder.beginnings.keys() - growing.keys():
            del folder.beginnings[path]
        for path, file in growing.items():
            unit = unit_of(path)
            if path not in groups or (unit != path and is_new(folder, groups.get(unit, []))):
                continue  # a part of a checkpoint, which arrives as a whole
            beginning = folder.beginnings.get(path)
            with contextlib.suppress(AgentRefusal):  # it has gone, or is shorter
                if beginning is None or path in accompanying:
                    answer = await folder.channel.request(
                        "hash_beginning", root=folder.root, path=folder.on_node(path),
                        size=file.size,
                    )  # fmt: skip
                    now = time.monotonic()
                    beginning = Beginning(file, str(answer["sha256"]), now)
                    folder.beginnings[path] = beginning
                    is_ready = path in accompanying
                else:
                    is_ready = time.monotonic() - beginning.noted_at >= MIN_GROWTH_S
                if is_ready:
                    del folder.beginnings[path]
                    await self._fetch_beginning(folder, beginning, share)

    async def _fetch_beginning(self, folder: OutputFolder, beginning: Beginning,
                               share: float) -> None:  # fmt: skip
        group = [beginning.file]
        (path,) = map(_path, group)
        if not self.has_room(folder.host, path, group):
            return
        hashes = await self.receive(folder, group, share, may_grow=True)
        if hashes[path] == beginning.sha256:
            await self._place_received(folder, group, hashes)
            folder.fetched_at[path] = time.monotonic()

    async def _fetch(self, folder: OutputFolder, batch: Groups, share: float,
                     has_ended: bool) -> Groups:  # fmt: skip
        """Fetches groups of files to their places; returns those that have arrived."""
        received: dict[str, dict[str, str]] = {}
        for unit, group in batch.items():
            if self.has_room(folder.host, unit, group):
                with contextlib.suppress(AgentRefusal):  # it has changed or gone
                    received[unit] = await self.receive(folder, group, share)
        files = [] if has_ended else await self.list_files(folder)
        current = {file.path: file.version for file in files}
        fetched: Groups = {}
        for unit, hashes in received.items():
            group = batch[unit]
            has_changed = any(current.get(file.path) != file.version for file in group)
            if (has_ended or not has_changed
                    or (len(group) == 1 and await asyncio.to_thread(
                        is_intact, self._run / UNPLACED / group[0].path))):  # fmt: skip
                await self._place_received(folder, group, hashes)
                fetched[unit] = group
        return fetched

    async def _place_received(self, folder: OutputFolder, group: Sequence[WrittenFile],
                              hashes: Mapping[str, str], *,
                              index: Output | None = None) -> None:  # fmt: skip
        """Moves received files to their places, also if the caller is cancelled meanwhile.

        The thread would go on, and would meet the next files that are received.
        """

        def place() -> None:
            former = self.twin_times(map(_path, group))
            self.place_unit(folder.host, group, hashes, index, folder.is_uncollected)
            self.forget_parts(former)

        placing = asyncio.ensure_future(asyncio.to_thread(place))
        try:
            await asyncio.shield(placing)
        except asyncio.CancelledError:
            await asyncio.wait([placing])
            raise
        finally:
            if placing.done() and not placing.cancelled() and placing.exception() is None:
                folder.fetched |= {file.path: file.version for file in group}

    async def note_unfetched(self, folders: Iterable[OutputFolder], *,
                          has_succeeded: bool = False) -> None:  # fmt: skip
        """Notes which files of rank 0's node have not arrived, after its ranks have ended."""
        self.unfetched, self.has_succeeded = None, has_succeeded
        unfetched = set[str]()
        for folder in folders:
            unfetched |= {file.path for file in await self.list_files(folder)
                       if is_new(folder, [file])}  # fmt: skip
        self.unfetched = unfetched

    async def fetch_parts(self, folder: OutputFolder) -> list[str]:
        """Fetches what a node's ranks have written of checkpoints whose file of rank 0 is here.

        Not if it could be of another save, because rank 0's newest files are not here. Returns the
        paths.
        """
        outputs, fetched = self.journal.outputs, list[str]()
        if not outputs:
            return fetched
        async with self._receiving():
            files = await self.list_files(folder)
            for file in sorted(files, key=lambda file: is_shard(file.path)):  # indexes first
                head = outputs.get(head_of(file.path, outputs))
                is_missing = self._lacks_shard if is_shard(file.path) else self._lacks_rank_file
                if head is None or not file.is_whole:
                    continue
                if is_missing(folder, file) and self.has_room(folder.host, file.path, [file]):
                    with contextlib.suppress(AgentRefusal):  # it has changed or gone
                        hashes = await self.receive(folder, [file], 1.0)
                        await self._place_received(folder, [file], hashes, index=head)
                        fetched.append(file.path)
                        self.unmatched.discard(file.path)
        return fetched

    def _lacks_rank_file(self, folder: OutputFolder, file: WrittenFile) -> bool:
        """Whether what a node's rank wrote for itself is newer than what was here."""
        journal = self.journal
        head = head_of(file.path, journal.outputs)
        if self.unfetched is None or head in self.unfetched or folder.is_uncollected:
            return False
        known = journal.outputs.get(file.path) or journal.removed.get(file.path)
        if not is_new(folder, [file]) or (known is not None and known.mtime_us >= file.mtime_us):
            return False
        if self.has_succeeded:
            return True
        # one of the two ranks may have ended before it began, or ended, the save of the other
        end_us = journal.outputs[head].mtime_us
        earlier = [mtime_us for path, _, mtime_us in list(journal.arrived)
                   if path == head and mtime_us < end_us]  # fmt: skip
        limit_us = max((end_us - max(earlier)) // 2 if earlier else MAX_SAVE_US, MAX_SKEW_US)
        if abs(file.mtime_us - end_us) > limit_us:
            self.unmatched.add(file.path)
            return False
        return True

    def _lacks_shard(self, folder: OutputFolder, file: WrittenFile) -> bool:
        """Whether a node's shard belongs to the index that is here, and is not here yet."""
        outputs, index = self.journal.outputs, index_of(file.path)
        is_written = folder.earlier.get(file.path) != file.version
        is_known = file.path in self._fresh or (file.path in outputs and index not in self._fresh)
        if is_known or not is_written:
            return False
        if self.unfetched is not None and index in self._fresh and not folder.is_uncollected:
            return not any(index_of(path) == index for path in self.unfetched if is_of_save(path))
        # it may be of a later save, or of one long ago
        times_us = [output.mtime_us for output in outputs.values()
                  if is_shard(output.path) and index_of(output.path) == index]  # fmt: skip
        end_us = outputs[index].mtime_us
        earliest_us = min([*times_us, end_us]) - MAX_SAVE_US
        return earliest_us <= file.mtime_us <= end_us + MAX_SKEW_US

    async def has_shards(self, folder: OutputFolder) -> bool:
        """Whether all files in a node's folder are here, in this version or a later one."""
        answer = await folder.channel.request("list_outputs", root=folder.root, since_us=0)
        outputs = self.journal.outputs
        return all(file["path"] in outputs
                   and outputs[file["path"]].mtime_us >= file["mtime_us"]
                   for file in answer["files"])  # fmt: skip

    def start_attempt(self) -> None:
        """Notes that ranks start: what arrives from now on is theirs."""
        self._fresh.clear()

    def _record_removed(self, folder: OutputFolder, files: Iterable[WrittenFile]) -> None:
        paths = {file.path for file in files}
        folder.removed = (folder.removed | folder.seen) - paths
        folder.seen = paths
        if folder.removed:
            gone = folder.removed - self._newest_checkpoints()
            self.journal.remove(sorted(gone))
            folder.removed -= gone

    def _newest_checkpoints(self) -> set[str]:
        """Paths of the newest checkpoint that has arrived of each series (names differ in numbers).

        A script may remove one before the next has arrived. It stays what a lost job begins with.
        """
        newest: dict[str, list[WrittenFile]] = {}
        outputs = self.journal.outputs.values()
        written = [WrittenFile(entry.path, entry.size, entry.mtime_us) for entry in outputs]
        groups = group_files(written)
        for unit in reversed(order_of_arrival(groups)):
            if is_checkpoint(unit, map(_path, groups[unit])):
                newest[series_of(unit)] = groups[unit]
        return {file.path for group in newest.values() for file in group}

    def has_room(self, host: str, unit: str, group: Sequence[WrittenFile]) -> bool:
        """Whether files fit on the disks here; notes the first that do not, with the reason."""
        size = sum(file.size for file in group)
        problem = room_problem(self._run, size)
        if not problem and self.project is not None:
            problem = room_problem(self.project, size)
        if size > RESULT_LIMIT:
            problem = f"more than {RESULT_LIMIT >> 30} GiB"
        if problem and unit not in self.noted and len(self.noted) < MAX_NAMED:
            self.noted.add(unit)
            self._note(f"paceline: {unit:.100} stays on {host} for now: {problem}")
        return not problem

    def _record_local(self, folder: OutputFolder, batch: Groups) -> None:
        """Records files that rank 0 wrote on this machine, which are in their place.

        What another run wrote since the first start of this one is not its checkpoint.
        """
        files = {file.path: file for file in itertools.chain.from_iterable(batch.values())}
        if not folder.prefix:
            adopted = self._adopt(files.keys(), refresh=True)
            files = {path: file for path, file in files.items() if path not in adopted}
        files = {path: file for path, file in files.items()
                 if not (self._is_recorded(folder, file) or self._is_outdated(file))}  # fmt: skip
        self._remove_shards_of_others(folder, files.keys())
        self._fresh |= files.keys()
        outputs = []
        for file in files.values():
            name = folder.on_node(file.path)
            local = Path(folder.root) / name
            outputs.append(Output(
                file.path, file.size, hash_file(local), folder.host, name if folder.prefix else "",
                file.mtime_us, round(time.time(), 3), file.mtime_us, has_state(local),
                is_local=not folder.prefix, shards=shards_in(local),
            ))  # fmt: skip
        former = self.twin_times(files)
        self.journal.add(outputs)
        self.forget_parts(former)

    def _is_outdated(self, file: WrittenFile) -> bool:
        """Whether a file of another rank is one that rank 0's newer file has made useless."""
        known = self.journal.removed.get(file.path)
        return (known is not None and file.mtime_us <= known.mtime_us
                and bool(head_of(file.path, self.journal.outputs)))  # fmt: skip

    def _is_recorded(self, folder: OutputFolder, file: WrittenFile) -> bool:
        place = folder.on_node(file.path) if folder.prefix else ""
        record = self.journal.outputs.get(file.path)
        return record is not None and (
            (record.place, record.size, record.local_mtime_us) == (place, *file.version)
        )  # fmt: skip

    def _remove_shards_of_others(self, folder: OutputFolder, files: Set[str]) -> None:
        """Removes shards from other hosts, of checkpoints whose index is among new files."""
        root = Path(folder.root)
        for index in filter(is_index, files):
            if not folder.prefix:
                self._adopt(shards_beside(root, index) - files, refresh=True)
            kept = {path for path, output in self.journal.outputs.items()
                    if output.host == folder.host or path in files}  # fmt: skip
            self._remove_old_shards(index, kept, is_outside=bool(folder.prefix))

    async def receive(self, folder: OutputFolder, group: Sequence[WrittenFile], share: float,
                      *, may_grow: bool = False) -> dict[str, str]:  # fmt: skip
        """Fetches files into the run directory, where they have no place yet; returns SHA-256.

        Args:
            may_grow: Files may be longer by now; what follows is not fetched.
        """
        hashes = {}
        for file in group:
            path = f"{UNPLACED}/{file.path}"
            target = await asyncio.to_thread(IncomingFile, str(self._run), path, False)
            try:
                sha256 = await fetch_slowly(folder, file, target, share, may_grow)
                try:
                    await asyncio.to_thread(target.finish, file.size, sha256)
                except ValueError as problem:
                    raise NodeError(f"{file.path} of {folder.host} did not arrive unchanged",
                                    found=str(problem)) from None  # fmt: skip
            finally:
                await asyncio.to_thread(target.drop)
            hashes[file.path] = target.sha256
        return hashes

    # --- to other nodes ----------------------------------------------------------------------

    async def send(self, folder: OutputFolder, *, is_source: bool = False) -> None:
        """Gives a node the outputs that are here, and hides checkpoints that only it has.

        They may hold only what its own ranks save, such as states of their random generators. Files
        of another rank than 0 stay if rank 0 has one for itself: each rank loads its own.

        Args:
            is_source: It is the node that wrote them: only files that are cut off are hidden.
        """
        manifest, paths = await asyncio.to_thread(self.sendable, folder.prefix)
        files = await self.list_files(folder)
        hidden = [unit for unit, group in group_files(files).items()
                  if (is_checkpoint(unit, map(_path, group)) or group[0].path != unit)
                  and not any(file.path in paths or self._was_sent(file.path) for file in group)
                  and not (all(file.is_whole for file in group)
                           and (is_source or is_of_other_rank(group, paths)))]  # fmt: skip
        missing: list[str] = []
        ours: list[str] = []  # versions that the script has replaced, not the user
        # another host's shard, which is here, may differ from one that the source had before
        compared = [entry for entry in manifest if not is_source or is_shard(str(entry[0]))]
        if compared:
            entries = [[folder.on_node(str(path)), *entry] for path, *entry in compared]
            difference = await folder.channel.request("compare_tree", root=folder.root,
                                                      manifest=entries)  # fmt: skip
            different = [folder.prefix + path for path in difference["different"]]
            own = {str(path) for path, sha256, *_ in manifest
                   if self.journal.outputs[str(path)].sha256 == sha256}  # fmt: skip
            ours = [file.path for file in files if file.path in own.intersection(different)
                    and folder.fetched.get(file.path) == file.version]  # fmt: skip
            hidden += different
            missing = [*different, *(folder.prefix + path for path in difference["missing"])]
        hidden += old_shards(folder, files) - paths.keys()
        incomplete = await asyncio.to_thread(self.incomplete)
        roots = {file.path: withheld_root(file.path, incomplete) for file in files}
        sent_roots = {root for path, root in roots.items() if self._was_sent(path)}
        hidden += {*roots.values()} - {"", *sent_roots}
        outdated = {*self.outdated_parts()}
        hidden += {file.path for file in files if file.path in outdated
                   and folder.fetched.get(file.path) == file.version}  # fmt: skip
        if self.unfetched is None and not is_source:
            self.unmatched |= {file.path for file in files if head_of(file.path, paths)
                               and file.path not in (*paths, *hidden)}  # fmt: skip
        if hidden:
            await folder.channel.request("set_outputs_aside", root=folder.root,
                                         paths=list(map(folder.on_node, hidden)),
                                         discarded=list(map(folder.on_node, ours)))  # fmt: skip
            folder.seen -= set(hidden)
        sizes = {str(path): int(str(size)) for path, _, _, size in manifest}
        if (total := sum(sizes[path] for path in missing)) > MIN_NOTED_BYTES:
            self._note(f"paceline: sending {folder.host} {format_size(total)} that ranks wrote")
        await self._send_files(folder, missing, paths)
        sent = {path: (sizes[path], paths[path][1]) for path in sizes}
        folder.fetched |= sent
        present = {file.path: file.version for file in files if file.path not in hidden} | sent
        folder.earlier |= {path: version for path, version in present.items() if is_of_save(path)}

    async def _send_files(self, folder: OutputFolder, missing: Sequence[str],
                          paths: Mapping[str, tuple[Path, int]]) -> None:  # fmt: skip
        try:
            for path in sorted(missing, key=lambda path: paths[path][1]):
                local, mtime_us = paths[path]
                with contextlib.suppress(FileNotFoundError):
                    await send_blocks(folder.channel, local, "put_output", root=folder.root,
                                      path=folder.on_node(path), mtime_us=mtime_us)  # fmt: skip
        except AgentRefusal as refusal:
            raise NodeError(
                f"{folder.host} cannot take the files that this run has written",
                found=refusal.found,
                remedy=f"Make room on {folder.host}, or remove old checkpoints here",
            ) from None

    async def known_paths(self, folder: OutputFolder) -> set[str]:
        """Paths on a node whose present version is here, or was sent from here."""
        return {folder.on_node(file.path) for file in await self.list_files(folder)
                if folder.fetched.get(file.path) == file.version}  # fmt: skip


def _path(file: WrittenFile) -> str:
    return file.path


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


def _is_final(unit: str, group: Sequence[WrittenFile], has_succeeded: bool, is_superseded: bool,
              names: CheckpointNames) -> bool:  # fmt: skip
    """Whether a group is complete after the ranks have ended, perhaps while they saved."""
    if is_final(unit, group, has_succeeded, is_superseded):
        return True
    is_folder = unit != group[0].path and not any(is_shard(file.path) for file in group)
    is_whole = all(file.is_whole for file in group)
    return is_folder and is_whole and matches_earlier(unit, group, names)


def _waits_for_rank_0(folder: OutputFolder, group: Sequence[WrittenFile], known: Set[str],
                      on_node: Mapping[str, WrittenFile], has_ended: bool) -> bool:  # fmt: skip
    """Whether another rank on rank 0's host wrote a checkpoint file before rank 0's is here."""
    if not all(rank_in(file.path) for file in group) or is_shard(group[0].path):
        return False
    heads = {head_of(file.path, known) for file in group}
    if "" in heads:
        return False
    return not has_ended or is_new(folder, [on_node[head] for head in heads if head in on_node])
