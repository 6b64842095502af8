"""The program of the distributed tests, one process a rank: python job.py RESULT_FOLDER TRANSPORT.

With --write-golden [RECIPE ...] instead it writes the trajectory of these recipes, or of all, in one process.
Runs this world's cases through the project's own rooms and writes rank_N.json (and the trained parameters, from
rank 0). Judges nothing: tests/test_distributed.py does. Refuses to write the golden trajectory from several ranks.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cases as c
import numpy as np
from carried import communication, sum_in_graph
from saving import saved_and_loaded

from mindgrpo.algorithm.credit import assign_credit
from mindgrpo.algorithm.loss_config import Credit, Objective
from mindgrpo.algorithm.packing import MicroShape
from mindgrpo.algorithm.types import Samples
from mindgrpo.backend.connect import connect
from mindgrpo.backend.contract import Backend
from mindgrpo.backend.cpu.host import job_name
from mindgrpo.grpo.dynamic_sampling import refill
from mindgrpo.grpo.rollout import Scored, generate, sample_logps
from mindgrpo.models.decoder import KEEP_ALL, WHOLE_LAYERS, Shard
from mindgrpo.models.families import DecoderConfig, decoder_config, parameter_specs
from mindgrpo.models.lora import fill_adapters
from mindgrpo.models.lora_specs import TARGETS, LoraSettings
from mindgrpo.parallel.mesh import Grid
from mindgrpo.parallel.sharding import Layout, layers_of_stage
from mindgrpo.rewards.scores import Scores
from mindgrpo.rollout.embedded.engine import Draw, Generator
from mindgrpo.rollout.embedded.kv_cache import Room
from mindgrpo.rollout.noise import EVALUATION, ROLLOUT
from mindgrpo.rollout.sampling_params import SamplingSettings
from mindgrpo.training.optimizer import AdamWSettings
from mindgrpo.training.pipeline import Pipeline
from mindgrpo.training.policy import Policy, UpdateSettings
from mindgrpo.training.update import UpdateReport, update
from mindgrpo.weight_sync.execute import Resharder, checksums
from mindgrpo.weight_sync.plan import plan_reshard
from mindgrpo.weight_sync.syncer import WeightSyncer
from mindgrpo.weights.local_weights import Weights
from mindgrpo.weights.pretrained import fill_random

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "trajectory.json"
BUCKET_BYTES = 32 << 10  # several rounds a pair
SEED = 5


def layout_of(config: DecoderConfig, grid: Grid) -> Layout:
    stages = layers_of_stage(config.num_hidden_layers, grid.pipeline_stage)
    return Layout(grid, parameter_specs(config), tuple(stages))


def prompts() -> list[np.ndarray]:
    draw = np.random.RandomState(3)
    return [
        draw.randint(3, 67, draw.randint(2, c.MAX_PROMPT + 1)).astype(np.int32)
        for _ in range(c.NUM_PROMPTS)
    ]


def rewards(samples: Samples) -> np.ndarray:
    """float64 [samples], a function of the tokens alone."""
    return np.array([(tokens % 5 < 2).mean() + 0.01 * tokens[0] for tokens in samples.completions])


def hits(samples: Samples) -> np.ndarray:
    """float64 [samples] of 0 and 1, in some groups all equal."""
    return np.array([float(tokens[0] % 3 == 0) for tokens in samples.completions])


def as_of_another_engine(samples: Samples) -> list[np.ndarray]:
    """The generator's log-probs with an error that is a function of the tokens alone, so that factors are not 1."""
    pairs = zip(samples.generator_logps, samples.completions, strict=True)
    return [logps + np.float32(0.1) * np.sin(tokens.astype(np.float32)) for logps, tokens in pairs]


