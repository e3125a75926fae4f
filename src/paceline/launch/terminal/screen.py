"""What the user sees while a job runs: labelled lines, notes, one progress bar."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO, cast

from paceline.launch.terminal.run_state import Board
from paceline.launch.terminal.writer import Writer
from paceline.progress import Bar, describe
from paceline.spec.events import ShippedCopy, restore_local_paths
from paceline.spec.job import DisplayMode, Show
from paceline.spec.terminal import clean, clean_line, columns, format_for, wrap

if TYPE_CHECKING:
    from paceline.launch.terminal.live import Live

_COLOURS = (36, 33, 35, 32, 34, 31)  # cyan, yellow, magenta, green, blue, red
REDRAW_S = 5.0  # how often a line that only returns the carriage is shown again
PLAIN_PROGRESS_S = 5.0
PLAIN_SENDING_S = 10.0
_DATA = "sending data (MiB)"
PLAIN_START_S = 1.0  # a part of the start that takes longer is told of without a terminal, too
MAX_PARTIAL = 1 << 16
RECENT = 30  # lines after which what a rank said is no longer before the reader's eyes
_WIPE = "\r\x1b[2K"
# what torch warns of on every rank though nothing is wrong, and the frames of its C++ stack that it
# adds to any warning of a lost connection; the logs keep them
_HARMLESS = re.compile(
    r"^frame #\d{1,4}: .{0,4096} \(0x[0-9a-f]{1,16} in "
    r"|^Exception raised from \S{1,200} at .{0,4096} \(most recent call first\):$"
    r"|\[c10d\] The hostname of the client socket cannot be retrieved"
    r"|\[c10d\] The (?:IPv6|IPv4) network addresses of \(localhost"
    r"|^\[Gloo\] Rank \d{1,9} is connected to \d{1,9} peer ranks"
)
# a line of a traceback, a warning: only there a path stands for a place in the user's own file;
# what a script prints of its folder is shown as it is
_PLACE = re.compile(r'^\s{0,40}File "|^/[^:\n]{1,4096}:\d{1,9}: ')
_ERROR = "paceline: "  # how an error of ours begins; its parts follow, indented


class Lines:
    """Cuts one stream of a rank into lines.

    Args:
        redraw_s: Least time between two states of a line that returns the carriage.
    """

    def __init__(self, redraw_s: float = REDRAW_S) -> None:
        self._redraw_s = redraw_s
        self._partial = b""
        self._redrawn = float("-inf")

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """The lines that are now whole, without their ends.

        A line rewritten by carriage returns (another program's progress bar) is given at most
        every ``redraw_s`` seconds, in its latest state.
        """
        *lines, self._partial = (self._partial + data).split(b"\n")
        found = [_latest_state(line) for line in lines]
        if b"\r" in self._partial:
            state = _latest_state(self._partial)
            if now - self._redrawn > self._redraw_s:
                self._redrawn = now
                found.append(state)
                self._partial = b""
            else:  # former states are never shown
                self._partial = b"\r" + state + b"\r" * self._partial.endswith(b"\r")
        if len(self._partial) > MAX_PARTIAL:
            found.append(self._partial)
            self._partial = b""
        return found

    def rest(self) -> list[bytes]:
        """What was written without an end of line."""
        rest, self._partial = _latest_state(self._partial), b""
        return [rest] if rest else []


def _latest_state(line: bytes) -> bytes:
    """What a line shows on a terminal, where each carriage return begins it anew."""
    return line.rstrip(b"\r").rsplit(b"\r", 1)[-1]


class Screen:
    """Writes to the terminal, or plainly to whatever standard output is.

    Args:
        show: Whose output is shown.
        out, err: Where the ranks' two streams go; notes and progress go to ``err``.
        look: ``lines``: as they come, with a bar; ``live``: all ranks at a glance, where ``err`` is
            a terminal for it.
    """

    def __init__(self, show: Show = "all", out: TextIO | None = None,
                 err: TextIO | None = None, look: DisplayMode = "lines") -> None:  # fmt: skip
        self._show, self._look = show, look
        self._live: Live | None = None
        self._drawing: asyncio.Task[None] | None = None
        self._out = Writer(out or sys.stdout)
        self._err = Writer(err or sys.stderr)
        self._colour = self._out.isatty()
        self._lines: dict[tuple[str, int, str], Lines] = {}
        self._muted: set[tuple[str, int]] = set()
        self._hosts: dict[str, int] = {}
        self._bar: Bar | None = None
        self._plain_at = float("-inf")
        self.homes: list[ShippedCopy] = []
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
        if not self._shows(rank) and self._live is None:
            return
        lines = self._lines.setdefault((host, rank, stream), Lines())
        self._labelled(host, rank, stream, lines.feed(data, time.monotonic()))

    def _shows(self, rank: int) -> bool:
        return self._show == "all" or (self._show == "rank0" and rank == 0)

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
                text = restore_local_paths(self.homes, host, text)
            if _HARMLESS.search(text[:4500]):
                continue
            if stream == "out" or not self._repeated(host, rank, text):
                shown.append(clean(text, colours))
        if self._live is not None:
            self._live.log(rank, shown, label, self._shows(rank))
        if shown and self._shows(rank):
            self._last[host, rank] = self._count + len(shown) - 1
            self._write(target, "\n".join(f"{label} {text}" for text in shown), len(shown))

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

    def say(self, text: str, rank: int | None = None) -> None:
        """A line of the job for the user, without label, on standard output.

        Args:
            text: For the user.
            rank: Who says it.
        """
        text = clean(text, colours=self._colour)
        self._tell_live(text, rank)
        if self._out.isatty():
            text = wrap(text, max(40, columns()))
        self._write(self._out, text)

    def note(self, text: str) -> None:
        """A line of ours, on standard error."""
        text = format_for(text, cast(TextIO, self._err))
        self._tell_live(text)
        self._write(self._err, text)

    def _tell_live(self, text: str, rank: int | None = None) -> None:
        if self._live is not None:
            self._live.log(rank, text.split("\n"))

    def pass_on(self, text: str, err: bool) -> None:
        """Lines that a screen of a launcher elsewhere shows."""
        target = self._err if err else self._out
        self._write(target, format_for(text.removesuffix("\n"), cast(TextIO, target)))

    def _write(self, target: Writer, text: str, lines: int = 1) -> None:
        self._count += lines
        if id(target) in self._unwiped:
            self._unwiped.discard(id(target))
            text = _WIPE + text
        if self._live is not None and target.isatty() and self._live.hold(text, lines):
            return
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
        if self._live is not None and self._live.wanted:
            return
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

    def aside(self, text: str) -> None:
        """Says beside the progress where ranks are that do not train; empty where all do."""
        if self._bar is not None:
            self._bar.aside(text)

    # --- all at a glance ---------------------------------------------------------------------

    def watch(self, board: Board, **about: Any) -> None:
        """Shows all ranks at a glance from now on, where that was asked for and is possible.

        Args:
            board: What is known of the run.
            about: See :class:`paceline.launch.terminal.live.Live`.
        """
        if self._look != "live" or not self.terminal or self._live is not None:
            return
        from paceline.launch.terminal.live import Live, possible

        if possible(self._err):
            self._live = Live(board, self._err, **about)
            self._drawing = asyncio.ensure_future(self._live.run())

    @property
    def at_a_glance(self) -> bool:
        """Whether all ranks are shown at a glance, with keys of that screen's own."""
        return self._live is not None

    def unwatch(self) -> None:
        """Shows lines again, with those that were not shown meanwhile."""
        if self._drawing is not None:
            self._drawing.cancel()
        if self._live is not None:
            self._live.end()
        self._live = self._drawing = None

    def close(self) -> None:
        """Takes the bar away, shows what is unfinished and waits until it was taken."""
        self.started()
        self.unwatch()
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self.flush()
        self._out.close()
        self._err.close()
