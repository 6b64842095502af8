"""Counts what encoding the images of a step takes on a rank: bytes and operations of the vision encoder. Pure.

Of images a plan knows limits only: rl_config.max_pixels, and that a prompt holds them whole.
"""

from __future__ import annotations

import math

from mindgrpo.algorithm.image_patches import row_length
from mindgrpo.backend.dtypes import ITEM_BYTES
from mindgrpo.models.precision import compute_dtype
from mindgrpo.models.vision_config import VisionConfig
from mindgrpo.plan.micro_shapes import kernel_kind
from mindgrpo.plan.run_plan import FLOAT_BYTES, RunPlan


def longest_image(plan: RunPlan, vision: VisionConfig) -> int:
    """Returns the most features of an image."""
    longest, pixels = (
        plan.config.generate_config.max_prompt_length,
        plan.config.rl_config.max_pixels,
    )
    if pixels is None:
        return longest
    return max(1, min(longest, pixels // (vision.patch_size * vision.merge_size) ** 2))


def encoder_bytes(plan: RunPlan, vision: VisionConfig) -> int:
    """Returns the bytes that the encoder's graph holds beside its weights for a row of patches, at most.

    Its widest moment is an MLP's product, or the scores of attention where kernels keep them.
    """
    native = kernel_kind(plan.config) == "native"
    itemsize = FLOAT_BYTES if native else ITEM_BYTES[compute_dtype(plan.config)]
    patches = row_length(longest_image(plan, vision), vision.merged)
    inputs = FLOAT_BYTES * (vision.patch_values + 2 * vision.head_dim)
    widths = 2 * vision.hidden_size + max(4 * vision.hidden_size, 3 * vision.intermediate_size)
    # A mask for windows and one for images, in bytes or float32.
    masks = 0 if native else 2 * patches**2 * (1 if kernel_kind(plan.config) == "fused" else 4)
    scores = 0
    if kernel_kind(plan.config) == "plain":
        scores = 2 * FLOAT_BYTES * vision.num_heads * patches**2
    return patches * (inputs + widths * itemsize) + masks + scores


def feature_bytes(plan: RunPlan, vision: VisionConfig) -> int:
    """Returns the most bytes of a step's features in each rank's host memory, for one image a prompt."""
    return (
        plan.batch.prompts_per_step
        * longest_image(plan, vision)
        * vision.out_hidden_size
        * FLOAT_BYTES
    )


def encoder_flops(plan: RunPlan, vision: VisionConfig, features: int) -> float:
    """Returns the operations of one image of so many features: products, and attention to windows and to all of it."""
    hidden, inner, merged = vision.hidden_size, vision.intermediate_size, vision.merged
    patches = features * merged
    products = vision.patch_values * hidden + vision.depth * (4 * hidden**2 + 3 * hidden * inner)
    full = len(vision.full_layers)
    window = min(patches, merged * vision.window_side**2)
    seen = full * patches + (vision.depth - full) * window
    if kernel_kind(plan.config) != "native":
        # Scores that a mask hides are computed, too.
        seen = vision.depth * row_length(longest_image(plan, vision), merged)
    merger = merged * hidden * (merged * hidden + vision.out_hidden_size)
    return 2.0 * (patches * (products + 2 * hidden * seen) + features * merger)


def images_of_rank(plan: RunPlan) -> int:
    """Returns how many images a rank encodes in a step, for one image a prompt."""
    return math.ceil(plan.batch.prompts_per_step / plan.world_size)
