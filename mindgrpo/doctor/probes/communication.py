"""Every kind of transfer that a run makes between ranks, with known values; on all ranks together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
from mindspore import Tensor

from mindgrpo.backend.contract import Backend
from mindgrpo.backend.dtypes import mindspore_dtype
from mindgrpo.doctor.probes.line import Line, fails, ok, skipped

COUNT = 257
LARGE_BYTES = 16 << 20
REMEDY = (
    "compare the ranks' logs in this report; set HCCL_IF_IP or HCCL_SOCKET_IFNAME if ranks do not reach each other, "
    "and ask hccn_tool -i NUMBER -link -g for each device's link"
)
Check = Callable[[], str]


class Differs(Exception):
    """What arrived is not what was sent."""


def _expect(name: str, arrived: np.ndarray, wanted: np.ndarray) -> None:
    wrong = np.flatnonzero(arrived.astype(np.float32).reshape(-1) != wanted.reshape(-1))
    if arrived.shape != wanted.shape or wrong.size:
        raise Differs(f"{name}: {wrong.size} of {wanted.size} values are others than were sent")


def _own(rank: int, size: int) -> np.ndarray:
    """Whole numbers whose sums over `size` ranks, up to 256 of them, are exact in 16 bits, too."""
    return ((np.arange(COUNT) + rank) % max(2, min(4, 256 // size))).astype(np.float32)


def transfers(backend: Backend) -> list[tuple[str, Check]]:
    """(name, what makes it and says what was seen), in one order on all ranks; the checks raise Differs."""
    world, size, rank = backend.world, backend.world_size, backend.rank
    own = Tensor(_own(rank, size), mindspore_dtype(backend.compute_dtype))

    def reduce() -> str:
        total = backend.graph(world.sum_cell(), "all-reduce")(own)
        wanted = np.sum([_own(r, size) for r in range(size)], axis=0)
        _expect("sums", total.asnumpy(), wanted)
        return f"{COUNT} {backend.compute_dtype} over {size} ranks"

    def gather() -> str:
        rows = backend.graph(world.gather_cell(), "all-gather")(own)
        _expect("rows", rows.asnumpy(), np.stack([_own(r, size) for r in range(size)]))
        return f"{COUNT} {backend.compute_dtype} of {size} ranks"

    def send() -> str:
        following, previous = (rank + 1) % size, (rank - 1) % size
        arrived = backend.exchange({following: own}, {previous: (COUNT,)}, backend.compute_dtype)
        _expect("values", arrived[previous].asnumpy(), _own(previous, size))
        return f"{COUNT} {backend.compute_dtype} from each rank to the next"

    def objects() -> str:
        everyone = world.gather_objects({"rank": rank, "text": "x" * (1000 + rank)})
        if [one["rank"] for one in everyone] != list(range(size)):
            raise Differs(f"objects of ranks {[one['rank'] for one in everyone]} arrived")
        return f"Python's objects of {size} ranks"

    def large() -> str:
        whole = Tensor(np.full(LARGE_BYTES // 4, rank + 1.0, np.float32))
        graph = backend.graph(world.sum_cell(), "large all-reduce")
        graph(whole).asnumpy()  # the first call compiles and connects
        world.barrier()
        started = time.perf_counter()
        total = graph(whole).asnumpy()
        seconds = time.perf_counter() - started
        _expect("sums", total[:COUNT], np.full(COUNT, size * (size + 1) / 2, np.float32))
        return f"{LARGE_BYTES >> 20} MiB in {seconds:.4f} s, {LARGE_BYTES / seconds / 1e9:.2f} GB/s"

    return [
        ("all-reduce", reduce),
        ("all-gather", gather),
        ("send and receive", send),
        ("objects", objects),
        ("large all-reduce", large),
    ]


def communication_lines(backend: Backend, starts: Callable[[str], None]) -> Iterator[Line]:
    """`starts` hears of each check before it is made, so that one that does not end is known by its name."""
    if backend.world_size == 1:
        yield skipped("transfers between ranks", "there is one rank; give --ranks 2 or more")
        return
    for name, check in transfers(backend):
        starts(name)
        try:
            yield ok(name, f"{check()} ({backend.name})")
        except Differs as error:
            yield fails(name, str(error), REMEDY)
