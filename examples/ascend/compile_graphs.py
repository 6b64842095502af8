"""Compiles the training graphs of one rank of a configuration, from shapes alone, and runs each once on zeros.

compile_graphs.py --config FILE [--key value ...]: without RANK_SIZE in the environment, a run of one rank. With
RANK_SIZE and RANK_ID, and MindSpore's simulation of devices, rank RANK_ID of that many in one process; dry_run.sh
starts it so. compile_graphs.py --ranks --config FILE ... compiles nothing: it prints how many ranks there are, then one
rank of each stage, as the ranks of a stage have the same graphs.

No weights are read: they are zeros, and so are prompts and answers but for their lengths. Neither the generator nor
the reference is compiled; what the graphs compute here means nothing.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

import numpy as np

from mindgrpo.algorithm.packing import MicroShape, PackedRollout
from mindgrpo.algorithm.sample import STOPPED, Rollout, TrainBatch
from mindgrpo.backend.connect import connect
from mindgrpo.backend.kernels.shapes import SamplingParams
from mindgrpo.cli.plan import shapes_of
from mindgrpo.config import load_config, parse_command_line
from mindgrpo.errors import UserError
from mindgrpo.grpo.build import make_policy, runtime_settings
from mindgrpo.plan.run_plan import RunPlan, plan_run
from mindgrpo.training.policy import Policy
from mindgrpo.training.update import accumulate_gradients


def full_micro_batch(plan: RunPlan, shape: MicroShape) -> TrainBatch:
    """Samples of the greatest lengths, as many as fill one micro-batch on each data-parallel rank."""
    generate = plan.config.generate_config
    prompt, completion = generate.max_prompt_length, generate.sampling_config.max_tokens
    a_row = max(1, (shape.length - prompt) // completion)
    count = shape.rows * plan.train.mesh.dp * (shape.max_per_row or a_row)
    rollout = Rollout.single_turn(
        [np.ones(prompt, np.int32)] * count,
        [np.ones(completion, np.int32)] * count,
        [STOPPED] * count,
        [np.zeros(completion, np.float32)] * count,
        # Each row a group: its samples share one prompt.
        [sample // a_row for sample in range(count)],
    )
    logps = [np.zeros(completion, np.float32)] * count
    needs_old = plan.config.rl_config.enable_oldpolicy
    return TrainBatch(
        rollout,
        np.ones(count, np.float32),
        old_logps=logps if needs_old else None,
        reference_logps=logps if plan.reference is not None else None,
    )


def load_zeros(policy: Policy) -> None:
    roles = [policy.weights, policy.gradients, policy.optimizer.first, policy.optimizer.second]
    roles += [policy.masters] if policy.has_masters else []
    roles += [policy.adapters.weights] if policy.adapters else []
    for role in roles:
        role.pool.load()


def compile_all(policy: Policy, plan: RunPlan) -> None:
    batch = full_micro_batch(plan, policy.settings.shape)
    members = range(len(batch))
    weights = np.full(len(batch), 1.0 / len(batch), np.float32)
    packed = PackedRollout(batch.rollout)
    accumulate_gradients(policy, batch, packed, members, weights)
    # Samples without a gradient, and old log-probs, go through the forward graph.
    mesh = plan.train.mesh
    share = mesh.index(policy.backend.rank, "dp")
    shape = policy.settings.shape
    policy.pipeline.log_probs(packed.micro_batches(shape, mesh.dp, share)[:1])
    policy.gradient_norm()
    policy.apply(norm=1.0, lr=1e-6)


def run(plan: RunPlan, environment: dict[str, str]) -> None:
    """Raises UserError."""
    size = int(environment.get("RANK_SIZE", "1"))
    if size != plan.world_size:
        raise UserError(
            f"RANK_SIZE is {size}, but the trainer's layout {plan.train.mesh} has {plan.world_size} ranks; set it to "
            "that, or another layout."
        )
    config = plan.config
    # As the launcher would say it: with several ranks, the backend joins a group, here a simulated one.
    environment = environment | {"MS_WORKER_NUM": str(size)}
    backend = connect(config.context.target, environment, runtime_settings(config))
    backend.compile_log.listener = show
    temperature = config.generate_config.sampling_config.temperature
    policy = make_policy(plan, backend, SamplingParams(temperature=temperature))
    load_zeros(policy)
    started = time.monotonic()
    compile_all(policy, plan)
    num_graphs = len(backend.compile_log.entries)
    stage = policy.pipeline.stage_index
    print(
        f"rank {backend.rank} of {size} (stage {stage}, {config.context.target}): {num_graphs} graphs compiled in "
        f"{time.monotonic() - started:.0f} s",
        flush=True,
    )


def show(name: str, seconds: float | None) -> None:
    if seconds is not None:
        print(f"compiled {name}: {seconds:.1f} s", flush=True)


def main(argv: Sequence[str]) -> int:
    words = list(argv)
    lists = words[:1] == ["--ranks"]
    try:
        config = load_config(*parse_command_line(words[1:] if lists else words)).config
        plan = plan_run(config, shapes_of(config)[0], world_size=None)
        if lists:
            stages = plan.train.mesh.group(0, ("pp",))
            print(plan.world_size, *map(int, stages))
        else:
            run(plan, dict(os.environ))
    except UserError as error:
        print(f"mindgrpo: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
