"""Tries rewards on a file of completions as a run does, without a model: `python -m mindgrpo score`.

With --environment it opens an environment for each seed or row, takes the turns of a conversation from standard input
or, with --model, from a model, and prints observations, rewards and the end.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mindgrpo.cli.arguments import Arguments, naming
from mindgrpo.cli.arguments import path as path_of
from mindgrpo.config import load_config, memory_bytes
from mindgrpo.data.examples import (
    ANSWER_KEYS,
    MAP_WHERE,
    Example,
    RowForm,
    is_missing,
    parse_key_map,
)
from mindgrpo.data.mindrecord import read_mindrecord
from mindgrpo.data.row_files import ListedRows, Row, Rows
from mindgrpo.data.sources import FOR_TRAINING, data_files, open_rows
from mindgrpo.errors import UserError, counted
from mindgrpo.monitor.console import number
from mindgrpo.rewards.builtin.numerals import GOLD_MARK
from mindgrpo.rewards.call import COMPLETIONS, COMPLETIONS_KEY, Columns, RewardResult
from mindgrpo.rewards.executors import Limits
from mindgrpo.rewards.messages import completion_messages
from mindgrpo.rewards.score import Scorer
from mindgrpo.rewards.scores import Report
from mindgrpo.run.named_sources import fetch_local
from mindgrpo.workers.protocol import CallLimits

STEP = 64
ROWS_SHOWN = 20
ANSWER_WIDTH, TEXT_WIDTH = 16, 32
# Keys of a run's completions.jsonl, and the names under which rewards get them.
OF_A_RUN = {
    "prompt": "prompts",
    "token_ids": "completion_ids",
    "length": "completion_lengths",
    "finish_reason": "finish_reasons",
}
PROMPT_KEYS = ("prompt", "question", "problem")

FLAGS = {
    "reward_config.verifier_function": "--reward",
    "reward_config.deadline": "--deadline",
    "reward_config.memory": "--memory",
    MAP_WHERE: "--map-keys",
    COMPLETIONS_KEY: "--completions",
}

ENVIRONMENT_FLAGS = {
    "rl_config.environment_deadline": "--deadline",
    "rl_config.environment": "--environment",
    "reward_config.memory": "--memory",
    "actor_config.load": "--model",
}


@dataclass(frozen=True)
class ScoreTrial:
    """`as_messages` are as in `Samples`."""

    completions: list[str]
    answers: list[str]
    columns: Columns
    note: str
    unanswered: str = ""
    as_messages: Columns = field(default_factory=dict)

    def steps(self) -> Iterator[ScoreTrial]:
        for start in range(0, len(self.completions), STEP):
            part = slice(start, start + STEP)
            columns, messages = (
                {name: values[part] for name, values in own.items()}
                for own in (self.columns, self.as_messages)
            )
            texts, answers = self.completions[part], self.answers[part]
            yield ScoreTrial(texts, answers, columns, self.note, as_messages=messages)


def parser() -> Arguments:
    parser = Arguments(prog="mindgrpo score", allow_abbrev=False)
    text = "a run's configuration, whose rewards (or environment), data and limits are those of flags that are left out"
    parser.add_argument("--config", type=path_of, action="append", metavar="FILE", help=text)
    text = "a built-in name, module:function or file.py:function; once for each reward"
    tried = parser.add_mutually_exclusive_group()
    tried.add_argument("--reward", action="append", help=text)
    text = "a sequence classifier's directory, or its name on a hub, as reward_config.model.load; several times"
    parser.add_argument("--reward-model", action="append", metavar="DIR", help=text)
    text = "as rl_config.environment; several times as a list there"
    tried.add_argument("--environment", action="append", help=text)
    text = "a file or directory of rows, one a sample; an environment may have a seed instead"
    parser.add_argument("--data", type=path_of, help=text)
    text = "with --environment: the row's column seed; several times for several conversations (0)"
    parser.add_argument("--seed", type=int, action="append", help=text)
    text = "with --environment: the model that plays, a run or a Hugging Face directory"
    parser.add_argument("--model", type=path_of, help=text)
    text = "with --model: as rl_config.max_turns"
    parser.add_argument("--max-turns", type=int, help=text)
    parser.add_argument("--chat-template", help="with --model: as rl_config.chat_template")
    text = "default: completion, or the answers themselves where there is no such column"
    parser.add_argument("--completion-column", help=text)
    text = "default: answer, solution or ground_truth; what follows #### in it is the gold answer"
    parser.add_argument("--answer-column", help=text)
    text = "what functions of your own get, as reward_config.completions (text)"
    parser.add_argument("--completions", choices=("text", "messages"), help=text)
    text = "NAME=KEY,...: names of columns, as rl_config.dataset_map_keys"
    parser.add_argument("--map-keys", metavar="NAME=KEY,...", help=text)
    parser.add_argument("--limit", type=int, default=STEP, help="rows to score; 0: all (64)")
    parser.add_argument("--deadline", type=float, help="as reward_config.deadline")
    parser.add_argument("--memory", help="as reward_config.memory")
    text = "tokens, for rewards by length (default: none)"
    parser.add_argument("--max-completion-length", type=int, help=text)
    return parser


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Returns the flags; those that are left out have the values of --config, or the defaults of a run."""
    flags, words = parser().parse_known_args(list(argv))
    if words and not flags.config:
        raise UserError(f"'{words[0]}' is no flag of mindgrpo score; see mindgrpo score --help.")
    config = load_config(flags.config or [], words).config
    rl, rewards = config.rl_config, config.reward_config
    models: list[dict[str, Any]] = [{"load": own} for own in flags.reward_model or ()]
    if not flags.reward and not models and not flags.environment:
        flags.reward, flags.environment = rewards.verifier_function, rl.environment
        models = [own.model_dump(exclude_unset=True) for own in rewards.models_by_key.values()]
    if flags.environment and flags.reward_model:
        raise UserError("--environment and --reward-model are both given; try one of them.")
    flags.reward_models = models
    if not flags.reward and not models and not flags.environment:
        raise UserError(
            "score needs something to try; give --reward NAME, --reward-model DIR, --environment NAME, or --config "
            "with one of them."
        )
    own: dict[str, Any] = {
        "split": None,
        "map_keys": ",".join(rl.dataset_map_keys),
        "deadline": rl.environment_deadline if flags.environment else rewards.deadline,
        "memory": rewards.memory,
        "completions": rewards.completions or "text",
        "max_turns": rl.max_turns,
        "chat_template": rl.chat_template,
    }
    if rl.dataset_file and not flags.seed and flags.data is None:
        own |= {"data": Path(rl.dataset_file), "split": rl.dataset_split}
    if flags.config:
        own["max_completion_length"] = config.generate_config.sampling_config.max_tokens
    for name, value in own.items():
        if getattr(flags, name, None) is None:
            setattr(flags, name, value)
    return flags


