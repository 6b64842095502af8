"""Reads a tokenizer directory's files as a codec between text and ids, and the special tokens that they name.

`tokenizer.json` is read with the light `tokenizers` library. Older files, such as the `vocab.json` + `merges.txt` of
GPT-2's and Qwen's families, go through transformers' AutoTokenizer, which adds 1.3 s to a start: from local files, and
without running the model's code. Added tokens must get the ids that they are listed with.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import Tokenizer as Codec

from mindgrpo.errors import UserError
from mindgrpo.strict_files import read_json, read_object

TOKEN_KEYS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
FURTHER_KEY = "additional_special_tokens"
PAIR = ("vocab.json", "merges.txt")
# Qwen's vocabulary is often handed on as the two bare files; its special tokens follow it.
QWEN_VOCABULARY = 151643
QWEN_SETTINGS = {
    "tokenizer_class": "Qwen2Tokenizer",
    "eos_token": "<|endoftext|>",
    "pad_token": "<|endoftext|>",
    FURTHER_KEY: ["<|im_start|>", "<|im_end|>"],
}

SpecialTokens = dict[str, str]


def read_codec(
    folder: Path, settings: Mapping[str, Any], vocabulary: tuple[Path, Path] | None = None
) -> tuple[Codec, SpecialTokens]:
    """Returns the codec and the special tokens by name. `settings` is tokenizer_config.json. Raises UserError."""
    if vocabulary is None and (folder / "tokenizer.json").is_file():
        codec = load_json(folder / "tokenizer.json")
        # Saved by other programs, these would cut or fill every prompt.
        codec.no_truncation()
        codec.no_padding()
        return codec, named_tokens(folder, settings)
    pair = vocabulary or (folder / PAIR[0], folder / PAIR[1])
    has_pair = all(path.is_file() for path in pair)
    if not has_pair and not (folder / "tokenizer.model").is_file():
        raise UserError(
            f"{folder} holds no tokenizer; it must contain tokenizer.json, or vocab.json and merges.txt; copy "
            "them from the model's Hugging Face repository"
        )
    model_type = settings_in(folder / "config.json").get("model_type")
    kind = str(settings.get("tokenizer_class") or model_type or "").lower()
    if has_pair and not kind and len(settings_in(pair[0])) != QWEN_VOCABULARY:
        raise UserError(
            f"no file in {folder} tells what kind of tokenizer {pair[0].name} is of; add the model's "
            "tokenizer_config.json, which names its tokenizer_class"
        )
    if has_pair and (not kind or kind.startswith("qwen")) and not named_tokens(folder, settings):
        settings = {**QWEN_SETTINGS, **settings}
    loaded = load_with_transformers(folder, settings, pair if has_pair else ())
    codec = loaded.backend_tokenizer
    check_ids(codec, settings, folder)
    if has_pair:
        return codec, named_tokens(folder, settings)
    return codec, {
        name: str(text) for name, text in loaded.special_tokens_map.items() if name in TOKEN_KEYS
    }


def load_json(path: Path) -> Codec:
    # Strictly first: what the library makes of doubles and of depth is not documented.
    read_json(path, "the tokenizer", "copy it from the model's Hugging Face repository")
    with reading(str(path)):
        return Codec.from_file(str(path))


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Makes a UserError of the libraries' errors: some raise bare Exception, and panics are not even that."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{what} cannot be read: {reason}; copy the tokenizer's files from the model's Hugging Face repository"
        ) from error


def load_with_transformers(
    folder: Path, settings: Mapping[str, Any], pair: tuple[Path, ...]
) -> Any:
    # Importing it without torch prints advice that has nothing to do with tokenizers.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    files = {path.name: path.resolve() for path in folder.iterdir()}
    files |= {name: path.resolve() for name, path in zip(PAIR, pair, strict=False)}
    with TemporaryDirectory() as named, reading(f"the tokenizer in {folder}"):
        for name in files.keys() - {"tokenizer.json", "tokenizer_config.json"}:
            Path(named, name).symlink_to(files[name])
        Path(named, "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
        return AutoTokenizer.from_pretrained(
            named, local_files_only=True, trust_remote_code=False, use_fast=True
        )


def check_ids(codec: Codec, settings: Mapping[str, Any], folder: Path) -> None:
    """Raises UserError where an added token has another id than the one that it is listed with."""
    listed = settings.get("added_tokens_decoder") or {}
    wanted = {content_of(entry): number for number, entry in listed.items()}
    wanted |= settings_in(folder / "added_tokens.json")
    for text, number in wanted.items():
        if str(codec.token_to_id(text)) != str(number):
            raise UserError(
                f"{text} in {folder} has the id {number}, but after vocab.json comes {codec.token_to_id(text)}; "
                "copy vocab.json, merges.txt and tokenizer_config.json of one model, or its tokenizer.json"
            )


def named_tokens(folder: Path, settings: Mapping[str, Any]) -> SpecialTokens:
    listed = {**settings_in(folder / "special_tokens_map.json"), **settings}
    return {key: content_of(listed[key]) for key in TOKEN_KEYS if content_of(listed.get(key))}


def further_tokens(folder: Path, settings: Mapping[str, Any]) -> list[str]:
    """Returns the contents of `additional_special_tokens`, which chat templates may ask for. Raises UserError."""
    listed = {**settings_in(folder / "special_tokens_map.json"), **settings}.get(FURTHER_KEY)
    if not isinstance(listed, list | None):
        raise UserError(
            f"{FURTHER_KEY} of the tokenizer in {folder} is {listed!r}; it must be a list"
        )
    return [content_of(entry) for entry in listed or []]


def content_of(entry: object) -> str:
    """Returns the text of a special token, which the files write as a text or an object with it; empty for none."""
    content = entry.get("content") if isinstance(entry, dict) else entry
    return content if isinstance(content, str) else ""


def settings_in(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    return read_object(path, "the tokenizer's", "correct or remove it")
