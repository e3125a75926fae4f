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
from paceline.spec.schema import dict_of, text
from paceline.train import parallel
from paceline.train.checkpoints.capture import Training, describe_state
from paceline.train.checkpoints.format import find_tied_weights, pack, unpack
from paceline.train.checkpoints.resume import SHAPES_SCHEMA, set_position, tensor_shapes
from paceline.train.comms import Comms, parse_texts
from paceline.train.device import seed_all
from paceline.train.journal import Journal
from paceline.train.models import Models

PIECE_BYTES = 8 << 20
"""Bytes that travel at once."""
_DESCRIBED = dict_of(lambda value, where: None, text())
_HEADER_BYTES = 1 << 14  # bytes of what describes the state, of most models


def send_training(
    training: Training,
    comms: Comms,
    source: int,
    receivers: Collection[int],
    *,
    is_new: bool = False,
) -> None:
    """Puts receivers into the state of another rank; a collective.

    What each rank has of its own stays: its generators, what its gradients have left to say, and
    where it has come alone: who joins ranks that step apart begins where they last met.

    Args:
        training: Its extras are asked for their states on every rank, as for a checkpoint.
        source: Whose state it is.
        receivers: The ranks that take it; the others keep theirs, and pass pieces on.
        is_new: This rank is a receiver that has no state to lose: it receives into its own tensors,
            and gets generators that are its own.

    Raises:
        JobError: A rank received something else than was sent, or cannot take it: on every rank,
            but only on that one where it takes afresh; it is missed by nobody.
        SettingError: The same of a receiver that has another training.
    """
    rank = comms.world.rank
    for extra in training.extras.values():
        if isinstance(extra, Journal):
            extra.gather()
    extras = {
        name: extra.state_of_gathered() if isinstance(extra, Journal) else extra.state_dict()
        for name, extra in training.extras.items()
    }
    is_receiver, tensors = rank in receivers, dict[str, Tensor]()
    run_alone = is_receiver and is_new
    if rank == source or run_alone:
        state, tensors = _local_state(training, extras)
    header = json.dumps(_header(training, state, tensors)) if rank == source else ""
    source_header = _received_header(comms.text_of(source, header, _HEADER_BYTES), source)

    def run(act: Callable[[], None]) -> None:
        """Runs a receiver's action; a new one may fail alone."""
        if run_alone:
            act()
        comms.together(lambda: act() if is_receiver and not run_alone else None)

    run(lambda: _check_compatible(training, source_header))
    if is_receiver and rank != source:
        tensors = _receive_buffers(source_header, tensors)
    digest = _transfer(comms, source, source_header, list(tensors.values()))
    sent = comms.text_of(source, digest)

    def apply() -> None:
        _check_digest(digest, sent, source)
        _apply_state(training, source_header, tensors)

    run(apply)
    if run_alone:
        seed_all(training.seed * 1_000_003 + training.progress.step * 4_001 + rank)
    if training.checksum is not None:
        training.checksum.align()


def send_models(models: Models, comms: Comms, source: int, receivers: Collection[int]) -> None:
    """Puts the models of receivers into the state of another rank's; a collective.

    It is the state right after the source's last step, which the receivers have not done. They keep
    everything else of their training, which is where the source's was at that moment.

    Raises:
        JobError: On every rank: a rank received something else than was sent, or the source has
            changed its parameters since, so that this state is unknown.
    """
    rank = comms.world.rank
    tensors: dict[str, Tensor] = {}
    header = "{}"
    with models.without_averages(), models.at_last_commit(rank == source) as is_commit_known:
        if rank == source and is_commit_known:
            packed = pack(dict(models.state(replicated_only=True)), tensors, "training")
            unique, tied = _unique_weights(parallel.full_state(models.module))
            tensors |= unique
            header = json.dumps(
                {"training": packed, "tensors": tensor_shapes(tensors), "tied": tied}
            )
        source_header = _received_header(comms.text_of(source, header, _HEADER_BYTES), source)
        if not source_header:
            raise JobError(
                "the ranks that are left are too far apart to train on together",
                found=f"rank {source} has changed parameters after a step that others have not"
                " done, which it never did before",
            )
        if rank in receivers:
            tensors = _receive_buffers(source_header, {})
        digest = _transfer(comms, source, source_header, list(tensors.values()))
        sent = comms.text_of(source, digest)
        comms.together(lambda: _check_digest(digest, sent, source) if rank in receivers else None)
        if rank in receivers:
            parallel.load_full_state(models.module, _weights(tensors, source_header["tied"]))
            models.load_state(unpack(source_header["training"], tensors), replicated_only=True)


def _check_digest(digest: str, sent: str, source: int) -> None:
    if digest != sent:
        raise JobError(
            "a rank received another state than it was sent",
            found=f"SHA-256 {digest[:16]} instead of {sent[:16]}, of rank {source}",
            remedy="look at memory and network of that host",
        )


