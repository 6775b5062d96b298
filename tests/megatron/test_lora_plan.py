"""Plans of LoRA runs on the Megatron trainer against the bytes of real ranks: weights, adapter, gradients, optimizer, files."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import Tensor

from fuligo.config.command_line import parse
from fuligo.config.groups import OptimizerFlags
from fuligo.formats.adapter_config import ADAPTER, AdapterConfig
from fuligo.formats.dist_tensors import DistributedTensors
from fuligo.formats.hugging_face import read_config_json
from fuligo.layout.megatron import Layout, layout_of
from fuligo.models.adapter import read_adapter_weights
from fuligo.models.registry import architecture_of
from fuligo.planner.gpus import gpu
from fuligo.planner.layout import make_layout
from fuligo.planner.make_plan import disk_of_checkpoints
from fuligo.planner.memory.trainer import trainer_state
from fuligo.planner.subject import Subject
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings
from fuligo.trainer.objective import LossSettings
from fuligo.trainer.packing import Capacity
from fuligo.trainer.ranks.settings import LoraSettings
from fuligo.trainer.ranks.world import World
from fuligo.types import TrainSample
from tests import shares, tiny, train_batches
from tests.megatron.policies import settings_of
from tests.megatron.ranks import RankPool

RANK = 8
SEVERAL = "--actor-num-gpus-per-node 2 --tensor-model-parallel-size"
LAYOUTS = {
    "one": (Layout(), "--actor-num-gpus-per-node 1"),
    "dp2": (Layout(num_ranks=2), "--actor-num-gpus-per-node 2"),
    "pp2": (Layout(pp=2, num_ranks=2), f"{SEVERAL} 1 --pipeline-model-parallel-size 2"),
    "tp2 sp ep2": (
        Layout(tp=2, ep=2, sequence_parallel=True, num_ranks=2),
        f"{SEVERAL} 2 --sequence-parallel --expert-model-parallel-size 2 --expert-tensor-parallel-size 1",
    ),
    "tp2 sp etp2": (Layout(tp=2, etp=2, sequence_parallel=True, num_ranks=2), f"{SEVERAL} 2 --sequence-parallel"),
}


@dataclass(slots=True, frozen=True)
class Held:
    """Bytes on one rank."""

    weights: int
    adapter: int
    gradients: int
    optimizer: int


def held(world: World, settings: MegatronTrainerSettings, samples: list[TrainSample], save: Path | None = None) -> Held:
    """Take an optimizer step; measure, and save."""
    from fuligo.trainer.megatron_backend.parts import parameter_states
    from fuligo.trainer.megatron_backend.worker import MegatronRankWorker

    worker = MegatronRankWorker(settings, world)
    worker.train(shares.to_train(worker, train_batches.batch(samples)))
    parameters = [parameter for chunk in worker.chunks for parameter in chunk.parameters()]
    model = {tensor.untyped_storage().data_ptr() for tensor in parameters}
    states = [tensor for state in parameter_states(worker._learner.optimizer) for tensor in state.tensors().values()]
    if save is not None:
        worker.save(save)
    return Held(
        weights=size([parameter for parameter in parameters if not parameter.requires_grad]),
        adapter=size([parameter for parameter in parameters if parameter.requires_grad]),
        gradients=size(worker._learner.gradient_buffers()),
        optimizer=size([tensor for tensor in states if tensor.untyped_storage().data_ptr() not in model]),  # not the weights themselves
    )


@pytest.mark.parametrize(
    ("family", "layout", "distributed", "experts"),
    [
        ("qwen3", "dp2", True, False),
        ("qwen3", "pp2", True, False),
        ("qwen3_moe", "tp2 sp ep2", True, True),
        ("qwen3_moe", "tp2 sp etp2", False, True),
        # one place that is not distributed is enough, and test_adapter.py of the planner has every family's matrices
        pytest.param("deepseek_v3", "tp2 sp ep2", False, False, marks=pytest.mark.slow),
    ],
)
def test_a_rank_holds_the_planned_bytes(
    pool: RankPool, tmp_path: Path, samples: list[TrainSample], family: str, layout: str, distributed: bool, experts: bool
) -> None:
    checkpoint = tiny.save_checkpoint(tmp_path / "model", family, hidden=128, vocab_size=512)
    settings, subject = run_of(checkpoint, layout, OptimizerFlags(use_distributed_optimizer=distributed), precision="bf16", experts=experts)
    ranks = pool.run(settings.num_ranks, held, settings, samples)
    planned = make_layout(subject)
    for rank, got in enumerate(ranks):
        pipeline_rank = rank if layout == "pp2" else 0
        stages = [stage for stage in planned.stages if stage.pipeline_rank == pipeline_rank]
        state = trainer_state(subject, layout_of(subject.config), stages)
        # The routers' score corrections are not parameters; Megatron pads each gradient buffer to 128 elements per data-parallel rank.
        assert got.weights == pytest.approx(state.weights, abs=512)
        assert got.adapter == state.adapter
        assert state.gradients <= got.gradients <= state.gradients + 4 * 128 * settings.num_ranks
        assert got.optimizer == pytest.approx(state.optimizer, abs=8 * 128 if distributed and layout == "dp2" else 0)


def test_a_checkpoint_has_the_planned_bytes(pool: RankPool, tmp_path: Path, samples: list[TrainSample]) -> None:
    settings, subject = run_of(tiny.save_checkpoint(tmp_path / "model"), "one", OptimizerFlags())
    pool.run(1, held, settings, samples, save=tmp_path / "saved")
    sharded = sum(4 * math.prod(shape) for shape in DistributedTensors(tmp_path / "saved").shapes.values())
    disk = disk_of_checkpoints(subject)
    assert disk is not None
    assert sharded + size([*read_adapter_weights(tmp_path / "saved" / ADAPTER).values()]) == disk.checkpoint_bytes


def run_of(
    checkpoint: Path, layout: str, place: OptimizerFlags, *, precision: str = "fp32", experts: bool = False
) -> tuple[MegatronTrainerSettings, Subject]:
    """Return the settings of a run with an adapter, and the subject of its plan."""
    shape, flags = LAYOUTS[layout]
    adapter = AdapterConfig(RANK, 2.0 * RANK, adapts_experts=experts)
    settings = settings_of(
        checkpoint,
        shape,
        lora=LoraSettings(adapter),
        optimizer_place=place,
        precision=precision,
        loss=LossSettings(loss_type="sft_loss", per_token=True),
        capacity=Capacity(max_tokens=64),
        chunk_tokens=7,
    )
    given = f"--prompt-data prompts.jsonl --rm-type random --num-rollout 1 --train-backend megatron --lora-rank {RANK} {flags}"
    distributed = "--use-distributed-optimizer" if place.use_distributed_optimizer else "--no-use-distributed-optimizer"
    config = parse([*given.split(), "--hf-checkpoint", str(checkpoint), "--rollout-num-gpus", "1", distributed]).config
    architecture = architecture_of(read_config_json(checkpoint))
    return settings, Subject(config, architecture, architecture, gpu("h200-141"), adapter_config=adapter)


@pytest.fixture(scope="module")
def samples() -> list[TrainSample]:
    return train_batches.samples([(4, 9), (1, 3), (6, 9), (2, 1), (5, 14), (3, 9)])


def size(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
