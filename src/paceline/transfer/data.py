"""Sends a data folder to nodes that lack it, only with the missing files."""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from paceline.agent.files import data as agent_data
from paceline.agent.files.snapshot import BLOCK_BYTES, hash_file
from paceline.remote.channel import AgentRefusal, Channel
from paceline.spec.errors import NodeError
from paceline.spec.formatting import pluralize
from paceline.transfer.files import MAX_SMALL_BYTES, Window, grouped, is_out_of_space
from paceline.transfer.links import OutwardLinks

Item = Sequence[Any]  # path, size, mtime in microseconds
Progress = Callable[[int, int], None]  # bytes that are there, of how many
ITEM_BATCH = 2000  # items in a message
HASH_BATCH = 200  # files in a request for hashes
MIN_RESUMED_BYTES = 16 << 20  # smaller files are not resumed
RESERVED_BYTES = 64 << 20  # kept free on a node's disk
MAX_EXTRA_BYTES = 256 << 20  # of memory for the paths of a node's files that are not here


class DataFolder:
    """A data folder of the launching machine, read once when needed.

    Args:
        machine: Name of the launching machine.
        copy: Key and path of a copy, on another machine.

    Attributes:
        place: Where its files are: ``root``, or a copy on a supervisor's host.
        key, name: Of its copies.
    """

    def __init__(self, root: Path, machine: str, copy: tuple[str, Path] | None = None) -> None:
        self.root = root
        identity = f"{machine}\0{os.path.realpath(root)}".encode(errors="surrogateescape")
        key = hashlib.sha256(identity).hexdigest()[:24]
        self.key, self.place = copy or (key, root)
        self.name = root.name if root.name not in ("", ".", "..") else "data"
        self._lock = threading.Lock()
        self._items: list[Item] | None = None
        self._hashes: dict[str, str] = {}

    def marks(self) -> list[str]:
        """Marks that identify this folder on a node's disk."""
        return agent_data.fingerprints(str(self.place))

    def items(self) -> list[Item]:
        """Its files, in order. Blocking; raises OSError for an unreadable one."""
        with self._lock:
            if self._items is None:
                self._items = [*agent_data.walk(str(self.place))]
            return self._items

    def outward(self, items: Iterable[Item]) -> dict[str, str]:
        """The targets of files that are outside and only linked, by path. Blocking."""
        if self.place != self.root:  # a copy has no links
            return {}
        links = OutwardLinks(self.root)
        return {item[0]: target for item in items if (target := links.target(item[0]))}

    def hashes(self, paths: Iterable[str]) -> list[str]:
        """SHA-256 of files. Blocking; raises OSError for an unreadable one."""
        for path in paths:
            with self._lock:
                if path not in self._hashes:
                    self._hashes[path] = hash_file(self.place / path)
        return [self._hashes[path] for path in paths]


@dataclass(slots=True)
class Differences:
    """How a node's folder differs from the local one.

    Attributes:
        missing: Local items that it lacks, or has with another size.
        doubtful: Local items that it has with the same size and another time.
        extra: Its paths without a local file.
    """

    missing: list[Item] = field(default_factory=list)
    doubtful: list[Item] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)

    @property
    def certain(self) -> bool:
        """Whether it differs, regardless of the doubtful files."""
        return bool(self.missing or self.extra)


class Comparison:
    """Finds the differences while the node's items arrive."""

    def __init__(self, items: Sequence[Item]) -> None:
        self.differences = Differences()
        self._items = iter(items)
        self._next = next(self._items, None)
        self._last: list[tuple[int, str]] = []  # position of the node's last item
        self._extra_bytes = 0

    def feed(self, items: Iterable[Item]) -> None:
        """Compares the next items of the node, in order.

        Raises:
            ValueError: The order is wrong, or the node has too many other files.
        """
        for item in items:
            position = agent_data.sort_key(item[0])
            if position <= self._last:
                raise ValueError("a list of files that is not sorted")
            self._last = position
            while self._next is not None and agent_data.sort_key(self._next[0]) < position:
                self._move_to(self.differences.missing)
            if self._next is None or self._next[0] != item[0]:
                self.differences.extra.append(item[0])
                self._extra_bytes += sys.getsizeof(item[0])
                if self._extra_bytes > MAX_EXTRA_BYTES:
                    raise ValueError("names of other files, without end")
            elif self._next[1] != item[1]:
                self._move_to(self.differences.missing)
            elif self._next[2] != item[2]:
                self._move_to(self.differences.doubtful)
            else:
                self._next = next(self._items, None)

    def finish(self) -> Differences:
        """Returns the differences after the node's last item."""
        while self._next is not None:
            self._move_to(self.differences.missing)
        return self.differences

    def _move_to(self, items: list[Item]) -> None:
        assert self._next is not None
        items.append(self._next)
        self._next = next(self._items, None)


