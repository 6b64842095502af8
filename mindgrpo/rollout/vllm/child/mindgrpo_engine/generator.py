"""Samples completions with vLLM, each with its own seed, and reports the log-probs of the untruncated distribution.

vLLM's own log-probs are either those at temperature 1 or renormalised over what truncation left. So the temperature
goes into the model's logits, and vLLM samples at temperature 1: its raw log-probs are then those at the temperature.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

try:
    from vllm.exceptions import VLLMClientError
except ImportError:
    # Older versions raise ValueError only. Not run here.
    VLLMClientError = ValueError

from mindgrpo_engine.protocol import EngineFailure, Message, UserFailure, sentence

# What vLLM raises where a value of the user's is wrong.
REFUSALS = (ValueError, VLLMClientError)
SEED_BITS = (1 << 63) - 1
PROGRESS_SECONDS = 1.0
SAMPLING_KEYS = {
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "max_tokens",
    "stop_ids",
}

Progress = Callable[[Message], None]


@dataclass
class RunningSample:
    """Tokens of one sample, the stop token included, and the log-prob of each."""

    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    stopped: bool = False

    def extend(self, output: Any) -> None:
        """Adds what one step brought."""
        for token, log_probs in zip(output.token_ids, output.logprobs, strict=True):
            self.tokens.append(token)
            self.logps.append(log_probs[token].logprob)

    def reply(self) -> Message:
        return {"tokens": self.tokens, "logps": self.logps, "stopped": self.stopped}


def logits_factor(sampling: Message) -> float:
    """Returns the factor of the logits; greedy samples are reported at temperature 1."""
    temperature = sampling["temperature"]
    if temperature < 0:
        raise UserFailure(f"temperature {temperature} is negative")
    return 1.0 / temperature if temperature > 0 else 1.0


def check_keys(sampling: Message) -> None:
    unknown = sorted(sampling.keys() - SAMPLING_KEYS)
    if unknown:
        raise UserFailure(f"the engine has no sampling key {', '.join(unknown)}")


def sampling_params(sampling: Message, sample: Message) -> SamplingParams:
    max_tokens = sample["max_tokens"]
    return SamplingParams(
        temperature=1.0 if sampling["temperature"] > 0 else 0.0,
        top_p=sampling.get("top_p", 1.0),
        top_k=sampling.get("top_k", 0),
        min_p=sampling.get("min_p", 0.0),
        repetition_penalty=sampling.get("repetition_penalty", 1.0),
        min_tokens=min(sampling.get("min_tokens", 0), max_tokens),
        max_tokens=max_tokens,
        stop_token_ids=list(sampling.get("stop_ids", [])),
        ignore_eos=True,
        seed=sample["seed"] & SEED_BITS,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


class Generation:
    """The samples of one request while vLLM works on them."""

    def __init__(
        self, engine: Any, progress: Progress, features: Any = None, reports_ended: bool = False
    ) -> None:
        self._engine = engine
        self._progress = progress
        self._features = features
        # Numbers of samples that have ended since the last report; None if nobody asks.
        self._ended: list[int] | None = [] if reports_ended else None
        self._completions: list[RunningSample] = []
        # vLLM's own name of each sample that has not ended, by ours.
        self._running: dict[str, str] = {}
        self._reported = time.monotonic()

    def run(self, sampling: Message, requests: list[Message]) -> list[RunningSample]:
        """Returns completions of all samples in order; where one fails, all are given up."""
        try:
            for request in requests:
                for sample in request["samples"]:
                    self._add(request, sampling, sample)
            while self._running:
                self._step()
        except BaseException:
            with suppress(Exception):
                self._engine.abort_request(list(self._running.values()), internal=True)
            raise
        return self._completions

    def _add(self, request: Message, sampling: Message, sample: Message) -> None:
        name = str(len(self._completions))
        try:
            params = sampling_params(sampling, sample)
            prompt = {"prompt_token_ids": request["prompt"]}
            if request.get("images"):
                prompt = self._features.prompt(request)
            inner = self._engine.add_request(name, prompt, params)
        except REFUSALS as error:
            raise UserFailure(f"vLLM refuses a sample: {sentence(error)}") from error
        self._completions.append(RunningSample())
        self._running[name] = inner

    def _step(self) -> None:
        for output in self._engine.step():
            completion = self._completions[int(output.request_id)]
            completion.extend(output.outputs[0])
            if output.finished:
                reason = output.outputs[0].finish_reason
                if reason not in ("stop", "length"):
                    raise EngineFailure(f"vLLM ended a sample for the reason {reason!r}")
                completion.stopped = reason == "stop"
                del self._running[output.request_id]
                if self._ended is not None:
                    self._ended.append(int(output.request_id))
        if self._ended or time.monotonic() - self._reported >= PROGRESS_SECONDS:
            self._report()

    def _report(self) -> None:
        num_tokens = sum(len(completion.tokens) for completion in self._completions)
        num_finished = len(self._completions) - len(self._running)
        message: Message = {
            "finished": num_finished,
            "of": len(self._completions),
            "tokens": num_tokens,
        }
        if self._ended is not None:
            message["ended"] = [[i, self._completions[i].reply()] for i in self._ended]
            self._ended = []
        self._progress({"type": "progress"} | message)
        self._reported = time.monotonic()
