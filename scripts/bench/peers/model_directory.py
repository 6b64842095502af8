"""A Hugging Face directory with random weights from a work file's model, and a tokenizer of numbered words.

Runs in a peer's environment (torch and transformers). Refuses to hold a stop token that could be drawn: its id is
past the vocabulary, so completions are exactly as long as asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

STOP = "<stop>"


@contextmanager
def model_directory(model: dict[str, Any]) -> Iterator[Path]:
    """Removed when left."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    with TemporaryDirectory(prefix="mindgrpo-peer-") as folder:
        fields = {key: value for key, value in model.items() if key != "model_type"}
        config = AutoConfig.for_model(model["model_type"], **fields)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
        yield Path(folder)


def tokenizer(vocab_size: int) -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = {word(index): index for index in range(vocab_size)} | {STOP: vocab_size}
    made = Tokenizer(WordLevel(words, unk_token=word(0)))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=STOP, pad_token=word(0))


def word(index: int) -> str:
    return f"w{index}"


def text(ids: Sequence[int]) -> str:
    """What that tokenizer turns into exactly `ids`."""
    return " ".join(word(int(index)) for index in ids)
