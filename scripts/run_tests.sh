#!/usr/bin/env bash
# Sets up, then runs format, lint, types and tests. All of them run; any failure fails the whole.
# docs/testing.md describes tiers and shards.
set -uo pipefail

usage='usage: run_tests.sh [--all | --shard NAME | --changed [REV]] [pytest arguments]
       run_tests.sh tests/FILE.py[::TEST]... [pytest arguments]

Without a flag: lint, types and the quick tier (about three minutes on two cores). With files: all tests of these files alone.

  --all            every test, with a vLLM of its own if MINDGRPO_TEST_VLLM=1 (1.8 GB)
  --shard NAME     one part of --all: in-process, processes, ranks, environments-of-others or repository
  --changed [REV]  the quick tier, and every test file whose imports reach what changed since REV (default: HEAD)'

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

arguments=()
selection=quick
case "${1:-}" in
-h | --help)
    echo "$usage"
    exit 0
    ;;
--all)
    selection=all
    arguments=(--tier all)
    shift
    ;;
--shard | --shard=*)
    selection=shard
    [ "$1" = --shard ] && shift || set -- "${1#--shard=}" "${@:2}"
    case "${1:-}" in
    in-process | processes | ranks | environments-of-others | repository) ;;
    *)
        echo "mindgrpo: --shard ${1:-(nothing)} is none of in-process, processes, ranks, environments-of-others, repository: name one of these." >&2
        exit 2
        ;;
    esac
    arguments=(--shard "$1")
    shift
    ;;
--changed | --changed=*)
    revision=HEAD
    case "$1" in
    --changed=*) revision="${1#--changed=}" ;;
    *)
        case "${2:-}" in
        "" | -*) ;;
        *)
            revision="$2"
            shift
            ;;
        esac
        ;;
    esac
    git rev-parse --quiet --verify "$revision^{commit}" >/dev/null || {
        echo "mindgrpo: --changed $revision: git knows no such revision: name a commit, a branch or a tag." >&2
        exit 2
    }
    arguments=(--tier quick --changed "$revision")
    shift
    ;;
tests/*) selection=files ;;
*) arguments=(--tier quick) ;;
esac
# Files in the place of a flag are all that runs.
files=(tests)
if [ "$selection" = files ]; then
    files=()
    while [[ "${1:-}" = tests/* ]]; do
        files+=("$1")
        shift
    done
fi

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

# Tests start hundreds of Pythons, each of which would compile what it imports. What pytest's processes import is compiled
# beside the checks, once and not by each of them.
unset PYTHONDONTWRITEBYTECODE
if [ "$selection" != shard ] && [ "$selection" != files ]; then
    [ -d tests/__pycache__ ] || "$MINDGRPO_PYTHON" -m pytest -q tests "${arguments[@]}" --collect-only >/dev/null 2>&1 &
    check "$MINDGRPO_PYTHON" -m ruff format --check .
    check "$MINDGRPO_PYTHON" -m ruff check .
    check "$MINDGRPO_PYTHON" -m mypy
    wait
fi
if [ "$selection" != quick ] && [ "$selection" != files ]; then
    make_vllm
    # A file's result must not hang on what ran before it.
    seed="$(od -An -N2 -tu2 /dev/urandom | tr -d ' ')"
    echo "== test files run in the order of --file-order $seed"
    arguments+=(--file-order "$seed" --durations 10)
fi
[ "$status" -eq 0 ] || echo "== lint or types failed (above); the tests follow"
# Compiling allocates many small blocks: with mimalloc in place of glibc's allocator it takes a quarter less time. What
# is freed goes back to the system at once, as tests of memory expect.
for allocator in "$(dirname "$MINDGRPO_PYTHON")"/../lib/python*/site-packages/cmeel.prefix/lib/libmimalloc.so; do
    [ ! -e "$allocator" ] || export LD_PRELOAD="${LD_PRELOAD:-$allocator}" MIMALLOC_PURGE_DELAY=0
done
# Last, so that pytest's closing line, or the quick tier's, is the last line.
check "$MINDGRPO_PYTHON" -m pytest -q "${files[@]}" -n 4 "${arguments[@]}" "$@"
exit "$status"
