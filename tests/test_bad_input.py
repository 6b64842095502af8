"""What a fuzzer found, class by class, and a small share of the fuzzer itself.

Does not prove that a sentence helps, nor that the whole run (scripts/faults/fuzz.py, 10,000 cases) finds nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from mindgrpo.cli.arguments import Arguments
from mindgrpo.config import load_config
from mindgrpo.config.yaml_file import read_yaml
from mindgrpo.data import mindrecord
from mindgrpo.data.examples import single_turn
from mindgrpo.data.mindrecord import write_mindrecord
from mindgrpo.data.sources import FOR_TRAINING, files_of, open_examples
from mindgrpo.errors import UserError, whole_number
from mindgrpo.models.decoder_config import decoder_config, read_config
from mindgrpo.monitor.host_memory import HostMemory
from mindgrpo.plan.run_plan import plan_run
from mindgrpo.run import host_limits as capacity
from mindgrpo.run import machine_checks as doctor
from mindgrpo.run.machine_checks import wrong_variables
from mindgrpo.settings.section import memory_bytes
from mindgrpo.strict_files import (
    NotJson,
    is_inside,
    parse_json,
    read_text,
)
from mindgrpo.weights.model_files import SafetensorsDirectory

ROOT = Path(__file__).resolve().parent.parent
SHAPES = {
    "model_type": "qwen2",
    "vocab_size": 384,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}


def test_a_share_of_the_fuzzer_finds_nothing() -> None:
    command = [sys.executable, "scripts/faults/fuzz.py", "--cases", "40", "--seed", "7"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "GLOG_v": "3"}
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    told = json.loads(ended.stdout.splitlines()[-1])
    assert (told["cases"], told["failed"]) == (40, 0)
    assert told["refused"] > 20 and len(told["by_kind"]) > 10


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), ("08", 8), ("9" * 18, 10**18 - 1), ("9" * 5000, None), ("-1", None), ("2.0", None)],
)
def test_a_word_is_a_whole_number_or_none(text: str, number: int | None) -> None:
    assert whole_number(text) == number


def test_whatever_is_quoted_a_sentence_is_one_line_that_can_be_printed() -> None:
    said = str(UserError("a\nb\x00c\ud800d\u202e" + "x" * 1_000_000))
    assert len(said) < 2100 and said.isprintable()
    said.encode()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'{"a": 1, "a": 2}', "stands twice"),
        (b'"\\ud800"', "half a character"),
        (b"[" * 200 + b"]" * 200, "deep"),
        (b"[" * 200_000, "deep"),
        (b"\xff", "UTF-8"),
        (b"1" * 5000, "digits"),
        (b'{"a"', "line 1"),
    ],
)
def test_json_that_programs_do_not_write_is_refused_in_words(data: bytes, words: str) -> None:
    with pytest.raises(NotJson, match=words):
        parse_json(data)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")
    for read in (lambda path: open_examples(path), lambda path: read_text(path, "it", "go")):
        with pytest.raises(UserError, match="no regular file"):
            read(tmp_path / "rows.jsonl")


BOMB = "a: &a {x: 1, y: 2}\n" + "".join(
    f"{k}: &{k} {{p: *{j}, q: *{j}, r: *{j}, s: *{j}}}\n"
    for j, k in zip("abcdefghijkl", "bcdefghijklm", strict=True)
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BOMB, "sections are more than 6 deep"),
        ("a: &a\n  b: *a\n", "within themselves"),
        ("a: &a [*a]\n", "recursive"),
        ("a: " + "[" * 5000, "nested too deep"),
        ("a: !!python/object/apply:os.system [ls]\n", "could not determine a constructor"),
        ("a: !!int x\n", r"invalid literal .*line 1"),
        ('a: "\\UFFFFFFFF"\n', "not valid YAML"),
        ("a: 0x" + "f" * 3000, "beyond 64 bits"),
        ('a: "\\ud800"\n', r"surrogates not allowed .*line 1"),
        ("a: " + "x" * 300_000, "bytes"),
    ],
)
def test_yaml_that_gives_no_values_is_refused_in_words(
    tmp_path: Path, text: str, words: str
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=words):
        read_yaml(path)


@pytest.mark.parametrize(
    "name", ["../x", "/x", "a/../../x", "a\\..\\..\\x", "x\0", "x" * 300, "x\n"]
)
def test_names_that_leave_their_folder_are_refused_everywhere(tmp_path: Path, name: str) -> None:
    assert not is_inside(name)
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(UserError, match="no names of files"):
        files_of(tmp_path, FOR_TRAINING)
    index = {"weight_map": {"a": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="outside its directory"):
        SafetensorsDirectory(tmp_path)


def stored(path: Path, entries: object, data: bytes = bytes(16)) -> Path:
    text = json.dumps(entries).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


@pytest.mark.parametrize(
    "place",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, "8"]},
        {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [-2, -1], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2**63, 2], "data_offsets": [0, 8]},
        {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        [],
    ],
)
def test_places_in_a_safetensors_header_that_make_no_sense_are_refused(
    tmp_path: Path, place: object
) -> None:
    other = {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}
    with pytest.raises(UserError, match="damaged or not a safetensors file"):
        SafetensorsDirectory(stored(tmp_path, {"a": place, "b": other}))


def test_a_dtype_that_cannot_be_trained_is_told_before_weights_are_read(tmp_path: Path) -> None:
    place = {"dtype": "F8_E4M3", "shape": [16], "data_offsets": [0, 16]}
    files = SafetensorsDirectory(stored(tmp_path, {"a": place}))
    with pytest.raises(UserError, match="has the dtype F8_E4M3"):
        files.check_dtype("a")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("hidden_size", True),
        ("head_dim", "8"),
        ("rope_theta", "x"),
        ("rope_scaling", [1]),
        ("rope_parameters", 3),
        ("rms_norm_eps", float("nan")),
        ("num_key_value_heads", -1),
        ("tie_word_embeddings", "no"),
        ("max_position_embeddings", None),
    ],
)
def test_dimensions_that_no_model_has_are_refused(key: str, value: object) -> None:
    with pytest.raises(UserError, match=key.partition("_p")[0]):
        decoder_config({**SHAPES, key: value}, "config.json")


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("record") / "a.mindrecord"
    write_mindrecord(path, [single_turn(f"{n} é?", str(n), {"k": n}) for n in range(3)], "")
    return path


def test_rows_of_a_mindrecord_come_back_as_they_were_written(tmp_path: Path) -> None:
    from mindspore.mindrecord import FileWriter

    path = tmp_path / "b.mindrecord"
    writer = FileWriter(str(path), shard_num=1)
    kinds = {"ids": {"type": "int32", "shape": [-1]}, "long": {"type": "int64", "shape": [-1]}}
    writer.add_schema(kinds | {"f": {"type": "float64"}, "t": {"type": "string"}}, "x")
    draw = np.random.default_rng(0)
    rows = [
        {
            "ids": draw.integers(-70000, 70000, n % 7 + 1).astype(np.int32) >> (n % 17),
            "long": draw.integers(-(2**60), 2**60, 5) >> (n % 60),
            "f": n / 3,
            "t": "é" * n,
        }
        for n in range(60)
    ]
    writer.write_raw_data(rows)
    writer.commit()
    plain = [{**row, "ids": row["ids"].tolist(), "long": row["long"].tolist()} for row in rows]
    assert mindrecord.read_rows(path) == plain


@pytest.mark.parametrize("start", [0, 3, 20, 400, (48 << 20) + 9, (48 << 20) + 12, -30])
def test_a_damaged_mindrecord_is_a_sentence_and_not_the_end_of_the_process(
    record: Path, tmp_path: Path, start: int
) -> None:
    damaged = tmp_path / "a.mindrecord"
    data = bytearray(record.read_bytes())
    data[start : start + 4] = b"\xc1\xff\xff\xff"
    damaged.write_bytes(data)
    shutil.copy(f"{record}.db", f"{damaged}.db")
    with pytest.raises(UserError, match="cannot be read as a MindRecord|no JSON|messages"):
        list(open_examples(damaged))


def test_a_mindrecord_needs_its_index_and_its_name(record: Path, tmp_path: Path) -> None:
    alone = shutil.copy(record, tmp_path / "a.mindrecord")
    with pytest.raises(UserError, match=r"a.mindrecord.db is not exists.*copy it again together"):
        open_examples(alone)
    for suffix in ("", ".db"):
        shutil.copy(f"{record}{suffix}", f"{tmp_path / 'b.mindrecord'}{suffix}")
    with pytest.raises(UserError, match=r"it was renamed from a.mindrecord"):
        open_examples(tmp_path / "b.mindrecord")


def test_what_ends_mindspores_reader_ends_no_run(
    record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mindrecord, "_send_rows", lambda *_: os.abort())
    with pytest.raises(UserError, match="MindSpore's reader was killed by signal 6"):
        open_examples(record)
    monkeypatch.setattr(mindrecord, "_send_rows", lambda *_: time.sleep(3600))
    monkeypatch.setattr(mindrecord, "SECONDS_PER_MESSAGE", 0.2)
    with pytest.raises(UserError, match="no row came for 0.2 s"):
        open_examples(record)


def test_flags_of_small_programs_are_refused_in_one_sentence() -> None:
    parser = Arguments(prog="it")
    parser.add_argument("--limit", type=int)
    with pytest.raises(UserError, match="invalid int value: 'x'; see it --help"):
        parser.parse_args(["--limit", "x"])


def test_a_size_of_five_thousand_digits_is_no_size() -> None:
    with pytest.raises(ValueError, match="58GB"):
        memory_bytes("9" * 5000)


def test_variables_that_cannot_be_used_are_told_by_name(tmp_path: Path) -> None:
    given = {"OMP_NUM_THREADS": "abc", "MINDGRPO_FORK": "no", "TMPDIR": str(tmp_path / "gone")}
    wrong = wrong_variables(given)
    assert [told.split(" is ")[0] for told in wrong] == [
        "OMP_NUM_THREADS",
        "MINDGRPO_FORK",
        "TMPDIR",
    ]
    assert "TMPDIR" in wrong_variables({"TMPDIR": "[" * 5000})[0]
    assert wrong_variables({"OMP_NUM_THREADS": "4,2", "MINDGRPO_FORK": "0", "TMPDIR": ""}) == []


def test_preflight_and_doctor_look_at_the_same_things(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {finding.what for finding in doctor.needs()} <= {one.what for one in doctor.findings()}
    monkeypatch.setenv("OMP_NUM_THREADS", "abc")
    assert any("OMP_NUM_THREADS" in one.what for one in doctor.findings() if one.level == "error")


def test_too_few_file_descriptors_are_told_with_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (128, 4096))
    found = capacity.descriptors(8)
    assert found.level == "error" and "ulimit -n 288" in found.remedy


def test_a_check_and_doctor_read_the_memory_that_is_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = HostMemory(3 * 2**20, 4 * 2**20)
    for module in (capacity, doctor):
        monkeypatch.setattr(module, "host_memory", lambda: small)
    example = ROOT / "examples/grpo/tiny_arithmetic/grpo_config.yaml"
    monkeypatch.chdir(ROOT)
    config = load_config(example).config
    found = capacity.memory(plan_run(config, read_config(config.actor_config.load), 8), 8)
    assert found.level == "error" and "has 4.0 MiB, 1.0 MiB of it free" in found.what
    said = [str(finding) for finding in doctor._capacity()]
    assert [line for line in said if "memory 4.0 MiB, 1.0 MiB available" in line], said
