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

import copy
import json
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
    find_tied_weights,
    pack,
    shard_file,
    tensor_bytes,
)
from paceline.train.comms import Comms
from paceline.train.data.loader import Progress
from paceline.train.elastic.committed import apply_settings, optimizer_settings
from paceline.train.elastic.replica_check import ReplicaChecksum
from paceline.train.models import Models

_FORMAT = 1
# What changes with the parameters only: moments of optimizers, averages of weights.
_CHANGED_BY_OPTIMIZER = re.compile(r"training\.(models\.\w+\.)?(optimizer\.state|average)\.")


class Stateful(Protocol):
    """Something whose state belongs into a checkpoint; all ranks ask it at the same time."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], /) -> object: ...


@dataclass
class Training:
    """The parts of a checkpoint.

    Attributes:
        models: Each with optimizer, schedule, scaler and average.
        extras: Further states by name.
        identity: What must be the same when the run is resumed, by name.
        model_config: What is needed to build the model again; JSON values.
        checksum: That all ranks hold the same model; ``None`` where there is one rank.
        context: Where in the script it is, and with which data: what must be the same of ranks of
            which one takes the state of the other.
    """

    models: Models
    progress: Progress
    seed: int
    extras: Mapping[str, Stateful] = field(default_factory=dict)
    identity: Mapping[str, str] = field(default_factory=dict)
    model_config: Mapping[str, Any] = field(default_factory=dict)
    checksum: ReplicaChecksum | None = None
    context: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Snapshot:
    """Content of a checkpoint.

    Attributes:
        tensors: By file and name; still those of the training.
        deferred: Names of tensors that do not change before the next optimizer step.
        state: Content of ``state.json``, as bytes.
        info: For the manifest; ``best`` where it is the best so far.
        headers: Texts for the headers of files, by file.
    """

    step: int
    tensors: Files
    deferred: frozenset[str]
    state: bytes
    info: Mapping[str, Any]
    headers: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Approximate size on disk."""
        return sum(map(tensor_bytes, self.tensors.values())) + len(self.state)


class PauseState:
    """What the script's own code may change in a pause between steps, as it was at the beginning.

    A run that resumes from a checkpoint of a pause repeats the pause from its beginning, with what
    comes before the evaluation: ``schedule.step()``, for example.

    Attributes:
        extras: States of the training's extras, by name; tensors in them are still theirs.
    """

    def __init__(self, training: Training) -> None:
        self._models = training.models
        self._settings = [optimizer_settings(updater) for updater in self._models]
        self.extras = {name: _copied(part.state_dict()) for name, part in training.extras.items()}

    @contextmanager
    def restored_settings(self) -> Iterator[None]:
        """Context in which the optimizers have the settings of the pause's beginning."""
        present = [optimizer_settings(updater) for updater in self._models]
        apply_settings(self._models, self._settings)
        try:
            yield
        finally:
            apply_settings(self._models, present)


