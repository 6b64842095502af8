"""Keeps examples in a MindRecord: written whole or not at all, read back as they were.

Columns besides the prompt and the answer travel as one JSON text. MindRecords of MindRLHF, whose prompts and answers
are token ids, are read too. MindSpore's own FileReader ends its process at a damaged file, so it runs in a child
process, whose end becomes a sentence.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np

from mindgrpo.data.examples import Example, gold_answer, single_turn
from mindgrpo.data.messages import messages_of
from mindgrpo.data.row_files import Row
from mindgrpo.errors import UserError
from mindgrpo.processes.fork import AnsweringChannel, Channel, end_forked, fork
from mindgrpo.processes.linux import leave_no_core
from mindgrpo.strict_files import NotJson, parse_json
from mindgrpo.user_code import limit_memory

# "messages" is empty where the prompt is one question.
SCHEMA = {
    "index": {"type": "int64"},
    "question": {"type": "string"},
    "answer": {"type": "string"},
    "messages": {"type": "string"},
    "columns": {"type": "string"},
}
TOKEN_COLUMNS = ("prompt_ids", "pretrain_ids")
ROWS_PER_WRITE = ROWS_PER_MESSAGE = 1000
# Importing MindSpore, where this process has not, is a part of the first message.
SECONDS_PER_MESSAGE = 120.0
MIN_MEMORY_BYTES = 4 << 30
LONGEST_MESSAGE = 1 << 30

# The name among columns, which no column has, of what to do about a row without a gold answer.
UNANSWERED = ""
AGAIN = "convert the data again with rlhf_data.py"

Decode = Callable[[Sequence[int]], str]


def check_target(target: Path, overwrite: bool) -> None:
    if target.suffix != ".mindrecord":
        raise UserError(f"the output {target} must end in .mindrecord; change --output_path")
    if target.exists() and not overwrite:
        raise UserError(f"the output {target} exists; remove it or pass --overwrite")


def write_mindrecord(target: Path, examples: Iterable[Example], source: str) -> int:
    """Writes `examples` as they come and returns their number. Raises UserError, and writes nothing, for none."""
    target.parent.mkdir(parents=True, exist_ok=True)
    rows = (packed(index, example) for index, example in enumerate(examples))
    # The file knows its own name, so it is written under that name in a directory beside.
    with tempfile.TemporaryDirectory(prefix=".mindrecord-", dir=target.parent) as folder:
        partial = Path(folder) / target.name
        num_rows = write_rows(partial, rows)
        if not num_rows:
            raise UserError(f"no row of {source} is left; nothing was written")
        # The index goes first: a reader that finds the data file finds its index too.
        target.unlink(missing_ok=True)
        os.replace(f"{partial}.db", f"{target}.db")
        os.replace(partial, target)
    return num_rows


def write_rows(target: Path, rows: Iterator[Row]) -> int:
    from mindspore.mindrecord import FileWriter

    writer = FileWriter(str(target), shard_num=1)
    writer.add_schema(SCHEMA, "prompts")
    num_rows = 0
    while batch := list(islice(rows, ROWS_PER_WRITE)):
        writer.write_raw_data(batch)
        num_rows += len(batch)
    if num_rows:
        writer.commit()
    return num_rows


def packed(index: int, example: Example) -> Row:
    is_text = example.is_question and not example.is_conversation
    messages = "" if is_text else json.dumps(example.messages, ensure_ascii=False)
    unanswered = {UNANSWERED: example.unanswered} if example.unanswered else {}
    return {
        "index": index,
        "question": example.question,
        "answer": example.answer,
        "messages": messages,
        "columns": json.dumps({**example.columns, **unanswered}, ensure_ascii=False),
    }


def unpacked(row: Row, where: str) -> Example:
    if not all(isinstance(row[name], str) for name in SCHEMA if name != "index"):
        raise UserError(f"{where} has columns that are no texts; {AGAIN}")
    columns = loaded(row["columns"], where)
    if not isinstance(columns, dict):
        raise UserError(f"{where}: its columns are no JSON object; {AGAIN}")
    asked = loaded(row["messages"], where) if row["messages"] else row["question"]
    remedy = columns.pop(UNANSWERED, "")
    unanswered = f"{AGAIN} and {remedy}" if remedy else ""
    messages, answer = messages_of(asked, where), row["answer"]
    is_list = isinstance(asked, list)
    return Example(messages, answer, columns, where, unanswered, is_conversation=is_list)


def loaded(text: str, where: str) -> Any:
    try:
        return parse_json(text.encode())
    except NotJson as error:
        raise UserError(f"{where} holds no JSON: {error}; {AGAIN}") from None


def read_mindrecord(path: Path, decode: Decode | None) -> list[Example]:
    """Reads all examples in their order. `decode` is for those whose prompts are token ids. Raises UserError."""
    rows = read_rows(path)
    names = set(rows[0]) if rows else set(SCHEMA)
    if not all(row.keys() == names for row in rows):
        raise UserError(f"not every row of {path} has the columns of its first one; {AGAIN}")
    if names == set(SCHEMA):
        if not all(type(row["index"]) is int for row in rows):
            raise UserError(f"{path} has rows whose index is no number; {AGAIN}")
        ordered = sorted(rows, key=lambda row: int(row["index"]))
        return [unpacked(row, f"{path} row {number}") for number, row in enumerate(ordered, 1)]
    if set(TOKEN_COLUMNS) <= names and decode is not None:
        return [decoded(row, f"{path} row {number}", decode) for number, row in enumerate(rows, 1)]
    raise UserError(
        f"{path} has the columns {', '.join(sorted(map(str, names)))}; {', '.join(sorted(SCHEMA))} are wanted; convert "
        "the data again with this version's rlhf_data.py"
    )


def decoded(row: Row, where: str, decode: Decode) -> Example:
    columns = [row[name] for name in TOKEN_COLUMNS]
    if not all(
        isinstance(ids, list) and all(type(number) is int and number >= 0 for number in ids)
        for ids in columns
    ):
        raise UserError(f"{where}: its tokens are no ids; {AGAIN}")
    question, answer = (decode(ids).strip() for ids in columns)
    if not question:
        raise UserError(
            f"{where}: its prompt_ids decode to an empty text; set rl_config.tokenizer_dir to the "
            "tokenizer that wrote them"
        )
    return replace(single_turn(question, gold_answer(answer)), where=where)


def read_rows(path: Path) -> list[Row]:
    """Reads all rows of the data set that `path` is a file of, in their order; arrays as lists. Raises UserError."""
    if not path.is_file():
        raise _unreadable(path, "it is no regular file")
    # Forked, so that a rank, which has imported MindSpore, need not wait for it again.
    ours, theirs = socket.socketpair()
    child = fork(lambda: _send_rows(path, AnsweringChannel(theirs)), [ours])
    theirs.close()
    channel, rows, is_read, how = Channel(ours, LONGEST_MESSAGE), list[Row](), True, ""
    try:
        while True:
            late = time.monotonic() + SECONDS_PER_MESSAGE
            while (message := channel.take()) is None and is_read:
                if not wait([ours], max(0.0, late - time.monotonic())):
                    raise _unreadable(path, f"no row came for {SECONDS_PER_MESSAGE:g} s")
                is_read = channel.read()
            if message is None:
                break
            if "failed" in message:
                raise _unreadable(path, message["failed"])
            if "done" in message:
                return rows
            rows += message["rows"]
    finally:
        channel.close()
        how = end_forked(child)
    raise _unreadable(path, f"MindSpore's reader {how}")


def _unreadable(path: Path, reason: str) -> UserError:
    return UserError(
        f"{path} cannot be read as a MindRecord ({reason}); copy it again together with its index {path.name}.db, or "
        "convert the data again with rlhf_data.py"
    )


def _send_rows(path: Path, channel: AnsweringChannel) -> None:
    """Runs in the child: sends `rows` and at last `done`, or what `failed`."""
    silence = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):  # MindSpore's own log of the same
        os.dup2(silence, descriptor)
    leave_no_core()
    try:
        from mindspore.mindrecord import FileReader

        limit_memory(max(MIN_MEMORY_BYTES, 4 * path.stat().st_size))
        reader = FileReader(_shards(path), num_consumer=1)
        num_missing, rows = reader.len(), reader.get_next()
        while batch := list(islice(rows, ROWS_PER_MESSAGE)):
            plain = [{name: _plain(value) for name, value in row.items()} for row in batch]
            channel.send({"rows": plain})
            num_missing -= len(batch)
        if num_missing:
            raise ValueError(f"{num_missing} rows are missing")
        channel.send({"done": True})
    except Exception as error:  # MindSpore's own kinds
        channel.send({"failed": _reason(error)})


def _shards(path: Path) -> list[str]:
    """Lists the data set's files, which are beside `path` wherever its header says they are."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    names = [Path(name).name for name in header["shard_addresses"]]
    if path.name not in names:
        raise ValueError(f"it was renamed from {names[0]}, and knows itself by that name alone")
    return [str(path.parent / name) for name in names]


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    marked = [line.removeprefix("[ERROR]").strip() for line in lines if line.startswith("[ERROR]")]
    return next(iter([*marked, *lines]), type(error).__name__)


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        raise ValueError("it has columns of bytes")
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
