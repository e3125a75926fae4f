"""Evidence about a run that failed, as a value; :mod:`.evidence_reader` reads it from files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from paceline.spec.events import Event
from paceline.spec.failure import Failure, Result, format_location
from paceline.spec.terminal import clean

MAX_LINE_CHARS = 2000  # a longer line is cut in the middle
MAX_LINES = 20_000  # a longer log keeps its beginning and its end
_HEAD_LINES = MAX_LINES // 10
ELLIPSIS = " […] "


def lines_of(text: str) -> tuple[str, ...]:
    """Splits text into lines without colours, bounded in length and number.

    The bounds limit the time that a rule takes, whatever a rank printed.
    """
    lines = text.splitlines()
    if len(lines) > MAX_LINES:
        lines = [*lines[:_HEAD_LINES], *lines[_HEAD_LINES - MAX_LINES :]]
    return tuple(clean(shorten(line)).rstrip() for line in lines)


def shorten(line: str) -> str:
    """Cuts a very long line in the middle."""
    half = MAX_LINE_CHARS // 2
    return line if len(line) <= MAX_LINE_CHARS else f"{line[:half]}{ELLIPSIS}{line[-half:]}"


@dataclass(frozen=True, slots=True)
class Log:
    """The output of one rank, of one host, or of an unknown writer.

    Attributes:
        host: Host name; empty when not known.
        rank: ``None`` when not known.
        lines: The text, without labels and colours.
    """

    host: str
    rank: int | None
    lines: tuple[str, ...]

    @classmethod
    def from_text(cls, host: str, rank: int | None, text: str) -> Log:
        """Makes a log of raw output, bounded."""
        return cls(host, rank, lines_of(text))

    @property
    def label(self) -> str:
        """``rank 1 on n2``, as far as it is known."""
        return format_location(self.host, self.rank)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host, if it is known."""
        return (self.host,) if self.host else ()

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def context(self, index: int) -> tuple[str, ...]:
        """The line at an index with two lines before and after."""
        return self.lines[max(0, index - 2) : index + 3]


@dataclass(frozen=True, slots=True)
class Launcher:
    """The process that owns the run; a launcher that ends normally removes its owner file.

    Attributes:
        host, since: Where and when it started.
        pid: Its process; ``None`` for a supervisor on another host.
        alive: Whether it still runs; ``None`` when it is on another machine.
    """

    host: str
    pid: int | None
    since: str
    alive: bool | None

    @property
    def role(self) -> str:
        return "launcher" if self.pid is not None else "supervisor"

    @property
    def location(self) -> str:
        process = "" if self.pid is None else f"process {self.pid} "
        return f"{process}on {self.host}, since {self.since}"


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of one run.

    Attributes:
        logs: The first failing rank's first, then the others in rank order.
        result: How the job ended. A log alone tells the first failure at most.
        launcher: Who owns the run; ``None`` after a normal end.
        checkpoint_step: Step of the newest checkpoint; ``None`` when there is none.
        debug: Debug output of the ranks' libraries, if it was requested.
    """

    logs: tuple[Log, ...] = ()
    result: Result = field(default_factory=Result)
    events: tuple[Event, ...] = ()
    launcher: Launcher | None = None
    checkpoint_step: int | None = None
    debug: tuple[Log, ...] = ()

    @property
    def exits(self) -> tuple[Event, ...]:
        """The ends of ranks, in the order of time."""
        return tuple(event for event in self.events if event.kind == "rank ended")

    @property
    def losses(self) -> tuple[str, ...]:
        """Hosts and ranks that were lost or replaced while the job went on, as the screen says."""
        descriptions = []
        lost: dict[str, str] = {}  # since the last start
        for event in self.events:
            if event.kind == "lost":
                lost[event.host or ""] = f"{event.where}: {event['why']}; "
            elif event.kind in ("recovery", "newcomer late"):
                descriptions.append(str(event["text"] or ""))
            elif event.kind == "newcomer lost":
                descriptions.append(f"{event.where} was lost before it had joined: {event['why']}")
            elif event.kind == "started" and event["attempt"]:
                descriptions.append(f"{''.join(lost.values())}all ranks were started again")
                lost = {}
        return tuple(descriptions)

    @property
    def first_failure(self) -> Failure | None:
        return self.result.failure

    @property
    def rerun_effect(self) -> str:
        """What running the same command again would do, as the end of a sentence."""
        if self.checkpoint_step is None:
            return (
                "training starts from step 0, because there is no checkpoint of paceline.train. If"
                " the script has checkpoints of its own in files/HOST of the run directory, first"
                " copy them from there into the project"
            )
        return f"training resumes from the checkpoint of step {self.checkpoint_step}"

    def search(self, pattern: re.Pattern[str]) -> Iterator[tuple[Log, int, re.Match[str]]]:
        """Yields log, line index and match for every line that matches."""
        for log in self.logs:
            for index, line in enumerate(log.lines):
                if match := pattern.search(line):
                    yield log, index, match

    def contains(self, pattern: re.Pattern[str]) -> bool:
        return next(self.search(pattern), None) is not None
