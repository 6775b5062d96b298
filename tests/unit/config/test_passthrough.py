"""Tests of arguments of SGLang, its router and Megatron: on the command line, in files, and in code."""

import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuligo.config import Config
from fuligo.config.command_line import parse
from fuligo.config.files import save_yaml
from fuligo.config.flags import flags, passthrough_flags
from fuligo.config.help import help_text
from fuligo.config.passthrough import RouterArguments, SglangArguments, command_line
from fuligo.config.placement import MegatronArguments
from fuligo.config.schemas import RESERVED, schema
from fuligo.errors import ConfigError
from tests.config_files import load_yaml
from tests.unit.config.strategies import arguments

KINDS = {"sglang": SglangArguments, "router": RouterArguments, "megatron": MegatronArguments}


def problems_of(words: list[str]) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parse(words)
    return caught.value.problems


def problem_in_file(folder: Path, text: str) -> str:
    (folder / "run.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_yaml(folder / "run.yaml")
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize(
    ("words", "group", "expected"),
    [
        ("--sglang-dp-size 8", "sglang", {"dp_size": 8}),
        ("--sglang-data-parallel-size 8", "sglang", {"dp_size": 8}),
        ("--sglang_mem_fraction_static=0.7", "sglang", {"mem_fraction_static": 0.7}),
        ("--sglang-enable-dp-attention", "sglang", {"enable_dp_attention": True}),
        ("--no-sglang-enable-dp-attention", "sglang", {"enable_dp_attention": False}),
        ("--sglang-no-lora-strict-loading", "sglang", {"lora_strict_loading": False}),
        ("--sglang-enable-dp-attention false", "sglang", {"enable_dp_attention": False}),
        ("--sglang-cuda-graph-bs-decode 1 2 4 8 16", "sglang", {"cuda_graph_bs_decode": [1, 2, 4, 8, 16]}),
        ("--sglang-cuda-graph-bs-decode=[1,2]", "sglang", {"cuda_graph_bs_decode": [1, 2]}),
        ("--sglang-context-length 32k", "sglang", {"context_length": 32_000}),
        ("--sglang-context-length 32Ki", "sglang", {"context_length": 32_768}),
        ("--sglang-max-total-tokens 1.5M", "sglang", {"max_total_tokens": 1_500_000}),
        ('--sglang-extra-metric-labels {"run":"a"}', "sglang", {"extra_metric_labels": {"run": "a"}}),
        ("--sglang-moe-a2a-backend none", "sglang", {"moe_a2a_backend": "none"}),
        ("--sglang-fp8-gemm-backend deep_gemm", "sglang", {"fp8_gemm_runner_backend": "deep_gemm"}),
        ("--sglang-log-requests-level 3", "sglang", {"log_requests_level": 3}),
        ("--router-policy round_robin --router-retry-max-retries 0", "router", {"policy": "round_robin", "retry_max_retries": 0}),
        ("--swiglu --num-layers 46", "megatron", {"num_layers": 46, "swiglu": True}),
        ("--moe-layer-freq [0]*1+[1]*2", "megatron", {"moe_layer_freq": [0, 1, 1]}),
        ("--moe-layer-freq 2", "megatron", {"moe_layer_freq": 2}),
        ("--spec slime_plugins.models.glm4 get_glm_spec", "megatron", {"spec": ["slime_plugins.models.glm4", "get_glm_spec"]}),
        ("--norm-epsilon 1e-6 --no-rope-fusion", "megatron", {"norm_epsilon": 1e-6, "no_rope_fusion": True}),
        ("--moe-aux-loss-coeff 0", "megatron", {"moe_aux_loss_coeff": 0.0}),
        ("--no-swiglu", "megatron", {"swiglu": False}),
    ],
)
def test_arguments_have_the_type_of_the_schema(words: str, group: str, expected: dict[str, Any]) -> None:
    parsed = parse(words.split())
    given = dict(getattr(parsed.config, group).items())
    assert given == expected
    assert {name: type(value) for name, value in given.items()} == {name: type(value) for name, value in expected.items()}
    assert parsed.warnings == ()


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        ("--sglang-dp-size many", ["--sglang-dp-size: 'many' is not valid", "an integer >= 1", "(default: 1)"]),
        ("--sglang-dp-size 0", ["'0' is not valid", ">= 1"]),
        ("--sglang-dp-size 8 9", ["--sglang-dp-size takes one value, got 2"]),
        ("--sglang-dp-size", ["--sglang-dp-size needs a value: an integer >= 1"]),
        ("--sglang-mem-fraction-static 1.5", ["'1.5'", "a number > 0 and < 1"]),
        ("--sglang-mem-fraction-static nan", ["'nan'", "a number"]),
        ("--sglang-deepep-mode autoo", ["one of auto, low_latency, normal", "did you mean auto?"]),
        ("--sglang-cuda-graph-bs-decode 1 x 3", ["--sglang-cuda-graph-bs-decode: 'x' is not valid", "a list of integers >= 1"]),
        ("--sglang-cuda-graph-bs-decode 1 0", ["'0' is not valid"]),
        ("--sglang-log-requests-level 7", ["one of 0, 1, 2, 3"]),
        ("--sglang-context-length 1.5Ki", ["'1.5Ki'", "4096, 4k or 4Ki"]),
        ("--sglang-enable-dp-attention 8", ["'8'", "true or false", "--no-sglang-enable-dp-attention"]),
        ("--sglang-extra-metric-labels [1]", ["a JSON object"]),
        ("--sglang-forward-hooks {", ["not JSON", "a JSON list"]),
        ("--moe-layer-freq [0]*3+1", ["--moe-layer-freq", "[0]*3+[1]*45"]),
        ("--normalization RMSnorm", ["one of LayerNorm, RMSNorm", "did you mean RMSNorm?"]),
        ("--rotary-percent 2", ["--rotary-percent", "> 0 and <= 1"]),
        ("--no-sglang-dp-size", ["unknown flag --no-sglang-dp-size", "did you mean --sglang-dp-size"]),
    ],
)
def test_wrong_values_are_refused_with_the_rule(words: str, texts: list[str]) -> None:
    (problem,) = problems_of(words.split())
    for text in texts:
        assert text in problem


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        ("--sglang-dp-sise 8", ["unknown flag --sglang-dp-sise", "did you mean --sglang-dp-size (sglang)"]),
        ("--swigluu", ["did you mean --swiglu (megatron)?"]),
        ("--router-polcy random", ["did you mean --router-policy (router)"]),
        ("--sgalng-dp-size 8", ["did you mean --sglang-dp-size (sglang)"]),
        ("--dp-size 8", ["did you mean --sglang-dp-size (sglang)?"]),
        ("--cuda-graph-max-bs 8", ["did you mean --sglang-cuda-graph-max-bs-decode (sglang)?"]),
        ("--policy random", ["did you mean --router-policy (router)?"]),
        ("--sglang-swiglu", ["did you mean --swiglu (megatron)?"]),
        ("--megatron-swiglu", ["did you mean --swiglu (megatron)?"]),
        ("--sglang-rollout-batch-size 8", ["did you mean --rollout-batch-size (rollout)?"]),
        ("--router-dp-size 8", ["did you mean --sglang-dp-size (sglang)?"]),
        ("--log-level debug", ["--sglang-log-level (sglang) or --router-log-level (router)"]),
        ("--tp-size 8", ["use --tensor-model-parallel-size (for engines: --rollout-num-gpus-per-engine)"]),
        ("--sglang-enable-ep-moe", ["SGLang 0.5.15.post1 has no such argument", "--sglang-ep-size"]),
        ("--num-moe-experts 8", ["use --num-experts"]),
        ("--add-bias-linear", ["use --disable-bias-linear"]),
        ("--lr-warmup-fraction 0.1", ["use --lr-warmup-iters"]),
    ],
)
def test_unknown_flags_say_whose_flag_was_meant(words: str, texts: list[str]) -> None:
    (problem,) = problems_of(words.split())
    assert words.split(maxsplit=1)[0] in problem
    for text in texts:
        assert text in problem


