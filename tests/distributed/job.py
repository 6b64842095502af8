"""The program of the distributed tests, one process a rank, with tests/ in PYTHONPATH: job.py RESULT_FOLDER BACKEND.

With --write-golden [RECIPE ...] instead it writes the trajectory of these recipes, or of all, in one process.
Runs those of this world's cases that RESULT_FOLDER/cases.json names, through the project's own rooms, and writes
rank_N.json (and the trained parameters, from rank 0). Judges nothing: tests/test_distributed.py does. Refuses to write
the golden trajectory from several ranks.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import os
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cases as c
import numpy as np
from algorithms import advantages_of, loss_of, replace
from carried import communication, cores_of, sum_in_graph, tokens_in_graph
from comparison import Comparison
from critics import critic_updates
from golden import golden_gaps, golden_scores, image_features
from losses import updates_by_every_loss
from own_order import add_in_own_order
from saving import saved_and_loaded
from scripted_turns import scripted
from sharded import sharded_optimizers
from source_cache import cache_sources
from task import Task

from mindgrpo.algorithm.packing import MicroShape, PackedRollout
from mindgrpo.algorithm.sample import Rollout
from mindgrpo.algorithm.train_batch import compute_advantages
from mindgrpo.backend.connect import RuntimeSettings, connect
from mindgrpo.backend.contract import Backend
from mindgrpo.backend.cpu.host import job_name
from mindgrpo.backend.dtypes import Dtype
from mindgrpo.backend.kernels.shapes import AdamWSettings, SamplingParams
from mindgrpo.backend.remote_arrays import FetchedArrays
from mindgrpo.backend.targets import SHARED_MEMORY, choose_target
from mindgrpo.config import Config
from mindgrpo.grpo.metrics import token_rows
from mindgrpo.grpo.state import Run as WholeRun
from mindgrpo.grpo.step import Stepper
from mindgrpo.models.decoder import KEEP_ALL, WHOLE_LAYERS
from mindgrpo.models.decoder_config import DecoderConfig, decoder_config
from mindgrpo.models.lora import TARGETS, LoraSettings, fill_adapters
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.models.pipeline import ForwardPipeline, compute_log_probs, record_log_probs
from mindgrpo.models.shard import Shard
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Layout
from mindgrpo.rollout.embedded.engine import EmbeddedEngine
from mindgrpo.rollout.embedded.kv_cache import KVCacheConfig
from mindgrpo.rollout.engine import SeedKey
from mindgrpo.rollout.noise import EVALUATION
from mindgrpo.rollout.partial import PartialLimits, PartialRollouts, PartialSettings
from mindgrpo.rollout.replicas import Replicas
from mindgrpo.training.policy import Policy, UpdateSettings
from mindgrpo.training.update import UpdateReport, update
from mindgrpo.weight_sync.execute import Resharder
from mindgrpo.weight_sync.plan import plan_reshard
from mindgrpo.weight_sync.transfer import WeightSyncer
from mindgrpo.weights.checksum import host_sums
from mindgrpo.weights.local_weights import Weights
from mindgrpo.weights.pretrained import fill_random

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "trajectory.json"
BUCKET_BYTES = 32 << 10  # several rounds a pair
SEED = 5


def layout_of(
    config: DecoderConfig, mesh: Mesh, splits_tokens: bool = False, chunks: int = 1
) -> Layout:
    return Layout.of(mesh, parameter_specs(config, splits_tokens), 0, splits_tokens, chunks)


def as_of_another_engine(rollout: Rollout) -> Rollout:
    """With the generator's log-probs with an error that is a function of the tokens alone, so that no weight is 1."""
    samples = []
    for sample in rollout.samples:
        logps = sample.logps + np.float32(0.1) * np.sin(sample.tokens.astype(np.float32))
        samples.append(replace(sample, arrays={**sample.arrays, "logps": logps}))
    return replace(rollout, samples=tuple(samples))


