"""LoRA adapter of a run: configuration, and tensor names in PEFT's files and Megatron models. Imports neither numpy nor torch."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Literal

from fuligo.config import Config
from fuligo.config.flag import did_you_mean, nearest
from fuligo.errors import ConfigError
from fuligo.formats.adapter_config import AdapterConfig, adapter_directory, is_target, peft_name, stored_name
from fuligo.models.architecture import GroupedAttention
from fuligo.models.names import Form, ModelNames, Weight

EXPERT_MATRICES = frozenset({"gate_proj", "up_proj", "down_proj"})
"""Names of the experts' matrices in published checkpoints.

In a model that stores all experts as one tensor, PEFT 0.21.2 (`utils/transformers_weight_conversion.py`) adapts the experts if
`target_modules` contains these names, even at the end of a longer path, and skips dense layers and shared experts with these names.
"""
ADAPTER_MODULE = "adapter"
"""Name of the adapter's submodule in the Megatron linear layer, or layer of experts, that it adapts."""


def adapter_of(config: Config) -> AdapterConfig | None:
    """Return the adapter that a run trains or an evaluation applies, or None if the flags name none."""
    flags, base = config.lora, config.initial_weights_path or ""
    if flags.lora_adapter is not None:
        read = AdapterConfig.read(adapter_directory(Path(flags.lora_adapter)))
        return replace(read, dropout=flags.lora_dropout, base=base)
    if flags.lora_rank is None:
        return None
    return AdapterConfig(
        flags.lora_rank,
        flags.lora_alpha,
        tuple(flags.lora_target_modules),
        flags.lora_use_rslora,
        flags.lora_dropout,
        flags.lora_experts,
        base,
    )


@dataclass(slots=True, frozen=True)
class AdaptedMatrix:
    """Matrix of the checkpoint that has a low-rank update, and its place in Megatron's matrix."""

    weight: Weight
    """Megatron's matrix; it may fuse several matrices of the checkpoint (query, key and value; gate and up projection)."""
    part: int
    """Index of the checkpoint's matrix in `weight.checkpoint`."""
    rows: int
    """Number of outputs of the checkpoint's matrix, over all ranks."""

    @property
    def layer(self) -> str:
        """Name of the layer in a Hugging Face model: `model.layers.0.self_attn.q_proj`."""
        return self.weight.checkpoint[self.part].removesuffix(".weight")

    @property
    def kind(self) -> str:
        """Last part of the layer's name: `q_proj`."""
        return self.layer.rpartition(".")[2]

    def a(self, rank: int) -> Weight:
        """Return A [rank, inputs]: replicated on all TP ranks, or split along the inputs of a row-parallel layer."""
        return self._tensor("A", (rank, self.weight.shape[1]), 1 if self.weight.axis == 1 else None, Form.WHOLE)

    def b(self, rank: int) -> Weight:
        """Return B [outputs, rank]: split along the outputs of a column-parallel layer, or replicated on all TP ranks."""
        is_joined = self.weight.form is Form.GATE_UP and len(self.weight.checkpoint) == 1
        return self._tensor("B", (self.rows, rank), 0 if self.weight.axis == 0 else None, Form.GATE_UP if is_joined else Form.WHOLE)

    def _tensor(self, factor: str, shape: tuple[int, int], axis: int | None, form: Form) -> Weight:
        module = self.weight.megatron.removesuffix(".weight")
        return Weight(f"{module}.{ADAPTER_MODULE}.{self.kind}_{factor}", (peft_name(self.layer, factor),), shape, axis, form)