class Run:
    """One case on this rank: the roles, and what its steps brought."""

    def __init__(self, case: c.Case, backend: Backend) -> None:
        self.case, self.backend = case, backend
        self.recipe = c.RECIPES[case.recipe]
        self.config = decoder_config(self.recipe.model, "the test's model")
        self.train = layout_of(self.config, Grid(*case.train))
        self.infer = layout_of(self.config, Grid(*case.infer))
        self.policy = self._policy()
        self.generator = self._generator()
        self.reference = self._reference()
        plan = plan_reshard(self.train, self.infer)
        adapters, target = self.policy.adapters, self.generator.weights
        self.syncer = WeightSyncer(self.policy.weights, adapters, target, backend, plan)
        self.replaced: list[int] = []

    def _policy(self) -> Policy:
        settings = UpdateSettings(
            shape=MicroShape(c.MICRO_ROWS, c.ROW_LENGTH),
            num_positions=c.ROW_LENGTH,
            temperature=c.TEMPERATURE,
            recompute=WHOLE_LAYERS if self.case.recompute else KEEP_ALL,
            objective=Objective(**(c.OBJECTIVE | self.recipe.objective)),
            max_grad_norm=c.MAX_GRAD_NORM,
            adamw=AdamWSettings(0.9, 0.95, c.ADAM_EPS, c.WEIGHT_DECAY),
        )
        lora = self.recipe.lora and LoraSettings(*self.recipe.lora, TARGETS)
        policy = Policy(self.config, self.train, self.backend, settings, lora)
        fill_random(policy.weights, SEED, c.INITIAL_SCALE)
        if policy.adapters is not None:
            fill_adapters(policy.adapters.weights, SEED)
        return policy

    def _generator(self) -> Generator:
        settings: dict[str, Any] = {
            "temperature": c.TEMPERATURE,
            "min_tokens": 2,
            "max_tokens": c.MAX_TOKENS,
            "stop_ids": c.STOP_IDS,
        }
        sampling = SamplingSettings(**(settings | self.recipe.sampling))
        room = Room(c.SLOTS, c.NUM_GENERATIONS, None, c.MAX_PROMPT, c.MAX_TOKENS)
        return Generator(self.config, self.infer, self.backend, sampling, room)

    def _reference(self) -> Pipeline:
        """Other weights than the policy starts with, so that the loss is not zero at first."""
        weights = Weights(self.infer, self.backend.rank, self.backend)
        fill_random(weights, SEED + 1, c.INITIAL_SCALE)
        return Pipeline(
            Shard(self.config, weights, self.backend, "reference"),
            self.backend,
            "reference",
            MicroShape(c.MICRO_ROWS, c.ROW_LENGTH),
            c.ROW_LENGTH,
            c.TEMPERATURE,
        )

    def step(self, number: int) -> dict[str, Any]:
        self.syncer.run()
        self.generator.version = self.policy.version
        samples = self._generate(number, prompts())
        earned = rewards(samples)
        if self.recipe.refill_rounds:
            earned = self._refill(number, samples)
        samples.reference_logps = self._logps(self.reference, self.infer, samples)
        if self.recipe.num_iterations > 1:
            samples.old_logps = self._logps(self.policy.pipeline, self.train, samples)
        given = replace(samples, generator_logps=as_of_another_engine(samples))
        assign_credit(given, earned, Credit(c.NUM_GENERATIONS, **self.recipe.credit))
        everyone = range(len(samples))
        reports = [
            update(self.policy, given, everyone, c.LEARNING_RATE)
            for _ in range(self.recipe.num_iterations)
        ]
        return _figures(samples, reports)

    def _generate(self, number: int, given: list[np.ndarray], first: int = 0) -> Samples:
        return generate(
            self.generator,
            self.infer,
            self.backend,
            given,
            c.NUM_GENERATIONS,
            Draw(SEED, ROLLOUT, number),
            self.policy.version,
            first,
        )

    def _refill(self, number: int, samples: Samples) -> np.ndarray:
        """Groups of equal hits give way to others, whose prompts are the same read backwards; the hits then."""

        def scored(of: Samples) -> Scored:
            return Scored(Scores({}, hits(of), hits(of) < 0), [])

        def draw(turn: int, groups: Sequence[int]) -> tuple[Samples, Scored]:
            given = [prompts()[group][::-1] for group in groups]
            fresh = self._generate(number, given, turn * len(samples))
            fresh.groups = [group for group in groups for _ in range(c.NUM_GENERATIONS)]
            return fresh, scored(fresh)

        rounds = self.recipe.refill_rounds
        found, told = refill(samples, scored(samples), c.NUM_GENERATIONS, rounds, draw)
        self.replaced.append(told.groups)
        return found.scores.total

    def likeliest(self) -> list[int]:
        """Checksums of the trained policy's greedy completions, drawn in the graphs that sampled ones were."""
        self.syncer.run()
        self.generator.version = self.policy.version
        settings = replace(self.generator.settings, temperature=0.0)
        draw, given = Draw(SEED, EVALUATION, c.NUM_STEPS), prompts()
        samples = generate(
            self.generator,
            self.infer,
            self.backend,
            given,
            1,
            draw,
            self.policy.version,
            0,
            settings,
        )
        return [zlib.crc32(tokens.tobytes()) for tokens in samples.completions]

    def _logps(self, pipeline: Pipeline, layout: Layout, samples: Samples) -> list[np.ndarray]:
        return sample_logps(pipeline, layout, self.backend, samples)

    def parameters(self) -> dict[str, np.ndarray]:
        """The policy's, whole, on rank 0; nothing on the others."""
        whole = layout_of(self.config, Grid(1, 1, 1))
        weights = Weights(whole, self.backend.rank, self.backend)
        plan = plan_reshard(self.train, whole)
        WeightSyncer(self.policy.weights, self.policy.adapters, weights, self.backend, plan).run()
        return {name: np.array(part) for name, part in weights.parts.items()}


