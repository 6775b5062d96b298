"""Hugging Face causal LM over packed tokens, as a policy; refused if packing would change its results.

Packed attention is an attention implementation of transformers, so that any of its models runs on packed tokens.
"""

import logging
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar, get_verbosity, set_verbosity, set_verbosity_error

from fuligo.errors import CheckpointError, TrainerError
from fuligo.models.attention import device_cu_seqlens, packed_attention, unpackable_layers, varlen_attention
from fuligo.models.gated_delta import gated_delta_modules, pack_gated_delta, sequence_arguments
from fuligo.models.modules import align_weights, speed_up_rms_norms, take_stated_epsilon
from fuligo.models.transformers_types import LANGUAGE_MODEL_ALONE, has_vision_tower, read_config
from fuligo.trainer.batch import PackedTokens
from fuligo.trainer.logprobs import TokenLogprobs
from fuligo.trainer.parameters import require_finite_weights
from fuligo.trainer.torch_backend.logprobs import OutputHead, token_logprobs

PACKED_ATTENTION = "fuligo_packed"
"""Name by which models select it: `attn_implementation=PACKED_ATTENTION`."""


def register() -> None:
    """Register `PACKED_ATTENTION` with transformers, which builds no mask for an implementation without a mask function."""
    AttentionInterface.register(PACKED_ATTENTION, attention_forward)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    packed_cu_seqlens: Sequence[int] | None = None,
    packed_starts: Tensor | None = None,
    packed_longest: int = 0,
    **_: object,
) -> tuple[Tensor, None]:
    """Compute attention for one layer; transformers calls it.

    Args:
        query: [1, H, T, D]
        key: [1, Hkv, T, D]
        value: [1, Hkv, T, Dv]
        packed_cu_seqlens: starts of the sequences; like the following an argument of that name given to the model's forward.
        packed_starts: [S + 1] the same on the device, for compiled layers, with the length of the longest sequence.

    Returns:
        [1, T, H, Dv] and no attention weights.

    Raises:
        TrainerError: the model's attention has a feature that packed attention lacks.
    """
    name = type(module).__name__
    for feature, given in (("logit soft-capping", softcap), ("attention sinks", s_aux)):
        if given is not None:
            raise TrainerError(f"{name} uses {feature}, which the torch trainer's packed attention does not support. Choose another model.")
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    scale = query.size(-1) ** -0.5 if scaling is None else scaling
    if packed_starts is not None:
        return varlen_attention(q, k, v, packed_starts, packed_longest, scale=scale, window=sliding_window).unsqueeze(0), None
    if packed_cu_seqlens is None:
        raise TrainerError(f"{name} does not receive the arguments of its model's forward; packed sequences would see each other.")
    return packed_attention(q, k, v, packed_cu_seqlens, scale=scale, window=sliding_window).unsqueeze(0), None


logger = logging.getLogger(__name__)

CHECK_LENGTHS = (5, 9)
CHECK_TOLERANCE = 2e-3
"""Nats. Float32 noise between two attention implementations is 1e-5 to 1e-4; a wrong mask or a missing logit scale is 0.1 or more."""


COMPILED_KINDS = 32
"""Compiled variants of a layer's code: kinds of layers, with and without gradient, of policy, reference, teacher and value model."""


