"""The rule of preprocessor_config.json, grids, and patches against those of transformers' Qwen2VLImageProcessorPil.

Does NOT prove: that torchvision's processor, transformers' default where torch is installed, makes the same patches; it
resizes otherwise, and differs in the last bits.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image
from tables import each_row

from mindgrpo.data.pixels import (
    PixelRule,
    UnusableShape,
    grid_for,
    num_tokens,
    patches_of,
    read_pixel_rule,
    size_for,
)
from mindgrpo.errors import UserError

# transformers 4 has a processor of another name, which puts no white behind transparent pixels.
Theirs: Any = getattr(transformers, "Qwen2VLImageProcessorPil", None)
needs_theirs = pytest.mark.skipif(
    Theirs is None, reason="transformers 5 makes the patches to compare"
)

PUBLISHED: dict[str, Any] = {
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
}
LIMITS = ((56 * 56, 28 * 28 * 1280), (28 * 28, 28 * 28 * 16), (28 * 28 * 40, 28 * 28 * 60))
RNG = np.random.default_rng(20250101)


def levels(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape, np.uint8)


def palette(height: int, width: int) -> Image.Image:
    image = Image.frombytes("P", (width, height), levels(height, width).tobytes())
    image.putpalette(levels(768).tobytes())
    return image


def with_info(image: Image.Image, transparency: Any) -> Image.Image:
    image.info["transparency"] = transparency
    return image


def through(form: str, image: Image.Image, **options: Any) -> Image.Image:
    """The picture as it comes from a file, not yet decoded."""
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return Image.open(io.BytesIO(stream.getvalue()))


def rgb(height: int, width: int) -> Image.Image:
    return Image.fromarray(levels(height, width, 3))


def of_mode(mode: str, bands: int) -> Callable[[int, int], Image.Image]:
    return lambda h, w: Image.frombytes(mode, (w, h), levels(h, w, bands).tobytes())


# transformers makes all levels of I;16, I and F above 255 white, and so does patches_of; files of these modes are
# refused before (test_image_files.py).
DRAWN: dict[str, Callable[[int, int], Image.Image]] = {
    "RGB": rgb,
    "L": lambda h, w: Image.fromarray(levels(h, w)),
    "LA": of_mode("LA", 2),
    "RGBA": of_mode("RGBA", 4),
    "P": palette,
    "P with one transparent level": lambda h, w: with_info(palette(h, w), 7),
    "P with alpha": lambda h, w: with_info(palette(h, w), levels(256).tobytes()),
    "PA": of_mode("PA", 2),
    "1": lambda h, w: Image.fromarray(levels(h, w)).convert("1"),
    "CMYK": of_mode("CMYK", 4),
    "YCbCr": of_mode("YCbCr", 3),
    "HSV": of_mode("HSV", 3),
    "RGB with a transparent colour": lambda h, w: with_info(rgb(h, w), (0, 0, 0)),
    "I;16": lambda h, w: Image.fromarray(RNG.integers(0, 600, (h, w)).astype(np.uint16)),
    "I": lambda h, w: Image.fromarray(RNG.integers(-9, 600, (h, w)).astype(np.int32)),
    "F": lambda h, w: Image.fromarray(RNG.uniform(-9, 600, (h, w)).astype(np.float32)),
    "JPEG": lambda h, w: through("JPEG", rgb(h, w)),
    "JPEG of CMYK": lambda h, w: through("JPEG", of_mode("CMYK", 4)(h, w)),
    "PNG": lambda h, w: through("PNG", with_info(palette(h, w), 3), transparency=3),
    "WEBP": lambda h, w: through("WEBP", of_mode("RGBA", 4)(h, w)),
    "GIF": lambda h, w: through("GIF", rgb(h, w)),
    "TIFF": lambda h, w: through("TIFF", rgb(h, w), compression="tiff_lzw"),
}
SHAPES = ((1, 1), (10, 30), (20, 1500), (1200, 7), (84, 84), (133, 217), (300, 200))


def drawn_pictures() -> Iterator[tuple[str, Image.Image]]:
    """200 pictures: every mode in every shape, then shapes by chance."""
    names = list(DRAWN)
    for index in range(200):
        name = names[index % len(names)]
        shape = SHAPES[index // len(names) % len(SHAPES)]
        if index >= len(names) * len(SHAPES):
            shape = (int(RNG.integers(1, 200)), int(RNG.integers(1, 200)))
        yield name, DRAWN[name](*shape)


@needs_theirs
def test_patches_are_those_of_transformers_in_every_bit() -> None:
    pairs = []
    for low, high in LIMITS:
        theirs = Theirs(size={"shortest_edge": low, "longest_edge": high})
        pairs.append((PixelRule(min_pixels=low, max_pixels=high), theirs))
    count = 0
    for name, image in drawn_pictures():
        for rule, theirs in pairs:
            check_equal(image, rule, theirs, name)
            count += 1
    assert count == 600


def check_equal(image: Image.Image, rule: PixelRule, theirs: Any, name: str = "") -> None:
    expected = theirs(images=[image], return_tensors="np")
    patches, grid = patches_of(image, rule)
    values = expected["pixel_values"]
    assert (patches.dtype, patches.shape) == (values.dtype, values.shape), (name, image.size)
    assert patches.tobytes() == values.tobytes(), (name, image.size, rule)
    assert expected["image_grid_thw"].tolist() == [[1, *grid]]
    assert grid == grid_for(image.height, image.width, rule)
    assert patches.flags.c_contiguous


@needs_theirs
def test_every_number_of_the_file_makes_transformers_patches(tmp_path: Path) -> None:
    """Also with Qwen3-VL's patches of 16, for which the rule is the same."""
    other = PUBLISHED | {
        "patch_size": 16,
        "merge_size": 3,
        "temporal_patch_size": 1,
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.5, 1, 2],
        "rescale_factor": 0.017,
        "max_pixels": 48 * 48 * 9,
    }
    for fields in (PUBLISHED | {"max_pixels": 40000}, other):
        rule = read_pixel_rule(written(tmp_path, fields))
        theirs = Theirs.from_pretrained(tmp_path)
        for name in ("RGB", "RGBA", "JPEG"):
            check_equal(DRAWN[name](201, 333), rule, theirs, name)


