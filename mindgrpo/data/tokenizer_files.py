"""Reads the files of a Hugging Face tokenizer directory: vocabulary, added and special tokens, ids, chat templates.

Where one is missing, that is read which transformers would read (docs/data.md has the table); added tokens must get the
ids that they are listed with. `tokenizer.json` is read with the light `tokenizers` library: transformers' AutoTokenizer
would add 0.3 s of a core to the start of every rank, and since its version 5 builds the pipeline of some models anew.
It reads only older files, such as the `vocab.json` + `merges.txt` of GPT-2's and Qwen's families: local ones, and
without running the model's code.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Codec

from mindgrpo.data.chat_template import MAX_TEMPLATE_BYTES, ChatTemplate
from mindgrpo.errors import UserError
from mindgrpo.strict_files import read_json, read_object, read_text

TOKEN_KEYS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
FURTHER_KEY = "additional_special_tokens"
PAIR = ("vocab.json", "merges.txt")
# What names special tokens; without both transformers takes those of the model's class.
NAMING_FILES = ("tokenizer_config.json", "special_tokens_map.json")
# Qwen's vocabulary is often copied as the two bare files; its special tokens follow it.
QWEN_VOCABULARY = 151643
QWEN_SETTINGS = {
    "tokenizer_class": "Qwen2Tokenizer",
    "eos_token": "<|endoftext|>",
    "pad_token": "<|endoftext|>",
    FURTHER_KEY: ["<|im_start|>", "<|im_end|>"],
}
# Of tokens that tokenizer_config.json adds; of others the library warns.
ADDED_KEYS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
FURTHER_TEMPLATES = "additional_chat_templates"
TOOL_TEMPLATE = "tool_use"
MAX_ID = 2**31 - 1


def read_templates(
    folder: Path, settings: Mapping[str, Any]
) -> tuple[ChatTemplate | None, ChatTemplate | None, dict[str, str]]:
    """Returns the templates to render prompts with, without and with tools, and the texts of all that have names.

    Files go before tokenizer_config.json, as in transformers. Raises UserError.
    """
    listed = settings.get("chat_template")
    beside = folder / "chat_template.jinja"
    files = {path.stem: path for path in sorted((folder / FURTHER_TEMPLATES).glob("*.jinja"))}
    files |= {"default": beside} if beside.is_file() else {}
    texts = {name: template_text(path) for name, path in files.items()}
    origin = f"the chat template of {folder}"
    own = listed if isinstance(listed, dict) else {}
    if isinstance(listed, list):
        if not all(map(is_named, listed)):
            raise UserError(
                f"chat_template in {folder / 'tokenizer_config.json'} is a list of other things than objects with a "
                '"name" and a "template"; correct it'
            )
        own = {entry["name"]: entry["template"] for entry in listed}
    elif not isinstance(listed, dict | str | None):
        raise UserError(f"{origin} is a {type(listed).__name__}; it must be a text or a list")
    named = {**own, **texts}
    default = named.get("default", listed if isinstance(listed, str) else None)
    if default is None:
        default = settings_in(folder / "chat_template.json").get("chat_template")
    with_tools = (texts if "default" in texts else named).get(TOOL_TEMPLATE)
    if not all(isinstance(text, str | None) for text in (default, *named.values())):
        raise UserError(f"{origin} is no text; it must be a text or a list")
    return (
        None if default is None else ChatTemplate(default, origin),
        None if with_tools is None else ChatTemplate(with_tools, f"{origin} for tools"),
        named,
    )


def template_text(path: Path) -> str:
    return read_text(path, "the chat template", "correct or remove it", MAX_TEMPLATE_BYTES)


def is_named(entry: object) -> bool:
    held = entry if isinstance(entry, dict) else {}
    return isinstance(held.get("name"), str) and isinstance(held.get("template"), str)


def ids_of(codec: Codec, tokens: Mapping[str, str], key: str, folder: Path) -> list[int]:
    """Returns the id of the token that `key` names; none where there is no such key. Raises UserError."""
    if key not in tokens:
        return []
    token_id = codec.token_to_id(tokens[key])
    if token_id is None:
        raise UserError(
            f"{key} {tokens[key]!r} is not in the vocabulary of the tokenizer in {folder}; "
            f"correct {key} in tokenizer_config.json"
        )
    return [token_id]


def ids_in(folder: Path, key: str) -> list[int]:
    """Returns the id or ids under `key` in generation_config.json, else in config.json. Raises UserError."""
    for name in ("generation_config.json", "config.json"):
        value = settings_in(folder / name).get(key)
        numbers = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(number) is int and 0 <= number <= MAX_ID for number in numbers):
            raise UserError(
                f"{key} is {value!r} in {folder / name}; it must be an id or a list of ids"
            )
        if numbers:
            return numbers
    return []


def read_codec(
    folder: Path, settings: Mapping[str, Any], vocabulary: tuple[Path, Path] | None = None
) -> tuple[Codec, dict[str, str]]:
    """Returns the codec and the special tokens by name. `settings` is tokenizer_config.json. Raises UserError."""
    if vocabulary is None and (folder / "tokenizer.json").is_file():
        codec = load_json(folder / "tokenizer.json")
        # Saved by other programs, these would cut or fill every prompt.
        codec.no_truncation()
        codec.no_padding()
        tokens = named_tokens(folder, settings)
        if not any((folder / name).is_file() for name in NAMING_FILES):
            tokens = tokens_of_class(folder)
        added = added_tokens(tokens, settings, folder)
        with reading(f"the added tokens in {folder}"), without_panic_output():
            add_listed(codec, tokens, added)
        check_ids(codec, added, folder)
        return codec, tokens
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
    tokens = named_tokens(folder, settings)
    check_ids(codec, added_tokens(tokens, settings, folder), folder)
    if has_pair:
        return codec, tokens
    return codec, {
        name: str(text) for name, text in loaded.special_tokens_map.items() if name in TOKEN_KEYS
    }


def load_json(path: Path) -> Codec:
    # Strictly first: what the library makes of doubles and of depth is not documented.
    read_json(path, "the tokenizer", "copy it from the model's Hugging Face repository")
    with reading(str(path)), without_panic_output():
        return Codec.from_file(str(path))


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Makes a UserError of the libraries' errors: some raise bare Exception, and panics are not even that."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{what} cannot be read: {reason}; copy the tokenizer's files from the model's Hugging Face repository"
        ) from error


def is_panic(error: BaseException) -> bool:
    return type(error).__name__ == "PanicException"


@contextmanager
def without_panic_output() -> Iterator[None]:
    """Withholds what is written to stderr; drops it if a library panics: Rust prints a panic before raising it."""
    if sys.stderr is None:
        yield
        return
    with TemporaryFile() as held:
        sys.stderr.flush()
        stderr = os.dup(2)
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException as error:
            if is_panic(error):
                held.truncate(0)
            raise
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            held.seek(0)
            os.write(stderr, held.read())
            os.close(stderr)


def tokens_of_class(folder: Path) -> dict[str, str]:
    """Returns the special tokens of the model's kind of tokenizer, which no file of `folder` names."""
    try:
        loaded = load_with_transformers(folder, {}, (), without=())
    except UserError:  # no kind that transformers knows
        return {}
    return {name: str(text) for name, text in loaded.special_tokens_map.items()}


