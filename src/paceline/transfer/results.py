"""Fetches new files of the nodes into the run directory."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from paceline.agent.files import safe_paths
from paceline.agent.files.safe_paths import IncomingFile, refusal_reason
from paceline.agent.files.snapshot import BLOCK_BYTES, UNCOLLECTED, UNCOLLECTED_SHARDS
from paceline.remote.channel import Channel
from paceline.rundir.arrivals import Arrivals
from paceline.rundir.directory import short
from paceline.spec.errors import NodeError
from paceline.spec.formatting import pluralize, shell_text
from paceline.spec.rundir import FETCHED, backup_name, is_growing, is_launcher_file
from paceline.transfer.files import Window
from paceline.transfer.tree import Manifest

_FOR_NEXT_START = (UNCOLLECTED, UNCOLLECTED_SHARDS)  # hosts with a common home have one cache

RESULT_LIMIT = 8 << 30  # bytes brought back from one node
MAX_RESERVED_BYTES = 64 << 20  # fetched files leave so much of the disk free, or a twentieth
Sizes = dict[str, int]  # by path


def room_problem(folder: Path, needed_bytes: int) -> str:
    """Why files of this size are not fetched to the disk of ``folder``; empty if they fit."""
    usage = shutil.disk_usage(folder)
    reserved = min(MAX_RESERVED_BYTES, usage.total // 20)
    if needed_bytes <= max(usage.free - reserved, 0):
        return ""
    return (
        f"{needed_bytes / 1e6:,.1f} MB needed, {usage.free / 1e6:,.1f} MB free on the disk of"
        f" {folder}, of which Paceline leaves {reserved / 1e6:,.1f} MB free"
    )


class Fetcher:
    """Fetches files of nodes; each gets its name only when it is complete.

    Args:
        directory: The run directory; links inside it are not followed.

    Attributes:
        incomplete_hosts: Hosts whose run folder must be kept: some files were not fetched.
        keeps_earlier: Files of an earlier start that differ are kept. They are not if the run
            continues that start.
    """

    def __init__(self, directory: Path, note: Callable[[str], None] = lambda text: None) -> None:
        self._directory, self._note = directory, note
        self._noted = set[str]()
        self.incomplete_hosts: set[str] = set()
        self.keeps_earlier = True

    async def fetch(self, channel: Channel, root: str, manifest: Manifest | None, target: Path,
                    skip: Callable[[str], bool] = lambda path: False,
                    *, rejection_reason: Callable[[str], str] = lambda path: "",
                    supervisor: bool = False) -> list[str]:  # fmt: skip
        """Fetches new and changed files below ``root`` of a node into ``target``.

        Args:
            root: Folder on the node.
            manifest: The folder's content before the job; ``None`` if it was empty.
            target: Local folder, in the run directory.
            skip: Whether to skip a path silently.
            rejection_reason: Reason to refuse a path besides the general rules; may be empty.
            supervisor: The node has the run's launcher, which writes the run's records.

        Returns:
            The fetched paths, as on the node.
        """
        listing = await self.list_files(channel, root, manifest)

        def select() -> tuple[Sizes, dict[str, str]]:
            listed = {path: size for path, size in listing.items()
                      if not (skip(path) or path.split("/")[0] in _FOR_NEXT_START)}  # fmt: skip
            rejected = {path: reason for path in listed
                        if (reason := refusal_reason(self._in_run(target, path))
                            or rejection_reason(path))}  # fmt: skip
            files = {path: size for path, size in listed.items() if path not in rejected}
            return files, rejected

        files, rejected = await asyncio.to_thread(select)  # a hostile node lists very many
        total = sum(files.values())
        if total > RESULT_LIMIT:
            raise NodeError(
                f"the results on {channel.host.name} are larger than what is brought back",
                found=f"{total >> 20} MiB in {root}",
                remedy=f"Copy them by hand: {copy_command(channel, root)}",
            )
        host = channel.host.name
        self._check_room(channel, root, total)
        if rejected:
            await self._leave(channel, root, rejected)
        arrivals, moved = Arrivals(self._directory), list[str]()
        for path, size in files.items():
            name = self._in_run(target, path)
            direct = supervisor and is_launcher_file(name) and not name.startswith(f"{FETCHED}/")
            place = name if direct else arrivals.place(name, host)
            set_aside = partial(arrivals.set_aside, place) if self.keeps_earlier else None
            if direct:
                set_aside = partial(self._back_up, name) if is_growing(name) else None
            await self._fetch_to(channel, root, path, size, place, set_aside)
            if not direct:
                await asyncio.to_thread(arrivals.record, place)
            if arrivals.has_backup:
                backup = short(self._directory / arrivals.backup_folder)
                self.note_once(f"paceline: files of an earlier start that differ moved to {backup}")
            if place != name:
                moved.append(f"{name} as {place}")
        if moved:
            examples = ", ".join(moved[:3]) + (" …" if len(moved) > 3 else "")
            self._note(
                f"paceline: {pluralize(len(moved), 'file')} of {host} came to another place, which"
                f" replaces nothing and where no program looks for code: {examples}"
            )
        return list(files)

    def _back_up(self, path: str, incoming: str) -> None:
        """Renames a log of an earlier run, unless the file that replaces it continues it."""
        folder = str(self._directory)
        try:
            fd = safe_paths.open_file(folder, path, os.O_RDONLY)
        except FileNotFoundError:
            return
        with os.fdopen(fd, "rb") as earlier, Path(incoming).open("rb") as replacement:
            while block := earlier.read(BLOCK_BYTES):
                if replacement.read(len(block)) != block:
                    break
            else:
                return
        safe_paths.rename(folder, path, backup_name(Path(path)).as_posix(), durable=False)

    async def list_files(self, channel: Channel, root: str, manifest: Manifest | None) -> Sizes:
        """Returns the sizes of new and changed files below ``root`` of a node."""
        answer = await channel.request("list_results", root=root, manifest=manifest)
        return {file["path"]: file["size"] for file in answer["files"]}

    def note_once(self, text: str) -> None:
        """Shows a line to the user unless it was shown before."""
        if text not in self._noted:
            self._noted.add(text)
            self._note(text)

    def _check_room(self, channel: Channel, root: str, needed_bytes: int) -> None:
        if problem := room_problem(self._directory, needed_bytes):
            raise NodeError(
                f"the results on {channel.host.name} do not fit on this disk",
                found=problem,
                remedy="Make room there, or copy them by hand to another disk:"
                f" {copy_command(channel, root)}",
            )

    async def _leave(self, channel: Channel, root: str, rejected: Mapping[str, str]) -> None:
        """Has a node keep the folder of files that are not fetched, and notes them with reasons."""
        host = channel.host.name
        self.incomplete_hosts.add(host)
        await channel.request("keep_folder", root=root)
        # a name may have line breaks in it
        examples = "; ".join(f"{path[:100]!r} ({why})" for path, why in [*rejected.items()][:3])
        files_text = pluralize(len(rejected), "file")
        self._note(f"paceline: {files_text} stayed on {host} in {root}: {examples}")

    async def fetch_files(self, channel: Channel, root: str, files: Mapping[str, int],
                          target: Path) -> dict[str, str]:  # fmt: skip
        """Fetches these files below ``root``, given their sizes; returns their SHA-256.

        Raises:
            NodeError: They do not fit on the disk.
        """
        self._check_room(channel, root, sum(files.values()))
        hashes = {}
        for path, size in files.items():
            place = self._in_run(target, path)
            hashes[path] = await self._fetch_to(channel, root, path, size, place)
        return hashes

    def _in_run(self, target: Path, path: str) -> str:
        folder = target.relative_to(self._directory).as_posix()
        return path if folder == "." else f"{folder}/{path}"

    async def _fetch_to(self, channel: Channel, root: str, path: str, size: int, place: str,
                        before_rename: Callable[[str], None] | None = None) -> str:  # fmt: skip
        """Fetches a file to its place in the run directory; returns its SHA-256."""
        folder = str(self._directory)
        try:
            arriving = await asyncio.to_thread(
                IncomingFile, folder, place, before_rename=before_rename
            )
            await fetch_file(channel, root, path, size, arriving)
        except OSError as problem:
            if isinstance(problem, ConnectionError):
                raise
            raise write_error(channel, root, self._directory, problem) from None
        return arriving.sha256


async def fetch_file(
    channel: Channel, root: str, path: str, size: int, target: IncomingFile
) -> None:
    """Fetches a file of a node, which gets its name only when it is complete.

    Raises AgentRefusal if the node cannot read it or it has changed, and NodeError or OSError if it
    differs, cannot be written, or the node sends nothing more.
    """
    sha256 = ""

    async def receive(answer: Any, data: bytes) -> None:
        nonlocal sha256
        sha256 = str(answer.get("sha256", ""))
        await asyncio.to_thread(target.add, target.size, data)

    try:
        async with Window(channel, receive) as window:
            for offset in range(0, max(size, 1), BLOCK_BYTES):
                count = min(BLOCK_BYTES, size - offset)
                await window.request("read_block", root=root, path=path, offset=offset,
                                     count=count, last=offset + count == size)  # fmt: skip
        try:
            await asyncio.to_thread(target.finish, size, sha256)
        except ValueError as problem:
            raise NodeError(
                f"{path} of {channel.host.name} did not arrive unchanged", found=str(problem)
            ) from None
    finally:
        await asyncio.to_thread(target.drop)


def write_error(channel: Channel, root: str, folder: Path, problem: OSError) -> NodeError:
    """The error for files below ``root`` of a node that cannot be written below ``folder``."""
    return NodeError(
        f"cannot write what {channel.host.name} sends",
        found=f"{problem.strerror} ({problem.filename or folder})",
        remedy="Make room there, or look at what is in the way, or copy by hand:"
        f" {copy_command(channel, root)}",
    )


def copy_command(channel: Channel, root: str) -> str:
    """The command that copies a node's folder, whose name the node has chosen."""
    host, config = channel.host, channel.ssh_config
    if host.local:
        return shell_text(["cp", "-r", root, "."])
    address = f"[{host.address}]" if ":" in host.address else host.address
    login = f"{host.user}@{address}" if host.user else address
    options = {"-F": config, "-i": host.identity_file, "-P": host.port}
    words = [text for name, value in options.items() if value for text in (name, str(value))]
    return shell_text(["scp", *words, "-r", f"{login}:{root}", "."])
