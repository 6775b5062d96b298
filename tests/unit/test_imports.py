"""Import rules that import-linter's contracts, which only compare packages, cannot state."""

import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp

import fuligo


def test_files_import_in_no_circle() -> None:
    graph = grimp.build_graph("fuligo", cache_dir=None)
    order = TopologicalSorter({module: graph.find_modules_directly_imported_by(module) for module in graph.modules})
    try:
        order.prepare()
    except CycleError as error:
        raise AssertionError("imports in a circle: " + " <- ".join(error.args[1])) from None


def test_names_of_transformers_are_imported_from_their_modules() -> None:
    """The package itself lists the modules of all models: 2,000 files, which would take a quarter of the type checker's time."""
    of_the_package = re.compile(r"^ *(from transformers import|import transformers)\b", re.MULTILINE)
    root = Path(fuligo.__file__).parent
    assert [file for file in root.rglob("*.py") if of_the_package.search(file.read_text())] == []
