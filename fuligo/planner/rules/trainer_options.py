"""Recomputation, optimizer, overlap, precision and context parallelism of the Megatron trainer.

Sources: Megatron-Core 0.16.1, `TransformerConfig.__post_init__`, `OptimizerConfig.__post_init__`; Megatron-LM, `validate_args`.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fuligo.config.changes import apply_changes
from fuligo.config.findings import Change, Rule, Severity, simple_rule
from fuligo.config.flag import option_name
from fuligo.config.flags import MTP_FLAGS
from fuligo.config.rules.rule import set_flag, unset_flag, unset_given
from fuligo.errors import ConfigError
from fuligo.layout.megatron import Layout, layout_of
from fuligo.models.architecture import Architecture, LatentAttention
from fuligo.models.registry import family_of
from fuligo.planner.layout import stages
from fuligo.planner.rules.rule import Fix, Violation, rule
from fuligo.planner.subject import Subject
from fuligo.quantities import count

_COMFORTABLE = 0.9
"""Estimated share of a GPU's memory up to which a run fits despite the error of the estimate."""
_MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")

_FP8 = ("fp8_format", "fp8_recipe")
_HOPPER = ("h100-80", "h200-141")


def _off(*names: str) -> tuple[Change, ...]:
    return tuple(Change(("megatron", name), None) for name in names)


@rule("PLAN-RECOMPUTE-FULL", "--recompute-granularity", "--recompute-method", "--recompute-num-layers")
def full_recomputation_is_described(subject: Subject) -> Iterator[Violation]:
    """Full recomputation needs a method and a number of layers."""
    sizes = subject.config.parallel
    if not subject.is_megatron or sizes.recompute_granularity != "full":
        return
    names = {"recompute_method": sizes.recompute_method, "recompute_num_layers": sizes.recompute_num_layers}
    if missing := [name for name, value in names.items() if value is None]:
        shown = " and ".join(option_name(name) for name in missing)
        standard = {"recompute_method": "uniform", "recompute_num_layers": 1}
        yield Violation(f"--recompute-granularity full needs {shown}", (tuple(set_flag(name, standard[name]) for name in missing),))


@rule("PLAN-RECOMPUTE-LAYERS", "--recompute-num-layers")
def recomputed_layers_exist(subject: Subject) -> Iterator[Violation]:
    """A stage cannot recompute more layers than it has."""
    config, number = subject.config, subject.config.parallel.recompute_num_layers
    if not subject.is_megatron or config.parallel.recompute_granularity != "full" or number is None:
        return
    try:
        most = max(stage.num_layers for stage in stages(subject))
    except ConfigError:
        return
    if number > most:
        text = f"--recompute-num-layers {number} exceeds the {count(most, 'layer')} of a pipeline stage"
        yield Violation(text, ((set_flag("recompute_num_layers", 1 if config.parallel.recompute_method == "uniform" else most),),))


@rule("PLAN-RECOMPUTE-MODULES", "--recompute-modules")
def recomputed_modules_exist(subject: Subject) -> Iterator[Violation]:
    """Selective recomputation must name modules that the model has."""
    config, given = subject.config, subject.config.parallel.recompute_modules
    if not subject.is_megatron or config.parallel.recompute_granularity != "selective":
        return
    wrong = {name: f"{name} is not one of {', '.join(_MODULES)}" for name in given if name not in _MODULES}
    if not isinstance(subject.architecture.attention, LatentAttention) and "mla_up_proj" in given:
        wrong["mla_up_proj"] = "mla_up_proj belongs to latent attention, which the model does not have"
    if subject.architecture.experts is None:
        wrong |= {
            name: f"{name} belongs to experts, which the model does not have"
            for name in given
            if name in ("moe_act", "moe", "shared_experts")
        }
    elif "moe_act" in given and not config.megatron.get("moe_grouped_gemm"):
        wrong["moe_act"] = "moe_act needs --moe-grouped-gemm"
    if wrong:
        left = [name for name in given if name not in wrong]
        fix = (set_flag("recompute_modules", left) if left else unset_flag("recompute_modules"),)
        yield Violation(f"--recompute-modules {' '.join(given)}: {'; '.join(wrong.values())}", (fix,))


@rule("PLAN-STATE-DTYPES", "--main-grads-dtype", "--main-params-dtype", "--exp-avg-dtype", "--exp-avg-sq-dtype")
def state_types_are_the_optimizers(subject: Subject) -> Iterator[Violation]:
    """Only the precision-aware optimizer supports a state in dtypes other than fp32."""
    config = subject.config
    if not subject.is_megatron or config.optimizer.use_precision_aware_optimizer:
        return
    names = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    given = {name: config.megatron.value(name) for name in names if config.megatron.value(name) not in (None, "fp32")}
    if given:
        options = {name: option_name(name) for name in given}
        shown = ", ".join(f"{options[name]} {value}" for name, value in given.items())
        text = f"{shown} without --use-precision-aware-optimizer: the optimizer state is then fp32"
        yield Violation(text, ((set_flag("use_precision_aware_optimizer", True),), _off(*given)), flags=tuple(options.values()))


