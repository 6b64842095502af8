"""Writes the policy's weights as a Hugging Face directory that other libraries load.

Rank 0 gathers them through memory, a group at a time, and writes them in float32. A directory that already holds
weights is refused. What cannot be written there is a CannotWrite on all ranks.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from mindgrpo.backend.contract import Backend, Pool
from mindgrpo.backend.rank_consistency import on_first_rank
from mindgrpo.errors import UserError, writing
from mindgrpo.memory.residency import Residency
from mindgrpo.models.decoder_config import read_config
from mindgrpo.models.lora_specs import LoraSettings
from mindgrpo.models.shard import Adapters
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.weight_sync.execute import Resharder
from mindgrpo.weight_sync.plan import plan_reshard
from mindgrpo.weight_sync.stream import TensorStream, bucket_size
from mindgrpo.weights.host_tensors import HostTensors
from mindgrpo.weights.local_weights import Weights
from mindgrpo.weights.safetensors_writer import MAX_SHARD_BYTES, SafetensorsWriter

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
ALONE = Mesh(1, 1, 1)


def export_policy(
    weights: Weights,
    backend: Backend,
    source: str,
    target: Path,
    memory: Residency,
    adapters: Adapters | None = None,
) -> None:
    """Writes the whole model, adapters added in; all ranks together, with the policy's weights on the device.

    Rank 0 has one group of tensors and one shard of the files in memory at a time (HostPlan counts them). `source` is
    the directory that the run started from.
    """
    layout = weights.layout.whole_on(ALONE)
    pool = backend.host_pool(bucket_size(layout, backend.rank, weights.dtype), dtype=weights.dtype)
    with ExitStack() as opened:
        files = _Files(pool, target, opened)
        on_first_rank(backend, files.open)
        stream = TensorStream(weights, adapters, layout, backend, files)
        with memory.temporary_host("export_copy", stream.host_copies):
            stream.run()
        on_first_rank(backend, lambda: files.finish(Path(source)))


class _Files:
    """A TensorSink that adds each group to the files in `target`, on rank 0.

    Leaving `opened` by an exception removes what was written.
    """

    def __init__(self, pool: Pool, target: Path, opened: ExitStack) -> None:
        self.pool, self._target, self._opened = pool, target, opened
        self._writer: SafetensorsWriter | None = None
        self._error: UserError | None = None

    @property
    def host_copies(self) -> Sequence[Pool]:
        return [self.pool]

    def open(self) -> None:
        """Raises UserError, CannotWrite among them."""
        with writing(self._target):
            writer = SafetensorsWriter(self._target, MAX_SHARD_BYTES)
            self._writer = self._opened.enter_context(writer)

    def take(self, tensors: HostTensors) -> None:
        """Keeps what cannot be written for `finish`: the other ranks are in the middle of the transfer."""
        assert self._writer is not None
        if self._error is not None:
            return
        try:
            for name, values in tensors.hf_views.items():
                self._writer.add(name, values.astype(np.float32, copy=False))
        except UserError as error:
            self._error = error

    def finish(self, source: Path) -> None:
        """Raises CannotWrite."""
        if self._error is not None:
            raise self._error
        with writing(self._target):
            self._opened.close()
            write_companions(source, self._target, "float32")


def export_adapters(
    adapters: Adapters, backend: Backend, source: str, target: Path, memory: Residency
) -> None:
    """Writes only the adapters, as the PEFT library reads them: adapter_model.safetensors and adapter_config.json."""
    own = adapters.weights
    full = Weights(own.layout.whole_on(ALONE), backend.rank, backend, "export", on_host_only=True)
    with memory.temporary_host("export_copy", [full.pool]):
        Resharder(plan_reshard(own.layout, full.layout), own, full, backend).run()
        on_first_rank(backend, lambda: _write_adapters(full, adapters.settings, source, target))


def _write_adapters(full: Weights, settings: LoraSettings, source: str, target: Path) -> None:
    tensors = {
        f"base_model.model.{spec.name}": np.ascontiguousarray(full.arrays.hf_views[spec.name])
        for spec in full.layout.specs
    }
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
    with writing(target):
        target.mkdir(parents=True)
        (target / "adapter_model.safetensors").write_bytes(save(tensors, {"format": "pt"}))
        (target / "adapter_config.json").write_text(json.dumps(described, indent=2) + "\n")


def write_companions(source: Path, target: Path, dtype: str) -> None:
    config = dict(read_config(source).raw)
    config.pop("dtype", None)
    config["torch_dtype"] = dtype
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
