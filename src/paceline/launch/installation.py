"""The files of this installation that a supervisor needs on its host."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from paceline.launch.nodes.survey import package_tree
from paceline.transfer.tree import Manifest, read_parts

SUPERVISOR_LIBRARIES = ("click",)  # pure Python
IGNORED_FOLDERS = ("__pycache__",)


def installation() -> tuple[Manifest, dict[str, Path]]:
    """Returns manifest and files of this installation and of the libraries a supervisor needs."""
    tree = package_tree(True)
    manifest = list(tree.manifest)
    files = {str(entry[0]): tree.file(str(entry[0])) for entry in manifest}
    for name in SUPERVISOR_LIBRARIES:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        folder = Path(spec.origin).parent
        library = read_parts(folder.parent, [folder.name])
        for entry in library.manifest:
            if not set(str(entry[0]).split("/")) & set(IGNORED_FOLDERS):
                manifest.append(entry)
                files[str(entry[0])] = library.file(str(entry[0]))
    return manifest, files
