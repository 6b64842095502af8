"""Trackers get a run's numbers, also over a resume, and cannot stop or change a run: real packages, without a network.

Does not prove that a server of any of them accepts what is sent.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import small_runs
from config_files import Loader
from tracker_readers import (
    PACKAGES,
    Recorded,
    import_package,
    mlflow_runs,
    swanlab_runs,
    trackio_runs,
    wandb_runs,
)

from mindgrpo.errors import UserError
from mindgrpo.monitor.metrics import read_metrics
from mindgrpo.monitor.trackers import contract
from mindgrpo.monitor.trackers.process import cells_of, numbers_of
from mindgrpo.monitor.trackers.started import Trackers

OWN = Path(__file__).with_name("own_trackers.py")
ROOT = OWN.parent.parent
PROJECT = "sums"
PATIENCE = 60.0
FAILING = ("Raises", "FillsTheDisk", "Asks", "NeedsAPackage", "Hangs")
# Steps 3 and 4 are made twice: the tracker has step 3 from before the resume.
WORDS = ("--rl_config.save_ckpt_interval=2", "--actor_config.lr_schedule.lr_decay_style=constant")
WORDS += small_runs.ONE_GRAPH


def own(*names: str) -> list[str]:
    return [f"{OWN}:{name}" for name in names]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    small_runs.make_inputs(folder)
    return folder


@pytest.fixture(scope="module")
def plain(inputs: Path) -> Path:
    return small_runs.run(inputs, inputs / "plain", *WORDS, "--rl_config.max_steps=4")


@pytest.fixture(scope="module")
def tracked(inputs: Path) -> Iterator[Path]:
    """3 steps in all trackers that are installed, then a resume from step 2 to step 4."""
    installed = [name for name, module in PACKAGES.items() if find_spec(module)]
    words = [*WORDS, "--monitor_config.trackers", ",".join([*installed, *own("Keeps", "Talks")])]
    words += ["--monitor_config.tracker_project", PROJECT]
    words += ["--monitor_config.tracker_run_name", "nightly", "--rl_config.max_steps"]
    output = inputs / "tracked"
    with pytest.MonkeyPatch.context() as environment:
        for name, value in {
            "WANDB_MODE": "offline",
            "SWANLAB_MODE": "offline",
            "MLFLOW_TRACKING_URI": (inputs / "mlflow").as_uri(),
            "MLFLOW_ALLOW_FILE_STORE": "true",
            "TRACKIO_DIR": str(inputs / "trackio"),
        }.items():
            environment.setenv(name, value)
        small_runs.run(inputs, output, *words, "3")
        # As if it had been killed after step 3: its checkpoint of step 2 is the last one.
        shutil.rmtree(output / "checkpoints" / "step_000003")
        small_runs.run(inputs, output, *words, "4", "--rl_config.resume_training=true")
        yield output


@pytest.fixture(scope="module")
def failing(inputs: Path) -> tuple[Path, str]:
    """The run's folder, and what it printed."""
    output = inputs / "failing"
    words = ["--monitor_config.trackers", ",".join(own(*FAILING)), *WORDS]
    words += ["--monitor_config.tracker_finish_seconds=8", "--rl_config.max_steps=4"]
    script = (
        "import sys, small_runs; from pathlib import Path; "
        "small_runs.run(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, str(inputs), str(output), *words],
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{OWN.parent}"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return output, ended.stdout


def read(name: str, run: Path) -> Recorded:
    folder = run / "trackers" / name
    if name == "wandb":
        return wandb_runs(folder)
    if name == "swanlab":
        return swanlab_runs(folder)
    if name == "mlflow":
        return mlflow_runs(os.environ["MLFLOW_TRACKING_URI"], PROJECT)
    return trackio_runs(PROJECT)


def expected(run: Path) -> dict[int, dict[str, float]]:
    """What the run's own files say; of step 0 its evaluation."""
    first, *_ = read_metrics(run / "evaluations.jsonl")
    assert first["step"] == 0
    return {row["step"]: numbers_of(row) for row in (first, *read_metrics(run / "metrics.jsonl"))}


@pytest.mark.parametrize("name", PACKAGES)
def test_a_tracker_has_the_numbers_of_the_runs_files(name: str, tracked: Path) -> None:
    import_package(PACKAGES[name])
    recorded, rows = read(name, tracked), expected(tracked)
    assert sorted(recorded.numbers) == sorted(rows) == [0, 1, 2, 3, 4]
    for step, figures in rows.items():
        if name == "mlflow":
            from mindgrpo.monitor.trackers.built_in import metric_names

            names = metric_names(figures)
            figures = {names[key]: value for key, value in figures.items()}
        if step == 3:
            # Made twice: the numbers that a machine's speed decides are those of the first time.
            figures = {key: value for key, value in figures.items() if not small_runs.is_own(key)}
            assert figures.items() <= recorded.numbers[step].items()
            continue
        assert recorded.numbers[step] == pytest.approx(figures, rel=1e-6), step


@pytest.mark.parametrize("name", PACKAGES)
def test_a_resumed_run_records_no_step_twice(name: str, tracked: Path) -> None:
    import_package(PACKAGES[name])
    points = read(name, tracked).points
    assert len(points) == len({*points})


@pytest.mark.parametrize("name", PACKAGES)
def test_a_tracker_has_the_completions_as_a_table(name: str, tracked: Path) -> None:
    import_package(PACKAGES[name])
    kept = [json.loads(line)["step"] for line in small_runs.completions(tracked)]
    assert read(name, tracked).completions == {step: kept.count(step) for step in {*kept}}


@pytest.mark.parametrize("name", ["mlflow", "trackio", "wandb"])
def test_a_tracker_has_the_configuration(name: str, tracked: Path) -> None:
    import_package(PACKAGES[name])
    config = read(name, tracked).config
    assert float(config["actor_config.lr_schedule.lr"]) == 0.02
    assert str(config["monitor_config.tracker_project"]) == PROJECT


def kept_by(run: Path, name: str) -> list[dict[str, Any]]:
    return read_metrics(run / "trackers" / name / "kept.jsonl")


def test_a_class_of_the_users_own_gets_every_step_once_and_the_summary(tracked: Path) -> None:
    first, *entries = kept_by(tracked, "Keeps")
    assert (first["project"], first["name"]) == (PROJECT, "nightly")
    assert [entry["step"] for entry in entries if "step" in entry] == [0, 1, 2, 3, 4]
    rows = expected(tracked)
    by_step = {entry["step"]: entry for entry in entries if "step" in entry}
    assert all(by_step[step]["figures"] == rows[step] for step in (0, 1, 2, 4))
    (sample, *_) = by_step[1]["completions"]
    assert {"prompt", "completion", "rewards/spread", "advantage"} <= sample.keys()
    assert "token_ids" not in sample
    assert entries[-1]["summary"] == json.loads((tracked / "summary.json").read_text())


def test_a_tracker_that_prints_much_does_not_wait_for_a_reader(tracked: Path) -> None:
    assert [e["step"] for e in kept_by(tracked, "Talks") if "step" in e] == [0, 1, 2, 3, 4]
    assert (tracked / "trackers" / "Talks" / "log.txt").stat().st_size > 5 * 100_000


def test_trackers_that_fail_change_no_number_of_the_run(
    plain: Path, failing: tuple[Path, str], tracked: Path
) -> None:
    assert small_runs.rows(failing[0]) == small_runs.rows(plain)
    assert small_runs.model_bits(failing[0]) == small_runs.model_bits(plain)
    assert small_runs.rows(tracked) == small_runs.rows(plain)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Raises", "ValueError: no step 0 here"),
        ("FillsTheDisk", "OSError: [Errno 28] No space left on device"),
        ("Asks", "EOFError: EOF when reading a line"),
        ("NeedsAPackage", "ModuleNotFoundError: No module named 'no_such_package_at_all'"),
        ("Hangs", "did not finish in time and was ended"),
    ],
)
def test_a_tracker_that_fails_is_told_in_one_line(
    name: str, reason: str, failing: tuple[Path, str]
) -> None:
    run, printed = failing
    log = run / "trackers" / name / "log.txt"
    lines = [line for line in printed.splitlines() if f"tracker {name}" in line]
    assert lines == [f"  warning: tracker {name}: {reason}; see {log}"]


