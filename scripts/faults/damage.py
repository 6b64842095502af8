"""Trains with something damaged on one rank, to see that it is caught: what a check of a run's numbers is tried with.

    DAMAGE=nan_rewards@2 DAMAGED_RANK=3 bash scripts/launch.sh --ranks 8 -- scripts/faults/damage.py --config FILE ...

DAMAGE is NAME@STEP,... (STEP counts from 1; what is damaged at the start takes none), arguments are main.py's. Replaces
functions of the program in that one rank; the program itself knows nothing of it. Refuses to damage files.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from mindgrpo.algorithm import losses
from mindgrpo.cli import verbs
from mindgrpo.grpo import step
from mindgrpo.grpo.scoring import RolloutScorer
from mindgrpo.grpo.state import State
from mindgrpo.grpo.step import Stepper
from mindgrpo.training.policy import Policy
from mindgrpo.weight_sync.execute import Traffic
from mindgrpo.weight_sync.transfer import WeightSyncer

Change = Callable[[Any], Any]


class Clock:
    """The step that the run is in, counted from 1."""

    step = 0

    @classmethod
    def watch(cls) -> None:
        run = Stepper.run

        @functools.wraps(run)
        def counted(stepper: Stepper, state: State) -> Any:
            cls.step = state.step + 1
            return run(stepper, state)

        put(Stepper, "run", counted)


def put(owner: Any, name: str, function: Any) -> None:
    setattr(owner, name, function)


def after(owner: Any, name: str, at: int, change: Callable[..., Any]) -> None:
    """In step `at`, what `owner.name` returns is what `change(result, *its arguments)` makes of it."""
    original = getattr(owner, name)

    def changed(*arguments: Any, **named: Any) -> Any:
        result = original(*arguments, **named)
        return change(result, *arguments) if Clock.step == at else result

    put(owner, name, changed)


def nan_rewards(at: int) -> None:
    def change(scored: Any, *_: Any) -> Any:
        scored.scores.total[1] = np.nan
        return scored

    after(RolloutScorer, "_scored", at, change)


def nan_advantages(at: int) -> None:
    def change(result: Any, *_: Any) -> Any:
        result[0].advantages[2] = np.nan
        return result

    after(step, "compute_advantages", at, change)


def nan_logps(at: int) -> None:
    def change(result: Any, *_: Any) -> Any:
        result[0][3][0] = np.nan
        return result

    after(step, "record_log_probs", at, change)


def nan_loss(at: int) -> None:
    after(losses, "policy_loss", at, lambda *_: float("nan"))


def nan_gradient(at: int) -> None:
    original = Policy.gradient_norm

    def changed(policy: Policy) -> float:
        if Clock.step == at:
            with policy.gradients.on_host(write=True) as host:
                next(iter(host.hf_views.values()))[0] = np.nan
        return original(policy)

    put(Policy, "gradient_norm", changed)


def reshard_bit(at: int) -> None:
    """One bit of one weight of the generator."""

    def change(traffic: Any, syncer: Any, *_: Any) -> Any:
        with syncer._target.on_host(write=True) as host:
            part = next(iter(host.hf_views.values()))
            part.view(np.uint32)[0, 0] ^= 1
        return traffic

    after(WeightSyncer, "run", at, change)


def reshard_places(at: int) -> None:
    """Two rows of one matrix of the generator."""

    def change(traffic: Any, syncer: Any, *_: Any) -> Any:
        with syncer._target.on_host(write=True) as host:
            part = host.hf_views["model.layers.0.mlp.down_proj.weight"]
            part[[0, 1]] = part[[1, 0]]
        return traffic

    after(WeightSyncer, "run", at, change)


def replica_weight(at: int) -> None:
    """One weight of the policy, after an update."""

    def change(result: Any, policy: Policy, *_: Any) -> Any:
        with policy.weights.on_host(write=True) as host:
            host.flat_buffers[0][7] += 1e-3
        return result

    after(Policy, "apply", at, change)


def stale_generator(at: int) -> None:
    """No weights are delivered, on any rank, and the generator is told that they were."""
    original = WeightSyncer.run

    def changed(syncer: WeightSyncer, *rest: Any) -> Any:
        return Traffic(0, 0.0) if Clock.step >= at else original(syncer, *rest)

    put(WeightSyncer, "run", changed)


def token(at: int) -> None:
    """One drawn token."""
    from mindgrpo.rollout.embedded.engine import EmbeddedEngine

    def change(completions: list[Any], *_: Any) -> Any:
        completions[0].tokens[0] ^= 1
        return completions

    after(EmbeddedEngine, "generate", at, change)


def noise(at: int) -> None:
    """Another seed, for the draws alone."""
    from mindgrpo.rollout.embedded import engine

    original = engine.sample_keys

    def changed(seed: int, *rest: Any) -> Any:
        return original(seed + (Clock.step >= at), *rest)

    put(engine, "sample_keys", changed)


def prompts(at: int) -> None:
    """Other prompts than the other ranks."""
    original = Stepper._rollout

    def changed(stepper: Stepper, number: int, given: Any, *rest: Any) -> Any:
        return original(stepper, number, given[::-1] if Clock.step == at else given, *rest)

    put(Stepper, "_rollout", changed)


def code(at: int) -> None:
    """Another version of the program."""
    from mindgrpo.run import start

    put(start, "code_digest", lambda: "0" * 16)


IN_STEPS = {
    function.__name__: function
    for function in (nan_rewards, nan_advantages, nan_logps, nan_loss, nan_gradient)
}
IN_STEPS |= {
    function.__name__: function
    for function in (reshard_bit, reshard_places, replica_weight, token, noise, prompts, code)
}
EVERYWHERE = {"stale_generator": stale_generator}
ARGUMENTS = {"seed": ["--rl_config.seed", "1"], "configuration": ["--rl_config.beta", "0.02"]}


def main() -> int:
    arguments = sys.argv[1:]
    Clock.watch()
    here = os.environ.get("RANK_ID", "0") == os.environ.get("DAMAGED_RANK", "1")
    for word in os.environ["DAMAGE"].split(","):
        name, _, at = word.partition("@")
        if name in EVERYWHERE:
            EVERYWHERE[name](int(at))
        elif here and name in ARGUMENTS:
            arguments += ARGUMENTS[name]
        elif here:
            IN_STEPS[name](int(at or 0))
    return verbs.main(["train", *arguments])


if __name__ == "__main__":
    sys.exit(main())
