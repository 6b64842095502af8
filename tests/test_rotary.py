"""Frequencies of rotary positions, against the loop over frequencies that Llama 3.1 was published with."""

from __future__ import annotations

import math

import numpy as np

from mindgrpo.models.decoder_config import decoder_config
from mindgrpo.models.rotary import rotary_table

SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
HEAD, THETA = 32, 10_000.0
RAW = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 2 * HEAD,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": HEAD,
    "max_position_embeddings": 512,
    "rope_theta": THETA,
}


def published(frequency: float) -> float:
    first, low, high = 64, 1.0, 4.0
    wavelength = 2 * math.pi / frequency
    if wavelength < first / high:
        return frequency
    if wavelength > first / low:
        return frequency / 8
    smooth = (first / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / 8 + smooth * frequency


def test_positions_of_llama_3_are_scaled_as_published() -> None:
    table = rotary_table(decoder_config(RAW | {"rope_scaling": SCALING}, "here"), 2)
    plain = [THETA ** (-i / HEAD) for i in range(0, HEAD, 2)]
    expected = [published(frequency) for frequency in plain]
    # Some stay, some are slowed down, and some lie between.
    kinds = {round(own / one, 3) for own, one in zip(expected, plain, strict=True)}
    assert {1.0, 0.125} < kinds
    np.testing.assert_allclose(table[1, HEAD : HEAD + HEAD // 2], np.sin(expected), rtol=2e-6)
    np.testing.assert_allclose(table[1, : HEAD // 2], np.cos(expected), rtol=2e-6)
