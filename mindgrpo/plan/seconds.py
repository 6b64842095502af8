"""Estimates the seconds of each phase of a step: counts of what a rank computes, reads and sends, over rates. Pure.

Counts follow from numbers of parameters and tokens: a layer is an average one of the model, and ranks that split it
have equal parts. Refuses to guess what rewards and data cost, and what hosts share of a network.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace

from mindgrpo.algorithm.image_patches import row_length
from mindgrpo.algorithm.packing import MicroShape
from mindgrpo.algorithm.row_shapes import TOKENS_PER_MICRO_BATCH, row_lengths
from mindgrpo.backend.dtypes import ITEM_BYTES
from mindgrpo.backend.speeds import SPEEDS, Speeds, device_of
from mindgrpo.config import Config
from mindgrpo.errors import UserError
from mindgrpo.models.expert_plan import CAPACITIES
from mindgrpo.models.parameters import num_active_parameters
from mindgrpo.models.precision import compute_dtype
from mindgrpo.models.vision_config import num_vision_parameters
from mindgrpo.parallel.sharding import Layout
from mindgrpo.plan.image_needs import encoder_flops, images_of_rank, longest_image
from mindgrpo.plan.memory import HostPlan
from mindgrpo.plan.micro_shapes import kernel_kind, update_shape
from mindgrpo.plan.run_plan import FLOAT_BYTES, LARGEST, RunPlan
from mindgrpo.rollout.embedded.kv_cache import read_length, read_lengths

# Kernels of each graph, of a layer and beside all layers; `backward` is the last stage's. Of fused kernels they are
# counted in the compiler's own output for the accelerator, in 16 bits; on processors one C call decodes.
FUSED = {"decode": (14, 56), "prompt": (19, 4), "forward": (23, 28), "backward": (59, 116)} | {
    "optimizer": (42, 23)
}
NATIVE = dict.fromkeys(FUSED, (0, 0)) | {"forward": (14, 20), "backward": (40, 60)}
# Bytes of memory: a parameter in the optimizer (norm, scale, AdamW, rounding, zeroing), an element in its checksums.
OPTIMIZER_BYTES, CHECKED_BYTES = 45.0, {"fused": 26.0, "native": 4.0}
# Calls outside of graphs of a weight sync, a tensor (scripts/bench/sync_calls.py counts them).
SYNC_CALLS = 2.0


@dataclass(frozen=True)
class Work:
    """Counts of one rank: `flops`, of products that read `weights` bytes of matrices and of attention.

    In bytes: `memory` that other kernels read and write, `summed` over a group, `sent` over one link, `copied` between
    device and host. `slow` are logits that a processor draws a token from; the others are numbers: `sums` over ranks,
    `kernels`, `calls` outside of graphs, `waits` of the host.
    """

    flops: float = 0.0
    weights: float = 0.0
    memory: float = 0.0
    summed: float = 0.0
    sums: float = 0.0
    sent: float = 0.0
    copied: float = 0.0
    slow: float = 0.0
    kernels: float = 0.0
    calls: float = 0.0
    waits: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Work)))

    def __mul__(self, times: float) -> Work:
        return Work(*(getattr(self, f.name) * times for f in fields(Work)))


@dataclass(frozen=True)
class PhaseSeconds:
    """`by` has the seconds of a step's phase by what takes them; "idle" is waiting for other stages."""

    phase: str
    by: Mapping[str, float]
    work: Work

    @property
    def seconds(self) -> float:
        return sum(self.by.values())

    @property
    def idle_share(self) -> float:
        return self.by.get("idle", 0.0) / self.seconds if self.seconds else 0.0

    def line(self) -> str:
        """Names the two largest parts, and how much of the time stages wait for one another."""
        order = sorted(self.by, key=lambda kind: -self.by[kind])
        largest = [f"{kind} {self.by[kind]:.2f}" for kind in order[:2] if self.by[kind] >= 0.005]
        if self.idle_share >= 0.01:
            largest.append(f"{self.idle_share:.0%} idle")
        return f"{self.phase:<11}{self.seconds:>9.2f}  {', '.join(largest)}".rstrip()


