"""Ranks, stages and engines: against Megatron-Core's own groups, and as properties of all valid layouts."""

import io
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from fuligo.config import Config
from fuligo.errors import ConfigError
from fuligo.layout.megatron import Layout
from fuligo.planner.estimate import estimate
from fuligo.planner.layout import Cut, make_layout, stages, trainer_ranks
from fuligo.planner.plan import TrainerRank
from fuligo.planner.report import print_report
from tests.unit.planner.hand_made_plans import plan_of_8
from tests.unit.planner.subjects import FLASH_16, GLM4_9B_COLOCATED, GLM4_9B_SEPARATE, GLM45_BF16, glm52, subject_of

MEGATRON = json.loads((Path(__file__).parent / "megatron_ranks.json").read_text())
"""Groups of Megatron-Core 0.16.1's `parallel_state.RankGenerator` in the order tp-cp-ep-dp-pp."""

OTHERS = {
    "tp": ("cp", "dp", "pp"),
    "cp": ("tp", "dp", "pp"),
    "dp": ("tp", "cp", "pp"),
    "pp": ("tp", "cp", "dp"),
    "ep": ("etp", "expert_dp", "pp"),
    "etp": ("ep", "expert_dp", "pp"),
    "expert_dp": ("etp", "ep", "pp"),
}


def shape_of(num_ranks: int, tp: int, cp: int, pp: int, ep: int, etp: int) -> Layout:
    return Layout(num_ranks=num_ranks, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, sequence_parallel=tp > 1)


def groups(ranks: Sequence[TrainerRank], dimension: str) -> set[tuple[int, ...]]:
    """Return the groups of ranks that differ in one dimension only, in order."""
    members: dict[tuple[int, ...], list[TrainerRank]] = defaultdict(list)
    for rank in ranks:
        members[tuple(getattr(rank, other) for other in OTHERS[dimension])].append(rank)
    return {tuple(rank.rank for rank in sorted(group, key=lambda rank: getattr(rank, dimension))) for group in members.values()}


@pytest.mark.parametrize("case", MEGATRON, ids=lambda case: f"{case['num_ranks']} ranks, TP {case['tp']}, EP {case['ep']}")
def test_ranks_stand_where_megatron_puts_them(case: dict[str, Any]) -> None:
    sizes = {name: case[name] for name in ("num_ranks", "tp", "cp", "pp", "ep", "etp")}
    ranks = trainer_ranks(shape_of(**sizes))
    for dimension, expected in case["groups"].items():
        assert groups(ranks, dimension) == {tuple(group) for group in expected}, dimension


