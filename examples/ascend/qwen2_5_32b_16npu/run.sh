#!/usr/bin/env bash
# Qwen2.5-32B-Instruct on 16 NPUs of two hosts; further arguments go to main.py. Planned, never run on NPUs.
#   on each host: HOST_INDEX=0 MASTER=10.0.0.1:17800 MODEL=/models/Qwen2.5-32B-Instruct DATA=/data/train.jsonl bash run.sh
set -euo pipefail

: "${MODEL:?mindgrpo: set MODEL to the Hugging Face directory of Qwen2.5-32B-Instruct}"
: "${DATA:?mindgrpo: set DATA to the training data, such as a JSONL file (docs/data.md)}"
: "${HOST_INDEX:?mindgrpo: set HOST_INDEX to 0 on the first host and 1 on the second}"
: "${MASTER:?mindgrpo: set MASTER to ADDRESS:PORT of the first host}"
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
cd "$here/../../.."
exec bash scripts/launch.sh --ranks 16 --hosts 2 --host_index "$HOST_INDEX" --master "$MASTER" -- \
    examples/grpo/qwen_grpo_tutorial/main.py \
    --config "$here/grpo_config.yaml" --actor_config.load "$MODEL" --rl_config.dataset_file "$DATA" "$@"
