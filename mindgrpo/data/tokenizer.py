"""A Hugging Face tokenizer directory as text <-> ids, chat rendering and stop ids.

Reads `tokenizer.json` with the light `tokenizers` library. A directory that has only older files
(`vocab.json` + `merges.txt`, `tokenizer.model`) is read through transformers, from local files and
without running code of the model's. Refuses to guess a chat template or an end-of-sequence id.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as Codec

from mindgrpo.errors import UserError

Message = Mapping[str, Any]
OLDER_FILES = (("vocab.json", "merges.txt"), ("tokenizer.model",))
TOKEN_KEYS = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True)
class Tokenizer:
    """Ids come from text exactly as written: only the template adds special tokens."""

    directory: Path
    codec: Codec
    special_tokens: Mapping[str, str]
    chat_template: str | None
    eos_id: int
    pad_id: int
    bos_id: int | None
    stop_ids: tuple[int, ...]

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, so it also bounds vocabularies with holes."""
        return max(self.codec.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str) -> list[int]:
        return list(self.codec.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        whole = [int(number) for number in ids]
        return str(self.codec.decode(whole, skip_special_tokens=skip_special_tokens))

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        try:
            return self.compiled_template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
            )
        except TemplateError as error:
            raise UserError(
                f"the chat template of {self.directory} cannot render "
                f"{[message.get('role') for message in messages]}: {error}; "
                'correct "chat_template" in tokenizer_config.json'
            ) from error

    @cached_property
    def compiled_template(self) -> Template:
        """Compiled once: it costs more than encoding a prompt."""
        if self.chat_template is None:
            raise UserError(
                f"the tokenizer in {self.directory} has no chat template and prompts are rendered "
                f'with one; set "chat_template" in {self.directory / "tokenizer_config.json"} '
                "or set rl_config.chat_template (--chat_template) to a jinja file"
            )
        return chat_environment().from_string(self.chat_template)

    def with_template(self, chat_template: str | None) -> Tokenizer:
        return self if chat_template is None else replace(self, chat_template=chat_template)


def chat_environment() -> ImmutableSandboxedEnvironment:
    """What templates written for transformers count on, in a sandbox."""

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def to_json(value: object, indent: int | None = None, ensure_ascii: bool = False) -> str:
        return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def load_tokenizer(directory: str | Path) -> Tokenizer:
    folder = Path(directory)
    if not folder.is_dir():
        raise UserError(
            f"the tokenizer directory {folder} does not exist; set rl_config.tokenizer_dir "
            "(or --tokenizer_dir) to a Hugging Face model directory"
        )
    settings = read_json(folder / "tokenizer_config.json")
    codec, tokens = read_codec(folder, settings)
    generation = read_json(folder / "generation_config.json")
    eos = token_id(codec, tokens, "eos_token", folder)
    generation_eos = id_list(generation, "eos_token_id", folder)
    stop_ids = tuple(dict.fromkeys([*generation_eos, *([] if eos is None else [eos])]))
    if not stop_ids:
        raise UserError(
            f"no token ends a sample: neither tokenizer_config.json (eos_token) nor "
            f"generation_config.json (eos_token_id) in {folder} names one; set eos_token there"
        )
    eos = stop_ids[0] if eos is None else eos
    pad = token_id(codec, tokens, "pad_token", folder)
    pads = [*([] if pad is None else [pad]), *id_list(generation, "pad_token_id", folder), eos]
    return Tokenizer(
        directory=folder,
        codec=codec,
        special_tokens=tokens,
        chat_template=read_template(folder, settings),
        eos_id=eos,
        pad_id=pads[0],
        bos_id=token_id(codec, tokens, "bos_token", folder),
        stop_ids=stop_ids,
    )


def read_codec(folder: Path, settings: dict[str, Any]) -> tuple[Codec, dict[str, str]]:
    if (folder / "tokenizer.json").is_file():
        try:
            codec = Codec.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"{folder / 'tokenizer.json'} cannot be read: {error}") from error
        # Saved by other programs, these would cut or fill every prompt.
        codec.no_truncation()
        codec.no_padding()
        return codec, named_tokens(folder, settings)
    if any(all((folder / name).is_file() for name in names) for names in OLDER_FILES):
        return read_older_codec(folder)
    raise UserError(
        f"{folder} holds no tokenizer; it must contain tokenizer.json, or vocab.json and "
        "merges.txt; copy them from the model's Hugging Face repository"
    )


def read_older_codec(folder: Path) -> tuple[Codec, dict[str, str]]:
    # Importing it without torch prints advice that has nothing to do with tokenizers.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise UserError(
            f"{folder} has no tokenizer.json and reading its older files takes transformers; "
            "pip install transformers, or save tokenizer.json there"
        ) from error
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


def read_template(folder: Path, settings: dict[str, Any]) -> str | None:
    beside = folder / "chat_template.jinja"
    if beside.is_file():
        return beside.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template


def named_tokens(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    listed = {**read_json(folder / "special_tokens_map.json"), **settings}
    tokens = {}
    for key in TOKEN_KEYS:
        entry = listed.get(key)
        content = entry.get("content") if isinstance(entry, dict) else entry
        if content:
            tokens[key] = str(content)
    return tokens


def token_id(codec: Codec, tokens: Mapping[str, str], key: str, folder: Path) -> int | None:
    if key not in tokens:
        return None
    number = codec.token_to_id(tokens[key])
    if number is None:
        raise UserError(
            f"{key} {tokens[key]!r} is not in the vocabulary of the tokenizer in {folder}; "
            f"correct {key} in tokenizer_config.json"
        )
    return int(number)


def id_list(settings: dict[str, Any], key: str, folder: Path) -> list[int]:
    value = settings.get(key)
    numbers = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(number, int) for number in numbers):
        raise UserError(
            f"{key} is {value!r} in {folder / 'generation_config.json'}; "
            "it must be an id or a list of ids"
        )
    return numbers


def read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}; correct or remove it") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}; it must hold a JSON object")
    return content


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
