"""On what the doctor's jobs run: the device that is there, its dtype, layouts of the example, sizes and deadlines."""

from __future__ import annotations

from mindgrpo.backend.dtypes import Dtype, resolve_compute_dtype
from mindgrpo.backend.targets import Target, choose_target

MIB = 1 << 20
# Seconds after which a job is ended: of its sections together.
DEADLINES = {"communication": 300.0, "weights": 300.0, "kernels": 600.0, "first_step": 1200.0}
# By number of ranks, as quickstart.sh has them: (data, model, stage) of the trainer, (data, model) of the generator.
LAYOUTS = {
    1: ((1, 1, 1), (1, 1)),
    2: ((1, 2, 1), (1, 2)),
    4: ((1, 2, 2), (2, 2)),
    8: ((1, 4, 2), (2, 4)),
}


def target_here(device: str | None = None) -> Target:
    """The backend for devices on `device`, or on the one that is available. Raises UserError."""
    return choose_target(device, "device")


def dtype_of(target: Target) -> Dtype:
    """That of a run without context.compute_dtype."""
    return resolve_compute_dtype("auto", target, True, False, "auto")


def weight_bytes(target: Target) -> int:
    """Of the model whose weights are moved: large enough for a device's links, small enough for a test's."""
    return 24 * MIB if target.keeps_weights_on_host else 1024 * MIB


def example_ranks(num_ranks: int) -> int:
    """How many of `num_ranks` the example's first step uses."""
    return max(size for size in LAYOUTS if size <= num_ranks)
