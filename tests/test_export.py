"""The exported directory: every tensor bit for bit, its dtype, its shards, and what lies beside the weights.

Does not prove that another library loads it (scripts/bench/compare_with_transformers.py shows that where torch is
installed), nor that several ranks gather their shares rightly.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import checkpoint_model
import numpy as np
import psutil
import pytest
from data_sets import change, copy_tokenizer
from golden_models import FAMILIES, FOLDER, loaded_weights, read_golden
from ranks_as_threads import ThreadBackend, World, run
from safetensors import safe_open

from mindgrpo.backend.connect import connect
from mindgrpo.backend.contract import Backend
from mindgrpo.backend.dtypes import Dtype
from mindgrpo.backend.targets import SHARED_MEMORY
from mindgrpo.checkpoint.format import StoredTokenizer
from mindgrpo.cli.verbs import main
from mindgrpo.config import load_config
from mindgrpo.errors import CannotWrite
from mindgrpo.memory.residency import Residency
from mindgrpo.models.decoder_config import decoder_config, read_config
from mindgrpo.models.parameters import num_parameters, parameter_specs
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Layout
from mindgrpo.plan import memory as plan_memory
from mindgrpo.plan.memory import HostPlan
from mindgrpo.plan.run_plan import plan_run
from mindgrpo.run import model_export
from mindgrpo.run.model_export import ALONE, export_policy
from mindgrpo.weight_sync import stream
from mindgrpo.weights.expert_files import ExpertNames
from mindgrpo.weights.local_weights import Weights
from mindgrpo.weights.model_files import SafetensorsDirectory, SafetensorsWriter
from mindgrpo.weights.pretrained import fill_random, open_weights

EXAMPLE = Path(__file__).resolve().parents[1] / "examples/grpo/tiny_arithmetic/grpo_config.yaml"


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    alone = connect(SHARED_MEMORY, {})
    yield alone
    alone.close()


def tensors(directory: Path) -> dict[str, np.ndarray]:
    files = SafetensorsDirectory(directory)
    return {name: files.read(name) for name in files.names}


def assert_same_bits(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert sorted(found) == sorted(expected)
    for name, array in expected.items():
        assert found[name].shape == array.shape, name
        assert found[name].tobytes() == array.tobytes(), name


def dtypes(directory: Path) -> set[str]:
    found = set()
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "np") as file:
            found |= {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    return found


def rounded_to_bfloat16(array: np.ndarray) -> np.ndarray:
    """To nearest, ties to even, by another way than the writer's: of the two neighbours, the nearer."""
    low = (array.view(np.uint32) & 0xFFFF0000).view(np.float32)
    high = (low.view(np.uint32) + 0x10000).view(np.float32)
    exact = array.astype(np.float64)
    below, above = np.abs(exact - low), np.abs(high - exact)
    odd = (low.view(np.uint32) >> 16) % 2 == 1
    return np.where((above < below) | ((above == below) & odd), high, low)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exported_policy_is_its_source_bit_for_bit(
    backend: Backend, family: str, tmp_path: Path
) -> None:
    golden = read_golden(family)
    weights = loaded_weights(golden, backend)
    export_policy(weights, backend, str(golden.directory), tmp_path / "hf", Residency())
    assert_same_bits(tensors(tmp_path / "hf"), tensors(golden.directory))
    assert dtypes(tmp_path / "hf") == {"F32"}
    # The weights are still there after what was gathered has been given up.
    files = open_weights(golden.directory)
    before = {name: files.read(name) for name in files.names}
    assert_same_bits(dict(weights.arrays.hf_views), before)


def test_an_export_has_the_sources_configuration_in_the_dtype_written(
    backend: Backend, tmp_path: Path
) -> None:
    golden = read_golden("qwen3")
    weights = loaded_weights(golden, backend)
    export_policy(weights, backend, str(golden.directory), tmp_path / "hf", Residency())
    before = json.loads((golden.directory / "config.json").read_text())
    after = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert before.pop("dtype") == "bfloat16" and after.pop("torch_dtype") == "float32"
    assert after == before


def test_export_takes_what_was_trained_and_not_the_source(backend: Backend, tmp_path: Path) -> None:
    golden = read_golden("llama")
    weights = loaded_weights(golden, backend)
    for part in weights.arrays.hf_views.values():
        part += np.float32(0.125)
    export_policy(weights, backend, str(golden.directory), tmp_path / "hf", Residency())
    expected = {name: a + np.float32(0.125) for name, a in tensors(golden.directory).items()}
    assert_same_bits(tensors(tmp_path / "hf"), expected)


WIDE = {
    "model_type": "qwen2",
    "vocab_size": 32768,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 512,
}
MIB = 1 << 20


def most_memory_of(call: Callable[[], object]) -> int:
    """Return the peak of this process in bytes while `call` runs, above what it has before."""
    Path("/proc/self/clear_refs").write_text("5")
    before = psutil.Process().memory_info().rss
    call()
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines["VmHWM"].split()[0]) - before


