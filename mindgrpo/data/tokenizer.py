"""Reads, uses and writes a Hugging Face tokenizer directory: text <-> token ids, chat rendering and stop ids.

Neither a chat template nor an end-of-sequence id is guessed, and added tokens must get the ids that they are listed
with. `tokenizer.json` is read with the light `tokenizers` library: transformers' AutoTokenizer would add 0.3 s of a
core to the start of every rank, and since its version 5 builds the pipeline of some models anew. It reads only older
files, such as the `vocab.json` + `merges.txt` of GPT-2's and Qwen's families: local ones, and without running the
model's code.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

from jinja2 import TemplateSyntaxError
from tokenizers import Tokenizer as Codec

from mindgrpo.data.chat_template import (
    MAX_TEMPLATE_BYTES,
    SETTING,
    ChatTemplate,
    choose_template,
    render_chat,
    shipped_names,
)
from mindgrpo.data.messages import Message
from mindgrpo.errors import UserError
from mindgrpo.strict_files import read_json, read_object, read_text

TOKEN_KEYS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
FURTHER_KEY = "additional_special_tokens"
PAIR = ("vocab.json", "merges.txt")
# Qwen's vocabulary is often copied as the two bare files; its special tokens follow it.
QWEN_VOCABULARY = 151643
QWEN_SETTINGS = {
    "tokenizer_class": "Qwen2Tokenizer",
    "eos_token": "<|endoftext|>",
    "pad_token": "<|endoftext|>",
    FURTHER_KEY: ["<|im_start|>", "<|im_end|>"],
}
FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model"),
    *("vocab.json", "merges.txt", "added_tokens.json", "chat_template.jinja", "chat_template.json"),
)
FURTHER_TEMPLATES = "additional_chat_templates"


@dataclass(frozen=True)
class Tokenizer:
    """Encodes text exactly as written: only the chat template adds special tokens."""

    directory: Path
    codec: Codec
    special_tokens: Mapping[str, str | list[str]]
    template: ChatTemplate | None
    named_templates: Mapping[str, str]
    eos_id: int
    pad_id: int
    bos_id: int | None
    stop_ids: tuple[int, ...]

    @property
    def vocab_size(self) -> int:
        """Returns one more than the largest id, so it also bounds vocabularies with holes."""
        return max(self.codec.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def turn_end(self) -> int | None:
        """Returns the id of the token that ends a turn of the template; None where it is not known."""
        stop = self.template.stop if self.template else None
        return None if stop is None else self.codec.token_to_id(stop)

    def encode(self, text: str) -> list[int]:
        return list(self._encoding(text).ids)

    def _encoding(self, text: str) -> Any:
        with reading(f"a prompt, with the tokenizer in {self.directory},"):
            return self.codec.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return str(self.codec.decode([*map(int, ids)], skip_special_tokens=skip_special_tokens))

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Returns the text that `apply_chat_template` of transformers gives, byte for byte. Raises UserError.

        `variables` are its `tools` and `documents`.
        """
        variables["add_generation_prompt"] = add_generation_prompt
        return self._rendered(messages, variables, with_spans=False)[0]

    def encode_chat(
        self, messages: Sequence[Message], **variables: Any
    ) -> tuple[list[int], list[int]]:
        """Returns token ids of a conversation, and 1 for each that a `{% generation %}` block wrote, else 0.

        The mask is that of `apply_chat_template(return_assistant_tokens_mask=True)` of transformers 5.24: a token that
        is partly a block's is the block's. Raises UserError.
        """
        variables = {"add_generation_prompt": False} | variables
        text, spans = self._rendered(messages, variables, with_spans=True)
        encoding = self._encoding(text)
        mask, later = [], iter(spans)
        span = next(later, None)
        for start, stop in encoding.offsets:
            while span is not None and start >= span[1]:
                span = next(later, None)
            mask.append(int(span is not None and stop > span[0]))
        return list(encoding.ids), mask

    def _rendered(
        self, messages: Sequence[Message], variables: Mapping[str, Any], with_spans: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        template = self.template
        if template is None:
            raise UserError(
                f"the tokenizer in {self.directory} has no chat template and prompts are rendered with one; set "
                f'"chat_template" in {self.directory / "tokenizer_config.json"}, or set {SETTING} to one of '
                f"{', '.join([*self.named_templates, *shipped_names()])} or to a jinja file"
            )
        try:
            tokens = self.special_tokens
            return render_chat(template.text, messages, with_spans, **tokens, **variables)
        except TemplateSyntaxError as error:
            raise UserError(
                f"{template.origin} is not valid jinja: {error}; correct it or set another {SETTING}"
            ) from error
        except Exception as error:  # what the template raises, or its operations on the messages
            roles = [message.get("role") for message in messages]
            raise UserError(
                f"{template.origin} cannot render {roles}: {error}; correct it or set another {SETTING}"
            ) from error

    def with_template(self, value: str | None) -> Tokenizer:
        """Returns one that renders with the template that `value` names, and stops where it ends a turn."""
        if value is None:
            return self
        template = choose_template(value, self.named_templates)
        unknown = [text for text in template.markers if self.codec.token_to_id(text) is None]
        if unknown:
            raise UserError(
                f"{template.origin} writes {', '.join(unknown)}, no token of the tokenizer in {self.directory}; "
                f"set {SETTING} to a template for this model, such as base_r1, which writes plain text"
            )
        chosen = replace(self, template=template)
        ends = [] if chosen.turn_end is None else [chosen.turn_end]
        return replace(chosen, stop_ids=tuple(dict.fromkeys([*self.stop_ids, *ends])))


def load_tokenizer(directory: str | Path, vocabulary: tuple[Path, Path] | None = None) -> Tokenizer:
    """Reads a tokenizer directory. Raises UserError.

    `vocabulary` names a vocabulary and a merges file where they have names of their own.
    """
    folder = Path(directory)
    if folder.name == "tokenizer.json" and folder.is_file():
        folder = folder.parent
    if not folder.is_dir():
        raise UserError(
            f"the tokenizer directory {folder} does not exist; set rl_config.tokenizer_dir "
            "(or --tokenizer_dir) to a Hugging Face model directory"
        )
    settings = settings_in(folder / "tokenizer_config.json")
    codec, tokens = read_codec(folder, settings, vocabulary)
    further = further_tokens(folder, settings)
    template, named = read_templates(folder, settings)
    generation = settings_in(folder / "generation_config.json")
    eos, pad, bos = (
        ids_of(codec, tokens, f"{name}_token", folder) for name in ("eos", "pad", "bos")
    )
    stop_ids = tuple(dict.fromkeys([*id_list(generation, "eos_token_id", folder), *eos]))
    if not stop_ids:
        raise UserError(
            f"no token ends a sample: neither tokenizer_config.json (eos_token) nor "
            f"generation_config.json (eos_token_id) in {folder} names one; set eos_token there"
        )
    eos_id = [*eos, *stop_ids][0]
    return Tokenizer(
        directory=folder,
        codec=codec,
        special_tokens=tokens | ({FURTHER_KEY: further} if further else {}),
        template=template,
        named_templates=named,
        eos_id=eos_id,
        pad_id=[*pad, *id_list(generation, "pad_token_id", folder), eos_id][0],
        bos_id=bos[0] if bos else None,
        stop_ids=stop_ids,
    )


def read_templates(
    folder: Path, settings: Mapping[str, Any]
) -> tuple[ChatTemplate | None, dict[str, str]]:
    """Returns the template to render with, and the texts of all that have names. Raises UserError."""
    listed = settings.get("chat_template")
    further = sorted((folder / FURTHER_TEMPLATES).glob("*.jinja"))
    texts = {path.stem: template_text(path) for path in further}
    if isinstance(listed, list):
        if not all(map(is_named, listed)):
            raise UserError(
                f"chat_template in {folder / 'tokenizer_config.json'} is a list of other things than objects with a "
                '"name" and a "template"; correct it'
            )
        texts = {entry["name"]: entry["template"] for entry in listed} | texts
        listed = texts.get("default")
    beside = folder / "chat_template.jinja"
    if beside.is_file():
        listed = template_text(beside)
    if listed is None:
        listed = settings_in(folder / "chat_template.json").get("chat_template")
    origin = f"the chat template of {folder}"
    if not isinstance(listed, str | None):
        raise UserError(f"{origin} is a {type(listed).__name__}; it must be a text or a list")
    return None if listed is None else ChatTemplate(listed, origin), texts


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


def id_list(settings: dict[str, Any], key: str, folder: Path) -> list[int]:
    """Returns the id or ids that generation_config.json has under `key`. Raises UserError."""
    value = settings.get(key)
    numbers = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(number) is int and 0 <= number < 2**31 for number in numbers):
        raise UserError(
            f"{key} is {value!r} in {folder / 'generation_config.json'}; "
            "it must be an id or a list of ids"
        )
    return numbers


