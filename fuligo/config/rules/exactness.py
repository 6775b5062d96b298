"""Rules on --exact-on-policy: the settings under which engine and trainer compute bitwise equal log-probabilities."""

from collections.abc import Iterator

from fuligo.config import Config
from fuligo.config.findings import Change, Rule, Severity, simple_rule
from fuligo.config.flag import option_name
from fuligo.config.rules.rule import Violation, rule, set_flag, unset_flag
from fuligo.config.topology import policy_groups, policy_tp_size

_OFF = unset_flag("exact_on_policy")
_ENGINE_NEEDS = {
    "attention_backend": ("triton",),
    "prefill_attention_backend": ("triton",),
    "decode_attention_backend": ("triton",),
    "dtype": ("auto", "bfloat16"),
    "kv_cache_dtype": ("auto", "bfloat16", "bf16"),
    "page_size": (1,),
    "dp_size": (1,),
    "disable_prefill_cuda_graph": (True,),
    "enable_torch_compile": (False,),
    "quantization": (),
    "torchao_config": ("",),
    "speculative_algorithm": (),
    "moe_runner_backend": ("triton",),
    "moe_a2a_backend": ("none",),
    "ep_size": (1,),
    "ep_num_redundant_experts": (0,),
    "enable_eplb": (False,),
    "enable_two_batch_overlap": (False,),
    "moe_dense_tp_size": (),
    "moe_dp_size": (1,),
    "attn_cp_size": (1,),
    "enable_dp_attention": (False,),
    "enable_attn_tp_input_scattered": (False,),
    "enable_quant_communications": (False,),
    "enable_flashinfer_allreduce_fusion": (False,),
    "flashinfer_allreduce_fusion_backend": (),
    "enforce_disable_flashinfer_allreduce_fusion": (True,),
}
"""SGLang argument -> values with which SGLang computes as the trainer does; empty: it must not be given."""
MOST_GPUS = 2
"""Maximum tensor-parallel GPUs of an engine: the sum of more than two numbers depends on the order of the all-reduce."""


@rule("CFG-EXACT-BACKENDS", "--exact-on-policy", "--train-backend", "--rollout-backend", "--device")
def backends_compute_alike(config: Config) -> Iterator[Violation]:
    """Require the torch trainer, with the embedded engine on a CPU or SGLang on GPUs, started by fuligo, for exact log-probabilities."""
    if not config.train.exact_on_policy:
        return
    there = config.engine_capabilities.exact_on
    if config.resolved_train_backend == "megatron":
        text = "the Megatron trainer has no batch-invariant operations"
        yield Violation(f"--exact-on-policy: {text}", (_OFF,), flags=("--exact-on-policy", "--train-backend"))
    elif config.engine.rollout_external_engine_addrs:
        text = "--rollout-external-engine-addrs with --exact-on-policy: only engines that fuligo starts compute as the trainer does"
        yield Violation(text, (_OFF,), flags=("--exact-on-policy", "--rollout-external-engine-addrs"))
    elif config.needs_engine and config.cluster.device not in ("auto", there):
        text = f"--device {config.cluster.device}: --exact-on-policy with --rollout-backend {config.resolved_rollout_backend} needs {there}"
        yield Violation(text, (_OFF,), f"or use --device {there}", ("--exact-on-policy", "--device"))


@rule("CFG-EXACT-ENGINE", "--exact-on-policy", "--rollout-num-gpus-per-engine", "--sglang-attention-backend")
def engines_compute_as_the_trainer(config: Config) -> Iterator[Violation]:
    """Reject arguments of SGLang with which its log-probabilities differ from the trainer's."""
    if not config.train.exact_on_policy:
        return
    size = policy_tp_size(config)
    if size > MOST_GPUS:
        text = (
            f"engines on {size} GPUs sum the partial results of {size} ranks in an order that the trainer cannot repeat; "
            f"--exact-on-policy needs at most {MOST_GPUS} GPUs per engine"
        )
        fix = (set_flag("rollout_num_gpus_per_engine", MOST_GPUS),)
        yield Violation(text, fix, flags=("--exact-on-policy", "--rollout-num-gpus-per-engine"))
        return
    for group in policy_groups(config):
        if group.tp_size != size:
            text = f"engines on {group.tp_size} and on {size} GPUs round differently; --exact-on-policy needs one size for all engines"
            yield Violation(text, (_OFF,), flags=("--exact-on-policy", "--rollout-num-gpus-per-engine"))
            return
        for name, allowed in _ENGINE_NEEDS.items():
            given = group.arguments.get(name)
            if given is not None and given not in allowed:
                option = option_name(f"sglang_{name}")
                text = f"{option} {given} with --exact-on-policy: SGLang would not compute as the trainer does"
                yield Violation(text, (Change(("sglang", name), allowed[0] if allowed else None),), flags=("--exact-on-policy", option))
                return


