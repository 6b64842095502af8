"""Whole GRPO runs on 2, 4 and 8 ranks against one process and against a committed trajectory, and weights moved
between layouts of up to 8 ranks, each several times on either side, through the real rooms under the real launchers: on
processors `mindgrpo launch`, over MCCL msrun alone.

Does not prove that the shared algorithm is right (one process could be wrong alike: the tests against independent
oracles say), nor anything of other devices, several hosts, the trainer's own loop or speed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batch_variants import BATCH_VARIANTS, of_whole_batch
from distributed import cases as c
from golden_images import read_golden_images
from golden_models import BOUNDS, read_golden, read_scores
from small_generators import HAS_AVX512
from small_runs import TOKEN_ARRAYS, decoded

from mindgrpo.algorithm.estimators import REJECTIONS
from mindgrpo.algorithm.surrogates import LOSS_TYPES

HERE = Path(__file__).resolve().parent
JOB = HERE / "distributed" / "job.py"
GOLDEN: dict[str, Any] = json.loads((HERE / "golden" / "trajectory.json").read_text())
LAUNCH_SECONDS = 900
# float32 carries 1.2e-7 relative; sums over some 100 terms, 3 layers and 3 updates widen it by two to three orders.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}

World = list[dict[str, Any]]
Which = tuple[int, str]
Launch = Callable[[Which], tuple[Path, World]]


def _command(which: Which, folder: Path) -> list[str]:
    world, backend = which
    program = [str(JOB), str(folder), backend]
    if world == 1:
        return [sys.executable, *program]
    if backend != "device":
        # Forks the ranks from one process that has imported what they need.
        return [sys.executable, "-m", "mindgrpo", "launch", "--ranks", str(world), "--", *program]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    beside = Path(sys.executable).with_name("msrun")
    msrun = str(beside) if beside.exists() else shutil.which("msrun") or "msrun"
    counts = [f"--worker_num={world}", f"--local_worker_num={world}"]
    place = [f"--master_port={port}", "--join=True", f"--log_dir={folder / 'logs'}"]
    return [msrun, *counts, *place, *program]


def _last_words(folder: Path) -> str:
    logs = sorted((folder / "logs").rglob("worker_*.log")) + [folder / "output.log"]
    tails = [f"== {log.name}\n" + log.read_text()[-1500:] for log in logs if log.exists()]
    return "\n".join(tails)


def _crashed_at_its_end(folder: Path) -> bool:
    """Whether one rank was ended by SIGSEGV, as MindSpore 2.9.0's cluster was seen to do once after all had written."""
    codes = re.findall(r"Error code: (-?\d+)", (folder / "output.log").read_text())
    return codes == [str(-signal.SIGSEGV)]


def _launch(which: Which, folder: Path, names: Sequence[str]) -> World:
    (folder / "cases.json").write_text(json.dumps(names))
    environment = os.environ | {"GLOG_v": "3", "OMP_NUM_THREADS": "1"}
    environment["MINDGRPO_LOG_DIR"] = str(folder / "logs")
    if "TEST_ALLOCATOR" in environment:
        environment["LD_PRELOAD"] = environment["TEST_ALLOCATOR"]
    if which[1] == "device":
        # The portable reference in all: MindSpore's own operations, and waits in Python.
        environment["MINDGRPO_NATIVE"] = "0"
        # A stage may wait for others to compile; MindSpore's own limit is half a minute.
        environment["MS_NODE_TIMEOUT"] = str(LAUNCH_SECONDS)
    # The scheduler and every rank find the programs and mindgrpo as this process does.
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment.get('PATH', '')}"
    environment["PYTHONPATH"] = f"{HERE.parent}:{HERE}:{environment.get('PYTHONPATH', '')}"
    with (folder / "output.log").open("w") as output:
        process = subprocess.Popen(
            _command(which, folder),
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=folder,
            start_new_session=True,
        )
        try:
            status: int | str = process.wait(LAUNCH_SECONDS)
        except subprocess.TimeoutExpired:
            status = f"nothing after {LAUNCH_SECONDS} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    results = [folder / f"rank_{rank}.json" for rank in range(which[0])]
    ended_well = status == 0 or (which[1] == "device" and _crashed_at_its_end(folder))
    if not ended_well or not all(path.exists() for path in results):
        pytest.fail(
            f"{which[0]} ranks over {which[1]} ended with {status}\n{_last_words(folder)}",
            pytrace=False,
        )
    return [json.loads(path.read_text()) for path in results]


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Launch:
    """Starts a world once, whichever test asks first, with the cases of the session's tests.

    A world that failed fails all its tests at once.
    """
    chosen = {
        case
        for item in request.session.items
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
        if isinstance(case := item.callspec.params.get("case"), c.Case)
    }
    names = [case.name for case in c.CASES if case in chosen | {*map(_alone, chosen)}]

    @cache
    def attempt(which: Which) -> tuple[Path, World | BaseException]:
        folder = tmp_path_factory.mktemp("world_{}_{}".format(*which))
        try:
            return folder, _launch(which, folder, names)
        except BaseException as error:
            return folder, error

    def launched(which: Which) -> tuple[Path, World]:
        if which[1] == "high" and not HAS_AVX512:
            pytest.skip("oneDNN multiplies bfloat16 with AVX-512 only")
        folder, outcome = attempt(which)
        if isinstance(outcome, BaseException):
            raise outcome
        return folder, outcome

    return launched


