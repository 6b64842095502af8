"""Reads a tokenizer directory's files as a codec between text and ids, and the special tokens that they name.

`tokenizer.json`, and the `vocab.json` + `merges.txt` of GPT-2's and Qwen's families, are read with the light
`tokenizers` library (transformers' AutoTokenizer adds 1.3 s to a start); other older files through transformers, from
local files and without running the model's code. Added tokens must get the ids that they are listed with.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Codec

from mindgrpo.errors import UserError
from mindgrpo.strict_files import read_json, read_object

TOKEN_KEYS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
FURTHER_KEY = "additional_special_tokens"
PAIR = ("vocab.json", "merges.txt")
FAMILIES = {"qwen2": "qwen", "qwen3": "qwen", "qwen": "qwen", "gpt2": "gpt2"}
# How Qwen cuts text before it merges bytes: digits stand alone.
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Qwen's vocabulary is often handed on as the two bare files; its special tokens follow it.
QWEN_VOCABULARY = 151643
QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_TOKENS = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}

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
    family = family_of(folder, settings)
    if has_pair and (family is not None or not named_class(folder, settings)):
        return byte_level_codec(folder, settings, pair, family)
    return codec_of_transformers(folder)


def load_json(path: Path) -> Codec:
    # Strictly first: what the library makes of doubles and of depth is not documented.
    read_json(path, "the tokenizer", "copy it from the model's Hugging Face repository")
    with reading(str(path)):
        return Codec.from_file(str(path))


@contextmanager
def reading(what: str, form: str = "") -> Iterator[None]:
    """Makes a UserError of the library's errors: it raises bare Exception, and its panics are not even that."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(
            f"{what} cannot be read{form and ' '}{form}: {first_line(error)}; copy the tokenizer's files from the "
            "model's Hugging Face repository"
        ) from error


def named_class(folder: Path, settings: Mapping[str, Any]) -> str:
    """Returns the tokenizer's class, else the model's kind; empty where no file says."""
    return str(
        settings.get("tokenizer_class")
        or settings_in(folder / "config.json").get("model_type")
        or ""
    )


def family_of(folder: Path, settings: Mapping[str, Any]) -> str | None:
    name = named_class(folder, settings).lower().removesuffix("fast").removesuffix("tokenizer")
    return FAMILIES.get(name)


@dataclass(frozen=True)
class Added:
    token: AddedToken
    number: int | None


def byte_level_codec(
    folder: Path, settings: Mapping[str, Any], pair: tuple[Path, Path], family: str | None
) -> tuple[Codec, SpecialTokens]:
    settings_in(pair[0])
    with reading(f"{pair[0]} and {pair[1]}", "as a vocabulary"):
        codec = Codec(models.BPE.from_file(str(pair[0]), str(pair[1])))
    tokens = named_tokens(folder, settings)
    added = added_tokens(folder, settings, tokens)
    if family is None and codec.get_vocab_size() == QWEN_VOCABULARY:
        family = "qwen"
    if family is None:
        raise UserError(
            f"no file in {folder} tells what kind of tokenizer {pair[0].name} is of; add the model's "
            "tokenizer_config.json, which names its tokenizer_class"
        )
    if family == "qwen" and not added and not tokens:
        added = [
            Added(AddedToken(text, special=True, normalized=False), None) for text in QWEN_SPECIAL
        ]
        tokens = dict(QWEN_TOKENS)
    prefixed = bool(settings.get("add_prefix_space", False))
    if family == "qwen":
        codec.normalizer = normalizers.NFC()
        words = pre_tokenizers.Split(Regex(QWEN_WORDS), behavior="isolated", invert=False)
        level = pre_tokenizers.ByteLevel(add_prefix_space=prefixed, use_regex=False)
        codec.pre_tokenizer = pre_tokenizers.Sequence([words, level])
    else:
        codec.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefixed)
    codec.decoder = decoders.ByteLevel()
    for entry in added:
        add(codec, entry, folder)
    return codec, tokens


