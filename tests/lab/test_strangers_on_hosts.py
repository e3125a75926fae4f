"""Tests connections from a foreign host on the network to everything that a job listens on.

The jobs run without CAP_NET_ADMIN, like those of ordinary users, so the kernel gives them no packet
filters. ``every_transport.py`` has jobs with packet filters.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from captures import captured
from intruders import check_intruders, own_listeners
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

HOSTS, INTRUDER_HOST = ("n1", "n2"), "n3"


@pytest.fixture(scope="module")
def site(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Site:
    site = shared_site(new_lab, tmp_path_factory.mktemp("strangers"), hosts=3)
    drop_capabilities(site.lab, *HOSTS)
    return site


@pytest.fixture(scope="module")
def transport(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Transport:
    """SSH, typed on one of the hosts, which share one run directory."""
    site = site_in(new_lab, tmp_path_factory.mktemp("left"), hosts=3)
    drop_capabilities(site.lab, *HOSTS)
    return Transport(site, ("-H", ",".join(HOSTS)), prefix=WITHOUT_CAPABILITIES)


def events(launch: Launch, kind: str) -> list[Any]:
    path = launch.directory / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def wait_for_event(launch: Launch, kind: str, more_than: int = 0) -> int:
    """Waits for more events of a kind; returns their number."""
    launch.until(lambda: len(events(launch, kind)) > more_than, kind)
    return len(events(launch, kind))


def test_intruder_is_rejected_and_reported(site: Site) -> None:
    address, packets, start_time = (
        site.lab.address(INTRUDER_HOST),
        site.project / "packets",
        time.time(),
    )
    options = ("--nnodes", "2", "--check", "none")
    with (
        captured(site, packets) as end_capture,
        site.start(*options, "steps.py") as launch,
    ):
        wait_for_event(launch, "checkpoint copied")
        assert not site.have_capabilities(*HOSTS)
        os.kill(site.pid("n2", r"\[rank"), signal.SIGKILL)
        launch.until(lambda: "back after" in launch.err, "rank 1 is back")
        copied = len(events(launch, "checkpoint copied"))
        interrupted = events(launch, "checkpoint copy failed")  # a copy to the killed rank
        end_capture()
        # the store, gloo, and the receivers of checkpoints
        assert len(check_intruders(site, INTRUDER_HOST, packets, start_time)) >= 3
        wait_for_event(launch, "checkpoint copied", copied)
        assert events(launch, "checkpoint copy failed") == interrupted
        launch.signal(signal.SIGINT)
        ended = launch.end()
    assert ended.code == 128 + signal.SIGINT, ended.err
    at_store = {event["address"] for event in ended.events("stranger at the store")}
    rejections = {(event["host"], event["address"]) for event in ended.events("stranger refused")}
    assert at_store == {address}
    assert rejections == {("n1", address), ("n2", address)}
    warnings = [line for line in ended.err.splitlines() if address in line]
    assert len(warnings) == 1, ended.err
    assert "refused a connection" in warnings[0]
    assert "is not one of this job's hosts" in warnings[0]


def test_detached_training_rejects_intruder(transport: Transport) -> None:
    site, start_time = transport.site, time.time()
    packets = site.project.parent / "packets"
    with captured(site, packets):
        options = ("--detach", "-p", "1", "image", "--epochs", "1000", "--communication", "int8")
        ended = transport.run(*options, verb="train")
        assert ended.code == 0, ended.err
        metrics = ended.directory / "metrics.jsonl"
        assert eventually(metrics.exists)
    assert not site.have_capabilities(*HOSTS)
    # besides gloo's listeners, that of the supervisor
    assert len(check_intruders(site, INTRUDER_HOST, packets, start_time)) >= 3
    size = metrics.stat().st_size
    assert eventually(lambda: metrics.stat().st_size > size)
    transport.verb("stop", str(ended.directory))
    assert site.leftovers() == ""


def test_warm_hosts_reject_intruder(transport: Transport) -> None:
    site, start_time = transport.site, time.time()
    packets = site.project.parent / "packets"
    with captured(site, packets):
        ended = transport.run("--keep-warm", "5m", "--no-torch", "-p", "1", "tell.py")
    assert ended.code == 0, ended.err
    assert check_intruders(site, INTRUDER_HOST, packets, start_time) == []
    second_run = transport.run("--no-torch", "-p", "1", "tell.py")
    assert second_run.code == 0, second_run.err
    transport.verb("warm", "down")
    assert site.leftovers() == ""


CONNECT = """
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


