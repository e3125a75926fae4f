"""Tar files as shards: the members of a sample lie together, and are read with one read.

The members ``dir/00012.jpg`` and ``dir/00012.cls`` are the sample ``dir/00012`` with the parts
``jpg`` and ``cls``: the layout of webdataset.
"""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from paceline.spec.errors import DataError, SettingError
from paceline.train.data.order import Ids

KEY = "__key__"
_NAME = re.compile(r"(?:\./)?((?:.*/)?[^/.]+)\.([^/]+)")
_BLOCK = tarfile.BLOCKSIZE
_END = bytes(_BLOCK)
_MAX_DIGITS = 20
_REGULAR_TYPES = (tarfile.REGTYPE, tarfile.AREGTYPE)


def scan(path: Path) -> Ids:
    """Where each sample lies: first byte, byte after the last, number in its ``.cls`` (or -1).

    Only the headers are read, and the ``.cls`` members.

    Returns:
        Shape ``[samples, 3]``, in the order of the file.

    Raises:
        DataError: The file is damaged, cut off, compressed, or its samples do not lie together.
    """
    rows: list[list[int]] = []
    member_name, key, seen, parts = "", "", set[str](), set[str]()
    size = path.stat().st_size
    try:
        with tarfile.open(path, "r:") as tar:
            while (member := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # it would keep them all
                if member.size < 0 or member.issparse():  # which may stand for any size
                    raise ValueError(f"{member.name} is a sparse file, or of no size")
                member_name = member.name
                end = -(-(member.offset_data + member.size) // _BLOCK) * _BLOCK
                match = _NAME.fullmatch(member.name)
                if member.isdir() or match is None:
                    continue
                if not member.isreg():
                    raise ValueError(f"{member_name} is a link or no plain file")
                if match[1] != key:
                    key, parts = match[1], set()
                    if key in seen:
                        raise ValueError(
                            f"the files of sample {key} do not lie together: pack them sorted"
                            " (tar --sort=name)"
                        )
                    seen.add(key)
                    rows.append([member.offset, end, -1])
                if (part := match[2].lower()) in parts:
                    raise ValueError(f"{member_name} is there twice")
                parts.add(part)
                rows[-1][1] = end
                if part == "cls":
                    rows[-1][2] = _number(tar, member)
            place = tar.offset
            with path.open("rb") as file:
                file.seek(place)
                if file.read(_BLOCK) != _END:
                    raise ValueError(
                        f"no header and no end of the archive at byte {place:,} of {size:,}"
                    )
    except (OSError, ValueError, MemoryError, RecursionError, tarfile.TarError) as error:
        remedy = "copy the shard again; what it was made from is whole"
        if _is_compressed(path):
            remedy = "unpack it (gunzip): samples are read at their places"
        raise DataError(
            f"the shard {path} cannot be used" + (f": member {member_name}" if member_name else ""),
            found=f"{error or type(error).__name__} ({size:,} bytes)",
            remedy=remedy,
        ) from None
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def _number(tar: tarfile.TarFile, member: tarfile.TarInfo) -> int:
    file = tar.extractfile(member)
    text = file.read(_MAX_DIGITS).strip() if file else b""
    if not text.isdigit():
        raise ValueError(f"{member.name} holds {text!r}, no number of a class")
    return int(text)


def _is_compressed(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4).startswith((b"\x1f\x8b", b"BZh", b"\xfd7zX", b"\x28\xb5\x2f\xfd"))


def unpack(block: bytes) -> dict[str, Any]:
    """The parts of a sample by ending, and its key.

    Raises:
        ValueError, tarfile.TarError: The block is not what :func:`scan` has seen.
    """
    sample: dict[str, Any] = {}
    for name, content in _members(block):
        if match := _NAME.fullmatch(name):
            sample[KEY] = match[1]
            sample[match[2].lower()] = content
    if not sample:
        raise ValueError("no member lies here")
    return sample


def _members(block: bytes) -> Iterator[tuple[str, bytes]]:
    place = 0
    while place < len(block):
        header = tarfile.TarInfo.frombuf(
            block[place : place + _BLOCK], tarfile.ENCODING, "surrogateescape"
        )
        if header.type not in _REGULAR_TYPES:  # a long name, or another header before this one
            yield from _extended(block)
            return
        start = place + _BLOCK
        if header.size < 0:
            raise ValueError(f"{header.name} is of no size")
        yield header.name, block[start : start + header.size]
        place = start + -(-header.size // _BLOCK) * _BLOCK


def _extended(block: bytes) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(block), mode="r:") as tar:
        for member in tar:
            if member.issparse() or not 0 <= member.size <= len(block):
                raise ValueError(f"{member.name} is a sparse file, or larger than its sample")
            if file := tar.extractfile(member):
                yield member.name, file.read()


def pack(samples: Iterable[tuple[str, Mapping[str, bytes]]], size: int) -> Iterator[bytes]:
    """Shards of these samples (keys, and parts by ending), each full after ``size`` bytes.

    Raises:
        SettingError: A key or an ending would be read as something else.
    """
    content = io.BytesIO()
    for key, parts in samples:
        for ending, part in sorted(parts.items()):
            name = f"{key}.{ending}"
            match = _NAME.fullmatch(name)
            if match is None or match.groups() != (key, ending):
                raise SettingError(
                    f"a sample cannot have the key {key!r} and the part {ending!r}",
                    remedy="a key without a dot in its last part, an ending without a slash",
                )
            member = tarfile.TarInfo(name)
            member.size = len(part)
            content.write(member.tobuf(tarfile.PAX_FORMAT))
            content.write(part + bytes(-len(part) % _BLOCK))
        if content.tell() >= size:
            yield content.getvalue() + 2 * _END
            content = io.BytesIO()
    if content.tell():
        yield content.getvalue() + 2 * _END
