"""How good translations are: BLEU, chrF, character and word error rates, exact matches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from paceline.program import library

T = TypeVar("T", bound=object)


def distance(a: Sequence[T], b: Sequence[T]) -> int:
    """Fewest insertions, deletions and replacements that make ``b`` of ``a``.

    Hyyrö's form of Myers' bit-parallel algorithm: a column of the table is two integers, of which
    one bit says that the cell below is one more, one less.
    """
    if not a:
        return len(b)
    where: dict[T, int] = {}
    for place, item in enumerate(a):
        where[item] = where.get(item, 0) | 1 << place
    ones, last = (1 << len(a)) - 1, 1 << (len(a) - 1)
    more, less, result = ones, 0, len(a)
    for item in b:
        match = where.get(item, 0)
        diagonal = (((match & more) + more) ^ more) | match | less
        right_more, right_less = less | (ones & ~(diagonal | more)), more & diagonal
        result += bool(right_more & last) - bool(right_less & last)
        right_more, right_less = (right_more << 1 | 1) & ones, right_less << 1 & ones
        more, less = right_less | (ones & ~(diagonal | right_more)), right_more & diagonal
    return result


def error_rate(outputs: Sequence[Sequence[T]], references: Sequence[Sequence[T]]) -> float:
    """Edits over all sentences, as a part of the references' length (may exceed 1)."""
    edits = sum(distance(one, other) for one, other in zip(references, outputs, strict=True))
    return edits / max(1, sum(len(one) for one in references))


def scores(outputs: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Figures over the whole set: bleu and chrf in percent, the others as parts of 1."""
    sacrebleu = library("sacrebleu", "BLEU and chrF are computed")
    words = [one.split() for one in outputs], [one.split() for one in references]
    same = sum(one == other for one, other in zip(*words, strict=True))
    return {
        "bleu": sacrebleu.corpus_bleu(list(outputs), [list(references)]).score,
        "chrf": sacrebleu.corpus_chrf(list(outputs), [list(references)]).score,
        "cer": error_rate(outputs, references),
        "wer": error_rate(*words),
        "exact": same / max(1, len(outputs)),
    }
