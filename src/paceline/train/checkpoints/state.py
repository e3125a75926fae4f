"""What a checkpoint is made of: from a training to files' contents, and back."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from paceline.spec.errors import DataError, PacelineError, SettingError
from paceline.train import wrapping
from paceline.train.checkpoints import names, randomness
from paceline.train.checkpoints.exchange import Loaded
from paceline.train.checkpoints.pack import pack, unpack
from paceline.train.checkpoints.writer import Snapshot
from paceline.train.comms import Comms
from paceline.train.loader import Progress
from paceline.train.seeding import seed_all
from paceline.train.update import Updater

_FORMAT = 1


class Stateful(Protocol):
    """Something whose state belongs into a checkpoint."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], /) -> object: ...


@dataclass
class Training:
    """What a checkpoint is made of.

    Attributes:
        updater: Module, optimizer, schedule and scaler.
        progress: Position in the data.
        seed: Of the run.
        extras: Further states by name.
        identity: What must be the same when the run is resumed, by name.
        describes: What is needed to build the model again; JSON values.
    """

    updater: Updater
    progress: Progress
    seed: int
    extras: Mapping[str, Stateful] = field(default_factory=dict)
    identity: Mapping[str, str] = field(default_factory=dict)
    describes: Mapping[str, Any] = field(default_factory=dict)


def check_identity(loaded: Loaded, identity: Mapping[str, str]) -> None:
    """Refuses to go on with another training than the checkpoint's.

    Raises:
        SettingError: Names everything that differs.
    """
    recorded: dict[str, object] = loaded.state["identity"]
    differing = [
        f"{name}: {recorded[name]!s:.200} then, {value} now"
        for name, value in identity.items()
        if name in recorded and recorded[name] != value
    ]
    if differing:
        raise SettingError(
            f"the checkpoint {loaded.source} is of another training",
            found="\n".join(differing),
            remedy="a --run-dir of its own for this one, --resume never, or the former settings",
        )


def capture(
    training: Training, comms: Comms, generators: Tensor, best: bool, in_parts: bool = False
) -> Snapshot:
    """The state as it is; tensors are still the training's own.

    Args:
        training: What to keep.
        comms: All ranks must call this.
        generators: Every rank's random generators, by row.
        best: It is the best state so far.
        in_parts: Every rank keeps the shards that it holds; otherwise rank 0 keeps everything.
    """
    module, rest = training.updater.module, dict[str, Tensor]()
    state = _described(training, comms, rest, whole=not in_parts)
    snapshot = Snapshot(
        training.progress.step,
        {names.RANDOM: {str(rank): row for rank, row in enumerate(generators)}},
        _changed_by_steps_only(module, rest),
        (json.dumps(state, indent=1) + "\n").encode(),
        {"time": time.strftime("%FT%T%z"), "ranks": comms.world.size, "host": comms.world.host},
        best,
    )
    if in_parts:
        return _with_shards(snapshot, wrapping.own_state(module), rest, comms.world.rank)
    weights = dict(wrapping.whole_state(module))
    tensors = {names.WEIGHTS: weights, names.OPTIMIZER: rest, **snapshot.tensors}
    return replace(snapshot, tensors=tensors)


def _changed_by_steps_only(module: nn.Module, rest: Mapping[str, Tensor]) -> frozenset[str]:
    """Names of what may be copied late: parameters, and what the optimizer keeps of them."""
    kept = (name for name in rest if name.startswith("training.optimizer.state."))
    return frozenset((*(name for name, _ in module.named_parameters()), *kept))


def _described(
    training: Training, comms: Comms, rest: dict[str, Tensor], *, whole: bool
) -> dict[str, Any]:
    """Everything but the weights as JSON; tensors go to ``rest``."""
    done = training.progress
    return {
        "format": _FORMAT,
        "progress": {"step": done.step, "epoch": done.epoch, "offset": done.offset},
        "ranks": comms.world.size,
        "seed": training.seed,
        "identity": dict(training.identity),
        "model": dict(training.describes),
        "training": pack(training.updater.state(whole=whole), rest, "training"),
        "extras": pack({k: v.state_dict() for k, v in training.extras.items()}, rest, "extras"),
    }


def _with_shards(
    snapshot: Snapshot, weights: dict[str, Tensor], rest: dict[str, Tensor], rank: int
) -> Snapshot:
    """What this rank writes: its shards, and on rank 0 what is the same everywhere."""
    from paceline.train.checkpoints import sharding

    parts = {
        names.WEIGHT_SHARDS: sharding.planned(weights),
        names.OPTIMIZER_SHARDS: sharding.planned(_shards(rest)),
    }
    held = {names.of_rank(name, rank): one for name, one in parts.items() if one.tensors}
    common = {names.OPTIMIZER: _without_shards(rest), **snapshot.tensors} if rank == 0 else {}
    tensors = {**common, **{name: one.tensors for name, one in held.items()}}
    headers = {name: one.header() for name, one in held.items()}
    return replace(snapshot, tensors=tensors, headers=headers)


def _shards(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: one for name, one in tensors.items() if wrapping.is_shard(one)}


def _without_shards(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: one for name, one in tensors.items() if not wrapping.is_shard(one)}


def restore(loaded: Loaded, training: Training, comms: Comms) -> None:
    """Puts a training into a checkpoint's state, at whatever world size.

    Raises:
        DataError: It is the state of something else.
    """
    try:
        _restore(loaded, training, comms)
    except PacelineError:
        raise
    except Exception as error:  # modules and optimizers raise what they like
        raise DataError(
            f"the checkpoint {loaded.source} does not fit this training",
            found=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            remedy="the former model, optimizer and extras, or --resume never to begin anew",
        ) from error


def _restore(loaded: Loaded, training: Training, comms: Comms) -> None:
    state, rest = loaded.state, loaded.tensors[names.OPTIMIZER]
    if loaded.shards is None:
        wrapping.load_whole_state(training.updater.module, loaded.tensors[names.WEIGHTS])
        training.updater.load_state(unpack(state["training"], rest))
    else:
        _restore_shards(loaded.shards, training.updater, state["training"], rest)
    for name, kept in unpack(state["extras"], rest).items():
        if name in training.extras:
            training.extras[name].load_state_dict(kept)
    done = state["progress"]
    progress = training.progress
    progress.step, progress.epoch, progress.offset = done["step"], done["epoch"], done["offset"]
    _restore_generators(loaded, training, comms)


def _restore_shards(
    folder: Path, updater: Updater, described: dict[str, Any], rest: dict[str, Tensor]
) -> None:
    """Each rank reads what it is to hold, whoever has written it."""
    from paceline.train.checkpoints import sharding

    sharding.fill(folder / names.WEIGHT_SHARDS, wrapping.own_state(updater.module))
    fresh: dict[str, Tensor] = {}
    pack(updater.state(whole=False), fresh, "training")
    shards = _shards(fresh)
    sharding.fill(folder / names.OPTIMIZER_SHARDS, shards)
    updater.load_state(unpack(described, {**rest, **shards}), whole=False)


def _restore_generators(loaded: Loaded, training: Training, comms: Comms) -> None:
    rank = comms.world.rank
    if loaded.state["ranks"] == comms.world.size:
        randomness.restore(loaded.tensors[names.RANDOM][str(rank)], comms.device)
    else:  # other ranks have no state to resume from: new ones, but always the same
        seed_all(training.seed * 1_000_003 + loaded.step * 4_001 + rank)
