"""Tests the choice of RDMA ports for NCCL, from files of the kernel to variables of the ranks."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Any

import pytest

from paceline.agent.surveys.facts import rdma_facts
from paceline.checks import rdma
from paceline.checks.check import Requirements, Survey
from paceline.remote.rdma import RdmaChoice, choose, choose_for_newcomer
from paceline.spec.errors import NodeError
from paceline.spec.hosts import Host

FE80 = "fe80:0000:0000:0000"
ROCE = ("RoCE v1", "RoCE v2")


def infiniband(folder: Path, name: str, sm_lid: str = "0x1", rate: int = 200,
               prefix: str = FE80, state: str = "4: ACTIVE") -> None:  # fmt: skip
    """Creates the kernel's files of an InfiniBand port, with the values of a ConnectX-6."""
    port = write(folder, name, {
        "state": state, "rate": f"{rate} Gb/sec (4X HDR)", "link_layer": "InfiniBand",
        "sm_lid": sm_lid, "gids/0": f"{prefix}:a088:c203:00d2:aaf2",
        "gids/1": "0000:0000:0000:0000:0000:0000:0000:0000",
    })  # fmt: skip
    (port / "gid_attrs" / "types").mkdir(parents=True)


def roce(folder: Path, name: str, address: str, rate: int = 100, skip: int = 0) -> None:
    """Creates the kernel's files of an Ethernet port: each address twice, for RoCE v1 and v2."""
    gid = ipaddress.IPv6Address(address if ":" in address else f"::ffff:{address}").exploded
    gids = [f"{FE80}:a288:c2ff:fe3b:506a"] * (2 + 2 * skip) + [gid] * 2
    files = {f"gids/{index}": gid for index, gid in enumerate(gids)}
    kinds = {f"gid_attrs/types/{index}": ROCE[index % 2] for index in range(len(gids))}
    write(folder, name, {
        "state": "4: ACTIVE", "rate": f"{rate} Gb/sec (4X EDR)", "link_layer": "Ethernet",
        "sm_lid": "0x0", **files, **kinds,
    })  # fmt: skip


def efa(folder: Path, name: str) -> None:
    write(folder, name, {"state": "4: ACTIVE", "rate": "100 Gb/sec (4X EDR)",
                         "link_layer": "Unspecified", "sm_lid": "0x0"})  # fmt: skip


def write(folder: Path, name: str, files: dict[str, str]) -> Path:
    port = folder / name / "ports" / "1"
    for path, text in files.items():
        (port / path).parent.mkdir(parents=True, exist_ok=True)
        (port / path).write_text(f"{text}\n")
    return port


def host(folder: Path, *addresses: str, **extra_facts: Any) -> dict[str, Any]:
    """Returns the facts of a host with a GPU and with the network cards described in a folder."""
    links = [{"addresses": [{"address": address, "prefix": 64 if ":" in address else 24}]}
             for address in addresses]  # fmt: skip
    gpus = [{"maker": "nvidia"}]
    return {
        "rdma": rdma_facts(str(folder)),
        "interfaces": links,
        "devices": {"gpus": gpus},
        **extra_facts,
    }


def hca_names(choice: RdmaChoice, *names: str) -> list[str]:
    return [choice.on(name).get("NCCL_IB_HCA", "") for name in names]


def test_uses_all_ports_of_fabric(tmp_path: Path) -> None:
    for name in ("a", "b"):
        infiniband(tmp_path / name, "mlx5_0")
        infiniband(tmp_path / name, "mlx5_1")
        infiniband(tmp_path / name, "mlx5_2", state="1: DOWN")
    choice = choose({name: host(tmp_path / name) for name in ("a", "b")})
    assert hca_names(choice, "a", "b") == ["=mlx5_0:1,mlx5_1:1"] * 2
    assert "NCCL_IB_GID_INDEX" not in choice.on("a")
    assert "InfiniBand fe80:0000:0000:0000, subnet manager 0x1" in choice.reason


def test_excludes_port_of_different_fabric(tmp_path: Path) -> None:
    """Example: a storage network that only one host is connected to."""
    infiniband(tmp_path / "a", "mlx5_0", prefix="fe80:0000:0000:0001")
    infiniband(tmp_path / "a", "mlx5_1", sm_lid="0x7")
    infiniband(tmp_path / "b", "mlx5_0", sm_lid="0x7")
    choice = choose({name: host(tmp_path / name) for name in ("a", "b")})
    assert hca_names(choice, "a", "b") == ["=mlx5_1:1", "=mlx5_0:1"]


