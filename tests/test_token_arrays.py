"""A further per-token array, declared for the test alone, from a sample to a micro-batch, a manifest and a dump.

Does not prove that an engine fills it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from mindgrpo.algorithm.packing import MicroShape, PackedRollout
from mindgrpo.algorithm.sample import STOPPED, PartialGroup, Rollout, Sample, TrainBatch, collect
from mindgrpo.algorithm.token_arrays import TOKEN_ARRAYS, TokenArray
from mindgrpo.checkpoint.format import StoredGroup, restored_groups, stored_groups
from mindgrpo.grpo.metrics import step_digests
from mindgrpo.run.batch_dump import ARRAYS, About, Dump, read, write

ROUTED = TokenArray("the experts of each token", np.int16, (2,), on_context=-1, is_input=True)
PROMPT = np.array([7, 8, 9], np.int32)


@pytest.fixture(autouse=True)
def declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TOKEN_ARRAYS, "routed", ROUTED)


def sample(number: int, length: int = 4) -> Sample:
    tokens = np.arange(length, dtype=np.int32) + 10 * number
    routed = np.stack([tokens, tokens + 1], axis=1)
    return Sample.drawn(number, PROMPT, tokens, STOPPED, 3, logps=-np.ones(length), routed=routed)


def test_it_grows_with_the_sample_and_context_has_what_is_declared() -> None:
    begun = Sample.begun(PROMPT).with_written(sample(1, 2)).with_answer([5, 6], ())
    whole = begun.with_written(sample(2, 1))
    assert whole.arrays["routed"].dtype == np.int16
    assert whole.arrays["routed"].tolist() == [[10, 11], [11, 12], [-1, -1], [-1, -1], [20, 21]]
    assert whole.logps.tolist() == [-1, -1, 0, 0, -1]
    assert whole.versions.tolist() == [3] * 5


def test_it_is_of_each_token_or_refused() -> None:
    with pytest.raises(ValueError, match="reshape"):
        Sample.drawn(0, PROMPT, PROMPT, STOPPED, 3, routed=[[1, 2]])


def test_a_rollout_has_it_where_every_sample_does() -> None:
    rollout = collect([sample(1), sample(0)], 2, [0])
    assert set(rollout.token_arrays) == {"logps", "versions", "routed"}
    assert ROUTED.title in step_digests(TrainBatch(rollout, np.zeros(2)), np.zeros(2))
    lacking = Sample.drawn(1, PROMPT, PROMPT, STOPPED, 3, logps=np.zeros(3))
    assert set(collect([sample(0), lacking], 2, [0]).token_arrays) == {"logps", "versions"}
    assert "routed" not in sample(0).with_written(lacking).arrays


def test_a_micro_batch_has_it_at_the_tokens_own_columns() -> None:
    rollout = collect([sample(0), sample(1, 3)], 2, [0])
    (batch,) = PackedRollout(rollout).micro_batches(MicroShape(1, 12), 1, 0)
    routed = batch.arrays["routed"][0]
    assert routed.dtype == np.int16 and set(batch.arrays) == {"routed"}
    # The prompt once, then all but the last token of each sample.
    expected = [[-1, -1]] * 3 + [[0, 1], [1, 2], [2, 3], [10, 11], [11, 12]] + [[-1, -1]] * 4
    assert routed.tolist() == expected


def test_an_unfinished_sample_brings_it_back_and_an_older_manifest_lacks_it() -> None:
    begun = replace(sample(0), finish_reason=None)
    (stored,) = stored_groups([PartialGroup(2, 1, (begun,))])
    text = stored.model_dump_json()
    ((restored,),) = (
        g.samples for g in restored_groups([StoredGroup.model_validate_json(text)], [PROMPT])
    )
    assert restored.arrays["routed"].dtype == np.int16
    np.testing.assert_array_equal(restored.arrays["routed"], begun.arrays["routed"])
    body = stored.model_dump()
    body["samples"][0]["arrays"] = {}
    (older,) = restored_groups([StoredGroup.model_validate(body)], [PROMPT])
    assert set(older.samples[0].arrays) == {"logps", "versions"}
    body["samples"][0]["arrays"] = {"routed": body["samples"][0]["tokens"][:8]}
    with pytest.raises(ValueError, match="routed have 6 bytes, but the versions are of 16"):
        StoredGroup.model_validate(body)


def test_a_dumped_batch_has_it(tmp_path: Path) -> None:
    rollout = Rollout((sample(0), sample(1, 2)), (0, 0))
    for one, other in zip(dumped(rollout, tmp_path).samples, rollout.samples, strict=True):
        np.testing.assert_array_equal(one.arrays["routed"], other.arrays["routed"])
        np.testing.assert_array_equal(one.logps, other.logps)


def test_a_dumped_batch_has_remote_arrays_whole_under_the_name_that_their_files_always_had(
    tmp_path: Path,
) -> None:
    routes = [np.arange(4 * n, dtype=np.uint8).reshape(n, 2, 2) for n in (6, 4)]
    samples = []
    for i, own in enumerate(routes):
        arrays = {"logps": np.zeros(len(own) - 2), "routes": (own[:2], own[2:])}
        tokens = np.arange(len(own) - 2, dtype=np.int32)
        samples.append(Sample.drawn(i, PROMPT, tokens, STOPPED, 3, **arrays))
    rollout = Rollout(tuple(samples), (0, 0))
    for own, values in zip(dumped(rollout, tmp_path).token_arrays["routes"], routes, strict=True):
        np.testing.assert_array_equal(own, values)
    stored = load_file(tmp_path / "dump" / ARRAYS)
    np.testing.assert_array_equal(stored["routed_experts"], np.concatenate(routes))
    assert stored["routed_experts.lengths"].tolist() == [6, 4]


def dumped(rollout: Rollout, tmp_path: Path) -> Rollout:
    (tmp_path / "config.yaml").write_text("")
    about = About(
        cause="",
        step=1,
        update=0,
        members=[0],
        lr=0.0,
        weights_version=3,
        updates=3,
        finish_reasons=[STOPPED] * 2,
        groups=[0, 0],
    )
    batch = TrainBatch(rollout, np.zeros(2, np.float32))
    write(tmp_path / "dump", Dump(about, batch), tmp_path / "config.yaml", None)
    return read(tmp_path / "dump").batch.rollout
