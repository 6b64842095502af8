"""Rotary position tables (RoFormer, arXiv:2104.09864), with Llama 3's frequency scaling. Pure numpy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from mindgrpo.models.decoder_config import DecoderConfig


def rotary_table(config: DecoderConfig, num_positions: int, is_local: bool = False) -> np.ndarray:
    """float32 [num_positions, 2 * head_dim]: cos of each angle, then sin; both halves of a head turn alike.

    `is_local`: of the model's local layers.
    """
    theta = config.local_rope_theta if is_local else config.rope_theta
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / config.head_dim
    frequencies = (1.0 / np.float32(theta) ** exponents).astype(np.float32)
    if config.rope_scaling is not None and not is_local:
        frequencies = _llama3(frequencies, config.rope_scaling)
    angles = np.arange(num_positions, dtype=np.float32)[:, None] * frequencies[None, :]
    angles = np.concatenate([angles, angles], axis=1)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def _llama3(frequencies: np.ndarray, scaling: Mapping[str, Any]) -> np.ndarray:
    factor, low = float(scaling["factor"]), float(scaling["low_freq_factor"])
    high = float(scaling["high_freq_factor"])
    original = float(scaling["original_max_position_embeddings"])
    wavelengths = 2 * math.pi / frequencies
    slow = frequencies / factor
    smooth = (original / wavelengths - low) / (high - low)
    mixed = (1 - smooth) * slow + smooth * frequencies
    scaled = np.where(wavelengths > original / low, slow, mixed)
    return np.where(wavelengths < original / high, frequencies, scaled).astype(np.float32)
