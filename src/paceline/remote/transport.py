"""The interface between a run and whatever starts its agents: SSH, schedulers, containers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from paceline.remote.channel import Channel
from paceline.spec.hosts import Host

ConnectedCallback = Callable[[int], None]  # called with the number of connected hosts


def ignore_count(count: int) -> None:
    """The default :data:`ConnectedCallback`."""


class Transport(Protocol):
    """Starts the agents of one run. Used once: open, then close.

    Attributes:
        dialects: Names of ``launchers.DIALECTS`` that its ranks get, too.
        redials: :meth:`open` may be called again later, for hosts that were lost.
    """

    redials: bool
    dialects: tuple[str, ...]

    async def open(self, hosts: Sequence[Host], pythons: Sequence[str],
                   on_connected: ConnectedCallback = ignore_count) -> list[Channel]:  # fmt: skip
        """Opens a channel to an agent on each host, in rank order; cleans up after a failure.

        ``pythons`` has the interpreter for each.

        Raises:
            PacelineError: Names all hosts without an agent.
        """

    async def close(self, exit_code: int) -> None:
        """Called once, when all channels are closed or :meth:`open` failed.

        Nodes may wait for the job's ``exit_code``.
        """

    async def loss_reason(self, host: Host) -> str:
        """The scheduler's reason for a lost host; empty if it is unknown."""
        return ""