def read_codec(
    folder: Path, settings: Mapping[str, Any], vocabulary: tuple[Path, Path] | None = None
) -> tuple[Codec, dict[str, str]]:
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


def load_with_transformers(
    folder: Path, settings: Mapping[str, Any], pair: tuple[Path, ...]
) -> Any:
    from transformers import AutoTokenizer

    files = {path.name: path.resolve() for path in folder.iterdir()}
    files |= {name: path.resolve() for name, path in zip(PAIR, pair, strict=False)}
    with (
        TemporaryDirectory() as named,
        reading(f"the tokenizer in {folder}"),
        without_panic_output(),
    ):
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


def named_tokens(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
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


def write_tokenizer(tokenizer: Tokenizer, target: Path, with_template: bool) -> None:
    """Writes `tokenizer`'s files into the model folder `target`, in place of any that are there.

    `with_template`: its chat template was chosen by name, so it becomes the folder's own, in both files where
    libraries look, and the token that ends its turns ends what the model generates.
    """
    source = tokenizer.directory
    for name in FILES:
        (target / name).unlink(missing_ok=True)
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    if (source / FURTHER_TEMPLATES).is_dir():
        shutil.copytree(source / FURTHER_TEMPLATES, target / FURTHER_TEMPLATES, dirs_exist_ok=True)
    if with_template and tokenizer.template is not None:
        write_template(tokenizer, tokenizer.template.text, target)
        end_turns(tokenizer, target)


def write_template(tokenizer: Tokenizer, text: str, target: Path) -> None:
    (target / "chat_template.jinja").write_text(text, encoding="utf-8")
    (target / "chat_template.json").unlink(missing_ok=True)
    path = target / "tokenizer_config.json"
    if not path.is_file():
        return
    settings = settings_in(path)
    own = settings.get("chat_template")
    settings["chat_template"] = text
    if isinstance(own, list):
        others = [entry for entry in own if entry.get("name") != "default"]
        settings["chat_template"] = [{"name": "default", "template": text}, *others]
    write_json(path, settings)


def end_turns(tokenizer: Tokenizer, target: Path) -> None:
    path = target / "generation_config.json"
    generation = settings_in(path)
    ends = id_list(generation, "eos_token_id", target) or [tokenizer.eos_id]
    stop = tokenizer.turn_end
    if stop is None or stop in ends:
        return
    if not path.is_file():
        # Libraries take these from here alone, once the file exists.
        generation |= {"bos_token_id": tokenizer.bos_id, "pad_token_id": tokenizer.pad_id}
    write_json(path, generation | {"eos_token_id": [*ends, stop]})


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
