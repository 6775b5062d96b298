#!/bin/bash
# GLM-4.5 (355B-A32B) on 8 nodes of 8 GPUs, shared by trainer and engines.
#
# BASE_DIR: directory with checkpoints and data (default: /shared). Other variables: see scripts/launch.sh. The recipe: see examples/glm4.5-355b/README.md.
source "$(dirname -- "${BASH_SOURCE[0]}")/launch.sh"
BASE_DIR="${BASE_DIR:-/shared}"

launch glm4.5-355b/bf16.yaml \
   --hf-checkpoint "${BASE_DIR}/GLM-4.5-355B-A32B" \
   --ref-load "${BASE_DIR}/GLM-4.5-355B-A32B_torch_dist" \
   --load "${BASE_DIR}/GLM-4.5-355B-A32B_fuligo" \
   --save "${BASE_DIR}/GLM-4.5-355B-A32B_fuligo" \
   --prompt-data "${BASE_DIR}/dapo-math-17k/dapo-math-17k.jsonl" \
   --eval-prompt-data aime "${BASE_DIR}/aime-2024/aime-2024.jsonl" \
   "$@"
