"""Looks at every rank twice a second, from a thread: warns of a phase that takes too long, or ends the job for it.

Who ends it leaves the sentence and every thread's place in the code; the ranks that see it end likewise, those that
cannot are the launcher's. Refuses to end any process but its own.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Literal, NoReturn

from mindgrpo.health import failure
from mindgrpo.health.failure import Failure
from mindgrpo.health.hang_detector import KEY, Deadlines, Overdue
from mindgrpo.health.rank_health import Presence

Action = Literal["off", "warn", "stop"]
ENDED = 1


class Watchman:
    """`end` is called with a sentence and does not return."""

    def __init__(
        self,
        presence: Presence,
        limits: Mapping[str, float],
        action: Action,
        end: Callable[[str], NoReturn] | None = None,
    ) -> None:
        self._presence, self._action = presence, action
        self._end = end or self._end_here
        self._deadlines = Deadlines(presence.rank, limits)
        self._stopped = presence.folder / "stopped" if presence.folder else None

    def look(self) -> None:
        if self._stopped is not None and self._stopped.exists():
            self._end("another rank has ended this job")
        overdue = self._deadlines.look(time.monotonic(), self._presence.known())
        if overdue is None:
            return
        if self._action == "stop":
            self._stop(overdue)
        self._presence.say(f"warning: {overdue.sentence}")

    def _stop(self, overdue: Overdue) -> NoReturn:
        told = {
            "rank": overdue.missing[0] if overdue.missing else None,
            "sentence": f"{overdue.sentence}, and the job was ended",
            "remedy": f"if that is no hang, raise {KEY} or set phase_deadline_action to warn",
        }
        if self._stopped is not None:
            partial = self._stopped.with_suffix(f".{self._presence.rank}")
            with suppress(OSError):
                partial.write_text(json.dumps(told), encoding="utf-8")
                # The first of two that do this at once is the one that counts.
                os.link(partial, self._stopped)
        self._end(str(told["sentence"]))

    def _end_here(self, sentence: str) -> NoReturn:
        print(
            f"mindgrpo: {sentence}; every thread of this rank is at:", file=sys.stderr, flush=True
        )
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        folder, rank = self._presence.folder, self._presence.rank
        if folder is not None:
            failure.write(folder, Failure(rank, time.time(), sentence, "", is_consequence=True))
            with suppress(OSError), (folder / f"rank_{rank}").open("a") as lines:
                lines.write(f"status {ENDED} {time.time():.6f}\n")
        os._exit(ENDED)
