"""Reads and writes Slurm's syntax: ``gpu-[01-03,07],login``, ``2(x3),1`` and ``a100:2``.

Text may follow the last bracket, as in pdsh. Written lists are valid for Slurm, so only names that
end in a number are compressed.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from typing import TypeVar

from paceline.hosts.dialect import UnreadableError

T = TypeVar("T")
MAX_HOSTS = 65536
"""Longer descriptions are taken for a mistake and refused."""

_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"([0-9]{1,18})-([0-9]{1,18})")
_SINGLE = re.compile(r"[0-9]{1,18}")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")
_GPUS = re.compile(r"(?:([\w.+-]{1,60}):)?([0-9]{1,4})|([A-Za-z][\w.+-]{0,59})", re.ASCII)
_NUMBERED = re.compile(r"([^:\[\]]*?)([0-9]{1,18})")


def split_list(text: str) -> list[str]:
    """Splits at commas outside brackets."""
    parts, depth, start = [], 0, 0
    for index, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            raise UnreadableError("every `[` closed by one `]`, not nested: node[01-04]")
        if char == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    if depth:
        raise UnreadableError("a `]` for every `[`: node[01-04]")
    return [*parts, text[start:]]


def expand(text: str) -> list[str]:
    """Returns all names of a node list; of several brackets the last varies fastest."""
    return collect(expand_item(part) for part in split_list(text))


def expand_item(part: str) -> list[str]:
    """Returns the names of one item of a node list."""
    pieces = _BRACKETS.split(part)  # text, bracket, text, bracket, … text
    choices = [_bracket(p) if i % 2 else [p] for i, p in enumerate(pieces)]
    if math.prod(len(choice) for choice in choices) > MAX_HOSTS:
        raise _too_many()
    return ["".join(combination) for combination in itertools.product(*choices)]


def collect(parts: Iterable[Sequence[T]]) -> list[T]:
    """Joins what parts of a description expand to, up to the largest number of hosts."""
    collected: list[T] = []
    for part in parts:
        collected += part
        if len(collected) > MAX_HOSTS:
            raise _too_many()
    return collected


def expand_counts(text: str) -> list[int]:
    """Expands ``2(x3),1`` to ``[2, 2, 2, 1]``, one number for each node."""
    counts: list[int] = []
    for item in text.split(","):
        match = _COUNT.fullmatch(item.strip())
        if not match:
            raise UnreadableError("counts such as `2(x3),1`")
        repeat = int(match[2] or 1)
        if len(counts) + repeat > MAX_HOSTS:
            raise _too_many()
        counts.extend([int(match[1])] * repeat)
    return counts


def expand_gpus(text: str) -> list[tuple[str, int]]:
    """Parses ``a100:2,v100`` into kinds, which may be empty, and numbers, by default 1."""
    gpus: list[tuple[str, int]] = []
    for item in text.split(","):
        match = _GPUS.fullmatch(item.strip())
        if not match:
            raise UnreadableError("a number of GPUs such as `2` or `a100:2`")
        gpus.append((match[1] or match[3] or "", int(match[2] or 1)))
    return gpus


def compress(names: Iterable[str]) -> str:
    """Returns the node list of the names, in order; the inverse of ``expand``."""
    groups = itertools.groupby(names, key=_prefix)
    return ",".join(part for prefix, group in groups for part in _join(prefix, list(group)))


def _bracket(body: str) -> list[str]:
    return collect(_numbers(item) for item in body.split(","))


def _numbers(item: str) -> Sequence[str]:
    if _SINGLE.fullmatch(item):
        return [item]
    match = _RANGE.fullmatch(item)
    if not match:
        raise UnreadableError("numbers and ranges without steps in brackets: node[01-04,07]")
    low, high = match[1], match[2]
    if int(high) < int(low):
        raise UnreadableError(f"a rising range instead of `{item}`: [01-04]")
    if int(high) - int(low) >= MAX_HOSTS:
        raise _too_many()
    return [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]


def _too_many() -> UnreadableError:
    return UnreadableError(f"at most {MAX_HOSTS} hosts")


def _prefix(name: str) -> str | None:
    """Returns what names must share to be put in one bracket; ``None`` if they end in no number."""
    match = _NUMBERED.fullmatch(name)
    return match[1] if match else None


def _join(prefix: str | None, names: list[str]) -> list[str]:
    if prefix is None or len(names) == 1:
        return names
    numbers = [name.removeprefix(prefix) for name in names]
    return [f"{prefix}[{','.join(_ranges(numbers))}]"]


def _ranges(numbers: list[str]) -> list[str]:
    runs: list[list[str]] = []
    for number in numbers:
        if runs and _continues(runs[-1], number):
            runs[-1].append(number)
        else:
            runs.append([number])
    return [run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]


def _continues(run: list[str], number: str) -> bool:
    return number == str(int(run[-1]) + 1).zfill(len(run[0]))