def _alone(case: c.Case) -> c.Case:
    return next(each for each in c.ALONE if each.recipe == case.recipe)


def _steps(launch: Launch, case: c.Case, rank: int = 0) -> list[dict[str, Any]]:
    _, ranks = launch(case.world)
    steps: list[dict[str, Any]] = ranks[rank]["cases"][case.name]["steps"]
    return steps


def _numbers(steps: list[dict[str, Any]], name: str) -> np.ndarray:
    return np.array([step[name] for step in steps])


every_case = pytest.mark.parametrize("case", c.CASES, ids=lambda case: case.name)
spread_case = pytest.mark.parametrize("case", c.SPREAD, ids=lambda case: case.name)
several_ranks = pytest.mark.parametrize("world", c.WORLDS[1:], ids=lambda w: f"{w[0]} over {w[1]}")


@every_case
def test_the_golden_tokens_are_sampled_at_every_step(launch: Launch, case: c.Case) -> None:
    for found, expected in zip(_steps(launch, case), GOLDEN[case.recipe]["steps"], strict=True):
        assert found["lengths"] == expected["lengths"]
        assert found["tokens"] == expected["tokens"]


@every_case
def test_every_update_has_the_golden_figures(
    launch: Launch, case: c.Case, subtests: pytest.Subtests
) -> None:
    found, expected = _steps(launch, case), GOLDEN[case.recipe]["steps"]
    for figure in ("loss", "grad_norm", "kl", "entropy"):
        with subtests.test(figure=figure):
            pair = _numbers(found, figure), _numbers(expected, figure)
            np.testing.assert_allclose(*pair, **CLOSE)


@spread_case
def test_the_likeliest_completions_are_those_of_one_process(launch: Launch, case: c.Case) -> None:
    if not case.in_loop:
        pytest.skip("plain operations compile another graph for it")
    _, ranks = launch(case.world)
    _, alone = launch((1, "shared_memory"))
    expected = alone[0]["cases"][_alone(case).name]["greedy"]
    assert len(expected) == c.NUM_PROMPTS
    assert all(rank["cases"][case.name]["greedy"] == expected for rank in ranks)


@every_case
def test_the_same_groups_are_replaced(launch: Launch, case: c.Case) -> None:
    _, ranks = launch(case.world)
    expected = GOLDEN[case.recipe].get("replaced", [])
    assert all(rank["cases"][case.name]["replaced"] == expected for rank in ranks)
    assert (sum(expected) > 0) == (c.RECIPES[case.recipe].resampling_rounds > 0)


@every_case
def test_the_same_tokens_are_clipped(launch: Launch, case: c.Case) -> None:
    expected = _numbers(GOLDEN[case.recipe]["steps"], "clip_fraction")
    np.testing.assert_allclose(_numbers(_steps(launch, case), "clip_fraction"), expected, rtol=1e-9)


@spread_case
def test_the_figures_of_every_token_are_those_of_one_process(launch: Launch, case: c.Case) -> None:
    for step, alone in zip(_steps(launch, case), _steps(launch, _alone(case)), strict=True):
        assert step["lengths"] == [row["length"] for row in step["per_token"]]
        for row, expected in zip(step["per_token"], alone["per_token"], strict=True):
            assert row.keys() == expected.keys()
            found, other = decoded(row), decoded(expected)
            for name in row.keys() & set(TOKEN_ARRAYS):
                # Half precision rounds by 5e-4, and a difference of two log-probs has the error of both.
                np.testing.assert_allclose(
                    found[name].astype(float), other[name], 1e-3, 1e-4, err_msg=name
                )


