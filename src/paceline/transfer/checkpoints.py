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
from paceline.remote.channel import AgentRefusal, Channel, HostSilent
from paceline.rundir import records
from paceline.rundir.directory import RunDirectory
from paceline.rundir.signatures import Signer
from paceline.spec.errors import PacelineError
from paceline.spec.rundir import (
    BEST,
    CHECKPOINTS,
    LATEST,
    MANIFEST,
    Version,
    backup_name,
    expired,
    frozen_file,
    is_frozen_file,
    parse_version,
    read_pointer,
)
from paceline.spec.training.checkpoint_manifest import DamagedCheckpoint, Manifest, parse_manifest
from paceline.transfer.files import send_blocks
from paceline.transfer.results import Fetcher, Sizes, room_problem

OTHER_CHECKPOINT = "it differs from the checkpoint of that name here"
MAX_REFUSAL_NOTES = 20  # a hostile node may list very many checkpoints
MAX_NEW_WRITERS = 1000  # each start and each change of rank 0 adds one writer token
MAX_NEW_STEPS = 10**10  # more than a year at 300 steps a second


async def send_checkpoints(channel: Channel, folder: str, directory: RunDirectory,
                           note: Callable[[str], None] = lambda text: None) -> None:  # fmt: skip
    """Sends the run directory's checkpoints that a node's ``folder`` lacks.

    The node may have newer ones, from a run whose launcher was killed; they are kept.
    """
    local_files = await asyncio.to_thread(local_sizes, directory.path / CHECKPOINTS)
    if not local_files:
        return
    remote_files = await _remote_sizes(Fetcher(directory.path, note), channel, folder)
    local, remote = by_name(local_files), by_name(remote_files)
    for name in sorted((n for n in local if local[n] != remote.get(n)), key=_version):
        if name in remote and not remote[name].items() <= local[name].items():
            continue  # another checkpoint of that name, which is newer
        part = f"{CHECKPOINTS}/.{name}.arriving.tmp"  # until it is complete
        for file in local[name]:
            await _send(channel, directory, f"{name}/{file}", f"{part}/{file}")
        await channel.request("place", key=directory.key, path=part, target=f"{CHECKPOINTS}/{name}")
    for pointer in local_files:
        if "/" not in pointer and pointer not in remote_files:
            await _send(channel, directory, pointer, f"{CHECKPOINTS}/{pointer}")


async def _send(channel: Channel, directory: RunDirectory, name: str, target: str) -> None:
    path = directory.path / CHECKPOINTS / name
    await send_blocks(channel, path, "put_file", key=directory.key, path=target)


async def _remote_sizes(fetcher: Fetcher, channel: Channel, folder: str) -> Sizes:
    """The sizes of the node's finished checkpoints and their pointers."""
    listing = await fetcher.list_files(channel, f"{folder}/{CHECKPOINTS}", None)

    def select() -> Sizes:
        return {path: size for path, size in listing.items()
                if _is_published(path) and not safe_paths.refusal_reason(path)}  # fmt: skip

    return await asyncio.to_thread(select)  # a hostile node lists very many


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
    return parse_version(first) is not None if inner else first in (LATEST, BEST)


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


def _read_manifest(folder: Path, name: str) -> Manifest:
    """The manifest; DamagedCheckpoint if the training side would refuse it or its step differs."""
    try:
        with records.open_regular(folder / MANIFEST) as stream:
            manifest = parse_manifest(stream.read(records.MAX_OBJECT_BYTES), name)
    except OSError as error:
        raise DamagedCheckpoint(f"no {MANIFEST} ({error.strerror})") from None
    if not manifest.files:
        raise DamagedCheckpoint("its manifest names no files")
    return manifest


def _is_complete(folder: Path, name: str, sizes: Sizes) -> bool:
    """Whether a local checkpoint has a readable manifest and all files with their sizes."""
    with contextlib.suppress(DamagedCheckpoint):
        files = _read_manifest(folder, name).files
        return all(sizes.get(file) == entry.bytes for file, entry in files.items())
    return False


async def _catch_refusal(work: Awaitable[object]) -> AgentRefusal | None:
    try:
        await work
    except AgentRefusal as refusal:
        return refusal
    return None


