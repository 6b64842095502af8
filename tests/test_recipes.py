"""Files that add to a configuration: which value wins, where it came from, and that every bundled recipe adds up.

Does not prove that a recipe learns; docs/algorithms.md has the runs that show it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tables import each_row

from mindgrpo.cli.verbs import main
from mindgrpo.config import load_config, parse_command_line, values_by_key
from mindgrpo.config.yaml_file import read_yaml
from mindgrpo.errors import UserError
from mindgrpo.run.start import run_name

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples/grpo/tiny_arithmetic/grpo_config.yaml"
USERS = ROOT / "examples/grpo/qwen_grpo_tutorial/grpo_config.yaml"
RECIPES = sorted((ROOT / "examples/recipes").glob("*.yaml"))
BASE = "rl_config:\n  beta: 0.5\n  epsilon_low: 0.2\n  seed: 3\n"


def written(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(text)
    return path


@each_row("base", [EXAMPLE, USERS])
@each_row("recipe", RECIPES)
def test_a_recipe_adds_to_a_run_and_every_value_says_which_file_it_is_from(
    recipe: Path, base: Path
) -> None:
    loaded, values = load_config([base, recipe]), read_yaml(recipe)
    assert loaded.notices == []
    result = values_by_key(loaded.config)
    keys = [key for key, entry in values.items() if entry.value != {}]
    # Of the algorithm, as is in which dtype logits are.
    assert {key for key in keys if not key.startswith("rl_config.")} <= {"context.fp32_lm_head"}
    assert keys
    assert {key: result[key] for key in keys} == {key: values[key].value for key in keys}
    assert all(loaded.origins[key].startswith(f"{recipe.name} line ") for key in keys)
    of_base = [key for key in read_yaml(base) if key in loaded.origins]
    assert any(origin.startswith("grpo_config.yaml line ") for origin in loaded.origins.values())
    assert {loaded.origins[key] for key in of_base} - {loaded.origins[key] for key in keys}


def test_recipes_are_told_apart_by_what_they_set() -> None:
    assert len(RECIPES) > 15
    results = {
        tuple(values_by_key(load_config([EXAMPLE, path]).config).items()).__repr__()
        for path in RECIPES
    }
    assert len(results) == len(RECIPES)


@pytest.mark.parametrize("language", ["docs", "docs/zh"])
def test_the_page_of_algorithms_links_to_every_recipe(language: str) -> None:
    text = (ROOT / language / "algorithms.md").read_text()
    up = "../" * (language.count("/") + 1)
    assert [p.name for p in RECIPES if f"({up}examples/recipes/{p.name})" not in text] == []


def test_later_files_win_and_flags_win_over_all(tmp_path: Path) -> None:
    base = written(tmp_path, "base.yaml", BASE)
    more = written(tmp_path, "more.yaml", "\nrl_config:\n  beta: 0.0\n  epsilon_low: null\n")
    last = written(tmp_path, "last.yaml", "rl_config: {num_generations: 4}\n")
    loaded = load_config([base, str(more), last], ["--rl_config.seed", "5"])
    rl = loaded.config.rl_config
    assert (rl.beta, rl.epsilon_low, rl.num_generations, rl.seed) == (0.0, None, 4, 5)
    origins = {key: loaded.origins[f"rl_config.{key}"] for key in ("beta", "seed", "epsilon_low")}
    assert origins == {
        "beta": "more.yaml line 3",
        "seed": "command line --rl_config.seed",
        "epsilon_low": "more.yaml line 4",
    }
    assert load_config([more, base]).config.rl_config.beta == 0.5


def test_files_on_the_command_line_add_up_in_their_order(tmp_path: Path) -> None:
    base = written(tmp_path, "base.yaml", BASE)
    more = written(tmp_path, "more.yaml", "rl_config:\n  beta: 0.0\n")
    words = ["--config", str(base), "--rl_config.seed", "5", f"--config={more}"]
    files, overrides = parse_command_line(words)
    assert files == [base, more] and overrides == ["--rl_config.seed", "5"]
    # A program that names a file of its own, and takes these in its place.
    config = load_config(tmp_path / "none.yaml", words).config
    assert config == load_config(files, overrides).config
    assert (config.rl_config.beta, config.rl_config.seed) == (0.0, 5)


def test_a_run_is_named_after_all_of_its_files() -> None:
    recipe = Path("examples/recipes/dapo.yaml")
    assert run_name([EXAMPLE, recipe]) == "tiny_arithmetic-dapo"
    assert run_name([Path("mine.yaml")]) == "mine"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("\nrl_config:\n  betta: 0.1\n", "(more.yaml line 3)"),
        ("rl_config:\n  beta: much\n", "(more.yaml line 2)"),
        ("rl_config:\n  loss_type: sapo\n", "(base.yaml line 3, more.yaml line 2)"),
        ("rl_config: [\n", "more.yaml line"),
        ("rl_config:\n", "rl_config is null (more.yaml line 1), but rl_config.beta was set before"),
        ("rl_config: 3\n", "rl_config is 3 (more.yaml line 1), but rl_config.beta was set before"),
    ],
)
def test_what_a_file_gets_wrong_is_told_with_its_name(
    tmp_path: Path, text: str, sentence: str
) -> None:
    files = [written(tmp_path, "base.yaml", BASE), written(tmp_path, "more.yaml", text)]
    with pytest.raises(UserError) as refused:
        load_config(files)
    assert sentence in str(refused.value)


def test_files_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    base = written(tmp_path / "a", "run.yaml", BASE)
    more = written(tmp_path / "b", "run.yaml", "rl_config:\n  beta: 0.0\n")
    loaded = load_config([base, more])
    assert loaded.origins["rl_config.beta"] == f"{more} line 2"
    assert loaded.origins["rl_config.seed"] == f"{base} line 4"


def test_a_missing_recipe_is_named(tmp_path: Path) -> None:
    base = written(tmp_path, "base.yaml", BASE)
    with pytest.raises(UserError, match="dapo.yaml"):
        load_config([base, tmp_path / "dapo.yaml"])


def test_check_takes_a_recipe_as_every_verb_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    recipe = ROOT / "examples/recipes/dapo.yaml"
    words = ["--config", str(EXAMPLE), "--config", str(recipe)]
    assert main(["check", "--ranks", "8", *words]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{EXAMPLE} with {recipe} can run:")
    assert main(["check", *words, "--rl_config.loss_type", "gpg"]) == 2
    said = capsys.readouterr().err
    assert "(dapo.yaml line 4, command line --rl_config.loss_type)" in said
