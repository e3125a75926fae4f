"""What a script imports of its project, and whether that imports Paceline; nothing is run."""

from __future__ import annotations

import ast
import contextlib
import itertools
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

MAX_FILES = 5000  # of a project that are looked at
_IMPORTS_PACELINE = re.compile(
    rb"^[ \t]*from[ \t]+paceline\b|^[^#\n]*\bimport(?:_module)?\b[^#\n]*\bpaceline\b", re.MULTILINE
)


def imports_paceline(path: Path) -> bool:
    """Whether the text of a file imports ``paceline``."""
    with contextlib.suppress(OSError):
        return path.is_file() and _IMPORTS_PACELINE.search(path.read_bytes()) is not None
    return False


def imported_files(script: Path, root: Path) -> Iterator[Path]:
    """Yields a script and the project's files that it imports, directly or not.

    They are beside or above the importing file, beside the script, or below ``root``. Yields
    nothing if the script cannot be read.
    """
    visited = set[Path]()
    pending = [script]
    while pending and len(visited) < MAX_FILES:
        path = pending.pop()
        if path not in visited and (names := imported_names(path)) is not None:
            visited.add(path)
            yield path
            folders = path.parent, path.parent.parent, script.parent, root, root / "src"
            for name, folder in itertools.product(names, folders):
                module = folder / name.replace(".", "/")
                variants = module.with_name(f"{module.name}.py"), module / "__init__.py"
                pending += filter(Path.is_file, variants)


def imported_names(path: Path) -> list[str] | None:
    """Names that a file's text imports, of modules or of what is in them; ``None``: unread."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python shows them in the ranks
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names += [module, *(f"{module}.{alias.name}".strip(".") for alias in node.names)]
    parents = (".".join(parts[:depth]) for name in names if (parts := name.split("."))
               for depth in range(1, len(parts) + 1))  # fmt: skip
    return [*filter(None, dict.fromkeys(parents))]  # Python imports each package on the way
