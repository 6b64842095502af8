#!/usr/bin/env bash
# Trains Qwen2.5 as grpo_config.yaml says. Name what it needs in the environment; further arguments go to main.py.
#   QWEN_MODEL_PATH=/models/Qwen2.5-7B-Instruct DATASET_FILE=/data/gsm8k_train.mindrecord bash run_grpo.sh
set -euo pipefail

: "${QWEN_MODEL_PATH:?mindgrpo: set QWEN_MODEL_PATH to the Hugging Face directory of the model}"
: "${DATASET_FILE:?mindgrpo: set DATASET_FILE to the training data (rlhf_data.py makes it)}"
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd "$here/../../.." && pwd)"
cd "$root"
exec bash scripts/launch.sh --ranks "${RANKS:-8}" -- "$here/main.py" \
    --config "$here/grpo_config.yaml" \
    --actor_checkpoint_path "$QWEN_MODEL_PATH" \
    --dataset_file "$DATASET_FILE" \
    "$@"
