"""Stages of one process, in threads: gradients, losses and log-probs of stages in chunks have the bits of whole ones.

Does not prove anything about ranks or sums between them: tests/test_distributed.py does.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
from algorithms import loss_of
from distributed import cases as c

from mindgrpo.algorithm.packing import MicroBatch, MicroShape, PackedRollout
from mindgrpo.algorithm.sample import Rollout
from mindgrpo.backend.cpu.backend import CpuBackend
from mindgrpo.models.decoder import KEEP_ALL
from mindgrpo.models.decoder_config import decoder_config
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.models.pipeline import ForwardPipeline
from mindgrpo.models.shard import Shard
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Layout
from mindgrpo.training.pipeline import forward_backward
from mindgrpo.training.stage_graphs import LossInputs, LossStep, PolicyLoss, StageBackward, Trained
from mindgrpo.weights.local_weights import Weights
from mindgrpo.weights.pretrained import fill_random

CONFIG = decoder_config(
    {
        "model_type": "qwen2",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "here",
)
# Of two stages the first has none.
EXPERTS = decoder_config(
    c.QWEN3_MOE | {"num_hidden_layers": 4, "vocab_size": 64, "mlp_only_layers": [0, 1]}, "here"
)
SHAPE, LENGTHS, TEMPERATURE = MicroShape(1, 16), (9, 5, 12, 7, 3, 10, 8), 0.9
Bits = tuple[Any, ...]


class Links:
    """From stage to stage, in the order of sending; a send waits for nobody."""

    def __init__(self) -> None:
        self._queues: dict[tuple[int, int], queue.Queue[Any]] = defaultdict(queue.Queue)

    def of(self, stage: int) -> Callable[[int, Any], Any]:
        queues = self._queues

        class Link:
            def __init__(self, peer: int) -> None:
                self.peer, self.count, self.read = peer, 0, dict[int, Any]()

            def exchange(self, outgoing: Any, receives: Any) -> Callable[[], Any]:
                if outgoing is not None:
                    queues[stage, self.peer].put(outgoing)
                number, self.count = self.count, self.count + (receives is not None)

                def take() -> Any:
                    while number not in self.read:
                        self.read[len(self.read)] = queues[self.peer, stage].get(timeout=60)
                    assert self.read[number].shape == tuple(receives)
                    return self.read[number]

                return take

        return lambda peer, shape: Link(peer)


def rollout() -> PackedRollout:
    rng = np.random.default_rng(0)
    samples = Rollout.single_turn(
        [rng.integers(0, 64, 3).astype(np.int32) for _ in LENGTHS],
        [rng.integers(0, 64, count).astype(np.int32) for count in LENGTHS],
        ["stop"] * len(LENGTHS),
        [np.zeros(count, np.float32) for count in LENGTHS],
        range(len(LENGTHS)),
    )
    return PackedRollout(samples)


def losses(batches: Sequence[MicroBatch]) -> list[LossInputs]:
    rng = np.random.default_rng(1)
    made = []
    for batch in batches:
        count = batch.labels.shape
        numbers = [rng.normal(size=count).astype(np.float32) for _ in range(3)]
        weights = (batch.picks >= 0).astype(np.float32)
        starts = np.zeros(count, np.int32)
        made.append(LossInputs(*numbers, weights, weights, starts, weights, weights))
    return made


@cache
def outcome(stages: int, chunks: int, has_experts: bool = False) -> tuple[Bits, ...]:
    """The bits of log-probs, of what an update predicts and of its gradients."""
    backend, lock, links = CpuBackend({}), threading.Lock(), Links()
    config = EXPERTS if has_experts else CONFIG
    layout = Layout.of(Mesh(1, 1, stages), parameter_specs(config), pp_interleave_num=chunks)
    compiled = backend.graph

    def graph(cell: Any, name: str) -> Callable[..., Any]:
        own = compiled(cell, name)

        def call(*inputs: Any) -> Any:
            with lock:
                return own(*inputs)

        return call

    backend.graph = graph  # type: ignore[method-assign, assignment]
    pipelines, backwards, gradients = [], [], []
    for stage in range(stages):
        weights, gradient = (Weights(layout, stage, backend, name) for name in ("weights", "grad"))
        fill_random(weights, seed=3, scale=0.2)
        backend.link = links.of(stage)  # type: ignore[method-assign, assignment]
        shard = Shard(config, weights, backend)
        pipeline = ForwardPipeline(
            shard, backend, "policy", SHAPE, 16, TEMPERATURE, KEEP_ALL, keeps_flows=True
        )
        trained = Trained(weights.parameters, gradient.parameters)
        cells: list[Any] = []
        for chunk in pipeline.chunks:
            layers = chunk.shard.layers
            if chunk.net is None:
                cells.append(StageBackward(chunk.stage, layers, trained))
            else:
                loss = PolicyLoss(loss_of(epsilon_low=0.2, epsilon_high=0.3, beta=0.05), True)
                cells.append(LossStep(chunk.net, layers, shard.head_key, loss, trained))
        pipelines.append(pipeline)
        backwards.append([graph(cell, "backward") for cell in cells])
        gradients.append(gradient)

    def run(stage: int) -> tuple[Any, Any]:
        packed, pipeline = rollout(), pipelines[stage]
        batches = packed.micro_batches(SHAPE, 1, 0)
        ahead, experts = pipeline.record(batches, packed)
        inputs = None if experts is None else experts.inputs(batches)
        return ahead, forward_backward(pipeline, batches, backwards[stage], losses(batches), inputs)

    with ThreadPoolExecutor(stages) as threads:
        *_, (logps, predictions) = threads.map(run, range(stages))
    sums: dict[str, np.ndarray] = {}
    for gradient in gradients:
        for name, part in gradient.arrays.hf_views.items():
            sums[name] = sums[name] + part if name in sums else part.copy()
    arrays = (*np.concatenate(logps).tolist(),), (*np.concatenate(predictions).tolist(),)
    return (*arrays, tuple(sorted((name, part.tobytes()) for name, part in sums.items())))


def test_stages_in_chunks_compute_the_bits_of_whole_ones() -> None:
    """That these are those of one process, and stages in the middle of layers that are computed again, are cases of
    test_distributed.py.
    """
    assert len(rollout().micro_batches(SHAPE, 1, 0)) == 5, "no multiple of the stages"
    assert outcome(2, 3) == outcome(2, 1)


def test_a_stage_without_experts_records_and_plans_none() -> None:
    assert outcome(2, 1, has_experts=True)[:2] == outcome(1, 1, has_experts=True)[:2]
