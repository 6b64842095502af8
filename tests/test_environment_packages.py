"""Environments of other packages, with the packages themselves: what they ask and reward, and runs on seeds."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import pytest
from openenv_server import SERVER_FAILURES, served
from small_runs import ONE_GRAPH, completions, make_inputs, model_bits, rows, run

from mindgrpo.checkpoint.folders import folder_of
from mindgrpo.cli.verbs import main
from mindgrpo.config import load_config
from mindgrpo.data.chat_template import render_chat
from mindgrpo.environments.contract import Observation, Opening, load_environment
from mindgrpo.environments.mixture import Mixture
from mindgrpo.environments.packages import PACKAGES
from mindgrpo.environments.pool import EnvironmentPool
from mindgrpo.errors import UserError
from mindgrpo.workers.protocol import TIMEOUT, CallFailure, CallLimits

SUM = "reasoning_gym:chain_sum(min_terms=2, max_terms=2)"
GEM, TEXTARENA = "gem:game:GuessTheNumber-v0-easy", "textarena:GuessTheNumber-v0"
OPENENV = "openenv"
ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = f"{ROOT}/examples/grpo/guess_number/game.py:ShortGuess"
STEPS = 3
WORDS = (
    *ONE_GRAPH,
    *("--rl_config.dataset_file", "null", "--rl_config.eval_dataset_file", "null"),
    *("--rl_config.max_steps", str(STEPS), "--rl_config.max_turns", "2"),
    *("--rl_config.seq_length", "1024", "--generate_config.max_prompt_length", "960"),
    *("--rl_config.dynamic_sampling", "false", "--reward_config.environment_weight", "2.0"),
    *("--rl_config.save_ckpt_interval", "1", "--rl_config.save_max_ckpt_num", "null"),
)


def length(completions: Sequence[str]) -> list[float]:
    """A reward beside the environment's, which a model that has learned nothing never gets."""
    return [float(len(text)) for text in completions]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with served() as address:
        yield f"openenv:{address}"


@pytest.fixture
def pool(request: pytest.FixtureRequest) -> Iterator[EnvironmentPool]:
    text = request.getfixturevalue("server") if request.param == OPENENV else request.param
    made = EnvironmentPool(Mixture.read([text]), CallLimits(60.0, 4 << 30))
    yield made
    made.close()


def asked(pool: EnvironmentPool, sample: int, question: Opening | str) -> Observation:
    answer = pool.ask({sample: question})[sample]
    assert isinstance(answer, Observation), answer
    return answer


def question_of(pool: EnvironmentPool, sample: int, opening: Opening) -> str:
    return asked(pool, sample, opening).messages[-1]["content"]


@pytest.mark.parametrize("pool", [SUM, TEXTARENA, GEM, OPENENV], indirect=True)
def test_examples_are_those_of_their_seeds(pool: EnvironmentPool) -> None:
    seeded = [
        Opening({"seed": 3}, "a"),
        Opening({"seed": 3}, "b"),
        Opening({}, "c"),
        Opening({}, "c"),
    ]
    first, again, drawn, drawn_again = (
        question_of(pool, sample, opening) for sample, opening in enumerate(seeded)
    )
    assert first == again and drawn == drawn_again
    others = {question_of(pool, 10 + seed, Opening({"seed": seed}, "a")) for seed in range(6)}
    # The rules of a game are the same for each number.
    assert len(others) >= 5 or "game" in first.lower()


@pytest.mark.parametrize("pool", [SUM], indirect=True)
def test_a_right_answer_is_rewarded_with_and_without_tags(pool: EnvironmentPool) -> None:
    for sample, form in enumerate(("{}", "So:\n<answer>{}</answer>", "{}0")):
        question = question_of(pool, sample, Opening({"seed": sample}, ""))
        terms = re.search(r"(\d+) ([+-]) (\d+) =", question)
        assert terms is not None, question
        left, sign, right = terms.groups()
        total = int(left) + int(sign + right)
        answer = asked(pool, sample, form.format(total))
        assert answer.is_done and answer.messages == ()
        assert (answer.reward == 1.0) == (form != "{}0"), question


