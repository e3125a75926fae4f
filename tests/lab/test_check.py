"""``paceline check`` against faults made for real: the first line names the culprit."""

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


def check(lab: Lab, *words: str, cwd: Path | None = None) -> tuple[int, dict[str, Any]]:
    """Exit status and the object of ``paceline check --json``."""
    done = paceline("check", *on(lab), "--json", *words, cwd=cwd)
    assert done.stdout.startswith("{"), done.stderr
    assert not done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout)


def worst(said: dict[str, Any]) -> dict[str, Any]:
    """The finding that the conclusion is made of."""
    order = ("fail", "unknown", "warn", "pass")
    found: dict[str, Any] = min(said["findings"], key=lambda f: order.index(f["outcome"]))
    return found


def apply(lab: Lab, remedy: str) -> None:
    """Types the first line of a remedy on the host that it names."""
    for line in remedy.splitlines():
        where, _, command = line.partition(": ")
        if not where.startswith("On n"):
            continue
        lab.exec(where.removeprefix("On "), ["sh", "-c", command.replace("sudo ", "")], check=True)


@pytest.fixture(scope="module")
def three(new_lab: Any) -> Lab:
    lab: Lab = new_lab(hosts=3, interface_names=("eth0", "ens3"), private=("/srv:64m",))
    return lab


def test_healthy_hosts_get_an_environment_and_no_warning(three: Lab) -> None:
    code, said = check(three)
    assert code == 0
    assert any("collectives right" in finding["message"] for finding in said["findings"])
    assert {finding["outcome"] for finding in said["findings"]} == {"pass"}, said
    assert set(said["findings"][0]) == {"check", "outcome", "hosts", "message", "remedy"}
    interfaces = {host: env["GLOO_SOCKET_IFNAME"] for host, env in said["environment"].items()}
    assert interfaces == {"n1": "eth0", "n2": "ens3", "n3": "eth0"}
    assert said["environment"]["n2"]["MASTER_ADDR"] == three.address("n1")


FAULTS = [
    (("drop", "n2", "32768-45000"), "n2 drops TCP from n1 and n3", "of the ports tried"),
    (("reject", "n3", "all-ephemeral"), "n3 refuses TCP from n1 and n2", "eth0"),
    (("unreachable", "n1", "n2"), "n1 has no route to n2 (10.77.0.12)", "errno 113"),
    (("deaf", "n2", "n1"), "n2 drops TCP from n1", "ens3 10.77.0.12"),
]


@pytest.mark.parametrize(("fault", "who", "where"), FAULTS, ids=lambda v: str(v)[:40])
def test_names_the_culprit(three: Lab, fault: Any, who: str, where: str) -> None:
    three.fault(*fault)
    try:
        code, said = check(three, "--quick")
        found = worst(said)
        assert (found["outcome"], code) == ("fail", 1), found
        assert who in found["message"]
        assert where in found["message"]
        assert found["remedy"]
        if "iptables" in found["remedy"] or "ip route del" in found["remedy"]:
            apply(three, found["remedy"])
            assert check(three, "--quick")[0] == 0
    finally:  # the fault, and what a remedy added
        undo = "iptables -F INPUT; ip route flush type unreachable || true"
        three.exec(fault[1], ["sh", "-c", undo])


@pytest.mark.parametrize(
    ("fault", "who", "where"),
    [
        (("slow", "n2", "100mbit"), "the link of n2 (ens3) is slow", "Mbit/s"),
        (("loss", "n3", "3"), "the link of n3 (eth0) loses packets", "%"),
    ],
    ids=["slow", "loss"],
)
def test_names_the_bad_link(three: Lab, fault: Any, who: str, where: str) -> None:
    three.fault(*fault)
    try:
        code, said = check(three, "--no-trial")
    finally:
        three.undo(*fault)
    found = worst(said)
    assert (found["outcome"], code) == ("warn", 0), found
    assert who in found["message"]
    assert where in found["message"]
    assert found["remedy"]


