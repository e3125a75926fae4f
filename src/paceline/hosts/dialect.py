"""What a dialect is: its input, its result, its functions and its errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from paceline.spec.errors import HostsError
from paceline.spec.hosts import Cluster, Host

ColonMeaning = Literal["slots", "port", "rendezvous"]
"""Meaning of the number in ``host:n``: processes, SSH port, or the job's rendezvous port."""

COLON_MEANINGS: tuple[ColonMeaning, ...] = ("slots", "port", "rendezvous")

LIST_LABEL = "host list"
"""Label of descriptions typed on the command line; errors in them name no line."""


class UnreadableError(ValueError):
    """Raised by parsers that know neither file nor line; its text completes "expected …"."""

    def __init__(self, expected: str) -> None:
        super().__init__(expected)
        self.expected = expected


@dataclass(frozen=True, slots=True)
class Reading:
    """Input of a dialect, which does no I/O of its own.

    Attributes:
        text: The description; empty for dialects that read variables.
        label: How errors name the source (a path, or ``LIST_LABEL``).
        colon: Meaning of ``host:n`` if the user or the dialect fixed it.
        environ: The environment variables.
        hostname: This machine's name.
    """

    text: str = ""
    label: str = LIST_LABEL
    colon: ColonMeaning | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    hostname: str = "localhost"


@dataclass(frozen=True, slots=True)
class FileReference:
    """Another file that holds the description.

    Attributes:
        path: As written; relative to the file that names it, or to the current folder.
        dialect: Its dialect; ``None`` detects it.
    """

    path: str
    dialect: str | None = None


@dataclass(frozen=True, slots=True)
class Parsed:
    """Result of a dialect: hosts in rank order, or a reference to another file."""

    hosts: tuple[Host, ...] = ()
    notes: tuple[str, ...] = ()
    reference: FileReference | None = None


@dataclass(frozen=True, slots=True)
class Dialect:
    """One format of host descriptions.

    Attributes:
        name: Name for ``--dialect`` and ``--write``.
        title: Description for people.
        detect: Whether a description looks like this dialect.
        parse: Reads a description; raises HostsError.
        write: Writes a cluster; ``None`` if the dialect cannot be written.
        preserved_fields: Fields of Host that survive writing and reading back.
        is_environment: Whether it reads variables instead of text.
        colon: Meaning of ``host:n`` if the user names this dialect.
        written_fields: Fields of Host that it writes, if not ``preserved_fields``.
        is_complete: False if what it writes names the first host only.
    """

    name: str
    title: str
    detect: Callable[[Reading], bool]
    parse: Callable[[Reading], Parsed]
    write: Callable[[Cluster], str] | None = None
    preserved_fields: frozenset[str] = frozenset()
    is_environment: bool = False
    colon: ColonMeaning | None = None
    written_fields: frozenset[str] = frozenset()
    is_complete: bool = True


MAX_LINE_CHARS = 120  # characters of a line worth showing


def line_error(label: str, number: int, line: str, expected: str) -> HostsError:
    """Returns the error for one line of a description; ``number`` counts from 1."""
    location = f"{label}, line {number}" if label != LIST_LABEL else label
    return HostsError(
        f"{location}: cannot be read", found=printable(line), remedy=f"expected {expected}"
    )


def printable(line: str, max_chars: int = MAX_LINE_CHARS) -> str:
    """Returns the line with control characters escaped, cut to a readable length."""
    text = line.strip()
    visible = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
    return visible if len(visible) <= max_chars else visible[:max_chars] + "…"
