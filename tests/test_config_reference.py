"""`python -m mindgrpo config`: one key in words, and the page of all keys, which is true.

Does not prove that a description is a good one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mindgrpo.cli.verbs import main
from mindgrpo.config.command_line import FLAGS
from mindgrpo.config.names import KNOWN, RETIRED, SECTIONS, aliases
from mindgrpo.config.reference import explain, other_trainers, reference
from mindgrpo.errors import UserError

ALIASES = (*(n for key in aliases().by_key for n in aliases().names_of(key)), *aliases().absent)
DOCS = Path(__file__).resolve().parent.parent / "docs"
# Made by `python -m mindgrpo config FLAG > docs/PAGE`: flag, page, what makes it.
PAGES = [
    ("--reference", "configuration.md", reference),
    ("--other_trainers", "from_other_trainers.md", other_trainers),
]


@pytest.mark.parametrize(("flag", "name", "made"), PAGES)
def test_a_generated_page_is_what_the_data_says(
    flag: str, name: str, made: Callable[[], str]
) -> None:
    wanted = f"write it anew with: python -m mindgrpo config {flag} > docs/{name}"
    assert (DOCS / name).read_text("utf-8") == made() + "\n", wanted
    assert f"python -m mindgrpo config {flag} > docs/{name}" in made()


def test_the_pages_have_every_key_and_every_name() -> None:
    page = reference()
    for key in KNOWN:
        assert f"`{key}`" in page or f"| `{key.rpartition('.')[2]}` |" in page, key
    for flag in FLAGS:
        assert f"`{flag}`" in page, flag
    for name in (*ALIASES, *aliases().by_key, *aliases().same_in_mindrlhf):
        assert f"`{name}`" in other_trainers(), name


def test_the_page_of_other_trainers_has_each_name_in_its_trainers_column() -> None:
    (row,) = [r for r in other_trainers().splitlines() if r.startswith("| `rl_config.epsilon_low`")]
    mindrlhf, verl, trl, others = row.split("|")[2:6]
    assert mindrlhf.strip() == "same" and trl.strip() == "`epsilon`"
    assert "`actor_rollout_ref.actor.clip_ratio_low`" in verl and "`eps_clip`" in others


@pytest.mark.parametrize("page", [reference(), other_trainers()])
def test_a_generated_page_is_well_formed_markdown(page: str) -> None:
    for line in page.splitlines():
        if line.startswith("|"):
            assert line.endswith("|")
            cells = line.replace("\\|", "").count("|") - 1
            assert cells in (2, 4, 5), line


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("rl_config.beta", ["takes    a number, at least 0", "default  0.01", "kl_loss_coef"]),
        ("beta", ["rl_config.beta: "]),
        ("--dataset_file", ["rl_config.dataset_file: ", "flag     --dataset_file, --rl_config."]),
        ("clip_ratio", ["clip_ratio is called rl_config.epsilon_low here: both", "default  null"]),
        ("actor_config.clip_ratio", ["is called rl_config.epsilon_low here: both"]),
        ("actor_rollout_ref.rollout.n", ["n is called rl_config.num_generations here."]),
        (
            "actor_rollout_ref.rollout.val_kwargs.temperature",
            ["is called rl_config.eval_temperature here."],
        ),
        ("temperature", ["generate_config.sampling_config.temperature: ", "in TRL: temperature"]),
        ("bf16", ["bf16 is no key here: set context.compute_dtype"]),
        ("rl_config.align_type", ["is retired, it has no effect: "]),
        ("ref_config.recompute_config.recompute", ["ref_config.recompute_config is retired"]),
        ("actor_config.optimizer", ["is a section of", "  actor_config.optimizer.eps"]),
        ("optimizer", ["actor_config.optimizer is a section of"]),
        (
            "generate_config.use_vllm",
            ["generate_config.use_vllm: 1: generate with vLLM", "in TRL: use_vllm"],
        ),
        ("rl_config.enable_compile_cache", ["which is not available yet; leave it at False"]),
        ("model_config", ["actor_config.model_config: ", "ref_config.model_config: "]),
    ],
)
def test_a_name_is_explained(name: str, words: list[str]) -> None:
    said = explain(name)
    for part in words:
        assert part in said


def test_every_name_that_is_known_can_be_explained() -> None:
    for name in (*KNOWN, *SECTIONS, *ALIASES, *FLAGS):
        assert explain(name)


def test_a_retired_key_is_not_offered_in_its_section() -> None:
    assert "rl_config.align_type" in RETIRED
    assert "rl_config.align_type" not in explain("rl_config")


def test_a_name_that_nobody_has_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        UserError, match=r"'rl_config.bta' is no key .* did you mean rl_config.beta"
    ):
        explain("rl_config.bta")


def test_the_verb_prints_and_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--explain", "rl_config.beta", "rl_config.seed"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("rl_config.beta: ") and "\n\nrl_config.seed: " in said
    assert main(["config", "--reference"]) == 0
    assert capsys.readouterr().out == (DOCS / "configuration.md").read_text("utf-8")
    assert main(["config", "--other_trainers"]) == 0
    assert capsys.readouterr().out == (DOCS / "from_other_trainers.md").read_text("utf-8")
    for words in ([], ["--explain"], ["--reference", "x"], ["--all"]):
        assert main(["config", *words]) == 2
        refused = capsys.readouterr()
        assert refused.out == "" and refused.err.startswith("mindgrpo: config takes --explain KEY")
