"""Tests that small files which would expand to much memory or time are rejected by name."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.recipes.data import cifar, idx, pairs, pickle_limits, texts
from paceline.recipes.minimal import image as minimal
from paceline.recipes.options import TextOptions
from paceline.recipes.pretrained import read_weights
from paceline.spec.errors import DataError
from paceline.train.data import parquet, shards, tars
from paceline.train.reduce import collectives

# --- CIFAR's pickles


def memo(number: int) -> bytes:
    return pickle.PUT + b"%d\n" % number


def recall(number: int) -> bytes:
    return pickle.GET + b"%d\n" % number


def nested(depth: int) -> bytes:
    """Returns opcodes that push a nested tuple, whose hash takes 2**depth steps."""
    built = pickle.BININT1 + b"\1" + pickle.TUPLE1 + memo(0)
    for level in range(depth):
        built += pickle.POP + recall(level) * 2 + pickle.TUPLE2 + memo(level + 1)
    return built


ENCODE = pickle.GLOBAL + b"_codecs\nencode\n"
TEXT = pickle.BINUNICODE + struct.pack("<I", 1 << 20) + b"x" * (1 << 20)
LATIN = pickle.BINUNICODE + struct.pack("<I", 6) + b"latin1"
PICKLES = {
    "bytes that are not there": (pickle.BYTEARRAY8 + struct.pack("<Q", 1 << 40), "ends too early"),
    "a key": (pickle.EMPTY_DICT + nested(60) + pickle.NONE + pickle.SETITEM,
              "share too many parts"),
    "keys": (pickle.EMPTY_DICT + pickle.MARK + nested(60) + pickle.NONE + pickle.SETITEMS,
             "share too many parts"),
    "a dictionary": (pickle.MARK + nested(60) + pickle.NONE + pickle.DICT, "share too many parts"),
    "a set": (pickle.EMPTY_SET + pickle.MARK + nested(60) + pickle.ADDITEMS,
              "share too many parts"),
    "a frozen set": (pickle.MARK + nested(60) + pickle.FROZENSET,
                     "share too many parts"),
    "one text many times": (
        ENCODE + memo(0) + TEXT + LATIN + pickle.TUPLE2 + memo(1)
        + (recall(0) + recall(1) + pickle.REDUCE) * 300, "are not bytes of an image batch"),
    "another encoding": (ENCODE + TEXT + pickle.BINUNICODE + struct.pack("<I", 8) + b"punycode"
                         + pickle.TUPLE2 + pickle.REDUCE, "are not bytes of an image batch"),
    "many arguments": (pickle.GLOBAL + b"numpy\nndarray\n" + pickle.MARK + pickle.NONE * 99
                       + pickle.TUPLE + pickle.REDUCE, "99 arguments"),
    "a state of a function": (ENCODE + pickle.EMPTY_DICT + pickle.BUILD, "what has none"),
    "an object": (pickle.GLOBAL + b"os\nsystem\n", "asks for os.system"),
    "a persistent one": (pickle.PERSID + b"1\n", "no image batch"),
}  # fmt: skip


@pytest.mark.parametrize("name", PICKLES)
def test_rejects_pickle_bombs(tmp_path: Path, name: str) -> None:
    content, reason = PICKLES[name]
    content = pickle.PROTO + b"\2" + content + pickle.STOP
    with pytest.raises(DataError, match="data_batch_1") as exc_info:
        cifar._pickled(tmp_path / "data_batch_1", content)
    assert reason in exc_info.value.found
    (tmp_path / "meta").write_bytes(content)
    with pytest.raises(DataError, match="meta"):
        cifar._names(tmp_path / "meta")


@pytest.mark.parametrize("protocol", range(5))
def test_reads_pickled_numpy_batches(tmp_path: Path, protocol: int) -> None:
    rows = np.arange(2 * 3072, dtype=np.uint8).reshape(2, 3072)
    content = pickle.dumps({b"data": rows, b"labels": [3, 5], b"names": [b"a"]}, protocol)
    loaded, labels = cifar._pickled(tmp_path / "x", content)
    assert (loaded == rows).all()
    assert labels.tolist() == [3, 5]


# --- tar


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytearray:
    built = tarfile.TarInfo(name)
    built.type = kind
    block = bytearray(built.tobuf(tarfile.GNU_FORMAT))
    block[124:136] = tarfile.itn(size, 12, tarfile.GNU_FORMAT)
    return block


def with_checksum(block: bytearray) -> bytes:
    block[148:156] = b"        "
    block[148:156] = b"%06o\0 " % sum(block[:512])
    return bytes(block)


def sparse() -> bytes:
    block = header("x.jpg", 512, tarfile.GNUTYPE_SPARSE)
    block[386:398], block[398:410] = b"%011o\0" % 0, b"%011o\0" % 512
    block[483:495] = b"%011o\0" % (6 << 30)
    return with_checksum(block) + bytes(512)


def sparse_pax() -> bytes:
    built = tarfile.TarInfo("GNUSparseFile.0/x.jpg")
    built.size = 512
    built.pax_headers = {"GNU.sparse.major": "0", "GNU.sparse.minor": "1",
                        "GNU.sparse.name": "x.jpg", "GNU.sparse.map": "0,512",
                        "GNU.sparse.size": str(6 << 30)}  # fmt: skip
    return built.tobuf(tarfile.PAX_FORMAT) + bytes(512)


TARS = {
    "sparse": sparse(),
    "sparse, of POSIX": sparse_pax(),
    "of no size": with_checksum(header("x.jpg", -512)) + bytes(512),
    "longer than the file": with_checksum(header("x.jpg", 1 << 45)) + bytes(512),
    "a name of any length": with_checksum(header("x", 1 << 45, tarfile.GNUTYPE_LONGNAME))
    + bytes(512),
    "attributes of any length": with_checksum(header("x", 1 << 45, tarfile.XHDTYPE)) + bytes(512),
    "attributes of attributes": with_checksum(header("x", 0, tarfile.XHDTYPE)) * 3000,
}


@pytest.mark.parametrize("name", TARS)
def test_rejects_tar_members_with_invalid_size(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.tar").write_bytes(TARS[name] + bytes(1024))
    with pytest.raises(DataError, match=r"a.tar"):
        tars.scan(tmp_path / "a.tar")


@pytest.mark.parametrize("name", ["sparse", "sparse, of POSIX", "of no size"])
def test_unpack_rejects_samples_with_invalid_size(name: str) -> None:
    with pytest.raises(ValueError, match=r"sparse|of no size|larger than its sample"):
        tars.unpack(TARS[name])


@pytest.mark.parametrize("shape", [(1 << 50,), (1 << 30, 1 << 30), (4,)])
def test_rejects_array_larger_than_its_data(shape: tuple[int, ...]) -> None:
    stream = io.BytesIO()
    array_header = {"descr": "<f8", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, array_header)
    with pytest.raises(ValueError, match="an array of shape"):
        shards.decoded({"npy": stream.getvalue()})
    stream = io.BytesIO()
    np.save(stream, np.arange(3))
    assert shards.decoded({"npy": stream.getvalue()})["npy"].tolist() == [0, 1, 2]


# --- parquet


def test_rejects_parquet_dictionary_beyond_memory_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pa = pytest.importorskip("pyarrow")
    library = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(parquet, "MAX_GROUP_BYTES", 1 << 20)
    dictionary = pa.DictionaryArray.from_arrays(
        pa.array([0] * 3000, pa.int32()), pa.array(["x" * 9999])
    )
    path = tmp_path / "a.parquet"
    library.write_table(pa.table({"a": dictionary}), path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 2000
    with pytest.raises(DataError, match=r"a.parquet need more memory"):
        parquet.GroupCache(1).rows(path, 0, [0])
    library.write_table(pa.table({"a": list(range(1000)), "b": ["x"] * 1000}), path)
    assert parquet.GroupCache(1).rows(path, 0, [5]) == [{"a": 5, "b": "x"}]


def write_zeros(path: Path, columns: int) -> None:
    """Writes a row of columns of 2 MiB of zeros each, which compress to a small file."""
    pa, library = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pa.table({f"c{number}": [bytes(2 << 20)] for number in range(columns)})
    library.write_table(table, path, compression="zstd", use_dictionary=False)
    assert path.stat().st_size < 1000 * columns


def varint(number: int) -> bytes:
    """Returns a number of four bytes in the format of Parquet's metadata."""
    return bytes([*(number >> shift & 0x7F | 0x80 for shift in (0, 7, 14)), number >> 21])


