"""The engine whose weights and cache are the ranks' own: requests are checked and laid out, and a decoder runs them.

All ranks of a model group run alike and end with the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from mindgrpo.algorithm.image_tokens import ImageFeatures
from mindgrpo.algorithm.sample import LENGTH, STOPPED, Request, Sample
from mindgrpo.backend.contract import Backend, Pool
from mindgrpo.backend.kernels.contract import Kernels
from mindgrpo.backend.kernels.rollout import GenerationBatch
from mindgrpo.backend.kernels.shapes import SamplingParams
from mindgrpo.models.decoder_config import DecoderConfig
from mindgrpo.models.shard import Adapters, Shard
from mindgrpo.parallel.sharding import Layout
from mindgrpo.rollout.embedded.kv_cache import KVCacheConfig, missing_options
from mindgrpo.rollout.embedded.plain import PlainDecoder
from mindgrpo.rollout.embedded.slots import SlotDecoder
from mindgrpo.rollout.engine import Capabilities, Result, RolloutStats, SeedKey, StaleWeights
from mindgrpo.rollout.noise import ROLLOUT, sample_keys
from mindgrpo.weight_sync.plan import Plan
from mindgrpo.weight_sync.transfer import WeightSyncer
from mindgrpo.weights.local_weights import Weights
from mindgrpo.weights.pretrained import load_weights


class EmbeddedEngine:
    """A RolloutEngine with memory for what `cache_config` says; `kernels` other than the backend's are for tests.

    `sampling.max_tokens` and `repetition_penalty` decide what there is memory for. With `records_routes` samples of
    models with experts have those of their tokens, but for evaluations. `images` are the features of prompts.
    """

    capabilities = Capabilities("embedded")

    def __init__(
        self,
        config: DecoderConfig,
        layout: Layout,
        backend: Backend,
        sampling: SamplingParams,
        cache_config: KVCacheConfig,
        kernels: Kernels | None = None,
        records_routes: bool = False,
        images: ImageFeatures | None = None,
    ) -> None:
        self.sampling, self._backend = sampling, backend
        self._records_routes = records_routes and config.moe is not None
        self.weights = Weights(
            layout, backend.rank, backend, "generator", dtype=backend.compute_dtype
        )
        self.version: int | None = None
        self.stats = RolloutStats()
        self.on_ended: Callable[[list[Sample]], None] | None = None
        if sampling.max_tokens > cache_config.max_tokens:
            raise ValueError(
                f"completions of {sampling.max_tokens} tokens in a cache for {cache_config.max_tokens}"
            )
        self._max_prompt = cache_config.max_prompt
        shard = Shard(config, self.weights, backend, is_trained=False)
        shard.kernels = kernels or backend.kernels
        in_slots = shard.kernels.has_slots and not missing_options(config)
        decoder = SlotDecoder if in_slots else PlainDecoder
        self._decoder = decoder(shard, backend, sampling, cache_config, images)

    @property
    def pools(self) -> Mapping[str, Sequence[Pool]]:
        return {
            "generator": [self.weights.pool, *self._decoder.weight_pools],
            "kv_cache": self._decoder.pools,
        }

    def memory_bytes(self) -> int:
        return sum(pool.num_bytes for pools in self.pools.values() for pool in pools)

    def sleep(self) -> None:
        """Forgets the version: the pools are released by memory/, and with them the weights."""
        self.version = None

    def wake(self) -> None:
        """Does nothing: memory/ has loaded the pools."""

    def transfer_from(
        self, policy: Weights, adapters: Adapters | None, plan: Plan | None = None
    ) -> WeightSyncer:
        return WeightSyncer(policy, adapters, self.weights, self._backend, plan)

    def load(self, directory: str, version: int) -> None:
        self.publish(lambda: load_weights(self.weights, directory), version)

    def close(self) -> None:
        """Does nothing: no process was started."""

    def publish(self, transfer: Callable[[], Result], version: int) -> Result:
        self.version = None
        result = transfer()
        self._decoder.weights_changed()
        self.version = version
        return result

    def generate(
        self, requests: Sequence[Request], sampling: SamplingParams, key: SeedKey, version: int
    ) -> list[Sample]:
        self._check_version(version)
        wanted = [request for request in requests if request.samples]
        if not wanted:
            self.stats = RolloutStats()
            return []
        batch = self._batch(wanted, sampling, key)
        numbered = [(number, r.prompt) for r in wanted for number in r.samples]

        def sample(i: int) -> Sample:
            length = int(batch.lengths[i])
            return Sample.drawn(
                *numbered[i],
                batch.tokens[i, :length].copy(),
                STOPPED if batch.stopped[i] else LENGTH,
                version,
                logps=batch.logps[i, :length].copy(),
                **{name: values[i] for name, values in batch.arrays.items()},
            )

        is_known = np.zeros(len(numbered), bool)

        def report() -> None:
            if self.on_ended is not None:
                has_ended = (batch.stopped > 0) | (batch.lengths == batch.limits)
                fresh = np.flatnonzero(has_ended & ~is_known).tolist()
                is_known[fresh] = True
                self.on_ended([sample(i) for i in fresh])

        self._decoder.report = report
        with self._backend.computing():
            self.stats = self._decoder.run(batch, sampling)
        self._check_version(version)
        return [sample(i) for i in range(len(numbered))]

    def _check_version(self, version: int) -> None:
        if self.version != version:
            raise StaleWeights(f"the generator has weights {self.version}, the policy {version}")

    def _batch(
        self, requests: Sequence[Request], sampling: SamplingParams, key: SeedKey
    ) -> GenerationBatch:
        if sampling.max_tokens > self.sampling.max_tokens:
            raise ValueError(
                f"completions of {sampling.max_tokens} tokens from a generator for {self.sampling.max_tokens}"
            )
        limits: list[int] = []
        for request in requests:
            self._check(request, sampling)
            limits += request.max_tokens or (sampling.max_tokens,) * len(request.samples)
        samples = [sample for request in requests for sample in request.samples]
        keys = [sample_keys(key.seed, key.purpose, key.step, r.samples, r.turn) for r in requests]
        prompts = [np.ascontiguousarray(request.prompt, np.int32) for request in requests]
        prompt_of = [i for i, request in enumerate(requests) for _ in request.samples]
        records = self._records_routes and key.purpose == ROLLOUT
        return GenerationBatch.of(
            prompts, prompt_of, limits, np.concatenate(keys), samples, records
        )

    def _check(self, request: Request, sampling: SamplingParams) -> None:
        if not 0 < len(request.prompt) <= self._max_prompt:
            raise ValueError(
                f"a prompt of {len(request.prompt)} tokens in a cache for {self._max_prompt}"
            )
        limits = request.max_tokens
        if limits is None:
            return
        if len(limits) != len(request.samples):
            raise ValueError(f"{len(limits)} limits for {len(request.samples)} samples")
        if min(limits) < 1 or max(limits) > sampling.max_tokens:
            raise ValueError(
                f"limits of {min(limits)} to {max(limits)} tokens, but a sample has 1 to {sampling.max_tokens}"
            )
