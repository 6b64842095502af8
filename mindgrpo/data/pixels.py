"""Cuts images into patches exactly as Qwen2-VL's and Qwen2.5-VL's image processor does, with NumPy and Pillow only.

The values equal in every bit those of transformers' Qwen2VLImageProcessorPil, which needs no torch either but has
another name in each major version. A grid is (rows, columns) of patches; `merge_size` x `merge_size` neighbouring
patches become one token.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mindgrpo.errors import UserError
from mindgrpo.strict_files import read_object

RULE_FILE = "preprocessor_config.json"
# transformers 5 writes the same keys into this file, under "image_processor", and prefers them to RULE_FILE.
NESTED_FILE, NESTED_KEY = "processor_config.json", "image_processor"
MAX_CONFIG_BYTES = 1 << 20
# All compute the same; Qwen2_5_VLImageProcessor is what the first files of Qwen2.5-VL say.
PROCESSORS = (
    "Qwen2VLImageProcessor",
    "Qwen2VLImageProcessorFast",
    "Qwen2VLImageProcessorPil",
    "Qwen2_5_VLImageProcessor",
)
# Where a file does not name its image processor.
PROCESSOR_CLASSES = ("Qwen2VLProcessor", "Qwen2_5_VLProcessor")
ALWAYS_DONE = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
CORRECT = "give a model of the Qwen2-VL or Qwen2.5-VL family, with the file as it was published"
MAX_ASPECT = 200
# Limits beyond any model, within which sizes of arrays stay computable.
MAX_SIDE, MAX_LEAST_PIXELS, MAX_MOST_PIXELS = 256, 1 << 26, 1 << 40

Grid = tuple[int, int]


class UnusableShape(ValueError):
    """Says that an image of this width and height has no patches. The message goes into a sentence."""


@dataclass(frozen=True, kw_only=True)
class PixelRule:
    """How patches are made of an image; names and defaults are those of preprocessor_config.json.

    `min_pixels` and `max_pixels` limit the area that an image is resized to. `temporal_patch_size` is how many equal
    frames a still image has in a patch. A value is (level * `rescale_factor` - `image_mean`) / `image_std`.
    """

    patch_size: int = 14
    merge_size: int = 2
    temporal_patch_size: int = 2
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    image_mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    image_std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)
    rescale_factor: float = 1 / 255

    @property
    def token_side(self) -> int:
        """Returns the width and height of a token in pixels."""
        return self.patch_size * self.merge_size

    def text(self) -> str:
        """Returns a text for digests, which is the same for equal rules only."""
        return json.dumps(asdict(self), sort_keys=True)


def size_for(height: int, width: int, rule: PixelRule) -> tuple[int, int]:
    """Returns the (height, width) that an image is resized to, multiples of a token's side.

    The area is within the rule's limits, except for long images: no side is shorter than a token. Raises
    UnusableShape for an image without pixels, or more than 200 times as long as wide.
    """
    if min(height, width) < 1:
        raise UnusableShape(f"is {width} x {height} pixels, which is no image")
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise UnusableShape(
            f"is {width} x {height} pixels, but one side may be at most {MAX_ASPECT} times the other"
        )
    side = rule.token_side
    rows, columns = round(height / side) * side, round(width / side) * side
    if rows * columns > rule.max_pixels:
        shrink = math.sqrt(height * width / rule.max_pixels)
        rows = max(side, math.floor(height / shrink / side) * side)
        columns = max(side, math.floor(width / shrink / side) * side)
    elif rows * columns < rule.min_pixels:
        grow = math.sqrt(rule.min_pixels / (height * width))
        rows = math.ceil(height * grow / side) * side
        columns = math.ceil(width * grow / side) * side
    return rows, columns


def grid_for(height: int, width: int, rule: PixelRule) -> Grid:
    """Returns the grid of an image of this size. Raises UnusableShape."""
    rows, columns = size_for(height, width, rule)
    return rows // rule.patch_size, columns // rule.patch_size


def num_tokens(grid: Grid, rule: PixelRule) -> int:
    """Returns how many tokens an image of this grid has in a prompt."""
    return grid[0] * grid[1] // rule.merge_size**2


def in_rgb(image: Image.Image) -> Image.Image:
    """Returns the image in RGB, 8 bits a channel, on white where it is transparent.

    Of an animation it is the frame that Pillow is at. Levels above 255 become 255, as in transformers.
    """
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        # A copy of the image in the same mode would only take memory.
        picture = image if image.mode == "RGBA" else image.convert("RGBA")
        paper = Image.new("RGBA", picture.size, (255, 255, 255, 255))
        picture = Image.alpha_composite(paper, picture)
        del paper
        return picture.convert("RGB")
    return image.convert("RGB")


def patches_of(image: Image.Image, rule: PixelRule) -> tuple[NDArray[np.float32], Grid]:
    """Returns (patches float32 [P, channels * temporal_patch_size * patch_size**2], grid), P = rows * columns.

    Patches of a token are neighbours, and tokens stand row by row. In a patch, channel is outermost, then frame, y, x.
    Raises UnusableShape, and what Pillow raises for an image that cannot be decoded.
    """
    rows, columns = size_for(image.height, image.width, rule)
    resized = in_rgb(image).resize((columns, rows), Image.Resampling.BICUBIC)
    pixels = np.asarray(resized)
    channels = len(rule.image_mean)
    values = np.empty((channels, rows, columns), np.float32)
    for channel, table in enumerate(_values_of_levels(rule)):
        values[channel] = table[pixels[..., channel]]
    side, merge, frames = rule.patch_size, rule.merge_size, rule.temporal_patch_size
    grid = rows // side, columns // side
    blocks = values.reshape(channels, grid[0] // merge, merge, side, grid[1] // merge, merge, side)
    blocks = blocks.transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
    repeated = np.broadcast_to(blocks, (*blocks.shape[:5], frames, side, side))
    return repeated.reshape(grid[0] * grid[1], channels * frames * side * side), grid


def _values_of_levels(rule: PixelRule) -> NDArray[np.float32]:
    """Returns float32 [channels, 256], with the roundings of transformers: product in float64, the rest in float32."""
    levels = (np.arange(256, dtype=np.float64) * rule.rescale_factor).astype(np.float32)
    mean, std = np.array(rule.image_mean, np.float32), np.array(rule.image_std, np.float32)
    return ((levels[:, None] - mean) / std).T


def read_pixel_rule(
    directory: Path | str, min_pixels: int | None = None, max_pixels: int | None = None
) -> PixelRule:
    """Reads the rule of the model in `directory`; `min_pixels` and `max_pixels` replace the file's where given.

    The file is processor_config.json if it has the image processor's keys, else preprocessor_config.json, as in
    transformers. Raises UserError for a processor or an option of which the patches would be others.
    """
    raw, where = _read_keys(Path(directory))
    _check_computed(raw, where)
    default = PixelRule()
    low, high = _limits(raw, where)
    sources = [where, where]
    if min_pixels is not None:
        low, sources[0] = min_pixels, "set for this run"
    if max_pixels is not None:
        high, sources[1] = max_pixels, "set for this run"
    rule = PixelRule(
        patch_size=_whole(raw, "patch_size", where, default.patch_size, MAX_SIDE),
        merge_size=_whole(raw, "merge_size", where, default.merge_size, MAX_SIDE),
        temporal_patch_size=_whole(
            raw, "temporal_patch_size", where, default.temporal_patch_size, MAX_SIDE
        ),
        min_pixels=low,
        max_pixels=high,
        image_mean=_channels(raw, "image_mean", where, default.image_mean),
        image_std=_channels(raw, "image_std", where, default.image_std, above=0.0),
        rescale_factor=_number(
            raw.get("rescale_factor", default.rescale_factor), "rescale_factor", where, above=0.0
        ),
    )
    side = rule.token_side
    if high < side * side:
        raise UserError(
            f"max_pixels {high} ({sources[1]}) is less than the {side} x {side} = {side * side} pixels of one token; "
            "raise it"
        )
    if low > high:
        raise UserError(
            f"min_pixels {low} ({sources[0]}) is above max_pixels {high} ({sources[1]}); lower min_pixels or raise "
            "max_pixels"
        )
    return rule


def _read_keys(directory: Path) -> tuple[Mapping[str, Any], str]:
    """Returns the image processor's keys and where they stand."""
    nested = directory / NESTED_FILE
    if nested.is_file():
        whole = read_object(nested, "the processor's configuration", CORRECT, MAX_CONFIG_BYTES)
        if NESTED_KEY in whole:
            where, inner = f"{nested}: {NESTED_KEY}", whole[NESTED_KEY]
            if not isinstance(inner, dict):
                raise UserError(
                    f"{where} is a {type(inner).__name__}, but must be an object; {CORRECT}"
                )
            return {"processor_class": whole.get("processor_class"), **inner}, where
    path = directory / RULE_FILE
    raw = read_object(path, "the image processor's configuration", CORRECT, MAX_CONFIG_BYTES)
    return raw, str(path)


