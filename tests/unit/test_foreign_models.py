"""Tests that untrusted run directories and models cannot exhaust memory or run code."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_language_model
import torch
from recipe_tools import hub_variables  # noqa: F401 - fixture
from torch import nn

from paceline.recipes.data import cifar, idx, texts
from paceline.recipes.language.base_model import BaseModel
from paceline.recipes.networks import build_image_network
from paceline.recipes.options import TextOptions
from paceline.recipes.pretrained import HubModel, build_from_description, load_model, read_weights
from paceline.recipes.tokens import saved_encoding
from paceline.recipes.use import image, language, sft
from paceline.recipes.use.evaluate import TrainedModel
from paceline.recipes.use.onnx_file import OnnxNetwork
from paceline.spec import rundir
from paceline.spec.errors import DataError
from paceline.spec.training.metrics import recorded_steps
from paceline.train import files
from paceline.train.data.shards import ShardedDataset, write_shards
from paceline.train.weights import build_limited, load_weights, save_model, saved_state


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_hole(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(15 << 30)


def make_huge_hole(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 42)


def link_to_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [make_pipe, make_hole, link_to_device])
def test_rejects_endless_weights(make: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / rundir.MODEL).mkdir()
    (tmp_path / rundir.MODEL_CONFIG).write_text("{}")
    make(tmp_path / rundir.WEIGHTS)
    for read in (saved_state, lambda run: read_weights(str(run / rundir.WEIGHTS))):
        with pytest.raises(DataError, match=r"cannot be (loaded|read)"):
            read(tmp_path)


def test_checkpoint_shards_must_be_regular_files(tmp_path: Path) -> None:
    from paceline.train.checkpoints import shards  # slow import, needed here only

    os.mkfifo(tmp_path / "00000.safetensors")
    with pytest.raises(OSError, match="not a plain file"):
        shards.read_all(tmp_path)


def test_load_weights_verifies_hash(tmp_path: Path) -> None:
    network = nn.Linear(3, 2)
    save_model(tmp_path, network.state_dict(), {})
    copy = nn.Linear(3, 2)
    load_weights(tmp_path, copy)
    assert torch.equal(copy.weight, network.weight)
    weights = tmp_path / rundir.WEIGHTS
    saved = weights.read_bytes()
    weights.write_bytes(saved[:-1] + bytes([saved[-1] ^ 1]))
    with pytest.raises(DataError, match="hash differs"):
        load_weights(tmp_path, copy)


VIT = {"model_type": "vit", "hidden_size": 40_000, "intermediate_size": 40_000,
       "num_attention_heads": 1, "image_size": 8, "patch_size": 4}  # fmt: skip
HUGE: dict[str, dict[str, Any]] = {
    "wide": {"kind": "hub", "config": {**VIT, "num_hidden_layers": 1000}},
    "many places": {"kind": "hub", "config": {**VIT, "image_size": 80_000}},
    "deep": {"kind": "hub", "config": {"model_type": "resnet", "depths": [10**9, 1, 1, 1]}},
    "added layers": {"kind": "cnn", "layers": [10**8]},
}


@pytest.mark.parametrize("name", HUGE)
def test_rejects_network_larger_than_weights(name: str) -> None:
    state = nn.Linear(100, 100).state_dict()
    with pytest.raises(DataError, match="larger than its weights"):
        build_limited(lambda: build_image_network(HUGE[name], (1, 8, 8), 10), state)


@pytest.mark.parametrize("description", [
    7, {}, {"kind": []}, {"kind": "cnn", "layers": 5}, {"kind": "cnn", "layers": [{"a": 1}]},
    {"kind": "hub", "config": 3}, {"kind": "torchvision"},
])  # fmt: skip
def test_damaged_network_description_is_data_error(description: Any) -> None:
    with pytest.raises(DataError, match=r"config\.json"):
        build_limited(lambda: build_image_network(description, (1, 8, 8), 10), {})


@pytest.mark.parametrize("name", ["shape", "decoded"])
def test_rejects_invalid_image_config(name: str, tmp_path: Path) -> None:
    """The weights do not limit the image size if a network averages over the image."""
    (tmp_path / rundir.MODEL).mkdir()
    config = {"task": "image", "normalisation": {"mean": [0.5], "deviation": [0.5]},
              "classes": ["a", "b"], "shape": [1, 8, 8], "decoded": [1, 8, 8], "crop": False,
              "channels_last": False, "number_format": "float32",
              "data": {"source": "digits", "config": "", "fingerprint": "", "folder": "",
                       "skip_damaged": False, "split": {"method": "as given"}}}  # fmt: skip
    (tmp_path / rundir.MODEL_CONFIG).write_text(json.dumps(config))
    image.load_trained(str(tmp_path))
    moments = [{"mean": mean, "deviation": deviation} for mean, deviation in
               (([], []), ([0.5], [0]), ([None], [1]), ([float("nan")], [1]), ([0.5], "x"))
               ]  # fmt: skip
    damaged = [{"normalisation": moment} for moment in moments]
    for change in ({name: [1, 30_000, 30_000]}, {name: [10**9, 8, 8]}, *damaged):
        (tmp_path / rundir.MODEL_CONFIG).write_text(json.dumps({**config, **change}))
        with pytest.raises(DataError, match="holds no model of the image recipe"):
            image.load_trained(str(tmp_path))


DATA: dict[str, Any] = {"source": "chat.jsonl", "test": "", "config": "", "fingerprint": "",
        "split": {"method": "seeded", "seed": 0, "val_fraction": 0.1}}  # fmt: skip
DESCRIPTIONS: dict[str, tuple[Callable[[str], TrainedModel], dict[str, Any]]] = {
    "sft": (sft.load_trained, {
        "model": "base", "base": "", "base_settings": "", "method": "lora", "objective": "dpo",
        "dpo_beta": 0.1, "lora_rank": 4, "lora_alpha": 8.0, "chat_template": "", "system": "keep",
        "max_length": 64, "too_long": "cut", "pack": True, "skip_damaged": False,
        "data": {**DATA, "format": "openai"},
    }),
    "language": (language.load_trained, {
        "depth": 2, "vocab_size": 258, "max_length": 64, "data": {**DATA, "column": "text"},
    }),
}  # fmt: skip


@pytest.mark.parametrize("task", DESCRIPTIONS)
def test_description_with_unusable_values_is_data_error(task: str, tmp_path: Path) -> None:
    load, values = DESCRIPTIONS[task]
    description = {"task": task, "number_format": "float32", **values}

    def load_with(change: dict[str, Any]) -> TrainedModel:
        (tmp_path / rundir.MODEL).mkdir(exist_ok=True)
        (tmp_path / rundir.MODEL_CONFIG).write_text(json.dumps(description | change))
        return load(str(tmp_path))

    assert load_with({}).config == description
    split: dict[str, Any] = values["data"]["split"]
    splits = [{"seed": "x"}, {"val_fraction": 2}, {"val_fraction": "x"}, {"method": 1}]
    for change in (
        {"max_length": 1},
        *({key: value} for key in description for value in ([], {}, None, "\0" * 9999)),
        *({"data": {**values["data"], "split": split | changed}} for changed in splits),
    ):
        with pytest.raises(DataError, match=f"holds no model of the {task} recipe"):
            load_with(change)


def test_build_limited_computes_values() -> None:
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.scale = torch.linspace(1, 2, 3)[0].item()

    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    assert build_limited(lambda: nn.Identity(), {}).training
    assert torch.equal(torch.rand(1), expected)
    assert build_limited(Scaled, {}).scale == 1


GEMMA = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 32,
         "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16}  # fmt: skip
TIMM: dict[str, dict[str, Any]] = {
    "a pickle": {"model_args": {"checkpoint_path": "w.pth"}},
    "a deep one": {"model_args": {"parts": [{"checkpoint_path": "w.pth"}]}},
    "a folder": {"architecture": "LOCAL-DIR:evil"},
    "another model": {"architecture": "hf-hub:evil/model"},
}


@pytest.mark.parametrize("name", TIMM)
@pytest.mark.usefixtures("hub_variables")
def test_rejects_timm_config_naming_files(name: str, tmp_path: Path) -> None:
    timm = {
        "model_type": "timm_wrapper",
        "architecture": "resnet18",
        "num_classes": 2,
        **TIMM[name],
    }
    nested = {"model_type": "shieldgemma2", "vision_config": timm, "text_config": GEMMA}
    for config in (timm, nested):
        (tmp_path / "config.json").write_text(json.dumps(config))
        raises_error = pytest.raises(DataError, match="names further files to load")
        with raises_error:
            build_from_description("image", config)
        for from_scratch in (True, False):
            hub_model = HubModel("image", str(tmp_path), from_scratch=from_scratch)
            with raises_error:
                load_model(hub_model, ("a", "b"))


@pytest.mark.usefixtures("hub_variables")
def test_rejects_adapters_in_model(tmp_path: Path) -> None:
    """Adapters name a model to load, and old versions of peft import a module that they name."""
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "another/model"}')
    for with_config in (False, True):
        if with_config:
            (tmp_path / "config.json").write_text(json.dumps(VIT))
        with pytest.raises(DataError, match="has adapters"):
            BaseModel(str(tmp_path)).load()
        with pytest.raises(DataError, match="has adapters"):
            load_model(HubModel("image", str(tmp_path)), ("a", "b"))


@pytest.mark.parametrize("setting", [
    {"checkpoint_path": "w.pth"},
    {"attn_implementation": "somebody/kernel"},  # its code would be downloaded
    {"_attn_implementation": "somebody/kernel@main:forward"},
    {"experts_implementation": "somebody/kernel"},
])  # fmt: skip
@pytest.mark.usefixtures("hub_variables")
def test_rejects_language_config_naming_files(setting: dict[str, str], tmp_path: Path) -> None:
    content = {"model_type": "llama", **setting}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match="names further files to load"):
        BaseModel(str(tmp_path)).load()


@pytest.mark.usefixtures("hub_variables")
def test_language_model_must_match_weights(tmp_path: Path) -> None:
    """A larger configuration would fill the memory, and missing weights would be random."""
    tiny_language_model.make_model().save_pretrained(tmp_path)
    base, config = BaseModel(str(tmp_path)), json.loads((tmp_path / "config.json").read_text())
    base.load()
    for change in ({"num_hidden_layers": 100_000}, {"vocab_size": 1 << 30}):
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        for load in (base.outline, base.load):
            with pytest.raises(DataError, match="larger than its weights"):
                load()
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(DataError, match="lacks 9 tensors of its model"):
        base.load()


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_labels"])
@pytest.mark.usefixtures("hub_variables")
def test_config_counting_endless_parts_is_refused(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library makes lists of that length, before it builds anything."""
    import transformers

    description = {"model_type": "qwen2", key: 1 << 40}
    (tmp_path / "config.json").write_text(json.dumps(description))
    monkeypatch.setattr(transformers.Qwen2Config, "__init__", None)
    with pytest.raises(DataError, match="larger than its weights"):
        BaseModel(str(tmp_path)).load()
    with pytest.raises(DataError, match="larger than its weights"):
        load_model(HubModel("text", str(tmp_path)), ("a", "b"))
    with pytest.raises(DataError, match="larger than its weights"):
        build_from_description("text", description)


