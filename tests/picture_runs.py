"""A very small vision-language model with the tokenizer of examples/grpo/tiny_shapes, and rows with pictures.

Refuses to judge; small_runs.py runs it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import small_runs
from PIL import Image

EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "grpo"
SHAPES = EXAMPLES / "tiny_shapes"
sys.path[:0] = [str(SHAPES), str(EXAMPLES)]

import make_vision_model  # noqa: E402
import supervised  # noqa: E402
from make_shapes import pictures, write_split  # noqa: E402

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
}
# Rows without a picture are among those with one.
WITHOUT = (2, 3)
NUM_ROWS = 7


@cache
def model_fields() -> dict[str, Any]:
    vision = make_vision_model.MODEL["vision_config"] | {"hidden_size": 32, "out_hidden_size": 64}
    return make_vision_model.MODEL | SMALL | {"vision_config": vision}


def make_model(folder: Path) -> Path:
    supervised.write_random_model(model_fields(), folder, 0)
    make_vision_model.make_tokenizer(folder, 0)
    # Pictures may have several sizes.
    pixels = make_vision_model.PIXELS | {"max_pixels": 28 * 28 * 12}
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels))
    return folder


def make_example(made: Path) -> None:
    """What the scripts of examples/grpo/tiny_shapes make, without a warm start and with few rows."""
    supervised.write_random_model(make_vision_model.MODEL, made / "model", 0)
    make_vision_model.make_tokenizer(made / "model", 0)
    for split in ("train", "heldout"):
        write_split(split, 64, 0, made)


def make_inputs(folder: Path) -> None:
    """As small_runs.make_inputs: a model, rows with pictures of several sizes, and small_runs' configuration."""
    make_model(folder / "model")
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows(folder)))
    (folder / "small.yaml").write_text(small_runs.CONFIG)


def rows(folder: Path) -> Sequence[dict[str, Any]]:
    made = []
    for i, picture in enumerate(pictures(NUM_ROWS, 1)):
        row = {"question": picture.question, "answer": str(picture.count)}
        if i in WITHOUT:
            made.append(row | {"question": row["question"].removeprefix("<image>")})
            continue
        path = folder / f"{i}.png"
        size = (56, 56 + 28 * (i % 3))
        picture.draw().resize(size, Image.Resampling.NEAREST).save(path)
        made.append(row | {"images": [path.name]})
    return made