def load_with_transformers(
    folder: Path,
    settings: Mapping[str, Any],
    pair: tuple[Path, ...],
    without: Sequence[str] = ("tokenizer.json",),
) -> Any:
    from transformers import AutoTokenizer

    files = {path.name: path.resolve() for path in folder.iterdir()}
    files |= {name: path.resolve() for name, path in zip(PAIR, pair, strict=False)}
    with (
        TemporaryDirectory() as named,
        reading(f"the tokenizer in {folder}"),
        without_panic_output(),
    ):
        for name in files.keys() - {*without, "tokenizer_config.json"}:
            Path(named, name).symlink_to(files[name])
        Path(named, "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
        return AutoTokenizer.from_pretrained(
            named, local_files_only=True, trust_remote_code=False, use_fast=True
        )


def added_tokens(
    tokens: Mapping[str, str], settings: Mapping[str, Any], folder: Path
) -> dict[int, AddedToken]:
    """Returns by id the tokens that tokenizer_config.json adds to a vocabulary, else those of added_tokens.json.

    Raises UserError.
    """
    listed = settings.get("added_tokens_decoder")
    try:
        if listed is not None:
            added = {
                int(number): AddedToken(**{key: entry[key] for key in ADDED_KEYS if key in entry})
                for number, entry in listed.items()
            }
            if not all(token.content for token in added.values()):
                raise ValueError("one is empty")
        else:
            special = set(tokens.values())
            added = {
                int(number): AddedToken(
                    text, normalized=text not in special, special=text in special
                )
                for text, number in settings_in(folder / "added_tokens.json").items()
            }
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise UserError(
            f"the tokenizer in {folder} lists its added tokens in another form than id and token ({error}); copy its "
            "tokenizer_config.json again"
        ) from None
    return dict(sorted(added.items()))


def add_listed(codec: Codec, tokens: Mapping[str, str], added: Mapping[int, AddedToken]) -> None:
    """Adds what the other files list and tokenizer.json lacks, as transformers does; no token that ends a sample."""
    named = [text for key, text in tokens.items() if key != "eos_token"]
    for token in [*added.values(), *(AddedToken(text, special=True) for text in named)]:
        if codec.token_to_id(token.content) is None:
            codec.add_tokens([token])


def check_ids(codec: Codec, added: Mapping[int, AddedToken], folder: Path) -> None:
    """Raises UserError where an added token has another id than the one that it is listed with."""
    for number, token in added.items():
        if codec.token_to_id(token.content) != number:
            raise UserError(
                f"{token.content} in {folder} has the id {number}, but the tokenizer gives it "
                f"{codec.token_to_id(token.content)}; copy vocab.json, merges.txt and tokenizer_config.json of one "
                "model, or its tokenizer.json"
            )


def listed_tokens(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns tokenizer_config.json with what special_tokens_map.json adds to it.

    The latter goes before where the former lists no added tokens, as in transformers.
    """
    further = settings_in(folder / "special_tokens_map.json")
    layers = (further, settings) if "added_tokens_decoder" in settings else (settings, further)
    return {key: value for each in layers for key, value in each.items() if value is not None}


def named_tokens(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns special tokens by the names that templates have for them: eos_token, and a model's own image_token."""
    listed = listed_tokens(folder, settings)
    further = listed.get("extra_special_tokens")
    listed |= further if isinstance(further, dict) else {}
    names = [
        *TOKEN_KEYS,
        *(key for key in listed if key.endswith("_token") and key not in TOKEN_KEYS),
    ]
    return {key: content_of(listed[key]) for key in names if content_of(listed.get(key))}


def further_tokens(folder: Path, settings: Mapping[str, Any]) -> list[str]:
    """Returns the contents of `additional_special_tokens`, which chat templates may ask for. Raises UserError."""
    listed = listed_tokens(folder, settings).get(FURTHER_KEY)
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
