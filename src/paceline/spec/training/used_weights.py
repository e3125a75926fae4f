"""Chooses the files of a run that hold the weights to use: its model's, or those of a checkpoint.

Manifests say which checkpoint was the best: they are signed. The pointer ``best.json`` is not.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from paceline.spec.rundir import (
    BEST,
    CHECKPOINTS,
    MANIFEST,
    MODEL,
    MODEL_CONFIG,
    checkpoints,
    read_pointer,
)
from paceline.spec.training.checkpoint_manifest import DamagedCheckpoint, parse_manifest

_MAX_MANIFEST_BYTES = 8 << 20


def best_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint of a run whose manifest says that it was the best."""
    for path in checkpoints(folder):  # their manifests are plain files
        with contextlib.suppress(OSError, DamagedCheckpoint):
            manifest = path / MANIFEST
            if manifest.stat().st_size > _MAX_MANIFEST_BYTES:
                continue
            if parse_manifest(manifest.read_bytes(), path.name).info.get("best") is True:
                return path
    return None


def pointed_checkpoint(folder: Path) -> Path | None:
    """The checkpoint of a run that ``best.json`` names, if it is there."""
    root = folder / CHECKPOINTS
    path = root / read_pointer(root / BEST)
    return path if path in checkpoints(folder) else None


def usable_checkpoint(folder: Path) -> Path | None:
    """The checkpoint to use if a run has no final model: the best, else the newest."""
    best = best_checkpoint(folder) or pointed_checkpoint(folder)
    return best or next(iter(checkpoints(folder)), None)


def model_paths(folder: Path) -> tuple[str, ...]:
    """The paths of a run that its model needs: the model's, or also a checkpoint's."""
    checkpoint = None if (folder / MODEL_CONFIG).is_file() else usable_checkpoint(folder)
    if checkpoint is None:
        return (MODEL,)
    # the model's folder has the tokenizer from the start
    return MODEL, f"{CHECKPOINTS}/{checkpoint.name}", f"{CHECKPOINTS}/{BEST}"
