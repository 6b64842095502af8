"""Parameters that are split over several axes, as experts are: boxes against NumPy's own slicing, and plans of them.

Does not prove that any model computes with them.
"""

from __future__ import annotations

import random
import re
from itertools import product
from math import prod

import numpy as np
import pytest
from test_reshard_plan import run_moves, run_rounds

from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Box, Layout, ParameterSpec, Position, Split, local_shape
from mindgrpo.weight_sync.plan import plan_reshard

OVER_EXPERTS = frozenset(("edp",))


def moe_specs(
    num_layers: int,
    hidden: int,
    inner: int,
    experts: int,
    vocabulary: int,
    heads: tuple[int, int, int],
) -> tuple[ParameterSpec, ...]:
    """Of a mixture-of-experts decoder like Qwen3's; `heads`: of queries, of keys and values, and their size."""
    queries, kv, head_dim = heads
    specs: list[ParameterSpec] = []

    def add(name: str, shape: tuple[int, ...], position: Position, *splits: Split) -> None:
        is_expert = len(shape) == 3
        axes = OVER_EXPERTS if is_expert else frozenset(("dp",))
        specs.append(
            ParameterSpec(
                name,
                shape,
                splits,
                position=position,
                decay=len(shape) > 1,
                summed_over=axes,
                transposed=is_expert,
                fused_key=re.sub("(gate|up)_proj", "gate_up_proj", name) if is_expert else "",
            )
        )

    add("model.embed_tokens.weight", (vocabulary, hidden), "first", Split("tp", 0))
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        add(prefix + "input_layernorm.weight", (hidden,), layer)
        for name, count in (("q", queries), ("k", kv), ("v", kv)):
            split = Split("tp", 0, head_dim, replicate=name != "q")
            add(f"{prefix}self_attn.{name}_proj.weight", (count * head_dim, hidden), layer, split)
        shape = hidden, queries * head_dim
        add(prefix + "self_attn.o_proj.weight", shape, layer, Split("tp", 1, head_dim))
        add(prefix + "post_attention_layernorm.weight", (hidden,), layer)
        add(prefix + "mlp.gate.weight", (experts, hidden), layer)
        for name, shape_of, dim in (
            ("gate_proj", (experts, inner, hidden), 1),
            ("up_proj", (experts, inner, hidden), 1),
            ("down_proj", (experts, hidden, inner), 2),
        ):
            splits = Split("ep", 0), Split("etp", dim)
            add(f"{prefix}mlp.experts.{name}.weight", shape_of, layer, *splits)
    add("lm_head.weight", (vocabulary, hidden), "last", Split("tp", 0))
    return tuple(specs)


