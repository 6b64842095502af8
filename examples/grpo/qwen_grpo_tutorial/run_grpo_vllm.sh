#!/usr/bin/env bash
# Trains Qwen2.5 as grpo_config.yaml says, with the flags and the environment that users' own scripts of this name have.
#   QWEN_MODEL_PATH=/models/Qwen2.5-7B-Instruct DATASET_FILE=/data/gsm8k_train.mindrecord bash run_grpo_vllm.sh
#   bash run_grpo_vllm.sh --tiny      the bundled model and data; installs what is missing, vLLM (1.8 GB) included
# Further arguments go to main.py. Reads RANKS (8), MINDGRPO_CONFIG (grpo_config.yaml beside this script) and
# SAVE_CHECKPOINT_DIR (where the model goes; without it, the run's folder). Runs in the foreground, so that its end
# and its status are seen; `nohup bash run_grpo_vllm.sh > vllm.log 2>&1 &` puts it behind.
#
# vLLM generates where the configuration says use_vllm: 1; docs/vllm.md says how it is installed.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd "$here/../../.." && pwd)"
tiny="$root/examples/grpo/tiny_arithmetic"
rewards=(--verifier_function "qwen_accuracy_reward,format_reward" --verifier_weight "1.0,1.0")
if [ "${1:-}" = --tiny ]; then
    shift
    bash "$root/scripts/setup_env.sh" --vllm
    QWEN_MODEL_PATH="$tiny/model" DATASET_FILE="$tiny/train.jsonl" MINDGRPO_CONFIG="$tiny/grpo_config.yaml"
    rewards=()
    set -- --generate_config.use_vllm 1 "$@"
fi

missing=""
for name in QWEN_MODEL_PATH DATASET_FILE; do
    [ -n "${!name:-}" ] || missing="$missing $name"
done
if [ -n "$missing" ]; then
    echo "mindgrpo: set$missing in the environment: the model's Hugging Face directory is QWEN_MODEL_PATH, the training data is DATASET_FILE (rlhf_data.py makes it)." >&2
    exit 2
fi

# The framework's own settings of users' scripts, where they are not set already.
export MS_ALLOC_CONF="${MS_ALLOC_CONF:-memory_tracker:False,enable_vmm:True}"
export HCCL_EXEC_TIMEOUT="${HCCL_EXEC_TIMEOUT:-7200}"

# Paths are meant from the caller's folder; the job runs in the repository's, as its configurations expect.
model="$(realpath -m -- "$QWEN_MODEL_PATH")"
data="$(realpath -m -- "$DATASET_FILE")"
config="$(realpath -m -- "${MINDGRPO_CONFIG:-$here/grpo_config.yaml}")"
save=()
[ -z "${SAVE_CHECKPOINT_DIR:-}" ] || save=(--save_checkpoint_dir "$(realpath -m -- "$SAVE_CHECKPOINT_DIR")")
cd "$root"
exec bash scripts/launch.sh --ranks "${RANKS:-8}" -- "$here/main.py" \
    --config "$config" \
    --tokenizer_dir "$model" \
    --dataset_file "$data" \
    ${save[@]+"${save[@]}"} \
    --actor_checkpoint_path "$model" \
    --ref_checkpoint_path "$model" \
    --generate_checkpoint_path "$model" \
    ${rewards[@]+"${rewards[@]}"} \
    "$@"
