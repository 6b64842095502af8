"""Images of rows: the forms of a reference, what is refused and how it is said, headers, damaged files, memory.

Does NOT prove: that Pillow's decoders, which are written in C, are safe for every file.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import pickle
import random
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from PIL import Image
from tables import each_row

from mindgrpo.data import images
from mindgrpo.data.images import (
    BYTES_PER_PIXEL,
    FORMATS,
    THUMBNAIL_BYTES,
    THUMBNAIL_SIDE,
    ImageFile,
    image_files,
)
from mindgrpo.data.pixels import PixelRule, num_tokens, patches_of
from mindgrpo.errors import UserError

RULE = PixelRule(min_pixels=56 * 56, max_pixels=28 * 28 * 16)
WHERE = "train.jsonl:3"
RNG = np.random.default_rng(7)


def drawn(width: int = 40, height: int = 30, bands: int = 3) -> Image.Image:
    pixels = RNG.integers(0, 256, (height, width, bands), np.uint8)
    return Image.fromarray(pixels[..., 0] if bands == 1 else pixels)


def coded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


PICTURE = drawn()
PNG = coded(PICTURE)
URI = "data:image/png;base64," + base64.b64encode(PNG).decode()


def of_bytes(data: bytes) -> ImageFile:
    return ImageFile(f"{WHERE}, image 1", data=data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data file's folder with images, under another one than the current folder."""
    (tmp_path / "sub").mkdir()
    for name in ("a.png", "sub/b c.png", "~", "é.png"):
        (tmp_path / name).write_bytes(PNG)
    return tmp_path


PATHS: list[Any] = [
    "a.png",
    "./sub/../a.png",
    "sub/b c.png",
    "~",
    "é.png",
    "file://a.png",
    Path("a.png"),
    {"path": "a.png"},
    {"bytes": None, "path": "a.png"},
    {"image": "a.png"},
    {"type": "image", "image": "a.png"},
    {"type": "image", "image": "a.png", "text": None},
    {"type": "image", "image": {"path": "a.png"}},
    {"type": "image_url", "image_url": {"url": "a.png", "detail": "high"}},
    {"type": "image_url", "image_url": "a.png"},
    {"type": "input_image", "image_url": "a.png", "detail": "auto"},
    {"url": "file://a.png"},
]
HELD: list[Any] = [
    PNG,
    bytearray(PNG),
    memoryview(PNG),
    {"bytes": PNG, "path": "is/not/read.png"},
    {"bytes": PNG, "path": None},
    {"type": "image", "image": PNG},
    URI,
    "DATA:image/PNG;charset=utf-8;Base64," + URI.partition(",")[2],
    URI[:60] + "\n " + URI[60:],
    {"type": "image_url", "image_url": {"url": URI}},
    {"image": {"bytes": PNG}},
    PICTURE,
    {"type": "image", "image": PICTURE},
]


@each_row("value", PATHS + HELD)
def test_every_form_of_a_reference_gives_the_same_patches(value: Any, folder: Path) -> None:
    (image,) = image_files(value, WHERE, folder)
    assert image.where == "train.jsonl:3, image 1"
    expected, grid = patches_of(PICTURE, RULE)
    patches, own = image.patches(RULE)
    assert (patches.tobytes(), own, image.grid(RULE), image.size()) == (
        (expected.tobytes(), grid, grid, PICTURE.size)
    )


def test_file_uris_are_absolute_or_relative_and_percent_encoded(folder: Path) -> None:
    path = folder / "sub" / "b c.png"
    uris = [path.as_uri(), f"file://localhost{path.as_posix()}", "FILE://sub/b%20c.png", str(path)]
    assert [image.path for image in image_files(uris, WHERE, folder)] == [path] * 4


def test_a_column_holds_none_one_or_several(folder: Path) -> None:
    for empty in (None, [], (), "", float("nan")):
        assert image_files(empty, WHERE, folder) == ()
    several = image_files(["a.png", PNG, {"path": "é.png"}], WHERE, folder)
    assert [image.where for image in several] == [f"{WHERE}, image {n}" for n in (1, 2, 3)]
    table = np.array([{"path": "a.png"}, {"path": "~"}], object)
    paths = [image.path for image in image_files(table, WHERE, folder)]
    assert paths == [folder / "a.png", folder / "~"]


def test_references_are_small_to_show_and_can_be_sent_to_other_processes() -> None:
    image = of_bytes(PNG)
    assert len(repr(image)) < 100
    assert pickle.loads(pickle.dumps(image)) == image