def _local_state(
    training: Training, extras: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns this rank's state as JSON, and its own tensors by name."""
    models = training.models
    state, tensors = describe_state(training, models.state(replicated_only=True), extras)
    weights = {**parallel.full_state(models.module), **models.synchronized_parameters()}
    unique, tied = _unique_weights(weights)
    return {**state, "tied": tied}, {**unique, **tensors}


def _unique_weights(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns the weights to send, each tensor once, and which names share one."""
    tied = find_tied_weights(weights)
    unique = {
        f"weights.{name}": tensor.detach() for name, tensor in weights.items() if name not in tied
    }
    return unique, tied


def _header(
    training: Training, state: dict[str, Any], tensors: dict[str, Tensor]
) -> dict[str, Any]:
    progress = training.progress
    extra_fields = {
        "steps": progress.steps,
        "some_absent": progress.some_absent,
        "within": dict(training.context),
        "switches": training.models.switches,
        "updated": progress.updated,
    }
    return {"state": state, "tensors": tensor_shapes(tensors), "more": extra_fields}


def _weights(tensors: dict[str, Tensor], tied: Mapping[str, str]) -> dict[str, Tensor]:
    prefixed = {name: tensor for name, tensor in tensors.items() if name.startswith("weights.")}
    weights = {name.removeprefix("weights."): tensor for name, tensor in prefixed.items()}
    return weights | {name: weights[source] for name, source in tied.items()}


def _check_compatible(training: Training, header: dict[str, Any]) -> None:
    """Refuses the state of another training."""
    local_values: dict[str, Any] = {"seed": training.seed, **training.context, **training.identity}
    state, context = header["state"], header["more"]["within"]
    source_values: dict[str, Any] = {"seed": state["seed"], **context, **state["identity"]}
    if local_values != source_values:
        differing = [
            f"{name}: {source_values.get(name, 'nothing')} there,"
            f" {local_values.get(name, 'nothing')} here"
            for name in sorted({*local_values, *source_values})
            if local_values.get(name) != source_values.get(name)
        ]
        raise SettingError(
            "a process that joins runs another training",
            found="\n".join(differing),
            remedy="give every node the same files and the same options",
        )


def _received_header(text: str, source: int) -> dict[str, Any]:
    """Returns the source's description of its state; empty if it has none to give."""
    header: dict[str, Any] = parse_texts([""] * source + [text], _state)[source]
    return header


def _state(value: Any, name: str) -> None:
    if value is None:  # of another rank
        return
    _DESCRIBED(value, name)
    if value:
        SHAPES_SCHEMA(value.get("tensors"), name)


def _receive_buffers(header: dict[str, Any], local_tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors to receive into: this rank's own if they fit, else new ones."""
    buffers = {}
    for name, (kind, shape) in header["tensors"].items():
        dtype, buffer = getattr(torch, kind), local_tensors.get(name)
        if buffer is None or buffer.dtype != dtype or list(buffer.shape) != shape:
            buffer = torch.empty(shape, dtype=dtype)
        buffers[name] = buffer
    return buffers


def _transfer(comms: Comms, source: int, header: dict[str, Any], tensors: Sequence[Tensor]) -> str:
    """Broadcasts one rank's tensors in pieces; returns the SHA-256 of what was sent or received.

    Args:
        header: Describes the tensors; the same on all ranks.
        tensors: What the source sends, or what a receiver fills; empty on the other ranks, which
            take part in the broadcast only.
    """
    digest, flow = hashlib.sha256(), _ByteStream(tensors)
    size = sum(
        torch.Size(shape).numel() * getattr(torch, kind).itemsize
        for kind, shape in header["tensors"].values()
    )
    for start in range(0, size, PIECE_BYTES):
        piece = torch.empty(min(PIECE_BYTES, size - start), dtype=torch.uint8)
        if comms.world.rank == source:
            flow.read(piece)
        message = piece.to(comms.message_device)
        comms.broadcast([message], source)
        if tensors:
            piece = message.cpu()
            digest.update(memoryview(piece.numpy()))  # type: ignore[arg-type]
        if tensors and comms.world.rank != source:
            flow.write(piece)
    return digest.hexdigest()


class _ByteStream:
    """Tensors as one stream of bytes, read or written a piece at a time."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._parts = (  # one at a time, as some have to be laid out
            (tensor.contiguous().reshape(-1).view(torch.uint8), tensor)
            for tensor in tensors
            if tensor.numel()
        )
        self._current, self._owner = torch.empty(0, dtype=torch.uint8), torch.empty(0)
        self._offset = 0

    def _spans(self, length: int) -> Iterator[tuple[slice, Tensor]]:
        """Yields the next bytes of the tensors, and their positions in the piece."""
        start = 0
        while start < length:
            if self._offset == len(self._current):
                (self._current, self._owner), self._offset = next(self._parts), 0
            count = min(length - start, len(self._current) - self._offset)
            part = self._current[self._offset : self._offset + count]
            self._offset += count
            yield slice(start, start + count), part
            start += count

    def read(self, piece: Tensor) -> None:
        for span, part in self._spans(len(piece)):
            piece[span].copy_(part)

    @torch.no_grad()
    def write(self, piece: Tensor) -> None:
        for span, part in self._spans(len(piece)):
            part.copy_(piece[span])
            tensor = self._owner
            is_copy = self._current.data_ptr() != tensor.data_ptr()  # it had to be laid out
            if self._offset == len(self._current) and is_copy:
                tensor.copy_(self._current.view(tensor.dtype).reshape(tensor.shape))


def _apply_state(training: Training, header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Makes the received state this rank's."""
    state, models, progress = header["state"], training.models, training.progress
    try:
        parallel.load_full_state(models.module, _weights(tensors, state["tied"]))
        saved = models.select_known(unpack(state["training"], tensors))
        models.load_state(saved, replicated_only=True)
        for name, extra_state in unpack(state["extras"], tensors).items():
            if name in training.extras:
                training.extras[name].load_state_dict(extra_state)
    except PacelineError:
        raise
    except Exception as error:  # modules and optimizers raise what they like
        raise JobError(
            "the state of the other ranks does not fit this one",
            found=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            remedy="give every node the same files and the same options",
        ) from error
    set_position(training, state)
    extra_fields = header["more"]
    models.switches = extra_fields["switches"]
    progress.steps = extra_fields["steps"] or progress.steps
    progress.some_absent, progress.updated = extra_fields["some_absent"], extra_fields["updated"]
