"""Measures a link between two hosts with iperf3, if both have it."""

from __future__ import annotations

import asyncio
import random
import re
from typing import Any

from paceline.remote.channel import Channel

SECONDS = 1
TIMEOUT_S = 10.0
MAX_TRIES = 20  # until the server listens
_RECEIVED = re.compile(r"([\d.]+) Kbits/sec\s+receiver")


async def measure(source: Channel, target: Channel, address: str) -> float | None:
    """Bits per second of received TCP payload; ``None`` if it cannot be measured.

    Args:
        source, target: Channels to the sender and the receiver.
        address: Of the target, on which its server listens for one client.
    """
    paths = [await _path(channel) for channel in (source, target)]
    if not all(paths):
        return None
    port = str(random.randrange(20000, 30000))  # noqa: S311 - not a secret
    server = asyncio.ensure_future(
        _execute(target, paths[1], "-s", "-1", "-B", address, "-p", port)
    )
    try:
        return await _send(source, paths[0], address, port)
    finally:
        await asyncio.gather(server, return_exceptions=True)


async def _send(source: Channel, path: str | None, address: str, port: str) -> float | None:
    arguments = ("-c", address, "-p", port, "-t", str(SECONDS), "-f", "k")
    for _ in range(MAX_TRIES):
        result = await _execute(source, path, *arguments)
        if result["code"] == 0:
            match = _RECEIVED.search(str(result["output"]))
            return float(match[1]) * 1e3 if match else None
        await asyncio.sleep(0.1)
    return None


async def _path(channel: Channel) -> str | None:
    reply = await channel.request("which", program="iperf3", workdir="/")
    return str(reply["path"]) if reply["path"] else None


async def _execute(channel: Channel, path: str | None, *arguments: str) -> dict[str, Any]:
    request = channel.request("execute", argv=[path, *arguments], timeout_s=TIMEOUT_S)
    return dict(await asyncio.wait_for(request, TIMEOUT_S + 5))
