"""Units of a log: whole messages with their parts; :mod:`.unit_parser` makes them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from paceline.spec.failure import format_location

# "traceback": of Python, also without its beginning; "crash": last words of compiled code;
# "exit": a launcher's report of how processes ended; "library": of NCCL, torch, gloo, UCX …;
# "kernel": of the operating system's; "numeric": progress with a loss that is not a number;
# "progress", "finish": signs of life; "foreign": of another kind of program; "text": the rest
Kind = Literal["traceback", "crash", "exit", "library", "kernel", "numeric", "warning", "progress",
               "finish", "foreign", "text"]  # fmt: skip
_SIGNS_OF_LIFE = {"finish": 3, "progress": 2, "text": 1}
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3|^<frozen|/paceline_agent/|\.pyz/")
_PACKAGE = Path(__file__).parents[1]
# a clone that is installed in place, and the copy that recipes send to hosts; a project may lie
# below such a folder, too
_OTHER_PACKAGES = ("/src/paceline/", "/paceline/paceline/")


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of a stack."""

    file: str
    line: int
    function: str

    @property
    def location(self) -> str:
        return f"{self.file.rsplit('/', 1)[-1]}, line {self.line}"

    @property
    def is_library(self) -> bool:
        """Whether the file belongs to a library or to Paceline, which hosts may have elsewhere."""
        if _LIBRARY.search(self.file) or self.file.startswith(f"{_PACKAGE}/"):
            return True
        parts = (self.file.rpartition(package) for package in _OTHER_PACKAGES)
        return any(package and module in _package_files() for _, package, module in parts)


@cache
def _package_files() -> frozenset[str]:
    return frozenset(str(path.relative_to(_PACKAGE)) for path in _PACKAGE.rglob("*.py"))


@dataclass(frozen=True, slots=True)
class PythonError:
    """One exception of a traceback.

    Attributes:
        type: Qualified class name.
        message: All lines of the message.
        frames: Innermost last.
    """

    type: str
    message: str
    frames: tuple[Frame, ...]

    @property
    def script_frame(self) -> Frame | None:
        """The innermost frame of the user's own code; without one, the innermost frame."""
        own = [frame for frame in self.frames if not frame.is_library] or self.frames
        return own[-1] if own else None

    @property
    def is_in_script(self) -> bool:
        """Whether the user's own code raised it."""
        return bool(self.frames) and not self.frames[-1].is_library


@dataclass(frozen=True, slots=True)
class Exit:
    """How one process ended, as a launcher reports it.

    Attributes:
        host, rank: Empty and ``None`` when not known.
        code: Exit status; ``None`` when not known or after a signal.
        signal: Number of the signal; ``None`` when there was none.
        is_root: Whether the launcher says that it was the first to fail.
        is_memory: Whether the launcher says that memory was the reason.
    """

    host: str = ""
    rank: int | None = None
    code: int | None = None
    signal: int | None = None
    is_root: bool = False
    is_memory: bool = False


@dataclass(frozen=True, slots=True)
class Unit:
    """One message.

    Attributes:
        number: Line number of its first line in the whole log.
        lines: Its lines, without prefixes.
        text: The part that rules search: without frames and code of tracebacks.
        level: ``error``, ``warning`` or empty, as the message itself says.
        errors: The exceptions of a traceback, the root cause first where they are chained.
        frames: All frames.
        exits: Of a launcher's report.
        is_handled: Whether the text itself says that the program continues.
    """

    kind: Kind
    number: int
    lines: tuple[str, ...]
    text: str
    host: str = ""
    rank: int | None = None
    level: str = ""
    errors: tuple[PythonError, ...] = ()
    exits: tuple[Exit, ...] = ()
    is_handled: bool = False

    @property
    def label(self) -> str:
        """``rank 1 on n2``, as far as it is known."""
        return format_location(self.host, self.rank)

    @property
    def hosts(self) -> tuple[str, ...]:
        return (self.host,) if self.host else ()

    @property
    def frames(self) -> tuple[Frame, ...]:
        return tuple(frame for error in self.errors for frame in error.frames)

    @property
    def error(self) -> PythonError | None:
        """The exception that ended the process."""
        return self.errors[-1] if self.errors else None

    @property
    def sign_of_life(self) -> int:
        """How strongly it suggests that the process went on after an earlier error."""
        return 0 if self.level else _SIGNS_OF_LIFE.get(self.kind, 0)
