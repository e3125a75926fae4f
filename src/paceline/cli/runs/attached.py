"""A terminal attached to a run that it did not start."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

from paceline.cli.runs.client import LauncherClient, RemoteLauncher, client_for
from paceline.cli.runs.describe import describe_run
from paceline.cli.runs.rank_logs import rank_logs
from paceline.cli.runs.run_end import (
    explain_difference,
    explain_run,
    report_failure,
    report_success,
)
from paceline.cli.runs.run_lookup import short_name
from paceline.cli.runs.state import last_started_at, read_state
from paceline.cli.verb import say
from paceline.launch.interrupts import EchoFilter
from paceline.launch.results.outputs import LINK_SHARE, POLL_S
from paceline.launch.results.run_outcome import RunOutcome, is_resumable
from paceline.launch.terminal.keys import Keys
from paceline.launch.terminal.run_state import RunState
from paceline.launch.terminal.screen import Screen
from paceline.rundir import records
from paceline.rundir.directory import short
from paceline.rundir.ownership import read_of_last_start, start_id
from paceline.spec import rundir as names
from paceline.spec.errors import PacelineError
from paceline.spec.events import Event, events_of_start, read_events, shipped_copies
from paceline.spec.failure import UNKNOWN, Result
from paceline.spec.formatting import shell_text
from paceline.spec.terminal import format_for

T = TypeVar("T")

POLL_INTERVAL_S = 0.5
INITIAL_TAIL_BYTES = 2048  # bytes of each log that were there already
READ_BYTES = 1 << 20  # bytes of a file that are taken at once
MAX_LINE_BYTES = 1 << 20


def attach_to_run(path: Path, *, lines: bool = False) -> int:
    """Shows a run until it is over or left; returns the exit status.

    Raises:
        PacelineError: Its launcher cannot be asked, or its results cannot be fetched.
    """
    client = client_for(path)
    if client is None:
        state = read_state(path)
        say(format_for(describe_run(state), sys.stdout))
        if state.exit_code is None:
            return 1 if state.has_launcher else 0
        return state.exit_code
    return asyncio.run(_AttachedTerminal(client, lines).run())


class RunControls:
    """Forwards the actions of keys to a launcher."""

    def __init__(self, client: LauncherClient) -> None:
        self._client = client

    async def stop(self, *, immediately: bool = False) -> str:
        await self._client.stop(immediately=immediately)
        return "stopping at once" if immediately else "stopping"

    async def save(self) -> str:
        return str((await self._client.request({"do": "save"})).get("text", ""))

    async def stacks(self) -> str:
        return str((await self._client.request({"do": "stacks"})).get("text", ""))


class _AttachedTerminal:
    def __init__(self, client: LauncherClient, lines: bool) -> None:
        self._client, self._path = client, client.path
        self._screen = Screen("all", display="lines" if lines else "live")
        if isinstance(client, RemoteLauncher):
            client.note = self._screen.note
        self._feed = Feed(client.path, self._screen)
        self._detach_requested = asyncio.Event()
        self._interrupts, self._command = 0, tuple[str, ...]()
        self._echoes = EchoFilter()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        keys = Keys(lambda key: self._detach_requested.set() if key == "d" else None)
        try:
            detach = self._detach_requested.set
            with _signal_handlers({signal.SIGINT: self._interrupted, signal.SIGTERM: detach,
                           signal.SIGHUP: detach, signal.SIGTSTP: detach}):  # fmt: skip
                is_over = await self._watch(keys)
        finally:
            keys.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._client.close()
            self._screen.close()
        if not is_over:
            command = shell_text(["paceline", "attach", short_name(self._path)])
            say(f"paceline: the run continues; to attach again: {command}", err=True)
            return 0
        return print_end(self._path, self._command)

    async def _watch(self, keys: Keys) -> bool:
        """Follows the run to its end, or until the user leaves; returns whether it is over."""
        shown_error, is_first = "", True
        fetching = asyncio.ensure_future(self._fetch_outputs())
        self._tasks.add(fetching)
        while True:
            status = await self._unless_left(self._client.look())
            if status is None:
                return False
            self._command = status.record.command if status.record else ()
            if shown_error != self._client.last_error:
                shown_error = self._client.last_error
                self._screen.note(f"paceline: {shown_error or 'the connection is back'}")
            if is_first:
                self._show_screen(keys)
            is_first = False
            self._feed.update()
            if status.is_over and not shown_error:
                self._screen.stop_live()
                fetching.cancel()
                await asyncio.wait([fetching])
                if await self._unless_left(self._fetch_results()) is None:
                    return False
                self._feed.update()
                return True
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._detach_requested.wait(), POLL_INTERVAL_S)
                return False

    async def _unless_left(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Returns the result; ``None`` if the user leaves before: a host may never answer."""
        working = asyncio.ensure_future(work)
        leaving = asyncio.ensure_future(self._detach_requested.wait())
        try:
            await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            for task in (working, leaving):
                task.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)

    async def _fetch_outputs(self) -> None:
        """Fetches files that the script writes while it runs, at the pace of a launcher."""
        while True:
            await asyncio.sleep(POLL_S)
            await self._client.fetch_outputs(share=LINK_SHARE)

    async def _fetch_results(self) -> bool:
        await self._client.fetch_results()
        return True

    def _show_screen(self, keys: Keys) -> None:
        folder, start = short(self._path.absolute()), last_started_at(self._path)
        self._screen.note(f"paceline: {folder}: Ctrl-C stops the run, Ctrl-Z leaves it running")
        self._screen.start_live(
            self._feed.state, title=self._path.name,
            seconds=max(0.0, time.time() - start) if start else 0.0,
            logs=short(self._path.absolute() / names.LOGS), actions=RunControls(self._client),
            on_detach=self._detach_requested.set, delay_s=0.0,
        )  # fmt: skip
        if not self._screen.is_live:  # also where the terminal is too small for it
            keys.start()

    def _interrupted(self) -> None:
        if self._echoes.is_echo(signal.SIGINT):
            return
        self._interrupts += 1
        if self._interrupts > 2:  # the host does not answer
            self._detach_requested.set()
            return
        now = self._interrupts > 1
        self._screen.note("paceline: stopping at once" if now else
                          "paceline: SIGINT: stopping (once more to stop at once)")  # fmt: skip
        self._screen.hide_interrupts()
        task = asyncio.ensure_future(self._stop(now))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _stop(self, immediately: bool) -> None:
        try:
            await self._client.stop(immediately=immediately)
        except (PacelineError, ConnectionError) as problem:
            self._screen.note(f"paceline: the run could not be stopped: {problem}")


