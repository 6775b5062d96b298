"""The model: its shape, vision tower and checkpoints, and environment variables of the run."""

from collections.abc import Iterator, Sequence

from fuligo.config.findings import Change, Severity
from fuligo.config.flag import option_name
from fuligo.config.rules.rule import set_flag, unset_flag
from fuligo.config.topology import EngineGroupSpec, policy_model
from fuligo.errors import ConfigError
from fuligo.formats.quantization import unsupported_in_updates
from fuligo.models.architecture import LatentAttention
from fuligo.models.megatron_flags import describe_disagreement, disagreements
from fuligo.models.registry import batch_variant_because, family_of, unshareable_because
from fuligo.planner.rules.deepep import quantization_of, with_deepep
from fuligo.planner.rules.rule import Fix, Violation, rule
from fuligo.planner.rules.servers import group_rule, running
from fuligo.planner.subject import Subject

_ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
ALIGNMENT = 8
"""Alignment of the addresses from which a Hopper GPU (TMA) copies parts of a matrix: 16 bytes, in elements of 2 bytes."""


@rule("PLAN-MODEL-ARGS", "--override-model-config")
def flags_agree_with_config_json(subject: Subject) -> Iterator[Violation]:
    """MODEL_ARGS must describe the checkpoint's model; variants of one family differ in these values."""
    config, found = subject.config, subject.trainer_config_json
    if found is None or config.model.override_model_config or not subject.is_megatron:
        return
    if family_of(subject.architecture).why_not_megatron is not None:
        return  # reported by PLAN-TORCH-ONLY
    try:
        differing = list(disagreements(config, found.values, found.source))
    except ConfigError as error:
        text = f"--train-backend megatron: {error}"
        yield Violation(text, ((set_flag("train_backend", "torch"),),), "train it with --train-backend torch", flags=("--train-backend",))
        return
    for option, given, expected in differing:
        name = option.removeprefix("--").replace("-", "_")
        right: Fix = (Change(("megatron", name), None if expected in (None, False) else expected),)
        yield Violation(
            describe_disagreement(option, given, expected, found.source),
            (right, (Change(("megatron", name), None),), (set_flag("override_model_config", True),)),
            flags=(option, "--override-model-config"),
            advice="add --override-model-config to keep the flags",
        )


@rule("PLAN-QUANTIZED-WEIGHTS", "--hf-checkpoint", "--ref-load")
def training_starts_from_full_weights(subject: Subject) -> Iterator[Violation]:
    """Training cannot start from an FP8 checkpoint, only from the weights that it was converted from."""
    config = subject.config
    starts_elsewhere = config.checkpoint.load is not None and not config.needs_reference
    if not subject.rollout_architecture.is_quantized or config.checkpoint.ref_load is not None or starts_elsewhere:
        return
    if config.debug.debug_rollout_only:
        return
    text = f"--hf-checkpoint {config.model.hf_checkpoint} holds FP8 weights, which training cannot start from"
    yield Violation(text, advice="use the BF16 checkpoint that it was converted from as --ref-load")


@rule("PLAN-MXFP4-ENGINES", "--hf-checkpoint")
def engines_take_new_weights(subject: Subject) -> Iterator[Violation]:
    """SGLang cannot update experts in MXFP4; engines of a training run serve bfloat16."""
    config = subject.config
    if not subject.rollout_architecture.is_mxfp4 or config.debug.debug_rollout_only:
        return
    if config.needs_engine and config.engine_capabilities.serves_quantized:
        text = f"--hf-checkpoint {config.model.hf_checkpoint} has experts in MXFP4, which SGLang cannot update"
        yield Violation(text, advice="let the engines serve bfloat16: fuligo convert mxfp4-to-bf16")


@rule("PLAN-QUANTIZED-ENGINES", "--hf-checkpoint")
def engines_update_quantized_weights(subject: Subject) -> Iterator[Violation]:
    """SGLang can update quantized weights only if they are FP8 in blocks; others change their layout when they are loaded."""
    config, values = subject.config, quantization_of(subject)
    if values is None or subject.rollout_architecture.is_mxfp4 or config.debug.debug_rollout_only:
        return
    if not (config.needs_engine and config.engine_capabilities.serves_quantized):
        return
    if with_deepep(subject) and "weight_block_size" not in values:
        return  # PLAN-DEEPEP-FP8-CHANNEL
    if other := unsupported_in_updates(values):
        yield Violation(
            f"--hf-checkpoint {config.model.hf_checkpoint} is quantized in a way that engines cannot update ({', '.join(other)})",
            advice="convert the BF16 checkpoint with fuligo convert fp8 --strategy block, and pass that one as --ref-load",
        )


@rule("PLAN-HARMONY-REWARD", "--rm-type")
def reward_finds_the_answer(subject: Subject) -> Iterator[Violation]:
    """The reward `deepscaler` looks for an answer after `</think>`, which gpt-oss never writes: all rewards would be 0."""
    reward = subject.config.reward
    if family_of(subject.rollout_architecture).writes_harmony and reward.rm_type == "deepscaler" and reward.custom_rm_path is None:
        text = "--rm-type deepscaler reads the answer after </think>, but gpt-oss thinks in a channel of the harmony format"
        yield Violation(text, ((set_flag("rm_type", "math"),),))


@rule("PLAN-STOP-TOKEN", "--rollout-stop-token-ids")
def stop_tokens_are_in_the_vocabulary(subject: Subject) -> Iterator[Violation]:
    """A token outside of the vocabulary never ends a response."""
    given, num_tokens = subject.config.rollout.rollout_stop_token_ids, subject.rollout_architecture.vocab_size
    if (problem := unknown_tokens(given, num_tokens)) is not None:
        kept = [token for token in given if token < num_tokens]
        yield Violation(problem, ((set_flag("rollout_stop_token_ids", kept or None),),))


