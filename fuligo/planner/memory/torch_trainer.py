"""Peak memory of a GPU of the torch trainer (`fuligo/trainer/torch_backend`): FSDP2 over its ranks, fp32 weights and states."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

from fuligo.formats.quantized_base import BasePrecision, stored_bytes
from fuligo.layout.adapter import AdapterShape, InputOf, matrices
from fuligo.layout.megatron import layout_of
from fuligo.models.architecture import Architecture, GroupedAttention, Layer
from fuligo.planner.lengths import micro_batch_tokens
from fuligo.planner.memory.activations import BF16, FP32, copied_elements, normed_head_elements, num_output_norms
from fuligo.planner.memory.parameters import COLLECTIVE_BYTES, CUDA_CONTEXT_BYTES, billions
from fuligo.planner.plan import MemoryItem
from fuligo.planner.subject import Subject, value_architecture
from fuligo.quantities import amount, count

BETWEEN_ACTIVATIONS = 0.18
BETWEEN_GATHERED = 2.6
"""Memory that PyTorch's allocator holds in addition to tensors, as shares of the activations and of the gathered units, which are
allocated and freed between activations. Fitted to four runs on an H200 (tests/unit/planner/test_measured.py)."""


@dataclass(frozen=True, slots=True)
class QuantizedWeights:
    """Linear layers and experts that the trainer holds in 8 or 4 bits (`models.quantized_linear`)."""

    precision: BasePrecision
    architecture: Architecture

    @classmethod
    def of(cls, subject: Subject) -> Self | None:
        """Return the quantized layers of a run; None if its base is not quantized."""
        precision = subject.config.lora.lora_base_precision
        return None if precision == "full" or subject.adapter is None else cls(precision, subject.architecture)

    @property
    def num_elements(self) -> int:
        return sum(sum(self.sizes(layer)) for layer in self.architecture.layers)

    @property
    def num_bytes(self) -> int:
        return sum(stored_bytes(size, self.precision) for layer in self.architecture.layers for size in self.sizes(layer))

    @property
    def largest(self) -> int:
        """Elements of the largest matrix, counting all experts of a layer as one; a pass holds one dequantized copy of a matrix."""
        return max(size for layer in self.architecture.layers for size in self.sizes(layer))

    @property
    def note(self) -> str:
        return f"{billions(self.num_elements)} in {self.precision} with scales, {amount(self.num_bytes)}"

    def sizes(self, layer: Layer) -> list[int]:
        dense = [matrix.inputs * matrix.outputs for matrix in matrices(layer, self.architecture)]
        experts = self.architecture.experts
        if not layer.is_moe or experts is None:
            return dense
        one = experts.num_experts * self.architecture.hidden_size * experts.intermediate_size
        return [*dense, 2 * one, one]  # gate and up projection are one matrix


def torch_trainer_items(subject: Subject) -> tuple[MemoryItem, ...]:
    """Return the parts of the peak memory of a GPU, without engines."""
    num_ranks = layout_of(subject.config).num_ranks
    items = list(_state_items(subject, num_ranks))
    for name, held in _further_models(subject, num_ranks):
        if name == "value_model":
            note = (
                f"{billions(held)} x 12 bytes: fp32 weights and two moments of AdamW; all other memory is shared with the policy in turns"
            )
            items.append(MemoryItem(name, 3 * FP32 * held, note))
        else:
            items.append(MemoryItem(name, FP32 * held, f"{billions(held)} x 4 bytes, fp32"))
    gathered, activations = _gathered(subject), _activations(subject)
    items += [gathered, activations, _logits(subject)]
    if num_ranks > 1:
        items.append(MemoryItem("communication", COLLECTIVE_BYTES, "NCCL buffers of one communicator"))
    items.append(MemoryItem("runtime", CUDA_CONTEXT_BYTES, "CUDA context, kernels, cuBLAS workspace"))
    lost = BETWEEN_ACTIVATIONS * activations.num_bytes + BETWEEN_GATHERED * gathered.num_bytes
    shares = (f"{BETWEEN_ACTIVATIONS:.0%} of the activations", f"{BETWEEN_GATHERED:.0%} of the gathered units")
    note = f"held by PyTorch's allocator in addition to tensors: {' and '.join(shares)}"
    items.append(MemoryItem("fragmentation", round(lost), note))
    return tuple(items)


def _state_items(subject: Subject, num_ranks: int) -> Iterator[MemoryItem]:
    """Yield weights, gradients and optimizer of one rank."""
    architecture, adapter = subject.architecture, subject.adapter
    held = architecture.num_parameters + subject.num_loaded_mtp_parameters
    share = math.ceil(held / num_ranks)
    each = f"{billions(share)} parameters per GPU ({billions(held)} over {num_ranks})"
    if adapter is not None:
        size, trained = compute_bytes(subject), math.ceil(adapter.num_parameters / num_ranks)
        quantized = QuantizedWeights.of(subject)
        if quantized is None:
            yield MemoryItem("weights", size * share, f"{each} x {size} bytes, frozen")
        else:
            rest = math.ceil((architecture.num_parameters - quantized.num_elements) / num_ranks)
            note = f"frozen: {quantized.note}, whole on every rank; {billions(rest)} others per GPU x {size} bytes"
            yield MemoryItem("weights", quantized.num_bytes + size * rest, note)
        low_rank = f"{billions(trained)} parameters of the adapter of rank {adapter.config.rank} per GPU"
        yield MemoryItem("adapter", FP32 * trained, f"{low_rank} x 4 bytes, fp32")
    else:
        trained = math.ceil(subject.num_trained_parameters / num_ranks)
        is_mtp_frozen = subject.loaded_mtp_layers and not subject.config.train.enable_mtp_training
        is_tower_frozen = architecture.vision_tower is not None and subject.config.freezes_tower
        named = [*(["vision tower"] if is_tower_frozen else []), *(["MTP layer"] if is_mtp_frozen else [])]
        frozen = f", the frozen {' and '.join(named)} among them" if trained < share else ""
        yield MemoryItem("weights", FP32 * share, f"{each} x 4 bytes, fp32{frozen}")
    yield MemoryItem("gradients", FP32 * trained, f"{billions(trained)} x 4 bytes, fp32")
    yield MemoryItem("optimizer", 2 * FP32 * trained, f"{billions(trained)} x 8 bytes: two fp32 moments of AdamW")


def _further_models(subject: Subject, num_ranks: int) -> Iterator[tuple[str, int]]:
    """Yield the item names of models other than the policy, and their parameters on one of `num_ranks` ranks."""
    models = {
        # With an adapter, the reference is the policy without it.
        "reference": subject.architecture if subject.config.needs_reference and subject.adapter is None else None,
        "teacher": None if subject.teacher is None else subject.teacher.architecture,
        "value_model": value_architecture(subject.architecture) if subject.config.trains_values else None,
    }
    yield from ((name, math.ceil(model.num_parameters / num_ranks)) for name, model in models.items() if model is not None)


def torch_offloaded_items(subject: Subject, num_ranks: int) -> Iterator[MemoryItem]:
    """Yield what `num_ranks` ranks keep on the host while SGLang has their GPUs."""
    architecture = subject.architecture
    adapter, all_ranks = subject.adapter, layout_of(subject.config).num_ranks
    share = math.ceil((architecture.num_parameters + subject.num_loaded_mtp_parameters) / all_ranks) * num_ranks
    trained = math.ceil(subject.num_trained_parameters / all_ranks) * num_ranks
    size = FP32 if adapter is None else compute_bytes(subject)
    ranks, then = f"of {count(num_ranks, 'rank')}", "while the engines have the GPUs"
    kind = "fp32" if size == FP32 else "frozen bf16"
    if (quantized := QuantizedWeights.of(subject)) is not None:
        rest = math.ceil((architecture.num_parameters - quantized.num_elements) / all_ranks) * num_ranks
        note = f"frozen weights of the policy {ranks}, each {quantized.note}, and {billions(rest)} others x {size} bytes, {then}"
        yield MemoryItem("weights", num_ranks * quantized.num_bytes + size * rest, note)
    else:
        yield MemoryItem("weights", size * share, f"{kind} weights of the policy {ranks}, {billions(share)} x {size} bytes, {then}")
    if adapter is not None:
        yield MemoryItem("adapter", FP32 * trained, f"fp32 weights of the adapter {ranks}, {billions(trained)} x 4 bytes, {then}")
    moments = f"two fp32 moments of AdamW {ranks}, {billions(trained)} x 8 bytes, {then}"
    yield MemoryItem("offloaded_optimizer", 2 * FP32 * trained, moments)
    for name, share in _further_models(subject, all_ranks):
        held, size = share * num_ranks, 3 * FP32 if name == "value_model" else FP32
        kinds = "weights and moments" if name == "value_model" else "weights"
        note = f"fp32 {kinds} of the {name.replace('_', ' ')} {ranks}, {billions(held)} x {size} bytes, {then}"
        yield MemoryItem(name, size * held, note)


def compute_bytes(subject: Subject) -> int:
    """Return the bytes of the compute dtype: bf16 on CUDA unless --precision fp32."""
    return FP32 if subject.config.model.precision == "fp32" else BF16


def _gathered(subject: Subject) -> MemoryItem:
    """Return the gathered units: the current layer, the next one, and embedding with head, in the compute dtype.

    Gradients of one layer, embedding and head are included; with an adapter, only those of the adapter.
    """
    architecture, adapter, quantized = subject.architecture, subject.adapter, QuantizedWeights.of(subject)
    trained_mtp = subject.loaded_mtp_layers if subject.config.train.enable_mtp_training else ()
    layer = max(layer.num_parameters for layer in (*architecture.layers, *trained_mtp))
    if quantized is not None:
        layer = max(layer.num_parameters - sum(quantized.sizes(layer)) for layer in architecture.layers)
    outer = sum(part.num_parameters for part in architecture.outer_parts)
    size = compute_bytes(subject)
    units = f"two layers of {billions(layer)}, embedding and head of {billions(outer)}"
    if adapter is None:
        return MemoryItem("gathered", size * (2 * layer + outer) + size * (layer + outer), f"{units}, and gradients")
    low_rank = max(adapter.layer_parameters(layer) for layer in architecture.layers)
    gathered, note = size * (2 * layer + outer) + size * 3 * low_rank, f"{units}, and gradients of the adapter only"
    if quantized is not None:
        gathered, note = gathered + size * quantized.largest, f"{note}; a dequantized matrix of {billions(quantized.largest)}"
    return MemoryItem("gathered", gathered, note)


def compiles_layers(subject: Subject) -> bool:
    """Return whether the trainer compiles the layers: it does so for dense text models with grouped attention in bf16."""
    architecture, config = subject.architecture, subject.config
    is_wanted = config.model.torch_compile is not False and not config.train.exact_on_policy
    is_dense = architecture.experts is None and isinstance(architecture.attention, GroupedAttention) and not architecture.num_linear_layers
    are_apart = not any(heads.borrows_keys for heads in architecture.grouped_attentions)
    return is_wanted and is_dense and are_apart and architecture.vision_tower is None and compute_bytes(subject) == BF16


def _activations(subject: Subject) -> MemoryItem:
    config, architecture = subject.config, subject.architecture
    if config.train.enable_mtp_training:
        architecture = replace(architecture, layers=(*architecture.layers, *subject.loaded_mtp_layers))
    tokens = micro_batch_tokens(config, layout_of(config))
    adapter = subject.adapter
    if compiles_layers(subject):
        per_layer = [compiled_layer_bytes(layer, architecture, adapter) for layer in architecture.layers]
    elif adapter is not None:
        per_layer = [adapted_layer_bytes(layer, adapter, compute_bytes(subject)) for layer in architecture.layers]
    else:
        per_layer = [layer_bytes(layer, architecture, compute_bytes(subject)) for layer in architecture.layers]
    size, shape = compute_bytes(subject), layout_of(config)
    copies = [size * copied_elements(layer, architecture, shape, config, num_bytes=size) for layer in architecture.layers]
    per_layer = [kept + copied for kept, copied in zip(per_layer, copies, strict=True)]
    if config.model.gradient_checkpointing:
        entries = size * sum(architecture.hidden_size + layer.input_size for layer in architecture.layers)
        per_token, how = entries + max(per_layer), "inputs of all layers and one layer's activations"
    else:
        per_token, how = sum(per_layer), "all layers; --gradient-checkpointing keeps their inputs only"
    factors = [0] if adapter is None else [copied_factor_bytes(layer, adapter, compute_bytes(subject)) for layer in architecture.layers]
    copied = max(factors) if config.model.gradient_checkpointing else sum(factors)
    note = f"{tokens} tokens x {_small_amount(per_token)}{f' + {amount(copied)} of B' if copied else ''}: {how}"
    if max(copies) >= 1:
        note += f"; {_small_amount(max(copies))} a layer are keys of shared prompts, copied for every answer"
    return MemoryItem("activations", round(tokens * per_token) + copied, note)


def _small_amount(num_bytes: float) -> str:
    """Format the bytes of one token: `120 KiB`, or `256 bytes` below 1 KiB."""
    return f"{num_bytes / 1024:.0f} KiB" if num_bytes >= 1024 else f"{num_bytes:.0f} bytes"


def layer_bytes(layer: Layer, architecture: Architecture, size: int) -> float:
    """Return the bytes per token that a layer of transformers keeps for its backward pass.

    Operations are not fused. A norm keeps its input in fp32 too; the MLP keeps gate, activated gate, up projection and their product; the
    router an fp32 copy of its input; experts also their outputs, which are weighted afterwards.
    """
    hidden, attention, experts = architecture.hidden_size, architecture.attention_of(layer), architecture.experts
    rounded = size if size < FP32 else 0  # a norm's fp32 result in the compute type, before its weight
    if architecture.numerics.scales_in_float32:
        rounded = FP32
    norms = 2 * (FP32 + rounded + size) * hidden + num_output_norms(layer, hidden) * (FP32 + rounded) * hidden
    linear = architecture.linear_attention if layer.is_linear else None
    if linear is not None:
        # Inputs and outputs of the convolution, gates and outputs of the rule, as flash-linear-attention's kernels keep them.
        heads = size * (2 * linear.num_channels + 3 * linear.num_value_heads * linear.value_dim) + 2 * FP32 * linear.num_value_heads
    elif isinstance(attention, GroupedAttention):
        query = attention.num_heads * attention.head_dim
        heads = size * (2 * query + attention.kv_elements_per_token) + (FP32 + rounded) * normed_head_elements(layer, architecture)
        heads += FP32 * attention.normed_value_elements
    else:
        query_key = attention.num_heads * (attention.qk_nope_head_dim + attention.qk_rope_head_dim)
        latent = (FP32 + rounded + size) * ((attention.q_lora_rank or 0) + attention.kv_lora_rank)
        heads = size * (2 * query_key + 2 * attention.num_heads * attention.v_head_dim) + latent
    heads += FP32 * attention.num_heads
    # A layer's own embedding keeps the inputs of its gate and of its projection, the gate, and the embedding.
    own_input = size * (hidden + 4 * layer.input_size) if layer.input_size else 0
    kept = norms + heads + 4 * size * architecture.dense_size_of(layer) + own_input
    if not layer.is_moe or experts is None:
        return kept
    copies = experts.num_experts_per_token * (2 * hidden + 4 * experts.intermediate_size)
    shared = 4 * experts.num_shared_experts * experts.intermediate_size
    return kept + size * (copies + shared) + FP32 * (hidden + 2 * experts.num_experts)


def adapted_layer_bytes(layer: Layer, adapter: AdapterShape, size: int) -> float:
    """Return the bytes per token that a frozen layer with an adapter keeps for its backward pass.

    A frozen matrix or norm keeps nothing for its own gradient. What remains are the inputs of nonlinear operations, the input of every
    adapted matrix for the gradient of A, and A's output for that of B.
    """
    architecture, config = adapter.architecture, adapter.config
    hidden, attention, experts = architecture.hidden_size, architecture.attention_of(layer), architecture.experts
    kept = FP32 * (2 + num_output_norms(layer, hidden)) * (hidden + 1)
    if isinstance(attention, GroupedAttention):
        query = attention.num_heads * attention.head_dim
        normed = normed_head_elements(layer, architecture)
        kept += size * (2 * query + attention.kv_elements_per_token) + FP32 * (normed + normed / attention.head_dim)
        kept += FP32 * attention.normed_value_elements
    else:
        query_key = attention.num_heads * (attention.qk_nope_head_dim + attention.qk_rope_head_dim)
        latent = (attention.q_lora_rank or 0) + attention.kv_lora_rank
        kept += size * (2 * query_key + 2 * attention.num_heads * attention.v_head_dim) + FP32 * latent
    kept += FP32 * attention.num_heads
    if layer.is_moe and experts is not None:
        routed = experts.num_experts_per_token * (hidden + 3 * experts.intermediate_size)
        kept += size * (routed + 3 * experts.num_shared_experts * experts.intermediate_size) + FP32 * 2 * experts.num_experts
        if adapter.adapts_experts(layer):  # each copy of a token, the input of `down_proj`, and the outputs of both A
            low_rank = 2 * (config.rank + -config.rank % 8)
            kept += size * experts.num_experts_per_token * (hidden + experts.intermediate_size + low_rank)
    kept += size * 3 * architecture.dense_size_of(layer) + size * 3 * layer.input_size
    adapted = adapter.adapted(layer)
    if config.dropout:  # each matrix has its own mask and masked input
        inputs = sum((size + 1) * matrix.inputs for matrix in adapted)
    else:
        inputs = size * sum({matrix.source: matrix.inputs for matrix in adapted if matrix.source is not InputOf.OUTPUT}.values())
    return kept + inputs + size * config.rank * len(adapted)


def copied_factor_bytes(layer: Layer, adapter: AdapterShape, size: int) -> int:
    """Return the bytes of the copy of all experts' B matrices that grouped products need, ordered by expert; 0 for layers without them."""
    experts = adapter.architecture.experts
    if experts is None or not adapter.adapts_experts(layer):
        return 0
    outputs = adapter.architecture.hidden_size + 2 * experts.intermediate_size
    return size * experts.num_experts * outputs * adapter.config.rank


