"""Who owns which rows of what an optimizer shares out, against the boxes of its layout, for meshes up to 16 ranks.

Does not prove that ranks exchange them: test_distributed.py compares with an optimizer that is not shared out.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from distributed.cases import SHARDED_MODEL
from ranks_as_processes import native
from ranks_as_processes import run as run_as_processes

from mindgrpo.backend.contract import Share
from mindgrpo.backend.cpu.host import LocalRanks
from mindgrpo.backend.cpu.shared_group import shared_group
from mindgrpo.models.decoder_config import decoder_config
from mindgrpo.models.lora import TARGETS, LoraSettings, adapter_specs
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Layout, local_shape
from mindgrpo.training.optimizer_shares import sharded_tensors
from mindgrpo.weights.local_weights import Places, arrange

SPECS = parameter_specs(decoder_config(SHARDED_MODEL, "here"))
MODELS = {"whole": SPECS, "adapters": adapter_specs(SPECS, LoraSettings(3, 1.0, TARGETS))}
MESHES = [mesh for mesh in product((2, 3, 8), (1, 2, 4), (1, 2), (1,)) if np.prod(mesh) <= 16]
MESHES += [(1, 2, 1, 4), (2, 1, 2, 3), (3, 2, 1, 2)]


def test_a_ranks_rows_are_its_boxes_and_every_row_has_one_owner(subtests: pytest.Subtests) -> None:
    for mesh, model in product(MESHES, MODELS):
        with subtests.test(mesh=mesh, model=model):
            check_rows(mesh, model)


def check_rows(mesh: tuple[int, ...], model: str) -> None:
    layout = Layout.of(Mesh(*mesh), MODELS[model])
    own = layout.split_over_data()
    for rank in range(layout.mesh.size):
        tensors = sharded_tensors(layout, rank)
        whole, share = Places(layout, rank), Places(own, rank)
        owned = {(t.whole.key, row) for t in tensors for row in t.own_rows()}
        expected = set()
        for name, box in own.held_by(rank).items():
            here, there = whole.region(name, box), share.region(name)
            # Rows are whole: what a rank lacks of a parameter is other rows.
            assert here.slices[1:] == there.slices[1:] == whole.region(name).slices[1:]
            rows = here.slices[0]
            expected.add((here.key, (rows.start, rows.stop, there.slices[0].start)))
        assert owned == expected
        for tensor in tensors:
            taken = sorted(tensor.shares(0))
            for (_, stop, _), (start, _, _) in zip(taken, taken[1:], strict=False):
                assert stop <= start
            rows_of_all = sum(block.rows for block in tensor.blocks)
            assert sum(stop - start for start, stop, _ in taken) == rows_of_all * tensor.row_size


def test_shares_take_the_memory_of_the_first_rank_rounded_up_on_all() -> None:
    layout = Layout.of(Mesh(8, 1, 1), SPECS).split_over_data()
    for rank in range(8):
        for tensor in arrange(layout, rank):
            rows = {spec.as_stored(local_shape(spec, layout.mesh))[0] for spec in tensor.specs}
            assert len(tensor.shape) == 1 or rows == {tensor.shape[0]}
    assert local_shape(layout.by_name["model.embed_tokens.weight"], layout.mesh) == (9, 32)


# A share over several buffers, one between others' and elements that are nobody's.
EDGES = ((0, 700), (700, 701), (703, 4000), (4000, 4001))


def _summed_and_gathered(host: LocalRanks, size: int) -> tuple[np.ndarray, np.ndarray]:
    group = shared_group(host, range(size), 1024)
    shares: list[Share] = [(*edges, number % size) for number, edges in enumerate(EDGES)]
    noise = np.random.default_rng(host.rank).normal(size=4003).astype(np.float32)
    own = noise.copy()
    group.sum_shares(own, shares)
    total = group.sum_array(noise.copy())
    for start, stop, member in shares:
        if member == host.rank:
            assert own[start:stop].tobytes() == total[start:stop].tobytes()
            noise[start:stop] = total[start:stop]
    assert own.tobytes() == noise.tobytes()
    group.gather_shares(own, shares)
    narrow = np.full(4003, host.rank, np.int16)
    group.gather_shares(narrow, shares)
    for start, stop, member in shares:
        assert own[start:stop].tobytes() == total[start:stop].tobytes()
        assert (narrow[start:stop] == member).all()
    return own[701:703], narrow[701:703]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("is_native", [True, False])
def test_a_member_gets_its_shares_of_a_sum_and_gives_them_to_all(
    size: int, is_native: bool
) -> None:
    found = run_as_processes(native() if is_native else None, size, _summed_and_gathered)
    for rank in range(size):
        assert isinstance(found[rank], tuple), found[rank]
        # What is nobody's stays.
        own, narrow = found[rank]
        noise = np.random.default_rng(rank).normal(size=4003).astype(np.float32)
        assert own.tobytes() == noise[701:703].tobytes() and (narrow == rank).all()
