"""Log-probabilities of the response tokens of packed rows against transformers: dense families under all layouts."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from fuligo.layout.megatron import Layout
from fuligo.models.registry import FAMILIES
from tests import train_batches
from tests.megatron.checkpoints import save_uneven
from tests.megatron.policies import megatron_logprobs, settings_of, transformers_logprobs
from tests.megatron.ranks import RankPool

LENGTHS = [(4, 9), (1, 3), (300, 12), (2, 1), (5, 14)]
"""(prompt, response) lengths of two micro-batches; one sequence is long enough to reveal the rotary embedding."""

LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GEMMA: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "sliding_window": 5,
    "query_pre_attn_scalar": 40,
}
GEMMA_LINEAR = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 20_000.0, "factor": 8.0},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"vocab_size": 403}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "llama": ("llama", {"num_key_value_heads": 4}),
    "llama 3": ("llama", {"rope_parameters": LLAMA_3, "tie_word_embeddings": True}),
    "mistral": ("mistral", {"head_dim": 24}),
    "glm4": ("glm4", {}),
    "mimo": ("qwen2", {}),
    "gemma3_text": ("gemma3_text", GEMMA),
    "gemma3_text linear": ("gemma3_text", GEMMA | {"rope_parameters": GEMMA_LINEAR, "tie_word_embeddings": False}),
}
LAYOUTS = {
    "one rank": Layout(),
    "tp2": Layout(tp=2, num_ranks=2),
    "tp2 sp": Layout(tp=2, sequence_parallel=True, num_ranks=2),
    "tp4 of two key heads": Layout(tp=4, num_ranks=4),
    "pp2": Layout(pp=2, num_ranks=2),
    "pp3 uneven": Layout(pp=3, num_layers_first_stage=1, num_layers_last_stage=1, num_ranks=3),
    "pp2 vpp2": Layout(pp=2, vpp=2, num_ranks=2),
    "cp2": Layout(cp=2, num_ranks=2),
    "tp2 pp2": Layout(tp=2, pp=2, num_ranks=4),
    "tp2 sp cp2": Layout(tp=2, cp=2, sequence_parallel=True, num_ranks=4),
    "pp2 vpp2 cp2": Layout(pp=2, vpp=2, cp=2, num_ranks=4),
}
CHOSEN = {
    ("one rank", "llama"),
    ("one rank", "glm4"),
    ("one rank", "gemma3_text"),
    ("cp2", "gemma3_text linear"),
    ("tp2 sp", "gemma3_text linear"),
    ("pp3 uneven", "gemma3_text"),
    ("tp2", "qwen2"),
    ("tp2", "mistral"),
    ("tp2 sp", "glm4"),
    ("tp4 of two key heads", "qwen3"),
    ("pp2", "mimo"),
    ("pp3 uneven", "qwen2"),
    ("pp2 vpp2", "llama 3"),
    ("cp2", "glm4"),
    ("tp2 pp2", "llama 3"),
    ("tp2 sp cp2", "qwen3"),
    ("pp2 vpp2 cp2", "qwen3"),
}
"""Pairs of layout and model that cover every layout and every model."""
ALL = [(layout, model) for layout in LAYOUTS for model in MODELS]
CASES = [pytest.param(*case, marks=() if case in CHOSEN else pytest.mark.slow) for case in ALL]


class Checkpoint(NamedTuple):
    directory: Path
    oracle: Path
    """Checkpoint with the same weights as a model that transformers supports."""


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    made: dict[str, Checkpoint] = {}

    def checkpoint(name: str) -> Checkpoint:
        if name not in made:
            made[name] = save(tmp_path_factory.mktemp("model"), name)
        return made[name]

    return checkpoint


def save(directory: Path, name: str) -> Checkpoint:
    family, shape = MODELS[name]
    save_uneven(directory, family, layers=4, **shape)
    if name not in FAMILIES or name == family:
        return Checkpoint(directory, directory)
    other = shutil.copytree(directory, directory.with_name(f"{directory.name}-{name}"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "model_type": name}))
    return Checkpoint(other, directory)


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_logprobs_are_those_of_transformers(pool: RankPool, checkpoint_of, layout: str, model: str):
    assert_logprobs_of_transformers(pool, checkpoint_of(model), LAYOUTS[layout])


def test_padding_of_rows_is_seen_by_no_token(pool: RankPool, checkpoint_of):
    assert_logprobs_of_transformers(pool, checkpoint_of("qwen3"), LAYOUTS["cp2"], pad_multiple_tokens=128)


def test_embedding_and_head_count_as_layers_of_stages(pool: RankPool, checkpoint_of):
    flags = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
    assert_logprobs_of_transformers(pool, checkpoint_of("qwen2"), Layout(pp=3, num_ranks=3), flags=flags)


def assert_logprobs_of_transformers(pool: RankPool, checkpoint: Checkpoint, layout: Layout, **settings: Any) -> None:
    samples = train_batches.samples(LENGTHS)
    micro_batches = [samples[:3], samples[3:]]
    results = pool.run(layout.num_ranks, megatron_logprobs, settings_of(checkpoint.directory, layout, **settings), micro_batches)
    expected = transformers_logprobs(checkpoint.oracle, samples)
    on_last_stage = [result for result in results if result is not None]
    assert len(on_last_stage) == layout.num_ranks // layout.pp
    for logprobs in on_last_stage:
        torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=0)
