"""From ``--data`` to images: where the files are, and who can read them."""

from __future__ import annotations

import importlib
import os
from dataclasses import replace
from pathlib import Path

from paceline.recipes.datasets import NAMED, PLACES, READERS, Named
from paceline.recipes.datasets.images import ImageData, Request, with_validation
from paceline.recipes.sources import is_hub_id
from paceline.spec import jobenv
from paceline.spec.errors import DataError


def load(data_dir: str, request: Request) -> ImageData:
    """Reads the data set that ``request.source`` names.

    Args:
        data_dir: Where to look for the files of a named set first; may be empty.
        request: Name or path of the data set, and how to prepare it.

    Raises:
        DataError: Not found, unreadable or unfit.
    """
    named = NAMED.get(request.source)
    if named is not None and not named.folders:
        return with_validation(_module(named.reader).dummy(request), request)
    if named is None:
        return _from_path(Path(request.source).expanduser(), request)
    folder = _folder(named, data_dir)
    return _read(named.reader, folder, replace(request, classes=named.classes))


def _from_path(path: Path, request: Request) -> ImageData:
    if is_hub_id(request.source):
        made: ImageData = _module("hub_images").read(request.source, request)
        return with_validation(made, request)
    if not path.is_dir():
        raise DataError(
            f"--data {request.source}: no such folder",
            found=f"{path.absolute()} is a file" if path.exists() else missing(path),
            remedy=f"a folder of images, or one of {', '.join(NAMED)}"
            if not launched()
            else f"a folder must be on every host at the same path: copy it there (rsync -a"
            f" {path}/ HOST:{path}/), or put it on a disk that all hosts share",
        )
    fits = (name for name in READERS if _module(name).matches(path))
    return _read(next(fits), path, request)


def launched() -> bool:
    """Whether this is a rank of ours: the data may be there on other hosts only."""
    return bool(os.environ.get(jobenv.HOST))


def missing(path: Path) -> str:
    """That there is no such path, and on which host."""
    host = os.environ.get(jobenv.HOST)
    return f"no {path.absolute()}" + (f" on {host}" if host else "")


def _folder(named: Named, data_dir: str) -> Path:
    for folder in _candidates(named, data_dir):
        if _module(named.reader).matches(folder):
            return folder
    places = [data_dir] if data_dir else [*PLACES]
    raise DataError(
        f"the files of {named.name} were not found",
        found=f"looked under {', '.join(places)}",
        remedy=named.get,
    )


def _candidates(named: Named, data_dir: str) -> list[Path]:
    """With --data-dir only there, so that a wrong one is not passed over silently."""
    if data_dir:
        root = Path(data_dir).expanduser()
        return [root, *(root / name for name in named.folders)]
    return [Path(place).expanduser() / name for place in PLACES for name in named.folders]


def _read(reader: str, folder: Path, request: Request) -> ImageData:
    data: ImageData = _module(reader).read(folder, request)
    return with_validation(data, request)


def _module(reader: str):  # type: ignore[no-untyped-def]
    return importlib.import_module(f"paceline.recipes.datasets.{reader}")
