"""Guesses what samples say next: what followed their last tokens before, in texts of the same prompt.

A drawn token is a function of its prefix and its noise, so a row behind a guessed prefix draws the sample's own token
if the guess is right, and is dropped if not (arXiv:2408.07978): guesses change how many steps a rollout takes, and
nothing else. Ranks that share a model make the same guesses, as they know the same texts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile

import numpy as np

from mindgrpo.backend.kernels.rollout import GenerationBatch

# A guess needs as many equal tokens; more are tried first.
MATCHES = (8, 4, 2)
# Rows that no sample needs are checked at no cost as long as there are so few of them in all, because reading the
# weights takes that long (scripts/bench/drafts.py).
FREE_ROWS = 4
# After so many checks of which too few were right, guessing pauses for FIRST_PAUSE tokens, and twice as many next time.
WINDOW, FIRST_PAUSE, LONGEST_PAUSE = 16, 64, 4096
# Tokens of texts that are taken in during one step, which takes the host some 2 ms.
INDEXED_AT_ONCE = 1024


class PromptTexts:
    """The texts of one prompt: what followed which tokens, in the prompt too."""

    def __init__(self, prompt: np.ndarray) -> None:
        self._texts: list[list[int]] = [prompt.tolist()]
        self._opening = self._texts[0][-MATCHES[0] :]
        # Of each text, how many tokens are in `_followed`: a run of tokens -> the text and the place of what followed.
        self._indexed = [0]
        self._followed: dict[tuple[int, ...], tuple[int, int]] = {}

    def open(self, tokens: Sequence[int] = ()) -> int:
        """Returns the number of a new text, of `tokens` behind the prompt."""
        self._texts.append([*self._opening, *tokens])
        self._indexed.append(len(self._opening))
        return len(self._texts) - 1

    def extend(self, number: int, tokens: Sequence[int]) -> None:
        self._texts[number] += tokens

    def index(self, most: int) -> int:
        """Takes in what followed what, of at most so many tokens; returns of how many."""
        left = most
        for number, text in enumerate(self._texts):
            start = self._indexed[number]
            stop = min(len(text), start + left)
            for begin in range(start, stop):
                for length in MATCHES:
                    if begin >= length:
                        self._followed[tuple(text[begin - length : begin])] = number, begin
            self._indexed[number], left = stop, left - (stop - start)
        return most - left

    def guess(self, number: int, count: int) -> list[int]:
        """Returns at most `count` tokens that may follow the text."""
        text = self._texts[number]
        for length in MATCHES:
            at = self._followed.get(tuple(text[-length:]))
            if at is not None:
                other, begin = at
                following = self._texts[other][begin : begin + count]
                # The tokens of an image, below 0, are nobody's guess.
                return [*takewhile(lambda token: token >= 0, following)]
        return []


class DraftHistory:
    """The completions that prompts had last, in at most `limit` bytes; the oldest prompts are forgotten first."""

    def __init__(self, limit: int) -> None:
        self._limit, self._bytes = limit, 0
        self._by_prompt: OrderedDict[bytes, list[np.ndarray]] = OrderedDict()

    def of(self, prompt: np.ndarray) -> list[np.ndarray]:
        return self._by_prompt.get(prompt.tobytes(), [])

    def keep(self, prompt: np.ndarray, completions: list[np.ndarray]) -> None:
        key = prompt.tobytes()
        self._bytes -= self._size(key, self._by_prompt.pop(key, []))
        self._by_prompt[key] = completions
        self._bytes += self._size(key, completions)
        while self._bytes > self._limit and self._by_prompt:
            oldest, texts = self._by_prompt.popitem(last=False)
            self._bytes -= self._size(oldest, texts)

    @staticmethod
    def _size(key: bytes, texts: list[np.ndarray]) -> int:
        return len(key) + sum(text.nbytes for text in texts) if texts else 0


class Drafts:
    """The guesses of one job, `batch`, whose samples begin with `known` int32 [samples] tokens that nobody draws.

    Guessing pauses where fewer than `least_right` tokens a check are right.
    """

    def __init__(
        self,
        batch: GenerationBatch,
        history: DraftHistory,
        least_right: float,
        known: np.ndarray | None = None,
    ) -> None:
        self._batch, self._history, self._least_right = batch, history, least_right
        self._prompt_of, self._limits = batch.prompt_of.tolist(), batch.limits.tolist()
        self._known = [0] * len(self._limits) if known is None else known.tolist()
        self._samples: dict[int, list[int]] = {}
        for sample, prompt in enumerate(self._prompt_of):
            self._samples.setdefault(prompt, []).append(sample)
        # Made for a prompt when a sample of it is first guessed.
        self._texts: dict[int, PromptTexts] = {}
        self._numbers: dict[int, int] = {}
        # Of each sample, how many tokens its text has.
        self._read = [*self._known]
        self._checks = self._right = self._waits = 0
        self._pause = FIRST_PAUSE

    def guesses(self, samples: Sequence[int], rows: int) -> list[list[int]]:
        """Returns tokens that may come next in each of `samples`, at most `rows` in all, and no sample's last."""
        self._read_drawn(dict.fromkeys(self._prompt_of[sample] for sample in samples))
        guesses = []
        for left, sample in zip(range(len(samples), 0, -1), samples, strict=True):
            room = self._limits[sample] - self._read[sample] - 1
            guesses.append(self.guess(sample, min(-(-rows // left), room)))
            rows -= len(guesses[-1])
        return guesses

    def guess(self, sample: int, count: int) -> list[int]:
        """Returns at most `count` tokens that may come next."""
        if count < 1:
            return []
        return self._texts[self._prompt_of[sample]].guess(self._numbers[sample], count)

    def _read_drawn(self, prompts: Iterable[int]) -> None:
        lengths = self._batch.lengths.tolist()
        for prompt in prompts:
            texts = self._texts.get(prompt) or self._open(prompt)
            for sample in self._samples[prompt]:
                length, begin = lengths[sample], self._read[sample]
                if length > begin:
                    drawn = self._batch.tokens[sample, begin:length].tolist()
                    texts.extend(self._numbers[sample], drawn)
                    self._read[sample] = length

    def _open(self, prompt: int) -> PromptTexts:
        ids = self._batch.prompts[prompt]
        texts = self._texts[prompt] = PromptTexts(ids)
        for completion in self._history.of(ids):
            texts.open(completion.tolist())
        self._numbers |= {sample: texts.open() for sample in self._samples[prompt]}
        return texts

    def index(self) -> None:
        """Takes in what followed what in the texts that were read; to be called while a step is being computed."""
        left = INDEXED_AT_ONCE
        for texts in self._texts.values():
            left -= texts.index(left)

    @property
    def is_pausing(self) -> bool:
        return self._waits > 0

    def passed(self, tokens: int) -> None:
        """Takes that so many were drawn without guesses."""
        self._waits = max(0, self._waits - tokens)

    def checked(self, checks: int, accepted: int) -> None:
        """Takes how a step's guesses were: for so many samples, of which so many tokens were right."""
        self._checks, self._right = self._checks + checks, self._right + accepted
        if self._checks < WINDOW:
            return
        if self._right >= self._least_right * self._checks:
            self._pause = FIRST_PAUSE
        else:
            self._waits, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
        self._checks = self._right = 0

    def end(self) -> None:
        """Keeps what was drawn for the prompts' next epoch."""
        batch = self._batch
        for prompt, samples in self._samples.items():
            completions = [
                batch.tokens[sample, : batch.lengths[sample]].copy() for sample in samples
            ]
            self._history.keep(batch.prompts[prompt], completions)
