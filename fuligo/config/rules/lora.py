"""Rules on LoRA: options that adapters do not support, and LoRA flags that contradict each other."""

from collections.abc import Iterator

from fuligo.config import Config
from fuligo.config.findings import Change, Severity
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


@rule("CFG-LORA-BIAS-RATE", "--lora-rank", "--lora-adapter", "--moe-router-bias-update-rate")
def router_correction_stays(config: Config) -> Iterator[Violation]:
    """Reject updates of the router's expert bias with LoRA: it is a base weight, which no checkpoint of the adapter contains."""
    rate = config.megatron.get("moe_router_bias_update_rate")
    if config.uses_adapter and config.trains and rate:
        text = f"--moe-router-bias-update-rate {rate} changes a weight of the model, but LoRA trains only the adapter"
        yield Violation(text, (Change(("megatron", "moe_router_bias_update_rate"), None),))


@rule("CFG-LORA-OVERLAP", "--lora-rank", "--lora-adapter", "--moe-shared-expert-overlap")
def shared_experts_exchange_in_their_layers(config: Config) -> Iterator[Violation]:
    """Reject overlapped shared experts with LoRA: their layers then skip the exchange among TP ranks, whose result A needs."""
    if config.uses_adapter and config.trains and config.megatron.get("moe_shared_expert_overlap"):
        text = "--moe-shared-expert-overlap moves the exchange among TP ranks out of the layers that LoRA adapts"
        yield Violation(text, (Change(("megatron", "moe_shared_expert_overlap"), None),))


@rule("CFG-LORA-OFFLOAD", "--lora-rank", "--lora-adapter", "--optimizer-cpu-offload", "--use-precision-aware-optimizer")
def optimizer_state_is_small(config: Config) -> Iterator[Violation]:
    """Reject an offloaded or reduced optimizer state with LoRA: an adapter's state is small, and float32 like the adapter."""
    names = [name for name in ("optimizer_cpu_offload", "use_precision_aware_optimizer") if config.value_of(name)]
    if config.uses_adapter and config.trains and names:
        text = (
            f"{flags()[names[0]].option} is for the optimizer state of whole models; an adapter's is small, and stays on the GPU in float32"
        )
        yield Violation(text, tuple(unset_flag(name) for name in names))


@rule("CFG-LORA-PROVIDER", "--lora-rank", "--lora-adapter", "--custom-model-provider-path")
def layers_are_those_of_fuligo(config: Config) -> Iterator[Violation]:
    """Reject custom stages with LoRA: an adapter needs the inputs and outputs of fuligo's own linear layers."""
    if config.uses_adapter and config.trains and config.model.custom_model_provider_path:
        text = f"--custom-model-provider-path {config.model.custom_model_provider_path}: a LoRA adapter fits fuligo's own layers only"
        yield Violation(text, (unset_flag("custom_model_provider_path"),))


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


@rule("CFG-LORA-DROPOUT", "--lora-dropout", "--loss-type")
def dropout_only_without_ratios(config: Config) -> Iterator[Violation]:
    """Reject dropout in RL: the trainer's log-probabilities would differ from the engine's at random, and ratios compare the two."""
    if config.lora.lora_dropout and not config.is_sft:
        given = f"--lora-dropout {config.lora.lora_dropout}"
        text = f"{given}: the trainer's log-probabilities would be random, but RL compares them to the engine's"
        yield Violation(text, (unset_flag("lora_dropout"),), "dropout is for --loss-type sft_loss")


@rule("CFG-LORA-EXPERTS", "--lora-experts", "--lora-dropout")
def experts_have_no_dropout(config: Config) -> Iterator[Violation]:
    """Reject dropout with adapters of experts, for which PEFT does not define it."""
    if config.lora.lora_experts and config.lora.lora_dropout:
        text = f"--lora-dropout {config.lora.lora_dropout}: PEFT defines no dropout for adapters of experts (--lora-experts)"
        yield Violation(text, (unset_flag("lora_dropout"),))


@rule("CFG-LORA-VALUES", "--lora-rank", "--lora-adapter", "--advantage-estimator")
def no_value_model_beside_an_adapter(config: Config) -> Iterator[Violation]:
    """Reject a value model with LoRA: all of its weights would be trained, so the adapter would save little."""
    if config.uses_adapter and config.trains_values:
        text = "--advantage-estimator ppo trains all weights of a value model, which LoRA does not support"
        yield Violation(text, (set_flag("advantage_estimator", "grpo"),))


@rule("CFG-LORA-REFERENCE", "--lora-rank", "--lora-adapter", "--ref-update-interval")
def reference_is_the_base(config: Config) -> Iterator[Violation]:
    """Reject a moving reference with LoRA: the reference is the policy without its adapter, so that there is no second model."""
    interval = config.train.ref_update_interval
    if config.uses_adapter and interval is not None:
        text = f"--ref-update-interval {interval}: with LoRA the reference is the policy without its adapter, which does not change"
        yield Violation(text, (unset_flag("ref_update_interval"),))


@rule("CFG-LORA-SYNC", "--lora-sync")
def adapter_reaches_the_engine(config: Config) -> Iterator[Violation]:
    """Reject --lora-sync adapter if engines cannot load an adapter, such as external engines, or with a transport other than tensor."""
    if config.lora.lora_sync == "adapter" and config.needs_engine and not config.engines_can_take_adapter:
        yield Violation(f"--lora-sync adapter: {config.no_adapter_because}", (set_flag("lora_sync", "merged"),))


@rule("CFG-LORA-BASE", "--lora-base-precision", "--train-backend")
def base_stays_in_the_type_of_parallel_layers(config: Config) -> Iterator[Violation]:
    """Reject a quantized base with the Megatron trainer, whose parallel layers and checkpoints need floating-point matrices."""
    precision = config.lora.lora_base_precision
    if precision != "full" and (config.uses_adapter and config.trains) and not config.trainer_capabilities.quantises_base:
        text = f"--lora-base-precision {precision} with the Megatron trainer, whose layers multiply by floating-point matrices only"
        yield Violation(
            text, (unset_flag("lora_base_precision"),), "split the base with --tensor-model-parallel-size, or use --train-backend torch"
        )


@rule("CFG-LORA-LR", "--lr", "--lora-rank", "--lora-adapter", severity=Severity.WARNING)
def learning_rate_of_full_fine_tuning(config: Config) -> Iterator[Violation]:
    """Warn about a learning rate of full fine-tuning: an adapter needs about ten times as much ("LoRA Without Regret")."""
    lr = config.optimizer.lr
    if config.uses_adapter and config.trains and lr < 4e-6:
        better = _SFT_LR if config.is_sft else _RL_LR
        yield Violation(
            f"--lr {lr:g} is a learning rate for full fine-tuning; an adapter needs about ten times as much", (set_flag("lr", better),)
        )
