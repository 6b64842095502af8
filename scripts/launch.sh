#!/usr/bin/env bash
# The one caller of msrun: launch.sh --ranks N [--max_restarts M] [HOSTS] -- PROGRAM [ARGUMENTS].
# HOSTS, for several hosts, on each the same but for the index (docs/hosts.md):
#   --hosts H --host_index I --master ADDRESS:PORT   with N ranks in all, ADDRESS the first host's, MINDGRPO_JOB_TOKEN set.
#
# Shows rank 0's output as it comes, keeps every rank's in a fresh log folder, returns the status of the
# first rank that failed (2: the user's input cannot work) and leaves no process of its own behind. The last
# line says which rank failed first, in which phase, and what can be done. A job that failed is started again
# up to M times where its run left off, unless the input cannot work or two starts came no further.
# Refuses a busy port and, where ARGUMENTS name a --config, a configuration that cannot work, before
# any rank starts. Reads MINDGRPO_PORT (default: a free one), MINDGRPO_LOG_DIR (default: output/logs),
# MINDGRPO_MAX_RESTARTS (default 0), MINDGRPO_STOP_SECONDS (how long ranks may take to end after Ctrl-C,
# default 60; a second Ctrl-C ends them at once) and MINDGRPO_FORK (0: every rank imports for itself; else
# ranks are forked from one process that has, where that is safe).
set -uo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
usage="usage: bash scripts/launch.sh --ranks N [--max_restarts M] [--hosts H --host_index I --master ADDRESS:PORT] -- \
PROGRAM [ARGUMENTS]"
# How long what is left of a job may take to end by itself once a rank has failed, and reward processes after it.
settle_tenths=20 sweep_tenths=15

# Our words have a way out of their own: bash reports killed jobs on standard error, which is closed to it.
exec 3>&2
say() { echo "mindgrpo: $1" >&3; }

refuse() {
    say "$1"
    exit 2
}

is_whole() { [[ "$1" =~ ^(0|[1-9][0-9]{0,4})$ ]]; }

read_arguments() { # sets `ranks`, `restarts_left`, what read_hosts sets, and the array `command`
    restarts_left="${MINDGRPO_MAX_RESTARTS:-0}" ranks="" hosts=1 host_index=0 master=""
    [ "${1:-}" = --ranks ] || refuse "$usage"
    while [ $# -ge 2 ]; do
        case "$1" in
        --ranks) ranks="$2" ;;
        --max_restarts) restarts_left="$2" ;;
        --hosts) hosts="$2" ;;
        --host_index) host_index="$2" ;;
        --master) master="$2" ;;
        *) break ;;
        esac
        shift 2
    done
    [ "${1:-}" = -- ] && [ $# -ge 2 ] || refuse "$usage"
    command=("${@:2}")
    is_whole "$ranks" && [ "$ranks" != 0 ] || refuse "--ranks $ranks is not a positive whole number ($usage)."
    is_whole "$restarts_left" || refuse "--max_restarts $restarts_left is not a whole number ($usage)."
    [ -f "${command[0]}" ] || refuse "there is no program ${command[0]}: give the path of a Python file ($usage)."
    read_hosts
}

