"""Tests checkpoints that several ranks write into one folder."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch

from paceline.spec.training.checkpoint_manifest import FileEntry
from paceline.train import parallel
from paceline.train.checkpoints import writer as parts
from paceline.train.checkpoints.capture import Snapshot
from paceline.train.checkpoints.format import STATE, WEIGHT_SHARDS, shard_file
from paceline.train.checkpoints.store import Store
from paceline.train.checkpoints.writer import PartialWrite, Writer, collect_parts, write_part

NOT_FAILED = threading.Event()


def partial_write(folder: Path, rank: int) -> PartialWrite:
    return PartialWrite(folder, rank, 3)


def test_collects_parts_of_all_ranks(tmp_path: Path) -> None:
    for rank in (1, 2):
        entry = FileEntry(str(rank) * 64, rank)
        write_part(
            partial_write(tmp_path, rank), lambda rank=rank, entry=entry: {f"w/{rank}": entry}
        )
    assert collect_parts(partial_write(tmp_path, 0), NOT_FAILED) == {
        "w/1": FileEntry("1" * 64, 1),
        "w/2": FileEntry("2" * 64, 2),
    }
    assert not list(tmp_path.iterdir())


def raise_disk_full() -> dict[str, FileEntry]:
    raise OSError(28, "No space left on device")


def test_collector_reports_write_error_of_rank(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space"):
        write_part(partial_write(tmp_path, 1), raise_disk_full)
    with pytest.raises(OSError, match=r"rank 1: .*No space left"):
        collect_parts(partial_write(tmp_path, 0), NOT_FAILED)


def test_collector_times_out_on_lost_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "STALL_TIMEOUT_S", 0.2)
    write_part(partial_write(tmp_path, 2), dict)
    with pytest.raises(OSError, match="rank 1 has not written"):
        collect_parts(partial_write(tmp_path, 0), NOT_FAILED)


def test_collector_times_out_sooner_after_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "FAILED_TIMEOUT_S", 0.1)
    failed = threading.Event()
    failed.set()
    with pytest.raises(OSError, match="rank 1, 2 has not written"):
        collect_parts(partial_write(tmp_path, 0), failed)


def snapshot(rank: int) -> Snapshot:
    name = shard_file(WEIGHT_SHARDS, rank)
    return Snapshot(
        4,
        {name: {"w": torch.full((2,), float(rank))}},
        frozenset(),
        json.dumps({"progress": {"step": 4}}).encode(),
        {"ranks": 2},
        headers={name: {"format": "pt"}},
    )


def test_publishes_when_last_part_is_written(tmp_path: Path) -> None:
    checkpoint_store = Store(tmp_path)
    first, second = Writer(checkpoint_store, 0), Writer(checkpoint_store, 0)
    folder = first.make_folder(4, 0)
    first.start(snapshot(0), PartialWrite(folder, 0, 2))
    assert not checkpoint_store.scan()[0]
    second.start(snapshot(1), PartialWrite(folder, 1, 2))
    second.wait()
    first.wait()
    checkpoint = checkpoint_store.scan()[0][0]
    checkpoint.manifest.verify(checkpoint.path)
    shards = [shard_file(WEIGHT_SHARDS, rank) for rank in (0, 1)]
    assert sorted(checkpoint.manifest.files) == [STATE, *shards]
    assert second.outcomes.get().problem == first.outcomes.get().problem == ""


def test_does_not_publish_incomplete_checkpoint(tmp_path: Path) -> None:
    checkpoint_store = Store(tmp_path)
    writer = Writer(checkpoint_store, 0)
    folder = writer.make_folder(4, 0)
    with pytest.raises(OSError, match="No space"):
        write_part(PartialWrite(folder, 1, 2), raise_disk_full)
    writer.start(snapshot(0), PartialWrite(folder, 0, 2))
    writer.wait()
    assert "No space left" in writer.outcomes.get().problem
    assert not checkpoint_store.scan()[0]
    assert not list(tmp_path.iterdir())


def test_optimizer_state_keeps_memory_format() -> None:
    """CUDA's fused kernels require equal strides, and files do not store strides."""
    network = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    network(torch.randn(1, 3, 8, 8)).sum().backward()
    optimizer.step()
    state = parallel.optimizer_state(network, optimizer)
    for parameter_state in state["state"].values():
        parameter_state["exp_avg"] = parameter_state["exp_avg"].contiguous()
    parallel.load_optimizer_state(network, optimizer, state)
    weight = network.weight
    assert optimizer.state[weight]["exp_avg"].stride() == weight.stride() != (27, 9, 3, 1)
    assert optimizer.state[weight]["exp_avg"].equal(state["state"]["weight"]["exp_avg"])
