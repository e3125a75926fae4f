"""Putting files into a node's cache, under their hash."""

from __future__ import annotations

from pathlib import Path

from paceline.agent.snapshot import read_blocks
from paceline.cluster.channel import Channel


async def send_file(channel: Channel, digest: str, path: Path) -> None:
    """Puts one file into the node's cache, in blocks, each answered before the next.

    Args:
        channel: To the node.
        digest: The file's SHA-256 in hexadecimal.
        path: The file here.

    Raises:
        AgentRefusal: The node cannot take it.
    """
    size = path.stat().st_size
    for offset, data in read_blocks(path):
        last = offset + len(data) >= size
        if data or not size:
            await channel.request("put_blob", sha256=digest, offset=offset, last=last, blob=data)
