"""The header of a GGUF file, checked before a library reads the file.

Libraries take a header at its word: they make as many objects as it counts values and blocks.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path

from paceline.spec.errors import DataError
from paceline.spec.formatting import shell_text
from paceline.train import files
from paceline.train.weights import MAX_TENSORS

MAX_ELEMENTS_PER_BYTE = 8  # weights of one bit
_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?",
            10: "Q", 11: "q", 12: "d"}  # fmt: skip
_TEXT, _ARRAY = 8, 9
_MAX_SETTINGS = 1 << 14
_MAX_VALUES = 1 << 22  # of all arrays: vocabularies have 1.3 million
_MAX_DIMENSIONS = 8
_PART_NAME = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")


@dataclass(frozen=True)
class GgufHeader:
    """What the header of a GGUF file says about its size.

    Attributes:
        settings: Its whole numbers by key.
        num_elements: Weights of all tensors.
    """

    settings: dict[str, int]
    num_tensors: int
    num_elements: int


def check_gguf(path: Path, name: str) -> None:
    """Checks that a GGUF file is a whole model, and no larger for its readers than on disk.

    Args:
        name: The file, as typed.

    Raises:
        DataError: It is damaged, one of several parts, or describes more than it holds.
    """
    label = f"--model {name}"
    try:
        with path.open("rb") as file:
            header = parse_header(file.read(files.MAX_DESCRIPTION_BYTES))
        num_bytes = files.stored_bytes(path)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{label} cannot be read as a GGUF file",
            found=str(error),
            remedy="copy the file again from where it comes",
        ) from None
    if (num_parts := header.settings.get("split.count", 0)) > 1:
        merged = _PART_NAME.sub(".gguf", str(path))
        first = _PART_NAME.sub(r"-00001-of-\1.gguf", str(path))
        names = [first, merged] if merged != first else ["FIRST-PART.gguf", "WHOLE.gguf"]
        raise DataError(
            f"{label} is one of the {num_parts} parts of a split file",
            found=f"its split.count is {num_parts}",
            remedy=f"{shell_text(['llama-gguf-split', '--merge', *names])}\n"
            f"Then: --model {shell_text(names[1:])}",
        )
    blocks = [count for key, count in header.settings.items() if key.endswith(".block_count")]
    if max(blocks, default=0) > header.num_tensors:
        excess = f"{max(blocks):,} blocks of layers, and {header.num_tensors:,} tensors"
    elif header.num_elements > MAX_ELEMENTS_PER_BYTE * num_bytes:
        excess = f"tensors of {header.num_elements:,} numbers in {num_bytes:,} bytes"
    else:
        return
    raise DataError(
        f"{label} describes a network that is larger than its weights",
        found=excess,
        remedy="copy the file again from where it comes",
    )


def parse_header(content: bytes) -> GgufHeader:
    """Parses the beginning of a GGUF file; ValueError if it is damaged or too large."""
    if content[:4] != _MAGIC:
        raise ValueError("it does not begin with GGUF")
    cursor = _Cursor(content)
    try:
        version, num_tensors, num_settings = cursor.unpack("IQQ")
        if version not in _VERSIONS:
            raise ValueError(f"it has version {version} of the format")
        if num_tensors > MAX_TENSORS or num_settings > _MAX_SETTINGS:
            raise ValueError(f"it counts {num_tensors:,} tensors and {num_settings:,} settings")
        settings = dict[str, int]()
        for _ in range(num_settings):
            key, value = cursor.text(), cursor.value(*cursor.unpack("I"))
            if isinstance(value, int):
                settings[key] = value
        num_elements = sum(cursor.tensor_elements() for _ in range(num_tensors))
    except struct.error:
        raise ValueError("its header is cut off, or too large") from None
    return GgufHeader(settings, num_tensors, num_elements)


class _Cursor:
    """A place in a header. Its methods raise ``struct.error`` beyond the end."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._position = len(_MAGIC)
        # a version has few bits: if its first bytes are zero, the last ones come first
        self._order = "<" if any(content[4:6]) else ">"
        self._num_values = 0

    def unpack(self, form: str) -> tuple[int, ...]:
        values = struct.unpack_from(self._order + form, self._content, self._position)
        self._position += struct.calcsize(self._order + form)
        return values

    def text(self) -> str:
        start = self._skip(*self.unpack("Q"))
        return self._content[start : self._position].decode(errors="replace")

    def value(self, kind: int) -> object:
        """Reads a value; ``None`` for an array."""
        if kind == _TEXT:
            return self.text()
        if kind == _ARRAY:
            self._skip_array()
            return None
        if kind not in _SCALARS:
            raise ValueError(f"it has a value of the unknown type {kind}")
        return self.unpack(_SCALARS[kind])[0]

    def tensor_elements(self) -> int:
        """Reads a tensor's description; returns the number of its elements."""
        self.text()
        (num_dimensions,) = self.unpack("I")
        if num_dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"it has a tensor of {num_dimensions:,} dimensions")
        sizes = self.unpack(f"{num_dimensions}Q")
        self.unpack("IQ")  # type and place
        return math.prod(sizes)

    def _skip_array(self) -> None:
        kind, count = self.unpack("IQ")
        self._num_values += count
        if self._num_values > _MAX_VALUES:
            raise ValueError(f"it has arrays of {self._num_values:,} values")
        if kind == _TEXT:
            for _ in range(count):
                self._skip(*self.unpack("Q"))
        elif kind in _SCALARS:
            self._skip(count * struct.calcsize(self._order + _SCALARS[kind]))
        else:
            raise ValueError(f"it has an array of the unknown type {kind}")

    def _skip(self, num_bytes: int) -> int:
        """Moves on; returns the place before."""
        start, self._position = self._position, self._position + num_bytes
        if self._position > len(self._content):
            raise struct.error
        return start