@dataclass(frozen=True)
class StepSeconds:
    """A step's phases, the seconds of compilation before it has ended the first time, and what was `assumed`.

    `tokens` are of all samples with their prompts, for one device.
    """

    phases: Sequence[PhaseSeconds]
    compile: float
    assumed: str
    tokens: float

    @property
    def total(self) -> float:
        return sum(phase.seconds for phase in self.phases)

    def lines(self) -> list[str]:
        speed = f"{self.tokens / self.total:.0f} tokens/s a device, prompts and completions"
        return [
            f"{'':<11}{'seconds':>9}  mostly",
            *(phase.line() for phase in self.phases),
            f"{'step':<11}{self.total:>9.2f}  {speed}",
            self.assumed,
            f"some {self.compile:.0f} s of compilation before the first step has ended",
        ]


def paced(
    stages: Sequence[Mapping[str, float]], micro_batches: int, num_chunks: int, share_cores: bool
) -> dict[str, float]:
    """Paces a pipeline by its slowest stage, which idles while a micro-batch is in a chunk of each of the others.

    Where ranks share cores, those that wait leave theirs to the others.
    """
    if share_cores:
        times = micro_batches / len(stages)
        return {kind: times * sum(own[kind] for own in stages) for kind in stages[0]}
    totals = [sum(by.values()) for by in stages]
    slowest = stages[totals.index(max(totals))]
    by = {kind: micro_batches * value for kind, value in slowest.items()}
    return by | {"idle": (sum(totals) - max(totals)) / num_chunks}


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
        peak = speeds.float32_tflops if itemsize == FLOAT_BYTES else speeds.matmul_tflops
        self.flops = 1e12 * peak * speeds.matmul_share / sharing
        self.memory = 1e9 * speeds.memory_GB_per_s * speeds.memory_share / sharing
        self.link = 1e9 * speeds.link_GB_per_s * speeds.link_share / sharing
        self.host_link = 1e9 * speeds.host_link_GB_per_s * speeds.link_share
        self.speeds = speeds

    def sum_seconds(self, num_bytes: float, group: int) -> float:
        """A sum over `group` ranks, scattered and gathered; a device uses its links to all others at once."""
        if group == 1:
            return 0.0
        moved = 2 * num_bytes * (group - 1) / group
        if group > self.speeds.devices_per_host:
            return moved / self.host_link
        return moved / (self.link * (1 if self.speeds.cores else group - 1))

    def seconds(self, work: Work, group: int, is_serial: bool) -> dict[str, float]:
        """Returns the seconds by kind of work that sums over `group` ranks."""
        speeds, micro = self.speeds, 1e-6 * self.crowd
        sums = self.sum_seconds(work.summed, group) + work.sums * micro * speeds.collective_us
        by = {
            "products": max(work.flops / self.flops, work.weights / self.memory),
            "memory": work.memory / self.memory,
            "sums": sums,
            "links": work.sent / self.link,
            "slow operations": work.slow * 1e-9 * speeds.slow_ns * self.crowd,
        }
        launches = work.kernels * micro * speeds.launch_us
        by["launches"] = launches if is_serial else max(0.0, launches - sum(by.values()))
        by["calls"] = work.calls * micro * speeds.call_us
        copied = work.copied / 1e9 / speeds.host_copy_GB_per_s
        return by | {"host": work.waits * micro * speeds.sync_us + copied}


