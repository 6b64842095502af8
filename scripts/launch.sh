#!/usr/bin/env bash
# The one caller of msrun: launch.sh --ranks N -- PROGRAM [ARGUMENTS].
#
# Shows rank 0's output as it comes, keeps every rank's in a fresh log folder, returns the status of the
# first rank that failed (2: the user's input cannot work) and leaves no process of its own behind.
# Refuses a busy port and, where ARGUMENTS name a --config, a configuration that cannot work, before
# any rank starts. Reads MINDGRPO_PORT (default: a free one), MINDGRPO_LOG_DIR (default: output/logs),
# MINDGRPO_STOP_SECONDS (how long ranks may take to end after Ctrl-C, default 10) and MINDGRPO_FORK
# (0: every rank imports for itself; else ranks are forked from one process that has, where that is safe).
set -uo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
usage="usage: bash scripts/launch.sh --ranks N -- PROGRAM [ARGUMENTS]"

# Our words have a way out of their own: bash reports killed jobs on standard error, which is closed to it.
exec 3>&2
say() { echo "mindgrpo: $1" >&3; }

refuse() {
    say "$1"
    exit 2
}

read_arguments() {
    [ "${1:-}" = --ranks ] && [ "${3:-}" = -- ] && [ $# -ge 4 ] || refuse "$usage"
    ranks="$2" program="$4"
    [[ "$ranks" =~ ^[1-9][0-9]{0,4}$ ]] || refuse "--ranks $ranks is not a positive whole number ($usage)."
    [ -f "$program" ] || refuse "there is no program $program: give the path of a Python file ($usage)."
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
    touch "$logs/worker_0.log" "$logs/msrun.log"
}

set_environment() {
    local cores
    cores="$(nproc)"
    export GLOG_v="${GLOG_v:-3}"
    # For ranks that form MindSpore's cluster. A dead rank is noticed below, within a second; this only ends
    # ranks whose launcher died. Short limits raise false alarms while many ranks compile on few cores.
    export MS_NODE_TIMEOUT="${MS_NODE_TIMEOUT:-60}"
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > ranks ? cores / ranks : 1))}"
    # Larger blocks go back to the system when freed, so that memory given up shows.
    export MALLOC_MMAP_THRESHOLD_="${MALLOC_MMAP_THRESHOLD_:-1048576}"
    export PYTHONUNBUFFERED=1
    export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
    export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}" TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"
    MINDGRPO_LAUNCHED_AT="$(date +%s.%N)"
    export MINDGRPO_LAUNCHED_AT
}

# Every process of this job, and no other, carries its status folder in its environment.
our_processes() {
    grep -lszxF "MINDGRPO_STATUS_DIR=$logs/status" /proc/[0-9]*/environ | cut -d / -f 3
}

our_workers() { # without msrun and its scheduler: one rank is the job itself; forked ranks hear of signals from them
    local pid
    for pid in $(our_processes); do
        [ "$ranks" -gt 1 ] && [ "$pid" = "$job" ] && continue
        grep -qszxF "$root/scripts/fork_server.py" "/proc/$pid/cmdline" && continue
        grep -qszx 'MS_ROLE=MS_SCHED' "/proc/$pid/environ" || echo "$pid"
    done
}

