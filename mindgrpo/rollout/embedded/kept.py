"""Samples whose keys are in the cache still, so that a conversation goes on without its prompt. Pure.

A turn that follows decodes what was written in between, a step a token, where its keys would else be computed again as
a prompt; what is estimated to be the cheaper is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mindgrpo.backend.kernels.rollout import GenerationBatch, KeptRow, KVCacheLayout

# A decode step of fewer rows takes as long as one of so many, and a row of it as long as a token of a prompt
# (scripts/bench/conversations.py).
FULL_STEP_ROWS = 32


@dataclass(frozen=True)
class KeptSample:
    """`context` int32 [n] is its prompt and everything behind it; its last token has no keys yet."""

    row: KeptRow
    context: np.ndarray


@dataclass(frozen=True)
class ResumedBatch:
    """`batch` as kernels take it: columns count from a sample's first token, and those before `known` are known."""

    batch: GenerationBatch
    rows: list[KeptRow]
    known: np.ndarray

    def give(self, target: GenerationBatch) -> None:
        """What was drawn, to the batch that was asked for."""
        for i, known in enumerate(self.known.tolist()):
            count = int(self.batch.lengths[i]) - known
            for name in ("tokens", "logps"):
                drawn = getattr(self.batch, name)[i, known : known + count]
                getattr(target, name)[i, :count] = drawn
            target.lengths[i], target.stopped[i] = count, self.batch.stopped[i]


def resumed(
    kept: Mapping[int, KeptSample], batch: GenerationBatch, slot_size: int
) -> ResumedBatch | None:
    """None unless every sample of the batch goes on from its keys, has room, and that is the cheaper way."""
    rows: list[KeptRow] = []
    for i, sample in enumerate(batch.samples):
        one, prompt = kept.get(sample), batch.prompts[batch.prompt_of[i]]
        if one is None or not np.array_equal(prompt[: len(one.context)], one.context):
            return None
        rows.append(one.row)
    if not rows:
        return None
    lengths = np.array([len(batch.prompts[at]) for at in batch.prompt_of])
    known = lengths - np.array([row.shared + 1 for row in rows])
    limits = (known + batch.limits).astype(np.int32)
    own = np.array([row.own for row in rows])
    steps = int((known - own).max())
    if limits.max() > slot_size or steps * max(len(rows), FULL_STEP_ROWS) > lengths.sum():
        return None
    prompts = [batch.prompts[at] for at in batch.prompt_of]
    made = GenerationBatch.of(prompts, range(len(rows)), limits.tolist(), batch.keys, batch.samples)
    for i, prompt in enumerate(prompts):
        made.tokens[i, own[i] : known[i]] = prompt[lengths[i] - (known[i] - own[i]) :]
    return ResumedBatch(made, rows, known.astype(np.int32))


def fits(batch: GenerationBatch, layout: KVCacheLayout) -> bool:
    """Whether every sample had a slot, and every prompt a prefix block, that no other one took later."""
    return len(batch.limits) <= layout.slots and len(batch.prompts) <= layout.prefix_blocks


def kept_after(
    batch: GenerationBatch, rows: list[KeptRow], target: GenerationBatch
) -> dict[int, KeptSample]:
    """By sample, after `rows` have drawn `target`; their `own` is made up for the tokens of the batch."""
    samples = {}
    for i, sample in enumerate(batch.samples):
        prompt = batch.prompts[batch.prompt_of[i]]
        context = np.concatenate([prompt, target.tokens[i, : target.lengths[i]]])
        row, shared = rows[i], rows[i].shared
        own = len(context) - shared - 1
        samples[sample] = KeptSample(KeptRow(row.slot, row.prefix, shared, own), context)
    return samples