@pytest.mark.parametrize(("group", "name"), [(group, name) for group, names in RESERVED.items() for name in names])
def test_what_fuligo_sets_is_refused_with_what_decides_it(group: str, name: str) -> None:
    flag = schema(group).flags.get(name)
    assert flag is not None, f"{name} is not an argument of {group}: remove it from the list"
    if flag.flat_name not in flags():  # `--sglang-config` is a typed flag.
        (problem,) = problems_of([flag.option, "1"])
        assert problem == f"{flag.option}: cannot be given; {RESERVED[group][name]}"
    with pytest.raises(ValueError, match="cannot be given"):
        KINDS[group]({name: 1})


@pytest.mark.parametrize(
    ("words", "expected", "warning"),
    [
        ("--sglang-nsa-decode-backend fa3", {"dsa_decode_backend": "fa3"}, "--sglang-dsa-decode-backend"),
        ("--sglang-cuda-graph-max-bs 12", {"cuda_graph_max_bs_decode": 12}, "--sglang-cuda-graph-max-bs-decode"),
        ("--sglang-cuda-graph-bs 1 2", {"cuda_graph_bs_decode": [1, 2]}, "--sglang-cuda-graph-bs-decode"),
        (
            "--sglang-disable-piecewise-cuda-graph",
            {"cuda_graph_backend_prefill": "disabled"},
            "--sglang-cuda-graph-backend-prefill disabled",
        ),
    ],
)
def test_old_names_are_taken_and_warned_about(words: str, expected: dict[str, Any], warning: str) -> None:
    parsed = parse(words.split())
    assert dict(parsed.config.sglang.items()) == expected
    (text,) = parsed.warnings
    assert text == f"{words.split(maxsplit=1)[0]} is deprecated in SGLang; using {warning}"