signal() { # NAME PIDS...
    [ $# -gt 1 ] && kill -s "$@" 2>/dev/null
}

end_job() { # lets the ranks end by themselves first when $1 is TERM
    local deadline=$((SECONDS + ${MINDGRPO_STOP_SECONDS:-10}))
    if [ "$1" = TERM ]; then
        signal TERM $(our_workers)
        while [ -n "$(our_workers)" ] && [ $SECONDS -lt $deadline ]; do sleep 0.2; done
    fi
    signal KILL $(our_processes)
}

interrupted() {
    trap '' INT TERM HUP
    say "stopping the $ranks ranks of this job"
    end_job TERM
    wait "$tail_job" 2>/dev/null
    say "stopped; full logs: $logs"
    exit "$1"
}

start_fork_server() { # ends this script when the check that it begins with says so
    local checked=1
    fork_server="mindgrpo-$$-${logs##*/}"
    exec 4< <(MINDGRPO_STATUS_DIR="$logs/status" exec python "$root/scripts/fork_server.py" \
        "$fork_server" "$ranks" "$@")
    read -r checked <&4 || checked=1
    exec 4<&-
    [ "$checked" -eq 0 ] && return
    end_job KILL
    rm -r "$logs" && rmdir --ignore-fail-on-non-empty "${logs%/*}"
    exit "$checked"
}

start_job() {
    local worker="$root/scripts/worker.py"
    if [ "$ranks" -eq 1 ]; then
        # One rank needs no cluster, so no scheduler and no port.
        setsid env MINDGRPO_STATUS_DIR="$logs/status" MINDGRPO_FORK_SERVER="$fork_server" \
            python "$worker" "$@" >"$logs/worker_0.log" 2>&1 &
    else
        setsid env MINDGRPO_STATUS_DIR="$logs/status" MINDGRPO_FORK_SERVER="$fork_server" \
            msrun --worker_num="$ranks" --local_worker_num="$ranks" --master_port="$port" --join=True --log_dir="$logs" \
            --tail_worker_log="$ranks" -- "$worker" "$@" >"$logs/msrun.log" 2>&1 &
    fi
    job=$!
    tail -n +1 -s 0.2 --pid="$job" -f "$logs/worker_0.log" 2>/dev/null &
    tail_job=$!
}

wait_for_job() { # sets `ended`
    while kill -0 "$job" 2>/dev/null; do
        if grep -q 'exit with exception' "$logs/msrun.log"; then
            # msrun has killed the other ranks and now waits for its scheduler to time out.
            sleep 2
            end_job KILL
        fi
        sleep 0.2
    done
    wait "$job"
    ended=$?
    end_job KILL
    wait "$tail_job"
}

first_failed() { # prints "RANK STATUS" of the rank that failed first, of those that wrote a status
    # The user's mistake is every rank's: rank 0 has told it already.
    if grep -qs '^status 2 ' "$logs/status/rank_0"; then
        echo 0 2
        return
    fi
    grep -H '^status [1-9]' "$logs"/status/rank_* 2>/dev/null |
        sed -E 's/.*rank_([0-9]+):status ([0-9]+) (.*)/\3 \1 \2/' | sort -n | head -n 1 | cut -d ' ' -f 2,3
}

killed_rank() { # prints "RANK CODE" of the rank that msrun saw end without a status of its own
    local pid code record
    read -r pid code < <(sed -nE \
        's/.*Worker process ([0-9]+) exit with exception. Error code: (-?[0-9]+).*/\1 \2/p' "$logs/msrun.log")
    record="$(grep -lx "pid ${pid:-none}" "$logs"/status/rank_* 2>/dev/null)"
    [ -z "$record" ] || echo "${record##*rank_} $code"
}

in_words() { # an exit status; Python tells a signal as -9, the shell as 137
    case "$1" in
    -*) echo "killed by signal ${1#-}" ;;
    12[89] | 1[3-9]?) echo "killed by signal $(($1 - 128))" ;;
    *) echo "status $1" ;;
    esac
}

report_failure() { # sets `result`
    local rank="" code=""
    read -r rank code < <(first_failed)
    result="${code:-1}"
    [ -n "$rank" ] || read -r rank code < <(killed_rank)
    [ -n "$rank" ] || [ "$ranks" -gt 1 ] || rank=0 code="$ended"
    if [ -z "$rank" ]; then
        say "the job ended with status $ended before a rank did; the last lines of msrun:"
        tail -n 20 "$logs/msrun.log" >&3
    elif [ "$rank" != 0 ]; then
        say "rank $rank failed first ($(in_words "$code")); its last lines:"
        tail -n 30 "$logs/worker_$rank.log" >&3
    elif [ "$result" -ne 2 ]; then
        say "rank 0 failed first ($(in_words "$code")); its last lines are above"
    fi
    say "full logs: $logs"
}

read_arguments "$@"
shift 3
find_programs
port=none
[ "$ranks" -eq 1 ] || port="$(choose_port)" || exit 2
make_log_dir
set_environment
start_fork_server "${@:2}"
[ "$ranks" -eq 1 ] && say "1 rank, full logs: $logs" || say "$ranks ranks on port $port, full logs: $logs"
start_job "$@"
trap 'interrupted 130' INT
trap 'interrupted 143' TERM
trap 'interrupted 129' HUP
wait_for_job 2>/dev/null
result=0
if [ "$ended" -ne 0 ] || [ -n "$(first_failed)" ]; then report_failure; fi
exit "$result"
