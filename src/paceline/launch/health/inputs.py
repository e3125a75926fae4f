"""Detects that all replicas of a script's model get the same batches. Pure."""

from __future__ import annotations

from paceline.spec.events import Event

REPORT = "replica inputs"
MAX_PENDING = 64  # models for which the reports of some ranks are missing; the oldest are dropped


class InputComparison:
    """Compares the first batches of the ranks of an attempt."""

    def __init__(self) -> None:
        self._pending: dict[tuple[int, ...], dict[int, Event]] = {}
        self._has_warned = False

    def add(self, event: Event) -> str:
        """Takes a rank's report; returns a sentence, once, if all ranks got the same batches.

        Batches that are all equal are made up, as in a test of speed: they say nothing.
        """
        key = (event["replica"], *event["members"])
        reports = self._pending.setdefault(key, {})
        reports[-1 if event.rank is None else event.rank] = event
        if len(self._pending) > MAX_PENDING:
            del self._pending[next(iter(self._pending))]
        if len(reports) < len(event["members"]) or self._has_warned:
            return ""
        del self._pending[key]
        batches = {tuple(report["batches"]) for report in reports.values()}
        if len(batches) > 1 or len(set(*batches)) < 2:
            return ""
        self._has_warned = True
        return (
            f"all {len(reports)} ranks train on the same samples, so they learn no more than one"
            " rank would alone. Give the DataLoader a DistributedSampler, and call its set_epoch"
            " in every epoch"
        )
