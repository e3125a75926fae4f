"""Copies of checkpoints on other hosts: what is taken, what is not, and what they are good for."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ranks

from background import eventually
from paceline.spec.errors import SettingError
from paceline.spec.rundir import MANIFEST, frozen_file
from paceline.spec.training.checkpoint_manifest import FileEntry, Manifest, sha256
from paceline.train.checkpoints import copies, receiver
from paceline.train.checkpoints.copies import (
    LINE_SHARE,
    CopyResult,
    _Peer,
    _Sender,
    num_copies,
    receiving_ranks,
    rest_seconds,
)
from paceline.train.checkpoints.format import write_chunks
from paceline.train.checkpoints.receiver import CopyChannel, CopyRefused, Receiver, send_checkpoint
from paceline.train.checkpoints.store import Store
from paceline.train.reduce.handshakes import greetings

KEY = b"k" * 32


def make(
    store: Store, step: int, size: int = 700_000, *, best: bool = False, frozen: int = 0
) -> str:
    """A checkpoint of several pieces, one empty file and one in a folder; and frozen weights."""
    made = store.temporary(step)
    entries = {}
    if frozen:
        content = b"f" * frozen
        name = frozen_file(hashlib.sha256(content).hexdigest())
        entries[name] = FileEntry(*write_chunks(made / name, iter([content])))
    for name, length in (("weights.safetensors", size), ("a/b", 3), ("empty", 0)):
        (made / name).parent.mkdir(exist_ok=True)
        content = bytes([step % 256]) * length
        entries[name] = FileEntry(*write_chunks(made / name, iter([content])))
    return store.publish(made, Manifest(step, entries, {"best": best})).name


def intact(root: Path) -> list[str]:
    found, bad = Store(root).scan()
    assert not bad
    for one in found:
        one.manifest.verify(one.path)
    assert not list(root.glob(".*.tmp"))
    return [one.path.name for one in found]


@pytest.fixture
def writer(tmp_path: Path) -> Store:
    store = Store(tmp_path / "writer")
    store.claim_token(0, "")
    return store


@pytest.fixture
def taker(tmp_path: Path) -> Iterator[Receiver]:
    one = Receiver(tmp_path / "taker", KEY, "127.0.0.1", keep=2)
    yield one
    one.close()


def offer(taker: Receiver, store: Store, name: str, *, key: bytes = KEY) -> int:
    with socket.create_connection(taker.address, 5) as connection:
        return send_checkpoint(CopyChannel.connect(connection, key), store, name, lambda _: None)


def test_a_copy_is_whole_and_pruned_as_the_original(
    tmp_path: Path, writer: Store, taker: Receiver
) -> None:
    root = tmp_path / "taker"
    for step in (10, 20, 30, 40):
        name = make(writer, step, best=step == 20)
        assert offer(taker, writer, name) == 700_003
    assert intact(root) == ["40", "30", "20"]
    assert json.loads((root / "best.json").read_text())["checkpoint"] == "20"
    assert sha256(root / "40/a/b") == sha256(writer.root / "40/a/b")
    assert offer(taker, writer, "40") == 0  # it has that


def test_a_host_of_the_job_removes_no_earlier_checkpoints(tmp_path: Path, writer: Store) -> None:
    """Each of them knows the key, so who offers something is not believed all of it."""
    root = tmp_path / "taker"
    earlier = Store(root)
    earlier.claim_token(0, "")
    for step in (10, 20, 30):
        make(earlier, step, best=step == 10)
    taker = Receiver(root, KEY, "127.0.0.1", keep=1)
    taker.token = 2
    forger = Store(tmp_path / "forger", token=2)
    offer(taker, forger, make(forger, 10**6))
    assert intact(root) == ["1000000.2", "30", "10"]  # the newest and the best that were there
    forger = Store(tmp_path / "other", token=999_999)
    with pytest.raises(CopyRefused, match="another writer"):
        offer(taker, forger, make(forger, 1))
    taker.close()


def test_frozen_weights_travel_once(tmp_path: Path, writer: Store, taker: Receiver) -> None:
    """Also where a copy is cut off and goes on; and they outlive the checkpoint they came with."""
    root, size = tmp_path / "taker", 6 * receiver.PIECE_BYTES
    assert offer(taker, writer, make(writer, 10, frozen=size)) == 700_003 + size
    (first,) = (root / "10").glob("frozen-*")
    name = make(writer, 20, frozen=size)
    for _ in range(2):
        cut_off(taker, writer, name, 2)
    assert offer(taker, writer, name) < 700_003
    assert (root / "20" / first.name).samefile(first)
    assert intact(root) == ["20", "10"]
    for step in (30, 40):
        assert offer(taker, writer, make(writer, step, frozen=size)) == 700_003
    assert intact(root) == ["40", "30"]
    assert offer(taker, writer, make(writer, 50, frozen=size + 1)) == 700_003 + size + 1


def test_strangers_are_told_nothing_and_change_nothing(
    tmp_path: Path, writer: Store, taker: Receiver
) -> None:
    name = make(writer, 10)
    with pytest.raises((OSError, CopyRefused)):
        offer(taker, writer, name, key=b"x" * 32)
    for said in (b"", b"GET / HTTP/1.1\r\n\r\n" * 3, b"\0" * 16 + b"\xff" * 4, os.urandom(4000)):
        with socket.create_connection(taker.address, 5) as connection:
            connection.settimeout(5)
            answer = b""
            with contextlib.suppress(OSError):
                connection.sendall(said)
                connection.shutdown(socket.SHUT_WR)
                while part := connection.recv(100):
                    answer += part
            assert len(answer) <= 16  # a number that it drew
    assert not (tmp_path / "taker").exists()
    assert offer(taker, writer, name) > 0


def test_silent_and_slow_callers_delay_no_copy(writer: Store, taker: Receiver) -> None:
    name = make(writer, 10)
    with contextlib.ExitStack() as opened:
        for said in (b"", b"A", b"A" * 47) * 30:  # more than greet at once
            caller = opened.enter_context(socket.create_connection(taker.address, 5))
            caller.sendall(said)
        assert offer(taker, writer, name) > 0


def test_nothing_is_read_before_a_proof(writer: Store, taker: Receiver) -> None:
    with socket.create_connection(taker.address, 5) as connection:
        connection.settimeout(5)
        connection.sendall(os.urandom(48) + (1 << 24).to_bytes(4, "big"))
        with contextlib.suppress(ConnectionError):  # it ends, and does not wait for 16 MiB
            while connection.recv(16):
                pass


@pytest.mark.parametrize("name", ["../x", "/tmp/x", "10/../../x", "11", "10.3", ".10", ""])
def test_no_other_name_is_taken(tmp_path: Path, writer: Store, taker: Receiver, name: str) -> None:
    make(writer, 10)
    raw = (writer.root / "10/manifest.json").read_text()
    with socket.create_connection(taker.address, 5) as connection:
        talk = CopyChannel.connect(connection, KEY)
        talk.send(name=name, manifest=raw, token=1)
        with pytest.raises(CopyRefused, match="no name of this checkpoint"):
            talk.receive()
    assert not (tmp_path / "taker").exists()


def test_files_stay_inside(tmp_path: Path, taker: Receiver) -> None:
    for name in ("../x", "/tmp/x", "a/../../x"):
        raw = Manifest(10, {name: FileEntry("0" * 64, 1)}, {}).encode().decode()
        with socket.create_connection(taker.address, 5) as connection:
            talk = CopyChannel.connect(connection, KEY)
            talk.send(name="10", manifest=raw, token=1)
            with pytest.raises(CopyRefused, match="is not a file of a checkpoint"):
                talk.receive()


def test_what_does_not_arrive_as_it_was_is_not_taken(
    tmp_path: Path, writer: Store, taker: Receiver
) -> None:
    name = make(writer, 10)
    path = writer.root / name / "weights.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CopyRefused, match="its hash differs"):
        offer(taker, writer, name)
    assert intact(tmp_path / "taker") == []


def cut_off(taker: Receiver, store: Store, name: str, pieces: int) -> None:
    """The connection ends after so many pieces: somebody is lost, and all meet again."""
    with socket.create_connection(taker.address, 5) as connection:

        def cut(_: float) -> None:
            nonlocal pieces
            pieces -= 1
            if not pieces:
                connection.shutdown(socket.SHUT_RDWR)

        with pytest.raises(OSError):
            send_checkpoint(CopyChannel.connect(connection, KEY), store, name, cut)


def test_a_copy_that_was_cut_off_again_and_again_comes_to_its_end(
    tmp_path: Path, writer: Store, taker: Receiver
) -> None:
    name = make(writer, 10, 6 * receiver.PIECE_BYTES)
    for _ in range(3):
        cut_off(taker, writer, name, 2)  # the first is the small file's, but for its last byte
    assert offer(taker, writer, name) < 4 * receiver.PIECE_BYTES  # one after the other
    assert intact(tmp_path / "taker") == ["10"]


def test_what_is_left_of_a_copy_counts_only_where_it_is_of_the_same(
    tmp_path: Path, writer: Store, taker: Receiver
) -> None:
    cut_off(taker, writer, make(writer, 10), 2)
    assert offer(taker, writer, make(writer, 20)) == 700_003
    assert intact(tmp_path / "taker") == ["20"]  # nothing of the other
    name = make(writer, 30)
    cut_off(taker, writer, name, 2)
    left = tmp_path / "taker" / ".30.copy.tmp" / "weights.safetensors"
    left.write_bytes(b"x" * len(left.read_bytes()))
    with pytest.raises(CopyRefused, match="its hash differs"):
        offer(taker, writer, name)
    assert offer(taker, writer, name) == 700_003
    cut_off(taker, writer, make(writer, 40), 2)
    taker.close()
    taker._thread.join(30)
    assert intact(tmp_path / "taker") == ["30", "20"]


def test_a_lost_writer_keeps_no_other_waiting(
    tmp_path: Path, writer: Store, taker: Receiver
) -> None:
    """Its host is off: it is in the midst of a copy, and its connection does not end."""
    name = make(writer, 10)
    with socket.create_connection(taker.address, 5) as connection:
        talk = CopyChannel.connect(connection, KEY)
        raw = (writer.root / name / MANIFEST).read_text()
        talk.send(name=name, manifest=raw, token=writer.token)
        assert talk.receive() == {"send": True, "have": {}, "shared": []}
        taker.drop_sender()  # there is a new group
        assert offer(taker, writer, name) > 0
    assert intact(tmp_path / "taker") == ["10"]
    taker.drop_sender()  # nobody sends


def test_a_writer_ends_what_it_sends_before_the_others_do(writer: Store) -> None:
    """Else it would take that for a failure, and warn."""
    did: list[str] = []
    said = json.dumps({"host": "a", "wanted": 1, "key": KEY.hex(), "address": "127.0.0.1"})
    comms = SimpleNamespace(world=SimpleNamespace(rank=0, host="a"),
                            texts=lambda text: [did.append("met") or said] * 2)  # fmt: skip
    one = copies.CopyCoordinator(cast(Any, comms), writer, 2, 1)
    one._sender = cast(Any, SimpleNamespace(close=lambda: did.append("ended")))
    assert one.negotiate() == "there is no other host"
    assert did == ["ended", "met"]


def test_an_older_writer_is_refused(tmp_path: Path, writer: Store, taker: Receiver) -> None:
    name = make(writer, 10)
    taker.token = 2  # this rank knows of a newer one, its disk does not
    with pytest.raises(CopyRefused, match="taken over"):
        offer(taker, writer, name)
    newer = Store(tmp_path / "newer", 2)
    offer(taker, newer, make(newer, 5))
    taker.token = 0
    with pytest.raises(CopyRefused, match="taken over"):
        offer(taker, writer, name)
    assert intact(tmp_path / "taker") == ["5.2"]
    newer.token = 3  # what a former writer has made, brought by its successor
    shutil.copytree(writer.root / "10", newer.root / "10")
    assert offer(taker, newer, "10") > 0
    assert intact(tmp_path / "taker") == ["5.2", "10"]


def test_only_rank_0_s_host_sends(tmp_path: Path, writer: Store, taker: Receiver) -> None:
    """Every rank knows the key and the token."""
    name, taker.sender = make(writer, 10), "127.0.0.2"
    with pytest.raises(OSError):
        offer(taker, writer, name)
    taker.sender = "127.0.0.1"
    assert offer(taker, writer, name) > 0


def test_a_full_disk_is_said(
    tmp_path: Path, writer: Store, taker: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = make(writer, 10)
    monkeypatch.setattr(receiver, "RESERVED_BYTES", 1 << 60)
    with pytest.raises(CopyRefused, match=r"too full: 0\.7 MB needed"):
        offer(taker, writer, name)
    assert intact(tmp_path / "taker") == []


# --- the sender


def rounds(told: list[CopyResult], count: int) -> list[CopyResult]:
    eventually(lambda: len(told) >= count)
    return told


def test_the_newest_and_the_best_on_so_many_hosts(tmp_path: Path, writer: Store) -> None:
    takers = [Receiver(tmp_path / host, KEY, "127.0.0.1", keep=3) for host in "bcd"]
    takers[0].close()  # its host is gone
    peers = [_Peer(host, one.address) for host, one in zip("bcd", takers, strict=True)]
    told: list[CopyResult] = []
    sender = _Sender(writer, KEY, peers, 1, told.append)
    make(writer, 10, best=True)
    sender.wake()
    (first,) = rounds(told, 1)
    assert (first.step, first.hosts, first.problem) == (10, ("c",), "")
    assert first.replaced_hosts == {"b": "Connection refused"}  # which is told of once
    make(writer, 20)
    make(writer, 30)
    sender.wake()
    assert [one.step for one in rounds(told, 2)] == [10, 30]
    assert intact(tmp_path / "c") == ["30", "10"]
    takers[1].close()
    takers[2].close()
    make(writer, 40)
    sender.wake()
    assert "b: Connection refused; c: Connection refused" in rounds(told, 3)[-1].problem
    sender.close()
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"send": True, "have": [1]}, "no receiver of this version"),
        ({"send": True, "have": {"weights.safetensors": -1}}, "no receiver of this version"),
        ({"send": True, "shared": 1}, "no receiver of this version"),
        ([1], "no message of ours"),
        (None, "timed out"),
    ],
)
def test_a_hostile_or_silent_host_is_replaced(
    tmp_path: Path, writer: Store, taker: Receiver, monkeypatch: pytest.MonkeyPatch,
    answer: object, reason: str,
) -> None:  # fmt: skip
    """Whatever a host answers to an offer, the next one gets this copy and later ones."""
    monkeypatch.setattr(copies, "_TIMEOUT_S", 0.3)
    calls: list[CopyChannel] = []

    def serve(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            for caller in greetings(listener, 0, 5):
                talk = CopyChannel.accept(caller, KEY)
                assert talk is not None
                calls.append(talk)
                talk.receive()
                if answer is not None:
                    body = json.dumps(answer).encode()
                    mac = talk._mac(b"s", 0, body)
                    talk.connection.sendall(len(body).to_bytes(4, "big") + mac + body)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        hostile = threading.Thread(target=serve, args=(listener,))
        hostile.start()
        peers = [_Peer("b", listener.getsockname()[:2]), _Peer("c", taker.address)]
        told: list[CopyResult] = []
        sender = _Sender(writer, KEY, peers, 1, told.append)
        make(writer, 10)
        sender.wake()
        (first,) = rounds(told, 1)
        assert (first.hosts, first.problem) == (("c",), "")
        assert reason in first.replaced_hosts["b"]
        make(writer, 20)
        sender.wake()
        assert rounds(told, 2)[1].hosts == ("c",)
        sender.close()
        listener.shutdown(socket.SHUT_RDWR)
        hostile.join(10)
        for talk in calls:
            talk.connection.close()
        assert len(calls) == 1  # the host that failed is asked last
    assert intact(tmp_path / "taker") == ["20", "10"]


def test_in_a_new_group_what_was_under_way_comes_first(
    tmp_path: Path, writer: Store, taker: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else, with losses every few seconds and as many checkpoints, no copy would ever be whole."""
    monkeypatch.setattr(copies, "rest_seconds", lambda took: 3600.0)
    told: list[CopyResult] = []
    peers = [_Peer("b", taker.address)]
    former = _Sender(writer, KEY, peers, 1, told.append)
    make(writer, 10)
    former.wake()
    deadline = time.monotonic() + 60
    while not former.in_progress and time.monotonic() < deadline:
        time.sleep(0.01)
    make(writer, 20)
    former.close()
    monkeypatch.setattr(copies, "rest_seconds", lambda took: 0.0)
    sender = _Sender(writer, KEY, peers, 1, told.append, former)
    sender.wake()
    assert [(one.step, one.problem) for one in rounds(told, 2)] == [(10, ""), (20, "")]
    sender.close()
    last = _Sender(writer, KEY, peers, 1, told.append, sender)
    assert last._hosts_by_name == {"10": {"b"}, "20": {"b"}}
    last.close()


