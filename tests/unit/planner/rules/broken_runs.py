"""Recipes with one mistake: for each rule of the planner at least one run that violates it and nothing else."""

import functools

from fuligo.config.findings import Change, Finding
from fuligo.models.architecture import Layer
from fuligo.models.parts import mtp_layer
from fuligo.planner.check import check
from fuligo.planner.subject import Subject
from tests.unit.planner.rules.recipe_runs import (
    DENSE,
    DRAFTS,
    EXACT_ON_TWO,
    FP8,
    FP8_WHOLE,
    LARGE,
    MIXTURE,
    ON_CPU,
    REDUNDANT,
    SEPARATE,
    SPARSE,
    TOWER,
    TOWERS,
    Run,
    group,
)

BROKEN: dict[str, tuple[Run, ...]] = {
    "PLAN-MODEL-ARGS": (
        Run(DENSE, "--rotary-base 500000"),
        Run(DENSE, "--num-layers 46"),
        Run(DENSE, "--num-experts 8"),
        Run(DENSE, "--qk-layernorm"),
    ),
    "PLAN-QUANTIZED-WEIGHTS": (
        Run(FP8, changes=(Change(("checkpoint", "ref_load"), None),)),
        Run(FP8, changes=(Change(("checkpoint", "ref_load"), None), Change(("checkpoint", "load"), None))),
    ),
    "PLAN-MXFP4-ENGINES": (Run(DENSE, engine_model={"is_mxfp4": True}),),
    "PLAN-QUANTIZED-ENGINES": (
        Run(DENSE, quantization={"quant_method": "compressed-tensors", "format": "pack-quantized"}),
        Run(DENSE, quantization={"quant_method": "fp8"}),
    ),
    "PLAN-HARMONY-REWARD": (Run("gpt-oss-20b/config.yaml", "--rm-type deepscaler"),),
    "PLAN-PREFIX-MODEL": (
        Run(SPARSE, "--share-prefixes on"),
        Run(ON_CPU, "--share-prefixes on", teacher="qwen3-next-80b/model"),
    ),
    "PLAN-EXACT-MODEL": (
        Run(ON_CPU, "--exact-on-policy", config_json={"model_type": "glm4_moe"}),
        Run(ON_CPU, "--exact-on-policy", quantization={"quant_method": "fp8", "weight_block_size": [128, 128]}),
        Run(ON_CPU, EXACT_ON_TWO, config_json={"model_type": "qwen3_moe", "mlp_only_layers": [0]}),
    ),
    "PLAN-EXACT-WIDTHS": (
        Run(ON_CPU, EXACT_ON_TWO, engine_model={"intermediate_size": 200}),
        Run(ON_CPU, EXACT_ON_TWO, engine_model={"attention.head_dim": 6}),
    ),
    "PLAN-STOP-TOKEN": (
        Run(DENSE, "--rollout-stop-token-ids 151552"),
        Run(DENSE, "--rollout-stop-token-ids 7 151551 151552 999999"),
    ),
    "PLAN-ENV-ALLOCATOR": (
        Run(DENSE, """--env '{"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}'"""),
        Run(DENSE, """--env '{"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128,expandable_segments:True"}'"""),
    ),
    "PLAN-ENV-CONNECTIONS": (Run(DENSE, """--env '{"CUDA_DEVICE_MAX_CONNECTIONS": "8"}'"""),),
    "PLAN-TRAINER-GPUS": (
        Run(DENSE, "--context-parallel-size 3"),
        Run(DENSE, "--tensor-model-parallel-size 16"),
        Run(DENSE, "--actor-num-gpus-per-node 6"),
        Run(LARGE, "--context-parallel-size 3"),
    ),
    "PLAN-EXPERT-GPUS": (Run(MIXTURE, "--expert-model-parallel-size 16"), Run(LARGE, "--expert-tensor-parallel-size 2")),
    "PLAN-TP-HEADS": (Run(MIXTURE, "--tensor-model-parallel-size 8 --sequence-parallel"),),
    "PLAN-TP-KV-HEADS": (Run(DENSE, trainer_model={"attention.num_kv_heads": 3}),),
    "PLAN-TP-MLP": (Run(DENSE, trainer_model={"intermediate_size": 13697}),),
    "PLAN-SP-WITHOUT-TP": (Run(DENSE, "--tensor-model-parallel-size 1"), Run(MIXTURE, "--sequence-parallel")),
    "PLAN-MOE-SEQUENCE-PARALLEL": (Run(LARGE, "--no-sequence-parallel"), Run(MIXTURE, "--tensor-model-parallel-size 4")),
    "PLAN-TP-NODES": (
        Run(DENSE, "--actor-num-nodes 2 --tensor-model-parallel-size 16 --context-parallel-size 1 --max-tokens-per-gpu 9216"),
    ),
    "PLAN-UNEVEN-BATCH": (Run(REDUNDANT, "--num-steps-per-rollout 3"),),
    "PLAN-PP-LAYOUT": (Run(DENSE, "--pipeline-model-parallel-layout Et*20|t*20L --pipeline-model-parallel-size 2"),),
    "PLAN-PP-ACCOUNTING": (
        Run(DENSE, "--pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 20 --account-for-loss-in-pipeline-split"),
    ),
    "PLAN-PP-LAYERS": (
        Run(MIXTURE, "--pipeline-model-parallel-size 2 --expert-model-parallel-size 4"),
        Run(DENSE, "--decoder-first-pipeline-num-layers 10"),
        Run(DENSE, "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 30 --decoder-last-pipeline-num-layers 11"),
        Run(DENSE, "--pipeline-model-parallel-size 2 --account-for-embedding-in-pipeline-split"),
        Run(LARGE, "--decoder-first-pipeline-num-layers 24"),
        Run(SPARSE, "--decoder-first-pipeline-num-layers 15"),
    ),
    "PLAN-VPP-PP": (Run(DENSE, "--virtual-pipeline-model-parallel-size 2"),),
    "PLAN-VPP-LAYERS": (Run(DENSE, "--pipeline-model-parallel-size 2 --virtual-pipeline-model-parallel-size 3"),),
    "PLAN-DSA-STAGE-START": (
        Run(SPARSE, "--decoder-first-pipeline-num-layers 15 --decoder-last-pipeline-num-layers 15"),
        Run(SPARSE, "--decoder-first-pipeline-num-layers 13 --decoder-last-pipeline-num-layers 17"),
        Run(SPARSE, "--virtual-pipeline-model-parallel-size 2"),
    ),
    "PLAN-MOE-DENSE": (Run(DENSE, "--expert-model-parallel-size 2"), Run(DENSE, "--moe-enable-deepep --moe-token-dispatcher-type flex")),
    "PLAN-EP-EXPERTS": (Run(REDUNDANT, "--expert-model-parallel-size 12"),),
    "PLAN-ETP-WIDTH": (
        Run(
            MIXTURE,
            "--actor-num-nodes 5 --expert-tensor-parallel-size 5 --rollout-batch-size 40 --no-optimizer-cpu-offload"
            " --no-overlap-cpu-optimizer-d2h-h2d",
        ),
    ),
    "PLAN-DEEPEP-FLEX": (Run(MIXTURE, "--moe-enable-deepep"), Run(FP8, "--moe-token-dispatcher-type alltoall")),
    "PLAN-DEEPEP-BACKEND": (Run(FP8, "--moe-flex-dispatcher-backend hybridep"),),
    "PLAN-FLEX-SIZE": (Run(MIXTURE, "--moe-token-dispatcher-type flex --expert-model-parallel-size 1"),),
    "PLAN-DISPATCHER": (
        Run(MIXTURE, "--moe-token-dispatcher-type allgather"),
        Run(LARGE, "--moe-token-dispatcher-type allgather --no-moe-enable-deepep"),
    ),
    "PLAN-SHARED-OVERLAP": (Run(LARGE, "--moe-shared-expert-overlap"),),
    "PLAN-EP-OVERLAP": (Run(LARGE, "--overlap-moe-expert-parallel-comm"), Run(MIXTURE, "--overlap-moe-expert-parallel-comm")),
    "PLAN-RECOMPUTE-FULL": (Run(DENSE, "--recompute-method none"), Run(DENSE, "--recompute-num-layers none")),
    "PLAN-RECOMPUTE-LAYERS": (Run(DENSE, "--recompute-num-layers 41"), Run(LARGE, "--recompute-num-layers 24 --recompute-method block")),
    "PLAN-RECOMPUTE-MODULES": tuple(
        Run(recipe, f"--recompute-granularity selective --recompute-method none --recompute-num-layers none --recompute-modules {modules}")
        for recipe, modules in ((DENSE, "core_attn mlps"), (DENSE, "mla_up_proj"), (DENSE, "moe_act"), (MIXTURE, "moe_act"))
    ),
    "PLAN-CPU-ADAM-PRECISION": (Run(MIXTURE, "--no-use-precision-aware-optimizer"),),
    "PLAN-PRECISION-DISTRIBUTED": (Run(MIXTURE, "--no-use-distributed-optimizer"),),
    "PLAN-STATE-DTYPES": (Run(DENSE, "--exp-avg-dtype bf16"), Run(DENSE, "--main-grads-dtype bf16")),
    "PLAN-CPU-ADAM-NODES": (Run(REDUNDANT, "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer"),),
    "PLAN-OVERLAP-GATHER": (
        Run(DENSE, "--overlap-param-gather"),
        Run(DENSE, "--overlap-param-gather --overlap-grad-reduce --no-use-distributed-optimizer"),
    ),
    "PLAN-TP-OVERLAP": (Run(DENSE, "--tp-comm-overlap --no-sequence-parallel"),),
    "PLAN-FP16": (Run(DENSE, "--fp16"),),
    "PLAN-EXPERT-BIAS": (Run(MIXTURE, "--moe-router-enable-expert-bias --moe-router-score-function softmax --override-model-config"),),
    "PLAN-DSA-CP": (Run(SPARSE, "--no-allgather-cp"),),
    "PLAN-FP8-GPU": (
        Run(DENSE, FP8_WHOLE, gpu="a100-80"),
        Run(DENSE, FP8_WHOLE, gpu="l40s"),
        Run(DENSE, FP8_WHOLE, gpu="b200"),
    ),
    "PLAN-FP8-WIDTHS": (Run(DENSE, FP8_WHOLE, trainer_model={"intermediate_size": 13_688}),),
    "PLAN-MTP-LAYERS": (
        Run(DENSE, "--mtp-num-layers 1"),
        Run(DRAFTS, "--mtp-num-layers 2"),
        Run(ON_CPU, "--train-backend torch --mtp-num-layers 1"),
        Run(ON_CPU, "--train-backend torch --mtp-num-layers 1 --enable-mtp-training --mtp-joint-training"),
    ),
    "PLAN-MTP-TRAINER": (
        Run(ON_CPU, "--train-backend torch --mtp-num-layers 1", trainer_model={"mtp_layers": (mtp_layer(Layer(2, (), is_moe=False), 64),)}),
    ),
    "PLAN-SERVER-GPUS": (
        Run(SPARSE, changes=(group(1, "num_gpus", 128),)),
        Run(SPARSE, changes=(group(0, "num_gpus", 128),)),
        Run(SPARSE, "--rollout-num-gpus 512"),
    ),
    "PLAN-ENGINE-GPUS": (
        Run(DENSE, "--rollout-num-gpus-per-engine 16"),
        Run(SEPARATE, "--rollout-num-gpus 5 --async-mode one-step"),
        Run(REDUNDANT, "--rollout-num-gpus-per-engine 16 --sglang-ep-size 16 --sglang-dp-size 4 --sglang-ep-num-redundant-experts 0"),
    ),
    "PLAN-ENGINE-NODES": (Run(REDUNDANT, "--rollout-num-gpus-per-engine 12 --sglang-ep-size 12 --sglang-dp-size 3"),),
    "PLAN-ENGINE-PP": (Run(DENSE, "--sglang-pp-size 3"),),
    "PLAN-ENGINE-PP-LAYERS": (Run(DENSE, "--actor-num-nodes 8 --rollout-num-gpus-per-engine 64 --sglang-pp-size 64"),),
    "PLAN-PD-PAIR": (
        Run(SPARSE, changes=(group(0, "worker_type", "decode"),)),
        Run(SPARSE, changes=(group(0, "worker_type", "regular"),)),
    ),
    "PLAN-PD-NO-EFFECT": (
        Run(DENSE, "--sglang-disaggregation-ib-device mlx5_0"),
        Run(DENSE, "--sglang-disaggregation-transfer-backend nixl"),
    ),
    "PLAN-SPLIT-GPUS": (Run(SEPARATE),),
    "PLAN-DP-SIZE": (Run(REDUNDANT, "--sglang-dp-size 5"), Run(MIXTURE, "--sglang-dp-size 3")),
    "PLAN-DP-ALONE": (Run(DENSE, "--sglang-enable-dp-attention"),),
    "PLAN-ENGINE-HEADS": (
        Run(REDUNDANT, "--sglang-dp-size 3"),
        Run(MIXTURE, "--no-sglang-enable-dp-attention --sglang-dp-size 1 --no-sglang-enable-dp-lm-head"),
    ),
    "PLAN-ENGINE-KV-HEADS": (Run(DENSE, engine_model={"attention.num_kv_heads": 3}),),
    "PLAN-DP-LM-HEAD": (Run(DENSE, "--sglang-enable-dp-lm-head"),),
    "PLAN-DENSE-TP": (Run(MIXTURE, "--sglang-moe-dense-tp-size 2"),),
    "PLAN-ENGINE-MLP": (
        Run(DENSE, engine_model={"intermediate_size": 13697}),
        Run(MIXTURE, engine_model={"experts.intermediate_size": 1500}),
    ),
    "PLAN-ENGINE-MOE-DENSE": (Run(DENSE, "--sglang-ep-size 2"), Run(DENSE, "--sglang-moe-a2a-backend deepep")),
    "PLAN-ENGINE-EP": (Run(REDUNDANT, "--sglang-ep-size 9"),),
    "PLAN-ENGINE-EP-FORCED": (Run(FP8, "--sglang-ep-size 16"),),
    "PLAN-ENGINE-EXPERTS": (
        Run(REDUNDANT, "--sglang-ep-num-redundant-experts 16"),
        Run(REDUNDANT, "--sglang-ep-num-redundant-experts 0"),
        Run(MIXTURE, "--sglang-ep-num-redundant-experts 3 --sglang-ep-size 8"),
    ),
    "PLAN-ENGINE-TP-EXPERTS": (Run(MIXTURE, engine_model={"experts.num_experts": 4}),),
    "PLAN-DEEPEP-RANKS": (
        Run(
            SPARSE,
            "--sglang-dp-size 192 --sglang-ep-size 192 --sglang-ep-num-redundant-experts 128 --sglang-chunked-prefill-size 24576"
            " --sglang-max-running-requests 192",
            changes=(group(1, "num_gpus_per_engine", 192), group(0, "overrides.dp_size", 64), group(0, "overrides.ep_size", 64)),
        ),
    ),
    "PLAN-DEEPEP-DISPATCH": (
        Run(SPARSE, """--env '{"NVSHMEM_DISABLE_NCCL": "1", "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK": "2"}'"""),
        Run(FP8, "--sglang-cuda-graph-bs-decode 1 2 4 8 256"),
        Run(FP8, "--sglang-cuda-graph-bs-decode 1 2 4 8 2048"),
    ),
    "PLAN-DEEPEP-MODE": (Run(FP8, "--sglang-deepep-mode normal"), Run(FP8, "--sglang-deepep-mode low_latency")),
    "PLAN-DEEPEP-NO-EFFECT": (Run(FP8, "--sglang-moe-a2a-backend none --sglang-deepep-mode normal"),),
    "PLAN-DEEPEP-NVSHMEM": (
        Run(FP8, changes=(Change(("cluster", "env", "NVSHMEM_DISABLE_NCCL"), None),)),
        Run(LARGE, """--env '{"NVSHMEM_DISABLE_NCCL": "0"}'"""),
    ),
    "PLAN-DEEPEP-FP8-CHANNEL": (Run(FP8, "--debug-rollout-only", quantization={"quant_method": "compressed-tensors"}),),
    "PLAN-FP8-BLOCKS": (Run(FP8, "--sglang-moe-a2a-backend none --sglang-ep-size 1"),),
    "PLAN-SPEC-ALGORITHM": (Run(DRAFTS, "--sglang-speculative-algorithm EAGEL"),),
    "PLAN-SPEC-NO-EFFECT": (Run(DRAFTS, changes=(Change(("sglang", "speculative_algorithm"), None),)),),
    "PLAN-SPEC-TREE": (
        Run(DRAFTS, "--sglang-speculative-eagle-topk none"),
        Run(DRAFTS, "--sglang-speculative-num-steps none --sglang-speculative-num-draft-tokens none"),
    ),
    "PLAN-SPEC-DRAFT-TOKENS": (Run(DRAFTS, "--sglang-speculative-num-draft-tokens 5"),),
    "PLAN-SPEC-TREE-SIZE": (Run(DRAFTS, "--sglang-speculative-eagle-topk 2 --sglang-speculative-num-draft-tokens 12"),),
    "PLAN-SPEC-NO-DRAFT": (
        Run(DENSE, "--sglang-speculative-algorithm EAGLE --sglang-max-running-requests 64"),
        Run(DRAFTS, "--sglang-speculative-algorithm STANDALONE"),
    ),
    "PLAN-SPEC-PP": (Run(DRAFTS, "--sglang-pp-size 2 --rollout-num-gpus-per-engine 2 --sglang-max-running-requests 64"),),
    "PLAN-SPEC-DP-ATTENTION": (Run(MIXTURE, "--sglang-speculative-algorithm NGRAM"),),
    "PLAN-ATTENTION-BACKEND": (
        Run(DENSE, "--sglang-attention-backend flashmla"),
        Run(DENSE, "--sglang-attention-backend dsa"),
        Run(DENSE, "--sglang-decode-attention-backend aiter"),
        Run(SPARSE, "--sglang-attention-backend triton"),
        Run(DENSE, "--sglang-attention-backend flashinfer", engine_model={"attention.has_sinks": True}),
        Run(TOWERS, "--sglang-attention-backend fa3", gpu="h200-141"),
        Run(TOWERS, "--sglang-decode-attention-backend flashinfer", gpu="h200-141"),
    ),
    "PLAN-TORCH-ONLY": (
        Run(DENSE, trainer_model={"model_type": "qwen3_next"}),
        Run(DENSE, trainer_model={"model_type": "gpt_oss"}),
        Run(DENSE, trainer_model={"model_type": "qwen3_vl"}),
    ),
    "PLAN-MEGATRON-ONLY": (
        Run(ON_CPU, trainer_model={"model_type": "deepseek_v32"}),
        Run(ON_CPU, trainer_model={"model_type": "glm_moe_dsa"}),
        Run(ON_CPU, trainer_model={"model_type": "mimo"}),
    ),
    "PLAN-EMBEDDED-MODEL": (
        Run(ON_CPU, engine_model={"model_type": "deepseek_v32"}),
        Run(ON_CPU, engine_model={"model_type": "mimo"}),
    ),
    "PLAN-SGLANG-MODEL": (
        Run(DENSE, engine_model={"model_type": "qwen3_5_text"}),
        Run(DENSE, engine_model={"model_type": "qwen3_5_moe_text"}),
        Run(DENSE, engine_model={"model_type": "gemma4_text"}),
    ),
    "PLAN-LORA-MODULES": (
        Run(ON_CPU, "--lora-rank 4 --lr 1e-3 --lora-target-modules proj"),
        Run(ON_CPU, "--lora-rank 4 --lr 1e-3 --lora-target-modules q_proj v_prj"),
        Run(TOWERS, "--lora-rank 4 --lr 1e-3 --lora-target-modules model.layers.0.self_attn.q_proj", gpu="h200-141"),
    ),
    "PLAN-LORA-RANK": (
        Run(ON_CPU, "--lora-rank 5000 --lr 1e-3"),
        Run(ON_CPU, "--lora-rank 5000 --lr 1e-3 --lora-target-modules q_proj"),
        Run(TOWERS, "--lora-rank 60000 --lr 1e-3", gpu="h200-141"),
    ),
    "PLAN-LORA-EXPERTS": (
        Run(ON_CPU, "--lora-rank 4 --lr 1e-3 --lora-experts"),
        Run("gpt-oss-20b/config.yaml", "--lora-experts"),
    ),
    "PLAN-LORA-BASE": (Run("gpt-oss-20b/config.yaml", "--lora-base-precision nf4"),),
    "PLAN-VISION-ADAPTER": (
        Run(
            "calculator/config.yaml",
            "--rollout-backend sglang --train-backend torch --rollout-num-gpus 1 --async-mode one-step --device cuda --lora-rank 4 "
            "--lora-sync adapter",
            trainer_model={"vision_tower": TOWER},
            engine_model={"vision_tower": TOWER},
        ),
    ),
    "PLAN-VISION-TEXT": (
        Run("calculator/config.yaml", "--freeze-vision-tower"),
        Run("calculator/config.yaml", "--freeze-vision-tower", trainer_model={"model_type": "gemma4", "vision_tower": TOWER}),
    ),
    "PLAN-ATTENTION-GPU": (
        Run(MIXTURE, "--sglang-attention-backend trtllm_mla"),
        Run(DENSE, "--sglang-attention-backend fa3", gpu="b200"),
        Run(MIXTURE, "--sglang-attention-backend fa3", gpu="a100-80"),
    ),
    "PLAN-DSA-NO-EFFECT": (Run(DENSE, "--sglang-dsa-decode-backend fa3"),),
    "PLAN-DSA-CACHE": (Run(SPARSE, "--sglang-kv-cache-dtype fp8_e5m2"),),
    "PLAN-DETERMINISTIC": (Run(DENSE, "--sglang-enable-deterministic-inference --sglang-attention-backend flex_attention"),),
    "PLAN-MEM-FRACTION": (Run(DENSE, "--sglang-mem-fraction-static 0.9"), Run(DENSE, "--sglang-mem-fraction-static none")),
    "PLAN-CHUNK-PAGES": (
        Run(SPARSE, "--sglang-chunked-prefill-size 6400"),
        Run(MIXTURE, "--sglang-chunked-prefill-size 4"),
        Run(DENSE, "--sglang-page-size 64 --sglang-chunked-prefill-size 1000"),
    ),
    "PLAN-RUNNING-REQUESTS": (
        Run(MIXTURE, "--sglang-max-running-requests 4"),
        Run(SPARSE, "--sglang-max-running-requests none"),
    ),
    "PLAN-SPEC-REQUESTS": (
        Run(MIXTURE, "--sglang-max-running-requests none"),
        Run(DRAFTS, "--rollout-batch-size 64 --sglang-cuda-graph-max-bs-decode 96"),
    ),
    "PLAN-GRAPH-BATCH": (Run(DENSE, "--sglang-max-running-requests 512 --sglang-cuda-graph-max-bs-decode 128"),),
    "PLAN-NO-GRAPHS": (
        Run(DENSE, "--sglang-disable-cuda-graph"),
        Run(DENSE, "--sglang-disable-decode-cuda-graph --sglang-cuda-graph-bs-decode 64"),
        Run(DENSE, "--sglang-cuda-graph-backend-decode disabled"),
        Run(DENSE, """--sglang-cuda-graph-config '{"decode": {"backend": "disabled"}}'"""),
    ),
    "PLAN-FEW-REQUESTS": (
        Run(DENSE, "--rollout-concurrency 16"),
        Run(DENSE, "--sglang-max-running-requests 4"),
    ),
    "PLAN-CHECKPOINT-GPU": (Run(FP8, gpu="a100-80"),),
    "PLAN-CONTEXT-LENGTH": (Run(DENSE, "--sglang-context-length 65536"),),
    "PLAN-RESPONSE-CONTEXT": (
        Run(DENSE, "--sglang-context-length 16384"),
        Run(DENSE, "--rollout-max-context-len 65536 --max-tokens-per-gpu 40000"),
        Run(DENSE, "--eval-max-response-len 32768"),
        Run(DENSE, "--rollout-max-response-len 40000 --max-tokens-per-gpu 40000"),
    ),
    "PLAN-MAX-TOKENS": (Run(DENSE, "--max-tokens-per-gpu 2048"), Run(SPARSE, "--max-tokens-per-gpu 2048")),
    "PLAN-SAMPLING-WAVES": (
        Run(LARGE, "--max-sampling-waves 1"),
        Run(DENSE, "--max-sampling-waves 2 --dynamic-sampling-filter-path fuligo.rollout.filters.check_reward_nonzero_std"),
    ),
}
"""Rule -> runs that violate it."""
CASES = [(rule, number) for rule, runs in BROKEN.items() for number in range(len(runs))]
"""Rule and number of every run."""


@functools.cache
def checked(rule: str, number: int) -> tuple[Subject, tuple[Finding, ...]]:
    """Return a run's subject and findings. Cached, because several tests look at them."""
    subject = BROKEN[rule][number].subject()
    return subject, check(subject)
