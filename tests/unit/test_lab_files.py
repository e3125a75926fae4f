"""Tests the files, commands and mounts that a lab generates."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from lab_plans import plan

from paceline.hosts.lab import Layout, parent_folder
from paceline.lab import engine, enter, files, host, network
from paceline.lab.processes import Process, of_host, parse_connected, parse_listeners
from paceline.spec.errors import LabError

LAYOUT = Layout(Path("/tmp/paceline-lab-0/test"))


def test_debian_hosts_file_maps_hostname_to_127_0_1_1() -> None:
    lab_plan = plan(hosts=2, debian_hosts=True)
    lines = files.hosts_file(lab_plan, lab_plan.host("n2")).splitlines()
    assert lines[:2] == ["127.0.0.1 localhost", "127.0.1.1 n2"]
    assert lines[-2:] == ["10.77.0.11 n1", "10.77.0.12 n2"]


def test_dead_address_precedes_working_address() -> None:
    lab_plan = plan(hosts=1, dead_interface=True, dead_name=True)
    text = files.hosts_file(lab_plan, lab_plan.host("n1"))
    assert text.index("10.66.0.11 n1") < text.index("10.77.0.11 n1")


def test_passwd_moves_home_of_user() -> None:
    lab_plan = plan()
    lines = files.passwd(
        lab_plan, "root:x:0:0::/root:/bin/sh\nann:x:1000:1000::/home/ann:/bin/sh\n"
    )
    assert lines.splitlines() == [
        "ann:x:1000:1000::/run/home/ann:/bin/bash",
        "root:x:0:0::/root:/bin/sh",
        "sshd:x:105:65534::/run/sshd:/usr/sbin/nologin",
    ]


def test_unprivileged_group_file_omits_tty() -> None:
    assert files.group(plan(), "root:x:0:\ntty:x:5:\n") == "root:x:0:\n"


def test_ssh_config_pins_keys_and_is_not_interactive() -> None:
    text = files.ssh_config(plan(), LAYOUT, "'dial'")
    for line in (
        "StrictHostKeyChecking yes",
        "IdentitiesOnly yes",
        "BatchMode yes",
        "ProxyUseFdpass yes",
        'UserKnownHostsFile "/tmp/paceline-lab-0/test/known_hosts"',
        "Host n2 10.77.0.12",
    ):
        assert line in text


def test_known_hosts_contains_name_and_address() -> None:
    lab_plan = plan(hosts=1)
    assert files.known_hosts(lab_plan, {"n1": "ssh-ed25519 KEY comment"}) == (
        "n1,10.77.0.11 ssh-ed25519 KEY\n"
    )


def test_settings_contain_only_differing_hosts() -> None:
    assert files.settings(plan()) == ""
    assert files.settings(plan(python={"n2": "/x"})) == '[hosts.n2]\npython = "/x/bin/python"\n'


def test_dead_interface_is_created_first() -> None:
    lab_plan = plan(hosts=1, dead_interface=True)
    lines = network.ports_batch({7: lab_plan.host("n1")})
    names = [line for line in lines if "type veth" in line]
    assert ["dead0" in line for line in names] == [True, False]
    assert all("netns 7" in line for line in names)


def test_rate_limit_is_child_of_netem_delay() -> None:
    lab_plan = plan(rate="10mbit", latency="10ms")
    host = lab_plan.host("n1")
    by_place = dict(network.shape(lab_plan, host, netem=True))
    assert "root" in by_place["switch"]
    assert by_place["host"][5:8] == ("parent", "1:1", "tbf")
    assert dict(network.unshape(host, netem=True))["host"][-2:] == ("parent", "1:1")
    ((_, argv),) = network.delay_by_netem(host, 0.01)
    assert argv[-4:] == ("delay", "10ms", "limit", "100000")
    assert network.delay(lab_plan) == 0.01


def test_burst_size_follows_rate() -> None:
    assert network.burst_bytes("1mbit") == 16_000
    assert network.burst_bytes("10gbit") == 5_000_000


def test_rebinds_only_paths_hidden_by_private_mounts() -> None:
    paths = ["/venv", "/tmp/project", "/run/user/1", "/tmp/project", "/tmp"]
    assert [step.target for step in host.rebind_mounts(paths)] == ["/tmp/project", "/run/user/1"]


def test_mounts_are_ordered_by_dependency() -> None:
    lab_plan = plan(private=("/data", "/small:1m"), hide=("/secret",))
    steps = host.host_mounts(lab_plan, LAYOUT, lab_plan.host("n1"))
    targets = [step.target for step in steps]
    assert targets.index("/proc") < targets.index("/tmp") < targets.index("/tmp/project")
    assert targets.index("/run") < targets.index("/run/home/ann") < targets.index("/etc/hosts")
    final_mounts = {step.target: (step.kind, step.source) for step in steps[-3:]}
    assert final_mounts == {
        "/data": ("overlay", "/data"),
        "/small": ("fresh", "tmpfs"),
        "/secret": ("fresh", "tmpfs"),
    }


def test_parses_listeners_of_proc_net_tcp() -> None:
    head = "  sl  local_address rem_address   st\n"
    ipv4_table = (
        head + "   0: 0100007F:1F90 00000000:0000 0A 0\n   1: 0B004D0A:0016 0C004D0A:1 01 0\n"
    )
    assert parse_listeners(ipv4_table) == ["127.0.0.1:8080"]
    ipv6_table = head + "   0: 00000000000000000000000001000000:0016 0:0 0A 0\n"
    assert parse_listeners(ipv6_table) == ["[::1]:22"]
    assert parse_connected(ipv4_table) == ipv4_table.count(" 01 ")
    assert parse_connected(ipv6_table.replace(" 0A ", " 01 ")) == 1


def test_nested_pid_namespaces_belong_to_host() -> None:
    def process(pid: int, parent: int, namespace: int, state: str = "S") -> Process:
        return Process(pid, 1, parent, state, "x", namespace)

    all_processes = [
        process(1, 0, 100),
        process(10, 1, 200),
        process(11, 10, 200, "Z"),
        process(12, 10, 300),  # in a container on the host
        process(13, 12, 300),
        process(20, 1, 400),
    ]
    assert [listed.pid for listed in of_host(all_processes, 200)] == [10, 12, 13]


def test_detects_file_system_kind() -> None:
    line = "36 35 0:42 / /small rw shared:1 - tmpfs tmpfs rw\n"
    assert engine.kind_of(os.makedev(0, 42), line) == "tmpfs"
    assert engine.kind_of(os.makedev(0, 43), line) == "unknown"


def test_signal_to_exited_command_is_ignored() -> None:
    """``timeout`` signals its child and then the whole group, when the child may have exited."""
    exited = subprocess.Popen(["true"])
    exited.wait()
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        enter._forward_signals(exited.pid)
        signal.raise_signal(signal.SIGTERM)
    finally:
        for number in (*enter._FORWARDED_SIGNALS, *enter._TERMINAL_SIGNALS):
            signal.signal(number, handlers[number])


def test_folder_of_labs_that_is_taken_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    place = tmp_path / "paceline-lab"
    place.symlink_to("nowhere")
    with pytest.raises(LabError, match="cannot hold a lab's keys"):
        parent_folder()
    place.unlink()
    place.touch()
    with pytest.raises(LabError, match="cannot hold a lab's keys"):
        parent_folder()
