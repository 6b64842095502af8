"""Downloads of models and data sets by name, from a server on this machine that speaks the hub's API.

Does not prove that huggingface.co or modelscope.cn answer as the server does, nor that a run gets what was downloaded
(test_named_sources.py).
"""

from __future__ import annotations

import io
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from hub_server import Hub, checksum_of, serving
from tables import each_row

from mindgrpo.config import config_with, values_by_key
from mindgrpo.data import hub_download
from mindgrpo.data.hub_names import hub_name, name_of_copy
from mindgrpo.data.hubs import Wanted
from mindgrpo.data.sources import FOR_EVALUATION, FOR_TRAINING, open_examples
from mindgrpo.errors import UserError
from mindgrpo.run.named_sources import fetch, fetch_local, with_local_paths, with_names

MODEL_KEY, DATA_KEY = "actor_config.load", "rl_config.dataset_file"
WEIGHTS = bytes(range(256)) * 400
MODEL = {
    "config.json": b'{"model_type": "qwen2"}',
    "generation_config.json": b'{"eos_token_id": 1}',
    "tokenizer.json": b'{"version": "1.0"}',
    "model.safetensors": WEIGHTS,
}
NOT_READ = {
    "README.md": b"# A model",
    "pytorch_model.bin": WEIGHTS[::-1],
    "onnx/model.onnx": b"onnx",
    "figure.png": b"png",
}
CARD = b"""---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: socratic
  data_files: socratic/*
---
"""


def parquet(*questions: str) -> bytes:
    out = io.BytesIO()
    rows = [{"question": question, "answer": "#### 1"} for question in questions]
    pa.parquet.write_table(pa.Table.from_pylist(rows), out)
    return out.getvalue()


DATA = {
    "README.md": CARD,
    "main/train-00000-of-00002.parquet": parquet("a", "b"),
    "main/train-00001-of-00002.parquet": parquet("c"),
    "main/test-00000-of-00001.parquet": parquet("t"),
    "socratic/train-00000-of-00001.parquet": parquet("s"),
}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def hub(cache: Path) -> Iterator[Hub]:
    with serving() as hub:
        os.environ.update(hub.environment(cache))
        hub.put("models", "org/tiny", MODEL | NOT_READ)
        hub.put("datasets", "org/sums", DATA)
        yield hub


def model(text: str = "org/tiny") -> Path:
    return fetch_local(text, "model", MODEL_KEY)


def refused(text: str = "org/tiny", **more: Any) -> str:
    with pytest.raises(UserError) as failed:
        fetch_local(text, more.pop("content", "model"), more.pop("key", MODEL_KEY), **more)
    return str(failed.value)


def questions(folder: Path) -> list[str]:
    return [example.question for example in open_examples(folder)]


def arrived(cache: Path) -> set[str]:
    """The checksums of files in the hub's cache."""
    return {path.name for path in cache.rglob("blobs/*") if path.suffix != ".incomplete"}


def test_only_what_is_read_of_a_model_is_downloaded_and_only_once(hub: Hub, cache: Path) -> None:
    folder = model()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == MODEL
    assert sorted(hub.downloaded) == sorted(MODEL)
    hub.served.clear()
    assert model() == folder and not hub.served
    hub.requests.clear()
    os.environ["HF_HUB_OFFLINE"] = "1"
    assert model() == folder and not hub.requests
    assert (cache / "huggingface" / "hub" / "models--org--tiny" / "refs" / "main").exists()


def test_a_data_set_is_one_split_of_one_configuration(hub: Hub) -> None:
    def read(text: str, choice: Any = FOR_TRAINING) -> list[str]:
        return questions(fetch_local(text, "data", DATA_KEY, choice))

    assert read("org/sums:main") == ["a", "b", "c"]
    shards = [name for name in DATA if name.startswith("main/train")]
    assert sorted(hub.downloaded) == sorted(["README.md", *shards])
    assert read("org/sums:main", FOR_EVALUATION) == ["t"]
    assert read("org/sums:socratic") == ["s"]
    sentence = refused("org/sums", content="data", key=DATA_KEY, split=FOR_TRAINING)
    assert "has the configurations main, socratic; write org/sums:main" in sentence


def test_a_name_is_pinned_to_the_commit_that_was_read(hub: Hub) -> None:
    first = model()
    moved = hub.put("models", "org/tiny", MODEL | {"model.safetensors": WEIGHTS[1:]})
    assert (model() / "model.safetensors").read_bytes() == WEIGHTS[1:]
    pinned = f"org/tiny@{first.parent.name.rpartition('@')[2]}"
    hub.requests.clear()
    assert model(pinned) == first and not hub.requests, "a commit never changes"
    assert moved in str(model(f"org/tiny@{moved}"))
    assert "org/tiny has no revision v2" in refused("org/tiny@v2")


