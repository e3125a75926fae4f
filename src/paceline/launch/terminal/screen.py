"""The screen of a running job: labelled lines, notes, one progress bar."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO, cast

from paceline.launch.terminal.interrupt_filter import InterruptFilter
from paceline.launch.terminal.run_state import RunState
from paceline.launch.terminal.writer import BackgroundWriter
from paceline.progress import Bar, describe
from paceline.spec.events import ShippedCopy, restore_local_paths
from paceline.spec.formatting import pluralize
from paceline.spec.job import DisplayMode, Show
from paceline.spec.terminal import (
    clean,
    clean_line,
    columns,
    format_for,
    has_colours,
    has_cursor,
    wrap,
)

if TYPE_CHECKING:
    from paceline.launch.terminal.live import LiveScreen

_COLOURS = (36, 33, 35, 32, 34, 31)  # cyan, yellow, magenta, green, blue, red
REDRAW_S = 5.0  # between two states of a line that is rewritten by carriage returns
LOG_PROGRESS_S = 5.0
LOG_SENDING_S = 10.0
_SENDING = "sending data (MiB)"
LOG_START_S = 1.0  # a longer part of the start is noted without a terminal, too
MAX_PARTIAL = 1 << 16
RECENT_LINES = 30  # output this recent is still visible
_CLEAR_LINE = "\r\x1b[2K"
# harmless warnings of torch on every rank, and the C++ frames in its warnings of lost connections;
# the logs keep them
NOISE = re.compile(
    r"^frame #\d{1,4}: .{0,4096} \(0x[0-9a-f]{1,16} in "
    r"|^Exception raised from \S{1,200} at .{0,4096} \(most recent call first\):$"
    r"|\[c10d\] The hostname of the client socket cannot be retrieved"
    r"|\[c10d\] The (?:IPv6|IPv4) network addresses of \(localhost"
    r"|^\[Gloo\] Rank \d{1,9} is connected to \d{1,9} peer ranks"
)
# a line of a traceback or a warning: only there paths are restored to those of this machine
_SOURCE_LOCATION = re.compile(r'^\s{0,40}File "|^/[^:\n]{1,4096}:\d{1,9}: ')
_ERROR_PREFIX = "paceline: "  # of our errors, whose details follow indented
MAX_ERRORS, MAX_ERROR_CHARS = 1000, 4096  # that are remembered, so that each is shown once


class LineSplitter:
    """Splits one stream of a rank into lines.

    Args:
        redraw_s: Minimum time between two states of a line with carriage returns.
    """

    def __init__(self, redraw_s: float = REDRAW_S) -> None:
        self._redraw_s = redraw_s
        self._partial = b""
        self._redrawn_at = float("-inf")

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """Returns the complete lines, without their ends.

        A line rewritten by carriage returns (another program's progress bar) is given at most
        every ``redraw_s`` seconds, in its latest state.
        """
        *lines, self._partial = (self._partial + data).split(b"\n")
        complete = [_visible_text(line) for line in lines]
        if b"\r" in self._partial:
            state = _visible_text(self._partial)
            if now - self._redrawn_at > self._redraw_s:
                self._redrawn_at = now
                complete.append(state)
                self._partial = b""
            else:  # drop former states
                self._partial = b"\r" + state + b"\r" * self._partial.endswith(b"\r")
        if len(self._partial) > MAX_PARTIAL:
            complete.append(self._partial)
            self._partial = b""
        return complete

    def flush(self) -> list[bytes]:
        """Returns the incomplete last line."""
        partial, self._partial = _visible_text(self._partial), b""
        return [partial] if partial else []


def _visible_text(line: bytes) -> bytes:
    """Returns what a terminal shows of a line with carriage returns."""
    return line.rstrip(b"\r").rsplit(b"\r", 1)[-1]


class Screen:
    """Writes output of ranks, notes and progress to the terminal, or as plain lines elsewhere.

    Args:
        show: Which ranks' output is shown.
        out, err: For the ranks' two streams; notes and progress go to ``err``.
        display: ``lines`` with a progress bar, or the ``live`` screen if ``err`` is a terminal.
    """

    def __init__(self, show: Show = "all", out: TextIO | None = None,
                 err: TextIO | None = None, display: DisplayMode = "lines") -> None:  # fmt: skip
        self._show, self._display = show, display
        self._live: LiveScreen | None = None
        self._drawing: asyncio.Task[None] | None = None
        self._out = BackgroundWriter(out or sys.stdout)
        self._err = BackgroundWriter(err or sys.stderr)
        self._colour = has_colours(self._out)
        self._lines: dict[tuple[str, int, str], LineSplitter] = {}
        self._muted: set[tuple[str, int]] = set()
        self._hides_interrupts = False
        self._interrupt_filters: dict[tuple[str, int, str], InterruptFilter] = {}
        self._hosts: dict[str, int] = {}
        self._bar: Bar | None = None
        self._logged_at = float("-inf")
        self.shipped_copies: list[ShippedCopy] = []
        self._is_started = False  # the start is over
        self._start_parts: dict[str, tuple[int, int]] = {}
        self._start_timers: dict[str, asyncio.TimerHandle] = {}
        self._dirty_writers: set[int] = set()  # terminals that may show the line of the start
        self._errors: set[str] = set()
        self._repeating: set[tuple[str, int]] = set()  # ranks that repeat another rank's error
        self._num_lines = 0
        self._line_numbers: dict[tuple[str, int], int] = {}

    @property
    def is_terminal(self) -> bool:
        """Whether progress is drawn on a terminal."""
        return has_cursor(self._err)

    def output(self, host: str, rank: int, stream: str, data: bytes) -> None:
        """Shows output of a rank as labelled lines."""
        if not self._is_selected(rank) and self._live is None:
            return
        if self._live is not None:
            self._live.watch_bar(rank, data)
        splitter = self._lines.setdefault((host, rank, stream), LineSplitter())
        lines = splitter.feed(data, time.monotonic())
        if self._hides_interrupts:
            key = host, rank, stream
            lines = self._interrupt_filters.setdefault(key, InterruptFilter()).feed(lines)
        self._print_labelled(host, rank, stream, lines)

    def _is_selected(self, rank: int) -> bool:
        return self._show == "all" or (self._show == "rank0" and rank == 0)

    def mute(self, host: str, rank: int) -> None:
        """Hides a rank's error stream until it starts again: the end shows its traceback once."""
        self._muted.add((host, rank))

    def hide_interrupts(self) -> None:
        """Hides tracebacks of KeyboardInterrupt from now on: the user has stopped the ranks."""
        self._hides_interrupts = True

    def restart_rank(self, host: str, rank: int) -> None:
        """Forgets the state of the rank's former process, after showing its unfinished lines."""
        for stream in ("out", "err"):
            if lines := self._lines.pop((host, rank, stream), None):
                self._print_labelled(host, rank, stream, lines.flush())
        self._muted.discard((host, rank))
        self._repeating.discard((host, rank))
        self._line_numbers.pop((host, rank), None)

    def end_attempt(self) -> None:
        """Shows unfinished lines; errors that come again in the next attempt are shown again."""
        self.flush()
        self._errors.clear()

    def flush(self) -> None:
        """Shows unfinished lines."""
        for (host, rank, stream), lines in self._lines.items():
            self._print_labelled(host, rank, stream, lines.flush())
        for (host, rank, stream), interrupt_filter in self._interrupt_filters.items():
            self._print_labelled(host, rank, stream, interrupt_filter.flush())

    def _print_labelled(self, host: str, rank: int, stream: str, lines: list[bytes]) -> None:
        """Writes the lines in one piece, which is faster than single writes."""
        if stream == "err" and (host, rank) in self._muted:
            return
        label = clean_line(f"[{host}/{rank}]")
        if self._colour:
            number = self._hosts.setdefault(host, len(self._hosts))
            label = f"\x1b[{_COLOURS[number % len(_COLOURS)]}m{label}\x1b[0m"
        target = self._out if stream == "out" else self._err
        has_colour = has_colours(target)
        visible = []
        for line in lines:
            text = line.decode(errors="replace")
            if _SOURCE_LOCATION.match(text):
                text = restore_local_paths(self.shipped_copies, host, text)
            if NOISE.search(text[:4500]):
                continue
            if stream == "out" or not self._is_repeated(host, rank, text):
                visible.append(clean(text, has_colour))
        if self._live is not None:
            self._live.log(rank, visible, label, self._is_selected(rank))
        if visible and self._is_selected(rank):
            self._line_numbers[host, rank] = self._num_lines + len(visible) - 1
            self._write(target, "\n".join(f"{label} {text}" for text in visible), len(visible))

    def _is_repeated(self, host: str, rank: int, text: str) -> bool:
        """Whether this belongs to an error of ours that another rank has printed already."""
        if text.startswith(_ERROR_PREFIX):
            error = text[:MAX_ERROR_CHARS]
            is_known = error in self._errors
            if len(self._errors) < MAX_ERRORS:
                self._errors.add(error)
            (self._repeating.add if is_known else self._repeating.discard)((host, rank))
        elif not text.startswith("  "):
            self._repeating.discard((host, rank))
        return (host, rank) in self._repeating

    def is_visible(self, host: str, rank: int) -> bool:
        """Whether the last output of a rank was shown, and little since."""
        line_number = self._line_numbers.get((host, rank))
        return line_number is not None and self._num_lines - line_number <= RECENT_LINES

    def print(self, text: str, rank: int | None = None) -> None:
        """Prints a line of the job without a label on standard output."""
        text = clean(text, colours=self._colour)
        self._log_live(text, rank)
        if self._out.isatty():
            text = wrap(text, max(40, columns()))
        self._write(self._out, text)

    def note(self, text: str) -> None:
        """Prints a line of Paceline's own on standard error."""
        text = format_for(text, cast(TextIO, self._err))
        self._log_live(text)
        self._write(self._err, text)

    def _log_live(self, text: str, rank: int | None = None) -> None:
        if self._live is not None:
            self._live.log(rank, text.split("\n"))

    def forward(self, text: str, err: bool) -> None:
        """Prints output of a remote launcher's screen."""
        target = self._err if err else self._out
        self._write(target, format_for(text.removesuffix("\n"), cast(TextIO, target)))

    def _write(self, target: BackgroundWriter, text: str, lines: int = 1) -> None:
        self._num_lines += lines
        if id(target) in self._dirty_writers:
            self._dirty_writers.discard(id(target))
            text = _CLEAR_LINE + text
        if self._live is not None and target.isatty() and self._live.buffer(text, lines):
            return
        if self._bar is not None and target.isatty():
            self._bar.print(text)
            return
        target.write(text + "\n")
        if target is self._err and self._start_parts and self.is_terminal:
            self._draw_start()

    # --- the start ---------------------------------------------------------------------------

    def starting(self, part: str, done: int, total: int) -> None:
        """Shows the progress of a part of the start: ``connecting 2/3``.

        A terminal shows all parts in one line; elsewhere a part that takes long gets a note.
        """
        if self._is_started:
            return
        self._start_parts[part] = (done, total)
        if self.is_terminal:
            self._draw_start()
        elif done < total and part not in self._start_timers:
            with contextlib.suppress(RuntimeError):  # no event loop
                loop = asyncio.get_running_loop()
                self._start_timers[part] = loop.call_later(LOG_START_S, self._log_start, part)

    def sending(self, sent_bytes: int, total_bytes: int) -> None:
        """Shows how many bytes of the data are on the nodes."""
        if self._is_started:
            return
        mib = (sent_bytes >> 20, -(-total_bytes >> 20))
        now = time.monotonic()
        if self.is_terminal:
            if self._start_parts.get(_SENDING) != mib:
                self._start_parts[_SENDING] = mib
                self._draw_start()
        elif sent_bytes == 0 or now - self._logged_at >= LOG_SENDING_S:
            self._logged_at = now
            self.note(f"paceline: sending data: {mib[0]:,} of {mib[1]:,} MiB")

    def _draw_start(self) -> None:
        parts = [f"{part} {done}/{total}" for part, (done, total) in self._start_parts.items()]
        text = "paceline: " + " · ".join(parts) + " …"
        self._err.write(_CLEAR_LINE + text[: columns() - 1])
        self._dirty_writers = {id(writer) for writer in (self._out, self._err) if writer.isatty()}

    def _log_start(self, part: str) -> None:
        done, total = self._start_parts.get(part, (0, 0))
        if done < total:
            self.note(f"paceline: {part} ({done} of {pluralize(total, 'host')} so far)")

    def started(self) -> None:
        """Ends the start and removes its line."""
        self._is_started = True
        for timer in self._start_timers.values():
            timer.cancel()
        self._start_parts.clear()
        self._start_timers.clear()
        if id(self._err) in self._dirty_writers:
            self._dirty_writers.discard(id(self._err))
            self._err.write(_CLEAR_LINE)

    # --- progress ----------------------------------------------------------------------------

    def progress(self, progress: Mapping[str, Any]) -> None:
        """Updates the progress bar, or prints a line periodically without a terminal."""
        if self._live is not None and self._live.is_enabled:
            return
        if self.is_terminal:
            if self._bar is None:
                self._bar = Bar(cast(TextIO, self._err))
            self._bar.update(progress)
            return
        now = time.monotonic()
        if progress.get("loss") is None:
            return
        if now - self._logged_at >= LOG_PROGRESS_S:
            self._logged_at = now
            self.note(describe(progress))

    def aside(self, text: str) -> None:
        """Shows a text beside the progress bar, such as what ranks do that do not train."""
        if self._bar is not None:
            self._bar.aside(text)

    # --- the live screen ---------------------------------------------------------------------

    def start_live(self, state: RunState, **options: Any) -> None:
        """Starts a :class:`LiveScreen` if it was requested and the terminal supports it."""
        if self._display != "live" or not self.is_terminal or self._live is not None:
            return
        from paceline.launch.terminal.live import LiveScreen, supports_live

        if supports_live(self._err):
            self._live = LiveScreen(state, self._err, **options)
            self._drawing = asyncio.ensure_future(self._live.run())

    @property
    def is_live(self) -> bool:
        """Whether the live screen, which reads keys itself, is used."""
        return self._live is not None

    def stop_live(self) -> None:
        """Ends the live screen and prints the lines that it withheld."""
        if self._drawing is not None:
            self._drawing.cancel()
        if self._live is not None:
            self._live.end()
        self._live = self._drawing = None

    def close(self) -> None:
        """Removes the bar, prints incomplete lines and waits until everything is written."""
        self.started()
        self.stop_live()
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self.flush()
        self._out.close()
        self._err.close()
