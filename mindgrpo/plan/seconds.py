"""Estimates the seconds of each phase of a step by a roofline: counts of plan/work.py over the rates of devices. Pure.

A phase has a limit: the time of what no program could leave out (each real token once forward, and backward in an
update; weights read once a decoded token; bytes that must move), at the same rates and without padding, launches or
waiting. Refuses to guess what rewards and data cost, and what a network between hosts shares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from mindgrpo.algorithm.packing import PICK_BUCKETS, MicroShape
from mindgrpo.backend.dtypes import ITEM_BYTES
from mindgrpo.backend.speeds import SPEEDS, Speeds, device_of
from mindgrpo.config import Config
from mindgrpo.errors import UserError
from mindgrpo.models.parameters import num_active_parameters
from mindgrpo.models.precision import compute_dtype
from mindgrpo.parallel.sharding import Layout
from mindgrpo.plan.activations import WHOLE_LAYER
from mindgrpo.plan.memory import HostPlan
from mindgrpo.plan.micro_shapes import kernel_kind, reference_shape, update_shape
from mindgrpo.plan.run_plan import LARGEST, RunPlan, share_of
from mindgrpo.plan.sample_counts import SampleCounts, mean_read, prompt_calls
from mindgrpo.plan.work import FLOAT, FUSED, NATIVE, GraphCounts, LayerWork, Passes, Work
from mindgrpo.rollout.embedded.kv_cache import read_lengths

# Weights, gradients and two moments are read, and written with a copy in 16 bits.
FEWEST_OPTIMIZER_BYTES = 34
# Of a micro-batch the host reads a loss, log-probs and entropies; of an update it gathers numbers over all ranks twice.
READS, GATHERS = 3, 2
Seconds = Mapping[str, float]


@dataclass(frozen=True)
class PhaseSeconds:
    """`by` has the seconds of a step's phase by what takes them; "idle" is waiting for other stages."""

    phase: str
    by: Seconds
    limit: float
    work: Work

    @property
    def seconds(self) -> float:
        return sum(self.by.values())

    @property
    def idle_share(self) -> float:
        return self.by.get("idle", 0.0) / self.seconds if self.seconds else 0.0

    def __add__(self, other: PhaseSeconds) -> PhaseSeconds:
        """Returns one phase after the other, as one of this one's name."""
        kinds = self.by.keys() | other.by.keys()
        by = {kind: self.by.get(kind, 0.0) + other.by.get(kind, 0.0) for kind in sorted(kinds)}
        return PhaseSeconds(self.phase, by, self.limit + other.limit, self.work + other.work)


@dataclass(frozen=True)
class StepSeconds:
    """A step's phases, and the seconds of compilation before the first step has ended."""

    phases: Sequence[PhaseSeconds]
    compile: float
    assumed: str
    # Of all samples with their prompts, for one device.
    tokens: float

    @property
    def total(self) -> float:
        return sum(phase.seconds for phase in self.phases)

    @property
    def limit(self) -> float:
        return sum(phase.limit for phase in self.phases)

    def lines(self) -> list[str]:
        head = f"{'':<11}{'seconds':>9}{'limit':>9}{'share':>7}  mostly"
        rows = [_row(p.phase, p.seconds, p.limit, _mostly(p)) for p in self.phases]
        speed = f"{self.tokens / self.total:.0f} tokens/s a device, prompts and completions"
        step = _row("step", self.total, self.limit, speed)
        compiled = f"some {self.compile:.0f} s of compilation before the first step has ended"
        return [head, *rows, step, self.assumed, compiled]


def _row(name: str, seconds: float, limit: float, mostly: str) -> str:
    share = limit / seconds if seconds else 1.0
    return f"{name:<11}{seconds:>9.2f}{limit:>9.2f}{share:>7.0%}  {mostly}".rstrip()


def _mostly(phase: PhaseSeconds) -> str:
    """Names the two largest parts, and how much of the time stages wait for one another."""
    order = sorted(phase.by, key=lambda kind: -phase.by[kind])
    largest = [f"{kind} {phase.by[kind]:.2f}" for kind in order[:2] if phase.by[kind] >= 0.005]
    if phase.idle_share >= 0.01:
        largest.append(f"{phase.idle_share:.0%} idle")
    return ", ".join(dict.fromkeys(largest))


