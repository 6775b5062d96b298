"""Settings of the trainer for given flags, engines and models."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from fuligo.config import Config
from fuligo.config import flags as known
from fuligo.config.command_line import parse
from fuligo.convert.fp8 import convert
from fuligo.convert.fp8_plan import plan_hf_to_fp8
from fuligo.errors import ConfigError
from fuligo.formats.quantization import EngineQuantization
from fuligo.formats.weight_manifest import AS_CHECKPOINT
from fuligo.job.trainer_settings import Device, trainer_settings
from fuligo.layout.megatron import layout_of
from fuligo.models.routing import RoutingShape
from fuligo.planner.lengths import micro_batch_tokens
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings
from fuligo.trainer.mtp import MTPTraining
from fuligo.trainer.packing import Capacity
from fuligo.trainer.profiling import ProfileSettings
from fuligo.trainer.ranks.settings import (
    CriticSettings,
    LearningRateSchedule,
    OptimizerSettings,
    TrainedParameters,
    TrainerSettings,
)
from fuligo.trainer.settings import loss_settings
from fuligo.trainer.torch_backend.settings import TorchTrainerSettings
from tests import tiny
from tests.fp8 import save_family


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(tmp_path_factory.mktemp("bf16"), "qwen3")


@pytest.fixture(scope="module")
def fp8(bf16: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    save = tmp_path_factory.mktemp("fp8")
    convert(plan_hf_to_fp8(["--model-dir", str(bf16), "--save-dir", str(save)]), lambda _: None)
    return save


def settings_of(hf_checkpoint: Path, bf16: Path, *more: str, device: Device = "cpu"):
    config = parse(["--hf-checkpoint", str(hf_checkpoint), "--ref-load", str(bf16), "--num-rollout", "1", "--device", device, *more]).config
    assert config.initial_weights_path is not None
    return trainer_settings(config, device, initial_weights=Path(config.initial_weights_path), num_rollout=1)


TRAINER_FLAGS: dict[str, Any] = {
    "device": "cpu",
    "actor_num_gpus_per_node": 2,
    "precision": "bf16",
    "advantage_estimator": "ppo",
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
    "value_clip": 0.3,
    "num_critic_only_steps": 2,
    "skip_zero_advantages": True,
    "use_opd": True,
    "lr": 1e-5,
    "min_lr": 1e-7,
    "lr_decay_style": "cosine",
    "lr_decay_iters": 50,
    "lr_warmup_iters": 3,
    "critic_lr": 2e-5,
    "critic_lr_warmup_iters": 4,
    "weight_decay": 0.2,
    "adam_beta1": 0.8,
    "adam_beta2": 0.95,
    "adam_eps": 1e-7,
    "clip_grad": 0.5,
    "num_steps_per_rollout": 2,
    "use_dynamic_batch_size": True,
    "max_tokens_per_gpu": 1000,
    "log_probs_max_tokens_per_gpu": 2000,
    "log_probs_chunk_size": 256,
    "share_prefixes": "on",
    "balance_data": True,
    "seed": 7,
    "only_train_params_name_list": ["mlp"],
    "freeze_params_name_list": ["norm"],
    "ref_update_interval": 5,
    "rollout_temperature": 0.9,
    "profile": [1],
    "profile_ranks": [1],
    "gradient_checkpointing": True,
    "torch_compile": False,
}
"""Flags of the trainer with other values than their defaults. No run could have all of them: they are not checked against each other."""


def test_every_flag_reaches_its_setting(bf16: Path, fp8: Path, tmp_path: Path):
    paths = {"hf_checkpoint": bf16, "ref_load": bf16, "critic_load": fp8, "opd_teacher_load": bf16}
    groups: dict[str, dict[str, Any]] = {}
    for name, value in (TRAINER_FLAGS | {name: str(path) for name, path in paths.items()}).items():
        groups.setdefault(known.flags()[name].group, {})[name] = value
    config = Config.model_validate(groups)
    settings = trainer_settings(config, "cpu", initial_weights=bf16, num_rollout=9, profile_dir=tmp_path)

    policy = OptimizerSettings(LearningRateSchedule(1e-5, 1e-7, "cosine", 3, 50), (0.8, 0.95), 1e-7, 0.2, 0.5)
    of_critic = replace(policy, schedule=replace(policy.schedule, peak=2e-5, warmup_steps=4))
    expected = {
        "hf_checkpoint": bf16,
        "initial_weights": bf16,
        "optimizer": policy,
        "loss": loss_settings(config),
        "reference_weights": bf16,
        "teacher_weights": bf16,
        "ref_update_interval": 5,
        "critic": CriticSettings(fp8, of_critic, clip=0.3, num_only_rollouts=2, may_begin_at_resume=True),
        "needs_old_logprobs": True,
        "temperature": 0.9,
        "capacity": Capacity(max_tokens=1000),
        "score_capacity": Capacity(max_tokens=2000),
        "shares_prefixes": True,
        "chunk_tokens": 256,
        "balance_data": True,
        "skips_zero_advantages": True,
        "trained": TrainedParameters(("mlp",), ("norm",)),
        "precision": "bf16",
        "num_ranks": 2,
        "seed": 7,
        "profile": ProfileSettings((1,), (1,), tmp_path),
        "gradient_checkpointing": True,
    }
    assert {name: getattr(settings, name) for name in expected} == expected

    of_engines_and_devices = {"lora", "device", "shares_device", "stays_on_device", "sync_dtype", "engine_format", "command_timeout_s"}
    names = {field.name for field in fields(TrainerSettings)} - of_engines_and_devices
    assert names <= set(expected), "no flag was given for these"


def test_sglang_on_an_fp8_checkpoint_gets_its_format_and_the_trainer_starts_elsewhere(bf16: Path, fp8: Path):
    settings = settings_of(fp8, bf16, "--rollout-backend", "sglang")
    assert settings.initial_weights == bf16
    assert settings.engine_format.quantization == EngineQuantization.read(fp8) is not None
    assert settings.sync_dtype is None  # that of config.json, as the converter finds it


def test_sglang_on_a_bf16_checkpoint_gets_tensors_as_checkpoints_have_them(bf16: Path):
    assert settings_of(bf16, bf16, "--rollout-backend", "sglang").engine_format == AS_CHECKPOINT


def test_the_embedded_engine_computes_with_dequantized_fp8_weights(bf16: Path, fp8: Path):
    assert settings_of(fp8, bf16).engine_format == AS_CHECKPOINT


def test_prefixes_are_shared_if_the_layers_of_policy_and_teacher_can(bf16: Path, tmp_path: Path):
    teacher = tiny.save_checkpoint(tmp_path, "qwen3_next")
    distilled = ("--use-opd", "--opd-type", "trainer", "--opd-teacher-load")
    assert settings_of(bf16, bf16, *distilled, str(bf16)).shares_prefixes
    assert not settings_of(bf16, bf16, *distilled, str(teacher)).shares_prefixes
    with pytest.raises(ConfigError, match="cannot use --share-prefixes on for the teacher qwen3_next: its linear attention"):
        settings_of(bf16, bf16, *distilled, str(teacher), "--share-prefixes", "on")


def test_a_step_has_no_more_tokens_than_its_longest_samples(bf16: Path):
    size = ("--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--num-steps-per-rollout", "2", "--rollout-max-response-len", "50")
    for flags, expected in (((), None), (("--rollout-max-prompt-len", "100"), 4 * 150), (("--rollout-max-context-len", "90"), 4 * 90)):
        settings = settings_of(bf16, bf16, *size, *flags)
        assert isinstance(settings, TorchTrainerSettings)
        assert settings.max_step_tokens == expected


@pytest.mark.parametrize("flags", [(), ("--use-dynamic-batch-size", "--max-tokens-per-gpu", "12288")])
def test_the_plan_knows_the_rows_of_context_parallel_ranks(tmp_path: Path, flags: tuple[str, ...]):
    size = ("--train-backend", "megatron", "--actor-num-gpus-per-node", "2", "--context-parallel-size", "2", *flags)
    model = tiny.save_checkpoint(tmp_path)
    config = parse(["--hf-checkpoint", str(model), "--ref-load", str(model), "--num-rollout", "1", *size]).config
    settings = trainer_settings(config, "cpu", initial_weights=model, num_rollout=1)
    assert settings.capacity.max_tokens == 2 * micro_batch_tokens(config, layout_of(config))


def test_the_torch_trainer_knows_the_gpus_of_an_engine(bf16: Path):
    engines = ("--rollout-backend", "sglang", "--train-backend", "torch", "--rollout-num-gpus", "4", "--rollout-num-gpus-per-engine")
    for size in (1, 2):
        settings = settings_of(bf16, bf16, *engines, str(size), device="cuda")
        assert isinstance(settings, TorchTrainerSettings)
        assert settings.engine_tp_size == size


EMBEDDED_MEGATRON = ("--rollout-backend", "embedded", "--train-backend", "megatron")


def test_the_embedded_engine_is_sent_no_prediction_layers(tmp_path: Path):
    tiny.model_config("glm4_moe_lite", num_nextn_predict_layers=1).save_pretrained(tmp_path)
    settings = settings_of(tmp_path, tmp_path, *EMBEDDED_MEGATRON, "--mtp-num-layers", "1")
    assert settings.engine_format.left_out == ("model.layers.2.",)
    elsewhere = settings_of(tmp_path, tmp_path, "--rollout-backend", "sglang", "--train-backend", "megatron", "--mtp-num-layers", "1")
    assert elsewhere.engine_format.left_out == ()


def test_the_torch_trainer_loads_and_trains_an_mtp_layer(tmp_path: Path):
    tiny.model_config("qwen3_next").save_pretrained(tmp_path)
    torch = ("--train-backend", "torch")
    for flags, expected in (
        ((), (False, None)),
        (("--mtp-num-layers", "1"), (True, None)),
        (("--mtp-num-layers", "1", "--enable-mtp-training"), (True, MTPTraining(0.2, is_joint=False))),
        (
            ("--mtp-num-layers", "1", "--enable-mtp-training", "--mtp-loss-scaling-factor", "0.5", "--mtp-joint-training"),
            (True, MTPTraining(0.5, is_joint=True)),
        ),
    ):
        settings = settings_of(tmp_path, tmp_path, *torch, "--rollout-backend", "embedded", *flags)
        assert isinstance(settings, TorchTrainerSettings)
        assert (settings.has_mtp, settings.mtp) == expected
        assert settings.engine_format.left_out == ("mtp.",)
    served = settings_of(tmp_path, tmp_path, *torch, "--rollout-backend", "sglang", "--rollout-num-gpus", "1", "--mtp-num-layers", "1")
    assert served.engine_format.left_out == ()


@pytest.mark.parametrize(
    ("family", "cause"), [("glm_moe_dsa", "deepseek_sparse_attention"), ("deepseek_v32", "deepseek_sparse_attention"), ("mimo", "mimo")]
)
def test_what_the_embedded_engine_cannot_serve_is_refused_before_it_starts(tmp_path: Path, family: str, cause: str):
    tiny.model_config("qwen2" if family == "mimo" else family).save_pretrained(tmp_path)
    config_json = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config_json | {"model_type": family}))
    with pytest.raises(ConfigError, match=rf"^cannot use --hf-checkpoint .*{cause}.*(; |, or )use --rollout-backend sglang$") as error:
        settings_of(tmp_path, tmp_path, *EMBEDDED_MEGATRON)
    assert "--model-path" not in str(error.value)
    assert str(error.value).count("--rollout-backend") == 1
    with pytest.raises(ConfigError, match=r"(; |, or )use --rollout-backend sglang --train-backend megatron$"):
        settings_of(tmp_path, tmp_path)


@pytest.mark.parametrize("flags", [(), EMBEDDED_MEGATRON, ("--rollout-backend", "sglang", "--train-backend", "megatron")])
def test_nemotron_h_is_refused_without_advice_to_use_another_backend(tmp_path: Path, flags: tuple[str, ...]):
    tiny.model_config("nemotron_h", layers_block_type=["mamba", "attention"]).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"from one packed sample to the next.*; choose another model$") as error:
        settings_of(tmp_path, tmp_path, *flags)
    assert "--train-backend" not in str(error.value)


@pytest.mark.parametrize(
    ("device", "given", "expected"),
    [
        ("cpu", ["--sglang-dtype", "float32"], "fp32"),
        ("cuda", ["--sglang-dtype", "float32"], "fp32"),
        ("cpu", ["--sglang-dtype", "bfloat16"], "bf16"),
        ("cuda", ["--sglang-dtype", "bfloat16"], "bf16"),
        ("cuda", ["--rollout-backend", "sglang"], "bf16"),  # it is started so
        ("cpu", ["--rollout-backend", "sglang"], "fp32"),
    ],
)
def test_sglang_gets_weights_in_the_type_that_it_computes_in(bf16: Path, given: list[str], expected: str | None, device: Device):
    assert settings_of(bf16, bf16, *given, device=device).sync_dtype == expected


def test_the_embedded_engine_gets_weights_in_the_type_that_it_computes_in(bf16: Path):
    assert settings_of(bf16, bf16, device="cuda").sync_dtype == "bf16"
    assert settings_of(bf16, bf16, "--embedded-dtype", "fp32", device="cuda").sync_dtype == "fp32"


@pytest.mark.parametrize(
    ("flags", "replays", "records"),
    [
        ([], False, False),
        (["--use-routing-replay"], True, True),
        (["--use-rollout-routing-replay"], True, False),
        (["--use-routing-replay", "--use-rollout-routing-replay"], True, False),
    ],
)
def test_routing_is_recorded_by_the_trainer_unless_engines_tell(tmp_path: Path, flags: list[str], replays: bool, records: bool):
    tiny.model_config("glm4_moe").save_pretrained(tmp_path)
    settings = settings_of(tmp_path, tmp_path, "--rollout-backend", "sglang", "--train-backend", "megatron", *flags)
    assert isinstance(settings, MegatronTrainerSettings)
    assert settings.routing == (RoutingShape.read(tmp_path) if replays else None)
    assert settings.records_routing is records


def test_ranks_are_told_the_path_of_a_model_provider(bf16: Path):
    settings = settings_of(bf16, bf16, "--rollout-backend", "sglang", "--custom-model-provider-path", "my_models.py:provider")
    assert isinstance(settings, MegatronTrainerSettings)
    assert settings.model_provider == "my_models.py:provider"


def test_a_dense_model_has_no_routing_to_replay(bf16: Path):
    with pytest.raises(ConfigError, match="it has no experts"):
        settings_of(bf16, bf16, "--rollout-backend", "sglang", "--use-routing-replay")


def test_a_value_model_starts_from_the_policy_or_from_critic_load(bf16: Path, tmp_path: Path):
    assert settings_of(bf16, bf16).critic is None
    ppo = ("--advantage-estimator", "ppo", "--lr", "1e-6", "--lr-decay-style", "linear")
    critic = settings_of(bf16, bf16, *ppo).critic
    assert critic is not None
    assert (critic.initial_weights, critic.may_begin_at_resume, critic.clip, critic.num_only_rollouts) == (bf16, False, 0.2, 0)
    assert critic.optimizer == settings_of(bf16, bf16, *ppo).optimizer
    told = ("--critic-lr", "1e-5", "--critic-lr-warmup-iters", "3", "--value-clip", "0.5", "--num-critic-only-steps", "4")
    config = parse(["--hf-checkpoint", str(bf16), "--num-rollout", "10", *ppo, *told, "--critic-load", str(tmp_path)]).config
    settings = trainer_settings(config, "cpu", initial_weights=bf16, num_rollout=10)
    critic = settings.critic
    assert critic is not None
    assert (critic.initial_weights, critic.may_begin_at_resume, critic.clip, critic.num_only_rollouts) == (tmp_path, True, 0.5, 4)
    schedule = critic.optimizer.schedule
    assert (schedule.peak, schedule.warmup_steps, schedule.decay_steps) == (1e-5, 3, 10)
    assert (settings.optimizer.schedule.peak, settings.optimizer.schedule.decay_steps) == (1e-6, 6), "what the policy does not learn from"


@pytest.mark.parametrize(
    ("device", "precision", "flags", "compiles"),
    [
        ("cuda", "bf16", (), True), ("cuda", "bf16", ("--no-torch-compile",), False),
        ("cuda", "fp32", (), False), ("cpu", "bf16", ("--torch-compile",), False),
    ],
)  # fmt: skip
def test_layers_are_compiled_where_they_can_be(bf16: Path, device: Device, precision: str, flags: tuple[str, ...], compiles: bool):
    words = ("--train-backend", "torch", "--precision", precision, *flags)
    assert settings_of(bf16, bf16, *words, device=device).compiles_dense_layers is compiles


FP8 = ("--train-backend", "megatron", "--rollout-backend", "sglang", "--fp8-format", "e4m3", "--fp8-recipe", "blockwise")


def test_rows_trained_in_fp8_are_multiples_of_16_tokens_on_every_rank(bf16: Path):
    sizes = ("--actor-num-gpus-per-node", "4", "--tensor-model-parallel-size", "2", "--context-parallel-size", "2")
    settings = settings_of(bf16, bf16, *FP8, *sizes, "--data-pad-size-multiplier", "24", device="cuda")
    assert isinstance(settings, MegatronTrainerSettings) and settings.uses_fp8
    assert settings.pad_multiple_tokens == 192  # 24 and 16 on each of four ranks


@pytest.mark.parametrize(("device", "precision"), [("cpu", "bf16"), ("cuda", "fp32")])
def test_fp8_training_needs_a_gpu_and_weights_in_bf16(bf16: Path, device: Device, precision: str):
    with pytest.raises(ConfigError, match=f"cannot use --fp8-format e4m3 with --device {device} and --precision {precision}: "):
        settings_of(bf16, bf16, *FP8, "--precision", precision, device=device)
