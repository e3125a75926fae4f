"""Copies a script's files from rank 0's node while it runs, and to all nodes before it starts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from paceline.launch.nodes.fleet import Fleet, Node, together
from paceline.launch.planning.planner import Supplies
from paceline.rundir.directory import short
from paceline.spec.errors import PacelineError
from paceline.spec.formatting import pluralize
from paceline.transfer.outputs import OutputFolder, OutputStore
from paceline.transfer.tree import Manifest, Tree

POLL_S = 2.0  # between two looks at rank 0's files
LINK_SHARE = 0.25  # of the time, in which files travel while ranks train
MAX_NAMED = 3


class OutputSync:
    """Keeps the files that rank 0 writes below the project here and on all nodes.

    This concerns copies of the code that were sent to nodes. A shared folder needs none of it.

    Attributes:
        store: The files that are here.
    """

    def __init__(self, run: Path, note: Callable[[str], None]) -> None:
        self.store = OutputStore(run, note)
        self._run, self._note = run, note
        self._tree: Tree | None = None
        self._folders: dict[Node, OutputFolder] = {}
        self._source: Node | None = None  # has rank 0, or had it last
        self._problem = ""

    def set_code(self, supplies: Supplies) -> None:
        """Sets the code that nodes get."""
        if (tree := supplies.code) is not None:
            self._tree = tree
            self.store.set_code(tree.root if tree.copy is None else None, tree.manifest)

    # --- before ranks start ------------------------------------------------------------------

    async def provide(self, node: Node) -> None:
        """Gives a new node the files that earlier starts wrote, if it has a copy of the code."""
        if "code" in node.copies and node not in self._folders:
            folder = OutputFolder(node.name, node.channel, node.copies["code"][0])
            await self.store.open_folder(folder)
            self._folders[node] = folder
            await self.store.send(folder)

    async def start(self, fleet: Fleet) -> None:
        """Chooses the node whose files travel, once all nodes of the first start are known."""
        first, tree = fleet.first, self._tree
        has_copies = any("code" in node.copies for node in fleet.everyone)
        if first.host.local and tree is not None and tree.copy is None and has_copies:
            folder = OutputFolder(first.name, first.channel, str(tree.root), is_local=True)
            with self._reporting(first):
                await self.store.open_folder(folder)
                self._folders[first] = folder
                await self.store.sync(folder, has_ended=True)
            await self._send_to([node for node in fleet.everyone if node is not first])
        self._source = first

    async def align(self, fleet: Fleet) -> None:
        """Gives all nodes of the next start the newest complete files of rank 0, and only those."""
        source = self._source
        if source is not None and source in self._folders and not source.lost:
            with self._reporting(source):
                await self.store.sync(self._folders[source], has_ended=True)
        self._source = fleet.first
        if fleet.nodes == [source] and source in self._folders:
            if not source.host.local:
                await self.store.send(self._folders[source], is_source=True)
        else:
            await self._send_to(fleet.nodes)

    async def _send_to(self, nodes: Sequence[Node]) -> None:
        copies = [node for node in nodes if node in self._folders and not node.host.local]
        await together([self.store.send(self._folders[node]) for node in copies])

    # --- while they run ----------------------------------------------------------------------

    async def watch(self, first: Callable[[], Node | None]) -> None:
        """Fetches what rank 0 writes until cancelled; ``first`` returns its node."""
        while True:
            await asyncio.sleep(POLL_S)
            self._source = first() or self._source
            node = self._source
            if node is None or node.lost or node not in self._folders:
                continue
            with self._reporting(node):
                await self.store.sync(self._folders[node], share=LINK_SHARE)

    @contextlib.contextmanager
    def _reporting(self, node: Node) -> Iterator[None]:
        """Shows once why files do not arrive; the next attempt may succeed."""
        try:
            yield
        except (PacelineError, OSError, ValueError) as error:
            problem = str(error).splitlines()[0] if str(error) else type(error).__name__
            if problem != self._problem and not node.lost:
                self._note(f"paceline: new files of {node.name} do not arrive: {problem}")
            self._problem = problem
        else:
            self._problem = ""

    # --- after they have ended ---------------------------------------------------------------

    async def finish(self, node: Node, *, has_succeeded: bool) -> None:
        """Fetches the last files of rank 0's node after its ranks have ended, perhaps well."""
        if node is self._source and node in self._folders:
            with self._reporting(node):
                await self.store.sync(self._folders[node], has_ended=True,
                                      has_succeeded=has_succeeded)  # fmt: skip

    def known_entries(self, node: Node) -> Manifest:
        """Entries of the files that the node got from here, or that are here already."""
        folder = self._folders.get(node)
        return [] if folder is None else self.store.fetched_entries(folder)

    def note_kept_out(self) -> None:
        """Names the files that did not arrive in the project."""
        if kept_out := self.store.kept_out:
            examples = ", ".join(
                short(self._run / place) for place in [*kept_out.values()][:MAX_NAMED]
            )
            more = ", …" if len(kept_out) > MAX_NAMED else ""
            self._note(f"paceline: {pluralize(len(kept_out), 'file')} of the script did not replace"
                       f" files of yours: {examples}{more}")  # fmt: skip
            kept_out.clear()