@spread_case
def test_routers_choose_by_the_margins_of_one_process(launch: Launch, case: c.Case) -> None:
    found, alone = (_numbers(_steps(launch, each), "margins") for each in (case, _alone(case)))
    if "num_experts" not in c.RECIPES[case.recipe].model:
        assert not found.any()
        return
    assert (alone[:, 1] > 0).all() and (alone[:, 1] < alone[:, 0]).all()
    np.testing.assert_allclose(found.astype(float), alone.astype(float), **CLOSE)


@pytest.mark.parametrize(
    "case", [own for own in c.SPREAD if own.replays], ids=lambda case: case.name
)
def test_routes_go_to_the_ranks_that_compute_their_tokens(launch: Launch, case: c.Case) -> None:
    # One of two layers with experts is its stage's, and what it has generated it has.
    for step in _steps(launch, case):
        whole, *by_rank = step["routes_carried"]
        assert all(0 < received < whole / 2 for received in by_rank)


@every_case
def test_the_trained_parameters_have_the_golden_sums_and_norms(
    launch: Launch, case: c.Case
) -> None:
    _, ranks = launch(case.world)
    found, expected = ranks[0]["cases"][case.name], GOLDEN[case.recipe]
    assert found["norms"].keys() == expected["norms"].keys()
    for name, norm in expected["norms"].items():
        np.testing.assert_allclose(found["norms"][name], norm, err_msg=name, **CLOSE)
        # A sum of n elements that are each within atol.
        slack = CLOSE["atol"] * 67 * 32
        np.testing.assert_allclose(found["sums"][name], expected["sums"][name], atol=slack)


@spread_case
def test_every_parameter_element_is_that_of_one_process(launch: Launch, case: c.Case) -> None:
    folder, _ = launch(case.world)
    alone, _ = launch((1, "shared_memory"))
    with (
        np.load(folder / f"{case.name}.npz") as found,
        np.load(alone / f"{_alone(case).name}.npz") as expected,
    ):
        assert set(found) == set(expected)
        for name in expected:
            np.testing.assert_allclose(found[name], expected[name], err_msg=name, **CLOSE)


@pytest.mark.parametrize("name", BATCH_VARIANTS)
def test_a_loss_over_ranks_has_the_gradients_of_the_whole_batch(launch: Launch, name: str) -> None:
    ranks = [rank["losses"][name] for rank in launch(c.LOSSES_WORLD)[1]]
    assert all(rank["report"] == ranks[0]["report"] for rank in ranks)
    loss, slopes = of_whole_batch(*BATCH_VARIANTS[name])
    np.testing.assert_allclose(ranks[0]["report"]["loss"], loss, rtol=1e-6, atol=1e-8)
    norm = np.linalg.norm(np.concatenate(slopes, axis=1))
    np.testing.assert_allclose(ranks[0]["report"]["grad_norm"], norm, rtol=1e-5)
    whole = [rank["gradients"] for rank in ranks if np.any(np.concatenate(rank["gradients"], 1))]
    assert len(whole) == 2
    for gradients in whole:
        for found, expected in zip(gradients, slopes, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-7)


def test_the_variants_over_ranks_have_every_aggregation_and_choice_and_are_told_apart() -> None:
    """A layout changes no formula: test_loss_cell.py has all losses, test_advantages.py all estimators and masks."""
    losses, advantages = zip(*BATCH_VARIANTS.values(), strict=True)
    aggregations = {own.aggregation for own in LOSS_TYPES.values()} | {"prompt_mean"}
    assert {one.aggregation for one in losses} == aggregations
    assert any(one.penalises for one in losses) and any(one.leaves_out for one in losses)
    assert any(getattr(one, name) is not None for one in advantages for name in REJECTIONS)
    found = [of_whole_batch(*pair) for pair in BATCH_VARIANTS.values()]
    assert len({np.concatenate(slopes, 1).tobytes() for _, slopes in found}) == len(found)
    assert all(np.abs(np.concatenate(slopes, 1)).max() > 1e-3 for _, slopes in found)


