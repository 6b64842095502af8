"""Runs samples through slots: prompts are prefilled once a group, then every slot decodes until all have stopped.

All ranks of a model group run alike and end with the same tokens. Refuses to run on weights of another version
than asked for, and prompts that leave no room for a completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from mindspore import Tensor

from mindgrpo.algorithm.samples import LENGTH, STOPPED, Completion
from mindgrpo.backend import Backend, Pool
from mindgrpo.generate.cells import Decode, Prefill
from mindgrpo.generate.noise import uniforms
from mindgrpo.generate.settings import SamplingSettings
from mindgrpo.layout.split import Layout
from mindgrpo.model.decoder import Shard
from mindgrpo.model.families import DecoderConfig
from mindgrpo.model.weights import FLOAT_BYTES, Weights

PREFILL_TOKENS = 1024


@dataclass(frozen=True)
class Request:
    """`samples` are the global numbers of the completions wanted of `prompt` int32 [n]; they choose the noise."""

    prompt: np.ndarray
    samples: tuple[int, ...]


@dataclass(frozen=True)
class Draw:
    """What the noise depends on beside sample and position."""

    seed: int
    purpose: int
    step: int


class StaleWeights(RuntimeError):
    """The generator's weights are not those of the policy's current version."""


class Generator:
    """`slots` samples at a time; prompts up to `max_prompt` tokens."""

    def __init__(
        self,
        config: DecoderConfig,
        layout: Layout,
        backend: Backend,
        settings: SamplingSettings,
        slots: int,
        copies: int,
        max_prompt: int,
    ) -> None:
        self.settings = settings
        self.weights = Weights(layout, backend.rank, backend)
        self.version: int | None = None
        self.slots = slots
        self._max_prompt = max_prompt
        self._length = max_prompt + settings.max_tokens
        self._copies = copies
        self._shard = shard = Shard(config, self.weights, backend, "generator")
        self._prompts_at_once = max(1, min(slots // copies, PREFILL_TOKENS // max_prompt))
        self._kv = shard.kv_heads
        shape = (slots * shard.kv_heads * self._length, config.head_dim)
        size = shape[0] * shape[1]
        num_layers = len(shard.layers)
        self.cache: Pool = backend.pool(2 * num_layers * size * FLOAT_BYTES)

        def cache(index: int, name: str) -> object:
            return backend.parameter(self.cache.view(index * size, shape), name, False)

        caches = [
            (cache(2 * i, f"keys{i}"), cache(2 * i + 1, f"values{i}")) for i in range(num_layers)
        ]
        self._seen: np.ndarray | None = None
        seen = None
        if settings.repetition_penalty != 1.0:
            # Apart from the cache, as the host writes it before every wave.
            self._seen_pool = backend.pool(slots * shard.local_vocab * FLOAT_BYTES)
            self._seen = self._seen_pool.view(0, (slots, shard.local_vocab))
            seen = backend.parameter(self._seen, "seen", False)
        decode = Decode(shard, caches, slots, self._length, settings, seen)
        self._decode = backend.graph(decode, "decode")
        self._prefill = backend.graph(Prefill(shard, caches, max_prompt), "prefill")

    def generate(self, requests: Sequence[Request], draw: Draw, version: int) -> list[Completion]:
        """One Completion a sample, in the order of the requests. Raises StaleWeights."""
        if self.version != version:
            raise StaleWeights(f"the generator has weights {self.version}, the policy {version}")
        completions: list[Completion] = []
        wave: list[Request] = []
        for request in requests:
            if sum(len(r.samples) for r in wave) + len(request.samples) > self.slots:
                completions += self._run_wave(wave, draw)
                wave = []
            wave.append(request)
        return completions + (self._run_wave(wave, draw) if wave else [])

    def _run_wave(self, wave: Sequence[Request], draw: Draw) -> list[Completion]:
        samples = [sample for request in wave for sample in request.samples]
        prompts = [request.prompt for request in wave for _ in request.samples]
        self._fill_cache(wave)
        self._mark_seen(prompts)
        settings, count = self.settings, len(samples)
        noise = np.zeros((settings.max_tokens, self.slots), np.float32)
        noise[:, :count] = uniforms(
            draw.seed, draw.purpose, draw.step, samples, settings.max_tokens
        ).T
        tokens = np.zeros(self.slots, np.int32)
        positions = np.zeros(self.slots, np.int32)
        tokens[:count] = [prompt[-1] for prompt in prompts]
        positions[:count] = [len(prompt) - 1 for prompt in prompts]
        drawn = np.zeros((settings.max_tokens, self.slots), np.int32)
        logps = np.zeros((settings.max_tokens, self.slots), np.float32)
        lengths = np.full(self.slots, -1)
        lengths[count:] = 0
        stops = np.array(settings.stop_ids, np.int32)
        for t in range(settings.max_tokens):
            banned = np.full(self.slots, float(t < settings.min_tokens), np.float32)
            out = self._decode(*(Tensor(a) for a in (tokens, positions, noise[t], banned)))
            drawn[t], logps[t] = out[0].asnumpy(), out[1].asnumpy()
            ended = (lengths < 0) & np.isin(drawn[t], stops)
            lengths[ended] = t + 1
            if (lengths >= 0).all():
                break
            running = lengths < 0
            tokens = np.where(running, drawn[t], tokens).astype(np.int32)
            positions = np.where(running, positions + 1, positions).astype(np.int32)
        reasons = [STOPPED if n > 0 else LENGTH for n in lengths[:count]]
        lengths[lengths < 0] = settings.max_tokens
        return [
            Completion(sample, drawn[:n, i].copy(), logps[:n, i].copy(), reasons[i])
            for i, (sample, n) in enumerate(zip(samples, lengths, strict=False))
        ]

    def _fill_cache(self, wave: Sequence[Request]) -> None:
        at_once = self._prompts_at_once
        slot = 0
        for start in range(0, len(wave), at_once):
            part = wave[start : start + at_once]
            tokens = np.zeros((at_once, self._max_prompt), np.int32)
            pairs: list[tuple[int, int]] = []
            for index, request in enumerate(part):
                if len(request.prompt) > self._max_prompt:
                    raise ValueError(
                        f"a prompt of {len(request.prompt)} tokens in a cache for {self._max_prompt}"
                    )
                tokens[index, : len(request.prompt)] = request.prompt
                pairs += [(index, slot + i) for i in range(len(request.samples))]
                slot += len(request.samples)
            # A short part writes its last slot several times: the same bytes, and no other shape to compile.
            pairs += [pairs[-1]] * (at_once * self._copies - len(pairs))
            source = np.array([index for index, _ in pairs], np.int32)
            rows = self._cache_rows(np.array([target for _, target in pairs], np.int64))
            self._prefill(Tensor(tokens), Tensor(source), Tensor(rows))

    def _cache_rows(self, slots: np.ndarray) -> np.ndarray:
        heads = slots[:, None] * self._kv + np.arange(self._kv)
        rows = heads[:, :, None] * self._length + np.arange(self._max_prompt)
        return rows.reshape(-1).astype(np.int32)

    def _mark_seen(self, prompts: Sequence[np.ndarray]) -> None:
        if self._seen is None:
            return
        self._seen[...] = 0.0
        first, count = self._shard.first_token, self._shard.local_vocab
        for slot, prompt in enumerate(prompts):
            local = prompt[(prompt >= first) & (prompt < first + count)] - first
            self._seen[slot, local] = 1.0
        self._seen_pool.push()