read_hosts() { # sets `here`, the ranks of this host, and `first` of them
    is_whole "$hosts" && [ "$hosts" != 0 ] || refuse "--hosts $hosts is not a positive whole number ($usage)."
    is_whole "$host_index" && [ "$host_index" -lt "$hosts" ] ||
        refuse "--host_index $host_index is none of $hosts hosts: give 0 on the first, $((hosts - 1)) on the last."
    [ $((ranks % hosts)) -eq 0 ] ||
        refuse "$ranks ranks cannot be shared by $hosts hosts: hosts have equally many; change --ranks or --hosts."
    here=$((ranks / hosts)) first=$((host_index * ranks / hosts))
    unset MINDGRPO_RANKS_PER_HOST
    [ "$hosts" -gt 1 ] || return 0
    local port="${master##*:}" token="${MINDGRPO_JOB_TOKEN:-}"
    [[ "$port" =~ ^[1-9][0-9]{3,4}$ ]] && [ "$port" -lt 65535 ] && [ -n "${master%:*}" ] || refuse \
        "--master '$master' is not ADDRESS:PORT: give the first host's address and a port from 1024 to 65534 that is free there, and the one after it too."
    [ ${#token} -ge 16 ] || refuse \
        "MINDGRPO_JOB_TOKEN has ${#token} characters, but the ranks of several hosts know each other by a secret of at least 16: set the same on every host, such as from 'openssl rand -hex 16'."
    [ "$restarts_left" = 0 ] ||
        refuse "--max_restarts $restarts_left is for one host: leave it out, and start all $hosts hosts again with --resume_training true."
    export MINDGRPO_RANKS_PER_HOST="$here"
}

find_programs() {
    # A venv that is already active wins; else the one that setup_env.sh made.
    command -v msrun >/dev/null || PATH="$root/.venv/bin:$PATH"
    command -v msrun >/dev/null || refuse \
        "msrun is not on PATH and $root/.venv holds none: run 'source scripts/setup_env.sh' first."
}

choose_port() { # below the ephemeral range, or a rank's own connection may take it before the scheduler
    python - "${MINDGRPO_PORT:-}" <<'PYTHON' || exit 2
import random, socket, sys

def free(port):
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True

asked = sys.argv[1]
if asked and not (asked.isdecimal() and 1024 <= int(asked) <= 65535):
    sys.exit(f"mindgrpo: MINDGRPO_PORT={asked} is not a port from 1024 to 65535: set such a one or unset it.")
if asked and not free(int(asked)):
    sys.exit(f"mindgrpo: MINDGRPO_PORT={asked} is in use by another process: set a free port or unset it.")
port = asked or next(filter(free, random.sample(range(10000, 32000), 200)), None)
if port is None:
    sys.exit("mindgrpo: none of 200 ports from 10000 to 32000 is free: set MINDGRPO_PORT to a free one.")
print(port)
PYTHON
}

make_log_dir() {
    local base="${MINDGRPO_LOG_DIR:-$root/output/logs}"
    mkdir -p "$base" 2>/dev/null && logs="$(mktemp -d "$base/$(date +%Y%m%d-%H%M%S)-XXXX" 2>/dev/null)" ||
        refuse "the log folder $base cannot be written: set MINDGRPO_LOG_DIR to a folder that can."
    logs="$(cd "$logs" && pwd)"
    mkdir "$logs/status"
    touch "$logs/worker_$first.log" "$logs/msrun.log" "$logs/status/told"
    export MINDGRPO_JOB="$$-${logs##*-}"
}

set_environment() {
    local cores
    cores="$(nproc)"
    export GLOG_v="${GLOG_v:-3}"
    # For ranks that form MindSpore's cluster. A dead rank is noticed below, within a second; this only ends
    # ranks whose launcher died. Short limits raise false alarms while many ranks compile on few cores.
    export MS_NODE_TIMEOUT="${MS_NODE_TIMEOUT:-60}"
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > here ? cores / here : 1))}"
    # Larger blocks go back to the system when freed, so that memory given up shows.
    export MALLOC_MMAP_THRESHOLD_="${MALLOC_MMAP_THRESHOLD_:-1048576}"
    export PYTHONUNBUFFERED=1
    export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
    export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}" TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"
    # Ends msrun with this script, however that ends; ranks then end with msrun.
    ends_with_us=()
    setpriv --pdeathsig KILL true 2>/dev/null && ends_with_us=(setpriv --pdeathsig KILL)
}

# Every process of this job, and no other, carries its status folder in its environment.
our_processes() {
    grep -lszxF "MINDGRPO_STATUS_DIR=$logs/status" /proc/[0-9]*/environ | cut -d / -f 3
}

scores() { # a process of rewards: it ends with its rank, and ends what rewards have started
    grep -qszF 'import main; main()' "/proc/$1/cmdline" && grep -qszF reward.workers.keeper "/proc/$1/cmdline"
}

our_workers() { # without msrun and its scheduler: one rank is the job itself; forked ranks hear of signals from them
    local pid
    for pid in $(our_processes); do
        [ "$ranks" -gt 1 ] && [ "$pid" = "$job" ] && continue
        grep -qszxF "$root/mindgrpo/launch/fork_server.py" "/proc/$pid/cmdline" && continue
        scores "$pid" && continue
        grep -qszx 'MS_ROLE=MS_SCHED' "/proc/$pid/environ" || echo "$pid"
    done
}