class Run:
    """One case on this rank: the roles, and what its steps brought."""

    encoder = None

    def __init__(self, case: c.Case, backend: Backend) -> None:
        self.case, self.backend = case, backend
        backend.kernels.batch_invariant = case.batch_invariant
        self.recipe = c.RECIPES[case.recipe]
        config = decoder_config(self.recipe.model, "the test's model")
        self.config = config.balanced(self.recipe.balance_coef)
        ep, etp = case.experts
        mesh = replace(Mesh(*case.train), ep=ep, etp=etp)
        self.train = layout_of(self.config, mesh, case.splits_tokens, case.chunks)
        infer = Mesh(*case.infer)
        self.infer = layout_of(self.config, replace(infer, ep=infer.tp if self.config.moe else 1))
        self.policy = self._policy()
        self.generator = self._generator()
        self.reference = self._reference() if self.recipe.has_reference else None
        plan = plan_reshard(self.train, self.infer)
        adapters, target = self.policy.adapters, self.generator.weights
        self.syncer = WeightSyncer(self.policy.weights, adapters, target, backend, plan)
        turns, has_environment = self.recipe.max_turns, self.recipe.environment
        conversations = scripted(
            turns, has_environment, backend.rank == 0, backend.world.gather_objects
        )
        self.replicas = Replicas(self.generator, self.infer.mesh, backend, conversations)
        self.advantages = advantages_of(c.NUM_GENERATIONS, **self.recipe.advantages)
        self.stepper = self._stepper()
        for pool in backend.live_pools:
            pool.load()
        self.replaced: list[int] = []
        self.comparison = Comparison(backend)

    def _stepper(self) -> Stepper:
        """Of which only the collecting is used: this run is what it takes for its roles."""
        keys: dict[str, Any] = {"num_generations": c.NUM_GENERATIONS, "seed": SEED}
        keys["advantage_estimator"] = self.advantages.advantage_estimator
        if rounds := self.recipe.resampling_rounds:
            keys |= {"dynamic_sampling": True, "dynamic_sampling_rounds": rounds}
        config = Config.model_validate({"rl_config": keys})
        task: Any = Task(has_hits=self.recipe.equal_groups)
        rollouts = None
        if self.recipe.partial_chunk:
            limits = PartialLimits(c.NUM_PROMPTS // 2, self.recipe.partial_chunk, c.MAX_TOKENS, 1)
            asked = PartialSettings(limits, c.NUM_PROMPTS, c.NUM_GENERATIONS)
            rollouts = PartialRollouts(asked, task, self.replicas)
        roles: Any = self
        inputs: Any = SimpleNamespace(sampling=self.generator.sampling)
        run = WholeRun(config, self.backend, inputs, roles, task, 1)
        return Stepper(run, self.replicas, task, rollouts)

    def _policy(self) -> Policy:
        settings = UpdateSettings(
            shape=MicroShape(c.MICRO_ROWS, self.case.widest, context_ranks=self.train.mesh.cp),
            num_positions=c.ROW_LENGTH,
            temperature=c.TEMPERATURE,
            recompute=WHOLE_LAYERS if self.case.recompute else KEEP_ALL,
            loss_config=loss_of(**(c.LOSS | self.recipe.loss_config)),
            max_tokens=c.MAX_TOKENS,
            max_grad_norm=c.MAX_GRAD_NORM,
            adamw=AdamWSettings(0.9, 0.95, c.ADAM_EPS, c.WEIGHT_DECAY),
            keeps_entropies=True,
            shards_optimizer=self.case.shards_optimizer,
        )
        lora = self.recipe.lora and LoraSettings(*self.recipe.lora, TARGETS)
        policy = Policy(self.config, self.train, self.backend, settings, lora)
        if policy.adapters is None:
            fill_random(policy.masters, SEED, c.INITIAL_SCALE)
        else:
            fill_random(policy.weights, SEED, c.INITIAL_SCALE)
            fill_adapters(policy.masters, SEED)
        policy.masters_changed()
        return policy

    def _generator(self) -> EmbeddedEngine:
        settings: dict[str, Any] = {
            "temperature": c.TEMPERATURE,
            "min_tokens": 2,
            "max_tokens": c.MAX_TOKENS,
            "stop_ids": c.STOP_IDS,
        }
        sampling = SamplingParams(**(settings | self.recipe.sampling))
        longest, goes_on = self.recipe.longest, self.recipe.longest > c.MAX_PROMPT
        sizes = c.SLOTS, c.NUM_GENERATIONS, None, longest, c.MAX_TOKENS, goes_on
        # With drafts, which change no token: also where ranks make the guesses of a model that they share.
        room = KVCacheConfig(*sizes, draft_rows=4, draft_history=1 << 16)
        return EmbeddedEngine(
            self.config,
            self.infer,
            self.backend,
            sampling,
            room,
            records_routes=self.case.replays,
        )

    def _reference(self) -> ForwardPipeline:
        """Other weights than the policy starts with, so that the loss is not zero at first."""
        config = decoder_config(self.recipe.teacher or self.recipe.model, "the test's model")
        layout = replace(layout_of(config, self.infer.mesh), splits_tokens=self.case.splits_tokens)
        weights = Weights(layout, self.backend.rank, self.backend, "reference")
        fill_random(weights, SEED + 1, c.INITIAL_SCALE)
        return ForwardPipeline(
            Shard(config, weights, self.backend),
            self.backend,
            "reference",
            MicroShape(c.MICRO_ROWS, self.case.widest),
            c.ROW_LENGTH,
            c.TEMPERATURE,
        )

    def refresh_engine(self) -> None:
        if self.generator.version != self.policy.version:
            self.generator.publish(self.syncer.run, self.policy.version)

    def enter_rollout(self) -> int:
        return self.policy.version

    def step(self, number: int) -> dict[str, Any]:
        rollout, scores, resampling = self.stepper.collect(number)
        scored = scores()
        if resampling is not None:
            self.replaced.append(resampling.groups)
        packed = PackedRollout(rollout)
        reference = old = None
        if self.reference is not None:
            reference = compute_log_probs(self.reference, self.infer.mesh, self.backend, packed)
        pipeline, mesh = self.policy.pipeline, self.train.mesh
        if self.recipe.num_iterations > 1:
            old, experts = record_log_probs(pipeline, mesh, self.backend, packed)
        else:
            experts = pipeline.experts_of(packed)
        corrected = as_of_another_engine(rollout)
        if self.recipe.old_of_generator:
            old = corrected.generator_logps
        earned, greedy = scored.scores.total, self.stepper.greedy_rewards(number, rollout)
        batch, _ = compute_advantages(
            corrected, earned, self.advantages, old, reference, scored.turn_rewards, (), greedy
        )
        everyone = range(len(batch))
        reports = [
            update(self.policy, batch, packed, everyone, c.LEARNING_RATE, experts=experts)
            for _ in range(self.recipe.num_iterations)
        ]
        estimator = self.policy.settings.loss_config.kl_estimator
        version = self.generator.version
        carried = None
        if experts is not None and isinstance(experts.routes, FetchedArrays):
            routes = {id(p): p for s in rollout.samples for p in s.arrays["routes"].segments}
            sizes = [math.prod(own.shape) * own.dtype.itemsize for own in routes.values()]
            by_rank = self.backend.world.gather_objects(experts.routes.bytes_received)
            carried = [sum(sizes), *by_rank]
        self.comparison.make(number, self.policy)
        left_out = 0.0 if batch.rejected is None else float(batch.rejected.mean())
        return _figures(rollout, reports, version) | {
            "rejected": left_out,
            "routes_carried": carried,
            "per_token": [*token_rows(batch, reports, estimator)],
        }

    def likeliest(self) -> list[int]:
        """Checksums of the trained policy's greedy completions, drawn in the graphs that sampled ones were."""
        self.refresh_engine()
        settings = replace(self.generator.sampling, temperature=0.0)
        key = SeedKey(SEED, EVALUATION, c.NUM_STEPS)
        everything = Task(has_hits=False).at(range(c.NUM_PROMPTS))
        rollout = self.replicas.generate(everything, 1, settings, key, self.policy.version)
        return [zlib.crc32(tokens.tobytes()) for tokens in rollout.completion_ids]

    def parameters(self) -> dict[str, np.ndarray]:
        """The policy's, whole, on rank 0; nothing on the others."""
        whole = layout_of(self.config, Mesh(1, 1))
        weights = Weights(whole, self.backend.rank, self.backend)
        weights.pool.load()
        plan = plan_reshard(self.train, whole)
        syncer = WeightSyncer(
            self.policy.weights, self.policy.adapters, weights, self.backend, plan
        )
        for pool in syncer.copies:
            pool.load()
        syncer.run()
        with weights.on_host() as host:
            return {name: np.array(part) for name, part in host.hf_views.items()}


def _figures(rollout: Rollout, reports: list[UpdateReport], version: int | None) -> dict[str, Any]:
    """`version` is the generator's: older weights' tokens are left out of the gap."""
    first = reports[0].logps
    gaps = [np.zeros(1)]
    for i, logps in enumerate(rollout.generator_logps):
        mask = rollout.action_mask[i] & (rollout.weights_version[i] == version)
        gaps.append(np.abs(first[i] - logps)[mask])
    names = ("loss", "grad_norm", "kl", "entropy", "clip_fraction")
    experts = reports[0].experts
    margins = None if experts is None or not experts.margins.count else experts.margins
    return {
        "tokens": [zlib.crc32(tokens.tobytes()) for tokens in rollout.completion_ids],
        "lengths": rollout.completion_lengths.tolist(),
        "turns": [sum(m["role"] == "assistant" for m in own) for own in rollout.messages],
        "gap": float(np.concatenate(gaps).max()),
        "stale": float((np.concatenate(rollout.weights_version) != version).mean()),
        "margins": None if margins is None else [margins.mean, margins.least],
        "logps": [zlib.crc32(first[i].tobytes()) for i in sorted(first)],
        **{name: [float(getattr(report, name)) for report in reports] for name in names},
    }


def trajectory(case: c.Case, backend: Backend) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    started = time.perf_counter()
    run = Run(case, backend)
    steps = [run.step(number) for number in range(c.NUM_STEPS)]
    parameters = run.parameters()
    # In plain operations other settings are another graph, which takes long to compile.
    greedy = run.likeliest() if case.in_loop else []
    result: dict[str, Any] = {
        "steps": steps,
        "replaced": run.replaced,
        "differences": run.comparison.differences,
        "greedy": greedy,
        "sums": {name: float(p.sum(dtype=np.float64)) for name, p in parameters.items()},
        "norms": {name: float(np.linalg.norm(p.astype(float))) for name, p in parameters.items()},
        "seconds": time.perf_counter() - started,
    }
    return result, parameters


class Mover:
    """Moves random weights there and back between two layouts, against fresh ones of the target."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.config = decoder_config(c.MOVED, "the test's model")
        self.pairs = c.pairs_of(world_of(backend))
        # The dtype of two bytes that the device has.
        self.narrow: Dtype = "bfloat16" if backend.shares_memory else "float16"
        meshes = dict.fromkeys([*itertools.chain(*self.pairs), *c.saved_by(world_of(backend))])
        self.filled = {mesh: self._filled(mesh, "float32") for mesh in meshes}
        self._wanted = {("float32", g): host_sums(weights) for g, weights in self.filled.items()}

    def _filled(self, mesh: tuple[int, int, int], dtype: Dtype) -> Weights:
        layout = layout_of(self.config, Mesh(*mesh), chunks=c.CHUNKS.get(mesh, 1))
        weights = Weights(layout, self.backend.rank, self.backend, shared=True, dtype=dtype)
        fill_random(weights, SEED)
        return weights

    def _wanted_of(self, mesh: tuple[int, int, int], dtype: Dtype) -> dict[str, int]:
        if (dtype, mesh) not in self._wanted:
            self._wanted[dtype, mesh] = host_sums(self._filled(mesh, dtype))
        return self._wanted[dtype, mesh]

    def move(
        self,
        source: tuple[int, int, int],
        target: tuple[int, int, int],
        dtype: Dtype = "float32",
    ) -> dict[str, Any]:
        given = self.filled[source] if dtype == "float32" else self._filled(source, dtype)
        layout = self.filled[target].layout
        taken = Weights(layout, self.backend.rank, self.backend, dtype=dtype)
        with taken.on_host(write=True) as host:
            for run in host.flat_buffers:
                run[...] = np.nan
        plan = plan_reshard(given.layout, taken.layout, given.pool.itemsize)
        self.backend.bucket_bytes = BUCKET_BYTES
        traffic = Resharder(plan, given, taken, self.backend).run()
        found, wanted = host_sums(taken), self._wanted_of(target, dtype)
        wrong = [name for name, total in wanted.items() if found.get(name) != total]
        return {
            "wrong": wrong + sorted(set(found) - set(wanted)),
            "received": traffic.bytes_received,
            "lower_bound": plan.lower_bound,
            "held": len(found),
        }


def round_trips(mover: Mover) -> dict[str, Any]:
    return {
        c.pair_name(train, infer): [
            mover.move(train, infer),
            mover.move(infer, train),
            mover.move(train, infer, mover.narrow),
        ]
        for train, infer in mover.pairs
    }


def world_of(backend: Backend) -> tuple[int, str]:
    if backend.matmul_precision == "high":
        return backend.world_size, "high"
    return backend.world_size, "shared_memory" if backend.shares_memory else "device"


def run_all(folder: Path, backend: Backend) -> None:
    world = world_of(backend)
    result: dict[str, Any] = {
        "rank": backend.rank,
        "segments": f"mindgrpo-{job_name(os.environ)}-",
        "cases": {},
        "seconds": {},
    }
    names = json.loads((folder / "cases.json").read_text())
    for case in c.CASES:
        if case.world == world and case.name in names:
            outcome, parameters = trajectory(case, backend)
            result["cases"][case.name] = outcome
            if backend.rank == 0:
                np.savez(folder / f"{case.name}.npz", **parameters)
    for name, part in parts_of(world, backend, folder).items():
        started = time.perf_counter()
        result[name] = part(backend)
        result["seconds"][name] = time.perf_counter() - started
    backend.close()
    # Last: it tells that all of this rank's own work went well.
    (folder / f"rank_{backend.rank}.json").write_text(json.dumps(result))


def parts_of(
    world: tuple[int, str], backend: Backend, folder: Path
) -> dict[str, Callable[[Backend], Any]]:
    """What this world computes beside its cases, by the name of its result."""
    parts: dict[str, Callable[[Backend], Any]] = {}
    if backend.world_size > 1:
        parts |= {"communication": communication, "sum_in_graph": sum_in_graph, "cores": cores_of}
        parts["tokens_in_graph"] = tokens_in_graph
    if world == c.LOSSES_WORLD:
        parts |= {"losses": updates_by_every_loss}
    if world in (c.MOVED_WORLD, c.DEVICE_MOVED_WORLD):
        mover = Mover(backend)
        saving = partial(saved_and_loaded, folder / "run", filled=mover.filled.__getitem__)
        parts |= {"round_trips": lambda _: round_trips(mover), "checkpoints": saving}
    if any(case.world == world for case in c.SHARDED):
        parts |= {"sharded": partial(sharded_optimizers, folder / "sharded")}
    if any(case.world == world for case in c.GOLDEN):
        parts |= {"golden": golden_gaps}
    if backend.shares_memory:
        parts |= {"features": image_features}
    if backend.shares_memory and backend.world_size in map(math.prod, c.SCORED.values()):
        parts |= {"scores": partial(golden_scores, folder / "classifier")}
    if any(case.world == world for case in c.CRITICS):
        parts |= {"critics": critic_updates}
    return parts


def write_golden(backend: Backend, recipes: Sequence[str]) -> None:
    """Of `recipes`, or of all; the others stay as they are."""
    if backend.world_size > 1:
        sys.exit("the golden trajectory is that of one process: start job.py without msrun")
    golden = json.loads(GOLDEN.read_text())
    for case in c.ALONE:
        if not recipes or case.recipe in recipes:
            outcome, _ = trajectory(case, backend)
            for part in (outcome, *outcome["steps"]):
                for name in (
                    "seconds",
                    "greedy",
                    "per_token",
                    "differences",
                    "logps",
                    "margins",
                    "routes_carried",
                ):
                    part.pop(name, None)
            golden[case.recipe] = outcome
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")


def main() -> None:
    if sys.argv[1] == "--write-golden":
        write_golden(connect(SHARED_MEMORY, dict(os.environ)), sys.argv[2:])
    else:
        # MindSpore collects garbage at every compilation.
        gc.collect()
        gc.freeze()
        cache_sources()
        folder, name = sys.argv[1:]
        if (
            int(os.environ.get("MS_WORKER_NUM", "1")) == c.OWN_ORDER_WORLD[0]
            and name == c.OWN_ORDER_WORLD[1]
        ):
            add_in_own_order()
        target = SHARED_MEMORY if name == "high" else choose_target("CPU", name)
        settings = RuntimeSettings(matmul_precision="high" if name == "high" else "highest")
        run_all(Path(folder), connect(target, dict(os.environ), settings))


if __name__ == "__main__":
    main()