@spread_case
def test_every_rank_reports_the_same_bits(launch: Launch, case: c.Case) -> None:
    first = _steps(launch, case)
    assert all(_steps(launch, case, rank) == first for rank in range(1, case.world[0]))


@spread_case
def test_ranks_that_hold_the_same_weights_hold_the_same_bits_after_every_step(
    launch: Launch, case: c.Case
) -> None:
    _, ranks = launch(case.world)
    assert [rank["cases"][case.name]["differences"] for rank in ranks] == [[]] * len(ranks)


@every_case
def test_generator_and_trainer_agree_on_log_probs_after_every_reshard(
    launch: Launch, case: c.Case
) -> None:
    assert _numbers(_steps(launch, case), "gap").max() <= (0 if case.batch_invariant else 1e-4)


@pytest.mark.parametrize(
    "case", [case for case in c.SPREAD if case.any_layout], ids=lambda case: case.name
)
def test_the_first_step_has_the_bits_of_one_process(launch: Launch, case: c.Case) -> None:
    step, alone = (_steps(launch, each)[0] for each in (case, _alone(case)))
    for name in ("tokens", "logps"):
        assert step[name] == alone[name]
    for name in ("loss", "kl", "entropy"):
        assert step[name][0] == alone[name][0]


@pytest.mark.parametrize("recipe", c.RECIPES)
def test_the_golden_trajectory_clips_gradients_and_learns(recipe: str) -> None:
    steps = GOLDEN[recipe]["steps"]
    assert len(steps) == c.NUM_STEPS
    norms = _numbers(steps, "grad_norm")
    # A second update on the same samples may have little left to do where their ratios are clipped.
    firsts = norms[:, 0] if c.RECIPES[recipe].loss_config else norms
    assert firsts.min() > c.MAX_GRAD_NORM
    assert (_numbers(steps, "kl").min() > 0) == c.RECIPES[recipe].has_reference
    assert len({tuple(step["tokens"]) for step in steps}) == c.NUM_STEPS
    assert len(set(steps[0]["lengths"])) > 1


@pytest.mark.parametrize("recipe", c.RECIPES)
def test_the_golden_trajectory_clips_ratios_where_the_policy_has_moved(recipe: str) -> None:
    of, fractions = c.RECIPES[recipe], _numbers(GOLDEN[recipe]["steps"], "clip_fraction")
    clips = LOSS_TYPES[of.loss_config.get("loss_type", "grpo")].epsilon is not None
    first_of_all = 0 if clips and of.old_of_generator else 1
    assert not fractions[:, :first_of_all].any()
    moved = fractions[:, first_of_all:]
    assert ((moved > 0) == clips).all() and (moved < 1).all()


def test_the_golden_trajectory_leaves_out_some_samples_that_older_weights_wrote() -> None:
    advantages = c.RECIPES["partial"].advantages
    assert {name for name in REJECTIONS if name in advantages} == {*REJECTIONS}
    rejected = _numbers(GOLDEN["partial"]["steps"], "rejected")
    assert rejected[0] == 0 and (rejected[1:] > 0).all() and (rejected < 1).all()


def test_the_golden_trajectory_has_conversations_by_the_weights_of_several_steps() -> None:
    steps = GOLDEN["partial"]["steps"]
    assert any(0 < step["stale"] < 1 for step in steps)
    for name in ("tools", "environment", "partial"):
        assert max(GOLDEN[name]["steps"][0]["turns"]) > 1


@pytest.mark.parametrize(
    ("world", "train", "infer"),
    [
        (world, *pair)
        for world in (c.MOVED_WORLD, c.DEVICE_MOVED_WORLD)
        for pair in c.pairs_of(world)
    ],
    ids=lambda g: "x".join(map(str, g)),
)
def test_weights_moved_there_and_back_are_bit_for_bit_a_fresh_fill(
    launch: Launch, world: Which, train: tuple[int, ...], infer: tuple[int, ...]
) -> None:
    _, ranks = launch(world)
    trips = [rank["round_trips"][c.pair_name(train, infer)] for rank in ranks]
    # There, back, and there again with two bytes an element.
    for way, target in enumerate((infer, train, infer)):
        assert [trip[way]["wrong"] for trip in trips] == [[]] * len(ranks)
        holding = [trip[way]["held"] > 0 for trip in trips]
        assert holding == [rank < np.prod(target) for rank in range(len(ranks))]
        received = sum(trip[way]["received"] for trip in trips)
        assert received == trips[0][way]["lower_bound"]
    bounds = [way["lower_bound"] for way in trips[0]]
    assert 2 * bounds[2] == bounds[0]


