#!/usr/bin/env bash
# `mindgrpo launch` with the .venv of this clone: launch.sh --ranks N [--max_restarts M] [HOSTS] --config FILE [--key
# value ...], or -- PROGRAM [ARGUMENTS]; HOSTS: --hosts H --host_index I --master A:P, or --cluster slurm, ascendjob or auto.
# What it does and which variables it reads: mindgrpo/cli/launch.py. Logs go to this clone's output/logs by default.
set -uo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# A venv that is already active wins; else the one that setup_env.sh made.
command -v msrun >/dev/null || PATH="$root/.venv/bin:$PATH"
if ! command -v msrun >/dev/null; then
    echo "mindgrpo: msrun is not on PATH and $root/.venv holds none: run 'source scripts/setup_env.sh' first." >&2
    exit 2
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" MINDGRPO_LOG_DIR="${MINDGRPO_LOG_DIR:-$root/output/logs}"
# How the command that resumes a run begins.
export MINDGRPO_LAUNCHER="${MINDGRPO_LAUNCHER:-bash $(printf %q "$0")}"
# As `python -m mindgrpo launch`, but modules of the present folder do not stand in for those of the standard library.
exec python -c 'import sys; sys.path[:] = filter(None, sys.path); from mindgrpo.cli.verbs import main; sys.exit(main())' \
    launch "$@"
