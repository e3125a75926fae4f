"""A terminal that looks at a run that goes on, as if it had been its own all the time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from paceline.cli.elsewhere import Way, way_to
from paceline.cli.launch import explain_run
from paceline.cli.logs import logs_of
from paceline.cli.runs import called, describe, look_at
from paceline.cli.verb import say
from paceline.launch.board import Board
from paceline.launch.interrupts import Echoes
from paceline.launch.keys import Keys
from paceline.launch.screen import Screen
from paceline.launch.summary import RunOutcome, is_resumable, report_failure, report_success
from paceline.rundir import records
from paceline.rundir.directory import short
from paceline.spec import rundir as names
from paceline.spec.command import shell_text
from paceline.spec.errors import PacelineError
from paceline.spec.events import Event, homes, read_events
from paceline.spec.failure import UNKNOWN, Result
from paceline.spec.terminal import for_reader

LOOK_EVERY_S = 0.5
BEGIN_WITH = 2048  # bytes of each log that were there already
PIECE = 1 << 20  # bytes of a file that are taken at once
MOST_LINE = 1 << 20


def look_until_over(path: Path, *, lines: bool = False) -> int:
    """Looks at a run until it is over or left; the exit status.

    Args:
        path: Its folder here.
        lines: No live screen, also where there could be one.

    Raises:
        PacelineError: It cannot be asked, or its results cannot come home.
    """
    way = way_to(path)
    if way is None:
        state = look_at(path)
        say(for_reader(describe(state), sys.stdout))
        if state.exit_code is None:
            return 0 if state.word == "not started" else 1
        return state.exit_code
    return asyncio.run(_Attached(way, lines).run())


class Wishes:
    """What keys ask for, of a launcher somewhere."""

    def __init__(self, way: Way) -> None:
        self._way = way

    async def stop(self, *, now: bool = False) -> str:
        await self._way.stop(now=now)
        return "stopping at once" if now else "stopping"

    async def save(self) -> str:
        return str((await self._way.ask({"do": "save"})).get("text", ""))

    async def stacks(self) -> str:
        return str((await self._way.ask({"do": "stacks"})).get("text", ""))


class _Attached:
    """One terminal that looks at one run."""

    def __init__(self, way: Way, lines: bool) -> None:
        self._way, self._path = way, way.path
        self._screen = Screen("all", look="lines" if lines else "live")
        self._feed = Feed(way.path, self._screen)
        self._left = asyncio.Event()
        self._interrupts, self._command = 0, tuple[str, ...]()
        self._echoes = Echoes()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        keys = Keys(lambda key: self._left.set() if key == "d" else None)
        try:
            leave = self._left.set
            with _handled({signal.SIGINT: self._interrupted, signal.SIGTERM: leave,
                           signal.SIGHUP: leave, signal.SIGTSTP: leave}):  # fmt: skip
                over = await self._watch(keys)
        finally:
            keys.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._way.close()
            self._screen.close()
        if not over:
            again = shell_text(["paceline", "attach", called(self._path)])
            say(f"paceline: the run goes on; to come back: {again}", err=True)
            return 0
        return tell_end(self._path, self._command)

    async def _watch(self, keys: Keys) -> bool:
        """Until it is over, and at home, or left; whether it is over."""
        trouble, first = "", True
        while True:
            standing = await self._way.look()
            self._command = standing.about.command if standing.about else ()
            if trouble != self._way.trouble:
                trouble = self._way.trouble
                self._screen.note(f"paceline: {trouble or 'the connection is back'}")
            if first:
                self._begin(keys)
            first = False
            self._feed.show()
            if standing.over and not trouble:
                self._screen.unwatch()
                await self._way.home()
                self._feed.show()
                return True
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._left.wait(), LOOK_EVERY_S)
                return False

    def _begin(self, keys: Keys) -> None:
        where = short(self._path.absolute())
        self._screen.note(f"paceline: {where}: Ctrl-C stops the run, Ctrl-Z leaves it running")
        self._screen.watch(
            self._feed.board, title=self._path.name, seconds=seconds_of(self._path),
            logs=short(self._path.absolute() / names.LOGS), wishes=Wishes(self._way),
            leave=self._left.set, wait_s=0.0,
        )  # fmt: skip
        if not self._screen.at_a_glance:  # also where the terminal is too small for it
            keys.begin()

    def _interrupted(self) -> None:
        if self._echoes.echoes(signal.SIGINT):
            return
        self._interrupts += 1
        now = self._interrupts > 1
        self._screen.note("paceline: stopping at once" if now else
                          "paceline: SIGINT: stopping (once more to stop at once)")  # fmt: skip
        task = asyncio.ensure_future(self._stop(now))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _stop(self, now: bool) -> None:
        try:
            await self._way.stop(now=now)
        except (PacelineError, ConnectionError) as problem:
            self._screen.note(f"paceline: the run could not be stopped: {problem}")


@contextlib.contextmanager
def _handled(handlers: Mapping[signal.Signals, Callable[[], object]]) -> Any:
    """Has these called for signals, unless they were ignored before."""
    loop = asyncio.get_running_loop()
    ours = [one for one in handlers if signal.getsignal(one) != signal.SIG_IGN]
    for signum in ours:
        loop.add_signal_handler(signum, handlers[signum])
    try:
        yield
    finally:
        for signum in ours:
            loop.remove_signal_handler(signum)


class Feed:
    """What a run's files have that is new, for a screen and its board.

    Args:
        path: The run's folder.
        screen: Is shown what ranks write, and what happens.

    Attributes:
        board: Where everybody is.
    """

    def __init__(self, path: Path, screen: Screen) -> None:
        self.board = Board()
        self._path, self._screen = path, screen
        self._files: dict[Path, _Growing] = {}
        self._first = True

    def show(self) -> None:
        """Shows what has come since the last time; at first the last lines of each log."""
        now = time.monotonic()
        for line in self._records(names.EVENTS):
            event = Event.read(line)
            if event is not None:
                self._happened(event, now)
        for line in self._records(names.METRICS):
            self.board.record(line)
        said = records.read_object(self._path / names.RANKS)
        if said is not None:
            self.board.read(said, now, time.time())
        for file in logs_of(self._path):
            rank = names.rank_of(file)
            data = self._new(file, BEGIN_WITH if self._first else None)
            if data and rank is not None:
                self._screen.output(file.parent.name, rank, "out", data)
        progress = self.board.progress
        if progress and all(isinstance(one, (int, float, type(None))) for one in progress.values()):
            self._screen.progress(progress)
        self._first = False

    def _happened(self, event: Event, now: float) -> None:
        before = self.board.news[-1] if self.board.news else None
        self.board.take(event, now)
        news = self.board.news[-1] if self.board.news else None
        if news is not before and news is not None and not self._first:
            self._screen.note(f"paceline: {news.text}")

    def _records(self, name: str) -> list[dict[str, Any]]:
        file = self._path / name
        lines = self._files.setdefault(file, _Growing(file)).lines()
        found = (records.parse_json(line.decode("utf-8", "replace")) for line in lines)
        return [one for one in found if isinstance(one, dict)]

    def _new(self, file: Path, tail: int | None) -> bytes:
        return self._files.setdefault(file, _Growing(file, tail)).read()


def seconds_of(path: Path) -> float:
    """For how long a run has been under way."""
    first = next(iter(records.read_records(path / names.EVENTS, 1 << 12)), {})
    began = records.as_float(first.get("time"))
    return max(0.0, time.time() - began) if began else 0.0


class _Growing:
    """A file that is added to.

    Args:
        path: Of the file, which need not be there yet.
        tail: Begin with the lines in the last so many bytes; ``None``: at the beginning.
    """

    def __init__(self, path: Path, tail: int | None = None) -> None:
        self._path, self._tail = path, tail
        self._file: IO[bytes] | None = None
        self._rest = b""

    def read(self) -> bytes:
        """What has come, at most so much at once."""
        try:
            if self._file is not None and self._path.lstat().st_ino != os.fstat(
                self._file.fileno()
            ).st_ino:  # fmt: skip
                self._file.close()
                self._file = None
            if self._file is None:
                self._open()
        except OSError:
            return b""
        assert self._file is not None
        return self._file.read(PIECE)

    def _open(self) -> None:
        self._file = records.open_regular(self._path)
        tail, self._tail = self._tail, None
        if tail is not None and self._file.seek(0, os.SEEK_END) > tail:
            self._file.seek(-tail, os.SEEK_END)
            self._file.readline()
        elif tail is not None:
            self._file.seek(0)

    def lines(self) -> list[bytes]:
        """Whole lines that have come."""
        found: list[bytes] = []
        while data := self.read():
            *whole, self._rest = (self._rest + data).split(b"\n")
            found += whole
            if len(self._rest) > MOST_LINE:
                self._rest = b""
        return found


def tell_end(path: Path, command: tuple[str, ...] = ()) -> int:
    """Says how a run ended, as its launcher would have; its exit status.

    Args:
        path: Its folder.
        command: The words that were typed for it; where they are not known, empty.
    """
    said = records.read_object(path / names.RESULT)
    if said is None:
        say(for_reader(describe(look_at(path)), sys.stderr), err=True)
        return 1
    result = Result.from_json(said)
    events = read_events(records.read_records(path / names.EVENTS))
    plan = records.read_object(path / names.PLAN) or {}
    whole = path.absolute()
    outcome = RunOutcome(
        whole, result, events, {}, records.as_float(said.get("seconds")), {},
        bool(command) and is_resumable(result, events),
        records.as_int(plan.get("world_size")) or 0, homes(events), command=command,
    )  # fmt: skip
    code = 1 if result.exit_code == UNKNOWN else result.exit_code
    if result.error:
        say(for_reader(result.error, sys.stderr), err=True)
    elif text := report_failure(outcome):
        say(text, err=True)
        explain_run(whole, result, events, result.failure is not None)
    elif code == 0:
        say(report_success(outcome), err=True)
    else:
        say(for_reader(describe(look_at(path)), sys.stderr), err=True)
    return code
