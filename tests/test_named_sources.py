"""Runs and commands that name their model and data on a hub: a server on this machine that speaks its API.

Does not prove how downloads go wrong (test_hub_download.py), nor that several hosts each download once: ranks of one
host do here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import small_runs
import yaml
from hub_server import Hub, files_in, serving

from mindgrpo.backend.kernels.native.library import cache_directory
from mindgrpo.cli.verbs import main
from mindgrpo.config import load_config, values_by_key
from mindgrpo.data.hub_names import hub_name
from mindgrpo.run.named_sources import with_local_paths, with_names
from mindgrpo.run.start import find_start, saved_values

ROOT = Path(__file__).resolve().parent.parent
CARD = b"---\nconfigs:\n- config_name: main\n  data_files: [{split: train, path: sums/*}]\n---\n"
NAMES = {
    "actor_config.load": "org/tiny",
    "rl_config.dataset_file": "org/sums:main",
    "rl_config.eval_dataset_file": "org/sums:main",
    "rl_config.eval_dataset_split": "train",
}
TWO_RANKS = (
    "--actor_config.parallel_config.data_parallel=2",
    "--generate_config.parallel_config.data_parallel=2",
    "--rl_config.prompts_per_step=4",
)
FEW_STEPS = ("--rl_config.max_steps=2", "--rl_config.save_ckpt_interval=1", *small_runs.ONE_GRAPH)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """With a model and rows, and empty caches but for compiled kernels."""
    small_runs.make_inputs(tmp_path)
    compiled, cache = cache_directory(), tmp_path / "cache"
    (cache / "mindgrpo").mkdir(parents=True, mode=0o700)
    for file in compiled.glob("native-*"):
        shutil.copy(file, cache / "mindgrpo" / file.name)
    with serving() as hub:
        os.environ.update(hub.environment(cache))
        put(hub, tmp_path)
        yield hub


def put(hub: Hub, folder: Path, **changed: bytes) -> dict[str, str]:
    """Gives model and data set a commit; returns their names with it."""
    weights = {"pytorch_model.bin": b"not read"}
    rows = (folder / "train.jsonl").read_bytes() + changed.get("rows", b"")
    data = {"README.md": CARD, "sums/rows.jsonl": rows, "sums.zip": b"not read"}
    model = hub.put("models", "org/tiny", files_in(folder / "model") | weights | changed)
    return {
        "org/tiny": f"org/tiny@{model}",
        "org/sums:main": f"org/sums:main@{hub.put('datasets', 'org/sums', data)}",
    }


def words(folder: Path, **more: str) -> list[str]:
    keys = [f"--{key}={value}" for key, value in (NAMES | more).items()]
    return [*keys, *small_runs.reward_words(folder)]


def launch(folder: Path, output: str, *flags: str) -> tuple[Path, str]:
    """Returns the folder of a run on two ranks, and what it printed."""
    command = [sys.executable, "-m", "mindgrpo", "launch", "--ranks", "2"]
    run = folder / output
    given = ["--config", str(folder / "small.yaml"), *words(folder), f"--output_dir={run}"]
    ended = subprocess.run(
        [*command, *given, *TWO_RANKS, *FEW_STEPS, *flags],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    printed = ended.stdout + ended.stderr
    assert ended.returncode == 0, printed
    return run, printed


def test_a_run_by_names_from_an_empty_cache_and_again_without_network(
    hub: Hub, tmp_path: Path
) -> None:
    pinned = put(hub, tmp_path)
    first, printed = launch(tmp_path, "first")
    # Once for the check and both ranks, and nothing that is not read.
    files = [*files_in(tmp_path / "model"), "README.md", "sums/rows.jsonl"]
    assert sorted(hub.downloaded) == sorted(files)
    assert printed.index("mindgrpo: downloading org/tiny@") < printed.index("2 ranks on port")
    resolved = yaml.safe_load((first / "config_resolved.yaml").read_text())
    recorded = {key: resolved[key.partition(".")[0]][key.partition(".")[2]] for key in NAMES}
    assert recorded == {key: pinned.get(text, text) for key, text in NAMES.items()}

    hub.requests.clear()
    os.environ["HF_HUB_OFFLINE"] = "1"
    second, _ = launch(tmp_path, "second")
    assert not hub.requests
    assert small_runs.model_bits(second) == small_runs.model_bits(first)

    # The repositories move on; a run that is resumed does not, whatever its file says.
    os.environ["HF_HUB_OFFLINE"] = ""
    put(hub, tmp_path, rows=b'{"question": "new", "answer": "1"}\n', **{"config.json": b"{}"})
    again = ["--rl_config.resume_training=true", f"--output_dir={first}"]
    loaded = load_config(tmp_path / "small.yaml", [*words(tmp_path), *again])
    start, loaded = find_start(loaded, "small")
    fetched = with_local_paths(loaded, earlier=saved_values(start))
    values = values_by_key(with_names(fetched.config))
    assert {key: values[key] for key in NAMES} == recorded


def test_a_trainer_in_trls_form_takes_names(hub: Hub, tmp_path: Path) -> None:
    from mindgrpo import GRPOTrainer

    keys = [*FEW_STEPS, "--rl_config.eval_steps=0", f"--output_dir={tmp_path / 'run'}"]
    trainer = GRPOTrainer(
        config=load_config(tmp_path / "small.yaml", keys),
        model="org/tiny",
        train_dataset="org/sums:main",
        reward_functions=[small_runs.spread],
    )
    name = hub_name(with_names(trainer.run.config).actor_config.load)
    assert name is not None and name.is_pinned and name.name == "org/tiny"
    assert len(trainer.run.inputs.prompts) == small_runs.NUM_ROWS
    trainer.train()
    resolved = yaml.safe_load((tmp_path / "run" / "config_resolved.yaml").read_text())
    assert resolved["actor_config"]["load"] == str(name)


Says = Callable[..., str]


@pytest.fixture
def says(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Says:
    """Runs a verb and returns what it printed."""

    def run(verb: str, *arguments: str, status: int = 0) -> str:
        os.chdir(tmp_path)
        assert main([verb, *arguments]) == status
        printed = capsys.readouterr()
        return printed.out + printed.err

    return run


def test_check_reads_what_is_named_and_says_where_it_is_wrong(
    hub: Hub, tmp_path: Path, says: Says
) -> None:
    config = ["--config", str(tmp_path / "small.yaml"), *words(tmp_path)]
    assert f"{small_runs.NUM_ROWS} of {small_runs.NUM_ROWS} rows kept" in says("check", *config)
    sentence = says("check", *config, "--actor_config.load=org/none", status=2)
    assert (
        "actor_config.load is org/none, but there is no such path here and no such mo" in sentence
    )
    sentence = says("check", *config, "--rl_config.dataset_split=dev", status=2)
    assert (
        "org/sums:main has the splits train and no 'dev'; set rl_config.dataset_split" in sentence
    )


def test_nothing_is_downloaded_for_a_configuration_that_cannot_run(
    hub: Hub, tmp_path: Path, says: Says
) -> None:
    config = ["--config", str(tmp_path / "small.yaml"), *words(tmp_path)]
    sentence = says("check", *config, "--verifier_function=[]", "--verifier_weight=[]", status=2)
    assert "reward_config.verifier_function (the reward functions) is not set" in sentence
    assert not hub.requests


def test_plan_downloads_the_shapes_alone(hub: Hub, tmp_path: Path, says: Says) -> None:
    config = ["--config", str(tmp_path / "small.yaml"), *words(tmp_path)]
    assert "org--tiny@" in says("plan", *config)
    assert hub.downloaded == ["config.json"]


def test_commands_take_names_where_they_take_paths(hub: Hub, tmp_path: Path, says: Says) -> None:
    scored = says("score", "--reward", "accuracy_reward", "--data", "org/sums:main", "--limit", "0")
    assert f"{small_runs.NUM_ROWS} rows of org/sums:main" in scored and "mean 1.0000" in scored
    assert "model.safetensors" in says("export", "--from", "org/tiny", "--output", "exported")
    sentence = says("score", "--reward", "accuracy_reward", "--data", "org/none", status=2)
    assert "--data is org/none, but there is no such path here and no such data set on" in sentence


def test_an_evaluation_takes_a_name_and_reports_it_pinned(
    hub: Hub, tmp_path: Path, says: Says
) -> None:
    config = ["--config", str(tmp_path / "small.yaml"), *words(tmp_path), *small_runs.NO_REFERENCE]
    flags = ["--model", "org/tiny", "--data", "org/sums:main", "--output", "eval.json"]
    says("eval", *config, *flags)
    written = yaml.safe_load((tmp_path / "eval.json").read_text())
    pinned = put(hub, tmp_path)
    assert (written["model"], written["data"]) == (pinned["org/tiny"], pinned["org/sums:main"])
