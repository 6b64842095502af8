"""Computes how many samples, updates and ranks a configuration means. Pure.

Numbers that cannot be met are errors that propose settings which work.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mindgrpo.config.rl import DEFAULT_PROMPTS
from mindgrpo.config.roles import ParallelConfig
from mindgrpo.config.schema import Config
from mindgrpo.errors import UserError, counted, error_of

Works = Callable[[tuple[int, ...]], bool]
_AXES = ("data_parallel", "model_parallel", "pipeline_stage", "context_parallel")
# Above this, clipped ratios carry much of the gradient and runs drift from their own samples.
MANY_UPDATES = 16  # as many as DAPO's paper has


@dataclass(frozen=True)
class BatchPlan:
    """What a step consists of.

    `updates_per_rollout` counts those of one pass; `formulas` derive samples and updates a step from keys.
    """

    config: Config
    prompts_per_step: int
    samples_per_step: int
    updates_per_rollout: int
    formulas: tuple[str, str]

    @classmethod
    def of(cls, config: Config) -> BatchPlan:
        prompts, prompts_formula = _prompts(config)
        samples = prompts * config.rl_config.num_generations
        updates, updates_formula = _updates(config, samples)
        if updates > samples:
            raise UserError(_too_many_updates(config, prompts, samples, updates))
        _check_partial(config, prompts, updates)
        return cls(config, prompts, samples, updates, (prompts_formula, updates_formula))

    @property
    def updates_per_step(self) -> int:
        """Returns the optimizer steps of a rollout over all passes."""
        return self.updates_per_rollout * self.config.rl_config.num_iterations

    @property
    def samples_per_update(self) -> int:
        """Returns the largest number of samples of an update; the last updates may have one fewer."""
        return math.ceil(self.samples_per_step / self.updates_per_rollout)

    @property
    def prompts_under_way(self) -> int:
        """Returns the prompts in flight of partial rollouts."""
        asked = self.config.rl_config.over_sampling_batch_size
        return asked or math.ceil(1.5 * self.prompts_per_step)

    def warnings(self) -> list[str]:
        if self.updates_per_step <= MANY_UPDATES:
            return []
        return [
            f"{self.updates_per_step} optimizer updates a rollout make the later ones strongly "
            f"off-policy (above {MANY_UPDATES}); for fewer, set rl_config.updates_per_rollout "
            "to 1 and actor_config.parallel_config.micro_batch_num to null, or raise "
            "micro_batch_num"
        ]

    def lines(self) -> list[str]:
        rl, train = self.config.rl_config, self.config.actor_config.parallel_config
        prompts, updates = self.formulas
        at_most = "at most " if self.samples_per_step % self.updates_per_rollout else ""
        cut = f" in {rl.micro_batch_interleaved} parts" if rl.micro_batch_interleaved > 1 else ""
        in_a_row = rl.pack_num if rl.packing else 1
        packed = f"at most {counted(in_a_row, 'sample')}" if in_a_row else "as many samples as fit"
        rows = rl.batch_size * train.replicas
        # Where no two samples share a row.
        most = math.ceil(self.samples_per_update / rows)
        follows = ""
        if rl.counts_rollouts:
            follows = (
                f"; rl_config.prompts_per_step {self.prompts_per_step} keeps it in every layout"
            )
        lines = [
            f"samples a step: {prompts} = {self.samples_per_step}{follows}",
            f"updates a rollout: {updates}, {at_most}{counted(self.samples_per_update, 'sample')} each",
            f"rows: at most {rl.seq_length} tokens, {packed}; {counted(rows, 'row')} a micro-batch{cut}, at most "
            f"{counted(most, 'micro-batch', 'micro-batches')} an update",
        ]
        if rl.num_iterations > 1:
            lines.append(
                f"optimizer steps a rollout: {counted(self.updates_per_rollout, 'update')} x num_iterations "
                f"{rl.num_iterations} = {self.updates_per_step}"
            )
        if rl.partial_rollout:
            lines.append(
                f"partial rollouts: {counted(self.prompts_under_way, 'prompt')} under way, looked at every "
                f"{rl.rollout_chunk} tokens, and none for more than {counted(rl.staleness_limit, 'further step')}"
            )
        return lines + [f"warning: {warning}" for warning in self.warnings()]


def laid_out(config: Config, world_size: int | None = None) -> Config:
    """Returns `config` with a data_parallel in every layout that has none: the ranks that its other axes leave.

    Without `world_size` the run has as many ranks as a layout with a data_parallel, the trainer's above the
    generator's, or else as few as both can use.
    """
    actor, generate = config.actor_config.parallel_config, config.generate_config.parallel_config
    if world_size is None:
        counted = (
            own.replicas * own.replica_ranks for own in (actor, generate) if own.data_parallel
        )
        world_size = next(counted, math.lcm(actor.replica_ranks, generate.replica_ranks))

    def filled(section: Any) -> Any:
        parallel: ParallelConfig | None = section.parallel_config
        if parallel is None or parallel.data_parallel is not None:
            return section
        replicas = max(1, world_size // parallel.replica_ranks)
        changed = parallel.model_copy(update={"data_parallel": replicas})
        return section.model_copy(update={"parallel_config": changed})

    roles = ("actor_config", "generate_config", "ref_config", "critic_config")
    changes = {role: filled(getattr(config, role)) for role in roles}
    rewards = config.reward_config
    models = {"model": filled(rewards.model), "models": [filled(own) for own in rewards.models]}
    changes["reward_config"] = rewards.model_copy(update=models)
    laid = config.model_copy(update=changes)
    return config if laid == config else laid


def validate_world(config: Config, world_size: int, works: Works = lambda _: True) -> None:
    """Raises UserError for every role whose layout does not fit the number of ranks that run.

    Proposes layouts for which `works` is true: those that the model allows.
    """
    wrong = []
    rewards = config.reward_config
    beside = [("ref_config", config.ref_config.parallel_config)]
    beside += [(key, own.parallel_config) for key, own in rewards.models_by_key.items()]
    for role, parallel, most in (
        ("actor_config", config.actor_config.parallel_config, _AXES),
        ("generate_config", config.generate_config.parallel_config, _AXES[:2]),
        (
            "critic_config",
            config.critic_config.parallel_config if config.has_critic else None,
            _AXES,
        ),
        *((role, parallel, _AXES) for role, parallel in beside),
    ):
        if parallel is None:
            continue
        axes = most if parallel.mesh.cp > 1 else most[:3]
        layout = (parallel.replicas, *(getattr(parallel, axis) for axis in axes[1:]))
        size, is_beside = math.prod(layout), role in dict(beside)
        # Models beside the policy may leave ranks idle.
        if size > world_size or (size < world_size and not is_beside):
            end = f", or {role}.parallel_config to null for the actor's" if is_beside else ""
            wrong.append(f"{_wrong_layout(role, layout, world_size, works)}{end}.")
    if wrong:
        raise error_of(wrong)


def schedule_notes(config: Config, updates: int) -> list[str]:
    """Returns notes on what a run of so many updates never reaches of the learning rate's schedule."""
    schedule, prefix = config.actor_config.lr_schedule, "actor_config.lr_schedule."
    notes = []
    if schedule.warmup_step >= updates:
        notes.append(
            f"{prefix}warmup_step {schedule.warmup_step} is not below the run's {counted(updates, 'update')}: "
            f"lr {schedule.lr} is only reached at its end, if at all"
        )
    decay = schedule.decay_steps
    if decay is not None and decay > 2 * updates and schedule.lr_decay_style != "constant":
        notes.append(
            f"{prefix}decay_steps {decay} is far beyond the run's {counted(updates, 'update')}, so lr hardly "
            f"falls; null makes it the length of the run"
        )
    return notes