def added_tokens(
    folder: Path, settings: Mapping[str, Any], tokens: Mapping[str, str]
) -> list[Added]:
    """Returns them in the order of their ids: tokenizer_config.json lists them, or the older added_tokens.json."""
    listed = settings.get("added_tokens_decoder")
    if isinstance(listed, dict):
        return [
            added_of(number, listed[number], folder) for number in sorted(listed, key=number_of)
        ]
    older = settings_in(folder / "added_tokens.json")
    mapped = settings_in(folder / "special_tokens_map.json")
    extra = [entry for held in (settings, mapped) for entry in listed_in(held, FURTHER_KEY, folder)]
    special = {*tokens.values(), *(content_of(entry) for entry in extra)} - {""}
    if not all(type(number) is int for number in older.values()):
        raise UserError(
            f"{folder / 'added_tokens.json'} must map tokens to their ids; correct or remove it"
        )
    ordered = sorted(older.items(), key=lambda item: item[1])
    return [
        Added(AddedToken(text, special=text in special, normalized=False), number)
        for text, number in ordered
    ] + [
        Added(AddedToken(text, special=True, normalized=False), None)
        for text in sorted(special - older.keys())
    ]


def number_of(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 10 else -1


def added_of(number: str, entry: object, folder: Path) -> Added:
    switches = ("single_word", "lstrip", "rstrip", "normalized", "special")
    held = entry if isinstance(entry, dict) else {}
    content, set_switches = held.get("content"), {k: held[k] for k in switches if k in held}
    if (
        number_of(number) >= 0
        and isinstance(content, str)
        and all(isinstance(value, bool) for value in set_switches.values())
    ):
        return Added(AddedToken(content, **set_switches), int(number))
    raise UserError(
        f"added_tokens_decoder in {folder / 'tokenizer_config.json'} holds {number!r}: {entry!r}, which is no id "
        "with a token's content and switches; correct it"
    )


def listed_in(settings: Mapping[str, Any], key: str, folder: Path) -> list[Any]:
    value = settings.get(key)
    if not isinstance(value, list | None):
        raise UserError(f"{key} of the tokenizer in {folder} is {value!r}; it must be a list")
    return value or []


def add(codec: Codec, entry: Added, folder: Path) -> None:
    kind = codec.add_special_tokens if entry.token.special else codec.add_tokens
    kind([entry.token])
    number = codec.token_to_id(entry.token.content)
    if entry.number is not None and number != entry.number:
        raise UserError(
            f"{entry.token.content} in {folder} has the id {entry.number}, but after vocab.json comes {number}; "
            "copy vocab.json, merges.txt and tokenizer_config.json of one model, or its tokenizer.json"
        )


def codec_of_transformers(folder: Path) -> tuple[Codec, SpecialTokens]:
    # Importing it without torch prints advice that has nothing to do with tokenizers.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False, use_fast=True
        )
        codec: Codec = loaded.backend_tokenizer
    except Exception as error:  # whatever the model's tokenizer class raises
        raise UserError(
            f"transformers cannot read the tokenizer in {folder}: {first_line(error)}; "
            "save tokenizer.json there, or add tokenizer_config.json with its tokenizer_class"
        ) from error
    held = loaded.special_tokens_map
    return codec, {key: str(held[key]) for key in TOKEN_KEYS if key in held}


def named_tokens(folder: Path, settings: Mapping[str, Any]) -> SpecialTokens:
    listed = {**settings_in(folder / "special_tokens_map.json"), **settings}
    return {key: content_of(listed[key]) for key in TOKEN_KEYS if content_of(listed.get(key))}


def further_tokens(folder: Path, settings: Mapping[str, Any]) -> list[str]:
    """Returns the contents of `additional_special_tokens`, which chat templates may ask for. Raises UserError."""
    listed = {**settings_in(folder / "special_tokens_map.json"), **settings}
    return [content_of(entry) for entry in listed_in(listed, FURTHER_KEY, folder)]


def content_of(entry: object) -> str:
    """Returns the text of a special token, which the files write as a text or an object with it; empty for none."""
    content = entry.get("content") if isinstance(entry, dict) else entry
    return content if isinstance(content, str) else ""


def settings_in(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    return read_object(path, "the tokenizer's", "correct or remove it")


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
