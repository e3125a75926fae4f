"""Tests the detection of blocked links between hosts."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.agent.supervision.processes import sockets_of
from paceline.agent.surveys.retransmissions import unacked_connections
from paceline.launch.health import links
from paceline.launch.health.links import (
    CALL_S,
    UNANSWERED_S,
    LinkWatch,
    Unanswered,
    UnansweredLinks,
    describe_pairs,
    is_blocked,
)
from real_agents import agent_in_thread

TIMED_OUT = {"ok": False, "errno": errno.ETIMEDOUT}
ANSWERED = {"ok": True}
# n2 is 10.77.0.12. Connections: unanswered, answered, with a full window, being opened, closed,
# and an IPv4-mapped IPv6 one.
TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0B004D0A:7149 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 582 1 x
   1: 0B004D0A:A0F4 0C004D0A:8B3F 01 00000040:00000000 01:0000001A 00000004     0        0 4711 2 x
   2: 0B004D0A:A0F6 0C004D0A:8B3F 01 00000040:00000000 01:00000013 00000000     0        0 4712 2 x
   3: 0B004D0A:A0F8 0C004D0A:8B3F 01 00000040:00000000 04:00000013 00000000     0        5 4713 2 x
   4: 0B004D0A:A0FA 0D004D0A:8B3F 02 00000001:00000000 01:00000200 00000002     0        0 4714 2 x
   5: 0B004D0A:A0FC 0C004D0A:8B3F 04 00000001:00000000 01:00000200 00000006     0        0 0 2 x
"""
MAPPED = """\
  sl  local_address                         remote_address                        st tx_queue rx_q
   0: 0000000000000000FFFF00000B004D0A:A0F4 0000000000000000FFFF00000C004D0A:8B3F 01 \
00000040:00000000 01:0000001A 00000003     0        0 99 2 x
"""


def rows(table: str) -> list[list[str]]:
    return [line.split() for line in table.splitlines()[1:]]


def test_finds_unacked_connections_in_proc_table() -> None:
    assert unacked_connections(rows(TABLE)) == [["10.77.0.12", 4711, 4], ["10.77.0.13", 4714, 2]]
    assert unacked_connections(rows(MAPPED)) == [["10.77.0.12", 99, 3]]
    assert unacked_connections([]) == []


def test_sockets_of_lists_process_sockets() -> None:
    with socket.socket() as endpoint:
        number = os.fstat(endpoint.fileno()).st_ino
        assert number in sockets_of([os.getpid()])
    assert number not in sockets_of([os.getpid(), 1 << 30])


def test_link_is_overdue_after_unanswered_timeout() -> None:
    unanswered_links = UnansweredLinks()
    for times, now in enumerate((0.0, 1.0, 2.0), 1):
        unanswered_links.update([Unanswered("n2", "n1", 7, times)], now)
        assert unanswered_links.overdue(now) == []
    assert unanswered_links.overdue(UNANSWERED_S) == [("n1", "n2")]
    unanswered_links.forget()
    assert not unanswered_links


@pytest.mark.parametrize(("between", "since"), [
    ([], UNANSWERED_S),  # all data was acknowledged
    ([Unanswered("n1", "n2", 7, 1)], 1.0),  # acknowledged, then other data was lost
    ([Unanswered("n1", "n2", 8, 9)], UNANSWERED_S),  # another connection
])  # fmt: skip
def test_lost_packets_restart_unanswered_timeout(between: list[Unanswered], since: float) -> None:
    unanswered_links, last = UnansweredLinks(), Unanswered("n1", "n2", 7, 5)
    unanswered_links.update([Unanswered("n1", "n2", 7, 2)], 0.0)
    unanswered_links.update(between, 1.0)
    unanswered_links.update([last], UNANSWERED_S)
    assert unanswered_links.overdue(UNANSWERED_S) == []
    assert unanswered_links.overdue(since + UNANSWERED_S) == [("n1", "n2")]
    assert unanswered_links.overdue(since + UNANSWERED_S - 0.1) == []


def test_link_is_blocked_if_neither_direction_answers() -> None:
    host_pair, forward, backward = ("n1", "n2"), ("n1", "n2"), ("n2", "n1")
    assert is_blocked(host_pair, {forward: TIMED_OUT, backward: TIMED_OUT})
    assert is_blocked(
        host_pair, {forward: TIMED_OUT, backward: {"ok": False, "errno": errno.EHOSTUNREACH}}
    )
    for answer in (ANSWERED, {"ok": False, "errno": errno.ECONNREFUSED}, {"ok": False}):
        assert not is_blocked(host_pair, {forward: TIMED_OUT, backward: answer})
    assert not is_blocked(host_pair, {forward: TIMED_OUT})  # the other host did not report
    assert not is_blocked(host_pair, {})


def test_describe_pairs_names_blocked_links() -> None:
    assert describe_pairs([("n1", "n2")]).startswith(
        "n1 and n2 cannot reach each other: what one sends"
    )
    description = describe_pairs([("n1", f"n{at}") for at in range(2, 8)])
    assert description.startswith(
        "n1 and n2, n1 and n3, n1 and n4, 3 more pairs of hosts cannot reach"
    )


