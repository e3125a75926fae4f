"""Tests the fleet of nodes: heartbeats, lost connections, reconnection and replacement of nodes."""

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


class FakeAgent:
    """Stands in for a channel to an agent; answers renewals until it is made silent."""

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


def make_fleet(*agents: FakeAgent, lease_s: float = 1.0) -> tuple[Fleet, list[str], list[str]]:
    events: list[str] = []
    losses: list[str] = []
    fleet = Fleet(
        list(agents), lease_s,  # type: ignore[arg-type]
        lambda node, event: events.append(f"{node.name} {event.kind}"),
        lambda node, reason: losses.append(reason),
    )  # fmt: skip
    return fleet, events, losses


def test_fleet_renews_leases_and_forwards_events() -> None:
    async def scene() -> tuple[Node, FakeAgent, list[str]]:
        agent = FakeAgent("n1")
        fleet, events, _ = make_fleet(agent)
        agent.on_event(Event("rank started", "n1"))
        await asyncio.sleep(0.25)
        await fleet.close()
        return fleet.first, agent, events

    node, agent, events = asyncio.run(scene())
    assert agent.asked.count("lease") >= 2
    assert agent.asked[-1] == "bye"
    assert node.active_at == node.offset - 3.5
    assert events == ["n1 rank started"]


def test_silent_node_is_reported_lost_once() -> None:
    async def scene() -> tuple[Fleet, list[str]]:
        silent, healthy = FakeAgent("n1"), FakeAgent("n2")
        fleet, _, losses = make_fleet(silent, healthy)
        silent.silent = True
        for _ in range(400):  # takes longer on a busy machine
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


def test_silence_message_distinguishes_ended_connection() -> None:
    assert describe_silence("n1", 6.6, broken=True).startswith(
        "the connection to n1 ended, and no other"
    )
    assert describe_silence("n1", 6.6, broken=False).startswith("silent for 6.6 s")


def test_launcher_pause_is_not_node_silence() -> None:
    import time

    async def scene() -> tuple[Fleet, list[str]]:
        fleet, _, losses = make_fleet(FakeAgent("n1"), FakeAgent("n2"))
        await asyncio.sleep(0.3)
        time.sleep(1.5)  # as if this process had been stopped for longer than a lease
        await asyncio.sleep(0.6)
        await fleet.close()
        return fleet, losses

    fleet, losses = asyncio.run(scene())
    assert losses == []
    assert fleet.absence_s > 1.0


def test_tell_ignores_refusals_and_lost_nodes() -> None:
    async def scene() -> FakeAgent:
        gone, remaining = FakeAgent("n1"), FakeAgent("n2")
        fleet, _, _ = make_fleet(gone, remaining)
        fleet.lose(fleet.nodes[0], "unplugged")
        await fleet.tell("refuse")
        await fleet.close()
        assert "refuse" not in gone.asked
        assert gone.abandoned
        return remaining

    assert "refuse" in asyncio.run(scene()).asked


def test_silence_excludes_launcher_pause() -> None:
    silence = Silence(1.0, timestamp=0.0)

    def update_silence(time_s: float, message_at: float) -> float:
        silence.update(time_s, message_at)
        return silence.seconds

    assert update_silence(1.0, message_at=0.5) == pytest.approx(0.5)
    assert update_silence(2.0, message_at=0.5) == pytest.approx(1.5)
    assert update_silence(22.0, message_at=0.5) == pytest.approx(
        3.5
    )  # this process was stopped for 19 s
    assert update_silence(23.0, message_at=22.9) == pytest.approx(0.1)
    assert update_silence(24.0, message_at=22.9) == pytest.approx(1.1)


def test_silence_of_all_nodes_is_not_exclusive() -> None:
    silence = Silence(0.25, timestamp=0.0)

    def is_exclusive_after(seconds: float, peers_respond: bool) -> bool:
        end = time_s[0] + seconds
        while time_s[0] < end:
            time_s[0] += 0.25
            silence.update(time_s[0], received_at=0.0, hears_peers=peers_respond)
        return silence.is_exclusive

    time_s = [0.0]
    assert not is_exclusive_after(4.0, peers_respond=False)
    assert not is_exclusive_after(3.75, peers_respond=True)  # retransmissions take this long
    assert is_exclusive_after(0.5, peers_respond=True)
    silence.update(9.0, received_at=8.9, hears_peers=False)
    assert silence.seconds == silence.shared_s == pytest.approx(0.1)


def test_no_node_is_lost_while_launcher_link_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "SILENCE_TIMEOUT_S", 0.4)
    monkeypatch.setattr(fleet_module, "PEER_RECENCY_S", 0.2)

    async def scene() -> tuple[list[bool], dict[str, float]]:
        agents = [FakeAgent("n1"), FakeAgent("n2"), FakeAgent("n3")]
        fleet, _, losses = make_fleet(*agents, lease_s=60.0)
        fleet.watchful = True
        await asyncio.sleep(0.1)
        for agent in agents:
            agent.silent = True
        await asyncio.sleep(1.2)
        lost_early = [node.lost for node in fleet.nodes]
        fleet.lease_s = 1.0
        while len(losses) < 3:
            await asyncio.sleep(0.05)
        await fleet.close()
        return lost_early, fleet.common_silences

    lost_early, silent_hosts = asyncio.run(scene())
    assert lost_early == [False, False, False]
    assert sorted(silent_hosts) == ["n1", "n2", "n3"]
    lost = [Failure("lost", host, None, 1.0, headline="no word") for host in silent_hosts]
    own = Failure("exception", "n1", 0, 0.5, headline="its own")
    first, second = failure_analysis.attribute_network_loss([own, *lost], silent_hosts, 10.0)
    assert (first.kind, second) == ("launcher", own)
    assert failure_analysis.attribute_network_loss([own, *lost], {}, 10.0) == [own, *lost]


@pytest.mark.parametrize("at_a_loss", [False, True])
def test_broken_connection_times_out_early_on_rank_loss(
    monkeypatch: pytest.MonkeyPatch, at_a_loss: bool
) -> None:
    """Otherwise, reconnecting continues for longer: sshd may just have restarted."""
    monkeypatch.setattr(fleet_module, "SILENCE_TIMEOUT_S", 0.4)
    monkeypatch.setattr(fleet_module, "PEER_RECENCY_S", 0.2)

    async def scene() -> list[bool]:
        agents = [FakeAgent("n1"), FakeAgent("n2")]
        fleet, _, losses = make_fleet(*agents, lease_s=8.0)
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


