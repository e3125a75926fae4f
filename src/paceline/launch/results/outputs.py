"""Copies a script's files from rank 0's node while it runs, and to all nodes before it starts."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.agent.files.safe_paths import MAX_PATH_LENGTH
from paceline.agent.files.snapshot import UNCOLLECTED, UNCOLLECTED_SHARDS
from paceline.launch.nodes.fleet import Fleet, Node, try_request
from paceline.launch.planning.placement import Supplies
from paceline.remote.fanout import gather_all
from paceline.rundir.directory import short
from paceline.spec.errors import PacelineError
from paceline.spec.formatting import pluralize, shell_text
from paceline.spec.rundir import FETCHED, safe_name
from paceline.transfer.local_outputs import format_paths
from paceline.transfer.output_folders import RUN_PREFIX, OutputFolder
from paceline.transfer.outputs import OutputStore
from paceline.transfer.results import Fetcher
from paceline.transfer.tree import Tree

SUPERSEDED = "superseded"  # in the folder for files of a host: what stays out of the project
POLL_S = 2.0  # between two looks at rank 0's files
LINK_SHARE = 0.25  # of the time, in which files travel while ranks train
MAX_OUTSIDE = 20  # paths outside the project that are looked at
LOOK_TIMEOUT_S = 5.0  # for these, which may be on a disk that hangs


class OutputSync:
    """Keeps the files that rank 0 writes here and on all nodes that do not share the disk.

    These are files below copies of the code that were sent to nodes, and in ``PACELINE_RUN_DIR``.

    Args:
        arguments: Of the script.
        workdir: The current folder, to which its relative paths lead.

    Attributes:
        store: The files that are here.
    """

    def __init__(
        self,
        run: Path,
        note: Callable[[str], None],
        arguments: Sequence[str] = (),
        workdir: Path | None = None,
        *,
        is_measured: bool = False,
    ) -> None:
        self.store = OutputStore(run, note)
        self._run, self._note, self._arguments, self._workdir = run, note, arguments, workdir
        self._is_measured = is_measured
        # absolute paths that rank 0's node did not have at the start
        self._outside: tuple[Node, list[str]] | None = None
        self._tree: Tree | None = None
        self._project: Path | None = None
        self._local_checkpoints: OutputFolder | None = None  # for later starts with other hosts
        self._folders: dict[Node, list[OutputFolder]] = {}
        self._discarding = asyncio.Lock()  # hosts may share the folder
        self._missing = set[str]()  # checkpoints and parts of which a line has told
        self._source: Node | None = None  # has rank 0, or had it last
        self._problem = ""

    def set_code(self, supplies: Supplies, project: Path | None = None) -> Supplies:
        """Sets the code that nodes get, and its folder if this is the user's machine. Blocking.

        Returns:
            The supplies without files that other runs wrote: nodes get these with their times.
        """
        self._source, self._project = None, project
        if (tree := supplies.code) is None:
            return supplies
        if self._is_measured:  # nodes get no files beside the code
            self._tree = tree
            return supplies
        root = tree.root if tree.copy is None else None
        self._tree = tree.without(self.store.set_code(root, tree.manifest))
        return replace(supplies, code=self._tree)

    # --- before ranks start ------------------------------------------------------------------

    async def provide(self, node: Node) -> None:
        """Gives a new node the files that earlier starts wrote, if it does not share the disk."""
        if node in self._folders or self._is_measured:
            return
        folders: list[OutputFolder] = []
        self._folders[node] = folders
        if "code" in node.copies:
            folders.append(OutputFolder(node.name, node.channel, node.copies["code"][0]))
        if not node.shared_run_dir:
            folders.append(
                OutputFolder(node.name, node.channel, node.run_folder, prefix=RUN_PREFIX)
            )
        await gather_all([self.store.open_folder(folder) for folder in folders])
        if self._source is not None:  # it comes late
            await self._send(node, is_fresh=True)

    async def start(self, fleet: Fleet, num_ranks: int) -> None:
        """Gives all nodes of the first start the files that earlier starts wrote.

        Rank 0's node may still have newer ones, if the launcher was killed.
        """
        first = self._source = fleet.first
        if self._is_measured:
            self._note_measured_folder(first)
            return
        if first.host.local:
            self._folders[first] = await self._open_local(first, fleet)
        kept = [folder for folder in self._folders.get(first, ())
                if folder.is_local or folder.prefix]  # fmt: skip
        await self._sync(first, kept, has_ended=True)
        await gather_all([self._fetch_uncollected(node) for node in fleet.everyone
                          if not node.shared_run_dir])  # fmt: skip
        await gather_all([self._fetch_uncollected_shards(node) for node in fleet.everyone
                          if not node.shared_run_dir])  # fmt: skip
        with self._reporting(first):
            await asyncio.to_thread(self.store.restore)
            if foreign := await asyncio.to_thread(self.store.foreign_checkpoints):
                self._note(f"paceline: warning: hosts also get {format_paths(foreign)}, which other"
                           " runs wrote. A script that loads the newest checkpoint may go on from"
                           " there")  # fmt: skip
        self.store.start_attempt()
        await gather_all([self._send(node, is_fresh=True) for node in fleet.everyone])
        await self._note_missing_parts(num_ranks)
        with self._reporting(first):
            if unsent := await asyncio.to_thread(self.store.unsent_of_other_ranks):
                self._note(f"paceline: note: ranks other than 0 wrote {format_paths(unsent)} in"
                           f" {short(self._run)}, which hosts do not get. If they resume from these"
                           " files, name them like rank 0's, except for the rank (state_rank1.pt),"
                           " and let all ranks save at the same time")  # fmt: skip
        self._outside = first, await self._existing_outside(first, exists=False)
        await self._note_unsent_checkpoint(fleet)
        self._note_own_projects(fleet)

    async def _note_missing_parts(self, num_ranks: int) -> None:
        """Says of which checkpoints hosts do not get all parts, because these are not here."""
        missing = {*await asyncio.to_thread(self.store.missing_parts, num_ranks)} - self._missing
        self._missing |= missing
        if missing:
            self._note("paceline: warning: ranks may resume from different steps, for parts of"
                       f" checkpoints have not arrived: {format_paths(sorted(missing))}. Hosts do"
                       " not get distributed checkpoints without all shards, and no files of other"
                       " ranks that are older than rank 0's")  # fmt: skip

    async def _existing_outside(self, node: Node, *, exists: bool) -> list[str]:
        """Returns absolute paths in the script's arguments that are not on this machine.

        ``exists``: Whether to return those that are on the node, or those that are not.
        """
        if node.host.local or "code" not in node.copies:
            return []
        paths = await asyncio.to_thread(self._paths_elsewhere)
        answer = paths and await try_request(node, "look", LOOK_TIMEOUT_S, paths=paths)
        entries = answer["paths"] if answer else []
        return [entry["path"] for entry in entries if entry["exists"] == exists]

    def _paths_elsewhere(self) -> list[str]:
        """Absolute paths in the script's arguments, outside the project, that are not here."""
        values = [word if word.startswith("/") else word.partition("=")[2]
                  for word in self._arguments]  # fmt: skip
        roots = [root.resolve() for root in (self._run, self._tree and self._tree.root) if root]
        paths = [value for value in values if value.startswith("/") and value.isprintable()
                 and len(value) <= MAX_PATH_LENGTH and not os.path.lexists(value)
                 and not any(Path(value).is_relative_to(root) for root in roots)]  # fmt: skip
        return paths[:MAX_OUTSIDE]

    async def _note_outside(self, node: Node) -> None:
        """Says which results of the script stay on a node, because they are outside the project."""
        first, missing = self._outside or (None, [])
        if first is not node or not missing:
            return
        if written := {*await self._existing_outside(node, exists=True)} & {*missing}:
            self._note(f"paceline: note: outside the project, so it stays on {node.name}:"
                       f" {format_paths(sorted(written))}. To get it here, let the script write"
                       " below the project")  # fmt: skip

    def _note_measured_folder(self, first: Node) -> None:
        """Says where the script of a measurement writes, if that is no copy for this run."""
        root = self._project if self._tree is None else self._tree.root
        if "code" not in first.copies and root is not None:
            self._note(
                f"paceline: note: on {first.name}, the script runs in the project itself ({root})."
                " What it writes stays there, and it may resume from its own checkpoints"
            )

    def _note_own_projects(self, fleet: Fleet) -> None:
        """Says which hosts use folders of their own, so that files of the script stay there."""
        if self._tree is None or not self._tree.manifest:
            return
        root = self._tree.root
        hosts = [
            node.name
            for node in fleet.everyone
            if not (node.host.local or node.shared_run_dir or node.copies.get("code"))
        ]
        names = ", ".join(hosts[:5]) + ", …" * (len(hosts) > 5)
        if hosts and self._workdir is not None and not self._workdir.is_relative_to(root):
            self._note(
                f"paceline: note: the script is outside the current folder. On {names}, its"
                f" relative paths lead to {self._workdir}; if that is not on a shared disk, its"
                f" files stay there. To get them here, start in {root}, with --ship always"
            )
        elif len(hosts) > 1 and self._run.resolve().is_relative_to(root):
            self._note(
                f"paceline: note: {names} have the project on disks of their own, where files of"
                " the script stay. To have its checkpoints on all hosts, add --ship always"
            )

    async def _note_unsent_checkpoint(self, fleet: Fleet) -> None:
        """Says which checkpoint of another run the hosts do not get, and how they would.

        If rank 0 sees the project itself, it may resume while the other ranks start anew.
        """
        with_copies = [node for node in fleet.everyone if "code" in node.copies]
        unsent = await asyncio.to_thread(self.store.unsent_checkpoint) if with_copies else None
        if unsent is None:
            return
        run, path = unsent
        checkpoint, option = f"{path} of {short(run)}", shell_text(["--run-dir", short(run)])
        if fleet.first in with_copies:
            text = f"note: {checkpoint} is not sent to the hosts; to resume from it, add {option}"
        else:
            text = (
                f"warning: rank 0 finds {checkpoint}, but {with_copies[0].name} does not get it; to"
                f" resume from it on all hosts, add {option}"
            )
        self._note(f"paceline: {text}")

    async def _fetch_uncollected(self, node: Node) -> None:
        """Fetches files that a node kept because an earlier launcher had not fetched them."""
        folder = OutputFolder(node.name, node.channel, f"{node.run_folder}/{UNCOLLECTED}")
        with self._reporting(node):
            fetched, is_complete = await self.store.fetch_uncollected(folder)
            if fetched:
                self._note(f"paceline: {pluralize(len(fetched), 'file')} of {node.name} had not"
                           f" arrived before: {format_paths(fetched)}")  # fmt: skip
            if not is_complete or folder.is_empty:
                return
            async with self._discarding:
                if await self._fetch_superseded(folder) and folder.seen:
                    await node.channel.request("discard_uncollected", root=node.run_folder,
                                               shards=False)  # fmt: skip

    async def _fetch_uncollected_shards(self, node: Node) -> None:
        """Fetches shards that a node kept, as ranks other than 0 had written them.

        Those whose index is not here stay on the node: rank 0's host may be back later.
        """
        folder = OutputFolder(node.name, node.channel, f"{node.run_folder}/{UNCOLLECTED_SHARDS}",
                              is_uncollected=True)  # fmt: skip
        with self._reporting(node):
            fetched = await self.store.fetch_parts(folder)
            if fetched:
                self._note(f"paceline: {pluralize(len(fetched), 'shard')} of {node.name} had not"
                           f" arrived before: {format_paths(fetched)}")  # fmt: skip
            if not folder.is_empty and await self.store.has_shards(folder):
                await node.channel.request("discard_uncollected", root=node.run_folder,
                                           shards=True)  # fmt: skip

    async def _fetch_superseded(self, folder: OutputFolder) -> bool:
        """Fetches files that stay out of the project; returns whether all have arrived."""
        paths = await self.store.list_superseded(folder)
        if not paths:
            return True
        fetcher = Fetcher(self._run, self._note)
        place = self._run / FETCHED / safe_name(folder.host) / SUPERSEDED
        fetched = await fetcher.fetch(folder.channel, folder.root, None, place,
                                      lambda path: path not in paths)  # fmt: skip
        self._note(
            f"paceline: {pluralize(len(fetched), 'file')} of {folder.host} had not arrived before,"
            f" and stayed out of the project: {short(place)}"
        )
        return not fetcher.incomplete_hosts

    async def _open_local(self, first: Node, fleet: Fleet) -> list[OutputFolder]:
        """Returns the folders of rank 0 on this machine whose files other nodes need, or will."""
        folders = []
        tree, has_copies = self._tree, any("code" in node.copies for node in fleet.everyone)
        # without code it is a program, and a list of the project's files could take long
        has_project = has_copies and not (tree is not None and tree.is_partial)
        if tree is not None and tree.manifest and tree.copy is None and has_project:
            folders.append(OutputFolder(first.name, first.channel, str(tree.root), is_local=True))
        elif self._project is not None and all(node.host.local for node in fleet.everyone):
            await asyncio.to_thread(self.store.set_code, self._project, [])
            self._local_checkpoints = OutputFolder(
                first.name, first.channel, str(self._project), is_local=True, only_checkpoints=True
            )
        if not all(node.shared_run_dir for node in fleet.everyone):
            folders.append(OutputFolder(first.name, first.channel, str(self._run),
                                        prefix=RUN_PREFIX, is_local=True))  # fmt: skip
        with self._reporting(first):
            for folder in filter(None, [self._local_checkpoints, *folders]):
                await self.store.open_folder(folder)
        return folders

    async def align(self, fleet: Fleet, num_ranks: int) -> None:
        """Gives all nodes of the next start the newest complete files of rank 0, and only those."""
        source = self._source
        self.store.unfetched = None
        if source is not None and not source.lost:
            await self._sync_final(source, has_succeeded=False)
        for node in list(self._folders):  # others may connect meanwhile
            if node is not source and not node.lost:
                with self._reporting(node):
                    await self.fetch_parts(node)
        self.store.start_attempt()
        self._source = fleet.first
        if fleet.nodes == [source]:
            # alone, it keeps all that is whole; among others, only what they get, too
            await self._send(fleet.first, is_source=True)
        else:
            await gather_all([self._send(node) for node in fleet.nodes])
        await self._note_missing_parts(num_ranks)

    async def _send(self, node: Node, *, is_source: bool = False, is_fresh: bool = False) -> None:
        """Gives a node what is here; a fresh copy of the code has nothing to be set aside."""
        for folder in self._folders.get(node, ()):
            has_work = bool(self.store.journal.outputs) or bool(folder.prefix) or not is_fresh
            if has_work and not folder.is_local:
                await self.store.send(folder, is_source=is_source)

    async def _sync(self, node: Node, folders: Iterable[OutputFolder], **options: Any) -> None:
        with self._reporting(node):
            for folder in folders:
                await self.store.sync(folder, **options)

    async def _sync_final(self, node: Node, *, has_succeeded: bool) -> None:
        """Fetches the last files of rank 0's node, and notes which do not arrive."""
        folders = self._folders.get(node, ())
        await self._sync(node, folders, has_ended=True, has_succeeded=has_succeeded)
        with self._reporting(node):
            await self.store.note_unfetched(folders, has_succeeded=has_succeeded)

    # --- while they run ----------------------------------------------------------------------

    async def watch(self, first: Callable[[], Node | None]) -> None:
        """Fetches what rank 0 writes until cancelled; ``first`` returns its node."""
        while True:
            await asyncio.sleep(POLL_S)
            self._source = first() or self._source
            node = self._source
            if node is not None and not node.lost:
                await self._sync(node, self._folders.get(node, ()), share=LINK_SHARE)

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
        await self._sync_final(node, has_succeeded=has_succeeded)
        await self._note_outside(node)
        if self._local_checkpoints is not None:
            with contextlib.suppress(PacelineError, OSError, ValueError):  # they are in place
                await self.store.sync(self._local_checkpoints, has_ended=True,
                                      has_succeeded=has_succeeded)  # fmt: skip

    async def fetch_parts(self, node: Node) -> None:
        """Fetches a node's parts of checkpoints whose files of rank 0 are here."""
        for folder in self._folders.get(node, ()):
            if not folder.is_local:
                await self.store.fetch_parts(folder)

    async def known_paths(self, node: Node, root: str) -> set[str]:
        """Paths in a node's folder whose present version it got from here, or that are here."""
        paths = set[str]()
        for folder in self._folders.get(node, ()):
            if folder.root == root and not folder.is_local:
                paths |= await self.store.known_paths(folder)
        return paths
