"""Tests QLoRA: errors, memory, and a base model in four bits if bitsandbytes is installed.

The last tests let bitsandbytes compute on the CPU, which the recipe does not allow.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import tiny_language_model
import torch
from recipe_tools import config, hub_variables, one_thread, records  # noqa: F401 - fixtures

from paceline.recipes.language import base_quantization, sft
from paceline.recipes.language.adapters import TrainedPart, add_adapters
from paceline.recipes.language.base_model import BaseModel
from paceline.recipes.language.memory import base_needs
from paceline.recipes.use import evaluate
from paceline.spec.errors import SettingError
from paceline.train.device import precision

lacks_peft = importlib.util.find_spec("peft") is None
pytestmark = pytest.mark.skipif(lacks_peft, reason="peft is not installed")
lacks_bitsandbytes = importlib.util.find_spec("bitsandbytes") is None
needs_bitsandbytes = pytest.mark.skipif(lacks_bitsandbytes, reason="no bitsandbytes")
WIDTH = 64  # on CPUs, bitsandbytes packs rows of 32
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def input_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Creates a folder with a model and conversations."""
    folder = tmp_path_factory.mktemp("qlora")
    tiny_language_model.save(folder / "base")
    tiny_language_model.make_model(width=WIDTH).save_pretrained(str(folder / "base"))
    tiny_language_model.write_jsonl(folder / "chat.jsonl", tiny_language_model.chats(24))
    return folder


def train(input_dir: Path, run: Path, *flags: str) -> int:
    default_flags = [
        f"--model={input_dir}/base",
        f"--data={input_dir}/chat.jsonl",
        f"--run-dir={run}",
    ]
    default_flags += [
        "--device=cpu",
        "--method=qlora",
        "--samples=0",
        "--log-every=1",
        "--max-length=200",
    ]
    return sft.main([*default_flags, *flags])


def test_qlora_needs_cuda_and_bitsandbytes(
    input_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert train(input_dir, tmp_path) == 2
    error = capsys.readouterr().err
    assert "--method qlora needs a GPU with CUDA" in error
    assert "--method lora" in error
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(SettingError) as refusal:
        base_quantization.check_quantization(torch.device("cuda"))
    assert "pip install bitsandbytes, or --method lora" in refusal.value.render()


def test_memory_estimate_counts_4_bit_linear_layers(input_dir: Path) -> None:
    outline = BaseModel(f"{input_dir}/base").outline()
    needs = base_needs(outline, "qlora", 4, precision("bf16"), torch.device("cuda"))
    plain = base_needs(outline, "lora", 4, precision("bf16"), torch.device("cuda"))
    layers = base_quantization.linear_layers(outline).values()
    quantized = sum(layer.in_features * layer.out_features for layer in layers)
    num_unquantized = sum(parameter.numel() for parameter in outline.parameters()) - quantized
    frozen = needs.parts["weights"] - needs.trained * needs.trained_bytes
    assert frozen == pytest.approx(quantized * (0.5 + 1 / 64 + 1 / 4096) + num_unquantized * 4)
    assert (needs.trained, needs.parameters) == (plain.trained, plain.parameters)


@needs_bitsandbytes
def test_quantized_base_matches_dequantized_weights() -> None:
    from bitsandbytes import functional

    model = tiny_language_model.make_model(width=WIDTH)
    rounded = tiny_language_model.make_model(width=WIDTH)
    quantized = base_quantization.quantize_base(model, CPU)
    for name, layer in base_quantization.linear_layers(rounded).items():
        weight = quantized.get_submodule(name).weight
        assert (weight.quant_state.quant_type, weight.quant_state.nested) == ("nf4", True)
        values = functional.dequantize_4bit(weight.data, weight.quant_state)
        assert not torch.equal(values.float(), layer.weight)
        layer.weight.data = values.float()
    tokens = torch.arange(2, 40)[None]
    with torch.no_grad():
        actual, expected = quantized(tokens).logits, rounded(tokens).logits
    torch.testing.assert_close(actual, expected, rtol=0.05, atol=2e-3)  # it computes in bfloat16
    network = TrainedPart(add_adapters(quantized, "qlora", 4, 8.0))
    assert all("lora_" in name for name, _ in network.named_parameters())
    total = sum(map(base_quantization.num_weights, network.whole_model.parameters()))
    plain = add_adapters(tiny_language_model.make_model(width=WIDTH), "lora", 4, 8.0)
    assert total == sum(parameter.numel() for parameter in plain.parameters())


@needs_bitsandbytes
@pytest.mark.parametrize("objective", ["sft", "dpo"])
def test_cpu_training_lowers_loss_and_resumes_exactly(
    objective: str, input_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bitsandbytes.nn import modules

    monkeypatch.setattr(sft, "check_quantization", lambda device: None)
    # With this instruction, layers have no gradients after an evaluation on a CPU.
    monkeypatch.setattr(modules, "has_avx512bf16", lambda: False)
    rows = {"sft": tiny_language_model.chats, "dpo": tiny_language_model.preferences}[objective](24)
    tiny_language_model.write_jsonl(input_dir / "chat.jsonl", rows)
    flags = ["--lr=0.003", f"--objective={objective}", "--schedule=constant"]
    for number in (1, 3):
        assert train(input_dir, tmp_path / "parts", *flags, f"--epochs={number}") == 0
    assert train(input_dir, tmp_path / "whole", *flags, "--epochs=3") == 0
    losses = [record["loss"] for record in records(tmp_path / "whole", "train")]
    assert losses[-1] < losses[0]
    for part in ("train", "val"):
        runs = (records(tmp_path / run, part)[-1]["loss"] for run in ("parts", "whole"))
        assert len(set(runs)) == 1
    # on a CPU, the adapters are applied to the original base model
    assert evaluate.main([f"--run={tmp_path}/whole", "--device=cpu"]) == 0
    assert config(tmp_path / "whole")["method"] == "qlora"