def speeds_of(config: Config) -> Speeds:
    """Returns the device's rates with what the configuration sets. Raises UserError for a device without any."""
    own = config.context.roofline
    name = own.device or device_of(config.context.target)
    if name not in SPEEDS:
        raise UserError(
            f"context.roofline.device is '{name}', but must be one of {', '.join(SPEEDS)}; for another device set the "
            "keys of context.roofline."
        )
    known = asdict(SPEEDS[name])
    set_here = {key: getattr(own, key) for key in known if getattr(own, key) is not None}
    return Speeds(**known | set_here)


class Rates:
    """Speeds of one rank in bytes, operations and seconds, where `ranks` of them work at once in all."""

    def __init__(self, speeds: Speeds, itemsize: int, ranks: int) -> None:
        here = min(ranks, speeds.devices_per_host)
        sharing = here if speeds.cores else 1
        # Ranks that wait their turn for a core.
        self.crowd = max(1.0, here / speeds.cores) if speeds.cores else 1.0
        peak = speeds.float32_tflops if itemsize == FLOAT else speeds.matmul_tflops
        self.flops = 1e12 * peak * speeds.matmul_share / sharing
        self.memory = 1e9 * speeds.memory_GB_per_s * speeds.memory_share / sharing
        self.link = 1e9 * speeds.link_GB_per_s * speeds.link_share / sharing
        self.host_link = 1e9 * speeds.host_link_GB_per_s * speeds.link_share
        self.host_copy = 1e9 * speeds.host_copy_GB_per_s
        self.speeds = speeds

    @property
    def shares_cores(self) -> bool:
        return self.speeds.cores > 0

    def sum_seconds(self, num_bytes: float, group: int) -> float:
        """A sum over `group` ranks, scattered and gathered; a device uses its links to all others at once."""
        if group == 1:
            return 0.0
        moved = 2 * num_bytes * (group - 1) / group
        if group > self.speeds.devices_per_host:
            return moved / self.host_link
        return moved / (self.link * (1 if self.shares_cores else group - 1))

    def seconds(self, work: Work, group: int, is_serial: bool) -> dict[str, float]:
        """Returns the seconds by kind of work that sums over `group` ranks."""
        speeds, micro = self.speeds, 1e-6 * self.crowd
        by = {
            "products": max(work.products / self.flops, work.weights / self.memory),
            "attention": work.attention / self.flops,
            "memory": work.memory / self.memory,
            "sums": self.sum_seconds(work.summed, group) + work.sums * micro * speeds.collective_us,
            "links": work.sent / self.link + work.sent_far / self.host_link,
            "slow operations": work.slow * 1e-9 * speeds.slow_ns * self.crowd,
        }
        launches = work.kernels * micro * speeds.launch_us
        by["launches"] = launches if is_serial else max(0.0, launches - sum(by.values()))
        by["calls"] = work.calls * micro * speeds.call_us
        by["host"] = work.waits * micro * speeds.sync_us + work.copied / self.host_copy
        return by


