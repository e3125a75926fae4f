"""The fleet: whose silence it is, why a connection ended, and what a lost node means."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, Mock, call

import pytest

from paceline.launch import failure_analysis
from paceline.launch import recorder as recorder_module
from paceline.launch.elastic import driver as driver_module
from paceline.launch.elastic import recovery as recovery_module
from paceline.launch.elastic.attempt import Attempt
from paceline.launch.elastic.driver import ElasticDriver, full_disk
from paceline.launch.elastic.members import Members
from paceline.launch.elastic.rank_states import Dial, End, Regroup, Wait
from paceline.launch.elastic.recovery import RankCommands, RecoveryController
from paceline.launch.elastic.retry_policy import (
    MAX_HOST_LOSSES,
    MAX_STARTS,
    RetryPolicy,
    StartupTracker,
)
from paceline.launch.launcher import Launcher
from paceline.launch.nodes import connect as connect_module
from paceline.launch.nodes import fleet as fleet_module
from paceline.launch.nodes.connect import Reconnector
from paceline.launch.nodes.fleet import (
    Fleet,
    ForkServerError,
    Node,
    Silence,
    describe_end,
    describe_silence,
)
from paceline.launch.nodes.provisioner import fork_servers_up
from paceline.launch.nodes.survey import choose_networks
from paceline.launch.planning.placement import HostSurvey, Supplies
from paceline.launch.planning.request import Request
from paceline.launch.terminal.run_state import NodeWait
from paceline.remote import fanout
from paceline.remote.fanout import gather_all
from paceline.remote.network import LOOPBACK
from paceline.remote.openssh import SshOptions
from paceline.spec.errors import ConnectError, NodeError, PermanentConnectError
from paceline.spec.events import Event
from paceline.spec.failure import Failure, Result
from paceline.spec.hosts import Host
from paceline.spec.job import Entry, Job, parse_node_count
from paceline.spec.settings import Setting, Source

ENTRY = Entry("script", "a.py")


class Agent:
    """Stands in for a channel: answers renewals until it is told to be silent."""

    def __init__(self, name: str) -> None:
        self.host = Host(name)
        self.on_event: Any = None
        self.facts: dict[str, Any] = {}
        self.received_at = 0.0
        self.silent = False
        self.asked: list[str] = []
        self.abandoned = False
        self.looked = 0
        self.is_broken = False
        self.warm_slot = None

    async def request(self, op: str, **_: Any) -> dict[str, Any]:
        self.asked.append(op)
        if self.silent:
            await asyncio.sleep(60)
        if op == "refuse":
            raise NodeError("no")
        self.received_at = asyncio.get_running_loop().time()
        return {"monotonic": 0.0, "quiet_s": 3.5}

    def stop_watching(self) -> None:
        pass

    def reconnect(self) -> None:
        self.looked += 1

    def abandon(self) -> None:
        self.abandoned = True

    async def close(self, timeout_s: float = 0.0) -> None:
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
    assert node.active_at == node.offset - 3.5
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
    assert losses[0].startswith("silent for")
    assert [node.lost for node in fleet.nodes] == [True, False]
    assert not fleet.is_complete


def test_a_connection_that_ended_is_not_told_as_a_host_without_power() -> None:
    assert describe_silence("n1", 6.6, broken=True).startswith(
        "the connection to n1 ended, and no other"
    )
    assert describe_silence("n1", 6.6, broken=False).startswith("silent for 6.6 s")


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
    assert fleet.absence_s > 1.0


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
    silence = Silence(1.0, timestamp=0.0)

    def look(now: float, last_heard: float) -> float:
        silence.update(now, last_heard)
        return silence.seconds

    assert look(1.0, last_heard=0.5) == pytest.approx(0.5)
    assert look(2.0, last_heard=0.5) == pytest.approx(1.5)
    assert look(22.0, last_heard=0.5) == pytest.approx(3.5)  # we were away for 19 s
    assert look(23.0, last_heard=22.9) == pytest.approx(0.1)
    assert look(24.0, last_heard=22.9) == pytest.approx(1.1)


def test_a_silence_of_all_is_of_the_line_that_leads_to_all() -> None:
    silence = Silence(0.25, timestamp=0.0)

    def alone_after(seconds: float, others: bool) -> bool:
        end = now[0] + seconds
        while now[0] < end:
            now[0] += 0.25
            silence.update(now[0], received_at=0.0, hears_peers=others)
        return silence.is_exclusive

    now = [0.0]
    assert not alone_after(4.0, others=False)
    assert not alone_after(3.75, others=True)  # what was sent in vain may only be sent again then
    assert alone_after(0.5, others=True)
    silence.update(9.0, received_at=8.9, hears_peers=False)
    assert silence.seconds == silence.shared_s == pytest.approx(0.1)


def test_nobody_is_left_out_while_our_own_line_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "SILENCE_TIMEOUT_S", 0.4)
    monkeypatch.setattr(fleet_module, "PEER_RECENCY_S", 0.2)

    async def scene() -> tuple[list[bool], dict[str, float]]:
        agents = [Agent("n1"), Agent("n2"), Agent("n3")]
        fleet, _, losses = fleet_of(*agents, lease_s=60.0)
        fleet.watchful = True
        await asyncio.sleep(0.1)
        for agent in agents:
            agent.silent = True
        await asyncio.sleep(1.2)
        at_once = [node.lost for node in fleet.nodes]
        fleet.lease_s = 1.0
        while len(losses) < 3:
            await asyncio.sleep(0.05)
        await fleet.close()
        return at_once, fleet.common_silences

    at_once, cut_off = asyncio.run(scene())
    assert at_once == [False, False, False]
    assert sorted(cut_off) == ["n1", "n2", "n3"]
    lost = [Failure("lost", host, None, 1.0, headline="no word") for host in cut_off]
    own = Failure("exception", "n1", 0, 0.5, headline="its own")
    first, second = failure_analysis.attribute_network_loss([own, *lost], cut_off, 10.0)
    assert (first.kind, second) == ("launcher", own)
    assert failure_analysis.attribute_network_loss([own, *lost], {}, 10.0) == [own, *lost]


@pytest.mark.parametrize("at_a_loss", [False, True])
def test_a_way_that_broke_counts_sooner_where_ranks_have_lost_somebody(
    monkeypatch: pytest.MonkeyPatch, at_a_loss: bool
) -> None:
    """Else it is dialled again for longer: sshd may just have started anew."""
    monkeypatch.setattr(fleet_module, "SILENCE_TIMEOUT_S", 0.4)
    monkeypatch.setattr(fleet_module, "PEER_RECENCY_S", 0.2)

    async def scene() -> list[bool]:
        agents = [Agent("n1"), Agent("n2")]
        fleet, _, losses = fleet_of(*agents, lease_s=8.0)
        fleet.watchful, fleet.awaits_loss = True, at_a_loss
        await asyncio.sleep(0.1)
        agents[1].silent = agents[1].is_broken = True
        for _ in range(400 if at_a_loss else 30):
            await asyncio.sleep(0.05)
            if losses:
                break
        await fleet.close()
        return [node.lost for node in fleet.nodes]

    assert asyncio.run(scene()) == [False, at_a_loss]


def test_the_last_host_that_falls_silent_is_not_our_own_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet_module, "PEER_RECENCY_S", 0.3)

    async def scene() -> tuple[Fleet, dict[str, float]]:
        agents = [Agent("n1"), Agent("n2")]
        fleet, _, losses = fleet_of(*agents, lease_s=2.0)
        await asyncio.sleep(0.1)
        agents[0].silent = True
        await asyncio.sleep(0.9)
        agents[1].silent = True
        while len(losses) < 2:
            await asyncio.sleep(0.05)
        await fleet.close()
        return fleet, fleet.common_silences

    fleet, cut_off = asyncio.run(scene())
    assert cut_off == {}
    assert [fleet.launcher_fault(node) for node in fleet.nodes] == ["", ""]


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
            "paceline agent: leaving: the launcher was silent for 7 s of a lease of 10 s",
            "the connection to n2 ended: the launcher was silent for 7 s of a lease of 10 s",
        ),
    ],
)
def test_only_known_lines_are_a_reason(stderr: str, why: str) -> None:
    assert describe_end("n2", stderr) == why


class Dialling:
    """A transport whose hosts come back at the second try, or never; that may be certain."""

    def __init__(self, comes_back: bool, redials: bool = True, gone: bool = False) -> None:
        self.redials, self.gone = redials, gone
        self.tries = 0
        self._comes_back = comes_back

    async def open(self, hosts: Any, pythons: Any) -> list[Any]:
        self.tries += 1
        if self.gone:
            raise PermanentConnectError("no agent", found="words", brief="the allocation is over")
        if self.tries < 2 or not self._comes_back:
            raise ConnectError("cannot log in", found="no answer: n2: timed out")
        return [Agent(host.name) for host in hosts]

    async def close(self, exit_code: int) -> None: ...

    async def loss_reason(self, host: Host) -> str:
        return ""


def request_for(job: Job, transport: Any, *names: str) -> Request:
    return Request(job, tuple(Host(name) for name in names), transport)


@pytest.mark.parametrize(
    ("transport", "told"),
    [
        (Dialling(comes_back=True), "n2 is back; starting all nodes again, 1 of 1"),
        (Dialling(comes_back=False), "n2 (no answer: n2: timed out) did not come back"),
        (Dialling(comes_back=True, redials=False), "n2 cannot be joined again"),
        (
            Dialling(comes_back=True, gone=True),
            "n2 cannot come back: the allocation is over\n"
            "paceline: 1 node of at least 2, and no other is waited for: not started again",
        ),
    ],
)
def test_lost_hosts_are_dialled_again(transport: Dialling, told: str) -> None:
    job = Job("a", ENTRY, "/", "python3", wait_for_nodes_s=Setting(1.2), max_restarts=Setting(1))

    async def scene() -> tuple[Fleet, bool, list[str]]:
        notes: list[str] = []
        fleet, _, _ = fleet_of(Agent("n1"), Agent("n2"), lease_s=0.5)
        fleet.lose(fleet.nodes[1], "unplugged")
        waits = list[Any]()
        request = request_for(job, transport, "n1", "n2")
        recorder = Mock(set_waiting=waits.append)
        driver, reconnector = driver_of(request, fleet, notes, recorder=recorder)
        lost = Failure("lost", "n2", None, headline="unplugged")
        assert await driver.may_restart(lost, [], 1.0)
        found = await driver.select_nodes()
        dialling = "dialling n2 again, for up to 1.2 s"
        if f"paceline: {dialling}" in notes:
            begun, over = waits
            assert begun.text == f"1 node of at least 2: {dialling}"
            assert begun.until - begun.since == pytest.approx(1.2, abs=0.01)
            assert over is None
        else:
            assert waits == []
        await reconnector.close()
        await fleet.close()
        return fleet, found, notes

    fleet, found, notes = asyncio.run(scene())
    assert told in "\n".join(notes)
    assert found == fleet.is_complete == (told.startswith("n2 is back"))
    assert [node.name for node in fleet.nodes] == ["n1", "n2"]


@pytest.mark.parametrize("kind", ["script", "session", "none"])
def test_a_host_that_is_lost_before_the_first_step(kind: str) -> None:
    """A session goes on without it, a script has it dialled; a written 0 allows neither."""
    notes: list[str] = []
    preload = ("torch", *(["paceline.train?"] if kind == "session" else []))
    restarts_allowed = Setting(0, Source.ARGUMENT if kind == "none" else Source.DEFAULT)
    job = Job("a", ENTRY, "/", "python3", preload=preload, max_restarts=restarts_allowed)

    async def scene() -> tuple[bool, list[str]]:
        fleet, _, _ = fleet_of(Agent("n1"), Agent("n2"), lease_s=0.5)
        transport = Dialling(comes_back=True)
        request = request_for(job, transport, "n1", "n2")
        driver, reconnector = driver_of(request, fleet, notes)
        fleet.lose(fleet.nodes[1], "unplugged")
        lost = Failure("lost", "n2", None, headline="unplugged")
        on = await driver.may_restart(lost, [], 1.0, StartupTracker(job, 2))
        if on:
            assert await driver.select_nodes()
        assert driver.policy.num_restarts == 0
        await reconnector.close()
        await fleet.close()
        return on, [node.name for node in fleet.nodes]

    on, names = asyncio.run(asyncio.wait_for(scene(), 20))
    if kind == "none":
        assert (on, notes) == (False, [])
    elif kind == "session":
        assert names == ["n1"]
        assert notes == ["paceline: n2: unplugged; going on with n1; starting all nodes again,"
                         " before the first step (1 of 2)"]  # fmt: skip
    else:
        assert names == ["n1", "n2"]
        assert notes == [
            "paceline: n2: unplugged", "paceline: dialling n2 again, for up to 30 s",
            "paceline: n2 is back; starting all nodes again, before the first step (1 of 2)",
        ]  # fmt: skip


def test_losses_before_the_first_step_end_at_some_time() -> None:
    notes: list[str] = []
    job = Job("a", ENTRY, "/", "python3")
    killed = Failure("signal", "n1", 0, signal=9, headline="killed by SIGKILL")
    boom = Failure("exception", "n1", 0, headline="ValueError: boom")
    refused = replace(boom, headline="RuntimeError: Connection refused")

    async def scene() -> list[bool]:
        fleet, _, _ = fleet_of(Agent("n1"), Agent("n2"), lease_s=0.5)
        driver, _ = driver_of(request_for(job, Dialling(comes_back=True), "n1"), fleet, notes)
        found = [await driver.may_restart(one, [], 1.0, StartupTracker(job, 2))
                 for one in (boom, refused, killed, killed, killed)]  # fmt: skip
        await fleet.close()
        return found

    found = asyncio.run(asyncio.wait_for(scene(), 20))
    assert found == [False, False, True, True, False]
    assert notes == ["paceline: not started again: 3 starts in a row reached no step"]


@pytest.mark.parametrize(("rejoin", "session", "expansions", "note"), [
    ("now", False, 1, ""),
    ("never", False, 0, "n2 is here, as a spare (--rejoin never)"),
    ("after-save", True, 1, ""),
    ("after-save", False, 0, "n2 is here; it gets ranks after the next checkpoint of rank 0"),
])  # fmt: skip
def test_a_node_that_is_back_interrupts_a_script_when_rejoin_says_so(
    rejoin: Any, session: bool, expansions: int, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    saved = asyncio.Event()

    async def await_checkpoint(*_: object) -> None:
        await saved.wait()

    monkeypatch.setattr(driver_module, "await_checkpoint", await_checkpoint)

    async def scene() -> None:
        fleet, _, _ = fleet_of(Agent("n1"), lease_s=0.5)
        request = request_for(
            elastic("1:2", rejoin=Setting(rejoin)), Dialling(comes_back=True), "n1", "n2"
        )
        driver, _ = driver_of(request, fleet, notes)
        attempt: Any = Mock(recovery=Mock(accepts_newcomers=False, can_recover=False,
                                          use_spare=lambda: False),
                            plan=Mock(nodes=[Mock(workdir="/w")]))  # fmt: skip
        attempt.startup.is_session = session
        driver.attempt = attempt
        driver.on_node_ready(SimpleNamespace(name="n2"))
        driver.on_node_ready(SimpleNamespace(name="n2"))
        await asyncio.sleep(0.05)
        assert attempt.request_expansion.call_count == (2 * expansions)
        saved.set()
        await asyncio.sleep(0.05)
        waited = rejoin == "after-save" and not session
        assert attempt.request_expansion.call_count == (1 if waited else 2 * expansions)
        await fleet.close()

    asyncio.run(asyncio.wait_for(scene(), 20))
    assert note in "".join(notes)


class Starting(Launcher):
    """Loses a host while it gets ready, so many times; what runs then ends well."""

    def __init__(self, losses: int, asked: Setting[int]) -> None:
        job = Job("a", ENTRY, "/", "python3", max_restarts=asked)
        self._request = request_for(job, Dialling(comes_back=True), "n1", "n2")
        self._screen, self._results = Mock(), AsyncMock()
        policy = RetryPolicy(retries_start=self._request.retries_start)
        self.driver = Mock(policy=policy, run=AsyncMock(return_value=Result(0)))
        self.losses, self.connected = losses, list[bool]()

    def _read_supplies(self, delay_s: float = 0.0) -> Any:
        return asyncio.get_running_loop().create_future()

    async def _connect(self, lost: NodeError | None) -> tuple[Fleet, dict[str, str]]:
        self.connected.append(lost is not None)
        return fleet_of(Agent("n1"), Agent("n2"), lease_s=0.5)[0], {}

    def _record_connected(self, *_: Any) -> None: ...

    async def _get_ready(self, fleet: Fleet, reading: Any) -> Any:
        if len(self.connected) <= self.losses:
            fleet.lose(fleet.nodes[1], "unplugged")
            raise ConnectionError("gone")
        return Mock()

    async def _close_fleet(self, fleet: Fleet, interrupts: Any) -> None:
        await fleet.close()


@pytest.mark.parametrize(
    ("losses", "asked", "connected"),
    [
        (0, Setting(0), 1),
        (2, Setting(0), 3),
        (MAX_STARTS, Setting(0), MAX_STARTS),
        (1, Setting(0, Source.ARGUMENT), 1),
    ],
)
def test_a_host_is_lost_before_anything_runs(
    losses: int, asked: Setting[int], connected: int
) -> None:
    launcher = Starting(losses, asked)
    run = launcher._run(Mock(received=[]))
    if connected > losses:
        assert asyncio.run(run).exit_code == 0
    else:
        with pytest.raises(NodeError, match="n2 went away while starting"):
            asyncio.run(run)
    assert launcher.connected == [False, *[True] * (connected - 1)]
    notes = [one.args[0] for one in launcher._screen.note.call_args_list]  # type: ignore[attr-defined]
    assert notes == [
        "paceline: n2 went away while starting (unplugged); starting again, before the first step"
        f" ({number} of 2)" for number in range(1, connected)
    ]  # fmt: skip


def test_a_host_that_is_left_out_is_not_waited_for() -> None:
    notes: list[str] = []

    async def scene() -> bool:
        fleet, _, _ = fleet_of(Agent("n1"), Agent("n2"), lease_s=0.5)
        transport = Dialling(comes_back=True)
        job = Job("a", ENTRY, "/", "python3", max_restarts=Setting(9))
        driver, reconnector = driver_of(request_for(job, transport, "n1", "n2"), fleet, notes)
        for _ in range(MAX_HOST_LOSSES):
            fleet.lose(fleet.nodes[1], "unplugged")
            assert await driver.may_restart(Failure("lost", "n2", None, headline="gone"), [], 1.0)
            found = await driver.select_nodes()
        await reconnector.close()
        await fleet.close()
        return found

    assert not asyncio.run(asyncio.wait_for(scene(), 20))
    assert sum("dialling n2 again" in note for note in notes) == MAX_HOST_LOSSES - 1
    assert notes[-3:] == [
        f"paceline: n2 was lost {MAX_HOST_LOSSES} times: it is left out",
        "paceline: n2: gone",
        "paceline: 1 node of at least 2, and no other is waited for: not started again",
    ]


class Provisioned:
    """Stands in for a provisioner: who comes can start ranks at once."""

    supplies = Supplies()

    async def provision(self, node: Node, fleet: Fleet) -> None:
        node.survey = HostSurvey(node.host, {}, LOOPBACK)
        node.ready = asyncio.get_running_loop().create_future()
        node.ready.set_result(None)


def reconnector_of(request: Request, fleet: Fleet, notes: list[str],
                   came: Any = lambda node: None,
                   provisioner: Any = None) -> Reconnector:  # fmt: skip
    return Reconnector(request, fleet, provisioner or Provisioned(), came, notes.append)


def driver_of(request: Request, fleet: Fleet, notes: list[str], came: Any = lambda node: None,
              recorder: Any = None) -> tuple[ElasticDriver, Reconnector]:  # fmt: skip
    screen: Any = Mock(note=notes.append)
    parts: list[Any] = [
        Provisioned(), Mock(), Mock(align=AsyncMock()), Mock(), screen, recorder or Mock(),
        Mock(), Mock(),
    ]  # fmt: skip
    driver = ElasticDriver(request, *parts)
    driver.fleet = fleet
    driver._reconnector = reconnector = reconnector_of(request, fleet, notes, came)
    return driver, reconnector


def recovery_of(plan: Any, members: Any, fleet: Fleet, reconnector: Any = None, fail: Any = None,
                screen: Any = None) -> RecoveryController:  # fmt: skip
    job = Job("a", ENTRY, "/", "python3")
    return RecoveryController(
        RankCommands(plan, job, fleet, ""), members, fleet,
        reconnector or Mock(redials=False, replace=lambda part, parts: None), fail or Mock(),
        screen or Mock(), Mock(),
    )  # fmt: skip


def elastic(text: str, **more: Any) -> Job:
    return Job("a", ENTRY, "/", "python3", nnodes=Setting(parse_node_count(text)), **more)


def test_a_job_that_can_do_with_fewer_goes_on() -> None:
    """Without a restart that counts; the node that comes back is told of, and taken in."""
    transport, notes = Dialling(comes_back=True), list[str]()

    async def scene() -> None:
        fleet, _, _ = fleet_of(Agent("n1"), Agent("n2"), lease_s=0.5)
        came: list[str] = []
        request = request_for(elastic("1:2"), transport, "n1", "n2")
        driver, reconnector = driver_of(request, fleet, notes, lambda node: came.append(node.name))
        fleet.lose(fleet.nodes[0], "unplugged")
        assert await driver.may_restart(Failure("lost", "n1", None, headline="gone"), [], 1.0)
        assert await driver.select_nodes()
        assert [node.name for node in fleet.nodes] == ["n2"]
        assert driver.policy.num_restarts == 0
        while not came:
            await asyncio.sleep(0.05)
        assert await driver.select_nodes()
        assert [node.name for node in fleet.nodes] == ["n2", "n1"]  # who has the files stays first
        await reconnector.close()
        await fleet.close()

    asyncio.run(asyncio.wait_for(scene(), 10))
    assert "n1: gone; going on with n2; starting all nodes again" in notes[0]
    assert notes[-1] == "paceline: n1 is back; starting all nodes again"


def test_a_node_that_is_brought_back_takes_its_own_place() -> None:
    async def scene() -> None:
        fleet, _, _ = fleet_of(Agent("n1"), Agent("n2"), lease_s=0.5)
        told: list[Node] = []
        request = request_for(elastic("2:2"), Dialling(comes_back=True), "n1", "n2")
        reconnector = reconnector_of(request, fleet, [], told.append)
        lost = fleet.nodes[0]
        fleet.lose(lost, "unplugged")
        await reconnector.reconnect("n1")
        assert fleet.nodes[0] is not lost
        assert (fleet.nodes[0].name, fleet.spares, told) == ("n1", [], [])
        assert fleet.is_complete
        await reconnector.close()
        await fleet.close()

    asyncio.run(asyncio.wait_for(scene(), 10))


def test_who_waits_for_a_node_hears_that_it_cannot_come_back() -> None:
    """A session's ranks then go on without it, or save and stop; at a start nobody is waited for"""
    transport, notes = Dialling(comes_back=False, gone=True), list[str]()

    async def scene() -> None:
        fleet, _, _ = fleet_of(Agent("n1"), Agent("n2"), lease_s=0.5)
        reconnector = reconnector_of(request_for(elastic("1:2"), transport, "n1"), fleet, notes)
        fleet.lose(fleet.nodes[1], "unplugged")
        lost: list[str] = []
        first = SimpleNamespace(host="n2", ranks=[SimpleNamespace(rank=0)])
        plan: Any = SimpleNamespace(
            nodes=[first], master_addr="127.0.0.1", master_port=1, closed_store=False
        )
        members = Mock(decide=list, abandon_host=lost.append)
        await recovery_of(plan, members, fleet, reconnector)._restore_host(Dial("n2"))
        assert lost == ["n2"]
        assert reconnector.dialled == []
        await reconnector.close()
        await fleet.close()

    asyncio.run(asyncio.wait_for(scene(), 10))
    assert notes == ["paceline: n2 cannot come back: the allocation is over"]
    with pytest.raises(ConnectError, match="0 hosts can be reached") as caught:
        gathered(transport, 1, 9999, "n1")
    assert caught.value.found == "n1: the allocation is over"


