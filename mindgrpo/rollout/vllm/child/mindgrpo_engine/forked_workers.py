"""Workers that begin as copies of one process which has imported vLLM: ten seconds of imports once, not in each worker.

Python's forkserver does it. On processors vLLM (0.32) starts its workers by `spawn` whatever is asked for.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

from mindgrpo_engine.settings import built_for_processors

TEMPLATE = "mindgrpo_engine.worker_template"


def can_fork(tensor_parallel: int) -> bool:
    """Where each worker is bound to processors of its own, OpenMP has to read that while a worker imports it."""
    is_unbound = os.environ.get("VLLM_CPU_OMP_THREADS_BIND") == "nobind"
    return tensor_parallel > 1 and is_unbound and built_for_processors()


def start_template() -> None:
    """Starts the process that the workers will be copies of, and does not wait for its imports."""
    multiprocessing.set_forkserver_preload([TEMPLATE])
    forkserver.ensure_running()


def fork_workers() -> None:
    from vllm.v1.executor import multiproc_executor

    if hasattr(multiproc_executor, "get_mp_context"):
        multiproc_executor.get_mp_context = WorkerContext


class WorkerProcess(ForkServerProcess):
    """With the environment of the process that starts it: that of the template is older."""

    def __init__(self, target: Callable[..., None], **arguments: Any) -> None:
        super().__init__(target=run_worker, args=(dict(os.environ), target), **arguments)


class WorkerContext(ForkServerContext):
    Process = WorkerProcess


def run_worker(
    environment: Mapping[str, str], target: Callable[..., None], **arguments: Any
) -> None:
    os.environ.update(environment)
    target(**arguments)
