"""The tokenizer beside an exported model: transformers renders with it what the run rendered, token for token.

Does not prove that every template renders alike in other libraries, nor a run (test_evaluation.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from data_sets import MODEL, change, copy_tokenizer

from mindgrpo.data.messages import Message
from mindgrpo.data.tokenizer import Tokenizer, load_tokenizer, write_tokenizer

ASKED: list[Message] = [{"role": "user", "content": "2 + 3 = ?"}]
TALK: list[Message] = [
    {"role": "system", "content": "Be short."},
    *ASKED,
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "And 4 more?"},
]
JINJA = (
    "{{ messages[-1].content | upper }} {{ eos_token }}{% if add_generation_prompt %}!{% endif %}\n"
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return copy_tokenizer(tmp_path / "source")


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def written(source: Path, tmp_path: Path, name: str | None) -> tuple[Tokenizer, Path]:
    """The tokenizer of a run with the chat template `name`, and the folder it was written to."""
    before = content(source)
    tokenizer = load_tokenizer(source).with_template(name)
    target = tmp_path / "hf"
    target.mkdir()
    generation = source / "generation_config.json"
    if generation.is_file():  # comes with the weights
        (target / generation.name).write_bytes(generation.read_bytes())
    write_tokenizer(tokenizer, target, name is not None)
    assert content(source) == before
    return tokenizer, target


def rendered_by_transformers(folder: Path, messages: list[Message]) -> tuple[str, list[int]]:
    library = pytest.importorskip("transformers")
    own: Any = library.AutoTokenizer.from_pretrained(folder)
    text = own.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text, own(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("name", ["qwen_r1", "base_r1", "JINJA", "FILE", None])
def test_transformers_renders_the_prompts_of_the_run(
    source: Path, tmp_path: Path, name: str | None
) -> None:
    if name == "JINJA":
        (tmp_path / "mine.jinja").write_text(JINJA)
        name = str(tmp_path / "mine.jinja")
    if name == "FILE":
        slots = {
            "format_user": {"slots": ["<|im_start|>Q: {{content}}\nA:"]},
            "format_system": {"slots": ["S: {{content}}\n"]},
            "stop_words": ["<|im_end|>"],
        }
        (tmp_path / "mine.json").write_text(json.dumps([{"name": "mine", **slots}]))
        name = f"{tmp_path}/mine.json:mine"
    run, target = written(source, tmp_path, name)
    again = load_tokenizer(target)
    for messages in (ASKED, TALK):
        expected = run.render(messages)
        assert again.render(messages) == expected
        assert rendered_by_transformers(target, messages) == (expected, run.encode(expected))
    assert again.stop_ids == load_tokenizer(source).with_template(name).stop_ids


def test_a_template_that_is_not_chosen_changes_no_byte(source: Path, tmp_path: Path) -> None:
    (source / "generation_config.json").unlink()
    _, target = written(source, tmp_path, None)
    assert content(target) == content(source)


@pytest.mark.parametrize("has_file", [True, False])
def test_the_token_that_ends_a_turn_ends_what_is_generated(
    source: Path, tmp_path: Path, has_file: bool
) -> None:
    change(source / "tokenizer_config.json", eos_token="<|endoftext|>")
    generation = source / "generation_config.json"
    generation.write_text('{"eos_token_id": 0, "temperature": 0.5}')
    if not has_file:
        generation.unlink()
    run = load_tokenizer(source).with_template("qwen_r1")
    assert run.stop_ids == (0, 2)
    target = tmp_path / "hf"
    target.mkdir()
    if has_file:  # a model's file, which comes with the weights
        (target / generation.name).write_bytes(generation.read_bytes())
    write_tokenizer(run, target, True)
    left = json.loads((target / generation.name).read_text())
    assert left["eos_token_id"] == [0, 2] and ("temperature" in left) is has_file
    assert load_tokenizer(target).stop_ids == run.stop_ids


def test_other_named_templates_stay_and_the_chosen_one_becomes_the_default(
    source: Path, tmp_path: Path
) -> None:
    tool, plain = "tool: {{ messages[0].content }}", "plain: {{ messages[0].content }}"
    named = [{"name": "default", "template": plain}, {"name": "tool", "template": tool}]
    change(source / "tokenizer_config.json", chat_template=named)
    _, target = written(source, tmp_path, "tool")
    again = load_tokenizer(target)
    assert again.render(ASKED) == again.with_template("tool").render(ASKED) == "tool: 2 + 3 = ?"
    assert again.named_templates["tool"] == tool
    assert rendered_by_transformers(target, ASKED)[0] == "tool: 2 + 3 = ?"


def test_a_tokenizer_of_another_folder_takes_the_place_of_the_models(
    source: Path, tmp_path: Path
) -> None:
    target = tmp_path / "hf"
    target.mkdir()
    (target / "vocab.json").write_text("{}")
    (target / "config.json").write_text("{}")
    write_tokenizer(load_tokenizer(source), target, False)
    assert not (target / "vocab.json").exists() and (target / "config.json").exists()
    assert (target / "tokenizer.json").read_bytes() == (MODEL / "tokenizer.json").read_bytes()