def test_a_node_that_cannot_be_fitted_out_is_told_of_and_called_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever stood in the way: a node that refuses, a file that is to be sent and has gone."""
    monkeypatch.setattr(connect_module, "PAUSES_S", (0.01,))
    troubles: list[Exception] = [
        NodeError("n2 is full"), FileNotFoundError(2, "No such file", "/p/a.py"), TimeoutError(),
    ]  # fmt: skip
    notes: list[str] = []

    async def provision(node: Node, fleet: Fleet) -> None:
        if troubles:
            raise troubles.pop(0)

    async def scene() -> list[str]:
        fleet, _, _ = fleet_of(Agent("n1"), Agent("n2"), lease_s=0.5)
        transport: Any = Dialling(comes_back=True)
        request = request_for(elastic("2:2"), transport, "n1", "n2")
        reconnector = reconnector_of(request, fleet, notes, provisioner=Mock(provision=provision))
        fleet.lose(fleet.nodes[1], "unplugged")
        await reconnector.reconnect("n2")
        await reconnector.close()
        await fleet.close()
        return [node.name for node in fleet.nodes if not node.lost]

    assert asyncio.run(asyncio.wait_for(scene(), 10)) == ["n1", "n2"]
    assert [note.removeprefix("paceline: n2 cannot take part yet: ") for note in notes] == [
        "n2 is full", "[Errno 2] No such file: '/p/a.py'", "TimeoutError",
    ]  # fmt: skip


def test_a_spare_takes_the_place_of_a_lost_node() -> None:
    transport, notes = Dialling(comes_back=False), list[str]()

    async def scene() -> None:
        fleet, _, _ = fleet_of(Agent("n1"), Agent("n2"), Agent("n3"), lease_s=0.5)
        for node in fleet.nodes:
            node.survey = HostSurvey(node.host, {}, LOOPBACK)
            node.resolve_ready(None)
            node.ready = asyncio.get_running_loop().create_future()
            node.ready.set_result(None)
        fleet.seat(fleet.nodes[:2])
        request = request_for(elastic("2:2"), transport, "n1", "n2", "n3")
        driver, reconnector = driver_of(request, fleet, notes)
        fleet.lose(fleet.nodes[0], "unplugged")
        assert await driver.may_restart(Failure("lost", "n1", None, headline="gone"), [], 1.0)
        assert await driver.select_nodes()
        assert [node.name for node in fleet.nodes] == ["n2", "n3"]
        await reconnector.close()
        await fleet.close()

    asyncio.run(asyncio.wait_for(scene(), 10))
    assert notes == ["paceline: n1: gone; going on with n2, n3; starting all nodes again"]


def test_a_node_that_was_asked_to_end_is_let_go() -> None:
    async def scene() -> Fleet:
        notes: list[str] = []
        fleet, _, _ = fleet_of(Agent("n1"), Agent("n2"), lease_s=0.5)
        transport = Dialling(comes_back=True)
        request = request_for(elastic("1:2"), transport, "n1", "n2")
        driver, reconnector = driver_of(request, fleet, notes)
        asked = Failure("signal", "n2", None, signal=15, headline="asked to end")
        assert await driver.may_restart(asked, [fleet.nodes[1]], 1.0)
        assert await driver.select_nodes()
        await asyncio.sleep(0.2)
        assert not transport.tries  # it is about to go
        await reconnector.close()
        await fleet.close()
        return fleet

    fleet = asyncio.run(scene())
    assert [node.name for node in fleet.nodes] == ["n1"]
    assert "bye" in fleet.former[0].channel.asked  # type: ignore[attr-defined]
    assert fleet.former[0].loss_reason.startswith("asked to end")


def test_a_store_on_a_host_whose_place_was_taken_is_opened_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While the news of it waited: who tells them to the nodes goes on."""
    monkeypatch.setattr(recovery_module, "PAUSE_S", 0.01)
    first = SimpleNamespace(host="n1", ranks=[SimpleNamespace(rank=0)])
    plan: Any = SimpleNamespace(
        nodes=[first], master_addr="127.0.0.1", master_port=1, closed_store=False
    )

    async def scene() -> None:
        fleet, _, _ = fleet_of(Agent("n1"), lease_s=0.5)
        fleet.nodes[0].running = True
        recovery = recovery_of(plan, Members({0: "n1"}), fleet)
        running = asyncio.ensure_future(recovery.run())
        recovery._orders.put_nowait(Regroup(1, (0,), False, "n2"))
        recovery._orders.put_nowait(End("nothing more"))
        channel: Any = fleet.nodes[0].channel
        while "tell_ranks" not in channel.asked:
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await fleet.close()

    asyncio.run(asyncio.wait_for(scene(), 10))


