"""Sharded states through torch's distributed checkpoint: planned and read by it, no pickle.

Each rank writes the shards that it holds, so no process needs memory for the whole state. What
a rank writes, and which of equal copies, torch's planner decides; the files are those of torch's
``HuggingFaceStorageReader``, which reads them at any world size: safetensors with each shard's
place in the file's header. Torch's default format keeps these places in a pickle.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from paceline.spec.errors import DataError
from paceline.train import files


@dataclass(frozen=True)
class ShardPart:
    """One rank's part of a state; tensors are still the training's own.

    Attributes:
        tensors: Local parts by name.
        offsets: Where each part begins in its whole tensor.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    offsets: dict[str, list[int]] = field(default_factory=dict)

    def header(self) -> dict[str, str]:
        """The file's description of itself, as torch's reader expects it."""
        places = {name: {"saved_offsets": place} for name, place in self.offsets.items()}
        return {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(places)}


def plan_shards(state: Mapping[str, Tensor]) -> ShardPart:
    """Returns this rank's part of a state; a collective of all ranks.

    Args:
        state: Shards as ``DTensor``; of other tensors the lowest rank's are taken.
    """
    collector = _PlanCollector()
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    save(dict(state), storage_writer=collector, planner=planner)
    return collector.shards


class _PlanCollector(StorageWriter):
    """Collects what torch's planner assigns to this rank; written later, off the step."""

    def __init__(self) -> None:
        self.shards = ShardPart()

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        for item in plan.items:
            part = planner.resolve_data(item)
            # a tensor may have fewer rows than there are ranks, and nothing for this one
            if isinstance(part, Tensor) and part.numel() and item.tensor_data is not None:
                self.shards.tensors[item.index.fqn] = part.detach()
                self.shards.offsets[item.index.fqn] = list(item.tensor_data.chunk.offsets)
        result: Future[list[WriteResult]] = Future()
        result.set_result([])
        return result

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def read_into(folder: Path, state: Mapping[str, Tensor]) -> None:
    """Reads this rank's part of a state that any number of ranks has written; a collective.

    Args:
        folder: Of :func:`plan_shards`'s files; seen by every rank.
        state: Filled in place; shards as ``DTensor``.

    Raises:
        DataError: The state is not that of this model.
    """
    if not state:
        return
    try:
        load(dict(state), storage_reader=_reader(folder))
    except CheckpointException as error:
        raise DataError(
            f"the checkpoint {folder.parent} does not fit the model",
            found="; ".join(f"rank {rank}: {reason[0]}" for rank, reason in error.failures.items()),
            remedy="the former model and optimizer, or --resume never to begin anew",
        ) from None
    except OSError as error:
        raise DataError(
            f"the checkpoint {folder.parent} cannot be read", found=str(error)
        ) from None


def _reader(folder: Path) -> HuggingFaceStorageReader:
    """Returns a reader, which opens all files of the folder. OSError if one is not regular."""
    for file in folder.iterdir():
        files.check_regular(file)
    return HuggingFaceStorageReader(str(folder))


def read_all(folder: Path) -> dict[str, Tensor]:
    """Returns the whole state on the CPU; empty if nothing was written.

    Raises:
        OSError, RuntimeError: It cannot be read.
    """
    if not folder.is_dir():
        return {}
    reader = _reader(folder)
    state = {
        name: torch.empty(metadata.size, dtype=metadata.properties.dtype)
        for name, metadata in reader.read_metadata().state_dict_metadata.items()
        if isinstance(metadata, TensorStorageMetadata)
    }
    with warnings.catch_warnings():  # that it reads alone is what is wanted
        warnings.simplefilter("ignore")
        try:
            load(dict(state), storage_reader=reader, no_dist=True)
        except CheckpointException as error:
            raise RuntimeError(str(error)) from None
    return state