@rule("PLAN-EXACT-MODEL", "--exact-on-policy")
def layers_have_batch_invariant_operations(subject: Subject) -> Iterator[Violation]:
    """Exact log-probabilities need batch-invariant operations for all layers of the model."""
    if not subject.config.train.exact_on_policy:
        return
    for found in (subject.trainer_config_json, subject.engine_config_json):
        because = None if found is None else batch_variant_because(found.values, subject.config.engine_capabilities.exact_on)
        if because is not None:
            yield Violation(f"--exact-on-policy does not support the model: {because}", ((set_flag("exact_on_policy", None),),))
            return


@group_rule("PLAN-EXACT-WIDTHS", "--exact-on-policy", "--rollout-num-gpus-per-engine", groups=running)
def parts_of_products_are_aligned(subject: Subject, spec: EngineGroupSpec) -> Iterator[Violation]:
    """The batch-invariant kernels load groups of 8 elements: a GPU's part of attention output and MLP must be a multiple of 8."""
    config, architecture = subject.config, subject.rollout_architecture
    if not config.train.exact_on_policy or isinstance(architecture.attention, LatentAttention):
        return
    widths = {"attention's output": architecture.attention.num_heads * architecture.attention.head_dim}
    if architecture.experts is not None:
        widths["an expert"] = architecture.experts.intermediate_size
    else:
        widths["an MLP"] = architecture.intermediate_size
    odd = [(name, width) for name, width in widths.items() if width % (ALIGNMENT * spec.tp_size)]
    if odd and spec.model == policy_model(config):
        name, width = odd[0]
        text = f"a GPU's part of {name}, {width:,} / {spec.tp_size} columns, is not a multiple of {ALIGNMENT}"
        yield Violation(f"--exact-on-policy: {text}", ((set_flag("exact_on_policy", None),),))


@rule("PLAN-PREFIX-MODEL", "--share-prefixes")
def layers_compute_trees(subject: Subject) -> Iterator[Violation]:
    """Shared prefixes need layers in which several samples can read one prefix."""
    if subject.config.train.share_prefixes != "on":
        return
    for model, found in (("the model", subject.trainer_config_json), ("the teacher", subject.teacher_config_json)):
        because = None if found is None else unshareable_because(found.values)
        if because is not None:
            yield Violation(f"--share-prefixes on does not support {model}: {because}", ((set_flag("share_prefixes", None),),))


def unknown_tokens(given: Sequence[int], vocab_size: int) -> str | None:
    """Return the error text for stop tokens outside of the vocabulary; None if there are none."""
    unknown = " ".join(str(token) for token in given if token >= vocab_size)
    return f"--rollout-stop-token-ids {unknown}: the model's token ids end at {vocab_size - 1}" if unknown else None


@rule("PLAN-ENV-ALLOCATOR", "--env", "--colocate")
def offloading_finds_its_memory(subject: Subject) -> Iterator[Violation]:
    """Engines cannot release memory in expandable segments to a colocated trainer."""
    config = subject.config
    if not config.cluster.colocate or not running(subject):
        return
    for name in _ALLOCATORS:
        settings = config.cluster.env.get(name, "").replace(" ", "").split(",")
        if "expandable_segments:True" in settings:
            left = ",".join(setting for setting in settings if setting != "expandable_segments:True")
            text = f"--env {name}={config.cluster.env.get(name)} with --colocate: engines cannot release memory in expandable segments"
            yield Violation(text, ((Change(("cluster", "env", name), left or None),),))


@rule("PLAN-ENV-CONNECTIONS", "--env", "--tensor-model-parallel-size", "--context-parallel-size", severity=Severity.WARNING)
def communication_keeps_its_order(subject: Subject) -> Iterator[Violation]:
    """Before Blackwell, Megatron's TP and CP need all kernels of a GPU in one hardware queue."""
    config, sizes = subject.config, subject.config.parallel
    given = config.cluster.env.get(_CONNECTIONS)
    options = {"--tensor-model-parallel-size": sizes.tensor_model_parallel_size, "--context-parallel-size": sizes.context_parallel_size}
    splits = " and ".join(f"{option} {size}" for option, size in options.items() if size > 1)
    if subject.is_megatron and splits and given not in (None, "1") and not subject.gpu.name.startswith("b"):
        text = f"--env {_CONNECTIONS}={given}: it must be 1 with {splits} on {subject.gpu.name}"
        yield Violation(text, ((Change(("cluster", "env", _CONNECTIONS), "1"),),))


@rule("PLAN-VISION-TEXT", "--multimodal-keys", "--freeze-vision-tower")
def flags_fit_a_model_of_text(subject: Subject) -> Iterator[Violation]:
    """Images and a frozen tower need a model that has a vision tower."""
    if subject.architecture.vision_tower is not None and family_of(subject.architecture).sees_images:
        return
    for name, is_given in (
        ("multimodal_keys", bool(subject.config.data.multimodal_keys)),
        ("freeze_vision_tower", subject.config.train.freeze_vision_tower),
    ):
        if is_given:
            option = option_name(name)
            reason = (
                "is text-only" if subject.architecture.vision_tower is None else "is trained on text only, and its towers are never trained"
            )
            text = f"{option}: the model ({subject.architecture.model_type}) {reason}"
            yield Violation(text, ((unset_flag(name),),), flags=(option,))