def main(argv: Sequence[str]) -> None:
    """Prints the table. Raises UserError."""
    flags = arguments(argv)
    try:
        limits = Limits(deadline=flags.deadline, memory=memory_bytes(flags.memory))
    except ValueError as error:
        raise UserError(f"--memory is {flags.memory!r}, but it {error}.") from None
    if flags.environment:
        talk(flags, limits)
        return
    if flags.data is None:
        flag = "--reward" if flags.reward else "--reward-model"
        raise UserError(f"{flag} needs rows to score; name a file or directory with --data.")
    with naming(FLAGS):
        rows = read_rows(flags.data, flags.limit, row_form(flags), flags.split)
    trial = trial_of(rows, flags.data, flags.completion_column, flags.answer_column)
    conversations = with_messages(trial, rows)
    if flags.completions == "messages":
        trial = conversations
    longest = flags.max_completion_length
    facts = {} if longest is None else {"max_completion_length": longest}
    with naming(FLAGS):
        models = _results_of_models(flags.reward_models, conversations)
        scorer = Scorer(flags.reward or [], limits=limits, facts=facts, may_be_empty=bool(models))
        try:
            scorer.dry_run(
                trial.completions,
                trial.answers,
                trial.columns,
                trial.unanswered,
                trial.as_messages,
            )
            print(f"{counted(len(rows), 'row')} of {flags.data}{trial.note}\n")
            show(trial, scorer, models)
        finally:
            scorer.close()


