"""Stacks: which line of the user's a rank stood in, and which collective it had called. Pure."""

from __future__ import annotations

import math
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
_WAITS = ("_engine_run_backward", "run_backward")  # gradients are exchanged inside
_WRAPPERS = {"wrapper", "inner", "_call_impl", "_wrapped_call_impl"}
_OURS = "/paceline/train/"
_OUR_WAITS = re.compile(rf"{_OURS}(waits|direct)\.py")
# what stands around a model's own code, or around files, waits for nobody by itself
_AROUND = {"forward", "_run_ddp_forward", "inner_forward"}
_WORK = re.compile(
    r"/torch/distributed/checkpoint/|/torch/nn/modules/(?!module\.)|/paceline/recipes/"
)
# operations for which each rank brings as many numbers; of others ranks have different parts
_ALIKE = {"all_reduce", "allreduce", "broadcast", "reduce", "_all_gather_base",
          "_reduce_scatter_base"}  # fmt: skip
_SIZES = re.compile(r"\[([\d,]*)\]")


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
    def inner(self) -> tuple[Frame, ...]:
        """The frames inside of that line: what libraries do for it."""
        own = self.own
        return self.frames if own is None else self.frames[: self.frames.index(own)]

    @property
    def collective(self) -> str:
        """The operation that it waited in, as its script calls it; empty when in none.

        Empty, too, in a backward pass.
        """
        if not waits(self):
            return ""
        inside = [frame for frame in self.inner if _COLLECTIVES.search(frame.file)]
        if not inside and not any(frame.function in _WAITS for frame in self.inner):
            inside = [frame for frame in self.inner if _OURS in frame.file]
        named = [frame.function for frame in inside if frame.function not in _WRAPPERS]
        return named[-1] if named else ""


def waits(stand: Stand) -> bool:
    """Whether it stood in a collective, or in a backward pass, in which gradients are exchanged.

    Not where one of them is only around what it stood in: a model's own code, or a file.
    """
    for frame in stand.inner:
        if _WORK.search(frame.file):
            return False
        if _COLLECTIVES.search(frame.file) and frame.function not in _WRAPPERS:
            return frame.function not in _AROUND
        if frame.function in _WAITS or _OUR_WAITS.search(frame.file) or _begins_anew(frame):
            return True
    return False


def begins_anew(stand: Stand) -> bool:
    """Whether it waits for all others to come to a new group, after another rank was lost."""
    return any(map(_begins_anew, stand.inner))


def _begins_anew(frame: Frame) -> bool:
    return frame.function == "_all_here" and frame.file.endswith(f"{_OURS}recovery.py")


def where(stand: Stand) -> str:
    """``all_reduce (train.py, line 40, in step)``, or the user's own line alone."""
    own = line(stand.own)
    if stand.collective:
        return f"{stand.collective}{own and f' ({own})'}"
    if waits(stand):
        return f"the backward pass{own and f' ({own})'}"
    return f"at {own}" if own else "somewhere outside the script"


def line(frame: Frame | None) -> str:
    """``train.py, line 40, in step``."""
    if frame is None:
        return ""
    inside = "" if frame.function == "<module>" else f", in {frame.function}"
    return f"{frame.where}{inside}"


@dataclass(frozen=True, slots=True)
class Difference:
    """The first collective in which ranks are not together.

    Attributes:
        number: Of the collective, from 1, in its group.
        what: By rank what it has called.
    """

    number: int
    what: tuple[tuple[int, str], ...]


def first_difference(calls: dict[int, tuple[str, ...]]) -> Difference | None:
    """The first of the recorded collectives that is not the same on all ranks, if there is one.

    Args:
        calls: By rank, lines ``GROUP NUMBER OPERATION of SIZES`` in their order. A rank that has
            not come to a collective yet is not one that differs, so they may be of different
            moments.
    """
    by_place: dict[tuple[str, int], dict[int, str]] = {}
    for rank, lines in calls.items():
        for line in lines:
            group, _, rest = line.partition(" ")
            number, _, what = rest.partition(" ")
            if number.isdigit():
                by_place.setdefault((group, int(number)), {})[rank] = what
    for (_, at), called in sorted(by_place.items(), key=lambda item: item[0][1]):
        if len({agreed(what) for what in called.values()}) > 1:
            return Difference(at, tuple(sorted(called.items())))
    return None


def agreed(what: str) -> tuple[str, int | str]:
    """The part of a call that is the same on all ranks: a scatter has an input on one of them."""
    operation, _, sizes = what.partition(" of ")
    if operation not in _ALIKE:
        return operation, 0
    shapes = _SIZES.findall(sizes)
    if ",".join(f"[{shape}]" for shape in shapes) != sizes:
        return operation, sizes  # it was cut, or nothing is known
    return operation, sum(math.prod(int(n) for n in shape.split(",") if n) for shape in shapes)


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


def calls(evidence: Evidence) -> dict[int, tuple[str, ...]]:
    """By rank, the collectives that it has begun last, where they were told."""
    return {end.rank: tuple(end["seen"]["calls"]) for end in evidence.ends
            if end.rank is not None and end["seen"] and end["seen"].get("calls")}  # fmt: skip
