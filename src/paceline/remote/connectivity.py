"""Lets nodes connect to each other, to find out which of their addresses answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.remote import network
from paceline.remote.channel import Channel
from paceline.remote.fanout import gather_all

PROBE_TIMEOUT_S = 3.0

Results = dict[str, list[dict[str, Any]]]


async def probe_addresses(
    channels: Sequence[Channel], candidates: Mapping[str, Sequence[network.Candidate]]
) -> Results:
    """Returns what each host found of the other hosts' addresses; channels are in rank order."""
    by_name = {channel.host.name: channel for channel in channels}

    async def listen(channel: Channel) -> dict[str, int]:
        addresses = [candidate.address for candidate in candidates[channel.host.name]]
        answer = await channel.request("listen", addresses=addresses)
        return dict(answer["ports"])

    ports = dict(zip(by_name, await gather_all([listen(c) for c in channels]), strict=True))

    async def probe(name: str, peers: Sequence[str]) -> list[dict[str, Any]]:
        targets = [
            {"host": peer, "address": address, "port": port, "identity": by_name[peer].identity}
            for peer in peers
            for address, port in ports[peer].items()
        ]
        answer = await by_name[name].request("connect", targets=targets, timeout_s=PROBE_TIMEOUT_S)
        return list(answer["results"])

    pairs = network.probe_targets(list(by_name))
    results = await gather_all([probe(name, peers) for name, peers in pairs.items()])
    await gather_all([channel.request("stop_listening") for channel in channels])
    return dict(zip(pairs, results, strict=True))
