"""Updates by every loss, mask and advantage estimator on the ranks of a layout, for job.py. Judges nothing.

The updates are the project's own. What is below the loss stands in for a model: its parameters are the log-probs and
entropies themselves, so that their gradients are those that any model gets. Cells run operation by operation, where
nothing is compiled; tests/test_loss_cell.py has their graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import mindspore as ms
import numpy as np
from batch_variants import BATCH_VARIANTS, ENTROPY, NOW, OLD, REFERENCE, ROLLOUT, batch_of
from loss_variants import LONGEST

from mindgrpo.algorithm.estimators import AlgorithmConfig
from mindgrpo.algorithm.packing import MicroBatch, MicroShape, PackedRollout
from mindgrpo.algorithm.row_shapes import ShapeChoice
from mindgrpo.algorithm.sample import Arrays
from mindgrpo.backend.contract import Backend
from mindgrpo.models.pipeline import ForwardPipeline, Predictions, compute_log_probs
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.training.stage_graphs import LossInputs, PolicyLoss
from mindgrpo.training.update import update

TRAIN, INFER = Mesh(2, 2, 2), Mesh(4, 2)
ROWS, ROW_LENGTH = 4, 32


class GivenLogProbs:
    """Stands in for a Policy, its Shard and its ForwardPipeline on this rank."""

    def __init__(
        self, backend: Backend, mesh: Mesh, logps: Arrays, config: AlgorithmConfig | None = None
    ) -> None:
        rank = backend.rank
        self.backend, self.logps, self.pipeline = backend, logps, self
        self.has_head = mesh.index(rank, "pp") == mesh.pp - 1
        # Of those that have the same rows, one.
        self.differentiates = self.has_head and mesh.group(rank, ("cp", "tp"))[0] == rank
        self.shapes = ShapeChoice(MicroShape(ROWS, ROW_LENGTH))
        self.shard = SimpleNamespace(
            config=SimpleNamespace(moe=None),
            context_group=backend.group(mesh.group(rank, ("cp",))),
            weights=SimpleNamespace(layout=SimpleNamespace(mesh=mesh), rank=rank),
        )
        self.weights = self.shard.weights
        self.settings = SimpleNamespace(
            loss_config=config,
            max_tokens=LONGEST,
            loss_scale=1.0,
            keeps_entropies=False,
            bias_update_rate=0.0,
        )
        self.replicas = backend.group(mesh.group(rank, ("dp",)))
        self.updates = 0
        self.gradients = [np.zeros((2, own.size)) for own in logps]

    def record(
        self, batches: Sequence[MicroBatch], packed: Any
    ) -> tuple[list[Predictions] | None, None]:
        if not self.has_head:
            return None, None
        return [(batch.spread(self.logps), batch.spread(ENTROPY)) for batch in batches], None

    replay = record
    batches_of = ForwardPipeline.batches_of

    def experts_of(self, packed: Any) -> None:
        return None

    def accumulate(
        self,
        batches: Sequence[MicroBatch],
        inputs: Sequence[LossInputs],
        has_old: bool,
        experts: None,
    ) -> list[Predictions] | None:
        results, _ = self.record(batches, None)
        if results is None or not self.differentiates:
            return results
        gradient = ms.value_and_grad(PolicyLoss(self.settings.loss_config, has_old), (0, 1))
        for batch, own, given in zip(batches, results, inputs, strict=True):
            _, by = gradient(*(ms.Tensor(array) for array in (*own, *given)))
            for place, values in enumerate(by):
                for sample, part in batch.gather(values.asnumpy()).items():
                    self.gradients[sample][place] += part
        return results

    def gradient_norm(self) -> float:
        ends = np.cumsum([own.size for own in self.gradients])[:-1]
        whole = self.replicas.sum_array(np.concatenate([own.ravel() for own in self.gradients]))
        self.gradients = [own.reshape(2, -1) for own in np.split(whole, ends)]
        return float(max(self.backend.world.gather_objects(float(np.linalg.norm(whole)))))

    def apply(self, norm: float, lr: float) -> None:
        self.updates += 1


def updates_by_every_loss(backend: Backend) -> dict[str, Any]:
    """By variant the report's numbers, and on one rank of each row each sample's gradients by log-prob and entropy."""
    packed = PackedRollout(ROLLOUT)

    def log_probs(mesh: Mesh, logps: Arrays) -> Arrays:
        model: Any = GivenLogProbs(backend, mesh, logps)
        return compute_log_probs(model, mesh, backend, packed)

    old, reference = log_probs(TRAIN, OLD), log_probs(INFER, REFERENCE)
    found = {}
    ms.set_context(mode=ms.PYNATIVE_MODE)
    for name, (loss_config, advantages) in BATCH_VARIANTS.items():
        policy: Any = GivenLogProbs(backend, TRAIN, NOW, loss_config)
        batch = batch_of(advantages, old, reference)
        report = update(policy, batch, packed, range(len(batch)), 0.0)
        numbers = "loss", "grad_norm", "kl", "clip_fraction", "unselected", "off_policy"
        found[name] = {
            "report": {number: getattr(report, number) for number in numbers},
            "gradients": [own.tolist() for own in policy.gradients],
        }
    ms.set_context(mode=ms.GRAPH_MODE)
    return found
