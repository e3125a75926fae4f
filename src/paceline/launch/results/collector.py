"""What nodes have for us: checkpoints as they are made, rank 0's files and new files at the end."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

from paceline.launch.interrupts import Interrupts
from paceline.launch.nodes.fleet import HURRY_S, Fleet, Node, finishes_in
from paceline.rundir.directory import RunDirectory, short
from paceline.spec import rundir as names
from paceline.spec.errors import PacelineError
from paceline.spec.events import Event
from paceline.spec.failure import LAUNCHER_HOST, Failure
from paceline.transfer.checkpoints import CheckpointFetcher
from paceline.transfer.results import Fetcher


@dataclass(frozen=True, slots=True)
class _Model:
    """A trained model that ranks have written: on which node, where, the hash of its weights."""

    node: Node
    folder: str
    digest: str


class Results:
    """Brings the results of a run into its run directory.

    Args:
        directory: The run directory.
        note: Tells the user.
    """

    def __init__(self, directory: RunDirectory, note: Callable[[str], None]) -> None:
        self.first: Node | None = None  # where checkpoints are made
        self._directory = directory
        self._note = note
        self._fetcher = Fetcher(directory.path, note)
        self._checkpoints: CheckpointFetcher | None = None  # of rank 0, where they have to come
        self._keep = 0  # checkpoints, as the script has it
        self._all_home = False
        self._elsewhere: list[tuple[Node, str]] = []  # what found no room in its place
        self._model: _Model | None = None  # the newest that was written where we do not see it
        self._returned: dict[int, tuple[Node, int]] = {}  # by rank, where it lies; bytes

    def expect_from(self, first: Node) -> None:
        """Checkpoints are made on this node, which may write them into the run directory itself."""
        if first is self.first:
            return
        followed, self.first = self.first is not None, first
        self._checkpoints = None if first.shared_run_dir else CheckpointFetcher(
            first.channel, first.run_folder, self._directory.path, self._fetcher,
            followed=followed, keep=self._keep, note=self._note,
        )  # fmt: skip

    def heard(self, node: Node, event: Event) -> None:
        """Follows what ranks say of what they saved, and of what their function returned."""
        if event.kind == "model kept elsewhere" and event["folder"]:
            self._elsewhere.append((node, event["folder"]))
        if event.kind == "model saved" and event["sha256"]:
            kept = event["folder"] or ""  # on a disk of the node's own
            folder = f"{kept or node.run_folder}/{names.MODEL}"
            seen = node.shared_run_dir and not kept
            self._model = None if seen else _Model(node, folder, event["sha256"])
        if event.kind in ("returned", "raised") and event.rank is not None:
            self._returned[event.rank] = node, event["bytes"]
        if event.kind == "keeps checkpoints":
            self._keep = event["keep"] or 0
            if self._checkpoints is not None:
                self._checkpoints.keep = self._keep
        if event.kind == "checkpoint" and self._checkpoints is not None:
            self._checkpoints.schedule()

    async def bring_home_unless_hurried(self, fleet: Fleet, interrupts: Interrupts) -> None:
        """Brings the results home; a user who has asked twice for the end waits for none."""
        bringing = self.bring_home(fleet)
        if len(interrupts.received) < 2:  # one that comes from now on ends this, too
            await bringing
        elif not await finishes_in(bringing, HURRY_S):
            self._note("paceline: not all results came: the next start in this run directory"
                       " finds what lies on the hosts")  # fmt: skip

    async def bring_home(self, fleet: Fleet) -> None:
        """Fetches rank 0's run files, and what ranks wrote into copies of the code."""
        for node in fleet.nodes:
            if node.lost or node.running:  # one whose ranks could not be ended answers nothing
                continue
            try:
                await self._bring_from(node, rank_zero=node is self.first)
            except (PacelineError, ConnectionError, OSError) as error:
                self._note(f"paceline: the results of {node.name} did not come: {error}")
        await self._bring_model(fleet)

    async def _bring_model(self, fleet: Fleet) -> None:
        """Fetches the model from the host that wrote it, where rank 0 is on another one by now."""
        saved = self._model
        if saved is None or self._model_is_home:
            return
        for node in fleet.nodes:  # it may have been away, and be back
            if node.name != saved.node.name or node.lost or node.running:
                continue
            target = self._directory.path / names.MODEL
            try:
                await self._fetcher.fetch(node.channel, saved.folder, None, target)
            except (PacelineError, ConnectionError, OSError) as error:
                self._note(f"paceline: the model did not come from {node.name}: {error}")

    @property
    def _model_is_home(self) -> bool:
        """The newest model is in the run directory, from whichever disk it came."""
        if self._model is None:
            return True
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            described = (self._directory.path / names.MODEL_CONFIG).read_text(encoding="utf-8")
            return bool(json.loads(described)["sha256"] == self._model.digest)
        return False

    def lacking(self, fleet: Fleet) -> Failure | None:
        """Tells whose results stayed on hosts that went away, at the end of what went well.

        Returns:
            What that makes of the run where rank 0's are among them, or the model.
        """
        away = [node for node in fleet.nodes if node.lost and not node.shared_run_dir]
        for node in away:
            self._note(f"paceline: the results of {node.name} did not come: {node.loss_reason}")
        first = self.first
        if self._model is not None and not self._model_is_home:
            return self._without(self._model)
        if first is None or first not in away or self._all_home:
            return None
        return Failure("lost", first.name, None, first.lost_at, headline=first.loss_reason)

    def _without(self, saved: _Model) -> Failure:
        """What it makes of the run that this model is not at home."""
        node, where = saved.node, f"the trained model did not come: it lies in {saved.folder}"
        self._note(f"paceline: {where} on {node.name}")
        if node.lost:
            headline = f"{node.loss_reason}; {where} there"
            return Failure("lost", node.name, None, node.lost_at, headline=headline)
        return Failure(
            "record", LAUNCHER_HOST, None, time.monotonic(), headline=f"{where} on {node.name}"
        )

    async def clear(self, fleet: Fleet) -> None:
        """The nodes' own run folders have served; they stay unless all of rank 0's is at home.

        The others' stay, too, where there is more in them than copies of checkpoints, and so does
        rank 0's where something was refused.
        """
        first = self.first
        if first is None or first.lost or not (self._all_home or first.shared_run_dir):
            return
        if not self._model_is_home:
            return
        for node in fleet.nodes:
            if node.lost or node.running or node.shared_run_dir:
                continue
            whole = node is first and node.name not in self._fetcher.incomplete_hosts
            only = None if whole else [names.CHECKPOINTS, names.CALL, names.RETURN_VALUES]
            with contextlib.suppress(PacelineError, ConnectionError):
                await node.channel.request("discard_run_folder", key=self._directory.key, only=only)

    async def _bring_from(self, node: Node, rank_zero: bool) -> None:
        target = self._directory.path
        if not node.shared_run_dir:
            files = {str(rank): size for rank, (who, size) in self._returned.items() if who is node}
            await self._fetcher.fetch_files(
                node.channel,
                f"{node.run_folder}/{names.RETURN_VALUES}",
                files,
                target / names.RETURN_VALUES,
            )
        if rank_zero and self._checkpoints is not None:
            await self._checkpoints.finish()
            await self._checkpoints.sync()
            await self._fetcher.fetch(
                node.channel, node.run_folder, None, target,
                skip=names.is_fetched_separately, rejection_reason=names.reserved_reason,
            )  # fmt: skip
            self._all_home = True
        for there in [where for who, where in self._elsewhere if who is node]:
            await self._fetcher.fetch(
                node.channel, there, None, target,
                skip=names.is_fetched_separately, rejection_reason=names.reserved_reason,
            )  # fmt: skip
            self._note(
                f"paceline: the model came home from {there} on {node.name}; remove it there"
            )
        if rank_zero and self._model is not None and self._model.node is node:
            self._model = None  # all of it has come: what its script has removed is not lacking
        if "code" in node.copies:
            root, manifest = node.copies["code"]
            folder = target / names.FETCHED / names.safe_name(node.name)
            came = await self._fetcher.fetch(node.channel, root, manifest, folder)
            if came:
                count = f"{len(came)} new file{'s' * (len(came) > 1)}"
                self._note(f"paceline: {count} of {node.name}: {short(folder)}")
