"""The models of tests/golden/ and what one rank makes of them, for the tests that compare it with something else.

Refuses to compare. tests/golden/make_models.py made the models and the values of transformers beside them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from algorithms import loss_of
from mindspore import Tensor, nn, ops
from safetensors.numpy import save_file
from typing_extensions import Self

from mindgrpo.algorithm.context_split import COLUMNS_A_RANK
from mindgrpo.algorithm.image_tokens import ImageFeatures
from mindgrpo.algorithm.packing import (
    MicroShape,
    PackedRollout,
    PackedRow,
    Placed,
    micro_batches,
)
from mindgrpo.algorithm.sample import LENGTH, Rollout
from mindgrpo.backend.contract import Backend
from mindgrpo.backend.kernels.shapes import AdamWSettings
from mindgrpo.grpo.reward_model import RewardModel
from mindgrpo.models.decoder import KEEP_ALL, Head, Stage
from mindgrpo.models.decoder_config import DecoderConfig, read_config
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.models.pipeline import ForwardPipeline, by_sample
from mindgrpo.models.shard import Shard
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Layout
from mindgrpo.rewards.classifier_texts import ClassifierTexts, Completed
from mindgrpo.training.policy import Policy, UpdateSettings
from mindgrpo.training.stage_graphs import LossInputs
from mindgrpo.weights.local_weights import Weights
from mindgrpo.weights.pretrained import load_weights, open_tensors

FOLDER = Path(__file__).resolve().parent / "golden"
FAMILIES = (
    "qwen2",
    "llama",
    "qwen3",
    "olmo2",
    "gemma3_text",
    "qwen3_moe",
    "mixtral",
    "deepseek_v3",
)


class Bounds(NamedTuple):
    """`gradients` of a tensor's largest one."""

    logits: float
    logps: float
    gradients: float


BOUNDS = Bounds(1e-4, 1e-5, 1e-5)


@dataclass(frozen=True)
class Golden:
    """A family's directory, what is in it, and what transformers makes of it."""

    directory: Path
    config: DecoderConfig
    layout: Layout
    values: dict[str, np.ndarray]

    @classmethod
    def read(cls, family: str) -> Self:
        directory = FOLDER / family
        config = read_config(directory)
        layout = Layout.of(Mesh(1, 1), parameter_specs(config))
        with np.load(directory / "golden.npz") as values:
            return cls(directory, config, layout, dict(values))

    @property
    def gradients(self) -> dict[str, np.ndarray]:
        """By the parameters that have one: all but the bias that experts are chosen with."""
        prefix = "gradient/"
        return {key.removeprefix(prefix): v for key, v in self.values.items() if prefix in key}

    def log_probs(self, sample: int) -> np.ndarray:
        """Of `rollout`."""
        return self.values["logps"][sample]

    @property
    def rollout(self) -> Rollout:
        """Each row as a sample whose prompt is its first token, so that every other token is predicted."""
        ids = self.values["input_ids"]
        none = [np.zeros(len(r) - 1, np.float32) for r in ids]
        return Rollout.single_turn(
            [r[:1] for r in ids],
            [r[1:] for r in ids],
            [LENGTH] * len(ids),
            none,
            list(range(len(ids))),
        )


def read_golden(family: str) -> Golden:
    return Golden.read(family)


@dataclass(frozen=True)
class GoldenScores:
    """A classifier with a family's weights and `head` [1, H]; transformers' scores of `texts`, float32 [texts]."""

    family: str
    head: np.ndarray
    texts: list[np.ndarray]
    scores: np.ndarray

    def write(self, folder: Path, **changes: Any) -> Path:
        """Writes the classifier's files into `folder`, as transformers does; `changes` are of its config.json."""
        folder.mkdir(parents=True, exist_ok=True)
        raw = json.loads((FOLDER / self.family / "config.json").read_text())
        architecture = raw["architectures"][0].replace("ForCausalLM", "ForSequenceClassification")
        labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        raw |= {"architectures": [architecture], **labels, **changes}
        (folder / "config.json").write_text(json.dumps(raw))
        files = open_tensors(FOLDER / self.family)
        values = {name: files.read(name) for name in files.names if name != "lm_head.weight"}
        save_file(values | {"score.weight": self.head}, folder / "model.safetensors")
        return folder


def read_scores(family: str) -> GoldenScores:
    with np.load(FOLDER / "scores.npz") as values:
        ends = np.cumsum(values["lengths"])[:-1]
        texts = np.split(values[f"{family}/ids"], ends)
        return GoldenScores(family, values[f"{family}/head"], texts, values[f"{family}/scores"])


def loaded_weights(golden: Golden, backend: Backend) -> Weights:
    weights = Weights(golden.layout, backend.rank, backend)
    load_weights(weights, golden.directory)
    return weights


class Logits(nn.Cell):
    def __init__(self, shard: Shard, num_positions: int) -> None:
        super().__init__()
        self.stage, self.head = Stage(shard, num_positions, chooses=True), Head(shard)

    def construct(self, tokens: Any, positions: Any, spans: Any) -> Any:
        x = self.stage(tokens, positions, spans, ops.expand_dims(positions, 0))
        return self.head(x[0] if self.stage.chooses else x)


