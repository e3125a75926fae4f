"""Tests that checkpoints on disk are either complete or refused."""

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
import torch._dynamo  # the first optimizer imports it, and it sets a variable
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
from paceline.train.elastic.stop import Poll, SignalNotice, next_poll
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
def test_states_round_trip(state: Any) -> None:
    tensors: dict[str, torch.Tensor] = {}
    assert unpack(json.loads(json.dumps(pack(state, tensors))), tensors) == state


def test_tensors_in_states_round_trip() -> None:
    one, two = torch.ones(2), torch.zeros(())
    tensors: dict[str, torch.Tensor] = {}
    packed = pack({"a": [one, {3: two}]}, tensors, "top")
    assert sorted(tensors) == ["top.a.0", "top.a.1.3"]
    assert unpack(packed, tensors)["a"][1][3] is tensors["top.a.1.3"]
    with pytest.raises(TypeError, match="set"):
        pack({"a": {1}}, tensors)


def test_tensor_files_load_with_safetensors(tmp_path: Path) -> None:
    tensors = {str(dtype): (torch.randn(3, 4) * 9).to(dtype).t() for dtype in DTYPES}
    tensors |= {"number": torch.tensor(3.5), "none": torch.zeros(0, 2)}
    digest, size = write_tensors(tmp_path / "x", tensors)
    assert (tmp_path / "x").stat().st_size == size
    reloaded = load_file(tmp_path / "x")
    assert all(torch.equal(reloaded[name], tensor) for name, tensor in tensors.items())
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


def write_checkpoints(root: Path, *steps: int, keep: int = 0, best: int = -1) -> Store:
    checkpoint_store = Store(root)
    writer = Writer(checkpoint_store, keep)
    for step in steps:
        writer.start(snapshot(step, step == best))
    writer.wait()
    while not writer.outcomes.empty():
        assert not writer.outcomes.get().problem
    return checkpoint_store


def load_step(
    checkpoint_store: Store, warnings_seen: list[str] | None = None, choice: str = "latest"
) -> int:
    loaded = load(
        ALONE, choice, checkpoint_store, (warnings_seen if warnings_seen is not None else []).append
    )
    assert loaded is not None
    assert float(loaded.tensors["weights.safetensors"]["w"][0, 0]) == loaded.step
    return loaded.step


def test_detects_flipped_bits_and_zeroed_pages(tmp_path: Path) -> None:
    """Applies 1,000 random damages to the files of a checkpoint."""
    checkpoint_store = write_checkpoints(tmp_path, 7)
    folder = tmp_path / "7"
    draw = random.Random(5)
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["manifest.json", "optimizer.safetensors", STATE, "weights.safetensors"]
    for number in range(1000):
        path = folder / names[number % len(names)]
        before = path.read_bytes()
        path.write_bytes(corrupt(before, draw))
        with pytest.raises(DamagedCheckpoint):
            read_manifest(folder).verify(folder)
        path.write_bytes(before)
    assert load_step(checkpoint_store) == 7


