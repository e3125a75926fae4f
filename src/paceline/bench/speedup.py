"""The one form of a picture of speed-ups: SVG, with the ideal line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_WIDTH, _HEIGHT, _EDGE = 480, 320, 48
_BLUE = "#1f6fb2"


@dataclass(frozen=True, slots=True)
class Point:
    """One speed-up.

    Attributes:
        at: Hosts or processes.
        speedup: Against the first.
        label: Stands beside it.
        low, high: Speed-ups that it may be, too; an error bar where they differ.
    """

    at: int
    speedup: float
    label: str
    low: float = 0.0
    high: float = 0.0


def speedups(points: Sequence[Point], most: int, over: str, title: str) -> str:
    """Speed-up over hosts or processes.

    Args:
        points: To draw.
        most: The end of the horizontal axis.
        over: What that axis counts.
        title: Above the picture.
    """
    highest = max([float(most), *(one.speedup for one in points)])

    def place(at: float, speedup: float) -> tuple[float, float]:
        x = _EDGE + (at / most) * (_WIDTH - 2 * _EDGE)
        return x, _HEIGHT - _EDGE - (min(speedup, highest) / highest) * (_HEIGHT - 2 * _EDGE)

    (x0, y0), (x1, y1) = place(0, 0), place(most, most)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<line x1="{x0}" y1="{y0}" x2="{x1:.1f}" y2="{y0}" stroke="black"/>',
        f'<line x1="{x0}" y1="{y0}" x2="{x0}" y2="{_EDGE}" stroke="black"/>',
        f'<line x1="{x0}" y1="{y0}" x2="{x1:.1f}" y2="{y1:.1f}" stroke="gray" '
        'stroke-dasharray="4"/>',
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 10}" text-anchor="middle">{over}</text>',
        f'<text x="{_EDGE}" y="{_EDGE - 16}">{title} (dashed: ideal)</text>',
    ]
    for one in points:
        x, y = place(one.at, one.speedup)
        if one.low != one.high:
            bar = " ".join(
                f'y{end}="{place(one.at, value)[1]:.1f}"'
                for end, value in ((1, one.high), (2, one.low))
            )
            parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" {bar} stroke="{_BLUE}"/>')
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{_BLUE}"/>')
        parts.append(f'<text x="{x - 8:.1f}" y="{y - 9:.1f}" text-anchor="end">{one.label}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
