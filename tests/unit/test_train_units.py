"""Tests parts of the training library separately: place, device, metrics, checksums, weights."""

from __future__ import annotations

import errno
import json
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import nn

from paceline.program import guarded
from paceline.spec import launchers
from paceline.spec.errors import DataError, JobError, NodeError, SettingError
from paceline.train import parallel, weights, world
from paceline.train.comms import FIRST_MESSAGE_BYTES, Comms
from paceline.train.data import disks
from paceline.train.device import (
    AvailableDevices,
    available_devices,
    choose_backend,
    choose_device,
    precision,
)
from paceline.train.elastic import replica_check
from paceline.train.measure.pace import summary
from paceline.train.metrics import Best, Meter
from paceline.train.report import (
    BarScreen,
    Eta,
    FolderReporter,
    LauncherReporter,
    format_record,
    format_values,
)

CPU = torch.device("cpu")
CPU_ONLY = AvailableDevices({"cuda": 0, "xpu": 0}, frozenset({"gloo"}))
TWO_GPUS = AvailableDevices({"cuda": 2, "xpu": 0}, frozenset({"gloo", "nccl"}))


def test_single_process_without_variables() -> None:
    place = world.read({})
    assert (place.rank, place.size, place.joined) == (0, 1, False)


def test_world_from_torchrun_variables() -> None:
    place = world.read({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "PACELINE_HOST": "n2"})
    assert (place.rank, place.size, place.local_rank, place.host) == (3, 4, 1, "n2")


@pytest.mark.parametrize(
    "environ", [{"RANK": "1"}, {"RANK": "2", "WORLD_SIZE": "2"}, {"RANK": "x", "WORLD_SIZE": "2"}]
)
def test_rejects_invalid_world_variables(environ: dict[str, str]) -> None:
    with pytest.raises(SettingError):
        world.read(environ)


def test_rejects_world_that_differs_from_plan() -> None:
    with pytest.raises(JobError, match="plan has 4 processes"):
        world.check_planned(world.World(size=1), {"PACELINE_WORLD_SIZE": "4"})
    world.check_planned(world.World(size=4), {"PACELINE_WORLD_SIZE": "4"})


@pytest.mark.parametrize(
    "length",
    [
        0,
        1,
        FIRST_MESSAGE_BYTES - 9,
        FIRST_MESSAGE_BYTES - 8,
        FIRST_MESSAGE_BYTES - 7,
        5 * FIRST_MESSAGE_BYTES,
    ],
)
def test_texts_of_any_length_round_trip(length: int) -> None:
    """Short texts are sent at once, long ones after their length; ``é`` has two bytes."""
    comms, text = Comms(world.World(), CPU), ("\0é" * length).encode()[:length].decode("latin-1")
    assert comms.texts(text) == [text]
    assert comms.text_of(0, text) == comms.text_of(0, text, 64) == text


def test_device_choice() -> None:
    assert choose_device("auto", CPU_ONLY, 0).type == "cpu"
    assert choose_device("auto", TWO_GPUS, 1) == torch.device("cuda", 1)
    with pytest.raises(SettingError, match="no such device"):
        choose_device("cuda", CPU_ONLY, 0)
    with pytest.raises(SettingError, match="nproc-per-node 2"):
        choose_device("cuda", TWO_GPUS, 2)


def test_backend_choice() -> None:
    assert choose_backend("auto", CPU, CPU_ONLY) == "gloo"
    assert choose_backend("auto", torch.device("cuda", 0), TWO_GPUS) == "nccl"
    with pytest.raises(SettingError, match="cuda devices only"):
        choose_backend("nccl", CPU, TWO_GPUS)
    with pytest.raises(SettingError, match="built without it"):
        choose_backend("mpi", CPU, CPU_ONLY)


def test_available_backends_include_gloo() -> None:
    assert "gloo" in available_devices().backends


