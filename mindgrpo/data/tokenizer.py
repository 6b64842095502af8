"""Reads, uses and writes a Hugging Face tokenizer directory: text <-> token ids, chat rendering and stop ids.

Neither a chat template nor an end-of-sequence id is guessed. tokenizer_files.py reads the files.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError
from tokenizers import Tokenizer as Codec

from mindgrpo.data.chat_template import (
    SETTING,
    ChatTemplate,
    choose_template,
    render_chat,
    shipped_names,
)
from mindgrpo.data.messages import Message
from mindgrpo.data.tokenizer_files import (
    FURTHER_KEY,
    FURTHER_TEMPLATES,
    MAX_ID,
    TOOL_TEMPLATE,
    further_tokens,
    ids_in,
    ids_of,
    read_codec,
    read_templates,
    reading,
    settings_in,
)
from mindgrpo.errors import UserError
from mindgrpo.strict_files import looked_at

FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model"),
    *("vocab.json", "merges.txt", "added_tokens.json", "chat_template.jinja", "chat_template.json"),
)


@dataclass(frozen=True)
class Tokenizer:
    """Encodes text exactly as written: only the chat template adds special tokens.

    The model has the first `num_known` ids. `tool_template` is the tokenizer's own for prompts with tools.
    """

    directory: Path
    codec: Codec
    special_tokens: Mapping[str, str | list[str]]
    template: ChatTemplate | None
    named_templates: Mapping[str, str]
    eos_id: int
    pad_id: int
    bos_id: int | None
    stop_ids: tuple[int, ...]
    # What `strftime_now` of templates tells; None: the present.
    date: datetime | None = None
    tool_template: ChatTemplate | None = None
    num_known: int = MAX_ID + 1

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
        """Returns token ids. Raises UserError for a text with a token that the model does not have."""
        with reading(f"a prompt, with the tokenizer in {self.directory},"):
            ids = list(self.codec.encode(text, add_special_tokens=False).ids)
        unknown = max(ids, default=0)
        if unknown >= self.num_known:
            raise UserError(
                f"{self.codec.id_to_token(unknown)!r} is token {unknown} of the tokenizer in {self.directory}, but the "
                f"model has {self.num_known} (vocab_size); leave it out of the text, or set rl_config.tokenizer_dir to "
                "the model's own tokenizer"
            )
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return str(self.codec.decode([*map(int, ids)], skip_special_tokens=skip_special_tokens))

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Returns the text that `apply_chat_template` of transformers gives, byte for byte. Raises UserError.

        `variables` are its `tools` and `documents`.
        """
        variables["add_generation_prompt"] = add_generation_prompt
        template = (self.tool_template if variables.get("tools") else None) or self.template
        if template is None:
            raise UserError(
                f"the tokenizer in {self.directory} has no chat template and prompts are rendered with one; set "
                f'"chat_template" in {self.directory / "tokenizer_config.json"}, or set {SETTING} to one of '
                f"{', '.join([*self.named_templates, *shipped_names()])} or to a jinja file"
            )
        try:
            tokens = self.special_tokens
            return render_chat(template.text, messages, self.date, **tokens, **variables)
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
        chosen = replace(self, template=template, tool_template=None)
        ends = [] if chosen.turn_end is None else [chosen.turn_end]
        return replace(chosen, stop_ids=tuple(dict.fromkeys([*self.stop_ids, *ends])))

    def known_to(self, vocab_size: int) -> Tokenizer:
        """Returns one for a model of `vocab_size` tokens. Raises UserError where none of these ends a sample."""
        stops = tuple(i for i in self.stop_ids if i < vocab_size)
        if not stops:
            raise UserError(
                f"no token that ends a sample ({', '.join(map(str, self.stop_ids))} of the tokenizer in "
                f"{self.directory}) is one of the model's {vocab_size} (vocab_size); set rl_config.tokenizer_dir to "
                "the model's own tokenizer"
            )
        eos_id = self.eos_id if self.eos_id in stops else stops[0]
        return replace(self, num_known=vocab_size, stop_ids=stops, eos_id=eos_id)