class CheckpointFetcher:
    """Synchronises the run directory's checkpoints with those of rank 0's node.

    Args:
        channel, folder: The channel of rank 0's node, and the run's folder there.
        keep: Number of checkpoints to keep besides the best; 0: unknown, or all.

    Attributes:
        has_refused: The last :meth:`sync` left a checkpoint on the node.
        resumes: The training continues from a checkpoint that is here, if there is one.
    """

    def __init__(self, channel: Channel, folder: str, run: Path, fetcher: Fetcher, *,
                 keep: int = 0,
                 note: Callable[[str], None] = lambda text: None) -> None:  # fmt: skip
        self.keep, self.has_refused, self.resumes = keep, False, True
        self._note, self._noted = note, set[str]()
        self._verified = set[str]()  # names of completely fetched checkpoints
        self._channel, self._folder = channel, folder
        self._run = str(run)
        self._target = run / CHECKPOINTS
        self._signer = Signer(run)
        self._fetcher = fetcher
        self._initial: dict[str, Version] | None = None  # complete local ones at the first sync
        self._max_version: Version = _NO_VERSION  # largest token and step that are accepted
        self._retained = set[Version]()  # the node cannot have these removed
        self._task: asyncio.Task[None] | None = None
        self._needs_rerun = False
        self._silence: HostSilent | None = None  # the end of the last background fetch

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
            self._silence = None
            try:
                await self.sync()
            except HostSilent as error:
                self._silence = error
            except (PacelineError, ConnectionError, OSError):
                pass
            if not self._needs_rerun:
                return

    async def finish(self) -> None:
        """Waits for the background task. Raises HostSilent if the node did not answer it."""
        if self._task is not None and not self._task.done():
            await asyncio.gather(self._task, return_exceptions=True)
            if self._silence is not None:  # it would not answer the next request either
                raise self._silence

    async def sync(self) -> None:
        """Fetches new checkpoints and removes those that the node has removed.

        A node can be hostile. It cannot replace complete checkpoints that were here at the first
        call, nor have the newest and the best of them removed (with a new training, they are
        moved). Of those that were fetched later, it can replace only the newest. If ``keep`` is 0,
        only checkpoints that were fetched by this object are removed.

        A checkpoint gets its name once it is complete. Raises AgentRefusal at the end if a file
        changed while it was read.
        """
        files = await _remote_sizes(self._fetcher, self._channel, self._folder)
        self.has_refused = False
        local = by_name(await asyncio.to_thread(local_sizes, self._target))
        remote = by_name(files)
        if self._initial is None:
            if remote and not self.resumes:
                await asyncio.to_thread(self._set_aside_earlier, local, remote)
            self._initial = await asyncio.to_thread(self._record_initial, local)
        # a checkpoint that the node is removing may lack files: nothing of it is new
        # in their order: the last one may be replaced by one that turned out to be the best
        changed = [(name, remote[name]) for name in sorted(remote, key=_version)
                   if not remote[name].items() <= local.get(name, {}).items()
                   and not self._has_all_but_extras(name, remote[name], local)]  # fmt: skip
        pointers = {name: size for name, size in files.items() if "/" not in name}
        refusals = [
            *[await _catch_refusal(self._fetch_checkpoint(*entry)) for entry in changed],
            await _catch_refusal(self._fetch_pointers(pointers)),
        ]
        removed = outdated(local, remote, self._verified)
        if self.keep:
            present = by_name(await asyncio.to_thread(local_sizes, self._target))
            best = parse_version(read_pointer(self._target / BEST))
            versions = [*filter(None, map(parse_version, present))]
            excess = expired(versions, self.keep, {best, *self._retained})
            removed = [name for name in removed if parse_version(name) in excess]
        else:
            removed = [name for name in removed if name in self._verified]
        await asyncio.to_thread(self._remove, removed)
        for refusal in filter(None, refusals):
            raise refusal

    def _set_aside_earlier(self, local: dict[str, Sizes], remote: Collection[str]) -> None:
        """Moves checkpoints of an earlier training to a folder of their own, as its ranks have.

        A new training has larger writer tokens.
        """
        first_token, _ = min(map(_version, remote))
        backup = backup_name(self._target).name
        for name in [name for name in local if _version(name)[0] < first_token]:
            with contextlib.suppress(OSError):
                safe_paths.rename(self._run, f"{CHECKPOINTS}/{name}", f"{backup}/{name}")
                del local[name]

    def _has_all_but_extras(self, name: str, sizes: Sizes, local: Mapping[str, Sizes]) -> bool:
        """Whether only files are missing here that the checkpoint's manifest does not name."""
        present = local.get(name, {})
        is_verified = name in self._verified and bool(present)
        return is_verified and present.items() <= sizes.items()

    def _record_initial(self, local: Mapping[str, Sizes]) -> dict[str, Version]:
        """Returns the complete local checkpoints; sets what is retained and accepted."""
        initial = {name: _version(name) for name, sizes in local.items()
                   if _is_complete(self._target / name, name, sizes)}  # fmt: skip
        best = read_pointer(self._target / BEST)
        newest = max(initial, key=_version, default="")
        self._retained = {initial[name] for name in (best, newest) if name in initial}
        versions = [_NO_VERSION, *map(_version, local)]
        self._max_version = (
            max(token for token, _ in versions) + MAX_NEW_WRITERS,
            max(step for _, step in versions) + MAX_NEW_STEPS,
        )
        return initial

    def _refusal_reason(self, name: str) -> str:
        """Why a checkpoint of the node is not fetched; empty if it is."""
        (token, step), (max_token, max_step) = _version(name), self._max_version
        if token > max_token or step > max_step:
            return "its number is far above those here"
        if name in (self._initial or ()):
            return OTHER_CHECKPOINT
        return ""

    def _refuse(self, name: str, reason: str) -> None:
        host = self._channel.host.name
        self._fetcher.incomplete_hosts.add(host)
        self.has_refused = True
        if name not in self._noted and len(self._noted) < MAX_REFUSAL_NOTES:
            self._noted.add(name)
            self._note(f"paceline: checkpoint {name} of {host} was left there: {reason}")

    async def _fetch_pointers(self, pointers: Sizes) -> None:
        """Fetches the pointers, except those to checkpoints that are not here."""
        arriving = self._target / ".pointers.arriving.tmp"
        await asyncio.to_thread(shutil.rmtree, arriving, ignore_errors=True)
        await self._fetch(pointers, arriving)
        for name in pointers:
            checkpoint = read_pointer(arriving / name)
            if parse_version(checkpoint) and (self._target / checkpoint).is_dir():
                path = f"{CHECKPOINTS}/{name}"
                source = f"{CHECKPOINTS}/{arriving.name}/{name}"
                await asyncio.to_thread(safe_paths.rename, self._run, source, path)
        await asyncio.to_thread(shutil.rmtree, arriving, ignore_errors=True)

    async def _fetch_checkpoint(self, name: str, files: Sizes) -> None:
        if reason := self._refusal_reason(name):
            self._refuse(name, reason)
            return
        arriving = self._target / f".{name}.arriving.tmp"
        await asyncio.to_thread(shutil.rmtree, arriving, ignore_errors=True)
        try:
            if problem := await self._fetch_verified(name, files, arriving):
                self._refuse(name, problem)
                return
            await asyncio.to_thread(self._place, arriving.name, name)
            await asyncio.to_thread(self._signer.sign, name)
            self._verified.add(name)
        finally:
            await asyncio.to_thread(shutil.rmtree, arriving, ignore_errors=True)

    async def _fetch_verified(self, name: str, listed: Sizes, arriving: Path) -> str:
        """Fetches a checkpoint's manifest and then only the files that it names.

        Returns why the checkpoint is not taken; empty if it is complete in ``arriving``.
        """
        folder = arriving / name
        manifest_bytes = listed.get(MANIFEST, 0)
        if not 0 < manifest_bytes <= records.MAX_OBJECT_BYTES:
            return f"it has no {MANIFEST} of at most {records.MAX_OBJECT_BYTES} bytes"
        await self._fetch({f"{name}/{MANIFEST}": manifest_bytes}, arriving)
        try:
            manifest = await asyncio.to_thread(_read_manifest, folder, name)
        except DamagedCheckpoint as damage:
            return f"it is damaged: {damage}"
        if not await asyncio.to_thread(self._signer.may_arrive, name, manifest):
            return OTHER_CHECKPOINT
        entries = manifest.files
        sizes = {file: entry.bytes for file, entry in entries.items()}
        for file, size in sizes.items():
            if listed.get(file) != size:
                return f"it is damaged: {file:.100} is not the file that its manifest describes"
        hashes = await asyncio.to_thread(self._link_shared, sizes, folder)
        missing = {f"{name}/{file}": size for file, size in sizes.items() if file not in hashes}
        if problem := room_problem(self._target, sum(missing.values())):
            return f"the disk has no room: {problem}"
        fetched = await self._fetch(missing, arriving)
        hashes |= {path.partition("/")[2]: sha256 for path, sha256 in fetched.items()}
        for file, entry in entries.items():
            if hashes[file] != entry.sha256:
                return f"it is damaged: {file:.100} is not the file that its manifest describes"
        return ""

    def _link_shared(self, files: Sizes, into: Path) -> dict[str, str]:
        """Links frozen weights from an earlier local checkpoint; returns their SHA-256.

        A damaged or forged file, whose content does not fit its name, is not linked.
        """
        linked = {}
        for file in filter(is_frozen_file, files):
            for path in self._target.glob(f"*/{file}"):
                if not parse_version(path.parent.name) or path.lstat().st_size != files[file]:
                    continue
                with contextlib.suppress(OSError):  # a disk without hard links
                    into.mkdir(parents=True, exist_ok=True)
                    os.link(path, into / file, follow_symlinks=False)
                    sha256 = hash_file(into / file)
                    if frozen_file(sha256) == file:
                        linked[file] = sha256
                        break
                    (into / file).unlink()
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
