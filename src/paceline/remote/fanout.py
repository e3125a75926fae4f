"""Opens connections to many hosts, or awaits other work for them, in parallel."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
from collections.abc import Awaitable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from paceline.agent.supervision.processes import raise_descriptor_limit
from paceline.remote.channel import Channel, LoginError
from paceline.remote.login import MAX_PARALLEL_LOGINS, Wrap, connect, fetch_host_key, not_wrapped
from paceline.remote.openssh import SshOptions, fingerprint, offending_line
from paceline.remote.transport import ConnectedCallback, ignore_count
from paceline.spec.errors import ConnectError
from paceline.spec.formatting import pluralize
from paceline.spec.hosts import Host

T = TypeVar("T")

FILES_PER_HOST = 4  # three pipes of its ssh, and its pidfd


async def try_connect_hosts(
    hosts: Sequence[Host], pythons: Sequence[str], options: SshOptions, wrap: Wrap = not_wrapped,
    on_connected: ConnectedCallback = ignore_count, reuse: bool = False,
) -> list[Channel | LoginError]:  # fmt: skip
    """Logs in to all hosts in parallel; returns a channel or a refusal for each, in order.

    Args:
        hosts, pythons, options, wrap, reuse: As for :func:`connect`.
        on_connected: Called with the number of hosts that have answered.

    Raises:
        ConnectError: This machine may not open so many files.
    """
    try:
        raise_descriptor_limit(FILES_PER_HOST * len(hosts))
    except OSError as error:
        raise ConnectError(
            f"this machine may not hold connections to {len(hosts)} hosts",
            found=str(error.strerror),
            remedy="Raise its hard limit of open files, or take fewer hosts: --nnodes N",
        ) from None
    use_pidfd_watcher()
    gate = asyncio.Semaphore(MAX_PARALLEL_LOGINS)
    counter = itertools.count(1)

    async def try_connect(host: Host, python: str) -> Channel | LoginError:
        async with gate:
            try:
                channel = await connect(host, python, options, wrap, reuse)
            except LoginError as refusal:
                return refusal
            on_connected(next(counter))
            return channel

    return await open_channels([try_connect(*pair) for pair in zip(hosts, pythons, strict=True)])


async def open_channels(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs coroutines that open channels; after a failure all opened channels are closed."""
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    try:
        return await _join(tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Channel):
                await outcome.close()
        raise


async def gather_all(work: Sequence[Awaitable[Any]]) -> list[Any]:
    """Returns all results, in order; after the first failure the rest is cancelled and awaited."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in work]
    try:
        return await _join(tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def _join(tasks: Sequence[asyncio.Future[T]]) -> list[T]:
    """Returns the results of all tasks, in order, or raises the first failure.

    Unlike ``gather`` it does not cancel the tasks when it is cancelled: the caller does, and a
    second cancellation would interrupt their cleanup.
    """
    if tasks:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    return await asyncio.gather(*tasks)


def use_pidfd_watcher() -> None:
    """Avoids a thread for each child, which asyncio of Python 3.10 and 3.11 starts."""
    if sys.version_info < (3, 12):
        with contextlib.suppress(AttributeError, OSError):  # macOS; kernels before 5.3
            os.close(os.pidfd_open(os.getpid()))
            if not isinstance(asyncio.get_child_watcher(), _Watcher):
                asyncio.set_child_watcher(_Watcher())


if sys.version_info < (3, 12):

    class _Watcher(asyncio.PidfdChildWatcher):
        """Watches each child in the event loop that started it, as later Pythons do."""

        def is_active(self) -> bool:
            return True

        def attach_loop(self, loop: asyncio.AbstractEventLoop | None) -> None:
            """Does nothing: each child has its own loop."""

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
                    status = 255  # reaped elsewhere; as asyncio's own watchers do
                callback(pid, status, *args)

            loop.add_reader(fd, ended)

        def remove_child_handler(self, pid: int) -> bool:
            return False  # asyncio's transports do not ask for it


async def connect_hosts(
    hosts: Sequence[Host], pythons: Sequence[str], options: SshOptions, wrap: Wrap = not_wrapped,
    on_connected: ConnectedCallback = ignore_count, reuse: bool = False,
) -> list[Channel]:  # fmt: skip
    """Logs in to all hosts in parallel; one ConnectError reports all refusals."""
    outcomes = await try_connect_hosts(hosts, pythons, options, wrap, on_connected, reuse)
    channels = [outcome for outcome in outcomes if isinstance(outcome, Channel)]
    refusals = [outcome for outcome in outcomes if isinstance(outcome, LoginError)]
    if refusals:
        await asyncio.gather(*(channel.close() for channel in channels))
        error = await refusal_error(refusals, len(hosts), options)
        error.num_refusals = len(refusals)
        raise error
    return channels


async def refusal_error(refusals: Sequence[LoginError], total: int,
                        options: SshOptions) -> ConnectError:  # fmt: skip
    """One error for all refusals, sorted by cause, with a remedy for each host."""
    ordered = sorted(refusals, key=lambda error: error.refusal.cause)
    details = [f"{error.refusal.cause}: {error.host.name}: {await _details(error, options)}"
               for error in ordered]  # fmt: skip
    names = ", ".join(error.host.name for error in refusals)
    return ConnectError(
        f"cannot log in to {len(refusals)} of {pluralize(total, 'host')}: {names}",
        found="\n".join(details),
        remedy="\n".join(f"{error.host.name}: {error.refusal.remedy}" for error in ordered),
    )


async def _details(error: LoginError, options: SshOptions) -> str:
    """The refusal's text, with the fingerprints if it concerns a host key."""
    name, text = error.host.name, error.refusal.details
    if error.refusal.cause == "host key not known":
        key = await fetch_host_key(error.host, options)
        return f"{name} shows the key {key}, which is not pinned\n{text}" if key else text
    if error.refusal.cause == "host key changed" and (pinned := _pinned_fingerprint(text)):
        return f"another key is pinned: {pinned}\n{text}"
    return text


def _pinned_fingerprint(text: str) -> str | None:
    """The fingerprint of the pinned key that ssh's message names, with its file and line."""
    if (location := offending_line(text)) is None:
        return None
    file, number = location
    try:
        key = fingerprint(Path(file).read_text(errors="replace").splitlines()[number - 1])
    except (OSError, IndexError):
        return None
    return f"{key} ({file}, line {number})" if key else None