def test_roce_rails_with_common_gid_index(tmp_path: Path) -> None:
    for number, name in enumerate(("a", "b"), 1):
        roce(tmp_path / name, "mlx5_0", f"10.1.0.{number}")
        roce(tmp_path / name, "mlx5_1", f"10.2.0.{number}")
    facts = {"a": host(tmp_path / "a", "10.1.0.1", "10.2.0.1"),
             "b": host(tmp_path / "b", "10.1.0.2", "10.2.0.2")}  # fmt: skip
    choice = choose(facts)
    assert hca_names(choice, "a", "b") == ["=mlx5_0:1,mlx5_1:1"] * 2
    assert choice.on("a")["NCCL_IB_GID_INDEX"] == "3"
    assert choice.reason == "on a network of all hosts: 10.1.0.0/24, 10.2.0.0/24"


def test_sets_no_gid_index_if_indices_differ(tmp_path: Path) -> None:
    for number, name in enumerate(("a", "b"), 1):
        roce(tmp_path / name, "mlx5_0", f"10.1.0.{number}")
        roce(tmp_path / name, "mlx5_1", f"10.1.0.{number + 10}", skip=1)
    choice = choose({name: host(tmp_path / name, "10.1.0.1", "10.1.0.2", "10.1.0.11", "10.1.0.12")
                     for name in ("a", "b")})  # fmt: skip
    assert choice.on("a") == {"NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1"}


def test_excludes_slow_network_on_all_hosts(tmp_path: Path) -> None:
    """If each host chose by itself, the choices could differ."""
    for number, (name, rate) in enumerate((("a", 200), ("b", 100)), 1):
        infiniband(tmp_path / name, "mlx5_0", rate=rate)
        roce(tmp_path / name, "mlx5_1", f"10.1.0.{number}", rate=25)
    facts = {name: host(tmp_path / name, "10.1.0.1", "10.1.0.2") for name in ("a", "b")}
    assert hca_names(choose(facts), "a", "b") == ["=mlx5_0:1"] * 2


@pytest.mark.parametrize("rate", [25, 100, 200])
def test_does_not_mix_infiniband_and_ethernet(tmp_path: Path, rate: int) -> None:
    """NCCL does not connect InfiniBand with Ethernet; the sum of the rates decides: 4 × 25 > 40."""
    for number, name in enumerate(("a", "b"), 1):
        for card in range(4):
            infiniband(tmp_path / name, f"mlx5_{card}", rate=rate)
        roce(tmp_path / name, "mlx5_8", f"10.1.0.{number}", rate=40 if rate == 25 else 200)
    facts = {name: host(tmp_path / name, "10.1.0.1", "10.1.0.2") for name in ("a", "b")}
    assert hca_names(choose(facts), "a", "b") == ["=mlx5_0:1,mlx5_1:1,mlx5_2:1,mlx5_3:1"] * 2


def test_prefers_faster_link_layer(tmp_path: Path) -> None:
    for number, name in enumerate(("a", "b"), 1):
        infiniband(tmp_path / name, "mlx5_0", rate=100)
        roce(tmp_path / name, "mlx5_1", f"10.1.0.{number}", rate=200)
    facts = {name: host(tmp_path / name, "10.1.0.1", "10.1.0.2") for name in ("a", "b")}
    assert hca_names(choose(facts), "a", "b") == ["=mlx5_1:1"] * 2


def test_ignores_address_that_hosts_share(tmp_path: Path) -> None:
    """Example: cards for storage that have the same address on all hosts."""
    for number, name in enumerate(("a", "b"), 1):
        roce(tmp_path / name, "mlx5_0", "192.168.1.1")
        roce(tmp_path / name, "mlx5_1", f"10.1.0.{number}")
    facts = {name: host(tmp_path / name, "192.168.1.1", "10.1.0.1", "10.1.0.2")
             for name in ("a", "b")}  # fmt: skip
    assert hca_names(choose(facts), "a", "b") == ["=mlx5_1:1"] * 2
    joining = choose_for_newcomer("b", facts, {"a": {"NCCL_IB_HCA": "=mlx5_1:1"}})
    assert hca_names(joining, "b") == ["=mlx5_1:1"]
    for host_facts in facts.values():
        host_facts["rdma"] = [port for port in host_facts["rdma"] if port["name"] == "mlx5_0"]
    assert choose(facts).on("a") == {"NCCL_NET": "Socket"}
    (finding,) = rdma.evaluate(Survey((Host("a"), Host("b")), facts=facts))
    assert finding.message == "a, b have no usable RDMA port, so all hosts use TCP"