@pytest.mark.parametrize(("in_all", "address"), [(1, "127.0.0.1"), (2, "10.0.0.5")])
def test_one_host_that_no_other_can_join_keeps_to_itself(in_all: int, address: str) -> None:
    """Also where fewer nodes would do: ``-H local --nnodes 1:2``."""
    here = {"address": "10.0.0.5", "family": 4, "prefix": 24, "scope": "global", "usable": True}
    card = {"name": "eth0", "kind": "hardware", "state": "up", "speed": 1000, "addresses": [here]}

    async def scene() -> str:
        agent = Agent("n1")
        agent.facts = {"interfaces": [card]}
        fleet, _, _ = fleet_of(agent, lease_s=5.0)
        found, _ = await choose_networks(fleet, elastic("1:2"), in_all)
        await fleet.close()
        return found["n1"].address

    assert asyncio.run(scene()) == address


def test_a_failure_long_after_a_recovered_loss_is_the_program_s_own() -> None:
    """It counts, though the lost node is still missing."""

    async def scene() -> list[bool]:
        notes: list[str] = []
        fleet, _, _ = fleet_of(Agent("n1"), Agent("n2"), lease_s=0.5)
        transport = Dialling(comes_back=True)
        driver, _ = driver_of(request_for(elastic("1:2"), transport, "n1", "n2"), fleet, notes)
        fleet.lose(fleet.nodes[1], "unplugged")
        now = fleet.nodes[1].lost_at
        boom = Failure("exception", "n1", 0, now + 60, headline="ValueError: boom")
        echo = replace(boom, headline="RuntimeError: Connection reset by peer")
        found = [
            await driver.may_restart(one, [], 1.0)
            for one in (boom, echo, replace(boom, time=now + 0.2), replace(boom, rank=None))
        ]
        gone = Node(Host("n3"), Agent("n3"))  # type: ignore[arg-type]
        found.append(await driver.may_restart(boom, [gone], 1.0))
        await fleet.close()
        return found

    assert asyncio.run(asyncio.wait_for(scene(), 20)) == [False, True, True, True, False]


