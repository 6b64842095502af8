"""Data sets of every kind as examples: which files, which rows, which keys, and what is refused.

Does NOT prove: that files of other writers are read, apart from those of pyarrow and Hugging Face datasets.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from data_sets import (
    flat,
    questions,
    read_rows,
    save_to_disk,
    write_arrow,
    write_lines,
    write_parquet,
)

from mindgrpo.data import row_files
from mindgrpo.data.examples import RowForm
from mindgrpo.data.row_files import TableCache, TableFile
from mindgrpo.data.sources import FOR_EVALUATION, FOR_TRAINING, Examples, open_examples
from mindgrpo.errors import UserError

ROWS = [
    {
        "question": f"Q{n}?",
        "answer": f"so\n#### {n}",
        "level": n,
        "tags": ["a", None],
        "deep": {"x": n},
    }
    for n in range(8)
]
WANTED = [
    {"question": f"Q{n}?", "answer": str(n), "full_answer": f"so\n#### {n}"}
    | {"level": n, "tags": ["a", None], "deep": {"x": n}}
    for n in range(8)
]


def written(folder: Path, kind: str) -> Path:
    if kind == "jsonl":
        return write_lines(folder / "rows.jsonl", *ROWS)
    if kind == "parquet":
        return write_parquet(folder / "rows.parquet", ROWS)
    if kind == "arrow":
        return write_arrow(folder / "rows.arrow", ROWS)
    if kind == "saved":
        return save_to_disk(folder / "saved", ROWS)
    if kind == "shards":
        (folder / "hub" / "data").mkdir(parents=True)
        write_parquet(folder / "hub" / "data" / "train-00001-of-00002-0a.parquet", ROWS[5:])
        write_parquet(folder / "hub" / "data" / "train-00000-of-00002-ff.parquet", ROWS[:5])
        (folder / "hub" / "README.md").write_text("# data")
        return folder / "hub"
    path = folder / "rows.json"
    text = {"json": ROWS, "data": {"version": 1, "data": ROWS}}.get(kind)
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    path.write_text(lines if text is None else json.dumps(text, indent=1))
    return path


KINDS = ("jsonl", "json", "data", "lines", "parquet", "arrow", "saved", "shards")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_data_set_gives_the_same_records(kind: str, tmp_path: Path) -> None:
    examples = open_examples(written(tmp_path, kind))
    assert len(examples) == 8
    assert [flat(example) for example in examples] == WANTED
    assert [flat(examples[place]) for place in (7, 0, 4)] == [WANTED[place] for place in (7, 0, 4)]
    assert [flat(example) for example in examples.read(2, 6)] == WANTED[2:6]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_names_the_place_of_a_row(kind: str, tmp_path: Path) -> None:
    path = written(tmp_path, kind)
    where = open_examples(path)[6].where
    if kind in ("jsonl", "lines"):
        assert where == f"{path}:7"
    elif kind == "saved":
        assert where == f"{path}/data-00001-of-00002.arrow row 3"
    elif kind == "shards":
        assert where == f"{path}/data/train-00001-of-00002-0a.parquet row 2"
    else:
        assert where == f"{path} row 7"


def test_directories_are_those_that_datasets_saves(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    saved = datasets.Dataset.from_list(ROWS)
    saved.save_to_disk(str(tmp_path / "one"), num_shards=3)
    assert read_rows(tmp_path / "one") == WANTED
    split = datasets.DatasetDict({"train": saved.select([4, 2]), "test": saved.select(range(3))})
    split.save_to_disk(str(tmp_path / "two"))
    assert [row["level"] for row in read_rows(tmp_path / "two")] == [4, 2]
    test = open_examples(tmp_path / "two", choice=FOR_EVALUATION)
    assert [example.columns["level"] for example in test] == [0, 1, 2]
    saved.to_parquet(str(tmp_path / "rows.parquet"))
    assert read_rows(tmp_path / "rows.parquet") == WANTED


def splits(folder: Path, *names: str) -> Path:
    folder.mkdir()
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(names)}))
    for number, name in enumerate(names):
        save_to_disk(folder / name, questions(number + 1), files=1)
    return folder


def count(path: Path, evaluation: bool = False, split: str | None = None) -> int:
    choice = replace(FOR_EVALUATION if evaluation else FOR_TRAINING, name=split)
    return len(open_examples(path, choice=choice))


def test_the_split_is_chosen_or_asked_for(tmp_path: Path) -> None:
    three = splits(tmp_path / "three", "train", "validation", "test")
    assert (count(three), count(three, split="test")) == (1, 3)
    with pytest.raises(UserError, match="set rl_config.eval_dataset_split to one of them"):
        count(three, evaluation=True)
    assert count(three, evaluation=True, split="validation") == 2
    with pytest.raises(UserError, match="splits train, validation, test and no 'dev'"):
        count(three, split="dev")
    two = splits(tmp_path / "two", "train", "test")
    assert count(two, evaluation=True) == 2
    odd = splits(tmp_path / "odd", "easy", "hard")
    with pytest.raises(UserError, match="has the splits easy, hard; set rl_config.dataset_split"):
        count(odd)
    alone = save_to_disk(tmp_path / "alone", questions(2), _split="test")
    assert (count(alone), count(alone, split="test")) == (2, 2)
    with pytest.raises(UserError, match="splits test and no 'train'"):
        count(alone, split="train")
    file = write_lines(tmp_path / "rows.jsonl", *questions(1))
    with pytest.raises(UserError, match="is 'train', but .* is one file, without splits"):
        count(file, split="train")


def test_shards_of_several_splits_are_kept_apart(tmp_path: Path) -> None:
    write_arrow(tmp_path / "gsm8k-train.arrow", questions(3))
    write_arrow(tmp_path / "gsm8k-test.arrow", questions(2))
    assert (count(tmp_path), count(tmp_path, evaluation=True)) == (3, 2)
    (tmp_path / "default").mkdir()
    for number in (0, 1):
        write_parquet(tmp_path / "default" / f"000{number}.parquet", questions(number + 1))
    assert count(tmp_path / "default") == 3
    write_lines(tmp_path / "train.jsonl", *questions(1))
    with pytest.raises(UserError, match=r"holds .arrow and .jsonl files"):
        count(tmp_path)


def test_directories_that_are_no_data_set_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no data: neither what save_to_disk"):
        open_examples(tmp_path)
    saved = save_to_disk(
        tmp_path / "saved", questions(4), _indices_data_files=[{"filename": "i.arrow"}]
    )
    with pytest.raises(
        UserError, match="list of indices; write it out with dataset.flatten_indices"
    ):
        open_examples(saved)
    (saved / "state.json").write_text('{"_data_files": [{"filename": "gone.arrow"}]}')
    with pytest.raises(UserError, match="lacks gone.arrow, which its state.json names"):
        open_examples(saved)
    (saved / "state.json").write_text("[]")
    with pytest.raises(UserError, match="state.json' holds a list"):
        open_examples(saved)


def test_files_that_are_no_data_set_are_refused(tmp_path: Path) -> None:
    for name, said in (
        ("x.txt", "must be a .jsonl, .json"),
        ("x.mindrecord", "cannot be read as a MindRecord"),
        ("x.parquet", "cannot be read as Parquet"),
        ("x.arrow", "cannot be read as Arrow"),
        ("x.json", r"x.json' is not JSON: .*line 1"),
    ):
        (tmp_path / name).write_text("some text here", "utf-8")
        with pytest.raises(UserError, match=said):
            open_examples(tmp_path / name)
    (tmp_path / "x.json").write_text('{"a": [1], "b": 2}')
    with pytest.raises(UserError, match="x.json:1 has no"):
        read_rows(tmp_path / "x.json")
    (tmp_path / "x.json").write_text('{\n"a": 2}')
    with pytest.raises(UserError, match="holds no list of rows"):
        read_rows(tmp_path / "x.json")
    (tmp_path / "x.json").write_text('[{"question": "q", "answer": "a"}, 3]')
    with pytest.raises(UserError, match="row 2 holds a int; each row must be an object"):
        read_rows(tmp_path / "x.json")
    with pytest.raises(UserError, match="does not exist; set rl_config.dataset_file"):
        open_examples(tmp_path / "none.jsonl")


# 200 questions, written by pyarrow 26.0.1; pyarrow 19 refuses its column statistics.
CURRENT = Path(__file__).resolve().parent / "data" / "written_by_pyarrow_26.parquet"


def test_parquet_of_a_current_pyarrow_is_read() -> None:
    examples = open_examples(CURRENT)
    assert len(examples) == 200
    assert [(examples[i].question, examples[i].answer) for i in (0, 199)] == [
        ("q 0 + 1?", "1"),
        ("q 199 + 1?", "200"),
    ]


def test_parquet_that_is_too_new_for_the_installed_pyarrow_names_both_versions_and_the_cure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(path: Path) -> None:
        raise OSError("Repetition level histogram size mismatch")

    monkeypatch.setattr("pyarrow.parquet.ParquetFile", refuse)
    monkeypatch.setattr("pyarrow.__version__", "19.0.0")
    cure = (
        r'pyarrow 26.0.1 wrote it and pyarrow 19.0.0 is installed: .*pip install "pyarrow>=20,<26"'
    )
    with pytest.raises(
        UserError, match=f"26.parquet cannot be read as Parquet: .*mismatch; {cure}"
    ):
        open_examples(CURRENT)
    monkeypatch.setattr("pyarrow.__version__", "26.1.0")
    with pytest.raises(UserError, match="mismatch; write or download it again"):
        open_examples(CURRENT)


def test_a_pyarrow_that_does_not_import_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UserError, match=r'cannot be imported: .*pip install "pyarrow>=20,<26"'):
        open_examples(CURRENT)


def test_csv_is_text_under_the_names_of_its_first_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(
        '\ufeffanswer,question,level\r\n007,"a, ""b""\nc?",1e3\r\n\r\n-1,d?,\r\n', "utf-8"
    )
    rows = [('a, "b"\nc?', "007", "1e3"), ("d?", "-1", "")]
    assert read_rows(path) == [{"question": q, "answer": a, "level": level} for q, a, level in rows]
    (tmp_path / "shards").mkdir()
    for number in (1, 0):
        (tmp_path / "shards" / f"train-0000{number}-of-00002.csv").write_text(
            f"question,answer\nq{number},a\n"
        )
    assert [row["question"] for row in read_rows(tmp_path / "shards")] == ["q0", "q1"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"question,answer\nq,a\nq,1,000\n", "rows.csv:3 has 3 values, but there are 2 columns"),
        (b"question,question\nq,a\n", "rows.csv:1 has the column names"),
        (b"question,\nq,a\n", "rows.csv:1 has the column names"),
        (b"", "rows.csv:1 has the column names"),
        (b"question,answer\n\xff,a\n", "cannot be read as CSV: 'utf-8'"),
        (b'question,answer\nq,"a\n', "cannot be read as CSV: unexpected end of data"),
    ],
)
def test_csv_that_is_damaged_is_refused_with_its_line(
    tmp_path: Path, text: bytes, said: str
) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(text)
    with pytest.raises(UserError, match=said):
        open_examples(path)


def test_all_files_of_a_split_are_read_also_where_they_are_json(tmp_path: Path) -> None:
    names = ["train-0.json", "train-1.json"]
    for name in names:
        (tmp_path / name).write_text(json.dumps([{"question": name, "answer": "1"}]))
    listed = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (tmp_path / "state.json").write_text(json.dumps(listed))
    assert [example.question for example in open_examples(tmp_path)] == names


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[str]]]:
    """Row groups in the order in which they are decoded, with the columns of each."""
    groups = []
    load = TableFile.load

    def watched(file: TableFile, group: int) -> Any:
        table = load(file, group)
        groups.append((group, table.column_names))
        return table

    monkeypatch.setattr(TableFile, "load", watched)
    return groups


def test_only_the_wanted_columns_and_row_groups_of_a_table_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decoded: list[tuple[int, list[str]]]
) -> None:
    path = write_parquet(tmp_path / "rows.parquet", ROWS, group=2)
    form = RowForm(None, {"answer": "deep.x"}, ["level", "missing"])
    rows = TableFile(path, form.keys_read(), TableCache())
    read = [form.example(row, where) for where, row in rows.read(2, 5)]
    assert [flat(example) for example in read] == [
        {"question": f"Q{n}?", "answer": str(n), "level": n} for n in (2, 3, 4)
    ]
    list(rows.read(3, 4))  # kept
    names = ["question", "answer", "level", "deep"]
    assert decoded == [(1, names), (2, names)]
    decoded.clear()
    monkeypatch.setattr(row_files, "CACHE_BYTES", 1)
    rows = TableFile(path, None, TableCache())
    levels = [row["level"] for n in (3, 2, 5, 3) for _, row in rows.read(n, n + 1)]
    assert levels == [3, 2, 5, 3] and [index for index, _ in decoded] == [1, 2, 1]
    lines = write_lines(tmp_path / "rows.jsonl", ROWS[0])
    assert [flat(r) for r in open_examples(lines, form)] == [
        {"question": "Q0?", "answer": "0", "level": 0}
    ]


def test_values_of_tables_become_plain_ones_or_are_refused(tmp_path: Path) -> None:
    row = {
        "question": "q",
        "answer": 4,
        "day": datetime.date(2024, 5, 6),
        "at": datetime.datetime(2024, 5, 6, 7, 8),
        "price": [{"sum": Decimal("1.50")}],
    }
    assert read_rows(write_parquet(tmp_path / "rows.parquet", [row])) == [
        row
        | {
            "answer": "4",
            "day": "2024-05-06",
            "at": "2024-05-06T07:08:00",
            "price": [{"sum": "1.50"}],
        }
    ]
    picture = write_parquet(tmp_path / "picture.parquet", [row | {"image": {"bytes": b"\0"}}])
    with pytest.raises(UserError, match=r"picture.parquet row 1: column 'image' holds bytes"):
        read_rows(picture)
    chosen = open_examples(picture, RowForm(columns=["day"]))
    assert flat(chosen[0]) == {"question": "q", "answer": "4", "day": "2024-05-06"}


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "saved"])
def test_a_file_that_changes_meanwhile_is_refused(kind: str, tmp_path: Path) -> None:
    path = written(tmp_path, kind)
    examples: Examples = open_examples(path)
    assert examples[0].answer == "0"
    file = path / "data-00000-of-00002.arrow" if path.is_dir() else path
    os.utime(file, (1, 1))
    with pytest.raises(UserError, match="changed since the run read it; start the run again"):
        examples[1]
