"""Starts the engine's process: `python -m mindgrpo_engine --socket FD --memory FD`.

FD are numbers of descriptors that the parent passes on: a UNIX stream socket, and the shared file of the weights.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys

from mindgrpo_engine.process import end_with_parent, own_temporary_folder
from mindgrpo_engine.serve import Server


def set_environment() -> None:
    """Variables that vLLM reads while it is imported."""
    # The engine runs in this process, as does its only worker: what is done to them is done by calls.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # Forked workers would hold the parent's socket open.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    # The reload of vLLM 0.32 was tried with its first model runner only.
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def main() -> int:
    parser = argparse.ArgumentParser(prog="mindgrpo_engine")
    parser.add_argument("--socket", type=int, required=True, metavar="FD")
    parser.add_argument("--memory", type=int, required=True, metavar="FD")
    arguments = parser.parse_args()
    end_with_parent()
    for descriptor in (arguments.socket, arguments.memory):
        os.set_inheritable(descriptor, False)
    folder = own_temporary_folder()
    set_environment()
    return Server(socket.socket(fileno=arguments.socket), arguments.memory, folder).run()


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of vLLM would hold up the end of the interpreter.
    os._exit(status)
