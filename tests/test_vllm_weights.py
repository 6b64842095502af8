"""The policy's weights as an engine is handed them: whole named tensors from any layout, in the engine's dtype.

Does not prove that vLLM computes with them: that is tests/vllm.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ranks_as_threads import ThreadBackend, run

from mindgrpo.backend.cpu.backend import CpuBackend
from mindgrpo.backend.dtypes import Dtype, bits_of, numpy_dtype
from mindgrpo.models.decoder_config import DecoderConfig, decoder_config
from mindgrpo.models.lora import TARGETS, LoraSettings, adapter_names, adapter_specs, fill_adapters
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.models.shard import Adapters
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Layout
from mindgrpo.rollout.vllm.child.mindgrpo_engine.protocol import checksum
from mindgrpo.rollout.vllm.engine import WeightBucket
from mindgrpo.weight_sync.stream import TensorStream, groups_of
from mindgrpo.weights.checksum import MODULUS, host_sums, total_sums
from mindgrpo.weights.local_weights import HostTensors, Weights
from mindgrpo.weights.pretrained import fill_random

NUM_LAYERS = 4
# What others are given to compute sums with: a stream has its own.
NOBODYS: Any = None
LORA = LoraSettings(2, 6.0, TARGETS)


EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [2],
}


def model(tied: bool, **options: Any) -> DecoderConfig:
    fields = {
        "model_type": "qwen2",
        "vocab_size": 37,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
        **options,
    }
    return decoder_config(fields, "here")


def owners_layout(layout: Layout) -> Layout:
    return layout.whole_on(layout.mesh.first_ranks)


def layout(config: DecoderConfig, mesh: Mesh) -> Layout:
    return Layout.of(mesh, parameter_specs(config))


class Kept:
    """A TensorSink that keeps a copy of everything."""

    def __init__(self, layout: Layout, backend: ThreadBackend) -> None:
        self.inner = WeightBucket(layout, backend, "float32", self.hand_over)
        self.pool, self.host_copies = self.inner.pool, self.inner.host_copies
        self.tensors: dict[str, np.ndarray] = {}
        self.groups: list[list[str]] = []

    def hand_over(self, entries: list[dict]) -> None:
        self.groups.append([entry["name"] for entry in entries])

    def take(self, tensors: HostTensors) -> None:
        self.tensors |= {name: view.copy() for name, view in tensors.hf_views.items()}
        self.inner.take(tensors)


def whole_model(config: DecoderConfig) -> dict[str, np.ndarray]:
    alone = layout(config, Mesh(1, 1))
    weights = Weights(alone, 0, ThreadBackend(run_world(1), 0))
    fill_random(weights, seed=3)
    return {name: view.copy() for name, view in weights.arrays.hf_views.items()}


def run_world(size: int):
    from ranks_as_threads import World

    return World(size)


def streamed(backend: ThreadBackend, config: DecoderConfig, meshes: tuple[Mesh, Mesh]):
    """The tensors that each rank's sink took, its groups, and whether sums agree with the policy's."""
    source = Weights(layout(config, meshes[0]), backend.rank, backend, "policy", shared=True)
    fill_random(source, seed=3)
    owners = owners_layout(layout(config, meshes[1]))
    sink = Kept(owners, backend)
    stream = TensorStream(source, None, groups_of(owners), backend, sink)
    assert not stream.has_sums
    traffic = stream.run(keeps_sums=True)
    policy, _ = total_sums(source.layout, backend.world.gather_objects(host_sums(source)), MODULUS)
    received, wrong = total_sums(
        owners, backend.world.gather_objects(stream.sums(NOBODYS)), MODULUS
    )
    assert policy == received and not wrong
    return sink.tensors, sink.groups, traffic.bytes_received


@pytest.mark.parametrize(
    "config",
    [model(tied=True), model(tied=False), model(tied=False, **EXPERTS)],
    ids=["tied", "untied", "experts"],
)
@pytest.mark.parametrize(
    "meshes",
    [
        (Mesh(1, 1), Mesh(1, 1)),
        (Mesh(1, 2, 2), Mesh(2, 2, 1)),
        (Mesh(1, 4, 1), Mesh(4, 1, 1)),
        (Mesh(2, 1, 2, ep=2), Mesh(1, 4, 1, etp=4)),
    ],
    ids=str,
)
def test_owners_get_every_tensor_whole_and_bit_for_bit_from_any_layout(
    meshes: tuple[Mesh, Mesh], config: DecoderConfig
) -> None:
    expected = whole_model(config)
    by_rank = run(meshes[0].size, streamed, config, meshes)
    for rank, (tensors, groups, _) in enumerate(by_rank):
        if rank % meshes[1].tp:
            assert not tensors and not groups
            continue
        assert list(tensors) == [name for group in groups for name in group]
        assert tensors.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_array_equal(tensors[name], values, err_msg=name)


def test_a_group_is_a_layer_or_what_stands_before_or_after_the_layers() -> None:
    _, groups, _ = run(1, streamed, model(tied=False), (Mesh(1, 1), Mesh(1, 1)))[0]
    assert len(groups) == NUM_LAYERS + 2
    assert groups[0] == ["model.embed_tokens.weight"]
    assert groups[-1] == ["model.norm.weight", "lm_head.weight"]
    for number, group in enumerate(groups[1:-1]):
        assert all(name.startswith(f"model.layers.{number}.") for name in group)


def test_a_rank_that_owns_an_engine_receives_only_what_it_lacks() -> None:
    config, meshes = model(tied=True), (Mesh(1, 2, 2), Mesh(1, 4, 1))
    source = layout(config, meshes[0])
    held = sum(box.size for box in source.held_by(0).values())
    total = sum(np.prod(spec.shape) for spec in source.specs)
    received = [num_bytes for _, _, num_bytes in run(4, streamed, config, meshes)]
    assert received == [4 * (total - held), 0, 0, 0]


def test_the_bucket_has_room_for_the_largest_group_and_no_more() -> None:
    config = model(tied=True)
    owners = owners_layout(layout(config, Mesh(1, 1)))

    def largest(itemsize: int) -> int:
        sizes = [
            [int(np.prod(spec.shape)) * itemsize for spec in g.specs] for g in groups_of(owners)
        ]
        return max(sum(-(-size // 64) * 64 for size in group) for group in sizes)

    backend = ThreadBackend(run_world(1), 0)
    for dtype, itemsize in (("float32", 4), ("bfloat16", 2)):
        sink = WeightBucket(owners, backend, dtype, lambda _: None)
        assert sink.bucket.num_bytes == largest(itemsize)
        assert sink.pool.num_bytes == largest(4)
        assert len(sink.host_copies) == (1 if dtype == "float32" else 2)


@pytest.mark.parametrize("has_experts", [False, True], ids=["dense", "experts"])
def test_adapters_arrive_added_in(has_experts: bool) -> None:
    config = model(tied=True, **(EXPERTS if has_experts else {}))
    backend = CpuBackend({})
    alone = layout(config, Mesh(1, 1))
    source = Weights(alone, 0, backend, "policy")
    fill_random(source, seed=3)
    low_rank = Weights(replace(alone, specs=adapter_specs(alone.specs, LORA)), 0, backend, "low")
    fill_adapters(low_rank, seed=5)
    rng = np.random.default_rng(1)
    for name, part in low_rank.arrays.hf_views.items():
        if "lora_B" in name:
            part[...] = rng.normal(0, 0.1, part.shape)
    sink = Kept(owners_layout(alone), backend)
    groups = groups_of(owners_layout(alone))
    TensorStream(source, Adapters(low_rank, LORA), groups, backend, sink).run()
    views, factors, changed = source.arrays.hf_views, low_rank.arrays.hf_views, 0
    for name, values in sink.tensors.items():
        expected = views[name].astype(np.float64)
        a_name, b_name = adapter_names(name)
        if b_name in factors:
            expected = expected + LORA.scale * (factors[b_name] @ factors[a_name])
            changed += 1
            assert np.abs(expected - views[name]).max() > 1e-2
        np.testing.assert_allclose(values, expected, rtol=0, atol=1e-6, err_msg=name)
    assert changed == 7 * NUM_LAYERS


def nearest_bfloat16(value: float) -> int:
    """By the distance to both neighbours; of two as near, the even one."""
    lower = struct.unpack("<I", struct.pack("<f", value))[0] >> 16
    neighbours = [
        (n, struct.unpack("<f", struct.pack("<I", n << 16))[0]) for n in (lower, lower + 1)
    ]
    return min(neighbours, key=lambda one: (abs(one[1] - value), one[0] % 2))[0]


def test_bfloat16_is_the_nearest_with_ties_to_even() -> None:
    rng = np.random.default_rng(0)
    ties = (np.arange(1 << 8, dtype=np.uint32) << 16 | 0x3F808000).view(np.float32)
    values = np.concatenate(
        [
            rng.normal(0, 1, 2000).astype(np.float32),
            (10.0 ** rng.uniform(-37, 37, 500)).astype(np.float32),
            ties,
            np.array([0.0, -0.0, 1e-40], np.float32),
        ]
    )
    kind = numpy_dtype("bfloat16")
    assert bits_of(values.astype(kind)).tolist() == [nearest_bfloat16(float(v)) for v in values]
    special = bits_of(np.array([np.inf, -np.inf, np.nan], np.float32).astype(kind))
    assert special.tolist()[:2] == [0x7F80, 0xFF80]
    assert special[2] & 0x7F80 == 0x7F80 and special[2] & 0x7F


@pytest.mark.parametrize("own", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_entries_say_where_each_tensor_lies_in_the_bucket(dtype: Dtype, own: Dtype) -> None:
    config = model(tied=True, **EXPERTS)
    owners = owners_layout(layout(config, Mesh(1, 1)))
    backend = ThreadBackend(run_world(1), 0)
    backend.compute_dtype = own
    source = Weights(layout(config, Mesh(1, 1)), 0, backend, "policy", dtype=own)
    fill_random(source, seed=3)
    seen: dict[str, np.ndarray] = {}
    itemsize = 4 if dtype == "float32" else 2

    def read(entries: list[dict]) -> None:
        with sink.bucket.on_host() as memory:
            data = memory.view(0, (sink.bucket.num_bytes // itemsize,)).view(np.uint8)
        for entry in entries:
            assert entry["offset"] % 64 == 0
            shape = entry["shape"]
            if entry["transposed"]:
                shape = [*shape[:-2], shape[-1], shape[-2]]
            count = int(np.prod(shape)) * itemsize
            raw = data[entry["offset"] : entry["offset"] + count].copy()
            assert entry["crc"] == checksum(raw.data)
            if dtype == "bfloat16":
                values = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
            else:
                values = raw.view(np.float32 if itemsize == 4 else np.float16)
            values = values.reshape(shape)
            seen[entry["name"]] = values.swapaxes(-1, -2) if entry["transposed"] else values

    sink = WeightBucket(owners, backend, dtype, read)
    TensorStream(source, None, groups_of(owners), backend, sink).run()
    exact = 0.0 if dtype in ("float32", own) else 2.0**-8 if dtype == "bfloat16" else 2.0**-11
    for name, values in source.arrays.hf_views.items():
        values = values.astype(np.float32)
        error = np.abs(seen[name].astype(np.float64) - values)
        assert (error <= exact * np.abs(values) + (0 if exact == 0 else 2.0**-25)).all(), name
