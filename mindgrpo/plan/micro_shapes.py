"""Computes the shapes of micro-batches, and the kind of kernels that take them, from the configuration alone."""

from __future__ import annotations

import math
from typing import Literal

from mindgrpo.algorithm.context_split import COLUMNS_A_RANK
from mindgrpo.algorithm.packing import MicroShape
from mindgrpo.algorithm.row_shapes import MAX_SHAPES, SHORTEST, row_lengths
from mindgrpo.backend.connect import keeps_slots
from mindgrpo.config import Config
from mindgrpo.config.roles import ParallelConfig, RewardModelConfig
from mindgrpo.models.precision import flash_attention, plain_kernels

# Kernels of the processor; fused operations of a device; MindSpore's own operations, which keep whole score matrices.
Kind = Literal["native", "fused", "plain"]


def update_shape(config: Config, ragged: bool) -> MicroShape:
    """Returns the widest shape of an update's micro-batch on each data-parallel rank; `ragged` is the kernels'."""
    rl, parallel = config.rl_config, config.actor_config.parallel_config
    rows = rl.batch_size // rl.micro_batch_interleaved
    return _micro_shape(config, rows, _row_length(config), ragged, parallel)


def reference_shape(config: Config, ragged: bool) -> MicroShape:
    """Does the same of the reference's."""
    rows = config.ref_config.ref_model_batch_size
    return _micro_shape(config, rows, _row_length(config), ragged, config.reference_parallel)


def reward_model_shape(
    config: Config, model: RewardModelConfig, longest: int, ragged: bool
) -> MicroShape:
    """Does the same of a reward model's, whose conversations have at most `longest` tokens."""
    # A conversation's last token is scored as the prompt of one more, which is not computed.
    shape = _micro_shape(config, model.batch_size, longest + 1, ragged, config.parallel_of(model))
    return shape


def _row_length(config: Config) -> int:
    """Returns the longest content of a row: of samples that share it, or of one."""
    rl, generate = config.rl_config, config.generate_config
    per_row = rl.pack_num if rl.packing else 1
    # Environments may give prompts of their own, of any length.
    if not per_row or rl.has_conversations:
        return rl.seq_length
    longest = generate.max_prompt_length + generate.sampling_config.max_tokens
    return min(rl.seq_length, -(-per_row * longest // SHORTEST) * SHORTEST)


def _micro_shape(
    config: Config, rows: int, length: int, ragged: bool, parallel: ParallelConfig
) -> MicroShape:
    """Returns `rows` rows of `length` tokens, or one as long as all of them where kernels are `ragged`.

    Rounded up where ranks share out the tokens.
    """
    ranks, rl = parallel.mesh.cp, config.rl_config
    per_row = rl.pack_num if rl.packing else 1
    if ragged and rl.packing:
        rows, length, per_row = 1, rows * length, per_row and rows * per_row
    shares = parallel.model_parallel if parallel.splits_tokens else 1
    unit = ranks * (shares // math.gcd(rows, shares))
    if ranks > 1:
        unit = math.lcm(unit, ranks * COLUMNS_A_RANK)
    return MicroShape(rows, -(-length // unit) * unit, per_row, unit=unit, context_ranks=ranks)


def row_lines(config: Config) -> list[str]:
    """Describes the lengths that rows may have."""
    ragged = kernel_kind(config) == "native"
    update, reference = update_shape(config, ragged), reference_shape(config, ragged)
    shapes = {"update": update, "reference": reference}
    if not config.has_reference or update.length == reference.length:
        shapes = {"": update}
    lines = []
    for name, shape in shapes.items():
        *shorter, longest = map(str, row_lengths(shape))
        lengths = f"{', '.join(shorter)} or {longest}" if shorter else longest
        rows = f"{shape.rows} rows" if shape.rows > 1 else "one row"
        title = f"{name} micro-batches" if name else "micro-batches"
        rounded = f", multiples of {shape.unit} that ranks share out" if shape.unit > 1 else ""
        lines.append(
            f"{title}: {rows} of {lengths} tokens, as their content needs{rounded}; at most {MAX_SHAPES} shapes a "
            "graph in a run"
        )
    return lines


def kernel_kind(config: Config) -> Kind:
    """Returns the kind of kernels that the run gets on its device."""
    target = config.context.target
    if keeps_slots(target) and config.context.mode == 0:
        return "native"
    is_plain = any(name.endswith("attention") for name in plain_kernels(config))
    is_fused = target.has_fused_attention and flash_attention(config) and not is_plain
    return "fused" if is_fused else "plain"
