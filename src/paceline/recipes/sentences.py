"""Sentence pairs as batches of token ids, padded to the longest of each batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.recipes.tokenizing import END_ID, PAD_ID, START_ID, Tokenizer
from paceline.spec.errors import DataError
from paceline.train import Draws

Rows = list[list[int]]


@dataclass(frozen=True)
class Sentences:
    """Tokenised pairs.

    Attributes:
        source: Token ids of each source sentence, end included.
        target: Token ids of each target sentence, without start and end.
        left_out: Pairs that were too long.
    """

    source: Rows
    target: Rows
    left_out: int = 0

    def __len__(self) -> int:
        return len(self.source)

    def lengths(self) -> list[int]:
        """The longer side of each pair."""
        both = zip(self.source, self.target, strict=True)
        return [max(len(one), len(other)) for one, other in both]

    def batch(self, ids: NDArray, draws: Draws | None) -> tuple[Tensor, ...]:  # type: ignore[type-arg]
        """Source ``[n, s]``, decoder input ``[n, t]`` and what it should say, ``[n, t]``."""
        numbers = ids.tolist()
        targets = [self.target[i] for i in numbers]
        return (
            padded([self.source[i] for i in numbers]),
            padded([[START_ID, *row] for row in targets]),
            padded([[*row, END_ID] for row in targets]),
        )


@dataclass(frozen=True)
class Sources:
    """Source sentences alone, to be translated in the order ``ids``."""

    rows: Rows
    ids: list[int]

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, ids: NDArray, draws: Draws | None) -> tuple[Tensor, ...]:  # type: ignore[type-arg]
        """Source tokens ``[n, s]``."""
        return (padded([self.rows[self.ids[i]] for i in ids.tolist()]),)


def padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """One row of ids each, padded at the end, shape ``[n, longest]``."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[PAD_ID] * (longest - len(row))] for row in rows])


def source_rows(tokenizer: Tokenizer, texts: Sequence[str], limit: int) -> Rows:
    """Ids of each source sentence, cut to ``limit`` tokens, and the end."""
    return [[*row[:limit], END_ID] for row in tokenizer.encode(texts)]


def sentences(
    pairs: Sequence[tuple[str, str]],
    tokenizers: tuple[Tokenizer, Tokenizer],
    limit: int,
    too_long: str,
) -> Sentences:
    """Tokenises pairs.

    Args:
        pairs: Source and target texts.
        tokenizers: Of source and target.
        limit: Most tokens of a sentence.
        too_long: What becomes of a pair with a longer side: ``drop``, ``cut`` or ``refuse``.

    Raises:
        DataError: A sentence is too long and that is refused, or every pair was left out.
    """
    both = [
        one.encode(texts) for one, texts in zip(tokenizers, zip(*pairs, strict=True), strict=True)
    ]
    fits = [max(len(a), len(b)) <= limit for a, b in zip(*both, strict=True)]
    if too_long == "refuse" and not all(fits):
        raise _refused(pairs[fits.index(False)], limit)
    keep = [i for i, fit in enumerate(fits) if fit or too_long == "cut"]
    if not keep:
        raise DataError(
            f"no pair has at most {limit} tokens a side",
            remedy="raise --seq-len, or --too-long cut",
        )
    source = [[*both[0][i][:limit], END_ID] for i in keep]
    return Sentences(source, [both[1][i][:limit] for i in keep], len(pairs) - len(keep))


def _refused(pair: tuple[str, str], limit: int) -> DataError:
    return DataError(
        f"a sentence is longer than --seq-len {limit} tokens",
        found=repr(max(pair, key=len)[:80]),
        remedy="raise --seq-len, or --too-long drop or cut",
    )