class Host:
    """Stands in for an agent: gives the answers of the job, and records the requests."""

    def __init__(self, name: str, job: Job) -> None:
        self.name, self.job, self.running, self.lost = name, job, True, False
        self.channel = self
        self.identity = name

    async def request(self, op: str, **fields: Any) -> Mapping[str, Any]:
        self.job.asked.append(op)
        if op == "unanswered":
            peer = self.job.silent.get(self.name)
            return {"connections": [[peer, 7, self.job.times()]] if peer else []}
        if op == "hear":
            return {"port": 5}
        assert fields["timeout_s"] == CALL_S
        assert [endpoint["address"] for endpoint in fields["targets"]] == [
            self.job.addresses[endpoint["host"]] for endpoint in fields["targets"]
        ]
        return {
            "results": [
                {"host": endpoint["host"], **self.job.answer} for endpoint in fields["targets"]
            ]
        }


class Job:
    """Stands in for a job on three hosts whose ranks have made no progress for some seconds."""

    def __init__(self, silent: dict[str, str], answer: Mapping[str, Any] = TIMED_OUT,
                 seconds: float = 2.0, grows: float = 1.0) -> None:  # fmt: skip
        self.addresses = {name: f"10.0.0.{name[1]}" for name in ("n1", "n2", "n3")}
        self.silent, self.answer = silent, answer
        self.seconds, self.grows = seconds, grows
        self.asked: list[str] = []
        self.told: list[list[links.HostPair]] = []
        self.sent = 0

    def times(self) -> int:
        self.sent += 1
        return self.sent

    def host_at(self, address: str) -> str:
        return next((h for h, a in self.addresses.items() if a == address), "")

    def silent_s(self) -> float:
        self.seconds += self.grows
        return self.seconds

    async def watch(self, looks: int) -> None:
        fleet: Any = SimpleNamespace(nodes=[Host(name, self) for name in self.addresses])
        finished = asyncio.Event()

        def on_blocked(found: list[links.HostPair], _: float) -> None:
            self.told.append(found)
            finished.set()

        watch = LinkWatch(fleet, lambda: self.addresses, self.host_at, self.silent_s, on_blocked)
        watching = asyncio.ensure_future(watch.run())
        while not finished.is_set() and self.asked.count("unanswered") < 3 * looks and looks:
            await asyncio.sleep(0)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


@pytest.fixture
def fast_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the delays between inspections."""
    monkeypatch.setattr(links, "POLL_S", 0.0)
    monkeypatch.setattr(links, "MAX_POLL_S", 0.0)
    monkeypatch.setattr(links, "UNANSWERED_S", 0.0)


@pytest.mark.usefixtures("fast_polling")
def test_reports_blocked_link_and_probes_only_its_hosts() -> None:
    job = Job({"n2": "10.0.0.1"})
    asyncio.run(job.watch(99))
    assert job.told == [[("n1", "n2")]]
    assert job.asked.count("hear") == job.asked.count("connect") == 2


@pytest.mark.usefixtures("fast_polling")
@pytest.mark.parametrize("job", [
    Job({}),  # no unacknowledged data
    Job({"n2": "192.168.0.9"}),  # peer is not in the job
    Job({"n2": "10.0.0.1"}, ANSWERED),  # only this connection is broken
    Job({"n2": "10.0.0.1"}, seconds=9.0, grows=-0.01),  # progress was made meanwhile
])  # fmt: skip
def test_reports_no_working_link(job: Job) -> None:
    asyncio.run(job.watch(20))
    assert job.told == []
    assert ("connect" in job.asked) == ("10.0.0.1" in job.silent.values())


@pytest.mark.usefixtures("fast_polling")
def test_no_requests_while_job_makes_progress() -> None:
    job = Job({"n2": "10.0.0.1"}, seconds=1.0, grows=0.0)

    async def poll_repeatedly() -> None:
        watching = asyncio.ensure_future(job.watch(99))
        for _ in range(100):
            await asyncio.sleep(0)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    asyncio.run(poll_repeatedly())
    assert job.asked == []


def test_agent_accepts_probes_for_limited_time() -> None:
    """The agent identifies itself, and the probe leaves no unanswered connection of the job."""

    async def scene() -> None:
        async with agent_in_thread() as served:
            listener = await served.ask("hear", address="127.0.0.1", seconds=3.0)
            target = {"host": "n2", "address": "127.0.0.1", "port": listener["port"],
                      "identity": served.agent.identity.hex()}  # fmt: skip

            async def call() -> Any:
                probe = {"targets": [target], "timeout_s": CALL_S, "settle_s": CALL_S}
                (result,) = (await served.ask("connect", **probe))["results"]
                return result

            assert (await call())["ok"]
            while (found := await call())["ok"]:
                await asyncio.sleep(0.05)
            assert found["errno"] in (errno.ECONNREFUSED, errno.ECONNRESET)
            assert (await served.ask("unanswered"))["connections"] == []

    asyncio.run(scene())
