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
from paceline.train import files, parallel
from paceline.train.checkpoints.capture import Training, set_generators, shards_of
from paceline.train.checkpoints.format import (
    OPTIMIZER,
    OPTIMIZER_SHARDS,
    RANDOM,
    STATE,
    WEIGHT_SHARDS,
    WEIGHTS,
    Damaged,
    Files,
    pack,
    read_manifest,
    unpack,
    whole_weights,
)
from paceline.train.checkpoints.store import WANTS, Found, Store
from paceline.train.comms import TENSOR_TYPE, Comms, checked
from paceline.train.data.disks import folder_of_all
from paceline.train.device import seed_all

_NOTHING = (-1, -1)  # the version of what a rank without an offer has


def _any(value: Any, where: str) -> None:
    """What is looked at elsewhere."""


# what the rank that has the checkpoint tells the others
_HEAD = record(problem=text(MAX_LONG_TEXT), state=_any, source=text(), host=text())
_TENSOR = tuple_of(regex(TENSOR_TYPE, "a type"), list_of(integer(), 64))
_SHAPES = dict_of(dict_of(_TENSOR, text(MAX_LONG_TEXT)))


@dataclass(frozen=True)
class Loaded:
    """A checkpoint in memory, the same on every rank.

    Attributes:
        step: Global steps done.
        state: Content of ``state.json``.
        tensors: By file and name, on the CPU.
        source: Where it was read, for people.
        shards: The folder from which each rank reads its own shards; ``None`` when ``tensors``
            holds everything.
        own: It is this run's; a folder of checkpoints was not named.
    """

    step: int
    state: dict[str, Any]
    tensors: Files
    source: str
    shards: Path | None = None
    own: bool = False


def load(
    comms: Comms, want: str, store: Store, warn: Callable[[str], None], *, sharded: bool = False
) -> Loaded | None:
    """The wanted checkpoint on every rank, from whichever rank's disk has it.

    Damaged ones are passed over with a warning.

    Args:
        comms: All ranks must call this.
        want: See :meth:`Store.wanted`.
        store: This run's checkpoints.
        warn: Called on rank 0 with each thing passed over.
        sharded: Every rank reads its own shards, where all of them see such a checkpoint.

    Returns:
        ``None`` when there is none and ``want`` is ``auto``, or ``want`` is ``never``.

    Raises:
        DataError: There is none, or none that is intact.
    """
    if want == "never":
        return None
    offers, bad = store.wanted(want)
    told: set[str] = set()
    _tell(comms, bad, warn, told)
    while True:
        mine = offers[0].version if offers else _NOTHING
        rows = [tuple(row) for row in comms.rows(torch.tensor(mine)).tolist()]
        if max(rows) == _NOTHING:
            _refuse(want, store)
            return None
        owner = rows.index(max(rows))  # of equals the lowest rank
        offer = offers[0] if comms.world.rank == owner else None
        loaded, problem = _read(comms, owner, offer, sharded)
        if loaded is not None:
            return replace(loaded, own=_names_own(want))
        _tell(comms, [problem] if offer else [], warn, told)
        offers = offers[1:] if offer else offers


def _tell(comms: Comms, problems: list[str], warn: Callable[[str], None], told: set[str]) -> None:
    """Every rank's problems once each, by rank 0; on one disk all ranks find the same."""
    texts = comms.texts("\n".join(problems))
    lines = dict.fromkeys(line for text in texts for line in text.split("\n"))
    for line in filter(None, lines):
        if comms.world.rank == 0 and line not in told:
            warn(line)
        told.add(line)


def _names_own(want: str) -> bool:
    """Whether this is one of the run's own checkpoints, and no folder."""
    return want in WANTS or want.isdecimal()


def _refuse(want: str, store: Store) -> None:
    if want == "auto":
        return
    if _names_own(want):
        steps = ", ".join(str(one.step) for one in store.found()[0]) or "none"
        raise DataError(
            f"--resume {want}: no such checkpoint that is intact",
            found=f"in {store.root}: {steps}",
            remedy="--resume latest, a step that is there, or --resume never to begin anew",
        )
    raise SettingError(
        f"--resume {want}: no checkpoint is there",
        remedy="name the folder of a run or of a checkpoint, a step, latest, best, or never",
    )


def _read(
    comms: Comms, owner: int, offer: Found | None, sharded: bool
) -> tuple[Loaded | None, str]:
    """One rank reads and checks; the others get it from that rank."""
    seen = _seen_by_all(comms, owner, offer) if sharded else None
    problem, source = "", ""
    state: dict[str, Any] = {}
    tensors: Files = {}
    if seen is not None:
        problem = _look_together(comms, seen)
    if offer is not None and not problem:
        source = str(offer.path)
        try:
            state, tensors = _from_disk(offer, whole=seen is None)
        except Damaged as damage:
            problem = f"{offer.path}: {damage}"
    said = {"problem": problem, "state": state, "source": source, "host": comms.world.host}
    heads = comms.texts(json.dumps(said) if offer is not None else "")
    head = checked(heads, optional(_HEAD))[owner]
    if head is None or head["problem"]:
        return None, problem
    try:
        _checked(head["state"])
    except ValueError as wrong:
        raise JobError(f"rank {owner} sent no state of a training", found=str(wrong)) from None
    shared = _share(comms, owner, tensors)
    where = f"{head['source']} on {head['host']}"
    return Loaded(head["state"]["progress"]["step"], head["state"], shared, where, seen), ""


