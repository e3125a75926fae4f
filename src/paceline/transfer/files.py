"""Files on their way to a node, and from it: in blocks, a few of them under way at once."""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from paceline.agent.inside import Arriving
from paceline.agent.snapshot import BLOCK
from paceline.remote.channel import Channel
from paceline.spec.errors import NodeError

T = TypeVar("T")

TRIES = 3  # for a node whose cache turns out to be damaged
Entry = Sequence[object]
PIECE = 2000  # entries of a manifest in a message
SMALL = 1 << 16  # bytes: files up to here travel several in a message
SMALLEST = 1 << 10  # bytes that a file counts at least, so that a message holds at most 1024
UNDER_WAY = 4  # blocks: enough for a far node, few enough for the agent's memory


class Window:
    """Requests of which a few are under way at once; their answers come in order."""

    def __init__(self) -> None:
        self._tasks: deque[asyncio.Task[Any]] = deque()

    @property
    def empty(self) -> bool:
        return not self._tasks

    @property
    def full(self) -> bool:
        return len(self._tasks) >= UNDER_WAY

    def add(self, request: Coroutine[Any, Any, Any]) -> None:
        self._tasks.append(asyncio.ensure_future(request))

    async def next(self) -> Any:
        """The oldest request's answer, or its error."""
        return await self._tasks.popleft()

    async def rest(self) -> None:
        """Waits for what is left."""
        while not self.empty:
            await self.next()

    async def __aenter__(self) -> Window:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def job_folder(run_id: str, host: str) -> str:
    """Name of a host's own folder for what it is sent for a run.

    Hosts may share their home directory, and each removes its folder when it is done.
    """
    return f"{run_id}-{hashlib.sha256(host.encode()).hexdigest()[:8]}"


def is_out_of_space(found: str) -> bool:
    """Whether an agent's words say that a disk is full, or that a quota is used up."""
    return found.startswith(("No space left", "Disk quota exceeded", "Quota exceeded"))


async def send_tree(channel: Channel, manifest: Sequence[Entry], where: Callable[[str], Path],
                    folder: str, name: str) -> str:  # fmt: skip
    """Has a node build a tree out of what is cached there and what is sent; the tree's folder.

    Args:
        channel: To the node.
        manifest: Path, SHA-256, mode and size of every file.
        where: Says of a path where that file lies here.
        folder, name: The job's folder there, and the tree's name in it; both go with the agent.

    Raises:
        AgentRefusal: The node cannot take it.
        NodeError: Its cache is damaged again and again.
    """
    starts = range(0, max(1, len(manifest)), PIECE)
    for start in starts:
        about = {"folder": folder, "name": name, "first": start == 0, "last": start == starts[-1]}
        root = await _send_piece(channel, manifest[start : start + PIECE], where, about)
    return root


async def _send_piece(channel: Channel, piece: Sequence[Entry], where: Callable[[str], Path],
                      about: dict[str, Any]) -> str:  # fmt: skip
    """The next entries of a manifest: a node holds no more of a large one than that."""
    answer = await channel.request("lacking_blobs", manifest=piece)
    lacking = set(answer["hashes"])
    for _ in range(TRIES):
        await _send_contents(channel, [entry for entry in piece if entry[1] in lacking], where)
        built = await channel.request("build_tree", manifest=piece, **about)
        lacking = set(built["damaged"])
        if not lacking:
            return str(built["root"])
    damaged = next(where(str(entry[0])) for entry in piece if entry[1] in lacking)
    raise NodeError(
        f"{channel.host.name} does not keep what it is sent",
        found=f"{damaged} is damaged in its cache each time",
        remedy=f"Look for a broken disk there: ssh {channel.host.address} dmesg",
    )


