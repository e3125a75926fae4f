"""A host of the network that is none of the job's calls at everything that listens in it.

The jobs run without CAP_NET_ADMIN, as those of ordinary users: the kernel gives them no packet
filters. ``every_transport.py`` has jobs with packet filters.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import pytest
from captures import captured
from intruders import check_intruders
from launches import (
    WITHOUT_CAPABILITIES,
    Launch,
    Site,
    drop_capabilities,
    eventually,
    shared_site,
)
from transports import Transport, site_in

pytestmark = pytest.mark.lab

HOSTS, STRANGER = ("n1", "n2"), "n3"


@pytest.fixture(scope="module")
def site(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Site:
    site = shared_site(new_lab, tmp_path_factory.mktemp("strangers"), hosts=3)
    drop_capabilities(site.lab, *HOSTS)
    return site


@pytest.fixture(scope="module")
def transport(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Transport:
    """SSH, typed on one of the hosts, which see one run directory."""
    site = site_in(new_lab, tmp_path_factory.mktemp("left"), hosts=3)
    drop_capabilities(site.lab, *HOSTS)
    return Transport(site, ("-H", ",".join(HOSTS)), prefix=WITHOUT_CAPABILITIES)


def events(launch: Launch, kind: str) -> list[Any]:
    path = launch.directory / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [one for one in map(json.loads, lines) if one["event"] == kind]


def until(launch: Launch, kind: str, more_than: int = 0) -> int:
    """Waits for more events of a kind; how many there are."""
    launch.until(lambda: len(events(launch, kind)) > more_than, kind)
    return len(events(launch, kind))


def test_a_stranger_gets_in_nowhere_is_named_and_delays_nobody(site: Site) -> None:
    address, packets, since = site.lab.address(STRANGER), site.project / "packets", time.time()
    options = ("--nnodes", "2", "--check", "none")
    with (
        captured(site, packets) as end_capture,
        site.start(*options, "steps.py") as launch,
    ):
        until(launch, "checkpoint copied")
        assert not site.have_capabilities(*HOSTS)
        os.kill(site.pid("n2", r"\[rank"), signal.SIGKILL)
        launch.until(lambda: "back after" in launch.err, "rank 1 is back")
        copied = len(events(launch, "checkpoint copied"))
        end_capture()
        # the store, gloo, and what takes checkpoints
        assert len(check_intruders(site, STRANGER, packets, since)) >= 3
        until(launch, "checkpoint copied", copied)
        assert not events(launch, "checkpoint copy failed")  # at the end, one may be cut off
        launch.signal(signal.SIGINT)
        ended = launch.end()
    assert ended.code == 128 + signal.SIGINT, ended.err
    at_store = {one["address"] for one in ended.events("stranger at the store")}
    refused = {(one["host"], one["address"]) for one in ended.events("stranger refused")}
    assert at_store == {address}
    assert refused == {("n1", address), ("n2", address)}
    warned = [line for line in ended.err.splitlines() if address in line]
    assert len(warned) == 1, ended.err
    assert "refused a connection" in warned[0]
    assert "is not one of this job's hosts" in warned[0]


def test_nor_after_the_command_has_left_a_training(transport: Transport) -> None:
    site, since = transport.site, time.time()
    packets = site.project.parent / "packets"
    with captured(site, packets):
        options = ("--detach", "-p", "1", "image", "--epochs", "1000", "--communication", "int8")
        ended = transport.run(*options, verb="train")
        assert ended.code == 0, ended.err
        metrics = ended.directory / "metrics.jsonl"
        assert eventually(metrics.exists)
    assert not site.have_capabilities(*HOSTS)
    # besides gloo's, the supervisor's
    assert len(check_intruders(site, STRANGER, packets, since)) >= 3
    size = metrics.stat().st_size
    assert eventually(lambda: metrics.stat().st_size > size)
    transport.verb("stop", str(ended.directory))
    assert site.leftovers() == ""


def test_nor_in_hosts_that_are_kept_warm(transport: Transport) -> None:
    site, since = transport.site, time.time()
    packets = site.project.parent / "packets"
    with captured(site, packets):
        ended = transport.run("--keep-warm", "5m", "--no-torch", "-p", "1", "tell.py")
    assert ended.code == 0, ended.err
    assert check_intruders(site, STRANGER, packets, since) == []
    again = transport.run("--no-torch", "-p", "1", "tell.py")
    assert again.code == 0, again.err
    transport.verb("warm", "down")
    assert site.leftovers() == ""


KNOCK = """
import socket, sys
try:
    with socket.create_connection((sys.argv[1], int(sys.argv[2])), 3) as calling:
        calling.sendall(b"0" * 96)
        heard = b""
        while part := calling.recv(100):
            heard += part
except OSError:
    print("closed")
else:
    print(len(heard))
"""


def test_the_store_is_closed_and_scripts_meet_in_it_as_ever(site: Site) -> None:
    """Rank 1 stands for another user of its host, whose connections the kernel accepts."""
    gateway = [site.lab.address("n1"), "29531"]
    words = ("--nnodes", "2", "--master-port", gateway[1], "meet.py", *gateway)
    packets, since = site.project / "packets", time.time()
    with captured(site, packets) as end_capture, site.start(*words) as launch:
        launch.until(lambda: len([*site.project.glob("met-*")]) == 2, "both have met")
        end_capture()
        assert not site.have_capabilities(*HOSTS)
        for host in HOSTS:
            listening = [at for at in site.lab.listeners(host) if at.endswith(":" + gateway[1])]
            more = {"n1": {":".join(gateway), f"127.0.0.2:{gateway[1]}"}, "n2": set()}[host]
            assert set(listening) == {f"127.0.0.1:{gateway[1]}", *more}
        argv = [sys.executable, "-c", KNOCK, *gateway]
        heard = {host: site.lab.exec(host, argv, timeout=60, check=True) for host in ("n2", "n3")}
        assert heard["n2"].stdout == "32\n"  # a challenge, which it cannot answer
        assert heard["n3"].stdout == "closed\n"
        # the store's gateway, and gloo on each host
        assert len(check_intruders(site, STRANGER, packets, since)) >= 3
        (site.project / "enough").touch()
        ended = launch.end()
    assert ended.code == 0, ended.err
    for rank in (0, 1):
        assert ended.lines(rank) == [f"{rank}: 2 at 127.0.0.1 port {gateway[1]}"] * 2


def test_an_open_store_has_the_address_of_its_host(site: Site) -> None:
    ended = site.run("--nnodes", "2", "--no-torch", "--env", "PACELINE_STORE=open", "tell.py")
    assert ended.code == 0, ended.err
    assert ended.said(1)["place"]["MASTER_ADDR"] == site.lab.address("n1")
    assert ended.json("plan.json")["store"] == "agent"
