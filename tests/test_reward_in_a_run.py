"""How a run scores: from the configuration's keys to the figures of a step, on rank 0 and told to the others.

The ranks are stand-ins here, but for runs of one rank. Does NOT prove a run of several; the distributed tests do.
"""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_runs import ONE_GRAPH, make_inputs, run
from tables import each_row

from mindgrpo.algorithm.sample import Rollout
from mindgrpo.backend.rank_consistency import on_first_rank
from mindgrpo.config import load_config
from mindgrpo.errors import UserError
from mindgrpo.grpo.inputs import Inputs
from mindgrpo.grpo.scoring import CompletionForm, RolloutScorer
from mindgrpo.health.rank_health import RankHealth
from mindgrpo.monitor.metrics import MetricsWriter, read_metrics
from mindgrpo.rewards.executors import Limits
from mindgrpo.rewards.messages import completion_messages
from mindgrpo.rewards.score import Scorer
from mindgrpo.rewards.scores import Report, Scores
from mindgrpo.run.guards import RewardGuard
from mindgrpo.run.preflight import prepare

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "grpo" / "tiny_arithmetic" / "grpo_config.yaml"

PLAIN = (*ONE_GRAPH, "--rl_config.dynamic_sampling=false", "--rl_config.eval_on_start=false")
GREEDY = ("--generate_config.sampling_config.temperature", "0")
REWARD = """
def fragile(completions, completion_lengths, finish_reasons, prompts, completion_ids, max_completion_length):
    assert [len(ids) for ids in completion_ids] == completion_lengths
    assert all(prompts) and max_completion_length > 5
    return [1.0 / (length != 3) for length in completion_lengths]
"""


class Rank:
    """One of two; `told` is what rank 0 said."""

    def __init__(self, rank: int, told: Any = None) -> None:
        self.rank, self.world, self.told = rank, self, told
        self.health = RankHealth(rank, 2, None)

    def gather_objects(self, value: Any) -> list[Any]:
        return [value if self.rank == 0 else self.told, None]


def inputs_with(rewards: list[Any], monkeypatch: pytest.MonkeyPatch, *words: str) -> Inputs:
    monkeypatch.chdir(ROOT)
    return prepare(load_config(EXAMPLE, words).config, None, rewards)


def rollout_of(lengths: list[int]) -> Rollout:
    tokens = [np.arange(5, 5 + n, dtype=np.int32) for n in lengths]
    logps = [np.zeros(n, np.float32) for n in lengths]
    prompts, reasons = [tokens[0]] * len(lengths), ["stop"] * len(lengths)
    return Rollout.single_turn(prompts, tokens, reasons, logps, [0, 0, 0, 1])


def test_a_failed_sample_is_counted_and_gets_its_groups_mean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(REWARD)
    inputs = inputs_with([f"{tmp_path}/mine.py:fragile", "format_reward"], monkeypatch)
    assert inputs.scorer is not None
    try:
        inputs.check_rewards()
        owners = [inputs.prompts[0]] * 4
        scorer = RolloutScorer(inputs.scorer, inputs.tokenizer, Rank(0))  # type: ignore[arg-type]
        scored = scorer.score(rollout_of([2, 3, 4, 5]), owners)
    finally:
        inputs.scorer.close()
    assert scored.scores.total.tolist() == [1.0, 1.0, 1.0, 1.0]
    with closing(MetricsWriter(tmp_path, None)) as metrics:
        metrics.write(1, scored.scores.metrics())
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    kinds = ("errors", "exceptions", "timeouts", "exits", "memory", "nan", "bad_results", "none")
    assert [row[f"reward/fragile/{kind}"] for kind in kinds] == [1, 1, 0, 0, 0, 0, 0, 0]
    assert (row["reward/fragile/mean"], row["reward/format_reward/errors"]) == (1.0, 0)
    elsewhere = RolloutScorer(None, inputs.tokenizer, Rank(1, (scored.scores, None)))  # type: ignore[arg-type]
    other = elsewhere.score(rollout_of([2, 3, 4, 5]), owners)
    assert other.scores.total.tolist() == scored.scores.total.tolist()


class Recorder:
    """A reward that keeps what it was given, as TRL's functions are called: by name."""

    __name__ = "recorder"

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}

    def __call__(self, prompts: Any, completions: Any, **columns: Any) -> list[float]:
        self.given = {"prompts": prompts, "completions": completions, **columns}
        return [1.0] * len(completions)


SYSTEM = {"role": "system", "content": "Add."}
WORKED = "Four more. #### 7"


def as_rows(folder: Path, key: str, is_conversation: bool) -> Path:
    texts = ["3 + 4", "5 + 6"]
    asked = [[SYSTEM, {"role": "user", "content": t}] if is_conversation else t for t in texts]
    rows = [{key: each, "answer": WORKED, "level": 1} for each in asked]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder / "rows.jsonl"