@dataclass(slots=True)
class DataPlace:
    """Where a node has the data, and what it lacks.

    Attributes:
        folder: Path on the node.
        in_place: It is the folder itself, or has the same content under the same path.
        sign: A file that identifies this disk to other nodes.
        missing, unchanged, extra: Files to send, to set the time of, and to remove.
        free: Free bytes on the disk of the copy.
        outward: Targets of missing files that are outside the folder and only linked.
    """

    folder: str
    in_place: bool
    sign: str = ""
    missing: list[Item] = field(default_factory=list)
    unchanged: list[Item] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    free: int = 0
    outward: Mapping[str, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes that have to be sent."""
        return sum(int(item[1]) for item in self.missing)


async def locate(channel: Channel, folder: DataFolder, needs_copy: bool = False) -> DataPlace:
    """Finds out where a node has the data, without sending any.

    ``needs_copy``: ignore data that are in place. Raises AgentRefusal if the node cannot read its
    folder, and OSError for a local file.
    """
    path = str(folder.root)
    fields: dict[str, Any] = {"key": folder.key, "name": folder.name}
    answer = await channel.request("data_folder", path=path, **fields)
    if not needs_copy and answer["marks"]:
        if answer["marks"] == await asyncio.to_thread(folder.marks):
            return DataPlace(path, in_place=True)
        diff = await _compare(channel, folder, path, is_complete=False)
        if not diff.certain and not (await _changed_files(channel, folder, path, diff.doubtful)):
            return DataPlace(path, in_place=True)
    copy = str(answer["folder"])
    diff = await _compare(channel, folder, copy)
    changed = await _changed_files(channel, folder, copy, diff.doubtful)
    unchanged = [item for item in diff.doubtful if item[0] not in changed]
    missing = [*diff.missing, *(item for item in diff.doubtful if item[0] in changed)]
    outward = await asyncio.to_thread(folder.outward, missing)
    sign, free = str(answer["sign"]), answer["free"]
    return DataPlace(copy, False, sign, missing, unchanged, diff.extra, free, outward)


async def _compare(
    channel: Channel, folder: DataFolder, root: str, is_complete: bool = True
) -> Differences:
    comparison = Comparison(await asyncio.to_thread(folder.items))
    first = True
    while True:
        answer = await channel.request("list_data", root=root, first=first)
        try:
            await asyncio.to_thread(comparison.feed, answer["files"])
        except ValueError as problem:
            raise NodeError(
                f"{channel.host.name} cannot say which data it has",
                found=f"{problem} (in {root})",
                remedy=f"Remove that folder on {channel.host.name}, or run without this host",
            ) from None
        if answer["last"]:
            return comparison.finish()
        if comparison.differences.certain and not is_complete:
            return comparison.differences
        first = False


async def _changed_files(
    channel: Channel, folder: DataFolder, root: str, doubtful: Sequence[Item]
) -> set[str]:
    """The paths of doubtful files whose content differs."""
    changed = set()
    for paths in _chunks([str(item[0]) for item in doubtful], HASH_BATCH):
        answer, hashes = await asyncio.gather(
            channel.request("hash_data", root=root, paths=paths),
            asyncio.to_thread(folder.hashes, paths),
        )
        changed |= {p for p, a, b in zip(paths, hashes, answer["hashes"], strict=True) if a != b}
    return changed


def _chunks(items: Sequence[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk


async def send(
    channel: Channel, folder: DataFolder, place: DataPlace, sent: Callable[[int], None]
) -> None:
    """Makes a node's copy equal to the local folder, as :func:`locate` has found it.

    Calls ``sent`` with the number of additional bytes. Raises NodeError if the node cannot take
    them.
    """
    if place.size + RESERVED_BYTES > place.free and place.missing:
        raise _out_of_space(channel.host.name, folder, place, f"{_gib(place.free)} GiB are free")
    fields: dict[str, Any] = {"key": folder.key, "name": folder.name}
    try:
        for extra in _chunks(place.extra, ITEM_BATCH):
            await channel.request("settle_data", gone=extra, same=[], **fields)
        for unchanged in _chunks(place.unchanged, ITEM_BATCH):
            await channel.request("settle_data", gone=[], same=unchanged, **fields)
        small = [item for item in place.missing if item[1] <= MAX_SMALL_BYTES]
        await _send_small(channel, folder, small, fields, sent)
        for item in (item for item in place.missing if item[1] > MAX_SMALL_BYTES):
            await _send_large(channel, folder, item, fields, sent)
    except AgentRefusal as refusal:
        if is_out_of_space(refusal.found):
            raise _out_of_space(channel.host.name, folder, place, refusal.found) from None
        raise NodeError(
            f"{channel.host.name} cannot take the data in {folder.root}",
            found=refusal.found,
            remedy="Run again (what has come is kept); keep what other programs write out of the"
            " folder meanwhile",
        ) from None
    except OSError as error:
        raise unreadable(folder, error) from None


def count_sent(progress: Progress, total: int) -> Callable[[int], None]:
    """Returns a function for :func:`send` that reports all bytes sent so far, of ``total``."""
    sent_bytes = 0

    def count(num_bytes: int) -> None:
        nonlocal sent_bytes
        sent_bytes += num_bytes
        progress(sent_bytes, total)

    if total:
        progress(0, total)
    return count


def unreadable(folder: DataFolder, error: OSError) -> NodeError:
    """The error for local data that cannot be read."""
    return NodeError(
        f"the data in {folder.root} cannot be read here",
        found=f"{error.filename or folder.place}: {error.strerror or error}",
        remedy="Make them readable, or take what cannot be read out of the folder",
    )


def _out_of_space(host: str, folder: DataFolder, place: DataPlace, details: str) -> NodeError:
    files = pluralize(len(place.missing), "file")
    return NodeError(
        f"{host} has no room for the data in {folder.root}",
        found=f"{_gib(place.size)} GiB in {files} are missing there; {details}",
        remedy=f"Make room below {place.folder.partition('/data/')[0]} on {host}, or set"
        " XDG_CACHE_HOME there to a folder on another disk, or put the data on a disk that all"
        " hosts see",
    )


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f}"


async def _send_small(channel: Channel, folder: DataFolder, items: Sequence[Item],
                      fields: dict[str, Any], sent: Callable[[int], None]) -> None:  # fmt: skip
    async with Window(channel) as window:
        for batch in grouped(items, lambda item: int(item[1])):
            content = await asyncio.to_thread(_read, folder.place, batch)
            await window.request("put_data_files", items=batch, blob=content, **fields)
            sent(len(content))


def _read(root: Path, items: Sequence[Item]) -> bytes:
    """Their concatenated contents; raises NodeError if a size has changed."""
    contents = [(root / item[0]).read_bytes() for item in items]
    for item, content in zip(items, contents, strict=True):
        if len(content) != item[1]:
            raise _changed(root, item[0])
    return b"".join(contents)


def _changed(root: Path, path: str) -> NodeError:
    return NodeError(
        f"the data in {root} changed while they were sent",
        found=path,
        remedy="Run again; keep what other programs write out of the folder meanwhile",
    )


async def _send_large(channel: Channel, folder: DataFolder, item: Item, fields: dict[str, Any],
                      sent: Callable[[int], None]) -> None:  # fmt: skip
    path, size, mtime = item
    digest, offset = hashlib.sha256(), 0
    with await asyncio.to_thread((folder.place / path).open, "rb") as file:
        if size >= MIN_RESUMED_BYTES:
            had = await channel.request("have_data", path=path, **fields)
            if 0 < had["size"] <= size:
                prefix = await asyncio.to_thread(_hash_of, file, had["size"])
                if prefix.hexdigest() == had["sha256"]:
                    digest, offset = prefix, had["size"]
                    sent(offset)
            file.seek(offset)
        async with Window(channel) as window:
            is_final = False
            while not is_final:
                data = await asyncio.to_thread(file.read, min(BLOCK_BYTES, size - offset))
                await asyncio.to_thread(digest.update, data)
                is_final = offset + len(data) == size
                if not is_final and not data:
                    raise _changed(folder.place, path)
                end = {"sha256": digest.hexdigest(), "mtime": mtime} if is_final else {}
                await window.request("put_data", path=path, offset=offset, last=is_final,
                                     blob=data, **end, **fields)  # fmt: skip
                offset += len(data)
                sent(len(data))


def _hash_of(file: Any, size: int) -> hashlib._Hash:
    digest = hashlib.sha256()
    while size and (data := file.read(min(BLOCK_BYTES, size))):
        digest.update(data)
        size -= len(data)
    return digest
