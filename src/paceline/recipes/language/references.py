"""Log-probabilities of answers by the model before the training: computed once, cached on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline import train
from paceline.recipes.data.download import cache
from paceline.recipes.language.adapters import TrainedPart
from paceline.recipes.language.examples import PairSet
from paceline.recipes.language.losses import example_losses
from paceline.spec.errors import DataError
from paceline.spec.formatting import pluralize
from paceline.train import files

FILE = "losses.bin"
_BLOCK_PAIRS = 8  # that a process computes in turn, on any number of processes
_PASS_PAIRS = 128 * _BLOCK_PAIRS  # between two sums over all processes
_VERSION = 1


@dataclass(frozen=True)
class Reference:
    """The model before the training.

    Attributes:
        content: Hash of its parameters.
        settings: Hash of what it computes beside them.
        network: Opens the network of this model, on the session's device.
    """

    content: str
    settings: str
    network: Callable[[], Any]

    def losses(self, session: train.Session, pairs: PairSet, name: str, at_once: int) -> Tensor:
        """Returns the loss of each answer, summed over its tokens, on every rank; a collective.

        Args:
            pairs: A part of the data, whose name is ``name``.
            at_once: Most pairs that this process computes at once.

        Returns:
            Float64 on the CPU, shape ``[pairs, 2]``: chosen and rejected.

        Raises:
            DataError: The cache cannot be read or written.
        """
        # The first rank decides: others may compute in another precision, or have another disk.
        key = session.comms.by_first(lambda: self._key(session, pairs))
        folder = cache().with_name("references") / key
        is_cached = bool(session.comms.by_first(lambda: "yes" if folder.exists() else ""))
        losses = _share_cached(session, folder, len(pairs)) if is_cached else None
        is_cached = losses is not None
        if losses is None:
            session.phase("compute reference")
            losses = self._compute(session, pairs, at_once)
        session.once(folder, partial(_write, losses))
        source = "from the cache" if is_cached else "computed, and cached"
        count = pluralize(len(pairs), f"{name} pair")
        session.say(f"reference log-probabilities of {count}: {source}")
        return losses

    def _key(self, session: train.Session, pairs: PairSet) -> str:
        precision = session.precision
        identity = (
            f"{_VERSION} {self.content} {self.settings} {pairs.fingerprint()} {precision.compute}"
            f" {precision.parameters} {session.device.type}"
        )
        return hashlib.sha256(identity.encode()).hexdigest()[:16]

    @torch.no_grad()
    def _compute(self, session: train.Session, pairs: PairSet, at_once: int) -> Tensor:
        """Computes blocks of pairs in turn with the other ranks."""
        losses = torch.zeros((len(pairs), 2), dtype=torch.float64)
        with self.network() as network:
            is_training = network.training
            network.eval()
            # Every rank computes its blocks of some pairs, and adds zeros for the others. If a rank
            # is lost, its pairs are still missing, and belong to the next ones.
            missing = torch.arange(len(pairs))
            while len(missing):
                ids = missing[:_PASS_PAIRS]
                local, world = torch.zeros((len(ids), 3), dtype=torch.float64), session.world
                blocks = range(0, len(ids), _BLOCK_PAIRS)
                for block in () if session.comms.joining else blocks[world.rank :: world.size]:
                    stop = min(block + _BLOCK_PAIRS, len(ids))
                    for start in range(block, stop, at_once):
                        part = slice(start, min(start + at_once, stop))
                        local[part, :2] = _pair_losses(session, network, pairs, ids[part])
                        local[part, 2] = 1
                summed = _sum(session, local)
                is_computed = summed[:, 2] > 0
                losses[ids[is_computed]] = summed[is_computed, :2] / summed[is_computed, 2:]
                missing = torch.cat([ids[~is_computed], missing[_PASS_PAIRS:]])
            network.train(is_training)
        return losses


def _pair_losses(session: train.Session, network: Any, pairs: PairSet, ids: Tensor) -> Tensor:
    """Returns the losses of both answers of some pairs, float64 on the CPU, shape ``[n, 2]``."""
    rows = pairs.batch(ids.numpy(), None)
    tokens, positions, labels, examples = (tensor.to(session.device) for tensor in rows)
    with session.autocast():
        logits = network(tokens, positions)
    return example_losses(logits, labels, examples, 2 * len(ids)).view(-1, 2).double().cpu()


@contextmanager
def without_adapters(network: TrainedPart) -> Iterator[TrainedPart]:
    """Context in which a network computes as its base."""
    disabled = getattr(network.whole_model, "disable_adapter", nullcontext)
    with disabled():
        yield network


def _write(losses: Tensor, folder: Path) -> None:
    try:
        folder.chmod(0o700)
        files.write_bytes(folder / FILE, losses.numpy().astype("<f8").tobytes())
    except OSError as error:
        raise DataError(f"{folder} cannot be written", found=str(error)) from None


def _share_cached(session: train.Session, folder: Path, count: int) -> Tensor | None:
    """Returns the cache of the first rank on every rank; ``None`` if that rank was lost."""
    content = torch.zeros((count + 1, 2), dtype=torch.float64)

    def read() -> None:
        if session.world.rank or session.comms.joining:
            return
        try:
            values = np.frombuffer(files.read_bytes_limited(folder / FILE), "<f8")
            content[:count] = torch.from_numpy(values.reshape(count, 2).copy())
            content[count] = 1
        except (OSError, ValueError) as error:
            raise DataError(
                f"{folder} holds no reference log-probabilities",
                found=str(error),
                remedy="remove this folder",
            ) from None

    session.together(read)
    shared = _sum(session, content)
    return shared[:count] if shared[count, 0] == 1 else None


def _sum(session: train.Session, values: Tensor) -> Tensor:
    """Returns the sum over all ranks, on the CPU; backends move tensors of their own device."""
    return session.comms.sum(values.to(session.comms.device)).cpu()
