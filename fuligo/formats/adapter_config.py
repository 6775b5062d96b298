"""Configuration of a LoRA adapter as PEFT stores it next to the adapter's weights. Imports neither torch nor PEFT."""

import json
import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from fuligo.errors import CheckpointError
from fuligo.formats.disk import read_plain_text, unreadable_files

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER = "adapter"
"""Directory of the adapter in a checkpoint of a LoRA run."""
NAME = "default"
"""Name of the adapter in PEFT's layers; tensor names in files omit it."""
MAX_RANK = 2**16
"""Largest rank accepted: no matrix of a model has a higher rank, and a larger one would exhaust memory."""
MAX_ALPHA = 1e6
_PREFIX = "base_model.model."
"""Prefix of the tensors' names in PEFT's files."""
EXPERT_PARAMETERS = ("experts.down_proj", "experts.gate_up_proj")
"""`target_parameters` of an adapter of MoE experts."""
TOWER_MODULES = r"model\.(visual|vision_tower|embed_vision|audio_tower|embed_audio)\..*"
"""Pattern of the names of the towers' modules; `exclude_modules` of an adapter whose targets would also match layers of a tower."""
_MATRIX = ".weight"
"""Suffix of names in `target_parameters` that are matrices of linear layers; other names are matrices of all experts."""
_WRAPPERS = {"gate_up": ".base_layer", "down": ""}
"""Suffix of the experts' module name in PEFT's files, by matrix. PEFT wraps the experts once per matrix: the outer wrapper has the factors
of `down`, and the `base_layer` inside it those of `gate_up`."""
_EXPERTS_TENSOR = re.compile(r"(?P<experts>.+\.experts)\.adapter\.(?P<matrix>gate_up|down)_(?P<factor>[AB])")
_UNSUPPORTED = (
    "use_dora", "modules_to_save", "lora_bias", "trainable_token_indices", "layer_replication", "fan_in_fan_out", "rank_pattern",
    "alpha_pattern", "layers_to_transform", "use_qalora", "alora_invocation_tokens", "use_bdlora", "monteclora_config",
    "velora_config", "kasa_config", "arrow_config", "ensure_weight_tying",
)  # fmt: skip


def is_adapter(directory: Path) -> bool:
    """Return whether `directory` is an adapter in PEFT's format."""
    return (directory / ADAPTER_CONFIG).is_file()


def adapter_directory(given: Path) -> Path:
    """Return the adapter's directory in the checkpoint `given` of a LoRA run, or `given` itself if it is anything else."""
    return given if is_adapter(given) or not is_adapter(given / ADAPTER) else given / ADAPTER


def stored_name(name: str) -> str:
    """Return a tensor's name in files and weight syncs: an adapter's as in PEFT's files, others as in a model without an adapter."""
    if match := _EXPERTS_TENSOR.fullmatch(name):
        return peft_name(match["experts"] + _WRAPPERS[match["matrix"]], match["factor"])
    if f".lora_A.{NAME}." in name or f".lora_B.{NAME}." in name:
        return _PREFIX + name.replace(f".{NAME}.", ".")
    return name.replace(".base_layer.", ".")


def peft_name(layer: str, factor: str) -> str:
    """Return the name of a layer's factor `A` or `B` in PEFT's files."""
    return f"{_PREFIX}{layer}.lora_{factor}.weight"


def is_target(layer: str, target: str) -> bool:
    """Return whether `target` is the layer's full name, or its last parts after a dot, as PEFT matches targets."""
    return layer == target or layer.endswith(f".{target}")


def is_adapter_name(name: str) -> bool:
    """Return whether a tensor of this name in a file or a weight sync belongs to an adapter."""
    return name.startswith(_PREFIX)


def adapted_weight(name: str) -> str:
    """Return the name of the weight that an adapter's tensor of this name adapts."""
    layer = name.removeprefix(_PREFIX).rpartition(".lora_")[0]
    experts, is_inner, _ = layer.partition(".experts.base_layer")
    if is_inner:
        return f"{experts}.experts.gate_up_proj"
    return f"{layer}.down_proj" if layer.endswith(".experts") else f"{layer}.weight"