class Roofline:
    """Estimates one plan. `counts` and `speeds`: None for those of the run's kernels and its configuration."""

    def __init__(
        self, plan: RunPlan, counts: GraphCounts | None = None, speeds: Speeds | None = None
    ) -> None:
        kind = kernel_kind(plan.config)
        self.plan, self._ragged, self._is_fused = plan, kind == "native", kind == "fused"
        self.counts = counts or (NATIVE if self._ragged else FUSED)
        self.itemsize = ITEM_BYTES[compute_dtype(plan.config)]
        self.rates = Rates(speeds or speeds_of(plan.config), self.itemsize, plan.world_size)
        self.samples = SampleCounts.of(plan)
        actor = plan.config.actor_config.recompute_config
        layer = self._layers(plan.train)
        attention = layer.attention_size / layer.size
        shares = {"attention": attention, "mlp": 1 - attention}
        self._recomputed = sum(shares[name] for name in actor.modules) / actor.every
        self._recomputes_all = actor.modules == WHOLE_LAYER and actor.every == 1

    def least_seconds(self) -> float:
        """Returns the seconds of a step's phases that need no plan of the reshard, which takes longest to make."""
        return sum(phase.seconds for phase in self._computing())

    def step(self) -> StepSeconds:
        plan = self.plan
        phases = [self._reshard(), *self._computing(), self._host()]
        tokens = self.samples.count * (self.samples.prompt + self.samples.completion)
        return StepSeconds(phases, self._compile(), self._assumed(), tokens / plan.world_size)

    def _computing(self) -> list[PhaseSeconds]:
        reference = self.plan.reference
        phases = [self._rollout()]
        if reference is not None:
            own = Roofline(self.plan.of_reference, self.counts, self.rates.speeds)
            phases.append(own._reference(reference))
        if self.plan.computes_old_logps:
            phases.append(self._old_logps())
        return [*phases, self._update(), self._optimizer()]

    def _layers(self, layout: Layout) -> LayerWork:
        return LayerWork(self.plan, layout, self.counts, self.itemsize)

    def _phase(self, name: str, work: Work, group: int, limit: float) -> PhaseSeconds:
        by = self.rates.seconds(work, group, self.counts.is_serial)
        return PhaseSeconds(name, by, limit, work)

    def _pipelined(
        self,
        name: str,
        chunks: Sequence[Sequence[Work]],
        micro_batches: int,
        group: int,
        limit: float,
    ) -> PhaseSeconds:
        """A phase of micro-batches that pass through the stages' chunks, at the pace of the slowest stage.

        That stage idles while a micro-batch passes through one chunk of each of the others. Where ranks share cores,
        those that wait leave theirs to the others.
        """
        stages = [sum(own, start=Work()) for own in chunks]
        each = [self.rates.seconds(work, group, self.counts.is_serial) for work in stages]
        totals = [sum(by.values()) for by in each]
        slowest = int(np.argmax(totals))
        if self.rates.shares_cores:
            times = micro_batches / len(stages)
            merged = {kind: times * sum(by[kind] for by in each) for kind in each[0]}
            return PhaseSeconds(name, merged, limit, stages[slowest] * micro_batches)
        idle = (sum(totals) - totals[slowest]) / len(chunks[0])
        merged = {kind: micro_batches * value for kind, value in each[slowest].items()}
        return PhaseSeconds(name, merged | {"idle": idle}, limit, stages[slowest] * micro_batches)

    def _passes(
        self, samples: SampleCounts, shape: MicroShape, layout: Layout
    ) -> tuple[int, Passes]:
        """Returns each rank's micro-batches of `samples`, and its own tokens of one."""
        shares, ranks = layout.mesh.dp, layout.mesh.cp
        if self.counts.fits_rows:
            column_cost = 0.0 if self._ragged else self.plan.model.column_cost
            number, shape = samples.in_rows(shape, shares, column_cost)
        else:
            whole = self.plan.config.rl_config.seq_length * (shape.rows if self._ragged else 1)
            shape = replace(shape, length=max(shape.length, whole))
            number = samples.micro_batches(shape, shares)
        own = replace(samples, count=samples.count / (number * shares))
        pairs = own.pairs / ranks
        if self.counts.whole_mask:
            pairs = shape.tokens * shape.length
            if self.counts.is_causal and self._is_fused and shape.max_per_row == 1 and ranks == 1:
                pairs /= 2
        bucket = math.ceil(shape.tokens / PICK_BUCKETS)
        picks = max(1, math.ceil(own.count * own.completion / ranks / bucket)) * bucket
        return number, Passes(shape.tokens, picks, pairs)

    def _forward_chunk(self, layout: Layout, passes: Passes, own: range) -> Work:
        layers, is_last = self._layers(layout), own.stop == layout.num_layers
        flow = passes.tokens * layers.hidden * self.itemsize / layout.token_shares
        kernels = self.counts.forward.of(len(own))
        work = layers.forward(passes, len(own), is_last)
        return work + Work(kernels=kernels, sent=0 if is_last else flow)

    def _forward_chunks(self, layout: Layout, passes: Passes) -> list[list[Work]]:
        return [
            [self._forward_chunk(layout, passes, own) for own in chunks]
            for chunks in layout.stage_layers
        ]

    def _backward_chunk(self, layout: Layout, passes: Passes, own: range) -> Work:
        """Returns the work of a chunk's forward and backward pass."""
        layers, counts, num_layers = self._layers(layout), self.counts, len(own)
        is_last = own.stop == layout.num_layers
        makes_ahead = is_last and counts.hands_inputs_on and self._recomputes_all
        again = 1 - 1 / num_layers if makes_ahead else self._recomputed
        graph = counts.last if is_last else counts.first_back
        work = layers.backward(passes, num_layers, again, is_last)
        work += Work(kernels=graph.of(num_layers))
        if not is_last:
            # The last chunk's forward pass is counted with its backward graph.
            forward = self._forward_chunk(layout, passes, own)
            work += forward + Work(sent=forward.sent)
        elif makes_ahead:
            work += Work(kernels=counts.forward.of(num_layers - 1))
        return work

    def _token_limit(self, passes: float) -> float:
        """Returns the seconds of all devices for `passes` forward passes over the step's real tokens."""
        samples, model = self.samples, self.plan.model
        products = 2 * num_active_parameters(model) * samples.tokens
        width = model.num_attention_heads * model.head_dim
        attention = 4 * samples.pairs * width * model.num_hidden_layers
        return passes * (products + attention) / (self.rates.flops * self.plan.world_size)

    def _reference(self, layout: Layout) -> PhaseSeconds:
        shape = reference_shape(self.plan.config, self._ragged)
        number, passes = self._passes(self.samples, shape, layout)
        chunks = self._forward_chunks(layout, passes)
        limit = self._token_limit(1)
        return self._pipelined("reference", chunks, number, layout.mesh.mp, limit)

    def _old_logps(self) -> PhaseSeconds:
        layout = self.plan.train
        shape = update_shape(self.plan.config, self._ragged)
        number, passes = self._passes(self.samples, shape, layout)
        chunks = self._forward_chunks(layout, passes)
        limit = self._token_limit(1)
        return self._pipelined("old_logps", chunks, number, layout.mesh.mp, limit)

    def _update(self) -> PhaseSeconds:
        """All updates of a step without their optimizer."""
        plan = self.plan
        layout, updates = plan.train, plan.batch.updates_per_step
        a_pass = replace(self.samples, count=self.samples.count / plan.batch.updates_per_rollout)
        shape = update_shape(plan.config, self._ragged)
        number, passes = self._passes(a_pass, shape, layout)
        chunks = [
            [self._backward_chunk(layout, passes, own) for own in chunks]
            for chunks in layout.stage_layers
        ]
        limit = self._token_limit(3) * plan.config.rl_config.num_iterations
        one = self._pipelined("update", chunks, number, layout.mesh.mp, limit)
        if plan.config.rl_config.selects:
            forward = self._forward_chunks(layout, passes)
            one += self._pipelined("update", forward, number, layout.mesh.mp, 0.0)
        by = {kind: updates * seconds for kind, seconds in one.by.items()}
        return PhaseSeconds("update", by, limit, one.work * updates)

    @property
    def _trained_itemsize(self) -> int:
        return FLOAT if self.plan.lora is not None else self.itemsize

    def _optimizer(self) -> PhaseSeconds:
        plan, counts = self.plan, self.counts
        trained, updates = plan.trained_bytes(LARGEST) / FLOAT, plan.batch.updates_per_step
        # All gradients are cleared, and of those that a rank updates all the rest is done.
        updated = plan.optimizer_bytes(LARGEST) / FLOAT
        dp = plan.train.num_replicas
        summed, sums = trained * FLOAT, 1
        if plan.shards_optimizer:
            # Each is half of a sum: gradients are scattered, and weights gathered in the compute dtype.
            summed, sums = trained * (FLOAT + self._trained_itemsize) / 2, 2
        untouched = trained - updated
        num_layers = max(sum(map(len, chunks)) for chunks in plan.train.stage_layers)
        work = Work(
            memory=updated * counts.optimizer_bytes + untouched * FLOAT,
            kernels=counts.optimizer.of(num_layers),
            calls=counts.optimizer_calls,
            summed=summed if dp > 1 else 0,
            sums=sums if dp > 1 else 0,
        )
        if plan.config.actor_config.optimizer.opt_offload:
            work += Work(copied=2 * (trained + updated) * FLOAT)
        fewest = updated * FEWEST_OPTIMIZER_BYTES / self.rates.memory
        fewest += self.rates.sum_seconds(summed, dp)
        return self._phase("optimizer", work * updates, dp, fewest * updates)

    def _rollout(self) -> PhaseSeconds:
        drawn = self._drawing(self.samples)
        if self.plan.config.rl_config.advantage_estimator == "remax":
            drawn += self._drawing(self.samples.greedy)
        return drawn

    def _drawing(self, samples: SampleCounts) -> PhaseSeconds:
        plan, counts = self.plan, self.counts
        layout, cache = plan.infer, plan.cache_config
        layers, num_layers = self._layers(layout), plan.model.num_hidden_layers
        own = math.ceil(samples.count / layout.mesh.dp)
        slots = min(cache.slots, own)
        waves = math.ceil(own / slots)
        steps = (waves - 1) * samples.completion + samples.longest
        cached = samples.prompt + samples.completion / 2
        length, read = cache.longest, cached
        if counts.whole_cache:
            read = length
        if counts.part_caches:
            read = mean_read(length, samples.prompt, samples.longest, steps)
        # Slots whose sample has ended are computed with the others where a graph decodes.
        active = own * samples.completion / steps if counts.is_serial else slots
        work = layers.decode(active, num_layers, cached, read) * steps
        work += Work(waits=counts.decode_waits * steps / max(1, counts.tokens_a_graph))
        prompts, calls = math.ceil(own / samples.group), 1
        tokens = prompts * samples.prompt
        if counts.whole_prompts:
            calls = prompt_calls(prompts, slots // samples.group, cache.prompts_at_once)
            tokens = calls * cache.prompts_at_once * cache.max_prompt
        pairs = tokens * samples.prompt / 2
        prompt = layers.forward(Passes(tokens, 0, pairs), num_layers, False)
        work += prompt + Work(
            weights=prompt.weights * (calls - 1), kernels=calls * counts.prompt.of(num_layers)
        )
        least = layers.decode(own * samples.completion / steps, num_layers, cached, cached)
        read_bytes = (least.weights + least.memory) * steps
        limit = max(read_bytes / self.rates.memory, least.products * steps / self.rates.flops)
        limit += self._token_limit(1) * samples.prompts * samples.prompt / self.samples.tokens
        return self._phase("rollout", work, layout.mesh.mp, limit)

    def _reshard(self) -> PhaseSeconds:
        plan, counts, moves = self.plan, self.counts, self.plan.reshard
        source, target, sizes = moves.traffic()
        written = max(moves.kept_bytes(r) + moves.received_bytes(r) for r in range(moves.num_ranks))
        checks = 1 / (plan.config.rl_config.checksum_interval or math.inf)
        checked = checks * (share_of(plan.train, LARGEST) + share_of(plan.infer, LARGEST))
        here = self.rates.speeds.devices_per_host
        is_far = source // here != target // here
        pairs = source.astype(np.int64) * moves.num_ranks + target
        near = np.bincount(pairs[~is_far], sizes[~is_far], minlength=1).max()
        far = np.bincount(target[is_far], sizes[is_far], minlength=1).max()
        work = Work(
            memory=written * counts.sync_bytes + checked * counts.checked_bytes,
            slow=checked * counts.slow_checks,
            calls=(counts.sync_calls + checks * counts.checked_calls) * len(plan.infer.specs),
            sent=float(near),
            sent_far=float(far),
        )
        limit = max(near / self.rates.link, far / self.rates.host_link)
        return self._phase("reshard", work, 1, max(limit, 2 * written / self.rates.memory))

    def _host(self) -> PhaseSeconds:
        """What the host itself waits for and copies; rewards and data are not known."""
        plan = self.plan
        updates = plan.batch.updates_per_step
        a_pass = replace(self.samples, count=self.samples.count / plan.batch.updates_per_rollout)
        shape = update_shape(plan.config, self._ragged)
        number, _ = self._passes(a_pass, shape, plan.train)
        gathers = GATHERS * updates
        work = Work(
            waits=READS * number * updates + 2 * gathers,
            sums=2 * gathers if plan.world_size > 1 else 0,
            copied=HostPlan(plan).step_bytes / plan.world_size,
        )
        return self._phase("host", work, 1, work.copied / self.rates.host_copy)

    def _compile(self) -> float:
        """Returns the seconds of the rank that compiles most."""
        plan, counts = self.plan, self.counts
        whole = plan.model.num_hidden_layers
        cache = plan.cache_config
        lengths = read_lengths(cache.longest) if counts.part_caches else (0,)
        kernels = len(lengths) * counts.tokens_a_graph * counts.decode.of(whole)
        kernels += counts.prompt.of(whole)
        if plan.reference is not None:
            kernels += counts.forward.of(
                math.ceil(plan.reference.num_layers / plan.reference.mesh.pp)
            )
        own = max(sum(map(len, chunks)) for chunks in plan.train.stage_layers)
        kernels += counts.forward.of(own) + counts.last.of(own) + counts.optimizer.of(own)
        return kernels * 1e-3 * self.rates.speeds.compile_ms * self.rates.crowd

    def _assumed(self) -> str:
        config, samples = self.plan.config, self.samples
        name = config.context.roofline.device or device_of(config.context.target)
        return (
            f"for {name}, prompts of {samples.prompt} tokens and completions of {samples.completion:.0f}, the longest "
            f"{samples.longest}: keys of context.roofline (docs/plan.md)"
        )
