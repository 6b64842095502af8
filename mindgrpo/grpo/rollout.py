"""Makes a step's rollout on all ranks together, and the log-probs that a model gives to its tokens.

Every rank ends with the same Rollout and the same log-probs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mindgrpo.algorithm.packing import PackedRollout
from mindgrpo.algorithm.types import Completion, Rollout, collect
from mindgrpo.backend.contract import Backend
from mindgrpo.backend.kernels.sampling_params import SamplingParams
from mindgrpo.environments.contract import Opening
from mindgrpo.grpo.rank_consistency import RanksDisagree, different_ranks, digest
from mindgrpo.models.pipeline import ForwardPipeline
from mindgrpo.parallel.mesh import Grid
from mindgrpo.rollout.conversations import Asked, Conversations, Replies, run_together
from mindgrpo.rollout.engine import Request, RolloutEngine, SeedKey
from mindgrpo.rollout.stats import RolloutStats

# Columns of the data set's row by the number of its prompt.
Rows = Callable[[int], Mapping[str, Any]]


@dataclass
class Replicas:
    """`engine` on every rank of `grid`, whose data-parallel replicas share the prompts out in order.

    `stats` are this rank's, of the last rollout. With `conversations` completions may have several turns.
    """

    engine: RolloutEngine
    grid: Grid
    backend: Backend
    conversations: Conversations | None = None
    stats: RolloutStats = RolloutStats(0, 0, 0, 0)

    def generate(
        self,
        prompts: Sequence[np.ndarray],
        num_generations: int,
        sampling: SamplingParams,
        key: SeedKey,
        version: int,
        first: int = 0,
        groups: Sequence[int] | None = None,
        rows: Rows | None = None,
    ) -> Rollout:
        """Completions of `prompts` int32 [n] each by weights of `version`; all ranks together.

        Samples are numbered from `first`, which chooses their noise; `groups` number the prompts (None: from 0). `rows`
        give an environment the data set's row by the prompt's number. Raises RanksDisagree where ranks of one replica
        drew different tokens.
        """
        prompts = [np.asarray(prompt, np.int32) for prompt in prompts]
        requests = []
        for i, prompt in enumerate(prompts):
            start = first + i * num_generations
            requests.append(Request(prompt, tuple(range(start, start + num_generations))))
        numbers = range(len(prompts)) if groups is None else groups

        def opening(sample: int) -> Opening:
            index = (sample - first) // num_generations
            # The samples of a group begin alike, also where the environment draws at random.
            seed = f"{key.seed}/{key.purpose}/{key.step}/{first + index * num_generations}"
            return Opening({} if rows is None else rows(numbers[index]), seed)

        completions = self.complete(requests, sampling, key, version, opening)
        return collect(prompts, num_generations, completions, first, groups)

    def complete(
        self,
        requests: Sequence[Request],
        sampling: SamplingParams,
        key: SeedKey,
        version: int,
        opening: Callable[[int], Opening] | None = None,
    ) -> list[Completion]:
        """One Completion a sample, in no certain order; all ranks together, the same on each. Raises RanksDisagree."""
        coordinates = self.grid.coordinates(self.backend.rank)
        shares = np.array_split(np.arange(len(requests)), self.grid.data_parallel)
        share = [requests[i] for i in shares[coordinates.data].tolist()]
        own = self._complete(share, sampling, key, version, opening)
        tokens = digest([completion.tokens for completion in own])
        by_rank = self.backend.world.gather_objects((own if coordinates.model == 0 else [], tokens))
        for ranks in map(self.grid.replica, range(self.grid.data_parallel)):
            others = different_ranks([by_rank[rank][1] for rank in ranks])
            if others:
                raise RanksDisagree(
                    f"rank {ranks[others[0]]} drew other tokens than the ranks {list(ranks)} that it shares a model "
                    f"with, in step {key.step + 1}: they compute with different weights, seeds or code"
                )
        return [completion for part, _ in by_rank for completion in part]

    def _complete(
        self,
        requests: Sequence[Request],
        sampling: SamplingParams,
        key: SeedKey,
        version: int,
        opening: Callable[[int], Opening] | None,
    ) -> list[Completion]:
        conversations = self.conversations
        if conversations is None:
            completions = self.engine.generate(requests, sampling, key, version)
            self.stats = self.engine.stats
            return completions
        rounds: list[RolloutStats] = []

        def generate(requests: Sequence[Request], turn: int) -> list[Completion]:
            completions = self.engine.generate(requests, sampling, replace(key, turn=turn), version)
            rounds.append(self.engine.stats)
            return completions

        def answer(asked: Asked) -> Replies:
            is_first = self.grid.coordinates(self.backend.rank).model == 0
            gather = self.backend.world.gather_objects
            return run_together(asked if is_first else {}, conversations.responder, gather)

        completions = conversations.run(
            requests, sampling.max_tokens, version, generate, answer, opening
        )
        self.stats = RolloutStats.total(rounds)
        return completions


def compute_log_probs(
    pipeline: ForwardPipeline | None, grid: Grid, backend: Backend, packed: PackedRollout
) -> list[np.ndarray]:
    """float32 [completion length] a sample: log-probs of `pipeline`'s weights, forward only; all ranks together.

    `pipeline` is None on ranks outside of `grid`.
    """
    own: dict[int, np.ndarray] = {}
    if pipeline is not None:
        coordinates = grid.coordinates(backend.rank)
        batches = packed.micro_batches(pipeline.shape, grid.data_parallel, coordinates.data)
        results = pipeline.log_probs(batches)
        if results is not None and coordinates.model == 0:
            for batch, (logps, _) in zip(batches, results, strict=True):
                own |= batch.gather(logps)
    merged: dict[int, np.ndarray] = {}
    for logps_of_rank in backend.world.gather_objects(own):
        merged |= logps_of_rank
    if len(merged) != len(packed.rollout):
        raise ValueError(f"log-probs of {len(merged)} of {len(packed.rollout)} samples arrived")
    return [merged[i] for i in range(len(packed.rollout))]
