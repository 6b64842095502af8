"""Requests in, completions out: what is asked for is checked and laid out as a job, and a decoder runs it.

All ranks of a model group run alike and end with the same tokens. Refuses to run on weights of another version
than asked for, and prompts that leave no room for a completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mindgrpo.algorithm.types import LENGTH, STOPPED, Completion
from mindgrpo.backend.contract import Backend, Pool
from mindgrpo.backend.kernels.contract import Kernels
from mindgrpo.backend.kernels.rollout import Job
from mindgrpo.models.decoder import Shard
from mindgrpo.models.families import DecoderConfig
from mindgrpo.parallel.sharding import Layout
from mindgrpo.rollout.embedded.kv_cache import Room
from mindgrpo.rollout.embedded.plain import PlainDecoder
from mindgrpo.rollout.embedded.slots import SlotDecoder
from mindgrpo.rollout.noise import sample_keys
from mindgrpo.rollout.sampling_params import SamplingSettings
from mindgrpo.rollout.stats import Usage
from mindgrpo.weights.local_weights import Weights


@dataclass(frozen=True)
class Request:
    """`samples` are the global numbers of the completions wanted of `prompt` int32 [n]; they choose the noise.

    `max_tokens` limits each sample by itself; None takes the settings' limit for all.
    """

    prompt: np.ndarray
    samples: tuple[int, ...]
    max_tokens: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Draw:
    """What the noise depends on beside sample and position."""

    seed: int
    purpose: int
    step: int


class StaleWeights(RuntimeError):
    """The generator's weights are not those of the policy's current version."""


class Generator:
    """Memory for what `room` says; `kernels` other than the backend's are for comparing them.

    `usage` tells of the last call of `generate`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layout: Layout,
        backend: Backend,
        settings: SamplingSettings,
        room: Room,
        kernels: Kernels | None = None,
    ) -> None:
        self.settings = settings
        self.weights = Weights(layout, backend.rank, backend)
        self.version: int | None = None
        self.usage = Usage(0, 0, 0, 0)
        if settings.max_tokens > room.max_tokens:
            raise ValueError(
                f"completions of {settings.max_tokens} tokens in a cache for {room.max_tokens}"
            )
        self._max_prompt = room.max_prompt
        shard = Shard(config, self.weights, backend, "generator")
        shard.kernels = kernels or backend.kernels
        decoder = SlotDecoder if shard.kernels.has_slots else PlainDecoder
        self._decoder = decoder(shard, backend, settings, room)

    @property
    def cache(self) -> Pool:
        return self._decoder.cache

    def generate(
        self,
        requests: Sequence[Request],
        draw: Draw,
        version: int,
        settings: SamplingSettings | None = None,
    ) -> list[Completion]:
        """One Completion a sample, in the order of the requests, drawn by `settings` (None: the generator's own).

        Raises StaleWeights, and ValueError for requests and settings that the generator was not made for.
        """
        settings = settings or self.settings
        if self.version != version:
            raise StaleWeights(f"the generator has weights {self.version}, the policy {version}")
        wanted = [request for request in requests if request.samples]
        if not wanted:
            self.usage = Usage(0, 0, 0, 0)
            return []
        job = self._job(wanted, draw, settings)
        self.usage = self._decoder.run(job, settings)
        samples = [sample for request in wanted for sample in request.samples]
        return [
            Completion(
                sample,
                job.tokens[i, :length].copy(),
                job.logps[i, :length].copy(),
                STOPPED if job.stopped[i] else LENGTH,
            )
            for i, (sample, length) in enumerate(zip(samples, job.lengths.tolist(), strict=True))
        ]

    def _job(self, requests: Sequence[Request], draw: Draw, settings: SamplingSettings) -> Job:
        if settings.max_tokens > self.settings.max_tokens:
            raise ValueError(
                f"completions of {settings.max_tokens} tokens from a generator for {self.settings.max_tokens}"
            )
        limits: list[int] = []
        for request in requests:
            self._check(request, settings)
            limits += request.max_tokens or (settings.max_tokens,) * len(request.samples)
        samples = [sample for request in requests for sample in request.samples]
        keys = sample_keys(draw.seed, draw.purpose, draw.step, samples)
        prompts = [np.ascontiguousarray(request.prompt, np.int32) for request in requests]
        prompt_of = [i for i, request in enumerate(requests) for _ in request.samples]
        return Job.of(prompts, prompt_of, limits, keys)

    def _check(self, request: Request, settings: SamplingSettings) -> None:
        if not 0 < len(request.prompt) <= self._max_prompt:
            raise ValueError(
                f"a prompt of {len(request.prompt)} tokens in a cache for {self._max_prompt}"
            )
        limits = request.max_tokens
        if limits is None:
            return
        if len(limits) != len(request.samples):
            raise ValueError(f"{len(limits)} limits for {len(request.samples)} samples")
        if min(limits) < 1 or max(limits) > settings.max_tokens:
            raise ValueError(
                f"limits of {min(limits)} to {max(limits)} tokens, but a sample has 1 to {settings.max_tokens}"
            )
