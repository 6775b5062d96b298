# Sourced by run-*.sh: `launch CONFIG [FLAG ...]` starts a Ray cluster and submits the job to it, or plans it.
#
#   PLAN=1          plan instead of running: nothing is started, no GPU is needed
#   MASTER_ADDR     address of this node, the head (127.0.0.1)
#   HOSTFILE        nodes of the cluster, one address per line (`10.0.0.1 slots=8`); the script starts workers by ssh;
#                   without it, start them yourself: ray start --address=$MASTER_ADDR:6379 --num-gpus 8
#   RAY_AUTH_TOKEN  token that Ray requires of clients; workers receive it by ssh. Without it anyone who reaches Ray's ports can run commands
#   DASHBOARD_HOST  address of Ray's dashboard and job server (127.0.0.1; to reach it: ssh -L 8265:127.0.0.1:8265 HEAD)
#   SOCKET_IFNAME   network interface of the nodes, for NCCL, Gloo and DeepEP
#   MODEL_ARGS      further Megatron flags of the model, such as "--rotary-base 10000 --override-model-config"
#   PYTHON          interpreter (python3)
set -euo pipefail

REPOSITORY="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." &>/dev/null && pwd)"
NUM_GPUS_PER_NODE=8
RAY_PORT=6379
DASHBOARD_HOST="${DASHBOARD_HOST:-127.0.0.1}"
DASHBOARD_PORT=8265

launch() {
   local job=(--config "${REPOSITORY}/examples/$1" "${@:2}" ${MODEL_ARGS[@]+${MODEL_ARGS[@]}})
   if [[ -n "${SOCKET_IFNAME:-}" ]]; then
      local interfaces='{"GLOO_SOCKET_IFNAME": "%s", "TP_SOCKET_IFNAME": "%s", "NCCL_SOCKET_IFNAME": "%s"}'
      # shellcheck disable=SC2059
      job+=(--env "$(printf "${interfaces}" "${SOCKET_IFNAME}" "${SOCKET_IFNAME}" "${SOCKET_IFNAME}")")
   fi
   if [[ "${PLAN:-0}" == 1 ]]; then
      PYTHONPATH="${REPOSITORY}${PYTHONPATH:+:${PYTHONPATH}}" "${PYTHON:-python3}" -m fuligo plan "${job[@]}"
      return
   fi
   start_cluster
   ray job submit --address="http://${DASHBOARD_HOST/#0.0.0.0/127.0.0.1}:${DASHBOARD_PORT}" -- "${PYTHON:-python3}" "${REPOSITORY}/train.py" "${job[@]}"
}

start_cluster() {
   local head="${MASTER_ADDR:-127.0.0.1}" host
   local worker="ray start --address=${head}:${RAY_PORT} --num-gpus ${NUM_GPUS_PER_NODE} --disable-usage-stats"
   if [[ -n "${RAY_AUTH_TOKEN:-}" ]]; then
      export RAY_AUTH_TOKEN RAY_AUTH_MODE=token
   fi
   ray start --head --node-ip-address "${head}" --port "${RAY_PORT}" --num-gpus "${NUM_GPUS_PER_NODE}" --disable-usage-stats \
      --dashboard-host="${DASHBOARD_HOST}" --dashboard-port="${DASHBOARD_PORT}"
   if [[ -z "${HOSTFILE:-}" ]]; then
      return
   fi
   for host in $(awk '{print $1}' "${HOSTFILE}"); do
      if [[ "${host}" != "${head}" ]]; then
         start_worker "${host}" "${worker} --node-ip-address ${host}" &
      fi
   done
   wait
}

start_worker() {
   local host="$1" command="$2"
   if [[ -z "${RAY_AUTH_TOKEN:-}" ]]; then
      ssh -n "${host}" "${command}"
   else # through standard input: command lines can be read by everybody on a machine
      ssh "${host}" "exec sh -c 'read -r RAY_AUTH_TOKEN; export RAY_AUTH_TOKEN RAY_AUTH_MODE=token; exec ${command}'" <<<"${RAY_AUTH_TOKEN}"
   fi
}