def nearest_layouts(
    wanted: tuple[int, ...], world_size: int, works: Works = lambda _: True
) -> list[str]:
    """Returns up to three layouts of exactly `world_size` ranks that work: `wanted` if it does, data parallelism alone,
    then those that change `wanted` least."""

    def distance(layout: tuple[int, ...]) -> tuple[bool, bool, float, tuple[int, ...]]:
        steps = (abs(math.log2(a / b)) for a, b in zip(layout, wanted, strict=True))
        return layout != wanted, layout[0] != world_size, round(sum(steps), 6), layout

    divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
    products = itertools.product(divisors, repeat=len(wanted))
    layouts = sorted((one for one in products if math.prod(one) == world_size), key=distance)
    return [
        "/".join(
            f"{axis}{size}" for axis, size in zip(("DP", "MP", "PP", "CP"), layout, strict=False)
        )
        for layout in itertools.islice(filter(works, layouts), 3)
    ]


def _prompts(config: Config) -> tuple[int, str]:
    rl, infer = config.rl_config, config.generate_config.parallel_config
    generations = f"num_generations {rl.num_generations}"
    if not rl.counts_rollouts:
        prompts = rl.prompts_per_step or DEFAULT_PROMPTS
        by_default = "" if rl.prompts_per_step else " (the default)"
        return prompts, f"prompts_per_step {prompts}{by_default} x {generations}"
    rollouts, chunk = rl.num_rollouts or 1, rl.chunk_size or 1
    formula = (
        f"num_rollouts {rollouts} x chunk_size {chunk} x generating data_parallel {infer.replicas} x "
        f"{generations}"
    )
    return rollouts * chunk * infer.replicas, formula


