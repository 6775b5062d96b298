"""Random single mistakes in a recipe, as a user may type them."""

import functools
import random
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fuligo.config.flag import Flag, Kind
from fuligo.config.flags import flags
from fuligo.config.schemas import schema
from tests.unit.planner.sizes_oracle import Recipe, read_recipe

PASSED_ON = ("sglang", "router", "megatron")


@dataclass(frozen=True, slots=True)
class Mutation:
    """Arguments of a run with one mistake."""

    kind: str
    named: tuple[str, ...]
    """Texts of which a message must contain one: the flag or key as typed."""
    arguments: tuple[str, ...]
    """Arguments beside `--config FILE`."""
    file: dict[str, Any]
    """Content of the config file."""


@dataclass(frozen=True, slots=True)
class Given:
    """Value given by the recipe."""

    flag: Flag
    value: Any

    @property
    def words(self) -> list[str]:
        """Return the flag as typed."""
        if self.value is True or self.value is False:
            return [self.flag.option if self.value else f"--no-{self.flag.option.removeprefix('--')}"]
        return [self.flag.option, *map(str, self.value if isinstance(self.value, list) else [self.value])]


def read(path: Path) -> dict[str, Any]:
    """Return the recipe's config with absolute paths."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    content["model"]["model_config_file"] = str((path.parent / content["model"]["model_config_file"]).resolve())
    return content


def mutations(path: Path, number: int, seed: int) -> Iterator[Mutation]:
    """Return `number` mistakes, cycling through the kinds; deterministic for a seed."""
    draw = random.Random(f"{path.parent.name}/{path.name} {seed}")
    recipe = read_recipe(read(path))
    kinds = (typo, typo_in_file, wrong_type, outside, size_that_does_not_divide, wrong_backend, duplicate)
    made = 0
    while made < number:
        mutation = kinds[made % len(kinds)](recipe, draw)
        if mutation is not None:
            made += 1
            yield mutation


def other_sizes_that_fit(path: Path, number: int, seed: int) -> Iterator[list[str]]:
    """Draw flags that change one size of a recipe such that everything still divides."""
    draw = random.Random(f"{path.parent.name}/{path.name} {seed}")
    recipe = read_recipe(read(path))
    names = [name for name in recipe.size_names() if " " not in name]
    made = 0
    while made < number:
        name = draw.choice(names)
        other = draw.choice([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, recipe.size(name)])
        if recipe.resized(name, other).fits():
            made += 1
            yield [_option_of_size(name), str(other)]


def _option_of_size(name: str) -> str:
    return (schema("sglang").flags[name.removeprefix("sglang_")] if name.startswith("sglang_") else flags()[name]).option


def _given(recipe: Recipe) -> list[Given]:
    found = []
    for group, values in recipe.file.items():
        known = schema(group).flags if group in PASSED_ON else flags()
        found += [Given(known[name], value) for name, value in values.items() if name in known and not isinstance(value, dict)]
    return [given for given in found if given.flag.kind is not Kind.TOPOLOGY]


def _chosen(recipe: Recipe, draw: random.Random, suits: Callable[[Given], bool]) -> Given:
    return draw.choice([given for given in _given(recipe) if suits(given)])


def _misspelt(name: str, draw: random.Random) -> str:
    """Omit, double, change or swap one letter; neither the first nor a dash."""
    places = [i for i, letter in enumerate(name[:-1]) if i > 1 and letter not in "-_" and name[i + 1] not in "-_"]
    i = draw.choice(places)
    other = draw.choice([letter for letter in string.ascii_lowercase if letter != name[i]])
    return draw.choice([name[:i] + name[i + 1 :], name[:i] + name[i] + name[i:], name[:i] + other + name[i + 1 :], _swapped(name, i)])


def _swapped(name: str, i: int) -> str:
    return name[:i] + name[i + 1] + name[i] + name[i + 2 :]


def typo(recipe: Recipe, draw: random.Random) -> Mutation | None:
    given = _chosen(recipe, draw, lambda given: len(given.flag.option) > 6)
    option = _misspelt(given.flag.option, draw)
    if option == given.flag.option or option.removeprefix("--").replace("-", "_") in _known_names():
        return None
    return Mutation("typo", (option,), (option, *given.words[1:]), recipe.file)


def typo_in_file(recipe: Recipe, draw: random.Random) -> Mutation | None:
    given = _chosen(recipe, draw, lambda given: len(given.flag.name) > 5)
    group, name = given.flag.group, given.flag.name
    group = next(each for each in recipe.file if name in recipe.file[each] and (each == group or each not in PASSED_ON))
    wrong = _misspelt(name, draw)
    if wrong == name or wrong in _known_names():
        return None
    values = {(wrong if key == name else key): value for key, value in recipe.file[group].items()}
    return Mutation("typo in the file", (wrong,), (), {**recipe.file, group: values})


def wrong_type(recipe: Recipe, draw: random.Random) -> Mutation | None:
    numbers = (Kind.INT, Kind.FLOAT, Kind.BOOL, Kind.SIZE, Kind.INT_LIST)
    given = _chosen(recipe, draw, lambda given: given.flag.kind in numbers)
    value = draw.choice(["eight", "1.5.2", "1e", "yes please", "--", "4 GPUs", "0x10g"])
    return Mutation("wrong type", (given.flag.option,), (f"{given.flag.option}={value}",), recipe.file)


def outside(recipe: Recipe, draw: random.Random) -> Mutation | None:
    given = _chosen(recipe, draw, lambda given: bool(given.flag.choices or given.flag.bounds) and not given.flag.kind.is_list)
    if given.flag.choices:
        value = _misspelt(f"{draw.choice(given.flag.choices)}ish", draw)
        if value in given.flag.choices:
            return None
    else:
        value = str(draw.choice([-7, -2, -1.5 if given.flag.kind is Kind.FLOAT else -20]))
    return Mutation("outside", (given.flag.option,), (f"{given.flag.option}={value}",), recipe.file)


def size_that_does_not_divide(recipe: Recipe, draw: random.Random) -> Mutation | None:
    name = draw.choice(recipe.size_names())
    size = recipe.size(name)
    other = draw.choice([number for number in range(1, 2 * size + 4) if number != size])
    changed = recipe.resized(name, other)
    if changed.fits():
        return None
    if changed.file is not recipe.file:
        return Mutation("size", ("--sglang-config", name), (), changed.file)
    option = _option_of_size(name)
    return Mutation("size", (option,), (option, str(other)), recipe.file)


def wrong_backend(recipe: Recipe, draw: random.Random) -> Mutation | None:
    """Return an argument with a wrong or missing prefix, or of a backend that does not run."""
    ours, sglang, router, megatron = flags(), *(schema(group) for group in PASSED_ON)
    known_to_router = {*router.flags, *router.aliases}
    known_to_sglang = {*sglang.flags, *sglang.aliases}
    name = draw.choice(sorted(sglang.flags))
    foreign = draw.choice(sorted(megatron.flags))
    option, is_foreign = draw.choice(
        [
            (f"--{name}", name not in _known_names()),
            (f"--router-{name}", name not in known_to_router),
            (f"--sglang-{foreign}", foreign not in known_to_sglang),
            *[(f"--{each}", True) for each in ours if each.startswith("embedded_") or each == "gradient_checkpointing"],
        ]
    )
    option = option.replace("_", "-")
    values = {"--gradient-checkpointing": [], "--embedded-dtype": ["fp32"]}
    return Mutation("wrong backend", (option,), (option, *values.get(option, ["3"])), recipe.file) if is_foreign else None


def duplicate(recipe: Recipe, draw: random.Random) -> Mutation | None:
    kinds = (Kind.INT, Kind.FLOAT, Kind.BOOL, Kind.CHOICE, Kind.TEXT)
    given = _chosen(recipe, draw, lambda given: given.flag.kind in kinds and len(given.flag.choices) != 1)
    match given.flag.kind:
        case Kind.BOOL:
            other: Any = not given.value
        case Kind.CHOICE:
            other = draw.choice([choice for choice in given.flag.choices if choice != given.value])
        case Kind.TEXT:
            other = f"{given.value}-2"
        case _:
            other = given.value * 2 if given.value else 1
    return Mutation("duplicate", (given.flag.option,), (*Given(given.flag, other).words, *given.words), recipe.file)


@functools.cache
def _known_names() -> set[str]:
    """Return every valid name of a flag."""
    names = set(flags())
    for group in PASSED_ON:
        prefix = "" if group == "megatron" else f"{group}_"
        names |= {prefix + name for name in (*schema(group).flags, *schema(group).aliases)}
    return names | {f"no_{name}" for name in names}
