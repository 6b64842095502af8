"""What the distributed job runs, as data: models, recipes, layouts by world size, and pairs of layouts.

Imports no device and no project code, so that tests can be parametrised over it. Refuses to run anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

# (number of ranks, backend): one start of msrun each, except for the world of one. `high` is shared_memory with
# products of that precision.
WORLDS = (
    (1, "shared_memory"),
    (2, "shared_memory"),
    (4, "shared_memory"),
    (8, "shared_memory"),
    (2, "high"),
    (3, "device"),
    (4, "device"),
)
# Where MindSpore's sums add in another order on every rank (own_order.py).
OWN_ORDER_WORLD = (4, "device")

_SMALL: dict[str, Any] = {
    "vocab_size": 67,  # divisible by no model axis: padded columns everywhere
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,  # a layer more is a third more to compile
    "num_attention_heads": 4,
    "num_key_value_heads": 2,  # repeated where the model axis is 4
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
# Divides into the leaves of sums over ranks.
QWEN2 = {"model_type": "qwen2", **_SMALL, "vocab_size": 64}
QWEN3 = {"model_type": "qwen3", **_SMALL, "head_dim": 8}
# Of two stages, and of four or three, with several chunks each; 8 layers make six parts of 1 or 2.
CHUNKED, DEEP = QWEN2 | {"num_hidden_layers": 4}, QWEN2 | {"num_hidden_layers": 8}
# Norms over projections whose heads lie on several ranks, behind their biases; keys that two ranks hold.
OLMO2 = {
    "model_type": "olmo2",
    **_SMALL,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
    "attention_bias": True,
}
# Of two stages each has one kind of attention.
GEMMA3 = {
    "model_type": "gemma3_text",
    **_SMALL,
    "head_dim": 8,
    "query_pre_attn_scalar": 12,
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 20,  # the longest sequence
    "rope_local_base_freq": 50.0,
}
# Of 2 + 2 layers over two stages, the second of which has two layers of experts, and the first a dense one as well.
QWEN3_MOE = QWEN3 | {
    "vocab_size": 80,
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
}
# Only moved, never computed with: 5 layers make stages of 3 + 2 and of 2 + 1 + 1 + 1.
MOVED = QWEN2 | {"num_hidden_layers": 5, "num_attention_heads": 8}

NUM_STEPS = 3
NUM_PROMPTS = 4
NUM_GENERATIONS = 4
MAX_PROMPT = 8
MAX_TOKENS = 12
ROW_LENGTH = 32
MICRO_ROWS = 2
LEARNING_RATE = 1e-2
WEIGHT_DECAY = 0.1
# Adam divides by sqrt(v) + eps: with 1e-8 an element whose gradient is all rounding would move by a whole lr.
ADAM_EPS = 1e-4
MAX_GRAD_NORM = 0.5
TEMPERATURE = 0.9
LOSS: dict[str, Any] = {
    "epsilon_low": 0.1,
    "epsilon_high": 0.15,
    "beta": 0.05,
}
SLOTS = 8  # fewer than the samples of one process: they are generated in waves
STOP_IDS = tuple(range(6))
INITIAL_SCALE = 0.2


@dataclass(frozen=True)
class Recipe:
    """What is trained; `sampling`, `loss_config` and `advantages` add to the settings above and to the defaults."""

    model: dict[str, Any]
    num_iterations: int = 1
    sampling: dict[str, Any] = field(default_factory=dict)
    balance_coef: float = 0.0  # of experts
    lora: tuple[int, float] | None = None  # rank and alpha
    loss_config: dict[str, Any] = field(default_factory=dict)
    advantages: dict[str, Any] = field(default_factory=dict)
    equal_groups: bool = False  # rewards are such that some groups' are all equal
    resampling_rounds: int = 0  # above 0 with equal_groups
    max_turns: int = 1  # of conversations with a tool, or with an environment
    environment: bool = False
    partial_chunk: int = 0  # tokens; above 0 a rollout ends with half of the prompts' groups
    in_loop: bool = True  # the decode loop in C computes the model
    teacher: dict[str, Any] | None = None  # the reference's model, where it is another one
    old_of_generator: bool = (
        False  # ratios compare with log-probs that have errors (as_of_another_engine)
    )

    @property
    def has_reference(self) -> bool:
        return self.loss_config.get("beta", LOSS["beta"]) > 0 or "kl_in_reward" in self.advantages

    @property
    def longest(self) -> int:
        """What a generation may begin with."""
        goes_on = self.max_turns > 1 or self.partial_chunk > 0
        return MAX_PROMPT + (MAX_TOKENS if goes_on else 0)


RECIPES = {
    # Without a reference, which every rank would compile whole.
    "eight layers": Recipe(
        DEEP,
        loss_config={
            "loss_type": "dppo_tv",
            "epsilon_low": 1e-3,
            "epsilon_high": 1e-3,
            "beta": 0.0,
        },
        old_of_generator=True,
    ),
    "two iterations": Recipe(
        QWEN2,
        num_iterations=2,
        # Of whole samples, of prompts, and of tokens that are chosen among all ranks'.
        loss_config={
            "loss_type": "gmpo",
            "loss_aggregation": "prompt_mean",
            "top_entropy_quantile": 0.5,
        },
    ),
    # With one greedy completion more of each prompt.
    "qk norm": Recipe(
        QWEN3,
        sampling={"top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1},
        loss_config={
            "loss_type": "dppo_kl",
            "epsilon_low": 1e-4,
            "epsilon_high": 1e-4,
            "loss_aggregation": "token_mean",
        },
        advantages={"advantage_estimator": "remax", "scale_rewards": "none"},
        old_of_generator=True,
    ),
    "olmo2": Recipe(
        OLMO2,
        in_loop=False,
        loss_config={
            "loss_type": "luspo",
            "importance_sampling_level": "sequence",
            "epsilon_low": 0.01,
            "epsilon_high": 0.01,
        },
        old_of_generator=True,
    ),
    # Its distributions are sharp: with more stop ids some completions end early.
    "gemma3": Recipe(
        GEMMA3,
        sampling={"stop_ids": tuple(range(12))},
        in_loop=False,
        loss_config={
            "loss_type": "clip_cov",
            "epsilon_low": 0.05,
            "epsilon_high": 0.05,
            "clip_cov_ratio": 0.2,
            "clip_cov_low": 0.01,
        },
        old_of_generator=True,
    ),
    # The second iteration computes the experts of before the first one. Tokens are chosen among all ranks', and samples
    # are left out for how far the policy has moved.
    "experts": Recipe(
        QWEN3_MOE,
        num_iterations=2,
        sampling={"stop_ids": tuple(range(12))},
        loss_config={
            "loss_type": "kl_cov",
            "kl_cov_ratio": 0.2,
            "off_policy_mask_threshold": 0.01,
        },
        balance_coef=0.1,
    ),
    # Of attention, of a dense layer and of experts.
    "low rank": Recipe(
        QWEN3_MOE,
        lora=(3, 6.0),
        sampling={"stop_ids": tuple(range(12))},
        loss_config={"loss_type": "sapo"},
        old_of_generator=True,
    ),
    # Distilled from a smaller model as well.
    "dapo": Recipe(
        QWEN2,
        num_iterations=2,
        sampling={"stop_ids": tuple(range(12))},  # some completions stop and some are truncated
        loss_config={
            "loss_type": "dapo",
            "delta": 1.3,
            "kl_estimator": "k2",
            "entropy_coef": 0.02,
            "importance_sampling_correction": "token_truncate",
        },
        advantages={
            "scale_rewards": "batch",
            "importance_sampling_correction": "token_truncate",
            "importance_sampling_cap": 1.1,
            "mask_truncated_completions": True,
            "distillation_coef": 1.0,
        },
        teacher=QWEN3 | {"vocab_size": 64, "hidden_size": 24, "num_hidden_layers": 1},
    ),
    "gspo": Recipe(
        QWEN2,
        num_iterations=2,
        loss_config={
            "loss_type": "dr_grpo",
            "importance_sampling_level": "sequence",
            "epsilon_low": 0.06,
            "epsilon_high": 0.09,
            "dual_clip": 1.05,
            "beta": 0.0,
            "importance_sampling_correction": "token_truncate",
        },
        advantages={
            "advantage_estimator": "rloo",
            "kl_in_reward": True,
            "beta": 0.05,
            "importance_sampling_correction": "sequence_mask",
            "importance_sampling_cap": 1.2,
        },
    ),
    "cispo": Recipe(
        QWEN2,
        num_iterations=2,
        loss_config={"loss_type": "cispo", "beta": 0.0},
        advantages={
            "advantage_estimator": "reinforce_plus_plus",
            "kl_in_reward": True,
            "beta": 0.05,
            "kl_estimator": "k1",
        },
        equal_groups=True,
        resampling_rounds=2,
    ),
    # Context between turns, and groups without advantage, which go forward only.
    "tools": Recipe(
        CHUNKED,
        sampling={"stop_ids": tuple(range(30)), "min_tokens": 0},
        loss_config={"loss_type": "vespo", "off_policy_mask_threshold": 0.01, "beta": 0.0},
        old_of_generator=True,
        equal_groups=True,
        max_turns=4,
    ),
    # A prompt of its own for every group, and an advantage for every turn.
    "environment": Recipe(
        QWEN2,
        sampling={"stop_ids": tuple(range(20)), "min_tokens": 0},
        loss_config={"loss_type": "gpg", "beta": 0.0},
        advantages={"turn_advantages": True},
        max_turns=3,
        environment=True,
    ),
    # Conversations by the weights of several steps, some of which are rejected.
    "partial": Recipe(
        QWEN2,
        num_iterations=2,
        sampling={"stop_ids": tuple(range(16)), "min_tokens": 0},
        loss_config={"importance_sampling_correction": "token_truncate", "unbiased_kl": True},
        advantages={
            "importance_sampling_correction": "token_truncate",
            "importance_sampling_cap": 1.5,
            "rejection_geometric_low": 0.66,
            "rejection_geometric_high": 1.5,
            "rejection_k3": 0.22,
            "rejection_veto": 0.25,
        },
        max_turns=4,
        partial_chunk=1,
    ),
}


@dataclass(frozen=True)
class Case:
    """`train` is (data, model, stage, context), or its first three; `infer` (data, model): also the reference's."""

    recipe: str
    train: tuple[int, ...]
    infer: tuple[int, int]
    # Ranks that experts of `train` are dealt to, and that each is cut over; those of `infer` are dealt to as many as
    # it has model-parallel ranks.
    experts: tuple[int, int] = (1, 1)
    recompute: bool = False
    backend: str = "shared_memory"
    # Rows are as long as their content, 64 tokens, where they may be longer.
    widest: int = ROW_LENGTH
    # Sequence parallelism, of policy and reference.
    splits_tokens: bool = False
    # The optimizer's state is shared out over replicas.
    shards_optimizer: bool = False
    # Of layers, of each stage of `train`.
    chunks: int = 1
    # The experts of updates are the generator's.
    replays: bool = False

    @property
    def world(self) -> tuple[int, str]:
        return prod(self.train), self.backend

    @property
    def in_loop(self) -> bool:
        return self.backend != "device" and RECIPES[self.recipe].in_loop

    @property
    def batch_invariant(self) -> bool:
        """A token's numbers have the same bits in generator and trainer."""
        return self.in_loop and self.experts[1] == 1

    @property
    def any_layout(self) -> bool:
        """These bits are those of one process, which computes in the same precision."""
        divides = RECIPES[self.recipe].model["vocab_size"] % 8 == 0
        return self.batch_invariant and divides and self.backend == "shared_memory"

    @property
    def name(self) -> str:
        train, infer = "x".join(map(str, self.train)), "x".join(map(str, self.infer))
        over = "" if self.backend == "shared_memory" else f", {self.backend}"
        split = ", tokens split" if self.splits_tokens else ""
        chunks = f" of {self.chunks} chunks" if self.chunks > 1 else ""
        experts = ", experts {}x{}".format(*self.experts) if prod(self.experts) > 1 else ""
        replayed = ", routes replayed" if self.replays else ""
        model = f"{self.recipe}, train {train}{chunks}{experts}"
        return f"{model}, generate {infer}{split}{replayed}{over}"