def export_measured(directory: Path, shard: int, dtype: Dtype) -> tuple[float, int, int]:
    """Export a model of shape `WIDE`; return what the plan says that it takes, what it took, and the model's bytes."""
    for module in (model_export, plan_memory):
        module.MAX_SHARD_BYTES = shard
    (directory / "config.json").write_text(json.dumps(WIDE))
    asked = "auto" if dtype == "bfloat16" else dtype
    words = ["--context.compute_dtype", "bfloat16", "--actor_config.save_dtype", asked]
    config = load_config(EXAMPLE, words).config
    plan = plan_run(config, decoder_config(WIDE, "here"), None)
    written = [line for line in HostPlan(plan).lines() if "when it is written" in line]
    number, unit = written[0].split()[:2]
    planned = float(number) * {"MiB": MIB, "GiB": 1024 * MIB}[unit]
    backend = connect(SHARED_MEMORY, {})
    golden = read_golden("qwen3")
    # Loads what an export loads, which is not counted.
    first = loaded_weights(golden, backend)
    export_policy(first, backend, str(golden.directory), directory / "first", Residency())
    layout = plan.train.whole_on(ALONE)
    policy = Weights(layout, 0, backend, "policy", shared=True, dtype=dtype)
    fill_random(policy, seed=1)
    measured = most_memory_of(
        lambda: export_policy(
            policy, backend, str(directory), directory / "hf", Residency(), dtype=dtype
        )
    )
    exact = {name: v.astype(np.float32) for name, v in policy.arrays.hf_views.items()}
    assert_same_bits(tensors(directory / "hf"), exact)
    assert dtypes(directory / "hf") == {"BF16" if dtype == "bfloat16" else "F32"}
    backend.close()
    return planned, measured, policy.num_bytes


