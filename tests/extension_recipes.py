"""The recipes of docs/extending.md as patches: what a toy component adds, file by file, and a program that uses it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Edit:
    """In `file` of the package, the text `before`, which occurs once, becomes `after`."""

    file: str
    before: str
    after: str


@dataclass(frozen=True)
class Recipe:
    """`section` of the page; `files` are a user's own, by name, and `program` runs beside them with the package as
    `edits` have made it."""

    section: str
    program: str
    edits: tuple[Edit, ...] = ()
    files: dict[str, str] = field(default_factory=dict)


# One step of a small model, with more words on its command line.
STEP = """
from pathlib import Path
import small_runs
small_runs.make_inputs(Path("inputs"))
words = ("--rl_config.max_steps=1", "--rl_config.eval_on_start=false", "--rl_config.eval_steps=0")
"""

REWARD = Recipe(
    "A reward function",
    """
from mindgrpo.cli.verbs import main
main(["score", "--reward", "mine.py:vowels", "--data", "rows.jsonl"])
""",
    files={
        "mine.py": "def vowels(completions, **columns):\n"
        "    return [sum(letter in 'aeiou' for letter in text) for text in completions]\n",
        "rows.jsonl": '{"completion": "education", "answer": ""}\n',
    },
)

LOSS = Recipe(
    "A loss",
    STEP
    + """
import math
import mindspore as ms, numpy as np
from mindgrpo.algorithm.estimators import AlgorithmConfig
from mindgrpo.algorithm.losses import policy_loss
from mindgrpo.algorithm.surrogates import Tokens
from mindgrpo.training.stage_graphs import LossInputs, PolicyLoss

small_runs.run(Path("inputs"), Path("run"), "--rl_config.loss_type=squared", *words)
(row,) = small_runs.rows(Path("run"))
assert math.isfinite(row["loss"]) and row["grad_norm"] > 0
values = np.linspace(-1.0, -0.1, 6).astype(np.float32)
config = AlgorithmConfig(loss_type="squared", beta=0.0)
ones, zeros = np.ones(6, np.float32), np.zeros(6, np.float32)
tokens = Tokens(values, values - 0.1, values, ones, values, ones / 6, ones, np.array([6]))
inputs = LossInputs(values - 0.1, values, values, ones / 6, ones, zeros.astype(np.int32), zeros, zeros)
ms.set_context(mode=0)
found = PolicyLoss(config, True)(ms.Tensor(values), ms.Tensor(ones), *map(ms.Tensor, inputs))
assert np.isclose(found.asnumpy(), policy_loss(tokens, config), rtol=1e-5), found
""",
    (
        Edit(
            "mindgrpo/algorithm/surrogates.py",
            "# (tokens, settings, log-probs where the surrogate stops gradients) -> float [tokens].\n",
            "def squared(tokens: Tokens, config: LossConfig, held: np.ndarray) -> np.ndarray:\n"
            '    """Computes A - (log rho - A)^2 / 2."""\n'
            "    gap = tokens.logps - tokens.old - tokens.advantages\n"
            "    return np.asarray(tokens.advantages - gap**2 / 2)\n\n\n"
            "# (tokens, settings, log-probs where the surrogate stops gradients) -> float [tokens].\n",
        ),
        Edit(
            "mindgrpo/algorithm/surrogates.py",
            "LOSS_TYPES = {\n",
            'LOSS_TYPES = {\n    "squared": LossType(squared, "token_mean", "a square", epsilon=None),\n',
        ),
        Edit(
            "mindgrpo/training/surrogates.py",
            "CELLS: dict[host.Surrogate, type[Surrogate]] = {\n",
            "class Squared(Surrogate):\n"
            "    def construct(self, logp, log_ratio, advantages, old, segments, shares):\n"
            "        gap = log_ratio - advantages\n"
            "        return advantages - gap * gap / 2.0\n\n\n"
            "CELLS: dict[host.Surrogate, type[Surrogate]] = {\n    host.squared: Squared,\n",
        ),
    ),
)

ESTIMATOR = Recipe(
    "An advantage estimator",
    STEP
    + """
from mindgrpo.algorithm.estimators import AlgorithmConfig, Earned
import numpy as np

