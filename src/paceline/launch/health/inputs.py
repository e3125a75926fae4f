"""Detects that all replicas of a script's model, or all epochs, get the same batches. Pure."""

from __future__ import annotations

from paceline.spec.events import Event

SAME_ORDER = "same order"
REPORTS = ("replica inputs", SAME_ORDER)
MAX_PENDING = 64  # models for which the reports of some ranks are missing; the oldest are dropped


class InputComparison:
    """Compares the first batches of the ranks of an attempt."""

    def __init__(self) -> None:
        # by model and members: the batches of each rank
        self._pending: dict[tuple[int, ...], dict[int, tuple[str, ...]]] = {}
        self._is_settled = False
        self._same_order = (
            "three epochs had the same order of samples. To shuffle in every epoch, call the"
            " DistributedSampler's set_epoch(epoch) before each"
        )

    def add(self, event: Event) -> str:
        """Takes a rank's report; returns a sentence, once, about ranks or epochs that are alike.

        Ranks that share the data of one model may all give the same noise to another. Batches that
        are all equal are made up, as in a test of speed: they say nothing.
        """
        if event.kind == SAME_ORDER:
            text, self._same_order = self._same_order, ""
            return text
        key = (event["replica"], *event["members"])
        ranks = self._pending.setdefault(key, {})
        ranks[-1 if event.rank is None else event.rank] = tuple(event["batches"])
        if len(self._pending) > MAX_PENDING:
            del self._pending[next(iter(self._pending))]
        if len(ranks) < len(event["members"]) or self._is_settled:
            return ""
        del self._pending[key]
        first, *differing = set(ranks.values())
        if len(set(first)) < 2 and not differing:
            return ""
        self._is_settled = True
        if differing:
            return ""
        return (
            f"all {len(ranks)} ranks got the same batches in their first steps. If they are meant"
            " to share the data, give the DataLoader a DistributedSampler, and call its set_epoch"
            " in every epoch"
        )
