"""Rules on LoRA: options that adapters do not support, and LoRA flags that contradict each other."""

from fuligo.config import Config
from fuligo.config.findings import Change, Severity
from fuligo.config.flags import MTP_FLAGS, flags
from fuligo.config.rules.rule import Violation, rule, set_flag, unset_flag, unset_given

_SHAPE = ("lora_rank", "lora_alpha", "lora_target_modules", "lora_experts", "lora_use_rslora")
_RL_LR, _SFT_LR = 1e-5, 1e-4


@rule("CFG-LORA-MTP", "--lora-rank", "--lora-adapter", "--enable-mtp-training", "--mtp-num-layers")
def mtp_layers_have_no_adapter(config: Config) -> Violation | None:
    """Reject MTP layers with LoRA: PEFT has no adapter to train them with, and the torch trainer has no use for frozen ones."""
    layers = config.train.mtp_num_layers
    if not config.uses_adapter:
        return None
    if config.train.enable_mtp_training:
        kept = () if config.resolved_train_backend == "torch" else ("mtp_num_layers",)
        fix = unset_given(config, (name for name in MTP_FLAGS if name not in kept))
        return Violation("--enable-mtp-training: LoRA adapters do not support MTP layers", fix)
    if not layers or config.resolved_train_backend != "torch":
        return None
    text = (
        f"--mtp-num-layers {layers}: with LoRA the torch trainer neither trains nor saves MTP layers, and engines keep the ones they loaded"
    )
    return Violation(text, (unset_flag("mtp_num_layers"),), flags=("--mtp-num-layers",))


@rule("CFG-LORA-BIAS-RATE", "--lora-rank", "--lora-adapter", "--moe-router-bias-update-rate")
def router_correction_stays(config: Config) -> Violation | None:
    """Reject updates of the router's expert bias with LoRA: it is a base weight, which no checkpoint of the adapter contains."""
    rate = config.megatron.get("moe_router_bias_update_rate")
    if not (config.uses_adapter and config.trains and rate):
        return None
    text = f"--moe-router-bias-update-rate {rate} changes a weight of the model, but LoRA trains only the adapter"
    return Violation(text, (Change(("megatron", "moe_router_bias_update_rate"), None),))


@rule("CFG-LORA-OVERLAP", "--lora-rank", "--lora-adapter", "--moe-shared-expert-overlap")
def shared_experts_exchange_in_their_layers(config: Config) -> Violation | None:
    """Reject overlapped shared experts with LoRA: their layers then skip the exchange among TP ranks, whose result A needs."""
    if not (config.uses_adapter and config.trains and config.megatron.get("moe_shared_expert_overlap")):
        return None
    text = "--moe-shared-expert-overlap moves the exchange among TP ranks out of the layers that LoRA adapts"
    return Violation(text, (Change(("megatron", "moe_shared_expert_overlap"), None),))


@rule("CFG-LORA-OFFLOAD", "--lora-rank", "--lora-adapter", "--optimizer-cpu-offload", "--use-precision-aware-optimizer")
def optimizer_state_is_small(config: Config) -> Violation | None:
    """Reject an offloaded or reduced optimizer state with LoRA: an adapter's state is small, and float32 like the adapter."""
    names = [name for name in ("optimizer_cpu_offload", "use_precision_aware_optimizer") if config.value_of(name)]
    if not (config.uses_adapter and config.trains and names):
        return None
    text = f"{flags()[names[0]].option} is for the optimizer state of whole models; an adapter's is small, and stays on the GPU in float32"
    return Violation(text, tuple(unset_flag(name) for name in names))


@rule("CFG-LORA-PROVIDER", "--lora-rank", "--lora-adapter", "--custom-model-provider-path")
def layers_are_those_of_fuligo(config: Config) -> Violation | None:
    """Reject custom stages with LoRA: an adapter needs the inputs and outputs of fuligo's own linear layers."""
    if not (config.uses_adapter and config.trains and config.model.custom_model_provider_path):
        return None
    text = f"--custom-model-provider-path {config.model.custom_model_provider_path}: a LoRA adapter fits fuligo's own layers only"
    return Violation(text, (unset_flag("custom_model_provider_path"),))


@rule("CFG-LORA-SHAPE", "--lora-adapter", "--lora-rank", "--lora-alpha", "--lora-target-modules", "--lora-experts", "--lora-use-rslora")
def shape_is_given_once(config: Config) -> Violation | None:
    """Reject a shape given with --lora-adapter, whose adapter_config.json defines it."""
    given = [name for name in _SHAPE if config.value_of(name) != flags()[name].default]
    if config.lora.lora_adapter is None or not given:
        return None
    options = tuple(flags()[name].option for name in given)
    text = f"{' and '.join(options)} with --lora-adapter {config.lora.lora_adapter}: its adapter_config.json gives the adapter's shape"
    return Violation(text, tuple(unset_flag(name) for name in given), flags=(*options, "--lora-adapter"))


