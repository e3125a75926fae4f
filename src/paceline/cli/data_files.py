"""Data files of the launching machine, for jobs on hosts that do not see them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def gathered(names: Sequence[str]) -> Iterator[str]:
    """A folder with links to those names that are files here; empty text when none is.

    The folder is an input of the job: it travels to hosts, where the links are files. Recipes look
    there for the file names of their data first.
    """
    paths = [Path(name).expanduser().absolute() for name in names if name]
    found = [path for path in dict.fromkeys(paths) if path.is_file()]
    different = len({path.name for path in found}) == len(found)
    if not found or not different:  # two files of one name cannot lie in one folder
        yield ""
        return
    with tempfile.TemporaryDirectory(prefix="paceline-data-") as folder:
        for path in found:
            (Path(folder) / path.name).symlink_to(path)
        yield folder
