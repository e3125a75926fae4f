"""Tests that ``paceline run`` works on networks with common faults, or names the obstacle."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from launches import Site, project_at

from paceline.lab import Lab, LabOptions

pytestmark = pytest.mark.lab


@pytest.fixture(scope="module")
def adversarial_site(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Two hosts with all network faults that are known to cause failures."""
    folder = tmp_path_factory.mktemp("network")
    project = project_at(folder / "project")
    lab = new_lab(
        hosts=2,
        debian_hosts=True,
        dead_interface=True,
        bridge_address=True,
        interface_names=("eth0", "ens3"),
        share=(str(project),),
    )
    site = Site(lab, project)
    yield site
    assert site.leftovers() == ""


@pytest.fixture
def healed(adversarial_site: Site) -> Iterator[Site]:
    yield adversarial_site
    adversarial_site.lab.heal()


def test_trains_on_adversarial_network(adversarial_site: Site) -> None:
    ended = adversarial_site.run("train.py")
    assert ended.code == 0, ended.err
    assert ended.out.count("sum 3") == 2
    nodes = ended.json("plan.json")["nodes"]
    assert [node["interface"] for node in nodes] == ["eth0", "ens3"]
    assert [node["address"] for node in nodes] == [
        adversarial_site.lab.address(n) for n in ("n1", "n2")
    ]
    assert [n["env"]["GLOO_SOCKET_IFNAME"]["value"] for n in nodes] == ["eth0", "ens3"]


def test_trains_when_launched_on_host(adversarial_site: Site) -> None:
    ended = adversarial_site.run("train.py", inside="n2")
    assert ended.code == 0, ended.err
    assert ended.out.count("sum 3") == 2


def test_ignores_hostname_of_dead_interface(adversarial_site: Site) -> None:
    options = LabOptions(
        dead_interface=True, dead_name=True, share=(str(adversarial_site.project),)
    )
    with Lab(options) as lab:
        ended = Site(lab, adversarial_site.project, runs=100).run("--no-torch", "tell.py")
        assert ended.code == 0, ended.err
        assert ended.said(1)["place"]["MASTER_ADDR"] == "127.0.0.1"


def test_trains_on_ipv6_only_network(adversarial_site: Site) -> None:
    with Lab(LabOptions(ipv6_only=True, share=(str(adversarial_site.project),))) as lab:
        ended = Site(lab, adversarial_site.project, runs=200).run("train.py")
    assert ended.code == 0, ended.err
    assert ended.out.count("sum 3") == 2


def test_rejects_bridge_interface(adversarial_site: Site) -> None:
    ended = adversarial_site.run("--no-torch", "--iface", "docker0", "tell.py")
    assert ended.code == 2
    assert "docker0" in ended.err
    assert "172.17.0.1" in ended.err


def test_rejects_unknown_interface(adversarial_site: Site) -> None:
    ended = adversarial_site.run("--no-torch", "--iface", "ib0", "tell.py")
    assert ended.code == 2
    assert "ib0" in ended.err
    assert "eth0" in ended.err


def test_interface_setting_per_host(adversarial_site: Site) -> None:
    settings = adversarial_site.project / "paceline.toml"
    settings.write_text('[hosts.n1]\ninterface = "eth0"\n[hosts.n2]\ninterface = "ens3"\n')
    try:
        ended = adversarial_site.run("--no-torch", "tell.py")
    finally:
        settings.unlink()
    assert ended.code == 0, ended.err


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (("drop", "n2", "all-ephemeral"), ["firewall", "n2", "eth0"]),
        (("unreachable", "n1", "n2"), ["No route to host", "113", "n1", "n2"]),
        (("deaf", "n1", "n2"), ["n2", "n1"]),
    ],
)
def test_reports_network_obstacle(
    healed: Site, fault: tuple[str, ...], expected: list[str]
) -> None:
    kind, host, *arguments = fault
    healed.lab.fault(kind, host, *arguments)
    ended = healed.run("--no-torch", "tell.py")
    assert ended.code == 1, ended.out
    assert [word for word in expected if word not in ended.err and word != "eth0"] == []
    assert "Traceback" not in ended.err
    assert healed.leftovers() == ""


SQUAT = """
import socket, sys, time
listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("ready", flush=True)
time.sleep(100)
"""


def test_reports_used_master_port(adversarial_site: Site) -> None:
    address = adversarial_site.lab.address("n1")
    squatter = adversarial_site.lab.popen("n1", [sys.executable, "-c", SQUAT, address, "29899"],
                               stdout=subprocess.PIPE, text=True)  # fmt: skip
    with squatter:
        assert squatter.stdout is not None
        assert squatter.stdout.readline() == "ready\n"
        ended = adversarial_site.run("--no-torch", "--master-port", "29899", "tell.py")
        free = adversarial_site.run("--no-torch", "tell.py")
        squatter.kill()
    assert ended.code == 1
    assert "29899" in ended.err
    assert "n1" in ended.err
    assert "socket.create_server" in ended.err
    assert free.code == 0, free.err


def test_restart_reuses_master_port(adversarial_site: Site) -> None:
    for _ in range(2):
        ended = adversarial_site.run(
            "--master-port", "29898", "--max-restarts", "1", "fail_once.py"
        )
        assert ended.code == 0, ended.err
        assert ended.err.count("starting all nodes again") == 1
