"""Tests copies of checkpoints on other hosts: what is accepted or refused, and their use."""

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

import local_ranks
import pytest

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


def make_checkpoint(
    store: Store, step: int, size: int = 700_000, *, best: bool = False, frozen: int = 0
) -> str:
    """Writes a checkpoint of several pieces with an empty file, a subfolder and frozen weights."""
    temp_dir = store.temporary(step)
    entries = {}
    if frozen:
        content = b"f" * frozen
        name = frozen_file(hashlib.sha256(content).hexdigest())
        entries[name] = FileEntry(*write_chunks(temp_dir / name, iter([content])))
    sizes = {"weights.safetensors": size, "a/b.safetensors": 3, "empty.safetensors": 0}
    for name, length in sizes.items():
        (temp_dir / name).parent.mkdir(exist_ok=True)
        content = bytes([step % 256]) * length
        entries[name] = FileEntry(*write_chunks(temp_dir / name, iter([content])))
    return store.publish(temp_dir, Manifest(step, entries, {"best": best})).name


def intact_checkpoints(root: Path) -> list[str]:
    results, damaged = Store(root).scan()
    assert not damaged
    for one in results:
        one.manifest.verify(one.path)
    assert not list(root.glob(".*.tmp"))
    return [one.path.name for one in results]


@pytest.fixture
def writer(tmp_path: Path) -> Store:
    store = Store(tmp_path / "writer")
    store.claim_token(0, "")
    return store


@pytest.fixture
def copy_receiver(tmp_path: Path) -> Iterator[Receiver]:
    one = Receiver(tmp_path / "taker", KEY, "127.0.0.1", keep=2)
    yield one
    one.close()


def offer(copy_receiver: Receiver, store: Store, name: str, *, key: bytes = KEY) -> int:
    with socket.create_connection(copy_receiver.address, 5) as connection:
        return send_checkpoint(CopyChannel.connect(connection, key), store, name, lambda _: None)


def test_copies_are_complete_and_pruned(
    tmp_path: Path, writer: Store, copy_receiver: Receiver
) -> None:
    root = tmp_path / "taker"
    for step in (10, 20, 30, 40):
        name = make_checkpoint(writer, step, best=step == 20)
        assert offer(copy_receiver, writer, name) == 700_003
    assert intact_checkpoints(root) == ["40", "30", "20"]
    assert json.loads((root / "best.json").read_text())["checkpoint"] == "20"
    assert sha256(root / "40/a/b.safetensors") == sha256(writer.root / "40/a/b.safetensors")
    assert offer(copy_receiver, writer, "40") == 0  # it has this checkpoint already


def test_forged_copy_cannot_remove_earlier_checkpoints(tmp_path: Path, writer: Store) -> None:
    """All hosts of the job know the key, so an offer is not trusted in everything."""
    root = tmp_path / "taker"
    earlier = Store(root)
    earlier.claim_token(0, "")
    for step in (10, 20, 30):
        make_checkpoint(earlier, step, best=step == 10)
    copy_receiver = Receiver(root, KEY, "127.0.0.1", keep=1)
    copy_receiver.token = 2
    forger = Store(tmp_path / "forger", token=2)
    offer(copy_receiver, forger, make_checkpoint(forger, 10**6))
    assert intact_checkpoints(root) == [
        "1000000.2",
        "30",
        "10",
    ]  # the earlier newest and best are kept
    replaced = Store(tmp_path / "replaced")
    replaced.claim_token(0, "")
    make_checkpoint(replaced, 30, size=5)
    with pytest.raises(CopyRefused, match="another checkpoint here"):
        offer(copy_receiver, Store(replaced.root, token=2), "30")
    assert intact_checkpoints(root)[1] == "30"
    assert (root / "30/weights.safetensors").stat().st_size == 700_000
    again = Store(tmp_path / "again")
    again.claim_token(0, "")
    make_checkpoint(again, 30, best=True)  # an evaluation has shown that it is the best
    assert offer(copy_receiver, Store(again.root, token=2), "30") == 0
    assert json.loads((root / "best.json").read_text())["checkpoint"] == "30"
    forger = Store(tmp_path / "other", token=999_999)
    with pytest.raises(CopyRefused, match="another writer"):
        offer(copy_receiver, forger, make_checkpoint(forger, 1))
    copy_receiver.close()


