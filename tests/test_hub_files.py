"""Names on a hub, and which files of a repository are read: of data sets the same as Hugging Face `datasets` takes.

Does not prove that anything is downloaded (test_hub_download.py).
"""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest
from tables import each_row

from mindgrpo.data.hub_files import NoRows, data_set_files, model_files
from mindgrpo.data.hub_names import HubName, copy_of, hub_name, name_of_copy
from mindgrpo.data.sources import FOR_EVALUATION, FOR_TRAINING
from mindgrpo.errors import UserError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@each_row(
    "text, name",
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", HubName("huggingface", "Qwen/Qwen2.5-0.5B-Instruct")),
        ("openai/gsm8k:main", HubName("huggingface", "openai/gsm8k", "main")),
        (f"a/b:c@{COMMIT}", HubName("huggingface", "a/b", "c", COMMIT)),
        ("a/b@refs/pr/3", HubName("huggingface", "a/b", None, "refs/pr/3")),
        ("modelscope:Qwen/Qwen3-0.6B", HubName("modelscope", "Qwen/Qwen3-0.6B")),
        # With a revision or a configuration it is no path, whatever folders there are.
        ("here/b@v1", HubName("huggingface", "here/b", None, "v1")),
        ("here/b", None),
        ("here", None),
        ("here/there", None),
        ("gone", None),
        ("gone/train.jsonl", None),
        ("output/run/hf", None),
        ("./a/b", None),
        ("../a/b", None),
        ("~/a/b", None),
        ("/a/b", None),
        ("a/b c", None),
        ("", None),
        ("a/" + "b" * 300, None),
    ],
)
def test_a_name_on_a_hub_is_told_from_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, name: HubName | None
) -> None:
    (tmp_path / "here" / "there").mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(tmp_path)
    assert hub_name(text) == name
    if name is not None:
        assert str(name) == text
        # It may hold a colon or an @, too.
        Path(text).mkdir(parents=True)
        assert hub_name(text) is None, "a path that exists wins"


def test_the_folder_of_a_copy_leads_back_to_its_name() -> None:
    for text in (f"a/b-c--d:main@{COMMIT}", f"modelscope:a/b@{COMMIT}"):
        name = hub_name(text)
        assert name is not None and name.is_pinned
        assert name_of_copy(copy_of(name, "model")) == text
        assert name_of_copy(copy_of(name, "data", ("train",)) / "train-00000-of-00001.csv") == text
    assert name_of_copy("examples/grpo") is None


CONFIGS = """---
license: mit
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: all
  default: true
  data_files:
  - split: train
    path: ["deep/**/a?.jsonl", deep/b/x.jsonl]
- config_name: one
  data_files: flat/*.jsonl
- config_name: inside
  data_dir: nested
---
# A data set
"""
OF_CONFIGS = (
    *("main/train-00000-of-00002.jsonl", "main/train-00001-of-00002.jsonl"),
    *("main/test-00000-of-00001.jsonl", "deep/a1.jsonl", "deep/b/a2.jsonl", "deep/b/x.jsonl"),
    *("deep/b/c/abc.jsonl", "flat/1.jsonl", "flat/2.jsonl", "flat/sub/3.jsonl"),
    *("nested/train.jsonl", "nested/dev.jsonl"),
)
BY_NAME = (
    ("data/train-00000-of-00001-0a1b2c3d4e5f6071.jsonl", "data/train_sft-00000-of-00001.jsonl"),
    ("train.jsonl", "test.jsonl", "valid.jsonl"),
    ("my-train-set.jsonl", "my_test.jsonl", "other.jsonl"),
    ("train/1.jsonl", "train/2.jsonl", "eval/1.jsonl"),
    ("a.jsonl", "b/c.jsonl"),
    ("trainer.jsonl", "latest.jsonl"),
    ("training/a.jsonl", "testing.part/b.jsonl"),
    (".hidden/train.jsonl", "__pycache__/train.jsonl", "train.jsonl"),
    ("data/x_train.jsonl", "x_dev.jsonl", "dataset_infos.json"),
)


def write(folder: Path, names: tuple[str, ...], card: str = "") -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        row = {} if name == "dataset_infos.json" else {"question": "q", "answer": name}
        path.write_text(json.dumps(row) + "\n")
    if card:
        (folder / "README.md").write_text(card)
    return folder


def splits_of_datasets(folder: Path, subset: str | None) -> dict[str, list[str]]:
    builder = pytest.importorskip("datasets").load_dataset_builder(str(folder), subset)
    return {
        str(split): [Path(file).relative_to(folder).as_posix() for file in files]
        for split, files in builder.config.data_files.items()
    }


@each_row(
    "names, card, subset",
    [
        *((OF_CONFIGS, CONFIGS, subset) for subset in ("main", "all", "one", "inside", None)),
        *((names, "", None) for names in BY_NAME),
    ],
)
def test_splits_have_the_files_that_hugging_face_datasets_gives_them(
    tmp_path_factory: pytest.TempPathFactory, names: tuple[str, ...], card: str, subset: str | None
) -> None:
    folder = write(tmp_path_factory.mktemp("set"), names, card)
    expected = splits_of_datasets(folder, subset)
    assert expected
    for split, files in expected.items():
        choice = replace(FOR_TRAINING, name=split)
        own = data_set_files([*names, "README.md"], card, subset, choice, "a/b")
        assert own == (split, sorted(files))


