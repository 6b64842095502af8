"""Puts the images of rows into prompts: places in messages, tokens in the places, and files to read patches from.

An image's size is read from its file's header, so that a prompt's length is known without decoding pixels, which no one
holds for longer than it takes to cut them into patches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mindgrpo.algorithm.image_patches import Grid
from mindgrpo.algorithm.image_tokens import ImageTable
from mindgrpo.data.images import ImageFile, image_files
from mindgrpo.data.messages import Message
from mindgrpo.data.pixels import PixelRule
from mindgrpo.errors import UserError

# Where a text has an image; verl's and ms-swift's data have it.
MARK = "<image>"
# Columns of rows that hold images.
IMAGE_COLUMNS = ("images", "image")
# In ids, until all ranks have numbered the images.
UNNUMBERED = -1


@dataclass(frozen=True)
class SizedImage:
    """An image of a row: `key` is equal for equal files, and `grid` is (rows, columns) of features."""

    key: str
    grid: Grid


@dataclass
class RunImages:
    """The images of a run's prompts. `token` stands for one in texts, and `rule` says how patches are made.

    All ranks have to number the same images in the same order.
    """

    rule: PixelRule
    token: int
    table: ImageTable = field(default_factory=ImageTable)
    _numbers: dict[str, int] = field(default_factory=dict)
    _files: list[Callable[[], ImageFile]] = field(default_factory=list)

    def sized(self, image: ImageFile) -> SizedImage:
        """Reads an image's header. Raises UserError."""
        rows, columns = image.grid(self.rule)
        is_file = image.data is None
        key = str(image.path) if is_file else hashlib.sha256(image.data or b"").hexdigest()
        return SizedImage(key, (rows // self.rule.merge_size, columns // self.rule.merge_size))

    def number(self, image: SizedImage, read: Callable[[], ImageFile]) -> int:
        """Returns the number of an image in `table`, a new one unless an equal file has one; `read` reads the row."""
        key = f"{image.key} {image.grid}"
        if key not in self._numbers:
            self._numbers[key] = self.table.add(*image.grid)
            self._files.append(read)
        number = self._numbers[key]
        if self._files[number] is _released:
            self._files[number] = read
        return number

    def release(self, numbers: Iterable[int]) -> None:
        """Frees what `number` was given to read these images, which have to be numbered again before they are read."""
        for number in numbers:
            self._files[number] = _released

    def patches(self, number: int) -> np.ndarray:
        """Reads and decodes image `number`, and returns its patches, float32 [P, values of a patch].

        Raises UserError where the file has changed since its size was read.
        """
        image = self._files[number]()
        patches, (rows, columns) = image.patches(self.rule)
        grid = rows // self.rule.merge_size, columns // self.rule.merge_size
        if grid != self.table.grids[number]:
            raise UserError(
                f"{image.name} has changed since the run read its size; start the run again, and give a file that "
                "nothing writes to"
            )
        return patches

    def file(self, number: int) -> ImageFile:
        """Reads the row of image `number` again."""
        return self._files[number]()

    def expanded(self, ids: Sequence[int], images: Sequence[SizedImage], where: str) -> list[int]:
        """Returns the ids of a rendered prompt with UNNUMBERED for each feature of its images.

        Raises UserError unless the text has a place for each image.
        """
        count = sum(own == self.token for own in ids)
        if count != len(images):
            raise UserError(
                f"{where}: the chat template writes {count} places for {len(images)} images (token {self.token}, the "
                "model's image_token_id); set rl_config.chat_template to the model's own, and do not write that token "
                "in a text"
            )
        if ids and ids[-1] == self.token:
            raise UserError(
                f"{where}: the prompt ends with an image, so nothing asks about it; end it with text, or use a chat "
                "template that opens the assistant's turn"
            )
        waiting, whole = iter(images), list[int]()
        for own in ids:
            if own == self.token:
                rows, columns = next(waiting).grid
                whole += [UNNUMBERED] * (rows * columns)
            else:
                whole.append(own)
        return whole


def _released() -> ImageFile:
    raise RuntimeError("an image is read after it was released")


def no_images(token: int) -> RunImages:
    """Returns what a run has whose data holds no image."""
    return RunImages(PixelRule(), token)


def with_images(
    messages: Sequence[Message], column: object, where: str, folder: Path
) -> tuple[tuple[Message, ...], tuple[ImageFile, ...]]:
    """Returns messages whose content has a part for each image, in order, and the images.

    `column` is what the row has in IMAGE_COLUMNS. Its images stand where texts have MARK, or parts of type image
    without a source; without any place they come before the last message's text. Raises UserError for other numbers of
    images than of places.
    """
    own = image_files(column, where, folder)
    placed = [_parts(message, bool(own)) for message in messages]
    sources = [part for content in placed for part in content if part["type"] == "image"]
    if own and not sources:
        placed[-1] = [{"type": "image"} for _ in own] + placed[-1]
        sources = placed[-1][: len(own)]
    waiting, images = iter(own), list[ImageFile]()
    for number, part in enumerate(sources, 1):
        source = part.pop("source", None)
        if source is not None:
            images += image_files([source], f"{where}, part {number}", folder)
        elif (image := next(waiting, None)) is not None:
            images.append(image)
        else:
            raise _mismatch(where, len(own), len(sources))
    if next(waiting, None) is not None:
        raise _mismatch(where, len(own), len(sources))
    if not images:
        return tuple(messages), ()
    pairs = zip(messages, placed, strict=True)
    return tuple(
        {**message, "content": content}
        if any(part["type"] == "image" for part in content)
        else message
        for message, content in pairs
    ), tuple(images)


def _mismatch(where: str, images: int, places: int) -> UserError:
    return UserError(
        f"{where} has {images} images for {places} places ({MARK} in texts, or parts of type image without a source of "
        "their own); give each image one place"
    )


def _parts(message: Message, has_images: bool) -> list[dict[str, Any]]:
    """Returns a message's content as parts; parts of type image have their `source` if they hold one."""
    content = message["content"]
    if not isinstance(content, str):
        return [dict(part) for part in content]
    if not has_images or MARK not in content:
        return [{"type": "text", "text": content}]
    made: list[dict[str, Any]] = []
    for index, text in enumerate(content.split(MARK)):
        if index:
            made.append({"type": "image"})
        if text:
            made.append({"type": "text", "text": text})
    return made


def text_of(content: Any) -> str:
    """Returns a message's content as text, with MARK in the place of each image."""
    if isinstance(content, str):
        return content
    return "".join(MARK if part["type"] == "image" else str(part["text"]) for part in content)


def image_column(row: Mapping[str, Any]) -> object:
    """Returns what a row has in the first of IMAGE_COLUMNS that is not empty."""
    for name in IMAGE_COLUMNS:
        value = row.get(name)
        if value is not None and not (isinstance(value, str | list | tuple) and not len(value)):
            return value
    return None
