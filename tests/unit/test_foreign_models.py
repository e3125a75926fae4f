"""Run directories and models from somebody else: no endless file, no network of any size."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_tools import hub_variables  # noqa: F401 - fixture
from torch import nn

from paceline.recipes.networks import build_image_network
from paceline.recipes.pretrained import HubModel, build_from_description, load_model, read_weights
from paceline.spec import rundir
from paceline.spec.errors import DataError
from paceline.train.checkpoints import shards
from paceline.train.weights import build_limited, load_weights, save_model, saved_state


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_hole(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(15 << 30)


def link_to_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [make_pipe, make_hole, link_to_device])
def test_weights_without_an_end_are_not_read(make: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / rundir.MODEL).mkdir()
    (tmp_path / rundir.MODEL_CONFIG).write_text("{}")
    make(tmp_path / rundir.WEIGHTS)
    for read in (saved_state, lambda run: read_weights(str(run / rundir.WEIGHTS))):
        with pytest.raises(DataError, match="cannot be (loaded|read)"):
            read(tmp_path)


def test_shards_are_regular_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "00000.safetensors")
    with pytest.raises(OSError, match="not a plain file"):
        shards.read_all(tmp_path)


def test_saved_weights_are_mapped_and_their_hash_is_checked(tmp_path: Path) -> None:
    network = nn.Linear(3, 2)
    save_model(tmp_path, network.state_dict(), {})
    copy = nn.Linear(3, 2)
    load_weights(tmp_path, copy)
    assert torch.equal(copy.weight, network.weight)
    weights = tmp_path / rundir.WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
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
def test_a_network_is_not_built_if_its_weights_are_small(name: str) -> None:
    state = nn.Linear(100, 100).state_dict()
    with pytest.raises(DataError, match="larger than its weights"):
        build_limited(lambda: build_image_network(HUGE[name], (1, 8, 8), 10), state)


def test_a_network_that_needs_values_is_built() -> None:
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
def test_timm_loads_no_further_files(name: str, tmp_path: Path) -> None:
    timm = {
        "model_type": "timm_wrapper",
        "architecture": "resnet18",
        "num_classes": 2,
        **TIMM[name],
    }
    nested = {"model_type": "shieldgemma2", "vision_config": timm, "text_config": GEMMA}
    for config in (timm, nested):
        (tmp_path / "config.json").write_text(json.dumps(config))
        refused = pytest.raises(DataError, match="names further files to load")
        with refused:
            build_from_description("image", config)
        for from_scratch in (True, False):
            hub_model = HubModel("image", str(tmp_path), from_scratch=from_scratch)
            with refused:
                load_model(hub_model, ("a", "b"))


@pytest.mark.parametrize("from_scratch", [True, False])
@pytest.mark.usefixtures("hub_variables")
def test_a_model_of_any_size_is_not_loaded(from_scratch: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**VIT, "num_hidden_layers": 1000}))
    with pytest.raises(DataError, match="the memory of this machine"):
        load_model(HubModel("image", str(tmp_path), from_scratch=from_scratch), ("a", "b"))