@dataclass(frozen=True)
class SampleCounts:
    """`count` samples, `group` of them a prompt, and their lengths in tokens."""

    count: float
    group: int
    prompt: int
    completion: float
    longest: int

    @property
    def prompts(self) -> float:
        return math.ceil(self.count / self.group)

    def as_whole_texts(self) -> SampleCounts:
        """Returns the samples as prompts whose last token predicts, which share nothing."""
        text, beyond = math.ceil(self.prompt + self.completion), self.longest - self.completion
        longest = max(1, math.ceil(beyond))
        return replace(self, group=1, prompt=text, completion=1.0, longest=longest)

    def micro_batches(self, shape: MicroShape, shares: int) -> int:
        """Counts each rank's micro-batches: a row takes whole groups, and then samples of one more."""
        cost = max(1.0, self.completion - 1)
        groups, room = divmod(shape.length, self.prompt + self.group * cost)
        fit = int(groups * self.group + max(0, (room - self.prompt) // cost))
        a_row = max(1, min(fit, shape.max_per_row or fit, math.ceil(self.count)))
        return max(1, math.ceil(math.ceil(self.count / a_row) / (shape.rows * shares)))

    def in_rows(self, widest: MicroShape, shares: int, cost: float) -> tuple[int, MicroShape]:
        """Returns each rank's micro-batches and their shape, the cheapest as row_shapes.py chooses it by column."""
        lengths = [n for n in row_lengths(widest) if n >= self.prompt + self.longest]
        options = []
        for shape in (replace(widest, length=n) for n in lengths or [widest.length]):
            number = self.micro_batches(shape, shares)
            tokens = shape.tokens * (1.0 + shape.length * cost)
            options.append((number * (TOKENS_PER_MICRO_BATCH + tokens), number, shape))
        return min(options, key=lambda option: option[0])[1:]


class RankShare:
    """What a rank has of `plan`'s model in `layout`, and what an average layer and the head do with it."""

    def __init__(self, plan: RunPlan, layout: Layout, itemsize: int) -> None:
        self.layout, self.token_shares = layout, layout.token_shares
        self.model, self.mesh, self.itemsize = plan.model, layout.mesh, itemsize
        model, tp = plan.model, layout.mesh.tp
        layers, hidden, moe = model.num_hidden_layers, model.hidden_size, model.moe
        self.vocabulary = model.vocab_size / tp if model.head == "vocabulary" else 1.0
        is_one = model.tie_word_embeddings or model.head == "scalar"
        tables = model.vocab_size * hidden * (1 if is_one else 2)
        # Elements of a layer that a token is multiplied with, and those that are kept: of experts, and of all else.
        self.size = (num_active_parameters(model) - tables) / layers / tp
        kept = [spec for spec in layout.specs if isinstance(spec.position, int)]
        self.experts = sum(layout.local_sizes[s.name] / layers for s in kept if len(s.shape) > 2)
        self.dense = sum(layout.local_sizes[s.name] for s in kept) / layers - self.experts
        self.expert_share = sum(kind.has_experts for kind in model.layers) / layers
        self.copies = moe.per_token * self.expert_share if moe else 0.0
        is_wide = plan.config.context.reduce_dtype == "float32"
        self.sum_bytes = FLOAT_BYTES if is_wide else itemsize
        kv_width = 2 * max(1, model.num_key_value_heads / tp) * model.head_dim
        if model.latent is not None:
            kv_width = model.latent.rank + model.latent.rope_dim
        self.cached = kv_width * itemsize

    def read_by(self, tokens: float) -> float:
        """Counts the elements of a layer's matrices that `tokens` use, which choose experts at random."""
        if (moe := self.model.moe) is None:
            return self.dense
        coming = tokens / self.token_shares * self.mesh.ep * self.mesh.etp
        return self.dense + self.experts * (1 - (1 - moe.per_token / moe.num_experts) ** coming)

    def forward(self, tokens: float, pairs: float, layers: int) -> Work:
        """Counts layers without launches; `pairs` of a query with a key are those of attention in one layer."""
        mesh, hidden, own = self.mesh, self.model.hidden_size, tokens / self.token_shares
        width = self.model.num_attention_heads * self.model.head_dim / mesh.tp
        # Norms and residuals, copies of tokens for experts, and the results of products.
        between = own * (10 + 4 * self.copies) * hidden + tokens * 5 / 3 * self.size / hidden
        # One sum for attention and one for a dense feed-forward; experts exchange copies of tokens, there and back.
        sums = (2 - self.expert_share) * (mesh.tp > 1)
        others = min(CAPACITIES[0], mesh.ep) * (mesh.ep - 1) / mesh.ep + (mesh.etp - 1)
        exchanged = 2 * others * own * self.copies * hidden * self.itemsize
        calls = 2 * ((mesh.ep > 1) + (mesh.etp > 1)) * self.expert_share + (mesh.cp > 1)
        work = Work(
            flops=2 * tokens * self.size + 4 * pairs * width,
            weights=self.read_by(tokens) * self.itemsize,
            memory=between * self.itemsize,
            summed=sums * tokens * hidden * self.sum_bytes,
            sums=sums * (2 if self.token_shares > 1 else 1) + calls,
            # With keys and values of the ranks that share rows.
            sent=exchanged + (mesh.cp - 1) * tokens * self.cached,
        )
        return work * layers

    def head(self, picks: float) -> Work:
        size, sums = self.vocabulary * self.model.hidden_size, 3 if self.mesh.tp > 1 else 0
        memory = 2 * picks * self.vocabulary * FLOAT_BYTES
        return Work(2 * picks * size, size * self.itemsize, memory, sums=sums)


class Roofline:
    """Estimates one plan, at `speeds` or those of its configuration."""

    def __init__(self, plan: RunPlan, speeds: Speeds | None = None) -> None:
        self.plan, self._kind = plan, kernel_kind(plan.config)
        self._is_native = self._kind == "native"
        self._itemsize = ITEM_BYTES[compute_dtype(plan.config)]
        self.rates = Rates(speeds or speeds_of(plan.config), self._itemsize, plan.world_size)
        own, generate = plan.config.context.roofline, plan.config.generate_config
        longest, group = generate.sampling_config.max_tokens, plan.config.rl_config.num_generations
        prompt = own.prompt_tokens or max(1, generate.max_prompt_length // 10)
        completion = min(own.completion_tokens or math.ceil(0.6 * longest), longest)
        count = plan.batch.samples_per_step
        self.samples = SampleCounts(count, group, prompt, completion, longest)
        updates = plan.batch.updates_per_rollout
        self._of_update = replace(self.samples, count=count / updates)

    def step(self) -> StepSeconds:
        samples, context = self.samples, self.plan.config.context
        device = context.roofline.device or device_of(context.target)
        assumed = (
            f"for {device}, prompts of {samples.prompt} tokens and completions of {samples.completion:.0f}, the "
            f"longest {samples.longest}: keys of context.roofline (docs/plan.md)"
        )
        tokens = samples.count * (samples.prompt + samples.completion) / self.plan.world_size
        return StepSeconds([self._reshard(), *self.computing()], self._compile(), assumed, tokens)

    def computing(self) -> list[PhaseSeconds]:
        """Returns the phases that need no plan of the reshard, which takes longest to make."""
        plan, train = self.plan, self.plan.train
        phases = [*self._images(), self._rollout()]
        for role in plan.forward_roles:
            own = Roofline(plan.of_role(role), self.rates.speeds)
            shape, samples = role.widest(self._is_native), self.samples
            if role.model.head == "scalar":
                # Its last token alone predicts, and no prompt is shared.
                samples = samples.as_whole_texts()
            phases.append(own._passed(role.name, role.layout, shape, samples))
        shape = update_shape(plan.config, self._is_native)
        if plan.computes_old_logps:
            phases.append(self._passed("old_logps", train, shape, self.samples))
        times = plan.batch.updates_per_step
        if plan.critic is not None:
            phases += Roofline(plan.critic, self.rates.speeds).of_critic()
        phases.append(self._passed("update", train, shape, self._of_update, True, times))
        return [*phases, self._optimizer()]

    def of_critic(self) -> list[PhaseSeconds]:
        """Returns the phases of a critic, of which this is the plan."""
        plan, shape = self.plan, update_shape(self.plan.config, self._is_native)
        values = self._passed("values", plan.train, shape, self.samples)
        times, optimizer = plan.batch.updates_per_step, self._optimizer()
        update = self._passed("update_critic", plan.train, shape, self._of_update, True, times)
        return [values, update, replace(optimizer, phase="critic optimizer")]

    def _phase(self, name: str, work: Work, group: int = 1) -> PhaseSeconds:
        return PhaseSeconds(name, self.rates.seconds(work, group, self._is_native), work)

    def _launched(self, graph: str, layers: int) -> float:
        a_layer, beside = (NATIVE if self._is_native else FUSED)[graph]
        return layers * a_layer + beside

    def _passed(
        self,
        name: str,
        layout: Layout,
        widest: MicroShape,
        samples: SampleCounts,
        trains: bool = False,
        times: int = 1,
    ) -> PhaseSeconds:
        """A phase whose micro-batches of `samples` pass through the stages, forward or also backward, `times` times."""
        mesh, column_cost = layout.mesh, 0.0 if self._is_native else self.plan.model.column_cost
        share = RankShare(self.plan, layout, self._itemsize)
        number, shape = samples.in_rows(widest, mesh.dp, column_cost)
        a_rank = samples.count / (number * mesh.size_of(("dp", "cp")))
        pairs: float = shape.tokens * shape.length
        if self._is_native:
            own = samples.completion * (samples.prompt + samples.completion / 2)
            pairs = a_rank * (own + samples.prompt**2 / 2 / samples.group)
        elif self._kind == "fused" and shape.max_per_row == 1 and mesh.cp == 1:
            pairs /= 2
        predicted = min(shape.tokens, a_rank * samples.completion)
        micro_batch = shape.tokens, pairs, predicted
        stages = [
            sum((self._chunk(share, micro_batch, own, trains) for own in chunks), start=Work())
            for chunks in layout.stage_layers
        ]
        each = [self.rates.seconds(work * times, mesh.tp, self._is_native) for work in stages]
        by = paced(each, number, layout.num_chunks, self.rates.speeds.cores > 0)
        return PhaseSeconds(name, by, stages[-1] * (number * times))

    def _chunk(
        self, share: RankShare, micro_batch: tuple[int, float, float], own: range, trains: bool
    ) -> Work:
        """Counts a chunk's pass over a micro-batch (tokens, pairs of attention, tokens that predict).

        A chunk without the head computes its layers again from what they got, one with it those that are recomputed.
        """
        (tokens, pairs, picks), num_layers = micro_batch, len(own)
        is_last = own.stop == share.layout.num_layers
        flow = tokens * share.model.hidden_size * self._itemsize / share.token_shares
        layers, head = share.forward(tokens, pairs, num_layers), share.head(picks)
        forward = layers + Work(kernels=self._launched("forward", num_layers))
        forward += head if is_last else Work(sent=flow)
        if not trains:
            return forward
        again, actor = 1.0, self.plan.config.actor_config.recompute_config
        if is_last:
            attention = share.model.attention_size(share.mesh.tp) / share.size
            shares = {"attention": attention, "mlp": 1 - attention}
            again = sum(shares[name] for name in actor.modules) / actor.every
        gradients = 1 if self.plan.lora else 2
        work = replace(layers, flops=gradients * layers.flops, memory=2 * layers.memory)
        work += layers * (1 + again) + Work(kernels=self._launched("backward", num_layers))
        if not self.plan.lora:
            # Gradients of weights are added to the pool's.
            work += Work(memory=3 * FLOAT_BYTES * share.read_by(math.inf) * num_layers)
        # The head: forward, again for the gradient, and the two products of the gradient. Of its results the host reads
        # a loss, log-probs and entropies.
        last = head * 4 + Work(waits=3)
        work += last if is_last else Work(sent=2 * flow, kernels=forward.kernels)
        # Which tokens train is chosen in a pass of its own.
        return work + forward if self.plan.config.rl_config.selects else work

    def _optimizer(self) -> PhaseSeconds:
        plan, dp = self.plan, self.plan.train.num_replicas
        # All gradients are cleared, and of those that a rank updates all the rest is done.
        trained, updated = plan.trained_bytes(LARGEST), plan.optimizer_bytes(LARGEST)
        summed: float = trained if dp > 1 else 0
        if plan.shards_optimizer:
            # Each is half of a sum: gradients are scattered, and weights gathered in the compute dtype.
            itemsize = FLOAT_BYTES if plan.lora else self._itemsize
            summed *= (FLOAT_BYTES + itemsize) / (2 * FLOAT_BYTES)
        offloads = plan.config.actor_config.optimizer.opt_offload
        memory = updated / FLOAT_BYTES * OPTIMIZER_BYTES + trained - updated
        layers = max(sum(map(len, chunks)) for chunks in plan.train.stage_layers)
        kernels = self._launched("optimizer", layers)
        copied = 2 * (trained + updated) if offloads else 0
        work = Work(memory=memory, summed=summed, sums=dp > 1, copied=copied, kernels=kernels)
        return self._phase("optimizer", work * plan.batch.updates_per_step, dp)

    def _images(self) -> list[PhaseSeconds]:
        """Returns the phase of the vision encoder: an image a prompt, as long as the prompt is assumed to be."""
        vision = self.plan.model.vision
        if vision is None:
            return []
        longest, number = longest_image(self.plan, vision), images_of_rank(self.plan)
        features = min(longest, self.samples.prompt)
        rows = math.ceil(number * features * vision.merged / row_length(longest, vision.merged))
        itemsize = self._itemsize
        weights = num_vision_parameters(vision) * itemsize
        a_rank = self.plan.batch.prompts_per_step * features * vision.out_hidden_size * FLOAT_BYTES
        work = Work(
            flops=encoder_flops(self.plan, vision, features) * number,
            weights=weights * rows,
            kernels=self._launched("forward", vision.depth) * rows,
            sent=a_rank if self.plan.world_size > 1 else 0,
            waits=rows,
        )
        return [self._phase("images", work)]

    def _rollout(self) -> PhaseSeconds:
        share = RankShare(self.plan, self.plan.infer, self._itemsize)
        work = self._drawing(share, self.samples)
        if self.plan.config.rl_config.estimator.needs_greedy:
            # One more completion of each prompt, drawn apart from the others.
            greedy = replace(self.samples, count=self.samples.prompts, group=1)
            work += self._drawing(share, greedy)
        return self._phase("rollout", work, self.plan.infer.mesh.tp)

    def _drawing(self, share: RankShare, samples: SampleCounts) -> Work:
        cache, layers = self.plan.cache_config, share.layout.num_layers
        own = math.ceil(samples.count / share.mesh.dp)
        slots, prompts = min(cache.slots, own), math.ceil(own / samples.group)
        steps = (math.ceil(own / slots) - 1) * samples.completion + samples.longest
        if cache.draft_rows != 0:
            steps /= 1.0 + self.plan.config.context.roofline.accepted_drafts
        cached = read = samples.prompt + samples.completion / 2
        active, tokens, calls = own * samples.completion / steps, prompts * samples.prompt, 1
        if not self._is_native:
            # Slots whose sample has ended are computed with the others, and prompts come padded.
            active, tokens = float(slots + cache.rows - cache.slots), prompts * cache.max_prompt
            read = read_length(cache.longest, samples.prompt + samples.longest // 2)
            calls = math.ceil(prompts / cache.prompts_at_once)
        # The few rows of a token stay in the caches between kernels; the keys and values of slots are read.
        decode = replace(
            share.forward(active, active * cached, layers) + share.head(active),
            memory=active * read * share.cached * layers,
            slow=active * share.vocabulary * self._is_native,
            kernels=self._launched("decode", layers),
            waits=not self._is_native,
        )
        prompt = share.forward(tokens, tokens * samples.prompt / 2, layers)
        kernels = calls * self._launched("prompt", layers)
        return decode * steps + replace(prompt, weights=prompt.weights * calls, kernels=kernels)

    def _reshard(self) -> PhaseSeconds:
        """The weights' way to the generator, with what a step copies between device and host."""
        plan, moves, rates = self.plan, self.plan.reshard, self.rates
        received = [moves.received_bytes(rank) for rank in range(moves.num_ranks)]
        written = max(moves.kept_bytes(rank) + size for rank, size in enumerate(received))
        checks = 1 / (plan.config.rl_config.checksum_interval or math.inf)
        checked = checks * (max(plan.train.stage_sizes) + max(plan.infer.stage_sizes))
        checked *= CHECKED_BYTES["native" if self._is_native else "fused"]
        is_far = plan.world_size > rates.speeds.devices_per_host
        work = Work(
            memory=2 * written + checked,
            calls=SYNC_CALLS * len(plan.infer.specs),
            sent=max(received) * (rates.link / rates.host_link if is_far else 1),
            copied=HostPlan(plan).step_bytes / plan.world_size,
        )
        return self._phase("reshard", work)

    def _compile(self) -> float:
        """Returns the seconds of the rank that compiles most."""
        plan, whole = self.plan, self.plan.model.num_hidden_layers
        own = max(sum(map(len, chunks)) for chunks in plan.train.stage_layers)
        decoding = () if self._is_native else read_lengths(plan.cache_config.longest)
        graphs = {"prompt": whole, "forward": own, "backward": own, "optimizer": own}
        kernels = sum(self._launched(graph, layers) for graph, layers in graphs.items())
        kernels += len(decoding) * self._launched("decode", whole)
        for role in plan.forward_roles:
            layers = math.ceil(role.model.num_hidden_layers / role.layout.mesh.pp)
            kernels += self._launched("forward", layers)
        return kernels * 1e-3 * self.rates.speeds.compile_ms * self.rates.crowd
