"""The torch trainer on a GPU gives the log-probabilities and gradients of the CPU."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from fuligo.formats.adapter_config import AdapterConfig
from fuligo.models.adapter import adapter_tensors
from fuligo.trainer.objective import LossSettings
from fuligo.trainer.packing import Capacity
from fuligo.trainer.ranks.settings import CriticSettings, LearningRateSchedule, LoraSettings, OptimizerSettings
from fuligo.trainer.ranks.world import World, join_world
from fuligo.trainer.torch_backend.settings import TorchTrainerSettings
from fuligo.trainer.torch_backend.weights import full_tensor
from fuligo.trainer.torch_backend.worker import TorchRankWorker
from fuligo.types import TrainBatch, TrainSample
from tests import shares, tiny, train_batches

LENGTHS = [(4, 90), (1, 3), (60, 9), (2, 1), (5, 140), (3, 90), (7, 6), (8, 20)]


@pytest.fixture(scope="module", autouse=True)
def cuda_world():
    """Return a world of one rank with a process group, which half precision under FSDP needs."""
    world = join_world(0, 1, "cuda", store=HashStore(), key=None, timeout_s=60)
    yield world
    dist.destroy_process_group()


def worker(checkpoint: Path, device: Literal["cpu", "cuda"], precision: Literal["fp32", "bf16"] = "fp32", **changes) -> TorchRankWorker:
    settings = TorchTrainerSettings(
        hf_checkpoint=checkpoint,
        initial_weights=checkpoint,
        optimizer=OptimizerSettings(LearningRateSchedule(peak=1e-3)),
        loss=LossSettings(entropy_coef=0.01),
        needs_old_logprobs=True,
        capacity=Capacity(max_tokens=256),
        device=device,
        precision=precision,
    )
    return TorchRankWorker(replace(settings, **changes), World(device=torch.device(device)))


def gradients(rank: TorchRankWorker, batch) -> dict[str, torch.Tensor]:
    rank.gradients(shares.to_train(rank, batch)[0])
    return {name: full_tensor(p.grad).float().cpu() for name, p in rank.policy.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("precision", "logprob_bound", "gradient_bound"), [("fp32", 1e-4, 1e-3), ("bf16", 0.5, 0.1)])
def test_logprobs_and_gradients_equal_the_cpus(checkpoint, precision, logprob_bound, gradient_bound):
    """In bfloat16 single tokens of these sharp random models are far off; the mean must be near."""
    samples = train_batches.samples(LENGTHS)
    cpu, cuda = worker(checkpoint, "cpu"), worker(checkpoint, "cuda", precision)
    for ours, theirs in zip(shares.scored(cuda, samples), shares.scored(cpu, samples), strict=True):
        np.testing.assert_allclose(ours.old_logprobs, theirs.old_logprobs, atol=logprob_bound)
        assert np.abs(ours.old_logprobs - theirs.old_logprobs).mean() <= logprob_bound / 5
    batch = train_batches.batch(shares.scored(cpu, samples))
    expected, got = gradients(cpu, batch), gradients(cuda, batch)
    assert expected.keys() == got.keys()
    scale = max(g.abs().max() for g in expected.values())
    for name, gradient in expected.items():
        assert (got[name] - gradient).abs().max() <= gradient_bound * scale, name


@pytest.mark.parametrize("torch_compile", [False, True])
def test_the_precision_noise_is_that_of_float32_on_the_cpu(checkpoint, tmp_path, torch_compile: bool) -> None:
    """The weights are exact in bfloat16, so that the trainer on the CPU computes with the same ones."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    model.float().save_pretrained(tmp_path)
    cpu, cuda = worker(tmp_path, "cpu"), worker(tmp_path, "cuda", "bf16", torch_compile=torch_compile)
    samples = [replace(s, loss_mask=np.ones_like(s.loss_mask), mask_sum=float(s.response_length)) for s in train_batches.samples(LENGTHS)]
    half, full = (np.concatenate(rank.logprobs(shares.to_score(rank, samples))) for rank in (cuda, cpu))  # compiles FlexAttention
    torch.cuda.empty_cache()
    before, reserved = torch._dynamo.utils.counters["stats"]["unique_graphs"], torch.cuda.memory_reserved()
    noise = cuda.precision_noise(samples)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
    assert torch.cuda.memory_reserved() <= reserved + 32 * 2**20  # workspaces of cuBLAS
    weights = np.concatenate([np.full(sample.response_length, 1 / sample.response_length) for sample in samples])
    difference = np.average(np.abs(half - full), weights=weights)
    assert noise == pytest.approx(difference, rel=0.3 if torch_compile else 1e-2)  # compiled layers round less often: 10 to 20% less noise


