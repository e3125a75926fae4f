"""Memory that a training of a language model needs, compared with that of each host.

Sizes of weights, gradients, optimizer state and scores follow from shapes. If these alone do not
fit, the training is refused. Activations are an estimate, which can only warn.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from paceline import train
from paceline.recipes.language.base_quantization import NF4_BYTES, linear_layers
from paceline.recipes.language.decoder import HEAD_WIDTH, Shape
from paceline.recipes.optimization import Batching
from paceline.recipes.options import Options
from paceline.spec.errors import SettingError
from paceline.spec.formatting import format_size
from paceline.spec.schema import number, text, tuple_of
from paceline.train.comms import parse_texts
from paceline.train.device import Precision
from paceline.train.measure.largest_batch import device_memory

PROCESS_BYTES = 600e6
"""Memory of a process on a CPU for its libraries (bench/language)."""
MAX_SUGGESTIONS = 3
_HOST_SCHEMA = tuple_of(text(), number, number)  # name, bytes in all, free bytes
Host = tuple[str, float, float]
"""Name, bytes of a process in all, and those of them that are free."""


@dataclass(frozen=True)
class MemoryNeeds:
    """What the memory of a process depends on.

    Attributes:
        parameters: Number of all parameters; ``trained``: of those that are trained.
        frozen_bytes: Bytes of a parameter that is not trained; ``trained_bytes``: of one that is.
        states: Numbers that the optimizer keeps for each trained parameter.
        layers: Number of layers; ``width``: numbers between two layers for each token.
        layer_numbers: Numbers that a layer keeps for each token until the backward pass.
        vocabulary: Number of scores for each token.
        number_bytes: Bytes of a score or of an activation.
        examples: Number of examples computed at once.
        length: Tokens of an average example; ``longest``: of the longest.
        target_part: Fraction of the tokens that the loss is about.
        is_checkpointed: Layers keep only their inputs.
    """

    parameters: int
    trained: int
    frozen_bytes: float
    trained_bytes: int
    states: float
    layers: int
    width: int
    layer_numbers: int
    vocabulary: int
    number_bytes: int
    examples: int = 1
    length: float = 1.0
    longest: int = 1
    target_part: float = 1.0
    is_checkpointed: bool = False

    @property
    def parts(self) -> dict[str, float]:
        """Bytes by name that are needed in any case, with batches of average examples."""
        trained_bytes = self.trained * self.trained_bytes
        # All scores, and twice those that the loss is about: the loss copies them and keeps the
        # logarithms of probabilities; the backward pass needs as much.
        scores = self.number_bytes * (1 + 2 * self.target_part) * self.vocabulary
        return {
            "weights": (self.parameters - self.trained) * self.frozen_bytes + trained_bytes,
            "gradients": trained_bytes,
            "optimizer state": self.states * trained_bytes,
            "scores": scores * self.examples * self.length,
        }

    @property
    def expected_parts(self) -> dict[str, float]:
        """Bytes by name, activations included, with batches of the longest examples."""
        numbers = self.layers * self.layer_numbers
        if self.is_checkpointed:
            numbers = self.layers * self.width + self.layer_numbers
        activations = self.number_bytes * self.examples * self.longest * numbers
        return {**replace(self, length=self.longest).parts, "activations": activations}

    @property
    def least(self) -> float:
        return sum(self.parts.values())

    @property
    def expected(self) -> float:
        return sum(self.expected_parts.values())

    def fitting_examples(self, size: float) -> int:
        """Returns the number of examples that can be computed at once in so many bytes."""
        fixed = replace(self, examples=0).expected
        each = replace(self, examples=1).expected - fixed
        return max(0, int((size - fixed) / each))


Change = Callable[[MemoryNeeds], MemoryNeeds]


def layer_numbers(width: int, key_width: int, hidden: int) -> int:
    """Returns the numbers that a layer like those of Llama keeps for each token.

    Inputs and outputs of both norms, queries, the output of attention in two layouts; keys and
    values; four tensors inside the feed-forward layer.
    """
    return 7 * width + 2 * key_width + 4 * hidden


def decoder_needs(shape: Shape, muon_parameters: int) -> MemoryNeeds:
    """Returns the needs of a training from scratch in float32.

    Args:
        muon_parameters: Number of parameters for which Muon keeps one number, and AdamW two.
    """
    return MemoryNeeds(
        parameters=shape.parameters,
        trained=shape.parameters,
        frozen_bytes=4,
        trained_bytes=4,
        states=2 - muon_parameters / shape.parameters,
        layers=shape.depth,
        width=shape.width,
        layer_numbers=layer_numbers(shape.width, shape.groups * HEAD_WIDTH, shape.hidden),
        vocabulary=shape.vocabulary,
        number_bytes=4,
        length=shape.length,
        longest=shape.length,
    )


def base_needs(
    model: Any, method: str, rank: int, precision: Precision, device: torch.device
) -> MemoryNeeds:
    """Returns the needs of a fine-tuning.

    Args:
        model: A model of transformers, also one without weights (on the device ``meta``).
        rank: Rank of the adapters, which all linear layers but the last get.
    """
    config = model.config.get_text_config()
    linear = linear_layers(model).values()
    count = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(rank * (layer.in_features + layer.out_features) for layer in linear)
    if method == "dora":
        trained += sum(layer.out_features for layer in linear)
    width, stored = config.hidden_size, next(model.parameters()).dtype
    frozen = torch.promote_types(stored, precision.parameters)
    computed = precision.compute or precision.parameters
    if precision.compute is torch.bfloat16 and device.type != "cpu":
        frozen = torch.bfloat16
    frozen_bytes: float = frozen.itemsize
    if method == "qlora":  # with embeddings and norms in float32
        num_quantized = sum(layer.weight.numel() for layer in linear)
        size = num_quantized * NF4_BYTES + (count - num_quantized) * 4
        frozen_bytes = size / count
    return MemoryNeeds(
        parameters=count if method == "full" else count + trained,
        trained=count if method == "full" else trained,
        frozen_bytes=frozen_bytes,
        trained_bytes=precision.parameters.itemsize,
        states=2,
        layers=config.num_hidden_layers,
        width=width,
        # keys and values are repeated for all heads of queries
        layer_numbers=layer_numbers(width, width, getattr(config, "intermediate_size", 4 * width)),
        vocabulary=config.vocab_size,
        number_bytes=computed.itemsize,
    )


def examples_at_once(options: Options, batching: Batching) -> int:
    """Returns the number of examples that a process computes at once.

    One if the process tries what fits, or if hosts have their own limits.
    """
    is_limited = options.micro_batch.isdecimal()
    return min(batching.limit or batching.share, batching.share) if is_limited else 1


def check_memory(session: train.Session, needs: MemoryNeeds, changes: Mapping[str, Change]) -> None:
    """Says what a training needs, warns if that may not fit, and refuses what cannot.

    Args:
        changes: What other flags change in the needs, by flags.

    Raises:
        SettingError: Some host has less than the training needs in any case.
    """
    total, free = device_memory(session.device, session.world.local_size)
    if session.device.type == "cpu":
        total -= PROCESS_BYTES
    reports = session.comms.texts(json.dumps([session.world.host, total, free]))
    hosts = [(str(h), float(t), float(f)) for h, t, f in parse_texts(reports, _HOST_SCHEMA)]
    session.say(judge_memory(needs, hosts, changes))


def judge_memory(needs: MemoryNeeds, hosts: Sequence[Host], changes: Mapping[str, Change]) -> str:
    """Returns what to say about needs beside the memory of each process.

    Raises:
        SettingError: See :func:`check_memory`.
    """
    smallest, total, _ = min(hosts, key=lambda host: host[1])
    if needs.least > total:
        raise SettingError(
            f"the training does not fit into the memory of {smallest}",
            found=f"it needs at least {format_size(int(needs.least))} for each process"
            f" ({describe_parts(needs.parts)}), and {format_size(max(int(total), 0))} are there",
            remedy=suggest(needs, total, changes),
        )
    size = format_size(int(needs.expected))
    line = f"memory of a process: about {size} ({describe_parts(needs.expected_parts)})"
    host, _, free = min(hosts, key=lambda host: host[2])
    if needs.expected <= free:
        return line
    return (
        f"{line}\n{host} has {format_size(int(free))} free for it: if memory runs out,"
        f" {suggest(needs, free, changes)}"
    )


def describe_parts(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {format_size(int(size))}" for name, size in parts.items())


def suggest(needs: MemoryNeeds, size: float, changes: Mapping[str, Change]) -> str:
    """Returns flags with which a training fits into so many bytes: each alone, then several."""
    variants, flags, changed = {"": needs}, "", needs
    variants |= {flag: change(needs) for flag, change in changes.items()}
    for flag, change in changes.items():
        flags, changed = f"{flags} {flag}".strip(), change(changed)
        variants[flags] = changed
    fitting = []
    for flags, variant in variants.items():
        count = variant.fitting_examples(size)
        if 0 < count < variant.examples:
            fitting.append(f"{flags} --micro-batch {count}".strip())
        elif count and flags:
            fitting.append(flags)
    return ", or ".join(fitting[:MAX_SUGGESTIONS]) or "a smaller model, or a host with more memory"
