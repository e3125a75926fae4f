"""The files of this installation that a supervisor needs on its host."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from paceline.launch.nodes.survey import package_tree
from paceline.transfer.tree import Manifest, read_parts

SUPERVISOR_LIBRARIES = ("click",)  # pure Python


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
        manifest += library.manifest
        files |= {str(entry[0]): library.file(str(entry[0])) for entry in library.manifest}
    return manifest, files