@each_row(
    ("value", "message"),
    [
        (5, "is a int, but an image must be a path, the bytes of a file, a data:"),
        ([None], "is a NoneType, but"),
        ([["a.png"]], "is a list, but"),
        (np.zeros((2, 2, 3), np.uint8), "is a ndarray, but"),
        ([""], "is an empty path"),
        ("file://", "is an empty path"),
        (
            "https://x.org/a.png",
            "is the URL 'https://x.org/a.png', .* download it and give its path",
        ),
        ({"url": "HTTP://x.org/" + "a" * 500}, r"is the URL 'HTTP://x.org/a+\.\.\.', but"),
        ("s3://bucket/a.png", "is the URL 's3://bucket/a.png'"),
        (base64.b64encode(PNG).decode(), "is no path: .* has .* behind data:image/png;base64,"),
        ("a\0.png", "is no path: .* a path has no NUL"),
        ("\ud800.png", "is no path: .* a path has no half characters"),
        ("data:image/png,xyz", "data URI that begins with 'data:image/png'; write it as"),
        ("data:text/plain;base64,AAAA", "data URI that begins with 'data:text/plain;base64'"),
        ("data:image/png;base64,A", "base64 cannot be decoded"),
        ("data:image/png;base64,AA?=", "base64 cannot be decoded"),
        ("data:image/png;base64,ää==", "base64 cannot be decoded"),
        ({}, "is an object with no value, but must have one of image, image_url, url"),
        ({"bytes": None, "path": None}, "is an object with no value"),
        ({"bytes": "iVBOR"}, '"bytes" is a str, but must be the bytes'),
        ({"type": "text", "text": "x"}, "is an object of type 'text', but only images"),
        ({"image": "a", "url": "b"}, "is an object with 'image', 'url', but must have one"),
        ({"image": "a", "max_pixels": 5}, "with 'image', 'max_pixels', .* limits of pixels"),
        ({"image": {"image": {"image": {"image": "a"}}}}, "has objects inside objects"),
        ({"image": 5}, "is a int, but"),
    ],
)
def test_what_is_no_reference_is_refused(value: Any, message: str, folder: Path) -> None:
    with pytest.raises(UserError, match=message) as caught:
        image_files(value, WHERE, folder)
    assert str(caught.value).startswith("train.jsonl:3, image 1")
    assert len(str(caught.value)) < 500


def test_the_second_image_of_a_row_is_named(folder: Path) -> None:
    with pytest.raises(UserError, match="^train.jsonl:3, image 2 is a int"):
        image_files(["a.png", 5], WHERE, folder)


def refused(image: ImageFile, message: str) -> None:
    """Every method that reads refuses it in one sentence with the place."""
    for method in (image.content, image.in_memory, image.size, image.decode):
        with pytest.raises(UserError, match=message) as caught:
            method()
        assert str(caught.value).startswith(f"{WHERE}, image 1: the ")
    for ruled in (image.grid, image.digest, image.patches):
        with pytest.raises(UserError, match=message):
            ruled(RULE)