def test_a_fork_server_that_cannot_import_is_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery_module, "PAUSE_S", 0.01)
    plan: Any = SimpleNamespace(
        nodes=[part_of("n1", 0)], master_addr="127.0.0.1", master_port=1, closed_store=False
    )

    async def scene() -> None:
        fleet, _, _ = fleet_of(Agent("n1"), lease_s=5.0)
        screen, node, tries = Mock(), fleet.nodes[0], 0

        async def prepare() -> None:
            nonlocal tries
            tries += 1
            node.ready = asyncio.get_running_loop().create_future()
            node.ready.set_result(ForkServerError("import", "Traceback\nImportError: no torch"))

        monkeypatch.setattr(Node, "prepare", lambda _: prepare())
        recovery = recovery_of(plan, Members({0: "n1"}), fleet, screen=screen)
        preparing = asyncio.ensure_future(recovery._start_fork_server("n1"))
        while tries < 4:
            await asyncio.sleep(0.01)
        fleet.replace_node(fleet.add(Agent("n2")), "n1")  # type: ignore[arg-type]
        await preparing  # another host has its part now
        told = "paceline: n1 cannot start ranks yet: ImportError: no torch"
        assert screen.note.call_args_list == [call(told)]
        await fleet.close()

    asyncio.run(asyncio.wait_for(scene(), 20))


