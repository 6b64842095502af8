"""Whether a run's generator and trainer compute the same bits: what decides it, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from small_runs import MODEL

from mindgrpo.config import Config
from mindgrpo.errors import UserError
from mindgrpo.models.decoder_config import decoder_config
from mindgrpo.plan.invariance import any_layout, invariance_lines, is_batch_invariant

# Divides into the leaves of sums over ranks.
SIZES = MODEL | {"num_hidden_layers": 2}
GEMMA = {"model_type": "gemma3_text", "query_pre_attn_scalar": 12, "sliding_window": 20}
GEMMA |= {"layer_types": ["sliding_attention", "full_attention"], "rope_local_base_freq": 50.0}


def config_of(
    asked: bool | str,
    train: int = 1,
    infer: int = 1,
    use_vllm: int = 0,
    columns: int = 1,
    **context: Any,
) -> Config:
    context = {"device_target": "CPU", "batch_invariant": asked, **context}
    sections = {
        "context": context,
        "actor_config": {
            "parallel_config": {"model_parallel": train, "expert_tensor_parallel": columns}
        },
        "generate_config": {"parallel_config": {"model_parallel": infer}, "use_vllm": use_vllm},
    }
    return Config.model_validate(sections)


@pytest.mark.parametrize(
    ("settings", "changed", "words"),
    [
        ({"use_vllm": 1}, {}, "vLLM has kernels of its own"),
        ({"backend": "device"}, {}, "only processors in shared memory"),
        ({"mode": 1}, {}, "context.mode is 1"),
        ({"columns": 2}, {}, "expert_tensor_parallel cuts experts"),
        ({}, GEMMA, "the decode loop in C lacks"),
        ({"train": 1, "infer": 2}, {"vocab_size": 67}, "8 divides"),
        ({"train": 4, "infer": 2}, {"intermediate_size": 44}, "8 divides"),
        ({"train": 3, "infer": 1}, {}, "model_parallel is 3 in training and 1 in generation"),
    ],
)
def test_what_cannot_be_exact_is_refused_or_left(
    settings: dict[str, Any], changed: dict[str, Any], words: str
) -> None:
    model = decoder_config(SIZES | changed, "the test's model")
    with pytest.raises(UserError, match=f"context.batch_invariant is true, but .*{words}"):
        is_batch_invariant(config_of(True, **settings), model)
    assert not is_batch_invariant(config_of("auto", **settings), model)


@pytest.mark.parametrize(
    ("settings", "changed", "says"),
    [
        ({"train": 4, "infer": 2}, {}, "under any layout"),
        # Both sum over as many ranks, in the same order.
        ({"train": 2, "infer": 2}, {"vocab_size": 67}, "other layouts differ by rounding"),
        ({}, {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 10}, "differ by"),
    ],
)
def test_what_can_be_exact_is_so_unless_it_is_turned_off(
    settings: dict[str, Any], changed: dict[str, Any], says: str
) -> None:
    model = decoder_config(SIZES | changed, "the test's model")
    for asked in (True, "auto"):
        config = config_of(asked, **settings)
        assert is_batch_invariant(config, model)
        assert says in invariance_lines(config, model)[0]
    off = config_of(False, **settings)
    assert not is_batch_invariant(off, model)
    assert invariance_lines(off, model) == ["not batch invariant: context.batch_invariant is false"]


def test_sums_over_1_2_4_and_8_ranks_are_alike_and_over_3_are_not() -> None:
    model = decoder_config(SIZES, "the test's model")
    assert any_layout(model, 1, 2, 4, 8)
    assert not any_layout(model, 3) and not any_layout(model, 16)
