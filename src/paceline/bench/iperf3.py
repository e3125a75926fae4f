"""A second opinion on a way between two hosts, where both have iperf3."""

from __future__ import annotations

import asyncio
import random
import re
from typing import Any

from paceline.remote.channel import Channel

SECONDS = 1
PATIENCE_S = 10.0
TRIES = 20  # until the server listens
_RECEIVED = re.compile(r"([\d.]+) Kbits/sec\s+receiver")


async def measure(source: Channel, target: Channel, address: str) -> float | None:
    """Bits a second of TCP payload that arrived; ``None`` when it cannot be had.

    Args:
        source, target: Who sends to whom.
        address: The target's, on which its server listens for this one client.
    """
    paths = [await _path(channel) for channel in (source, target)]
    if not all(paths):
        return None
    port = str(random.randrange(20000, 30000))  # noqa: S311 - not a secret
    served = asyncio.ensure_future(
        _execute(target, paths[1], "-s", "-1", "-B", address, "-p", port)
    )
    try:
        return await _send(source, paths[0], address, port)
    finally:
        await asyncio.gather(served, return_exceptions=True)


async def _send(source: Channel, path: str | None, address: str, port: str) -> float | None:
    words = ("-c", address, "-p", port, "-t", str(SECONDS), "-f", "k")
    for _ in range(TRIES):
        done = await _execute(source, path, *words)
        if done["code"] == 0:
            return received(str(done["output"]))
        await asyncio.sleep(0.1)
    return None


def received(text: str) -> float | None:
    """The rate at the receiver, in bits a second, as iperf3 prints it with ``-f k``."""
    found = _RECEIVED.search(text)
    return float(found[1]) * 1e3 if found else None


async def _path(channel: Channel) -> str | None:
    answer = await channel.request("which", program="iperf3", workdir="/")
    return str(answer["path"]) if answer["path"] else None


async def _execute(channel: Channel, path: str | None, *words: str) -> dict[str, Any]:
    request = channel.request("execute", argv=[path, *words], timeout_s=PATIENCE_S)
    return dict(await asyncio.wait_for(request, PATIENCE_S + 5))
