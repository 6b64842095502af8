"""Conversations of several turns, with an engine that is told what to write: tokens, masks, budgets, limits.

Does not prove that engines draw right after context: test_distributed.py compares their log-probs with the trainer's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_sets import MODEL

from mindgrpo.algorithm.sample import LENGTH, MAX_TURNS, STOPPED, Request, Sample, collect
from mindgrpo.data.chat_template import ChatTemplate, shipped_names
from mindgrpo.data.tokenizer import MAX_ID, Tokenizer, load_tokenizer
from mindgrpo.data.turns import TurnSuffix
from mindgrpo.errors import UserError
from mindgrpo.rollout.conversations import UNREADABLE, Conversations, Unanswered, run_together
from mindgrpo.rollout.noise import sample_keys
from mindgrpo.rollout.tools import ToolTurns, tool_metrics
from mindgrpo.tools.calls import ToolCall, parse_hermes
from mindgrpo.tools.pool import ToolAnswer, load_tools
from mindgrpo.workers.protocol import BAD_RESULT

VERSION = 3
SCHEMAS = [tool.schema() for tool in load_tools(["calculator"])]
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "1+1"}}</tool_call>'


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(MODEL).with_template("qwen_tools")


class Echo:
    """Answers every call with how many it has had."""

    def __init__(self, text: str = "answer") -> None:
        self.calls: list[ToolCall] = []
        self._text = text

    def ask(
        self, turns: Mapping[int, Sequence[ToolCall]], patience: float
    ) -> dict[int, list[ToolAnswer]]:
        self.calls += [call for calls in turns.values() for call in calls]
        answer = ToolAnswer(f"{self._text} {len(self.calls)}")
        return {sample: [answer] * len(calls) for sample, calls in turns.items()}

    def end_all(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing was started."""


class Writer:
    """An engine that writes the next of each sample's texts, each with the token that ends a turn if `ends`."""

    def __init__(self, tokenizer: Tokenizer, texts: Mapping[int, Sequence[str]]) -> None:
        self._tokenizer, self._texts = tokenizer, {i: list(own) for i, own in texts.items()}
        self.rounds: list[list[Request]] = []

    def generate(self, requests: Sequence[Request]) -> list[Sample]:
        assert {request.turn for request in requests} <= {len(self.rounds)}
        self.rounds.append(list(requests))
        completions = []
        for request in requests:
            for sample, limit in zip(
                request.samples, request.max_tokens or (10**6,) * 99, strict=False
            ):
                ids = self._tokenizer.encode(self._texts[sample].pop(0) + "<|im_end|>")
                reason = STOPPED if len(ids) <= limit else LENGTH
                tokens = np.array(ids[:limit], np.int32)
                logps = -np.ones(len(tokens), np.float32) - request.turn
                completions.append(
                    Sample.drawn(sample, request.prompt, tokens, reason, VERSION, logps=logps)
                )
        return completions


Run = Callable[..., tuple[list[Sample], Writer, Echo]]


@pytest.fixture
def run(tokenizer: Tokenizer) -> Run:
    def run_texts(
        texts: Mapping[int, Sequence[str]],
        max_turns: int = 8,
        max_tool_calls: int | None = None,
        max_tokens: int = 10**6,
        answer: str = "answer",
        num_known: int = MAX_ID + 1,
    ) -> tuple[list[Sample], Writer, Echo]:
        pool, writer = Echo(answer), Writer(tokenizer, texts)
        suffix = TurnSuffix(replace(tokenizer, num_known=num_known), SCHEMAS)
        responder = ToolTurns(parse_hermes, pool, max_tool_calls)
        conversations = Conversations(tokenizer, suffix, responder, max_turns)
        requests = [Request(np.array([5, 6], np.int32), tuple(texts), (max_tokens,) * len(texts))]
        made = conversations.run(requests, max_tokens, writer.generate)
        return made, writer, pool

    return run_texts


