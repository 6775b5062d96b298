"""Hugging Face causal LM over packed tokens. Models whose results packing would change are refused."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.logging import disable_progress_bar, get_verbosity, set_verbosity, set_verbosity_error

from fuligo.errors import CheckpointError, TrainerError
from fuligo.models.attention import unpackable_layers, varlen_row
from fuligo.models.cpu_products import speed_up_linear_layers
from fuligo.models.gated_delta import gated_delta_modules, pack_gated_delta, sequence_arguments
from fuligo.models.invariant_modules import InvariantModel
from fuligo.models.modules import align_weights, speed_up_rms_norms, take_stated_epsilon, take_stated_rotation
from fuligo.models.mtp import add_mtp_module, mtp_module
from fuligo.models.registry import REFUSED, batch_variant_because
from fuligo.models.transformers_types import (
    LANGUAGE_MODEL_ALONE,
    attention_choice,
    has_unknown_tower,
    language_model,
    loading_options,
    model_class,
    read_config,
    take_dtype,
    text_config,
)
from fuligo.models.tree_attention import tree_row
from fuligo.models.vision.forward import VisionTower
from fuligo.models.vision.processor import ImageProcessor
from fuligo.trainer.batch import PackedTokens, pack_tokens
from fuligo.trainer.logprobs import TokenLogprobs
from fuligo.trainer.mtp import LaterTokens
from fuligo.trainer.parameters import require_finite_weights
from fuligo.trainer.torch_backend.compiled_layers import compile_layers, varying
from fuligo.trainer.torch_backend.logprobs import OutputHead, token_logprobs
from fuligo.trainer.torch_backend.packed_attention import PACKED_ATTENTION, register
from fuligo.types import IntArray, TrainSample

logger = logging.getLogger(__name__)

CHECK_LENGTHS = (5, 9)
"""Lengths of the random sequences in `check_packed_forward`, in tokens."""
CHECK_TOLERANCE = 2e-3
"""Largest accepted difference in nats. Two attention implementations differ by 1e-5 to 1e-4 in float32; a wrong mask or a missing logit
scale causes 0.1 or more."""


class PackedModel(nn.Module):
    """Causal LM that runs on packed tokens.

    Args:
        images: image processor of a model with a vision tower; None if no prompt has images.
    """

    def __init__(self, model: PreTrainedModel, images: ImageProcessor | None = None) -> None:
        super().__init__()
        self.model = model
        self.vision = None if images is None else VisionTower(model.base_model, images)
        self.is_compiled = False
        self.is_recurrent = bool(gated_delta_modules(model))
        self.is_batch_invariant = False

    def predicting_hidden(self, tokens: PackedTokens) -> Tensor:
        """Return the [N, E] last-layer hidden states that predict the response tokens, the only ones that the output layer needs."""
        return self.hidden_states(tokens)[0].index_select(0, tokens.predicting_positions)

    def hidden_states(self, tokens: PackedTokens) -> Tensor:
        """Return the [1, T, E] last-layer hidden states of the row."""
        sequences = self._sequences(tokens)
        if self.vision is not None:
            return self.vision.hidden_states(tokens.input_ids, tokens.position_ids, tokens.images, **sequences)
        ids, positions = tokens.input_ids[None], tokens.position_ids[None]
        language = language_model(self.model)
        return language(input_ids=ids, position_ids=positions, use_cache=False, **sequences).last_hidden_state

    def _sequences(self, tokens: PackedTokens) -> dict[str, Any]:
        """Return the arguments of the model's forward that tell its layers which tokens belong to the same sequence."""
        device = tokens.input_ids.device
        if tokens.tree is not None:
            assert not self.is_recurrent, "layers with a recurrent state do not support shared prefixes"
            tree = varying(tree_row(tokens.tree, device)) if self.is_compiled else tokens.tree
            return {"packed_tree": tree, "packed_invariantly": self.is_batch_invariant}
        sequences: dict[str, Any] = {"packed_cu_seqlens": tokens.cu_seqlens}
        if self.is_compiled:  # tensors, because the compiler would compile again for every tuple of starts
            sequences = {"packed_row": varying(varlen_row(tokens.cu_seqlens, device))}
        if self.is_batch_invariant:
            sequences["packed_invariantly"] = True
        if self.is_recurrent:
            sequences |= sequence_arguments(tokens.cu_seqlens, device)
        return sequences

    def make_batch_invariant(self, device: str, *, ranks: int = 1) -> None:
        """Make a token's outputs bitwise independent of the other sequences in the row, on devices of type `device`.

        With several `ranks`, the rounding of an engine's tensor-parallel GPUs is reproduced. Raises TrainerError if there are no
        batch-invariant operations for the model's layers, or for this GPU.
        """
        because = batch_variant_because(self.model.config.to_dict(), device)
        if device == "cuda" and torch.cuda.get_device_capability() < (9, 0):
            because = f"its kernels need a GPU of the Hopper generation or later, not {torch.cuda.get_device_name()}"
        if because is not None:
            raise TrainerError(f"cannot train with --exact-on-policy: {because}; drop --exact-on-policy")
        InvariantModel(self.model, ranks=ranks)
        self.is_batch_invariant = True

    def compile_layers(self) -> None:
        """Compile the forward pass of every layer at its first call, once for all lengths and layers of the same kind.

        Compiled layers fuse norms, rotary embedding and activation into few kernels, and keep a third less memory for the backward pass.
        Inputs must be on CUDA and in half precision.
        """
        compile_layers(self.layers)
        self.is_compiled = True

    @property
    def layers(self) -> list[nn.Module]:
        """Decoder layers: the modules that transformers does not split over devices (`_no_split_modules`)."""
        names = set(self.model._no_split_modules or ())
        return [module for module in self.model.modules() if type(module).__name__ in names]

    def release_gathered(self) -> None:
        """Free the weights gathered in passes without gradient, which are stale once the sharded weights are updated."""
        if isinstance(self, FSDPModule):
            self.reshard()


