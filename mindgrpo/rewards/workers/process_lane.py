"""A function's samples in a worker process that can be killed.

First all samples in one call, as the function expects. Where that raises, each is scored alone; where
the process dies, hangs or grows too large, a fresh one scores each apart (apart.py). Refuses to lose
what has been scored before something went wrong.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from mindgrpo.errors import UserError
from mindgrpo.rewards.call import Samples, Signature
from mindgrpo.rewards.lanes import Lane
from mindgrpo.rewards.limits import Limits
from mindgrpo.rewards.outcome import (
    EXIT,
    MEMORY,
    TIMEOUT,
    Failure,
    from_json,
)
from mindgrpo.rewards.spec import WHERE, Spec
from mindgrpo.rewards.workers import processes
from mindgrpo.rewards.workers.pool import Pool, RankWorker
from mindgrpo.rewards.workers.worker import (
    APART,
    EACH,
    TOGETHER,
    Task,
)

# A function that is late by so much of its time gets a second process, ready if the first must go.
LATE_SHARE = 0.4
# Importing may take so long, whatever the deadline of a sample.
START_SECONDS = 120.0
# Beyond a deadline: for starting a process for every sample, and for telling the end.
APART_GRACE = 2.0


class ProcessLane(Lane):
    """`one_by_one` functions are never called with several samples, so one that hangs is known at once."""

    def __init__(self, spec: Spec, pool: Pool, limits: Limits, one_by_one: bool = False) -> None:
        super().__init__(spec.name)
        self._spec, self._pool, self._limits = spec, pool, limits
        self._first_mode = EACH if one_by_one else TOGETHER
        self._worker = pool.start(spec)
        self._spare: RankWorker | None = None
        self._mode: str | None = None  # None: not sent yet, and then in _next_mode
        self._next_mode = self._first_mode
        self._started_at = self._sent_at = self._heard_at = time.monotonic()
        self._said_goodbye = False
        self._first_call = limits.first_call

    def signature(self) -> Signature | None:
        self._worker.pump()
        if self._worker.refusal is not None:
            raise UserError(self._worker.refusal)
        if self._worker.signature is None and self._worker.has_ended:
            how = self._pool.how_ended(self._worker)
            self._worker.output.pump()
            said = self._worker.output.take()[0].strip().splitlines()
            why = f" ({said[-1].strip()})" if said else ""
            raise UserError(
                f"reward function {self._spec.text!r}: its process {how} while loading it{why}; "
                f"correct the module or {WHERE}"
            )
        if self._worker.signature is None and self._is_late_at_start(time.monotonic()):
            raise UserError(
                f"reward function {self._spec.text!r} has not been imported after {START_SECONDS:g} s; "
                "its module must not work while it is imported"
            )
        return self._worker.signature

    def descriptors(self) -> tuple[list[int], list[int]]:
        workers = [self._worker] + ([self._spare] if self._spare else [])
        reads = [descriptor for worker in workers for descriptor in worker.descriptors]
        writes = [worker.channel.fileno() for worker in workers if worker.channel.wants_to_write]
        return reads, writes

    def begin(self, samples: Samples, places: Sequence[int], patient: bool = False) -> None:
        super().begin(samples, places, patient)
        limits = self._limits
        self._first_call = max(limits.deadline, limits.first_call) if patient else limits.first_call
        self._mode, self._next_mode = None, self._first_mode
        self._worker.pump()
        if self._worker.has_ended and self.places:
            self._replace()

    def advance(self, now: float) -> None:
        self._worker.pump()
        if self._spare is not None:
            self._spare.pump()
        if self.done:
            return
        for message in self._worker.heard():
            self._hear(message, now)
        if self.done:
            return
        if self._worker.has_ended:
            self._on_end()
        elif self._mode is None:
            self._send(now)
        elif self._mode == APART:
            if now - self._sent_at > self._limits.deadline + APART_GRACE:
                self._lose(Failure(TIMEOUT, f"no answer within {self._limits.deadline:g} s"))
        else:
            self._watch(now)

    def _send(self, now: float) -> None:
        if self._worker.signature is None:
            if self._is_late_at_start(now):
                self._lose(Failure(TIMEOUT, f"not imported within {START_SECONDS:g} s"))
            return
        self._mode, self._sent_at, self._heard_at = self._next_mode, now, now
        wanted = self._worker.signature.accepted(self.samples)
        task = Task(self._mode, self.samples.only(wanted), self._left(), self._limits.deadline)
        self._worker.channel.tell(task)
        self._worker.pump()

    def _is_late_at_start(self, now: float) -> bool:
        return now - self._started_at > START_SECONDS

    def _left(self) -> list[int]:
        return self.tally.rest(self.places)

    def _hear(self, message: dict[str, Any], now: float) -> None:
        self._heard_at, self._said_goodbye = now, False
        if "done" in message:
            self._conclude()
            return
        outcome: float | None | Failure
        if "whole" in message:
            outcome = self.tally.whole = Failure(*message["whole"])
            self._mode = EACH
        else:
            outcome = from_json(message)
            self.record(message["place"], outcome)
        # A worker that has run out of memory says so and ends.
        self._said_goodbye = isinstance(outcome, Failure) and outcome.kind == MEMORY

    def _on_end(self) -> None:
        failure = Failure(EXIT, f"its process {self._pool.how_ended(self._worker)}")
        if self._worker.refusal is not None:
            failure = Failure(EXIT, self._worker.refusal)
        if self._mode in (None, APART):
            self._lose(failure)
        elif self._said_goodbye:
            self._go_apart()
        else:
            self._blame(failure)

    def _watch(self, now: float) -> None:
        """Raises nothing: what is too large or too late is stopped."""
        elapsed, limits = now - self._sent_at, self._limits
        memory = processes.memory_of(self._worker.pid) if self._worker.pid else 0
        if memory > limits.memory:
            self._blame(
                Failure(MEMORY, f"more than reward_config.memory, {limits.memory >> 20} MiB")
            )
        elif self._mode == EACH and now - self._heard_at > limits.deadline:
            self._blame(Failure(TIMEOUT, f"no answer within {limits.deadline:g} s"))
        elif elapsed > self._first_call:
            if self._mode == TOGETHER:
                message = (
                    f"no answer within {self._first_call:g} s (if it is only slow, raise "
                    "reward_config.together_deadline)"
                )
                self.tally.whole = Failure(TIMEOUT, message)
            self._go_apart()
        elif elapsed > LATE_SHARE * self._first_call and self._spare is None:
            self._spare = self._pool.start(self._spec)

    def _blame(self, failure: Failure) -> None:
        """The sample at work, which is known where they are scored one after another."""
        if self._mode == EACH:
            for place in self._left()[:1]:
                self.record(place, failure)
        else:
            self.tally.whole = failure
        self._go_apart()

    def _go_apart(self) -> None:
        self._replace()
        self._mode, self._next_mode = None, APART
        if not self._left():
            self._conclude()

    def _lose(self, failure: Failure) -> None:
        self.tally.fail(self.places, failure)
        self._replace()
        self._conclude()

    def _replace(self) -> None:
        self._take_output()
        self._pool.kill(self._worker)
        self._worker, self._spare = self._spare or self._pool.start(self._spec), None
        self._started_at = time.monotonic()
        self.tally.restarts += 1

    def _conclude(self) -> None:
        self._take_output()
        self.finish()

    def _take_output(self) -> None:
        self._worker.output.pump()
        text, num_bytes = self._worker.output.take()
        self.tally.printed += text
        self.tally.printed_bytes += num_bytes

    def close(self) -> None:
        for worker in (self._worker, self._spare):
            if worker is not None:
                self._pool.kill(worker)