@contextlib.contextmanager
def _signal_handlers(handlers: Mapping[signal.Signals, Callable[[], object]]) -> Any:
    """Has these called for signals, unless they were ignored before."""
    loop = asyncio.get_running_loop()
    handled = [number for number in handlers if signal.getsignal(number) != signal.SIG_IGN]
    for signum in handled:
        loop.add_signal_handler(signum, handlers[signum])
    try:
        yield
    finally:
        for signum in handled:
            loop.remove_signal_handler(signum)


class Feed:
    """Reads what is new in a run's files, for a screen and a :class:`RunState`."""

    def __init__(self, path: Path, screen: Screen) -> None:
        self.state = RunState()
        self._path, self._screen = path, screen
        self._files: dict[Path, _GrowingFile] = {}
        self._log_begins: dict[tuple[str, int | None], int] = {}  # ranks of the newest start
        self._first = True

    def update(self) -> None:
        """Shows what has come since the last time; at first the last lines of each log.

        Skips output of earlier starts in the same run directory.
        """
        clock = time.monotonic()
        for line in self._records(names.EVENTS):
            event = Event.read(line)
            if event is not None:
                self._happened(event, clock)
        for line in self._records(names.METRICS):
            self.state.add_metrics(line)
        ranks = read_of_last_start(self._path, names.RANKS)
        if ranks is not None:
            self.state.load(ranks, clock, time.time())
        for file in rank_logs(self._path):
            rank = names.rank_of_log(file)
            if (begin := self._log_begins.get((file.parent.name, rank))) is None:
                continue
            tail = INITIAL_TAIL_BYTES if self._first else None
            data = self._files.setdefault(file, _GrowingFile(file, tail, begin)).read()
            if data and rank is not None:
                self._screen.output(file.parent.name, rank, "out", data)
        progress = self.state.progress
        kinds = (int, float, type(None))
        if progress and all(isinstance(figure, kinds) for figure in progress.values()):
            self._screen.progress(progress)
        self._first = False

    def _happened(self, event: Event, clock: float) -> None:
        if event.kind == "connected" and not event["late"]:
            self._log_begins.clear()
        elif event.kind in ("log begins", "rank started"):
            key = names.safe_name(event.host), event.rank
            self._log_begins.setdefault(key, event["bytes"] or 0)
        previous = self.state.news[-1] if self.state.news else None
        self.state.apply(event, clock)
        news = self.state.news[-1] if self.state.news else None
        if news is not previous and news is not None and not self._first:
            self._screen.note(f"paceline: {news.text}")

    def _records(self, name: str) -> Iterator[dict[str, Any]]:
        file = self._path / name
        for line in self._files.setdefault(file, _GrowingFile(file)).lines():
            record = records.parse_json(line.decode("utf-8", "replace"))
            if isinstance(record, dict):
                yield record


