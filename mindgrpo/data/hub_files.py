"""Chooses the files of a repository that are read: of a model its weights in one form, of a data set one split.

Data sets are laid out as Hugging Face `datasets` reads them: by `configs` in the front matter of README.md, else by the
names of files and folders. Pure: nothing is downloaded here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from mindgrpo.data.hub_names import Content
from mindgrpo.data.sources import SplitChoice
from mindgrpo.errors import UserError
from mindgrpo.strict_files import is_inside, read_object

CONFIG, CARD = "config.json", "README.md"
SINGLE, INDEX, NAME_MAP = (
    "model.safetensors",
    "model.safetensors.index.json",
    "param_name_map.json",
)
TOKENIZER_FILES = (
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
# What is read to know which files are.
FIRST_FILES: Mapping[Content, tuple[str, ...]] = {
    "model": (INDEX, NAME_MAP),
    "tokenizer": (),
    "shapes": (),
    "data": (CARD,),
}
ROW_SUFFIXES = (".parquet", ".arrow", ".jsonl", ".csv", ".json")
NO_ROWS = (
    "config.json",
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "state.json",
)
SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_EDGE = r"(?:^|$|[-._ 0-9])"
_SHARD = re.compile(r"data/(\w+(?:\.\w+)*)-\d{5}-of-\d{5}[^/]*\.[^/]*")
_OF_COUNT = re.compile(r"(.*)-(\d{5})-of-(\d{5}).*")


class NoRows(UserError):
    """Says that a repository holds rows in no form that is read."""


def matching(paths: Iterable[str], patterns: Sequence[str]) -> list[str]:
    return [path for path in paths if any(fnmatchcase(path, pattern) for pattern in patterns)]


def model_files(paths: Collection[str], name: str, folder: Path) -> list[str]:
    """Returns the files of a model; `folder` holds those of FIRST_FILES. Raises UserError without readable weights."""
    return matching(paths, (*TOKENIZER_FILES, NAME_MAP)) + _weights(paths, name, folder)


def _weights(paths: Collection[str], name: str, folder: Path) -> list[str]:
    if SINGLE in paths:
        return [SINGLE]
    for index in (INDEX, NAME_MAP):
        if index in paths:
            content = read_object(folder / index, f"the index of {name}", "name another revision")
            shards = content.get("weight_map") if index == INDEX else content
            listed = shards.values() if isinstance(shards, dict) else ()
            names = sorted({shard for shard in listed if isinstance(shard, str)})
            missing = [shard for shard in names if shard not in paths or not is_inside(shard)]
            if missing or not names:
                raise UserError(
                    f"{index} of {name} names {', '.join(missing[:3]) or 'no files'}, which the repository does not "
                    "hold; name another revision or model."
                )
            return [index, *names]
    if checkpoints := matching(paths, ("*.ckpt",)):
        return [path for path in checkpoints if "/" not in path]
    others = [path for path in paths if PurePosixPath(path).suffix in (".bin", ".pt", ".gguf")]
    instead = f" (it has {', '.join(sorted(others)[:3])})" if others else ""
    raise UserError(
        f"{name} has no weights in safetensors{instead}, the form that is read; name a revision or model that has."
    )


def data_set_files(
    paths: Collection[str], card: str, subset: str | None, choice: SplitChoice, name: str
) -> tuple[str, list[str]]:
    """Returns the split that `choice` takes, and its files in their order, all of one kind. Raises UserError.

    `card` is the text of README.md. Raises NoRows where the rows are in other formats.
    """
    splits = _splits(paths, configurations_in(card, name), subset, name)
    split = choice.choose(list(splits), name)
    files = splits[split]
    suffixes = {_suffix(path) for path in files}
    rows = next((kind for kind in ROW_SUFFIXES if kind in suffixes), None)
    others = suffixes - {rows}
    if rows is None:
        raise NoRows(
            f"the files of {name} for the split {split} end in {', '.join(sorted(suffixes))}, and rows are read from "
            f"{', '.join(ROW_SUFFIXES)}; load them with Hugging Face datasets, write them with to_json, and name that "
            "file"
        )
    if others:
        raise UserError(
            f"{name} has both {rows} and {', '.join(sorted(others))} files for the split {split}; download those of "
            "one kind and name their folder"
        )
    return split, files


def missing_shards(files: Sequence[str]) -> str | None:
    """Says which shards are not among the files, where names such as 00000-of-00002 tell that there are more."""
    numbers: dict[tuple[str, str], set[int]] = {}
    for path in files:
        if match := _OF_COUNT.fullmatch(path):
            head, number, count = match.groups()
            numbers.setdefault((head, count), set()).add(int(number))
    for (head, count), own in numbers.items():
        if len(own) < int(count):
            return f"{int(count) - len(own)} of the {int(count)} files {head}-*-of-{count}"
    return None


def configurations_in(card: str, name: str) -> dict[str, dict[str, Any]]:
    """Returns the `configs` of a README's front matter by name. Raises UserError."""
    lines = card.lstrip("\ufeff").splitlines()
    if lines[:1] != ["---"] or "---" not in lines[1:]:
        return {}
    try:
        front = yaml.safe_load("\n".join(lines[1 : lines.index("---", 1)]))
    except yaml.YAMLError as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"the front matter of {name}'s README.md is no YAML ({reason}), so its files are unknown; download it and "
            "name the files"
        ) from None
    listed = front.get("configs") if isinstance(front, dict) else None
    configurations = [one for one in listed or () if isinstance(one, dict)]
    return {str(one.get("config_name", "default")): one for one in configurations}


