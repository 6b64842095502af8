"""Experts in files: each layout that there is, read as the same parameters, whole or a rank's part.

test_export.py has the way back. Does not prove what a layer computes with them: test_golden_models.py does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_models import read_golden
from ranks_as_threads import ThreadBackend, World

from mindgrpo.backend.connect import connect
from mindgrpo.backend.dtypes import Dtype
from mindgrpo.backend.targets import SHARED_MEMORY
from mindgrpo.errors import UserError
from mindgrpo.memory.residency import Residency
from mindgrpo.models.decoder_config import decoder_config
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Layout
from mindgrpo.run.model_export import export_policy, write_companions
from mindgrpo.weights.expert_files import ExpertNames, file_tensors, names_of_experts
from mindgrpo.weights.local_weights import Weights
from mindgrpo.weights.model_files import SafetensorsWriter
from mindgrpo.weights.pretrained import (
    check_tensors,
    fill_random,
    load_weights,
    open_tensors,
    open_weights,
)

MODEL: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 20,
    "hidden_size": 8,
    "intermediate_size": 12,
    "moe_intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
    "max_position_embeddings": 32,
}
CONFIG = decoder_config(MODEL, "here")
SPECS = parameter_specs(CONFIG)
LAYER = "model.layers.1."
KINDS: tuple[ExpertNames, ...] = ("per_expert", "mixtral", "fused")


def random_model() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    return {spec.name: rng.standard_normal(spec.shape, np.float32) for spec in SPECS}


def in_files(model: dict[str, np.ndarray], kind: ExpertNames) -> dict[str, np.ndarray]:
    """The tensors that hold `model`, by the names of one layout."""
    tensors = {name: values for name, values in model.items() if ".experts." not in name}
    gate, up, down = (
        model[f"{LAYER}mlp.experts.{name}_proj.weight"] for name in ("gate", "up", "down")
    )
    if kind == "fused":
        both = np.concatenate((gate, up), axis=1)
        return {
            **tensors,
            f"{LAYER}mlp.experts.gate_up_proj": both,
            f"{LAYER}mlp.experts.down_proj": down,
        }
    module, words = f"{LAYER}mlp.experts", ("gate_proj", "up_proj", "down_proj")
    if kind == "mixtral":
        module, words = f"{LAYER}block_sparse_moe.experts", ("w1", "w3", "w2")
        tensors[f"{LAYER}block_sparse_moe.gate.weight"] = tensors.pop(f"{LAYER}mlp.gate.weight")
    for word, stacked in zip(words, (gate, up, down), strict=True):
        # Not in order: 10 comes before 2 in files that are sorted by name.
        for index in (3, 0, 2, 1):
            tensors[f"{module}.{index}.{word}.weight"] = stacked[index]
    return tensors


def written(
    directory: Path, tensors: dict[str, np.ndarray], config: dict[str, Any] = MODEL
) -> Path:
    shapes = {name: values.shape for name, values in tensors.items()}
    with SafetensorsWriter(directory, shapes, 400) as writer:
        for name, values in tensors.items():
            writer.add(name, values)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_of_files_is_read_as_the_same_parameters(
    tmp_path: Path, kind: ExpertNames
) -> None:
    model = random_model()
    tensors = in_files(model, kind)
    files = check_tensors(written(tmp_path, tensors), SPECS)
    assert sorted(files.names) == sorted(model)
    for name, values in model.items():
        assert np.array_equal(files.read(name), values), name
    assert names_of_experts(tensors, "qwen3_moe") == kind


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_files_of_transformers_have_every_parameter_and_so_have_its_gradients(family: str) -> None:
    golden = read_golden(family)
    files = check_tensors(golden.directory, golden.layout.specs)
    shapes = {spec.name: spec.shape for spec in golden.layout.specs}
    assert {name: files.shape(name) for name in files.names} == shapes
    assert {name: values.shape for name, values in golden.gradients.items()} == shapes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mesh", [Mesh(4, 1, ep=2, etp=2), Mesh(4, 1, ep=4), Mesh(1, 3, etp=3)])
def test_a_rank_has_its_part_of_each_layout_and_reads_no_other_expert(
    tmp_path: Path, kind: ExpertNames, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Heads do not matter here.
    specs = tuple(spec for spec in SPECS if ".self_attn." not in spec.name)
    model = random_model()
    kept = {spec.name: model[spec.name] for spec in specs}
    layout = Layout.of(mesh, specs)
    written(tmp_path, in_files(kept, kind))
    opened: list[str] = []
    memmap = np.memmap

    def counting(file: Path, dtype: Any, mode: Any, offset: int, shape: tuple[int, ...]) -> Any:
        opened.append(f"{file} {offset}")
        return memmap(file, dtype, mode, offset, shape)

    for rank in range(mesh.size):
        weights = Weights(layout, rank, ThreadBackend(World(1), 0))
        with monkeypatch.context() as patch:
            opened.clear()
            patch.setattr(np, "memmap", counting)
            load_weights(weights, tmp_path)
        for name, part in weights.arrays.hf_views.items():
            assert np.array_equal(part, kept[name][weights.boxes[name].slices]), name
        experts = weights.boxes[f"{LAYER}mlp.experts.up_proj.weight"].shape[0]
        others = len(specs) - 3
        assert len(opened) == others + (3 if kind == "fused" else 3 * experts)


def test_missing_experts_and_unequal_ones_are_told(tmp_path: Path) -> None:
    tensors = in_files(random_model(), "per_expert")
    name = f"{LAYER}mlp.experts.1.up_proj.weight"
    missing = {key: values for key, values in tensors.items() if key != name}
    with pytest.raises(UserError, match=r"lacks expert 1 of model.layers.1.mlp.experts.up_proj"):
        open_weights(written(tmp_path / "missing", missing))
    shorter = tensors | {name: tensors[name][:-1]}
    with pytest.raises(UserError, match=r"have the shapes \[6, 8\] and \[5, 8\]"):
        open_weights(written(tmp_path / "shorter", shorter))
    last = {key: values for key, values in tensors.items() if ".experts.3." not in key}
    with pytest.raises(UserError, match=r"gate_proj.weight .* has shape \[3, 6, 8\], but config"):
        check_tensors(written(tmp_path / "last", last), SPECS)


def test_random_experts_are_the_same_under_every_layout() -> None:
    whole = Weights(Layout.of(Mesh(1, 1), SPECS), 0, ThreadBackend(World(1), 0))
    fill_random(whole, seed=5)
    experts = whole.arrays.hf_views[f"{LAYER}mlp.experts.down_proj.weight"]
    assert len({one.tobytes() for one in experts}) == 4
    layout = Layout.of(Mesh(4, 1, ep=2, etp=2), SPECS)
    for rank in range(4):
        weights = Weights(layout, rank, ThreadBackend(World(1), 0))
        fill_random(weights, seed=5)
        for name, part in weights.arrays.hf_views.items():
            expected = whole.arrays.hf_views[name][weights.boxes[name].slices]
            assert np.array_equal(part, expected), name


DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    **{key: value for key, value in MODEL.items() if key.endswith(("_size", "_heads", "_layers"))},
    "q_lora_rank": None,
    "kv_lora_rank": 4,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
}


@pytest.fixture
def deepseek(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """A directory of random weights, and its tensors."""
    specs = parameter_specs(decoder_config(DEEPSEEK, "here"))
    rng = np.random.default_rng(3)
    shapes = {t.name: t.shape for t in file_tensors({s.name: s.shape for s in specs}, "per_expert")}
    tensors = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    return written(tmp_path, tensors, DEEPSEEK), tensors


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bias_that_experts_are_chosen_with_keeps_its_bits_in_any_dtype(
    deepseek: tuple[Path, dict[str, np.ndarray]], dtype: Dtype, tmp_path: Path
) -> None:
    directory, tensors = deepseek
    backend = connect(SHARED_MEMORY, {})
    layout = Layout.of(Mesh(1, 1), parameter_specs(decoder_config(DEEPSEEK, "here")))
    weights = Weights(layout, 0, backend, dtype=dtype)
    load_weights(weights, directory)
    target = tmp_path / "hf"
    export_policy(weights, backend, str(directory), target, Residency(), dtype="bfloat16")
    found = open_tensors(target)
    name = f"{LAYER}mlp.gate.e_score_correction_bias"
    assert found.slices[name][0][1].dtype == "F32" and found.shape(name) == (4,)
    assert found.read(name).tobytes() == tensors[name].tobytes()
    assert sorted(found.names) == sorted(tensors)
    router = f"{LAYER}mlp.gate.weight"
    assert found.slices[router][0][1].dtype == "BF16"
    assert found.read(router).tobytes() != tensors[router].tobytes()


def test_layers_that_predict_further_tokens_are_not_read_nor_promised_in_exports(
    deepseek: tuple[Path, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    directory, tensors = deepseek
    further = {
        name.replace(".layers.1.", ".layers.2."): values
        for name, values in tensors.items()
        if ".layers.1." in name
    }
    further["model.layers.2.eh_proj.weight"] = np.zeros((8, 16), np.float32)
    both = tmp_path / "both"
    both.mkdir()
    specs = parameter_specs(decoder_config(DEEPSEEK, "here"))
    promised = DEEPSEEK | {"num_nextn_predict_layers": 1}
    check_tensors(written(both, tensors | further, promised), specs)
    (tmp_path / "hf").mkdir()
    write_companions(both, tmp_path / "hf", "float32")
    exported = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert exported["num_nextn_predict_layers"] == 0
    del further["model.layers.2.eh_proj.weight"]
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(UserError, match="its config.json has no place for"):
        check_tensors(written(other, tensors | further), specs)


def test_fp8_files_are_refused_with_a_remedy(
    deepseek: tuple[Path, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    _, tensors = deepseek
    scales = {f"{LAYER}self_attn.o_proj.weight_scale_inv": np.ones((1, 1), np.float32)}
    directory = tmp_path / "fp8"
    directory.mkdir()
    specs = parameter_specs(decoder_config(DEEPSEEK, "here"))
    with pytest.raises(UserError, match=r"are fp8 with scales.*convert them to bfloat16 first"):
        check_tensors(written(directory, tensors | scales), specs)
