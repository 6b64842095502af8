"""Reads repositories of the Hugging Face hub and of ModelScope through their libraries: one revision, files, cache.

Runs in the process of hub_download.py, the only one that imports these libraries.
"""

from __future__ import annotations

import glob
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from mindgrpo.data.hub_names import Content, HubName, copy_of, hub_name, is_complete
from mindgrpo.data.sources import SplitChoice
from mindgrpo.errors import UserError

# As long as no file has this name, it chooses none.
NO_FILE = "no file has this name"


class Unreachable(Exception):
    """Says in words why a hub did not answer."""


@dataclass(frozen=True)
class Wanted:
    """Names what a key asks for; `split` is the choice of a data set's split."""

    key: str
    text: str
    content: Content
    split: SplitChoice | None = None

    @property
    def splits(self) -> tuple[str, ...]:
        choice = self.split
        if choice is None:
            return ()
        return choice.preferred if choice.name is None else (choice.name,)

    @property
    def name(self) -> HubName:
        name = hub_name(self.text)
        assert name is not None
        return name


@dataclass(frozen=True)
class HubFile:
    """`size` in bytes and `checksum`, of SHA-256 or as git makes them, are None where the hub does not say."""

    size: int | None = None
    checksum: str | None = None


class Repository(ABC):
    """One revision of a repository. `offline` says why the hub did not answer, None if it did."""

    commit: str
    files: Mapping[str, HubFile]
    offline: str | None
    # All files of the revision are known, not only those in the cache.
    is_listed: bool
    cache: Path

    @abstractmethod
    def path_of(self, file: str) -> Path | None:
        """Returns where the cache has a file, None if it does not."""

    @abstractmethod
    def download(self, files: Sequence[str]) -> None:
        """Downloads files into the cache. Raises Unreachable, OSError, and errors of the hub's library."""


class HuggingFace(Repository):
    def __init__(self, wanted: Wanted, revision: str | None) -> None:
        from huggingface_hub import HfApi, constants
        from huggingface_hub.errors import HFValidationError, RevisionNotFoundError

        self._wanted, self._name = wanted, wanted.name.name
        self._kind = "dataset" if wanted.content == "data" else "model"
        self._revision = revision or "main"
        self.cache, self.offline, self.is_listed = Path(constants.HF_HUB_CACHE), None, True
        try:
            info: Any = HfApi().repo_info(
                self._name,
                repo_type=self._kind,
                revision=self._revision,
                files_metadata=True,
                timeout=constants.HF_HUB_ETAG_TIMEOUT,
            )
        except HFValidationError as error:
            raise UserError(
                f"{wanted.key} is {wanted.text}, but there is no such path here and it is no name on a hub "
                f"({first_line(error)}); correct it"
            ) from None
        except RevisionNotFoundError:
            raise UserError(
                f"{wanted.key} is {wanted.text}, but {self._name} has no revision {self._revision} on "
                f"{constants.ENDPOINT}; correct what follows @"
            ) from None
        except Exception as error:  # of its own, of its HTTP library, of sockets
            self.offline = self._reason(error)
            self._read_cache(error)
            return
        assert info.sha is not None
        self.commit = info.sha
        self.files = {
            one.rfilename: HubFile(one.size, one.lfs.sha256 if one.lfs else one.blob_id)
            for one in info.siblings or ()
        }

    def _read_cache(self, cause: Exception) -> None:
        """Takes what an earlier download left. Raises UserError where there is nothing."""
        import huggingface_hub
        from huggingface_hub.errors import (
            GatedRepoError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
        )

        wanted, endpoint = self._wanted, huggingface_hub.constants.ENDPOINT
        try:
            folder = Path(
                huggingface_hub.snapshot_download(
                    self._name,
                    repo_type=self._kind,
                    revision=self._revision,
                    local_files_only=True,
                    allow_patterns=[NO_FILE],
                )
            )
        except LocalEntryNotFoundError:
            path = f"{'datasets/' * (self._kind == 'dataset')}{self._name}"
            if isinstance(cause, GatedRepoError):
                raise UserError(
                    f"{wanted.key} is {wanted.text}, whose owners ask for consent: accept their terms at "
                    f"{endpoint}/{path}, and log in with 'hf auth login' or set HF_TOKEN"
                ) from None
            if isinstance(cause, RepositoryNotFoundError):
                what = "data set" if self._kind == "dataset" else "model"
                raise UserError(
                    f"{wanted.key} is {wanted.text}, but there is no such path here and no such {what} on "
                    f"{endpoint}; correct the name, or, if it is private, log in with 'hf auth login' or set HF_TOKEN"
                ) from None
            raise absent(wanted, self, "it is not in the cache") from None
        self.commit, self.is_listed = folder.name, False
        here = (path for path in sorted(folder.rglob("*")) if path.is_file())
        self.files = {path.relative_to(folder).as_posix(): HubFile() for path in here}
        with suppress(Exception):  # older versions keep no list, and others fill caches
            from huggingface_hub import get_cached_repo_tree

            tree = get_cached_repo_tree(self._name, repo_type=self._kind, revision=self.commit)
            self.files, self.is_listed = {one.path: HubFile(one.size) for one in tree}, True

    def _reason(self, error: Exception) -> str:
        from huggingface_hub import constants

        if constants.HF_HUB_OFFLINE:
            return "HF_HUB_OFFLINE is set"
        return f"{constants.ENDPOINT} does not answer ({first_line(error)})"

    def path_of(self, file: str) -> Path | None:
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(self._name, file, revision=self.commit, repo_type=self._kind)
        return Path(path) if isinstance(path, str) else None

    def download(self, files: Sequence[str]) -> None:
        from huggingface_hub import snapshot_download

        for revision in (self._revision, self.commit):
            # The branch first, of which the cache then notes the commit; it may have moved on since.
            folder = snapshot_download(
                self._name,
                repo_type=self._kind,
                revision=revision,
                allow_patterns=[glob.escape(file) for file in files],
            )
            if Path(folder).name == self.commit:
                return


