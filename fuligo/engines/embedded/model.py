"""Hugging Face causal language model that runs on flat batches with the engine's attention."""

import inspect
import logging
from collections.abc import Callable
from typing import Any, cast

import torch
from safetensors import SafetensorError

from fuligo.engines.embedded.attention import ATTENTION_NAME, SGLANG_INSTEAD, AttentionPlan
from fuligo.engines.embedded.kv_cache import CacheShape, LayerShape
from fuligo.engines.embedded.launch import AdapterSource
from fuligo.engines.embedded.linear_attention import keep_states
from fuligo.errors import ConfigError, EngineError
from fuligo.formats.adapter_config import AdapterConfig
from fuligo.formats.checkpoint_files import prediction_prefixes
from fuligo.formats.quantized_base import QuantizedBase
from fuligo.models.adapter import SharedBase, adapter_tensors, add_adapter, with_adapter_of
from fuligo.models.attention import unpackable_layers
from fuligo.models.batch_invariant import log_softmax
from fuligo.models.cpu_products import speed_up_linear_layers
from fuligo.models.directory import end_ids, has_tokenizer, load_config, load_tokenizer
from fuligo.models.invariant_modules import InvariantModel
from fuligo.models.modules import align_weights, speed_up_rms_norms, take_stated_epsilon, take_stated_rotation
from fuligo.models.quantized_linear import round_base
from fuligo.models.registry import REFUSED, VISION_TYPES, batch_variant_because
from fuligo.models.transformers_types import (
    LANGUAGE_MODEL_ALONE,
    attention_choice,
    has_tower,
    has_unknown_tower,
    language_model,
    load_decay_rates_exactly,
    loading_options,
    model_class,
    take_dtype,
    text_config,
)
from fuligo.models.vision.forward import RowImages, VisionTower
from fuligo.models.vision.processor import ImageProcessor
from fuligo.quantities import count