class PackedModel(nn.Module):
    """Causal LM that runs on packed tokens."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self._is_compiled = False
        self._is_recurrent = bool(gated_delta_modules(model))

    def predicting_hidden(self, tokens: PackedTokens) -> Tensor:
        """Return [N, E] the last hidden states before each response token; only these reach the output layer."""
        sequences: dict[str, Any] = {"packed_cu_seqlens": tokens.cu_seqlens}
        if self._is_compiled:  # which would compile once more for every tuple of starts
            starts, longest = device_cu_seqlens(tokens.cu_seqlens, tokens.input_ids.device)
            sequences = {"packed_starts": starts, "packed_longest": longest}
        if self._is_recurrent:
            sequences |= sequence_arguments(tokens.cu_seqlens, tokens.input_ids.device)
        outputs = self.model.base_model(
            input_ids=tokens.input_ids[None], position_ids=tokens.position_ids[None], use_cache=False, **sequences
        )
        return outputs.last_hidden_state[0].index_select(0, tokens.predicting_positions)

    def compile_layers(self) -> None:
        """Compile the forward pass of every layer at its first call, once for all lengths and layers of the same kind.

        It computes a layer's norms, rotary embedding and activation in few kernels and keeps two thirds of the memory for the backward
        pass. Inputs must be on CUDA, in half precision.
        """
        torch._dynamo.config.recompile_limit = COMPILED_KINDS
        for layer in self.layers:
            layer.forward = torch.compile(layer.forward, dynamic=True)
        self._is_compiled = True

    @property
    def layers(self) -> list[nn.Module]:
        """Return the decoder layers: the modules that transformers itself does not split over devices."""
        names = set(self.model._no_split_modules or ())
        return [module for module in self.model.modules() if type(module).__name__ in names]

    def release_gathered(self) -> None:
        """Drop weights gathered in passes without gradient, which become stale when the sharded ones are updated."""
        if isinstance(self, FSDPModule):
            self.reshard()


class Policy(PackedModel):
    """Policy that maps packed tokens to the log-probabilities of their response tokens."""

    def __init__(self, model: PreTrainedModel, *, temperature: float, chunk_tokens: int) -> None:
        super().__init__(model)
        self.temperature = temperature
        self.chunk_tokens = chunk_tokens

    def forward(self, tokens: PackedTokens) -> TokenLogprobs:
        """Return log-probabilities [N] of the response tokens, and entropies [N]."""
        hidden, head = self.predicting_hidden(tokens), output_head(self.model)
        return token_logprobs(hidden, head, tokens.targets, temperature=self.temperature, chunk_tokens=self.chunk_tokens)


def output_head(model: PreTrainedModel) -> OutputHead:
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise TrainerError(f"{type(model).__name__} has no linear output layer; the torch trainer cannot compute its log-probabilities")
    return OutputHead(head.weight, head.bias)


def load_model(directory: Path) -> PreTrainedModel:
    """Load the causal LM in `directory` in float32 on the CPU, with packed attention and without dropout.

    Raises:
        CheckpointError: files are missing, truncated, do not hold all weights of the model, or hold NaN.
        TrainerError: packed attention does not support the model's attention.
    """
    model, lacking = read_model(directory)
    require_whole(directory, lacking)
    return model


def read_model(directory: Path) -> tuple[PreTrainedModel, dict[str, str]]:
    """Load a model as `load_model` does, and return descriptions of missing weights, or ones of another shape, by name. These are random.

    Raises:
        CheckpointError: files are missing or truncated, or hold NaN.
        TrainerError: packed attention does not support the model's attention.
    """
    register()
    disable_progress_bar()
    verbosity = get_verbosity()
    set_verbosity_error()  # missing weights are returned, not logged
    try:
        config = read_config(directory)
        if has_vision_tower(config):
            raise TrainerError(f"cannot train {directory} ({config.model_type}): {LANGUAGE_MODEL_ALONE}")
        if unknown := unpackable_layers(config):
            raise TrainerError(
                f"{config.model_type}: layers of type {', '.join(unknown)} are not supported by the torch trainer's packed attention, "
                "which knows full_attention, sliding_attention and gated delta rules. Choose another model."
            )
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=torch.float32,
            attn_implementation=PACKED_ATTENTION,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            trust_remote_code=False,
        )
        model, info = loaded
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{directory}: cannot be loaded as a Hugging Face causal language model: {error}") from error
    finally:
        set_verbosity(verbosity)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    require_finite_weights(model.named_parameters(), directory)
    align_weights(model)
    take_stated_epsilon(model)
    speed_up_rms_norms(model)
    pack_gated_delta(model)
    return model.eval(), {key: key for key in info["missing_keys"]} | {key[0]: str(key) for key in info["mismatched_keys"]}


def require_whole(directory: Path, lacking: Mapping[str, str]) -> None:
    """Check that no weights are missing.

    Raises:
        CheckpointError: weights are missing.
    """
    if lacking:
        some = ", ".join(sorted(lacking.values())[:5])
        raise CheckpointError(f"{directory}: weights are missing or have a different shape than config.json says: {some}")


def can_compile(model: PreTrainedModel) -> bool:
    """Return whether layers can be compiled.

    Sizes of experts depend on the data, heads of latent attention differ, and gated delta rules run per sequence.
    """
    has_experts = any(name.endswith("experts") for name, _ in model.named_modules())
    return not has_experts and not gated_delta_modules(model) and getattr(model.config, "kv_lora_rank", None) is None


def enable_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Keep only the inputs of every layer and compute its activations again in the backward pass."""
    if not model.supports_gradient_checkpointing:
        raise TrainerError(f"{type(model).__name__} does not support --gradient-checkpointing; drop the flag")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()  # transformers checkpoints in training mode only; there is no dropout that this could switch on


