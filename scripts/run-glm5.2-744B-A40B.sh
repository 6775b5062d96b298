#!/bin/bash
# GLM-5.2 (744B-A40B) on 32 nodes of 8 GPUs, shared by trainer and engines.
#
# BASE_DIR: directory with checkpoints and data (default: /shared). Other variables: see scripts/launch.sh. The recipe: see examples/glm5.2-744b/README.md.
source "$(dirname -- "${BASH_SOURCE[0]}")/launch.sh"
BASE_DIR="${BASE_DIR:-/shared}"

launch glm5.2-744b/config.yaml \
   --hf-checkpoint "${BASE_DIR}/GLM-5.2-FP8" \
   --ref-load "${BASE_DIR}/GLM-5.2_torch_dist" \
   --load "${BASE_DIR}/GLM-5.2_fuligo" \
   --save "${BASE_DIR}/GLM-5.2_fuligo" \
   --prompt-data "${BASE_DIR}/dapo-math-17k/dapo-math-17k.jsonl" \
   --eval-prompt-data aime "${BASE_DIR}/aime-2024/aime-2024.jsonl" \
   "$@"
