"""Seconds of a reshard on ranks of one host, beside memcpy of as many bytes by the same ranks at the same time.

reshard.py [--work W.json | --model DIR] [--train dp,tp,pp --infer dp,tp] [--repeats 7] prints one JSON line. Counted
is what is written: the targets of all ranks, kept parts included. `GB_per_s` is those bytes over the median seconds;
`memcpy_GB_per_s` the same bytes copied by the same ranks, in turn with it. The `fresh_` figures are both into memory
that was given up before, as after an update: the system then hands out zeroed pages first. Refuses to count the first
reshard, which prepares the others.
"""

from __future__ import annotations

import json
import resource
import sys

import launching
import moving


def main() -> None:
    given = moving.options(__doc__.splitlines()[0])
    if launching.is_rank():
        measure(given)
    else:
        print(json.dumps(launching.run_on_ranks(__file__, sys.argv[1:], moving.num_ranks(given))))


def measure(given) -> None:  # type: ignore[no-untyped-def]
    import assembly

    from mindgrpo.models.parameters import num_parameters
    from mindgrpo.weight_sync.execute import Resharder
    from mindgrpo.weight_sync.plan import plan_reshard
    from mindgrpo.weights.checksum import host_sums
    from mindgrpo.weights.local_weights import Weights
    from mindgrpo.weights.pretrained import fill_random

    backend = assembly.join_ranks()
    if backend is None:
        return
    model = moving.model_of(given)
    dtype = given.compute_dtype
    source = Weights(
        moving.layout(model, given.train), backend.rank, backend, shared=True, dtype=dtype
    )
    target = Weights(moving.layout(model, given.infer), backend.rank, backend, dtype=dtype)
    fill_random(source, seed=0)
    plan = plan_reshard(source.layout, target.layout, source.pool.itemsize)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    resharder = Resharder(plan, source, target, backend)
    resharder.run()
    exact = host_sums(target) == expected(target, backend)
    memcpy = moving.Memcpy(backend, target.num_bytes)
    medians = moving.Alternating(backend, given.repeats).medians(
        reshard=(moving.nothing, resharder.run),
        memcpy=(moving.nothing, memcpy.run),
        fresh_reshard=(target.pool.release, resharder.run),
        fresh_memcpy=(memcpy.give_up_target, memcpy.run),
    )
    told = backend.world.gather_objects((target.num_bytes, exact, resharder.extra_bytes))
    if backend.rank == 0:
        written = sum(size for size, _, _ in told)
        launching.give_figures(
            {
                "bench": "reshard",
                "seconds": medians["reshard"],
                "bytes_moved": plan.bytes_moved,
                "bytes_lower_bound": plan.lower_bound,
                "bytes_written": written,
                "GB_per_s": written / medians["reshard"] / 1e9,
                "memcpy_GB_per_s": written / medians["memcpy"] / 1e9,
                "of_memcpy": medians["memcpy"] / medians["reshard"],
                "fresh_GB_per_s": written / medians["fresh_reshard"] / 1e9,
                "fresh_memcpy_GB_per_s": written / medians["fresh_memcpy"] / 1e9,
                "fresh_of_memcpy": medians["fresh_memcpy"] / medians["fresh_reshard"],
                "extra_bytes_peak": max(extra for _, _, extra in told),
                "bit_exact": all(exact for _, exact, _ in told),
                "model_bytes": num_parameters(model) * source.pool.itemsize,
                "rss_before_bytes": before * 1024,
                "train": str(source.layout.mesh),
                "infer": str(target.layout.mesh),
            }
        )
    backend.close()


def expected(target, backend) -> dict[str, int]:  # type: ignore[no-untyped-def]
    """Checksums of the same random weights made in the target's own layout."""
    from mindgrpo.weights.checksum import host_sums
    from mindgrpo.weights.local_weights import Weights
    from mindgrpo.weights.pretrained import fill_random

    made = Weights(target.layout, backend.rank, backend, dtype=target.dtype)
    fill_random(made, seed=0)
    sums = host_sums(made)
    made.pool.release()
    return sums


if __name__ == "__main__":
    main()
