"""Tests folders of shards: the index, the exact order, and errors that name shard and member."""

from __future__ import annotations

import gc
import io
import os
import pickle
import random
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.spec.errors import DataError, SettingError
from paceline.train import ShardedDataset, write_shards
from paceline.train.data import shards, tars
from paceline.train.data.disk_lock import exclusive_lock
from paceline.train.data.fetch import BatchRequest, Draws, Fetch, order_of, with_prefetch_hints
from paceline.train.data.order import ShardOrder

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Creates three shards with 37 samples in total."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder = tmp_path / "shards"
    samples = ({"npy": np.full(3, i), "cls": i % 5, "txt": f"text {i}"} for i in range(37))
    assert len(write_shards(folder, samples, size=40_000)) == 3
    return folder


# -- the order ---------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 30), min_size=1, max_size=9), st.integers(1, 5), st.integers(1, 50))
def test_epoch_contains_each_sample_once(counts: list[int], concurrency: int, window: int) -> None:
    order = ShardOrder(
        sum(counts), 3, shard_sizes=np.array(counts), num_concurrent=concurrency, window=window
    )
    for epoch in range(2):
        whole = order.epoch(epoch)
        assert sorted(whole.tolist()) == list(range(sum(counts)))
        positions = np.arange(sum(counts))[::3]
        assert np.array_equal(order.at(epoch, positions), whole[positions])


def test_shard_order_matches_recorded_values() -> None:
    """Compares with recorded values: other versions must resume a run in the same order."""
    order = ShardOrder(12, 7, shard_sizes=np.array([5, 3, 4]), num_concurrent=2, window=4)
    assert [order.epoch(epoch).tolist() for epoch in (0, 2)] == RECORDED
    assert ShardOrder(12, 7, False, shard_sizes=np.array([12])).epoch(1).tolist() == list(range(12))


RECORDED = [
    [5, 8, 6, 9, 11, 10, 7, 0, 1, 3, 2, 4],
    [1, 0, 9, 8, 2, 3, 11, 10, 4, 5, 7, 6],
]