@st.composite
def shapes(draw: st.DrawFn) -> Layout:
    size = st.sampled_from([1, 2, 3, 4])
    tp, cp, pp, dp = draw(size), draw(size), draw(size), draw(size)
    per_stage = tp * cp * dp
    ep = draw(st.sampled_from([n for n in range(1, per_stage + 1) if per_stage % n == 0]))
    etp = draw(st.sampled_from([n for n in range(1, per_stage // ep + 1) if (per_stage // ep) % n == 0]))
    return shape_of(per_stage * pp, tp, cp, pp, ep, etp)


@given(shapes())
def test_every_rank_has_one_place_of_its_own_in_either_grid(shape: Layout) -> None:
    ranks = trainer_ranks(shape)
    assert [rank.rank for rank in ranks] == list(range(shape.num_ranks))
    assert len({(rank.tp, rank.cp, rank.dp, rank.pp) for rank in ranks}) == shape.num_ranks
    assert len({(rank.etp, rank.ep, rank.expert_dp, rank.pp) for rank in ranks}) == shape.num_ranks
    for dimension in OTHERS:
        assert {len(group) for group in groups(ranks, dimension)} == {getattr(shape, dimension)}


def test_glm52_stages_start_on_layers_that_compute_their_index(tmp_path: Path) -> None:
    found = stages(glm52(tmp_path))
    assert [stage.first_layer + 1 for stage in found] == [1, 15, 23, 31, 39, 47, 55, 63]
    assert [stage.num_layers for stage in found] == [14, 8, 8, 8, 8, 8, 8, 16]
    assert all(stage.first_layer in stage.index_layers for stage in found)
    assert [stage.has_embedding for stage in found] == [True] + [False] * 7
    assert [stage.has_head for stage in found] == [False] * 7 + [True]


def test_interleaved_stages_take_turns() -> None:
    flags = "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --virtual-pipeline-model-parallel-size 2"
    found = stages(subject_of(f"{flags} --actor-num-gpus-per-node 4", "glm4-9b"))
    assert [(stage.pipeline_rank, stage.virtual_rank) for stage in found] == [(p, v) for v in range(2) for p in range(4)]
    assert [stage.first_layer for stage in found] == list(range(0, 40, 5))
    assert found[-1].has_head
    assert found[-1].pipeline_rank == 3


def test_the_embedding_may_count_as_a_layer() -> None:
    flags = "--actor-num-gpus-per-node 3 --pipeline-model-parallel-size 3 --account-for-embedding-in-pipeline-split"
    found = stages(subject_of(f"{flags} --account-for-loss-in-pipeline-split", "glm4-9b"))
    assert [stage.num_layers for stage in found] == [13, 14, 13]


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--pipeline-model-parallel-size 2", "47"),
        ("--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 10", "3 middle stages cannot share 37 of 47 layers equally"),
        (
            "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 14 --virtual-pipeline-model-parallel-size 2",
            "the 11 layers of pipeline rank 1; choose a divisor of 11",
        ),
        ("--tensor-model-parallel-size 3", "--tensor-model-parallel-size 3"),
        ("--expert-model-parallel-size 16", "--expert-model-parallel-size 16"),
    ],
)
def test_sizes_that_do_not_divide_are_named(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_layout(subject_of(f"{flags} --actor-num-gpus-per-node 8", "glm4.7-flash"))


@pytest.mark.parametrize("flags, model", [(GLM4_9B_COLOCATED, "glm4-9b"), (FLASH_16, "glm4.7-flash"), (GLM45_BF16, "glm4.5-355b")])
def test_stages_cover_every_layer_once(flags: str, model: str) -> None:
    subject = subject_of(flags, model)
    covered = [n for stage in stages(subject) for n in range(stage.first_layer, stage.first_layer + stage.num_layers)]
    assert covered == list(range(subject.architecture.num_layers))


def test_separate_sides_have_gpus_of_their_own() -> None:
    layout = make_layout(subject_of(GLM4_9B_SEPARATE, "glm4-9b"))
    assert layout.num_nodes == 1
    assert [gpu.trainer is not None for gpu in layout.gpus] == [True] * 4 + [False] * 4
    assert [gpu.engine.engine if gpu.engine else None for gpu in layout.gpus] == [None] * 4 + [0, 0, 1, 1]


def test_colocated_sides_share_and_rollout_only_gpus_follow() -> None:
    layout = make_layout(subject_of(GLM4_9B_COLOCATED.replace("8 --colocate", "8 --colocate --rollout-num-gpus 12"), "glm4-9b"))
    assert layout.num_nodes == 2
    assert all(gpu.trainer and gpu.engine for gpu in layout.gpus[:8])
    assert [gpu.engine is not None for gpu in layout.gpus[8:]] == [True] * 4 + [False] * 4
    assert not any(gpu.trainer for gpu in layout.gpus[8:])


def test_prefill_and_decode_engines_fill_the_cluster_in_order(tmp_path: Path) -> None:
    layout = make_layout(glm52(tmp_path))
    assert layout.num_nodes == 32
    engines = [gpu.engine for gpu in layout.gpus]
    assert [engine.engine for engine in engines if engine] == [n for n in range(4) for _ in range(64)]
    assert {engine.group for engine in engines[:64] if engine} == {0}
    assert [group.num_engines for group in layout.engine_groups] == [1, 3]
    assert all(engine is not None and engine.dp == engine.ep == engine.rank for engine in engines)


def test_a_placeholder_keeps_gpus_free(tmp_path: Path) -> None:
    file = tmp_path / "engines.yaml"
    file.write_text("sglang: [{server_groups: [{num_gpus: 2, num_gpus_per_engine: 2}, {worker_type: placeholder, num_gpus: 2}]}]")
    layout = make_layout(subject_of(f"{GLM4_9B_SEPARATE} --sglang-config {file}", "glm4-9b"))
    assert [(group.num_engines, group.num_gpus) for group in layout.engine_groups] == [(1, 2), (0, 2)]
    assert [gpu.engine is not None for gpu in layout.gpus[4:]] == [True, True, False, False]
    text = io.StringIO()
    print_report(replace(plan_of_8(), layout=layout), Config(), Console(file=text))
    assert "2 GPUs kept free" in text.getvalue()


def test_attention_replicas_of_an_engine_are_neighbors() -> None:
    layout = make_layout(subject_of(GLM45_BF16, "glm4.5-355b"))
    first = [gpu.engine for gpu in layout.gpus[:32]]
    assert [engine.dp for engine in first if engine] == [n for n in range(4) for _ in range(8)]
    assert {engine.ep for engine in first if engine} == {0}


def test_the_embedded_engine_shares_the_first_gpu() -> None:
    layout = make_layout(subject_of("--device cuda --actor-num-gpus-per-node 2", "qwen3-4b"))
    assert layout.gpus[0].trainer and layout.gpus[0].engine
    assert layout.gpus[1].trainer and not layout.gpus[1].engine
    assert (layout.tp, layout.pp, layout.dp) == (1, 1, 2)


def test_without_training_no_gpu_has_a_trainer() -> None:
    plan = estimate(subject_of(f"{GLM4_9B_SEPARATE} --debug-rollout-only", "glm4-9b"))
    assert not any(gpu.trainer for gpu in plan.layout.gpus)
    assert all(gpu.engine for gpu in plan.layout.gpus[:4]), "engines alone need no GPUs beside theirs"
    assert [bar.owner for bar in plan.memory] == ["engines: regular", "host"]
    assert [phase.name for phase in plan.phases] == ["rollout"]


def test_a_cluster_above_the_limit_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"--actor-num-nodes 100000000 .* are 800000000 GPUs; plans support up to 32768"):
        make_layout(subject_of(f"{GLM4_9B_COLOCATED} --actor-num-nodes 100000000", "glm4-9b"))


@pytest.mark.parametrize(
    "cut, starts",
    [
        (Cut(8, False, False, 4, 1, None, None), [0, 2, 4, 6]),
        (Cut(6, True, True, 4, 1, None, None), [0, 1, 3, 5]),
        (Cut(7, True, False, 2, 2, None, None), [0, 1, 3, 5]),
        (Cut(7, False, True, 4, 1, None, None), [0, 2, 4, 6]),
        (Cut(8, False, False, 3, 1, 2, None), [0, 2, 5]),
        (Cut(8, False, False, 3, 2, None, None), []),
    ],
)
def test_stages_start_after_the_layers_of_those_before(cut: Cut, starts: list[int]) -> None:
    """An embedding that counts as a layer of the first stage is none: the later stages start one layer earlier."""
    assert cut.starts() == starts
