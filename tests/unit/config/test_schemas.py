"""Tests that the schema files are usable. tests/sglang/test_schemas.py compares them with the pinned packages."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fuligo.config.command_line import parse
from fuligo.config.flag import Kind
from fuligo.config.flags import flags, passthrough_flags, sections
from fuligo.config.other_frameworks import moved
from fuligo.config.schemas import BACKENDS, Schema, schema
from fuligo.config.values import checked_value

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Schema:
    return schema(request.param)


def test_versions_are_the_pinned_ones() -> None:
    assert {group: schema(group).version for group in BACKENDS} == {"sglang": "0.5.15.post1", "router": "0.3.2", "megatron": "0.16.1"}


def test_every_default_is_a_value(backend: Schema) -> None:
    for flag in backend.flags.values():
        if flag.default is not None:
            assert checked_value(flag, flag.default) == flag.default, flag.name
        assert bool(flag.choices) or flag.kind is not Kind.CHOICE


def test_aliases_lead_to_arguments_and_hints_to_what_is_none(backend: Schema) -> None:
    for name, alias in backend.aliases.items():
        assert name not in backend.flags
        if alias.value is not None:
            assert checked_value(backend.flags[alias.name], alias.value) == alias.value
        else:
            assert alias.name in backend.flags
    assert not set(backend.hints) & {*backend.flags, *backend.aliases}


def test_names_are_plain_and_unique() -> None:
    assert sections()[-3:] == list(BACKENDS)
    names = [flag.flat_name for group in BACKENDS for flag in passthrough_flags(group).values()]
    assert len(set(names)) == len(names)
    assert not set(names) & set(flags())
    assert not set(moved()) & {*names, *flags()}
    assert all(name.isidentifier() for name in names)


def test_flags_of_ours_that_advice_names_exist(backend: Schema) -> None:
    known = {flag.option for group in BACKENDS for flag in passthrough_flags(group).values()} | {flag.option for flag in flags().values()}
    for text in [*backend.hints.values(), *moved().values()]:
        assert set(re.findall(r"--[a-z][\w-]*", text)) <= known, text


def test_the_arguments_of_a_large_recipe_are_known() -> None:
    """Parse the flags of public launch scripts for MoE, dense and hybrid models."""
    text = """
        --sglang-mem-fraction-static 0.7 --sglang-enable-dp-attention --sglang-ep-size 64 --sglang-dp-size 64 --sglang-moe-dense-tp-size 1
        --sglang-enable-dp-lm-head --sglang-moe-a2a-backend deepep --sglang-deepep-mode auto --sglang-page-size 64
        --sglang-kv-cache-dtype fp8_e4m3 --sglang-attention-backend nsa --sglang-disable-overlap-schedule --sglang-watchdog-timeout 3600
        --sglang-disaggregation-transfer-backend mooncake --sglang-disaggregation-ib-device mlx5_100,mlx5_107
        --sglang-speculative-algorithm EAGLE --sglang-speculative-num-steps 4 --sglang-speculative-eagle-topk 1
        --sglang-speculative-num-draft-tokens 5 --sglang-speculative-draft-attention-backend nsa --sglang-ep-num-redundant-experts 16
        --sglang-disable-radix-cache --sglang-enable-draft-weights-cpu-backup --sglang-expert-parallel-size 64
        --moe-layer-freq [0]*3+[1]*75 --num-experts 256 --moe-shared-expert-intermediate-size 2048 --moe-router-topk 8 --moe-grouped-gemm
        --moe-permute-fusion --moe-ffn-hidden-size 2048 --moe-router-score-function sigmoid --moe-router-pre-softmax
        --moe-router-enable-expert-bias --moe-router-bias-update-rate 0 --moe-router-load-balancing-type seq_aux_loss
        --moe-router-topk-scaling-factor 2.5 --moe-aux-loss-coeff 0 --moe-router-dtype fp32 --moe-router-num-groups 8
        --moe-router-group-topk 4 --moe-token-drop-policy probs --make-vocab-size-divisible-by 16 --num-layers 78 --hidden-size 6144
        --ffn-hidden-size 12288 --num-attention-heads 64 --disable-bias-linear --add-qkv-bias --swiglu
        --untie-embeddings-and-output-weights --position-embedding-type rope --no-position-embedding --normalization RMSNorm
        --norm-epsilon 1e-5 --qk-layernorm --multi-latent-attention --q-lora-rank 2048 --kv-lora-rank 512 --qk-head-dim 192
        --v-head-dim 256 --kv-channels 192 --qk-pos-emb-head-dim 64 --vocab-size 154880 --rotary-base 8000000 --enable-experimental
        --group-query-attention --num-query-groups 2 --use-rotary-position-embeddings --rotary-percent 0.5 --rotary-interleaved
        --no-rope-fusion --post-self-attn-layernorm --post-mlp-layernorm --max-position-embeddings 32768 --seq-length 4096
        --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0 --attention-softmax-in-fp32 --attention-dropout 0.0
        --hidden-dropout 0.0 --no-check-for-nan-in-loss-and-grad --grad-reduce-in-bf16 --no-load-optim --no-load-rng --finetune --bf16
        --transformer-impl transformer_engine --fp8-format e4m3 --fp8-recipe blockwise --fp8-param-gather --no-persist-layer-norm
        --no-gradient-accumulation-fusion --use-gated-attention --apply-layernorm-1p --attention-output-gate --moe-shared-expert-gate
        --linear-attention-freq 4 --linear-conv-kernel-dim 4 --linear-key-head-dim 128 --linear-value-head-dim 128
        --linear-num-key-heads 16 --linear-num-value-heads 32 --squared-relu --hybrid-override-pattern MEM*E --mamba-num-heads 64
        --mamba-head-dim 64 --mamba-state-dim 128 --mamba-num-groups 8
    """
    words = text.split()
    config = parse(words).config
    assert len(config.sglang) + len(config.megatron) == sum(word.startswith("--") for word in words) - 1  # One name is an alias.


def test_files_hold_one_line_an_argument() -> None:
    for group in BACKENDS:
        text = (REPOSITORY / "fuligo" / "config" / "schemas" / f"{group}.json").read_text()
        assert len(text.splitlines()) > len(json.loads(text)["arguments"])


def test_schemas_are_not_read_where_nothing_is_passed_on() -> None:
    program = "from fuligo.config import Config; Config(); from fuligo.config.schemas import schema; assert not schema.cache_info().misses"
    assert subprocess.run([sys.executable, "-c", program], timeout=240, check=False).returncode == 0
