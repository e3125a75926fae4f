"""A host of the network that is none of the job's calls at everything that listens in it."""

from __future__ import annotations

import json
import signal
import sys
from typing import Any

import pytest
from launches import Launch, Site, shared_site

pytestmark = pytest.mark.lab

STRANGER = "n3"


@pytest.fixture(scope="module")
def site(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Site:
    return shared_site(new_lab, tmp_path_factory.mktemp("strangers"), hosts=3)


def events(launch: Launch, kind: str) -> list[Any]:
    path = launch.directory / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [one for one in map(json.loads, lines) if one["event"] == kind]


def until(launch: Launch, kind: str, more_than: int = 0) -> int:
    """Waits for more events of a kind; how many there are."""
    launch.until(lambda: len(events(launch, kind)) > more_than, kind)
    return len(events(launch, kind))


def besieged(site: Site) -> dict[str, int]:
    """How many connections a stranger keeps to each port of the job that is not on loopback."""
    places = [place for host in ("n1", "n2") for place in site.lab.listeners(host)]
    outside = [place for place in places if not place.startswith(("127.", "[::1]"))]
    argv = [sys.executable, "besiege.py", *outside]
    done = site.lab.exec(STRANGER, argv, cwd=site.project, timeout=100, check=True)
    return dict(json.loads(done.stdout))


def test_a_stranger_gets_in_nowhere_is_named_and_delays_nobody(site: Site) -> None:
    address = site.lab.address(STRANGER)
    with site.start("--nnodes", "2", "--check", "none", "steps.py") as launch:
        copied = until(launch, "checkpoint copied")
        held = besieged(site)
        assert len(held) >= 3  # the store, gloo, and what takes checkpoints
        assert set(held.values()) == {0}
        until(launch, "checkpoint copied", copied)
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
    assert not ended.events("checkpoint copy failed")
