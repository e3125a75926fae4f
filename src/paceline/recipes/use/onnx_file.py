"""ONNX files of ``paceline export`` and ``quantize`` as networks, run by ONNX Runtime."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.program import library
from paceline.spec.errors import DataError


class OnnxNetwork(nn.Module):
    """An ONNX file as a network, which computes on the CPU.

    Args:
        names: Names of its inputs, in order.

    Raises:
        DataError: The file is missing, or holds another network.
    """

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        super().__init__()
        tools = runtime("onnxruntime", "ONNX files are run")
        options = tools.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        try:
            content = path.expanduser().read_bytes()
            self._session: Any = tools.InferenceSession(
                content, options, providers=["CPUExecutionProvider"]
            )
            input_names = [tensor.name for tensor in self._session.get_inputs()]
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
