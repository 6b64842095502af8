"""Whether a run fits its devices, and what would make it fit: every change is planned before it is proposed. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mindgrpo.config import Loaded, config_with
from mindgrpo.errors import UserError
from mindgrpo.monitor.host_memory import format_bytes
from mindgrpo.plan.memory import PhaseNeed, most_needed, phase_needs
from mindgrpo.plan.run_plan import LARGEST, RunPlan, plan_run

KEY = "context.max_device_memory"
PROPOSED = 3
# Changes that are made together, where no single one is enough.
MOST_TOGETHER = 3


@dataclass(frozen=True)
class Remedy:
    """Changes that together make the run fit, with what the plan then says."""

    changes: tuple[Change, ...]
    need: PhaseNeed

    def lines(self) -> list[str]:
        words = " ".join(f"--{key} {value}" for key, value in _values(self.changes).items())
        costs = "; ".join(change.cost for change in self.changes)
        return [words, f"    then {_said(self.need)}; {costs}"]


@dataclass(frozen=True)
class Verdict:
    """`budget` None: the configuration sets no limit, and so nothing is said."""

    need: PhaseNeed
    budget: int | None
    remedies: tuple[Remedy, ...] = ()

    @property
    def fits(self) -> bool | None:
        return None if self.budget is None else self.need.total <= self.budget

    def lines(self) -> list[str]:
        if self.budget is None:
            return [
                f"not known, for {KEY} sets no limit: at most {_said(self.need)}; give --{KEY} 58GB or what the "
                "device has"
            ]
        allowed = f"{KEY} allows {format_bytes(self.budget)}"
        if self.fits:
            return [f"fits: at most {_said(self.need)}, and {allowed}"]
        lines = [f"does not fit: {_said(self.need)}, but {allowed}"]
        if not self.remedies:
            return [
                *lines,
                f"no {MOST_TOGETHER} changes that plan tries make it fit: use more devices",
            ]
        lines.append("the cheapest changes that make it fit:")
        for number, remedy in enumerate(self.remedies, start=1):
            head, *rest = remedy.lines()
            lines += [f"{number}. {head}", *rest]
        return lines


def verdict(loaded: Loaded, plan: RunPlan) -> Verdict:
    need, budget = most_needed(plan), plan.config.context.max_device_bytes
    if budget is None or need.total <= budget:
        return Verdict(need, budget)
    remedies = itertools.islice(_remedies(loaded, plan, budget), PROPOSED)
    return Verdict(need, budget, tuple(remedies))


def _said(need: PhaseNeed) -> str:
    return f"{format_bytes(need.total)} a rank, in phase {need.phase}"


def _remedies(loaded: Loaded, plan: RunPlan, budget: int) -> Iterator[Remedy]:
    """The cheapest first; none that holds a smaller remedy."""
    changes = _helpful(loaded, plan, budget)
    numbers = range(1, MOST_TOGETHER + 1)
    together = [chosen for number in numbers for chosen in itertools.combinations(changes, number)]
    enough: list[frozenset[Change]] = []
    for chosen in sorted(together, key=_price):
        if any(known <= set(chosen) for known in enough) or not _agree(chosen):
            continue
        needs = _needs_with(loaded, plan, chosen)
        most = max(needs, key=lambda need: need.total) if needs else None
        if most is not None and most.total <= budget:
            enough.append(frozenset(chosen))
            yield Remedy(chosen, most)


def _helpful(loaded: Loaded, plan: RunPlan, budget: int) -> list[Change]:
    """Those that take something from a phase that does not fit."""
    over = {need.phase: need.total for need in phase_needs(plan) if need.total > budget}
    changes = []
    for change in changes_for(plan):
        needs = _needs_with(loaded, plan, (change,))
        if any(need.total < over.get(need.phase, 0) for need in needs):
            changes.append(change)
    return changes


def _price(chosen: Sequence[Change]) -> int:
    return sum(change.price for change in chosen)


def _agree(chosen: Sequence[Change]) -> bool:
    """Whether no two set one key, or are of one kind."""
    keys = [key for change in chosen for key, _ in change.values]
    kinds = [change.kind for change in chosen]
    return len(set(keys)) == len(keys) and len(set(kinds)) == len(kinds)


def _values(chosen: Sequence[Change]) -> dict[str, str]:
    pairs = ((key, value) for change in chosen for key, value in change.values)
    return {key: "null" if value is None else str(value).lower() for key, value in pairs}


def _needs_with(loaded: Loaded, plan: RunPlan, chosen: Sequence[Change]) -> list[PhaseNeed]:
    """None where the configuration, the model or the batch does not allow the changes."""
    try:
        changed = config_with(
            loaded, {key: value for c in chosen for key, value in c.values}
        ).config
        new = plan_run(changed, plan.model, None)
    except UserError:
        return []
    before, after = ((p.batch.samples_per_step, p.batch.updates_per_step) for p in (plan, new))
    return phase_needs(new) if before == after else []


# Model-parallel ranks exchange every layer's results: beyond a host of eight devices that takes longer than it spares.
MOST_MODEL_PARALLEL = 8
ADAPTER_RANK = 16
# A key and its value each.
Values = tuple[tuple[str, int | bool | None], ...]


@dataclass(frozen=True)
class Change:
    """Of two of one `kind` only one is made. `price` orders: time of a step, then devices, then another learning."""

    kind: str
    values: Values
    cost: str
    price: int


def changes_for(plan: RunPlan) -> list[Change]:
    """All that might help, from the cheapest on."""
    changes = [
        *_recompute(plan),
        *_offload(plan),
        *_rows(plan),
        *_slots(plan),
        *_reference_rows(plan),
        *_layouts(plan),
        *_generator_layouts(plan),
        *_more_devices(plan),
        *_adapters(plan),
    ]
    return sorted(changes, key=lambda change: change.price)


def _recompute(plan: RunPlan) -> Iterator[Change]:
    recompute = plan.config.actor_config.recompute_config
    if recompute.modules != {"attention", "mlp"} or recompute.every > 1:
        keys = "actor_config.recompute_config."
        values: list[tuple[str, int | bool | None]] = [(f"{keys}recompute", True)]
        if recompute.select_recompute:
            values.append((f"{keys}select_recompute", False))
        cost = (
            "layers are computed again in the backward pass, about a third more work in an update"
        )
        yield Change("recompute", tuple(values), cost, 1)


def _offload(plan: RunPlan) -> Iterator[Change]:
    if plan.config.actor_config.optimizer.opt_offload:
        return
    trained = plan.trained_bytes(LARGEST)
    cost = (
        f"{format_bytes(2 * trained)} of host memory a rank, {format_bytes(4 * trained)} between device and host and "
        "the processors' AdamW in every update"
    )
    yield Change("offload", (("actor_config.optimizer.opt_offload", True),), cost, 3)


def _rows(plan: RunPlan) -> Iterator[Change]:
    """Fewer tokens a micro-batch: fewer rows, or shorter ones."""
    config = plan.config
    rl, train = config.rl_config, config.actor_config.parallel_config
    if rl.batch_size > rl.micro_batch_interleaved:
        # Where micro_batch_num counts updates in rows, parts of a micro-batch leave their number alone.
        name = "batch_size" if train.micro_batch_num is None else "micro_batch_interleaved"
        value = 1 if name == "batch_size" else rl.batch_size
        cost = f"{rl.batch_size} times as many micro-batches of one row"
        yield Change("rows", ((f"rl_config.{name}", value),), cost, 2)
    longest = (
        config.generate_config.max_prompt_length + config.generate_config.sampling_config.max_tokens
    )
    if rl.packing and rl.seq_length > longest:
        cost = f"rows of {longest} tokens, the longest sample, hold fewer samples: more padding, more micro-batches"
        yield Change("length", (("rl_config.seq_length", longest),), cost, 2)


def _slots(plan: RunPlan) -> Iterator[Change]:
    slots, group = plan.cache_config.slots, plan.config.rl_config.num_generations
    fewer = slots // 2
    while fewer >= group:
        cost = (
            f"{fewer} samples in flight on each replica instead of {slots}: generation takes longer"
        )
        yield Change("slots", (("generate_config.max_num_seqs", fewer),), cost, 2)
        fewer //= 2


def _reference_rows(plan: RunPlan) -> Iterator[Change]:
    rows = plan.config.ref_config.ref_model_batch_size
    if plan.reference is not None and rows > 1:
        cost = f"{rows} times as many forward passes of the reference"
        yield Change("reference rows", (("ref_config.ref_model_batch_size", 1),), cost, 2)


def _layout(role: str, data: int, model: int, stages: int) -> Values:
    sizes = {"data_parallel": data, "model_parallel": model, "pipeline_stage": stages}
    return tuple((f"{role}.parallel_config.{axis}", size) for axis, size in sizes.items())


def _degrees(size: int) -> Iterator[tuple[int, int]]:
    """Model- and pipeline-parallel degrees of `size` ranks or fewer, the first one small."""
    for model in (1, 2, 4, 8):
        for stages in (1, 2, 4, 8, 16):
            if model <= MOST_MODEL_PARALLEL and size % (model * stages) == 0:
                yield model, stages


def _layouts(plan: RunPlan) -> Iterator[Change]:
    """The trainer's, on as many devices, cut finer."""
    mesh = plan.train.mesh
    now = mesh.model_parallel * mesh.pipeline_stage
    for model, stages in _degrees(mesh.size):
        if model * stages >= now and (model, stages) != (mesh.model_parallel, mesh.pipeline_stage):
            data = mesh.size // (model * stages)
            cost = f"trains in DP{data}/MP{model}/PP{stages} instead of {mesh}: more exchange between ranks"
            values = _layout("actor_config", data, model, stages)
            steps = abs(model.bit_length() - mesh.model_parallel.bit_length())
            steps += abs(stages.bit_length() - mesh.pipeline_stage.bit_length())
            yield Change("layout", values, cost, 4 + steps)