ALONE = tuple(Case(recipe, (1, 1, 1), (1, 1)) for recipe in RECIPES)
SPREAD = (
    # Rows of tokens that ranks share, and so samples, whose ratio is one.
    Case("gspo", (1, 1, 1, 2), (2, 1)),
    Case("low rank", (1, 1, 1, 2), (1, 2), experts=(2, 1), recompute=True),
    Case("cispo", (1, 1, 2), (2, 1)),
    Case("gemma3", (1, 1, 2), (1, 2)),
    Case("qk norm", (1, 2, 1), (1, 2), recompute=True),
    # Norms and biases that all ranks hold.
    Case("olmo2", (1, 2, 1), (1, 2), recompute=True, splits_tokens=True),
    Case("dapo", (1, 1, 2, 2), (2, 2), widest=256),
    Case("two iterations", (1, 4, 2), (2, 4)),
    Case("tools", (1, 1, 2, 2), (2, 2), chunks=2),
    Case("tools", (2, 2, 2), (4, 2), splits_tokens=True, shards_optimizer=True, chunks=2),
    Case("environment", (1, 2, 1), (2, 1), splits_tokens=True),
    Case("low rank", (1, 2, 2), (4, 1), experts=(1, 2), splits_tokens=True),
    Case("eight layers", (1, 1, 4), (2, 2), recompute=True, chunks=2),
    # Two ranks hold the same experts, and share out their optimizer's state.
    Case(
        "experts",
        (2, 2, 1),
        (1, 4),
        experts=(2, 1),
        recompute=True,
        splits_tokens=True,
        shards_optimizer=True,
    ),
    Case(
        "experts",
        (2, 1, 2),
        (4, 1),
        experts=(2, 1),
        recompute=True,
        shards_optimizer=True,
        replays=True,
    ),
    Case("partial", (1, 2, 2), (2, 2), splits_tokens=True),
    Case("partial", (1, 2, 1), (2, 1), backend="high", splits_tokens=True),
    # A stage in the middle, and a ring of an odd length.
    Case("eight layers", (1, 1, 3), (3, 1), backend="device", widest=256, chunks=2),
    Case(
        "qk norm",
        (1, 2, 1, 2),
        (1, 4),
        backend="device",
        widest=256,
        splits_tokens=True,
        shards_optimizer=True,
    ),
)
CASES = ALONE + SPREAD

