"""Saves and loads trained weights and their description, without running code of the file."""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from paceline.spec import rundir
from paceline.spec.errors import DataError, NodeError, PacelineError
from paceline.spec.rundir import MANIFEST, is_frozen_file
from paceline.spec.training.checkpoint_manifest import DamagedCheckpoint, sha256
from paceline.spec.training.used_weights import usable_checkpoint
from paceline.train import files
from paceline.train.checkpoints.format import (
    OPTIMIZER,
    OPTIMIZER_SHARDS,
    STATE,
    WEIGHT_SHARDS,
    WEIGHTS,
    all_weights,
    read_manifest,
)

_AVERAGES = "training.average.tensors."
_DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)
_READ_ERRORS = (
    DamagedCheckpoint, OSError, ValueError, LookupError, RuntimeError, SafetensorError,
)  # fmt: skip
_RESERVED_BYTES = 16 << 20  # of a disk, left for other processes
MAX_TENSORS = 1 << 17  # of a network
EXTRA_TENSORS, EXTRA_ELEMENTS = 1 << 12, 1 << 26
"""Tensors of a network that its saved weights lack: tables, and a head that is replaced."""


def save_model(folder: Path, state: dict[str, Tensor], config: dict[str, Any]) -> Path:
    """Writes ``model.safetensors`` and then ``config.json``, each atomically.

    Args:
        state: Tensors by name; any device.
        config: JSON values that are needed to build the model again and to use it.

    Returns:
        ``folder``, or another one of this machine when that disk is full.

    Raises:
        NodeError: The files cannot be written.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    content = save(_copy_shared(tensors))
    try:
        _write_model(folder, content, config)
    except OSError as error:
        is_full = error.errno in _DISK_FULL_ERRORS
        if is_full and (fallback := _fallback_folder(folder, len(content))) is not None:
            _write_model(fallback, content, config)
            return fallback
        raise NodeError(
            f"the trained model cannot be written to {folder / rundir.MODEL}",
            found=str(error.strerror or error),
            remedy="make room and start the same command again: it resumes from its checkpoint",
        ) from None
    return folder


def _write_model(folder: Path, content: bytes, config: dict[str, Any]) -> None:
    weights = folder / rundir.WEIGHTS
    files.write_bytes(weights, content)
    files.write_json(folder / rundir.MODEL_CONFIG, {**config, "sha256": sha256(weights)})


def _fallback_folder(full_folder: Path, size: int) -> Path | None:
    """Makes a folder on another disk of this machine with room for ``size`` bytes."""
    for place in (tempfile.gettempdir(), str(Path.home()), "/dev/shm"):  # noqa: S108 - mkdtemp
        with contextlib.suppress(OSError):
            is_other_disk = Path(place).stat().st_dev != full_folder.stat().st_dev
            if is_other_disk and shutil.disk_usage(place).free > size + _RESERVED_BYTES:
                return Path(tempfile.mkdtemp(prefix="paceline-model-", dir=place))
    return None


def _copy_shared(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies tied weights: the format has no tensors that share memory."""
    places = Counter(tensor.untyped_storage().data_ptr() for tensor in state.values())
    return {
        name: tensor.clone() if places[tensor.untyped_storage().data_ptr()] > 1 else tensor
        for name, tensor in state.items()
    }


