"""Tests at which address ranks meet if the script names one itself."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch.distributed  # noqa: F401

from paceline.agent.ranks import master_address


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "::1"])
def test_script_loopback_is_refused_on_several_hosts(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of one host may meet there, and all ranks at the planned address."""
    stores: list[Any] = []
    rendezvous: Any = sys.modules["torch.distributed.rendezvous"]
    monkeypatch.setattr(rendezvous, "_create_c10d_store", lambda *args: stores.append(args[:4]))
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4000", "GROUP_WORLD_SIZE": "2",
               "WORLD_SIZE": "4", master_address.VARIABLE: "True"}  # fmt: skip
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    master_address.follow_plan(b"")
    create = rendezvous._create_c10d_store
    with pytest.raises(RuntimeError, match="each of the 2 hosts to itself"):
        create(address, 29500, 1, 4, None)
    accepted = [(address, 29500, 1, 2), ("127.0.0.1", 4000, 1, 4), ("10.0.0.1", 29500, 1, 4)]
    for args in accepted:
        create(*args, None)
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    create(address, 29500, 1, 4, None)
    assert stores == [*accepted, (address, 29500, 1, 4)]