@rule("CFG-LORA-PARAMS", "--lora-rank", "--lora-adapter", "--only-train-params-name-list", "--freeze-params-name-list")
def adapter_alone_is_trained(config: Config) -> Violation | None:
    """Reject lists of trained parameters with LoRA, which trains only the adapter."""
    names = [name for name in ("only_train_params_name_list", "freeze_params_name_list") if config.value_of(name)]
    if not config.uses_adapter or not names:
        return None
    text = f"{flags()[names[0]].option} chooses among the model's weights, but LoRA trains none of them"
    return Violation(text, tuple(unset_flag(name) for name in names), "choose the adapted layers with --lora-target-modules")


@rule("CFG-LORA-DROPOUT", "--lora-dropout", "--loss-type")
def dropout_only_without_ratios(config: Config) -> Violation | None:
    """Reject dropout in RL: the trainer's log-probabilities would differ from the engine's at random, and ratios compare the two."""
    if not config.lora.lora_dropout or config.is_sft:
        return None
    given = f"--lora-dropout {config.lora.lora_dropout}"
    text = f"{given}: the trainer's log-probabilities would be random, but RL compares them to the engine's"
    return Violation(text, (unset_flag("lora_dropout"),), "dropout is for --loss-type sft_loss")


@rule("CFG-LORA-EXPERTS", "--lora-experts", "--lora-dropout")
def experts_have_no_dropout(config: Config) -> Violation | None:
    """Reject dropout with adapters of experts, for which PEFT does not define it."""
    if not (config.lora.lora_experts and config.lora.lora_dropout):
        return None
    text = f"--lora-dropout {config.lora.lora_dropout}: PEFT defines no dropout for adapters of experts (--lora-experts)"
    return Violation(text, (unset_flag("lora_dropout"),))


@rule("CFG-LORA-VALUES", "--lora-rank", "--lora-adapter", "--advantage-estimator")
def no_value_model_beside_an_adapter(config: Config) -> Violation | None:
    """Reject a value model with LoRA: all of its weights would be trained, so the adapter would save little."""
    if not (config.uses_adapter and config.trains_values):
        return None
    text = "--advantage-estimator ppo trains all weights of a value model, which LoRA does not support"
    return Violation(text, (set_flag("advantage_estimator", "grpo"),))


@rule("CFG-LORA-REFERENCE", "--lora-rank", "--lora-adapter", "--ref-update-interval")
def reference_is_the_base(config: Config) -> Violation | None:
    """Reject a moving reference with LoRA: the reference is the policy without its adapter, so that there is no second model."""
    interval = config.train.ref_update_interval
    if not config.uses_adapter or interval is None:
        return None
    text = f"--ref-update-interval {interval}: with LoRA the reference is the policy without its adapter, which does not change"
    return Violation(text, (unset_flag("ref_update_interval"),))


@rule("CFG-LORA-SYNC", "--lora-sync")
def adapter_reaches_the_engine(config: Config) -> Violation | None:
    """Reject --lora-sync adapter if engines cannot load an adapter, such as external engines, or with a transport other than tensor."""
    if config.lora.lora_sync != "adapter" or not config.needs_engine or config.engines_can_take_adapter:
        return None
    return Violation(f"--lora-sync adapter: {config.no_adapter_because}", (set_flag("lora_sync", "merged"),))


@rule("CFG-LORA-BASE", "--lora-base-precision", "--train-backend")
def base_stays_in_the_type_of_parallel_layers(config: Config) -> Violation | None:
    """Reject a quantized base with the Megatron trainer, whose parallel layers and checkpoints need floating-point matrices."""
    precision = config.lora.lora_base_precision
    if precision == "full" or not (config.uses_adapter and config.trains) or config.trainer_capabilities.quantises_base:
        return None
    text = f"--lora-base-precision {precision} with the Megatron trainer, whose layers multiply by floating-point matrices only"
    return Violation(
        text, (unset_flag("lora_base_precision"),), "split the base with --tensor-model-parallel-size, or use --train-backend torch"
    )


@rule("CFG-LORA-LR", "--lr", "--lora-rank", "--lora-adapter", severity=Severity.WARNING)
def learning_rate_of_full_fine_tuning(config: Config) -> Violation | None:
    """Warn about a learning rate of full fine-tuning: an adapter needs about ten times as much ("LoRA Without Regret")."""
    lr = config.optimizer.lr
    if not config.uses_adapter or not config.trains or lr >= 4e-6:
        return None
    better = _SFT_LR if config.is_sft else _RL_LR
    return Violation(
        f"--lr {lr:g} is a learning rate for full fine-tuning; an adapter needs about ten times as much", (set_flag("lr", better),)
    )
