"""The arithmetic of collectives, as nccl-tests defines it. Pure.

``size`` is the bytes of the largest buffer of one rank (for all_gather what it receives, for
reduce_scatter what it sends). The algorithm bandwidth is size over time; the bus bandwidth is what
a link has to carry for it, comparable between collectives and with the link's own rate.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.spec.errors import SettingError

PARTS = (
    "__init__.py",
    "bench",
    "program.py",
    "spec",
)  # of the package: all that the measuring job needs
COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "alltoall",
    "sendrecv",
)
IN_PLACE = {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"}  # of these both
REDUCING = {"all_reduce", "reduce_scatter", "reduce"}
ROOTED = {"broadcast", "reduce"}
TYPES = {"int8": 1, "uint8": 1, "int32": 4, "int64": 8, "half": 2, "bfloat16": 2, "float": 4,
         "double": 8}  # fmt: skip
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def bus_factor(collective: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth."""
    if collective == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if collective in ("all_gather", "reduce_scatter", "alltoall"):
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
    if collective in ("all_gather", "reduce_scatter", "alltoall"):
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
        time_us: Time of one call whose result stands in a buffer of its own.
        algbw, busbw: In GB/s (10^9 bytes).
        wrong: Elements with a wrong value, over all ranks; -1 when not checked.
        in_place: The same four of a call that overwrites its input; ``None`` where there is none.
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
    in_place: tuple[float, float, float, int] | None = None
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Row:
        inner = said.get("in_place")
        return cls(**{**said, "in_place": None if inner is None else tuple(inner)})

    @property
    def peak(self) -> float:
        """The better bus bandwidth of the two."""
        return max(self.busbw, self.in_place[2] if self.in_place else 0.0)

    @property
    def wrong_values(self) -> int:
        return max(0, self.wrong) + max(0, self.in_place[3] if self.in_place else 0)


def row(collective: str, count: int, kind: str, redop: str, root: int, ranks: int,
        seconds: float, wrong: int, in_place: tuple[float, int] | None = None) -> Row:  # fmt: skip
    """A measured line.

    Args:
        collective, count, kind, redop, root, ranks: What was called.
        seconds, wrong: Of one call into another buffer.
        in_place: The same two of one that overwrites its input.
    """

    def rates(taken: float) -> tuple[float, float, float]:
        algbw = count * TYPES[kind] / taken / 1e9 if taken > 0 else 0.0
        return taken * 1e6, algbw, algbw * bus_factor(collective, ranks)

    return Row(
        collective,
        count * TYPES[kind],
        count,
        kind,
        redop if collective in REDUCING else "none",
        root if collective in ROOTED else -1,
        *rates(seconds),
        wrong,
        None if in_place is None else (*rates(in_place[0]), in_place[1]),
    )


def text(rows: Sequence[Row]) -> list[str]:
    """The table as nccl-tests prints it, one block a collective, with its summary."""
    lines = []
    for collective in dict.fromkeys(one.collective for one in rows):
        own = [one for one in rows if one.collective == collective]
        lines += [f"# {collective}", "#", *_HEAD, *map(_line, own), *_summary(own), ""]
    return lines


_ABOUT = "{:>12}  {:>12}  {:>8}  {:>6}  {:>6}"
_RATES = "  {:>7}  {:>6}  {:>6}  {:>5}"
_TITLES = "  {:>7}  {:>6}  {:>6} {:>6}"
_WIDTH = len(_ABOUT.format(*[""] * 5)), len(_RATES.format(*[""] * 4))


def _head(about: Sequence[str], rates: Sequence[str]) -> str:
    return "#" + (_ABOUT.format(*about) + 2 * _TITLES.format(*rates))[1:].rstrip()


_SIDES = "{:>{w}}{:>{w}}".format("out-of-place", "in-place", w=_WIDTH[1])
_HEAD = (
    "#" + (" " * _WIDTH[0] + _SIDES)[1:],
    _head(("size", "count", "type", "redop", "root"), ("time", "algbw", "busbw", "#wrong")),
    _head(("(B)", "(elements)", "", "", ""), ("(us)", "(GB/s)", "(GB/s)", "")),
)


def _line(one: Row) -> str:
    about = _ABOUT.format(one.size, one.count, one.type, one.redop, one.root)
    if one.error:
        return f"{about}  {one.error}"
    return (
        about
        + _rates(one.time_us, one.algbw, one.busbw, one.wrong)
        + (_RATES.format(*["N/A"] * 4) if one.in_place is None else _rates(*one.in_place))
    )


def _rates(time_us: float, algbw: float, busbw: float, wrong: int) -> str:
    counted = "N/A" if wrong < 0 else wrong
    return _RATES.format(_time(time_us), _rate(algbw), _rate(busbw), counted)


def _time(us: float) -> str:
    return f"{us:.0f}" if us >= 10_000 else f"{us:.1f}" if us >= 100 else f"{us:.2f}"


def _rate(found: float) -> str:
    """As nccl-tests, but for what would be nearly nothing in its two places: Ethernet."""
    return f"{found:.4f}" if found < 1 else f"{found:.2f}" if found < 1000 else f"{found:.0f}"


def _summary(rows: Sequence[Row]) -> list[str]:
    measured = [one for one in rows if not one.error]
    if not measured:
        return []
    wrong = sum(one.wrong_values for one in measured)
    every = [one.busbw for one in measured] + [one.in_place[2] for one in measured if one.in_place]
    return [
        f"# Out of bounds values : {wrong} {'OK' if wrong == 0 else 'FAILED'}",
        f"# Avg bus bandwidth    : {sum(every) / len(every):g}",
        "#",
    ]


def best(rows: Sequence[Row], collective: str) -> float:
    """The highest bus bandwidth of a collective, in GB/s; 0 when it was not measured."""
    return max((one.peak for one in rows if one.collective == collective), default=0.0)


def share(busbw: float, link_bits: float) -> float:
    """Bus bandwidth (GB/s) as a share of the link's own rate (bit/s)."""
    return busbw * 8e9 / link_bits if link_bits > 0 else 0.0
