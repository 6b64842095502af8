"""A step's samples, made on all ranks together: generated, scored once, and given the log-probs that a loss needs.

Every rank ends with the same Samples. Refuses to update weights and to know where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindgrpo.algorithm import packing
from mindgrpo.algorithm.types import Samples, collect
from mindgrpo.backend.contract import Backend
from mindgrpo.data.prompts import Prompt, columns_of
from mindgrpo.data.tokenizer import Tokenizer
from mindgrpo.errors import UserError
from mindgrpo.grpo.rank_consistency import RanksDisagree, different_ranks, digest
from mindgrpo.parallel.sharding import Layout
from mindgrpo.rewards.call import own_columns
from mindgrpo.rewards.score import Scorer
from mindgrpo.rewards.scores import Scores
from mindgrpo.rollout.embedded.engine import Draw, Generator, Request
from mindgrpo.rollout.sampling_params import SamplingSettings
from mindgrpo.training.pipeline import Pipeline


class ScoringFailed(RuntimeError):
    """The reward side of rank 0 failed as a whole; told on every rank, so that none waits for it."""


def generate(
    generator: Generator,
    layout: Layout,
    backend: Backend,
    prompts: Sequence[np.ndarray],
    num_generations: int,
    draw: Draw,
    version: int,
    first: int = 0,
    settings: SamplingSettings | None = None,
) -> Samples:
    """Completions of `prompts` int32 [n] each, shared out over the generating replicas in order.

    Samples are numbered from `first`, which chooses their noise; `settings` stand in for the generator's own.
    """
    place = layout.grid.coordinates(backend.rank)
    mine = np.array_split(np.arange(len(prompts)), layout.grid.data_parallel)[place.data]
    requests = [
        Request(
            np.asarray(prompts[i], np.int32),
            tuple(range(first + i * num_generations, first + (i + 1) * num_generations)),
        )
        for i in mine
    ]
    own = generator.generate(requests, draw, version, settings)
    tokens = digest([completion.tokens for completion in own])
    shared = backend.world.gather_objects((own if place.model == 0 else None, tokens))
    _check_replicas(layout, [drawn for _, drawn in shared], draw)
    arrived = [completion for part, _ in shared if part is not None for completion in part]
    return collect([np.asarray(p, np.int32) for p in prompts], num_generations, arrived, first)


def _check_replicas(layout: Layout, by_rank: Sequence[str], draw: Draw) -> None:
    """Ranks that hold one replica draw the same tokens each for itself. Raises RanksDisagree."""
    for data in range(layout.grid.data_parallel):
        ranks = layout.grid.replica(data)
        others = different_ranks([by_rank[rank] for rank in ranks])
        if others:
            raise RanksDisagree(
                f"rank {ranks[others[0]]} drew other tokens than the ranks {list(ranks)} that it shares a model with, "
                f"in step {draw.step + 1}: they compute with different weights, seeds or code"
            )


@dataclass(frozen=True)
class Scored:
    """`texts` are empty but on rank 0, where they were scored."""

    scores: Scores
    texts: list[str]

    def with_replaced(self, places: Sequence[int], fresh: Scored) -> Scored:
        """`fresh`'s samples at `places`, in order."""
        texts = list(self.texts)
        for place, text in zip(places, fresh.texts, strict=False):
            texts[place] = text
        return Scored(self.scores.with_replaced(places, fresh.scores), texts)


def check_rewards(check: Callable[[], None], backend: Backend) -> None:
    """`check` on rank 0, and its UserError on every rank, so that none goes on and waits for rank 0."""
    said: str | None = None
    if backend.rank == 0:
        try:
            check()
        except UserError as error:
            said = str(error)
    told = backend.world.gather_objects(said)[0]
    if told is not None:
        raise UserError(told)


def score(
    scorer: Scorer | None,
    tokenizer: Tokenizer,
    backend: Backend,
    prompts: Sequence[Prompt],
    samples: Samples,
) -> Scored:
    """Rewards of all samples, computed on rank 0, which alone needs a scorer, and the same everywhere.

    `prompts` one a sample. A sample that a reward failed on has the mean of its group's others as its total.
    """
    texts: list[str] = []
    outcome: Any = None
    if backend.rank == 0:
        assert scorer is not None
        try:
            ids = [tokens.tolist() for tokens in samples.completions]
            texts = [tokenizer.decode(tokens) for tokens in ids]
            own = own_columns([prompt.text for prompt in prompts], ids, samples.finish_reasons)
            answers = [prompt.answer for prompt in prompts]
            # A data set's own column of such a name wins: its author knows what it is for.
            outcome = scorer.score(texts, answers, own | columns_of(prompts))
        except Exception as error:  # whatever it is, the other ranks wait for an answer
            outcome = f"{type(error).__name__}: {error}"
    shared = backend.world.gather_objects(outcome)[0]
    if isinstance(shared, str):
        raise ScoringFailed(f"the rewards could not be computed on rank 0: {shared}")
    return Scored(shared.filled(samples.groups), texts)


def sample_logps(
    pipeline: Pipeline | None,
    layout: Layout,
    backend: Backend,
    samples: Samples,
) -> list[np.ndarray]:
    """float32 [completion length] a sample: log-probs of `pipeline`'s weights, forward only."""
    own: dict[int, np.ndarray] = {}
    if pipeline is not None:
        place = layout.grid.coordinates(backend.rank)
        rows = packing.pack(samples, range(len(samples)), pipeline.shape)
        batches = packing.micro_batches(
            samples, rows, pipeline.shape, layout.grid.data_parallel, place.data
        )
        results = pipeline.logprobs(batches)
        if results is not None and place.model == 0:
            for batch, (logps, _) in zip(batches, results, strict=True):
                own |= batch.gather(logps)
    merged: dict[int, np.ndarray] = {}
    for part in backend.world.gather_objects(own):
        merged |= part
    if len(merged) != len(samples):
        raise ValueError(f"log-probs of {len(merged)} of {len(samples)} samples arrived")
    return [merged[i] for i in range(len(samples))]