def test_files_that_cannot_be_read_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "empty.png").touch()
    os.mkfifo(folder / "pipe.png")
    with (folder / "large.png").open("wb") as large:
        large.truncate(images.MAX_FILE_BYTES + 1)
    (folder / "loop.png").symlink_to("loop.png")
    for name, message in (
        ("missing.png", "the file '/.*/missing.png' does not exist; correct the path"),
        ("sub", "is no regular file"),
        ("pipe.png", "is no regular file"),
        ("a.png/b.png", "does not exist"),
        ("empty.png", "is empty; give an image or remove the row"),
        ("large.png", "has 67108865 bytes, but an image may have at most 67108864"),
        ("loop.png", "cannot be read|does not exist"),
    ):
        (image,) = image_files(name, WHERE, folder)
        refused(image, message)
    for path in (Path("\ud800.png"), Path("a\0.png"), Path("a" * 300)):
        (image,) = image_files(path, WHERE, folder)
        refused(image, "cannot be read|does not exist")
    refused(of_bytes(b""), "the image of 0 bytes is empty")
    refused(of_bytes(bytes(images.MAX_FILE_BYTES + 1)), "has 67108865 bytes")

    def denied(self: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    (image,) = image_files("a.png", WHERE, folder)
    refused(image, r"cannot be read \(Permission denied\); make it readable")


def with_size(width: int, height: int, data: bytes = PNG) -> bytes:
    """A PNG of which the header has another size."""
    header = b"IHDR" + width.to_bytes(4, "big") + height.to_bytes(4, "big") + data[24:29]
    return data[:12] + header + crc32(header).to_bytes(4, "big") + data[33:]


def grey(dtype: Any, form: str) -> bytes:
    return coded(Image.fromarray(np.full((8, 8), 900, dtype)), form)


UNREADABLE = "is no image that can be read; give a file of one of the formats PNG, JPEG"


@each_row(
    ("data", "message"),
    [
        (b"no image at all", UNREADABLE),
        (b"\x89PNG\r\n\x1a\n", UNREADABLE),
        (coded(PICTURE, "EPS"), UNREADABLE),
        (coded(PICTURE, "ICO"), UNREADABLE),
        (coded(PICTURE, "TGA"), UNREADABLE),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", UNREADABLE),
        (grey(np.uint16, "PNG"), r"more than 8 bits a pixel .*I;16.* convert it to 8 bits"),
        (grey(np.int32, "TIFF"), "Pillow's mode I"),
        (grey(np.float32, "TIFF"), "Pillow's mode F"),
        (grey(np.uint16, "TIFF"), "Pillow's mode I;16"),
        (b"P2 1 1 999 998", "Pillow's mode I"),
        (with_size(8001, 8000), "has 8001 x 8000 pixels, but an image may have at most 64000000"),
        (with_size(9500, 9500), r"too large for Pillow \(Image size \(90250000 pixels\) exceeds"),
        (with_size(10**6, 10**6), r"too large for Pillow \(Image size"),
        (with_size(2**31 - 1, 2**31 - 1), r"too large for Pillow"),
    ],
)
def test_headers_that_are_refused_are_so_before_anything_is_decoded(
    data: bytes, message: str, recwarn: pytest.WarningsRecorder
) -> None:
    image = of_bytes(data)
    for method in (image.size, image.decode):
        with pytest.raises(UserError, match=message) as caught:
            method()
        assert str(caught.value).startswith(f"{WHERE}, image 1: the image of ")
    assert image.content() == data and image.digest(RULE)
    assert not recwarn.list


@each_row("form", FORMATS)
def test_files_that_were_cut_are_refused_though_their_header_is_whole(form: str) -> None:
    whole = coded(drawn(300, 200), form)
    cut = of_bytes(whole[: len(whole) * 2 // 3])
    with pytest.raises(UserError, match="image 1: the image of .* bytes (cannot be dec|is no im)"):
        cut.patches(RULE)
    if form not in ("WEBP", "TIFF"):
        assert cut.size() == (300, 200)


def test_images_that_are_too_long_are_refused() -> None:
    for width, height in ((30000, 1), (1, 201)):
        image = of_bytes(coded(Image.new("L", (width, height))))
        assert image.size() == (width, height)
        for method in (image.grid, image.patches):
            message = (
                f"bytes is {width} x {height} pixels, but one side may be at most 200 .*; crop"
            )
            with pytest.raises(UserError, match=f"^{WHERE}, image 1: the image of .* {message}"):
                method(RULE)


def test_an_image_of_one_pixel_is_enlarged() -> None:
    image = of_bytes(coded(Image.new("RGB", (1, 1), (255, 0, 0))))
    patches, grid = image.patches(RULE)
    assert (image.size(), grid, num_tokens(grid, RULE)) == ((1, 1), (4, 4), 4)
    assert (patches == patches[0]).all()


def mode(name: str, bands: int) -> Image.Image:
    return Image.frombytes(name, (40, 30), RNG.integers(0, 256, 1200 * bands, np.uint8).tobytes())


@each_row(
    "image",
    [mode(*m) for m in (("LA", 2), ("PA", 2), ("CMYK", 4), ("RGBA", 4), ("HSV", 3), ("L", 1))],
)
def test_pil_images_of_any_mode_give_their_patches(image: Image.Image, folder: Path) -> None:
    (reference,) = image_files(image, WHERE, folder)
    assert reference.patches(RULE)[0].tobytes() == patches_of(image, RULE)[0].tobytes()


def test_pil_images_that_cannot_be_used_are_refused(folder: Path) -> None:
    for image, message in (
        (Image.fromarray(np.full((8, 8), 900, np.uint16)), "8 bits a pixel of grey"),
        (Image.open(io.BytesIO(PNG[:-300])), "cannot be decoded"),
        (Image.new("La", (8, 8)), "cannot be decoded"),
        (Image.new("1", (8001, 8000)), "8001 x 8000 pixels"),
    ):
        with pytest.raises(UserError, match=f"^{WHERE}, image 2: the PIL image .*{message}"):
            image_files([PNG, image], WHERE, folder)


def test_animations_are_their_first_frame_and_exif_turns_nothing() -> None:
    frames = [Image.new("RGB", (40, 30), colour) for colour in ("red", "lime", "blue")]
    expected = patches_of(frames[0], RULE)[0].tobytes()
    for form in ("GIF", "PNG", "TIFF"):
        data = coded(frames[0], form, save_all=True, append_images=frames[1:])
        assert of_bytes(data).patches(RULE)[0].tobytes() == expected, form
    webp = coded(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True)
    assert of_bytes(webp).patches(RULE)[0].tobytes() == expected
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = of_bytes(coded(PICTURE, exif=exif))
    assert Image.open(io.BytesIO(turned.content())).getexif()[0x0112] == 6
    assert turned.size() == (40, 30)
    assert turned.patches(RULE)[0].tobytes() == patches_of(PICTURE, RULE)[0].tobytes()
    # Pillow turns TIFF files itself, and says so in the size.
    tiff = of_bytes(coded(PICTURE, "TIFF", tiffinfo={0x0112: 6}))
    assert tiff.size() == tiff.decode().size == (30, 40)


def test_digests_name_bytes_and_rule(folder: Path) -> None:
    (path, held) = image_files(["a.png", PNG], WHERE, folder)
    digest = hashlib.sha256(RULE.text().encode() + b"\0" + PNG).hexdigest()
    assert path.digest(RULE) == held.digest(RULE) == digest
    assert len({digest, held.digest(PixelRule()), of_bytes(PNG + b"x").digest(RULE)}) == 3


def test_images_in_memory_do_not_change_with_their_file(folder: Path) -> None:
    (image,) = image_files("a.png", WHERE, folder)
    held = image.in_memory()
    digest = image.digest(RULE)
    (folder / "a.png").write_bytes(coded(drawn(20, 20)))
    assert held.digest(RULE) == digest != image.digest(RULE)
    assert (held.size(), image.size()) == ((40, 30), (20, 20))
    assert (held.name, held.in_memory()) == (image.name, held)


def seeds_of_damage() -> list[bytes]:
    """Small valid files of every format, and of the modes and codings in which they differ."""
    small = drawn(24, 18)
    alpha = drawn(24, 18, 4)
    return [
        coded(small),
        coded(alpha),
        coded(small.convert("P"), transparency=3),
        coded(small, transparency=(0, 0, 0)),
        coded(small.convert("1")),
        coded(small, save_all=True, append_images=[drawn(24, 18)]),
        coded(small, "JPEG"),
        coded(small.convert("CMYK"), "JPEG"),
        coded(small, "JPEG", progressive=True),
        coded(small, "WEBP"),
        coded(alpha, "WEBP", lossless=True),
        coded(alpha, "WEBP", save_all=True, append_images=[drawn(24, 18, 4)]),
        coded(small, "GIF"),
        coded(small, "GIF", save_all=True, append_images=[drawn(24, 18)], transparency=0),
        coded(small, "BMP"),
        coded(small.convert("P"), "BMP"),
        coded(small, "TIFF"),
        coded(small, "TIFF", compression="tiff_lzw"),
        coded(small, "TIFF", compression="jpeg"),
        coded(small.convert("1"), "TIFF", compression="group4"),
        coded(alpha, "TIFF", compression="tiff_adobe_deflate"),
        coded(small, "PPM"),
        b"P3 2 2 255 1 2 3 4 5 6 7 8 9 10 11 12",
        b"P4 9 2 \xff\x00\xff\x00",
    ]


def damaged(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    kind = chance.randrange(5)
    if kind == 0:
        return bytes(changed[: chance.randrange(1, len(changed))])
    # Most of what decides is at the beginning.
    reach = len(changed) if kind == 1 else min(len(changed), 64)
    for _ in range(chance.randrange(1, 9)):
        changed[chance.randrange(reach)] = chance.choice(
            (0, 1, 127, 128, 255, chance.randrange(256))
        )
    if kind == 4:
        start = chance.randrange(len(changed))
        del changed[start : start + chance.randrange(1, 9)]
    return bytes(changed)


def test_damaged_files_give_patches_or_a_sentence_with_their_place(
    recwarn: pytest.WarningsRecorder,
) -> None:
    """libtiff, a library in C, prints lines of its own about damage; Pillow warns of damaged EXIF in TIFF files."""
    chance = random.Random(20250101)
    files = seeds_of_damage()
    for data in files:
        expected = patches_of(Image.open(io.BytesIO(data)), RULE)[0]
        assert of_bytes(data).patches(RULE)[0].tobytes() == expected.tobytes()
    refusals = 0
    for index in range(1000):
        image = of_bytes(damaged(files[index % len(files)], chance))
        try:
            grid = image.grid(RULE)
            patches, own = image.patches(RULE)
            assert own == grid and len(patches) == grid[0] * grid[1]
        except UserError as error:
            refusals += 1
            assert str(error).startswith(f"{WHERE}, image 1: the image of ")
            assert "0x" not in str(error) and len(str(error)) < 400, str(error)
    assert 200 < refusals < 900
    assert {str(one.message).split()[0] for one in recwarn.list} <= {"Truncated", "Corrupt"}


def test_whatever_pillow_raises_becomes_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (KeyError(5), MemoryError(), ZeroDivisionError("x"), RecursionError(), EOFError()):

        def opened(*_: Any, _error: Exception = error, **__: Any) -> None:
            raise _error

        monkeypatch.setattr(Image, "open", opened)
        with pytest.raises(UserError, match=rf"cannot be decoded \({type(error).__name__}"):
            of_bytes(PNG).size()


def test_another_size_than_the_headers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts have as many image tokens as the header's size needs. No file is known here of which Pillow does this."""
    monkeypatch.setattr(images, "in_rgb", lambda image: image.resize((5, 6)))
    with pytest.raises(UserError, match="is 40 x 30 pixels by its header, but 5 x 6 when decoded"):
        of_bytes(PNG).patches(RULE)


def test_filters_of_warnings_are_as_before() -> None:
    before = list(warnings.filters)
    with pytest.raises(UserError):
        of_bytes(with_size(9500, 9500)).size()
    assert of_bytes(PNG).size()
    assert list(warnings.filters) == before


def test_formats_are_those_that_pillow_has() -> None:
    Image.init()
    assert set(FORMATS) <= set(Image.OPEN) and "EPS" not in FORMATS


MEASURED = """
import sys
from pathlib import Path
from mindgrpo.data.images import ImageFile
from mindgrpo.data.pixels import PixelRule

def peak():
    # Unlike getrusage's, it does not begin with the memory of the parent.
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024

rule = PixelRule(max_pixels=28 * 28 * 16)
small, large = (ImageFile("", path=Path(name)) for name in sys.argv[1:])
small.patches(rule)
start = peak()
width, height = large.size()
header = peak()
large.patches(rule)
print((header - start) / (width * height), (peak() - start) / (width * height))
"""
LARGE: dict[str, Callable[[], bytes]] = {
    "RGBA PNG": lambda: coded(Image.new("RGBA", (4000, 4000)), compress_level=1),
    "CMYK JPEG": lambda: coded(Image.new("CMYK", (4000, 4000)), "JPEG"),
    "RGBA WEBP": lambda: coded(Image.new("RGBA", (4000, 4000)), "WEBP", lossless=True, method=0),
}


@each_row("name", LARGE)
def test_decoding_takes_as_much_memory_as_is_said(name: str, tmp_path: Path) -> None:
    form = name.split()[1]
    small = coded(drawn(40, 30, 4 if "RGBA" in name else 3), form)
    (tmp_path / "small").write_bytes(small)
    (tmp_path / "large").write_bytes(LARGE[name]())
    command = [sys.executable, "-c", MEASURED, str(tmp_path / "small"), str(tmp_path / "large")]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    header, each = map(float, ended.stdout.split())
    assert 4 < each < BYTES_PER_PIXEL + 1
    # WEBP's decoder takes memory for frames when it is opened.
    assert header < (10 if form == "WEBP" else 1)


def test_a_thumbnail_is_small_whatever_the_picture_is(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (900, 1600, 3), np.uint8)
    for picture in (Image.fromarray(noise), Image.new("RGBA", (3, 5))):
        picture.save(tmp_path / "picture.png")
        data = ImageFile("here", tmp_path / "picture.png").thumbnail()
        assert len(data) <= THUMBNAIL_BYTES
        with Image.open(io.BytesIO(data)) as small:
            assert max(small.size) <= THUMBNAIL_SIDE
