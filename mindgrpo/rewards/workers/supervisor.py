"""The process that workers are forked from, and that ends them and what they leave behind.

It is a fresh Python that has imported the reward room only: forking it is safe and quick, which forking a
rank with its compute threads is not. A worker lives as long as the rank keeps the other end of its socket
open, and everything ends with the rank.
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
from multiprocessing.connection import Connection

from mindgrpo.rewards.workers import processes
from mindgrpo.rewards.workers.worker import run_worker

RANK_CHECK_MILLISECONDS = 1000
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Supervisor:
    """Forks a worker for each message on `requests`, which brings the worker's socket and output.

    The last message on a worker's socket is {"ended": how}, unless the worker has died while it sent one.
    """

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._rank = os.getppid()
        self._workers: dict[int, socket.socket] = {}  # by process id
        self._wake, self._signalled = socket.socketpair()
        for end in (self._wake, self._signalled):
            end.setblocking(False)

    def serve(self) -> None:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._signalled.fileno(), warn_on_full_buffer=False)
        while os.getppid() == self._rank:
            events = self._wait()
            if self._wake.fileno() in events:
                self._wake.recv(4096)
            for pid, channel in self._workers.items():
                if channel.fileno() in events:
                    processes.kill_group(pid)
            if self._requests.fileno() in events and not self._start_worker():
                break
            self._reap()
            self._kill_orphans()
        self._kill_all()

    def _wait(self) -> set[int]:
        poll = select.poll()
        poll.register(self._requests, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        for channel in self._workers.values():
            poll.register(channel, 0)  # its end only: what comes in is for the worker
        return {descriptor for descriptor, _ in poll.poll(RANK_CHECK_MILLISECONDS)}

    def _start_worker(self) -> bool:
        """Return False where the rank has closed its end."""
        try:
            message, descriptors, _, _ = socket.recv_fds(self._requests, 16, 2)
        except ConnectionError:
            return False
        if not message:
            return False
        supervisor = os.getpid()
        pid = os.fork()
        if pid == 0:
            processes.end_with_parent(supervisor)
            os.setsid()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, *SIGNALS):
                signal.signal(number, signal.SIG_DFL)
            for held in (self._requests, self._wake, self._signalled, *self._workers.values()):
                held.close()
            run_worker(*descriptors)
        self._workers[pid] = socket.socket(fileno=descriptors[0])
        os.close(descriptors[1])
        return True

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                channel = self._workers.pop(pid, None)
                if channel is not None:
                    processes.kill_group(pid)
                    channel.setblocking(False)
                    text = json.dumps({"ended": processes.how_it_ended(status)})
                    with Connection(channel.detach()) as connection, suppress(OSError):
                        connection.send_bytes(text.encode())

    def _kill_orphans(self) -> None:
        """Kill what users' functions started and dead workers left, which is this process's child by now."""
        for pid in processes.children():
            if pid not in self._workers:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _kill_all(self) -> None:
        while left := processes.children():
            for pid in left:
                processes.kill_group(pid)
                with suppress(ChildProcessError):
                    os.waitpid(pid, 0)


def main() -> None:
    requests = socket.socket(fileno=int(sys.argv[1]))
    # Ctrl-C and a launcher's goodbye are the rank's to obey; this ends when the rank does.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    processes.adopt_orphans()
    gc.collect()
    gc.freeze()
    Supervisor(requests).serve()
