"""What a session says when a script uses it in another way than it is meant."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._dynamo  # as the first optimizer does; it leaves a variable behind
from torch import nn
from torch.utils.data import TensorDataset

from paceline import train


@pytest.fixture
def session(tmp_path: Path) -> Iterator[train.Session]:
    with train.join(run_dir=tmp_path, seed=0) as session:
        yield session


def prepared(session: train.Session) -> train.Loader:
    network = session.place(nn.Linear(2, 1))
    session.prepare(network, torch.optim.SGD(network.parameters(), lr=0.1))
    return session.loader(TensorDataset(torch.zeros(8, 2)), 4)


def test_epochs_are_the_sessions(session: train.Session) -> None:
    with pytest.raises(RuntimeError, match=r"session\.epochs"):
        list(prepared(session))


def test_checkpoints_come_after_prepare(session: train.Session) -> None:
    with pytest.raises(RuntimeError, match=r"session\.prepare comes before"):
        session.checkpoints()


@pytest.mark.parametrize("shape", [(3,), (4, 2), (8,)])
def test_losses_of_another_shape(session: train.Session, shape: tuple[int, ...]) -> None:
    loader = prepared(session)
    epochs = session.epochs(loader, 1)
    next(epochs)
    batches = iter(loader)
    next(batches)
    with pytest.raises(ValueError, match="one loss for each of the 4 samples"):
        session.step(torch.zeros(shape, requires_grad=True))
    batches.close()
    epochs.close()
