"""Runs the commands and Python examples of docs/, CONTRIBUTING.md and every README in a short form.

Every fenced `bash`, `console` or `python` block runs, or has the reason why not in the line before it:
`<!-- not run: REASON -->`. What runs, in a copy of the clone, page by page and in the page's order:

- One real training, `quickstart.sh --ranks 1` with SHORT appended, before all pages: it leaves output/latest.
- `quickstart.sh` and `launch.sh` run up to the start of Python. The arguments that Python gets go through the
  launcher's own parser, then through `check`, as the launcher does before it starts a rank.
- `python -m mindgrpo VERB` runs in this process, `eval` on two prompts.
- A program of scripts/ runs with --help, which must have every flag of the command.
- `cp` and other Python programs run as they are written; one that a page shows gets SHORT appended.
- What starts with `bash` or `python -m mindgrpo` and stands on several pages runs on the first of them.

A Python block names its file in its first line, and a later command of the page uses the file. So does a YAML block
that is a whole configuration; others are loaded over the bundled one.
Does not prove that whole runs give the figures of the pages, nor anything of the marked blocks.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import picture_runs
import pytest
import yaml
from fenced_blocks import ROOT, Block, blocks_of
from small_clone import Clone, make_clone

from mindgrpo.cli.verbs import main
from mindgrpo.config import load_config
from mindgrpo.errors import UserError
from mindgrpo.launch.options import read_options
from mindgrpo.launch.plan import has_config

EXAMPLE = ROOT / "examples/grpo/tiny_arithmetic/grpo_config.yaml"
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "examples/grpo/tiny_arithmetic/README.md",
    "examples/grpo/tiny_moe/README.md",
    "examples/grpo/gsm8k_smollm2/README.md",
    "examples/grpo/smollm2_sums/README.md",
    "examples/grpo/calculator/README.md",
    "examples/grpo/guess_number/README.md",
    "examples/grpo/smollm2_chain_sum/README.md",
    "examples/grpo/qwen_grpo_tutorial/README.md",
    "examples/cluster/README.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("examples/ascend/*/README.md")),
    "scripts/bench/README.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")),
    # Other pages in Chinese have the blocks of the English ones, byte for byte (test_docs_languages.py).
    "docs/zh/configuration.md",
]
RUN_KINDS, OTHER_KINDS = ("bash", "console", "python"), ("yaml", "text", "tree")
# The first line of a block that is a file.
NAMED = re.compile(r"# (\w+\.(?:py|yaml))\n")
SHORT = (
    *("--rl_config.max_steps", "10", "--rl_config.save_ckpt_interval", "10"),
    *("--rl_config.prompts_per_step", "2", "--rl_config.num_generations", "2"),
    *("--rl_config.eval_samples", "4"),
)
# Stands for Python once the scripts have done their part: writes its arguments.
RECORDER = f"""#!{sys.executable}
import json, os, sys
open(os.environ["RECORDED_ARGUMENTS"], "w").write(json.dumps(sys.argv[1:]))
"""


def all_blocks() -> Iterator[tuple[str, Block]]:
    yield from ((page, block) for page in PAGES for block in blocks_of(page))


def num_commands(block: Block) -> int:
    return 1 if block.kind == "python" else len(block.commands())


def test_every_block_has_a_language_and_only_commands_are_marked() -> None:
    for page, block in all_blocks():
        where = f"{page}:{block.line}"
        assert block.kind in RUN_KINDS + OTHER_KINDS, f"{where} is a block of kind '{block.kind}'"
        assert not block.not_run or block.kind in RUN_KINDS, f"{where} needs no mark"
    for page in PAGES:
        marks = (ROOT / page).read_text(encoding="utf-8").count("\n<!-- not run")
        assert marks == sum(block.not_run is not None for block in blocks_of(page)), page


def test_commands_are_found_that_run_and_that_are_marked() -> None:
    commands = [
        block for _, block in all_blocks() if block.kind in RUN_KINDS and num_commands(block)
    ]
    assert {block.not_run is None for block in commands} == {True, False}
    assert {"bash", "python"} <= {block.kind for block in commands}


def overrides_of(section: dict[str, Any], prefix: str = "--") -> Iterator[str]:
    for key, value in section.items():
        if isinstance(value, dict):
            yield from overrides_of(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={json.dumps(value)}"


def test_the_configurations_of_all_pages_load(subtests: pytest.Subtests, tmp_path: Path) -> None:
    for page, block in all_blocks():
        if block.kind == "yaml":
            with subtests.test(page=page, line=block.line):
                if named := NAMED.match(block.text):
                    (tmp_path / named[1]).write_text(block.text, encoding="utf-8")
                    load_config(tmp_path / named[1])
                else:
                    load_config(EXAMPLE, list(overrides_of(yaml.safe_load(block.text))))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """The clone in which one short run was trained, the folder `output` of which all pages get a copy."""
    clone = make_clone(tmp_path_factory.mktemp("trained") / "clone")
    clone.shell(f"bash scripts/quickstart.sh --ranks 1 {shlex.join(SHORT)}")
    assert (clone.folder / "output/latest/checkpoints/step_000010/manifest.json").is_file()
    return clone


def run_scripts(clone: Clone, command: str) -> None:
    """Runs quickstart.sh or launch.sh without the ranks, then all that the launcher checks before them."""
    recorded, programs = clone.folder / "recorded.json", clone.folder / "recorder"
    programs.mkdir(exist_ok=True)
    (programs / "python").write_text(RECORDER)
    (programs / "python").chmod(0o755)
    path = f"{programs}{os.pathsep}{clone.environment['PATH']}"
    clone.shell(command, PATH=path, RECORDED_ARGUMENTS=str(recorded))
    code, verb, *words = json.loads(recorded.read_text())[1:]
    assert "mindgrpo.cli.verbs" in code and verb == "launch"
    options = read_options(words, {})
    program, *arguments = options.command
    if program == "eval":
        arguments = list(options.command)
    assert has_config(arguments), f"{program} is started without --config, and nothing is checked"
    # A run goes on with its own settings only.
    short = SHORT if "--resume_training" in arguments else ()
    run_verb("check", "--ranks", str(options.num_ranks), *arguments, *short)


def run_verb(*words: str) -> None:
    try:
        status = main(words)
    except SystemExit as ended:
        status = int(ended.code or 0)
    # What `doctor` finds depends on the machine.
    assert status == 0 or words[:1] == ("doctor",), f"{words} ended with {status}"


def run_help(clone: Clone, program: str, words: list[str]) -> None:
    shown = subprocess.run(
        [sys.executable, program, "--help"],
        cwd=clone.folder,
        env=clone.environment,
        capture_output=True,
        text=True,
    )
    flags = [word.partition("=")[0] for word in words if word.startswith("--")]
    assert shown.returncode == 0, shown.stderr
    assert [flag for flag in flags if flag not in shown.stdout] == [], program


def run_command(clone: Clone, command: str, shown: dict[str, bool]) -> None:
    """Runs one command in its short form; `shown` has the files that the page shows, and whether they were used."""
    for file in shown:
        shown[file] |= file in command
    words = shlex.split(command)
    # Only generated pages are written this way; their test compares them.
    if words[-2:-1] == [">"]:
        assert (ROOT / words[-1]).is_file()
        words = words[:-2]
    match words:
        case ["bash", "scripts/quickstart.sh" | "scripts/launch.sh", *_]:
            run_scripts(clone, command)
        case ["python", "-m", "mindgrpo", "eval", *rest]:
            run_verb("eval", *rest, "--samples", "2")
        case ["python", "-m", "mindgrpo", *rest]:
            run_verb(*rest)
        case ["python", program, *rest] if program.startswith("scripts/"):
            run_help(clone, program, rest)
        case ["python", program, *_] if program in shown:
            clone.shell(f"{command} {shlex.join(SHORT)}")
        case ["python" | "cp", *_]:
            clone.shell(command)
        case _:
            pytest.fail(
                f"say in this test how '{words[0]}' runs in a short form, or mark the block"
            )


@pytest.fixture
def clone(trained: Clone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clone:
    """A clone of a page's own, with the run; also the present folder."""
    made = make_clone(tmp_path / "clone")
    shutil.copytree(trained.folder / "output", made.folder / "output", symlinks=True)
    monkeypatch.chdir(made.folder)
    monkeypatch.setenv("PATH", made.environment["PATH"])
    return made


