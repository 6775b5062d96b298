"""Policies for tests, built and run on the ranks of the pool, and log-probabilities by transformers."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from fuligo.config.groups import ParallelFlags, TrainFlags
from fuligo.formats.hugging_face import read_config_json
from fuligo.layout.megatron import Layout
from fuligo.models.registry import architecture_of
from fuligo.models.stated_flags import stated_flags
from fuligo.trainer.batch import PackedTokens, pack_tokens
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings, SparseLayers
from fuligo.trainer.ranks.settings import LearningRateSchedule, OptimizerSettings
from fuligo.trainer.ranks.world import World
from fuligo.types import TrainBatch, TrainSample
from tests import shares

MicroBatches = Sequence[Sequence[TrainSample]]


def settings_of(directory: Path, layout: Layout, *, flags: Mapping[str, Any] | None = None, **overrides: Any) -> MegatronTrainerSettings:
    """Return the settings of the model in `directory`; `flags` override its config.json."""
    architecture = architecture_of(read_config_json(directory))
    given = {
        "hf_checkpoint": directory,
        "initial_weights": directory,
        "optimizer": OptimizerSettings(LearningRateSchedule(peak=1e-3), clip_grad=0.0),
        "layout": layout,
        "num_ranks": layout.num_ranks,
        "model_flags": {**stated_flags(read_config_json(directory)), **(flags or {})},
        "sparse_layers": SparseLayers.of(architecture),
        "numerics": architecture.numerics,
        "pad_multiple_tokens": 1,
    }
    return MegatronTrainerSettings(**{**given, **overrides})


def transformers_logprobs(directory: Path, samples: Sequence[TrainSample]) -> Tensor:
    """Return [N] log-probabilities of the response tokens, one sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    return torch.cat([_response_logprobs(model, sample) for sample in samples])


@torch.no_grad()
def _response_logprobs(model: Any, sample: TrainSample) -> Tensor:
    ids = torch.from_numpy(sample.tokens).long()
    log_softmax = model(input_ids=ids[None, :-1], use_cache=False).logits[0].log_softmax(-1)
    return log_softmax.gather(1, ids[1:, None])[sample.prompt_length - 1 :, 0]


@torch.no_grad()
def megatron_logprobs(world: World, settings: MegatronTrainerSettings, micro_batches: MicroBatches) -> Tensor | None:
    """Return [N] log-probabilities of the response tokens of all micro-batches, on ranks of the last pipeline stage."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from fuligo.trainer.megatron_backend.model import build_chunks
    from fuligo.trainer.megatron_backend.packed import PackedRow, pack_row
    from fuligo.trainer.megatron_backend.weights.load import load_hugging_face
    from fuligo.trainer.megatron_backend.worker import join_megatron

    layout = settings.layout
    join_megatron(layout, world, settings.seed)
    chunks = build_chunks(settings, trained=False)
    load_hugging_face(chunks, settings.initial_weights)

    def rows() -> Iterator[tuple[PackedTokens, PackedRow]]:
        for samples in micro_batches:
            tokens = pack_tokens(samples, world.device)
            yield tokens, pack_row(tokens, layout, parallel_state.get_context_parallel_rank(), pad_multiple=settings.pad_multiple_tokens)

    def forward_step(iterator: Iterator, model: Any) -> tuple[Tensor, Any]:
        tokens, row = next(iterator)
        return model.run(row), lambda hidden, **_: _own_logprobs(model, hidden, tokens, row, settings)

    outputs = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[rows() for _ in chunks],
        model=chunks,
        num_microbatches=len(micro_batches),
        seq_length=0,
        micro_batch_size=1,
        forward_only=True,
        collect_non_loss_data=True,
    )
    return torch.cat(outputs) if outputs else None


def _own_logprobs(model: Any, hidden: Tensor, tokens: Any, row: Any, settings: MegatronTrainerSettings) -> Tensor:
    from megatron.core import parallel_state

    from fuligo.trainer.megatron_backend.logprobs import vocab_parallel_logprobs

    own = vocab_parallel_logprobs(
        hidden[row.local_rows],
        model.head_weight,
        tokens.targets[row.local_ids],
        temperature=settings.temperature,
        chunk_tokens=settings.chunk_tokens,
        num_vocab=settings.model_flags["vocab_size"],
        tp_group=parallel_state.get_tensor_model_parallel_group(),
    )
    whole = torch.zeros(len(tokens.targets)).index_copy(0, row.local_ids, own.logprobs)
    dist.all_reduce(whole, group=parallel_state.get_context_parallel_group())
    return whole


def recomputing(granularity: Any = None, method: Any = None, num_layers: int | None = None, modules: Sequence[str] = ()) -> ParallelFlags:
    return ParallelFlags(
        recompute_granularity=granularity, recompute_method=method, recompute_num_layers=num_layers, recompute_modules=list(modules)
    )


def mtp_flags(num_layers: int = 0, *, trained: bool = False, loss_scale: float = 0.2, joint: bool = False) -> TrainFlags:
    return TrainFlags(
        mtp_num_layers=num_layers or None, enable_mtp_training=trained, mtp_loss_scaling_factor=loss_scale, mtp_joint_training=joint
    )


def changed_by_a_step(world: World, settings: MegatronTrainerSettings, batch: TrainBatch) -> list[str] | None:
    """Train on the batch; return the names of the weights that this changed, on rank 0."""
    from fuligo.trainer.megatron_backend.worker import MegatronRankWorker

    worker = MegatronRankWorker(settings, world)
    before = {name: tensor.clone() for name, tensor in worker.named_weights()}
    worker.train(shares.to_train(worker, batch))
    changed = [name for name, tensor in worker.named_weights() if not torch.equal(tensor, before[name])]
    return changed if world.rank == 0 else None