def test_window_reads_few_shards() -> None:
    """The samples of one window come from few shards, and in each from one place."""
    order = ShardOrder(8000, 1, shard_sizes=np.full(80, 100), num_concurrent=4, window=50)
    ids = order.epoch(0)
    for start in range(0, 8000, 50):
        part = ids[start : start + 50]
        shard_ids = np.unique(part // 100)
        assert len(shard_ids) <= 4
        assert all(np.ptp(part[part // 100 == shard]) < 50 for shard in shard_ids)
    assert not np.array_equal(np.sort(ids[:400]), np.sort(order.epoch(1)[:400]))


# -- reading --------------------------------------------------------------------------------


def test_samples_round_trip(folder: Path) -> None:
    data = ShardedDataset(folder)
    assert (len(data), data.counts.tolist()) == (37, [14, 14, 9])
    assert data.numbers.tolist() == [i % 5 for i in range(37)]
    sample = data[21]
    assert sample["npy"].tolist() == [21, 21, 21]
    assert (sample["cls"], sample["txt"], sample["__key__"]) == (1, "text 21", "000000021")
    chosen = ShardedDataset(folder, lambda one: int(one["cls"]), pattern="0000[12].tar")
    assert [chosen[i] for i in range(len(chosen))] == [i % 5 for i in range(37)][-len(chosen) :]
    with pytest.raises(SettingError, match="holds shards already"):
        write_shards(folder, [])
    with pytest.raises(SettingError, match=r"the key 'a\.b'"):
        write_shards(folder / "new", [{"__key__": "a.b", "txt": ""}])


def test_reads_foreign_tar_files(tmp_path: Path) -> None:
    """Covers folders, long names, PAX headers, ./ prefixes, files without a suffix, and no .cls."""
    long_name = "class one/" + "x" * 150
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.GNU_FORMAT) as tar:
        for name in (
            "./",
            "./class one",
            f"./{long_name}.seg.PNG",
            f"./{long_name}.json",
            "README",
            "./b.x",
        ):
            member = tarfile.TarInfo(name)
            member.type = tarfile.REGTYPE if "." in name[2:] else tarfile.DIRTYPE
            member.size = 4 if member.isreg() else 0
            tar.addfile(member, io.BytesIO(b"1234"))
    with tarfile.open(tmp_path / "b.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        member = tarfile.TarInfo("é" * 120 + ".txt")
        member.size = 2
        tar.addfile(member, io.BytesIO(b"hi"))
    data = ShardedDataset(tmp_path)
    assert data.counts.tolist() == [2, 1]
    assert data[0] == {"__key__": long_name, "seg.png": b"1234", "json": 1234}
    assert data[1] == {"__key__": "b", "x": b"1234"}
    assert data[2] == {"__key__": "é" * 120, "txt": "hi"}
    assert data.numbers.tolist() == [-1, -1, -1]


def test_reads_parquet_rows(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for number in range(2):
        table = pa.table({"text": [f"{number} {row}" for row in range(10)], "label": range(10)})
        pq.write_table(table, tmp_path / f"{number}.parquet", row_group_size=4)
    data = ShardedDataset(tmp_path, window=4)
    assert len(data) == 20
    assert [data[i]["text"] for i in (0, 7, 19)] == ["0 0", "0 7", "1 9"]
    (tmp_path / "1.parquet").write_bytes((tmp_path / "0.parquet").read_bytes()[:-10])
    with pytest.raises(DataError, match=r"1\.parquet cannot be used"):
        ShardedDataset(tmp_path)


def test_workers_match_order_and_randomness(folder: Path) -> None:
    def decode(sample: shards.Sample) -> Any:
        noise = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return torch.tensor([int(sample["cls"]), *noise], dtype=torch.float64), os.getpid()

    data = ShardedDataset(folder, decode)
    ids = order_of(data, 3, True).epoch(1)
    orders = [
        BatchRequest(
            ids[start : start + 8], Draws(3, 1, np.arange(start, min(start + 8, 37))), start
        )
        for start in range(0, 37, 8)
    ]
    local_batches = list(Fetch(data, CPU)(orders))
    worker_fetch = Fetch(data, CPU, workers=2)
    for _ in range(2):
        for (tag, local_data), (worker_tag, worker_data) in zip(
            local_batches, worker_fetch(orders), strict=True
        ):
            assert tag == worker_tag
            assert torch.equal(local_data[0], worker_data[0])
            assert os.getpid() not in worker_data[1]
    worker_fetch._loader = None
    unpickled = pickle.loads(
        pickle.dumps(ShardedDataset(folder))
    )  # as for a worker that is not forked
    assert unpickled[3]["txt"] == "text 3"


def test_reads_only_requested_samples_in_file_order(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adjacent samples are read with one request, in whatever order they are requested."""
    advised: list[tuple[int, int]] = []
    read: list[tuple[int, int]] = []
    pread = os.pread
    monkeypatch.setattr(
        os, "posix_fadvise", lambda _, offset, size, __: advised.append((offset, size))
    )
    monkeypatch.setattr(
        os,
        "pread",
        lambda file, size, offset: read.append((offset, size)) or pread(file, size, offset),
    )
    data = ShardedDataset(folder)
    ids = np.array([20, 3, 2, 9, 4, 20])
    data.will_need(ids)
    assert advised == [(2 * 3072, 3 * 3072), (9 * 3072, 3072), (6 * 3072, 3072)]
    assert [one["txt"] for one in data.raw(ids)] == [f"text {n}".encode() for n in ids]
    assert read == [(n * 3072, 3072) for n in (2, 3, 4, 9, 20 - 14)]


def test_prefetch_hints_cover_next_samples() -> None:
    hinted: list[list[int]] = []
    orders = [BatchRequest(np.arange(i, i + 4), None, i) for i in range(0, 40, 4)]
    hinted_requests = with_prefetch_hints(
        orders, lambda ids: hinted.append(ids.tolist()), min_samples=8
    )
    for position, one in enumerate(hinted_requests):
        assert {*range(one.tag, min(one.tag + 8, 40))} <= {i for ids in hinted for i in ids}
        assert position == one.tag // 4
    assert [i for ids in hinted for i in ids] == list(range(40))


# -- the index ---------------------------------------------------------------------------------


def test_reindexes_only_changed_shards(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scanned: list[str] = []

    def scan(path: Path) -> Any:
        scanned.append(path.name)
        return tars.scan(path)

    monkeypatch.setitem(shards._FORMATS, ".tar", scan)
    first = ShardedDataset(folder, pattern="0000[01].tar")
    assert sorted(scanned) == ["00000.tar", "00001.tar"]
    whole = ShardedDataset(folder)
    assert sorted(scanned) == ["00000.tar", "00001.tar", "00002.tar"]
    assert isinstance(whole._index.spans, np.memmap)  # memory shared by all ranks of a node
    assert ShardedDataset(folder).fingerprint == whole.fingerprint != first.fingerprint
    os.utime(folder / "00001.tar", ns=(1, 1))
    with pytest.raises(DataError, match=r"00001\.tar.*\n.*changed after it had been indexed"):
        ShardedDataset.__getitem__(whole, 20)
    assert ShardedDataset(folder)[20]["txt"] == "text 20"
    assert scanned[3:] == ["00001.tar"]
    (folder / "00001.tar").unlink()
    assert len(ShardedDataset(folder)) == 37 - whole.counts[1]
    (folder / ".paceline-index" / "index.json").write_text("{")
    assert len(ShardedDataset(folder)) == 37 - whole.counts[1]
    assert len([*(folder / ".paceline-index").glob("spans-*")]) == 1


def test_index_falls_back_to_home_folder(folder: Path, tmp_path: Path) -> None:
    (folder / ".paceline-index").write_text("in the way, also for root")
    assert len(ShardedDataset(folder)) == 37
    assert len([*(tmp_path / "home").rglob("index.json")]) == 1


def test_index_is_not_written_through_symlink(folder: Path, tmp_path: Path) -> None:
    """A folder from another source may contain a link to any other folder."""
    target = tmp_path / "other"
    target.mkdir()
    (target / "index.json").write_text("{}")
    (folder / ".paceline-index").symlink_to(target)
    assert len(ShardedDataset(folder)) == 37
    assert [path.name for path in target.iterdir()] == ["index.json"]
    assert (target / "index.json").read_text() == "{}"


def test_ignores_index_of_another_user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise that user could hold its lock and change the positions of samples."""
    index, lstat = folder / ".paceline-index", Path.lstat
    index.mkdir()

    def fake_lstat(path: Path) -> object:
        status = lstat(path)
        return SimpleNamespace(st_mode=status.st_mode, st_uid=4242) if path == index else status

    monkeypatch.setattr(Path, "lstat", fake_lstat)
    assert len(ShardedDataset(folder)) == 37
    assert [*index.iterdir()] == []


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o600), (0o002, 0o620)])
def test_lock_file_modes(tmp_path: Path, umask: int, mode: int) -> None:
    path = tmp_path / "lock"
    path.touch(0o644)  # as created by an earlier version
    previous_umask = os.umask(umask)
    try:
        for lock in (path, tmp_path / "new"):
            with exclusive_lock(lock) as is_held:
                assert is_held
    finally:
        os.umask(previous_umask)
    assert path.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "new").stat().st_mode & 0o777 == mode


# -- errors ---------------------------------------------------------------------------------


def _truncate(content: bytes) -> bytes:
    return content[:4000]


def _truncate_between_members(content: bytes) -> bytes:
    return content[: 3 * 1024 + 1024]


def _overwrite_header(content: bytes) -> bytes:
    return content[:3072] + b"\xff" * 512 + content[3584:]


@pytest.mark.parametrize(
    "damage",
    [_truncate, _truncate_between_members, _overwrite_header, lambda _: b"", lambda _: b"x"],
)
def test_damaged_shard_error_names_shard(folder: Path, damage: Callable[[bytes], bytes]) -> None:
    shard = folder / "00001.tar"
    shard.write_bytes(damage(shard.read_bytes()))
    with pytest.raises(DataError, match=rf"the shard {shard} cannot be used") as raised:
        ShardedDataset(folder)
    if shard.stat().st_size > 1:
        assert ": member 0000000" in str(raised.value)


def test_rejects_scattered_sample_members(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("1.jpg", "2.jpg", "1.cls"):
            tar.addfile(tarfile.TarInfo(name))
    with pytest.raises(DataError, match=r"member 1\.cls[^$]*sample 1 do not lie together"):
        ShardedDataset(tmp_path)


def test_rejects_compressed_empty_and_mixed_folders(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no shards\n.*nothing"):
        ShardedDataset(tmp_path)
    with tarfile.open(tmp_path / "a.tar", "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("1.jpg"))
    with pytest.raises(DataError, match=r"(?s)a\.tar cannot be used.*gunzip"):
        ShardedDataset(tmp_path)
    (tmp_path / "b.parquet").touch()
    with pytest.raises(DataError, match="two kinds of shards"):
        ShardedDataset(tmp_path)
    with pytest.raises(DataError, match="no such folder"):
        ShardedDataset(tmp_path / "none")
    with pytest.raises(SettingError, match="window 0"):
        ShardedDataset(tmp_path, window=0)


def test_detects_damage_while_reading(folder: Path) -> None:
    shard = folder / "00000.tar"
    data, original_stat = ShardedDataset(folder), shard.stat()
    content = bytearray(shard.read_bytes())
    content[:100] = b"\xee" * 100
    shard.write_bytes(content)
    os.utime(shard, ns=(original_stat.st_atime_ns, original_stat.st_mtime_ns))
    with pytest.raises(DataError, match=rf"(?s)shard {shard} cannot be read.*byte 0 is damaged"):
        data[0]
    assert data[20]["txt"] == "text 20"


@pytest.mark.parametrize("workers", [0, 1])
def test_decode_error_names_sample(folder: Path, workers: int) -> None:
    def decode(sample: shards.Sample) -> int:
        return 1 // (int(sample["txt"].split()[1]) - 5)

    fetch = Fetch(ShardedDataset(folder, decode), CPU, workers)
    with pytest.raises(DataError, match=r"00000\.tar: 000000005 cannot be decoded") as raised:
        list(fetch([BatchRequest(np.array([4, 5]), None, 0)]))
    assert raised.value.found.startswith("ZeroDivisionError")
    del raised, fetch  # closes the open file of the index
    gc.collect()
