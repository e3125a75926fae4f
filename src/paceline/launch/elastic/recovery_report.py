"""Messages to the user about recoveries in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.launch.elastic.rank_states import (
    ExcludeHost,
    Joined,
    RankAbandoned,
    RanksNotReplaced,
    Recovered,
)
from paceline.launch.nodes.fleet import Fleet
from paceline.launch.recorder import Recorder
from paceline.launch.terminal.screen import Screen
from paceline.spec.failure import Failure, Recovery, format_location


class RecoveryReport:
    """Reports losses and new ranks to the user and counts the recoveries of one attempt.

    Attributes:
        untrained: Additional ranks that have not trained yet.
    """

    def __init__(self, hosts_of: Mapping[int, str], fleet: Fleet, screen: Screen,
                 recorder: Recorder) -> None:  # fmt: skip
        self.completed: list[Recovery] = []
        self.untrained: set[int] = set()
        self._hosts_of, self._fleet = hosts_of, fleet
        self._screen, self._recorder = screen, recorder

    def note_stalled_newcomer(self, slot: int, host: str, seconds: float, position: str) -> None:
        """Reports a new rank that has stalled and should have joined by now."""
        location = format_location(host, slot)
        text = f"{location}, started {seconds:.0f} s ago, has not come to the training:"
        text += f" it {position}"
        self._screen.note(f"paceline: {text}")
        self._recorder.event("newcomer late", host, slot, text=text, why=position)

    def announce_action(self, news: Recovered | Joined | RankAbandoned | RanksNotReplaced) -> None:
        """Reports that ranks were lost, have joined, or do not come back."""
        if isinstance(news, Recovered):
            self._report_recovered(news)
        elif isinstance(news, Joined):
            names = [self._name(slot) for slot in news.slots]
            place = "here" if self.untrained.issuperset(news.slots) else "back"
            self.untrained.difference_update(news.slots)
            text = f"{listed(names)} {'is' if len(names) == 1 else 'are'} {place}"
            self.announce(f"{text} after {news.seconds:.1f} s", news.seconds)
        elif isinstance(news, RanksNotReplaced):
            text = listed([self._name(slot) for slot in news.slots])
            verb = "is" if len(news.slots) == 1 else "are"
            self.announce(f"{text} {verb} not started again: {news.reason}")
        else:
            cause = f" ({news.failure.headline})" if news.failure and news.failure.headline else ""
            self.announce(f"{self._name(news.slot)} could not join again{cause}: left out")

    def _report_recovered(self, news: Recovered) -> None:
        reason = "; ".join(describe_loss(failure) for failure in news.losses) or "was lost"
        count = news.num_survivors
        survivors = "the other rank" if count == 1 else f"the other {count} ranks"
        if not count:  # all were replaced, one after the other
            survivors = "their replacements"
        if news.is_final:
            verb = "saves and stops" if count == 1 else "save and stop"
            self.announce(f"{reason}. After {news.seconds:.1f} s {survivors} {verb}", news.seconds)
            return
        names = tuple(map(format_location, news.hosts, news.slots))
        self.completed.append(Recovery(names, reason, round(news.seconds, 3)))
        for node in self._fleet.nodes:
            if node.lost and node.name in news.hosts:
                node.is_loss_recovered = True
        continued = f"Training went on with {survivors} after {news.seconds:.1f} s"
        self.announce(f"{reason}. {continued}; no step was lost", news.seconds)

    def announce(self, text: str, seconds: float | None = None) -> None:
        """Shows a recovery to the user and records it."""
        self._screen.note(f"paceline: {text}")
        duration: dict[str, Any] = {} if seconds is None else {"seconds": round(seconds, 3)}
        self._recorder.event("recovery", text=text, **duration)

    def _name(self, slot: int) -> str:
        return f"rank {slot} on {self._hosts_of[slot]}"


def describe_exclusion(action: ExcludeHost, is_redialled: bool) -> str:
    """Returns the message about a live host that was excluded."""
    redial = f", and it is tried again after {action.redial_delay_s:.0f} s" if is_redialled else ""
    return (f"{action.reason} (paceline check tries each direction): {action.host} is left"
            f" out{redial}")  # fmt: skip


def describe_loss(failure: Failure) -> str:
    """Returns a loss as text, such as ``rank 1 on n2 was killed by SIGKILL``."""
    if failure.kind == "signal":
        verb = "was " if failure.headline.startswith("killed") else ""
        return f"{failure.where} {verb}{failure.headline}"
    if failure.kind in ("lost", "agent", "lease"):
        return f"lost {failure.host}: {failure.headline}"
    return failure.describe()


def listed(names: Sequence[str]) -> str:
    """Joins names: ``a``, ``a and b``, ``a, b and c``; of more than four, three and a number."""
    if len(names) > 4:
        return f"{', '.join(names[:3])} and {len(names) - 3} more"
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
