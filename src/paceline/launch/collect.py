"""What nodes have for us: checkpoints as they are made, rank 0's files and new files at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from paceline.launch.fleet import Fleet, Node
from paceline.rundir.directory import RunDirectory, short
from paceline.spec import rundir as names
from paceline.spec.errors import PacelineError
from paceline.spec.events import Event
from paceline.transfer.checkpoints import CheckpointFetcher
from paceline.transfer.results import Fetcher


class Results:
    """Brings the results of a run into its run directory.

    Args:
        directory: The run directory.
        note: Tells the user.
    """

    def __init__(self, directory: RunDirectory, note: Callable[[str], None]) -> None:
        self._directory = directory
        self._note = note
        self._fetcher = Fetcher(directory.path)
        self._checkpoints: CheckpointFetcher | None = None  # of rank 0, where they have to come
        self._all_home = False
        self._elsewhere: list[tuple[Node, str]] = []  # what found no room in its place

    def expect_from(self, first: Node) -> None:
        """Checkpoints are made on this node, which may write them into the run directory itself."""
        self._checkpoints = None if first.shared_run_dir else CheckpointFetcher(
            first.channel, first.run_folder, self._directory, self._fetcher)  # fmt: skip

    def heard(self, node: Node, event: Event) -> None:
        """Follows what ranks say of checkpoints and models that they saved."""
        if event.kind == "model kept elsewhere" and event["folder"]:
            self._elsewhere.append((node, event["folder"]))
        if event.kind == "checkpoint" and self._checkpoints is not None:
            self._checkpoints.wanted()

    async def bring_home(self, fleet: Fleet) -> None:
        """Fetches rank 0's run files, and what ranks wrote into copies of the code."""
        for node in fleet.nodes:
            if node.lost or node.running:  # one whose ranks could not be ended answers nothing
                continue
            try:
                await self._bring_from(node, rank_zero=node is fleet.first)
            except (PacelineError, ConnectionError, OSError) as error:
                self._note(f"paceline: the results of {node.name} did not come: {error}")

    async def clear(self, node: Node) -> None:
        """The node's own run folder has served; it stays there unless all of it came home."""
        if self._all_home and not node.lost:
            with contextlib.suppress(PacelineError, ConnectionError):
                await node.channel.request("discard_run_folder", key=self._directory.key)

    async def _bring_from(self, node: Node, rank_zero: bool) -> None:
        target = self._directory.path
        if rank_zero and self._checkpoints is not None:
            await self._checkpoints.finish()
            await self._checkpoints.sync()
            await self._fetcher.fetch(
                node.channel, node.run_folder, None, target, leave=names.is_ours
            )
            self._all_home = True
        for there in [where for who, where in self._elsewhere if who is node]:
            await self._fetcher.fetch(node.channel, there, None, target, leave=names.is_ours)
            self._note(
                f"paceline: the model came home from {there} on {node.name}; remove it there"
            )
        if "code" in node.copies:
            root, manifest = node.copies["code"]
            folder = target / names.FETCHED / names.safe(node.name)
            came = await self._fetcher.fetch(node.channel, root, manifest, folder)
            if came:
                count = f"{len(came)} new file{'s' * (len(came) > 1)}"
                self._note(f"paceline: {count} of {node.name}: {short(folder)}")
