"""Tests checkpoints of models with tied and frozen weights, which are stored without duplicates."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import TensorDataset

from paceline import train
from paceline.spec.rundir import is_frozen_file
from paceline.spec.training.checkpoint_manifest import Manifest
from paceline.train.checkpoints.format import find_tied_weights, read_manifest
from paceline.train.checkpoints.store import Store
from paceline.train.weights import load_weights

CPU = torch.device("cpu")


class Tied(nn.Module):
    """A small language model whose body is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.body = nn.Linear(8, 8)
        self.adapter = nn.Linear(8, 8)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight
        self.body.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.body(self.embed(ids))
        return self.head(hidden + self.adapter(hidden))


def train_model(
    folder: Path, steps: int, act: Callable[[Tied, int], None] = lambda *_: None
) -> Tied:
    """Trains eight steps, stopped after ``steps``, with a checkpoint after each."""
    with train.join(device="cpu", run_dir=folder, seed=1, quiet=True) as session:
        torch.manual_seed(0)
        model = Tied()
        trainable = [one for one in model.parameters() if one.requires_grad]
        net = session.prepare(model, torch.optim.Adam(trainable, 0.01))
        session.checkpoints(every=1, keep=0)
        loader = session.loader(TensorDataset(torch.arange(32)), 4)
        for _ in session.epochs(loader, 1):
            for (ids,) in loader:
                session.step(net(ids).logsumexp(1))
                act(model, session.progress.step)
                if session.progress.step == steps:
                    os.kill(os.getpid(), signal.SIGTERM)
    return model


def train_until_stop(
    folder: Path, steps: int, act: Callable[[Tied, int], None] = lambda *_: None
) -> None:
    with pytest.raises(SystemExit):
        train_model(folder, steps, act)


def list_checkpoints(folder: Path) -> list[Path]:
    return [one.path for one in reversed(Store(folder / "checkpoints").scan()[0])]


def frozen_file(path: Path) -> Path:
    (frozen_path,) = (one for one in path.iterdir() if is_frozen_file(one.name))
    return frozen_path


def have_equal_weights(model: nn.Module, other: nn.Module) -> bool:
    pairs = zip(model.state_dict().items(), other.state_dict().items(), strict=True)
    return all(one == two and torch.equal(x, y) for (one, x), (two, y) in pairs)


def test_tied_and_frozen_tensors_are_written_once(tmp_path: Path) -> None:
    """A stopped run continues to the same weights, also from a copy of one checkpoint."""
    uninterrupted = train_model(tmp_path / "whole", 0)
    train_until_stop(tmp_path / "run", 3)
    first, *_, latest = list_checkpoints(tmp_path / "run")
    assert sorted(load_file(latest / "weights.safetensors")) == [
        "adapter.bias", "adapter.weight", "embed.weight",
    ]  # fmt: skip
    assert sorted(load_file(frozen_file(latest))) == ["body.bias", "body.weight"]
    assert frozen_file(first).samefile(frozen_file(latest))
    assert json.loads((latest / "state.json").read_text())["tied"] == {
        "head.weight": "embed.weight"
    }
    read_manifest(latest).verify(latest)
    reloaded = Tied()
    load_weights(tmp_path / "run", reloaded)
    assert torch.equal(reloaded.body.weight, uninterrupted.body.weight)
    assert reloaded.head.weight is reloaded.embed.weight

    resumed = train_model(tmp_path / "run", 0)
    assert resumed.head.weight is resumed.embed.weight
    assert have_equal_weights(uninterrupted, resumed)
    assert frozen_file(list_checkpoints(tmp_path / "run")[-1]).samefile(frozen_file(first))


@pytest.mark.parametrize("unseen", [False, True])
def test_changed_frozen_weights_are_rewritten(tmp_path: Path, unseen: bool) -> None:
    """Covers changes that do not increase a tensor's version counter."""

    def change(model: Tied, step: int) -> None:
        if step == 2:
            with torch.no_grad():
                (model.body.weight.data if unseen else model.body.weight).mul_(2)

    uninterrupted = train_model(tmp_path / "whole", 0, change)
    train_until_stop(tmp_path / "run", 3, change)
    files = [frozen_file(one) for one in list_checkpoints(tmp_path / "run")]
    assert len({one.name for one in files}) == 2
    assert have_equal_weights(uninterrupted, train_model(tmp_path / "run", 0))


def test_frozen_weights_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny_link(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", deny_link)
    train_until_stop(tmp_path, 2)
    first, *_, latest = list_checkpoints(tmp_path)
    assert not frozen_file(first).samefile(frozen_file(latest))
    read_manifest(latest).verify(latest)


def test_resumes_from_single_file_checkpoint(tmp_path: Path) -> None:
    """Earlier versions wrote such checkpoints."""
    uninterrupted = train_model(tmp_path / "whole", 0)
    train_until_stop(tmp_path / "run", 2)
    for path in list_checkpoints(tmp_path / "run"):
        weights = load_file(path / "weights.safetensors") | load_file(frozen_file(path))
        frozen_file(path).unlink()
        save_file(weights | {"head.weight": weights["embed.weight"].clone()},
                  path / "weights.safetensors")  # fmt: skip
        state = json.loads((path / "state.json").read_text())
        del state["tied"]
        (path / "state.json").write_text(json.dumps(state))
        manifest = read_manifest(path)
        from paceline.spec.training.checkpoint_manifest import FileEntry, sha256

        entries = {name: FileEntry(sha256(path / name), (path / name).stat().st_size)
                   for name in manifest.files if not is_frozen_file(name)}  # fmt: skip
        legacy_manifest = Manifest(manifest.step, entries, manifest.info)
        (path / "manifest.json").write_bytes(legacy_manifest.encode())
    assert have_equal_weights(uninterrupted, train_model(tmp_path / "run", 0))


def test_detects_damaged_frozen_weights(tmp_path: Path) -> None:
    train_until_stop(tmp_path, 2)
    latest = list_checkpoints(tmp_path)[-1]
    raw = bytearray(frozen_file(latest).read_bytes())
    raw[-1] ^= 1
    frozen_file(latest).write_bytes(raw)
    with pytest.raises(Exception, match="its hash differs"):
        read_manifest(latest).verify(latest)


def test_views_are_not_tied_weights() -> None:
    base = torch.arange(6.0)
    state = {"a": base, "b": base[:3], "c": base.view(2, 3), "d": base, "e": torch.empty(0)}
    assert find_tied_weights(state) == {"d": "a"}
