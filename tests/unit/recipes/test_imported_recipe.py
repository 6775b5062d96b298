"""Test of a complete launch script of a large run: variable checks, a sourced model, a topology in a here-document, workers started by
ssh, the environment as JSON, and a job submitted to Ray. Its config plans without errors."""

from pathlib import Path

from fuligo.config.changes import apply_changes
from fuligo.config.findings import Change
from fuligo.importer.config_file import imported_config
from fuligo.importer.run import import_script
from fuligo.planner.make_plan import make_plan
from tests.config_files import load_yaml

REPOSITORY = Path(__file__).parents[3]
RECIPE = REPOSITORY / "examples" / "glm5.2-744b" / "config.yaml"
SCRIPT = r"""#!/bin/bash
# for rerun the task
pkill -9 sglang
sleep 3
ray stop --force
set -ex

if [ -z "${BASE_DIR}" ]; then echo "BASE_DIR is not set."; exit 1; fi
export SOCKET_IFNAME=${SOCKET_IFNAME:-eth0}
NVLINK_COUNT=$(nvidia-smi topo -m 2>/dev/null | grep -o 'NV[0-9][0-9]*' | wc -l)
if [ "$NVLINK_COUNT" -gt 0 ]; then P2P_LEVEL=NVL; else P2P_LEVEL=SYS; fi

source "${MODELS}/glm5.2-744B-A40B.sh"
DECODE_BS=12
DRAFT=5
DISPATCH=$(( (DECODE_BS * DRAFT + 15) / 16 * 16 ))

SGLANG_CONFIG=$(mktemp /tmp/topology_XXXXXX.yaml)
cat > "${SGLANG_CONFIG}" <<EOF
sglang:
  - name: default
    server_groups:
      - worker_type: prefill
        num_gpus: 64
        num_gpus_per_engine: 64
        overrides: {deepep_mode: auto}
      - worker_type: decode
        num_gpus: $((256 - 64))
        num_gpus_per_engine: 64
        overrides: {deepep_mode: low_latency, moe_runner_backend: deep_gemm, cuda_graph_max_bs_decode: ${DECODE_BS}}
EOF

CKPT_ARGS=(
   --hf-checkpoint $BASE_DIR/GLM-5.2-FP8
   --ref-load $BASE_DIR/GLM-5.2_torch_dist
   --load $BASE_DIR/GLM-5.2_fuligo
   --save $BASE_DIR/GLM-5.2_fuligo
   --save-interval 20
)
ROLLOUT_ARGS=(
   --prompt-data $BASE_DIR/dapo-math-17k/dapo-math-17k.jsonl
   --input-key prompt --label-key label --apply-chat-template --rollout-shuffle
   --rm-type deepscaler --num-rollout 3000 --rollout-batch-size 128 --n-samples-per-prompt 8
   --rollout-max-response-len 30720 --rollout-max-context-len 32768 --rollout-temperature 1.0
   --num-steps-per-rollout 1 --balance-data
)
EVAL_ARGS=(
   --eval-interval 20 --eval-prompt-data aime $BASE_DIR/aime-2024/aime-2024.jsonl
   --n-samples-per-eval-prompt 8 --eval-max-response-len 30720 --eval-top-p 0.7
)
PERF_ARGS=(
   --tensor-model-parallel-size 4 --sequence-parallel
   --pipeline-model-parallel-size 8
   --decoder-first-pipeline-num-layers 14
   --decoder-last-pipeline-num-layers 16
   --context-parallel-size 8
   --expert-model-parallel-size 32 --expert-tensor-parallel-size 1
   --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
   # --micro-batch-size 1
   --use-dynamic-batch-size --max-tokens-per-gpu $((32768 / 8))
   --moe-enable-deepep --moe-token-dispatcher-type flex --accumulate-allreduce-grads-in-fp32
)
GRPO_ARGS=(
   --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl
   --entropy-coef 0.00 --eps-clip 0.2 --eps-clip-high 0.28
)
OPTIMIZER_ARGS=(
   --optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98
   --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer
)
SGLANG_ARGS=(
   --sglang-config ${SGLANG_CONFIG}
   --sglang-mem-fraction-static 0.7
   --sglang-enable-dp-attention --sglang-ep-size 64 --sglang-dp-size 64
   --sglang-enable-dp-lm-head --sglang-moe-dense-tp-size 1 --sglang-moe-a2a-backend deepep
   --sglang-kv-cache-dtype fp8_e4m3
   --sglang-nsa-decode-backend flashmla_kv --sglang-nsa-prefill-backend flashmla_sparse --sglang-attention-backend nsa
   --sglang-disaggregation-transfer-backend mooncake
   --sglang-disaggregation-ib-device $(d=(); for i in $(seq 100 107); do d+=(mlx5_$i); done; IFS=,; echo "${d[*]}")
   --sglang-speculative-algorithm EAGLE --sglang-speculative-num-steps 4
   --sglang-speculative-eagle-topk 1 --sglang-speculative-num-draft-tokens ${DRAFT}
   --sglang-max-running-requests 768
)
WANDB_ARGS=(
   # --use-wandb
)

ray start --head --node-ip-address ${MASTER_ADDR} --num-gpus 8 --disable-usage-stats
while read -r WORKER_IP _; do
  [[ "$WORKER_IP" == "$MASTER_ADDR" ]] && continue
  ssh root@"${WORKER_IP}" "pkill -9 sglang ; ray start --address=${MASTER_ADDR}:6379 --num-gpus 8" &
done < "${HOSTFILE}"
wait

RUNTIME_ENV_JSON="{
  \"env_vars\": {
    \"GLOO_SOCKET_IFNAME\": \"${SOCKET_IFNAME}\", \"TP_SOCKET_IFNAME\": \"${SOCKET_IFNAME}\", \"NCCL_SOCKET_IFNAME\": \"${SOCKET_IFNAME}\",
    \"NCCL_IB_TIMEOUT\": \"22\", \"NCCL_IB_RETRY_CNT\": \"7\", \"NCCL_NET_GDR_LEVEL\": \"4\",
    \"NCCL_P2P_LEVEL\": \"${P2P_LEVEL}\", \"NCCL_NVLS_ENABLE\": \"0\",
    \"MC_IB_PCI_RELAXED_ORDERING\": \"1\", \"NVSHMEM_DISABLE_NCCL\": \"1\",
    \"SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK\": \"${DISPATCH}\"
  }
}"
ray job submit --address="http://127.0.0.1:8265" \
   --runtime-env-json="${RUNTIME_ENV_JSON}" \
   -- python3 train.py \
   --actor-num-nodes 32 \
   --actor-num-gpus-per-node 8 \
   --colocate \
   ${MODEL_ARGS[@]} ${CKPT_ARGS[@]} ${ROLLOUT_ARGS[@]} ${OPTIMIZER_ARGS[@]} ${GRPO_ARGS[@]} \
   ${WANDB_ARGS[@]} ${PERF_ARGS[@]} ${EVAL_ARGS[@]} ${SGLANG_ARGS[@]} 2>&1 | tee train.log
"""