signal() { # NAME PIDS...
    [ $# -gt 1 ] && kill -s "$@" 2>/dev/null
}

end_at_once() {
    local pid waited=0
    : >"$logs/status/ending" # what ends from here on is no cause
    for pid in $(our_processes); do scores "$pid" || signal KILL "$pid"; done
    while [ -n "$(our_processes)" ] && [ $((waited++)) -lt "$sweep_tenths" ]; do sleep 0.1; done
    signal KILL $(our_processes)
    # What ranks that were killed while they met have left.
    rm -f "/dev/shm/mindgrpo-$MINDGRPO_JOB-board"* "${TMPDIR:-/tmp}/mindgrpo-$MINDGRPO_JOB-board"*
}

ask_to_end() {
    local deadline=$((SECONDS + ${MINDGRPO_STOP_SECONDS:-60}))
    signal TERM $(our_workers)
    while [ -n "$(our_workers)" ] && [ $SECONDS -lt $deadline ]; do sleep 0.2; done
}

stopped() {
    end_at_once
    [ -z "$tail_job" ] || wait "$tail_job" 2>/dev/null
    say "stopped; full logs: $logs"
    exit "$1"
}

interrupted() {
    trap "trap '' INT TERM HUP; stopped $1" INT TERM HUP
    say "stopping the $here ranks of this job (once more: at once)"
    ask_to_end
    trap '' INT TERM HUP
    stopped "$1"
}

start_fork_server() { # ends this script when the check that it begins with says so
    local checked=1
    fork_server="mindgrpo-$$-${logs##*/}"
    exec 4< <(MINDGRPO_STATUS_DIR="$logs/status" exec python "$root/mindgrpo/launch/fork_server.py" \
        "$fork_server" "$ranks" "${command[@]:1}")
    read -r checked <&4 || checked=1
    exec 4<&-
    [ "$checked" -eq 0 ] && return
    end_at_once
    rm -r "$logs" && rmdir --ignore-fail-on-non-empty "${logs%/*}"
    exit "$checked"
}

start_job() {
    local worker="$root/mindgrpo/launch/worker.py" far=()
    local job_words=(python "$worker") log="$logs/worker_0.log" # one rank needs no cluster, so no scheduler and no port
    [ "$hosts" -eq 1 ] || far=(--master_addr="${master%:*}" --node_rank="$host_index")
    if [ "$ranks" -gt 1 ]; then
        log="$logs/msrun.log"
        job_words=(${ends_with_us[@]+"${ends_with_us[@]}"} msrun --worker_num="$ranks" --local_worker_num="$here"
            --master_port="$port" ${far[@]+"${far[@]}"} --join=True --log_dir="$logs" --tail_worker_log="$ranks"
            -- "$worker")
    fi
    # Where a cluster's scheduler tells every process to end, only this script and the ranks take it as meant for them.
    (
        trap '' TERM HUP
        exec setsid env MINDGRPO_STATUS_DIR="$logs/status" MINDGRPO_FORK_SERVER="$fork_server" \
            "${job_words[@]}" "${command[@]}" >"$log" 2>&1
    ) &
    job=$!
    (
        trap '' TERM HUP
        # By name (-F), as full logs move aside.
        exec tail -q -n +1 -s 0.2 --pid="$job" -F "$logs/worker_$first.log" "$logs/status/told" 2>/dev/null
    ) &
    tail_job=$!
}

has_failed() { # a rank, while others may still wait for it
    [ -e "$logs/status/stopped" ] || grep -q 'exit with exception' "$logs/msrun.log" ||
        grep -qsE '^(status|ended) -?[1-9]' "$logs"/status/rank_*
}

wait_for_job() { # sets `ended`
    local waited=0
    while kill -0 "$job" 2>/dev/null; do
        if has_failed && [ $((waited++)) -ge "$settle_tenths" ]; then
            end_at_once
        elif [ "$waited" -gt 0 ]; then
            sleep 0.1
        else
            sleep 0.2
        fi
    done
    wait "$job"
    ended=$?
    end_at_once
    wait "$tail_job"
}

run_once() { # sets `result`
    MINDGRPO_LAUNCHED_AT="$(date +%s.%N)"
    export MINDGRPO_LAUNCHED_AT
    port=none
    if [ "$hosts" -gt 1 ]; then
        port="${master##*:}"
    elif [ "$ranks" -gt 1 ]; then
        port="$(choose_port)" || exit 2
    fi
    make_log_dir
    start_fork_server
    if [ "$hosts" -gt 1 ]; then
        say "host $host_index of $hosts: $here of $ranks ranks, meeting at $master, full logs: $logs"
    else
        [ "$ranks" -eq 1 ] && say "1 rank, full logs: $logs" || say "$ranks ranks on port $port, full logs: $logs"
    fi
    start_job
    trap 'interrupted 130' INT
    trap 'interrupted 143' TERM
    trap 'interrupted 129' HUP
    wait_for_job 2>/dev/null
    python -m mindgrpo.health.exit_report "$logs" "$ended" 2>&3
    result=$?
    return 0
}

prepare_restart() { # false where the job is not to be started again
    local step=0 directory
    case "$result" in 0 | 2 | 130 | 143) return 1 ;; esac # well, not to be helped, or told to end
    [ "$restarts_left" -gt 0 ] || return
    read -r step 2>/dev/null <"$logs/status/step"
    stalled=$((step > furthest ? 0 : stalled + 1))
    furthest=$((step > furthest ? step : furthest))
    if [ "$stalled" -ge 2 ]; then
        say "not started again: the last two starts came no further than step $furthest"
        return 1
    fi
    restarts_left=$((restarts_left - 1)) starts=$((starts + 1))
    if [ ${#resume[@]} -eq 0 ] && read -r directory 2>/dev/null <"$logs/status/directory"; then
        resume=(--resume_training true --output_dir "$directory")
        command+=("${resume[@]}")
    fi
    say "start $((starts + 1)), $restarts_left more after it${directory:+, goes on with the run in $directory}"
    sleep "$((starts < 10 ? starts : 10))"
}

read_arguments "$@"
find_programs
set_environment
tail_job="" resume=() starts=0 stalled=0 furthest=-1
while run_once && prepare_restart; do :; done
exit "$result"
