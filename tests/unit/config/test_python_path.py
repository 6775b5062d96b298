"""PYTHONPATH of `--env` adds to the inherited one."""

import pytest

from fuligo.config.python_path import with_inherited_path


@pytest.mark.parametrize(
    ("given", "inherited", "expected"),
    [
        ({"A": "1"}, {"PYTHONPATH": "/fuligo"}, {"A": "1"}),
        ({"PYTHONPATH": "/code"}, {}, {"PYTHONPATH": "/code"}),
        ({"PYTHONPATH": "/code/:"}, {"PYTHONPATH": "/fuligo:/more"}, {"PYTHONPATH": "/code/:/fuligo:/more"}),
        ({"PYTHONPATH": "/code:/more"}, {"PYTHONPATH": "/code:/more:/fuligo"}, {"PYTHONPATH": "/code:/more:/fuligo"}),
    ],
)
def test_inherited_directories_come_last(given: dict[str, str], inherited: dict[str, str], expected: dict[str, str]) -> None:
    assert with_inherited_path(given, inherited) == expected
    assert with_inherited_path(expected, inherited) == expected
