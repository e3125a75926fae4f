"""What a training measures and tells: records, lines for the user, progress, trackers."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.train.comms import Comms
from paceline.train.data.loader import Progress
from paceline.train.files import line
from paceline.train.metrics import Means, Meter
from paceline.train.report import Reporter, figures
from paceline.train.trackers import TRACKERS, About, Guard, Record, numbers

_RECENT = 512
"""Records that the next first rank says again: those of some seconds in which the launcher could
not hear the host of the former, while the ranks heard each other and trained on."""
_UNHEARD_S = 120.0
"""So long a checkpoint keeps them for the next start: ranks train on for a lease, and save, when
the launcher has been killed."""


class Journal:
    """One rank's; every rank has one and calls it in the same order.

    What was measured but is not recorded yet is part of a checkpoint, so that a record covers the
    same samples whether or not the run was interrupted before it.

    Args:
        reporter: Where this rank's messages go.
        meter: Collects what is measured in training.
        progress: Shared with the session.
        comms: Of all ranks.
        folder: The run directory.

    Attributes:
        loss: Mean training loss of the last record; of several models that of the first.
        epochs: Of the whole training.
    """

    def __init__(
        self, reporter: Reporter, meter: Meter, progress: Progress, comms: Comms, folder: Path
    ) -> None:
        self._reporter, self._meter, self._progress = reporter, meter, progress
        self._comms, self._folder = comms, folder
        self._tracked: tuple[Sequence[str], str, Mapping[str, Any], bool] | None = None
        self._trackers: list[Guard] = []
        self._resumed_at, self._first = -1, comms.world.rank == 0
        self._recent: deque[tuple[float, dict[str, Any]]] = deque(maxlen=_RECENT)
        self._open = Means(0, {})  # reduced over all ranks, but not recorded yet
        self._since_line, self._had_line = Means(0, {}), False
        self.loss, self.epochs = float("nan"), 0

    # -- the training --------------------------------------------------------------------

    def begin(self, resumed_at: int = -1) -> None:
        """Says whether the records of an earlier process are continued; from which step."""
        self._resumed_at = resumed_at
        self._reporter.begin(resumed=resumed_at >= 0)

    def begin_epoch(self) -> None:
        """To be called before each iteration over the training data."""
        self._since_line, self._had_line = Means(0, {}), False

    def end_epoch(self) -> None:
        """Shows the training's means where the script has logged nothing."""
        if not self._had_line:
            self._show("", {})

    def measure(self, count: int, **values: Tensor) -> None:
        """Takes what a step of the training has measured, as :meth:`Meter.add` does."""
        self._meter.add(count, **values)

    def measure_others(self, **values: Tensor) -> None:
        """Takes values of other samples of that step, as :meth:`Meter.add_others` does."""
        self._meter.add_others(**values)

    def mark(self) -> None:
        """A global batch begins, that may turn out to be void."""
        self._meter.mark()

    def take_back(self) -> None:
        """Forgets what was measured since: the batch does not count."""
        self._meter.take_back()

    def record_training(self, losses: Sequence[str], **details: float) -> dict[str, float]:
        """Records what was measured since the last record, with further values; a collective.

        Returns:
            The means of these losses, as far as there are, the same on every rank.
        """
        self._reduce()
        means, self._open = self._open, Means(0, {})
        values = means.values()
        found = {name: values[name] for name in losses if name in values}
        self.loss = next(iter(found.values()), self.loss)
        self._since_line += means
        self.record("train", {"samples": means.count, **values, **details})
        return found

    def _reduce(self) -> None:
        if not self._meter.empty:
            self._open += self._meter.result()

    def gather(self) -> None:
        """Adds up what ranks have measured, of which some may be new; a collective."""
        self._open += self._meter.result(some_absent=True)

    def state_dict(self) -> dict[str, object]:
        """What is not recorded yet, the same on every rank; a collective."""
        self._reduce()
        return self.gathered()

    def gathered(self) -> dict[str, object]:
        """The same right after :meth:`gather`, of which ranks may have had other parts to do."""
        some = {"counts": dict(self._open.counts)} if self._open.counts else {}
        since = time.time() - _UNHEARD_S
        recent = [[when, line(one).decode()] for when, one in self._recent if when >= since]
        state = {"count": self._open.count, "sums": dict(self._open.sums), **some}
        return {**state, "recent": recent}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._open = Means(state["count"], state["sums"], state.get("counts", {}))
        recent = [(when, json.loads(one)) for when, one in state.get("recent", ())]
        self._recent = deque(recent, maxlen=_RECENT)

    def say_again(self) -> None:
        """Says the last records once more: what was heard of them is known."""
        for when, record in self._recent:
            self._reporter.metrics(**{"time": when, **record})

    def stepped(self, samples_per_s: float) -> None:
        """Shows how far the training is; to be called after each global step."""
        done = self._progress
        self.heartbeat("train")
        self._reporter.progress(
            step=done.step,
            steps=done.steps,
            epoch=done.epoch,
            epochs=self.epochs,
            loss=self.loss,
            samples_per_s=samples_per_s or None,  # unknown until the first record
        )

    def pace(self, look: Callable[[], Mapping[str, Any]]) -> None:
        """Tells the launcher where the time of the ranks' steps goes, now and then."""
        self._reporter.pace(self._progress.step, look)

    # -- what the script and the session have to say ---------------------------------------

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
            guard.put(Record(split, step, numbers(values)))

    def _show(self, split: str, values: Mapping[str, Any]) -> None:
        done, trained = self._progress, self._since_line.values()
        parts = [(name, some) for name, some in (("train", trained), (split, values)) if some]
        if parts:
            self.say(figures(self._epoch, done.step, done.steps, parts))
        self._since_line, self._had_line = Means(0, {}), True

    @property
    def _epoch(self) -> int:
        """The number that the loop over epochs has, also right after its end."""
        done = self._progress
        return done.epoch - 1 if done.finished and done.epoch and not done.offset else done.epoch

    def say(self, text: str) -> None:
        """One line for the user, once."""
        self._reporter.say(text)

    def event(self, name: str, **details: Any) -> None:
        """Records that something happened on this rank."""
        self._reporter.event(name, **details)

    def tell(self, name: str, **details: Any) -> None:
        """Records that something happened, and shows it where it is a warning."""
        self.event(name, **details)
        if "warning" in details:
            what = "" if name == "warning" else f"{name}: "
            self.say(f"warning: {what}{details['warning']}")

    def heartbeat(self, phase: str) -> None:
        """Tells the launcher that this rank lives, and what it is doing."""
        self._reporter.heartbeat(self._progress.step, phase)

    # -- trackers and the end ------------------------------------------------------------

    def track(
        self, names: Sequence[str], project: str, config: Mapping[str, Any], each_node: bool
    ) -> None:
        """See :meth:`Session.track`."""
        world, self._tracked = self._comms.world, (names, project, config, each_node)
        if world.local_rank if each_node else world.rank:
            return
        run, suffix = self._folder.name, f"-{world.host}" if each_node else ""
        group = run if each_node else ""
        about = About(self._folder, project, run + suffix, "", group, config, self._resumed_at)
        for name in names:
            notes = self._folder / "trackers" / f"{name}{suffix}.json"
            self._trackers.append(self._guard(name, about, notes))

    def _guard(self, name: str, about: About, notes: Path) -> Guard:
        if notes.exists():  # then nothing is sent twice
            about = replace(about, resumed_at=-1)
        return Guard(
            name,
            lambda run_id: TRACKERS[name](replace(about, run_id=run_id)),
            notes,
            lambda text: self.tell("warning", warning=text),
            resumed=self._resumed_at >= 0,
        )

    def follow(self) -> None:
        """Has the rank that is first now speak for the job, and send records to trackers.

        What the former one may have taken with it is said again, and known where it was heard.
        """
        first, before = self._comms.world.rank == 0, self._first
        self._first = first
        self._reporter.speak(first)
        if first and not before:
            self._reporter.begin(resumed=True)
            self.say_again()
        if self._tracked is not None and not self._trackers:
            self._resumed_at = max(self._resumed_at, self._progress.step)
            self.track(*self._tracked)

    def close(self, error: BaseException | None) -> None:
        """Gives trackers time for what is queued; an error of this rank is recorded first."""
        if error is not None:
            self.event("failed", error=f"{type(error).__name__}: {error}")
        for guard in self._trackers:
            guard.close()
        self._reporter.close()
