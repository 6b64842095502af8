"""Downloads what is read of a repository on a hub, into that hub's own cache, and links it in a folder of its own.

Runs in a process of its own (run/named_sources.py): the libraries of the hubs start threads and read their environment
when they are imported. The folder is made when all its files have been downloaded and their checksums compared.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from mindgrpo.backend.kernels.native.library import make_cache_directory
from mindgrpo.data.hub_files import (
    CARD,
    CONFIG,
    FIRST_FILES,
    TOKENIZER_FILES,
    NoRows,
    data_set_files,
    matching,
    missing_shards,
    model_files,
)
from mindgrpo.data.hub_names import HubName, copy_of, is_complete
from mindgrpo.data.hubs import HuggingFace, ModelScope, Repository, Wanted, absent, first_line
from mindgrpo.data.sources import SplitChoice
from mindgrpo.errors import FULL, UserError, writing

# Where the Hugging Face hub keeps rows as Parquet of data sets that have them in another form.
CONVERTED = "refs/convert/parquet"
BLOCK_BYTES = 1 << 20
GIGA = 10**9


def fetch(wanted: Sequence[Mapping[str, Any]], answer: str) -> None:
    """Fetches each of `wanted` and writes to the file `answer`: the pinned names, or the sentence of what failed."""
    pinned: list[str] = []
    outcome: dict[str, Any] = {"pinned": pinned}
    try:
        for one in wanted:
            choice: Any = one["split"]
            if choice is not None:
                choice = SplitChoice(choice["name"], tuple(choice["preferred"]), choice["key"])
            pinned.append(str(fetch_one(Wanted(one["key"], one["text"], one["content"], choice))))
    except UserError as error:
        outcome = {"error": str(error)}
    except Exception as error:  # a folder that cannot be written, a library that is broken
        last = wanted[len(pinned)]
        outcome = {
            "error": f"{last['key']} is {last['text']}, which cannot be fetched: {first_line(error)}"
        }
    except KeyboardInterrupt:
        os._exit(130)  # who waits for this process was interrupted, too
    Path(answer).write_text(json.dumps(outcome), encoding="utf-8")


def fetch_one(wanted: Wanted) -> HubName:
    """Makes the folder of what is wanted (`copy_of`), and returns its pinned name. Raises UserError."""
    try:
        return _fetch(wanted, wanted.name.revision)
    except NoRows as error:
        if wanted.name.hub != "huggingface" or wanted.name.revision is not None:
            raise
        try:
            return _fetch(wanted, CONVERTED)
        except UserError:
            raise UserError(f"{wanted.key} is {wanted.text}, but {error}") from None


def _fetch(wanted: Wanted, revision: str | None) -> HubName:
    open_repository = ModelScope if wanted.name.hub == "modelscope" else HuggingFace
    repository = open_repository(wanted, revision)
    if revision == CONVERTED:
        wanted = _converted(wanted, repository)
    name = wanted.name.at(repository.commit)
    folder = copy_of(name, wanted.content, wanted.splits)
    if is_complete(folder):
        return name
    links = _chosen(wanted, repository)
    _download(wanted, repository, list(links.values()))
    _check_all(wanted, repository, list(links.values()))
    with writing(folder):
        _link(folder, links, repository)
    return name


def _converted(wanted: Wanted, repository: Repository) -> Wanted:
    """Returns what is wanted with the configuration, which is a folder there. Raises UserError."""
    if any("/partial-" in file for file in repository.files):
        raise UserError(f"only the beginning of {wanted.text} is there as Parquet")
    folders = {file.partition("/")[0] for file in repository.files if "/" in file}
    if wanted.name.subset is None and (len(folders) == 1 or "default" in folders):
        subset = "default" if "default" in folders else folders.pop()
        return replace(wanted, text=str(replace(wanted.name, subset=subset)))
    return wanted


def _chosen(wanted: Wanted, repository: Repository) -> dict[str, str]:
    """Returns the files of the repository that are read, by their name in the folder. Raises UserError."""
    first = matching(repository.files, FIRST_FILES[wanted.content])
    _download(wanted, repository, first, says=False)
    if wanted.content == "data":
        card = repository.path_of(CARD)
        text = card.read_text("utf-8", "replace") if card is not None else ""
        assert wanted.split is not None
        shown = str(wanted.name)
        split, files = data_set_files(
            repository.files.keys(), text, wanted.name.subset, wanted.split, shown
        )
        if not repository.is_listed and (missing := missing_shards(files)):
            raise absent(wanted, repository, f"the cache lacks {missing}")
        count, suffix = len(files), PurePosixPath(files[0]).suffix.lower()
        return {f"{split}-{i:05d}-of-{count:05d}{suffix}": file for i, file in enumerate(files)}
    if wanted.content == "model":
        index = next(filter(None, map(repository.path_of, first)), Path())
        files = model_files(repository.files.keys(), str(wanted.name), index.parent)
    else:
        patterns = TOKENIZER_FILES if wanted.content == "tokenizer" else (CONFIG,)
        files = matching(repository.files, patterns)
    return {file: file for file in dict.fromkeys(files)}


def _download(
    wanted: Wanted, repository: Repository, files: Sequence[str], says: bool = True
) -> None:
    """Downloads what the cache lacks, and `says` so. Raises UserError."""
    missing = [file for file in files if repository.path_of(file) is None]
    if not missing:
        return
    if repository.offline:
        some = ", ".join(missing[:3]) + (" and more" if missing[3:] else "")
        raise absent(wanted, repository, f"the cache lacks {some}")
    needed = sum(repository.files[file].size or 0 for file in missing)
    existing = next(one for one in (repository.cache, *repository.cache.parents) if one.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise no_room(
            wanted, repository, f"takes {needed / GIGA:.3f} GB and {free / GIGA:.3f} GB are free"
        )
    if says:
        name, size = wanted.name.at(repository.commit[:12]), f"{needed / GIGA:.3f} GB"
        line = f"mindgrpo: downloading {name} ({size}) to {repository.cache}"
        print(line, file=sys.stderr, flush=True)
    with _refused(wanted, repository):
        repository.download(missing)
    if lost := [file for file in missing if repository.path_of(file) is None]:
        raise UserError(
            f"{wanted.key} is {wanted.text}, and {lost[0]} was not downloaded; start again, what has arrived is kept"
        )


def no_room(wanted: Wanted, repository: Repository, why: str) -> UserError:
    variable = "HF_HOME" if wanted.name.hub == "huggingface" else "MODELSCOPE_CACHE"
    return UserError(
        f"{wanted.key} is {wanted.text}, but its download {why} in {repository.cache}; free space there, or set "
        f"{variable} to a folder on another disk"
    )


@contextmanager
def _refused(wanted: Wanted, repository: Repository) -> Iterator[None]:
    """Makes a UserError of whatever ends a download."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        chain: list[BaseException] = [error]
        while (cause := chain[-1].__cause__ or chain[-1].__context__) and cause not in chain:
            chain.append(cause)
        chain += getattr(error, "failed_files", {}).values()
        if any(isinstance(one, OSError) and one.errno in FULL for one in chain):
            raise no_room(wanted, repository, "has filled the disk") from None
        raise UserError(
            f"{wanted.key} is {wanted.text}, whose download has ended early ({first_line(error)}); start again, what "
            "has arrived is kept"
        ) from None