def test_a_failed_import_names_what_can_be_typed() -> None:
    """Torch for another Python; the compiler is imported only if there is one."""

    async def scene() -> None:
        ready = asyncio.get_running_loop().create_future()
        node, peer = (
            SimpleNamespace(name=name, host=Host(name), facts={"python": {"version": version}},
                            fork_server_died=False, ready=ready)
            for name, version in (("n1", "3.12.1"), ("n2", "3.11.7"))
        )  # fmt: skip
        ready.set_result(ForkServerError("import", "ImportError: torch._C"))
        fleet: Any = SimpleNamespace(nodes=[node, peer])
        job: Any = SimpleNamespace(preload=("torch", "torch._dynamo?"), python="/py")
        with pytest.raises(NodeError) as caught:
            await fork_servers_up(fleet, [cast(Any, node)], job)
        assert caught.value.remedy == "Look there: /py -c 'import torch'"
        assert "n1 3.12.1, n2 3.11.7" in caught.value.found

    asyncio.run(scene())


def test_ranks_that_wait_for_nodes_say_for_how_many_and_until_when(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recovery_module, "PAUSE_S", 0.01)
    plan: Any = SimpleNamespace(nodes=[part_of("n1", 0), part_of("n2", 1)], master_addr="::1",
                                master_port=1, closed_store=False)  # fmt: skip

    async def scene() -> None:
        fleet, _, _ = fleet_of(Agent("n1"), lease_s=5.0)
        members = able(Members({0: "n1", 1: "n2"}, min_hosts=2, timeout_s=60.0), 0, 1)
        recovery = recovery_of(plan, members, fleet)
        assert recovery.waiting is None
        members._wait_started_at = 1.0
        await recovery._report_wait(Wait(("n2",)))
        waits = recovery.waiting
        assert waits is not None
        text = "1 node of at least 2: waiting for n2, with the training's state in memory"
        assert (waits.text, round(waits.until - waits.since)) == (text, 60)
        members._wait_started_at = None
        assert recovery.waiting is None
        await fleet.close()

    asyncio.run(asyncio.wait_for(scene(), 20))


