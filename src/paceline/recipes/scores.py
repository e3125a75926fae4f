"""Scores of translations: BLEU, chrF, character and word error rates, exact matches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from paceline.program import library

T = TypeVar("T", bound=object)


def edit_distance(a: Sequence[T], b: Sequence[T]) -> int:
    """Returns the minimum number of insertions, deletions and replacements from ``a`` to ``b``.

    Bit-parallel algorithm of Myers (1999) in the form of Hyyrö (2003): the bits of two integers are
    the positive and negative differences between vertical neighbours in a column of the table.
    """
    if not a:
        return len(b)
    positions: dict[T, int] = {}
    for place, item in enumerate(a):
        positions[item] = positions.get(item, 0) | 1 << place
    all_bits, last_bit = (1 << len(a)) - 1, 1 << (len(a) - 1)
    positive, negative, result = all_bits, 0, len(a)
    for item in b:
        match = positions.get(item, 0)
        diagonal = (((match & positive) + positive) ^ positive) | match | negative
        row_positive = negative | (all_bits & ~(diagonal | positive))
        row_negative = positive & diagonal
        result += bool(row_positive & last_bit) - bool(row_negative & last_bit)
        row_positive = (row_positive << 1 | 1) & all_bits
        row_negative = row_negative << 1 & all_bits
        positive = row_negative | (all_bits & ~(diagonal | row_positive))
        negative = row_positive & diagonal
    return result


def error_rate(outputs: Sequence[Sequence[T]], references: Sequence[Sequence[T]]) -> float:
    """Returns edits over all sentences divided by the references' length; may exceed 1."""
    edits = sum(
        edit_distance(reference, output)
        for reference, output in zip(references, outputs, strict=True)
    )
    return edits / max(1, sum(len(reference) for reference in references))


def translation_scores(outputs: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Returns scores over the whole set: bleu and chrf in percent, the others as fractions."""
    sacrebleu = library("sacrebleu", "BLEU and chrF are computed")
    token_lists = [text.split() for text in outputs], [text.split() for text in references]
    matches = sum(text == reference for text, reference in zip(*token_lists, strict=True))
    return {
        "bleu": sacrebleu.corpus_bleu(list(outputs), [list(references)]).score,
        "chrf": sacrebleu.corpus_chrf(list(outputs), [list(references)]).score,
        "cer": error_rate(outputs, references),
        "wer": error_rate(*token_lists),
        "exact": matches / max(1, len(outputs)),
    }
