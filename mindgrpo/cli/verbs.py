"""Lists the verbs of the command line and runs one: `mindgrpo VERB ...`, or `python -m mindgrpo VERB ...`.

A verb is a module of this package with a function `main(argv)`, or a function of the module in MODULES. It is imported
when it is called, so that a verb that needs no MindSpore starts without it. The launcher runs this file on ranks, with
the verb first in sys.argv.
"""

from __future__ import annotations

import importlib
import inspect
import os
import select
import shutil
import signal
import sys
from collections.abc import Callable, Sequence

from mindgrpo.errors import UserError, escape_what_cannot_be_shown, print_user_error

STANDARD_OUTPUTS = (1, 2)
# Of verbs that share one with another.
MODULES = {"train": "launch"}
HELP, HELP_KEYS = ("-h", "--help"), "--help-keys"
# The lines of the help, by verb.
USAGE = {
    "launch": """\
  launch  --ranks N --config FILE [--key value ...]  train on N ranks of this host
          [--max_restarts M]                         ... started again up to M times
          ... -- PROGRAM [ARGUMENTS]                 ... or run a program of your own, or -- eval|sft --config FILE
          [--hosts H --host_index I --master A:PORT] ... on H hosts, of which this is host I; A is host 0's
          [--cluster auto|msrun|slurm|ascendjob]     ... or the scheduler says these (msrun: the flags)""",
    "train": """\
  train   --config FILE [--key value ...]            train on the ranks that msrun started, or alone""",
    "sft": """\
  sft     --config FILE [--key value ...]            supervised training, on given answers""",
    "eval": """\
  eval    --config FILE [--key value ...]            rewards, mean@n and pass@k of a model on held-out prompts
          [--model RUN_OR_MODEL]                     ... of this model; a run's needs no --config, but has the run's
          [--data FILE] [--num_generations N]        ... with other data, several samples a prompt,
          [--greedy] [--samples N] [--step N]        ... greedy, fewer prompts, the seed of step N (default 0)
          [--output FILE.json] [--completions FILE]  ... kept as JSON, and what was answered as JSONL""",
    "watch": """\
  watch   RUN                                        the steps of a run from another terminal, as they come""",
    "check": """\
  check   [--ranks N] --config FILE [--key value]    validate everything a run is given, without a device
          ... sft|eval --config FILE [--key value]   ... everything that this verb is given""",
    "plan": """\
  plan    [--ranks N] --config FILE [--key value]    layouts, memory by phase, whether it fits, reshard traffic, batches
          [--layouts] [--must_fit]                   ... and other layouts by speed; fail unless it fits""",
    "config": """\
  config  --explain KEY | --reference                one key of the configuration in words, or all of them
          --explain NAME=VALUE ... | FILE            the YAML that settings of MindRLHF, verl or TRL mean here
          | --other_trainers                         ... or the names that MindRLHF, verl and TRL have for them
          | --trl_fields                             ... or the fields of GRPOConfig's declaration""",
    "example": """\
  example [NAME]                                     an example into the present folder, with the command to run it""",
    "doctor": """\
  doctor                                             what this machine lacks, with remedies
  doctor  --device [--ranks N] [--only RUNG,...]     ... and its devices, up to the first rung that fails: versions,
          [--output FILE.json]                       devices, kernels, a step; leaves doctor_report.tar.gz to send""",
    "engine": """\
  engine  [show [--python PYTHON]]                   the vLLM that runs would start, and whether it was tried
          install [--target DIR]      vLLM into an environment of its own (.venv-vllm, 1.8 GB)""",
    "score": """\
  score   --reward NAME_OR_FILE:FUNCTION --data DATA  tries a reward on a data set, without a model
          --config FILE                              ... those of a run's configuration
          --environment NAME [--seed N] [--model DIR] ... or talks to an environment by hand, or with a model""",
    "export": """\
  export  --from RUN_OR_CHECKPOINT_OR_MODEL --output DIR [--dtype float32|bfloat16|float16]
          [--best] [--format huggingface|mindformers] [--model DIR]  (config.json and tokenizer for a checkpoint)
          [--tokenizer_dir DIR]       ... whose run had a tokenizer of its own that has been moved""",
    "report": """\
  report  RUN [RUN2] [--output FILE.html]            one page about a run, or about two side by side""",
    "replay": """\
  replay  DUMP [--model DIR] [--output FILE.json]    makes an update again that a run skipped""",
}


