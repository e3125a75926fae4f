"""Evidence about a run that failed, as a value; :mod:`.evidence_reader` reads it from files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from paceline.explain.outcome import Outcome, judge
from paceline.explain.prefixes import strip_prefixes
from paceline.explain.unit_parser import parse_units
from paceline.explain.units import Unit
from paceline.spec.events import Event, last_attempt, replica_difference
from paceline.spec.failure import Failure, Result, format_location
from paceline.spec.terminal import clean

MAX_LINE_CHARS = 2000  # a longer line is cut in the middle
MAX_LINES = 60_000  # a longer log keeps its beginning and its end
_HEAD_LINES = MAX_LINES // 10
ELLIPSIS = " […] "
MISSED_FILE = re.compile(r"No such file or directory: '(?P<path>[^']{1,1000})'")
MISSED_MODULE = re.compile(r"No module named '(?P<path>\w+(?:\.\w+){0,20})'")


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
        numbers: Of its lines in the log of several ranks that it is a part of; empty for the log
            of one rank.
    """

    host: str
    rank: int | None
    lines: tuple[str, ...]
    numbers: tuple[int, ...] = ()

    @classmethod
    def from_text(cls, host: str, rank: int | None, text: str) -> Log:
        """Makes a log of raw output, bounded and without prefixes."""
        return cls(host, rank, tuple(line.text for line in strip_prefixes(lines_of(text))))

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

    def units(self) -> list[Unit]:
        """Parses its messages."""
        return parse_units(self.lines, self.numbers, self.host, self.rank)


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


@dataclass(frozen=True)
class Evidence:
    """What is known of one run.

    Attributes:
        logs: The first failing rank's first, then the others in rank order.
        result: How the job ended. A log alone tells the first failure at most.
        events: Of all attempts.
        launcher: Who owns the run; ``None`` after a normal end.
        checkpoint_step: Step of the newest checkpoint; ``None`` when there is none.
        script_checkpoint: The newest checkpoint of the script's own; empty when none has arrived.
        debug: Debug output of the ranks' libraries, if it was requested.
        ignored_files: Files and folders that a rank missed although they exist on the launching
            machine: git ignores them, so they were not sent. By the path or the module that the log
            names; a folder ends with a slash.
        unsent_files: Likewise, those that are outside the project.
        checkouts: Work folders of the hosts to which no code was sent, by host.
        project_modules: Files on the launching machine of modules that a rank missed, as paths from
            the work folder. By module; those of other packages are not among them.
    """

    logs: tuple[Log, ...] = ()
    result: Result = field(default_factory=Result)
    events: tuple[Event, ...] = ()
    launcher: Launcher | None = None
    checkpoint_step: int | None = None
    script_checkpoint: str = ""
    debug: tuple[Log, ...] = ()
    ignored_files: Mapping[str, str] = field(default_factory=dict)
    unsent_files: Mapping[str, str] = field(default_factory=dict)
    checkouts: Mapping[str, str] = field(default_factory=dict)
    project_modules: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def last_attempt(self) -> tuple[Event, ...]:
        """The events of the last attempt: a former one says nothing about how this one failed."""
        return tuple(last_attempt(self.events))

    @property
    def exits(self) -> tuple[Event, ...]:
        """The ends of ranks in the last attempt, in the order of time.

        Of a rank that was replaced in place, only ends of its last process.
        """
        events = [*enumerate(self.last_attempt)]
        starts = {event.rank: index for index, event in events if event.kind == "rank started"}
        ends = ((index, event) for index, event in events if event.kind == "rank ended")
        return tuple(event for index, event in ends if index > starts.get(event.rank, -1))

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
    def replica_difference(self) -> str:
        """Which ranks trained different models, as the screen says; empty if none are known to."""
        return replica_difference(self.events)

    @property
    def has_succeeded(self) -> bool:
        """Whether it ended with status 0, and its ranks are not known to have trained apart."""
        return self.result.exit_code == 0 and not self.replica_difference

    @property
    def first_failure(self) -> Failure | None:
        return self.result.failure

    @property
    def rerun_effect(self) -> str:
        """What running the same command again would do, as the end of a sentence."""
        if self.checkpoint_step is None and self.script_checkpoint:
            return (
                f"the script can resume from its newest checkpoint, {self.script_checkpoint}: all"
                " hosts get the files that it wrote"
            )
        if self.checkpoint_step is None:
            start = "training starts from step 0, unless the script finds checkpoints of its own"
            if self.checkouts:  # what the script writes there is not recorded, unless all is local
                return f"{start} in the project: Paceline knows of none"
            return (
                f"{start}: there is none of paceline.train. If some are in files/HOST of the run"
                " directory, first copy them from there into the project"
            )
        return f"training resumes from the checkpoint of step {self.checkpoint_step}"

    @cached_property
    def outcome(self) -> Outcome:
        """How the job ended, by all logs."""
        units = [unit for log in self.logs for unit in log.units()]
        if all(log.numbers for log in self.logs):
            units.sort(key=lambda unit: unit.number)
        has_failed = self.result.exit_code > 0 or self.first_failure is not None
        return judge(units, self.first_failure, has_failed)

    def search(self, pattern: re.Pattern[str]) -> Iterator[tuple[Unit, re.Match[str]]]:
        """Yields every unit that may explain the failure and matches, the first failure first."""
        for unit in self.outcome.searched:
            if match := pattern.search(unit.text):
                yield unit, match

    def contains(self, pattern: re.Pattern[str]) -> bool:
        return next(self.search(pattern), None) is not None