@dataclass(slots=True, frozen=True)
class ExpertsFactor(Weight):
    """A or B of one matrix of all experts of a layer.

    Rows are ordered by expert. Expert-parallel ranks split the experts; the expert-tensor-parallel ranks of an expert split its rows or
    columns (`axis`).
    """

    num_experts: int = 1
    factor: Literal["A", "B"] = "A"

    @property
    def peft_shape(self) -> tuple[int, int]:
        """Shape in PEFT's files: [E * rank, inputs] for A, [outputs, rank * E] for B."""
        rows, columns = self.shape
        return (rows, columns) if self.factor == "A" else (rows // self.num_experts, columns * self.num_experts)


@dataclass(slots=True, frozen=True)
class AdaptedExperts:
    """One matrix of all experts of a layer, with low-rank updates: each expert has its own A and B."""

    weight: Weight
    """Megatron's matrix of the first expert."""
    num_experts: int

    @property
    def module(self) -> str:
        """Megatron's name of the layer of experts: `decoder.layers.0.mlp.experts`."""
        return self.weight.megatron.partition(".local_experts.")[0]

    @property
    def linear(self) -> str:
        """Megatron's name of the matrix's linear layer in an expert: `linear_fc1`."""
        return self.weight.megatron.removesuffix(".weight").rpartition(".")[2]

    @property
    def kind(self) -> Literal["gate_up", "down"]:
        """Kind of the matrix; gate and up projection are one matrix."""
        return "gate_up" if self.weight.form is Form.GATE_UP else "down"

    def factors(self, rank: int) -> tuple[ExpertsFactor, ExpertsFactor]:
        """Return A [E * rank, inputs] and B [E * outputs, rank]."""
        outputs, inputs = self.weight.shape
        a_axis, b_axis = (None, 0) if self.weight.axis == 0 else (1, None)
        return self._factor("A", (rank, inputs), a_axis, Form.WHOLE), self._factor("B", (outputs, rank), b_axis, self.weight.form)

    def _factor(self, factor: Literal["A", "B"], shape: tuple[int, int], axis: int | None, form: Form) -> ExpertsFactor:
        assert self.weight.all_experts is not None
        tensor, (rows, columns) = f"{ADAPTER_MODULE}.{self.kind}_{factor}", shape
        stored = stored_name(f"{self.weight.all_experts.rpartition('.')[0]}.{tensor}")
        whole = (self.num_experts * rows, columns)
        return ExpertsFactor(f"{self.module}.{tensor}", (stored,), whole, axis, form, num_experts=self.num_experts, factor=factor)


@dataclass(frozen=True)
class AdapterNames(ModelNames):
    """Names of an adapter's tensors: A and B of every adapted matrix. The base model's weights are not included."""

    adapter: AdapterConfig

    @classmethod
    def of(cls, model: ModelNames, adapter: AdapterConfig, *, num_tensor_ranks: int = 1) -> "AdapterNames":
        """Return an adapter's names in a model split over `num_tensor_ranks` TP ranks. Raises ConfigError if it cannot adapt the model."""
        model_type = model.architecture.model_type
        if adapter.adapts_experts and model.architecture.experts is None:
            raise ConfigError(f"{model_type} has no experts to adapt; remove --lora-experts")
        _require_plain_attention(model, num_tensor_ranks)
        every = list(_linear_layers(model))
        layers = [matrix.layer for matrix in every]
        require_targets(adapter.target_modules, layers, model=f"the Megatron trainer's {model_type}")
        require_rank(adapter.rank, max(max(matrix.rows, matrix.weight.shape[1]) for matrix in every), model=model_type)
        PeftTargets.of(adapter, layers, has_experts=model.architecture.experts is not None)  # raises if PEFT could not load the adapter
        return cls(model.architecture, model.table, adapter)

    @property
    def matrices(self) -> Iterator[AdaptedMatrix]:
        model = ModelNames(self.architecture, self.table)
        return (matrix for matrix in _linear_layers(model) if self.adapter.adapts(matrix.layer))

    @property
    def experts(self) -> Iterator[AdaptedExperts]:
        """Adapted matrices of experts, layer by layer; none unless the adapter adapts experts."""
        experts = self.architecture.experts
        if experts is not None and self.adapter.adapts_experts:
            for weight in ModelNames(self.architecture, self.table).weights(0):
                if weight.expert == 0:
                    yield AdaptedExperts(weight, experts.num_experts)

    @property
    def peft_targets(self) -> "PeftTargets":
        """Targets of the adapter in `adapter_config.json`."""
        layers = [matrix.layer for matrix in _linear_layers(ModelNames(self.architecture, self.table))]
        return PeftTargets.of(self.adapter, layers, has_experts=self.architecture.experts is not None)

    def weights(self, num_mtp_layers: int | None = None) -> Iterator[Weight]:
        """Yield A and B of every adapted matrix; MTP layers have none, since Hugging Face's models lack these layers."""
        del num_mtp_layers
        for matrix in self.matrices:
            yield matrix.a(self.adapter.rank)
            yield matrix.b(self.adapter.rank)
        for experts in self.experts:
            yield from experts.factors(self.adapter.rank)

    def checkpoint_shapes(self, weight: Weight) -> tuple[tuple[int, ...], ...]:
        return (weight.peft_shape,) if isinstance(weight, ExpertsFactor) else super().checkpoint_shapes(weight)

    @cached_property
    def by_megatron_name(self) -> Mapping[str, Weight]:
        return {weight.megatron: weight for weight in self.weights()}

    @cached_property
    def by_matrix(self) -> Mapping[str, list[AdaptedMatrix]]:
        """Adapted matrices of the checkpoint, by the name of Megatron's matrix that contains them."""
        return {name: list(parts) for name, parts in groupby(self.matrices, lambda matrix: matrix.weight.megatron)}

    @cached_property
    def by_experts(self) -> Mapping[str, list[AdaptedExperts]]:
        """Adapted matrices of experts, by the name of Megatron's layer of experts."""
        return {name: list(matrices) for name, matrices in groupby(self.experts, lambda matrix: matrix.module)}


@dataclass(slots=True, frozen=True)
class PeftTargets:
    """Targets of an adapter in `adapter_config.json`."""

    modules: list[str]
    """`target_modules`: names of linear layers, or suffixes of them."""
    parameters: list[str]
    """`target_parameters`: weights of linear layers whose names would make PEFT adapt the experts instead (`EXPERT_MATRICES`)."""

    @classmethod
    def of(cls, adapter: AdapterConfig, layers: Collection[str], *, has_experts: bool) -> "PeftTargets":
        """Return the targets of an adapter. Raises ConfigError if PEFT does not support its dropout.

        Args:
            layers: names of all layers that can have an adapter.
            has_experts: whether the model stores all experts of a layer as one tensor.
        """
        taken = EXPERT_MATRICES if has_experts else frozenset()
        adapted = [layer for layer in layers if adapter.adapts(layer)]
        others = [target for target in adapter.target_modules if _last(target) not in taken]
        modules = others if adapter.target_modules else sorted({_last(layer) for layer in adapted} - taken)
        matrices = [layer for layer in adapted if _last(layer) in taken]
        if adapter.dropout and (matrices or adapter.adapts_experts):
            raise ConfigError(
                f"dropout {adapter.dropout}: PEFT does not support dropout for the MLPs of an MoE model, such as "
                f"{matrices[0] if matrices else 'its experts'}; use dropout 0, or adapt other layers"
            )
        partly = {_ending(layer) for layer in layers if not adapter.adapts(layer)}
        return cls(modules, sorted({f"{layer if _ending(layer) in partly else _ending(layer)}.weight" for layer in matrices}))


def _last(layer: str) -> str:
    return layer.rpartition(".")[2]


def _ending(layer: str) -> str:
    """Return the last two parts of a layer's name: `shared_experts.up_proj`."""
    return ".".join(layer.split(".")[-2:])


def require_targets(targets: Iterable[str], layers: Collection[str], *, model: str) -> None:
    """Raise ConfigError unless every target is a name, or the end of one, in `layers`, the layers that can have an adapter."""
    kinds = sorted({layer.rpartition(".")[2] for layer in layers})
    for target in targets:
        if not any(is_target(layer, target) for layer in layers):
            near = did_you_mean(nearest(target, kinds))
            raise ConfigError(f"target module {target}: {model} has no linear layer of this name to adapt{near}; it has {', '.join(kinds)}")


def require_rank(rank: int, widest: int, *, model: str) -> None:
    """Raise ConfigError if a rank exceeds `widest`, the most inputs or outputs of a layer to adapt: it would only waste memory."""
    if rank > widest:
        raise ConfigError(
            f"rank {rank} exceeds the {widest} inputs or outputs of the widest layer of {model} that can be adapted; lower it"
        )


def _linear_layers(model: ModelNames) -> Iterator[AdaptedMatrix]:
    """Yield the matrices of the Hugging Face model's linear layers, to which routers and routed experts do not belong."""
    for weight in model.weights(0):
        is_matrix = len(weight.shape) == 2 and not weight.is_vocabulary and weight.all_experts is None
        if is_matrix and not weight.megatron.endswith(".router.weight"):
            yield from (AdaptedMatrix(weight, part, rows) for part, (rows, _) in enumerate(model.checkpoint_shapes(weight)))


def _require_plain_attention(model: ModelNames, num_tensor_ranks: int) -> None:
    """Raise ConfigError if attention is sparse, or there are more TP ranks than KV heads, since an adapter then cannot be trained."""
    heads = model.architecture.attention
    if model.architecture.sparse_index is not None:
        raise ConfigError(
            f"cannot train an adapter of {model.architecture.model_type}: its sparse attention multiplies by the up-projections of latents "
            "without calling their layers; remove the --lora-* flags"
        )
    if isinstance(heads, GroupedAttention) and num_tensor_ranks > heads.num_kv_heads:
        raise ConfigError(
            f"--tensor-model-parallel-size {num_tensor_ranks}: an adapter needs a whole KV head on every TP rank, but the model has only "
            f"{heads.num_kv_heads}; use --tensor-model-parallel-size {heads.num_kv_heads}"
        )
