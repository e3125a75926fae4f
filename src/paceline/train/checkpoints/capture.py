"""Taking a training's state at one moment, off the training's back.

Parameters and optimizer states change only when the optimizer steps. So a thread copies them
while the next forward and backward passes run, and the next optimizer step waits for the copy
if it has to. Everything else may change as soon as the script continues (batch statistics in the
forward pass, a moving average whenever it likes) and is copied at once. On an accelerator the
copies are queued on its stream, before everything that comes later.

A script that changes parameters between its steps is found out by torch's version counters: the
copy that it spoiled is given up, and from then on all copies are made at once.
"""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from paceline.train import parallel
from paceline.train.checkpoints.format import (
    FROZEN,
    OPTIMIZER,
    OPTIMIZER_SHARDS,
    RANDOM,
    WEIGHT_SHARDS,
    WEIGHTS,
    Files,
    of_rank,
    pack,
    size_of,
    ties,
)
from paceline.train.comms import Comms
from paceline.train.data.loader import Progress
from paceline.train.elastic.replica_check import ReplicaChecksum
from paceline.train.models import Models

_FORMAT = 1
# What changes with the parameters only: moments of optimizers, averages of weights.
_LATER = re.compile(r"training\.(models\.\w+\.)?(optimizer\.state|average)\.")


class Stateful(Protocol):
    """Something whose state belongs into a checkpoint; all ranks ask it at the same time."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], /) -> object: ...


@dataclass
class Training:
    """What a checkpoint is made of.

    Attributes:
        models: Each with optimizer, schedule, scaler and average.
        progress: Position in the data.
        seed: Of the run.
        extras: Further states by name.
        identity: What must be the same when the run is resumed, by name.
        describes: What is needed to build the model again; JSON values.
        proof: That all ranks hold the same model; ``None`` where there is one rank.
        within: Where in the script it is, and with which data: what must be the same of ranks of
            which one takes the state of the other.
    """

    models: Models
    progress: Progress
    seed: int
    extras: Mapping[str, Stateful] = field(default_factory=dict)
    identity: Mapping[str, str] = field(default_factory=dict)
    describes: Mapping[str, Any] = field(default_factory=dict)
    proof: ReplicaChecksum | None = None
    within: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint is to hold.

    Attributes:
        step: Global steps done.
        tensors: By file and name; still those of the training.
        later: Names of tensors that do not change before the next optimizer step.
        state: Content of ``state.json``, as bytes.
        about: For the manifest; ``best`` where it is the best so far.
        headers: Texts for the headers of files, by file.
    """

    step: int
    tensors: Files
    later: frozenset[str]
    state: bytes
    about: Mapping[str, Any]
    headers: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Size on disk, nearly."""
        return sum(map(size_of, self.tensors.values())) + len(self.state)


def capture(
    training: Training, comms: Comms, *, best: bool = False, in_parts: bool = False
) -> Snapshot:
    """The state as it is, after a proof that it is the same on all ranks.

    Its tensors are still the training's own: :class:`Copier` copies them.

    Args:
        training: What to save.
        comms: All ranks must call this.
        best: It is the best state so far.
        in_parts: Every rank writes the shards that it holds; otherwise rank 0 writes everything.
    """
    if training.proof is not None:
        training.proof.verify()
    rows = comms.rows(generators(comms.device))
    drawn = {RANDOM: {str(rank): row for rank, row in enumerate(rows)}}
    models, done = training.models, training.progress
    extras = {name: one.state_dict() for name, one in training.extras.items()}
    state, rest = described(training, models.state(whole=not in_parts), extras)
    state["ranks"] = comms.world.size
    if in_parts:
        tensors, headers = _shards_to_write(models.module, rest, comms.world.rank)
        if comms.world.rank == 0:  # what is the same on all ranks
            same = {name: one for name, one in rest.items() if not parallel.is_shard(one)}
            tensors = {OPTIMIZER: same, **drawn, **tensors}
    else:
        weights = dict(parallel.whole_state(models.module))
        state["tied"] = ties(weights)
        tensors = {**_split(models.module, weights, state["tied"]), OPTIMIZER: rest, **drawn}
        headers = {}
    parameters = (name for name, _ in models.module.named_parameters())
    moments = filter(_LATER.match, rest)
    about = {"time": time.strftime("%FT%T%z"), "ranks": comms.world.size, "host": comms.world.host}
    return Snapshot(
        done.step,
        tensors,
        frozenset((*parameters, *moments)),
        (json.dumps(state, indent=1) + "\n").encode(),
        {**about, "best": True} if best else about,
        headers,
    )


def _split(module: nn.Module, weights: Mapping[str, Tensor], tied: Mapping[str, str]) -> Files:
    """The weights by file and name: each once, and apart those that are not trained."""
    frozen = {name for name, one in module.named_parameters() if not one.requires_grad}
    once = {name: one for name, one in weights.items() if name not in tied}
    files = {
        WEIGHTS: {name: one for name, one in once.items() if name not in frozen},
        FROZEN: {name: one for name, one in once.items() if name in frozen},
    }
    return files if files[FROZEN] else {WEIGHTS: once}


def described(
    training: Training, models: Mapping[str, Any], extras: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A training's state as JSON, and the tensors that are in it: all but the weights.

    Args:
        training: Whose state.
        models: What :meth:`Models.state` gave.
        extras: States of the training's extras, by name.
    """
    rest: dict[str, Tensor] = {}
    done = training.progress
    state = {
        "format": _FORMAT,
        "progress": {
            "step": done.step,
            "epoch": done.epoch,
            "offset": done.offset,
            "evaluated": done.evaluated,
        },
        "seed": training.seed,
        "identity": dict(training.identity),
        "model": dict(training.describes),
        "training": pack(dict(models), rest, "training"),
        "extras": pack(dict(extras), rest, "extras"),
    }
    return state, rest


