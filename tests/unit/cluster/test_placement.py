"""A run takes the nodes and GPUs that `fuligo plan` draws."""

from pathlib import Path

import pytest

from fuligo.cluster.node import prepare_environment
from fuligo.cluster.placement import EnginePart, engine_parts, place, require_slots
from fuligo.config.command_line import parse
from fuligo.config.launcher import chosen_launcher
from fuligo.errors import ConfigError
from fuligo.planner.gpus import GPUS
from fuligo.planner.layout import make_layout
from fuligo.planner.plan import ClusterLayout
from fuligo.planner.subject import read_subject
from tests.cluster_recipes import CLUSTER_RECIPES


def placed(flags: str):
    return place(parse(f"--hf-checkpoint m --prompt-data d {flags}".split()).config)


def drawn(layout: ClusterLayout) -> tuple[list[tuple[int, int]], dict[int, list[tuple[int, int]]]]:
    """Return (node, index) of each trainer rank and of each engine's ranks in the plan."""
    trainers = {gpu.trainer.rank: (gpu.node, gpu.local_index) for gpu in layout.gpus if gpu.trainer is not None}
    engines: dict[int, dict[int, tuple[int, int]]] = {}
    for gpu in layout.gpus:
        if gpu.engine is not None:
            engines.setdefault(gpu.engine.engine, {})[gpu.engine.rank] = (gpu.node, gpu.local_index)
    return [trainers[rank] for rank in sorted(trainers)], {n: [ranks[r] for r in sorted(ranks)] for n, ranks in engines.items()}


@pytest.mark.parametrize("recipe", CLUSTER_RECIPES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_recipe_runs_where_its_plan_draws_it(recipe: Path) -> None:
    config = parse(["--config", str(recipe)]).config
    ranks, engines = drawn(make_layout(read_subject(config, next(iter(GPUS)))))
    placement = place(config)
    assert list(placement.ranks) == ranks
    assert {number: list(slots) for number, slots in enumerate(placement.engines)} == engines
    assert set(placement.node_sizes) == {8}


def test_trainer_first_then_engines() -> None:
    placement = placed("--actor-num-gpus-per-node 2 --rollout-num-gpus 4 --rollout-num-gpus-per-engine 2")
    assert placement.node_sizes == (6,)
    assert placement.ranks == ((0, 0), (0, 1))
    assert placement.engines == (((0, 2), (0, 3)), ((0, 4), (0, 5)))


def test_engines_share_the_trainers_slots_when_colocated() -> None:
    placement = placed("--rollout-backend sglang --colocate --actor-num-gpus-per-node 4 --rollout-num-gpus-per-engine 2")
    assert placement.node_sizes == (4,)
    assert placement.engines == (((0, 0), (0, 1)), ((0, 2), (0, 3)))


def test_a_rank_on_each_of_two_nodes() -> None:
    placement = placed("--device cpu --actor-num-nodes 2 --actor-num-gpus-per-node 1")
    assert placement.node_sizes == (1, 1)
    assert placement.ranks == ((0, 0), (1, 0))


def test_an_engine_of_two_nodes_has_equal_parts() -> None:
    engine = placed("--actor-num-gpus-per-node 8 --rollout-num-gpus 16 --rollout-num-gpus-per-engine 16").engines[0]
    assert engine_parts(engine, name="engine 0") == (EnginePart(1, tuple(range(8))), EnginePart(2, tuple(range(8))))


def test_an_engine_of_unequal_parts_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot place engine 1: it would have 1 and 3 GPUs on its nodes"):
        placed("--actor-num-gpus-per-node 3 --rollout-num-gpus 8 --rollout-num-gpus-per-engine 4")


@pytest.mark.parametrize(
    ("flags", "environment", "launcher"),
    [
        ("", {}, "local"),
        ("", {"RAY_ADDRESS": "10.0.0.1:6379"}, "ray"),
        ("--launcher local", {"RAY_ADDRESS": "10.0.0.1:6379"}, "local"),
        ("--launcher ray", {}, "ray"),
        ("--actor-num-nodes 2", {}, "ray"),
        ("--actor-num-nodes 2", {"WORLD_SIZE": "16", "RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "local"),
        ("--actor-num-gpus-per-node 8 --rollout-num-gpus 8", {}, "ray"),
    ],
)
def test_chosen_launcher(flags: str, environment: dict[str, str], launcher: str) -> None:
    assert chosen_launcher(parse(f"--hf-checkpoint m --prompt-data d {flags}".split()).config, environment) == launcher


def test_a_cluster_that_starts_here_has_a_token_of_its_own() -> None:
    first, second, joined = {}, {}, {"RAY_ADDRESS": "10.0.0.1:6379"}
    for environment in (first, second, joined):
        prepare_environment(several_nodes=False, environment=environment)
    assert first["RAY_AUTH_MODE"] == "token"
    assert first["RAY_AUTH_TOKEN"] != second["RAY_AUTH_TOKEN"]
    assert "RAY_AUTH_TOKEN" not in joined, "the user's, or none"


@pytest.mark.parametrize(
    ("given", "makes_one"),
    [
        ({"RAY_AUTH_MODE": "token"}, True),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "theirs"}, False),
        ({"RAY_AUTH_TOKEN_PATH": "/theirs"}, False),
        ({"RAY_AUTH_MODE": "disabled"}, False),
    ],
)
def test_prepare_environment_keeps_the_users_settings(given: dict[str, str], makes_one: bool) -> None:
    environment = dict(given)
    prepare_environment(several_nodes=False, environment=environment)
    assert (environment.get("RAY_AUTH_TOKEN") != given.get("RAY_AUTH_TOKEN")) == makes_one
    assert environment.items() >= given.items()


@pytest.mark.parametrize(
    ("needed", "slots"), [((8, 8), {"a": 8}), ((8, 4), {"a": 4, "b": 4}), ((1, 1), {"a": 2, "b": 0}), ((2,), {"a": 1, "b": 1})]
)
def test_too_few_hosts_or_slots_are_named(needed: tuple[int, ...], slots: dict[str, int]) -> None:
    with pytest.raises(ConfigError) as raised:
        require_slots(needed, slots)
    assert f"needs {', '.join(map(str, needed))} slots on {len(needed)} host" in str(raised.value)
    assert all(f"{host} {number}" in str(raised.value) for host, number in slots.items())


@pytest.mark.parametrize(("needed", "slots"), [((8, 4), {"a": 4, "b": 8}), ((1,), {"a": 0, "b": 1}), ((2, 2), {"a": 2, "b": 2, "c": 8})])
def test_hosts_with_enough_slots_are_accepted(needed: tuple[int, ...], slots: dict[str, int]) -> None:
    require_slots(needed, slots)
