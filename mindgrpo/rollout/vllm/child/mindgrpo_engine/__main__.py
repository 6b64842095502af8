"""Runs the engine's process: `python -m mindgrpo_engine --socket FD --memory FD`.

FD are numbers of descriptors that the parent passes on: a UNIX stream socket, and the shared file of the weights. The
process answers one request after another, until the socket ends or the parent says stop.
"""

from __future__ import annotations

import argparse
import os
import queue
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

from mindgrpo_engine.engine import Engine
from mindgrpo_engine.process import (
    end_at_once,
    end_with_parent,
    own_temporary_folder,
    remove_traces,
    shared_memory_names,
)
from mindgrpo_engine.protocol import (
    EngineFailure,
    Message,
    engine_variables,
    receive,
    send,
    sentence,
)


class EngineServer:
    """Answers requests in turn. A thread reads them, so that the end of the socket is seen in the middle of one."""

    def __init__(self, connection: socket.socket, memory: int, folder: Path) -> None:
        self._connection = connection
        self._memory = memory
        self._folder = folder
        self._requests: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._engine: Engine | None = None
        self._shared_memory: list[str] = []

    def run(self) -> int:
        """Returns the process's exit status."""
        threading.Thread(target=self._read, daemon=True, name="requests").start()
        while True:
            request = self._requests.get()
            kind = request.get("type")
            try:
                self._reply(self._start(request) if kind == "start" else self._answer(request))
            except Exception as error:
                self._reply(_error(error))
                if kind == "start" and self._engine is None:
                    end_at_once(self._shared_memory, self._folder)
            if kind == "stop":
                return 0

    def _read(self) -> None:
        try:
            while (request := receive(self._connection)) is not None:
                self._requests.put(request)
                if request.get("type") == "stop":
                    return
        except (OSError, ValueError):
            traceback.print_exc()
        sys.stderr.flush()
        end_at_once(self._shared_memory, self._folder)

    def _reply(self, message: Message) -> None:
        try:
            send(self._connection, message)
        except OSError:
            end_at_once(self._shared_memory, self._folder)

    def _start(self, request: Message) -> Message:
        if self._engine is not None:
            raise EngineFailure("the engine has started already")
        self._engine = Engine(request, self._memory)
        self._shared_memory = shared_memory_names(self._engine.pids)
        traces = {"shared_memory": self._shared_memory, "folder": str(self._folder)}
        return self._engine.ready() | traces

    def _answer(self, request: Message) -> Message:
        if request.get("type") == "stop":
            return self._stop()
        engine = self._engine
        if engine is None:
            raise EngineFailure("the engine has not started: start it first")
        handlers: dict[object, Callable[[], Message]] = {
            "begin_weights": lambda: engine.begin_weights(request),
            "load_weights": lambda: engine.load_weights(request),
            "commit_weights": lambda: engine.commit_weights(request),
            "generate": lambda: engine.generate(request, self._reply),
            "sleep": engine.sleep,
            "wake": engine.wake,
            "memory": engine.memory,
        }
        handler = handlers.get(request.get("type"))
        if handler is None:
            raise EngineFailure(f"the engine knows no request {request.get('type')!r}")
        return handler()

    def _stop(self) -> Message:
        if self._engine is not None:
            self._engine.shut_down()
        remove_traces(self._shared_memory, self._folder)
        return {"type": "stopped"}


def _error(error: Exception) -> Message:
    """Returns the reply to a request that failed; what the engine is to blame for goes to stderr in full."""
    failure = error if isinstance(error, EngineFailure) else EngineFailure(sentence(error))
    if failure.kind == "engine":
        traceback.print_exc()
    return failure.reply()


def main() -> int:
    parser = argparse.ArgumentParser(prog="mindgrpo_engine")
    parser.add_argument("--socket", type=int, required=True, metavar="FD")
    parser.add_argument("--memory", type=int, required=True, metavar="FD")
    arguments = parser.parse_args()
    end_with_parent()
    for descriptor in (arguments.socket, arguments.memory):
        os.set_inheritable(descriptor, False)
    folder = own_temporary_folder()
    # vLLM, torch and oneDNN read them while they are imported.
    os.environ.update(engine_variables(os.environ))
    return EngineServer(socket.socket(fileno=arguments.socket), arguments.memory, folder).run()


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of vLLM would hold up the end of the interpreter.
    os._exit(status)
