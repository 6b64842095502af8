"""Decides whether a run fits its devices, and proposes what would make it fit. Pure.

Every change is planned before it is proposed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mindgrpo.config import Loaded, config_with
from mindgrpo.errors import UserError
from mindgrpo.monitor.host_memory import format_bytes
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.plan.activations import update_shape
from mindgrpo.plan.memory import PhaseNeed, most_needed, phase_needs
from mindgrpo.plan.run_plan import LARGEST, RunPlan, plan_run

KEY = "context.max_device_memory"
# So many remedies are proposed, of at most so many changes each.
PROPOSED, MOST_TOGETHER = 3, 3
# Model-parallel ranks exchange every layer's results: beyond a host of eight devices that takes longer than it saves.
MODEL_DEGREES, STAGE_DEGREES, CONTEXT_DEGREES = (1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 2, 4, 8)
# Of the longest row, that a rank keeps. A share of fewer is small beside the weights of a rank, and data-parallel ranks
# compute as fast without a gather in every layer.
LEAST_CONTEXT_TOKENS = 8192
ADAPTER_RANK = 16
Values = Mapping[str, int | bool | None]


def words_of(values: Values) -> str:
    """Formats values as arguments of a command."""
    return " ".join(
        f"--{key} {'null' if v is None else str(v).lower()}" for key, v in values.items()
    )


@dataclass(frozen=True, eq=False)
class Change:
    """New values by key. Of two changes of one `kind` only one is made.

    `price` orders by a step's time, then by devices, then by whether the run learns differently.
    """

    kind: str
    price: int
    values: Values
    cost: str


@dataclass(frozen=True)
class Remedy:
    """Changes that together make the run fit, with what the plan then says."""

    changes: tuple[Change, ...]
    need: PhaseNeed

    def lines(self) -> list[str]:
        costs = "; ".join(change.cost for change in self.changes)
        return [words_of(_together(self.changes)), f"    then {_size_of(self.need)}; {costs}"]


@dataclass(frozen=True)
class Verdict:
    """Says whether `need` fits `budget`, in bytes; a budget of None: the configuration sets no limit."""

    need: PhaseNeed
    budget: int | None
    remedies: tuple[Remedy, ...] = ()

    @property
    def fits(self) -> bool | None:
        return None if self.budget is None else self.need.total <= self.budget

    def lines(self) -> list[str]:
        size = _size_of(self.need)
        if self.budget is None:
            return [
                f"not known, for {KEY} sets no limit: at most {size}; give --{KEY} 58GB or what the device has"
            ]
        allowed = f"{KEY} allows {format_bytes(self.budget)}"
        if self.fits:
            return [f"fits: at most {size}, and {allowed}"]
        lines = [f"does not fit: {size}, but {allowed}"]
        if not self.remedies:
            none = f"no {MOST_TOGETHER} changes that plan tries make it fit: use more devices"
            return [*lines, none]
        lines.append("the cheapest changes that make it fit:")
        for number, remedy in enumerate(self.remedies, start=1):
            head, costs = remedy.lines()
            lines += [f"{number}. {head}", costs]
        return lines


def with_values(loaded: Loaded, plan: RunPlan, values: Values) -> RunPlan:
    """Plans the run of `plan` with other values of keys. Raises UserError."""
    return plan_run(config_with(loaded, values).config, plan.model, None, plan.other_models)


def verdict(loaded: Loaded, plan: RunPlan) -> Verdict:
    need, budget = most_needed(plan), plan.config.context.max_device_bytes
    if budget is None or need.total <= budget:
        return Verdict(need, budget)
    remedies = itertools.islice(_remedies(loaded, plan, budget), PROPOSED)
    return Verdict(need, budget, tuple(remedies))


def _size_of(need: PhaseNeed) -> str:
    return f"{format_bytes(need.total)} a rank, in phase {need.phase}"


def _remedies(loaded: Loaded, plan: RunPlan, budget: int) -> Iterator[Remedy]:
    """Yields the cheapest first; none that contains a smaller remedy."""
    # Those of one change are asked for twice.
    needs_with = functools.cache(functools.partial(_needs_with, loaded, plan))
    over = {need.phase: need.total for need in phase_needs(plan) if need.total > budget}
    # Those that take something from a phase that does not fit.
    helpful = [
        change
        for change in changes_for(plan)
        if any(need.total < over.get(need.phase, 0) for need in needs_with((change,)))
    ]
    numbers = range(1, MOST_TOGETHER + 1)
    together = [chosen for number in numbers for chosen in itertools.combinations(helpful, number)]
    enough: list[set[Change]] = []
    for chosen in sorted(together, key=lambda chosen: sum(change.price for change in chosen)):
        num_kinds = len({change.kind for change in chosen})
        num_values = sum(len(change.values) for change in chosen)
        agree = num_kinds == len(chosen) and num_values == len(_together(chosen))
        if any(known <= set(chosen) for known in enough) or not agree:
            continue
        most = max(needs_with(chosen), key=lambda need: need.total, default=None)
        if most is not None and most.total <= budget:
            enough.append(set(chosen))
            yield Remedy(chosen, most)


def _together(chosen: Sequence[Change]) -> Values:
    return {key: value for change in chosen for key, value in change.values.items()}


def _needs_with(loaded: Loaded, plan: RunPlan, chosen: Sequence[Change]) -> list[PhaseNeed]:
    """Returns no needs where the configuration, the model or the batch does not allow the changes."""
    try:
        new = with_values(loaded, plan, _together(chosen))
    except UserError:
        return []
    new.take_reshard(plan)
    before, after = ((p.batch.samples_per_step, p.batch.updates_per_step) for p in (plan, new))
    return phase_needs(new) if before == after else []


def changes_for(plan: RunPlan) -> list[Change]:
    """Returns all that might help, from the cheapest on."""
    changes = [*_settings(plan), *_layouts(plan)]
    return sorted(changes, key=lambda change: change.price)


def _settings(plan: RunPlan) -> Iterator[Change]:
    """Proposes settings that take memory for time; those that change nothing help nothing."""
    rl, actor = plan.config.rl_config, plan.config.actor_config
    generate, ref_rows = plan.config.generate_config, plan.config.ref_config.ref_model_batch_size
    trained, updated = plan.trained_bytes(LARGEST), plan.optimizer_bytes(LARGEST)
    again: Values = {"actor_config.recompute_config.recompute": True}
    if actor.recompute_config.select_recompute:
        again = {**again, "actor_config.recompute_config.select_recompute": False}
    # Where micro_batch_num counts updates in rows, parts of a micro-batch leave their number alone.
    one_row: Values = {"rl_config.micro_batch_interleaved": rl.batch_size}
    if actor.parallel_config.micro_batch_num is None:
        one_row = {"rl_config.batch_size": 1}
    yield Change(
        *("tokens", 1, {"actor_config.parallel_config.use_seq_parallel": True}),
        "the ranks of a layer share out its tokens between attention and MLP: twice as many exchanges of half the "
        "size, and a gather more for gradients",
    )
    cost = "layers are computed again in the backward pass, about a third more work in an update"
    yield Change("recompute", 1, again, cost)
    yield Change(
        *("sharding", 1, {"actor_config.enable_parallel_optimizer": True}),
        f"{plan.train.num_replicas} replicas share out the optimizer's state and gather weights in every update",
    )
    yield Change(
        *("offload", 3, {"actor_config.optimizer.opt_offload": True}),
        f"{format_bytes(2 * updated)} of host memory a rank, {format_bytes(2 * (trained + updated))} between device "
        "and host and the processors' AdamW in every update",
    )
    if plan.lora is None:
        cost = f"trains adapters of rank {ADAPTER_RANK} instead of all weights: another learning"
        yield Change("adapters", 100, {"actor_config.lora.rank": ADAPTER_RANK}, cost)
    cost = f"{rl.batch_size} times as many micro-batches of one row"
    yield Change("rows", 2, one_row, cost)
    longest = generate.max_prompt_length + generate.sampling_config.max_tokens
    if rl.packing and rl.seq_length > longest:
        cost = f"rows of {longest} tokens, the longest sample, hold fewer samples: more padding, more micro-batches"
        yield Change("length", 2, {"rl_config.seq_length": longest}, cost)
    slots = fewer = plan.cache_config.slots
    while (fewer := fewer // 2) >= rl.num_generations:
        cost = (
            f"{fewer} samples in flight on each replica instead of {slots}: generation takes longer"
        )
        yield Change("slots", 2, {"generate_config.max_num_seqs": fewer}, cost)
    cost = f"{ref_rows} times as many forward passes of the reference"
    yield Change("reference rows", 2, {"ref_config.ref_model_batch_size": 1}, cost)


def _layouts(plan: RunPlan) -> Iterator[Change]:
    """Proposes finer layouts of the trainer, whose rows are shared out where they are long, and of the generator; then
    more devices, for more stages and replicas."""
    train, infer = plan.train.mesh, plan.infer.mesh
    now = train.tp, train.pp, train.cp
    degrees = itertools.product(MODEL_DEGREES, STAGE_DEGREES, context_degrees(plan))
    for model, stages, context in degrees:
        data, left_over = divmod(train.size, model * stages * context)
        if left_over or data > train.dp or (model, stages, context) == now:
            continue
        finer = Mesh(data, model, stages, context)
        # Of one stage there are no chunks.
        chunks = 1 if stages == 1 and plan.train.num_chunks > 1 else None
        shared = context if context != train.cp else None
        values = layout_values("actor_config", data, model, stages, shared, chunks)
        changed = zip((model, stages, context), now, strict=True)
        steps = sum(abs(new.bit_length() - old.bit_length()) for new, old in changed)
        cost = f"trains in {finer} instead of {train}: more exchange between ranks"
        yield Change("layout", 4 + steps, values, cost)
    for model in (degree for degree in MODEL_DEGREES if degree > infer.tp):
        if infer.size % model == 0:
            data = infer.size // model
            values = {**layout_values("generate_config", data, model), **kept_samples(plan)}
            cost = (
                f"generates in DP{data}/MP{model} instead of {infer}: more exchange between ranks"
            )
            yield Change("generator layout", 4, values, cost)
    for times in (2, 4, 8):
        values = {
            **layout_values("actor_config", train.dp, train.tp, train.pp * times),
            "generate_config.parallel_config.data_parallel": infer.dp * times,
            **kept_samples(plan),
        }
        cost = f"takes {times * train.size} devices instead of {train.size}"
        yield Change("devices", 20 * times, values, cost)


def layout_values(
    role: str,
    data: int,
    model: int,
    stages: int | None = None,
    context: int | None = None,
    chunks: int | None = None,
) -> Values:
    """Returns the keys of a layout; None for a number that stays as it is."""
    sizes = {"data_parallel": data, "model_parallel": model, "pipeline_stage": stages}
    sizes |= {"context_parallel": context, "pp_interleave_num": chunks}
    return {f"{role}.parallel_config.{axis}": size for axis, size in sizes.items() if size}


def context_degrees(plan: RunPlan) -> list[int]:
    """Returns the degrees of context parallelism with which rows are long enough, and the present one."""
    now, longest = plan.train.mesh.cp, update_shape(plan.config, ragged=False).length
    long_enough = {d for d in CONTEXT_DEGREES if d == 1 or longest >= d * LEAST_CONTEXT_TOKENS}
    return sorted(long_enough | {now})


def kept_samples(plan: RunPlan) -> Values:
    """Keeps the number of a step's prompts where it depends on the generator's replicas."""
    rl = plan.config.rl_config
    if not rl.counts_rollouts:
        return {}
    kept: dict[str, int | None] = {"rl_config.prompts_per_step": plan.batch.prompts_per_step}
    for name in ("num_rollouts", "chunk_size"):
        if getattr(rl, name) is not None:
            kept[f"rl_config.{name}"] = None
    return kept
