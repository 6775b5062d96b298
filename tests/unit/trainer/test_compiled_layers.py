"""Compiled layers: one graph for rows of all lengths, with the same results as without compilation.

Dense attention takes the place of the GPU's attention kernel, and eager execution of the graphs, forward and backward, that of the
compiler's backend.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, library
from torch._dynamo import lookup_backend
from torch._dynamo.utils import counters

from fuligo.errors import TrainerError
from fuligo.formats.adapter_config import AdapterConfig
from fuligo.models import attention, tree_attention
from fuligo.models.adapter import adapter_tensors
from fuligo.models.sink_attention import VarlenKernel
from fuligo.trainer.packing import Capacity
from fuligo.trainer.ranks.settings import CriticSettings, LearningRateSchedule, LoraSettings, OptimizerSettings
from fuligo.trainer.ranks.world import World
from fuligo.trainer.torch_backend.learner import compute_value_gradients
from fuligo.trainer.torch_backend.settings import TorchTrainerSettings
from fuligo.trainer.torch_backend.worker import TorchRankWorker, made_up_row
from tests import shares, train_batches

pytestmark = pytest.mark.long

COMPILE = torch.compile

ROWS = [[(4, 9), (7, 31), (2, 20)], [(40, 6), (5, 8)], [(30, 170), (1, 2)], [(3, 5), (9, 31), (2, 77), (6, 2), (5, 5)]]
"""Prompt and response lengths; the numbers of tokens and sequences and the longest sequence all differ."""


@library.custom_op("fuligo::dense_attention", mutates_args=())
def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    longest: int,
    longest_keys: int,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """Compute causal attention within sequences, aligned at their ends, and the log-sum-exp [T, H] of its scores.

    The compiler cannot trace into this operator, as it cannot into the GPU's.
    """
    scores = _scores(query, key, _mask(query, key, starts, key_starts, window), scale)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), _for_each_head(value, query))
    return out.contiguous(), scores.logsumexp(-1).transpose(0, 1).contiguous()


@dense.register_fake
def _(query: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty(query.shape[:2])


@library.custom_op("fuligo::dense_attention_gradients", mutates_args=())
def dense_backward(
    grad: Tensor, saved: Sequence[Tensor], longest: int, longest_keys: int, scale: float, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of query, key and value by their formulas. `saved`: these, the outputs, and the sequences' starts."""
    query, key, value, out, log_sum_exp, starts, key_starts = saved
    weights = (_scores(query, key, _mask(query, key, starts, key_starts, window), scale) - log_sum_exp.transpose(0, 1)[..., None]).exp()
    keys, values = (_for_each_head(x, query) for x in (key, value))
    of_weights = torch.einsum("qhd,khd->hqk", grad, values) - (grad * out).sum(-1).transpose(0, 1)[..., None]
    of_scores = scale * weights * of_weights
    of_keys, of_values = torch.einsum("hqk,qhd->khd", of_scores, query), torch.einsum("hqk,qhd->khd", weights, grad)
    grouped = (key.size(1), query.size(1) // key.size(1))
    of_key, of_value = (each.unflatten(1, grouped).sum(2) for each in (of_keys, of_values))
    return torch.einsum("hqk,khd->qhd", of_scores, keys).contiguous(), of_key.contiguous(), of_value.contiguous()


@dense_backward.register_fake
def _(_: Tensor, saved: Sequence[Tensor], *__: object) -> tuple[Tensor, ...]:
    return tuple(each.new_empty(each.shape) for each in saved[:3])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:5])
    ctx.options = inputs[5:]


def _gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return (*dense_backward(grad.contiguous(), ctx.saved_tensors, *ctx.options), *[None] * 6)


dense.register_autograd(_gradients, setup_context=_save)


def dense_attention(*given: Tensor | int, scale: float, window_size: tuple[int, int], enable_gqa: bool = False) -> Tensor:
    """Stand in for the varlen kernel. `given`: its tensors and lengths."""
    return dense(*given, scale, window_size[0] + 1 or None)[0]


class DenseKernel(VarlenKernel):
    """Kernel that calls dense attention instead of the GPU's operators."""

    @property
    def _options(self) -> tuple[int, int, float, int | None]:
        return self.longest, self.longest_keys, self.scale, self.window

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return dense(query, key, value, self.starts, self.key_starts, *self._options)

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sum_exp: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        saved = (query, key, value, out, log_sum_exp, self.starts, self.key_starts)
        return dense_backward(grad.contiguous(), saved, *self._options)


