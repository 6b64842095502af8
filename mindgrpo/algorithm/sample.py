"""Data structures from prompt to loss: a request, a sample (conversation), a step's rollout, its training batch.

Token ids travel with lengths, finish reasons and masks, so that no mask is ever inferred from token values. Per-token
arrays are declared in token_arrays.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from mindgrpo.algorithm.token_arrays import TOKEN_ARRAYS, RemoteArray, RemoteSegment

STOPPED, LENGTH, MAX_TURNS, FAILED = "stop", "length", "max_turns", "failed"

Arrays = Sequence[np.ndarray]
Messages = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Request:
    """Requests completions of `prompt` int32 [n]; `samples` are their global numbers, which select the noise.

    So does `turn`, from 0: that of a conversation, or the chunk of a partial rollout. `max_tokens` is a limit per
    sample; None: the sampling settings' limit for all.
    """

    prompt: np.ndarray
    samples: tuple[int, ...]
    max_tokens: tuple[int, ...] | None = None
    turn: int = 0


@dataclass(frozen=True)
class Sample:
    """Sample `number` of a rollout: completion `tokens` int32 [n] after `prompt` int32 [m].

    `action_mask` bool [n] marks tokens that the policy generated; the others, from tools and templates, are context (no
    loss, no advantage, in no mean). `arrays` are those of TOKEN_ARRAYS. A sample without `finish_reason` is unfinished.
    In conversations, `messages` are the finished turns and the answers of tools or the environment, and `opening` the
    messages of a prompt from an environment.
    """

    number: int
    prompt: np.ndarray
    tokens: np.ndarray
    action_mask: np.ndarray
    arrays: Mapping[str, Any]
    finish_reason: str | None = None
    messages: Messages = ()
    opening: Messages = ()

    @classmethod
    def begun(cls, prompt: np.ndarray, number: int = 0) -> Sample:
        """Returns a sample without tokens."""
        ids = np.zeros(0, np.int32)
        arrays = {name: array.of((), 0) for name, array in TOKEN_ARRAYS.items()}
        return cls(number, np.asarray(prompt, np.int32), ids, np.zeros(0, bool), arrays)

    @classmethod
    def drawn(
        cls,
        number: int,
        prompt: np.ndarray,
        tokens: np.ndarray,
        finish_reason: str,
        version: int,
        **arrays: Any,
    ) -> Sample:
        """Returns a sample whose tokens the policy generated with weights `version`; `arrays` by declared name.

        Raises ValueError if an array does not have one entry per token.
        """
        count = len(tokens)
        arrays["versions"] = np.full(count, version, np.int32)
        checked = {name: TOKEN_ARRAYS[name].of(values, count) for name, values in arrays.items()}
        return cls(number, prompt, tokens, np.ones(count, bool), checked, finish_reason)

    @property
    def logps(self) -> np.ndarray:
        return self.arrays["logps"]

    @property
    def versions(self) -> np.ndarray:
        return self.arrays["versions"]

    @property
    def turn(self) -> np.ndarray:
        """Returns int32 [k], the policy's tokens after the last context token."""
        others = np.flatnonzero(~self.action_mask)
        return self.tokens[others[-1] + 1 if others.size else 0 :]

    @property
    def num_turns(self) -> int:
        """Returns the number of the policy's finished turns."""
        return sum(message["role"] == "assistant" for message in self.messages)

    def with_written(self, written: Sample) -> Sample:
        """Appends the policy's next tokens; the finish reason becomes that of `written`."""
        num_inputs = self.num_inputs + len(written.tokens)
        grown = {
            name: array.joined(self.arrays.get(name), written.arrays.get(name), num_inputs)
            for name, array in TOKEN_ARRAYS.items()
        }
        arrays = {name: values for name, values in grown.items() if values is not None}
        sample = self._with(written.tokens, written.action_mask, arrays)
        return replace(sample, finish_reason=written.finish_reason)

    def held_by(self, owner: int, known: dict[int, RemoteSegment]) -> Sample:
        """Returns the sample for transfer to other ranks, with remote arrays replaced by references to rank `owner`.

        `known` caches the segments seen so far by id, because samples share them.
        """
        arrays = {
            name: own.held_by(owner, known) if isinstance(own, RemoteArray) else own
            for name, own in self.arrays.items()
        }
        return replace(self, arrays=arrays)

    @property
    def num_inputs(self) -> int:
        """Returns the number of tokens that the model reads: all but the last, which predicts nothing."""
        return len(self.prompt) + len(self.tokens) - 1

    def with_answer(self, ids: Sequence[int], messages: Sequence[Mapping[str, Any]]) -> Sample:
        """Appends `ids`, the encoded `messages`, as context; the sample is unfinished again, for the policy to
        continue.
        """
        arrays = {
            name: TOKEN_ARRAYS[name].with_context(values, len(ids))
            for name, values in self.arrays.items()
        }
        grown = self._with(np.array(ids, np.int32), np.zeros(len(ids), bool), arrays)
        return replace(grown, messages=(*self.messages, *messages), finish_reason=None)

    def _with(self, tokens: np.ndarray, mask: np.ndarray, arrays: Mapping[str, Any]) -> Sample:
        tokens = np.concatenate([self.tokens, tokens])
        mask = np.concatenate([self.action_mask, mask])
        return replace(self, tokens=tokens, action_mask=mask, arrays=arrays)

    def request(self, number: int, max_tokens: int, turn: int) -> Request:
        """Returns a request for at most `max_tokens` further tokens, as sample `number`."""
        context = np.concatenate([self.prompt, self.tokens])
        return Request(context, (number,), (max_tokens,), turn)


