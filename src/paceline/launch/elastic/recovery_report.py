"""Messages to the user about recoveries in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.launch.elastic.rank_states import Joined, LeftOut, NotAgain, Recovered, SendAway
from paceline.launch.nodes.fleet import Fleet
from paceline.launch.recorder import Recorder
from paceline.launch.terminal.screen import Screen
from paceline.spec.failure import Failure, Recovery, format_location


class RecoveryReport:
    """Reports losses and new ranks to the user and counts the recoveries of one attempt.

    Args:
        hosts_of: By slot, its host at present.
        fleet: The nodes.
        screen, recorder: Where things are shown and written down.

    Attributes:
        completed: The recoveries so far.
        fresh: Further ranks that did not train yet.
    """

    def __init__(self, hosts_of: Mapping[int, str], fleet: Fleet, screen: Screen,
                 recorder: Recorder) -> None:  # fmt: skip
        self.completed: list[Recovery] = []
        self.fresh: set[int] = set()
        self._hosts_of, self._fleet = hosts_of, fleet
        self._screen, self._recorder = screen, recorder

    def note_late_newcomer(self, slot: int, host: str, seconds: float, where: str) -> None:
        """Reports a new rank that has stalled and should have joined by now."""
        location = format_location(host, slot)
        text = f"{location}, started {seconds:.0f} s ago, has not come to the training: it {where}"
        self._screen.note(f"paceline: {text}")
        self._recorder.event("newcomer late", host, slot, text=text, why=where)

    def tell(self, news: Recovered | Joined | LeftOut | NotAgain) -> None:
        """Reports that ranks were lost, have joined, or do not come back."""
        if isinstance(news, Recovered):
            self._tell_recovered(news)
        elif isinstance(news, Joined):
            names = [self._name(slot) for slot in news.slots]
            where = "here" if self.fresh.issuperset(news.slots) else "back"
            self.fresh.difference_update(news.slots)
            text = f"{listed(names)} {'is' if len(names) == 1 else 'are'} {where}"
            self.announce(f"{text} after {news.seconds:.1f} s", news.seconds)
        elif isinstance(news, NotAgain):
            text = listed([self._name(slot) for slot in news.slots])
            verb = "is" if len(news.slots) == 1 else "are"
            self.announce(f"{text} {verb} not started again: {news.why}")
        else:
            last = f" ({news.why.headline})" if news.why and news.why.headline else ""
            self.announce(f"{self._name(news.slot)} could not join again{last}: left out")

    def _tell_recovered(self, news: Recovered) -> None:
        why = "; ".join(describe_loss(failure) for failure in news.losses) or "was lost"
        others = "the other rank" if news.others == 1 else f"the other {news.others} ranks"
        if not news.others:  # each was lost once, and given the state of one that was not
            others = "those that came for them"
        if news.last:
            verb = "saves and stops" if news.others == 1 else "save and stop"
            self.announce(f"{why}. After {news.seconds:.1f} s {others} {verb}", news.seconds)
            return
        names = tuple(map(format_location, news.hosts, news.slots))
        self.completed.append(Recovery(names, why, round(news.seconds, 3)))
        for node in self._fleet.nodes:
            node.outlived = node.outlived or (node.lost and node.name in news.hosts)
        went_on = f"Training went on with {others} after {news.seconds:.1f} s"
        self.announce(f"{why}. {went_on}; no step was lost", news.seconds)

    def announce(self, text: str, seconds: float | None = None) -> None:
        """Shows a recovery to the user and records it."""
        self._screen.note(f"paceline: {text}")
        took: dict[str, Any] = {} if seconds is None else {"seconds": round(seconds, 3)}
        self._recorder.event("recovery", text=text, **took)

    def _name(self, slot: int) -> str:
        return f"rank {slot} on {self._hosts_of[slot]}"


def left_out(action: SendAway, again: bool) -> str:
    """Returns the message about a live host that was excluded."""
    later = f", and it is tried again after {action.again_s:.0f} s" if again else ""
    return (f"{action.why} (paceline check tries each direction): {action.host} is left"
            f" out{later}")  # fmt: skip


def describe_loss(failure: Failure) -> str:
    """``rank 1 on n2 was killed by SIGKILL``."""
    if failure.kind == "signal":
        verb = "was " if failure.headline.startswith("killed") else ""
        return f"{failure.where} {verb}{failure.headline}"
    if failure.kind in ("lost", "agent", "lease"):
        return f"lost {failure.host}: {failure.headline}"
    return failure.describe()


def listed(names: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``; of many the number."""
    if len(names) > 4:
        return f"{', '.join(names[:3])} and {len(names) - 3} more"
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