def test_sequential_silence_is_not_launcher_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet_module, "PEER_RECENCY_S", 0.3)

    async def scene() -> tuple[Fleet, dict[str, float]]:
        agents = [FakeAgent("n1"), FakeAgent("n2")]
        fleet, _, losses = make_fleet(*agents, lease_s=2.0)
        await asyncio.sleep(0.1)
        agents[0].silent = True
        await asyncio.sleep(0.9)
        agents[1].silent = True
        while len(losses) < 2:
            await asyncio.sleep(0.05)
        await fleet.close()
        return fleet, fleet.common_silences

    fleet, silent_hosts = asyncio.run(scene())
    assert silent_hosts == {}
    assert [fleet.launcher_fault(node) for node in fleet.nodes] == ["", ""]


@pytest.mark.parametrize(
    ("stderr", "reason"),
    [
        ("", "the connection to n2 ended"),
        (
            "[W1130 18:00:00.1 socket.cpp:207] [c10d] The hostname of the client socket cannot be"
            " retrieved. err=-3",
            "the connection to n2 ended",
        ),
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
def test_end_reason_uses_only_recognised_stderr_lines(stderr: str, reason: str) -> None:
    assert describe_end("n2", stderr) == reason


class RedialTransport:
    """A transport whose hosts return at the second attempt or never; the error may be permanent."""

    def __init__(self, can_reconnect: bool, redials: bool = True, gone: bool = False) -> None:
        self.redials, self.gone = redials, gone
        self.tries = 0
        self._comes_back = can_reconnect

    async def open(self, hosts: Any, pythons: Any) -> list[Any]:
        self.tries += 1
        if self.gone:
            raise PermanentConnectError("no agent", found="words", brief="the allocation is over")
        if self.tries < 2 or not self._comes_back:
            raise ConnectError("cannot log in", found="no answer: n2: timed out")
        return [FakeAgent(host.name) for host in hosts]

    async def close(self, exit_code: int) -> None: ...

    async def loss_reason(self, host: Host) -> str:
        return ""


def make_request(job: Job, transport: Any, *names: str) -> Request:
    return Request(job, tuple(Host(name) for name in names), transport)


@pytest.mark.parametrize(
    ("transport", "announced"),
    [
        (RedialTransport(can_reconnect=True), "n2 is back; starting all nodes again, 1 of 1"),
        (RedialTransport(can_reconnect=False), "n2 (no answer: n2: timed out) did not come back"),
        (RedialTransport(can_reconnect=True, redials=False), "n2 cannot be joined again"),
        (
            RedialTransport(can_reconnect=True, gone=True),
            "n2 cannot come back: the allocation is over\n"
            "paceline: 1 node of at least 2, and no other is waited for: not started again",
        ),
    ],
)
def test_redials_lost_hosts(transport: RedialTransport, announced: str) -> None:
    job = Job("a", ENTRY, "/", "python3", wait_for_nodes_s=Setting(1.2), max_restarts=Setting(1))

    async def scene() -> tuple[Fleet, bool, list[str]]:
        notes: list[str] = []
        fleet, _, _ = make_fleet(FakeAgent("n1"), FakeAgent("n2"), lease_s=5.0)
        fleet.lose(fleet.nodes[1], "unplugged")
        waits = list[Any]()
        request = make_request(job, transport, "n1", "n2")
        recorder = Mock(set_waiting=waits.append)
        driver, reconnector = make_driver(request, fleet, notes, recorder=recorder)
        lost = Failure("lost", "n2", None, headline="unplugged")
        assert await driver.may_restart(lost, [], 1.0)
        outcome = await driver.select_nodes()
        dialling = "dialling n2 again, for up to 1.2 s"
        if f"paceline: {dialling}" in notes:
            wait_begin, wait_end = waits
            assert wait_begin.text == f"1 node of at least 2: {dialling}"
            assert wait_begin.until - wait_begin.since == pytest.approx(1.2, abs=0.01)
            assert wait_end is None
        else:
            assert waits == []
        await reconnector.close()
        await fleet.close()
        return fleet, outcome, notes

    fleet, outcome, notes = asyncio.run(scene())
    assert announced in "\n".join(notes)
    assert outcome == fleet.is_complete == (announced.startswith("n2 is back"))
    assert [node.name for node in fleet.nodes] == ["n1", "n2"]


@pytest.mark.parametrize("kind", ["script", "session", "none"])
def test_host_loss_before_first_step(kind: str) -> None:
    """A session continues without the host; a script waits for it; an explicit 0 allows neither."""
    notes: list[str] = []
    preload = ("torch", *(["paceline.train?"] if kind == "session" else []))
    restarts_allowed = Setting(0, Source.ARGUMENT if kind == "none" else Source.DEFAULT)
    job = Job("a", ENTRY, "/", "python3", preload=preload, max_restarts=restarts_allowed)

    async def scene() -> tuple[bool, list[str]]:
        fleet, _, _ = make_fleet(FakeAgent("n1"), FakeAgent("n2"), lease_s=5.0)
        transport = RedialTransport(can_reconnect=True)
        request = make_request(job, transport, "n1", "n2")
        driver, reconnector = make_driver(request, fleet, notes)
        fleet.lose(fleet.nodes[1], "unplugged")
        lost = Failure("lost", "n2", None, headline="unplugged")
        may_continue = await driver.may_restart(lost, [], 1.0, StartupTracker(job))
        if may_continue:
            assert await driver.select_nodes()
        assert driver.policy.num_restarts == 0
        await reconnector.close()
        await fleet.close()
        return may_continue, [node.name for node in fleet.nodes]

    may_continue, names = asyncio.run(asyncio.wait_for(scene(), 20))
    if kind == "none":
        assert (may_continue, notes) == (False, [])
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


def test_limits_restarts_before_first_step() -> None:
    notes: list[str] = []
    job = Job("a", ENTRY, "/", "python3")
    killed = Failure("signal", "n1", 0, signal=9, headline="killed by SIGKILL")
    boom = Failure("exception", "n1", 0, headline="ValueError: boom")
    connection_refused = replace(boom, headline="RuntimeError: Connection refused")

    async def scene() -> list[bool]:
        fleet, _, _ = make_fleet(FakeAgent("n1"), FakeAgent("n2"), lease_s=5.0)
        driver, _ = make_driver(
            make_request(job, RedialTransport(can_reconnect=True), "n1"), fleet, notes
        )
        outcome = [await driver.may_restart(one, [], 1.0, StartupTracker(job))
                 for one in (boom, connection_refused, killed, killed, killed)]  # fmt: skip
        await fleet.close()
        return outcome

    outcome = asyncio.run(asyncio.wait_for(scene(), 20))
    assert outcome == [False, False, True, True, False]
    assert notes == ["paceline: not started again: 3 starts in a row reached no step"]


@pytest.mark.parametrize(("rejoin", "session", "expansions", "note"), [
    ("now", False, 1, ""),
    ("never", False, 0, "n2 is here, as a spare (--rejoin never)"),
    ("after-save", True, 1, ""),
    ("after-save", False, 0, "n2 is here; it gets ranks after the next checkpoint of rank 0"),
])  # fmt: skip
def test_rejoin_decides_when_returned_node_gets_ranks(
    rejoin: Any, session: bool, expansions: int, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    saved = asyncio.Event()

    async def await_checkpoint(*_: object) -> None:
        await saved.wait()

    monkeypatch.setattr(driver_module, "await_checkpoint", await_checkpoint)

    async def scene() -> None:
        fleet, _, _ = make_fleet(FakeAgent("n1"), lease_s=5.0)
        request = make_request(
            elastic_job("1:2", rejoin=Setting(rejoin)),
            RedialTransport(can_reconnect=True),
            "n1",
            "n2",
        )
        driver, _ = make_driver(request, fleet, notes)
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
        awaits_checkpoint = rejoin == "after-save" and not session
        assert attempt.request_expansion.call_count == (1 if awaits_checkpoint else 2 * expansions)
        await fleet.close()

    asyncio.run(asyncio.wait_for(scene(), 20))
    assert note in "".join(notes)


class FailingLauncher(Launcher):
    """Loses a host during this many starts; the run then succeeds."""

    def __init__(self, losses: int, asked: Setting[int]) -> None:
        job = Job("a", ENTRY, "/", "python3", max_restarts=asked)
        self._request = make_request(job, RedialTransport(can_reconnect=True), "n1", "n2")
        self._screen, self._results = Mock(), AsyncMock()
        policy = RetryPolicy(retries_start=self._request.retries_start)
        self.driver = Mock(policy=policy, run=AsyncMock(return_value=Result(0)))
        self.losses, self.connected = losses, list[bool]()

    def _read_supplies(self, delay_s: float = 0.0) -> Any:
        return asyncio.get_running_loop().create_future()

    async def _connect(self, lost: NodeError | None) -> tuple[Fleet, dict[str, str]]:
        self.connected.append(lost is not None)
        return make_fleet(FakeAgent("n1"), FakeAgent("n2"), lease_s=5.0)[0], {}

    def _record_connected(self, *_: Any) -> None: ...

    async def _get_ready(self, fleet: Fleet, reading: Any) -> Any:
        if len(self.connected) <= self.losses:
            fleet.lose(fleet.nodes[1], "unplugged")
            raise ConnectionError("gone")
        return Mock()

    async def _close_fleet(self, fleet: Fleet, interrupts: Any) -> None:
        await fleet.close()


def test_start_is_recorded_with_its_run_id() -> None:
    launcher = FailingLauncher(0, Setting(0))
    launcher.recorder = Mock()
    node = SimpleNamespace(name="n1", channel=Mock(fingerprint=""))
    Launcher._record_connected(launcher, Mock(everyone=[node]), {})
    launcher.recorder.event.assert_called_once_with(
        "connected", run_id=launcher._request.run_id, hosts=["n1"]
    )


@pytest.mark.parametrize(
    ("losses", "asked", "connected"),
    [
        (0, Setting(0), 1),
        (2, Setting(0), 3),
        (MAX_STARTS, Setting(0), MAX_STARTS),
        (1, Setting(0, Source.ARGUMENT), 1),
    ],
)
def test_host_loss_during_startup_is_retried(
    losses: int, asked: Setting[int], connected: int
) -> None:
    launcher = FailingLauncher(losses, asked)
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


def test_repeatedly_lost_host_is_excluded() -> None:
    notes: list[str] = []

    async def scene() -> bool:
        fleet, _, _ = make_fleet(FakeAgent("n1"), FakeAgent("n2"), lease_s=5.0)
        transport = RedialTransport(can_reconnect=True)
        job = Job("a", ENTRY, "/", "python3", max_restarts=Setting(9))
        driver, reconnector = make_driver(make_request(job, transport, "n1", "n2"), fleet, notes)
        for _ in range(MAX_HOST_LOSSES):
            fleet.lose(fleet.nodes[1], "unplugged")
            assert await driver.may_restart(Failure("lost", "n2", None, headline="gone"), [], 1.0)
            outcome = await driver.select_nodes()
        await reconnector.close()
        await fleet.close()
        return outcome

    assert not asyncio.run(asyncio.wait_for(scene(), 20))
    assert sum("dialling n2 again" in note for note in notes) == MAX_HOST_LOSSES - 1
    assert notes[-3:] == [
        f"paceline: n2 was lost {MAX_HOST_LOSSES} times: it is left out",
        "paceline: n2: gone",
        "paceline: 1 node of at least 2, and no other is waited for: not started again",
    ]


class FakeProvisioner:
    """Stands in for a provisioner; nodes can start ranks immediately."""

    supplies = Supplies()

    async def provision(self, node: Node, fleet: Fleet) -> None:
        node.survey = HostSurvey(node.host, {}, LOOPBACK)
        node.ready = asyncio.get_running_loop().create_future()
        node.ready.set_result(None)


def make_reconnector(request: Request, fleet: Fleet, notes: list[str],
                   arrived: Any = lambda node: None,
                   provisioner: Any = None) -> Reconnector:  # fmt: skip
    return Reconnector(request, fleet, provisioner or FakeProvisioner(), arrived, notes.append)


def make_driver(request: Request, fleet: Fleet, notes: list[str], arrived: Any = lambda node: None,
              recorder: Any = None) -> tuple[ElasticDriver, Reconnector]:  # fmt: skip
    screen: Any = Mock(note=notes.append)
    parts: list[Any] = [
        FakeProvisioner(), Mock(), Mock(align=AsyncMock()), Mock(), screen, recorder or Mock(),
        Mock(), Mock(),
    ]  # fmt: skip
    driver = ElasticDriver(request, *parts)
    driver.fleet = fleet
    driver._reconnector = reconnector = make_reconnector(request, fleet, notes, arrived)
    return driver, reconnector


def make_recovery(plan: Any, members: Any, fleet: Fleet, reconnector: Any = None, fail: Any = None,
                screen: Any = None) -> RecoveryController:  # fmt: skip
    job = Job("a", ENTRY, "/", "python3")
    return RecoveryController(
        RankCommands(plan, job, fleet, ""), members, fleet,
        reconnector or Mock(redials=False, replace=lambda part, parts: None), fail or Mock(),
        screen or Mock(), Mock(),
    )  # fmt: skip


def elastic_job(text: str, **options: Any) -> Job:
    return Job("a", ENTRY, "/", "python3", nnodes=Setting(parse_node_count(text)), **options)


def test_elastic_job_continues_with_fewer_nodes() -> None:
    """No restart is counted, and the returning node is announced and used again."""
    transport, notes = RedialTransport(can_reconnect=True), list[str]()

    async def scene() -> None:
        fleet, _, _ = make_fleet(FakeAgent("n1"), FakeAgent("n2"), lease_s=5.0)
        arrived: list[str] = []
        request = make_request(elastic_job("1:2"), transport, "n1", "n2")
        driver, reconnector = make_driver(
            request, fleet, notes, lambda node: arrived.append(node.name)
        )
        fleet.lose(fleet.nodes[0], "unplugged")
        assert await driver.may_restart(Failure("lost", "n1", None, headline="gone"), [], 1.0)
        assert await driver.select_nodes()
        assert [node.name for node in fleet.nodes] == ["n2"]
        assert driver.policy.num_restarts == 0
        while not arrived:
            await asyncio.sleep(0.05)
        assert await driver.select_nodes()
        assert [node.name for node in fleet.nodes] == ["n2", "n1"]  # n2 has the files
        await reconnector.close()
        await fleet.close()

    asyncio.run(asyncio.wait_for(scene(), 10))
    assert "n1: gone; going on with n2; starting all nodes again" in notes[0]
    assert notes[-1] == "paceline: n1 is back; starting all nodes again"


def test_reconnected_node_resumes_its_position() -> None:
    async def scene() -> None:
        fleet, _, _ = make_fleet(FakeAgent("n1"), FakeAgent("n2"), lease_s=5.0)
        announced: list[Node] = []
        request = make_request(elastic_job("2:2"), RedialTransport(can_reconnect=True), "n1", "n2")
        reconnector = make_reconnector(request, fleet, [], announced.append)
        lost = fleet.nodes[0]
        fleet.lose(lost, "unplugged")
        await reconnector.reconnect("n1")
        assert fleet.nodes[0] is not lost
        assert (fleet.nodes[0].name, fleet.spares, announced) == ("n1", [], [])
        assert fleet.is_complete
        await reconnector.close()
        await fleet.close()

    asyncio.run(asyncio.wait_for(scene(), 10))


def test_permanently_lost_host_is_abandoned() -> None:
    """Ranks of a session continue without the node or stop; a start does not wait for it."""
    transport, notes = RedialTransport(can_reconnect=False, gone=True), list[str]()

    async def scene() -> None:
        fleet, _, _ = make_fleet(FakeAgent("n1"), FakeAgent("n2"), lease_s=5.0)
        reconnector = make_reconnector(
            make_request(elastic_job("1:2"), transport, "n1"), fleet, notes
        )
        fleet.lose(fleet.nodes[1], "unplugged")
        lost: list[str] = []
        first = SimpleNamespace(host="n2", ranks=[SimpleNamespace(rank=0)])
        plan: Any = SimpleNamespace(
            nodes=[first], master_addr="127.0.0.1", master_port=1, closed_store=False
        )
        members = Mock(decide=list, abandon_host=lost.append)
        await make_recovery(plan, members, fleet, reconnector)._restore_host(Dial("n2"))
        assert lost == ["n2"]
        assert reconnector.dialled == []
        await reconnector.close()
        await fleet.close()

    asyncio.run(asyncio.wait_for(scene(), 10))
    assert notes == ["paceline: n2 cannot come back: the allocation is over"]
    with pytest.raises(ConnectError, match="0 hosts can be reached") as caught:
        connect_hosts(transport, 1, 9999, "n1")
    assert caught.value.found == "n1: the allocation is over"


def test_failed_provisioning_is_reported_and_retried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cause may be an error of the node, a missing local file, or a timeout."""
    monkeypatch.setattr(connect_module, "PAUSES_S", (0.01,))
    provision_errors: list[Exception] = [
        NodeError("n2 is full"), FileNotFoundError(2, "No such file", "/p/a.py"), TimeoutError(),
    ]  # fmt: skip
    notes: list[str] = []

    async def provision(node: Node, fleet: Fleet) -> None:
        if provision_errors:
            raise provision_errors.pop(0)

    async def scene() -> list[str]:
        fleet, _, _ = make_fleet(FakeAgent("n1"), FakeAgent("n2"), lease_s=5.0)
        transport: Any = RedialTransport(can_reconnect=True)
        request = make_request(elastic_job("2:2"), transport, "n1", "n2")
        reconnector = make_reconnector(request, fleet, notes, provisioner=Mock(provision=provision))
        fleet.lose(fleet.nodes[1], "unplugged")
        await reconnector.reconnect("n2")
        await reconnector.close()
        await fleet.close()
        return [node.name for node in fleet.nodes if not node.lost]

    assert asyncio.run(asyncio.wait_for(scene(), 10)) == ["n1", "n2"]
    assert [note.removeprefix("paceline: n2 cannot take part yet: ") for note in notes] == [
        "n2 is full", "[Errno 2] No such file: '/p/a.py'", "TimeoutError",
    ]  # fmt: skip


def test_spare_replaces_lost_node() -> None:
    transport, notes = RedialTransport(can_reconnect=False), list[str]()

    async def scene() -> None:
        fleet, _, _ = make_fleet(FakeAgent("n1"), FakeAgent("n2"), FakeAgent("n3"), lease_s=5.0)
        for node in fleet.nodes:
            node.survey = HostSurvey(node.host, {}, LOOPBACK)
            node.resolve_ready(None)
            node.ready = asyncio.get_running_loop().create_future()
            node.ready.set_result(None)
        fleet.seat(fleet.nodes[:2])
        request = make_request(elastic_job("2:2"), transport, "n1", "n2", "n3")
        driver, reconnector = make_driver(request, fleet, notes)
        fleet.lose(fleet.nodes[0], "unplugged")
        assert await driver.may_restart(Failure("lost", "n1", None, headline="gone"), [], 1.0)
        assert await driver.select_nodes()
        assert [node.name for node in fleet.nodes] == ["n2", "n3"]
        await reconnector.close()
        await fleet.close()

    asyncio.run(asyncio.wait_for(scene(), 10))
    assert notes == ["paceline: n1: gone; going on with n2, n3; starting all nodes again"]


def test_departing_node_is_released() -> None:
    async def scene() -> Fleet:
        notes: list[str] = []
        fleet, _, _ = make_fleet(FakeAgent("n1"), FakeAgent("n2"), lease_s=5.0)
        transport = RedialTransport(can_reconnect=True)
        request = make_request(elastic_job("1:2"), transport, "n1", "n2")
        driver, reconnector = make_driver(request, fleet, notes)
        asked = Failure("signal", "n2", None, signal=15, headline="asked to end")
        assert await driver.may_restart(asked, [fleet.nodes[1]], 1.0)
        assert await driver.select_nodes()
        await asyncio.sleep(0.2)
        assert not transport.tries  # no reconnection: it was asked to end
        await reconnector.close()
        await fleet.close()
        return fleet

    fleet = asyncio.run(scene())
    assert [node.name for node in fleet.nodes] == ["n1"]
    assert "bye" in fleet.former[0].channel.asked  # type: ignore[attr-defined]
    assert fleet.former[0].loss_reason.startswith("asked to end")


def test_regroup_survives_replacement_of_store_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host was replaced while the regroup message waited to be sent."""
    monkeypatch.setattr(recovery_module, "PAUSE_S", 0.01)
    first = SimpleNamespace(host="n1", ranks=[SimpleNamespace(rank=0)])
    plan: Any = SimpleNamespace(
        nodes=[first], master_addr="127.0.0.1", master_port=1, closed_store=False
    )

    async def scene() -> None:
        fleet, _, _ = make_fleet(FakeAgent("n1"), lease_s=5.0)
        fleet.nodes[0].running = True
        recovery = make_recovery(plan, Members({0: "n1"}), fleet)
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


@pytest.mark.parametrize(("num_hosts", "address"), [(1, "127.0.0.1"), (2, "10.0.0.5")])
def test_single_host_job_uses_loopback(num_hosts: int, address: str) -> None:
    """Also if fewer nodes are enough: ``-H local --nnodes 1:2``."""
    interface_address = {
        "address": "10.0.0.5",
        "family": 4,
        "prefix": 24,
        "scope": "global",
        "usable": True,
    }
    card = {
        "name": "eth0",
        "kind": "hardware",
        "state": "up",
        "speed": 1000,
        "addresses": [interface_address],
    }

    async def scene() -> str:
        agent = FakeAgent("n1")
        agent.facts = {"interfaces": [card]}
        fleet, _, _ = make_fleet(agent, lease_s=5.0)
        outcome, _ = await choose_networks(fleet, elastic_job("1:2"), num_hosts)
        await fleet.close()
        return outcome["n1"].address

    assert asyncio.run(scene()) == address


def test_unrelated_failure_following_host_loss_ends_job() -> None:
    """The failure counts as a restart, although the lost node is still missing."""

    async def scene() -> list[bool]:
        notes: list[str] = []
        fleet, _, _ = make_fleet(FakeAgent("n1"), FakeAgent("n2"), lease_s=5.0)
        transport = RedialTransport(can_reconnect=True)
        driver, _ = make_driver(
            make_request(elastic_job("1:2"), transport, "n1", "n2"), fleet, notes
        )
        fleet.lose(fleet.nodes[1], "unplugged")
        time_s = fleet.nodes[1].lost_at
        boom = Failure("exception", "n1", 0, time_s + 60, headline="ValueError: boom")
        echo = replace(boom, headline="RuntimeError: Connection reset by peer")
        outcome = [
            await driver.may_restart(one, [], 1.0)
            for one in (boom, echo, replace(boom, time=time_s + 0.2), replace(boom, rank=None))
        ]
        gone = Node(Host("n3"), FakeAgent("n3"))  # type: ignore[arg-type]
        outcome.append(await driver.may_restart(boom, [gone], 1.0))
        await fleet.close()
        return outcome

    assert asyncio.run(asyncio.wait_for(scene(), 20)) == [False, True, True, True, False]


def test_fork_server_import_error_is_noted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery_module, "PAUSE_S", 0.01)
    plan: Any = SimpleNamespace(
        nodes=[make_part("n1", 0)], master_addr="127.0.0.1", master_port=1, closed_store=False
    )

    async def scene() -> None:
        fleet, _, _ = make_fleet(FakeAgent("n1"), lease_s=5.0)
        screen, node, attempts = Mock(), fleet.nodes[0], 0

        async def prepare() -> None:
            nonlocal attempts
            attempts += 1
            node.ready = asyncio.get_running_loop().create_future()
            node.ready.set_result(ForkServerError("import", "Traceback\nImportError: no torch"))

        monkeypatch.setattr(Node, "prepare", lambda _: prepare())
        recovery = make_recovery(plan, Members({0: "n1"}), fleet, screen=screen)
        preparing = asyncio.ensure_future(recovery._start_fork_server("n1"))
        while attempts < 4:
            await asyncio.sleep(0.01)
        fleet.replace_node(fleet.add(FakeAgent("n2")), "n1")  # type: ignore[arg-type]
        await preparing  # n1 was replaced
        announced = "paceline: n1 cannot start ranks yet: ImportError: no torch"
        assert screen.note.call_args_list == [call(announced)]
        await fleet.close()

    asyncio.run(asyncio.wait_for(scene(), 20))


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        ("ImportError: torch._C", "Look there: /py -c 'import torch'"),
        ("No module named 'psutil._x'", "On n1: /py -m pip install psutil"),
    ],
)
def test_import_error_remedy_shows_command(error: str, remedy: str) -> None:
    """The cause is a torch for another Python version; a missing compiler is no error."""

    async def scene() -> None:
        ready = asyncio.get_running_loop().create_future()
        node, peer = (
            SimpleNamespace(name=name, host=Host(name), facts={"python": {"version": version}},
                            fork_server_died=False, ready=ready)
            for name, version in (("n1", "3.12.1"), ("n2", "3.11.7"))
        )  # fmt: skip
        ready.set_result(ForkServerError("import", error))
        fleet: Any = SimpleNamespace(nodes=[node, peer])
        job: Any = SimpleNamespace(preload=("torch", "torch._dynamo?"), python="/py")
        with pytest.raises(NodeError) as caught:
            await fork_servers_up(fleet, [cast(Any, node)], job)
        assert caught.value.remedy == remedy
        assert "n1 3.12.1, n2 3.11.7" in caught.value.found

    asyncio.run(scene())


