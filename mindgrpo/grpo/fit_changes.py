"""Changes of a configuration that take memory from a device, with what each costs; the cheapest first. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mindgrpo.grpo.run_plan import LARGEST, RunPlan
from mindgrpo.monitor.host_memory import format_bytes

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
    grid = plan.train.grid
    now = grid.model_parallel * grid.pipeline_stage
    for model, stages in _degrees(grid.size):
        if model * stages >= now and (model, stages) != (grid.model_parallel, grid.pipeline_stage):
            data = grid.size // (model * stages)
            cost = f"trains in DP{data}/MP{model}/PP{stages} instead of {grid}: more exchange between ranks"
            values = _layout("actor_config", data, model, stages)
            steps = abs(model.bit_length() - grid.model_parallel.bit_length())
            steps += abs(stages.bit_length() - grid.pipeline_stage.bit_length())
            yield Change("layout", values, cost, 4 + steps)


def _generator_layouts(plan: RunPlan) -> Iterator[Change]:
    grid = plan.infer.grid
    model = 2 * grid.model_parallel
    while model <= MOST_MODEL_PARALLEL and grid.size % model == 0:
        data = grid.size // model
        values = _layout("generate_config", data, model, 1)[:2] + _samples(plan)
        cost = f"generates in DP{data}/MP{model} instead of {grid}: more exchange between ranks"
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
    train, infer = plan.train.grid, plan.infer.grid
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
