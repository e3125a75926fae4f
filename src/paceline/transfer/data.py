"""A folder of data on its way to nodes that do not see it: only what they lack travels."""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from paceline.agent import data as there
from paceline.agent.snapshot import BLOCK, hash_file
from paceline.remote.channel import AgentRefusal, Channel
from paceline.spec.errors import NodeError
from paceline.spec.helptext import counted
from paceline.transfer.files import SMALL, Window, grouped, is_out_of_space
from paceline.transfer.links import OutwardLinks

Item = Sequence[Any]  # path, size, mtime in microseconds
PIECE = 2000  # items in a message
HASHED = 200  # files in a message that asks for their hashes
RESUMED = 16 << 20  # bytes from which on an earlier try is worth to be asked for
SPARE = 64 << 20  # bytes that stay free on a node's disk


class Folder:
    """The folder on the launching machine; read when that is needed, and once.

    Attributes:
        root: Its absolute path.
        place: Where its files can be read: there, or in a copy on a supervisor's host.
        key: What its copies are known by.
        name: What they are called.

    Args:
        root: As above.
        machine: Names the launching machine.
        copy: Key and place of a copy, on another machine.
    """

    def __init__(self, root: Path, machine: str, copy: tuple[str, Path] | None = None) -> None:
        self.root = root
        about = f"{machine}\0{os.path.realpath(root)}".encode(errors="surrogateescape")
        own = hashlib.sha256(about).hexdigest()[:24]
        self.key, self.place = copy or (own, root)
        self.name = root.name if root.name not in ("", ".", "..") else "data"
        self._lock = threading.Lock()
        self._items: list[Item] | None = None
        self._hashes: dict[str, str] = {}

    def marks(self) -> list[str]:
        """By which a node's folder is told to be this one."""
        return there.marks(str(self.place))

    def items(self) -> list[Item]:
        """Its files, in order. Blocking; OSError where one cannot be looked at."""
        with self._lock:
            if self._items is None:
                self._items = [*there.walk(str(self.place))]
            return self._items

    def outward(self, items: Iterable[Item]) -> dict[str, str]:
        """Of these, by path, where files lie that only links in the folder lead to. Blocking."""
        if self.place != self.root:  # a copy has no links
            return {}
        links = OutwardLinks(self.root)
        return {item[0]: target for item in items if (target := links.target(item[0]))}

    def hashes(self, paths: Iterable[str]) -> list[str]:
        """SHA-256 of files. Blocking; OSError where one cannot be read."""
        for path in paths:
            with self._lock:
                if path not in self._hashes:
                    self._hashes[path] = hash_file(self.place / path)
        return [self._hashes[path] for path in paths]


@dataclass(slots=True)
class Differences:
    """How a folder differs from ours.

    Attributes:
        missing: Our items that it lacks, or has otherwise.
        doubtful: Our items that it has with the same size, and another time.
        gone: Its paths that we do not have.
    """

    missing: list[Item] = field(default_factory=list)
    doubtful: list[Item] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)

    @property
    def certain(self) -> bool:
        """Whether it differs, whatever the doubtful files hold."""
        return bool(self.missing or self.gone)


class Comparison:
    """Finds the differences while the other folder's items come. Pure."""

    def __init__(self, here: Sequence[Item]) -> None:
        self.found = Differences()
        self._here = iter(here)
        self._next = next(self._here, None)

    def feed(self, items: Iterable[Item]) -> None:
        """The next items of the other folder, in order."""
        for item in items:
            place = there.order(item[0])
            while self._next is not None and there.order(self._next[0]) < place:
                self._take(self.found.missing)
            if self._next is None or self._next[0] != item[0]:
                self.found.gone.append(item[0])
            elif self._next[1] != item[1]:
                self._take(self.found.missing)
            elif self._next[2] != item[2]:
                self._take(self.found.doubtful)
            else:
                self._next = next(self._here, None)

    def finish(self) -> Differences:
        """There are no more."""
        while self._next is not None:
            self._take(self.found.missing)
        return self.found

    def _take(self, into: list[Item]) -> None:
        assert self._next is not None
        into.append(self._next)
        self._next = next(self._here, None)