@dataclass(frozen=True)
class PartialGroup:
    """A prompt's samples, begun in step `step` (from 0); `position` is the prompt's number in the run's order."""

    position: int
    step: int
    samples: tuple[Sample, ...]

    @classmethod
    def begun(cls, position: int, prompt: np.ndarray, step: int, size: int) -> PartialGroup:
        return cls(position, step, tuple(Sample.begun(prompt, i) for i in range(size)))

    @property
    def prompt(self) -> np.ndarray:
        return self.samples[0].prompt

    @property
    def is_whole(self) -> bool:
        return all(sample.finish_reason is not None for sample in self.samples)

    @property
    def num_tokens(self) -> int:
        return sum(len(sample.tokens) for sample in self.samples)

    def requests(self, first: int, chunk: int, max_tokens: int, turn: int) -> list[Request]:
        """Returns requests for a chunk of each unfinished sample, numbered from `first`; one for all without tokens."""
        requests, fresh = [], []
        for i, sample in enumerate(self.samples):
            if sample.finish_reason is not None:
                continue
            if not len(sample.tokens):
                fresh.append(first + i)
                continue
            room = max_tokens - len(sample.tokens)
            requests.append(sample.request(first + i, min(chunk, room), turn))
        if fresh:
            limits = (min(chunk, max_tokens),) * len(fresh)
            requests.append(Request(self.prompt, tuple(fresh), limits, turn))
        return requests


