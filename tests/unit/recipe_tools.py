"""Helpers and fixtures that the tests of recipes share."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import tqdm

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))

tqdm.tqdm.monitor_interval = 0  # disables a thread that would outlive the test

HUB_VARIABLES = (
    "HF_HUB_DISABLE_TELEMETRY",
    "ORT_DISABLE_TELEMETRY",
    "TOKENIZERS_PARALLELISM",
    "HF_HUB_OFFLINE",
    "HF_DATASETS_OFFLINE",
    "TRANSFORMERS_OFFLINE",
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def hub_variables(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Restores the variables that recipes set; uses a private cache and no network."""
    for name in HUB_VARIABLES:
        monkeypatch.setenv(name, "1" if name.endswith(("OFFLINE", "TELEMETRY")) else "false")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "inductor"))
    monkeypatch.setenv("HF_HOME", str(tmp_path_factory.getbasetemp() / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


def records(folder: Path, split: str) -> list[dict[str, Any]]:
    """Returns the records of one split from ``metrics.jsonl``."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [one for one in map(json.loads, lines) if one["split"] == split]


def config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "model/config.json").read_text())
    return found


def parameters(folder: Path) -> torch.Tensor:
    from safetensors.torch import load_file

    state = load_file(folder / "model/model.safetensors")
    return torch.cat([state[name].flatten().double() for name in sorted(state)])


__all__ = ["config", "hub_variables", "one_thread", "parameters", "records"]