def compiled_layer_bytes(layer: Layer, architecture: Architecture, adapter: AdapterShape | None = None) -> float:
    """Return the bytes per token that a compiled layer of a dense model keeps in bf16 for its backward pass.

    The partitioner of `torch.compile` keeps the inputs and outputs of matrix products, and query, key and value as attention takes them.
    Norms and activations are recomputed from these and an fp32 number per norm. An adapter adds the outputs of its A.
    """
    hidden, attention = architecture.hidden_size, architecture.attention_of(layer)
    assert isinstance(attention, GroupedAttention)
    query, key_value = attention.num_heads * attention.head_dim, attention.kv_elements_per_token
    normed = normed_head_elements(layer, architecture)
    output_norms = num_output_norms(layer, hidden)
    kept = (4 + output_norms) * hidden + normed + 2 * query + key_value + 3 * architecture.dense_size_of(layer) + 3 * layer.input_size
    statistics = 2 + output_norms + attention.num_heads + normed / attention.head_dim
    low_rank = adapter.config.rank * len(adapter.adapted(layer)) if adapter is not None else 0
    return BF16 * (kept + low_rank) + FP32 * statistics


def _logits(subject: Subject) -> MemoryItem:
    config, vocabulary = subject.config, subject.architecture.vocab_size
    tokens = min(config.train.log_probs_chunk_size, micro_batch_tokens(config, layout_of(config)))
    head = subject.architecture.hidden_size * vocabulary
    size = compute_bytes(subject)
    if subject.adapter is not None:
        note = f"[{tokens}, {vocabulary}] in fp32, and its gradient x {size} bytes"
        return MemoryItem("logits", (FP32 + size) * tokens * vocabulary, note)
    kept = 2 if config.train.enable_mtp_training else 1
    note = f"[{tokens}, {vocabulary}] in fp32{', of the MTP layer too' if kept > 1 else ''}, its gradient x {size} bytes, and the head's "
    return MemoryItem("logits", (kept * FP32 + size) * tokens * vocabulary + FP32 * head, f"{note}gradient in fp32")
