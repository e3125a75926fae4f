"""Generated parallel corpora: for trying things out without any file."""

from __future__ import annotations

import random
from collections.abc import Callable

_ONES = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]

Pairs = list[tuple[str, str]]


def in_words(number: int) -> str:
    """``in_words(342) == "three hundred forty-two"``; up to 999,999."""
    if number < 20:
        return _ONES[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return _TENS[tens - 2] + (f"-{_ONES[ones]}" if ones else "")
    base, name = (1000, "thousand") if number >= 1000 else (100, "hundred")
    above, below = divmod(number, base)
    return f"{in_words(above)} {name}" + (f" {in_words(below)}" if below else "")


def numbers(seed: int, count: int = 8000) -> Pairs:
    """Different numbers below a million, as many of each length as there are, and their words."""
    draw = random.Random(seed)  # noqa: S311
    chosen: set[int] = set()
    while len(chosen) < count:
        chosen.add(draw.randrange(10 ** draw.randint(1, 6)))
    return [(str(number), in_words(number)) for number in sorted(chosen)]


def reverse(seed: int, count: int = 8000) -> Pairs:
    """Different sequences of 2 to 10 letters, and the same backwards."""
    draw = random.Random(seed)  # noqa: S311
    chosen: set[tuple[str, ...]] = set()
    while len(chosen) < count:
        chosen.add(tuple(draw.choices("abcdefghijklmnop", k=draw.randint(2, 10))))
    return [(" ".join(one), " ".join(reversed(one))) for one in sorted(chosen)]


def dummy(seed: int, count: int = 2000, words: int = 24) -> Pairs:
    """Random words, all sentences of one length: nothing can be learned from them."""
    draw = random.Random(seed)  # noqa: S311
    vocabulary = [f"w{number:x}".translate(_LETTERS) for number in range(4000)]
    sides = [[" ".join(draw.choices(vocabulary, k=words)) for _ in range(count)] for _ in range(2)]
    return list(zip(*sides, strict=True))


_LETTERS = str.maketrans("0123456789", "ghijklmnop")  # digits would become tokens of their own
MAKERS: dict[str, Callable[[int], Pairs]] = {
    "numbers": numbers,
    "reverse": reverse,
    "dummy": dummy,
}
