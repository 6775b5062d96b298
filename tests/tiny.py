"""Tiny checkpoints for tests: real transformers models with random weights, and a small byte-level BPE tokenizer."""

import functools
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from fuligo.models.transformers_types import LOADED_AS, register_types

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ["<pad>", "<bos>", "<eos>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2

_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
FAMILIES: dict[str, dict] = {
    "qwen3": {"head_dim": 16},
    "qwen2": {},
    "llama": {},
    "mistral": {"head_dim": 16, "sliding_window": None},
    "glm4": {"head_dim": 16},
    "qwen3_moe": {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True},
    "glm4_moe": {
        "head_dim": 16,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
    },
    "glm4_moe_lite": {
        **_LATENT,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "routed_scaling_factor": 1.5,
    },
    "deepseek_v3": {
        **_LATENT,
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 32,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
    },
    "deepseek_v32": {
        **_LATENT,
        "n_routed_experts": 8,
        "num_experts": 8,  # transformers 5.12.1 builds this many
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 32,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
        "index_n_heads": 8,
        "index_head_dim": 16,
        "index_topk": 6,
    },
    "kimi_k2": {
        **_LATENT,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "routed_scaling_factor": 2.8,
        "first_k_dense_replace": 1,
    },
    "minimax_m2": {"head_dim": 16, "intermediate_size": 32, "num_local_experts": 8, "num_experts_per_tok": 3},
    "qwen3_next": {
        **_LINEAR,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
    },
    "qwen3_5_text": {**_LINEAR, "head_dim": 16},
    "qwen3_5_moe_text": {
        **_LINEAR,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
    },
    "gemma3_text": {"head_dim": 16, "sliding_window": 24},
    "gpt_oss": {
        "head_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "sliding_window": 8,
        "rope_parameters": {  # as published, over a shorter context
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
        },
    },
    "glm_moe_dsa": {
        **_LATENT,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
        "index_n_heads": 8,
        "index_head_dim": 16,
        "index_topk": 6,
        "rms_norm_eps": 1e-6,  # transformers hard-codes it for the norms of latents
    },
}

GEMMA4: dict = {
    "layers": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 8,
    "head_dim": 16,
    "global_head_dim": 24,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 400,
    "final_logit_softcapping": 2.0,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 32,
}
"""Shape of a tiny `gemma4_text` with all that published ones have; no published model has all of it."""


@functools.cache
def tokenizer(vocab_size: int = 400) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with a chat template. Each digit is a token; the end of text is `<eos>`."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tok.decoder = decoders.ByteLevel()
    words = ["what is the sum of these numbers answer number apples how many are left together each price cost step carry"] * 50
    tok.train_from_iterator(
        words,
        trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=SPECIAL_TOKENS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tok, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", chat_template=CHAT_TEMPLATE
    )


def model_config(family: str = "qwen3", *, hidden: int = 64, layers: int = 2, vocab_size: int = 400, **overrides: object) -> AutoConfig:
    shape = {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "pad_token_id": PAD_ID,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "initializer_range": 0.1,
    }
    register_types()
    return AutoConfig.for_model(family, **{**shape, **FAMILIES.get(family, {}), **overrides})


def model(family: str = "qwen3", *, seed: int = 0, **overrides: object) -> torch.nn.Module:
    """Return a float32 causal LM with random weights."""
    torch.manual_seed(seed)
    lm = AutoModelForCausalLM.from_config(model_config(family, **overrides)).float().eval()
    spread(lm)
    return lm


@torch.no_grad()
def spread(lm: torch.nn.Module) -> None:
    """Give parameters that begin as constants, and states, values that matter and differ."""
    is_gemma4 = getattr(lm.config, "model_type", None) in ("gemma4", "gemma4_text")
    for name, parameter in lm.named_parameters():
        if name.endswith("A_log"):  # so that states of linear attention outlast a few tokens
            torch.nn.init.uniform_(parameter, -5.0, -1.0)
        elif name.endswith((".sinks", "proj_bias", "per_expert_scale")):
            torch.nn.init.uniform_(parameter, -1.0, 2.0)
        elif is_gemma4 and name.endswith("q_norm.weight"):  # it scales no scores, which would else be up to the head's size
            torch.nn.init.constant_(parameter, 0.25)
    for name, buffer in lm.named_buffers():
        if name.endswith("layer_scalar"):  # Gemma 4
            torch.nn.init.uniform_(buffer, 0.5, 1.0)
        elif name.endswith(("_min", "_max")):  # bounds of its towers' activations, which begin as infinity
            torch.nn.init.constant_(buffer, -64.0 if name.endswith("_min") else 64.0)


def save_checkpoint(directory: Path, family: str = "qwen3", *, seed: int = 0, **overrides: object) -> Path:
    """Save a Hugging Face directory with the model and the tokenizer; return `directory`."""
    lm = model(family, seed=seed, **overrides)
    save_as_published(lm, directory, family)
    tokenizer().save_pretrained(directory)
    return directory


def save_as_published(lm: torch.nn.Module, directory: Path, family: str) -> None:
    """Save the model under the family's own type, where transformers writes the one that it knows."""
    lm.save_pretrained(directory)
    if family in LOADED_AS:
        config = directory / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": family}))


def save_value_model(directory: Path, family: str = "qwen3", *, seed: int = 0, **overrides: object) -> Path:
    """Save a Hugging Face directory with a value model (an output layer of one random row); return `directory`."""
    lm = model(family, seed=seed, **overrides)
    hidden = lm.config.hidden_size
    lm.set_output_embeddings(torch.nn.Linear(hidden, 1, bias=False))
    lm.config.tie_word_embeddings = False
    lm.save_pretrained(directory)
    return directory
