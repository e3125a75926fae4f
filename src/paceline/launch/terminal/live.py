"""The live screen of a run on a terminal: when it is there, what it shows, what its keys do.

It lies over the terminal's own lines, as a pager does. What would have been written there meanwhile
is written when it goes; so at the end the terminal shows what it shows without.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TextIO, cast

from paceline.launch.terminal.keys import Keys, in_foreground
from paceline.launch.terminal.run_state import Board
from paceline.launch.terminal.writer import Writer
from paceline.spec.errors import PacelineError
from paceline.spec.failure import format_location
from paceline.spec.terminal import clean

REDRAW_S = 1.0  # unless a key comes
FIRST_S = 1.5  # a run that is over sooner has no screen
NOTICE_S = 6.0
MOST_HELD = 10_000  # lines that are written when the screen goes
MOST_LINES, MOST_OF_RANK = 500, 200  # of the log, that can be looked at
SETTLE_S = 2.0  # until the terminal has taken what was written
PAGE = 10  # lines by which a text is moved
STEPS_S = 120.0  # over which the time that is left is told
LEAST_COLUMNS, LEAST_LINES = 60, 16

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


class Wishes(Protocol):
    """What keys ask for: see :class:`paceline.launch.control.Actions`."""

    def stop(self, *, now: bool = False) -> str | Awaitable[str]: ...
    async def save(self) -> str: ...
    async def stacks(self) -> str: ...


def possible(target: Writer) -> bool:
    """Whether a screen can be drawn there: a terminal of some size that can be written all over."""
    if not target.isatty() or os.environ.get("TERM", "dumb") in ("", "dumb", "unknown"):
        return False
    try:
        size = os.get_terminal_size(target.fileno())
    except OSError:
        return False
    return size.columns >= LEAST_COLUMNS and size.lines >= LEAST_LINES


class Live:
    """The screen of one run. It comes and goes with the terminal's foreground.

    Args:
        board: What is shown.
        target: The terminal.
        title: Of the run.
        seconds: For how long it has run already.
        logs: The folder of the logs, as people name it.
        wishes: Does what keys ask for; ``None``: nothing can be asked.
        leave: Lets the run go on without this terminal; ``None`` where it could not.
        wait_s: Until the screen comes.
    """

    def __init__(
        self,
        board: Board,
        target: Writer,
        *,
        title: str = "",
        seconds: float = 0.0,
        logs: str = "",
        wishes: Wishes | None = None,
        leave: Callable[[], object] | None = None,
        wait_s: float = FIRST_S,
    ) -> None:
        self.wanted = True  # until somebody wants lines
        self._over = False
        self._board, self._target, self._title, self._logs = board, target, title, logs
        self._wishes, self._leave, self._wait_s = wishes, leave, wait_s
        self._began = time.monotonic() - seconds
        self._keys = Keys(self._key)
        self._drawn: Any = None  # rich's Live, while it is there
        self._held: deque[tuple[str, int]] = deque()
        self._held_lines = self._left_out = 0
        self._all: deque[str] = deque(maxlen=MOST_LINES)
        self._of_rank: dict[int, deque[str]] = {}
        self._steps: deque[tuple[float, int]] = deque()
        self._chosen: int | None = None
        self._typed = ""
        self._page: list[str] = []
        self._page_title, self._page_at = "", 0
        self._notice, self._notice_until = "", 0.0
        self._asking: dict[str, Callable[[], None]] = {}  # by key: the answer to a question
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def shown(self) -> bool:
        """Whether the screen is there."""
        return self._drawn is not None

    # --- what would be written --------------------------------------------------------------

    def hold(self, text: str, lines: int) -> bool:
        """Whether a text is kept until the screen goes; else it is to be written now."""
        if not self.shown:
            return False
        self._held.append((text, lines))
        self._held_lines += lines
        while self._held_lines > MOST_HELD and len(self._held) > 1:
            _, fewer = self._held.popleft()
            self._held_lines -= fewer
            self._left_out += fewer
        return True

    def log(self, rank: int | None, lines: Sequence[str], label: str = "",
            of_all: bool = True) -> None:  # fmt: skip
        """Takes lines of a rank, or of the job, to be looked at.

        Args:
            rank: Whose; ``None`` for the job's own.
            lines: Clean, without ends.
            label: What stands before them where all are shown.
            of_all: They are among these.
        """
        if rank is not None:
            kept = self._of_rank.setdefault(rank, deque(maxlen=MOST_OF_RANK))
            kept.extend(lines)
        if of_all:
            self._all.extend(f"{label} {line}" if label else line for line in lines)

    # --- the loop ---------------------------------------------------------------------------

    async def run(self) -> None:
        """Draws until it is cancelled."""
        loop = asyncio.get_running_loop()
        usual = signal.getsignal(signal.SIGTSTP) == signal.SIG_DFL
        if usual:
            loop.add_signal_handler(signal.SIGTSTP, self._suspend)
        try:
            await asyncio.sleep(self._wait_s)
            while not self._over:  # what is cancelled as a key comes may not hear of it
                self._appear()
                self._draw()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), REDRAW_S)
                self._changed.clear()
        finally:
            if usual:
                loop.remove_signal_handler(signal.SIGTSTP)
            for task in self._tasks:
                task.cancel()
            self.close()

    def _appear(self) -> None:
        """Comes where it can and is wanted, and goes where it cannot stay."""
        here = self.wanted and in_foreground(self._target.fileno()) and possible(self._target)
        if here and not self.shown:
            self._show()
        elif self.shown and not here:
            self.close()

    def _show(self) -> None:
        from rich.console import Console
        from rich.live import Live as Drawn

        console = Console(file=cast(TextIO, self._target), highlight=False, emoji=False)
        self._drawn = Drawn(console=console, screen=True, auto_refresh=False,
                            redirect_stdout=False, redirect_stderr=False)  # fmt: skip
        self._keys.begin()
        self._drawn.start()

    def end(self) -> None:
        """Goes for good."""
        self._over = True
        self.close()

    def close(self) -> None:
        """Gives the terminal back, with all that was to be written on it."""
        self._keys.close()
        drawn, self._drawn = self._drawn, None
        if drawn is None:
            return
        drawn.stop()
        if self._left_out:
            lines = f"{self._left_out} line{'s' * (self._left_out != 1)}"
            self._target.write(
                f"paceline: {lines} left out here; the logs are complete: {self._logs}\n"
            )
        for text, _ in self._held:
            self._target.write(text + "\n")  # one terminal, one order
        self._held.clear()
        self._held_lines = self._left_out = 0
        self._target.settle(SETTLE_S)

    def _suspend(self) -> None:
        """Ctrl-Z: the job goes on without us where that was wished, else we stand still."""
        if self._leave is not None:
            self._leave()
            return
        loop = asyncio.get_running_loop()
        self.close()
        loop.remove_signal_handler(signal.SIGTSTP)
        os.kill(os.getpid(), signal.SIGTSTP)
        loop.add_signal_handler(signal.SIGTSTP, self._suspend)  # it goes on
        self._changed.set()

    # --- drawing ----------------------------------------------------------------------------

    def _draw(self) -> None:
        """A new picture, unless the terminal has not taken the last one."""
        if not self.shown or self._target.behind:
            return
        from rich.console import Group

        from paceline.launch.terminal.render import FINE, PLAIN, frame

        console = self._drawn.console
        signs = PLAIN if console.options.ascii_only else FINE
        lines = frame(self._board, self._around(), console.width, console.height, signs)
        self._drawn.update(Group(*lines), refresh=True)

    def _around(self) -> Any:
        from paceline.launch.terminal.render import Around, told_parts

        now = time.monotonic()
        rank = self._board.ranks.get(-1 if self._chosen is None else self._chosen)
        log: Sequence[str] = self._all
        title = "log"
        if self._chosen is not None:
            log = self._of_rank.get(self._chosen, ())
            title = f"log of {format_location(rank.host if rank else '', self._chosen)}"
            if rank is not None and rank.parts:
                title += f": {told_parts(rank.parts)}"
            log = log or ["(nothing of it has been seen here yet)"]
        if self._page:
            title = self._page_title
        notice = self._notice if now < self._notice_until else ""
        return Around(
            self._title, now - self._began, now, self._left_s(now), self._chosen, [*log], title,
            self._page[self._page_at :], self._footer(), notice,
        )  # fmt: skip

    def _left_s(self, now: float) -> float | None:
        """Seconds until the training is over, by the steps of the last while."""
        progress = self._board.progress
        step, steps = progress.get("step"), progress.get("steps")
        if not isinstance(step, int) or not isinstance(steps, int):
            return None
        if self._steps and self._steps[-1][1] > step:
            self._steps.clear()
        if not self._steps or now - self._steps[-1][0] >= REDRAW_S / 2:
            self._steps.append((now, step))
        while now - self._steps[0][0] > STEPS_S:
            self._steps.popleft()
        since, first = self._steps[0]
        return (steps - step) * (now - since) / (step - first) if step > first else None

    def _footer(self) -> str:
        if not self._keys.open:
            return "Ctrl-C stops the run (keys need standard input to be this terminal)"
        leave = "d leave  " if self._leave is not None else ""
        save = "s save  " if self._board.keeps_checkpoints else ""
        return f"up/down rank's log  a all  {save}t stacks  x stop  {leave}q lines  ? help"

    # --- keys -------------------------------------------------------------------------------

    def _key(self, key: str) -> None:
        self._notice = ""
        self._changed.set()
        if self._asking:
            asked, self._asking = self._asking, {}
            asked.get(key, lambda: None)()
            return
        if self._page:
            by = {"up": -1, "down": 1, "page up": -PAGE, "page down": PAGE}.get(key)
            if by is not None:
                self._page_at = min(max(0, self._page_at + by), len(self._page) - 1)
                return
            self._page = []
            if key in ("?", "escape", "q"):
                return
        if key in ("up", "down", "k", "j"):
            self._choose_next(-1 if key in ("up", "k") else 1)
        elif key.isdecimal() or (self._typed and key in ("enter", "backspace")):
            self._type(key)
        else:
            self._typed = ""
            self._keys_of_words.get(key, lambda: None)()

    @property
    def _keys_of_words(self) -> dict[str, Callable[[], None]]:
        return {
            "a": self._choose_all,
            "escape": self._choose_all,
            "s": self._save,
            "t": lambda: self._ask("stacks", "asked every rank where it stands"),
            "x": self._ask_to_stop,
            "d": self._detach,
            "q": self._to_lines,
            "?": self._help,
            "h": self._help,
        }

    def _say(self, text: str, seconds: float = NOTICE_S) -> None:
        self._notice, self._notice_until = clean(text), time.monotonic() + seconds
        self._changed.set()

    def _choose_all(self) -> None:
        self._chosen = None

    def _choose_next(self, by: int) -> None:
        ranks = sorted(self._board.ranks)
        if not ranks:
            return
        places: list[int | None] = [None, *ranks]
        at = places.index(self._chosen) if self._chosen in places else 0
        self._chosen = places[(at + by) % len(places)]

    def _type(self, key: str) -> None:
        """The digits of a rank: at once where there can be no more."""
        if key == "backspace":
            self._typed = self._typed[:-1]
        elif key != "enter":
            self._typed += key
        most = max(self._board.ranks, default=0)
        if self._typed and (key == "enter" or int(self._typed) * 10 > most):
            rank, self._typed = int(self._typed), ""
            if rank in self._board.ranks:
                self._chosen = rank
            else:
                self._say(f"there is no rank {rank}")
        elif self._typed:
            self._say(f"rank {self._typed} (Enter, or more digits)")

    def _save(self) -> None:
        if self._board.keeps_checkpoints:
            self._ask("save", "asked for a checkpoint")
        else:
            self._say("the script has not called session.checkpoints: nothing to save")

    def _help(self) -> None:
        saves = self._board.keeps_checkpoints
        self._open("help", HELP if saves else HELP.replace(SAVE_KEY, " " * len(SAVE_KEY)))

    def _open(self, title: str, text: str) -> None:
        """Shows a text in place of the log."""
        self._page, self._page_at = clean(text).splitlines(), 0
        self._page_title, self._notice = f"{title} (up and down move it, Esc goes back)", ""
        self._changed.set()

    def _to_lines(self) -> None:
        self.wanted = False
        self.close()

    def _detach(self) -> None:
        if self._leave is not None:
            self._leave()
        else:
            self._say("only a run of --keep or --detach can be left running")

    def _ask_to_stop(self) -> None:
        self._asking = {
            "y": lambda: self._ask("stop", "stopping"),
            "k": lambda: self._ask("stop", "stopping at once", now=True),
        }
        self._say("stop the run?  y: with time to save   k: at once   any other key: no", 60.0)

    def _ask(self, what: str, question: str, **how: Any) -> None:
        if self._wishes is None:
            self._say("nothing can be asked of this run from here")
            return
        self._say(question, 60.0)
        task = asyncio.ensure_future(self._do(what, **how))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _do(self, what: str, **how: Any) -> None:
        try:
            answer = getattr(self._wishes, what)(**how)
            text = str(await answer if inspect.isawaitable(answer) else answer)
        except (PacelineError, ConnectionError) as error:
            self._say(f"{error}".split("\n", 1)[0])
            return
        if what == "stacks":
            self._open("stacks", text)
        else:
            self._say(text)
