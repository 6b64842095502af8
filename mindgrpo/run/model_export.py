"""Exports the policy's weights and the tokenizer as a Hugging Face directory.

The files are distributed over the ranks that see the directory. Each rank gathers the parameters of its files group by
group and writes them as they arrive. A directory that already holds weights is refused. A failed write raises
CannotWrite on all ranks.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors.numpy import save

from mindgrpo.backend.contract import Backend, Pool
from mindgrpo.backend.dtypes import Dtype
from mindgrpo.backend.rank_consistency import on_first_rank
from mindgrpo.checkpoint.folders import ranks_that_see
from mindgrpo.data.hub_names import hub_name, name_of_copy
from mindgrpo.data.tokenizer import Tokenizer, copy_tokenizer, write_tokenizer
from mindgrpo.errors import UserError, writing
from mindgrpo.memory.residency import Residency
from mindgrpo.models.decoder_config import CLASSIFIER, read_config
from mindgrpo.models.lora import LoraSettings, adapted_names, adapter_names
from mindgrpo.models.shard import Adapters
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Box
from mindgrpo.weight_sync.execute import Resharder
from mindgrpo.weight_sync.plan import plan_reshard
from mindgrpo.weight_sync.stream import TensorStream, bucket_size, in_model_order, spread
from mindgrpo.weights.expert_files import (
    ExpertNames,
    FileRows,
    file_tensors,
    name_of_expert,
    names_of_experts,
)
from mindgrpo.weights.local_weights import HostTensors, Weights
from mindgrpo.weights.model_files import MAX_SHARD_BYTES, SafetensorsWriter, plan_shards
from mindgrpo.weights.pretrained import encoder_files, open_tensors

if TYPE_CHECKING:
    from mindgrpo.grpo.roles import TrainedRoles

GENERATION_FILE = "generation_config.json"
LANGUAGE_MODEL = "ForCausalLM"
# How images become patches.
PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
ALONE = Mesh(1, 1, 1)


@dataclass(frozen=True)
class ModelExport:
    """Exports the policy of `roles` with the tokenizer, and its adapters."""

    roles: TrainedRoles
    tokenizer: Tokenizer

    def write(self, target: Path) -> None:
        """Exports the complete model with adapters merged in. Collective; the policy has to be on the device."""
        roles, policy, config = self.roles, self.roles.policy, self.roles.plan.config
        source, memory = config.actor_config.load, roles.residency
        weights = policy.weights
        dtype = roles.plan.export_dtype
        if policy.has_masters and policy.adapters is None and dtype == "float32":
            roles.enter("update")
            weights = policy.masters
        export_policy(weights, roles.backend, source, target, memory, policy.adapters, dtype)
        own_template = config.rl_config.chat_template is not None

        def write_own() -> None:
            with writing(target):
                write_tokenizer(self.tokenizer, target, own_template)

        on_first_rank(roles.backend, write_own)

    def write_all(self, target: Path, run: Path) -> None:
        """Exports the complete model to `target`, and to folders of the run's adapters and critic, if there are any."""
        roles = self.roles
        roles.enter("old_logps")
        self.write(target)
        if roles.policy.adapters is not None:
            source = roles.plan.config.actor_config.load
            adapters, memory = roles.policy.adapters, roles.residency
            export_adapters(adapters, roles.backend, source, run / "adapter", memory)
        if roles.critic is not None:
            roles.enter("values")
            source, memory, critic = roles.plan.config.critic_load, roles.residency, roles.critic
            dtype = roles.plan.export_dtype
            if critic.has_masters and dtype == "float32":
                roles.enter("update_critic")
            weights = critic.masters if dtype == "float32" else critic.weights
            export_policy(weights, roles.backend, source, run / "critic", memory, None, dtype, True)


def export_policy(
    weights: Weights,
    backend: Backend,
    source: str,
    target: Path,
    memory: Residency,
    adapters: Adapters | None = None,
    dtype: Dtype = "float32",
    is_classifier: bool = False,
) -> None:
    """Exports the complete model with adapters merged in. Collective; the policy's weights have to be on the device.

    A rank holds one group of tensors in memory at a time (counted by HostPlan). Names and contents of the files depend
    only on the model and `dtype`. `source` is the model directory that the run started from. With `is_classifier`,
    config.json says that the model is a sequence classifier with one label.
    """
    names = experts_of(Path(source))
    encoder = encoder_files(source)
    tensors = {t.name: t for t in file_tensors(in_model_order(weights.layout), names)}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    shards = plan_shards(shapes, MAX_SHARD_BYTES, dtype)
    # By the source's names; the vision encoder has files of its own, behind the others.
    named = {name: name if encoder is None else encoder.name_of(name) for name in shapes}
    of_files = {named[name]: shape for name, shape in shapes.items()}
    files_of = [[named[name] for name in own] for own in shards]
    if encoder is not None:
        of_files |= encoder.shapes
        files_of += plan_shards(encoder.shapes, MAX_SHARD_BYTES, dtype)

    def prepare() -> None:
        with writing(target):
            SafetensorsWriter(target, of_files, MAX_SHARD_BYTES, dtype, shards=files_of)

    on_first_rank(backend, prepare)
    ranks = min(len(shards), backend.world_size)
    if ranks > 1:
        target, seen = ranks_that_see(target, backend)
        ranks = ranks if all(seen) else 1
    files = [[tensors[name] for name in own] for own in shards]
    shared = spread(weights.layout, files, ranks, backend.world_size, weights.dtype)
    size = bucket_size(shared.groups, backend.rank, weights.dtype)
    pool = backend.host_pool(size, dtype=weights.dtype)
    writer = SafetensorsWriter(target, of_files, MAX_SHARD_BYTES, dtype, True, files_of)
    sink = _Files(pool, writer, shared.of(backend.rank), named)

    def finish() -> None:
        with writing(target):
            if encoder is not None:
                for name in encoder.tensors:
                    writer.add(name, encoder.read(name))
            writer.close()
            write_companions(Path(source), target, dtype, is_classifier)

    try:
        stream = TensorStream(weights, adapters, shared.groups, backend, sink)
        with memory.temporary_host("export_copy", stream.host_copies):
            stream.run()
        for error in backend.world.gather_objects(sink.error):
            if error is not None:
                raise error
        on_first_rank(backend, finish)
    except BaseException:
        writer.discard()
        raise