# takes the place of rank 1 in a group of gloo, which a connection begins with its number
PRETEND = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), 60) as connection:
    connection.sendall((1).to_bytes(8, "little"))
    print("connected", flush=True)
    while connection.recv(4096):
        pass
"""


def test_user_of_job_host_cannot_replace_rank_in_gloo_group(site: Site) -> None:
    def gloo_port() -> str:
        own = f"{site.lab.address('n1')}:"
        listeners = own_listeners(site, "n1").items()
        return next((at for at, line in listeners if at.startswith(own) and "[rank" in line), "")

    with site.start("--nnodes", "2", "awaited.py") as launch:
        launch.until(lambda: gloo_port() != "", "rank 0 listens")
        address, port = gloo_port().rsplit(":", 1)
        argv = [sys.executable, "-c", PRETEND, address, port]
        with site.lab.popen("n2", argv, stdout=subprocess.PIPE, text=True) as impostor:
            assert impostor.stdout is not None
            assert impostor.stdout.readline() == "connected\n"
            (site.project / "go").touch()
            ended = launch.end()
    assert ended.code == 1, ended.err
    stranger = f"gloo has a connection with {site.lab.address('n2')}, which"
    assert stranger in ended.err
    assert "sum" not in ended.out


def test_store_gateway_rejects_intruder_and_serves_ranks(site: Site) -> None:
    """Rank 1 acts as another user of its host, whose connections the kernel accepts."""
    gateway = [site.lab.address("n1"), "29531"]
    args = ("--nnodes", "2", "--master-port", gateway[1], "meet.py", *gateway)
    packets, start_time = site.project / "packets", time.time()
    with captured(site, packets) as end_capture, site.start(*args) as launch:
        launch.until(lambda: len([*site.project.glob("met-*")]) == 2, "both have met")
        end_capture()
        assert not site.have_capabilities(*HOSTS)
        for host in HOSTS:
            listening = [at for at in site.lab.listeners(host) if at.endswith(":" + gateway[1])]
            gateway_sockets = {"n1": {":".join(gateway), f"127.0.0.2:{gateway[1]}"}, "n2": set()}[
                host
            ]
            assert set(listening) == {f"127.0.0.1:{gateway[1]}", *gateway_sockets}
        argv = [sys.executable, "-c", CONNECT, *gateway]
        replies = {host: site.lab.exec(host, argv, timeout=60, check=True) for host in ("n2", "n3")}
        assert replies["n2"].stdout == "32\n"  # a challenge, which the client cannot answer
        assert replies["n3"].stdout == "closed\n"
        # the proxy to the store, and gloo on each host
        assert len(check_intruders(site, INTRUDER_HOST, packets, start_time)) >= 3
        (site.project / "enough").touch()
        ended = launch.end()
    assert ended.code == 0, ended.err
    for rank in (0, 1):
        assert ended.lines(rank) == [f"{rank}: 2 at 127.0.0.1 port {gateway[1]}"] * 2


def test_open_store_uses_host_address(site: Site) -> None:
    ended = site.run("--nnodes", "2", "--no-torch", "--env", "PACELINE_STORE=open", "tell.py")
    assert ended.code == 0, ended.err
    assert ended.said(1)["place"]["MASTER_ADDR"] == site.lab.address("n1")
    assert ended.json("plan.json")["store"] == "agent"