def test_the_script_of_256_gpus_is_the_recipe(tmp_path: Path):
    (tmp_path / "run.sh").write_text(SCRIPT)
    (tmp_path / "hosts").write_text("".join(f"10.0.0.{number} slots=8\n" for number in range(1, 33)))
    given = {
        "BASE_DIR": "/shared",
        "MASTER_ADDR": "10.0.0.1",
        "HOSTFILE": str(tmp_path / "hosts"),
        "MODELS": str(REPOSITORY / "scripts" / "models"),
    }
    script = import_script(tmp_path / "run.sh", given=given, root=REPOSITORY)
    (tmp_path / "run.yaml").write_text(imported_config(script).yaml())
    recipe = load_yaml(RECIPE)
    facts = Change(("model", "model_config_file"), recipe.model.model_config_file)
    imported = apply_changes(load_yaml(tmp_path / "run.yaml"), [facts])

    assert make_plan(imported, "h100-80", "imported").findings == ()
    names = (
        "cluster",
        "data",
        "rollout",
        "reward",
        "eval",
        "algorithm",
        "train",
        "parallel",
        "optimizer",
        "engine",
        "sglang",
        "checkpoint",
    )
    assert {name: getattr(imported, name) for name in names} == {name: getattr(recipe, name) for name in names}