def _scores(query: Tensor, key: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return the [H, Q, K] scores."""
    return (scale * torch.einsum("qhd,khd->hqk", query, _for_each_head(key, query))).masked_fill(~mask, -torch.inf)


def _for_each_head(x: Tensor, query: Tensor) -> Tensor:
    return x.repeat_interleave(query.size(1) // x.size(1), dim=1)


def _mask(query: Tensor, key: Tensor, starts: Tensor, key_starts: Tensor, window: int | None) -> Tensor:
    """Return the [Q, K] mask, True where the query attends to the key."""
    (of_query, from_end_q), (of_key, from_end_k) = _places(query, starts), _places(key, key_starts)
    mask = (of_query[:, None] == of_key) & (from_end_k >= from_end_q[:, None])
    return mask if window is None else mask & (from_end_k <= from_end_q[:, None] + window - 1)


def _places(x: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sequence of every token [T], and its distance to the sequence's end [T]."""
    tokens = torch.arange(x.size(0))
    sequence = torch.searchsorted(starts.long(), tokens, right=True) - 1
    return sequence, starts.long()[sequence + 1] - 1 - tokens


@pytest.fixture(autouse=True)
def traced_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "varlen_attn", dense_attention)
    monkeypatch.setattr(tree_attention, "VarlenKernel", DenseKernel)
    monkeypatch.setattr(torch, "compile", partial(COMPILE, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()


def make_worker(checkpoint, **given: object) -> TorchRankWorker:
    optimizer = OptimizerSettings(LearningRateSchedule(peak=1e-3))
    settings = TorchTrainerSettings(checkpoint, checkpoint, optimizer, needs_old_logprobs=True, **given)
    return TorchRankWorker(settings, World())


def scores_and_gradients(worker: TorchRankWorker, lengths: Sequence[tuple[int, int]]) -> tuple[np.ndarray, dict[str, Tensor]]:
    samples = train_batches.samples(lengths)
    if worker.settings.shares_prefixes:
        prefix = train_batches.sample(0, prompt_length=25, response_length=0, seed=1).tokens
        samples = [replace(each, tokens=np.concatenate([prefix, each.tokens]), prompt_length=25 + each.prompt_length) for each in samples]
    scored = shares.scored(worker, samples)
    assert scored is not None
    worker._learner.optimizer.zero_grad()
    if worker.critic is not None:
        scored = train_batches.with_returns(scored, noise=0.1)
    step = shares.to_train(worker, train_batches.batch(scored))[0]
    assert step is not None
    worker.gradients(step)
    if worker.critic is not None:
        compute_value_gradients(worker.critic.value_model, step, clip=0.2, device=worker.world.device)
    found = {name: p.grad.clone() for name, p in worker.policy.model.named_parameters() if p.grad is not None}
    return np.concatenate([each.old_logprobs for each in scored if each.old_logprobs is not None]), found


def assert_equal(found: tuple[np.ndarray, dict[str, Tensor]], expected: tuple[np.ndarray, dict[str, Tensor]]) -> None:
    """Check results of `scores_and_gradients`."""
    np.testing.assert_allclose(found[0], expected[0], atol=1e-5)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, atol=1e-5, rtol=1e-4, msg=name)


OF_TWO = AdapterConfig(rank=4, alpha=64.0, target_modules=("q_proj", "down_proj"))
"""Adapter of one attention matrix and one MLP matrix; the slow cases adapt all matrices."""
REPEATED = ("plain", "checkpointed", "adapter", "quantized base", "shared prefixes")
"""Cases whose layers "checkpointed quantized base" and those of the test below trace as well."""


@pytest.mark.parametrize("case", [*(pytest.param(case, marks=pytest.mark.slow) for case in REPEATED), "checkpointed quantized base"])
def test_one_graph_serves_all_lengths(checkpoint, case: str) -> None:
    settings: dict[str, dict[str, object]] = {
        "plain": {},
        "checkpointed": {"gradient_checkpointing": True},
        "adapter": {"lora": LoraSettings(AdapterConfig(rank=4, alpha=64.0)), "reference_weights": checkpoint},
        "quantized base": {"lora": LoraSettings(AdapterConfig(rank=4, alpha=64.0), base_precision="nf4")},
        "checkpointed quantized base": {
            "lora": LoraSettings(OF_TWO, base_precision="nf4"),
            "gradient_checkpointing": True,
        },
        "shared prefixes": {"shares_prefixes": True},
    }
    if "quantized" in case:
        pytest.importorskip("bitsandbytes", reason="the extra qlora is not installed")
    worker = make_worker(checkpoint, **settings[case])
    if worker.settings.lora is not None:
        for seed, (_, parameter) in enumerate(sorted(adapter_tensors(worker.policy.model).items())):
            parameter.detach().copy_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
    expected = [scores_and_gradients(worker, lengths) for lengths in ROWS]
    worker.policy.compile_layers()
    num_graphs: list[int] = []
    counters.clear()
    for lengths, without_compilation in zip(ROWS, expected, strict=True):
        before = counters["stats"]["unique_graphs"]
        found = scores_and_gradients(worker, lengths)
        num_graphs.append(counters["stats"]["unique_graphs"] - before)
        assert_equal(found, without_compilation)
    recomputes, has_reference = "checkpointed" in case, case == "adapter"
    assert num_graphs[0] == 2 + recomputes + has_reference, "scoring, training and each other pass take one graph for all layers"
    assert not counters["graph_break"]
    assert num_graphs[1:] == [0, 0, 0], "a length, or a number of sequences, was a constant of the graphs"


def traced_for_gradients(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
    """Trace forward and backward of a graph that needs gradients; run other graphs as they are, since the test above traces them."""
    return lookup_backend("aot_eager" if torch.is_grad_enabled() else "eager")(graph, inputs)


LATER_ROWS = [*ROWS, [(30, 170)], [(1, 1), (2, 3)], [(7, 9)] * 14, [(20, 236)], [(20, 400)]]
"""Rows of a sample that shares no prefix, with a sample of two tokens, of many samples, full, and longer than all before."""


# The last case has an adapter with its reference, and a frozen model as well. Other cases trace the gradients of its layers.
@pytest.mark.parametrize(
    "case",
    [
        pytest.param("adapter", marks=pytest.mark.slow),
        "shared prefixes",
        pytest.param("reference and teacher", marks=pytest.mark.slow),
        "value model and teacher beside an adapter",
    ],
)
def test_a_warmed_up_trainer_compiles_nothing_more(checkpoint, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, dict[str, object]] = {
        "adapter": {"lora": LoraSettings(AdapterConfig(rank=4, alpha=64.0)), "reference_weights": checkpoint},
        "shared prefixes": {"shares_prefixes": True},
        "reference and teacher": {"reference_weights": checkpoint, "teacher_weights": checkpoint},
        "value model and teacher beside an adapter": {
            "lora": LoraSettings(OF_TWO),
            "reference_weights": checkpoint,
            "teacher_weights": checkpoint,
            "critic": CriticSettings(checkpoint, OptimizerSettings(LearningRateSchedule(peak=1e-3))),
        },
    }
    if case == "value model and teacher beside an adapter":
        monkeypatch.setattr(torch, "compile", partial(COMPILE, backend="eager"))
    if case == "shared prefixes":
        monkeypatch.setattr(torch, "compile", partial(COMPILE, backend=traced_for_gradients))
    worker = make_worker(checkpoint, capacity=Capacity(max_tokens=256), **settings[case])
    expected = [scores_and_gradients(worker, lengths) for lengths in LATER_ROWS]
    worker._learner.optimizer.zero_grad()
    for model in worker._models():
        model.compile_layers()
    before = {name: parameter.detach().clone() for name, parameter in worker.policy.named_parameters()}
    random_state = torch.get_rng_state()

    worker.warm_up()

    assert torch.equal(torch.get_rng_state(), random_state)
    for name, parameter in worker.policy.named_parameters():
        assert torch.equal(parameter, before[name]) and parameter.grad is None, name
    assert not worker._learner.optimizer.state
    assert not counters["graph_break"]
    counters.clear()
    for lengths, without_compilation in zip(LATER_ROWS, expected, strict=True):
        assert_equal(scores_and_gradients(worker, lengths), without_compilation)
        assert counters["stats"]["unique_graphs"] == 0, lengths


def test_layers_are_compiled_without_limits_on_a_rows_length(checkpoint) -> None:
    make_worker(checkpoint).policy.compile_layers()
    assert torch._inductor.config.triton.mix_order_reduction_non_strict_mode


@pytest.mark.parametrize(("max_step_tokens", "expected"), [(None, 1024), (5000, 1024), (300, 300)])
def test_a_warm_up_row_is_no_longer_than_the_runs(
    checkpoint, max_step_tokens: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    worker = make_worker(checkpoint, capacity=Capacity(max_tokens=1024), max_step_tokens=max_step_tokens)
    worker.policy.is_compiled = True
    monkeypatch.setattr(worker, "_rehearse", lengths.append)
    worker.warm_up()
    assert lengths == [expected]


def test_a_run_without_a_token_limit_is_not_warmed_up(checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --micro-batch-size, a made-up row could need more memory than the run's."""
    worker = make_worker(checkpoint, capacity=Capacity(max_samples=1))
    worker.policy.compile_layers()
    monkeypatch.setattr(worker.policy, "forward", None)
    worker.warm_up()


def test_a_warm_up_out_of_memory_names_the_flag(checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    worker = make_worker(checkpoint, capacity=Capacity(max_tokens=100_000))
    worker.policy.compile_layers()
    monkeypatch.setattr(worker.policy, "forward", fill)
    with pytest.raises(TrainerError, match=r"rows of 8,192 tokens: CUDA out of memory.*lower --max-tokens-per-gpu"):
        worker.warm_up()


@pytest.mark.parametrize("shares_prefixes", [False, True])
@pytest.mark.parametrize(("max_tokens", "positions"), [(8192, 4096), (300, 4096), (300, 40), (1, 4096)])
def test_a_made_up_row_fits_the_run_and_the_model(checkpoint, max_tokens: int, positions: int, *, shares_prefixes: bool) -> None:
    policy = make_worker(checkpoint).policy
    policy.model.config.max_position_embeddings = positions
    row = made_up_row(policy, max_tokens, torch.device("cpu"), shares_prefixes=shares_prefixes)
    assert row.num_sample_tokens <= max(max_tokens, 2)
    assert int(row.position_ids.max()) < positions
    assert len(row.sample_lengths) >= 2
    assert (row.tree is not None) == shares_prefixes
