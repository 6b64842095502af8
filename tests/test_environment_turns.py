"""Conversations with environments: prompts, turns, rewards and advantages, with an engine that is told what to write.

Does not prove that environments live and end in processes of their own: that is test_environments.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from algorithms import advantages_of
from data_sets import MODEL
from test_conversations import Writer

from mindgrpo.algorithm.advantages import turn_advantages
from mindgrpo.algorithm.sample import (
    FAILED,
    LENGTH,
    MAX_TURNS,
    STOPPED,
    Request,
    Sample,
    collect,
)
from mindgrpo.algorithm.train_batch import compute_advantages
from mindgrpo.config import load_config
from mindgrpo.data.prompts import PromptForm
from mindgrpo.data.tokenizer import Tokenizer, load_tokenizer
from mindgrpo.data.turns import TurnSuffix
from mindgrpo.environments.contract import Observation, Opening, Question, Result
from mindgrpo.errors import UserError
from mindgrpo.grpo.scoring import RolloutScorer
from mindgrpo.rewards.scores import Scores
from mindgrpo.rollout.conversations import Conversations
from mindgrpo.rollout.environment import (
    EnvironmentTurns,
    environment_weight,
    rewards_in,
    turn_rewards,
)
from mindgrpo.rollout.turns import read_turns, turn_metrics
from mindgrpo.run.preflight import turn_notes
from mindgrpo.workers.protocol import RAISED, CallFailure

DATA_PROMPT = np.array([5, 6], np.int32)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


class Scripted:
    """Opens sample i with the row's word, and gives each turn the number in it; "done" and "fails" do so."""

    def __init__(self) -> None:
        self.asked: list[Mapping[int, Question]] = []
        self.ended = 0

    def ask(self, questions: Mapping[int, Question], patience: float) -> dict[int, Result]:
        self.asked.append(dict(questions))
        return {sample: self._result(question) for sample, question in questions.items()}

    def _result(self, question: Question) -> Result:
        if isinstance(question, Opening):
            word = question.row["word"]
            if word == "fails":
                return CallFailure(RAISED, "no such level")
            return Observation((user(word),))
        assert isinstance(question, str)
        if "fails" in question:
            return CallFailure(RAISED, "no such move")
        reward = float(question.split()[-1])
        return Observation((user(f"you get {reward:g}"),), reward, "done" in question)

    def end_all(self) -> None:
        self.ended += 1

    def close(self) -> None:
        """Nothing was started."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(MODEL).with_template("qwen_tools")


class Talk:
    """Runs the `texts` of each sample against an environment that opens it with its word."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        texts: Mapping[int, Sequence[str]],
        words: Sequence[str] = ("begin",) * 99,
        max_turns: int = 8,
        max_tokens: int = 10**6,
        longest_prompt: int = 100,
    ) -> None:
        self.pool, self.writer = Scripted(), Writer(tokenizer, texts)
        responder = EnvironmentTurns(self.pool)
        form = PromptForm(tokenizer, longest_prompt)
        suffix = TurnSuffix(tokenizer, role="user")
        driver = Conversations(tokenizer, suffix, responder, max_turns, form)
        request = Request(DATA_PROMPT, tuple(texts), (max_tokens,) * len(texts))
        self.made: list[Sample] = driver.run(
            [request],
            max_tokens,
            self.writer.generate,
            openings={sample: Opening({"word": words[sample]}, "0") for sample in texts},
        )


def prompt_ids(tokenizer: Tokenizer, word: str) -> list[int]:
    return tokenizer.encode(tokenizer.render([user(word)]))


def test_a_conversation_is_what_the_template_makes_of_it_whole(tokenizer: Tokenizer) -> None:
    talk = Talk(tokenizer, {0: ["north 1", "east 2", "done 3"]})
    (one,) = talk.made
    messages = [
        user("begin"),
        {"role": "assistant", "content": "north 1"},
        user("you get 1"),
        {"role": "assistant", "content": "east 2"},
        user("you get 2"),
        {"role": "assistant", "content": "done 3"},
    ]
    whole = tokenizer.encode(tokenizer.render(messages, False).rstrip("\n"))
    assert one.prompt is not None and one.action_mask is not None
    assert one.prompt.tolist() == prompt_ids(tokenizer, "begin")
    assert one.prompt.tolist() + one.tokens.tolist() == whole
    turns = np.split(one.tokens, np.flatnonzero(np.diff(one.action_mask)) + 1)[::2]
    assert [tokenizer.decode(t.tolist()) for t in turns] == ["north 1", "east 2", "done 3"]
    assert one.finish_reason == STOPPED
    assert one.messages[0] == {
        "role": "assistant",
        "content": "north 1",
        "reward": 1.0,
        "done": False,
    }
    assert one.messages[1] == user("you get 1")
    assert [m["reward"] for m in one.messages[::2]] == [1.0, 2.0, 3.0]
    assert [m["done"] for m in one.messages[::2]] == [False, False, True]
    assert talk.pool.ended == 1


