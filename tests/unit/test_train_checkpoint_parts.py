"""A checkpoint that several ranks write into one folder."""

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

NEVER = threading.Event()


def part(folder: Path, rank: int) -> PartialWrite:
    return PartialWrite(folder, rank, 3)


def test_what_all_ranks_wrote(tmp_path: Path) -> None:
    for rank in (1, 2):
        entry = FileEntry(str(rank) * 64, rank)
        write_part(part(tmp_path, rank), lambda rank=rank, entry=entry: {f"w/{rank}": entry})
    assert collect_parts(part(tmp_path, 0), NEVER) == {
        "w/1": FileEntry("1" * 64, 1),
        "w/2": FileEntry("2" * 64, 2),
    }
    assert not list(tmp_path.iterdir())


def full() -> dict[str, FileEntry]:
    raise OSError(28, "No space left on device")


def test_a_rank_that_cannot_write_says_so(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space"):
        write_part(part(tmp_path, 1), full)
    with pytest.raises(OSError, match=r"rank 1: .*No space left"):
        collect_parts(part(tmp_path, 0), NEVER)


def test_a_rank_that_is_gone_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "STALL_TIMEOUT_S", 0.2)
    write_part(part(tmp_path, 2), dict)
    with pytest.raises(OSError, match="rank 1 has not written"):
        collect_parts(part(tmp_path, 0), NEVER)


def test_after_a_failure_the_wait_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "FAILED_TIMEOUT_S", 0.1)
    failed = threading.Event()
    failed.set()
    with pytest.raises(OSError, match="rank 1, 2 has not written"):
        collect_parts(part(tmp_path, 0), failed)


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


def test_published_when_the_last_part_is_there(tmp_path: Path) -> None:
    where = Store(tmp_path)
    first, second = Writer(where, 0), Writer(where, 0)
    folder = first.make_folder(4, 0)
    first.start(snapshot(0), PartialWrite(folder, 0, 2))
    assert not where.scan()[0]
    second.start(snapshot(1), PartialWrite(folder, 1, 2))
    second.wait()
    first.wait()
    found = where.scan()[0][0]
    found.manifest.verify(found.path)
    shards = [shard_file(WEIGHT_SHARDS, rank) for rank in (0, 1)]
    assert sorted(found.manifest.files) == [STATE, *shards]
    assert second.outcomes.get().problem == first.outcomes.get().problem == ""


def test_nothing_is_published_without_a_part(tmp_path: Path) -> None:
    where = Store(tmp_path)
    writer = Writer(where, 0)
    folder = writer.make_folder(4, 0)
    with pytest.raises(OSError, match="No space"):
        write_part(PartialWrite(folder, 1, 2), full)
    writer.start(snapshot(0), PartialWrite(folder, 0, 2))
    writer.wait()
    assert "No space left" in writer.outcomes.get().problem
    assert not where.scan()[0]
    assert not list(tmp_path.iterdir())


def test_moments_are_laid_out_as_their_parameters() -> None:
    """CUDA's fused kernels refuse others; a file knows no strides."""
    network = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    made = torch.optim.AdamW(network.parameters(), fused=True)
    network(torch.randn(1, 3, 8, 8)).sum().backward()
    made.step()
    state = parallel.optimizer_state(network, made)
    for kept in state["state"].values():
        kept["exp_avg"] = kept["exp_avg"].contiguous()
    parallel.load_optimizer_state(network, made, state)
    weight = network.weight
    assert made.state[weight]["exp_avg"].stride() == weight.stride() != (27, 9, 3, 1)
    assert made.state[weight]["exp_avg"].equal(state["state"]["weight"]["exp_avg"])