logger = logging.getLogger(__name__)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MEAN_DIFFERENCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Largest mean difference of log-probabilities, weighted by probability, that rounding explains between two attention implementations."""
NOISE_FACTOR = 3.0
"""The engine may also differ by this multiple of the difference between transformers' own two implementations. For SmolLM2-135M in bf16
these differ by 0.07, and by 0.5 on its reserved tokens."""
BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")


class EngineModel:
    """Model with its tokenizer."""

    def __init__(
        self,
        path: str,
        device: torch.device,
        dtype: torch.dtype,
        *,
        trusts_tokenizer: bool = False,
        adapter: AdapterSource | None = None,
        is_batch_invariant: bool = False,
        base: SharedBase | None = None,
    ) -> None:
        """Load the model. Raises ConfigError or CheckpointError if files are unusable, and EngineError if the engine cannot serve it.

        Args:
            trusts_tokenizer: run Python code of the tokenizer in the directory
            is_batch_invariant: compute log-probabilities that depend, bit for bit, only on a request's own tokens
            base: base weights to share with other models of the directory
        """
        self.path = path
        self.device = device
        self.dtype = dtype
        whole = servable_config(path)
        if is_batch_invariant:
            _require_batch_invariant(path, whole, device, adapter)
        config = text_config(whole)
        self.module: Any = _load(path, whole, dtype)
        self.image_token_id: int | None = whole.image_token_id if whole.model_type in VISION_TYPES else None
        """Id of every token of an image; None for a text-only model."""
        self.vision: VisionTower | None = None
        self.no_images_because = "it is served on text only"
        """Reason why the engine accepts no images; unused if `vision` is set."""
        if whole.model_type in VISION_TYPES:
            try:
                self.vision = VisionTower(self.module.base_model, ImageProcessor(path))
            except ConfigError as error:  # text prompts need no image processor
                self.no_images_because = str(error)
        align_weights(self.module)
        take_stated_epsilon(self.module)
        take_stated_rotation(self.module)
        speed_up_rms_norms(self.module)
        speed_up_linear_layers(self.module)
        self._recurrent = keep_states(self.module)
        self._invariant = InvariantModel(self.module, keeps_weights=True) if is_batch_invariant else None
        self.log_softmax: Callable[[torch.Tensor], torch.Tensor] = log_softmax if is_batch_invariant else ordinary_log_softmax
        """[N, V] -> [N, V], float32"""
        if adapter is not None:
            _add_adapter(self.module, adapter, dtype)
        if base is not None:
            base.give_to(self.module)
        self.module.to(device).eval().requires_grad_(False)
        self.tokenizer = load_tokenizer(path, runs_its_code=trusts_tokenizer) if has_tokenizer(path) else None
        if self.tokenizer is None:
            logger.warning("%s has no tokenizer; answers will have no text, and stop strings are rejected", path)
        self.context_length: int = getattr(config, "max_position_embeddings", None) or 1 << 30
        self.vocab_size: int = config.vocab_size
        self.end_ids = end_ids(self.module.generation_config, config, self.tokenizer)
        self._keeps_logits = "logits_to_keep" in inspect.signature(self.module.forward).parameters
        self.cache_shape = self._probe_cache_shape()

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        plan: AttentionPlan,
        keep: torch.Tensor | None = None,
        images: RowImages | None = None,
    ) -> torch.Tensor:
        """Compute the logits [N or S, V] of a flat batch.

        Args:
            input_ids: [N]
            positions: [N] position of each token in its sequence, or [3, N] rotary positions if there are images
            keep: [S] tokens whose logits are returned; None: all
            images: images of the batch; None if there are none
        """
        plan.is_batch_invariant = self._invariant is not None
        kwargs: dict[str, Any] = {"attention_plan": plan}
        if self._recurrent.layers:
            kwargs |= {"seq_idx": plan, "cu_seq_lens_q": plan}  # transformers passes these arguments to linear attention
        if has_tower(self.module.config):
            return self._whole_forward(input_ids, positions, keep, images, kwargs)
        kwargs |= {"logits_to_keep": keep} if self._keeps_logits and keep is not None else {}
        logits = self.module(input_ids=input_ids[None], position_ids=positions[None], use_cache=False, **kwargs).logits[0]
        return logits if self._keeps_logits or keep is None else logits[keep]

    def _whole_forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor | None, images: RowImages | None, kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """Compute the logits of a model with towers, as `forward` does. Image tokens outside of `images` are embedded as text."""
        if self.vision is not None:
            hidden = self.vision.hidden_states(input_ids, positions, images, **kwargs)[0]
        else:
            language = language_model(self.module)
            hidden = language(input_ids=input_ids[None], position_ids=positions[None], use_cache=False, **kwargs).last_hidden_state[0]
        logits = self.module.get_output_embeddings()(hidden if keep is None else hidden[keep])
        cap: float | None = getattr(text_config(self.module.config), "final_logit_softcapping", None)
        return logits if cap is None else cap * (logits / cap).tanh()

    def weights_changed(self) -> None:
        """Drop all values derived from the weights. Call it after every change of a weight."""
        if self._invariant is not None:
            self._invariant.forget_weights()

    def _by_its_own_attention(self, ids: torch.Tensor, name: str) -> torch.Tensor:
        """Return the float32 logits [T, V] of the model with one of transformers' attention implementations."""
        self.module.set_attn_implementation(name)
        try:
            return self.module(input_ids=ids[None], use_cache=False).logits[0].float()
        finally:
            self.module.set_attn_implementation(attention_choice(self.module.config, ATTENTION_NAME))

    def _noise(self, ids: torch.Tensor, eager: torch.Tensor) -> float:
        """Return the mean difference between transformers' SDPA and eager attention; 0 if the model does not support SDPA."""
        try:
            return _mean_difference(self._by_its_own_attention(ids, "sdpa"), eager)
        except (ValueError, NotImplementedError):  # not supported by the model
            return 0.0

    @torch.inference_mode()
    def _probe_cache_shape(self) -> CacheShape:
        """Run a few tokens and return the shapes of what layers keep; compare the result with transformers' eager attention.

        A model whose attention does more than transformers' attention interface passes on (ALiBi, layers that share keys, recurrent layers)
        would silently be served wrongly; here its results differ. Raises EngineError if they do, or if a layer bypasses the interface.
        """
        ids = 7919 * torch.arange(1, 17, device=self.device) % self.vocab_size  # spread out, since the first ids are often reserved
        plan = AttentionPlan([], [0, len(ids)])
        ours = self.forward(ids, torch.arange(len(ids), device=self.device), plan).float()
        theirs = self._by_its_own_attention(ids, "eager")
        difference = _mean_difference(ours, theirs)
        if not difference <= MEAN_DIFFERENCE[self.dtype] and not difference <= NOISE_FACTOR * self._noise(ids, theirs):
            raise EngineError(
                f"cannot serve {self.path} ({type(self.module).__name__}): log-probabilities with the embedded engine's "
                f"attention differ from those with the model's own by {difference:.2g} on average; {SGLANG_INSTEAD}"
            )
        layers = [*plan.seen, *self._recurrent.layers]
        if not plan.seen or sorted(layers) != list(range(len(layers))):
            raise EngineError(
                f"cannot serve {self.path} ({type(self.module).__name__}): each layer's attention must go through "
                f"transformers' interface, but only layers {sorted(layers)} did; {SGLANG_INSTEAD}"
            )
        cached = sorted(plan.seen)
        return CacheShape(tuple(cached), tuple(LayerShape(*plan.seen[layer]) for layer in cached), self._recurrent)


