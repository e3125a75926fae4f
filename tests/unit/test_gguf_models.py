"""Tests that GGUF files are whole, and that untrusted ones cannot exhaust memory."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_tools import hub_variables  # noqa: F401 - fixture

from paceline.recipes.language.base_model import BaseModel, content_hash
from paceline.recipes.language.gguf_header import parse_header
from paceline.spec.errors import DataError

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.usefixtures("hub_variables", "quiet_tqdm")

WIDTH, TOKENS = 8, ["<s>", *"abcdefg"]
LAYER = {
    "attn_norm": (WIDTH,), "ffn_norm": (WIDTH,),
    **dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (WIDTH, WIDTH)),
    "ffn_gate": (16, WIDTH), "ffn_up": (16, WIDTH), "ffn_down": (WIDTH, 16),
}  # fmt: skip
TENSORS: dict[str, tuple[int, ...]] = {
    "token_embd": (len(TOKENS), WIDTH), "output_norm": (WIDTH,), "output": (len(TOKENS), WIDTH),
    **{f"blk.{block}.{name}": shape for block in range(2) for name, shape in LAYER.items()},
}  # fmt: skip


@pytest.fixture
def quiet_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQDM_DISABLE", "1")  # or loading sets it


def write_gguf(
    path: Path, tensors: Mapping[str, tuple[int, ...]] = TENSORS, **settings: int
) -> BaseModel:
    """Writes a Llama of two blocks, or what the arguments make of it."""
    writer = gguf.GGUFWriter(path, "llama")
    sizes = {"context_length": 32, "embedding_length": WIDTH, "block_count": 2,
             "feed_forward_length": 16, "attention.head_count": 2,
             "attention.head_count_kv": 2, "rope.dimension_count": 4}  # fmt: skip
    changes = {name.replace("__", "."): value for name, value in settings.items()}
    for name, value in ({f"llama.{size}": n for size, n in sizes.items()} | changes).items():
        writer.add_uint32(name, value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([0.0] * len(TOKENS))
    generator = torch.Generator().manual_seed(0)
    for name, shape in tensors.items():
        writer.add_tensor(f"{name}.weight", torch.randn(shape, generator=generator).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return BaseModel(str(path))


def without(*names: str) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape in TENSORS.items() if not name.startswith(names)}


@pytest.mark.parametrize("tensors", [TENSORS, without("output.")], ids=["own head", "tied head"])
def test_whole_gguf_model_is_loaded_and_can_be_saved(
    tensors: Mapping[str, tuple[int, ...]], tmp_path: Path
) -> None:
    """transformers 5 marks the model as quantized and refuses to save its unpacked weights."""
    model = write_gguf(tmp_path / "x.gguf", tensors).load()
    model.save_pretrained(str(tmp_path / "out"))

    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    assert content_hash(BaseModel(str(tmp_path / "out")).load()) == content_hash(model)


def test_incomplete_gguf_model_is_refused(tmp_path: Path) -> None:
    base = write_gguf(tmp_path / "x.gguf", without("blk.1.", "output_norm"))
    for load in (base.load, base.outline):
        with pytest.raises(DataError, match="lacks 10 tensors of its model") as error:
            load()
    assert "copy the file again" in error.value.remedy


def test_part_of_split_gguf_model_is_refused(tmp_path: Path) -> None:
    """The last part may lack only the head, which the library would tie to the embedding."""
    path = tmp_path / "m-00002-of-00002.gguf"
    base = write_gguf(path, without("output."), split__count=2)
    for load in (base.load, base.load_tokenizer):
        with pytest.raises(DataError, match="one of the 2 parts of a split file") as error:
            load()
    first, whole = tmp_path / "m-00001-of-00002.gguf", tmp_path / "m.gguf"
    assert error.value.remedy == (
        f"llama-gguf-split --merge {first} {whole}\nThen: --model {whole}"
    )
    write_gguf(tmp_path / "merged.gguf", split__count=0).load()


@pytest.mark.parametrize("settings", [
    {"llama__feed_forward_length": 1 << 26},
    {"llama__feed_forward_length": (1 << 32) - 1},
    {"llama__block_count": (1 << 32) - 1},
])  # fmt: skip
def test_gguf_model_larger_than_file_is_refused(settings: dict[str, int], tmp_path: Path) -> None:
    base = write_gguf(tmp_path / "x.gguf", **settings)
    with pytest.raises(DataError, match="larger than its weights"):
        base.load()


def test_gguf_model_in_holes_is_refused(tmp_path: Path) -> None:
    """A file with holes takes no room, and its tensors would fill the memory."""
    path = tmp_path / "x.gguf"
    base, size = write_gguf(path, {"token_embd": (13, 17)}), struct.pack("<QQ", 17, 13)
    path.write_bytes(path.read_bytes().replace(size, struct.pack("<QQ", 1 << 20, 1 << 20)))
    with path.open("rb+") as file:
        file.truncate(1 << 43)
    with pytest.raises(DataError, match="larger than its weights"):
        base.load()


def header(
    *parts: bytes, num_tensors: int = 0, num_settings: int | None = None, order: str = "<"
) -> bytes:
    count = len(parts) if num_settings is None else num_settings
    return b"GGUF" + struct.pack(f"{order}IQQ", 3, num_tensors, count) + b"".join(parts)


def setting(kind: int, form: str, *values: Any, order: str = "<") -> bytes:
    return struct.pack(f"{order}Q1sI{form}", 1, b"k", kind, *values)


HOSTILE = {
    "other file": b"PK\x03\x04",
    "version": b"GGUF" + struct.pack("<IQQ", 9, 0, 0),
    "cut off": header()[:-1],
    "many settings": header(num_settings=1 << 60),
    "many tensors": header(num_tensors=1 << 60),
    "long key": header(struct.pack("<Q", 1 << 60)),
    "long text": header(setting(8, "Q", 1 << 60)),
    "unknown type": header(setting(99, "")),
    "many texts": header(setting(9, "IQ", 8, 1 << 60)),
    "many numbers": header(setting(9, "IQ", 0, 1 << 22)),
    "too many numbers": header(setting(9, "IQ", 0, 1 << 60)),
    "nested array": header(setting(9, "IQIQ", 9, 1, 9, 1)),
    "many dimensions": header(struct.pack("<QI", 0, 1 << 31), num_tensors=1, num_settings=0),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_damaged_gguf_header_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(HOSTILE[name])
    with pytest.raises(ValueError, match=r"^it"):
        parse_header(HOSTILE[name])
    with pytest.raises(DataError, match="cannot be read as a GGUF file"):
        BaseModel(str(path)).load()


@pytest.mark.parametrize("order", ["<", ">"])
def test_gguf_header_has_settings_and_sizes(order: str) -> None:
    tensor = struct.pack(f"{order}Q1sIQQIQ", 1, b"t", 2, 3, 5, 0, 0)
    parsed = parse_header(
        header(
            setting(9, "IQ3B", 0, 3, 1, 2, 3, order=order),
            setting(9, "IQQ1s", 8, 1, 1, b"x", order=order),
            setting(2, "H", 7, order=order),
            tensor,
            num_settings=3,
            num_tensors=1,
            order=order,
        )
    )
    assert (parsed.settings, parsed.num_tensors, parsed.num_elements) == ({"k": 7}, 1, 15)
