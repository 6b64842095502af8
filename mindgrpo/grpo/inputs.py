"""The inputs of a run or an evaluation: data, tokenizer, rewards, environment; read and checked without a device.

run/preflight.py builds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from mindgrpo.algorithm.sample import Messages
from mindgrpo.backend.kernels.shapes import SamplingParams
from mindgrpo.config import Config
from mindgrpo.data.image_prompts import RunImages
from mindgrpo.data.prompts import PromptSet
from mindgrpo.data.tokenizer import Tokenizer
from mindgrpo.errors import UserError
from mindgrpo.grpo.scoring import CompletionForm, message_columns, reward_columns
from mindgrpo.plan.run_plan import RunPlan
from mindgrpo.rewards.classifier_texts import ClassifierTexts, Completed
from mindgrpo.rewards.score import Scorer
from mindgrpo.rollout.environment import Trial
from mindgrpo.rollout.turns import Turns


@dataclass(frozen=True, kw_only=True)
class RolloutInputs:
    """Inputs to sample completions and score them; `scorer` is None where nothing is scored.

    `held_out` is None without an evaluation data set. `turns` are the tools or environments of conversations, `trial`
    a first conversation with the environment, and `form` the format of completions for users' reward functions.
    `classifier_texts` are those of reward models by the key of their section. `images` are those of the prompts, None
    for a model that sees none.
    """

    tokenizer: Tokenizer
    held_out: PromptSet | None
    sampling: SamplingParams
    scorer: Scorer | None = None
    turns: Turns | None = None
    trial: Trial | None = None
    form: CompletionForm = "text"
    classifier_texts: Mapping[str, ClassifierTexts] = field(default_factory=dict)
    images: RunImages | None = None

    @property
    def sets(self) -> list[PromptSet]:
        return [] if self.held_out is None else [self.held_out]

    def check_rewards(self) -> None:
        """Scores the gold answers of two prompts of the first set with every reward, as a trial. Raises UserError."""
        if self.scorer is None:
            return
        two, trial = (self.sets[0][:2] * 2)[:2], self.trial
        answers = [prompt.answer for prompt in two]
        ids = [self.tokenizer.encode(answer) for answer in answers]
        begun = [prompt.text if trial is None else trial.text for prompt in two]
        conversations: list[Messages] = [()] * len(two)
        if self.turns is not None:
            turn, *answered = ({"role": "assistant"},) if trial is None else trial.messages
            conversations = [({**turn, "content": answer}, *answered) for answer in answers]
        lengths, reasons = [len(own) for own in ids], ["stop"] * len(two)
        columns = reward_columns(two, begun, ids, lengths, reasons, conversations)
        unanswered = next((prompts.unanswered for prompts in self.sets if prompts.unanswered), "")
        openings = [() if trial is None else trial.opening] * len(two)
        messages = message_columns(self.form, two, begun, answers, conversations, openings)
        self.scorer.dry_run(answers, answers, columns, unanswered, messages)
        for key, texts in self.classifier_texts.items():
            for i, prompt in enumerate(two):
                turns = conversations[i] or ({"role": "assistant", "content": answers[i]},)
                own = openings[i] or prompt.messages
                written = np.array(ids[i], np.int32)
                try:
                    texts.ids(Completed(own, begun[i], prompt.ids, answers[i], written, turns))
                except UserError as error:
                    raise UserError(f"{key}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Inputs(RolloutInputs):
    """All inputs of a training run; `notes` are messages for the user."""

    plan: RunPlan
    prompts: PromptSet
    notes: tuple[str, ...] = field(default=())

    @property
    def sets(self) -> list[PromptSet]:
        return [self.prompts, *super().sets]

    @property
    def first_prompt(self) -> str:
        """Returns the text of the first prompt, or of the environment's first one."""
        return self.prompts[0].text if self.trial is None else self.trial.text

    def prompt_lines(self) -> list[str]:
        """Returns the repr of each line of the first prompt, so that spaces and line ends are visible."""
        return [repr(line) for line in self.first_prompt.splitlines(keepends=True)]

    def data_lines(self) -> list[str]:
        """Describes the data sets: rows kept, dropped and truncated, and prompt lengths."""
        if self.trial is None:
            lines = [self.prompts.report()]
            return lines + ([f"held out: {self.held_out.report()}"] if self.held_out else [])
        limit, count = self.prompts.form.max_prompt_length, self.trial.num_tokens
        opened = f"reset returns {count} of at most {limit} tokens for the first one"
        lines = [f"{self.prompts.kept}; {opened}"]
        return lines + ([f"held out: {self.held_out.kept}"] if self.held_out else [])


def sampling_params(config: Config, tokenizer: Tokenizer) -> SamplingParams:
    """Returns the sampling parameters, with the configuration's stop ids, or else the tokenizer's."""
    own = config.generate_config.sampling_config
    stops = own.eos_token_id
    return SamplingParams(
        temperature=own.temperature,
        top_k=max(0, own.top_k),
        top_p=own.top_p,
        min_p=own.min_p,
        repetition_penalty=own.repetition_penalty,
        min_tokens=own.min_tokens,
        max_tokens=own.max_tokens,
        stop_ids=(stops,) if isinstance(stops, int) else tuple(stops or tokenizer.stop_ids),
    )
