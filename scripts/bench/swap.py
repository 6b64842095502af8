"""Seconds of swapping policy and optimizer to the host and back on all ranks, beside memcpy of as many bytes.

swap.py [--work W.json | --model DIR] [--train dp,tp,pp] [--repeats 7] prints one JSON line. A cycle is one offload and
one load of weights and both moments; `GB_per_s` counts each byte once a way. On a CPU the device's memory is the
host's: pages change hands, and nothing is copied but what other ranks read in place, which stays. Refuses to call that
a transfer: what an accelerator's swap costs is not shown here.
"""

from __future__ import annotations

import json
import sys

import launching
import moving
import numpy as np


def main() -> None:
    given = moving.options(__doc__.splitlines()[0])
    if launching.is_rank():
        measure(given)
    else:
        print(json.dumps(launching.run_on_ranks(__file__, sys.argv[1:], moving.num_ranks(given))))


def measure(given) -> None:  # type: ignore[no-untyped-def]
    import assembly

    from mindgrpo.weights.local_weights import Weights
    from mindgrpo.weights.pretrained import fill_random

    backend = assembly.join_ranks()
    if backend is None:
        return
    layout = moving.layout(moving.model_of(given), given.train)
    roles = [
        Weights(layout, backend.rank, backend, shared=True),
        Weights(layout, backend.rank, backend),
        Weights(layout, backend.rank, backend),
    ]
    for seed, role in enumerate(roles):
        fill_random(role, seed)
    kept = [_values(role) for role in roles]

    def offload() -> None:
        for role in roles:
            role.pool.offload()

    def load() -> None:
        for role in roles:
            role.pool.load()

    def cycle() -> None:
        offload()
        load()

    bytes_a_way = sum(role.num_bytes for role in roles)
    memcpy = moving.Memcpy(backend, bytes_a_way)

    def both_ways() -> None:
        memcpy.run()
        memcpy.run()

    medians = moving.Alternating(backend, given.repeats).medians(
        swap=(moving.nothing, cycle), memcpy=(moving.nothing, both_ways)
    )
    same = all(np.array_equal(_values(r), k) for r, k in zip(roles, kept, strict=True))
    told = backend.world.gather_objects((2 * bytes_a_way, same))
    if backend.rank == 0:
        moved = sum(size for size, _ in told)
        launching.give_figures(
            {
                "bench": "swap",
                "seconds": medians["swap"],
                "bytes_moved": moved,
                "GB_per_s": moved / medians["swap"] / 1e9,
                "memcpy_GB_per_s": moved / medians["memcpy"] / 1e9,
                "of_memcpy": medians["memcpy"] / medians["swap"],
                "bit_exact": all(same for _, same in told),
                "train": str(layout.mesh),
            }
        )
    backend.close()


def _values(role):  # type: ignore[no-untyped-def]
    return np.concatenate(role.arrays.flat_buffers)


if __name__ == "__main__":
    main()
