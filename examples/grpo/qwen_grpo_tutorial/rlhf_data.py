"""Any data set to a MindRecord, with a check that every rendered prompt fits.

    python rlhf_data.py --tokenizer_dir MODEL_DIR --file_path train.jsonl \
        --output_path train.mindrecord --dataset_type gsm8k
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace

from mindgrpo.cli.arguments import Arguments, naming
from mindgrpo.cli.arguments import path as path_of
from mindgrpo.data.convert import ConversionReport, convert, progress_bar
from mindgrpo.data.examples import DATASET_TYPES, RowForm, parse_key_map
from mindgrpo.data.prompts import OVERFLOWS, PromptForm
from mindgrpo.data.sources import FOR_TRAINING, open_examples
from mindgrpo.data.tokenizer import Tokenizer, load_tokenizer
from mindgrpo.errors import UserError
from mindgrpo.run.named_sources import fetch_local

# Of a run's keys, which messages name.
FLAGS = {
    "rl_config.chat_template": "--chat_template",
    "rl_config.dataset_columns": "--columns",
    "rl_config.dataset_map_keys": "--map-keys",
    "rl_config.tokenizer_dir": "--tokenizer_dir",
}
RETIRED = {
    "--seq_length": "rows are packed by the trainer, rl_config.seq_length",
    "--pad_token_id": "nothing is padded, lengths tell where text ends",
    "--tokenizer_type": "the tokenizer's own files tell its kind",
}


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Arguments(description="Turn a data set into a MindRecord.")
    parser.add_argument(
        "--tokenizer_dir", type=path_of, help="a Hugging Face model directory, or a name on its hub"
    )
    parser.add_argument(
        "--vocab_path", type=path_of, help="its vocab.json, with --merges_file_path"
    )
    parser.add_argument("--merges_file_path", type=path_of, help="its merges.txt")
    parser.add_argument(
        "--file_path",
        type=path_of,
        required=True,
        help="a .jsonl, .json, .csv, .parquet or .arrow file, a directory of Hugging Face datasets, or a name on a hub",
    )
    parser.add_argument("--split", help="of a directory's splits; default: train, or the only one")
    parser.add_argument(
        "--output_path", type=path_of, required=True, help="the .mindrecord to write"
    )
    parser.add_argument("--max_prompt_length", type=int, default=2048, help="in tokens")
    parser.add_argument(
        "--prompt_overflow",
        choices=OVERFLOWS,
        default="error",
        help="what becomes of a longer prompt: refused, dropped, or its question cut at that end",
    )
    parser.add_argument(
        "--dataset_type",
        type=str.lower,
        choices=DATASET_TYPES,
        help="gsm8k: the gold answer stands after ####; openr1math: the question is called problem; plain: as it is",
    )
    parser.add_argument(
        "--map-keys",
        "--map_keys",
        default="",
        metavar="NAME=KEY,...",
        help="rows with other names: question=problem,answer=solution",
    )
    parser.add_argument("--columns", help="columns to keep for rewards, with commas; default: all")
    parser.add_argument("--system_prompt", default="", help="as the run will use it")
    parser.add_argument(
        "--chat_template", help="as the run will use it: a name, FILE.jinja or FILE.json:NAME"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the output")
    for flag in RETIRED:
        parser.add_argument(flag, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def tokenizer_of(arguments: argparse.Namespace) -> Tokenizer:
    if arguments.tokenizer_dir is not None:
        folder = fetch_local(str(arguments.tokenizer_dir), "tokenizer", "--tokenizer_dir")
        return load_tokenizer(folder)
    vocab, merges = arguments.vocab_path, arguments.merges_file_path
    if vocab is None or merges is None:
        raise UserError(
            "no tokenizer was given; pass --tokenizer_dir, or --vocab_path and --merges_file_path"
        )
    for path in (vocab, merges):
        if not path.is_file():
            raise UserError(f"the tokenizer file {path} does not exist; correct its flag")
    return load_tokenizer(vocab.parent, (vocab, merges))


def words(text: str) -> list[str]:
    return [word for word in text.split(",") if word.strip()]


def run(arguments: argparse.Namespace) -> ConversionReport:
    tokenizer = tokenizer_of(arguments).with_template(arguments.chat_template)
    columns = None if arguments.columns is None else words(arguments.columns)
    rows = RowForm(arguments.dataset_type, parse_key_map(words(arguments.map_keys)), columns)
    choice = replace(FOR_TRAINING, name=arguments.split, key="--split")
    examples = open_examples(
        fetch_local(str(arguments.file_path), "data", "--file_path", choice),
        rows,
        choice,
        decode=tokenizer.decode,
        key="--file_path",
    )
    form = PromptForm(
        tokenizer, arguments.max_prompt_length, arguments.prompt_overflow, arguments.system_prompt
    )
    return convert(
        examples,
        arguments.output_path,
        form,
        source=str(arguments.file_path),
        overwrite=arguments.overwrite,
        progress=progress_bar,
    )


def interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    try:
        arguments = parse_arguments(argv)
    except UserError as error:
        print(f"mindgrpo: {error}", file=sys.stderr)
        return 2
    for flag, reason in RETIRED.items():
        if getattr(arguments, flag.lstrip("-")) is not None:
            print(f"mindgrpo: {flag} has no effect: {reason}", file=sys.stderr)
    # A program that is ended takes its half-written file with it.
    signal.signal(signal.SIGTERM, interrupt)
    try:
        with naming(FLAGS):
            print(run(arguments))
    except UserError as error:
        print(f"mindgrpo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("mindgrpo: interrupted, nothing was written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
