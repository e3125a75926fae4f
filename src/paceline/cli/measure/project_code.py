"""Finds the Python files that a program is made of, to see whether it trains with Paceline."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from paceline.spec.errors import SettingError
from paceline.spec.job import Entry

MAX_FILES = 5000  # of a project that are looked at for the training library
_IMPORTS = re.compile(
    rb"^[ \t]*from[ \t]+paceline\b|^[^#\n]*\bimport(?:_module)?\b[^#\n]*\bpaceline\b", re.MULTILINE
)
_BY_NAME = re.compile(rb"\bimport_module\b|\b__import__\b|\bexec\(|\brunpy\b|\bentry_points\b")
"""So a program imports what its text does not name: every file of the project is looked at then."""


def require_training_library(entry: Entry) -> None:
    """Raises SettingError for a program that cannot be told to end after a few steps."""
    num_read = 0
    for path in itertools.islice(code_files(entry), MAX_FILES):
        num_read += 1
        with contextlib.suppress(OSError):
            if path.is_file() and _IMPORTS.search(path.read_bytes()):
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


def imported_files(script: Path, root: Path) -> list[Path]:
    """Returns a script and all files below a folder that it imports; none if it cannot be read."""
    reached: dict[Path, None] = {}
    pending = [script]
    while pending and len(reached) < MAX_FILES:
        path = pending.pop()
        if path not in reached and (names := imported_names(path)) is not None:
            reached[path] = None
            folders = path.parent, path.parent.parent, script.parent, root, root / "src"
            for name, folder in itertools.product(names, folders):
                module = folder / name.replace(".", "/")
                variants = module.with_name(f"{module.name}.py"), module / "__init__.py"
                pending += filter(Path.is_file, variants)
    return [*reached]


def imported_names(path: Path) -> list[str] | None:
    """Names that a file's text imports, of modules or of what is in them; ``None``: unread."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names += [module, *(f"{module}.{alias.name}".strip(".") for alias in node.names)]
    return [name for name in names if name]


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
        imported = imported_files(script, root)
        yield from imported
        if imported and not any(_BY_NAME.search(path.read_bytes()) for path in imported):
            return
    if is_no_project(root):  # hosts get no more of a home folder
        yield from root.glob("*.py")
    else:
        yield from (root / name for name in files_of(root) if name.endswith(".py"))