def test_meter_ignores_samples_beyond_count() -> None:
    meter = Meter(lambda vector: vector, CPU)
    meter.add(2, loss=torch.tensor([1.0, 2.0]), hit=torch.tensor([True, False]))
    meter.add(0, loss=torch.tensor([100.0]), hit=torch.tensor([True]))
    meter.add(1, loss=torch.tensor([6.0]), hit=torch.tensor([True]))
    means = meter.result()
    assert (means.count, means["loss"], means.sums["hit"]) == (3, 3.0, 2.0)
    assert meter.empty


def test_best_stops_after_patience() -> None:
    best = Best(patience=2)
    values = [0.1, 0.3, 0.2, 0.3, 0.4]
    assert [best.update(value, step) for step, value in enumerate(values[:4], 1)] == [
        True, True, False, False,
    ]  # fmt: skip
    assert best.stop
    assert (best.value, best.step) == (0.3, 2)
    other = Best(patience=5)
    other.load_state_dict(best.state_dict())
    assert not other.stop
    assert other.update(values[4], 5)


def test_best_tracks_minimum() -> None:
    best = Best(higher=False)
    assert [best.update(value, step) for step, value in enumerate((2.0, 3.0, 1.0))] == [
        True, False, True,
    ]  # fmt: skip
    assert not best.stop


def test_checksum_detects_bit_flips() -> None:
    tensor = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    before = replica_check.checksums([tensor])
    words = tensor.view(torch.int64).view(-1)
    for place in range(words.numel()):
        for bit in (0, 1, 31, 62):
            words[place] ^= 1 << bit
            assert replica_check.checksums([tensor]) != before
            words[place] ^= 1 << bit
    assert replica_check.checksums([tensor]) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
def test_checksum_of_any_dtype(dtype: torch.dtype) -> None:
    tensor = torch.ones(3, 2).to(dtype)
    assert replica_check.checksums([tensor, tensor.t()]).shape == (2,)


def test_divergence_is_named() -> None:
    sums = torch.tensor([[1, 2, 3], [1, 5, 4], [1, 2, 3]])
    with pytest.raises(JobError) as caught:
        replica_check.compare(
            ["a", "b", "c"], sums, ["rank 0 on n1", "rank 1 on n2", "rank 3 on n3"]
        )
    assert "first differing tensor: b; rank 1 on n2" in caught.value.found
    with pytest.raises(JobError, match="no majority among rank 0 on n1, rank 1 on n2"):
        replica_check.compare(["a", "b", "c"], sums[:2], ["rank 0 on n1", "rank 1 on n2"])


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.Embedding(4, 2, sparse=True)), "Embedding.* in 1"),
        (nn.EmbeddingBag(4, 2, sparse=True), "EmbeddingBag.* in the model"),
        (nn.Linear(2, 2, dtype=torch.complex64), "weight is complex64"),
    ],
)
def test_rejects_sparse_and_complex_gradients(model: nn.Module, said: str) -> None:
    with pytest.raises(SettingError, match="several ranks") as caught:
        parallel.check_dense(model)
    assert re.search(said, caught.value.found)
    parallel.check_dense(nn.Sequential(nn.Linear(2, 2), nn.Embedding(4, 2)))


def test_single_process_needs_no_group() -> None:
    comms = Comms(world.World(), CPU)
    assert comms.texts("häh") == ["häh"]
    comms.agree("it", "x")
    assert comms.together(lambda: 3) == 3
    with pytest.raises(DataError, match="rank 0"):
        comms.together(_bad_data)


def _bad_data() -> None:
    raise DataError("bad")


def test_launcher_reporter_writes_records() -> None:
    read, write = os.pipe()
    speaker, other = LauncherReporter(write, speaks=True), LauncherReporter(write, speaks=False)
    speaker.metrics(step=1, loss=float("nan"))
    other.metrics(step=1, loss=2.0)
    other.event("joined", world=2)
    speaker.message("done")
    os.close(write)
    lines = os.read(read, 10_000).splitlines()
    os.close(read)
    assert [json.loads(line)["kind"] for line in lines] == ["metrics", "event", "say"]


