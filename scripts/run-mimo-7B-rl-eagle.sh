#!/bin/bash
# MiMo-7B-RL on one node of 8 GPUs: its MTP layer is trained, and drafts for EAGLE.
#
# BASE_DIR: directory with checkpoints and data (default: /root). Other variables: see scripts/launch.sh. The recipe: see examples/mimo-7b/README.md.
source "$(dirname -- "${BASH_SOURCE[0]}")/launch.sh"
BASE_DIR="${BASE_DIR:-/root}"

launch mimo-7b/config.yaml \
   --hf-checkpoint "${BASE_DIR}/MiMo-7B-RL" \
   --ref-load "${BASE_DIR}/MiMo-7B-RL_torch_dist" \
   --load "${BASE_DIR}/MiMo-7B-RL-mtp_fuligo" \
   --save "${BASE_DIR}/MiMo-7B-RL-mtp_fuligo" \
   --prompt-data "${BASE_DIR}/dapo-math-17k/dapo-math-17k.jsonl" \
   --eval-prompt-data aime "${BASE_DIR}/aime-2024/aime-2024.jsonl" \
   "$@"