def test_a_conversation_is_what_the_template_makes_of_it_whole(
    run: Run, tokenizer: Tokenizer
) -> None:
    (one,), writer, _ = run({0: [CALL, f"again {CALL}{CALL}", "it is 2"]})
    question = {"role": "user", "content": "x"}
    before = tokenizer.encode(tokenizer.render([question], tools=SCHEMAS))
    tool = {"role": "tool", "name": "calculator"}
    messages = [
        question,
        {"role": "assistant", "content": CALL},
        {**tool, "content": "answer 1"},
        {"role": "assistant", "content": f"again {CALL}{CALL}"},
        {**tool, "content": "answer 3"},
        {**tool, "content": "answer 3"},
        {"role": "assistant", "content": "it is 2"},
    ]
    whole = tokenizer.encode(tokenizer.render(messages, False, tools=SCHEMAS).rstrip("\n"))
    assert before + one.tokens.tolist() == whole
    assert one.action_mask is not None and one.finish_reason == STOPPED
    turns = np.split(one.tokens, np.flatnonzero(np.diff(one.action_mask)) + 1)[::2]
    assert [tokenizer.decode(t.tolist()) for t in turns] == [CALL, f"again {CALL}{CALL}", "it is 2"]
    np.testing.assert_array_equal(one.logps[~one.action_mask], 0)
    assert set(one.logps[one.action_mask]) == {-1.0, -2.0, -3.0}
    # What the engine goes on from is what stands there so far, to the token.
    for round_, upto in zip(
        writer.rounds[1:], np.flatnonzero(np.diff(one.action_mask))[1::2] + 1, strict=True
    ):
        np.testing.assert_array_equal(round_[0].prompt, [5, 6, *one.tokens[:upto]])


def test_samples_go_on_by_themselves_and_come_back_in_order(run: Run) -> None:
    made, writer, pool = run({4: ["done"], 5: [CALL, "two"], 6: ["done"], 7: [CALL, CALL, "three"]})
    assert [one.number for one in made] == [4, 5, 6, 7]
    assert [[r.samples for r in round_] for round_ in writer.rounds] == [
        [(4, 5, 6, 7)],
        [(5,), (7,)],
        [(7,)],
    ]
    assert [len(one.messages) for one in made] == [1, 3, 1, 5]
    assert len(pool.calls) == 3
    rollout = collect(made, 4, [0], first=4)
    assert [m.all() for m in rollout.action_mask] == [True, False, True, False]
    figures = tool_metrics(rollout.messages, ["calculator"])
    assert figures["tools/turns"] == 7 / 4 and figures["tools/calls"] == 3 / 4
    assert figures["tools/called_fraction"] == 1 / 2
    assert figures["tools/calculator/failures"] == figures["tools/unknown"] == 0


def test_turns_and_calls_are_limited(run: Run) -> None:
    (one,), _, pool = run({0: [CALL] * 9}, max_turns=3)
    assert one.finish_reason == MAX_TURNS and len(pool.calls) == 2
    assert [m["role"] for m in one.messages] == [
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]
    (one,), _, pool = run({0: [CALL + CALL, CALL, "so"]}, max_tool_calls=1)
    assert one.finish_reason == STOPPED
    assert [call.error for call in pool.calls] == [None, *["no more than 1 calls are allowed"] * 2]


@pytest.mark.parametrize("spare", [-1, 0, 1])
def test_the_budget_is_of_all_turns_and_context(run: Run, spare: int) -> None:
    (whole,), _, _ = run({0: [CALL, "so it is"]})
    assert whole.action_mask is not None
    (start,) = np.flatnonzero(np.diff(whole.action_mask.astype(int)) > 0) + 1
    (one,), _, _ = run({0: [CALL, "so it is"]}, max_tokens=int(start) + spare)
    assert one.finish_reason == LENGTH
    assert one.action_mask is not None
    if spare < 1:
        # No room for a token after the context: the context is not there either.
        assert one.action_mask.all() and len(one.messages) == 1
    else:
        assert len(one.tokens) == start + 1 and one.action_mask[-1]
        np.testing.assert_array_equal(one.tokens, whole.tokens[: start + 1])


