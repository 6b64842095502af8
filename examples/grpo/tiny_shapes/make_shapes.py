"""Draws pictures of coloured shapes, and asks how many of one kind there are.

    python make_shapes.py          # writes made/train.jsonl, made/heldout.jsonl and made/pictures/

A picture has 2 x 2 cells of 28 x 28 pixels, each with a circle, a square, a triangle or nothing. Every count from 0
to 4 is as likely as any other, so a model that does not look is right one time in five. Shapes differ in size and
place, so that no two pictures are alike, and held-out ones are drawn from a seed of their own.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw

HERE = Path(__file__).resolve().parent
MADE = HERE / "made"
CELL, SIDE = 28, 2
NUM_CELLS = SIDE * SIDE
COLORS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220)}
SHAPES = ("circle", "square", "triangle")
NOTHING = "nothing"


@dataclass(frozen=True)
class Picture:
    """The cells row by row, each such as "red circle" or "nothing", and the kind that is asked for."""

    cells: tuple[str, ...]
    asked: str
    seed: int

    @property
    def count(self) -> int:
        return self.cells.count(self.asked)

    @property
    def question(self) -> str:
        return f"<image>how many {self.asked}s?"

    def draw(self) -> Image.Image:
        rng = random.Random(self.seed)
        image = Image.new("RGB", (SIDE * CELL, SIDE * CELL), (255, 255, 255))
        draw = ImageDraw.Draw(image)
        for i, cell in enumerate(self.cells):
            if cell == NOTHING:
                continue
            color, shape = cell.split()
            left, top = i % SIDE * CELL + rng.randint(3, 6), i // SIDE * CELL + rng.randint(3, 6)
            size = rng.randint(16, 19)
            box = (left, top, left + size, top + size)
            if shape == "circle":
                draw.ellipse(box, fill=COLORS[color])
            elif shape == "square":
                draw.rectangle(box, fill=COLORS[color])
            else:
                corners = [(left, top + size), (left + size, top + size), (left + size // 2, top)]
                draw.polygon(corners, fill=COLORS[color])
        return image


def sample_picture(rng: random.Random) -> Picture:
    kinds = [f"{color} {shape}" for color in COLORS for shape in SHAPES]
    asked = rng.choice(kinds)
    count = rng.randint(0, NUM_CELLS)
    others = [kind for kind in [*kinds, NOTHING, NOTHING] if kind != asked]
    cells = [asked] * count + [rng.choice(others) for _ in range(NUM_CELLS - count)]
    rng.shuffle(cells)
    return Picture(tuple(cells), asked, rng.getrandbits(32))


def pictures(count: int, seed: int) -> Iterator[Picture]:
    rng = random.Random(seed)
    return (sample_picture(rng) for _ in range(count))


def described(picture: Picture) -> str:
    """Returns the answer of who looks."""
    return f"<think>{', '.join(picture.cells)}</think><answer>{picture.count}</answer>"


def guessed(rng: random.Random) -> str:
    """Returns the answer of who does not."""
    return f"<answer>{rng.randint(0, NUM_CELLS)}</answer>"


def write_split(name: str, count: int, seed: int, folder: Path) -> None:
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.jsonl").open("w", encoding="utf-8", newline="\n") as lines:
        for i, picture in enumerate(pictures(count, seed)):
            path = Path("pictures") / f"{name}_{i:04}.png"
            picture.draw().save(folder / path, optimize=True)
            row = {
                "question": picture.question,
                "images": [path.as_posix()],
                "answer": str(picture.count),
            }
            lines.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws the example's pictures.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_dir", type=Path, default=MADE)
    arguments = parser.parse_args()
    write_split("train", 2000, 2 * arguments.seed, arguments.output_dir)
    write_split("heldout", 200, 2 * arguments.seed + 1, arguments.output_dir)
    print(f"2200 pictures in {arguments.output_dir}")


if __name__ == "__main__":
    main()
