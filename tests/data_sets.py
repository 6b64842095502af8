"""Small data sets and tokenizer directories that the tests of mindgrpo.data share."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from mindgrpo.data.examples import RowForm, parse_key_map
from mindgrpo.data.row_files import ListedRows
from mindgrpo.data.sources import Examples, open_examples

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "examples" / "grpo" / "tiny_arithmetic" / "model"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
)


def copy_tokenizer(folder: Path) -> Path:
    folder.mkdir()
    for name in TOKENIZER_FILES:
        shutil.copy(MODEL / name, folder / name)
    return folder


def change(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text("utf-8"))
    content.update(changes)
    kept = {key: value for key, value in content.items() if value is not None}
    path.write_text(json.dumps(kept), "utf-8")


def questions(number: int) -> list[dict[str, Any]]:
    return [{"question": f"What is {n}+1?", "answer": str(n + 1)} for n in range(number)]


def write_lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def write_parquet(path: Path, rows: Sequence[dict[str, Any]], group: int = 3) -> Path:
    pa.parquet.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=group)
    return path


def write_arrow(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    table = pa.Table.from_pylist(list(rows))
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return path


def save_to_disk(
    folder: Path, rows: Sequence[dict[str, Any]], files: int = 2, **state: Any
) -> Path:
    """The layout of datasets.Dataset.save_to_disk; test_data_sources.py compares it with the original."""
    folder.mkdir(parents=True)
    names = [f"data-{index:05}-of-{files:05}.arrow" for index in range(files)]
    for index, name in enumerate(names):
        write_arrow(
            folder / name, rows[len(rows) * index // files : len(rows) * (index + 1) // files]
        )
    entries = {"_data_files": [{"filename": name} for name in names], "_split": None, **state}
    (folder / "state.json").write_text(json.dumps(entries))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def examples_of(rows: Sequence[dict[str, Any]]) -> Examples:
    return Examples(ListedRows(rows, "rows"), RowForm())


def read_rows(path: Path, dataset_type: str | None = None, *pairs: str) -> list[dict[str, Any]]:
    """What a file's examples are made of, flat: the way rewards see them."""
    examples = open_examples(path, RowForm(dataset_type, parse_key_map(pairs)))
    return [flat(example) for example in examples]


def flat(example: Any) -> dict[str, Any]:
    return {"question": example.question, "answer": example.answer, **example.columns}
