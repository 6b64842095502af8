"""How far a step's losses, norms and gradients, and the next step's tokens, are from those of one rank, by layout.

updates_agree.py [--backend shared_memory|device] [--experts|--losses] [--layouts DP2/CP2,...] prints one JSON line: of
every layout of {data, model, context, pipeline} in {1, 2} on up to 8 ranks, with and without sequence parallelism (SP),
interleaved stages (VPP2) and a sharded optimizer (ZeRO-1), with --experts of a mixture of them in every layout that
deals them to {1, 2} ranks (EP), or of those named, the tokens whose log-probs differ in any bit from
those of one rank; of the loss, of the norm and of the gradients, element by element on every rank, the largest
difference (of a gradient relative to its tensor's largest element); and the completions of the next step that differ.
With --losses, the same by every loss in turn, of two updates on one rollout: losses and norms of both, gradients of the
second. One launch a number of ranks. Weights, prompts and rewards are random.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import launching
import numpy as np
from work import Work

MODEL = {
    "model_type": "qwen2",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
MIXTURE = MODEL | {
    "model_type": "qwen3_moe",
    "head_dim": 8,
    "num_hidden_layers": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
WORK = Work(MODEL, prompts=8, generations=4, prompt_tokens=16, new_tokens=24)
# What every loss has is added to these keys of rl_config; the second update's ratios are on both sides of their ends.
TWICE = {"num_iterations": 2, "beta": 0.05}
TWICE_LR = 3e-4
NARROW = {"epsilon_low": 0.01, "epsilon_high": 0.01}
LOSSES: dict[str, dict[str, Any]] = {
    "grpo": NARROW,
    "grpo, k1": {"kl_estimator": "k1"},
    "grpo, k2": {"kl_estimator": "k2"},
    "unbiased_kl": {"unbiased_kl": True},
    "KL in the reward": {"kl_in_reward": True},
    "entropy": {"entropy_coef": 0.01},
    "delta": {"delta": 1.02, **NARROW},
    "dual_clip": {"dual_clip": 1.02, **NARROW},
    "GSPO": {"importance_sampling_level": "sequence", "epsilon_low": 1e-3, "epsilon_high": 1e-3},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo", **NARROW},
    "cispo": {"loss_type": "cispo", **NARROW},
    "prompt_mean": {"loss_type": "cispo", "loss_aggregation": "prompt_mean"},
    "sapo": {"loss_type": "sapo"},
    "dppo_tv": {"loss_type": "dppo_tv", "epsilon_low": 1e-5, "epsilon_high": 1e-5},
    "dppo_kl": {"loss_type": "dppo_kl", "epsilon_low": 1e-7, "epsilon_high": 1e-7},
    "gmpo": {"loss_type": "gmpo", **NARROW},
    "luspo": {
        "loss_type": "luspo",
        "importance_sampling_level": "sequence",
        "epsilon_low": 1e-3,
        "epsilon_high": 1e-3,
    },
    "vespo": {"loss_type": "vespo"},
    "gpg": {"loss_type": "gpg"},
    "clip_cov": {"loss_type": "clip_cov", "clip_cov_ratio": 0.2, "clip_cov_low": 1e-3},
    "kl_cov": {"loss_type": "kl_cov", "kl_cov_ratio": 0.2},
    "top_entropy_quantile": {"top_entropy_quantile": 0.2},
    "off_policy_mask_threshold": {"off_policy_mask_threshold": 1e-4},
    "rejection_geometric": {"rejection_geometric_low": 0.999, "rejection_geometric_high": 1.001},
    "IcePop": {
        "importance_sampling_correction": "token_mask",
        "importance_sampling_cap": 5.0,
        "importance_sampling_floor": 0.5,
    },
    "sequence_truncate": {"importance_sampling_correction": "sequence_truncate"},
    "rloo": {"advantage_estimator": "rloo"},
    "reinforce_plus_plus": {"advantage_estimator": "reinforce_plus_plus"},
    "reinforce_plus_plus_baseline": {"advantage_estimator": "reinforce_plus_plus_baseline"},
    "maxrl": {"advantage_estimator": "maxrl"},
    "opo": {"advantage_estimator": "opo"},
    "pass_at_k": {"advantage_estimator": "pass_at_k"},
    "GPG's advantages": {"advantage_estimator": "gpg"},
    "scaled by batch": {"scale_rewards": "batch"},
}
RANKS = (1, 2, 4, 8)
BACKENDS = ("shared_memory", "device")
REFERENCE = "one.npz"


@dataclass(frozen=True)
class Trained:
    """A layout of the policy."""

    data: int
    model: int
    context: int
    pipeline: int
    experts: int = 1
    chunks: int = 1
    splits_tokens: bool = False
    shards_optimizer: bool = False

    @property
    def ranks(self) -> int:
        return self.data * self.model * self.context * self.pipeline

    @property
    def name(self) -> str:
        degrees = {
            "DP": self.data,
            "MP": self.model,
            "CP": self.context,
            "EP": self.experts,
            "PP": self.pipeline,
            "VPP": self.chunks,
        }
        words = [f"{axis}{size}" for axis, size in degrees.items() if size > 1]
        words += ["SP"] * self.splits_tokens + ["ZeRO-1"] * self.shards_optimizer
        return "/".join(words) or "one rank"

    @property
    def generator(self) -> tuple[int, int]:
        """Its data- and model-parallel degree, on the same ranks."""
        model = min(2, self.ranks)
        return self.ranks // model, model

    def config(self, backend: str, work: Work, keys: dict[str, Any]) -> Any:
        import assembly

        rows, train = assembly.Rows(2, 2), (self.data, self.model, self.pipeline)
        config = assembly.configuration(work, train, self.generator, rows, beta=0.0, rl_config=keys)
        mesh = config.actor_config.parallel_config.model_copy(
            update={
                "context_parallel": self.context,
                "expert_parallel": self.experts,
                "pp_interleave_num": self.chunks,
                "use_seq_parallel": self.splits_tokens,
            }
        )
        changes = {"parallel_config": mesh, "enable_parallel_optimizer": self.shards_optimizer}
        actor = config.actor_config.model_copy(update=changes)
        context = config.context.model_copy(update={"backend": backend, "device_target": "CPU"})
        return config.model_copy(update={"actor_config": actor, "context": context})


def trained_on(ranks: int, names: Sequence[str], has_experts: bool) -> list[Trained]:
    """The layouts of so many ranks; of these the named ones, unless there is one rank or none is named."""
    every = _of_experts() if has_experts else _of_dense()
    return [
        layout
        for layout in every
        if layout.ranks == ranks and (ranks == 1 or not names or layout.name in names)
    ]


def _of_dense() -> Iterator[Trained]:
    either = (False, True)
    for *degrees, split, shard in product(*[(1, 2)] * 5, either, either):
        data, model, context, pipeline, chunks = degrees
        has_effect = (
            (model > 1 or not split)
            and (data * context > 1 or not shard)
            and (pipeline > 1 or chunks == 1)
        )
        if has_effect:
            yield Trained(data, model, context, pipeline, 1, chunks, bool(split), bool(shard))


def _of_experts() -> Iterator[Trained]:
    for data, model, context, pipeline, experts in product(*[(1, 2)] * 5):
        if data * model * context % experts == 0:
            yield Trained(data, model, context, pipeline, experts, splits_tokens=model > 1)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=BACKENDS, default=BACKENDS[0])
    parser.add_argument("--experts", action="store_true")
    parser.add_argument("--losses", action="store_true")
    parser.add_argument("--layouts", type=lambda text: text.split(",") if text else (), default=())
    parser.add_argument("--ranks", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


class Gradients:
    """What `policy` is about to apply: of each parameter the part that this rank has the sums of, and its place."""

    def __init__(self, policy: Any) -> None:
        self.parts: dict[str, tuple[tuple[slice, ...], np.ndarray]] = {}
        self._policy, self._apply = policy, policy.apply
        policy.apply = self._kept

    def _kept(self, norm: float, lr: float) -> None:
        gradients = self._policy.gradients
        own = self._policy.optimizer.first.layout.held_by(gradients.rank)
        with gradients.on_host() as host:
            for name, box in own.items():
                inner = box.within(gradients.boxes[name]).slices
                self.parts[name] = box.slices, host.hf_views[name][inner].copy()
        self._apply(norm, lr)


def stepped(roles: Any, work: Work, lr: float = 1e-6) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two steps: numbers and arrays that all ranks have alike, and the gradients' parts of this rank."""
    import assembly

    from mindgrpo.grpo.state import State

    stepper = assembly.stepper_of(roles, work, lr)
    gradients = Gradients(roles.policy)
    state = State()
    outcome = stepper.run(state)
    reports, parts = outcome.reports, dict(gradients.parts)
    tokens = [sample.tokens for sample in stepper.run(state).batch.rollout.samples]
    alike = {
        "logps": np.concatenate([reports[-1].logps[i] for i in range(work.samples)]),
        "loss": [report.loss for report in reports],
        "norm": [report.grad_norm for report in reports],
        "marked": [report.clip_fraction + (report.unselected or 0.0) for report in reports],
        "tokens": np.stack(tokens),
    }
    return alike, parts


