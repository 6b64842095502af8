"""Counts what a weight sync between devices calls, copies and sends on the rank that does most: nothing is moved.

sync_calls.py [--model_config M.yaml] [--train dp,tp,pp --infer dp,tp] [--bucket 256] prints one JSON line, by default
of Qwen2.5-7B in bfloat16 from DP1/MP4/PP2 to DP2/MP4. The run's own code moves tensors of a shape and no memory. A
call is one of MindSpore's operations on the device outside of graphs, views included; `checks` are those of the sums
by which both sides are compared. `bytes` are those that are read and written in the device's memory.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from launching import degrees

from mindgrpo.backend.dtypes import ITEM_BYTES, Dtype
from mindgrpo.models.decoder_config import DecoderConfig
from mindgrpo.models.mindformers_yaml import read_model_yaml
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Layout
from mindgrpo.weight_sync.execute import DeviceRounds
from mindgrpo.weight_sync.plan import Plan, plan_reshard
from mindgrpo.weights.checksum import layers_of
from mindgrpo.weights.local_weights import Weights

QWEN2_5_7B = "model_configs/qwen_grpo/qwen2_5_7b/finetune_qwen2_5_7b.yaml"
DTYPE: Dtype = "bfloat16"
ROOT = Path(__file__).resolve().parent.parent.parent


class CountedTensor:
    """Has a shape; counts what would be done with it."""

    def __init__(
        self, shape: Sequence[int], itemsize: int, counts: Counter[str], dtype: Any = None
    ) -> None:
        self.shape, self.itemsize, self.dtype = tuple(shape), itemsize, dtype
        self._counts = counts

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.itemsize

    def __getitem__(self, slices: tuple[slice, ...]) -> CountedTensor:
        self._counts["views"] += 1
        # Of no bytes that anything is read from.
        shape = np.broadcast_to(np.empty(()), self.shape)[slices].shape
        return CountedTensor(shape, self.itemsize, self._counts, self.dtype)

    def view(self, dtype: Any) -> CountedTensor:
        self._counts["views"] += 1
        return CountedTensor(self.shape, self.itemsize, self._counts, dtype)

    def __setitem__(self, slices: Any, values: CountedTensor) -> None:
        self[slices].copy_(values)

    def copy_(self, values: CountedTensor) -> None:
        if self.shape != values.shape:
            raise ValueError(f"{values.shape} do not fit {self.shape}")
        self._counts["copies"] += 1
        self._counts["bytes"] += 2 * values.num_bytes

    def contiguous(self) -> CountedTensor:
        self._counts["copies"] += 1
        self._counts["bytes"] += 2 * self.num_bytes
        return CountedTensor(self.shape, self.itemsize, self._counts)


class CountedPool:
    def __init__(self, dtype: Dtype, counts: Counter[str]) -> None:
        self.dtype, self.itemsize, self._counts = dtype, ITEM_BYTES[dtype], counts

    def parameter(self, name: str, offset: int, shape: Sequence[int]) -> CountedTensor:
        return CountedTensor(shape, self.itemsize, self._counts)

    def require(self, user: str) -> None:
        """It is there."""


class CountingBackend:
    """Of one rank. Counts `views`, `copies`, `exchanges`, the `messages` and bytes `sent` in them, and `bytes`."""

    host_device_bytes = 0

    def __init__(self, rank: int, bucket_bytes: int) -> None:
        self.rank, self.bucket_bytes, self.counts = rank, bucket_bytes, Counter[str]()

    def pool(self, size: int, shared: bool, dtype: Dtype) -> CountedPool:
        return CountedPool(dtype, self.counts)

    def zeros(self, shape: Sequence[int], dtype: Dtype) -> CountedTensor:
        made = CountedTensor(shape, ITEM_BYTES[dtype], self.counts)
        self.counts["copies"] += 1
        self.counts["bytes"] += made.num_bytes
        return made

    def exchange(
        self,
        sends: Mapping[int, Sequence[CountedTensor]],
        receives: Mapping[int, Sequence[CountedTensor]],
    ) -> None:
        self.counts["exchanges"] += 1
        for kind, by_peer in (("sent", sends), ("received", receives)):
            tensors = [tensor for tensors in by_peer.values() for tensor in tensors]
            self.counts["messages"] += len(tensors)
            self.counts[kind] += sum(tensor.num_bytes for tensor in tensors)
            self.counts["bytes"] += sum(tensor.num_bytes for tensor in tensors)

    def synchronize(self) -> None:
        self.counts["synchronisations"] += 1


def plan_of(model: DecoderConfig, train: Mesh, infer: Mesh) -> Plan:
    source, target = (Layout.of(mesh, parameter_specs(model)) for mesh in (train, infer))
    return plan_reshard(source, target, ITEM_BYTES[DTYPE])


def counts_of(plan: Plan, rank: int, bucket_bytes: int) -> Counter[str]:
    """Returns what one sync does on `rank`, with the elements `written` and the `extra_bytes` of copies."""
    backend: Any = CountingBackend(rank, bucket_bytes)
    source, target = (
        Weights(layout, rank, backend, dtype=DTYPE) for layout in (plan.source, plan.target)
    )
    moving = DeviceRounds(plan, source, target, backend)
    backend.counts["written"] = moving.run() * plan.itemsize
    backend.counts["extra_bytes"] = moving.extra_bytes
    called = ("views", "copies", "exchanges", "synchronisations")
    backend.counts["calls"] = sum(backend.counts[kind] for kind in called)
    backend.counts["checks"] = calls_of_sums(source) + calls_of_sums(target)
    return backend.counts


def calls_of_sums(weights: Weights) -> int:
    """Counts a view of each tensor, a graph for those of a layer, and what brings all sums to the host."""
    layers = layers_of(weights)
    return sum(len(layer) + 1 for layer in layers) + 2


def figures(model: DecoderConfig, train: Mesh, infer: Mesh, bucket_bytes: int) -> dict[str, Any]:
    plan = plan_of(model, train, infer)
    by_rank = [counts_of(plan, rank, bucket_bytes) for rank in range(plan.num_ranks)]
    most = {kind: max(own[kind] for own in by_rank) for kind in sorted({*sum(by_rank, Counter())})}
    return {"bench": "sync_calls", "train": str(train), "infer": str(infer), **most}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model_config", default=ROOT / QWEN2_5_7B, help="a model's YAML")
    parser.add_argument("--train", type=degrees, default=(1, 4, 2), help="dp,tp,pp")
    parser.add_argument("--infer", type=degrees, default=(2, 4), help="dp,tp")
    parser.add_argument("--bucket", type=int, default=256, help="MiB")
    given = parser.parse_args()
    model = read_model_yaml(str(given.model_config))
    found = figures(model, Mesh(*given.train), Mesh(*given.infer), given.bucket << 20)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
