#!/usr/bin/env bash
# Qwen2.5-VL-7B-Instruct on 8 NPUs of one host; further arguments go to main.py. Planned, never run on NPUs.
#   MODEL=/models/Qwen2.5-VL-7B-Instruct DATA=/data/geometry3k/train.parquet bash run.sh
set -euo pipefail

: "${MODEL:?mindgrpo: set MODEL to the Hugging Face directory of Qwen2.5-VL-7B-Instruct}"
: "${DATA:?mindgrpo: set DATA to the training data, such as a Parquet file (docs/data.md)}"
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
cd "$here/../../.."
exec bash scripts/launch.sh --ranks 8 -- examples/grpo/qwen_grpo_tutorial/main.py \
    --config "$here/grpo_config.yaml" --actor_config.load "$MODEL" --rl_config.dataset_file "$DATA" "$@"
