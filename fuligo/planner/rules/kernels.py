"""Attention kernels of engines: support for the model's attention and for the GPU.

Source: SGLang 0.5.15.post1, `arg_groups/overrides.py`, `layers/attention/attention_registry.py`.
"""

from collections.abc import Iterator

from fuligo.config.findings import Rule, Severity, simple_rule
from fuligo.config.topology import EngineGroupSpec
from fuligo.models.architecture import GroupedAttention, LatentAttention
from fuligo.models.from_flags import TORCH_INSTEAD
from fuligo.models.registry import family_of
from fuligo.planner.rules.rule import Fix, Violation
from fuligo.planner.rules.servers import group_rule, option, placed, set_argument, set_each, shown, where
from fuligo.planner.subject import Subject

_BACKENDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
_LATENT = ("cutlass_mla", "flashmla", "trtllm_mla", "cutedsl_mla", "tokenspeed_mla")
_SPARSE = ("dsa", "nsa")
_WITH_SINKS = ("triton", "trtllm_mha", "fa3", "fa4")
_OTHER_VENDORS = ("aiter", "wave", "intel_amx", "ascend", "intel_xpu")
_BLACKWELL = ("trtllm_mla", "cutedsl_mla", "tokenspeed_mla")
_DETERMINISTIC = ("flashinfer", "fa3", "triton")
_SPARSE_CACHES = ("auto", "bf16", "bfloat16", "fp8_e4m3")


def _given(spec: EngineGroupSpec) -> Iterator[tuple[str, str]]:
    for name in _BACKENDS:
        if (value := spec.arguments.get(name)) is not None:
            yield name, value


@group_rule("PLAN-ATTENTION-BACKEND", *(option(name) for name in _BACKENDS))
def kernels_suit_the_attention(subject: Subject, spec: EngineGroupSpec) -> Iterator[Violation]:
    """Kernels are made for one kind of attention: grouped, latent (MLA) or sparse (DSA)."""
    architecture = subject.rollout_architecture
    is_latent, is_sparse = isinstance(architecture.attention, LatentAttention), architecture.sparse_index is not None
    has_sinks = isinstance(architecture.attention, GroupedAttention) and architecture.attention.has_sinks
    supported = family_of(architecture).sglang_attention
    for name, backend in _given(spec):
        if backend in _LATENT and not is_latent:
            reason = "latent attention (MLA), which the model does not have"
        elif backend in _SPARSE and not is_sparse:
            reason = "sparse attention (DSA), which the model does not have"
        elif backend in ("dsv4", "compressed", "dual_chunk_flash_attn"):
            reason = f"a kind of attention that {architecture.model_type} does not have"
        elif backend in _OTHER_VENDORS:
            reason = "processors of another vendor"
        elif supported and backend not in supported:
            reason = f"other models; SGLang serves {architecture.model_type} with {' or '.join(supported)}"
        elif has_sinks and backend not in _WITH_SINKS:
            reason = "attention without sinks, but the model has sinks"
        elif is_sparse and name == "attention_backend" and backend not in _SPARSE:
            reason = "full attention, but the model's is sparse (DSA)"
        else:
            continue
        yield Violation(f"{placed(spec, name)} is made for {reason}", set_each(subject, spec, name, None))


@group_rule("PLAN-ATTENTION-GPU", *(option(name) for name in _BACKENDS), severity=Severity.WARNING)
def kernels_run_on_the_gpu(subject: Subject, spec: EngineGroupSpec) -> Iterator[Violation]:
    """Some kernels need a Blackwell GPU; FlashAttention 3 needs an Ampere or Hopper GPU, and a Hopper GPU for latent attention."""
    name_of_gpu = subject.gpu.name
    latent = isinstance(subject.rollout_architecture.attention, LatentAttention)
    for name, backend in _given(spec):
        needs = "Blackwell GPUs" if backend in _BLACKWELL and latent and not name_of_gpu.startswith("b") else ""
        hopper = name_of_gpu.startswith("h") or (not latent and not name_of_gpu.startswith("b"))
        if backend == "fa3" and not hopper:
            needs = "Hopper GPUs for latent attention" if latent else "Ampere or Hopper GPUs"
        if needs:
            text = f"{placed(spec, name)} needs {needs}, but the GPU is {name_of_gpu}"
            yield Violation(text, set_each(subject, spec, name, None))