def test_an_answer_that_the_model_cannot_read_is_an_error_that_it_can(
    run: Run, tokenizer: Tokenizer
) -> None:
    odd = max(tokenizer.codec.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1])
    (one,), _, _ = run({0: [CALL, "so"]}, answer=odd[0], num_known=odd[1])
    assert one.finish_reason == STOPPED and [m["role"] for m in one.messages][1:] == [
        "tool",
        "assistant",
    ]
    assert (one.messages[1]["failure"], one.messages[1]["content"]) == (BAD_RESULT, UNREADABLE)
    assert UNREADABLE in tokenizer.decode(one.tokens.tolist())


def test_a_turn_that_was_cut_calls_nothing(run: Run, tokenizer: Tokenizer) -> None:
    length = len(tokenizer.encode(CALL))
    (one,), _, pool = run({0: [CALL]}, max_tokens=length)
    assert one.finish_reason == LENGTH and not pool.calls


def test_what_the_pool_raises_reaches_every_rank() -> None:
    class Broken(Echo):
        def ask(self, *_: Any) -> dict[int, list[ToolAnswer]]:
            raise OSError("no process")

    def gather(own: Any) -> list[Any]:
        return [own, {}] if isinstance(own, dict) else [own, None]

    with pytest.raises(RuntimeError, match="the turns could not be answered: OSError: no process"):
        responder = ToolTurns(parse_hermes, Broken())
        run_together({0: [ToolCall("f")]}, responder, gather, Unanswered())


def test_every_turn_has_noise_of_its_own_and_a_first_turn_that_of_single_ones() -> None:
    keys = [sample_keys(3, 0, 4, range(8), turn) for turn in range(3)]
    np.testing.assert_array_equal(keys[0], sample_keys(3, 0, 4, range(8)))
    assert len(np.unique(np.concatenate(keys))) == 24


@pytest.mark.parametrize("name", [n for n in shipped_names() if n.startswith("qwen")])
def test_suffixes_of_templates_that_can_be_extended(name: str) -> None:
    tokenizer = load_tokenizer(MODEL).with_template(name)
    suffix = TurnSuffix(tokenizer)
    messages = [{"role": "user", "content": "and then?"}]
    history = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    whole = tokenizer.encode(tokenizer.render([*history, *messages]))
    assert tokenizer.decode([suffix.end_id], False) == "<|im_end|>"
    assert whole[-len(suffix.ids(messages)) - 1 :] == [suffix.end_id, *suffix.ids(messages)]


BEFORE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + m.content + '<|im_end|>' }}{% endfor %}"
)
REFUSED = {
    "it shows no tools": BEFORE,
    "does not end with one of": "{{ tools }}{% for m in messages %}{{ m.content }};{% endfor %}",
    "does not write an assistant's content": "{{ tools }}{{ messages[0].content }}",
    "does not write messages of the role tool": "{{ tools }}"
    + BEFORE.replace("{{", "{% if m.role != 'tool' %}{{").replace("}}", "}}{% endif %}"),
    "renders a question otherwise": "{{ tools }}{{ messages | length }}" + BEFORE,
}


@pytest.mark.parametrize("why", REFUSED)
def test_templates_that_cannot_be_extended_are_refused(tokenizer: Tokenizer, why: str) -> None:
    from dataclasses import replace

    other = replace(tokenizer, template=ChatTemplate(REFUSED[why], "the template of a test"))
    with pytest.raises(UserError, match="the template of a test cannot go on .*" + why):
        TurnSuffix(other, SCHEMAS)


def test_tools_are_checked_before_a_run(tmp_path: Path) -> None:
    from mindgrpo.config import load_config
    from mindgrpo.rollout.tools import read_toolbox

    path = tmp_path / "config.yaml"
    path.write_text("rl_config: {tools: [calculator]}\n")
    plain = load_tokenizer(MODEL)
    with pytest.raises(UserError, match="it shows no tools; set rl_config.chat_template"):
        read_toolbox(load_config(path, {}).config, plain)
    toolbox = read_toolbox(load_config(path, {}).config, plain.with_template("qwen_tools"))
    assert toolbox is not None and toolbox.names == ("calculator",)
    assert toolbox.parser is parse_hermes
