"""The parts every dialect is made of: what goes in, what comes out, what it can do, its errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from paceline.spec.errors import HostsError
from paceline.spec.hosts import Cluster, Host

Colon = Literal["slots", "port", "rendezvous"]
"""What the number in ``host:n`` says: processes, SSH port, or the job's rendezvous port."""

COLON_MEANINGS: tuple[Colon, ...] = ("slots", "port", "rendezvous")

LIST_LABEL = "host list"
"""Label of descriptions typed on the command line; errors in them name no line."""


class UnreadableError(ValueError):
    """Raised by parsers that know neither file nor line; the caller adds both.

    Args:
        expected: What would have been right, completing "expected …".
    """

    def __init__(self, expected: str) -> None:
        super().__init__(expected)
        self.expected = expected


@dataclass(frozen=True, slots=True)
class Reading:
    """Everything a dialect may look at; it does no I/O of its own.

    Attributes:
        text: The description; empty for dialects that read variables.
        label: How errors name the source (a path, or ``LIST_LABEL``).
        colon: The meaning of ``host:n`` where the user or the dialect fixed it.
        environ: The environment variables.
        here: This machine's name.
    """

    text: str = ""
    label: str = LIST_LABEL
    colon: Colon | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    here: str = "localhost"


@dataclass(frozen=True, slots=True)
class Follow:
    """The description stands in another file.

    Attributes:
        path: As written; relative to the file that names it, or to the current folder.
        dialect: The dialect it must have; ``None`` detects it.
    """

    path: str
    dialect: str | None = None


@dataclass(frozen=True, slots=True)
class Parsed:
    """What was understood: hosts in rank order, or where to read on."""

    hosts: tuple[Host, ...] = ()
    notes: tuple[str, ...] = ()
    follow: Follow | None = None


@dataclass(frozen=True, slots=True)
class Dialect:
    """One way of writing down hosts.

    Attributes:
        name: What ``--dialect`` and ``--write`` take.
        title: What it is, for people.
        detect: Whether a description looks like this dialect.
        parse: Reads it; raises HostsError.
        write: Writes a cluster; ``None`` where writing makes no sense.
        keeps: Fields of Host that survive writing and reading back.
        environment: True when it reads variables instead of text.
        colon: Meaning of ``host:n`` when the user names this dialect.
        says: Fields of Host that it writes; those it ``keeps`` where left empty.
        reads_back: False when what it writes names the first host only.
    """

    name: str
    title: str
    detect: Callable[[Reading], bool]
    parse: Callable[[Reading], Parsed]
    write: Callable[[Cluster], str] | None = None
    keeps: frozenset[str] = frozenset()
    environment: bool = False
    colon: Colon | None = None
    says: frozenset[str] = frozenset()
    reads_back: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "says", self.says or self.keeps)


_SHOWN = 120  # characters of a line worth showing


def bad_line(label: str, number: int, line: str, expected: str) -> HostsError:
    """The error for one line of a description; ``number`` counts from 1."""
    where = f"{label}, line {number}" if label != LIST_LABEL else label
    return HostsError(f"{where}: cannot be read", found=shown(line), remedy=f"expected {expected}")


def shown(line: str) -> str:
    """The line with control characters made visible and cut to a readable length."""
    text = line.strip()
    visible = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
    return visible if len(visible) <= _SHOWN else visible[:_SHOWN] + "…"
