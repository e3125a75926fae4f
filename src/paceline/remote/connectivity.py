"""Lets nodes connect to each other, to learn which address of each really answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from paceline.remote import network
from paceline.remote.channel import Channel

PROBE_TIMEOUT_S = 3.0

Results = dict[str, list[dict[str, Any]]]
Gather = Callable[[Sequence[Awaitable[Any]]], Awaitable[list[Any]]]


async def all_of(work: Sequence[Awaitable[Any]]) -> list[Any]:
    return list(await asyncio.gather(*work))


async def try_addresses(channels: Sequence[Channel],
                        found: Mapping[str, Sequence[network.Candidate]],
                        gather: Gather = all_of) -> Results:  # fmt: skip
    """By connecting host, the results of trying the candidate addresses of the others.

    Args:
        channels: One a host, in rank order.
        found: The addresses worth trying, by host.
        gather: How several requests are awaited together.
    """
    by_name = {channel.host.name: channel for channel in channels}

    async def listen(channel: Channel) -> dict[str, int]:
        addresses = [candidate.address for candidate in found[channel.host.name]]
        answer = await channel.request("listen", addresses=addresses)
        return dict(answer["ports"])

    ports = dict(zip(by_name, await gather([listen(c) for c in channels]), strict=True))

    async def attempt(name: str, others: Sequence[str]) -> list[dict[str, Any]]:
        targets = [
            {"host": other, "address": address, "port": port, "identity": by_name[other].identity}
            for other in others
            for address, port in ports[other].items()
        ]
        answer = await by_name[name].request("connect", targets=targets, timeout_s=PROBE_TIMEOUT_S)
        return list(answer["results"])

    pairs = network.pairs(list(by_name))
    results = await gather([attempt(name, others) for name, others in pairs.items()])
    await gather([channel.request("stop_listening") for channel in channels])
    return dict(zip(pairs, results, strict=True))
