"""Stacks: which line of the user's a rank stood in, and which collective it had called. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.explain.evidence import Evidence, Log
from paceline.spec.failure import place

_FRAME = re.compile(
    r'^\s*(?:\[rank\d+\]: *)?File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<in>\S+)'
)
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3|^<frozen|/paceline(_agent)?/|\.pyz/")
_COLLECTIVES = re.compile(r"/torch/(distributed|nn/parallel)/")
_WRAPPERS = {"wrapper", "inner", "_call_impl", "_wrapped_call_impl"}


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    function: str

    @property
    def where(self) -> str:
        return f"{self.file.rsplit('/', 1)[-1]}, line {self.line}"


@dataclass(frozen=True, slots=True)
class Stand:
    """Where a rank stood.

    Attributes:
        host, rank: Who.
        state: Its process's, as ``ps`` shows it; empty for one that ended by itself.
        frames: Innermost first; may be empty.
    """

    host: str
    rank: int
    state: str
    frames: tuple[Frame, ...]

    @property
    def who(self) -> str:
        return place(self.host, self.rank)

    @property
    def own(self) -> Frame | None:
        """The innermost line that is the user's own."""
        return next((frame for frame in self.frames if not _LIBRARY.search(frame.file)), None)

    @property
    def collective(self) -> str:
        """The operation of torch.distributed that it stood in; empty when in none."""
        inside = [frame for frame in self.frames if _COLLECTIVES.search(frame.file)]
        named = [frame.function for frame in inside if frame.function not in _WRAPPERS]
        return named[-1] if named else ""


def parse(lines: Iterable[str]) -> tuple[Frame, ...]:
    """The frames in lines of a stack, in the order of the lines."""
    found = (_FRAME.match(line) for line in lines)
    return tuple(Frame(m["file"], int(m["line"]), m["in"]) for m in found if m)


def seen(evidence: Evidence) -> list[Stand]:
    """Where the ranks stood that were alive when another failed."""
    return [
        Stand(end.host, end.rank, end["seen"]["state"], parse(end["seen"]["stack"]))
        for end in evidence.ends
        if end["seen"] and end.rank is not None
    ]


def failed(evidence: Evidence, wanted: re.Pattern[str]) -> list[Stand]:
    """Where the ranks stood whose traceback ends with words like these."""
    return [
        Stand(log.host, log.rank, "", _before(log.lines, at))
        for log, at in _firsts(evidence, wanted)
        if log.rank is not None
    ]


def _firsts(evidence: Evidence, wanted: re.Pattern[str]) -> Iterable[tuple[Log, int]]:
    done: set[int] = set()
    for log, at, _ in evidence.search(wanted):
        if id(log) not in done:
            done.add(id(log))
            yield log, at


def _before(lines: Sequence[str], at: int) -> tuple[Frame, ...]:
    """The traceback above a line, innermost frame first."""
    start = next((n for n in range(at, -1, -1) if "Traceback (most recent" in lines[n]), at)
    return tuple(reversed(parse(lines[start:at])))