def test_samples_have_their_own_prompts_and_share_those_that_are_alike(
    tokenizer: Tokenizer,
) -> None:
    texts = {4: ["done 1"], 5: ["done 1"], 6: ["done 1"], 7: ["up 1", "done 1"]}
    talk = Talk(tokenizer, texts, ["", "", "", "", "a", "b", "a", "b"])
    first, second = talk.writer.rounds
    assert [(r.prompt.tolist(), r.samples) for r in first] == [
        (prompt_ids(tokenizer, "a"), (4, 6)),
        (prompt_ids(tokenizer, "b"), (5, 7)),
    ]
    assert [request.samples for request in second] == [(7,)]
    rollout = collect(talk.made, 4, [0], first=4)
    assert [ids.tolist() for ids in rollout.prompt_ids] == [
        prompt_ids(tokenizer, word) for word in "abab"
    ]


def test_the_last_turn_allowed_and_a_turn_that_was_cut_are_stepped_too(
    tokenizer: Tokenizer,
) -> None:
    (one,) = Talk(tokenizer, {0: ["a 1", "b 2", "c 3"]}, max_turns=2).made
    assert one.finish_reason == MAX_TURNS
    assert [m.get("reward") for m in one.messages] == [1.0, None, 2.0]
    length = len(tokenizer.encode("a 1 2 3"))
    (one,) = Talk(tokenizer, {0: ["a 1 2 3"]}, max_tokens=length).made
    assert one.finish_reason == LENGTH and one.messages[-1]["reward"] == 3.0
    # No room for the answer and one more token.
    (one,) = Talk(tokenizer, {0: ["a 1", "b 2"]}, max_tokens=length + 1).made
    assert one.finish_reason == LENGTH and len(one.messages) == 1


def test_a_failure_ends_its_conversation_alone(tokenizer: Tokenizer) -> None:
    texts = {0: ["a 1", "fails"], 1: ["a 1", "done 2"], 2: ["x 7"], 3: ["x"]}
    talk = Talk(tokenizer, texts, ["a", "b", "fails", "word " * 200])
    step, fine, reset, long = talk.made
    assert [one.finish_reason for one in talk.made] == [FAILED, STOPPED, FAILED, FAILED]
    assert step.messages[-1]["failure"] == RAISED and step.messages[-1]["reward"] is None
    assert fine.messages[-1]["done"]
    # A token after the data set's prompt: every sample has one.
    assert reset.prompt is not None and reset.prompt.tolist() == DATA_PROMPT.tolist()
    assert len(reset.tokens) == len(long.tokens) == 1
    assert reset.messages[0]["error"] == "no such level"
    assert "tokens long and max_prompt_length is 100" in long.messages[0]["error"]
    assert [sorted(asked) for asked in talk.pool.asked] == [[0, 1, 2, 3], [0, 1], [0, 1]]
    figures = turn_metrics([one.messages for one in talk.made])
    assert figures == {
        "environment/turns": 6 / 4,
        "environment/turn_reward": 4 / 3,
        "environment/done_fraction": 1 / 4,
        "environment/failures": 3 / 4,
    }


class Alone:
    rank = 0

    def __init__(self) -> None:
        self.health = SimpleNamespace(counting=self._counting)

    def _counting(self, *arguments: Any) -> Any:
        from contextlib import nullcontext

        return nullcontext()

    @property
    def world(self) -> Alone:
        return self

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]


class Lengths:
    """A reward function: 10 for each letter of the last turn."""

    names = ("lengths",)

    def num_done(self) -> int:
        return 0

    def begin(self, *samples: Any) -> Callable[[], Scores]:
        return partial(self.score, *samples)

    def score(
        self,
        texts: list[str],
        answers: list[str],
        columns: Mapping[str, Any],
        as_messages: Mapping[str, Any],
    ) -> Scores:
        self.texts, self.columns, self.as_messages = texts, columns, as_messages
        values = np.array([10.0 * len(text) for text in texts])
        return Scores({"lengths": values}, values.astype(np.float32), values < 0)