def given_to(
    folder: Path, key: str, is_conversation: bool, form: CompletionForm, *words: str
) -> tuple[dict[str, Any], Inputs, str]:
    """What a function of the user's gets in a step, what the run has read, and what is rendered."""
    recorder = Recorder()
    words = ("--dataset_file", str(as_rows(folder, key, is_conversation)), *words)
    config = load_config(EXAMPLE, [*words, "--rl_config.eval_dataset_file", "null"]).config
    inputs = prepare(config, None, [recorder], form=form)
    assert inputs.scorer is not None
    try:
        inputs.check_rewards()
        rollout = rollout_of([2, 3, 4, 5])
        scorer = RolloutScorer(inputs.scorer, inputs.tokenizer, Rank(0), form=inputs.form)  # type: ignore[arg-type]
        scorer.score(rollout, [inputs.prompts[0]] * 4)
    finally:
        inputs.scorer.close()
    return recorder.given, inputs, inputs.tokenizer.decode(rollout.completion_ids[0].tolist())


@each_row(
    "key, is_conversation, form, words, gets_messages",
    [
        ("prompt", True, "as_prompts", (), True),
        ("messages", True, "as_prompts", (), True),
        ("prompt", False, "as_prompts", (), False),
        ("prompt", True, "as_prompts", ("--reward_config.completions", "text"), False),
        ("prompt", True, "text", (), False),
        ("prompt", True, "text", ("--reward_config.completions", "messages"), True),
        ("question", False, "text", ("--reward_config.completions", "messages"), True),
    ],
)
def test_functions_get_messages_where_trl_passes_them_or_the_key_says_so(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    key: str,
    is_conversation: bool,
    form: CompletionForm,
    words: tuple[str, ...],
    gets_messages: bool,
) -> None:
    monkeypatch.chdir(ROOT)
    folder = tmp_path_factory.mktemp("rows")
    given, inputs, text = given_to(folder, key, is_conversation, form, *words)
    user = {"role": "user", "content": "3 + 4"}
    if gets_messages:
        assert given["completions"][0] == [{"role": "assistant", "content": text}]
        assert given["prompts"][0] == ([SYSTEM, user] if is_conversation else [user])
    else:
        assert given["completions"][0] == text and given["prompts"][0] == inputs.prompts[0].text
    assert given["level"] == [1] * 4 and given["answers"] == ["7"] * 4
    # TRL passes the column as it is.
    assert given.get("answer") == ([WORKED] * 4 if form == "as_prompts" else None)
    is_said = any("completions as lists of messages" in note for note in inputs.notes)
    assert is_said is (gets_messages and form == "as_prompts")


def test_a_conversation_is_passed_as_trl_passes_tool_calls_and_answers() -> None:
    called = {"name": "double", "arguments": {"number": 2}}
    written = 'Let me see.\n<tool_call>{"name": "double", "arguments": {"number": 2}}</tool_call>'
    conversation = (
        {"role": "assistant", "content": written, "tool_calls": [called], "reward": 0.5},
        {"role": "tool", "name": "double", "content": "4", "failure": None},
        {"role": "assistant", "content": "4", "reward": 1.0, "done": True, "environment": "e"},
    )
    assert completion_messages("4", conversation) == [
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [{"type": "function", "function": called}],
        },
        {"role": "tool", "name": "double", "content": "4"},
        {"role": "assistant", "content": "4"},
    ]
    whole = {"role": "assistant", "content": ' {"name": "f"}', "tool_calls": [called]}
    assert completion_messages("", (whole,))[0]["content"] == ""
    assert completion_messages("4", ()) == [{"role": "assistant", "content": "4"}]