class _Files:
    """A TensorSink that writes the groups' tensors to this rank's files; `rows[i]` are those of its i-th group.

    `named` has the name in files of each tensor.
    """

    def __init__(
        self,
        pool: Pool,
        writer: SafetensorsWriter,
        rows: Iterable[Sequence[FileRows]],
        named: Mapping[str, str],
    ) -> None:
        self.pool, self.writer, self._named = pool, writer, named
        self._rows = iter(rows)
        self.error: UserError | None = None

    @property
    def host_copies(self) -> Sequence[Pool]:
        return [self.pool]

    def take(self, tensors: HostTensors) -> None:
        """Writes a group; stores a failure in `error`, because the other ranks are in the middle of the transfer."""
        if self.error is not None:
            return

        def values(name: str, box: Box) -> np.ndarray:
            own: np.ndarray = tensors.hf_views[name][box.within(tensors.boxes[name]).slices]
            return own

        try:
            for rows in next(self._rows):
                self.writer.add(self._named[rows.tensor.name], rows.made_of(values))
        except UserError as error:
            self.error = error


def experts_of(directory: Path) -> ExpertNames:
    """Returns the format of experts in a model directory's files; without experts, the family's format."""
    model = read_config(directory)
    has_files = model.moe is not None and any(directory.glob("*.safetensors*"))
    names = open_tensors(directory).names if has_files else ()
    return names_of_experts(names, model.model_type)


def export_adapters(
    adapters: Adapters, backend: Backend, source: str, target: Path, memory: Residency
) -> None:
    """Exports only the adapters in PEFT's format: adapter_model.safetensors and adapter_config.json."""
    own = adapters.weights
    full = Weights(own.layout.whole_on(ALONE), backend.rank, backend, "export", on_host_only=True)
    with memory.temporary_host("export_copy", [full.pool]):
        Resharder(plan_reshard(own.layout, full.layout), own, full, backend).run()
        on_first_rank(backend, lambda: _write_adapters(full, adapters.settings, source, target))


def _write_adapters(full: Weights, settings: LoraSettings, source: str, target: Path) -> None:
    views, has_experts = (
        full.arrays.hf_views,
        any(len(box.shape) > 2 for box in full.boxes.values()),
    )
    names: ExpertNames = experts_of(Path(source)) if has_experts else "per_expert"
    sees_images = read_config(source).vision is not None

    def in_memory(name: str) -> str:
        # Modules of a vision-language model have other names than its published files.
        return name.replace("model.", "model.language_model.", 1) if sees_images else name

    pairs: dict[str, list[np.ndarray]] = {}
    for base in adapted_names(views):
        low_rank = [views[name] for name in adapter_names(base)]
        if low_rank[0].ndim == 2:
            pairs[base] = low_rank
            continue
        # Each expert is a module of its own there.
        for index, pair in enumerate(zip(*low_rank, strict=True)):
            pairs[name_of_expert(base, index, names)] = list(pair)
    tensors = {
        f"base_model.model.{in_memory(name)}": np.ascontiguousarray(values)
        for base, pair in pairs.items()
        for name, values in zip(adapter_names(base), pair, strict=True)
    }
    named = hub_name(name_of_copy(source) or "")
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": source if named is None else named.name,
        "revision": None if named is None else named.revision,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": list(dict.fromkeys(base.split(".")[-2] for base in pairs)),
    }
    with writing(target):
        target.mkdir(parents=True)
        (target / "adapter_model.safetensors").write_bytes(save(tensors, {"format": "pt"}))
        (target / "adapter_config.json").write_text(json.dumps(described, indent=2) + "\n")


def write_companions(source: Path, target: Path, dtype: str, is_classifier: bool = False) -> None:
    """Writes a model directory's other files: config.json, generation settings and the tokenizer."""
    config = dict(read_config(source).raw)
    config.pop("dtype", None)
    config["torch_dtype"] = dtype
    # Multi-token prediction layers are not read, and so not written.
    for key in ("num_nextn_predict_layers", "num_mtp_layers"):
        if key in config:
            config[key] = 0
    if is_classifier:
        named = str((config.get("architectures") or [LANGUAGE_MODEL])[0])
        config |= {
            "architectures": [
                named.removesuffix(LANGUAGE_MODEL).removesuffix(CLASSIFIER) + CLASSIFIER
            ],
            "id2label": {"0": "LABEL_0"},
            "label2id": {"LABEL_0": 0},
        }
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if (source / GENERATION_FILE).is_file():
        shutil.copyfile(source / GENERATION_FILE, target / GENERATION_FILE)
    for name in PROCESSOR_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    copy_tokenizer(source, target)
