"""Links to agents (three streams and their end), and the child processes under them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from asyncio.subprocess import PIPE
from collections.abc import Mapping, Sequence
from typing import Protocol

from paceline.remote.openssh import SSH_FAILED
from paceline.spec.errors import NodeError

EXIT_GRACE_S = 0.5  # after the child's end
MAX_OUTPUT_BYTES = 16 << 20  # of a command that is run to its end
_POLL_S = 0.01


async def spawn(
    argv: Sequence[str], *, stdin: int = PIPE, stderr: int = PIPE,
    env: Mapping[str, str] | None = None, limit: int = 1 << 16,
) -> asyncio.subprocess.Process:  # fmt: skip
    """Starts a command; Ctrl-C is for the launcher alone, which ends the job in order.

    May be cancelled. asyncio's function would then wait until all pipes to the child are closed,
    and a grandchild (ssh's ProxyCommand) may hold one open for minutes.

    Args:
        argv, env: The command, and its environment if it is not this process's.
        stdin, stderr: As of ``subprocess``; standard output is a pipe.
        limit: Bytes of a line that can be read from a pipe.
    """
    env = dict(os.environ if env is None else env)
    if env.get("SHLVL", "0") == "0":
        # bash, started by ssh for a ProxyCommand, would read ~/.bashrc: its standard input is a
        # socket, and it takes itself for a login from another host unless a shell is above it
        env["SHLVL"] = "1"
    creating = asyncio.ensure_future(asyncio.create_subprocess_exec(
        *argv, stdin=stdin, stdout=PIPE, stderr=stderr, env=env, limit=limit,
        start_new_session=True,
    ))  # fmt: skip
    try:
        process = await asyncio.shield(creating)
        _expect_unread_input(process)
        return process
    except asyncio.CancelledError:
        await asyncio.wait([creating])  # for milliseconds
        if not creating.cancelled() and creating.exception() is None:
            await _kill(creating.result())
        raise


def _expect_unread_input(process: asyncio.subprocess.Process) -> None:
    """Keeps Python before 3.11.4 from printing a traceback if the child ends before it has read."""
    protocol = getattr(process.stdin, "_protocol", None)
    if (closed := getattr(protocol, "_stdin_closed", None)) is not None:
        closed.add_done_callback(lambda future: future.cancelled() or future.exception())


async def _kill(process: asyncio.subprocess.Process) -> None:
    _signal_group(process, signal.SIGKILL)
    try:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(wait_for_exit(process), EXIT_GRACE_S)
    finally:
        _close_pipes(process)


def _signal_group(process: asyncio.subprocess.Process, signum: int) -> None:
    """Signals the child's whole group, including a ProxyCommand that holds the pipes."""
    # macOS raises "not permitted" for a group that has just ended
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signum)


def _close_pipes(process: asyncio.subprocess.Process) -> None:
    """Closes the pipes, which a grandchild may hold open, before the event loop ends."""
    transport = getattr(process, "_transport", None)  # asyncio offers no other way
    if transport is not None:
        transport.close()


async def wait_for_exit(process: asyncio.subprocess.Process) -> None:
    """Waits for a child's exit only.

    In some versions of Python (such as 3.11) asyncio's ``wait`` also waits until its pipes are
    closed, which a grandchild may hold open.
    """
    while process.returncode is None:
        await asyncio.sleep(_POLL_S)


