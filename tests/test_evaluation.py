"""Evaluations: which samples are drawn, what is made of them, and that a run's own and the verb's are one.

The example's model in one process. Does not prove several ranks (test_distributed.py has greedy tokens under layouts)
nor the estimators (test_pass_at_k.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_generators import (
    LAYOUT,
    SETTINGS,
    VERSION,
    generator_with,
    kernels_named,
    random_weights,
    requests_of,
)

from mindgrpo.algorithm.sample import Request
from mindgrpo.backend.cpu.backend import CpuBackend
from mindgrpo.backend.kernels.native.library import library_path
from mindgrpo.backend.kernels.shapes import SamplingParams
from mindgrpo.cli.eval import mesh_for
from mindgrpo.cli.verbs import main
from mindgrpo.config import Config, load_config
from mindgrpo.config.command_line import configuration_words, parse_evaluation
from mindgrpo.config.roles import GenerateParallelConfig
from mindgrpo.errors import UserError
from mindgrpo.grpo.build import evaluation_modes
from mindgrpo.grpo.evaluation import GREEDY, SAMPLED, Evaluator, Mode, Outcome
from mindgrpo.grpo.scoring import RolloutScorer
from mindgrpo.launch.options import has_config
from mindgrpo.models.decoder_config import read_config
from mindgrpo.rewards.scores import Report, Scores
from mindgrpo.rollout.engine import SeedKey
from mindgrpo.rollout.noise import EVALUATION
from mindgrpo.rollout.replicas import Replicas
from mindgrpo.run.evaluation_log import before_and_after, write_evaluation

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "grpo" / "tiny_arithmetic" / "grpo_config.yaml"
SEED, STEP = 3, 7
LIKELIEST = replace(SETTINGS, temperature=0.0)


class Words:
    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


class Parity:
    """1 where the first token is even, nothing where it is divisible by seven, and one failure."""

    names = ("even",)

    def num_done(self) -> int:
        return 0

    def begin(self, *samples: Any) -> Callable[[], Scores]:
        return partial(self.score, *samples)

    def score(self, texts: list[str], *_: Any) -> Scores:
        first = [int(text.split()[0]) for text in texts]
        values = np.array([np.nan if n % 7 == 0 else float(n % 2 == 0) for n in first])
        report = Report({"errors": 1}, "once")
        nothing = np.zeros(len(texts))
        return Scores({"even": values}, nothing, nothing > 0, {"even": report})


class Asked:
    def __init__(self, ids: np.ndarray) -> None:
        self.ids, self.text, self.answer = ids, f"prompt {ids.tolist()}", "gold"
        self.question, self.columns, self.images = "", {}, {}


@pytest.fixture(scope="module")
def evaluator() -> Evaluator:
    backend = CpuBackend({})
    kind = "plain" if library_path() is None else "native"
    generator = generator_with(random_weights(backend), backend, kernels_named(kind))
    scorer = RolloutScorer(Parity(), Words(), backend)  # type: ignore[arg-type]
    return Evaluator(Replicas(generator, LAYOUT.mesh, backend), scorer, SEED)


def asked() -> list[Asked]:
    return [Asked(request.prompt) for request in requests_of()]


def evaluated(evaluator: Evaluator, *modes: Mode) -> list[Outcome]:
    return evaluator.run(asked(), modes, STEP, VERSION)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_samples", [1, 3])
def test_the_samples_of_a_prompt_have_the_evaluations_noise_in_order(
    evaluator: Evaluator, num_samples: int
) -> None:
    """One sample a prompt is what evaluations have always drawn."""
    (found,) = evaluated(evaluator, Mode(SAMPLED, num_samples, SETTINGS, 1.0))
    requests = [
        Request(prompt.ids, tuple(range(i * num_samples, (i + 1) * num_samples)))
        for i, prompt in enumerate(asked())
    ]
    key = SeedKey(SEED, EVALUATION, STEP)
    expected = evaluator.replicas.engine.generate(requests, SETTINGS, key, VERSION)
    assert [tokens.tolist() for tokens in found.rollout.completion_ids] == [
        completion.tokens.tolist() for completion in expected
    ]
    assert [prompt.text for prompt in found.prompts] == [
        prompt.text for prompt in asked() for _ in range(num_samples)
    ]


def test_both_ways_of_answering_are_told_apart_by_name(
    evaluator: Evaluator, tmp_path: Path
) -> None:
    modes = [Mode(SAMPLED, 3, SETTINGS, 1.0), Mode(GREEDY, 1, LIKELIEST, 1.0)]
    outcomes = evaluated(evaluator, *modes)
    assert list(outcomes[0].metrics()) == [
        "eval/even/mean",
        "eval/even/mean@3",
        "eval/even/stderr",
        "eval/even/pass@1",
        "eval/even/pass@2",
        "eval/even/pass@3",
        "eval/even/errors",
        "eval/truncated_fraction",
        "eval/completion_length",
    ]
    assert "eval_greedy/even/pass@1" in outcomes[1].metrics()
    assert "eval_greedy/even/mean@1" not in outcomes[1].metrics()
    write_evaluation(tmp_path, 4, outcomes, True)
    write_evaluation(tmp_path, 8, outcomes[:1], False)
    figures = read_lines(tmp_path / "evaluations.jsonl")
    assert [row["step"] for row in figures] == [4, 8]
    assert figures[0] == {"step": 4, **outcomes[0].metrics(), **outcomes[1].metrics()}
    rows = read_lines(tmp_path / "eval_completions.jsonl")
    assert [row["mode"] for row in rows] == ["sampled"] * 21 + ["greedy"] * 7
    assert {row["step"] for row in rows} == {4} and {row["answer"] for row in rows} == {"gold"}
    earned = [row["rewards"]["even"] for row in rows[:21]]
    assert None in earned, "no sample is without a score"
    scored = [value for value in earned if value is not None]
    assert outcomes[0].means == {"even": pytest.approx(np.mean(scored), abs=1e-15)}
    assert "eval/even/mean" in figures[1] and "eval_greedy/even/mean" not in figures[1]


def test_what_is_asked_for_is_how_it_is_drawn() -> None:
    def modes(*words: str) -> list[Mode]:
        config = load_config(EXAMPLE, [f"--rl_config.{word}" for word in words]).config
        return evaluation_modes(config, SamplingParams(temperature=0.9, top_p=0.8, max_tokens=5))

    (usual,) = modes()
    assert usual == Mode(SAMPLED, 1, SamplingParams(temperature=0.9, top_p=0.8, max_tokens=5), 1.0)
    greedy, own = modes(
        "eval_modes=greedy,sampled",
        "eval_num_generations=4",
        "eval_temperature=0.6",
        "eval_top_p=1.0",
        "eval_pass_threshold=0.5",
    )
    assert (own.num_samples, own.settings.temperature, own.settings.top_p) == (4, 0.6, 1.0)
    assert (greedy.name, greedy.num_samples, greedy.settings.temperature) == (GREEDY, 1, 0.0)
    assert greedy.threshold == own.threshold == 0.5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rl_config.eval_modes", "greedy,greedy"], "each mode once"),
        (["--rl_config.eval_modes", "best"], "a list of 'sampled' or 'greedy'"),
        (["--rl_config.eval_temperature", "0", "--rl_config.eval_num_generations", "2"], "same"),
    ],
)
def test_what_no_evaluation_can_be_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_config(EXAMPLE, words)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def alone(program: list[str], *words: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "GLOG_v": "3", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "mindgrpo", *program, "--config", str(EXAMPLE), *words]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.fixture(scope="module")
def a_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of one step, with a chat template and samplings of its own."""
    folder = tmp_path_factory.mktemp("a_run")
    template = folder / "mine.jinja"
    template.write_text("<|im_start|>user\nWhat is {{ messages[-1].content }}<|im_end|>\nA: ")
    words = ["--rl_config.max_steps", "1", "--rl_config.prompts_per_step", "4"]
    words += ["--rl_config.chat_template", str(template), "--actor_config.lr_schedule.lr", "3e-3"]
    words += ["--generate_config.max_prompt_length", "50"]
    for role in ("actor", "generate"):
        for axis in ("data_parallel", "model_parallel", "pipeline_stage"):
            words += [f"--{role}_config.parallel_config.{axis}", "1"]
    alone(["train"], *words, *SAMPLING, "--output_dir", str(folder / "run"))
    return folder / "run"


