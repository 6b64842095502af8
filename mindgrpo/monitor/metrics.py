"""Writes and reads a run's rows: metrics as JSON lines and TensorBoard scalars, samples as JSON lines.

What JSON cannot hold (not finite) is null. A row is followed while another process is still writing its file.
"""

from __future__ import annotations

import json
import math
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from mindgrpo.errors import writing
from mindgrpo.strict_files import lines_of, row_of

FILE_VERSION = "brain.Event:2"


class TensorBoard:
    """A file of events in `folder`. `queue_size` events are buffered before a write; `warn` gets a line."""

    def __init__(
        self, folder: Path, queue_size: int, done_steps: int, warn: Callable[[str], None]
    ) -> None:
        """`done_steps` of the run have been written before; TensorBoard forgets what came after them."""
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.record_writer import masked_crc32c
        from tensorboardX.summary import scalar

        self._event, self._checksum, self._scalar = Event, masked_crc32c, scalar
        self._queue_size, self._warn = queue_size, warn
        self._num_buffered = 0
        self._file: BinaryIO | None = None
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}"
        self._path = folder / name
        first = [Event(wall_time=time.time(), file_version=FILE_VERSION)]
        if done_steps:
            start, step = SessionLog(status=SessionLog.START), done_steps + 1
            first += [Event(wall_time=time.time(), step=step, session_log=start)]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab")
        except OSError as error:
            self._give_up(error)
        self._add(first)

    def write(self, step: int, figures: Mapping[str, Any]) -> None:
        """Adds the numbers among the figures of `step`."""
        numbers = {
            key: float(value)
            for key, value in figures.items()
            if key != "step" and value is not None and not isinstance(value, str)
        }
        now = time.time()
        self._add(
            [
                self._event(wall_time=now, step=step, summary=self._scalar(key, value))
                for key, value in numbers.items()
            ]
        )

    def close(self) -> None:
        file, self._file = self._file, None
        try:
            if file is not None:
                file.close()
        except OSError as error:
            self._give_up(error)

    def _add(self, events: list[Any]) -> None:
        if self._file is None:
            return
        try:
            for event in events:
                self._file.write(self._record(event.SerializeToString()))
            self._num_buffered += len(events)
            if self._num_buffered >= self._queue_size:
                self._file.flush()
                self._num_buffered = 0
        except OSError as error:
            self._give_up(error)

    def _record(self, data: bytes) -> bytes:
        """TFRecord: the length and the data, each with its checksum."""
        length = struct.pack("<Q", len(data))
        sums = [struct.pack("<I", self._checksum(part)) for part in (length, data)]
        return length + sums[0] + data + sums[1]

    def _give_up(self, error: OSError) -> None:
        file, self._file = self._file, None
        with suppress(OSError):
            if file is not None:
                file.close()  # tries to write once more what it holds
        self._warn(
            f"  warning: {self._path} cannot be written ({error.strerror}): the run goes on without it"
        )


def plain(value: Any) -> Any:
    """The JSON value of a figure, an array or a list of objects; NumPy's become Python's."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, list) and all(isinstance(each, Mapping) for each in value):
        return [{**each} for each in value]
    if value is None or isinstance(value, int | float | str):
        return value
    raise TypeError(f"a figure is a number, a string or None, not {type(value).__name__}")


def finite_or_null(
    figures: Mapping[str, Any], prefix: str = ""
) -> tuple[dict[str, Any], list[str]]:
    """The figures with null for what JSON cannot hold, and the keys of those; a mapping's figures likewise."""
    values: dict[str, Any] = {}
    nonfinite: list[str] = []
    for key, value in figures.items():
        if isinstance(value, Mapping):
            values[key], bad = finite_or_null(value, f"{prefix}{key}/")
            nonfinite += bad
            continue
        values[key] = plain(value)
        if isinstance(values[key], float) and not math.isfinite(values[key]):
            values[key] = None
            nonfinite.append(prefix + key)
    return values, nonfinite


def json_line(row: Mapping[str, Any]) -> str:
    """The row with the keys of what is not finite under `nonfinite`, if there is any."""
    values, nonfinite = finite_or_null(row)
    values |= {"nonfinite": nonfinite} if nonfinite else {}
    return json.dumps(values, ensure_ascii=False, allow_nan=False) + "\n"


def append_rows(
    path: Path, step: int, rows: Iterable[Mapping[str, Any]], interval: int = 1
) -> None:
    """Appends rows of `step` to PATH at steps 1, 1 + interval, 1 + 2 x interval, ... Raises CannotWrite."""
    if (step - 1) % interval == 0:
        with writing(path), path.open("a", encoding="utf-8") as lines:
            lines.writelines(json_line({"step": step, **row}) for row in rows)


class MetricsWriter:
    """One object a step in DIRECTORY/metrics.jsonl, on disk when `write` returns."""

    def __init__(
        self,
        directory: Path,
        tensorboard_dir: Path | None,
        queue_size: int = 10,
        done_steps: int = 0,
        warn: Callable[[str], None] = print,
    ) -> None:
        """`done_steps` of the run have been written before; see TensorBoard. Raises CannotWrite."""
        self.path = directory / "metrics.jsonl"
        with writing(self.path):
            self._lines = self.path.open("a", encoding="utf-8")
        self._board: TensorBoard | None = None
        if tensorboard_dir is not None:
            self._board = TensorBoard(tensorboard_dir, queue_size, done_steps, warn)

    def write(self, step: int, figures: Mapping[str, Any]) -> None:
        """Raises CannotWrite."""
        with writing(self.path):
            self._lines.write(json_line({"step": step, **figures}))
            self._lines.flush()
        if self._board is not None:
            self._board.write(step, figures)

    def close(self) -> None:
        self._lines.close()
        if self._board is not None:
            self._board.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl; the half line that a killed run may leave is passed."""
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            if number < len(lines):
                raise
    return rows


class RowFollower:
    """A file that is missing has no rows yet; one that has become shorter is read from its beginning again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yields what was added since the last call; a half line at the end waits for its other half."""
        with suppress(FileNotFoundError), self._path.open("rb") as lines:
            if os.fstat(lines.fileno()).st_size < self._offset:
                self._offset = 0
            lines.seek(self._offset)
            for offset, line in lines_of(lines, self._offset):
                if not line.endswith(b"\n"):
                    return
                self._offset = offset + len(line)
                if (row := row_of(line)) is not None:
                    yield row


class StepFollower:
    """A run's steps as they are finished, each of them once and in order, also where a resumed run repeats some."""

    def __init__(self, directory: Path, after: int = -1) -> None:
        """`after`: the last step that is known already; the evaluation before the first one is step 0."""
        self.last = after
        self._metrics = RowFollower(directory / "metrics.jsonl")
        self._evaluations = RowFollower(directory / "evaluations.jsonl")

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yields the new rows of metrics.jsonl, after that of an evaluation before the first step."""
        # Evaluations of later steps are in the rows of these as well.
        start = (row for row in self._evaluations.rows() if row.get("step") == 0)
        for row in (*start, *self._metrics.rows()):
            if row.get("step", -1) > self.last:
                self.last = row["step"]
                yield row
