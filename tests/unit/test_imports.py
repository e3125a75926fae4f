"""Tests the imports between Paceline's modules."""

from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

import paceline
from paceline.launch.nodes import survey

ROOT = Path(paceline.__file__).parent


def test_import_graph_has_no_cycles() -> None:
    graph = grimp.build_graph("paceline", cache_dir=None)
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    TopologicalSorter(imports).prepare()  # raises an error that names an import cycle


@pytest.mark.parametrize(
    ("package", "parts"), [("train", survey.OF_TRAIN), ("recipes", survey.OF_RECIPES)]
)
def test_sent_modules_cover_training_imports(package: str, parts: tuple[str, ...]) -> None:
    graph = grimp.build_graph("paceline", cache_dir=None, exclude_type_checking_imports=True)
    imported = graph.find_upstream_modules(f"paceline.{package}", as_package=True)
    sent = [ROOT / part for part in parts]
    missing = {name for name in imported if not any(map(path_of(name).is_relative_to, sent))}
    assert missing == set()


def path_of(module: str) -> Path:
    path = ROOT.parent.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
