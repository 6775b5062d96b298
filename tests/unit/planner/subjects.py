"""Subjects for the planner's tests: flags of the recipes with their models' shapes."""

from dataclasses import replace
from pathlib import Path

from fuligo.config.command_line import parse
from fuligo.models.architecture import Architecture
from fuligo.models.registry import read_architecture
from fuligo.planner.gpus import gpu
from fuligo.planner.subject import Subject

EXAMPLES = Path(__file__).parents[3] / "examples"
DATA = "--hf-checkpoint /models/policy --prompt-data prompts.jsonl --label-key label --num-rollout 10 --rm-type deepscaler --use-kl-loss"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --accumulate-allreduce-grads-in-fp32"
CPU_ADAM = "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer"
PPO = "--advantage-estimator ppo"
PD = """
sglang:
  - name: default
    server_groups:
      - {worker_type: prefill, num_gpus: 64, num_gpus_per_engine: 64, overrides: {deepep_mode: auto}}
      - {worker_type: decode, num_gpus: 192, num_gpus_per_engine: 64, overrides: {deepep_mode: low_latency, cuda_graph_max_bs_decode: 12}}
"""

GLM4_9B_PARALLEL = f"--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 {FULL} \
  --use-dynamic-batch-size --max-tokens-per-gpu 4608 --rollout-max-response-len 8192 --rollout-num-gpus-per-engine 2"
GLM4_9B_SEPARATE = f"{GLM4_9B_PARALLEL} --actor-num-gpus-per-node 4 --rollout-num-gpus 4"
GLM4_9B_COLOCATED = f"{GLM4_9B_PARALLEL} --actor-num-gpus-per-node 8 --colocate --sglang-mem-fraction-static 0.7"
FLASH_8 = f"--actor-num-gpus-per-node 8 --colocate --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 {FULL} \
  --use-dynamic-batch-size --max-tokens-per-gpu 8192 --rollout-max-response-len 8192 --rollout-num-gpus-per-engine 8 \
  --sglang-mem-fraction-static 0.7 --sglang-enable-dp-attention --sglang-dp-size 8 --sglang-enable-dp-lm-head --sglang-moe-dense-tp-size 1"
FLASH_16 = f"--actor-num-nodes 2 --actor-num-gpus-per-node 8 --colocate --tensor-model-parallel-size 4 --sequence-parallel \
  --pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 23 --context-parallel-size 2 --expert-model-parallel-size 8 \
  --expert-tensor-parallel-size 1 {FULL} --use-dynamic-batch-size --max-tokens-per-gpu 16384 --rollout-max-response-len 32768 \
  --rollout-num-gpus-per-engine 8 --sglang-mem-fraction-static 0.7 --sglang-enable-dp-attention --sglang-dp-size 8"
GLM45_64 = f"--actor-num-nodes 8 --actor-num-gpus-per-node 8 --colocate --tensor-model-parallel-size 8 --sequence-parallel \
  --pipeline-model-parallel-size 4 --context-parallel-size 2 --expert-model-parallel-size 16 --expert-tensor-parallel-size 1 \
  --moe-enable-deepep --moe-token-dispatcher-type flex {FULL} {CPU_ADAM} --use-dynamic-batch-size --max-tokens-per-gpu 16384 \
  --rollout-max-response-len 32768 --rollout-num-gpus-per-engine 32 --sglang-mem-fraction-static 0.7 --sglang-enable-dp-attention"
GLM45_BF16 = f"{GLM45_64} --sglang-dp-size 4"
GLM45_FP8 = f"{GLM45_64} --sglang-dp-size 32 --sglang-ep-size 32 --sglang-moe-dense-tp-size 1 --sglang-enable-dp-lm-head \
  --sglang-moe-a2a-backend deepep --sglang-cuda-graph-bs-decode 1 2 4 8 128"
GLM52_256 = f"--actor-num-nodes 32 --actor-num-gpus-per-node 8 --colocate --tensor-model-parallel-size 4 --sequence-parallel \
  --pipeline-model-parallel-size 8 --decoder-first-pipeline-num-layers 14 --decoder-last-pipeline-num-layers 16 --context-parallel-size 8 \
  --allgather-cp --expert-model-parallel-size 32 --expert-tensor-parallel-size 1 --moe-enable-deepep --moe-token-dispatcher-type flex \
  {FULL} {CPU_ADAM} --use-dynamic-batch-size --max-tokens-per-gpu 16384 --rollout-max-response-len 32768 \
  --sglang-mem-fraction-static 0.7 --sglang-enable-dp-attention --sglang-dp-size 64 --sglang-ep-size 64 --sglang-kv-cache-dtype fp8_e4m3 \
  --sglang-moe-a2a-backend deepep --sglang-moe-dense-tp-size 1 --sglang-enable-dp-lm-head --sglang-speculative-algorithm EAGLE \
  --sglang-speculative-num-steps 4 --sglang-speculative-eagle-topk 1 --sglang-speculative-num-draft-tokens 5"
QWEN3_4B = f"--actor-num-gpus-per-node 8 --colocate --tensor-model-parallel-size 2 --sequence-parallel {FULL} --use-dynamic-batch-size \
  --max-tokens-per-gpu 9216 --rollout-max-response-len 8192 --rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7"


def facts(model: str) -> Architecture:
    """Return the shapes of a recipe's model: `glm4-9b`, `glm5.2-744b/model-fp8`, ..."""
    path = EXAMPLES / model
    return read_architecture(path if path.name.startswith("model") else path / "model")


def subject_of(flags: str, model: str, gpu_name: str = "h100-80", engines: str | None = None) -> Subject:
    """Return a subject from flags as typed; `engines` is the engines' model if different."""
    config = parse([*DATA.split(), *flags.split()]).config
    trained = facts(model)
    return Subject(config, replace(trained, is_quantized=False), facts(engines) if engines else trained, gpu(gpu_name))


def glm52(tmp_path: Path) -> Subject:
    """Return the 256-GPU recipe with its prefill and decode servers."""
    file = tmp_path / "engines.yaml"
    file.write_text(PD)
    return subject_of(f"{GLM52_256} --sglang-config {file}", "glm5.2-744b", engines="glm5.2-744b/model-fp8")