def test_nothing_of_a_tracker_outlives_the_run(failing: tuple[Path, str]) -> None:
    assert not commands_with(failing[0])


def test_a_tracker_hears_that_the_run_failed(plain: Path, tmp_path: Path) -> None:
    run, lines = tmp_path / "run", []
    shutil.copytree(plain, run)
    about = {"directory": str(run), "completions": None, "project": "p", "name": "n"}
    trackers = Trackers(own("Keeps"), about, lines.append)
    trackers.ask_to_finish(is_done=False)
    trackers.close(PATIENCE)
    *_, last = kept_by(run, "Keeps")
    assert last == {"summary": None}
    # Said where it takes more than two seconds.
    assert {*lines} <= {f"  waiting up to {PATIENCE:g} s for Keeps ..."}


def test_a_run_that_fails_lets_its_trackers_finish(inputs: Path, tmp_path: Path) -> None:
    def breaks(completions: Sequence[str], answers: Sequence[str]) -> list[float]:
        if list(completions) != list(answers):
            raise ValueError("these are no answers")
        return [1.0] * len(completions)

    words = ["--reward_config.max_failed_steps=1", "--rl_config.max_steps=4"]
    words += ["--monitor_config.trackers", *own("Keeps")]
    with pytest.raises(UserError, match="failed on all samples"):
        small_runs.run(inputs, tmp_path / "run", *words, reward=breaks)
    wait_until(lambda: kept_by(tmp_path / "run", "Keeps")[-1] == {"summary": None})