def test_uses_ipv6_without_ipv4(tmp_path: Path) -> None:
    """By default, NCCL would use the first entry: RoCE v1, with a link-local address."""
    for number, name in enumerate(("a", "b"), 1):
        roce(tmp_path / name, "mlx5_0", f"fd00:0:0:1::{number}")
        roce(tmp_path / name, "mlx5_1", f"fd00:0:0:1::{number}0", skip=number - 1)
    facts = {name: host(tmp_path / name, *(f"fd00:0:0:1::{end}" for end in ("1", "2", "10", "20")))
             for name in ("a", "b")}  # fmt: skip
    choice, cards = choose(facts), {"NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1"}
    assert choice.on("a") == {**cards, "NCCL_IB_ADDR_FAMILY": "AF_INET6", "NCCL_IB_GID_INDEX": "3"}
    assert choice.on("b") == {**cards, "NCCL_IB_ADDR_FAMILY": "AF_INET6"}
    assert choice.reason == "on a network of all hosts: fd00:0:0:1::/64"


def test_card_without_device_file_is_inactive(tmp_path: Path) -> None:
    """Example: a container without access to the device."""
    infiniband(tmp_path / "cards", "mlx5_0")
    (tmp_path / "cards/mlx5_0/device/infiniband_verbs/uverbs0").mkdir(parents=True)
    devices = tmp_path / "dev"
    assert not rdma_facts(str(tmp_path / "cards"), str(devices))[0]["active"]
    devices.mkdir()
    (devices / "uverbs0").touch()
    assert rdma_facts(str(tmp_path / "cards"), str(devices))[0]["active"]


def test_missing_or_unknown_sysfs_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        infiniband(tmp_path / name, "mlx5_0")
        (tmp_path / name / "mlx5_0/ports/1/sm_lid").unlink()
        roce(tmp_path / name, "mlx5_1", "10.1.0.1")
        write(tmp_path / name, "mlx5_1", {"gids/3": "zzzz", "gid_attrs/types/README": "RoCE v2"})
        (tmp_path / name / "mlx5_2/ports/1").mkdir(parents=True)
        (tmp_path / name / "mlx5_2/ports/README").touch()
    choice = choose({name: host(tmp_path / name, "10.1.0.1") for name in ("a", "b")})
    assert not choice.variables
    assert "left to NCCL" in choice.reason


def test_delegates_possibly_routed_rails_to_nccl(tmp_path: Path) -> None:
    for number, name in enumerate(("a", "b"), 1):
        roce(tmp_path / name, "mlx5_0", f"10.{number}.0.1", rate=400)
        roce(tmp_path / name, "mlx5_bond_0", f"10.9.0.{number}", rate=100)
    facts = {"a": host(tmp_path / "a", "10.1.0.1", "10.9.0.1"),
             "b": host(tmp_path / "b", "10.2.0.1", "10.9.0.2")}  # fmt: skip
    assert not choose(facts).variables
    assert "maybe routed: left to NCCL" in choose(facts).reason


def test_compares_networks_by_total_rate(tmp_path: Path) -> None:
    """Eight ports for the job have more bandwidth than one faster port for the storage."""
    for name in ("a", "b"):
        for number in range(8):
            infiniband(tmp_path / name, f"mlx5_{number}", rate=100)
        infiniband(tmp_path / name, "mlx5_8", rate=400, sm_lid="0x2")
    chosen = choose({name: host(tmp_path / name) for name in ("a", "b")})
    assert "mlx5_7:1" in chosen.on("a")["NCCL_IB_HCA"]


def test_gid_index_matches_chosen_network(tmp_path: Path) -> None:
    for number, name in enumerate(("a", "b"), 1):
        roce(tmp_path / name, "mlx5_0", f"172.16.{number}.5")
        folder = tmp_path / name / "mlx5_0" / "ports" / "1"
        for index, kind in ((4, "RoCE v1"), (5, "RoCE v2")):
            gid = f"0000:0000:0000:0000:0000:ffff:0a00:000{number}"
            (folder / f"gids/{index}").write_text(gid)
            (folder / f"gid_attrs/types/{index}").write_text(kind)
    facts = {"a": host(tmp_path / "a", "172.16.1.5", "10.0.0.1"),
             "b": host(tmp_path / "b", "172.16.2.5", "10.0.0.2")}  # fmt: skip
    assert choose(facts).on("a")["NCCL_IB_GID_INDEX"] == "5"


def test_host_without_card_forces_tcp(tmp_path: Path) -> None:
    infiniband(tmp_path / "a", "mlx5_0")
    choice = choose({"a": host(tmp_path / "a"), "b": host(tmp_path / "none")})
    assert choice.variables == {"a": {"NCCL_NET": "Socket"}, "b": {"NCCL_NET": "Socket"}}
    assert choice.reason == "b has no usable RDMA port, so all hosts use TCP"


