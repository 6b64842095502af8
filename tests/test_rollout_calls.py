"""The generator's C kernels called with a table of their own: NumPy's log-probs, and a sentence for what is not as
declared.

scripts/sanitize.sh runs these tests under AddressSanitizer and UndefinedBehaviorSanitizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import slots_by_hand
from kernel_calls import assert_refused, floats, one, size, wrong_calls
from numpy.random import Generator, default_rng

from mindgrpo.backend.kernels.native.library import call_kernel, library_path
from mindgrpo.backend.kernels.native.rollout import RolloutTable, Slots
from mindgrpo.backend.kernels.rollout import (
    GenerationBatch,
    KVCacheLayout,
    LayerWeights,
    LocalExperts,
    LocalLatents,
    LocalModelShape,
    Memory,
    TokenWeights,
)
from mindgrpo.backend.kernels.shapes import Heads, Routing, SamplingParams, Vocabulary
from mindgrpo.doctor.probes.numpy_kernels import NumpyKernels
from mindgrpo.rollout.embedded.kv_cache import KVCacheConfig, KVCacheSizes
from mindgrpo.rollout.noise import ROLLOUT, sample_keys

pytestmark = pytest.mark.skipif(library_path() is None, reason="no C compiler on this machine")

# Numbers of rows around the ones that vectors, blocks of rows and threads take at a time.
ROWS = (1, 3, 20, 66, 67, 100)
ROUTING = Routing(6, 3, is_sigmoid=True, scaling=1.5, groups=3, groups_taken=2, has_bias=True)


class Rollout:
    """A generator of one layer with random sizes, its weights, and `rows` samples of a prompt each.

    With experts, the layer has those of ROUTING. Of several ranks, `ids` being their numbers in a group, this is number
    `rank`: all attend, but the first one alone adds what that gives; each has a share of the vocabulary, and of experts
    unless it `has_all` of them.
    """

    def __init__(
        self,
        rng: Generator,
        rows: int = 6,
        has_experts: bool = False,
        ids: Sequence[int] = (-1,),
        rank: int = 0,
        has_all: bool = False,
    ) -> None:
        kv, dim, hidden, inner = size(rng, 2), 2 * size(rng, 20), size(rng, 70), size(rng, 90)
        self.heads = Heads(kv * size(rng, 3), kv, dim)
        self.rows, vocab, self.room = rows, size(rng, 200), 16
        total = ROUTING.num_experts
        own = total if has_all else total // len(ids)
        first = 0 if has_all else own * rank
        of_layer = LocalExperts(ROUTING, first, own, inner, (0,), -1 if has_all else ids[rank])
        width = -(-vocab // len(ids))
        tokens = slice(width * rank, min(vocab, width * (rank + 1)))
        share = LocalModelShape(
            1,
            hidden,
            0 if has_experts else inner,
            self.heads,
            Vocabulary(tokens.start, width, tokens.stop - tokens.start),
            1e-6,
            len(ids),
            rank,
            ids[rank],
            experts=of_layer if has_experts else None,
        )
        positions, count = 2 * rows * self.room, max(rows, 16)
        floats_a_row = max(self.heads.width + max(hidden, kv * dim * 3), 2 * inner, vocab)
        if has_experts:
            a_slot = 4 + 2 * hidden + 2 * inner
            floats_a_row = max(floats_a_row, 2 * total + ROUTING.per_token * a_slot)
        self.memory = Memory(
            cache=np.zeros(2 * positions * kv * dim, np.float32),
            scratch=np.zeros(count * (3 * hidden + floats_a_row), np.float32),
            inputs=np.zeros(rows * hidden, np.float32),
            starts=np.zeros(rows * hidden, np.float32),
            seen=np.zeros(0, np.float32),
        )
        settings = SamplingParams(temperature=1.0, max_tokens=4)
        angles = floats(rng, 2 * self.room, dim // 2)
        self.rotary = np.concatenate([f(angles) for f in (np.cos, np.cos, np.sin, np.sin)], axis=1)
        self.slots = Slots(share, settings, self.rotary, rows, 16, self.memory)
        self.table = self.slots._table
        mixed = self.heads.queries * dim
        each = (total,) if has_experts else ()
        self.layer = LayerWeights(
            norm=floats(rng, hidden),
            qkv=floats(rng, hidden, self.heads.width) / hidden**0.5,
            bias=None,
            q_norm=None,
            k_norm=None,
            out=floats(rng, mixed, hidden) / mixed**0.5,
            out_bias=None,
            norm_mlp=floats(rng, hidden),
            gate_up=floats(rng, *each, hidden, 2 * inner) / hidden**0.5,
            down=floats(rng, *each, inner, hidden) / inner**0.5,
            router=floats(rng, hidden, total) / hidden**0.5 if has_experts else None,
            router_bias=floats(rng, total) if has_experts else None,
        )
        table = floats(rng, vocab, hidden)
        self.token = TokenWeights(floats(rng, hidden), table, table)
        held, part = self.layer, np.zeros((width, hidden), np.float32)
        part[: tokens.stop - tokens.start] = table[tokens]
        if has_experts:
            mine = slice(first, first + own)
            held = held._replace(gate_up=held.gate_up[mine], down=held.down[mine])
        if rank:
            held = held._replace(out=np.zeros_like(held.out))
        self.slots.take_weights([held], TokenWeights(self.token.norm, part, part))
        self.prompts = [
            rng.integers(0, vocab, size(rng, self.room)).astype(np.int32) for _ in range(rows)
        ]
        keys = rng.integers(0, 2**64, self.rows, np.uint64)
        self.job = GenerationBatch.of(
            self.prompts, range(rows), [4] * rows, keys, records_routes=has_experts
        )
        self.prompt_routes: list[np.ndarray] = []
        self.slots.start(self.job, KVCacheLayout(rows, self.room, rows, self.room))

    def fill(self) -> None:
        """16 rows a call, as the generator does it; its samples wait in the queue then."""
        for row, prompt in enumerate(self.prompts):
            count = len(prompt) - 1
            seen = np.arange(1, count + 1, dtype=np.int32)
            prefixes = np.full(count, row, np.int32)
            start = np.array([row], np.int32)
            self.slots.fill(prompt[:-1], prefixes, seen, start[:0])
            if self.job.records_routes:
                self.prompt_routes.append(self.slots.prompt_routes())
            self.slots.fill(prompt[-1:], prefixes[:0], seen[:0], start)
            self.slots.enqueue(row, row)

    def run(self) -> None:
        self.fill()
        while self.slots.decode(1):
            pass

    def routes(self, row: int) -> np.ndarray:
        """[tokens but the last, experts a token] of the one layer."""
        return np.concatenate([self.prompt_routes[row], self.slots.routes(row, 0, 4)])[:, 0]

    def decode(self) -> list[np.ndarray]:
        return [np.array([self.table.number, 1], np.int32), np.zeros(1, np.int32)]


def gated(x: np.ndarray, gate_up: np.ndarray, down: np.ndarray) -> np.ndarray:
    gate, up = np.split(x @ gate_up, 2, -1)
    return (gate / (1 + np.exp(-gate)) * up) @ down


def numpys_log_probs(made: Rollout, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float64 [len(tokens), vocabulary] after each token, as models/decoder.py describes the layer, and its experts."""

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight

    heads, length = made.heads, len(tokens)
    w = LayerWeights(*(None if a is None else a.astype(np.float64) for a in made.layer))
    x = made.token.table.astype(np.float64)[tokens]
    qkv = (norm(x, w.norm) @ w.qkv).reshape(length, -1, heads.dim)
    ends = np.cumsum([heads.queries, heads.kv])
    cos, sin = np.split(made.rotary.astype(np.float64)[:length, None], 2, -1)
    low, high = np.split(qkv, 2, -1)
    rotated = qkv * cos + np.concatenate([-high, low], -1) * sin
    share = heads.queries // heads.kv
    q, k = rotated[:, : ends[0]], np.repeat(rotated[:, ends[0] : ends[1]], share, 1)
    v = np.repeat(qkv[:, ends[1] :], share, 1)
    scores = np.einsum("ihd,jhd->hij", q, k) / heads.dim**0.5
    scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
    masses = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = np.einsum("hij,jhd->ihd", masses / masses.sum(-1, keepdims=True), v)
    x = x + mixed.reshape(length, -1) @ w.out
    normed, routes = norm(x, w.norm_mlp), np.zeros((length, 0), int)
    if w.router is None:
        x = x + gated(normed, w.gate_up, w.down)
    else:
        kernels = NumpyKernels()
        routes, _ = kernels.choose_experts(ROUTING)(normed, w.router, w.router_bias)
        scores = kernels.router(ROUTING)(normed, w.router, routes)
        for row, chosen in enumerate(routes):
            for score, expert in zip(scores[row], chosen, strict=True):
                x[row] += score * gated(normed[row], w.gate_up[expert], w.down[expert])
    logits = norm(x, made.token.norm) @ made.token.head.T
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True)), routes