def test_rewards_are_the_sum_of_the_turns_beside_those_of_functions(tokenizer: Tokenizer) -> None:
    texts = {0: ["a 1", "done 2"], 1: ["done 5"], 2: ["fails"], 3: ["a 1", "b 1", "done 1"]}
    rollout = collect(Talk(tokenizer, texts).made, 4, [0])
    prompts: list[Any] = [
        SimpleNamespace(ids=DATA_PROMPT, text="p", question="q", answer="", columns={})
    ] * 4
    functions = Lengths()
    scorer = RolloutScorer(functions, tokenizer, Alone(), 0.5, "messages")  # type: ignore[arg-type]
    scored = scorer.score(rollout, prompts)
    assert functions.as_messages["prompts"] == [[user("begin")]] * 4
    wrote = [{"role": "assistant", "content": text} for text in texts[0]]
    assert functions.as_messages["completions"][0] == [wrote[0], user("you get 1"), wrote[1]]
    environment = scored.scores.per_function["environment"]
    np.testing.assert_array_equal(environment, [3.0, 5.0, np.nan, 3.0])
    # What failed has the mean of its group's others.
    known = [60 + 1.5, 60 + 2.5, 60 + 1.5]
    np.testing.assert_allclose(
        scored.scores.total, [known[0], known[1], np.mean(known), known[2]], rtol=1e-6
    )
    assert scored.scores.errors["environment"] == 1
    assert "no such move" in scored.scores.messages["environment"]
    assert scored.turn_rewards is not None
    expected = [[0.5, 61.0], [62.5], [np.nan], [0.5, 0.5, 60.5]]
    for own, wanted in zip(scored.turn_rewards, expected, strict=True):
        np.testing.assert_allclose(own, wanted)
    assert functions.columns["prompts"] == [tokenizer.render([user("begin")])] * 4
    rows = list(scored.rows(rollout, prompts))
    assert rows[0]["prompt"] == tokenizer.render([user("begin")])
    assert rows[0]["rewards"] == {"lengths": 60.0, "environment": 3.0}
    assert [m.get("reward") for m in rows[0]["messages"]] == [1.0, None, 2.0]

    # Without a function the environment's rewards are all there are.
    class Nothing(Lengths):
        names = ()  # type: ignore[assignment]

        def score(self, texts: list[str], *_: Any) -> Scores:
            return Scores({}, np.zeros(len(texts), np.float32), np.zeros(len(texts), bool))

    alone = RolloutScorer(Nothing(), tokenizer, Alone(), 1.0)  # type: ignore[arg-type]
    np.testing.assert_allclose(alone.score(rollout, prompts).scores.total[[0, 1, 3]], [3, 5, 3])


def test_every_token_has_the_advantage_of_its_turn(tokenizer: Tokenizer) -> None:
    texts = {0: ["a 1", "done 2"], 1: ["done 0"]}
    rollout = collect(Talk(tokenizer, texts).made, 2, [0])
    rewards = turn_rewards(rollout.messages, 1.0, np.zeros(2), np.zeros(2, bool))
    totals = np.array([3.0, 0.0], np.float32)
    config = advantages_of(2, turn_advantages=True)
    batch, _ = compute_advantages(rollout, totals, config, turn_rewards=rewards)
    first, second = turn_advantages(rewards, 2, "group")
    assert batch.token_advantages is not None
    mask = rollout.action_mask[0]
    ends = np.flatnonzero(np.diff(mask.astype(int)))
    by_token = batch.token_advantages[0]
    np.testing.assert_array_equal(by_token[: ends[0] + 1], first[0])
    np.testing.assert_array_equal(by_token[ends[0] + 1 : ends[1] + 1], 0)
    np.testing.assert_array_equal(by_token[ends[1] + 1 :], first[1])
    np.testing.assert_array_equal(
        batch.token_advantages[1], np.full(rollout.completion_lengths[1], second[0])
    )
    np.testing.assert_allclose(batch.advantages[0], by_token[mask].mean(), rtol=1e-6)
    with pytest.raises(ValueError, match="advantages of turns need their rewards"):
        compute_advantages(rollout, totals, config)


def test_rewards_in_conversations_that_failed_are_not_known(tokenizer: Tokenizer) -> None:
    made = Talk(tokenizer, {0: ["a 1", "fails"], 1: ["done 2"]}).made
    result = rewards_in([one.messages for one in made])
    assert result.values == {1: 2.0} and result.failures == {0: CallFailure(RAISED, "no such move")}


