"""What a config.json says of experts, by family, without a model of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mindgrpo.models.decoder_config import decoder_config

GOLDEN = Path(__file__).resolve().parent / "golden"


@pytest.mark.parametrize(
    ("family", "switch", "divides"),
    [
        ("mixtral", {}, True),  # has no switch
        ("qwen3_moe", {"norm_topk_prob": True}, True),
        ("qwen3_moe", {"norm_topk_prob": False}, False),
    ],
)
def test_scores_of_experts_are_divided_by_their_sum_as_the_family_has_it(
    family: str, switch: dict[str, Any], divides: bool
) -> None:
    raw = json.loads((GOLDEN / family / "config.json").read_text())
    moe = decoder_config(raw | switch, "here").moe
    assert moe is not None and moe.renormalise is divides
