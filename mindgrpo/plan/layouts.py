"""Ranks the layouts that fit a configuration's devices by the estimated seconds of a step. Pure.

Each is planned whole, with as many samples and updates as the configuration has, so that all learn alike. Stages are
also tried in chunks, and what does not fit with the options that save memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from mindgrpo.config import Loaded
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
    with_values,
    words_of,
)
from mindgrpo.plan.memory import PhaseNeed, most_needed
from mindgrpo.plan.run_plan import RunPlan
from mindgrpo.plan.seconds import Roofline, StepSeconds

SHOWN = 12
TRAIN, INFER, REFERENCE = (f"{r}_config.parallel_config" for r in ("actor", "generate", "ref"))
SEQUENCE, ZERO = f"{TRAIN}.use_seq_parallel", "actor_config.enable_parallel_optimizer"
# In the order in which they are tried where a layout does not fit.
SAVINGS: tuple[Values, ...] = ({}, {SEQUENCE: True}, {ZERO: True}, {SEQUENCE: True, ZERO: True})
# Ranks that experts are dealt to, in layouts that are tried.
EXPERT_DEGREES = (1, 4, 8, 16, 32, 64)


@dataclass(frozen=True, eq=False)
class Choice:
    """A planned layout: `values` are the keys that make it."""

    values: Values
    plan: RunPlan
    seconds: StepSeconds
    need: PhaseNeed

    def line(self) -> str:
        train = self.plan.train
        by_phase = {phase.phase: phase for phase in self.seconds.phases}
        rollout, reshard = by_phase["rollout"].seconds, by_phase["reshard"].seconds
        learning = self.seconds.total - rollout - reshard
        line = (
            f"{str(train.mesh):<16}{str(self.plan.infer.mesh):<12}{self.seconds.total:>8.1f}{learning:>10.1f}"
            f"{rollout:>10.1f}{reshard:>10.2f}{by_phase['update'].idle_share:>7.0%}"
            f"{format_bytes(self.need.total):>12}"
        )
        line += f"  {train.num_chunks} chunks a stage" if train.num_chunks > 1 else ""
        line += "  sequence parallel" if train.splits_tokens else ""
        return line + ("  ZeRO-1" if self.plan.shards_optimizer else "")


HEAD = (
    f"{'trains in':<16}{'generates':<12}{'a step':>8}{'learning':>10}{'rollout':>10}{'reshard':>10}{'idle':>7}"
    f"{'memory':>12}"
)


def ranked(loaded: Loaded, plan: RunPlan, most: int = SHOWN) -> list[Choice]:
    """Returns the fastest `most` layouts that fit context.max_device_memory, of as many devices as `plan` has.

    Each once, with the chunks and the savings with which it is fastest. Without a limit all fit. The reference has the
    generator's layout.
    """
    choices: dict[tuple[Mesh, Mesh], Choice] = {}
    # Reshards take long to plan: only those of layouts that may be among the fastest are.
    tried = [
        (sum(phase.seconds for phase in Roofline(other).computing()), values, other)
        for values, other in _alternatives(loaded, plan)
    ]
    for least, values, other in sorted(tried, key=lambda alternative: alternative[0]):
        fastest = sorted(choice.seconds.total for choice in choices.values())
        if len(fastest) >= most and least > fastest[most - 1]:
            break
        meshes = other.train.mesh, other.infer.mesh
        if meshes not in choices and (choice := _fitting(loaded, plan, values)) is not None:
            choices[meshes] = choice
    return sorted(choices.values(), key=lambda choice: choice.seconds.total)[:most]


def _fitting(loaded: Loaded, plan: RunPlan, values: Values) -> Choice | None:
    """Returns the layout with the first savings with which it fits."""
    budget, known = plan.config.context.max_device_bytes, values_by_key(plan.config) | {**values}
    for saving in SAVINGS:
        if any(known[key] == value for key, value in saving.items()):
            continue
        chosen = {**values, **saving}
        other = with_values(loaded, plan, chosen)
        if SEQUENCE in saving and other.train.mesh.tp == 1:
            continue
        if ZERO in saving and not other.shards_optimizer:
            continue
        need = most_needed(other)
        if budget is None or need.total <= budget:
            return Choice(chosen, other, Roofline(other).step(), need)
    return None


def lines(loaded: Loaded, plan: RunPlan) -> list[str]:
    """Formats the ranking, and the arguments of the best layout."""
    choices = ranked(loaded, plan)
    if not choices:
        return ["none of as many devices fits context.max_device_memory"]
    best = words_of(choices[0].values) or "the configuration's own"
    return [HEAD, *(choice.line() for choice in choices), f"the best: {best}"]


def _alternatives(loaded: Loaded, plan: RunPlan) -> Iterator[tuple[Values, RunPlan]]:
    """Yields every layout that the model and the batch allow, with the keys that make it."""
    world, now, known = plan.world_size, plan.train, values_by_key(plan.config)
    moe, experts = plan.model.moe, [1]
    if moe is not None:
        experts = sorted({n for n in EXPERT_DEGREES if moe.num_experts % n == 0} | {now.mesh.ep})
    axes = MODEL_DEGREES, STAGE_DEGREES, context_degrees(plan), sorted({1, 2, now.num_chunks})
    for tp, pp, cp, chunks, infer_tp, ep in itertools.product(*axes, MODEL_DEGREES, experts):
        if world % (tp * pp * cp) or world % infer_tp or (chunks > 1 and pp == 1):
            continue
        asked = _values(plan, (world // (tp * pp * cp), tp, pp, cp, chunks), infer_tp, ep)
        values = {key: value for key, value in asked.items() if known[key] != value}
        try:
            other = with_values(loaded, plan, values)
        except UserError:
            continue
        if other.batch.samples_per_step == plan.batch.samples_per_step:
            yield values, other


def _values(plan: RunPlan, train: tuple[int, int, int, int, int], infer_tp: int, ep: int) -> Values:
    """Returns the keys of a layout, with those that keep the numbers of samples and updates."""
    infer_dp, has_reference = plan.world_size // infer_tp, plan.reference is not None
    values = {
        **layout_values("actor_config", *train),
        **layout_values("generate_config", infer_dp, infer_tp),
    }
    if infer_dp != plan.infer.mesh.dp:
        values |= kept_samples(plan)
    num_updates = plan.config.actor_config.parallel_config.micro_batch_num
    if num_updates is not None and train[0] != plan.train.mesh.dp:
        values[f"{TRAIN}.micro_batch_num"] = None
        values["rl_config.updates_per_rollout"] = plan.batch.updates_per_rollout
    if has_reference:
        values |= layout_values("ref_config", infer_dp, infer_tp, 1, 1, 1)
    if plan.model.moe is not None:
        # The embedded generator deals them to all ranks of a replica.
        dealt = 1 if plan.config.generate_config.uses_vllm else infer_tp
        values |= {f"{TRAIN}.expert_parallel": ep, SEQUENCE: train[1] > 1}
        values[f"{INFER}.expert_parallel"] = dealt
        if has_reference:
            values[f"{REFERENCE}.expert_parallel"] = infer_tp
            values[f"{REFERENCE}.use_seq_parallel"] = infer_tp > 1
    return values
