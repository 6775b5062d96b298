"""Description of a model family, the models of one `model_type`. Imports neither numpy nor torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from fuligo.formats.stored_experts import StoredExperts
from fuligo.models.architecture import Architecture, Part
from fuligo.models.config_json import ConfigJson
from fuligo.models.names import NameTable


@dataclass(frozen=True, slots=True)
class ModelArgs:
    """Rules for converting a family's MODEL_ARGS to the keys of its config.json."""

    identified_by: Mapping[str, object] | None = None
    """Flags that identify the family's MODEL_ARGS, with their values (True: any value except 0). None: only a config.json or `--spec` does;
    otherwise its MODEL_ARGS are read as those of an older family with the same layers."""
    precedence: int = 0
    """Priority if `identified_by` of several families matches: the highest wins, and among equals the first in the registry."""
    is_latent: bool = False
    needs_experts: bool = False
    num_experts_key: str = "n_routed_experts"
    """Key of config.json with the number of routed experts per layer."""
    lists_dense_layers: bool = False
    """True if config.json lists the dense layers of an MoE model (`mlp_only_layers`), and there are no shared experts; False: the dense
    layers come first."""
    specs: tuple[str, ...] = ()
    """Values of `--spec` in public slime scripts for the family, as dotted paths."""
    incomplete_because: str | None = None
    """Reason why MODEL_ARGS cannot describe the family's models completely, so that config.json is needed; None: they can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Functions and properties of a model family. The numerics of its layers are in `Architecture.numerics`."""

    architecture: Callable[[ConfigJson], Architecture]
    """Function that returns the shapes in a config.json; raises ConfigError for keys that are missing or contradict each other."""
    names: Callable[[ConfigJson, Architecture], NameTable] | None = None
    """Function that returns the names of the weights in checkpoint and Megatron; None if Megatron cannot train the family."""
    why_not_megatron: str | None = None
    """Reason why the Megatron trainer cannot train the family; None: it can."""
    why_not_transformers: str | None = None
    """Reason why transformers' layers, which the torch trainer and the embedded engine run, cannot compute the family; None: they can."""
    why_not_sglang: str | None = None
    """Reason why SGLang cannot serve checkpoints of the language model alone, only models of `whole_type`; None: it can."""
    whole_type: str | None = None
    """`model_type` of models with towers whose language model (`text_config`) is of the family; None: there are none."""
    vision_tower: Callable[[ConfigJson], Part] | None = None
    """Function that returns the parameters of a `whole_type` model's towers, given its whole config.json; None without `whole_type`."""
    sees_images: bool = True
    """True if models of `whole_type` accept images, with the forward pass of `models.vision.forward` and the positions of
    `models.vision.positions`. False: their towers are neither run nor trained."""
    loaded_as: str | None = None
    """Model type whose transformers classes load the checkpoints; None: the family's own, if transformers has any."""
    stored_experts: StoredExperts = StoredExperts.APART
    """Layout of experts in checkpoints that transformers writes."""
    stores_either_experts: bool = False
    """True if checkpoints may hold experts `APART` or `WHOLE`, and SGLang loads both."""
    has_plain_experts: bool = True
    """True if experts in transformers are matrices [E, outputs, inputs] without biases, which adapters and quantized bases need."""
    unwritten_keys: tuple[str, ...] = ()
    """Keys of config.json that SGLang needs and transformers reads but does not write."""
    fuses_gate_up: bool = False
    """True if transformers' dense MLP has one layer for gate and up projection."""
    has_gated_delta: bool = False
    """True if `models.gated_delta` computes the layers of type `linear_attention`."""
    has_mtp_module: bool = False
    """True if checkpoints hold one MTP layer, under `mtp.`, that `models.mtp` computes: the torch trainer trains it, and exports keep
    it."""
    batch_invariant_on: tuple[Literal["cpu", "cuda"], ...] = ()
    """Devices on which all of the family's layers have batch-invariant implementations (`models.invariant_modules`), as
    `--exact-on-policy` needs them."""
    sglang_attention: tuple[str, ...] = ()
    """SGLang attention backends that can serve the family; empty: any backend for its kind of attention."""
    has_window_pool: bool = False
    """True if SGLang keeps the KV cache of layers with windows in a separate pool; False: all layers cache all tokens."""
    writes_harmony: bool = False
    """True if responses use the channels of the harmony format, not `</think>`."""
    model_args: ModelArgs = ModelArgs()

    def __post_init__(self) -> None:
        assert (self.names is None) == (self.why_not_megatron is not None)
        assert (self.whole_type is None) == (self.vision_tower is None)
