"""Tests that ``paceline check`` names the cause of real faults in its first line."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launches import on, paceline, trust_settings

from paceline.lab import Lab, LabOptions

pytestmark = pytest.mark.lab


def check(lab: Lab, *arguments: str, cwd: Path | None = None) -> tuple[int, dict[str, Any]]:
    """Runs ``paceline check --json``; returns its exit status and its output."""
    process = paceline("check", *on(lab), "--json", *arguments, cwd=cwd)
    assert process.stdout.startswith("{"), process.stderr
    assert not process.stderr, process.stderr
    return process.returncode, json.loads(process.stdout)


def worst_finding(report: dict[str, Any]) -> dict[str, Any]:
    """Returns the finding that determines the conclusion."""
    order = ("fail", "unknown", "warn", "pass")
    worst: dict[str, Any] = min(report["findings"], key=lambda f: order.index(f["outcome"]))
    return worst


def apply(lab: Lab, remedy: str) -> None:
    """Runs the first command of a remedy on the host that the remedy names."""
    for line in remedy.splitlines():
        location, _, command = line.partition(": ")
        if not location.startswith("On n"):
            continue
        lab.exec(
            location.removeprefix("On "), ["sh", "-c", command.replace("sudo ", "")], check=True
        )


@pytest.fixture(scope="module")
def three_hosts(new_lab: Any) -> Lab:
    lab: Lab = new_lab(hosts=3, interface_names=("eth0", "ens3"), private=("/srv:64m",))
    return lab


def test_healthy_hosts_pass_and_get_environment(three_hosts: Lab) -> None:
    code, report = check(three_hosts)
    assert code == 0
    assert any("collectives right" in finding["message"] for finding in report["findings"])
    assert {finding["outcome"] for finding in report["findings"]} == {"pass"}, report
    assert set(report["findings"][0]) == {"check", "outcome", "hosts", "message", "remedy"}
    interfaces = {host: env["GLOO_SOCKET_IFNAME"] for host, env in report["environment"].items()}
    assert interfaces == {"n1": "eth0", "n2": "ens3", "n3": "eth0"}
    assert report["environment"]["n2"]["MASTER_ADDR"] == three_hosts.address("n1")


FAULTS = [
    (("drop", "n2", "32768-45000"), "n2 drops TCP from n1 and n3", "of the ports tried"),
    (("reject", "n3", "all-ephemeral"), "n3 refuses TCP from n1 and n2", "eth0"),
    (("unreachable", "n1", "n2"), "n1 has no route to n2 (10.77.0.12)", "errno 113"),
    (("deaf", "n2", "n1"), "n2 drops TCP from n1", "ens3 10.77.0.12"),
]


@pytest.mark.parametrize(("fault", "culprit", "location"), FAULTS, ids=lambda v: str(v)[:40])
def test_names_host_with_network_fault(
    three_hosts: Lab, fault: Any, culprit: str, location: str
) -> None:
    three_hosts.fault(*fault)
    try:
        code, report = check(three_hosts, "--quick")
        worst = worst_finding(report)
        assert (worst["outcome"], code) == ("fail", 1), worst
        assert culprit in worst["message"]
        assert location in worst["message"]
        assert worst["remedy"]
        if "iptables" in worst["remedy"] or "ip route del" in worst["remedy"]:
            apply(three_hosts, worst["remedy"])
            assert check(three_hosts, "--quick")[0] == 0
    finally:  # removes the fault, and what the remedy added
        undo = "iptables -F INPUT; ip route flush type unreachable || true"
        three_hosts.exec(fault[1], ["sh", "-c", undo])


@pytest.mark.parametrize(
    ("fault", "culprit", "location"),
    [
        (("slow", "n2", "100mbit"), "the link of n2 (ens3) is slow", "Mbit/s"),
        (("loss", "n3", "3"), "the link of n3 (eth0) loses packets", "%"),
    ],
    ids=["slow", "loss"],
)
def test_names_slow_or_lossy_link(
    three_hosts: Lab, fault: Any, culprit: str, location: str
) -> None:
    three_hosts.fault(*fault)
    try:
        code, report = check(three_hosts, "--no-trial")
    finally:
        three_hosts.undo(*fault)
    worst = worst_finding(report)
    assert (worst["outcome"], code) == ("warn", 0), worst
    assert culprit in worst["message"]
    assert location in worst["message"]
    assert worst["remedy"]


def test_names_full_disk(three_hosts: Lab) -> None:
    three_hosts.fault("fill-disk", "n2", "/srv")
    try:
        code, report = check(three_hosts, "--quick", "--data", "/srv")
    finally:
        three_hosts.undo("fill-disk", "n2", "/srv")
    assert code == 1
    assert "the disk at /srv on n2 is full" in worst_finding(report)["message"]
    assert worst_finding(report)["hosts"] == ["n2"]


@contextlib.contextmanager
def start_up_file(lab: Lab, host: str, text: str) -> Iterator[None]:
    """Gives a host's login shell a start-up file inside the ``with`` block."""
    start = lab.home(host) / ".bashrc"
    start.write_text(text)
    try:
        yield
    finally:
        start.unlink()


