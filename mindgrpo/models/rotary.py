"""Rotary position embeddings (RoPE, arXiv:2104.09864) of a model as a table of cosines and sines, with scaling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from mindgrpo.algorithm.exponentials import power
from mindgrpo.algorithm.image_tokens import section_angles
from mindgrpo.models.decoder_config import DecoderConfig, yarn_magnitude


def rotary_table(
    config: DecoderConfig, num_positions: int, is_local: bool = False, nope_dim: int | None = None
) -> np.ndarray:
    """Returns float32 [num_positions, 2 D]: the cosines [D] of each angle, then the sines; head halves form pairs.

    `is_local`: for the model's local layers. With latent attention, each half of a head starts with half of the
    `nope_dim` dims (None: as configured), which are not rotated, followed by half of the `rope_dim` dims.
    """
    latent, scaling = config.latent, None if is_local else config.rope_scaling
    theta = config.local_rope_theta if is_local else config.rope_theta
    width = config.head_dim if latent is None else latent.rope_dim
    frequencies = 1.0 / power(theta, np.arange(0, width, 2, dtype=np.float32) / width)
    magnitude = np.ones(len(frequencies), np.float32)
    if scaling is not None and "mscale" in scaling:
        frequencies = _yarn(frequencies, theta, scaling)
        magnitude *= yarn_magnitude(scaling, "mscale") / yarn_magnitude(scaling, "mscale_all_dim")
    elif scaling is not None:
        frequencies = _llama3(frequencies, scaling)
    if latent is not None:
        before = (latent.nope_dim if nope_dim is None else nope_dim) // 2
        frequencies = np.pad(frequencies, (before, 0))
        magnitude = np.pad(magnitude, (before, 0), constant_values=1.0)
    angles = np.arange(num_positions, dtype=np.float32)[:, None] * frequencies[None, :]
    angles = np.concatenate([angles, angles], axis=1)
    both = np.concatenate([angles, angles], axis=1)
    cosines, sines = np.split(both, 2, axis=1)
    # In place, for the reason given in algorithm/exponentials.py.
    np.cos(cosines, out=cosines)
    np.sin(sines, out=sines)
    return (both * np.tile(magnitude, 4)).astype(np.float32)


class PositionAngles:
    """The rotary angles of positions with several axes (M-RoPE, arXiv:2409.12191, section 2.1)."""

    def __init__(self, config: DecoderConfig, num_positions: int) -> None:
        if config.rope_sections is None:
            raise ValueError(f"positions of {config.model_type} have one axis")
        self._table, self._sections = rotary_table(config, num_positions), config.rope_sections

    def of(self, positions: np.ndarray) -> np.ndarray:
        """Returns float32 [..., 2 D] for positions int32 [..., axes]."""
        return section_angles(self._table, positions, self._sections)


def _yarn(frequencies: np.ndarray, theta: float, scaling: Mapping[str, Any]) -> np.ndarray:
    """Applies YaRN: lowers the frequencies that rotate rarely within the original context (arXiv:2309.00071, 3.2).

    `frequencies` is float32 [dims / 2].
    """
    original, width = float(scaling["original_max_position_embeddings"]), 2 * len(frequencies)

    def dim_of(turns: float) -> float:
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dim_of(float(scaling["beta_fast"]))), 0)
    high = min(math.ceil(dim_of(float(scaling["beta_slow"]))), width - 1)
    order = np.arange(len(frequencies), dtype=np.float32)
    ramp = np.clip((order - low) / (max(high - low, 0) or 0.001), 0, 1)
    slow = frequencies / np.float32(scaling["factor"])
    return (slow * ramp + frequencies * (1 - ramp)).astype(np.float32)


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