def part_of(host: str, *slots: int) -> Any:
    return SimpleNamespace(
        host=host, address="127.0.0.1", ranks=[SimpleNamespace(rank=slot) for slot in slots]
    )


def able(members: Members, *slots: int) -> Members:
    for slot in slots:
        members.set_recoverable(slot, True)
    return members


def test_the_reason_why_ranks_do_not_go_on_is_shown_once() -> None:
    plan: Any = SimpleNamespace(nodes=[part_of("n1", 0), part_of("n2", 1)], master_addr="::1",
                                master_port=1, closed_store=False)  # fmt: skip
    sharded = {"able": False, "why": "parameters are spread over the ranks (FSDP)"}

    async def scene() -> None:
        fleet, _, _ = fleet_of(Agent("n1"), Agent("n2"), lease_s=5.0)
        notes = Mock()
        screen = Mock(note=notes)
        recovery = recovery_of(plan, Members({0: "n1", 1: "n2"}), fleet, screen=screen)
        for slot in (0, 1):
            recovery.on_event(Event("recoverable", f"n{slot + 1}", slot, fields=sharded))
        assert not recovery.recover_from(Failure("exception", "n1", 0, headline="KeyError"))
        assert not recovery.recover_from(Failure("signal", "n1", 0, signal=15))
        notes.assert_not_called()
        killed = Failure("signal", "n2", 1, signal=9)
        assert not recovery.recover_from(killed)
        assert not recovery.recover_from(killed)
        notes.assert_called_once_with(
            "paceline: the other ranks cannot go on without rank 1 on n2:"
            " parameters are spread over the ranks (FSDP)"
        )
        await fleet.close()

    asyncio.run(asyncio.wait_for(scene(), 20))


def test_a_spare_that_comes_later_takes_the_place_of_a_lost_host() -> None:
    """The lost one is dialled on, and is a spare when it comes back."""
    plan: Any = SimpleNamespace(nodes=[part_of("n1", 0), part_of("n2", 1)], master_addr="::1",
                                master_port=1, closed_store=False)  # fmt: skip

    async def scene() -> None:
        fleet, _, _ = fleet_of(Agent("n1"), Agent("n2"), lease_s=5.0)
        given_up = asyncio.Event()

        async def reconnect(host: str) -> None:
            try:
                await asyncio.sleep(60)
            finally:
                given_up.set()

        replace_host = Mock(return_value=None)
        reconnector = Mock(redials=True, replace=replace_host, reconnect=reconnect)
        members = able(Members({0: "n1", 1: "n2"}), 0, 1)
        recovery = recovery_of(plan, members, fleet, reconnector)
        assert not recovery.use_spare()
        lost = Failure("lost", "n2", None, time.monotonic(), headline="off")
        assert recovery.recover_from(lost)
        await asyncio.sleep(0.01)
        assert not recovery.use_spare()
        replace_host.return_value = part_of("n3", 1)
        assert recovery.use_spare()
        await asyncio.wait_for(given_up.wait(), 30)
        assert [part.host for part in recovery._commands.parts.values()] == ["n1", "n3"]
        assert not recovery.use_spare()
        await fleet.close()

    asyncio.run(asyncio.wait_for(scene(), 20))


def test_who_ended_its_ranks_while_we_were_stopped_is_not_to_blame() -> None:
    """Ranks that recover in place are lost then with all their hosts."""
    plan: Any = Mock(nodes=[part_of("n1", 0), part_of("n2", 1)], master_port=1, attempt=0)

    async def scene() -> list[Failure]:
        fleet, _, _ = fleet_of(Agent("n1"), Agent("n2"), lease_s=5.0)
        fleet.on_lost = lambda node, why: attempt.node_lost(node, why)
        job = Job("a", ENTRY, "/", "python3")
        attempt = Attempt(plan, job, fleet, Mock(), Mock(), Mock(), RetryPolicy(),
                          Mock(redials=False))  # fmt: skip
        for slot, node in enumerate(fleet.nodes):
            node.running = True
            attempt.on_event(node, Event("recoverable", node.name, slot, fields={"able": True}))
        for node in fleet.nodes:
            about = {"reason": "lease", "why": "the lease of 5 s ran out"}
            attempt.on_event(node, Event("leaving", node.name, time=time.monotonic(), fields=about))
        await fleet.close()
        return attempt._failures

    failures = asyncio.run(asyncio.wait_for(scene(), 20))
    assert [failure.kind for failure in failures] == ["lease", "lease"]
    first = failure_analysis.first_failure(
        failure_analysis.attribute_launcher_pause(failures, 14.0, 5.0)
    )
    assert first.kind == "launcher"


