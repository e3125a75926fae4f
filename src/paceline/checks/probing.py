"""Asking the nodes. A probe gets this and returns JSON; it judges nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.checks.scene import Scene
from paceline.remote.channel import Channel
from paceline.remote.fanout import all_of
from paceline.remote.network import Candidate, NodeNetwork

PATIENCE_S = 20.0  # for one answer of one node


@dataclass(slots=True)
class Probing:
    """The connected nodes, and what is known so far.

    Attributes:
        channels: By host, in rank order.
        scene: What is known.
        candidates: By host, the addresses that may carry the job's traffic.
        networks: By host, the chosen ones; set by the probe of ``ports``.
    """

    channels: Mapping[str, Channel]
    scene: Scene
    candidates: Mapping[str, Sequence[Candidate]] = field(default_factory=dict)
    networks: dict[str, NodeNetwork] = field(default_factory=dict)

    async def ask(self, name: str, op: str, **fields: Any) -> dict[str, Any]:
        """One answer of one node; TimeoutError when it does not come."""
        answer = self.channels[name].request(op, **fields)
        return dict(await asyncio.wait_for(answer, PATIENCE_S))

    async def each(self, op: str, **fields: Any) -> dict[str, dict[str, Any]]:
        """The answers of all nodes, by host."""
        answers = await every([self.ask(name, op, **fields) for name in self.channels])
        return dict(zip(self.channels, answers, strict=True))


async def every(work: Sequence[Awaitable[Any]]) -> list[Any]:
    """All results; what is still under way after the first failure is cancelled."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await all_of(tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
