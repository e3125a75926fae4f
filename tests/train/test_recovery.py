"""Tests that, after losses, the other ranks end with the parameters of an undisturbed training."""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import local_ranks

from paceline.train.comms import Comms
from paceline.train.elastic import control as control_module
from paceline.train.elastic import job_group, recovery, waits
from paceline.train.elastic.connections import GlooConnections
from paceline.train.elastic.control import RegroupMessage
from paceline.train.world import World


def make_recovery(comms: Comms, control: Any) -> recovery.Recovery:
    """Returns a rank's recovery without a training."""
    created = recovery.Recovery(0, comms, control, make_group(control))
    created.training = cast(Any, SimpleNamespace(step=0, event=lambda *_, **__: None))
    return created


def make_group(control: Any) -> job_group.JobGroup:
    """Returns a group that is never formed."""
    return job_group.JobGroup(control, GlooConnections(), lambda *_: None)


SCRIPT = str(Path(__file__).with_name("lost_rank_worlds.py"))
STEPS = 24
# way of training, number of ranks, and which slots die when
MOMENT_CASES: list[list[Any]] = [
    *(["plain", 3, [[1, moment, 7]]] for moment in ("given", "forward", "stepped")),
    ["plain", 3, [[0, "forward", 12]]],
    ["plain", 3, [[2, "evaluating 1", 12]]],
]
SEVERAL_LOSSES: list[list[Any]] = [
    ["plain", 2, [[0, "forward", 9]]],
    ["plain", 4, [[0, "forward", 7], [2, "forward", 7]]],
    ["plain", 4, [[3, "forward", 7], [1, "given", 8]]],
]
SAVING_CASES: list[list[Any]] = [
    ["plain", 3, [[0, "saving", STEPS]]],
    ["disks apart", 2, [[0, "saving", STEPS]]],
]
MAKE_ONCE_CASE = ["grouped", 4, [[0, "making", 6], [2, "waiting", 12]]]
STEP_VARIANTS: dict[str, list[Any]] = {
    variant: [variant, 3, [[1, "forward", 7], [0, "stepped", 9]]]
    for variant in ("accumulated", "unused", "buffers", "two models", "coded", "shared", "grouped")
}
LOCAL_STEP_CASES: list[list[Any]] = [
    ["local", 3, []],
    *(["local", 3, [[1, "forward", 3]], which] for which in ("once", "again")),
    ["local", 3, [[2, "forward", 3], [1, "meeting", 10]]],
    ["local", 3, [[0, "meeting", STEPS]]],
    ["local", 2, [[0, "forward", 1]]],
    ["local", 4, [[0, "evaluating 1", 12], [2, "given", 13]]],
    ["local, behind", 3, [[1, "given", 8]]],
]
Trial = tuple[dict[str, Any], dict[str, Any], int]  # result, undisturbed result, number of ranks


@pytest.fixture(scope="module")
def trials_by_case(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Trial]:
    """Runs all trainings whose ranks die at given moments; one process imports torch for them."""
    cases = [
        *MOMENT_CASES,
        *SEVERAL_LOSSES,
        *SAVING_CASES,
        MAKE_ONCE_CASE,
        *LOCAL_STEP_CASES,
        *STEP_VARIANTS.values(),
    ]
    found = trials(tmp_path_factory.mktemp("struck"), "at", cases)
    return {json.dumps(one): trial for one, trial in zip(cases, found, strict=True)}


def trials(folder: Path, what: str, cases: list[list[Any]]) -> list[Trial]:
    """Runs trainings with losses; returns their results beside those of undisturbed trainings."""
    ended = local_ranks.run_script([SCRIPT, str(folder), what, *map(json.dumps, cases)], folder)
    results = [json.loads(line) for line in ended.out.splitlines() if line.startswith("{")]
    assert len(results) == len(cases), ended.err[-3000:]
    reference = {
        variant: json.loads((folder / f"alone-{variant}.json").read_text()) for variant, *_ in cases
    }
    return [
        (one, reference[variant], size)
        for one, (variant, size, *_) in zip(results, cases, strict=True)
    ]


