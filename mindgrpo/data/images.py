"""Reads the images of rows: what a column may hold, the size from a file's header, and patches.

A reference has a path or the bytes of a file, never pixels. As `PIL.Image.open` gives an image, so it is used: of an
animation the first frame, without turning it as its EXIF orientation says (Pillow itself turns TIFF files), and
without applying its ICC profile. What the bytes are is not trusted: everything that goes wrong is a UserError.
"""

from __future__ import annotations

import base64
import hashlib
import io
import math
import os
import re
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from mindgrpo.data.pixels import Grid, PixelRule, UnusableShape, grid_for, in_rgb, patches_of
from mindgrpo.errors import UserError
from mindgrpo.strict_files import no_path

MAX_FILE_BYTES = 1 << 26
# By the header, and what decoding takes for each at most: 20 bytes for WEBP, 16 for other formats.
MAX_PIXELS = 64_000_000
BYTES_PER_PIXEL = 20
# Others are not tried: some of Pillow's plugins run programs (EPS), and rare formats have the most errors.
FORMATS = ("PNG", "JPEG", "GIF", "BMP", "PPM", "WEBP", "TIFF")
FORMS = "a path, the bytes of a file, a data:image/...;base64 URI, or an object with one of these"
# Keys of content parts (OpenAI's, Qwen's) that hold an image, and types of such parts.
SOURCE_KEYS = ("image", "image_url", "url")
PART_TYPES = (None, "image", "image_url", "input_image")
# `detail` chooses how many tokens OpenAI's models spend on an image.
IGNORED_KEYS = ("type", "detail")
MAX_NESTING = 3
THUMBNAIL_SIDE, THUMBNAIL_BYTES, THUMBNAIL_COLORS = 160, 8192, 64
SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
SHOWN_LETTERS = 100
# Filters of warnings belong to the process; two threads must not change them at once.
WARNING_FILTERS = threading.Lock()


@dataclass(frozen=True)
class ImageFile:
    """An image of a row: the file's bytes `data` where they are held, else the file at `path`.

    `where` is the row's place and the image's number in it: "train.jsonl:3, image 2". Every method raises UserError
    for what cannot be read or decoded.
    """

    where: str
    path: Path | None = None
    data: bytes | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """Names the image at the beginning of a sentence."""
        if self.path is not None:
            return f"{self.where}: the file '{self.path}'"
        return f"{self.where}: the image of {len(self.data or b'')} bytes"

    def content(self) -> bytes:
        """Returns the bytes of the file, at most MAX_FILE_BYTES."""
        if self.data is not None or self.path is None:
            data = self.data or b""
            self._check_length(len(data))
            return data
        with self._stream() as stream:
            try:
                return stream.read()
            except OSError as error:
                raise self._unreadable(error) from error

    def in_memory(self) -> ImageFile:
        """Returns the same image with its bytes: later calls do not see what was written to the file since."""
        return replace(self, data=self.content())

    def as_text(self) -> str:
        """Returns the absolute path, or a data URI of bytes that are held."""
        if self.data is None and self.path is not None:
            return str(self.path.absolute())
        return f"data:image/*;base64,{base64.b64encode(self.data or b'').decode()}"

    def size(self) -> tuple[int, int]:
        """Returns (width, height) in pixels from the header: of a file only the beginning is read in most formats."""
        with self._opened() as image:
            return image.size

    def grid(self, rule: PixelRule) -> Grid:
        """Returns the grid of patches from the header."""
        width, height = self.size()
        with self._shaped():
            return grid_for(height, width, rule)

    def digest(self, rule: PixelRule) -> str:
        """Returns the SHA-256, in hex, of the rule and the file's bytes: equal ones have equal patches."""
        return hashlib.sha256(rule.text().encode() + b"\0" + self.content()).hexdigest()

    def decode(self) -> Image.Image:
        """Returns the image in RGB, in the size that its header says.

        Takes up to BYTES_PER_PIXEL bytes a pixel, beside the file's bytes.
        """
        with self._opened() as image:
            size = image.size
            picture = in_rgb(image)
        if picture.size != size:
            raise UserError(
                f"{self.name} is {size[0]} x {size[1]} pixels by its header, but {picture.width} x {picture.height} "
                "when decoded; save it anew"
            )
        return picture

    def patches(self, rule: PixelRule) -> tuple[NDArray[np.float32], Grid]:
        """Returns what `patches_of` makes of the decoded image: float32 [P, values of a patch], and the grid."""
        picture = self.decode()
        with self._shaped():
            return patches_of(picture, rule)

    def thumbnail(self) -> bytes:
        """Returns a PNG of at most THUMBNAIL_SIDE pixels a side and THUMBNAIL_BYTES bytes."""
        picture, side = self.decode(), THUMBNAIL_SIDE
        while True:
            small, stream = picture.copy(), io.BytesIO()
            small.thumbnail((side, side))
            small.quantize(THUMBNAIL_COLORS).save(stream, "PNG", optimize=True)
            if stream.tell() <= THUMBNAIL_BYTES:
                return stream.getvalue()
            side -= side // 4

    @contextmanager
    def _opened(self) -> Iterator[Image.Image]:
        """Gives Pillow's image before it is decoded."""
        with _pillow(self.name), self._stream() as stream:
            # Pillow warns of images that it takes for bombs, and of odd metadata.
            with WARNING_FILTERS, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                image = Image.open(stream, formats=FORMATS)
            with image:
                _check_image(image, self.name)
                yield image

    def _stream(self) -> BinaryIO:
        if self.data is not None or self.path is None:
            return io.BytesIO(self.content())
        try:
            if not self.path.is_file():
                missing = "does not exist" if not self.path.exists() else "is no regular file"
                raise UserError(
                    f"{self.name} {missing}; correct the path (a relative one starts at the data file's folder)"
                )
            self._check_length(self.path.stat().st_size)
            return self.path.open("rb")
        except (OSError, ValueError) as error:  # ValueError: half characters in the name
            raise self._unreadable(error) from error

    def _check_length(self, length: int) -> None:
        if length == 0:
            raise UserError(f"{self.name} is empty; give an image or remove the row")
        if length > MAX_FILE_BYTES:
            raise UserError(
                f"{self.name} has {length} bytes, but an image may have at most {MAX_FILE_BYTES}; save it smaller"
            )

    def _unreadable(self, error: Exception) -> UserError:
        reason = getattr(error, "strerror", None) or str(error)
        return UserError(f"{self.name} cannot be read ({reason}); make it readable")

    @contextmanager
    def _shaped(self) -> Iterator[None]:
        try:
            yield
        except UnusableShape as error:
            raise UserError(f"{self.name} {error}; crop it or remove the row") from error