@pytest.mark.parametrize("name", ["pad.txt", "pad.bin", "pad.safetensors"])
@pytest.mark.usefixtures("hub_variables")
def test_language_model_is_not_measured_by_holes(name: str, tmp_path: Path) -> None:
    tiny_language_model.make_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 1 << 26}))
    with (tmp_path / name).open("wb") as file:
        file.write(b"data")
        file.truncate(1 << 40 if name != "pad.txt" else 60 << 20)
    with pytest.raises(DataError, match="larger than its weights"):
        BaseModel(str(tmp_path)).outline()


def test_stored_bytes_leaves_out_holes(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for size, content in ((0, b""), (1 << 40, b""), (1 << 40, b"data"), (3, b"abc")):
        with path.open("wb") as file:
            file.write(content)
            file.truncate(size)
        stored = files.stored_bytes(path)
        assert len(content) <= stored <= (1 << 20 if content else 0)


@pytest.mark.parametrize("from_scratch", [True, False])
@pytest.mark.usefixtures("hub_variables")
def test_rejects_model_beyond_machine_memory(from_scratch: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**VIT, "num_hidden_layers": 1000}))
    with pytest.raises(DataError, match="the memory of this machine"):
        load_model(HubModel("image", str(tmp_path), from_scratch=from_scratch), ("a", "b"))