def check(
    result: dict[str, Any], reference: dict[str, Any], *, at_any_moment: bool = False
) -> None:
    """Checks that remaining ranks succeeded with the same numbers, and repeated no step."""
    logs = "\n".join(f"-- {slot}\n{text}" for slot, text in result["logs"].items())
    assert set(result["statuses"]) <= {0, -9}, logs
    tolerance = 1e-10
    survivors = [str(slot) for slot, status in enumerate(result["statuses"]) if not status]
    assert survivors == list(result["found"])
    for found in result["found"].values():
        assert found["done"] == list(range(1, STEPS + 1)), logs
        difference = max(abs(a - b) for a, b in zip(found["end"], reference["end"], strict=True))
        assert difference < tolerance, logs
        means = zip(found.get("means", []), reference.get("means", []), strict=True)
        for (count, mean), (expected_count, expected) in means:
            # a rank that dies between its last batch and the result takes its measurements with it
            assert count == expected_count or (at_any_moment and count < expected_count)
            assert count < expected_count or abs(mean - expected) < tolerance


def test_remaining_ranks_continue_from_any_moment(trials_by_case: Mapping[str, Trial]) -> None:
    for one in MOMENT_CASES:
        result, reference, _ = trials_by_case[json.dumps(one)]
        check(result, reference)
        assert len(result["found"]) == 2
        assert [one["generation"] for one in result["regrouped"]] == [1, 1]
        assert all(one["able"] for one in result["recoverable"])
        print(f"no step for {result['gap']:.3f} s")


@pytest.mark.parametrize("one", SEVERAL_LOSSES)
def test_survives_several_losses(trials_by_case: Mapping[str, Trial], one: list[Any]) -> None:
    result, reference, size = trials_by_case[json.dumps(one)]
    check(result, reference)
    assert len(result["found"]) == size - len(one[2])


@pytest.mark.parametrize("one", SAVING_CASES)
def test_other_rank_saves_model_if_writer_dies(
    trials_by_case: Mapping[str, Trial], one: list[Any]
) -> None:
    """It is complete, written once, beside the run's other files; a partial one does no harm."""
    result, reference, _ = trials_by_case[json.dumps(one)]
    check(result, reference)
    assert len(result["saved"]) == 1
    where = "run1" if one[0] == "disks apart" else "run"
    assert result["kept"][where] == ["config.json", "model.safetensors"]


def test_other_rank_makes_file_if_maker_dies(
    trials_by_case: Mapping[str, Trial],
) -> None:
    """Also if a rank that waits for it dies; no partial file is left."""
    result, reference, _ = trials_by_case[json.dumps(MAKE_ONCE_CASE)]
    check(result, reference)
    for found in result["found"].values():
        assert found["made"] == ["made-12", "made-18", "made-24", "made-6"]


@pytest.mark.parametrize("variant", STEP_VARIANTS)
def test_recovers_from_losses_in_each_kind_of_step(
    trials_by_case: Mapping[str, Trial], variant: str
) -> None:
    """A rank is lost in a step, then the rank of the other two that reports for the job."""
    result, reference, _ = trials_by_case[json.dumps(STEP_VARIANTS[variant])]
    check(result, reference)
    assert list(result["found"]) == ["2"]


@pytest.mark.parametrize("one", LOCAL_STEP_CASES)
def test_local_step_ranks_continue_from_their_positions(
    trials_by_case: Mapping[str, Trial], one: list[Any]
) -> None:
    """At the end, their parameters are equal, and the loss is no worse than without losses."""
    result, _, size = trials_by_case[json.dumps(one)]
    undisturbed = trials_by_case[json.dumps(LOCAL_STEP_CASES[0])][0]["found"]["0"]
    logs = "\n".join(f"-- {slot}\n{text}" for slot, text in result["logs"].items())
    assert sorted(result["statuses"]) == [-9] * len(one[2]) + [0] * (size - len(one[2])), logs
    first, *remaining = result["found"].values()
    for found in (first, *remaining):
        assert found["done"] == list(range(1, STEPS + 1)), logs
        assert found["end"] == first["end"], logs
    assert first["loss"] < 1.05 * undisturbed["loss"], logs


