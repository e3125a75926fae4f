"""Tests that two ranks refuse loops over batches that a resumed run could not repeat."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import local_ranks

SCRIPT = """
from itertools import islice

import torch
from torch import nn
from torch.utils.data import TensorDataset

from paceline import train
from paceline.spec.errors import SettingError

with train.join(seed=0) as session:
    network = session.place(nn.Linear(2, 1))
    model = session.prepare(network, torch.optim.SGD(network.parameters(), lr=0.1))
    loader = session.loader(TensorDataset(torch.ones(15, 2)), 4)
    held_out = session.loader(TensorDataset(torch.ones(15, 2)), 4)
    try:
        for epoch in session.epochs(loader, 3, every=3):
            for (inputs,) in islice(loader, 3 if epoch == 0 else 1):
                session.step(model(inputs).square().mean(1))
            if session.progress.step == 4:
                try:
                    list(held_out)
                except SettingError as error:
                    print(error.found)
    except SettingError as error:
        print(error.message)
    session.verify()
    for epoch in session.epochs(loader, 3):
        for (inputs,) in islice(loader, 2):
            session.step(model(inputs).square().mean(1))
"""


def test_all_ranks_refuse_unfinished_and_second_loops(tmp_path: Path) -> None:
    extra = {"PACELINE_RUN_DIR": str(tmp_path / "run")}
    ended = local_ranks.run(2, ["-c", SCRIPT], tmp_path, timeout=120, extra=extra)
    for rank in ended:
        assert rank.status == 1
        assert "that loader has no batch left here" in rank.out
        assert "the batch loop of epoch 2 was left after 1 of 4 steps" in rank.out
        assert "the batch loop of epoch 2 was left after 3 of 4 steps" in rank.err
