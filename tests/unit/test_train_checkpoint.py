"""Checkpoints on disk: whole or refused."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # as the first optimizer does; it leaves a variable behind
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from paceline import train
from paceline.spec.errors import DataError, SettingError
from paceline.spec.events import read_events
from paceline.spec.rundir import BEST, CHECKPOINTS, LATEST, MANIFEST, expired, read_pointer
from paceline.spec.training.checkpoint_manifest import DamagedCheckpoint
from paceline.spec.training.metrics import recorded_steps
from paceline.train import files
from paceline.train.checkpoints.capture import (
    Copier,
    Snapshot,
    TornSnapshot,
    Training,
    capture,
    generator_state,
    set_generator_state,
)
from paceline.train.checkpoints.format import STATE, pack, read_manifest, unpack, write_tensors
from paceline.train.checkpoints.keeper import SavePolicy, parse_policy
from paceline.train.checkpoints.resume import LoadedCheckpoint, load, restore
from paceline.train.checkpoints.store import STALE_AFTER_S, Store, WriterLock
from paceline.train.checkpoints.writer import Writer
from paceline.train.comms import Comms
from paceline.train.data.loader import Progress
from paceline.train.elastic.stop import SignalNotice, next_poll
from paceline.train.files import RecordFile
from paceline.train.models import Models
from paceline.train.update import Updater
from paceline.train.world import World

NOTHING: dict[str, Any] = {"ranks": 1, "identity": {}, "training": {}, "extras": {}}
ALONE = Comms(World(), torch.device("cpu"))
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool]

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
states = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers()), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(states)
def test_states_come_back(state: Any) -> None:
    tensors: dict[str, torch.Tensor] = {}
    assert unpack(json.loads(json.dumps(pack(state, tensors))), tensors) == state


def test_tensors_in_states_come_back() -> None:
    one, two = torch.ones(2), torch.zeros(())
    tensors: dict[str, torch.Tensor] = {}
    packed = pack({"a": [one, {3: two}]}, tensors, "top")
    assert sorted(tensors) == ["top.a.0", "top.a.1.3"]
    assert unpack(packed, tensors)["a"][1][3] is tensors["top.a.1.3"]
    with pytest.raises(TypeError, match="set"):
        pack({"a": {1}}, tensors)


def test_files_are_what_the_library_reads(tmp_path: Path) -> None:
    tensors = {str(dtype): (torch.randn(3, 4) * 9).to(dtype).t() for dtype in DTYPES}
    tensors |= {"number": torch.tensor(3.5), "none": torch.zeros(0, 2)}
    digest, size = write_tensors(tmp_path / "x", tensors)
    assert (tmp_path / "x").stat().st_size == size
    back = load_file(tmp_path / "x")
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())
    assert len(digest) == 64


def snapshot(step: int, best: bool = False) -> Snapshot:
    weights = torch.full((40, 25), float(step))
    state = {"progress": {"step": step, "epoch": 0, "offset": 0}, **NOTHING}
    return Snapshot(
        step,
        {"weights.safetensors": {"w": weights}, "optimizer.safetensors": {"m": weights[:3] * 2}},
        frozenset(),
        json.dumps(state).encode(),
        {"ranks": 1, "best": best},
    )


def written(root: Path, *steps: int, keep: int = 0, best: int = -1) -> Store:
    where = Store(root)
    writer = Writer(where, keep)
    for step in steps:
        writer.start(snapshot(step, step == best))
    writer.wait()
    while not writer.outcomes.empty():
        assert not writer.outcomes.get().problem
    return where


def newest(where: Store, warned: list[str] | None = None, want: str = "latest") -> int:
    loaded = load(ALONE, want, where, (warned if warned is not None else []).append)
    assert loaded is not None
    assert float(loaded.tensors["weights.safetensors"]["w"][0, 0]) == loaded.step
    return loaded.step


def test_every_flipped_bit_and_zeroed_page_is_found(tmp_path: Path) -> None:
    """1,000 damages over all files of a checkpoint, none of them overlooked."""
    where = written(tmp_path, 7)
    folder = tmp_path / "7"
    draw = random.Random(5)
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["manifest.json", "optimizer.safetensors", STATE, "weights.safetensors"]
    for number in range(1000):
        path = folder / names[number % len(names)]
        before = path.read_bytes()
        path.write_bytes(damaged(before, draw))
        with pytest.raises(DamagedCheckpoint):
            read_manifest(folder).verify(folder)
        path.write_bytes(before)
    assert newest(where) == 7


def damaged(content: bytes, draw: random.Random) -> bytes:
    """One bit turned, or the content of one 512-byte page lost."""
    changed = bytearray(content)
    place = draw.randrange(len(content))
    page = slice(place // 512 * 512, place // 512 * 512 + 512)
    if draw.random() < 0.5 and any(changed[page]):
        changed[page] = bytes(len(changed[page]))
    else:
        changed[place] ^= 1 << draw.randrange(8)
    return bytes(changed)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def holes(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 41)


@pytest.mark.parametrize("make", [pipe, device, holes])
def test_what_has_no_end_is_passed_over(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """In a run directory that came from somebody else."""
    where = written(tmp_path, 7, 8, 9)
    for name in ("9/manifest.json", f"8/{STATE}", LATEST, BEST):
        (tmp_path / name).unlink(missing_ok=True)
        make(tmp_path / name)
    assert newest(where) == 7


def test_falls_back_with_a_warning(tmp_path: Path) -> None:
    where = written(tmp_path, 1, 2, 3, 4)
    weights = tmp_path / "4/weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (tmp_path / "3/manifest.json").unlink()
    (tmp_path / "stray.txt").write_text("x")
    (tmp_path / "99").mkdir()
    (tmp_path / "abc").mkdir()
    (tmp_path / ".5.123.tmp").mkdir()
    warned: list[str] = []
    assert newest(where, warned) == 2
    told = "\n".join(warned)
    assert "4: weights.safetensors has 3980 bytes instead of 4080" in told
    assert "3: no manifest.json" in told
    assert "99: no manifest.json" in told


def test_choices(tmp_path: Path) -> None:
    where = written(tmp_path / "checkpoints", 1, 2, 3, best=2)
    assert newest(where, want="auto") == 3
    assert newest(where, want="best") == 2
    assert newest(where, want="1") == 1
    assert newest(Store(tmp_path / "other"), want=str(tmp_path)) == 3
    assert newest(Store(tmp_path / "other"), want=str(tmp_path / "checkpoints/2")) == 2
    assert load(ALONE, "never", where, print) is None
    assert load(ALONE, "auto", Store(tmp_path / "other"), print) is None
    with pytest.raises(DataError, match=r"3, 2, 1"):
        load(ALONE, "5", where, print)
    with pytest.raises(DataError, match="no such checkpoint"):
        load(ALONE, "latest", Store(tmp_path / "other"), print)
    with pytest.raises(SettingError, match="no checkpoint is there"):
        load(ALONE, str(tmp_path / "nope"), where, print)


def test_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    where = written(tmp_path, 1, 2, 3, 4, 5, keep=2, best=1)
    assert [one.step for one in where.scan()[0]] == [5, 4, 1]
    assert read_pointer(tmp_path / BEST) == "1"
    assert read_pointer(tmp_path / LATEST) == "5"
    assert expired([(1, 1), (1, 2), (1, 3)], 0, set()) == []


def test_a_step_is_replaced_whole(tmp_path: Path) -> None:
    where = written(tmp_path, 3)
    (tmp_path / "3/weights.safetensors").write_bytes(b"")
    written(tmp_path, 3)
    assert newest(where) == 3
    assert not list(tmp_path.glob(".*"))


def test_what_killed_writers_left_is_cleared(tmp_path: Path) -> None:
    """Of every file that was made aside; what another process is writing stays, and is renamed."""
    left = [tmp_path / name for name in (".latest.json.77.tmp", ".best.json.78.tmp", ".look-1-79")]
    for one in left:
        one.write_bytes(b"{")
    (tmp_path / ".1.1.77.tmp").mkdir()
    with (tmp_path / ".best.json.80.tmp").open("wb") as busy:
        assert files.lock(busy.fileno())
        written(tmp_path, 3, keep=2)
        assert [*tmp_path.glob(".*")] == [Path(busy.name)]
    files.write_bytes(tmp_path / BEST, b"{}")
    assert not [*tmp_path.glob(".*")]


def test_a_file_that_was_taken_for_a_leftover_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, cleared = files.replace, []

    def late(source: Path, target: Path) -> None:
        if not cleared:
            cleared.append(source)
            files.remove_stale(source)
        replace(source, target)

    monkeypatch.setattr(files, "replace", late)
    files.write_bytes(tmp_path / "one", b"whole")
    assert cleared
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("one", b"whole")]


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = written(tmp_path, 1)
    writer = Writer(where, 3)

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("paceline.train.checkpoints.writer.write_tensors", full)
    writer.start(snapshot(2))
    writer.wait()
    assert "No space left" in writer.outcomes.get().problem
    assert newest(where) == 1
    assert not list(tmp_path.glob(".*"))


def test_space_is_checked_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    writer = Writer(Store(tmp_path / "c"), 3)
    writer.start(snapshot(2))
    writer.wait()
    assert "MB needed, 0.0 MB free" in writer.outcomes.get().problem
    assert not list((tmp_path / "c").iterdir())


def test_the_copy_is_of_the_moment(tmp_path: Path) -> None:
    """Parameters may change after the wait, buffers at once."""
    copier = Copier()
    weight, buffer = torch.ones(3), torch.ones(3)
    finish = copier.start({"f": {"weight": weight, "buffer": buffer}}, frozenset({"weight"}))
    buffer += 1
    copied = finish()
    copier.wait()
    weight += 1
    assert copied["f"]["weight"].tolist() == [1, 1, 1]
    assert copied["f"]["buffer"].tolist() == [1, 1, 1]


def test_what_the_script_changes_between_steps_is_found_out() -> None:
    """The copy is given up, and from then on everything is copied at once."""
    copier, weight = Copier(), torch.ones(3)
    finish = copier.start({"f": {"weight": weight}}, frozenset({"weight"}))
    weight.clamp_(max=0.5)
    with pytest.raises(TornSnapshot, match=r"weight changed outside session\.step"):
        finish()
    copier.wait()
    finish = copier.start({"f": {"weight": weight}}, frozenset({"weight"}))
    weight += 1
    assert finish()["f"]["weight"].tolist() == [0.5] * 3


def test_a_moving_average_is_of_the_moment() -> None:
    """It may be updated as soon as the step has returned, while a thread still copies."""
    network = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    adam = torch.optim.AdamW(network.parameters())
    network(torch.randn(4, 2)).sum().backward()
    adam.step()
    average = torch.optim.swa_utils.AveragedModel(network)
    training = Training(
        Models({"": Updater(network, adam, None, None, None)}), Progress(), 0, {"average": average}
    )
    taken = capture(training, ALONE)
    finish = Copier().start(taken.tensors, taken.deferred)
    expected = {name: one.clone() for name, one in average.state_dict().items()}
    statistics = network[1].running_mean.clone()
    with torch.no_grad():
        for tensor in average.parameters():
            tensor += 1
        network[1].running_mean += 1
    copied = finish()
    kept = copied["optimizer.safetensors"]
    for name, one in expected.items():
        assert torch.equal(kept[f"extras.average.{name}"], one), name
    assert torch.equal(copied["weights.safetensors"]["1.running_mean"], statistics)
    assert {"0.weight", "training.optimizer.state.0.weight.exp_avg"} <= taken.deferred


def test_generators_begin_the_same_at_another_world_size() -> None:
    """Nobody's state fits; all generators begin anew, and always the same."""
    network = torch.nn.Linear(2, 2)
    training = Training(
        Models({"": Updater(network, torch.optim.SGD(network.parameters()), None, None, None)}),
        Progress(),
        0,
    )
    taken = capture(training, ALONE)
    state = json.loads(taken.state) | {"ranks": 2}
    loaded = LoadedCheckpoint(3, state, taken.tensors, "here")
    drawn = []
    for number in range(2):
        random.seed(number), np.random.seed(number), torch.manual_seed(number)
        restore(loaded, training, ALONE)
        drawn.append((random.random(), np.random.rand(), torch.rand(2).tolist()))
    assert drawn[0] == drawn[1]