def test_a_switch_for_one_value_takes_none() -> None:
    (problem,) = problems_of(["--sglang-disable-piecewise-cuda-graph", "full"])
    assert "takes no value" in problem


def test_two_names_of_one_argument_are_one_flag_given_twice() -> None:
    parsed = parse(
        ["--sglang-dsa-decode-backend", "fa3", "--sglang-nsa-decode-backend", "tilelang", "--rotary-base", "1", "--rotary-base", "2"]
    )
    assert parsed.config.sglang.get("dsa_decode_backend") == "tilelang"
    assert parsed.config.megatron.get("rotary_base") == 2.0
    assert sum("given twice" in warning for warning in parsed.warnings) == 2


def test_a_typed_flag_of_ours_wins() -> None:
    config = parse(["--tensor-model-parallel-size", "4", "--lr", "2e-6"]).config
    assert config.parallel.tensor_model_parallel_size == 4 and config.optimizer.lr == 2e-6 and len(config.megatron) == 0
    assert not {"tensor_model_parallel_size", "lr"} & set(passthrough_flags("megatron"))
    with pytest.raises(ValueError, match="belongs in the group parallel"):
        MegatronArguments({"tensor_model_parallel_size": 4})


def test_flags_override_the_file_and_none_takes_back(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("sglang: {dp_size: 4, page_size: 64}\nmegatron: {swiglu: true}\n")
    config = parse(["--config", str(file), "--sglang-dp-size", "8", "--sglang-page-size", "none", "--no-swiglu"]).config
    assert dict(config.sglang.items()) == {"dp_size": 8}
    assert dict(config.megatron.items()) == {"swiglu": False}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sglang:\n  dp_sise: 8\n", ["run.yaml line 2", "sglang.dp_sise", "did you mean dp_size"]),
        ("sglang: {dp_size: many}\n", ["line 1", "sglang.dp_size", "'many'", "an integer >= 1"]),
        ("sglang: {dp_size: true}\n", ["sglang.dp_size", "True"]),
        ("sglang: {enable_dp_attention: 1}\n", ["true or false"]),
        ("sglang: {dp-size: 8}\n", ["did you mean dp_size"]),
        ("sglang: {tp_size: 8}\n", ["sglang.tp_size: cannot be given; --rollout-num-gpus-per-engine sets it"]),
        ("sglang: {tensor_parallel_size: 8}\n", ["cannot be given; --rollout-num-gpus-per-engine sets it"]),
        ("sglang: {cuda_graph_bs_decode: 8}\n", ["a list of integers"]),
        ("sglang: {nsa_decode_backend: fa3, dsa_decode_backend: fa3}\n", ["already given as nsa_decode_backend"]),
        ("sglang: {served_model_name: 7}\n", ["put it in quotes"]),
        ("megatron: {tensor_model_parallel_size: 2}\n", ["belongs in the group parallel, not in megatron"]),
        ("megatron: {moe_layer_freq: [0, x]}\n", ["megatron.moe_layer_freq"]),
        ("megatron: {num_moe_experts: 2}\n", ["use --num-experts"]),
        ("router: {zzzz: 2}\n", ["unknown argument of sglang-router 0.3.2"]),
        ("router: {swiglu: true}\n", ["unknown argument of sglang-router 0.3.2; did you mean swiglu (group megatron)?"]),
        ("sglang: {rollout_batch_size: 2}\n", ["did you mean rollout_batch_size (group rollout)?"]),
        ("sglang: 3\n", ["sglang must hold flags"]),
        ("sgl: {}\n", ["unknown group sgl"]),
    ],
)
def test_files_are_as_strict_and_name_the_line(tmp_path: Path, text: str, expected: list[str]) -> None:
    problem = problem_in_file(tmp_path, text)
    for part in expected:
        assert part in problem


