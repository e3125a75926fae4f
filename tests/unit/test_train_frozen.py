"""Checkpoints of models with tied and frozen weights: each tensor once, and once for a run."""

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
    """A language model in miniature, whose body is not trained."""

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


def trained(folder: Path, steps: int, act: Callable[[Tied, int], None] = lambda *_: None) -> Tied:
    """A training of eight steps, stopped after ``steps``, with a checkpoint after each."""
    with train.join(device="cpu", run_dir=folder, seed=1, quiet=True) as session:
        torch.manual_seed(0)
        model = Tied()
        rest = [one for one in model.parameters() if one.requires_grad]
        net = session.prepare(model, torch.optim.Adam(rest, 0.01))
        session.checkpoints(every=1, keep=0)
        loader = session.loader(TensorDataset(torch.arange(32)), 4)
        for _ in session.epochs(loader, 1):
            for (ids,) in loader:
                session.step(net(ids).logsumexp(1))
                act(model, session.progress.step)
                if session.progress.step == steps:
                    os.kill(os.getpid(), signal.SIGTERM)
    return model


def stopped(folder: Path, steps: int, act: Callable[[Tied, int], None] = lambda *_: None) -> None:
    with pytest.raises(SystemExit):
        trained(folder, steps, act)


def checkpoints(folder: Path) -> list[Path]:
    return [one.path for one in reversed(Store(folder / "checkpoints").scan()[0])]


def frozen(path: Path) -> Path:
    (found,) = (one for one in path.iterdir() if is_frozen_file(one.name))
    return found


def same(model: nn.Module, other: nn.Module) -> bool:
    pairs = zip(model.state_dict().items(), other.state_dict().items(), strict=True)
    return all(one == two and torch.equal(x, y) for (one, x), (two, y) in pairs)


def test_each_tensor_is_written_once(tmp_path: Path) -> None:
    """And a stopped run goes on to the same weights, also from a copy of one checkpoint."""
    whole = trained(tmp_path / "whole", 0)
    stopped(tmp_path / "run", 3)
    first, *_, last = checkpoints(tmp_path / "run")
    assert sorted(load_file(last / "weights.safetensors")) == [
        "adapter.bias", "adapter.weight", "embed.weight",
    ]  # fmt: skip
    assert sorted(load_file(frozen(last))) == ["body.bias", "body.weight"]
    assert frozen(first).samefile(frozen(last))
    assert json.loads((last / "state.json").read_text())["tied"] == {"head.weight": "embed.weight"}
    read_manifest(last).verify(last)
    again = Tied()
    load_weights(tmp_path / "run", again)
    assert torch.equal(again.body.weight, whole.body.weight)
    assert again.head.weight is again.embed.weight

    resumed = trained(tmp_path / "run", 0)
    assert resumed.head.weight is resumed.embed.weight
    assert same(whole, resumed)
    assert frozen(checkpoints(tmp_path / "run")[-1]).samefile(frozen(first))


@pytest.mark.parametrize("unseen", [False, True])
def test_frozen_weights_that_change_are_written_anew(tmp_path: Path, unseen: bool) -> None:
    """Also a teacher's that are changed in a way that no version counter sees."""

    def change(model: Tied, step: int) -> None:
        if step == 2:
            with torch.no_grad():
                (model.body.weight.data if unseen else model.body.weight).mul_(2)

    whole = trained(tmp_path / "whole", 0, change)
    stopped(tmp_path / "run", 3, change)
    files = [frozen(one) for one in checkpoints(tmp_path / "run")]
    assert len({one.name for one in files}) == 2
    assert same(whole, trained(tmp_path / "run", 0))


def test_a_disk_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", refuse)
    stopped(tmp_path, 2)
    first, *_, last = checkpoints(tmp_path)
    assert not frozen(first).samefile(frozen(last))
    read_manifest(last).verify(last)


def test_a_checkpoint_with_every_name_in_one_file(tmp_path: Path) -> None:
    """As versions before wrote it."""
    whole = trained(tmp_path / "whole", 0)
    stopped(tmp_path / "run", 2)
    for path in checkpoints(tmp_path / "run"):
        weights = load_file(path / "weights.safetensors") | load_file(frozen(path))
        frozen(path).unlink()
        save_file(weights | {"head.weight": weights["embed.weight"].clone()},
                  path / "weights.safetensors")  # fmt: skip
        state = json.loads((path / "state.json").read_text())
        del state["tied"]
        (path / "state.json").write_text(json.dumps(state))
        manifest = read_manifest(path)
        from paceline.spec.training.checkpoint_manifest import FileEntry, sha256

        entries = {name: FileEntry(sha256(path / name), (path / name).stat().st_size)
                   for name in manifest.files if not is_frozen_file(name)}  # fmt: skip
        made = Manifest(manifest.step, entries, manifest.info)
        (path / "manifest.json").write_bytes(made.encode())
    assert same(whole, trained(tmp_path / "run", 0))


def test_damage_to_frozen_weights_is_found(tmp_path: Path) -> None:
    stopped(tmp_path, 2)
    last = checkpoints(tmp_path)[-1]
    raw = bytearray(frozen(last).read_bytes())
    raw[-1] ^= 1
    frozen(last).write_bytes(raw)
    with pytest.raises(Exception, match="its hash differs"):
        read_manifest(last).verify(last)


def test_views_are_not_ties() -> None:
    base = torch.arange(6.0)
    state = {"a": base, "b": base[:3], "c": base.view(2, 3), "d": base, "e": torch.empty(0)}
    assert find_tied_weights(state) == {"d": "a"}
