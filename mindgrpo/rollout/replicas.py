"""Draws a step's rollout on all ranks together; every rank ends with the same one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mindgrpo.algorithm.sample import Request, Rollout, Sample, collect
from mindgrpo.algorithm.token_arrays import RemoteSegment
from mindgrpo.backend.contract import Backend
from mindgrpo.backend.kernels.shapes import SamplingParams
from mindgrpo.backend.rank_consistency import RanksDisagree, different_ranks, digest
from mindgrpo.data.prompts import Prompt
from mindgrpo.environments.contract import Opening
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.rollout.conversations import Conversations
from mindgrpo.rollout.engine import RolloutEngine, RolloutStats, SeedKey

NO_TOKENS = np.zeros(0, np.int32)


@dataclass
class Replicas:
    """`engine` on every rank of `mesh`, whose data-parallel replicas share the prompts out in order.

    `stats` are of all rollouts since they were last set, on the first rank of each replica. With `conversations`
    completions may have several turns.
    """

    engine: RolloutEngine
    mesh: Mesh
    backend: Backend
    conversations: Conversations | None = None
    stats: RolloutStats = RolloutStats()

    def generate(
        self,
        prompts: Sequence[Prompt],
        num_generations: int,
        sampling: SamplingParams,
        key: SeedKey,
        version: int,
        first: int = 0,
        groups: Sequence[int] | None = None,
        ended: Callable[[list[Sample]], None] | None = None,
    ) -> Rollout:
        """Draws completions of `prompts` by weights of `version`; all ranks together.

        Samples are numbered from `first`, which chooses their noise; `groups` number the prompts (None: from 0).
        `ended` is called with samples of this replica as they end. Raises RanksDisagree where ranks of one replica drew
        different tokens.
        """
        requests = []
        for i, prompt in enumerate(prompts):
            start = first + i * num_generations
            numbers = tuple(range(start, start + num_generations))
            requests.append(Request(np.asarray(prompt.ids, np.int32), numbers))

        def opening(sample: int) -> Opening:
            index = (sample - first) // num_generations
            # The samples of a group begin alike, also where the environment draws at random.
            seed = f"{key.seed}/{key.purpose}/{key.step}/{first + index * num_generations}"
            return Opening(prompts[index].row, seed, f"{key.seed}/{prompts[index].index}")

        def draw(share: Sequence[Request]) -> list[Sample]:
            conversations = self.conversations
            if conversations is None:
                self.engine.on_ended = ended
                try:
                    return self._draw(share, sampling, key, version)
                finally:
                    self.engine.on_ended = None
            openings = None
            if conversations.form is not None:
                openings = {i: opening(i) for request in share for i in request.samples}
            return conversations.run(
                share,
                sampling.max_tokens,
                lambda waiting: self._draw(waiting, sampling, key, version),
                self._is_first,
                openings,
                ended,
            )

        samples = self._shared_out(requests, key, draw)
        return collect(samples, num_generations, groups or range(len(prompts)), first)

    def complete(
        self, requests: Sequence[Request], sampling: SamplingParams, key: SeedKey, version: int
    ) -> list[Sample]:
        """Draws a chunk of each sample, without its prompt, which all ranks have; all ranks together.

        Every rank gets the same. Raises RanksDisagree.
        """

        def draw(share: Sequence[Request]) -> list[Sample]:
            chunks = self._draw(share, sampling, key, version)
            return [replace(chunk, prompt=NO_TOKENS) for chunk in chunks]

        return self._shared_out(requests, key, draw)

    def next_turns(self, drawn: Mapping[int, Sample], max_tokens: int) -> Mapping[int, Sample]:
        """Answers turns that have ended, once all replies are there; returns all samples, which every rank has."""
        if self.conversations is None:
            return drawn
        return self.conversations.next_turns(drawn, max_tokens, asks=self.backend.rank == 0)

    def _shared_out(
        self,
        requests: Sequence[Request],
        key: SeedKey,
        draw: Callable[[Sequence[Request]], list[Sample]],
    ) -> list[Sample]:
        index = self.mesh.index(self.backend.rank, "dp")
        shares = np.array_split(np.arange(len(requests)), self.mesh.dp)
        own, known = draw([requests[i] for i in shares[index].tolist()]), dict[int, RemoteSegment]()
        owner = self.mesh.group(self.backend.rank, ("pp", "tp"))[0]
        own = [sample.held_by(owner, known) for sample in own]
        tokens = digest([sample.tokens for sample in own])
        by_rank = self.backend.world.gather_objects((own if self._is_first else [], tokens))
        for ranks in self.mesh.groups(("pp", "tp")):
            different = different_ranks([by_rank[rank][1] for rank in ranks])
            if different:
                word = "rank" if len(different) == 1 else "ranks"
                names = ", ".join(str(ranks[i]) for i in different)
                raise RanksDisagree(
                    f"{word} {names} drew other tokens than the ranks {list(ranks)} that share a model, in step "
                    f"{key.step + 1}: they compute with different weights, seeds or code"
                )
        shared = (own if rank == owner else drawn for rank, (drawn, _) in enumerate(by_rank))
        return [sample for drawn in shared for sample in drawn]

    @property
    def _is_first(self) -> bool:
        """Returns whether this rank is the first of those that share a model with it."""
        return self.mesh.index(self.backend.rank, "tp") == 0

    def _draw(
        self, requests: Sequence[Request], sampling: SamplingParams, key: SeedKey, version: int
    ) -> list[Sample]:
        samples = self.engine.generate(requests, sampling, key, version)
        if self._is_first:
            stats = self.engine.stats
            if self.conversations is not None:
                # Which turns are decoded together depends on when replies come.
                stats = replace(stats, rows=0, places=0, steps=0)
            self.stats = RolloutStats.total([self.stats, stats])
        return samples