def test_reporter_ignores_lost_launcher() -> None:
    read, write = os.pipe()
    os.close(read)
    reporter = LauncherReporter(write, speaks=True)
    reporter.message("anybody?")
    reporter.message("nobody")
    os.close(write)


def test_folder_reporter_writes_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reporter = FolderReporter(tmp_path / "run")
    reporter.metrics(step=1, epoch=1, split="train", loss=0.5)
    reporter.metrics(step=1, epoch=1, split="test", loss=0.25)  # the session prints these
    reporter.event("joined")
    reporter.message("accuracy 1.0")
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == [0.5, 0.25]
    assert "joined" in (tmp_path / "run/events.jsonl").read_text()
    assert capsys.readouterr().out == "epoch 2  step 1  train: loss 0.5\naccuracy 1.0\n"


def test_format_record() -> None:
    line = format_record({"step": 2, "epoch": 1, "split": "train", "loss": 0.123456, "samples": 9})
    assert line == "epoch 2  step 2  train: loss 0.1235"


def test_format_values_of_epoch() -> None:
    parts = [("train", {"loss": 2 / 3}), ("test", {"samples": 9, "accuracy": 0.9755555555555555})]
    assert format_values(0, 3, 9, parts) == (
        "epoch 1  step 3/9  train: loss 0.6667  test: accuracy 0.9756"
    )


def test_weights_round_trip(tmp_path: Path) -> None:
    module = nn.Linear(3, 2)
    weights.save_model(tmp_path, module.state_dict(), {"model": "linear"})
    other = nn.Linear(3, 2)
    weights.load_weights(tmp_path, other)
    assert torch.equal(module.weight, other.weight)
    assert weights.load_config(tmp_path)["model"] == "linear"
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


def test_rejects_damaged_weights(tmp_path: Path) -> None:
    weights.save_model(tmp_path, nn.Linear(3, 2).state_dict(), {})
    path = tmp_path / "model/model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="hash differs"):
        weights.load_weights(tmp_path, nn.Linear(3, 2))


def test_load_config_without_model(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no trained model"):
        weights.load_config(tmp_path)


def test_rejects_oversized_model_config(tmp_path: Path) -> None:
    """Such a file may be in a run directory from another user."""
    weights.save_model(tmp_path, nn.Linear(3, 2).state_dict(), {})
    with (tmp_path / "model/config.json").open("wb") as file:
        file.truncate(1 << 41)
    with pytest.raises(DataError, match=r"config\.json cannot be read") as refusal:
        weights.load_config(tmp_path)
    assert "more than 64 MiB" in refusal.value.found


def test_precision_names() -> None:
    assert precision("bf16").compute is torch.bfloat16
    assert precision("float64").scaler(CPU) is None
    with pytest.raises(SettingError, match="float16"):
        precision("float16")


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        (
            {
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            },
            ("1", "2", "1", "2", "127.0.0.1"),
        ),
        (
            {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"},
            ("0", "2", "0", "2", "127.0.0.1"),
        ),
        (
            {
                "SLURM_PROCID": "4",
                "SLURM_STEP_NUM_TASKS": "5",
                "SLURM_LOCALID": "0",
                "SLURM_NODEID": "2",
                "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
                "SLURM_STEP_NODELIST": "gpu[07-08],big1",
                "SLURM_JOB_ID": "12",
                "SLURM_STEP_ID": "0",
            },
            ("4", "5", "0", "1", "gpu07"),
        ),
    ],
)
def test_variables_of_mpi_and_slurm_launchers(
    environ: dict[str, str], place: tuple[str, ...]
) -> None:
    said = launchers.torchrun_variables(environ, 77)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    assert tuple(said[name] for name in names) == place
    assert 20_000 <= int(said["MASTER_PORT"]) < 30_000
    assert launchers.torchrun_variables(environ, 77) == said


