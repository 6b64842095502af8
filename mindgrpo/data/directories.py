"""Which files of a directory make up a split: what `datasets` saved or cached, and folders of shards.

Needs no `datasets`. Refuses to choose between splits that have no order of their own: nobody should find out later
that the evaluation read the training set.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindgrpo.errors import UserError
from mindgrpo.strict_files import is_inside, read_object

OF_A_DATA_SET = ("the data set's", "copy the whole directory again")
SHARD_SUFFIXES = (".parquet", ".arrow", ".jsonl")
SHARD_FOLDERS = (".", "data")
SHARD_NUMBER = re.compile(r"-\d+-of-\d+(-[0-9a-f]+)?$|-?\d+$")
SPLIT_WORDS = ("train", "validation", "valid", "val", "test", "dev", "eval")


@dataclass(frozen=True)
class SplitChoice:
    """`key` names the setting; of several splits, the one of `preferred` that there is is taken."""

    name: str | None = None
    preferred: tuple[str, ...] = ("train",)
    key: str = "rl_config.dataset_split (--split)"

    def choose(self, splits: Sequence[str], directory: Path) -> str:
        if self.name is not None:
            if self.name in splits:
                return self.name
            raise UserError(
                f"{directory} has the splits {', '.join(splits)} and no {self.name!r}; set {self.key} to one of them"
            )
        if len(splits) == 1:
            return splits[0]
        fitting = [name for name in self.preferred if name in splits]
        if len(fitting) == 1:
            return fitting[0]
        raise UserError(
            f"{directory} has the splits {', '.join(splits)}; set {self.key} to one of them"
        )


FOR_TRAINING = SplitChoice()
FOR_EVALUATION = SplitChoice(preferred=("validation", "test"), key="rl_config.eval_dataset_split")


def files_of(directory: Path, choice: SplitChoice) -> list[Path]:
    """The files of the chosen split, in their order and all of one kind."""
    if (directory / "dataset_dict.json").is_file():
        splits = read_object(directory / "dataset_dict.json", *OF_A_DATA_SET).get("splits", [])
        if not isinstance(splits, list) or not all(
            isinstance(name, str) and name and is_inside(name) for name in splits
        ):
            raise UserError(
                f"{directory / 'dataset_dict.json'} lists splits that are no names; copy the whole directory again"
            )
        directory, choice = directory / choice.choose(splits, directory), FOR_TRAINING
    if (directory / "state.json").is_file():
        return saved_files(directory, choice)
    splits_found = shards(directory)
    if not splits_found:
        raise UserError(
            f"the directory {directory} holds no data: neither what save_to_disk of Hugging Face datasets writes "
            f"nor {', '.join(SHARD_SUFFIXES)} files, there or in data/; give such a directory or a file"
        )
    return splits_found[choice.choose(sorted(splits_found), directory)]


def saved_files(directory: Path, choice: SplitChoice) -> list[Path]:
    state = read_object(directory / "state.json", *OF_A_DATA_SET)
    if any(value for key, value in state.items() if key.startswith("_indices")):
        raise UserError(
            f"{directory} holds a selection of rows as a list of indices; write it out with "
            "dataset.flatten_indices().save_to_disk(...)"
        )
    if choice.name is not None and state.get("_split") not in (None, choice.name):
        choice.choose([str(state["_split"])], directory)
    listed = state.get("_data_files")
    names = [
        entry.get("filename") if isinstance(entry, dict) else None
        for entry in (listed if isinstance(listed, list) else [])
    ]
    if not all(isinstance(name, str) and is_inside(name) for name in names):
        raise UserError(
            f"{directory / 'state.json'} lists data files that are no names of files in its folder; copy the whole "
            "directory again"
        )
    files = [directory / str(name) for name in names]
    missing = [path.name for path in files if not path.is_file()]
    if missing or not files:
        raise UserError(
            f"{directory} lacks {', '.join(missing) or 'its data files'}, which its state.json names; copy the "
            "whole directory"
        )
    return files


def shards(directory: Path) -> Mapping[str, list[Path]]:
    found = [
        path
        for folder in SHARD_FOLDERS
        if (directory / folder).is_dir()
        for path in sorted((directory / folder).iterdir())
        if path.suffix in SHARD_SUFFIXES and path.is_file()
    ]
    kinds = sorted({path.suffix for path in found})
    if len(kinds) > 1:
        raise UserError(
            f"{directory} holds {' and '.join(kinds)} files; give the folder or the file that holds one kind"
        )
    splits: dict[str, list[Path]] = {}
    for path in found:
        splits.setdefault(split_of(path), []).append(path)
    return splits


def split_of(path: Path) -> str:
    """`train` of train-00000-of-00002.parquet and of gsm8k-train.arrow; else the name without its number."""
    stem = SHARD_NUMBER.sub("", path.stem)
    words = [word for word in re.split(r"[-_.]", stem.lower()) if word in SPLIT_WORDS]
    return words[-1] if words else stem or path.parent.name
