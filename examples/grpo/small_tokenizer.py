"""A byte-level BPE tokenizer of a few hundred entries, and the files beside it in a Hugging Face directory.

Every digit is a token of its own. Tags are ordinary text that the merges happen to make whole, so any byte string can
be encoded and nothing is an unknown token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 352
END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# A tag is one piece, a word takes its leading space, a digit stands alone.
PIECES = r"</?(?:TAGS)>| ?\p{L}+|\p{N}|\s*[\r\n]+| ?[^\s\p{L}\p{N}<]+|<|\s+"
TAGS = "think|answer"
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


def train_tokenizer(
    texts: Iterator[str], tags: str = TAGS, vocab_size: int = VOCAB_SIZE
) -> Tokenizer:
    """`tags` are names with | between them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES.replace("TAGS", tags)), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise SystemExit(f"only {tokenizer.get_vocab_size()} of {vocab_size} entries were learnt")
    return tokenizer


def write_json(path: Path, content: object) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8", newline="\n")


def write_company(
    directory: Path, tokenizer: Tokenizer, chat_template: str = CHAT_TEMPLATE
) -> None:
    """What stands beside tokenizer.json in a Hugging Face directory."""
    ids = {token: tokenizer.token_to_id(token) for token in (END_OF_TEXT, START, END)}
    added = {
        str(number): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for token, number in ids.items()
    }
    write_json(
        directory / "tokenizer_config.json",
        {
            "added_tokens_decoder": added,
            "additional_special_tokens": [START, END],
            "bos_token": None,
            "chat_template": chat_template,
            "clean_up_tokenization_spaces": False,
            "eos_token": END,
            "model_max_length": 512,
            "pad_token": END_OF_TEXT,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
    write_json(
        directory / "special_tokens_map.json",
        {
            "additional_special_tokens": [START, END],
            "eos_token": END,
            "pad_token": END_OF_TEXT,
        },
    )
    write_json(
        directory / "generation_config.json",
        {
            "do_sample": True,
            "eos_token_id": [ids[END], ids[END_OF_TEXT]],
            "pad_token_id": ids[END_OF_TEXT],
        },
    )
