"""Everything that is known of a run that ended badly: a value. Reading it is :mod:`.gather`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from paceline.spec.events import Event
from paceline.spec.failure import Failure, Result, place
from paceline.spec.terminal import clean

LINE_CHARS = 2000  # of a line that rules see: of a longer one its beginning and its end
LINES = 20_000  # of a log that rules see: of a longer one its beginning and its end
_HEAD_LINES = LINES // 10
CUT = " […] "


def lines_of(text: str) -> tuple[str, ...]:
    """The lines of any text as rules see them: no colours, and bounded in length and number.

    Whatever a rank printed, a rule's time is bounded by it.
    """
    lines = text.splitlines()
    if len(lines) > LINES:
        lines = [*lines[:_HEAD_LINES], *lines[_HEAD_LINES - LINES :]]
    return tuple(clean(shortened(line)).rstrip() for line in lines)


def shortened(line: str) -> str:
    """The line, or the beginning and the end of a very long one."""
    half = LINE_CHARS // 2
    return line if len(line) <= LINE_CHARS else f"{line[:half]}{CUT}{line[-half:]}"


@dataclass(frozen=True, slots=True)
class Log:
    """What one rank (or one host, or somebody unknown) wrote.

    Attributes:
        host: Where; empty when not known.
        rank: Who; ``None`` when not known.
        lines: The text, without labels and colours.
    """

    host: str
    rank: int | None
    lines: tuple[str, ...]

    @classmethod
    def of(cls, host: str, rank: int | None, text: str) -> Log:
        """From what was written, bounded."""
        return cls(host, rank, lines_of(text))

    @property
    def where(self) -> str:
        """``rank 1 on n2``, as far as it is known."""
        return place(self.host, self.rank)

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


@dataclass(frozen=True, slots=True)
class Launcher:
    """Who says that the run is theirs: the mark is taken away when a run ends in order.

    Attributes:
        host, since: Where and when it started.
        pid: Its process; ``None`` of a supervisor on another host.
        alive: Whether it still runs; ``None`` when it is another machine's process.
    """

    host: str
    pid: int | None
    since: str
    alive: bool | None

    @property
    def what(self) -> str:
        return "launcher" if self.pid is not None else "supervisor"

    @property
    def where(self) -> str:
        process = "" if self.pid is None else f"process {self.pid} "
        return f"{process}on {self.host}, since {self.since}"


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a run left.

    Attributes:
        logs: The first failing rank's first, then the others in rank order.
        result: How the job ended; of a log only the first failure is known, if that.
        events: What happened.
        launcher: Whose run it still is; ``None`` after an end in order.
        checkpoint: Step of the newest checkpoint; ``None`` when there is none.
        debug: What the ranks' libraries told of themselves, where they were asked to.
    """

    logs: tuple[Log, ...] = ()
    result: Result = field(default_factory=Result)
    events: tuple[Event, ...] = ()
    launcher: Launcher | None = None
    checkpoint: int | None = None
    debug: tuple[Log, ...] = ()

    @property
    def ends(self) -> tuple[Event, ...]:
        """In the order in which ranks ended."""
        return tuple(event for event in self.events if event.kind == "rank ended")

    @property
    def losses(self) -> tuple[str, ...]:
        """What was lost and what came back while the others went on, in the screen's words."""
        told = []
        lost: dict[str, str] = {}  # since the last start
        for event in self.events:
            if event.kind == "lost":
                lost[event.host or ""] = f"{event.where}: {event['why']}; "
            elif event.kind in ("recovery", "newcomer late"):
                told.append(str(event["text"] or ""))
            elif event.kind == "newcomer lost":
                told.append(f"{event.where} was lost before it had joined: {event['why']}")
            elif event.kind == "started" and event["attempt"]:
                told.append(f"{''.join(lost.values())}all ranks were started again")
                lost = {}
        return tuple(told)

    @property
    def first(self) -> Failure | None:
        """Who failed first, when that is known."""
        return self.result.failure

    @property
    def again(self) -> str:
        """What starting the same command again would do, as the end of a sentence."""
        if self.checkpoint is None:
            return (
                "it begins anew, for it has made no checkpoint of paceline.train. Where the script"
                " has its own and they came home to files/HOST of the run directory, copy them from"
                " there into the project first"
            )
        return f"training resumes from the checkpoint of step {self.checkpoint}"

    def search(self, pattern: re.Pattern[str]) -> Iterator[tuple[Log, int, re.Match[str]]]:
        """Every line that matches, the first failing rank's first: log, line's index, match."""
        for log in self.logs:
            for at, line in enumerate(log.lines):
                if match := pattern.search(line):
                    yield log, at, match

    def says(self, pattern: re.Pattern[str]) -> bool:
        return next(self.search(pattern), None) is not None

    def end_of(self, log: Log) -> Event | None:
        found = (end for end in self.ends if (end.host, end.rank) == (log.host, log.rank))
        return next(found, None)
