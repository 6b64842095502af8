"""Hand-made conversations of four turns on the bundled model, and the GRPO loss of them written in plain NumPy.

Uses nothing of mindgrpo.algorithm.losses: what it says is compared with the trainer's loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from data_sets import MODEL

from mindgrpo.algorithm.estimators import AlgorithmConfig
from mindgrpo.algorithm.packing import MicroShape, PackedRollout
from mindgrpo.algorithm.sample import (
    STOPPED,
    Arrays,
    Request,
    Rollout,
    Sample,
    TrainBatch,
    collect,
)
from mindgrpo.backend.cpu.backend import CpuBackend
from mindgrpo.backend.kernels.shapes import AdamWSettings
from mindgrpo.data.tokenizer import load_tokenizer
from mindgrpo.data.turns import TurnSuffix
from mindgrpo.models.decoder import KEEP_ALL
from mindgrpo.models.decoder_config import read_config
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.models.pipeline import compute_log_probs
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Layout
from mindgrpo.rollout.conversations import Conversations
from mindgrpo.rollout.tools import ToolTurns
from mindgrpo.tools.calls import ToolCall
from mindgrpo.tools.pool import ToolAnswer, load_tools
from mindgrpo.training.policy import Policy, UpdateSettings
from mindgrpo.weights.pretrained import load_weights

TURNS = 4
QUESTIONS = ("What is 17 + 25?", "Add 3, 4 and 5.")
TEXTS = (
    ("17?", "17 and 25?", "so 42?", "The answer is 42"),
    ("?", "I add 17 and 25: 17 + 25 = 42?", "42?", "42"),
    ("3 + 4 = 7?", "7 + 5?", "12?", "12"),
    ("Three and four is seven?", "5?", "and five?", "The sum is 12."),
)
ANSWERS = ("42", "0", "Error: no number", "twelve")
# Holds the longest conversation; a row of the second one holds several.
LENGTH, LONG = 384, 768


class Scripted:
    """Writes the next of each sample's texts, each with the token that ends a turn; answers every call."""

    def __init__(self) -> None:
        self.tokenizer = load_tokenizer(MODEL).with_template("qwen_tools")

    def ask(
        self, turns: Mapping[int, Sequence[ToolCall]], patience: float
    ) -> dict[int, list[ToolAnswer]]:
        return {sample: [ToolAnswer(text)] for sample, text in zip(turns, ANSWERS, strict=True)}

    def end_all(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing was started."""

    def generate(self, requests: Sequence[Request]) -> list[Sample]:
        made = []
        for request in requests:
            for sample in request.samples:
                ids = self.tokenizer.encode(TEXTS[sample][request.turn] + "<|im_end|>")
                logps = np.full(len(ids), -1.0, np.float32)
                made.append(
                    Sample.drawn(
                        sample, request.prompt, np.array(ids, np.int32), STOPPED, 0, logps=logps
                    )
                )
        return made


def parse(text: str) -> list[ToolCall]:
    return [ToolCall("calculator")] if text.endswith("?") else []


def conversations() -> Rollout:
    """Two prompts, two conversations of four turns each, made by the conversation loop and the shipped template."""
    script = Scripted()
    schemas = [tool.schema() for tool in load_tools(["calculator"])]
    responder = ToolTurns(parse, script)
    suffix = TurnSuffix(script.tokenizer, schemas)
    loop = Conversations(script.tokenizer, suffix, responder, TURNS)
    prompts = [
        np.array(script.tokenizer.encode(f"<|im_start|>user\n{q}<|im_end|>\n"), np.int32)
        for q in QUESTIONS
    ]
    requests = [Request(prompt, (2 * i, 2 * i + 1)) for i, prompt in enumerate(prompts)]
    return collect(loop.run(requests, LENGTH, script.generate), 2, range(len(prompts)))


def policy_of(backend: CpuBackend, loss: AlgorithmConfig, shape: MicroShape) -> Policy:
    """The bundled model in float32 at temperature 1."""
    config = read_config(MODEL)
    layout = Layout.of(Mesh(1, 1), parameter_specs(config))
    adamw = AdamWSettings(0.9, 0.95, 1e-8, 0.0)
    settings = UpdateSettings(shape, LENGTH, 1.0, KEEP_ALL, loss, 1.0, adamw, max_tokens=LENGTH)
    policy = Policy(config, layout, backend, settings)
    load_weights(policy.weights, MODEL)
    return policy


def log_probs(policy: Policy, rollout: Rollout) -> list[np.ndarray]:
    mesh = policy.weights.layout.mesh
    return compute_log_probs(policy.pipeline, mesh, policy.backend, PackedRollout(rollout))


def batch_of(rollout: Rollout, logps: Arrays) -> TrainBatch:
    """Old and reference log-probs near the policy's, and ratios beyond both ends of a clip of 0.2."""
    rng = np.random.default_rng(5)

    def near(deviation: float) -> list[np.ndarray]:
        return [(p + rng.normal(0, deviation, p.size)).astype(np.float32) for p in logps]

    pairs = zip(rollout.samples, logps, strict=True)
    samples = tuple(replace(s, arrays={**s.arrays, "logps": own}) for s, own in pairs)
    return TrainBatch(
        replace(rollout, samples=samples),
        advantages=np.array([0.8, -1.1, 0.6, -0.3], np.float32),
        old_logps=near(0.2),
        reference_logps=near(0.3),
    )


def numpy_loss(
    loss: AlgorithmConfig, batch: TrainBatch, logps: Arrays
) -> tuple[float, list[np.ndarray]]:
    """The loss, and its derivative by each log-prob, float64 [completion length] a sample.

    Tokens of a tool or a template are in no sum and no length. Clipped surrogate and the k3 estimate of the KL.
    """
    assert batch.old_logps is not None and batch.reference_logps is not None
    masks = batch.rollout.action_mask
    counts = [int(mask.sum()) for mask in masks]
    total, slopes = 0.0, []
    for i, mask in enumerate(masks):
        own, old, reference = (
            np.asarray(rows[i], np.float64)
            for rows in (logps, batch.old_logps, batch.reference_logps)
        )
        share = {
            "grpo": 1.0 / (len(masks) * counts[i]),
            "dapo": 1.0 / sum(counts),
            "dr_grpo": 1.0 / (len(masks) * LENGTH),
        }[loss.loss_type]
        slope, (low, high) = np.zeros(mask.size), loss.clip_bounds
        for t in np.flatnonzero(mask):
            advantage = float(batch.advantages[i])
            ratio = np.exp(own[t] - old[t])
            free = ratio * advantage
            clipped = min(max(ratio, 1 - low), 1 + high) * advantage
            log = reference[t] - own[t]
            total += share * (-min(free, clipped) + loss.beta * (np.exp(log) - log - 1))
            # Where the clip decides, the ratio has no part in the value.
            slope[t] = share * ((-free if free <= clipped else 0.0) + loss.beta * (1 - np.exp(log)))
        slopes.append(slope)
    return total, slopes
