"""Signs the files of a run's final model, and finds changes to them and to ``best.json``.

The launcher signs the files when a start has ended, also if there are none: a model that somebody
adds later is noticed. Of the weights, it signs the hash that the training wrote.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from paceline.agent.files import safe_paths
from paceline.agent.files.snapshot import hash_file
from paceline.rundir import records
from paceline.rundir.signature_file import SignatureFile
from paceline.rundir.signatures import VerifiedItem
from paceline.spec.errors import SettingError
from paceline.spec.events import read_events
from paceline.spec.formatting import shell_text
from paceline.spec.rundir import (
    BEST,
    CHECKPOINTS,
    EVENTS,
    MODEL,
    MODEL_CONFIG,
    WEIGHTS,
    checkpoints,
    is_product,
)
from paceline.spec.training.checkpoint_manifest import DamagedCheckpoint, FileEntry, Manifest
from paceline.spec.training.used_weights import best_checkpoint, pointed_checkpoint

MAX_LISTING_BYTES = 64 << 10  # a host may write very many files
_Files = Mapping[str, FileEntry]  # by path in the run directory


def sign(run: Path, saved_weights: str) -> None:
    """Signs the files of the model when a start has ended and its results are here.

    Without a key, or if the files or the signatures cannot be read, it does nothing. Nor for a
    folder without checkpoints, unless a model was saved: then the job is no training of Paceline.

    Args:
        saved_weights: SHA-256 of the weights that this start saved last; empty if it saved none.
    """
    if not (saved_weights or checkpoints(run)):
        return
    file = SignatureFile(run)
    with contextlib.suppress(OSError, DamagedCheckpoint, SettingError):
        files, _ = _list_files(run)
        former = file.read()
        if files == former.model or len(json.dumps(sorted(files))) > MAX_LISTING_BYTES:
            return
        if _may_replace(former.model or {}, files, saved_weights):
            file.append_model(files, former.seal)


def sign_recorded(run: Path) -> None:
    """Signs the model of a fetched run as :func:`sign` does; its events say what was saved."""
    events = read_events(records.read_records(run / EVENTS))
    saved = [event["sha256"] or "" for event in events if event.kind == "model saved"]
    sign(run, saved[-1] if saved else "")


def _may_replace(former: _Files, files: _Files, saved_weights: str) -> bool:
    """Whether a start may have written the files: only one that saves a model changes a model."""
    if saved_weights:
        return WEIGHTS in files and files[WEIGHTS].sha256 == saved_weights
    return MODEL_CONFIG not in {*former, *files}  # a tokenizer, if any


def verify_model(run: Path) -> VerifiedItem | None:
    """Compares the final model with what was signed; ``None`` if there is none.

    Without a signature, the weights are compared with their hash in ``config.json``.
    SettingError if the signatures cannot be read.
    """
    signed = SignatureFile(run).read().model
    if signed and not os.path.lexists(run / MODEL):
        problem = "you signed it, and its folder is gone"
        return VerifiedItem(MODEL, None, problem, False, is_missing=True)
    problem, files, uncovered = "", dict[str, FileEntry](), list[str]()
    try:
        files, uncovered = _list_files(run, reads_weights=True)
        if not files and not signed:
            return None
        problem = _difference(_list_files(run)[0] if signed is None else signed, files)
    except DamagedCheckpoint as damage:
        problem = str(damage)
    except OSError as error:
        problem = f"{error.filename} cannot be read: {error.strerror}"
    is_signed = signed is not None and not problem
    return VerifiedItem(MODEL, Manifest(0, files, {}), problem, is_signed, uncovered=uncovered)


def verify_best_pointer(run: Path) -> VerifiedItem | None:
    """Compares ``best.json`` with the manifests; ``None`` unless it names another checkpoint."""
    pointed, best = pointed_checkpoint(run), best_checkpoint(run)
    if pointed is None or pointed == best:
        return None
    truth = "no manifest says that its checkpoint was the best"
    if best is not None:
        truth = f"according to the manifests, {best.name} is the best"
    problem = (
        f"it names {pointed.name}, but {truth}. A job is about to write it, was killed before it"
        " did, or somebody else changed it. It is not needed: remove it with"
        f" {shell_text(['rm', str(run / CHECKPOINTS / BEST)])}"
    )
    return VerifiedItem(BEST, None, problem, False)


def forget_removed(run: Path) -> list[str]:
    """Removes the signature of a model that is gone: this start does not know it.

    Returns a note if it is gone, or if anything but the content of its weights has changed.
    """
    file = SignatureFile(run)
    signatures = file.read()
    if signatures.model is None:
        return []
    if signatures.model and not os.path.lexists(run / MODEL):
        with contextlib.suppress(OSError):
            file.rewrite(signatures.manifests, None, signatures.problem)
        return ["the final model, which you signed, is missing"]
    try:
        problem = _difference(signatures.model, _list_files(run)[0])
    except (OSError, DamagedCheckpoint) as error:
        problem = str(error)
    look = shell_text(["paceline", "verify", str(run)])
    return [f"the final model was changed: {problem}; see: {look}"] if problem else []


def _list_files(
    run: Path, *, reads_weights: bool = False
) -> tuple[dict[str, FileEntry], list[str]]:
    """Returns the files of the model, and the paths of those that are not covered.

    A script may write a model of its own there: nothing is covered if ``config.json`` does not
    describe a model of a training, and only small files before there is one.
    Raises OSError, or DamagedCheckpoint for a link, whose target can change at any time.

    Args:
        reads_weights: Hashes the weights, too, instead of using the hash in ``config.json``.
    """
    described = (records.read_object(run / MODEL_CONFIG) or {}).get("sha256")
    files, uncovered = dict[str, FileEntry](), list[str]()
    if described is None and os.path.lexists(run / MODEL_CONFIG):
        return files, uncovered
    if (run / MODEL).is_symlink():
        raise DamagedCheckpoint(f"{MODEL} is a link")
    for folder, folders, names in safe_paths.walk(str(run / MODEL)):
        prefix = f"{MODEL}/{folder}/" if folder else f"{MODEL}/"
        for path in [] if described is None else [prefix + name for name in folders]:
            if (run / path).is_symlink():
                raise DamagedCheckpoint(f"{path!r:.100} is a link")
        for path in [prefix + name for name in names]:
            is_foreign = described is None and (not is_product(path) or path == WEIGHTS)
            if Path(path).name.startswith((".nfs", ".DS_Store")) or is_foreign:
                uncovered.append(path)
                continue
            if not records.is_regular(run / path):  # reading a pipe would block
                raise DamagedCheckpoint(f"{path!r:.100} is no plain file")
            is_known = path == WEIGHTS and described is not None and not reads_weights
            sha256 = str(described) if is_known else hash_file(run / path)
            files[path] = FileEntry(sha256, (run / path).stat().st_size)
    return files, uncovered


def _difference(expected: _Files, files: _Files) -> str:
    """Describes the first file that differs; empty if none does."""
    for path in sorted({*expected, *files}):
        if path not in files:
            return f"{path!r:.100} is gone"
        if path not in expected:
            return f"{path!r:.100} was added"
        if files[path] != expected[path]:
            return f"{path!r:.100} is not the file that was written"
    return ""