def test_every_key_that_names_files_becomes_a_path_and_is_recorded_as_a_pinned_name(
    hub: Hub,
) -> None:
    values = {
        "actor_config.load": "org/tiny",
        "generate_config.load": "org/tiny",
        "ref_config.load": "org/tiny",
        "rl_config.tokenizer_dir": "org/tiny",
        "rl_config.dataset_file": "org/sums:main",
        "rl_config.eval_dataset_file": "org/sums:main",
    }
    loaded = config_with(None, values)
    fetched = with_local_paths(loaded)
    recorded = values_by_key(with_names(fetched.config))
    for key, text in values.items():
        name = hub_name(str(recorded[key]))
        assert name is not None and name.is_pinned and str(name.without_revision()) == text
        assert Path(str(values_by_key(fetched.config)[key])).is_dir()
    # What is recorded leads to the same paths, without a request.
    hub.requests.clear()
    again = with_local_paths(config_with(None, {key: recorded[key] for key in values}))
    assert again.config == fetched.config and not hub.requests


def test_a_resumed_run_reads_the_commit_that_its_first_start_read(hub: Hub) -> None:
    loaded = config_with(None, {"actor_config.load": "org/tiny"})
    first = with_local_paths(loaded)
    earlier = values_by_key(with_names(first.config))
    hub.put("models", "org/tiny", MODEL | {"model.safetensors": WEIGHTS[1:]})
    assert with_local_paths(loaded, earlier=earlier).config == first.config
    assert with_local_paths(loaded).config != first.config
    # A revision that the user names is that one.
    named = config_with(None, {"actor_config.load": "org/tiny@main"})
    assert with_local_paths(named, earlier=earlier).config != first.config


def test_what_no_run_reads_is_not_fetched(hub: Hub) -> None:
    unused = config_with(None, {"ref_config.load": "org/gone", "rl_config.beta": 0.0})
    assert with_local_paths(unused) == unused and not hub.requests
    with pytest.raises(UserError, match="ref_config.load is org/gone, but there is no such path"):
        with_local_paths(config_with(None, {"ref_config.load": "org/gone", "rl_config.beta": 0.1}))


def test_a_cache_that_another_program_has_filled_is_used_without_network(hub: Hub) -> None:
    fill = (
        "import huggingface_hub as hub; hub.snapshot_download('org/tiny');"
        "hub.snapshot_download('org/sums', repo_type='dataset')"
    )
    run_python(fill)
    os.environ["HF_HUB_OFFLINE"] = "1"
    hub.requests.clear()
    assert {path.name: path.read_bytes() for path in model().iterdir()} == MODEL
    assert questions(fetch_local("org/sums:main", "data", DATA_KEY, FOR_TRAINING)) == [*"abc"]
    assert not hub.requests


