"""Spelling of class labels, and what a training says about its classes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from decimal import Decimal

from paceline.spec.formatting import pluralize

MAX_DIGITS = 20  # of a numeric label
_NUMBER = re.compile(r"[+-]?[0-9]+(?:\.[0-9]*)?")
_MAX_LISTED = 6


def label_number(label: str) -> Decimal | None:
    """Returns the value of a label that is a number, else ``None``."""
    is_number = len(label) < MAX_DIGITS and _NUMBER.fullmatch(label)
    return Decimal(label) if is_number else None


def unify_numbers(labels: Iterable[str], known: Collection[str] = ()) -> dict[str, str]:
    """Returns what to write for labels that equal another one as numbers: ``1`` for ``1.0``.

    Args:
        known: Labels of a trained model, which keep their spelling.
    """
    spellings: dict[Decimal, set[str]] = {}
    for label in {*labels, *known}:
        if (value := label_number(label)) is not None:
            spellings.setdefault(value, set()).add(label)
    unified = dict[str, str]()
    for equal in spellings.values():
        trained = equal.intersection(known)
        candidates = trained or {re.sub(r"\.0*$", "", label) for label in equal}
        shortest = min(candidates, key=lambda label: (len(label), label))
        unified |= dict.fromkeys(equal - trained - {shortest}, shortest)
    return unified


def similar_labels(labels: Iterable[str]) -> list[list[str]]:
    """Returns groups of labels that differ only in case or white space."""
    groups: dict[str, list[str]] = {}
    for label in labels:
        groups.setdefault(" ".join(label.split()).casefold(), []).append(label)
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
