"""Names and layouts of a LoRA adapter's tensors in PEFT's files and in Megatron-Core models. Imports neither numpy nor torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from fuligo.config.flag import did_you_mean, nearest
from fuligo.errors import ConfigError
from fuligo.formats.adapter_config import AdapterConfig, peft_name
from fuligo.models.architecture import GroupedAttention
from fuligo.models.names import Form, ModelNames, Weight

EXPERT_MATRICES = frozenset({"gate_proj", "up_proj", "down_proj"})
"""Names of the matrices of experts, as the files of published models have them."""
ADAPTER_MODULE = "adapter"
"""Name of the module with the adapter in Megatron's linear layer that it adapts."""


@dataclass(slots=True, frozen=True)
class AdaptedMatrix:
    """Matrix of the checkpoint with a low-rank update, and its place in one of Megatron's."""

    weight: Weight
    """Megatron's matrix, of which the checkpoint's may be a part (queries, keys and values; gate and up projection)."""
    part: int
    """Index among `weight.checkpoint`."""
    rows: int
    """Outputs of the checkpoint's matrix over all ranks."""

    @property
    def layer(self) -> str:
        """Return the name of the layer in a Hugging Face model: `model.layers.0.self_attn.q_proj`."""
        return self.weight.checkpoint[self.part].removesuffix(".weight")

    @property
    def kind(self) -> str:
        """Return the last part of the layer's name."""
        return self.layer.rpartition(".")[2]

    def a(self, rank: int) -> Weight:
        """Return A [rank, inputs]: whole on every TP rank, or split as the inputs of a row-parallel layer."""
        return self._tensor("A", (rank, self.weight.shape[1]), 1 if self.weight.axis == 1 else None, Form.WHOLE)

    def b(self, rank: int) -> Weight:
        """Return B [outputs, rank]: split as the outputs of a column-parallel layer, or whole on every TP rank."""
        is_joined = self.weight.form is Form.GATE_UP and len(self.weight.checkpoint) == 1
        return self._tensor("B", (self.rows, rank), 0 if self.weight.axis == 0 else None, Form.GATE_UP if is_joined else Form.WHOLE)

    def _tensor(self, factor: str, shape: tuple[int, int], axis: int | None, form: Form) -> Weight:
        module = self.weight.megatron.removesuffix(".weight")
        return Weight(f"{module}.{ADAPTER_MODULE}.{self.kind}_{factor}", (peft_name(self.layer, factor),), shape, axis, form)


@dataclass(frozen=True)
class AdapterNames(ModelNames):
    """Names of an adapter's tensors: A and B of every adapted matrix. The model's own names are not among them."""

    adapter: AdapterConfig

    @classmethod
    def of(cls, model: ModelNames, adapter: AdapterConfig, *, num_tensor_ranks: int = 1) -> "AdapterNames":
        """Return the names for an adapter of a model that as many TP ranks share.

        Raises:
            ConfigError: the model has no layer that is to be adapted, its layers cannot be adapted, or no matrix is as wide as the rank.
        """
        _require_plain_attention(model, num_tensor_ranks)
        every = list(_linear_layers(model))
        kinds = sorted({matrix.kind for matrix in every})
        for target in adapter.target_modules:
            if model.architecture.experts is not None and target.rpartition(".")[2] in EXPERT_MATRICES:
                raise ConfigError(
                    f"--lora-target-modules {target}: in a model with experts PEFT takes this name for the experts' matrices, which fuligo "
                    f"does not adapt; choose among {', '.join(kinds)}"
                )
            if not any(_is_target(matrix.layer, (target,)) for matrix in every):
                raise ConfigError(
                    f"--lora-target-modules {target}: {model.architecture.model_type} has no linear layer of this name below its output "
                    f"layer that the Megatron trainer adapts{did_you_mean(nearest(target, kinds))}; it has {', '.join(kinds)}"
                )
        widest = max(max(matrix.rows, matrix.weight.shape[1]) for matrix in every)
        if adapter.rank > widest:
            raise ConfigError(
                f"--lora-rank {adapter.rank}: the widest matrix of {model.architecture.model_type} has {widest} rows or columns, and no "
                "update of a higher rank exists; choose a rank such as 16"
            )
        return cls(model.architecture, model.table, adapter)

    @property
    def matrices(self) -> Iterator[AdaptedMatrix]:
        """Yield the adapted matrices, layer by layer."""
        model = ModelNames(self.architecture, self.table)
        targets = self.adapter.target_modules
        return (matrix for matrix in _linear_layers(model) if not targets or _is_target(matrix.layer, targets))

    @property
    def kinds(self) -> list[str]:
        """Return the names of the adapted layers as `adapter_config.json` lists them."""
        return list(self.adapter.target_modules) or sorted({matrix.kind for matrix in self.matrices})

    def weights(self, num_mtp_layers: int | None = None) -> Iterator[Weight]:
        """Yield A and B of every adapted matrix; MTP layers have none, since Hugging Face's models lack these layers."""
        del num_mtp_layers
        for matrix in self.matrices:
            yield matrix.a(self.adapter.rank)
            yield matrix.b(self.adapter.rank)

    @cached_property
    def by_megatron_name(self) -> Mapping[str, Weight]:
        return {weight.megatron: weight for weight in self.weights()}

    @cached_property
    def by_matrix(self) -> Mapping[str, list[AdaptedMatrix]]:
        """The adapted parts of each of Megatron's matrices, by its name."""
        found: dict[str, list[AdaptedMatrix]] = {}
        for matrix in self.matrices:
            found.setdefault(matrix.weight.megatron, []).append(matrix)
        return found


def _linear_layers(model: ModelNames) -> Iterator[AdaptedMatrix]:
    """Yield the matrices that an adapter can have, as `models.adapter.linear_layers` finds them in the Hugging Face model.

    Routers and routed experts are parameters of other modules there; in a model with experts PEFT takes the names of dense layers and
    shared experts for those of the experts' matrices.
    """
    left_out = frozenset[str]() if model.architecture.experts is None else EXPERT_MATRICES
    for weight in model.weights(0):
        is_matrix = len(weight.shape) == 2 and not weight.is_vocabulary and weight.all_experts is None
        if is_matrix and not weight.megatron.endswith(".router.weight"):
            matrices = (AdaptedMatrix(weight, part, rows) for part, (rows, _) in enumerate(model.checkpoint_shapes(weight)))
            yield from (matrix for matrix in matrices if matrix.kind not in left_out)


def _is_target(layer: str, targets: tuple[str, ...]) -> bool:
    return any(layer == target or layer.endswith(f".{target}") for target in targets)


def _require_plain_attention(model: ModelNames, num_tensor_ranks: int) -> None:
    """Check that the attention layers can be adapted.

    Raises:
        ConfigError: attention is sparse, or there are more TP ranks than heads of keys.
    """
    heads = model.architecture.attention
    if model.architecture.sparse_index is not None:
        raise ConfigError(
            f"cannot train an adapter of {model.architecture.model_type} in the Megatron trainer: its sparse attention multiplies by the "
            "projections of latents without calling their layers; use --train-backend torch, or leave the --lora flags out"
        )
    if isinstance(heads, GroupedAttention) and num_tensor_ranks > heads.num_kv_heads:
        raise ConfigError(
            f"--tensor-model-parallel-size {num_tensor_ranks}: an adapter needs a whole head of keys on every TP rank, and the model has "
            f"{heads.num_kv_heads}; use --tensor-model-parallel-size {heads.num_kv_heads}"
        )
