"""Draws speed-ups as SVG, with the ideal line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_WIDTH, _HEIGHT, _EDGE = 480, 320, 48
_BLUE = "#1f6fb2"


@dataclass(frozen=True, slots=True)
class Point:
    """One speed-up.

    Attributes:
        at: Number of hosts or processes.
        speedup: Relative to the first point.
        low, high: Ends of its error bar, if they differ.
    """

    at: int
    speedup: float
    label: str
    low: float = 0.0
    high: float = 0.0


def speedups(points: Sequence[Point], max_at: int, unit: str, title: str) -> str:
    """Draws speed-ups over hosts or processes.

    Args:
        max_at: The end of the horizontal axis.
        unit: What that axis counts.
    """
    highest = max([float(max_at), *(point.speedup for point in points)])

    def place(at: float, speedup: float) -> tuple[float, float]:
        x = _EDGE + (at / max_at) * (_WIDTH - 2 * _EDGE)
        return x, _HEIGHT - _EDGE - (min(speedup, highest) / highest) * (_HEIGHT - 2 * _EDGE)

    (x0, y0), (x1, y1) = place(0, 0), place(max_at, max_at)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<line x1="{x0}" y1="{y0}" x2="{x1:.1f}" y2="{y0}" stroke="black"/>',
        f'<line x1="{x0}" y1="{y0}" x2="{x0}" y2="{_EDGE}" stroke="black"/>',
        f'<line x1="{x0}" y1="{y0}" x2="{x1:.1f}" y2="{y1:.1f}" stroke="gray" '
        'stroke-dasharray="4"/>',
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 10}" text-anchor="middle">{unit}</text>',
        f'<text x="{_EDGE}" y="{_EDGE - 16}">{title} (dashed: ideal)</text>',
    ]
    for point in points:
        x, y = place(point.at, point.speedup)
        if point.low != point.high:
            bar = " ".join(
                f'y{end}="{place(point.at, value)[1]:.1f}"'
                for end, value in ((1, point.high), (2, point.low))
            )
            parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" {bar} stroke="{_BLUE}"/>')
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{_BLUE}"/>')
        parts.append(
            f'<text x="{x - 8:.1f}" y="{y - 9:.1f}" text-anchor="end">{point.label}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"
