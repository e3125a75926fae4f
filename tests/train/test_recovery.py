"""Ranks are lost, and the others end with the parameters of a training that nothing befell."""

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
import ranks

from paceline.train.comms import Comms
from paceline.train.elastic import control as control_module
from paceline.train.elastic import job_group, recovery, waits
from paceline.train.elastic.connections import GlooConnections
from paceline.train.elastic.control import RegroupMessage
from paceline.train.world import World


def recovery_of(comms: Comms, control: Any) -> recovery.Recovery:
    """A rank's part in recoveries, without a training."""
    made = recovery.Recovery(0, comms, control, group_of(control))
    made.training = cast(Any, SimpleNamespace(step=0, event=lambda *_, **__: None))
    return made


def group_of(control: Any) -> job_group.JobGroup:
    """A group that is never formed."""
    return job_group.JobGroup(control, GlooConnections(), lambda *_: None)


SCRIPT = str(Path(__file__).with_name("losing.py"))
STEPS = 24
# trainings by their way, ranks, and who dies when
MOMENTS: list[list[Any]] = [
    *(["plain", 3, [[1, moment, 7]]] for moment in ("given", "forward", "stepped")),
    ["plain", 3, [[0, "forward", 12]]],
    ["plain", 3, [[2, "evaluating 1", 12]]],
]
SEVERAL: list[list[Any]] = [
    ["plain", 2, [[0, "forward", 9]]],
    ["plain", 4, [[0, "forward", 7], [2, "forward", 7]]],
    ["plain", 4, [[3, "forward", 7], [1, "given", 8]]],
]
SAVING: list[list[Any]] = [
    ["plain", 3, [[0, "saving", STEPS]]],
    ["disks apart", 2, [[0, "saving", STEPS]]],
]
ONCE = ["grouped", 4, [[0, "making", 6], [2, "waiting", 12]]]
STEPS_OF: dict[str, list[Any]] = {
    way: [way, 3, [[1, "forward", 7], [0, "stepped", 9]]]
    for way in ("accumulated", "unused", "buffers", "two models", "coded", "shared", "grouped")
}
APART: list[list[Any]] = [
    ["local", 3, []],
    *(["local", 3, [[1, "forward", 3]], which] for which in ("once", "again")),
    ["local", 3, [[2, "forward", 3], [1, "meeting", 10]]],
    ["local", 3, [[0, "meeting", STEPS]]],
    ["local", 2, [[0, "forward", 1]]],
    ["local", 4, [[0, "evaluating 1", 12], [2, "given", 13]]],
    ["local, behind", 3, [[1, "given", 8]]],
]
Trial = tuple[dict[str, Any], dict[str, Any], int]  # what became of it, of one alone, and its ranks


@pytest.fixture(scope="module")
def struck(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Trial]:
    """All trainings of which ranks die at a certain moment: one process imports torch for them."""
    every = [*MOMENTS, *SEVERAL, *SAVING, ONCE, *APART, *STEPS_OF.values()]
    found = trials(tmp_path_factory.mktemp("struck"), "at", every)
    return {json.dumps(one): trial for one, trial in zip(every, found, strict=True)}


def trials(folder: Path, what: str, every: list[list[Any]]) -> list[Trial]:
    """What became of these trainings, each beside an undisturbed one of the same way."""
    ended = ranks.run_script([SCRIPT, str(folder), what, *map(json.dumps, every)], folder)
    results = [json.loads(line) for line in ended.out.splitlines() if line.startswith("{")]
    assert len(results) == len(every), ended.err[-3000:]
    alone = {way: json.loads((folder / f"alone-{way}.json").read_text()) for way, *_ in every}
    return [(one, alone[way], size) for one, (way, size, *_) in zip(results, every, strict=True)]


def check(result: dict[str, Any], alone: dict[str, Any], *, at_any_moment: bool = False) -> None:
    """Who was not lost has ended well, with the same numbers, and no step done twice."""
    logs = "\n".join(f"-- {slot}\n{text}" for slot, text in result["logs"].items())
    assert set(result["statuses"]) <= {0, -9}, logs
    near = 1e-10
    living = [str(slot) for slot, status in enumerate(result["statuses"]) if not status]
    assert living == list(result["found"])
    for found in result["found"].values():
        assert found["done"] == list(range(1, STEPS + 1)), logs
        off = max(abs(a - b) for a, b in zip(found["end"], alone["end"], strict=True))
        assert off < near, logs
        means = zip(found.get("means", []), alone.get("means", []), strict=True)
        for (count, mean), (whole, expected) in means:
            # what a rank had measured is gone when it dies between its last batch and the result
            assert count == whole or (at_any_moment and count < whole)
            assert count < whole or abs(mean - expected) < near