class Policy(PackedModel):
    """Policy that maps packed tokens to the log-probabilities of their response tokens."""

    def __init__(self, model: PreTrainedModel, *, temperature: float, chunk_tokens: int, images: ImageProcessor | None = None) -> None:
        super().__init__(model, images)
        self.temperature = temperature
        self.chunk_tokens = chunk_tokens

    def forward(self, tokens: PackedTokens) -> TokenLogprobs:
        return self._of_responses(self.hidden_states(tokens), tokens)

    def with_mtp(self, tokens: PackedTokens, later: LaterTokens, *, is_joint: bool) -> tuple[TokenLogprobs, Tensor]:
        """Return the result of `forward`, and the MTP layer's [m] log-probabilities of the tokens `later.local_ids`.

        `is_joint`: as in `MTPTraining`.
        """
        hidden, head = self.hidden_states(tokens), output_head(self.model)
        outputs = self._of_responses(hidden, tokens)
        if not is_joint:
            hidden, head = hidden.detach(), head.detached()
        further = self._predicted(hidden, tokens, later, is_joint=is_joint).index_select(0, later.local_rows)
        targets = tokens.targets[later.local_ids]
        return outputs, token_logprobs(further, head, targets, temperature=1.0, chunk_tokens=self.chunk_tokens).logprobs

    def _of_responses(self, hidden: Tensor, tokens: PackedTokens) -> TokenLogprobs:
        """Return the [N] log-probabilities and entropies of the response tokens from the row's hidden states [1, T, E]."""
        return token_logprobs(
            hidden[0].index_select(0, tokens.predicting_positions),
            output_head(self.model),
            tokens.targets,
            temperature=self.temperature,
            chunk_tokens=self.chunk_tokens,
            is_batch_invariant=self.is_batch_invariant,
        )

    def _predicted(self, hidden: Tensor, tokens: PackedTokens, later: LaterTokens, *, is_joint: bool) -> Tensor:
        """Return the MTP layer's hidden states [T, E]."""
        module, language = mtp_module(self.model), language_model(self.model)
        assert module is not None and tokens.images is None, "configurations without an MTP layer or with images are refused at the start"
        embedded = language.embed_tokens(later.input_ids)
        if not is_joint:
            embedded = embedded.detach()
        rotary = language.rotary_emb(hidden, tokens.position_ids[None])
        return module(hidden, embedded, position_embeddings=rotary, **self._sequences(tokens))[0]


