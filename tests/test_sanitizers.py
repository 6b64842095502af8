"""The kernel tests pass with a library that AddressSanitizer and UndefinedBehaviorSanitizer watch.

Does not prove anything about kernels inside MindSpore's graphs, whose memory the sanitizers do not know.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_sanitizers_find_nothing_in_the_kernel_tests() -> None:
    environment = os.environ | {"MINDGRPO_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    command = ["bash", "scripts/sanitize.sh"]
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    if ended.stdout.startswith("skipped: "):
        pytest.skip(ended.stdout.strip())
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert " passed" in ended.stdout.splitlines()[-1]
