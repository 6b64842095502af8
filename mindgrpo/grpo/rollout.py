"""Makes a step's rollout on all ranks together, and the log-probs that a model gives to its tokens.

Every rank ends with the same Rollout and the same log-probs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mindgrpo.algorithm.packing import PackedRollout
from mindgrpo.algorithm.types import Completion, Rollout, collect
from mindgrpo.backend.contract import Backend
from mindgrpo.backend.kernels.sampling_params import SamplingParams
from mindgrpo.grpo.rank_consistency import RanksDisagree, different_ranks, digest
from mindgrpo.models.pipeline import ForwardPipeline
from mindgrpo.parallel.mesh import Grid
from mindgrpo.rollout.conversations import Answers, Calls, Conversations, run_together
from mindgrpo.rollout.engine import Request, RolloutEngine, SeedKey
from mindgrpo.rollout.stats import RolloutStats


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
    ) -> Rollout:
        """Completions of `prompts` int32 [n] each by weights of `version`; all ranks together.

        Samples are numbered from `first`, which chooses their noise; `groups` number the prompts (None: from 0).
        Raises RanksDisagree where ranks of one replica drew different tokens.
        """
        prompts = [np.asarray(prompt, np.int32) for prompt in prompts]
        requests = []
        for i, prompt in enumerate(prompts):
            start = first + i * num_generations
            requests.append(Request(prompt, tuple(range(start, start + num_generations))))
        completions = self.complete(requests, sampling, key, version)
        return collect(prompts, num_generations, completions, first, groups)

    def complete(
        self, requests: Sequence[Request], sampling: SamplingParams, key: SeedKey, version: int
    ) -> list[Completion]:
        """One Completion a sample, in no certain order; all ranks together, the same on each. Raises RanksDisagree."""
        coordinates = self.grid.coordinates(self.backend.rank)
        shares = np.array_split(np.arange(len(requests)), self.grid.data_parallel)
        share = [requests[i] for i in shares[coordinates.data].tolist()]
        own = self._complete(share, sampling, key, version)
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
        self, requests: Sequence[Request], sampling: SamplingParams, key: SeedKey, version: int
    ) -> list[Completion]:
        if self.conversations is None:
            completions = self.engine.generate(requests, sampling, key, version)
            self.stats = self.engine.stats
            return completions
        rounds: list[RolloutStats] = []

        def generate(requests: Sequence[Request], turn: int) -> list[Completion]:
            completions = self.engine.generate(requests, sampling, replace(key, turn=turn), version)
            rounds.append(self.engine.stats)
            return completions

        def answer(calls: Calls) -> Answers:
            is_first = self.grid.coordinates(self.backend.rank).model == 0
            pool = None if self.conversations is None else self.conversations.pool
            return run_together(calls if is_first else {}, pool, self.backend.world.gather_objects)

        completions = self.conversations.run(
            requests, sampling.max_tokens, version, generate, answer
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
