"""Makes a step's rollout on all ranks together; every rank ends with the same one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mindgrpo.algorithm.sample import Completion, Request, Rollout, collect
from mindgrpo.backend.contract import Backend
from mindgrpo.backend.kernels.sampling_params import SamplingParams
from mindgrpo.backend.rank_consistency import RanksDisagree, different_ranks, digest
from mindgrpo.environments.contract import Opening
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.rollout.conversations import Asked, Conversations, Replies, run_together
from mindgrpo.rollout.engine import RolloutEngine, RolloutStats, SeedKey
from mindgrpo.rollout.sample import Sample

# Columns of the data set's row by the number of its prompt.
Rows = Callable[[int], Mapping[str, Any]]


@dataclass
class Replicas:
    """`engine` on every rank of `mesh`, whose data-parallel replicas share the prompts out in order.

    `stats` are this rank's, of the last rollout. With `conversations` completions may have several turns.
    """

    engine: RolloutEngine
    mesh: Mesh
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

        def draw(share: Sequence[Request]) -> list[Completion]:
            if self.conversations is None:
                return self._draw(share, sampling, key, version)
            return self._converse(share, sampling, key, version, opening)

        return collect(
            prompts, num_generations, self._shared_out(requests, key, draw), first, groups
        )

    def complete(
        self, requests: Sequence[Request], sampling: SamplingParams, key: SeedKey, version: int
    ) -> list[Completion]:
        """One turn a sample, in no certain order; all ranks together, the same on each. Raises RanksDisagree."""
        return self._shared_out(
            requests, key, lambda share: self._draw(share, sampling, key, version)
        )

    def next_turns(
        self, drawn: Mapping[int, Sample], max_tokens: int, version: int
    ) -> Mapping[int, Sample]:
        """What becomes of samples, all of which every rank has, once turns that have ended are answered."""
        if self.conversations is None:
            return drawn
        is_first = self.backend.rank == 0
        after, _ = self.conversations.next_turns(
            drawn, max_tokens, version, lambda asked: self._answer(asked if is_first else {})
        )
        return after

    def _shared_out(
        self,
        requests: Sequence[Request],
        key: SeedKey,
        draw: Callable[[Sequence[Request]], list[Completion]],
    ) -> list[Completion]:
        index = self.mesh.index(self.backend.rank, "dp")
        shares = np.array_split(np.arange(len(requests)), self.mesh.dp)
        own = draw([requests[i] for i in shares[index].tolist()])
        tokens = digest([completion.tokens for completion in own])
        by_rank = self.backend.world.gather_objects((own if self._is_first else [], tokens))
        for ranks in self.mesh.groups(("pp", "mp")):
            different = different_ranks([by_rank[rank][1] for rank in ranks])
            if different:
                word = "rank" if len(different) == 1 else "ranks"
                names = ", ".join(str(ranks[i]) for i in different)
                raise RanksDisagree(
                    f"{word} {names} drew other tokens than the ranks {list(ranks)} that share a model, in step "
                    f"{key.step + 1}: they compute with different weights, seeds or code"
                )
        return [completion for part, _ in by_rank for completion in part]

    @property
    def _is_first(self) -> bool:
        """Whether this rank speaks for those that share a model with it."""
        return self.mesh.index(self.backend.rank, "mp") == 0

    def _draw(
        self, requests: Sequence[Request], sampling: SamplingParams, key: SeedKey, version: int
    ) -> list[Completion]:
        completions = self.engine.generate(requests, sampling, key, version)
        self.stats = self.engine.stats
        return completions

    def _converse(
        self,
        requests: Sequence[Request],
        sampling: SamplingParams,
        key: SeedKey,
        version: int,
        opening: Callable[[int], Opening],
    ) -> list[Completion]:
        assert self.conversations is not None
        rounds: list[RolloutStats] = []

        def generate(waiting: Sequence[Request], turn: int) -> list[Completion]:
            completions = self._draw(waiting, sampling, replace(key, turn=turn), version)
            rounds.append(self.stats)
            return completions

        completions = self.conversations.run(
            requests,
            sampling.max_tokens,
            version,
            generate,
            lambda asked: self._answer(asked if self._is_first else {}),
            opening,
        )
        self.stats = RolloutStats.total(rounds)
        return completions

    def _answer(self, own: Asked) -> Replies:
        """`own` is nothing where another rank asks the same."""
        assert self.conversations is not None
        return run_together(own, self.conversations.responder, self.backend.world.gather_objects)
