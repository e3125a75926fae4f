"""Checkpoints where there is no shared disk: sent to rank 0's node, and brought home as they come.

So a run goes on from its run directory wherever it is started next, and losing the node with
rank 0 costs the steps since its last checkpoint and no more.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from pathlib import Path
from typing import Any

from paceline.agent.snapshot import read_blocks
from paceline.launch.node import Node
from paceline.launch.rundir import RunDirectory
from paceline.launch.shipping import Fetcher
from paceline.spec.errors import PacelineError
from paceline.spec.rundir import CHECKPOINTS, WRITER


async def send_checkpoints(node: Node, directory: RunDirectory) -> None:
    """Puts the run directory's checkpoints into the node's run folder where it lacks them.

    Files that the node has are left: it may hold newer checkpoints than we do, from a run whose
    launcher was killed.
    """
    folder = directory.path / CHECKPOINTS
    here = sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / WRITER)
    if not here:
        return
    answer = await node.channel.request("list_results", root=node.run_folder, manifest=None)
    there = {file["path"] for file in answer["files"]}
    for path in here:
        name = path.relative_to(directory.path).as_posix()
        if name not in there:
            await _send(node, directory.key, name, path)


async def _send(node: Node, key: str, name: str, path: Path) -> None:
    size = path.stat().st_size
    for offset, data in read_blocks(path):
        if data or not size:
            last = offset + len(data) >= size
            await node.channel.request(
                "put_file", key=key, path=name, offset=offset, last=last, blob=data
            )


class Mirror:
    """Keeps the run directory's checkpoints like those of rank 0's node.

    Args:
        node: With rank 0.
        directory: The run directory.
        fetcher: Receives the files.
    """

    def __init__(self, node: Node, directory: RunDirectory, fetcher: Fetcher) -> None:
        self._node = node
        self._target = directory.path / CHECKPOINTS
        self._fetcher = fetcher
        self._task: asyncio.Task[None] | None = None
        self._again = False

    def wanted(self) -> None:
        """There is a new checkpoint: brings it in the background."""
        if self._node.shared_run_dir:
            return
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
        """Brings what is new on the node, and removes what the node has removed."""
        root = f"{self._node.run_folder}/{CHECKPOINTS}"
        answer = await self._node.channel.request("list_results", root=root, manifest=None)
        files: list[dict[str, Any]] = [f for f in answer["files"] if f["path"] != WRITER]
        if not files:
            return
        wanted = [f["path"] for f in files if self._lacks(f)]
        if wanted:
            await self._fetcher.fetch_files(self._node, root, wanted, self._target)
        self._drop({f["path"].split("/")[0] for f in files})

    def _lacks(self, file: dict[str, Any]) -> bool:
        """Files of a checkpoint never change; the pointers beside them do."""
        path = self._target / file["path"]
        return "/" not in file["path"] or not path.exists() or path.stat().st_size != file["size"]

    def _drop(self, there: set[str]) -> None:
        for folder in self._target.iterdir() if self._target.exists() else ():
            if folder.is_dir() and folder.name.isdigit() and folder.name not in there:
                shutil.rmtree(folder, ignore_errors=True)