@rule("PLAN-CPU-ADAM-NODES", "--optimizer-cpu-offload", "--actor-num-nodes", severity=Severity.WARNING)
def cpu_adam_is_for_few_gpus(subject: Subject) -> Iterator[Violation]:
    """Over several nodes the optimizer state may fit on the GPUs, where a step is much faster."""
    from fuligo.planner.layout import make_layout
    from fuligo.planner.memory.bars import trainer_bars

    config = subject.config
    if not subject.is_megatron or not config.optimizer.optimizer_cpu_offload or config.cluster.actor_num_nodes == 1:
        return
    fix = (unset_flag("optimizer_cpu_offload"), unset_flag("overlap_cpu_optimizer_d2h_h2d"))
    try:
        without = replace(subject, config=apply_changes(config, fix))
        bars = trainer_bars(without, make_layout(without))
    except ConfigError:
        return
    worst = max((bar.used_bytes / bar.capacity_bytes for bar in bars), default=1.0)
    if worst <= _COMFORTABLE:
        yield Violation(
            f"--optimizer-cpu-offload: over {config.cluster.actor_num_nodes} nodes the optimizer state fits on the GPUs too "
            f"(which are then {worst:.0%} full)",
            (fix,),
        )


@rule("PLAN-OVERLAP-GATHER", "--overlap-param-gather", "--overlap-grad-reduce", "--use-distributed-optimizer")
def gathering_overlaps_reducing(subject: Subject) -> Iterator[Violation]:
    """Overlapping the weight all-gather requires the distributed optimizer and an overlapping gradient reduction."""
    config = subject.config
    if not subject.is_megatron or not config.megatron.get("overlap_param_gather"):
        return
    if not config.optimizer.use_distributed_optimizer:
        yield Violation("--overlap-param-gather needs --use-distributed-optimizer, which is disabled", (_off("overlap_param_gather"),))
    elif not config.megatron.get("overlap_grad_reduce"):
        yield Violation("--overlap-param-gather needs --overlap-grad-reduce", ((Change(("megatron", "overlap_grad_reduce"), True),),))


@rule("PLAN-FP8-GPU", "--fp8-format", "--fp8-recipe")
def gpu_multiplies_in_fp8(subject: Subject) -> Iterator[Violation]:
    """Training in FP8 needs a GPU with FP8 units; block scaling, with float32 scales, needs the Hopper generation."""
    kind, recipe = (subject.config.megatron.get(name) for name in _FP8)
    if not subject.is_megatron or kind is None:
        return
    if subject.gpu.fp8_flops == subject.gpu.bf16_flops:
        yield Violation(f"--fp8-format {kind}: {subject.gpu.name} has no FP8 units", (_off(*_FP8),))
    elif recipe == "blockwise" and subject.gpu.name not in _HOPPER:
        text = f"--fp8-recipe blockwise: {subject.gpu.name} cannot multiply with float32 scales of blocks, which needs a Hopper GPU"
        yield Violation(text, ((Change(("megatron", "fp8_recipe"), "tensorwise"),), _off(*_FP8)))


@rule("PLAN-FP8-WIDTHS", "--fp8-format", "--tensor-model-parallel-size", "--expert-tensor-parallel-size")
def fp8_products_have_whole_tiles(subject: Subject) -> Iterator[Violation]:
    """FP8 products need matrices whose rows and columns on a GPU are multiples of 16 (TransformerEngine, `assert_dim_for_fp8_exec`)."""
    kind = subject.config.megatron.get("fp8_format")
    if not subject.is_megatron or kind is None:
        return
    widths = _widths(subject.architecture, layout_of(subject.config))
    if odd := [f"{name} {width} / {split}" for name, width, split in widths if width % (16 * split)]:
        text = f"--fp8-format {kind} needs widths that are multiples of 16 on each GPU, unlike {', '.join(odd)}"
        yield Violation(text, (_off(*_FP8),))