def test_an_old_name_in_a_file_is_taken_and_warned_about(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("sglang:\n  nsa_decode_backend: fa3\n")
    parsed = parse(["--config", str(file)])
    assert parsed.config.sglang.get("dsa_decode_backend") == "fa3"
    assert parsed.warnings == (f"{file} line 2: nsa_decode_backend is deprecated in SGLang; using dsa_decode_backend",)


def test_a_config_file_holds_what_was_given(tmp_path: Path) -> None:
    config = parse(["--sglang-dp-size", "8", "--moe-layer-freq", "[0]*3+[1]*89", "--router-policy", "random"]).config
    save_yaml(config, tmp_path / "config.yaml")
    text = (tmp_path / "config.yaml").read_text()
    assert "sglang:\n  dp_size: 8\nrouter:\n  policy: random\nmegatron:\n  moe_layer_freq: '[0]*3+[1]*89'\n" in text
    assert load_yaml(tmp_path / "config.yaml") == config


def test_given_values_and_defaults() -> None:
    given = SglangArguments({"ep_size": 8})
    assert given.get("ep_size") == given.value("ep_size") == 8
    assert given.get("dp_size") is None and given.value("dp_size") == 1
    assert given.value("mem_fraction_static") is None
    assert "ep_size" in given and "dp_size" not in given and len(given) == 1 and list(given) == ["ep_size"]
    assert given == SglangArguments({"expert_parallel_size": "8"}) != SglangArguments({})
    assert SglangArguments({"dp_size": None}) == SglangArguments()
    for name in ("dp_sise", "nsa_decode_backend"):
        with pytest.raises(KeyError, match=f"SGLang has no argument {name}"):
            given.get(name)
    assert given.merged(SglangArguments({"ep_size": 4, "dp_size": 2})) == SglangArguments({"dp_size": 2, "ep_size": 4})


def test_code_gets_all_problems_in_one_error() -> None:
    with pytest.raises(ValueError) as caught:
        SglangArguments({"dp_sise": 1, "dp_size": "x", "ep": 2, "ep_size": 3})
    for part in ("dp_sise: unknown argument", "dp_size: 'x' is not valid", "given twice: ep_size and ep_size"):
        assert part in str(caught.value)


def test_the_package_gets_its_own_command_line() -> None:
    given = SglangArguments(
        {
            "dp_size": 8,
            "enable_dp_attention": True,
            "disable_radix_cache": False,
            "lora_strict_loading": False,
            "fp8_gemm_runner_backend": "deep_gemm",
            "cuda_graph_bs": [1, 2],
            "extra_metric_labels": {"run": "a"},
            "forward_hooks": [{"name": "h"}],
        }
    )
    assert command_line("sglang", given) == [
        *("--dp-size", "8"),
        "--enable-dp-attention",
        *("--extra-metric-labels", '{"run": "a"}'),
        *("--fp8-gemm-backend", "deep_gemm"),
        *("--cuda-graph-bs-decode", "1", "2"),
        "--no-lora-strict-loading",
        *("--forward-hooks", '[{"name": "h"}]'),
    ]
    assert command_line("router", {"policy": "random", "host": None}) == ["--policy", "random"]


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_arguments_survive_their_plain_form_and_a_process(data: st.DataObject) -> None:
    for group, kind in KINDS.items():
        made = kind(data.draw(arguments(group)))
        assert kind(made.plain()) == made
        assert pickle.loads(pickle.dumps(made)) == made
        assert getattr(Config.model_validate({group: made}), group) == made


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["dp_size", "moe_a2a_backend", "cuda_graph_bs", "x", "preferred_sampling_params"]), st.text() | st.none()
    )
)
def test_no_values_crash_the_check(given: dict[str, Any]) -> None:
    try:
        SglangArguments(given)
    except ValueError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("topic", "texts"),
    [
        ("sglang", ["sglang 0.5.15.post1", "--sglang-mem-fraction-static X", "--sglang-disable-radix-cache"]),
        ("router", ["sglang-router 0.3.2", "--router-policy"]),
        ("megatron", ["megatron-core 0.16.1", "--swiglu", "--moe-layer-freq"]),
        ("sglang_mem_fraction_static", ["fraction of GPU memory", "> 0 and < 1", "`sglang: {mem_fraction_static: ...}`"]),
        ("sglang_nsa_decode_backend", ["--sglang-nsa-decode-backend is the same as --sglang-dsa-decode-backend"]),
        ("sglang_tp_size", ["cannot be given; --rollout-num-gpus-per-engine sets it"]),
        ("swiglu", ["--swiglu", "`megatron: {swiglu: ...}`"]),
        ("num_moe_experts", ["use --num-experts"]),
    ],
)
def test_help(topic: str, texts: list[str]) -> None:
    for text in texts:
        assert text in help_text(topic)


def test_help_on_a_group_leaves_out_what_cannot_be_given() -> None:
    lines = help_text("sglang").splitlines()
    assert not any(line.startswith("  --sglang-tp-size") for line in lines)
    assert not any(line.startswith("  --tensor-model-parallel-size") for line in help_text("megatron").splitlines())
    with pytest.raises(ConfigError, match="did you mean sglang_dp_size"):
        help_text("sglang_dp_sise")
