"""The base of QLoRA: linear layers in four bits, by bitsandbytes (Dettmers et al. 2023)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from paceline.program import library
from paceline.spec.errors import SettingError

NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a weight: four bits, a scale of 8 bits for 64 of them, and 32 bits for 256 scales."""
_PURPOSE = "--method qlora is trained"
_INSTALL = "pip install bitsandbytes, or --method lora"


def check_quantization(device: torch.device) -> None:
    """Raises SettingError if a base cannot be trained in four bits on a device."""
    if device.type != "cuda":
        raise SettingError(
            f"--method qlora needs a GPU with CUDA, and this process computes on {device.type}",
            remedy="--method lora",
        )
    library("bitsandbytes", _PURPOSE, _INSTALL)


def quantize_base(model: Any, device: torch.device) -> Any:
    """Moves a model of transformers to a device, with its linear layers in four bits.

    Weights are NF4 with double quantization, and layers compute in bfloat16. The output layer,
    embeddings and norms stay; those in 16 bits become float32. Nothing is trained. Each layer is
    quantized by itself, so the device never holds the whole model in its own precision.
    """
    bitsandbytes = library("bitsandbytes", _PURPOSE, _INSTALL)
    peft = library("peft", _PURPOSE)
    for name, layer in linear_layers(model).items():
        quantized = bitsandbytes.nn.Linear4bit(
            layer.in_features,
            layer.out_features,
            bias=layer.bias is not None,
            compute_dtype=torch.bfloat16,
            compress_statistics=True,
            quant_type="nf4",
            device="meta",
        )
        quantized.weight = bitsandbytes.nn.Params4bit(
            layer.weight.data, requires_grad=False, compress_statistics=True, quant_type="nf4"
        )
        if layer.bias is not None:
            quantized.bias = layer.bias
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, quantized.to(device))
    model.is_loaded_in_4bit = True  # by which peft knows such a model
    return peft.prepare_model_for_kbit_training(model.to(device), use_gradient_checkpointing=False)


def linear_layers(model: Any) -> dict[str, nn.Linear]:
    """Returns the linear layers of a model but the output layer, by name."""
    output = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not output
    }


def num_weights(parameter: nn.Parameter) -> int:
    """Returns the number of weights in a parameter, also in one of four bits."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else math.prod(state.shape)
