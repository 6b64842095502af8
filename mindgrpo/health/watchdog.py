"""Warns of a phase that takes too long, or ends the job for it: checks all ranks at every heartbeat.

The rank that ends the job writes a failure file for all and the position of its threads to its log; ranks that see
the file end too. The launcher ends those that cannot.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Literal, NoReturn

from mindgrpo.health.failure import Failure, read_failure, write_failure
from mindgrpo.health.hang_detector import KEY, HangDetector, Overdue
from mindgrpo.health.rank_health import RankHealth

Action = Literal["off", "warn", "stop"]
NAME = "watchdog"


class Watchdog:
    """`end` is called with a sentence and does not return."""

    def __init__(
        self,
        health: RankHealth,
        limits: Mapping[str, float],
        action: Action,
        end: Callable[[str], NoReturn] | None = None,
    ) -> None:
        self._health, self._action = health, action
        self._end = end or self._end_process
        self._detector = HangDetector(health.rank, limits)

    def check(self) -> None:
        folder = self._health.folder
        if folder is not None and read_failure(folder, NAME):
            self._end("another rank has ended this job")
        overdue = self._detector.check(time.monotonic(), self._health.heartbeats())
        if overdue is None:
            return
        if self._action == "stop":
            self._stop(overdue)
        self._health.say(f"warning: {overdue.sentence}")

    def _stop(self, overdue: Overdue) -> NoReturn:
        sentence = f"{overdue.sentence}, and the job was ended"
        remedy = f"if that is no hang, raise {KEY} or set phase_deadline_action to warn"
        rank = overdue.missing[0] if overdue.missing else None
        if self._health.folder is not None:
            # Before every other failure, whatever ranks may have raised while they waited.
            write_failure(self._health.folder, NAME, Failure(rank, 0.0, 1, sentence, remedy))
        self._end(sentence)

    def _end_process(self, sentence: str) -> NoReturn:
        words = f"mindgrpo: {sentence}; every thread of this rank is at:"
        print(words, file=sys.stderr, flush=True)
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        folder, rank = self._health.folder, self._health.rank
        if folder is not None:
            failure = Failure(rank, time.time(), 1, sentence, is_consequence=True)
            write_failure(folder, rank, failure)
        os._exit(1)
