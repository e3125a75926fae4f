"""Draws a matrix of pairs as an SVG heat map. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from html import escape

CELL, MARGIN = 72, 110


def svg(names: Sequence[str], values: Mapping[tuple[str, str], float],
        labels: Mapping[tuple[str, str], str], title: str) -> str:  # fmt: skip
    """Draws a heat map: darker green for higher values, red for less than half of the highest.

    ``labels`` are the texts of the cells, so that no information is in the colour alone.
    """
    side = MARGIN + CELL * len(names)
    highest = max(values.values(), default=1.0) or 1.0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{side + 20}" height="{side + 40}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="22" font-size="15">{escape(title)}</text>',
    ]
    for index, name in enumerate(names):
        middle = MARGIN + CELL * index + CELL // 2
        parts += [
            f'<text x="{middle}" y="{MARGIN - 8}" text-anchor="middle">{escape(name)}</text>',
            f'<text x="{MARGIN - 8}" y="{middle + 4}" text-anchor="end">{escape(name)}</text>',
        ]
    for (row, source), (column, target) in itertools.product(enumerate(names), repeat=2):
        if (pair := (source, target)) in values:
            parts += _cell(row, column, values[pair] / highest, labels.get(pair, ""))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _cell(row: int, column: int, share: float, label: str) -> list[str]:
    x, y = MARGIN + CELL * column, MARGIN + CELL * row
    hue = 140 if share >= 0.5 else 0
    lightness = 90 - 35 * share if share >= 0.5 else 60 + 30 * share
    return [
        f'<rect x="{x + 1}" y="{y + 1}" width="{CELL - 2}" height="{CELL - 2}" '
        f'fill="hsl({hue} 60% {lightness:.0f}%)"/>',
        f'<text x="{x + CELL // 2}" y="{y + CELL // 2 + 4}" text-anchor="middle">'
        f"{escape(label)}</text>",
    ]