@pytest.mark.parametrize(("precision", "value_bound", "gradient_bound"), [("fp32", 1e-4, 1e-3), ("bf16", 0.5, 0.15)])
def test_values_and_their_gradients_equal_the_cpus(checkpoint, tmp_path, precision, value_bound, gradient_bound):
    """Not clipped: in bfloat16 a value near its bound may be on either side of it."""
    family = AutoConfig.from_pretrained(checkpoint).model_type
    head = {} if family == "llama" else {"head_dim": 64}
    values = tiny.save_value_model(tmp_path, family, seed=2, hidden=256, layers=3, **head)
    critic = CriticSettings(values, OptimizerSettings(LearningRateSchedule(peak=1e-3)), clip=100.0)
    cpu, cuda = worker(checkpoint, "cpu", critic=critic), worker(checkpoint, "cuda", precision, critic=critic)
    samples = train_batches.samples(LENGTHS)
    scored = shares.scored(cpu, samples)
    for ours, theirs in zip(shares.scored(cuda, samples), scored, strict=True):
        np.testing.assert_allclose(ours.values, theirs.values, atol=value_bound)
        assert np.abs(ours.values - theirs.values).mean() <= value_bound / 5
    batch = train_batches.batch(train_batches.with_returns(scored, noise=1.0))
    expected, got = {}, {}
    for rank, found in ((cpu, expected), (cuda, got)):
        rank.critic.gradients(shares.to_train(rank, batch)[0])
        found |= {name: full_tensor(p.grad).float().cpu() for name, p in rank.critic.value_model.model.named_parameters()}
    scale = max(g.abs().max() for g in expected.values())
    for name, gradient in expected.items():
        assert (got[name] - gradient).abs().max() <= gradient_bound * scale, name


def test_packing_does_not_change_bf16_gradients_beyond_rounding(checkpoint):
    batch = train_batches.batch(train_batches.samples(LENGTHS))
    one = gradients(worker(checkpoint, "cuda", "bf16", capacity=Capacity(max_tokens=4096)), batch)
    many = gradients(worker(checkpoint, "cuda", "bf16", capacity=Capacity(max_samples=1)), batch)
    scale = max(g.abs().max() for g in one.values())
    for name, gradient in one.items():
        assert (many[name] - gradient).abs().max() <= 0.05 * scale, name


def test_training_then_saving_and_restoring_is_exact(checkpoint, tmp_path):
    batch = train_batches.batch(train_batches.samples(LENGTHS))
    first = worker(checkpoint, "cuda")
    first.train(shares.to_train(first, batch))
    first.save(tmp_path / "saved")
    second = worker(checkpoint, "cuda")
    second.restore(tmp_path / "saved")
    for (name, ours), (_, theirs) in zip(first.policy.model.named_parameters(), second.policy.model.named_parameters(), strict=True):
        assert torch.equal(full_tensor(ours), full_tensor(theirs)), name


def test_compiled_layers_compute_what_transformers_layers_do(checkpoint):
    """Both are bfloat16, with different roundings: fused operations round once where separate ones round each result."""
    samples = train_batches.samples(LENGTHS)
    compiled, plain = worker(checkpoint, "cuda", "bf16", torch_compile=True), worker(checkpoint, "cuda", "bf16")
    exact = [each.old_logprobs for each in shares.scored(worker(checkpoint, "cuda"), samples)]

    def error(rank: TorchRankWorker) -> float:
        found = [each.old_logprobs for each in shares.scored(rank, samples)]
        return float(np.abs(np.concatenate(found) - np.concatenate(exact)).mean())

    assert error(compiled) <= 1.2 * error(plain)
    batch = train_batches.batch(shares.scored(plain, samples))
    expected, got = gradients(plain, batch), gradients(compiled, batch)
    scale = max(g.abs().max() for g in expected.values())
    for name, gradient in expected.items():
        assert (got[name] - gradient).abs().max() <= 0.1 * scale, name


def test_one_compiled_graph_serves_all_lengths(checkpoint):
    rank = worker(checkpoint, "cuda", "bf16", torch_compile=True)

    def num_graphs(lengths: list[tuple[int, int]]) -> int:
        gradients(rank, train_batches.batch(train_batches.samples(lengths)))
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    first = num_graphs(LENGTHS)
    assert num_graphs([(3, 5)]) == num_graphs([(9, 31), (2, 77), (40, 6), (5, 8), (6, 2)]) == num_graphs(LENGTHS[::-1]) <= first + 1


@pytest.mark.parametrize("shares_prefixes", [False, True])
def test_a_warmed_up_trainer_compiles_nothing_more_and_is_unchanged(checkpoint, shares_prefixes: bool) -> None:
    rank = worker(checkpoint, "cuda", "bf16", torch_compile=True, shares_prefixes=shares_prefixes)
    state = torch.cuda.get_rng_state()
    rank.warm_up()
    assert torch.equal(torch.cuda.get_rng_state(), state)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    samples = group_of_six() if shares_prefixes else train_batches.samples(LENGTHS)
    scored = shares.scored(rank, samples)
    found = gradients(rank, train_batches.batch(scored))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
    cold = worker(checkpoint, "cuda", "bf16", torch_compile=True, shares_prefixes=shares_prefixes)
    for got, expected in zip(scored, shares.scored(cold, samples), strict=True):
        np.testing.assert_array_equal(got.old_logprobs, expected.old_logprobs)
    expected = gradients(cold, train_batches.batch(scored))
    scale = max(g.abs().max() for g in expected.values())
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() <= 1e-2 * scale, name  # the embedding's are summed in no fixed order


