"""Stacks of ranks: the script's line that a rank was at, and the collective it was in. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.explain.units import Frame
from paceline.spec.failure import format_location

if TYPE_CHECKING:  # the launcher imports this module, and needs no patterns of logs
    from paceline.explain.evidence import Evidence

_FRAME = re.compile(
    r'^\s*(?:\[rank\d+\]: *)?File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<in>\S+)'
)
_COLLECTIVES = re.compile(r"/torch/(distributed|nn/parallel)/")
_BACKWARD_FUNCTIONS = ("_engine_run_backward", "run_backward")  # gradients are exchanged inside
_WRAPPERS = {"wrapper", "inner", "_call_impl", "_wrapped_call_impl"}
_TRAIN_PACKAGE = "/paceline/train/"
_WAITING_MODULES = re.compile(rf"{_TRAIN_PACKAGE}(elastic/(waits|device_group)|reduce/direct)\.py")
# functions around a model's own code; they do not wait for other ranks
_FORWARD_FUNCTIONS = {"forward", "_run_ddp_forward", "inner_forward"}
_LOCAL_WORK = re.compile(
    r"/torch/distributed/checkpoint/|/torch/nn/modules/(?!module\.)|/paceline/recipes/(?!.*-packages/)"
)
# operations to which each rank brings the same number of elements
_SAME_SIZE_OPERATIONS = {"all_reduce", "allreduce", "broadcast", "reduce", "_all_gather_base",
                         "_reduce_scatter_base"}  # fmt: skip
_SHAPE = re.compile(r"\[([0-9,]{0,100})\]")
_CALL = re.compile(r"(\S{1,80}) ([0-9]{1,18}) (.+)")


@dataclass(frozen=True, slots=True)
class RankStack:
    """The stack of one rank.

    Attributes:
        host, rank: The rank.
        state: Its process's state, as ``ps`` shows it; empty if it ended by itself.
        frames: Innermost first; may be empty.
    """

    host: str
    rank: int
    state: str
    frames: tuple[Frame, ...]

    @property
    def label(self) -> str:
        return format_location(self.host, self.rank)

    @property
    def script_frame(self) -> Frame | None:
        """The innermost frame of the user's own code."""
        return next((frame for frame in self.frames if not frame.is_library), None)

    @property
    def library_frames(self) -> tuple[Frame, ...]:
        """The frames of libraries that the user's innermost line has called."""
        frame = self.script_frame
        return self.frames if frame is None else self.frames[: self.frames.index(frame)]

    @property
    def collective(self) -> str:
        """The collective that it waited in, by the script's name for it.

        Empty if it waited in none, or in a backward pass.
        """
        if not is_waiting(self):
            return ""
        inner = self.library_frames
        frames = [frame for frame in inner if _COLLECTIVES.search(frame.file)]
        if not frames and not any(frame.function in _BACKWARD_FUNCTIONS for frame in inner):
            frames = [frame for frame in inner if _TRAIN_PACKAGE in frame.file]
        functions = [frame.function for frame in frames if frame.function not in _WRAPPERS]
        return functions[-1] if functions else ""


def is_waiting(stack: RankStack) -> bool:
    """Whether a rank was in a collective, or in a backward pass, which exchanges gradients.

    False if that only encloses local work, such as a model's own code or a file.
    """
    for frame in stack.library_frames:
        if _LOCAL_WORK.search(frame.file):
            return False
        if _COLLECTIVES.search(frame.file) and frame.function not in _WRAPPERS:
            return frame.function not in _FORWARD_FUNCTIONS
        if (frame.function in _BACKWARD_FUNCTIONS or _WAITING_MODULES.search(frame.file)
                or _is_regroup_frame(frame)):  # fmt: skip
            return True
    return False


def is_regrouping(stack: RankStack) -> bool:
    """Whether a rank waits for a new process group, after another rank was lost."""
    return any(map(_is_regroup_frame, stack.library_frames))


def _is_regroup_frame(frame: Frame) -> bool:
    in_job_group = frame.file.endswith(f"{_TRAIN_PACKAGE}elastic/job_group.py")
    return in_job_group and frame.function == "_wait_for_members"


