"""No files import one another in a circle; the layers of import-linter's contract only compare packages."""

from graphlib import CycleError, TopologicalSorter

import grimp


def test_files_import_in_no_circle() -> None:
    graph = grimp.build_graph("fuligo", cache_dir=None)
    order = TopologicalSorter({module: graph.find_modules_directly_imported_by(module) for module in graph.modules})
    try:
        order.prepare()
    except CycleError as error:
        raise AssertionError("imports in a circle: " + " <- ".join(error.args[1])) from None
