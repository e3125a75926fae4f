"""Where the time of a script's steps goes, by what its DistributedDataParallel measures. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from paceline.spec.events import Event
from paceline.spec.formatting import format_duration
from paceline.spec.training.step_time import BYTES_SENT

REPORT = "replica timings"
MIN_SHARE, MIN_S = 0.2, 0.01  # of a step, before sending or waiting is worth a line
MIN_BYTES = 1 << 16  # of gradients; fewer take the time of a message, however they are sent
ADVISED_METHOD = "int8"
MAX_MODELS = 256  # of a script, whose timings are kept
_USED = ("bytes", "seconds", "moving_s", "stall_s")


class ScriptTimings:
    """The last timings of each rank.

    A rank stands still after its backward pass until the gradients of all ranks are there. The last
    to arrive waits for the moving of bytes alone; what the others stand still longer, they wait for
    it.
    """

    def __init__(self) -> None:
        self._reports: dict[int, dict[int, Event]] = {}  # by model and rank

    def add(self, event: Event) -> None:
        if event["replica"] < MAX_MODELS:  # the script's models are numbered from 0
            ranks = self._reports.setdefault(event["replica"], {})
            fields = {name: event[name] for name in _USED}  # the members may be very many
            ranks[-1 if event.rank is None else event.rank] = replace(event, fields=fields)

    def describe(self, world_size: int, method: str) -> Iterator[str]:
        """Yields a sentence if sending, and one if waiting for a rank, takes much of a step.

        Args:
            method: Of averaging gradients (``--communication``).
        """
        complete = [ranks for ranks in self._reports.values() if len(ranks) == world_size > 1]
        if not complete:
            return
        ranks = max(complete, key=lambda ranks: next(iter(ranks.values()))["bytes"])
        step_s = max(event["seconds"] for event in ranks.values())
        stalls_s = {rank: event["stall_s"] for rank, event in ranks.items()}
        slowest = min(stalls_s, key=lambda rank: stalls_s[rank])
        moving_s = min(stalls_s[slowest], step_s)
        waiting_s = min(max(stalls_s.values()), step_s) - moving_s  # a first step is longer
        if waiting_s >= max(MIN_S, MIN_SHARE * step_s):
            yield (
                f"rank {slowest} on {ranks[slowest].host} is the slowest: the others wait up to"
                f" {format_duration(waiting_s)} of each {format_duration(step_s)} step for it"
            )
        is_worthwhile = ranks[slowest]["bytes"] >= MIN_BYTES
        if is_worthwhile and moving_s >= max(MIN_S, MIN_SHARE * step_s):
            yield _describe_moving(ranks[slowest], moving_s, step_s, ranks, method)


def _describe_moving(
    slowest: Event, moving_s: float, step_s: float, ranks: dict[int, Event], method: str
) -> str:
    text = f"{moving_s / step_s:.0%} of each {format_duration(step_s)} step goes into sending"
    size = slowest["bytes"]
    if method != "exact":
        return f"{text} gradients, by --communication {method}"
    sent = 2 * (len(ranks) - 1) / len(ranks) * size
    rate = 8e-6 * sent / max(slowest["moving_s"], 1e-9)
    text += f" {size / 1e6:.1f} MB of gradients, at {rate:,.0f} Mbit/s"
    hosts = len({event.host for event in ranks.values()})
    if hosts > 1 and step_s > hosts * (step_s - moving_s):
        text += f": {hosts} hosts train slower than one would"
    shorter_s = step_s - moving_s * (1 - BYTES_SENT[ADVISED_METHOD][len(ranks) > 2])
    return (
        f"{text}. With --communication {ADVISED_METHOD} a step would take at least"
        f" {format_duration(shorter_s)}"
    )