def _splits(
    paths: Collection[str],
    configurations: Mapping[str, Mapping[str, Any]],
    subset: str | None,
    name: str,
) -> dict[str, list[str]]:
    """Returns the files of each split of a configuration; none is empty."""
    chosen = _configuration(configurations, subset, paths, name)
    folder = str(chosen.get("data_dir") or "").strip("/")
    inside = sorted(path for path in paths if not folder or path.startswith(f"{folder}/"))
    relative = {path.removeprefix(f"{folder}/") if folder else path: path for path in inside}
    listed = chosen.get("data_files")
    by_split = _by_name(list(relative)) if listed is None else _listed(listed, list(relative))
    splits = {split: [relative[path] for path in own] for split, own in by_split.items() if own}
    if not splits:
        raise NoRows(
            f"{name} holds no {', '.join(ROW_SUFFIXES)} files; load it with Hugging Face datasets, write it with "
            "to_json, and name that file"
        )
    return splits


def _configuration(
    configurations: Mapping[str, Mapping[str, Any]],
    subset: str | None,
    paths: Collection[str],
    name: str,
) -> Mapping[str, Any]:
    if subset is None:
        fitting = [
            key
            for key, value in configurations.items()
            if len(configurations) == 1 or key == "default" or value.get("default")
        ]
        if len(fitting) == 1:
            return configurations[fitting[0]]
        if not configurations:
            return {}
    elif subset in configurations:
        return configurations[subset]
    elif any(path.startswith(f"{subset}/") and _suffix(path) in ROW_SUFFIXES for path in paths):
        return {"data_dir": subset}
    repository = name.partition("@")[0].removesuffix(f":{subset}")
    known = list(configurations) or sorted(
        {path.partition("/")[0] for path in paths if "/" in path}
    )
    lacking = "" if subset is None else f" and no {subset!r}"
    remedy = f"write {repository}:{known[0]}" if known else f"write {repository}"
    raise UserError(
        f"{repository} has the configurations {', '.join(known) or '(none)'}{lacking}; {remedy}"
    )


def _listed(listed: Any, paths: Sequence[str]) -> dict[str, list[str]]:
    """Reads `data_files`: patterns of the split train, or objects with `split` and `path`."""
    splits: dict[str, list[str]] = {}
    for entry in [listed] if isinstance(listed, str | dict) else list(listed):
        of_split = entry if isinstance(entry, dict) else {"split": "train", "path": entry}
        patterns = of_split.get("path")
        own = splits.setdefault(str(of_split.get("split", "train")), [])
        for pattern in [patterns] if isinstance(patterns, str) else list(patterns or ()):
            expression = glob_expression(pattern)
            own += [path for path in paths if expression.fullmatch(path) and path not in own]
    return splits


def glob_expression(pattern: str) -> re.Pattern[str]:
    """Translates a pattern in which * stays within a folder and ** does not."""
    words = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]+\])", pattern.removeprefix("./"))
    meanings = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    translated = (
        word.replace("[!", "[^", 1)
        if number % 2 and word.startswith("[")
        else meanings[word]
        if number % 2
        else re.escape(word)
        for number, word in enumerate(words)
    )
    return re.compile("".join(translated))


def _by_name(paths: Sequence[str]) -> dict[str, list[str]]:
    """Tells splits by names: data/SPLIT-00000-of-00001, else words of folders, else of files, else all are train."""
    rows = [path for path in paths if _suffix(path) in ROW_SUFFIXES and not _is_hidden(path)]
    rows = [path for path in rows if PurePosixPath(path).name not in NO_ROWS]
    # Beside rows of another kind it describes them.
    rows = [path for path in rows if _suffix(path) != ".json"] or rows
    sharded: dict[str, list[str]] = {}
    for path in rows:
        if match := _SHARD.fullmatch(path):
            sharded.setdefault(match[1], []).append(path)
    if sharded:
        return sharded

    def by_word(words_of: Callable[[PurePosixPath], Sequence[str]]) -> dict[str, list[str]]:
        splits: dict[str, list[str]] = {}
        for split, words in SPLIT_WORDS.items():
            expression = re.compile(f"{_EDGE}(?:{'|'.join(words)}){_EDGE}", re.IGNORECASE)
            own = [p for p in rows if any(map(expression.search, words_of(PurePosixPath(p))))]
            if own:
                splits[split] = own
        return splits

    return (
        by_word(lambda path: path.parts[:-1])
        or by_word(lambda path: path.parts[-1:])
        or {"train": rows}
    )


def _is_hidden(path: str) -> bool:
    return any(word.startswith((".", "__")) for word in path.split("/"))


def _suffix(path: str) -> str:
    return PurePosixPath(path).suffix.lower()
