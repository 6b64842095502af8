"""The plain decoder's cache in pages: a prompt is there once for its samples, and what is planned is what is taken.

Does not prove that a device's fused attention reads pages: test_ascend_caches.py does, with its double.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from small_generators import (
    CONFIG,
    GROUP,
    LAYOUT,
    MAX_TOKENS,
    SETTINGS,
    VOCAB,
    assert_same,
    generator_with,
    random_weights,
    run,
)

from mindgrpo.algorithm.sample import Request
from mindgrpo.backend.cpu.backend import CpuBackend
from mindgrpo.backend.kernels.contract import Kernels
from mindgrpo.backend.kernels.shapes import Heads
from mindgrpo.cli.plan import shapes_of
from mindgrpo.config import load_config
from mindgrpo.plan.run_plan import plan_run
from mindgrpo.rollout.embedded.engine import EmbeddedEngine
from mindgrpo.rollout.embedded.kv_cache import KVCacheConfig, KVCacheSizes
from mindgrpo.rollout.embedded.pages import PageTable

ROOT = Path(__file__).resolve().parent.parent
USERS = ROOT / "tests" / "data" / "users_grpo_config.yaml"
LONGEST = 41


def prompts() -> list[np.ndarray]:
    """Ones that end before, at and behind the ends of their pages of 16, and the shortest."""
    rng = np.random.default_rng(5)
    return [rng.integers(1, VOCAB, n).astype(np.int32) for n in (41, 33, 32, 17, 16, 1, 40, 34)]


def requests_of(group: int) -> list[Request]:
    """The same samples with any `group` a request."""
    numbers = [(prompt, GROUP * i) for i, prompt in enumerate(prompts())]
    return [
        Request(prompt, tuple(range(first, first + group)))
        for prompt, start in numbers
        for first in range(start, start + GROUP, group)
    ]


def test_samples_that_share_pages_are_those_of_prompts_of_their_own() -> None:
    """Groups in few slots, whose pages are used anew, and single samples that wait for pages."""
    backend = CpuBackend({})
    weights = random_weights(backend)
    entered: list[int] = []

    class Counted(PageTable):
        def enter(self, slots: list[int], prompt: int, limits: list[int]) -> None:  # type: ignore[override]
            super().enter(slots, prompt, limits)
            entered.append(len(slots))
            assert (
                self.num_free >= 0
                and len({*self.pages(np.arange(8), 64)[:, 0].tolist()} - {0, 1}) > 0
            )

    def made(slots: int, group: int) -> EmbeddedEngine:
        return generator_with(
            weights, backend, Kernels(), slots=slots, copies=group, max_prompt=LONGEST
        )

    alone = run(made(4 * GROUP, 1), requests_of(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mindgrpo.rollout.embedded.plain.PageTable", Counted)
        assert_same(run(made(2 * GROUP, GROUP), requests_of(GROUP)), alone)
        assert entered == [GROUP] * len(prompts())
        # Memory for the prompts of groups, and samples of which each has its own.
        mixed = requests_of(1)[: 3 * GROUP] + requests_of(GROUP)[3:]
        assert_same(run(made(2 * GROUP, GROUP), mixed), alone)
    assert entered[len(prompts()) :] == [1] * 3 * GROUP + [GROUP] * 5


def test_a_prompts_full_pages_are_shared_and_all_come_back() -> None:
    room = KVCacheConfig(slots=8, group=4, prompts=2, max_prompt=LONGEST, max_tokens=MAX_TOKENS)
    assert (room.page_size, room.shared_pages, room.own_pages, room.longest) == (16, 2, 2, 64)
    table = PageTable(room, kv_heads=2)
    free = table.num_free
    table.enter([0, 2, 5], 35, [MAX_TOKENS, 1, 14])
    # Positions 0 to 31 are shared; the last ones written are 43, 34 and 47: a page each.
    assert free - table.num_free == 2 + 3
    pages = table.pages(np.arange(8), 64).reshape(8, 2, 4)
    for slot in (2, 5):
        np.testing.assert_array_equal(pages[0, :, :2], pages[slot, :, :2])
    np.testing.assert_array_equal(pages[:, 1], pages[:, 0] + 1)
    assert len({*pages[[0, 2, 5], 0, 2].tolist()} - {0}) == 3 and (pages[[1, 3, 4], 0] == 0).all()
    source, rows = table.prompt_copies(1, LONGEST, 35, [0, 2, 5])
    # Once 32 positions, and two more for each sample; of each, two heads.
    assert len(source) == len(rows) == 2 * (32 + 3 * 2) == len({*rows.tolist()})
    tokens, heads = np.divmod(source, 2)
    assert (tokens[:64:2] == LONGEST + np.arange(32)).all()
    assert (rows // 16 % 2 == heads).all() and (rows % 16 == (tokens - LONGEST) % 16).all()
    table.leave([0, 5])
    assert free - table.num_free == 2 + 1
    table.leave([2])
    assert table.num_free == free
    # The longest of everything has room, and no sample more.
    for first in (0, 4):
        assert table.has_room(LONGEST, [MAX_TOKENS] * 4)
        table.enter(range(first, first + 4), LONGEST, [MAX_TOKENS] * 4)
    assert not table.has_room(17, [1])


def test_memory_that_is_planned_is_memory_that_is_taken() -> None:
    backend = CpuBackend({})
    room = KVCacheConfig(16, GROUP, None, LONGEST, MAX_TOKENS)
    made = EmbeddedEngine(CONFIG, LAYOUT, backend, SETTINGS, room, Kernels())
    planned = KVCacheSizes.plain(room, 2, Heads(4, 2, 8)).num_bytes("float32")
    assert sum(pool.num_bytes for pool in made.pools["kv_cache"]) == planned


@pytest.mark.parametrize(("group", "before", "after"), [(8, 1120, 387), (16, 2240, 667)])
def test_the_users_groups_take_a_third_of_a_full_cache_for_each_sample(
    group: int, before: int, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In MiB on each rank: Qwen2.5-7B, prompts of 2,048 tokens and completions of 512 at most."""
    monkeypatch.chdir(ROOT)
    words = ["--generate_config.use_vllm", "0", "--context.device_target", "Ascend"]
    words += ["--rl_config.num_generations", str(group)]
    penalty = "--generate_config.sampling_config.repetition_penalty"
    config = load_config(USERS, words).config
    without = load_config(USERS, [*words, penalty, "1.0"]).config
    plan = plan_run(without, shapes_of(config)[0], None)
    penalised = plan_run(config, plan.model, None).bytes_by_role()["kv_cache"]
    cache = plan.cache_config
    assert cache.slots == 4 * group and cache.pages_per_slot == 20
    num_bytes = plan.bytes_by_role()["kv_cache"]
    # 28 layers of keys and values of one head of 128, of two bytes.
    a_position = 28 * 2 * 128 * 2
    assert round(cache.slots * (2048 + 512) * a_position / 2**20) == before
    assert round(num_bytes / 2**20) == after
    # The user's penalty needs to know the tokens that were seen, by slot.
    seen = -(-plan.model.vocab_size // plan.infer.mesh.tp) * cache.slots
    assert penalised == num_bytes + 4 * seen