def test_wait_state_has_node_count_and_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recovery_module, "PAUSE_S", 0.01)
    plan: Any = SimpleNamespace(nodes=[make_part("n1", 0), make_part("n2", 1)], master_addr="::1",
                                master_port=1, closed_store=False)  # fmt: skip

    async def scene() -> None:
        fleet, _, _ = make_fleet(FakeAgent("n1"), lease_s=5.0)
        members = make_recoverable(Members({0: "n1", 1: "n2"}, min_hosts=2, timeout_s=60.0), 0, 1)
        recovery = make_recovery(plan, members, fleet)
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


def make_part(host: str, *slots: int) -> Any:
    return SimpleNamespace(
        host=host, address="127.0.0.1", ranks=[SimpleNamespace(rank=slot) for slot in slots]
    )


def make_recoverable(members: Members, *slots: int) -> Members:
    for slot in slots:
        members.set_recoverable(slot, True)
    return members


def test_reason_against_recovery_is_shown_once() -> None:
    plan: Any = SimpleNamespace(nodes=[make_part("n1", 0), make_part("n2", 1)], master_addr="::1",
                                master_port=1, closed_store=False)  # fmt: skip
    sharded = {"able": False, "why": "parameters are spread over the ranks (FSDP)"}

    async def scene() -> None:
        fleet, _, _ = make_fleet(FakeAgent("n1"), FakeAgent("n2"), lease_s=5.0)
        notes = Mock()
        screen = Mock(note=notes)
        recovery = make_recovery(plan, Members({0: "n1", 1: "n2"}), fleet, screen=screen)
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