def begin_again(roles: Any, config: Any) -> None:
    """Gives the policy its first weights and the loss of `config`, in the graphs that are compiled otherwise."""
    from mindgrpo.weights.pretrained import fill_random

    policy = roles.policy
    roles.plan = replace(roles.plan, config=config)
    policy.settings = replace(policy.settings, loss_config=config.rl_config)
    policy._backward.clear()
    policy.updates = 0
    roles.enter("update")
    for moments in (policy.optimizer.first, policy.optimizer.second):
        with moments.on_host(write=True) as host:
            for run in host.flat_buffers:
                run[...] = 0.0
    fill_random(policy.masters, config.rl_config.seed)
    policy.masters_changed()
    policy.version += 1


def measure(given: argparse.Namespace) -> None:
    import assembly

    backend = assembly.join_ranks(backend=given.backend)
    if backend is None:
        return
    figures: dict[str, Any] = {}
    work = replace(WORK, model=MIXTURE) if given.experts else WORK
    for layout in trained_on(given.ranks, given.layouts, given.experts):
        config = layout.config(given.backend, work, TWICE if given.losses else {})
        plan = assembly.plan_of(config, assembly.model_of(work), backend.world_size)
        roles = assembly.roles_of(plan, backend)
        if not given.losses:
            figures[layout.name] = compared(*stepped(roles, work), given, REFERENCE, backend)
            continue
        of_layout = figures[layout.name] = {}
        for name, keys in LOSSES.items():
            begin_again(roles, layout.config(given.backend, work, TWICE | keys))
            found = stepped(roles, work, TWICE_LR)
            of_layout[name] = compared(*found, given, f"{name}.npz", backend)
    if backend.rank == 0:
        launching.give_figures(figures)
    backend.close()