def _mean_difference(logits: torch.Tensor, other: torch.Tensor) -> float:
    """Return the mean difference of the log-probabilities of two logits [T, V], weighted by the probabilities of `other`."""
    logprobs, others = logits.log_softmax(-1), other.log_softmax(-1)
    return (others.exp() * (logprobs - others).abs()).sum(-1).mean().item()


def ordinary_log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Return torch's log-softmax over the last axis."""
    return logits.log_softmax(-1)


def servable_config(path: str) -> Any:
    """Return the config of a checkpoint, as transformers reads it. Raises EngineError if the embedded engine cannot serve the model."""
    config = load_config(path)
    if has_unknown_tower(config):
        raise EngineError(f"cannot serve {path} ({config.model_type}): {LANGUAGE_MODEL_ALONE}")
    if (reason := REFUSED.get(config.model_type)) is not None:
        raise EngineError(f"cannot serve {path} ({config.model_type}): {reason}; choose another model")
    language = text_config(config)
    kind = (getattr(language, "rope_parameters", None) or {}).get("rope_type")
    if kind in BATCH_DEPENDENT_ROPE:
        raise EngineError(
            f"cannot serve {path}: the embedded engine does not support rope_type {kind!r}, which depends on the longest "
            f"sequence of a batch; {SGLANG_INSTEAD}"
        )
    if layers := unpackable_layers(language):
        raise EngineError(
            f"cannot serve {path} ({config.model_type}): the embedded engine does not support layers of type {', '.join(layers)}; "
            + SGLANG_INSTEAD
        )
    return config


def _add_adapter(module: Any, source: AdapterSource, dtype: torch.dtype) -> None:
    """Add an adapter to the model. Raises CheckpointError if it does not fit, and ConfigError if the model lacks a layer to adapt."""
    if isinstance(source, AdapterConfig):
        add_adapter(module, source, seed=0)
    else:
        with_adapter_of(module, source)
        if (base := QuantizedBase.read(source)) is not None:
            round_base(module, base)  # the adapter was trained on these values
    for parameter in adapter_tensors(module).values():
        parameter.data = parameter.data.to(dtype)


def _require_batch_invariant(path: str, config: Any, device: torch.device, adapter: AdapterSource | None) -> None:
    """Check that the model can compute batch-invariantly. Raises EngineError if the model cannot."""
    because = batch_variant_because(config.to_dict(), "cpu")
    if because is None and adapter is not None:
        because = "it has a LoRA adapter"
    if because is None and device.type != "cpu":
        because = f"batch-invariant operations are verified only on CPUs, not on {device.type}"
    if because is not None:
        raise EngineError(f"cannot serve {path} with --batch-invariant: {because}; remove --batch-invariant")


def _load(path: str, config: Any, dtype: torch.dtype) -> Any:
    given: dict[str, Any] = {"dtype": dtype, "output_loading_info": True, **loading_options(config)}
    given["attn_implementation"] = attention_choice(config, ATTENTION_NAME)
    load_decay_rates_exactly(config)
    try:
        module, report = cast(Any, model_class(config).from_pretrained(path, config=config, trust_remote_code=False, **given))
        take_dtype(module, config, dtype)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"cannot load {path}: {error}; copy or download the checkpoint again") from error
    if missing := sorted(report["missing_keys"]):
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        raise ConfigError(f"cannot load {path}: weights are missing: {', '.join(missing[:8])}{more}; download the checkpoint again")
    if prefixes := prediction_prefixes(config.to_dict()):
        logger.info(
            "skipping the weights of %s, which this engine does not use (%s)", count(len(prefixes), "MTP layer"), ", ".join(prefixes)
        )
    return module
