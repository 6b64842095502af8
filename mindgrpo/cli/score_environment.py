"""Talks to an environment, by hand or with a model, and shows what it answers and rewards."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindgrpo.backend.connect import connect
from mindgrpo.cli.eval import run
from mindgrpo.config import config_with
from mindgrpo.config.command_line import model_in
from mindgrpo.environments.contract import ENVIRONMENT, Observation, Opening, Question
from mindgrpo.environments.mixture import Mixture
from mindgrpo.environments.pool import EnvironmentPool
from mindgrpo.errors import UserError, counted
from mindgrpo.grpo.build import runtime_settings
from mindgrpo.models.decoder_config import read_config
from mindgrpo.monitor.console import number
from mindgrpo.run.named_sources import fetch_local
from mindgrpo.workers.protocol import CallFailure, CallLimits

LONGEST_CONTEXT = 4096


def play(flags: Namespace, rows: Sequence[Mapping[str, Any]], limits: CallLimits) -> None:
    """Plays a conversation on each row, whose turns are lines of standard input. Raises UserError.

    The end of standard input ends a conversation and all that would follow.
    """
    mixture = Mixture.read(flags.environment)
    pool = EnvironmentPool(mixture, limits)
    try:
        for index, row in enumerate(rows):
            opening = Opening(row, f"0/{index}", f"0/{index}")
            name = mixture.names[mixture.number_of(opening)]
            print(f"environment {name}, {_title(row, index)}")
            if not _conversation(pool, name, index, opening):
                return
            print()
    finally:
        pool.end_all()
        pool.close()


def _conversation(pool: EnvironmentPool, name: str, sample: int, opening: Opening) -> bool:
    """Returns whether it came to its end."""
    observation, total, num_turns = _ask(pool, name, sample, opening), 0.0, 0
    while True:
        _show(observation.messages)
        if observation.is_done:
            print(f"done: reward {number(total)} in {counted(num_turns, 'turn')}")
            return True
        try:
            turn = input("assistant> ")
        except EOFError:
            print(f"\nnot done: reward {number(total)} in {counted(num_turns, 'turn')}")
            return False
        if not sys.stdin.isatty():
            print(turn)
        observation, num_turns = _ask(pool, name, sample, turn), num_turns + 1
        total += observation.reward
        print(f"reward {number(observation.reward)}")


def _ask(pool: EnvironmentPool, name: str, sample: int, question: Question) -> Observation:
    result = pool.ask({sample: question})[sample]
    if isinstance(result, CallFailure):
        call = "reset" if isinstance(question, Opening) else "step"
        raise UserError(
            f"environment {name}: {call} failed: {result.message}; correct the class or {ENVIRONMENT.key}."
        )
    return result


def play_with_model(flags: Namespace, rows: Sequence[Mapping[str, Any]]) -> None:
    """Has the model of --model play on each row. Raises UserError."""
    directory = str(fetch_local(model_in(str(flags.model)), "model", "--model"))
    length = min(LONGEST_CONTEXT, read_config(directory).max_position_embeddings)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "rows.jsonl")
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        values = {
            "actor_config.load": directory,
            "rl_config.environment": flags.environment,
            "rl_config.environment_deadline": flags.deadline,
            "rl_config.eval_dataset_file": str(data),
            "rl_config.max_turns": flags.max_turns,
            "rl_config.chat_template": flags.chat_template,
            "reward_config.memory": flags.memory,
            "generate_config.max_prompt_length": length // 2,
            "generate_config.sampling_config.max_tokens": length // 2,
        }
        config = config_with(None, values).config
        backend = connect(config.context.target, dict(os.environ), runtime_settings(config))
        outcomes, _ = run(config, 0, backend)
    for index, row in enumerate(outcomes[0].rows()):
        print(f"\n{_title(rows[index], index)}\n{row['prompt']}")
        for message in row["messages"]:
            _show([message])
            if "reward" in message:
                print(f"reward {number(message['reward'])}")
        print(f"{row['finish_reason']}: reward {number(row['rewards']['environment'])}")
    backend.close()


def _show(messages: Sequence[Mapping[str, Any]]) -> None:
    for message in messages:
        print(f"{message['role']}> {message['content']}")


def _title(row: Mapping[str, Any], index: int) -> str:
    return f"seed {row['seed']}" if "seed" in row else f"row {index + 1}"