@rule("CFG-EXACT-POLICY", "--exact-on-policy", "--async-mode", "--update-weights-interval")
def engines_have_the_trained_weights(config: Config) -> Iterator[Violation]:
    """Reject sampling with older weights than the trained ones, since such log-probabilities differ from the trainer's."""
    if config.train.exact_on_policy:
        mode, interval = config.rollout.async_mode, config.weight_sync.update_weights_interval
        if mode != "sync":
            text = f"--async-mode {mode} samples with older weights than those trained; --exact-on-policy needs sync"
            yield Violation(text, (_OFF,), flags=("--exact-on-policy", "--async-mode"))
        elif interval > 1:
            text = f"--update-weights-interval {interval} samples with older weights than those trained; --exact-on-policy needs 1"
            yield Violation(text, (unset_flag("update_weights_interval"),), flags=("--exact-on-policy", "--update-weights-interval"))


@rule("CFG-EXACT-PASSES", "--exact-on-policy", "--lora-rank", "--lora-adapter")
def passes_are_batch_invariant(config: Config) -> Iterator[Violation]:
    """Reject adapters, whose output engine and trainer add in different ways."""
    if config.train.exact_on_policy and config.uses_adapter:
        option = "--lora-rank" if config.lora.lora_adapter is None else "--lora-adapter"
        text = f"{option} with --exact-on-policy: engine and trainer add an adapter's output in different ways"
        yield Violation(text, (_OFF,), flags=("--exact-on-policy", option))


@rule("CFG-EXACT-PRECISION", "--exact-on-policy", "--precision", "--embedded-dtype")
def precision_is_one(config: Config) -> Iterator[Violation]:
    """Require one precision of engine and trainer for exact log-probabilities: bf16 on GPUs; on a CPU, auto is fp32."""
    if not config.train.exact_on_policy:
        return
    if config.engine_capabilities.exact_on == "cuda":
        if config.model.precision == "fp32":
            yield Violation("--precision fp32: --exact-on-policy with SGLang needs bf16", (set_flag("precision", "bf16"),))
        return
    trainer, engine = (asked.replace("auto", "fp32") for asked in (config.model.precision, config.engine.embedded_dtype))
    if trainer != engine:
        given = f"--precision {config.model.precision} and --embedded-dtype {config.engine.embedded_dtype}"
        text = f"{given}: --exact-on-policy needs the same precision for engine and trainer"
        yield Violation(text, (set_flag("embedded_dtype", trainer),))


# fmt: off
TABLE: tuple[Rule[Config, Change], ...] = (
    simple_rule("CFG-EXACT-OLD-POLICY", "--exact-on-policy --use-rollout-logprobs",
        "Reject --use-rollout-logprobs with several steps: only samples of the first step could be compared.",
        lambda config: config.train.exact_on_policy and config.algorithm.use_rollout_logprobs and not config.is_sft
        and config.resolved_num_steps_per_rollout > 1,
        "--use-rollout-logprobs skips the pass that --exact-on-policy compares with the engine's log-probabilities",
        unset_flag("use_rollout_logprobs")),
    simple_rule("CFG-EXACT-CORRECTION", "--exact-on-policy --use-tis",
        "Warn about importance weights of exact log-probabilities: all are 1, except for tokens sampled with older weights.",
        lambda config: config.train.exact_on_policy and config.algorithm.use_tis
        and not config.rollout.partial_rollout and config.algorithm.custom_tis_function_path is None,
        "--use-tis with --exact-on-policy corrects nothing: the trainer's log-probabilities equal the engine's, so every weight is 1",
        unset_flag("use_tis"), severity=Severity.WARNING),
)
# fmt: on
