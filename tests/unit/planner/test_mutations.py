"""Nearly every single mistake in a recipe causes an error or a warning that names it; none ends in a traceback."""

from collections import Counter
from pathlib import Path

import pytest
import yaml
from _pytest.mark import ParameterSet

from fuligo.config.command_line import parse
from fuligo.errors import ConfigError
from fuligo.planner.check import violations
from fuligo.planner.subject import read_subject
from tests.cluster_recipes import CLUSTER_RECIPES, gpu_of
from tests.unit.planner.mutations import Mutation, mutations, other_sizes_that_fit, read
from tests.unit.planner.sizes_oracle import read_recipe

NUM_MUTATIONS = 120
MIN_CAUGHT = 0.97
NUM_SIZES = 20
FAST = {"glm4-9b/separate", "glm4.5-355b/fp8", "glm4.7-flash/2x8", "glm5.2-744b/config", "gpt-oss-20b/config", "qwen3-4b/config"}
"""Recipes with and without experts, with sparse attention, in FP8, with separate engines; the others have mistakes of the same kinds."""


def recipe_of(path: Path) -> ParameterSet:
    """Return the recipe as a parameter, slow unless `FAST` names it."""
    name = f"{path.parent.name}/{path.stem}"
    return pytest.param(path, id=name, marks=() if name in FAST else pytest.mark.slow)


DIVISIBILITY = {
    "CFG-GLOBAL-BATCH",
    "CFG-NUM-STEPS",
    "PLAN-TRAINER-GPUS",
    "PLAN-EXPERT-GPUS",
    "PLAN-TP-HEADS",
    "PLAN-EP-EXPERTS",
    "PLAN-PP-LAYERS",
    "PLAN-DSA-STAGE-START",
    "PLAN-SERVER-GPUS",
    "PLAN-ENGINE-GPUS",
    "PLAN-ENGINE-NODES",
    "PLAN-DP-SIZE",
    "PLAN-ENGINE-HEADS",
    "PLAN-DENSE-TP",
    "PLAN-ENGINE-EP",
    "PLAN-ENGINE-EXPERTS",
}
"""Rules about divisibility."""


def messages(mutation: Mutation, folder: Path, gpu: str) -> list[str]:
    """Return all messages to the user."""
    file = folder / f"{id(mutation.file)}.yaml"
    if not file.exists():
        file.write_text(yaml.safe_dump(mutation.file), encoding="utf-8")
    try:
        parsed = parse(["--config", str(file), *mutation.arguments])
        said = list(parsed.warnings)
        if not _names(mutation, said):
            said += [f"{finding.text} {finding.advice}" for finding in violations(read_subject(parsed.config, gpu))]
    except ConfigError as error:
        return list(error.problems)
    return said


def _names(mutation: Mutation, said: list[str]) -> bool:
    return any(name in text for text in said for name in mutation.named)


@pytest.mark.long
@pytest.mark.parametrize("recipe", map(recipe_of, CLUSTER_RECIPES))
def test_single_mistakes_are_found_and_named(recipe: Path, tmp_path: Path) -> None:
    drawn = list(mutations(recipe, NUM_MUTATIONS, seed=1))
    survivors = [mutation for mutation in drawn if not _names(mutation, messages(mutation, tmp_path, gpu_of(recipe)))]
    shown = [(mutation.kind, mutation.named, mutation.arguments) for mutation in survivors]
    assert len(survivors) <= (1 - MIN_CAUGHT) * NUM_MUTATIONS, shown
    assert min(Counter(mutation.kind for mutation in drawn).values()) >= NUM_MUTATIONS // 10


@pytest.mark.parametrize("recipe", map(recipe_of, CLUSTER_RECIPES))
def test_sizes_that_divide_are_not_refused(recipe: Path, tmp_path: Path) -> None:
    for arguments in other_sizes_that_fit(recipe, NUM_SIZES, seed=1):
        config = parse(["--config", str(recipe), *arguments]).config
        refused = {finding.id for finding in violations(read_subject(config, gpu_of(recipe)))} & DIVISIBILITY
        assert not refused, arguments


@pytest.mark.parametrize("recipe", CLUSTER_RECIPES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_arithmetic_of_the_mutations_agrees_with_the_recipe(recipe: Path) -> None:
    assert read_recipe(read(recipe)).fits()


def test_there_are_recipes() -> None:
    assert len(CLUSTER_RECIPES) >= 9
