"""The arithmetic of collectives, as nccl-tests defines it. Pure.

``size`` is the bytes of the largest buffer of one rank (for all_gather what it receives, for
reduce_scatter what it sends). The algorithm bandwidth is size over time; the bus bandwidth is what
a link has to carry for it, comparable between collectives and with the link's own rate.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.spec.errors import SettingError

PARTS = ("__init__.py", "bench", "spec")  # of the package: all that the measuring job needs
COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "all_to_all",
    "sendrecv",
)
REDUCING = {"all_reduce", "reduce_scatter", "reduce"}
ROOTED = {"broadcast", "reduce"}
TYPES = {"uint8": 1, "int32": 4, "int64": 8, "half": 2, "bfloat16": 2, "float": 4, "double": 8}
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def bus_factor(collective: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth."""
    if collective == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if collective in ("all_gather", "reduce_scatter", "all_to_all"):
        return (ranks - 1) / ranks
    return 1.0


def parse_size(text: str) -> int:
    """Bytes of ``8``, ``64K``, ``128M``. SettingError for anything else."""
    match = re.fullmatch(r"(\d+)([kmg]?)(?:i?b)?", text.strip().lower())
    if not match:
        raise SettingError(f"{text!r} is no size", remedy="Write for example 8, 64K or 128M")
    return int(match[1]) * _UNITS[match[2]]


def sizes(smallest: int, largest: int, factor: int, step: int) -> list[int]:
    """The sizes from the smallest to the largest: times ``factor``, or plus ``step`` if given."""
    if smallest > largest or smallest < 1 or (factor < 2 and step < 1):
        raise SettingError(
            f"no sizes from {smallest} to {largest} by factor {factor}",
            remedy="-b SMALLEST -e LARGEST -f 2 (or -i BYTES)",
        )
    found = [smallest]
    while (following := found[-1] + step if step else found[-1] * factor) <= largest:
        found.append(following)
    return found


def elements(collective: str, size: int, width: int, ranks: int) -> int:
    """Elements of the buffer: whole ones, and a multiple of the ranks where it is divided."""
    count = max(1, size // width)
    if collective in ("all_gather", "reduce_scatter", "all_to_all"):
        return max(ranks, count // ranks * ranks)
    return count


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        collective: Which.
        size: Bytes, see above.
        count: Elements.
        type: Of an element.
        redop: Reduction, or ``none``.
        root: Rank of the root, -1 without one.
        time_us: Mean time of one call, of the slowest rank.
        algbw, busbw: In GB/s (10^9 bytes).
        wrong: Elements with a wrong value, over all ranks; -1 when not checked.
        error: Why it could not be measured; empty when it could.
    """

    collective: str
    size: int
    count: int
    type: str
    redop: str
    root: int
    time_us: float
    algbw: float
    busbw: float
    wrong: int
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def row(collective: str, count: int, kind: str, redop: str, root: int, ranks: int,
        seconds: float, wrong: int) -> Row:  # fmt: skip
    """A measured line."""
    size = count * TYPES[kind]
    algbw = size / seconds / 1e9 if seconds > 0 else 0.0
    return Row(
        collective,
        size,
        count,
        kind,
        redop if collective in REDUCING else "none",
        root if collective in ROOTED else -1,
        seconds * 1e6,
        algbw,
        algbw * bus_factor(collective, ranks),
        wrong,
    )


def text(rows: Sequence[Row]) -> list[str]:
    """The table in nccl-tests' columns, one block a collective, with its summary."""
    lines = []
    for collective in dict.fromkeys(one.collective for one in rows):
        own = [one for one in rows if one.collective == collective]
        lines += [f"# {collective}", _HEAD, _UNITS_LINE, *map(_line, own), *_summary(own), ""]
    return lines


_COLUMNS = "{:>12} {:>12} {:>9} {:>6} {:>5} {:>10} {:>8} {:>8} {:>6}"
_HEAD = (
    "#"
    + _COLUMNS.format("size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong")[
        1:
    ]
)
_UNITS_LINE = (
    "#" + _COLUMNS.format("(B)", "(elements)", "", "", "", "(us)", "(GB/s)", "(GB/s)", "")[1:]
)


def _line(one: Row) -> str:
    if one.error:
        return f"{one.size:>12} {one.count:>12} {one.type:>9} {one.error}"
    wrong = "N/A" if one.wrong < 0 else str(one.wrong)
    return _COLUMNS.format(
        one.size,
        one.count,
        one.type,
        one.redop,
        one.root,
        f"{one.time_us:.1f}",
        f"{one.algbw:.4f}",
        f"{one.busbw:.4f}",
        wrong,
    )


def _summary(rows: Sequence[Row]) -> list[str]:
    measured = [one for one in rows if not one.error]
    if not measured:
        return []
    wrong = sum(max(0, one.wrong) for one in measured)
    mean = sum(one.busbw for one in measured) / len(measured)
    return [
        f"# Out of bounds values : {wrong} {'OK' if wrong == 0 else 'FAILED'}",
        f"# Avg bus bandwidth    : {mean:.4f}",
    ]


def best(rows: Sequence[Row], collective: str) -> float:
    """The highest bus bandwidth of a collective, in GB/s; 0 when it was not measured."""
    return max((one.busbw for one in rows if one.collective == collective), default=0.0)


def share(busbw: float, link_bits: float) -> float:
    """Bus bandwidth (GB/s) as a share of the link's own rate (bit/s)."""
    return busbw * 8e9 / link_bits if link_bits > 0 else 0.0
