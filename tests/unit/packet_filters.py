"""Detects whether the kernel lets this process filter packets of TCP sockets."""

from __future__ import annotations

import socket

import pytest

from paceline.agent.ranks import peer_filters


def _may_filter() -> bool:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return peer_filters.attach_filter(listener, peer_filters.NO_HOSTS)


needs_packet_filters = pytest.mark.skipif(
    not _may_filter(), reason="the kernel refuses packet filters"
)
