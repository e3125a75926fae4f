"""Checkpoints where there is no shared disk: sent to rank 0's node, and brought home as they come.

So a run is resumed from its run directory wherever it is started next, and losing the node with
rank 0 costs the steps since its last checkpoint and no more.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from pathlib import Path

from paceline.agent import inside
from paceline.agent.snapshot import hash_file
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
    is_frozen_file,
    pointed,
    surplus,
    version_of,
)
from paceline.transfer.files import send_blocks
from paceline.transfer.results import Fetcher

Sizes = dict[str, int]  # by path relative to the folder of checkpoints


async def send_checkpoints(channel: Channel, folder: str, directory: RunDirectory) -> None:
    """Puts the run directory's checkpoints into ``folder`` of a node where it lacks them.

    What the node has is left: it may hold newer checkpoints than we do, from a run whose
    launcher was killed.
    """
    here = await asyncio.to_thread(sizes_below, directory.path / CHECKPOINTS)
    if not here:
        return
    there = await _sizes_on(channel, folder)
    ours, theirs = by_name(here), by_name(there)
    for name in sorted((name for name in ours if ours[name] != theirs.get(name)), key=_version):
        if name in theirs and not _lies_within(theirs[name], ours[name]):
            continue  # another checkpoint of that name: theirs is the later one
        await _send_whole(channel, directory, name, list(ours[name]))
    for pointer in here:
        if "/" not in pointer and pointer not in there:
            await _send(channel, directory, pointer, f"{CHECKPOINTS}/{pointer}")


async def _send_whole(
    channel: Channel, directory: RunDirectory, name: str, files: list[str]
) -> None:
    """A whole checkpoint or none: its folder has another name until the last file is there."""
    part = f"{CHECKPOINTS}/.{name}.arriving.tmp"
    for file in files:
        await _send(channel, directory, f"{name}/{file}", f"{part}/{file}")
    await channel.request("place", key=directory.key, path=part, target=f"{CHECKPOINTS}/{name}")


async def _send(channel: Channel, directory: RunDirectory, name: str, target: str) -> None:
    path = directory.path / CHECKPOINTS / name
    await send_blocks(channel, path, "put_file", key=directory.key, path=target)


async def _sizes_on(channel: Channel, folder: str) -> Sizes:
    """The finished checkpoints' files on the node, and the pointers beside them."""
    root = f"{folder}/{CHECKPOINTS}"
    answer = await channel.request("list_results", root=root, manifest=None)
    return {f["path"]: f["size"] for f in answer["files"]
            if _counts(f["path"]) and not inside.why_refused(f["path"])}  # fmt: skip


def sizes_below(folder: Path) -> Sizes:
    """As :func:`_sizes_on` tells of a node, the files of a folder here; no link counts."""
    found = {}
    for above, _, names in inside.walk(str(folder)):
        for relative in (f"{above}/{name}" if above else name for name in names):
            path = folder / relative
            if _counts(relative) and path.is_file() and not path.is_symlink():
                found[relative] = path.stat().st_size
    return found


def _counts(path: str) -> bool:
    """Files of checkpoints that were published, and pointers to them."""
    first, inner, _ = path.partition("/")
    if not inner:
        return first in (LATEST, BEST)
    return version_of(first) is not None


def _version(name: str) -> Version:
    return version_of(name) or _NONE


_NONE: Version = (0, -1)


def by_name(sizes: Sizes) -> dict[str, Sizes]:
    """By checkpoint, its files with their sizes; without the pointers."""
    found: dict[str, Sizes] = {}
    for path, size in sizes.items():
        name, inner, file = path.partition("/")
        if inner:
            found.setdefault(name, {})[file] = size
    return found


def _lies_within(some: Sizes, all_of_them: Sizes) -> bool:
    return some.items() <= all_of_them.items()


def outdated(here: Iterable[str], there: Collection[str], verified: Collection[str]) -> list[str]:
    """Checkpoints that the node has removed, older than one that was verified here."""
    newest = max(map(_version, verified), default=_NONE)
    return [name for name in here if name not in there and _version(name) < newest]


def damage_of(folder: Path, name: str, hashes: Mapping[str, str]) -> str:
    """What is wrong with a checkpoint that came; empty for nothing.

    Args:
        folder: Where it is.
        name: Its own.
        hashes: SHA-256 of the files that came.
    """
    manifest = records.read_object(folder / MANIFEST) or {}
    files = manifest.get("files")
    if not isinstance(files, dict) or not files or manifest.get("step") != _version(name)[1]:
        return "it has no manifest that fits its name"
    for file, entry in files.items():
        if not isinstance(entry, dict) or hashes.get(file, "") != entry.get("sha256"):
            return f"{file:.100} is not the file that its manifest describes"
    return ""