def test_what_breaks_in_a_recovery_ends_the_attempt_at_once() -> None:
    """Instead of leaving the ranks to wait, and telling of it when they have ended."""
    plan: Any = Mock(nodes=[part_of("n1", 0)], master_port=1, attempt=0)

    async def scene() -> None:
        fleet, _, _ = fleet_of(Agent("n1"), lease_s=5.0)
        screen, interrupts = Mock(), Mock(received=[], wait=lambda *_: asyncio.sleep(60))
        job = Job("a", ENTRY, "/", "python3")
        attempt = Attempt(plan, job, fleet, interrupts, screen, Mock(), RetryPolicy(), Mock())

        async def started(*_: Any) -> None:
            attempt._hangs.run = Mock(side_effect=ZeroDivisionError("of hangs"))  # type: ignore[method-assign]
            asyncio.get_running_loop().call_later(0.3, attempt.recovery._spawn, broken())

        async def broken() -> None:
            raise ZeroDivisionError("of a recovery")

        attempt._commands.start = started  # type: ignore[method-assign]
        with pytest.raises(ZeroDivisionError, match="of a recovery"):
            await attempt.run()
        (note,) = screen.note.call_args_list
        assert "hangs are not noticed any more: ZeroDivisionError: of hangs" in note.args[0]
        await fleet.close()

    asyncio.run(asyncio.wait_for(scene(), 20))


def test_a_session_counts_a_node_that_is_asked_to_end_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it is asked; and not any more when another has taken its place."""
    monkeypatch.setattr(recovery_module, "SCHEDULER_SPREAD_S", 0.01)
    ranks = [SimpleNamespace(host=f"n{n}", ranks=[SimpleNamespace(rank=n - 1)]) for n in (1, 2)]
    plan: Any = SimpleNamespace(
        nodes=ranks, master_addr="127.0.0.1", master_port=1, closed_store=False
    )

    async def scene() -> None:
        fleet, _, _ = fleet_of(Agent("n1"), Agent("n2"), lease_s=0.5)
        members = Members({0: "n1", 1: "n2"})
        for slot in (0, 1):
            members.set_recoverable(slot, True)
        recovery = recovery_of(plan, members, fleet, fail=failed.append)

        async def asked(*nodes: Node) -> list[str]:
            for node in [*nodes, *nodes]:
                why = Failure("signal", node.name, None, signal=15, headline="asked to end")
                assert recovery.release(node, why)
            await asyncio.sleep(0.2)
            return [failure.kind for failure in failed]

        assert await asked(fleet.nodes[1]) == []
        assert fleet.nodes[1].loss_reason == "asked to end"
        assert recovery.departing_nodes == [fleet.nodes[1]]
        for host, lost in (("n3", "n2"), ("n4", "n3")):
            fleet.replace_node(fleet.add(Agent(host)), lost)  # type: ignore[arg-type]
            assert recovery.departing_nodes == []
            part: Any = SimpleNamespace(host=host, ranks=ranks[1].ranks)
            recovery._add_part(part)
            if host == "n3":
                assert await asked(fleet.nodes[1]) == []
        assert await asked(*fleet.nodes) == ["signal", "signal"]
        await fleet.close()

    failed: list[Failure] = []
    asyncio.run(asyncio.wait_for(scene(), 10))


class Slow:
    """A transport on which each host answers after its time, or refuses for ever."""

    redials = True

    def __init__(self, **seconds: float | None) -> None:
        self._seconds = seconds

    async def open(self, hosts: Any, pythons: Any) -> list[Any]:
        seconds = self._seconds[hosts[0].name]
        await asyncio.sleep(seconds or 0)
        if seconds is None:
            raise ConnectError("cannot log in", found=f"no route: {hosts[0].name}: off")
        return [Agent(hosts[0].name)]


class Flaky(Slow):
    """One on which hosts refuse so many times."""

    async def open(self, hosts: Any, pythons: Any) -> list[Any]:
        name = hosts[0].name
        if left := self._seconds.get(name):
            self._seconds[name] = left - 1
            raise ConnectError("cannot log in", found=f"no route: {name}: off")
        return [Agent(name)]


def gathered(transport: Any, least: int, timeout_s: float, *names: str, **more: Any) -> Any:
    notes: list[str] = []
    hosts = [Host(name) for name in names]
    found = asyncio.run(connect_module.connect_enough(
        transport, hosts, ["python3"] * len(hosts), least, timeout_s, notes.append,
        **more))  # fmt: skip
    return [channel.host.name for channel in found[0]], found[1], notes


def test_begins_with_those_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect_module, "STRAGGLER_WAIT_S", 0.4)
    there, missing, notes = gathered(Slow(n1=0, n2=None, n3=0.2), 1, 9, "n1", "n2", "n3")
    assert there == ["n1", "n3"]
    assert missing == {"n2": "no route: n2: off"}
    assert not notes
    assert gathered(Slow(n1=0, n2=9), 1, 9, "n1", "n2")[:2] == (["n1"], {"n2": ""})


def test_who_answers_while_the_others_import_has_a_part_from_the_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whose login was under way is not called anew, and is waited for, unlike who is off."""
    monkeypatch.setattr(connect_module, "STRAGGLER_WAIT_S", 0.1)
    monkeypatch.setattr(driver_module, "fork_servers_up", AsyncMock())
    opened: list[str] = []

    class Counted(Slow):
        redials = True

        async def open(self, hosts: Any, pythons: Any) -> list[Any]:
            opened.append(hosts[0].name)
            return await super().open(hosts, pythons)

    @dataclass(frozen=True)
    class Planned:
        hosts: tuple[str, ...]
        notes: tuple[str, ...] = ()
        master_addr: str = LOOPBACK.address
        settings: Any = field(default_factory=lambda: {"master_port": Setting(1)})
        to_json: Any = dict

    def plan_of(request: Any, fleet: Fleet, *_: Any) -> Any:
        return Planned(tuple(node.name for node in fleet.nodes))

    monkeypatch.setattr(driver_module.survey, "plan_of", plan_of)
    transport: Any = Counted(n1=0, n2=0.3, n3=60)

    async def scene() -> Any:
        late: list[connect_module.HostDialer] = []
        hosts = [Host(name) for name in ("n1", "n2", "n3")]
        channels, missing = await connect_module.connect_enough(
            transport, hosts, ["python3"] * 3, 1, 9, notes.append, background=late)  # fmt: skip
        fleet = Fleet(channels, 0.5, lambda node, event: None, lambda node, why: None)
        fleet.nodes[0].survey = HostSurvey(hosts[0], {}, LOOPBACK)
        request = request_for(elastic("1:3"), transport, *transport._seconds)
        driver, reconnector = driver_of(request, fleet, notes)
        driver.missing = missing
        for dialling in late:
            reconnector.follow(dialling)
        await next(dialling.task for dialling in late if dialling.host.name == "n2")
        planned: Any = Planned(("n1",), ("a note",))
        plan = await driver._add_ready_hosts(planned)
        await reconnector.close()
        await fleet.close()
        return plan

    notes: list[str] = []
    plan = asyncio.run(asyncio.wait_for(scene(), 20))
    assert (plan.hosts, plan.notes) == (("n1", "n2"), ("a note",))
    assert opened == ["n1", "n2", "n3"]


