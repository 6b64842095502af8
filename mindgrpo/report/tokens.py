"""The text of each token of a completion, by the run's own tokenizer."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from mindgrpo.report.run_folder import RunFolder


def tokenizer_of(run: RunFolder) -> Tokenizer | None:
    """Of the model that the run wrote, else of the one that it loaded; None where neither can be read."""
    for folder in _folders(run.path, run.values):
        try:
            return Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception:  # the library raises Exception itself
            continue
    return None


def _folders(path: Path, values: Mapping[str, Any]) -> list[Path]:
    keys = ("rl_config.tokenizer_dir", "actor_config.save", "actor_config.load")
    asked = [values.get(key) for key in keys]
    return [path / "hf", *(Path(folder) for folder in asked if isinstance(folder, str))]


def texts_of(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str] | None:
    """One text a token; a character of several tokens is with its last one. None where an id is unknown."""
    stream = DecodeStream(skip_special_tokens=False)
    try:
        return [stream.step(tokenizer, number) or "" for number in ids]
    except Exception:  # the library raises Exception itself
        return None


def packed_lengths(texts: Sequence[str]) -> str:
    """Lengths of texts as JavaScript counts them, a byte each in base64; 255 means that the next byte adds to it."""
    out = bytearray()
    for text in texts:
        # A character beyond the first 65536 counts twice.
        length = (
            len(text) if text.isascii() else len(text.encode("utf-16-le", "surrogatepass")) // 2
        )
        while length >= 255:
            out.append(255)
            length -= 255
        out.append(length)
    return base64.b64encode(bytes(out)).decode()