# Of updates by every loss, on DP2/MP2/PP2 (losses.py).
LOSSES_WORLD = (8, "shared_memory")
MOVED_WORLD = (8, "shared_memory")
DEVICE_MOVED_WORLD = (4, "device")
_POWERS = (1, 2, 4, 8)
TRAIN_MESHES = tuple(g for g in product(_POWERS, _POWERS, (1, 2, 4)) if g[0] * g[1] * g[2] <= 8)
INFER_MESHES = tuple(g for g in product(_POWERS, _POWERS, (1,)) if g[0] * g[1] <= 8)
SAVED: tuple[tuple[int, int, int], ...] = ((1, 4, 2), (2, 2, 2), (8, 1, 1), (1, 2, 1), (2, 1, 4))
# Of layouts whose stages have several, the chunks of each.
CHUNKS = {(2, 2, 2): 2, (1, 2, 2): 2}
# Every layout on its side; tests/test_reshard_plan.py has the plans of others.
PAIRS = tuple(
    (train, INFER_MESHES[index % len(INFER_MESHES)]) for index, train in enumerate(TRAIN_MESHES)
)
# Every axis cut on either side, by 2 and by 4, and ranks that have nothing.
DEVICE_PAIRS = (
    ((1, 2, 2), (4, 1, 1)),
    ((2, 1, 2), (1, 4, 1)),
    ((1, 1, 4), (1, 2, 1)),
)
DEVICE_SAVED: tuple[tuple[int, int, int], ...] = ((1, 2, 2), (4, 1, 1), (1, 1, 4))


