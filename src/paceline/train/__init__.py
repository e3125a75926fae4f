"""The training library: plain PyTorch, on all the processes there are, with the same result.

::

    from paceline import train

    with train.join(seed=0) as session:
        network = session.place(Network())
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        model = session.prepare(network, optimizer)
        loader = session.loader(dataset, global_batch=64)
        for epoch in session.epochs(loader, 3):
            for inputs, targets in loader:
                session.step(F.cross_entropy(model(inputs), targets, reduction="none"))
        session.save_model({"classes": 10})
"""

from __future__ import annotations

from paceline.train.callbacks import Callback
from paceline.train.data.fetch import Batched, Draws
from paceline.train.data.loader import Batch, Loader
from paceline.train.data.order import Ids
from paceline.train.data.shards import ShardedDataset, decoded, write_shards
from paceline.train.ddp.communication import communication_hook
from paceline.train.measure.largest_batch import LargestBatch, find_batch, fit_batch
from paceline.train.measure.lr_range import LrRange, find_lr
from paceline.train.metrics import Best, Means, Meter
from paceline.train.session import Session
from paceline.train.start import join
from paceline.train.update import Average
from paceline.train.weights import load_config, load_weights
from paceline.train.world import World

__all__ = [
    "Average",
    "Batch",
    "Batched",
    "Best",
    "Callback",
    "Draws",
    "Ids",
    "LargestBatch",
    "Loader",
    "LrRange",
    "Means",
    "Meter",
    "Session",
    "ShardedDataset",
    "World",
    "communication_hook",
    "decoded",
    "find_batch",
    "find_lr",
    "fit_batch",
    "join",
    "load_config",
    "load_weights",
    "write_shards",
]