def test_second_writer_is_told_the_first(tmp_path: Path) -> None:
    first, second = WriterLock(tmp_path), WriterLock(tmp_path)
    first.acquire()
    with pytest.raises(SettingError) as caught:
        second.acquire()
    assert f"process {os.getpid()} on" in caught.value.found
    first.release()
    second.acquire()
    second.release()


@pytest.mark.parametrize("readable", [True, False])
def test_a_writer_on_a_share_that_says_no(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, readable: bool
) -> None:
    """SMB answers EACCES to who asks for a held lock, and to who reads what is locked."""
    held = WriterLock(tmp_path)
    held.acquire()

    def denied(*_: object) -> bytes:
        raise PermissionError(errno.EACCES, "denied")

    monkeypatch.setattr("fcntl.flock", denied)
    if not readable:
        monkeypatch.setattr("os.pread", denied)
    with pytest.raises(SettingError, match="another job writes") as told:
        WriterLock(tmp_path).acquire()
    assert ("could not be read" in told.value.found) != readable
    held.release()


def test_a_disk_without_locks_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr("fcntl.flock", unknown)
    lock = WriterLock(tmp_path)
    lock.acquire()
    lock.release()


def test_a_reader_on_a_share_delays_a_replacement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SMB refuses to replace what a process of this host has open."""
    tries, replace = [], Path.replace

    def busy(self: Path, target: Path) -> Path:
        tries.append(target)
        if len(tries) < 3:
            raise PermissionError(errno.EACCES, "open")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", busy)
    monkeypatch.setattr(files, "_REPLACE_TIMEOUT_S", 0.5)
    files.write_bytes(tmp_path / "latest.json", b"new")
    assert (tmp_path / "latest.json").read_bytes() == b"new"
    assert len(tries) == 3
    monkeypatch.setattr(Path, "replace", lambda *_: unable())
    with pytest.raises(PermissionError):
        files.write_bytes(tmp_path / "latest.json", b"newer")
    assert (tmp_path / "latest.json").read_bytes() == b"new"


def unable() -> None:
    raise PermissionError(errno.EACCES, "open")


def test_writer_on_another_machine(tmp_path: Path) -> None:
    owner = {"host": "far", "pid": 1, "since": "2030-01-01 00:00:00", "run": "r1"}
    path = tmp_path / "writer.json"
    path.write_text(json.dumps(owner))
    with pytest.raises(SettingError, match="process 1 on far"):
        WriterLock(tmp_path, "r2").acquire()
    same = WriterLock(tmp_path, "r1")  # the next attempt of the same job
    same.acquire()
    same.release()
    path.write_text(json.dumps(owner))
    long_ago = time.time() - STALE_AFTER_S - 1
    os.utime(path, (long_ago, long_ago))
    late = WriterLock(tmp_path)
    late.acquire()
    late.release()


def test_a_wrong_clock_takes_no_folder_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heartbeats are as old as the clock of their disk says, not as ours does."""
    owner = {"host": "far", "pid": 1, "since": "2030-01-01 00:00:00", "run": "r1"}
    (tmp_path / "writer.json").write_text(json.dumps(owner))
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3600)
    with pytest.raises(SettingError, match="process 1 on far"):
        WriterLock(tmp_path, "r2").acquire()
    assert [one.name for one in tmp_path.iterdir()] == ["writer.json"]


