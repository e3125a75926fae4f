"""The result of a training: weights and description, loadable without running code."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from paceline.spec import rundir
from paceline.spec.errors import DataError, NodeError
from paceline.train import files


def save_model(folder: Path, state: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Writes ``model.safetensors`` and then ``config.json``, each atomically.

    Args:
        folder: The run directory.
        state: Tensors by name; any device.
        config: What is needed to build the model again and to use it; JSON values.

    Raises:
        NodeError: The files cannot be written.
    """
    plain = _apart({name: tensor.detach().cpu().contiguous() for name, tensor in state.items()})
    weights = folder / rundir.WEIGHTS
    try:
        files.write_bytes(weights, save(plain))
        files.write_json(folder / rundir.MODEL_CONFIG, {**config, "sha256": files.sha256(weights)})
    except OSError as error:
        raise NodeError(
            f"the trained model cannot be written to {weights.parent}",
            found=str(error.strerror or error),
            remedy="make room and start the same command again: it goes on from its checkpoint",
        ) from None


def _apart(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tied weights as copies: the format knows no tensors that share memory."""
    places = Counter(tensor.untyped_storage().data_ptr() for tensor in state.values())
    return {
        name: tensor.clone() if places[tensor.untyped_storage().data_ptr()] > 1 else tensor
        for name, tensor in state.items()
    }


def load_config(folder: Path) -> dict[str, Any]:
    """The description of a saved model.

    Raises:
        DataError: The run directory holds no model, or not one of ours.
    """
    path = folder / rundir.MODEL_CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(
            f"{folder} holds no trained model",
            found=f"no {path}",
            remedy="name the directory of a run that has ended, for example runs/image-…",
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read", found=str(error)) from None
    if not isinstance(config, dict):
        raise DataError(f"{path} describes no model", found=type(config).__name__)
    return config


def load_weights(folder: Path, module: torch.nn.Module) -> None:
    """Loads a run's weights into a module of the same shape and number format.

    Raises:
        DataError: The file is missing, damaged or does not fit the module.
    """
    path = folder / rundir.WEIGHTS
    config = load_config(folder)
    try:
        content = path.read_bytes()
        if files.sha256(path) != config.get("sha256"):
            raise DataError(
                f"{path} is not the file that the training wrote",
                found="its hash differs from the one in config.json",
                remedy="copy the run directory again, or train again",
            )
        module.load_state_dict(load(content))
    except (OSError, RuntimeError, SafetensorError) as error:
        raise DataError(f"{path} cannot be loaded", found=str(error)) from None
