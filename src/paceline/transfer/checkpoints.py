"""Copies checkpoints to and from rank 0's node if there is no shared disk.

So the run directory always has what is needed to resume the run anywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from pathlib import Path

from paceline.agent.files import safe_paths
from paceline.agent.files.snapshot import hash_file
from paceline.remote.channel import AgentRefusal, Channel
from paceline.rundir import records
from paceline.rundir.directory import RunDirectory
from paceline.spec.errors import PacelineError
from paceline.spec.rundir import (
    BEST,
    CHECKPOINTS,
    LATEST,
    MANIFEST,
    Version,
    expired,
    is_frozen_file,
    parse_version,
    read_pointer,
)
from paceline.transfer.files import send_blocks
from paceline.transfer.results import Fetcher

Sizes = dict[str, int]  # by path relative to the folder of checkpoints


async def send_checkpoints(channel: Channel, folder: str, directory: RunDirectory) -> None:
    """Sends the run directory's checkpoints that a node's ``folder`` lacks.

    The node may have newer ones, from a run whose launcher was killed; they are kept.
    """
    local_files = await asyncio.to_thread(local_sizes, directory.path / CHECKPOINTS)
    if not local_files:
        return
    remote_files = await _remote_sizes(channel, folder)
    local, remote = by_name(local_files), by_name(remote_files)
    for name in sorted((n for n in local if local[n] != remote.get(n)), key=_version):
        if name in remote and not remote[name].items() <= local[name].items():
            continue  # another checkpoint of that name, which is newer
        await _send_checkpoint(channel, directory, name, list(local[name]))
    for pointer in local_files:
        if "/" not in pointer and pointer not in remote_files:
            await _send(channel, directory, pointer, f"{CHECKPOINTS}/{pointer}")


async def _send_checkpoint(
    channel: Channel, directory: RunDirectory, name: str, files: list[str]
) -> None:
    """Sends a checkpoint; its folder has a temporary name until it is complete."""
    part = f"{CHECKPOINTS}/.{name}.arriving.tmp"
    for file in files:
        await _send(channel, directory, f"{name}/{file}", f"{part}/{file}")
    await channel.request("place", key=directory.key, path=part, target=f"{CHECKPOINTS}/{name}")


async def _send(channel: Channel, directory: RunDirectory, name: str, target: str) -> None:
    path = directory.path / CHECKPOINTS / name
    await send_blocks(channel, path, "put_file", key=directory.key, path=target)


async def _remote_sizes(channel: Channel, folder: str) -> Sizes:
    """The sizes of the node's finished checkpoints and their pointers."""
    root = f"{folder}/{CHECKPOINTS}"
    answer = await channel.request("list_results", root=root, manifest=None)
    return {f["path"]: f["size"] for f in answer["files"]
            if _is_published(f["path"]) and not safe_paths.refusal_reason(f["path"])}  # fmt: skip


def local_sizes(folder: Path) -> Sizes:
    """The sizes of a local folder's finished checkpoints and their pointers, without links."""
    sizes = {}
    for parent, _, names in safe_paths.walk(str(folder)):
        for relative in (f"{parent}/{name}" if parent else name for name in names):
            path = folder / relative
            if _is_published(relative) and path.is_file() and not path.is_symlink():
                sizes[relative] = path.stat().st_size
    return sizes


def _is_published(path: str) -> bool:
    """Whether a path belongs to a finished checkpoint or is a pointer."""
    first, inner, _ = path.partition("/")
    if not inner:
        return first in (LATEST, BEST)
    return parse_version(first) is not None


def _version(name: str) -> Version:
    return parse_version(name) or _NO_VERSION


_NO_VERSION: Version = (0, -1)


def by_name(sizes: Sizes) -> dict[str, Sizes]:
    """Groups file sizes by checkpoint, without the pointers."""
    checkpoints: dict[str, Sizes] = {}
    for path, size in sizes.items():
        name, separator, file = path.partition("/")
        if separator:
            checkpoints.setdefault(name, {})[file] = size
    return checkpoints


def outdated(local: Iterable[str], remote: Collection[str], verified: Collection[str]) -> list[str]:
    """Local checkpoints that the node has removed, older than a verified one."""
    latest = max(map(_version, verified), default=_NO_VERSION)
    return [name for name in local if name not in remote and _version(name) < latest]


def find_damage(folder: Path, name: str, hashes: Mapping[str, str]) -> str:
    """The defect of a fetched checkpoint; empty if there is none.

    Args:
        folder: Its folder.
        name: Its name.
        hashes: SHA-256 of the fetched files.
    """
    manifest = records.read_object(folder / MANIFEST) or {}
    files = manifest.get("files")
    if not isinstance(files, dict) or not files or manifest.get("step") != _version(name)[1]:
        return "it has no manifest that fits its name"
    for file, entry in files.items():
        if not isinstance(entry, dict) or hashes.get(file, "") != entry.get("sha256"):
            return f"{file:.100} is not the file that its manifest describes"
    return ""


async def _catch_refusal(work: Awaitable[object]) -> AgentRefusal | None:
    try:
        await work
    except AgentRefusal as refusal:
        return refusal
    return None