@contextmanager
def _pillow(name: str) -> Iterator[None]:
    """Makes a UserError of whatever Pillow raises inside; `name` begins the sentence."""
    try:
        yield
    except UserError:
        raise
    except UnidentifiedImageError as error:
        raise UserError(
            f"{name} is no image that can be read; give a file of one of the formats {', '.join(FORMATS)}"
        ) from error
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        reason = str(error).partition(",")[0]
        raise UserError(f"{name} is too large for Pillow ({reason}); save it smaller") from error
    # The bytes may be anything, and for some of them plugins raise KeyError, ZeroDivisionError, zlib.error and others
    # that no list in Pillow's documentation names.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise UserError(
            f"{name} cannot be decoded ({reason}); replace the file, which is damaged or not complete"
        ) from error


def _check_image(image: Image.Image, name: str) -> None:
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise UserError(
            f"{name} has {width} x {height} pixels, but an image may have at most {MAX_PIXELS}; save it smaller"
        )
    if image.mode == "F" or image.mode.startswith("I"):
        raise UserError(
            f"{name} has more than 8 bits a pixel of grey (Pillow's mode {image.mode}), of which all but the darkest "
            "256 levels would become white; convert it to 8 bits"
        )


def image_files(value: object, where: str, folder: Path) -> tuple[ImageFile, ...]:
    """Returns the images that a row's column holds: one or a list of them; none for null, an empty text or list.

    `where` is the row's place, `folder` the one that relative paths start at. An image is

    - a path, also as file:// URI; `~` is a letter like others;
    - the bytes of a file, or a `data:image/...;base64,` URI;
    - `{"bytes": ..., "path": ...}` of Hugging Face data sets, where bytes come before the path;
    - a content part with one of `image`, `image_url` and `url`, which holds any of these, or `{"url": ...}`;
    - a PIL image, which is kept as an RGB PNG of the same patches.

    Reads no file. Raises UserError for everything else, also for URLs: nothing is downloaded.
    """
    is_empty = isinstance(value, str) and not value
    if value is None or is_empty or (isinstance(value, float) and math.isnan(value)):
        return ()
    if isinstance(value, np.ndarray) and value.dtype == object:
        value = value.tolist()
    items = value if isinstance(value, list | tuple) else [value]
    return tuple(
        _image_file(item, f"{where}, image {number}", folder)
        for number, item in enumerate(items, 1)
    )


