"""Log-probs of conversations of up to four turns: the generator's, the trainer's and transformers', token by token.

The bundled model in float32, and a tool that is scripted. In this folder for transformers, which vLLM's environment
has. Does not prove that a whole step trains on the right tokens: test_action_mask.py does.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from distributed.scripted_turns import scripted
from engine_process import ROOT, Oracle
from engine_subject import needs_vllm

from mindgrpo.algorithm.packing import MicroShape, PackedRollout
from mindgrpo.algorithm.sample import Request, Rollout, Sample, collect
from mindgrpo.backend.cpu.backend import CpuBackend
from mindgrpo.backend.kernels.shapes import SamplingParams
from mindgrpo.models.decoder_config import read_config
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.models.pipeline import ForwardPipeline, compute_log_probs
from mindgrpo.models.shard import Shard
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Layout
from mindgrpo.rollout.embedded.engine import EmbeddedEngine
from mindgrpo.rollout.embedded.kv_cache import KVCacheConfig
from mindgrpo.rollout.engine import SeedKey

pytestmark = needs_vllm

MODEL = ROOT / "examples" / "grpo" / "tiny_arithmetic" / "model"
TURNS, MAX_PROMPT, MAX_TOKENS, TEMPERATURE = 4, 8, 40, 3.0
# Every third id ends a turn; hot, so that they are drawn.
SAMPLING = SamplingParams(
    temperature=TEMPERATURE, max_tokens=MAX_TOKENS, stop_ids=tuple(range(0, 352, 3))
)
# float32 over four layers; measured: 1.4e-6.
CLOSE = 1e-5


def engine_and_pipeline(backend: CpuBackend) -> tuple[EmbeddedEngine, ForwardPipeline]:
    config = read_config(MODEL)
    layout = Layout.of(Mesh(1, 1), parameter_specs(config))
    longest = MAX_PROMPT + MAX_TOKENS
    room = KVCacheConfig(8, 4, None, longest, MAX_TOKENS)
    engine = EmbeddedEngine(config, layout, backend, SAMPLING, room)
    engine.load(str(MODEL), 1)
    shard = Shard(config, engine.weights, backend)
    shape = MicroShape(2, 2 * longest)
    return engine, ForwardPipeline(shard, backend, "policy", shape, longest, TEMPERATURE)


def conversations_of(engine: EmbeddedEngine) -> Rollout:
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 352, n).astype(np.int32) for n in (3, MAX_PROMPT)]
    requests = [Request(prompt, tuple(range(8 * i, 8 * i + 8))) for i, prompt in enumerate(prompts)]
    driver = scripted(TURNS, has_environment=False, is_first=True)
    assert driver is not None

    def generate(asked: Sequence[Request]) -> list[Sample]:
        return engine.generate(asked, SAMPLING, SeedKey(3, 0, 0), 1)

    return collect(driver.run(requests, MAX_TOKENS, generate), 8, range(len(prompts)))


def test_log_probs_of_action_tokens_are_those_of_transformers_on_the_whole_conversation(
    oracle: Oracle,
) -> None:
    backend = CpuBackend({})
    engine, pipeline = engine_and_pipeline(backend)
    rollout = conversations_of(engine)
    turns = [sum(m["role"] == "assistant" for m in own) for own in rollout.messages]
    assert {1, TURNS} <= set(turns)
    trained = compute_log_probs(pipeline, Mesh(1, 1), backend, PackedRollout(rollout))
    rows = [
        np.concatenate([prompt, ids]).tolist()
        for prompt, ids in zip(rollout.prompt_ids, rollout.completion_ids, strict=True)
    ]
    compared = 0
    for i, whole in enumerate(oracle.log_probs(Path(MODEL), TEMPERATURE, rows)):
        ids, mask = rollout.completion_ids[i], rollout.action_mask[i]
        first = len(rollout.prompt_ids[i]) - 1
        expected = whole[first + np.arange(len(ids)), ids]
        np.testing.assert_allclose(trained[i][mask], expected[mask], rtol=0, atol=CLOSE)
        np.testing.assert_allclose(
            rollout.generator_logps[i][mask], expected[mask], rtol=0, atol=CLOSE
        )
        compared += int(mask.sum())
    assert compared > 100