# -- files that are not regular, or too large -----------------------------------------------


READERS: dict[str, Callable[[Path], object]] = {
    "model/tokenizer.json": lambda folder: saved_encoding(folder, hub=False),
    "model/tokenizer_config.json": lambda folder: HubModel("text", str(folder / "model")).check(),
    "model/config.json": lambda folder: saved_state(folder),
    "base/tokenizer.json": lambda folder: BaseModel(str(folder / "base")).load_tokenizer(),
    "base/model.safetensors": lambda folder: BaseModel(str(folder / "base")).load(),
    "model.onnx": lambda folder: OnnxNetwork(folder / "model.onnx", ["ids"]),
    "train.csv": lambda folder: texts.load_texts(TextOptions(data=str(folder / "train.csv"))),
    "images": lambda folder: idx._array(folder / "images", 3),
    "test_batch.bin": lambda folder: cifar._batch(folder / "test_batch.bin", ("a", "b")),
}


@pytest.mark.parametrize("make", [make_pipe, link_to_device, make_huge_hole])
@pytest.mark.parametrize("name", READERS)
def test_readers_reject_pipes_devices_and_huge_files(
    name: str, make: Callable[[Path], None], tmp_path: Path
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    make(tmp_path / name)
    with pytest.raises(DataError):
        READERS[name](tmp_path)


@pytest.mark.parametrize("name", ["model.onnx", "train.csv", "images", "test_batch.bin"])
def test_readers_reject_files_beyond_quarter_of_memory(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "memory_bytes", lambda: 400 << 20)
    with (tmp_path / name).open("wb") as file:
        file.truncate(101 << 20)
    with pytest.raises(DataError, match=r"(?s)(more than|a quarter .*) 100 MiB"):
        READERS[name](tmp_path)


def test_metrics_pipe_has_no_recorded_steps(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    assert recorded_steps(tmp_path / "metrics.jsonl") == {}


@pytest.mark.parametrize("name", ["index.json", "lock", "spans", "outside", "counts", "brackets"])
def test_invalid_shard_index_is_rebuilt(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    write_shards(folder, [{"cls": number} for number in range(5)])
    assert len(ShardedDataset(folder)) == 5
    index_dir = folder / ".paceline-index"
    index, (spans,) = index_dir / "index.json", index_dir.glob("*.npy")
    content = json.loads(index.read_text())
    if name == "outside":
        spans.rename(tmp_path / "spans-00000000.npy")
        index.write_text(json.dumps({**content, "spans": "../../spans-00000000.npy"}))
    elif name == "counts":
        index.write_text(json.dumps({**content, "counts": [1 << 40]}))
    elif name == "brackets":
        index.write_text("[" * 200_000)
    else:
        path = spans if name == "spans" else index_dir / name
        path.unlink()
        os.mkfifo(path)
    data = ShardedDataset(folder)
    assert [int(data[number]["cls"]) for number in range(5)] == [*range(5)]


def test_rejects_index_spans_outside_shard(tmp_path: Path) -> None:
    write_shards(tmp_path, [{"cls": 1}])
    assert len(ShardedDataset(tmp_path)) == 1
    (spans,) = (tmp_path / ".paceline-index").glob("*.npy")
    np.save(spans, np.array([[0, 1 << 60, 1]]))
    with pytest.raises(DataError, match="the index names bytes"):
        ShardedDataset(tmp_path)[0]


UNLIMITED_READERS = {
    "recipes/common.py": "/proc",
    "recipes/language/chat_templates.py": "/proc",
    "recipes/minimal/language.py": "an example, which reads the file that is typed",
    "recipes/minimal/text.py": "an example, which reads the file that is typed",
    "recipes/minimal/translation.py": "an example, which reads the file that is typed",
    "recipes/pretrained_list.py": "the user's cache of the hub",
    "recipes/use/quantize.py": "a temporary file of its own",
    "train/data/fetch.py": "/sys",
    "train/elastic/gloo.py": "/proc",
    "train/elastic/newcomer.py": "modules that run",
    "train/measure/largest_batch.py": "/sys",
    "train/measure/vitals.py": "/proc",
}


def test_only_listed_modules_read_files_without_limit() -> None:
    """All other modules must use ``read_bytes_limited``; the listed ones read trusted files."""
    root = Path(files.__file__).parents[1]
    modules = [path for part in ("recipes", "train") for path in (root / part).rglob("*.py")]
    reading = {
        str(path.relative_to(root))
        for path in modules
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("read_text", "read_bytes")
    }
    assert reading == {*UNLIMITED_READERS}
