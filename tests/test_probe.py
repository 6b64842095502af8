"""msprobe's part of a run: what is handed to its SingleSave, and that a run goes on without it.

SingleSave is a stand-in with the same calls. Does not prove that msprobe's own versions keep them; where it is
installed, one test tries.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindgrpo.algorithm.sample import Rollout, TrainBatch
from mindgrpo.config import Config, values_by_key
from mindgrpo.monitor.probe import Probe, key_data, load_saver


class Saver:
    """Writes down calls, as SingleSave's class and class methods take them."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.fails = False

    def __call__(self, dump_path: str, fmk: str) -> Saver:
        self.calls.append(("made", (dump_path, fmk)))
        return self

    def save(self, data: dict[str, Any]) -> None:
        if self.fails:
            raise OSError("no space\nleft")
        self.calls.append(("save", {name: value.asnumpy() for name, value in data.items()}))

    def save_config(self, data: dict[str, object]) -> None:
        self.calls.append(("config", data))

    def step(self) -> None:
        self.calls.append(("step", None))


def two_samples() -> TrainBatch:
    rollout = Rollout.single_turn(
        [np.array([5, 6], np.int32), np.array([7], np.int32)],
        [np.array([1, 2, 3], np.int32), np.array([4], np.int32)],
        ["stop", "length"],
        [np.array([-1, -2, -3], np.float32), np.array([-4], np.float32)],
        [0, 0],
    )
    return TrainBatch(rollout, np.array([0.5, -0.5], np.float32))


LOGPS = {1: np.array([-4.5], np.float32), 0: np.array([-1.5, -2.5, -3.5], np.float32)}


def test_per_token_data_are_joined_in_the_order_of_the_samples() -> None:
    data = key_data(two_samples(), {"total": np.array([1.0, 0.0])}, LOGPS)
    assert data["completion_tokens"].tolist() == [1, 2, 3, 4]
    assert data["completion_lengths"].tolist() == [3, 1]
    assert data["prompt_tokens"].tolist() == [5, 6, 7]
    assert data["policy_logps"].tolist() == [-1.5, -2.5, -3.5, -4.5]
    assert data["reward_total"].tolist() == [1.0, 0.0]
    assert "old_logps" not in data and "reference_logps" not in data


def test_what_a_step_has_beside_is_added() -> None:
    batch = two_samples()
    logps = batch.rollout.generator_logps
    data = key_data(replace(batch, reference_logps=logps, old_logps=logps), {}, LOGPS)
    assert data["reference_logps"].tolist() == data["old_logps"].tolist() == [-1, -2, -3, -4]


def test_a_step_is_saved_and_counted(tmp_path: Path) -> None:
    saver, warnings = Saver(), []
    probe = Probe(saver, tmp_path, warnings.append)
    probe.step({"advantages": np.array([1.0], np.float32), "empty": np.zeros(0, np.float32)})
    names = [name for name, _ in saver.calls]
    assert names == ["made", "save", "step"]
    assert saver.calls[0][1] == (str(tmp_path), "mindspore")
    assert set(saver.calls[1][1]) == {"advantages"}
    assert warnings == []


def test_the_whole_configuration_is_saved_as_plain_values(tmp_path: Path) -> None:
    saver = Saver()
    Probe(saver, tmp_path, print).configuration(values_by_key(Config()))
    values = saver.calls[1][1]
    assert values["rl_config.beta"] == Config().rl_config.beta
    assert values["ref_config.parallel_config.data_parallel"] is None
    json.dumps(values, allow_nan=False)


def test_a_probe_that_fails_is_told_once_and_left(tmp_path: Path) -> None:
    saver, warnings = Saver(), []
    probe = Probe(saver, tmp_path, warnings.append)
    saver.fails = True
    for _ in range(3):
        probe.step({"advantages": np.array([1.0], np.float32)})
    assert len(warnings) == 1 and warnings[0].count("\n") == 0
    assert "no space left" in warnings[0]


def is_msprobe(name: str) -> bool:
    return name.partition(".")[0] == "msprobe"


def test_a_package_that_is_only_called_alike_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "msprobe"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if is_msprobe(name)}
    try:
        with pytest.raises(ImportError):
            load_saver()
    finally:
        for name in [name for name in sys.modules if is_msprobe(name)]:
            del sys.modules[name]
        sys.modules.update(kept)


def test_msprobe_itself_takes_what_a_step_has(tmp_path: Path) -> None:
    pytest.importorskip("msprobe.core", exc_type=ImportError)
    warnings: list[str] = []
    probe = Probe(load_saver(), tmp_path / "dump", warnings.append)
    probe.configuration({"a": 1})
    probe.step(key_data(two_samples(), {"total": np.array([1.0, 0.0], np.float32)}, LOGPS))
    assert warnings == []
    assert (tmp_path / "dump/configurations.json").is_file()
    (saved,) = (tmp_path / "dump/data/policy_logps/step0").rglob("*.npy")
    assert np.load(saved).tolist() == [-1.5, -2.5, -3.5, -4.5]