@pytest.mark.parametrize("source", c.SAVED, ids=lambda g: "x".join(map(str, g)))
def test_what_ranks_save_they_load_in_another_layout_bit_for_bit(
    launch: Launch, source: tuple[int, int, int]
) -> None:
    _, ranks = launch(c.MOVED_WORLD)
    target = c.SAVED[(c.SAVED.index(source) + 1) % len(c.SAVED)]
    found = [rank["checkpoints"][c.pair_name(source, target)] for rank in ranks]
    assert all(one["same"] and one["sums"] for one in found)
    assert [one["held"] > 0 for one in found] == [r < np.prod(target) for r in range(len(ranks))]
    assert len(found[0]["files"]) == np.prod(source), "every rank of the layout writes its share"


@pytest.mark.parametrize("case", c.SHARDED, ids=lambda case: case.name)
def test_a_sharded_optimizer_has_the_bits_of_one_of_whole_parameters_and_less_of_them(
    launch: Launch, case: c.Sharded
) -> None:
    for rank in launch(case.world)[1]:
        found = rank["sharded"]["compared"][case.name]
        assert found["wrong"] == []
        norms = np.array(found["norms"]).reshape(-1, 2)
        np.testing.assert_array_equal(*norms[1:].T)
        np.testing.assert_allclose(*norms[0], rtol=1e-6)
        assert norms[1:].min() > c.MAX_GRAD_NORM
        whole, own = found["state_bytes"]
        replicas = case.mesh[0]
        # Rows that no number of ranks divides are rounded up: of adapters there are few.
        assert whole <= own * replicas <= whole * (2 if case.lora else 1.02)


@pytest.mark.parametrize("case", c.GOLDEN, ids=lambda case: case.name)
def test_log_probs_and_every_gradient_on_several_ranks_are_those_of_transformers(
    launch: Launch, case: c.Golden
) -> None:
    """Of models with experts, and of one that sees images."""
    found = [rank["golden"][case.name] for rank in launch(case.world)[1]]
    sees_images = case.family == c.SEES_IMAGES
    golden = read_golden_images() if sees_images else read_golden(case.family)
    assert sum(one["samples"] for one in found) >= len(golden.rollout)
    assert max(one["logps"] for one in found) < BOUNDS.logps
    gaps = [gap for one in found for gap in one["gradients"].items()]
    assert {name for name, _ in gaps} == set(golden.gradients)
    assert all(gap < BOUNDS.gradients for _, gap in gaps), max(gaps, key=itemgetter(1))


def test_images_that_ranks_encode_together_have_the_features_of_one_rank_in_every_bit(
    launch: Launch,
) -> None:
    (alone,) = launch((1, "shared_memory"))[1]
    assert len({*alone["features"]}) == len(alone["features"])
    for world in {case.world for case in c.GOLDEN if case.backend == "shared_memory"}:
        for rank in launch(world)[1]:
            assert rank["features"] == alone["features"]


@pytest.mark.parametrize("name", c.SCORED)
def test_scores_of_a_classifier_are_those_of_transformers_with_the_same_bits_in_every_layout(
    launch: Launch, name: str
) -> None:
    alone = launch((1, "shared_memory"))[1][0]["scores"]["alone"]["random"]
    assert len({*alone}) == len(alone)
    golden = read_scores(c.SCORED_FAMILY)
    for rank in launch((prod(c.SCORED[name]), "shared_memory"))[1]:
        found = rank["scores"][name]
        assert np.abs(np.array(found["golden"]) - golden.scores).max() < BOUNDS.logps
        assert found["random"] == alone


@pytest.mark.parametrize("case", c.CRITICS, ids=lambda case: case.name)
def test_a_critic_learns_the_same_values_in_every_layout(
    launch: Launch, case: c.CriticCase
) -> None:
    alone = launch((1, "shared_memory"))[1][0]["critics"]["alone"]
    assert alone["losses"][-1] < alone["losses"][0]
    for rank in launch(case.world)[1]:
        found = rank["critics"][case.name]
        for name, expected in alone.items():
            bound = 2e-5 if case.dtype == "float32" else 2e-2
            np.testing.assert_allclose(found[name], expected, rtol=bound, atol=bound)