@needs_theirs
def test_sizes_are_those_of_transformers() -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    num_refused = 0
    for index in range(20000):
        # Half of the sizes are at odd multiples of half a token, where rounding decides.
        height, width = (int(side) for side in np.exp(RNG.uniform(0, 9, 2)))
        if index % 2:
            height, width = height // 14 * 14 + 14, width // 14 * 14 + 14
        low, high = LIMITS[index % 3]
        rule = PixelRule(min_pixels=low, max_pixels=high)
        try:
            expected = smart_resize(height, width, 28, low, high)
        except ValueError:
            num_refused += 1
            with pytest.raises(UnusableShape, match="at most 200 times"):
                size_for(height, width, rule)
            continue
        assert size_for(height, width, rule) == expected, (height, width, low, high)
    assert num_refused > 100


def test_sizes_and_tokens_by_hand() -> None:
    rule = PixelRule(min_pixels=56 * 56, max_pixels=28 * 28 * 16)
    assert rule.token_side == 28
    assert size_for(56, 84, rule) == (56, 84)
    assert size_for(1, 1, rule) == (56, 56)
    assert size_for(1000, 1000, rule) == (112, 112)
    # 42 is one token and a half: halves are rounded to even numbers, as Python does.
    assert size_for(42, 70, replace(rule, min_pixels=1)) == (56, 56)
    assert grid_for(56, 84, rule) == (4, 6)
    assert num_tokens((4, 6), rule) == 6
    # No side is shorter than a token, so long images may have a larger area than max_pixels.
    assert size_for(10, 2000, PixelRule(min_pixels=784, max_pixels=784)) == (28, 420)
    for shape in ((1, 201), (201, 1), (0, 5), (5, 0)):
        with pytest.raises(UnusableShape, match=f"is {shape[1]} x {shape[0]} pixels"):
            size_for(*shape, rule)
    assert size_for(1, 200, rule)


