"""The way of a function's samples: a lane in the rank itself or in a thread of it, and what all lanes share.

The third kind, in a worker process, is process_lane.py. Refuses to wait in any lane: `advance` does what
can be done now, and `run_all` waits for all of them at once.
"""

from __future__ import annotations

import os
import queue
import select
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

from mindgrpo.rewards.attempt import Attempts, judged
from mindgrpo.rewards.call import Samples, Signature
from mindgrpo.rewards.limits import Limits
from mindgrpo.rewards.load import RewardFunction
from mindgrpo.rewards.outcome import (
    RAISED,
    TIMEOUT,
    Failure,
    Tally,
)

TICK_MILLISECONDS = 50


class Lane(ABC):
    """`begin`, then `advance` until `done`; `tally` has what became of the samples."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tally = Tally()
        self.done = True
        self.samples = Samples([], [], {})
        self.places: list[int] = []
        self._begun = 0.0

    def begin(self, samples: Samples, places: Sequence[int], patient: bool = False) -> None:
        """`patient` gives a first call, which may load something, the whole deadline."""
        self.samples, self.places = samples, list(places)
        self.tally, self.done = Tally(), not self.places
        self._begun = time.monotonic()

    def finish(self) -> None:
        self.done = True
        self.tally.seconds = time.monotonic() - self._begun

    def record(self, place: int, outcome: float | None | Failure) -> None:
        record(self.tally, place, outcome)

    @abstractmethod
    def advance(self, now: float) -> None:
        """Does what can be done without waiting; `now` is time.monotonic()."""

    @abstractmethod
    def signature(self) -> Signature | None:
        """None until it is known. Raises UserError where the function cannot be loaded."""

    def descriptors(self) -> tuple[list[int], list[int]]:
        """To read from and to write to, for whoever waits."""
        return [], []

    def close(self) -> None:  # noqa: B027
        """Ends what the lane has started."""


class DirectLane(Lane):
    """In the rank itself: for built-in functions that are quick whatever they are given."""

    def __init__(self, function: RewardFunction) -> None:
        super().__init__(function.name)
        self._attempts = Attempts(function)

    def signature(self) -> Signature:
        return Signature.of(self._attempts.function)

    def advance(self, now: float) -> None:
        if not self.done:
            score_here(self._attempts, self.samples, self.places, self.tally)
            self.finish()


class ThreadLane(Lane):
    """In a thread of the rank: for callables given in code, which no other process can find.

    What is late is told and given up, not ended: a thread cannot be killed. It is asked again when it
    has come back.
    """

    def __init__(self, function: RewardFunction, limits: Limits) -> None:
        super().__init__(function.name)
        self._limits = limits
        self._attempts = Attempts(function)
        self._tasks: queue.SimpleQueue[tuple[Samples, list[int], Tally]] = queue.SimpleQueue()
        self._scored = Tally()
        self._is_busy = False
        self._thread: threading.Thread | None = None
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._woken, False)

    def signature(self) -> Signature:
        return Signature.of(self._attempts.function)

    def descriptors(self) -> tuple[list[int], list[int]]:
        return [self._woken], []

    def begin(self, samples: Samples, places: Sequence[int], patient: bool = False) -> None:
        super().begin(samples, places, patient)
        if self.done:
            return
        if self._is_busy and not self._has_come_back():
            self._give_up("still busy with an earlier step")
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True, name=self.name)
            self._thread.start()
        self._scored, self._is_busy = Tally(), True
        self._tasks.put((samples, self.places, self._scored))

    def _work(self) -> None:
        while True:
            samples, places, tally = self._tasks.get()
            try:
                score_here(self._attempts, samples, places, tally)
            except BaseException as error:  # what not even an attempt survives
                tally.fail(places, Failure(RAISED, f"{type(error).__name__}: {error}"))
            os.write(self._waker, b"x")

    def _has_come_back(self) -> bool:
        try:
            os.read(self._woken, 1)
        except BlockingIOError:
            return False
        self._is_busy = False
        return True

    def advance(self, now: float) -> None:
        if self.done:
            return
        if self._has_come_back():
            self.tally = self._scored
            self.finish()
        elif now - self._begun > self._limits.deadline:
            self._give_up(f"no answer in {self._limits.deadline:g} s (a thread cannot be ended)")

    def _give_up(self, message: str) -> None:
        self.tally.fail(self.places, Failure(TIMEOUT, message))
        self.finish()


def score_here(attempts: Attempts, samples: Samples, places: Sequence[int], tally: Tally) -> None:
    """All together, or each alone where that fails, into `tally`."""
    values = attempts.together(samples.part(places))
    if isinstance(values, Failure):
        tally.whole = values
    for at, place in enumerate(places):
        if isinstance(values, Failure):
            record(tally, place, attempts.alone(samples, place))
        else:
            record(tally, place, judged(values[at]))


def record(tally: Tally, place: int, outcome: float | None | Failure) -> None:
    if isinstance(outcome, Failure):
        tally.failures[place] = outcome
    else:
        tally.values[place] = outcome


def run_all(lanes: Sequence[Lane]) -> None:
    """Until every lane is done, which each is by its own deadlines."""
    # What works elsewhere is set going before what works here.
    in_order = sorted(lanes, key=lambda lane: isinstance(lane, DirectLane))
    while True:
        for lane in in_order:
            lane.advance(time.monotonic())
        if all(lane.done for lane in lanes):
            return
        wait_for_any([lane for lane in lanes if not lane.done])


def wait_for_any(lanes: Sequence[Lane]) -> None:
    """A moment, or less if something has happened."""
    waiting = select.poll()
    for lane in lanes:
        reads, writes = lane.descriptors()
        interest = dict.fromkeys(reads, select.POLLIN)
        for descriptor in writes:
            interest[descriptor] = interest.get(descriptor, 0) | select.POLLOUT
        for descriptor, events in interest.items():
            waiting.register(descriptor, events)
    waiting.poll(TICK_MILLISECONDS)