def test_a_full_disk_is_named_with_its_path(three: Lab) -> None:
    three.fault("fill-disk", "n2", "/srv")
    try:
        code, said = check(three, "--quick", "--data", "/srv")
    finally:
        three.undo("fill-disk", "n2", "/srv")
    assert code == 1
    assert "the disk at /srv on n2 is full" in worst(said)["message"]
    assert worst(said)["hosts"] == ["n2"]


@contextlib.contextmanager
def start_up_file(lab: Lab, host: str, text: str) -> Iterator[None]:
    """Lets a host's shell read this at the login, for a while."""
    start = lab.home(host) / ".bashrc"
    start.write_text(text)
    try:
        yield
    finally:
        start.unlink()


def failures(said: dict[str, Any]) -> str:
    """What all findings say that fail."""
    return "\n".join(one["message"] for one in said["findings"] if one["outcome"] == "fail")


def test_a_folder_that_takes_no_file_and_a_driver_that_fails_are_named(
    three: Lab, tmp_path: Path
) -> None:
    """Also from a folder that the hosts do not have: the code would be shipped."""
    tool = three.home("n3") / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(
        "#!/bin/sh\necho 'Failed to initialize NVML: Driver/library mismatch'; exit 18\n"
    )
    tool.chmod(0o755)
    three.exec("n2", ["mount", "-o", "remount,ro", "/srv"], check=True)
    try:
        with start_up_file(three, "n3", "PATH=$HOME/bin:$PATH\n"):
            code, said = check(three, "--shared", "/srv", "--no-trial", cwd=tmp_path)
    finally:
        three.exec("n2", ["mount", "-o", "remount,rw", "/srv"], check=True)
        tool.unlink()
    assert code == 1
    assert "/srv on n2 does not take files (write: Read-only file system)" in failures(said)
    assert "nvidia-smi on n3 fails: Failed to initialize NVML" in failures(said)
    assert not [one for one in said["findings"] if one["outcome"] == "unknown"]


def test_interpreters_that_are_missing_or_broken_are_told_at_once(
    three: Lab, tmp_path: Path
) -> None:
    (tmp_path / "paceline.toml").write_text('[hosts.n3]\npython = "/no/such/python"\n')
    trust_settings(tmp_path)
    with start_up_file(three, "n2", "export PYTHONHOME=/opt/none\n"):
        code, said = check(three, "--quick", cwd=tmp_path)
    assert code == 1
    assert "PYTHONHOME=/opt/none is set on n2" in failures(said)
    assert "n3 has no Python at /no/such/python" in failures(said)


def test_small_shared_memory_and_a_login_without_a_path(three: Lab) -> None:
    """The one is called small; the other does not matter, for nothing is looked for there."""
    three.exec("n3", ["mount", "-o", "remount,size=1m", "/dev/shm"], check=True)
    try:
        with start_up_file(three, "n2", "export PATH=/nowhere\nreturn\n"):
            code, said = check(three, "--quick")
    finally:
        three.exec("n3", ["mount", "-o", "remount,size=50%", "/dev/shm"], check=True)
    assert code == 0
    assert [one["message"] for one in said["findings"] if one["outcome"] != "pass"] == [
        "/dev/shm on n3 has 1.0 MiB: too little for data loaders and NCCL"
    ]


def test_a_private_folder_is_not_a_shared_one(three: Lab) -> None:
    code, said = check(three, "--shared", "/srv", "--no-trial")
    assert code == 1
    assert "/srv on" in worst(said)["message"]
    assert worst(said)["check"] == "folders"


def test_an_interface_and_a_folder_that_one_host_lacks_are_named(
    three: Lab, tmp_path: Path
) -> None:
    code, said = check(three, "--quick", "--iface", "eth0")
    assert (code, worst(said)["hosts"]) == (1, ["n2"])
    assert "interface eth0 was asked for, but n2 has no usable address" in worst(said)["message"]
    (tmp_path / "paceline.toml").write_text('[hosts.n2]\nworkdir = "/srv/job"\n')
    code, said = check(three, "--quick", cwd=tmp_path)
    assert code == 1
    assert "n2 has no folder /srv/job" in worst(said)["message"]
    apply(three, worst(said)["remedy"])
    assert check(three, "--quick", cwd=tmp_path)[0] == 0


