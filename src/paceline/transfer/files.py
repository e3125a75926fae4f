"""Sends files to nodes, in blocks."""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from paceline.agent.files.snapshot import BLOCK_BYTES
from paceline.remote.channel import Channel
from paceline.spec.errors import NodeError

MAX_ATTEMPTS = 3  # for a node whose cache turns out to be damaged
T = TypeVar("T")
Entry = Sequence[object]
ENTRY_BATCH = 2000  # entries of a manifest in a message
MAX_SMALL_BYTES = 1 << 16  # files up to this size share messages
FILE_OVERHEAD_BYTES = 1 << 10  # that a file counts at least: a message holds at most 1024 files
WINDOW_SIZE = 4  # blocks: enough for a far node, few enough for the agent's memory


class Window:
    """Sends a few requests of one node at once, and awaits their answers in order.

    Args:
        channel: The node's channel.
        on_answer: Handles each answer and the bytes that came with it.
    """

    def __init__(
        self,
        channel: Channel,
        on_answer: Callable[[Any, bytes], Awaitable[None]] | None = None,
    ) -> None:
        self._channel, self._on_answer = channel, on_answer
        self._tasks: deque[asyncio.Task[Any]] = deque()

    async def request(self, op: str, **fields: Any) -> None:
        """Sends a request; waits for the oldest answer first if ``WINDOW_SIZE`` are missing."""
        if len(self._tasks) >= WINDOW_SIZE:
            await self._receive()
        self._tasks.append(asyncio.ensure_future(self._channel.request_with_blob(op, **fields)))

    async def _receive(self) -> None:
        answer, data = await self._tasks.popleft()
        if self._on_answer is not None:
            await self._on_answer(answer, data)

    async def __aenter__(self) -> Window:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            while self._tasks and kind is None:
                await self._receive()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)


def job_folder(run_id: str, host: str) -> str:
    """Name of a host's own folder for a run: hosts may share their home directory."""
    return f"{run_id}-{hashlib.sha256(host.encode()).hexdigest()[:8]}"


def is_out_of_space(error: str) -> bool:
    """Whether an agent's error means that a disk is full or a quota is exceeded."""
    return error.startswith(("No space left", "Disk quota exceeded", "Quota exceeded"))


async def send_tree(channel: Channel, manifest: Sequence[Entry], locate: Callable[[str], Path],
                    folder: str, name: str, workdir: str = "") -> str:  # fmt: skip
    """Lets a node build a tree from its cache and from sent files; returns the tree's folder.

    Args:
        manifest: Path, SHA-256, mode and size of every file.
        locate: Returns the local file of a path.
        folder, name: The job's folder on the node, and the tree's name in it; both are removed with
            the agent.
        workdir: Relative path of a folder in the tree that is made even if no file is in it.

    Raises AgentRefusal if the node cannot take it, and NodeError for a damaged cache.
    """
    starts = range(0, max(1, len(manifest)), ENTRY_BATCH)
    for start in starts:
        fields = {"folder": folder, "name": name, "first": start == 0, "last": start == starts[-1],
                  "workdir": workdir}  # fmt: skip
        root = await _send_entries(channel, manifest[start : start + ENTRY_BATCH], locate, fields)
    return root


async def _send_entries(channel: Channel, entries: Sequence[Entry],
                        locate: Callable[[str], Path], fields: dict[str, Any]) -> str:  # fmt: skip
    """Sends a part of a manifest, so that nodes need not hold a large one in memory."""
    answer = await channel.request("lacking_blobs", manifest=entries)
    missing = set(answer["hashes"])
    for _ in range(MAX_ATTEMPTS):
        await _send_contents(channel, [entry for entry in entries if entry[1] in missing], locate)
        result = await channel.request("build_tree", manifest=entries, **fields)
        missing = set(result["damaged"])
        if not missing:
            return str(result["root"])
    damaged = next(locate(str(entry[0])) for entry in entries if entry[1] in missing)
    raise NodeError(
        f"{channel.host.name} does not keep what it is sent",
        found=f"{damaged} is damaged in its cache each time",
        remedy=f"Look for a broken disk there: ssh {channel.host.address} dmesg",
    )


async def _send_contents(channel: Channel, entries: Sequence[Entry],
                         locate: Callable[[str], Path]) -> None:  # fmt: skip
    """Puts files into the node's cache: small ones share messages, large ones go in blocks."""
    paths = {str(entry[1]): locate(str(entry[0])) for entry in entries}
    sizes = {str(entry[1]): int(str(entry[3])) for entry in entries}
    small = [digest for digest in paths if sizes[digest] <= MAX_SMALL_BYTES]
    async with Window(channel) as window:
        for digests in grouped(small, lambda digest: sizes[digest]):
            contents = await asyncio.to_thread(_read, [paths[digest] for digest in digests])
            listed = [[d, len(c)] for d, c in zip(digests, contents, strict=True)]
            await window.request("put_blobs", contents=listed, blob=b"".join(contents))
    for digest in (digest for digest in paths if sizes[digest] > MAX_SMALL_BYTES):
        await send_blocks(channel, paths[digest], "put_blob", sha256=digest)


def _read(paths: Sequence[Path]) -> list[bytes]:
    return [path.read_bytes() for path in paths]


def grouped(items: Sequence[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Groups small files so that each group has about a block."""
    batch: list[T] = []
    free_bytes = BLOCK_BYTES
    for item in items:
        batch.append(item)
        free_bytes -= size_of(item) + FILE_OVERHEAD_BYTES
        if free_bytes <= 0:
            yield batch
            batch, free_bytes = [], BLOCK_BYTES
    if batch:
        yield batch


async def send_blocks(channel: Channel, path: Path, op: str, /, **fields: Any) -> None:
    """Sends a file by requests ``op``; the last has its size and, unless given, its hash."""
    digest, offset, is_final = hashlib.sha256(), 0, False
    with await asyncio.to_thread(path.open, "rb") as file:
        async with Window(channel) as window:
            data = await asyncio.to_thread(file.read, BLOCK_BYTES)
            while not is_final:
                next_data = await asyncio.to_thread(file.read, BLOCK_BYTES)
                if "sha256" not in fields:
                    await asyncio.to_thread(digest.update, data)
                is_final = not next_data
                end = {"sha256": digest.hexdigest(), "size": offset + len(data)} if is_final else {}
                await window.request(
                    op, **{**end, **fields}, offset=offset, last=is_final, blob=data
                )
                offset, data = offset + len(data), next_data
