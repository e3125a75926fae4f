"""How a module comes to train on all ranks at once: replicated (DDP) or sharded (FSDP2)."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def sharded(module: nn.Module) -> nn.Module:
    """The module with its parameters spread over all ranks, in place.

    Every block of a ``ModuleList`` becomes a unit of its own, so that only one block's whole
    parameters are in memory at a time.
    """
    from torch.distributed.fsdp import fully_shard

    for child in module.modules():
        if isinstance(child, nn.ModuleList):
            for block in child:
                fully_shard(block)
    fully_shard(module)
    return module


def is_sharded(module: nn.Module) -> bool:
    """True when the parameters are spread over the ranks."""
    return any(type(one).__name__ == "DTensor" for one in module.parameters())


def replicated(module: nn.Module, device: torch.device) -> nn.Module:
    """The module under DDP: gradients are averaged over all ranks."""
    index = None if device.type == "cpu" else [device]
    # A false alarm of DDP for weights with one input channel, whose strides are ambiguous.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view")
    return DistributedDataParallel(module, device_ids=index, gradient_as_bucket_view=True)


def unsynced(model: nn.Module) -> AbstractContextManager[None]:
    """Within it, forward and backward passes keep their gradients to themselves.

    DDP has to know before the forward pass, FSDP before the backward pass.
    """
    if isinstance(model, DistributedDataParallel):
        return model.no_sync()
    if is_sharded(model):
        return _FsdpWithoutSync(model)
    return nullcontext()


class _FsdpWithoutSync(AbstractContextManager[None]):
    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __enter__(self) -> None:
        self._model.set_requires_gradient_sync(False)  # type: ignore[operator]

    def __exit__(self, *error: object) -> None:
        self._model.set_requires_gradient_sync(True)  # type: ignore[operator]


def whole_state(module: nn.Module) -> dict[str, Tensor]:
    """The module's whole state by name; with shards a collective, and on the CPU of rank 0."""
    if not is_sharded(module):
        return module.state_dict()
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return cast(dict[str, Tensor], get_model_state_dict(module, options=options))
