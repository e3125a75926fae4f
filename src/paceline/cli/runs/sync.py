"""Brings the folder of a run that another host supervises up to date, once or for a while."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from paceline.cli.runs.client import RemoteLauncher, client_for
from paceline.cli.runs.state import read_state
from paceline.cli.verb import say
from paceline.rundir.ownership import detached_of
from paceline.spec.errors import NodeError, PacelineError
from paceline.spec.terminal import format_for

POLL_INTERVAL_S = 0.5
JOIN_TIMEOUT_S = 10.0  # the host may never answer
MAX_EXTRA_POLLS = 3  # of a one-time sync, because files may change every second


def sync_run(path: Path, show: Callable[[], None] | None = None) -> None:
    """Updates the folder of a run that goes on, or has ended, on another host.

    Args:
        show: Called when records and logs are up to date; then files that the script wrote while
            the run goes on are fetched, which may take long.

    Raises:
        ConnectError: The host cannot be asked.
        NodeError: It no longer knows the run.
    """
    client = client_for(path)
    if isinstance(client, RemoteLauncher):
        asyncio.run(_sync_once(client, show))
    elif show is not None:
        show()


async def _sync_once(client: RemoteLauncher, show: Callable[[], None] | None) -> None:
    try:
        status = await client.look()
        for _ in range(MAX_EXTRA_POLLS):
            if status.is_over or not client.is_behind:
                break
            status = await client.look()
        if status.is_over:
            await client.fetch_results()
        if show is not None:
            show()
            if not status.is_over:
                await client.fetch_outputs()
    finally:
        await client.close()


def try_sync(path: Path) -> bool:
    """Calls :func:`sync_run` and prints its failure; returns whether the folder is up to date."""
    try:
        sync_run(path)
        return True
    except (PacelineError, ConnectionError) as problem:
        text = problem.render() if isinstance(problem, PacelineError) else f"paceline: {problem}"
        say(format_for(text, sys.stderr), err=True)
        return False


@contextlib.contextmanager
def keep_synced(path: Path) -> Iterator[Callable[[], bool]]:
    """Keeps a run's folder up to date in the context; yields a function that says if it has ended.

    Raises:
        PacelineError: The host cannot be asked at first, or the results cannot be fetched.
    """
    client = client_for(path)
    if not isinstance(client, RemoteLauncher):
        yield lambda: read_state(path).is_over
        return
    thread = _SyncThread(client)
    thread.start()
    try:
        yield thread.has_ended
    finally:
        thread.end()


class _SyncThread:
    """Updates a run's folder in a thread, until the run is over and all is here."""

    def __init__(self, client: RemoteLauncher) -> None:
        self._client = client
        self._started, self._ended = threading.Event(), threading.Event()
        self._problem: BaseException | None = None
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)

    def start(self) -> None:
        """Returns when the folder is up to date for the first time."""
        self._thread.start()
        self._started.wait()
        if self._problem is not None:
            raise self._problem

    def has_ended(self) -> bool:
        """Returns whether the run is over and all of it is here."""
        if self._problem is not None:
            raise self._problem
        return self._has_ended

    def end(self) -> None:
        self._ended.set()
        self._thread.join(JOIN_TIMEOUT_S)

    def _run(self) -> None:
        try:
            asyncio.run(self._keep())
        except BaseException as problem:
            self._problem = problem
        finally:
            self._started.set()

    async def _keep(self) -> None:
        try:
            while not self._ended.is_set():
                status = await self._client.look()
                if status.is_over and not self._client.last_error:
                    await self._client.fetch_results()
                    self._has_ended = True
                    return
                self._started.set()
                await asyncio.sleep(POLL_INTERVAL_S)
        finally:
            await self._client.close()


def stop_remote(path: Path, immediately: bool, timeout_s: float) -> bool:
    """Ends a run on another host and fetches its results; returns False if it was over already.

    Raises:
        NodeError: It does not end in time.
    """
    detached = detached_of(path)
    assert detached is not None
    return asyncio.run(_stop(RemoteLauncher(path, detached), immediately, timeout_s))


async def _stop(client: RemoteLauncher, immediately: bool, timeout_s: float) -> bool:
    try:
        status = await client.look()
        was_running = not status.is_over
        if was_running:
            await client.stop(immediately=immediately)
        deadline = time.monotonic() + timeout_s
        while not status.is_over:
            if time.monotonic() > deadline:
                raise NodeError(f"{client.path} has not ended within {timeout_s:.0f} s",
                                found=client.last_error, remedy="--now")  # fmt: skip
            await asyncio.sleep(POLL_INTERVAL_S / 2)
            status = await client.look()
        await client.fetch_results()
        return was_running
    finally:
        await client.close()
