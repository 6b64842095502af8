"""What a rollout gives and what an update is trained on, one entry a sample; the same on every rank.

Token ids travel with their lengths, finish reasons and masks, so no mask is ever read off a token's value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

STOPPED, LENGTH, MAX_TURNS, FAILED = "stop", "length", "max_turns", "failed"

Arrays = Sequence[np.ndarray]
Messages = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Request:
    """`samples` are the global numbers of the completions wanted of `prompt` int32 [n]; they choose the noise.

    `max_tokens` limits each sample by itself; None takes the settings' limit for all.
    """

    prompt: np.ndarray
    samples: tuple[int, ...]
    max_tokens: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Completion:
    """One completion of an engine: `tokens` int32 [n], `logps` float32 [n] in nats at the sampling temperature.

    `sample` is its number among a step's samples, `version` that of the weights that wrote it. Of a conversation,
    `action_mask` bool [n] says which tokens the policy wrote (None: all), and `messages` are its turns and what tools
    or an environment answered. `prompt` int32 is the conversation's own, where it has one.
    """

    sample: int
    tokens: np.ndarray
    logps: np.ndarray
    finish_reason: str
    version: int
    action_mask: np.ndarray | None = None
    messages: Messages = ()
    prompt: np.ndarray | None = None


@dataclass(frozen=True)
class Rollout:
    """A step's samples as the engine gave them; samples with one of `group_ids` are completions of the same prompt
    (of the same row, where an environment gives each a prompt of its own).

    `prompt_ids` and `completion_ids` are int32 [tokens]. For each token of a completion, `generator_logps` float32 has
    the log-prob at which it was drawn, `action_mask` bool whether the policy wrote it (a tool's or a template's tokens
    are context: no loss, no advantage, in no mean), `weights_version` int32 the version of the weights that wrote it.
    `messages` are a conversation's turns and tools' answers, () for a completion of one turn.
    """

    prompt_ids: Arrays
    completion_ids: Arrays
    finish_reasons: Sequence[str]
    generator_logps: Arrays
    group_ids: Sequence[int]
    action_mask: Arrays
    weights_version: Arrays
    messages: Sequence[Messages]

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
        """Completions that the policy wrote whole, each under weights of one of `versions` (None: 0)."""
        lengths = [len(tokens) for tokens in completion_ids]
        versions = versions or [0] * len(lengths)
        return cls(
            tuple(prompt_ids),
            tuple(completion_ids),
            tuple(finish_reasons),
            tuple(generator_logps),
            tuple(group_ids),
            tuple(np.ones(n, bool) for n in lengths),
            tuple(np.full(n, v, np.int32) for n, v in zip(lengths, versions, strict=True)),
            ((),) * len(lengths),
        )

    def __len__(self) -> int:
        return len(self.completion_ids)

    def samples_of(self, groups: Sequence[int]) -> list[int]:
        """Indices of the samples of these groups, in order."""
        wanted = set(groups)
        return [i for i, group in enumerate(self.group_ids) if group in wanted]

    def with_groups_of(self, fresh: Rollout) -> Rollout:
        """The same rollout, but for the groups of `fresh`, whose samples take the place of those that were there.

        Raises ValueError unless `fresh` has whole groups of this rollout, in its order.
        """
        indices = self.samples_of(fresh.group_ids)
        if [self.group_ids[i] for i in indices] != list(fresh.group_ids):
            raise ValueError(f"{len(fresh)} samples do not replace {len(indices)} of their groups")
        replaced = {}
        for name in (field.name for field in fields(self)):
            values = list(getattr(self, name))
            for i, value in zip(indices, getattr(fresh, name), strict=True):
                values[i] = value
            replaced[name] = tuple(values)
        return Rollout(**replaced)

    @cached_property
    def completion_lengths(self) -> np.ndarray:
        """int64 [samples], context tokens included."""
        return np.array([len(tokens) for tokens in self.completion_ids], np.int64)

    @cached_property
    def action_lengths(self) -> np.ndarray:
        """int64 [samples]: tokens that the policy wrote."""
        return np.array([np.count_nonzero(mask) for mask in self.action_mask], np.int64)

    @cached_property
    def total_lengths(self) -> np.ndarray:
        """int64 [samples], prompts included."""
        prompts = np.array([len(tokens) for tokens in self.prompt_ids], np.int64)
        return prompts + self.completion_lengths


@dataclass(frozen=True)
class TrainBatch:
    """A rollout with what its tokens are trained on; per-token sequences hold float32 [completion length] each.

    `advantages` float32 [samples]; where they differ from token to token, `token_advantages` has them and `advantages`
    their means. `old_logps` are the policy's before the step's first update (None: those of the update itself).
    `rollout_is_weights` weigh the policy's term (None: 1). `sample_mask` bool [samples] says which samples have a part
    in the loss (None: all).
    """

    rollout: Rollout
    advantages: np.ndarray
    token_advantages: Arrays | None = None
    old_logps: Arrays | None = None
    reference_logps: Arrays | None = None
    rollout_is_weights: Arrays | None = None
    sample_mask: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.rollout)

    @property
    def loss_advantages(self) -> Arrays | np.ndarray:
        """A sample's number, or an array of its tokens' where those differ."""
        return self.advantages if self.token_advantages is None else self.token_advantages


def collect(
    prompts: Arrays,
    num_generations: int,
    completions: Sequence[Completion],
    first: int = 0,
    groups: Sequence[int] | None = None,
) -> Rollout:
    """The rollout of `prompts` (int32 [n] each), each repeated, its samples numbered from `first`.

    `groups` are the prompts' numbers (None: from 0). Raises ValueError unless each sample arrived exactly once.
    """
    ordered = sorted(completions, key=lambda completion: completion.sample)
    expected = list(range(first, first + len(prompts) * num_generations))
    if [completion.sample for completion in ordered] != expected:
        raise ValueError(f"{len(ordered)} completions arrived for {len(expected)} samples")
    groups = range(len(prompts)) if groups is None else groups
    owners = [(completion.sample - first) // num_generations for completion in ordered]
    rollout = Rollout.single_turn(
        [
            c.prompt if c.prompt is not None else prompts[o]
            for c, o in zip(ordered, owners, strict=True)
        ],
        [c.tokens for c in ordered],
        [c.finish_reason for c in ordered],
        [c.logps for c in ordered],
        [groups[owner] for owner in owners],
        [c.version for c in ordered],
    )
    whole = rollout.action_mask
    masks = [
        c.action_mask if c.action_mask is not None else m
        for c, m in zip(ordered, whole, strict=True)
    ]
    return replace(rollout, action_mask=tuple(masks), messages=tuple(c.messages for c in ordered))