def describe_position(stack: RankStack) -> str:
    """Formats a position: ``all_reduce (train.py, line 40, in step)``, or ``at`` a line."""
    position = describe_frame(stack.script_frame)
    if stack.collective:
        return f"{stack.collective}{position and f' ({position})'}"
    if is_waiting(stack):
        return f"the backward pass{position and f' ({position})'}"
    return f"at {position}" if position else "somewhere outside the script"


def describe_frame(frame: Frame | None) -> str:
    """Formats a frame: ``train.py, line 40, in step``."""
    if frame is None:
        return ""
    function = "" if frame.function == "<module>" else f", in {frame.function}"
    return f"{frame.location}{function}"


@dataclass(frozen=True, slots=True)
class Difference:
    """The first collective that ranks called differently.

    Attributes:
        number: Of the collective in its group, from 1.
        calls: Rank and call.
    """

    number: int
    calls: tuple[tuple[int, str], ...]


def parse_call(line: str) -> tuple[str, int, str] | None:
    """Splits a line ``GROUP NUMBER OPERATION of SIZES``; ``None`` if it is none."""
    match = _CALL.fullmatch(line)
    return (match[1], int(match[2]), match[3]) if match else None


def first_difference(calls: dict[int, tuple[str, ...]]) -> Difference | None:
    """Finds the first recorded collective that is not the same on all ranks.

    Args:
        calls: By rank, lines as for :func:`parse_call` in their order. They may be of different
            moments: a rank that has not reached a collective does not differ in it.
    """
    by_number: dict[tuple[int, str], dict[int, str]] = {}
    for rank, lines in calls.items():
        for group, number, call in filter(None, map(parse_call, lines)):
            by_number.setdefault((number, group), {})[rank] = call
    for (index, _), by_rank in sorted(by_number.items(), key=lambda item: item[0][0]):
        if len(set(map(comparable_call, by_rank.values()))) > 1:
            return Difference(index, tuple(sorted(by_rank.items())))
    return None


def comparable_call(call: str) -> tuple[str, int | str]:
    """The part of a call that is the same on all ranks, e.g. without the input of a scatter."""
    operation, _, sizes = call.partition(" of ")
    if operation not in _SAME_SIZE_OPERATIONS:
        return operation, 0
    shapes = _SHAPE.findall(sizes)
    if ",".join(f"[{shape}]" for shape in shapes) != sizes:
        return operation, sizes  # cut off, or not known
    return operation, sum(math.prod(int(n) for n in shape.split(",") if n) for shape in shapes)


def parse_frames(lines: Iterable[str]) -> tuple[Frame, ...]:
    """Parses the frames in lines of a stack, in the order of the lines."""
    matches = (_FRAME.match(line) for line in lines)
    return tuple(Frame(m["file"], int(m["line"]), m["in"]) for m in matches if m)


def stacks_at_failure(evidence: Evidence) -> list[RankStack]:
    """The stacks of the ranks that were alive when another failed."""
    return [
        RankStack(end.host, end.rank, end["seen"]["state"], parse_frames(end["seen"]["stack"]))
        for end in evidence.exits
        if end["seen"] and end.rank is not None
    ]


def stacks_at_error(evidence: Evidence, pattern: re.Pattern[str]) -> list[RankStack]:
    """The stacks of the ranks whose traceback ends with a matching message, one a rank."""
    stacks: dict[int, RankStack] = {}
    for unit, _ in evidence.search(pattern):
        if unit.rank is not None and unit.error is not None:
            frames = tuple(reversed(unit.error.frames))
            stacks.setdefault(unit.rank, RankStack(unit.host, unit.rank, "", frames))
    return list(stacks.values())


def last_calls(evidence: Evidence) -> dict[int, tuple[str, ...]]:
    """By rank, the collectives that it started last, if they were recorded."""
    return {end.rank: tuple(end["seen"]["calls"]) for end in evidence.exits
            if end.rank is not None and end["seen"] and end["seen"].get("calls")}  # fmt: skip
