"""Model directories under MindFormers' names and in MindSpore's .ckpt files, written by MindSpore itself.

Does not prove that MindFormers computes with them what we do: test_mindformers_oracle.py does.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from golden_models import FOLDER
from mindspore.train.checkpoint_pb2 import Checkpoint
from test_mindformers_oracle import mindformers_name

from mindgrpo.cli.verbs import main
from mindgrpo.errors import UserError
from mindgrpo.models.decoder_config import read_config
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.parallel.sharding import Box
from mindgrpo.weights.mindspore_files import FAMILIES, to_huggingface, to_mindformers
from mindgrpo.weights.model_files import SafetensorsDirectory
from mindgrpo.weights.pretrained import check_tensors, open_weights


def assert_same_model(directory: Path, family: str) -> None:
    specs = parameter_specs(read_config(directory))
    files, whole = check_tensors(directory, specs), open_weights(FOLDER / family)
    for spec in specs:
        assert files.read(spec.name).tobytes() == whole.read(spec.name).tobytes(), spec.name
        stop = tuple(max(1, length // 2) for length in spec.shape)
        part = files.read(spec.name, Box((0,) * len(stop), stop))
        assert part.tobytes() == whole.read(spec.name)[Box((0,) * len(stop), stop).slices].tobytes()


def parameters(family: str) -> dict[str, np.ndarray]:
    files = SafetensorsDirectory(FOLDER / family)
    return {mindformers_name(name): files.read(name) for name in files.names}


def save_ckpt(path: Path, tensors: dict[str, np.ndarray], **options: object) -> None:
    described = [{"name": name, "data": ms.Tensor(array)} for name, array in tensors.items()]
    ms.save_checkpoint(described, str(path), **options)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    shutil.copy(FOLDER / "qwen2" / "config.json", tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("family", FAMILIES)
def test_names_are_mindformers_and_lead_back(family: str) -> None:
    for spec in parameter_specs(read_config(FOLDER / family)):
        assert to_huggingface(to_mindformers(spec.name)) == spec.name
        if family in ("qwen2", "llama"):
            assert to_mindformers(spec.name) == mindformers_name(spec.name)


@pytest.mark.parametrize("family", ["olmo2", "gemma3_text"])
def test_a_family_that_mindformers_does_not_have_is_not_given_its_names(
    tmp_path: Path, family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--output", str(tmp_path / "mf"), "--format", "mindformers"]
    assert main(["export", "--from", str(FOLDER / family), *words]) == 2
    assert f"no names for the tensors of '{family}'" in capsys.readouterr().err
    assert not (tmp_path / "mf").exists()


@pytest.mark.parametrize("max_bytes", ["1000000000", "20000"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_under_mindformers_names_is_read_as_the_same_model(
    tmp_path: Path, family: str, max_bytes: str
) -> None:
    words = ["--format", "mindformers", "--max_shard_bytes", max_bytes]
    target = tmp_path / "mf"
    assert main(["export", "--from", str(FOLDER / family), "--output", str(target), *words]) == 0
    names = json.loads((target / "param_name_map.json").read_text())
    assert "model.tok_embeddings.embedding_weight" in names
    assert {target / file for file in names.values()} == set(target.glob("*.safetensors"))
    assert_same_model(target, family)
    back = tmp_path / "hf"
    assert main(["export", "--from", str(target), "--output", str(back)]) == 0
    assert_same_model(back, family)
    # MindFormers' directories have no index of Hugging Face's.
    for index in target.glob("*.index.json"):
        index.unlink()
        (target / "a.safetensors").unlink(missing_ok=True)
    assert_same_model(target, family)


# What MindFormers' own scripts write: research/mixtral/convert_weight.py, and research/qwen2_moe's with use_gmm.
PLACES = {"mixtral": "feed_forward.", "qwen3_moe": "feed_forward.routed_experts."}


def of_experts(family: str, is_gmm: bool) -> dict[str, np.ndarray]:
    files, place = open_weights(FOLDER / family), PLACES[family]
    words = {"gate": "router.dense"}
    projections = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    words |= {f"experts.{name}": f"ffn.{word}" for name, word in projections.items()}
    tensors = {}
    for name in files.names:
        values, theirs = files.read(name), mindformers_name(name)
        for ours, word in words.items():
            theirs = theirs.replace(f"mlp.{ours}.weight", f"{place}{word}.weight")
        theirs = theirs.replace("self_attn.", "attention.")
        tensors[theirs] = values.swapaxes(1, 2) if values.ndim == 3 and is_gmm else values
    return tensors


@pytest.mark.parametrize("is_gmm", [False, True], ids=["out by in", "in by out"])
@pytest.mark.parametrize("family", PLACES)
def test_experts_under_mindformers_names_are_read_as_the_same_model(
    tmp_path: Path, family: str, is_gmm: bool
) -> None:
    shutil.copy(FOLDER / family / "config.json", tmp_path)
    tensors = of_experts(family, is_gmm)
    assert f"model.layers.0.{PLACES[family]}ffn.w1.weight" in tensors
    save_ckpt(tmp_path / "model.ckpt", tensors)
    assert_same_model(tmp_path, family)


def test_square_matrices_of_experts_are_refused_as_nothing_tells_their_order(
    tmp_path: Path,
) -> None:
    shutil.copy(FOLDER / "mixtral" / "config.json", tmp_path)
    tensors = of_experts("mixtral", False)
    tensors["model.layers.1.feed_forward.ffn.w2.weight"] = np.zeros((4, 32, 32), np.float32)
    save_ckpt(tmp_path / "model.ckpt", tensors)
    with pytest.raises(UserError, match=r"layers.1.mlp.experts.down_proj.* does not tell whether"):
        open_weights(tmp_path)


def test_a_ckpt_file_of_mindspore_is_read_as_the_same_model(directory: Path) -> None:
    beside = {
        "adam_m.model.norm_out.weight": np.ones(3, np.float32),
        "global_step": np.array(7, np.int32),
    }
    save_ckpt(directory / "model.ckpt", parameters("qwen2") | beside)
    assert_same_model(directory, "qwen2")


def test_ckpt_files_with_a_checksum_in_several_files_and_in_slices(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mindspore.train import serialization

    monkeypatch.setattr(serialization, "SLICE_SIZE", 2)  # KiB
    tensors = parameters("qwen2")
    half = len(tensors) // 2
    save_ckpt(directory / "a.ckpt", dict(list(tensors.items())[:half]), crc_check=True)
    save_ckpt(directory / "b.ckpt", dict(list(tensors.items())[half:]))
    stored = Checkpoint()
    stored.ParseFromString((directory / "b.ckpt").read_bytes())
    names = [value.tag for value in stored.value]
    assert len(names) > len(set(names))
    assert_same_model(directory, "qwen2")


def test_half_precision_and_bfloat16_come_as_float32(directory: Path) -> None:
    values = np.random.default_rng(1).standard_normal((3, 5)).astype(np.float32)
    for kind in (ms.float16, ms.bfloat16):
        tensor = ms.Tensor(values).astype(kind)
        ms.save_checkpoint([{"name": "a.weight", "data": tensor}], str(directory / "x.ckpt"))
        read = open_weights(directory).read("a.weight")
        assert read.dtype == np.float32
        assert np.array_equal(read, tensor.astype(ms.float32).asnumpy())


def test_a_truncated_or_changed_ckpt_ends_in_one_sentence(directory: Path) -> None:
    path = directory / "model.ckpt"
    save_ckpt(path, parameters("qwen2"))
    whole = path.read_bytes()
    specs = parameter_specs(read_config(directory))
    draw = random.Random(4)

    def refused() -> str:
        try:
            files = check_tensors(directory, specs)
            for name in files.names:
                files.read(name)
        except UserError as error:
            assert "\n" not in str(error)
            return str(error)
        return ""

    for length in [0, 1, 7, *(draw.randrange(len(whole)) for _ in range(20))]:
        path.write_bytes(whole[:length])
        assert "model.ckpt is damaged" in refused() or "lacks" in refused()
    for _ in range(60):
        start = draw.randrange(len(whole))
        path.write_bytes(whole[:start] + draw.randbytes(9) + whole[start + 9 :])
        refused()  # what lies in a tensor's values cannot be noticed: such a file has no digest
    path.write_bytes(b"\x80\x04\x95 a pickle")
    assert "its fields are not those of the format, or encrypted" in refused()
    path.write_bytes(b"")
    assert "it holds no tensors" in refused()


def test_an_encrypted_ckpt_is_refused(directory: Path) -> None:
    tensors = {"a.weight": np.zeros((4, 4), np.float32)}
    try:
        save_ckpt(directory / "model.ckpt", tensors, enc_key=b"0123456789abcdef")
    except Exception as error:  # built without it, or the library is missing
        pytest.skip(f"MindSpore does not encrypt here: {error}")
    with pytest.raises(UserError, match=r"model\.ckpt is damaged or not a .ckpt file of MindSpore"):
        open_weights(directory)


def test_matrices_side_by_side_are_refused(directory: Path) -> None:
    tensors = parameters("qwen2")
    save_ckpt(
        directory / "model.ckpt",
        tensors | {"model.layers.0.attention.w_qkv.weight": np.zeros((2, 2), np.float32)},
    )
    with pytest.raises(UserError, match="w_qkv.weight, which is several matrices in one"):
        open_weights(directory)


def test_a_tensor_in_two_ckpt_files_is_refused(directory: Path) -> None:
    for name in "ab":
        save_ckpt(directory / f"{name}.ckpt", {"x.weight": np.zeros((2, 2), np.float32)})
    with pytest.raises(UserError, match=r"x.weight is in .*b.ckpt and in .*a.ckpt"):
        open_weights(directory)
