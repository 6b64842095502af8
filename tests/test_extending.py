"""Each recipe of docs/extending.md, done: a toy component is added where the page says, and works.

Does not prove that a real component is as small as its toy.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from extension_recipes import RECIPES, Recipe

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "extending.md").read_text("utf-8")
SECTIONS = dict(zip(*[iter(re.split(r"^## (.*)$", PAGE, flags=re.MULTILINE)[1:])] * 2, strict=True))
# What a component of each kind may touch of the package.
MOST_FILES = {
    "A reward function": 0,
    "A loss": 2,
    "An advantage estimator": 1,
    "A key": 3,
    "A per-token array": 4,
}


def patched(recipe: Recipe, folder: Path) -> Path:
    """A copy of the package with the recipe's edits; returns the folder that holds it."""
    tree = folder / "tree"
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "mindgrpo"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).exists():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    for edit in recipe.edits:
        path = tree / edit.file
        text = path.read_text("utf-8")
        assert text.count(edit.before) == 1, f"{edit.before!r} of {edit.file}"
        path.write_text(text.replace(edit.before, edit.after), encoding="utf-8")
    return tree


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.section)
def test_a_recipe_needs_the_files_that_it_names_and_works(recipe: Recipe, tmp_path: Path) -> None:
    touched = {edit.file for edit in recipe.edits}
    named = set(re.findall(r"`(mindgrpo/[\w/.]+)`", SECTIONS[recipe.section]))
    assert touched <= named
    assert len(touched) <= MOST_FILES.get(recipe.section, 99)
    tree, here = patched(recipe, tmp_path), tmp_path / "user"
    here.mkdir()
    for name, text in recipe.files.items():
        (here / name).write_text(text, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": f"{tree}:{ROOT / 'tests'}"}
    ended = subprocess.run(
        [sys.executable, "-c", recipe.program],
        cwd=here,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, f"{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"


def test_every_recipe_of_the_page_has_its_toy() -> None:
    assert {recipe.section for recipe in RECIPES} == SECTIONS.keys() - {
        "A cell with a gradient of its own"
    }