def test_a_writer_whose_launcher_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our launcher holds the run directory, so that of the other run has ended, or was killed."""
    monkeypatch.setattr("paceline.train.checkpoints.store.WATCH_S", 0.4)
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    owner = {"host": "far", "pid": 1, "since": "2030-01-01 00:00:00", "run": "r1"}
    path = folder / "writer.json"
    path.write_text(json.dumps(owner))
    monkeypatch.setenv("PACELINE_RUN_DIR", str(tmp_path))
    ours = WriterLock(folder, "r2")
    ours.acquire()
    ours.release()
    path.write_text(json.dumps({**owner, "run": ""}))  # not under a launcher: it may well live
    with pytest.raises(SettingError):
        WriterLock(folder, "r2").acquire()
    path.write_text(json.dumps(owner))
    alive = threading.Timer(0.2, os.utime, [path])  # a rank of it that is still on its way out
    alive.start()
    with pytest.raises(SettingError):
        WriterLock(folder, "r2").acquire()
    alive.join()


def test_a_frozen_writer_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the kernel's lock; its token keeps it from publishing when it thaws."""
    monkeypatch.setattr("paceline.train.checkpoints.store.WATCH_S", 0.2)
    folder = tmp_path / "checkpoints"
    frozen = WriterLock(folder, "r1")
    frozen.acquire()
    with pytest.raises(SettingError):
        WriterLock(folder, "r2").acquire()  # somebody without a launcher: who knows?
    again = WriterLock(folder, "r1")  # the next attempt of the same job
    again.acquire()
    monkeypatch.setenv("PACELINE_RUN_DIR", str(tmp_path))
    other = WriterLock(folder, "r2")  # its launcher has the whole run directory
    other.acquire()
    assert json.loads((folder / "writer.json").read_text())["run"] == "r2"
    third = WriterLock(folder, "")
    third.acquire(force=True)  # a launcher has said so
    assert third.is_held
    frozen.release()
    third.refresh()  # has the kernel's lock as soon as it can be had
    with pytest.raises(SettingError):
        WriterLock(folder, "").acquire()
    for one in (again, other, third):
        one.release()


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("500", SavePolicy(500)),
        ("10m", SavePolicy(seconds=600)),
        ("epoch, 1.5h", SavePolicy(seconds=5400, epochs=True)),
        ("never", SavePolicy()),
    ],
)
def test_policy(text: str, meant: SavePolicy) -> None:
    assert parse_policy(text) == meant


