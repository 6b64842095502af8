"""Partial rollouts in engines and in whole runs on one rank: chunks = whole completions, resumed = uninterrupted.

Does not prove it of several ranks: the distributed case "partial" does.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_generators import (
    GROUP,
    KERNELS,
    MAX_PROMPT,
    MAX_TOKENS,
    SETTINGS,
    VERSION,
    generator_with,
    kernels_named,
    random_weights,
    requests_of,
    run_by,
)
from small_runs import NO_REFERENCE, STEPS, completions, make_inputs, model_bits, rows, run

from mindgrpo.algorithm.sample import STOPPED, PartialGroup, Request, Sample
from mindgrpo.backend.cpu.backend import CpuBackend
from mindgrpo.checkpoint.folders import folder_of
from mindgrpo.checkpoint.format import read_manifest
from mindgrpo.errors import UserError
from mindgrpo.rollout.conversations import Conversations
from mindgrpo.rollout.partial import PartialLimits, draw_partial

# Every third token stops, so that lengths differ.
STOPS = json.dumps(list(range(0, 384, 3)))
LENGTHS = ("--generate_config.sampling_config.max_tokens", "12")
LENGTHS += ("--generate_config.sampling_config.eos_token_id", STOPS)
CORRECTED = ("--rl_config.importance_sampling_correction", "token_truncate")
WHOLE = (*NO_REFERENCE, *LENGTHS, *CORRECTED, "--rl_config.dynamic_sampling", "false")
PARTIAL = (*WHOLE, "--rl_config.partial_rollout", "true")
SMALL_CHUNKS = (
    "--rl_config.partial_rollout_chunk",
    "2",
    "--rl_config.over_sampling_batch_size",
    "6",
)
TOOLS = ("--rl_config.tools", "calculator", "--rl_config.seq_length", "128")
TOOLS += ("--generate_config.max_prompt_length", "72")
TOOLS += ("--generate_config.sampling_config.max_tokens", "48")
SAVED = ("--rl_config.save_ckpt_interval", "1", "--rl_config.save_max_ckpt_num", "null")


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("penalty", [1.0, 1.5])
def test_the_likeliest_tokens_in_chunks_are_those_of_whole_completions(
    name: str, penalty: float
) -> None:
    backend = CpuBackend({})
    settings = replace(SETTINGS, temperature=0.0, repetition_penalty=penalty)
    longest = MAX_PROMPT + MAX_TOKENS
    generator = generator_with(
        random_weights(backend), backend, kernels_named(name), settings, max_prompt=longest
    )
    expected = run_by(generator, settings, requests_of(), 0)
    prompts = [request.prompt for request in requests_of()]
    groups = [PartialGroup.begun(i, prompt, 0, GROUP) for i, prompt in enumerate(prompts)]

    def complete(requests: Sequence[Request]) -> list[Sample]:
        return run_by(generator, settings, requests, 0)

    outcome = draw_partial(groups, PartialLimits(len(groups), 3, MAX_TOKENS, 1), 0, complete)
    rollout = outcome.rollout()
    assert outcome.rounds == -(-MAX_TOKENS // 3)
    for i, whole in enumerate(expected):
        np.testing.assert_array_equal(rollout.completion_ids[i], whole.tokens)
        atol = 0 if name == "native" else 1e-5
        np.testing.assert_allclose(rollout.generator_logps[i], whole.logps, atol=atol, rtol=0)
        assert rollout.finish_reasons[i] == whole.finish_reason
        assert set(rollout.weights_version[i].tolist()) == {VERSION}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("partial")
    make_inputs(folder)
    return folder


@pytest.fixture(scope="module")
def partial(inputs: Path) -> Path:
    return run(inputs, inputs / "partial", *PARTIAL, *SMALL_CHUNKS, *SAVED)


def test_completions_go_on_under_newer_weights(partial: Path) -> None:
    told = rows(partial)
    assert all(row["partial_rollout/unfinished_groups"] == 3 for row in told)
    assert any(row["partial_rollout/unfinished_tokens"] for row in told)
    assert max(row["partial_rollout/age_max"] for row in told) in (1, 2)
    assert any(0 < row["partial_rollout/stale_token_fraction"] < 1 for row in told)
    assert told[0]["prompts_used"] == 6 and told[-1]["prompts_used"] == 6 + 3 * (STEPS - 1)
    # Of tokens by the current weights alone: the rate is large, and the older ones differ.
    assert {row["logprob_gap/differing"] for row in told} == {0}
    assert any(abs(row["importance_weight/mean"] - 1) > 1e-3 for row in told)
    samples = [json.loads(line) for line in completions(partial)]
    runs = [row["weights_versions"] for row in samples]
    assert any(len(run) > 1 for run in runs)
    for row, versions in zip(samples, runs, strict=True):
        assert sum(count for _, count in versions) == len(row["token_ids"])


def test_a_partial_run_that_is_resumed_is_the_one_that_never_ended(
    inputs: Path, partial: Path
) -> None:
    again, kept = inputs / "again", 2
    shutil.copytree(partial, again)
    state = read_manifest(folder_of(again, kept)).state
    assert any(sample.versions for group in state.unfinished for sample in group.samples)
    for step in range(kept + 1, STEPS + 1):
        shutil.rmtree(folder_of(again, step))
    run(inputs, again, "--resume_training", *PARTIAL, *SMALL_CHUNKS, *SAVED)
    assert rows(again) == rows(partial)
    assert completions(again) == completions(partial)
    assert model_bits(again) == model_bits(partial)


TEMPLATE = (
    "{% if tools %}{{ tools[0].function.name }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }} "
    "{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
PARSER = """
def calls(text):
    return [{"name": "calculator", "arguments": {"expression": f"{len(text)}+1"}}] if len(text) % 2 else []
