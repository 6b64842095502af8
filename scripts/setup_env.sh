#!/usr/bin/env bash
# Makes .venv, installs mindgrpo into it and puts it first on PATH. Sourced: `source setup_env.sh [extra,...]`.
# Installs only when setup.py changed since the last time; refuses every Python but 3.10, 3.11 and 3.12.
# Leaves behind: MINDGRPO_ROOT, MINDGRPO_PYTHON, VIRTUAL_ENV, PATH.
# With MINDGRPO_MINDSPORE=2.9 (or 2.10) this MindSpore, in .venv-mindspore-2.9; without it the newest one that works.
# `bash setup_env.sh --vllm` makes .venv-vllm instead, as `mindgrpo engine install` does, and needs no .venv.

MINDGRPO_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

_refuse() {
    echo "mindgrpo: $1" >&2
    exit 2
}

_python_version() { # prints e.g. 3.11 when $1 runs and is one that mindgrpo works with
    "$1" -c 'import sys
v = sys.version_info
print("%d.%d" % v[:2])
sys.exit(not (3, 10) <= v[:2] < (3, 13))' 2>/dev/null
}

_find_python() {
    local candidate version
    if [ -n "${PYTHON:-}" ]; then
        version="$(_python_version "$PYTHON")" || _refuse \
            "PYTHON=$PYTHON is ${version:+Python }${version:-not a Python that runs}, but mindgrpo needs Python 3.10, 3.11 or 3.12: set PYTHON to one of these or unset it."
        echo "$PYTHON"
        return
    fi
    # Each candidate is run, not only looked up: a shim on PATH may have no Python behind it.
    for candidate in python3 python3.11 python3.12 python3.10; do
        if _python_version "$candidate" >/dev/null; then
            echo "$candidate"
            return
        fi
    done
    version="$(_python_version python3)"
    _refuse "no Python 3.10, 3.11 or 3.12 on PATH (python3 is ${version:-missing}): install one, for example with 'apt-get install python3 python3-venv', or set PYTHON=/path/to/python3.11."
}

_make_venv() {
    local python version
    python="$(_find_python)" || exit 2
    version="$(_python_version "$python")"
    "$python" -c 'import venv' 2>/dev/null || _refuse \
        "$python has no venv module: install it, for example with 'apt-get install python$version-venv', or set PYTHON to another Python 3.10-3.12."
    "$python" -c 'import ensurepip' 2>/dev/null || _refuse \
        "$python cannot put pip into a virtual environment (no ensurepip module): install it, for example with 'apt-get install python$version-venv', or set PYTHON to another Python 3.10-3.12."
    echo "mindgrpo: making ${1##*/} with Python $version"
    "$python" -m venv "$1" || _refuse \
        "$python -m venv $1 failed (see above): free some disk space or set PYTHON to another Python 3.10-3.12."
}

_show_progress() { # what pip is doing: one line on a terminal, elsewhere a line for what takes long
    local line is_shown=""
    while IFS= read -r line; do
        line="${line#"${line%%[! ]*}"}"
        case "$line" in
        "Collecting "* | "Building "*) [ -t 1 ] || continue ;;
        "Downloading "* | "Installing collected packages"*) ;;
        *) continue ;;
        esac
        line="${line%%: *}"
        if [ -t 1 ]; then
            printf '\r\033[K  %.76s' "$line"
            is_shown=yes
        else
            echo "  $line"
        fi
    done
    [ -z "$is_shown" ] || printf '\r\033[K'
}

_pip() {
    # Uncompiled: of all these modules few are ever imported (_compile). But pip itself is, each time. setuptools warns
    # of every editable installation.
    PYTHONDONTWRITEBYTECODE='' PYTHONWARNINGS="${PYTHONWARNINGS:-ignore}" "$MINDGRPO_PYTHON" -m pip install \
        --progress-bar off --disable-pip-version-check --no-input --no-compile "$@"
}

_install_packages() { # $1: extras
    local requirement mindspore others=() beside
    while IFS= read -r requirement; do
        case "$requirement" in
        mindspore*) mindspore="${MINDGRPO_MINDSPORE:+mindspore==$MINDGRPO_MINDSPORE.*}" ;;&
        mindspore*) mindspore="${mindspore:-$requirement}" ;;
        *) others+=("$requirement") ;;
        esac
    done < <(sed -n '/^INSTALL_REQUIRES = \[/,/^\]/s/^ *"\([^"]*\)".*/\1/p' "$MINDGRPO_ROOT/setup.py")
    # The pip that comes with Python may be years old: a newer one resolves in a third of the time.
    _pip --quiet --upgrade pip 2>/dev/null || echo "  going on with the pip that is there" >&2
    # MindSpore's 0.8 GB take as long as all others, which come beside them.
    _pip --no-deps "$mindspore" &
    beside=$!
    trap 'kill "$beside" 2>/dev/null' EXIT
    _pip --no-warn-conflicts "${others[@]}" && _pip --no-deps --editable "$MINDGRPO_ROOT" && wait "$beside" || return
    trap - EXIT
    # Resolves all together, and installs what is still missing.
    if [ -n "$1" ]; then
        _pip --editable "$MINDGRPO_ROOT[$1]" "$mindspore"
    else
        _pip "$mindspore" "${others[@]}"
    fi
}