@dataclass(frozen=True)
class Rollout:
    """A step's samples, the same on every rank, with their fields as columns.

    Samples with the same entry in `group_ids` are completions of one prompt (of one data set row, if an environment
    opens each conversation by itself). `prompt_ids` and `completion_ids` are int32 [tokens] per sample; `token_arrays`
    are those of TOKEN_ARRAYS that all samples have.
    """

    samples: tuple[Sample, ...]
    group_ids: tuple[int, ...]

    @classmethod
    def single_turn(
        cls,
        prompt_ids: Arrays,
        completion_ids: Arrays,
        finish_reasons: Sequence[str],
        generator_logps: Arrays,
        group_ids: Sequence[int],
        versions: Sequence[int] | None = None,
    ) -> Rollout:
        """Returns a rollout of single-turn completions, generated with weights `versions` (None: all 0)."""
        versions = versions or [0] * len(completion_ids)
        columns = prompt_ids, completion_ids, finish_reasons, versions, generator_logps
        samples = (
            Sample.drawn(number, prompt, tokens, reason, version, logps=logps)
            for number, (prompt, tokens, reason, version, logps) in enumerate(
                zip(*columns, strict=True)
            )
        )
        return cls(tuple(samples), tuple(group_ids))

    def __len__(self) -> int:
        return len(self.samples)

    @cached_property
    def prompt_ids(self) -> Arrays:
        return tuple(sample.prompt for sample in self.samples)

    @cached_property
    def completion_ids(self) -> Arrays:
        return tuple(sample.tokens for sample in self.samples)

    @cached_property
    def action_mask(self) -> Arrays:
        return tuple(sample.action_mask for sample in self.samples)

    @cached_property
    def token_arrays(self) -> Mapping[str, Sequence[Any]]:
        return {
            name: tuple(sample.arrays[name] for sample in self.samples)
            for name, array in TOKEN_ARRAYS.items()
            if all(
                name in sample.arrays and array.is_whole(sample.arrays[name], sample.num_inputs)
                for sample in self.samples
            )
        }

    def with_arrays(self, arrays: Mapping[str, Sequence[Any]]) -> Rollout:
        """Returns the rollout with `arrays` (one entry per sample) added to its samples' or replacing them."""
        samples = (
            replace(s, arrays={**s.arrays, **{name: own[i] for name, own in arrays.items()}})
            for i, s in enumerate(self.samples)
        )
        return replace(self, samples=tuple(samples))

    @property
    def generator_logps(self) -> Arrays:
        return self.token_arrays["logps"]

    @property
    def weights_version(self) -> Arrays:
        return self.token_arrays["versions"]

    @cached_property
    def finish_reasons(self) -> tuple[str, ...]:
        return tuple(sample.finish_reason or LENGTH for sample in self.samples)

    @cached_property
    def messages(self) -> tuple[Messages, ...]:
        """Returns each conversation's turns and answers of tools, () for a single-turn completion."""
        return tuple(sample.messages for sample in self.samples)

    @cached_property
    def openings(self) -> tuple[Messages, ...]:
        """Returns the messages of prompts from environments, () for prompts of the data set."""
        return tuple(sample.opening for sample in self.samples)

    def samples_of(self, groups: Sequence[int]) -> list[int]:
        """Returns the indices of the samples of these groups, in order."""
        wanted = set(groups)
        return [i for i, group in enumerate(self.group_ids) if group in wanted]

    def with_groups_of(self, fresh: Rollout) -> Rollout:
        """Returns this rollout with the groups of `fresh`, whose samples replace the earlier ones.

        Raises ValueError unless `fresh` has whole groups of this rollout, in its order.
        """
        indices = self.samples_of(fresh.group_ids)
        if [self.group_ids[i] for i in indices] != list(fresh.group_ids):
            raise ValueError(f"{len(fresh)} samples do not replace {len(indices)} of their groups")
        samples = list(self.samples)
        for i, sample in zip(indices, fresh.samples, strict=True):
            samples[i] = sample
        return replace(self, samples=tuple(samples))

    @cached_property
    def completion_lengths(self) -> np.ndarray:
        """Returns int64 [samples]: completion lengths, context tokens included."""
        return np.array([len(tokens) for tokens in self.completion_ids], np.int64)

    @cached_property
    def action_lengths(self) -> np.ndarray:
        """Returns int64 [samples]: the numbers of the policy's own tokens."""
        return np.array([np.count_nonzero(mask) for mask in self.action_mask], np.int64)

    @cached_property
    def total_lengths(self) -> np.ndarray:
        """Returns int64 [samples]: lengths of prompt and completion together."""
        prompts = np.array([len(tokens) for tokens in self.prompt_ids], np.int64)
        return prompts + self.completion_lengths


def collect(
    samples: Sequence[Sample], num_generations: int, groups: Sequence[int], first: int = 0
) -> Rollout:
    """Sorts samples, numbered from `first`, into a rollout with `num_generations` samples for each of `groups`.

    Raises ValueError unless every sample is present exactly once.
    """
    ordered = sorted(samples, key=lambda sample: sample.number)
    expected = list(range(first, first + len(groups) * num_generations))
    if [sample.number for sample in ordered] != expected:
        raise ValueError(f"{len(ordered)} completions arrived for {len(expected)} samples")
    return Rollout(tuple(ordered), tuple(g for g in groups for _ in range(num_generations)))


@dataclass(frozen=True)
class TrainBatch:
    """A rollout with its training targets; per-token fields are float32 [completion length] per sample.

    `advantages` float32 [samples]; if advantages differ between tokens, `token_advantages` holds them and `advantages`
    their means. `old_logps` are from before the step's first update (None: the update's own). `rollout_is_weights`
    multiply the policy term (None: 1). `sample_mask` bool [samples] marks the samples in the loss (None: all);
    `rejected` bool [samples] those rejected for the generator's mismatch (None: rejection is off). `penalties` are the
    coefficients of |log rho| (None: 0). `values` are the critic's before its first update, and `returns` what it
    learns (None: no critic).
    """

    rollout: Rollout
    advantages: np.ndarray
    token_advantages: Arrays | None = None
    old_logps: Arrays | None = None
    reference_logps: Arrays | None = None
    rollout_is_weights: Arrays | None = None
    sample_mask: np.ndarray | None = None
    rejected: np.ndarray | None = None
    penalties: Arrays | None = None
    values: Arrays | None = None
    returns: Arrays | None = None

    def __len__(self) -> int:
        return len(self.rollout)

    @property
    def loss_advantages(self) -> Arrays | np.ndarray:
        """Returns the advantages as float32 [samples], or [completion length] per sample if they differ by token."""
        return self.advantages if self.token_advantages is None else self.token_advantages
