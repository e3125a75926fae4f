"""Lines between hosts that let nothing through: what shows them, and what does not."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from agents import agent_in_thread
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

SILENT = {"ok": False, "errno": errno.ETIMEDOUT}
HEARD = {"ok": True}
# n2 is 10.77.0.12: a connection that it does not answer, one that it answers, one whose window is
# full, a call, a connection that is over, and one of IPv6 that is mapped
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


def test_the_kernels_table_shows_what_has_no_answer() -> None:
    assert unacked_connections(rows(TABLE)) == [["10.77.0.12", 4711, 4], ["10.77.0.13", 4714, 2]]
    assert unacked_connections(rows(MAPPED)) == [["10.77.0.12", 99, 3]]
    assert unacked_connections([]) == []


def test_only_the_jobs_own_sockets_count() -> None:
    with socket.socket() as one:
        number = os.fstat(one.fileno()).st_ino
        assert number in sockets_of([os.getpid()])
    assert number not in sockets_of([os.getpid(), 1 << 30])


def test_a_line_is_tried_once_a_connection_had_no_answer_for_some_seconds() -> None:
    silences = UnansweredLinks()
    for times, now in enumerate((0.0, 1.0, 2.0), 1):
        silences.update([Unanswered("n2", "n1", 7, times)], now)
        assert silences.overdue(now) == []
    assert silences.overdue(UNANSWERED_S) == [("n1", "n2")]
    silences.forget()
    assert not silences


@pytest.mark.parametrize(("between", "since"), [
    ([], UNANSWERED_S),  # all was answered
    ([Unanswered("n1", "n2", 7, 1)], 1.0),  # it was answered, and something else was lost
    ([Unanswered("n1", "n2", 8, 9)], UNANSWERED_S),  # another connection
])  # fmt: skip
def test_lost_packets_are_no_deaf_line(between: list[Unanswered], since: float) -> None:
    silences, last = UnansweredLinks(), Unanswered("n1", "n2", 7, 5)
    silences.update([Unanswered("n1", "n2", 7, 2)], 0.0)
    silences.update(between, 1.0)
    silences.update([last], UNANSWERED_S)
    assert silences.overdue(UNANSWERED_S) == []
    assert silences.overdue(since + UNANSWERED_S) == [("n1", "n2")]
    assert silences.overdue(since + UNANSWERED_S - 0.1) == []


def test_a_line_is_deaf_when_neither_of_its_hosts_has_an_answer() -> None:
    host_pair, there, back = ("n1", "n2"), ("n1", "n2"), ("n2", "n1")
    assert is_blocked(host_pair, {there: SILENT, back: SILENT})
    assert is_blocked(host_pair, {there: SILENT, back: {"ok": False, "errno": errno.EHOSTUNREACH}})
    for answer in (HEARD, {"ok": False, "errno": errno.ECONNREFUSED}, {"ok": False}):
        assert not is_blocked(host_pair, {there: SILENT, back: answer})
    assert not is_blocked(host_pair, {there: SILENT})  # the other could not be asked
    assert not is_blocked(host_pair, {})


def test_all_deaf_lines_are_named() -> None:
    assert describe_pairs([("n1", "n2")]).startswith(
        "n1 and n2 cannot reach each other: what one sends"
    )
    many = describe_pairs([("n1", f"n{at}") for at in range(2, 8)])
    assert many.startswith("n1 and n2, n1 and n3, n1 and n4, 3 more pairs of hosts cannot reach")


class Host:
    """An agent that answers as told, and what it was asked."""

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
        assert [one["address"] for one in fields["targets"]] == [
            self.job.addresses[one["host"]] for one in fields["targets"]
        ]
        return {"results": [{"host": one["host"], **self.job.answer} for one in fields["targets"]]}


class Job:
    """Three hosts, and how long they have been silent."""

    def __init__(self, silent: dict[str, str], answer: Mapping[str, Any] = SILENT,
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
        over = asyncio.Event()

        def told(found: list[links.HostPair], _: float) -> None:
            self.told.append(found)
            over.set()

        watch = LinkWatch(fleet, lambda: self.addresses, self.host_at, self.silent_s, told)
        watching = asyncio.ensure_future(watch.run())
        while not over.is_set() and self.asked.count("unanswered") < 3 * looks and looks:
            await asyncio.sleep(0)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look follows the other at once."""
    monkeypatch.setattr(links, "POLL_S", 0.0)
    monkeypatch.setattr(links, "MAX_POLL_S", 0.0)
    monkeypatch.setattr(links, "UNANSWERED_S", 0.0)


@pytest.mark.usefixtures("quick")
def test_a_deaf_line_is_told_and_only_its_hosts_call_each_other() -> None:
    job = Job({"n2": "10.0.0.1"})
    asyncio.run(job.watch(99))
    assert job.told == [[("n1", "n2")]]
    assert job.asked.count("hear") == job.asked.count("connect") == 2


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("job", [
    Job({}),  # everything is answered
    Job({"n2": "192.168.0.9"}),  # by nobody of the job
    Job({"n2": "10.0.0.1"}, HEARD),  # a connection that something on the way has forgotten
    Job({"n2": "10.0.0.1"}, seconds=9.0, grows=-0.01),  # a step was made meanwhile
])  # fmt: skip
def test_what_is_no_deaf_line_is_not_told(job: Job) -> None:
    asyncio.run(job.watch(20))
    assert job.told == []
    assert ("connect" in job.asked) == ("10.0.0.1" in job.silent.values())


@pytest.mark.usefixtures("quick")
def test_a_job_that_goes_on_is_asked_nothing() -> None:
    job = Job({"n2": "10.0.0.1"}, seconds=1.0, grows=0.0)

    async def some_looks() -> None:
        watching = asyncio.ensure_future(job.watch(99))
        for _ in range(100):
            await asyncio.sleep(0)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    asyncio.run(some_looks())
    assert job.asked == []


def test_an_agent_hears_a_call_for_a_while_and_no_longer() -> None:
    """It answers as itself, and nothing of its own job is without an answer."""

    async def scene() -> None:
        async with agent_in_thread() as served:
            ear = await served.ask("hear", address="127.0.0.1", seconds=3.0)
            target = {"host": "n2", "address": "127.0.0.1", "port": ear["port"],
                      "identity": served.agent.identity.hex()}  # fmt: skip

            async def call() -> Any:
                asked = {"targets": [target], "timeout_s": CALL_S, "settle_s": CALL_S}
                (result,) = (await served.ask("connect", **asked))["results"]
                return result

            assert (await call())["ok"]
            while (found := await call())["ok"]:
                await asyncio.sleep(0.05)
            assert found["errno"] in (errno.ECONNREFUSED, errno.ECONNRESET)
            assert (await served.ask("unanswered"))["connections"] == []

    asyncio.run(scene())
