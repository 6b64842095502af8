"""Data sets turned into MindRecords: what comes back, what is counted, and that nothing half-made stays behind.

Does NOT prove: that a conversion survives the machine's losing power between its two renames.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_sets import (
    MODEL,
    ROOT,
    change,
    copy_tokenizer,
    flat,
    questions,
    read_rows,
    save_to_disk,
    write_lines,
    write_parquet,
)

from mindgrpo.data import mindrecord
from mindgrpo.data.convert import ConversionReport, convert, progress_bar
from mindgrpo.data.prompts import PromptForm
from mindgrpo.data.sources import open_examples
from mindgrpo.data.tokenizer import load_tokenizer
from mindgrpo.errors import UserError

PROGRAM = ROOT / "examples" / "grpo" / "qwen_grpo_tutorial" / "rlhf_data.py"
TALK = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "ç"},
]


def made(
    source: Path, target: Path, length: int = 64, overflow: str = "error", **given: Any
) -> ConversionReport:
    form = PromptForm(load_tokenizer(MODEL), length, overflow)
    given = {"progress": progress_bar, **given}
    return convert(open_examples(source), target, form, source=str(source), **given)


def test_a_mindrecord_gives_back_what_the_data_set_holds(tmp_path: Path) -> None:
    source = write_lines(
        tmp_path / "rows.jsonl",
        {"question": "Ünï?", "answer": "1+1=2\n#### 2", "level": 3, "tags": ["a", None]},
        {"question": "q2", "answer": 5},
        {"question": "q3", "answer": "", "level": 1.5},
        {"messages": TALK, "answer": "#### 7"},
    )
    target = tmp_path / "made" / "rows.mindrecord"
    report = made(source, target)
    assert (report.rows, report.kept, report.dropped, report.cut) == (4, 4, 0, 0)
    examples = list(open_examples(target))
    assert [(r.messages, r.answer, r.columns) for r in examples] == [
        (r.messages, r.answer, r.columns) for r in open_examples(source)
    ]
    assert flat(examples[0]) == {
        "question": "Ünï?",
        "answer": "2",
        "level": 3,
        "tags": ["a", None],
        "full_answer": "1+1=2\n#### 2",
    }
    assert [example.answer for example in examples] == ["2", "5", "", "7"]
    assert [dict(message) for message in examples[3].messages] == TALK
    assert sorted(os.listdir(target.parent)) == ["rows.mindrecord", "rows.mindrecord.db"]


def test_order_is_kept_across_the_batches_that_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mindrecord, "ROWS_PER_WRITE", 4)
    source = write_lines(tmp_path / "rows.jsonl", *questions(11))
    made(source, tmp_path / "rows.mindrecord")
    assert read_rows(tmp_path / "rows.mindrecord") == questions(11)
    with pytest.raises(UserError, match=r"rows.jsonl:6: the prompt is"):
        longer = [*questions(5), {"question": "abcd " * 40, "answer": "1"}, *questions(5)]
        made(write_lines(source, *longer), tmp_path / "none.mindrecord")
    assert sorted(os.listdir(tmp_path)) == ["rows.jsonl", "rows.mindrecord", "rows.mindrecord.db"]


def test_long_prompts_are_dropped_or_cut_and_counted(tmp_path: Path) -> None:
    long = {"question": "abcd " * 40 + "end?", "answer": "1", "level": 2}
    source = write_lines(tmp_path / "rows.jsonl", *questions(2), long)
    target = tmp_path / "rows.mindrecord"
    report = made(source, target, 20, "drop")
    assert str(report).startswith("2 of 3 rows kept, 1 dropped and 0 cut (too long), the longest")
    report = made(source, target, 20, "left", overwrite=True)
    assert (report.kept, report.dropped, report.cut, report.longest) == (3, 0, 1, 20)
    cut = read_rows(target)[2]
    assert cut["question"] != long["question"] and long["question"].endswith(cut["question"])
    assert (cut["full_question"], cut["level"]) == (long["question"], 2)
    assert made(target, tmp_path / "again.mindrecord", 20).kept == 3


def test_conversion_is_all_or_nothing_and_never_overwrites_unasked(tmp_path: Path) -> None:
    target = tmp_path / "rows.mindrecord"
    bad = write_lines(tmp_path / "bad.jsonl", *questions(3), {"answer": "x"})
    with pytest.raises(UserError, match=r"bad.jsonl:4 has no \"question\""):
        made(bad, target)
    good = write_lines(tmp_path / "good.jsonl", *questions(3))
    made(good, target)
    with pytest.raises(UserError, match="exists; remove it or pass --overwrite"):
        made(good, target)
    with pytest.raises(UserError, match="must end in .mindrecord"):
        made(good, tmp_path / "rows.example")
    with pytest.raises(UserError, match="bad.jsonl:4"):
        made(bad, target, overwrite=True)
    assert len(read_rows(target)) == 3
    with pytest.raises(UserError, match="no row of .*good.jsonl is left"):
        made(good, tmp_path / "none.mindrecord", 3, "drop")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "bad.jsonl",
        "good.jsonl",
        "rows.mindrecord",
        "rows.mindrecord.db",
    ]


def test_an_interrupt_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "rows.jsonl", *questions(9))
    target = tmp_path / "rows.mindrecord"
    made(write_lines(tmp_path / "old.jsonl", *questions(2)), target)
    told: list[int] = []

    @contextmanager
    def interrupted(total: int) -> Iterator[Any]:
        def advance(count: int) -> None:
            told.append(count)
            if len(told) == 5:
                raise KeyboardInterrupt

        assert total == 9
        yield advance

    with pytest.raises(KeyboardInterrupt):
        made(source, target, progress=interrupted, overwrite=True)
    assert len(read_rows(target)) == 2
    assert sorted(os.listdir(tmp_path)) == [
        "old.jsonl",
        "rows.jsonl",
        "rows.mindrecord",
        "rows.mindrecord.db",
    ]


def command(*flags: str) -> list[str]:
    return [sys.executable, str(PROGRAM), *flags]


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "GLOG_v": "3"}


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*flags), capture_output=True, text=True, check=False, env=ENVIRONMENT
    )


def test_ending_the_program_takes_its_unfinished_file_along(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "rows.jsonl", *questions(60000))
    target = tmp_path / "out" / "rows.mindrecord"
    flags = [
        "--tokenizer_dir",
        str(MODEL),
        "--file_path",
        str(source),
        "--output_path",
        str(target),
    ]
    with subprocess.Popen(
        command(*flags), stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as job:
        while not list(tmp_path.glob("out/.mindrecord-*/rows.mindrecord")):
            time.sleep(0.1)
        job.send_signal(signal.SIGTERM)
        said = job.communicate()[1]
    assert (job.returncode, os.listdir(target.parent)) == (130, [])
    assert said.endswith("mindgrpo: interrupted, nothing was written\n")


def test_the_conversion_program(tmp_path: Path) -> None:
    long = {"question": "word " * 50, "answer": "#### 1"}
    source = write_lines(tmp_path / "rows.jsonl", {"question": "1?", "answer": "#### 1"}, long)
    target = tmp_path / "rows.mindrecord"
    flags = ["--tokenizer_dir", str(MODEL), "--file_path", str(source)]
    flags += ["--output_path", str(target), "--max_prompt_length", "32", "--dataset_type", "gsm8k"]
    refused = run(*flags)
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"mindgrpo: {source}:2: the prompt is ")
    assert not target.exists()
    done = run(*flags, "--prompt_overflow", "drop", "--seq_length", "4096")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1 of 2 rows kept, 1 dropped and 0 cut")
    assert "--seq_length has no effect" in done.stderr
    assert read_rows(target) == [{"question": "1?", "answer": "1", "full_answer": "#### 1"}]
    without = run(*flags[2:])
    assert without.returncode == 2 and "no tokenizer was given" in without.stderr


def test_the_conversion_program_reads_splits_keys_templates_and_bare_vocabularies(
    tmp_path: Path,
) -> None:
    tokenizer = copy_tokenizer(tmp_path / "tokenizer")
    content = load_tokenizer(tokenizer).codec
    content.model.save(str(tokenizer))
    (tokenizer / "tokenizer.json").unlink()
    change(tokenizer / "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer")
    rows = [
        {"task": f"What is {n}?", "gold": {"value": n}, "kind": "x", "note": "y"} for n in range(3)
    ]
    source = tmp_path / "data"
    source.mkdir()
    write_parquet(source / "train-00000-of-00001.parquet", rows)
    write_parquet(source / "test-00000-of-00001.parquet", rows[:2])
    target = tmp_path / "rows.mindrecord"
    done = run(
        *(
            "--vocab_path",
            str(tokenizer / "vocab.json"),
            "--merges_file_path",
            str(tokenizer / "merges.txt"),
        ),
        *("--file_path", str(source), "--split", "test", "--output_path", str(target)),
        *(
            "--dataset_type",
            "plain",
            "--map-keys",
            "question=task,answer=gold.value",
            "--columns",
            "kind",
        ),
        *("--chat_template", "qwen_r1", "--max_prompt_length", "999"),
    )
    assert done.returncode == 0, done.stderr
    assert read_rows(target) == [
        {"question": f"What is {n}?", "answer": str(n), "kind": "x"} for n in range(2)
    ]


def test_a_missing_column_is_told_with_a_flag_of_the_converter(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text('{"instruction": "1 + 1?", "output": "2"}\n')
    words = ("--tokenizer_dir", str(MODEL), "--file_path", str(source))
    done = run(*words, "--output_path", str(tmp_path / "rows.mindrecord"))
    assert done.returncode == 2 and "dataset_map_keys" not in done.stderr
    assert "question=instruction,answer=output in --map-keys" in done.stderr


def test_mindrecords_of_token_ids_are_decoded(tmp_path: Path) -> None:
    from mindspore.mindrecord import FileWriter

    tokenizer = load_tokenizer(MODEL)
    path = tmp_path / "theirs.mindrecord"
    writer = FileWriter(str(path), shard_num=1)
    form = {"type": "int64", "shape": [-1]}
    writer.add_schema({"prompt_ids": form, "pretrain_ids": form, "loss_mask": form})

    def padded(text: str, length: int) -> np.ndarray:
        ids = np.full(length, tokenizer.pad_id, np.int64)
        encoded = tokenizer.encode(text)
        ids[: len(encoded)] = encoded
        return ids

    for question, answer in (("What is 2+3?", "5"), ("What is 4+4?", "so\n#### 8")):
        row = {"prompt_ids": padded(question, 40), "pretrain_ids": padded(answer, 60)}
        writer.write_raw_data([row | {"loss_mask": np.ones(60, np.int64)}])
    writer.commit()
    read = open_examples(path, decode=tokenizer.decode)
    assert [flat(example) for example in read] == [
        {"question": "What is 2+3?", "answer": "5"},
        {"question": "What is 4+4?", "answer": "8"},
    ]
    with pytest.raises(
        UserError, match="has the columns loss_mask, pretrain_ids, prompt_ids; answer, columns"
    ):
        open_examples(path)


def test_saved_directories_are_converted(tmp_path: Path) -> None:
    saved = save_to_disk(tmp_path / "saved", questions(5))
    assert made(saved, tmp_path / "rows.mindrecord").kept == 5
    assert read_rows(tmp_path / "rows.mindrecord") == questions(5)
