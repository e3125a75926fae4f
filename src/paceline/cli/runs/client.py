"""Clients of the launcher of a detached or local run: look at it, ask it, stop it.

The launcher of such a run is on this machine, in another terminal, or it is a supervisor on some
host. For one on another host, each look also brings the run's folder here up to date, and once the
run is over all of its results are fetched.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.cli.runs.lost import remaining_lease_s
from paceline.cli.runs.state import end_run, read_state, request_launcher, require_owner_here
from paceline.cli.verb import say
from paceline.remote import this_machine
from paceline.remote.channel import AgentRefusal, HostSilent, HostUnresponsive
from paceline.rundir.ownership import detached_of, owner_alive, read_owner
from paceline.spec.detached import DetachedRecord, SupervisorLocation
from paceline.spec.errors import ConnectError, NodeError, PacelineError
from paceline.spec.formatting import shell_text
from paceline.spec.terminal import format_for
from paceline.transfer.follow import Follower, RunState, UnknownRun, follow

RECONNECT_DELAY_S = 2.0  # until the supervisor's host is dialled again
UNREACHABLE = (ConnectionError, HostUnresponsive, HostSilent)


class LocalLauncher:
    """A client of a launcher on this machine."""

    last_error = ""

    def __init__(self, path: Path) -> None:
        self.path = path

    async def look(self) -> RunState:
        owner = read_owner(self.path)
        if owner is not None and owner_alive(owner):
            state = "running"
        else:
            state = "lost" if read_state(self.path).word == "lost" else "ended"
        return RunState(state, None, has_changed=True)

    async def request(self, message: dict[str, Any]) -> dict[str, Any]:
        owner = read_owner(self.path) or {}
        require_owner_here(self.path, owner)
        try:
            return parse_reply(await asyncio.to_thread(request_launcher, self.path, owner, message))
        except (TimeoutError, ValueError) as problem:
            raise NodeError("the launcher gave no answer", found=str(problem)) from None

    async def stop(self, *, immediately: bool) -> None:
        try:
            await self.request({"do": "stop", "now": immediately})
        except NodeError:  # it does not listen
            end_run(read_state(self.path), immediately)

    async def fetch_outputs(self, *, share: float = 1.0) -> None:
        """Does nothing: they are here."""

    async def fetch_results(self) -> None:
        """Does nothing: all results are here."""

    async def close(self) -> None:
        """Does nothing: there is no connection."""


class RemoteLauncher:
    """A client of a supervisor on another host, over SSH; reconnects when the connection breaks.

    Attributes:
        note: Shows a line to the user.
        path: The run's folder here.
        last_error: Why the supervisor cannot be asked at present; empty while it can.
    """

    def __init__(self, path: Path, detached: SupervisorLocation) -> None:
        self.path, self.last_error = path, ""
        self.note: Callable[[str], None] = _print_note
        self._has_noted_delay, self._output_problem = False, ""
        self._detached = detached
        self._follower: Follower | None = None
        self._status: RunState | None = None
        self._reconnect_at = 0.0

    async def look(self) -> RunState:
        """Returns the status; after a broken connection the last known one, with ``last_error``.

        Raises:
            ConnectError: The host was never reached.
            NodeError: It knows nothing of the run, or what it sends cannot be written here.
        """
        status, clock = self._status, time.monotonic()
        if status is not None and self._follower is None and clock < self._reconnect_at:
            return replace(status, has_changed=False)
        try:
            if self._follower is None:
                self._follower = await follow(self.path, self._detached)
                self._follower.note = self.note
                self._follower.channel.on_late = self._note_late
            self._status = status = await self._follower.refresh()
            self.last_error = ""
        except UnknownRun:  # another follower brought everything, and it was removed there
            if status is None and detached_of(self.path) is not None:
                raise
            self._status = status = RunState("ended", status.record if status else None)
        except (*UNREACHABLE, ConnectError) as problem:
            await self.close()
            if status is None:
                raise self._connection_lost(problem) from None
            self.last_error = str(problem).partition("\n")[0]
            self._reconnect_at = time.monotonic() + RECONNECT_DELAY_S
            status = replace(status, has_changed=False)
        return status

    def _note_late(self, op: str) -> None:
        if not self._has_noted_delay:
            self._has_noted_delay = True
            host = self._detached.host
            self.note(f"paceline: waiting for {host}, which is connected but does not answer")

    @property
    def is_behind(self) -> bool:
        """Whether another look brings what the last could not."""
        return self._follower is not None and self._follower.is_behind

    async def request(self, message: dict[str, Any]) -> dict[str, Any]:
        """Returns the launcher's answer; PacelineError if it refuses or cannot be reached."""
        if self._follower is None:
            raise NodeError(self.last_error or f"{self._detached.host} cannot be asked now")
        try:
            return parse_reply(await self._follower.ask(message))
        except (AgentRefusal, ValueError) as problem:
            raise NodeError(
                f"the supervisor on {self._detached.host} gave no answer", found=str(problem)
            ) from None
        except UNREACHABLE as problem:
            raise self._connection_lost(problem) from None

    async def stop(self, *, immediately: bool) -> None:
        try:
            await self.request({"do": "stop", "now": immediately})
        except NodeError:  # it does not listen
            if self._follower is None:
                raise
            try:
                await self._follower.signal(2 if immediately else 1)
            except UNREACHABLE as problem:
                raise self._connection_lost(problem) from None

    async def fetch_outputs(self, *, share: float = 1.0) -> None:
        """Fetches files that the script wrote and that were complete at the last look.

        Args:
            share: Part of the time in which files are transferred.
        """
        if self._follower is None:
            return
        try:
            await self._follower.sync_outputs(share=share)
        except UNREACHABLE:
            pass  # the next look says so
        except (PacelineError, OSError) as problem:
            text = str(problem).partition("\n")[0]
            if text != self._output_problem:
                self._output_problem = text
                self.note(f"paceline: new files of the script do not arrive: {text}")

    async def fetch_results(self) -> None:
        """Fetches all results; after the last follower, the host removes the run's folder."""
        if self._follower is None or self._status is None:
            raise ConnectError(f"{self._detached.host} cannot be asked now", found=self.last_error)
        is_whole = True
        if detached_of(self.path) is not None:  # else another follower has done it
            if self._status.state == "lost":
                await self._wait_for_ranks()
            try:
                is_whole = await self._follower.finish(self._status.state, _print_note)
            except UNREACHABLE as problem:
                raise self._connection_lost(problem) from None
            if self._follower.has_report:
                from paceline.report.writer import write_at_end

                await asyncio.to_thread(write_at_end, self.path)
        run = self._status.record
        with contextlib.suppress(NodeError, ConnectionError):
            await self._follower.discard(
                fetched=is_whole and run is not None and was_started_here(run, self.path)
            )

    async def _wait_for_ranks(self) -> None:
        """Waits until the ranks can save no more: the folder on their host will be removed."""
        wait_s = remaining_lease_s(self.path, time.time())
        if wait_s > 0:
            say(f"paceline: the run's supervisor is lost: its ranks have {wait_s:.0f} s to save"
                " something, which is waited for", err=True)  # fmt: skip
            await asyncio.sleep(wait_s)

    def _connection_lost(self, problem: Exception) -> ConnectError:
        if isinstance(problem, ConnectError):
            return problem
        return ConnectError(
            f"the connection to {self._detached.host} is lost",
            found=str(problem),
            remedy=f"Run this command again: what was fetched is in {shell_text([str(self.path)])}",
        )

    async def close(self) -> None:
        follower, self._follower = self._follower, None
        if follower is not None:
            await follower.channel.close()


def _print_note(text: str) -> None:
    say(format_for(text, sys.stderr), err=True)


def parse_reply(reply: dict[str, Any] | None) -> dict[str, Any]:
    """Parses a launcher's answer; PacelineError if it refuses, or if there is no launcher."""
    if reply is None:
        raise NodeError(
            "the run's launcher accepts no requests: it is ending, or has not started yet"
        )
    if "error" in reply:
        error, details, remedy = (str(reply.get(name, "")) for name in ("error", "found", "remedy"))
        raise PacelineError(error, found=details, remedy=remedy)
    return reply


def was_started_here(run: DetachedRecord, path: Path) -> bool:
    """Returns whether the run was started on this machine, with that folder."""
    is_mine = run.launched_by == this_machine.user_at_host()
    return is_mine and run.launched_in == str(path.absolute())


LauncherClient = LocalLauncher | RemoteLauncher


def client_for(path: Path) -> LauncherClient | None:
    """Returns a client of a run's launcher; ``None`` if the run is over and all of it is here."""
    owner = read_owner(path)
    if owner is not None and owner_alive(owner):
        return LocalLauncher(path)
    detached = detached_of(path)
    return None if detached is None else RemoteLauncher(path, detached)
