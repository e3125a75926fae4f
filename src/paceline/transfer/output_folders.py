"""Folders on nodes in which a script writes files: which of these are due, and how they come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.agent.files.outputs import SHARD_SUFFIX
from paceline.agent.files.safe_paths import IncomingFile
from paceline.agent.files.snapshot import BLOCK_BYTES
from paceline.remote.channel import Channel
from paceline.rundir.output_rules import (
    SETTLE_S,
    WrittenFile,
    group_files,
    index_of,
    is_checkpoint,
    is_complete,
    is_index,
    is_log,
    is_shard,
)

Groups = dict[str, list[WrittenFile]]  # files that are complete only together, by unit
CHECKPOINT_PAUSE_S = 10.0  # between two copies of a checkpoint that the script replaces
GROWING_BYTES_PER_S = 256 << 10  # on average, since each copy is fetched from the first byte
MAX_BATCH_BYTES, MAX_BATCH_UNITS = 8 << 20, 500  # after which new files are looked for
MAX_GROWING_BYTES = 64 << 20  # of a log whose beginning is fetched
MIN_ACCOMPANYING_BYTES = 256 << 10  # of logs that may accompany a small checkpoint
PAUSE_S = 60.0  # between two copies of a file that is no checkpoint, such as a log
_NEVER_US = 1 << 52
RUN_PREFIX = "$PACELINE_RUN_DIR/"  # of the paths of files that a script wrote there


@dataclass(frozen=True, slots=True)
class Beginning:
    """A growing file as it was at a time on the monotonic clock."""

    file: WrittenFile
    sha256: str
    noted_at: float


@dataclass(slots=True, eq=False)
class OutputFolder:
    """A folder on a node: the project's, or the one for files of the run.

    Attributes:
        prefix: Of its paths here: empty for the project, ``RUN_PREFIX`` for files of the run.
        is_local: It is on this machine: files are already in their place.
        only_checkpoints: Only these count: no other host takes part, so the code was not listed.
        is_uncollected: It has files of an earlier start, which its launcher did not fetch.
        since_us: Files that have not changed since are no outputs, on the clock of its disk.
        opened_at: When that was noted, on the monotonic clock.
        is_empty: The node has listed no file, also none that may not travel.
        seen: Paths of the last list.
        removed: Paths of earlier lists whose files are gone, though they count as outputs.
        earlier: Version of each shard and index of a distributed checkpoint that the node had
            when its ranks started.
        fetched: Version of each file that is here, by path.
        fetched_at: When it arrived, on the monotonic clock.
        beginnings: Files that grow all the time, by path.
    """

    host: str
    channel: Channel
    root: str
    prefix: str = ""
    is_local: bool = False
    only_checkpoints: bool = False
    is_uncollected: bool = False
    since_us: int = 0
    opened_at: float = 0.0
    is_empty: bool = True
    seen: set[str] = field(default_factory=set)
    removed: set[str] = field(default_factory=set)
    earlier: dict[str, tuple[int, int]] = field(default_factory=dict)
    fetched: dict[str, tuple[int, int]] = field(default_factory=dict)
    fetched_at: dict[str, float] = field(default_factory=dict)
    beginnings: dict[str, Beginning] = field(default_factory=dict)

    def on_node(self, path: str) -> str:
        """The path of a file below the folder on the node."""
        return path.removeprefix(self.prefix)


def batch_of(units: Sequence[str], groups: Groups) -> list[str]:
    """The first unit, and further ones if they are small: each batch needs a list of all files."""
    total, batch = 0, list[str]()
    for unit in units[:MAX_BATCH_UNITS]:
        total += sum(file.size for file in groups[unit])
        if batch and total > MAX_BATCH_BYTES:
            break
        batch.append(unit)
    return batch


def is_new(folder: OutputFolder, group: Sequence[WrittenFile]) -> bool:
    """Whether a file of the group is not here in its present version."""
    return any(folder.fetched.get(file.path) != file.version for file in group)


def old_shards(folder: OutputFolder, files: Sequence[WrittenFile]) -> set[str]:
    """Shards that a node had before its ranks started, if they have written a new index since.

    Each rank writes its shard on its own host; the node may have others of an earlier save.
    """
    earlier = {file.path for file in files if folder.earlier.get(file.path) == file.version}
    written = {file.path for file in files if is_index(file.path)} - earlier
    return {path for path in earlier if is_shard(path) and index_of(path) in written}


def is_being_saved(folder: OutputFolder, group: Sequence[WrittenFile]) -> bool:
    """Whether a group has new shards and an index that is here already: it is written last."""
    new_paths = {file.path for file in group if is_new(folder, [file])}
    fetched = {file.path for file in group if is_index(file.path)} - new_paths
    return any(is_shard(path) and index_of(path) in fetched for path in new_paths)


def is_due(folder: OutputFolder, unit: str, group: Sequence[WrittenFile],
            is_superseded: bool) -> bool:  # fmt: skip
    """Whether a group is complete, and no version of it has arrived just now."""
    pause_s = CHECKPOINT_PAUSE_S if is_checkpoint(unit, [file.path for file in group]) else PAUSE_S
    earliest = time.monotonic() - pause_s
    is_recent = any(folder.fetched_at.get(file.path, earliest) > earliest for file in group)
    return not is_recent and is_complete(unit, group, is_superseded=is_superseded)


def grows(folder: OutputFolder, file: WrittenFile) -> bool:
    """Whether a file is a log that changes all the time, and its last copy is old enough."""
    pause_s = max(PAUSE_S, file.size / GROWING_BYTES_PER_S)
    fetched_at = folder.fetched_at.get(file.path)
    is_due = fetched_at is None or time.monotonic() - fetched_at >= pause_s
    is_new = folder.fetched.get(file.path) != file.version
    return _may_grow(file) and file.age_s < SETTLE_S and is_new and is_due


def _may_grow(file: WrittenFile) -> bool:
    """Whether a file is a log by its name, of a size at which its beginning is fetched."""
    return is_log(file.path) and 0 < file.size <= MAX_GROWING_BYTES


def accompanying_logs(folder: OutputFolder, files: Sequence[WrittenFile],
                      groups: Mapping[str, Sequence[WrittenFile]]) -> set[str]:  # fmt: skip
    """Chooses changed logs to fetch at once before a checkpoint.

    If the script resumes from the checkpoint on another host, it finds the lines that belong to it.
    Logs are fetched from the first byte, so the smallest are chosen, up to a total size. Logs that
    became shorter are left out: the script may just be writing them anew.

    Args:
        groups: The files that are fetched next, by unit.
    """
    sizes = [sum(file.size for file in group) for unit, group in groups.items()
             if is_checkpoint(unit, [file.path for file in group])]  # fmt: skip
    if not sizes:
        return set()
    logs = [file for file in files if _may_grow(file) and is_new(folder, [file])
            and file.size >= folder.fetched.get(file.path, (0, 0))[0]]  # fmt: skip
    total, accompanying = 0, set[str]()
    for file in sorted(logs, key=lambda file: file.size):
        total += file.size
        if total <= max(sum(sizes), MIN_ACCOMPANYING_BYTES):
            accompanying.add(file.path)
    return accompanying


def is_final(unit: str, group: Sequence[WrittenFile], has_succeeded: bool,
              is_superseded: bool) -> bool:  # fmt: skip
    """Whether a group is complete after the ranks have ended, perhaps while they saved."""
    if has_succeeded or not is_checkpoint(unit, [file.path for file in group]):
        return all(file.is_whole for file in group)
    return is_complete(unit, group, has_ended=True, is_superseded=is_superseded)


def shards_beside(root: Path, index: str) -> set[str]:
    """Paths of the shards in a project that are in the folder of an index."""
    folder = index.rpartition("/")[0]
    shards = (root / folder).glob(f"*{SHARD_SUFFIX}")
    return {f"{folder}/{path.name}".lstrip("/") for path in shards}


async def fetch_slowly(folder: OutputFolder, file: WrittenFile, target: IncomingFile,
                       share: float, may_grow: bool) -> str:  # fmt: skip
    """Fetches a file block by block, with pauses; returns its hash as the node says."""
    sha256 = ""
    for offset in range(0, max(file.size, 1), BLOCK_BYTES):
        count, started_at = min(BLOCK_BYTES, file.size - offset), time.monotonic()
        answer, data = await folder.channel.request_with_blob(
            "read_block", root=folder.root, path=folder.on_node(file.path), offset=offset,
            count=count, last=offset + count == file.size, may_grow=may_grow,
        )  # fmt: skip
        await asyncio.to_thread(target.add, offset, data)
        sha256 = str(answer.get("sha256", ""))
        await asyncio.sleep((time.monotonic() - started_at) * (1 / share - 1))
    return sha256


async def latest_change_us(channel: Channel, root: str) -> int:
    """Returns when the newest file below a node's folder changed, on the clock of its disk."""
    answer = await channel.request("list_outputs", root=root, since_us=_NEVER_US)
    return int(answer["latest_us"])


async def await_checkpoint(channel: Channel, roots: Sequence[str], poll_s: float) -> None:
    """Returns once a checkpoint in one of a node's folders is complete that changes after now."""
    since_us = {root: await latest_change_us(channel, root) + 1 for root in roots}
    while True:
        await asyncio.sleep(poll_s)
        for root in roots:
            answer = await channel.request("list_outputs", root=root, since_us=since_us[root])
            groups = group_files(WrittenFile(**entry) for entry in answer["files"])
            if any(is_checkpoint(unit, [file.path for file in group]) and is_complete(unit, group)
                   for unit, group in groups.items()):  # fmt: skip
                return