def test_a_number_of_steps_may_be_one(tmp_path: Path) -> None:
    with train.join(device="cpu", run_dir=tmp_path, quiet=True) as session:
        model = torch.nn.Linear(1, 1)
        session.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        with pytest.raises(SettingError, match="checkpoint-every"):
            session.checkpoints(every=0)
        assert not session.checkpoints(every=200)


@pytest.mark.parametrize("fails_at", [4, 8, 12])
def test_an_evaluation_that_was_due_is_made_after_resuming(tmp_path: Path, fails_at: int) -> None:
    """A checkpoint of a step with an evaluation in mid-epoch is saved before that."""
    evaluated: list[int] = []

    def training(fails: int = 0) -> None:
        with train.join(device="cpu", run_dir=tmp_path, quiet=True) as session:
            model = torch.nn.Linear(1, 1)
            net = session.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
            session.checkpoints(every=1)
            loader = session.loader(torch.utils.data.TensorDataset(torch.ones(64, 1)), 8)
            for _ in session.epochs(loader, 2, every=4):
                for (x,) in loader:
                    session.step(net(x).mean(1))
                if session.progress.step == fails:
                    raise ValueError("in the evaluation")
                evaluated.append(session.progress.step)

    with pytest.raises(ValueError, match="evaluation"):
        training(fails_at)
    assert evaluated == [*range(4, fails_at, 4)]
    training()
    assert evaluated == [4, 8, 12, 16]