def test_ignores_slurm_allocation_without_step() -> None:
    assert launchers.torchrun_variables({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, 1) == {}


RANK_VARIABLES = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def test_foreign_variables_round_trip() -> None:
    """Variables for a rank are read back as the same place, for each launcher."""
    place = {**RANK_VARIABLES, "GROUP_RANK": "1"}
    said = launchers.foreign_variables(launchers.MPI_DIALECTS, place)
    for dialect in launchers.DIALECTS:
        if dialect.name in launchers.MPI_DIALECTS:
            names = (dialect.rank, dialect.size, dialect.local_rank, dialect.local_size)
            dialect_variables = {name: said.pop(name) for name in names}
            found = launchers.torchrun_variables(
                {**dialect_variables, "MASTER_ADDR": "n1", "MASTER_PORT": "5"}, 1
            )
            assert {name: found[name] for name in RANK_VARIABLES} == RANK_VARIABLES
    assert said == {}  # in particular, no variable of a process manager
    assert launchers.foreign_variables(launchers.SRUN_DIALECTS, place) == {
        "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}  # fmt: skip
    assert launchers.foreign_variables([launchers.ONECCL], place) == {
        "CCL_LOCAL_RANK": "1", "CCL_LOCAL_SIZE": "2"}  # fmt: skip
    assert launchers.foreign_variables([], place) == {}


def test_rejects_missing_master_address() -> None:
    environ = {
        "PMI_RANK": "0", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2",
    }  # fmt: skip
    with pytest.raises(SettingError, match="MASTER_ADDR and MASTER_PORT not set"):
        launchers.torchrun_variables(environ, 1)
    said = launchers.torchrun_variables({**environ, "MASTER_ADDR": "n1", "MASTER_PORT": "5"}, 1)
    assert (said["MASTER_ADDR"], said["MASTER_PORT"]) == ("n1", "5")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("a[03-07,9],b", "a03"),
        ("r[1,3]-x,y", "r1-x"),
        ("c[5]", "c5"),
    ],
)
def test_first_node(nodes: str, first: str) -> None:
    assert launchers.first_node(nodes) == first


@pytest.mark.parametrize(
    ("storages", "leads", "makers"),
    [
        ("aaaa", [True, False, True, False], [0]),  # a shared disk, two ranks per node
        ("aabb", [True, False, True, False], [0, 2]),  # private disks
        ("aab", [True, True, True], [0, 2]),  # two nodes share a disk, one does not
    ],
)
def test_elects_one_maker_per_storage(
    tmp_path: Path, storages: str, leads: list[bool], makers: list[int]
) -> None:
    size = len(storages)
    said, barrier = [""] * size, threading.Barrier(size, timeout=20)

    def body(rank: int) -> bool:
        def texts(mine: str) -> list[str]:
            said[rank] = mine
            barrier.wait()
            gathered = [*said]
            barrier.wait()
            return gathered

        place = world.World(rank, size, local_rank=int(not leads[rank]))
        comms = cast(Comms, SimpleNamespace(world=place, texts=texts))
        _, mine, chosen = disks._elect_makers(comms, tmp_path / storages[rank])
        return mine in chosen

    with ThreadPoolExecutor(size) as pool:
        found = [*pool.map(body, range(size))]
    assert [rank for rank, makes in enumerate(found) if makes] == makers
    assert not [*tmp_path.glob("*/*")]


def test_progress_bar_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = BarScreen()
    progress_values = {
        "steps": 9,
        "epoch": 1,
        "epochs": 2,
        "loss": float("nan"),
        "samples_per_s": 3.0,
    }
    screen.progress(step=0, **progress_values)
    screen.message("[not markup]")
    screen.metrics(step=3, epoch=1, split="test", loss=0.5)
    screen.progress(step=9, **progress_values)
    screen.close()


