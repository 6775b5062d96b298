"""Rules on LoRA: options that adapters do not support, and LoRA flags that contradict each other."""

from collections.abc import Iterator

from fuligo.config import Config
from fuligo.config.findings import Change, Rule, Severity, simple_rule
from fuligo.config.flags import MTP_FLAGS, flags
from fuligo.config.rules.rule import Violation, rule, set_flag, unset_flag, unset_given

_SHAPE = ("lora_rank", "lora_alpha", "lora_target_modules", "lora_experts", "lora_use_rslora")
_RL_LR, _SFT_LR = 1e-5, 1e-4


@rule("CFG-LORA-MTP", "--lora-rank", "--lora-adapter", "--enable-mtp-training", "--mtp-num-layers")
def mtp_layers_have_no_adapter(config: Config) -> Iterator[Violation]:
    """Reject MTP layers with LoRA: PEFT has no adapter to train them with, and the torch trainer has no use for frozen ones."""
    layers = config.train.mtp_num_layers
    if config.uses_adapter:
        if config.train.enable_mtp_training:
            kept = () if config.resolved_train_backend == "torch" else ("mtp_num_layers",)
            fix = unset_given(config, (name for name in MTP_FLAGS if name not in kept))
            yield Violation("--enable-mtp-training: LoRA adapters do not support MTP layers", fix)
        elif layers and config.resolved_train_backend == "torch":
            effect = "the torch trainer neither trains nor saves MTP layers, and engines keep the ones they loaded"
            text = f"--mtp-num-layers {layers}: with LoRA {effect}"
            yield Violation(text, (unset_flag("mtp_num_layers"),), flags=("--mtp-num-layers",))


@rule("CFG-LORA-OFFLOAD", "--lora-rank", "--lora-adapter", "--optimizer-cpu-offload", "--use-precision-aware-optimizer")
def optimizer_state_is_small(config: Config) -> Iterator[Violation]:
    """Reject an offloaded or reduced optimizer state with LoRA: an adapter's state is small, and float32 like the adapter."""
    names = [name for name in ("optimizer_cpu_offload", "use_precision_aware_optimizer") if config.value_of(name)]
    if config.uses_adapter and config.trains and names:
        text = (
            f"{flags()[names[0]].option} is for the optimizer state of whole models; an adapter's is small, and stays on the GPU in float32"
        )
        yield Violation(text, tuple(unset_flag(name) for name in names))


@rule("CFG-LORA-SHAPE", "--lora-adapter", "--lora-rank", "--lora-alpha", "--lora-target-modules", "--lora-experts", "--lora-use-rslora")
def shape_is_given_once(config: Config) -> Iterator[Violation]:
    """Reject a shape given with --lora-adapter, whose adapter_config.json defines it."""
    given = [name for name in _SHAPE if config.value_of(name) != flags()[name].default]
    if config.lora.lora_adapter is not None and given:
        options = tuple(flags()[name].option for name in given)
        text = f"{' and '.join(options)} with --lora-adapter {config.lora.lora_adapter}: its adapter_config.json gives the adapter's shape"
        yield Violation(text, tuple(unset_flag(name) for name in given), flags=(*options, "--lora-adapter"))


@rule("CFG-LORA-PARAMS", "--lora-rank", "--lora-adapter", "--only-train-params-name-list", "--freeze-params-name-list")
def adapter_alone_is_trained(config: Config) -> Iterator[Violation]:
    """Reject lists of trained parameters with LoRA, which trains only the adapter."""
    names = [name for name in ("only_train_params_name_list", "freeze_params_name_list") if config.value_of(name)]
    if config.uses_adapter and names:
        text = f"{flags()[names[0]].option} chooses among the model's weights, but LoRA trains none of them"
        yield Violation(text, tuple(unset_flag(name) for name in names), "choose the adapted layers with --lora-target-modules")


@rule("CFG-LORA-LR", "--lr", "--lora-rank", "--lora-adapter", severity=Severity.WARNING)
def learning_rate_of_full_fine_tuning(config: Config) -> Iterator[Violation]:
    """Warn about a learning rate of full fine-tuning: an adapter needs about ten times as much ("LoRA Without Regret")."""
    lr = config.optimizer.lr
    if config.uses_adapter and config.trains and lr < 4e-6:
        better = _SFT_LR if config.is_sft else _RL_LR
        text = f"--lr {lr:g} is a learning rate for full fine-tuning; an adapter needs about ten times as much"
        yield Violation(text, (set_flag("lr", better),))


def _trains_adapter(config: Config) -> bool:
    return config.uses_adapter and config.trains