def images_as_text(value: object, where: str) -> object:
    """Returns an image or list of images as JSON can hold them: absolute paths of files that exist, and data URIs.

    Other values stay as they are. Raises UserError for an image that cannot be held.
    """
    items = value if isinstance(value, list | tuple) else [value]
    if not any(map(_is_held, items)):
        return value
    texts = [image.as_text() for image in image_files(value, where, Path())]
    return texts if isinstance(value, list | tuple) else texts[0]


def _is_held(item: object) -> bool:
    if isinstance(item, Mapping):
        return any(_is_held(own) for own in item.values())
    if isinstance(item, str):
        return no_path(item) is None and Path(item).is_file()
    return isinstance(item, os.PathLike | bytes | bytearray | memoryview | Image.Image)


def _image_file(item: object, where: str, folder: Path) -> ImageFile:
    item = _unwrapped(item, where)
    if isinstance(item, os.PathLike):
        return ImageFile(where, folder / os.fsdecode(item))
    if isinstance(item, str):
        return _of_text(item, where, folder)
    if isinstance(item, bytes | bytearray | memoryview):
        return ImageFile(where, data=bytes(item))
    if isinstance(item, Image.Image):
        return ImageFile(where, data=_as_png(item, where))
    raise UserError(f"{where} is a {type(item).__name__}, but an image must be {FORMS}")


def _unwrapped(item: object, where: str) -> object:
    """Returns what objects of data sets and content parts hold."""
    for _ in range(MAX_NESTING):
        if not isinstance(item, Mapping):
            return item
        kind = item.get("type")
        if kind not in PART_TYPES:
            raise UserError(
                f"{where} is an object of type {_shown(kind)}, but only images can be here; remove it from the list"
            )
        # Tables fill in null for the keys of other rows' objects.
        filled = {k: v for k, v in item.items() if v is not None and k not in IGNORED_KEYS}
        if filled and filled.keys() <= {"bytes", "path"}:
            if "bytes" in filled and not isinstance(
                filled["bytes"], bytes | bytearray | memoryview
            ):
                raise UserError(
                    f'{where}: "bytes" is a {type(filled["bytes"]).__name__}, but must be the bytes of a file; where '
                    "rows are text, give a path or a data:image/...;base64 URI"
                )
            item = filled.get("bytes", filled.get("path"))
        elif len(filled) == 1 and next(iter(filled)) in SOURCE_KEYS:
            (item,) = filled.values()
        else:
            keys = ", ".join(map(_shown, filled)) or "no value"
            raise UserError(
                f"{where} is an object with {keys}, but must have one of {', '.join(SOURCE_KEYS)}, or bytes and "
                "path, and nothing else; limits of pixels are those of the run"
            )
    raise UserError(f"{where} has objects inside objects; give {FORMS}")


def _of_text(text: str, where: str, folder: Path) -> ImageFile:
    if text[:5].lower() == "data:":
        return ImageFile(where, data=_of_data_uri(text, where))
    scheme = SCHEME.match(text)
    if scheme is not None and scheme[1].lower() != "file":
        raise UserError(
            f"{where} is the URL {_shown(text)}, but images are read from files only; download it and give its path"
        )
    if scheme is not None:
        # Some data sets have relative paths behind file://, as Qwen's own loader takes them.
        text = unquote(text[scheme.end() :].removeprefix("localhost"))
    if not text.strip():
        raise UserError(f"{where} is an empty path; give {FORMS}")
    try:
        reason = no_path(text)
    except UnicodeEncodeError:
        reason = "a path has no half characters"
    if reason is not None:
        raise UserError(
            f"{where} is no path: {_shown(text)} has {len(text)} characters, and {reason}; give a path, or base64 "
            "behind data:image/png;base64,"
        )
    return ImageFile(where, folder / text)


def _of_data_uri(text: str, where: str) -> bytes:
    head, _, payload = text.partition(",")
    words = head.lower()
    if not words.startswith("data:image/") or not words.endswith(";base64"):
        raise UserError(
            f"{where} is a data URI that begins with {_shown(head)}; write it as data:image/png;base64,..."
        )
    try:
        return base64.b64decode("".join(payload.split()), validate=True)
    except ValueError as error:
        raise UserError(
            f"{where} is a data URI of which the base64 cannot be decoded ({error}); encode the file again"
        ) from error


def _as_png(image: Image.Image, where: str) -> bytes:
    name = f"{where}: the PIL image"
    stream = io.BytesIO()
    _check_image(image, name)
    with _pillow(name):
        in_rgb(image).save(stream, "PNG", compress_level=1)
    return stream.getvalue()


def _shown(value: object) -> str:
    text = str(value)
    return repr(text if len(text) <= SHOWN_LETTERS else f"{text[:SHOWN_LETTERS]}...")
