"""Description of a model family: what fuligo knows about its `model_type`. Imports neither numpy nor torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from fuligo.formats.stored_experts import StoredExperts
from fuligo.models.architecture import Architecture, Part
from fuligo.models.config_json import ConfigJson
from fuligo.models.names import NameTable


@dataclass(frozen=True, slots=True)
class ModelArgs:
    """Interpretation of a family's MODEL_ARGS as its config.json."""

    told_by: Mapping[str, object] | None = None
    """Flags that MODEL_ARGS of the family have, with their values (True: any but 0); None: they are read as those of an older family with
    equal layers, unless a config.json or `--spec` names the family."""
    precedence: int = 0
    """Rank among the families whose `told_by` fits: the highest is taken, of equal ones the first in the registry."""
    is_latent: bool = False
    """The family has latent attention."""
    needs_experts: bool = False
    """Every model of the family has experts."""
    num_experts_key: str = "n_routed_experts"
    lists_dense_layers: bool = False
    """config.json lists the dense layers of a mixture (`mlp_only_layers`), and there are no shared experts; False: they come first."""
    specs: tuple[str, ...] = ()
    """Values of `--spec` that public slime scripts give for the family, as a dotted path."""
    incomplete_because: str | None = None
    """Why no MODEL_ARGS describe such a model completely, so that it can only be read from config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Functions and facts of a family. Facts of its layers' numerics belong to the `Architecture`."""

    architecture: Callable[[ConfigJson], Architecture]
    """Read a config.json; raise ConfigError for keys that are missing or contradict each other."""
    names: Callable[[ConfigJson, Architecture], NameTable] | None = None
    """Name the weights in the checkpoint and in Megatron; None: `why_not_megatron`."""
    why_not_megatron: str | None = None
    """Why the Megatron trainer cannot train the family."""
    why_not_transformers: str | None = None
    """Why transformers' layers, which the torch trainer and the embedded engine run, cannot compute the family."""
    why_not_sglang: str | None = None
    """Why SGLang's engines cannot serve checkpoints of the language model alone. Those of `whole_type` they can."""
    whole_type: str | None = None
    """`model_type` of a model with towers whose language model (`text_config`) is of the family."""
    vision_tower: Callable[[ConfigJson], Part] | None = None
    """Count the towers of a model of `whole_type` from its whole config.json."""
    sees_images: bool = True
    """Models of `whole_type` take images; one forward pass (`models.vision.forward`) and one rule of positions (`models.vision.positions`)
    fits them all. False: their towers are neither run nor trained."""
    loaded_as: str | None = None
    """Model type whose classes in transformers load the checkpoints; None if the family has its own."""
    stored_experts: StoredExperts = StoredExperts.APART
    stores_either_experts: bool = False
    """Checkpoints hold experts `APART` or `WHOLE`, and SGLang loads both; `stored_experts` is what transformers writes."""
    has_plain_experts: bool = True
    """Experts in transformers are matrices [E, outputs, inputs] without biases, which adapters and quantized bases need."""
    unwritten_keys: tuple[str, ...] = ()
    """Keys of config.json that SGLang needs and transformers reads but does not write."""
    fuses_gate_up: bool = False
    """transformers' dense MLP has one layer for gate and up projection."""
    has_gated_delta: bool = False
    """Layers of type `linear_attention` are those that `models.gated_delta` computes."""
    has_mtp_module: bool = False
    """Checkpoints hold one MTP layer, under `mtp.`, that `models.mtp` computes: the torch trainer trains it, and exports keep it."""
    batch_invariant_on: tuple[Literal["cpu", "cuda"], ...] = ()
    """Devices where all its layers have batch-invariant operations for `--exact-on-policy`: linear layers, RMSNorms, SwiGLU, rotary
    embeddings, full attention, on CPUs also Qwen3-MoE's experts."""
    sglang_attention: tuple[str, ...] = ()
    """Attention kernels with which SGLang serves the family; empty: any for its kind of attention."""
    has_window_pool: bool = False
    """SGLang keeps the cache of layers with windows in its own pool; else all layers cache all tokens."""
    writes_harmony: bool = False
    """Answers come in channels of the harmony format, not after `</think>`."""
    model_args: ModelArgs = ModelArgs()

    def __post_init__(self) -> None:
        assert (self.names is None) == (self.why_not_megatron is not None)
        assert (self.whole_type is None) == (self.vision_tower is None)