def test_the_keys_of_reward_config_reach_the_scorer(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--reward_config.deadline", "3", "--reward_config.memory", "512MB"]
    words += ["--reward_config.workers", "2", "--reward_config.together_deadline", "1.5"]
    words += [
        "--verifier_function",
        "format_reward,cosine_reward(max_value_wrong=0, min_value_wrong=-0.5)",
    ]
    monkeypatch.chdir(ROOT)
    inputs = prepare(load_config(EXAMPLE, words).config, None)
    assert inputs.scorer is not None
    assert inputs.scorer.limits == Limits(3.0, 1.5, 512 << 20, 2)
    assert inputs.scorer.names == ["format_reward", "cosine_reward"]
    assert inputs.scorer.facts["max_completion_length"] > 0
    inputs.check_rewards()
    inputs.scorer.close()


def test_only_rank_0_loads_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config(EXAMPLE, ["--verifier_function", "missing.py:one,missing.py:two"]).config
    inputs = prepare(config, None, scores=False)
    assert inputs.scorer is None
    inputs.check_rewards()


def test_what_rank_0_finds_wrong_is_every_ranks_error() -> None:
    def check() -> None:
        raise UserError("no such column")

    for rank in (Rank(0), Rank(1, (None, UserError("no such column")))):
        with pytest.raises(UserError, match="no such column"):
            on_first_rank(rank, check)  # type: ignore[arg-type]


def test_a_failure_of_scoring_itself_is_told_to_every_rank() -> None:
    class Broken(Scorer):
        def __init__(self) -> None:
            self.names = []

        def begin(self, *_: Any) -> Any:
            raise OSError("no more processes")

    class Words:
        def decode(self, ids: list[int]) -> str:
            return json.dumps(ids)

    with pytest.raises(RuntimeError, match="rank 0: OSError: no more processes"):
        RolloutScorer(Broken(), Words(), Rank(0)).score(rollout_of([1, 1, 1, 1]), [])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("deadline", "0", "must be above 0"),
        ("memory", "lots", "a size above 0"),
        ("workers", "0", "must be at least 1"),
    ],
)
def test_impossible_limits_are_refused(key: str, value: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_config(EXAMPLE, [f"--reward_config.{key}", value])


def scores_of(values: list[float], errors: int) -> Scores:
    report = Report({"errors": errors}, "4 raised: ZeroDivisionError" if errors else "")
    array = np.array(values)
    failed = np.isnan(array) & (errors > 0)
    return Scores({"f": array}, np.nan_to_num(array), failed, {"f": report})


def test_a_function_that_fails_on_all_samples_of_steps_in_a_row_ends_the_run_with_its_name() -> (
    None
):
    dead, alive = scores_of([np.nan] * 4, 4), scores_of([np.nan, 1.0, 0.0, 1.0], 1)
    guard = RewardGuard(2)
    guard.step_done(1, dead)
    guard.step_done(2, alive)
    guard.step_done(3, dead)
    with pytest.raises(
        UserError, match="function f failed on all samples of 2 steps.*step 4.*ZeroDi"
    ):
        guard.step_done(4, dead)
    unlimited = RewardGuard(None)
    for step in range(9):
        unlimited.step_done(step, dead)


def test_a_function_that_applies_to_no_sample_has_not_failed() -> None:
    guard = RewardGuard(1)
    guard.step_done(1, scores_of([np.nan] * 4, 0))


def test_steps_count_in_which_no_sample_has_a_reward_whichever_functions_fail_on_it() -> None:
    """The samples of each function's failures are others, and together they are all."""
    halves = [scores_of([np.nan, np.nan, 1.0, 1.0], 2), scores_of([1.0, 1.0, np.nan, np.nan], 2)]
    one, other = halves
    reports = {"f": one.reports["f"], "g": other.reports["f"]}
    functions = {"f": one.per_function["f"], "g": other.per_function["f"]}
    guard = RewardGuard(1)
    with pytest.raises(UserError, match="function f, g failed on all samples of 1 steps in a row"):
        guard.step_done(1, Scores(functions, one.total, one.failed | other.failed, reports))


def away(completions: list[str]) -> list[float]:
    """Works on the two samples that every function is tried with, and never again."""
    if len(completions) != 2:
        raise ValueError("the judge is away")
    return [0.5, 0.5]


@pytest.mark.parametrize("most", ["5", "null"])
def test_a_run_of_nothing_but_failures_is_an_error_however_short_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], most: str
) -> None:
    make_inputs(tmp_path)
    words = ["--rl_config.max_steps", "2", "--rl_config.eval_steps", "0", *PLAIN]
    words += ["--reward_config.max_failed_steps", most]
    with pytest.raises(UserError, match="away failed on all samples of the run's 2 steps.*is away"):
        run(tmp_path, tmp_path / "run", *words, reward=away)
    (row,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert row["reward/mean"] is None and row["reward/std"] is None
    said = capsys.readouterr().out
    assert "step 1/2  reward -  away -" in said and "done" not in said


def of_some(completions: list[str], answers: list[str]) -> list[float]:
    """Fails on every completion of a prompt with an odd answer."""
    if any(int(answer) % 2 for answer in answers):
        raise ValueError("no odd ones")
    return [10.0 + len(text) for text in completions]


def test_what_failed_has_no_part_in_the_mean_reward(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    lines = [{"question": f"{i} + 0", "answer": str(i)} for i in (2, 4, 5, 6, 7, 8, 9)]
    (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    folder = run(tmp_path, tmp_path / "run", *PLAIN, "--rl_config.eval_steps", "0", reward=of_some)
    samples = [json.loads(line) for line in (folder / "completions.jsonl").open()]
    rows = read_metrics(folder / "metrics.jsonl")
    assert any(0 < row["reward/of_some/errors"] < 12 for row in rows)
    for row in rows:
        own = [s for s in samples if s["step"] == row["step"]]
        rewards = [s["rewards"]["of_some"] for s in own]
        known = [reward for reward in rewards if reward is not None]
        assert len(known) == len(own) - row["reward/of_some/errors"]
        found = row["reward/mean"], row["reward/std"]
        if known:
            assert found == pytest.approx((np.mean(known), np.std(known)), rel=1e-6)
        else:
            assert found == (None, None)
        assert all(s["advantage"] == 0 for s in own if s["rewards"]["of_some"] is None)


def test_training_at_temperature_0_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UserError, match="temperature is 0.*8. times, so every advantage would be 0"
    ):
        inputs_with([lambda completions: [1.0] * len(completions)], monkeypatch, *GREEDY)
