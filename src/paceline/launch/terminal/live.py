"""The live screen of a run on a terminal: its lifetime, its content and its keys.

It uses the terminal's alternate screen, as a pager does. Lines for the terminal are buffered and
written when it closes, so that the terminal ends up as it would without a live screen.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TextIO, cast

from paceline.launch.terminal.keys import Keys, in_foreground
from paceline.launch.terminal.run_state import RunState
from paceline.launch.terminal.script_progress import ScriptProgress, find_progress
from paceline.launch.terminal.writer import BackgroundWriter
from paceline.spec.errors import PacelineError
from paceline.spec.failure import format_location
from paceline.spec.formatting import pluralize
from paceline.spec.terminal import clean, has_cursor

if TYPE_CHECKING:
    from paceline.launch.terminal.render import View

REDRAW_S = 1.0  # without keys
APPEAR_DELAY_S = 1.5  # a shorter run has no live screen
NOTICE_S = 6.0
MAX_BUFFERED_LINES = 10_000  # written when the screen closes
MAX_LOG_LINES, MAX_RANK_LINES = 500, 200  # of the log
FLUSH_TIMEOUT_S = 2.0  # to write buffered lines
PAGE_LINES = 10  # scrolled by Page Up and Page Down
FOLD_WINDOW_S = 10.0  # in which equal lines of several ranks become one
RATE_WINDOW_S = 120.0  # for the estimate of the remaining time
MIN_COLUMNS, MIN_LINES = 60, 16

SAVE_KEY = "s   save a checkpoint now"
# no line is wider than the narrowest screen
HELP = """\
 up, down, or a rank's number   its log      a   all logs
 s   save a checkpoint now      t   stacks of all ranks
 x   stop the run               d   leave it running
 q   lines, not this screen     ?   this help
 Ctrl-C stops the run with time to save; twice: at once.
 Time of a step: computing, waiting for data and for slower
 ranks, communication, checkpoints. Who waits least for
 slower ranks is the slowest. ! needs attention.
