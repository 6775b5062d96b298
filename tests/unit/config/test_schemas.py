"""Tests that the schema files match the pinned packages and are usable."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fuligo.config.command_line import parse
from fuligo.config.flag import Flag, Kind
from fuligo.config.flags import flags, passthrough_flags, sections
from fuligo.config.passthrough import RouterArguments, SglangArguments
from fuligo.config.reserved import MOVED
from fuligo.config.schemas import BACKENDS, Schema, schema
from fuligo.config.values import checked_value

REPOSITORY = Path(__file__).parents[3]
SCRIPT = REPOSITORY / "scripts" / "generate_schemas.py"
PACKAGES = {"sglang": "sglang", "router": "sglang_router", "megatron": "megatron.core"}
OWN = REPOSITORY / ".venv-sglang" / "bin" / "python"
"""Interpreter of `make install-sglang`."""
PYTHON = os.environ.get("FULIGO_SCHEMA_PYTHON", str(OWN) if OWN.exists() else sys.executable)
"""Interpreter with the packages; another environment may have them, because they are large and pin other versions."""
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY / "tests" / "sglang" / "stubs")}


def is_installed(package: str) -> bool:
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec('{package.partition('.')[0]}') is None)"
    return subprocess.run([PYTHON, "-c", look], check=False, env=ENVIRONMENT).returncode == 0


@pytest.mark.parametrize("group", BACKENDS)
def test_a_schema_is_what_the_installed_package_says(group: str) -> None:
    if not is_installed(PACKAGES[group]):
        pytest.skip(f"{PACKAGES[group]} is not installed here (make install-sglang; docs/passthrough.md)")
    command = [PYTHON, str(SCRIPT), "--check", group]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Schema:
    return schema(request.param)


PARSERS = {
    "sglang": "from sglang.srt.server_args import ServerArgs as Args",
    "router": "from sglang_router.router_args import RouterArgs as Args",
}
PARSE_EACH = """
import argparse, json, sys
parser = argparse.ArgumentParser()
Args.add_cli_args(parser)
required = ["--model-path", "M"] if any("--model-path" in a.option_strings and a.required for a in parser._actions) else []
print(json.dumps([getattr(parser.parse_args([*required, *words]), name) for name, words in json.load(sys.stdin)]))
"""


def example(flag: Flag) -> Any:
    """Return a value that differs from the default if possible."""
    numbers = {bound.split()[0]: float(bound.split()[1]) for bound in flag.bounds.split(" and ") if bound}
    one = flag.choices[-1] if flag.choices else "a"
    whole = int(one) if one.isdigit() else int(numbers.get(">=", 1)) + 1
    part = 0.5 if numbers.get("<", numbers.get("<=", 1)) <= 1 else 1.5
    return {
        Kind.BOOL: flag.default is not True,
        Kind.INT: whole,
        Kind.SIZE: whole,
        Kind.FLOAT: part,
        Kind.TEXT: one,
        Kind.CHOICE: one,
        Kind.TEXT_LIST: [one, one],
        Kind.INT_LIST: [whole, whole],
        Kind.FLOAT_LIST: [part, part],
        Kind.JSON: {"decode": {"backend": "full"}} if flag.name == "cuda_graph_config" else {"a": 1},
        Kind.JSON_LIST: ["a"],
    }[flag.kind]


@pytest.mark.parametrize("group", PARSERS)
def test_the_package_reads_our_command_line_as_the_same_values(group: str) -> None:
    if not is_installed(PACKAGES[group]):
        pytest.skip(f"{PACKAGES[group]} is not installed here (make install-sglang; docs/passthrough.md)")
    own_types = {"lora_paths", "selector", "prefill_selector", "decode_selector"}  # The package turns these texts into objects.
    given = {name: example(flag) for name, flag in passthrough_flags(group).items() if name not in own_types}
    kind = {"sglang": SglangArguments, "router": RouterArguments}[group]
    words = [(name, kind({name: value}).command_line()) for name, value in given.items()]
    command = [PYTHON, "-c", PARSERS[group] + PARSE_EACH]
    done = subprocess.run(command, input=json.dumps(words), capture_output=True, text=True, timeout=300, check=False, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert dict(zip(given, json.loads(done.stdout.splitlines()[-1]), strict=True)) == given


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
    assert not set(MOVED) & {*names, *flags()}
    assert all(name.isidentifier() for name in names)


def test_flags_of_ours_that_advice_names_exist(backend: Schema) -> None:
    known = {flag.option for group in BACKENDS for flag in passthrough_flags(group).values()} | {flag.option for flag in flags().values()}
    for text in [*backend.hints.values(), *MOVED.values()]:
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
