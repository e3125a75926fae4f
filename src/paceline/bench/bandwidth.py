"""Bandwidths of collectives, as nccl-tests defines them. Pure.

``size`` is the bytes of the largest buffer of one rank: for all_gather what it receives, for
reduce_scatter what it sends. The algorithm bandwidth is size over time. The bus bandwidth is what
a link carries for it, which can be compared between collectives and with the link's nominal rate.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.spec.errors import SettingError

PARTS = ("__init__.py", "bench", "program.py", "spec")  # of the package, which the job needs
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "alltoall",
               "sendrecv")  # fmt: skip
IN_PLACE = {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"}
REDUCING = {"all_reduce", "reduce_scatter", "reduce"}
ROOTED = {"broadcast", "reduce"}
TYPES = {"int8": 1, "uint8": 1, "int32": 4, "int64": 8, "half": 2, "bfloat16": 2, "float": 4,
         "double": 8}  # fmt: skip
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def bus_factor(collective: str, ranks: int) -> float:
    """The ratio of bus bandwidth to algorithm bandwidth."""
    if collective == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if collective in ("all_gather", "reduce_scatter", "alltoall"):
        return (ranks - 1) / ranks
    return 1.0


def parse_size(text: str) -> int:
    """Bytes of a size such as ``8``, ``64K`` or ``128M``. Raises SettingError."""
    match = re.fullmatch(r"(\d+)([kmg]?)(?:i?b)?", text.strip().lower())
    if not match:
        raise SettingError(f"{text!r} is not a size", remedy="Write for example 8, 64K or 128M")
    return int(match[1]) * _UNITS[match[2]]


def sizes(smallest: int, largest: int, factor: int, step: int) -> list[int]:
    """Sizes from the smallest to the largest: times ``factor``, or plus ``step`` if given."""
    if smallest > largest or smallest < 1 or (factor < 2 and step < 1):
        raise SettingError(
            f"no sizes from {smallest} to {largest} by factor {factor}",
            remedy="-b SMALLEST -e LARGEST -f 2 (or -i BYTES)",
        )
    values, size = [], smallest
    while size <= largest:
        values.append(size)
        size = size + step if step else size * factor
    return values


def elements(collective: str, size: int, width: int, ranks: int) -> int:
    """Number of elements of the buffer; a multiple of the ranks if they divide it."""
    count = max(1, size // width)
    if collective in ("all_gather", "reduce_scatter", "alltoall"):
        return max(ranks, count // ranks * ranks)
    return count


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table; its fields are those of the JSON result.

    Attributes:
        size: In bytes, see above.
        redop: Reduction, or ``none``.
        root: Rank of the root, -1 without one.
        time_us: Time of one out-of-place call.
        algbw, busbw: In GB/s (10^9 bytes).
        wrong: Elements with a wrong value, over all ranks; -1 when not checked.
        in_place: The same four values of an in-place call, if there is one.
        error: Why it could not be measured; empty if it was.
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
    def from_json(cls, record: Mapping[str, Any]) -> Row:
        in_place = record.get("in_place")
        return cls(**{**record, "in_place": None if in_place is None else tuple(in_place)})

    @property
    def peak(self) -> float:
        """The higher bus bandwidth of both calls."""
        return max(self.busbw, self.in_place[2] if self.in_place else 0.0)

    @property
    def wrong_values(self) -> int:
        return max(0, self.wrong) + max(0, self.in_place[3] if self.in_place else 0)


def make_row(collective: str, count: int, kind: str, redop: str, root: int, ranks: int,
             seconds: float, wrong: int,
             in_place: tuple[float, int] | None = None) -> Row:  # fmt: skip
    """Makes a row of measurements.

    Args:
        collective, count, kind, redop, root, ranks: The call.
        seconds, wrong: Of one out-of-place call.
        in_place: The same two values of an in-place call.
    """

    def rates(seconds: float) -> tuple[float, float, float]:
        algbw = count * TYPES[kind] / seconds / 1e9 if seconds > 0 else 0.0
        return seconds * 1e6, algbw, algbw * bus_factor(collective, ranks)

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


def format_rows(rows: Sequence[Row]) -> list[str]:
    """The table in nccl-tests' format, one block with a summary for each collective."""
    lines = []
    for collective in dict.fromkeys(row.collective for row in rows):
        block = [row for row in rows if row.collective == collective]
        lines += [f"# {collective}", "#", *_HEAD, *map(_format_row, block), *_summary(block), ""]
    return lines


_CALL = "{:>12}  {:>12}  {:>8}  {:>6}  {:>6}"
_RATES = "  {:>7}  {:>6}  {:>6}  {:>5}"
_TITLES = "  {:>7}  {:>6}  {:>6} {:>6}"
_WIDTH = len(_CALL.format(*[""] * 5)), len(_RATES.format(*[""] * 4))


def _head(call: Sequence[str], rates: Sequence[str]) -> str:
    return "#" + (_CALL.format(*call) + 2 * _TITLES.format(*rates))[1:].rstrip()


_SIDES = "{:>{w}}{:>{w}}".format("out-of-place", "in-place", w=_WIDTH[1])
_HEAD = (
    "#" + (" " * _WIDTH[0] + _SIDES)[1:],
    _head(("size", "count", "type", "redop", "root"), ("time", "algbw", "busbw", "#wrong")),
    _head(("(B)", "(elements)", "", "", ""), ("(us)", "(GB/s)", "(GB/s)", "")),
)


def _format_row(row: Row) -> str:
    call = _CALL.format(row.size, row.count, row.type, row.redop, row.root)
    if row.error:
        return f"{call}  {row.error}"
    in_place = _RATES.format(*["N/A"] * 4) if row.in_place is None else _format_rates(*row.in_place)
    return call + _format_rates(row.time_us, row.algbw, row.busbw, row.wrong) + in_place


def _format_rates(time_us: float, algbw: float, busbw: float, wrong: int) -> str:
    digits = 0 if time_us >= 10_000 else 1 if time_us >= 100 else 2
    num_wrong = "N/A" if wrong < 0 else wrong
    return _RATES.format(f"{time_us:.{digits}f}", _format_bandwidth(algbw),
                         _format_bandwidth(busbw), num_wrong)  # fmt: skip


def _format_bandwidth(value: float) -> str:
    """nccl-tests' format, with more digits for the low bandwidths of Ethernet."""
    return f"{value:.4f}" if value < 1 else f"{value:.2f}" if value < 1000 else f"{value:.0f}"


def _summary(rows: Sequence[Row]) -> list[str]:
    measured = [row for row in rows if not row.error]
    if not measured:
        return []
    wrong = sum(row.wrong_values for row in measured)
    bandwidths = [row.busbw for row in measured]
    bandwidths += [row.in_place[2] for row in measured if row.in_place]
    return [
        f"# Out of bounds values : {wrong} {'OK' if wrong == 0 else 'FAILED'}",
        f"# Avg bus bandwidth    : {sum(bandwidths) / len(bandwidths):g}",
        "#",
    ]


def peak_bandwidth(rows: Sequence[Row], collective: str) -> float:
    """The highest bus bandwidth of a collective, in GB/s; 0 if it was not measured."""
    return max((row.peak for row in rows if row.collective == collective), default=0.0)


def share(busbw: float, link_bits: float) -> float:
    """Bus bandwidth (GB/s) as a share of the link's nominal rate (bit/s)."""
    return busbw * 8e9 / link_bits if link_bits > 0 else 0.0
