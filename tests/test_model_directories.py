"""Model directories as other programs write them: what is read where a file is missing, as transformers reads it.

Does NOT prove that a directory's files were made for each other.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_sets import MODEL, change, copy_tokenizer, write_lines
from safetensors.numpy import load_file, save_file
from tables import each_row

from mindgrpo.data.prompts import PromptForm, PromptSet
from mindgrpo.data.sources import open_examples
from mindgrpo.data.supervised import SupervisedForm, SupervisedRowForm
from mindgrpo.data.tokenizer import load_tokenizer, write_tokenizer
from mindgrpo.errors import UserError
from mindgrpo.models.decoder_config import decoder_config, read_config
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.weights.pretrained import check_tensors

TEXT = "<|im_start|>user\n2+3?<image><|im_end|>\n"
ASKED = [{"role": "user", "content": "2+3?"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
Change = Callable[[Path], Any]


def added(text: str, special: bool = True) -> dict[str, Any]:
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    return {"content": text, "special": special, **flags}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    own = copy_tokenizer(tmp_path / "model")
    shutil.copy(MODEL / "config.json", own / "config.json")
    return own


def settings(**changes: Any) -> Change:
    return lambda folder: change(folder / "tokenizer_config.json", **changes)


def files(**contents: Any) -> Change:
    """Writes JSON files, or removes those that are None, by name without suffix."""

    def write(folder: Path) -> None:
        for name, content in contents.items():
            path = folder / f"{name}.json"
            path.unlink(missing_ok=True)
            if content is not None:
                path.write_text(json.dumps(content))

    return write


def templates(beside: str | None = None, **further: str) -> Change:
    def write(folder: Path) -> None:
        if beside is not None:
            (folder / "chat_template.jinja").write_text(beside)
        (folder / "additional_chat_templates").mkdir(exist_ok=True)
        for name, text in further.items():
            (folder / "additional_chat_templates" / f"{name}.jinja").write_text(text)

    return write


def both(*changes: Change) -> Change:
    return lambda folder: [one(folder) for one in changes]


SHOWN = (
    "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ image_token }}|{{ messages[0].content }}"
)
NAMED = [
    {"name": "default", "template": SHOWN},
    {"name": "tool_use", "template": "tools: {{ tools[0].function.name }}"},
]
DIRECTORIES: dict[str, Change] = {
    "as it is": lambda folder: None,
    "special tokens in the map alone": both(
        settings(eos_token=None, pad_token=None, added_tokens_decoder=None, chat_template=SHOWN)
    ),
    "another end in the map": both(
        settings(added_tokens_decoder=None, chat_template=SHOWN),
        files(special_tokens_map={"eos_token": "<|endoftext|>", "pad_token": added("<|im_end|>")}),
    ),
    "a map that is not read beside added tokens": both(
        settings(chat_template=SHOWN), files(special_tokens_map={"eos_token": "<|endoftext|>"})
    ),
    "neither settings nor map": both(
        files(tokenizer_config=None, special_tokens_map=None), templates(SHOWN)
    ),
    "neither, of another class": both(
        files(tokenizer_config=None, special_tokens_map=None),
        lambda folder: change(folder / "config.json", model_type="gpt2"),
        templates(SHOWN),
    ),
    "a token of the model's own": settings(image_token="<image>", chat_template=SHOWN),
    "tokens of the model's own in an object": settings(
        extra_special_tokens={"image_token": "<image>"}, chat_template=SHOWN
    ),
    "added tokens that tokenizer.json lacks": lambda folder: change(
        folder / "tokenizer_config.json",
        added_tokens_decoder={
            **json.loads((folder / "tokenizer_config.json").read_text())["added_tokens_decoder"],
            "352": added("<image>"),
            "353": added("3?", special=False),
        },
    ),
    "added tokens of a file of their own": both(
        settings(added_tokens_decoder=None), files(added_tokens={"<image>": 352})
    ),
    "a padding token that tokenizer.json lacks": settings(pad_token="[PAD]", chat_template=SHOWN),
    "named templates": settings(chat_template=NAMED),
    "named templates in an object": settings(
        chat_template={entry["name"]: entry["template"] for entry in NAMED}
    ),
    "a template beside named ones": both(settings(chat_template=NAMED), templates("beside")),
    "templates in files": templates("beside", tool_use="{{ tools[0].function.name }} of a file"),
}


@each_row("name", DIRECTORIES)
def test_a_directory_is_read_as_transformers_reads_it(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    library = pytest.importorskip("transformers")
    folder = copy_tokenizer(tmp_path_factory.mktemp("directory") / "model")
    shutil.copy(MODEL / "config.json", folder / "config.json")
    DIRECTORIES[name](folder)
    theirs: Any = library.AutoTokenizer.from_pretrained(str(folder))
    ours = load_tokenizer(folder)
    assert ours.encode(TEXT) == theirs(TEXT, add_special_tokens=False)["input_ids"]
    ids = ours.encode(TEXT)
    assert ours.decode(ids) == theirs.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    assert ours.eos_id == theirs.eos_token_id and theirs.pad_token_id in (None, ours.pad_id)
    for tools in (None, TOOLS):
        text = theirs.apply_chat_template(ASKED, tools=tools, tokenize=False)
        variables = {"tools": tools} if tools else {}
        assert ours.render(ASKED, False, **variables) == text


@each_row(
    ("generation", "config", "stops"),
    [
        ([2, 0], [5], (2, 0)),
        (None, [5, 6], (5, 6, 2)),
        (None, 5, (5, 2)),
        (None, None, (2,)),
        ("no id", [5, 6], (5, 6, 2)),
        ("null", 5, (5, 2)),
    ],
)
def test_a_model_ends_where_generation_config_else_config_says(
    generation: Any, config: Any, stops: tuple[int, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = copy_tokenizer(tmp_path_factory.mktemp("ends") / "model")
    held = {"no id": {}, "null": {"eos_token_id": None}}
    own = None if generation is None else held.get(str(generation), {"eos_token_id": generation})
    files(generation_config=own, config={"eos_token_id": config})(folder)
    assert load_tokenizer(folder).stop_ids == stops


def test_a_model_that_a_tokenizer_of_another_folder_is_given_ends_where_its_own_files_say(
    folder: Path, tmp_path: Path
) -> None:
    other = copy_tokenizer(tmp_path / "tokenizer")
    (other / "generation_config.json").unlink()
    change(folder / "generation_config.json", eos_token_id=[7, 2])
    assert load_tokenizer(other).stop_ids == (2,)
    assert load_tokenizer(other, model_directory=folder).stop_ids == (7, 2)


def test_an_exported_model_keeps_the_ends_that_only_config_json_names(
    folder: Path, tmp_path: Path
) -> None:
    files(generation_config=None)(folder)
    change(folder / "config.json", eos_token_id=[5, 0])
    change(folder / "tokenizer_config.json", eos_token="<|endoftext|>")
    run = load_tokenizer(folder).with_template("qwen_r1")
    assert run.stop_ids == (5, 0, 2)
    target = tmp_path / "hf"
    target.mkdir()
    shutil.copy(folder / "config.json", target / "config.json")
    write_tokenizer(run, target, True)
    assert load_tokenizer(target).stop_ids == run.stop_ids


def test_added_tokens_with_other_ids_than_listed_are_refused(folder: Path) -> None:
    change(folder / "tokenizer_config.json", added_tokens_decoder={"400": added("<image>")})
    with pytest.raises(UserError, match="<image> in .* has the id 400, but the tokenizer gives it"):
        load_tokenizer(folder)
    change(folder / "tokenizer_config.json", added_tokens_decoder={"x": 1})
    with pytest.raises(UserError, match="lists its added tokens in another form than id and token"):
        load_tokenizer(folder)


def with_more_tokens(folder: Path) -> Path:
    """As Gemma 3 and Llama 2 with [PAD] are published: an added id that the model does not have."""
    listed = json.loads((folder / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    more = {**listed, "352": added("<image>")}
    change(folder / "tokenizer_config.json", added_tokens_decoder=more)
    return folder


def test_a_token_that_the_model_does_not_have_is_refused_only_in_a_prompt_by_row(
    folder: Path, tmp_path: Path
) -> None:
    known = load_tokenizer(with_more_tokens(folder)).known_to(352)
    assert known.vocab_size == 353
    rows = [{"question": "2+3?", "answer": "5"}, {"question": "what is <image>?", "answer": "5"}]
    path = write_lines(tmp_path / "rows.jsonl", *rows)
    fine = write_lines(tmp_path / "fine.jsonl", rows[0])
    for form, own in (
        (PromptForm(known, 64), None),
        (SupervisedForm(known, 64), SupervisedRowForm()),
    ):
        assert len(PromptSet(open_examples(fine, own), form)) == 1
        with pytest.raises(UserError, match=f"^{path}:2: '<image>' is token 352 .* has 352"):
            PromptSet(open_examples(path, own), form)


def test_a_tokenizer_whose_end_the_model_does_not_have_is_refused(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    with pytest.raises(UserError, match=r"no token that ends a sample \(2, 0 .* model's 0 \(vocab"):
        tokenizer.known_to(0)
    assert tokenizer.known_to(1).stop_ids == (0,) and tokenizer.known_to(1).eos_id == 0


def test_a_run_accepts_a_tokenizer_with_more_tokens_than_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from mindgrpo.cli.verbs import main

    model = with_more_tokens(Path(shutil.copytree(MODEL, tmp_path / "model")))
    words = ["check", "--config", str(MODEL.parent / "grpo_config.yaml"), "--actor_config.load"]
    words += [str(model), "--rl_config.eval_steps", "0", "--rl_config.eval_dataset_file", "null"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "'<|im_start|>assistant\\n'" in said.splitlines()[-1] or "assistant" in said
    row = {"question": "<image>", "answer": "5"}
    data = write_lines(tmp_path / "rows.jsonl", {"question": "q", "answer": "5"}, row)
    assert main([*words, "--dataset_file", str(data)]) == 2
    told = capsys.readouterr().err
    assert f"{data}:2: '<image>' is token 352" in told and told.count("\n") == 1


def test_a_head_that_differs_from_the_embeddings_is_refused_where_they_are_tied(
    tmp_path: Path,
) -> None:
    model = Path(shutil.copytree(MODEL, tmp_path / "model"))
    tensors = load_file(model / "model.safetensors")
    specs = parameter_specs(read_config(model))
    embeddings = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": embeddings.copy()}, model / "model.safetensors")
    check_tensors(model, specs)
    other = embeddings.copy()
    other[300, 7] += np.float32(1e-3)
    save_file({**tensors, "lm_head.weight": other}, model / "model.safetensors")
    with pytest.raises(UserError, match="lm_head.weight that differs from .* tie_word_embeddings"):
        check_tensors(model, specs)
    change(model / "config.json", tie_word_embeddings=False)
    assert "lm_head.weight" in check_tensors(model, parameter_specs(read_config(model))).names


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 512}


def config(**changes: Any) -> dict[str, Any]:
    return {**json.loads((MODEL / "config.json").read_text()), **changes}


@each_row(
    ("changes", "said"),
    [
        (
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 9,
                }
            },
            "config: rope_scaling type 'yarn' .* remove rope_scaling if your sequences stay below 9",
        ),
        ({"partial_rotary_factor": 0.5}, "config: partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        (
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
                "rope_scaling": {"rope_type": "llama3", **LLAMA3},
            },
            "two scalings of the same positions",
        ),
    ],
)
def test_positions_that_could_mean_another_model_are_refused(
    changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        decoder_config(config(**changes), "config")


def test_a_scaling_beside_a_base_is_read() -> None:
    scaling = {"rope_type": "llama3", **LLAMA3}
    read = decoder_config(
        config(rope_parameters={"rope_theta": 5e5}, rope_scaling=scaling), "config"
    )
    assert read.rope_theta == 5e5 and read.rope_scaling == scaling
    whole = decoder_config(config(partial_rotary_factor=1.0), "config")
    assert whole.rope_scaling is None


def test_an_adapter_is_no_model(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="holds a LoRA adapter .* merge it into its model"):
        read_config(folder)
