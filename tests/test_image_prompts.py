"""Rows with images: what columns and messages may hold, what prompts become of them, and sentences for what is wrong.

Does not prove anything about the pixels of an image (test_pixels.py, test_image_files.py).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from picture_runs import make_model
from PIL import Image

from mindgrpo.algorithm.image_tokens import ImageTable
from mindgrpo.cli.verbs import main
from mindgrpo.config import Loaded
from mindgrpo.data.examples import RowForm
from mindgrpo.data.image_prompts import RunImages
from mindgrpo.data.mindrecord import write_mindrecord
from mindgrpo.data.pixels import read_pixel_rule
from mindgrpo.data.prompts import PromptForm, PromptSet
from mindgrpo.data.sources import open_examples
from mindgrpo.data.tokenizer import Tokenizer, load_tokenizer
from mindgrpo.errors import UserError
from mindgrpo.run.trl_arguments import with_arguments

# Of pictures a.png and b.png.
SIZES = {"a": (56, 56), "b": (84, 56)}
ASK = "how many red circles?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("pictures")
    make_model(made / "model")
    rng = np.random.default_rng(0)
    for name, (width, height) in SIZES.items():
        pixels = rng.integers(0, 256, (height, width, 3), np.uint8)
        Image.fromarray(pixels).save(made / f"{name}.png")
    return made


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder / "model")


class Read:
    """The prompts of rows, and the images of the run."""

    def __init__(
        self, folder: Path, path: Path, tokenizer: Tokenizer, longest: int = 100, **others: Any
    ) -> None:
        token = tokenizer.codec.token_to_id("<|image_pad|>")
        self.images = RunImages(read_pixel_rule(folder / "model"), token)
        form = PromptForm(tokenizer, longest, images=self.images, **others)
        self.prompts = PromptSet(open_examples(path, RowForm(sees_images=True)), form)


def written(folder: Path, *rows: Mapping[str, Any]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def bytes_of(folder: Path, name: str) -> bytes:
    return (folder / f"{name}.png").read_bytes()


def test_every_form_of_a_row_is_the_same_prompt(
    folder: Path, tokenizer: Tokenizer, subtests: pytest.Subtests
) -> None:
    uri = f"data:image/png;base64,{base64.b64encode(bytes_of(folder, 'a')).decode()}"
    parts = [{"type": "image"}, {"type": "text", "text": ASK}]
    message = {"role": "user", "content": parts}
    with_source = [{"type": "image", "image": "a.png"}, {"type": "text", "text": ASK}]
    as_openai = [{"type": "image_url", "image_url": {"url": uri}}, {"type": "text", "text": ASK}]
    asked = {"role": "user", "content": f"<image>{ASK}"}
    rows: dict[str, dict[str, Any]] = {
        "a mark": {"question": f"<image>{ASK}", "images": ["a.png"]},
        "one image": {"question": f"<image>{ASK}", "image": "a.png"},
        "no place": {"question": ASK, "images": ["a.png"]},
        "a data URI": {"question": ASK, "image": uri},
        "an absolute path": {"question": ASK, "image": str(folder / "a.png")},
        "parts": {"prompt": [message], "images": ["a.png"]},
        "parts with a source": {"prompt": [{"role": "user", "content": with_source}]},
        "OpenAI's parts": {"prompt": [{"role": "user", "content": as_openai}]},
        "verl's": {
            "prompt": [asked],
            "images": ["a.png"],
            "reward_model": {"ground_truth": "2", "style": "rule"},
            "data_source": "hiyouga/geometry3k",
        },
    }
    table = ImageTable()
    ids = tokenizer.encode(
        f"<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>{ASK}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    at = ids.index(tokenizer.codec.token_to_id("<|image_pad|>"))
    expected = [*ids[:at], *table.ids(table.add(2, 2)), *ids[at + 1 :]]
    for name, row in rows.items():
        with subtests.test(name):
            (prompt,) = Read(folder, written(folder, {"answer": "2"} | row), tokenizer).prompts
            assert prompt.ids.tolist() == expected
            assert prompt.question == f"<image>{ASK}"
            assert prompt.answer == "2"


def test_parquet_holds_bytes_as_datasets_writes_them(folder: Path, tokenizer: Tokenizer) -> None:
    held = [{"bytes": bytes_of(folder, name), "path": f"{name}.png"} for name in "ab"]
    rows = [
        {"question": f"<image>{ASK}", "answer": "1", "images": [held[0]]},
        {"question": f"<image> or <image>{ASK}", "answer": "2", "images": held},
        {"question": ASK, "answer": "3", "images": []},
    ]
    path = folder / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    read = Read(folder, path, tokenizer)
    counts = [int((prompt.ids < 0).sum()) for prompt in read.prompts]
    assert counts == [4, 10, 0]
    # The first picture is one image of the run, however often it is in rows.
    assert read.images.table.grids == [(2, 2), (2, 3)]
    first, second, _ = (prompt.ids[prompt.ids < 0].tolist() for prompt in read.prompts)
    assert second[:4] == first
    # Rewards get the column as the data has it.
    assert read.prompts[0].columns["images"] == [held[0]]
    np.testing.assert_array_equal(
        read.images.patches(1), read.images.file(1).patches(read.images.rule)[0]
    )


def test_prompts_with_pictures_are_dropped_and_never_cut(
    folder: Path, tokenizer: Tokenizer
) -> None:
    path = written(
        folder,
        {"question": f"<image>{ASK}", "answer": "1", "images": ["a.png"]},
        {"question": f"<image><image>{ASK}", "answer": "2", "images": ["a.png", "b.png"]},
    )
    longest = len(Read(folder, path, tokenizer).prompts[0].ids)
    kept = Read(folder, path, tokenizer, longest, overflow="drop").prompts
    assert len(kept) == 1 and kept.num_dropped == 1
    for overflow in ("error", "left", "right"):
        with pytest.raises(UserError, match=r"rows.jsonl:2: .* of images\) long .*max_pixels"):
            Read(folder, path, tokenizer, longest, overflow=overflow)


def test_another_picture_of_the_same_size_is_another_data_set(
    folder: Path, tokenizer: Tokenizer
) -> None:
    path = written(folder, {"question": ASK, "answer": "1", "images": ["c.png"]})
    digests = []
    for color in ("red", "blue"):
        Image.new("RGB", (56, 56), color).save(folder / "c.png")
        digests.append(Read(folder, path, tokenizer).prompts.fingerprint)
    assert digests[0] != digests[1]


def test_a_picture_that_changes_its_size_is_refused_when_it_is_read(
    folder: Path, tokenizer: Tokenizer
) -> None:
    Image.new("RGB", (56, 56)).save(folder / "d.png")
    path = written(folder, {"question": ASK, "answer": "1", "images": ["d.png"]})
    read = Read(folder, path, tokenizer)
    Image.new("RGB", (84, 56)).save(folder / "d.png")
    with pytest.raises(UserError, match=r"image 1: the file .*d.png' has changed"):
        read.images.patches(0)


def test_what_is_wrong_with_a_row_is_one_sentence(
    folder: Path, tokenizer: Tokenizer, subtests: pytest.Subtests
) -> None:
    """Where, what, and the remedy."""
    part = {"type": "video", "video": "a.mp4"}
    rows: dict[str, tuple[dict[str, Any], str]] = {
        "a missing file": (
            {"question": ASK, "images": ["no.png"]},
            r"rows.jsonl:1, image 1: the file .*no.png' does not exist",
        ),
        "fewer images than places": (
            {"question": f"<image><image>{ASK}", "images": ["a.png"]},
            r"rows.jsonl:1 has 1 images for 2 places",
        ),
        "more images than places": (
            {"question": f"<image>{ASK}", "images": ["a.png", "b.png"]},
            r"rows.jsonl:1 has 2 images for 1 places",
        ),
        "the token of images in a text": (
            {"question": f"<|image_pad|>{ASK}", "images": []},
            r"rows.jsonl:1: .* writes 1 places for 0 images",
        ),
        "a URL": (
            {"question": ASK, "images": ["https://example.org/a.png"]},
            r"rows.jsonl:1, image 1 is the URL .*download it",
        ),
        "a video": (
            {"prompt": [{"role": "user", "content": [part]}]},
            r'rows.jsonl:1: "prompt" message 1: part 1 .*parts must be texts or images',
        ),
    }
    for name, (row, sentence) in rows.items():
        with subtests.test(name), pytest.raises(UserError, match=sentence):
            Read(folder, written(folder, {"answer": "1"} | row), tokenizer)


def test_a_model_of_text_alone_refuses_pictures_in_messages_and_keeps_columns(
    folder: Path, tokenizer: Tokenizer
) -> None:
    form = PromptForm(tokenizer, 100)
    parts = [{"type": "image"}, {"type": "text", "text": ASK}]
    path = written(folder, {"prompt": [{"role": "user", "content": parts}], "answer": "1"})
    with pytest.raises(UserError, match=r"rows.jsonl:1 has images .*sees none"):
        PromptSet(open_examples(path), form)
    texts = [{"type": "text", "text": "how many "}, {"type": "text", "text": "are there?"}]
    row = {"prompt": [{"role": "user", "content": texts}], "answer": "1", "image": "a.png"}
    (prompt,) = PromptSet(open_examples(written(folder, row)), form)
    assert prompt.question == "how many are there?"
    assert prompt.columns["image"] == "a.png"


def test_rows_in_memory_have_the_images_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    picture = Image.new("RGB", (56, 84), (3, 200, 90))
    picture.save("own.png")
    data = Path("own.png").read_bytes()
    asked = {"type": "text", "text": "what is it?"}

    def talk(part: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [part, asked]}]

    rows: list[dict[str, Any]] = [
        {"prompt": "<image>what is it?", "images": [picture]},
        {"prompt": "<image>what is it?", "image": data},
        {"prompt": "<image>what is it?", "images": ["own.png"]},
        {"prompt": "<image>what is it?", "images": [{"bytes": data, "path": None}]},
        {"prompt": talk({"type": "image"}), "image": picture},
        {"prompt": talk({"type": "image", "image": picture})},
    ]
    loaded = with_arguments(None, None, [row | {"answer": "x"} for row in rows], None)
    assert isinstance(loaded, Loaded)
    path = loaded.config.rl_config.dataset_file
    examples = open_examples(str(path), RowForm(sees_images=True))
    pixels = [example.images[0].decode().tobytes() for example in examples]
    assert pixels == [picture.tobytes()] * len(rows)


def test_rewards_are_tried_on_rows_with_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    row = {"question": "<image>how many?", "answer": "x", "images": [{"bytes": b"1", "path": None}]}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), "rows.parquet")
    Path("own.py").write_text(
        "def own(completions, images):\n    return [float(len(own[0]['bytes'])) for own in images]\n"
    )
    assert main(["score", "--reward", "own.py:own", "--data", "rows.parquet"]) == 0
    assert "mean 1.0000 of 1" in capsys.readouterr().out


def test_a_converted_row_has_its_images(tmp_path: Path) -> None:
    Image.new("RGB", (56, 84)).save(tmp_path / "own.png")
    row = {"question": "<image>what is it?", "answer": "x", "images": ["own.png"]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    write_mindrecord(tmp_path / "rows.mindrecord", open_examples(tmp_path / "rows.jsonl"), "rows")
    (example,) = open_examples(tmp_path / "rows.mindrecord", RowForm(sees_images=True))
    assert [image.size() for image in example.images] == [(56, 84)]
    assert [part["type"] for part in example.messages[-1]["content"]] == ["image", "text"]