def test_frozen_weights_are_sent_only_in_first_copy(
    tmp_path: Path, writer: Store, copy_receiver: Receiver
) -> None:
    """Also if a copy is interrupted. They outlive the checkpoint that they came with."""
    root, size = tmp_path / "taker", 6 * receiver.PIECE_BYTES
    assert offer(copy_receiver, writer, make_checkpoint(writer, 10, frozen=size)) == 700_003 + size
    (first,) = (root / "10").glob("frozen-*")
    name = make_checkpoint(writer, 20, frozen=size)
    for _ in range(2):
        interrupt_copy(copy_receiver, writer, name, 2)
    assert offer(copy_receiver, writer, name) < 700_003
    assert (root / "20" / first.name).samefile(first)
    assert intact_checkpoints(root) == ["20", "10"]
    for step in (30, 40):
        assert offer(copy_receiver, writer, make_checkpoint(writer, step, frozen=size)) == 700_003
    assert intact_checkpoints(root) == ["40", "30"]
    assert (
        offer(copy_receiver, writer, make_checkpoint(writer, 50, frozen=size + 1))
        == 700_003 + size + 1
    )


def test_rejects_unauthenticated_callers(
    tmp_path: Path, writer: Store, copy_receiver: Receiver
) -> None:
    name = make_checkpoint(writer, 10)
    with pytest.raises((OSError, CopyRefused)):
        offer(copy_receiver, writer, name, key=b"x" * 32)
    for payload in (b"", b"GET / HTTP/1.1\r\n\r\n" * 3, b"\0" * 16 + b"\xff" * 4, os.urandom(4000)):
        with socket.create_connection(copy_receiver.address, 5) as connection:
            connection.settimeout(5)
            answer = b""
            with contextlib.suppress(OSError):
                connection.sendall(payload)
                connection.shutdown(socket.SHUT_WR)
                while part := connection.recv(100):
                    answer += part
            assert len(answer) <= 16  # a random number
    assert not (tmp_path / "taker").exists()
    assert offer(copy_receiver, writer, name) > 0


def test_silent_callers_do_not_delay_copies(writer: Store, copy_receiver: Receiver) -> None:
    name = make_checkpoint(writer, 10)
    with contextlib.ExitStack() as opened:
        for payload in (b"", b"A", b"A" * 47) * 30:  # more than may authenticate at once
            caller = opened.enter_context(socket.create_connection(copy_receiver.address, 5))
            caller.sendall(payload)
        assert offer(copy_receiver, writer, name) > 0


def test_reads_no_payload_from_unauthenticated_caller(
    writer: Store, copy_receiver: Receiver
) -> None:
    with socket.create_connection(copy_receiver.address, 5) as connection:
        connection.settimeout(5)
        connection.sendall(os.urandom(48) + (1 << 24).to_bytes(4, "big"))
        with contextlib.suppress(ConnectionError):  # the receiver does not wait for 16 MiB
            while connection.recv(16):
                pass


@pytest.mark.parametrize("name", ["../x", "/tmp/x", "10/../../x", "11", "10.3", ".10", ""])
def test_rejects_invalid_checkpoint_name(
    tmp_path: Path, writer: Store, copy_receiver: Receiver, name: str
) -> None:
    make_checkpoint(writer, 10)
    raw = (writer.root / "10/manifest.json").read_text()
    with socket.create_connection(copy_receiver.address, 5) as connection:
        talk = CopyChannel.connect(connection, KEY)
        talk.send(name=name, manifest=raw, token=1)
        with pytest.raises(CopyRefused, match="no name of this checkpoint"):
            talk.receive()
    assert not (tmp_path / "taker").exists()


def test_rejects_file_outside_checkpoint(tmp_path: Path, copy_receiver: Receiver) -> None:
    for name in ("../x", "/tmp/x", "a/../../x"):
        raw = Manifest(10, {name: FileEntry("0" * 64, 1)}, {}).encode().decode()
        with socket.create_connection(copy_receiver.address, 5) as connection:
            talk = CopyChannel.connect(connection, KEY)
            talk.send(name="10", manifest=raw, token=1)
            with pytest.raises(CopyRefused, match="is not a file of a checkpoint"):
                talk.receive()


def test_rejects_copy_with_wrong_hash(
    tmp_path: Path, writer: Store, copy_receiver: Receiver
) -> None:
    name = make_checkpoint(writer, 10)
    path = writer.root / name / "weights.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CopyRefused, match="its hash differs"):
        offer(copy_receiver, writer, name)
    assert intact_checkpoints(tmp_path / "taker") == []