def usage(verbs: Sequence[str] = tuple(USAGE)) -> str:
    return "\n".join(["usage: mindgrpo VERB ...", *(USAGE[verb] for verb in verbs)])


def _help(verb: str, described: str, flags: str) -> str:
    """Returns the help of a verb: one screen, of which keys of the configuration have only their short flags."""
    sections = [usage([verb]), described.strip(), flags]
    if _takes_keys(verb):
        from mindgrpo.config.reference import short_flags

        sections.append(
            f"any key of the file as --section.key VALUE (mindgrpo {verb} {HELP_KEYS} [SECTION] lists them); shorter:\n"
            + short_flags(*_keys_of(verb))
        )
    return "\n\n".join(filter(None, sections))


def _help_keys(verb: str, words: list[str]) -> str:
    """Returns the keys that a verb reads, of the section behind --help-keys if there is one. Raises UserError."""
    if not _takes_keys(verb):
        raise UserError(
            f"{HELP_KEYS} is for verbs that run a configuration; see mindgrpo train {HELP_KEYS}."
        )
    from mindgrpo.config.reference import keys_by_section

    flag = next(word for word in words if word.partition("=")[0] == HELP_KEYS)
    after = words[words.index(flag) + 1 :][:1]
    section = flag.partition("=")[2] or next((word for word in after if word[:1] != "-"), "")
    return keys_by_section(shutil.get_terminal_size().columns, section, *_keys_of(verb))


def _takes_keys(verb: str) -> bool:
    return "[--key value" in USAGE[verb]


def _keys_of(verb: str) -> list[Callable[[str], bool]]:
    """Returns what tells the keys that a verb reads; nothing of one that reads all."""
    from mindgrpo.config.supervised import is_read

    return [is_read] if verb == "sft" else []


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the verb that `argv` names and returns the exit status: 2, and one sentence, where the input cannot work.

    Ends without a word where nobody reads what it prints any more, as in `mindgrpo config --reference | head`, and with
    a sentence where that has no room.
    """
    escape_what_cannot_be_shown()
    try:
        status = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except BrokenPipeError:
        if not _is_unread():
            raise
        _drop_what_is_printed(STANDARD_OUTPUTS)
        return 128 + signal.SIGPIPE
    except OSError as error:
        if not _is_full():
            raise
        _drop_what_is_printed(STANDARD_OUTPUTS[:1])
        return print_user_error(
            UserError(
                f"What is printed cannot be written ({os.strerror(error.errno or 0)}); make room, or redirect it."
            )
        )
    return status


def _drop_what_is_printed(outputs: Sequence[int]) -> None:
    """Leads outputs nowhere: what is still in their buffers would fail again when the interpreter ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output in outputs:
        os.dup2(nowhere, output)


def _is_full() -> bool:
    """Says whether standard output cannot be written: the buffer that could not be may be lost already."""
    try:
        os.write(STANDARD_OUTPUTS[0], b"\n")
    except OSError:
        return True
    return False


def _is_unread() -> bool:
    """Says whether standard output or standard error is a pipe that nobody reads any more."""
    waiting = select.poll()
    for output in STANDARD_OUTPUTS:
        waiting.register(output, select.POLLOUT)
    return any(events & select.POLLERR for _, events in waiting.poll(0))


def _run(words: list[str]) -> int:
    if not words or words[0] in HELP:
        print(usage())
        return 0 if words else 2
    verb, *rest = words
    try:
        if verb not in USAGE:
            raise UserError(f"'{verb}' is not a verb; use one of {', '.join(USAGE)}.")
        module = importlib.import_module(f"mindgrpo.cli.{MODULES.get(verb, verb)}")
        run, described = module.main, module.__doc__
        if verb in MODULES:
            run = getattr(module, verb)
            described = inspect.getdoc(run)
        own = rest[: rest.index("--")] if "--" in rest else rest
        if {*HELP} & {*own}:
            flags = module.parser().flags_help if hasattr(module, "parser") else ""
            print(_help(verb, str(described), flags))
            return 0
        if any(word.partition("=")[0] == HELP_KEYS for word in own):
            print(_help_keys(verb, own))
            return 0
        run(rest)
    except UserError as error:
        return print_user_error(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
