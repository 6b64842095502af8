"""`python -m mindgrpo config`: one key in words, and the page of all keys, which is true.

Does not prove that a description is a good one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mindgrpo.cli.verbs import main
from mindgrpo.config.command_line import FLAGS
from mindgrpo.config.names import KNOWN, RETIRED, SECTIONS, aliases
from mindgrpo.config.reference import explain, reference
from mindgrpo.errors import UserError

ALIASES = (*(n for key in aliases().by_key for n in aliases().names_of(key)), *aliases().absent)
PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"


def test_the_page_is_what_the_schema_says() -> None:
    wanted = "write it anew with: python -m mindgrpo config --reference > docs/configuration.md"
    assert PAGE.read_text("utf-8") == reference() + "\n", wanted


def test_the_page_has_every_key_and_every_name() -> None:
    page = reference()
    for key in KNOWN:
        assert f"`{key}`" in page or f"| `{key.rpartition('.')[2]}` |" in page, key
    for name in (*ALIASES, *FLAGS):
        assert f"`{name}`" in page, name


def test_the_page_is_well_formed_markdown() -> None:
    for line in reference().splitlines():
        if line.startswith("|"):
            assert line.endswith("|")
            cells = line.replace("\\|", "").count("|") - 1
            assert cells in (2, 4), line


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("rl_config.beta", ["takes    a number, at least 0", "default  0.01", "kl_loss_coef"]),
        ("beta", ["rl_config.beta: "]),
        ("--dataset_file", ["rl_config.dataset_file: ", "flag     --dataset_file, --rl_config."]),
        ("clip_ratio", ["clip_ratio is called rl_config.epsilon_low here.", "default  0.2"]),
        ("actor_config.clip_ratio", ["is called rl_config.epsilon_low here."]),
        ("actor_rollout_ref.rollout.n", ["n is called rl_config.num_generations here."]),
        ("bf16", ["bf16 is no key here: everything is computed and kept in float32"]),
        ("rl_config.align_type", ["is retired, it has no effect: "]),
        ("ref_config.recompute_config.recompute", ["ref_config.recompute_config is retired"]),
        ("actor_config.optimizer", ["is a section of", "  actor_config.optimizer.eps"]),
        ("optimizer", ["actor_config.optimizer is a section of"]),
        (
            "generate_config.use_vllm",
            ["which is not available yet; where it is asked for, the embedded generator is used"],
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
    assert capsys.readouterr().out == PAGE.read_text("utf-8")
    for words in ([], ["--explain"], ["--reference", "x"], ["--all"]):
        assert main(["config", *words]) == 2
        refused = capsys.readouterr()
        assert refused.out == "" and refused.err.startswith("mindgrpo: config takes --explain KEY")
