"""Writes a tokenizer's files beside a model, so that other libraries render the prompts that it was trained with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from mindgrpo.data.codec import settings_in
from mindgrpo.data.tokenizer import Tokenizer, id_list

FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model"),
    *("vocab.json", "merges.txt", "added_tokens.json", "chat_template.jinja", "chat_template.json"),
)
FURTHER_TEMPLATES = "additional_chat_templates"


def write_tokenizer(tokenizer: Tokenizer, target: Path, with_template: bool) -> None:
    """Writes `tokenizer`'s files into the model folder `target`, in place of any that are there.

    `with_template`: its chat template was chosen by name, so it becomes the folder's own, in both files where
    libraries look, and the token that ends its turns ends what the model generates.
    """
    for name in FILES:
        (target / name).unlink(missing_ok=True)
        if (tokenizer.directory / name).is_file():
            shutil.copyfile(tokenizer.directory / name, target / name)
    if (tokenizer.directory / FURTHER_TEMPLATES).is_dir():
        shutil.copytree(
            tokenizer.directory / FURTHER_TEMPLATES, target / FURTHER_TEMPLATES, dirs_exist_ok=True
        )
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
