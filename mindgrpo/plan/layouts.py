"""Ranks the layouts that fit a configuration's devices by the estimated seconds of a step. Pure.

Each is planned whole, with as many samples and updates as the configuration has, so that all learn alike. Stages are
also tried in chunks, and what does not fit with the options that save memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush

from mindgrpo.config import Loaded, config_with
from mindgrpo.config.schema import values_by_key
from mindgrpo.errors import UserError
from mindgrpo.monitor.host_memory import format_bytes
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.plan.fit import (
    MODEL_DEGREES,
    STAGE_DEGREES,
    Values,
    context_degrees,
    kept_samples,
    layout_values,
)
from mindgrpo.plan.memory import PhaseNeed, most_needed
from mindgrpo.plan.run_plan import RunPlan, plan_run
from mindgrpo.plan.seconds import Roofline, StepSeconds

SHOWN = 12
SEQUENCE = "actor_config.parallel_config.use_seq_parallel"
ZERO = "actor_config.enable_parallel_optimizer"
# In the order in which they are tried where a layout does not fit.
# Ranks that experts are dealt to, in layouts that are tried.
EXPERT_DEGREES = (1, 4, 8, 16, 32, 64)
SAVINGS: tuple[Values, ...] = ({SEQUENCE: True}, {ZERO: True}, {SEQUENCE: True, ZERO: True})
# Data, model, stages, context.
Degrees = tuple[int, int, int, int]
# Seconds, or the least that they can be; a number of its own, for an order; None until all seconds are known.
Timed = tuple[float, int, StepSeconds | None, Values, RunPlan]


@dataclass(frozen=True, eq=False)
class Choice:
    """A planned layout: `values` are the keys that make it."""

    values: Values
    plan: RunPlan
    seconds: StepSeconds
    need: PhaseNeed

    def line(self) -> str:
        train, infer = self.plan.train.mesh, self.plan.infer.mesh
        phases = {phase.phase: phase for phase in self.seconds.phases}
        update = phases["update"]
        learning = sum(
            phases[name].seconds
            for name in ("reference", "old_logps", "update", "optimizer")
            if name in phases
        )
        return (
            f"{str(train):<16}{str(infer):<12}{self.seconds.total:>8.1f}{learning:>10.1f}"
            f"{phases['rollout'].seconds:>10.1f}{phases['reshard'].seconds:>10.2f}{update.idle_share:>7.0%}"
            f"{format_bytes(self.need.total):>12}{self._options}"
        )

    @property
    def _options(self) -> str:
        train = self.plan.train
        chunks = f"  {train.num_chunks} chunks a stage" if train.num_chunks > 1 else ""
        split = "  sequence parallel" if train.splits_tokens else ""
        return chunks + split + ("  ZeRO-1" if self.plan.shards_optimizer else "")

    @property
    def words(self) -> str:
        pairs = (
            f"--{key} {'null' if v is None else str(v).lower()}" for key, v in self.values.items()
        )
        return " ".join(pairs)


HEAD = (
    f"{'trains in':<16}{'generates':<12}{'a step':>8}{'learning':>10}{'rollout':>10}{'reshard':>10}{'idle':>7}"
    f"{'memory':>12}"
)


def ranked(loaded: Loaded, plan: RunPlan, most: int = SHOWN) -> list[Choice]:
    """Returns the fastest `most` layouts that fit context.max_device_memory, of as many devices as `plan` has.

    Each once, with the chunks and the savings with which it is fastest. Without a limit all fit. The reference has the
    generator's layout.
    """
    serial = itertools.count()
    left: list[Timed] = []

    def add(values: Values, other: RunPlan, seconds: StepSeconds | None = None) -> None:
        # Reshards take long to plan: only those of layouts that may be among the fastest are.
        total = Roofline(other).least_seconds() if seconds is None else seconds.total
        heappush(left, (total, next(serial), seconds, values, other))

    for values, other in _alternatives(loaded, plan):
        add(values, other)
    budget = plan.config.context.max_device_bytes
    choices: dict[tuple[Mesh, Mesh], Choice] = {}
    while left and len(choices) < most:
        _, _, seconds, values, other = heappop(left)
        meshes = other.train.mesh, other.infer.mesh
        if meshes in choices:
            continue
        if seconds is None:
            add(values, other, Roofline(other).step())
            continue
        need = most_needed(other)
        if budget is None or need.total <= budget:
            choices[meshes] = Choice(values, other, seconds, need)
        elif not values.keys() & SAVINGS[-1].keys():
            for saving in map(partial(_effective, other), SAVINGS):
                if saving:
                    saved = {**values, **saving}
                    add(
                        saved,
                        plan_run(config_with(loaded, saved).config, plan.model, None, plan.teacher),
                    )
    return sorted(choices.values(), key=lambda choice: choice.seconds.total)


def _effective(plan: RunPlan, saving: Values) -> Values:
    """Returns the saving, or nothing where one of its keys changes nothing."""
    changes = {
        SEQUENCE: plan.train.mesh.mp > 1 and not plan.train.splits_tokens,
        ZERO: plan.trained.has_replicas and not plan.shards_optimizer,
    }
    return saving if all(changes[key] for key in saving) else {}


def lines(loaded: Loaded, plan: RunPlan) -> list[str]:
    """Formats the ranking, and the arguments of the best layout."""
    choices = ranked(loaded, plan)
    if not choices:
        return ["none of as many devices fits context.max_device_memory"]
    best = choices[0].words or "the configuration's own"
    return [HEAD, *(choice.line() for choice in choices), f"the best: {best}"]


def _alternatives(loaded: Loaded, plan: RunPlan) -> Iterator[tuple[Values, RunPlan]]:
    """Yields every layout that the model and the batch allow, with the keys that make it."""
    world, batch = plan.world_size, plan.batch
    trains = _degrees(world, STAGE_DEGREES, context_degrees(plan))
    own = sorted({1, 2, plan.train.num_chunks})
    infers = _degrees(world, (1,), (1,))
    for train, infer, chunks, experts in itertools.product(trains, infers, own, _dealt(plan)):
        if chunks > 1 and train[2] == 1:
            continue
        values = {
            **_values(plan, train, infer, chunks),
            **_of_experts(plan, train, infer, experts),
        }
        try:
            other = plan_run(config_with(loaded, values).config, plan.model, None, plan.teacher)
        except UserError:
            continue
        if other.batch.samples_per_step == batch.samples_per_step:
            yield values, other


def _values(plan: RunPlan, train: Degrees, infer: Degrees, chunks: int) -> Values:
    """Returns the keys that change, with those that keep the numbers of samples and updates."""
    actor = plan.config.actor_config.parallel_config
    values = {
        **layout_values("actor_config", *train, chunks=chunks),
        **layout_values("generate_config", *infer[:3]),
    }
    if infer[0] != plan.infer.mesh.dp:
        values |= kept_samples(plan)
    if actor.micro_batch_num is not None and train[0] != plan.train.mesh.dp:
        values["actor_config.parallel_config.micro_batch_num"] = None
        values["rl_config.updates_per_rollout"] = plan.batch.updates_per_rollout
    if plan.reference is not None:
        values |= layout_values("ref_config", *infer, chunks=1)
    known = values_by_key(plan.config)
    return {key: value for key, value in values.items() if known[key] != value}


def _dealt(plan: RunPlan) -> list[int]:
    """Returns the numbers of ranks that experts may be dealt to."""
    moe = plan.model.moe
    if moe is None:
        return [1]
    now = plan.train.mesh.ep
    return sorted({n for n in EXPERT_DEGREES if moe.num_experts % n == 0} | {now})


def _of_experts(plan: RunPlan, train: Degrees, infer: Degrees, experts: int) -> Values:
    """Returns the keys that change for experts: the embedded generator deals them to all ranks of a replica."""
    if plan.model.moe is None:
        return {}
    dealt = 1 if plan.config.generate_config.uses_vllm else infer[1]
    values: dict[str, int | bool] = {
        "actor_config.parallel_config.expert_parallel": experts,
        "actor_config.parallel_config.use_seq_parallel": train[1] > 1,
        "generate_config.parallel_config.expert_parallel": dealt,
    }
    if plan.reference is not None:
        values["ref_config.parallel_config.expert_parallel"] = infer[1]
        values["ref_config.parallel_config.use_seq_parallel"] = infer[1] > 1
    known = values_by_key(plan.config)
    return {key: value for key, value in values.items() if known[key] != value}


def _degrees(world: int, stages: Sequence[int], contexts: Sequence[int]) -> list[Degrees]:
    """Returns the degrees that `world` devices have, with as many data-parallel replicas as these leave."""
    return [
        (world // (model * pipeline * context), model, pipeline, context)
        for model, pipeline, context in itertools.product(MODEL_DEGREES, stages, contexts)
        if world % (model * pipeline * context) == 0
    ]
