"""Collects the results of a run from the nodes: checkpoints, models, rank 0's and new files."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.agent.files.outputs import is_superseded
from paceline.launch.interrupts import Interrupts
from paceline.launch.nodes.fleet import HURRY_S, Fleet, Node, finishes_in, try_request
from paceline.launch.results.outputs import OutputSync
from paceline.remote.channel import HostSilent
from paceline.rundir import signed_model
from paceline.rundir.directory import RunDirectory, short
from paceline.rundir.signatures import Signer
from paceline.spec import rundir as names
from paceline.spec.errors import PacelineError
from paceline.spec.events import Event
from paceline.spec.failure import LAUNCHER_HOST, Failure
from paceline.spec.formatting import pluralize
from paceline.transfer.checkpoints import CheckpointFetcher
from paceline.transfer.results import Fetcher

_PACKAGE = "paceline"  # in a job's folder: the parts of Paceline that hosts need
MAX_OVERFLOWS = 100  # folders in which models were saved for lack of room


@dataclass(frozen=True, slots=True)
class _Model:
    """A trained model on a node: its folder there and the hash of its weights."""

    node: Node
    folder: str
    digest: str


class ResultCollector:
    """Fetches the results of a run into its run directory.

    Args:
        is_call: Whether ranks call a function, and their return values are fetched.
        is_measured: Whether files that ranks wrote into copies of the code stay there.
    """

    def __init__(self, directory: RunDirectory, note: Callable[[str], None],
                 outputs: OutputSync, *, is_call: bool = False,
                 is_measured: bool = False) -> None:  # fmt: skip
        self.first: Node | None = None  # saves the checkpoints
        self.has_succeeded = False  # whether the ranks have ended well
        self._directory, self._outputs = directory, outputs
        self._note, self._is_call, self._is_measured = note, is_call, is_measured
        self._fetcher = Fetcher(directory.path, note)
        self._checkpoints: CheckpointFetcher | None = None
        self._signer, self._signing_order = Signer(directory.path), asyncio.Lock()
        self._signing: set[asyncio.Future[None]] = set()  # of checkpoints in a shared folder
        self._max_checkpoints = 0  # that the script keeps
        self._is_complete = self._has_begun = False
        self._overflow_models: list[tuple[Node, str]] = []  # saved where there was room
        self._unfetched_model: _Model | None = None  # the newest, if not in a shared folder
        self._saved_weights = ""  # SHA-256 of the newest model's
        self._return_files: dict[int, tuple[Node, int]] = {}  # by rank: node and size in bytes
        self._unfetched: dict[str, str] = {}  # why a host's results are missing, by its name

    def set_first_node(self, first: Node) -> None:
        """Sets the node that saves checkpoints; it may share the run directory."""
        if first is self.first:
            return
        self.first = first
        self._checkpoints = None if first.shared_run_dir else CheckpointFetcher(
            first.channel, first.run_folder, self._directory.path, self._fetcher,
            keep=self._max_checkpoints, note=self._note,
        )  # fmt: skip

    def on_event(self, node: Node, event: Event) -> None:
        """Follows the ranks' events about checkpoints, models and return values.

        What concerns the whole job comes from the rank that saves, not from any other node.
        """
        is_return = self._is_call and event.kind in ("returned", "raised")
        if is_return and event.rank is not None:
            self._return_files[event.rank] = node, event["bytes"]
        if node is not self.first:
            return
        if event.kind == "begin" and not self._has_begun:
            self._has_begun, self._fetcher.keeps_earlier = True, not event["resumed"]
            if self._checkpoints is not None:
                self._checkpoints.resumes = event["resumed"]
        if event.kind == "model kept elsewhere" and event["folder"]:
            overflow = (node, event["folder"])
            if overflow not in self._overflow_models and len(self._overflow_models) < MAX_OVERFLOWS:
                self._overflow_models.append(overflow)
        if event.kind == "model saved" and event["sha256"]:
            self._saved_weights = event["sha256"]
            model_folder = event["folder"] or ""  # on a disk of the node's own
            folder = f"{model_folder or node.run_folder}/{names.MODEL}"
            is_shared = node.shared_run_dir and not model_folder
            self._unfetched_model = None if is_shared else _Model(node, folder, event["sha256"])
        if event.kind == "keeps checkpoints":
            self._max_checkpoints = event["keep"] or 0
            if self._checkpoints is not None:
                self._checkpoints.keep = self._max_checkpoints
        if event.kind == "checkpoint" and self._checkpoints is not None:
            self._checkpoints.schedule()
        elif event.kind == "checkpoint":
            task = asyncio.ensure_future(self._sign(event["step"]))
            self._signing.add(task)
            task.add_done_callback(self._signing.discard)

    async def _sign(self, step: int | None) -> None:
        """Signs a checkpoint in a shared run directory, one after the other as they were made."""
        async with self._signing_order:
            await asyncio.to_thread(self._signer.sign_step, step)

    async def fetch_unless_hurried(self, fleet: Fleet, interrupts: Interrupts) -> None:
        """Fetches the results, but only briefly once the user has asked twice to stop."""
        bringing = self.fetch(fleet)
        if len(interrupts.received) < 2:  # a later signal cancels this as well
            await bringing
        elif not await finishes_in(bringing, HURRY_S):
            self._note("paceline: not all results were fetched: the next start in this run"
                       " directory finds the others on the hosts")  # fmt: skip

    async def fetch(self, fleet: Fleet) -> None:
        """Fetches rank 0's run files, and new files in the nodes' copies of the code."""
        await asyncio.gather(*self._signing, return_exceptions=True)
        if newest := self._signer.newest:  # written again, and its rank ended before it said so
            await asyncio.to_thread(self._signer.sign, newest)
        silent: list[Node] = []
        self._outputs.store.unfetched = None  # until rank 0's files are here
        self._unfetched.clear()
        for node in sorted(fleet.nodes, key=lambda node: node is not self.first):
            if node.lost or node.running:  # a node whose ranks could not be ended does not answer
                continue
            try:
                await self._fetch_from(node, rank_zero=node is self.first)
            except HostSilent as error:
                silent.append(node)
                self._note(f"paceline: could not fetch the results of {node.name}: {error}")
            except (PacelineError, ConnectionError, OSError) as error:
                problem = f"could not fetch the results of {node.name}: {error}"
                self._unfetched[node.name] = problem.partition("\n")[0]
                self._note(f"paceline: {problem}")
                await self._keep_on_node(node)
        self._outputs.store.note_kept_out()
        await self._fetch_model([node for node in fleet.nodes if node not in silent])
        if self.first is not None and (self.first.shared_run_dir or self._is_complete):
            await asyncio.to_thread(signed_model.sign, self._directory.path, self._saved_weights)

    async def _keep_on_node(self, node: Node) -> None:
        """Has a node keep the files that were not fetched, for example because the disk is full."""
        self._fetcher.incomplete_hosts.add(node.name)
        if "code" not in node.copies:
            return
        root, _ = node.copies["code"]
        if await try_request(node, "keep_folder", root=root) is not None:
            then = ""
            if not self._directory.path.is_dir():  # a new one would not know this run's files
                then = "; the run directory was removed, so copy from there what you need"
            elif node is self.first:
                then = ", and the next start in this run directory fetches those that rank 0 wrote"
            self._note(f"paceline: {node.name} keeps its files for a month in {root}{then}")

    async def _fetch_model(self, nodes: Sequence[Node]) -> None:
        """Fetches the model from the host that wrote it if rank 0 has moved to another."""
        saved = self._unfetched_model
        if saved is None or self._has_model:
            return
        for node in nodes:  # the host may have reconnected
            if node.name != saved.node.name or node.lost or node.running:
                continue
            target = self._directory.path / names.MODEL
            try:
                await self._fetcher.fetch(node.channel, saved.folder, None, target)
            except (PacelineError, ConnectionError, OSError) as error:
                self._note(f"paceline: could not fetch the model from {node.name}: {error}")

    @property
    def _has_model(self) -> bool:
        """Whether the newest model is in the run directory."""
        if self._unfetched_model is None:
            return True
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            described = (self._directory.path / names.MODEL_CONFIG).read_text(encoding="utf-8")
            return bool(json.loads(described)["sha256"] == self._unfetched_model.digest)
        return False

    def missing_results(self, fleet: Fleet) -> Failure | None:
        """Notes which lost hosts still hold results of a run that otherwise went well.

        Returns a failure if rank 0's results, the model or those of a host that is not lost are
        missing, else ``None``.
        """
        lost_nodes = [node for node in fleet.nodes if node.lost and not node.shared_run_dir]
        again = "; when it is back, the next start in this run directory fetches rank 0's files"
        for node in lost_nodes:
            self._note(f"paceline: could not fetch the results of {node.name}: {node.loss_reason}"
                       f"{again if node is self.first else ''}")  # fmt: skip
        first = self.first
        if self._unfetched_model is not None and not self._has_model:
            return self._missing_model(self._unfetched_model)
        lost_names = {node.name for node in fleet.nodes if node.lost}  # perhaps while they sent
        for name, problem in self._unfetched.items():
            if name not in lost_names:
                return Failure("record", LAUNCHER_HOST, None, time.monotonic(), headline=problem)
        if first is None or first not in lost_nodes or self._is_complete:
            return None
        return Failure("lost", first.name, None, first.lost_at, headline=first.loss_reason)

    def _missing_model(self, saved: _Model) -> Failure:
        """Returns the failure of a run whose model could not be fetched."""
        node, problem = saved.node, f"the trained model was not fetched: it is in {saved.folder}"
        self._note(f"paceline: {problem} on {node.name}")
        if node.lost:
            headline = f"{node.loss_reason}; {problem} there"
            return Failure("lost", node.name, None, node.lost_at, headline=headline)
        return Failure(
            "record", LAUNCHER_HOST, None, time.monotonic(), headline=f"{problem} on {node.name}"
        )

    async def discard_run_folders(self, fleet: Fleet) -> None:
        """Removes the nodes' own run folders once all of rank 0's results were fetched.

        On other nodes, and if rank 0's node had refused files, only copies are removed.
        """
        first = self.first
        if first is None or first.lost or not (self._is_complete or first.shared_run_dir):
            return
        if not self._has_model:
            return
        if self._checkpoints is not None and self._checkpoints.has_refused:
            return  # what the nodes have may be the only copies
        for node in fleet.nodes:
            if node.lost or node.running or node.shared_run_dir:
                continue
            is_complete = node is first and node.name not in self._fetcher.incomplete_hosts
            only = None if is_complete else [names.CHECKPOINTS, names.CALL, names.RETURN_VALUES]
            await try_request(node, "discard_run_folder", key=self._directory.key, only=only)

    async def _fetch_from(self, node: Node, rank_zero: bool) -> None:
        target = self._directory.path
        if not node.shared_run_dir:
            sizes = {str(rank): size for rank, (owner, size) in self._return_files.items()
                     if owner is node}  # fmt: skip
            folder = f"{node.run_folder}/{names.RETURN_VALUES}"
            await self._fetcher.fetch_files(
                node.channel, folder, sizes, target / names.RETURN_VALUES
            )
        if rank_zero:
            await self._outputs.finish(node, has_succeeded=self.has_succeeded)
        if rank_zero and self._checkpoints is not None:
            await self._checkpoints.finish()
            await self._checkpoints.sync()
            await self._fetch_run_files(node, node.run_folder)
            self._is_complete = True
        for source in [path for owner, path in self._overflow_models if owner is node]:
            await self._fetch_run_files(node, source)
            self._note(
                f"paceline: the model was fetched from {source} on {node.name}; remove it there"
            )
        if rank_zero and self._unfetched_model is not None and self._unfetched_model.node is node:
            self._unfetched_model = None  # a file that the script removed is not missing
        if "code" in node.copies and not self._is_measured:
            root, manifest = node.copies["code"]
            await self._outputs.fetch_parts(node)
            known = await self._outputs.known_paths(node, root)
            place = target / names.FETCHED / names.safe_name(node.name)
            fetched = await self._fetcher.fetch(node.channel, root, manifest, place,
                                                known.__contains__)  # fmt: skip
            superseded = [path for path in fetched if is_superseded(path)]
            others = {*fetched} - {*superseded}
            if rank_zero:  # lines at the end name them
                others -= await asyncio.to_thread(
                    self._outputs.store.add_refused, node.name, others
                )
            if others:
                count = pluralize(len(others), "new file")
                self._note(f"paceline: {count} of {node.name}: {short(place)}")
            if superseded:
                files = pluralize(len(superseded), "file")
                self._note(f"paceline: {files} of {node.name} gave way to rank 0's: see the"
                           f" hidden names in {short(place)}")  # fmt: skip

            await self._fetch_beside(node, root)
            await node.channel.request("forget_outputs")

    async def _fetch_beside(self, node: Node, root: str) -> None:
        """Fetches what a script wrote to ``../``, in the job's folder, which the agent removes."""
        folder = root.rpartition("/")[0]
        copies = {copy.rpartition("/")[2] for copy, _ in node.copies.values()} | {_PACKAGE}
        place = self._directory.path / names.FETCHED / names.safe_name(node.name) / names.OUTSIDE

        def is_of_job(path: str) -> bool:
            return path.startswith(".") or path.split("/")[0] in copies

        fetched = await self._fetcher.fetch(node.channel, folder, None, place, is_of_job)
        if fetched:
            self._note(f"paceline: {pluralize(len(fetched), 'file')} that the script wrote outside"
                       f" the project on {node.name}: {short(place)}. Hosts do not get such files"
                       " at the next start")  # fmt: skip

    async def _fetch_run_files(self, node: Node, folder: str) -> None:
        known = await self._outputs.known_paths(node, folder)
        await self._fetcher.fetch(
            node.channel, folder, None, self._directory.path,
            skip=lambda path: path in known or names.is_fetched_separately(path),
            rejection_reason=names.reserved_reason,
        )  # fmt: skip
