"""An engine under test with the weights that it should have, and its log-probs beside transformers'."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_process import EngineProcess, Oracle, Tensors, engine_python
from small_models import TINY, UNTIED, changed, tiny_tensors, untied_tensors, write_model

needs_vllm = pytest.mark.skipif(
    engine_python() is None,
    reason="no environment of vLLM: neither .venv-vllm nor $MINDGRPO_VLLM_PYTHON",
)

EXACT = 1e-4
EMBEDDING = "model.embed_tokens.weight"
ONE = "model.layers.1.mlp.down_proj.weight"
# The last has a block of vLLM's prefix cache.
PROMPTS = [[5, 9, 13, 40], [250, 3, 77], list(range(10, 60))]


class Subject:
    """An engine, the model that it was started with, and the weights that it has by now."""

    def __init__(self, engine: EngineProcess, config: dict[str, Any], tensors: Tensors) -> None:
        self.engine = engine
        self.config = config
        self.tensors = tensors
        self.version = 0

    def publish(self, names: list[str]) -> None:
        """A new version in which only the tensors of these names have changed."""
        self.version += 1
        self.tensors = changed(self.tensors, names, self.version)
        self.engine.publish(self.tensors, self.version)

    def generate(self, requests: list[dict[str, Any]], **sampling: Any) -> list[dict[str, Any]]:
        reply = self.engine.generate(self.version, requests, **sampling)
        assert reply["type"] == "completions", reply
        assert reply["version"] == self.version
        assert reply["versions"] == [self.version] * self.engine.tensor_parallel
        completions: list[dict[str, Any]] = reply["completions"]
        return completions


def started(folder: Path, kind: str, tensor_parallel: int = 1, dtype: str = "float32") -> Subject:
    """An engine with the weights of version 1; its folder has the model's configuration only."""
    config = json.loads((TINY / "config.json").read_text("utf-8")) if kind == "tied" else UNTIED
    tensors = tiny_tensors() if kind == "tied" else untied_tensors()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    subject = Subject(EngineProcess(folder, dtype, tensor_parallel), config, tensors)
    before = time.monotonic()
    reply = subject.engine.start()
    assert reply["type"] == "ready", reply
    print(f"{kind} {dtype} tp{tensor_parallel}: start {time.monotonic() - before:.1f} s")
    assert reply["platform"] == "cpu" and len(reply["workers"]) == tensor_parallel
    subject.publish([])
    return subject


def requests_of(prompts: list[list[int]], num_samples: int = 2, limit: int = 12) -> list[Any]:
    seeds = range(1 << 40, 1 << 60, 12345678901)
    return [
        {
            "prompt": prompt,
            "samples": [
                {"seed": seeds[number * 100 + sample], "max_tokens": limit}
                for sample in range(num_samples)
            ],
        }
        for number, prompt in enumerate(prompts)
    ]


def gap(subject: Subject, oracle: Oracle, folder: Path, temperature: float = 1.0) -> float:
    """The largest difference of log-probs between the engine and transformers with the same weights."""
    completions = subject.generate(requests_of(PROMPTS), temperature=temperature)
    return gap_of(subject, oracle, folder, temperature, completions)


def expected(
    subject: Subject, oracle: Oracle, folder: Path, temperature: float, completions: list[Any]
) -> list[np.ndarray]:
    """For each completion of requests_of(PROMPTS), transformers' log-probs (tokens, vocabulary)."""
    model = write_model(folder / f"version{subject.version}", subject.config, subject.tensors)
    prompts = [prompt for prompt in PROMPTS for _ in range(2)]
    rows = [prompt + done["tokens"] for prompt, done in zip(prompts, completions, strict=True)]
    tables = oracle.log_probs(model, temperature, rows)
    return [table[len(p) - 1 : -1] for p, table in zip(prompts, tables, strict=True)]


def gap_of(
    subject: Subject, oracle: Oracle, folder: Path, temperature: float, completions: list[Any]
) -> float:
    tables = expected(subject, oracle, folder, temperature, completions)
    gaps = [
        np.abs(table[np.arange(len(done["tokens"])), done["tokens"]] - done["logps"]).max()
        for done, table in zip(completions, tables, strict=True)
    ]
    return float(max(gaps))


def failed_publish(subject: Subject, case: str, version: int) -> dict[str, Any]:
    """The reply at which a publish of the subject's weights fails."""
    engine, tensors = subject.engine, subject.tensors
    if case == "missing":
        less = {name: array for name, array in tensors.items() if name != ONE}
        return engine.begin(less, version)
    if case == "extra":
        return engine.begin(tensors | {"model.extra.weight": np.ones(3, np.float32)}, version)
    if case == "shape":
        return engine.begin(tensors | {ONE: tensors[ONE].T.copy()}, version)
    assert engine.begin(tensors, version)["type"] == "begun"
    if case == "crc":
        return next(r for r in engine.load_all(tensors, ONE) if r["type"] == "error")
    if case == "twice":
        engine.load({ONE: tensors[ONE]})
        return engine.load({ONE: tensors[ONE]})
    engine.load({name: tensors[name] for name in list(tensors)[:5]})
    return engine.commit(version)


def traces(engine: EngineProcess) -> list[str]:
    """What of the engine's is still there: its folder, and its names in /dev/shm."""
    left = [name for name in engine.ready["shared_memory"] if Path("/dev/shm", name).exists()]
    return left + [path for path in [engine.ready["folder"]] if Path(path).exists()]