@torch.no_grad()
def check_packed_forward(policy: Policy) -> None:
    """Compare log-probabilities of packed random tokens with the model's own forward pass, one sequence at a time.

    Raises:
        TrainerError: they differ, because packing does not reproduce a feature of the model's logits or attention.
    """
    model = policy.model
    sequences = _random_sequences(model.config)
    try:
        packed = Policy(model, temperature=1.0, chunk_tokens=policy.chunk_tokens)(_all_but_first_as_response(sequences)).logprobs
    except TrainerError:
        raise
    except Exception as error:
        raise TrainerError(f"{type(model).__name__} cannot run on packed tokens: {type(error).__name__}: {error}") from error
    model.set_attn_implementation("eager")
    try:
        whole = [model(input_ids=ids[None], use_cache=False).logits[0, :-1].float().log_softmax(-1) for ids in sequences]
        own = torch.cat([each.gather(1, ids[1:, None])[:, 0] for each, ids in zip(whole, sequences)])
    finally:
        model.set_attn_implementation(PACKED_ATTENTION)
    difference = (packed - own).abs().max().item()
    if not difference <= CHECK_TOLERANCE:
        raise TrainerError(
            f"{type(model).__name__} ({model.config.model_type}): log-probabilities of packed sequences differ by {difference:.2g} from "
            "the model's own forward pass. Its attention or its logits have a feature that the torch trainer does not support "
            "(state carried along the sequence, logit scaling or soft-capping, ...). Choose another model."
        )
    logger.debug("%s: packed forward checked, largest difference %.2g", type(model).__name__, difference)


def _random_sequences(config) -> list[Tensor]:
    """Return a few short sequences, and one longer than the sliding window if that is short."""
    window = getattr(config, "sliding_window", None)
    lengths = (*CHECK_LENGTHS, window + 3) if isinstance(window, int) and window <= 512 else CHECK_LENGTHS
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, config.vocab_size, (length,), generator=generator) for length in lengths]


def _all_but_first_as_response(sequences: list[Tensor]) -> PackedTokens:
    starts = [0, *accumulate(len(ids) for ids in sequences)]
    return PackedTokens(
        input_ids=torch.cat(sequences),
        position_ids=torch.cat([torch.arange(len(ids)) for ids in sequences]),
        cu_seqlens=tuple(starts),
        predicting_positions=torch.cat([torch.arange(len(ids) - 1) + start for ids, start in zip(sequences, starts)]),
        targets=torch.cat([ids[1:] for ids in sequences]),
        response_lengths=tuple(len(ids) - 1 for ids in sequences),
    )
