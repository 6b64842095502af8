"""Reads the rows of a MindRecord with MindSpore's own FileReader, in a child process.

The reader ends its process at a damaged file, so it never runs in this one: the child's end becomes a sentence. Rows
cross the pipe as JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from mindgrpo.data.limits import limit_memory
from mindgrpo.data.row_files import Row
from mindgrpo.errors import UserError

ROWS_PER_MESSAGE = 1000
SECONDS_PER_MESSAGE = (
    120.0  # importing MindSpore, where this process has not, is a part of the first
)
MIN_MEMORY_BYTES = 4 << 30


def read_rows(path: Path) -> list[Row]:
    """Reads all rows of the data set that `path` is a file of, in their order; arrays as lists. Raises UserError."""
    if not path.is_file():
        raise _unreadable(path, "it is no regular file")
    # Forked, so that a rank, which has imported MindSpore, need not wait for it again.
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send_rows, args=(path, sender))
    child.start()
    sender.close()
    rows: list[Row] = []
    try:
        while receiver.poll(SECONDS_PER_MESSAGE):
            message = json.loads(receiver.recv_bytes())
            if isinstance(message, str):
                raise _unreadable(path, message)
            if not message:
                return rows
            rows += message
        raise _unreadable(path, f"no row came for {SECONDS_PER_MESSAGE:g} s")
    except EOFError:
        child.join()
        raise _unreadable(path, f"MindSpore's reader ended with status {child.exitcode}") from None
    finally:
        child.kill()
        child.join()
        receiver.close()


def _unreadable(path: Path, reason: str) -> UserError:
    return UserError(
        f"{path} cannot be read as a MindRecord ({reason}); copy it again together with its index {path.name}.db, or "
        "convert the data again with rlhf_data.py"
    )


def _send_rows(path: Path, sender: Connection) -> None:
    """The child: lists of rows and an empty one, or a text that says what went wrong."""
    silence = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):  # MindSpore's own log of the same
        os.dup2(silence, descriptor)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    try:
        from mindspore.mindrecord import FileReader

        limit_memory(max(MIN_MEMORY_BYTES, 4 * path.stat().st_size))
        reader = FileReader(_shards(path), num_consumer=1)
        num_rows, rows = reader.len(), []
        for row in reader.get_next():
            rows.append({name: _plain(value) for name, value in row.items()})
            if len(rows) == ROWS_PER_MESSAGE:
                sender.send_bytes(json.dumps(rows).encode())
                num_rows, rows = num_rows - len(rows), []
        if num_rows != len(rows):
            raise ValueError(f"{num_rows - len(rows)} rows are missing")
        for message in (rows, []) if rows else ([],):
            sender.send_bytes(json.dumps(message).encode())
    except Exception as error:  # MindSpore's own kinds
        sender.send_bytes(json.dumps(_reason(error)).encode())


def _shards(path: Path) -> list[str]:
    """The files of the data set, which are beside `path` wherever its header says they are."""
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
