"""Rows of JSONL or MindRecord as dictionaries with `question`, `answer` (gold) and extra columns.

`convert_jsonl` writes a MindRecord: complete, or not at all. It keeps row order and every column:
those besides question and answer travel as one JSON string. Refuses rows without a question or an
answer, and files that it did not write.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindgrpo.errors import UserError

Record = dict[str, Any]
GOLD_MARK = "####"
DATASET_TYPES = ("gsm8k", "plain", "openR1math")
# The worked solution that the gold answer was taken from, where it differs.
WORKED_COLUMN = "full_answer"
QUESTION_KEYS: Mapping[str | None, tuple[str, ...]] = {"openR1math": ("question", "problem")}
SCHEMA = {
    "index": {"type": "int64"},
    "question": {"type": "string"},
    "answer": {"type": "string"},
    "columns": {"type": "string"},
}
ROWS_PER_WRITE = 1000


@dataclass(frozen=True)
class ConversionReport:
    kept: int
    dropped: int
    target: Path

    def __str__(self) -> str:
        return f"{self.kept} rows kept, {self.dropped} dropped, written to {self.target}"


def gold_answer(answer: str, dataset_type: str | None = None) -> str:
    """The text after the last `####` (gsm8k; by default where there is one), else the answer."""
    if dataset_type in (None, "gsm8k") and GOLD_MARK in answer:
        return answer.rpartition(GOLD_MARK)[2].strip()
    return answer.strip()


def read_records(path: str | Path, dataset_type: str | None = None) -> list[Record]:
    """`dataset_type` is for JSONL; a MindRecord's answers were settled when it was converted."""
    source = Path(path)
    if not source.is_file():
        raise UserError(
            f"the data set {source} does not exist; set rl_config.dataset_file to a "
            ".jsonl file or to a .mindrecord file made by rlhf_data.py"
        )
    if source.suffix == ".jsonl":
        return [record for _, record in read_jsonl(source, dataset_type)]
    if source.suffix == ".mindrecord":
        return read_mindrecord(source)
    raise UserError(
        f"the data set {source} ends in {source.suffix!r}; it must be .jsonl or .mindrecord"
    )


def read_jsonl(path: Path, dataset_type: str | None) -> Iterator[tuple[str, Record]]:
    """Yields (file:line, record). Blank lines hold no row and are passed over."""
    if dataset_type not in (None, *DATASET_TYPES):
        raise UserError(
            f"dataset_type {dataset_type!r} is unknown; use one of {', '.join(DATASET_TYPES)}"
        )
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{path}:{number}"
                yield where, record_of(parse_line(line, where), where, dataset_type)


def parse_line(line: bytes, where: str) -> Record:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except ValueError as error:
        raise UserError(f"{where} is not a line of JSON: {error}; correct the line") from error
    if not isinstance(row, dict):
        raise UserError(
            f"{where} holds a {type(row).__name__}; each line must be an object with "
            '"question" and "answer"'
        )
    return row


def record_of(row: Record, where: str, dataset_type: str | None) -> Record:
    question_key = text_key(row, QUESTION_KEYS.get(dataset_type, ("question",)), where)
    question = row[question_key]
    if not isinstance(question, str) or not question.strip():
        raise UserError(f'{where}: "{question_key}" is {question!r}; it must be a non-empty text')
    given = row[text_key(row, ("answer",), where)]
    if isinstance(given, bool) or not isinstance(given, str | int | float):
        raise UserError(f'{where}: "answer" is {given!r}; it must be a text or a number')
    if dataset_type == "gsm8k" and GOLD_MARK not in str(given):
        raise UserError(
            f'{where}: "answer" has no {GOLD_MARK} before its gold answer, which gsm8k asks for; '
            "correct the row or use --dataset_type plain"
        )
    gold = gold_answer(str(given), dataset_type)
    record: Record = {"question": question, "answer": gold}
    record |= {key: value for key, value in row.items() if key not in (question_key, "answer")}
    if gold != str(given).strip():
        record.setdefault(WORKED_COLUMN, given)
    return record


def text_key(row: Record, names: tuple[str, ...], where: str) -> str:
    for name in names:
        if name in row:
            return name
    raise UserError(
        f'{where} has no "{names[0]}", its keys are {", ".join(row) or "none"}; '
        'each row needs "question" and "answer"'
    )


def convert_jsonl(
    source: str | Path,
    target: str | Path,
    *,
    dataset_type: str | None = None,
    keep: Callable[[Record, str], bool] | None = None,
    overwrite: bool = False,
) -> ConversionReport:
    """`keep(record, "file:line")` may drop a row (it is counted) or raise."""
    rows, written = Path(source), Path(target)
    if not rows.is_file():
        raise UserError(f"the data file {rows} does not exist; set --file_path to a .jsonl file")
    if written.suffix != ".mindrecord":
        raise UserError(f"the output {written} must end in .mindrecord; change --output_path")
    if written.exists() and not overwrite:
        raise UserError(f"the output {written} exists; remove it or pass --overwrite")
    kept: list[Record] = []
    dropped = 0
    for where, record in read_jsonl(rows, dataset_type):
        if keep is None or keep(record, where):
            kept.append(record)
        else:
            dropped += 1
    if not kept:
        raise UserError(f"no row of {rows} is left ({dropped} dropped); nothing was written")
    write_mindrecord(written, kept)
    return ConversionReport(len(kept), dropped, written)


def write_mindrecord(target: Path, records: Iterable[Record]) -> None:
    from mindspore.mindrecord import FileWriter

    target.parent.mkdir(parents=True, exist_ok=True)
    rows = [pack_row(index, record) for index, record in enumerate(records)]
    # The file knows its own name, so it is written under that name in a directory beside.
    with tempfile.TemporaryDirectory(prefix=".mindrecord-", dir=target.parent) as folder:
        partial = Path(folder) / target.name
        writer = FileWriter(str(partial), shard_num=1)
        writer.add_schema(SCHEMA, "prompts")
        for start in range(0, len(rows), ROWS_PER_WRITE):
            writer.write_raw_data(rows[start : start + ROWS_PER_WRITE])
        writer.commit()
        # The index goes first: a reader that finds the data file finds its index too.
        target.unlink(missing_ok=True)
        os.replace(f"{partial}.db", f"{target}.db")
        os.replace(partial, target)


def pack_row(index: int, record: Record) -> Record:
    extra = {key: value for key, value in record.items() if key not in ("question", "answer")}
    return {
        "index": index,
        "question": record["question"],
        "answer": record["answer"],
        "columns": json.dumps(extra, ensure_ascii=False),
    }


def read_mindrecord(path: Path) -> list[Record]:
    from mindspore.mindrecord import FileReader

    try:
        reader = FileReader(str(path), num_consumer=1)
        rows = list(reader.get_next())
        reader.close()
    except RuntimeError as error:
        raise UserError(
            f"{path} cannot be read as a MindRecord (it needs {path.name}.db beside it and the "
            "name it was written under); convert the JSONL again with rlhf_data.py"
        ) from error
    if rows and set(rows[0]) != set(SCHEMA):
        raise UserError(
            f"{path} has the columns {', '.join(sorted(rows[0]))}; {', '.join(sorted(SCHEMA))} "
            "are wanted; convert the JSONL again with this version's rlhf_data.py"
        )
    rows.sort(key=lambda row: row["index"])
    return [
        {"question": row["question"], "answer": row["answer"], **json.loads(row["columns"])}
        for row in rows
    ]
