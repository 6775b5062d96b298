# Each part is a launch script as they are in use (test_against_bash.py). Next to it lie models/moe.sh, the first part, and a file of hosts.

### the model of the others
NLAYERS=12
FIRST_K_DENSE_REPLACE=3
arr=()
for ((i=0; i<NLAYERS; i++)); do
  if (( i < FIRST_K_DENSE_REPLACE )); then
    arr+=(0)
  else
    arr+=(1)
  fi
done
printf -v MOE_LAYER_FREQ "[%s]" "$(IFS=', '; echo "${arr[*]}")"
MODEL_ARGS=(
   --disable-bias-linear
   --num-layers $NLAYERS
   --moe-layer-freq $MOE_LAYER_FREQ
   --rotary-base "${MODEL_ARGS_ROTARY_BASE:-10000}"   # checked against config.json
   --vocab-size 151552
)
[ "${BASH_SOURCE[0]}" != "$0" ] || python3 train.py "${MODEL_ARGS[@]}"

### colocated on one node
pkill -9 sglang
sleep 3
ray stop --force
pkill -9 ray
pkill -9 python
set -ex
export PYTHONUNBUFFERED=1
NVLINK_COUNT=$(nvidia-smi topo -m 2>/dev/null | grep -o 'NV[0-9][0-9]*' | wc -l)
if [ "$NVLINK_COUNT" -gt 0 ]; then HAS_NVLINK=1; else HAS_NVLINK=0; fi
echo "HAS_NVLINK: $HAS_NVLINK (detected $NVLINK_COUNT NVLink references)"
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/models/moe.sh"
CKPT_ARGS=(
   --hf-checkpoint $BASE_DIR/model/
   # --load $BASE_DIR/model_dist/
   --ref-load $BASE_DIR/model_dist/
)
EVAL_ARGS=(
   --eval-prompt-data aime $BASE_DIR/aime/aime.jsonl   gpqa "$BASE_DIR/gpqa diamond.jsonl"
)
export MASTER_ADDR=${MASTER_ADDR:-"127.0.0.1"}
ray start --head --node-ip-address ${MASTER_ADDR} --num-gpus 8 --disable-usage-stats
RUNTIME_ENV_JSON="{
  \"env_vars\": {
    \"NCCL_NVLS_ENABLE\": \"${HAS_NVLINK}\"
  }
}"
ray job submit --address="http://127.0.0.1:8265" \
   --runtime-env-json="${RUNTIME_ENV_JSON}" \
   -- python3 train.py \
   --colocate \
   --update-weight-buffer-size $(( 4 * 512 * 1024 * 1024)) \
   ${MODEL_ARGS[@]} \
   "${CKPT_ARGS[@]}" \
   "${EVAL_ARGS[@]}" \
   ${WANDB_ARGS[@]}

### many nodes by ssh
set -euo pipefail
MODEL_ARGS_ROTARY_BASE=5000000 source "$(dirname "$0")/models/moe.sh"
WORKERS=()
for WORKER_IP in $(awk '{print $1}' "$HOSTFILE"); do
  if [[ "$WORKER_IP" == "$MASTER_ADDR" ]]; then
    continue
  fi
  WORKERS+=("$WORKER_IP")
  ssh root@"${WORKER_IP}" \
    "pkill -9 sglang ; ray stop --force ; ray start --address=${MASTER_ADDR}:6379 --num-gpus 8" &
done
wait
ray job submit -- python3 train.py --actor-num-nodes $((${#WORKERS[@]} + 1)) "${MODEL_ARGS[@]}" --a $BASE_DIR/${WORKERS[0]}

### a function starts the job
set -u
run() {
   local -a job=("$@")
   ray job submit --runtime-env-json='{"env_vars": {"A": "1"}}' --no-wait -- python3 train_async.py "${job[@]}" 2>&1 | tee train.log
}
case "${MODE:-rl}" in
   sft) ARGS=(--loss-type sft_loss) ;;
   rl | grpo) ARGS=(--advantage-estimator grpo --eps-clip 0.2) ;;
   *) echo "unknown mode" >&2; exit 1 ;;
esac
run "${ARGS[@]}" --name "$(basename -- "$0" .sh)" --seq $(seq -s, 1 2 9)

### arguments through eval and here-documents
read -r -d '' FLAGS <<'EOF' || true
--a 'one two'
--b "$BASE_DIR"/x
EOF
eval "ARGS=($FLAGS)"
while IFS='=' read -r key value; do
  declare "$key=$value"
done <<< $'lr=1e-6\nsteps=4'
cat > /tmp/$$.json <<EOF
{"lr": $lr}
EOF
trap 'rm -f /tmp/$$.json' EXIT
nohup python3 -u train.py "${ARGS[@]}" --lr "$lr" --steps "${steps:?}" --json "$(cat /tmp/$$.json)" > train.out 2>&1 &
wait $!

### torchrun with a line of options
declare -A SIZES=([small]=1 [large]=8)
SIZE=large
GPUS=${SIZES[$SIZE]}
DISTRIBUTED="--nproc-per-node $GPUS --nnodes ${NNODES:-1} --node-rank ${NODE_RANK:-0}"
OPTIONS="--tensor-model-parallel-size $((GPUS / 2)) \
 --max-tokens-per-gpu $((32 * 1024 / GPUS))"
if command -v torchrun >/dev/null; then
   torchrun $DISTRIBUTED train.py $OPTIONS --devices mlx5_{0..3} --brace {a,b}.jsonl --glob '*.none' --tilde ~/data
fi

### command substitution and expansions
M=GLM-4.5-Air; P=/root/models/$M.tar.gz
ITEMS=(alpha "beta gamma" delta)
PYTHON="${PYTHON:-python3}"
time env A=1 "$PYTHON" -m torch.distributed.run --nnodes 1 train.py --name "${M,,}" --upper ${M^^} --dir "${P%/*}" --file ${P##*/} --stem "${P%%.*}" \
   --replaced ${M//[.-]/_} --slice "${ITEMS[@]:1:2}" --indices ${!ITEMS[@]} --joined "$(IFS=:; echo "${ITEMS[*]}")" --quoted "${ITEMS[@]@Q}" \
   --date-free $(printf '%03d' 7) --hex $((16#ff)) --bits $((1 << 10 | 3)) --ternary $(( ${#ITEMS[@]} > 2 ? 7 : 8 )) --empty "" --dollar '$HOME' --ansi $'tab\there'

### loops, retries and background work
set -e
attempt=0
until (( attempt >= 3 )); do
  attempt=$((attempt + 1))
  sleep 1000 &
  [[ $attempt -eq 2 ]] && break || true
done
wait
pgrep -f sglang || echo "no old engines"
for pair in "lr 1e-6" "beta 0.98"; do set -- $pair; ARGS="$ARGS --$1 $2"; done
function finish { echo finished; }
trap finish EXIT
{ python3 train.py $ARGS --attempt $attempt; } || exit 1