def interrupt_copy(copy_receiver: Receiver, store: Store, name: str, pieces: int) -> None:
    """Cuts the connection after some pieces, as when a rank is lost and the group re-forms."""
    with socket.create_connection(copy_receiver.address, 5) as connection:

        def close_connection(_: float) -> None:
            nonlocal pieces
            pieces -= 1
            if not pieces:
                connection.shutdown(socket.SHUT_RDWR)

        with pytest.raises(OSError):
            send_checkpoint(CopyChannel.connect(connection, KEY), store, name, close_connection)


def test_interrupted_copy_resumes_to_completion(
    tmp_path: Path, writer: Store, copy_receiver: Receiver
) -> None:
    name = make_checkpoint(writer, 10, 6 * receiver.PIECE_BYTES)
    for _ in range(3):
        interrupt_copy(
            copy_receiver, writer, name, 2
        )  # the first piece is the small file without its last byte
    assert (
        offer(copy_receiver, writer, name) < 4 * receiver.PIECE_BYTES
    )  # each attempt has added pieces
    assert intact_checkpoints(tmp_path / "taker") == ["10"]


def test_partial_copy_is_reused_only_for_identical_files(
    tmp_path: Path, writer: Store, copy_receiver: Receiver
) -> None:
    interrupt_copy(copy_receiver, writer, make_checkpoint(writer, 10), 2)
    assert offer(copy_receiver, writer, make_checkpoint(writer, 20)) == 700_003
    assert intact_checkpoints(tmp_path / "taker") == ["20"]  # nothing of the first checkpoint
    name = make_checkpoint(writer, 30)
    interrupt_copy(copy_receiver, writer, name, 2)
    partial_file = tmp_path / "taker" / ".30.copy.tmp" / "weights.safetensors"
    partial_file.write_bytes(b"x" * len(partial_file.read_bytes()))
    with pytest.raises(CopyRefused, match="its hash differs"):
        offer(copy_receiver, writer, name)
    assert offer(copy_receiver, writer, name) == 700_003
    interrupt_copy(copy_receiver, writer, make_checkpoint(writer, 40), 2)
    copy_receiver.close()
    copy_receiver._thread.join(30)
    assert intact_checkpoints(tmp_path / "taker") == ["30", "20"]


def test_lost_writer_does_not_block_next_sender(
    tmp_path: Path, writer: Store, copy_receiver: Receiver
) -> None:
    """The writer's host is off in the middle of a copy, and its connection does not end."""
    name = make_checkpoint(writer, 10)
    with socket.create_connection(copy_receiver.address, 5) as connection:
        talk = CopyChannel.connect(connection, KEY)
        raw = (writer.root / name / MANIFEST).read_text()
        talk.send(name=name, manifest=raw, token=writer.token)
        assert talk.receive() == {"send": True, "have": {}, "shared": []}
        copy_receiver.drop_sender()  # the ranks have formed a new group
        assert offer(copy_receiver, writer, name) > 0
    assert intact_checkpoints(tmp_path / "taker") == ["10"]
    copy_receiver.drop_sender()  # no copy is being received


def test_sender_closes_first_in_negotiation(writer: Store) -> None:
    """Otherwise it would take the end of the connection for a failure, and warn."""
    order: list[str] = []
    payload = json.dumps({"host": "a", "wanted": 1, "key": KEY.hex(), "address": "127.0.0.1"})
    comms = SimpleNamespace(world=SimpleNamespace(rank=0, host="a"),
                            texts=lambda text: [order.append("met") or payload] * 2)  # fmt: skip
    one = copies.CopyCoordinator(cast(Any, comms), writer, 2, 1)
    one._sender = cast(Any, SimpleNamespace(close=lambda: order.append("ended")))
    assert one.negotiate() == "there is no other host"
    assert order == ["ended", "met"]


def test_rejects_superseded_writer(tmp_path: Path, writer: Store, copy_receiver: Receiver) -> None:
    name = make_checkpoint(writer, 10)
    copy_receiver.token = 2  # this rank knows of a newer writer, but its disk does not
    with pytest.raises(CopyRefused, match="taken over"):
        offer(copy_receiver, writer, name)
    newer = Store(tmp_path / "newer", 2)
    offer(copy_receiver, newer, make_checkpoint(newer, 5))
    copy_receiver.token = 0
    with pytest.raises(CopyRefused, match="taken over"):
        offer(copy_receiver, writer, name)
    assert intact_checkpoints(tmp_path / "taker") == ["5.2"]
    newer.token = 3  # a former writer's checkpoint, sent by its successor
    shutil.copytree(writer.root / "10", newer.root / "10")
    assert offer(copy_receiver, newer, "10") > 0
    assert intact_checkpoints(tmp_path / "taker") == ["5.2", "10"]