"""


def test_a_partial_run_of_conversations_that_is_resumed_is_the_one_that_never_ended(
    inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Random weights hardly ever draw the one token that ends a turn of the template.
    monkeypatch.setattr(Conversations, "_can_go_on", lambda _, s: s.finish_reason == STOPPED)
    (inputs / "own_parser.py").write_text(PARSER)
    words = (*PARTIAL, *SMALL_CHUNKS, *SAVED, *TOOLS)
    (inputs / "short.jinja").write_text(TEMPLATE)
    words += ("--rl_config.chat_template", str(inputs / "short.jinja"))
    words += ("--rl_config.tool_parser", f"{inputs}/own_parser.py:calls")
    whole = run(inputs, inputs / "conversations", *words)
    samples = [json.loads(line) for line in completions(whole)]
    by_turns = [(row["messages"], row["weights_versions"]) for row in samples]
    assert any(len(messages) > 2 and len(versions) > 1 for messages, versions in by_turns)
    again, kept = inputs / "conversations again", 2
    shutil.copytree(whole, again)
    state = read_manifest(folder_of(again, kept)).state
    stored = [sample for group in state.unfinished for sample in group.samples]
    assert any(json.loads(sample.messages) for sample in stored)
    for step in range(kept + 1, STEPS + 1):
        shutil.rmtree(folder_of(again, step))
    run(inputs, again, "--resume_training", *words)
    assert rows(again) == rows(whole)
    assert completions(again) == completions(whole)
    assert model_bits(again) == model_bits(whole)


def test_where_everything_is_whole_at_once_a_partial_run_is_the_plain_one(inputs: Path) -> None:
    at_once = (
        "--rl_config.partial_rollout_chunk",
        "12",
        "--rl_config.over_sampling_batch_size",
        "3",
    )
    plain = run(inputs, inputs / "plain", *WHOLE)
    same = run(inputs, inputs / "at_once", *PARTIAL, *at_once)
    assert model_bits(same) == model_bits(plain)
    found, expected = ([json.loads(line) for line in completions(path)] for path in (same, plain))
    without = [{k: v for k, v in row.items() if k != "weights_versions"} for row in found]
    assert without == expected


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["importance_sampling_correction", "none"], "so they would count as the policy's own"),
        (["dynamic_sampling", "true"], "does not go together with rl_config.dynamic_sampling"),
        (["over_sampling_batch_size", "7"], "set it to 6, or change rl_config.prompts_per_step"),
        (["partial_rollout", "false", "max_staleness", "1"], "so it has no effect"),
        (
            ["rollout_token_budget", "9", "updates_per_rollout", "5", "prompts_per_step", "4"],
            "lower rl_config.updates_per_rollout",
        ),
    ],
)
def test_settings_that_cannot_be_met_are_refused(
    inputs: Path, words: list[str], sentence: str
) -> None:
    pairs: list[Any] = [f"--rl_config.{w}" if i % 2 == 0 else w for i, w in enumerate(words)]
    with pytest.raises(UserError, match=sentence):
        run(inputs, None, *PARTIAL, *pairs)