def failures(report: dict[str, Any]) -> str:
    """Returns the messages of all findings that fail."""
    return "\n".join(entry["message"] for entry in report["findings"] if entry["outcome"] == "fail")


def test_names_read_only_folder_and_broken_driver(three_hosts: Lab, tmp_path: Path) -> None:
    """Checked from a folder that the hosts do not have, so that the code would be sent."""
    tool = three_hosts.home("n3") / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(
        "#!/bin/sh\necho 'Failed to initialize NVML: Driver/library mismatch'; exit 18\n"
    )
    tool.chmod(0o755)
    three_hosts.exec("n2", ["mount", "-o", "remount,ro", "/srv"], check=True)
    try:
        with start_up_file(three_hosts, "n3", "PATH=$HOME/bin:$PATH\n"):
            code, report = check(three_hosts, "--shared", "/srv", "--no-trial", cwd=tmp_path)
    finally:
        three_hosts.exec("n2", ["mount", "-o", "remount,rw", "/srv"], check=True)
        tool.unlink()
    assert code == 1
    assert "/srv on n2 does not take files (write: Read-only file system)" in failures(report)
    assert "nvidia-smi on n3 fails: Failed to initialize NVML" in failures(report)
    assert not [entry for entry in report["findings"] if entry["outcome"] == "unknown"]


def test_names_missing_and_broken_interpreters(three_hosts: Lab, tmp_path: Path) -> None:
    (tmp_path / "paceline.toml").write_text('[hosts.n3]\npython = "/no/such/python"\n')
    trust_settings(tmp_path)
    with start_up_file(three_hosts, "n2", "export PYTHONHOME=/opt/none\n"):
        code, report = check(three_hosts, "--quick", cwd=tmp_path)
    assert code == 1
    assert "PYTHONHOME=/opt/none is set on n2" in failures(report)
    assert "n3 has no Python at /no/such/python" in failures(report)


def test_warns_of_small_shared_memory(three_hosts: Lab) -> None:
    """The small /dev/shm is reported. The useless PATH is not, because it is not needed."""
    three_hosts.exec("n3", ["mount", "-o", "remount,size=1m", "/dev/shm"], check=True)
    try:
        with start_up_file(three_hosts, "n2", "export PATH=/nowhere\nreturn\n"):
            code, report = check(three_hosts, "--quick")
    finally:
        three_hosts.exec("n3", ["mount", "-o", "remount,size=50%", "/dev/shm"], check=True)
    assert code == 0
    assert [entry["message"] for entry in report["findings"] if entry["outcome"] != "pass"] == [
        "/dev/shm on n3 has 1.0 MiB: too little for data loaders and NCCL"
    ]


def test_detects_unshared_folder(three_hosts: Lab) -> None:
    code, report = check(three_hosts, "--shared", "/srv", "--no-trial")
    assert code == 1
    assert "/srv on" in worst_finding(report)["message"]
    assert worst_finding(report)["check"] == "folders"


def test_names_missing_interface_and_folder(three_hosts: Lab, tmp_path: Path) -> None:
    code, report = check(three_hosts, "--quick", "--iface", "eth0")
    assert (code, worst_finding(report)["hosts"]) == (1, ["n2"])
    assert (
        "interface eth0 was asked for, but n2 has no usable address"
        in worst_finding(report)["message"]
    )
    (tmp_path / "paceline.toml").write_text('[hosts.n2]\nworkdir = "/srv/job"\n')
    code, report = check(three_hosts, "--quick", cwd=tmp_path)
    assert code == 1
    assert "n2 has no folder /srv/job" in worst_finding(report)["message"]
    apply(three_hosts, worst_finding(report)["remedy"])
    assert check(three_hosts, "--quick", cwd=tmp_path)[0] == 0


