#!/bin/bash
# GLM-Z1-9B-0414 on one node of 8 GPUs: 4 train, 4 sample.
#
# BASE_DIR: directory with checkpoints and data (default: /root). Other variables: see scripts/launch.sh. The recipe: see examples/glm4-9b/README.md.
source "$(dirname -- "${BASH_SOURCE[0]}")/launch.sh"
BASE_DIR="${BASE_DIR:-/root}"

launch glm4-9b/separate.yaml \
   --hf-checkpoint "${BASE_DIR}/GLM-Z1-9B-0414" \
   --ref-load "${BASE_DIR}/GLM-Z1-9B-0414_torch_dist" \
   --load "${BASE_DIR}/GLM-Z1-9B-0414_fuligo" \
   --save "${BASE_DIR}/GLM-Z1-9B-0414_fuligo" \
   --prompt-data "${BASE_DIR}/dapo-math-17k/dapo-math-17k.jsonl" \
   --eval-prompt-data aime "${BASE_DIR}/aime-2024/aime-2024.jsonl" \
   "$@"
