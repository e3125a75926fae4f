"""Tests which of its addresses a rank offers to the others."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil
import pytest

from paceline.train.reduce import direct

IPV4, IPV6 = "10.78.0.11", "fd77::11"
ADDRESSES = [
    SimpleNamespace(family=socket.AF_INET, address=IPV4),
    SimpleNamespace(family=socket.AF_INET6, address="fe80::1%eth0"),
    SimpleNamespace(family=socket.AF_INET6, address=IPV6),
]


@pytest.mark.parametrize(("master", "expected"), [("10.78.0.12", IPV4), ("fd77::12", IPV6)])
def test_own_address_matches_family_of_master(
    master: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": ADDRESSES})
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    monkeypatch.setenv("MASTER_ADDR", master)
    assert direct.own_address() == expected