def test_arriving_spare_replaces_lost_host() -> None:
    """Reconnecting to the lost host continues; when it returns, it is a spare."""
    plan: Any = SimpleNamespace(nodes=[make_part("n1", 0), make_part("n2", 1)], master_addr="::1",
                                master_port=1, closed_store=False)  # fmt: skip

    async def scene() -> None:
        fleet, _, _ = make_fleet(FakeAgent("n1"), FakeAgent("n2"), lease_s=5.0)
        cancelled = asyncio.Event()

        async def reconnect(host: str) -> None:
            try:
                await asyncio.sleep(60)
            finally:
                cancelled.set()

        replace_host = Mock(return_value=None)
        reconnector = Mock(redials=True, replace=replace_host, reconnect=reconnect)
        members = make_recoverable(Members({0: "n1", 1: "n2"}), 0, 1)
        recovery = make_recovery(plan, members, fleet, reconnector)
        assert not recovery.use_spare()
        lost = Failure("lost", "n2", None, time.monotonic(), headline="off")
        assert recovery.recover_from(lost)
        await asyncio.sleep(0.01)
        assert not recovery.use_spare()
        replace_host.return_value = make_part("n3", 1)
        assert recovery.use_spare()
        await asyncio.wait_for(cancelled.wait(), 30)
        assert [part.host for part in recovery._commands.parts.values()] == ["n1", "n3"]
        assert not recovery.use_spare()
        await fleet.close()

    asyncio.run(asyncio.wait_for(scene(), 20))


