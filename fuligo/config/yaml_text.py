"""Reader of untrusted YAML, with limits on length, depth and the number of values after aliases are expanded."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import SafeConstructor

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's loader if PyYAML was built with it: the same result, faster."""
MAX_CHARACTERS = 2**20
MAX_NODES = 100_000
"""Maximum number of values of a document once its aliases are expanded."""
MAX_DEPTH = 100


def read_yaml_text(path: Path) -> str:
    """Read a YAML file of at most `MAX_CHARACTERS` characters.

    Raises OSError if it cannot be read and ValueError if it is not UTF-8 or too long, or the path is not valid.
    """
    with path.open(encoding="utf-8") as file:
        text = file.read(MAX_CHARACTERS + 1)
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"it has more than {MAX_CHARACTERS:,} characters")
    return text


def compose(text: str) -> yaml.Node | None:
    """Return the root of a document, None if it is empty.

    Raises YAMLError if it is not YAML, or too large or too deep once its aliases are expanded.
    """
    try:
        # Checked before the text is composed, which recurses in C: beyond some depth the process would be killed.
        depth = 0
        for event in yaml.parse(text, _LOADER):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise _too_deep(event)
        root = yaml.compose(text, _LOADER)
        if root is not None:
            _count(root, {}, 0)
    except (ValueError, RecursionError) as error:
        raise yaml.YAMLError(" ".join(str(error).split())) from None
    return root


def construct(node: yaml.Node) -> Any:
    """Return the plain value of a node: mappings, lists and scalars. Raises YAMLError if a value does not fit its tag."""
    try:
        return SafeConstructor().construct_document(node)
    except (ValueError, ArithmeticError, LookupError, AttributeError, TypeError, RecursionError) as error:  # PyYAML lets them through
        problem = " ".join(str(error).split()) if isinstance(error, ValueError | RecursionError) else "a value does not fit its tag"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None


def entries(node: yaml.MappingNode, file: Path, problems: list[str]) -> Iterator[tuple[str, yaml.Node, str]]:
    """Yield key, value node and place of each entry; report a repeated key, since YAML does not define which value counts."""
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        key, line = str(key_node.value), key_node.start_mark.line + 1
        if key in seen:
            problems.append(f"{file} line {line}: {key} is already given in line {seen[key]}")
        else:
            seen[key] = line
            yield key, value_node, f"{file} line {line}"


def load(text: str) -> Any:
    """Return the plain value of a document, None if it is empty. Raises YAMLError as `compose` and `construct` do."""
    root = compose(text)
    return None if root is None else construct(root)


def yaml_problem(error: Exception) -> str:
    """Describe a YAML error and its position, without quoting the file, which may contain secrets."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return " ".join(str(error).split())
    mark = error.problem_mark or error.context_mark
    problem = ", ".join(part for part in (error.context, error.problem) if part)
    if problem.endswith("cannot start any token"):
        problem += ": a tab, @, ` or %; indent with spaces, and put text that begins like this in quotes"
    return problem if mark is None else f"{problem} (line {mark.line + 1}, column {mark.column + 1})"


def _too_deep(place: yaml.Event | yaml.Node) -> yaml.YAMLError:
    return yaml.MarkedYAMLError(problem=f"values are nested more than {MAX_DEPTH} deep", problem_mark=place.start_mark)  # pyrefly: ignore[bad-argument-type]


def _count(node: yaml.Node, counted: dict[int, int], depth: int) -> int:
    """Return the number of values of a node with expanded aliases; each node is visited once."""
    if depth > MAX_DEPTH:  # also a node that contains itself
        raise _too_deep(node)
    if id(node) not in counted:
        children = [part for entry in node.value for part in entry] if isinstance(node, yaml.MappingNode) else node.value
        below = children if isinstance(node, yaml.CollectionNode) else []
        counted[id(node)] = 1 + sum(_count(child, counted, depth + 1) for child in below)
    if counted[id(node)] > MAX_NODES:
        raise yaml.MarkedYAMLError(
            problem=f"it holds more than {MAX_NODES:,} values once its aliases are expanded", problem_mark=node.start_mark
        )
    return counted[id(node)]