def test_what_a_sharded_optimizer_saves_goes_on_bit_for_bit_over_other_replicas_and_whole(
    launch: Launch,
) -> None:
    _, ranks = launch(c.MOVED_WORLD)
    assert [rank["sharded"]["moved"] for rank in ranks] == [[]] * len(ranks)


@several_ranks
def test_sums_between_graphs_are_exact_and_the_same_bits_everywhere(
    launch: Launch, world: Which
) -> None:
    found = [rank["communication"] for rank in launch(world)[1]]
    assert all(part["sum"] for part in found)
    assert all(part["half"] == part["half_expected"] for part in found)
    assert len({part["noise"] for part in found}) == 1


@several_ranks
def test_an_object_larger_than_the_buffers_reaches_every_rank(launch: Launch, world: Which) -> None:
    assert all(rank["communication"]["gathered"] for rank in launch(world)[1])


@several_ranks
def test_bytes_go_from_every_rank_to_each_that_they_are_for(launch: Launch, world: Which) -> None:
    assert all(rank["communication"]["exchanged"] for rank in launch(world)[1])


@several_ranks
def test_a_link_delivers_in_order_though_its_receiver_begins_late(
    launch: Launch, world: Which
) -> None:
    marks = [rank["communication"]["link"] for rank in launch(world)[1]]
    first = [200 + i for i in range(20)]
    second = [mark for i in range(20) for mark in (100 + i, i)]
    assert marks == [first, second] + [[]] * (world[0] - 2)


@several_ranks
def test_sums_inside_a_graph_are_right_on_either_backend(launch: Launch, world: Which) -> None:
    for rank in launch(world)[1]:
        found = rank["sum_in_graph"]
        assert found["error"] <= 1e-6 * found["largest"]


@several_ranks
def test_a_sum_inside_a_graph_has_the_same_bits_on_every_rank(launch: Launch, world: Which) -> None:
    bits = [rank["sum_in_graph"]["bits"] for rank in launch(world)[1]]
    assert len(bits[0]) == (4 if world[1] == "device" else 2) and bits == [bits[0]] * world[0]
    for rank in launch(world)[1]:
        errors = rank["sum_in_graph"]["noise_errors"]
        # Sums of up to 15, of which float32 keeps 24 bits and float16, rounded at every addition, 11.
        assert max(errors[:2]) < 1e-5 and max(errors[2:], default=0.0) < 8 * 2.0**-8


@several_ranks
def test_a_gather_inside_a_graph_has_every_members_own_in_order(
    launch: Launch, world: Which
) -> None:
    for rank in launch(world)[1]:
        found = rank["sum_in_graph"]
        assert found["gathered"] and found["rows_error"] <= 1e-6 * found["largest"]


@several_ranks
def test_tokens_that_ranks_share_out_are_gathered_and_summed_there_and_back(
    launch: Launch, world: Which
) -> None:
    for rank in launch(world)[1]:
        found = rank["tokens_in_graph"]
        assert found["gathered"] and found["d_whole"]
        assert max(found["errors"]) < 1e-5
        if world[1] != "device":
            assert found["same_as_a_sum"]


@several_ranks
def test_ranks_that_share_cores_evenly_compute_on_one_each_and_leave_it(
    launch: Launch, world: Which
) -> None:
    cores = [rank["cores"] for rank in launch(world)[1]]
    everywhere = cores[0]["before"]
    count, num_ranks = len(everywhere), len(cores)
    assert all(rank["before"] == rank["after"] == everywhere for rank in cores)
    is_shared = num_ranks > count and num_ranks % count == 0 and world[1] != "device"
    owned = [[core] for core in everywhere] * (num_ranks // count)
    expected = owned if is_shared else [everywhere] * num_ranks
    for at in ("inner", "outer"):
        assert [rank[at] for rank in cores] == expected


@several_ranks
def test_nothing_of_a_run_is_left_in_shared_memory(launch: Launch, world: Which) -> None:
    names = {rank["segments"] for rank in launch(world)[1]}
    assert len(names) == 1
    assert not list(Path("/dev/shm").glob(names.pop() + "*"))
