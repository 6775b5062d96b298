#!/bin/bash
# GLM-4.7-Flash (30B-A3B) on one node of 8 GPUs, shared by trainer and engine.
#
# BASE_DIR: directory with checkpoints and data (default: /root). Other variables: see scripts/launch.sh. The recipe: see examples/glm4.7-flash/README.md.
source "$(dirname -- "${BASH_SOURCE[0]}")/launch.sh"
BASE_DIR="${BASE_DIR:-/root}"

launch glm4.7-flash/8gpus.yaml \
   --hf-checkpoint "${BASE_DIR}/GLM-4.7-Flash" \
   --ref-load "${BASE_DIR}/GLM-4.7-Flash_torch_dist" \
   --load "${BASE_DIR}/GLM-4.7-Flash_fuligo" \
   --save "${BASE_DIR}/GLM-4.7-Flash_fuligo" \
   --prompt-data "${BASE_DIR}/dapo-math-17k/dapo-math-17k.jsonl" \
   --eval-prompt-data aime "${BASE_DIR}/aime-2024/aime-2024.jsonl" \
   "$@"