def corrupt(content: bytes, draw: random.Random) -> bytes:
    """Flips one bit, or clears one 512-byte page."""
    changed = bytearray(content)
    position = draw.randrange(len(content))
    page = slice(position // 512 * 512, position // 512 * 512 + 512)
    if draw.random() < 0.5 and any(changed[page]):
        changed[page] = bytes(len(changed[page]))
    else:
        changed[position] ^= 1 << draw.randrange(8)
    return bytes(changed)


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_device_link(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_sparse_file(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 41)


@pytest.mark.parametrize("make", [make_pipe, make_device_link, make_sparse_file])
def test_skips_pipes_devices_and_sparse_files(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """Such files may be in a run directory from another user."""
    checkpoint_store = write_checkpoints(tmp_path, 7, 8, 9)
    for name in ("9/manifest.json", f"8/{STATE}", LATEST, BEST):
        (tmp_path / name).unlink(missing_ok=True)
        make(tmp_path / name)
    assert load_step(checkpoint_store) == 7


def test_falls_back_to_newest_intact_checkpoint(tmp_path: Path) -> None:
    checkpoint_store = write_checkpoints(tmp_path, 1, 2, 3, 4)
    weights = tmp_path / "4/weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (tmp_path / "3/manifest.json").unlink()
    (tmp_path / "stray.txt").write_text("x")
    (tmp_path / "99").mkdir()
    (tmp_path / "abc").mkdir()
    (tmp_path / ".5.123.tmp").mkdir()
    warnings_seen: list[str] = []
    assert load_step(checkpoint_store, warnings_seen) == 2
    told = "\n".join(warnings_seen)
    assert "4: weights.safetensors has 3980 bytes instead of 4080" in told
    assert "3: no manifest.json" in told
    assert "99: no manifest.json" in told


def test_resume_choices(tmp_path: Path) -> None:
    checkpoint_store = write_checkpoints(tmp_path / "checkpoints", 1, 2, 3, best=2)
    assert load_step(checkpoint_store, choice="auto") == 3
    assert load_step(checkpoint_store, choice="best") == 2
    assert load_step(checkpoint_store, choice="1") == 1
    assert load_step(Store(tmp_path / "other"), choice=str(tmp_path)) == 3
    assert load_step(Store(tmp_path / "other"), choice=str(tmp_path / "checkpoints/2")) == 2
    assert load(ALONE, "never", checkpoint_store, print) is None
    assert load(ALONE, "auto", Store(tmp_path / "other"), print) is None
    with pytest.raises(DataError, match=r"3, 2, 1"):
        load(ALONE, "5", checkpoint_store, print)
    with pytest.raises(DataError, match="no such checkpoint"):
        load(ALONE, "latest", Store(tmp_path / "other"), print)
    with pytest.raises(SettingError, match="no checkpoint is there"):
        load(ALONE, str(tmp_path / "nope"), checkpoint_store, print)


def test_keeps_newest_and_best(tmp_path: Path) -> None:
    checkpoint_store = write_checkpoints(tmp_path, 1, 2, 3, 4, 5, keep=2, best=1)
    assert [one.step for one in checkpoint_store.scan()[0]] == [5, 4, 1]
    assert read_pointer(tmp_path / BEST) == "1"
    assert read_pointer(tmp_path / LATEST) == "5"
    assert expired([(1, 1), (1, 2), (1, 3)], 0, set()) == []


def test_rewriting_step_replaces_damaged_checkpoint(tmp_path: Path) -> None:
    checkpoint_store = write_checkpoints(tmp_path, 3)
    (tmp_path / "3/weights.safetensors").write_bytes(b"")
    write_checkpoints(tmp_path, 3)
    assert load_step(checkpoint_store) == 3
    assert not list(tmp_path.glob(".*"))


def test_removes_leftovers_of_killed_writers(tmp_path: Path) -> None:
    """Covers all temporary files; those that another process still writes are kept and renamed."""
    leftovers = [
        tmp_path / name for name in (".latest.json.77.tmp", ".best.json.78.tmp", ".look-1-79")
    ]
    for one in leftovers:
        one.write_bytes(b"{")
    (tmp_path / ".1.1.77.tmp").mkdir()
    with (tmp_path / ".best.json.80.tmp").open("wb") as busy:
        assert files.lock(busy.fileno())
        write_checkpoints(tmp_path, 3, keep=2)
        assert [*tmp_path.glob(".*")] == [Path(busy.name)]
    files.write_bytes(tmp_path / BEST, b"{}")
    assert not [*tmp_path.glob(".*")]


def test_rewrites_file_removed_as_leftover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_full_disk_keeps_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint_store = write_checkpoints(tmp_path, 1)
    writer = Writer(checkpoint_store, 3)

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("paceline.train.checkpoints.writer.write_tensors", full)
    writer.start(snapshot(2))
    writer.wait()
    assert "No space left" in writer.outcomes.get().problem
    assert load_step(checkpoint_store) == 1
    assert not list(tmp_path.glob(".*"))


def test_checks_free_space_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    writer = Writer(Store(tmp_path / "c"), 3)
    writer.start(snapshot(2))
    writer.wait()
    assert (
        "MB needed besides the 1 MB that checkpoints leave, 0.0 MB free"
        in writer.outcomes.get().problem
    )
    assert not list((tmp_path / "c").iterdir())


def test_snapshot_excludes_later_changes(tmp_path: Path) -> None:
    """Parameters may change after the wait, buffers immediately."""
    copier = Copier()
    weight, buffer = torch.ones(3), torch.ones(3)
    finish = copier.start({"f": {"weight": weight, "buffer": buffer}}, frozenset({"weight"}))
    buffer += 1
    copied = finish()
    copier.wait()
    weight += 1
    assert copied["f"]["weight"].tolist() == [1, 1, 1]
    assert copied["f"]["buffer"].tolist() == [1, 1, 1]


def test_detects_changes_outside_session_step() -> None:
    """The copy is discarded, and from then on everything is copied immediately."""
    copier, weight = Copier(), torch.ones(3)
    finish = copier.start({"f": {"weight": weight}}, frozenset({"weight"}))
    weight.clamp_(max=0.5)
    with pytest.raises(TornSnapshot, match=r"weight changed outside session\.step"):
        finish()
    copier.wait()
    finish = copier.start({"f": {"weight": weight}}, frozenset({"weight"}))
    weight += 1
    assert finish()["f"]["weight"].tolist() == [0.5] * 3


def test_changed_weights_drop_one_checkpoint_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The warning does not speak of a full disk, and ``stop_when_full`` does not stop."""
    start_copy = Copier.start

    def start_and_change(self: Copier, *args: Any) -> Any:
        finish = start_copy(self, *args)
        monkeypatch.setattr(Copier, "start", start_copy)
        with torch.no_grad():
            model.weight.clamp_(max=0.5)
        return finish

    monkeypatch.setattr(Copier, "start", start_and_change)
    with train.join(device="cpu", run_dir=tmp_path) as session:
        model = torch.nn.Linear(1, 1)
        net = session.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        session.checkpoints(every=1, stop_when_full=True)
        loader = session.loader(torch.utils.data.TensorDataset(torch.ones(64, 1)), 8)
        for _ in session.epochs(loader, 1):
            for (x,) in loader:
                session.step(net(x).mean(1))
                assert session._checkpoints.keeper is not None
                session._checkpoints.keeper._writer.wait()
    said = capsys.readouterr().out
    assert said.count("warning: checkpoint failed: ") == 1
    assert "weight changed outside session.step while it was copied" in said
    assert "continues without checkpoints" not in said
    folders = (tmp_path / "checkpoints").glob("[0-9]*")
    assert sorted(folder.name for folder in folders) == ["6", "7", "8"]


def test_moving_average_snapshot_excludes_later_changes() -> None:
    """The average may be updated as soon as the step has returned, while a thread still copies."""
    network = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    adam = torch.optim.AdamW(network.parameters())
    network(torch.randn(4, 2)).sum().backward()
    adam.step()
    average = torch.optim.swa_utils.AveragedModel(network)
    training = Training(
        Models({"": Updater(network, adam, None, None, None)}), Progress(), 0, {"average": average}
    )
    captured = capture(training, ALONE)
    finish = Copier().start(captured.tensors, captured.deferred)
    expected = {name: one.clone() for name, one in average.state_dict().items()}
    statistics = network[1].running_mean.clone()
    with torch.no_grad():
        for tensor in average.parameters():
            tensor += 1
        network[1].running_mean += 1
    copied = finish()
    saved_optimizer = copied["optimizer.safetensors"]
    for name, one in expected.items():
        assert torch.equal(saved_optimizer[f"extras.average.{name}"], one), name
    assert torch.equal(copied["weights.safetensors"]["1.running_mean"], statistics)
    assert {"0.weight", "training.optimizer.state.0.weight.exp_avg"} <= captured.deferred


def test_generators_restart_equally_at_other_world_size() -> None:
    """No rank's saved state fits; all generators restart, always from the same state."""
    network = torch.nn.Linear(2, 2)
    training = Training(
        Models({"": Updater(network, torch.optim.SGD(network.parameters()), None, None, None)}),
        Progress(),
        0,
    )
    captured = capture(training, ALONE)
    state = json.loads(captured.state) | {"ranks": 2}
    loaded = LoadedCheckpoint(3, state, captured.tensors, "here")
    drawn = []
    for number in range(2):
        random.seed(number), np.random.seed(number), torch.manual_seed(number)
        restore(loaded, training, ALONE)
        drawn.append((random.random(), np.random.rand(), torch.rand(2).tolist()))
    assert drawn[0] == drawn[1]


def test_second_writer_error_names_first(tmp_path: Path) -> None:
    first, second = WriterLock(tmp_path), WriterLock(tmp_path)
    first.acquire()
    with pytest.raises(SettingError) as caught:
        second.acquire()
    assert f"process {os.getpid()} on" in caught.value.found
    first.release()
    second.acquire()
    second.release()


@pytest.mark.parametrize("readable", [True, False])
def test_writer_lock_reports_smb_access_denied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, readable: bool
) -> None:
    """SMB returns EACCES to a process that requests a held lock or reads a locked file."""
    first_lock = WriterLock(tmp_path)
    first_lock.acquire()

    def denied(*_: object) -> bytes:
        raise PermissionError(errno.EACCES, "denied")

    monkeypatch.setattr("fcntl.flock", denied)
    if not readable:
        monkeypatch.setattr("os.pread", denied)
    with pytest.raises(SettingError, match="another job writes") as told:
        WriterLock(tmp_path).acquire()
    assert ("could not be read" in told.value.found) != readable
    first_lock.release()


def test_writer_lock_works_without_lock_support(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr("fcntl.flock", unknown)
    lock = WriterLock(tmp_path)
    lock.acquire()
    lock.release()


def test_retries_replace_while_file_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SMB does not replace a file that a process of this host has open."""
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
    monkeypatch.setattr(Path, "replace", lambda *_: raise_file_open())
    with pytest.raises(PermissionError):
        files.write_bytes(tmp_path / "latest.json", b"newer")
    assert (tmp_path / "latest.json").read_bytes() == b"new"


def raise_file_open() -> None:
    raise PermissionError(errno.EACCES, "open")


def test_writer_lock_of_another_host(tmp_path: Path) -> None:
    owner = {"host": "far", "pid": 1, "since": "2030-01-01 00:00:00", "run": "r1"}
    path = tmp_path / "writer.json"
    path.write_text(json.dumps(owner))
    with pytest.raises(SettingError, match="process 1 on far"):
        WriterLock(tmp_path, "r2").acquire()
    next_attempt = WriterLock(tmp_path, "r1")  # the next attempt of the same job
    next_attempt.acquire()
    next_attempt.release()
    path.write_text(json.dumps(owner))
    stale_time = time.time() - STALE_AFTER_S - 1
    os.utime(path, (stale_time, stale_time))
    late = WriterLock(tmp_path)
    late.acquire()
    late.release()


def test_wrong_clock_does_not_take_over_writer_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The age of heartbeats is computed with the clock of the disk, not with this host's clock."""
    owner = {"host": "far", "pid": 1, "since": "2030-01-01 00:00:00", "run": "r1"}
    (tmp_path / "writer.json").write_text(json.dumps(owner))
    real_time = time.time
    monkeypatch.setattr(time, "time", lambda: real_time() + 3600)
    with pytest.raises(SettingError, match="process 1 on far"):
        WriterLock(tmp_path, "r2").acquire()
    assert [one.name for one in tmp_path.iterdir()] == ["writer.json"]


def test_takes_over_lock_of_ended_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our launcher holds the run directory, so the other run's launcher has ended or was killed."""
    monkeypatch.setattr("paceline.train.checkpoints.store.WATCH_S", 0.4)
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    owner = {"host": "far", "pid": 1, "since": "2030-01-01 00:00:00", "run": "r1"}
    path = folder / "writer.json"
    path.write_text(json.dumps(owner))
    monkeypatch.setenv("PACELINE_RUN_DIR", str(tmp_path))
    lock_r2 = WriterLock(folder, "r2")
    lock_r2.acquire()
    lock_r2.release()
    path.write_text(json.dumps({**owner, "run": ""}))  # without a launcher: it may be alive
    with pytest.raises(SettingError):
        WriterLock(folder, "r2").acquire()
    path.write_text(json.dumps(owner))
    heartbeat = threading.Timer(0.2, os.utime, [path])  # a rank of it is still ending
    heartbeat.start()
    with pytest.raises(SettingError):
        WriterLock(folder, "r2").acquire()
    heartbeat.join()


def test_takes_over_lock_of_frozen_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The frozen process has the kernel's lock; its outdated token prevents it from publishing."""
    monkeypatch.setattr("paceline.train.checkpoints.store.WATCH_S", 0.2)
    folder = tmp_path / "checkpoints"
    frozen = WriterLock(folder, "r1")
    frozen.acquire()
    with pytest.raises(SettingError):
        WriterLock(folder, "r2").acquire()  # without a launcher: nothing is known
    again = WriterLock(folder, "r1")  # the next attempt of the same job
    again.acquire()
    monkeypatch.setenv("PACELINE_RUN_DIR", str(tmp_path))
    other = WriterLock(folder, "r2")  # its launcher owns the run directory
    other.acquire()
    assert json.loads((folder / "writer.json").read_text())["run"] == "r2"
    third = WriterLock(folder, "")
    third.acquire(force=True)  # by order of a launcher
    assert third.is_held
    frozen.release()
    third.refresh()  # gets the kernel's lock as soon as it is free
    with pytest.raises(SettingError):
        WriterLock(folder, "").acquire()
    for one in (again, other, third):
        one.release()


@pytest.mark.parametrize(
    ("text", "expected_policy"),
    [
        ("500", SavePolicy(500)),
        ("10m", SavePolicy(seconds=600)),
        ("epoch, 1.5h", SavePolicy(seconds=5400, epochs=True)),
        ("never", SavePolicy()),
    ],
)
def test_parse_policy(text: str, expected_policy: SavePolicy) -> None:
    assert parse_policy(text) == expected_policy


def test_checkpoint_interval_must_be_positive(tmp_path: Path) -> None:
    with train.join(device="cpu", run_dir=tmp_path, quiet=True) as session:
        model = torch.nn.Linear(1, 1)
        session.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        with pytest.raises(SettingError, match="checkpoint-every"):
            session.checkpoints(every=0)
        assert not session.checkpoints(every=200)


@pytest.mark.parametrize("fails_at", [4, 8, 12])
def test_resume_runs_due_evaluation(tmp_path: Path, fails_at: int) -> None:
    """A checkpoint in mid-epoch is saved before the evaluation of the same step."""
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


def train_with_schedule(
    folder: Path, stops_in_evaluation: int, rates: list[float], *, every: str = "never"
) -> None:
    """Trains three epochs as the tutorial does; appends the learning rate of each evaluation."""
    with train.join(device="cpu", run_dir=folder, seed=0) as session:
        network = session.place(torch.nn.Linear(2, 1))
        optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
        session.prepare(network, optimizer)
        session.checkpoints(every=every, extras={"schedule": schedule})
        data = torch.utils.data.TensorDataset(torch.ones(8, 2))
        loader, evaluation = session.loader(data, 4), session.shard(data, 1)
        for epoch in session.epochs(loader, 3):
            for (x,) in loader:
                session.step(network(x).square().mean(1))
            schedule.step()
            rates.append(optimizer.param_groups[0]["lr"])
            for number, _ in enumerate(evaluation):
                if (epoch, number) == (stops_in_evaluation, 0):
                    os.kill(os.getpid(), signal.SIGTERM)
        rates.append(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("stops_in_evaluation", [0, 1, 2])
def test_resume_in_evaluation_repeats_pause_from_its_beginning(
    tmp_path: Path, stops_in_evaluation: int
) -> None:
    undisturbed, resumed = list[float](), list[float]()
    train_with_schedule(tmp_path / "a", -1, undisturbed)
    with pytest.raises(SystemExit):
        train_with_schedule(tmp_path / "b", stops_in_evaluation, [])
    train_with_schedule(tmp_path / "b", -1, resumed)
    assert resumed == undisturbed[stops_in_evaluation:]


def test_stop_at_end_of_epoch_waits_for_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The resumed run would lack the loss that the script prints after its loop over batches."""
    monkeypatch.setattr(Poll, "is_due", lambda _: True)
    printed: list[float] = []

    def training(stops_at: int = 0) -> None:
        with train.join(device="cpu", run_dir=tmp_path) as session:
            model = torch.nn.Linear(1, 1)
            network = session.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
            session.checkpoints(every="never")
            loader = session.loader(torch.utils.data.TensorDataset(torch.ones(16, 1)), 8)
            for _ in session.epochs(loader, 3):
                for (x,) in loader:
                    if session.progress.step == stops_at - 1:
                        os.kill(os.getpid(), signal.SIGTERM)
                    loss = network(x).square().mean(1)
                    session.step(loss)
                printed.append(float(loss.detach().mean()))

    with pytest.raises(SystemExit):
        training(stops_at=4)
    assert len(printed) == 2
    training()
    assert len(printed) == 3


@pytest.mark.parametrize("every", ["1", "6", "epoch", "3,epoch"])
def test_finished_training_is_not_evaluated_again(tmp_path: Path, every: str) -> None:
    """Even if its last checkpoint was due before the evaluation."""
    rates: list[float] = []
    train_with_schedule(tmp_path, -1, rates, every=every)
    assert len(rates) == 4
    rates.clear()
    train_with_schedule(tmp_path, -1, rates, every=every)
    assert rates == [pytest.approx(0.001)]  # of the schedule, after three epochs


def run_until_stop_in_step_2(folder: Path, every: int, before_stop: Callable[[Any], None]) -> None:
    """Trains until a stop is requested in step 2; just before, calls a function with the keeper."""

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
                        before_stop(session._checkpoints.keeper)
                        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as ended:
        training()
    assert ended.value.code == 143


@pytest.mark.parametrize("saved", [0, 2])
def test_stop_on_full_disk_reports_last_saved_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], saved: int
) -> None:
    """The message says what was not saved, and the step of the last complete checkpoint."""

    def fill() -> None:
        usage = shutil.disk_usage(tmp_path)._replace(free=1000)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)

    def fill_after_the_checkpoint(keeper: Any) -> None:
        keeper._writer.wait()
        fill()

    if not saved:
        fill()
    run_until_stop_in_step_2(tmp_path, 2, fill_after_the_checkpoint)
    last_good_text = "the last good one is of step 2" if saved else "there is none yet"
    err = capsys.readouterr().err
    assert re.search(rf"is too full: .*: {last_good_text}", err)
    assert ("before the same command resumes it" in err) == bool(saved)
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    (stopped,) = [one for one in read_events(map(json.loads, lines)) if one.kind == "stopped"]
    assert stopped["saved"] == saved
    assert stopped.resumable == bool(saved)


def test_stop_saves_again_after_rank_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint that the lost rank was writing is incomplete."""

    def lose(keeper: Any) -> None:
        monkeypatch.undo()
        for folder in (tmp_path / "checkpoints").glob("[0-9]*"):
            shutil.rmtree(folder)
        keeper.renew()

    def lose_when_it_stops(keeper: Any) -> None:
        monkeypatch.setattr(keeper._copies, "hurry", lambda _: lose(keeper))

    run_until_stop_in_step_2(tmp_path, 99, lose_when_it_stops)
    assert [one.name for one in (tmp_path / "checkpoints").glob("[0-9]*")] == ["3"]


@pytest.mark.parametrize("text", ["", "0", "often", "10x", "-5"])
def test_rejects_invalid_policy(text: str) -> None:
    with pytest.raises(SettingError, match="checkpoint-every"):
        parse_policy(text)


def test_save_policy_is_due() -> None:
    assert [step for step in range(1, 7) if SavePolicy(3).is_due_at_step(step)] == [3, 6]
    assert SavePolicy(seconds=5).is_due_after(5.0)
    assert not SavePolicy().is_due_after(1e9)


def test_generator_state_round_trips() -> None:
    random.gauss(0, 1), np.random.randn()  # the second value of a pair is cached
    state = generator_state(torch.device("cpu"))
    first = random.gauss(0, 1), random.random(), np.random.randn(), torch.rand(2).tolist()
    set_generator_state(state, torch.device("cpu"))
    again = random.gauss(0, 1), random.random(), np.random.randn(), torch.rand(2).tolist()
    assert first == again


def test_next_poll() -> None:
    assert next_poll(0.01, 0.5, 40) == 50
    assert next_poll(0.01, 0.5, 10) == 20
    assert next_poll(3.0, 0.5, 10) == 1
    assert next_poll(0.0, 0.5, 1000) == 64


def test_signal_notice_restores_handlers() -> None:
    before = signal.getsignal(signal.SIGTERM)
    notice = SignalNotice()
    notice.open()
    os.kill(os.getpid(), signal.SIGUSR2)
    os.kill(os.getpid(), signal.SIGTERM)
    assert (notice.save, notice.stop) == (True, "SIGTERM")
    notice.close()
    assert signal.getsignal(signal.SIGTERM) == before


def test_record_file_survives_interrupted_write(tmp_path: Path) -> None:
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


def test_checkpoint_file_names() -> None:
    assert (CHECKPOINTS, MANIFEST) == ("checkpoints", "manifest.json")
