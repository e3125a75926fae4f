"""The fleet: whose silence it is, why a connection ended, and what a lost node means."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from paceline.launch import restart
from paceline.launch.fleet import Fleet, Node, Silence, together, why_ended
from paceline.remote import fanout
from paceline.remote.openssh import SshOptions
from paceline.spec.errors import ConnectError, NodeError
from paceline.spec.events import Event
from paceline.spec.failure import Failure
from paceline.spec.hosts import Host
from paceline.spec.job import Entry, Job
from paceline.spec.settings import Setting


class Agent:
    """Stands in for a channel: answers renewals until it is told to be silent."""

    def __init__(self, name: str) -> None:
        self.host = Host(name)
        self.on_event: Any = None
        self.facts: dict[str, Any] = {}
        self.last_heard = 0.0
        self.silent = False
        self.asked: list[str] = []
        self.abandoned = False

    async def request(self, op: str, **_: Any) -> dict[str, Any]:
        self.asked.append(op)
        if self.silent:
            await asyncio.sleep(60)
        if op == "refuse":
            raise NodeError("no")
        self.last_heard = asyncio.get_running_loop().time()
        return {"monotonic": 0.0, "quiet_s": 3.5, "frozen": {"1": 2.0}}

    def leased(self) -> None:
        pass

    def abandon(self) -> None:
        self.abandoned = True

    async def close(self, patience_s: float) -> None:
        pass


def fleet_of(*agents: Agent, lease_s: float = 1.0) -> tuple[Fleet, list[str], list[str]]:
    events: list[str] = []
    losses: list[str] = []
    fleet = Fleet(
        list(agents), lease_s,  # type: ignore[arg-type]
        lambda node, event: events.append(f"{node.name} {event.kind}"),
        lambda node, why: losses.append(why),
    )  # fmt: skip
    return fleet, events, losses


def test_renews_leases_and_hears_of_the_ranks() -> None:
    async def scene() -> tuple[Node, Agent, list[str]]:
        agent = Agent("n1")
        fleet, events, _ = fleet_of(agent)
        agent.on_event(Event("rank started", "n1"))
        await asyncio.sleep(0.25)
        await fleet.close()
        return fleet.first, agent, events

    node, agent, events = asyncio.run(scene())
    assert agent.asked.count("lease") >= 2
    assert agent.asked[-1] == "bye"
    assert (node.quiet_s, node.frozen) == (3.5, {1: 2.0})
    assert events == ["n1 rank started"]


def test_a_silent_node_is_lost_once_and_only_that_one() -> None:
    async def scene() -> tuple[Fleet, list[str]]:
        silent, well = Agent("n1"), Agent("n2")
        fleet, _, losses = fleet_of(silent, well)
        silent.silent = True
        for _ in range(400):  # on a busy machine it takes longer
            await asyncio.sleep(0.05)
            if losses:
                break
        silent.on_event(Event("connection ended", "n1", fields={"stderr": "", "trouble": ""}))
        await fleet.close()
        return fleet, losses

    fleet, losses = asyncio.run(scene())
    assert len(losses) == 1
    assert losses[0].startswith("no word from n1 for")
    assert [node.lost for node in fleet.nodes] == [True, False]
    assert not fleet.whole


def test_our_own_absence_is_nobodys_silence() -> None:
    import time

    async def scene() -> tuple[Fleet, list[str]]:
        fleet, _, losses = fleet_of(Agent("n1"), Agent("n2"))
        await asyncio.sleep(0.3)
        time.sleep(1.5)  # as if this process had been stopped: longer than a lease
        await asyncio.sleep(0.6)
        await fleet.close()
        return fleet, losses

    fleet, losses = asyncio.run(scene())
    assert losses == []
    assert fleet.absence is not None
    assert 1.0 < fleet.absence.seconds < 3.0


def test_telling_minds_neither_refusals_nor_lost_nodes() -> None:
    async def scene() -> Agent:
        gone, left = Agent("n1"), Agent("n2")
        fleet, _, _ = fleet_of(gone, left)
        fleet.lose(fleet.nodes[0], "unplugged")
        await fleet.tell("refuse")
        await fleet.close()
        assert "refuse" not in gone.asked
        assert gone.abandoned
        return left

    assert "refuse" in asyncio.run(scene()).asked


def test_silence_is_counted_while_we_listen() -> None:
    silence = Silence(1.0, now=0.0)
    assert silence.look(1.0, last_heard=0.5) == pytest.approx(0.5)
    assert silence.look(2.0, last_heard=0.5) == pytest.approx(1.5)
    assert silence.look(22.0, last_heard=0.5) == pytest.approx(3.5)  # we were away for 19 s
    assert silence.look(23.0, last_heard=22.9) == pytest.approx(0.1)
    assert silence.look(24.0, last_heard=22.9) == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("stderr", "why"),
    [
        ("", "the connection to n2 ended"),
        (
            "pyenv: cannot rehash\n",
            "the connection to n2 ended (last on its standard error: pyenv: cannot rehash)",
        ),
        (
            "[W socket.cpp] a warning\npaceline guard: the agent was killed by SIGKILL\n",
            "the connection to n2 ended: the agent was killed by SIGKILL",
        ),
        (
            "Connection to 10.77.0.12 closed by remote host.\npyenv: cannot rehash\n",
            "the SSH connection to n2 ended: Connection to 10.77.0.12 closed by remote host.",
        ),
        (
            "client_loop: send disconnect: Broken pipe",
            "the SSH connection to n2 ended: client_loop: send disconnect: Broken pipe",
        ),
        (
            "paceline agent: leaving: the lease of 10 s ran out",
            "the connection to n2 ended: the lease of 10 s ran out",
        ),
    ],
)
def test_only_known_lines_are_a_reason(stderr: str, why: str) -> None:
    assert why_ended("n2", stderr) == why


class Dialling:
    """A transport whose hosts come back at the second try, or never."""

    def __init__(self, comes_back: bool, redials: bool = True) -> None:
        self.redials = redials
        self.tries = 0
        self._comes_back = comes_back

    async def open(self, hosts: Any, pythons: Any) -> list[Any]:
        self.tries += 1
        if self.tries < 2 or not self._comes_back:
            raise ConnectError("cannot log in", found="no answer: n2: timed out")
        return [Agent(host.name) for host in hosts]

    async def close(self, exit_code: int) -> None: ...

    async def why(self, host: Host) -> str:
        return ""


@pytest.mark.parametrize(
    ("transport", "back", "told"),
    [
        (Dialling(comes_back=True), ["n2"], "dialling n2 again, for up to"),
        (Dialling(comes_back=False), [], "n2 did not come back within 3 s: no answer: n2"),
        (Dialling(comes_back=True, redials=False), [], "n2 cannot be joined again"),
    ],
)
def test_lost_hosts_are_dialled_again(transport: Dialling, back: list[str], told: str) -> None:
    entry = Entry("script", "a.py")
    job = Job("a", entry, "/", "python3", lease_s=Setting(0.5))

    async def scene() -> tuple[Fleet, list[str], list[str]]:
        notes: list[str] = []
        fleet, _, _ = fleet_of(Agent("n1"), Agent("n2"), lease_s=0.5)
        fleet.lose(fleet.nodes[1], "unplugged")
        found = await restart.dial_lost(fleet, job, transport, notes.append)
        await fleet.close()
        return fleet, found, notes

    fleet, found, notes = asyncio.run(scene())
    assert found == back
    assert told in "\n".join(notes)
    assert fleet.whole == bool(back)
    assert [node.name for node in fleet.nodes] == ["n1", "n2"]


def test_what_was_opened_is_closed_before_the_event_loop_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C while connecting: closing takes each host another time, and none is cut short."""
    closed: list[str] = []

    async def connect(host: Host, *_: Any) -> Any:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01 if host.name == "n1" else 0.1)
            closed.append(host.name)

    async def scene() -> None:
        hosts = [Host("n1"), Host("n2")]
        for work in (
            fanout.reach_all(hosts, ["python3"] * 2, SshOptions()),
            together([connect(host) for host in hosts]),
        ):
            task = asyncio.ensure_future(work)
            await asyncio.sleep(0.05)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    monkeypatch.setattr(fanout, "connect", connect)
    asyncio.run(scene())
    assert closed == ["n1", "n2"] * 2


@pytest.mark.parametrize(
    ("headline", "free", "told"),
    [
        ("OSError: [Errno 28] No space left on device", 4096, "the disk of /r on n1 is still full"),
        ("OSError: [Errno 28] No space left on device", 1 << 30, ""),
        ("ValueError: boom", 4096, ""),
    ],
)
def test_no_start_again_on_a_disk_that_is_still_full(headline: str, free: int, told: str) -> None:
    class Full(Agent):
        async def request(self, op: str, **fields: Any) -> dict[str, Any]:
            if op == "disk":
                return {"disks": [{"path": "/r", "free": free}]}
            return await super().request(op, **fields)

    async def scene() -> str:
        fleet, _, _ = fleet_of(Full("n1"))
        why = await restart.full_disk(fleet, Failure("exception", "n1", 0, 0.0, headline=headline))
        await fleet.close()
        return why

    why = asyncio.run(scene())
    assert why.startswith(told)
    assert bool(why) == bool(told)