def load_tokenizer(
    directory: str | Path,
    vocabulary: tuple[Path, Path] | None = None,
    model_directory: str | Path | None = None,
) -> Tokenizer:
    """Reads a tokenizer directory. Raises UserError.

    `vocabulary` names a vocabulary and a merges file where they have names of their own; `model_directory` is the
    model's, which may name more tokens that end a sample.
    """
    folder = Path(directory)
    if folder.name == "tokenizer.json" and folder.is_file():
        folder = folder.parent
    if not folder.is_dir():
        raise UserError(
            f"the tokenizer directory {folder} does not exist{looked_at(folder)}; set rl_config.tokenizer_dir "
            "(or --tokenizer_dir) to a Hugging Face model directory"
        )
    settings = settings_in(folder / "tokenizer_config.json")
    codec, tokens = read_codec(folder, settings, vocabulary)
    further = further_tokens(folder, settings)
    template, tool_template, named = read_templates(folder, settings)
    folders = dict.fromkeys([folder, Path(model_directory or folder)])
    eos, pad, bos = (
        ids_of(codec, tokens, f"{name}_token", folder) for name in ("eos", "pad", "bos")
    )
    ends = [number for each in folders for number in ids_in(each, "eos_token_id")]
    stop_ids = tuple(dict.fromkeys([*ends, *eos]))
    if not stop_ids:
        raise UserError(
            f"no token ends a sample: neither tokenizer_config.json (eos_token) nor generation_config.json or "
            f"config.json (eos_token_id) in {folder} names one; set eos_token there"
        )
    eos_id = [*eos, *stop_ids][0]
    return Tokenizer(
        directory=folder,
        codec=codec,
        special_tokens=tokens | ({FURTHER_KEY: further} if further else {}),
        template=template,
        named_templates=named,
        eos_id=eos_id,
        pad_id=[*pad, *ids_in(folder, "pad_token_id"), eos_id][0],
        bos_id=bos[0] if bos else None,
        stop_ids=stop_ids,
        tool_template=tool_template,
    )


def write_tokenizer(tokenizer: Tokenizer, target: Path, with_template: bool) -> None:
    """Writes `tokenizer`'s files into the model folder `target`, in place of any that are there.

    `with_template`: its chat template was chosen by name, so it becomes the folder's own, in both files where
    libraries look, and the token that ends its turns ends what the model generates.
    """
    for name in FILES:
        (target / name).unlink(missing_ok=True)
    copy_tokenizer(tokenizer.directory, target)
    if with_template and tokenizer.template is not None:
        write_template(tokenizer, tokenizer.template.text, target)
        end_turns(tokenizer, target)


def copy_tokenizer(source: Path, target: Path) -> None:
    for name in FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    if (source / FURTHER_TEMPLATES).is_dir():
        shutil.copytree(source / FURTHER_TEMPLATES, target / FURTHER_TEMPLATES, dirs_exist_ok=True)


def named_entries(texts: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "template": text} for name, text in texts.items()]


def write_template(tokenizer: Tokenizer, text: str, target: Path) -> None:
    (target / "chat_template.jinja").write_text(text, encoding="utf-8")
    (target / "chat_template.json").unlink(missing_ok=True)
    # The run used the chosen one with tools, too.
    (target / FURTHER_TEMPLATES / f"{TOOL_TEMPLATE}.jinja").unlink(missing_ok=True)
    path = target / "tokenizer_config.json"
    if not path.is_file():
        return
    settings = settings_in(path)
    own = settings.get("chat_template")
    settings["chat_template"] = text
    if isinstance(own, list | dict):
        entries = own if isinstance(own, list) else named_entries(own)
        others = [entry for entry in entries if entry.get("name") not in ("default", TOOL_TEMPLATE)]
        settings["chat_template"] = [*named_entries({"default": text}), *others]
    write_json(path, settings)


def end_turns(tokenizer: Tokenizer, target: Path) -> None:
    path = target / "generation_config.json"
    generation = settings_in(path)
    ends = ids_in(target, "eos_token_id") or [tokenizer.eos_id]
    stop = tokenizer.turn_end
    if stop is None or stop in ends:
        return
    if not path.is_file():
        # Libraries take these from here alone, once the file exists.
        generation |= {"bos_token_id": tokenizer.bos_id, "pad_token_id": tokenizer.pad_id}
    write_json(path, generation | {"eos_token_id": [*ends, stop]})


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
