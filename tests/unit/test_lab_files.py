"""The files, commands and mounts of a lab, as values."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from lab_plans import plan

from paceline.hosts.lab import Layout
from paceline.lab import engine, enter, files, host, network
from paceline.lab.processes import Process, of_host, parse_connected, parse_listeners

LAYOUT = Layout(Path("/tmp/paceline-lab-0/test"))


def test_debian_puts_the_own_name_on_127_0_1_1_first() -> None:
    made = plan(hosts=2, debian_hosts=True)
    lines = files.hosts_file(made, made.host("n2")).splitlines()
    assert lines[:2] == ["127.0.0.1 localhost", "127.0.1.1 n2"]
    assert lines[-2:] == ["10.77.0.11 n1", "10.77.0.12 n2"]


def test_dead_name_comes_before_the_good_address() -> None:
    made = plan(hosts=1, dead_interface=True, dead_name=True)
    text = files.hosts_file(made, made.host("n1"))
    assert text.index("10.66.0.11 n1") < text.index("10.77.0.11 n1")


def test_passwd_moves_the_home_and_keeps_the_others() -> None:
    made = plan()
    lines = files.passwd(made, "root:x:0:0::/root:/bin/sh\nann:x:1000:1000::/home/ann:/bin/sh\n")
    assert lines.splitlines() == [
        "ann:x:1000:1000::/run/home/ann:/bin/bash",
        "root:x:0:0::/root:/bin/sh",
        "sshd:x:105:65534::/run/sshd:/usr/sbin/nologin",
    ]


def test_group_of_terminals_is_left_out_without_root() -> None:
    assert files.group(plan(), "root:x:0:\ntty:x:5:\n") == "root:x:0:\n"


def test_ssh_configuration_pins_and_never_asks() -> None:
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


def test_known_hosts_name_both_name_and_address() -> None:
    made = plan(hosts=1)
    assert files.known_hosts(made, {"n1": "ssh-ed25519 KEY comment"}) == (
        "n1,10.77.0.11 ssh-ed25519 KEY\n"
    )


def test_settings_only_where_a_host_differs() -> None:
    assert files.settings(plan()) == ""
    assert files.settings(plan(python={"n2": "/x"})) == '[hosts.n2]\npython = "/x/bin/python"\n'


def test_dead_interface_is_made_first() -> None:
    made = plan(hosts=1, dead_interface=True)
    lines = network.ports_batch({7: made.host("n1")})
    names = [line for line in lines if "type veth" in line]
    assert ["dead0" in line for line in names] == [True, False]
    assert all("netns 7" in line for line in names)


def test_rate_goes_below_netem_where_that_delays() -> None:
    made = plan(rate="10mbit", latency="10ms")
    host = made.host("n1")
    by_place = dict(network.shape(made, host, netem=True))
    assert "root" in by_place["switch"]
    assert by_place["host"][5:8] == ("parent", "1:1", "tbf")
    assert dict(network.unshape(host, netem=True))["host"][-2:] == ("parent", "1:1")
    ((_, argv),) = network.delay_by_netem(host, 0.01)
    assert argv[-4:] == ("delay", "10ms", "limit", "100000")
    assert network.delay(made) == 0.01


def test_bucket_suffices_for_the_rate() -> None:
    assert network.burst_bytes("1mbit") == 16_000
    assert network.burst_bytes("10gbit") == 5_000_000


def test_only_what_own_folders_would_hide_is_shared_again() -> None:
    paths = ["/venv", "/tmp/project", "/run/user/1", "/tmp/project", "/tmp"]
    assert [step.target for step in host.rebind_mounts(paths)] == ["/tmp/project", "/run/user/1"]


def test_mounts_come_in_an_order_that_works() -> None:
    made = plan(private=("/data", "/small:1m"), hide=("/secret",))
    steps = host.host_mounts(made, LAYOUT, made.host("n1"))
    targets = [step.target for step in steps]
    assert targets.index("/proc") < targets.index("/tmp") < targets.index("/tmp/project")
    assert targets.index("/run") < targets.index("/run/home/ann") < targets.index("/etc/hosts")
    last = {step.target: (step.kind, step.source) for step in steps[-3:]}
    assert last == {
        "/data": ("overlay", "/data"),
        "/small": ("fresh", "tmpfs"),
        "/secret": ("fresh", "tmpfs"),
    }


def test_listeners_are_read_from_the_kernels_table() -> None:
    head = "  sl  local_address rem_address   st\n"
    four = head + "   0: 0100007F:1F90 00000000:0000 0A 0\n   1: 0B004D0A:0016 0C004D0A:1 01 0\n"
    assert parse_listeners(four) == ["127.0.0.1:8080"]
    six = head + "   0: 00000000000000000000000001000000:0016 0:0 0A 0\n"
    assert parse_listeners(six) == ["[::1]:22"]
    assert parse_connected(four) == four.count(" 01 ")
    assert parse_connected(six.replace(" 0A ", " 01 ")) == 1


def test_processes_of_inner_namespaces_belong_to_the_host() -> None:
    def process(pid: int, parent: int, namespace: int, state: str = "S") -> Process:
        return Process(pid, 1, parent, state, "x", namespace)

    everyone = [
        process(1, 0, 100),
        process(10, 1, 200),
        process(11, 10, 200, "Z"),
        process(12, 10, 300),  # a container on the host
        process(13, 12, 300),
        process(20, 1, 400),
    ]
    assert [one.pid for one in of_host(everyone, 200)] == [10, 12, 13]


def test_kind_of_file_system() -> None:
    line = "36 35 0:42 / /small rw shared:1 - tmpfs tmpfs rw\n"
    assert engine.kind_of(os.makedev(0, 42), line) == "tmpfs"
    assert engine.kind_of(os.makedev(0, 43), line) == "unknown"


def test_a_signal_for_a_command_that_has_just_ended_is_no_error() -> None:
    """``timeout`` signals the process that it started, and then its whole group."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        enter._forward_signals(ended.pid)
        signal.raise_signal(signal.SIGTERM)
    finally:
        for number in (*enter._FORWARDED_SIGNALS, *enter._TERMINAL_SIGNALS):
            signal.signal(number, handlers[number])