def test_the_others_train_on_from_wherever_a_rank_dies(struck: Mapping[str, Trial]) -> None:
    for one in MOMENTS:
        result, alone, _ = struck[json.dumps(one)]
        check(result, alone)
        assert len(result["found"]) == 2
        assert [one["generation"] for one in result["regrouped"]] == [1, 1]
        assert all(one["able"] for one in result["recoverable"])
        print(f"no step for {result['gap']:.3f} s")


@pytest.mark.parametrize("one", SEVERAL)
def test_several_may_die(struck: Mapping[str, Trial], one: list[Any]) -> None:
    result, alone, size = struck[json.dumps(one)]
    check(result, alone)
    assert len(result["found"]) == size - len(one[2])


@pytest.mark.parametrize("one", SAVING)
def test_another_writes_the_model_when_who_writes_it_dies(
    struck: Mapping[str, Trial], one: list[Any]
) -> None:
    """Whole, once, beside all that was kept with the run; half a file is not in its way."""
    result, alone, _ = struck[json.dumps(one)]
    check(result, alone)
    assert len(result["saved"]) == 1
    where = "run1" if one[0] == "disks apart" else "run"
    assert result["kept"][where] == ["config.json", "model.safetensors"]


def test_what_is_made_once_is_made_by_another_when_its_maker_dies(
    struck: Mapping[str, Trial],
) -> None:
    """Also where somebody dies who waits for it; nothing that is half made is left."""
    result, alone, _ = struck[json.dumps(ONCE)]
    check(result, alone)
    for found in result["found"].values():
        assert found["made"] == ["made-12", "made-18", "made-24", "made-6"]


@pytest.mark.parametrize("way", STEPS_OF)
def test_whatever_a_step_consists_of(struck: Mapping[str, Trial], way: str) -> None:
    """Somebody is lost in a step, then of the other two the one that speaks for the job."""
    result, alone, _ = struck[json.dumps(STEPS_OF[way])]
    check(result, alone)
    assert list(result["found"]) == ["2"]


@pytest.mark.parametrize("one", APART)
def test_ranks_that_step_apart_go_on_from_where_each_is(
    struck: Mapping[str, Trial], one: list[Any]
) -> None:
    """At the end they are together, no worse than if nobody had been lost."""
    result, _, size = struck[json.dumps(one)]
    calm = struck[json.dumps(APART[0])][0]["found"]["0"]
    logs = "\n".join(f"-- {slot}\n{text}" for slot, text in result["logs"].items())
    assert sorted(result["statuses"]) == [-9] * len(one[2]) + [0] * (size - len(one[2])), logs
    first, *others = result["found"].values()
    for found in (first, *others):
        assert found["done"] == list(range(1, STEPS + 1)), logs
        assert found["end"] == first["end"], logs
    assert first["loss"] < 1.05 * calm["loss"], logs


def test_what_ranks_apart_come_to_follows_from_who_was_lost_when(
    struck: Mapping[str, Trial],
) -> None:
    once, again = (struck[json.dumps(one)][0]["found"] for one in APART[1:3])
    assert once["0"]["end"] == again["0"]["end"]


def test_who_waits_for_a_frozen_rank_is_freed(tmp_path: Path) -> None:
    """No connection of a stopped process ends by itself: the others' are cut from inside."""
    ((result, alone, _),) = trials(tmp_path, "frozen", [["plain", 3, 2, 0.02]])
    check(result, alone)
    assert len(result["found"]) == 2
    assert len(result["regrouped"]) == 2


def test_who_waits_for_the_rest_of_a_message_is_freed(tmp_path: Path) -> None:
    """gloo has forgotten it when its connection ends, whether a part had come or had been sent."""
    script = str(Path(__file__).with_name("giving.py"))
    (ended,) = ranks.run_ok(1, [script, str(tmp_path)], tmp_path)
    found = [json.loads(line) for line in ended.out.splitlines() if line.startswith("[")]
    assert len(found) == 6
    assert not [one for one in found if one[2] is None]


def test_a_thread_of_gloos_that_is_woken_for_good_rests_once_its_connection_is_cut(
    tmp_path: Path,
) -> None:
    """Else it takes a CPU from the training, which goes on in a new group."""
    script = str(Path(__file__).with_name("resting.py"))
    ranks.run_ok(2, [script, str(tmp_path)], tmp_path)
    names, *found = json.loads((tmp_path / "0.json").read_text())
    assert names == ["gloo_tcp_loop", "pt_gloo_runloop"]
    assert found == [True, True, True, []]