_compile() { # what a run imports, once: its ranks would each do it where Python is told to keep nothing, or cannot
    echo "mindgrpo: compiling what a run imports"
    local of_ranks="import sys; sys.path.insert(0, sys.argv[1]); import mindgrpo.launch.fork_server as server; server.import_for_ranks([]); import mindspore.parallel.cluster.run"
    local of_others="import compileall, sys, transformers.utils.chat_template_utils, tensorboardX.summary, matplotlib.backends.backend_agg, matplotlib.figure; compileall.compile_dir(sys.argv[1], quiet=2)"
    (
        export PYTHONDONTWRITEBYTECODE=
        "$MINDGRPO_PYTHON" -c "$of_ranks" "$MINDGRPO_ROOT" &
        "$MINDGRPO_PYTHON" -c "$of_others" "$MINDGRPO_ROOT/mindgrpo"
        wait
    ) >/dev/null 2>&1 || :
}

_install() { # $1: extras, $2: stamp file, $3: what it shall hold
    echo "mindgrpo: installing packages into ${VIRTUAL_ENV##*/} (once; some minutes the first time)"
    # For every later pip in this environment, too: numpy 2 comes with many packages, and MindSpore needs numpy 1.
    printf '[install]\nconstraint = file://%s\n' "${MINDGRPO_ROOT// /%20}/mindgrpo/constraints.txt" \
        >"$VIRTUAL_ENV/pip.conf"
    (
        set -o pipefail
        (_install_packages "$1") | _show_progress
    ) || _refuse \
        "pip could not install mindgrpo${1:+[$1]} into $VIRTUAL_ENV (see above): check the network or the package index that pip is set to, then run the command again."
    _compile
    echo "$3" >"$2"
}

_setup_env() {
    local extras="${1:-}" venv="$MINDGRPO_ROOT/.venv" stamp wanted
    case "${MINDGRPO_MINDSPORE:-}" in
    "") ;;
    2.9 | 2.10) venv+="-mindspore-$MINDGRPO_MINDSPORE" ;;
    *) _refuse "MINDGRPO_MINDSPORE is '$MINDGRPO_MINDSPORE', but mindgrpo works with MindSpore 2.9 and 2.10: set it to one of these or unset it." ;;
    esac
    [ -e "$venv/bin/python" ] || _make_venv "$venv"
    export VIRTUAL_ENV="$venv" MINDGRPO_PYTHON="$venv/bin/python" PATH="$venv/bin:$PATH"
    _python_version "$MINDGRPO_PYTHON" >/dev/null || _refuse \
        "$venv does not run a Python 3.10, 3.11 or 3.12: remove it with 'rm -r $venv' and run the command again."
    "$MINDGRPO_PYTHON" -m pip --version >/dev/null 2>&1 || _refuse \
        "$venv has no working pip: remove it with 'rm -r $venv' and run the command again."
    stamp="$venv/.mindgrpo-installed${extras:+-${extras//,/-}}"
    # The folder belongs in the stamp: an editable install points to it, and clones get moved.
    wanted="$(sha256sum "$MINDGRPO_ROOT/setup.py" | cut -d ' ' -f 1) $MINDGRPO_ROOT"
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        _install "$extras" "$stamp" "$wanted"
    fi
}

_setup_vllm() {
    local python="$MINDGRPO_ROOT/.venv/bin/python"
    # Any Python can run the installer, which looks for the one that vLLM needs.
    [ -z "${PYTHON:-}" ] && _python_version "$python" >/dev/null || python="$(_find_python)" || exit 2
    PYTHONPATH="$MINDGRPO_ROOT" "$python" -c \
        'import sys; sys.path[:] = filter(None, sys.path); from mindgrpo.cli.verbs import main; sys.exit(main())' \
        engine install --target "$MINDGRPO_ROOT/.venv-vllm" "$@"
}

if [ "${1:-}" = --vllm ]; then
    shift
    _setup_vllm "$@"
else
    _setup_env "$@"
fi