ENVIRONMENT = """
class Game:
    def reset(self, row):
        if row["answer"] == "fail":
            raise KeyError("level")
        return [{"role": "user", "content": row["question"]}]

    def step(self, completion):
        return "no", 0.0, True
"""
REFUSED = {
    "tools": (
        {"environment": "game.py:Game", "tools": ["calculator"]},
        "either an environment answers a turn or tools do",
    ),
    "partial": (
        {
            "environment": "game.py:Game",
            "partial_rollout": True,
            "importance_sampling_correction": "token_truncate",
        },
        "partial_rollout does not go together with rl_config.environment",
    ),
    "nobody": ({"turn_advantages": True}, "only an environment rewards single turns"),
    "rloo": (
        {"environment": "g.py:G", "turn_advantages": True, "advantage_estimator": "rloo"},
        "which rl_config.advantage_estimator rloo does not do",
    ),
    "gspo": (
        {"environment": "g.py:G", "turn_advantages": True, "importance_sampling_level": "sequence"},
        "set importance_sampling_level to token or turn_advantages to false",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_keys_that_cannot_stand_together_are_refused(name: str) -> None:
    from pydantic import ValidationError

    from mindgrpo.config import Config

    keys, sentence = REFUSED[name]
    with pytest.raises(ValidationError) as refused:
        Config.model_validate({"rl_config": keys})
    assert sentence in str(refused.value)


def test_the_configuration_names_the_environment_and_its_weight(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    (tmp_path / "game.py").write_text(ENVIRONMENT)
    path = tmp_path / "config.yaml"
    path.write_text(
        f"rl_config: {{environment: '{tmp_path}/game.py:Game', turn_advantages: true}}\n"
        "reward_config: {environment_weight: 0.5}\n"
    )
    config = load_config(path, {}).config
    assert environment_weight(config) == 0.5
    turns = read_turns(config, tokenizer)
    assert turns is not None and turns.schemas == ()
    assert config.longest_context > config.generate_config.max_prompt_length
    with pytest.raises(UserError, match="cannot go on after an answer, as conversations do"):
        read_turns(config, load_tokenizer(MODEL).with_template("base_r1"))


def test_a_reset_that_fails_is_told_before_the_first_step(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    (tmp_path / "game.py").write_text(ENVIRONMENT)
    path = tmp_path / "config.yaml"
    path.write_text(f"rl_config: {{environment: '{tmp_path}/game.py:Game'}}\n")
    turns: Any = read_turns(load_config(path, {}).config, tokenizer)

    def prompts(answer: str) -> Any:
        row = {"question": "play", "answer": answer}
        return [SimpleNamespace(row=row, index=0, example=SimpleNamespace(where="a.jsonl line 1"))]

    turns.check(prompts("fine"))
    with pytest.raises(UserError, match="reset fails on the row of a.jsonl line 1: KeyError: 'lev"):
        turns.check(prompts("fail"))


def test_a_prompt_of_a_reset_that_is_too_long_is_met_with_the_limit_to_raise(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    (tmp_path / "game.py").write_text(ENVIRONMENT)
    path = tmp_path / "config.yaml"
    path.write_text(f"rl_config: {{environment: '{tmp_path}/game.py:Game'}}\n")
    row = {"question": "play", "answer": "fine"}
    prompts: Any = [
        SimpleNamespace(row=row, index=0, example=SimpleNamespace(where="a.jsonl line 1"))
    ]
    short = "--generate_config.max_prompt_length=1"
    turns: Any = read_turns(load_config(path, [short]).config, tokenizer)
    with pytest.raises(UserError) as refused:
        turns.check(prompts)
    assert "tokens long and max_prompt_length is 1; raise" in str(refused.value)
    assert "raise generate_config.max_prompt_length" in str(refused.value)
    assert "correct the class" not in str(refused.value)


def test_max_tokens_without_room_for_a_second_turn_is_told_before_the_first_step(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    (tmp_path / "game.py").write_text(ENVIRONMENT.replace("0.0, True", "0.0, False"))
    (tmp_path / "once.py").write_text(ENVIRONMENT)
    path = tmp_path / "config.yaml"
    path.write_text("")
    row = {"question": "play", "answer": "fine"}
    prompts: Any = [
        SimpleNamespace(row=row, index=0, example=SimpleNamespace(where="a.jsonl line 1"))
    ]

    def notes(most: int, file: str = "game.py", *words: str) -> list[str]:
        words = (
            *(f"--rl_config.environment={tmp_path}/{file}:Game", *words),
            f"--generate_config.sampling_config.max_tokens={most}",
        )
        config = load_config(path, words).config
        turns: Any = read_turns(config, tokenizer)
        return turn_notes(config, turns.check(prompts))

    turn = len(tokenizer.encode("fine")) + 1
    config = load_config(path, [f"--rl_config.environment={tmp_path}/game.py:Game"]).config
    turns: Any = read_turns(config, tokenizer)
    two = turns.check(prompts).two_turns
    assert two == 2 * turn + len(turns.suffix.ids([{"role": "user", "content": "no"}]))
    (note,) = notes(two - 1)
    assert f"max_tokens is {two - 1}" in note and f"take {two} tokens" in note
    assert notes(two) == notes(1, "once.py") == notes(1, "game.py", "--rl_config.max_turns=1") == []