# 67 rows of the vocabulary, which no number of ranks divides, on both ends of a pipeline.
SHARDED_MODEL = {"model_type": "qwen2", **_SMALL}


@dataclass(frozen=True)
class Sharded:
    """An optimizer over replicas, whose `mesh` is (data, model, stage), beside one of whole parameters (sharded.py)."""

    mesh: tuple[int, int, int]
    dtype: Any = "float32"
    lora: int = 0
    backend: str = "shared_memory"
    moments_on_host: bool = False

    @property
    def world(self) -> tuple[int, str]:
        data, model, stage = self.mesh
        return data * model * stage, self.backend

    @property
    def name(self) -> str:
        adapters = f", rank {self.lora}" if self.lora else ""
        on_host = ", moments on the host" * self.moments_on_host
        return f"{'x'.join(map(str, self.mesh))} {self.dtype}{adapters}{on_host}, {self.backend}"


SHARDED = (
    Sharded((4, 2, 1), "bfloat16"),
    Sharded((4, 1, 2)),
    # Three rows of an adapter for eight ranks.
    Sharded((8, 1, 1), lora=3),
    # Where moments stay on the device, the case of QWEN3 on a device has them.
    Sharded((2, 1, 2), "float16", backend="device", moments_on_host=True),
)
# (layout, whether the optimizer is shared out) of one update after the other.
SHARDED_MOVES = (((4, 2, 1), True), ((2, 2, 2), True), ((1, 4, 2), False))