def load_config(folder: Path) -> dict[str, Any]:
    """Returns the description of a saved model, or of a run's best or newest checkpoint.

    Raises:
        DataError: The run directory holds no model of Paceline.
    """
    path, checkpoint = folder / rundir.MODEL_CONFIG, usable_checkpoint(folder)
    if not path.is_file() and checkpoint is not None:
        return _checkpoint_config(checkpoint)
    try:
        config = json.loads(files.read_bytes_limited(path))
    except FileNotFoundError:
        raise DataError(
            f"{folder} holds no trained model",
            found=f"no {path}, and no checkpoint",
            remedy="name the directory of a run, for example runs/image-…",
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read", found=str(error)) from None
    if not isinstance(config, dict):
        raise DataError(f"{path} describes no model", found=type(config).__name__)
    return config


def _checkpoint_config(path: Path) -> dict[str, Any]:
    try:
        read_manifest(path).verify(path)
        config = json.loads(files.read_bytes_limited(path / STATE))["model"]
        if isinstance(config, dict) and config:
            return config
    except (DamagedCheckpoint, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f"the checkpoint {path} cannot be used",
            found=str(error),
            remedy="start the training again with its --run-dir: it resumes from a sound one",
        ) from None
    raise DataError(
        f"the checkpoint {path} does not describe its model",
        remedy="start the training again with its --run-dir, and let it end",
    )


def load_weights(folder: Path, module: nn.Module) -> None:
    """Loads a run's weights into a module of the same shape and precision.

    Args:
        folder: A run directory, whose model is loaded, or else its best or newest checkpoint; or
            the folder of a checkpoint.

    Raises:
        DataError: The file is missing, damaged or does not fit the module.
    """
    path, state = saved_state(folder)
    fill(module, path, state)


def saved_state(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """Returns the file and weights by name of a run's model, else of a checkpoint.

    Raises:
        DataError: The file is missing or damaged.
    """
    path = folder / rundir.WEIGHTS
    checkpoint = folder if (folder / MANIFEST).is_file() else usable_checkpoint(folder)
    if not (folder / rundir.MODEL_CONFIG).is_file() and checkpoint is not None:
        return checkpoint, _checkpoint_weights(checkpoint)
    config = load_config(folder)
    try:
        files.check_regular(path, files.memory_bytes())
        state = load_file(path)  # mapped; its header must fit the file's size
        if sha256(path) != config.get("sha256"):
            raise DataError(
                f"{path} is not the file that the training wrote",
                found="its hash differs from the one in config.json",
                remedy="copy the run directory again, or train again",
            )
        return path, state
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} cannot be loaded", found=str(error)) from None


def _checkpoint_weights(path: Path) -> dict[str, Tensor]:
    """Returns the verified weights of a checkpoint: the averaged ones if the run has an average."""
    try:
        read_manifest(path).verify(path)
        if (path / WEIGHTS).is_file():
            return _weights(path) | _averages(path)
        from paceline.train.checkpoints import shards

        optimizer = shards.read_all(path / OPTIMIZER_SHARDS)
        names = [name for name in optimizer if name.startswith(_AVERAGES)]
        averages = {name.removeprefix(_AVERAGES): optimizer[name] for name in names}
        return shards.read_all(path / WEIGHT_SHARDS) | _averages(path) | averages
    except _READ_ERRORS as error:
        raise DataError(f"{path} cannot be loaded", found=str(error)) from None


def _weights(path: Path) -> dict[str, Tensor]:
    tied = json.loads(files.read_bytes_limited(path / STATE)).get("tied", {})
    names = [WEIGHTS, *(name for name in read_manifest(path).files if is_frozen_file(name))]
    return all_weights({name: load_file(path / name) for name in names}, tied)


def _averages(path: Path) -> dict[str, Tensor]:
    files.check_regular(path / OPTIMIZER)
    with safe_open(path / OPTIMIZER, framework="pt") as content:  # its moments are not needed
        names = [name for name in content.keys() if name.startswith(_AVERAGES)]  # noqa: SIM118
        return {name.removeprefix(_AVERAGES): content.get_tensor(name) for name in names}


def fill(module: nn.Module, path: Path, state: Mapping[str, Tensor]) -> None:
    """Copies the weights of the file ``path`` into a module; DataError if they do not fit it."""
    expected = module.state_dict()
    wrong = [f"{name} is missing" for name in expected if name not in state]
    wrong += [f"{name} is not of this network" for name in state if name not in expected]
    wrong += [
        f"{name} has the shape {list(tensor.shape)} instead of {list(expected[name].shape)}"
        for name, tensor in state.items()
        if name in expected and tensor.shape != expected[name].shape
    ]
    if wrong:
        omitted = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise DataError(
            f"{path} holds the weights of another network than the recipe builds",
            found="; ".join(wrong[:3]) + omitted,
            remedy="a changed recipe is evaluated by its own script; paceline.train.load_weights"
            " fills your own network",
        )
    module.load_state_dict(state)


def build_limited(build: Callable[[], nn.Module], state: Mapping[str, Tensor]) -> nn.Module:
    """Builds a network that a file describes, unless it is much larger than its saved weights.

    Raises:
        DataError: It cannot be built, or is larger: a description of a few bytes may stand for any
            size.
    """
    num_elements = sum(tensor.numel() for tensor in state.values())
    limits = 2 * len(state) + EXTRA_TENSORS, 2 * num_elements + EXTRA_ELEMENTS
    check_size(build, *limits)
    with limited_size(*limits):
        try:
            return build()
        except PacelineError:
            raise
        except Exception as error:  # libraries raise any kind for values that they do not expect
            reason = str(error).partition("\n")[0]
            raise DataError(
                "the network that config.json describes cannot be built",
                found=f"{type(error).__name__} {reason}",
                remedy="copy the model again from where it was trained",
            ) from error


def check_size(
    build: Callable[[], nn.Module],
    max_tensors: int = MAX_TENSORS,
    max_elements: int = sys.maxsize,
) -> None:
    """Builds a network without memory. DataError if it is too large, also for this machine."""
    fork, meta = torch.random.fork_rng(devices=[]), torch.device("meta")
    max_elements = min(max_elements, files.memory_bytes() // torch.float32.itemsize)
    with limited_size(max_tensors, max_elements), fork, meta:
        try:
            build()
        except PacelineError:
            raise
        except Exception:  # noqa: S110 - some need values, which tensors without memory lack
            pass


@contextlib.contextmanager
def limited_size(max_tensors: int, max_elements: int) -> Iterator[None]:
    """Raises DataError when modules get more parameters and buffers than these."""
    num_tensors = num_elements = 0

    def count(module: nn.Module, name: str, tensor: Tensor | None) -> None:
        nonlocal num_tensors, num_elements
        num_tensors += 1
        num_elements += 0 if tensor is None else tensor.numel()
        if num_tensors > max_tensors or num_elements > max_elements:
            raise DataError(
                "the described network is larger than its weights or than the memory of this"
                " machine",
                found=f"more than {max_tensors:,} tensors or {max_elements:,} numbers",
                remedy="copy the model again from where it was trained",
            )

    with contextlib.ExitStack() as hooks:
        hooks.enter_context(register_module_parameter_registration_hook(count))
        hooks.enter_context(register_module_buffer_registration_hook(count))
        yield