def _copied(state: Any) -> Any:
    """Copies a state, except its tensors."""
    if isinstance(state, Tensor):
        return state
    if type(state) is dict:
        return {key: _copied(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(map(_copied, state))
    return copy.deepcopy(state)


def capture(
    training: Training, comms: Comms, *, is_best: bool = False, in_parts: bool = False,
    extras: Mapping[str, Any] | None = None,
) -> Snapshot:  # fmt: skip
    """Returns the current state, after checking that all ranks have the same.

    Its tensors are still the training's own: :class:`Copier` copies them.

    Args:
        comms: All ranks must call this.
        in_parts: Every rank writes the shards that it holds; otherwise rank 0 writes everything.
        extras: States of the training's extras, if not the current ones.
    """
    if training.checksum is not None:
        training.checksum.verify()
    states = comms.rows(generator_state(comms.device))
    random_state = {RANDOM: {str(rank): row for rank, row in enumerate(states)}}
    models, progress = training.models, training.progress
    if extras is None:
        extras = {name: extra.state_dict() for name, extra in training.extras.items()}
    state, tensors_of_state = describe_state(training, models.state(assemble=not in_parts), extras)
    state["ranks"] = comms.world.size
    if in_parts:
        tensors, headers = _local_shards(models.module, tensors_of_state, comms.world.rank)
        if comms.world.rank == 0:  # what is the same on all ranks
            shards = sharded_tensors(tensors_of_state)
            replicated = {n: t for n, t in tensors_of_state.items() if n not in shards}
            tensors = {OPTIMIZER: replicated, **random_state, **tensors}
    else:
        weights = dict(parallel.full_state(models.module))
        state["tied"] = find_tied_weights(weights)
        tensors = {
            **_split_frozen(models.module, weights, state["tied"]),
            OPTIMIZER: tensors_of_state,
            **random_state,
        }
        headers = {}
    parameters = (name for name, _ in models.module.named_parameters())
    moments = filter(_CHANGED_BY_OPTIMIZER.match, tensors_of_state)
    info = {"time": time.strftime("%FT%T%z"), "ranks": comms.world.size, "host": comms.world.host}
    return Snapshot(
        progress.step,
        tensors,
        frozenset((*parameters, *moments)),
        (json.dumps(state, indent=1) + "\n").encode(),
        {**info, "best": True} if is_best else info,
        headers,
    )


def _split_frozen(
    module: nn.Module, weights: Mapping[str, Tensor], tied: Mapping[str, str]
) -> Files:
    """Splits weights by file: each once, frozen ones apart."""
    frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    unique = {name: tensor for name, tensor in weights.items() if name not in tied}
    files = {
        WEIGHTS: {name: tensor for name, tensor in unique.items() if name not in frozen},
        FROZEN: {name: tensor for name, tensor in unique.items() if name in frozen},
    }
    return files if files[FROZEN] else {WEIGHTS: unique}


def describe_state(
    training: Training, models: Mapping[str, Any], extras: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns a training's state as JSON, and its tensors except the weights.

    ``models`` is what :meth:`Models.state` gave, ``extras`` the states of the training's extras.
    """
    tensors: dict[str, Tensor] = {}
    progress = training.progress
    state = {
        "format": _FORMAT,
        "progress": {
            "step": progress.step,
            "epoch": progress.epoch,
            "offset": progress.offset,
            "evaluated": progress.evaluated,
            "global_batch": progress.global_batch,
            "order_batch": progress.order_batch,
            "samples": progress.samples,
        },
        "seed": training.seed,
        "identity": dict(training.identity),
        "model": dict(training.model_config),
        "training": pack(dict(models), tensors, "training"),
        "extras": pack(dict(extras), tensors, "extras"),
    }
    return state, tensors


def _local_shards(
    module: nn.Module, state_tensors: Mapping[str, Tensor], rank: int
) -> tuple[Files, dict[str, dict[str, str]]]:
    """Returns this rank's shards by file and name, and the headers of these files."""
    from paceline.train.checkpoints import shards

    parts = {
        shard_file(WEIGHT_SHARDS, rank): shards.plan_shards(parallel.local_state(module)),
        shard_file(OPTIMIZER_SHARDS, rank): shards.plan_shards(sharded_tensors(state_tensors)),
    }
    nonempty = {name: part for name, part in parts.items() if part.tensors}
    tensors = {name: part.tensors for name, part in nonempty.items()}
    return tensors, {name: part.header() for name, part in nonempty.items()}


def sharded_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors that are spread over the ranks."""
    return {name: tensor for name, tensor in tensors.items() if parallel.is_shard(tensor)}


def generator_state(device: torch.device) -> Tensor:
    """Returns the state of all generators that a script uses, uint8, shape ``[n]``.

    The length is the same on all ranks with devices of one kind.
    """
    version, python_words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    numbers = [version, *python_words, position, has_gauss, gauss is not None]
    parts = [
        np.array(numbers, dtype=np.int64).tobytes(),
        np.array([gauss or 0.0, cached], dtype=np.float64).tobytes(),
        np.asarray(keys, dtype=np.uint32).tobytes(),
        torch.get_rng_state().numpy().tobytes(),
    ]
    if device.type != "cpu":
        parts.append(torch.get_device_module(device).get_rng_state(device).numpy().tobytes())
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)


def set_generator_state(state: Tensor, device: torch.device) -> None:
    """Restores all generators."""
    raw = bytes(state.numpy().tobytes())
    num_words = len(random.getstate()[1])
    numbers = np.frombuffer(raw, np.int64, num_words + 4)
    offset = numbers.nbytes
    gauss, cached = np.frombuffer(raw, np.float64, 2, offset).tolist()
    keys = np.frombuffer(raw, np.uint32, 624, offset + 16)
    version, *values = numbers.tolist()
    position, has_gauss, python_gauss = values[num_words:]
    random.setstate((version, tuple(values[:num_words]), gauss if python_gauss else None))
    np.random.set_state(("MT19937", keys, position, has_gauss, cached))
    start = offset + 16 + keys.nbytes
    end = start + torch.get_rng_state().numel()
    torch.set_rng_state(_tensor(raw[start:end]))
    if device.type != "cpu" and len(raw) > end:  # else it was made on a CPU
        torch.get_device_module(device).set_rng_state(_tensor(raw[end:]), device)


def _tensor(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


class TornSnapshot(Exception):
    """The state changed while it was copied."""


class Copier:
    """Host memory for one copy of the state, used again for every checkpoint."""

    def __init__(self) -> None:
        self._copies_at_once = False
        self._buffers: dict[tuple[str, str], Tensor] = {}
        self._copied = threading.Event()
        self._copied.set()

    def wait(self) -> None:
        """Waits until the last copy is complete and the originals may change."""
        self._copied.wait()

    def start(self, live: Files, deferred: frozenset[str]) -> Callable[[], Files]:
        """Starts a copy; the returned function finishes it in any thread.

        Args:
            deferred: Names, in any file, of tensors that do not change before :meth:`wait` returns.
                All others are copied before this method returns.

        Raises:
            TornSnapshot: By the returned function: a deferred tensor changed before it was copied.
        """
        deferrable = frozenset[str]() if self._copies_at_once else deferred
        copied: Files = {file: {} for file in live}
        pending: list[tuple[str, str, Tensor, int]] = []  # with the version that is to be copied
        devices = set()
        for file, tensors in live.items():
            for name, tensor in tensors.items():
                copied[file][name] = self._buffer(file, name, tensor)
                if tensor.device.type == "cpu" and name in deferrable:
                    pending.append((file, name, tensor, _version(tensor)))
                    continue
                devices.add(tensor.device)
                _copy(tensor, copied[file][name])
        marks = [torch.Event(device.type) for device in devices if device.type != "cpu"]
        for mark in marks:  # reached when the accelerator's copies are complete
            mark.record()
        self._copied.clear()

        def finish() -> Files:
            try:
                for mark in marks:
                    mark.synchronize()
                for file, name, tensor, _ in pending:
                    _copy(tensor, copied[file][name])
                for _, name, tensor, version in pending:
                    if _version(tensor) != version:
                        self._copies_at_once = True
                        raise TornSnapshot(
                            f"{name} changed outside session.step while it was copied, so this"
                            " checkpoint is dropped; the next ones are copied before session.step"
                            " returns"
                        )
                return copied
            finally:
                self._copied.set()

        return finish

    def _buffer(self, file: str, name: str, tensor: Tensor) -> Tensor:
        """Returns host memory for this tensor."""
        buffer = self._buffers.get((file, name))
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            pinned = tensor.device.type != "cpu"
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            self._buffers[file, name] = buffer
        return buffer


@torch.no_grad()
def _copy(tensor: Tensor, to: Tensor) -> None:
    to.copy_(tensor, non_blocking=True)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
