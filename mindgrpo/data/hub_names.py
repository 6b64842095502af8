"""Reads names of models and data sets on a hub: `[modelscope:]org/name[:configuration][@revision]`.

Also says where the files that were downloaded under such a name are. Downloads nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from mindgrpo.backend.kernels.native.library import cache_directory

Hub = Literal["huggingface", "modelscope"]
# What is read of a repository. `shapes`: of a model its config.json alone.
Content = Literal["model", "tokenizer", "shapes", "data"]

_WORD = r"[A-Za-z0-9_-][\w.-]*"
_NAME = re.compile(
    rf"(?:(?P<hub>modelscope):)?(?P<name>{_WORD}/{_WORD})(?::(?P<subset>{_WORD}))?(?:@(?P<revision>[\w./-]+))?",
    re.ASCII,
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
LONGEST_NAME = 200
# A name that ends so is a file's.
FILE_SUFFIXES = (
    *(".jsonl", ".json", ".csv", ".parquet", ".arrow", ".mindrecord", ".txt", ".yaml", ".yml"),
    *(".safetensors", ".ckpt", ".bin"),
)


@dataclass(frozen=True)
class HubName:
    """Names a repository; `subset` is the configuration of a data set, `revision` a branch, tag or commit."""

    hub: Hub
    name: str
    subset: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        prefix = "" if self.hub == "huggingface" else f"{self.hub}:"
        subset = f":{self.subset}" if self.subset else ""
        return f"{prefix}{self.name}{subset}" + (f"@{self.revision}" if self.revision else "")

    @property
    def is_pinned(self) -> bool:
        """Returns whether the revision is a commit, which never changes."""
        return _COMMIT.fullmatch(self.revision or "") is not None

    def at(self, revision: str) -> HubName:
        return replace(self, revision=revision)

    def without_revision(self) -> HubName:
        return replace(self, revision=None)


def hub_name(text: str) -> HubName | None:
    """Returns the name on a hub that `text` is, None for a path.

    What exists is a path, as is what ends like a file. So is a plain `folder/name` whose folder exists.
    """
    match, path = _NAME.fullmatch(text), Path(text)
    if (
        match is None
        or len(text) > LONGEST_NAME
        or path.exists()
        or path.suffix.lower() in FILE_SUFFIXES
    ):
        return None
    words = match.groupdict()
    is_plain = text == words["name"]
    if is_plain and path.parent.exists():
        return None
    hub: Hub = "modelscope" if words["hub"] else "huggingface"
    return HubName(hub, words["name"], words["subset"], words["revision"])


def copy_of(name: HubName, content: Content, splits: tuple[str, ...] = ()) -> Path:
    """Returns the folder for the files that are read of a pinned name, whether or not they were downloaded.

    `splits` are the splits of a data set of which the first one that it has is read.
    """
    assert name.revision is not None
    words = [name.subset or "", *splits] if content == "data" else []
    return _root() / str(name).replace("/", "--") / quote("-".join([content, *words]), safe="")


def name_of_copy(path: str | Path) -> str | None:
    """Returns the pinned name that a folder of `copy_of` is for, None for any other path."""
    try:
        first, *_ = Path(path).relative_to(_root()).parts
    except ValueError:
        return None
    return first.replace("--", "/", 1)


def is_complete(folder: Path) -> bool:
    """Returns whether a folder of `copy_of` is there, with every file that it leads to.

    It is made when all of them have been downloaded, and a hub's cache may have lost some since.
    """
    return folder.is_dir() and all(path.exists() for path in folder.rglob("*"))


def local_copy(text: str, content: Content) -> Path:
    """Returns the folder of a pinned name's files where they are complete, and any other text as a path."""
    name = hub_name(text)
    if name is not None and name.is_pinned and is_complete(folder := copy_of(name, content)):
        return folder
    return Path(text)


def _root() -> Path:
    return cache_directory() / "hub"
