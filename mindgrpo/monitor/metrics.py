"""Writes and reads a run's rows: metrics as JSON lines and TensorBoard scalars, samples as JSON lines.

Values that JSON does not allow (NaN, infinity) become null. A row is followed while another process writes its file.
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


def plain(value: Any) -> Any:
    """Returns the JSON value of a number, an array or a list of objects or texts; NumPy's become Python's."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, list) and all(isinstance(each, Mapping | str) for each in value):
        return [each if isinstance(each, str) else {**each} for each in value]
    if value is None or isinstance(value, int | float | str):
        return value
    raise TypeError(f"a metric is a number, a string or None, not {type(value).__name__}")


def finite_or_null(
    metrics: Mapping[str, Any], prefix: str = ""
) -> tuple[dict[str, Any], list[str]]:
    """Returns the metrics with null for each that is not finite, and those keys; a mapping's metrics likewise."""
    values: dict[str, Any] = {}
    nonfinite: list[str] = []
    for key, value in metrics.items():
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
    """Formats a row, with the keys of its values that are not finite under `nonfinite`, if there are any."""
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


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Reads the rows of a metrics.jsonl, without the partial line that a killed run may leave.

    Raises JSONDecodeError for any other line that is damaged.
    """
    lines = path.read_bytes().splitlines()
    if lines and row_of(lines[-1]) is None:
        lines.pop()
    return [json.loads(line) for line in lines]


class MetricsWriter:
    """Appends an object per step to DIRECTORY/metrics.jsonl, on disk when `write` returns, and to TensorBoard."""

    def __init__(
        self,
        directory: Path,
        tensorboard_dir: Path | None,
        queue_size: int = 10,
        done_steps: int = 0,
        warn: Callable[[str], None] = print,
    ) -> None:
        """Opens the files; `done_steps` of the run have been written before (see TensorBoard). Raises CannotWrite."""
        self.path = directory / "metrics.jsonl"
        with writing(self.path):
            self._lines = self.path.open("a", encoding="utf-8")
        self._board: TensorBoard | None = None
        if tensorboard_dir is not None:
            self._board = TensorBoard(tensorboard_dir, queue_size, done_steps, warn)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Appends the metrics of `step`. Raises CannotWrite."""
        with writing(self.path):
            self._lines.write(json_line({"step": step, **metrics}))
            self._lines.flush()
        if self._board is not None:
            self._board.write(step, metrics)

    def close(self) -> None:
        self._lines.close()
        if self._board is not None:
            self._board.close()


class TensorBoard:
    """Writes scalars to a file of events in `folder`, in this thread.

    tensorboardX's own writer has a thread that dies on a full disk, after which every write waits for ever; its
    RecordWriter syncs the disk at every flush. A file that cannot be written is reported to `warn` once, and the run
    continues without it: its metrics are in metrics.jsonl.
    """

    def __init__(
        self, folder: Path, queue_size: int, done_steps: int, warn: Callable[[str], None]
    ) -> None:
        """Opens the file, which is written after `queue_size` events. TensorBoard discards steps after `done_steps`."""
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.record_writer import masked_crc32c
        from tensorboardX.summary import scalar

        self._event, self._checksum, self._scalar = Event, masked_crc32c, scalar
        self._queue_size, self._warn = queue_size, warn
        self._num_buffered = 0
        self._file: BinaryIO | None = None
        self._path = folder / f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}"
        first = [Event(wall_time=time.time(), file_version="brain.Event:2")]
        if done_steps:
            start = SessionLog(status=SessionLog.START)
            first += [Event(wall_time=time.time(), step=done_steps + 1, session_log=start)]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab")
        except OSError as error:
            self._give_up(error)
        self._add(first)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Adds the numbers among the metrics of `step`."""
        now = time.time()
        self._add(
            [
                self._event(wall_time=now, step=step, summary=self._scalar(key, float(value)))
                for key, value in metrics.items()
                if key != "step" and value is not None and not isinstance(value, str)
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
        """Formats a TFRecord: the length and the data, each with its checksum."""
        length = struct.pack("<Q", len(data))
        sums = [struct.pack("<I", self._checksum(part)) for part in (length, data)]
        return length + sums[0] + data + sums[1]

    def _give_up(self, error: OSError) -> None:
        file, self._file = self._file, None
        with suppress(OSError):
            if file is not None:
                file.close()  # tries once more to write its buffer
        self._warn(
            f"  warning: {self._path} cannot be written ({error.strerror}): the run continues without it"
        )


class RowFollower:
    """Reads the complete lines of a file of JSON lines that another process is writing, each of them once.

    A file that does not exist has no rows yet; one that has become shorter is read from its beginning again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yields the rows added since the last call; a partial line at the end waits for the rest of it."""
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
    """Yields a run's finished steps, each of them once and in order, also if a resumed run repeats some."""

    def __init__(self, directory: Path, after: int = -1) -> None:
        """Follows the run from the step after `after`; the evaluation before the first step is step 0."""
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