def test_local_step_recovery_is_deterministic(
    trials_by_case: Mapping[str, Trial],
) -> None:
    first_order, second_order = (
        trials_by_case[json.dumps(one)][0]["found"] for one in LOCAL_STEP_CASES[1:3]
    )
    assert first_order["0"]["end"] == second_order["0"]["end"]


def test_ranks_waiting_for_frozen_rank_are_freed(tmp_path: Path) -> None:
    """A stopped process keeps its connections open, so the other ranks cut them."""
    ((result, reference, _),) = trials(tmp_path, "frozen", [["plain", 3, 2, 0.02]])
    check(result, reference)
    assert len(result["found"]) == 2
    assert len(result["regrouped"]) == 2


def test_ranks_waiting_for_partial_message_are_freed(tmp_path: Path) -> None:
    """gloo forgets the message when its connection ends, whether a part was received or sent."""
    script = str(Path(__file__).with_name("frozen_peers.py"))
    (ended,) = local_ranks.run_ok(1, [script, str(tmp_path)], tmp_path)
    found = [json.loads(line) for line in ended.out.splitlines() if line.startswith("[")]
    assert len(found) == 6
    assert not [one for one in found if one[2] is None]


def test_gloo_thread_stops_spinning_on_shutdown(
    tmp_path: Path,
) -> None:
    """Otherwise it takes CPU time from the training, which continues in a new group."""
    script = str(Path(__file__).with_name("full_receiver.py"))
    local_ranks.run_ok(2, [script, str(tmp_path)], tmp_path)
    names, *found = json.loads((tmp_path / "0.json").read_text())
    assert names == ["gloo_tcp_loop", "pt_gloo_runloop"]
    assert found == [True, True, True, []]


def test_store_connection_is_shut_down_but_not_closed() -> None:
    """A rank that waits for the store gives up when gloo has closed all of its own connections."""
    links = GlooConnections()
    with socket.create_server(("127.0.0.1", 0)) as server:
        with links.tracked(2):
            store = socket.create_connection(server.getsockname())
            links.note_store()
            one = socket.create_connection(server.getsockname())
        with store, server.accept()[0], server.accept()[0]:
            links.shut_down()
            assert store.recv(1) == b""
            assert not links.all_closed()
            one.close()
            assert links.all_closed()
            with links.tracked(2):  # the next group, while the first group's store is still open
                second_store = socket.create_connection(server.getsockname())
                links.note_store()
                second_socket = socket.create_connection(server.getsockname())
            with second_store, server.accept()[0], server.accept()[0]:
                links.shut_down()
                assert not links.all_closed()
                second_socket.close()
                assert links.all_closed()


def test_group_connections_use_linear_tcp_timeouts() -> None:
    """The kernel's retransmission timeout does not double on a group's connections."""
    links = GlooConnections()
    with socket.create_server(("127.0.0.1", 0)) as server:
        with links.tracked(2):
            one = socket.create_connection(server.getsockname())
        with one, server.accept()[0] as peer:
            assert one.getsockopt(socket.IPPROTO_TCP, 16) == 1  # TCP_THIN_LINEAR_TIMEOUTS
            assert peer.getsockopt(socket.IPPROTO_TCP, 16) == 0
            one.sendall(b"x")
            assert peer.recv(1) == b"x"


def test_shuts_down_only_group_connections() -> None:
    """A connection that reuses the descriptor of a closed one is not cut."""
    links, (open_socket, open_peer) = GlooConnections(), socket.socketpair()
    with links.tracked(2):
        (one, peer), (closed_socket, end) = socket.socketpair(), socket.socketpair()
    os.dup2(open_socket.fileno(), closed_socket.fileno())
    numbers = Path("/proc/self/fd")
    open_before = len([*numbers.iterdir()])
    links.shut_down()
    assert len([*numbers.iterdir()]) == open_before
    open_socket.send(b"x")
    assert (open_peer.recv(1), peer.recv(1)) == (b"x", b"")
    for connection in (open_socket, open_peer, one, peer, closed_socket, end):
        connection.close()