class ModelScope(Repository):
    def __init__(self, wanted: Wanted, revision: str | None) -> None:
        try:
            from modelscope_hub import HubApi, HubConfig
        except ImportError:
            raise UserError(
                f"{wanted.key} is {wanted.text}, and models and data sets of ModelScope need its package; install it "
                "with pip install 'mindgrpo[modelscope]'"
            ) from None
        from modelscope_hub.errors import NotExistError

        self._wanted, self._name = wanted, wanted.name.name
        self._kind = "dataset" if wanted.content == "data" else "model"
        self._api, settings = HubApi(), HubConfig()
        asked = revision or "master"
        self.offline, self.is_listed = None, True
        self.cache = settings.cache_dir
        self._snapshots = (
            self.cache / f"{self._kind}s" / self._name.replace("/", "--") / "snapshots"
        )
        try:
            if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
                raise Unreachable("HF_HUB_OFFLINE is set")
            listed = self._api.legacy.list_repo_files(self._name, self._kind, revision=asked)
        except NotExistError:
            raise UserError(
                f"{wanted.key} is {wanted.text}, but {settings.endpoint} has no {self._kind} {self._name} with the "
                f"revision {asked}; correct the name, or, if it is private, set MODELSCOPE_API_TOKEN"
            ) from None
        except Exception as error:
            is_set = isinstance(error, Unreachable)
            self.offline = (
                str(error)
                if is_set
                else f"{settings.endpoint} does not answer ({first_line(error)})"
            )
            self._read_cache(asked)
            return
        self._listed = [one for one in listed if one.get("Type") != "tree"]
        self.files = {
            one["Path"]: HubFile(one.get("Size"), one.get("Sha256") or None) for one in self._listed
        }
        self.commit = asked if wanted.name.is_pinned else self._newest_commit(asked)
        with suppress(OSError):
            self._noted(asked).parent.mkdir(parents=True, exist_ok=True)
            self._noted(asked).write_text(self.commit, "utf-8")

    def _newest_commit(self, asked: str) -> str:
        """Returns the commit of the file that was changed last, at which all files are as they are listed."""
        newest: dict[str, Any] = max(
            self._listed, key=lambda one: one.get("CommittedDate") or 0, default={}
        )
        commit = str(newest.get("Revision") or "")
        if not HubName("modelscope", self._name, revision=commit).is_pinned:
            raise UserError(
                f"{self._wanted.key} is {self._wanted.text}, but ModelScope does not say at which commit {asked} is; "
                f"name one: {self._wanted.name.at('COMMIT')}"
            )
        return commit

    def _read_cache(self, asked: str) -> None:
        """Takes what an earlier download completed. Raises UserError where none did."""
        wanted, self.files, self.is_listed = self._wanted, {}, False
        self.commit = asked
        if not wanted.name.is_pinned:
            try:
                self.commit = self._noted(asked).read_text("utf-8")
            except OSError:
                raise absent(wanted, self, "it is not in the cache") from None
        if not is_complete(copy_of(wanted.name.at(self.commit), wanted.content, wanted.splits)):
            raise absent(wanted, self, "the cache does not have all of it")

    def _noted(self, asked: str) -> Path:
        """Returns the file that notes which commit a branch was at last; the library itself keeps none."""
        return self._snapshots.with_name("refs") / asked.replace("/", "--")

    def path_of(self, file: str) -> Path | None:
        path = self._snapshots / self.commit / file
        return path if path.is_file() else None

    def download(self, files: Sequence[str]) -> None:
        self._api.download_repo(
            self._name,
            repo_type=self._kind,
            revision=self.commit,
            # Its own layout, not the one of older versions, which has one revision alone.
            local_dir=self._snapshots / self.commit,
            file_list=[one for one in self._listed if one["Path"] in files],
        )


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def absent(wanted: Wanted, repository: Any, why: str) -> UserError:
    """Says what to download on another machine, and what to do with it."""
    name, is_data = wanted.name, wanted.content == "data"
    target = PurePosixPath(name.name).name
    revision = f" --revision {name.revision}" if name.revision else ""
    if name.hub == "modelscope":
        kind = "--dataset" if is_data else "--model"
        command = f"modelscope download {kind} {name.name}{revision} --local_dir {target}"
    else:
        kind = " --repo-type dataset" if is_data else ""
        command = f"hf download {name.name}{kind}{revision} --local-dir {target}"
    where = f"the folder in {target} that holds its files" if is_data else target
    return UserError(
        f"{wanted.key} is {wanted.text}, but {why} ({repository.cache}), there is no such path here, and "
        f"{repository.offline}; run '{command}' where there is network, copy {target} here and set {wanted.key} to "
        f"{where}"
    )
