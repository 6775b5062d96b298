# Sourced by run-*.sh: `launch CONFIG [FLAG ...]` trains with the recipe, or plans it.
#
#   PLAN=1          plan instead of running: nothing is started, no GPU is needed
#   HOSTFILE        nodes, one per line (`10.0.0.1 slots=8`; `#` begins a comment), including this one. The script starts a Ray cluster
#                   with a random token on them by ssh; it ends with the run. If unset: the nodes of the Slurm job, the cluster of
#                   RAY_ADDRESS, or this machine alone
#   SOCKET_IFNAME   network interface of the nodes, for NCCL, Gloo and DeepEP
#   MODEL_ARGS      further Megatron flags of the model, such as "--rotary-base 10000 --override-model-config"
#   PYTHON          interpreter (default: python3)
set -euo pipefail

REPOSITORY="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." &>/dev/null && pwd)"

launch() {
   # shellcheck disable=SC2206  # MODEL_ARGS holds several flags
   local job=(--config "${REPOSITORY}/examples/$1" "${@:2}" ${MODEL_ARGS[@]+${MODEL_ARGS[@]}}) command=(train)
   if [[ -n "${SOCKET_IFNAME:-}" ]]; then
      local interfaces='{"GLOO_SOCKET_IFNAME": "%s", "TP_SOCKET_IFNAME": "%s", "NCCL_SOCKET_IFNAME": "%s"}'
      # shellcheck disable=SC2059
      job+=(--env "$(printf "${interfaces}" "${SOCKET_IFNAME}" "${SOCKET_IFNAME}" "${SOCKET_IFNAME}")")
   fi
   if [[ "${PLAN:-0}" == 1 ]]; then
      command=(plan)
   elif [[ -n "${HOSTFILE:-}" ]]; then
      command=(launch --hostfile "${HOSTFILE}" --)
   elif [[ -n "${SLURM_JOB_NODELIST:-}" ]]; then
      command=(launch --)
   fi
   export PYTHONPATH="${REPOSITORY}${PYTHONPATH:+:${PYTHONPATH}}"
   exec "${PYTHON:-python3}" -m fuligo "${command[@]}" "${job[@]}" # exec: signals reach the run
}