def _results_of_models(
    models: Sequence[Mapping[str, Any]], trial: ScoreTrial
) -> dict[str, tuple[float, RewardResult]]:
    if not models:
        return {}
    # Late, as functions need none of what it imports.
    from mindgrpo.cli.score_models import results_of

    asked, answered = trial.as_messages["prompts"], trial.as_messages[COMPLETIONS]
    return results_of(models, asked, trial.completions, answered)


def talk(flags: argparse.Namespace, limits: Limits) -> None:
    """Opens an environment for each seed, or each row of --data."""
    # Late, as rewards need none of what it imports.
    from mindgrpo.cli.score_environment import play, play_with_model

    if flags.data is not None and flags.seed:
        raise UserError("--seed and --data both say which rows there are; leave one of them out.")
    seeds = [{"question": f"seed {seed}", "seed": seed} for seed in flags.seed or [0]]
    with naming({**ENVIRONMENT_FLAGS, MAP_WHERE: "--map-keys"}):
        rows = seeds
        if flags.data is not None:
            rows = read_rows(flags.data, flags.limit, row_form(flags), flags.split)
        if flags.model is None:
            play(flags, rows, CallLimits(limits.deadline, limits.memory))
        else:
            play_with_model(flags, rows)


def row_form(flags: argparse.Namespace) -> RowForm:
    key_map = parse_key_map(list(filter(None, flags.map_keys.split(","))))
    # Of whatever model: rewards get images as the data has them.
    return RowForm(None, key_map, sees_images=True)


def read_rows(path: Path, limit: int, form: RowForm, split: str | None = None) -> list[Row]:
    """Reads the first `limit` rows, all for 0, of whatever a run reads. Raises UserError."""
    choice = replace(FOR_TRAINING, key="--data", name=split)
    path = fetch_local(str(path), "data", "--data", choice)
    files = data_files(path, choice, "--data")
    if files[0].suffix == ".mindrecord":
        stored: Rows = ListedRows([plain(each) for each in read_mindrecord(files[0], None)], path)
    else:
        stored = open_rows(files, binary=form.image_columns)
    located = list(stored.read(0, min(len(stored), max(0, limit) or len(stored))))
    for where, row in located:
        if not isinstance(row, dict):
            raise UserError(f"{where} is not an object; write keys and values in braces.")
    return [form.renamed(row, where) for where, row in located]


def plain(example: Example) -> Row:
    """Returns a row that the example can be made of."""
    return {**example.columns, "question": example.question, "answer": example.answer}


def trial_of(
    rows: Sequence[dict[str, Any]], path: Path, completion: str | None, answer: str | None
) -> ScoreTrial:
    if not rows:
        raise UserError(f"--data {path} holds no rows.")
    keys = list(dict.fromkeys(key for row in rows for key in row))
    note, has_answers = "", answer is not None or any(key in keys for key in ANSWER_KEYS)
    answer = answer or next((key for key in ANSWER_KEYS if key in keys), ANSWER_KEYS[0])
    if completion is None:
        completion = "completion" if "completion" in keys else answer
        if completion == answer:
            note = f"; without a column 'completion', {answer!r} is scored as if it were one"
    others = [key for key in ANSWER_KEYS if key in keys and key != answer]
    if others and has_answers:
        note += f"; gold answers are {answer!r}, not {' or '.join(map(repr, others))}"
    named = {"completion": completion} | ({"answer": answer} if has_answers else {})
    for option, name in named.items():
        if any(name not in row for row in rows):
            raise UserError(
                f"not every row of {path} has {name!r} (keys: {', '.join(keys)}); give the right "
                f"one with --{option}-column."
            )
    columns = {
        key: [row.get(key) for row in rows] for key in keys if key not in (answer, "completion")
    }
    for key, name in OF_A_RUN.items():
        if all(key in row for row in rows):
            columns.setdefault(name, columns.get(key, []))
    if completion == answer or "messages" not in columns:
        columns["messages"] = [
            [{"role": "assistant", "content": text_of(row[completion])}] for row in rows
        ]
    columns.setdefault("question", columns.get("problem", columns.get("prompts", [""] * len(rows))))
    return ScoreTrial(
        [text_of(row[completion]) for row in rows],
        [text_of(row.get(answer)).rpartition(GOLD_MARK)[2].strip() for row in rows],
        columns,
        note,
        "" if has_answers else "name the column of the answers with --answer-column",
    )