def sliced(spec: ParameterSpec, mesh: Mesh, rank: int) -> np.ndarray:
    """The rank's part of an array of the parameter's element numbers, cut by slicing again and again."""
    whole = np.arange(prod(spec.shape)).reshape(spec.shape)
    for split in spec.splits:
        size, index = mesh.size_of(split.axes), mesh.group(rank, split.axes).index(rank)
        length = whole.shape[split.dim]
        units = -(-length // split.unit)
        if split.replicate and size > units:
            size, index = units, index // (size // units)
        share = -(-units // size) * split.unit
        own: list[slice] = [slice(None)] * whole.ndim
        own[split.dim] = slice(index * share, (index + 1) * share)
        whole = whole[tuple(own)]
    return whole


NESTED = (
    ParameterSpec("two dims", (8, 6, 5), (Split("ep", 0), Split("etp", 2)), position=0, decay=True),
    ParameterSpec("one dim", (13, 3), (Split("ep", 0), Split("etp", 0)), position=0, decay=True),
    ParameterSpec("dense", (7, 9), (Split("tp", 0), Split("dp", 0)), position=0, decay=True),
    ParameterSpec("heads", (8, 3), (Split("dp", 1), Split("tp", 0, 2, True)), position=0, decay=True),
    ParameterSpec("joined", (13, 5), (Split("tp", 1), Split("dp+cp", 0)), position=0, decay=True),
    ParameterSpec("few", (2, 3, 2), (Split("ep", 0), Split("etp", 1)), position=0, decay=True),
)  # fmt: skip
MESHES = [
    Mesh(1, 1),
    Mesh(4, 2, 1, ep=4),
    Mesh(2, 4, 1, ep=2, etp=2),
    Mesh(2, 4, 1, ep=4, etp=2),
    Mesh(8, 1, 1, etp=4),
    Mesh(2, 2, 1, 3),
]


def test_nested_boxes_are_what_slicing_again_and_again_gives(subtests: pytest.Subtests) -> None:
    for spec, mesh in product(NESTED, MESHES):
        with subtests.test(spec=spec.name, mesh=str(mesh)):
            check_boxes(spec, mesh)


def check_boxes(spec: ParameterSpec, mesh: Mesh) -> None:
    whole = np.arange(prod(spec.shape)).reshape(spec.shape)
    layout = Layout.of(mesh, (spec,))
    covered = np.zeros(spec.shape, bool)
    by_box: dict[Box, list[int]] = {}
    for rank in range(mesh.size):
        expected = sliced(spec, mesh, rank)
        room = local_shape(spec, mesh)
        box = layout.held_by(rank).get(spec.name)
        assert (box is None) == (expected.size == 0)
        if box is not None:
            assert np.array_equal(whole[box.slices], expected)
            assert all(own <= most for own, most in zip(box.shape, room, strict=True))
            covered[box.slices] = True
            by_box.setdefault(box, []).append(rank)
    assert covered.all()
    assert {box: tuple(ranks) for box, ranks in by_box.items()} == layout.ranks_by_box(spec.name)
    boxes = list(by_box)
    assert not any(a.intersect(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_one_axis_cannot_cut_two_dims() -> None:
    with pytest.raises(ValueError, match="twice over one axis"):
        ParameterSpec("w", (4, 4), (Split("tp", 0), Split("tp", 1)), position=0, decay=True)


def test_nested_splits_reshard_bit_for_bit(subtests: pytest.Subtests) -> None:
    # Each mesh to the next and to the one after: every one sends and receives.
    for first, step in product(range(len(MESHES)), (1, 2)):
        source, target = MESHES[first], MESHES[(first + step) % len(MESHES)]
        with subtests.test(source=str(source), target=str(target)):
            plan = plan_reshard(Layout.of(source, NESTED), Layout.of(target, NESTED))
            run_moves(plan)
            run_rounds(plan, 120)
            assert plan.bytes_moved == plan.lower_bound


def random_mesh(choose: random.Random, stages: tuple[int, ...]) -> Mesh:
    while True:
        dp, tp, ep, etp = (choose.choice((1, 2, 4)) for _ in range(4))
        pp = choose.choice(stages)
        if dp * tp % (ep * etp) == 0 and dp * tp * pp <= 16:
            return Mesh(dp, tp, pp, ep=ep, etp=etp)


def test_experts_move_between_any_two_meshes_and_no_byte_that_need_not() -> None:
    choose = random.Random(29)
    specs = moe_specs(5, 8, 6, 4, 11, (4, 2, 2))
    for number in range(40):
        mesh = random_mesh(choose, (1, 2))
        # Of two stages, layers that follow each other, or in two chunks.
        source = Layout.of(mesh, specs, pp_interleave_num=choose.choice((1, mesh.pp)))
        target = Layout.of(random_mesh(choose, (1,)), specs)
        plan = plan_reshard(source, target)
        run_moves(plan)
        if number % 8 == 0:
            # A bucket of a few rows: experts are cut, too.
            run_rounds(plan, 300)
        assert plan.bytes_moved == plan.lower_bound


@pytest.mark.parametrize(
    "train, infer",
    [
        (Mesh(32, 4, 8, ep=32), Mesh(128, 8, ep=8)),
        (Mesh(64, 4, 4, ep=64, etp=2), Mesh(64, 16, ep=64)),
    ],
    ids=str,
)
def test_235b_parameters_of_128_experts_on_1024_ranks_can_be_planned(
    train: Mesh, infer: Mesh
) -> None:
    specs = moe_specs(94, 4096, 1536, 128, 151936, (64, 4, 128))
    assert 230e9 < sum(prod(spec.shape) for spec in specs) < 240e9
    source, target = Layout.of(train, specs), Layout.of(infer, specs)
    plan = plan_reshard(source, target, itemsize=2)
    assert plan.num_ranks == 1024 and plan.bytes_moved == plan.lower_bound
    for rank in (0, 777, 1023):
        mine = plan.of(rank)
        total = sum(move.size for move in mine.keep + mine.receive)
        assert total == sum(box.size for box in target.held_by(rank).values())
        assert sum(move.size for move in mine.receive) * 2 == plan.received_bytes(rank)
