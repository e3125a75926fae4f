"""Makes untrusted text safe for a terminal, and wraps it.

Text from nodes, ssh, files and run directories may contain sequences that rename the window, fill
the clipboard, move the cursor or change the writing direction. All shown text passes here.
"""

from __future__ import annotations

import os
import re
import textwrap
from typing import Protocol, TextIO

_COLOUR = re.compile(r"(\x1b\[[0-9;:]{0,64}m)")
_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]{0,64}[ -/]{0,16}[@-~]"  # CSI: colours, cursor, erasing, modes
    # OSC, DCS, PM, APC, SOS: up to their end
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\n\x80-\x9f]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]{0,16}[0-Z\\^-~]"  # the short ones: reset, character sets
    r"|\r{1,3}(?=\n)"
)
_CONTROLS = [*range(9), *range(0x0B, 0x20), *range(0x7F, 0xA0)]
_DIRECTIONS = [0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)]
_VISIBLE = {
    **{number: f"\\x{number:02x}" for number in _CONTROLS},
    **{number: f"\\u{number:04x}" for number in [*_DIRECTIONS, *range(0xD800, 0xE000)]},
}
_SIGNS = {**dict.fromkeys(_VISIBLE, "?"), ord("\n"): " "}
_RESET = "\x1b[0m"


def clean(text: str, colours: bool = False) -> str:
    """Removes terminal sequences; other control characters become ``\\x07``.

    Args:
        text: Any text. Line ends and tabs are kept.
        colours: Keep colours, and reset them at the end.
    """
    if text.isprintable():  # almost every line is; the code below is ten times slower
        return text
    if not colours:
        return _SEQUENCE.sub("", text).translate(_VISIBLE)
    parts = _COLOUR.split(text)
    parts[::2] = [clean(part) for part in parts[::2]]
    return "".join(parts) + _RESET * (len(parts) > 1)


def fixed_width(text: str) -> str:
    """Replaces each control character by one sign, so that columns stay aligned."""
    return text if text.isprintable() else text.translate(_SIGNS)


def clean_line(text: str) -> str:
    """As :func:`clean`, with line ends escaped: for a host's name, or a message in a table."""
    return clean(text).replace("\n", "\\n")


_LABEL = re.compile(
    r"(?:paceline: |(?:to |with )?[a-z]{1,12}: {1,12}|→ |epoch \d{1,9} {2}"
    r"|(?:ok|warn|FAIL|unknown) {2,7})?"
)
# a command must stay on one line, so that it can be pasted
_COMMAND = re.compile(
    r"(?:(?:(?:to |with )?[a-z]{1,12}:|On \S{1,64}:|→) {1,12}){0,3}"
    r"(?:sudo|ssh|paceline|python|python3|pip|cp|scp|rsync|ping|nc|df|export|systemctl|docker"
    r"|srun|mpiexec) \S"
)
_PROSE = re.compile(r"[a-zA-Z)][,;.:] ")


def wrap(text: str, width: int) -> str:
    """Wraps long lines between words with a hanging indent; commands are not wrapped."""
    return "\n".join(_wrap_line(line, width) for line in text.split("\n"))


def _wrap_line(line: str, width: int) -> str:
    bare = line.lstrip(" ")
    label = _LABEL.match(bare)
    hanging = len(line) - len(bare) + (label.end() if label else 0)
    command = _COMMAND.match(bare)
    if len(line) <= width or (command and not _PROSE.search(bare, command.end())):
        return line
    indent = " " * (2 if line.startswith("paceline: ") else hanging)
    return textwrap.fill(line[hanging:], width, initial_indent=line[:hanging],
                         subsequent_indent=indent, break_long_words=False,
                         break_on_hyphens=False)  # fmt: skip


def format_for(text: str, out: TextIO) -> str:
    """Cleans a text for ``out``, and wraps it on a terminal."""
    if not out.isatty():
        return clean(text)
    return wrap(clean(text), max(40, columns()))


class Stream(Protocol):
    """A stream that may be a terminal."""

    def isatty(self) -> bool: ...


def has_cursor(out: Stream) -> bool:
    """Whether a stream is a terminal on which a line can be drawn again."""
    return out.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")


def has_colours(out: Stream) -> bool:
    """Whether colours may be written to a stream: https://no-color.org."""
    return has_cursor(out) and not os.environ.get("NO_COLOR")


def columns() -> int:
    """Width of the terminal, or 80."""
    import shutil

    return shutil.get_terminal_size((80, 24)).columns