def text_of(value: Any) -> str:
    return "" if is_missing(value) else str(value)


def with_messages(trial: ScoreTrial, rows: Sequence[dict[str, Any]]) -> ScoreTrial:
    """Adds prompts and completions as messages: those of a row, and texts as messages of one turn."""
    asked = [next((row[key] for key in PROMPT_KEYS if row.get(key)), "") for row in rows]
    prompts = [
        [{"role": "user", "content": each}] if isinstance(each, str) else each for each in asked
    ]
    turns = zip(trial.completions, trial.columns["messages"], strict=True)
    completions = [completion_messages(text, messages) for text, messages in turns]
    return replace(trial, as_messages={"prompts": prompts, COMPLETIONS: completions})


def show(
    trial: ScoreTrial, scorer: Scorer, models: Mapping[str, tuple[float, RewardResult]]
) -> None:
    shown = scored_rows = 0
    names = [*scorer.names, *models]
    reports: dict[str, Report] = {}
    values: dict[str, list[float]] = {name: [] for name in names}
    print_row("row", "answer", "completion ends with", names, names)
    for step in trial.steps():
        scores = scorer.score(step.completions, step.answers, step.columns, step.as_messages)
        part = range(scored_rows, scored_rows + len(step.completions))
        scored_rows = part.stop
        for name, (weight, result) in models.items():
            scores = scores.with_function(name, result.part(part), weight)
        for row in range(min(len(step.completions), ROWS_SHOWN - shown)):
            shown += 1
            cells = [
                "failed" if row in scores.reports[name].failed else number(scored[row])
                for name, scored in scores.per_function.items()
            ]
            print_row(str(shown), step.answers[row], step.completions[row], cells, names)
        for name, report in scores.reports.items():
            reports[name] = reports[name].plus(report) if name in reports else report
            values[name] += scores.per_function[name].tolist()
    if len(trial.completions) > shown:
        print(f"... and {len(trial.completions) - shown} more")
    print()
    for name, report in reports.items():
        summarise(name, values[name], report)


def print_row(
    row: str, answer: str, completion: str, cells: Sequence[str], names: Sequence[str]
) -> None:
    texts = (
        " ".join(text[-4 * TEXT_WIDTH :].split())[-width:].ljust(width)
        for text, width in ((answer, ANSWER_WIDTH), (completion, TEXT_WIDTH))
    )
    scores = (cell.rjust(max(8, len(name))) for cell, name in zip(cells, names, strict=True))
    print("  ".join([row.rjust(4), *texts, *scores]))


def summarise(name: str, values: Sequence[float], report: Report) -> None:
    numbers = [value for value in values if value == value]
    mean = number(sum(numbers) / len(numbers) if numbers else None, ".4f")
    counts = ", ".join(f"{kind} {count}" for kind, count in report.counts.items() if count)
    print(
        f"{name}: mean {mean} of {len(numbers)}; {counts or 'no failures'}; {report.seconds:.2f} s"
    )
    if report.line:
        print(f"  {report.line}")
    for printed in report.printed.strip().splitlines()[:5]:
        print(f"  printed: {printed[:200]}")