def test_patches_of_a_token_are_neighbours_and_frames_are_equal() -> None:
    rule = PixelRule(min_pixels=784, image_mean=(0, 0, 0), image_std=(1, 1, 1), rescale_factor=1.0)
    pixels = levels(56, 84, 3)
    patches, grid = patches_of(Image.fromarray(pixels), rule)
    assert grid == (4, 6) and patches.shape == (24, 3 * 2 * 14 * 14)
    whole = patches.reshape(2, 3, 2, 2, 3, 2, 14, 14)
    for row, column, y, x in ((0, 0, 0, 0), (0, 1, 1, 0), (1, 2, 0, 1)):
        top, left = (row * 2 + y) * 14, (column * 2 + x) * 14
        cut = pixels[top : top + 14, left : left + 14].transpose(2, 0, 1)
        assert (whole[row, column, y, x] == cut[:, None]).all()


def test_texts_of_rules_are_equal_for_equal_rules_only() -> None:
    rule = PixelRule()
    assert rule.text() == PixelRule().text()
    others = [
        replace(rule, patch_size=16),
        replace(rule, merge_size=1),
        replace(rule, temporal_patch_size=1),
        replace(rule, min_pixels=1),
        replace(rule, max_pixels=784),
        replace(rule, image_mean=(0.5, 0.5, 0.5)),
        replace(rule, image_std=(0.5, 0.5, 0.5)),
        replace(rule, rescale_factor=1 / 127.5),
    ]
    assert len({one.text() for one in [rule, *others]}) == len(others) + 1


def written(folder: Path, fields: dict[str, Any], name: str = "preprocessor_config.json") -> Path:
    (folder / name).write_text(json.dumps(fields))
    return folder


def without(*keys: str, **more: Any) -> dict[str, Any]:
    return {key: value for key, value in PUBLISHED.items() if key not in keys} | more


def test_the_published_file_is_read(tmp_path: Path) -> None:
    rule = read_pixel_rule(written(tmp_path, PUBLISHED), None, None)
    assert rule == PixelRule(min_pixels=3136, max_pixels=12845056)
    assert read_pixel_rule(tmp_path, 784, 7840) == PixelRule(min_pixels=784, max_pixels=7840)
    assert read_pixel_rule(str(tmp_path), max_pixels=7840).min_pixels == 3136


EDGES = {"shortest_edge": 4000, "longest_edge": 8000}


@each_row(
    ("fields", "limits"),
    [
        (without("min_pixels", "max_pixels"), (3136, 1003520)),
        (without("min_pixels", "max_pixels", size=EDGES), (4000, 8000)),
        (without("min_pixels", max_pixels=None, size=EDGES), (4000, 8000)),
        (without("max_pixels", min_pixels=5000, size=EDGES), (5000, 8000)),
        (without(size=EDGES), (3136, 12845056)),
        (without(size={}), (3136, 12845056)),
        (without("min_pixels", max_pixels=9000, size={"shortest_edge": 5}), (5, 9000)),
        (without("image_processor_type"), (3136, 12845056)),
        (
            without(image_processor_type="Qwen2VLImageProcessorFast", do_resize=True),
            (3136, 12845056),
        ),
        (without(image_processor_type="Qwen2_5_VLImageProcessor", resample=3), (3136, 12845056)),
    ],
)
def test_limits_stand_at_the_top_or_in_size(
    fields: dict[str, Any], limits: tuple[int, int], tmp_path: Path
) -> None:
    rule = read_pixel_rule(written(tmp_path, fields))
    assert (rule.min_pixels, rule.max_pixels) == limits
    if Theirs is not None:
        size = Theirs.from_pretrained(tmp_path).size
        assert (size["shortest_edge"], size["longest_edge"]) == limits


def test_the_first_files_have_pixels_in_size(tmp_path: Path) -> None:
    """transformers 5 does not read them any more."""
    inner = {"min_pixels": 4000, "max_pixels": 9000}
    rule = read_pixel_rule(written(tmp_path, without("min_pixels", "max_pixels", size=inner)))
    assert (rule.min_pixels, rule.max_pixels) == (4000, 9000)


