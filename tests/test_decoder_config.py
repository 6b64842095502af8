"""What a config.json says of experts, by family, without a model of it."""

from __future__ import annotations

from typing import Any

import pytest

from mindgrpo.models.decoder_config import decoder_config

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MIXTRAL = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


@pytest.mark.parametrize(
    ("raw", "divides"),
    [
        (MIXTRAL, True),  # has no switch
        (QWEN3_MOE | {"norm_topk_prob": True}, True),
        (QWEN3_MOE | {"norm_topk_prob": False}, False),
    ],
    ids=["mixtral", "switched on", "switched off"],
)
def test_scores_of_experts_are_divided_by_their_sum_as_the_family_has_it(
    raw: dict[str, Any], divides: bool
) -> None:
    moe = decoder_config(SIZES | raw, "here").moe
    assert moe is not None and moe.renormalise is divides
