"""One engine process as the rank that owns it sees it: started, asked, watched and ended.

Requests and replies are JSON objects over a socket, in the framing of the other end, child/mindgrpo_engine.
"""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

from mindgrpo.errors import UserError, show
from mindgrpo.health.failure import RankFailure, position_of, write_failure
from mindgrpo.health.rank_health import RankHealth
from mindgrpo.processes.child import Child, describe_code, last_lines
from mindgrpo.processes.job import LEFT_BEHIND, STATUS_VARIABLE
from mindgrpo.processes.linux import IN_MEMORY, remove_left_behind, shared_files_of, states
from mindgrpo.rollout.vllm.child.mindgrpo_engine.protocol import Message, receive, send
from mindgrpo.rollout.vllm.environment import child_environment
from mindgrpo.rollout.vllm.settings import VllmSettings

CHILD = Path(__file__).with_name("child")
REAP_SECONDS, END_SECONDS = 0.5, 10.0
NUM_LAST_WORDS = 3
THREADS = "OMP_NUM_THREADS"


class EngineLost(RuntimeError):
    """The engine's process has ended, or answers nothing."""


class EngineFailed(RuntimeError):
    """The engine could not do what it was asked."""


class EngineProcess:
    """The process of one engine; starts at once, and `request` waits for it."""

    def __init__(
        self,
        settings: VllmSettings,
        memory: int,
        health: RankHealth,
        environment: Mapping[str, str],
    ) -> None:
        """Starts the process.

        `memory` is the descriptor of the bucket of weights, `environment` the rank's, with its replica's devices.
        """
        self._health = health
        self._log = _open_log(health)
        self._is_asked = self._is_ending = False
        self._left_behind: list[str] = []
        self._socket, other = socket.socketpair()
        self._socket.settimeout(settings.max_start_seconds)
        self._max_silence = settings.max_silence_seconds
        try:
            self._process = self._start(settings.python, memory, other.fileno(), environment)
        finally:
            other.close()
        atexit.register(self._kill)
        health.on_beat(self._check)

    def _start(
        self, python: Path, memory: int, descriptor: int, environment: Mapping[str, str]
    ) -> Child:
        own = child_environment(environment, python)
        own |= {"PYTHONPATH": str(CHILD), "PYTHONSAFEPATH": "1"}
        if THREADS in environment:
            own[THREADS] = environment[THREADS]  # a worker has the cores of its rank
        if self._health.folder is not None:
            own[STATUS_VARIABLE] = str(self._health.folder)
        words = ["--socket", str(descriptor), "--memory", str(memory)]
        command = [str(python), "-m", "mindgrpo_engine", *words]
        return Child(command, own, log=self._log, pass_fds=(descriptor, memory))

    def request(
        self, message: Message, on_progress: Callable[[Message], None] = lambda _: None
    ) -> Message:
        """Sends a request and returns the reply. Raises EngineLost, EngineFailed, and UserError for what the engine
        says is the user's mistake."""
        self._is_asked = True
        kind = message["type"]
        try:
            send(self._socket, message)
            while (reply := receive(self._socket)) is not None and reply["type"] == "progress":
                on_progress(reply)
        except TimeoutError:
            raise EngineLost(
                f"vLLM's engine of rank {self._health.rank} sent nothing for {self._socket.gettimeout():.0f} s in "
                f"{kind}: {self._last_words()}"
            ) from None
        except OSError as error:
            raise self._lost(f"in {kind}: {error}") from None
        if reply is None:
            raise self._lost(f"in {kind}")
        self._is_asked = False
        if reply["type"] != "error":
            return reply
        if reply.get("kind") == "user":
            raise UserError(f"vLLM: {reply['error']}")
        raise EngineFailed(f"vLLM's engine failed in {kind}: {reply['error']}")

    def start(self, message: Message) -> Message:
        """Sends the first request, as `request`; notes what an engine that is killed would leave behind."""
        reply = self.request(message)
        self._socket.settimeout(self._max_silence)
        self._left_behind = [f"{IN_MEMORY}{name}" for name in reply.get("shared_memory", ())]
        self._left_behind += [reply["folder"]] if reply.get("folder") else []
        if self._health.folder is not None:
            path = self._health.folder / LEFT_BEHIND.format(rank=self._health.rank)
            path.write_text("\n".join(self._left_behind), encoding="utf-8")
        return reply

    def _lost(self, where: str) -> EngineLost:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(REAP_SECONDS)
        return EngineLost(self._ending(where))

    def _ending(self, where: str) -> str:
        code = self._process.poll()
        how = "has closed its connection" if code is None else describe_code(code)
        rank = self._health.rank
        return f"vLLM's engine of rank {rank} {how} {where}: {self._last_words()}"

    def _last_words(self) -> str:
        words = " | ".join(last_lines(self._log.fileno(), NUM_LAST_WORDS))
        return f"its last words are: {words}" if words else "it left no words"

    def _check(self) -> None:
        """Ends this rank where its engine has ended between requests: the next one may be far away."""
        # First: an end that was asked for comes after it was.
        has_ended = self._process.poll() is not None
        if not has_ended or self._is_asked or self._is_ending or self._health.folder is None:
            return
        folder, rank = self._health.folder, self._health.rank
        sentence = self._ending(position_of(folder, rank).strip() or "while it had nothing to do")
        show(sys.stderr, f"mindgrpo: {sentence}\n")
        write_failure(folder, rank, RankFailure(rank, time.time(), 1, sentence))
        self._kill()
        os._exit(1)

    def close(self) -> None:
        """Asks it to end, and kills it where it does not."""
        self._is_ending = True
        with suppress(OSError, EngineLost, EngineFailed, subprocess.TimeoutExpired):
            self._socket.settimeout(END_SECONDS)
            self.request({"type": "stop"})
            self._process.wait(END_SECONDS)
        self._kill()

    def _kill(self) -> None:
        """Kills the process and what it started, and removes what these have left in shared memory."""
        self._is_ending = True
        atexit.unregister(self._kill)
        # An engine that never was ready has not reported what it has there.
        leader = self._process.pid
        members = [pid for pid, state in states().items() if state.group == leader]
        self._left_behind += shared_files_of(members)
        self._process.end()
        self._socket.close()
        remove_left_behind(self._left_behind)


def _open_log(health: RankHealth) -> IO[bytes]:
    """Opens a log beside the ranks' logs; without a launcher a file that nobody else sees."""
    if health.folder is None:
        return tempfile.TemporaryFile()
    return (health.folder.parent / f"engine_{health.rank}.log").open("ab")
