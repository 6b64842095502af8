"""The scoring rank's hold on its worker processes: starts them, hears how they ended, kills them.

All of them hang on one keeper process, which a rank starts without forking itself. Refuses to wait:
what has not happened yet is asked for again later.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from mindgrpo.rewards.call import Signature
from mindgrpo.rewards.spec import Spec
from mindgrpo.rewards.workers.channel import Output, RankEnd
from mindgrpo.rewards.workers.worker import Order

START = "import sys; sys.path.insert(0, sys.argv[2]); from mindgrpo.rewards.workers.keeper import main; main()"
PACKAGE_PARENT = str(Path(__file__).resolve().parents[3])
# A worker scores beside a training that wants the cores: one compute thread, unless the user says otherwise.
SINGLE_THREADED = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
# Tells the launcher that this process tidies up and ends by itself once its rank has ended.
ENDS_WITH_RANK_VARIABLE = "MINDGRPO_ENDS_WITH_RANK"
HEARING_SECONDS, TICK, CLOSING_SECONDS = 0.5, 0.05, 10.0


class RankWorker:
    """A worker as its rank sees it. `signature` is None until it has loaded its function."""

    def __init__(self, number: int, channel: RankEnd, output: Output) -> None:
        self.number, self.channel, self.output = number, channel, output
        self.signature: Signature | None = None
        self.refusal: str | None = None
        self.start_seconds = 0.0
        self.pid: int | None = None
        self._waiting: list[dict[str, Any]] = []

    def pump(self) -> None:
        self.output.pump()
        for message in self.channel.pump():
            if "signature" in message:
                given = message["signature"]
                names = given.pop("names")
                names = None if names is None else tuple(names)
                self.signature = Signature(names, **given)
                self.start_seconds, self.pid = message["seconds"], message["pid"]
            elif "refused" in message:
                self.refusal = str(message["refused"])
            else:
                self._waiting.append(message)

    def heard(self) -> list[dict[str, Any]]:
        taken, self._waiting = self._waiting, []
        return taken

    @property
    def has_ended(self) -> bool:
        return self.channel.is_closed

    @property
    def descriptors(self) -> list[int]:
        output = [] if self.output.is_at_end else [self.output.fileno()]
        return output if self.has_ended else [*output, self.channel.fileno()]

    def close(self) -> None:
        self.channel.close()
        self.output.close()


class Pool:
    """Starts its keeper at the first worker. `memory` is each worker's, in bytes."""

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._keeper: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._started = 0
        self._endings: dict[int, str] = {}

    def start(self, spec: Spec) -> RankWorker:
        self._started += 1
        mine, theirs = socket.socketpair()
        output, output_end = os.pipe()
        try:
            self._tell({"start": self._started}, [theirs.fileno(), output_end])
        finally:
            theirs.close()
            os.close(output_end)
        channel = RankEnd(mine)
        channel.tell(Order(spec, [*sys.path], self._memory))
        worker = RankWorker(self._started, channel, Output(output))
        worker.pump()
        return worker

    def kill(self, worker: RankWorker) -> None:
        worker.close()
        if self._keeper is not None:
            self._tell({"kill": worker.number}, [])

    def how_ended(self, worker: RankWorker) -> str:
        """In words; waits a moment for the keeper, who hears of an end a little later."""
        until = time.monotonic() + HEARING_SECONDS
        while worker.number not in self._endings and time.monotonic() < until:
            if not self._listen(TICK):
                break
        return self._endings.pop(worker.number, "ended")

    def _listen(self, seconds: float) -> bool:
        """Takes what the keeper says; False where there is none."""
        if self._line is None:
            return False
        while select.select([self._line], [], [], seconds)[0]:
            text = self._line.recv(4096)
            if not text:
                return False
            told = json.loads(text)
            self._endings[told["ended"]] = told["how"]
            seconds = 0.0
        return True

    def close(self) -> None:
        """Ends every worker and what they started; returns when that is done."""
        if self._line is not None:
            self._line.close()
        if self._keeper is not None:
            try:
                self._keeper.wait(CLOSING_SECONDS)
            except subprocess.TimeoutExpired:
                self._keeper.kill()
                self._keeper.wait()
        self._line = self._keeper = None

    def _tell(self, order: dict[str, Any], descriptors: list[int]) -> None:
        text = json.dumps(order).encode()
        try:
            if self._line is not None and self._listen(0.0):
                socket.send_fds(self._line, [text], descriptors)
                return
        except OSError:
            pass
        # There is no keeper yet, or somebody has killed it, and its workers with it.
        self.close()
        self._line = self._start_keeper()
        socket.send_fds(self._line, [text], descriptors)

    def _start_keeper(self) -> socket.socket:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = dict.fromkeys((*SINGLE_THREADED, ENDS_WITH_RANK_VARIABLE), "1")
        with theirs:
            self._keeper = subprocess.Popen(
                [sys.executable, "-c", START, str(theirs.fileno()), PACKAGE_PARENT],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, **environment},
                start_new_session=True,
            )
        return mine
