"""Tokenizer directories, records, prompts and their order, and the conversion program.

Does NOT prove: that every model's chat template renders as transformers renders it, nor that a
conversion survives the machine's losing power between its two renames.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindgrpo.data.prompts import PromptSet, columns_of, epoch_order
from mindgrpo.data.records import convert_jsonl, gold_answer, read_records
from mindgrpo.data.tokenizer import Tokenizer, load_tokenizer
from mindgrpo.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "examples" / "grpo" / "tiny_arithmetic" / "model"
PROGRAM = ROOT / "examples" / "grpo" / "qwen_grpo_tutorial" / "rlhf_data.py"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
)
FIRST_ORDER = [5, 0, 6, 1, 7, 2, 4, 3]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in TOKENIZER_FILES:
        shutil.copy(MODEL / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(MODEL)


def change(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text("utf-8"))
    content.update(changes)
    kept = {key: value for key, value in content.items() if value is not None}
    path.write_text(json.dumps(kept), "utf-8")


def write_rows(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def questions(number: int) -> list[dict[str, Any]]:
    return [{"question": f"What is {n}+1?", "answer": str(n + 1)} for n in range(number)]


def test_rendering_encoding_and_decoding(tokenizer: Tokenizer) -> None:
    text = tokenizer.render([{"role": "user", "content": "Hi 12"}])
    assert text == "<|im_start|>user\nHi 12<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(text)
    assert ids[0] == 1 and tokenizer.eos_id in ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids) == "user\nHi 12\nassistant\n"
    shown = tokenizer.render([{"role": "user", "content": "x"}], add_generation_prompt=False)
    assert shown == "<|im_start|>user\nx<|im_end|>\n"


def test_stop_ids_are_the_union_of_generation_config_and_tokenizer(directory: Path) -> None:
    assert load_tokenizer(directory).stop_ids == (2, 0)
    change(directory / "generation_config.json", eos_token_id=0)
    assert load_tokenizer(directory).stop_ids == (0, 2)
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


def test_older_files_are_read_through_transformers(directory: Path, tokenizer: Tokenizer) -> None:
    pytest.importorskip("transformers")
    model = json.loads((directory / "tokenizer.json").read_text("utf-8"))["model"]
    (directory / "vocab.json").write_text(json.dumps(model["vocab"]), "utf-8")
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (directory / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", "utf-8")
    (directory / "tokenizer.json").unlink()
    change(directory / "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer")
    loaded = load_tokenizer(directory)
    assert (loaded.stop_ids, loaded.pad_id) == ((2, 0), 0)
    text = loaded.render([{"role": "user", "content": "Tom has 12 apples."}])
    assert loaded.encode(text) == tokenizer.encode(text)


def test_unusable_directories_are_one_sentence(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere does not exist; set rl_config.tokenizer_dir"):
        load_tokenizer(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no tokenizer; it must contain tokenizer.json"):
        load_tokenizer(tmp_path / "empty")
    change(directory / "tokenizer_config.json", chat_template=None)
    with pytest.raises(UserError, match='set "chat_template" in .*tokenizer_config.json'):
        load_tokenizer(directory).render([{"role": "user", "content": "x"}])
    change(directory / "tokenizer_config.json", chat_template="{{ raise_exception('no way') }}")
    with pytest.raises(UserError, match="cannot render .*no way"):
        load_tokenizer(directory).render([{"role": "user", "content": "x"}])
    change(directory / "tokenizer_config.json", eos_token="<eos>")
    with pytest.raises(UserError, match="eos_token '<eos>' is not in the vocabulary"):
        load_tokenizer(directory)
    (directory / "tokenizer.json").write_text("{", "utf-8")
    with pytest.raises(UserError, match="tokenizer.json cannot be read"):
        load_tokenizer(directory)


def test_templates_run_in_a_sandbox(directory: Path) -> None:
    change(directory / "tokenizer_config.json", chat_template="{{ ''.__class__.__mro__ }}")
    with pytest.raises(UserError, match="cannot render"):
        load_tokenizer(directory).render([{"role": "user", "content": "x"}])


def test_a_template_beside_the_configuration_is_used(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}{{ eos_token }}")
    assert load_tokenizer(directory).render([{"role": "user", "content": "x"}]) == "x<|im_end|>"


def test_gold_answers() -> None:
    assert gold_answer("2+2=4\n#### 1,004 ") == "1,004"
    assert gold_answer("4") == "4"
    assert gold_answer("a #### b", "plain") == "a #### b"


def test_a_mindrecord_gives_back_what_the_jsonl_holds(tmp_path: Path) -> None:
    source = write_rows(
        tmp_path / "rows.jsonl",
        {"question": "Ünï?", "answer": "1+1=2\n#### 2", "level": 3, "tags": ["a", None]},
        {"question": "q2", "answer": 5},
        {"question": "q3", "answer": "", "level": 1.5},
    )
    target = tmp_path / "made" / "rows.mindrecord"
    report = convert_jsonl(source, target)
    assert (report.kept, report.dropped) == (3, 0)
    records = read_records(target)
    assert records == read_records(source)
    assert records[0] == {
        "question": "Ünï?",
        "answer": "2",
        "level": 3,
        "tags": ["a", None],
        "full_answer": "1+1=2\n#### 2",
    }
    assert [record["answer"] for record in records] == ["2", "5", ""]
    assert sorted(os.listdir(target.parent)) == ["rows.mindrecord", "rows.mindrecord.db"]


def test_conversion_is_all_or_nothing_and_never_overwrites_unasked(tmp_path: Path) -> None:
    target = tmp_path / "rows.mindrecord"
    bad = write_rows(tmp_path / "bad.jsonl", *questions(3), {"question": "x"})
    with pytest.raises(UserError, match=r"bad.jsonl:4 has no \"answer\""):
        convert_jsonl(bad, target)
    assert not target.exists()
    good = write_rows(tmp_path / "good.jsonl", *questions(3))
    report = convert_jsonl(good, target, keep=lambda record, _: record["answer"] != "2")
    assert (report.kept, report.dropped) == (2, 1)
    with pytest.raises(UserError, match="exists; remove it or pass --overwrite"):
        convert_jsonl(good, target)
    assert len(read_records(target)) == 2
    convert_jsonl(good, target, overwrite=True)
    assert len(read_records(target)) == 3
    with pytest.raises(UserError, match="no row of .* is left"):
        convert_jsonl(good, tmp_path / "none.mindrecord", keep=lambda *_: False)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "bad.jsonl",
        "good.jsonl",
        "rows.mindrecord",
        "rows.mindrecord.db",
    ]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "is not a line of JSON"),
        ("[1]", "holds a list"),
        ('{"prompt": "x", "answer": "1"}', 'no "question", its keys are prompt, answer'),
        ('{"question": "", "answer": "1"}', "must be a non-empty text"),
        ('{"question": "x", "answer": ["1"]}', "must be a text or a number"),
        ('{"question": "x", "answer": true}', "must be a text or a number"),
    ],
)
def test_a_bad_line_is_named_with_its_place(line: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "q", "answer": "1"}\n\n' + line + "\n", "utf-8")
    with pytest.raises(UserError) as caught:
        read_records(path)
    assert said in str(caught.value)
    assert f"{path}:3" in str(caught.value)


def test_gsm8k_without_its_mark_and_unknown_types_are_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", *questions(1))
    with pytest.raises(UserError, match="has no ####"):
        read_records(path, "gsm8k")
    with pytest.raises(UserError, match="'gsm9k' is unknown"):
        read_records(path, "gsm9k")
    problem = write_rows(tmp_path / "open.jsonl", {"problem": "p", "answer": "#### 1"})
    assert read_records(problem, "openR1math") == [{"question": "p", "answer": "#### 1"}]


def test_files_that_are_no_data_set_are_refused(tmp_path: Path) -> None:
    for name, said in (("x.csv", "must be .jsonl or .mindrecord"), ("x.mindrecord", "cannot be")):
        (tmp_path / name).write_text("some text here", "utf-8")
        with pytest.raises(UserError, match=said):
            read_records(tmp_path / name)
    with pytest.raises(UserError, match="does not exist; set rl_config.dataset_file"):
        read_records(tmp_path / "none.jsonl")


def test_prompts_carry_everything_once(tokenizer: Tokenizer) -> None:
    records = [{"question": "1+1?", "answer": "2", "level": 3}, {"question": "2+2?", "answer": "4"}]
    prompts = PromptSet(records, tokenizer, 64, system_prompt="Be brief.").prompts
    assert prompts[0].text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
    assert list(prompts[0].ids) == tokenizer.encode(prompts[0].text)
    assert (prompts[1].index, prompts[1].question, prompts[1].answer) == (1, "2+2?", "4")
    assert columns_of(prompts) == {"level": [3, None], "question": ["1+1?", "2+2?"]}
    own = PromptSet(records, tokenizer, 64, template="Q: {{ messages[0].content }}")
    assert own.prompts[0].text == "Q: 1+1?"


def test_long_prompts_are_an_error_or_counted(tokenizer: Tokenizer) -> None:
    records = [{"question": "1?", "answer": "1"}, {"question": "abcd " * 40, "answer": "2"}]
    with pytest.raises(UserError, match=r"row 1 .* tokens long and max_prompt_length is 20"):
        PromptSet(records, tokenizer, 20)
    dropped = PromptSet(records, tokenizer, 20, "drop")
    assert (len(dropped), dropped.num_dropped, dropped.prompts[0].index) == (1, 1, 0)
    for overflow in ("left", "right"):
        cut = PromptSet(records, tokenizer, 20, overflow)
        assert (len(cut), cut.num_shortened, cut.longest) == (2, 1, 20)
        assert cut.prompts[1].text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    with pytest.raises(UserError, match="without its question"):
        PromptSet(records, tokenizer, 5, "left")
    with pytest.raises(UserError, match="no prompt is left of 2 rows"):
        PromptSet(records, tokenizer, 3, "drop")
    with pytest.raises(UserError, match="'cut' is unknown"):
        PromptSet(records, tokenizer, 20, "cut")


def test_the_order_is_a_function_of_seed_and_epoch_alone() -> None:
    first = epoch_order(100, seed=3, epoch=2)
    np.random.default_rng(0).random(5)
    np.testing.assert_array_equal(first, epoch_order(100, seed=3, epoch=2))
    assert sorted(first) == list(range(100))
    for seed, epoch in ((3, 1), (2, 2), (2, 3)):
        assert list(first) != list(epoch_order(100, seed, epoch))
    # Guards resumed runs: another stream would replay or skip rows.
    assert epoch_order(8, seed=0, epoch=0).tolist() == FIRST_ORDER


def test_steps_cross_epochs_without_losing_a_row(tokenizer: Tokenizer) -> None:
    prompts = PromptSet(questions(7), tokenizer, 64)
    steps = [prompts.take(step, 3, seed=5) for step in range(7)]
    flat = [prompt.index for taken, _ in steps for prompt in taken]
    for epoch in range(3):
        assert flat[7 * epoch : 7 * epoch + 7] == prompts.order(5, epoch).tolist()
    assert [epoch for _, epoch in steps] == [0, 0, 0, 1, 1, 2, 2]
    taken, epoch = prompts.take(0, 16, seed=5)
    assert len(taken) == 16 and epoch == 0


def convert(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(PROGRAM), *flags],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_the_conversion_program(tmp_path: Path, tokenizer: Tokenizer) -> None:
    long = {"question": "word " * 50, "answer": "#### 1"}
    source = write_rows(tmp_path / "rows.jsonl", {"question": "1?", "answer": "#### 1"}, long)
    target = tmp_path / "rows.mindrecord"
    flags = ["--tokenizer_dir", str(MODEL), "--file_path", str(source)]
    flags += ["--output_path", str(target), "--max_prompt_length", "32", "--dataset_type", "gsm8k"]
    refused = convert(*flags)
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"mindgrpo: {source}:2: the prompt is ")
    assert not target.exists()
    done = convert(*flags, "--prompt_overflow", "drop")
    assert done.returncode == 0, done.stderr
    assert "1 rows kept, 1 dropped" in done.stdout
    assert read_records(target) == [{"question": "1?", "answer": "1", "full_answer": "#### 1"}]
    without = convert(*flags[2:])
    assert without.returncode == 2 and "no tokenizer was given" in without.stderr
