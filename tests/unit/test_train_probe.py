"""Tests the probe, which measures a few steps instead of a whole training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer imports it, and it sets a variable
from torch import nn
from torch.utils.data import TensorDataset

from paceline import train
from paceline.bench.step_model import Probe
from paceline.spec import jobenv
from paceline.spec.errors import SettingError
from paceline.train import parallel
from paceline.train.elastic.stop import QuietExit
from paceline.train.measure import probe


def run_training(folder: Path, samples: int = 400, **options: Any) -> None:
    """Trains like a script, for much longer than a probe."""
    with train.join(run_dir=folder, seed=0) as session:
        network = session.place(nn.Linear(2, 1))
        model = session.prepare(network, torch.optim.SGD(network.parameters(), lr=0.1))
        loader = session.loader(TensorDataset(torch.zeros(samples, 2)), 8, **options)
        assert not session.checkpoints(every="1")
        session.track(["tensorboard"])
        for _ in session.epochs(loader, 1000):
            for (inputs,) in loader:
                session.step(model(inputs).square().mean(1))
        session.save_model({})


@pytest.mark.parametrize("samples", [400, 8])  # also an epoch of one step
def test_probe_measures_each_batch_and_exits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samples: int
) -> None:
    request = {"batches": [], "parts": [1, 0.5, 0.25], "seconds": 0}
    monkeypatch.setenv(jobenv.PROBE, json.dumps(request))
    with pytest.raises(QuietExit) as caught:
        run_training(tmp_path, samples)
    assert not caught.value.code  # exit status 0
    assert {path.name for path in tmp_path.iterdir()} <= {
        "steps.json", "events.jsonl", "metrics.jsonl",
    }  # fmt: skip
    result = Probe.read(json.loads((tmp_path / "steps.json").read_text()))
    assert (result.samples, result.global_batch) == (samples, 8)
    assert result.steps == 1000 * samples // 8  # of the requested training
    assert (len(set(result.hosts)), result.bytes, result.link) == (1, 12, None)
    assert {8, 4, 2} >= {one.batch for one in result.timings} >= ({8, 4, 2} if samples > 8 else {8})
    assert all(0 <= one.data <= one.seconds for one in result.timings)
    assert all(0 < one < 1 for one in result.computing.values())  # very short steps


@pytest.mark.parametrize(
    "options",
    [
        {"balance": "auto", "drop_slow": True},
        {"balance": {"n1": 3.0, "n2": 1.0}, "limit": {"n2": 4}},  # this host is neither n1 nor n2
    ],
)
def test_probe_of_single_host_ignores_balance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    request = {"batches": [], "parts": [1], "seconds": 0}
    monkeypatch.setenv(jobenv.PROBE, json.dumps(request))
    with pytest.raises(QuietExit):
        run_training(tmp_path, **options)
    result = Probe.read(json.loads((tmp_path / "steps.json").read_text()))
    assert result.balance == options["balance"]
    assert [one.batch for one in result.timings] == [8]


def test_probed_global_batches() -> None:
    request = probe.ProbeRequest((), (1.0, 0.5, 0.125), 1.0)
    assert request.global_batches(64, 1000, 1) == (64, 32, 8)
    assert request.global_batches(16, 1000, 4) == (16, 8, 4)  # at least one sample for each rank
    assert request.global_batches(64, 40, 1) == (40, 32, 8)  # at most as many as samples
    assert probe.ProbeRequest((128, 16), (), 1.0).global_batches(64, 1000, 2) == (128, 16)
    assert probe.ProbeRequest((), (), 1.0).global_batches(64, 1000, 2) == (64,)


@pytest.mark.parametrize("text", ["yes", "[]", "{}", '{"batches": 1, "parts": [], "seconds": 1}'])
def test_rejects_malformed_probe_request(text: str) -> None:
    assert probe.probe_request({}) is None
    with pytest.raises(SettingError, match=jobenv.PROBE):
        probe.probe_request({jobenv.PROBE: text})


def test_two_rank_probe_uses_small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise less of its communication would overlap, and the forecast would be too slow."""
    network, sizes = nn.Linear(1000, 2000), []
    for ranks, request in ((2, ""), (2, "{}"), (3, "")):
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda ranks=ranks: ranks)
        monkeypatch.setenv(jobenv.PROBE, request)
        sizes.append(parallel.bucket_megabytes(network.parameters()))
    assert sizes[0] is None
    assert sizes[1] == sizes[2] == 1.0