def test_shutdown_spares_socket_that_starts_listening(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gloo's thread aborts the process if it cannot accept."""
    links, pending, real_socket = GlooConnections(), [], socket.socket

    class SlowSocket(real_socket):  # type: ignore[misc, valid-type]
        def getsockopt(self, *what: int) -> Any:
            found = super().getsockopt(*what)
            while pending:
                pending.pop().listen()
            return found

    with links.tracked(2), real_socket() as gloo_listener:
        gloo_listener.bind(("127.0.0.1", 0))
        pending.append(gloo_listener)
        monkeypatch.setattr("paceline.train.elastic.connections.socket.socket", SlowSocket)
        links.shut_down()
        monkeypatch.undo()
        assert not pending
        gloo_listener.settimeout(60)
        with socket.create_connection(gloo_listener.getsockname()):
            gloo_listener.accept()[0].close()


def test_rank_forming_group_with_lost_peer_is_freed(tmp_path: Path) -> None:
    """Also if it waits for a connection that the lost rank was to make."""
    script = str(Path(__file__).with_name("blocked_groups.py"))
    local_ranks.run_ok(1, [script, str(tmp_path)], tmp_path)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [len(one) for one in found] == [6, 6]
    assert max(max(one) for one in found) < 35  # 40 if it is not released


def test_ranks_regroup_when_forming_was_superseded(tmp_path: Path) -> None:
    """One leaves before it starts to form the group; the other waits in it for the first."""
    local_ranks.run_ok(
        1, [str(Path(__file__).with_name("failed_groups.py")), str(tmp_path)], tmp_path
    )
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert found == [["Superseded", [[0], [1]]], ["not made", [[0], [1]]]]


def test_operation_ends_only_when_all_ranks_entered(tmp_path: Path) -> None:
    """Otherwise two ranks could be two operations apart, with a third's state unknown."""
    script = str(Path(__file__).with_name("blocking_collectives.py"))
    local_ranks.run_ok(1, [script, str(tmp_path)], tmp_path)
    first, late = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert len(first) == 18
    assert not [name for name, (_, through) in first.items() if through < late[name][0]]


def test_survives_kills_at_any_moment(tmp_path: Path) -> None:
    """In a step, an evaluation or a recovery; a job that ends earlier loses no rank."""
    variants = ["plain", "accumulated", "two models", "buffers"]
    cases = [[variants[seed % 4], 2 + seed % 3, seed] for seed in range(100, 104)]
    lost = 0
    for result, reference, _ in trials(tmp_path, "random", cases):
        check(result, reference, at_any_moment=True)
        lost += result["statuses"].count(-9)
    assert lost > 1


@pytest.mark.parametrize("idle", [True, False])
def test_stuck_rank_sends_event_unless_computing(
    monkeypatch: pytest.MonkeyPatch, idle: bool
) -> None:
    """A rank that is idle in a collective with cut connections is stuck; a busy one is not."""
    monkeypatch.setattr(recovery, "STUCK_S", 0.6)
    if not idle:  # on a busy machine, a thread may get no CPU time for this long
        monkeypatch.setattr(waits, "_computing_s", itertools.count().__next__)
    read, write = os.pipe()
    control = control_module.Control(read, GlooConnections())
    comms = Comms(World(0, 2, 0, 2, "n1", True), torch.device("cpu"))
    one = make_recovery(comms, control)
    one.able, messages, event_sent = True, [], threading.Event()

    def send_event(name: str, **details: Any) -> None:
        messages.append((name, details["step"]))
        event_sent.set()

    one.training = cast(Any, SimpleNamespace(step=0, event=send_event))
    members = [{"slot": 0, "host": "n1", "local_rank": 0, "local_size": 1}]
    message = {"generation": 1, "members": members, "store": {"address": "n1", "port": 1}}
    os.write(write, json.dumps({**message, "planned": False}).encode() + b"\n")

    def blocking_call() -> int:
        event_sent.wait(60 if idle else 2)
        return 7

    assert one.event(blocking_call) == 7
    assert messages == ([("stuck", 0)] if idle else [])
    time.sleep(0.8)  # it is in no collective any more
    assert len(messages) == idle
    one.generation = 1
    os.close(write)
    time.sleep(0.2)
    os.close(read)


def test_retries_lost_store_until_superseded() -> None:
    """The host that held the store is lost, too, while the others connect."""
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    messages: list[RegroupMessage] = []
    control = cast(Any, SimpleNamespace(newer=lambda _: messages[0] if messages else None))
    comms = Comms(World(0, 2, 0, 2, "n1", True), torch.device("cpu"))
    one = make_recovery(comms, control)
    members = (0, "n1", 0, 1), (1, "n2", 0, 1)
    first = RegroupMessage(1, members, "127.0.0.1", port, planned=False)
    caught: list[BaseException] = []

    def call() -> None:
        try:
            one.group._connect(first)
        except BaseException as error:
            caught.append(error)

    calls = threading.Thread(target=call)
    calls.start()
    calls.join(0.2)
    assert calls.is_alive()
    messages.append(RegroupMessage(2, (), "127.0.0.1", port, planned=False))
    calls.join(15)  # a single attempt that waits for the store would take 20 s and more
    assert [type(error) for error in caught] == [job_group.Superseded]


def test_superseded_group_is_not_formed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A newer message may come before there are connections that it could cut."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("PACELINE_ADDRESSES", "")  # set again by each new group
    regroup_messages = [
        RegroupMessage(one, ((0, "n1", 0, 1),), "127.0.0.1", 1, False) for one in (1, 2)
    ]
    control = cast(
        Any, SimpleNamespace(newer=lambda than: regroup_messages[1] if than < 2 else None)
    )
    comms = Comms(World(0, 2, 0, 2, "n1", True), torch.device("cpu"))
    one = make_recovery(comms, control)
    with pytest.raises(job_group.Superseded):
        one._form(regroup_messages[0])


def test_waits_of_next_group_are_not_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check that found the wait may have started before that group was formed."""
    control = cast(Any, SimpleNamespace(newer=lambda _: None))
    comms = Comms(World(0, 2, 0, 2, "n1", True), torch.device("cpu"))
    one = make_recovery(comms, control)
    checked, cancelled = threading.Event(), []

    def is_asleep() -> bool:
        checked.set()
        return True

    monkeypatch.setattr(waits, "_is_gloo_asleep", is_asleep)
    monkeypatch.setattr(waits, "_cancel_all", lambda: cancelled.append(one.generation))
    monkeypatch.setattr(waits, "_CHECKS", 1)
    with one._forming:
        control.on_shutdown(1)
        assert checked.wait(20)
        one.generation = 1
    while any(thread.name == "paceline-give-up" for thread in threading.enumerate()):
        time.sleep(0.01)
    assert cancelled == []


def test_wait_is_cancelled_if_gloo_thread_never_sleeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread wakes again and again for the rest of a message that is not received."""
    control = cast(Any, SimpleNamespace(newer=lambda _: None))
    comms = Comms(World(0, 2, 0, 2, "n1", True), torch.device("cpu"))
    one = make_recovery(comms, control)
    cancelled = threading.Event()
    monkeypatch.setattr(waits, "_is_gloo_asleep", lambda: False)
    monkeypatch.setattr(waits, "_cancel_all", cancelled.set)
    monkeypatch.setattr(waits, "_MAX_WAIT_S", 0.2)
    control.on_shutdown(1)
    assert cancelled.wait(20)
    one.generation = 1  # ends the thread


def test_gloo_thread_cpu_time_is_not_computing() -> None:
    """So a rank that is stuck in a collective is detected although such a thread is never idle."""
    span, stop, idle = waits.CollectiveSpan(), threading.Event(), []

    def spin() -> None:
        Path("/proc/thread-self/comm").write_text("pt_gloo_runloop")
        while not stop.is_set():
            sum(range(1000))

    busy = threading.Thread(target=spin)
    busy.start()
    try:
        with span:
            watch = threading.Thread(target=lambda: idle.append(span.is_idle_for(1.5, stop.is_set)))
            watch.start()
            watch.join(20)  # more than one attempt on a busy machine
        assert idle == [True]
    finally:
        stop.set()
        busy.join()
    initial_s = waits._computing_s()
    sum(range(10**6))
    assert waits._computing_s() > initial_s
