#!/usr/bin/env bash
# Sets up, then runs format, lint, types and every test. All of them run; any failure fails the whole.
# Further arguments go to pytest, after `tests`.
# The tests of vLLM itself need .venv-vllm and are skipped without it; with MINDGRPO_TEST_VLLM=1 it is made (1.8 GB).
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
source scripts/setup_env.sh dev

status=0
check() {
    echo "== $*"
    "$@" || status=1
}

make_vllm() {
    local words
    if [ -z "${MINDGRPO_TEST_VLLM:-}" ]; then
        [ -e .venv-vllm ] || echo "== going on without .venv-vllm: set MINDGRPO_TEST_VLLM=1 to install it (1.8 GB)"
        return
    fi
    echo "== bash scripts/setup_env.sh --vllm"
    words="$(bash scripts/setup_env.sh --vllm 2>&1)" && echo "$words" ||
        echo "== going on without .venv-vllm: ${words##*mindgrpo: }"
}

# Tests start hundreds of Pythons: each would compile what it imports, an engine all of vLLM and torch. What pytest's
# processes import is compiled beside the checks, once and not by each of them.
unset PYTHONDONTWRITEBYTECODE
"$MINDGRPO_PYTHON" -m pytest -q tests --collect-only >/dev/null 2>&1 &
check "$MINDGRPO_PYTHON" -m ruff format --check .
check "$MINDGRPO_PYTHON" -m ruff check .
check "$MINDGRPO_PYTHON" -m mypy
wait
make_vllm
[ "$status" -eq 0 ] || echo "== lint or types failed (above); the tests follow"
# Compiling allocates many small blocks: with mimalloc in place of glibc's allocator it takes a quarter less time. What
# is freed goes back to the system at once, as tests of memory expect.
for allocator in "$(dirname "$MINDGRPO_PYTHON")"/../lib/python*/site-packages/cmeel.prefix/lib/libmimalloc.so; do
    [ ! -e "$allocator" ] || export LD_PRELOAD="${LD_PRELOAD:-$allocator}" MIMALLOC_PURGE_DELAY=0
done
# Last, so that pytest's closing line is the last line.
check "$MINDGRPO_PYTHON" -m pytest -q tests -n 4 --no-loadscope-reorder "$@"
exit "$status"
