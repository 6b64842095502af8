"""Opens the data set that a path leads to, as examples by index, for ranks that read it together.

The suffix of a file says what it is. Of a directory the files of one split are read: of what Hugging Face `datasets`
saved or cached, or of a folder of shards; `datasets` itself is not needed. Where several splits fit, the user is asked
rather than one chosen, or an evaluation could read the training set.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from mindgrpo.backend.rank_consistency import on_one_rank
from mindgrpo.data.examples import Example, RowForm
from mindgrpo.data.mindrecord import Decode, read_mindrecord
from mindgrpo.data.row_files import (
    Blocks,
    JsonLines,
    ListedRows,
    Rows,
    TableCache,
    TableFile,
    open_json,
    read_csv,
)
from mindgrpo.errors import UserError
from mindgrpo.strict_files import is_inside, looked_at, read_object

KINDS = ".jsonl, .json, .csv, .parquet, .arrow or .mindrecord"
SHARD_SUFFIXES = (".parquet", ".arrow", ".jsonl", ".csv")
# A description of a data set is such a file, too; so only in a folder without others.
DOCUMENT, DESCRIPTIONS = ".json", ("dataset_info.json", "dataset_infos.json")
SHARD_NUMBER = re.compile(r"-\d+-of-\d+(-[0-9a-f]+)?$|-?\d+$")
SPLIT_WORDS = ("train", "validation", "valid", "val", "test", "dev", "eval")
# Entries looked through for folders with data, to name them.
MOST_LOOKED_THROUGH = 1000
OF_A_DATA_SET = ("the data set's", "copy the whole directory again")


@dataclass(frozen=True)
class Ranks:
    """Ranks that prepare the same data together. `gather` returns everyone's value on every rank, in order of rank."""

    rank: int = 0
    size: int = 1
    gather: Callable[[Any], list[Any]] = lambda value: [value]

    def slice_of(self, length: int) -> tuple[int, int]:
        """Returns where this rank's share of `length` rows starts and stops."""
        return length * self.rank // self.size, length * (self.rank + 1) // self.size

    def by_one(self, work: Callable[[], Any]) -> Any:
        """Runs `work` on rank 0 and returns its result, or raises its error, on every rank (`on_one_rank`)."""
        return on_one_rank(self.gather, self.rank == 0, work)


ALONE = Ranks()


@dataclass(frozen=True)
class SplitChoice:
    """Which split to read: `name`, else the only one, else the only one of `preferred`. `key` names the setting."""

    name: str | None = None
    preferred: tuple[str, ...] = ("train",)
    key: str = "rl_config.dataset_split"

    def choose(self, splits: Sequence[str], directory: Path | str) -> str:
        """Returns one of `splits`. Raises UserError where none or several fit."""
        wanted = self.preferred if self.name is None else (self.name,)
        fitting = [name for name in wanted if name in splits]
        if self.name is None and len(splits) == 1:
            fitting = list(splits)
        if len(fitting) == 1:
            return fitting[0]
        lacking = "" if self.name is None else f" and no {self.name!r}"
        raise UserError(
            f"{directory} has the splits {', '.join(splits)}{lacking}; set {self.key} to one of them"
        )


FOR_TRAINING = SplitChoice()
FOR_EVALUATION = SplitChoice(preferred=("validation", "test"), key="rl_config.eval_dataset_split")


class Examples:
    """Examples by index, made of rows when they are asked for; without a `form` the rows are examples already."""

    def __init__(self, rows: Rows, form: RowForm | None = None) -> None:
        self._rows, self._form = rows, form

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, start: int, stop: int) -> Iterator[Example]:
        """Yields the examples from `start` up to `stop`. Raises UserError for one that cannot be used."""
        for where, row in self._rows.read(start, stop):
            yield row if self._form is None else self._form.example(row, where)

    def __iter__(self) -> Iterator[Example]:
        return self.read(0, len(self))

    def __getitem__(self, index: int) -> Example:
        return next(self.read(index, index + 1))


def open_examples(
    path: str | Path,
    form: RowForm | None = None,
    choice: SplitChoice = FOR_TRAINING,
    *,
    decode: Decode | None = None,
    ranks: Ranks = ALONE,
    key: str = "rl_config.dataset_file",
) -> Examples:
    """Opens a data set. `form` does not apply to a MindRecord, whose rows were settled when it was converted.

    `decode` turns token ids into text, for MindRecords of those; `key` names the setting that `path` comes from. Every
    rank of `ranks` calls this, with the same values. Raises UserError.
    """
    form = form or RowForm()
    files = data_files(path, choice, key)
    if files[0].suffix == ".mindrecord":
        examples = ranks.by_one(lambda: read_mindrecord(files[0], decode))
        form = replace(form, folder=files[0].parent)
        return Examples(ListedRows([form.seen(example) for example in examples], files[0]))
    form = replace(form, folder=files[0].parent)
    return Examples(open_rows(files, form.keys_read(), ranks, form.image_columns), form)


