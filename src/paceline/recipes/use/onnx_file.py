"""ONNX files of ``paceline export`` and ``quantize`` as networks, run by ONNX Runtime."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.program import library
from paceline.spec.errors import DataError
from paceline.train import files

_WEIGHTS = "paceline.weights"  # an ONNX file's record of the model that it was made from


def mark(path: Path, config: Mapping[str, Any]) -> None:
    """Records in an ONNX file which weights it was made from; ``config`` describes the model."""
    onnx = library("onnx", "ONNX files are written")
    model = onnx.load(str(path))
    entry = model.metadata_props.add()
    entry.key, entry.value = _WEIGHTS, str(config.get("sha256", ""))
    onnx.save(model, str(path))


class OnnxNetwork(nn.Module):
    """An ONNX file as a network, which computes on the CPU.

    Args:
        names: Names of its inputs, in order.
        config: Description of the model that it must have been made from; ``None``: any.

    Raises:
        DataError: The file is missing, or holds another network.
    """

    def __init__(
        self, path: Path, names: Sequence[str], config: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__()
        tools = runtime("onnxruntime", "ONNX files are run")
        options = tools.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        try:
            content = files.read_bytes_limited(path.expanduser(), files.max_content_bytes())
            self._session: Any = tools.InferenceSession(
                content, options, providers=["CPUExecutionProvider"]
            )
            input_names = [tensor.name for tensor in self._session.get_inputs()]
            weights = self._session.get_modelmeta().custom_metadata_map.get(_WEIGHTS)
        except Exception as error:  # the runtime's exceptions have no common base
            raise DataError(
                f"{path} cannot be run",
                found=f"{type(error).__name__}: {str(error)[:200]}",
                remedy="a file that paceline export or quantize wrote",
            ) from None
        if input_names != [*names]:
            raise DataError(
                f"{path} holds another network",
                found=f"its inputs are {', '.join(input_names)}; wanted are {', '.join(names)}",
            )
        if config is not None and weights != config.get("sha256", ""):
            raise DataError(
                f"{path} was not made from the model that the run has now",
                found="it names no model"
                if weights is None
                else "the run was trained again, or this is the file of another run",
                remedy="paceline export RUN, or paceline quantize RUN, writes it again",
            )
        self._names = names

    def forward(self, *inputs: Tensor) -> Tensor:
        converted = (tensor.float() if tensor.is_floating_point() else tensor for tensor in inputs)
        named_inputs = zip(self._names, converted, strict=True)
        feed = {name: tensor.contiguous().cpu().numpy() for name, tensor in named_inputs}
        scores: Tensor = torch.from_numpy(self._session.run(None, feed)[0])
        return scores.to(inputs[0].device)


def runtime(name: str, purpose: str) -> Any:
    """Imports ONNX Runtime, or a module of it."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    return library(name, purpose)
