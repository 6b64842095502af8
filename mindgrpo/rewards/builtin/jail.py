"""Runs a program that nobody trusts, as a process of its own: `python jail.py DESCRIPTOR`.

Reads the order from the descriptor, gives up all rights (kernel_filter.py), then runs the program with
its standard input and output. Refuses to run anything where the kernel does not take the rights away.
Imports nothing of mindgrpo by its name: it is started by its path, without the package.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

NOT_LOCKED_DOWN = 97
PR_SET_PDEATHSIG = 1
MAX_DESCRIPTORS = 64
READABLE = [
    *("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime"),
    *("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"),
]


def lock_down(order: dict[str, Any]) -> None:
    memory, seconds = order["memory"], order["seconds"]
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 2))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_DESCRIPTORS, MAX_DESCRIPTORS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    from kernel_filter import FilterUnavailable, read_only_below, refuse_forever

    prefixes = (sys.prefix, sys.base_prefix, sys.exec_prefix, os.getcwd())
    confined = read_only_below([*READABLE, *prefixes])
    try:
        refuse_forever()
    except FilterUnavailable as error:
        print(error, file=sys.stderr)
        os._exit(NOT_LOCKED_DOWN)
    if order.get("report"):
        os.write(1, json.dumps({"confined": confined}).encode())


def count_held(code: str, setup: str, claims: list[str]) -> int:
    """How many of `claims`, each a Python statement such as an assert, hold after `code`."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, "completion", "exec"), namespace)  # noqa: S102
    held = 0
    for claim in claims:
        try:
            exec(compile(f"{setup}\n{claim}", "test", "exec"), dict(namespace))  # noqa: S102
            held += 1
        except BaseException as error:
            if isinstance(error, MemoryError):
                raise
    return held


def main() -> None:
    descriptor = int(sys.argv[1])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with os.fdopen(descriptor, "rb") as orders:
        order = json.load(orders)
    if os.getppid() != order["parent"]:
        return
    # Beside this file stands its only own import, and nothing that shadows a module of Python's.
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    lock_down(order)
    del sys.path[0]
    sys.argv = ["completion"]
    if hasattr(sys, "set_int_max_str_digits"):  # since Python 3.10.7
        sys.set_int_max_str_digits(0)
    if order.get("claims") is None:
        exec(compile(order["code"], "completion", "exec"), {"__name__": "__main__"})  # noqa: S102
        return
    # What the program itself prints is no result.
    results, nothing = os.dup(1), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 1)
    held = count_held(order["code"], order["setup"], order["claims"])
    os.write(results, f"{order['token']} {held}\n".encode())


if __name__ == "__main__":
    main()
