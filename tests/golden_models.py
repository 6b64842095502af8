"""The models of tests/golden/ and what one rank makes of them, for the tests that compare it with something else.

Refuses to compare. tests/golden/make_models.py made the models and the values of transformers beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from mindspore import Tensor, nn

from mindgrpo.algorithm.packing import Placed, Row, micro_batches
from mindgrpo.algorithm.samples import LENGTH, Samples
from mindgrpo.backend import Backend
from mindgrpo.layout.grid import Grid
from mindgrpo.layout.split import Layout, layers_of_stage
from mindgrpo.model.decoder import Head, Shard, Stage
from mindgrpo.model.families import DecoderConfig, parameter_specs, read_config
from mindgrpo.model.pretrained import load_weights
from mindgrpo.model.weights import Weights
from mindgrpo.update.optimizer import AdamWSettings
from mindgrpo.update.policy import Policy, UpdateSettings

FOLDER = Path(__file__).resolve().parent / "golden"
FAMILIES = ("qwen2", "llama", "qwen3")


@dataclass(frozen=True)
class Golden:
    """A family's directory, what is in it, and what transformers makes of it."""

    directory: Path
    config: DecoderConfig
    layout: Layout
    values: dict[str, np.ndarray]

    @property
    def gradients(self) -> dict[str, np.ndarray]:
        return {s.name: self.values[f"gradient/{s.name}"] for s in self.layout.specs}

    @property
    def samples(self) -> Samples:
        """Each row as a sample whose prompt is its first token, so that every other token is predicted."""
        ids = self.values["input_ids"]
        none = [np.zeros(0, np.float32)] * len(ids)
        return Samples([r[:1] for r in ids], [r[1:] for r in ids], [LENGTH] * len(ids), none)


def read_golden(family: str) -> Golden:
    directory = FOLDER / family
    config = read_config(directory)
    layers = tuple(layers_of_stage(config.num_hidden_layers, 1))
    layout = Layout(Grid(1, 1), parameter_specs(config), layers)
    with np.load(directory / "golden.npz") as values:
        return Golden(directory, config, layout, dict(values))


def loaded_weights(golden: Golden, backend: Backend) -> Weights:
    weights = Weights(golden.layout, backend.rank, backend)
    load_weights(weights, golden.directory)
    return weights


class Logits(nn.Cell):
    def __init__(self, shard: Shard, num_positions: int) -> None:
        super().__init__()
        self.stage = Stage(shard, num_positions)
        self.head = Head(shard, 1.0)

    def construct(self, tokens: Any, positions: Any, segments: Any) -> Any:
        return self.head(self.stage(tokens, positions, segments))


def train(golden: Golden, backend: Backend, rows: Sequence[Row]) -> tuple[Policy, list[np.ndarray]]:
    """The gradient of the log-probs' sum in a policy's accumulators, and the log-probs by sample."""
    length = max(p.start + p.prompt + p.completion for row in rows for p in row)
    adamw = AdamWSettings(0.9, 0.95, 1e-8, 0.0)
    settings = UpdateSettings(len(rows), length, 1.0, False, (0.2, 0.2), 0.0, 1.0, adamw)
    policy = Policy(golden.config, golden.layout, backend, settings)
    load_weights(policy.weights, golden.directory)
    samples = golden.samples
    (batch,) = micro_batches(samples, rows, length, len(rows), 1, 0)
    # With ratio 1, advantage -1 and weight 1 the loss has the gradient of the log-probs' sum.
    ones = batch.spread(np.ones(len(samples), np.float32))
    results = policy.accumulate([batch], [(0 * ones, 0 * ones, -ones, ones)], False)
    assert results is not None
    by_sample = batch.gather(results[0].logps)
    return policy, [by_sample[i] for i in range(len(samples))]


def each_in_its_row(samples: Samples) -> list[Row]:
    return [
        (Placed(i, 0, len(p), len(c)),)
        for i, (p, c) in enumerate(zip(samples.prompts, samples.completions, strict=True))
    ]


def all_in_one_row(samples: Samples) -> list[Row]:
    starts = np.cumsum([0, *samples.total_lengths])
    return [tuple(Placed(r[0].sample, int(starts[i]), r[0].prompt, r[0].completion)
                  for i, r in enumerate(each_in_its_row(samples)))]  # fmt: skip


def logits_of(golden: Golden, backend: Backend) -> np.ndarray:
    """float32 [rows, row length, vocabulary] of the golden input ids."""
    num_rows, length = golden.values["input_ids"].shape
    shard = Shard(golden.config, loaded_weights(golden, backend), backend, "golden")
    rows = each_in_its_row(golden.samples)
    (batch,) = micro_batches(golden.samples, rows, length, num_rows, 1, 0)
    inputs = Tensor(batch.tokens), Tensor(batch.positions), Tensor(batch.segments)
    return Logits(shard, length)(*inputs).asnumpy().reshape(num_rows, length, -1)
