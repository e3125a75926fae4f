"""Tests the estimate of a language model's memory, and the errors and advice based on it."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import tiny_language_model
import torch
from recipe_tools import hub_variables  # noqa: F401 - a fixture

from paceline.recipes.language.adapters import TrainedPart, add_adapters
from paceline.recipes.language.base_model import BaseModel
from paceline.recipes.language.decoder import Decoder, Shape
from paceline.recipes.language.memory import (
    Change,
    MemoryNeeds,
    base_needs,
    decoder_needs,
    judge_memory,
    suggest,
)
from paceline.spec.errors import SettingError
from paceline.train.device import precision
from paceline.train.measure.largest_batch import device_memory

GIB = float(1 << 30)
NEEDS = MemoryNeeds(
    parameters=1000 << 20,
    trained=1000 << 20,
    frozen_bytes=4,
    trained_bytes=4,
    states=2,
    layers=20,
    width=1024,
    layer_numbers=20 << 10,
    vocabulary=32 << 10,
    number_bytes=4,
    examples=8,
    length=512,
    longest=1024,
)
"""Weights, gradients and optimizer state of 15.6 GiB, scores of 1.5 GiB, or 3 GiB for batches of
the longest examples, and 12.5 GiB of activations."""
CHANGES: dict[str, Change] = {
    "--gradient-checkpointing": partial(replace, is_checkpointed=True),
    "--method lora": partial(replace, trained=10 << 20),
}


def test_memory_parts_follow_from_shapes() -> None:
    sizes = {name: size / GIB for name, size in NEEDS.expected_parts.items()}

    assert sizes == pytest.approx({
        "weights": 3.90625, "gradients": 3.90625, "optimizer state": 7.8125, "scores": 3.0,
        "activations": 12.5,
    })  # fmt: skip
    assert NEEDS.least / GIB == pytest.approx(3.90625 * 4 + 1.5)


@pytest.mark.parametrize(
    ("total", "free", "expected"),
    [
        (64.0, 48.0, "memory of a process: about 31.1 GiB (weights 3.9 GiB"),
        (64.0, 30.0, "n2 has 30.0 GiB free for it: if memory runs out, --micro-batch 7, or"),
        (18.0, 17.5, "n2 has 17.5 GiB free for it: if memory runs out, --gradient-checkpointing"),
    ],
)
def test_tight_memory_gives_advice_only(total: float, free: float, expected: str) -> None:
    hosts = [("n1", 99 * GIB, 99 * GIB), ("n2", total * GIB, free * GIB)]

    assert expected in judge_memory(NEEDS, hosts, CHANGES)


def test_memory_error_names_host_sizes_and_remedy() -> None:
    hosts = [("n1", 99 * GIB, 99 * GIB), ("n2", 16 * GIB, 16 * GIB)]

    with pytest.raises(SettingError) as caught:
        judge_memory(NEEDS, hosts, CHANGES)

    assert "memory of n2" in str(caught.value)
    assert "17.1 GiB" in str(caught.value.found)
    assert caught.value.remedy == (
        "--method lora --micro-batch 6, or --gradient-checkpointing --method lora"
    )


def test_suggests_only_sufficient_changes() -> None:
    assert suggest(NEEDS, 1 * GIB, CHANGES) == "a smaller model, or a host with more memory"
    assert suggest(NEEDS, 6 * GIB, {}) == "a smaller model, or a host with more memory"
    both = "--gradient-checkpointing --method lora --micro-batch 2"
    assert both in suggest(NEEDS, 5.5 * GIB, CHANGES)


@pytest.mark.parametrize("depth", [1, 4])
def test_decoder_needs_match_parameter_count(depth: int) -> None:
    shape = Shape(depth, 300, 64)
    decoder = Decoder(shape)
    muon_parameters = sum(matrix.numel() for matrix in decoder.matrices())

    needs = decoder_needs(shape, muon_parameters)

    count = sum(parameter.numel() for parameter in decoder.parameters())
    assert needs.parts["weights"] == 4 * count
    assert needs.parts["optimizer state"] == pytest.approx(4 * (2 * count - muon_parameters))


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
def test_adapter_needs_match_parameter_count(tmp_path: Path) -> None:
    tiny_language_model.save(tmp_path)
    cpu, base = torch.device("cpu"), BaseModel(str(tmp_path))
    outline = base.outline()
    assert outline.device.type == "meta"

    for method in ("lora", "dora", "full"):
        needs = base_needs(outline, method, 4, precision("float32"), cpu)

        network = TrainedPart(add_adapters(base.load(), method, 4, 8.0))
        assert needs.trained == sum(p.numel() for p in network.parameters())
        assert needs.parameters == sum(p.numel() for p in network.whole_model.parameters())
    on_gpu = base_needs(outline, "lora", 4, precision("bf16"), torch.device("cuda"))
    assert (on_gpu.frozen_bytes, on_gpu.trained_bytes, on_gpu.number_bytes) == (2, 4, 2)


def test_processes_share_host_memory() -> None:
    total, free = device_memory(torch.device("cpu"), 1)

    assert 0 < free <= total
    assert device_memory(torch.device("cpu"), 4)[0] == total / 4
