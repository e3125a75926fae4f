"""Decides which connection without a proof is dropped when there are too many."""

from __future__ import annotations

import ipaddress
import random
import resource
from collections.abc import Sequence

MAX_UNPROVEN = 512  # connections without a proof yet; each takes 320 KB
UNPROVEN_SHARE = 2  # at most one of so many descriptors is for them

Peer = tuple[bytes, str]
"""The network and the address of a connection's other end."""


def peer_of(address: str) -> Peer:
    """Returns the peer of an address; its network is the /24 of IPv4 or the /64 of IPv6."""
    found = ipaddress.ip_address(address.partition("%")[0])
    packed = (getattr(found, "ipv4_mapped", None) or found).packed
    return packed[:3] if len(packed) == 4 else packed[:8], address


def max_unproven() -> int:
    """Returns how many connections may be without a proof, within this process's descriptors."""
    limit: int = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return min(MAX_UNPROVEN, limit // UNPROVEN_SHARE) if limit > 0 else MAX_UNPROVEN


def victim(peers: Sequence[Peer], generator: random.Random) -> int:
    """Returns the index of the connection to drop. Pure, for a generator in a given state.

    Of two random connections, it is the one from the network, then the address, with more of them.
    So strangers of few networks mostly drop their own connections. Strangers of many networks drop
    any with equal probability, not each one after the same time: some outlive a round trip. A
    cluster behind one address loses no more than twice its share.
    """
    networks, addresses = zip(*peers, strict=True)
    candidates = generator.sample(range(len(peers)), min(2, len(peers)))
    return max(
        candidates,
        key=lambda index: (networks.count(networks[index]), addresses.count(addresses[index])),
    )