async def _refusal_of(work: Awaitable[object]) -> AgentRefusal | None:
    try:
        await work
    except AgentRefusal as refusal:
        return refusal
    return None


class CheckpointFetcher:
    """Keeps the run directory's checkpoints like those of rank 0's node, which does not see it.

    Args:
        channel: To the node with rank 0.
        folder: Where the run's files go there.
        run: The run directory.
        fetcher: Receives the files.
        followed: Another node had rank 0 before: what this one never had stays here, too.
        keep: As many as the script wants to stay, besides the best; 0: not known, or all.
        note: Tells the user.
    """

    def __init__(self, channel: Channel, folder: str, run: Path, fetcher: Fetcher, *,
                 followed: bool = False, keep: int = 0,
                 note: Callable[[str], None] = lambda text: None) -> None:  # fmt: skip
        self.keep = keep
        self._note, self._noted = note, set[str]()
        self._verified = set[str]()  # names of what came whole
        self._channel, self._folder = channel, folder
        self._run = str(run)
        self._target = run / CHECKPOINTS
        self._fetcher = fetcher
        self._followed, self._listed = followed, set[str]()  # what the node had at any time
        self._task: asyncio.Task[None] | None = None
        self._again = False

    def wanted(self) -> None:
        """There is a new checkpoint: brings it in the background."""
        if self._task is not None and not self._task.done():
            self._again = True
            return
        self._task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        while True:
            self._again = False
            # what fails now is tried again with the next checkpoint, and at the end
            with contextlib.suppress(PacelineError, ConnectionError, OSError):
                await self.sync()
            if not self._again:
                return

    async def finish(self) -> None:
        """Waits for what is under way."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def sync(self) -> None:
        """Brings what is new on the node, and removes what the node has removed.

        A checkpoint has its name here once all of its files have come. AgentRefusal, after all
        the rest was done, when one changed while it was read.
        """
        there = await _sizes_on(self._channel, self._folder)
        known = by_name(await asyncio.to_thread(sizes_below, self._target))
        made = by_name(there)
        new = [(name, files) for name, files in made.items() if known.get(name) != files]
        pointers = {name: size for name, size in there.items() if "/" not in name}
        refused = [
            *[await _refusal_of(self._bring(name, files)) for name, files in new],
            await _refusal_of(self._fetch(pointers, self._target)),
        ]
        gone = outdated(known, made, self._verified)
        if self.keep:
            here = by_name(await asyncio.to_thread(sizes_below, self._target))
            best = version_of(pointed(self._target / BEST))
            over = surplus([*filter(None, map(version_of, here))], self.keep, {best})
            gone = [name for name in gone if version_of(name) in over]
        elif self._followed:
            gone = [name for name in gone if name in self._listed]
        self._listed |= made.keys()
        await asyncio.to_thread(self._drop, gone)
        for refusal in filter(None, refused):
            raise refusal

    async def _bring(self, name: str, files: Sizes) -> None:
        arriving = self._target / f".{name}.arriving.tmp"
        await asyncio.to_thread(shutil.rmtree, arriving, ignore_errors=True)
        hashes = await asyncio.to_thread(self._link_shared, files, arriving / name)
        coming = {f"{name}/{file}": size for file, size in files.items() if file not in hashes}
        arrived = await self._fetch(coming, arriving)
        hashes |= {path.partition("/")[2]: sha256 for path, sha256 in arrived.items()}
        if problem := await asyncio.to_thread(damage_of, arriving / name, name, hashes):
            await asyncio.to_thread(shutil.rmtree, arriving, ignore_errors=True)
            self._fetcher.left_on.add(self._channel.host.name)
            if name not in self._noted:
                self._noted.add(name)
                where = f"checkpoint {name} of {self._channel.host.name}"
                self._note(f"paceline: {where} is damaged and was left there: {problem}")
            return
        await asyncio.to_thread(self._place, arriving.name, name)
        self._verified.add(name)

    def _link_shared(self, files: Sizes, into: Path) -> dict[str, str]:
        """Links the frozen weights that an earlier checkpoint here has; returns their SHA-256."""
        linked = {}
        for file in filter(is_frozen_file, files):
            for path in self._target.glob(f"*/{file}"):
                if version_of(path.parent.name) and path.lstat().st_size == files[file]:
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
            inside.remove(self._run, f"{CHECKPOINTS}/{name}")
        inside.rename(self._run, f"{CHECKPOINTS}/{arriving}/{name}", f"{CHECKPOINTS}/{name}")
        inside.remove(self._run, f"{CHECKPOINTS}/{arriving}")

    def _drop(self, checkpoints: Iterable[str]) -> None:
        for name in checkpoints:
            with contextlib.suppress(OSError):
                inside.remove(self._run, f"{CHECKPOINTS}/{name}")
