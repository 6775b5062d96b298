"""SGLang's classes of newer families take weights under the names that the trainer sends; where a CPU can compute them, scores agree.

Without AMX, SGLang 0.5.15.post1 computes of these only Gemma on a CPU: it has no kernels there for sinks, Gated DeltaNet, latent and
sparse attention, and norms over all heads. tests/gpu/test_families_sglang_cuda.py compares scores of all.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fuligo.engines.host import PortClaims
from fuligo.formats.checkpoint_files import checkpoint_weights
from fuligo.models.registry import experts_in
from fuligo.models.transformers_types import model_class, read_config
from fuligo.trainer.torch_backend.weights import named_weights
from tests import tiny, tiny_vision
from tests.served_families import (
    DEEPSEEK_KEYS,
    GEMMA_PROCESSOR,
    GPT_OSS_KEYS,
    MINIMAX_KEYS,
    QWEN3_5_IN_FLOAT32,
    QWEN_PROCESSOR,
    ServedFamily,
    compare,
)
from tests.sglang import oracle
from tests.sglang.engines import ENVIRONMENT, run_program, server_settings

SMALL = {
    "vocab_size": 400,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
CLASSES = {
    "gemma4": "Gemma4ForConditionalGeneration",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_next": "Qwen3NextForCausalLM",
}
PADDED_HEADS = {"linear_num_key_heads_cpu": 2, "linear_num_value_heads_cpu": 4}
"""Keys that SGLang itself adds when it pads heads on a CPU with AMX."""
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [],
}
UNSET = {
    "gemma4": [f"language_model.layers.{layer}.self_attn.{name}.weight" for layer in (3, 4) for name in ("qkv_proj", "k_norm")],
}
"""Parameters of layers that take the keys of earlier ones: they compute none, and checkpoints of transformers have no weights for them."""
KEEPS = ("gemma4", "gpt_oss")
"""Families whose class keeps tensors of earlier buckets, and therefore gets a stream by several calls: gpt-oss sorts all, and Gemma 4 has a
variable for the last experts."""
SERVED = {
    "deepseek_v32": DEEPSEEK_KEYS,
    "gpt_oss": GPT_OSS_KEYS,
    "kimi_k2": DEEPSEEK_KEYS,
    "minimax_m2": {**MINIMAX_KEYS, "rotary_dim": 8},
    "qwen3_5": {"full_attention_interval": 2, **PADDED_HEADS},
    "qwen3_5_moe": {"full_attention_interval": 2, **PADDED_HEADS},
    "qwen3_next": {"full_attention_interval": 2, **PADDED_HEADS},
}


def tiny_family(name: str) -> ServedFamily:
    rope = {"rope_parameters": YARN} if SERVED.get(name) is DEEPSEEK_KEYS else {}  # on a CPU, SGLang's class insists on a scaling
    shape, given = {**SMALL, **tiny.FAMILIES.get(name, {}), **rope}, {}
    if name in tiny_vision.LANGUAGE:
        shape, given = (
            {**SMALL, **tiny.FAMILIES[f"{name}_text"]},
            {"whole": {"vision_config": VISION}, "in_float32": QWEN3_5_IN_FLOAT32, "processor": QWEN_PROCESSOR},
        )
    elif name == "gemma4":
        whole: Any = tiny_vision.gemma4_config()
        config = whole.to_dict()
        shape = config.pop("text_config")
        parts = {key: value for key, value in config.items() if key.endswith(("_config", "_token_id", "_token_index"))}
        given = {"whole": parts, "processor": GEMMA_PROCESSOR}
    return ServedFamily(shape, served=SERVED.get(name, {}), lengths=(130, 40, 90), prompt_length=30, **given)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """Send each family's weights to SGLang's class, in one process; return SGLang's reports."""
    directory = tmp_path_factory.mktemp("families")
    for name in CLASSES:
        checkpoint = tiny_family(name).save(directory / name, name, device="cpu", dtype=torch.bfloat16)
        model = model_class(read_config(checkpoint)).from_pretrained(checkpoint, dtype=torch.bfloat16)
        sent = checkpoint_weights(named_weights(model), experts_in(checkpoint))
        (checkpoint / "sent").mkdir()
        save_file({name: tensor.clone() for name, tensor in sent}, checkpoint / "sent" / "model.safetensors")
    lines = run_program("sent_loader", *(directory / name for name in CLASSES))
    return dict(zip(CLASSES, (json.loads(line) for line in lines if line.startswith("{")), strict=True))


@pytest.mark.parametrize("name", CLASSES)
def test_sglangs_class_takes_all_weights(name: str, loaded: dict[str, dict]) -> None:
    num_calls = loaded[name].pop("num_calls")
    assert loaded[name] == {"class": CLASSES[name], "unset": UNSET.get(name, [])}
    assert (num_calls > 1) == (name in KEEPS)


def computable(name: str) -> ServedFamily:
    """Return a family that SGLang computes on a CPU.

    For Gemma 4 it has only an attention of Triton kernels, which Triton's interpreter runs, slowly; no kernel of experts with its
    activation; and its kernel of soft-capping is beyond the interpreter. A decode step sees one token less than the window
    (SGLang 0.5.15.post1, `update_sliding_window_buffer`), so windows are longer than the sequences.
    """
    family = tiny_family(name)
    if name != "gemma4":
        return family
    shape = {**family.shape, "enable_moe_block": False, "final_logit_softcapping": None, "sliding_window": 512}
    short: dict[str, Any] = {"lengths": (40, 30), "prompt_length": 10, "num_new_tokens": 6}
    interpreted: dict[str, Any] = {"environment": {"TRITON_INTERPRET": "1"}, "arguments": {"attention_backend": "triton"}}
    return replace(family, shape=shape, **short, **interpreted)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3_text", "gemma4"])
async def test_scores_are_the_trainers_before_and_after_a_sync(name: str, claims: PortClaims, tmp_path: Path) -> None:
    family = computable(name)
    checkpoint = family.save(tmp_path / "model", name, device="cpu", dtype=torch.float32)
    arguments, environment = {"max_total_tokens": 8192, **family.arguments}, {**ENVIRONMENT, **family.environment}
    settings = server_settings("engine", checkpoint, claims, tmp_path / "engine.txt", arguments=arguments, environment=environment)
    found = await compare(family, settings, counts_tensors=False)
    for scores in (found.loaded, found.synced):
        assert scores.prefill < oracle.TOLERANCE and scores.decode < oracle.TOLERANCE, str(scores)
    assert found.moved > 0.1, "or old weights would pass"