def test_accepts_copies_only_from_rank_0_host(
    tmp_path: Path, writer: Store, copy_receiver: Receiver
) -> None:
    """Every rank knows the key and the token."""
    name, copy_receiver.sender = make_checkpoint(writer, 10), "127.0.0.2"
    with pytest.raises(OSError):
        offer(copy_receiver, writer, name)
    copy_receiver.sender = "127.0.0.1"
    assert offer(copy_receiver, writer, name) > 0


def test_reports_full_disk(
    tmp_path: Path, writer: Store, copy_receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = make_checkpoint(writer, 10)
    monkeypatch.setattr(receiver, "RESERVED_BYTES", 1 << 60)
    with pytest.raises(CopyRefused, match=r"too full: 0\.7 MB needed"):
        offer(copy_receiver, writer, name)
    assert intact_checkpoints(tmp_path / "taker") == []


# --- the sender


def wait_for_results(reports: list[CopyResult], count: int) -> list[CopyResult]:
    eventually(lambda: len(reports) >= count)
    return reports


def test_sends_last_and_best_checkpoint_to_available_host(tmp_path: Path, writer: Store) -> None:
    receivers = [Receiver(tmp_path / host, KEY, "127.0.0.1", keep=3) for host in "bcd"]
    receivers[0].close()  # its host is lost
    peers = [_Peer(host, one.address) for host, one in zip("bcd", receivers, strict=True)]
    reports: list[CopyResult] = []
    sender = _Sender(writer, KEY, peers, 1, reports.append)
    make_checkpoint(writer, 10, best=True)
    sender.wake()
    (first,) = wait_for_results(reports, 1)
    assert (first.step, first.hosts, first.problem) == (10, ("c",), "")
    assert first.replaced_hosts == {"b": "Connection refused"}  # reported once
    make_checkpoint(writer, 20)
    make_checkpoint(writer, 30)
    sender.wake()
    assert [one.step for one in wait_for_results(reports, 2)] == [10, 30]
    assert intact_checkpoints(tmp_path / "c") == ["30", "10"]
    receivers[1].close()
    receivers[2].close()
    make_checkpoint(writer, 40)
    sender.wake()
    assert (
        "b: Connection refused; c: Connection refused" in wait_for_results(reports, 3)[-1].problem
    )
    sender.close()
    assert not (tmp_path / "d").exists()


def test_checkpoint_that_turns_out_to_be_best_is_sent_again(
    tmp_path: Path, writer: Store, copy_receiver: Receiver
) -> None:
    reports: list[CopyResult] = []
    peers = [_Peer("b", copy_receiver.address)]
    sender = _Sender(writer, KEY, peers, 1, reports.append)
    for best in (False, True):
        make_checkpoint(writer, 10, best=best)
        sender.wake()
        wait_for_results(reports, 1 + best)
    assert json.loads((tmp_path / "taker/best.json").read_text())["checkpoint"] == "10"
    sender.close()


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
def test_replaces_hostile_or_silent_receiver(
    tmp_path: Path, writer: Store, copy_receiver: Receiver, monkeypatch: pytest.MonkeyPatch,
    answer: object, reason: str,
) -> None:  # fmt: skip
    """Whatever a host answers, the next host gets this copy and all later ones."""
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
        peers = [_Peer("b", listener.getsockname()[:2]), _Peer("c", copy_receiver.address)]
        reports: list[CopyResult] = []
        sender = _Sender(writer, KEY, peers, 1, reports.append)
        make_checkpoint(writer, 10)
        sender.wake()
        (first,) = wait_for_results(reports, 1)
        assert (first.hosts, first.problem) == (("c",), "")
        assert reason in first.replaced_hosts["b"]
        make_checkpoint(writer, 20)
        sender.wake()
        assert wait_for_results(reports, 2)[1].hosts == ("c",)
        sender.close()
        listener.shutdown(socket.SHUT_RDWR)
        hostile.join(10)
        for talk in calls:
            talk.connection.close()
        assert len(calls) == 1  # the host that failed is tried last
    assert intact_checkpoints(tmp_path / "taker") == ["20", "10"]


def test_next_sender_finishes_copy_in_progress_first(
    tmp_path: Path, writer: Store, copy_receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise no copy would ever be complete if losses and checkpoints come every few seconds."""
    monkeypatch.setattr(copies, "rest_seconds", lambda took: 3600.0)
    reports: list[CopyResult] = []
    peers = [_Peer("b", copy_receiver.address)]
    former = _Sender(writer, KEY, peers, 1, reports.append)
    make_checkpoint(writer, 10)
    former.wake()
    deadline = time.monotonic() + 60
    while not former.in_progress and time.monotonic() < deadline:
        time.sleep(0.01)
    make_checkpoint(writer, 20)
    former.close()
    monkeypatch.setattr(copies, "rest_seconds", lambda took: 0.0)
    sender = _Sender(writer, KEY, peers, 1, reports.append, former)
    sender.wake()
    assert [(one.step, one.problem) for one in wait_for_results(reports, 2)] == [(10, ""), (20, "")]
    sender.close()
    final_sender = _Sender(writer, KEY, peers, 1, reports.append, sender)
    assert final_sender._holders == {("10", False): {"b"}, ("20", False): {"b"}}
    final_sender.close()


def test_sender_throttles_and_hurries(
    tmp_path: Path, writer: Store, copy_receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    throttle_calls: list[float] = []
    monkeypatch.setattr(copies, "rest_seconds", lambda took: throttle_calls.append(took) or 30.0)
    reports: list[CopyResult] = []
    sender = _Sender(writer, KEY, [_Peer("b", copy_receiver.address)], 1, reports.append)
    make_checkpoint(writer, 10)
    sender.wake()
    assert eventually(lambda: bool(throttle_calls))
    time.sleep(0.05)
    assert len(throttle_calls) == 1  # it waits half a minute before the second piece
    start_s = time.monotonic()
    sender.hurry(10)
    assert time.monotonic() - start_s < 25
    assert [one.hosts for one in reports] == [("b",)]
    make_checkpoint(writer, 20)
    sender.wake()
    assert eventually(lambda: len(throttle_calls) >= 5)
    sender.close()  # during a pause
    sender._thread.join(25)
    assert not sender._thread.is_alive()


def test_throttle_duration() -> None:
    took = 0.02
    assert took / (took + rest_seconds(took)) == pytest.approx(LINE_SHARE)
    assert rest_seconds(-1.0) == 0
    assert rest_seconds(1e6) == 5


def test_receiving_ranks() -> None:
    assert receiving_ranks(["a", "a", "b", "b", "c"], [True, False, False, False, False]) == [2, 4]
    assert receiving_ranks(["a", "b", "c"], [True, True, False]) == [2]
    assert receiving_ranks(["b", "a", "b"], [False, True, False]) == []


def test_num_copies_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_copies(None) is None
    monkeypatch.setenv("PACELINE_CHECKPOINT_COPIES", "2")
    assert (num_copies(None), num_copies(0)) == (2, 0)
    for setting in ("auto", " ", ""):
        monkeypatch.setenv("PACELINE_CHECKPOINT_COPIES", setting)
        assert num_copies(None) is None
    for setting in ("x", "-1", "1.5", "9" * 40):
        monkeypatch.setenv("PACELINE_CHECKPOINT_COPIES", setting)
        with pytest.raises(SettingError, match="no number of copies"):
            num_copies(None)
    with pytest.raises(SettingError):
        num_copies(-1)


# --- a training


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("copies")
    script = Path(__file__).with_name("copy_worlds.py")
    local_ranks.run_ok(1, [str(script), str(folder)], folder)
    return json.loads((folder / "found.json").read_text())


def test_resumes_from_copy_if_rank_0_disk_is_lost(results: Any) -> None:
    lost = results["lost_disk"]
    assert (lost["there"][0][0], lost["there"][1]) == ("8", [])
    assert (lost["resumed"], lost["then"]) == (8, "15.2")
    assert lost["difference"] < 1e-12  # the number of ranks differs


def test_unable_receiver_is_replaced_by_other_host(results: Any) -> None:
    assert results["stood_in"] == ["c"]


def test_restart_from_scratch_moves_copies_aside(results: Any) -> None:
    assert results["begun_anew"] == {"aside": [True, True], "resumed": 2}


def test_shared_folder_needs_no_copies(results: Any) -> None:
    assert results["one_disk"] == {"folders": ["whole"], "warned": True}


def test_successor_of_rank_0_writes_checkpoints_and_copies(results: Any) -> None:
    moved = results["moved"]
    assert moved["statuses"] == [-9, 0, 0]
    assert moved["there"][0] == ["15.2", "12.2"]
    assert moved["there"][1]
    assert {9, 10, 12, 15} <= set(moved["written"])
    assert moved["difference"] < 1e-12
