#!/usr/bin/env bash
# Runs the kernel tests with a library that AddressSanitizer and UndefinedBehaviorSanitizer watch.
# Further arguments go to pytest in place of the tests' files, e.g. tests/test_kernels.py tests/test_slots.py.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${MINDGRPO_PYTHON:-.venv/bin/python}"

compiler="$(command -v gcc || true)"
address="$([ -n "$compiler" ] && "$compiler" -print-file-name=libasan.so || true)"
undefined="$([ -n "$compiler" ] && "$compiler" -print-file-name=libubsan.so || true)"
if [ ! -f "$address" ] || [ ! -f "$undefined" ]; then
    echo "skipped: there is no gcc with libasan and libubsan on this machine; install gcc"
    exit 0
fi

export CC="$compiler"
export MINDGRPO_NATIVE_FLAGS="-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all"
"$python" -c "from mindgrpo.backend.kernels.native.library import build; build()"
# Python and MindSpore keep memory to the end on purpose: what leaks is not asked for.
export ASAN_OPTIONS="detect_leaks=0:${ASAN_OPTIONS:-}"
[ $# -gt 0 ] || set -- tests/test_kernel_calls.py tests/test_rollout_calls.py
LD_PRELOAD="$address $undefined" exec "$python" -m pytest -q -p no:cacheprovider --capture=sys "$@"
