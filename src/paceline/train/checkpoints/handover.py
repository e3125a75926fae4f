"""A training's state from one rank's memory into another's: a checkpoint without the disk.

The state travels in pieces of one size, and what came is hashed before any of it is taken: a rank
whose giver is lost on the way still has what it had. Only a process that has nothing to lose
receives into its own tensors; so its memory grows by one piece, another's by the state.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.spec.errors import JobError, PacelineError, SettingError
from paceline.spec.schema import MAX_LONG_TEXT, dict_of, integer, list_of, regex, text, tuple_of
from paceline.train import parallel
from paceline.train.checkpoints.capture import Training, described
from paceline.train.checkpoints.format import pack, ties, unpack
from paceline.train.checkpoints.resume import stand
from paceline.train.comms import TENSOR_TYPE, Comms, checked
from paceline.train.device import seed_all
from paceline.train.journal import Journal
from paceline.train.models import Models

PIECE = 8 << 20
"""Bytes that travel at once."""
_DESCRIBED = dict_of(lambda value, where: None, text())
_TENSORS = dict_of(
    tuple_of(regex(TENSOR_TYPE, "a type"), list_of(integer(), 64)), text(MAX_LONG_TEXT)
)
_HEADER = 1 << 14  # bytes of what describes the state, of most models


def give(
    training: Training,
    comms: Comms,
    source: int,
    takers: Collection[int],
    *,
    afresh: bool = False,
) -> None:
    """Puts some ranks into the state of another one; a collective of all of them.

    What each rank has of its own stays: its generators, what its gradients have left to say, and
    where it has come alone: who joins ranks that step apart begins where they last met.

    Args:
        training: Of this rank. Its extras are asked for their states on every rank, as for a
            checkpoint.
        comms: Of all ranks.
        source: Whose state it is.
        takers: The ranks that take it; the others keep theirs, and pass pieces on.
        afresh: This rank is a taker that has no state to lose: it receives into its own tensors,
            and gets generators that are its own.

    Raises:
        JobError: A rank received something else than was sent, or cannot take it: on every rank,
            but only on that one where it takes afresh; it is missed by nobody.
        SettingError: The same of a taker that has another training.
    """
    rank = comms.world.rank
    for one in training.extras.values():
        if isinstance(one, Journal):
            one.gather()
    extras = {
        name: one.gathered() if isinstance(one, Journal) else one.state_dict()
        for name, one in training.extras.items()
    }
    taking, own = rank in takers, dict[str, Tensor]()
    if rank == source or (taking and afresh):
        state, own = _own(training, extras)
    mine = json.dumps(_header(training, state, own)) if rank == source else ""
    said = _said(comms.text_of(source, mine, _HEADER), source)
    _taken(comms, lambda: _check(training, said) if taking else None, alone=taking and afresh)
    tensors = own if rank == source else _room(said, own) if taking else {}
    digest = _travel(comms, source, _sizes(said), list(tensors.values()))

    def take() -> None:
        if taking:
            _intact(digest, sent, source)
            _take(training, said, tensors)

    sent = comms.text_of(source, digest)
    _taken(comms, take, alone=taking and afresh)
    if taking and afresh:
        seed_all(training.seed * 1_000_003 + training.progress.step * 4_001 + rank)
    if training.proof is not None:
        training.proof.align()


def _taken(comms: Comms, act: Callable[[], None], *, alone: bool) -> None:
    """What a taker does; of one that fails alone the others see no more than that it is gone."""
    if alone:
        act()
    comms.together(lambda: None if alone else act())


def give_models(models: Models, comms: Comms, source: int, takers: Collection[int]) -> None:
    """Puts the models of some ranks into the state of another rank's; a collective of all.

    Everything else of a training stays as each rank has it: the takers' is as far as the source's
    was when its models had that state, right after their last step.

    Raises:
        JobError: On every rank: a rank received something else than was sent, or the source has
            changed its parameters since, for the first time.
    """
    rank = comms.world.rank
    tensors: dict[str, Tensor] = {}
    header = "{}"
    with models.own_weights(), models.as_counted(rank == source) as known:
        if rank == source and known:
            packed = pack(dict(models.state(alone=True)), tensors, "training")
            once, tied = _once(parallel.whole_state(models.module))
            tensors |= once
            header = json.dumps({"training": packed, "tensors": _shapes(tensors), "tied": tied})
        said = _said(comms.text_of(source, header, _HEADER), source)
        if not said:
            raise JobError(
                "the ranks that are left are too far apart to train on together",
                found=f"rank {source} has changed parameters after a step that others have not"
                " done, which it never did before",
            )
        if rank in takers:
            tensors = _room(said, {})
        digest = _travel(comms, source, _sizes(said), list(tensors.values()))
        sent = comms.text_of(source, digest)
        comms.together(lambda: _intact(digest, sent, source) if rank in takers else None)
        if rank in takers:
            parallel.load_whole_state(models.module, _weights(tensors, said["tied"]))
            models.load_state(unpack(said["training"], tensors), alone=True)


def _intact(digest: str, sent: str, source: int) -> None:
    if digest != sent:
        raise JobError(
            "a rank received another state than it was sent",
            found=f"SHA-256 {digest[:16]} instead of {sent[:16]}, of rank {source}",
            remedy="look at memory and network of that host",
        )


def _own(training: Training, extras: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """This rank's state as JSON, and its tensors by name; they are the training's own."""
    state, rest = described(training, training.models.state(alone=True), extras)
    models = training.models
    once, tied = _once({**parallel.whole_state(models.module), **models.met()})
    return {**state, "tied": tied}, {**once, **rest}


def _once(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The weights as they travel, each tensor once, and which names share one."""
    tied = ties(weights)
    once = {f"weights.{name}": one.detach() for name, one in weights.items() if name not in tied}
    return once, tied


