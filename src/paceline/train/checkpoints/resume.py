"""Resuming: the checkpoint that is wanted, wherever it lies, on every rank, into the training."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from paceline.spec.errors import DataError, JobError, PacelineError, SettingError
from paceline.spec.rundir import SELECTORS
from paceline.spec.schema import (
    MAX_LONG_TEXT,
    dict_of,
    integer,
    list_of,
    optional,
    record,
    regex,
    text,
    tuple_of,
)
from paceline.spec.training.checkpoint_manifest import DamagedCheckpoint
from paceline.train import files, parallel
from paceline.train.checkpoints.capture import Training, set_generator_state, sharded_tensors
from paceline.train.checkpoints.format import (
    OPTIMIZER,
    OPTIMIZER_SHARDS,
    RANDOM,
    STATE,
    WEIGHT_SHARDS,
    WEIGHTS,
    Files,
    all_weights,
    pack,
    read_manifest,
    unpack,
)
from paceline.train.checkpoints.store import Store, StoredCheckpoint
from paceline.train.comms import TENSOR_TYPE, Comms, parse_texts
from paceline.train.data.disks import is_shared_by_all
from paceline.train.device import seed_all

_NO_VERSION = (-1, -1)  # the version of what a rank without an offer has


def _accept_any(value: Any, name: str) -> None:
    """What is looked at elsewhere."""


# what the rank that has the checkpoint tells the others
_HEADER_SCHEMA = record(problem=text(MAX_LONG_TEXT), state=_accept_any, source=text(), host=text())
SHAPES_SCHEMA = dict_of(
    tuple_of(regex(TENSOR_TYPE, "a type"), list_of(integer(), 64)), text(MAX_LONG_TEXT)
)
"""What :func:`tensor_shapes` returns, from another rank."""


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint in memory, the same on every rank.

    Attributes:
        state: Content of ``state.json``.
        tensors: By file and name, on the CPU.
        source: Where it was read, for people.
        shards: The folder from which each rank reads its own shards; ``None`` when ``tensors``
            holds everything.
        is_own: It is this run's; a folder of checkpoints was not named.
    """

    step: int
    state: dict[str, Any]
    tensors: Files
    source: str
    shards: Path | None = None
    is_own: bool = False


def load(
    comms: Comms, selector: str, store: Store, warn: Callable[[str], None], *, sharded: bool = False
) -> LoadedCheckpoint | None:
    """Returns the selected checkpoint on every rank, from whichever rank's disk has it.

    Damaged ones are passed over with a warning.

    Args:
        comms: All ranks must call this.
        selector: See :meth:`Store.select`. ``never`` returns ``None``, and so does ``auto`` if
            there is no checkpoint.
        warn: Called on rank 0 with each thing passed over.
        sharded: Every rank reads its own shards, where all of them see such a checkpoint.

    Raises:
        DataError: There is none, or none that is intact.
    """
    if selector == "never":
        return None
    offers, skipped = store.select(selector)
    reported: set[str] = set()
    _report_problems(comms, skipped, warn, reported)
    while True:
        local_version = offers[0].version if offers else _NO_VERSION
        rows = [tuple(row) for row in comms.rows(torch.tensor(local_version)).tolist()]
        if max(rows) == _NO_VERSION:
            _raise_not_found(selector, store)
            return None
        owner = rows.index(max(rows))  # of equals the lowest rank
        offer = offers[0] if comms.world.rank == owner else None
        loaded, problem = _load_from(comms, owner, offer, sharded)
        if loaded is not None:
            return replace(loaded, is_own=_is_own_selector(selector))
        _report_problems(comms, [problem] if offer else [], warn, reported)
        offers = offers[1:] if offer else offers


def _report_problems(
    comms: Comms, problems: list[str], warn: Callable[[str], None], reported: set[str]
) -> None:
    """Reports every rank's problems once each, on rank 0."""
    texts = comms.texts("\n".join(problems))
    lines = dict.fromkeys(line for text in texts for line in text.split("\n"))
    for line in filter(None, lines):
        if comms.world.rank == 0 and line not in reported:
            warn(line)
        reported.add(line)


def _is_own_selector(selector: str) -> bool:
    """Whether this selects one of the run's own checkpoints, not a folder."""
    return selector in SELECTORS or selector.isdecimal()


def _raise_not_found(selector: str, store: Store) -> None:
    if selector == "auto":
        return
    if _is_own_selector(selector):
        steps = ", ".join(str(checkpoint.step) for checkpoint in store.scan()[0]) or "none"
        raise DataError(
            f"--resume {selector}: no such checkpoint that is intact",
            found=f"in {store.root}: {steps}",
            remedy="--resume latest, a step that is there, or --resume never to begin anew",
        )
    raise SettingError(
        f"--resume {selector}: no checkpoint is there",
        remedy="name the folder of a run or of a checkpoint, a step, latest, best, or never",
    )