class _GrowingFile:
    """A file that is added to, and need not be there yet.

    Args:
        tail: Begin with the lines in the last so many bytes; ``None``: at the beginning.
        begin: Skip so many bytes.
    """

    def __init__(self, path: Path, tail: int | None = None, begin: int = 0) -> None:
        self._path, self._tail, self._begin = path, tail, begin
        self._file: IO[bytes] | None = None
        self._partial = b""

    def read(self) -> bytes:
        try:
            if self._file is not None:
                inode = os.fstat(self._file.fileno()).st_ino
                if self._path.lstat().st_ino != inode:  # another file has its name now
                    self._file.close()
                    self._file = None
            if self._file is None:
                self._open()
        except OSError:
            return b""
        assert self._file is not None
        return self._file.read(READ_BYTES)

    def _open(self) -> None:
        self._file = records.open_regular(self._path)
        (tail, self._tail), (begin, self._begin) = (self._tail, None), (self._begin, 0)
        if tail is not None and self._file.seek(0, os.SEEK_END) - begin > tail:
            self._file.seek(-tail, os.SEEK_END)
            self._file.readline()
        else:
            self._file.seek(begin)

    def lines(self) -> Iterator[bytes]:
        """Yields new lines; of very many, those at the beginning and at the end."""
        num_read = 0
        while data := self.read():
            *complete, self._partial = (self._partial + data).split(b"\n")
            yield from filter(None, complete)
            if len(self._partial) > MAX_LINE_BYTES:
                self._partial = b""
            num_read += len(data)
            if num_read >= records.RECORDS_BYTES:
                self._skip_to_end(records.RECORDS_BYTES)
                num_read = 0

    def _skip_to_end(self, tail: int) -> None:
        assert self._file is not None
        if os.fstat(self._file.fileno()).st_size - self._file.tell() > tail:
            self._file.seek(-tail, os.SEEK_END)
            self._partial = b""  # what follows begins with a partial line, which is no valid JSON


def print_end(path: Path, command: tuple[str, ...] = ()) -> int:
    """Says how a run ended, as its launcher would have; returns its exit status."""
    record = read_of_last_start(path, names.RESULT)
    if record is None:
        say(format_for(describe_run(read_state(path)), sys.stderr), err=True)
        return 1
    result = Result.from_json(record)
    all_events = read_events(records.read_records(path / names.EVENTS))
    events = events_of_start(all_events, start_id(path))
    plan = records.read_object(path / names.PLAN) or {}
    run_dir = path.absolute()
    outcome = RunOutcome(
        run_dir, result, events, {}, records.as_float(record.get("seconds")),
        bool(command) and is_resumable(result, events),
        records.as_int(plan.get("world_size")) or 0, shipped_copies(events), command=command,
    )  # fmt: skip
    code = 1 if result.exit_code == UNKNOWN else result.exit_code
    if result.error:
        say(format_for(result.error, sys.stderr), err=True)
    elif text := report_failure(outcome):
        say(text, err=True)
        explain_run(run_dir, result, events, result.failure is not None)
    elif code == 0:
        explain_difference(run_dir, result, events)
        say(report_success(outcome), err=True)
    else:
        say(format_for(describe_run(read_state(path)), sys.stderr), err=True)
    return code