def test_the_connection_to_the_store_is_cut_but_nobody_closes_it() -> None:
    """Who waits in vain gives up when gloo has closed all of its own."""
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
            with links.tracked(2):  # the next group, while the first one's store is still held
                after = socket.create_connection(server.getsockname())
                links.note_store()
                two = socket.create_connection(server.getsockname())
            with after, server.accept()[0], server.accept()[0]:
                links.shut_down()
                assert not links.all_closed()
                two.close()
                assert links.all_closed()


def test_what_a_short_break_swallowed_is_sent_again_soon() -> None:
    """The kernel's pause does not double on connections of a group."""
    links = GlooConnections()
    with socket.create_server(("127.0.0.1", 0)) as server:
        with links.tracked(2):
            one = socket.create_connection(server.getsockname())
        with one, server.accept()[0] as other:
            assert one.getsockopt(socket.IPPROTO_TCP, 16) == 1  # TCP_THIN_LINEAR_TIMEOUTS
            assert other.getsockopt(socket.IPPROTO_TCP, 16) == 0
            one.sendall(b"x")
            assert other.recv(1) == b"x"


def test_only_connections_of_the_group_are_cut() -> None:
    """Not what has got the number of one that has ended."""
    links, (here, there) = GlooConnections(), socket.socketpair()
    with links.tracked(2):
        (one, other), (gone, end) = socket.socketpair(), socket.socketpair()
    os.dup2(here.fileno(), gone.fileno())
    numbers = Path("/proc/self/fd")
    open_before = len([*numbers.iterdir()])
    links.shut_down()
    assert len([*numbers.iterdir()]) == open_before
    here.send(b"x")
    assert (there.recv(1), other.recv(1)) == (b"x", b"")
    for each in (here, there, one, other, gone, end):
        each.close()


def test_a_socket_that_begins_to_listen_meanwhile_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gloo's thread ends the process when it cannot accept."""
    links, early, real = GlooConnections(), [], socket.socket

    class Slow(real):  # type: ignore[misc, valid-type]
        def getsockopt(self, *what: int) -> Any:
            found = super().getsockopt(*what)
            while early:
                early.pop().listen()
            return found

    with links.tracked(2), real() as gloos:
        gloos.bind(("127.0.0.1", 0))
        early.append(gloos)
        monkeypatch.setattr("paceline.train.elastic.connections.socket.socket", Slow)
        links.shut_down()
        monkeypatch.undo()
        assert not early
        gloos.settimeout(60)
        with socket.create_connection(gloos.getsockname()):
            gloos.accept()[0].close()


def test_who_makes_a_group_in_which_another_is_lost_is_freed(tmp_path: Path) -> None:
    """Also where it waits for a connection that the other one was to make."""
    script = str(Path(__file__).with_name("waiting.py"))
    ranks.run_ok(1, [script, str(tmp_path)], tmp_path)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [len(one) for one in found] == [6, 6]
    assert max(max(one) for one in found) < 35  # where it is not freed: 40


def test_ranks_meet_after_some_of_them_had_begun_a_group_in_vain(tmp_path: Path) -> None:
    """One leaves before it has begun to make it, the other waits there for the first."""
    ranks.run_ok(1, [str(Path(__file__).with_name("forming.py")), str(tmp_path)], tmp_path)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert found == [["Superseded", [[0], [1]]], ["not made", [[0], [1]]]]


def test_nobody_is_through_with_an_operation_before_all_have_come_to_it(tmp_path: Path) -> None:
    """Else two ranks could be two apart, and nobody would know any more what the third had."""
    script = str(Path(__file__).with_name("passing.py"))
    ranks.run_ok(1, [script, str(tmp_path)], tmp_path)
    first, late = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert len(first) == 18
    assert not [name for name, (_, through) in first.items() if through < late[name][0]]


def test_ranks_die_at_any_moment(tmp_path: Path) -> None:
    """Of a step, an evaluation or a recovery; where ranks end before, nobody is killed."""
    ways = ["plain", "accumulated", "two models", "buffers"]
    every = [[ways[seed % 4], 2 + seed % 3, seed] for seed in range(100, 104)]
    lost = 0
    for result, alone, _ in trials(tmp_path, "random", every):
        check(result, alone, at_any_moment=True)
        lost += result["statuses"].count(-9)
    assert lost > 1


