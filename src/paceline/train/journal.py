"""What a training measures and tells: records, lines for the user, progress, trackers."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.train.comms import Comms
from paceline.train.data.loader import Progress
from paceline.train.files import json_line
from paceline.train.metrics import Means, Meter
from paceline.train.report import Reporter, format_values
from paceline.train.trackers import TRACKERS, Record, RunInfo, TrackerThread, numbers

_MAX_RESENT = 512
"""Records that the next first rank says again: those of some seconds in which the launcher could
not hear the host of the former, while the ranks heard each other and trained on."""
_RESEND_WINDOW_S = 120.0
"""So long a checkpoint keeps them for the next start: ranks train on for a lease, and save, when
the launcher has been killed."""


class Journal:
    """One rank's; every rank has one and calls it in the same order.

    What was measured but is not recorded yet is part of a checkpoint, so that a record covers the
    same samples whether or not the run was interrupted before it.

    Attributes:
        meter: Collects what is measured in training.
        loss: Mean training loss of the last record; of several models that of the first.
    """

    def __init__(
        self, reporter: Reporter, meter: Meter, progress: Progress, comms: Comms, folder: Path
    ) -> None:
        self._reporter, self.meter, self._progress = reporter, meter, progress
        self._comms, self._folder = comms, folder
        self._tracker_options: tuple[Sequence[str], str, Mapping[str, Any], bool] | None = None
        self._trackers: list[TrackerThread] = []
        self._resumed_at, self._is_first = -1, comms.world.rank == 0
        self._recent: deque[tuple[float, dict[str, Any]]] = deque(maxlen=_MAX_RESENT)
        self._unrecorded = Means(0, {})  # reduced over all ranks, but not recorded yet
        self._unshown_means, self._has_shown = Means(0, {}), False
        self.loss, self.epochs = float("nan"), 0

    def start(self, resumed_at: int = -1) -> None:
        """Starts the records, continued from a step of an earlier process if there is one."""
        self._resumed_at = resumed_at
        self._reporter.start(resumed=resumed_at >= 0)

    def start_epoch(self) -> None:
        self._unshown_means, self._has_shown = Means(0, {}), False

    def end_epoch(self) -> None:
        """Prints the training's means if the script has logged nothing."""
        if not self._has_shown:
            self._show("", {})

    def record_training(self, losses: Sequence[str], **details: float) -> dict[str, float]:
        """Records what was measured since the last record, with further values; a collective.

        Returns:
            The means of these losses, as far as there are, the same on every rank.
        """
        self._reduce()
        means, self._unrecorded = self._unrecorded, Means(0, {})
        values = means.values()
        means_of_losses = {name: values[name] for name in losses if name in values}
        self.loss = next(iter(means_of_losses.values()), self.loss)
        self._unshown_means += means
        self.record("train", {"samples": means.count, **values, **details})
        return means_of_losses

    def _reduce(self) -> None:
        if not self.meter.empty:
            self._unrecorded += self.meter.result()

    def gather(self) -> None:
        """Adds up what ranks have measured, of which some may be new; a collective."""
        self._unrecorded += self.meter.result(some_absent=True)

    def state_dict(self) -> dict[str, object]:
        """Returns what is not recorded yet, the same on every rank; a collective."""
        self._reduce()
        return self.state_of_gathered()

    def state_of_gathered(self) -> dict[str, object]:
        """Returns :meth:`state_dict` right after :meth:`gather`; no collective."""
        counts = {"counts": dict(self._unrecorded.counts)} if self._unrecorded.counts else {}
        cutoff = time.time() - _RESEND_WINDOW_S
        recent = [
            [when, json_line(record).decode()] for when, record in self._recent if when >= cutoff
        ]
        state = {"count": self._unrecorded.count, "sums": dict(self._unrecorded.sums), **counts}
        return {**state, "recent": recent}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._unrecorded = Means(state["count"], state["sums"], state.get("counts", {}))
        recent = [(when, json.loads(text)) for when, text in state.get("recent", ())]
        self._recent = deque(recent, maxlen=_MAX_RESENT)

    def resend_records(self) -> None:
        """Sends the last records again; the launcher skips known ones."""
        for when, record in self._recent:
            self._reporter.metrics(**{"time": when, **record})

    def stepped(self, samples_per_s: float) -> None:
        progress = self._progress
        self.heartbeat("train")
        self._reporter.progress(
            step=progress.step,
            steps=progress.steps,
            epoch=progress.epoch,
            epochs=self.epochs,
            loss=self.loss,
            samples_per_s=samples_per_s or None,  # unknown until the first record
        )

    def report_timings(self, timings: Callable[[], Mapping[str, Any]]) -> None:
        self._reporter.timings(self._progress.step, timings)

    def log(self, split: str, values: Mapping[str, Any]) -> None:
        """Records values and shows them, with the means of the training since the last line."""
        self.record(split, values)
        self._show(split, values)

    def record(self, split: str, values: Mapping[str, Any]) -> None:
        """Records values under the present step, without showing them."""
        step = self._progress.step
        record = {"step": step, "epoch": self._epoch, "split": split, **values}
        self._recent.append((round(time.time(), 3), record))
        self._reporter.metrics(**record)
        for guard in self._trackers:
            guard.submit(Record(split, step, numbers(values)))

    def _show(self, split: str, values: Mapping[str, Any]) -> None:
        progress, trained = self._progress, self._unshown_means.values()
        parts = [(name, part) for name, part in (("train", trained), (split, values)) if part]
        if parts:
            self.print(format_values(self._epoch, progress.step, progress.steps, parts))
        self._unshown_means, self._has_shown = Means(0, {}), True

    @property
    def _epoch(self) -> int:
        """The number that the loop over epochs has, also right after its end."""
        progress = self._progress
        is_after_end = progress.finished and progress.epoch > 0 and not progress.offset
        return progress.epoch - is_after_end

    def print(self, text: str) -> None:
        self._reporter.message(text)

    def event(self, name: str, **details: Any) -> None:
        self._reporter.event(name, **details)

    def report(self, name: str, **details: Any) -> None:
        """Records an event, and prints it if it has a warning."""
        self.event(name, **details)
        if "warning" in details:
            prefix = "" if name == "warning" else f"{name}: "
            self.print(f"warning: {prefix}{details['warning']}")

    def heartbeat(self, phase: str) -> None:
        self._reporter.heartbeat(self._progress.step, phase)

    def track(
        self, names: Sequence[str], project: str, config: Mapping[str, Any], each_node: bool
    ) -> None:
        """See :meth:`Session.track`."""
        world, self._tracker_options = self._comms.world, (names, project, config, each_node)
        if world.local_rank if each_node else world.rank:
            return
        run, suffix = self._folder.name, f"-{world.host}" if each_node else ""
        group = run if each_node else ""
        info = RunInfo(self._folder, project, run + suffix, "", group, config, self._resumed_at)
        for name in names:
            notes = self._folder / "trackers" / f"{name}{suffix}.json"
            self._trackers.append(self._guard(name, info, notes))

    def _guard(self, name: str, info: RunInfo, notes: Path) -> TrackerThread:
        if notes.exists():  # then nothing is sent twice
            info = replace(info, resumed_at=-1)
        return TrackerThread(
            name,
            lambda run_id: TRACKERS[name](replace(info, run_id=run_id)),
            notes,
            lambda text: self.report("warning", warning=text),
            resumed=self._resumed_at >= 0,
        )

    def update_roles(self) -> None:
        """Makes the present rank 0 report for the job and feed trackers.

        What the former one may have taken with it is said again, and known where it was heard.
        """
        first, was_first = self._comms.world.rank == 0, self._is_first
        self._is_first = first
        self._reporter.set_speaker(first)
        if first and not was_first:
            self._reporter.start(resumed=True)
            self.resend_records()
        if self._tracker_options is not None and not self._trackers:
            self._resumed_at = max(self._resumed_at, self._progress.step)
            self.track(*self._tracker_options)

    def close(self, error: BaseException | None) -> None:
        """Gives trackers time for what is queued; an error of this rank is recorded first."""
        if error is not None:
            self.event("failed", error=f"{type(error).__name__}: {error}")
        for guard in self._trackers:
            guard.close()
        self._reporter.close()