def open_rows(
    files: Sequence[Path],
    columns: Sequence[str] | None = None,
    ranks: Ranks = ALONE,
    binary: Collection[str] = (),
) -> Rows:
    """Opens the rows of one data set's files; of tables, only `columns` are read. Raises UserError.

    The columns `binary` may hold bytes.
    """
    suffix = files[0].suffix
    if suffix in (".parquet", ".arrow"):
        cache = TableCache()
        return Blocks([TableFile(file, columns, cache, binary) for file in files])
    if suffix == ".json":
        return Blocks([ranks.by_one(partial(open_json, file)) for file in files])
    if suffix == ".csv":
        return Blocks([ListedRows(ranks.by_one(partial(read_csv, file)), file) for file in files])
    if suffix == ".jsonl":
        return Blocks([JsonLines(file) for file in files])
    raise UserError(f"the data set {files[0]} ends in {suffix!r}; it must be a {KINDS} file")


def data_files(path: str | Path, choice: SplitChoice, key: str) -> list[Path]:
    """Lists the files of one split of the data set at `path`, all of one kind. Raises UserError."""
    source = Path(path)
    if not source.exists():
        raise UserError(
            f"the data set {source} does not exist{looked_at(source)}; set {key} to a {KINDS} file or to a directory "
            "of Hugging Face datasets"
        )
    if choice.name is not None and not source.is_dir():
        raise UserError(
            f"{choice.key} is {choice.name!r}, but {source} is one file, without splits; leave it out"
        )
    return files_of(source, choice) if source.is_dir() else [source]


def files_of(directory: Path, choice: SplitChoice) -> list[Path]:
    """Lists the files of the chosen split in their order, all of one kind. Raises UserError."""
    listing = directory / "dataset_dict.json"
    if listing.is_file():
        splits = read_object(listing, *OF_A_DATA_SET).get("splits", [])
        _check_names(splits, listing, "splits that are no names")
        directory, choice = directory / choice.choose(splits, directory), FOR_TRAINING
    if (directory / "state.json").is_file():
        return saved_files(directory, choice)
    shards = shards_in(directory, directory / "data")
    kinds = sorted({path.suffix for path in shards})
    if len(kinds) > 1:
        raise UserError(
            f"{directory} holds {' and '.join(kinds)} files; give the folder or the file that holds one kind"
        )
    if not shards:
        levels = chain.from_iterable(map(directory.glob, ("*", "*/*", "*/*/*")))
        inner = islice(levels, MOST_LOOKED_THROUGH)
        holding = [str(path) for path in sorted(inner) if shards_in(path)]
        instead = f"give {' or '.join(holding)}" if holding else "give such a directory or a file"
        raise UserError(
            f"the directory {directory} holds no data: neither what save_to_disk of Hugging Face datasets writes "
            f"nor {', '.join(SHARD_SUFFIXES)} or {DOCUMENT} files, there or in data/; {instead}"
        )
    split = choice.choose(sorted(set(map(split_of, shards))), directory)
    return [path for path in shards if split_of(path) == split]


def shards_in(*folders: Path) -> list[Path]:
    """Lists the files of rows in those of `folders` that exist, in their order."""
    files = [path for folder in folders if folder.is_dir() for path in sorted(folder.iterdir())]
    files = [path for path in files if path.is_file() and path.name not in DESCRIPTIONS]
    shards = [path for path in files if path.suffix in SHARD_SUFFIXES]
    return shards or [path for path in files if path.suffix == DOCUMENT]


def saved_files(directory: Path, choice: SplitChoice) -> list[Path]:
    """Lists the files that `save_to_disk` wrote for one split. Raises UserError."""
    state = read_object(directory / "state.json", *OF_A_DATA_SET)
    if any(value for key, value in state.items() if key.startswith("_indices")):
        raise UserError(
            f"{directory} holds a selection of rows as a list of indices; write it out with "
            "dataset.flatten_indices().save_to_disk(...)"
        )
    if choice.name is not None and state.get("_split") not in (None, choice.name):
        choice.choose([str(state["_split"])], directory)
    listed = state.get("_data_files")
    entries = listed if isinstance(listed, list) else []
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in entries]
    what = "data files that are no names of files in its folder"
    _check_names(names, directory / "state.json", what)
    files = [directory / str(name) for name in names]
    missing = [path.name for path in files if not path.is_file()]
    if missing or not files:
        raise UserError(
            f"{directory} lacks {', '.join(missing) or 'its data files'}, which its state.json names; copy the "
            "whole directory"
        )
    return files


def _check_names(names: object, path: Path, what: str) -> None:
    if not isinstance(names, list) or not all(
        isinstance(name, str) and name and is_inside(name) for name in names
    ):
        raise UserError(f"{path} lists {what}; copy the whole directory again")


def split_of(path: Path) -> str:
    """Returns `train` for train-00000-of-00002.parquet and gsm8k-train.arrow; else the name without its number."""
    stem = SHARD_NUMBER.sub("", path.stem)
    words = [word for word in re.split(r"[-_.]", stem.lower()) if word in SPLIT_WORDS]
    return words[-1] if words else stem or path.parent.name