config = AlgorithmConfig(advantage_estimator="best", num_generations=2)
earned = Earned(np.array([1.0, 3.0, 2.0, 2.0]), np.full(4, 5))
assert config.estimator.advantages(earned, config).tolist() == [-2, 0, 0, 0]
small_runs.run(Path("inputs"), Path("run"), "--rl_config.advantage_estimator=best", *words)
(row,) = small_runs.rows(Path("run"))
assert row["grad_norm"] > 0
""",
    (
        Edit(
            "mindgrpo/algorithm/estimators.py",
            "ESTIMATORS = {\n",
            "def _best(earned: Earned, config: AlgorithmConfig) -> np.ndarray:\n"
            "    groups = earned.rewards.reshape(-1, config.num_generations)\n"
            "    return (groups - groups.max(1, keepdims=True)).reshape(-1).astype(np.float32)\n\n\n"
            'ESTIMATORS = {\n    "best": Estimator("the best of the group", _best),\n',
        ),
    ),
)

KEY = Recipe(
    "A key",
    STEP
    + """
from mindgrpo.config.reference import explain
assert "give no sample an advantage below 0" in explain("positive_only")
small_runs.run(Path("inputs"), Path("one"), *words)
small_runs.run(Path("inputs"), Path("other"), "--rl_config.positive_only=true", *words)
first, second = (small_runs.rows(Path(name))[0] for name in ("one", "other"))
assert first["reward/mean"] == second["reward/mean"] and first["loss"] != second["loss"]
""",
    (
        Edit(
            "mindgrpo/algorithm/surrogates.py",
            "    beta: float = Field(0.01, ge=0)\n",
            "    positive_only: bool = False\n"
            '    """give no sample an advantage below 0"""\n'
            "    beta: float = Field(0.01, ge=0)\n",
        ),
        Edit(
            "mindgrpo/training/stage_graphs.py",
            "        self.has_old = has_old\n",
            "        self.has_old, self.positive_only = has_old, loss_config.positive_only\n",
        ),
        Edit(
            "mindgrpo/training/stage_graphs.py",
            "        if not self.has_old:\n            old = ops.stop_gradient(logp)\n",
            "        if self.positive_only:\n            advantages = ops.maximum(advantages, zeros)\n"
            "        if not self.has_old:\n            old = ops.stop_gradient(logp)\n",
        ),
    ),
)

ENGINE = Recipe(
    "An engine",
    STEP
    + """
small_runs.run(Path("inputs"), Path("run"), *words)
import json
assert json.loads(Path("run/summary.json").read_text())["engine"] == "loud"
""",
    (
        Edit(
            "mindgrpo/grpo/build.py",
            "    return EmbeddedEngine(\n",
            "    from mindgrpo.rollout.engine import Capabilities\n\n"
            "    class LoudEngine(EmbeddedEngine):\n"
            '        capabilities = Capabilities("loud")\n\n'
            "    return LoudEngine(\n",
        ),
    ),
)

TRACKER = Recipe(
    "A tracker",
    STEP
    + """
small_runs.run(Path("inputs"), Path("run"), "--monitor_config.trackers=mine.py:Lines", *words)
(line,) = Path("seen.txt").read_text().splitlines()
assert line.startswith("1 ") and "reward/mean" in line
""",
    files={
        "mine.py": "class Lines:\n    id = ''\n    def __init__(self, run):\n        pass\n"
        "    def log(self, step, metrics, completions):\n"
        "        with open('seen.txt', 'a') as file:\n"
        "            print(step, *metrics, file=file)\n"
        "    def finish(self, summary):\n        pass\n"
    },
)

ENVIRONMENT = Recipe(
    "An environment",
    STEP
    + """
from mindgrpo import GRPOTrainer, load_config
inputs = [f"--{key}={value}" for key, value in small_runs.input_keys(Path("inputs")).items()]
here = ["--rl_config.environment=mine.py:Length", "--output_dir=run", *inputs, *words]
GRPOTrainer(load_config("inputs/small.yaml", here)).train()
(row,) = small_runs.rows(Path("run"))
assert row["reward/environment/mean"] > 0
""",
    files={
        "mine.py": "class Length:\n"
        "    def reset(self, row):\n        return row['question']\n"
        "    def step(self, completion):\n        return '', float(len(completion)), True\n"
    },
)

FAMILY = Recipe(
    "A model family",
    STEP
    + """
import json
config = Path("inputs/model/config.json")
config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "toy"}))
small_runs.run(Path("inputs"), Path("run"), *words)
(row,) = small_runs.rows(Path("run"))
assert row["logprob_gap/max"] == 0 and row["grad_norm"] > 0
""",
    (
        Edit(
            "mindgrpo/models/families.py",
            "FAMILIES: dict[str, Family] = {\n",
            "FAMILIES: dict[str, Family] = {\n"
            '    "toy": Family(qkv_bias=True, bias_key=None, defaults=OF_MOST | {"max_position_embeddings": 512}),\n',
        ),
    ),
)

DEVICE = Recipe(
    "A device",
    STEP
    + """