def train(
    golden: Golden,
    backend: Backend,
    rows: Sequence[PackedRow],
    layout: Layout | None = None,
    images: ImageFeatures | None = None,
) -> tuple[Policy, dict[int, np.ndarray]]:
    """The gradient of the log-probs' sum in a policy's accumulators, not summed over ranks yet, and the log-probs by
    sample, of this rank's samples where it has the last stage. `layout` is of one rank by default.
    """
    layout = layout or golden.layout
    mesh = layout.mesh
    share, part = (mesh.index(backend.rank, axis) for axis in ("dp", "cp"))
    length = max(p.start + p.prompt + p.completion for row in rows for p in row)
    length += -length % (mesh.tp * mesh.cp)
    adamw = AdamWSettings(0.9, 0.95, 1e-8, 0.0)
    shape = MicroShape(-(-len(rows) // mesh.dp), length, context_ranks=mesh.cp)
    settings = UpdateSettings(shape, length, 1.0, KEEP_ALL, loss_of(), 1.0, adamw)
    policy = Policy(golden.config, layout, backend, settings, images=images)
    load_weights(policy.weights, golden.directory)
    for pool in backend.live_pools:
        pool.load()
    rollout = golden.rollout
    table = None if images is None else images.table
    packed = PackedRollout(rollout, table)
    batches = micro_batches(rollout, rows, shape, mesh.dp, share, part, table)
    experts = None
    if golden.config.moe is not None:
        experts = policy.pipeline.record(batches, packed)[1]
    (batch,) = batches
    # With ratio 1, advantage -1 and weight 1 the loss has the gradient of the log-probs' sum.
    ones = batch.spread(np.ones(len(rollout), np.float32))
    unread = (ones, np.zeros(len(ones), np.int32), ones, ones)
    inputs = LossInputs(0 * ones, 0 * ones, -ones, ones, *unread)
    planned = None if experts is None else experts.inputs(batches)
    results = policy.accumulate([batch], [inputs], False, planned)
    own = by_sample([batch], results, policy.shard.context_group)
    return policy, {sample: own[sample][0] for sample in sorted(own)}


def each_in_its_row(rollout: Rollout) -> list[PackedRow]:
    return [
        (Placed(i, 0, len(p), len(p), len(c)),)
        for i, (p, c) in enumerate(zip(rollout.prompt_ids, rollout.completion_ids, strict=True))
    ]


def all_in_one_row(rollout: Rollout) -> list[PackedRow]:
    starts = np.cumsum([0, *rollout.total_lengths])
    return [tuple(Placed(r[0].sample, at, r[0].prompt, at + r[0].prompt, r[0].completion)
                  for at, r in zip(starts.tolist(), each_in_its_row(rollout), strict=False))]  # fmt: skip


def logits_of(golden: Golden, backend: Backend) -> np.ndarray:
    """float32 [rows, row length, vocabulary] of the golden input ids."""
    num_rows, length = golden.values["input_ids"].shape
    shard = Shard(golden.config, loaded_weights(golden, backend), backend)
    tokens = golden.values["input_ids"].astype(np.int32)
    # Rows leave the last token out, as it predicts nothing; its logits are wanted here.
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape).copy()
    spans = np.zeros((*tokens.shape, 3), np.int32)
    inputs = Tensor(tokens), Tensor(positions), Tensor(spans)
    return Logits(shard, length)(*inputs).asnumpy().reshape(num_rows, length, -1)


def scores_of(
    config: DecoderConfig,
    load: Callable[[Weights], None],
    texts: Sequence[np.ndarray],
    backend: Backend,
    mesh: Mesh,
) -> list[float]:
    """What a run's reward model makes of `texts`, in rows of 64 tokens; collective. `load` fills its weights."""
    splits = mesh.tp > 1 and mesh.cp > 1
    layout = Layout.of(mesh, parameter_specs(config, splits), 0, splits)
    weights = Weights(layout, backend.rank, backend, "reward_model")
    weights.pool.load()
    load(weights)
    unit = mesh.cp * COLUMNS_A_RANK if mesh.cp > 1 else 1
    shape = MicroShape(2, 64, unit=unit, context_ranks=mesh.cp)
    pipeline = ForwardPipeline(Shard(config, weights, backend), backend, "scores", shape, 64, 1.0)
    model = RewardModel("golden", "golden", 1.0, "none", 60, AsTheyAre(), weights, pipeline)
    samples = [Completed((), "", ids, "", ids[:0], ()) for ids in texts]
    result = model.score(backend, lambda role: None, lambda: samples)
    assert not result.failures
    return [float(result.values[i] or 0.0) for i in range(len(texts))]


class AsTheyAre(ClassifierTexts):
    """Of samples that have tokens already."""

    def __init__(self) -> None:
        pass

    def ids(self, sample: Completed) -> list[int]:
        return sample.prompt_ids.tolist()
