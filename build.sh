#!/usr/bin/env bash
# Builds the wheel into dist/. Refuses to touch anything else.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
cd "$root"
source scripts/setup_env.sh
"$MINDGRPO_PYTHON" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
ls -1t dist/*.whl | head -n 1