def test_lease_expiry_in_launcher_pause_blames_launcher() -> None:
    """Recoverable ranks of all hosts are lost then, because their leases expired."""
    plan: Any = Mock(nodes=[make_part("n1", 0), make_part("n2", 1)], master_port=1, attempt=0)

    async def scene() -> list[Failure]:
        fleet, _, _ = make_fleet(FakeAgent("n1"), FakeAgent("n2"), lease_s=5.0)
        fleet.on_lost = lambda node, reason: attempt.node_lost(node, reason)
        job = Job("a", ENTRY, "/", "python3")
        attempt = Attempt(plan, job, fleet, Mock(), Mock(), Mock(), RetryPolicy(),
                          Mock(redials=False))  # fmt: skip
        for slot, node in enumerate(fleet.nodes):
            node.running = True
            attempt.on_event(node, Event("recoverable", node.name, slot, fields={"able": True}))
        for node in fleet.nodes:
            event_fields = {"reason": "lease", "why": "the lease of 5 s ran out"}
            attempt.on_event(
                node, Event("leaving", node.name, time=time.monotonic(), fields=event_fields)
            )
        await fleet.close()
        return attempt._failures

    failures = asyncio.run(asyncio.wait_for(scene(), 20))
    assert [failure.kind for failure in failures] == ["lease", "lease"]
    first = failure_analysis.first_failure(
        failure_analysis.attribute_launcher_pause(failures, 14.0, 5.0)
    )
    assert first.kind == "launcher"


