"""Scores a rollout with the reward functions on rank 0 and broadcasts the scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np

from mindgrpo.algorithm.sample import Messages, Rollout, Sample
from mindgrpo.backend.contract import Backend
from mindgrpo.backend.rank_consistency import on_one_rank
from mindgrpo.data.prompts import Prompt, columns_of
from mindgrpo.data.tokenizer import Tokenizer
from mindgrpo.errors import UserError
from mindgrpo.grpo.ended_groups import EndedGroups, ScoredPart
from mindgrpo.grpo.reward_model import RewardModel
from mindgrpo.rewards.call import COMPLETIONS, Columns, RewardResult
from mindgrpo.rewards.classifier_texts import Completed
from mindgrpo.rewards.messages import completion_messages
from mindgrpo.rewards.score import Scorer
from mindgrpo.rewards.scores import Scores, joined
from mindgrpo.rollout.environment import NAME, rewards_in, turn_rewards, turns_of

T = TypeVar("T")


def number(value: float) -> float | None:
    """Returns the value for JSON, with None for nan, the score of a sample that could not be scored."""
    return None if value != value else float(value)


def reward_columns(
    prompts: Sequence[Prompt],
    begun: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    completion_lengths: Sequence[int],
    finish_reasons: Sequence[str],
    conversations: Sequence[Messages],
) -> Columns:
    """Returns the columns passed to reward functions, one value per sample.

    `prompts` are the samples' rows and `begun` the rendered prompts. `completion_lengths` count the policy's own tokens
    only. `conversations` are empty for single-turn completions.
    """
    own: dict[str, list[Any]] = {
        "prompts": list(begun),
        "completion_ids": list(completion_ids),
        "completion_lengths": list(completion_lengths),
        "finish_reasons": list(finish_reasons),
    }
    turns = {"messages": [list(messages) for messages in conversations]}
    # A data set's column of the same name wins over ours, but its `messages` are those of a prompt.
    return own | columns_of(prompts) | (turns if any(conversations) else {})


# Format of completions for users' reward functions; as_prompts: messages if the row's prompt is a list of messages, as
# in TRL.
CompletionForm = Literal["text", "messages", "as_prompts"]


def message_columns(
    form: CompletionForm,
    prompts: Sequence[Prompt],
    begun: Sequence[str],
    texts: Sequence[str],
    conversations: Sequence[Messages],
    openings: Sequence[Messages],
) -> Columns:
    """Returns prompts and completions as messages, by column; empty if all samples are passed as texts.

    `openings` are the messages of prompts from an environment, () for prompts of the data set.
    """
    are_messages = [
        form == "messages" or (form == "as_prompts" and prompt.example.is_conversation)
        for prompt in prompts
    ]
    if not any(are_messages):
        return {}
    own: dict[str, list[Any]] = {
        "prompts": [
            ([dict(message) for message in opening] or prompt.messages) if is_one else text
            for is_one, prompt, text, opening in zip(
                are_messages, prompts, begun, openings, strict=True
            )
        ],
        COMPLETIONS: [
            completion_messages(text, turns) if is_one else text
            for is_one, text, turns in zip(are_messages, texts, conversations, strict=True)
        ],
    }
    # As in `reward_columns`, a data set's own column wins.
    return {name: values for name, values in own.items() if name not in columns_of(prompts[:1])}


@dataclass(frozen=True)
class Scored:
    """Scores of a rollout; `texts` are the decoded completions on rank 0, empty on other ranks.

    `turn_rewards` are the environments' rewards, float64 [turns] per sample, None without environments. `opened_with`
    are the environments' prompts by sample, on rank 0.
    """

    scores: Scores
    texts: list[str]
    turn_rewards: list[np.ndarray] | None = None
    opened_with: Mapping[int, str] = field(default_factory=dict)

    def rows(self, rollout: Rollout, prompts: Sequence[Prompt]) -> Iterator[dict[str, Any]]:
        """Yields one row per sample for completions.jsonl, on rank 0; `prompts` has one entry per sample.

        `reward` is the weighted total, from which advantages are computed.
        """
        per_function = self.scores.per_function
        for i, prompt in enumerate(prompts):
            turns = {"messages": list(messages)} if (messages := rollout.messages[i]) else {}
            # Those of what an environment opened with are not recorded.
            images = [] if i in self.opened_with else [*prompt.images]
            yield {
                "prompt": self.opened_with.get(i) or prompt.text,
                **({"images": images} if images else {}),
                "completion": self.texts[i],
                **turns,
                "answer": prompt.answer,
                "finish_reason": rollout.finish_reasons[i],
                "length": int(rollout.action_lengths[i]),
                "rewards": {name: number(values[i]) for name, values in per_function.items()},
                # The shortest decimal that rounds to this float32.
                "reward": number(float(str(self.scores.total[i]))),
            }

    def with_replaced(self, indices: Sequence[int], fresh: Scored) -> Scored:
        """Returns a copy with the samples at `indices` replaced by those of `fresh`, in order."""
        texts = list(self.texts)
        if texts:
            for index, text in zip(indices, fresh.texts, strict=True):
                texts[index] = text
        of_turns = None
        if self.turn_rewards is not None and fresh.turn_rewards is not None:
            of_turns = list(self.turn_rewards)
            for index, rewards in zip(indices, fresh.turn_rewards, strict=True):
                of_turns[index] = rewards
        opened_with = {i: text for i, text in self.opened_with.items() if i not in set(indices)}
        opened_with |= {indices[i]: text for i, text in fresh.opened_with.items()}
        scores = self.scores.with_replaced(indices, fresh.scores)
        return Scored(scores, texts, of_turns, opened_with)


@dataclass(frozen=True)
class RolloutScorer:
    """Scores rollouts; `rewards` and their worker processes exist on rank 0 only, None on other ranks.

    `environment_weight` is the weight of environments' rewards, None without environments; `form` is the format of
    completions for users' functions. `enter` brings the role of one of the reward `models` to the device. If groups are
    scored as they end, the first rank of each replica has `rewards`.
    """

    rewards: Scorer | None
    tokenizer: Tokenizer
    backend: Backend
    environment_weight: float | None = None
    form: CompletionForm = "text"
    models: Sequence[RewardModel] = ()
    enter: Callable[[str], None] = lambda role: None

    def score(self, rollout: Rollout, prompts: Sequence[Prompt]) -> Scored:
        """Scores all samples; `prompts` has one entry per sample. Collective, with the same result on every rank.

        A sample whose reward failed gets the mean total of the others in its group, or else of all others. Raises
        UserError or RuntimeError if scoring fails as a whole on rank 0.
        """
        return self.begin(rollout, prompts)()

    def ended_groups(self, prompts: Sequence[Prompt], size: int, first: int) -> EndedGroups | None:
        """Returns what scores groups of a rollout as they end, with a prompt each; None on ranks that score nothing.

        The rollout's samples are numbered from `first`, `size` a group.
        """
        if self.rewards is None:
            return None

        def score(samples: Sequence[Sample]) -> ScoredPart:
            groups = [(sample.number - first) // size for sample in samples]
            owners, rollout = (
                [prompts[group] for group in groups],
                Rollout(tuple(samples), tuple(groups)),
            )
            texts, waits = self._begin_here(rollout, owners, {})
            return ScoredPart([sample.number for sample in samples], texts, waits())

        return EndedGroups(score, size, first)

    def wait_for_ended(
        self, rollout: Rollout, prompts: Sequence[Prompt], ended: EndedGroups | None
    ) -> Scored:
        """Waits for the scores of groups that ranks scored as they ended. Collective, as `score`."""
        failure: Exception | None = None
        own: list[ScoredPart] = []
        try:
            own = [] if ended is None else ended.finish()
        except UserError as error:
            failure = error
        except Exception as error:
            where = f"the rewards could not be computed on rank {self.backend.rank}"
            failure = RuntimeError(f"{where}: {type(error).__name__}: {error}")
        by_rank = self.backend.world.gather_objects((own, failure))
        for _, refusal in by_rank:
            if refusal is not None:
                raise refusal
        index = {sample.number: i for i, sample in enumerate(rollout.samples)}
        texts = [""] * len(rollout) if self.backend.rank == 0 else []
        placed = []
        for part in (part for scored, _ in by_rank for part in scored):
            indices = [index[number] for number in part.numbers]
            placed.append((indices, part.scores))
            for i, text in zip(indices if texts else [], part.texts, strict=False):
                texts[i] = text
        if sorted(i for indices, _ in placed for i in indices) != list(range(len(rollout))):
            raise RuntimeError("not every group was scored once as it ended")
        models = self._results_of_models(rollout, prompts, texts, {})
        return self._scored(rollout, joined(placed, len(rollout)), models, texts, {})

    def begin(self, rollout: Rollout, prompts: Sequence[Prompt]) -> Callable[[], Scored]:
        """Starts the reward functions, and returns what waits for them and applies the models: collective, as `score`.

        Nothing else may be scored in between. What fails here is raised by what it returns.
        """
        texts: list[str] = []
        opened_with: dict[int, str] = {}
        failure: Exception | None = None
        waits: Callable[[], Scores] | None = None
        if self.backend.rank == 0:
            # Only rank 0 needs the texts.
            try:
                opened_with = self._opened_with(rollout, prompts)
                texts, waits = self._begin_here(rollout, prompts, opened_with)
            except Exception as error:
                failure = error

        def check() -> None:
            if failure is not None:
                raise failure

        def here() -> Scores:
            check()
            assert waits is not None and self.rewards is not None
            total, num_done = len(texts) * len(self.rewards.names), self.rewards.num_done
            with self.backend.health.counting("rewards", total, num_done):
                return waits()

        def wait() -> Scored:
            if self.models:
                self._on_first_rank(check)
            models = self._results_of_models(rollout, prompts, texts, opened_with)
            return self._scored(rollout, self._on_first_rank(here), models, texts, opened_with)

        return wait

    def _results_of_models(
        self,
        rollout: Rollout,
        prompts: Sequence[Prompt],
        texts: Sequence[str],
        opened_with: Mapping[int, str],
    ) -> list[RewardResult]:
        completed = partial(self._completed, rollout, prompts, opened_with, texts)
        return [model.score(self.backend, self.enter, completed) for model in self.models]

    def _on_first_rank(self, work: Callable[[], T]) -> T:
        return on_one_rank(
            self.backend.world.gather_objects,
            self.backend.rank == 0,
            work,
            "the rewards could not be computed on rank 0: ",
        )

    def _scored(
        self,
        rollout: Rollout,
        shared: Scores,
        models: Sequence[RewardResult],
        texts: list[str],
        opened_with: Mapping[int, str],
    ) -> Scored:
        """Adds the rewards of models and environments, and fills in for samples whose reward failed."""
        for model, result in zip(self.models, models, strict=True):
            shared = shared.with_function(model.name, result, model.weight)
        weight = self.environment_weight
        if weight is None:
            return Scored(shared.filled(rollout.group_ids), texts)
        conversations = rollout.messages
        scores = shared.with_function(NAME, rewards_in(conversations), weight)
        of_turns = turn_rewards(conversations, weight, shared.total, scores.failed)
        return Scored(scores.filled(rollout.group_ids), texts, of_turns, opened_with)

    def _completed(
        self,
        rollout: Rollout,
        prompts: Sequence[Prompt],
        opened_with: Mapping[int, str],
        texts: Sequence[str],
    ) -> list[Completed]:
        return [
            Completed(
                messages=rollout.openings[i] or prompt.messages,
                text=opened_with.get(i) or prompt.text,
                prompt_ids=rollout.prompt_ids[i],
                completion=texts[i],
                completion_ids=rollout.completion_ids[i],
                turns=rollout.messages[i] or ({"role": "assistant", "content": texts[i]},),
            )
            for i, prompt in enumerate(prompts)
        ]

    def _opened_with(self, rollout: Rollout, prompts: Sequence[Prompt]) -> dict[int, str]:
        if self.environment_weight is None:
            return {}
        opened_with = {}
        for i, (ids, prompt) in enumerate(zip(rollout.prompt_ids, prompts, strict=True)):
            if np.array_equal(ids, prompt.ids):
                continue
            if ids.min() < 0:
                # Ids of images stand for no text; the template writes one token for each image.
                opened_with[i] = self.tokenizer.render(rollout.openings[i])
            else:
                opened_with[i] = self.tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        return opened_with

    def _begin_here(
        self, rollout: Rollout, prompts: Sequence[Prompt], opened_with: Mapping[int, str]
    ) -> tuple[list[str], Callable[[], Scores]]:
        """Returns the completions' texts, and what waits for their scores."""
        assert self.rewards is not None
        ids = [tokens.tolist() for tokens in rollout.completion_ids]
        # Of a conversation, the last turn: the answers of tools are not the policy's.
        texts = [
            turns_of(messages)[-1]["content"] if messages else self.tokenizer.decode(tokens)
            for tokens, messages in zip(ids, rollout.messages, strict=True)
        ]
        begun = [opened_with.get(i) or prompt.text for i, prompt in enumerate(prompts)]
        lengths, reasons = rollout.action_lengths.tolist(), rollout.finish_reasons
        columns = reward_columns(prompts, begun, ids, lengths, reasons, rollout.messages)
        messages = message_columns(
            self.form, prompts, begun, texts, rollout.messages, rollout.openings
        )
        answers = [prompt.answer for prompt in prompts]
        return texts, self.rewards.begin(texts, answers, columns, messages)

    def close(self) -> None:
        if self.rewards is not None:
            self.rewards.close()