@pytest.fixture(scope="module")
def done() -> set[str]:
    """Commands that have run on an earlier page, where they do the same: each has the same clone."""
    return set()


def runs_alike(command: str, shown: dict[str, bool]) -> bool:
    starts = command.startswith(("bash scripts/", "python -m mindgrpo "))
    return starts and not any(file in command for file in shown)


def own_folder(clone: Clone, name: str) -> Path:
    """A copy of a folder in the place of the link to the repository's, so that tests can write there."""
    linked = clone.folder
    for part in Path(name).parts:
        linked = linked / part
        if linked.is_symlink():
            source = linked.resolve()
            linked.unlink()
            linked.mkdir()
            for path in source.iterdir():
                (linked / path.name).symlink_to(path)
    (linked / "made").unlink(missing_ok=True)
    return linked


def test_quickstart_starts_each_example_on_each_number_of_ranks_that_it_offers(
    clone: Clone, subtests: pytest.Subtests
) -> None:
    picture_runs.make_example(own_folder(clone, "examples/grpo/tiny_shapes") / "made")
    for example in ("tiny_arithmetic", "tiny_moe", "tiny_shapes"):
        for ranks in ("8", "4", "2", "1"):
            with subtests.test(example=example, ranks=ranks):
                words = f"--rl_config.max_steps 3 --ranks {ranks} --example {example}"
                run_scripts(clone, f"bash scripts/quickstart.sh {words}")


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run(page: str, clone: Clone, done: set[str]) -> None:
    shown: dict[str, bool] = {}
    for block in blocks_of(page):
        named = NAMED.match(block.text)
        is_file = block.kind == "python" or (block.kind == "yaml" and named)
        if block.not_run is not None or not (is_file or block.kind in RUN_KINDS):
            continue
        if is_file:
            assert named, f"{page}:{block.line}: name the file in the first line, or mark the block"
            (clone.folder / named[1]).write_text(block.text, encoding="utf-8")
            shown[named[1]] = False
        else:
            for command in block.commands():
                if command not in done or not runs_alike(command, shown):
                    run_command(clone, command, shown)
                done.add(command)
    assert [name for name, is_used in shown.items() if not is_used] == [], page


@pytest.mark.parametrize(
    ("command", "refused"),
    [
        ("bash scripts/launch.sh --ranks 8 -- main.py --config my.yaml", UserError),
        ("python -m mindgrpo plan --config my.yaml", AssertionError),
        ("python scripts/faults/fuzz.py --rounds 3", AssertionError),
        ("python my_run.py --rl_config.max_steps 3", AssertionError),
        ("tensorboard --logdir output", pytest.fail.Exception),
    ],
)
def test_a_command_that_fails_when_pasted_fails_here(
    command: str, refused: type[BaseException], clone: Clone
) -> None:
    with pytest.raises(refused):
        run_command(clone, command, {})
