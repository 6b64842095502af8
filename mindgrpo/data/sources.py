"""Examples of any data set that a path leads to, by place, and the ranks that read it together.

The suffix of a file says what it is, the files of a directory what that is. A example is made when it is asked for.
Refuses what it does not know rather than guess from its bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindgrpo.data.directories import FOR_TRAINING, SplitChoice, files_of
from mindgrpo.data.examples import Example, RowForm
from mindgrpo.data.mindrecord import Decode, read_mindrecord
from mindgrpo.data.rows import JoinedRows, JsonLines, Rows, open_json
from mindgrpo.data.tables import TableRows
from mindgrpo.errors import UserError

KINDS = ".jsonl, .json, .parquet, .arrow or .mindrecord"


def _alone(value: Any) -> list[Any]:
    return [value]


@dataclass(frozen=True)
class Ranks:
    """Those that prepare the same data at once. `gather` gives every rank everyone's value, in order of rank."""

    rank: int = 0
    size: int = 1
    gather: Callable[[Any], list[Any]] = _alone

    def slice_of(self, length: int) -> tuple[int, int]:
        """Where this rank's share of `length` places starts and stops."""
        return length * self.rank // self.size, length * (self.rank + 1) // self.size

    def by_one(self, work: Callable[[], Any]) -> Any:
        """What `work` gives on rank 0, on every rank; its UserError, too."""
        outcome: Any = None
        if self.rank == 0:
            try:
                outcome = (work(), None)
            except UserError as error:
                outcome = (None, str(error))
        result, sentence = self.gather(outcome)[0]
        if sentence is not None:
            raise UserError(sentence)
        return result


ALONE = Ranks()


class Examples(ABC):
    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def where(self, place: int) -> str: ...

    @abstractmethod
    def read(self, start: int, stop: int) -> Iterator[Example]: ...

    def __iter__(self) -> Iterator[Example]:
        return self.read(0, len(self))

    def __getitem__(self, place: int) -> Example:
        return next(self.read(place, place + 1))


class RowExamples(Examples):
    def __init__(self, rows: Rows, form: RowForm) -> None:
        self._rows, self._form = rows, form

    def __len__(self) -> int:
        return len(self._rows)

    def where(self, place: int) -> str:
        return self._rows.where(place)

    def read(self, start: int, stop: int) -> Iterator[Example]:
        for place, row in enumerate(self._rows.read(start, stop), start=start):
            yield self._form.example(row, self.where(place))


class StoredExamples(Examples):
    """Of a MindRecord, or given as a list; `name` is for messages."""

    def __init__(self, examples: list[Example], name: str) -> None:
        self._records, self._name = examples, name

    def __len__(self) -> int:
        return len(self._records)

    def where(self, place: int) -> str:
        return f"{self._name} row {place + 1}"

    def read(self, start: int, stop: int) -> Iterator[Example]:
        yield from self._records[start:stop]


def open_examples(
    path: str | Path,
    form: RowForm | None = None,
    choice: SplitChoice = FOR_TRAINING,
    *,
    decode: Decode | None = None,
    ranks: Ranks = ALONE,
    key: str = "rl_config.dataset_file",
) -> Examples:
    """`form` does not touch a MindRecord: its rows were settled when it was converted.

    `key` names the setting that `path` comes from. Every rank of `ranks` calls this, with the same values.
    """
    source, form = Path(path), form or RowForm()
    if not source.exists():
        raise UserError(
            f"the data set {source} does not exist; set {key} to a {KINDS} file or to a directory of "
            "Hugging Face datasets"
        )
    if choice.name is not None and not source.is_dir():
        raise UserError(
            f"{choice.key} is {choice.name!r}, but {source} is one file, without splits; leave it out"
        )
    files = files_of(source, choice) if source.is_dir() else [source]
    suffix = files[0].suffix
    if suffix == ".mindrecord":
        stored = ranks.by_one(lambda: read_mindrecord(source, decode))
        return StoredExamples(stored, str(source))
    if suffix in (".parquet", ".arrow"):
        return RowExamples(TableRows(files, form.keys_read()), form)
    if suffix == ".json":
        return RowExamples(ranks.by_one(lambda: open_json(source)), form)
    if suffix == ".jsonl":
        return RowExamples(JoinedRows([JsonLines(path) for path in files]), form)
    raise UserError(f"the data set {source} ends in {suffix!r}; it must be a {KINDS} file")
