"""A few measured steps instead of a training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # as the first optimizer does; it leaves a variable behind
from torch import nn
from torch.utils.data import TensorDataset

from paceline import train
from paceline.bench.step_model import Probe
from paceline.spec import jobenv
from paceline.spec.errors import SettingError
from paceline.train import parallel
from paceline.train.elastic.stop import QuietExit
from paceline.train.measure import probe


def training(folder: Path, samples: int = 400, **options: Any) -> None:
    """As a script has it; much longer than a probe."""
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


@pytest.mark.parametrize("samples", [400, 8])  # an epoch of one step, too
def test_it_ends_after_some_steps_at_each_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samples: int
) -> None:
    asked = {"batches": [], "parts": [1, 0.5, 0.25], "seconds": 0}
    monkeypatch.setenv(jobenv.PROBE, json.dumps(asked))
    with pytest.raises(QuietExit) as caught:
        training(tmp_path, samples)
    assert not caught.value.code  # the process ends well
    assert {path.name for path in tmp_path.iterdir()} <= {
        "steps.json", "events.jsonl", "metrics.jsonl",
    }  # fmt: skip
    found = Probe.read(json.loads((tmp_path / "steps.json").read_text()))
    assert (found.samples, found.global_batch) == (samples, 8)
    assert found.steps == 1000 * samples // 8  # of the training that was asked for
    assert (len(set(found.hosts)), found.bytes, found.link) == (1, 12, None)
    assert {8, 4, 2} >= {one.batch for one in found.timings} >= ({8, 4, 2} if samples > 8 else {8})
    assert all(0 <= one.data <= one.seconds for one in found.timings)
    assert all(0 < one < 1 for one in found.computing.values())  # of so short steps, of some


@pytest.mark.parametrize(
    "options",
    [
        {"balance": "auto", "drop_slow": True},
        {"balance": {"n1": 3.0, "n2": 1.0}, "limit": {"n2": 4}},  # and this host is neither
    ],
)
def test_a_host_is_tried_alone_whatever_shares_it_will_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    asked = {"batches": [], "parts": [1], "seconds": 0}
    monkeypatch.setenv(jobenv.PROBE, json.dumps(asked))
    with pytest.raises(QuietExit):
        training(tmp_path, **options)
    found = Probe.read(json.loads((tmp_path / "steps.json").read_text()))
    assert found.balance == options["balance"]
    assert [one.batch for one in found.timings] == [8]


def test_which_batches() -> None:
    asked = probe.ProbeRequest((), (1.0, 0.5, 0.125), 1.0)
    assert asked.global_batches(64, 1000, 1) == (64, 32, 8)
    assert asked.global_batches(16, 1000, 4) == (16, 8, 4)  # none without a sample for each rank
    assert asked.global_batches(64, 40, 1) == (40, 32, 8)  # nor more than there are
    assert probe.ProbeRequest((128, 16), (), 1.0).global_batches(64, 1000, 2) == (128, 16)
    assert probe.ProbeRequest((), (), 1.0).global_batches(64, 1000, 2) == (64,)


@pytest.mark.parametrize("text", ["yes", "[]", "{}", '{"batches": 1, "parts": [], "seconds": 1}'])
def test_what_cannot_be_understood_is_refused(text: str) -> None:
    assert probe.probe_request({}) is None
    with pytest.raises(SettingError, match=jobenv.PROBE):
        probe.probe_request({jobenv.PROBE: text})


def test_a_probe_of_two_sends_in_the_pieces_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else less of its exchange would be hidden than theirs, and the forecast too slow."""
    network, sizes = nn.Linear(1000, 2000), []
    for ranks, asked in ((2, ""), (2, "{}"), (3, "")):
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda ranks=ranks: ranks)
        monkeypatch.setenv(jobenv.PROBE, asked)
        sizes.append(parallel.bucket_megabytes(network.parameters()))
    assert sizes[0] is None
    assert sizes[1] == sizes[2] == 1.0