@pytest.mark.parametrize(
    ("pool", "form", "most"),
    [
        (GEM, "\\boxed{{{}}}", 10),
        (TEXTARENA, "[{}]", 20),
        (OPENENV, "{}", 10),
        (EXAMPLE, "<think>{}", 7),
    ],
    indirect=["pool"],
)
def test_a_game_is_won_by_halving(pool: EnvironmentPool, form: str, most: int) -> None:
    low, high = 1, most
    asked(pool, 0, Opening({"seed": 5}, ""))
    for _ in range(6):
        guess = (low + high) // 2
        answer = asked(pool, 0, form.format(guess))
        if answer.is_done:
            break
        (message,) = answer.messages
        assert re.search(rf"{guess}|target number|^(higher|lower)$", message["content"])
        low, high = (guess + 1, high) if "higher" in message["content"] else (low, guess - 1)
    assert answer.is_done and answer.reward == 1.0


@pytest.mark.parametrize("text", [f"{SUM}, 1.5 * {GEM}", TEXTARENA, OPENENV])
def test_a_run_on_seeds_that_is_resumed_is_the_one_that_never_ended(
    text: str, tmp_path: Path, server: str
) -> None:
    make_inputs(tmp_path)
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 1024}))
    words = (*WORDS, "--rl_config.environment", server if text == OPENENV else text)
    whole, again = run(tmp_path, tmp_path / "run", *words, reward=length), tmp_path / "again"
    if text == SUM:
        import reasoning_gym

        sums = reasoning_gym.create_dataset("chain_sum", seed=0, min_terms=2, max_terms=2)
        held_out = [json.loads(line) for line in (whole / "eval_completions.jsonl").open()]
        for number in range(3):
            question = sums[10_000 + number]["question"]
            assert any(question in row["prompt"] for row in held_out)
        assert not {row["prompt"] for row in held_out} & {
            json.loads(line)["prompt"] for line in completions(whole)
        }
    if "*" in text:
        assert_rewards_are_by_environment(whole)
    shutil.copytree(whole, again)
    for step in (2, 3):
        shutil.rmtree(folder_of(again, step))
    run(tmp_path, again, "--resume_training", *words, reward=length)
    assert completions(again) == completions(whole)
    assert rows(again) == rows(whole)
    assert model_bits(again) == model_bits(whole)


def assert_rewards_are_by_environment(whole: Path) -> None:
    met, seen = Mixture.read([SUM, f"1.5 * {GEM}"]), set()
    by_step: dict[int, list[dict[str, Any]]] = {}
    for line in completions(whole):
        by_step.setdefault(json.loads(line)["step"], []).append(json.loads(line))
    for row in rows(whole):
        by_name: dict[str, list[float]] = {}
        for sample in by_step[row["step"]]:
            (name,) = {turn["environment"] for turn in sample["messages"] if "reward" in turn}
            assert ("game" in sample["prompt"]) == (name == met.names[1])
            by_name.setdefault(name, []).append(sample["rewards"]["environment"])
        for name, own in by_name.items():
            mean = sum(own) / len(own)
            assert row[f"environment/{name}/reward"] == pytest.approx(mean, abs=1e-6)
        seen |= by_name.keys()
    assert seen == {*met.names}


def test_rows_meet_environments_by_weight_by_column_and_always_the_same() -> None:
    met = Mixture.read(["a.py:A", "3*dir/b.py:B(x=1)", "1.5 * dir/b.py:B(x=2)"])
    assert met.names == ("a.py:A", "dir/b.py:B(x=1)", "dir/b.py:B(x=2)")
    drawn = [met.number_of(Opening({}, f"any {row}", f"3/{row}")) for row in range(5500)]
    assert drawn == [met.number_of(Opening({}, "other", f"3/{row}")) for row in range(5500)]
    # 1000, 3000 and 1500 with standard deviations below 37.
    assert all(
        abs(drawn.count(i) - expected) < 150 for i, expected in enumerate((1000, 3000, 1500))
    )
    assert drawn != [met.number_of(Opening({}, "", f"4/{row}")) for row in range(5500)]
    for name, number in (("a.py:A", 0), ("dir/b.py:B(x=2)", 2)):
        rows = [Opening({"environment": name}, "", str(row)) for row in range(9)]
        assert {met.number_of(row) for row in rows} == {number}
    with pytest.raises(
        UserError, match=r"a row: the column environment is 'c', but .* has a.py:A, "
    ):
        met.number_of(Opening({"environment": "c"}, ""))
    server = "openenv:http://host:80"
    assert Mixture.read(["a.py:A", server]).names == ("a.py:A", "openenv:host:80")
    for twice in (["a.py:A", "2 * a.py:A"], ["0 * a.py:A"]):
        with pytest.raises(UserError, match="must name each environment once, with a weight above"):
            Mixture.read(twice)


