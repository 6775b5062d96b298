"""Random trainer options and the verdict of Megatron-Core's own config on them.

`megatron_verdicts.json` was recorded with Megatron-Core 0.16.1; to record it again, with a Python that has it:

    PYTHONPATH=. python -m tests.unit.planner.rules.megatron_cases > tests/unit/planner/rules/megatron_verdicts.json
"""

import json
import random
import warnings
from dataclasses import asdict, dataclass

NUM_CASES = 400


@dataclass(frozen=True, slots=True)
class Case:
    """Options of a dense model with 40 layers (GLM4-9B), or of an MoE model with 47 layers and latent attention (GLM-4.7-Flash)."""

    is_mixture: bool
    tensor_model_parallel_size: int
    sequence_parallel: bool
    pipeline_model_parallel_size: int
    virtual_pipeline_model_parallel_size: int | None
    decoder_first_pipeline_num_layers: int | None
    decoder_last_pipeline_num_layers: int | None
    account_for_embedding_in_pipeline_split: bool
    account_for_loss_in_pipeline_split: bool
    recompute_granularity: str | None
    recompute_method: str | None
    recompute_num_layers: int | None
    recompute_modules: tuple[str, ...]
    expert_model_parallel_size: int
    moe_token_dispatcher_type: str
    moe_enable_deepep: bool
    moe_shared_expert_overlap: bool
    overlap_moe_expert_parallel_comm: bool
    moe_grouped_gemm: bool


def cases() -> list[Case]:
    """Return the cases, equal at every call; about half are valid but for one or two options."""
    draw = random.Random(7)
    return [_case(draw) for _ in range(NUM_CASES)]


def _case(draw: random.Random) -> Case:
    mixture = draw.random() < 0.5
    tp = draw.choice([1, 1, 2, 4, 4, 3, 8] if mixture else [1, 2, 4, 8, 3])
    pp = draw.choice([1, 1, 1, 2, 2, 4, 5])
    cut = draw.choice([(None, None), (None, None), (23, None), (None, 23), (10, 10), (11, 12), (20, 20)]) if pp > 1 else (None, None)
    full = draw.choice([("full", "uniform", 1), ("full", "block", 2), ("full", "uniform", 1), ("full", None, None), (None, None, None)])
    granularity, method, number = draw.choice([full, full, ("selective", None, None)])
    modules = [("core_attn",), ("layernorm", "mlp"), ("moe_act",), ("mla_up_proj",), ("attention",)]
    return Case(
        is_mixture=mixture,
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=draw.choice([None, None, None, 2, 4]) if pp > 1 else None,
        decoder_first_pipeline_num_layers=cut[0],
        decoder_last_pipeline_num_layers=cut[1],
        account_for_embedding_in_pipeline_split=pp > 1 and draw.random() < 0.15,
        account_for_loss_in_pipeline_split=pp > 1 and draw.random() < 0.15,
        recompute_granularity=granularity,
        recompute_method=method,
        recompute_num_layers=number,
        recompute_modules=draw.choice(modules) if granularity == "selective" else (),
        expert_model_parallel_size=draw.choice([2, 4, 8]) if mixture else draw.choice([1, 1, 1, 1, 2]),
        moe_token_dispatcher_type=draw.choice(["alltoall", "flex", "flex"]) if mixture else "allgather",
        moe_enable_deepep=mixture and draw.random() < 0.3,
        moe_shared_expert_overlap=mixture and draw.random() < 0.15,
        overlap_moe_expert_parallel_comm=mixture and draw.random() < 0.15,
        moe_grouped_gemm=mixture and draw.random() < 0.5,
    )


def _is_refused(case: Case) -> bool:
    """Return whether Megatron-Core's config raises."""
    import torch
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )

    options = asdict(case)
    mixture = options.pop("is_mixture")
    options["num_layers_in_first_pipeline_stage"] = options.pop("decoder_first_pipeline_num_layers")
    options["num_layers_in_last_pipeline_stage"] = options.pop("decoder_last_pipeline_num_layers")
    options["recompute_modules"] = list(options["recompute_modules"]) or None
    common = {
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "bf16": True,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "bias_activation_fusion": False,
        "apply_rope_fusion": False,
    }
    try:
        if mixture:
            shape = {"num_layers": 47, "hidden_size": 2048, "num_attention_heads": 20, "ffn_hidden_size": 10240}
            experts = {
                "num_moe_experts": 64,
                "moe_ffn_hidden_size": 1536,
                "moe_router_topk": 4,
                "moe_shared_expert_intermediate_size": 1536,
            }
            MLATransformerConfig(**options, **common, **shape, **experts, expert_tensor_parallel_size=1)
        else:
            shape = {"num_layers": 40, "hidden_size": 4096, "num_attention_heads": 32, "num_query_groups": 2, "ffn_hidden_size": 13696}
            TransformerConfig(**options, **common, **shape)
    except (ValueError, AssertionError):
        return True
    return False


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps([_is_refused(case) for case in cases()]))
