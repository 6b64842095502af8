"""A Hugging Face tokenizer directory: text <-> token ids, chat rendering and stop ids.

codec.py reads the files. Neither a chat template nor an end-of-sequence id is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError
from tokenizers import Tokenizer as Codec

from mindgrpo.data.chat_template import (
    MAX_TEMPLATE_BYTES,
    SETTING,
    ChatTemplate,
    choose_template,
    shipped_names,
)
from mindgrpo.data.codec import FURTHER_KEY, further_tokens, read_codec, reading, settings_in
from mindgrpo.data.examples import Message
from mindgrpo.errors import UserError
from mindgrpo.strict_files import read_text


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
        """The id of the token that ends a turn of the template; None where it is not known."""
        stop = self.template.stop if self.template else None
        return None if stop is None else self.codec.token_to_id(stop)

    def encode(self, text: str) -> list[int]:
        with self._encoding():
            return list(self.codec.encode(text, add_special_tokens=False).ids)

    def _encoding(self) -> AbstractContextManager[None]:
        return reading(f"a prompt, with the tokenizer in {self.directory},")

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        whole = [int(number) for number in ids]
        return str(self.codec.decode(whole, skip_special_tokens=skip_special_tokens))

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
        with self._encoding():
            encoding = self.codec.encode(text, add_special_tokens=False)
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
        # Imports transformers, which commands that render nothing need not wait for.
        from mindgrpo.data.rendering import render_chat

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
    """Returns the one to render with, and all those that have names. Raises UserError."""
    listed = settings.get("chat_template")
    named = {
        path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))
    }
    texts = {name: template_text(path) for name, path in named.items()}
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
    value = settings.get(key)
    numbers = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(number) is int and 0 <= number < 2**31 for number in numbers):
        raise UserError(
            f"{key} is {value!r} in {folder / 'generation_config.json'}; "
            "it must be an id or a list of ids"
        )
    return numbers