def _load_from(
    comms: Comms, owner: int, offer: StoredCheckpoint | None, sharded: bool
) -> tuple[LoadedCheckpoint | None, str]:
    """Reads and checks on one rank; the others receive it from there."""
    shared_folder = _shared_folder(comms, owner, offer) if sharded else None
    problem, source = "", ""
    state: dict[str, Any] = {}
    tensors: Files = {}
    if shared_folder is not None:
        problem = _verify_together(comms, shared_folder)
    if offer is not None and not problem:
        source = str(offer.path)
        try:
            state, tensors = _from_disk(offer, assemble=shared_folder is None)
        except DamagedCheckpoint as damage:
            problem = f"{offer.path}: {damage}"
    message = {"problem": problem, "state": state, "source": source, "host": comms.world.host}
    headers = comms.texts(json.dumps(message) if offer is not None else "")
    header = parse_texts(headers, optional(_HEADER_SCHEMA))[owner]
    if header is None or header["problem"]:
        return None, problem
    try:
        _check_state(header["state"])
    except ValueError as wrong:
        raise JobError(f"rank {owner} sent no state of a training", found=str(wrong)) from None
    state, source = header["state"], f"{header['source']} on {header['host']}"
    tensors = _share_tensors(comms, owner, tensors)
    step = state["progress"]["step"]
    return LoadedCheckpoint(step, state, tensors, source, shared_folder), ""


def _shared_folder(comms: Comms, owner: int, offer: StoredCheckpoint | None) -> Path | None:
    """Returns the owner's checkpoint if it has shards and all ranks see it."""
    local_path = str(offer.path.resolve()) if offer is not None and _has_shards(offer) else ""
    path = comms.texts(local_path)[owner]
    if not path or not is_shared_by_all(comms, Path(path).parent, owner):
        return None
    return Path(path)


def _has_shards(checkpoint: StoredCheckpoint) -> bool:
    return any(name.startswith(WEIGHT_SHARDS + "/") for name in checkpoint.manifest.files)


def _verify_together(comms: Comms, path: Path) -> str:
    """Returns what is wrong with the files; each rank checks some of them."""
    problem = ""
    try:
        read_manifest(path).verify(path, (comms.world.rank, comms.world.size))
    except DamagedCheckpoint as damage:
        problem = f"{path}: {damage}"
    return next(filter(None, comms.texts(problem)), "")


def _from_disk(checkpoint: StoredCheckpoint, *, assemble: bool) -> tuple[dict[str, Any], Files]:
    """Returns a checkpoint's content; ``assemble`` verifies it first and joins shards."""
    if assemble:
        checkpoint.manifest.verify(checkpoint.path)
    try:
        state = _check_state(json.loads(files.read_bytes_limited(checkpoint.path / STATE)))
        tensors = {
            name: load_file(checkpoint.path / name)
            for name in checkpoint.manifest.files
            if name.endswith(".safetensors") and "/" not in name
        }
        if assemble and _has_shards(checkpoint):
            from paceline.train.checkpoints import shards

            tensors[WEIGHTS] = shards.read_all(checkpoint.path / WEIGHT_SHARDS)
            tensors[OPTIMIZER] |= shards.read_all(checkpoint.path / OPTIMIZER_SHARDS)
        return state, tensors
    except (OSError, ValueError, RuntimeError, LookupError, TypeError, SafetensorError) as error:
        raise DamagedCheckpoint(
            f"cannot be read: {str(error)[:300] or type(error).__name__}"
        ) from None


_FIELDS: dict[str, type] = {
    "progress": dict,
    "ranks": int,
    "identity": dict,
    "training": dict,
    "extras": dict,
}


_ADDED_POSITIONS = ("evaluated", "global_batch", "order_batch", "samples")
"""Fields of ``progress`` that checkpoints of earlier versions lack."""


def _check_state(state: Any) -> dict[str, Any]:
    """Returns the content of ``state.json``. ValueError if it is invalid."""
    if not isinstance(state, dict):
        raise ValueError(f"{STATE} holds no state")
    for name, kind in _FIELDS.items():
        if type(state.get(name)) is not kind:
            raise ValueError(f"{STATE} says nothing usable of {name}")
    tied = state.get("tied", {})  # checkpoints of earlier versions hold each name
    if type(tied) is not dict or not all(isinstance(source, str) for source in tied.values()):
        raise ValueError(f"{STATE} says nothing usable of tied weights")
    for name in ("step", "epoch", "offset", *_ADDED_POSITIONS):
        value = state["progress"].get(name, 0 if name in _ADDED_POSITIONS else None)
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise ValueError(f"{STATE}: {name} is not a position in the data")
    return state


