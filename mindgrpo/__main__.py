"""`python -m mindgrpo <verb>`: train, eval, check, plan, config, doctor, score, export, replay.

Prints a user's error as one sentence and ends with status 2. Refuses to do a verb's work itself.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from mindgrpo.cli.arguments import Arguments
from mindgrpo.cli.arguments import path as path_of
from mindgrpo.config import load_config, parse_command_line, require_run_keys, split_overrides
from mindgrpo.config.environment import check_environment
from mindgrpo.errors import UserError

USAGE = """usage: python -m mindgrpo VERB ...
  train   --config FILE [--key value ...]            train on the ranks that msrun started, or alone
  eval    --config FILE [--model RUN_OR_MODEL]       rewards, mean@n and pass@k of a model on held-out prompts
          [--data FILE] [--num_generations N]        ... with other data, several samples a prompt,
          [--greedy] [--samples N] [--step N]        ... the likeliest completions, fewer prompts, a run's noise
          [--output FILE.json] [--completions FILE]  ... kept as JSON, and what was answered as JSONL
  check   [--ranks N] --config FILE [--key value]    validate everything a run is given, without a device
  plan    --config FILE [--key value ...]            layouts, memory by phase, reshard traffic, batch arithmetic
          [--link_GB_per_s X]                        and the reshard's seconds, where a host's link carries X 10^9
          [--ranks_per_host N [--local_GB_per_s Y]]  bytes/s each way; N ranks a host (1), inside it Y (free)
  config  --explain KEY | --reference                one key of the configuration in words, or all of them
  doctor                                             what this machine lacks, with remedies
  score   --reward NAME_OR_FILE:FUNCTION --data FILE  tries a reward on a file, without a model
  export  --from RUN_OR_CHECKPOINT_OR_MODEL --output DIR [--dtype float32|bfloat16|float16]
          [--format huggingface|mindformers] [--model DIR]  (config.json and tokenizer for a checkpoint)
  replay  DUMP [--model DIR] [--output FILE.json]    makes an update again that a run skipped"""


def train(argv: Sequence[str]) -> None:
    path, overrides = parse_command_line(argv)
    loaded = load_config(path, overrides)
    require_run_keys(loaded)
    if os.environ.get("MS_ROLE") == "MS_SCHED":
        # msrun's scheduler runs this program too; it serves the cluster, if there is one, from here.
        from mindgrpo.backend.connect import connect

        context = loaded.config.context
        connect(context.device_target, context.transport, dict(os.environ))
        return
    from mindgrpo.trainer import GRPOTrainer

    GRPOTrainer(loaded, name=_run_name(path)).train()


def _run_name(path: Path) -> str:
    """A configuration called like every other is told apart by its folder."""
    return (
        path.parent.name
        if path.stem in ("grpo_config", "config") and path.parent.name
        else path.stem
    )


def evaluate(argv: Sequence[str]) -> None:
    from mindgrpo.cli.eval import evaluate

    evaluate(argv)


def _number_of_ranks(words: Sequence[str]) -> int:
    text = words[0] if words else ""
    if not text.isdecimal() or int(text) < 1:
        raise UserError(
            f"--ranks is '{text}', but must be a whole number from 1 up; write --ranks 8."
        )
    return int(text)


def check(argv: Sequence[str]) -> None:
    words = list(argv)
    world_size = None
    if words and words[0] == "--ranks":
        world_size = _number_of_ranks(words[1:2])
        words = words[2:]
    check_environment(os.environ)
    if words and words[0] == "eval":
        from mindgrpo.cli import eval as evaluation_run

        evaluation_run.check(words[1:], world_size or 1)
        return
    path, overrides = parse_command_line(words)
    loaded = load_config(path, overrides)
    require_run_keys(loaded)
    from mindgrpo.backend.targets import check_target
    from mindgrpo.monitor.run_directory import check_free
    from mindgrpo.run.host_limits import refuse_what_cannot_run
    from mindgrpo.run.preflight import prepare
    from mindgrpo.run.start import find_start

    context = loaded.config.context
    check_target(context.device_target, context.transport)
    if loaded.config.output_dir and loaded.config.rl_config.resume_training is False:
        check_free(loaded.config.output_dir)
    inputs = prepare(loaded.config, world_size)
    assert inputs.scorer is not None
    try:
        refuse_what_cannot_run(inputs.plan, world_size)
        find_start(loaded.config, inputs, _run_name(path))
        inputs.check_rewards()
    finally:
        inputs.scorer.close()


def plan(argv: Sequence[str]) -> None:
    from mindgrpo.cli.plan import print_plan, read_links

    links, rest = read_links(split_overrides(argv))
    path, overrides = parse_command_line([f"{flag}={value}" for flag, value in rest])
    print_plan(load_config(path, overrides), links)


def config(argv: Sequence[str]) -> None:
    from mindgrpo.config.reference import explain, reference

    words = list(argv)
    if words[:1] == ["--explain"] and len(words) > 1:
        print("\n\n".join(explain(name) for name in words[1:]))
    elif words == ["--reference"]:
        print(reference())
    else:
        raise UserError(
            f"config takes --explain KEY or --reference, but was given '{' '.join(words)}'; write "
            "python -m mindgrpo config --explain rl_config.beta."
        )


def doctor(argv: Sequence[str]) -> None:
    from mindgrpo.run.machine_checks import findings

    if argv:
        raise UserError(f"doctor takes no arguments, but was given '{argv[0]}'.")
    found = findings()
    print("\n".join(str(finding) for finding in found))
    if any(finding.level == "error" for finding in found):
        sys.exit(1)


def export(argv: Sequence[str]) -> None:
    from mindgrpo.cli.export import FORMATS, convert
    from mindgrpo.grpo.hf_export import MAX_SHARD_BYTES

    parser = Arguments(prog="python -m mindgrpo export")
    parser.add_argument("--from", dest="source", required=True, type=path_of)
    parser.add_argument("--output", required=True, type=path_of)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--max_shard_bytes", type=int, default=MAX_SHARD_BYTES)
    parser.add_argument("--format", default=FORMATS[0], choices=FORMATS)
    parser.add_argument("--model", type=path_of)
    given = parser.parse_args(list(argv))
    shards = given.max_shard_bytes
    for file in convert(given.source, given.output, given.dtype, shards, given.format, given.model):
        print(file)


def score(argv: Sequence[str]) -> None:
    from mindgrpo.cli.score import try_rewards

    try_rewards(argv)


def replay(argv: Sequence[str]) -> None:
    from mindgrpo.cli.replay import replay as replay_dump

    replay_dump(argv)


VERBS: dict[str, Callable[[Sequence[str]], None]] = {
    "train": train,
    "eval": evaluate,
    "check": check,
    "plan": plan,
    "config": config,
    "doctor": doctor,
    "export": export,
    "score": score,
    "replay": replay,
}


def usage_of(verb: str) -> str:
    """The verb's lines of USAGE."""
    found = re.search(rf"^  {verb} .*(?:\n     .*)*", USAGE, re.MULTILINE)
    assert found is not None
    return f"usage: python -m mindgrpo\n{found[0]}"


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if argv else 2
    try:
        verb = VERBS.get(argv[0])
        if verb is None:
            raise UserError(f"'{argv[0]}' is no verb; use one of {', '.join(VERBS)}.")
        if argv[1:2] in (["-h"], ["--help"]):
            print(usage_of(argv[0]))
            return 0
        verb(argv[1:])
    except UserError as error:
        print(f"mindgrpo: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
