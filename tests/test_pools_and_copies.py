"""Pools keep their bits through every move and give pages up; copies from a table are those of numpy.

Does not prove speed, nor anything of a device that is not the host.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from mindgrpo.backend import host_memory
from mindgrpo.backend.host_memory import Copies, SparePages
from mindgrpo.backend.host_pool import HostPool, PeerPool, SharedPool

SIZE = 5_000_001  # floats: more than one large page, and no whole number of small ones


def filled(pool: HostPool) -> np.ndarray:
    view = pool.view(0, (SIZE,))
    # In place: an array of the heap's, freed, may stay in the process.
    np.random.default_rng(0).random(dtype=np.float32, out=view)
    return view


@pytest.mark.parametrize("can_move", [True, False])
def test_what_was_offloaded_comes_back_and_is_not_on_the_device_meanwhile(
    can_move: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_move:
        monkeypatch.setattr(
            host_memory, "LEAVE_MAPPED", 1 << 20
        )  # as a system that knows no such flag
    pool = HostPool(SIZE)
    view = filled(pool)
    kept = view.copy()
    for _ in range(3):
        pool.offload()
        assert not view.any()
        pool.load()
        np.testing.assert_array_equal(view, kept)


def test_released_pages_leave_the_process() -> None:
    process = psutil.Process()
    for kind in (HostPool, SharedPool):
        before = process.memory_info().rss
        pool = kind(SIZE)
        view = filled(pool)
        assert process.memory_info().rss - before > 3.9 * SIZE
        pool.release()
        assert process.memory_info().rss - before < 0.2 * SIZE
        assert not view.any()


@pytest.mark.parametrize("can_move", [True, False])
@pytest.mark.parametrize("sizes", [(SIZE, SIZE + 77, 3 * SIZE, 2 * SIZE), (5000, 1025, 1, 70_000)])
def test_pools_that_take_turns_are_zero_when_loaded_and_need_no_more_pages_than_at_one_time(
    sizes: tuple[int, ...], can_move: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_move:
        monkeypatch.setattr(host_memory, "LEAVE_MAPPED", 1 << 20)
    rng, spare = np.random.default_rng(0), SparePages()
    pools = [HostPool(size) for size in sizes]
    for pool in pools:
        pool.take_turns(spare, is_empty=True)
    loaded: dict[int, np.ndarray] = {}
    most = kept = 0
    for _ in range(60):
        number = int(rng.integers(len(pools)))
        if number in loaded:
            np.testing.assert_array_equal(loaded.pop(number), number + 1)
            pools[number].release()
        else:
            pools[number].load()
            view = loaded[number] = pools[number].view(0, (sizes[number],))
            assert not view.any()
            view[...] = number + 1
        held = sum(4 * sizes[each] for each in loaded)
        most, kept = max(most, held), max(kept, spare.num_bytes)
        assert held + spare.num_bytes <= most
    assert (kept > 0) == (can_move and max(sizes) >= SIZE)


def test_what_a_pool_never_filled_takes_no_pages_in_later_turns() -> None:
    spare, large, small = SparePages(), HostPool(8 * SIZE), HostPool(SIZE)
    for pool in (large, small):
        pool.take_turns(spare, is_empty=True)
    process = psutil.Process()
    before = process.memory_info().rss
    for _ in range(4):
        large.load()
        view = large.view(0, (8 * SIZE,))
        part = view[2 * SIZE : 3 * SIZE]
        assert not part.any()
        part[...] = 1
        large.release()
        small.load()
        filled(small)
        small.release()
    assert process.memory_info().rss - before < 1.2 * 4 * SIZE
    spare.give_up()
    assert process.memory_info().rss - before < 0.2 * SIZE


def test_offloading_takes_no_second_copy() -> None:
    pool = HostPool(SIZE)
    filled(pool)
    before = psutil.Process().memory_info().rss
    pool.offload()
    assert psutil.Process().memory_info().rss - before < 0.2 * SIZE


def test_a_shared_pool_keeps_its_bits_through_offload_and_load() -> None:
    pool = SharedPool(SIZE)
    view = filled(pool)
    kept = view.copy()
    pool.offload()
    pool.load()
    np.testing.assert_array_equal(view, kept)


READER = """
import sys
from mindgrpo.backend.host_pool import PeerPool
pool = PeerPool(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), "float32")
view = pool.view(7, (11,))
print(float(view.sum()))
pool.forget()
print(float(view.sum()), view.flags.writeable)
"""


def test_another_process_reads_a_shared_pool_and_cannot_write_it() -> None:
    pool = SharedPool(SIZE)
    view = filled(pool)
    command = [sys.executable, "-c", READER, str(os.getpid()), str(pool.descriptor), str(4 * SIZE)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    expected = float(view[7:18].sum())
    assert [float(told[0]), float(told[1])] == [expected, expected]
    assert told[2] == "False"


def held_by_descriptors() -> tuple[int, int]:
    """How many descriptors this process has, and the bytes in the files without a name that they are of."""
    entries = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    shared = [path for path in entries if "/memfd:" in os.readlink(path)]
    blocks = {path.stat().st_ino: path.stat().st_blocks for path in shared}
    return len(entries), 512 * sum(blocks.values())


def test_shared_pools_that_are_gone_leave_nothing_and_what_others_have_mapped_stays() -> None:
    before = held_by_descriptors()
    for _ in range(4):
        pool = SharedPool(SIZE)
        kept = filled(pool)[7:18].copy()
        peer = PeerPool(os.getpid(), pool.descriptor, pool.num_bytes, "float32")
        del pool
        np.testing.assert_array_equal(peer.view(7, (11,)), kept)
        del peer
        assert held_by_descriptors() == before


def test_a_pool_that_is_not_there_is_an_error_of_the_system() -> None:
    with pytest.raises(OSError):
        PeerPool(os.getpid(), 10_000, mmap.PAGESIZE, "float32")


def pairs(rng: np.random.Generator) -> list[tuple[np.ndarray, np.ndarray]]:
    """Neighbouring column blocks, transposed blocks, whole rows, experts, vectors, a single number and nothing."""
    made = []
    for _ in range(40):
        rows, left, right = (int(n) for n in rng.integers(1, 90, 3))
        target = np.zeros((rows, left + right), np.float32)
        source = rng.random((rows, left + right + int(rng.integers(0, 5))), dtype=np.float32)
        made += [(target[:, :left], source[:, :left])]
        made += [(target[:, left:], source[:, left : left + right])]
        turned = np.zeros((rows, right), np.float32)
        made.append((turned.T, source[:, left : left + right].T))
    turned_experts = rng.random((7, 8, 5), dtype=np.float32)[2:5, 1:5].swapaxes(1, 2)
    made.append((np.zeros((3, 8, 5), np.float32)[:, 2:6].swapaxes(1, 2), turned_experts))
    vector = np.zeros(1000, np.float32)
    made.append((vector[3:], rng.random(997, dtype=np.float32)))
    made.append((np.zeros((1, 1), np.float32), np.ones((1, 1), np.float32)))
    made.append((np.zeros((0, 4), np.float32), np.ones((0, 4), np.float32)))
    return made


@pytest.mark.parametrize("with_library", [True, False])
def test_copies_are_those_of_numpy_and_touch_nothing_else(
    with_library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not with_library:
        monkeypatch.setattr(host_memory, "library", lambda: None)
    made = pairs(np.random.default_rng(1))
    whole = [target.base if target.base is not None else target for target, _ in made]
    made_copies = Copies(made)
    made_copies.run()
    for target, source in made:
        np.testing.assert_array_equal(target, source)
    assert made_copies.num_elements == sum(target.size for target, _ in made)
    assert not whole[-3][:3].any()


def test_neighbouring_blocks_are_copied_as_one() -> None:
    target, source = np.zeros((50, 60), np.float32), np.ones((50, 60), np.float32)
    cuts = [slice(0, 10), slice(10, 40), slice(40, 60)]
    joined = Copies([(target[:, cut], source[:, cut]) for cut in cuts])
    assert len(joined._table) == 1
    joined.run()
    assert target.all()


def test_arrays_in_different_orders_or_of_different_shapes_are_refused() -> None:
    square = np.zeros((4, 6), np.float32)
    with pytest.raises(ValueError, match="different orders"):
        Copies([(square, np.zeros((6, 4), np.float32).T)])
    with pytest.raises(ValueError, match="does not fit"):
        Copies([(square, np.zeros((6, 4), np.float32))])
