"""What the engine's generator reports while vLLM works, with a stand-in for vLLM and a clock that the test holds.

Does not prove anything of vLLM: that is tests/vllm.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mindgrpo.rollout.vllm.process import CHILD

NUM_SAMPLES = 10
STEP_SECONDS = 0.4


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


class OneSampleAStep:
    """Ends a sample with each step, which takes `STEP_SECONDS` of the clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._waiting = clock, list[str]()

    def add_request(self, name: str, *_: Any) -> str:
        self._waiting.append(name)
        return name

    def step(self) -> list[Any]:
        self._clock.now += STEP_SECONDS
        log_prob = {5: SimpleNamespace(logprob=-0.5)}
        output = SimpleNamespace(token_ids=[5], logprobs=[log_prob], finish_reason="stop")
        name = self._waiting.pop(0)
        return [SimpleNamespace(request_id=name, outputs=[output], finished=True)]


def test_progress_is_reported_at_most_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("vllm", "vllm.sampling_params", "vllm.exceptions"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm"].SamplingParams = SimpleNamespace  # type: ignore[attr-defined]
    kinds = SimpleNamespace(DELTA="delta")
    sys.modules["vllm.sampling_params"].RequestOutputKind = kinds  # type: ignore[attr-defined]
    sys.modules["vllm.exceptions"].VLLMClientError = ValueError  # type: ignore[attr-defined]
    monkeypatch.syspath_prepend(CHILD)
    generator = import_module("mindgrpo_engine.generator")
    # Other tests have the real one.
    monkeypatch.delitem(sys.modules, "mindgrpo_engine.generator")
    clock, told = Clock(), list[dict[str, Any]]()
    monkeypatch.setattr(generator, "time", clock)
    generation = generator.Generation(OneSampleAStep(clock), told.append)
    samples = [{"seed": number, "max_tokens": 4} for number in range(NUM_SAMPLES)]
    generation.run({"temperature": 1.0}, [{"prompt": [1, 2], "samples": samples}])
    # Of ten steps every third is the first of a second.
    assert told == [
        {"type": "progress", "finished": done, "of": NUM_SAMPLES, "tokens": done}
        for done in (3, 6, 9)
    ]
