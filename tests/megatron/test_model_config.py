"""Megatron's configuration of a model, and models that are refused."""

from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from fuligo.config.groups import ParallelFlags
from fuligo.errors import ConfigError
from fuligo.layout.megatron import Layout
from fuligo.trainer.megatron_backend.flags import EXPERTS, LATENT_ATTENTION
from fuligo.trainer.megatron_backend.model_config import padded_vocab_size, refuse_inexact_blocks, transformer_config
from tests import tiny
from tests.megatron.policies import recomputing, settings_of


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny.model_config("glm4", layers=6, vocab_size=403)
    config.save_pretrained(directory := tmp_path_factory.mktemp("glm4"))
    return directory


def test_the_shape_is_that_of_config_json(directory: Path):
    config = transformer_config(settings_of(directory, Layout()))
    assert (config.num_layers, config.hidden_size, config.ffn_hidden_size) == (6, 64, 128)
    assert (config.num_attention_heads, config.num_query_groups, config.kv_channels) == (4, 2, 16)
    assert config.rotary_interleaved and config.add_qkv_bias and not config.add_bias_linear
    assert config.attention_dropout == config.hidden_dropout == 0.0
    assert settings_of(directory, Layout()).model_flags["rotary_percent"] == 0.5


def test_arguments_that_are_handed_on_are_fields_of_megatrons_configuration():
    assert {field.name for field in fields(TransformerConfig)} >= set(EXPERTS)
    assert {field.name for field in fields(MLATransformerConfig)} >= set(LATENT_ATTENTION)


def test_gradients_are_sums_over_tokens(directory: Path):
    assert transformer_config(settings_of(directory, Layout())).calculate_per_token_loss


def test_weights_are_kept_in_what_is_computed_in(directory: Path):
    settings = settings_of(directory, Layout())
    assert transformer_config(settings).params_dtype == torch.float32
    config = transformer_config(replace(settings, precision="bf16"))
    assert config.params_dtype == config.pipeline_dtype == torch.bfloat16 and config.bf16


@pytest.mark.parametrize(
    ("recipe", "generation", "is_refused"), [("blockwise", 9, False), ("blockwise", 10, True), ("tensorwise", 10, False)]
)
def test_blocks_need_a_gpu_that_multiplies_with_their_scales(
    directory: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, generation: int, is_refused: bool
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (generation, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA B200")
    settings = settings_of(directory, Layout())
    settings = replace(settings, model_flags={**settings.model_flags, "fp8_format": "e4m3", "fp8_recipe": recipe})
    with pytest.raises(ConfigError, match=r"blockwise: NVIDIA B200 .* use --fp8-recipe tensorwise") if is_refused else nullcontext():
        refuse_inexact_blocks(settings)


@pytest.mark.parametrize(("tp", "size"), [(1, 403), (2, 404), (4, 404), (5, 405)])
def test_the_vocabulary_gets_the_smallest_padding_that_ranks_can_share(directory: Path, tp: int, size: int):
    assert padded_vocab_size(settings_of(directory, Layout(tp=tp, num_ranks=tp))) == size


@pytest.mark.parametrize(
    ("layout", "flags", "recomputation", "text"),
    [
        (Layout(pp=4, num_ranks=4), {}, recomputing(), "num_layers should be divisible by pipeline_model_parallel_size"),
        (Layout(pp=2, vpp=2, num_ranks=2), {}, recomputing(), "should be divisible by vp_size 2"),
        (Layout(pp=3, num_layers_first_stage=1, num_ranks=3), {}, recomputing(), "number of layers at middle stage: 5 must be divisible"),
        (Layout(), {}, recomputing("full"), "recompute_method must be"),
        (Layout(), {"normalization": "LayerNorm"}, recomputing(), "use --normalization RMSNorm --swiglu"),
        (Layout(), {"swiglu": False}, recomputing(), "use --normalization RMSNorm --swiglu"),
    ],
)
def test_what_megatron_cannot_build_is_refused(directory: Path, layout: Layout, flags: dict, recomputation: ParallelFlags, text: str):
    with pytest.raises(ConfigError, match=text):
        transformer_config(settings_of(directory, layout, flags=flags, parallel=recomputation))


def test_embedding_and_head_can_count_as_layers(directory: Path):
    flags = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
    transformer_config(settings_of(directory, Layout(pp=4, num_ranks=4), flags=flags))
