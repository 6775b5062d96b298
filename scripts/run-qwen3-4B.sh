#!/bin/bash
# Qwen3-4B on one node of 8 GPUs, shared by trainer and engines.
#
# BASE_DIR: directory with checkpoints and data (default: /root). Other variables: see scripts/launch.sh. The recipe: see examples/qwen3-4b/README.md.
source "$(dirname -- "${BASH_SOURCE[0]}")/launch.sh"
BASE_DIR="${BASE_DIR:-/root}"

launch qwen3-4b/config.yaml \
   --hf-checkpoint "${BASE_DIR}/Qwen3-4B" \
   --ref-load "${BASE_DIR}/Qwen3-4B_torch_dist" \
   --load "${BASE_DIR}/Qwen3-4B_fuligo" \
   --save "${BASE_DIR}/Qwen3-4B_fuligo" \
   --prompt-data "${BASE_DIR}/dapo-math-17k/dapo-math-17k.jsonl" \
   --eval-prompt-data aime "${BASE_DIR}/aime-2024/aime-2024.jsonl" \
   "$@"