def test_time_summary() -> None:
    parts = {"data": 0.1, "waiting": 0.02, "moving": 0.25, "computing": 0.63}
    parts |= {"saving": 0.0, "other": 0.001}
    assert summary(100, 6400, 10.0, 1.0, parts) == (
        "trained 100 steps, 6,400 samples in 10 s: 640 samples/s (waiting for data 10%,"
        " waiting for slower ranks 2%, communication 25%, computing 63%)"
    )
    assert summary(1, 1, 0.0, 0.0, None).startswith("trained 1 step, 1 sample in")
    assert summary(1, 1, 0.0, 0.0, None).endswith("(waiting for data 0%)")
    assert summary(2, 0, 0.0, 0.0, None) == "trained 2 steps"


def test_widened_keeps_precision() -> None:
    network = nn.Sequential(nn.Linear(2, 2).double(), nn.Linear(2, 2).half(), nn.BatchNorm1d(2))
    for name, formats in (
        ("float32", [torch.float64, torch.float32, torch.float32]),
        ("float64", [torch.float64] * 3),
    ):
        widened = precision(name).widened(network)
        assert [widened[i].weight.dtype for i in range(3)] == formats
    assert widened[2].num_batches_tracked.dtype == torch.int64


def test_remaining_time() -> None:
    eta = Eta()
    assert not eta.is_known
    eta.update(3, 100)
    eta.update(3, 100)
    assert not eta.is_known
    eta.update(50, 50)
    assert eta.remaining() == "0:00:00"


def test_tied_weights_are_saved_twice(tmp_path: Path) -> None:
    tied = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    tied[1].weight = tied[0].weight
    weights.save_model(tmp_path, tied.state_dict(), {})
    other = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    weights.load_weights(tmp_path, other)
    assert torch.equal(other[0].weight, other[1].weight)
    assert torch.equal(other[0].weight, tied[0].weight)


def test_shared_error_is_printed_by_origin_rank(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Printed by the rank in which it occurred, or by the launcher; each rank's log has it."""
    error = JobError("stopped", found="checkpoint of step 3", exit_code=143)

    def fail() -> None:
        raise error

    for origin, rank, shown in ((None, 1, True), (0, 1, False), (1, 1, True)):
        monkeypatch.setenv("RANK", str(rank))
        error.origin_rank = origin
        assert guarded(fail) == 143
        assert ("checkpoint of step 3" in capsys.readouterr().err) == shown
    read, write = os.pipe()
    monkeypatch.setenv("PACELINE_EVENT_FD", str(write))
    error.origin_rank = 0
    assert guarded(fail) == 143
    os.close(write)
    said = json.loads(os.read(read, 10_000))
    os.close(read)
    assert (said["kind"], said["origin"], said["message"]) == ("exception", 0, "stopped")
    assert said["traceback"] == "  found:  checkpoint of step 3"
    assert capsys.readouterr().err.startswith("paceline: stopped")


def test_model_falls_back_to_second_disk_when_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, other = tmp_path / "full", tmp_path / "other"
    full.mkdir()
    other.mkdir()
    write = weights.files.write_bytes

    def fail_on_full_disk(path: Path, content: bytes, **options: bool) -> None:
        if full in path.parents:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, content, **options)

    monkeypatch.setattr(weights.files, "write_bytes", fail_on_full_disk)
    monkeypatch.setattr(weights, "_fallback_folder", lambda folder, size: other)
    assert weights.save_model(full, {"w": torch.ones(2)}, {"a": 1}) == other
    assert (other / "model" / "model.safetensors").is_file()
    assert (other / "model" / "config.json").is_file()
    monkeypatch.setattr(weights, "_fallback_folder", lambda folder, size: None)
    with pytest.raises(NodeError, match="cannot be written"):
        weights.save_model(full, {"w": torch.ones(2)}, {"a": 1})
