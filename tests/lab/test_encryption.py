"""Tests ``--encrypt``: what a network capture shows, and who can connect, also after a recovery."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

import pytest
from captures import MARKS, captured, readable
from intruders import check_intruders
from launches import Site, drop_capabilities, eventually, shared_site

pytestmark = pytest.mark.lab

INTRUDER_HOST = "n3"


@pytest.fixture(scope="module")
def site(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Site:
    site = shared_site(new_lab, tmp_path_factory.mktemp("encryption"), hosts=3)
    drop_capabilities(site.lab, "n1")  # n2 keeps its packet filters
    return site


def test_traffic_is_readable_without_encryption(site: Site) -> None:
    with captured(site, site.project / "packets"):
        ended = site.run("--nnodes", "2", "--check", "none", "marked.py", "30")
    assert ended.code == 0, ended.err
    assert readable(site.project / "packets") == set(MARKS)


@pytest.mark.parametrize("options", [(), ("--encrypt",)])
def test_encrypt_hides_traffic_of_spawned_processes(site: Site, options: tuple[str, ...]) -> None:
    packets = site.project / "packets"
    with captured(site, packets):
        ended = site.run("--nnodes", "2", "--check", "none", *options, "spawned.py", "eth0")
    assert ended.code == 0, ended.err
    message = "from a spawned process"
    assert ended.out.count(repr(message)) == 2
    assert (message.encode() in packets.read_bytes()) != bool(options)


def test_encrypt_hides_traffic_rejects_intruders_and_recovers(site: Site) -> None:
    options = ("--encrypt", "--nnodes", "2", "--check", "none")
    packets, start_time = site.project / "packets", time.time()
    with (
        captured(site, packets),
        site.start(*options, "marked.py", "100000") as launch,
    ):

        def events(kind: str) -> list[Any]:
            path = launch.directory / "events.jsonl"
            lines = path.read_text().splitlines() if path.exists() else []
            return [event for event in map(json.loads, lines) if event["event"] == kind]

        launch.until(lambda: bool(events("checkpoint copied")), "a checkpoint has been copied")
        assert (site.have_capabilities("n1"), site.have_capabilities("n2")) == (False, True)
        os.kill(site.pid("n2", r"\[rank 1 of 2"), signal.SIGKILL)
        launch.until(lambda: "back after" in launch.err, "rank 1 is back")
        # the proxy of each host, and the proxy to the store
        assert len(check_intruders(site, INTRUDER_HOST, packets, start_time)) == 3
        copied = len(events("checkpoint copied"))
        launch.until(lambda: len(events("checkpoint copied")) > copied, "another has been copied")
        launch.signal(signal.SIGINT)
        ended = launch.end()
    assert ended.code == 128 + signal.SIGINT, ended.err
    reporting_hosts = {event["host"] for event in ended.events("stranger at the tunnels")}
    assert reporting_hosts == {"n1", "n2"}
    assert readable(packets) == set()
    assert eventually(lambda: not any(site.processes().values()))