"""


class RunActions(Protocol):
    """Actions of keys: see :class:`paceline.launch.control.RunActions`."""

    def stop(self, *, immediately: bool = False) -> str | Awaitable[str]: ...
    async def save(self) -> str: ...
    async def stacks(self) -> str: ...


def supports_live(target: BackgroundWriter) -> bool:
    """Whether a stream is a terminal of sufficient size with cursor control."""
    if not has_cursor(target):
        return False
    try:
        size = os.get_terminal_size(target.fileno())
    except OSError:
        return False
    return size.columns >= MIN_COLUMNS and size.lines >= MIN_LINES


@dataclass(slots=True)
class _LogLine:
    """A line of the log, which several ranks may have written."""

    text: str
    label: str
    time: float
    ranks: set[int]

    def labelled(self, num_ranks: int) -> str:
        """Returns the line as the log shows it."""
        more = len(self.ranks) - 1
        label = self.label if more < 1 else f"{self.label} +{more}"
        if more > 0 and len(self.ranks) == num_ranks:
            label = "[all]"
        return f"{label} {self.text}" if label else self.text


class LiveScreen:
    """The live screen of one run, visible while the process is in the terminal's foreground.

    Args:
        seconds: For how long it has run already.
        logs: The logs' folder, as the user types it.
        actions: Carries out the actions of keys; ``None`` if there are none.
        on_detach: Detaches the run from this terminal; ``None`` if it cannot be.
        delay_s: Time until the screen appears.
    """

    def __init__(
        self,
        state: RunState,
        target: BackgroundWriter,
        *,
        title: str = "",
        seconds: float = 0.0,
        logs: str = "",
        actions: RunActions | None = None,
        on_detach: Callable[[], object] | None = None,
        delay_s: float = APPEAR_DELAY_S,
    ) -> None:
        self.is_enabled = True
        self._is_ended = False
        self._state, self._target, self._title, self._logs = state, target, title, logs
        self._actions, self._on_detach, self._delay_s = actions, on_detach, delay_s
        self._started_at = time.monotonic() - seconds
        self._keys = Keys(self._on_key)
        self._rich_live: Any = None  # rich's Live, while visible
        self._buffer: deque[tuple[str, int]] = deque()
        self._num_buffered = self._num_dropped = 0
        self._log: deque[_LogLine] = deque(maxlen=MAX_LOG_LINES)
        self._script: ScriptProgress | None = None
        self._script_rank: int | None = None
        self._rank_logs: dict[int, deque[str]] = {}
        self._step_times: deque[tuple[float, int]] = deque()
        self._selected: int | None = None
        self._digits = ""
        self._page: list[str] = []
        self._page_title, self._page_offset = "", 0
        self._notice, self._notice_expires_at = "", 0.0
        self._choices: dict[str, Callable[[], None]] = {}  # by key, while a question is open
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_visible(self) -> bool:
        """Whether the screen is visible."""
        return self._rich_live is not None

    # --- lines ------------------------------------------------------------------------------

    def buffer(self, text: str, lines: int) -> bool:
        """Buffers a text until the screen closes; returns False if it is not visible."""
        if not self.is_visible:
            return False
        self._buffer.append((text, lines))
        self._num_buffered += lines
        while self._num_buffered > MAX_BUFFERED_LINES and len(self._buffer) > 1:
            _, num_lines = self._buffer.popleft()
            self._num_buffered -= num_lines
            self._num_dropped += num_lines
        return True

    def log(self, rank: int | None, lines: Sequence[str], label: str = "",
            is_listed: bool = True) -> None:  # fmt: skip
        """Adds lines to the logs.

        Args:
            rank: The rank that wrote them; ``None`` for the job's own.
            lines: Clean lines without ends.
            label: Their prefix in the log of all ranks.
            is_listed: Whether the log of all ranks has them.
        """
        if rank is not None:
            rank_lines = self._rank_logs.setdefault(rank, deque(maxlen=MAX_RANK_LINES))
            rank_lines.extend(lines)
        now = time.monotonic()
        for line in lines if is_listed else ():
            if rank is not None and find_progress(line.encode(errors="replace")) is not None:
                continue  # it is at the top
            if rank is None or not self._fold(rank, line, now):
                self._log.append(_LogLine(line, label, now, set() if rank is None else {rank}))

    def _fold(self, rank: int, text: str, now: float) -> bool:
        """Adds a rank to an equal line of others; returns False if there is no recent one."""
        for line in reversed(self._log):
            if now - line.time > FOLD_WINDOW_S:
                return False
            if line.text == text and line.ranks and rank not in line.ranks:
                line.ranks.add(rank)
                return True
        return False

    def watch_bar(self, rank: int, output: bytes) -> None:
        """Takes the state of a script's own progress bar from a rank's output, if it has one."""
        if (progress := find_progress(output)) is None:
            return
        if self._script_rank is None or rank <= self._script_rank:
            self._script, self._script_rank = progress, rank

    # --- the loop ---------------------------------------------------------------------------

    async def run(self) -> None:
        """Draws the screen until it is cancelled."""
        loop = asyncio.get_running_loop()
        is_suspendable = signal.getsignal(signal.SIGTSTP) == signal.SIG_DFL
        if is_suspendable:
            loop.add_signal_handler(signal.SIGTSTP, self._suspend)
        try:
            await asyncio.sleep(self._delay_s)
            while not self._is_ended:  # wait_for may swallow a cancellation
                self._appear()
                self._draw()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), REDRAW_S)
                self._changed.clear()
        finally:
            if is_suspendable:
                loop.remove_signal_handler(signal.SIGTSTP)
            for task in self._tasks:
                task.cancel()
            self.close()

    def _appear(self) -> None:
        """Opens the screen if it is enabled and possible, and closes it otherwise."""
        target = self._target
        is_available = self.is_enabled and in_foreground(target.fileno()) and supports_live(target)
        if is_available and not self.is_visible:
            self._show()
        elif self.is_visible and not is_available:
            self.close()

    def _show(self) -> None:
        from rich.console import Console
        from rich.live import Live as Drawn

        console = Console(file=cast(TextIO, self._target), highlight=False, emoji=False)
        self._rich_live = Drawn(console=console, screen=True, auto_refresh=False,
                            redirect_stdout=False, redirect_stderr=False)  # fmt: skip
        self._keys.start()
        self._rich_live.start()

    def end(self) -> None:
        """Closes the screen for good."""
        self._is_ended = True
        self.close()

    def close(self) -> None:
        """Restores the terminal and writes the buffered lines."""
        self._keys.close()
        rich_live, self._rich_live = self._rich_live, None
        if rich_live is None:
            return
        rich_live.stop()
        if self._num_dropped:
            lines = pluralize(self._num_dropped, "line")
            self._target.write(
                f"paceline: {lines} left out here; the logs are complete: {self._logs}\n"
            )
        for text, _ in self._buffer:
            self._target.write(text + "\n")
        self._buffer.clear()
        self._num_buffered = self._num_dropped = 0
        self._target.drain(FLUSH_TIMEOUT_S)

    def _suspend(self) -> None:
        """Handles Ctrl-Z: detaches the run if possible, else suspends this process."""
        if self._on_detach is not None:
            self._on_detach()
            return
        loop = asyncio.get_running_loop()
        self.close()
        loop.remove_signal_handler(signal.SIGTSTP)
        os.kill(os.getpid(), signal.SIGTSTP)
        loop.add_signal_handler(signal.SIGTSTP, self._suspend)  # after SIGCONT
        self._changed.set()

    # --- drawing ----------------------------------------------------------------------------

    def _draw(self) -> None:
        """Draws the screen, unless the terminal is still writing the last frame."""
        if not self.is_visible or self._target.is_behind:
            return
        from rich.console import Group

        from paceline.launch.terminal.render import ASCII, UNICODE, frame

        console = self._rich_live.console
        symbols = ASCII if console.options.ascii_only else UNICODE
        lines = frame(self._state, self._view(), console.width, console.height, symbols)
        self._rich_live.update(Group(*lines), refresh=True)

    def _view(self) -> View:
        from paceline.launch.terminal.render import View, describe_parts

        now = time.monotonic()
        rank = self._state.ranks.get(-1 if self._selected is None else self._selected)
        num_ranks = len(self._state.ranks)
        log: Sequence[str] = [line.labelled(num_ranks) for line in self._log]
        title = "log"
        if self._selected is not None:
            log = self._rank_logs.get(self._selected, ())
            title = f"log of {format_location(rank.host if rank else '', self._selected)}"
            if rank is not None and rank.parts:
                title += f": {describe_parts(rank.parts)}"
            log = log or ["(no output yet)"]
        if self._page:
            title = self._page_title
        notice = self._notice if now < self._notice_expires_at else ""
        return View(
            self._title, now - self._started_at, now, self._remaining_s(now), self._selected,
            [*log], title, self._page[self._page_offset :], self._footer(), notice, self._script,
        )  # fmt: skip

    def _remaining_s(self, now: float) -> float | None:
        """Returns the remaining seconds of the training, from recent steps."""
        progress = self._state.progress
        step, steps = progress.get("step"), progress.get("steps")
        if not isinstance(step, int) or not isinstance(steps, int):
            return None
        if self._step_times and self._step_times[-1][1] > step:
            self._step_times.clear()
        if not self._step_times or now - self._step_times[-1][0] >= REDRAW_S / 2:
            self._step_times.append((now, step))
        while now - self._step_times[0][0] > RATE_WINDOW_S:
            self._step_times.popleft()
        start, first = self._step_times[0]
        return (steps - step) * (now - start) / (step - first) if step > first else None

    def _footer(self) -> str:
        if not self._keys.is_open:
            return "Ctrl-C stops the run (keys need standard input to be this terminal)"
        detach = "d leave  " if self._on_detach is not None else ""
        save = "s save  " if self._state.saves_checkpoints else ""
        return f"up/down rank's log  a all  {save}t stacks  x stop  {detach}q lines  ? help"

    # --- keys -------------------------------------------------------------------------------

    def _on_key(self, key: str) -> None:
        self._notice = ""
        self._changed.set()
        if self._choices:
            choices, self._choices = self._choices, {}
            choices.get(key, lambda: None)()
            return
        if self._page:
            offset = {"up": -1, "down": 1, "page up": -PAGE_LINES, "page down": PAGE_LINES}.get(key)
            if offset is not None:
                self._page_offset = min(max(0, self._page_offset + offset), len(self._page) - 1)
                return
            self._page = []
            if key in ("?", "escape", "q"):
                return
        if key in ("up", "down", "k", "j"):
            self._select_next(-1 if key in ("up", "k") else 1)
        elif key.isdecimal() or (self._digits and key in ("enter", "backspace")):
            self._type_digit(key)
        else:
            self._digits = ""
            self._commands.get(key, lambda: None)()

    @property
    def _commands(self) -> dict[str, Callable[[], None]]:
        return {
            "a": self._select_all,
            "escape": self._select_all,
            "s": self._save,
            "t": self._show_stacks,
            "x": self._confirm_stop,
            "d": self._detach,
            "q": self._show_lines,
            "?": self._help,
            "h": self._help,
        }

    def _notify(self, text: str, seconds: float = NOTICE_S) -> None:
        self._notice, self._notice_expires_at = clean(text), time.monotonic() + seconds
        self._changed.set()

    def _select_all(self) -> None:
        self._selected = None

    def _select_next(self, offset: int) -> None:
        ranks = sorted(self._state.ranks)
        if not ranks:
            return
        choices: list[int | None] = [None, *ranks]
        at = choices.index(self._selected) if self._selected in choices else 0
        self._selected = choices[(at + offset) % len(choices)]

    def _type_digit(self, key: str) -> None:
        """Selects a rank by its digits; at once if no longer number is possible."""
        if key == "backspace":
            self._digits = self._digits[:-1]
        elif key != "enter":
            self._digits += key
        highest = max(self._state.ranks, default=0)
        if self._digits and (key == "enter" or int(self._digits) * 10 > highest):
            rank, self._digits = int(self._digits), ""
            if rank in self._state.ranks:
                self._selected = rank
            else:
                self._notify(f"there is no rank {rank}")
        elif self._digits:
            self._notify(f"rank {self._digits} (Enter, or more digits)")

    def _save(self) -> None:
        if self._state.saves_checkpoints:
            self._request(lambda actions: actions.save(), "asked for a checkpoint")
        else:
            self._notify("the script has not called session.checkpoints: nothing to save")

    def _show_stacks(self) -> None:
        self._request(lambda actions: actions.stacks(), "asking every rank for its stack",
                      lambda text: self._open("stacks", text))  # fmt: skip

    def _help(self) -> None:
        saves = self._state.saves_checkpoints
        self._open("help", HELP if saves else HELP.replace(SAVE_KEY, " " * len(SAVE_KEY)))

    def _open(self, title: str, text: str) -> None:
        """Shows a text instead of the log."""
        self._page, self._page_offset = clean(text).splitlines(), 0
        self._page_title, self._notice = f"{title} (up and down move it, Esc goes back)", ""
        self._changed.set()

    def _show_lines(self) -> None:
        self.is_enabled = False
        self.close()

    def _detach(self) -> None:
        if self._on_detach is not None:
            self._on_detach()
        else:
            self._notify("only a run of --keep or --detach can be left running")

    def _confirm_stop(self) -> None:
        self._choices = {
            "y": lambda: self._request(lambda actions: actions.stop(), "stopping"),
            "k": lambda: self._request(
                lambda actions: actions.stop(immediately=True), "stopping at once"
            ),
        }
        self._notify("stop the run?  y: with time to save   k: at once   any other key: no", 60.0)

    def _request(self, act: Callable[[RunActions], str | Awaitable[str]], notice: str,
                 show: Callable[[str], None] | None = None) -> None:  # fmt: skip
        """Carries out an action, and shows its answer as a notice or with ``show``."""
        if self._actions is None:
            self._notify("nothing can be asked of this run from here")
            return
        actions = self._actions
        self._notify(notice, 60.0)

        async def perform() -> None:
            try:
                answer = act(actions)
                text = answer if isinstance(answer, str) else await answer
            except (PacelineError, ConnectionError) as error:
                self._notify(f"{error}".split("\n", 1)[0])
            else:
                (show or self._notify)(text)

        task = asyncio.ensure_future(perform())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
