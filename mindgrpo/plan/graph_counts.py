"""What the compiled graphs launch and repeat, as counted from them: data, for plan/work.py. Pure.

Kernels of the fused graphs are counted in the compiler's own output with the accelerator's kernels in 16 bits. A change
that launches fewer, or computes a layer less often, changes a number here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Launches:
    """Kernels of a graph: of each layer, and beside all layers."""

    layer: float
    beside: float = 0

    def of(self, layers: int) -> float:
        return layers * self.layer + self.beside


@dataclass(frozen=True)
class GraphCounts:
    """`first_back` is the backward graph of stages that are not the last, `last` the last stage's with the loss.

    `extra_forwards`: forward passes that `first_back` makes although the stage's forward graph has run.
    `float32_sums`: results of layers are summed over ranks in float32, whatever the compute dtype.
    `whole_mask`: attention computes every pair of a row's tokens. `whole_cache`: a decoded token reads the cache to its
    full length. `fits_rows`: rows are as long as their content needs. `whole_prompts`: prompts are brought in one a
    call, padded to the longest. `is_serial`: the next kernel is launched when the last one has ended.
    `tokens_a_graph`: tokens that one call of the decoding graph makes.
    `slow_a_logit`: elements of slow operations per logit that a token is drawn from. `decode_waits`: waits of the
    host a call of the decoding graph.
    Of the optimizer: bytes of memory a parameter, and calls outside of graphs. Of a weight sync: calls a tensor, bytes
    of memory per byte written; bytes of memory and elements of slow operations per element checked.
    """

    decode: Launches
    prompt: Launches
    forward: Launches
    first_back: Launches
    last: Launches
    optimizer: Launches
    extra_forwards: int
    float32_sums: bool
    whole_mask: bool
    whole_cache: bool
    fits_rows: bool
    whole_prompts: bool
    is_serial: bool
    tokens_a_graph: int
    slow_a_logit: float
    decode_waits: float
    optimizer_bytes: float
    optimizer_calls: float
    sync_calls: float
    sync_bytes: float
    checked_bytes: float
    slow_checks: float


FUSED = GraphCounts(
    decode=Launches(28, 58),
    prompt=Launches(30),
    forward=Launches(26, 29),
    first_back=Launches(86, 37),
    # The head's logits in chunks of some 400 rows.
    last=Launches(90, 123),
    optimizer=Launches(29, 13),
    extra_forwards=1,
    float32_sums=True,
    whole_mask=True,
    whole_cache=True,
    fits_rows=True,
    whole_prompts=True,
    is_serial=False,
    tokens_a_graph=1,
    slow_a_logit=0.0,
    decode_waits=1.0,
    optimizer_bytes=66.0,
    optimizer_calls=500.0,
    sync_calls=10.4,
    sync_bytes=6.0,
    checked_bytes=20.0,
    slow_checks=0.0,
)
# Kernels of processors: one C call decodes, attention sees what its spans say, and ranks read one another's memory.
NATIVE = GraphCounts(
    decode=Launches(0),
    prompt=Launches(0),
    forward=Launches(14, 20),
    first_back=Launches(40, 30),
    last=Launches(40, 60),
    optimizer=Launches(0),
    extra_forwards=1,
    float32_sums=False,
    whole_mask=False,
    whole_cache=False,
    fits_rows=True,
    whole_prompts=False,
    is_serial=True,
    tokens_a_graph=0,
    slow_a_logit=1.0,
    decode_waits=0.0,
    optimizer_bytes=40.0,
    optimizer_calls=0.0,
    sync_calls=2.0,
    sync_bytes=2.0,
    checked_bytes=4.0,
    slow_checks=0.0,
)
