"""Description of a model family: what fuligo knows about its `model_type`. Imports neither numpy nor torch."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from fuligo.models.architecture import Architecture, Part
from fuligo.models.config_json import ConfigJson
from fuligo.models.names import NameTable


@dataclass(frozen=True, slots=True)
class ModelArgs:
    """Reading of MODEL_ARGS as a family's config.json."""

    is_latent: bool = False
    """The family has latent attention."""
    needs_experts: bool = False
    """No model of the family is without experts."""
    num_experts_key: str = "n_routed_experts"
    lists_dense_layers: bool = False
    """config.json lists the dense layers of a mixture (`mlp_only_layers`), and there are no shared experts; False: they are the first."""
    specs: tuple[str, ...] = ()
    """Values of `--spec` that public slime scripts give for the family, as a dotted path."""
    incomplete_because: str | None = None
    """Why no MODEL_ARGS describe such a model completely, so that it can only be read from config.json."""


class StoredExperts(StrEnum):
    """Form of routed experts in checkpoints and engines."""

    APART = "apart"
    """A tensor for each expert and projection."""
    WHOLE = "whole"
    """A tensor for all experts of a layer."""
    MIXTRAL = "mixtral"
    """As `APART`, with Mixtral's names (`block_sparse_moe.experts.0.w1`), which transformers' model does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Functions and facts of a family. Facts of its layers' numerics belong to the `Architecture`."""

    architecture: Callable[[ConfigJson], Architecture]
    """Read a config.json; raises ConfigError for keys that are missing or contradict each other."""
    names: Callable[[ConfigJson, Architecture], NameTable] | None = None
    """Name the weights in the checkpoint and in Megatron; None: `why_not_megatron`."""
    why_not_megatron: str | None = None
    """Why the Megatron trainer cannot train the family."""
    vision_tower: Callable[[ConfigJson], Part] | None = None
    """Read the `vision_config` of a vision-language model."""
    loaded_as: str | None = None
    """Model type whose classes in transformers load the checkpoints; None if the family has its own."""
    stored_experts: StoredExperts = StoredExperts.APART
    fuses_gate_up: bool = False
    """transformers' dense MLP has one layer for gate and up projection."""
    has_gated_delta: bool = False
    """Layers of type `linear_attention` are those that `models.gated_delta` computes."""
    is_batch_invariant: bool = False
    """All its layers have batch-invariant operations for `--exact-on-policy`: linear layers, RMSNorms, SwiGLU, rotary embeddings, full
    attention, Qwen3-MoE's experts."""
    has_window_pool: bool = False
    """SGLang keeps the cache of layers with windows in its own pool; else all layers cache all tokens."""
    writes_harmony: bool = False
    """Answers come in channels of the harmony format, not after `</think>`."""
    model_args: ModelArgs = ModelArgs()

    def __post_init__(self) -> None:
        assert (self.names is None) == (self.why_not_megatron is not None)
