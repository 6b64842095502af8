"""Rewards for programs: the last code block of a completion, run against its tests.

Each run is a locked-down process (sandbox.py). Refuses machines that cannot lock one down.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from itertools import repeat
from typing import Any

from mindgrpo.errors import UserError
from mindgrpo.rewards.builtin import sandbox

FENCE = "```"
LANGUAGES = ("python", "python3", "py", "")
LONGEST_CODE = 100_000
WHERE = "reward_config.verifier_function"


def code_reward(
    completions: Sequence[str],
    answers: Sequence[str],
    test_cases: Sequence[Any] | None = None,
    test_list: Sequence[Any] | None = None,
    test_setup_code: Sequence[Any] | None = None,
    seconds: float = 5.0,
    memory_mb: int = 512,
) -> list[float | None]:
    """The share of tests that the last code block passes; 0.0 where there is no code.

    Tests come from the columns `test_cases` (a list of {"input": stdin, "output": stdout}, or {"inputs":
    [...], "outputs": [...]}) or `test_list` (asserts, after `test_setup_code`), as lists or as JSON; without
    either, the program must print the gold answer. All tests of a completion together have `seconds`;
    those that are not reached are failed. None where there is nothing to test with.
    """
    try:
        sandbox.check_available()
    except sandbox.SandboxUnavailable as error:
        raise UserError(
            f"code_reward cannot lock programs down on this machine: {error}; leave it out of {WHERE}"
        ) from error
    columns = [given if given is not None else repeat(None) for given in (test_cases, test_list)]
    setups = test_setup_code if test_setup_code is not None else repeat("")
    memory = memory_mb << 20
    return [
        score(
            text,
            tests_of(cases, "output"),
            tests_of(claims, ""),
            str(setup or ""),
            gold,
            seconds,
            memory,
        )
        for text, gold, cases, claims, setup in zip(completions, answers, *columns, setups)  # noqa: B905
    ]


def score(
    text: object,
    cases: list[Any],
    claims: list[Any],
    setup: str,
    gold: object,
    seconds: float,
    memory: int,
) -> float | None:
    if not cases and not claims:
        if not str(gold).strip():
            return None
        cases = [{"input": "", "output": str(gold)}]
    code = last_code_block(text)
    if code is None:
        return 0.0
    deadline = time.monotonic() + seconds
    passed = sum(passes(code, case, deadline, memory) for case in cases)
    if claims:
        left = max(0.1, deadline - time.monotonic())
        passed += sandbox.count_held(code, setup, [str(claim) for claim in claims], left, memory)[0]
    return passed / (len(cases) + len(claims))


def passes(code: str, case: dict[str, str], deadline: float, memory: int) -> bool:
    left = deadline - time.monotonic()
    if left <= 0:
        return False
    ending = sandbox.run_program(code, case["input"], left, memory)
    said = ending.output.decode("utf-8", "replace")
    return ending.status == 0 and lines_of(said) == lines_of(case["output"])


def lines_of(text: str) -> list[str]:
    """Without the white space at ends of lines and of the text, as judges compare."""
    return [line.rstrip() for line in text.strip().splitlines()]


def last_code_block(text: object) -> str | None:
    """The last closed block, or the last one if a cut text leaves it open; of a language that runs here."""
    if not isinstance(text, str) or FENCE not in text:
        return None
    parts = text[-2 * LONGEST_CODE :].split(FENCE)
    # Between the first and second fence stands a block, between the second and third prose, and so on.
    if len(parts) % 2 == 0:
        parts = parts[:-1] if len(parts) > 2 else parts
    for block in reversed(parts[1::2]):
        language, _, code = block.partition("\n")
        if language.strip().lower() in LANGUAGES and code.strip():
            return code if len(code) <= LONGEST_CODE else None
    return None


def tests_of(given: object, key: str) -> list[Any]:
    """Tests as a list, whether they came as one, as JSON, or as inputs beside outputs; else none."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            return []
    if isinstance(given, dict) and "inputs" in given and "outputs" in given:
        pairs = zip(given["inputs"], given["outputs"], strict=False)
        given = [{"input": one, "output": other} for one, other in pairs]
    if not isinstance(given, list):
        return []
    if not key:
        return given
    return [
        {"input": text_of(case.get("input", "")), "output": text_of(case[key])}
        for case in given
        if isinstance(case, dict) and key in case
    ]


def text_of(value: object) -> str:
    """Judges store input as text or as a list of its lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)