@pytest.mark.parametrize("shares_prefixes", [False, True])
def test_a_warmed_up_trainer_compiles_nothing_more_for_short_rows(tmp_path: Path, shares_prefixes: bool) -> None:
    """The compiler fuses the reductions of a norm's backward pass in long rows of wide layers; its limits must not be guards."""
    wide = tiny.save_checkpoint(tmp_path, "qwen3", hidden_size=1024)
    rank = worker(wide, "cuda", "bf16", torch_compile=True, shares_prefixes=shares_prefixes, capacity=Capacity(max_tokens=8192))
    rank.warm_up()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for samples in (
        train_batches.samples(LENGTHS),
        group_of_six(),
        train_batches.samples([(30, 500)] * 15),
        train_batches.samples(LENGTHS[:1]),
    ):
        gradients(rank, train_batches.batch(shares.scored(rank, samples)))
        rank._learner.optimizer.zero_grad()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


@pytest.mark.parametrize("torch_compile", [False, True])
def test_shared_prefixes_do_not_change_scores_and_gradients(checkpoint, torch_compile):
    """Both are bfloat16; the float32 worker says how much noise that is."""
    samples = group_of_six()
    exact = np.concatenate([each.old_logprobs for each in shares.scored(worker(checkpoint, "cuda"), samples)])
    rank = worker(checkpoint, "cuda", "bf16", torch_compile=torch_compile)
    batch: TrainBatch | None = None
    errors: list[float] = []
    found: list[dict[str, torch.Tensor]] = []
    for shares_prefixes in (False, True):
        rank.settings = replace(rank.settings, shares_prefixes=shares_prefixes)
        scored = shares.scored(rank, samples)
        errors.append(float(np.abs(np.concatenate([each.old_logprobs for each in scored]) - exact).mean()))
        rank._learner.optimizer.zero_grad()
        batch = batch or train_batches.batch(scored)
        found.append(gradients(rank, batch))
    assert errors[1] <= 1.3 * errors[0]
    scale = max(g.abs().max() for g in found[0].values())
    for name, gradient in found[0].items():
        assert (found[1][name] - gradient).abs().max() <= 0.1 * scale, name


def group_of_six() -> list[TrainSample]:
    """Return answers of different lengths to one prompt of 150 tokens."""
    answers = [train_batches.sample(i, prompt_length=150, response_length=20 + 7 * i) for i in range(6)]
    prompt = answers[0].tokens[:150]
    return [replace(answer, tokens=np.concatenate([prompt, answer.tokens[150:]])) for answer in answers]


def set_adapter(rank: TorchRankWorker, *, std: float) -> None:
    """Give A and B random values; they lie whole on the one rank."""
    for seed, (_, parameter) in enumerate(sorted(adapter_tensors(rank.policy.model).items())):
        local = parameter.detach()
        local = local.to_local() if isinstance(local, DTensor) else local
        local.copy_(std * torch.randn(local.shape, generator=torch.Generator().manual_seed(seed)))


def test_compiled_layers_follow_the_adapter_when_it_is_switched_off(checkpoint):
    """The reference is the policy without its adapter, computed between passes with it; both are compiled."""
    lora = LoraSettings(AdapterConfig(rank=4, alpha=128.0))
    changes = {"lora": lora, "reference_weights": checkpoint}
    compiled, plain = worker(checkpoint, "cuda", "bf16", torch_compile=True, **changes), worker(checkpoint, "cuda", "bf16", **changes)
    for rank in (compiled, plain):
        set_adapter(rank, std=0.02)
    scored = [shares.scored(rank, train_batches.samples(LENGTHS)) for rank in (compiled, plain)]
    ours, theirs = (
        {name: np.concatenate([getattr(sample, name) for sample in samples]) for name in ("old_logprobs", "ref_logprobs")}
        for samples in scored
    )
    for name, found in ours.items():
        assert np.abs(found - theirs[name]).mean() <= 0.1, name
    assert np.abs(ours["old_logprobs"] - ours["ref_logprobs"]).mean() > 0.2
    batch = train_batches.batch(scored[1])
    expected, got = gradients(plain, batch), gradients(compiled, batch)
    assert expected.keys() == got.keys()
    scale = max(g.abs().max() for g in expected.values())
    for name, gradient in expected.items():
        assert (got[name] - gradient).abs().max() <= 0.1 * scale, name
