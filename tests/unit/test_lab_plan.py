"""Tests that a lab's options become a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab_plans import plan

from paceline.hosts.lab import Layout
from paceline.lab import files
from paceline.lab.plan import (
    PrivateFolder,
    delay_seconds,
    rate_bits,
)
from paceline.spec.errors import LabError


def test_addresses_follow_host_numbers() -> None:
    assert [host.address for host in plan(hosts=3).hosts] == [
        "10.77.0.11",
        "10.77.0.12",
        "10.77.0.13",
    ]
    assert plan(ipv6_only=True).host("n2").address == "fd77::12"
    assert plan(subnet="192.168.5.0/24").gateway == "192.168.5.1"


@given(st.integers(1, 240))
def test_host_addresses_are_unique(count: int) -> None:
    lab_plan = plan(hosts=count)
    for values in ([h.address for h in lab_plan.hosts], [h.mac for h in lab_plan.hosts]):
        assert len(set(values)) == count
        assert lab_plan.gateway not in values


def test_interface_names_are_cycled() -> None:
    names = [host.interface for host in plan(hosts=3, interface_names=("eth0", "ens3")).hosts]
    assert names == ["eth0", "ens3", "eth0"]


def test_python_may_be_environment_or_interpreter() -> None:
    lab_plan = plan(hosts=3, python={"n2": "/other", "n3": "/usr/bin/python3.11"})
    assert [host.python for host in lab_plan.hosts] == [
        "/venv/bin/python",
        "/other/bin/python",
        "/usr/bin/python3.11",
    ]


def test_private_folder_may_have_size() -> None:
    assert plan(private=("/data", "/small:64m", "/odd:name")).private == (
        PrivateFolder("/data"),
        PrivateFolder("/small", "64m"),
        PrivateFolder("/odd:name"),
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hosts": 0}, "at least one host"),
        ({"hosts": 300}, "do not fit"),
        ({"rate": "fast"}, "not a rate"),
        ({"latency": "10"}, "not a delay"),
        ({"subnet": "10.0.0.1/24"}, "not a network"),
        ({"dead_name": True}, "needs --dead-interface"),
        ({"no_sshd": ("n7",)}, "--no-sshd names 'n7'"),
        ({"python": {"n7": "/x"}}, "--python names 'n7'"),
        ({"interface_names": ("a b",)}, "cannot be an interface's name"),
        ({"interface_names": ()}, "is empty"),
    ],
)
def test_rejects_invalid_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(LabError, match=message):
        plan(**options)


@pytest.mark.parametrize(
    ("text", "bits"), [("100mbit", 1e8), ("1.5gbit", 1.5e9), ("800bit", 800), ("1mbps", 8e6)]
)
def test_parses_rates(text: str, bits: float) -> None:
    assert rate_bits(text) == bits


def test_parses_delays() -> None:
    assert [delay_seconds(text) for text in ("10ms", "500us", "0.1s")] == [0.01, 0.0005, 0.1]


def test_plan_file_round_trip(tmp_path: Path) -> None:
    lab_plan = plan(hosts=2, private=("/data:1m",), python={"n1": "/x"}, debian_hosts=True)
    layout = Layout(tmp_path)
    files.write_plan(lab_plan, layout)
    assert files.read_plan(layout) == lab_plan