def test_the_nested_file_of_transformers_5_comes_first(tmp_path: Path) -> None:
    written(tmp_path, PUBLISHED)
    written(tmp_path, {"processor_class": "Qwen2_5_VLProcessor"}, "processor_config.json")
    assert read_pixel_rule(tmp_path).max_pixels == 12845056
    nested = without("processor_class", "image_processor_type", max_pixels=8000)
    whole = {"processor_class": "Qwen2_5_VLProcessor", "image_processor": nested}
    written(tmp_path, whole, "processor_config.json")
    assert read_pixel_rule(tmp_path).max_pixels == 8000
    (tmp_path / "preprocessor_config.json").unlink()
    assert read_pixel_rule(tmp_path).max_pixels == 8000
    written(tmp_path, whole | {"image_processor": 5}, "processor_config.json")
    with pytest.raises(
        UserError, match="processor_config.json: image_processor is a int, but must"
    ):
        read_pixel_rule(tmp_path)


@each_row(
    ("fields", "message"),
    [
        (
            without(image_processor_type="CLIPImageProcessor"),
            "type is 'CLIPImageProcessor', but .*Fast",
        ),
        (
            without("image_processor_type", processor_class="Qwen3VLProcessor"),
            "processor_class is 'Qwen3VLProcessor', but .* family, with the file",
        ),
        (without("image_processor_type", "processor_class"), "processor_class is None"),
        (without(image_processor_type=["x"]), r"type is \['x'\]"),
        (without(do_resize=False), "do_resize is False, .* set it to true"),
        (without(do_rescale=False), "do_rescale is False"),
        (without(do_normalize=0), "do_normalize is 0"),
        (without(do_convert_rgb=None), "do_convert_rgb is None"),
        (without(resample=2), r"resample is 2, .* 3 \(bicubic\) only; set it to 3"),
        (
            without(patch_size=0),
            "patch_size is 0, but must be a whole number above 0 and at most 256",
        ),
        (without(patch_size=14.0), "patch_size is 14.0"),
        (without(merge_size=True), "merge_size is True"),
        (without(temporal_patch_size=10**9), "temporal_patch_size is 1000000000"),
        (without(min_pixels=10**9), "min_pixels is 1000000000"),
        (without("max_pixels", size={"shortest_edge": 5}), "size: longest_edge is None"),
        (without(size=5), "size is 5, but must be an object"),
        (without(image_mean=0.5), "image_mean is 0.5, but must list 3 numbers"),
        (without(image_mean=[0.5]), r"image_mean is \[0.5\]"),
        (without(image_std=[0.5, 0, 1]), "image_std has 0, but must be a finite number above 0"),
        (without(image_mean=[0.5, "x", 1]), "image_mean has 'x', but must be a finite number;"),
        (without(image_mean=[0.5, float("nan"), 1]), "image_mean has nan"),
        (without(rescale_factor=0), "rescale_factor has 0"),
        (
            without(min_pixels=8000, max_pixels=5000),
            r"min_pixels 8000 \(/.* is above max_pixels 5000",
        ),
        (without(min_pixels=1, max_pixels=783), "less than the 28 x 28 = 784 pixels of one token"),
    ],
)
def test_rules_that_are_not_computed_are_refused(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        read_pixel_rule(written(tmp_path, fields))
    assert "preprocessor_config.json" in str(caught.value)


def test_limits_of_the_run_are_named_as_such(tmp_path: Path) -> None:
    written(tmp_path, PUBLISHED)
    with pytest.raises(
        UserError, match=r"min_pixels 3136 \(/.*max_pixels 2000 \(set for this run\)"
    ):
        read_pixel_rule(tmp_path, None, 2000)
    with pytest.raises(UserError, match=r"max_pixels 700 \(set for this run\) is less than"):
        read_pixel_rule(tmp_path, 1, 700)


def test_files_that_are_missing_or_no_json_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="preprocessor_config.json' cannot be read: No such file"):
        read_pixel_rule(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        read_pixel_rule(tmp_path)
