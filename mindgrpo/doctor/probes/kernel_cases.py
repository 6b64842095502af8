"""Lists what kernels are compared on, as data: the primitives that graphs launch, then the contract's methods.

`kernels.py` compares them with NumPy. Sizes are those of Qwen2.5-7B on a rank of four on a device, small on processors.
Sampling draws by int32 products that wrap and by right shifts, and weights are compared by them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from mindgrpo.algorithm.image_patches import whole_spans
from mindgrpo.backend.dtypes import Dtype, mindspore_dtype
from mindgrpo.backend.kernels.contract import Kernels
from mindgrpo.backend.kernels.mindspore_ops import right_shift
from mindgrpo.backend.kernels.shapes import NEVER, AdamWNumbers, Heads, Routing, Vocabulary
from mindgrpo.doctor.probes.numpy_kernels import NumpyKernels

COUNT, PROMPT, SEGMENTS = 1 << 16, 6, 256
# Those of rollout/noise.py and weights/checksum.py, or like them.
FACTORS, SHIFTS = (0xED5AD4BB, 0xAC4C1B51, 0x31848BAB, 0x9E3779B9), (11, 14, 15, 16, 17)
SIGNED = [int(np.uint32(factor).astype(np.int32)) for factor in FACTORS]


@dataclass(frozen=True)
class Sizes:
    """`rows` of `length` tokens; heads (queries, keys, dim); `picks` rows of logits; `slots` of `cache` positions, in
    pages of `page`."""

    rows: int
    length: int
    hidden: int
    inner: int
    vocabulary: int
    picks: int
    heads: tuple[int, int, int]
    slots: int
    cache: int
    page: int


SMALL = Sizes(2, 48, 64, 80, 500, 20, (4, 2, 64), 3, 64, 16)
REAL = Sizes(1, 8192, 3584, 4736, 38016, 1024, (7, 1, 128), 64, 2560, 128)


@dataclass(frozen=True)
class Case:
    """Is compared with NumPy. `make` gives the computation of one or several outputs from `inputs`.

    The first `num_wide` float inputs are in the compared dtype. Without `has_gradient` it is compared forward only: the
    generator has no other. `method` of the contract computes it, where one does; else `expected` says what is.
    """

    name: str
    method: str
    make: Callable[[Kernels], Callable[..., Any]]
    inputs: Sequence[np.ndarray]
    num_wide: int = 0
    has_gradient: bool = False
    expected: Callable[..., Any] | None = None

    def reference(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Computes the outputs with NumPy."""
        made = self.expected or self.make(NumpyKernels())
        with np.errstate(over="ignore"):
            out = (made.construct if isinstance(made, nn.Cell) else made)(*inputs)
        return [*out] if isinstance(out, tuple | list) else [out]


def _floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed + sum(shape)).normal(size=shape).astype(np.float32)


def _case(
    method: str,
    arguments: Sequence[Any],
    inputs: Sequence[np.ndarray],
    num_wide: int = 0,
    has_gradient: bool = False,
    name: str | None = None,
) -> Case:
    """Makes the case of what a method of the contract gives for `arguments`."""
    name = name or method.replace("_", " ")
    return Case(
        name, method, lambda k: getattr(k, method)(*arguments), inputs, num_wide, has_gradient
    )


# -- primitives ---------------------------------------------------------------------------------------------------


def _updated(table: Any, rows: Any, values: Any) -> Any:
    if isinstance(table, np.ndarray):
        made = table.copy()
        made[rows] = values
        return made
    own = Parameter(table.copy(), "table")
    ops.scatter_update(own, rows, values)
    return own