@pytest.mark.parametrize("idle", [True, False])
def test_who_is_not_freed_says_so(monkeypatch: pytest.MonkeyPatch, idle: bool) -> None:
    """It does nothing in a collective whose connections are cut; who computes is waited for."""
    monkeypatch.setattr(recovery, "STUCK_S", 0.6)
    if not idle:  # a busy machine lets nobody compute for so long
        monkeypatch.setattr(waits, "_computing_s", itertools.count().__next__)
    read, write = os.pipe()
    control = control_module.Control(read, GlooConnections())
    comms = Comms(World(0, 2, 0, 2, "n1", True), torch.device("cpu"))
    one = recovery_of(comms, control)
    one.able, said, told = True, [], threading.Event()

    def say(name: str, **details: Any) -> None:
        said.append((name, details["step"]))
        told.set()

    one.training = cast(Any, SimpleNamespace(step=0, event=say))
    members = [{"slot": 0, "host": "n1", "local_rank": 0, "local_size": 1}]
    word = {"generation": 1, "members": members, "store": {"address": "n1", "port": 1}}
    os.write(write, json.dumps({**word, "planned": False}).encode() + b"\n")

    def act() -> int:
        told.wait(60 if idle else 2)
        return 7

    assert one.event(act) == 7
    assert said == ([("stuck", 0)] if idle else [])
    time.sleep(0.8)  # it is in none any more
    assert len(said) == idle
    one.generation = 1
    os.close(write)
    time.sleep(0.2)
    os.close(read)


def test_a_store_that_is_gone_is_called_until_later_word_comes() -> None:
    """The host that held it is lost, too, while the others call."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    said: list[RegroupMessage] = []
    control = cast(Any, SimpleNamespace(newer=lambda _: said[0] if said else None))
    comms = Comms(World(0, 2, 0, 2, "n1", True), torch.device("cpu"))
    one = recovery_of(comms, control)
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
    said.append(RegroupMessage(2, (), "127.0.0.1", port, planned=False))
    calls.join(15)  # a single call that waits for the store would take 20 s and more
    assert [type(error) for error in caught] == [job_group.Superseded]


def test_no_group_is_made_of_which_a_member_is_known_to_be_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Later word may come before there are connections that it could cut."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("PACELINE_ADDRESSES", "")  # which a regroup tells anew
    words = [RegroupMessage(one, ((0, "n1", 0, 1),), "127.0.0.1", 1, False) for one in (1, 2)]
    control = cast(Any, SimpleNamespace(newer=lambda than: words[1] if than < 2 else None))
    comms = Comms(World(0, 2, 0, 2, "n1", True), torch.device("cpu"))
    one = recovery_of(comms, control)
    with pytest.raises(job_group.Superseded):
        one._form(words[0])


def test_a_wait_in_the_next_group_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The look that says so may have begun before that group was made."""
    control = cast(Any, SimpleNamespace(newer=lambda _: None))
    comms = Comms(World(0, 2, 0, 2, "n1", True), torch.device("cpu"))
    one = recovery_of(comms, control)
    looked, given_up = threading.Event(), []

    def asleep() -> bool:
        looked.set()
        return True

    monkeypatch.setattr(waits, "_is_gloo_asleep", asleep)
    monkeypatch.setattr(waits, "_cancel_all", lambda: given_up.append(one.generation))
    monkeypatch.setattr(waits, "_CHECKS", 1)
    with one._forming:
        control.on_shutdown(1)
        assert looked.wait(20)
        one.generation = 1
    while any(thread.name == "paceline-give-up" for thread in threading.enumerate()):
        time.sleep(0.01)
    assert given_up == []


def test_a_wait_is_given_up_where_a_thread_of_gloos_never_sleeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It wakes again and again for the rest of a message that nobody takes."""
    control = cast(Any, SimpleNamespace(newer=lambda _: None))
    comms = Comms(World(0, 2, 0, 2, "n1", True), torch.device("cpu"))
    one = recovery_of(comms, control)
    given_up = threading.Event()
    monkeypatch.setattr(waits, "_is_gloo_asleep", lambda: False)
    monkeypatch.setattr(waits, "_cancel_all", given_up.set)
    monkeypatch.setattr(waits, "_MAX_WAIT_S", 0.2)
    control.on_shutdown(1)
    assert given_up.wait(20)
    one.generation = 1  # which ends the thread


def test_what_gloos_threads_use_of_a_cpu_is_no_computing() -> None:
    """So a rank that is held in a collective is known by it, although such a thread never rests."""
    talk, over, idle = waits.CollectiveSpan(), threading.Event(), []

    def spin() -> None:
        Path("/proc/thread-self/comm").write_text("pt_gloo_runloop")
        while not over.is_set():
            sum(range(1000))

    busy = threading.Thread(target=spin)
    busy.start()
    try:
        with talk:
            watch = threading.Thread(target=lambda: idle.append(talk.is_idle_for(1.5, over.is_set)))
            watch.start()
            watch.join(20)  # a busy machine may take more than one attempt
        assert idle == [True]
    finally:
        over.set()
        busy.join()
    before = waits._computing_s()
    sum(range(10**6))
    assert waits._computing_s() > before
