#!/usr/bin/env bash
# Sets up and runs the main job on a bundled example: quickstart.sh [--ranks N] [--example NAME] [main.py arguments].
# Downloads no model and no data. --ranks is 8 (the layouts of the example's file), 4, 2 or 1; main.py
# arguments that follow, dotted overrides above all, win over the layout that --ranks picks.
set -euo pipefail

ranks=8
example=tiny_arithmetic
arguments=()
while [ $# -gt 0 ]; do
    case "$1" in
    -h | --help)
        cat <<'HELP'
usage: quickstart.sh [--ranks 8|4|2|1] [--example tiny_arithmetic|tiny_moe|tiny_shapes] [--key value ...]

Makes .venv and trains an example of examples/grpo with it. Downloads no model and no data.

  --ranks N           number of ranks: 8 (default), 4, 2 or 1; sets the layouts
  --example NAME      tiny_arithmetic (default); tiny_moe, the same task for a mixture of experts; or tiny_shapes,
                      questions about pictures, whose first run draws them and makes the model (some minutes)
  --output_dir DIR    folder of the run (default: output/<example>/<time>)
  --key value         any key of the configuration, for example --rl_config.max_steps 20

All keys: python -m mindgrpo train --help-keys [SECTION], or docs/configuration.md.
HELP
        exit 0
        ;;
    --ranks)
        ranks="${2:-}"
        shift
        ;;
    --ranks=*) ranks="${1#--ranks=}" ;;
    --example)
        example="${2:-}"
        shift
        ;;
    --example=*) example="${1#--example=}" ;;
    # The job runs in the repository's folder; where it writes is meant from the caller's.
    --output_dir)
        # Without a folder it goes on as it is, for main.py to refuse.
        [ -z "${2:-}" ] && arguments+=("$1") || arguments+=("$1" "$(realpath -m -- "$2")")
        shift
        ;;
    --output_dir=*) arguments+=(--output_dir "$(realpath -m -- "${1#--output_dir=}")") ;;
    *) arguments+=("$1") ;;
    esac
    [ $# -gt 0 ] && shift
done

case "$example" in
tiny_arithmetic | tiny_moe | tiny_shapes) ;;
*)
    echo "mindgrpo: --example ${example:-(nothing)} is not one of tiny_arithmetic, tiny_moe, tiny_shapes: give one of these, or start scripts/launch.sh with a configuration of your own." >&2
    exit 2
    ;;
esac

layout() { # SECTION data_parallel model_parallel pipeline_stage
    local key="--$1.parallel_config"
    layouts+=("$key.data_parallel" "$2" "$key.model_parallel" "$3" "$key.pipeline_stage" "$4")
    if [ "$example" = tiny_moe ]; then
        layouts+=("$key.expert_parallel" "$3")
    fi
}

layouts=()
case "$ranks" in
8) ;;
4)
    layout actor_config 1 2 2
    layout generate_config 2 2 1
    ;;
2)
    layout actor_config 1 2 1
    layout generate_config 1 2 1
    ;;
1)
    layout actor_config 1 1 1
    layout generate_config 1 1 1
    ;;
*)
    echo "mindgrpo: --ranks ${ranks:-(nothing)} is not one of 1, 2, 4, 8: give one of these, or start scripts/launch.sh with layouts of your own." >&2
    exit 2
    ;;
esac

scripts="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$scripts/setup_env.sh"
# As `--generate_config.use_vllm 1` or with =: vLLM has an environment of its own.
case " ${arguments[*]-} " in
*" --generate_config.use_vllm 1 "* | *" --generate_config.use_vllm=1 "*)
    [ -n "${MINDGRPO_VLLM_PYTHON:-}" ] || bash "$scripts/setup_env.sh" --vllm
    ;;
esac
[ "$PWD" = "$MINDGRPO_ROOT" ] || MINDGRPO_LAUNCHER="cd $(printf %q "$MINDGRPO_ROOT") && bash scripts/launch.sh"
export MINDGRPO_LAUNCHER="${MINDGRPO_LAUNCHER:-}"
cd "$MINDGRPO_ROOT"
shapes=examples/grpo/tiny_shapes
if [ "$example" = tiny_shapes ] && [ ! -e "$shapes/made/model/model.safetensors" ]; then
    "$MINDGRPO_PYTHON" "$shapes/make_shapes.py"
    "$MINDGRPO_PYTHON" "$shapes/make_vision_model.py"
fi
exec bash scripts/launch.sh --ranks "$ranks" -- examples/grpo/qwen_grpo_tutorial/main.py \
    --config "examples/grpo/$example/grpo_config.yaml" \
    ${layouts[@]+"${layouts[@]}"} ${arguments[@]+"${arguments[@]}"}