def _shards_to_write(
    module: nn.Module, rest: Mapping[str, Tensor], rank: int
) -> tuple[Files, dict[str, dict[str, str]]]:
    """This rank's shards by file and name, and the headers of these files."""
    from paceline.train.checkpoints import shards

    parts = {
        of_rank(WEIGHT_SHARDS, rank): shards.planned(parallel.own_state(module)),
        of_rank(OPTIMIZER_SHARDS, rank): shards.planned(shards_of(rest)),
    }
    held = {name: one for name, one in parts.items() if one.tensors}
    tensors = {name: one.tensors for name, one in held.items()}
    return tensors, {name: one.header() for name, one in held.items()}


def shards_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those that are spread over the ranks."""
    return {name: one for name, one in tensors.items() if parallel.is_shard(one)}


def generators(device: torch.device) -> Tensor:
    """All generators that a training script draws from, uint8, shape ``[n]``.

    The length is the same on all ranks with devices of one kind.
    """
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    numbers = [version, *words, position, has_gauss, gauss is not None]
    parts = [
        np.array(numbers, dtype=np.int64).tobytes(),
        np.array([gauss or 0.0, cached], dtype=np.float64).tobytes(),
        np.asarray(keys, dtype=np.uint32).tobytes(),
        torch.get_rng_state().numpy().tobytes(),
        _device_state(device),
    ]
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)


def set_generators(state: Tensor, device: torch.device) -> None:
    """Puts all generators back."""
    raw = bytes(state.numpy().tobytes())
    words = len(random.getstate()[1])
    numbers = np.frombuffer(raw, np.int64, words + 4)
    offset = numbers.nbytes
    gauss, cached = np.frombuffer(raw, np.float64, 2, offset).tolist()
    keys = np.frombuffer(raw, np.uint32, 624, offset + 16)
    version, *rest = numbers.tolist()
    position, has_gauss, python_gauss = rest[words:]
    random.setstate((version, tuple(rest[:words]), gauss if python_gauss else None))
    np.random.set_state(("MT19937", keys, position, has_gauss, cached))
    start = offset + 16 + keys.nbytes
    end = start + torch.get_rng_state().numel()
    torch.set_rng_state(_tensor(raw[start:end]))
    if device.type != "cpu" and len(raw) > end:  # else it was made on a CPU
        torch.get_device_module(device).set_rng_state(_tensor(raw[end:]), device)


def _device_state(device: torch.device) -> bytes:
    if device.type == "cpu":
        return b""
    return bytes(torch.get_device_module(device).get_rng_state(device).numpy().tobytes())


def _tensor(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


class Torn(Exception):
    """The state changed while it was copied."""


class Copier:
    """Host memory for one copy of the state, used again for every checkpoint."""

    def __init__(self) -> None:
        self._cautious = False
        self._kept: dict[tuple[str, str], Tensor] = {}
        self._copied = threading.Event()
        self._copied.set()

    def wait(self) -> None:
        """Returns when the last copy is complete and the originals may change."""
        self._copied.wait()

    def begin(self, live: Files, later: frozenset[str]) -> Callable[[], Files]:
        """Begins a copy; what is returned ends it, in whichever thread calls it.

        Args:
            live: The state.
            later: Names, in any file, of tensors that do not change before :meth:`wait` returns.
                All others are copied before this method returns.

        Raises:
            Torn: By what is returned: one of these changed all the same.
        """
        late = frozenset[str]() if self._cautious else later
        copied: Files = {file: {} for file in live}
        rest: list[tuple[str, str, Tensor, int]] = []  # with the version that is to be copied
        devices = set()
        for file, tensors in live.items():
            for name, tensor in tensors.items():
                copied[file][name] = self._place(file, name, tensor)
                if tensor.device.type == "cpu" and name in late:
                    rest.append((file, name, tensor, _version(tensor)))
                    continue
                devices.add(tensor.device)
                _copy(tensor, copied[file][name])
        marks = [_mark(device) for device in devices if device.type != "cpu"]
        self._copied.clear()

        def finish() -> Files:
            try:
                for mark in marks:
                    mark.synchronize()
                for file, name, tensor, _ in rest:
                    _copy(tensor, copied[file][name])
                for _, name, tensor, version in rest:
                    if _version(tensor) != version:
                        self._cautious = True
                        raise Torn(
                            f"{name} changed outside session.step while it was copied;"
                            " the next checkpoints are copied at once"
                        )
                return copied
            finally:
                self._copied.set()

        return finish

    def _place(self, file: str, name: str, tensor: Tensor) -> Tensor:
        """Host memory for this tensor."""
        kept = self._kept.get((file, name))
        if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
            pinned = tensor.device.type != "cpu"
            kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            self._kept[file, name] = kept
        return kept


@torch.no_grad()
def _copy(tensor: Tensor, to: Tensor) -> None:
    to.copy_(tensor, non_blocking=True)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _mark(device: torch.device) -> torch.Event:
    """An event after which the accelerator's copies are complete."""
    mark = torch.Event(device.type)
    mark.record()
    return mark