import json
small_runs.run(Path("inputs"), Path("run"), "--context.backend=toy", *words)
assert json.loads(Path("run/summary.json").read_text())["backend"] == "toy"
""",
    (
        Edit(
            "mindgrpo/backend/targets.py",
            'BACKENDS = {"CPU": ("shared_memory", "device"),',
            'BACKENDS = {"CPU": ("shared_memory", "device", "toy"),',
        ),
        Edit(
            "mindgrpo/backend/connect.py",
            "    return lambda environment, own: HostCpuBackend(environment, own.compiled)\n",
            "    class ToyBackend(HostCpuBackend):\n        name = target.backend\n\n"
            "    kind = ToyBackend if target.backend == 'toy' else HostCpuBackend\n"
            "    return lambda environment, own: kind(environment, own.compiled)\n",
        ),
    ),
)

TOKEN_ARRAY = Recipe(
    "A per-token array",
    STEP
    + """
small_runs.run(Path("inputs"), Path("run"), *words)
(row,) = small_runs.rows(Path("run"))
assert row["grad_norm"] > 100, row["grad_norm"]
""",
    (
        Edit(
            "mindgrpo/algorithm/token_arrays.py",
            "TOKEN_ARRAYS: dict[str, TokenArray] = {\n",
            "TOKEN_ARRAYS: dict[str, TokenArray] = {\n"
            '    "costs": TokenArray("what tokens cost", np.float32),\n',
        ),
        Edit(
            "mindgrpo/rollout/embedded/engine.py",
            "                logps=batch.logps[i, :length].copy(),\n",
            "                logps=batch.logps[i, :length].copy(),\n"
            "                costs=np.full(length, 1000.0),\n",
        ),
        Edit(
            "mindgrpo/training/stage_graphs.py",
            "    penalties: Any\n",
            "    penalties: Any\n    costs: Any\n",
        ),
        Edit(
            "mindgrpo/training/stage_graphs.py",
            "        old, reference, advantages, weights, rollout_is_weights, segments, shares, penalties = (\n"
            "            inputs\n        )\n",
            "        *most, costs = inputs\n"
            "        old, reference, advantages, weights, rollout_is_weights, segments, shares, penalties = most\n",
        ),
        Edit(
            "mindgrpo/training/stage_graphs.py",
            "        return sum_ext(terms * weights)\n",
            "        return sum_ext((terms + costs * ops.exp(logp - ops.stop_gradient(logp))) * weights)\n",
        ),
        Edit(
            "mindgrpo/training/update.py",
            "        penalties=spread(batch.penalties),\n    )\n\n\nPerToken",
            "        penalties=spread(batch.penalties),\n"
            '        costs=spread(batch.rollout.token_arrays["costs"]),\n    )\n\n\nPerToken',
        ),
    ),
)

AXIS = Recipe(
    "A mesh axis",
    STEP
    + """
from mindgrpo.parallel.mesh import Mesh
assert Mesh(1, 2, hp=2).group(3, ("hp",)) == (1, 3)
small_runs.run(Path("inputs"), Path("run"), "--actor_config.parallel_config.head_parallel=1", *words)
assert len(small_runs.rows(Path("run"))) == 1
""",
    (
        Edit(
            "mindgrpo/parallel/mesh.py",
            'DENSE = ("pp", "dp", "cp", "tp")',
            'DENSE = ("pp", "dp", "cp", "hp", "tp")',
        ),
        Edit(
            "mindgrpo/parallel/mesh.py", "    etp: int = 1\n", "    etp: int = 1\n    hp: int = 1\n"
        ),
        Edit(
            "mindgrpo/parallel/mesh.py",
            '    "pp": "pipeline_stage",\n',
            '    "pp": "pipeline_stage",\n    "hp": "head_parallel",\n',
        ),
        Edit(
            "mindgrpo/config/roles.py",
            "    pipeline_stage: int = Field(1, ge=1)\n",
            "    head_parallel: int = Field(1, ge=1)\n"
            '    """number of ranks that share the heads of a layer"""\n'
            "    pipeline_stage: int = Field(1, ge=1)\n",
        ),
    ),
)

RECIPES = (
    *(REWARD, LOSS, ESTIMATOR, KEY, FAMILY, ENGINE, TRACKER, ENVIRONMENT, TOKEN_ARRAY, AXIS),
    DEVICE,
)
