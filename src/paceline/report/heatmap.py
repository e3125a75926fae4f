"""A matrix of pairs as a picture: SVG, written by hand, seen in any browser. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

CELL, MARGIN = 72, 110


def svg(names: Sequence[str], values: Mapping[tuple[str, str], float],
        labels: Mapping[tuple[str, str], str], title: str) -> str:  # fmt: skip
    """A heat map; the darker the green, the higher the value, red for under half of the best.

    Args:
        names: Rows and columns.
        values: By (row, column).
        labels: What stands in the cells, so that colour never stands alone.
        title: Above it.
    """
    side = MARGIN + CELL * len(names)
    best = max(values.values(), default=1.0) or 1.0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{side + 20}" height="{side + 40}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="22" font-size="15">{escape(title)}</text>',
    ]
    for at, name in enumerate(names):
        middle = MARGIN + CELL * at + CELL // 2
        parts.append(
            f'<text x="{middle}" y="{MARGIN - 8}" text-anchor="middle">{escape(name)}</text>'
        )
        parts.append(
            f'<text x="{MARGIN - 8}" y="{middle + 4}" text-anchor="end">{escape(name)}</text>'
        )
    for row, one in enumerate(names):
        for column, other in enumerate(names):
            if (one, other) in values:
                share = values[one, other] / best
                parts += _cell(row, column, share, labels.get((one, other), ""))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _cell(row: int, column: int, share: float, label: str) -> list[str]:
    x, y = MARGIN + CELL * column, MARGIN + CELL * row
    hue = 140 if share >= 0.5 else 0
    light = 90 - 35 * share if share >= 0.5 else 60 + 30 * share
    return [
        f'<rect x="{x + 1}" y="{y + 1}" width="{CELL - 2}" height="{CELL - 2}" '
        f'fill="hsl({hue} 60% {light:.0f}%)"/>',
        f'<text x="{x + CELL // 2}" y="{y + CELL // 2 + 4}" text-anchor="middle">'
        f"{escape(label)}</text>",
    ]