def test_a_server_that_is_not_there_is_named(server: str) -> None:
    address = server.removeprefix("openenv:")
    for text, reason in {
        "openenv:http://127.0.0.1:9": r"no OpenEnv server answers at http://127.0.0.1:9 \(.*refused",
        f"{server}/none": "no OpenEnv server answers at .*404",
        f"{server}/other": f"{address}/other/schema is not what an OpenEnv server answers",
        f"{server}(action='move')": "the action has the fields message; name one with action='...'",
        f"{server}/two": "the observation has the fields text, image; name one with observation='...'",
    }.items():
        with pytest.raises(UserError, match=f"^environment .* cannot be made: .*{reason}"):
            load_environment(text)


@pytest.mark.parametrize("pool", [OPENENV], indirect=True)
def test_what_a_server_refuses_or_leaves_out_ends_its_conversation(pool: EnvironmentPool) -> None:
    for sample, (completion, expected) in enumerate(SERVER_FAILURES.items()):
        asked(pool, sample, Opening({"seed": 1}, ""))
        failure = pool.ask({sample: completion})[sample]
        assert isinstance(failure, CallFailure) and re.search(expected, failure.message), failure


def test_a_server_that_does_not_answer_in_time_ends_its_conversation(server: str) -> None:
    pool = EnvironmentPool(Mixture.read([server]), CallLimits(1.0, 4 << 30))
    try:
        answers = pool.ask({0: Opening({"seed": 1}, ""), 1: Opening({"seed": 1}, "")})
        assert all(isinstance(answer, Observation) for answer in answers.values())
        late, other = (pool.ask({0: "never", 1: "0"})[sample] for sample in (0, 1))
        assert isinstance(late, CallFailure) and late.kind == TIMEOUT
        assert isinstance(other, Observation) and "higher" in other.messages[0]["content"]
    finally:
        pool.close()


def test_an_evaluation_needs_no_data_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    words = ["--config", "examples/grpo/guess_number/grpo_config.yaml", "--samples", "3"]
    assert main(["eval", *words, "--rl_config.eval_steps", "0"]) == 0
    assert re.search(r"environment .* 3 +0\n  3 prompts, 3 completions", capsys.readouterr().out)


def test_the_solved_example_of_a_prompt_is_a_problem_of_the_package() -> None:
    config = load_config(ROOT / "examples/grpo/smollm2_chain_sum/grpo_config.yaml").config.rl_config
    assert config.environment is not None
    question = load_environment(config.environment[0])().reset({"seed": 1})
    template = (ROOT / str(config.chat_template)).read_text()
    messages = [{"role": "user", "content": question}]
    prompt = render_chat(template, messages, add_generation_prompt=True)
    _, solved, asked = prompt.split("<|im_start|>user\n")
    assert asked == f"{question}<|im_end|>\n<|im_start|>assistant\n"
    (problem,) = re.findall(r"\d [+-] \d", solved)
    in_its_form = re.sub(r"\d [+-] \d", problem, question)
    turn = f"{in_its_form}<|im_end|>\n<|im_start|>assistant\n{eval(problem)}<|im_end|>\n"
    assert solved == turn


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, (_, distribution) in PACKAGES.items():
        module = "websockets" if kind == "openenv" else kind
        monkeypatch.setitem(__import__("sys").modules, module, None)
        with pytest.raises(UserError, match=f"needs the package {distribution}") as raised:
            load_environment(f"{kind}:name")
        (extra,) = re.findall(r"mindgrpo\[(.+)\]", str(raised.value))
        assert extra in metadata("mindgrpo").get_all("Provides-Extra")
