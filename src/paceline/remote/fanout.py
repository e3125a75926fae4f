"""Many hosts at once: bounded, all outcomes kept."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from paceline.agent.procs import make_room_for_descriptors
from paceline.remote.channel import (
    LOGINS_AT_ONCE,
    Channel,
    LoginRefused,
    Wrap,
    connect,
    show_host_key,
    unwrapped,
)
from paceline.remote.openssh import SshOptions, fingerprint, offending_line
from paceline.spec.errors import ConnectError
from paceline.spec.hosts import Host

T = TypeVar("T")

FILES_A_HOST = 4  # three pipes of its ssh, and what waits for its end


async def reach_all(
    hosts: Sequence[Host],
    pythons: Sequence[str],
    options: SshOptions,
    wrap: Wrap = unwrapped,
    reached: Callable[[int], None] | None = None,
    lasts: bool = False,
) -> list[Channel | LoginRefused]:
    """Logs in everywhere at once; one outcome a host, in order. No refusal hides another.

    ``reached`` is told how many hosts answered by now; ``lasts`` as for :func:`connect`.

    ConnectError when this machine may not open so many files.
    """
    _make_room(len(hosts))
    wait_without_threads()
    gate = asyncio.Semaphore(LOGINS_AT_ONCE)
    there = itertools.count(1)

    async def one(host: Host, python: str) -> Channel | LoginRefused:
        async with gate:
            try:
                channel = await connect(host, python, options, wrap, lasts)
            except LoginRefused as refused:
                return refused
            if reached is not None:
                reached(next(there))
            return channel

    return await all_opened([one(*pair) for pair in zip(hosts, pythons, strict=True)])


async def all_opened(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """What opens channels, at once: all results, or the first failure and no channel left open."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return await all_of(tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Channel):
                await outcome.close()
        raise


async def all_of(tasks: Sequence[asyncio.Task[T]]) -> list[T]:
    """The results of all, in order, or the first failure; the tasks stay the caller's.

    Unlike ``gather``, which cancels them when it is cancelled: the caller, who has to end them in
    any case, would cancel them a second time, in the midst of closing what they had opened.
    """
    if tasks:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    return await asyncio.gather(*tasks)


def _make_room(hosts: int) -> None:
    try:
        make_room_for_descriptors(FILES_A_HOST * hosts)
    except OSError as error:
        raise ConnectError(
            f"this machine may not hold connections to {hosts} hosts",
            found=str(error.strerror),
            remedy="Raise its hard limit of open files, or take fewer hosts: --nnodes N",
        ) from None


def wait_without_threads() -> None:
    """asyncio of Python 3.10 and 3.11 starts a thread for each child unless told otherwise."""
    if sys.version_info < (3, 12):
        with contextlib.suppress(AttributeError, OSError):  # macOS; kernels before 5.3
            os.close(os.pidfd_open(os.getpid()))
            if not isinstance(asyncio.get_child_watcher(), _Watcher):
                asyncio.set_child_watcher(_Watcher())


if sys.version_info < (3, 12):

    class _Watcher(asyncio.PidfdChildWatcher):
        """Watches each child in the event loop that started it, as later Pythons do.

        There is one watcher for all of a process's threads, and each may have a loop.
        """

        def is_active(self) -> bool:
            return True

        def attach_loop(self, loop: asyncio.AbstractEventLoop | None) -> None:
            """It has none of its own."""

        def add_child_handler(  # type: ignore[override,unused-ignore]
            self, pid: int, callback: Any, *args: Any
        ) -> None:
            loop = asyncio.get_running_loop()
            fd = os.pidfd_open(pid)

            def ended() -> None:
                loop.remove_reader(fd)
                os.close(fd)
                try:
                    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                except ChildProcessError:
                    status = 255  # somebody else has taken it: as asyncio's own watchers say
                callback(pid, status, *args)

            loop.add_reader(fd, ended)

        def remove_child_handler(self, pid: int) -> bool:
            return False  # asyncio's transports do not ask for it


async def connect_all(
    hosts: Sequence[Host],
    pythons: Sequence[str],
    options: SshOptions,
    wrap: Wrap = unwrapped,
    reached: Callable[[int], None] | None = None,
    lasts: bool = False,
) -> list[Channel]:
    """Logs in everywhere at once; all refusals in one ConnectError, sorted by cause."""
    outcomes = await reach_all(hosts, pythons, options, wrap, reached, lasts)
    channels = [outcome for outcome in outcomes if isinstance(outcome, Channel)]
    refused = [outcome for outcome in outcomes if isinstance(outcome, LoginRefused)]
    if refused:
        await asyncio.gather(*(channel.close() for channel in channels))
        raise await refusals(refused, len(hosts), options)
    return channels


async def refusals(refused: Sequence[LoginRefused], total: int,
                   options: SshOptions) -> ConnectError:  # fmt: skip
    """One error for all refusals, grouped by cause, with one remedy a host."""
    by_cause: dict[str, list[LoginRefused]] = {}
    for one in refused:
        by_cause.setdefault(one.refusal.cause, []).append(one)
    found, remedies = [], []
    for cause, group in sorted(by_cause.items()):
        for one in group:
            found.append(f"{cause}: {one.host.name}: {await _words(one, options)}")
            remedies.append(f"{one.host.name}: {one.refusal.remedy}")
    names = ", ".join(one.host.name for one in refused)
    noun = "host" if total == 1 else "hosts"
    return ConnectError(
        f"cannot log in to {len(refused)} of {total} {noun}: {names}",
        found="\n".join(found),
        remedy="\n".join(remedies),
    )


async def _words(one: LoginRefused, options: SshOptions) -> str:
    """What was met, with the fingerprints where a host key is the matter."""
    name, words = one.host.name, one.refusal.found
    if one.refusal.cause == "host key not known":
        key = await show_host_key(one.host, options)
        return f"{name} shows the key {key}, which is not pinned\n{words}" if key else words
    if one.refusal.cause == "host key changed" and (pinned := _pinned(words)):
        return f"another key is pinned: {pinned}\n{words}"
    return words


def _pinned(words: str) -> str | None:
    """The fingerprint that the offended file holds, and where."""
    place = offending_line(words)
    if place is None:
        return None
    file, number = place
    try:
        line = Path(file).read_text(errors="replace").splitlines()[number - 1]
    except (OSError, IndexError):
        return None
    key = fingerprint(line)
    return f"{key} ({file}, line {number})" if key else None
