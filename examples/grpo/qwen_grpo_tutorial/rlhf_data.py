"""JSONL to MindRecord, with a check that every rendered prompt fits. Downloads nothing.

    python rlhf_data.py --tokenizer_dir MODEL_DIR --file_path train.jsonl \
        --output_path train.mindrecord --dataset_type gsm8k
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mindgrpo.data.prompts import PromptForm
from mindgrpo.data.records import DATASET_TYPES, ConversionReport, convert_jsonl
from mindgrpo.data.tokenizer import load_tokenizer
from mindgrpo.errors import UserError


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Turn a JSONL data set into a MindRecord.")
    parser.add_argument("--tokenizer_dir", type=Path, help="a Hugging Face model directory")
    parser.add_argument("--vocab_path", type=Path, help="its vocab.json, with --merges_file_path")
    parser.add_argument("--merges_file_path", type=Path, help="its merges.txt")
    parser.add_argument("--file_path", type=Path, required=True, help="the .jsonl to read")
    parser.add_argument("--output_path", type=Path, required=True, help="the .mindrecord to write")
    parser.add_argument("--max_prompt_length", type=int, default=2048, help="in tokens")
    parser.add_argument(
        "--prompt_overflow",
        choices=("error", "drop"),
        default="error",
        help="what becomes of a longer prompt; the trainer can also cut",
    )
    parser.add_argument(
        "--dataset_type",
        choices=DATASET_TYPES,
        help="gsm8k: the gold answer stands after ####; the others: the answer is the gold answer",
    )
    parser.add_argument("--system_prompt", default="", help="as the run will use it")
    parser.add_argument("--chat_template", type=Path, help="a jinja file, as the run will use it")
    parser.add_argument("--overwrite", action="store_true", help="replace the output")
    return parser.parse_args(argv)


def tokenizer_directory(arguments: argparse.Namespace) -> Path:
    if arguments.tokenizer_dir is not None:
        return Path(arguments.tokenizer_dir)
    vocab, merges = arguments.vocab_path, arguments.merges_file_path
    if vocab is None or merges is None:
        raise UserError(
            "no tokenizer was given; pass --tokenizer_dir, or --vocab_path and --merges_file_path"
        )
    for path in (vocab, merges):
        if not path.is_file():
            raise UserError(f"the tokenizer file {path} does not exist; correct its flag")
    if vocab.parent.resolve() != merges.parent.resolve():
        raise UserError(
            f"{vocab} and {merges} stand in two directories; put them and their "
            "tokenizer_config.json into one and pass it as --tokenizer_dir"
        )
    return Path(vocab.parent)


def chat_template(path: Path | None) -> str | None:
    try:
        return None if path is None else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--chat_template {path} cannot be read: {error}; give a file") from error


def convert(arguments: argparse.Namespace) -> ConversionReport:
    form = PromptForm(
        load_tokenizer(tokenizer_directory(arguments)).with_template(
            chat_template(arguments.chat_template)
        ),
        arguments.max_prompt_length,
        arguments.prompt_overflow,
        arguments.system_prompt,
    )
    return convert_jsonl(
        arguments.file_path,
        arguments.output_path,
        dataset_type=arguments.dataset_type,
        keep=lambda record, where: form.fits(record["question"], where),
        overwrite=arguments.overwrite,
    )


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    try:
        print(convert(arguments))
    except UserError as error:
        print(f"mindgrpo: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