class CheckpointFetcher:
    """Synchronises the run directory's checkpoints with those of rank 0's node.

    Args:
        channel: Channel of the node with rank 0.
        folder: The run's folder there.
        run: The run directory.
        fetcher: Fetches the files.
        followed: Another node had rank 0 before: its checkpoints are kept, too.
        keep: Number of checkpoints to keep besides the best; 0: unknown, or all.
        note: Shows a message to the user.
    """

    def __init__(self, channel: Channel, folder: str, run: Path, fetcher: Fetcher, *,
                 followed: bool = False, keep: int = 0,
                 note: Callable[[str], None] = lambda text: None) -> None:  # fmt: skip
        self.keep = keep
        self._note, self._noted = note, set[str]()
        self._verified = set[str]()  # names of completely fetched checkpoints
        self._channel, self._folder = channel, folder
        self._run = str(run)
        self._target = run / CHECKPOINTS
        self._fetcher = fetcher
        self._followed, self._listed = followed, set[str]()  # names that the node had at any time
        self._task: asyncio.Task[None] | None = None
        self._needs_rerun = False

    def schedule(self) -> None:
        """Fetches a new checkpoint in the background."""
        if self._task is not None and not self._task.done():
            self._needs_rerun = True
            return
        self._task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        while True:
            self._needs_rerun = False
            # failures are retried with the next checkpoint, and at the end
            with contextlib.suppress(PacelineError, ConnectionError, OSError):
                await self.sync()
            if not self._needs_rerun:
                return

    async def finish(self) -> None:
        """Waits for the background task."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def sync(self) -> None:
        """Fetches new checkpoints and removes those that the node has removed.

        A checkpoint gets its name once it is complete. Raises AgentRefusal at the end if a file
        changed while it was read.
        """
        files = await _remote_sizes(self._channel, self._folder)
        local = by_name(await asyncio.to_thread(local_sizes, self._target))
        remote = by_name(files)
        changed = [(name, sizes) for name, sizes in remote.items() if local.get(name) != sizes]
        pointers = {name: size for name, size in files.items() if "/" not in name}
        refusals = [
            *[await _catch_refusal(self._fetch_checkpoint(*entry)) for entry in changed],
            await _catch_refusal(self._fetch(pointers, self._target)),
        ]
        removed = outdated(local, remote, self._verified)
        if self.keep:
            present = by_name(await asyncio.to_thread(local_sizes, self._target))
            best = parse_version(read_pointer(self._target / BEST))
            excess = expired([*filter(None, map(parse_version, present))], self.keep, {best})
            removed = [name for name in removed if parse_version(name) in excess]
        elif self._followed:
            removed = [name for name in removed if name in self._listed]
        self._listed |= remote.keys()
        await asyncio.to_thread(self._remove, removed)
        for refusal in filter(None, refusals):
            raise refusal

    async def _fetch_checkpoint(self, name: str, files: Sizes) -> None:
        arriving = self._target / f".{name}.arriving.tmp"
        await asyncio.to_thread(shutil.rmtree, arriving, ignore_errors=True)
        hashes = await asyncio.to_thread(self._link_shared, files, arriving / name)
        missing = {f"{name}/{file}": size for file, size in files.items() if file not in hashes}
        fetched = await self._fetch(missing, arriving)
        hashes |= {path.partition("/")[2]: sha256 for path, sha256 in fetched.items()}
        if problem := await asyncio.to_thread(find_damage, arriving / name, name, hashes):
            await asyncio.to_thread(shutil.rmtree, arriving, ignore_errors=True)
            self._fetcher.incomplete_hosts.add(self._channel.host.name)
            if name not in self._noted:
                self._noted.add(name)
                self._note(f"paceline: checkpoint {name} of {self._channel.host.name} is damaged"
                           f" and was left there: {problem}")  # fmt: skip
            return
        await asyncio.to_thread(self._place, arriving.name, name)
        self._verified.add(name)

    def _link_shared(self, files: Sizes, into: Path) -> dict[str, str]:
        """Links frozen weights from an earlier local checkpoint; returns their SHA-256."""
        linked = {}
        for file in filter(is_frozen_file, files):
            for path in self._target.glob(f"*/{file}"):
                if parse_version(path.parent.name) and path.lstat().st_size == files[file]:
                    with contextlib.suppress(OSError):  # a disk without hard links
                        into.mkdir(parents=True, exist_ok=True)
                        os.link(path, into / file, follow_symlinks=False)
                        linked[file] = hash_file(into / file)
                        break
        return linked

    async def _fetch(self, files: Sizes, target: Path) -> dict[str, str]:
        root = f"{self._folder}/{CHECKPOINTS}"
        return await self._fetcher.fetch_files(self._channel, root, files, target)

    def _place(self, arriving: str, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            safe_paths.remove(self._run, f"{CHECKPOINTS}/{name}")
        safe_paths.rename(self._run, f"{CHECKPOINTS}/{arriving}/{name}", f"{CHECKPOINTS}/{name}")
        safe_paths.remove(self._run, f"{CHECKPOINTS}/{arriving}")

    def _remove(self, checkpoints: Iterable[str]) -> None:
        for name in checkpoints:
            with contextlib.suppress(OSError):
                safe_paths.remove(self._run, f"{CHECKPOINTS}/{name}")
