"""Scores groups of samples as they end, in a thread, while others are generated: on the first rank of each replica.

Functions get whole groups, as many as have ended since their last call, and neither the whole step nor other replicas'.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mindgrpo.algorithm.sample import Sample
from mindgrpo.rewards.scores import Scores


@dataclass(frozen=True)
class ScoredPart:
    """Scores and texts of some samples, by their numbers."""

    numbers: Sequence[int]
    texts: Sequence[str]
    scores: Scores


@dataclass
class EndedGroups:
    """Samples are numbered from `first`, `size` a group; `score` scores some, in the thread."""

    score: Callable[[Sequence[Sample]], ScoredPart]
    size: int
    first: int
    scored: list[ScoredPart] = field(default_factory=list)
    _failure: BaseException | None = None
    _waiting: dict[int, dict[int, Sample]] = field(default_factory=dict)
    # None ends the thread.
    _ended: queue.SimpleQueue[list[Sample] | None] = field(default_factory=queue.SimpleQueue)
    _thread: threading.Thread | None = None

    def add(self, samples: Sequence[Sample]) -> None:
        """Takes samples that have ended, some perhaps again; a group that is whole goes to the thread."""
        for sample in samples:
            group = (sample.number - self.first) // self.size
            own = self._waiting.setdefault(group, {})
            if len(own) == self.size:
                continue
            own[sample.number] = sample
            if len(own) == self.size:
                self._start()
                self._ended.put([own[number] for number in sorted(own)])

    @property
    def num_whole(self) -> int:
        """Returns the number of groups of which all samples have ended."""
        return sum(len(own) == self.size for own in self._waiting.values())

    def finish(self) -> list[ScoredPart]:
        """Waits for the scores of all whole groups. Raises what scoring raised."""
        if self._thread is not None:
            self._ended.put(None)
            self._thread.join()
        if self._failure is not None:
            raise self._failure
        return self.scored

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="ended groups", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        is_over = False
        while not is_over:
            groups = [self._ended.get()]
            while not self._ended.empty():
                groups.append(self._ended.get())
            is_over = None in groups
            samples = [sample for group in groups if group is not None for sample in group]
            if not samples or self._failure is not None:
                continue
            try:
                self.scored.append(self.score(samples))
            except BaseException as failure:
                # Raised where the run waits.
                self._failure = failure
