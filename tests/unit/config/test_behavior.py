"""Tests that every specified flag exists, takes a value, and refuses a wrong one."""

import re
from pathlib import Path

import pytest

from fuligo.config import Config
from fuligo.config.command_line import parse
from fuligo.config.flags import Flag, Kind, flags, passthrough_flags
from fuligo.config.hook_specs import HOOKS
from fuligo.errors import ConfigError

FLAGS = re.findall(
    r"\S+",
    """
actor-num-nodes actor-num-gpus-per-node rollout-num-gpus rollout-num-gpus-per-engine num-gpus-per-node colocate hostfile
tensor-model-parallel-size sequence-parallel pipeline-model-parallel-size virtual-pipeline-model-parallel-size
decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers context-parallel-size allgather-cp expert-model-parallel-size
expert-tensor-parallel-size recompute-granularity recompute-method recompute-num-layers optimizer-cpu-offload
overlap-cpu-optimizer-d2h-h2d use-precision-aware-optimizer moe-enable-deepep moe-token-dispatcher-type attention-backend
accumulate-allreduce-grads-in-fp32 num-layers rotary-base override-model-config optimizer lr min-lr lr-decay-style lr-warmup-iters
weight-decay adam-beta1 adam-beta2 clip-grad only-train-params-name-list freeze-params-name-list
rollout-batch-size n-samples-per-prompt global-batch-size num-steps-per-rollout use-dynamic-batch-size max-tokens-per-gpu micro-batch-size
balance-data log-probs-max-tokens-per-gpu log-probs-chunk-size data-pad-size-multiplier
advantage-estimator disable-grpo-std-normalization disable-rewards-normalization normalize-advantages eps-clip eps-clip-high eps-clip-c
entropy-coef use-kl-loss kl-loss-coef kl-loss-type use-unbiased-kl kl-coef ref-update-interval calculate-per-token-loss gamma lambd
value-clip use-tis tis-clip tis-clip-low use-rollout-logprobs use-opsm opsm-delta use-routing-replay use-rollout-routing-replay
loss-type use-opd opd-type opd-kl-coef opd-teacher-load opd-teacher-url mtp-num-layers enable-mtp-training mtp-loss-scaling-factor
hf-checkpoint ref-load load save save-interval save-hf ckpt-step async-save
prompt-data input-key label-key metadata-key tool-key apply-chat-template apply-chat-template-kwargs rollout-shuffle rollout-seed
num-rollout num-epoch skip-bad-rows rollout-max-prompt-len rollout-max-response-len rollout-max-context-len rollout-temperature
rollout-top-p rollout-top-k rollout-stop rollout-stop-token-ids
over-sampling-batch-size dynamic-sampling-filter-path max-sampling-waves reward-key partial-rollout buffer-filter-path
mask-offpolicy-in-partial-rollout max-staleness rm-type rm-url custom-rm-path group-rm
eval-interval eval-prompt-data n-samples-per-eval-prompt eval-max-response-len eval-top-p eval-temperature eval-config
skip-eval-before-train sglang-config sglang-disaggregation-transfer-backend sglang-disaggregation-ib-device
sglang-speculative-algorithm sglang-speculative-num-steps sglang-speculative-eagle-topk sglang-speculative-num-draft-tokens
sglang-mem-fraction-static rollout-external-engine-addrs update-weight-transport update-weight-mode update-weight-buffer-size
update-weights-interval check-weight-update-equal async-mode debug-rollout-only debug-train-only save-debug-rollout-data
load-debug-rollout-data use-fault-tolerance rollout-health-check-interval rollout-health-check-timeout
custom-generate-function-path agent rollout-function-path data-source-path rollout-sample-filter-path custom-reward-post-process-path
custom-advantage-function-path custom-loss-function-path custom-tis-function-path custom-model-provider-path before-train-step-path
custom-pg-loss-reducer-function-path custom-rollout-log-function-path custom-eval-rollout-log-function-path extra-rm-path
extra-rm-weights rollout-data-postprocess-path rollout-all-samples-process-path eval-function-path custom-config-path
train-backend rollout-backend device run-dir sink-path
""",
)

DEFAULTS = {
    "actor_num_nodes": 1,
    "num_gpus_per_node": 8,
    "lr": 1e-6,
    "lr_decay_style": "constant",
    "clip_grad": 1.0,
    "data_pad_size_multiplier": 128,
    "advantage_estimator": "grpo",
    "eps_clip": 0.2,
    "kl_loss_type": "k1",
    "gamma": 1.0,
    "lambd": 1.0,
    "tis_clip": 2.0,
    "tis_clip_low": 0.0,
    "opsm_delta": 1e-4,
    "mtp_loss_scaling_factor": 0.2,
    "input_key": "input",
    "rollout_seed": 42,
    "rollout_temperature": 1.0,
    "update_weight_transport": "auto",
    "update_weight_buffer_size": 512 * 1024**2,
    "update_weights_interval": 1,
    "rollout_health_check_interval": 30.0,
    "rollout_health_check_timeout": 30.0,
    "async_mode": "sync",
}


def known() -> dict[str, Flag]:
    passed = {flag.flat_name: flag for group in ("sglang", "router", "megatron") for flag in passthrough_flags(group).values()}
    return {flag.option: flag for flag in (passed | flags()).values()}


def sample(flag: Flag) -> list[str]:
    """Return a valid value of the flag as words of a command line."""
    if flag.choices:
        return [flag.choices[-1]]
    values = {Kind.BOOL: [], Kind.INT: ["3"], Kind.SIZE: ["3"], Kind.INT_LIST: ["1", "2"], Kind.JSON: ["{}"], Kind.LAYERS: ["[0]*3+[1]*2"]}
    number = ["1.5"] if flag.bounds == "> 1" else ["0.5"]
    return values.get(flag.kind, number if flag.kind in (Kind.FLOAT, Kind.FLOAT_LIST) else ["some/where"])


@pytest.mark.parametrize("name", FLAGS)
def test_every_flag_is_documented_and_parses(name: str, tmp_path: Path) -> None:
    flag = known()[f"--{name}"]
    assert "\n" not in flag.doc
    words = sample(flag)
    if flag.kind is Kind.TOPOLOGY:
        words = [str(tmp_path / "engines.yaml")]
        (tmp_path / "engines.yaml").write_text("sglang: [{server_groups: [{num_gpus: 8}]}]")
    config = parse([flag.option, *words]).config
    assert config != Config() or words == [str(flag.default)]


def any_text_is_a_value(flag: Flag) -> bool:
    return flag.kind in (Kind.TEXT, Kind.TEXT_LIST) and not flag.choices


@pytest.mark.parametrize("name", [name for name in FLAGS if not any_text_is_a_value(known()[f"--{name}"])])
def test_every_flag_but_texts_refuses_a_wrong_value_by_its_name(name: str) -> None:
    flag = known()[f"--{name}"]
    with pytest.raises(ConfigError, match=re.escape(flag.option)):
        parse([flag.option, "no such value"])


@pytest.mark.parametrize(("name", "default"), DEFAULTS.items())
def test_defaults(name: str, default: object) -> None:
    assert flags()[name].default == default


def test_every_hook_is_a_flag() -> None:
    assert {name.replace("_", "-") for name in HOOKS} - {"environment"} <= set(FLAGS)