def _figures(samples: Samples, reports: list[UpdateReport]) -> dict[str, Any]:
    first = reports[0].logps
    gaps = [np.abs(first[i] - logps).max() for i, logps in enumerate(samples.generator_logps)]
    names = ("loss", "grad_norm", "kl", "entropy", "clip_fraction")
    return {
        "tokens": [zlib.crc32(tokens.tobytes()) for tokens in samples.completions],
        "lengths": samples.completion_lengths.tolist(),
        "gap": float(max(gaps)),
        **{name: [float(getattr(report, name)) for report in reports] for name in names},
    }


def trajectory(case: c.Case, backend: Backend) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    started = time.perf_counter()
    run = Run(case, backend)
    steps = [run.step(number) for number in range(c.NUM_STEPS)]
    parameters = run.parameters()
    # In plain operations other settings are another graph, which takes long to compile.
    greedy = run.likeliest() if case.transport == "shared_memory" else []
    result: dict[str, Any] = {
        "steps": steps,
        "replaced": run.replaced,
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
        self.filled = {g: self._filled(g) for g in dict.fromkeys(c.TRAIN_GRIDS + c.INFER_GRIDS)}
        self.sums = {grid: checksums(weights) for grid, weights in self.filled.items()}

    def _filled(self, grid: tuple[int, int, int]) -> Weights:
        weights = Weights(layout_of(self.config, Grid(*grid)), self.backend.rank, self.backend)
        fill_random(weights, SEED)
        return weights

    def move(self, source: tuple[int, int, int], target: tuple[int, int, int]) -> dict[str, Any]:
        given = self.filled[source]
        taken = Weights(self.filled[target].layout, self.backend.rank, self.backend)
        for run in taken.runs:
            run[...] = np.nan
        plan = plan_reshard(given.layout, taken.layout)
        traffic = Resharder(plan, given, taken, self.backend, BUCKET_BYTES).run()
        found = checksums(taken)
        wrong = [name for name, total in self.sums[target].items() if found.get(name) != total]
        return {
            "wrong": wrong + sorted(set(found) - set(self.sums[target])),
            "received": traffic.bytes_received,
            "lower_bound": plan.lower_bound,
            "held": len(found),
        }


def round_trips(backend: Backend) -> dict[str, Any]:
    mover = Mover(backend)
    return {
        c.pair_name(train, infer): [mover.move(train, infer), mover.move(infer, train)]
        for train, infer in c.PAIRS
    }


def run_all(folder: Path, backend: Backend, transport: str) -> None:
    world = (backend.world_size, transport)
    result: dict[str, Any] = {
        "rank": backend.rank,
        "segments": f"mindgrpo-{job_name(os.environ)}-",
        "cases": {},
        "seconds": {},
    }
    for case in c.CASES:
        if case.world == world:
            outcome, parameters = trajectory(case, backend)
            result["cases"][case.name] = outcome
            if backend.rank == 0:
                np.savez(folder / f"{case.name}.npz", **parameters)
    parts: dict[str, Callable[[Backend], Any]] = {}
    if backend.world_size > 1:
        parts |= {"communication": communication, "sum_in_graph": sum_in_graph}
    if world == c.MOVED_WORLD:
        filled = Mover(backend).filled.__getitem__
        saving = partial(saved_and_loaded, folder / "run", filled=filled)
        parts |= {"round_trips": round_trips, "checkpoints": saving}
    for name, part in parts.items():
        started = time.perf_counter()
        result[name] = part(backend)
        result["seconds"][name] = time.perf_counter() - started
    (folder / f"rank_{backend.rank}.json").write_text(json.dumps(result))
    backend.close()


def write_golden(backend: Backend, recipes: Sequence[str]) -> None:
    """Of `recipes`, or of all; the others stay as they are."""
    if backend.world_size > 1:
        sys.exit("the golden trajectory is that of one process: start job.py without msrun")
    golden = json.loads(GOLDEN.read_text())
    for case in c.ALONE:
        if not recipes or case.recipe in recipes:
            outcome, _ = trajectory(case, backend)
            outcome.pop("seconds")
            outcome.pop("greedy")
            golden[case.recipe] = outcome
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")


def main() -> None:
    if sys.argv[1] == "--write-golden":
        write_golden(connect(None, None, dict(os.environ)), sys.argv[2:])
    else:
        folder, transport = sys.argv[1:]
        run_all(Path(folder), connect(None, transport, dict(os.environ)), transport)


if __name__ == "__main__":
    main()
