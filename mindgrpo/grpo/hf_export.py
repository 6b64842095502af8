"""The policy's weights as a Hugging Face directory that other libraries load.

Gathered through memory onto rank 0 and written there. Refuses a directory that already holds weights.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from mindgrpo.backend.contract import Backend
from mindgrpo.memory.residency import Residency
from mindgrpo.models.decoder import Adapters
from mindgrpo.models.families import read_config
from mindgrpo.models.lora_specs import LoraSettings
from mindgrpo.parallel.mesh import Grid
from mindgrpo.parallel.sharding import Layout
from mindgrpo.weight_sync.execute import Resharder
from mindgrpo.weight_sync.plan import plan_reshard
from mindgrpo.weight_sync.syncer import WeightSyncer
from mindgrpo.weights.local_weights import Weights
from mindgrpo.weights.safetensors_files import SafetensorsWriter

# What a model directory holds beside weights and config.json.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
MAX_SHARD_BYTES = 2 << 30


def export_policy(
    weights: Weights,
    backend: Backend,
    source: str,
    target: Path,
    memory: Residency,
    adapters: Adapters | None = None,
) -> None:
    """Writes the whole model, adapters added in; all ranks together, with the policy's weights on the device.

    Rank 0 needs host memory for the whole model. `source` is the directory that the run started from.
    """
    full = Weights(_whole(weights.layout), backend.rank, backend, on_host=True)
    syncer = WeightSyncer(weights, adapters, full, backend)
    with memory.temporary_host("export_copy", [full.pool, *syncer.copies]):
        syncer.run()
        if backend.rank == 0:
            with SafetensorsWriter(target, MAX_SHARD_BYTES) as writer:
                for spec in full.layout.specs:
                    writer.add(spec.name, full.parts[spec.name])
            write_companions(Path(source), target, "float32")
    backend.world.barrier()


def export_adapters(
    adapters: Adapters, backend: Backend, source: str, target: Path, memory: Residency
) -> None:
    """Writes only the adapters, as the PEFT library reads them: adapter_model.safetensors and adapter_config.json."""
    own = adapters.weights
    full = Weights(_whole(own.layout), backend.rank, backend, on_host=True)
    with memory.temporary_host("export_copy", [full.pool]):
        Resharder(plan_reshard(own.layout, full.layout), own, full, backend).run()
        if backend.rank == 0:
            _write_adapters(full, adapters.settings, source, target)
    backend.world.barrier()


def _write_adapters(full: Weights, settings: LoraSettings, source: str, target: Path) -> None:
    target.mkdir(parents=True)
    tensors = {
        f"base_model.model.{spec.name}": np.ascontiguousarray(full.parts[spec.name])
        for spec in full.layout.specs
    }
    save_file(tensors, target / "adapter_model.safetensors", metadata={"format": "pt"})
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": source,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": list(settings.targets),
    }
    (target / "adapter_config.json").write_text(json.dumps(described, indent=2) + "\n")


def _whole(layout: Layout) -> Layout:
    """The same parameters on rank 0 alone."""
    return Layout(Grid(1, 1, 1), layout.specs, (range(layout.stage_layers[-1].stop),))


def write_companions(source: Path, target: Path, dtype: str) -> None:
    config = dict(read_config(source).raw)
    config.pop("dtype", None)
    config["torch_dtype"] = dtype
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
