#!/usr/bin/env bash
# Sets up, then runs format, lint, types and every test. All of them run; any failure fails the whole.
# Further arguments go to pytest, after `tests`.
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
source scripts/setup_env.sh dev

status=0
check() {
    echo "== $*"
    "$@" || status=1
}

check "$MINDGRPO_PYTHON" -m ruff format --check .
check "$MINDGRPO_PYTHON" -m ruff check .
check "$MINDGRPO_PYTHON" -m mypy
[ "$status" -eq 0 ] || echo "== lint or types failed (above); the tests follow"
# Last, so that pytest's closing line is the last line.
check "$MINDGRPO_PYTHON" -m pytest -q tests -n 2 --no-loadscope-reorder "$@"
exit "$status"
