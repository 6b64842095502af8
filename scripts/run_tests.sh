#!/usr/bin/env bash
# Sets up, then runs format, lint, types and every test. All of them run; any failure fails the whole.
# Further arguments go to pytest, after `tests`.
# The tests of vLLM itself need .venv-vllm. MINDGRPO_TEST_VLLM: 0 does not make it, 1 makes it whatever its size; else it
# is made where pip's indexes have torch's small build (1.8 GB).
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
source scripts/setup_env.sh dev

status=0
check() {
    echo "== $*"
    "$@" || status=1
}

make_vllm() {
    local flags="--only_small" seconds=1200 hint=" (MINDGRPO_TEST_VLLM=1 makes it whatever its size)" words
    case "${MINDGRPO_TEST_VLLM:-}" in
    0)
        echo "== going on without making .venv-vllm: MINDGRPO_TEST_VLLM is 0"
        return
        ;;
    1) flags="" seconds=3600 hint="" ;;
    esac
    echo "== bash scripts/setup_env.sh --vllm $flags"
    # shellcheck disable=SC2086
    words="$(timeout "$seconds" bash scripts/setup_env.sh --vllm $flags 2>&1)"
    case $? in
    0) echo "$words" ;;
    124) echo "== going on without .venv-vllm: it took more than $seconds s" ;;
    *) echo "== going on without .venv-vllm$hint: ${words##*mindgrpo: }" ;;
    esac
}

check "$MINDGRPO_PYTHON" -m ruff format --check .
check "$MINDGRPO_PYTHON" -m ruff check .
check "$MINDGRPO_PYTHON" -m mypy
make_vllm
[ "$status" -eq 0 ] || echo "== lint or types failed (above); the tests follow"
# Last, so that pytest's closing line is the last line.
check "$MINDGRPO_PYTHON" -m pytest -q tests -n 2 --no-loadscope-reorder "$@"
exit "$status"