def test_detects_two_interfaces_in_same_subnet(tmp_path: Path) -> None:
    """The configured interface is not the one that the kernel uses."""
    (tmp_path / "paceline.toml").write_text('[hosts.n1]\ninterface = "eth9"\n')
    with Lab(LabOptions(hosts=3)) as lab:
        add = "ip link add link eth0 name eth9 type macvlan mode bridge"
        if lab.exec("n1", add.split()).returncode:
            pytest.skip("this kernel has no macvlan")
        for command in (
            "ip addr add 10.77.0.111/24 dev eth9",
            "ip link set eth9 up",
        ):
            lab.exec("n1", command.split(), check=True)
        code, report = check(lab, "--no-trial", cwd=tmp_path)
        assert (code, worst_finding(report)["check"]) == (0, "interface"), report
        assert (
            "n1 sends to n2 and n3 through eth0, not through eth9"
            in worst_finding(report)["message"]
        )
        apply(lab, worst_finding(report)["remedy"])
        code, report = check(lab, "--no-trial", cwd=tmp_path)
        outcomes = [
            entry["outcome"] for entry in report["findings"] if entry["check"] == "interface"
        ]
        assert (code, set(outcomes)) == (0, {"pass"}), report  # links may be slow on a busy machine


def test_names_process_that_uses_port(three_hosts: Lab) -> None:
    hold = "import socket,time\ns = socket.create_server(('', 29511))\nprint(1, flush=True)"
    hold += "\ntime.sleep(60)"
    with three_hosts.popen("n1", [sys.executable, "-c", hold], stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        code, report = check(three_hosts, "--quick", "--master-port", "29511")
        holder.kill()
    assert code == 1
    assert "port 29511 on n1 is taken by process" in worst_finding(report)["message"]


def test_bundle_contains_findings_but_no_secret(three_hosts: Lab, tmp_path: Path) -> None:
    target = tmp_path / "b.tar.gz"
    options = ("--quick", "--plain", "--bundle", str(target))
    process = paceline("check", *on(three_hosts), *options, MY_TOKEN="s3cr3t-value")
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith("all is well")
    listed = subprocess.run(["tar", "xzOf", target], capture_output=True, text=True).stdout
    assert '"findings"' in listed
    assert "s3cr3t-value" not in listed + process.stdout
    assert target.stat().st_mode & 0o77 == 0


def test_detects_debian_host_names_despite_extra_interfaces() -> None:
    options = LabOptions(hosts=2, debian_hosts=True, dead_interface=True, bridge_address=True)
    with Lab(options) as lab:
        code, report = check(lab, "--quick")
        apply(lab, worst_finding(report)["remedy"])
        assert {f["outcome"] for f in check(lab, "--quick")[1]["findings"]} == {"pass"}
    worst = worst_finding(report)
    assert code == 0
    assert worst["check"] == "names"
    assert "127.0.1.1" in worst["message"]
    assert worst["hosts"] == ["n1", "n2"]
    assert {env["GLOO_SOCKET_IFNAME"] for env in report["environment"].values()} == {"eth0"}


def test_reports_multiple_dead_hosts(three_hosts: Lab) -> None:
    dead = {"n1": ("kill", "n1", "sshd.*listener"), "n2": ("unplug", "n2"), "n3": ("freeze", "n3")}
    for fault in dead.values():
        three_hosts.fault(*fault)
    try:
        code, report = check(three_hosts, "--quick")
    finally:
        three_hosts.fault("power-off", "n1")  # n1 comes back with its usual sshd
        three_hosts.heal("n1")
        three_hosts.undo("unplug", "n2")
        three_hosts.undo("freeze", "n3")
    messages = {f["hosts"][0]: f["message"] for f in report["findings"] if f["outcome"] == "fail"}
    assert code == 1
    assert "cannot log in to n1: refused" in messages["n1"]
    assert "no answer" in messages["n2"] or "no route" in messages["n2"]
    assert "sshd does not speak" in messages["n3"]


def test_single_host_and_ipv6_only_pass() -> None:
    for options in (LabOptions(hosts=1), LabOptions(hosts=2, ipv6_only=True)):
        with Lab(options) as lab:
            code, report = check(lab, "--no-trial")
        assert (code, {f["outcome"] for f in report["findings"]}) == (0, {"pass"}), report
