"""Lets nodes connect to each other, to find out which of their addresses answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from paceline.remote import network
from paceline.remote.channel import Channel

PROBE_TIMEOUT_S = 3.0

Results = dict[str, list[dict[str, Any]]]
Gather = Callable[[Sequence[Awaitable[Any]]], Awaitable[list[Any]]]


async def gather_results(work: Sequence[Awaitable[Any]]) -> list[Any]:
    return list(await asyncio.gather(*work))


async def probe_addresses(channels: Sequence[Channel],
                        candidates: Mapping[str, Sequence[network.Candidate]],
                        gather: Gather = gather_results) -> Results:  # fmt: skip
    """Results of probing the other hosts' addresses, by connecting host.

    ``channels`` are in rank order; ``gather`` awaits several requests.
    """
    by_name = {channel.host.name: channel for channel in channels}

    async def listen(channel: Channel) -> dict[str, int]:
        addresses = [candidate.address for candidate in candidates[channel.host.name]]
        answer = await channel.request("listen", addresses=addresses)
        return dict(answer["ports"])

    ports = dict(zip(by_name, await gather([listen(c) for c in channels]), strict=True))

    async def probe(name: str, peers: Sequence[str]) -> list[dict[str, Any]]:
        targets = [
            {"host": peer, "address": address, "port": port, "identity": by_name[peer].identity}
            for peer in peers
            for address, port in ports[peer].items()
        ]
        answer = await by_name[name].request("connect", targets=targets, timeout_s=PROBE_TIMEOUT_S)
        return list(answer["results"])

    pairs = network.probe_targets(list(by_name))
    results = await gather([probe(name, peers) for name, peers in pairs.items()])
    await gather([channel.request("stop_listening") for channel in channels])
    return dict(zip(pairs, results, strict=True))
