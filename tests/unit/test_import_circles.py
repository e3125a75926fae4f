"""No module of ours imports itself by way of others, not even lazily or for its types only."""

from graphlib import TopologicalSorter

import grimp


def test_there_are_no_import_circles() -> None:
    graph = grimp.build_graph("paceline", cache_dir=None)
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    TopologicalSorter(imports).prepare()  # names a circle that it finds
