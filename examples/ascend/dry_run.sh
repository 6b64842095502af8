#!/usr/bin/env bash
# Compiles the training graphs of a configuration with MindSpore's simulation of devices: needs CANN, and no NPU.
#   bash examples/ascend/dry_run.sh
#   bash examples/ascend/dry_run.sh --config my.yaml --actor_config.parallel_config.model_parallel 8
# Without --config it is the users' Qwen2.5-7B on 8 NPUs (examples/grpo/qwen_grpo_tutorial/grpo_config.yaml); every
# other flag is a key of it, layouts among them. Needs no weights and no data: shapes come from actor_config.load or
# model_config. One rank of each pipeline stage is compiled, one after the other, as the ranks of a stage have the
# same graphs. Reads MS_SIMULATION_LEVEL (0: compiles; 1, the default here: also counts memory) and DRY_RUN_DIR
# (output/dry_run), which takes a log of each rank.
# What a level does: https://www.mindspore.cn/tutorials/en/r2.9.0/debug/dryrun.html
# Ends with 0 where all graphs compile, with 2 where what it is given cannot work, with 3 where CANN is not installed,
# else with the status of the rank that failed.
#
# THIS SCRIPT WAS NEVER RUN WITH CANN: no machine with it was within reach. Tests run it up to the missing CANN, and run
# compile_graphs.py, which it starts, on processors with a tiny model.
set -uo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd "$here/../.." && pwd)"
configs=()
keys=()
while [ $# -gt 0 ]; do
    case "$1" in
    -h | --help)
        sed -n '2,/^# else with/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    --config=*) configs+=(--config "$(realpath -m -- "${1#--config=}")") ;;
    --config)
        [ -n "${2:-}" ] || { echo "mindgrpo: --config names no file; give one." >&2; exit 2; }
        configs+=(--config "$(realpath -m -- "$2")")
        shift
        ;;
    *) keys+=("$1") ;;
    esac
    shift
done

if [ -z "${ASCEND_HOME_PATH:-${ASCEND_TOOLKIT_HOME:-}}" ]; then
    echo "mindgrpo: CANN is not installed here, or its set_env.sh was not sourced (ASCEND_HOME_PATH is not set), and MindSpore's simulation needs its libraries: install CANN and source its set_env.sh. Nothing was compiled." >&2
    exit 3
fi

# A venv that is already active wins; else the one that setup_env.sh made.
command -v msrun >/dev/null || PATH="$root/.venv/bin:$PATH"
if ! command -v msrun >/dev/null; then
    echo "mindgrpo: msrun is not on PATH and $root/.venv holds none: run 'source scripts/setup_env.sh' first." >&2
    exit 2
fi
logs="$(realpath -m -- "${DRY_RUN_DIR:-$root/output/dry_run}")"
mkdir -p "$logs" || exit 2
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
cd "$root" || exit 2
# The device is simulated: /dev need not have it, and a group of ranks is this one process.
[ ${#configs[@]} -gt 0 ] || configs=(--config "$root/examples/grpo/qwen_grpo_tutorial/grpo_config.yaml")
given=("${configs[@]}" --context.device_target Ascend ${keys[@]+"${keys[@]}"})
unset MS_ROLE MS_WORKER_NUM RANK_TABLE_FILE
ranks="$(python "$here/compile_graphs.py" --ranks "${given[@]}")" || exit $?
read -r size stages <<<"$ranks"
export MS_SIMULATION_LEVEL="${MS_SIMULATION_LEVEL:-1}" RANK_SIZE="$size"
# At the level of information MindSpore writes the memory that it counted.
[ "$MS_SIMULATION_LEVEL" = 0 ] || export GLOG_v="${GLOG_v:-1}"
for rank in $stages; do
    echo "rank $rank of $size, log: $logs/rank_$rank.log"
    RANK_ID="$rank" DEVICE_ID=0 python "$here/compile_graphs.py" "${given[@]}" >"$logs/rank_$rank.log" 2>&1
    status=$?
    grep -a -E '^(compiled |rank |mindgrpo: )|peak memory usage|HBM memory size|MOC memory size' "$logs/rank_$rank.log"
    if [ "$status" -ne 0 ]; then
        echo "mindgrpo: rank $rank ended with status $status; $logs/rank_$rank.log has its words." >&2
        exit "$status"
    fi
done
