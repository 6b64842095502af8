"""Copies an example into the present folder and prints the command that runs it; without NAME, lists the examples.

Files keep their paths below examples/, which configurations and guides name. A file that is there already stays, and
has to be equal.
"""

from __future__ import annotations

import filecmp
import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from mindgrpo.config import Config, load_config
from mindgrpo.config.schema import values_by_key
from mindgrpo.errors import UserError, writing
from mindgrpo.user_code import PACKAGE, nearest

# In a wheel, where setup.py puts the files, and in a clone.
SOURCES = (PACKAGE / "shipped", PACKAGE.parent)
RECIPES, CONFIG, MAKE_MODEL = "examples/recipes", "grpo_config.yaml", "make_model.py"
# Scripts of an example that make what its configuration names, in this order, and the folder that some write.
MAKERS = ("make_shapes.py", "make_vision_model.py", "train_classifier.py")
MADE = "made"
# Of values that have to be set, and what the printed command says in their place.
PLACEHOLDER = "/path/"
WORDS = {"actor_config.load": "MODEL", "rl_config.dataset_file": "DATA"}
IGNORED = shutil.ignore_patterns("__pycache__", "*.sh", MADE)


def main(argv: Sequence[str]) -> None:
    source = next((path for path in SOURCES if (path / RECIPES).is_dir()), None)
    if source is None:
        raise UserError(f"{PACKAGE} came without its examples; install mindgrpo's wheel again.")
    configs = sorted(
        source.glob(f"examples/*/*/{CONFIG}"), key=lambda path: (path.parts[-3] != "grpo", path)
    )
    examples = {path.parent.name: path.parent for path in configs}
    examples[Path(RECIPES).name] = source / RECIPES
    if not argv:
        print(listing(examples))
        return
    name = argv[0]
    if len(argv) > 1 or name not in examples:
        raise UserError(
            f"example takes one name of {', '.join(examples)}, but was given '{' '.join(argv)}'"
            f"{nearest(name, examples)}; mindgrpo example lists them."
        )
    for path in files_of(examples[name], source):
        copy(path, Path(path.relative_to(source)))
    folder = examples[name].relative_to(source)
    print(f"{folder} is in {Path.cwd()}. Run it with\n\n{command(folder, source)}")


def listing(examples: dict[str, Path]) -> str:
    """Returns a line for each example: its name, and what its configuration says of itself in its first line."""
    lines = []
    for name, folder in examples.items():
        config = folder / CONFIG
        described = "settings of papers' algorithms, each added to a run by a --config of its own"
        if config.exists():
            described = config.read_text(encoding="utf-8").splitlines()[0].strip("# ")
            described = described.partition(": `")[0].rstrip(".")
        lines.append(f"  {name:<22}{described}")
    return "\n".join(["mindgrpo example NAME copies one of these into the present folder:", *lines])


def files_of(folder: Path, source: Path) -> Iterator[Path]:
    """Yields the folders and files that an example needs: its own, and what its configuration names."""
    yield folder
    config = folder / CONFIG
    if not config.exists():
        return
    yield from sorted(folder.parent.glob("*.py"))
    named = dict.fromkeys(named_files(load_config(config).config))
    for path in (source / text for text in named):
        if folder in path.parents:
            continue
        if path.exists():
            yield path
        elif (maker := path.with_name(MAKE_MODEL)).exists():
            yield maker


def named_files(config: Config) -> Iterator[str]:
    for value in values_by_key(config).values():
        for text in value if isinstance(value, list) else [value]:
            path = str(text).partition(":")[0]
            if path.removeprefix("./").startswith(("examples/", "model_configs/")):
                yield path


def copy(path: Path, target: Path) -> None:
    """Copies a file or folder. Raises UserError for a file that is there and differs."""
    if path.is_dir():
        ignored = IGNORED(str(path), [child.name for child in path.iterdir()])
        for child in sorted(path.iterdir()):
            if child.name not in ignored:
                copy(child, target / child.name)
    elif not target.exists():
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    elif not filecmp.cmp(path, target, shallow=False):
        raise UserError(
            f"{target} exists, differs from the example's and is not overwritten; move it away, or go on in another "
            "folder."
        )


def command(folder: Path, source: Path) -> str:
    """Returns the command for a copied example, to be given in the present folder."""
    if not (source / folder / CONFIG).exists():
        recipe = next(iter(sorted(folder.glob("*.yaml"))))
        return f"mindgrpo launch --ranks N --config YOUR.yaml --config {recipe}"
    config = load_config(folder / CONFIG).on_ranks(None).config
    parallel = config.generate_config.parallel_config
    words = ["mindgrpo", "launch", "--ranks", str(parallel.replicas * parallel.replica_ranks)]
    words += ["--config", str(folder / CONFIG)]
    for key, word in WORDS.items():
        if str(values_by_key(config)[key]).startswith(PLACEHOLDER):
            words += [f"--{key}", word]
    steps = [shlex.join(words)]
    maker = Path(config.actor_config.load).with_name(MAKE_MODEL)
    if maker.exists() and not Path(config.actor_config.load).exists():
        steps[:0] = ["pip install 'mindgrpo[smollm2]'", f"python {maker}"]
    making = [name for name in MAKERS if (source / folder / name).exists()]
    steps[:0] = [f"python {folder / name}" for name in making]
    return " && ".join(steps)