def compared(
    alike: dict[str, Any],
    parts: dict[str, Any],
    given: argparse.Namespace,
    reference: str,
    backend: Any,
) -> dict[str, Any]:
    """The differences from `reference`, which one rank writes."""
    if given.ranks == 1:
        whole = {f"gradient of {name}": part for name, (_, part) in parts.items()}
        np.savez(given.folder / reference, **alike, **whole)
    with np.load(given.folder / reference) as file:
        one = dict(file)
    differences = {}
    for name, (place, part) in parts.items():
        whole_gradient = one[f"gradient of {name}"]
        largest = np.abs(whole_gradient).max()
        differences[name] = float(np.abs(part - whole_gradient[place]).max() / largest)
    worst = max(differences, key=lambda name: differences[name])
    by_rank = backend.world.gather_objects((differences[worst], worst))
    return {
        "log-probs": int((alike["logps"] != one["logps"]).sum()),
        "loss": float(np.abs(alike["loss"] - one["loss"]).max()),
        "norm": float(np.abs(alike["norm"] / one["norm"] - 1).max()),
        "gradient": max(by_rank),
        "completions": int((alike["tokens"] != one["tokens"]).any(axis=1).sum()),
        "clipped or left out": alike["marked"],
        "norms": alike["norm"],
    }


def figures_of(given: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="mindgrpo-bench-") as folder:
        for ranks in RANKS:
            if trained_on(ranks, given.layouts, given.experts):
                words = [f"--backend={given.backend}", f"--ranks={ranks}", f"--folder={folder}"]
                words += ["--experts"] * given.experts + ["--losses"] * given.losses
                words.append(f"--layouts={','.join(given.layouts)}")
                found |= launching.run_on_ranks(__file__, words, ranks)
    return found


def main() -> None:
    given = options()
    if launching.is_rank():
        measure(given)
    else:
        print(json.dumps({"bench": "updates_agree", given.backend: figures_of(given)}))


if __name__ == "__main__":
    main()