def test_silent_host_is_awaited_before_lost_connection_is_blamed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks of other hosts notice at once that a host's processes ended, the launcher later."""
    monkeypatch.setattr(failure_analysis, "ECHO_DELAY_S", 0.3)
    monkeypatch.setattr(fleet_module, "MAX_BEAT_S", 0.1)
    plan: Any = Mock(nodes=[make_part("n1", 0), make_part("n2", 1)], master_port=1, attempt=0)

    async def scene() -> Result:
        lost = FakeAgent("n2")
        fleet, _, _ = make_fleet(FakeAgent("n1"), lost, lease_s=4.0)
        fleet.on_lost = lambda node, reason: attempt.node_lost(node, reason)
        interrupts = Mock(received=[], wait=lambda *_: asyncio.sleep(60))
        job = Job("a", ENTRY, "/", "python3")
        attempt = Attempt(plan, job, fleet, interrupts, Mock(), Mock(), RetryPolicy(),
                          Mock(redials=False))  # fmt: skip
        fleet.nodes[1].running = True
        await asyncio.sleep(0.2)
        lost.silent = lost.is_broken = True
        headline = "RuntimeError: Read error [10.0.0.2]:13483: Connection reset by peer"
        attempt.fail(Failure("exception", "n1", 0, time.monotonic(), headline=headline))
        attempt.fail(Failure("exit", "n1", 0, time.monotonic(), code=1, headline="exit status 1"))
        result = await attempt._stop_on_failure()
        await fleet.close()
        return result

    result = asyncio.run(asyncio.wait_for(scene(), 20))
    assert result.failure is not None
    assert (result.failure.kind, result.failure.host) == ("lost", "n2")
    assert "the connection to n2 ended" in result.failure.headline


