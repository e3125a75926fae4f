"""Reads the progress bar that a script draws: tqdm's, or that of rich in Lightning. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_BYTES = 4096  # of the latest output that are searched
MAX_TITLE_CHARS = 80
_COUNTS = r"(?P<step>\d{1,12}(?:\.\d{1,9})?[kMG]?)/(?P<steps>\d{1,12}(?:\.\d{1,9})?[kMG]?)"
_RATE = r"(?P<rate>[\d.?]{1,12} ?(?:[^\W\d]{1,12}/s|s/[^\W\d]{1,12}))"
_TQDM = re.compile(
    rf"\b\d{{1,3}}%\|[^|\r\n]{{0,200}}\| {{0,9}}{_COUNTS} \[[\d:]{{4,12}}<(?P<left>[\d:?]{{1,12}}),"
    rf" {{0,9}}{_RATE}(?:, (?P<more>[^\]\r\n]{{0,200}}))?\]"
)
_RICH = re.compile(
    rf"[━╸╺] {{0,200}}{_COUNTS} [\d:]{{4,12}} • (?P<left>[\d:-]{{1,12}}) {_RATE}"
    r" {0,9}(?P<more>[^\r\n]{0,200})"
)
_FACTORS = {"k": 1e3, "M": 1e6, "G": 1e9}


@dataclass(frozen=True, slots=True)
class ScriptProgress:
    """The state of a script's own progress bar.

    Attributes:
        title: What the script calls it; may be empty.
        step, steps: Done, and in all.
        rate: As the bar shows it, with its unit.
        left: Remaining time, as the bar shows it.
        more: Further figures, such as the loss; may be empty.
    """

    title: str
    step: int
    steps: int
    rate: str
    left: str
    more: str


def find_progress(output: bytes) -> ScriptProgress | None:
    """Returns the latest state of a bar in a rank's output; ``None`` without one."""
    if b"%|" not in output and "•".encode() not in output:
        return None
    text = output[-MAX_BYTES:].decode(errors="replace")
    bars = [*_TQDM.finditer(text)] or [*_RICH.finditer(text)]
    if not bars:
        return None
    bar = bars[-1]
    title = re.split(r"[\r\n]", text[: bar.start()])[-1].strip("━╸╺ :")
    return ScriptProgress(
        title[-MAX_TITLE_CHARS:], _number(bar["step"]), _number(bar["steps"]), bar["rate"],
        bar["left"], (bar["more"] or "").strip(),
    )  # fmt: skip


def _number(text: str) -> int:
    factor = _FACTORS.get(text[-1], 1.0)
    return round(float(text.rstrip("kMG")) * factor)