@dataclass(frozen=True)
class Golden:
    """A family of tests/golden/ on several ranks; `mesh` is (data, model, stage, context), `experts` as of a Case."""

    family: str
    mesh: tuple[int, int, int, int]
    experts: tuple[int, int] = (1, 1)
    backend: str = "shared_memory"

    @property
    def world(self) -> tuple[int, str]:
        return prod(self.mesh), self.backend

    @property
    def name(self) -> str:
        return f"{self.family} {'x'.join(map(str, self.mesh))}, {self.backend}"


SEES_IMAGES = "qwen2_5_vl"
GOLDEN = (
    Golden("mixtral", (2, 2, 1, 1), (2, 2)),
    Golden("deepseek_v3", (1, 2, 1, 2), (2, 2)),
    Golden(SEES_IMAGES, (2, 2, 1, 1)),
    Golden(SEES_IMAGES, (2, 1, 1, 2)),
    Golden(SEES_IMAGES, (2, 2, 2, 1)),
    Golden(SEES_IMAGES, (1, 2, 2, 2)),
    Golden(SEES_IMAGES, (1, 2, 2, 1), backend="device"),
)


# Layouts of a classifier, (data, model, stage, context). With context parallelism the ranks of a layer split tokens.
SCORED_FAMILY = "qwen2"
SCORED = {
    "alone": (1, 1, 1, 1),
    "dp2 mp4": (2, 4, 1, 1),
    "mp2 pp2 cp2": (1, 2, 2, 2),
}


@dataclass(frozen=True)
class CriticCase:
    """A critic's updates on `mesh`, (data, model, stage, context), of which `splits` shares out tokens."""

    name: str
    mesh: tuple[int, int, int, int]
    splits: bool = False
    chunks: int = 1
    shards_optimizer: bool = False
    dtype: Any = "float32"
    backend: str = "shared_memory"

    @property
    def world(self) -> tuple[int, str]:
        return prod(self.mesh), self.backend


CRITIC_MODEL = CHUNKED
CRITICS = (
    CriticCase("alone", (1, 1, 1, 1)),
    CriticCase("dp2 mp2 pp2", (2, 2, 2, 1), splits=True, chunks=2, shards_optimizer=True),
    CriticCase("mp2 pp2 cp2", (1, 2, 2, 2), splits=True),
    CriticCase("dp2 mp4", (2, 4, 1, 1), shards_optimizer=True),
    CriticCase(
        "dp2 mp2 float16",
        (2, 2, 1, 1),
        shards_optimizer=True,
        dtype="float16",
        backend="device",
    ),
)


def pairs_of(world: tuple[int, str]) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    return PAIRS if world == MOVED_WORLD else DEVICE_PAIRS


def saved_by(world: tuple[int, str]) -> tuple[tuple[int, int, int], ...]:
    return SAVED if world == MOVED_WORLD else DEVICE_SAVED


def pair_name(train: tuple[int, ...], infer: tuple[int, ...]) -> str:
    return "x".join(map(str, train)) + " and " + "x".join(map(str, infer[:2]))
