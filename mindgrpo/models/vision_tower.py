"""The vision encoder as graph code: rows of patches -> features, one for each token of an image.

Patches of an image come window by window (algorithm/image_tokens.py), so that a window is a run of neighbours. P are
the patches of a row, H the encoder's hidden size, D its head dim. Runs see all of themselves, without a causal mask;
padding is a run of one patch.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from mindgrpo.algorithm.exponentials import power
from mindgrpo.algorithm.image_tokens import section_angles
from mindgrpo.backend.kernels.contract import Kernels
from mindgrpo.backend.kernels.shapes import Heads
from mindgrpo.models.vision_config import NORM_EPS, ROTARY_BASE, VisionConfig
from mindgrpo.weights.local_weights import Weights
from mindgrpo.weights.model_files import VISUAL


class BiasedProduct(nn.Cell):
    """x [N, in] -> x weight + bias [N, out]."""

    def __init__(self, kernels: Kernels, weights: Weights, name: str) -> None:
        super().__init__()
        self.weight = weights.parameters[f"{VISUAL}{name}.weight"]
        self.bias = weights.parameters[f"{VISUAL}{name}.bias"]
        self.matmul = kernels.matmul()

    def construct(self, x: Any) -> Any:
        y = self.matmul(x, self.weight)
        return y + ops.cast(self.bias, y.dtype)


class VisionNorm(nn.Cell):
    """x [N, H] -> its RMS norm, with a weight of its own."""

    def __init__(self, kernels: Kernels, weights: Weights, name: str) -> None:
        super().__init__()
        self.weight = weights.parameters[f"{VISUAL}{name}.weight"]
        self.norm = kernels.rms_norm(NORM_EPS)

    def construct(self, x: Any) -> Any:
        return self.norm(x, ops.cast(self.weight, ms.float32))


class VisionBlock(nn.Cell):
    """(x [P, H], inputs of `attention`) -> x [P, H]: attention with biases, and a SwiGLU MLP with biases."""

    def __init__(self, kernels: Kernels, weights: Weights, heads: Heads, layer: int) -> None:
        super().__init__()
        own = f"blocks.{layer}."
        self.norm1 = VisionNorm(kernels, weights, f"{own}norm1")
        self.norm2 = VisionNorm(kernels, weights, f"{own}norm2")
        self.qkv = weights.parameters[f"{VISUAL}{own}attn.qkv.weight"]
        self.qkv_bias = weights.parameters[f"{VISUAL}{own}attn.qkv.bias"]
        self.matmul, self.attend = kernels.matmul(), kernels.attention(heads, None)
        self.nothing = Tensor([0.0], ms.float32)
        self.out = BiasedProduct(kernels, weights, f"{own}attn.proj")
        self.gate_up = BiasedProduct(kernels, weights, f"{own}mlp.gate_up")
        self.glu = kernels.glu("silu")
        self.down = BiasedProduct(kernels, weights, f"{own}mlp.down_proj")

    def construct(self, x: Any, context: Any) -> Any:
        qkv, bias = self.matmul(self.norm1(x), self.qkv), ops.cast(self.qkv_bias, ms.float32)
        x = x + self.out(self.attend(qkv, bias, self.nothing, self.nothing, *context))
        return x + self.down(self.glu(self.gate_up(self.norm2(x))))


class VisionTower(nn.Cell):
    """(patches float32 [P, patch_values], angles float32 [1, P, 2 D], spans int32 [1, P, 3] of windows and of images)
    -> features [P / merged, out_hidden_size].

    Spans and angles are as in backend/kernels/contract.py.
    """

    def __init__(self, vision: VisionConfig, weights: Weights, kernels: Kernels) -> None:
        super().__init__()
        heads = Heads(vision.num_heads, vision.num_heads, vision.head_dim, has_bias=True)
        self.sees_image = tuple(layer in vision.full_layers for layer in range(vision.depth))
        self.patch_embed = weights.parameters[f"{VISUAL}patch_embed.proj.weight"]
        self.matmul = kernels.matmul()
        # Kernels that split operands take them in float32, whatever the weights are.
        self.is_narrow = kernels.num_parts is None and weights.dtype != "float32"
        self.inputs = kernels.rope_and_mask(None)
        blocks = [VisionBlock(kernels, weights, heads, layer) for layer in range(vision.depth)]
        self.blocks = nn.CellList(blocks)
        self.ln_q = VisionNorm(kernels, weights, "merger.ln_q")
        self.first = BiasedProduct(kernels, weights, "merger.mlp.0")
        self.second = BiasedProduct(kernels, weights, "merger.mlp.2")
        self.merged = vision.merged * vision.hidden_size

    def construct(self, patches: Any, angles: Any, windows: Any, images: Any) -> Any:
        if self.is_narrow:
            patches = ops.cast(patches, self.patch_embed.dtype)
        x = self.matmul(patches, self.patch_embed)
        in_windows, in_images = self.inputs(angles, windows), self.inputs(angles, images)
        for i in range(len(self.blocks)):
            x = self.blocks[i](x, in_images if self.sees_image[i] else in_windows)
        y = self.first(self.ln_q(x).reshape(-1, self.merged))
        exact = ops.cast(y, ms.float32)
        # The exact GELU (arXiv:1606.08415), not its tanh approximation.
        y = ops.cast(0.5 * exact * (1.0 + ops.erf(exact * 0.5**0.5)), y.dtype)
        return self.second(y)


def vision_angles(vision: VisionConfig, positions: np.ndarray) -> np.ndarray:
    """Returns the rotary angles float32 [P, 2 D] of patches at `positions` int32 [P, 2], rows and columns.

    D / 4 frequencies turn by the row, and the same D / 4 by the column (arXiv:2409.12191, section 2.1).
    """
    quarter = vision.head_dim // 4
    frequencies = 1.0 / power(ROTARY_BASE, np.arange(quarter, dtype=np.float32) / quarter)
    extent = int(positions.max(initial=0)) + 1
    angles = np.arange(extent, dtype=np.float32)[:, None] * np.tile(frequencies, 4)[None]
    table = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
    return section_angles(table, positions, (quarter, quarter))