@dataclass(slots=True, frozen=True)
class AdapterConfig:
    """Shape and scaling of an adapter: y = W x + scaling B A x for every adapted matrix W (LoRA, arXiv 2106.09685)."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...] = ()
    """Names of the adapted layers, or last parts of them such as `q_proj`; empty: all layers of `models.adapter.linear_layers`."""
    rank_stabilised: bool = False
    """True to scale by alpha / sqrt(rank) (rsLoRA, arXiv 2312.03732) instead of alpha / rank."""
    dropout: float = 0.0
    adapts_experts: bool = False
    """True if every expert's matrices also have their own A and B: `gate_up_proj`, gate and up projection as one matrix, and
    `down_proj`."""
    base: str = ""
    """Name or path of the model that the adapter was trained on; empty if unknown."""

    @property
    def scaling(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rank_stabilised else self.rank)

    def adapts(self, layer: str) -> bool:
        """Return whether the adapter adapts the linear layer `layer`: one of its targets matches (`is_target`), or it has no targets."""
        return not self.target_modules or any(is_target(layer, target) for target in self.target_modules)

    def to_json(self) -> str:
        """Return the fields as JSON, for another process that creates an untrained adapter of this shape; see `from_json`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the configuration that `to_json` wrote."""
        fields = json.loads(text)
        return cls(**(fields | {"target_modules": tuple(fields["target_modules"])}))

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read `adapter_config.json`. Raises CheckpointError if it is missing, damaged, or has a feature that fuligo does not support."""
        file = directory / ADAPTER_CONFIG
        try:
            if unreadable := next(unreadable_files(directory), None):
                raise CheckpointError(f"cannot load {directory}: {unreadable}")
            fields = json.loads(read_plain_text(file))
            if not isinstance(fields, dict):
                raise ValueError(f"it must be an object, not {fields!r:.80}")
            kind = fields["peft_type"]
            if kind != "LORA":
                raise CheckpointError(
                    f"cannot load {directory}: its peft_type is {kind!r:.40}, but fuligo loads only LoRA; use a LoRA adapter"
                )
            if unknown := _unsupported(fields):
                raise CheckpointError(
                    f"cannot load {directory}: {ADAPTER_CONFIG} has {unknown}, which is not supported; use an adapter trained without it"
                )
            targets, parameters = fields["target_modules"], fields.get("target_parameters") or []
            if targets is None:
                targets = []
            if not isinstance(targets, list) and targets != "all-linear":
                raise CheckpointError(
                    f"cannot load {directory}: target_modules {targets!r} of {ADAPTER_CONFIG} is a pattern; list the names of the layers"
                )
            if targets != "all-linear":
                targets = [*targets, *(name.removesuffix(_MATRIX) for name in parameters if name.endswith(_MATRIX))]
                if not (targets and all(isinstance(target, str) and target for target in targets)):
                    raise ValueError(f"target_modules is {targets!r}, not names of layers")
            return cls(
                rank=int(_number(fields, "r", at_least=1, at_most=MAX_RANK, whole=True)),
                alpha=_number(fields, "lora_alpha", at_least=-MAX_ALPHA, at_most=MAX_ALPHA),
                target_modules=() if targets == "all-linear" else tuple(sorted(targets)),
                rank_stabilised=bool(fields.get("use_rslora")),
                dropout=_number({"lora_dropout": 0.0} | fields, "lora_dropout", at_least=0, at_most=1),
                adapts_experts=any(not name.endswith(_MATRIX) for name in parameters),
                base=str(fields.get("base_model_name_or_path") or ""),
            )
        except KeyError as error:
            raise CheckpointError(f"cannot read {file}: it has no {error.args[0]}; use a directory that PEFT or fuligo saved") from error
        except (OSError, ValueError, RecursionError) as error:
            if saved := sorted(directory.glob(f"*/{ADAPTER}/{ADAPTER_CONFIG}")):
                raise CheckpointError(
                    f"cannot read {file}: {directory} holds checkpoints; use one of them, such as {saved[-1].parent.parent}"
                ) from error
            raise CheckpointError(f"cannot read {file}: {error}; use a directory that PEFT or fuligo saved") from error


def _number(fields: dict[str, Any], name: str, *, at_least: float = -math.inf, at_most: float = math.inf, whole: bool = False) -> float:
    """Return the finite number `fields[name]`. Raises KeyError if it is missing, and ValueError if it is not a number or out of bounds."""
    value = fields[name]
    is_number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not is_number or not at_least <= value <= at_most:
        bounds = [f"of at least {at_least:g}"] * (at_least > -math.inf) + [f"of at most {at_most:g}"] * (at_most < math.inf)
        raise ValueError(
            " ".join([f"{name} is {value!r:.80}, not a {'whole' if whole else 'finite'} number", " and ".join(bounds)]).rstrip()
        )
    return value if whole else float(value)


def _unsupported(fields: dict[str, Any]) -> str:
    """Return the first feature that fuligo lacks, with its value; empty if there is none."""
    found = [name for name in _UNSUPPORTED if fields.get(name)]
    if not _are_supported(fields.get("target_parameters") or []):
        found.append("target_parameters")
    if fields.get("exclude_modules") not in (None, [], "", TOWER_MODULES):
        found.append("exclude_modules")
    if fields.get("bias", "none") != "none":
        found.append("bias")
    if fields.get("init_lora_weights", True) not in (True, False, None, "gaussian"):  # may also have changed the base
        found.append("init_lora_weights")
    return f"{found[0]} {fields[found[0]]!r}" if found else ""


def _are_supported(parameters: object) -> bool:
    """Return whether `target_parameters` names only matrices of linear layers, and both matrices of all layers' experts or neither."""
    if not (isinstance(parameters, list) and all(isinstance(name, str) for name in parameters)):
        return False
    of_experts = [name.split(".") for name in parameters if not name.endswith(_MATRIX)]
    if not of_experts:
        return True
    both = tuple(sorted(".".join(parts[-2:]) for parts in of_experts)) == EXPERT_PARAMETERS
    return both and not any(part.isdigit() for parts in of_experts for part in parts)
