"""A completion so far, of one turn or of several: who wrote each of its tokens, and by which weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mindgrpo.algorithm.sample import Completion, Request


@dataclass(frozen=True)
class Sample:
    """What stands behind `prompt` int32 [m]; no reason: unfinished.

    Of each token, `tokens` int32, `logps` float32, `versions` int32 and `action_mask` bool, each [n]: by which weights
    it was drawn (or which were there), and whether the policy wrote it. `messages` are the turns that have ended, and
    what was answered.
    """

    prompt: np.ndarray
    tokens: np.ndarray
    logps: np.ndarray
    versions: np.ndarray
    action_mask: np.ndarray
    messages: tuple[Mapping[str, Any], ...] = ()
    finish_reason: str | None = None

    @classmethod
    def begun(cls, prompt: np.ndarray) -> Sample:
        counts = np.zeros(0, np.int32)
        logps, mask = np.zeros(0, np.float32), np.zeros(0, bool)
        return cls(np.asarray(prompt, np.int32), counts, logps, counts, mask)

    @property
    def turn(self) -> np.ndarray:
        """int32 [k]: the policy's tokens since anybody else's."""
        others = np.flatnonzero(~self.action_mask)
        return self.tokens[others[-1] + 1 if others.size else 0 :]

    @property
    def num_turns(self) -> int:
        """The policy's that have ended."""
        return sum(message["role"] == "assistant" for message in self.messages)

    def with_written(self, written: Completion) -> Sample:
        """The policy's next tokens, which end as `written` says."""
        grown = self._with(written.tokens, written.logps, written.version, True)
        return replace(grown, finish_reason=written.finish_reason)

    def with_answer(
        self, ids: Sequence[int], messages: Sequence[Mapping[str, Any]], version: int
    ) -> Sample:
        """Unfinished again: the policy goes on behind `ids`, which are what `messages` became."""
        grown = self._with(np.array(ids, np.int32), np.zeros(len(ids), np.float32), version, False)
        return replace(grown, messages=(*self.messages, *messages), finish_reason=None)

    def _with(self, tokens: np.ndarray, logps: np.ndarray, version: int, is_action: bool) -> Sample:
        count = len(tokens)
        return replace(
            self,
            tokens=np.concatenate([self.tokens, tokens]),
            logps=np.concatenate([self.logps, logps]),
            versions=np.concatenate([self.versions, np.full(count, version, np.int32)]),
            action_mask=np.concatenate([self.action_mask, np.full(count, is_action)]),
        )

    def request(self, number: int, max_tokens: int) -> Request:
        """For the policy's next tokens, `max_tokens` of them at most."""
        return Request(np.concatenate([self.prompt, self.tokens]), (number,), (max_tokens,))
