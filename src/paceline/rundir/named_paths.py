"""Records which data and weights of this machine the commands of a run named.

A run's ``config.json`` and ``model/config.json`` come from ranks, or from somebody else, and can
name any path. Paths that are not in this sealed file are not sent to hosts on their word.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection
from pathlib import Path

from paceline.agent.files import safe_paths
from paceline.rundir import detached_file, records
from paceline.rundir.directory import write_text
from paceline.spec.errors import SettingError
from paceline.spec.rundir import NAMED_PATHS


def record(run: Path, paths: Collection[str]) -> None:
    """Adds absolute paths to those of a run; without a key for the seal, nothing is recorded."""
    if not paths:
        return
    with contextlib.suppress(OSError, SettingError):
        safe_paths.make_folder(str(run.parent), 0o775)
        run.mkdir(mode=0o700, exist_ok=True)
        content = {"kind": "named", "paths": sorted(read(run) | {*paths})}
        sealed = {**content, detached_file.SEAL: detached_file.make_seal(content, run)}
        write_text(run, NAMED_PATHS, json.dumps(sealed) + "\n")


def read(run: Path) -> frozenset[str]:
    """Returns the paths that this user's commands named for the run; empty without a valid seal."""
    content = records.read_object(run / NAMED_PATHS) or {}
    # other sealed records of the folder, such as batch.json, have no paths
    return frozenset(content.get("paths", ()) if detached_file.has_valid_seal(content, run) else ())


def require_named(run: Path, path: str, remedy: str) -> None:
    """Raises SettingError for an absolute path that only the run's own files name."""
    if path not in read(run):
        raise SettingError(
            f"{run} names {path}, which is not sent to hosts unless you type it",
            found="no command of yours named it for this run, so the name may come from a host"
            " (or the run is older, or was moved)",
            remedy=remedy,
        )