@each_row(
    "names, card, subset, said",
    [
        (OF_CONFIGS, CONFIGS, "mian", "configurations main, all, one, inside and no 'mian'; write"),
        (OF_CONFIGS, CONFIGS.replace("  default: true\n", ""), None, "write a/b:main"),
        (OF_CONFIGS, "", "nothing", "has the configurations deep, flat, main, nested and no 'noth"),
        (("train.jsonl", "test.csv"), "", "x", "has the configurations"),
        (("train.jsonl", "train.csv"), "", None, "has both .jsonl and .csv files for the split tr"),
        (
            ("a.jsonl",),
            "---\nconfigs: [\n---\n",
            None,
            "front matter of a/b's README.md is no YAML",
        ),
        (("test.jsonl", "dev.jsonl"), "", None, "has the splits validation, test; set rl_config"),
    ],
)
def test_a_data_set_whose_files_are_not_clear_is_refused_with_what_there_is(
    names: tuple[str, ...], card: str, subset: str | None, said: str
) -> None:
    with pytest.raises(UserError) as refused:
        data_set_files(names, card, subset, FOR_TRAINING, "a/b")
    assert said in str(refused.value)


def test_rows_in_no_form_that_is_read_are_told_apart() -> None:
    listed = "---\nconfigs:\n- {config_name: x, data_files: rows.txt}\n---\n"
    for names, card in ((("rows.txt",), listed), (("a.zip", "README.md"), "")):
        with pytest.raises(NoRows, match="Hugging Face datasets"):
            data_set_files(names, card, None, FOR_TRAINING, "a/b")


def test_of_two_held_out_splits_none_is_chosen() -> None:
    names = ("train.jsonl", "dev.jsonl", "test.jsonl")
    with pytest.raises(UserError, match="set rl_config.eval_dataset_split to one of them"):
        data_set_files(names, "", None, FOR_EVALUATION, "a/b")


MODEL = ("config.json", "tokenizer.json", "generation_config.json", "chat_template.jinja")
NOT_READ = (
    *("README.md", ".gitattributes", "figure.png", "pytorch_model.bin", "onnx/model.onnx"),
    *("modeling_x.py", "consolidated.safetensors", "original/config.json", "training_args.bin"),
)
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def indexed(folder: Path) -> Path:
    content = {"weight_map": {"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[0]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    return folder


@each_row(
    "weights, read",
    [
        (("model.safetensors",), ("model.safetensors",)),
        (
            ("model.safetensors.index.json", *SHARDS, "model-00003-of-00003.safetensors"),
            ("model.safetensors.index.json", *SHARDS),
        ),
        (("rank_0.ckpt", "other/rank_1.ckpt"), ("rank_0.ckpt",)),
    ],
)
def test_of_a_model_only_the_files_are_chosen_that_are_read(
    tmp_path: Path, weights: tuple[str, ...], read: tuple[str, ...]
) -> None:
    files = model_files([*MODEL, *NOT_READ, *weights], "a/b", indexed(tmp_path))
    assert sorted(files) == sorted([*MODEL, *read])


@each_row(
    "names, said",
    [
        (
            NOT_READ,
            "a/b has no weights in safetensors (it has pytorch_model.bin, training_args.bin)",
        ),
        (
            ("model.safetensors.index.json", SHARDS[0]),
            f"names {SHARDS[1]}, which the repository do",
        ),
    ],
)
def test_a_model_without_weights_that_are_read_is_refused(
    tmp_path: Path, names: tuple[str, ...], said: str
) -> None:
    with pytest.raises(UserError) as refused:
        model_files([*MODEL, *names], "a/b", indexed(tmp_path))
    assert said in str(refused.value)


def test_what_the_loaders_open_in_a_model_directory_is_what_is_downloaded() -> None:
    """Names in the sources of the readers: a file that one of them learns to read has to be downloaded as well."""
    root = Path(__file__).resolve().parents[1] / "mindgrpo"
    readers = ("data/tokenizer_files.py", "models/decoder_config.py", "weights/model_files.py")
    named = {
        word
        for reader in (*readers, "data/tokenizer.py", "run/model_export.py")
        for word in words_of((root / reader).read_text("utf-8"))
        if PurePosixPath(word).suffix in (".json", ".txt", ".jinja", ".model")
        and word[0] not in ".*"
    }
    own = {"adapter_config.json", "manifest.json"}
    known = model_files([*named, "model.safetensors"], "a/b", root)
    first = {"model.safetensors.index.json", "param_name_map.json"}
    assert named - own - first <= {*known}


def words_of(source: str) -> list[str]:
    constants = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
    return [one.value for one in constants if isinstance(one.value, str) and " " not in one.value]