@pytest.fixture
def columns_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collects the names of the columns that are read."""
    library = pytest.importorskip("pyarrow.parquet")
    names: list[str] = []
    iter_batches = library.ParquetFile.iter_batches

    def spy_batches(*arguments: Any, columns: list[str]) -> Iterator[Any]:
        for batch in iter_batches(*arguments, columns=columns):
            names.extend(columns)
            yield batch

    monkeypatch.setattr(library.ParquetFile, "iter_batches", spy_batches)
    return names


def test_oversized_parquet_group_is_rejected_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns_read: list[str]
) -> None:
    path = tmp_path / "a.parquet"
    write_zeros(path, 6)
    monkeypatch.setattr(parquet, "MAX_GROUP_BYTES", 11 << 20)
    with pytest.raises(DataError, match=r"a.parquet need more memory"):
        parquet.GroupCache(1).rows(path, 0, [0])
    assert columns_read == []
    monkeypatch.setattr(parquet, "MAX_GROUP_BYTES", 13 << 20)
    (row,) = parquet.GroupCache(1).rows(path, 0, [0])
    assert row == {f"c{number}": bytes(2 << 20) for number in range(6)}


def test_forged_parquet_sizes_are_detected_while_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns_read: list[str]
) -> None:
    path = tmp_path / "a.parquet"
    write_zeros(path, 6)
    library = pytest.importorskip("pyarrow.parquet")
    metadata = library.read_metadata(path)
    size = metadata.row_group(0).column(0).total_uncompressed_size
    content = path.read_bytes()
    assert content.count(varint(2 * size)) == 6
    forged_varint = bytes([varint(2 * size)[0], 0x80, 0x80, 0])
    path.write_bytes(content.replace(varint(2 * size), forged_varint))
    sizes = library.read_metadata(path).row_group(0)
    assert all(sizes.column(number).total_uncompressed_size < 1000 for number in range(6))
    monkeypatch.setattr(parquet, "MAX_GROUP_BYTES", 3 << 20)
    with pytest.raises(DataError, match=r"a.parquet need more memory"):
        parquet.GroupCache(1).rows(path, 0, [0])
    assert columns_read == ["c0", "c1"]


def test_oversized_repeated_list_is_rejected_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns_read: list[str]
) -> None:
    pa = pytest.importorskip("pyarrow")
    library = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    library.write_table(pa.table({"a": [[0] * 200_000]}), path)
    assert path.stat().st_size < 2000
    monkeypatch.setattr(parquet, "MAX_GROUP_BYTES", 1 << 20)
    with pytest.raises(DataError, match=r"a.parquet need more memory"):
        parquet.GroupCache(1).rows(path, 0, [0])
    assert columns_read == []


@pytest.mark.parametrize("rows", [0, 1, 100])
def test_reads_parquet_columns_of_various_types(tmp_path: Path, rows: int) -> None:
    pa = pytest.importorskip("pyarrow")
    library = pytest.importorskip("pyarrow.parquet")
    columns = {
        "a": pa.array(range(rows), pa.int8()),
        "a.b": pa.array([str(number) for number in range(rows)]),
        "c": pa.array([{"d": number, "e": [number] * 3} for number in range(rows)]),
        "c.d": pa.array([None] * rows, pa.float32()),
        "": pa.array([f"{number % 2}" for number in range(rows)]).dictionary_encode(),
    }
    table = pa.table(columns)
    library.write_table(table, tmp_path / "a.parquet")
    assert parquet._read(tmp_path / "a.parquet", 0).to_pylist() == table.to_pylist()


def test_parquet_row_count_is_limited_by_file_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pa = pytest.importorskip("pyarrow")
    library = pytest.importorskip("pyarrow.parquet")
    library.write_table(pa.table({"a": [1] * 100_000}), tmp_path / "a.parquet")
    assert len(parquet.scan(tmp_path / "a.parquet")) == 100_000
    monkeypatch.setattr(parquet, "MAX_ROWS_PER_BYTE", 1)
    with pytest.raises(DataError, match=r"a.parquet"):
        parquet.scan(tmp_path / "a.parquet")


# --- packed files


def test_rejects_gzip_with_oversized_idx_header(tmp_path: Path) -> None:
    raw = gzip.compress(b"\0\0\x08\x03" + struct.pack(">III", 60000, 4000, 4000) + bytes(1 << 20))
    with pytest.raises(DataError, match=r"x\.gz announces 960,000,000,016 bytes"):
        idx._decompress(Path("x.gz"), raw)


def test_minimal_recipe_limits_decompressed_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(minimal, "MAX_BYTES", 100)
    for name in ("images-idx3", "labels-idx1"):
        with gzip.open(tmp_path / f"train-{name}-ubyte.gz", "wb") as file:
            file.write(b"\0\0\x08\x03" + struct.pack(">III", 1, 99, 99) + bytes(99 * 99))
    with pytest.raises(RuntimeError, match="invalid for input of size 84"):
        minimal.read(tmp_path, "train")


def test_rejects_compressed_weights(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1000)}, tmp_path / "a.pt")
    assert read_weights(str(tmp_path / "a.pt"))["a"].shape == (1000,)
    with (
        zipfile.ZipFile(tmp_path / "a.pt") as source,
        zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for name in source.namelist():
            target.writestr(name, source.read(name))
        target.writestr("archive/data/9", bytes(1 << 20))
    with pytest.raises(DataError, match=r"b.pt") as exc_info:
        read_weights(str(tmp_path / "b.pt"))
    assert "announces more than it holds" in exc_info.value.found


def nested_lists(depth: int) -> bytes:
    """Returns opcodes that push a nested list, whose text has 2**depth parts."""
    built = b"".join(pickle.EMPTY_LIST + memo(level) for level in range(depth + 1))
    for level in range(depth):
        built += recall(level) + pickle.MARK + recall(level + 1) * 2 + pickle.APPENDS
    return built + recall(0)


SHARED = {
    "a key": pickle.EMPTY_DICT + nested(60) + pickle.NONE + pickle.SETITEM,
    "a deep key": pickle.EMPTY_DICT + pickle.NONE + pickle.TUPLE1 * 100_000 + pickle.NONE
    + pickle.SETITEM,
    "pairs": pickle.GLOBAL + b"collections\nOrderedDict\n" + pickle.EMPTY_LIST
    + nested(60) + pickle.NONE + pickle.TUPLE2 + pickle.APPEND + pickle.TUPLE1 + pickle.REDUCE,
    "a storage": pickle.MARK + b"U\7storage" + pickle.NONE + nested(60) + pickle.NONE
    + pickle.NONE + pickle.TUPLE + pickle.BINPERSID,
    "a function": nested_lists(60) + pickle.EMPTY_TUPLE + pickle.REDUCE,
}  # fmt: skip


def write_weights(path: Path, content: bytes, legacy: bool) -> str:
    """Writes a PyTorch file that contains this pickle; returns its path."""
    if legacy:
        torch.save({}, path, _use_new_zipfile_serialization=False)
        stream = io.BytesIO(path.read_bytes())
        for _ in range(3):  # magic number, version, system
            pickle.load(stream)
        path.write_bytes(stream.getvalue()[: stream.tell()] + content)
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", content)
            archive.writestr("archive/version", "3\n")
    return str(path)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("name", SHARED)
def test_rejects_weights_with_exponential_structure(
    tmp_path: Path, name: str, legacy: bool
) -> None:
    content = pickle.PROTO + b"\2" + SHARED[name] + pickle.STOP
    path = write_weights(tmp_path / "a.pt", content, legacy)
    with pytest.raises(DataError, match=r"a.pt") as exc_info:
        read_weights(path)
    assert "share too many parts" in exc_info.value.found


@pytest.mark.parametrize("legacy", [False, True])
def test_reads_weights_with_shared_parts(tmp_path: Path, legacy: bool) -> None:
    layers = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(300)))
    state = layers.state_dict()
    state["tied"] = state["0.weight"]
    names = [str(number) for number in range(300)]
    content = {"state_dict": state, (1, (2, 3)): [names, names, {7: names}]}
    torch.save(content, tmp_path / "a.pt", _use_new_zipfile_serialization=not legacy)
    assert read_weights(str(tmp_path / "a.pt")).keys() == state.keys()


@pytest.mark.parametrize(
    "content",
    [
        pickle.EMPTY_LIST + memo(0) + recall(0) + pickle.APPEND,
        pickle.NONE + pickle.MARK + pickle.TUPLE2,
        pickle.TUPLE,
        recall(5),
        pickle.NONE + pickle.MARK + pickle.PUT + b"0\n",
        b"\xff",
    ],
)
def test_rejects_damaged_pickles(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"holds itself|lacks an operand|opcode"):
        pickle_limits.check_pickle(io.BytesIO(content + pickle.STOP))


def test_pickle_length_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    content = pickle.dumps(list(range(100)))
    pickle_limits.check_pickle(io.BytesIO(content))
    with pytest.raises(EOFError):
        pickle_limits.check_pickle(io.BytesIO(content[:-1]))
    monkeypatch.setattr(pickle_limits, "MAX_OPCODES", 100)
    with pytest.raises(ValueError, match="more than 100 operations"):
        pickle_limits.check_pickle(io.BytesIO(content))


def test_unpack_limits_decompressed_codes() -> None:
    compressor = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = compressor.compress(bytes(1 << 26)) + compressor.flush()
    received = np.frombuffer(
        struct.pack("<q", len(packed)).ljust(collectives._HEADER, b"\0") + packed, np.uint8
    )
    message = torch.zeros(1000, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="holds 1001 bytes of codes, not 1000"):
        collectives.unpack(torch.from_numpy(received.copy()), 1000, message)


# --- texts


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", '{"text": ' + "[" * 200_000 + "]" * 200_000 + ', "label": 1}\n'),
        ("a.jsonl", '{"text": "a", "label": ' + "9" * 1_000_000 + "}\n"),
        ("a.csv", "a," + "x" * 200_000 + "\n"),
        ("a.csv", '1,"' + "x\n" * 100_000),
    ],
)
def test_unreadable_text_error_names_line(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=r"a\.(jsonl|csv) line"):
        texts.load_texts(TextOptions(data=str(tmp_path / name)))


def test_label_with_thousands_of_digits_is_text(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"{'9' * 5000},a\n1,b\n" * 20)
    loaded = texts.load_texts(TextOptions(data=str(tmp_path / "a.csv")))
    assert loaded.classes == ("1", "9" * 5000)


def test_deeply_nested_pairs_error_names_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("[" * 200_000)
    with pytest.raises(DataError, match=r"a.jsonl line 1 is not valid JSON"):
        pairs._read_jsonl(tmp_path / "a.jsonl", None)  # type: ignore[arg-type]
