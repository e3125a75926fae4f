"""Spelling of class labels, and what a training says about its classes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from decimal import Decimal

from paceline.spec.formatting import pluralize

MAX_DIGITS = 20  # of a numeric label
_NUMBER = re.compile(r"[+-]?[0-9]+(?:\.[0-9]*)?")
_MAX_LISTED = 6


def label_number(label: str) -> Decimal | None:
    """Returns the value of a label that is a number, else ``None``."""
    is_number = len(label) < MAX_DIGITS and _NUMBER.fullmatch(label)
    return Decimal(label) if is_number else None


def similar_labels(labels: Iterable[str]) -> list[list[str]]:
    """Returns groups of labels that differ only in case or white space, or are equal numbers."""
    groups: dict[str | Decimal, list[str]] = {}
    for label in labels:
        number = label_number(label)
        spelling = " ".join(label.split()).casefold() if number is None else number
        groups.setdefault(spelling, []).append(label)
    return [group for group in groups.values() if len(group) > 1]


def describe_classes(noun: str, classes: Sequence[str], numbers: Iterable[int]) -> str:
    """``1,200 images of 3 classes: circle 800, square 300, triangle 100``, in descending order.

    Args:
        noun: What the samples are, such as ``image``.
        classes: Name of each class.
        numbers: Class number of each sample.
    """
    counts = Counter(dict.fromkeys(range(len(classes)), 0))
    counts.update(numbers)
    listed = [f"{' '.join(classes[number].split())[:40]} {count:,}"
              for number, count in counts.most_common()]  # fmt: skip
    if len(listed) > _MAX_LISTED:
        listed = [*listed[: _MAX_LISTED - 1], "…", listed[-1]]
    total = f"{len(classes):,} class{'es' * (len(classes) != 1)}"
    return f"{pluralize(counts.total(), noun)} of {total}: {', '.join(listed)}"