def tensor_shapes(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Returns type and shape of each tensor, by name, as JSON values."""
    return {
        name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        for name, tensor in tensors.items()
    }


def _share_tensors(comms: Comms, owner: int, tensors: Files) -> Files:
    """Gives every rank the owner's tensors: shapes as text, then all content."""
    if comms.is_alone:
        return tensors
    shapes = {file: tensor_shapes(content) for file, content in tensors.items()}
    header = parse_texts(comms.texts(json.dumps(shapes)), dict_of(SHAPES_SCHEMA))[owner]
    if comms.world.rank != owner:
        tensors = {
            file: {
                name: torch.empty(shape, dtype=getattr(torch, dtype))
                for name, (dtype, shape) in content.items()
            }
            for file, content in header.items()
        }
    comms.broadcast([tensor for content in tensors.values() for tensor in content.values()], owner)
    return tensors


def check_identity(loaded: LoadedCheckpoint, identity: Mapping[str, str]) -> None:
    """Raises SettingError, with all that differs, if the checkpoint is of another training."""
    recorded: dict[str, object] = loaded.state["identity"]
    differing = {
        name: f"{name}: {recorded[name]!s:.200} then, {value} now"
        for name, value in identity.items()
        if name in recorded and recorded[name] != value
    }
    if "chat_template" in differing:
        differing.pop("data", None)  # the hash of tokens, which follow from the template
    if differing:
        raise SettingError(
            f"the checkpoint {loaded.source} is of another training",
            found="\n".join(differing.values()),
            remedy="a --run-dir of its own for this one, --resume never, or the former settings",
        )


def restore(loaded: LoadedCheckpoint, training: Training, comms: Comms) -> None:
    """Restores a training from a checkpoint, at any world size; DataError if it does not fit."""
    try:
        _restore(loaded, training, comms)
    except PacelineError:
        raise
    except Exception as error:  # modules and optimizers raise what they like
        raise DataError(
            f"the checkpoint {loaded.source} does not fit this training",
            found=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            remedy="the former model, optimizer, schedule and extras, or --resume never to begin"
            " anew",
        ) from error


def _restore(loaded: LoadedCheckpoint, training: Training, comms: Comms) -> None:
    state, state_tensors, models = loaded.state, loaded.tensors[OPTIMIZER], training.models
    if loaded.shards is None:
        weights = all_weights(loaded.tensors, state.get("tied", {}))
        parallel.load_full_state(models.module, weights)
        models.load_state(unpack(state["training"], state_tensors))
    else:  # each rank reads what it is to hold, whoever has written it
        from paceline.train.checkpoints import shards

        shards.read_into(loaded.shards / WEIGHT_SHARDS, parallel.local_state(models.module))
        current: dict[str, Tensor] = {}
        pack(models.state(assemble=False), current, "training")
        # there may be averages that are not wanted now, and others that were not wanted then
        saved = models.select_known(state["training"])
        saved_text = json.dumps(saved)
        local_shards = {
            name: tensor
            for name, tensor in sharded_tensors(current).items()
            if json.dumps(name) in saved_text
        }
        shards.read_into(loaded.shards / OPTIMIZER_SHARDS, local_shards)
        models.load_state(unpack(saved, {**state_tensors, **local_shards}), assemble=False)
    for name, saved in unpack(state["extras"], state_tensors).items():
        if name in training.extras:
            training.extras[name].load_state_dict(saved)
    for updater in models:
        updater.apply_constructed(training.extras.values())
    set_position(training, state)
    if state["ranks"] == comms.world.size:
        set_generator_state(loaded.tensors[RANDOM][str(comms.world.rank)], comms.device)
    else:  # other ranks have no state to resume from: new ones, but always the same
        seed_all(training.seed * 1_000_003 + loaded.step * 4_001 + comms.world.rank)


def set_position(training: Training, state: Mapping[str, Any]) -> None:
    """Sets a training's position in the data from a state."""
    position, progress = state["progress"], training.progress
    progress.step, progress.epoch = position["step"], position["epoch"]
    progress.offset = position["offset"]
    progress.evaluated = position.get("evaluated", progress.step)
    progress.global_batch = position.get("global_batch", 0)
    progress.order_batch = position.get("order_batch", progress.global_batch)
    progress.samples = position.get("samples", 0)
