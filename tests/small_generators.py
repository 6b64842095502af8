"""A small random model and generators of it, for the tests of the generator."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from mindgrpo.algorithm.sample import Request, Sample
from mindgrpo.backend.contract import Backend
from mindgrpo.backend.dtypes import NUM_PARTS
from mindgrpo.backend.kernels.contract import Kernels
from mindgrpo.backend.kernels.native.kernels import NativeKernels
from mindgrpo.backend.kernels.native.library import has_bfloat16, library_path
from mindgrpo.backend.kernels.shapes import SamplingParams
from mindgrpo.models.decoder_config import decoder_config
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Layout
from mindgrpo.rollout.embedded.engine import EmbeddedEngine
from mindgrpo.rollout.embedded.kv_cache import KVCacheConfig
from mindgrpo.rollout.engine import SeedKey
from mindgrpo.weights.local_weights import Weights
from mindgrpo.weights.pretrained import fill_random

VOCAB, GROUP, VERSION = 67, 4, 7
MAX_PROMPT, MAX_TOKENS = 6, 10
ROW = MAX_PROMPT + MAX_TOKENS  # the longest sample ends at the last column
# 0 also fills what is padding, in the generator and in packed rows.
STOPS = (0, 5, 17, 44)
SETTINGS = SamplingParams(temperature=0.8, max_tokens=MAX_TOKENS, stop_ids=STOPS)
CONFIG = decoder_config(
    {
        "model_type": "qwen2",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    },
    "here",
)
LAYOUT = Layout.of(Mesh(1, 1), parameter_specs(CONFIG))

WITH_C = pytest.mark.skipif(library_path() is None, reason="no C compiler on this machine")
KERNELS = ["plain", pytest.param("native", marks=WITH_C)]


HAS_AVX512 = library_path() is not None and has_bfloat16()
WITH_AVX512 = pytest.mark.skipif(
    not HAS_AVX512,
    reason="no C compiler on this machine, or no AVX-512 for oneDNN's products of bfloat16",
)
PRECISIONS = [pytest.param(name, marks=WITH_AVX512) for name in NUM_PARTS]


def kernels_named(name: str) -> Kernels:
    """`high` and `medium` are native, with products of bfloat16."""
    made = Kernels() if name == "plain" else NativeKernels(NUM_PARTS.get(name))
    made.batch_invariant = name == "native"
    return made


def random_weights(backend: Backend) -> Weights:
    made = Weights(LAYOUT, 0, backend)
    fill_random(made, seed=1, scale=0.25)
    return made


def room_of(slots: int, copies: int, max_prompt: int = MAX_PROMPT) -> KVCacheConfig:
    return KVCacheConfig(slots, copies, None, max_prompt, MAX_TOKENS)


def generator_with(
    weights: Weights,
    backend: Backend,
    kernels: Kernels,
    settings: SamplingParams = SETTINGS,
    slots: int = 16,
    copies: int = GROUP,
    max_prompt: int = MAX_PROMPT,
) -> EmbeddedEngine:
    room = room_of(slots, copies, max_prompt)
    made = EmbeddedEngine(CONFIG, LAYOUT, backend, settings, room, kernels)

    def copy() -> None:
        for target, source in zip(
            made.weights.arrays.flat_buffers, weights.arrays.flat_buffers, strict=True
        ):
            target[...] = source

    made.publish(copy, VERSION)
    return made


def requests_of(group: int = GROUP) -> list[Request]:
    """Prompts of every length from one token to the longest, and one of nothing but padding's token."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(1, VOCAB, n).astype(np.int32) for n in range(1, MAX_PROMPT + 1)]
    prompts.append(np.zeros(3, np.int32))
    return [
        Request(prompt, tuple(range(i * group, (i + 1) * group)))
        for i, prompt in enumerate(prompts)
    ]


def run(generator: EmbeddedEngine, requests: Sequence[Request], step: int = 0) -> list[Sample]:
    return run_by(generator, generator.sampling, requests, step)


def by_sample(completions: Sequence[Sample]) -> dict[int, Sample]:
    assert len({completion.number for completion in completions}) == len(completions)
    return {completion.number: completion for completion in completions}


def assert_same(found: Sequence[Sample], expected: Sequence[Sample], atol: float = 1e-5) -> None:
    """The same samples, whatever their order; log-probs to `atol`, or bit for bit with 0."""
    one, other = by_sample(found), by_sample(expected)
    assert one.keys() == other.keys()
    for sample, completion in one.items():
        np.testing.assert_array_equal(completion.tokens, other[sample].tokens)
        np.testing.assert_allclose(completion.logps, other[sample].logps, rtol=0, atol=atol)
        assert completion.finish_reason == other[sample].finish_reason


def run_by(
    generator: EmbeddedEngine,
    settings: SamplingParams,
    requests: Sequence[Request],
    step: int = 0,
) -> list[Sample]:
    """The same with other settings than the generator was made with."""
    return generator.generate(requests, settings, SeedKey(seed=0, purpose=0, step=step), VERSION)