@group_rule("PLAN-DSA-NO-EFFECT", "--sglang-dsa-prefill-backend", "--sglang-dsa-decode-backend")
def attention_is_sparse(subject: Subject, spec: EngineGroupSpec) -> Iterator[Violation]:
    """Kernels of sparse attention have no effect on a model without it."""
    if subject.rollout_architecture.sparse_index is not None:
        return
    given = [name for name in ("dsa_prefill_backend", "dsa_decode_backend") if spec.arguments.get(name) is not None]
    if given:
        text = f"{' and '.join(shown(spec, name) for name in given)}{where(spec)}: the model has no sparse attention (DSA)"
        yield Violation(text, (tuple(set_argument(subject, spec, name, None) for name in given),))


@group_rule("PLAN-DSA-CACHE", "--sglang-kv-cache-dtype")
def sparse_cache_has_its_types(subject: Subject, spec: EngineGroupSpec) -> Iterator[Violation]:
    """The cache of sparse attention is bf16 or fp8_e4m3."""
    if subject.rollout_architecture.sparse_index is None:
        return
    if spec.arguments.value("kv_cache_dtype") not in _SPARSE_CACHES:
        text = f"{placed(spec, 'kv_cache_dtype')}: sparse attention (DSA) supports bfloat16 and fp8_e4m3 only"
        yield Violation(text, set_each(subject, spec, "kv_cache_dtype", "fp8_e4m3"))


@group_rule("PLAN-DETERMINISTIC", "--sglang-enable-deterministic-inference", "--sglang-attention-backend")
def kernels_are_deterministic(subject: Subject, spec: EngineGroupSpec) -> Iterator[Violation]:
    """Only a few attention kernels support deterministic inference."""
    backend = spec.arguments.get("attention_backend")
    if spec.arguments.get("enable_deterministic_inference") and backend is not None and backend not in _DETERMINISTIC:
        yield Violation(
            f"--sglang-enable-deterministic-inference{where(spec)} works with {', '.join(_DETERMINISTIC)}, "
            f"not with {shown(spec, 'attention_backend')}",
            set_each(subject, spec, "attention_backend", None, "triton"),
        )


# fmt: off
TABLE: tuple[Rule[Subject, Fix], ...] = (
    simple_rule("PLAN-TORCH-ONLY", "--train-backend",
        "Gated DeltaNet, attention sinks with clamped experts, and norms over all heads (MiniMax-M2) train on the torch trainer only.",
        lambda subject: subject.is_megatron and family_of(subject.architecture).why_not_megatron is not None,
        lambda subject: f"--train-backend megatron cannot train a {subject.architecture.model_type} model: "
        f"{family_of(subject.architecture).why_not_megatron}",
        advice=TORCH_INSTEAD),
    simple_rule("PLAN-MEGATRON-ONLY", "--train-backend",
        "The torch trainer supports neither sparse attention (DeepSeek-V3.2, GLM-5) nor MiMo.",
        lambda subject: subject.config.trains and not subject.is_megatron
        and family_of(subject.architecture).why_not_transformers is not None,
        lambda subject: f"--train-backend torch cannot train a {subject.architecture.model_type} model: "
        f"{family_of(subject.architecture).why_not_transformers}",
        advice="use --train-backend megatron"),
    simple_rule("PLAN-EMBEDDED-MODEL", "--rollout-backend",
        "The embedded engine supports neither sparse attention (DeepSeek-V3.2, GLM-5) nor MiMo.",
        lambda subject: subject.config.needs_engine and not subject.config.engine_capabilities.has_own_models
        and family_of(subject.rollout_architecture).why_not_transformers is not None,
        lambda subject: f"--rollout-backend embedded cannot serve a {subject.rollout_architecture.model_type} model: "
        f"{family_of(subject.rollout_architecture).why_not_transformers}",
        advice="use --rollout-backend sglang"),
    simple_rule("PLAN-SGLANG-MODEL", "--rollout-backend",
        "SGLang serves the language models of Qwen3.5 and Gemma 4 only together with their vision towers, as they are published.",
        lambda subject: subject.config.needs_engine and subject.config.engine_capabilities.has_own_models
        and subject.rollout_architecture.vision_tower is None and family_of(subject.rollout_architecture).why_not_sglang is not None,
        lambda subject: f"--rollout-backend sglang cannot serve a {subject.rollout_architecture.model_type} model: "
        f"{family_of(subject.rollout_architecture).why_not_sglang}",
        advice="use --rollout-backend embedded, or the published checkpoint"),
)
# fmt: on