def _primitives(sizes: Sizes) -> list[Case]:
    """Lists what graphs are made of beside the contract's methods: tests/test_census.py counts it."""
    rng = np.random.default_rng(0)
    n, third = sizes.rows * sizes.length, sizes.hidden // 3
    x, y, z = (_floats(n, sizes.hidden, seed=i) for i in range(3))
    logits, positive = _floats(sizes.slots, sizes.vocabulary), np.abs(x) + 0.1
    bits, more = rng.integers(-(2**31), 2**31, (2, COUNT)).astype(np.int32)
    rows = rng.permutation(n).astype(np.int32)[: n // 2]
    segments = (np.arange(n) % SEGMENTS).astype(np.int32)
    chosen = np.argsort(logits, 1)[:, :8].astype(np.int32)
    batches = [own.reshape(2, n // 2, -1)[:, :32] for own in (x, y)]
    # By name: of tensors, of arrays (None: both say it alike), inputs.
    computations: dict[str, tuple[Any, Any, list[np.ndarray]]] = {
        "arithmetic": (lambda a, b, c: (a + b, a - b * c, -a / c), None, [x, y, positive]),
        "broadcast": (lambda a, b: a * b + b, None, [x, _floats(sizes.hidden)]),
        "reductions": (lambda a: (a.sum(1), a.mean(1), a.max(axis=1)), None, [x]),
        "column of the largest": (lambda a: a.argmax(1), None, [logits]),
        "transpose": (lambda a: a.reshape(n, 4, -1).transpose(1, 0, 2), None, [x]),
        "comparisons": (lambda a, b: tuple(o * 1 for o in (a < b, a >= b, a == b)), None, [x, y]),
        "scatter": (_updated, None, [x, rows, z[: len(rows)]]),
        "int32 products": (lambda a, b: (a * b, *(a * f for f in SIGNED)), None, [bits, more]),
        "bits": (lambda a, b: (a & b, a | b, a ^ b), None, [bits, more]),
        **{
            name: (getattr(ops, name), getattr(np, name), [positive])
            for name in ("exp", "log", "sqrt", "tanh")
        },
        "rsqrt": (ops.rsqrt, lambda a: a**-0.5, [positive]),
        "sigmoid": (ops.sigmoid, lambda a: 1 / (1 + np.exp(-a)), [positive]),
        "maximum": (ops.maximum, np.maximum, [x, y]),
        "choice": (lambda a, b: ops.Select()(a < b, a, b), np.minimum, [x, y]),
        "product in batches": (
            ops.BatchMatMul(transpose_b=True),
            lambda a, b: a @ b.transpose(0, 2, 1),
            batches,
        ),
        "slice and join": (
            lambda a: ops.concat((a[:, third:], -a[:, :third]), 1),
            lambda a: np.concatenate((a[:, third:], -a[:, :third]), 1),
            [x],
        ),
        "gather": (lambda a, i: ops.gather(a, i, 0), lambda a, i: a[i], [x, rows]),
        "gather of columns": (
            lambda a, i: ops.gather_elements(a, 1, i),
            lambda a, i: np.take_along_axis(a, i, 1),
            [logits, chosen],
        ),
        "sums of segments": (
            lambda a, i: ops.unsorted_segment_sum(a, i, SEGMENTS),
            lambda a, i: np.equal.outer(np.arange(SEGMENTS), i) @ a,
            [x, segments],
        ),
        "int32 sums": (lambda a: a.sum(), lambda a: a.sum(dtype=np.int64), [bits]),
        "right shifts": (
            lambda a: tuple(right_shift(a, shift) for shift in SHIFTS),
            lambda a: tuple((a.view("u4") >> np.uint32(shift)).view("i4") for shift in SHIFTS),
            [bits],
        ),
    }
    return [
        Case(name, "", lambda _, call=call: call, inputs, 2, expected=own or call)  # type: ignore[misc]
        for name, (call, own, inputs) in computations.items()
    ]


class _Product(nn.Cell):
    """Makes a cell of what may be a primitive, of which there is no gradient."""

    def __init__(self, product: Any) -> None:
        super().__init__()
        self.product = product

    def construct(self, x: Any, weight: Any) -> Any:
        return self.product(x, weight)


# -- attention ----------------------------------------------------------------------------------------------------


class _Twice(nn.Cell):
    """What a gather over two ranks gives if both have the same."""

    def construct(self, x: Any) -> Any:
        return ops.concat((x, x))


class AttentionOfRows(nn.Cell):
    """Computes attention over packed rows, rope and mask made from positions and spans; from angles without `rotary`.

    With `is_causal` each row is one run. With `is_shared` the first of two ranks has the same tokens as this, the
    second, and `columns` say where.
    """

    def __init__(
        self,
        kernels: Kernels,
        heads: Heads,
        rotary: np.ndarray | None,
        is_causal: bool = False,
        is_shared: bool = False,
    ) -> None:
        super().__init__()
        if is_shared:
            self.inputs = kernels.context_inputs(rotary, 1)
            self.attention = kernels.context_attention(heads, rotary, 1, _Twice(), nn.Identity())
        else:
            self.inputs = kernels.rope_and_mask(rotary, is_causal)
            self.attention = kernels.attention(heads, rotary, is_causal)

    def construct(self, qkv: Any, bias: Any, q_norm: Any, k_norm: Any, *rows: Any) -> Any:
        return self.attention(qkv, bias, q_norm, k_norm, *self.inputs(*rows))


class AttentionToCache(nn.Cell):
    """Computes attention of a token of each slot, its angles made from rows of the rotary table."""

    def __init__(self, kernels: Kernels, heads: Heads, keys: Any, values: Any) -> None:
        super().__init__()
        self.angles = kernels.cached_angles(heads)
        self.attention = kernels.cached_attention(heads, keys, values)

    def construct(self, qkv: Any, *others: Any) -> Any:
        bias, q_norm, k_norm, mask, angles, *cached = others
        return self.attention(qkv, bias, q_norm, k_norm, mask, self.angles(angles), *cached)


def _rotary(heads: Heads, length: int) -> np.ndarray:
    """Returns float32 [length, 2 D]: cos, then sin."""
    angles = np.outer(np.arange(length), 10000.0 ** (-np.arange(heads.dim // 2) * 2 / heads.dim))
    angles = np.concatenate([angles, angles], 1)
    return np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)


def _qkv(heads: Heads, num_tokens: int) -> list[np.ndarray]:
    """Returns the projection, bias, q_norm, k_norm; anything of one number where `heads` has none."""
    nothing = np.zeros(1, np.float32)
    bias = _floats(heads.width) if heads.has_bias else nothing
    norms = [_floats(heads.dim, seed=i) if heads.norm_eps else nothing for i in (1, 2)]
    return [_floats(num_tokens, heads.width), bias, *norms]


def _packed_rows(sizes: Sizes) -> tuple[np.ndarray, np.ndarray]:
    """Returns positions and spans: in each row a prompt that three runs share, and padding."""
    unit = sizes.length // 48
    positions = np.zeros((sizes.rows, sizes.length), np.int32)
    spans = np.zeros((sizes.rows, sizes.length, 3), np.int32)
    spans[:, :, 2] = np.arange(sizes.length)
    at = prompt = 7 * unit
    spans[:, :at] = 0
    positions[:, :at] = np.arange(at)
    for count in (9 * unit, 5 * unit, unit):
        spans[:, at : at + count] = (0, prompt, at)
        positions[:, at : at + count] = prompt + np.arange(count)
        at += count
    return positions, spans


def _packed(name: str, sizes: Sizes, is_causal: bool = False, **others: Any) -> Case:
    """Makes a case of packed rows, or of rows that are one run each."""
    heads, (positions, spans) = Heads(*sizes.heads, **others), _packed_rows(sizes)
    if is_causal:
        positions, spans = np.zeros_like(positions), np.zeros_like(spans)
        positions += np.arange(sizes.length, dtype=np.int32)
    rotary = _rotary(heads, sizes.length)
    inputs = [*_qkv(heads, positions.size), positions, spans]
    make = partial(AttentionOfRows, heads=heads, rotary=rotary, is_causal=is_causal)
    return Case(name, "attention", make, inputs, 1, True)


def _whole_runs(sizes: Sizes) -> Case:
    """Makes a case of runs that see all of themselves, with angles of their own: windows of a vision encoder."""
    heads, unit = Heads(*sizes.heads, has_bias=True), sizes.length // 48
    lengths = [7 * unit, 9 * unit, unit]
    runs = np.array([*lengths, sizes.length - sum(lengths)])
    spans = np.broadcast_to(whole_spans(runs), (sizes.rows, sizes.length, 3)).copy()
    positions = np.random.default_rng(5).integers(0, 64, (sizes.rows, sizes.length))
    inputs = [*_qkv(heads, positions.size), _rotary(heads, 64)[positions], spans]
    make = partial(AttentionOfRows, heads=heads, rotary=None)
    return Case("attention in windows of images", "attention", make, inputs, 1, True)


def _shared_rows(sizes: Sizes) -> Case:
    """Makes a case of rows of two halves with the same tokens and positions, of which the second sees the first."""
    heads, half = Heads(*sizes.heads, has_bias=True), sizes.length // 2
    columns = np.arange(sizes.length, dtype=np.int32).reshape(2, 1, half).repeat(sizes.rows, 1)
    positions = np.tile(np.arange(half, dtype=np.int32), (sizes.rows, 2))
    spans = np.zeros((sizes.rows, sizes.length, 3), np.int32)
    spans[:, half:] = (0, half, half)
    inputs = [*_qkv(heads, sizes.rows * half), positions, spans, columns]
    rotary = _rotary(heads, sizes.length)
    make = partial(AttentionOfRows, heads=heads, rotary=rotary, is_shared=True)

    def second_half(qkv: np.ndarray, *others: np.ndarray) -> np.ndarray:
        bias, q_norm, k_norm, positions, spans, _ = others
        twice = np.tile(qkv.reshape(sizes.rows, half, -1), (1, 2, 1)).reshape(-1, heads.width)
        attention = AttentionOfRows(NumpyKernels(), heads, rotary)
        mixed = attention.construct(twice, bias, q_norm, k_norm, positions, spans)
        return mixed.reshape(sizes.rows, 2, half, -1)[:, 1].reshape(len(qkv), -1)

    name = "attention in rows that ranks share"
    return Case(name, "context_attention", make, inputs, 1, True, second_half)


def _caches(heads: Heads, rows: int, dtype: Dtype) -> tuple[Parameter, Parameter]:
    narrow = mindspore_dtype(dtype)
    keys, values = (Tensor(_floats(rows, heads.dim, seed=i)).astype(narrow) for i in (3, 4))
    return Parameter(keys, "keys"), Parameter(values, "values")


def _prefill(sizes: Sizes, dtype: Dtype) -> Case:
    """Makes a case of two prompts, whose heads go to three places of the cache."""
    heads, prompt = Heads(*sizes.heads, has_bias=True), PROMPT * (sizes.cache // 48)
    causal = np.where(np.tril(np.ones((prompt, prompt))), 0.0, NEVER).astype(np.float32)
    angles = np.tile(_rotary(heads, prompt)[:, None], (2, 1, 1))
    tokens = (np.array([1, 0, 1])[:, None] * prompt + np.arange(prompt)).reshape(-1)
    source = (tokens[:, None] * heads.kv + np.arange(heads.kv)).reshape(-1).astype(np.int32)
    count = sizes.slots * heads.kv * sizes.cache
    rows = np.random.default_rng(0).permutation(count)[: len(source)].astype(np.int32)
    inputs = [*_qkv(heads, 2 * prompt), causal[None, None], angles, source, rows]
    return Case(
        "attention of prompts",
        "prefill_attention",
        lambda kernels: kernels.prefill_attention(heads, *_caches(heads, count, dtype)),
        inputs,
        1,
    )


def _cached(
    name: str, sizes: Sizes, dtype: Dtype, is_shared: bool, a_slot: int = 1, **others: Any
) -> Case:
    """Makes a case of `a_slot` tokens in a row of each slot, of different lengths; half of the pages may be shared.

    Then there are fewer pages than slots read, taken together. Tokens of one slot see each other's keys and values.
    """
    heads, slots, page = Heads(*sizes.heads, **others), sizes.slots, sizes.page
    length, rows, num_pages = sizes.cache, slots * heads.kv, sizes.cache // page
    shared = num_pages // 2 if is_shared else 0
    slot, ahead = np.divmod(np.arange(slots), a_slot)
    at = np.resize([shared * page + 5, shared * page, length - a_slot], slots)[slot] + ahead
    mask = np.where(np.arange(length) <= at[:, None], 0.0, NEVER).astype(np.float32)
    count = heads.kv * (shared + slots * (num_pages - shared))
    order = np.random.default_rng(0).permutation(count).astype(np.int32)
    of_all = np.tile(order[: shared * heads.kv].reshape(heads.kv, shared), (slots, 1))
    pages = np.concatenate([of_all, order[shared * heads.kv :].reshape(rows, -1)], 1)
    pages = pages.reshape(slots, heads.kv, -1)[slot].reshape(rows, -1)
    column = np.repeat(at, heads.kv)
    places = pages[np.arange(rows), column // page] * page + column % page
    inputs = [*_qkv(heads, slots), np.repeat(mask[:, None], heads.kv, 0)]
    inputs += [_rotary(heads, length)[at][:, None], places.astype(np.int32), pages]
    return Case(
        name,
        "cached_attention",
        lambda kernels: AttentionToCache(kernels, heads, *_caches(heads, count * page, dtype)),
        inputs,
        1,
    )


# -- experts ------------------------------------------------------------------------------------------------------


def _experts(sizes: Sizes) -> list[Case]:
    """Lists the cases of two of eight experts for each token; one has no tokens, and some tokens have one expert."""
    tokens, hidden, inner = sizes.rows * sizes.length, sizes.hidden, sizes.inner // 4
    routing, rng = Routing(8, 2), np.random.default_rng(0)
    topk_ids = np.argsort(rng.random((tokens, 7)), 1)[:, :2].astype(np.int32)
    topk_ids[::9, 1] = -1
    x, router = _floats(tokens, hidden), _floats(hidden, 8) / np.float32(hidden**0.5)
    order, counts, home = NumpyKernels().sort_slots(routing)(topk_ids)
    y, scores = _floats(order.size, hidden), np.abs(_floats(tokens, 2)) + 0.1
    rows = NumpyKernels().take_rows()(x, order, home)
    weights = [_floats(8, hidden, 2 * inner), _floats(8, inner, hidden)]
    weights = [own / np.float32(own.shape[1] ** 0.5) for own in weights]
    # Without rows behind those of all experts, which have no gradient to get.
    used = rows[: counts.sum()]
    # No two scores of a token are alike.
    levels = np.zeros((tokens, hidden), np.float32)
    levels[:, :8] = np.argsort(rng.random((tokens, 8)), 1)
    choice = [levels, np.eye(hidden, 8, dtype=np.float32), np.zeros(1, np.float32)]
    grouped = Routing(8, 2, is_sigmoid=True, groups=4, groups_taken=2, has_bias=True)
    # Scores that the sigmoid keeps apart, and no two sums of which are alike.
    in_groups = [levels / 4 - 1, choice[1], np.sqrt(np.arange(8, dtype=np.float32)) / 8]
    return [
        _case("router", (routing,), [x, router, topk_ids], 1, True),
        _case("choose_experts", (routing,), choice, 1),
        _case("sort_slots", (routing,), [topk_ids]),
        _case("take_rows", (), [x, order, home], 1, True),
        _case("expert_mlp", ("silu",), [rows, counts, *weights], 3, True),
        _case("expert_matmul", (), [used, weights[0], counts], 2, True),
        _case("weighted_sum", (), [y, scores, order, home], 1, True),
        _case("choose_experts", (grouped,), in_groups, 1, name="choose experts of groups"),
    ]


# -- the optimizer ------------------------------------------------------------------------------------------------


class _OfParameters(nn.Cell):
    """(weight, gradient, first, second, inputs of a step) -> the three that the step updates."""

    def __init__(self, update: nn.Cell, shape: Sequence[int]) -> None:
        super().__init__()
        self.update = update
        named = ("weight", "first", "second")
        self.updated = ParameterTuple(
            [Parameter(Tensor(np.zeros(shape, np.float32)), n) for n in named]
        )

    def construct(self, weight: Any, gradient: Any, first: Any, second: Any, *step: Any) -> Any:
        own = self.updated
        for i, value in enumerate((weight, first, second)):
            gradient = ops.depend(gradient, ops.assign(own[i], value))
        done = self.update(own[0], gradient, own[1], own[2], *step)
        return [ops.depend(one, done) + 0.0 for one in own]


def _adamw(sizes: Sizes) -> Case:
    """Makes a case of the third step of one matrix, whose second moment is not negative."""
    shape = (sizes.hidden, sizes.inner)
    weight, gradient, first, second = (_floats(*shape, seed=i) for i in range(4))
    numbers = AdamWNumbers(1e-2, 0.9, 0.95, 1e-8, 0.1, 3, 1.0)

    def make(kernels: Kernels) -> Callable[..., Any]:
        cell = kernels.adamw_cell(numbers.beta1, numbers.beta2, numbers.eps, numbers.weight_decay)
        made = _OfParameters(cell, shape) if isinstance(cell, nn.Cell) else cell
        return lambda *inputs: made(*inputs, *kernels.adamw_inputs(numbers))

    return Case("AdamW", "adamw_cell", make, [weight, gradient, first, second**2])


# -- all ----------------------------------------------------------------------------------------------------------


def cases(sizes: Sizes, dtype: Dtype) -> list[Case]:
    """Lists the cases whose caches are of `dtype`."""
    tokens, hidden, inner = sizes.rows * sizes.length, sizes.hidden, sizes.inner
    x, added, weight = _floats(tokens, hidden), _floats(tokens, hidden, seed=1), _floats(hidden)
    matrix = _floats(hidden, inner) / np.float32(hidden**0.5)
    rng = np.random.default_rng(0)
    own = Vocabulary(100, sizes.vocabulary, sizes.vocabulary - 3, 0.8)
    table = _floats(sizes.vocabulary, hidden) / np.float32(hidden**0.5)
    ids = rng.integers(90, sizes.vocabulary + 120, tokens).astype(np.int32)
    labels, n = ids[: sizes.picks], sizes.picks // 4
    linear = [x[: sizes.picks], table, labels]
    logits = _floats(sizes.picks, sizes.vocabulary)
    picks = rng.permutation(tokens).astype(np.int32)[: sizes.picks]
    picks[::5] = -1
    # Log-sum-exp, entropy and the two gradients of each row.
    numbers = [np.full(sizes.picks, np.log(sizes.vocabulary) + 0.5, np.float32)]
    numbers += [_floats(sizes.picks, seed=i) for i in range(3)]
    # Of four ranks: the largest logit, masses and moments, and the label's logit.
    stats = np.abs(_floats(sizes.picks, 16)) + 1.0
    # No two alike.
    levels = rng.permuted(np.tile(np.arange(sizes.vocabulary), (sizes.slots, 1)), axis=1)
    return [
        *_primitives(sizes),
        Case("matmul", "matmul", lambda k: _Product(k.matmul()), [x, matrix], 2, True),
        _case("add_matmul", (), [_floats(inner), x, matrix], 3),
        _case("matmul_back", (), [_floats(tokens, inner), matrix], 2),
        _case("matmul_gradient", (), [x, added], 2),
        _case("rms_norm", (1e-6,), [x, weight], 1, True),
        _case("add_rms_norm", (1e-6,), [x, added, weight], 2, True),
        _case("glu", ("silu",), [_floats(tokens, 2 * inner)], 1, True),
        _case("embedding", (100,), [ids, table], 1, True),
        _case("exact_embedding", (100,), [ids, table], 1, True),
        _case("pick", (), [picks, x], 1, True),
        _case("squares", (), [x]),
        _case("largest", (20,), [levels.astype(np.float32)]),
        _case("log_prob_stats", (own,), [logits, labels], 1),
        _case("log_probs_of_stats", (), [stats]),
        _case("log_prob_grad", (own,), [logits, labels, *numbers], 1),
        _case("linear_log_prob_stats", (own, n), linear, 2),
        _case("linear_log_prob_grad", (own, n), linear + numbers, 2),
        _case("glu", ("gelu_tanh",), [x], 1, True, "gelu"),
        _packed("packed attention, biases", sizes, has_bias=True),
        _packed("packed attention, norms", sizes, norm_eps=1e-6),
        _packed("attention in rows of one sample", sizes, is_causal=True, has_bias=True),
        _whole_runs(sizes),
        _shared_rows(sizes),
        *_experts(sizes),
        _adamw(sizes),
        _prefill(sizes, dtype),
        _cached("attention to the cache", sizes, dtype, False, has_bias=True),
        _cached("attention to shared pages", sizes, dtype, True, norm_eps=1e-6),
        _cached("attention of drafts", sizes, dtype, False, a_slot=2, norm_eps=1e-6),
    ]
