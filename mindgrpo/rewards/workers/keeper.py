"""The process that workers are forked from and that sees to it that none of them stays behind.

Started as a fresh Python that imports the reward room only, so that forking it is safe and quick, which
forking a rank with its compute threads is not. Kills what workers leave behind, and everything when
the rank that started it ends. Refuses to know what a reward is.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

from mindgrpo.rewards.workers import processes
from mindgrpo.rewards.workers.worker import be_worker

RANK_CHECK_SECONDS = 1.0
LONGEST_ORDER = 4096


class Keeper:
    """Obeys {"start": id} (with a worker's two descriptors), {"kill": id} and {"sweep": true}.

    Says {"ended": id, "how": text} of each worker.
    """

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._rank = os.getppid()
        self._workers: dict[int, int] = {}  # process id -> the worker's number

    def serve(self) -> None:
        wake, wakes = socket.socketpair()
        for end in (wake, wakes):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
        self._private = (self._line, wake, wakes)
        while os.getppid() == self._rank:
            ready, _, _ = select.select([self._line, wake], [], [], RANK_CHECK_SECONDS)
            if wake in ready:
                wake.recv(4096)
            if self._line in ready and not self._obey():
                break
            self._reap()
        self._kill_all()

    def _obey(self) -> bool:
        try:
            text, descriptors, _, _ = socket.recv_fds(self._line, LONGEST_ORDER, 2)
        except ConnectionError:
            return False
        if not text:
            return False
        order = json.loads(text)
        if "start" in order:
            self._fork(order["start"], descriptors)
        elif "kill" in order:
            for pid, number in self._workers.items():
                if number == order["kill"]:
                    processes.kill_group(pid)
        self._reap()
        self._kill_orphans()
        return True

    def _fork(self, number: int, descriptors: list[int]) -> None:
        keeper = os.getpid()
        pid = os.fork()
        if pid == 0:
            processes.end_with_parent(keeper)
            os.setsid()
            signal.set_wakeup_fd(-1)
            for name in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(name, signal.SIG_DFL)
            for held in self._private:
                held.close()
            be_worker(*descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        self._workers[pid] = number

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            number = self._workers.pop(pid, None)
            if number is not None:
                processes.kill_group(pid)
                self._kill_orphans()
                self._say({"ended": number, "how": processes.how_it_ended(status)})

    def _kill_orphans(self) -> None:
        """What the user's functions started and a worker left behind is ours by now."""
        for pid in processes.children():
            if pid not in self._workers:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue

    def _say(self, message: dict[str, Any]) -> None:
        # Nobody may be there or listen; how a worker ended is not worth waiting for.
        with suppress(OSError):
            self._line.send(json.dumps(message).encode(), socket.MSG_DONTWAIT)

    def _kill_all(self) -> None:
        while left := processes.children():
            for pid in left:
                processes.kill_group(pid)
            for _ in left:
                try:
                    os.waitpid(-1, 0)
                except ChildProcessError:
                    return


def main() -> None:
    line = socket.socket(fileno=int(sys.argv[1]))
    # Ctrl-C and a launcher's goodbye are the rank's to obey; this ends when the rank does.
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    processes.adopt_orphans()
    gc.collect()
    gc.freeze()
    Keeper(line).serve()