def run_python(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@each_row("has_list", [True, False])
def test_a_cache_without_all_files_is_told_by_what_it_lacks(
    tmp_path_factory: pytest.TempPathFactory, has_list: bool
) -> None:
    cache = tmp_path_factory.mktemp("cache")
    with serving() as hub:
        os.environ.update(hub.environment(cache))
        hub.put("datasets", "org/sums", DATA)
        run_python(
            "import huggingface_hub as hub;"
            "hub.snapshot_download('org/sums', repo_type='dataset',"
            "                      allow_patterns=['README.md', 'main/train-00000*'])"
        )
        if not has_list:  # as older versions leave it
            for listed in cache.rglob("trees"):
                shutil.rmtree(listed)
        os.environ["HF_HUB_OFFLINE"] = "1"
        sentence = refused("org/sums:main", content="data", key=DATA_KEY, split=FOR_TRAINING)
    lacking = (
        "lacks main/train-00001-of-00002" if has_list else "lacks 1 of the 2 files main/train-*"
    )
    assert lacking in sentence and "hf download org/sums --repo-type dataset" in sentence


@each_row("is_offline", [True, False])
def test_without_network_one_sentence_says_what_to_download_and_where_to(
    tmp_path_factory: pytest.TempPathFactory, is_offline: bool
) -> None:
    cache = tmp_path_factory.mktemp("cache")
    with serving() as hub:
        closed = hub.url
    os.environ.update(Hub(closed).environment(cache))
    os.environ["HF_HUB_OFFLINE"] = "1" if is_offline else ""
    why = "HF_HUB_OFFLINE is set" if is_offline else f"{closed} does not answer"
    sentence = refused("org/tiny@v1")
    assert sentence.startswith(f"{MODEL_KEY} is org/tiny@v1, but it is not in the cache")
    assert why in sentence
    command = "run 'hf download org/tiny --revision v1 --local-dir tiny' where there is network"
    assert f"{command}, copy tiny here and set {MODEL_KEY} to tiny" in sentence
    sentence = refused("org/sums", content="data", key=DATA_KEY, split=FOR_TRAINING)
    assert "'hf download org/sums --repo-type dataset --local-dir sums'" in sentence


def test_what_launch_sets_for_its_ranks_is_not_the_users_wish_to_stay_offline(hub: Hub) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    assert "HF_HUB_OFFLINE is set" in refused()
    os.environ["MINDGRPO_DEFAULTS"] = "GLOG_v HF_HUB_OFFLINE"
    assert model().is_dir()


def test_a_connection_that_breaks_is_continued_where_it_broke(hub: Hub) -> None:
    large = WEIGHTS * 120  # the library writes 10 MB at a time
    hub.put("models", "org/tiny", MODEL | {"model.safetensors": large})
    hub.breaks_after["model.safetensors"] = len(large) - 1000
    assert (model() / "model.safetensors").read_bytes() == large
    starts = [start for name, start in hub.served if name == "model.safetensors"]
    assert len(starts) == 2 and starts[0] == 0 and starts[1] >= 10**7


def test_a_download_that_was_killed_goes_on_with_what_is_missing(hub: Hub, cache: Path) -> None:
    held = hub.holds["model.safetensors"] = threading.Event()
    code = (
        "from mindgrpo.run.named_sources import fetch_local;"
        "fetch_local('org/tiny', 'model', 'actor_config.load')"
    )
    program = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    while program.poll() is None and len(arrived(cache)) < len(MODEL) - 1:
        time.sleep(0.05)
    program.kill()
    program.wait()
    held.set()
    assert not list(cache.rglob("mindgrpo/hub/*/model")), "half a model has no folder"
    os.environ["HF_HUB_OFFLINE"] = "1"
    assert "the cache lacks model.safetensors" in refused()
    os.environ["HF_HUB_OFFLINE"] = ""
    hub.served.clear()
    assert (model() / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.downloaded == ["model.safetensors"]


@each_row("file", ["model.safetensors", "config.json"])
def test_a_file_that_arrives_with_another_checksum_is_refused_and_fetched_again(
    tmp_path_factory: pytest.TempPathFactory, file: str
) -> None:
    cache = tmp_path_factory.mktemp("cache")
    with serving() as hub:
        os.environ.update(hub.environment(cache))
        hub.put("models", "org/tiny", MODEL)
        hub.damaged.add(file)
        assert f"{file} arrived damaged: its checksum is not the one" in refused()
        assert checksum_of(file, MODEL[file]) not in arrived(cache)
        hub.damaged.clear()
        assert (model() / file).read_bytes() == MODEL[file]


def test_a_download_for_which_there_is_no_room_is_refused_before_it_begins(hub: Hub) -> None:
    hub.sizes["model.safetensors"] = 10**18
    sentence = refused()
    assert "takes 1000000000.000 GB and" in sentence and "set HF_HOME to a folder on" in sentence
    assert "model.safetensors" not in hub.downloaded


def test_a_disk_that_fills_during_a_download_is_told(hub: Hub) -> None:
    # A file may take no more than this, which a program notices as it notices a full disk.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(WEIGHTS) // 2, limits[1]))
    try:
        sentence = refused()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "its download has filled the disk in" in sentence
    assert "free space there, or set HF_HOME to a folder on another disk" in sentence
    assert model().is_dir()


def test_repositories_that_ask_for_consent_or_a_token_are_told_as_such(hub: Hub) -> None:
    hub.gated.add("org/tiny")
    assert "owners ask for consent: accept their terms at" in refused()
    sentence = refused("org/secret")
    assert "no such model on http://127.0.0.1" in sentence and "set HF_TOKEN" in sentence
    hub.tokens.add("hf_mine")
    os.environ["HF_TOKEN"] = "hf_mine"
    assert model().is_dir()


def test_what_no_repository_can_be_called_is_told_as_such(hub: Hub) -> None:
    for text in ("a/b..c", "a/b.git", "a/" + "b" * 99):
        assert "there is no such path here and it is no name on a hub" in refused(text)
    assert not hub.requests


def test_a_cache_that_cannot_be_written_is_told(hub: Hub, cache: Path) -> None:
    cache.mkdir()
    (cache / "mindgrpo").write_text("a file")
    assert f"{cache}/mindgrpo" in refused() and "cannot be written" in refused()


def test_rows_that_the_hub_has_converted_to_parquet_are_read_from_there(hub: Hub) -> None:
    hub.put("datasets", "org/old", {"old.py": b"a script", "README.md": b"# Old"})
    converted = {"main/train/0000.parquet": parquet("x"), "main/test/0000.parquet": parquet("y")}
    hub.put("datasets", "org/old", converted, "refs/convert/parquet")
    wanted = Wanted(DATA_KEY, "org/old", "data", FOR_TRAINING)
    [folder], [again] = fetch([wanted]), fetch([wanted])
    assert questions(folder) == ["x"] and folder == again
    assert str(name_of_copy(folder)).startswith("org/old:main@"), (
        "the configuration is part of what is recorded"
    )
    beginning = {"main/partial-train/0000.parquet": parquet("x")}
    hub.put("datasets", "org/large", {"rows.zip": b"zip"})
    hub.put("datasets", "org/large", beginning, "refs/convert/parquet")
    sentence = refused("org/large", content="data", key=DATA_KEY, split=FOR_TRAINING)
    assert "load it with Hugging Face datasets" in sentence


def test_two_programs_that_fetch_the_same_both_get_it(hub: Hub) -> None:
    with ThreadPoolExecutor(2) as both:
        first, second = both.map(lambda _: model(), range(2))
    assert first == second and {path.name for path in first.iterdir()} == {*MODEL}
    assert not [path for path in first.parent.iterdir() if path.name.startswith(".")]


def test_a_folder_whose_files_have_left_the_cache_is_made_again(hub: Hub, cache: Path) -> None:
    folder = model()
    shutil.rmtree(cache / "huggingface")
    pinned = folder.parent.name.replace("--", "/", 1)
    assert model(pinned) == folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == MODEL


class OfModelScope:
    """Stands in for modelscope_hub.HubApi: lists as its server does, and writes files where it is told to."""

    commits = ("1" * 40, "2" * 40)
    files: Mapping[str, bytes] = MODEL
    is_there = True

    def __init__(self) -> None:
        self.legacy = self

    def list_repo_files(self, name: str, kind: str, revision: str) -> list[dict[str, Any]]:
        if not self.is_there:
            raise ConnectionError("no route to host")
        assert (name, kind) == ("org/tiny", "model") and revision in ("master", *self.commits)
        listed = [
            {"Path": file, "Type": "blob", "Size": len(data), "Sha256": "", "CommittedDate": day}
            for day, (file, data) in enumerate(self.files.items())
        ]
        revisions = [
            {"Revision": self.commits[file == len(listed) - 1]} for file in range(len(listed))
        ]
        return [a | b for a, b in zip(listed, revisions, strict=True)] + [
            {"Path": "d", "Type": "tree"}
        ]

    def download_repo(
        self, name: str, repo_type: str, revision: str, local_dir: Path, file_list: list[Any]
    ) -> None:
        assert revision == self.commits[1]
        for one in file_list:
            local_dir.mkdir(parents=True, exist_ok=True)
            (local_dir / one["Path"]).write_bytes(self.files[one["Path"]])


def test_a_model_of_modelscope_is_pinned_to_the_commit_of_its_newest_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.environ["XDG_CACHE_HOME"] = str(tmp_path)
    wanted = Wanted(MODEL_KEY, "modelscope:org/tiny", "model")
    monkeypatch.setitem(sys.modules, "modelscope_hub", None)
    with pytest.raises(UserError, match=r"pip install 'mindgrpo\[modelscope\]'"):
        hub_download.fetch_one(wanted)
    settings = SimpleNamespace(cache_dir=tmp_path / "ms", endpoint="https://ms")
    package = SimpleNamespace(HubApi=OfModelScope, HubConfig=lambda: settings)
    errors = SimpleNamespace(NotExistError=KeyError)
    monkeypatch.setitem(sys.modules, "modelscope_hub", package)
    monkeypatch.setitem(sys.modules, "modelscope_hub.errors", errors)
    name = hub_download.fetch_one(wanted)
    assert str(name) == f"modelscope:org/tiny@{OfModelScope.commits[1]}"
    [folder] = fetch([Wanted(MODEL_KEY, str(name), "model")])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == MODEL
    monkeypatch.setattr(OfModelScope, "is_there", False)
    assert hub_download.fetch_one(wanted) == name, "without network it is what was downloaded"
    shutil.rmtree(settings.cache_dir / "models" / "org--tiny" / "snapshots")
    with pytest.raises(UserError, match="but the cache does not have all of it"):
        hub_download.fetch_one(wanted)
    other = Wanted(MODEL_KEY, "modelscope:org/none", "model")
    with pytest.raises(UserError, match="'modelscope download --model org/none --local_dir none'"):
        hub_download.fetch_one(other)
