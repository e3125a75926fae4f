"""New files of the nodes, brought into the run directory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from paceline.agent.inside import Arriving
from paceline.remote.channel import Channel
from paceline.spec.errors import NodeError
from paceline.transfer.files import fetch_file
from paceline.transfer.tree import Manifest

RESULT_LIMIT = 8 << 30  # bytes brought back from one node


class Fetcher:
    """Brings files of nodes into the run directory, each under its name once it is whole.

    Args:
        directory: The run directory: no link inside it is followed.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def fetch(self, channel: Channel, root: str, manifest: Manifest | None, target: Path,
                    leave: Callable[[str], bool] = lambda path: False) -> list[str]:  # fmt: skip
        """Brings the new and changed files below ``root`` of a node to ``target``.

        Args:
            channel: To the node.
            root: Folder there.
            manifest: What was there before the job; ``None`` when nothing was.
            target: Folder here, in the run directory.
            leave: True for paths that stay there.

        Returns:
            The paths that came, relative to ``target``.
        """
        answer = await channel.request("list_results", root=root, manifest=manifest)
        files = {str(f["path"]): int(f["size"]) for f in answer["files"] if not leave(f["path"])}
        total = sum(files.values())
        if total > RESULT_LIMIT:
            raise NodeError(
                f"the results on {channel.host.name} are larger than what is brought back",
                found=f"{total >> 20} MiB in {root}",
                remedy=f"Copy them by hand: scp -r {channel.host.address}:{root} .",
            )
        await self.fetch_files(channel, root, files, target)
        return list(files)

    async def fetch_files(self, channel: Channel, root: str, files: Mapping[str, int],
                          target: Path) -> dict[str, str]:  # fmt: skip
        """Brings these files below ``root``, by their sizes in bytes; returns their SHA-256."""
        hashes = {}
        below = target.relative_to(self._directory).as_posix()
        for path, size in files.items():
            name = path if below == "." else f"{below}/{path}"
            try:
                arriving = await asyncio.to_thread(Arriving, str(self._directory), name)
                await fetch_file(channel, root, path, size, arriving)
                hashes[path] = arriving.sha256
            except OSError as problem:
                if isinstance(problem, ConnectionError):
                    raise
                raise self._cannot_write(channel, root, problem) from None
        return hashes

    def _cannot_write(self, channel: Channel, root: str, problem: OSError) -> NodeError:
        return NodeError(
            f"cannot write what {channel.host.name} sends",
            found=f"{problem.strerror} ({problem.filename or self._directory})",
            remedy=f"Make room there, or copy by hand: scp -r {channel.host.address}:{root} .",
        )