def test_delegates_unknown_hardware_to_nccl(tmp_path: Path) -> None:
    """EFA has its own plug-in; RoCE may be routed between networks."""
    for name in ("a", "b"):
        efa(tmp_path / name, "rdmap0s6")
    choice = choose({name: host(tmp_path / name) for name in ("a", "b")})
    assert (choice.variables, choice.unknown) == ({}, False)
    roce(tmp_path / "c", "mlx5_0", "10.1.0.1")
    roce(tmp_path / "d", "mlx5_0", "10.2.0.1")
    facts = {"c": host(tmp_path / "c", "10.1.0.1"), "d": host(tmp_path / "d", "10.2.0.1")}
    assert (choose(facts).variables, choose(facts).unknown) == ({}, True)


@pytest.mark.parametrize("source", ["environment", "nccl_conf"])
def test_host_setting_disables_choice(tmp_path: Path, source: str) -> None:
    infiniband(tmp_path, "mlx5_0")
    facts = {"a": host(tmp_path), "b": host(tmp_path, **{source: {"NCCL_IB_DISABLE": "1"}})}
    choice = choose(facts)
    assert not choice.variables
    assert "b sets NCCL_IB_DISABLE=1" in choice.reason


def test_no_choice_for_single_host_or_without_gpus(tmp_path: Path) -> None:
    infiniband(tmp_path, "mlx5_0")
    assert not choose({"a": host(tmp_path)}).variables
    facts = host(tmp_path, devices={"gpus": []})
    assert not choose({"a": facts, "b": facts}).variables


def test_newcomer_uses_network_of_running_hosts(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        infiniband(tmp_path / name, "mlx5_0")
    infiniband(tmp_path / "c", "mlx5_1", sm_lid="0x7")
    facts = {name: host(tmp_path / name) for name in ("a", "b", "c")}
    running = {name: {"NCCL_IB_HCA": "=mlx5_0:1"} for name in ("a", "b")}
    assert choose_for_newcomer("c", facts, running).on("c") == {"NCCL_IB_HCA": "=mlx5_0:1"}
    single_host = {
        "a": facts["a"],
        "c": facts["c"],
    }  # a job of one host: no ports were chosen for it
    assert choose_for_newcomer("c", single_host, {"a": {}}).on("c") == {"NCCL_IB_HCA": "=mlx5_0:1"}


def test_newcomer_uses_tcp_if_running_hosts_do(tmp_path: Path) -> None:
    for name in ("a", "b"):
        infiniband(tmp_path / name, "mlx5_0")
    facts = {name: host(tmp_path / name) for name in ("a", "b")}
    tcp = {"NCCL_NET": "Socket"}
    assert choose_for_newcomer("b", facts, {"a": tcp}).on("b") == tcp
    facts["a"] = host(tmp_path / "none")
    assert choose_for_newcomer("b", facts, {"a": {}}).on("b") == tcp


@pytest.mark.parametrize("card", ["none", "elsewhere"])
def test_rejects_newcomer_without_common_network(tmp_path: Path, card: str) -> None:
    infiniband(tmp_path / "a", "mlx5_0")
    infiniband(tmp_path / "elsewhere", "mlx5_0", sm_lid="0x7")
    facts = {"a": host(tmp_path / "a"), "b": host(tmp_path / card)}
    with pytest.raises(NodeError, match="b has no RDMA port on the network") as excinfo:
        choose_for_newcomer("b", facts, {"a": {"NCCL_IB_HCA": "=mlx5_0:1"}})
    assert excinfo.value.found == "NCCL uses these there: a mlx5_0"
    facts["b"] = host(tmp_path / card, environment={"NCCL_IB_DISABLE": "1"})
    assert not choose_for_newcomer("b", facts, {"a": {}}).variables
    facts["b"] = host(tmp_path / card, devices={"gpus": []})
    assert not choose_for_newcomer("b", facts, {"a": {}}).variables


def test_delegates_newcomer_with_unknown_networks_to_nccl(tmp_path: Path) -> None:
    for name in ("a", "b"):
        efa(tmp_path / name, "rdmap0s6")
    facts = {name: host(tmp_path / name) for name in ("a", "b")}
    assert not choose_for_newcomer("b", facts, {"a": {}}).variables


def test_check_respects_user_settings(tmp_path: Path) -> None:
    for name in ("a", "b"):
        infiniband(tmp_path / name, "mlx5_0")
    facts = {name: host(tmp_path / name) for name in ("a", "b")}

    def message(b: Host = Host("b"), **settings: Any) -> str:  # noqa: B008
        (finding,) = rdma.evaluate(
            Survey((Host("a"), b), facts=facts, requirements=Requirements(**settings))
        )
        return finding.message

    expected = "NCCL_IB_HCA was given: left to NCCL"
    assert message(job_variables=("NCCL_IB_HCA",)) == expected
    assert message(Host("b", env={"NCCL_IB_HCA": "mlx5_1"})) == expected
    assert "left to NCCL" not in message(settled=("NCCL_IB_HCA",))  # hidden: ranks do not get it