# fmt: off
TABLE: tuple[Rule[Config, Change], ...] = (
    simple_rule("CFG-LORA-BIAS-RATE", "--lora-rank --lora-adapter --moe-router-bias-update-rate",
        "Reject updates of the router's expert bias with LoRA: it is a base weight, which no checkpoint of the adapter contains.",
        lambda config: _trains_adapter(config) and config.megatron.get("moe_router_bias_update_rate"),
        lambda config: f"--moe-router-bias-update-rate {config.megatron.get('moe_router_bias_update_rate')} changes a weight of the model, "
        "but LoRA trains only the adapter",
        Change(("megatron", "moe_router_bias_update_rate"), None)),
    simple_rule("CFG-LORA-OVERLAP", "--lora-rank --lora-adapter --moe-shared-expert-overlap",
        "Reject overlapped shared experts with LoRA: their layers then skip the exchange among TP ranks, whose result A needs.",
        lambda config: _trains_adapter(config) and config.megatron.get("moe_shared_expert_overlap"),
        "--moe-shared-expert-overlap moves the exchange among TP ranks out of the layers that LoRA adapts",
        Change(("megatron", "moe_shared_expert_overlap"), None)),
    simple_rule("CFG-LORA-PROVIDER", "--lora-rank --lora-adapter --custom-model-provider-path",
        "Reject custom stages with LoRA: an adapter needs the inputs and outputs of fuligo's own linear layers.",
        lambda config: _trains_adapter(config) and config.model.custom_model_provider_path,
        lambda config: f"--custom-model-provider-path {config.model.custom_model_provider_path}: a LoRA adapter fits fuligo's own layers "
        "only",
        unset_flag("custom_model_provider_path")),
    simple_rule("CFG-LORA-DROPOUT", "--lora-dropout --loss-type",
        "Reject dropout in RL: the trainer's log-probabilities would differ from the engine's at random, and ratios compare the two.",
        lambda config: config.lora.lora_dropout and not config.is_sft,
        lambda config: f"--lora-dropout {config.lora.lora_dropout}: the trainer's log-probabilities would be random, but RL compares "
        "them to the engine's",
        unset_flag("lora_dropout"), advice="dropout is for --loss-type sft_loss"),
    simple_rule("CFG-LORA-EXPERTS", "--lora-experts --lora-dropout",
        "Reject dropout with adapters of experts, for which PEFT does not define it.",
        lambda config: config.lora.lora_experts and config.lora.lora_dropout,
        lambda config: f"--lora-dropout {config.lora.lora_dropout}: PEFT defines no dropout for adapters of experts (--lora-experts)",
        unset_flag("lora_dropout")),
    simple_rule("CFG-LORA-VALUES", "--lora-rank --lora-adapter --advantage-estimator",
        "Reject a value model with LoRA: all of its weights would be trained, so the adapter would save little.",
        lambda config: config.uses_adapter and config.trains_values,
        "--advantage-estimator ppo trains all weights of a value model, which LoRA does not support",
        set_flag("advantage_estimator", "grpo")),
    simple_rule("CFG-LORA-REFERENCE", "--lora-rank --lora-adapter --ref-update-interval",
        "Reject a moving reference with LoRA: the reference is the policy without its adapter, so that there is no second model.",
        lambda config: config.uses_adapter and config.train.ref_update_interval is not None,
        lambda config: f"--ref-update-interval {config.train.ref_update_interval}: with LoRA the reference is the policy without its "
        "adapter, which does not change",
        unset_flag("ref_update_interval")),
    simple_rule("CFG-LORA-SYNC", "--lora-sync",
        "Reject --lora-sync adapter if engines cannot load an adapter, such as external engines, or with a transport other than tensor.",
        lambda config: config.lora.lora_sync == "adapter" and config.needs_engine and config.no_adapter_because,
        lambda config: f"--lora-sync adapter: {config.no_adapter_because}", set_flag("lora_sync", "merged")),
    simple_rule("CFG-LORA-BASE", "--lora-base-precision --train-backend",
        "Reject a quantized base with the Megatron trainer, whose parallel layers and checkpoints need floating-point matrices.",
        lambda config: config.lora.lora_base_precision != "full" and _trains_adapter(config)
        and not config.trainer_capabilities.quantizes_base,
        lambda config: f"--lora-base-precision {config.lora.lora_base_precision} with the Megatron trainer, whose layers multiply by "
        "floating-point matrices only",
        unset_flag("lora_base_precision"), advice="split the base with --tensor-model-parallel-size, or use --train-backend torch"),
)
# fmt: on