def _widths(architecture: Architecture, shape: Layout) -> Iterator[tuple[str, int, int]]:
    """Yield the widths of the matrices in linear layers, as (name, width, ranks that share it)."""
    yield "hidden size", architecture.hidden_size, 1
    for heads in architecture.grouped_attentions:
        yield "queries", heads.num_heads * heads.head_dim, shape.tp
        yield "queries, keys and values", (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim, shape.tp
    if not all(layer.is_moe for layer in architecture.layers):
        yield "intermediate size", architecture.intermediate_size, shape.tp
    if architecture.experts is not None:
        yield "intermediate size of an expert", architecture.experts.intermediate_size, shape.etp


@rule("PLAN-DSA-CP", "--context-parallel-size", "--allgather-cp")
def sparse_attention_gathers_its_context(subject: Subject) -> Iterator[Violation]:
    """Sparse attention chooses among all tokens of a sequence, so context parallelism must gather them."""
    config, cp = subject.config, subject.config.parallel.context_parallel_size
    if subject.is_megatron and subject.architecture.sparse_index is not None and cp > 1 and not config.parallel.allgather_cp:
        text = f"--context-parallel-size {cp} with sparse attention (DSA) needs --allgather-cp"
        yield Violation(text, ((set_flag("allgather_cp", True),), (set_flag("context_parallel_size", 1),)))


@rule("PLAN-MTP-LAYERS", "--mtp-num-layers")
def checkpoint_has_mtp_layers(subject: Subject) -> Iterator[Violation]:
    """MTP layers are loaded from the checkpoint, which must have them."""
    config, there = subject.config, len(subject.architecture.mtp_layers)
    wanted = config.train.mtp_num_layers or 0
    if wanted > there and subject.trainer_config_json is not None:
        fix = (set_flag("mtp_num_layers", there),) if there else unset_given(config, MTP_FLAGS)
        layers = "1 MTP layer" if there == 1 else f"{there or 'no'} MTP layers"
        yield Violation(f"--mtp-num-layers {wanted}: the checkpoint has {layers}", (fix,))


@rule("PLAN-MTP-TRAINER", "--mtp-num-layers", "--train-backend")
def trainer_has_the_mtp_layer(subject: Subject) -> Iterator[Violation]:
    """The torch trainer has MTP layers only for families whose checkpoints hold them under `mtp.` (Qwen3-Next, Qwen3.5)."""
    config, model = subject.config, subject.architecture
    wanted = config.train.mtp_num_layers or 0
    if wanted and config.trains and not subject.is_megatron and model.mtp_layers and not family_of(model).has_mtp_module:
        text = f"--mtp-num-layers {wanted}: the torch trainer has no MTP layer for {model.model_type} models"
        yield Violation(text, ((unset_flag("train_backend"),), unset_given(config, MTP_FLAGS)))


def _argument(subject: Subject, name: str) -> Any:
    """Return the value of an argument of Megatron; None with the torch trainer."""
    return subject.config.megatron.value(name) if subject.is_megatron else None


# fmt: off
TABLE: tuple[Rule[Subject, Fix], ...] = (
    simple_rule("PLAN-CPU-ADAM-PRECISION", "--optimizer-cpu-offload --use-precision-aware-optimizer",
        "Megatron's CPU optimizer requires the precision-aware optimizer.",
        lambda subject: subject.is_megatron and subject.config.optimizer.optimizer_cpu_offload
        and not subject.config.optimizer.use_precision_aware_optimizer,
        "--optimizer-cpu-offload needs --use-precision-aware-optimizer", (set_flag("use_precision_aware_optimizer", True),)),
    simple_rule("PLAN-PRECISION-DISTRIBUTED", "--use-precision-aware-optimizer --use-distributed-optimizer",
        "The precision-aware optimizer requires the distributed optimizer.",
        lambda subject: subject.is_megatron and subject.config.optimizer.use_precision_aware_optimizer
        and not subject.config.optimizer.use_distributed_optimizer,
        "--use-precision-aware-optimizer needs --use-distributed-optimizer, which is disabled", (unset_flag("use_distributed_optimizer"),)),
    simple_rule("PLAN-TP-OVERLAP", "--tp-comm-overlap --sequence-parallel",
        "Tensor-parallel communication overlaps with matrix products only with sequence parallelism.",
        lambda subject: _argument(subject, "tp_comm_overlap") and not subject.config.parallel.sequence_parallel,
        "--tp-comm-overlap needs --sequence-parallel", _off("tp_comm_overlap"), (set_flag("sequence_parallel", True),)),
    simple_rule("PLAN-FP16", "--fp16", "The trainer computes in bf16 without loss scaling.", lambda subject: _argument(subject, "fp16"),
        "--fp16 is not supported: the trainer computes in bf16, without loss scaling", _off("fp16")),
    simple_rule("PLAN-EXPERT-BIAS", "--moe-router-enable-expert-bias --moe-router-score-function",
        "Balancing experts by a bias is defined for sigmoid scores.",
        lambda subject: _argument(subject, "moe_router_enable_expert_bias")
        and _argument(subject, "moe_router_score_function") != "sigmoid",
        lambda subject: "--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid, but it is "
        f"{_argument(subject, 'moe_router_score_function')}",
        (Change(("megatron", "moe_router_score_function"), "sigmoid"),), _off("moe_router_enable_expert_bias")),
)
# fmt: on