def _check_all(wanted: Wanted, repository: Repository, files: Sequence[str]) -> None:
    """Compares checksums with those of the hub, and removes a file that is another one. Raises UserError."""
    for file in files:
        path = repository.path_of(file)
        assert path is not None
        stored = path.resolve()
        # The Hugging Face hub's cache names files by their checksums.
        known = repository.files[file].checksum or stored.name
        if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", known) and known not in checksums(
            stored, known
        ):
            with suppress(OSError):
                path.unlink()
                stored.unlink(missing_ok=True)
            raise UserError(
                f"{wanted.key} is {wanted.text}, and {file} arrived damaged: its checksum is not the one that the hub "
                "has; it was removed, start again"
            )


def checksums(path: Path, like: str) -> list[str]:
    """Returns the SHA-256 of a file, or for a checksum of 40 digits its SHA-1 as git makes it and as it is."""
    algorithm: Callable[..., Any] = hashlib.sha256 if len(like) == 64 else hashlib.sha1
    plain, of_git = algorithm(), algorithm(f"blob {path.stat().st_size}\0".encode())
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            plain.update(block)
            if len(like) == 40:
                of_git.update(block)
    return [plain.hexdigest(), of_git.hexdigest()]


def _link(folder: Path, links: Mapping[str, str], repository: Repository) -> None:
    """Makes the folder at once: it is complete or not there. Raises OSError."""
    make_cache_directory()
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for name, file in links.items():
            path = repository.path_of(file)
            assert path is not None
            (fresh / name).parent.mkdir(exist_ok=True)
            (fresh / name).symlink_to(path.absolute())
        if folder.name.startswith("data-"):
            described = {
                "_data_files": [{"filename": name} for name in links],
                "_split": next(iter(links)).rsplit("-", 3)[0],
            }
            (fresh / "state.json").write_text(json.dumps(described), encoding="utf-8")
        if folder.exists():  # incomplete
            shutil.rmtree(folder)
        fresh.rename(folder)
    except OSError:
        if not is_complete(folder):  # another process made it
            raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