async def run_process(
    argv: Sequence[str], timeout_s: float, stdin: str = "", env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end.

    Raises:
        asyncio.TimeoutError, OutputTooLong: It was killed.
    """
    process = await spawn(argv, env=env)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        process.stdin.write(stdin.encode())
        process.stdin.close()
        reading = asyncio.gather(_read_output(process.stdout), _read_output(process.stderr))
        outputs = await asyncio.wait_for(reading, timeout_s)
        await asyncio.wait_for(wait_for_exit(process), timeout_s)
    finally:
        if process.returncode is None:
            await _kill(process)
        _close_pipes(process)
    assert process.returncode is not None
    return subprocess.CompletedProcess(argv, process.returncode, *outputs)


async def _read_output(stream: asyncio.StreamReader) -> str:
    output = bytearray()
    while data := await stream.read(1 << 16):
        output += data
        if len(output) > MAX_OUTPUT_BYTES:
            raise OutputTooLong(f"a command printed more than {MAX_OUTPUT_BYTES >> 20} MiB")
    return output.decode(errors="replace")


class OutputTooLong(NodeError):
    """A command printed more than ``MAX_OUTPUT_BYTES``."""


class Writer(Protocol):
    """A ``StreamWriter``, or a wrapper around one."""

    @property
    def transport(self) -> asyncio.WriteTransport:
        """Whose ``abort`` gives up without waiting."""

    def write(self, data: bytes) -> None:
        """Sends without waiting."""

    async def drain(self) -> None:
        """Waits until more can be sent."""

    def close(self) -> None:
        """Nothing more is sent."""


class Link(Protocol):
    """The streams of a connection to an agent.

    Attributes:
        reader: The agent's frames.
        errors: Standard error of the agent and of the processes in between.
    """

    reader: asyncio.StreamReader
    errors: asyncio.StreamReader

    @property
    def writer(self) -> Writer:
        """Frames for the agent; closing it tells the agent to leave."""

    @property
    def status(self) -> int | None:
        """Exit status of the connecting process; ``None`` while it runs or without one."""

    async def has_exited(self) -> bool:
        """Whether the agent has ended by itself, after the streams have ended.

        False if only the connection may have broken.
        """

    async def drop(self) -> None:
        """Drops the link like a network failure: the agent is not told to leave."""

    async def release(self) -> None:
        """Drops the link after the agent has detached from it."""

    async def end(self, timeout_s: float) -> None:
        """Closes the link; the other side has ``timeout_s`` seconds to end by itself."""


class ProcessLink:
    """A link through a child process: ssh, a container engine, or the agent itself.

    Args:
        process: With its three pipes, and leader of a process group of its own.
        is_agent: The process is the agent itself.
    """

    def __init__(self, process: asyncio.subprocess.Process, is_agent: bool = False) -> None:
        self._is_agent = is_agent
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self.reader, self.writer, self.errors = process.stdout, process.stdin, process.stderr
        self._process = process

    @property
    def status(self) -> int | None:
        return self._process.returncode

    async def has_exited(self) -> bool:
        """Whether the remote command has exited: ssh passes its exit status on."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(wait_for_exit(self._process), EXIT_GRACE_S)
        status = self._process.returncode
        return status is not None and 0 <= status < SSH_FAILED

    async def drop(self) -> None:
        """Kills the child, so that it cannot pass on the end of its input."""
        await _kill(self._process)

    async def release(self) -> None:
        """Kills the child unless it is the agent, which is no longer ours to end."""
        if not self._is_agent:
            await self.drop()
            return
        transport = getattr(self._process, "_transport", None)
        if transport is not None:
            transport._proc = None  # or asyncio would kill it when it closes the pipes
        if sys.version_info < (3, 12):
            asyncio.get_child_watcher().remove_child_handler(self._process.pid)
        _close_pipes(self._process)

    async def end(self, timeout_s: float) -> None:
        """Waits for the child, then terminates, then kills it."""
        self.writer.close()
        try:
            try:
                await asyncio.wait_for(wait_for_exit(self._process), timeout_s or 0.001)
            except asyncio.TimeoutError:
                await self._terminate()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._read_to_end(), EXIT_GRACE_S)
        finally:
            _close_pipes(self._process)

    async def _terminate(self) -> None:
        _signal_group(self._process, signal.SIGTERM)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(wait_for_exit(self._process), 2.0)
        if self._process.returncode is None:
            _signal_group(self._process, signal.SIGKILL)
            await wait_for_exit(self._process)

    async def _read_to_end(self) -> None:
        while not (self.reader.at_eof() and self.errors.at_eof()):
            await asyncio.sleep(0.005)  # the channel's own tasks do the reading
