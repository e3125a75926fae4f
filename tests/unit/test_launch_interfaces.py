"""Tests the variables that select network interfaces and RDMA cards for libraries on each node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from each_case import each_case
from paceline.agent.surveys.facts import rdma_facts
from paceline.remote import interfaces
from paceline.spec.errors import SettingError
from paceline.spec.hosts import Host

CARD = {"name": "mlx5_0", "port": 1, "active": True, "speed": 100000, "interfaces": ["ens3"],
        "fabric": "", "gids": []}  # fmt: skip
HOSTS = [Host("n1"), Host("n2")]


def node(*names: str, cards: Any = ()) -> dict[str, Any]:
    return {"interfaces": [{"name": name} for name in ("lo", *names)], "rdma": list(cards)}


FACTS = {"n1": node("eth0", "docker0"), "n2": node("ens3", cards=[CARD])}


def test_variables_match_library_syntax() -> None:
    environment = interfaces.variables("eth0", FACTS["n1"])
    assert environment == {
        "GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0", "FI_TCP_IFACE": "eth0",
        "FI_SOCKETS_IFACE": "eth0", "I_MPI_HYDRA_IFACE": "eth0", "NCCL_SOCKET_IFNAME": "=eth0",
        "UCX_NET_DEVICES": "eth0",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("interface", "cards", "devices"),
    [
        ("ens3", [CARD], "mlx5_0:1,ens3"),  # plus its RDMA card
        ("eth0", [CARD], ""),  # with Ethernet alone, UCX could not use the card
        ("eth0", [{**CARD, "active": False}], "eth0"),
        ("eth0", [], "eth0"),
    ],
)
def test_ucx_devices_include_rdma_cards(interface: str, cards: list[Any], devices: str) -> None:
    assert interfaces.ucx_devices(interface, node(interface, cards=cards)) == devices
    assert ("UCX_NET_DEVICES" in interfaces.variables(interface, {"rdma": cards})) == bool(devices)


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", "n2 has no eth0; it has: lo, ens3, mlx5_0:1"),
        ("NCCL_SOCKET_IFNAME", "ens3", "n1 has no ens3; it has: lo, eth0, docker0"),
        ("NCCL_SOCKET_IFNAME", "=eth", "n1 has no eth; it has: lo, eth0, docker0"),
        ("FI_TCP_IFACE", "ib0", "n1 has no ib0"),
        ("UCX_NET_DEVICES", "mlx5_0:1", "n1 has no mlx5_0:1"),
        ("I_MPI_HYDRA_IFACE", "eth7", "n2 has no eth7"),
        ("FI_PROVIDER", "verbs", "n1 has no RDMA card, which verbs needs"),
        ("FI_PROVIDER", "tpc", "tpc is not a provider of libfabric: did you mean tcp?"),
    ],
)
def test_rejects_unknown_interface_or_provider(variable: str, value: str, expected: str) -> None:
    with pytest.raises(SettingError) as excinfo:
        interfaces.validate_variables(HOSTS, FACTS, {variable: value})
    assert expected in excinfo.value.found
    assert f"{variable}={value}" in excinfo.value.message
    assert excinfo.value.exit_code == 2


@each_case(
    ("variable", "value"),
    [
        ("NCCL_SOCKET_IFNAME", "e"),  # matches as a prefix
        ("NCCL_SOCKET_IFNAME", "=eth0,ens3"),
        ("NCCL_SOCKET_IFNAME", "^docker,lo"),
        ("NCCL_SOCKET_IFNAME", ""),
        ("GLOO_SOCKET_IFNAME", "lo"),
        ("UCX_NET_DEVICES", "all"),
        ("UCX_NET_DEVICES", "^lo"),
        ("UCX_NET_DEVICES", "mlx*,eth*"),
        ("FI_PROVIDER", "tcp;ofi_rxm"),
        ("FI_PROVIDER", "^verbs"),
        ("FI_PROVIDER", "something-new"),
        ("OTHER", "eth7"),
    ],
)
def test_accepts_valid_variables(variable: str, value: str) -> None:
    interfaces.validate_variables(HOSTS, FACTS, {variable: value})


def test_skips_nodes_without_facts() -> None:
    empty_facts = {"n1": {"interfaces": None, "rdma": None}}
    for variable in (*interfaces.EXACT, "NCCL_SOCKET_IFNAME", "UCX_NET_DEVICES", "FI_PROVIDER"):
        interfaces.validate_variables([Host("n1")], empty_facts, {variable: "verbs"})


def test_reads_rdma_cards_from_sysfs(tmp_path: Path) -> None:
    """The files are those of an active ConnectX-6 port and of one that is down."""
    for port, state, rate in (("1", "4: ACTIVE", "100 Gb/sec (4X EDR)"), ("2", "1: DOWN", "")):
        folder = tmp_path / "mlx5_0" / "ports" / port
        folder.mkdir(parents=True)
        (folder / "state").write_text(f"{state}\n")
        (folder / "rate").write_text(f"{rate}\n")
    (tmp_path / "mlx5_0" / "device" / "net" / "ens3").mkdir(parents=True)
    down = {**CARD, "port": 2, "active": False, "speed": -1}
    assert rdma_facts(str(tmp_path)) == [CARD, down]
    assert rdma_facts(str(tmp_path / "none")) == []