def test_error_in_recovery_ends_attempt() -> None:
    """Otherwise, the ranks would wait, and the error would appear only after they ended."""
    plan: Any = Mock(nodes=[make_part("n1", 0)], master_port=1, attempt=0)

    async def scene() -> None:
        fleet, _, _ = make_fleet(FakeAgent("n1"), lease_s=5.0)
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


def test_departing_node_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeated requests count once, and not at all after the node has been replaced."""
    monkeypatch.setattr(recovery_module, "SCHEDULER_SPREAD_S", 0.01)
    ranks = [SimpleNamespace(host=f"n{n}", ranks=[SimpleNamespace(rank=n - 1)]) for n in (1, 2)]
    plan: Any = SimpleNamespace(
        nodes=ranks, master_addr="127.0.0.1", master_port=1, closed_store=False
    )

    async def scene() -> None:
        fleet, _, _ = make_fleet(FakeAgent("n1"), FakeAgent("n2"), lease_s=5.0)
        members = Members({0: "n1", 1: "n2"})
        for slot in (0, 1):
            members.set_recoverable(slot, True)
        recovery = make_recovery(plan, members, fleet, fail=failed.append)

        async def asked(*nodes: Node) -> list[str]:
            for node in [*nodes, *nodes]:
                reason = Failure("signal", node.name, None, signal=15, headline="asked to end")
                assert recovery.release(node, reason)
            await asyncio.sleep(0.2)
            return [failure.kind for failure in failed]

        assert await asked(fleet.nodes[1]) == []
        assert fleet.nodes[1].loss_reason == "asked to end"
        assert recovery.departing_nodes == [fleet.nodes[1]]
        for host, lost in (("n3", "n2"), ("n4", "n3")):
            fleet.replace_node(fleet.add(FakeAgent(host)), lost)  # type: ignore[arg-type]
            assert recovery.departing_nodes == []
            part: Any = SimpleNamespace(host=host, ranks=ranks[1].ranks)
            recovery._add_part(part)
            if host == "n3":
                assert await asked(fleet.nodes[1]) == []
        assert await asked(*fleet.nodes) == ["signal", "signal"]
        await fleet.close()

    failed: list[Failure] = []
    asyncio.run(asyncio.wait_for(scene(), 10))


class DelayedTransport:
    """A transport on which each host answers after a delay, or always refuses."""

    redials = True

    def __init__(self, **seconds: float | None) -> None:
        self._seconds = seconds

    async def open(self, hosts: Any, pythons: Any) -> list[Any]:
        seconds = self._seconds[hosts[0].name]
        await asyncio.sleep(seconds or 0)
        if seconds is None:
            raise ConnectError("cannot log in", found=f"no route: {hosts[0].name}: off")
        return [FakeAgent(hosts[0].name)]


class FlakyTransport(DelayedTransport):
    """A transport on which each host refuses this many times."""

    async def open(self, hosts: Any, pythons: Any) -> list[Any]:
        name = hosts[0].name
        if remaining := self._seconds.get(name):
            self._seconds[name] = remaining - 1
            raise ConnectError("cannot log in", found=f"no route: {name}: off")
        return [FakeAgent(name)]


def connect_hosts(
    transport: Any, min_count: int, timeout_s: float, *names: str, **options: Any
) -> Any:
    notes: list[str] = []
    hosts = [Host(name) for name in names]
    outcome = asyncio.run(connect_module.connect_enough(
        transport, hosts, ["python3"] * len(hosts), min_count, timeout_s, notes.append,
        **options))  # fmt: skip
    return [channel.host.name for channel in outcome[0]], outcome[1], notes


def test_starts_with_reachable_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect_module, "STRAGGLER_WAIT_S", 0.4)
    reachable, missing, notes = connect_hosts(
        DelayedTransport(n1=0, n2=None, n3=0.2), 1, 9, "n1", "n2", "n3"
    )
    assert reachable == ["n1", "n3"]
    assert missing == {"n2": "no route: n2: off"}
    assert not notes
    assert connect_hosts(DelayedTransport(n1=0, n2=9), 1, 9, "n1", "n2")[:2] == (["n1"], {"n2": ""})


def test_host_connected_during_import_joins_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The launcher waits for a pending login, without a second attempt, but not for a dead host."""
    monkeypatch.setattr(connect_module, "STRAGGLER_WAIT_S", 0.1)
    monkeypatch.setattr(driver_module, "fork_servers_up", AsyncMock())
    opened: list[str] = []

    class CountingTransport(DelayedTransport):
        redials = True

        async def open(self, hosts: Any, pythons: Any) -> list[Any]:
            opened.append(hosts[0].name)
            return await super().open(hosts, pythons)

    @dataclass(frozen=True)
    class FakePlan:
        hosts: tuple[str, ...]
        notes: tuple[str, ...] = ()
        master_addr: str = LOOPBACK.address
        settings: Any = field(default_factory=lambda: {"master_port": Setting(1)})
        to_json: Any = dict

    def plan_of(request: Any, fleet: Fleet, *_: Any) -> Any:
        return FakePlan(tuple(node.name for node in fleet.nodes))

    monkeypatch.setattr(driver_module.survey, "plan_of", plan_of)
    transport: Any = CountingTransport(n1=0, n2=0.3, n3=60)

    async def scene() -> Any:
        dialers: list[connect_module.HostDialer] = []
        hosts = [Host(name) for name in ("n1", "n2", "n3")]
        channels, missing = await connect_module.connect_enough(
            transport, hosts, ["python3"] * 3, 1, 9, notes.append, background=dialers)  # fmt: skip
        fleet = Fleet(channels, 0.5, lambda node, event: None, lambda node, reason: None)
        fleet.nodes[0].survey = HostSurvey(hosts[0], {}, LOOPBACK)
        request = make_request(elastic_job("1:3"), transport, *transport._seconds)
        driver, reconnector = make_driver(request, fleet, notes)
        driver.missing = missing
        for dialling in dialers:
            reconnector.follow(dialling)
        await next(dialling.task for dialling in dialers if dialling.host.name == "n2")
        planned: Any = FakePlan(("n1",), ("a note",))
        plan = await driver._add_ready_hosts(planned)
        await reconnector.close()
        await fleet.close()
        return plan

    notes: list[str] = []
    plan = asyncio.run(asyncio.wait_for(scene(), 20))
    assert (plan.hosts, plan.notes) == (("n1", "n2"), ("a note",))
    assert opened == ["n1", "n2", "n3"]