def _generator_layouts(plan: RunPlan) -> Iterator[Change]:
    mesh = plan.infer.mesh
    model = 2 * mesh.model_parallel
    while model <= MOST_MODEL_PARALLEL and mesh.size % model == 0:
        data = mesh.size // model
        values = _layout("generate_config", data, model, 1)[:2] + _samples(plan)
        cost = f"generates in DP{data}/MP{model} instead of {mesh}: more exchange between ranks"
        yield Change("generator layout", values, cost, 4)
        model *= 2


def _samples(plan: RunPlan) -> Values:
    """Where a step's prompts follow the generator's replicas, their number is kept."""
    rl = plan.config.rl_config
    if rl.prompts_per_step is not None:
        return ()
    kept: list[tuple[str, int | None]] = [
        ("rl_config.prompts_per_step", plan.batch.prompts_per_step)
    ]
    if rl.num_rollouts != 1:
        kept.append(("rl_config.num_rollouts", 1))
    if rl.chunk_size is not None:
        kept.append(("rl_config.chunk_size", None))
    return tuple(kept)


def _more_devices(plan: RunPlan) -> Iterator[Change]:
    train, infer = plan.train.mesh, plan.infer.mesh
    for times in (2, 4, 8):
        values = _layout(
            "actor_config", train.data_parallel, train.model_parallel, train.pipeline_stage * times
        )
        more = infer.data_parallel * times
        values = (*values, ("generate_config.parallel_config.data_parallel", more), *_samples(plan))
        cost = f"takes {times * train.size} devices instead of {train.size}"
        yield Change("devices", values, cost, 20 * times)


def _adapters(plan: RunPlan) -> Iterator[Change]:
    if plan.lora is None:
        cost = f"trains adapters of rank {ADAPTER_RANK} instead of all weights: another learning"
        yield Change("adapters", (("actor_config.lora.rank", ADAPTER_RANK),), cost, 100)
