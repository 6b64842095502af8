"""Where roles' bytes are between phases, on real pools of this process's memory.

Does not prove that a graph refuses to run on released weights, nor anything about another device's memory.
"""

from __future__ import annotations

import gc

import numpy as np
import psutil
import pytest
from small_runs import MODEL

from mindgrpo.backend.contract import Pool
from mindgrpo.backend.cpu.backend import CpuBackend
from mindgrpo.config import Config
from mindgrpo.errors import UserError
from mindgrpo.memory.residency import PHASES, CountedPool, Location, Residency
from mindgrpo.models.decoder_config import decoder_config
from mindgrpo.plan.run_plan import plan_run

MIB = 1 << 20


@pytest.fixture(scope="module")
def backend() -> CpuBackend:
    return CpuBackend({})


def filled(backend: CpuBackend, num_bytes: int, seed: int = 0) -> tuple[Pool, np.ndarray]:
    """A pool of random bits (NaNs among them), and a view of them."""
    pool = backend.pool(num_bytes // 4)
    with pool.on_host() as memory:
        view = memory.view(0, (num_bytes // 4,))
    view.view(np.uint32)[...] = np.random.default_rng(seed).integers(
        0, 2**32, view.size, dtype=np.uint32
    )
    return pool, view


def rss() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


def test_what_leaves_the_device_comes_back_bit_for_bit(backend: CpuBackend) -> None:
    residency = Residency()
    kept: dict[str, tuple[np.ndarray, bytes]] = {}
    for seed, name in enumerate(("policy", "optimizer", "reference")):
        pool, view = filled(backend, 3 * MIB + 4 * seed, seed)
        residency.register(name, [pool], rebuilt=False, filled=True)
        kept[name] = view, view.tobytes()
    for phase in ("reference", "update", "rollout", "old_logps", "reference", "sync_reference"):
        residency.activate(phase)
        for name, (view, bits) in kept.items():
            here = name in PHASES[phase]
            expected = Location.DEVICE if here else Location.HOST
            assert residency.roles[name].location is expected
            assert (view.tobytes() == bits) is here


def test_a_parameter_sees_its_weights_again_after_they_were_away(backend: CpuBackend) -> None:
    pool, view = filled(backend, MIB)
    view[...] = np.arange(view.size)
    parameter = pool.parameter("here", 0, view.shape)
    pool.offload()
    pool.load()
    np.testing.assert_array_equal(parameter.asnumpy(), np.arange(view.size))


def test_memory_of_a_rebuilt_role_goes_to_the_next_and_to_the_system_where_that_is_elsewhere(
    backend: CpuBackend,
) -> None:
    size = 64 * MIB
    residency = Residency()
    pool, view = filled(backend, size)
    small, _ = filled(backend, MIB)
    gradients = backend.pool(size // 4)
    residency.register("kv_cache", [pool], rebuilt=True, filled=True)
    residency.register("policy", [small], rebuilt=False, filled=True)
    residency.register("gradients", [gradients], rebuilt=True, filled=False)
    before = rss()
    residency.activate("update")
    assert residency.roles["kv_cache"].location is Location.RELEASED
    assert not view.any() and not gradients.view(0, (size // 4,)).any()
    gradients.view(0, (size // 4,))[...] = 1
    assert rss() - before == pytest.approx(0, abs=4 * MIB)
    residency.register("generator", [CountedPool(size)], rebuilt=True, filled=False)
    residency.activate("reshard")
    assert before - rss() == pytest.approx(size, abs=4 * MIB)


def test_a_role_on_the_host_does_not_stay_on_the_device_too(backend: CpuBackend) -> None:
    size = 64 * MIB
    pool, view = filled(backend, size)
    bits = view[:1000].tobytes()
    before = rss()
    pool.offload()
    assert rss() - before == pytest.approx(0, abs=4 * MIB)
    pool.load()
    assert rss() - before == pytest.approx(0, abs=4 * MIB)
    assert view[:1000].tobytes() == bits


def test_a_released_pool_comes_back_as_zeros_also_after_it_was_on_the_host(
    backend: CpuBackend,
) -> None:
    pool, view = filled(backend, MIB)
    pool.offload()
    pool.release()
    pool.load()
    assert not view.any()


def test_a_range_of_a_pool_has_one_parameter(backend: CpuBackend) -> None:
    pool = backend.pool(MIB // 4)
    pool.parameter("one", 0, (8, 8))
    with pytest.raises(ValueError, match="two is another"):
        pool.parameter("two", 0, (64,))


def budgeted(backend: CpuBackend, budget: int) -> Residency:
    residency = Residency(budget)
    for name, size in (("policy", 2), ("gradients", 2), ("optimizer", 4), ("generator", 1)):
        residency.register(name, [backend.pool(size * MIB // 4)], rebuilt=False, filled=True)
    return residency


def test_a_budget_that_is_too_small_is_told_in_one_sentence_with_the_remedy(
    backend: CpuBackend,
) -> None:
    residency = budgeted(backend, 7 * MIB)
    with pytest.raises(UserError) as raised:
        residency.check_budget()
    sentence = str(raised.value)
    assert "\n" not in sentence
    for part in (
        "Phase update needs 8.0 MiB",
        "policy 2.0 MiB",
        "gradients 2.0 MiB",
        "optimizer 4.0 MiB",
        "context.max_device_memory allows 7.0 MiB",
        "parallel_config.model_parallel",
    ):
        assert part in sentence


def test_a_phase_over_budget_moves_nothing(backend: CpuBackend) -> None:
    residency = budgeted(backend, 7 * MIB)
    before = {name: role.location for name, role in residency.roles.items()}
    with pytest.raises(UserError):
        residency.activate("update")
    assert {name: role.location for name, role in residency.roles.items()} == before
    residency.activate("reshard")


def test_a_budget_that_is_just_enough_is_accepted(backend: CpuBackend) -> None:
    budgeted(backend, 8 * MIB).check_budget()


def test_the_ledger_has_the_peak_of_each_phase_and_what_was_moved(backend: CpuBackend) -> None:
    residency = budgeted(backend, 8 * MIB)
    for phase in ("update", "reshard", "update"):
        residency.activate(phase)
    ledger = residency.ledger
    assert ledger.peak_by_phase == {"update": 8 * MIB, "reshard": 3 * MIB}
    # Out: the generator; then gradients and moments out and the generator in; then all of it back.
    assert ledger.transfer_bytes == (1 + 7 + 7) * MIB
    assert ledger.transfer_seconds > 0


def test_roles_that_a_run_lacks_are_passed_over(backend: CpuBackend) -> None:
    residency = budgeted(backend, 8 * MIB)
    residency.activate("reference")
    assert all(role.location is Location.HOST for role in residency.roles.values())
    phases = {row.phase: row.total for row in residency.table()}
    assert phases["reference"] == 0 and phases["reshard"] == 3 * MIB


def test_a_role_that_only_stays_leaves_room_for_what_graphs_take() -> None:
    copied = []
    for reserved in (0, 11):
        memory = Residency(40, keeps=True, reserved={"old_logps": reserved})
        for role in ("policy", "reference"):
            memory.register(role, [CountedPool(15)], rebuilt=False, filled=True)
        memory.activate("old_logps")
        copied.append(memory.ledger.transfer_bytes)
    assert copied == [0, 15]


def test_the_optimizers_state_is_planned_whole_and_never_given_up_between_phases() -> None:
    lengths = {"max_prompt_length": 32, "sampling_config": {"max_tokens": 32}}
    config = Config.model_validate({"generate_config": lengths})
    sizes = plan_run(config, decoder_config(MODEL, "here"), 1).bytes_by_role(0, {})
    assert sizes["optimizer"] == 2 * sizes["gradients"] == 2 * sizes["policy"] > 0
    memory = Residency()
    memory.add({role: [CountedPool(size)] for role, size in sizes.items()})
    by_location = {role.name: role.location for role in memory.roles.values()}
    assert by_location["optimizer"] is by_location["policy"] is Location.DEVICE
    assert by_location["gradients"] is by_location["kv_cache"] is Location.RELEASED
    memory.activate("update")
    memory.activate("rollout")
    assert memory.roles["optimizer"].location is Location.HOST
