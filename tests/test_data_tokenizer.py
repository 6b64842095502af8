"""Tokenizer directories as text and ids, and the chat templates that prompts go through.

Does not prove that templates render as transformers renders them: test_chat_templates.py does.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from data_sets import MODEL, change, copy_tokenizer
from tokenizers import pre_tokenizers

from mindgrpo.data.chat_template import choose_template, shipped_names
from mindgrpo.data.tokenizer import Tokenizer, load_tokenizer
from mindgrpo.errors import UserError

ASKED = [{"role": "user", "content": "x"}]
TALK = [*ASKED, {"role": "assistant", "content": "y"}, {"role": "user", "content": "z"}]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return copy_tokenizer(tmp_path / "model")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(MODEL)


def added(text: str, special: bool = True) -> dict[str, Any]:
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    return {"content": text, "special": special, **flags}


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """vocab.json and merges.txt of a byte-level vocabulary in which "ab" and "abc" are one token each."""
    folder = tmp_path / "older"
    folder.mkdir()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: number for number, text in enumerate([*letters, "ab", "abc", "Ġa"])}
    (folder / "vocab.json").write_text(json.dumps(vocab), "utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\na b\nab c\nĠ a\n", "utf-8")
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "added_tokens_decoder": {
            "259": added("<|endoftext|>"),
            "260": added("<|im_start|>"),
            "261": added("<|im_end|>"),
            "262": added("<tool>", special=False),
        },
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    return folder


def test_rendering_encoding_and_decoding(tokenizer: Tokenizer) -> None:
    text = tokenizer.render([{"role": "user", "content": "Hi 12"}])
    assert text == "<|im_start|>user\nHi 12<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(text)
    assert ids[0] == 1 and tokenizer.eos_id in ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids) == "user\nHi 12\nassistant\n"
    shown = tokenizer.render(ASKED, add_generation_prompt=False)
    assert shown == "<|im_start|>user\nx<|im_end|>\n"


def test_stop_ids_are_the_union_of_generation_config_and_tokenizer(directory: Path) -> None:
    assert load_tokenizer(directory).stop_ids == (2, 0)
    change(directory / "generation_config.json", eos_token_id=0)
    assert load_tokenizer(directory / "tokenizer.json").stop_ids == (0, 2)
    (directory / "generation_config.json").unlink()
    loaded = load_tokenizer(directory)
    assert (loaded.stop_ids, loaded.eos_id, loaded.pad_id, loaded.bos_id) == ((2,), 2, 0, None)


def test_special_tokens_may_be_objects_and_pad_falls_back_to_eos(directory: Path) -> None:
    (directory / "special_tokens_map.json").unlink()
    (directory / "generation_config.json").unlink()
    entry = {"content": "<|im_start|>", "lstrip": False}
    change(directory / "tokenizer_config.json", bos_token=entry, pad_token=None)
    loaded = load_tokenizer(directory)
    assert (loaded.bos_id, loaded.pad_id, loaded.eos_id) == (1, 2, 2)


def test_truncation_saved_in_tokenizer_json_is_not_applied(directory: Path) -> None:
    cut = {"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    change(directory / "tokenizer.json", truncation=cut)
    assert len(load_tokenizer(directory).encode("1234567")) == 7


def test_a_vocabulary_and_merges_are_enough(older: Path) -> None:
    loaded = load_tokenizer(older)
    assert (loaded.stop_ids, loaded.pad_id, loaded.vocab_size) == ((261,), 259, 263)
    assert loaded.encode("abc ab<|im_end|><tool>") == [257, 220, 256, 261, 262]
    assert len(loaded.encode("12")) == 2
    assert loaded.encode("e\u0301") == loaded.encode("\u00e9")  # Qwen composes accents
    assert loaded.decode(loaded.encode("ab<|im_end|> cé<tool>")) == "ab cé<tool>"


def test_a_vocabulary_under_other_names_is_read_as_well(older: Path) -> None:
    named = (older / "v.json", older / "m.txt")
    for path, name in zip(named, ("vocab.json", "merges.txt"), strict=True):
        (older / name).rename(path)
    assert load_tokenizer(older, named).encode("abc") == [257]
    with pytest.raises(UserError, match="holds no tokenizer; it must contain tokenizer.json"):
        load_tokenizer(older)


def test_byte_level_vocabularies_encode_as_in_transformers(older: Path) -> None:
    transformers = pytest.importorskip("transformers")
    texts = [
        "abc'll do 12,345!\n\n  x\t",
        "日本 e\u0301 🙂 <|im_start|>user\nab<tool>",
        "  ",
        "a\r\n b",
    ]
    for name in ("Qwen2Tokenizer", "GPT2Tokenizer"):
        change(older / "tokenizer_config.json", tokenizer_class=name)
        theirs = transformers.AutoTokenizer.from_pretrained(str(older), local_files_only=True)
        ours = load_tokenizer(older)
        for text in texts:
            ids = theirs.backend_tokenizer.encode(text, add_special_tokens=False).ids
            assert ours.encode(text) == ids, (name, text)
            assert ours.decode(ids) == theirs.decode(
                ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )


def test_older_lists_of_added_tokens_are_read(older: Path) -> None:
    change(older / "tokenizer_config.json", added_tokens_decoder=None)
    listed = {"<|im_end|>": 261, "<|endoftext|>": 259, "<|im_start|>": 260, "<tool>": 262}
    (older / "added_tokens.json").write_text(json.dumps(listed))
    (older / "special_tokens_map.json").write_text(
        '{"additional_special_tokens": ["<|im_start|>"]}'
    )
    loaded = load_tokenizer(older)
    assert loaded.encode("<|im_start|><tool><|im_end|>") == [260, 262, 261]
    assert loaded.decode([260, 262, 261]) == "<tool>"


def test_files_that_do_not_belong_together_are_refused(older: Path) -> None:
    change(older / "tokenizer_config.json", added_tokens_decoder={"300": added("<|im_end|>")})
    with pytest.raises(
        UserError, match=r"<\|im_end\|> in .* has the id 300, but the tokenizer gives it 259"
    ):
        load_tokenizer(older)
    (older / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match="tells what kind of tokenizer vocab.json is"):
        load_tokenizer(older)
    (older / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(UserError, match="no token ends a sample"):
        load_tokenizer(older)
    (older / "merges.txt").write_text("#version: 0.2\na b c d\n")
    with pytest.raises(UserError, match="the tokenizer in .* cannot be read"):
        load_tokenizer(older)


def test_bare_files_with_qwens_vocabulary_get_its_special_tokens(older: Path) -> None:
    (older / "tokenizer_config.json").unlink()
    vocab = json.loads((older / "vocab.json").read_text("utf-8"))
    vocab |= {f"<{number}>": number for number in range(len(vocab), 151643)}
    (older / "vocab.json").write_text(json.dumps(vocab), "utf-8")
    loaded = load_tokenizer(older)
    assert loaded.encode("<|endoftext|><|im_start|><|im_end|>") == [151643, 151644, 151645]
    assert (loaded.pad_id, loaded.stop_ids) == (151643, (151643,))
    with pytest.raises(UserError, match="has no chat template .* one of base_r1"):
        loaded.render(ASKED)
    assert loaded.with_template("qwen").stop_ids == (151643, 151645)


def test_unusable_directories_are_one_sentence(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere does not exist; set rl_config.tokenizer_dir"):
        load_tokenizer(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no tokenizer; it must contain tokenizer.json"):
        load_tokenizer(tmp_path / "empty")
    change(directory / "tokenizer_config.json", chat_template=None)
    with pytest.raises(UserError, match='set "chat_template" in .*tokenizer_config.json'):
        load_tokenizer(directory).render(ASKED)
    for template, said in (
        ("{{ raise_exception('no way') }}", "cannot render .*no way"),
        ("{{ messages[0].content + 1 }}", "cannot render .*can only concatenate"),
        ("{% if %}", "is not valid jinja"),
    ):
        change(directory / "tokenizer_config.json", chat_template=template)
        with pytest.raises(UserError, match=said):
            load_tokenizer(directory).render(ASKED)
    change(directory / "tokenizer_config.json", eos_token="<eos>")
    with pytest.raises(UserError, match="eos_token '<eos>' is not in the vocabulary"):
        load_tokenizer(directory)
    (directory / "tokenizer.json").write_text("{", "utf-8")
    with pytest.raises(UserError, match="tokenizer.json' is not JSON"):
        load_tokenizer(directory)


def test_a_panic_of_the_library_is_one_sentence(
    directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text("utf-8"))
    content["model"]["continuing_subword_prefix"] = "longer than what is merged"
    path.write_text(json.dumps(content), "utf-8")
    with pytest.raises(UserError, match=r"tokenizer.json cannot be read: .*; copy"):
        load_tokenizer(directory)
    assert capfd.readouterr() == ("", "")


def test_a_template_beside_the_configuration_is_used(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}{{ eos_token }}")
    assert load_tokenizer(directory).render(ASKED) == "x<|im_end|>"


def test_a_tokenizers_own_named_templates_come_before_those_shipped(directory: Path) -> None:
    own = [{"name": "default", "template": "D"}, {"name": "qwen", "template": "own"}]
    change(directory / "tokenizer_config.json", chat_template=own)
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "rag.jinja").write_text("R")
    loaded = load_tokenizer(directory)
    rendered = [loaded.with_template(name).render(ASKED) for name in (None, "qwen", "rag")]
    assert rendered == ["D", "own", "R"]


EXPECTED = {
    "qwen": "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nx<|im_end|>\n"
    "<|im_start|>assistant\ny<|im_end|>\n<|im_start|>user\nz<|im_end|>\n<|im_start|>assistant\n",
    "qwen3": "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\ny<|im_end|>\n"
    "<|im_start|>user\nz<|im_end|>\n<|im_start|>assistant\n",
    "qwen3_no_think": "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\ny<|im_end|>\n"
    "<|im_start|>user\nz<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    "empty": "x\ny\nz",
}


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_shipped_templates_render_conversations(tokenizer: Tokenizer, name: str) -> None:
    chosen = tokenizer.with_template(name)
    assert chosen.render(TALK) == EXPECTED[name]
    given = chosen.render([{"role": "system", "content": "S"}, *TALK])
    assert "S" in given and "helpful" not in given


def test_r1_templates_ask_for_their_format_once(tokenizer: Tokenizer) -> None:
    rendered = tokenizer.with_template("qwen_r1").render(TALK)
    assert rendered.count("</think>") == rendered.count("</answer>") == 1
    assert rendered.index("</answer>") < rendered.index("x<|im_end|>")
    system = tokenizer.with_template("qwen_math_r1").render(ASKED)
    assert r"\boxed{}" in system.split("<|im_end|>")[0]
    plain = tokenizer.with_template("base_r1").render(ASKED)
    assert plain.endswith("</answer>.\nUser: x\nAssistant:") and "<|" not in plain


def test_every_shipped_template_keeps_the_order_of_turns(tokenizer: Tokenizer) -> None:
    for name in shipped_names():
        template = choose_template(name, {})
        text = replace(tokenizer, template=template).render(TALK)
        assert text.count("x") >= 1 and text.rindex("z") > text.rindex("y")
        assert template.stop is None or template.stop in template.markers


def test_a_named_template_must_fit_the_vocabulary_and_its_turns_end_a_sample(
    tokenizer: Tokenizer, directory: Path
) -> None:
    with pytest.raises(
        UserError, match=r"llama3 writes <\|begin_of_text\|>, .*no token of the tokenizer"
    ):
        tokenizer.with_template("llama3")
    change(directory / "tokenizer_config.json", eos_token="<|endoftext|>")
    change(directory / "generation_config.json", eos_token_id=0)
    loaded = load_tokenizer(directory)
    assert (loaded.stop_ids, loaded.with_template("qwen").stop_ids) == ((0,), (0, 2))


def slots(*texts: Any) -> dict[str, Any]:
    return {"slots": list(texts)}


ENTRIES = [
    {
        "name": "mine_r1",
        "format_user": slots(
            '<|im_start|>user\nSay "so".\n{{content}}<|im_end|>\n<|im_start|>assistant\n'
        ),
        "format_system": slots("<|im_start|>system\n{{content}}<|im_end|>\n"),
        "format_separator": slots("\n"),
        "default_system": "Be kind.",
        "stop_words": ["<|im_end|>"],
    },
    {
        "name": "prefixed",
        "format_user": slots("U {{content}} A "),
        "format_prefix": slots(["eos_token"], {"token": "<|im_start|>"}),
    },
]


def test_templates_files_of_other_trainers_are_read(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "templates.json"
    path.write_text(json.dumps(ENTRIES))
    chosen = tokenizer.with_template(f"{path}:mine_r1")
    turn = '<|im_start|>user\nSay "so".\n{}<|im_end|>\n<|im_start|>assistant\n'
    system = "<|im_start|>system\n{}<|im_end|>\n"
    assert chosen.render(ASKED) == system.format("Be kind.") + turn.format("x")
    assert chosen.render([{"role": "system", "content": "S"}, *TALK]) == (
        system.format("S") + turn.format("x") + "y<|im_end|>\n" + turn.format("z")
    )
    prefixed = tokenizer.with_template(f"{path}:prefixed")
    assert prefixed.render(TALK) == "<|im_end|><|im_start|>U x A y<|im_end|>U z A "


def test_templates_files_hold_jinja_by_name(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "templates.json"
    for content in ({"a": "A", "b": "B"}, [{"name": n, "template": n.upper()} for n in "ab"]):
        path.write_text(json.dumps(content))
        assert tokenizer.with_template(f"{path}:b").render(ASKED) == "B"
        with pytest.raises(UserError, match="needs a name after a colon; .*:NAME with one of a, b"):
            tokenizer.with_template(str(path))
        with pytest.raises(UserError, match="has no template 'c'"):
            tokenizer.with_template(f"{path}:c")
    path.write_text('{"only": "O"}')
    assert tokenizer.with_template(str(path)).render(ASKED) == "O"
    for broken, said in (("{", "is not JSON"), ("[1]", "must hold"), ("{}", "must hold")):
        path.write_text(broken)
        with pytest.raises(UserError, match=said):
            tokenizer.with_template(f"{path}:a")
    for entry, said in (
        ({"name": "a", "format_user": slots(3)}, "holds 3, which is not a slot"),
        ({"name": "a", "format_user": slots(["a-b"])}, "is not the name of a token"),
    ):
        path.write_text(json.dumps([entry]))
        with pytest.raises(UserError, match=said):
            tokenizer.with_template(f"{path}:a")


def test_unknown_templates_are_refused_with_the_names_there_are(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="no chat template 'qwen_r2'; .* one of base_r1, .*qwen_r1"):
        tokenizer.with_template("qwen_r2")
    with pytest.raises(UserError, match="rl_config.chat_template .* cannot be read"):
        tokenizer.with_template(str(tmp_path / "none.jinja"))
    (tmp_path / "mine.jinja").write_text("<|new|>{{ messages[0].content }}")
    assert tokenizer.with_template(str(tmp_path / "mine.jinja")).render(ASKED) == "<|new|>x"