def _updates(config: Config, samples: int) -> tuple[int, str]:
    rl, train = config.rl_config, config.actor_config.parallel_config
    derived = None
    if train.micro_batch_num is not None:
        pack = (rl.pack_num or 1) if rl.packing else 1
        derived = math.ceil(
            samples / (rl.batch_size * train.replicas * train.micro_batch_num * pack)
        )
        formula = (
            f"ceil({samples} samples / (batch_size {rl.batch_size} x data_parallel "
            f"{train.replicas} x micro_batch_num {train.micro_batch_num} x pack_num {pack})) "
            f"= {derived}"
        )
    if rl.updates_per_rollout is None:
        return (derived, formula) if derived else (1, "1")
    if derived not in (None, rl.updates_per_rollout):
        raise UserError(
            f"rl_config.updates_per_rollout is {rl.updates_per_rollout}, but "
            f"actor_config.parallel_config.micro_batch_num makes it {formula}; set one of the two "
            "to null."
        )
    return rl.updates_per_rollout, f"updates_per_rollout {rl.updates_per_rollout}"


def _check_partial(config: Config, prompts: int, updates: int) -> None:
    rl = config.rl_config
    asked = rl.over_sampling_batch_size
    # With more, a group could be too old before a step has room for it.
    if asked is not None and not prompts <= asked <= 2 * prompts:
        raise UserError(
            f"rl_config.over_sampling_batch_size {asked} must be from the {prompts} prompts of a step to twice as "
            f"many; set it to {min(max(asked, prompts), 2 * prompts)}, or change rl_config.prompts_per_step."
        )
    if rl.rollout_token_budget is not None and updates > rl.num_generations:
        raise UserError(
            f"rl_config.rollout_token_budget may leave a step a single group, and {updates} updates a rollout are more "
            f"than its rl_config.num_generations {rl.num_generations} samples; lower rl_config.updates_per_rollout or "
            "set rollout_token_budget to null."
        )


def _too_many_updates(config: Config, prompts: int, samples: int, updates: int) -> str:
    rl = config.rl_config
    generations = math.ceil(updates / prompts)
    more = f"rl_config.prompts_per_step {math.ceil(updates / rl.num_generations)}"
    if rl.counts_rollouts:
        a_rollout = prompts // (rl.num_rollouts or 1) * rl.num_generations
        more = f"rl_config.num_rollouts {math.ceil(updates / a_rollout)}"
    return (
        f"rl_config.updates_per_rollout {updates} is above the {counted(samples, 'sample')} of a step "
        f"({_prompts(config)[1]}), and every update needs a sample; "
        f"rl_config.updates_per_rollout {samples}, rl_config.num_generations {generations} or "
        f"{more} would work."
    )


def _wrong_layout(role: str, layout: tuple[int, ...], world_size: int, works: Works) -> str:
    axes = _AXES[: len(layout)]
    asked = " x ".join(f"{axis} {size}" for axis, size in zip(axes, layout, strict=True))
    start = math.prod(layout)
    remedies = [f"start {start}"] if works(layout) else []
    choices = nearest_layouts(layout, world_size, works)
    if choices:
        *first, last = choices
        listed = f"{', '.join(first)} or {last}" if first else last
        remedies.append(f"set {role}.parallel_config ({'/'.join(axes)}) to {listed}")
    remedy = ", or ".join(remedies) or "no layout of so many ranks fits the model: start others"
    return (
        f"{role}.parallel_config asks for {asked} = {counted(start, 'rank')}, but the run has "
        f"{counted(world_size, 'rank')}; {remedy}"
    )