async def _send_contents(channel: Channel, entries: Sequence[Entry],
                         where: Callable[[str], Path]) -> None:  # fmt: skip
    """Puts contents into the node's cache: large ones in blocks, small ones many in a message."""
    paths = {str(entry[1]): where(str(entry[0])) for entry in entries}
    sizes = {str(entry[1]): int(str(entry[3])) for entry in entries}
    small = [digest for digest in paths if sizes[digest] <= SMALL]
    async with Window() as window:
        for digests in grouped(small, sizes.__getitem__):
            contents = await asyncio.to_thread(_read, [paths[digest] for digest in digests])
            if window.full:
                await window.next()
            listed = [[d, len(c)] for d, c in zip(digests, contents, strict=True)]
            window.add(channel.request("put_blobs", contents=listed, blob=b"".join(contents)))
        await window.rest()
    for digest in (digest for digest in paths if sizes[digest] > SMALL):
        await send_file(channel, digest, paths[digest])


def _read(paths: Sequence[Path]) -> list[bytes]:
    return [path.read_bytes() for path in paths]


def grouped(items: Sequence[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Items in groups whose contents are about a block."""
    group: list[T] = []
    room = BLOCK
    for item in items:
        group.append(item)
        room -= size(item) + SMALLEST
        if room <= 0:
            yield group
            group, room = [], BLOCK
    if group:
        yield group


async def send_file(channel: Channel, digest: str, path: Path) -> None:
    """Puts one file into the node's cache.

    Args:
        channel: To the node.
        digest: The file's SHA-256 in hexadecimal.
        path: The file here.

    Raises:
        AgentRefusal: The node cannot take it.
    """
    await send_blocks(channel, path, "put_blob", sha256=digest)


async def send_blocks(channel: Channel, path: Path, op: str, /, **about: Any) -> None:
    """Sends a file by requests ``op``; the last one tells its size and, unless given, its hash.

    AgentRefusal when the node cannot take it, OSError when it cannot be read here.
    """
    with await asyncio.to_thread(path.open, "rb") as file:
        async with Window() as window:
            await _send_blocks(channel, file, op, about, window)
            await window.rest()


async def _send_blocks(channel: Channel, file: BinaryIO, op: str, about: dict[str, Any],
                       window: Window) -> None:  # fmt: skip
    digest = hashlib.sha256()
    offset, last = 0, False
    data = await asyncio.to_thread(file.read, BLOCK)
    while not last:
        after = await asyncio.to_thread(file.read, BLOCK)
        if "sha256" not in about:
            await asyncio.to_thread(digest.update, data)
        last = not after
        end = {"sha256": digest.hexdigest(), "size": offset + len(data)} if last else {}
        if window.full:
            await window.next()
        window.add(channel.request(op, **{**end, **about}, offset=offset, last=last, blob=data))
        offset, data = offset + len(data), after


async def fetch_file(channel: Channel, root: str, path: str, size: int, target: Arriving) -> None:
    """Brings ``path`` below ``root`` of a node; here it has its name once it came as a whole.

    Args:
        channel: To the node.
        root, path: Where the file is there.
        size: As the node told, in bytes.
        target: Takes it here.

    Raises:
        AgentRefusal: The node cannot read it, or not as it was.
        NodeError: What came is not what the node read.
        OSError: It cannot be written here.
    """
    offsets = range(0, max(size, 1), BLOCK)
    try:
        async with Window() as window:
            for offset in offsets:
                count = min(BLOCK, size - offset)
                last = offset + count == size
                if window.full:
                    await _take(window, target)
                window.add(channel.ask("read_block", root=root, path=path, offset=offset,
                                       count=count, last=last))  # fmt: skip
            sha256 = ""
            while not window.empty:
                sha256 = await _take(window, target)
        await _finish(channel, path, target, size, sha256)
    finally:
        await asyncio.to_thread(target.drop)


async def _take(window: Window, target: Arriving) -> str:
    answer, data = await window.next()
    await asyncio.to_thread(target.add, target.size, data)
    return str(answer.get("sha256", ""))


async def _finish(channel: Channel, path: str, target: Arriving, size: int, sha256: str) -> None:
    try:
        await asyncio.to_thread(target.finish, size, sha256)
    except ValueError as problem:
        raise NodeError(
            f"{path} of {channel.host.name} did not arrive as it is there", found=str(problem)
        ) from None