def test_two_interfaces_in_one_subnet_are_found_by_counting(tmp_path: Path) -> None:
    """The one that was named is not the one that the kernel takes."""
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
        code, said = check(lab, "--no-trial", cwd=tmp_path)
        assert (code, worst(said)["check"]) == (0, "interface"), said
        assert "n1 sends to n2 and n3 through eth0, not through eth9" in worst(said)["message"]
        apply(lab, worst(said)["remedy"])
        code, said = check(lab, "--no-trial", cwd=tmp_path)
        outcomes = [one["outcome"] for one in said["findings"] if one["check"] == "interface"]
        assert (code, set(outcomes)) == (0, {"pass"}), said  # a busy machine may have slow links


def test_a_taken_port_is_named_with_its_holder(three: Lab) -> None:
    hold = "import socket,time\ns = socket.create_server(('', 29511))\nprint(1, flush=True)"
    hold += "\ntime.sleep(60)"
    with three.popen("n1", [sys.executable, "-c", hold], stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        code, said = check(three, "--quick", "--master-port", "29511")
        holder.kill()
    assert code == 1
    assert "port 29511 on n1 is taken by process" in worst(said)["message"]


def test_a_bundle_holds_the_scene_and_no_secret(three: Lab, tmp_path: Path) -> None:
    target = tmp_path / "b.tar.gz"
    options = ("--quick", "--plain", "--bundle", str(target))
    done = paceline("check", *on(three), *options, MY_TOKEN="s3cr3t-value")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("all is well")
    listed = subprocess.run(["tar", "xzOf", target], capture_output=True, text=True).stdout
    assert '"findings"' in listed
    assert "s3cr3t-value" not in listed + done.stdout
    assert target.stat().st_mode & 0o77 == 0


def test_debian_names_and_odd_interfaces_are_told_apart() -> None:
    options = LabOptions(hosts=2, debian_hosts=True, dead_interface=True, bridge_address=True)
    with Lab(options) as lab:
        code, said = check(lab, "--quick")
        apply(lab, worst(said)["remedy"])
        assert {f["outcome"] for f in check(lab, "--quick")[1]["findings"]} == {"pass"}
    found = worst(said)
    assert code == 0
    assert found["check"] == "names"
    assert "127.0.1.1" in found["message"]
    assert found["hosts"] == ["n1", "n2"]
    assert {env["GLOO_SOCKET_IFNAME"] for env in said["environment"].values()} == {"eth0"}


def test_dead_hosts_do_not_hide_each_other(three: Lab) -> None:
    dead = {"n1": ("kill", "n1", "sshd.*listener"), "n2": ("unplug", "n2"), "n3": ("freeze", "n3")}
    for fault in dead.values():
        three.fault(*fault)
    try:
        code, said = check(three, "--quick")
    finally:
        three.fault("power-off", "n1")  # it has another sshd when that is over
        three.heal("n1")
        three.undo("unplug", "n2")
        three.undo("freeze", "n3")
    told = {f["hosts"][0]: f["message"] for f in said["findings"] if f["outcome"] == "fail"}
    assert code == 1
    assert "cannot log in to n1: refused" in told["n1"]
    assert "no answer" in told["n2"] or "no route" in told["n2"]
    assert "sshd does not speak" in told["n3"]


def test_one_host_and_ipv6_only_are_well() -> None:
    for options in (LabOptions(hosts=1), LabOptions(hosts=2, ipv6_only=True)):
        with Lab(options) as lab:
            code, said = check(lab, "--no-trial")
        assert (code, {f["outcome"] for f in said["findings"]}) == (0, {"pass"}), said
