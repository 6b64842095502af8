"""Cells and folders as other programs write them: times, long texts, rows in memory, where a data set's files are.

Does NOT prove that a reward can use what it gets.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from data_sets import questions, read_rows, write_lines, write_parquet

from mindgrpo.cli.verbs import main
from mindgrpo.config import load_config
from mindgrpo.data.row_files import TableCache, TableFile, read_csv
from mindgrpo.data.sources import open_examples
from mindgrpo.errors import UserError
from mindgrpo.run.trl_arguments import with_arguments

MOMENT = 1_715_000_000_123_456_789
ODD = {
    "at": pa.array([MOMENT, None], pa.timestamp("ns")),
    "utc": pa.array([MOMENT, None], pa.timestamp("ns", "UTC")),
    "took": pa.array([1_000_000_001, None], pa.duration("ns")),
    "clock": pa.array([1_000_000_001, None], pa.time64("ns")),
    "deep": pa.array([[{"x": MOMENT}], None], pa.list_(pa.struct({"x": pa.timestamp("ns")}))),
    "day": pa.array([0, None], pa.date32()),
    "whole": pa.array([1_000, None], pa.duration("ms")),
}
AS_TEXT = {
    "at": "2024-05-06T12:53:20.123456789",
    "took": "0:00:01.000000001",
    "clock": "00:00:01.000000001",
    "deep": [{"x": "2024-05-06T12:53:20.123456789"}],
    "day": "1970-01-01",
    "whole": "0:00:01",
}
WITHOUT_PANDAS = """
import json, sys
sys.modules["pandas"] = None
from pathlib import Path
from mindgrpo.data.row_files import TableCache, TableFile
print(json.dumps([row for _, row in TableFile(Path(sys.argv[1]), None, TableCache()).read(0, 2)]))
"""


def odd_table(path: Path) -> Path:
    columns = {"question": pa.array(["q", "r"]), "answer": pa.array(["1", "2"]), **ODD}
    pa.parquet.write_table(pa.table(columns), path)
    return path


def test_times_that_python_has_no_type_for_are_text_with_and_without_pandas(tmp_path: Path) -> None:
    path = odd_table(tmp_path / "odd.parquet")
    with_pandas = [row for _, row in TableFile(path, None, TableCache()).read(0, 2)]
    words = [sys.executable, "-c", WITHOUT_PANDAS, str(path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    for rows in (with_pandas, json.loads(done.stdout)):
        assert {name: rows[0][name] for name in AS_TEXT} == AS_TEXT
        assert rows[0]["utc"].startswith("2024-05-06T12:53:20.123456789")
        assert [rows[1][name] for name in ODD] == [None] * len(ODD)


def test_a_cell_that_cannot_be_read_is_named_with_file_row_and_column(tmp_path: Path) -> None:
    text = pa.array([b"fine", b"\xff"], pa.binary()).view(pa.string())
    path = tmp_path / "bad.parquet"
    pa.parquet.write_table(
        pa.table({"question": pa.array(["q", "r"]), "answer": pa.array(["1", "2"]), "note": text}),
        path,
    )
    said = (
        f"{path} row 2: column 'note' holds a value that cannot be read .*rl_config.dataset_columns"
    )
    with pytest.raises(UserError, match=said):
        read_rows(path)


IN_MEMORY = {
    "question": "q",
    "answer": np.int64(4),
    "at": datetime.datetime(2024, 5, 6, 7, 8),
    "day": datetime.date(2024, 5, 6),
    "took": datetime.timedelta(seconds=1),
    "price": Decimal("1.50"),
    "scores": np.array([1.5, 2.5]),
    "flag": np.bool_(True),
    "deep": {"list": [np.float32(0.5), (1, 2)]},
    "moments": np.array(["2024-05-06T07:08:00.000000001", "NaT"], "M8[ns]"),
}


def kept(rows: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    loaded: Any = with_arguments(None, None, rows, None)
    return Path(loaded.config.rl_config.dataset_file)


def test_rows_in_memory_are_read_as_those_of_parquet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = pa.array(["2024-05-06T07:08:00.000000001", None])
    plain = {**IN_MEMORY, "scores": [1.5, 2.5], "flag": True, "deep": {"list": [0.5, 1, 2]}}
    plain["moments"] = moments.to_pylist()
    own = {**plain, "deep": {"list": [np.float32(0.5), 1, 2]}}
    in_file = read_rows(write_parquet(tmp_path / "rows.parquet", [plain]))
    assert read_rows(kept([own], tmp_path, monkeypatch)) == in_file
    tuples = read_rows(kept([IN_MEMORY], tmp_path, monkeypatch))
    assert tuples[0]["deep"] == {"list": [0.5, [1, 2]]}
    assert tuples[0]["answer"] == "4" and tuples[0]["at"] == "2024-05-06T07:08:00"


def test_what_pandas_has_for_missing_values_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame(
        {
            "question": ["q", "r"],
            "answer": [4.0, None],
            "at": [pd.Timestamp("2024-05-06"), pd.NaT],
            "level": pd.array([1, pd.NA], dtype="Int64"),
        }
    )
    first, second = open_examples(kept(frame.to_dict("records"), tmp_path, monkeypatch))
    assert (first.answer, first.columns) == ("4.0", {"at": "2024-05-06T00:00:00", "level": 1})
    assert second.unanswered and second.columns == {"at": None, "level": None}


def test_what_cannot_be_kept_of_rows_in_memory_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "train_dataset: row 1: column 'sound' holds bytes, .* leave such columns out"
    with pytest.raises(UserError, match=said):
        kept([*questions(1), {"question": "q", "sound": b"x"}], tmp_path, monkeypatch)


def test_csv_fields_may_be_long_in_score_as_in_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import csv

    before = csv.field_size_limit(131_072)
    try:
        path = tmp_path / "long.csv"
        path.write_text(f'question,answer\n"{"q" * 200_000}",4\n')
        assert len(read_csv(path)[0]["question"]) == 200_000
        assert main(["score", "--reward", "accuracy_reward", "--data", str(path)]) == 0
        assert csv.field_size_limit() == 131_072
    finally:
        csv.field_size_limit(before)
    assert "accuracy_reward: mean 1.0000 of 1" in capsys.readouterr().out


def test_the_root_of_a_download_is_answered_with_the_folders_that_hold_its_files(
    tmp_path: Path,
) -> None:
    for name in ("main", "socratic"):
        (tmp_path / "gsm8k" / name).mkdir(parents=True)
        write_parquet(tmp_path / "gsm8k" / name / "train-00000-of-00001.parquet", questions(2))
    root = tmp_path / "gsm8k"
    with pytest.raises(UserError, match=f"give {root}/main or {root}/socratic"):
        open_examples(root)
    snapshot = tmp_path / "datasets--openai--gsm8k" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    write_parquet(snapshot / "train.parquet", questions(2))
    with pytest.raises(UserError, match=f"give {snapshot}$"):
        open_examples(snapshot.parent.parent)
    assert len(open_examples(root / "main")) == 2


def test_a_folder_of_json_is_a_data_set(tmp_path: Path) -> None:
    (tmp_path / "train-0.json").write_text(json.dumps(questions(2)))
    (tmp_path / "train-1.json").write_text(json.dumps({"data": questions(1)}))
    (tmp_path / "test.json").write_text(json.dumps(questions(1)))
    (tmp_path / "dataset_infos.json").write_text("{}")
    assert len(open_examples(tmp_path)) == 3
    assert open_examples(tmp_path)[2].where == f"{tmp_path}/train-1.json row 1"
    write_lines(tmp_path / "train.jsonl", *questions(5))
    assert len(open_examples(tmp_path)) == 5  # descriptions of other files are JSON, too


def test_a_tilde_is_the_home_folder_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_lines(tmp_path / "rows.jsonl", *questions(1))
    (tmp_path / "my.yaml").write_text(
        "rl_config:\n  dataset_file: ~/rows.jsonl\n  tools: [~/tools.py:add]\n"
        "actor_config:\n  load: ~/model\n"
    )
    config = load_config("~/my.yaml", ["--output_dir=~/out"]).config
    assert config.rl_config.dataset_file == f"{tmp_path}/rows.jsonl"
    assert (
        config.actor_config.load == f"{tmp_path}/model" and config.output_dir == f"{tmp_path}/out"
    )
    assert config.rl_config.tools == [f"{tmp_path}/tools.py:add"]
    assert main(["score", "--reward", "accuracy_reward", "--data=~/rows.jsonl"]) == 0
    assert "of 1; no failures" in capsys.readouterr().out
    in_code: Any = with_arguments({"rl_config": {}}, "~/model", "~/rows.jsonl", None)
    assert in_code.config.rl_config.dataset_file == f"{tmp_path}/rows.jsonl"


def test_a_path_that_leads_nowhere_is_named_as_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UserError, match=f"the data set train.jsonl does not exist .{tmp_path}/train"
    ):
        open_examples("train.jsonl")
    with pytest.raises(UserError, match=f"'my.yaml' cannot be read: No such file .{tmp_path}/my"):
        load_config("my.yaml")


def test_a_damaged_line_has_one_number(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "q", "answer": "1"}\n{"question": "q", \n')
    with pytest.raises(UserError, match=f"{path}:2 is not a line of JSON: ") as caught:
        read_rows(path)
    assert "(column 18)" in str(caught.value) and "line 1" not in str(caught.value)