def _header(
    training: Training, state: dict[str, Any], tensors: dict[str, Tensor]
) -> dict[str, Any]:
    done = training.progress
    more = {
        "steps": done.steps, "some_absent": done.some_absent, "within": dict(training.within),
        "switches": training.models.switches, "updated": done.updated,
    }  # fmt: skip
    return {"state": state, "tensors": _shapes(tensors), "more": more}


def _shapes(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {
        name: [str(one.dtype).removeprefix("torch."), list(one.shape)]
        for name, one in tensors.items()
    }


def _weights(tensors: dict[str, Tensor], tied: Mapping[str, str]) -> dict[str, Tensor]:
    prefix = "weights."
    found = {
        name.removeprefix(prefix): one for name, one in tensors.items() if name.startswith(prefix)
    }
    return found | {name: found[other] for name, other in tied.items()}


def _check(training: Training, said: dict[str, Any]) -> None:
    """Refuses the state of another training."""
    mine: dict[str, Any] = {"seed": training.seed, **training.within, **training.identity}
    state, within = said["state"], said["more"]["within"]
    theirs: dict[str, Any] = {"seed": state["seed"], **within, **state["identity"]}
    if mine != theirs:
        differing = [
            f"{name}: {theirs.get(name, 'nothing')} there, {mine.get(name, 'nothing')} here"
            for name in sorted({*mine, *theirs})
            if mine.get(name) != theirs.get(name)
        ]
        raise SettingError(
            "a process that joins runs another training",
            found="\n".join(differing),
            remedy="give every node the same files and the same options",
        )


def _said(text: str, source: int) -> dict[str, Any]:
    """What the source says of its state; empty if it has none to give."""
    found: dict[str, Any] = checked([""] * source + [text], _state)[source]
    return found


def _state(value: Any, where: str) -> None:
    if value is None:  # of another rank
        return
    _DESCRIBED(value, where)
    if value:
        _TENSORS(value.get("tensors"), where)


def _room(said: dict[str, Any], own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Where the tensors are received: this rank's own where they fit, else new ones."""
    room = {}
    for name, (kind, shape) in said["tensors"].items():
        dtype, mine = getattr(torch, kind), own.get(name)
        fits = mine is not None and mine.dtype == dtype and list(mine.shape) == shape
        room[name] = mine if mine is not None and fits else torch.empty(shape, dtype=dtype)
    return room


def _sizes(said: dict[str, Any]) -> int:
    """Bytes of all tensors."""
    return sum(
        torch.Size(shape).numel() * getattr(torch, kind).itemsize
        for kind, shape in said["tensors"].values()
    )


def _travel(comms: Comms, source: int, size: int, tensors: Sequence[Tensor]) -> str:
    """Sends the content of the source's tensors into the takers'; the hash of what passed here.

    Args:
        comms: Of all ranks.
        source: The rank that sends.
        size: Bytes in all.
        tensors: What is sent, or where it goes; none where it only passes through.
    """
    digest, flow = hashlib.sha256(), _Flow(tensors)
    for start in range(0, size, PIECE):
        piece = torch.empty(min(PIECE, size - start), dtype=torch.uint8)
        if comms.world.rank == source:
            flow.read(piece)
        message = piece.to(comms.device)
        comms.spread([message], source)
        if tensors:
            piece = message.cpu()
            digest.update(memoryview(piece.numpy()))  # type: ignore[arg-type]
        if tensors and comms.world.rank != source:
            flow.write(piece)
    return digest.hexdigest()


class _Flow:
    """Tensors as one row of bytes, of which a piece at a time is read or written."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._parts = self._flat(tensors)
        self._now, self._owner = torch.empty(0, dtype=torch.uint8), torch.empty(0)
        self._at = 0

    @staticmethod
    def _flat(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        for one in tensors:
            if one.numel():
                yield one.contiguous().reshape(-1).view(torch.uint8), one

    def _spans(self, length: int) -> Iterator[tuple[slice, Tensor]]:
        """The next bytes of the tensors, and where they are in the piece."""
        start = 0
        while start < length:
            if self._at == len(self._now):
                (self._now, self._owner), self._at = next(self._parts), 0
            count = min(length - start, len(self._now) - self._at)
            part = self._now[self._at : self._at + count]
            self._at += count
            yield slice(start, start + count), part
            start += count

    def read(self, piece: Tensor) -> None:
        for span, part in self._spans(len(piece)):
            piece[span].copy_(part)

    @torch.no_grad()
    def write(self, piece: Tensor) -> None:
        for span, part in self._spans(len(piece)):
            part.copy_(piece[span])
            one = self._owner
            if self._at == len(self._now) and self._now.data_ptr() != one.data_ptr():
                one.copy_(self._now.view(one.dtype).reshape(one.shape))  # it had to be laid out


def _take(training: Training, said: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Makes what came this rank's state."""
    state, models, done = said["state"], training.models, training.progress
    try:
        parallel.load_whole_state(models.module, _weights(tensors, state["tied"]))
        models.load_state(models.known(unpack(state["training"], tensors)), alone=True)
        for name, kept in unpack(state["extras"], tensors).items():
            if name in training.extras:
                training.extras[name].load_state_dict(kept)
    except PacelineError:
        raise
    except Exception as error:  # modules and optimizers raise what they like
        raise JobError(
            "the state of the other ranks does not fit this one",
            found=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            remedy="give every node the same files and the same options",
        ) from error
    stand(training, state)
    more, models.switches = said["more"], said["more"]["switches"]
    done.steps, done.some_absent = more["steps"] or done.steps, more["some_absent"]
    done.updated = more["updated"]
