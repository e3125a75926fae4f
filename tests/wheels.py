"""Builds the package's distributions, and wheels of its dependencies for offline installation."""

from __future__ import annotations

import importlib.metadata as metadata
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.tags import parse_tag, sys_tags

REPOSITORY = Path(__file__).parents[1]


@dataclass(frozen=True)
class Distributions:
    """The files that are published on PyPI.

    Attributes:
        sdist: Source archive.
        wheel: Wheel, built from the source archive.
    """

    sdist: Path
    wheel: Path


def build_distributions(folder: Path) -> Distributions:
    """Builds the source archive, and from it the wheel, with the installed build backend."""
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), "."],
        cwd=REPOSITORY, check=True, capture_output=True,
    )  # fmt: skip
    (sdist,) = folder.glob("*.tar.gz")
    (wheel,) = folder.glob("*.whl")
    return Distributions(sdist, wheel)


def write_wheelhouse(wheel: Path, folder: Path) -> None:
    """Writes a wheel of every dependency of ``wheel``, packed from this environment.

    ``pip install --no-index --find-links FOLDER`` then resolves the dependencies from the metadata
    as with PyPI.

    Args:
        wheel: Its requirements without extras, and theirs in turn, are packed.
        folder: An existing folder.
    """
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    field = "Requires-Dist: "
    pending = list(_requirements([line.removeprefix(field) for line in lines if field in line]))
    packed: set[str] = set()
    while pending:
        name = pending.pop().lower()
        if name not in packed:
            packed.add(name)
            distribution = metadata.distribution(name)
            _pack(distribution, folder)
            pending += _requirements(distribution.requires or [])


def _requirements(lines: Sequence[str]) -> Iterator[str]:
    for requirement in map(Requirement, lines):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement.name


def _pack(distribution: metadata.Distribution, folder: Path) -> None:
    """Packs an installed distribution as a wheel, without scripts and compiled modules."""
    tags = [
        tag
        for line in (distribution.read_text("WHEEL") or "").splitlines()
        if line.startswith("Tag: ")
        for tag in parse_tag(line.removeprefix("Tag: "))
    ]
    tag = next(tag for tag in sys_tags() if tag in tags)
    stem = distribution.metadata["Name"].replace("-", "_")
    with zipfile.ZipFile(folder / f"{stem}-{distribution.version}-{tag}.whl", "w") as archive:
        for file in distribution.files or []:
            if ".." not in file.parts and file.suffix != ".pyc":
                archive.write(str(file.locate()), str(file))
