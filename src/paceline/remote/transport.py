"""How a run reaches its nodes: something starts one agent a node, the rest is always the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from paceline.remote.channel import Channel
from paceline.spec.hosts import Host

Reached = Callable[[int], None]  # told how many hosts have an agent by now


def nobody(count: int) -> None:
    """For whom it does not matter."""


class Transport(Protocol):
    """Starts the agents of one run and ends with it. Used once: open, then close.

    Attributes:
        dialects: Whose names for a rank's place its ranks find, too: of ``launched.DIALECTS``.
        redials: :meth:`open` may be called again on the way, for hosts that were lost.
    """

    redials: bool
    dialects: tuple[str, ...]

    async def open(self, hosts: Sequence[Host], pythons: Sequence[str],
                   reached: Reached = nobody) -> list[Channel]:  # fmt: skip
        """One agent on each host, in the order of the hosts; leaves nothing when it fails.

        Args:
            hosts: In rank order.
            pythons: The interpreter for each.
            reached: Told of every host that was reached.

        Raises:
            PacelineError: Some host has no agent; all such hosts are named.
        """

    async def close(self, exit_code: int) -> None:
        """Called once, when all channels are closed or :meth:`open` failed.

        Args:
            exit_code: How the job ended, for those who wait for it elsewhere.
        """

    async def why(self, host: Host) -> str:
        """Why a host was lost, in its scheduler's own words; empty when it has none."""
