"""New files of the nodes, brought into the run directory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from paceline.agent.inside import Arriving, why_refused
from paceline.remote.channel import Channel
from paceline.rundir.arrivals import Arrivals
from paceline.spec.errors import NodeError
from paceline.spec.helptext import counted
from paceline.spec.rundir import FETCHED, is_ours
from paceline.transfer.files import fetch_file
from paceline.transfer.tree import Manifest

RESULT_LIMIT = 8 << 30  # bytes brought back from one node


class Fetcher:
    """Brings files of nodes into the run directory, each under its name once it is whole.

    Args:
        directory: The run directory: no link inside it is followed.
        note: Tells the user.

    Attributes:
        left_on: Hosts on which something has stayed: its folder there may not be removed.
    """

    def __init__(self, directory: Path, note: Callable[[str], None] = lambda text: None) -> None:
        self._directory, self._note = directory, note
        self.left_on: set[str] = set()

    async def fetch(self, channel: Channel, root: str, manifest: Manifest | None, target: Path,
                    leave: Callable[[str], bool] = lambda path: False,
                    *, refuse: Callable[[str], str] = lambda path: "",
                    supervisor: bool = False) -> list[str]:  # fmt: skip
        """Brings the new and changed files below ``root`` of a node to ``target``.

        Args:
            channel: To the node.
            root: Folder there.
            manifest: What was there before the job; ``None`` when nothing was.
            target: Folder here, in the run directory.
            leave: True for paths that stay there, untold.
            refuse: Why a path stays there besides those that are never brought; empty if it comes.
            supervisor: The launcher of the run is there: it writes the run's records.

        Returns:
            The paths that came, as they are there.
        """
        answer = await channel.request("list_results", root=root, manifest=manifest)
        listed = {str(f["path"]): int(f["size"]) for f in answer["files"] if not leave(f["path"])}
        refused = {path: why for path in listed
                   if (why := why_refused(self._below(target, path)) or refuse(path))}  # fmt: skip
        files = {path: size for path, size in listed.items() if path not in refused}
        total = sum(files.values())
        if total > RESULT_LIMIT:
            raise NodeError(
                f"the results on {channel.host.name} are larger than what is brought back",
                found=f"{total >> 20} MiB in {root}",
                remedy=f"Copy them by hand: scp -r {channel.host.address}:{root} .",
            )
        host = channel.host.name
        if refused:
            self.left_on.add(host)
            await channel.request("keep_folder", root=root)
            shown = "; ".join(f"{path:.100} ({why})" for path, why in [*refused.items()][:3])
            said = f"{counted(len(refused), 'file')} stayed on {host} in {root}: {shown}"
            self._note(f"paceline: {said}")
        arrivals, moved = Arrivals(self._directory), list[str]()
        for path, size in files.items():
            name = self._below(target, path)
            direct = supervisor and is_ours(name) and not name.startswith(f"{FETCHED}/")
            place = name if direct else arrivals.place(name, host)
            await self._fetch_to(channel, root, path, size, place)
            if not direct:
                arrivals.record(place)
            if place != name:
                moved.append(f"{name} as {place}")
        if moved:
            shown = ", ".join(moved[:3]) + (" …" if len(moved) > 3 else "")
            self._note(
                f"paceline: {counted(len(moved), 'file')} of {host} came to another place, for the"
                f" folder holds more than runs: {shown}"
            )
        return list(files)

    async def fetch_files(self, channel: Channel, root: str, files: Mapping[str, int],
                          target: Path) -> dict[str, str]:  # fmt: skip
        """Brings these files below ``root``, by their sizes in bytes; returns their SHA-256."""
        hashes = {}
        for path, size in files.items():
            place = self._below(target, path)
            hashes[path] = await self._fetch_to(channel, root, path, size, place)
        return hashes

    def _below(self, target: Path, path: str) -> str:
        below = target.relative_to(self._directory).as_posix()
        return path if below == "." else f"{below}/{path}"

    async def _fetch_to(self, channel: Channel, root: str, path: str, size: int, place: str) -> str:
        """Brings one file to its place below the run directory; returns its SHA-256."""
        try:
            arriving = await asyncio.to_thread(Arriving, str(self._directory), place)
            await fetch_file(channel, root, path, size, arriving)
        except OSError as problem:
            if isinstance(problem, ConnectionError):
                raise
            raise self._cannot_write(channel, root, problem) from None
        return arriving.sha256

    def _cannot_write(self, channel: Channel, root: str, problem: OSError) -> NodeError:
        return NodeError(
            f"cannot write what {channel.host.name} sends",
            found=f"{problem.strerror} ({problem.filename or self._directory})",
            remedy=f"Make room there, or copy by hand: scp -r {channel.host.address}:{root} .",
        )
