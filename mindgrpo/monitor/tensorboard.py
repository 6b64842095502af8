"""Writes scalars for TensorBoard, without the thread of tensorboardX's own writer: that one dies of a full disk, and
whoever writes to it then waits for ever.

What cannot be written is told once, and the run goes on without it: its figures are in metrics.jsonl.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

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
