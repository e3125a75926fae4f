"""Finds the Python files that a program is made of, to see whether it trains with Paceline."""

from __future__ import annotations

import importlib.util
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from paceline.launch.planning.imports import MAX_FILES, imported_files, imports_paceline
from paceline.spec.errors import SettingError
from paceline.spec.job import Entry

_BY_NAME = re.compile(rb"\bimport_module\b|\b__import__\b|\bexec\(|\brunpy\b|\bentry_points\b")
"""So a program imports what its text does not name: every file of the project is looked at then."""


def require_training_library(entry: Entry) -> None:
    """Raises SettingError for a program that cannot be told to end after a few steps."""
    num_read = 0
    for path in itertools.islice(code_files(entry), MAX_FILES):
        num_read += 1
        if imports_paceline(path):
            return
    if num_read == MAX_FILES:  # the rest may import it: the first steps will tell
        return
    raise SettingError(
        f"{entry.target} does not train with paceline.train, so nothing tells what a step is",
        found="it does not import paceline, nor does any file of its project that it imports",
        remedy="paceline bench scaling measures any script with a fixed number of steps;"
        " or use train.join, session.loader and session.step in it"
        " (docs/tutorial/training-session.md)",
    )


def code_files(entry: Entry) -> Iterator[Path]:
    """Returns the program and the Python files of its code as it is sent to hosts."""
    from paceline.transfer.tree import files_of, folder_root, is_no_project, script_path

    cwd = Path.cwd()
    root = folder_root(cwd)
    if entry.kind == "module":
        spec = importlib.util.find_spec(entry.target.partition(".")[0])
        origin = Path((spec and spec.origin) or "nowhere")
        yield from origin.parent.rglob("*.py") if origin.name == "__init__.py" else [origin]
    else:
        script = script_path(entry, str(cwd))
        root = root if script.is_relative_to(root) else folder_root(script.parent)
        imported = [*imported_files(script, root)]
        yield from imported
        if imported and not any(_BY_NAME.search(path.read_bytes()) for path in imported):
            return
    if is_no_project(root):  # hosts get no more of a home folder
        yield from root.glob("*.py")
    else:
        yield from (root / name for name in files_of(root) if name.endswith(".py"))
