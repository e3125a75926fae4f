"""Tests the steps that cause each fault, and those that undo it."""

from __future__ import annotations

import pytest
from lab_plans import plan

from each_case import each_case
from paceline.lab.faults import (
    FAULTS,
    Action,
    Fault,
    Fill,
    Kill,
    OnHost,
    OnSwitch,
    Target,
    find_fault,
    size_bytes,
)
from paceline.spec.errors import LabError

EXAMPLES: dict[str, list[tuple[str, ...]]] = {
    "power-off": [()],
    "freeze": [()],
    "unplug": [()],
    "drop": [("all",), ("all-ephemeral",), ("29500,30000-40000",)],
    "reject": [("all",), ("all-ephemeral",), ("29500",)],
    "unreachable": [("n2",)],
    "deaf": [("n2",)],
    "slow": [("10mbit",)],
    "loss": [("5",), ("0.1%",), ("100",)],
    "fill-disk": [("/data",), ("/data", "10m")],
    "kill": [("42",), ("train.*py",)],
}
CASES = [(fault, given) for fault in FAULTS.values() for given in EXAMPLES[fault.name]]
INVALID_ARGUMENTS = [
    ("drop", "ssh"),
    ("drop", "0"),
    ("reject", "1-2-3"),
    ("unreachable", "n9"),
    ("slow", "fast"),
    ("loss", "101"),
    ("loss", "none"),
    ("kill", "("),
]


@pytest.fixture
def target() -> Target:
    lab_plan = plan(hosts=3)
    return Target(lab_plan, lab_plan.host("n1"))


@each_case(("fault", "given"), CASES)
def test_faults_have_strike_and_undo_steps(
    target: Target, fault: Fault, given: tuple[str, ...]
) -> None:
    assert find_fault(fault.name, given) is fault
    assert fault.strike(target, given)
    assert fault.summary
    if fault.name != "kill":
        assert fault.undo is not None
        assert fault.undo(target, given)


@each_case(("fault", "given"), CASES)
def test_undo_removes_firewall_rules(target: Target, fault: Fault, given: tuple[str, ...]) -> None:
    def rules(steps: object, action: str) -> set[tuple[str, ...]]:
        assert isinstance(steps, tuple)
        tables = [s.argv for s in steps if isinstance(s, OnHost) and s.argv[0] == "iptables"]
        assert all(argv[2] == action for argv in tables)
        return {argv[3:] for argv in tables}

    undo_steps = fault.undo(target, given) if fault.undo else ()
    assert rules(fault.strike(target, given), "-I") == rules(undo_steps, "-D")


@pytest.mark.parametrize(("name", "argument"), INVALID_ARGUMENTS)
def test_rejects_invalid_arguments(target: Target, name: str, argument: str) -> None:
    with pytest.raises(LabError):
        FAULTS[name].strike(target, (argument,))


def test_rejects_unknown_fault_and_missing_arguments() -> None:
    with pytest.raises(LabError, match="no fault 'melt'"):
        find_fault("melt", ())
    with pytest.raises(LabError, match="usage: paceline lab fault drop HOST PORTS"):
        find_fault("drop", ())


def test_power_off_unplugs_host_first(target: Target) -> None:
    unplug = OnSwitch(("ip", "link", "set", "n1", "down"))
    assert FAULTS["power-off"].strike(target, ()) == (unplug, Action.HALT)
    assert FAULTS["power-off"].undo is not None
    assert FAULTS["power-off"].undo(target, ()) == (Action.BOOT,)


def test_freeze_fill_disk_and_kill_steps(target: Target) -> None:
    freeze, fill = FAULTS["freeze"], FAULTS["fill-disk"]
    assert freeze.undo is not None
    assert fill.undo is not None
    assert (freeze.strike(target, ()), freeze.undo(target, ())) == (
        (Action.FREEZE,),
        (Action.THAW,),
    )
    assert fill.strike(target, ("/d", "1k")) == (Fill("/d", 1024),)
    assert fill.undo(target, ("/d", "1k")) == (OnHost(("rm", "-f", "/d/.paceline-lab-ballast")),)
    assert FAULTS["kill"].strike(target, ("python",)) == (Kill("python"),)


def test_undo_of_slow_restores_lab_rate() -> None:
    lab_plan = plan(rate="1gbit")
    target = Target(lab_plan, lab_plan.host("n1"))
    slow = FAULTS["slow"]
    assert slow.undo is not None
    undo_steps = slow.undo(target, ("1mbit",))
    assert all("1gbit" in step.argv for step in undo_steps if isinstance(step, OnHost | OnSwitch))


def test_ipv6_labs_use_ip6tables() -> None:
    lab_plan = plan(ipv6_only=True)
    (step, *_) = FAULTS["drop"].strike(Target(lab_plan, lab_plan.host("n1")), ("80",))
    assert isinstance(step, OnHost)
    assert step.argv[0] == "ip6tables"


def test_sizes() -> None:
    assert [size_bytes(text) for text in ("7", "1k", "2M", "1g")] == [7, 1024, 2 << 20, 1 << 30]
    with pytest.raises(LabError):
        size_bytes("much")
