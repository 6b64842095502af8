"""Hugging Face directories in and out. Does not prove that a model gives the same logits with
the weights, nor how fast large files are read."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from mindgrpo.errors import UserError
from mindgrpo.parallel.sharding import Box
from mindgrpo.weights import model_files
from mindgrpo.weights.model_files import (
    ModelFiles,
    ModelTensor,
    SafetensorsDirectory,
    SafetensorsWriter,
)

INDEX = "model.safetensors.index.json"


def random(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def shapes_of(tensors: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in tensors.items()}


def write(
    directory: Path, tensors: dict[str, Any], shard: int = 1 << 30, dtype: str = "float32"
) -> Path:
    with SafetensorsWriter(directory, shapes_of(tensors), shard, dtype) as writer:
        for name, array in tensors.items():
            writer.add(name, array)
    return directory


def write_raw(file: Path, header: dict[str, Any], data: bytes) -> None:
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def all_bfloat16() -> NDArray[np.float32]:
    """Every finite bfloat16 value, as float32."""
    values: NDArray[np.float32] = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    finite: NDArray[np.float32] = values[np.isfinite(values)]
    return finite


# Reading


def test_slices_equal_those_of_the_library(tmp_path: Path) -> None:
    tensors = {"a": random(7, 5), "b": random(6), "c": random(2, 3, 4)}
    save_file(tensors, tmp_path / "model.safetensors")
    directory = SafetensorsDirectory(tmp_path)
    assert set(directory.names) == set(tensors)
    for name, box in {
        "a": Box((2, 0), (5, 5)),
        "b": Box((1,), (4,)),
        "c": Box((0, 1, 2), (2, 3, 3)),
    }.items():
        assert directory.shape(name) == tensors[name].shape
        part = directory.read(name, box)
        assert part.dtype == np.float32 and part.flags.c_contiguous and part.flags.writeable
        assert np.array_equal(part, tensors[name][box.slices])
        assert np.array_equal(directory.read(name), tensors[name])


def test_odd_places_in_the_file_can_be_read(tmp_path: Path) -> None:
    scalar, values = np.float32(2.5), random(5)
    header = {
        "pad": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "scalar": {"dtype": "F32", "shape": [], "data_offsets": [3, 7]},
        "empty": {"dtype": "F32", "shape": [0, 4], "data_offsets": [7, 7]},
        "values": {"dtype": "F32", "shape": [5], "data_offsets": [7, 27]},
    }
    data = b"xyz" + scalar.tobytes() + values.tobytes()
    write_raw(tmp_path / "model.safetensors", header, data)
    directory = SafetensorsDirectory(tmp_path)
    assert directory.read("scalar", Box((), ())) == scalar
    assert directory.read("empty").shape == (0, 4)
    assert np.array_equal(directory.read("values"), values)
    assert directory.read("values", Box((5,), (5,))).shape == (0,)
    with pytest.raises(UserError, match=r"pad .* dtype U8"):
        directory.read("pad")


def test_every_bfloat16_and_float16_is_read_exactly(tmp_path: Path) -> None:
    brains = all_bfloat16()
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    data = (brains.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    header = {
        "brains": {"dtype": "BF16", "shape": [len(brains)], "data_offsets": [0, len(data)]},
        "halves": {
            "dtype": "F16",
            "shape": [1 << 16],
            "data_offsets": [len(data), len(data) + (2 << 16)],
        },
    }
    write_raw(tmp_path / "model.safetensors", header, data + halves.tobytes())
    directory = SafetensorsDirectory(tmp_path)
    assert directory.read("brains").tobytes() == brains.tobytes()
    assert np.array_equal(directory.read("halves"), halves.astype(np.float32), equal_nan=True)


def test_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere does not exist"):
        SafetensorsDirectory(tmp_path / "nowhere")


def test_directory_without_safetensors_names_what_it_has_instead(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds neither"):
        SafetensorsDirectory(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(UserError, match=r"pytorch_model\.bin: convert"):
        SafetensorsDirectory(tmp_path)


def test_a_file_cut_off_anywhere_is_refused_at_opening(tmp_path: Path) -> None:
    file = write(tmp_path, {"a": random(3, 2), "b": random(2)}) / "model.safetensors"
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"model\.safetensors .* damaged"):
            SafetensorsDirectory(tmp_path)
    file.write_bytes(whole + b"x")
    with pytest.raises(UserError, match="damaged"):
        SafetensorsDirectory(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}},
        {"a": {"dtype": "F32", "shape": [1]}},
        {"a": 3},
        ["a"],
    ],
)
def test_a_header_that_makes_no_sense_is_refused(tmp_path: Path, header: Any) -> None:
    write_raw(tmp_path / "model.safetensors", header, b"1234")
    with pytest.raises(UserError, match="damaged"):
        SafetensorsDirectory(tmp_path)


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    directory = SafetensorsDirectory(write(tmp_path, {"a": random(3)}))
    for ask in (directory.shape, directory.read):
        with pytest.raises(UserError, match=r"no tensor lm_head\.weight"):
            ask("lm_head.weight")


@pytest.mark.parametrize("stop", [(4, 2), (3,), (3, 2, 1)])
def test_a_box_beyond_the_tensor_is_refused_with_both_shapes(
    tmp_path: Path, stop: tuple[int, ...]
) -> None:
    directory = SafetensorsDirectory(write(tmp_path, {"a": random(3, 2)}))
    with pytest.raises(UserError, match=r"shape \[3, 2\], which does not reach"):
        directory.read("a", Box((0,) * len(stop), stop))


# The index


def sharded(directory: Path) -> Path:
    return write(directory, {name: random(4, seed=i) for i, name in enumerate("abc")}, shard=16)


def edit_index(directory: Path, **weight_map: str) -> None:
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"].update(weight_map)
    (directory / INDEX).write_text(json.dumps(index))


def test_index_naming_a_missing_shard_is_refused(tmp_path: Path) -> None:
    (sharded(tmp_path) / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(UserError, match=r"model-00002-of-00003\.safetensors, which is missing"):
        SafetensorsDirectory(tmp_path)


@pytest.mark.parametrize("shard", ["../other.safetensors", "x/../../other.safetensors", "ABS"])
def test_a_shard_outside_the_directory_is_refused(tmp_path: Path, shard: str) -> None:
    model = sharded(tmp_path / "model")
    save_file({"a": random(4)}, tmp_path / "other.safetensors")
    edit_index(model, a=shard.replace("ABS", str(tmp_path / "other.safetensors")))
    with pytest.raises(UserError, match="outside its directory"):
        SafetensorsDirectory(model)


def test_linked_shards_are_read_as_hugging_face_caches_them(tmp_path: Path) -> None:
    model, blobs = sharded(tmp_path / "model"), tmp_path / "blobs"
    blobs.mkdir()
    for shard in list(model.glob("*.safetensors")):
        shard.rename(blobs / shard.name)
        shard.symlink_to(blobs / shard.name)
    assert np.array_equal(SafetensorsDirectory(model).read("b"), random(4, seed=1))


def test_index_that_promises_what_a_shard_lacks_is_refused(tmp_path: Path) -> None:
    edit_index(sharded(tmp_path), d="model-00001-of-00003.safetensors")
    with pytest.raises(UserError, match="says that d is in model-00001-of-00003"):
        SafetensorsDirectory(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}'])
def test_a_broken_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(UserError, match="index of safetensors"):
        SafetensorsDirectory(tmp_path)


# Writing


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_library_reads_what_is_written(tmp_path: Path, dtype: str) -> None:
    tensors = {"b": random(4, 3), "a": random(5), "t": random(4, 6).T, "s": random()}
    file = write(tmp_path, tensors, dtype=dtype) / "model.safetensors"
    loaded = load_file(file)
    assert set(loaded) == set(tensors)
    for name, array in tensors.items():
        assert loaded[name].dtype == np.dtype(dtype)
        assert np.array_equal(loaded[name], array.astype(dtype))
    with safe_open(file, "np") as opened:
        assert opened.metadata() == {"format": "pt"}
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_order_shards_and_index_follow_the_order_of_adding(tmp_path: Path) -> None:
    tensors = {f"{name}": random(4, seed=i) for i, name in enumerate("zyxwv")}
    tensors["huge"] = random(100)
    write(tmp_path, tensors, shard=40)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == 5 * 16 + 400
    assert list(index["weight_map"]) == list(tensors)
    shards = [f"model-{i:05d}-of-00004.safetensors" for i in range(1, 5)]
    assert list(index["weight_map"].values()) == [shards[i] for i in (0, 0, 1, 1, 2, 3)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*shards, INDEX]
    directory = SafetensorsDirectory(tmp_path)
    assert directory.names == tuple(tensors)
    for name, array in tensors.items():
        assert np.array_equal(directory.read(name), array)


def test_bfloat16_is_rounded_to_nearest_with_ties_to_even(tmp_path: Path) -> None:
    exact = np.sort(all_bfloat16())
    # Between two neighbours: just below the middle, the middle itself, and just above it.
    middle = ((exact[:-1].astype(np.float64) + exact[1:]) / 2).astype(np.float32)
    middle = middle[np.abs(middle) > 1e-37]
    probes = np.concatenate([
        exact, middle, np.nextafter(middle, -np.inf), np.nextafter(middle, np.inf), random(10_000)
    ])  # fmt: skip
    write(tmp_path, {"a": probes}, dtype="bfloat16")
    read = SafetensorsDirectory(tmp_path).read("a").astype(np.float64)
    right = np.clip(np.searchsorted(exact, probes), 1, len(exact) - 1)
    low, high = exact[right - 1].astype(np.float64), exact[right].astype(np.float64)
    below, above = probes - low, high - probes
    even_low = (exact[right - 1].view(np.uint32) >> 16) % 2 == 0
    expected = np.where((below < above) | ((below == above) & even_low), low, high)
    assert np.array_equal(read, expected)


def test_bfloat16_is_labelled_and_not_numbers_stay(tmp_path: Path) -> None:
    odd = np.array([np.nan, np.inf, -np.inf, -0.0], np.float32)
    odd = np.concatenate([odd, np.array([0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)])
    file = write(tmp_path, {"a": odd}, dtype="bfloat16") / "model.safetensors"
    with safe_open(file, "np") as opened:
        label = opened.get_slice("a")
        assert (label.get_dtype(), label.get_shape()) == ("BF16", [6])
    read = SafetensorsDirectory(tmp_path).read("a")
    assert np.array_equal(read, odd, equal_nan=True) and np.signbit(read[3])


@pytest.mark.parametrize("dtype, value", [("float16", 7e4), ("bfloat16", 3.4e38)])
def test_values_too_large_for_the_dtype_are_refused(
    tmp_path: Path, dtype: str, value: float
) -> None:
    with pytest.raises(UserError, match=f"big has values up to .* {dtype} cannot express"):
        write(tmp_path, {"big": np.array([1.0, -value], np.float32)}, dtype=dtype)
    assert list(tmp_path.iterdir()) == []


SHAPES = dict.fromkeys("abc", (4,))


def test_nothing_has_its_final_name_before_the_end(tmp_path: Path) -> None:
    writer = SafetensorsWriter(tmp_path, SHAPES, 16)
    for name in SHAPES:
        writer.add(name, random(4))
        assert not list(tmp_path.glob("model*"))
    files = writer.close()
    assert [file.name for file in files][-1] == INDEX and all(f.is_file() for f in files)


def test_a_tensor_is_on_disk_when_the_next_is_added(tmp_path: Path) -> None:
    """In blocks, whatever the order of its elements; nothing is kept in memory."""
    shapes = {"wide": (40, 3), "turned": (30, 50), "last": (2,)}
    wide, turned = random(40, 3), random(50, 30).T
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_files, "BLOCK_BYTES", 400)
        writer = SafetensorsWriter(tmp_path, shapes)
        writer.add("wide", wide)
        writer.add("turned", turned)
        writer.add("last", random(2))
        writer.close()
    directory = SafetensorsDirectory(tmp_path)
    assert np.array_equal(directory.read("wide"), wide)
    assert np.array_equal(directory.read("turned"), turned)


def test_several_writers_make_the_files_of_one(tmp_path: Path) -> None:
    tensors = {name: random(4, seed=i) for i, name in enumerate("abcde")}
    write(tmp_path / "one", tensors, shard=32)
    SafetensorsWriter(tmp_path / "two", shapes_of(tensors), 32)
    first, second = (
        SafetensorsWriter(tmp_path / "two", shapes_of(tensors), 32, joins=True) for _ in range(2)
    )
    for name in "abcde":
        (second if name in "cd" else first).add(name, tensors[name])
    first.close()
    contents = [
        {path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()}
        for folder in ("one", "two")
    ]
    assert contents[0] == contents[1] and len(contents[0]) == 4


def test_an_exception_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(KeyError), SafetensorsWriter(tmp_path, SHAPES, 16) as writer:
        for name in "ab":
            writer.add(name, random(4))
        raise KeyError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("old", ["model.safetensors", "model-00001-of-00002.safetensors", INDEX])
def test_a_model_that_is_there_is_not_written_over(tmp_path: Path, old: str) -> None:
    (tmp_path / old).touch()
    with pytest.raises(UserError, match=f"already holds {old}"):
        SafetensorsWriter(tmp_path, SHAPES, 16)


def test_wrong_use_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'int8' is not one of float32"):
        SafetensorsWriter(tmp_path, SHAPES, 16, "int8")
    with pytest.raises(UserError, match="max_shard_bytes is 0"):
        SafetensorsWriter(tmp_path, SHAPES, 0)
    with pytest.raises(ValueError, match="no tensor"):
        SafetensorsWriter(tmp_path, {})
    writer = SafetensorsWriter(tmp_path, {"a": (2,), "b": (2,)}, 16)
    with pytest.raises(TypeError, match="float64"):
        writer.add("a", np.zeros(2))
    with pytest.raises(TypeError, match=r"\[3\]"):
        writer.add("a", random(3))
    writer.add("a", random(2))
    with pytest.raises(ValueError, match="before"):
        writer.add("a", random(2))
    with pytest.raises(ValueError, match="1 tensors were not added, first b"):
        writer.close()


# Parameters that are made of several tensors


def test_a_parameter_is_read_from_slices_of_files(tmp_path: Path) -> None:
    """Experts' matrices, one by one in the files, as one stacked parameter; only what is asked for is read."""
    experts = [random(6, 4, seed=i) for i in range(3)]
    write(tmp_path, {f"experts.{i}.weight": expert for i, expert in enumerate(experts)})
    files = SafetensorsDirectory(tmp_path).slices
    read: list[int] = []

    def counted(i: int) -> ModelTensor:
        ((_, tensor),) = files[f"experts.{i}.weight"]

        def values() -> NDArray[Any]:
            read.append(i)
            return tensor.values()

        return tensor._replace(values=values)

    stacked = ModelFiles(
        tmp_path,
        {"experts": [(Box((i, 0, 0), (i + 1, 6, 4)), counted(i)) for i in range(3)]},
    )
    assert stacked.shape("experts") == (3, 6, 4)
    assert np.array_equal(stacked.read("experts"), np.stack(experts))
    read.clear()
    part = stacked.read("experts", Box((1, 2, 0), (2, 5, 3)))
    assert np.array_equal(part, experts[1][None, 2:5, :3]) and read == [1]
    with pytest.raises(UserError, match=r"shape \[3, 6, 4\], which does not reach"):
        stacked.read("experts", Box((1, 2, 0), (4, 5, 3)))