SAMPLING = [
    *("--rl_config.eval_modes", "sampled,greedy", "--rl_config.eval_num_generations", "2"),
    *("--rl_config.eval_samples", "30", "--rl_config.eval_temperature", "0.8"),
]


def test_the_verb_finds_in_a_runs_model_what_the_run_found(a_run: Path, tmp_path: Path) -> None:
    """To the last bit, and without being told of the chat template, which the model carries."""
    output, kept = tmp_path / "figures.json", tmp_path / "answers.jsonl"
    words = ["--model", str(a_run), "--step", "1", *SAMPLING]
    words += ["--generate_config.max_prompt_length", "50"]
    alone(["eval"], *words, "--output", str(output), "--completions", str(kept))
    found = json.loads(output.read_text())
    summary = json.loads((a_run / "summary.json").read_text())
    assert found["eval"] == summary["eval_after"] != summary["eval_before"]
    (step,) = read_lines(a_run / "metrics.jsonl")
    figures = {key: value for key, value in step.items() if key.startswith("eval")}
    assert figures == found["figures"] and len(figures) == 24
    before, after = read_lines(a_run / "evaluations.jsonl")
    assert (before.pop("step"), after.pop("step")) == (0, 1)
    assert after == figures and before.keys() == after.keys() and before != after
    rows = read_lines(a_run / "eval_completions.jsonl")
    assert len(rows) == 2 * 3 * 30
    assert [row for row in rows if row["step"] == 1] == read_lines(kept)
    assert rows[0]["prompt"].startswith("<|im_start|>user\nWhat is")
    # Generation in C serves both ways of answering without a graph.
    if library_path() is not None:
        assert found["compiles"] == 0


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example's paths count from the repository's folder."""
    monkeypatch.chdir(ROOT)


@pytest.mark.usefixtures("here")
def test_an_evaluation_is_checked_without_a_device_and_without_training_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--config", str(EXAMPLE), "--rl_config.dataset_file", "/path/to/nothing.jsonl"]
    assert main(["check", "--ranks", "8", "eval", *words]) == 0
    assert main(["check", "--ranks", "6", "eval", *words]) == 2
    assert "model_parallel 4 does not divide the 6 ranks" in capsys.readouterr().err
    assert main(["check", "--ranks", "1", "eval", *words, "--data", "/path/to/data"]) == 2
    assert "eval_dataset_file is still '/path/to/data'" in capsys.readouterr().err
    assert main(["eval", *words, "--rl_config.eval_dataset_file="]) == 2
    assert "the held-out data, also --data" in capsys.readouterr().err
    (tmp_path / "there.json").write_text("{}")
    assert main(["eval", *words, "--output", str(tmp_path / "there.json")]) == 2
    assert "exists and is not overwritten" in capsys.readouterr().err


def config_of(*words: str) -> Config:
    line = parse_evaluation(["--config", str(EXAMPLE), *words])
    return load_config(line.files, line.overrides).config


def test_short_flags_are_keys_of_the_configuration(tmp_path: Path) -> None:
    config = config_of(
        *("--model", str(tmp_path), "--data", "d.jsonl", "--num_generations", "8"),
        *("--samples=5", "--greedy", "--rl_config.seed", "4"),
    )
    assert config.actor_config.load == str(tmp_path)
    rl = config.rl_config
    assert (rl.eval_dataset_file, rl.eval_num_generations, rl.eval_samples, rl.seed) == (
        *("d.jsonl", 8, 5),
        4,
    )
    assert rl.eval_modes == ["greedy"] and config_of("--greedy=false").rl_config.eval_modes == [
        "sampled"
    ]
    (tmp_path / "hf").mkdir()
    assert config_of("--model", str(tmp_path)).actor_config.load == str(tmp_path / "hf")
    # A run's own configuration, unless another is given.
    resolved = tmp_path / "config_resolved.yaml"
    resolved.write_text("rl_config: {seed: 11}")
    for model in (tmp_path, tmp_path / "hf"):
        line = parse_evaluation(["--model", str(model), "--samples", "3"])
        rl = load_config(line.files, line.overrides).config.rl_config
        assert (rl.seed, rl.eval_samples) == (11, 3)
    assert config_of("--model", str(tmp_path)).rl_config.seed != 11
    checkpoint = tmp_path / "checkpoints" / "step_000004"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").touch()
    # The run is known, and what is to be done first.
    assert parse_evaluation(["--model", str(checkpoint)]).files == [resolved]
    for folder in (checkpoint, tmp_path):
        with pytest.raises(UserError, match=f"export it with .* export --from {folder} --output"):
            read_config(folder)
    line = parse_evaluation(["--config", "a.yaml", "--step=3", "--output", "o", "--greedy"])
    assert (line.step, line.output, line.completions) == (3, Path("o"), None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--step", "-1"], "--step is '-1'"),
        (["--greedy", "maybe"], "must be true or false"),
        (["--checkpoint", "x"], "--checkpoint is no flag"),
    ],
)
def test_flags_that_mean_nothing_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        parse_evaluation(["--config", "a.yaml", *words])


def test_a_launcher_finds_the_configuration_behind_the_verb() -> None:
    words = ["--config", "a.yaml", "--model", "m"]
    assert configuration_words(["eval", *words])[0] == [Path("a.yaml")]
    assert configuration_words(["--config", "a.yaml"]) == ([Path("a.yaml")], [])
    with pytest.raises(UserError, match="--model"):
        configuration_words(words)
    assert has_config(["eval", "--model=m"]) and not has_config(["my_main.py", "--model", "m"])


@pytest.mark.parametrize(
    ("ways", "ranks", "expected"), [(4, 8, (2, 4)), (4, 4, (1, 4)), (4, 1, (1, 1)), (1, 8, (8, 1))]
)
def test_an_evaluation_uses_all_ranks_whatever_the_run_used(
    ways: int, ranks: int, expected: tuple[int, int]
) -> None:
    found = mesh_for(GenerateParallelConfig(data_parallel=2, model_parallel=ways), ranks)
    assert (found.data_parallel, found.model_parallel) == expected


def evaluation(step: int, mean: float) -> dict[str, Any]:
    return {"step": step, "eval/format_reward/mean": mean, "eval/format_reward/stderr": 0.0125}


def test_the_last_lines_compare_the_first_evaluation_with_the_last(tmp_path: Path) -> None:
    path = tmp_path / "evaluations.jsonl"
    later = evaluation(24, 0.985) | {
        "eval/format_reward/pass@1": 0.985,
        "eval/format_reward/pass@8": 1.0,
    }
    first = evaluation(0, 0.335) | {"eval/format_reward/pass@8": 0.75}
    path.write_text("".join(json.dumps(row) + "\n" for row in (first, evaluation(12, 0.7), later)))
    assert before_and_after(path) == [
        "                      before         after",
        "format_reward         0.335 ± 0.013  0.985 ± 0.013",
        "format_reward pass@8  0.750          1.000",
    ]


def test_without_an_evaluation_before_the_first_step_there_is_nothing_to_compare_with(
    tmp_path: Path,
) -> None:
    path = tmp_path / "evaluations.jsonl"
    path.write_text("".join(json.dumps(evaluation(step, 0.5)) + "\n" for step in (12, 24)))
    assert before_and_after(path) == ["               after", "format_reward  0.500 ± 0.013"]
