"""What the user sees while a job runs: labelled lines, notes, one progress bar."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO, cast

from paceline.launch.writer import Writer
from paceline.progress import Bar, describe
from paceline.spec.events import Home, at_home
from paceline.spec.job import Show
from paceline.spec.terminal import clean, clean_line, columns, for_reader, wrapped

_COLOURS = (36, 33, 35, 32, 34, 31)  # cyan, yellow, magenta, green, blue, red
REDRAW_S = 5.0  # how often a line that only returns the carriage is shown again
PLAIN_PROGRESS_S = 5.0
PLAIN_SENDING_S = 10.0
_DATA = "sending data (MiB)"
PLAIN_START_S = 1.0  # a part of the start that takes longer is told of without a terminal, too
MAX_PARTIAL = 1 << 16
RECENT = 30  # lines after which what a rank said is no longer before the reader's eyes
_WIPE = "\r\x1b[2K"
# what torch warns of on every rank though nothing is wrong; the logs keep it
_HARMLESS = re.compile(
    r"\[c10d\] The hostname of the client socket cannot be retrieved"
    r"|\[c10d\] The (?:IPv6|IPv4) network addresses of \(localhost"
    r"|^\[Gloo\] Rank \d{1,9} is connected to \d{1,9} peer ranks"
)
# a line of a traceback, a warning: only there a path stands for a place in the user's own file;
# what a script prints of its folder is shown as it is
_PLACE = re.compile(r'^\s{0,40}File "|^/[^:\n]{1,4096}:\d{1,9}: ')
_ERROR = "paceline: "  # how an error of ours begins; its parts follow, indented


class Lines:
    """Cuts one stream of a rank into lines."""

    def __init__(self) -> None:
        self._partial = b""
        self._redrawn = float("-inf")

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """The lines that are now whole, without their ends.

        A line rewritten by carriage returns (another program's progress bar) is given at most
        every ``REDRAW_S`` seconds, in its latest state.
        """
        *lines, self._partial = (self._partial + data).split(b"\n")
        found = [line.rsplit(b"\r", 1)[-1] for line in (part.rstrip(b"\r") for part in lines)]
        if b"\r" in self._partial and now - self._redrawn > REDRAW_S:
            self._redrawn = now
            found.append(self._partial.rstrip(b"\r").rsplit(b"\r", 1)[-1])
            self._partial = b""
        if len(self._partial) > MAX_PARTIAL:
            found.append(self._partial)
            self._partial = b""
        return found

    def rest(self) -> list[bytes]:
        """What was written without an end of line."""
        rest, self._partial = self._partial, b""
        return [rest] if rest else []


class Screen:
    """Writes to the terminal, or plainly to whatever standard output is.

    Args:
        show: Whose output is shown.
        out, err: Where the ranks' two streams go; notes and progress go to ``err``.
    """

    def __init__(self, show: Show = "all", out: TextIO | None = None,
                 err: TextIO | None = None) -> None:  # fmt: skip
        self._show = show
        self._out = Writer(out or sys.stdout)
        self._err = Writer(err or sys.stderr)
        self._colour = self._out.isatty()
        self._lines: dict[tuple[str, int, str], Lines] = {}
        self._muted: set[tuple[str, int]] = set()
        self._hosts: dict[str, int] = {}
        self._bar: Bar | None = None
        self._plain_at = float("-inf")
        self.homes: list[Home] = []
        self._over = False  # the start
        self._begun: dict[str, tuple[int, int]] = {}
        self._begun_plain: dict[str, asyncio.TimerHandle] = {}
        self._unwiped: set[int] = set()  # writers that the line of the start may stand on
        self._errors: set[str] = set()
        self._repeating: set[tuple[str, int]] = set()  # ranks that repeat another's error
        self._count = 0
        self._last: dict[tuple[str, int], int] = {}

    @property
    def terminal(self) -> bool:
        """True when progress is drawn."""
        return self._err.isatty()

    def output(self, host: str, rank: int, stream: str, data: bytes) -> None:
        """Shows what a rank wrote, line by line, labelled."""
        if self._show == "none" or (self._show == "rank0" and rank != 0):
            return
        lines = self._lines.setdefault((host, rank, stream), Lines())
        self._labelled(host, rank, stream, lines.feed(data, time.monotonic()))

    def mute(self, host: str, rank: int) -> None:
        """Shows no more of a rank's error stream: its traceback is shown once, at the end."""
        self._muted.add((host, rank))

    def flush(self) -> None:
        """Shows unfinished lines."""
        for (host, rank, stream), lines in self._lines.items():
            self._labelled(host, rank, stream, lines.rest())

    def _labelled(self, host: str, rank: int, stream: str, lines: list[bytes]) -> None:
        """Writes them in one piece: a rank may write faster than single lines could be shown."""
        if stream == "err" and (host, rank) in self._muted:
            return
        label = clean_line(f"[{host}/{rank}]")
        if self._colour:
            number = self._hosts.setdefault(host, len(self._hosts))
            label = f"\x1b[{_COLOURS[number % len(_COLOURS)]}m{label}\x1b[0m"
        target = self._out if stream == "out" else self._err
        colours = target.isatty()
        shown = []
        for line in lines:
            text = line.decode(errors="replace")
            if _PLACE.match(text):
                text = at_home(self.homes, host, text)
            if _HARMLESS.search(text[:500]):
                continue
            if stream == "out" or not self._repeated(host, rank, text):
                shown.append(f"{label} {clean(text, colours)}")
        if shown:
            self._last[host, rank] = self._count + len(shown) - 1
            self._write(target, "\n".join(shown), len(shown))

    def _repeated(self, host: str, rank: int, text: str) -> bool:
        """Whether this belongs to an error of ours that another rank has told already."""
        if text.startswith(_ERROR):
            known = text in self._errors
            self._errors.add(text)
            (self._repeating.add if known else self._repeating.discard)((host, rank))
        elif not text.startswith("  "):
            self._repeating.discard((host, rank))
        return (host, rank) in self._repeating

    def before_eyes(self, host: str, rank: int) -> bool:
        """Whether what a rank said last was shown, and little since."""
        last = self._last.get((host, rank))
        return last is not None and self._count - last <= RECENT

    def say(self, text: str) -> None:
        """A line of the job for the user, without label, on standard output."""
        text = clean(text, colours=self._colour)
        if self._out.isatty():
            text = wrapped(text, max(40, columns()))
        self._write(self._out, text)

    def note(self, text: str) -> None:
        """A line of ours, on standard error."""
        self._write(self._err, for_reader(text, cast(TextIO, self._err)))

    def _write(self, target: Writer, text: str, lines: int = 1) -> None:
        self._count += lines
        if id(target) in self._unwiped:
            self._unwiped.discard(id(target))
            text = _WIPE + text
        if self._bar is not None and target.isatty():
            self._bar.print(text)
            return
        target.write(text + "\n")
        if target is self._err and self._begun and self.terminal:
            self._draw_start()

    # --- the start ---------------------------------------------------------------------------

    def starting(self, part: str, done: int, of: int) -> None:
        """Shows how far a part of the start is: ``connecting 2/3``.

        On a terminal one line holds all parts; elsewhere a line tells of a part that takes long.
        """
        if self._over:
            return
        self._begun[part] = (done, of)
        if self.terminal:
            self._draw_start()
        elif done < of and part not in self._begun_plain:
            with contextlib.suppress(RuntimeError):  # nobody waits
                loop = asyncio.get_running_loop()
                self._begun_plain[part] = loop.call_later(PLAIN_START_S, self._tell_start, part)

    def sending(self, done: int, of: int) -> None:
        """Shows how much of the data is on the nodes, in bytes."""
        if self._over:
            return
        mib = (done >> 20, -(-of >> 20))
        now = time.monotonic()
        if self.terminal:
            if self._begun.get(_DATA) != mib:
                self._begun[_DATA] = mib
                self._draw_start()
        elif done == 0 or now - self._plain_at >= PLAIN_SENDING_S:
            self._plain_at = now
            self.note(f"paceline: sending data: {mib[0]:,} of {mib[1]:,} MiB")

    def _draw_start(self) -> None:
        parts = [f"{part} {done}/{of}" for part, (done, of) in self._begun.items()]
        text = "paceline: " + " · ".join(parts) + " …"
        self._err.write(_WIPE + text[: columns() - 1])
        self._unwiped = {id(one) for one in (self._out, self._err) if one.isatty()}

    def _tell_start(self, part: str) -> None:
        done, of = self._begun.get(part, (0, 0))
        if done < of:
            noun = "host" if of == 1 else "hosts"
            self.note(f"paceline: {part} ({done} of {of} {noun} so far)")

    def started(self) -> None:
        """The start is over: its line goes away."""
        self._over = True
        for waiting in self._begun_plain.values():
            waiting.cancel()
        self._begun.clear()
        self._begun_plain.clear()
        if id(self._err) in self._unwiped:
            self._unwiped.discard(id(self._err))
            self._err.write(_WIPE)

    # --- progress ----------------------------------------------------------------------------

    def progress(self, said: Mapping[str, Any]) -> None:
        """Draws where the job is, or now and then prints a line when there is no terminal."""
        if self.terminal:
            if self._bar is None:
                self._bar = Bar(cast(TextIO, self._err))
            self._bar.update(said)
            return
        now = time.monotonic()
        if said.get("loss") is None:
            return  # nothing is known yet
        if now - self._plain_at >= PLAIN_PROGRESS_S:
            self._plain_at = now
            self.note(describe(said))

    def close(self) -> None:
        """Takes the bar away, shows what is unfinished and waits until it was taken."""
        self.started()
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self.flush()
        self._out.close()
        self._err.close()
