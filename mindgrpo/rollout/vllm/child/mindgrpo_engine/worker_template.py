"""Imports what workers need in the process that forks them, see process.py."""

from __future__ import annotations

import os

from mindgrpo_engine.process import end_with_parent

end_with_parent()
os.register_at_fork(after_in_child=end_with_parent)

import vllm.v1.executor.multiproc_executor  # noqa: E402
import vllm.v1.worker.cpu_worker  # noqa: E402, F401

import mindgrpo_engine.worker  # noqa: E402, F401
