"""Rewards given in code stand in for the configuration's. Does not prove a run: the distributed tests do."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindgrpo.config import load_config
from mindgrpo.errors import UserError
from mindgrpo.run.preflight import prepare

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "grpo" / "tiny_arithmetic" / "grpo_config.yaml"


def my_reward(completions: list[str], answers: list[str]) -> list[float]:
    return [1.0 if a in c else 0.0 for c, a in zip(completions, answers, strict=True)]


def test_a_callable_replaces_the_functions_of_the_file_and_their_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    scorer = prepare(load_config(EXAMPLE).config, None, [my_reward]).scorer
    assert scorer is not None
    assert (scorer.names, scorer.weights) == (["my_reward"], [1.0])
    scorer.close()


def test_weights_given_in_code_must_match_the_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match="2 weights were given for 1 reward functions"):
        prepare(load_config(EXAMPLE).config, None, [my_reward], [1.0, 2.0])