@pytest.mark.parametrize(
    ("dtype", "shard"), [("bfloat16", model_export.MAX_SHARD_BYTES), ("float32", 16 * MIB)]
)
def test_an_export_takes_the_memory_that_the_plan_says(
    tmp_path: Path, shard: int, dtype: Dtype
) -> None:
    """Of a run in bfloat16, whose optimizer's weights are float32 and are what is written if that is asked.

    In a process of its own: memory that other tests have freed would serve, and not be counted.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        planned, measured, whole = process.submit(export_measured, tmp_path, shard, dtype).result(
            100
        )
    assert whole > (75 if dtype == "bfloat16" else 150) * MIB
    assert 0.9 * planned < measured < 1.1 * planned
    if shard < whole:
        assert measured < whole / 2, "no rank has the whole model in memory"


MANY = WIDE | {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96}
# 24 KB an expert's matrix in float32: some fit in a group, and files and groups begin in the middle of a parameter.
WITH_MANY_EXPERTS = MANY | {
    "model_type": "mixtral",
    "num_hidden_layers": 4,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
}


FIRST_EXPERT = {
    "mixtral": "model.layers.0.block_sparse_moe.experts.0.w1.weight",
    "fused": "model.layers.0.mlp.experts.gate_up_proj",
}


def random_policy(directory: Path) -> dict[str, np.ndarray]:
    """What one rank has of the model that ranks export."""
    layout = Layout.of(Mesh(1, 1), parameter_specs(read_config(directory)))
    policy = Weights(layout, 0, ThreadBackend(World(1), 0))
    fill_random(policy, seed=1)
    return dict(policy.arrays.hf_views)


def exported_by_ranks(ranks: ThreadBackend, target: Path, mesh: Mesh) -> None:
    config = read_config(target.parent)
    layout = Layout.of(mesh, parameter_specs(config))
    policy = Weights(layout, ranks.rank, ranks, shared=True)
    fill_random(policy, seed=1)
    export_policy(policy, ranks, str(target.parent), target, Residency())


@pytest.mark.parametrize(
    ("mesh", "kind"),
    [
        (Mesh(1, 1, 1), None),
        (Mesh(2, 1, 2), None),
        (Mesh(1, 2, 2), None),
        (Mesh(4, 1, ep=2, etp=2), "mixtral"),
        (Mesh(2, 1, 2, ep=2), "fused"),
    ],
)
def test_ranks_share_the_files_out_and_write_what_one_would(
    tmp_path: Path, mesh: Mesh, kind: ExpertNames | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(WITH_MANY_EXPERTS if kind else MANY))
    if kind is not None:
        monkeypatch.setattr(model_export, "experts_of", lambda _: kind)
    monkeypatch.setattr(model_export, "MAX_SHARD_BYTES", 150_000)
    monkeypatch.setattr(stream, "GROUP_BYTES", 40_000)
    add = SafetensorsWriter.add
    by_thread: dict[int, set[str]] = {}

    def counted(writer: SafetensorsWriter, name: str, array: np.ndarray) -> None:
        by_thread.setdefault(threading.get_ident(), set()).add(writer.weight_map[name])
        add(writer, name, array)

    monkeypatch.setattr(SafetensorsWriter, "add", counted)
    run(1, exported_by_ranks, tmp_path / "one", Mesh(1, 1))
    (alone,) = by_thread.values()
    by_thread.clear()
    num_ranks = mesh.size
    run(num_ranks, exported_by_ranks, tmp_path / "many", mesh)
    contents = [
        {path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()}
        for folder in ("one", "many")
    ]
    assert contents[0] == contents[1] and len(alone) > 5
    assert len(by_thread) == num_ranks and sum(map(len, by_thread.values())) == len(alone)
    assert max(map(len, by_thread.values())) - min(map(len, by_thread.values())) <= 1
    if kind is not None:
        files, policy = open_weights(tmp_path / "many"), random_policy(tmp_path)
        assert {*tensors(tmp_path / "many")} > {FIRST_EXPERT[kind]}
        assert_same_bits({name: files.read(name) for name in files.names}, policy)


def test_an_error_of_one_rank_is_raised_on_all_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MANY))
    monkeypatch.setattr(model_export, "MAX_SHARD_BYTES", 150_000)
    add = SafetensorsWriter.add

    def full(writer: SafetensorsWriter, name: str, array: np.ndarray) -> None:
        if name == "lm_head.weight":
            raise CannotWrite(f"{name} cannot be written")
        add(writer, name, array)

    monkeypatch.setattr(SafetensorsWriter, "add", full)

    def attempt(ranks: ThreadBackend) -> str:
        with pytest.raises(CannotWrite) as refused:
            exported_by_ranks(ranks, tmp_path / "hf", Mesh(1, 1, 2))
        return str(refused.value)

    assert run(2, attempt) == ["lm_head.weight cannot be written"] * 2
    assert list((tmp_path / "hf").iterdir()) == []


def test_the_export_command_rounds_to_bfloat16_and_the_round_trip_changes_nothing_more(
    tmp_path: Path,
) -> None:
    source, brain, back = FOLDER / "llama", tmp_path / "brain", tmp_path / "back"
    command = [sys.executable, "-m", "mindgrpo", "export", "--from", str(source)]
    command += ["--output", str(brain), "--dtype", "bfloat16"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == sorted(str(path) for path in brain.iterdir())
    assert dtypes(brain) == {"BF16"}
    assert json.loads((brain / "config.json").read_text())["torch_dtype"] == "bfloat16"
    expected = {name: rounded_to_bfloat16(array) for name, array in tensors(source).items()}
    assert_same_bits(tensors(brain), expected)
    assert main(["export", "--from", str(brain), "--output", str(back)]) == 0
    assert dtypes(back) == {"F32"}
    assert_same_bits(tensors(back), expected)
    assert num_parameters(read_config(back)) == num_parameters(read_config(source))


@pytest.mark.parametrize("family", ["qwen2", "mixtral"])
def test_shards_of_the_asked_size_hold_the_same_tensors(tmp_path: Path, family: str) -> None:
    source, target = FOLDER / family, tmp_path / "shards"
    words = ["--from", str(source), "--output", str(target), "--max_shard_bytes", "16000"]
    assert main(["export", *words]) == 0
    assert len(list(target.glob("model-*.safetensors"))) > 2
    assert_same_bits(tensors(target), tensors(source))


def test_a_folder_that_holds_something_is_not_written_into(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["export", "--from", str(FOLDER / "qwen2"), "--output", str(tmp_path)]) == 2
    assert "exists and is not an empty folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_checkpoint_is_exported_with_the_tokenizer_of_its_run_wherever_that_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a run with a template and a tokenizer of its own, whose files have been moved since."""
    shutil.copytree(FOLDER / "llama", tmp_path / "model")
    tokenizer = tmp_path / "tokenizer"
    copy_tokenizer(tokenizer)
    change(tokenizer / "tokenizer_config.json", chat_template="another")
    (tokenizer / "tokenizer.model").write_text("older")
    monkeypatch.chdir(tmp_path)
    checkpoint = tmp_path / "checkpoints" / "step_000003"
    keys = {"actor_config.load": "model", "rl_config.tokenizer_dir": "tokenizer"}
    keys["rl_config.chat_template"] = "gone.jinja"
    stored = StoredTokenizer(
        directory="tokenizer", template="of the run", is_chosen=True, turn_end=None, stop_ids=[0]
    )
    identity = checkpoint_model.IDENTITY.model_copy(update={"config": keys, "tokenizer": stored})
    monkeypatch.setattr(checkpoint_model, "IDENTITY", identity)
    monkeypatch.setattr(checkpoint_model, "ROLES", ("policy",))
    raw = read_config(tmp_path / "model").raw
    run(1, checkpoint_model.save, tmp_path, (1, 1, 1), False, 3, raw)
    tokenizer.rename(tmp_path / "moved")
    words = ["export", "--from", str(checkpoint), "--output", str(tmp_path / "hf")]
    assert main(words) == 2
    assert "'tokenizer', which is not there now; name it with --token" in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()
    assert main([*words, "--tokenizer_dir", "moved"]) == 0
    assert (tmp_path / "hf" / "chat_template.jinja").read_text() == "of the run"
    assert (tmp_path / "hf" / "tokenizer.model").read_text() == "older"
    settings = json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == "of the run"