def stopped_in_step_2(folder: Path, every: int, then: Callable[[Any], None]) -> None:
    """A training with checkpoints that is asked to stop; ``then`` gets its keeper just before."""

    def training() -> None:
        with train.join(device="cpu", run_dir=folder) as session:
            model = torch.nn.Linear(1, 1)
            net = session.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
            session.checkpoints(every=every)
            loader = session.loader(torch.utils.data.TensorDataset(torch.ones(64, 1)), 8)
            for _ in session.epochs(loader, 99):
                for (x,) in loader:
                    session.step(net(x).mean(1))
                    if session.progress.step == 2:
                        assert session._checkpoints.keeper is not None
                        then(session._checkpoints.keeper)
                        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as ended:
        training()
    assert ended.value.code == 143


@pytest.mark.parametrize("saved", [0, 2])
def test_a_stop_on_a_full_disk_claims_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], saved: int
) -> None:
    """It says what is not saved, and of which step the last good one is."""

    def fill() -> None:
        usage = shutil.disk_usage(tmp_path)._replace(free=1000)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)

    def fill_after_the_checkpoint(keeper: Any) -> None:
        keeper._writer.wait()
        fill()

    if not saved:
        fill()
    stopped_in_step_2(tmp_path, 2, fill_after_the_checkpoint)
    good = "the last good one is of step 2" if saved else "there is none yet"
    err = capsys.readouterr().err
    assert re.search(rf"is too full: .*: {good}", err)
    assert ("before the same command resumes it" in err) == bool(saved)
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    (stopped,) = [one for one in read_events(map(json.loads, lines)) if one.kind == "stopped"]
    assert stopped["saved"] == saved
    assert stopped.resumable == bool(saved)