def _seen_by_all(comms: Comms, owner: int, offer: Found | None) -> Path | None:
    """The owner's checkpoint where it is made of shards and lies on a disk of all ranks."""
    mine = str(offer.path.resolve()) if offer is not None and _has_shards(offer) else ""
    there = comms.texts(mine)[owner]
    if not there or not folder_of_all(comms, Path(there).parent, owner):
        return None
    return Path(there)


def _has_shards(found: Found) -> bool:
    return any(name.startswith(WEIGHT_SHARDS + "/") for name in found.manifest.files)


def _look_together(comms: Comms, path: Path) -> str:
    """What is wrong with the checkpoint's files; each rank looks at some of them."""
    problem = ""
    try:
        read_manifest(path).verify(path, (comms.world.rank, comms.world.size))
    except Damaged as damage:
        problem = f"{path}: {damage}"
    return next(filter(None, comms.texts(problem)), "")


def _from_disk(found: Found, *, whole: bool) -> tuple[dict[str, Any], Files]:
    """A checkpoint's content; ``whole`` checks it first and puts shards together."""
    if whole:
        found.manifest.verify(found.path)
    try:
        state = _checked(json.loads(files.read_small(found.path / STATE)))
        tensors = {
            name: load_file(found.path / name)
            for name in found.manifest.files
            if name.endswith(".safetensors") and "/" not in name
        }
        if whole and _has_shards(found):
            from paceline.train.checkpoints import shards

            tensors[WEIGHTS] = shards.whole(found.path / WEIGHT_SHARDS)
            tensors[OPTIMIZER] |= shards.whole(found.path / OPTIMIZER_SHARDS)
        return state, tensors
    except (OSError, ValueError, RuntimeError, LookupError, TypeError, SafetensorError) as error:
        raise Damaged(f"cannot be read: {str(error)[:300] or type(error).__name__}") from None


_FIELDS: dict[str, type] = {
    "progress": dict,
    "ranks": int,
    "identity": dict,
    "training": dict,
    "extras": dict,
}


def _checked(state: Any) -> dict[str, Any]:
    """The content of ``state.json``; ValueError when it is none."""
    if not isinstance(state, dict):
        raise ValueError(f"{STATE} holds no state")
    for name, kind in _FIELDS.items():
        if type(state.get(name)) is not kind:
            raise ValueError(f"{STATE} says nothing usable of {name}")
    tied = state.get("tied", {})  # checkpoints of earlier versions hold each name
    if type(tied) is not dict or not all(isinstance(other, str) for other in tied.values()):
        raise ValueError(f"{STATE} says nothing usable of tied weights")
    for name in ("step", "epoch", "offset", "evaluated"):
        value = state["progress"].get(name, 0 if name == "evaluated" else None)
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise ValueError(f"{STATE}: {name} is no position in the data")
    return state


def _share(comms: Comms, owner: int, tensors: Files) -> Files:
    """The owner's tensors on every rank: shapes as text, then all content together."""
    if comms.alone:
        return tensors
    shapes = {
        file: {
            name: [str(one.dtype).removeprefix("torch."), list(one.shape)]
            for name, one in content.items()
        }
        for file, content in tensors.items()
    }
    head = checked(comms.texts(json.dumps(shapes)), _SHAPES)[owner]
    if comms.world.rank != owner:
        tensors = {
            file: {
                name: torch.empty(shape, dtype=getattr(torch, dtype))
                for name, (dtype, shape) in content.items()
            }
            for file, content in head.items()
        }
    comms.spread([one for content in tensors.values() for one in content.values()], owner)
    return tensors


def check_identity(loaded: Loaded, identity: Mapping[str, str]) -> None:
    """Refuses to resume another training than the checkpoint's.

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
    state, rest, models = loaded.state, loaded.tensors[OPTIMIZER], training.models
    if loaded.shards is None:
        weights = whole_weights(loaded.tensors, state.get("tied", {}))
        parallel.load_whole_state(models.module, weights)
        models.load_state(unpack(state["training"], rest))
    else:  # each rank reads what it is to hold, whoever has written it
        from paceline.train.checkpoints import shards

        shards.fill(loaded.shards / WEIGHT_SHARDS, parallel.own_state(models.module))
        fresh: dict[str, Tensor] = {}
        pack(models.state(whole=False), fresh, "training")
        kept = models.known(state["training"])  # there may be averages that are not wanted now
        said = json.dumps(kept)  # and others that were not wanted then
        mine = {name: one for name, one in shards_of(fresh).items() if json.dumps(name) in said}
        shards.fill(loaded.shards / OPTIMIZER_SHARDS, mine)
        models.load_state(unpack(kept, {**rest, **mine}), whole=False)
    for name, kept in unpack(state["extras"], rest).items():
        if name in training.extras:
            training.extras[name].load_state_dict(kept)
    stand(training, state)
    if state["ranks"] == comms.world.size:
        set_generators(loaded.tensors[RANDOM][str(comms.world.rank)], comms.device)
    else:  # other ranks have no state to resume from: new ones, but always the same
        seed_all(training.seed * 1_000_003 + loaded.step * 4_001 + comms.world.rank)


def stand(training: Training, state: Mapping[str, Any]) -> None:
    """Puts a training at the position in the data that a state has."""
    done, progress = state["progress"], training.progress
    progress.step, progress.epoch, progress.offset = done["step"], done["epoch"], done["offset"]
    progress.evaluated = done.get("evaluated", progress.step)