@dataclass(slots=True)
class DataPlace:
    """Where a node has the data, and what it lacks.

    Attributes:
        folder: On that node.
        in_place: It is the folder itself, or one of the same content under the same path.
        sign: A file by which others that see this disk are told.
        missing, same, gone: What has to be sent, given its time, and removed.
        free: Bytes on the disk of the copy.
        outward: Of what has to be sent, where files lie that only links in the folder lead to.
    """

    folder: str
    in_place: bool
    sign: str = ""
    missing: list[Item] = field(default_factory=list)
    same: list[Item] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    free: int = 0
    outward: Mapping[str, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes that have to be sent."""
        return sum(int(item[1]) for item in self.missing)


async def look(channel: Channel, folder: Folder, always: bool = False) -> DataPlace:
    """Finds out where a node has the data; nothing is sent.

    Args:
        channel: To the node.
        folder: The data here.
        always: Not in place, even where they are there.

    Raises:
        AgentRefusal: The node cannot look.
        OSError: A file here cannot be read.
    """
    path = str(folder.root)
    about: dict[str, Any] = {"key": folder.key, "name": folder.name}
    answer = await channel.request("data_folder", path=path, **about)
    if not always and answer["marks"]:
        if answer["marks"] == await asyncio.to_thread(folder.marks):
            return DataPlace(path, in_place=True)
        found = await _compare(channel, folder, path, all_of_it=False)
        if not found.certain and not (await _different(channel, folder, path, found.doubtful)):
            return DataPlace(path, in_place=True)
    copy = str(answer["folder"])
    found = await _compare(channel, folder, copy)
    changed = await _different(channel, folder, copy, found.doubtful)
    same = [item for item in found.doubtful if item[0] not in changed]
    missing = [*found.missing, *(item for item in found.doubtful if item[0] in changed)]
    outward = await asyncio.to_thread(folder.outward, missing)
    sign, free = str(answer["sign"]), answer["free"]
    return DataPlace(copy, False, sign, missing, same, found.gone, free, outward)


async def _compare(
    channel: Channel, folder: Folder, root: str, all_of_it: bool = True
) -> Differences:
    comparison = Comparison(await asyncio.to_thread(folder.items))
    first = True
    while True:
        answer = await channel.request("list_data", root=root, first=first)
        await asyncio.to_thread(comparison.feed, answer["files"])
        if answer["last"]:
            return comparison.finish()
        if comparison.found.certain and not all_of_it:
            return comparison.found
        first = False


async def _different(
    channel: Channel, folder: Folder, root: str, doubtful: Sequence[Item]
) -> set[str]:
    """Those of the doubtful files whose content is another one."""
    found = set()
    for piece in _pieces([str(item[0]) for item in doubtful], HASHED):
        hashing = asyncio.to_thread(folder.hashes, piece)
        answer, here = await asyncio.gather(
            channel.request("hash_data", root=root, paths=piece), hashing
        )
        found |= {p for p, a, b in zip(piece, here, answer["hashes"], strict=True) if a != b}
    return found


def _pieces(items: Sequence[Any], size: int) -> Iterator[list[Any]]:
    left = iter(items)
    while piece := list(islice(left, size)):
        yield piece


async def send(
    channel: Channel, folder: Folder, place: DataPlace, sent: Callable[[int], None]
) -> None:
    """Makes a node's copy like the folder here.

    Args:
        channel: To the node.
        folder: The data here.
        place: What :func:`look` found.
        sent: Called with the number of bytes that are there now besides.

    Raises:
        NodeError: There is no room for them, or the node cannot take them.
    """
    if place.size + SPARE > place.free and place.missing:
        raise _no_room(channel.host.name, folder, place, f"{_gib(place.free)} GiB are free")
    about: dict[str, Any] = {"key": folder.key, "name": folder.name}
    try:
        for gone in _pieces(place.gone, PIECE):
            await channel.request("settle_data", gone=gone, same=[], **about)
        for same in _pieces(place.same, PIECE):
            await channel.request("settle_data", gone=[], same=same, **about)
        small = [item for item in place.missing if item[1] <= SMALL]
        await _send_small(channel, folder, small, about, sent)
        for item in (item for item in place.missing if item[1] > SMALL):
            await _send_large(channel, folder, item, about, sent)
    except AgentRefusal as refusal:
        if is_out_of_space(refusal.found):
            raise _no_room(channel.host.name, folder, place, refusal.found) from None
        raise NodeError(
            f"{channel.host.name} cannot take the data in {folder.root}",
            found=refusal.found,
            remedy="Run again (what has come is kept); keep what other programs write out of the"
            " folder meanwhile",
        ) from None
    except OSError as error:
        raise unreadable(folder, error) from None


def unreadable(folder: Folder, error: OSError) -> NodeError:
    """What to say where the data here cannot be read."""
    return NodeError(
        f"the data in {folder.root} cannot be read here",
        found=f"{error.filename or folder.place}: {error.strerror or error}",
        remedy="Make them readable, or take what cannot be read out of the folder",
    )


def _no_room(host: str, folder: Folder, place: DataPlace, found: str) -> NodeError:
    files = counted(len(place.missing), "file")
    return NodeError(
        f"{host} has no room for the data in {folder.root}",
        found=f"{_gib(place.size)} GiB in {files} are missing there; {found}",
        remedy=f"Make room below {place.folder.partition('/data/')[0]} on {host}, or set"
        " XDG_CACHE_HOME there to a folder on another disk, or put the data on a disk that all"
        " hosts see",
    )


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f}"


async def _send_small(
    channel: Channel,
    folder: Folder,
    items: Sequence[Item],
    about: dict[str, Any],
    sent: Callable[[int], None],
) -> None:
    async with Window() as window:
        for handful in grouped(items, lambda item: item[1]):
            content = await asyncio.to_thread(_read, folder.place, handful)
            if window.full:
                await window.next()
            window.add(channel.request("put_data_files", items=handful, blob=content, **about))
            sent(len(content))
        await window.rest()


def _read(root: Path, items: Sequence[Item]) -> bytes:
    """Their contents, one after the other. NodeError where one is no longer what was listed."""
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


async def _send_large(
    channel: Channel, folder: Folder, item: Item, about: dict[str, Any], sent: Callable[[int], None]
) -> None:
    path, size, mtime = item
    digest, offset = hashlib.sha256(), 0
    with await asyncio.to_thread((folder.place / path).open, "rb") as file:
        if size >= RESUMED:
            had = await channel.request("have_data", path=path, **about)
            if 0 < had["size"] <= size:
                before = await asyncio.to_thread(_hash_of, file, had["size"])
                if before.hexdigest() == had["sha256"]:
                    digest, offset = before, had["size"]
                    sent(offset)
            file.seek(offset)
        async with Window() as window:
            last = False
            while not last:
                data = await asyncio.to_thread(file.read, min(BLOCK, size - offset))
                await asyncio.to_thread(digest.update, data)
                last = offset + len(data) == size
                if not last and not data:
                    raise _changed(folder.place, path)
                end = {"sha256": digest.hexdigest(), "mtime": mtime} if last else {}
                if window.full:
                    await window.next()
                window.add(channel.request(
                    "put_data", path=path, offset=offset, last=last, blob=data, **end, **about
                ))  # fmt: skip
                offset += len(data)
                sent(len(data))
            await window.rest()


def _hash_of(file: Any, size: int) -> hashlib._Hash:
    digest = hashlib.sha256()
    while size and (data := file.read(min(BLOCK, size))):
        digest.update(data)
        size -= len(data)
    return digest