def _check_computed(raw: Mapping[str, Any], where: str) -> None:
    has_type = raw.get("image_processor_type") is not None
    key = "image_processor_type" if has_type else "processor_class"
    known = PROCESSORS if has_type else PROCESSOR_CLASSES
    if raw.get(key) not in known:
        raise UserError(
            f"{where}: {key} is {raw.get(key)!r}, but patches are made as by {', '.join(known)} only; {CORRECT}"
        )
    for step in ALWAYS_DONE:
        if raw.get(step, True) is not True:
            raise UserError(
                f"{where}: {step} is {raw[step]!r}, but this is always done here; set it to true, if the model was "
                "trained so"
            )
    bicubic = int(Image.Resampling.BICUBIC)
    if raw.get("resample", bicubic) != bicubic:
        raise UserError(
            f"{where}: resample is {raw['resample']!r}, but images are resized with {bicubic} (bicubic) only; set it "
            f"to {bicubic}, if the model was trained so"
        )


def _limits(raw: Mapping[str, Any], where: str) -> tuple[int, int]:
    """Returns (min_pixels, max_pixels). As in transformers, these keys at the top come before those of `size`."""
    default = PixelRule()
    size = raw.get("size")
    if size is None:
        size = {"shortest_edge": default.min_pixels, "longest_edge": default.max_pixels}
    if not isinstance(size, Mapping):
        raise UserError(
            f"{where}: size is {size!r}, but must be an object with shortest_edge and longest_edge; {CORRECT}"
        )
    limits = []
    for name, edge, most in (
        ("min_pixels", "shortest_edge", MAX_LEAST_PIXELS),
        ("max_pixels", "longest_edge", MAX_MOST_PIXELS),
    ):
        if raw.get(name) is not None:
            limits.append(_whole(raw, name, where, 0, most))
        else:
            # The first files of Qwen2-VL have min_pixels and max_pixels inside `size`.
            key = name if edge not in size and name in size else edge
            limits.append(_whole(size, key, f"{where}: size", None, most))
    return limits[0], limits[1]


def _whole(raw: Mapping[str, Any], key: str, where: str, default: int | None, most: int) -> int:
    value = raw.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
        raise UserError(
            f"{where}: {key} is {value!r}, but must be a whole number above 0 and at most {most}; {CORRECT}"
        )
    return value


def _channels(
    raw: Mapping[str, Any],
    key: str,
    where: str,
    default: tuple[float, ...],
    above: float = -math.inf,
) -> tuple[float, ...]:
    values = raw.get(key, default)
    if not isinstance(values, list | tuple) or len(values) != len(default):
        raise UserError(
            f"{where}: {key} is {values!r}, but must list {len(default)} numbers, for red, green and blue; {CORRECT}"
        )
    return tuple(_number(value, key, where, above) for value in values)


def _number(value: object, key: str, where: str, above: float) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not above < value < math.inf
    ):
        least = "" if above == -math.inf else f" above {above:g}"
        raise UserError(
            f"{where}: {key} has {value!r}, but must be a finite number{least}; {CORRECT}"
        )
    return float(value)