def test_a_tracker_that_hangs_ends_with_the_rank_that_is_killed(
    plain: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(plain, run)
    about = {"directory": str(run), "completions": None, "project": "p", "name": "n"}
    script = (
        "import json, sys, time; from mindgrpo.monitor.trackers.started import Trackers; "
        f"Trackers({own('Hangs')!r}, json.loads(sys.argv[1]), print); time.sleep(3600)"
    )
    rank = subprocess.Popen(
        [sys.executable, "-c", script, json.dumps(about)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    try:
        wait_until((run / "trackers" / "Hangs" / "state.json").exists)
    finally:
        rank.kill()
        rank.wait()
    wait_until(lambda: not commands_with(run))


def wait_until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        time.sleep(0.05)


def commands_with(run: Path) -> list[str]:
    return [words for path in Path("/proc").glob("[0-9]*") if str(run) in (words := _command(path))]


def _command(process: Path) -> str:
    try:
        return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


@pytest.mark.parametrize(
    ("name", "reason"), [("wandb", "UsageError: No API key"), ("swanlab", "no TTY is available")]
)
def test_a_tracker_that_wants_a_login_fails_by_itself(
    name: str, reason: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_package(name)
    for variable in [key for key in os.environ if key.startswith(("WANDB_", "SWANLAB_"))]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("HOME", str(tmp_path))
    lines: list[str] = []
    run = tmp_path / "run"
    shutil.copytree(plain, run)
    about = {"directory": str(run), "completions": None, "project": "p", "name": "n"}
    Trackers([name], about, lines.append).close(60)
    (line,) = [line for line in lines if "warning" in line]
    assert reason in line


def test_a_package_that_is_missing_is_refused_with_its_pip_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package = ("WandbTracker", ("no-such-wandb",))
    monkeypatch.setitem(contract.BUILT_IN, "wandb", package)
    with pytest.raises(UserError, match=r"trackers has wandb, .* run 'pip install no-such-wandb'"):
        contract.check_installed(["tensorboard", "wandb"])


@pytest.mark.parametrize(
    ("tracker", "sentence"),
    [("nowhere.py:Mine", "there is no file nowhere.py"), ("no.where:Mine", "no module no.where")],
)
def test_a_class_that_is_nowhere_is_refused(tracker: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        contract.check_installed([tracker])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("monitor_config: {trackers: [wandbb]}", "monitor_config.trackers"),
        ("monitor_config: {trackers: [wandb, wandb]}", "must name each tracker once"),
        ("monitor_config: {trackers: [a.py:T, b.py:T]}", "classes by different names"),
        (
            "monitor_config: {trackers: [tensorboard]}\nrl_config: {tensorboard: false}",
            "has tensorboard, but rl_config.tensorboard is False",
        ),
    ],
)
def test_a_list_that_cannot_be_honoured_is_refused(load: Loader, text: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        load(text)


def test_trackers_are_named_in_a_list_or_with_commas(load: Loader) -> None:
    for text in ("[wandb, mlflow, tensorboard]", "wandb,mlflow,tensorboard"):
        config = load(f"monitor_config:\n  trackers: {text}\n").config
        assert config.monitor_config.trackers == ["wandb", "mlflow", "tensorboard"]


def test_a_conversation_is_one_text_in_a_table() -> None:
    call = {"name": "search", "arguments": {}}
    messages = [
        {"role": "assistant", "content": "<b>call</b>", "tool_calls": [call]},
        {"role": "tool", "name": "search", "content": "Error: late", "failure": "deadline"},
        {"role": "assistant", "content": "so"},
    ]
    assert cells_of({"step": 1, "completion": "so", "messages": messages, "token_ids": [1]}) == {
        "completion": "so",
        "conversation": "[assistant]\n<b>call</b>\n\n[tool search deadline]\nError: late\n\n[assistant]\nso",
    }