def test_a_stop_saves_again_where_a_rank_was_lost_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What that rank was writing is not there."""

    def lose(keeper: Any) -> None:
        monkeypatch.undo()
        for folder in (tmp_path / "checkpoints").glob("[0-9]*"):
            shutil.rmtree(folder)
        keeper.renew()

    def lose_when_it_stops(keeper: Any) -> None:
        monkeypatch.setattr(keeper._copies, "hurry", lambda _: lose(keeper))

    stopped_in_step_2(tmp_path, 99, lose_when_it_stops)
    assert [one.name for one in (tmp_path / "checkpoints").glob("[0-9]*")] == ["3"]


@pytest.mark.parametrize("text", ["", "0", "often", "10x", "-5"])
def test_policy_that_cannot_be(text: str) -> None:
    with pytest.raises(SettingError, match="checkpoint-every"):
        parse_policy(text)


def test_due() -> None:
    assert [step for step in range(1, 7) if SavePolicy(3).is_due_at_step(step)] == [3, 6]
    assert SavePolicy(seconds=5).is_due_after(5.0)
    assert not SavePolicy().is_due_after(1e9)


def test_random_generators_go_on() -> None:
    random.gauss(0, 1), np.random.randn()  # half of a pair stays behind
    state = generator_state(torch.device("cpu"))
    first = random.gauss(0, 1), random.random(), np.random.randn(), torch.rand(2).tolist()
    set_generator_state(state, torch.device("cpu"))
    again = random.gauss(0, 1), random.random(), np.random.randn(), torch.rand(2).tolist()
    assert first == again


def test_polls() -> None:
    assert next_poll(0.01, 0.5, 40) == 50
    assert next_poll(0.01, 0.5, 10) == 20
    assert next_poll(3.0, 0.5, 10) == 1
    assert next_poll(0.0, 0.5, 1000) == 64


def test_signals_are_taken_and_given_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    notice = SignalNotice()
    notice.open()
    os.kill(os.getpid(), signal.SIGUSR2)
    os.kill(os.getpid(), signal.SIGTERM)
    assert (notice.save, notice.stop) == (True, "SIGTERM")
    notice.close()
    assert signal.getsignal(signal.SIGTERM) == before


def test_records_survive(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = RecordFile(path)
    for step in (1, 2, 3):
        first.append({"step": step, "split": "train", "loss": float("inf")})
    with path.open("ab") as file:
        file.write(b'{"step": 4, "spl')  # killed while writing
    second = RecordFile(path)
    second.skip_recorded()
    for step in (2, 3, 4):
        second.append({"step": step, "split": "train"})
        second.append({"step": step, "split": "test"})
    assert recorded_steps(path) == {"train": 4, "test": 4}
    steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert steps == [1, 2, 3, 2, 3, 4, 4]
    second.back_up()
    assert not path.exists()


def test_names_of_the_folder() -> None:
    assert (CHECKPOINTS, MANIFEST) == ("checkpoints", "manifest.json")