@pytest.mark.parametrize(("waits", "announced"), [(True, ""), (False, "rank 0 waits")])
def test_regrouping_ranks_are_not_reported_as_hung(waits: bool, announced: str) -> None:
    attempt: Any = Attempt.__new__(Attempt)
    attempt._recorder, attempt._screen = Mock(), Mock()
    attempt._members = Mock(is_regrouping=waits)
    attempt._show_state([], "rank 0 waits")
    assert attempt._recorder.run_state.hang == announced


def test_state_is_written_while_waiting_for_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No attempt writes the state at this time, and ``paceline status`` reads the file."""
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


def test_waits_for_minimum_number_of_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    reported_waits = list[NodeWait]()
    with pytest.raises(ConnectError, match="1 host can be reached, at least 2 are needed: n2") as e:
        connect_hosts(DelayedTransport(n1=0, n2=None), 2, 0.5, "n1", "n2")
    assert "n2: no route: n2: off" in e.value.found
    monkeypatch.setattr(connect_module, "PAUSES_S", (0.2,))
    reachable, _, notes = connect_hosts(
        FlakyTransport(n2=2), 2, 9, "n1", "n2", on_wait=reported_waits.append
    )
    assert reachable == ["n1", "n2"]
    text = "1 host of at least 2: waiting up to 9 s for n2 (no route: n2: off)"
    assert notes == [f"paceline: {text}"]
    assert [(one.text, round(one.until - one.since)) for one in reported_waits] == [(text, 9)]
    start_time = time.monotonic()
    with pytest.raises(ConnectError) as exc_info:
        connect_hosts(DelayedTransport(n1=None), 1, 0, "n1")
    assert time.monotonic() - start_time < 5
    assert "--nnodes" in e.value.remedy
    assert "--nnodes" not in exc_info.value.remedy  # there are no fewer than one


def test_cancelled_connections_close_before_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C during connecting waits until every host is closed, however long each takes."""
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
    ("headline", "free", "announced"),
    [
        ("OSError: [Errno 28] No space left on device", 4096, "the disk of /r on n1 is still full"),
        ("OSError: [Errno 28] No space left on device", 1 << 30, ""),
        (
            "RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598",
            4096,
            "the disk of /r on n1 is still full",
        ),
        ("ValueError: boom", 4096, ""),
    ],
)
def test_no_restart_while_disk_is_full(headline: str, free: int, announced: str) -> None:
    class FullDiskAgent(FakeAgent):
        async def request(self, op: str, **fields: Any) -> dict[str, Any]:
            if op == "disk":
                return {"disks": [{"path": "/r", "free": free}]}
            return await super().request(op, **fields)

    async def scene() -> str:
        fleet, _, _ = make_fleet(FullDiskAgent("n1"))
        reason = await full_disk(fleet, Failure("exception", "n1", 0, 0.0, headline=headline))
        await fleet.close()
        return reason

    reason = asyncio.run(scene())
    assert reason.startswith(announced)
    assert bool(reason) == bool(announced)


def card(name: str, *addresses: str) -> dict[str, Any]:
    own = [{"address": one, "family": 4, "prefix": 24, "usable": True,
            "scope": "link" if ":" in one else "global"} for one in addresses]  # fmt: skip
    return {"name": name, "kind": "hardware", "state": "up", "speed": 1000, "addresses": own}


def test_fleet_addresses_require_interfaces_of_nodes() -> None:
    async def scene() -> None:
        one, other = FakeAgent("n1"), FakeAgent("n2")
        one.facts = {"interfaces": [card("eth0", "10.0.0.5", "fe80::5"), card("eth1", "10.9.0.5")]}
        other.facts = {"interfaces": [card("eth0", "10.0.0.6")]}
        fleet, _, _ = make_fleet(one, other, lease_s=5.0)
        assert fleet.addresses() == "10.0.0.5,10.9.0.5,10.0.0.6"
        assert fleet.addresses("10.7.0.0/16") == "+10.7.0.0/16,10.0.0.5,10.9.0.5,10.0.0.6"
        other.facts = {"interfaces": None}
        assert fleet.addresses("10.7.0.0/16") == ""
        await fleet.close()

    asyncio.run(asyncio.wait_for(scene(), 10))


def test_no_restart_on_connection_from_stranger() -> None:
    job = Job(
        "a", ENTRY, "/", "python3", max_restarts=Setting(3), nnodes=Setting(parse_node_count("1:2"))
    )

    async def scene() -> None:
        notes: list[str] = []
        fleet, _, _ = make_fleet(FakeAgent("n1"), FakeAgent("n2"), lease_s=5.0)
        request = make_request(job, RedialTransport(can_reconnect=True), "n1", "n2")
        driver, _ = make_driver(request, fleet, notes)
        stranger = Event("stranger", "n1", 0, 1.0, {"address": "10.0.0.9"})
        failure = failure_analysis.failure_of(stranger, 10.0)
        assert failure is not None
        assert failure.status == 1
        assert "connection with 10.0.0.9, which is not one of this job's hosts" in failure.headline
        assert not await driver.may_restart(failure, [], 1.0, StartupTracker(job))
        assert "not started again" in notes[0]
        await fleet.close()

    asyncio.run(asyncio.wait_for(scene(), 10))