def output_head(model: PreTrainedModel) -> OutputHead:
    """Return the output layer of a model. Raises TrainerError if it has no linear output layer."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise TrainerError(
            f"cannot compute the log-probabilities of {type(model).__name__}: it has no linear output layer; choose another model"
        )
    return OutputHead(head.weight, head.bias, getattr(text_config(model.config), "final_logit_softcapping", None))


def load_model(directory: Path, *, has_mtp: bool = False) -> PreTrainedModel:
    """Load a causal LM, with its MTP layer if `has_mtp`, in float32 on the CPU, with packed attention and without dropout.

    Raises CheckpointError if files are missing or truncated, lack weights of the model, or contain NaN or infinities, and TrainerError if
    the torch trainer does not support the model.
    """
    model, lacking = read_model(directory, has_mtp=has_mtp)
    require_whole(directory, lacking)
    return model


def read_model(directory: Path, *, has_mtp: bool = False) -> tuple[PreTrainedModel, dict[str, str]]:
    """Load a model like `load_model`, but with random weights where they are missing or have another shape.

    Return the model, and a description of each such weight by name.
    """
    register()
    disable_progress_bar()
    verbosity = get_verbosity()
    set_verbosity_error()  # missing weights are returned, not logged
    try:
        config = read_config(directory)
        if has_unknown_tower(config):
            raise TrainerError(f"cannot train {directory} ({config.model_type}): {LANGUAGE_MODEL_ALONE}")
        if (reason := REFUSED.get(config.model_type)) is not None:
            raise TrainerError(f"cannot train {directory} ({config.model_type}): {reason}; choose another model")
        if unknown := unpackable_layers(text_config(config)):
            raise TrainerError(
                f"cannot train {directory} ({config.model_type}): packed attention does not support its layers of type "
                f"{', '.join(unknown)}, only full_attention, sliding_attention and Gated DeltaNet layers; choose another model"
            )
        loaded: Any = model_class(config).from_pretrained(
            directory,
            dtype=torch.float32,
            attn_implementation=attention_choice(config, PACKED_ATTENTION),
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            trust_remote_code=False,
            **loading_options(config),
        )
        model, info = loaded
        take_dtype(model, config, torch.float32)
        if has_mtp:
            add_mtp_module(model, directory)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot load {directory} as a Hugging Face causal language model: {str(error).rstrip('.')}; use a complete directory of a "
            "model that transformers supports"
        ) from error
    finally:
        set_verbosity(verbosity)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    require_finite_weights(model.named_parameters(), directory)
    align_weights(model)
    take_stated_epsilon(model)
    take_stated_rotation(model)
    speed_up_rms_norms(model)
    speed_up_linear_layers(model)
    pack_gated_delta(model)
    return model.eval(), {key: key for key in info["missing_keys"]} | {key[0]: str(key) for key in info["mismatched_keys"]}


def require_whole(directory: Path, lacking: Mapping[str, str]) -> None:
    """Raise CheckpointError, naming up to five, if weights are missing or have another shape, as `read_model` reports in `lacking`."""
    if lacking:
        some = ", ".join(sorted(lacking.values())[:5])
        raise CheckpointError(
            f"cannot load {directory}: weights are missing or their shape does not match config.json ({some}); copy or convert it again"
        )


def enable_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Keep only the inputs of every layer and recompute its activations in the backward pass. Raises TrainerError if unsupported."""
    if not model.supports_gradient_checkpointing:
        raise TrainerError(
            f"cannot use --gradient-checkpointing with {type(model).__name__}: transformers does not support it there; drop the flag"
        )
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()  # transformers checkpoints in training mode only; dropout is already 0


@torch.no_grad()
def check_packed_forward(policy: Policy, *, shares_prefixes: bool = False) -> None:
    """Compare log-probabilities of packed random sequences with the original forward pass of the model on each sequence.

    With `shares_prefixes`, the sequences begin with the same tokens, which the row stores once. Raises TrainerError if log-probabilities
    differ, because packing does not reproduce a feature of the model's logits or attention.
    """
    model = policy.model
    sequences = _random_sequences(model.config)
    shared = [0] * len(sequences)
    if shares_prefixes:
        prefix = sequences[0][:-1]
        sequences = [torch.cat([prefix, ids]) for ids in sequences]
        shared = [0, *[len(prefix)] * (len(sequences) - 1)]
    try:
        images = None if policy.vision is None else policy.vision.processor
        checked = Policy(model, temperature=1.0, chunk_tokens=policy.chunk_tokens, images=images)
        checked.is_batch_invariant = policy.is_batch_invariant
        samples = [unscored_sample(ids.int().numpy(), 1) for ids in sequences]
        packed = checked(pack_tokens(samples, torch.device("cpu"), shared=shared)).logprobs
    except TrainerError:
        raise
    except Exception as error:
        raise TrainerError(
            f"cannot run {type(model).__name__} on packed tokens: {type(error).__name__}: {error}; choose another model"
        ) from error
    model.set_attn_implementation("eager")
    try:
        whole = [model(input_ids=ids[None], use_cache=False).logits[0, :-1].float().log_softmax(-1) for ids in sequences]
        own = torch.cat([each.gather(1, ids[1:, None])[:, 0] for each, ids in zip(whole, sequences)])
    finally:
        model.set_attn_implementation(attention_choice(model.config, PACKED_ATTENTION))
    difference = (packed - own).abs().max().item()
    if not difference <= CHECK_TOLERANCE:
        raise TrainerError(
            f"cannot train {type(model).__name__} ({model.config.model_type}): log-probabilities of packed sequences differ by "
            f"{difference:.2g} from its forward pass in transformers, because its attention or logits have a feature that the torch "
            "trainer does not support (such as logit scaling or soft-capped attention scores); choose another model"
        )
    logger.debug("%s: packed forward checked, largest difference %.2g", type(model).__name__, difference)


def _random_sequences(config) -> list[Tensor]:
    """Return a few short sequences, and one longer than the sliding window if the window is at most 512 tokens."""
    config = text_config(config)
    window = getattr(config, "sliding_window", None)
    lengths = (*CHECK_LENGTHS, window + 3) if isinstance(window, int) and window <= 512 else CHECK_LENGTHS
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, config.vocab_size, (length,), generator=generator) for length in lengths]


def unscored_sample(tokens: IntArray, prompt_length: int) -> TrainSample:
    """Return a sample for a forward pass, in which only the tokens matter; rewards and log-probabilities are 0."""
    length = len(tokens) - prompt_length
    return TrainSample(
        index=0,
        group_index=0,
        tokens=tokens,
        prompt_length=prompt_length,
        loss_mask=np.ones(length, np.int8),
        reward=0.0,
        engine_logprobs=np.zeros(length, np.float32),
        versions=np.zeros(length, np.int32),
        mask_sum=float(length),
    )