@pytest.mark.parametrize("has_experts", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_rollouts_of_any_number_of_rows_give_numpys_log_probs(rows: int, has_experts: bool) -> None:
    made = Rollout(default_rng(rows), rows, has_experts)
    made.run()
    assert made.job.lengths.tolist() == [4] * rows
    for row, prompt in enumerate(made.prompts):
        drawn = slice(len(prompt) - 1, -1)
        tokens = np.concatenate([prompt, made.job.tokens[row]])
        expected, routes = numpys_log_probs(made, tokens)
        of_tokens = expected[drawn][np.arange(4), made.job.tokens[row]]
        np.testing.assert_allclose(made.job.logps[row], of_tokens, rtol=2e-3, atol=2e-3)
        if has_experts:
            assert made.routes(row).dtype == np.uint8
            np.testing.assert_array_equal(made.routes(row), routes[:-1])


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("has_all", [False, True])
def test_experts_that_ranks_share_out_or_all_have_change_no_bit(rows: int, has_all: bool) -> None:
    whole = Rollout(default_rng(rows), rows, has_experts=True)
    whole.run()
    group = slots_by_hand.ThreadGroup(2)
    ranks = [Rollout(default_rng(rows), rows, True, group.ids, rank, has_all) for rank in range(2)]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(Rollout.run, ranks))
    for rank in ranks:
        np.testing.assert_array_equal(rank.job.tokens, whole.job.tokens)
        for row in range(rows):
            np.testing.assert_array_equal(rank.routes(row), whole.routes(row))
        np.testing.assert_allclose(rank.job.logps, whole.job.logps, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("tp_size", [1, 3])
def test_what_is_drawn_is_written_within_what_was_given(rows: int, tp_size: int) -> None:
    ranks = slots_by_hand.Ranks(SamplingParams(top_k=5, top_p=0.9), 50, tp_size, rows, hidden=256)
    logits = floats(default_rng(0), rows, 50)
    keys = sample_keys(0, ROLLOUT, 0, range(rows))
    tokens, _, _ = ranks.draw(logits, keys, [np.ones(1, np.int32)] * rows)
    assert (np.argsort(-logits)[:, :5] == tokens[:, None]).any(1).all()


def of_latents(query_rank: int, is_interleaved: bool) -> LocalModelShape:
    """Two layers, of which the second has experts, one of them for all tokens."""
    latents = LocalLatents(6, query_rank, 5, 4, 4, is_interleaved, 1e-6)
    experts = LocalExperts(ROUTING, 0, ROUTING.num_experts, 7, (1,), shared_inner=5)
    shape = LocalModelShape(2, 10, 9, Heads(3, 1, 10), Vocabulary(0, 23, 23), 1e-6, 1, 0)
    return replace(shape, experts=experts, latents=latents)


def latent_layer(rng: Generator, shape: LocalModelShape, has_experts: bool) -> LayerWeights:
    def matrix(*extents: int) -> np.ndarray:
        return floats(rng, *extents) / np.float32(extents[-2] ** 0.5)

    hidden, latents, heads = shape.hidden, shape.latents, shape.heads.queries
    count, inner = ROUTING.num_experts, 7 if has_experts else 9
    each = (count,) if has_experts else ()
    queries, queried = latents.query_width(heads), bool(latents.query_rank)
    return LayerWeights(
        norm=floats(rng, hidden),
        qkv=matrix(hidden, latents.down_width(heads)),
        bias=None,
        q_norm=None,
        k_norm=None,
        out=matrix(heads * latents.value, hidden),
        out_bias=None,
        norm_mlp=floats(rng, hidden),
        gate_up=matrix(*each, hidden, 2 * inner),
        down=matrix(*each, inner, hidden),
        router=matrix(hidden, count) if has_experts else None,
        router_bias=floats(rng, count) if has_experts else None,
        shared_gate_up=matrix(hidden, 10) if has_experts else None,
        shared_down=matrix(5, hidden) if has_experts else None,
        latent_norm=floats(rng, latents.rank),
        query_norm=floats(rng, latents.query_rank) if queried else None,
        query_up=matrix(latents.query_rank, queries) if queried else None,
        latent_up=matrix(latents.rank, heads * (latents.nope_dim + latents.value)),
    )


def likeliest(
    shape: LocalModelShape,
    weights: tuple[list[LayerWeights], TokenWeights],
    prompts: list[Any],
    guessed: np.ndarray | None = None,
) -> GenerationBatch:
    """Four tokens behind each prompt, in memory of exactly the size that they are said to need.

    Of `guessed` [rows, 4] the two that may come next are drafts in each step.
    """
    rows = len(prompts)
    room = KVCacheConfig(rows, 1, None, 16, 4, draft_rows=0 if guessed is None else 2 * rows)
    sizes = KVCacheSizes.of(room, shape, False)
    beside = [np.zeros(size, np.float32) for size in (sizes.scratch, sizes.inputs, sizes.starts)]
    memory = Memory(np.zeros(sizes.cache, np.float32), *beside, np.zeros(0, np.float32))
    greedy, angles = SamplingParams(temperature=0.0, max_tokens=4), np.arange(20.0)[:, None]
    turned = angles * np.array([0, 0, 0, 1, 0.1] * 2)
    rotary = np.concatenate([np.cos(turned), np.sin(turned)], 1).astype(np.float32)
    slots = Slots(shape, greedy, rotary, rows, room.prompt_rows, memory)
    slots.take_weights(*weights)
    job = GenerationBatch.of(
        prompts, range(rows), [4] * rows, np.zeros(rows, np.uint64), records_routes=True
    )
    slots.start(job, room.partition([len(prompt) for prompt in prompts], [1] * rows, 4))
    for row, prompt in enumerate(prompts):
        prefixes = np.full(len(prompt) - 1, row, np.int32)
        seen, start = np.arange(1, len(prompt), dtype=np.int32), np.array([row], np.int32)
        slots.fill(prompt[:-1], prefixes, seen, start[:0])
        slots.fill(prompt[-1:], prefixes[:0], seen[:0], start)
        slots.enqueue(row, row)
    left = rows
    while left:
        drafts = []
        if guessed is not None:
            made = [(i, job.lengths[i]) for i in slots.running]
            drafts = [guessed[i, length : length + 2].tolist() for i, length in made]
        left = slots.decode(1, drafts)
    if guessed is not None:
        steps, _, drafted, accepted = slots.counts
        assert steps <= 4 and (rows == 1 or 0 < accepted < drafted)
    return job


@pytest.mark.parametrize(("query_rank", "is_interleaved"), [(0, False), (7, True)])
@pytest.mark.parametrize("rows", ROWS)
def test_latents_that_a_slot_keeps_are_those_of_the_same_tokens_in_a_prompt(
    rows: int, query_rank: int, is_interleaved: bool
) -> None:
    rng, shape = default_rng(rows), of_latents(query_rank, is_interleaved)
    layers = [latent_layer(rng, shape, has_experts) for has_experts in (False, True)]
    table = floats(rng, 23, shape.hidden)
    weights = layers, TokenWeights(floats(rng, shape.hidden), table, table)
    prompts = [rng.integers(0, 23, 2 + i % 12).astype(np.int32) for i in range(rows)]
    whole = likeliest(shape, weights, prompts)
    guessed = np.where(rng.random(whole.tokens.shape) < 0.7, whole.tokens, 22 - whole.tokens)
    drafting = likeliest(shape, weights, prompts, guessed)
    np.testing.assert_array_equal(drafting.tokens, whole.tokens)
    np.testing.assert_array_equal(drafting.logps, whole.logps)
    further = [np.concatenate([p, own[:2]]) for p, own in zip(prompts, whole.tokens, strict=True)]
    again = likeliest(shape, weights, further)
    np.testing.assert_array_equal(again.tokens[:, :2], whole.tokens[:, 2:])
    np.testing.assert_allclose(again.logps[:, :2], whole.logps[:, 2:], rtol=0, atol=1e-5)


def test_every_call_of_a_rollout_that_is_not_as_declared_is_refused() -> None:
    made = Rollout(default_rng(2))
    number = np.array([made.table.number], np.int32)
    layer = [one(0) if array is None else array for array in made.layer[:10]]
    calls = {
        "rollout_layer_weights": [*layer, np.array([*number, 0], np.int32)],
        "rollout_token_weights": [*made.token, number],
        "rollout_prompts": [np.zeros(0, np.int32), number],
        "rollout_decode": made.decode(),
    }
    for symbol, arrays in calls.items():
        call_kernel(symbol, *arrays)
        for wrong in wrong_calls(arrays):
            assert_refused(symbol, wrong)
        for index, array in enumerate(arrays):
            if array.ndim == 2:
                wrong = [*arrays[:index], array[:, :-1].copy(), *arrays[index + 1 :]]
                assert_refused(symbol, wrong)
    assert_refused("rollout_prompts", [np.zeros(1, np.int32), number], "1 tokens for 0 rows")
    for index in (-1, 1):
        wrong = [*layer, np.array([*number, index], np.int32)]
        assert_refused("rollout_layer_weights", wrong, f"no layer {index}")


@pytest.mark.parametrize(
    "name, value, match",
    [
        ("scratch", np.zeros(10, np.float32), "scratch has 10 elements, but needs"),
        ("stats", np.zeros(10, np.float32), "stats has 10 elements, but needs"),
        ("cache", np.zeros(10, np.uint8), "cache has 10 elements, but needs"),
        ("row_own", np.zeros(5, np.int32), "row_own has 5 elements, but needs 6"),
        ("rotary", np.zeros(1, np.float32), "rotary has 1 elements, but needs"),
        ("num_free", 1, "6 rows and 1 free slots are not 6"),
        ("weights", np.zeros(20, np.int64), "weights has 20 elements, but needs 21"),
        ("weights", np.zeros(21, np.int64), "not given all its weights"),
        ("slot_size", 4, "rooms"),
        ("row_prefix", np.full(6, 99, np.int32), "in prefix 99"),
        ("row_slot", np.full(6, -1, np.int32), "in slot -1"),
        ("row_own", np.full(6, 16, np.int32), "17 in slot"),
    ],
)
def test_a_table_that_does_not_hold_what_its_numbers_say_is_refused(
    name: str, value: int | np.ndarray, match: str
) -> None:
    made = Rollout(default_rng(4))
    made.fill()
    made.slots.decode(0)
    made.table[name] = value
    assert_refused("rollout_decode", made.decode(), match)


def test_weights_of_another_width_than_the_tables_are_refused() -> None:
    made = Rollout(default_rng(4))
    made.table["hidden"] = int(made.table["hidden"][0]) - 1
    number = np.array([made.table.number], np.int32)
    assert_refused("rollout_token_weights", [*made.token, number], "H is")


def test_embeddings_of_another_itemsize_than_the_tables_are_refused() -> None:
    made = Rollout(default_rng(4))
    made.table["itemsize"] = 2
    number = np.array([made.table.number], np.int32)
    assert_refused("rollout_token_weights", [*made.token, number], "2 bytes an element")


def test_a_model_that_ranks_share_needs_their_group() -> None:
    made = Rollout(default_rng(7))
    made.fill()
    made.table["tp_size"] = 2
    made.table["stats"] = np.zeros(2 * made.table["stats"].size, np.float32)
    assert_refused("rollout_decode", made.decode(), "knows no group")
    made.table["group"] = 12345
    assert_refused("rollout_decode", made.decode(), "group's status is 1")


def test_a_number_that_no_generator_has_is_refused() -> None:
    for number in (-1, 1023, 1 << 30):
        arrays = [np.array([number, 1], np.int32), np.zeros(1, np.int32)]
        assert_refused("rollout_decode", arrays, f"no generator {number}")


# -- the table ----------------------------------------------------------------------------------------------------


def test_a_table_takes_the_names_and_types_of_the_header_only() -> None:
    table = RolloutTable()
    with pytest.raises(KeyError):
        table["hiden"] = 3
    with pytest.raises(ValueError, match="cache"):
        table["cache"] = np.zeros(3)
    with pytest.raises(ValueError, match="cache"):
        table["cache"] = np.zeros((3, 4), np.float32)[:, ::2]
    with pytest.raises(RuntimeError, match="without a value: .*hidden.*top_p"):
        table.check_complete()
    table["hidden"] = 3
    assert table["hidden"] == 3


def test_a_field_that_nothing_fills_is_an_error_before_the_first_kernel() -> None:
    made = Rollout(default_rng(6))
    del made.table._values["stopped"]
    with pytest.raises(RuntimeError, match="without a value: stopped"):
        made.table.check_complete()