def test_copying_rests_and_hurries(
    tmp_path: Path, writer: Store, taker: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    rested: list[float] = []
    monkeypatch.setattr(copies, "rest_seconds", lambda took: rested.append(took) or 30.0)
    told: list[CopyResult] = []
    sender = _Sender(writer, KEY, [_Peer("b", taker.address)], 1, told.append)
    make(writer, 10)
    sender.wake()
    assert eventually(lambda: bool(rested))
    time.sleep(0.05)
    assert len(rested) == 1  # it waits for half a minute before the second piece
    begun = time.monotonic()
    sender.hurry(10)
    assert time.monotonic() - begun < 25
    assert [one.hosts for one in told] == [("b",)]
    make(writer, 20)
    sender.wake()
    assert eventually(lambda: len(rested) >= 5)
    sender.close()  # in the middle of a rest
    sender._thread.join(25)
    assert not sender._thread.is_alive()


def test_how_long_it_rests() -> None:
    took = 0.02
    assert took / (took + rest_seconds(took)) == pytest.approx(LINE_SHARE)
    assert rest_seconds(-1.0) == 0
    assert rest_seconds(1e6) == 5


def test_who_takes_copies() -> None:
    assert receiving_ranks(["a", "a", "b", "b", "c"], [True, False, False, False, False]) == [2, 4]
    assert receiving_ranks(["a", "b", "c"], [True, True, False]) == [2]
    assert receiving_ranks(["b", "a", "b"], [False, True, False]) == []


def test_how_many_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_copies(None) is None
    monkeypatch.setenv("PACELINE_CHECKPOINT_COPIES", "2")
    assert (num_copies(None), num_copies(0)) == (2, 0)
    for word in ("auto", " ", ""):
        monkeypatch.setenv("PACELINE_CHECKPOINT_COPIES", word)
        assert num_copies(None) is None
    for word in ("x", "-1", "1.5", "9" * 40):
        monkeypatch.setenv("PACELINE_CHECKPOINT_COPIES", word)
        with pytest.raises(SettingError, match="no number of copies"):
            num_copies(None)
    with pytest.raises(SettingError):
        num_copies(-1)


# --- a training


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("copies")
    script = Path(__file__).with_name("copying.py")
    ranks.run_ok(1, [str(script), str(folder)], folder)
    return json.loads((folder / "found.json").read_text())


def test_the_copy_resumes_to_the_bit_without_rank_0s_disk(found: Any) -> None:
    lost = found["lost_disk"]
    assert (lost["there"][0][0], lost["there"][1]) == ("8", [])
    assert (lost["resumed"], lost["then"]) == (8, "15.2")
    assert lost["difference"] < 1e-12  # from one rank to another number of them


def test_another_host_stands_in_for_one_that_cannot(found: Any) -> None:
    assert found["stood_in"] == ["c"]


def test_a_new_beginning_leaves_no_old_copy_in_the_way(found: Any) -> None:
    assert found["begun_anew"] == {"aside": [True, True], "resumed": 2}


def test_no_copy_where_all_see_the_folder(found: Any) -> None:
    assert found["one_disk"] == {"folders": ["whole"], "warned": True}


def test_who_is_first_after_rank_0_was_lost_writes_and_has_copies(found: Any) -> None:
    moved = found["moved"]
    assert moved["statuses"] == [-9, 0, 0]
    assert moved["there"][0] == ["15.2", "12.2"]
    assert moved["there"][1]
    assert {9, 10, 12, 15} <= set(moved["written"])
    assert moved["difference"] < 1e-12