@pytest.mark.parametrize(("waits", "told"), [(True, ""), (False, "rank 0 waits")])
def test_ranks_without_a_group_are_not_said_to_hang(waits: bool, told: str) -> None:
    attempt: Any = Attempt.__new__(Attempt)
    attempt._recorder, attempt._screen = Mock(), Mock()
    attempt._members = Mock(is_regrouping=waits)
    attempt._show_state([], "rank 0 waits")
    assert attempt._recorder.run_state.hang == told


def test_where_everybody_is_is_written_down_while_nodes_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No attempt does it then, and who asks from elsewhere reads that file."""
    monkeypatch.setattr(recorder_module, "STATE_PERIOD_S", 0.01)
    written = list[NodeWait | None]()
    recorder = recorder_module.Recorder(Mock(), Mock())
    recorder.write_state = lambda: written.append(recorder._waiting)  # type: ignore[method-assign]
    waits = NodeWait.start("1 node of at least 2", 60.0)

    async def scene() -> None:
        recorder.set_waiting(None)
        assert not written
        recorder.set_waiting(waits)
        while len(written) < 3:
            await asyncio.sleep(0.01)
        recorder.set_waiting(None)
        assert written[-1] is None
        count = len(written)
        await asyncio.sleep(0.1)
        assert len(written) == count

    asyncio.run(asyncio.wait_for(scene(), 20))
    assert set(written) == {waits, None}


def test_waits_for_as_many_as_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[NodeWait]()
    with pytest.raises(ConnectError, match="1 host can be reached, at least 2 are needed: n2") as e:
        gathered(Slow(n1=0, n2=None), 2, 0.5, "n1", "n2")
    assert "n2: no route: n2: off" in e.value.found
    monkeypatch.setattr(connect_module, "PAUSES_S", (0.2,))
    there, _, notes = gathered(Flaky(n2=2), 2, 9, "n1", "n2", on_wait=seen.append)
    assert there == ["n1", "n2"]
    text = "1 host of at least 2: waiting up to 9 s for n2 (no route: n2: off)"
    assert notes == [f"paceline: {text}"]
    assert [(one.text, round(one.until - one.since)) for one in seen] == [(text, 9)]
    began = time.monotonic()
    with pytest.raises(ConnectError) as none:
        gathered(Slow(n1=None), 1, 0, "n1")
    assert time.monotonic() - began < 5
    assert "--nnodes" in e.value.remedy
    assert "--nnodes" not in none.value.remedy  # there is no fewer than one


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
            fanout.try_connect_hosts(hosts, ["python3"] * 2, SshOptions()),
            gather_all([connect(host) for host in hosts]),
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
        why = await full_disk(fleet, Failure("exception", "n1", 0, 0.0, headline=headline))
        await fleet.close()
        return why

    why = asyncio.run(scene())
    assert why.startswith(told)
    assert bool(why) == bool(told)


def card(name: str, *addresses: str) -> dict[str, Any]:
    own = [{"address": one, "family": 4, "prefix": 24, "usable": True,
            "scope": "link" if ":" in one else "global"} for one in addresses]  # fmt: skip
    return {"name": name, "kind": "hardware", "state": "up", "speed": 1000, "addresses": own}


def test_hosts_connect_from_all_their_addresses_or_nobody_knows_from_where() -> None:
    async def scene() -> None:
        one, other = Agent("n1"), Agent("n2")
        one.facts = {"interfaces": [card("eth0", "10.0.0.5", "fe80::5"), card("eth1", "10.9.0.5")]}
        other.facts = {"interfaces": [card("eth0", "10.0.0.6")]}
        fleet, _, _ = fleet_of(one, other, lease_s=5.0)
        assert fleet.addresses() == "10.0.0.5,10.9.0.5,10.0.0.6"
        assert fleet.addresses("10.7.0.0/16") == "10.7.0.0/16,10.0.0.5,10.9.0.5,10.0.0.6"
        other.facts = {"interfaces": None}
        assert fleet.addresses("10.7.0.0/16") == ""
        await fleet.close()

    asyncio.run(asyncio.wait_for(scene(), 10))


def test_nothing_starts_again_beside_a_stranger() -> None:
    job = Job(
        "a", ENTRY, "/", "python3", max_restarts=Setting(3), nnodes=Setting(parse_node_count("1:2"))
    )

    async def scene() -> None:
        notes: list[str] = []
        fleet, _, _ = fleet_of(Agent("n1"), Agent("n2"), lease_s=0.5)
        request = request_for(job, Dialling(comes_back=True), "n1", "n2")
        driver, _ = driver_of(request, fleet, notes)
        stranger = Event("stranger", "n1", 0, 1.0, {"address": "10.0.0.9"})
        failure = failure_analysis.failure_of(stranger, 10.0)
        assert failure is not None
        assert failure.status == 1
        assert "connection with 10.0.0.9, which is not one of this job's hosts" in failure.headline
        assert not await driver.may_restart(failure, [], 1.0, StartupTracker(job, 2))
        assert "not started again" in notes[0]
        await fleet.close()

    asyncio.run(asyncio.wait_for(scene(), 10))
