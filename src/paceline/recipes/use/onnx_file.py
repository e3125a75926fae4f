"""ONNX files as networks: what ``paceline export`` and ``quantize`` wrote, run by ONNX Runtime."""

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
    """An ONNX file as a network; it computes on the CPU, wherever its inputs are.

    Args:
        path: The file.
        names: Of its inputs, in the order in which they are given.

    Raises:
        DataError: There is no such file, or it holds no such network.
        SettingError: The library is not installed.
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
            found = [one.name for one in self._session.get_inputs()]
        except Exception as error:  # the runtime's exceptions have no common base
            raise DataError(
                f"{path} cannot be run",
                found=f"{type(error).__name__}: {str(error)[:200]}",
                remedy="a file that paceline export or quantize wrote",
            ) from None
        if found != [*names]:
            raise DataError(
                f"{path} holds another network",
                found=f"its inputs are {', '.join(found)}; wanted are {', '.join(names)}",
            )
        self._names = names

    def forward(self, *inputs: Tensor) -> Tensor:
        """The scores that the file's network gives."""
        plain = (one.float() if one.is_floating_point() else one for one in inputs)
        given = zip(self._names, plain, strict=True)
        feed = {name: one.contiguous().cpu().numpy() for name, one in given}
        scores: Tensor = torch.from_numpy(self._session.run(None, feed)[0])
        return scores.to(inputs[0].device)


def runtime(name: str, purpose: str) -> Any:
    """ONNX Runtime, or a module of it."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # it would keep and send records of use
    return library(name, purpose)
